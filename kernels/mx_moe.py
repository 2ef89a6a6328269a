"""Layers of experts in NVFP4, MXFP4 and MXFP8, as the libraries compute them: one row for each layer, one verb for all.

    q, s = quantise(x)             each expert its own rows, in NVFP4 under a global scale of its own
    h    = alpha1[e] (q, s) @ w13[e].T + b1[e]
    act  = silu(gate) * up, or with parameters of each expert; rounded as the row says, then quantised
    y    = alpha2[e] act @ w2[e].T + b2[e]
    out  = the sum over a token's experts of weight * y

Weights are codes of E2M1, two a byte, or of E4M3; their scale bytes lie in 128x4 tiles for each expert, as
:func:`kernels.swizzle_scale` writes them once when a checkpoint is loaded and :func:`kernels.from_blocked` gives them
back. On Blackwell FlashInfer's fused layer is called where a row has one and serves the call; else rows are sorted by
expert and multiplied by grouped products, whichever backend serves these.

Not covered: weights in bfloat16, routing, communication between ranks, layers of FlashInfer's CuTe DSL (their input has
one global scale for all experts, and their first weight interleaves up and gate rows in runs of 64).

NaN in a row makes the row of its token NaN.
Source: vLLM (cutlass_moe), FlashInfer (cutlass_fused_moe, cute_dsl_fused_moe), as :data:`LAYERS` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import checks
from . import platform as machines
from .adapters import Adapter, Inputs, Options
from .backends.declaration import Rows, Scales
from .errors import OptionError, ShapeError, shown
from .layout import align, swizzle_scale
from .moe_layer import routed, scattered, sorted_rows, without_padding
from .moe_pipelines import EARLY, combined, slots
from .mx import mxfp8_quantize
from .mx_blocks import MX_BLOCK, NVFP4_BLOCK, size_of
from .mx_experts import HEIGHT, expert_rows
from .mx_products import HIGH, TIGHT, grouped_product, run_product
from .operators import empty
from .routes import route
from .support import BLACKWELL
from .verbs import serve, verb

E4M3, UE8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


@dataclass(frozen=True)
class Layer:
    """One layer; ``combine`` has the usual way first (:data:`kernels.moe_pipelines.COMBINE`).

    Attributes
    ----------
    rows : how the input and the intermediate are quantised, ``nvfp4``, ``mxfp4`` or ``mxfp8``.
    packed : codes of the weights are those of E2M1.
    up_first : up rows of ``w13`` come before gate rows.
    wide : the first product stays in float32 until it is quantised.
    fused : the operation of the plan of a library's fused layer, or "".
    narrow : on Blackwell, whose libraries write bf16, a product is rounded before its bias is added as well.
    """

    rows: str
    combine: tuple[str, ...]
    packed: bool = True
    up_first: bool = True
    wide: bool = False
    fused: str = ""
    narrow: bool = False

    @property
    def weights(self) -> str:
        """The format of the weights (:data:`kernels.mx_blocks.FORMATS`)."""
        return "nvfp4" if self.rows == "nvfp4" else "mxfp4" if self.packed else "mxfp8"

    @property
    def mixed(self) -> bool:
        """Whether rows of eight bits meet weights of four, which FlashInfer's grouped product multiplies."""
        return self.rows == "mxfp8" and self.packed

    @property
    def each(self) -> int:
        """Codes of a weight in a byte."""
        return 2 if self.packed else 1

    @property
    def width(self) -> int:
        """Codes of a row that share a scale."""
        return NVFP4_BLOCK if self.rows == "nvfp4" else MX_BLOCK


_STORED, _WEIGHTED, _SCALED = ("stored", "atomic"), ("weighted", "atomic"), ("scaled",)
OWN: Mapping[str, Layer] = {
    "mxfp8": Layer("mxfp8", ("stored",), packed=False, up_first=False, narrow=True),
    "mxfp4": Layer("mxfp4", ("stored",), up_first=False, narrow=True),
    "mxfp8_mxfp4": Layer("mxfp8", ("stored",), up_first=False, narrow=True),
    "nvfp4": Layer("nvfp4", ("stored",), up_first=False, narrow=True),
}
"""Layers that no library has: products in bf16, weighted and added in float32, rounded once."""
LAYERS: Mapping[str, Layer] = {
    **OWN,
    "cutlass_moe_fp4": Layer("nvfp4", _SCALED, up_first=False),
    "cutlass_moe_mxfp4": Layer("mxfp4", _SCALED, up_first=False),
    "cutlass_fused_moe_nvfp4": Layer("nvfp4", _STORED, fused="moe_nvfp4"),
    "cutlass_fused_moe_mxfp8_mxfp4": Layer("mxfp8", _STORED, fused="moe_mxfp8_mxfp4"),
    "cutlass_fused_moe_mxfp8": Layer("mxfp8", _STORED, packed=False, fused="moe_mxfp8"),
    "cute_dsl_fused_moe_nvfp4": Layer("nvfp4", _WEIGHTED, wide=True),
    "cute_dsl_fused_moe_mxfp8_mxfp4": Layer("mxfp8", _WEIGHTED, wide=True),
}
"""By the name of the contract, and :data:`OWN`."""
TILE = 4
"""What the rows of an expert begin at a multiple of in FlashInfer's grouped product."""


# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def _by(layer: str) -> Adapter:
    """One layer; scale bytes come in rows there."""

    def run(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
        arguments: dict[str, Any] = {**inputs, **options}
        arguments["expert_offset"] = arguments.pop("first_expert", 0)
        if arguments.get("combine") is not None:
            arguments["combine"] = arguments["combine"].lower()
        for name in ("w13_scale", "w2_scale"):
            arguments[name] = swizzle_scale(arguments[name])
        return verb(**arguments, layer=layer)

    return run


def _layer_fake(x: Tensor, *rest: object, **named: object) -> Tensor:
    asked = [value for value in (*rest, *named.values()) if isinstance(value, torch.dtype)]
    return empty(*x.shape, like=x, dtype=asked[0] if asked else x.dtype)


# --- the verb --------------------------------------------------------------------------------------------------------


@verb(fake=_layer_fake)
def moe_block_experts(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    layer: str,
    a1_gscale: Tensor | None = None,
    a2_gscale: Tensor | None = None,
    alpha1: Tensor | None = None,
    alpha2: Tensor | None = None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    gates: Tensor | None = None,
    expert_map: Tensor | None = None,
    expert_offset: int = 0,
    combine: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The experts of a layer by one of :data:`LAYERS`.

    ``expert_map`` ``[E_global]`` integers.

    Parameters
    ----------
    x
        ``[T, H]`` bf16, f16 or f32.
    w13, w2
        ``[E, 2I, H/2]`` and ``[E, H, I/2]`` uint8, two codes each, or ``[E, 2I, H]`` and ``[E, H, I]`` E4M3. Rows may
        be longer, by codes of zero.
    w13_scale, w2_scale
        uint8 ``[E, S13]`` and ``[E, S2]``: E4M3 scales of 16 or E8M0 scales of 32, each weight flat in 128x4 tiles
        (:func:`kernels.swizzle_scale`).
    topk_weights, topk_ids
        ``[T, top_k]`` float32 and integer; ids are global, -1 and other ranks' experts contribute nothing.
    a1_gscale, a2_gscale
        ``[E]`` float32, about 2688/amax of the input and of the intermediate, of layers in NVFP4.
    alpha1, alpha2
        ``[E]`` float32 factors of the products; None for 1.
    b1, b2
        ``[E, 2I]`` and ``[E, H]`` bf16, f16 or f32, in the order of the rows of the weights; None for none.
    gates
        ``[E, 3]`` float32: alpha, beta and limit of ``g / (1 + exp(-alpha g)) * (u + beta)``, ``g`` clamped from above
        and ``u`` on both sides; None for ``silu(g) * u``.
    expert_map
        Local expert of each global one, or -1; else this rank holds ``expert_offset`` and those after it.
    combine
        Another way of the layer to weight and add; None: the usual one.
    out_dtype
        The dtype of the output; default: that of ``x``. Ways that add in bf16 give its values.

    Returns
    -------
    Tensor
        ``[T, H]`` of ``out_dtype``; no tokens give no rows.

    Raises
    ------
    OptionError, ShapeError, DtypeError, InputError, DeviceError, LayoutError
    """
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.fp8_kernels.moe_block_experts(
            x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, layer, a1_gscale, a2_gscale, alpha1, alpha2, b1,
            b2, gates, expert_map, expert_offset, combine, out_dtype,
        )  # fmt: skip  # the parameters in their order
        return out
    row = layer_of(layer)
    if combine is not None and combine not in row.combine:
        raise OptionError(f"combine={shown(combine)}; this layer has {', '.join(row.combine)}")
    experts, hidden, inner = _extents(row, x, w13, w13_scale, w2, w2_scale)
    routed(x.shape[0], topk_weights, topk_ids)
    checks.same_device(x=x, topk_weights=topk_weights, topk_ids=topk_ids)
    each = {"a1_gscale": a1_gscale, "a2_gscale": a2_gscale, "alpha1": alpha1, "alpha2": alpha2}
    for name, values, due in (
        *((name, values, (experts,)) for name, values in each.items()),
        ("b1", b1, (experts, 2 * inner)),
        ("b2", b2, (experts, hidden)),
        ("gates", gates, (experts, 3)),
    ):
        if values is not None:
            dtypes = checks.WIDE if name in ("b1", "b2") else (torch.float32,)
            checks.operand(name, values, due, "of each expert", *dtypes)
            checks.same_device(x=x, **{name: values})
    for name in ("a1_gscale", "a2_gscale"):
        if (each[name] is None) is (row.rows == "nvfp4"):
            raise OptionError(f"{name} is of layers in NVFP4, and of no others; {layer} is in {row.rows}")
    dtype = checks.out_dtype(out_dtype or x.dtype)
    if not x.shape[0]:
        return x.new_zeros(x.shape, dtype=dtype)
    ids = topk_ids.long()
    if expert_map is not None:
        ids = torch.where(ids >= 0, checks.rank("expert_map", expert_map, 1).long()[ids.clamp(min=0)], -1)
    checks.not_negative("expert_offset", expert_offset)
    local = ids - expert_offset
    way = combine or row.combine[0]
    scales = w13_scale, w2_scale
    as_wide = tuple(w.shape[2] * row.each for w in (w13, w2)) == (hidden, inner)
    if row.fused and x.dtype is torch.bfloat16 and as_wide and machines.current_machine().sm in BLACKWELL:
        bias = None if b1 is None and b2 is None else "float32"
        run = route(
            row.fused, x.device, ("n", inner), ("k", hidden), ("a_dtype", "bfloat16"), ("b_dtype", "uint8"),
            ("bias", bias),
        )  # fmt: skip  # fields of a problem
        if run.declares("moe_blocks"):
            local = torch.where((local >= 0) & (local < experts), local, -1)
            codes, memory = (x, None) if row.rows == "nvfp4" else mxfp8_quantize(x)
            made = run.moe_blocks(
                row.fused, codes, memory, (w13, w2), scales, topk_weights, local, (a1_gscale, a2_gscale),
                (alpha1, alpha2), gates, way,
            )  # fmt: skip  # operands in their order
            return made.to(dtype)
    return _by_products(
        row, x, (w13, w2), scales, topk_weights, local, (a1_gscale, a2_gscale), (alpha1, alpha2), (b1, b2), gates, way,
        dtype,
    )  # fmt: skip  # operands in their order


for _name, _layer in LAYERS.items():
    if _name in OWN:
        continue
    serve(_name, "mx_product", moe_block_experts, _by(_name), (_layer.fused,) if _layer.fused else ())


# --- by grouped products ----------------------------------------------------------------------------------------------

Both = tuple[Tensor | None, Tensor | None]


def _by_products(
    row: Layer,
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    topk_weights: Tensor,
    local: Tensor,
    globals_: Both,
    factors: Both,
    biases: Both,
    gates: Tensor | None,
    way: str,
    dtype: torch.dtype,
) -> Tensor:
    """Rows sorted by expert, quantised, multiplied, activated, quantised, multiplied; then weighted and added."""
    experts, tile = weights[0].shape[0], TILE if row.mixed else 1
    rows = align(local.numel() + experts * (tile - 1), tile)
    target, groups, ends = sorted_rows(local, experts, 0, tile, rows)
    starts = torch.nn.functional.pad(ends, (1, 0))
    spread = slots(x, target, rows)
    of = groups.clamp(min=0).long()
    multiply = partial(_product, row, starts, groups, of)
    early = way in EARLY
    h = multiply(spread, weights[0], scales[0], globals_[0], factors[0], biases[0], row.wide)
    second = weights[1], scales[1], globals_[1], factors[1], biases[1], early
    if gates is None and not (row.wide or row.up_first) and h.shape[1] % (2 * row.width) == 0:
        y = multiply(h, *second, gated=True)
    else:
        y = multiply(_activated(row, h, None if gates is None else gates[of]), *second)
    if early:
        y = (y * scattered(topk_weights.reshape(-1, 1), target, rows)).to(torch.bfloat16)
    return combined(y, topk_weights, target, way, dtype).to(dtype)


def _activated(row: Layer, h: Tensor, gates: Tensor | None) -> Tensor:
    """The intermediate ``[R, I]`` of the first product, float32 or bf16; ``gates`` ``[R, 3]``."""
    gate, up = h.to(torch.float32).chunk(2, dim=1)[:: -1 if row.up_first else 1]
    if gates is None:
        act = torch.nn.functional.silu(gate) * up
    else:
        slope, shift, limit = (gates[:, i : i + 1] for i in range(3))
        gate, up = torch.minimum(gate, limit), torch.minimum(torch.maximum(up, -limit), limit)
        act = gate * torch.sigmoid(slope * gate) * (up + shift)
    return act if row.wide else act.to(torch.bfloat16)


def _product(
    row: Layer,
    starts: Tensor,
    groups: Tensor,
    of: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    factor: Tensor | None,
    bias: Tensor | None,
    wide: bool,
    gated: bool = False,
) -> Tensor:
    """Rows of each expert, quantised, by its weight, float32 or bf16; zeros where no expert is. ``gated``: it is
    ``silu(gate) * up`` of ``x`` that is quantised."""
    experts, n, k = weight.shape
    if behind := -x.shape[1] % row.width:
        x = torch.nn.functional.pad(x, (0, behind))
    quantise = partial(expert_rows, row.rows, x, starts, gated=gated, columns=k * row.each)
    library = row.narrow and x.device.type != "cpu" and machines.current_machine().sm in BLACKWELL
    dtype = torch.float32 if wide or bias is not None and not library else torch.bfloat16
    if row.mixed:
        pair = quantise("flashinfer")
        out = grouped_product(pair, (weight, scale), starts, UE8M0, dtype, factor, TILE)
    else:
        out = torch.empty(x.shape[0], n, dtype=dtype, device=x.device)
        q, memory = quantise(global_scale=global_scale)
        _tight(row, q, memory, weight, scale, starts, factor, out)
    if bias is not None:
        out = out + bias.to(torch.float32)[of]
    return without_padding(out if wide else out.to(torch.bfloat16), groups)


def _tight(
    row: Layer,
    q: Tensor,
    memory: Tensor,
    weight: Tensor,
    scale: Tensor,
    starts: Tensor,
    factor: Tensor | None,
    out: Tensor,
) -> None:
    """The product of rows whose scales lie in tiles one behind the other, into ``out``."""
    experts, n, _ = weight.shape
    dtype = E4M3 if row.rows == "nvfp4" else UE8M0
    left, right = (Scales(t.reshape(-1).view(dtype), row.width, HIGH) for t in (memory, scale))
    sizes = torch.diff(starts)
    first = torch.nn.functional.pad(
        torch.cumsum((sizes + HEIGHT - 1) // HEIGHT * HEIGHT, 0, dtype=torch.int32)[:-1], (1, 0)
    )
    expert = torch.arange(experts, dtype=torch.int32, device=q.device)
    table = torch.stack([starts[:-1], starts[1:], first, expert * align(n, HEIGHT)])
    run_product(q, left, weight, right, out, Rows(table), factor, form=TIGHT)


# --- checks -----------------------------------------------------------------------------------------------------------


def layer_of(name: str) -> Layer:
    """The layer of a name; OptionError names all where there is none."""
    if name not in LAYERS:
        raise OptionError(f"layer={shown(name)}; there are {', '.join(LAYERS)}")
    return LAYERS[name]


def _extents(row: Layer, x: Tensor, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> tuple[int, int, int]:
    """Experts, H and I, where the operands fit each other."""
    hidden = checks.dtype("x", checks.rank("x", x, 2), *checks.WIDE).shape[1]
    codes = torch.uint8 if row.packed else E4M3
    experts, rows, k = checks.dtype("w13", checks.rank("w13", w13, 3), codes).shape
    inner = rows // 2
    checks.nonempty("w13", w13, 0, 1, 2)
    if rows % 2 or k * row.each < hidden:
        raise ShapeError(f"w13 is {list(w13.shape)} and x {list(x.shape)}; they are [E, 2I, H] and [T, H]")
    below = checks.dtype("w2", checks.rank("w2", w2, 3), codes).shape
    if tuple(below[:2]) != (experts, hidden) or below[2] * row.each < inner:
        raise ShapeError(f"w2 is {list(below)}; with E={experts}, H={hidden} and I={inner} it is [E, H, I]")
    wide = k * row.each, below[2] * row.each
    for name, extent in (("H", wide[0]), ("I", wide[1])):
        checks.multiple(name, extent, row.width, f"{row.width} codes share a scale")
    for name, scale, n, of_k in (("w13_scale", s13, rows, wide[0]), ("w2_scale", s2, hidden, wide[1])):
        memory = size_of(n, of_k // row.width, HIGH)
        checks.operand(name, scale, (experts, memory), "the tiles of each expert", torch.uint8)
    checks.same_device(x=x, w13=w13, w2=w2, w13_scale=s13, w2_scale=s2)
    return experts, hidden, inner
