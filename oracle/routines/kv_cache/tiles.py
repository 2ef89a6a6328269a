"""Contracts of caches that keep the scales of their tiles beside the codes.

    fp8_ds_mla    a row of 656 bytes: 512 codes; at byte 512 four float32 scales, one for each tile of 128; at byte 528
                  64 rotated columns in 16 bits, copied
    index keys    a page of P * D codes, one row after the other, then P * D/128 float32 scales
    NVFP4         two codes a byte in one pair of caches, a byte of E4M3 for each 16 elements in another

Scales are those of :mod:`oracle.numbers.kv_recipes`. Sources: vLLM csrc/libtorch_stable/cache_kernels.cu @00eb0c8;
SGLang kernels/ops/quantization/dsa_quant_k_cache.py (0.5.23); FlashInfer include/flashinfer/page.cuh (0.6.18.post1).
Not covered: other ranks and tiles, vLLM's NVFP4 pages (sm100).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import DtypeError, ShapeError
from oracle.numbers import kv_recipes
from oracle.numbers.quantize import WIDE
from oracle.numbers.recipes import Recipe
from oracle.routines.base import E4M3, Inputs, Options, OptionSpec, TensorSpec, register
from oracle.routines.kv_cache.contract import CacheContract, Copied, Piece, Quantised, flat, fresh, one_scale, slots_of
from oracle.routines.kv_cache.writers import K_SCALE, LAYOUT, SLOTS, V_SCALE, of_slots, paged, rows, written

RANK, ROPE, TILE = 512, 64, 128
SCALES_AT, ROPE_AT, ROW = 512, 528, 656
"""Bytes of a row: where its scales and its rotated columns begin, and its length."""
HALF = WIDE[:2]


def columns(count: int) -> Tensor:
    """0, 1, ... ``count`` - 1."""
    return torch.arange(count, device="cpu")


class RowsOfTiles(CacheContract):
    """Rows of 656 bytes."""

    loses = True
    interval = False

    def row_pieces(self, name: str, nope: Tensor, rope: Tensor, slot: Tensor, recipes: tuple[Recipe, ...]
                   ) -> list[Piece]:  # fmt: skip
        """The pieces of values ``[T, 512]`` and ``[T, 64]`` in these slots of one output."""
        first = slot.to(torch.int64) * ROW
        scales, at_rope = rows(first, SCALES_AT + columns(16)), rows(first, ROPE_AT + columns(2 * ROPE))
        bits = flat(rope).view(torch.uint8).reshape(len(slot), 2 * ROPE)
        return [
            Quantised(name, nope, recipes, rows(first, columns(RANK)), name, scales),
            Copied(name, bits, at_rope),
        ]


@register
class ConcatAndCacheDsMla(RowsOfTiles):
    name = "concat_and_cache_ds_mla"
    summary = "rows of 656 bytes in pages: codes in tiles of 128, their scales, the rotated columns as they are"
    source = "vLLM csrc/libtorch_stable/cache_kernels.cu concat_and_cache_ds_mla_kernel (fp8_ds_mla)"
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("kv_c", HALF, ("N", str(RANK)), "compressed keys and values; tokens past T are padding"),
        TensorSpec("k_pe", HALF, ("N", str(ROPE)), "rotated columns of the key"),
        TensorSpec("kv_cache", (torch.uint8,), ("B", "P", str(ROW)), "pages before the call"), SLOTS,
    )  # fmt: skip
    options = (OptionSpec("ue8m0", False, (False, True), "scales rounded up to powers of two, at least 1e-4"),)
    returns = memory = ("kv_cache",)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if inputs["kv_c"].dtype != inputs["k_pe"].dtype:
            raise DtypeError(f"k_pe has dtype {inputs['k_pe'].dtype}, kv_c {inputs['kv_c'].dtype}; pass one dtype")
        blocks, page, _ = inputs["kv_cache"].shape
        slots_of(inputs["slot_mapping"], "slot_mapping", blocks * page, inputs["kv_c"].shape[0])

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        kept = written(inputs["slot_mapping"])
        recipe = kv_recipes.VLLM_DS_MLA_UE8M0 if options["ue8m0"] else kv_recipes.VLLM_DS_MLA
        kv_c, k_pe, slot = inputs["kv_c"][kept], inputs["k_pe"][kept], inputs["slot_mapping"][kept]
        return self.row_pieces("kv_cache", kv_c, k_pe, slot, (recipe,))


@register
class QuantizeKCache(RowsOfTiles):
    """A tile of zeros has the scale 0, under which any code stands for 0."""

    name = "quantize_k_cache"
    summary = "rows of 656 bytes of a whole cache: codes in tiles of 128, their scales, the rotated columns as they are"
    source = "SGLang kernels/ops/quantization/dsa_quant_k_cache.py quantize_k_cache"
    inputs = (TensorSpec("cache_k", (torch.bfloat16,), ("B", "P", "1", str(RANK + ROPE)), "pages of values"),)

    def before(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        return {"out": fresh((*inputs["cache_k"].shape[:3], ROW), torch.uint8)}

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        x = inputs["cache_k"].reshape(-1, RANK + ROPE)
        recipes = kv_recipes.TORCH_K_CACHE, kv_recipes.SGLANG_K_CACHE, kv_recipes.SGLANG_K_CACHE_POSITIVE
        return self.row_pieces("out", x[:, :RANK].contiguous(), x[:, RANK:], columns(len(x)), recipes)


def index_places(slot: Tensor, page: int, depth: int) -> tuple[Tensor, Tensor]:
    """Places of the codes ``[T, D]`` and of the bytes of their scales ``[T, 4 D/128]`` in pages of index keys."""
    block, offset = of_slots(slot, page)
    groups = depth // TILE
    start = block * (page * (depth + 4 * groups))
    scales = start + page * depth + offset * 4 * groups
    return rows(start + offset * depth, columns(depth)), rows(scales, columns(4 * groups))


@register
class IndexerKQuantAndCache(CacheContract):
    name = "indexer_k_quant_and_cache"
    summary = "index keys in groups of 128 into pages that hold codes, then scales"
    source = "vLLM csrc/libtorch_stable/cache_kernels.cu indexer_k_quant_and_cache_kernel"
    inputs = (
        TensorSpec("k", HALF, ("T", "D"), "index keys, one for each slot: the kernel takes the tokens of k"),
        TensorSpec("kv_cache", (torch.uint8,), ("B", "P", "C"), "pages before the call, C = D + 4 D/128"), SLOTS,
    )  # fmt: skip
    options = (
        OptionSpec("quant_block_size", TILE, (TILE,), "elements that share a scale"),
        OptionSpec("scale_fmt", "", ("", "ue8m0"), "scales rounded up to powers of two"),
    )
    loses = True
    interval = False
    returns = memory = ("kv_cache",)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        tokens, depth = inputs["k"].shape
        blocks, page, row = inputs["kv_cache"].shape
        if depth % TILE or row != depth + 4 * (depth // TILE):
            raise ShapeError(f"kv_cache has rows of {row} bytes; {depth} columns in groups of 128 need whole groups")
        slots_of(inputs["slot_mapping"], "slot_mapping", blocks * page, tokens)

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        kept = written(inputs["slot_mapping"])
        recipe = kv_recipes.VLLM_INDEXER_UE8M0 if options["scale_fmt"] else kv_recipes.VLLM_INDEXER
        at, scales = index_places(inputs["slot_mapping"][kept], inputs["kv_cache"].shape[1], inputs["k"].shape[1])
        return [Quantised("kv_cache", inputs["k"][kept], (recipe,), at, "kv_cache", scales)]


@register
class Nvfp4QuantizeAppendPagedKvCache(CacheContract):
    """``x ~= code * e4m3(byte) * scale``; the low nibble of a byte is the even column."""

    name = "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
    summary = "keys and values in NVFP4 into pages, the scales of 16 elements in pages of their own"
    source = "FlashInfer page.cuh NVFP4QuantizeAppendPagedKVCacheWithSlotMappingKernel"
    inputs = (
        TensorSpec("append_key", HALF, ("N", "H", "D"), "keys; tokens past T are padding"),
        TensorSpec("append_value", HALF, ("N", "H", "D"), "values"),
        *(TensorSpec(f"{x}_cache", (torch.uint8,), None, "pages of codes before the call, D/2 bytes") for x in "kv"),
        *(TensorSpec(f"{x}_scale_cache", E4M3, None, "pages of scales before the call, D/16") for x in "kv"),
        SLOTS, K_SCALE, V_SCALE,
    )  # fmt: skip
    options = (LAYOUT,)
    loses = True
    interval = False
    returns = memory = ("k_cache", "v_cache", "k_scale_cache", "v_scale_cache")

    def refuse(self, inputs: Inputs, options: Options) -> None:
        tokens, heads, depth = inputs["append_key"].shape
        shape = tuple(inputs["k_cache"].shape)
        if depth % 16 or len(shape) != 4:
            raise ShapeError(f"heads of {depth} columns are no blocks of 16, or k_cache {list(shape)} no pages")
        page = shape[1] if options["kv_layout"] == "NHD" else shape[2]
        lead = (shape[0], page, heads) if options["kv_layout"] == "NHD" else (shape[0], heads, page)
        for name in self.memory:
            due = (*lead, depth // (16 if "scale" in name else 2))
            if tuple(inputs[name].shape) != due:
                raise ShapeError(f"{name} has shape {list(inputs[name].shape)}; these pages have {list(due)}")
        one_scale(inputs, "k_scale", "v_scale")
        slots_of(inputs["slot_mapping"], "slot_mapping", shape[0] * page, tokens)

    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        kept, layout = written(inputs["slot_mapping"]), str(options["kv_layout"])
        slot, depth = inputs["slot_mapping"][kept], inputs["append_key"].shape[2]
        recipes = kv_recipes.TORCH_NVFP4_CACHE, kv_recipes.FLASHINFER_NVFP4_CACHE
        made: list[Piece] = []
        for name in ("key", "value"):
            codes, scales = f"{name[0]}_cache", f"{name[0]}_scale_cache"
            at, scale_at = (
                paged(slot, tuple(inputs[n].shape), layout).reshape(-1, inputs[n].shape[3]) for n in (codes, scales)
            )
            x, given = inputs[f"append_{name}"][kept].reshape(-1, depth), inputs[f"{name[0]}_scale"].reshape(1)
            made.append(Quantised(codes, x, recipes, at, scales, scale_at, given))
        return made
