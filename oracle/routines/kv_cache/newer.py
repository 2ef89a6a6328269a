"""Contracts of vLLM's newer caches: DeepSeek-V4's pages, a scale for each token and head, MLA rows that are rotated as
they are written, and pages that are read back for a prefill.

Sources: vLLM 0.20.2 v1/attention/ops (deepseek_v4_ops/cache_utils.py, triton_reshape_and_cache_flash.py),
csrc/cache_kernels_fused.cu, v1/attention/backends/flashinfer.py.
Not covered: int8 caches of a scale for each head, whose codes Triton cuts toward zero; E5M2.

NaN values are coded as any NaN or, by Triton's clamp, as the largest code of either sign; bits that are moved keep
theirs.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import DtypeError, InputError, OptionError, ShapeError
from oracle.numbers import kv_recipes
from oracle.numbers.formats import E4M3FN, decode, from_codes, of_dtype
from oracle.numbers.quantize import WIDE
from oracle.routines.base import E4M3, F32, Call, Inputs, Options, OptionSpec, TensorSpec, positive, register
from oracle.routines.kv_cache.contract import (
    CacheContract,
    Coded,
    Copied,
    Piece,
    Products,
    Quantised,
    ReadsCodes,
    WritesCodes,
    flat,
    fresh,
    one_scale,
    slots_of,
)
from oracle.routines.kv_cache.readers import INT32, TABLE
from oracle.routines.kv_cache.writers import HALF, KEY, SLOTS, Padded, columns, of_slots, rows, written
from oracle.routines.traits import Kind
from oracle.truth.moe import nearest
from oracle.verdict.sets import all_equal, rounded_to

NOPE, ROPE, TILE, SCALES = 448, 64, 64, 8
"""Columns of a token that are codes, those that are kept, columns of a scale, bytes of scales (the last is 0)."""
TOKEN = NOPE + 2 * ROPE
"""Bytes of a token before the scales of its page."""
PAGE = OptionSpec("block_size", 64, None, "tokens of a page")


def check_pages(memory: Tensor, page: int) -> None:
    """Refuse pages ``memory`` ``[B, C]``, uint8, that do not hold ``page`` tokens with scales. Raises ShapeError."""
    if memory.shape[1] < (least := page * (TOKEN + SCALES)):
        raise ShapeError(f"a page of k_cache has {memory.shape[1]} bytes; {page} tokens take {least}")


def v4_places(slot: Tensor, page: int, stride: int) -> tuple[Tensor, Tensor]:
    """First bytes of each ``slot`` ``[n]`` and of its scales in pages of ``stride`` bytes, int64 ``[n]``."""
    block, offset = of_slots(slot, page)
    return block * stride + offset * TOKEN, block * stride + page * TOKEN + offset * SCALES


@register
class QuantizeAndInsertKCache(Padded, CacheContract):
    """A page is P tokens of 576 bytes, 448 codes and 64 columns of bfloat16 as they are, then P times 8 bytes: the
    exponents of seven scales, one for each 64 columns, and 0; what is behind them is not written."""

    name = "quantize_and_insert_k_cache"
    summary = "DeepSeek-V4's keys: codes in tiles of 64 with bytes of exponents, the rotated columns as they are"
    source = "vLLM 0.20.2 v1/attention/ops/deepseek_v4_ops/cache_utils.py quantize_and_insert_k_cache"
    kinds = (Quantised, Copied)
    gpu = False
    dispatched = False
    loses = True
    interval = False
    inputs = (
        TensorSpec("k", Kind.VALUES, HALF[:1], ("N", str(NOPE + ROPE)), "keys; tokens past T are padding"),
        TensorSpec("k_cache", Kind.STATE, (torch.uint8,), ("B", "C"), "pages before the call"),
        SLOTS,
    )
    options = (PAGE,)
    returns = memory = ("k_cache",)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        page = positive(options, "block_size")
        check_pages(inputs["k_cache"], page)
        slots_of(inputs["slot_mapping"], "slot_mapping", len(inputs["k_cache"]) * page, len(inputs["k"]))

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        tokens = written(inputs["slot_mapping"])
        k, slot = inputs["k"][tokens], inputs["slot_mapping"][tokens]
        first, scales = v4_places(slot, positive(options, "block_size"), inputs["k_cache"].shape[1])
        recipes = kv_recipes.TORCH_V4_CACHE, kv_recipes.VLLM_V4_CACHE, kv_recipes.VLLM_V4_CACHE_POSITIVE
        seven = NOPE // TILE
        rope = flat(k[:, NOPE:]).view(torch.uint8).reshape(len(k), 2 * ROPE)
        last = torch.zeros(len(k), 1, dtype=torch.uint8, device="cpu")
        return [
            Quantised(
                "k_cache", k[:, :NOPE].contiguous(), recipes, rows(first, columns(NOPE)), "k_cache",
                rows(scales, columns(seven)), exponents=True,
            ),
            Copied("k_cache", rope, rows(first, NOPE + columns(2 * ROPE))),
            Copied("k_cache", last, rows(scales, columns(1) + seven)),
        ]  # fmt: skip  # a piece a line


@register
class DequantizeAndGatherKCache(ReadsCodes):
    """Row ``offset + i`` of request ``b`` in ``out`` is token ``seq_lens[b] - gather_lens[b] + i``, ``i`` below
    ``gather_lens[b]``, all of them without it; pages are those of ``quantize_and_insert_k_cache``. A byte ``e`` of a
    scale stands for ``2^(e - 127)``, and is at least 1. Other rows hold what they held."""

    name = "dequantize_and_gather_k_cache"
    summary = "the last tokens of requests out of DeepSeek-V4's pages, codes times their powers of two"
    source = "vLLM 0.20.2 v1/attention/ops/deepseek_v4_ops/cache_utils.py dequantize_and_gather_k_cache"
    kinds = (Products, Copied)
    gpu = False
    dispatched = False
    inputs = (
        TensorSpec("gathered", Kind.STATE, HALF[:1], ("B", "N", str(NOPE + ROPE)), "rows of requests before the call"),
        TensorSpec("k_cache", Kind.CODES, (torch.uint8,), ("S", "C"), "pages"),
        TensorSpec("seq_lens", Kind.COUNTS, INT32, ("B",), "tokens of each request"),
        TensorSpec("gather_lens", Kind.COUNTS, INT32, ("B",), "tokens of each that are read", optional=True),
        TABLE,
    )
    options = (PAGE, OptionSpec("offset", 0, None, "rows of it before the first token"))
    returns = memory = ("gathered",)

    def paged(self, name: str) -> bool:
        return False

    def _read(self, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
        """Slots and rows of ``gathered`` of every token that is read, int64 ``[n]``."""
        page, table, room = positive(options, "block_size"), inputs["block_table"].long(), inputs["gathered"].shape[1]
        lengths = inputs["seq_lens"].tolist()
        counts = inputs["gather_lens"].tolist() if "gather_lens" in inputs else lengths
        slots, places = [], []
        for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            if not 0 <= count <= length or int(options["offset"]) + count > room:
                raise OptionError(f"request {b} reads {count} of {length} tokens into {room} rows from the offset on")
            token = length - count + columns(count)
            if count and (int(token[-1]) // page >= table.shape[1]):
                raise OptionError(f"request {b} has {length} tokens; block_table has {table.shape[1]} pages of {page}")
            slots.append(table[b, token // page] * page + token % page)
            places.append(b * room + int(options["offset"]) + columns(count))
        return torch.cat(slots), torch.cat(places)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        page = positive(options, "block_size")
        check_pages(inputs["k_cache"], page)
        slots = self._read(inputs, options)[0]
        if not len(slots) or int(slots.min()) < 0 or int(slots.max()) >= len(inputs["k_cache"]) * page:
            raise OptionError(f"block_table leads beyond the {len(inputs['k_cache'])} pages, or no token is read")
        scales = v4_places(slots, page, inputs["k_cache"].shape[1])[1]
        if bool((flat(inputs["k_cache"])[rows(scales, columns(NOPE // TILE))] == 0).any()):
            raise InputError("a scale of k_cache has the byte 0, which stands for no power that float32 multiplies by")

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        slots, places = self._read(inputs, options)
        raw = flat(inputs["k_cache"])
        first, scales = v4_places(slots, positive(options, "block_size"), inputs["k_cache"].shape[1])
        exponents = raw[rows(scales, columns(NOPE // TILE))].to(torch.float64) - 127
        codes = from_codes(raw[rows(first, columns(NOPE))], E4M3FN)
        target = places * (NOPE + ROPE)
        rope = raw[rows(first, NOPE + columns(2 * ROPE))].view(torch.int16)
        powers = torch.exp2(exponents).repeat_interleave(TILE, dim=1)
        return [
            Products("gathered", codes, powers, rows(target, columns(NOPE))),
            Copied("gathered", rope, rows(target, NOPE + columns(ROPE))),
        ]


@register
class PerTokenHeadQuant(Padded, CacheContract):
    """A token's head has one scale, ``max(amax / 448, 1e-6)``, and codes of ``x * (1 / scale)``; caches are
    ``[pages, P, H, D]``, scales ``[pages, P, H]``. Keys and values may differ in D."""

    name = "triton_reshape_and_cache_flash_per_token_head_quant"
    summary = "keys and values into pages with a scale for each token and head"
    source = "vLLM 0.20.2 v1/attention/ops/triton_reshape_and_cache_flash.py"
    kinds = (Quantised,)
    gpu = False
    dispatched = False
    loses = True
    interval = False
    inputs = (
        KEY,
        TensorSpec("value", Kind.VALUES, WIDE, ("N", "H", "E"), "values"),
        TensorSpec("key_cache", Kind.STATE, E4M3, ("B", "P", "H", "D"), "pages of keys before the call"),
        TensorSpec("value_cache", Kind.STATE, E4M3, ("B", "P", "H", "E"), "pages of values before the call"),
        TensorSpec("k_scale_cache", Kind.STATE, F32, ("B", "P", "H"), "scales of keys before the call"),
        TensorSpec("v_scale_cache", Kind.STATE, F32, ("B", "P", "H"), "scales of values before the call"),
        SLOTS,
    )
    returns = memory = ("key_cache", "value_cache", "k_scale_cache", "v_scale_cache")

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if inputs["value"].dtype != inputs["key"].dtype:
            raise DtypeError(f"value has dtype {inputs['value'].dtype}, key {inputs['key'].dtype}; pass one dtype")
        pages, page = inputs["key_cache"].shape[:2]
        slots_of(inputs["slot_mapping"], "slot_mapping", pages * page, len(inputs["key"]))

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        tokens = written(inputs["slot_mapping"])
        heads = inputs["key"].shape[1]
        row = rows(inputs["slot_mapping"][tokens].long() * heads, columns(heads)).reshape(-1)
        recipes = kv_recipes.TORCH_TOKEN_HEAD, kv_recipes.VLLM_TOKEN_HEAD, kv_recipes.VLLM_TOKEN_HEAD_POSITIVE
        parts: list[Piece] = []
        for name in ("key", "value"):
            x = inputs[name][tokens].reshape(len(row), inputs[name].shape[2])
            at = rows(row * x.shape[1], columns(x.shape[1]))
            parts.append(Quantised(f"{name}_cache", x, recipes, at, f"{name[0]}_scale_cache", row.reshape(-1, 1)))
        return parts


def rotated(x: Tensor, angles: Tensor, is_neox: bool) -> Tensor:
    """``x`` ``[..., D]`` rotated by cosines and sines ``angles`` ``[..., D]`` of a dtype T, every product, difference
    and sum rounded to T: ``[..., D]`` of T. Pairs are halves (``is_neox``) or neighbours."""
    fmt = of_dtype(x.dtype)
    c, s = (t if is_neox else t for t in decode(angles).chunk(2, dim=-1))
    values = decode(x)
    one, two = values.chunk(2, dim=-1) if is_neox else (values[..., 0::2], values[..., 1::2])

    def times(a: Tensor, b: Tensor) -> Tensor:
        return nearest(a * b, fmt)

    first, second = nearest(times(one, c) - times(two, s), fmt), nearest(times(two, c) + times(one, s), fmt)
    parts = torch.cat([first, second], dim=-1) if is_neox else torch.stack([first, second], dim=-1).flatten(-2)
    return rounded_to(parts, x.dtype)


@register
class ConcatAndCacheMlaRopeFused(Padded, WritesCodes):
    """``q_pe`` and ``k_pe`` of token ``t`` are rotated by row ``positions[t]`` of ``cos_sin_cache``, cosines then
    sines, rounded to their dtype T, each product and sum rounded to T; then as ``concat_and_cache_mla``. A token whose
    slot is negative keeps both as they are; so do tokens past T."""

    name = "concat_and_cache_mla_rope_fused"
    summary = "rotated columns of queries and keys in place, compressed and rotated ones into pages"
    source = "vLLM 0.20.2 csrc/cache_kernels_fused.cu concat_and_cache_mla_rope_fused"
    kinds = (Coded, Copied)
    gpu = False
    dispatched = False
    divides = True
    inputs = (
        TensorSpec("positions", Kind.POSITIONS, (torch.int64,), ("N",), "position of each token"),
        TensorSpec("q_pe", Kind.STATE, HALF, ("N", "H", "E"), "columns of the query that are rotated"),
        TensorSpec("k_pe", Kind.STATE, HALF, ("N", "E"), "columns of the key that are rotated"),
        TensorSpec("kv_c", Kind.VALUES, HALF, ("N", "R"), "compressed keys and values; tokens past T are padding"),
        TensorSpec("cos_sin_cache", Kind.WEIGHTS, WIDE, ("L", "E"), "cosines, then sines, of each position"),
        SLOTS,
        TensorSpec("kv_cache", Kind.STATE, E4M3, ("B", "P", "C"), "pages before the call, C = R + E"),
        TensorSpec("scale", Kind.SCALES, F32, None, "multiplies on reading; the writer divides"),
    )
    options = (OptionSpec("is_neox", False, (True, False), "pairs are halves of the columns, else neighbours"),)
    returns = memory = ("q_pe", "k_pe", "kv_cache")

    def paged(self, name: str) -> bool:
        return name == "kv_cache"

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if len({inputs[name].dtype for name in ("q_pe", "k_pe", "kv_c")}) > 1:
            raise DtypeError("q_pe, k_pe and kv_c differ in dtype; pass one")
        pages, page, width = inputs["kv_cache"].shape
        if inputs["k_pe"].shape[1] % 2 or width != inputs["kv_c"].shape[1] + inputs["k_pe"].shape[1]:
            raise ShapeError(f"kv_cache has {width} columns; pass those of kv_c and an even number of k_pe")
        at = inputs["positions"]
        if bool((at < 0).any()) or bool((at >= len(inputs["cos_sin_cache"])).any()):
            raise InputError(f"positions reach from {int(at.min())} to {int(at.max())}; see cos_sin_cache")
        one_scale(inputs, "scale")
        slots_of(inputs["slot_mapping"], "slot_mapping", pages * page, len(inputs["kv_c"]))

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        tokens, neox = written(inputs["slot_mapping"]), bool(options["is_neox"])
        angles = rounded_to(decode(inputs["cos_sin_cache"]), inputs["q_pe"].dtype)[inputs["positions"][tokens]]
        q, k = inputs["q_pe"][tokens], rotated(inputs["k_pe"][tokens], angles, neox)
        heads, depth = q.shape[1:]
        q = rotated(q, angles[:, None, :].expand(-1, heads, -1), neox)
        x = torch.cat([inputs["kv_c"][tokens], k], dim=1)
        at = rows(inputs["slot_mapping"][tokens].long() * x.shape[1], columns(x.shape[1]))
        scale = decode(inputs["scale"]).reshape(1, 1).expand(len(tokens), 1)
        return [
            Coded("kv_cache", x, scale, at),
            Copied(
                "q_pe", flat(q).reshape(len(q), heads * depth), rows(tokens * heads * depth, columns(heads * depth))
            ),
            Copied("k_pe", flat(k).reshape(k.shape), rows(tokens * depth, columns(depth))),
        ]


@register
class PrefillKvDequant(ReadsCodes):
    """Page ``1 + b L + i`` of ``mock_kv_cache`` is page ``block_tables_prefill[b, i]`` of ``kv_cache``, keys times
    ``k_scale``, values times ``v_scale``; page 0 of the cache and negative entries stand for none, and their pages, as
    page 0 of the result, may hold anything. ``mock_block_table`` counts from 1."""

    name = "trtllm_prefill_attn_kvfp8_dequant"
    summary = "pages of a prefill out of an FP8 cache in 16 bits, one behind the other, with their table"
    source = "vLLM 0.20.2 v1/attention/backends/flashinfer.py trtllm_prefill_attn_kvfp8_dequant"
    kinds = (Products, Copied)
    gpu = False
    dispatched = False
    inputs = (
        TensorSpec("kv_cache", Kind.CODES, E4M3, ("S", "2", "G", "P", "D"), "pages of keys and of values"),
        TensorSpec("block_tables_prefill", Kind.PAGES, INT32, ("B", "L"), "pages of each request"),
        TensorSpec("k_scale", Kind.SCALES, F32, ("1",), "multiplies keys"),
        TensorSpec("v_scale", Kind.SCALES, F32, ("1",), "multiplies values"),
    )
    options = (OptionSpec("dequant_dtype", torch.bfloat16, HALF, "dtype of the pages"),)
    returns = ("mock_kv_cache", "mock_block_table")
    shapes: ClassVar[dict[str, str]] = {
        "mock_kv_cache": "[1 + B L, 2, G, P, D], in dequant_dtype",
        "mock_block_table": "[B, L], int32",
    }

    def refuse(self, inputs: Inputs, options: Options) -> None:
        one_scale(inputs, "k_scale", "v_scale")
        table = inputs["block_tables_prefill"]
        if bool((table >= len(inputs["kv_cache"])).any()) or not bool((table > 0).any()):
            raise OptionError(f"block_tables_prefill names pages up to {int(table.max())} of {len(inputs['kv_cache'])}")

    def before(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        table = inputs["block_tables_prefill"]
        return {
            "mock_kv_cache": fresh((1 + table.numel(), *inputs["kv_cache"].shape[1:]), options["dequant_dtype"]),
            "mock_block_table": torch.zeros(table.shape, dtype=torch.int32, device="cpu"),
        }

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        pages = inputs["block_tables_prefill"].flatten().long()
        at, half = torch.nonzero(pages > 0).flatten(), inputs["kv_cache"][0, 0].numel()
        raw = flat(inputs["kv_cache"]).reshape(len(inputs["kv_cache"]), 2 * half)[pages[at]]
        scales = torch.cat([decode(inputs[name]).expand(half) for name in ("k_scale", "v_scale")])
        target = rows((at + 1) * 2 * half, columns(2 * half))
        count = torch.arange(1, len(pages) + 1, dtype=torch.int32, device="cpu").reshape(1, -1)
        return [
            Products("mock_kv_cache", from_codes(raw, E4M3FN), scales.expand(len(at), -1), target),
            Copied("mock_block_table", count, columns(len(pages)).reshape(1, -1)),
        ]

    def unwritten(self, call: Call) -> dict[str, Tensor]:
        """Pages of no entry, and the first one."""
        used = torch.cat(
            [torch.zeros(1, dtype=torch.bool, device="cpu"), call.inputs["block_tables_prefill"].flatten() > 0]
        )
        memory = self.before(call.inputs, call.resolved)["mock_kv_cache"]
        return {"mock_kv_cache": ~used.reshape(-1, 1, 1, 1, 1).expand(memory.shape)}

    def why_mistrust(self, call: Call) -> str | None:
        return all_equal("k_scale and v_scale", [torch.cat([call.inputs["k_scale"], call.inputs["v_scale"]])])
