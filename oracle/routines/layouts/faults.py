"""Faults of the preparation of weights and scales for a product: layouts, shards, conversions.

The right kernel of these contracts is their reference; a fault changes what it reads (READ) or what it writes (WRITE,
a dict of outputs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from oracle.routines.base import Inputs
from oracle.routines.fault import (
    CAST,
    INDEX,
    MOVEMENT,
    VALUE,
    Call,
    Change,
    Faults,
    always,
    both,
    entry,
    named,
    need,
    ones,
    way,
)
from oracle.routines.ideas import first_for_all, itself, nibbles_swapped, tiles_too_close
from oracle.routines.layouts import contract as layouts
from oracle.routines.layouts import groups, mega, mixed, shards
from oracle.routines.layouts.contract import OWNS_PADDING, PACKS, TILED
from oracle.routines.quantisers.contract import CeilToUe8m0, PerTensorDequantize
from oracle.routines.traits import Trait, of_class
from oracle.truth import layout, tiles
from oracle.verdict.sets import bits_of

# A fault is a row: what is wrong and where it was met; the change; when it shows.
FAULTS = Faults(of_class(layouts.LayoutContract))
MINE = "no public thread: "
fault = FAULTS.declare


def _given(name: str) -> Change:
    """The input of this name, unchanged."""
    return lambda call, out: call.inputs[name]


def _one_run(call: Call, w13: Tensor) -> Tensor:
    """Rows [0, 2I) copied as one run, the padding behind them."""
    weights = bits_of(call.inputs["w13"])
    out = torch.zeros_like(bits_of(w13))
    out[:, : weights.shape[1]] = weights
    return out.view(w13.dtype)


def _padding_stale(call: Call, w2: Tensor) -> Tensor:
    out = bits_of(w2).clone()
    inner = call.inputs["w2"].shape[2]
    out[:, :, inner:] = out[:, :, : out.shape[2] - inner]
    return out.view(w2.dtype)


def _inverse_rows(call: Call, out: Tensor) -> Tensor:
    """The permutation of the rows applied the other way round; it is derived from row numbers, six bits at a time."""
    weights, rows = bits_of(call.inputs["w"]), torch.arange(out.shape[0], device="cpu")
    numbers = rows[:, None].expand(out.shape).to(torch.int64)
    order = torch.zeros_like(rows)
    for shift in (0, 6, 12):
        digits = (numbers >> shift & 0x3F).to(torch.uint8).view(torch.float8_e4m3fn)
        moved = call.contract.reference({"w": digits}, **call.options)
        order |= bits_of(moved if isinstance(moved, Tensor) else moved["out"])[:, 0].to(torch.int64) << shift
    return weights[torch.argsort(order)].view(out.dtype)


def _truncated_scale(call: Call, out: Tensor) -> Tensor:
    bits = out.contiguous().view(torch.int32)
    down = call.inputs["x"].contiguous().view(torch.int32) & 0x7F80_0000
    return torch.where((bits & 0x7F80_0000) == 0x7F80_0000, bits, down).view(torch.float32)


def _word_order(out: Tensor) -> Tensor:
    bits = out.to(torch.int64) & 0xFFFF_FFFF
    turned = bits >> 24 | bits >> 8 & 0xFF00 | (bits & 0xFF00) << 8 | (bits & 0xFF) << 24
    signed = torch.where(turned >= 1 << 31, turned - (1 << 32), turned)
    wrong = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="cpu")
    wrong.copy_(signed.to(out.dtype))
    return wrong


def _plain_layout(call: Call, out: Tensor) -> Tensor:
    """The scales row-major, in a buffer of the swizzled size."""
    scale = bits_of(call.inputs["scale"]).flatten()
    buffer = torch.zeros(out.numel(), dtype=torch.uint8, device="cpu")
    buffer[: scale.numel()] = scale
    return buffer.view(out.dtype).reshape(out.shape)


def _stale_padding(call: Call, out: Tensor) -> Tensor:
    """NaN where the reference writes zeros into padding."""
    inputs = dict(call.inputs) | {"scale": torch.ones_like(bits_of(call.inputs["scale"]))}
    ones = call.contract.reference(inputs, **call.options)
    assert isinstance(ones, Tensor)
    return torch.where(ones == 0, 0xFF, bits_of(out)).to(torch.uint8).view(out.dtype)


def _one_tall_matrix(call: Call, out: Tensor) -> Tensor:
    """All rows in tiles of one matrix, in a buffer of the right size."""
    tile = str(call.resolved.get("tile", "128x4"))
    flat = layout.swizzle_scale(bits_of(call.inputs["scale"]).flatten(0, 1), tile=tile)
    buffer = torch.zeros(out.numel(), dtype=torch.uint8, device="cpu")
    buffer[: flat.numel()] = flat[: out.numel()]
    return buffer.view(out.dtype).reshape(out.shape)


def _too_close(call: Call, out: Tensor) -> Tensor:
    """Rows of tiles ``C // 4`` tiles apart, in a buffer of the right size."""
    scale, tile = bits_of(call.inputs["scale"]), str(call.resolved.get("tile", "128x4"))
    each = scale.reshape(-1, *scale.shape[-2:])
    result = [tiles_too_close(x, tile) for x in each]
    return torch.stack(result).view(out.dtype).reshape(out.shape)


