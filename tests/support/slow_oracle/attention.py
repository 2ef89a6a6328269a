"""FP8 attention by fractions and bounds of the exponential."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from tests.support.slow_oracle.numbers import Array, Value, array, decided, decode, encode, exp_bounds

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


def _weight(y: Fraction, cap: Fraction | None) -> tuple[Fraction, Fraction]:
    """Bounds of ``exp(y)``, or of ``exp(C tanh(y / C))``."""
    if cap is None:
        return exp_bounds(y)
    low, high = exp_bounds(2 * y / cap)
    least, most = (cap * (end - 1) / (end + 1) for end in (low, high))
    return exp_bounds(least)[0], exp_bounds(most)[1]


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
    cap: Fraction | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Codes of the output of each query of one head, and of its log-sum-exp."""
    outs, sums = [], []
    for row, (start, stop) in zip(q, windows, strict=True):
        weights = []
        for key in k[start:stop]:
            dot = sum((_number(a) * _number(b) for a, b in zip(row, key, strict=True)), Fraction(0))
            weights.append(_weight(scale * dot, cap))
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


def _spread(
    queries: list[list[list[Value]]],
    k: list[list[list[Value]]],
    v: list[list[list[Value]]],
    scale: Fraction,
    windows: list[tuple[int, int]],
    sinks: list[Fraction | None],
    dtype: str,
    cap: Fraction | None = None,
) -> list[list[list[int]]]:
    """Codes ``[S][H][V]`` of queries ``[S][H][D]`` over keys ``[N][G][D]``, values times their scales in ``v``."""
    heads, of_keys = len(queries[0]), len(k[0])
    out: list[list[list[int]]] = [[] for _ in queries]
    for h in range(heads):
        g, rows = h // (heads // of_keys), [row[h] for row in queries]
        keys, of_v = ([row[g] for row in x] for x in (k, v))
        codes, _ = _rows(rows, keys, of_v, scale, Fraction(1), windows, sinks[h], dtype, Fraction(1), cap)
        for row, own in zip(out, codes, strict=True):
            row.append(own)
    return out


def _three(x: Array) -> list[list[list[Value]]]:
    """Rows of heads of the last two axes of ``x``, the others one after the other."""
    rows, heads = x.rows(), x.shape[-2]
    return [rows[i : i + heads] for i in range(0, len(rows), heads)]


def _times(x: list[list[list[Value]]], scales: list[list[Fraction]]) -> list[list[list[Value]]]:
    """Every value of each row and head times its scale."""
    return [
        [[_number(a) * s for a in head] for head, s in zip(row, own, strict=True)]
        for row, own in zip(x, scales, strict=True)
    ]


def _flat(rows: list[list[list[int]]]) -> list[int]:
    return [code for row in rows for head in row for code in head]


def _spans(ends: Array) -> list[tuple[int, int]]:
    return list(zip(ends.codes, ends.codes[1:], strict=False))


def _sinks(i: Mapping[str, Array], name: str, heads: int) -> list[Fraction | None]:
    return [_number(x) for x in i[name].values()] if name in i else [None] * heads


def _cap(o: Mapping[str, object], name: str) -> Fraction | None:
    return Fraction(float(str(o[name]))) if o.get(name) else None


def _before(queries: int, keys: int, left: int) -> list[tuple[int, int]]:
    """The keys of each query, the last of which stands at the last key."""
    places = [s + keys - queries for s in range(queries)]
    return [(max(0, at - left) if left >= 0 else 0, at + 1) for at in places]


