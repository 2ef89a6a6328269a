"""Layers of experts in blocks, a second time: fractions, every rounding that a library makes on its own.

``ROWS`` says what each library does, read off its source: the format of rows, whether up rows come first, whether what
stands between the products is float32, and how the experts' outputs are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from tests.support.slow_oracle.layers import finite
from tests.support.slow_oracle.mx import FLOAT_MAX, FP4, fp4, shared_byte
from tests.support.slow_oracle.numbers import Array, Value, decided, decode, encode, rounded, sigmoid_bounds

F32, BF16, E4M3 = "float32", "bfloat16", "float8_e4m3fn"
Inputs = dict[str, Array]
Numbers = list[Fraction]


@dataclass(frozen=True)
class Row:
    """One library's layer: ``rows`` is the format of input and intermediate, ``wide`` an intermediate of float32."""

    rows: str
    up_first: bool = True
    wide: bool = False
    narrow_weight: bool = False
    stored: bool = False
    weighted: bool = False
    scattered: bool = False


ROWS = {
    "cutlass_moe_fp4": Row("nvfp4", up_first=False, narrow_weight=True),
    "cutlass_moe_mxfp4": Row("mxfp4", up_first=False, narrow_weight=True),
    "fp8_fp4_mega_moe": Row("mxfp8", up_first=False, stored=True, weighted=True),
    "b12x_fused_moe": Row("nvfp4", scattered=True),
    "cutlass_fused_moe_nvfp4": Row("nvfp4"),
    "cutlass_fused_moe_mxfp8_mxfp4": Row("mxfp8"),
    "cutlass_fused_moe_mxfp8": Row("mxfp8"),
    "cute_dsl_fused_moe_nvfp4": Row("nvfp4", wide=True),
    "cute_dsl_fused_moe_mxfp8_mxfp4": Row("mxfp8", wide=True),
    "trtllm_fp4_block_scale_moe_nvfp4": Row("nvfp4", wide=True, stored=True),
    "trtllm_fp4_block_scale_moe_mxfp8_mxfp4": Row("mxfp8", wide=True, stored=True),
}


def number(x: Value, dtype: str) -> Fraction:
    found = rounded(x, dtype)
    assert isinstance(found, Fraction)
    return found


def four(x: Value) -> Fraction:
    """The nearest value of E2M1."""
    assert isinstance(x, Fraction)
    return FP4[fp4(abs(x), False) & 7] * (-1 if x < 0 else 1)


def quantised(x: Numbers, kind: str, g: Fraction | None) -> Numbers:
    """What codes and scales of one row stand for, the global scale left out."""
    width = 16 if kind == "nvfp4" else 32
    found: Numbers = []
    for at in range(0, len(x), width):
        block = x[at : at + width]
        if kind == "nvfp4":
            assert g is not None
            sixth = number(Fraction(1, 6), F32)
            t = number(max(abs(v) for v in block) * number(g * sixth, F32), F32)
            s = number(min(t, Fraction(448)), E4M3)
            both = number(s * number(1 / g, F32), F32)
            inverse = number(1 / both, F32) if both else FLOAT_MAX
            found += [s * four(number(v * inverse, F32)) for v in block]
            continue
        byte = shared_byte(list(block), "even" if kind == "mxfp4" else "rceil", "e2m1" if kind == "mxfp4" else "e4m3")
        s = Fraction(2) ** (byte - 127)
        if kind == "mxfp4":
            found += [s * four(v / s) if byte else Fraction(0) for v in block]
        else:
            found += [s * number(max(min(v / s, Fraction(448)), Fraction(-448)), E4M3) for v in block]
    return found


def weights(inputs: Inputs, name: str, expert: int, kind: str) -> list[Numbers]:
    """The rows of one expert's weight as the numbers that they stand for."""
    q, scale = inputs[name], inputs[f"{name}_scale"]
    count, width = q.shape[1], 16 if kind == "nvfp4" else 32
    return dequantised(q, scale, range(expert * count, (expert + 1) * count), kind, width)