def _unpadded_starts(call: Call, rows: int, columns: int, tile: str, number: int) -> Tensor:
    """Where the scales of each of ``number`` matrices lie, int64 ``[G, M, C]``, if a matrix takes its rows times the
    padded columns."""
    starts = torch.arange(number, device="cpu") * rows * layout.align(columns, layout.WIDTH)
    return starts[:, None, None] + layout.swizzle_offsets(rows, columns, tile=tile)


def _behind_rows(call: Call, out: Tensor) -> Tensor:
    """Each matrix of a batch behind the unpadded rows of the one before; a later one over it."""
    scale, tile = bits_of(call.inputs["scale"]), str(call.resolved.get("tile", "128x4"))
    number, rows, columns = scale.shape
    memory = torch.zeros(out.numel(), dtype=torch.uint8, device="cpu")
    for at, x in zip(_unpadded_starts(call, rows, columns, tile, number), scale, strict=True):
        memory[at] = x
    return memory.view(out.dtype).reshape(out.shape)


def _read_behind_rows(call: Call, out: Tensor) -> Tensor:
    memory, (number, rows, columns) = bits_of(call.inputs["memory"]).flatten(), out.shape
    at = _unpadded_starts(call, rows, columns, str(call.resolved["tile"]), number)
    return memory[at].contiguous().view(out.dtype)


def _columns_first(call: Call, out: Tensor) -> Tensor:
    """The rows and columns of every 8x4 tile exchanged."""
    tiles_of = bits_of(out).reshape(-1, layout.HEIGHTS["8x4"], layout.WIDTH)
    return tiles_of.transpose(1, 2).contiguous().view(out.dtype).reshape(out.shape)


def _tiles_as_rows(call: Call, out: Tensor) -> Tensor:
    memory = bits_of(call.inputs["memory"])
    wide = layout.align(out.shape[-1], layout.WIDTH)
    rows = memory.reshape(*memory.shape[:-1], -1, wide)
    return rows[..., : out.shape[-2], : out.shape[-1]].contiguous().view(out.dtype)


def _other_height(call: Call, out: Tensor) -> Tensor:
    tile = "8x4" if call.resolved["tile"] == "128x4" else "128x4"
    memory, (rows, columns) = bits_of(call.inputs["memory"]), out.shape[-2:]
    size = layout.align(rows, layout.HEIGHTS[tile]) * layout.align(columns, layout.WIDTH)
    padded = torch.nn.functional.pad(memory, (0, max(0, size - memory.shape[-1])))[..., :size].contiguous()
    return layout.unswizzle_scale(padded, rows, columns, tile=tile).view(out.dtype)


def _placed_as(placement: str) -> Change:
    """The tiles of experts where another placement has them."""

    def change(call: Call, out: Tensor) -> Tensor:
        return _experts_at(call, out, placement)

    return change


def _asks_for(placement: str) -> Callable[[Call], object]:
    return lambda call: call.resolved["placement"] == placement


def _experts_at(call: Call, out: Tensor, placement: str | None, *, early: int = 0) -> Tensor:
    """Each expert's rows in tiles from the row of a placement; None: right behind the last expert's rows. All but the
    first are read ``early`` rows too early."""
    scale, first, rows = bits_of(call.inputs["scale"]), call.inputs["first"].tolist(), call.inputs["rows"].tolist()
    width = layout.align(scale.shape[1], layout.WIDTH)
    height = out.numel() // width
    starts = [sum(rows[:i]) for i in range(len(rows))]
    if placement is not None:
        starts = tiles.expert_starts(first, rows, placement, call.resolved["capacity"])
    offsets = layout.swizzle_offsets(height, scale.shape[1], tile="128x4")
    memory = torch.zeros(out.numel(), dtype=torch.uint8, device="cpu")
    for at, p, m in zip(starts, first, rows, strict=True):
        p = max(0, p - early)
        memory[offsets[at : at + m]] = scale[p : p + m]
    return memory.view(out.dtype)


def _words_across(call: Call, out: Tensor) -> Tensor:
    """Four consecutive blocks in a word, whatever group they belong to."""
    blocks = call.inputs["scale"].view(torch.int32) >> 23
    padded = torch.nn.functional.pad(blocks, (0, 0, 0, 4 * out.shape[0] - blocks.shape[0]))
    four = padded[: 4 * out.shape[0]].view(out.shape[0], 4, -1)
    return four[:, 0] | four[:, 1] << 8 | four[:, 2] << 16 | four[:, 3] << 24


