"""Layers of experts by pipeline, a second time: fractions, every rounding that a library makes on its own.

``ROWS`` says what each library does, read off its source: how the input and the intermediate are quantised, where
``silu(gate) * up`` is rounded, whether up rows come first, and how the experts' outputs are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from tests.support.slow_oracle.layers import finite, order, silu_times
from tests.support.slow_oracle.numbers import (
    Array,
    decided,
    decode,
    encode,
    rounded,
    sigmoid_bounds,
)
from tests.support.slow_oracle.products import part, scaled

F32, BF16, E4M3 = "float32", "bfloat16", "float8_e4m3fn"
Inputs = dict[str, Array]
Numbers = list[Fraction]
TOP = Fraction(448)


@dataclass(frozen=True)
class Row:
    """One library's layer; ``add``: in float32, or rounded to bfloat16 each time; ``early``: weighted before a store;
    ``narrow``: the weight in bfloat16, and the product."""

    quantise: str
    requantise: str
    silu: str = "each"
    up_first: bool = False
    add: str = "float32"
    early: bool = False
    narrow: bool = False
    weighted: bool = False
    columns: int = 128


_TRITON = {"add": "bfloat16", "early": True}  # two slots: moe_sum
_FUSED = {"add": "bfloat16", "early": True, "up_first": True}
ROWS = {
    "fused_experts_tensor": Row("static", "static", **_TRITON),
    "fused_experts_channel": Row("token", "token", **_TRITON),
    "fused_experts_block": Row("group", "group", **_TRITON),
    "deep_gemm_moe": Row("group", "group"),
    "batched_deep_gemm_moe": Row("group", "narrow"),
    "cutlass_moe_fp8": Row("static", "static"),
    "cutlass_moe_fp8_channel": Row("token", "token"),
    "cutlass_fused_experts_fp8": Row("sglang", "sglang"),
    "deepep_moe_masked": Row("deepep", "group"),
    "ep_moe_masked": Row("sglang", "group", add="bfloat16", narrow=True),
    "cutlass_fused_moe_tensor": Row("", "times", "none", **_FUSED),
    "cutlass_fused_moe_block": Row("flashinfer", "flashinfer", "product", up_first=True),
    "cutlass_fused_moe_w4": Row("times", "times", "product", **_FUSED),
    "trtllm_fp8_block_scale_moe": Row("", "trtllm", "none", up_first=True),
    "mono_moe": Row("sglang", "sglang", "none", early=True, weighted=True, columns=64),
    "fp8_mega_moe": Row("", "power", "none", weighted=True, columns=64),
    "trtllm_fp8_per_tensor_scale_moe": Row("", "plain", "none", up_first=True),
}


def number(x: Fraction, dtype: str) -> Fraction:
    found = rounded(x, dtype)
    assert isinstance(found, Fraction)
    return found


def coded(x: Fraction) -> Fraction:
    """The nearest E4M3 value, saturated."""
    return number(number(x, F32), E4M3)


def one_group(x: Numbers, kind: str) -> tuple[Numbers, Fraction]:
    """Codes and scale of values that share one."""
    floors = {"group": 1e-10, "sglang": 1e-10, "deepep": 1e-4}
    a = max(max(abs(v) for v in x), number(Fraction(floors.get(kind, 0.0)), F32))
    inverse = number(TOP / a, F32)
    if kind == "flashinfer":
        return [coded(v * inverse) for v in x], number(1 / inverse, F32)
    if kind in ("sglang", "deepep"):
        return [coded(v * inverse) for v in x], number(a * number(1 / TOP, F32), F32)
    if kind == "power":
        s = number(a * number(1 / TOP, F32), F32)
        power = Fraction(2) ** -200
        while power < s:
            power *= 2
        return [coded(v / power) for v in x], power
    s = number(a / TOP, F32)
    floor = {"token": number(Fraction(1 / (448 * 512)), F32), "trtllm": Fraction(2) ** -126}.get(kind, Fraction(0))
    s = max(s, floor)
    return [coded(v / s) for v in x], s


def narrow_group(x: Numbers) -> tuple[Numbers, Fraction]:
    """Every operation a bfloat16 one."""
    a = max(max(abs(v) for v in x), number(Fraction(1e-10), BF16))
    s = number(a * number(1 / TOP, BF16), BF16)
    return [number(number(v * number(1 / s, BF16), BF16), E4M3) for v in x], s


def quantised(x: Numbers, kind: str, given: Fraction | None, columns: int = 128) -> tuple[Numbers, Numbers]:
    """Codes and scales of one row."""
    if kind == "static":
        assert given is not None
        return [coded(v * number(1 / given, F32)) for v in x], [given]
    if kind in ("plain", "times"):
        return [coded(v) for v in x], [Fraction(1)]
    width = len(x) if kind == "token" else columns
    made = [
        narrow_group(x[k : k + width]) if kind == "narrow" else one_group(x[k : k + width], kind)
        for k in range(0, len(x), width)
    ]
    return [v for q, _ in made for v in q], [s for _, s in made]


def multiplied(a: Numbers, a_scale: Numbers, inputs: Inputs, which: str, expert: int, dtype: str, row: Row) -> Numbers:
    """One row times the weight of an expert, rounded once; gate rows first."""
    weight = part(inputs[which], expert)
    scale, (n, k) = inputs[f"{which}_scale"], weight.shape
    if len(scale.shape) == 1:
        table, block, rows = [[scale.values()[expert]]] * n, k, 1
        if which == "w13" and "up_scale" in inputs:
            table = [[inputs["up_scale"].values()[expert]]] * (n // 2) + table[n // 2 :]
    elif len(scale.shape) == 2:
        table, block, rows = [[v] for v in part(scale, expert).values()], k, 1
    else:
        table, block, rows = part(scale, expert).rows(), 128, 1 if scale.shape[1] == n else 128
    if "alpha1" in inputs:
        a_scale = [inputs["alpha1" if which == "w13" else "alpha2"].values()[expert]]  # type: ignore[list-item]
    if row.columns != block == 128:  # a scale of each half of a block
        table = [[v for v in scales for _ in range(2)] for scales in table]
        a_scale = a_scale if which == "w2" else [v for v in a_scale for _ in range(2)]
        block = row.columns
        table = [scales[: -(-k // block)] for scales in table]
        a_scale = a_scale[: len(table[0])]
    spread = a_scale if len(a_scale) > 1 else a_scale * len(table[0])
    codes = scaled([list(a)], weight.rows(), [list(spread)], table, block=block, b_rows=rows, bias=None, dtype=dtype)
    found = finite([decode(c, dtype) for c in codes])
    return found[n // 2 :] + found[: n // 2] if which == "w13" and row.up_first else found


def one_expert(
    a: Numbers, a_scale: Numbers, inputs: Inputs, expert: int, name: str, dtype: str, weight: Fraction
) -> Numbers:
    row = ROWS[name]
    wide = name.startswith("trtllm") or row.weighted
    h = multiplied(a, a_scale, inputs, "w13", expert, F32 if wide else BF16, row)
    if name == "trtllm_fp8_block_scale_moe":
        q, s = quantised(h, "trtllm", None)
        h = [number(v * s[i // 128], F32) for i, v in enumerate(q)]
    half, between = len(h) // 2, F32 if row.silu == "none" else BF16
    act = [
        silu_times(g, u, between, between=BF16 if row.silu == "each" else None)
        for g, u in zip(h[:half], h[half:], strict=True)
    ]
    x = finite([decode(c, between) for c in act])
    x = [number(v * weight, F32) for v in x] if row.weighted else x
    if row.requantise == "times":
        factors = finite(inputs["prequant2" if "prequant2" in inputs else "fc2_act_scale"].values())
        x = [number(v * factors[i % len(factors)], between) for i, v in enumerate(x)]
    given = finite(inputs["a2_scale"].values())[0] if "a2_scale" in inputs else None
    made = quantised(x, row.requantise, given, row.columns)
    return multiplied(*made, inputs, "w2", expert, dtype, row)


def chosen(inputs: Inputs, options: dict[str, object]) -> tuple[list[list[int]], list[Numbers]]:
    """Experts and weights of every token, as given or routed as DeepSeek-V3 does without groups."""
    if "topk_ids" in inputs:
        return inputs["topk_ids"].code_rows(), [finite(row) for row in inputs["topk_weights"].rows()]
    assert options["routing_method"] == "DeepSeekV3" and options["n_group"] == 1 and "bias" not in inputs
    factor, kept = Fraction(float(str(options["routed_scaling_factor"]))), str(options["weight_dtype"])
    ids, weights = [], []
    for row in inputs["logits"].rows():
        scores = [sigmoid_bounds(v) for v in finite(row)]
        taken = order(scores)[: int(str(options["top_k"]))]
        low, high = (sum((scores[i][end] for i in taken), Fraction(0)) + Fraction(1e-20) for end in (0, 1))
        codes = [decided(scores[i][0] / high * factor, scores[i][1] / low * factor, kept) for i in taken]
        ids.append(taken)
        weights.append(finite([decode(c, kept) for c in codes]))
    return ids, weights


def tokens(inputs: Inputs, row: Row) -> list[tuple[Numbers, Numbers]]:
    """Codes and scales of every token."""
    if "a" in inputs:
        scales = inputs["a_scale"].rows() if "a_scale" in inputs else [[Fraction(1)]] * inputs["a"].shape[0]
        return [(finite(a), finite(s)) for a, s in zip(inputs["a"].rows(), scales, strict=True)]
    found, given = [], finite(inputs["a1_scale"].values())[0] if "a1_scale" in inputs else None
    for values in inputs["x"].rows():
        x = finite(values)
        if row.quantise == "times":
            factors = finite(inputs["prequant1"].values())
            x = [number(v * f, BF16) for v, f in zip(x, factors, strict=True)]
        found.append(quantised(x, row.quantise, given))
    return found


def experts(name: str, inputs: Inputs, options: dict[str, object]) -> list[int]:
    """The output, bfloat16."""
    row, first = ROWS[name], int(str(options.get("first_expert", 0)))
    found: list[int] = []
    for (a, s), ids, weights in zip(tokens(inputs, row), *chosen(inputs, options), strict=True):
        total = [Fraction(0)] * len(a)
        for expert, weight in zip(ids, weights, strict=True):
            if not first <= expert < first + inputs["w13"].shape[0]:
                continue
            y = one_expert(a, s, inputs, expert - first, name, F32 if row.early else BF16, weight)
            factor = Fraction(1) if row.weighted else number(weight, BF16) if row.narrow else weight
            terms = [factor * v for v in y]
            if (row.early and not row.weighted) or row.narrow:
                terms = [number(v, BF16) for v in terms]
            total = [t + v for t, v in zip(total, terms, strict=True)]
            if row.add == "bfloat16":
                total = [number(t, BF16) for t in total]
        found += [encode(t, BF16) for t in total]
    return found