def dequantised(q: Array, scale: Array, numbers: range, kind: str, width: int) -> list[Numbers]:
    """Rows of codes, two of E2M1 a byte or one of E4M3, times the scale of their blocks."""
    rows = []
    for row in numbers:
        raw = q.code_rows()[row]
        if q.dtype == "uint8":
            nibbles = [half for byte in raw for half in (byte & 15, byte >> 4)]
            values = [-FP4[c & 7] if c & 8 else FP4[c] for c in nibbles]
        else:
            values = finite([decode(c, q.dtype) for c in raw])
        of = [decode(c, E4M3) if kind == "nvfp4" else Fraction(2) ** (c - 127) for c in scale.code_rows()[row]]
        rows.append([v * s for v, s in zip(values, [s for s in finite(of) for _ in range(width)], strict=True)])
    return rows


def product(a: Numbers, inputs: Inputs, name: str, expert: int, kind: str) -> Numbers:
    """One row times the weight, times the factor, plus the bias: exact."""
    number_of = 1 if name == "w13" else 2
    factor = finite(inputs[f"alpha{number_of}"].values())[expert] if f"alpha{number_of}" in inputs else Fraction(1)
    sums = [
        factor * sum((x * y for x, y in zip(a, row, strict=True)), Fraction(0))
        for row in weights(inputs, name, expert, kind)
    ]
    bias = inputs.get(f"b{number_of}")
    if bias is None:
        return sums
    return [s + b for s, b in zip(sums, finite(bias.rows()[expert]), strict=True)]


def activation(gate: Fraction, up: Fraction, gates: list[Value] | None, dtype: str) -> Fraction:
    """The activation of one element, rounded once."""
    alpha, beta = Fraction(1), Fraction(0)
    if gates is not None:
        limit = gates[2]
        assert isinstance(gates[0], Fraction) and isinstance(gates[1], Fraction)
        alpha, beta = gates[0], gates[1]
        if isinstance(limit, Fraction):
            gate, up = min(gate, limit), min(max(up, -limit), limit)
    right = number(up + beta, F32) if beta else up
    low, high = sorted(gate * s * right for s in sigmoid_bounds(alpha * gate))
    return finite([decode(decided(low, high, dtype), dtype)])[0]


def layer(name: str, inputs: Inputs, options: dict[str, object]) -> list[int]:
    """The output, bfloat16: the first way to combine of every library."""
    row, first = ROWS[name], int(str(options.get("first_expert", 0)))
    known, levels = inputs.get("expert_map"), [inputs.get(f"a{n}_gscale") for n in (1, 2)]
    held = F32 if row.wide else BF16
    found: list[int] = []
    width, count = 16 if row.rows == "nvfp4" else 32, inputs["topk_ids"].shape[0]
    tokens = (
        dequantised(inputs["a"], inputs["a_scale"], range(count), row.rows, width)
        if "a" in inputs
        else inputs["x"].rows()
    )
    for x, ids, factors in zip(tokens, inputs["topk_ids"].code_rows(), inputs["topk_weights"].rows(), strict=True):
        total = [Fraction(0)] * len(x)
        for chosen, weight in zip(ids, finite(factors), strict=True):
            expert = chosen - first if known is None else known.codes[chosen] if chosen >= 0 else -1
            if not 0 <= expert < inputs["w13"].shape[0]:
                continue
            g1, g2 = (None if g is None else finite(g.values())[expert] for g in levels)
            a = finite(x) if "a" in inputs else quantised(finite(x), row.rows, g1)
            h = [number(v, F32 if row.scattered else held) for v in product(a, inputs, "w13", expert, row.rows)]
            half = len(h) // 2
            gate, up = (h[half:], h[:half]) if row.up_first else (h[:half], h[half:])
            own = inputs["gates"].rows()[expert] if "gates" in inputs else None
            act = [activation(g, u, own, F32 if row.weighted else held) for g, u in zip(gate, up, strict=True)]
            act = [number(v * weight, F32) for v in act] if row.weighted else act
            weight = Fraction(1) if row.weighted else weight
            y = product(quantised(act, row.rows, g2), inputs, "w2", expert, row.rows)
            if row.narrow_weight:
                terms = [number(number(weight, BF16) * number(v, BF16), BF16) for v in y]
                total = [t + v for t, v in zip(total, terms, strict=True)]
            elif row.stored:  # stored, then weighted and added in float32
                total = [t + weight * number(v, BF16) for t, v in zip(total, y, strict=True)]
            else:  # weighted in the epilogue, then added in bfloat16
                terms = [number(weight * number(v, BF16 if row.scattered else F32), BF16) for v in y]
                total = [number(t + v, BF16) for t, v in zip(total, terms, strict=True)]
        found += [encode(t, BF16) for t in total]
    return found
