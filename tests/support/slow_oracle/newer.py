"""Caches, prepared weights, int8 products and layers of experts that vLLM and SGLang ship, by loops and fractions."""

from __future__ import annotations

from fractions import Fraction

from tests.support.slow_oracle import activations, caches, fused, weight_only
from tests.support.slow_oracle.numbers import (
    Array,
    Value,
    add,
    decided,
    decode,
    divide,
    encode,
    exp_bounds,
    multiply,
    rounded,
)
from tests.support.slow_oracle.places import blocked
from tests.support.slow_oracle.quantisers import E4M3, F32, Rule, power_above

Inputs = dict[str, Array]
Options = dict[str, object]
Codes = list[int] | list[int | None]
Outputs = dict[str, Codes]
TOKEN_HEAD = Rule(scale_floor=1e-6, code="x * (1 / s)")


def size(o: Options, name: str, otherwise: int = 0) -> int:
    return int(str(o.get(name, otherwise)))


# --- caches -------------------------------------------------------------------------------------------------


def v4_places(slot: int, page: int, stride: int) -> tuple[int, int]:
    """The first bytes of a token, and of its scales."""
    start = slot // page * stride
    return start + slot % page * 576, start + page * 576 + slot % page * 8


def v4_written(i: Inputs, o: Options) -> Outputs:
    """``quantize_and_insert_k_cache``."""
    out, page, k = list(i["k_cache"].codes), size(o, "block_size", 64), i["k"].code_rows()
    for token, slot in caches.tokens(i["slot_mapping"]):
        at, scales = v4_places(slot, page, i["k_cache"].shape[1])
        for t in range(7):
            q, s = caches.tile(k[token][64 * t : 64 * t + 64], "bfloat16", caches.INDEX, True)
            out[at + 64 * t : at + 64 * t + 64] = q
            out[scales + t] = int.from_bytes(bytes(s), "little") >> 23 & 0xFF
        out[scales + 7] = 0
        out[at + 448 : at + 576] = [b for c in k[token][448:] for b in (c & 255, c >> 8)]
    return {"k_cache": out}


