"""Faults of the scales' layout in scaled products: memory read in another order, or for other columns and groups."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from oracle.routines.fault import Call, Change, Family, Fault, Stage, WhyNot
from oracle.routines.products.faults.memory import (
    align,
    column_major,
    look,
    places,
    row_major,
    swizzled,
    swizzled_index,
)
from oracle.routines.products.faults.scale_index import EQUAL, rows_of, scale_fault, several_blocks, several_rows
from oracle.routines.products.roles import (
    BLOCKS,
    CUTLASS,
    FLASHINFER,
    GROUPED,
    MASKED,
    PRODUCTS,
    ROLES,
    Matrix,
    matrix,
)
from oracle.tensorcore.schedules import Schedule
from oracle.truth.gemm import ScaledProduct

SQUARE = "one row or one block: both layouts are the same memory"
_FI_LAYOUT = "FlashInfer 0.6.18 on an H200, pytorch/ao 4209, TensorRT-LLM PR 3144"


# --- what a call must have ----------------------------------------------------------------------------------


def _matrix_scale(role: str) -> WhyNot:
    def why_not(call: Call) -> str | None:
        rows, blocks = matrix(call, role).shape
        return None if rows > 1 and blocks > 1 else f"{role} is {rows} x {blocks}: every layout is the same"

    return why_not


def _rows_not_multiple_of_4(call: Call) -> str | None:
    rows, blocks = matrix(call, "a_scale").shape
    if blocks == 1:
        return "one K block: the leading dimension is not used"
    return None if rows % 4 else f"M={rows} is a multiple of 4"


def _blocks_not_multiple_of_4(call: Call) -> str | None:
    rows, blocks = matrix(call, "a_scale").shape
    if rows == 1:
        return "one row: the row stride is not used"
    return None if blocks % 4 else f"{blocks} K blocks are a multiple of 4"


def _is_scalar(call: Call) -> str | None:
    product = call.parts[0].product
    if product.a_scale.shape != (1, 1):
        return "a_scale is no scalar"
    return None if product.M > 1 else "there is one row"


def _per_token_weight(call: Call) -> str | None:
    product = call.parts[0].product
    return None if product.b_rows == 1 and product.N > 1 else "weight_scale is per 128x128 block"


def _several_groups(call: Call) -> str | None:
    return None if call.inputs["b"].shape[0] > 1 else "there is one group"


def _ragged_groups(call: Call) -> str | None:
    if call.inputs["a"].shape[0] == 1:
        return "there is one group"
    m = call.inputs["a"].shape[1]
    return None if m % 4 else f"M={m} is a multiple of 4"


def _b_blocks(call: Call) -> str | None:
    product = call.parts[0].product
    rows = product.b_scale.shape[0]
    return None if rows > 1 and product.b_rows > 8 else "b_scale has no two blocks along N"


# --- layouts ------------------------------------------------------------------------------------------------


def _as_column_major(lead_unit: int) -> Matrix:
    def change(call: Call, scale: Tensor) -> Tensor:
        rows, columns = places(scale)
        return look(call, row_major(scale), columns * align(scale.shape[0], lead_unit) + rows)

    return change


def _padded_read_unpadded(call: Call, scale: Tensor) -> Tensor:
    rows, columns = places(scale)
    buffer = column_major(scale, lead=align(scale.shape[0], 4))
    return look(call, buffer, columns * scale.shape[0] + rows)


def _unpadded_read_padded(call: Call, scale: Tensor) -> Tensor:
    rows, columns = places(scale)
    return look(call, column_major(scale), columns * align(scale.shape[0], 4) + rows)


def _blocks_read_padded(call: Call, scale: Tensor) -> Tensor:
    rows, columns = places(scale)
    return look(call, row_major(scale), rows * align(scale.shape[1], 4) + columns)


def _unswizzled(call: Call, scale: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(scale, (0, align(scale.shape[1], 4) - scale.shape[1]))
    return look(call, padded.flatten(), swizzled_index(scale, tile_rows=128))


def _wrong_swizzle(call: Call, scale: Tensor) -> Tensor:
    return look(call, swizzled(scale, tile_rows=8), swizzled_index(scale, tile_rows=128))


def _batch_stride(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    scale = inputs["a_scale"]
    groups, m, blocks = scale.shape
    lead = align(m, 4)
    buffer = torch.stack([column_major(s, lead=lead) for s in scale]).flatten()
    rows, columns = places(scale[0])
    read_at = [look(call, buffer, g * m * blocks + columns * lead + rows) for g in range(groups)]
    return inputs | {"a_scale": torch.stack(read_at)}


# --- columns, tiles and groups ------------------------------------------------------------------------------


def _scalar_as_vector(call: Call, product: ScaledProduct) -> ScaledProduct:
    """The scalar is read with the row number: other memory, here the codes' neighbours, behind the first row."""
    junk = torch.linspace(0.5, 1.5, product.M, dtype=torch.float64, device="cpu").to(torch.float32).to(product.a.device)
    return replace(product, a_scale=torch.cat([product.a_scale, junk[1:, None] * product.a_scale]))


def _few_columns_of_next_block(call: Call, product: ScaledProduct) -> ScaledProduct:
    each = product.b_scale.repeat_interleave(product.b_rows, dim=0)[: product.N].clone()
    groups = product.b_scale.shape[0]
    for group in range(groups - 1):
        each[group * product.b_rows + product.b_rows - 8 : (group + 1) * product.b_rows] = product.b_scale[group + 1]
    return replace(product, b_scale=each, b_rows=1)


