"""The admissible values of a call, stated beside its expected output, so that a reader without this package can judge.

For each output three tensors in the output's dtype and shape: ``low``, ``high`` and ``free`` (uint8). An element is
right when it is free; or when the expected value is NaN and it is NaN; or when ``low <= element <= high``. -0 equals
+0. Codes of quantisers are compared as values and hold for the *expected* scale: a library that publishes another
admissible scale is judged by the contract, not by this table.

    products, logits, layers   the sound interval of the contract's numerics on an arch (:mod:`oracle.bounds`)
    quantisers                 the sets of the reference's recipe (:mod:`oracle.bounds.quantiser`)
    activation                 the interval of a device's silu, rounded as the contract says
    scales, casts              the ends that the contract admits
    layouts                    the expected bits themselves, with padding free where it is unspecified

Not covered: contracts whose right answers are no interval around one product (a partition of work, an order of experts,
operands that the kernel quantises itself, a routing weight of either dtype); they have none (:func:`intervals` gives an
empty mapping) and only :func:`oracle.judge` decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.bounds import admissible
from oracle.bounds.engines import exact
from oracle.bounds.quantiser import code_of_ordinal, code_set, scale_set
from oracle.errors import NumericsError
from oracle.numbers.formats import FP16, FP32, decode, of_dtype
from oracle.numbers.quantize import prepare
from oracle.numbers.rounding import Overflow, Rounding, round_to, to_dtype
from oracle.numbers.ue8m0 import ceil_power
from oracle.routines.base import Contract
from oracle.routines.layouts.contract import LayoutContract, SwizzleScale
from oracle.routines.layouts.shards import ProductsOfScales
from oracle.routines.logits.contract import NUMERICS as LOGITS
from oracle.routines.logits.contract import LogitsContract
from oracle.routines.moe.activation import SiluAndMul
from oracle.routines.moe.contract import BLOCK_NUMERICS as BLOCKWISE
from oracle.routines.moe.contract import TENSOR_NUMERICS as TENSORWISE
from oracle.routines.moe.contract import MoeFp8
from oracle.routines.moe.moe_tensor import NUMERICS as TENSOR_MOE_NUMERICS
from oracle.routines.moe.moe_tensor import TensorMoe
from oracle.routines.products.contract import ProductContract
from oracle.routines.products.flashinfer import Fp8BlockscaleGemmSm90
from oracle.routines.products.linear import CalcDiff, Fp8LinearOp
from oracle.routines.quantisers.contract import QuantiserContract
from oracle.routines.quantisers.scale_casts import CeilToUe8m0, PerTensorDequantize
from oracle.truth.gemm import rounded
from oracle.truth.layout import swizzle_scale
from oracle.verdict.compare import Admissible
from oracle.verdict.products import interval_of

ARCHES = ("cpu", "sm90", "gfx942")
TENSOR_MOE = {arch: TENSOR_MOE_NUMERICS[arch] for arch in ("cpu", "sm100")}
LINEAR = {"cpu": "ieee32.any", "sm90": "sm90.chain"}
EXACT = "bits"
"""The arch of what is the same on every machine."""


@dataclass(frozen=True)
class Range:
    """Admissible elements of one output: ``low`` and ``high`` in its dtype and shape, ``free`` uint8."""

    low: Tensor
    high: Tensor
    free: Tensor


Ranges = dict[str, Range]


@dataclass(frozen=True)
class Sets:
    """The ranges of every output under one arithmetic, which ``numerics`` names."""

    numerics: str
    outputs: Ranges


def expected(contract: Contract, inputs: Mapping[str, Tensor], **options: object) -> dict[str, Tensor]:
    """The reference's outputs in the dtypes that a kernel returns, by name (a lone output is ``out``)."""
    if isinstance(contract, LogitsContract):
        truth = contract.admissible(inputs, arch="cpu", **options)
        value = torch.where(_free(truth, truth.expected).bool(), torch.nan, truth.expected)
        return {"out": _as(value, torch.float32)}
    made = contract.reference(inputs, **options)
    return {"out": made} if isinstance(made, Tensor) else dict(made)


