"""Weight-only products of experts: each row of the input meets the weights of the experts of its token.

A kernel gets its rows sorted, in blocks of one expert; here a call says the experts of each token, and the output has a
row for each. A row of no expert (-1) may hold anything.

NaN and infinities: those of :class:`oracle.routines.weight_only.contract.WeightOnly`.
Sources: those of each class. Not covered: the sum over the experts of a token.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import InputError, OptionError, ShapeError
from oracle.numbers.formats import decode
from oracle.routines.base import E4M3, F32, INTEGERS, Call, Inputs, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.traits import Kind
from oracle.routines.weight_only.contract import Plan, Step, Way, WeightOnly, groups
from oracle.routines.weight_only.kernels import BYTES, E8M0, HALVES, A, Marlin, MarlinGemm
from oracle.truth.weight_only import Form, Weights
from oracle.verdict.sets import rounded_to

MARLIN = MarlinGemm()
IDS = TensorSpec("topk_ids", Kind.IDS, INTEGERS, ("M", "J"), "experts of each token; -1: none")
ROUTED = TensorSpec("topk_weights", Kind.WEIGHTS, F32, ("M", "J"), "multiply the rows of the output", optional=True)


class Experts(WeightOnly):
    """The output is ``[M, J, N]``: for each expert of a token its row of the input times the weight of the expert."""

    section = "MoE"
    groups = "topk_ids"
    shapes: ClassVar[dict[str, str]] = {"out": "[M, J, N]"}
    names: ClassVar[tuple[str, ...]]

    def refuse(self, inputs: Inputs, options: Options) -> None:
        ids, experts = inputs["topk_ids"], inputs[self.names[0]].shape[0]
        if bool(((ids < -1) | (ids >= experts)).any()) or not bool((ids >= 0).any()):
            raise InputError(
                f"topk_ids has {int(ids.min())} to {int(ids.max())}; experts are 0 to {experts - 1}, -1 is none"
            )

    def of_expert(self, inputs: Inputs, options: Options, expert: int, a: Tensor) -> Plan:
        """What a right kernel computes of the rows ``a`` ``[R, K]`` bf16 or f16 of an expert, without their routing
        weight."""
        raise NotImplementedError

    def weighted(self, plan: Plan, weight: Tensor) -> tuple[Step, ...]:
        """The steps with the routing weights ``weight``, float64 ``[R, 1]``."""
        raise NotImplementedError

    def plans(self, inputs: Inputs, options: Options) -> list[Plan]:
        a, ids = self.activations(inputs), inputs["topk_ids"]
        flat, made = ids.flatten(), []
        for expert in torch.unique(flat[flat >= 0]).tolist():
            rows = torch.nonzero(flat == expert)[:, 0]
            plan = self.of_expert(inputs, options, int(expert), a[rows // ids.shape[1]])
            steps = plan.steps
            if "topk_weights" in inputs:
                steps = self.weighted(plan, decode(inputs["topk_weights"]).flatten()[rows, None])
            made.append(Plan(plan.a, plan.weights, plan.form, steps, rows))
        return made

    def shape(self, plans: list[Plan], inputs: Inputs) -> tuple[int, ...]:
        return *inputs["topk_ids"].shape, plans[0].weights.codes.shape[1]

    def outputs(self, call: Call) -> dict[str, Out]:
        plans = self.plans(call.inputs, call.resolved)
        shape = self.shape(plans, call.inputs)
        specified = (call.inputs["topk_ids"] >= 0)[..., None].expand(shape)
        return {"out": Out(shape, (plans[0].steps[-1].dtype,), specified)}


@register
class MoeWna16MarlinGemm(Experts, Marlin):
    """Each expert has its weight, scales, zero points, global scale and bias. Behind all steps the row is multiplied by
    ``RN(topk_weight)`` and rounded to T again. With a global scale there are no routing weights."""

    name = "moe_wna16_marlin_gemm"
    summary = "rows of experts times weights of 4 or 8 bits of any type, a routing weight in T"
    source = "vLLM 0.20.2 csrc/moe/marlin_moe_wna16/marlin_template.h; SGLang jit_kernel moe_wna16_marlin"
    names = ("b_q", "b_scales", "b_zeros", "global_scale", "b_bias")
    inputs = (
        A,
        TensorSpec("b_q", Kind.CODES, BYTES, ("E", "K", "N"), "codes, one a byte"),
        TensorSpec("b_scales", Kind.SCALES, (*HALVES, *E4M3, E8M0), ("E", "G", "N"), "as those of marlin_gemm"),
        TensorSpec("b_zeros", Kind.CODES, BYTES, ("E", "G", "N"), "codes", optional=True),
        TensorSpec("global_scale", Kind.ALPHA, F32, ("E",), "of the whole sum of an expert", optional=True),
        TensorSpec("b_bias", Kind.BIAS, HALVES, ("E", "N"), "in T", optional=True),
        IDS,
        ROUTED,
    )
    options = MARLIN.options

    def refuse(self, inputs: Inputs, options: Options) -> None:
        MARLIN.check(self.of(inputs, 0, inputs["a"]), options)
        if "global_scale" in inputs and "topk_weights" in inputs:
            raise OptionError("topk_weights with a global_scale: multiply the weights by it, and pass none")

    def of(self, inputs: Inputs, expert: int, a: Tensor) -> dict[str, Tensor]:
        """The inputs of ``marlin_gemm`` of an expert, each of the dtype of its stack; ``a`` ``[R, K]`` bf16 or f16."""
        each = {name: inputs[name][expert] for name in self.names if name in inputs}
        return {"a": a, **{name: x[None] if x.dim() == 0 else x for name, x in each.items()}}

    def of_expert(self, inputs: Inputs, options: Options, expert: int, a: Tensor) -> Plan:
        """As of ``marlin_gemm``; ``a`` ``[R, K]`` bf16 or f16."""
        return MARLIN.plans(self.of(inputs, expert, a), options)[0]

    def weighted(self, plan: Plan, weight: Tensor) -> tuple[Step, ...]:
        """``weight``, float64 ``[R, 1]``, rounded to the dtype of ``a``, then multiplied in it."""
        dtype = plan.a.dtype
        return *plan.steps, Step("times", dtype, decode(rounded_to(weight, dtype)))

    def ways(self, inputs: Inputs, options: Options) -> list[Way]:
        return MARLIN.ways(self.of(inputs, 0, inputs["a"]), options)


@register
class MoeWna16Gemm(Experts):
    """``w[e, n, k] = RN((q - z) * s)`` with the codes of 4 bits, two a byte along K, the even column in the low nibble,
    or of 8 bits; ``z`` is 8 or 128, or of ``b_qzeros``: two rows of the weight a byte, the even one in the low nibble.
    Four products a lane (of 8 bits two) are summed in T, lanes and pieces in float32, times ``topk_weights`` in
    float32; then blocks of K are added in T, in any order. One sum in float32 is right too."""

    name = "moe_wna16_gemm"
    summary = "rows of experts times words of 4 or 8 bits along K, a routing weight in float32"
    source = "vLLM 0.20.2 csrc/moe/moe_wna16.cu"
    names = ("b_qweight",)
    inputs = (
        TensorSpec("input", Kind.VALUES, HALVES, ("M", "K"), "activations, T"),
        TensorSpec("b_qweight", Kind.CODES, BYTES, ("E", "N", "P"), "codes, P = K * bit / 8"),
        TensorSpec("b_scales", Kind.SCALES, HALVES, ("E", "N", "G"), "in T, one for K / G columns"),
        TensorSpec("b_qzeros", Kind.CODES, BYTES, ("E", "Q", "G"), "zero points, Q = N * bit / 8", optional=True),
        IDS,
        ROUTED,
    )
    options = (OptionSpec("bit", 4, (4, 8), "of a code"),)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        k, bit, n = inputs["input"].shape[1], int(options["bit"]), inputs["b_qweight"].shape[1]
        if inputs["b_qweight"].shape[2] * 8 != k * bit or (
            "b_qzeros" in inputs and inputs["b_qzeros"].shape[1] * 8 != n * bit
        ):
            raise ShapeError(
                f"K={k}, N={n} of {bit} bits take {k * bit / 8:g} bytes a row, {n * bit / 8:g} of zero points"
            )
        if inputs["b_scales"].dtype != inputs["input"].dtype:
            raise InputError(f"b_scales is {inputs['b_scales'].dtype}, input {inputs['input'].dtype}; pass one dtype")
        groups(k, inputs["b_scales"].shape[2])

    def of_expert(self, inputs: Inputs, options: Options, expert: int, a: Tensor) -> Plan:
        """Codes less their zero point, times the scale of their group; ``a`` ``[R, K]`` bf16 or f16."""
        eight = int(options["bit"]) == 8
        codes = _nibbles(inputs["b_qweight"][expert], eight).t()
        scale = decode(inputs["b_scales"][expert]).t()
        zero = torch.full_like(scale, 128.0 if eight else 8.0)
        if "b_qzeros" in inputs:
            zero = _nibbles(inputs["b_qzeros"][expert].t(), eight)
        weights = Weights(codes, scale, zero, groups(codes.shape[0], scale.shape[0]))
        return Plan(a, weights, Form.DIFFERENCE, (Step("store", a.dtype),))

    def weighted(self, plan: Plan, weight: Tensor) -> tuple[Step, ...]:
        """``weight``, float64 ``[R, 1]``, multiplied in float32, before the store."""
        return Step("times", torch.float32, weight), *plan.steps

    def ways(self, inputs: Inputs, options: Options) -> list[Way]:
        blocks = -(-inputs["input"].shape[1] // 32)
        return [Way(), Way(roundings=16 // int(options["bit"]) + blocks)]


def _nibbles(x: Tensor, eight: bool) -> Tensor:
    """Codes, float64 ``[R, C]`` or ``[R, 2 C]``, of bytes ``[R, C]``; the low nibble first."""
    return (x if eight else torch.stack([x & 15, x >> 4], dim=-1).flatten(-2)).to(torch.float64)