def _every_fourth(call: Call, out: Tensor) -> Tensor:
    """One scale of 32 elements repeated for four."""
    scale = call.inputs["scale"][..., ::4].repeat_interleave(4, dim=-1)[..., : call.inputs["scale"].shape[-1]]
    placed = call.contract.reference({"scale": scale.contiguous()}, **call.options)
    assert isinstance(placed, Tensor)
    return placed


def _swapped_units(rows: Tensor) -> Tensor:
    """Of each 16 rows of ``[G, R, K]`` the last eight first."""
    return rows.reshape(len(rows), -1, 2, mega.UNIT, rows.shape[2]).flip(2).flatten(1, 3)


def _by_warps(scale: Tensor) -> Tensor:
    return scale[:, mega.by_warps(scale.shape[1])]


gated = need(lambda call: call.resolved["is_act_and_mul"], "the weights are not gated")
ragged = need(lambda c: c.inputs["w2"].shape[2] % 16, lambda c: f"I={c.inputs['w2'].shape[2]} is aligned")
fault(
    "gated weights padded as one run (up half at the unpadded offset)",
    MOVEMENT,
    seen="vLLM 0.20.2",
    on=of_class(layouts.AlignMoeWeights),
    write=entry("w13", _one_run),
    needs=both(gated, ragged),
)
fault(
    "padded intermediate not neutral",
    MOVEMENT,
    seen="flashinfer 2907",
    on=of_class(layouts.AlignMoeWeights),
    write=entry("w2", _padding_stale),
    needs=need(lambda call: call.inputs["w2"].shape[2] % 16, "the intermediate is aligned"),
)

fault(
    "gate and up halves left in place",
    MOVEMENT,
    seen="sglang PR 11081",
    on=named({"swap_w13_to_w31"}),
    write=entry("out", _given("x")),
    same_if="both halves are equal",
)
ALIKE = "the rows that change places are alike"
BACK = "the order is its own inverse"
for what, verb, seen, routine, same in (
    (
        "rows of gated weights",
        "reordered",
        "sglang PR 32430",
        named({"reorder_rows_for_gated_act_gemm"}),
        "one row of each half",
    ),
    ("weight rows", "shuffled", "flashinfer 2907", of_class(layouts.ShuffleMatrixA), ""),
):
    fault(f"{what} not {verb}", MOVEMENT, seen=seen, on=routine, write=entry("out", _given("w")), same_if=same)
    fault(f"{what} {verb} backwards", MOVEMENT, seen=seen, on=routine, write=entry("out", _inverse_rows), same_if=BACK)
fault(
    "{}",
    MOVEMENT,
    on=of_class(layouts.ShuffleMatrixSfA),
    seen="flashinfer 2907",
    same_if=ALIKE,
    over=(
        way("rows of scales not shuffled", lambda call, out: layout.swizzle_scale(call.inputs["scale"])),
        way(
            "rows of scales shuffled backwards",
            lambda call, out: layout.swizzle_scale(
                call.inputs["scale"][layout.inverse_order(layout.row_order(call.inputs["scale"].shape[0]))]
            ),
        ),
    ),
    write=lambda change: entry("out", change),
)
fault(
    "rows of scales shuffled in blocks of 16",
    MOVEMENT,
    on=of_class(layouts.ShuffleMatrixSfA),
    same_if=ALIKE,
    seen="by construction: the block of an epilogue tile of 64",
    read=entry(
        "scale",
        lambda scale: scale[
            layout.inverse_order(layout.row_order(scale.shape[0]))[layout.row_order(scale.shape[0], epilogue_tile_m=64)]
        ],
    ),
)