def v4_read(i: Inputs, o: Options) -> Outputs:
    """``dequantize_and_gather_k_cache``."""
    out, raw, page, offset = list(i["gathered"].codes), i["k_cache"].codes, size(o, "block_size", 64), size(o, "offset")
    for b, length in enumerate(i["seq_lens"].codes):
        count = i["gather_lens"].codes[b] if "gather_lens" in i else length
        for row in range(count):
            token = length - count + row
            slot = i["block_table"].code_rows()[b][token // page] * page + token % page
            at, scales = v4_places(slot, page, i["k_cache"].shape[1])
            to = (b * i["gathered"].shape[1] + offset + row) * 512
            for c in range(448):
                power = Fraction(2) ** (raw[scales + c // 64] - 127)
                out[to + c] = caches.product(raw[at + c], power, "bfloat16")
            out[to + 448 : to + 512] = [raw[at + 448 + 2 * c] | raw[at + 449 + 2 * c] << 8 for c in range(64)]
    return {"gathered": out}


def token_heads(i: Inputs, o: Options) -> Outputs:
    """``triton_reshape_and_cache_flash_per_token_head_quant``."""
    made: Outputs = {}
    for name in ("key", "value"):
        x, out, scales = i[name], list(i[f"{name}_cache"].codes), list(i[f"{name[0]}_scale_cache"].codes)
        _, heads, depth = x.shape
        for token, slot in caches.tokens(i["slot_mapping"]):
            for h in range(heads):
                first = (token * heads + h) * depth
                q, s = caches.tile(x.codes[first : first + depth], x.dtype, TOKEN_HEAD, False)
                out[(slot * heads + h) * depth : (slot * heads + h + 1) * depth] = q
                scales[slot * heads + h] = int.from_bytes(bytes(s), "little")
        made |= {f"{name}_cache": out, f"{name[0]}_scale_cache": scales}
    return made


def turned(row: list[Value], angles: list[Value], t: str, halves: bool) -> list[int]:
    """Codes of a rotated row, each product and sum rounded to ``t``."""
    half, found = len(row) // 2, list(row)
    for p in range(half):
        a, b = (p, p + half) if halves else (2 * p, 2 * p + 1)
        c, s, x, y = angles[p], angles[p + half], row[a], row[b]
        xc, ys, yc, xs = (rounded(multiply(u, v), t) for u, v in ((x, c), (y, s), (y, c), (x, s)))
        found[a], found[b] = rounded(add(xc, -ys), t), rounded(add(yc, xs), t)
    return [encode(v, t) for v in found]


def mla_rotated(i: Inputs, o: Options) -> Outputs:
    """``concat_and_cache_mla_rope_fused``."""
    t, halves = i["q_pe"].dtype, bool(o.get("is_neox"))
    q, k, cache = list(i["q_pe"].codes), list(i["k_pe"].codes), list(i["kv_cache"].codes)
    rank, wide, (_, heads, _) = i["kv_c"].shape[1], i["k_pe"].shape[1], i["q_pe"].shape
    (scale,) = i["scale"].values()
    for token, slot in caches.tokens(i["slot_mapping"]):
        angles = [rounded(v, t) for v in i["cos_sin_cache"].rows()[i["positions"].codes[token]]]
        for h in range(heads):
            at = (token * heads + h) * wide
            q[at : at + wide] = turned(Array(t, (wide,), q[at : at + wide]).values(), angles, t, halves)
        row = turned(i["k_pe"].rows()[token], angles, t, halves)
        k[token * wide : (token + 1) * wide] = row
        both = [*i["kv_c"].code_rows()[token], *row]
        cache[slot * (rank + wide) : (slot + 1) * (rank + wide)] = [caches.divided(c, t, scale) for c in both]
    return {"q_pe": q, "k_pe": k, "kv_cache": cache}


def prefill(i: Inputs, o: Options) -> Outputs:
    """``trtllm_prefill_attn_kvfp8_dequant``."""
    page = len(i["kv_cache"].codes) // i["kv_cache"].shape[0]
    scales, made = [i["k_scale"].values()[0], i["v_scale"].values()[0]], list[int | None]([None] * page)
    for entry in i["block_tables_prefill"].codes:
        raw = i["kv_cache"].codes[entry * page : (entry + 1) * page] if entry > 0 else []
        dtype = str(o["dequant_dtype"])
        read = [caches.product(c, scales[n >= page // 2], dtype) for n, c in enumerate(raw)]
        made += read or [None] * page
    return {"mock_kv_cache": made, "mock_block_table": list(range(1, len(i["block_tables_prefill"].codes) + 1))}


# --- prepared weights ---------------------------------------------------------------------------------------


def per_expert(x: Array) -> list[Array]:
    count = x.shape[0]
    each = len(x.codes) // count
    return [Array(x.dtype, x.shape[1:], x.codes[e * each : (e + 1) * each]) for e in range(count)]


def tiled(rows: list[list[int]], bits: int) -> Codes:
    """Marlin's tiles of codes ``[N][K]``."""
    per = 32 // bits
    words = [[weight_only.word(row[at : at + per], bits) for at in range(0, len(row), per)] for row in rows]
    lines = weight_only.turned(words)
    packed = Array("int32", (len(lines), len(rows)), [c for line in lines for c in line])
    return weight_only.repacked({"b_q_weight": packed}, {"num_bits": bits}, False)


def nibbles(x: Array) -> list[list[int]]:
    return [[c >> 4 * h & 15 for c in row for h in (0, 1)] for row in x.code_rows()]


def marlin_experts(i: Inputs, o: Options, kind: str) -> Outputs:
    """``prepare_*_for_marlin`` of ``fp8``, ``mxfp8``, ``mxfp4`` or ``nvfp4``."""
    t, made = str(o["params_dtype"]), Outputs()
    for name in ("w13", "w2"):
        experts, scale = per_expert(i[name]), i[f"{name}_scale"]
        rows = [x.code_rows() if kind.endswith("8") else nibbles(x) for x in experts]
        made[name] = [c for r in rows for c in tiled(r, 8 if kind.endswith("8") else 4)]  # type: ignore[misc]
        found: list[int] = []
        for e, r in enumerate(rows):
            n, k = len(r), len(r[0])
            if kind == "fp8":
                if o.get("block"):
                    block = per_expert(scale)[e].rows()
                    lines = [[block[j // 128][g] for j in range(n)] for g in range(k // 128)]
                else:
                    each = per_expert(scale)[e].values()
                    lines = [[each[j % len(each)] for j in range(n)]]
                factor = Fraction(2) ** (120 if t == "bfloat16" else 8)
                grouped = bool(o.get("block")) and k > 128
                for line in lines:
                    codes = weight_only.of_threads([encode(v, t) for v in line], grouped)
                    found += [encode(multiply(decode(c, t), factor), t) for c in codes]
                continue
            across = per_expert(scale)[e].code_rows()
            lines_of = weight_only.turned(across)
            wide = 16 if kind == "nvfp4" else 32
            for line_codes in lines_of:
                placed = weight_only.of_threads(line_codes, wide < k)
                if kind == "nvfp4":
                    continue
                found += [placed[at + c] for at in range(0, n, 4) for c in (0, 2, 1, 3)]
            if kind == "nvfp4":
                flat = [
                    encode(decode(c, E4M3), t)
                    for line_codes in lines_of
                    for c in weight_only.of_threads(line_codes, wide < k)
                ]
                of = {"marlin_scales": Array(t, (len(lines_of), n), flat)}
                read = weight_only.nvfp4_scales(of, {"a_half": t == "float16"})
                found += read["out"]  # type: ignore[arg-type]
                lift = decode(read["factor"][0], F32)  # type: ignore[arg-type]
                (given,) = i[f"{name}_scale_2"].values()
                lifted = rounded(multiply(given, Fraction(2) ** (7 if t == "float16" else 119)), F32)
                made[f"{name}_scale_2"] = [encode(divide(lifted, lift), F32)]
        made[f"{name}_scale"] = found
    return made


def allspark(i: Inputs, o: Options) -> Outputs:
    """``allspark_repack_weight``, by threads: each has four rows of 16 columns."""
    k, n = i["qweight"].shape
    wide = -(-n // 32) * 32
    out, q = [0] * (wide * k), i["qweight"].code_rows()
    for tile in range(k // 16):
        for lane in range(wide // 4):
            left, pair = lane // 8 * 32 + lane % 2 * 16, lane % 8 // 2
            for r in range(4):
                row = tile * 16 + pair * 2 + r // 2 * 8 + r % 2
                for j in range(16):
                    if left + j < n:
                        line = lane // 8 * 8 + j % 8
                        out[line * k * 4 + tile * 64 + lane % 8 * 8 + r + j // 8 * 4] = q[row][left + j]
    made: Outputs = {"qweight": out}
    for name in ("scale", "zero_point"):
        if name in i:
            placed = [0] * wide
            for c, code in enumerate(i[name].codes):
                placed[c // 32 * 32 + c % 8 * 4 + c % 32 // 8] = code
            made[name] = placed
    return made


def packed(i: Inputs, o: Options) -> Codes:
    bits, rows = size(o, "num_bits", 4), i["w_q"].code_rows()
    lines = rows if size(o, "packed_dim") == 1 else weight_only.turned(rows)
    per, mask = 32 // bits, (1 << bits) - 1
    made = [[weight_only.word([c & mask for c in line[at : at + per]], bits) for at in range(0, len(line), per)]
            for line in lines]  # fmt: skip  # one row
    return [c for row in (made if size(o, "packed_dim") == 1 else weight_only.turned(made)) for c in row]


def unpacked(i: Inputs, o: Options) -> Codes:
    bits, rows = size(o, "num_bits", 4), i["w_q"].code_rows()
    made = [
        weight_only.stream(line, bits) for line in (rows if size(o, "packed_dim") == 1 else weight_only.turned(rows))
    ]
    return [c for row in (made if size(o, "packed_dim") == 1 else weight_only.turned(made)) for c in row]


def signed_words(i: Inputs, o: Options) -> Outputs:
    return {"t": [weight_only.word([(f - 8) % 16 for f in weight_only.stream([c], 4)], 4) for c in i["t"].codes]}


def shares(i: Inputs, o: Options) -> Outputs:
    s, t = [Fraction(v) for v in i["s"].values()], i["s"].dtype  # type: ignore[arg-type]
    top = max(s)
    out = [round(Fraction(rounded(Fraction(rounded(v / top, t)) * 4096, t))) for v in s]
    return {"out": out, "factor": [encode(top / 4096, F32)]}


def grown(x: Array, rows: int, columns: int, halves: int = 1) -> list[int]:
    """Each half of the rows of the last two axes by itself, zeros behind."""
    made: list[int] = []
    for matrix in per_expert(x) if len(x.shape) == 3 else [x]:
        lines, part = matrix.code_rows(), matrix.shape[0] // halves
        for r in range(rows):
            half, at = r // (rows // halves), r % (rows // halves)
            line = lines[half * part + at] if at < part else []
            made += [*line, *[0] * (columns - len(line))]
    return made


def aligned(i: Inputs, o: Options) -> Outputs:
    """``align_fp4_moe_weights_for_fi``, ``align_trtllm_fp4_moe_hidden_dim_for_fi``."""
    _, h, half = i["w2"].shape
    n, step = i["w13"].shape[1], size(o, "min_alignment")
    hidden = "is_act_and_mul" not in o
    gates = 2 if o.get("is_act_and_mul", True) else 1
    wide, tall = (2 * half, -(-h // step) * step) if hidden else (-(-2 * half // step) * step, h)
    rows, parts = (n, 1) if hidden else (gates * wide, gates)
    return {
        "w13": grown(i["w13"], rows, tall // 2, parts),
        "w13_scale": grown(i["w13_scale"], rows, tall // 16, parts),
        "w2": grown(i["w2"], tall, wide // 2),
        "w2_scale": grown(i["w2_scale"], tall, wide // 16),
    }


def padded_weight(i: Inputs, o: Options) -> Outputs:
    (n, p), step = i["weight"].shape, size(o, "alignment", 32)
    wide = -(-2 * p // step) * step // 2
    return {"out": grown(i["weight"], -(-n // step) * step, wide), "padding_bytes": [wide - p]}


def prepared_nvfp4(i: Inputs, o: Options, cute: bool) -> Outputs:
    """``prepare_nvfp4_moe_layer_for_fi_or_cutlass``, ``.._flashinfer_cutedsl``."""
    made: Outputs = {"w2": i["w2"].codes}
    shared, n = cute or bool(o.get("shared")), i["w13"].shape[1]
    order = [(r + n // 2) % n for r in range(n)] if shared else list(range(n))
    if cute:
        order = [order[half * (n // 2) + at * 64 + r] for at in range(n // 128) for half in (0, 1) for r in range(64)]
    for name in ("w13", "w13_scale"):
        made[name] = [c for x in per_expert(i[name]) for r in order for c in x.code_rows()[r]]
    for name in ("w13_scale", "w2_scale"):
        whole = Array(E4M3, i[name].shape, made.get(name, i[name].codes))  # type: ignore[arg-type]
        made[name] = [c for x in per_expert(whole) for c in blocked(x)]
    first = [max(row) for row in i["a13_scale"].rows()]  # type: ignore[type-var]
    second = i["a2_scale"].values()
    if shared:
        first, second = [max(i["a13_scale"].values())] * len(first), [max(second)] * len(second)  # type: ignore[type-var]
    return made | {"a13_scale": [encode(v, F32) for v in first], "a2_scale": [encode(v, F32) for v in second]}


# --- products -----------------------------------------------------------------------------------------------


def block_product(i: Inputs, o: Options) -> Codes:
    """``w8a8_block_int8_matmul``."""
    n_block, k_block = size(o, "block_n", 128), size(o, "block_k", 128)
    a, b, sa, sb = i["A"].code_rows(), i["B"].code_rows(), i["As"].rows(), i["Bs"].rows()
    found: list[int] = []
    for row, s in zip(a, sa, strict=True):
        for n, column in enumerate(b):
            total = Fraction(0)
            for k, (x, y) in enumerate(zip(row, column, strict=True)):
                total += x * y * Fraction(s[k // k_block]) * Fraction(sb[n // n_block][k // k_block])  # type: ignore[arg-type]
            found.append(encode(rounded(total, F32), str(o["output_dtype"])))
    return found


def qserve(i: Inputs, o: Options) -> Codes:
    """``qserve_w4a8_per_chn_gemm``, ``qserve_w4a8_per_group_gemm``; a code is looked up by row and column."""
    n, half = i["kernel"].shape
    raw, found = [c & 255 for c in i["kernel"].codes], list[int]()

    def code(r: int, k: int) -> int:
        tile = (r // 32 * (2 * half // 32) + k // 32) * 512
        r, k = r % 32, k % 32
        byte = raw[tile + r % 8 * 64 + k % 16 // 4 * 16 + k // 16 * 8 + r % 16 // 8 * 4 + k % 4]
        return byte >> 4 if r >= 16 else byte & 15

    grouped = "zeros" in i
    ws, as_ = i["wscales"].values(), i["ascales"].values()
    for m, row in enumerate(i["in_feats"].code_rows()):
        for c in range(n):
            total = 0
            at = c // 32 * 32 + c % 8 * 4 + c % 32 // 8
            for k, x in enumerate(row):
                w = code(c, k)
                if grouped:
                    w = w * i["scales_i8"].code_rows()[k // 128][at] + i["zeros"].code_rows()[k // 128][at]
                total += x * w
            value = rounded(Fraction(total), F32)
            if grouped:
                value = rounded(multiply(value, multiply(ws[c], as_[m])), F32)
            else:
                part = rounded(multiply(rounded(multiply(value, ws[c]), F32), as_[m]), F32)
                value = rounded(add(part, -multiply(i["w_szs"].values()[c], i["a_ssums"].values()[m])), F32)
            found.append(encode(value, "float16"))
    return found


def allspark_product(i: Inputs, o: Options) -> Codes:
    t = i["a"].dtype
    codes = [[Fraction(c - 128) for c in row] for row in i["b_qweight"].code_rows()]
    zero = [[int(Fraction(v)) for v in row] for row in i["b_qzeros"].rows()] if "b_qzeros" in i else None  # type: ignore[arg-type]
    w = weight_only.scaled(codes, i["b_scales"], zero, t, None)
    return weight_only.product(i["a"].rows(), w, [("store", t, [])], t)


def sequential_product(i: Inputs, o: Options) -> Codes:
    t = i["a"].dtype
    codes = [[Fraction(c) for c in weight_only.stream(row, 4)] for row in i["b_q"].code_rows()]
    bias = size(o, "zp_bias", 8)
    zero = [weight_only.stream(row, 4) for row in i["qzeros"].code_rows()] if "qzeros" in i else None
    w = weight_only.scaled(codes, i["scales"], zero or [[bias] * len(codes[0])] * i["scales"].shape[0], t, None)
    return weight_only.product(i["a"].rows(), w, [("store", t, [])], t)


# --- quantisers ---------------------------------------------------------------------------------------------


def by_maximum(i: Inputs, o: Options) -> Outputs:
    """``scaled_quantize``, ``dynamic_per_batched_tensor_quant``: a scale that torch divides out of 448."""
    x = i["x"]
    t = x.dtype if o.get("compute_dtype") is None else F32
    whole = "group_rows" not in o
    rows, columns = (x.shape[0], x.shape[1]) if whole else (size(o, "group_rows"), size(o, "group_columns"))
    q, scales, values, width = [0] * len(x.codes), list[int](), x.values(), x.shape[1]
    for top in range(0, x.shape[0], rows):
        for left in range(0, width, columns):
            at = [r * width + c for r in range(top, top + rows) for c in range(left, left + columns)]
            a = max(max(abs(values[n]) for n in at), rounded(Fraction(1e-10 if whole else 1e-12), t))  # type: ignore[type-var]
            s = rounded(multiply(rounded(divide(Fraction(1), a), t), Fraction(448)), t)
            for n in at:
                y = rounded(multiply(values[n], s), t)
                y = max(min(y, Fraction(448)), Fraction(-448))  # type: ignore[type-var]
                negative = bool(x.codes[n] >> (31 if x.dtype == F32 else 15))
                q[n] = encode(y, E4M3, negative_zero=negative)
            scales.append(encode(divide(Fraction(1), s), F32))
    return {"q": q, "scale": scales}


def scales_as_codes(i: Inputs, o: Options) -> Outputs:
    codes, rows = list[int](), list[int]()
    for row in i["scales"].rows():
        amax = max(abs(v) for v in row)  # type: ignore[type-var]
        s = max(rounded(divide(amax, Fraction(448)), F32), rounded(Fraction(1, 448 * 512), F32))  # type: ignore[type-var]
        for v in row:
            q = decode(encode(rounded(divide(v, s), F32), E4M3), E4M3)
            codes.append(encode(divide(q, Fraction(8)), E4M3))
        rows.append(encode(multiply(s, Fraction(8)), F32))
    return {"fp8_scales": codes, "chan_scales": rows}


def dequantised(i: Inputs, o: Options) -> Codes:
    """``scaled_dequantize``, ``block_dequant``."""
    ints = "x_q_block" in i
    x, s = i["x_q_block" if ints else "x_q"], i["x_s"].rows()
    m, k = x.shape
    tall = size(o, "block_n", 128) if ints else m // i["x_s"].shape[0]
    wide = size(o, "block_k", 128) if ints else k // i["x_s"].shape[1]
    values: list[Value] = [Fraction(c) for c in x.codes] if ints else x.values()
    found = []
    for n, v in enumerate(values):
        y = rounded(multiply(v, s[n // k // tall][n % k // wide]), F32)
        found.append(encode(y, F32 if ints else str(o["out_dtype"]), negative_zero=not ints and bool(x.codes[n] >> 7)))
    return found


def packed_silu(i: Inputs, o: Options) -> Outputs:
    """``silu_mul_quant_fp8_packed_triton``."""
    value, group = fused.gated(i["x"], "product"), size(o, "group_size", 128)

    def scale_of(values: list[Value]) -> Value:
        s = rounded(divide(fused.amax(values), Fraction(448)), F32)
        return power_above(max(s, rounded(Fraction(1e-10), F32)), Rule())  # type: ignore[type-var]

    q, scale = fused.quantised(value, group, scale_of)
    per, words = i["x"].shape[1] // 2 // group, list[int]()
    for start in range(0, len(scale), per):
        row = [c >> 23 & 0xFF for c in scale[start : start + per]]
        row += [0] * (-per % 4)
        words += [int.from_bytes(bytes(row[at : at + 4]), "little", signed=True) for at in range(0, len(row), 4)]
    return {"q": q, "scale": words}


def inverse_rope(i: Inputs, o: Options) -> Outputs:
    """``fused_inv_rope_fp8_quant``: the angle with the other sign."""
    wide, (_, heads, depth) = i["cos_sin_cache"].shape[1], i["o"].shape
    codes: list[int] = []
    for at, row in enumerate(i["o"].rows()):
        angles = i["cos_sin_cache"].rows()[i["positions"].codes[at // heads]]
        back = [*angles[: wide // 2], *[-v for v in angles[wide // 2 :]]]
        codes += [encode(v, F32) for v in [*row[: depth - wide], *fused.rotated(row[depth - wide :], back, False)]]
    tiny, share = rounded(Fraction(1e-10), F32), rounded(Fraction(1, 448), F32)
    scale_of = lambda v: power_above(rounded(multiply(max(fused.amax(v), tiny), share), F32), Rule())  # type: ignore[type-var]  # noqa: E731
    q, scale = fused.quantised(Array(F32, (len(codes),), codes), 128, scale_of)
    return {"q": q, "scale": scale}


# --- routers and layers -------------------------------------------------------------------------------------


def gemma(i: Inputs, o: Options) -> Outputs:
    """The sum over the chosen experts, between two fractions."""
    weights, ids = list[int](), list[int]()
    factors = i["per_expert_scale"].values()
    for row in i["logits"].rows():
        best = sorted(range(len(row)), key=lambda e: (-row[e], e))[: size(o, "top_k")]
        ends = [exp_bounds(Fraction(row[e]) - Fraction(row[best[0]])) for e in best]  # type: ignore[arg-type]
        low, high = sum(e[0] for e in ends), sum(e[1] for e in ends)
        for e, end in zip(best, ends, strict=True):
            corners = [end[0] / high * Fraction(factors[e]), end[1] / low * Fraction(factors[e])]  # type: ignore[arg-type]
            weights.append(decided(min(corners), max(corners), F32))
        ids += best
    return {"topk_weights": weights, "topk_ids": ids}


def phi(i: Inputs, o: Options) -> Outputs:
    weights, ids = list[int](), list[int]()
    for row in ([Fraction(v) for v in line] for line in i["gating_output"].rows()):  # type: ignore[arg-type]
        taken: list[int] = []
        for _ in range(2):
            left = [e for e in range(len(row)) if e not in taken]
            best = min(left, key=lambda e: (-row[e], e))
            m = row[best]
            near = [exp_bounds(row[e] - m) for e in left if (m - row[e]) / max(abs(row[e]), m) <= Fraction(2, 100)]
            weights.append(decided(1 / sum(n[1] for n in near), 1 / sum(n[0] for n in near), F32))
            taken.append(best)
        ids += taken
    return {"topk_weights": weights, "topk_ids": ids}


def layer(i: Inputs, o: Options) -> Codes:
    """``fused_marlin_moe``, ``triton_kernel_fused_experts``: token by token."""
    x, marlin = i["hidden_states"], "b_type" in o
    t, top, found = x.dtype, i["topk_ids"].shape[1], list[int]()
    kind = str(o["b_type"]) if marlin else "float4_e2m1f"
    row_of = activations.Row("silu", each=True) if marlin else activations.Row("silu", "pairs", alpha=1.702, beta=1.0)
    store = t if marlin else F32

    def times(a: list[Value], which: str, e: int) -> list[Value]:
        q, s = per_expert(i[which])[e], per_expert(i[f"{which}_scale"])[e]
        codes = [[weight_only.code(c, kind) for c in row] for row in q.code_rows()]
        if s.dtype == "uint8":
            s = Array("float8_e8m0fnu", s.shape, s.codes)
        behind, eight = marlin and s.shape[0] == 1 and s.dtype == t, "8" in kind.replace("b8", "")
        one = Array(t, (1, s.shape[1]), [encode(Fraction(1), t)] * s.shape[1]) if behind else s
        w = weight_only.scaled(codes, one, None, t, None)
        steps: list[tuple[str, str, list[Fraction]]] = [("store", store, [])]
        if behind:
            scale = ("times", F32 if eight else t, [Fraction(v) for v in s.values()])  # type: ignore[arg-type]
            steps = [scale, *steps] if eight else [*steps, scale]
        bias = f"bias{which[1]}"
        if bias in i:
            by = [Fraction(v) for v in per_expert(i[bias])[e].values()]  # type: ignore[arg-type]
            steps = [*(steps if marlin else []), ("plus", store, by)]
        return Array(store, (len(w),), weight_only.product([a], w, steps, store)).values()  # type: ignore[arg-type]

    for token, row in enumerate(x.rows()):
        total: list[Value] = [Fraction(0)] * len(row)
        for j in range(top):
            e = i["topk_ids"].codes[token * top + j]
            if e < 0:
                continue
            h = times(row, "w1", e)
            half = len(h) // 2
            pairs = zip(h[:half], h[half:], strict=True) if marlin else zip(h[::2], h[1::2], strict=True)
            given = {} if marlin else {"limit": Fraction(7), "alpha": Fraction(rounded(Fraction(1.702), F32))}
            act = [activations.one(g, u, row_of, given, t) for g, u in pairs]
            y = times(Array(t, (half,), act).values(), "w2", e)  # type: ignore[arg-type]
            w = rounded(i["topk_weights"].values()[token * top + j], t if marlin else "bfloat16")
            y = [rounded(rounded(multiply(v, w), t if marlin else F32), t) for v in y]
            total = [add(a, b) for a, b in zip(total, y, strict=True)]
        found += [encode(v, t) for v in total]
    return found


ROUTINES = {
    "quantize_and_insert_k_cache": v4_written,
    "dequantize_and_gather_k_cache": v4_read,
    "triton_reshape_and_cache_flash_per_token_head_quant": token_heads,
    "concat_and_cache_mla_rope_fused": mla_rotated,
    "trtllm_prefill_attn_kvfp8_dequant": prefill,
    "prepare_fp8_moe_layer_for_marlin": lambda i, o: marlin_experts(i, o, "fp8"),
    "prepare_mxfp8_moe_layer_for_marlin": lambda i, o: marlin_experts(i, o, "mxfp8"),
    "prepare_moe_mxfp4_layer_for_marlin": lambda i, o: marlin_experts(i, o, "mxfp4"),
    "prepare_nvfp4_moe_layer_for_marlin": lambda i, o: marlin_experts(i, o, "nvfp4"),
    "allspark_repack_weight": allspark,
    "pack_quantized_values_into_int32": packed,
    "unpack_quantized_values_into_int32": unpacked,
    "convert_packed_uint4b8_to_signed_int4_inplace": signed_words,
    "marlin_act_int8_process_scales": shares,
    "align_fp4_moe_weights_for_fi": aligned,
    "align_trtllm_fp4_moe_hidden_dim_for_fi": aligned,
    "pad_nvfp4_weight_for_cutlass": padded_weight,
    "pad_nvfp4_activation_for_cutlass": lambda i, o: grown(
        i["x_fp4"], i["x_fp4"].shape[0], i["x_fp4"].shape[1] + size(o, "weights_padding_bytes")
    ),
    "prepare_nvfp4_moe_layer_for_fi_or_cutlass": lambda i, o: prepared_nvfp4(i, o, False),
    "prepare_nvfp4_moe_layer_for_flashinfer_cutedsl": lambda i, o: prepared_nvfp4(i, o, True),
    "w8a8_block_int8_matmul": block_product,
    "qserve_w4a8_per_chn_gemm": qserve,
    "qserve_w4a8_per_group_gemm": qserve,
    "allspark_w8a16_gemm": allspark_product,
    "triton_w4a16_gemm": sequential_product,
    "scaled_quantize": by_maximum,
    "dynamic_per_batched_tensor_quant": by_maximum,
    "convert_bf16_scales_to_fp8": scales_as_codes,
    "scaled_dequantize": dequantised,
    "block_dequant": dequantised,
    "silu_mul_quant_fp8_packed_triton": packed_silu,
    "fused_inv_rope_fp8_quant": inverse_rope,
    "gemma4_routing_function_torch": gemma,
    "phimoe_routing_function": phi,
    "fused_marlin_moe": layer,
    "triton_kernel_fused_experts": layer,
}