def intervals(
    contract: Contract, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], **options: object
) -> dict[str, Sets]:
    """What is admissible around :func:`expected`, for each arch whose numerics differ (``bits``: for all alike).

    Raises
    ------
    OracleError
        The call is wrong.
    """
    if isinstance(contract, Fp8BlockscaleGemmSm90) and inputs["input"].dtype == torch.bfloat16:
        return {}  # whichever codes the kernel's own quantiser may give: only the contract holds that set
    if isinstance(contract, ProductContract):
        return _products(contract, inputs, outputs["out"], options)
    if isinstance(contract, LogitsContract):
        logits = {a: _range(contract.admissible(inputs, arch=a, **options), torch.float32) for a in ARCHES[:2]}
        return {arch: Sets(LOGITS[arch][0], {"out": found}) for arch, found in logits.items()}
    if isinstance(contract, Fp8LinearOp):
        return {a: Sets(n, {"out": _linear(contract, inputs, outputs["out"], n, options)}) for a, n in LINEAR.items()}
    if isinstance(contract, TensorMoe):
        made = {a: contract.admissible(inputs, arch=a, **options) for a in TENSOR_MOE}
        alone = {a: _range(sets, torch.bfloat16) for a, sets in made.items() if sets is not None}
        return {a: Sets(TENSOR_MOE[a], {"out": found}) for a, found in alone.items()}
    if isinstance(contract, MoeFp8):
        dtype, table = outputs["out"].dtype, TENSORWISE if inputs["w13_scale"].dim() == 1 else BLOCKWISE
        layers = {a: _range(contract.admissible(inputs, dtype, arch=a, **options), dtype) for a in ARCHES[:2]}
        return {arch: Sets(table[arch], {"out": found}) for arch, found in layers.items()}
    same = _alike(contract, inputs, outputs, options)
    return {} if same is None else {EXACT: Sets("the same on every machine", same)}


# --- by arch ------------------------------------------------------------------------------------------------


def _products(
    contract: ProductContract, inputs: Mapping[str, Tensor], out: Tensor, options: Mapping[str, object]
) -> dict[str, Sets]:
    parts, shape = contract.parts(inputs), out.shape
    flat = out.reshape(-1, shape[-1])
    found = {}
    for arch in ARCHES:
        if arch not in contract.numerics:
            continue
        try:
            name = contract.admitted(arch, None, parts, out.dtype)[0]
        except NumericsError:
            continue  # that arch does not multiply these dtypes
        empty = torch.full(flat.shape, torch.nan, dtype=torch.float64, device="cpu")
        low, high, open_ = empty, empty.clone(), torch.ones(flat.shape, dtype=torch.bool, device="cpu")
        for part in parts:
            value = exact(part.product)
            sets = admissible(value, rounded(part.product, value, out.dtype), interval_of(part.product, name))
            rows = slice(None) if part.rows is None else part.rows
            low[rows], high[rows] = sets.low, sets.high
            open_[rows] = False if sets.open is None else sets.open
        found[arch] = Sets(name, {"out": _range(Admissible(low, high, decode(flat), open=open_), out.dtype, shape)})
    return found


def _linear(
    contract: Fp8LinearOp, inputs: Mapping[str, Tensor], out: Tensor, name: str, options: Mapping[str, object]
) -> Range:
    resolved = contract.check(inputs, options)
    product = contract.products(inputs, resolved)[0][1]
    sets, _ = contract.admissible(inputs, resolved, product, out.dtype, name)
    return _range(sets, out.dtype, out.shape)


# --- the same everywhere ------------------------------------------------------------------------------------


def _alike(
    contract: Contract, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], options: Mapping[str, object]
) -> Ranges | None:
    if isinstance(contract, SwizzleScale):
        resolved = contract.check(inputs, options)
        scale = inputs["scale"].view(torch.uint8)
        marked = (swizzle_scale(torch.zeros_like(scale), tile=str(resolved["tile"]), fill=f) for f in (0, 1))
        zeros, ones = marked
        out = outputs["out"]
        return {"out": Range(out, out, (zeros != ones).to(torch.uint8))}
    if isinstance(contract, LayoutContract):
        return {name: _exactly(tensor) for name, tensor in outputs.items()}
    if isinstance(contract, QuantiserContract):
        return _quantiser(contract, inputs, outputs, options)
    if isinstance(contract, PerTensorDequantize):
        product = decode(inputs["q"]) * decode(inputs["inv_scale"]).reshape(())
        once, twice = _nearest(product, torch.float16), outputs["out"]
        low, high = (edge(decode(once), decode(twice)) for edge in (torch.minimum, torch.maximum))
        return {"out": _range(Admissible(low, high, decode(twice)), torch.float16)}
    if isinstance(contract, CeilToUe8m0):
        magnitude, due = decode(inputs["x"]).abs(), decode(outputs["out"])
        low = ceil_power(magnitude, byte_low=0, inf_byte=254, nan_byte=254)
        high = torch.where(magnitude > 2.0**127, torch.inf, due)
        return {"out": _range(Admissible(low, high, due, open=torch.isnan(magnitude)), torch.float32)}
    if isinstance(contract, ProductsOfScales):
        widths = {n: 2.0**-22 if n in contract.quotients else 0.0 for n in outputs}
        exactly = contract.formula(inputs)
        ends = {n: (v - widths[n] * v.abs(), v + widths[n] * v.abs()) for n, v in exactly.items()}
        free = {n: torch.zeros(v.shape, dtype=torch.uint8, device="cpu") for n, v in exactly.items()}
        rounded_ends = {n: tuple(_nearest(edge, torch.float32) for edge in ends[n]) for n in outputs}
        return {n: Range(rounded_ends[n][0], rounded_ends[n][1], free[n]) for n in outputs}
    if isinstance(contract, SiluAndMul):
        return {"out": _range(contract.admissible(inputs, **options), outputs["out"].dtype)}
    if isinstance(contract, CalcDiff):
        width = 4 * (inputs["x"].numel() + 4) * 2.0**-53
        due = outputs["out"]
        return {"out": Range(due - width, due + width, torch.zeros((), dtype=torch.uint8, device="cpu"))}
    return None