GATED_ROWS = of_class(mega.MegaWeights)
fault(
    "{}",
    MOVEMENT,
    on=GATED_ROWS,
    seen="DeepGEMM mega_moe: transform_weights_for_mega_moe",
    same_if=ALIKE,
    over=(
        way("gate and up rows left in two halves", lambda call, out: call.inputs["l1"]),
        way(
            "gate and up rows in turn one by one",
            lambda call, out: (
                torch.stack(bits_of(call.inputs["l1"]).chunk(2, dim=1), dim=2).flatten(1, 2).view(out.dtype)
            ),
        ),
        way(
            "up rows before gate rows",
            lambda call, out: _swapped_units(bits_of(out)).view(out.dtype),
        ),
    ),
    write=lambda change: entry("l1", change),
)
fault(
    "{}",
    MOVEMENT,
    on=of_class(mega.TransformWeights),
    seen="DeepGEMM mega_moe: _transpose_sf_for_utccp",
    same_if=ALIKE,
    over=(
        way("scales of gate and up rows left in two halves", lambda call, out: _by_warps(call.inputs["l1_sf"])),
        way(
            "scales of the gate not placed for UTCCP",
            lambda call, out: call.inputs["l1_sf"][:, mega.in_turn(out.shape[1])],
        ),
        way(
            "scales placed for UTCCP the other way round",
            lambda call, out: call.inputs["l1_sf"][:, mega.in_turn(out.shape[1])][
                :, torch.argsort(mega.by_warps(out.shape[1]))
            ],
        ),
    ),
    write=lambda change: entry("l1_sf", change),
)
fault(
    "{}",
    MOVEMENT,
    on=of_class(mega.TransformWeights),
    seen="DeepGEMM mega_moe: _transpose_sf_for_utccp",
    same_if=ALIKE,
    over=(
        way("scales of the down projection not placed for UTCCP", _given("l2_sf")),
        way(
            "scales of the down projection in turn as those of gate and up",
            lambda call, out: _by_warps(call.inputs["l2_sf"][:, mega.in_turn(out.shape[1])]),
        ),
    ),
    write=lambda change: entry("l2_sf", change),
)
fault(
    "{}",
    MOVEMENT,
    on=of_class(mixed.InterleaveScales),
    seen="FlashInfer fused_moe/prepare.py: rows fold by slices, not one by one",
    same_if=ALIKE,
    over=(
        way("rows of scales folded one by one", lambda call, out: _refolded(call, out, (0, 1, 4, 2, 3, 5))),
        way("scales of a line by group, then by row", lambda call, out: _refolded(call, out, (0, 1, 4, 3, 5, 2))),
        way("scales left in rows", lambda call, out: call.inputs["scale"].reshape(out.shape)),
    ),
    write=lambda change: entry("out", change),
)
fault(
    "{}",
    MOVEMENT,
    on=of_class(mixed.FromMmaLayout),
    seen="FlashInfer cute_dsl/utils.py: the permutation back to storage",
    same_if=ALIKE,
    over=(
        way("six axes read in their order", lambda call, out: call.inputs["sf_6d"].reshape(out.shape)),
        way("tiles of K before tiles of M", lambda call, out: _stored(call, out, (5, 4, 2, 0, 1, 3))),
        way("rows of a tile by quarter", lambda call, out: _stored(call, out, (5, 2, 4, 1, 0, 3))),
    ),
    write=lambda change: entry("out", change),
)


HUMMING = of_class(mixed.HummingWeights)


def _as_kind(call: Call, out: Tensor) -> Tensor:
    """Codes interleaved as another kind."""
    kind = "int4" if call.resolved["quant_type"] != "int4" else "fp4_fp8"
    return mixed.interleaved(call.inputs["weight"], kind)


def _laid(call: Call, outputs: dict[str, Tensor], packed: Tensor) -> dict[str, Tensor]:
    """Outputs with these codes, which are interleaved where the call asks for it."""
    return outputs | {"out": mixed.interleaved(packed, "fp4_fp8") if call.resolved["interleave"] else packed}


def _prepared(call: Call, inputs: Inputs, **changed: object) -> dict[str, Tensor]:
    """What the routine makes of other inputs or options."""
    return cast(layouts.LayoutContract, call.contract).made(inputs, call.resolved | changed)


