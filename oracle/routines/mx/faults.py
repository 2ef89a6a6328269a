"""Faults of MX and NVFP4: the rounding of a shared scale, a second scale, casts to four bits, packing, tiles, padding.

A quantiser has the stages READ, RECIPE, AMAX, QUOTIENT, CODES, SCALE and WRITE (its bytes); a dequantiser READ and
WRITE.
Steps within an ulp of an approximate reciprocal are admissible; those here are not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.numbers.formats import E4M3FN, decode
from oracle.numbers.mx_recipes import MODES
from oracle.numbers.recipes import PowerOfTwo
from oracle.numbers.rounding import Overflow, Rounding, f32, power_of_two, round_to
from oracle.numbers.scaling import grid
from oracle.routines.fault import CAST, INDEX, MOVEMENT, VALUE, Call, Change, Faults, WhyNot, both, entry, need, way
from oracle.routines.fault import ones as ones_of
from oracle.routines.fused.kernels import NORMALISES
from oracle.routines.ideas import (
    CUTLASS,
    TIRX,
    bf16_of,
    cast_by,
    fields,
    inverted,
    itself,
    nibbles_swapped,
    of_quotient,
    pairs_swapped,
    rolled,
    tiles_too_close,
    without_subnormals,
)
from oracle.routines.mx.contract import (
    FP8_CODES,
    LINEAR,
    STACKED,
    BlockDequantiser,
    BlockQuantiser,
    loaded,
    padding_of,
    stored,
)
from oracle.routines.mx.experts import ExpertQuantiser
from oracle.routines.quantisers.contract import Amax, Values, prepared
from oracle.routines.quantisers.faults import has_nan, has_negative, signed_amax
from oracle.routines.traits import Trait, of_class, takes
from oracle.truth.layout import HEIGHTS
from oracle.verdict.sets import rounded_to

QUANTISERS, EXPERTS, BACK = of_class(BlockQuantiser), of_class(ExpertQuantiser), of_class(BlockDequantiser)
PLAIN = QUANTISERS - EXPERTS - STACKED
"""Quantisers of one matrix, whose scale bytes are one tiled matrix."""
E8M0 = Trait("has E8M0 scales", lambda contract: getattr(contract, "scale_dtype", None) is torch.float8_e8m0fnu)
PACKED = Trait("packs two codes in a byte", lambda contract: getattr(contract, "packed", False))
OWN_PADDING = Trait("writes the padding of its scales", lambda contract: getattr(contract, "owns_padding", False))
MODED, STOCHASTIC = QUANTISERS & takes("rounding") - NORMALISES, QUANTISERS & takes("seed")
POWERS, TWO_LEVELS, ROUNDED = QUANTISERS & E8M0, QUANTISERS - E8M0, QUANTISERS - STOCHASTIC
# A fault is a row: what is wrong and where it was met; the change; when it shows.
FAULTS = Faults(QUANTISERS)
fault = FAULTS.declare
MINE = "no public thread: "
SEVERAL = "neighbours have equal amax"


def _shape(call: Call) -> tuple[int, int]:
    """Rows and columns of the scale bytes of a call."""
    contract = call.contract
    if isinstance(contract, BlockDequantiser):
        return contract.shape_of_scales(call.inputs)
    assert isinstance(contract, BlockQuantiser)
    return contract.shape_of_scales(call)


def _storage_of(call: Call) -> tuple[tuple[int, int], str]:
    """Rows and columns of the scale bytes in storage order, and their layout."""
    contract = call.contract
    if isinstance(contract, BlockDequantiser):
        return contract.lying(call.inputs, call.resolved)
    assert isinstance(contract, BlockQuantiser)
    return contract.lying(call)


def _layout(call: Call) -> str:
    return _storage_of(call)[1]


several_across = need(lambda call: _shape(call)[1] > 1, "one block across")
several_down = need(lambda call: _shape(call)[0] > 1, "one row")
in_tiles = need(lambda call: _layout(call) != LINEAR, "the scales are not in tiles")
packed = need(lambda call: getattr(call.contract, "packed", False), "codes are not packed")
padded = need(
    lambda call: (pads := padding_of(*_storage_of(call))) is not None and bool(pads.any()), "the scales need no padding"
)


# --- amax -----------------------------------------------------------------------------------------------------------


def _scan(part: Callable[[Tensor], Tensor]) -> Callable[[Amax], Tensor]:
    """The amax of a part of the blocks ``[down, r, across, c]``, whose elements follow in the last axis."""

    def change(amax: Amax) -> Tensor:
        blocks = amax.blocks.transpose(1, 3) if amax.blocks.shape[3] == 1 else amax.blocks
        return part(blocks).nan_to_num(nan=0.0).abs().amax(dim=(1, 3), keepdim=True)

    return change


def _pairs(amax: Amax) -> Tensor:
    """The larger amax of blocks 2j and 2j + 1."""
    right, count = amax.right, amax.right.shape[2]
    beside = torch.arange(count, device=right.device) ^ 1
    return torch.maximum(right, right[:, :, beside.clamp(max=count - 1)])


fault(
    "amax {}",
    INDEX,
    same_if=SEVERAL,
    over=(
        way(
            "of the previous block of the row", amax=lambda amax: amax.right.roll(1, 2), seen=TIRX, needs=several_across
        ),
        way(
            "of the block in the previous row",
            amax=lambda amax: amax.right.roll(1, 0),
            seen=CUTLASS,
            needs=several_down,
        ),
        way("over two blocks", amax=_pairs, seen="NVIDIA/cutlass 2154", needs=several_across),
        way(
            "over the first half of a block",
            amax=_scan(lambda blocks: blocks[..., : blocks.shape[3] // 2]),
            seen=MINE + "two threads share a block and one is not asked",
            same_if="the second half holds no largest magnitude",
        ),
        way(
            "of every second element of a block",
            amax=_scan(lambda blocks: blocks[..., ::2]),
            seen="sglang PR 8290",
            same_if="none of the others is the largest",
        ),
        way(
            "without the last element of a block",
            amax=_scan(lambda blocks: blocks[..., :-1]),
            seen=MINE + "an exclusive bound one short",
            same_if="the last element is nowhere the largest",
        ),
    ),
)
fault(
    "block amax of signed values",
    VALUE,
    seen="TransformerEngine 3550",
    amax=signed_amax,
    needs=has_negative,
    same_if="the largest magnitude of every block is positive",
)


# --- the scale ------------------------------------------------------------------------------------------------------


def _mode(call: Call) -> str:
    return str(call.resolved.get("rounding", ""))


def _other_than(mode: str) -> WhyNot:
    return need(lambda call: _mode(call) != mode, f"{mode.upper()} was asked for")


for mode, (formula, power) in MODES.items():
    fault(
        f"shared scale rounded by {mode.upper()} instead of what was asked for",
        VALUE,
        seen="pytorch/ao ScaleCalculationMode: to_mx takes FLOOR where its kernels take RCEIL",
        on=MODED,
        recipe=fields(formula=formula, power_of_two=power),
        needs=_other_than(mode),
        same_if="no amax lies where the two step apart",
    )


def _times(factor: float) -> Callable[[Tensor], Tensor]:
    """Scales times a power of two, kept within the bytes 0 to 254."""
    return lambda scale: (scale * factor).clamp(2.0**-127, 2.0**127)


fault(
    "{}",
    VALUE,
    on=POWERS,
    over=(
        way("published exponent one high", _times(2.0), seen="sglang PR 28418", same_if="every scale is the largest"),
        way("published exponent one low", _times(0.5), seen="DeepGEMM PR 112", same_if="every scale is the smallest"),
        way(
            "inverse of the shared scale published",
            lambda scale: inverted(scale).clamp(2.0**-127, 2.0**127),
            seen="vllm PR 36297",
            same_if="every scale is 1",
        ),
        way(
            "byte 0 written for every scale",
            lambda scale: torch.full_like(scale, 2.0**-127),
            seen="pytorch 195751",
            same_if="every byte is 0",
        ),
    ),
    scale=itself,
)
fault(
    "published scale of the previous {}",
    INDEX,
    same_if="neighbours have equal scales",
    over=(
        way("block", rolled(1, -1), seen=TIRX, needs=several_across),
        way("row", rolled(1, 0), seen=CUTLASS, needs=several_down),
    ),
    scale=itself,
)


def _truncated_exponent(call: Call, scale: Tensor) -> Tensor:
    """Scales below 1 that were rounded down are rounded up: their exponents are truncated."""
    unrounded = prepared(call).steps(call.recipe).unrounded.reshape(scale.shape)
    return torch.where((scale < 1) & (unrounded > scale), scale * 2, scale)


def _next_power(amax: Amax) -> Tensor:
    """Amax as it has to be for an exponent of amax over the largest code, rounded down."""
    element = amax.recipe.element
    return f32(amax.right / (element.max_finite / 2.0**element.emax))


fault(
    "{}",
    VALUE,
    on=POWERS,
    over=(
        way(
            "negative exponents of the shared scale truncated",
            seen="vllm-project/compressed-tensors PR 630: log2 to an integer without floor",
            scale=_truncated_exponent,
            same_if="no scale below 1 is rounded down",
        ),
        way(
            "exponent of amax over the largest code rounded down",
            seen="vllm PR 43557",
            amax=_next_power,
            needs=need(
                lambda call: call.recipe.power_of_two is PowerOfTwo.AMAX_FLOOR, "the exponent is not that of amax"
            ),
            same_if="no amax lies below the largest code times a power of two",
        ),
        way(
            "inverse of the largest shared scale taken for 0",
            seen="flashinfer PR 4023: 2^-127 made by a shift of the exponent",
            quotient=lambda values: values.altered(
                quotient=torch.where(
                    values.steps.scale == 2.0**127, values.x.blocks(values.recipe.block) * 0.0, values.quotient
                )
            ),
            needs=need(
                lambda call: bool((prepared(call).steps(call.recipe).scale == 2.0**127).any()), "no scale is 2^127"
            ),
            same_if="the blocks of this scale hold infinities, NaN and what their codes of 0 stand for",
            admissible_if="a released recipe codes infinities so",
        ),
    ),
)


@fault(
    "codes made with the scale before it was rounded",
    VALUE,
    seen="SGLang per_token_group_quant_8bit_v2, row-major UE8M0",
    same_if="no scale is rounded",
    admissible_if="codes are free under a scale of 0",
)
def quotient_of_unrounded(values: Values) -> Values:
    s, blocks = values.steps.unrounded, values.x.blocks(values.recipe.block)
    total = values.x.both(s, values.recipe)
    return values.altered(quotient=torch.where(s > 0, f32(blocks / total), values.quotient))


def _e4m3(call: Call, scale: Tensor, rounding: Rounding) -> Tensor:
    """The unrounded scales of a call rounded another way to E4M3."""
    steps = prepared(call).steps(call.recipe)
    unrounded = steps.unrounded.reshape(scale.shape).nan_to_num(nan=0.0)
    return round_to(unrounded, E4M3FN, rounding=rounding, overflow=Overflow.SATURATE)


def _to_a_power(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, power_of_two(torch.frexp(scale)[1].to(torch.int64) - 1), scale)


fault(
    "E4M3 scale rounded {}",
    VALUE,
    on=TWO_LEVELS,
    seen="vLLM nvfp4_utils.cuh with UE8M0_SF: truncated",
    same_if="every scale is an E4M3 value",
    over=(
        way("down", lambda call, scale: _e4m3(call, scale, Rounding.TOWARD_ZERO)),
        way("up", lambda call, scale: _e4m3(call, scale, Rounding.AWAY)),
        way(
            "to a power of two",
            _to_a_power,
            seen="vLLM nvfp4_utils.cuh with UE8M0_SF",
            same_if="every scale is a power of two",
        ),
    ),
    scale=itself,
)


fault(
    "{}",
    VALUE,
    on=TWO_LEVELS,
    over=(
        way(
            "block scale above 448 coded NaN",
            lambda call, scale: torch.where(_unrounded(call, scale) >= 464, torch.full_like(scale, torch.nan), scale),
            seen="Model-Optimizer 1633, PR 1465",
            needs=need(
                lambda call: bool((prepared(call).steps(call.recipe).unrounded >= 464).any()), "no scale is above 448"
            ),
        ),
        way(
            "scale of a block of zeros 1 before it is divided",
            lambda call, scale: torch.where(_amax_of(call, scale) == 0, _of_unit(call, scale), scale),
            seen="Model-Optimizer PR 1382",
            needs=need(
                lambda call: bool((prepared(call).amax(call.recipe) == 0).any()) and _per_amax(call) > 0,
                "no block is zero beside others with a finite scale",
            ),
            same_if="six times the global scale rounds to 0",
            admissible_if="the scale of zeros is free",
        ),
    ),
    scale=itself,
)


def _unrounded(call: Call, scale: Tensor) -> Tensor:
    return prepared(call).steps(call.recipe).unrounded.reshape(scale.shape)


def _amax_of(call: Call, scale: Tensor) -> Tensor:
    return prepared(call).amax(call.recipe).reshape(scale.shape)


def _per_amax(call: Call) -> float:
    """The factor from an amax to its scale before that is rounded; 0 where no block has a finite one."""
    amax, unrounded = prepared(call).amax(call.recipe), prepared(call).steps(call.recipe).unrounded
    ratio = (unrounded.flatten() / amax.flatten())[amax.flatten() > 0]
    ratio = ratio[torch.isfinite(ratio)]
    return float(ratio.amax()) if len(ratio) else 0.0


def _of_unit(call: Call, scale: Tensor) -> Tensor:
    """1 over the global scale, or times its inverse, as an E4M3 value: the scale of a block with amax 6."""
    one = f32(torch.full_like(scale, 6.0 * _per_amax(call)))
    return round_to(one, E4M3FN, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE)


ones = need(lambda call: bool((call.inputs["global_scale"] != 1.0).all()), "the global scale is 1")
finite = need(lambda call: bool(torch.isfinite(call.inputs["global_scale"]).all()), "the global scale is infinite")
fault(
    "global scale {}",
    VALUE,
    on=TWO_LEVELS,
    over=(
        way("ignored", ones_of, seen="pytorch 195751", needs=ones),
        way(
            "inverted",
            lambda g: (1.0 / g.double()).float(),
            seen="flashinfer::fp4_quantize: enable_pdl lands in is_global_scale_inversed",
            needs=both(ones, finite),
        ),
    ),
    read=lambda change: entry("global_scale", change),
)


@fault(
    "global scale left out of the codes",
    VALUE,
    on=TWO_LEVELS,
    needs=ones,
    seen="TensorRT-LLM fp4 quantise: the second scale forgotten",
    admissible_if="codes are free under a scale of 0",
)
def quotient_of_one_scale(values: Values) -> Values:
    blocks = values.x.blocks(values.recipe.block)
    return values.altered(quotient=torch.where(values.steps.scale > 0, f32(blocks / values.steps.scale), blocks * 0.0))


@fault(
    "NaN scale of a block of zeros under an infinite global scale",
    VALUE,
    on=TWO_LEVELS & PLAIN,
    seen="FlashInfer cvt_warp_fp16_to_fp4, fast path: 2688/0 times 0",
    needs=need(lambda call: not bool(torch.isfinite(call.inputs["global_scale"]).all()), "the global scale is finite"),
)
def scale_of_zero_times_infinity(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.full_like(scale, torch.nan), scale)


# --- the cast -------------------------------------------------------------------------------------------------------

TIE = "no quotient is a tie"
NEIGHBOUR = "beside a midpoint right formulas give either code unless the scale is a power of two"


def _capped(values: Values) -> Values:
    """The largest value of the format is not reached."""
    element = values.recipe.element
    top = float(decode(torch.tensor([element.max_code - 1], dtype=torch.int64, device="cpu"), element))
    return values.altered(quotient=values.quotient.clamp(-top, top))


fault(
    "{}",
    CAST,
    on=ROUNDED,
    over=(
        way(
            "ties toward zero",
            of_quotient(lambda quotient: quotient * (1 - 2.0**-40)),
            seen="DeepGEMM _quantize_to_fp4_e2m1",
            same_if=TIE,
            admissible_if=NEIGHBOUR,
        ),
        way(
            "ties away from zero",
            cast_by(Rounding.NEAREST_AWAY),
            seen="microxcaling round='nearest'",
            same_if=TIE,
            admissible_if=NEIGHBOUR,
        ),
        way(
            "quotients truncated",
            cast_by(Rounding.TOWARD_ZERO),
            seen="flashinfer 5128",
            same_if="every quotient is a code",
        ),
        way(
            "quotient through bfloat16",
            of_quotient(bf16_of),
            seen="TensorRT-LLM PR 14464",
            same_if="every quotient of a bfloat16 value by a power of two is one",
            admissible_if="bfloat16 moves no quotient of four bits across a midpoint by more than its own error",
        ),
        way(
            "codes stop one below the largest",
            _capped,
            seen="vllm PR 12134: the largest value of another format",
            same_if="no quotient rounds to the largest value",
        ),
        way(
            "overflowing codes are NaN",
            cast_by(Rounding.NEAREST_EVEN, Overflow.NAN),
            on=FP8_CODES,
            seen="ml_dtypes 400",
            same_if="no quotient overflows",
        ),
    ),
    quotient=itself,
)
FREE = "codes are free under a scale of 0"
fault(
    "{}",
    CAST,
    over=(
        way(
            "NaN coded 0",
            lambda call, codes: torch.where(torch.isnan(prepared(call).x), torch.zeros_like(codes), codes),
            seen="DeepGEMM _quantize_to_fp4_e2m1; TransformerEngine reference_nvfp4",
            needs=has_nan,
            admissible_if="codes are free under a NaN scale",
        ),
        way(
            "subnormal codes are zero",
            lambda call, codes: without_subnormals(codes, call.recipe.element),
            seen="flashinfer PR 3932",
            same_if="no code is subnormal",
        ),
        way(
            "sign of the codes lost",
            lambda call, codes: codes & call.recipe.element.magnitude_mask,
            seen="flashinfer PR 3932",
            needs=has_negative,
        ),
        way(
            "-0 coded 0",
            lambda call, codes: torch.where(codes == call.recipe.element.sign_mask, torch.zeros_like(codes), codes),
            seen="DeepGEMM _quantize_to_fp4_e2m1",
            needs=has_negative,
            same_if="no code is -0",
            admissible_if=FREE,
        ),
        way(
            "codes of the last row missing",
            lambda codes: torch.cat([codes[:-1], codes[:1]]),
            family=MOVEMENT,
            seen="aprender 2765",
            needs=several_down,
            same_if="the first and last row are equal",
        ),
        way(
            "codes of two blocks exchanged",
            lambda call, codes: torch.roll(codes, codes.shape[1] // _shape(call)[1], dims=1),
            family=MOVEMENT,
            seen="pith-train PR 74",
            needs=several_across,
            same_if="the blocks are equal",
            admissible_if=FREE,
        ),
    ),
    codes=itself,
)


# --- packing, tiles, padding ----------------------------------------------------------------------------------------


def _reread(how: Callable[[Call, Tensor], Tensor]) -> Change:
    """The scale bytes ``[M, C]`` of a call stored in another order: ``how`` gives the memory."""

    def change(call: Call, memory: Tensor) -> Tensor:
        scale = loaded(memory.view(torch.uint8), *_storage_of(call))
        wrong = how(call, scale).flatten()
        reread = torch.zeros_like(memory.view(torch.uint8)).flatten()
        most = min(len(reread), len(wrong))
        reread[:most] = wrong[:most]
        return reread.reshape(memory.shape)

    return change


def _other_tile(call: Call) -> str:
    return next(tile for tile in HEIGHTS if tile != _layout(call))


def _tile_rows_plain(call: Call, scale: Tensor) -> Tensor:
    """Tiles of 128x4 whose rows lie one after the other, not 32 apart."""
    m, c = scale.shape
    height = HEIGHTS[_layout(call)]
    full = torch.zeros(-(-m // height) * height, -(-c // 4) * 4, dtype=torch.uint8, device=scale.device)
    full[:m, :c] = scale
    return full.reshape(-1, height, full.shape[1] // 4, 4).permute(0, 2, 1, 3)


def _tiles_by_column(call: Call, scale: Tensor) -> Tensor:
    """Tiles of one column of tiles after another instead of one row after another."""
    height = HEIGHTS[_layout(call)]
    tiles = stored(scale, _layout(call)).reshape(-1, -(-scale.shape[1] // 4), height * 4)
    return tiles.transpose(0, 1)


tile_grid = need(
    lambda call: _storage_of(call)[0][1] > 4 and _storage_of(call)[0][0] > HEIGHTS.get(_layout(call), 1 << 62),
    "there are not several tiles in both directions",
)
interleaved = need(
    lambda call: _layout(call) == "128x4" and _storage_of(call)[0][0] > 1, "rows of a tile are not interleaved"
)
fault(
    "nibbles exchanged",
    MOVEMENT,
    on=PLAIN & PACKED,
    seen="pith-train PR 74",
    write=entry("q", nibbles_swapped),
    same_if="the two codes of every byte are equal",
)
fault(
    "codes of a byte pair exchanged",
    MOVEMENT,
    on=PLAIN - PACKED,
    seen="pith-train PR 74",
    codes=pairs_swapped,
)
LAYOUT_FAULTS: tuple[tuple[str, Callable[[Call, Tensor], Tensor], WhyNot, str], ...] = (
    (
        "scale bytes row-major where tiles are meant",
        lambda call, scale: scale,
        in_tiles,
        "PyTorch _scaled_mm: a linear scale of equal size is accepted",
    ),
    (
        "scale bytes in tiles of the other height",
        lambda call, scale: stored(scale, _other_tile(call)),
        in_tiles,
        "flashinfer 3604",
    ),
    ("rows of a 128x4 tile not interleaved", _tile_rows_plain, interleaved, "triton PR 10382"),
    ("tiles of scales column by column", _tiles_by_column, tile_grid, "FlashInfer group placement against tight tiles"),
    (
        "scale bytes transposed",
        lambda call, scale: stored(scale.t().contiguous().reshape(scale.shape), _layout(call)),
        both(several_down, several_across),
        "flashinfer 2147",
    ),
)
for name, how, when, where in LAYOUT_FAULTS:
    fault(
        name,
        INDEX,
        seen=where,
        write=entry("scale", _reread(how)),
        needs=when,
        same_if="both put the same bytes",
        on=PLAIN,
    )
    fault(
        f"{name}, read so",
        INDEX,
        seen=where,
        on=BACK,
        read=entry("scale", _reread(how)),
        needs=when,
        same_if="both read the same bytes",
    )


ragged_tiles = need(lambda call: _storage_of(call)[0][1] % 4, "the columns are whole tiles")
fault(
    "rows of scale tiles C // 4 tiles apart",
    INDEX,
    seen="no public thread: C // 4 for ceil(C / 4)",
    write=entry("scale", _reread(lambda call, scale: tiles_too_close(scale, _layout(call)))),
    needs=both(in_tiles, tile_grid, ragged_tiles),
    same_if="what lies twice is equal",
    on=PLAIN,
)


def _unwritten(call: Call, memory: Tensor) -> Tensor:
    """Bytes 0xFF in the padding: memory that is not written."""
    pads, out = padding_of(*_storage_of(call)), memory.clone()
    assert pads is not None
    out.view(torch.uint8)[pads] = 0xFF
    return out


fault(
    "padding of the scales not written",
    MOVEMENT,
    seen="vLLM scaled_fp4_quant 07c13c7: its clearing loop is empty",
    on=PLAIN & OWN_PADDING,
    write=entry("scale", _unwritten),
    needs=padded,
)


def _of_ones(call: Call, memory: Tensor) -> Tensor:
    """The byte of 1 in the padding, where zeros are due."""
    pads, out = padding_of(*_storage_of(call)), memory.clone()
    assert pads is not None
    out.view(torch.uint8)[pads] = 127
    return out


def _first_half(x: Tensor) -> Tensor:
    """The columns of the second half of ``x`` ``[M, C]`` left at zero."""
    remaining = torch.arange(x.shape[-1], device=x.device) < -(-x.shape[-1] // 2)
    return torch.where(remaining, x, torch.zeros_like(x))


fault(
    "padding of the scales filled with the byte of 1",
    MOVEMENT,
    seen="aiter PR 2900: 127 in place of 0",
    on=PLAIN & OWN_PADDING,
    write=entry("scale", _of_ones),
    needs=padded,
)
fault(
    "second half of every row not quantised",
    MOVEMENT,
    seen="vllm PR 35210: threads of 8 values bounded by the number of scales of 16",
    on=PLAIN,
    codes=_first_half,
    scale=_first_half,
    needs=several_across,
    same_if="the second half is zero",
)
fault(
    "scale bytes one place early",
    MOVEMENT,
    seen="vllm-omni 5263",
    on=PLAIN,
    write=entry("scale", lambda memory: memory.flatten().roll(-1).reshape(memory.shape)),
    same_if="all bytes are equal",
)


# --- reading back ---------------------------------------------------------------------------------------------------


def _spread(call: Call) -> Tensor:
    """The scale bytes over the elements, ``[M, K]``."""
    contract = call.contract
    assert isinstance(contract, BlockDequantiser)
    scale = contract.scales_of(call.inputs["scale"], call.inputs, call.resolved)
    return grid(contract.shape(call.inputs), contract.block).spread(scale)


def _where_byte(byte: int, value: Callable[[Tensor], Tensor]) -> Change:
    """The results under one scale byte replaced by what ``value`` gives of the values of the codes."""

    def change(call: Call, out: Tensor) -> Tensor:
        contract = call.contract
        assert isinstance(contract, BlockDequantiser)
        values, _ = contract.operands_of(call.inputs, call.resolved)
        return torch.where(_spread(call) == byte, rounded_to(value(values), out.dtype), out)

    return change


def _bytes(change: Callable[[Tensor], Tensor]) -> Change:
    """The scale bytes ``[M, C]`` changed in their layout."""
    return lambda call, memory: stored(change(loaded(memory, *_storage_of(call))), _layout(call))


def _has_byte(byte: int) -> WhyNot:
    return need(
        lambda call: bool((loaded(call.inputs["scale"], *_storage_of(call)) == byte).any()), f"no scale byte is {byte}"
    )


fault(
    "E8M0 byte {}",
    VALUE,
    on=BACK & E8M0,
    seen="FlashInfer mxfp8_dequantize_host: byte << 23",
    over=(
        way("0 read as 0", (0, 0.0), needs=_has_byte(0)),
        way("255 read as infinity", (255, torch.inf), needs=_has_byte(255), same_if="only zeros lie under it"),
    ),
    write=lambda part: entry("out", _where_byte(part[0], lambda values: values * part[1])),
)
fault(
    "{}",
    INDEX,
    on=BACK,
    same_if="neighbours have equal scales",
    over=(
        way(
            "scale exponent read with a bias of 128",
            lambda s: torch.where((s > 0) & (s < 255), s - 1, s),
            family=VALUE,
            on=BACK & E8M0,
            seen=MINE + "the bias of a signed byte",
            same_if="",
        ),
        way("scale of the previous block read", rolled(1, 1), seen=TIRX, needs=several_across),
        way("scale of the previous row read", rolled(1, 0), seen=CUTLASS, needs=several_down),
        way(
            "one scale read for two blocks",
            lambda s: s[:, ::2].repeat_interleave(2, dim=1)[:, : s.shape[1]],
            seen=MINE + "blocks of 32 where 16 are meant",
            needs=several_across,
        ),
    ),
    read=lambda change: entry("scale", _bytes(change)),
)


def _poison_read(call: Call, out: Tensor) -> Tensor:
    """The last block of every row scaled by the padding byte behind it: an out-of-bounds read."""
    (m, c), layout = _storage_of(call)
    pads = padding_of((m, c), layout)
    assert pads is not None
    poison = call.inputs["scale"][pads]
    scale = loaded(call.inputs["scale"], (m, c), layout).clone()
    scale[:, -1] = poison.repeat(m)[:m]
    values = call.contract.reference({**call.inputs, "scale": stored(scale, _layout(call))}, **call.options)
    assert isinstance(values, Tensor)
    return values


fault(
    "padding of the scales read",
    MOVEMENT,
    on=BACK,
    seen="flashinfer PR 3650, 2861",
    write=entry("out", _poison_read),
    needs=padded,
)
fault(
    "nibbles exchanged, read so",
    MOVEMENT,
    on=BACK & PACKED,
    seen="pith-train PR 74",
    read=entry("q", nibbles_swapped),
)
fault(
    "code 0x8 of four bits read as a value",
    CAST,
    on=BACK & PACKED,
    seen=MINE + "a table that takes the sign bit for a magnitude",
    write=entry("out", lambda call, out: torch.where(_minus_zero(call), torch.full_like(out, 8.0), out)),
)


def _minus_zero(call: Call) -> Tensor:
    contract = call.contract
    assert isinstance(contract, BlockDequantiser)
    values, _ = contract.operands_of(call.inputs, call.resolved)
    return (values == 0) & torch.signbit(values)


fault(
    "sign of the codes lost in reading",
    CAST,
    on=BACK,
    seen="flashinfer PR 3932",
    write=entry("out", lambda out: out.abs()),
)
fault(
    "global scale {}",
    VALUE,
    on=BACK - E8M0,
    over=(
        way("not multiplied", ones_of, seen="torchao NVFP4Tensor matmul: _scaled_mm without alpha"),
        way("divides", lambda g: 1.0 / g, seen="FlashInfer e2m1_and_ufp8sf_scale_to_float takes 1/gs"),
    ),
    read=lambda change: entry("global_scale", change),
)
fault(
    "E4M3 scales read as E8M0",
    VALUE,
    on=BACK - E8M0,
    seen="FlashInfer e2m1_and_ufp8sf_scale_to_float: ufp8_type 0 for 1",
    write=entry("out", lambda call, out: rounded_to(_as_powers(call), out.dtype)),
)


def _as_powers(call: Call) -> Tensor:
    contract = call.contract
    assert isinstance(contract, BlockDequantiser)
    values, _ = contract.operands_of(call.inputs, call.resolved)
    scale = decode(_spread(call).contiguous().view(torch.float8_e8m0fnu))
    return f32(values * scale)