def unified(i: Mapping[str, Array], o: Mapping[str, object]) -> list[int]:
    """``unified_attention``: ``[M, H, D]``."""
    depth, size, width = i["q"].shape[2], i["k"].shape[1], i["block_table"].shape[1]
    scale = Fraction(float(str(o["softmax_scale"]))) if o.get("softmax_scale") else Fraction(depth**-0.5)
    dtype = i["q"].dtype if i["q"].dtype != "float8_e4m3fn" else "bfloat16"
    q, caches, out = _three(i["q"]), {name: _three(i[name]) for name in "kv"}, []
    for b, (first, stop) in enumerate(_spans(i["cu_seqlens_q"])):
        keys, parts = i["seqused_k"].codes[b], []
        slots = [i["block_table"].codes[b * width + n // size] * size + n % size for n in range(keys)]
        for name in "kv":
            whole = _number(i[f"{name}_descale"].values()[0]) if f"{name}_descale" in i else Fraction(1)
            scales = [[whole] * i["k"].shape[2]] * keys
            if f"{name}_scale_cache" in i:
                each = i[f"{name}_scale_cache"].rows()
                scales = [[whole * _number(x) for x in each[slot]] for slot in slots]
            parts.append(_times([caches[name][slot] for slot in slots], scales))
        windows = _before(stop - first, keys, int(str(o.get("window_size_left", -1))))
        if stop > first:
            sinks, cap = _sinks(i, "sinks", len(q[0])), _cap(o, "softcap")
            out += _spread(q[first:stop], *parts, scale, windows, sinks, dtype, cap)
    return _flat(out)


def triton(i: Mapping[str, Array], o: Mapping[str, object]) -> list[int]:
    """``decode_attention_fwd`` and ``extend_attention_fwd``: ``[M, H, V]``."""
    depth, q, out = i["q"].shape[2], _three(i["q"]), []
    scale = Fraction(float(str(o["sm_scale"]))) if o.get("sm_scale") else Fraction(depth**-0.5)
    single = {
        name: _number(decode(encode(Fraction(float(str(o.get(name, 1.0)))), "float32"), "float32"))
        for name in ("k_scale", "v_scale")
    }
    caches = {name: _three(i[f"{name}_buffer"]) for name in "kv"}
    new = {name: _three(i[f"{name}_extend"]) for name in "kv" if f"{name}_extend" in i}
    ends = _spans(i["qo_indptr"]) if new else [(b, b + 1) for b in range(len(q))]
    for (first, stop), (start, end) in zip(ends, _spans(i["kv_indptr"]), strict=True):
        slots, parts = i["kv_indices"].codes[start:end], []
        for name in "kv":
            scales = [[single[f"{name}_scale"]] * i["k_buffer"].shape[1]] * len(slots)
            parts.append(
                _times([caches[name][slot] for slot in slots], scales) + (new[name][first:stop] if new else [])
            )
        left = int(str(o.get("sliding_window_size", -1)))
        windows = _before(stop - first, len(parts[0]), left) if new else [(0, len(parts[0]))]
        if stop > first:
            sinks, cap = _sinks(i, "sinks", len(q[0])), _cap(o, "logit_cap")
            out += _spread(q[first:stop], *parts, scale, windows, sinks, i["q"].dtype, cap)
    return _flat(out)


def latent(i: Mapping[str, Array], o: Mapping[str, object]) -> dict[str, list[int]]:
    """``flash_mla_with_kvcache``: ``[B, S, H, 512]`` and ``[B, H, S]``."""
    (batch, queries, heads, _), width = i["q"].shape, i["indices"].shape[2]
    scale = Fraction(float(str(o["softmax_scale"]))) if o.get("softmax_scale") else Fraction(576**-0.5)
    slots = i["k_cache"].code_rows()
    out, lse = [], [0] * (batch * heads * queries)
    for token, rows in enumerate(_three(i["q"])):
        k: list[list[Value]] = []
        for at in i["indices"].codes[token * width : (token + 1) * width]:
            if at < 0:
                continue
            raw = bytes(slots[at])
            codes, scales, rope = (
                array(dtype, (end - start,), raw[start:end])
                for dtype, start, end in (("float8_e4m3fn", 0, 512), ("float32", 512, 528), ("bfloat16", 528, 656))
            )
            each = [_number(x) for x in scales.values()]
            k.append([_number(x) * each[n // 128] for n, x in enumerate(codes.values())] + rope.values())
        for h in range(heads):
            own = [_number(i["attn_sink"].values()[h]) if "attn_sink" in i else None][0]
            windows = [(0, len(k))]
            v = [row[:512] for row in k] or [[Fraction(0)] * 512]
            codes_, _ = _rows([rows[h]], k, v, scale, Fraction(1), windows, own, "bfloat16", Fraction(1))
            _, sums = _rows(
                [rows[h]], k, [row[:1] for row in v], scale, Fraction(1), windows, None, "bfloat16", Fraction(1)
            )
            out += codes_[0]
            b, s = divmod(token, queries)
            lse[(b * heads + h) * queries + s] = sums[0] if k else 0x7F800000
    return {"out": out, "softmax_lse": lse}


def sage(i: Mapping[str, Array], o: Mapping[str, object]) -> list[int]:
    """``qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf``: ``[B, S, H, D]``."""
    (batch, queries, heads, depth), (_, keys, of_keys, _) = i["query"].shape, i["key"].shape
    scale = Fraction(float(str(o["sm_scale"]))) if o.get("sm_scale") else Fraction(depth**-0.5)
    swapped = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
    of_q, of_k, of_v = (i[f"{name}_scale"].rows() for name in ("query", "key", "value"))
    columns, out = i["value"].rows(), [0] * (batch * queries * heads * depth)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // of_keys)
            rows = _part(i["query"], b * queries * heads + h, heads, queries)
            q = [[_number(x) * _number(of_q[b * heads + h][s // 16]) for x in row] for s, row in enumerate(rows)]
            rows = _part(i["key"], b * keys * of_keys + g, of_keys, keys)
            k = [[_number(x) * _number(of_k[b * of_keys + g][n // 128]) for x in row] for n, row in enumerate(rows)]
            v = [
                [
                    _number(columns[(b * depth + d) * of_keys + g][n - n % 16 + swapped.index(n % 16)])
                    * _number(of_v[b * of_keys + g][d])
                    for d in range(depth)
                ]
                for n in range(keys)
            ]
            windows = [(0, min(keys, s + 1) if o.get("is_causal") else keys) for s in range(queries)]
            dtype = str(o.get("out_dtype", "bfloat16"))
            codes, _ = _rows(q, k, v, scale, Fraction(1), windows, None, dtype, Fraction(1))
            for s in range(queries):
                at = ((b * queries + s) * heads + h) * depth
                out[at : at + depth] = codes[s]
    return out


def merge(i: Mapping[str, Array], o: Mapping[str, object]) -> dict[str, list[int]]:
    """``merge_attn_states``, ``merge_state_v2`` and ``merge_state``: the output, and the log-sum-exp."""
    of_vllm = "prefix_output" in i
    names = ("prefix_output", "prefix_lse", "suffix_output", "suffix_lse") if of_vllm else ("v_a", "s_a", "v_b", "s_b")
    base_2 = o.get("base") == 2
    unit = LN_2 if base_2 else Fraction(1)
    (tokens, heads, depth), dtype = i[names[0]].shape, i[names[0]].dtype
    given = o.get("prefill_tokens_with_context")
    context = tokens if given is None else int(str(given))
    scale, saturates = Fraction(1), "output_scale" in i
    if saturates:
        scale, dtype = _number(i["output_scale"].values()[0]), "float8_e4m3fn"
    out: list[int] = []
    lse = [0] * (tokens * heads)
    for t in range(tokens):
        for h in range(heads):
            at = h * tokens + t if of_vllm else t * heads + h
            first = (t * heads + h) * depth
            sums = [i[name].values()[at] for name in (names[1], names[3])]
            kept = [n for n in (0, 1) if not isinstance(sums[n], float) and (n == 1 or t < context)]
            if not kept:
                out += [encode(math.nan, dtype)] * depth
                lse[at] = NEGATIVE_INFINITY
                continue
            top = max(_number(sums[n]) for n in kept) * unit
            weights = [exp_bounds(_number(sums[n]) * unit - top) for n in kept]
            total = [sum((w[end] for w in weights), Fraction(0)) for end in (0, 1)]
            for d in range(depth):
                values = [_number(i[names[2 * n]].values()[first + d]) for n in kept]
                ends = [
                    sum((w[end if x >= 0 else 1 - end] * x for w, x in zip(weights, values, strict=True)), Fraction(0))
                    for end in (0, 1)
                ]
                quotients = sorted(end / divisor / scale for end in ends for divisor in total)
                if saturates:
                    quotients = [max(Fraction(-448), min(Fraction(448), x)) for x in quotients]
                out.append(decided(quotients[0], quotients[-1], dtype))
            lse[at] = _shifted(total, top, unit)
    names_of = ("output", "output_lse") if of_vllm else ("V", "S") if base_2 else ("v_merged", "s_merged")
    return dict(zip(names_of, (out, lse), strict=True))


def _shifted(total: list[Fraction], top: Fraction, unit: Fraction) -> int:
    """The float32 code of ``(top + log total) / unit``."""
    guess = (float(top) + math.log(total[0])) / float(unit)
    code = encode(Fraction(guess), "float32")
    value, step = _number(decode(code, "float32")), 1 if code < 0x80000000 else -1
    below, above = (_number(decode(code + direction * step, "float32")) for direction in (-1, 1))
    least, most = ((value + near) / 2 * unit - top for near in (below, above))
    if not exp_bounds(least)[1] <= total[0] or not total[1] <= exp_bounds(most)[0]:
        raise ArithmeticError(f"the logarithm of {float(total[0])} is nearer to another code than {code}")
    return code


def _part(x: Array, first: int, stride: int, count: int) -> list[list[Value]]:
    """Every ``stride``-th row from ``first`` on."""
    return x.rows()[first : first + stride * count : stride]


def flash(i: Mapping[str, Array], o: Mapping[str, object]) -> dict[str, list[int]]:
    """``mha_fwd``: ``[B, S, H, V]`` and ``[B, H, S]``."""
    (batch, queries, heads, depth), (_, keys, of_keys, _) = i["q"].shape, i["k"].shape
    scale = Fraction(float(str(o["softmax_scale"]))) if o.get("softmax_scale") else Fraction(depth**-0.5)
    if "page_table" in i:
        i = _unpaged(i)
        keys = i["k"].shape[1]
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
            factor, cap = scale * of[0] * of[1], _cap(o, "softcap")
            codes, sums = _rows(rows, k, v, factor, of[2], windows, sink, "bfloat16", Fraction(1), cap)
            for s in range(queries):
                at = ((b * queries + s) * heads + h) * width
                out[at : at + width] = codes[s]
                lse[(b * heads + h) * queries + s] = sums[s]
    return {"out": out, "softmax_lse": lse}


def _unpaged(i: Mapping[str, Array]) -> dict[str, Array]:
    """The keys and values of each sequence as rows of their own, 0 where its pages are not read."""
    (batch, width), (_, size, *rest) = i["page_table"].shape, i["k"].shape
    found = dict(i)
    for name in "kv":
        x, codes = i[name], []
        of_page = size * rest[0] * x.shape[3]
        for b in range(batch):
            for n in range(width):
                page = i["page_table"].codes[b * width + n]
                used = min(size, max(0, i["seqused_k"].codes[b] - n * size)) * of_page // size
                codes += x.codes[page * of_page : page * of_page + used] + [0] * (of_page - used)
        found[name] = Array(x.dtype, (batch, width * size, *x.shape[2:]), codes)
    return found


def batch(i: Mapping[str, Array], o: Mapping[str, object]) -> dict[str, list[int]]:
    """FlashInfer's ragged and paged sequences, each by :func:`prefill`."""
    outs, sums = [], []
    for b, (first, stop) in enumerate(_spans(i["qo_indptr"])):
        if "k" in i:
            start, end = _spans(i["kv_indptr"])[b]
            slots, names = list(range(start, end)), ("k", "v")
        else:
            size, (start, end) = i["k_cache"].shape[1], _spans(i["paged_kv_indptr"])[b]
            pages = i["paged_kv_indices"].codes[start:end]
            keys = max(0, len(pages) - 1) * size + i["paged_kv_last_page_len"].codes[b]
            slots, names = [pages[n // size] * size + n % size for n in range(keys)], ("k_cache", "v_cache")
        own = dict(i)
        for name, x, rows in (
            ("q", i["q"], range(first, stop)),
            *zip("kv", (i[n] for n in names), (slots, slots), strict=True),
        ):
            width = x.shape[-1] * x.shape[-2]
            codes = [code for row in rows for code in x.codes[row * width : (row + 1) * width]]
            own[name] = Array(x.dtype, (len(rows), *x.shape[-2:]), codes)
        if stop > first:
            one = prefill(own, o)
            outs += one["out"]
            sums += one["lse"]
    return {"out": outs, "lse": sums}


def prefill(i: Mapping[str, Array], o: Mapping[str, object]) -> dict[str, list[int]]:
    """``single_prefill_with_kv_cache``: ``[M, H, D]`` and ``[M, H]``, to base 2; no query without keys."""
    (queries, heads, depth), (keys, of_keys, _) = i["q"].shape, i["k"].shape
    scale = Fraction(float(str(o["sm_scale"]))) if o.get("sm_scale") else Fraction(depth**-0.5)
    dtype = str(o.get("o_dtype", "bfloat16"))
    left, places = int(str(o.get("window_left", -1))), [s + keys - queries for s in range(queries)]
    windows = [(max(0, at - left) if left >= 0 else 0, at + 1 if o.get("causal") else keys) for at in places]
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
