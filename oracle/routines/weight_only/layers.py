"""Layers of experts with weights of 4 or 8 bits and activations of 16: Marlin's, gpt-oss's by ``matmul_ogs``, MXINT4.

    1  first product    as ``marlin_gemm``: rounded to T (Marlin), or float32 with its bias (gpt-oss)
    2  activation       silu(gate) * up, each rounded to T; or gpt-oss's clamped form of neighbours, rounded once
    3  second product   as ``marlin_gemm`` of what 2 rounds; gpt-oss adds the bias in float32
    4  weights          RN(weight) times the stored row, rounded again; or times the float32 row, before it is stored
    5  sum              float32 in any order, one rounding; Marlin's of 2 to 4 slots also rounded after each

An interval follows each step: the activation may err as a device's exponential does, so that an element of 2 may be one
of two; what that changes in 3 is its width times the magnitudes of the weights, added to the bound of the sum.

NaN and infinities: nothing is claimed of a token that they reach.
Source: vLLM 0.20.2 fused_moe/fused_marlin_moe.py, experts/gpt_oss_triton_kernels_moe.py; triton_kernels matmul_ogs.
Not covered: global scales, activations of 8 bits, act-order, routing weights on the input; of MXINT4 alpha, beta and
limit of an expert, and scales that are applied to sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.engines import exact
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.errors import InputError, ShapeError
from oracle.numbers.formats import decode, of_dtype
from oracle.numbers.rounding import f32
from oracle.routines.base import F32, INTEGERS, Call, Contract, Inputs, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.fault import Fault, Stage, fold
from oracle.routines.moe.moe_ranges import act_span, float32_sum, in_order
from oracle.routines.traits import Kind
from oracle.routines.weight_only.contract import Plan, Step, _classes, groups
from oracle.routines.weight_only.experts import MARLIN
from oracle.routines.weight_only.kernels import BYTES, E8M0, HALVES, TYPES
from oracle.truth.activation import SWIGLU, Formula
from oracle.truth.moe import Activation, Steps, activated, nearest
from oracle.truth.routing import Span
from oracle.truth.weight_only import Form, Weights
from oracle.verdict.compare import Admissible
from oracle.verdict.parts import interval_of
from oracle.verdict.sets import Elements, Sets, mostly_zero, rounded_to

SYMMETRIC = tuple(n for n in TYPES if n not in ("uint4", "uint8"))
"""Those without zero points."""
CHAINED = range(2, 5)
"""Slots for which vLLM's sum rounds after each."""


def _weights(*scales: torch.dtype) -> tuple[TensorSpec, ...]:
    return tuple(
        spec
        for name, k, n in (("w1", "H", "R"), ("w2", "I", "H"))
        for spec in (
            TensorSpec(name, Kind.CODES, BYTES, ("E", k, n), "codes, one a byte"),
            TensorSpec(f"{name}_scale", Kind.SCALES, scales, None, "[E, G, N]: of groups of K, or one row of columns"),
        )
    )


HIDDEN = TensorSpec("hidden_states", Kind.VALUES, HALVES, ("M", "H"), "rows of tokens, T")
IDS = TensorSpec("topk_ids", Kind.IDS, INTEGERS, ("M", "J"), "experts of each token; -1: none")
ROUTED = TensorSpec("topk_weights", Kind.WEIGHTS, F32, ("M", "J"), "of the rows of the output")


def _biases(*dtypes: torch.dtype) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(f"bias{i}", Kind.BIAS, dtypes, ("E", n), "of the product", optional=True)
        for i, n in ((1, "R"), (2, "H"))
    )


