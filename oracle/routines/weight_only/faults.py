"""Faults of weight-only products: another code, zero point, scale or group of a weight; another step behind the sum.

A right kernel has the stages READ, OPTIONS, RECIPE (a :class:`oracle.routines.weight_only.contract.Plan`) and WRITE.

Source: the threads that each declaration names (``seen``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.routines.base import Call
from oracle.routines.fault import (
    ARITHMETIC,
    CAST,
    INDEX,
    MOVEMENT,
    VALUE,
    Faults,
    WhyNot,
    both,
    entries,
    entry,
    need,
    way,
)
from oracle.routines.ideas import fields, itself, pairs_swapped, rolled
from oracle.routines.traits import of_class, takes
from oracle.routines.weight_only.contract import Plan, Step, WeightOnly
from oracle.routines.weight_only.experts import Experts, MoeWna16MarlinGemm
from oracle.routines.weight_only.kernels import (
    TYPES,
    Awq,
    AwqDequantize,
    GptqGemm,
    MacheteMm,
    MarlinGemm,
    MmBf16Fp4,
    MmNvFp4Svdquant,
    TritonW4a16,
    Typed,
)
from oracle.truth.weight_only import Form, Weights
from oracle.verdict.sets import rounded_to

PRODUCTS = of_class(WeightOnly)
MULTIPLIED = PRODUCTS - of_class(AwqDequantize)
ZEROED = of_class(Awq, GptqGemm) | takes("b_zeros") | takes("b_group_zeros") | takes("b_qzeros") | of_class(TritonW4a16)
FAULTS = Faults(PRODUCTS)
fault = FAULTS.declare
MINE = "no public thread: "
EQUAL = "it changes nothing"
ABOVE = "the sum is far above it, or partial sums in the dtype of the activations differ as much"


def plan_of(call: Call) -> Plan:
    """The first plan of a right kernel."""
    assert isinstance(call.contract, WeightOnly)
    return call.contract.plans(call.inputs, call.resolved)[0]


def having(field: str, words: str) -> WhyNot:
    """The weight has it."""
    return need(lambda call: getattr(plan_of(call).weights, field) is not None, words)


def weights(change: Callable[[Weights], Weights]) -> Callable[[Plan], Plan]:
    """RECIPE: another weight."""
    return lambda plan: replace(plan, weights=change(plan.weights))


def of(field: str, change: Callable[[Tensor], Tensor]) -> Callable[[Plan], Plan]:
    """RECIPE: another tensor of the weight."""
    return weights(lambda w: replace(w, **{field: change(getattr(w, field))}))


scaled = having("scale", "no scale belongs to the weight")
zeroed = having("zero", "there is no zero point")
several = need(lambda call: int(plan_of(call).weights.group.max()) > 0, "there is one group")

# --- groups, scales, zero points ----------------------------------------------------------------------------


def _wide(w: Weights) -> Weights:
    """Groups twice as long."""
    return replace(w, group=w.group // 2)


def _beyond(w: Weights) -> Weights:
    """Scales of groups whose number is not below the length of a group are read as 0."""
    assert w.scale is not None
    number = torch.arange(w.scale.shape[0], device=w.scale.device)[:, None]
    return replace(w, scale=torch.where(number < len(w.group) // w.scale.shape[0], w.scale, 0.0))


def _last_unscaled(w: Weights) -> Weights:
    assert w.scale is not None
    return replace(w, scale=torch.cat([w.scale[:-1], torch.ones_like(w.scale[-1:])]))


def _many(call: Call) -> bool:
    w = plan_of(call).weights
    return w.scale is not None and w.scale.shape[0] ** 2 > len(w.group)


beyond = need(_many, "there are no more groups than rows in one")
indexed = need(lambda call: "g_idx" in call.inputs, "no g_idx is given")
e4m3 = need(lambda call: any(x.dtype is torch.float8_e4m3fn for x in call.inputs.values()), "no scale is E4M3")
fault(
    "weight: {}",
    INDEX,
    needs=both(scaled, several),
    over=(
        way("scale and zero point of the next group", lambda w: replace(w, group=(w.group + 1) % (w.group.max() + 1)),
            seen="sglang 38573"),
        way("those of group 0 throughout", lambda w: replace(w, group=0 * w.group), seen="sglang PR 20819"),
        way("groups twice as long", _wide, seen="sglang PR 38633"),
        way("groups of other lengths than one run", lambda w: replace(w, group=w.group.sort().values), seen="vllm 7374",
            needs=indexed),
        way("groups in the order of the inverse permutation",
            lambda w: replace(w, group=w.group[w.group.argsort(stable=True).argsort()]), seen="sglang 36822",
            needs=indexed),
        way("scale of the last group left out", _last_unscaled, seen="pytorch/FBGEMM 6159", family=VALUE),
        way("scale of a group beyond the length of a group read as 0", _beyond, seen="vllm PR 9212",
            needs=both(scaled,
                beyond)),
    ),
    recipe=weights,
    same_if=EQUAL,
    admissible_if=ABOVE,
)  # fmt: skip  # a table, one row a line
fault(
    "weight: {}",
    VALUE,
    needs=scaled,
    over=(
        way("scale dropped", torch.ones_like, seen="sglang PR 31529"),
        way("scale of the next column", rolled(-1, 1), seen="NVIDIA/cutlass 2087", family=INDEX),
        way("scale applied twice", lambda s: s * s, seen="unsloth PR 6978"),
        way("mantissa of the scale left out", lambda s: torch.exp2(torch.frexp(s)[1].to(torch.float64) - 1),
            seen="vllm PR 22399"),
        way("scales below 2^-6 flushed", lambda s: torch.where(s.abs() < 2.0**-6, 0.0, s), seen="vllm PR 34577",
            on=of_class(MarlinGemm, MmBf16Fp4),
            needs=both(scaled, e4m3)),
    ),
    recipe=lambda change: of("scale", change),
    same_if=EQUAL,
    admissible_if=ABOVE,
)  # fmt: skip  # a table, one row a line
fault(
    "weight: {}",
    VALUE,
    on=ZEROED,
    needs=zeroed,
    over=(
        way("zero point left out", torch.zeros_like, seen="vllm 20974"),
        way("zero point one less", lambda z: z - 1, seen="vllm PR 26092"),
        way("zero point one more", lambda z: z + 1, seen="vllm PR 38966"),
        way("zero point added", torch.neg, seen=MINE + "the sign of the other convention"),
        way("zero point of the next column", rolled(-1, 1),
            seen=MINE + "a column of scales beside another of zero points", family=INDEX),
        way("zero point of the next group", rolled(-1), seen="sglang 38573", family=INDEX, needs=both(zeroed, several)),
    ),
    recipe=lambda change: of("zero", change),
    same_if=EQUAL,
    admissible_if=ABOVE,
)  # fmt: skip  # a table, one row a line
fault(
    "GPTQ: zero point of 16 wrapped to 0",
    VALUE,
    seen="ModelCloud/GPTQModel 2350",
    on=of_class(GptqGemm),
    recipe=lambda call, plan: of("zero", lambda z: z % (1 << int(call.resolved["bit"])))(plan),
    needs=need(lambda call: not call.resolved["use_v2_format"], "zero points are stored as they are"),
    same_if="no zero point is the largest field",
    admissible_if=ABOVE,
)

# --- codes --------------------------------------------------------------------------------------------------


def _reversed(q: Tensor) -> Tensor:
    """Eight rows in reverse order."""
    return q.reshape(-1, 8, q.shape[1]).flip(1).reshape(q.shape) if q.shape[0] % 8 == 0 else q


def _eights(order: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Columns of every eight in another order."""
    return lambda q: q.reshape(q.shape[0], -1, 8)[:, :, list(order)].reshape(q.shape)