def _of_all(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Exponents within one range for all experts, as for the rows of one."""
    made = _prepared(call, {name: x.reshape(1, -1, x.shape[-1]) for name, x in call.inputs.items()})
    return {name: made[name].reshape(outputs[name].shape) for name in ("out", "out_scale")} | {
        "residual": made["residual"].expand(len(outputs["residual"])).contiguous()
    }


def _signed(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """-0 where the code was -0 and its exponent stays."""
    weight, kept = call.inputs["weight"], _prepared(call, call.inputs, interleave=False)["out"]
    low, high = weight & 15 == 8, weight >> 4 == 8
    return _laid(call, outputs, kept | low * 8 | high * 128)


fault(
    "{}",
    MOVEMENT,
    on=of_class(mixed.InterleaveWeights),
    seen="FlashInfer fused_moe/prepare.py: without preprocessing bytes are read from the wrong positions",
    same_if=ALIKE,
    over=(
        way("codes of 4 bits not interleaved", lambda call, out: call.inputs["weight"]),
        way("codes of 4 bits interleaved as those of another type", _as_kind),
        way("codes of 4 bits interleaved, of a byte exchanged",
            lambda call, out: mixed.interleaved(nibbles_swapped(call.inputs["weight"]),
                str(call.resolved["quant_type"]))),
        way("codes of 4 bits interleaved with the row below, not eight below",
            lambda call, out: mixed.interleaved(call.inputs["weight"].roll(1, 1), str(call.resolved["quant_type"]))),
    ),
    write=lambda change: entry("out", change),
)  # fmt: skip  # a table, one row a line
fault(
    "exponents of experts: {}",
    VALUE,
    on=HUMMING,
    same_if=ALIKE,
    over=(
        way("codes not divided where an exponent was raised",
            lambda call, out: _laid(call, out, call.inputs["weight"]), seen="Humming process_mxfp4.cuh"),
        way("a range of one less",
            lambda call, out: _prepared(call, call.inputs, max_range=max(0, call.resolved["max_range"] - 1)),
            seen="FlashInfer prepare.py: max_range"),
        way("counted from 0", entry("out_scale", lambda scale: scale - 1),
            seen="FlashInfer prepare.py: + 1 & 0x0F"),
        way("residual of twice the size", entry("residual", lambda residual: residual * 2),
            seen="FlashInfer prepare.py: * 0.5"),
        way("residual of the first expert for all", entry("residual", first_for_all()),
            seen=MINE + "experts are apart"),
        way("one range for all experts", _of_all, seen=MINE + "experts are apart"),
        way("signs of codes of zero kept", _signed, seen="FlashInfer prepare.py: code == 8"),
    ),
    write=itself,
)  # fmt: skip  # a table, one row a line


def _stored(call: Call, out: Tensor, axes: tuple[int, ...]) -> Tensor:
    return call.inputs["sf_6d"].permute(axes).reshape(out.shape)


def _refolded(call: Call, out: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Scales by block of rows, row of a slice, slice, block of columns, scale, as these axes."""
    scale = call.inputs["scale"]
    side, folded = mixed.COLUMNS // call.resolved["group_size"], out.shape[3]
    split = scale.reshape(len(scale), out.shape[1], folded, -1, out.shape[2], side)
    if axes[3:] == (3, 5, 2):
        split = scale.reshape(len(scale), out.shape[1], -1, folded, out.shape[2], side)
    return split.permute(axes).reshape(out.shape)


fault(
    "exponents read from words in reverse byte order",
    INDEX,
    on=of_class(mega.UnpackUe8m0),
    seen="TransformerEngine PR 2589",
    write=entry("out", lambda call, out: out.reshape(len(out), -1, 4).flip(2).flatten(1)),
    same_if="every word reads the same in both orders",
)
fault(
    "packed exponents in reverse byte order",
    INDEX,
    seen="TransformerEngine PR 2589",
    on=PACKS,
    write=entry("out", _word_order),
    needs=need(lambda call: call.truth["out"].dtype is torch.int32, "the scales are not packed"),
    same_if="every word reads the same in both orders",
)
fault(
    "128x4 swizzle omitted in the layout",
    INDEX,
    seen="triton PR 10382",
    on=TILED,
    write=entry("out", _plain_layout),
    same_if="both layouts are the same memory",
)
fault(
    "padding of tiles not cleared",
    MOVEMENT,
    seen="flashinfer PR 3650, TransformerEngine PR 3070",
    on=OWNS_PADDING,
    write=entry("out", _stale_padding),
    same_if="no tile has padding",
)
fault(
    "batch of scales swizzled as one tall matrix",
    INDEX,
    seen="flashinfer 3604",
    on=TILED & Trait("takes a batch of matrices", lambda c: c.inputs[0].dims is None),
    write=entry("out", _one_tall_matrix),
    needs=need(lambda c: c.inputs["scale"].dim() == 3, "one matrix"),
    same_if="M is a multiple of the tile's height",
)
stacked = need(lambda c: c.inputs["scale"].dim() == 3, "one matrix")
fault(
    "{}",
    INDEX,
    on=TILED,
    over=(
        way(
            "rows of tiles C // 4 tiles apart",
            _too_close,
            seen="no public thread: C // 4 for ceil(C / 4)",
            needs=need(
                lambda c: (
                    c.inputs["scale"].shape[-1] % layout.WIDTH
                    and c.inputs["scale"].shape[-1] > layout.WIDTH
                    and c.inputs["scale"].shape[-2] > layout.HEIGHTS[str(c.resolved.get("tile", "128x4"))]
                ),
                "the columns are whole tiles, or there is one tile down or across",
            ),
            same_if="what lies twice is equal",
        ),
        way(
            "matrices of a batch begin behind unpadded rows",
            _behind_rows,
            seen="flashinfer 3604",
            needs=stacked,
            same_if="M is a multiple of the tile's height",
        ),
        way(
            "8x4 tiles written column by column",
            _columns_first,
            seen="no public thread: the row of the tile taken for its fast index",
            needs=need(lambda c: c.resolved.get("tile") == "8x4", "the tiles are 128x4"),
            on=of_class(layouts.SwizzleScale),
            same_if="every tile is symmetric",
        ),
    ),
    write=lambda change: entry("out", change),
)
fault(
    "matrices of a batch read behind unpadded rows",
    INDEX,
    on=of_class(layouts.FromBlocked),
    seen="flashinfer 3604",
    write=entry("out", _read_behind_rows),
    needs=need(lambda c: c.inputs["memory"].dim() == 2, "one matrix"),
    same_if="the rows are a multiple of the tile's height",
)
fault(
    "{}",
    INDEX,
    on=of_class(layouts.FromBlocked),
    same_if="both layouts are the same memory",
    over=(
        way("tiles of scales read as rows", _tiles_as_rows, seen="triton PR 10382"),
        way(
            "tiles of scales read with the other tile's height", _other_height, seen="triton PR 10382, flashinfer 3604"
        ),
    ),
    write=lambda change: entry("out", change),
)

for _wrong, _of in (("tight", "flashinfer"), ("flashinfer", "tight")):
    fault(
        f"experts' tiles placed as {_wrong} where {_of} is meant",
        INDEX,
        seen="by construction: FlashInfer's placement is not torchao's",
        on=of_class(layouts.SwizzleScaleExperts),
        write=entry("out", _placed_as(_wrong)),
        needs=need(_asks_for(_of), "the call asks for another placement"),
        same_if="every expert starts at the same tile in both",
    )
fault(
    "experts' tiles start at their first row, not padded",
    INDEX,
    seen="flashinfer 3547",
    on=of_class(layouts.SwizzleScaleExperts),
    write=entry("out", lambda call, out: _experts_at(call, out, None)),
    same_if="every expert but the last has a multiple of 128 rows",
)
fault(
    "tiles of an expert filled from the row before it",
    INDEX,
    seen="flashinfer 3547",
    on=of_class(layouts.SwizzleScaleExperts),
    write=entry("out", lambda call, out: _experts_at(call, out, str(call.resolved["placement"]), early=1)),
    needs=need(lambda c: len(c.inputs["first"]) > 1, "one expert"),
    same_if="no expert but the first has rows",
)

fault(
    "columns of groups swizzled as one matrix",
    INDEX,
    seen="flashinfer 3604",
    on=of_class(layouts.ToBlockedKGroups),
    read=entry("ends", lambda ends: torch.full_like(ends, int(ends[-1]))),
    needs=need(lambda c: len(c.inputs["ends"]) > 1, "one group"),
    same_if="one group has all columns",
)
fault(
    "packed words cross the border of K groups",
    INDEX,
    seen="by construction: DeepGEMM ends a group's words",
    on=of_class(layouts.KGroupedPackedUe8m0),
    write=entry("out", _words_across),
    same_if="every group but the last fills its words",
)
fault(
    "packed exponents of K groups in reverse byte order",
    INDEX,
    seen="TransformerEngine PR 2589",
    on=of_class(layouts.KGroupedPackedUe8m0),
    write=entry("out", _word_order),
    same_if="every word reads the same in both orders",
)

fault(
    "scales of 32 elements taken for scales of 128",
    INDEX,
    seen="by construction: DeepGEMM has both recipes",
    on=of_class(layouts.RequiredLayout),
    write=entry("out", _every_fourth),
    needs=need(lambda c: c.resolved["gran_k"] == 32, "scales of 128"),
    same_if="four neighbouring scales are equal",
)
fault(
    "shard scale overwritten by the next shard's",
    INDEX,
    seen="Megatron-LM PR 6045, vllm 52997",
    on=of_class(shards.ConvertToChannelwise),
    read=entry("weight_scale", lambda scale: torch.cat([scale[1:], scale[-1:]])),
    needs=need(lambda call: call.inputs["weight_scale"].numel() > 1, "one shard"),
)
fault(
    "shards given the largest scale without requantising",
    VALUE,
    seen="vllm PR 41021",
    on=of_class(shards.RequantizeWithMaxScale),
    write=entry("weight", _given("weight")),
    needs=need(lambda c: bool((c.inputs["weight_scale"] != c.inputs["weight_scale"].flatten()[0]).any()), "one scale"),
    same_if="every shard has the largest scale",
)
fault(
    "unloaded sentinel taken for a scale",
    VALUE,
    seen="vllm-omni 5263",
    on=of_class(shards.RequantizeWithMaxScale),
    write=entry("max_scale", lambda scale: torch.full_like(scale, -448.0)),
)

fault(
    "{}",
    CAST,
    on=of_class(shards.NormalizeFnuz),
    seen="vllm PR 12134",
    over=(
        way("scale not doubled for E4M3FNUZ", write=entry("weight_scale", _given("weight_scale"))),
        way(
            "code 0x80 left in E4M3FNUZ weights",
            write=entry("weight", lambda call, out: call.inputs["weight"].view(torch.uint8).view(out.dtype)),
            needs=need(lambda call: bool((call.inputs["weight"].view(torch.uint8) == 0x80).any()), "no code is 0x80"),
        ),
    ),
)

fault(
    "dequantised with the inverse scale",
    VALUE,
    seen="vllm PR 36297",
    on=of_class(PerTensorDequantize),
    read=entry("inv_scale", lambda scale: torch.ones_like(scale) / scale),
    same_if="the scale is 1",
)
fault(
    "scale rounded down to UE8M0",
    VALUE,
    seen="vllm PR 22399",
    on=of_class(CeilToUe8m0),
    write=entry("out", _truncated_scale),
    same_if="every value is a power of two",
)
for name, registers, scale in (
    ("weight scale dropped from the first alpha", shards.AlphaScales, "w13_scale"),
    ("intermediate's scale not divided out", shards.RegisterScales, "w2_input_scale"),
):
    fault(name, VALUE, seen="TensorRT-LLM PR 14199", on=of_class(registers), read=entry(scale, ones))
fault(
    "global scale of NVFP4: {}",
    VALUE,
    on=of_class(shards.NvFp4GlobalScale),
    over=(
        way("that dequantises", lambda call, scale: scale.reciprocal(), seen=MINE + "encode scale and decode scale"),
        way("of the largest value, not magnitude", lambda call, scale: _scale_of(call, call.inputs["x"].amax()),
            seen=MINE + "max for absmax"),
        way("of the first row", lambda call, scale: _scale_of(call, call.inputs["x"][:1].abs().amax()),
            seen=MINE + "a reduction over one block"),
        way("without the 6 of E2M1", lambda call, scale: scale / 6, seen=MINE + "448 alone"),
        way("of the other largest scale of a block", lambda call, scale: scale * (256 / 448 if
            call.resolved["e4m3_max"] == 448 else 448 / 256), seen="FlashInfer NVFP44Over6Config.e4m3_max"),
    ),
    write=lambda change: entry("out", change),
    same_if="the scale is the same",
)  # fmt: skip  # a table, one row a line


def _scale_of(call: Call, largest: Tensor) -> Tensor:
    due: Tensor = call.resolved["e4m3_max"] * 6.0 / largest.to(torch.float32)
    return due.reshape(1)


# --- rows padded by groups --------------------------------------------------------------------------------------------

FUSED = "torchao fused_pad_token_groups.cu @36027d8"


def _spans(call: Call) -> list[tuple[int, int]]:
    return groups.groups_of(call.inputs["group_end_offsets"])


def _put(call: Call, out: Tensor, starts: list[int], alone: bool = True) -> Tensor:
    """The rows of each group from these starts; rows beyond the end are dropped. ``alone``: others are zero."""
    wrong = torch.zeros_like(out) if alone else out.clone()
    for (begin, end), start in zip(_spans(call), starts, strict=False):
        rows = call.inputs["x"][begin:end][: max(0, len(out) - start)]
        wrong[start : start + len(rows)] = rows
    return wrong


def _starts(call: Call) -> list[int]:
    return groups.padded_starts(call.inputs["group_end_offsets"], int(str(call.resolved["alignment_size"])))


def _as_of_another(alignment: int) -> Change:
    """Groups at multiples of another alignment; starts and ends are published for the right one."""
    return lambda call, out: _put(call, out, groups.padded_starts(call.inputs["group_end_offsets"], alignment))


def _whole_tiles(call: Call, out: Tensor) -> Tensor:
    """A group without rows takes a tile."""
    starts, size = [0], int(str(call.resolved["alignment_size"]))
    for begin, end in _spans(call):
        starts.append(starts[-1] + layout.align(max(1, end - begin), size))
    return _put(call, out, starts)


def _nan_between(call: Call, out: Tensor) -> Tensor:
    return _put(call, torch.full_like(out, torch.nan), _starts(call), alone=False)


def _last_rows_lost(call: Call, out: Tensor) -> Tensor:
    wrong = out.clone()
    for (begin, end), start in zip(_spans(call), _starts(call), strict=False):
        wrong[start + max(0, end - begin - 1) : start + end - begin] = 0
    return wrong


def _unassigned_rows(call: Call, out: Tensor) -> Tensor:
    """Rows of no group, which must be dropped, copied behind the last group."""
    wrong, (begin, end), start = out.clone(), _spans(call)[-1], _starts(call)[len(_spans(call)) - 1]
    rest = call.inputs["x"][end:][: max(0, len(out) - start - (end - begin))]
    wrong[start + end - begin :][: len(rest)] = rest
    return wrong


def _into_the_group_before(call: Call, out: Tensor) -> Tensor:
    """The first row of every group but the first stands behind the rows of the one before it."""
    wrong, spans, starts = out.clone(), _spans(call), _starts(call)
    for g in range(1, len(spans)):
        (before, last), (begin, end) = spans[g - 1], spans[g]
        if end > begin:
            wrong[starts[g]] = 0
            wrong[starts[g - 1] + last - before] = call.inputs["x"][begin]
    return wrong


def _of_two_bytes(x: Tensor, pairs: list[tuple[int, int, int]], out: Tensor) -> Tensor:
    """Rows (first, count, place) of float32 moved as rows of so many bfloat16."""
    columns, words = x.shape[1], x.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).flatten()
    wrong = torch.zeros_like(out).view(torch.bfloat16).flatten()
    for first, count, place in pairs:
        wrong[place * columns : (place + count) * columns] = words[first * columns : (first + count) * columns]
    return wrong.view(torch.float32).view(out.shape)