def _quantiser(
    contract: QuantiserContract,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    options: Mapping[str, object],
) -> Ranges:
    resolved = contract.check(inputs, options)
    recipe = contract.declared(inputs, resolved)[0]
    prepared = prepare(inputs["x"], scale=inputs.get("scale"), scale_ub=inputs.get("scale_ub"))
    scales = scale_set(prepared, recipe)
    codes = code_set(prepared, recipe, scales.expected)
    own = prepared.codes(recipe)  # the recipe's own bits are admissible too
    low, high = (code_of_ordinal(edge) for edge in (codes.low, codes.high))
    q = outputs["q"]
    free = codes.free.to(torch.uint8)
    as_q = [torch.where(codes.nan, own, edge).view(q.dtype) for edge in (low, high)]
    edges = [decode(edge) for edge in as_q]
    mine = decode(own.view(q.dtype))
    edges = [torch.minimum(edges[0], mine), torch.maximum(edges[1], mine)]
    ends = [_floor32(scales.low, up=True), _floor32(scales.high, up=False)]
    dtype = outputs["scale"].dtype
    published = [contract.publish(_as(torch.where(torch.isnan(scales.expected), torch.nan, e), dtype), resolved)
                 for e in ends]  # fmt: skip
    known = torch.zeros(outputs["scale"].shape, dtype=torch.uint8, device="cpu")
    low_scale, high_scale = (p.reshape(outputs["scale"].shape) for p in published)
    return {
        "q": Range(_as(edges[0], q.dtype), _as(edges[1], q.dtype), free),
        "scale": Range(low_scale, high_scale, known),
    }


# --- making ranges ------------------------------------------------------------------------------------------


def _range(sets: Admissible, dtype: torch.dtype, shape: torch.Size | None = None) -> Range:
    """Edges in the output's dtype, on whose grid they lie already; a NaN that is due stays NaN at both."""
    due = torch.isnan(sets.expected)
    free = _free(sets, sets.expected)
    hidden = free.bool()
    low = torch.where(hidden, -torch.inf, torch.where(due, torch.nan, sets.low))
    high = torch.where(hidden, torch.inf, torch.where(due, torch.nan, sets.high))
    made = Range(_as(low, dtype), _as(high, dtype), free)
    if shape is None:
        return made
    return Range(made.low.reshape(shape), made.high.reshape(shape), made.free.reshape(shape))


def _free(sets: Admissible, like: Tensor) -> Tensor:
    free = torch.zeros(like.shape, dtype=torch.bool, device="cpu")
    if sets.open is not None:
        free |= sets.open
    if sets.specified is not None:
        free |= ~sets.specified
    return free.to(torch.uint8)


def _exactly(tensor: Tensor) -> Range:
    return Range(tensor, tensor, torch.zeros(tensor.shape, dtype=torch.uint8, device="cpu"))


def _as(value: Tensor, dtype: torch.dtype) -> Tensor:
    return to_dtype(value, dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF if dtype.itemsize > 1
                    else Overflow.SATURATE)  # fmt: skip


def _nearest(value: Tensor, dtype: torch.dtype) -> Tensor:
    fmt = {torch.float16: FP16, torch.float32: FP32}.get(dtype) or of_dtype(dtype)
    return _as(round_to(value, fmt, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF), dtype)


def _floor32(edge: Tensor, *, up: bool) -> Tensor:
    """The outermost float32 inside an edge of float64."""
    return round_to(edge, FP32, rounding=Rounding.UP if up else Rounding.DOWN, overflow=Overflow.INF)