fault(
    "weight: {}",
    MOVEMENT,
    over=(
        way("codes of two rows exchanged", lambda q: pairs_swapped(q.t().contiguous()).t(),
            seen="vLLM csrc/quantization/marlin",
            needs=need(lambda call: plan_of(call).weights.codes.shape[0] % 2 == 0, "K is odd")),
        way("eight rows in reverse order", _reversed, seen="vLLM csrc/quantization/gptq/qdq_4.cuh"),
        way("codes of the next row", rolled(-1), seen=MINE + "an offset of one row"),
        way("codes of the next column", rolled(-1, 1), seen=MINE + "an offset of one column"),
        way("last 16 rows read as 0",
            lambda q: torch.where(torch.arange(len(q), device=q.device)[:, None] < len(q) - 16, q, 0.0),
            seen="pytorch/FBGEMM 6159"),
        way("AWQ's words in plain order", _eights((0, 2, 4, 6, 1, 3, 5, 7)),
            seen="vLLM csrc/quantization/awq/dequantize.cuh", on=of_class(Awq)),
        way("AWQ's order the other way round", _eights((0, 2, 4, 6, 1, 3, 5, 7)[::-1]),
            seen=MINE + "most significant nibble first", on=of_class(Awq)),
    ),
    recipe=lambda change: of("codes", change),
    same_if=EQUAL,
    admissible_if=ABOVE,
)  # fmt: skip  # a table, one row a line