def _padded_as_halves(call: Call, out: Tensor) -> Tensor:
    pairs = [(b, e - b, start) for (b, e), start in zip(_spans(call), _starts(call), strict=False)]
    return _of_two_bytes(call.inputs["x"], pairs, out)


def _starts_given(call: Call) -> Tensor:
    return call.inputs["padded_group_start_offsets"]


def _unpadded_as_halves(call: Call, out: Tensor) -> Tensor:
    pairs = [(start, e - b, b) for (b, e), start in zip(_spans(call), _starts_given(call).tolist(), strict=True)]
    return _of_two_bytes(call.inputs["padded"], pairs, out)


def _is_float32(name: str) -> Callable[[Call], bool]:
    return lambda call: call.inputs[name].dtype is torch.float32


APART = "every group but the last is a multiple of both alignments"
many = need(lambda call: len(call.inputs["group_end_offsets"]) > 1, "one group")
for name, kind, change, when, seen, same in (
    (
        "groups of rows padded to 8 rows",
        INDEX,
        _as_of_another(8),
        many,
        "by construction: an alignment of another format",
        APART,
    ),
    (
        "groups of rows not padded",
        INDEX,
        _as_of_another(1),
        many,
        "torchao pad_token_groups_for_grouped_mm=False",
        APART,
    ),
    (
        "a group without rows takes a tile",
        INDEX,
        _whole_tiles,
        many,
        "by construction: max(1, rows)",
        "no group but the last is empty",
    ),
    ("padding between groups of rows not cleared", MOVEMENT, _nan_between, always, "flashinfer PR 3650", ""),
    ("last row of a padded group lost", MOVEMENT, _last_rows_lost, always, "flashinfer 2861", ""),
    (
        "rows of no group copied behind the last group",
        MOVEMENT,
        _unassigned_rows,
        need(lambda c: int(c.inputs["group_end_offsets"][-1]) < c.inputs["x"].shape[0], "every row has a group"),
        FUSED,
        "",
    ),
    (
        "first row of a group behind the rows of the group before",
        MOVEMENT,
        _into_the_group_before,
        many,
        "DeepGEMM 37: an expert's border inside a tile",
        "no group but the first has rows",
    ),
    (
        "float32 rows padded as rows of bfloat16",
        CAST,
        _padded_as_halves,
        need(_is_float32("x"), "the rows are not float32"),
        FUSED,
        "",
    ),
):
    fault(
        name, kind, seen=seen, on=of_class(groups.PadTokenGroups), write=entry("out", change), same_if=same, needs=when
    )
