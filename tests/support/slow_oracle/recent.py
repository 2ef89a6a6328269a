"""Operands of mixed experts, pairs by expert, a low-rank part, 4-bit integers and chosen keys a second time."""

from __future__ import annotations

from fractions import Fraction

from tests.support.slow_oracle.attention import _number, _rows, _three
from tests.support.slow_oracle.layers import silu_times
from tests.support.slow_oracle.numbers import Array, Value, array, decode, encode, rounded
from tests.support.slow_oracle.weight_only import E2M1, finite, product

Inputs, Options = dict[str, Array], dict[str, object]
Outputs = dict[str, list[int]]
SIGNS = {"fp4": (15, 31, 12, 28, 9, 25, 14, 30), "fp4_fp8": (7, 15, 23, 31, 3, 11, 19, 27)}
"""Where the sign of each of eight codes goes."""
MAGNITUDES = {
    "fp4": ((6, 7, 8), (22, 23, 24), (3, 4, 5), (19, 20, 21), (0, 1, 2), (16, 17, 18), (13, 10, 11), (29, 26, 27)),
    "fp4_fp8": tuple((4 * i, 4 * i + 1, 4 * i + 2) for i in range(8)),
}
"""And its other bits, the least first."""


def pairs(i: Inputs, o: Options) -> Outputs:
    """``make_routing_data``."""
    ids, weights = i["topk_ids"].codes, i["topk_weights"].values()
    placed = sorted((e, p) for p, e in enumerate(ids) if e >= 0)
    gathered = [p for _, p in placed] + [-1] * (len(ids) - len(placed))
    scattered = [-1] * len(ids)
    for at, (_, p) in enumerate(placed):
        scattered[p] = at
    kept = [encode(Fraction(-1) if e == -1 else w, "bfloat16") for e, w in zip(ids, weights, strict=True)]
    count = -(-int(str(o["num_local_experts"])) // 32) * 32
    return {
        "gate_scal": [kept[p] for p in gathered],
        "expt_hist": [sum(e == n for e in ids) for n in range(count)],
        "gather_indx": gathered,
        "scatter_indx": scattered,
    }


def _bytes(w: Array, kind: str) -> list[int]:
    experts, rows, width = w.shape
    out = [0] * len(w.codes)
    for start in range(0, experts * rows, 16):
        for r in range(8):
            for block in range(0, width, 32):
                for mma in range(4):
                    for lane in range(4):
                        two = (start + r, start + r + 8)
                        if kind == "fp4":
                            at = [(row, block + 8 * mma + 4 * half + lane) for half in (0, 1) for row in two]
                        else:
                            at = [(row, block + 8 * mma + 2 * lane + half) for row in two for half in (0, 1)]
                        word = sum(w.codes[row * width + c] << 8 * n for n, (row, c) in enumerate(at))
                        if kind != "int4":
                            fields = [word >> 4 * n & 15 for n in range(8)]
                            word = sum((f >> 3) << SIGNS[kind][n] for n, f in enumerate(fields))
                            word += sum((f >> b & 1) << MAGNITUDES[kind][n][b] for n, f in enumerate(fields)
                                        for b in range(3))  # fmt: skip  # one sum
                        to = (start + r + 8 * (mma % 2)) * width + block + 16 * (mma // 2) + 4 * lane
                        out[to : to + 4] = [word >> 8 * n & 255 for n in range(4)]
    return out


def interleaved(i: Inputs, o: Options) -> list[int]:
    """``interleave_moe_weights_for_sm90_mixed_gemm``."""
    return _bytes(i["weight"], str(o.get("quant_type", "fp4")))


def humming(i: Inputs, o: Options) -> Outputs:
    """``preprocess_moe_weights_for_sm90_mixed_gemm_humming``, as the two lie logically."""
    assert o.get("interleave") is False
    weight, raw, most = i["weight"], i["raw_scale"], int(str(o.get("max_range", 11)))
    count = raw.shape[1] * raw.shape[2]
    codes, scales, residual = [], [], []
    for e in range(raw.shape[0]):
        own = raw.codes[e * count : (e + 1) * count]
        least = max(min(own), max(own) - most)
        residual.append(encode(Fraction(2) ** (least - 128), "float32"))
        scales += [max(s, least) - least + 1 for s in own]
        for n, s in enumerate(own):
            for byte in weight.codes[16 * (e * count + n) : 16 * (e * count + n + 1)]:
                both = []
                for code in (byte & 15, byte >> 4):
                    x = E2M1[code & 7] / 2 ** (max(s, least) - s)
                    near = min(abs(x - E2M1[c]) for c in range(8))
                    best = max(c for c in range(8) if abs(x - E2M1[c]) == near)
                    both.append(0 if code == 8 else code & 8 | best)
                codes.append(both[0] | both[1] << 4)
    return {"out": codes, "out_scale": scales, "residual": residual}


def global_scale(i: Inputs, o: Options) -> list[int]:
    """``make_nvfp4_global_scale`` of finite values."""
    largest = max(abs(finite(x)) for x in i["x"].values())
    return [encode(Fraction(int(str(o.get("e4m3_max", 448))) * 6) / largest, "float32")]


def svdquant(i: Inputs, o: Options) -> list[int | None]:
    """``mm_nvfp4_svdquant``."""
    sides = []
    for codes, low_rank in (("a", "d"), ("b", "l1")):
        rows = []
        for row, scales, more in zip(i[codes].code_rows(), i[f"{codes}_sf"].rows(), i[low_rank].rows(), strict=True):
            nibbles = [c for byte in row for c in (byte & 15, byte >> 4)]
            rows.append([E2M1[c] * finite(scales[n // 16]) for n, c in enumerate(nibbles)] + [finite(x) for x in more])
        sides.append(rows)
    steps: list[tuple[str, str, list[Fraction]]] = [("times", "float32", [finite(x) for x in i["alpha"].values()])]
    if "bias" in i:
        steps.append(("plus", "float32", [finite(x) for x in i["bias"].values()]))
    left: list[list[Value]] = [list(row) for row in sides[0]]
    return product(left, sides[1], [*steps, ("store", "bfloat16", [])], "bfloat16")


def mxint4(i: Inputs, o: Options) -> list[int]:
    """``trtllm_mxint4_block_scale_moe``."""
    hidden, slots, inner = i["hidden_states"].shape[1], i["topk_ids"].shape[1], i["w2"].shape[1]
    ids, weights = i["topk_ids"].codes, i["topk_weights"].values()

    def times(row: list[Fraction], name: str, expert: int) -> list[Fraction]:
        _, k, n = i[name].shape
        codes = i[name].code_rows()[expert * k : (expert + 1) * k]
        scales = i[f"{name}_scale"].rows()[expert * k // 32 : (expert + 1) * k // 32]
        sums = [Fraction(0)] * n
        for at, (x, line) in enumerate(zip(row, codes, strict=True)):
            for j, c in enumerate(line):
                signed = c - 16 if c > 7 else c
                sums[j] += x * finite(rounded(signed * finite(scales[at // 32][j]), "bfloat16"))
        return [finite(rounded(x, "float32")) for x in sums]

    out = []
    for t, row in enumerate(i["hidden_states"].rows()):
        total = [Fraction(0)] * hidden
        for slot in range(slots):
            expert, weight = ids[t * slots + slot], finite(weights[t * slots + slot])
            if expert < 0:
                continue
            both = times([finite(x) for x in row], "w1", expert)
            act = [silu_times(gate, up, "bfloat16") for up, gate in zip(both[:inner], both[inner:], strict=True)]
            second = times([finite(decode(c, "bfloat16")) for c in act], "w2", expert)
            stored = [finite(rounded(x, "bfloat16")) for x in second]
            total = [x + finite(rounded(weight * y, "float32")) for x, y in zip(total, stored, strict=True)]
        out += [encode(x, "bfloat16") for x in total]
    return out


def _page(memory: Array, slot: int, page: int) -> list[Fraction]:
    """The key of a slot of DeepSeek-V4's pages."""
    block, at = divmod(slot, page)
    raw = bytes(memory.code_rows()[block])
    token, scales = raw[576 * at : 576 * at + 576], raw[576 * page + 8 * at : 576 * page + 8 * at + 7]
    codes, rope = array("float8_e4m3fn", (448,), token[:448]), array("bfloat16", (64,), token[448:])
    own = [_number(x) * Fraction(2) ** (scales[n // 64] - 127) for n, x in enumerate(codes.values())]
    return own + [_number(x) for x in rope.values()]


def pools(i: Inputs, o: Options) -> Outputs:
    """``trtllm_batch_decode_sparse_mla_dsv4``."""
    scale = Fraction(float(str(o["bmm1_scale"]))) if o.get("bmm1_scale") else Fraction(512**-0.5)
    page, out, sums = int(str(o.get("block_size", 64))), [], []
    for token, rows in enumerate(_three(i["query"])):
        keys: list[list[Value]] = []
        for cache, name in (("swa_kv_cache", "sparse_indices"), ("compressed_kv_cache", "extra_sparse_indices")):
            if cache in i:
                slots = i[name].code_rows()[token]
                keys += [list(_page(i[cache], slot, page)) for slot in slots if slot >= 0]
        for h, row in enumerate(rows):
            sink = _number(i["sinks"].values()[h]) if "sinks" in i else None
            unit = Fraction(0.6931471805599453)
            codes, lse = _rows([row], keys, keys, scale, Fraction(1), [(0, len(keys))], sink, "bfloat16", unit)
            out += codes[0]
            sums += lse
    return {"out": out, "lse": sums}


def blocks(i: Inputs, o: Options) -> Outputs:
    """``msa_sparse_attention``."""
    (_, of_keys, page, depth), heads = i["k"].shape, i["q"].shape[1]
    scale = Fraction(float(str(o["softmax_scale"]))) if o.get("softmax_scale") else Fraction(depth**-0.5)
    factor = Fraction(float(str(o["v_global_scale"]))) if o.get("v_global_scale") else Fraction(1)
    q, ends, table = _three(i["q"]), i["cu_seqlens_q"].codes, i["page_table"].code_rows()
    chosen, cached = i["q2k_indices"].code_rows(), {name: i[name].rows() for name in "kv"}
    out, sums = [], []
    for b, used in enumerate(i["seqused_k"].codes):
        for token in range(ends[b], ends[b + 1]):
            last = used - (ends[b + 1] - 1 - token) if o.get("causal") else used
            for h in range(heads):
                g = h // (heads // of_keys)
                own = [p * page + n for p in chosen[g * len(q) + token] if p >= 0 for n in range(page)]
                at = [(table[b][n // page] * of_keys + g) * page + n % page for n in own if n < last]
                k, v = ([cached[name][n] for n in at] for name in "kv")
                dtype = i["q"].dtype
                codes, lse = _rows([q[token][h]], k, v, scale, factor, [(0, len(k))], None, dtype, Fraction(1))
                out += codes[0]
                sums += lse
    return {"out": out, "lse": sums}


def blockscaled(i: Inputs, o: Options) -> list[int]:
    """``cute_dsl_fmha_blockscaled_prefill`` of E4M3 codes."""
    (batch, queries, heads, depth), (_, keys, of_keys, _) = i["q"].shape, i["k"].shape
    given = {x: Fraction(float(str(o.get(f"scale_{x}") or 1))) for x in "qkvo"}
    scale = (Fraction(float(str(o["sm_scale"]))) if o.get("sm_scale") else Fraction(depth**-0.5)) * (
        given["q"] * given["k"]
    )
    wide = {}
    for name in "qk":
        exponents = i[f"{name}_sf"].code_rows()
        wide[name] = [
            [_number(x) * Fraction(2) ** (e[n // 32] - 127) for n, x in enumerate(row)]
            for row, e in zip(i[name].rows(), exponents, strict=True)
        ]
    values, out = i["v"].rows(), []
    for b in range(batch):
        for s in range(queries):
            stop = keys - queries + s + 1 if o.get("is_causal") else keys
            for h in range(heads):
                at = [(b * keys + n) * of_keys + h // (heads // of_keys) for n in range(stop)]
                row: list[Value] = list(wide["q"][(b * queries + s) * heads + h])
                k: list[list[Value]] = [list(wide["k"][n]) for n in at]
                v = [values[n] for n in at]
                factor = given["v"] / given["o"]
                codes, _ = _rows([row], k, v, scale, factor, [(0, stop)], None, i["v"].dtype, Fraction(1))
                out += codes[0]
    return out
