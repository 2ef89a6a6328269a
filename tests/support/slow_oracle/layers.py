"""Routing, whole expert layers, the linear layer, casts through float16 and the difference measure."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from tests.support.slow_oracle.numbers import (
    Array,
    Value,
    decided,
    encode,
    exp_bounds,
    multiply,
    rounded,
    sigmoid_bounds,
)
from tests.support.slow_oracle.products import part, scaled, transposed
from tests.support.slow_oracle.quantisers import RULES, Rule, blocks

F32 = "float32"
E4M3 = "float8_e4m3fn"
BISECTIONS, ROOT_BITS = 90, 80
Bounds = tuple[Fraction, Fraction]


def finite(values: list[Value]) -> list[Fraction]:
    found = [v for v in values if isinstance(v, Fraction)]
    assert len(found) == len(values), "outside this derivation: NaN or infinity"
    return found


def order(bounds: list[Bounds]) -> list[int]:
    """Indices from the largest, where the bounds decide it; ArithmeticError where they do not."""
    ranked = sorted(range(len(bounds)), key=lambda i: (-bounds[i][0], i))
    for i, j in zip(ranked, ranked[1:], strict=False):
        equal = bounds[i] == bounds[j]
        if not equal and not bounds[i][0] > bounds[j][1]:
            raise ArithmeticError(f"the bounds of {i} and {j} overlap")
    return ranked


def routing(logits: Array, bias: Array | None, options: dict[str, object]) -> dict[str, list[int]]:
    """Weights (float32 codes) and experts, largest choice first."""
    router = options.get("router", "deepseek_v3")
    score = {"softmax": softmax}.get(str(router), sigmoids)
    return chosen(logits, bias, options, score=score, by_logit=router == "llama4")


def library_routing(name: str, inputs: dict[str, Array], options: dict[str, object]) -> dict[str, list[int]]:
    """Routers of libraries: weights, and -1 for the experts of padding; the rounding of a bias, methods of one sum."""
    score, by_logit, more = sigmoids, False, dict(options)
    bias, weights = inputs.get("bias"), F32
    epsilon = Fraction(0)
    if name == "topk_softmax":
        score = softmax
    elif name == "topk_softplus_sqrt":
        score = softplus_roots
    elif name != "topk_sigmoid":
        epsilon = EPSILON
    if name == "fused_topk_deepseek":
        weights, more["renormalize"] = inputs["logits"].dtype, True
    if name == "trtllm_moe_routing":
        method = str(options["routing_method"])
        assert method in ("DeepSeekV3", "Renormalize"), "outside this derivation"
        weights, more["renormalize"] = "bfloat16", True
        if method == "Renormalize":
            score, by_logit, epsilon = softmax, True, Fraction(0)
        elif bias is not None and options["num_expert_group"] != 1:
            codes = [encode(v, "bfloat16") for v in finite(bias.values())]
            bias = Array("bfloat16", bias.shape, codes)
    found = chosen(inputs["logits"], bias, more, score=score, by_logit=by_logit, epsilon=epsilon, stored=weights)
    k = int(str(options["top_k"]))
    padding = inputs["is_padding"].codes if "is_padding" in inputs else [0] * inputs["logits"].shape[0]
    found["topk_ids"] = [-1 if padding[i // k] else expert for i, expert in enumerate(found["topk_ids"])]
    return found


ROUTERS = (
    "topk_softmax",
    "topk_sigmoid",
    "topk_softplus_sqrt",
    "grouped_topk",
    "fused_topk_deepseek",
    "trtllm_moe_routing",
)
EPSILON = Fraction(1, 10**20)
Scoring = Callable[[list[Fraction]], list[Bounds]]


def chosen(
    logits: Array,
    bias: Array | None,
    options: dict[str, object],
    *,
    score: Scoring,
    by_logit: bool,
    epsilon: Fraction = Fraction(0),
    stored: str = F32,
) -> dict[str, list[int]]:
    """Weights (codes of ``stored``) and experts, largest choice first."""
    k, groups, top_groups = (
        int(str(options.get(n, d))) for n, d in (("top_k", 8), ("num_expert_group", 1), ("topk_group", 1))
    )
    factor = Fraction(float(str(options.get("routed_scaling_factor", 1.0))))
    weights: list[int] = []
    ids: list[int] = []
    for row in logits.rows():
        x = finite(row)
        scores = score(x)
        shift = [Fraction(0)] * len(x) if bias is None else finite(bias.values())
        choice = [(v, v) for v in x] if by_logit else [(s[0] + b, s[1] + b) for s, b in zip(scores, shift, strict=True)]
        size = len(x) // groups
        of_group = [group_score(choice[g * size : (g + 1) * size], bias is not None) for g in range(groups)]
        kept = sorted(order(of_group)[:top_groups])
        members = [i for g in kept for i in range(g * size, (g + 1) * size)]
        taken = [members[i] for i in order([choice[i] for i in members])[:k]]
        found = [scores[i] for i in taken]
        if options.get("renormalize"):
            found = [
                (
                    s[0] / (s[0] + sum(t[1] for j, t in enumerate(found) if j != i) + epsilon),
                    s[1] / (s[1] + sum(t[0] for j, t in enumerate(found) if j != i) + epsilon),
                )
                for i, s in enumerate(found)
            ]
        weights += [decided(low * factor, high * factor, stored) for low, high in found]
        ids += taken
    return {"topk_weights": weights, "topk_ids": ids}


def sigmoids(x: list[Fraction]) -> list[Bounds]:
    return [sigmoid_bounds(v) for v in x]


def softplus_roots(x: list[Fraction]) -> list[Bounds]:
    """``sqrt(log(1 + exp(x)))``: the root of the y with ``exp(y) = 1 + exp(x)``, found by halving."""
    return [_root_bounds(*_softplus_bounds(v)) for v in x]


def _softplus_bounds(x: Fraction) -> Bounds:
    low, high = Fraction(0), max(x, Fraction(0)) + 1
    target = exp_bounds(x)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        value = exp_bounds(middle)
        if value[1] < 1 + target[0]:
            low = middle
        elif value[0] > 1 + target[1]:
            high = middle
        else:
            break
    return low, high


def _root_bounds(low: Fraction, high: Fraction) -> Bounds:
    unit = 2**ROOT_BITS
    below = math.isqrt(low.numerator * unit * unit // low.denominator)
    above = math.isqrt(-(-high.numerator * unit * unit // high.denominator)) + 1
    return Fraction(below, unit), Fraction(above, unit)


def group_score(choice: list[Bounds], biased: bool) -> Bounds:
    best = [choice[i] for i in order(choice)[: 2 if biased else 1]]
    return sum((b[0] for b in best), Fraction(0)), sum((b[1] for b in best), Fraction(0))


def softmax(x: list[Fraction]) -> list[Bounds]:
    e = [exp_bounds(v - max(x)) for v in x]
    low, high = sum(b[0] for b in e), sum(b[1] for b in e)
    return [(b[0] / high, b[1] / low) for b in e]


def experts(inputs: dict[str, Array], options: dict[str, object]) -> list[int]:
    """``moe_fp8``: w13, silu and mul, requantised intermediate, w2, weighted sum, in bfloat16; from quantised input, or
    from one that is quantised here, in groups of 128 or with the given scale."""
    assert not set(options) - {
        "out_dtype",
        "activation_rounding",
        "limit",
        "first_expert",
        "apply_router_weight_on_input",
    }
    ids, weights = inputs["topk_ids"].code_rows(), inputs["topk_weights"].rows()
    first, on_input = int(str(options.get("first_expert", 0))), bool(options.get("apply_router_weight_on_input"))
    tokens = quantised_rows(inputs, on_input) if "x" in inputs else scaled_rows(inputs)
    found: list[int] = []
    for (a, a_scale), chosen, factors in zip(tokens, ids, weights, strict=True):
        total = [Fraction(0)] * len(a)
        for expert, weight in zip(chosen, finite(factors), strict=True):
            if not first <= expert < first + inputs["w13"].shape[0]:
                continue
            y = one_expert(a, a_scale, inputs, expert - first, options)
            factor = Fraction(1) if on_input else weight
            total = [s + factor * v for s, v in zip(total, finite(y), strict=True)]
        found += [encode(v, str(options["out_dtype"])) for v in total]
    return found


def scaled_rows(inputs: dict[str, Array]) -> list[tuple[list[Value], list[Value]]]:
    """Codes and scales of each token as they are given; one scale serves all."""
    rows, scales = inputs["a"].rows(), inputs["a_scale"].rows()
    return list(zip(rows, scales * (len(rows) if len(scales) == 1 else 1), strict=True))


def quantised_rows(inputs: dict[str, Array], on_input: bool) -> list[tuple[list[Value], list[Value]]]:
    """Codes and scales made of each token, which is multiplied by its weight, in its dtype, before."""
    x, given = inputs["x"], inputs.get("a_scale")
    rows = []
    for codes, weight in zip(x.code_rows(), inputs["topk_weights"].rows(), strict=True):
        row = Array(x.dtype, (1, x.shape[1]), codes)
        if on_input:
            (factor,) = weight
            factor = rounded(finite([factor])[0], x.dtype)
            row = Array(x.dtype, row.shape, [encode(multiply(v, factor), x.dtype) for v in row.values()])
        rows.append(grouped(row, given))
    return rows


def grouped(row: Array, given: Array | None) -> tuple[list[Value], list[Value]]:
    """The codes of one row, as values, and its scales: one for each 128 elements, or the given one."""
    rule = RULES["group"] if given is None else Rule(zero_scale_gives_zero=True)
    scale = None if given is None else given.values()[0]
    codes, scales = blocks(row, 1, 128 if given is None else row.shape[1], rule, scale=scale)
    return Array(E4M3, row.shape, codes).values(), Array(F32, (len(scales),), scales).values()


def one_expert(
    a: list[Value], a_scale: list[Value], inputs: dict[str, Array], expert: int, options: dict[str, object]
) -> list[Value]:
    h = finite(stored(a, a_scale, inputs, "w13", expert))
    size, rounding, limit = len(h) // 2, options.get("activation_rounding", "EACH"), options.get("limit")
    between = F32 if rounding == "NONE" else "bfloat16"
    act = []
    for gate, up in zip(h[:size], h[size:], strict=True):
        if limit is not None:
            bound = Fraction(float(str(limit)))
            gate, up = min(gate, bound), min(max(up, -bound), bound)
        act.append(silu_times(gate, up, between, between=between if rounding == "EACH" else None))
    made = grouped(Array(between, (1, size), act), inputs.get("a2_scale"))
    return stored(*made, inputs, "w2", expert)


def stored(
    a: list[Value], a_scale: list[Value], inputs: dict[str, Array], which: str, expert: int, dtype: str = "bfloat16"
) -> list[Value]:
    weight, scale = part(inputs[which], expert), inputs[f"{which}_scale"]
    if len(scale.shape) == 1:
        table, block, rows = [[scale.values()[expert]]], weight.shape[1], weight.shape[0]
    else:
        table, block, rows = part(scale, expert).rows(), 128, 128
    codes = scaled([a], weight.rows(), [a_scale], table, block=block, b_rows=rows, bias=None, dtype=dtype)
    return Array(dtype, (len(codes),), codes).values()


def tensor_experts(inputs: dict[str, Array], options: dict[str, object]) -> list[int]:
    """``apply_fi_trtllm_fp8_per_tensor_moe``: the expert of the largest logit, its sigmoid in the input's scale."""
    assert inputs["w13"].dtype == E4M3
    x, logits = inputs["hidden_states"], inputs["router_logits"]
    first, second = (finite(inputs[f"{name}_input_scale"].values())[0] for name in ("w13", "w2"))
    local = inputs["w13"].shape[0]
    rule = Rule(zero_scale_gives_zero=True)
    codes = Array(E4M3, x.shape, blocks(x, x.shape[0], x.shape[1], rule, scale=first)[0]).rows()
    found: list[int] = []
    for t, row in enumerate(logits.rows()):
        own = finite(row)
        expert = own.index(max(own)) - int(str(options["ep_rank"])) * local
        if not 0 <= expert < local:
            found += [0] * x.shape[1]
            continue
        low, high = sigmoid_bounds(max(own))
        kept = str(options.get("weight_dtype") or F32)
        weight = Array(kept, (1,), [decided(low, high, kept)]).values()[0]
        scale = rounded(multiply(weight, first), F32)
        h = finite(stored(codes[t], [scale], inputs, "w13", expert, F32))
        act = [silu_times(g, u, F32) for g, u in zip(h[: len(h) // 2], h[len(h) // 2 :], strict=True)]
        inner = Array(F32, (1, len(act)), act)
        q = Array(E4M3, inner.shape, blocks(inner, 1, len(act), rule, scale=second)[0]).values()
        found += [encode(v, "bfloat16") for v in stored(q, [second], inputs, "w2", expert, F32)]
    return found


def silu_and_mul(x: Array, options: dict[str, object]) -> list[int | None]:
    """Gate and up of every row; None where a special value leaves it open."""
    limit, half = options.get("limit"), x.shape[-1] // 2
    found: list[int | None] = []
    for row in x.rows():
        for gate, up in zip(row[:half], row[half:], strict=True):
            if not (isinstance(gate, Fraction) and isinstance(up, Fraction)):
                found.append(special(gate, up, x.dtype, limit is not None))
                continue
            if limit is not None:
                bound = Fraction(float(str(limit)))
                gate, up = min(gate, bound), min(max(up, -bound), bound)
            found.append(silu_times(gate, up, x.dtype, between=x.dtype if options.get("round_silu") else None))
    return found


def silu_times(gate: Fraction, up: Fraction, dtype: str, *, between: str | None = None) -> int:
    """``silu(gate) * up`` rounded once, or also after silu."""
    ends = sorted(gate * s for s in sigmoid_bounds(gate))
    if between is not None:
        silu = Array(between, (1,), [decided(ends[0], ends[1], between)]).values()[0]
        return encode(multiply(silu, up), dtype)
    low, high = sorted(s * up for s in ends)
    return decided(low, high, dtype)


def special(gate: Value, up: Value, dtype: str, clamped: bool) -> int | None:
    """NaN stays NaN and an infinite gate keeps its sign's meaning, without a clamp; else nothing is derived."""
    values = [v for v in (gate, up) if isinstance(v, float)]
    if clamped:
        return None
    if any(math.isnan(v) for v in values):
        return encode(math.nan, dtype)
    if gate == math.inf:
        return encode(math.nan, dtype) if up == 0 else encode(multiply(gate, up), dtype)
    return None


def linear(inputs: dict[str, Array], options: dict[str, object]) -> list[int]:
    """``Fp8LinearOp`` of a matrix: quantise (static, per tensor, per token), multiply, add the bias."""
    x, weight, given = inputs["input"], transposed(inputs["weight"]), inputs.get("input_scale")
    per_token = bool(options.get("use_per_token_if_dynamic")) and given is None
    rule = RULES["token"] if per_token else RULES["tensor"]
    if per_token:
        # plain torch's formula: the reference's first recipe
        rule = Rule(scale_floor=RULES["token"].scale_floor, nan_in_amax=True)
    rows = 1 if per_token else x.shape[0]
    codes, scales = blocks(x, rows, x.shape[1], rule, scale=None if given is None else given.values()[0])
    left = [[v] for v in Array(F32, (len(scales),), scales).values()]
    right = [[v] for v in inputs["weight_scale"].values()]
    bias = inputs["bias"].values() if "bias" in inputs else None
    b_rows = weight.shape[0] if len(right) == 1 else 1
    q = Array(E4M3, x.shape, codes).rows()
    dtype = str(options["out_dtype"])
    return scaled(q, weight.rows(), left, right, block=x.shape[1], b_rows=b_rows, bias=bias, dtype=dtype)


def dequantised(q: Array, scale: Value) -> list[int]:
    """Through float32 to float16: two roundings."""
    wide = [rounded(multiply(v, scale), F32) for v in q.values()]
    return [encode(v, "float16", negative_zero=code >= 0x80) for v, code in zip(wide, q.codes, strict=True)]


def requantised(weight: Array, scales: Array, widths: Array) -> dict[str, list[int]]:
    largest = max(finite(scales.values()))
    found: list[int] = []
    start = 0
    for scale, width in zip(scales.values(), widths.codes, strict=True):
        size = width * weight.shape[1]
        shard = Array(weight.dtype, (width, weight.shape[1]), weight.codes[start : start + size])
        start += size
        wide = Array("float16", shard.shape, dequantised(shard, scale))
        found += blocks(wide, max(width, 1), weight.shape[1], RULES["tensor"], scale=largest)[0]
    return {"max_scale": [encode(largest, F32)], "weight": found + weight.codes[start:]}


def scale_products(inputs: dict[str, Array]) -> dict[str, list[Value]]:
    first, second = inputs["w13_input_scale"].values()[0], inputs["w2_input_scale"].values()[0]
    return {
        "g1": [rounded(multiply(v, first), F32) for v in inputs["w13_scale"].values()],
        "g2": [rounded(multiply(v, second), F32) for v in inputs["w2_scale"].values()],
    }


def difference(x: Array, y: Array) -> int:
    """``1 - 2 <x, y> / (<x, x> + <y, y>)``: exact sums, then float64 operations one by one."""
    a, b = finite(x.values()), finite(y.values())
    both, own = sum(p * q for p, q in zip(a, b, strict=True)), sum(p * p for p in a + b)
    if own == 0:
        return 0
    quotient = rounded(2 * _of(both) / _of(own), "float64")
    assert isinstance(quotient, Fraction)
    return encode(1 - quotient, "float64")


def _of(x: Fraction | int) -> Fraction:
    value = rounded(Fraction(x), "float64")
    assert isinstance(value, Fraction)
    return value
