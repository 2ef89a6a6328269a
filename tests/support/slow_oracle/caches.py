"""KV caches by loops: where each element of each token goes, and its code, by fractions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

from tests.support.slow_oracle import fused
from tests.support.slow_oracle.mx import FP4
from tests.support.slow_oracle.numbers import Array, Value, decode, divide, encode, multiply, rounded
from tests.support.slow_oracle.quantisers import E4M3, F32, Rule, block_scale, code

Inputs = dict[str, Array]
Options = dict[str, object]
Codes = list[int | None]
Outputs = dict[str, Codes]
DS_MLA = Rule(scale_floor=2.0**-126)
DS_MLA_POWERS = Rule(scale_floor=1e-4)
INDEX = Rule(floor=1e-4)
K_CACHE = Rule(code="x * (1 / s)")
MAGNITUDES = [Fraction(m) for m in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


def is_negative(raw: int, dtype: str) -> bool:
    return bool(raw >> (8 * {F32: 4, E4M3: 1}.get(dtype, 2) - 1))


def divided(raw: int, dtype: str, scale: Value) -> int:
    """The code of an element over a scale."""
    return code(raw, dtype, scale, None, Rule())


def tokens(slots: Array) -> Iterator[tuple[int, int]]:
    """Every token that has a slot, and it."""
    for token, slot in enumerate(slots.codes):
        if slot >= 0:
            yield token, slot


def page_place(layout: str, shape: tuple[int, ...], slot: int, head: int) -> int:
    """The first column of a head in its slot."""
    if layout == "NHD":
        _, page, heads, depth = shape
        return ((slot // page * page + slot % page) * heads + head) * depth
    _, heads, page, depth = shape
    return ((slot // page * heads + head) * page + slot % page) * depth


def slots_of(i: Inputs, page: int) -> Iterator[tuple[int, int]]:
    """FlashInfer's slots, from requests and positions."""
    indptr, pages = i["kv_indptr"].codes, i["kv_indices"].codes
    for token, (b, p) in enumerate(zip(i["batch_indices"].codes, i["positions"].codes, strict=True)):
        yield token, pages[indptr[b] + p // page] * page + p % page


def flash(i: Inputs, o: Options) -> Outputs:
    made = {}
    layout = str(o.get("kv_layout", "NHD"))
    for name, scale in (("key", "k_scale"), ("value", "v_scale")):
        x, cache, s = i[name], i[f"{name}_cache"], i[scale].values()
        _, heads, depth = x.shape
        out: Codes = list(cache.codes)
        for token, slot in tokens(i["slot_mapping"]):
            for h in range(heads):
                at = page_place(layout, cache.shape, slot, h)
                for d in range(depth):
                    out[at + d] = divided(x.codes[(token * heads + h) * depth + d], x.dtype, s[h % len(s)])
        made[f"{name}_cache"] = out
    return made


def packed(i: Inputs, o: Options) -> Outputs:
    """Keys: page, head, chunk, slot, column of the chunk; values: page, head, column, slot."""
    _, heads, chunks, page, width = i["key_cache"].shape
    depth = chunks * width
    keys: Codes = list(i["key_cache"].codes)
    values: Codes = list(i["value_cache"].codes)
    (ks,), (vs,) = i["k_scale"].values(), i["v_scale"].values()
    for token, slot in tokens(i["slot_mapping"]):
        for h in range(heads):
            for d in range(depth):
                source = (token * heads + h) * depth + d
                first = (slot // page * heads + h) * depth
                at = (first + d // width * width) * page + slot % page * width + d % width
                keys[at] = divided(i["key"].codes[source], i["key"].dtype, ks)
                values[(first + d) * page + slot % page] = divided(i["value"].codes[source], i["value"].dtype, vs)
    return {"key_cache": keys, "value_cache": values}


def mla(i: Inputs, o: Options) -> Outputs:
    nope, rope, out = i["kv_c"], i["k_pe"], list(i["kv_cache"].codes)
    r, e = nope.shape[1], rope.shape[1]
    (s,) = i["scale"].values()
    for token, slot in tokens(i["slot_mapping"]):
        row = nope.codes[token * r : (token + 1) * r] + rope.codes[token * e : (token + 1) * e]
        out[slot * (r + e) : (slot + 1) * (r + e)] = [divided(raw, nope.dtype, s) for raw in row]
    return {"kv_cache": [*out]}


def set_buffer(i: Inputs, o: Options) -> Outputs:
    nope, rope, out = i["cache_k_nope"], i["cache_k_rope"], list(i["kv_buffer"].codes)
    r, e = nope.shape[2], rope.shape[2]
    for token, slot in enumerate(i["loc"].codes):
        if slot != int(str(o.get("reserved_skip_index", 0))):
            row = nope.codes[token * r : (token + 1) * r] + rope.codes[token * e : (token + 1) * e]
            out[slot * (r + e) : (slot + 1) * (r + e)] = [divided(raw, nope.dtype, Fraction(1)) for raw in row]
    return {"kv_buffer": [*out]}


def product(raw: int, scale: Value, dtype: str) -> int:
    """A code times its scale, rounded to float32 and to the output."""
    value, negative = decode(raw, E4M3), is_negative(raw, E4M3)
    made = encode(rounded(multiply(value, scale), F32), dtype, negative_zero=negative)
    if negative and value == 0:
        return 1 << (8 * {F32: 4}.get(dtype, 2) - 1)
    return made


def convert(i: Inputs, o: Options) -> Codes:
    src, dtype = i["src"], str(o["out_dtype"])
    s = rounded(Fraction(float(str(o["scale"]))), F32)
    if src.dtype == E4M3:
        return [product(raw, s, dtype) for raw in src.codes]
    return [divided(raw, src.dtype, s) for raw in src.codes]


def append(i: Inputs, o: Options) -> Outputs:
    made, layout = {}, str(o.get("kv_layout", "NHD"))
    for name in ("key", "value"):
        x, cache = i[f"append_{name}"], i[f"{name[0]}_cache"]
        _, heads, depth = x.shape
        out: Codes = list(cache.codes)
        for token, slot in slots_of(i, cache.shape[1 if layout == "NHD" else 2]):
            for h in range(heads):
                at, source = page_place(layout, cache.shape, slot, h), (token * heads + h) * depth
                out[at : at + depth] = x.codes[source : source + depth]
        made[f"{name[0]}_cache"] = out
    return made


def append_mla(i: Inputs, o: Options) -> Outputs:
    made = {}
    for name in ("ckv", "kpe"):
        x, cache = i[f"append_{name}"], i[f"{name}_cache"]
        width, out = x.shape[1], list(cache.codes)
        for token, slot in slots_of(i, cache.shape[1]):
            out[slot * width : (slot + 1) * width] = x.codes[token * width : (token + 1) * width]
        made[f"{name}_cache"] = [*out]
    return made


# --- tiles ---------------------------------------------------------------------------------------------------


def word(number: int, width: int) -> list[int]:
    """The bytes of a word, the lowest first."""
    return [number >> 8 * k & 0xFF for k in range(width)]


def tile(raw: list[int], dtype: str, rule: Rule, power: bool) -> tuple[list[int], list[int]]:
    """Codes of a tile, and the bytes of its float32 scale."""
    s, inverse = block_scale(raw, dtype, rule, power)
    if s == 0:  # zeros: any code stands for 0; ours is 0
        return [0x80 if is_negative(r, dtype) else 0 for r in raw], word(0, 4)
    return [code(r, dtype, s, inverse, rule) for r in raw], word(encode(s, F32), 4)


def row_of(nope: list[int], rope: list[int], dtype: str, rule: Rule, power: bool) -> list[int]:
    """The 656 bytes of a token."""
    codes: list[int] = []
    scales: list[int] = []
    for start in range(0, 512, 128):
        q, s = tile(nope[start : start + 128], dtype, rule, power)
        codes, scales = codes + q, scales + s
    return codes + scales + [byte for raw in rope for byte in word(raw, 2)]


def ds_mla(i: Inputs, o: Options) -> Outputs:
    out = list(i["kv_cache"].codes)
    power = bool(o.get("ue8m0"))
    for token, slot in tokens(i["slot_mapping"]):
        nope, rope = i["kv_c"].codes[512 * token : 512 * token + 512], i["k_pe"].codes[64 * token : 64 * token + 64]
        row = row_of(nope, rope, i["kv_c"].dtype, DS_MLA_POWERS if power else DS_MLA, power)
        out[656 * slot : 656 * slot + 656] = row
    return {"kv_cache": [*out]}


def whole(i: Inputs, o: Options) -> Codes:
    made: Codes = []
    for start in range(0, len(i["cache_k"].codes), 576):
        row = i["cache_k"].codes[start : start + 576]
        made += row_of(row[:512], row[512:], i["cache_k"].dtype, K_CACHE, False)
    return made


def index_places(slot: int, page: int, depth: int) -> tuple[int, int]:
    """The first code, and the first byte of the scales, of a token in pages of index keys."""
    groups = depth // 128
    start = slot // page * page * (depth + 4 * groups)
    return start + slot % page * depth, start + page * depth + slot % page * 4 * groups


def indexer(i: Inputs, o: Options) -> Outputs:
    k, out = i["k"], list(i["kv_cache"].codes)
    depth, page = k.shape[1], i["kv_cache"].shape[1]
    for token, slot in tokens(i["slot_mapping"]):
        codes_at, scales_at = index_places(slot, page, depth)
        for g in range(depth // 128):
            first = token * depth + 128 * g
            q, s = tile(k.codes[first : first + 128], k.dtype, INDEX, o.get("scale_fmt") == "ue8m0")
            out[codes_at + 128 * g : codes_at + 128 * g + 128] = q
            out[scales_at + 4 * g : scales_at + 4 * g + 4] = s
    return {"kv_cache": [*out]}


def nibble(x: Value, negative: bool) -> int:
    """E2M1: nearest, ties to the even code, saturating; NaN is 0."""
    if isinstance(x, float):
        return 0 if math.isnan(x) else 7 + 8 * negative
    distances = [abs(abs(x) - m) for m in MAGNITUDES]
    best = min(range(8), key=lambda c: (distances[c], c % 2))
    return best + 8 * negative


def nvfp4(i: Inputs, o: Options) -> Outputs:
    made: Outputs = {}
    layout = str(o.get("kv_layout", "NHD"))
    for name in ("key", "value"):
        x, memory, blocks = i[f"append_{name}"], i[f"{name[0]}_cache"], i[f"{name[0]}_scale_cache"]
        (g,) = i[f"{name[0]}_scale"].values()
        _, heads, depth = x.shape
        bytes_, scales = list(memory.codes), list(blocks.codes)
        page = memory.shape[1 if layout == "NHD" else 2]
        for token, slot in tokens(i["slot_mapping"]) if "slot_mapping" in i else slots_of(i, page):
            for h in range(heads):
                at, scale_at = (page_place(layout, m.shape, slot, h) for m in (memory, blocks))
                for b in range(depth // 16):
                    first = (token * heads + h) * depth + 16 * b
                    raw = x.codes[first : first + 16]
                    codes, scale = four_bits(raw, x.dtype, g)
                    scales[scale_at + b] = scale
                    for pair in range(8):
                        bytes_[at + 8 * b + pair] = codes[2 * pair] | codes[2 * pair + 1] << 4
        made[f"{name[0]}_cache"], made[f"{name[0]}_scale_cache"] = [*bytes_], [*scales]
    return made


def four_bits(raw: list[int], dtype: str, g: Value) -> tuple[list[int], int]:
    """Codes of E2M1 and the E4M3 scale of a block under a scale that multiplies."""
    values = [decode(c, dtype) for c in raw]
    known = [abs(v) for v in values if not (isinstance(v, float) and math.isnan(v))]
    top = max([*known, Fraction(0)])
    wide = rounded(divide(top, rounded(multiply(Fraction(6), g), F32)), F32)
    scale = encode(wide, E4M3)
    total = rounded(multiply(decode(scale, E4M3), g), F32)
    inverse: Value = Fraction(0) if total == 0 else rounded(divide(Fraction(1), total), F32)
    codes = []
    for c, v in zip(raw, values, strict=True):
        codes.append(nibble(rounded(multiply(v, inverse), F32), is_negative(c, dtype)))
    return codes, scale


# --- readers -------------------------------------------------------------------------------------------------


def gathered(i: Inputs, page: int) -> Iterator[tuple[int, int]]:
    """Every row of the destination that a request fills, and its slot."""
    table, width = i["block_table"].codes, i["block_table"].shape[1]
    for b in range(i["block_table"].shape[0]):
        if "cu_seq_lens" in i:
            first, count = i["cu_seq_lens"].codes[b], i["cu_seq_lens"].codes[b + 1] - i["cu_seq_lens"].codes[b]
        else:
            first, count = i["workspace_starts"].codes[b], i["seq_lens"].codes[b]
        start = i["seq_starts"].codes[b] if "seq_starts" in i else 0
        for k in range(count):
            yield first + k, table[b * width + (start + k) // page] * page + (start + k) % page


def gather(i: Inputs, o: Options) -> Outputs:
    src, out = i["src_cache"], list(i["dst"].codes)
    width, (s,) = src.shape[2], i["scale"].values()
    for row, slot in gathered(i, src.shape[1]):
        codes = src.codes[slot * width : (slot + 1) * width]
        out[row * width : (row + 1) * width] = [product(raw, s, i["dst"].dtype) for raw in codes]
    return {"dst": [*out]}


def rotated(i: Inputs, o: Options) -> Outputs:
    """Query and key turned and coded as without a cache; keys and values then into their slots."""
    made = fused.rope(i, o)
    factor = rounded(Fraction(float(str(o.get("quant_scale_kv", 1.0)))), F32)
    coded = [rounded(multiply(v, factor), F32) for v in i["v"].values()]
    v = [0x7F if isinstance(x, float) and math.isnan(x) else encode(x, E4M3) for x in coded]
    layout, (_, heads, depth) = str(o.get("kv_layout", "NHD")), i["v"].shape
    keys, values, wide = list(i["k_cache"].codes), list(i["v_cache"].codes), i["k_rope"].shape[2]
    page = i["k_cache"].shape[1 if layout == "NHD" else 2]
    for token, slot in slots_of(i, page):
        for h in range(heads):
            at, row = page_place(layout, i["k_cache"].shape, slot, h), token * heads + h
            keys[at : at + wide] = made["k_rope"][row * wide : (row + 1) * wide]
            keys[at + wide : at + depth] = made["k_nope"][row * (depth - wide) : (row + 1) * (depth - wide)]
            values[at : at + depth] = v[row * depth : (row + 1) * depth]
    return {"q_rope": [*made["q_rope"]], "q_nope": [*made["q_nope"]], "k_cache": [*keys], "v_cache": [*values]}


def paged_nvfp4(i: Inputs, o: Options) -> Outputs:
    """Tokens of requests out of pages: code times scale, which float32 holds, times the scale of the tensor."""
    layout, made = str(o.get("kv_layout", "NHD")), {}
    lengths, wide = i["seq_lens"].codes, i["block_table"].shape[1]
    for x in "kv":
        memory, blocks, out = i[f"{x}_cache"], i[f"{x}_scale_cache"], i[f"output_{x}"]
        _, room, heads, depth = out.shape
        page, codes, (g,) = memory.shape[1 if layout == "NHD" else 2], list(out.codes), i[f"{x}_scale"].values()
        for b, length in enumerate(lengths):
            for t in range(length):
                slot = i["block_table"].codes[b * wide + t // page] * page + t % page
                for h in range(heads):
                    at, scale_at = (page_place(layout, m.shape, slot, h) for m in (memory, blocks))
                    for c in range(depth):
                        nibble = memory.codes[at + c // 2] >> 4 * (c % 2) & 15
                        value = FP4[nibble & 7] * (-1 if nibble & 8 else 1)
                        scaled = multiply(value, decode(blocks.codes[scale_at + c // 16], "float8_e4m3fn"))
                        codes[((b * room + t) * heads + h) * depth + c] = encode(
                            rounded(multiply(scaled, g), F32), out.dtype, negative_zero=bool(nibble & 8)
                        )
        made[f"output_{x}"] = [*codes]
    return made


def copy(i: Inputs, o: Options) -> Outputs:
    src, out = i["src_cache"], list(i["dst"].codes)
    width = src.shape[2]
    for row, slot in gathered(i, src.shape[1]):
        out[row * width : (row + 1) * width] = src.codes[slot * width : (slot + 1) * width]
    return {"dst": [*out]}


def read_row(raw: list[int]) -> list[int]:
    """The 576 bfloat16 values of 656 bytes."""
    made = []
    for column in range(512):
        at = 512 + 4 * (column // 128)
        scale = decode(sum(byte << 8 * k for k, byte in enumerate(raw[at : at + 4])), F32)
        made.append(product(raw[column], scale, "bfloat16"))
    return made + [raw[at] | raw[at + 1] << 8 for at in range(528, 656, 2)]


def upconvert(i: Inputs, o: Options) -> Outputs:
    src, out = i["src_cache"], list(i["dst"].codes)
    for row, slot in gathered(i, src.shape[1]):
        out[row * 576 : (row + 1) * 576] = read_row(src.codes[slot * 656 : (slot + 1) * 656])
    return {"dst": [*out]}


def dequantize(i: Inputs, o: Options) -> Codes:
    raw = i["quant_k_cache"].codes
    return [value for at in range(0, len(raw), 656) for value in read_row(raw[at : at + 656])]


def index_keys(i: Inputs, o: Options) -> Outputs:
    cache, k, s = i["kv_cache"].codes, list(i["dst_k"].codes), list(i["dst_scale"].codes)
    depth, page, width = i["dst_k"].shape[1], i["kv_cache"].shape[1], i["dst_scale"].shape[1]
    for row, slot in gathered(i, page):
        codes_at, scales_at = index_places(slot, page, depth)
        k[row * depth : (row + 1) * depth] = cache[codes_at : codes_at + depth]
        s[row * width : (row + 1) * width] = cache[scales_at : scales_at + width]
    return {"dst_k": [*k], "dst_scale": [*s]}


ROUTINES: dict[str, Callable[[Inputs, Options], Codes | Outputs]] = {
    "reshape_and_cache_flash": flash,
    "reshape_and_cache": packed,
    "concat_and_cache_mla": mla,
    "set_mla_kv_buffer": set_buffer,
    "convert_fp8": convert,
    "append_paged_kv_cache": append,
    "append_paged_mla_kv_cache": append_mla,
    "concat_and_cache_ds_mla": ds_mla,
    "quantize_k_cache": whole,
    "indexer_k_quant_and_cache": indexer,
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": nvfp4,
    "nvfp4_quantize_append_paged_kv_cache": nvfp4,
    "nvfp4_kv_dequantize_paged": paged_nvfp4,
    "rope_quantize_fp8_append_paged_kv_cache": rotated,
    "gather_and_maybe_dequant_cache": gather,
    "cp_gather_cache": copy,
    "cp_gather_and_upconvert_fp8_kv_cache": upconvert,
    "dequantize_k_cache": dequantize,
    "cp_gather_indexer_k_quant_cache": index_keys,
}