fault(
    "ends of padded groups without their padding",
    INDEX,
    seen="by construction: the ends of the rows",
    on=of_class(groups.PadTokenGroups),
    same_if="every group is a multiple of the alignment",
    write=entry(
        "ends",
        lambda call, ends: torch.tensor(
            [start + e - b for (b, e), start in zip(_spans(call), _starts(call), strict=False)],
            dtype=ends.dtype,
            device="cpu",
        ),
    ),
)
fault(
    "starts of padded groups are their ends",
    INDEX,
    seen="by construction: an inclusive sum",
    on=of_class(groups.PadTokenGroups),
    write=entry("starts", lambda call, starts: torch.tensor(_starts(call)[1:], dtype=starts.dtype, device="cpu")),
)

fault(
    "padding read for rows of a group",
    MOVEMENT,
    seen="flashinfer PR 3650",
    on=of_class(groups.UnpadTokenGroups),
    needs=many,
    write=entry("out", lambda call, out: call.inputs["padded"][: len(out)].clone()),
    same_if="no padding lies between the groups",
)


def _next_within(call: Call) -> bool:
    rows = len(call.inputs["padded"])
    return all(start + e - b <= rows for (b, e), start in zip(_spans(call), _starts_given(call).roll(-1), strict=True))


fault(
    "rows of a group from the start of the next",
    INDEX,
    seen="sglang PR 28418",
    on=of_class(groups.UnpadTokenGroups),
    needs=both(many, need(_next_within, "rows of a group from the start of the next end behind the memory")),
    read=entry("padded_group_start_offsets", lambda starts: starts.roll(-1)),
    same_if="one group has all rows",
)
fault(
    "float32 rows unpadded as rows of bfloat16",
    CAST,
    seen=FUSED,
    on=of_class(groups.UnpadTokenGroups),
    write=entry("out", _unpadded_as_halves),
    needs=need(_is_float32("padded"), "the rows are not float32"),
)

fault(
    "{}",
    INDEX,
    on=of_class(groups.RemapTopkToLocal),
    over=(
        way(
            "absent experts read from the end of the map",
            lambda ids, known: known[ids],
            seen="no public thread: a map indexed with -1",
            same_if="no id is -1, or the last expert is of another rank",
        ),
        way("experts of other ranks kept by their global number", lambda ids, known: ids, seen="flashinfer 3547"),
        way(
            "experts of other ranks taken for the first one",
            lambda ids, known: torch.where(ids >= 0, known[ids.clamp(min=0)].clamp(min=0), -1),
            seen="vllm 42118",
            same_if="every expert is of this rank",
        ),
        way(
            "map of experts off by one",
            lambda ids, known: torch.where(ids >= 0, known.roll(1)[ids.clamp(min=0)], -1),
            seen="flashinfer 3547",
        ),
    ),
    write=lambda change: entry(
        "out",
        lambda call, out: change(call.inputs["topk_ids"].long(), call.inputs["expert_map"].long()).to(out.dtype),
    ),
)