class SixteenBitLayer(Contract):
    """``out[t] = sum over j of weight[t, j] * expert(topk_ids[t, j])(hidden_states[t])``, ``[M, H]`` in T. An id of -1
    adds nothing; a token without experts gives zeros."""

    section = "MoE"
    dispatched = False
    shapes: ClassVar[dict[str, str]] = {"out": "[M, H], in the dtype of hidden_states"}
    chained: ClassVar[bool]
    """Whether sums may be rounded slot by slot."""

    def steps(self, dtype: torch.dtype, options: Options) -> Steps:
        """The activation between the products."""
        raise NotImplementedError

    def plan(self, inputs: Inputs, options: Options, which: str, expert: int, a: Tensor) -> Plan:
        """One product of an expert with the rows ``a`` ``[R, K]``, bf16 or f16, without routing weights."""
        raise NotImplementedError

    def weighted(self, plan: Plan, weight: Tensor) -> Plan:
        """The second product with its routing weights ``weight`` ``[R, 1]``, float64."""
        raise NotImplementedError

    def refuse(self, inputs: Inputs, options: Options) -> None:
        ids, experts = inputs["topk_ids"], inputs["w1"].shape[0]
        if bool((ids < -1).any()) or bool((ids >= experts).any()):
            raise InputError(f"topk_ids reach from {int(ids.min())} to {int(ids.max())}; there are {experts} experts")
        if inputs["w1"].shape[2] != 2 * inputs["w2"].shape[1]:
            raise ShapeError(f"w1 has {inputs['w1'].shape[2]} columns for I={inputs['w2'].shape[1]}; pass 2 I")

    # --- what follows ---------------------------------------------------------------------------------------

    def _experts(self, inputs: Inputs) -> list[tuple[int, Tensor]]:
        """Each expert that has rows, and its pairs of token and slot."""
        flat = inputs["topk_ids"].flatten().long()
        return [(int(e), torch.nonzero(flat == e).flatten()) for e in torch.unique(flat[flat >= 0]).tolist()]

    def _rows(self, inputs: Inputs, options: Options) -> Tensor:
        """The usual row of each pair, float64 ``[J, M, H]``, 0 where there is none."""
        m, j = inputs["topk_ids"].shape
        x, rows = inputs["hidden_states"], torch.zeros(m * j, inputs["w2"].shape[2], dtype=torch.float64, device="cpu")
        steps = self.steps(x.dtype, options)
        for expert, pairs in self._experts(inputs):
            first = self.plan(inputs, options, "w1", expert, x[pairs // j])
            act = rounded_to(activated(first.finished(exact(first.product(first.form))), steps), x.dtype)
            second = self._second(inputs, options, expert, act, pairs)
            rows[pairs] = second.finished(exact(second.product(second.form)))
        return rows.reshape(m, j, -1).transpose(0, 1)

    def _second(self, inputs: Inputs, options: Options, expert: int, act: Tensor, pairs: Tensor) -> Plan:
        weight = decode(inputs["topk_weights"]).flatten()[pairs, None]
        return self.weighted(self.plan(inputs, options, "w2", expert, act), weight)

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        """Every sum exact, every rounding as the steps have it."""
        resolved = self.check(inputs, options)
        return rounded_to(self._rows(inputs, resolved).sum(dim=0), inputs["hidden_states"].dtype)

    def outputs(self, call: Call) -> dict[str, Out]:
        x = call.inputs["hidden_states"]
        return {"out": Out((x.shape[0], call.inputs["w2"].shape[2]), (x.dtype,))}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        dtype, slots = call.inputs["hidden_states"].dtype, call.inputs["topk_ids"].shape[1]

        def sets(name: str, chain: bool) -> Sets:
            basis = f"{name}; {'sums of T slot by slot' if chain else 'sums of float32'}"
            mistrust = lambda outputs: mostly_zero(decode(outputs["out"]))  # noqa: E731
            make = lambda: ({"out": self._interval(call, name, chain)}, basis)  # noqa: E731
            return Elements(make, wider=name != IEEE32, mistrust=mistrust)

        chains = (False, True) if self.chained and slots in CHAINED else (False,)
        return [sets(name, chain) for name in (IEEE32, *_classes(dtype)) for chain in chains]

    def _interval(self, call: Call, name: str, chain: bool) -> Admissible:
        inputs, options, x = call.inputs, call.resolved, call.inputs["hidden_states"]
        (m, j), width, fmt = inputs["topk_ids"].shape, inputs["w2"].shape[2], of_dtype(x.dtype)
        low, high = (torch.zeros(m * j, width, dtype=torch.float64, device="cpu") for _ in range(2))
        lost, steps = torch.zeros(m, dtype=torch.bool, device="cpu"), self.steps(x.dtype, options)
        for expert, pairs in self._experts(inputs):
            a = x[pairs // j]
            gone = ~torch.isfinite(decode(a)).all(dim=1)
            first = self.plan(inputs, options, "w1", expert, a.masked_fill(gone[:, None], 0.0))
            ends, open_ = _ends(first, name, None)
            gone = gone | open_
            act = act_span(Span(*(end.masked_fill(gone[:, None], 0.0) for end in ends)), steps)
            gone = gone | ~(torch.isfinite(act.low) & torch.isfinite(act.high)).all(dim=1)
            known = Span(*(end.masked_fill(gone[:, None], 0.0) for end in (act.low, act.high)))
            middle = rounded_to((known.low + known.high) / 2, x.dtype)
            reach = torch.maximum(known.high - decode(middle), decode(middle) - known.low)
            second = self._second(inputs, options, expert, middle, pairs)
            (low[pairs], high[pairs]), open_ = _ends(second, name, reach)
            lost[(pairs // j)[gone | open_]] = True
        terms = Span(*(end.reshape(m, j, width).transpose(0, 1) for end in (low, high)))
        span = in_order(terms, x.dtype) if chain else float32_sum(terms)
        due = decode(call.truth["out"])
        edges = [nearest(end, fmt) for end in (span.low, span.high)]
        open_ = lost[:, None] | ~torch.isfinite(edges[0]) | ~torch.isfinite(edges[1]) | ~torch.isfinite(due)
        edges = [torch.where(open_, 0.0, end) for end in edges]
        return Admissible(edges[0], edges[1], torch.where(open_, 0.0, due), open=open_)

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        inputs = fold(call, faults, Stage.READ, dict(call.inputs))
        options = fold(call, faults, Stage.OPTIONS, dict(call.resolved))
        rows = fold(call, faults, Stage.STORE, self._rows(inputs, options))
        out = rounded_to(rows.sum(dim=0), inputs["hidden_states"].dtype)
        outputs: dict[str, Tensor] = fold(call, faults, Stage.WRITE, {"out": out})
        return outputs


def _ends(plan: Plan, name: str, reach: Tensor | None) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Least and largest output of a plan whose activations are known to ``reach`` ``[R, K]``, and the rows, bool
    ``[R]``, of which nothing is claimed."""
    product = plan.product(plan.form)
    value, interval = exact(product), interval_of(product, name)
    more = torch.zeros_like(value.hi)
    if reach is not None:  # and the roundings of the sum, which grow by as much of it
        more = reach @ plan.weights.values(plan.form, plan.a.dtype).abs() * (1 + 2.0**-8)
    offsets = (interval.lo - value.slack - more, interval.hi + value.slack + more)
    ends = [plan.finished(value, offset) for offset in offsets]
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    open_ = ~(torch.isfinite(low) & torch.isfinite(high))
    if interval.open is not None:
        open_ = open_ | interval.open
    rows = open_.any(dim=1)
    return (low.masked_fill(rows[:, None], 0.0), high.masked_fill(rows[:, None], 0.0)), rows


@register
class FusedMarlinMoe(SixteenBitLayer):
    """The products are those of ``moe_wna16_marlin_gemm`` with scales in T or E8M0. ``silu(gate) * up``, gate the first
    half, silu and the product each rounded to T."""

    name = "fused_marlin_moe"
    summary = "a layer of experts with weights of 4 or 8 bits by Marlin"
    source = "vLLM 0.20.2 fused_moe/fused_marlin_moe.py fused_marlin_moe"
    inputs = (HIDDEN, *_weights(*HALVES, E8M0), *_biases(*HALVES), ROUTED, IDS)
    options = (OptionSpec("b_type", "uint4b8", SYMMETRIC, "type of a code"),)
    chained = True

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for name in ("w1", "w2"):
            rows = inputs["hidden_states"].new_zeros(1, inputs[name].shape[1])
            MARLIN.check(self._of(inputs, name, 0, rows), options)

    def steps(self, dtype: torch.dtype, options: Options) -> Steps:
        """Silu and the product each rounded."""
        return Steps(store=dtype, activation=Activation.EACH, formula=SWIGLU)

    def _of(self, inputs: Inputs, which: str, expert: int, a: Tensor) -> dict[str, Tensor]:
        found = {"a": a, "b_q": inputs[which][expert], "b_scales": inputs[f"{which}_scale"][expert]}
        bias = f"bias{which[1]}"
        return found | ({"b_bias": inputs[bias][expert]} if bias in inputs else {})

    def plan(self, inputs: Inputs, options: Options, which: str, expert: int, a: Tensor) -> Plan:
        """As of ``marlin_gemm``; ``a`` ``[R, K]`` bf16 or f16."""
        full = {"use_atomic_add": False, "use_fp32_reduce": True, **options}
        return MARLIN.plans(self._of(inputs, which, expert, a), full)[0]

    def weighted(self, plan: Plan, weight: Tensor) -> Plan:
        """``RN(weight)`` times the stored row, rounded to T; ``weight`` float64 ``[R, 1]``."""
        dtype = plan.a.dtype
        return replace(plan, steps=(*plan.steps, Step("times", dtype, decode(rounded_to(weight, dtype)))))


def _check_scales(inputs: Inputs) -> None:
    """Raises ShapeError: the weights do not have one scale for 32 rows of K."""
    for name in ("w1", "w2"):
        e, k, n = inputs[name].shape
        if tuple(inputs[f"{name}_scale"].shape) != (e, k // 32, n) or k % 32:
            raise ShapeError(f"{name}_scale is {list(inputs[f'{name}_scale'].shape)}; pass [{e}, {k} / 32, {n}]")


@register
class TritonFusedExperts(SixteenBitLayer):
    """MXFP4 weights, exact in bfloat16. Biases are added in float32, the first before the activation, gpt-oss's: gate
    and up in neighbouring columns, clamped at 7, ``gate / (1 + exp(-1.702 gate)) * (up + 1)``, rounded once.
    The weight, rounded to bfloat16, multiplies the float32 row, which is then rounded."""

    name = "triton_kernel_fused_experts"
    summary = "gpt-oss's layer of experts: MXFP4 weights, biases, clamped activation of neighbours"
    source = "vLLM 0.20.2 experts/gpt_oss_triton_kernels_moe.py triton_kernel_fused_experts; triton_kernels matmul_ogs"
    inputs = (replace(HIDDEN, dtypes=HALVES[:1]), *_weights(E8M0, torch.uint8), *_biases(*F32), ROUTED, IDS)
    chained = False

    def refuse(self, inputs: Inputs, options: Options) -> None:
        _check_scales(inputs)

    def steps(self, dtype: torch.dtype, options: Options) -> Steps:
        """Gpt-oss's, rounded once; alpha is a float32."""
        alpha = float(f32(torch.tensor(1.702, dtype=torch.float64, device="cpu")))
        formula = Formula(interleaved=True, alpha=alpha, beta=1.0)
        return Steps(store=dtype, activation=Activation.PRODUCT, formula=formula, limit=7.0)

    def plan(self, inputs: Inputs, options: Options, which: str, expert: int, a: Tensor) -> Plan:
        """The float32 sum, with its bias; ``a`` ``[R, K]`` bf16."""
        of = {"a": a, "b_q": inputs[which][expert], "b_scales": inputs[f"{which}_scale"][expert].view(E8M0)}
        full = {"b_type": "float4_e2m1f", "use_atomic_add": False, "use_fp32_reduce": True}
        bias = f"bias{which[1]}"
        by = ("plus", torch.float32, decode(inputs[bias][expert])) if bias in inputs else ("store", torch.float32)
        return replace(MARLIN.plans(of, full)[0], steps=(Step(*by),))

    def weighted(self, plan: Plan, weight: Tensor) -> Plan:
        """Times the bfloat16 weight in float32, then stored; ``weight`` float64 ``[R, 1]``."""
        narrow = decode(rounded_to(weight, torch.bfloat16))
        steps = (*plan.steps, Step("times", torch.float32, narrow), Step("store", plan.a.dtype))
        return replace(plan, steps=steps)


def decode_signed(codes: Tensor) -> Tensor:
    """Values, float64 of the shape of ``codes``, uint8 of 4 bits in two's complement. There is no NaN."""
    return ((codes ^ 8).to(torch.int16) - 8).to(torch.float64)


@register
class TrtllmMxint4Moe(SixteenBitLayer):
    """Codes of 4 bits in two's complement, a bfloat16 scale for 32 rows of K: ``w = RN(q * s)``. Up is the first half,
    gate the second: ``silu(gate) * up`` of float32 sums, rounded once. Stored rows times their weight are added in
    float32."""

    name = "trtllm_mxint4_block_scale_moe"
    summary = "a layer of experts with weights of 4-bit integers in blocks of 32, scales in bfloat16"
    source = "FlashInfer flashinfer.fused_moe trtllm_mxint4_block_scale_moe and its routed form (0.6.18.post1)"
    inputs = (replace(HIDDEN, dtypes=HALVES[:1]), *_weights(torch.bfloat16), ROUTED, IDS)
    chained = False

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        _check_scales(inputs)
        for name in ("w1", "w2"):
            if bool((inputs[name] > 15).any()):
                raise InputError(f"{name} has a byte of {int(inputs[name].max())}; a code has 4 bits")

    def steps(self, dtype: torch.dtype, options: Options) -> Steps:
        """Silu of the float32 gate times up, rounded once."""
        return Steps(store=dtype, activation=Activation.PRODUCT, formula=SWIGLU)

    def plan(self, inputs: Inputs, options: Options, which: str, expert: int, a: Tensor) -> Plan:
        """The float32 sum, gate columns first; ``a`` ``[R, K]`` bf16."""
        codes, scale = decode_signed(inputs[which][expert]), decode(inputs[f"{which}_scale"][expert])
        if which == "w1":
            codes, scale = (torch.roll(x, x.shape[1] // 2, 1) for x in (codes, scale))
        weights = Weights(codes, scale, torch.zeros_like(scale), groups(len(codes), len(scale)))
        return Plan(a, weights, Form.DIFFERENCE, (Step("store", torch.float32),))

    def weighted(self, plan: Plan, weight: Tensor) -> Plan:
        """Stored, then times the weight in float32; ``weight`` float64 ``[R, 1]``."""
        return replace(plan, steps=(Step("store", plan.a.dtype), Step("times", torch.float32, weight)))