def _plain(w: Weights) -> Weights:
    """Words of codes and of zero points with the nibbles of each in plain order."""
    assert w.zero is not None
    plain = _eights((0, 2, 4, 6, 1, 3, 5, 7))
    return replace(w, codes=plain(w.codes), zero=plain(w.zero))


fault(
    "weight: AWQ's words in plain order, those of zero points too",
    MOVEMENT,
    seen="vLLM csrc/quantization/awq/dequantize.cuh",
    on=of_class(Awq),
    recipe=weights(_plain),
    same_if=EQUAL,
    admissible_if=ABOVE,
)


def _type(call: Call) -> tuple[int, int, object]:
    return TYPES[str(call.resolved["b_type"])]


def _sign_extended(call: Call, q: Tensor) -> Tensor:
    """Fields of the upper half as negative ones."""
    bits, bias, _ = _type(call)
    return torch.where(q + bias >= 1 << bits - 1, q - (1 << bits), q)


integer = need(lambda call: _type(call)[2] is None, "codes are values of a format")
two_bits = need(lambda call: "float4" in str(call.resolved.get("b_type", "float4")), "codes are no E2M1")
fault(
    "weight: {}",
    CAST,
    over=(
        way("bias of the code left out", lambda call, q: q + _type(call)[1], seen="vLLM scalar_type.py",
            on=of_class(Typed),
            needs=need(lambda call: _type(call)[1] > 0, "the type has no bias")),
        way("codes read with a sign", _sign_extended, seen=MINE + "a field sign-extended", on=of_class(Typed),
            needs=integer),
        way("E2M1 of 0.5 flushed", lambda call, q: torch.where(q.abs() == 0.5, 0.0, q), seen="flashinfer PR 3932",
            on=of_class(MarlinGemm, MmBf16Fp4), needs=two_bits),
        way("E2M1 without its sign", lambda call, q: q.abs(), seen="flashinfer PR 3932",
            on=of_class(MarlinGemm, MmBf16Fp4), needs=two_bits),
    ),
    recipe=lambda change: lambda call, plan: of("codes", lambda q: change(call, q))(plan),
    same_if=EQUAL,
    admissible_if=ABOVE,
)  # fmt: skip  # a table, one row a line


def _truncated(call: Call, plan: Plan) -> Plan:
    """The rounded weight, toward zero."""
    exact = plan.weights.values(Form.EXACT if plan.form is Form.DIFFERENCE else plan.form, plan.a.dtype)
    less = decode(to_dtype(exact, plan.a.dtype, rounding=Rounding.TOWARD_ZERO, overflow=Overflow.INF))
    return replace(plan, weights=Weights(less, None, None, 0 * plan.weights.group))


fault(
    "weight: {}",
    CAST,
    over=(
        way("not rounded to the dtype of the activations", fields(form=Form.EXACT), seen="TensorRT-LLM PR 14464",
            on=PRODUCTS - of_class(MacheteMm)),
        way("truncated", _truncated, seen="vLLM csrc/quantization/marlin/dequant.h"),
    ),
    recipe=lambda change: change,
    same_if="every weight is a value of the dtype",
    admissible_if=ABOVE,
)  # fmt: skip  # a table, one row a line

# --- steps --------------------------------------------------------------------------------------------------


def without(place: Callable[[Step], bool]) -> Callable[[Plan], Plan]:
    """RECIPE: a step left out."""
    return lambda plan: replace(plan, steps=tuple(step for step in plan.steps if step.by is None or not place(step)))