def _block_k64(call: Call, product: ScaledProduct) -> ScaledProduct:
    halves = -(-product.K // 64)
    column = torch.arange(halves, device=product.a.device).clamp(max=product.B - 1)
    return replace(product, block=64, a_scale=product.a_scale[:, column], b_scale=product.b_scale[:, column])


def _interval_64(call: Call, schedule: Schedule | None) -> Schedule | None:
    return schedule if schedule is None or schedule.interval is None else replace(schedule, interval=64)


def _per_token_as_block(call: Call, scale: Tensor) -> Tensor:
    return scale[torch.arange(scale.shape[0], device=scale.device) // 128]


def _next_group(role: str) -> Change:
    def change(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        name = ROLES[call.contract.name][role]
        return inputs | {name: torch.roll(inputs[name], -1, dims=0)}

    return change


def faults() -> list[Fault]:
    """The faults of layout, then those of columns, groups and shards."""
    return [
        scale_fault(
            "row-major A scale read as [K/128, align(M, 4)]",
            _FI_LAYOUT,
            "a_scale",
            _as_column_major(4),
            _matrix_scale("a_scale"),
            contracts=BLOCKS - {CUTLASS},
            equivalent=SQUARE,
        ),
        scale_fault(
            "row-major A scale read M-major",
            "vLLM 0.20.2 cutlass_scaled_mm on an H200",
            "a_scale",
            _as_column_major(4),
            _matrix_scale("a_scale"),
            contracts=frozenset({CUTLASS}),
            equivalent=SQUARE,
        ),
        scale_fault(
            "unpadded A scale read with leading dimension align(M, 4)",
            "FlashInfer 0.6.18 on an H200",
            "a_scale",
            _unpadded_read_padded,
            _rows_not_multiple_of_4,
        ),
        scale_fault(
            "A scale padded to align(M, 4) read with leading dimension M",
            "pytorch/ao 4209",
            "a_scale",
            _padded_read_unpadded,
            _rows_not_multiple_of_4,
        ),
        scale_fault(
            "A scale read with K blocks padded to 4",
            "TensorRT-LLM PR 3144",
            "a_scale",
            _blocks_read_padded,
            _blocks_not_multiple_of_4,
        ),
        scale_fault(
            "row-major B scale read N-major",
            _FI_LAYOUT,
            "b_scale",
            _as_column_major(1),
            _matrix_scale("b_scale"),
            equivalent=SQUARE,
        ),
        scale_fault(
            "A scale not swizzled into 128x4 tiles", "triton PR 10382", "a_scale", _unswizzled, _matrix_scale("a_scale")
        ),
        scale_fault(
            "A scale swizzled 8x4 read as 128x4", "flashinfer 3604", "a_scale", _wrong_swizzle, _matrix_scale("a_scale")
        ),
        scale_fault(
            "per-token weight scale indexed per 128x128 block",
            "FlashInfer 0.6.18 on an H200",
            "b_scale",
            _per_token_as_block,
            _per_token_weight,
            contracts=frozenset({FLASHINFER}),
        ),
        Fault(
            "B scale of the last columns of an N block from the next one",
            Family.SCALE_INDEX,
            "H200 mutants",
            {Stage.PRODUCT: _few_columns_of_next_block},
            BLOCKS,
            _b_blocks,
            EQUAL,
        ),
        Fault(
            "scale column advances once per BLOCK_K = 64",
            Family.SCALE_INDEX,
            "pytorch 195751",
            {Stage.PRODUCT: _block_k64, Stage.SCHEDULE: _interval_64},
            BLOCKS,
            several_blocks,
            EQUAL,
        ),
        Fault(
            "scalar A scale read as a vector",
            Family.SCALE_INDEX,
            "pytorch 159940",
            {Stage.PRODUCT: _scalar_as_vector},
            PRODUCTS - GROUPED,
            _is_scalar,
        ),
        Fault(
            "A scale of the next group",
            Family.SCALE_INDEX,
            "DeepGEMM PR 343",
            {Stage.READ: _next_group("a_scale")},
            frozenset({MASKED}),
            _several_groups,
            EQUAL,
        ),
        Fault(
            "B scale of the next group",
            Family.SCALE_INDEX,
            "DeepGEMM PR 343",
            {Stage.READ: _next_group("b_scale")},
            GROUPED,
            _several_groups,
            EQUAL,
        ),
        Fault(
            "batch stride of padded A scales wrong",
            Family.SCALE_INDEX,
            "flashinfer 3604",
            {Stage.READ: _batch_stride},
            frozenset({MASKED}),
            _ragged_groups,
            EQUAL,
        ),
        scale_fault(
            "shard scale row overwritten by the next shard",
            "Megatron-LM PR 6045, vllm 52997",
            "b_scale",
            rows_of(lambda r, n: torch.where(r < n // 2, r + n // 2, r)),
            several_rows("b_scale"),
            contracts=PRODUCTS,
        ),
        scale_fault(
            "gate and up scales swapped without the weights",
            "sglang PR 11081, PR 32430",
            "b_scale",
            rows_of(lambda r, n: torch.where(r + n // 2 < n // 2 * 2, (r + n // 2) % max(1, n // 2 * 2), r)),
            several_rows("b_scale"),
            contracts=PRODUCTS,
        ),
    ]
