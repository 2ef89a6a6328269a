"""Contracts of the quantised linear layer, of the routine that it chooses, and of DeepGEMM's difference measure.

``Fp8LinearOp`` takes a high-precision input (quantised by the layer: static, per tensor, per token) or FP8 codes with
their scale. FP8 input is one product, judged as such. Else the layer's codes are not published, so an output is right
when it has the bits of an admitted recipe followed by an admitted schedule, or lies in the interval that holds every
code a right quantiser may give (:mod:`oracle.bounds.code_boxes`, :mod:`oracle.bounds.boxed`).
Not covered: block scales, and padding rows, which a layer slices off.

NaN codes and scales stay NaN, and make NaN of every sum that they enter; placing them reads no value.
Source: vLLM w8a8_utils.Fp8LinearOp; DeepGEMM deep_gemm/testing/numeric.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.accumulator import of_schedule
from oracle.bounds.boxed import boxed_product
from oracle.bounds.code_boxes import code_boxes
from oracle.bounds.engines import exact
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.bounds.product import ETA, U
from oracle.errors import InputError, NumericsError, OptionError, ShapeError
from oracle.numbers.formats import decode, of_dtype, same_bits
from oracle.numbers.quantize import WIDE, quantize
from oracle.numbers.recipes import Recipe
from oracle.numbers.rounding import Overflow, Rounding, round_to
from oracle.routines.base import F32, FP8, Call, Contract, Inputs, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.layouts.contract import TableContract
from oracle.routines.products import contract
from oracle.routines.traits import Kind
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import Schedule, is_class, of_class
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth.gemm import ScaledProduct, rounded
from oracle.truth.linear import ROUTINES, calc_diff, dispatch_w8a8_scaled_mm, input_recipes
from oracle.truth.routing import Span
from oracle.verdict.compare import Admissible, Comparison, Verdict, Worst, verdict
from oracle.verdict.products import Part, ProductSets, accumulation_faults, truth, wider_classes
from oracle.verdict.sets import Elements, Found, Prediction, Range, Sets, all_equal, mostly_zero, with_float32

FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
FLAG = (torch.int64, torch.int32)


@register
class Fp8LinearOp(Contract):
    """``out = RN(scaled product of the quantised input and weight + bias)``, as ``cutlass_scaled_mm`` multiplies.

    The input is quantised to E4M3 with ``input_scale`` where it is given (static), else with one scale for the tensor
    or, with ``use_per_token_if_dynamic``, for each row; ``input_scale_ub`` bounds the amax of rows. FP8 codes come with
    ``input_scale`` and are multiplied as they are. Of rows with NaN or infinity (dynamic per tensor: of all) nothing is
    claimed but for NaN in the weight, its scale or the bias, which make their columns NaN. Codes are not returned: any
    code of a right quantiser may enter the product.

    Recipes: torch_static, vllm_static with a given scale; torch_token, vllm_token per token; torch_tensor, vllm_tensor.
    ``weight_scale`` of any shape goes with any scale of the input. ``cutlass_fp8_supported`` changes no value: it
    refuses FP8 codes as input, which that path does not take.
    """

    name = "Fp8LinearOp"
    shapes = {"out": "[..., N]"}
    also = ("Padding and layout: output padding",)
    section = "GEMM"
    summary = "quantise [..., K] (static, per tensor, per token), multiply with [K, N], add the bias: [..., N]"
    source = "vLLM w8a8_utils.Fp8LinearOp.apply"
    inputs = (
        TensorSpec("input", Kind.VALUES, (*WIDE, *FP8), None, "[..., K]; FP8 codes come with input_scale"),
        TensorSpec("weight", Kind.CODES, FP8, ("K", "N"), "weight codes, logical [K, N], any strides"),
        TensorSpec("weight_scale", Kind.SCALES, F32, None, "one value, or one for each channel: [N], [N, 1] or [1, N]"),
        TensorSpec(
            "input_scale", Kind.SCALES, F32, None, "one value: static; with FP8 codes also [M, 1]", optional=True
        ),
        TensorSpec("input_scale_ub", Kind.BOUND, F32, None, "one value: bound of amax per token", optional=True),
        contract.BIAS,
    )
    options = (
        OptionSpec("use_per_token_if_dynamic", False, (False, True), "one scale per token when none is given"),
        OptionSpec("cutlass_fp8_supported", False, (False, True), "the CUTLASS path, which takes no FP8 input"),
        contract.OUT_DTYPE,
    )
    numerics = contract.ROW_NUMERICS
    golden_arches = ("cpu", "sm90")

    def refuse(self, inputs: Inputs, options: Options) -> None:
        x, weight = inputs["input"], inputs["weight"]
        if x.dim() == 0 or x.shape[-1] != weight.shape[0]:
            raise ShapeError(f"input has shape {list(x.shape)}; weight [K, N] {list(weight.shape)} takes [..., K]")
        coded = x.dtype in FP8
        if coded and options["cutlass_fp8_supported"]:
            raise InputError("the CUTLASS path takes no FP8 input; pass the high-precision one")
        if coded and "input_scale" not in inputs:
            raise InputError("FP8 codes come with input_scale, and there is none")
        if not coded and "input_scale" in inputs and inputs["input_scale"].numel() != 1:
            shape = list(inputs["input_scale"].shape)
            raise ShapeError(f"input_scale has shape {shape}; static quantisation takes one value")
        if "input_scale_ub" in inputs:
            if "input_scale" in inputs or not options["use_per_token_if_dynamic"]:
                raise OptionError("input_scale_ub bounds dynamic per-token scales; pass use_per_token_if_dynamic=True")
            if inputs["input_scale_ub"].numel() != 1:
                raise ShapeError(f"input_scale_ub has shape {list(inputs['input_scale_ub'].shape)}; pass one value")

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        resolved = self.check(inputs, options)
        dtype = resolved["out_dtype"]
        assert dtype is None or isinstance(dtype, torch.dtype)
        product = self.products(inputs, resolved)[0][1]
        return truth([Part(product)], product.M, dtype).reshape(*inputs["input"].shape[:-1], product.N)

    def outputs(self, call: Call) -> dict[str, Out]:
        dtype, x = call.resolved["out_dtype"], call.inputs["input"]
        dtypes = (dtype,) if isinstance(dtype, torch.dtype) else contract.OUT_DTYPES
        return {"out": Out((*x.shape[:-1], call.inputs["weight"].shape[1]), dtypes)}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        products, names = self._products(call), self.arithmetics(call, numerics)
        first = products[0][1]
        if products[0][0] is None:
            faults = () if is_class(names[0]) else accumulation_faults(get_schedule(names[0]))
            return [ProductSets([Part(first)], names, wider_classes(names) if numerics is None else (), faults)]

        def predictions() -> Iterator[Prediction]:
            for recipe, product in products:
                for name in names:
                    if not is_class(name):
                        assert recipe is not None
                        same = partial(_reproduces, product, name)
                        yield Prediction(f"{recipe.name}, then {name}", name, product.M * product.N, same)

        def sets(name: str, wider: bool) -> Sets:
            return Elements(
                lambda: self._set(call, first, name),
                name,
                wider,
                (lambda: iter(())) if wider else predictions,
                lambda outputs: all_equal("weight_scale", [first.b_scale]) or mostly_zero(decode(outputs["out"])),
                matrix=True,
            )

        return with_float32(sets, names[0], declared=numerics is not None)

    def why_not(self, call: Call, numerics: str) -> str | None:
        if numerics == IEEE32:
            return None
        product = self._products(call)[0][1]
        return of_class(numerics).why_not(product, out_dtype=call.out_dtype)

    def by_schedule(self, call: Call, schedule: Schedule, numerics: str) -> dict[str, Tensor]:
        """The product of the codes that the first admitted recipe gives."""
        out = predict_product(self._products(call)[0][1], schedule, out_dtype=call.out_dtype)
        return {"out": out.reshape(self.outputs(call)["out"].shape or ())}

    def _products(self, call: Call) -> list[tuple[Recipe | None, ScaledProduct]]:
        return call.cached("products", lambda: self.products(call.inputs, call.resolved))

    def products(self, inputs: Inputs, options: Options) -> list[tuple[Recipe | None, ScaledProduct]]:
        """The product after each admitted recipe; one with recipe None for FP8 input."""
        x = inputs["input"]
        flat = x.reshape(-1, x.shape[-1])
        weight = contract.transposed(inputs["weight"])
        scale, bias = inputs["weight_scale"], inputs.get("bias")
        if x.dtype in FP8:
            return [(None, contract.scaled_by_shape(flat, weight, inputs["input_scale"], scale, bias))]
        pairs: list[tuple[Recipe | None, ScaledProduct]] = []
        for recipe in self.recipes(inputs, options):
            q = quantize(flat, recipe, scale=inputs.get("input_scale"), scale_ub=inputs.get("input_scale_ub"))
            pairs.append((recipe, contract.scaled_by_shape(q.codes, weight, q.scale, scale, bias)))
        return pairs

    def recipes(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        static = "input_scale" in inputs
        return input_recipes(static=static, per_token=bool(options["use_per_token_if_dynamic"]))

    def _set(self, call: Call, product: ScaledProduct, name: str) -> tuple[dict[str, Admissible], str]:
        """The admissible matrix ``[R, N]`` for any codes that a right quantiser may give, and what it rests on."""
        inputs = call.inputs
        x = inputs["input"].reshape(-1, product.K)
        values = decode(x)
        lost = ~torch.isfinite(values).all(dim=1)
        recipe = self.recipes(inputs, call.resolved)[0]
        if recipe.block.rows is None and "input_scale" not in inputs:
            lost = lost.any().expand(lost.shape)
        values = torch.nan_to_num(values, 0.0, 0.0, 0.0)
        boxes, flips = code_boxes(
            Span(values, values), recipe, of_dtype(x.dtype), inputs.get("input_scale"), inputs.get("input_scale_ub")
        )
        if is_class(name) and name != IEEE32:
            raise NumericsError(f"{name} has no bound for flipped codes; declare the schedule itself, or {IEEE32}")
        acc = None if name == IEEE32 else of_schedule(get_schedule(name))
        interval = boxed_product(boxes, product.b, product.b_scale, block=product.K, b_rows=product.b_rows, acc=acc)
        low, high = interval.low, interval.high
        if product.bias is not None:
            low, high = low + decode(product.bias), high + decode(product.bias)
            slack = U * torch.maximum(low.abs(), high.abs()) * (1 + 2.0**-20) + ETA
            low, high = low - slack, high + slack
        fmt = of_dtype(call.out_dtype)
        low, high = (round_to(e, fmt, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF) for e in (low, high))
        expected = torch.nan_to_num(decode(rounded(product, exact(product), call.out_dtype)), 0.0)
        open_ = interval.open | lost[:, None] | ~torch.isfinite(low) | ~torch.isfinite(high)
        nan = _nan_columns(product)
        expected, open_ = torch.where(nan, torch.full_like(expected, torch.nan), expected), open_ & ~nan
        basis = f"{interval.name}: {flips} of {values.numel()} of the input"
        return {"out": Admissible(low, high, expected, open=open_)}, basis


@register
class CutlassW8a8(contract.TorchScaledMm):
    name = "cutlass_w8a8_scaled_mm"
    gpu = True
    summary = "one scale for qinput or one for each token; one for weight or one for each channel"
    source = "vLLM w8a8_utils.cutlass_w8a8_scaled_mm"
    scale_dims = ((*contract.ONE, *contract.TOKENS), (*contract.ONE, *contract.CHANNELS))


@register
class RocmPerTensor(contract.TorchScaledMm):
    name = "rocm_per_tensor_w8a8_scaled_mm"
    gpu = False
    summary = "one scale for each operand, FNUZ codes on gfx942"
    source = "vLLM w8a8_utils.rocm_per_tensor_w8a8_scaled_mm"
    numerics: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "gfx942": ("gfx942.chain", "gfx942.chain.row_then_col", "gfx942.chain.product"),
        "cpu": (IEEE32,),
    }
    inputs = (
        TensorSpec("qinput", Kind.CODES, (*FNUZ, *FP8), ("M", "K"), "activation codes"),
        TensorSpec("weight", Kind.CODES, (*FNUZ, *FP8), ("K", "N"), "weight codes, logical [K, N]"),
        *contract.TorchScaledMm.inputs[2:],
    )
    golden_arches = ("cpu",)


@register
class DispatchTable(TableContract):
    __doc__ = f"Columns of 0 and 1; the answer is {', '.join(f'{i} {name}' for i, name in enumerate(ROUTINES))}."

    name = "dispatch_w8a8_scaled_mm"
    section = "GEMM"
    summary = "which routine multiplies, for every combination of its six conditions"
    source = "vLLM w8a8_utils.dispatch_w8a8_scaled_mm"
    inputs = tuple(
        TensorSpec(name, Kind.PARAMETERS, FLAG, ("R",), "0 or 1 for each row of the table")
        for name in (
            "cutlass_fp8_supported",
            "per_tensor_weights",
            "per_tensor_activations",
            "use_per_token_if_dynamic",
            "rocm",
            "rowwise",
        )
    )

    def row(self, *arguments: int) -> int:
        flags = [bool(argument) for argument in arguments]
        return ROUTINES.index(dispatch_w8a8_scaled_mm(*flags[:4], rocm=flags[4], rowwise=flags[5]))


@register
class CalcDiff(Contract):
    """Sums of ``n`` products in float64, in any order: ``|error| <= 4 (n + 4) 2^-53``, as the ratio is at most 1. NaN
    and infinity give NaN."""

    name = "calc_diff"
    section = "GEMM"
    summary = "1 - 2 <x, y> / (<x, x> + <y, y>) in float64; 0 for zeros"
    source = "DeepGEMM deep_gemm/testing/numeric.py"
    inputs = (
        TensorSpec("x", Kind.VALUES, (*WIDE, *FP8, *FNUZ), None, "any shape"),
        TensorSpec("y", Kind.VALUES, (*WIDE, *FP8, *FNUZ), None, "the same shape"),
    )

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        self.check(inputs, options)
        return torch.tensor(calc_diff(inputs["x"], inputs["y"]), dtype=torch.float64, device=inputs["x"].device)

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [Difference(call.truth["out"], 4 * (call.inputs["x"].numel() + 4) * 2.0**-53)]


@dataclass(frozen=True)
class Difference(Sets):
    """A float64 number within ``width`` of ``due``."""

    due: Tensor
    width: float

    def judge(self, outputs: Found) -> Verdict:
        actual, expected, width = float(outputs["out"]), float(self.due), self.width
        ok = math.isnan(actual) if math.isnan(expected) else abs(actual - expected) <= width
        ratio = 0.0 if actual == expected or (ok and math.isnan(expected)) else abs(actual - expected) / width
        worst = Worst((), actual, expected - width, expected + width, expected, ratio)
        bad = torch.tensor(not ok, dtype=torch.bool, device="cpu")
        return verdict(Comparison(int(not ok), 1, 0, ratio, worst, bad), basis="float64 sums in any order")

    def ranges(self, expected: Found) -> dict[str, Range]:
        due = expected["out"]
        return {"out": Range(due - self.width, due + self.width, torch.zeros((), dtype=torch.uint8, device="cpu"))}


def _nan_columns(product: ScaledProduct) -> Tensor:
    """Bool ``[1, N]``: columns that a NaN weight code, scale or bias makes NaN, whatever the input is."""
    nan = torch.isnan(decode(product.b)).any(dim=1)
    nan |= torch.isnan(decode(product.b_scale)[:, 0]).repeat_interleave(product.b_rows)[: product.N]
    if product.bias is not None:
        nan |= torch.isnan(decode(product.bias))
    return nan[None, :]


def _reproduces(product: ScaledProduct, name: str, outputs: Found) -> bool:
    schedule, out = get_schedule(name), outputs["out"]
    if schedule.why_not(product, out_dtype=out.dtype) is not None:
        return False
    few = torch.arange(0, product.M, max(1, product.M // 4), device=out.device)
    for rows in (few, torch.arange(product.M, device=out.device)):
        predicted = predict_product(product.take(rows), schedule, out_dtype=out.dtype)
        if not bool(same_bits(predicted, out.index_select(0, rows)).all()):
            return False
    return True
