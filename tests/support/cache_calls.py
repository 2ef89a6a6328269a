"""Small operands of every verb of :mod:`kernels.kv_cache`, in the order of its arguments; some are written into."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.support import ROW

FP8 = torch.float8_e4m3fn
PAGES, PAGE, HEADS, DEPTH, TOKENS = 3, 4, 2, 16, 5


def operands(device: str = "cpu") -> dict[str, tuple[object, ...]]:
    """Five tokens, one of them without a slot; two requests of 5 and 2 rows."""

    def wide(*shape: int, seed: int = 0) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16).to(device)

    def codes(*shape: int) -> Tensor:
        return wide(*shape, seed=1).to(FP8)

    def integers(*values: object, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def rows(*lead: int) -> Tensor:
        memory = torch.full((*lead, ROW), 0x38, dtype=torch.uint8, device=device)
        memory[..., 512:528] = torch.ones(4, device=device).view(torch.uint8)
        return memory

    slots = integers(3, -1, 0, 11, 6, dtype=torch.int64)
    key, value, scale, other = (
        wide(TOKENS, HEADS, DEPTH),
        wide(TOKENS, HEADS, DEPTH, seed=2),
        *(torch.full((1,), s, device=device) for s in (0.75, 0.5)),
    )
    pages = (PAGES, PAGE, HEADS, DEPTH)
    tables = integers(0, 0, 0, 1, 1), integers(1, 4, 0, 0, 1)
    held = integers(2, 0, 1), integers(0, 2, 3), integers(2, 3)
    table, ends = integers([0, 2], [1, 0]), integers(0, 5, 7)
    index = torch.zeros(PAGES, PAGE, 132, dtype=torch.uint8, device=device)
    packed = torch.zeros(PAGES, PAGE, HEADS, DEPTH // 2, dtype=torch.uint8, device=device)
    return {
        "reshape_and_cache_flash": (key, value, codes(*pages), codes(*pages), slots, scale, other, "NHD"),
        "reshape_and_cache": (
            key,
            value,
            codes(PAGES, HEADS, 1, PAGE, 16),
            codes(PAGES, HEADS, DEPTH, PAGE),
            slots,
            scale,
            other,
        ),
        "concat_and_cache_mla": (wide(TOKENS, 32), wide(TOKENS, 16), codes(PAGES, PAGE, 48), slots, scale),
        "set_mla_kv_buffer": (
            codes(PAGES * PAGE, 1, 48),
            slots.clamp(min=0),
            wide(TOKENS, 1, 32),
            wide(TOKENS, 1, 16),
            0,
        ),
        "convert_fp8": (key, 0.75, FP8),
        "append_paged_kv_cache": (
            codes(TOKENS, HEADS, DEPTH),
            codes(TOKENS, HEADS, DEPTH),
            *tables,
            codes(*pages),
            codes(*pages),
            *held,
            "NHD",
        ),
        "append_paged_mla_kv_cache": (
            codes(TOKENS, 32),
            codes(TOKENS, 16),
            *tables,
            codes(PAGES, PAGE, 32),
            codes(PAGES, PAGE, 16),
            *held,
        ),
        "concat_and_cache_ds_mla": (wide(TOKENS, 512), wide(TOKENS, 64), rows(PAGES, PAGE), slots, False),
        "quantize_k_cache": (wide(2, 2, 1, 576),),
        "indexer_k_quant_and_cache": (wide(TOKENS, 128), index, slots, 128, "ue8m0"),
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": (
            key,
            value,
            packed,
            packed.clone(),
            codes(*pages[:3], 1),
            codes(*pages[:3], 1),
            slots,
            scale,
            other,
            "NHD",
        ),
        "gather_and_maybe_dequant_cache": (codes(PAGES, PAGE, 48), wide(8, 48), table, ends, scale, None),
        "cp_gather_cache": (codes(PAGES, PAGE, 48), codes(8, 48), table, ends, None),
        "cp_gather_and_upconvert_fp8_kv_cache": (
            rows(PAGES, PAGE),
            wide(8, 576),
            table,
            integers(5, 2),
            integers(0, 5),
        ),
        "dequantize_k_cache": (rows(2, 2, 1),),
        "cp_gather_indexer_k_quant_cache": (index.clone(), index.new_zeros(8, 128), index.new_zeros(8, 4), table, ends),
    }