def by(place: Callable[[Step], bool], change: Callable[[Tensor], Tensor]) -> Callable[[Plan], Plan]:
    """RECIPE: another factor or summand."""
    return lambda plan: replace(
        plan, steps=tuple(replace(s, by=change(s.by)) if s.by is not None and place(s) else s for s in plan.steps)
    )


def _bias_first(plan: Plan) -> Plan:
    """The bias added in float32, one rounding behind it."""
    rest = [step for step in plan.steps if step.word != "plus"]
    bias = [Step("plus", torch.float32, step.by) for step in plan.steps if step.word == "plus"]
    at = next(i for i, step in enumerate(rest) if step.by is None)
    return replace(plan, steps=(*rest[:at], *bias, *rest[at:]))


def _in_output(plan: Plan) -> Plan:
    """Float32 factors behind the cast, in the dtype of the output."""
    dtype = plan.steps[-1].dtype
    return replace(
        plan, steps=(Step("store", dtype), *(replace(s, dtype=dtype) for s in plan.steps if s.by is not None))
    )


def step(holds: Callable[[Step], bool], otherwise: str) -> WhyNot:
    """The plan has such a step."""
    return need(lambda call: any(s.by is not None and holds(s) for s in plan_of(call).steps), otherwise)


def times(s: Step) -> bool:
    return s.word == "times"


def plus(s: Step) -> bool:
    return s.word == "plus"


factor, summand = step(times, "no factor is behind the sum"), step(plus, "there is no bias")
STEPPED = of_class(MarlinGemm, MacheteMm, MmBf16Fp4)
fault(
    "product: {}",
    VALUE,
    on=STEPPED,
    needs=factor,
    over=(
        way("factor behind the sum left out", without(times), seen="TensorRT-LLM PR 14199"),
        way("factor behind the sum applied twice",
            by(times, lambda x: x * x), seen="unsloth PR 6978"),
        way("factor of the next column or row",
            by(times, rolled(-1)), seen="NVIDIA/cutlass 2154", family=INDEX),
        way("float32 factors behind the cast", _in_output, seen="vllm PR 37135", family=ARITHMETIC,
            needs=step(lambda s: times(s) and s.dtype is torch.float32, "no factor is in float32")),
        way("bias left out", without(plus), seen="vllm PR 43694", on=of_class(MarlinGemm), needs=summand),
        way("bias of the next column", by(plus, rolled(-1)), seen="vLLM marlin_permute_bias", on=of_class(MarlinGemm),
            needs=summand, family=INDEX),
        way("bias added before the cast", _bias_first, seen=MINE + "one rounding less",
            on=of_class(MarlinGemm), needs=summand, family=ARITHMETIC),
    ),
    recipe=lambda change: change,
    same_if=EQUAL,
    admissible_if=ABOVE,
)  # fmt: skip  # a table, one row a line

fault(
    "product: activations rounded to float16",
    CAST,
    seen="FlashInfer 0.6.18 dense_gemm_bf16_fp4_sm12x.py, use_fp16_mma, which is its default",
    on=of_class(MmBf16Fp4),
    recipe=lambda plan: replace(plan, a=plan.a.to(torch.float16).to(plan.a.dtype)),
    same_if="every activation is a float16 value",
    admissible_if=ABOVE,
)

# --- experts ------------------------------------------------------------------------------------------------

routed = need(lambda call: "topk_weights" in call.inputs, "there are no routing weights")


def _next_expert(ids: Tensor) -> Tensor:
    """Each expert replaced by the next one of the call."""
    known = torch.unique(ids[ids >= 0])
    at = torch.searchsorted(known, ids.clamp(min=int(known[0])))
    return torch.where(ids >= 0, known[(at + 1) % len(known)].to(ids.dtype), ids)


