"""FP8 attention by fractions and bounds of the exponential."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from tests.support.slow_oracle.numbers import Array, Value, decided, decode, encode, exp_bounds

NEGATIVE_INFINITY = 0xFF800000
LN_2 = sum((Fraction(1, k * 2**k) for k in range(1, 220)), Fraction(0))
"""Within 2^-220 of the natural logarithm of 2."""


def _number(x: Value) -> Fraction:
    assert isinstance(x, Fraction)
    return x


def _logarithm(low: Fraction, high: Fraction, unit: Fraction) -> int:
    """The float32 code nearest to ``log(x) / unit`` for ``low <= x <= high``: its neighbours' midpoints hold it."""
    code = encode(Fraction(math.log(low) / float(unit)), "float32")
    value, step = _number(decode(code, "float32")), 1 if code < 0x80000000 else -1
    below, above = (_number(decode(code + direction * step, "float32")) for direction in (-1, 1))
    least, most = ((value + near) / 2 * unit for near in (below, above))
    if not exp_bounds(least)[1] <= low or not high <= exp_bounds(most)[0]:
        raise ArithmeticError(f"the logarithm of {float(low)} is nearer to another code than {code}")
    return code


def _rows(
    q: list[list[Value]],
    k: list[list[Value]],
    v: list[list[Value]],
    scale: Fraction,
    v_scale: Fraction,
    windows: list[tuple[int, int]],
    sink: Fraction | None,
    dtype: str,
    unit: Fraction,
) -> tuple[list[list[int]], list[int]]:
    """Codes of the output of each query of one head, and of its log-sum-exp."""
    outs, sums = [], []
    for row, (start, stop) in zip(q, windows, strict=True):
        weights = []
        for key in k[start:stop]:
            dot = sum((_number(a) * _number(b) for a, b in zip(row, key, strict=True)), Fraction(0))
            weights.append(exp_bounds(scale * dot))
        if not weights:
            outs.append([0] * len(v[0]))
            sums.append(NEGATIVE_INFINITY)
            continue
        own = exp_bounds(sink) if sink is not None else (Fraction(0), Fraction(0))
        total = [sum((w[end] for w in weights), own[end]) for end in (0, 1)]
        codes = []
        for column in range(len(v[0])):
            values = [_number(key[column]) for key in v[start:stop]]
            ends = [
                sum((w[end if x >= 0 else 1 - end] * x for w, x in zip(weights, values, strict=True)), Fraction(0))
                for end in (0, 1)
            ]
            quotients = sorted(v_scale * end / divisor for end in ends for divisor in total)
            codes.append(decided(quotients[0], quotients[-1], dtype))
        outs.append(codes)
        sums.append(_logarithm(total[0], total[1], unit))
    return outs, sums


def _part(x: Array, first: int, stride: int, count: int) -> list[list[Value]]:
    """Every ``stride``-th row from ``first`` on."""
    return x.rows()[first : first + stride * count : stride]


def flash(i: Mapping[str, Array], o: Mapping[str, object]) -> dict[str, list[int]]:
    """``mha_fwd``: ``[B, S, H, V]`` and ``[B, H, S]``."""
    (batch, queries, heads, depth), (_, keys, of_keys, _) = i["q"].shape, i["k"].shape
    scale = Fraction(float(str(o["softmax_scale"]))) if o.get("softmax_scale") else Fraction(depth**-0.5)
    right = 0 if o.get("is_causal") else int(str(o.get("window_size_right", -1)))
    left, width = int(str(o.get("window_size_left", -1))), i["v"].shape[3]
    out = [0] * (batch * queries * heads * width)
    lse = [0] * (batch * heads * queries)
    for b in range(batch):
        used = i["seqused_k"].codes[b] if "seqused_k" in i else keys
        places = [s + used - queries for s in range(queries)]
        windows = [
            (0 if left < 0 else max(0, at - left), max(0, min(used, used if right < 0 else at + right + 1)))
            for at in places
        ]
        for h in range(heads):
            g = h // (heads // of_keys)
            of = [
                _number(i[name].values()[b * of_keys + g]) if name in i else Fraction(1)
                for name in ("q_descale", "k_descale", "v_descale")
            ]
            rows = _part(i["q"], b * queries * heads + h, heads, queries)
            k, v = (_part(i[name], b * keys * of_keys + g, of_keys, used) for name in "kv")
            sink = _number(i["s_aux"].values()[h]) if "s_aux" in i else None
            codes, sums = _rows(rows, k, v, scale * of[0] * of[1], of[2], windows, sink, "bfloat16", Fraction(1))
            for s in range(queries):
                at = ((b * queries + s) * heads + h) * width
                out[at : at + width] = codes[s]
                lse[(b * heads + h) * queries + s] = sums[s]
    return {"out": out, "softmax_lse": lse}


def prefill(i: Mapping[str, Array], o: Mapping[str, object]) -> dict[str, list[int]]:
    """``single_prefill_with_kv_cache``: ``[M, H, D]`` and ``[M, H]``, to base 2; no query without keys."""
    (queries, heads, depth), (keys, of_keys, _) = i["q"].shape, i["k"].shape
    scale = Fraction(float(str(o["sm_scale"]))) if o.get("sm_scale") else Fraction(depth**-0.5)
    dtype = str(o.get("o_dtype", "bfloat16"))
    windows = [(0, s + keys - queries + 1 if o.get("causal") else keys) for s in range(queries)]
    out, lse = [0] * (queries * heads * depth), [0] * (queries * heads)
    for h in range(heads):
        g = h // (heads // of_keys)
        of_q, of_k, of_v = (
            _number(i[name].values()[at]) if name in i else Fraction(1)
            for name, at in (("scale_q", h), ("scale_k", g), ("scale_v", g))
        )
        rows = _part(i["q"], h, heads, queries)
        k, v = (_part(i[name], g, of_keys, keys) for name in "kv")
        codes, sums = _rows(rows, k, v, scale * of_q * of_k, of_v, windows, None, dtype, LN_2)
        for s in range(queries):
            out[(s * heads + h) * depth : (s * heads + h + 1) * depth] = codes[s]
            lse[s * heads + h] = sums[s]
    return {"out": out, "lse": lse}