two = need(lambda call: len(torch.unique(call.inputs["topk_ids"])) > 1, "one expert is in use")
fault(
    "weight-only experts: {}",
    MOVEMENT,
    on=of_class(Experts),
    over=(
        way("weight of the next expert", entry("topk_ids", _next_expert), seen="flashinfer 3547", needs=two),
        way("experts of the next token", entry("topk_ids", rolled(-1)), seen="vllm PR 43694", needs=two),
        way("routing weight of the next token", entry("topk_weights", rolled(-1)), seen="vllm 48895", needs=routed),
        way("routing weight left out", entry("topk_weights", lambda w: torch.ones_like(w)),
            seen="TensorRT-LLM PR 14199", needs=routed),
        way("routing weight applied twice", entry("topk_weights", lambda w: w * w),
            seen=MINE + "multiplied here and in the sum", needs=routed),
    ),
    read=lambda change: change,
    same_if=EQUAL,
    admissible_if=ABOVE,
)  # fmt: skip  # a table, one row a line
fault(
    "weight-only experts: routing weight not rounded",
    ARITHMETIC,
    seen="vLLM csrc/moe/marlin_moe_wna16",
    on=of_class(MoeWna16MarlinGemm),
    needs=routed,
    recipe=lambda call, plan: replace(
        plan,
        steps=(
            *plan.steps[:-1],
            replace(plan.steps[-1], by=decode(call.inputs["topk_weights"]).flatten()[plan.rows, None]),
        ),
    ),
    same_if="every weight is a value of the dtype",
    admissible_if=ABOVE,
)

# --- the output ---------------------------------------------------------------------------------------------


def _truncating(out: Tensor) -> Tensor:
    """The value next toward zero, for every element that is not 0."""
    return decode(out).mul(1 - 2.0**-7).to(out.dtype)


def _narrow(call: Call, out: Tensor) -> Tensor:
    """Sums of 16 rows of K each, stored and added in the dtype of the activations."""
    plan = plan_of(call)
    a, w, t = decode(plan.a), plan.weights.values(plan.form, plan.a.dtype), plan.a.dtype
    total = torch.zeros((a.shape[0], w.shape[1]), dtype=torch.float64, device=a.device)
    for k in range(0, w.shape[0], 16):
        total = decode(rounded_to(total + decode(rounded_to(a[:, k : k + 16] @ w[k : k + 16], t)), t))
    for one in plan.steps:
        total = one(total)
    return rounded_to(total, out.dtype)


rows = need(lambda call: call.truth["out"].shape[0] > 1, "one row")
fault(
    "product: {}",
    MOVEMENT,
    on=MULTIPLIED,
    over=(
        way("rows of the output shifted by one", lambda call, out: out.roll(1, 0), seen="flashinfer 4396", needs=rows),
        way("first row repeated", lambda call, out: out[:1].expand(out.shape).contiguous(), seen="flashinfer PR 2716",
            needs=rows),
        way("last 8 columns not written",
            lambda call, out: torch.cat([out[..., :-8], torch.zeros_like(out[..., -8:])], dim=-1),
            seen="kernels-community 1153"),
        way("output one part in 128 low", lambda call, out: _truncating(out),
            seen=MINE + "a constant ratio", family=CAST),
        way("partial sums of 16 rows in the dtype of the activations", _narrow, seen="DeepGEMM 37", family=ARITHMETIC,
            on=MULTIPLIED - of_class(Experts)),
    ),
    write=lambda change: entry("out", lambda call, out: change(call, out)),
    same_if=EQUAL,
    admissible_if=ABOVE,
)  # fmt: skip  # a table, one row a line


fault(
    "low-rank part: {}",
    VALUE,
    on=of_class(MmNvFp4Svdquant),
    over=(
        way("left out", entries(("d",), torch.zeros_like), seen=MINE + "the residual product alone"),
        way("of the next row", entries(("d",), rolled(-1)), seen=MINE + "a row too far", family=INDEX),
        way("of the next column", entries(("l1",), rolled(-1)), seen=MINE + "a row too far", family=INDEX),
        way("whose last 32 columns are left out", entries(("d",), lambda d: torch.cat([d[:, :-32], 0 * d[:, -32:]], 1)),
            seen="FlashInfer gemm_svdquant.py: ranks beyond the granularity"),
        way("not divided by alpha", entry("l1", lambda call, x: x * float(call.inputs["alpha"])),
            seen="FlashInfer gemm_svdquant.py: 1/alpha must be folded into l1"),
        way("scales of the next 16 columns", entries(("a_sf", "b_sf"), rolled(-1, 1)), seen="NVIDIA/cutlass 2087",
            family=INDEX),
        way("scales of the next row", entries(("a_sf",), rolled(-1)), seen="vllm 42118", family=INDEX),
    ),
    read=itself,
    same_if=EQUAL,
    admissible_if=ABOVE,
)  # fmt: skip  # a table, one row a line
