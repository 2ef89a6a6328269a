"""Faults of the further quantisers: random bits, transforms, two candidates, rows, experts, casts.

Those of every block quantiser stand in :mod:`oracle.routines.mx.faults`; here are those of one form alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.numbers.quantize import Prepared, Steps, quotients, to_codes
from oracle.numbers.recipes import Candidates, CodeRounding, Recipe, ZeroSign
from oracle.routines.fault import CAST, INDEX, MOVEMENT, VALUE, Call, Change, Faults, both, entry, need, way
from oracle.routines.fault import ones as ones_of
from oracle.routines.ideas import fields, itself, nibbles_swapped, option, pairs_swapped, tiles_too_close
from oracle.routines.mx.casts import BlockScalesToMxfp8, Fp8BlockToMxfp8, Mxfp8ToFp8Block
from oracle.routines.mx.columns import ColumnsQuantiser, Mxfp8QuantizeColumnwise
from oracle.routines.mx.contract import GLOBAL_OF_ROWS, STACKED, BlockQuantiser, loaded, stored
from oracle.routines.mx.elements import CastBackFromFp4, PerTokenCastToFp4, TransposePackedFp4
from oracle.routines.mx.experts import HEIGHT, ExpertQuantiser, starts
from oracle.routines.mx.faults import EXPERTS, MINE, MODED, PACKED, PLAIN, POWERS, QUANTISERS, STOCHASTIC, TWO_LEVELS
from oracle.routines.mx.flashinfer import SILU, Nvfp4QuantizeShuffled
from oracle.routines.mx.tokens import ROW_SCALE, OfFp8Quantiser, row_scales
from oracle.routines.mx.training import HadamardTransform
from oracle.routines.quantisers.contract import Amax, Values, prepared
from oracle.routines.traits import Trait, of_class, returns, takes
from oracle.truth.hadamard import SIZE, matrix
from oracle.truth.layout import align, inverse_order, row_order, swizzle_scale

FAULTS = Faults(QUANTISERS)
fault = FAULTS.declare

NEAR = "beside a midpoint right formulas give either code unless the scale is a power of two"
FREE = "codes are free under a scale of 0"


fault(
    "nothing written",
    MOVEMENT,
    seen="FlashInfer fp4_quantize on sm90: the body is compiled for sm100 and later",
    write=lambda outputs: {name: torch.zeros_like(x.view(torch.uint8)).view(x.dtype) for name, x in outputs.items()},
    same_if="every block is zero",
)
fault(
    "codes 7 for zeros under a scale that rounds to 0",
    CAST,
    on=TWO_LEVELS & PLAIN,
    seen="FlashInfer cvt_warp_fp16_to_fp4: 0 times R(0)",
    codes=lambda call, codes: _sevens(call, codes),
    same_if="no scale rounds to 0",
    admissible_if=FREE,
)

fault(
    "zeros coded -0",
    CAST,
    on=POWERS & PACKED,
    recipe=fields(zero_sign=ZeroSign.ZEROS),
    seen="Model-Optimizer 0.47 mxfp4_tensor.py cast_fp4: the sign bit of 0",
    same_if="no value is 0",
    admissible_if="an activation of 0 may be a zero of either sign",
)
TINY = "no shared scale is 2^-127"
fault(
    "values coded as they are under a scale of 2^-127",
    VALUE,
    on=MODED,
    same_if=TINY,
    seen="torchao 0.18.0 _to_mx_rceil: torch.where(exponent == 0, 1.0, ..)",
    recipe=fields(unit_at_byte_0=True),
)
fault(
    "values coded over 2^-126 under a scale of 2^-127",
    VALUE,
    on=MODED,
    same_if=TINY,
    seen="torchao 0.18.0 to_mx: clamp(scale_fp32, min=F32_MIN_NORMAL)",
    recipe=fields(divides_by_bits=True),
)


def _sevens(call: Call, codes: Tensor) -> Tensor:
    x = prepared(call)
    dead = (x.scale(call.recipe) == 0) & (x.amax(call.recipe) > 0)
    return torch.where(x.grid(call.recipe.block).join(dead & (x.blocks(call.recipe.block) == 0)), 7, codes)


def _behind(call: Call) -> int:
    # only contracts of MX casts, which have shape_of_codes, list the fault
    return int(call.contract.shape_of_codes(call)[1]) - int(call.inputs["x"].shape[1])  # type: ignore[attr-defined]


beyond = need(lambda call: _behind(call) > 0, "the values need no columns behind them")
fault(
    "columns behind the values not written",
    MOVEMENT,
    on=QUANTISERS & takes("alignment"),
    needs=beyond,
    seen="flashinfer PR 3650",
    write=entry("q", lambda call, q: _columns_behind(call, q, 0x7F)),
)
fault(
    "columns behind the values of the next row",
    MOVEMENT,
    on=QUANTISERS & takes("alignment"),
    needs=beyond,
    seen=MINE + "a row pitch of the values for that of the codes",
    same_if="the next row begins with zeros",
    codes=lambda call, codes: _next_row_behind(call, codes),
)


def _columns_behind(call: Call, q: Tensor, byte: int) -> Tensor:
    wrong = q.view(torch.uint8).clone()
    wrong[:, q.shape[1] - _behind(call) :] = byte
    return wrong.view(q.dtype)


def _next_row_behind(call: Call, codes: Tensor) -> Tensor:
    wrong, wide = codes.clone(), codes.shape[1] - _behind(call)
    taken = min(_behind(call), wide)
    wrong[:, wide : wide + taken] = codes.roll(-1, dims=0)[:, :taken]
    return wrong


# --- stochastic rounding --------------------------------------------------------------------------------------------


def _jittered(low: float) -> Callable[[Values], Values]:
    """Random numbers of ``[low, low + 1)`` instead of ``[0, 1)``."""

    def change(values: Values) -> Values:
        magnitude = values.quotient.abs()
        step = torch.where(magnitude >= 4, 2.0, torch.where(magnitude >= 2, 1.0, 0.5))
        return values.altered(quotient=torch.copysign(magnitude + low * step, values.quotient))

    return change


fault(
    "{}",
    CAST,
    on=STOCHASTIC,
    over=(
        way(
            "random numbers from 1/2 to 3/2 in stochastic rounding",
            quotient=_jittered(0.5),
            seen=MINE + "half a step added for rounding to nearest as well",
            same_if="every scale is 0",
        ),
        way(
            "random numbers of a whole step in stochastic rounding",
            quotient=_jittered(1 / 256),
            seen=MINE + "a random number of (0, 1], which moves values of the grid",
            same_if="no random byte is 255",
            admissible_if="the next value is a neighbour, off the grid and beside it",
        ),
        way(
            "stochastic rounding without random bits",
            recipe=fields(rounding=CodeRounding.NEAREST_EVEN),
            seen="TransformerEngine rng_state == nullptr",
            admissible_if="the nearest code is a neighbour",
        ),
        way(
            "stochastic rounding of the truncated quotient",
            quotient=lambda values: values.altered(quotient=torch.trunc(values.quotient * 2) / 2),
            seen=MINE + "an integer cast before the random bits are added",
            same_if="every quotient is a multiple of 1/2",
            admissible_if="below 2 multiples of 1/2 are values of E2M1, and a truncation gives a neighbour",
        ),
        way(
            "a code beyond the neighbours",
            codes=lambda codes: torch.where(codes & 7 > 5, codes - 2, codes),
            seen=MINE + "the jitter of the next binade",
            same_if="no code is 4 or 6",
        ),
        way(
            "sign of zero lost in stochastic rounding",
            recipe=fields(zero_sign=ZeroSign.DROPPED),
            seen=MINE + "truncation by an unsigned cast",
            same_if="no code is -0",
        ),
    ),
)


# --- the Hadamard transform -----------------------------------------------------------------------------------------

HADAMARD = of_class(HadamardTransform)


def _by(transform: Callable[[Tensor], Tensor]) -> Change:
    """The transform by another matrix ``[16, 16]``, of the right one."""

    def change(call: Call, out: Tensor) -> Tensor:
        right = matrix(int(str(call.resolved["sign_mask"]))).to(out.device)
        x = torch.unflatten(decode(call.inputs["x"]), 1, (-1, SIZE))
        return (x @ transform(right)).flatten(1).to(out.dtype)

    return change


def _halves(h: Tensor) -> Tensor:
    """The two diagonal blocks ``[8, 8]``, zeros beside them."""
    wrong = torch.zeros_like(h)
    wrong[:8, :8], wrong[8:, 8:] = h[:8, :8], h[8:, 8:]
    return wrong


signed = need(lambda call: call.resolved["sign_mask"] != 0, "no column changes its sign")
for name, made, when in (
    ("Hadamard transform without 1/4", lambda h: h * 4, None),
    ("Hadamard transform divided by 16", lambda h: h / 4, None),
    ("signs of the columns after the Hadamard transform", lambda h: h.T, signed),
    ("Hadamard transform of 8 columns", lambda h: _halves(h) * 2.0**0.5, None),
    ("Hadamard columns in bit-reversed order", lambda h: h[:, _reversed()], None),
    ("Hadamard transform by the signs alone", lambda h: torch.diag(h[:, 0] * 4), None),
):
    more = {} if when is None else {"needs": when}
    fault(
        name,
        VALUE,
        on=HADAMARD,
        seen=MINE + "TransformerEngine reference_nvfp4 has the order of the factors",
        write=entry("out", _by(made)),
        **more,  # type: ignore[arg-type]
    )


def _reversed() -> list[int]:
    return [int(f"{i:04b}"[::-1], 2) for i in range(SIZE)]


fault(
    "Hadamard transform of the previous 16 columns",
    INDEX,
    on=HADAMARD,
    seen=MINE + "a tile one early",
    write=entry("out", lambda out: out.roll(SIZE, dims=1)),
    same_if="there are 16 columns",
)
fault(
    "Hadamard transform without its random signs",
    VALUE,
    on=takes("sign_mask"),
    needs=signed,
    seen="TransformerEngine _apply_rht: with_random_sign_mask",
    options=option(sign_mask=0),
)
fault(
    "Hadamard signs in the reverse order",
    VALUE,
    on=takes("sign_mask"),
    needs=signed,
    seen=MINE + "bits of a mask from the top",
    options=lambda options: options | {"sign_mask": _flipped(options)},
)


def _flipped(options: dict[str, object]) -> int:
    return int(f"{int(str(options['sign_mask'])):016b}"[::-1], 2)


@fault(
    "codes of the values before the transform",
    VALUE,
    on=QUANTISERS & takes("sign_mask"),
    admissible_if=FREE,
    seen="TransformerEngine NVFP4Quantizer: row side and column side exchanged",
)
def quotient_of_untransformed(call: Call, values: Values) -> Values:
    raw = values.cells.split(decode(call.inputs["x"]))
    return values.altered(quotient=quotients(raw, values.steps.total, values.steps.inverse, values.recipe))


# --- 16x16 and four over six ----------------------------------------------------------------------------------------

SQUARES = Trait("has one scale for a square", lambda contract: getattr(contract, "repeats", 1) > 1)
SQUARE, BIG, OVER = TWO_LEVELS & SQUARES, POWERS & SQUARES, QUANTISERS & takes("e4m3_max")
fault(
    "amax of one row of 16",
    VALUE,
    on=SQUARE,
    seen=MINE + "1x16 scales where 16x16 are meant",
    amax=lambda amax: amax.blocks[:, :1].nan_to_num(nan=0.0).abs().amax(dim=(1, 3), keepdim=True),
    same_if="the first row of every block holds its amax",
)
fault(
    "scale of 16 rows published once",
    MOVEMENT,
    on=SQUARE,
    seen="TransformerEngine quantize_transpose_nvfp4.cuh: the scale is repeated for its 16 rows",
    write=entry("scale", lambda call, memory: _rows_kept(call, memory, lambda rows: rows % 16 == 0)),
)
fault(
    "scale of 16 rows published transposed",
    INDEX,
    on=SQUARE,
    seen=MINE + "scales of the transpose",
    scale=lambda scale: scale.t().reshape(scale.shape),
    same_if="the scales are symmetric",
)


def _rows_kept(call: Call, memory: Tensor, keep: Callable[[Tensor], Tensor]) -> Tensor:
    contract = call.contract
    assert isinstance(contract, BlockQuantiser)
    scale = contract.scales_of(memory, call)
    mask = keep(torch.arange(len(scale), device=scale.device))
    return contract.memory(torch.where(mask[:, None], scale, torch.zeros_like(scale)), call)


def _candidate(values: Values, wide: bool) -> Values:
    """Values under a block's own scale, or under 1.5 times it."""
    recipe, x = values.recipe, values.x
    steps = x.candidates(recipe, x.own_steps(recipe))[wide]
    return values.altered(quotient=quotients(x.blocks(recipe.block), steps.total, steps.inverse, recipe))


Pick = Callable[[Tensor, Tensor], Tensor]
"""Of the errors under a block's own scale and under 1.5 times it: where the latter is taken."""


def _smaller(own: Tensor, wide: Tensor) -> Tensor:
    return wide < own


def _picked(x: Prepared, recipe: Recipe, pick: Pick, factor: float) -> tuple[Steps, Steps, Tensor]:
    """Both candidates, and where the second is taken by the errors of ``factor`` times the values."""
    own, wide = x.candidates(recipe, x.own_steps(recipe))
    errors = []
    for steps in (own, wide):
        blocks = x.blocks(recipe.block)
        codes = to_codes(quotients(blocks, steps.total, steps.inverse, recipe), recipe, None)
        off = (decode(codes, recipe.element) * steps.total * factor - blocks).abs()
        squared = recipe.candidates is Candidates.MSE
        errors.append(x.error(recipe, steps) if factor == 1 else (off**2 if squared else off).sum(dim=3, keepdim=True))
    return own, wide, pick(*errors)


def _scale_of(call: Call, scale: Tensor, pick: Pick, factor: Callable[[Call], float] = lambda call: 1.0) -> Tensor:
    """The scale of one candidate for each block."""
    own, wide, other = _picked(prepared(call), call.recipe, pick, factor(call))
    return torch.where(other, wide.scale, own.scale).reshape(scale.shape)


def _codes_of(call: Call, values: Values, pick: Pick, factor: Callable[[Call], float] = lambda call: 1.0) -> Values:
    _, _, other = _picked(values.x, values.recipe, pick, factor(call))
    return values.altered(
        quotient=torch.where(other, _candidate(values, True).quotient, _candidate(values, False).quotient)
    )


for name, pick, argument in (
    ("four over six: always the own scale", lambda own, wide: torch.zeros_like(own, dtype=torch.bool), ""),
    ("four over six: always 1.5 times the scale", lambda own, wide: torch.ones_like(own, dtype=torch.bool), ""),
    ("four over six: the larger error", lambda own, wide: wide > own, ""),
    (
        "four over six: 1.5 times the scale on equal errors",
        lambda own, wide: wide <= own,
        "errors that are nearly equal admit both scales",
    ),
):
    fault(
        name,
        VALUE,
        on=OVER,
        seen=MINE + "TransformerEngine quantize_4over6_nvfp4.cuh: ties select map-to-6",
        quotient=lambda call, values, pick=pick: _codes_of(call, values, pick),
        admissible_if=argument,
        scale=lambda call, scale, pick=pick: _scale_of(call, scale, pick),
        same_if="both give the same",
    )
fault(
    "four over six: codes of the other scale",
    VALUE,
    on=OVER,
    seen=MINE + "candidates exchanged",
    quotient=lambda call, values: _codes_of(call, values, lambda own, wide: ~(wide < own)),
    same_if="both scales give the same codes",
    admissible_if=FREE,
)
fault(
    "four over six: the other measure of the error",
    VALUE,
    on=OVER,
    seen="FlashInfer FLASHINFER_NVFP4_4OVER6_ERR",
    options=lambda options: options,
    recipe=lambda recipe: replace(
        recipe, candidates=next(c for c in type(recipe.candidates) if c is not recipe.candidates)
    ),
    same_if="both measures choose alike",
)


def _other_maximum(call: Call) -> float:
    """What a value becomes by the denominator of the other global scale."""
    return 256 / 448 if call.resolved["e4m3_max"] == 256 else 448 / 256


fault(
    "four over six: error over 6 times the other largest scale",
    VALUE,
    on=OVER,
    seen="FlashInfer ERROR_DENOM, TransformerEngine err_denom: E4M3_MAX 448 or 256",
    quotient=lambda call, values: _codes_of(call, values, _smaller, _other_maximum),
    scale=lambda call, scale: _scale_of(call, scale, _smaller, _other_maximum),
    same_if="both give the same",
)
fault(
    "four over six: scales saturate at 256",
    VALUE,
    on=OVER,
    same_if="no scale is above 256",
    seen=MINE + "TransformerEngine E4M3_MAX=256 bounds the global scale, the scale of a block by 448",
    needs=need(lambda call: call.resolved["e4m3_max"] == 256, "scales of up to 448"),
    scale=lambda scale: scale.clamp(max=256.0),
)


# --- columns and squares of MXFP8 ---------------------------------------------------------------------------------

TALL = of_class(Mxfp8QuantizeColumnwise)
ROW_TILE = 4  # blocks of 32 in the least tile of rows that torchao tunes over


def _fewer_between(scale: Tensor) -> Tensor:
    """Scales of the columns, whole tiles of rows apart; those of a partial tile under the next column's."""
    blocks, columns = scale.shape
    apart = blocks // ROW_TILE * ROW_TILE
    memory = torch.full((columns * blocks,), 2.0**-127, dtype=scale.dtype, device=scale.device)
    for column in range(columns):
        memory[column * apart : column * apart + blocks] = scale[:, column]
    return memory.reshape(columns, blocks).t().contiguous()


fault(
    "scales of neighbouring columns whole tiles of rows apart",
    INDEX,
    seen="pytorch/ao PR 4627",
    on=TALL,
    scale=_fewer_between,
    needs=need(
        lambda call: (blocks := call.inputs["x"].shape[0] // 32) > ROW_TILE and blocks % ROW_TILE,
        "the rows are whole tiles, or one",
    ),
    same_if="all scales are equal",
)
ROW_SCALED = Trait("takes a global scale of rows", lambda contract: GLOBAL_OF_ROWS in contract.inputs)


@fault(
    "amax of 32 columns where 32 rows are meant",
    VALUE,
    on=TALL,
    seen="TransformerEngine quantize_mxfp8.cuh: row-wise and column-wise scales exchanged",
    same_if="both have equal amax",
)
def amax_along_rows(amax: Amax) -> Tensor:
    x = amax.x.values.nan_to_num(nan=0.0).abs()
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 32))
    wide = torch.unflatten(padded, 1, (-1, 32)).amax(dim=2)
    each = wide.repeat_interleave(32, dim=1)[:, : x.shape[1]]
    return each[::32].reshape(amax.right.shape)


fault(
    "codes of the transpose",
    MOVEMENT,
    on=TALL,
    seen="torchao triton_to_mxfp8_dim1: column-major codes",
    write=entry("q", lambda q: q.view(torch.uint8).t().reshape(q.shape).contiguous().view(q.dtype)),
    same_if="the codes are symmetric",
)
fault(
    "amax of one row of 32",
    VALUE,
    on=BIG,
    seen=MINE + "1x32 scales where 32x32 are meant",
    amax=lambda amax: amax.blocks[:, :1].nan_to_num(nan=0.0).abs().amax(dim=(1, 3), keepdim=True),
    same_if="the first row of every block holds its amax",
)
fault(
    "amax of one column of 32",
    VALUE,
    on=BIG,
    seen=MINE + "32x1 scales where 32x32 are meant",
    amax=lambda amax: amax.blocks[..., :1].nan_to_num(nan=0.0).abs().amax(dim=(1, 3), keepdim=True),
    same_if="the first column of every block holds its amax",
)


def _kept_once(call: Call, memory: Tensor) -> Tensor:
    """The repeated bytes of a block once, zeros for the rest."""
    contract = call.contract
    assert isinstance(contract, BlockQuantiser)
    first = torch.zeros_like(contract.scales_of(memory, call))
    bytes_, across = contract.scales_of(memory, call), call.resolved["direction"] == "columnwise"
    places = (slice(None), slice(None, None, 32)) if across else (slice(None, None, 32), slice(None))
    first[places] = bytes_[places]
    return contract.memory(first, call)


fault(
    "scale of 32x32 published once",
    MOVEMENT,
    on=BIG,
    write=entry("scale", _kept_once),
    seen="TransformerEngine quantize_transpose_nvfp4.cuh: the scale is repeated for its 16 rows",
    same_if="every byte is 0",
)
fault(
    "bytes of the transpose of 32x32",
    INDEX,
    on=BIG,
    same_if="the scales are symmetric",
    seen="TransformerEngine: row-wise and column-wise scales exchanged",
    scale=lambda scale: scale.t().reshape(scale.shape),
)

several_rows = need(lambda call: call.inputs["global_scale"].numel() > 1, "one global scale")
fault(
    "{}",
    VALUE,
    on=ROW_SCALED,
    needs=several_rows,
    same_if="the rows have equal scales",
    over=(
        way(
            "global scale of the first row",
            lambda g: g[:1].expand_as(g).clone(),
            seen="FlashInfer fp4_quantize: a global scale of shape [1] or [M]",
        ),
        way("global scale of the next row", lambda g: g.roll(-1), family=INDEX, seen="NVIDIA/cutlass 2087"),
    ),
    read=lambda change: entry("global_scale", change),
)


# --- batches, shuffled rows, silu ----------------------------------------------------------------------------------

SHUFFLED = of_class(Nvfp4QuantizeShuffled)
more_matrices = need(lambda call: call.inputs["x"].shape[0] > 1, "one matrix")


def _as_one_matrix(call: Call, memory: Tensor) -> Tensor:
    """The scales of all matrices as those of one, in its tiles; bytes beyond the end are dropped."""
    contract = call.contract
    assert isinstance(contract, BlockQuantiser)
    scale = contract.scales_of(memory, call)
    wrong = stored(
        scale.t().contiguous() if isinstance(contract, ColumnsQuantiser) else scale, str(call.resolved["layout"])
    )
    written, most = torch.zeros_like(memory).flatten(), min(memory.numel(), wrong.numel())
    written[:most] = wrong[:most]
    return written.reshape(memory.shape)


in_tiles = need(lambda call: call.resolved["layout"] != "compact", "the scales are not in tiles")
fault(
    "scales of a batch as those of one matrix",
    INDEX,
    on=STACKED,
    needs=both(more_matrices, in_tiles),
    seen="FlashInfer bmm_mxfp8: rows of all matrices, or tiles of each",
    write=entry("scale", _as_one_matrix),
    same_if="rows are whole tiles",
)
fault(
    "scales of the next matrix of a batch",
    INDEX,
    on=STACKED,
    needs=more_matrices,
    seen="NVIDIA/cutlass 2087",
    write=entry("scale", lambda memory: memory.roll(-1, dims=0)),
    same_if="the matrices have equal scales",
)
fault(
    "codes of the next matrix of a batch",
    MOVEMENT,
    on=STACKED,
    needs=more_matrices,
    seen="sglang PR 28418",
    same_if="the matrices are equal",
    write=entry("q", lambda q: q.view(torch.uint8).roll(-1, dims=0).view(q.dtype)),
)

fault(
    "scales of a weight not transposed",
    INDEX,
    on=STACKED & POWERS,
    needs=in_tiles,
    same_if="one block down and across",
    seen="torchao _to_blocked_per_group_3d_layout: scales of (E, N/32, K) transposed before the tiles",
    write=entry("scale", lambda call, memory: _each_upright(call, memory)),
)


def _the_first_alone(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Codes and scales of the first matrix of a batch; zero bytes behind them."""
    written = {name: x.view(torch.uint8).clone() for name, x in outputs.items()}
    for x in written.values():
        x[1:] = 0
    return {name: x.view(outputs[name].dtype) for name, x in written.items()}


fault(
    "matrices of a batch behind the first not quantised",
    MOVEMENT,
    on=STACKED,
    needs=more_matrices,
    seen="TransformerEngine PR 2743: the rows of one matrix less the place among all",
    write=_the_first_alone,
    same_if="they are zero",
)
fault(
    "padding of the scales of a batch not written",
    MOVEMENT,
    on=STACKED,
    needs=in_tiles,
    seen="FlashInfer scaled_fp4_grouped_quantize: buffers are torch.empty",
    write=entry("scale", lambda call, memory: _unwritten_pads(call, memory)),
    same_if="there is no padding",
)
fault(
    "codes not shuffled",
    MOVEMENT,
    on=SHUFFLED,
    seen="FlashInfer nvfp4_quantize without do_shuffle",
    write=entry("q", lambda q: q[inverse_order(row_order(len(q)))]),
    same_if="the rows are equal",
)
fault(
    "scales not shuffled",
    INDEX,
    on=SHUFFLED,
    seen="FlashInfer nvfp4_quantize without do_shuffle",
    write=entry("scale", lambda call, memory: _unshuffled(call, memory)),
    same_if="the rows have equal scales",
)
fault(
    "rows shuffled the other way",
    MOVEMENT,
    on=SHUFFLED,
    seen=MINE + "an order taken for its inverse",
    write=entry("q", lambda q: _twice_back(q)),
    same_if="the rows are equal",
)


def _each_upright(call: Call, memory: Tensor) -> Tensor:
    """The bytes ``[N / 32, K]`` of each weight in tiles, in the memory of the transpose; bytes beyond the end
    are dropped."""
    contract = call.contract
    assert isinstance(contract, BlockQuantiser)
    e, _, k = call.inputs["x"].shape
    wrong = swizzle_scale(contract.scales_of(memory, call).reshape(e, -1, k))
    written, most = torch.zeros_like(memory), min(memory.shape[1], wrong.shape[1])
    written[:, :most] = wrong[:, :most]
    return written


def _unwritten_pads(call: Call, memory: Tensor) -> Tensor:
    contract = call.contract
    assert isinstance(contract, BlockQuantiser)
    pads = contract.padding(call)
    return memory if pads is None else torch.where(pads.to(memory.device), torch.full_like(memory, 0xFF), memory)


def _unshuffled(call: Call, memory: Tensor) -> Tensor:
    contract = call.contract
    assert isinstance(contract, BlockQuantiser)
    return stored(contract.scales_of(memory, call), str(call.resolved["layout"]))


def _twice_back(q: Tensor) -> Tensor:
    back = inverse_order(row_order(len(q)))
    return q[back][back]


def _halves_of(swap: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat(swap(*x.chunk(2, dim=-1)), dim=-1)


for name, swap, argument in (
    ("gate and up exchanged before NVFP4", lambda gate, up: (up, gate), "gate and up are equal"),
    ("silu left out before NVFP4", lambda gate, up: (torch.full_like(gate, 64.0), gate * up / 64.0), ""),
    ("up left out before NVFP4", lambda gate, up: (gate, torch.ones_like(up)), "every up is 1"),
    ("up of the next column before NVFP4", lambda gate, up: (gate, up.roll(-1, dims=-1)), ""),
    ("gate of the other sign before NVFP4", lambda gate, up: (-gate, up), ""),
):
    fault(
        name,
        VALUE,
        on=SILU,
        seen=MINE + "the two halves of [gate, up] taken for each other",
        read=entry("x", _halves_of(swap)),
        same_if=argument,
    )

# --- rows and FP8 ---------------------------------------------------------------------------------------------------

TOKENS = QUANTISERS & returns(ROW_SCALE)
rows = need(lambda call: call.inputs["x"].shape[0] > 1, "one row")
fault(
    "{}",
    VALUE,
    on=TOKENS,
    over=(
        way(
            "row scale of the previous row",
            lambda scale: scale.roll(1),
            family=INDEX,
            seen="NVIDIA/cutlass 2087",
            needs=rows,
            same_if="the rows have equal scales",
        ),
        way(
            "row scale inverted",
            lambda scale: torch.where(scale > 0, 1 / scale, scale),
            seen="vllm PR 36297: the inverse of a scale published",
        ),
        way(
            "row scale without its global factor",
            lambda call, scale: scale / call.inputs["global_scale"],
            seen="TensorRT-LLM fp4 quantise: a scale forgotten",
        ),
        way(
            "one scale for all rows",
            lambda scale: scale.nan_to_num(posinf=0.0).amax().expand_as(scale).clone(),
            seen=MINE + "the scale of the tensor",
            needs=rows,
            same_if="the rows have equal scales",
        ),
    ),
    write=lambda change: entry(ROW_SCALE, change),
)


@fault(
    "NaN scales of a row of zeros",
    VALUE,
    on=TOKENS,
    seen="FlashInfer nvfp4QuantAndPerTokenScaleKernel, fast path: R(0) times 0",
    needs=need(
        lambda call: bool((row_scales(call.inputs["x"], call.inputs["global_scale"]) == 0).any()), "no row is zero"
    ),
)
def scale_of_a_zero_row(call: Call, scale: Tensor) -> Tensor:
    dead = row_scales(call.inputs["x"], call.inputs["global_scale"]) == 0
    return torch.where(dead[:, None], torch.full_like(scale, torch.nan), scale)


OF_FP8 = of_class(OfFp8Quantiser)
fault(
    "six times the values",
    VALUE,
    on=OF_FP8 & POWERS,
    seen="FlashInfer cvt_warp_fp8_to_fp4 with UE8M0 and no global scale: 6 R(1)",
    amax=lambda amax: amax.right * 6,
    quotient=lambda values: values.altered(quotient=values.quotient * 6),
)
fault(
    "FP8 values quantised as they are",
    VALUE,
    on=OF_FP8 & TWO_LEVELS,
    seen=MINE + "6/global forgotten",
    amax=lambda call, amax: amax.right * decode(call.inputs["global_scale"]) / 6,
    admissible_if=FREE,
    needs=need(lambda call: float(call.inputs["global_scale"]) != 6.0, "the factor is 1"),
)

# --- experts --------------------------------------------------------------------------------------------------------

several = need(lambda call: len(_parts(call)) > 1, "one expert")


def _parts(call: Call) -> list[tuple[int, int, int]]:
    contract = call.contract
    assert isinstance(contract, ExpertQuantiser)
    return contract.experts(call.inputs, call.resolved)


fault(
    "{}",
    VALUE,
    on=EXPERTS & TWO_LEVELS,
    needs=several,
    same_if="the experts have equal scales",
    over=(
        way(
            "global scale of the first expert",
            lambda g: g[:1].expand_as(g).clone(),
            seen="FlashInfer scaled_fp4_grouped_quantize: docs say [1]",
        ),
        way("global scale of the next expert", lambda g: g.roll(-1), seen="vllm 20963: global scales of experts"),
    ),
    read=lambda change: entry("global_scale", change),
)


def _placed(where: Callable[[Call], list[int]]) -> Change:
    """The scale bytes of each expert put at other rows; bytes beyond the end are dropped."""

    def change(call: Call, memory: Tensor) -> Tensor:
        contract = call.contract
        assert isinstance(contract, ExpertQuantiser)
        scale, height = contract.scales_of(memory, call), contract.height(call.inputs, call.resolved)
        whole = torch.zeros(height, scale.shape[1], dtype=torch.uint8, device=memory.device)
        done = 0
        for (first, last, _), place in zip(_parts(call), where(call), strict=False):
            count = max(0, min(last - first, height - place))
            whole[place : place + count] = scale[done : done + count]
            done += last - first
        return contract.viewed(swizzle_scale(whole), call)

    return change


def _counts(call: Call) -> list[int]:
    return [last - first for first, last, _ in _parts(call)]


def _tight(call: Call, *, least: int = 0) -> list[int]:
    """Where the tiles of each expert begin, each with ``least`` rows at least."""
    counts, places = _counts(call), [0]
    for count in counts:
        places.append(places[-1] + align(max(count, least), HEIGHT))
    return places


def _offsets(call: Call) -> list[int]:
    offsets = [0]
    for count in _counts(call):
        offsets.append(offsets[-1] + count)
    return offsets


SAME = "both put every byte in the same place"
fault(
    "{}",
    INDEX,
    on=EXPERTS,
    needs=several,
    same_if=SAME,
    over=(
        way(
            "scales of experts placed tightly",
            _placed(_tight),
            seen="FlashInfer group_gemm_*_nt_groupwise against vLLM blockscale_offsets",
        ),
        way(
            "scales of experts placed as FlashInfer's grouped product reads them",
            _placed(lambda call: starts(_offsets(call), "flashinfer")),
            seen="FlashInfer group_gemm_*_nt_groupwise against vLLM blockscale_offsets",
        ),
        way(
            "scales of experts without rows between them",
            _placed(_offsets),
            seen="vllm 20963: blockscale_offsets without rounding",
        ),
    ),
    write=lambda change: entry("scale", change),
)


def _too_close(call: Call, memory: Tensor) -> Tensor:
    """The rows of tiles of each expert ``C // 4`` tiles apart, from where the expert begins; bytes beyond the end are
    dropped."""
    contract = call.contract
    assert isinstance(contract, ExpertQuantiser)
    scale, flat = contract.scales_of(memory, call), torch.zeros(memory.numel(), dtype=torch.uint8, device=memory.device)
    wide, done = align(scale.shape[1], 4), 0
    for first, last, place in _parts(call):
        made = tiles_too_close(scale[done : done + last - first], "128x4")
        room = flat[place * wide :][: len(made)]
        room.copy_(torch.where(made[: len(room)] > 0, made[: len(room)], room))
        done += last - first
    return contract.viewed(flat, call)


fault(
    "rows of scale tiles of an expert C // 4 tiles apart",
    INDEX,
    on=EXPERTS,
    seen="no public thread: C // 4 for ceil(C / 4)",
    write=entry("scale", _too_close),
    needs=need(
        lambda call: call.contract.shape_of_scales(call)[1] % 4 and max(_counts(call), default=0) > HEIGHT,  # type: ignore[attr-defined]
        "the columns are whole tiles, or no expert has several rows of them",
    ),
    same_if="what lies twice is equal",
)
fault(
    "an expert without rows takes a tile",
    INDEX,
    on=EXPERTS,
    seen="no public thread: at least one tile counted for each expert",
    write=entry("scale", _placed(lambda call: _tight(call, least=1))),
    needs=need(lambda call: 0 in _counts(call)[:-1], "every expert before the last has rows"),
    same_if=SAME,
)
fault(
    "tiles of an expert one too far",
    INDEX,
    on=EXPERTS,
    seen=MINE + "an inclusive sum of tiles",
    write=entry("scale", _placed(lambda call: [place + HEIGHT for _, _, place in _parts(call)])),
)


def _rows_lost(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The last row of every expert is left out."""
    contract = call.contract
    assert isinstance(contract, ExpertQuantiser)
    ends = {last - 1 for _, last, _ in _parts(call)}
    row = contract.rows(call)[0]
    dead = torch.tensor([int(r) in ends for r in row.tolist()], dtype=torch.bool, device=row.device)
    q, scale = contract.codes_of(outputs["q"], call).clone(), contract.scales_of(outputs["scale"], call)
    bits = q.view(torch.uint8).clone()
    bits[dead], scale[dead] = 0, 0
    return {"q": contract.codes(bits.view(q.dtype), call), "scale": contract.memory(scale, call)}


fault(
    "last row of every expert not quantised",
    MOVEMENT,
    on=EXPERTS,
    write=_rows_lost,
    seen="FlashInfer cvt_fp16_to_fp4_expert: mask compared with the row",
    same_if="the last rows are zero",
)
fault(
    "rows of the previous expert's buffer",
    INDEX,
    on=EXPERTS,
    seen=MINE + "expert offsets one early",
    read=entry("x", lambda x: x.roll(1, dims=0)),
    same_if="neighbours are equal",
)


# --- DeepGEMM's FP4 -------------------------------------------------------------------------------------------------

FP4 = of_class(PerTokenCastToFp4)
across = need(lambda call: call.inputs["x"].shape[1] > int(str(call.resolved["gran_k"])), "one group across")


fault(
    "{}",
    CAST,
    on=FP4,
    seen="DeepGEMM _quantize_to_fp4_e2m1 against cvt.rn.satfinite.e2m1x2",
    over=(
        way(
            "FP4 ties to the even code",
            fields(rounding=CodeRounding.NEAREST_EVEN),
            same_if="no quotient is a tie",
            admissible_if=NEAR,
        ),
        way("FP4 code of -0", fields(zero_sign=ZeroSign.KEPT), same_if="no value rounds to -0"),
    ),
    recipe=itself,
)
fault(
    "FP4 amax of the next group",
    INDEX,
    on=FP4,
    amax=lambda amax: amax.right.roll(-1, dims=2),
    needs=across,
    seen=MINE + "a group one late",
    same_if="neighbours have equal amax",
)
fault(
    "FP4 amax without its floor",
    VALUE,
    on=FP4,
    recipe=fields(amax_floor=0.0),
    seen="DeepGEMM clamp_min(1e-4)",
    same_if="no amax lies below the floor",
    admissible_if="every code of a block of zeros is 0 under any scale",
)
fault("FP4 scale of 448", VALUE, on=FP4, scale=lambda scale: scale * 6 / 448, seen="vllm PR 12134: another format")
fault(
    "FP4 scale of another rounding",
    VALUE,
    on=FP4,
    seen="DeepGEMM use_ue8m0",
    scale=lambda scale: torch.ldexp(torch.ones_like(scale), torch.frexp(scale)[1]),
    same_if="every scale is twice a power of two less than itself",
)
fault(
    "FP4 nibbles exchanged",
    MOVEMENT,
    on=FP4,
    seen="pith-train PR 74",
    codes=pairs_swapped,
    same_if="neighbours are equal",
)
fault(
    "FP4 signs lost",
    CAST,
    on=FP4,
    codes=lambda codes: codes & 7,
    seen="flashinfer PR 3932",
    same_if="no value is negative",
)

in_words = need(lambda call: call.resolved["use_packed_ue8m0"], "the scales are not packed")
uneven = both(in_words, need(lambda call: _groups(call) % 4, "four divides the groups of a row"))


def _groups(call: Call) -> int:
    return -(-call.inputs["x"].shape[1] // int(str(call.resolved["gran_k"])))


def _of_bytes(change: Callable[[Tensor], Tensor]) -> Change:
    """The exponent bytes ``[M, words, 4]`` of packed scales changed."""

    def changed(call: Call, scale: Tensor) -> Tensor:
        bytes_ = torch.unflatten(scale.contiguous().view(torch.uint8), 1, (-1, 4))
        return change(bytes_).flatten(1).contiguous().view(torch.int32)

    return changed


for name, change, when, argument in (
    ("packed exponents from the highest byte", lambda b: b.flip(2), in_words, "the bytes of every word are symmetric"),
    ("packed exponents of the next row", lambda b: b.roll(-1, dims=0), in_words, "the rows have equal scales"),
    ("packed exponents transposed", lambda b: b.transpose(0, 1).reshape(b.shape), in_words, "there is one word or row"),
    ("packed exponents one high", lambda b: b + 1, in_words, ""),
    ("zeros behind packed exponents", lambda b: torch.where(b == 127, 0, b), uneven, ""),
):
    fault(
        name,
        INDEX,
        on=FP4,
        write=entry("scale", _of_bytes(change)),
        needs=when,
        same_if=argument,
        seen=MINE + "DeepGEMM per_token_cast_to_fp4 with use_packed_ue8m0 packs a padded row",
    )
TURNED = of_class(TransposePackedFp4)
fault(
    "{}",
    MOVEMENT,
    on=TURNED,
    over=(
        way(
            "packed codes transposed byte by byte",
            lambda call, out: _bytewise(call),
            seen=MINE + "a transpose of the bytes",
        ),
        way("nibbles exchanged in the transpose", nibbles_swapped, seen="pith-train PR 74"),
        way(
            "odd rows of the transpose lost",
            lambda out: (out.view(torch.uint8) & 0xF).view(out.dtype),
            seen=MINE + "the low nibble alone written",
        ),
        way(
            "rows of the transpose in pairs exchanged",
            lambda out: torch.unflatten(out, 0, (-1, 2)).flip(1).flatten(0, 1),
            seen="pith-train PR 74",
        ),
    ),
    write=lambda change: entry("out", change),
)
fault(
    "-0 of packed codes lost in the transpose",
    CAST,
    on=TURNED,
    same_if="no code is -0",
    seen="DeepGEMM _quantize_to_fp4_e2m1: no code of -0",
    read=entry("q", lambda q: _without_minus_zero(q)),
)


def _bytewise(call: Call) -> Tensor:
    q = call.inputs["q"]
    rows = q.t().contiguous()  # [N/2, M]: two rows for one of the transpose, of half its width
    return rows.reshape(q.shape[1] * 2, q.shape[0] // 2)


def _without_minus_zero(q: Tensor) -> Tensor:
    bits = q.view(torch.uint8)
    low, high = bits & 0xF, bits >> 4
    plain = [torch.where(half == 8, 0, half) for half in (low, high)]
    return (plain[0] | plain[1] << 4).view(q.dtype)


FP4_BACK = of_class(CastBackFromFp4)
fault(
    "FP4 nibbles exchanged in reading",
    MOVEMENT,
    on=FP4_BACK,
    seen="pith-train PR 74",
    read=entry("q", nibbles_swapped),
)
fault(
    "FP4 scale of the previous group read",
    INDEX,
    on=FP4_BACK,
    seen="mlc-ai/TIRx-kernels PR 5",
    read=entry("scale", lambda scale: scale.roll(1, dims=1)),
    same_if="there is one group across",
)
fault(
    "FP4 scale of the previous row read",
    INDEX,
    on=FP4_BACK,
    seen="NVIDIA/cutlass 2087",
    read=entry("scale", lambda scale: scale.roll(1, dims=0)),
    same_if="there is one row",
)
fault(
    "FP4 signs lost in reading",
    CAST,
    on=FP4_BACK,
    seen="flashinfer PR 3932",
    write=entry("out", lambda out: out.abs()),
)
fault("FP4 scale not multiplied", VALUE, on=FP4_BACK, seen="pytorch 195751", read=entry("scale", ones_of))


# --- casts ----------------------------------------------------------------------------------------------------------

RELABEL, AGAIN, BACKWARD = of_class(BlockScalesToMxfp8), of_class(Fp8BlockToMxfp8), of_class(Mxfp8ToFp8Block)
blocks = need(lambda call: call.inputs[_block_scale(call)].shape[1] > 1, "one block across")


def _block_scale(call: Call) -> str:
    return next(name for name in ("scale", "block_scale", "mx_scale") if name in call.inputs)


for words, turn in (
    ("the previous block", lambda s: s.roll(1, dims=1)),
    ("the next row of blocks", lambda s: s.roll(-1, dims=0)),
):
    fault(
        f"block scale of {words} relabelled",
        INDEX,
        on=RELABEL,
        read=entry("scale", turn),
        seen="vllm-omni 5263",
        same_if="there is one block in that direction",
    )
    fault(
        f"block scale of {words} before requantising",
        INDEX,
        on=AGAIN,
        read=entry("block_scale", turn),
        seen="vllm-omni 5263",
        same_if="there is one block in that direction",
    )


def _relabelled(change: Callable[[Tensor], Tensor]) -> Change:
    """The scale bytes ``[M, C]`` changed in their layout."""

    def changed(call: Call, memory: Tensor) -> Tensor:
        m, k = call.inputs["x"].shape
        layout = str(call.resolved["layout"])
        return stored(change(loaded(memory, (m, k // 32), layout)), layout)

    return changed


for name, change in (
    ("byte of a block scale one high", lambda s: s + 1),
    ("a block scale repeated for its first 32 columns alone", lambda s: torch.where(_column(s) % 4 == 0, s, 0)),
    (
        "a block scale repeated twice instead of four times",
        lambda s: s[:, ::2].repeat_interleave(2, 1)[:, : s.shape[1]] if s.shape[1] % 4 == 0 else s.roll(1, dims=1),
    ),
    ("bytes of block scales across instead of down", lambda s: s.t().reshape(s.shape)),
):
    fault(
        name,
        INDEX,
        on=RELABEL,
        seen=MINE + "TransformerEngine swizzle_block_scaling",
        same_if=SAME,
        write=entry("out", _relabelled(change)),
    )
fault(
    "padding of relabelled scales not written",
    MOVEMENT,
    on=RELABEL,
    seen="vLLM scaled_fp4_quant 07c13c7",
    write=entry("out", lambda call, memory: _dirty(call, memory)),
    needs=need(lambda call: call.resolved["layout"] != "linear", "the scales are not in tiles"),
    same_if="no padding",
)


def _column(scale: Tensor) -> Tensor:
    return torch.arange(scale.shape[1], device=scale.device).expand_as(scale)


def _dirty(call: Call, memory: Tensor) -> Tensor:
    m, k = call.inputs["x"].shape
    ones = stored(torch.ones(m, k // 32, dtype=torch.uint8, device=memory.device), str(call.resolved["layout"]))
    return torch.where(ones == 1, memory, 0xFF)


fault(
    "{}",
    VALUE,
    on=AGAIN,
    over=(
        way("block scale not multiplied before requantising", ones_of, seen="pytorch 195751"),
        way(
            "block scale inverted before requantising",
            lambda s: 1 / s,
            seen="vllm PR 36297",
            same_if="every scale is 1",
        ),
    ),
    read=lambda change: entry("block_scale", change),
)

fault(
    "values between two casts in float16",
    CAST,
    on=AGAIN | BACKWARD,
    seen="TensorRT-LLM PR 14464",
    options=option(dtype="float16"),
    same_if="every value is one of float16",
    admissible_if="float16 keeps more bits than bfloat16 and moves no code",
)
fault(
    "values between two casts in bfloat16 instead of float32",
    CAST,
    on=AGAIN | BACKWARD,
    options=option(dtype="bfloat16"),
    seen="vLLM-Ascend fp8_block.py: the model's dtype",
    needs=need(lambda call: call.resolved["dtype"] == "float32", "float32 was not asked for"),
    same_if="every value is one of bfloat16, as a code of MXFP8 times a power of two is",
)

fault(
    "{}",
    VALUE,
    on=BACKWARD,
    over=(
        way("MX scale not multiplied before requantising", lambda s: torch.full_like(s, 127), seen="pytorch 195751"),
        way("MX scale one high before requantising", lambda s: s + 1, seen="DeepGEMM PR 112"),
    ),
    read=lambda change: entry("mx_scale", change),
)
fault(
    "scale bytes read row-major before requantising",
    INDEX,
    on=BACKWARD,
    seen="flashinfer 3604",
    read=lambda call, inputs: inputs | {"mx_scale": _as_rows(call, inputs["mx_scale"])},
    needs=need(lambda call: call.resolved["layout"] != "linear", "the scales are not in tiles"),
)
fault(
    "amax of the previous 128x128 block",
    INDEX,
    on=BACKWARD,
    seen="NVIDIA/cutlass 2087",
    amax=lambda amax: amax.right.roll(1, dims=2),
    same_if="one block across",
)
fault(
    "amax of 32 columns of a 128x128 block",
    VALUE,
    on=BACKWARD,
    seen=MINE + "the block of MXFP8",
    amax=lambda amax: amax.blocks[..., :32].nan_to_num(nan=0.0).abs().amax(dim=(1, 3), keepdim=True),
    same_if="the first 32 columns hold the amax",
)
fault(
    "quotients of 128x128 blocks truncated",
    CAST,
    on=BACKWARD,
    seen="flashinfer 5128",
    quotient=lambda values: values.altered(quotient=_shorter(values.quotient)),
    same_if="every quotient is a code",
)


def _shorter(quotient: Tensor) -> Tensor:
    """Three fraction bits kept."""
    significand, exponent = torch.frexp(quotient)
    return torch.ldexp(torch.trunc(significand * 16) / 16, exponent)


def _as_rows(call: Call, memory: Tensor) -> Tensor:
    m, k = call.inputs["x"].shape
    rows = memory.flatten()[: m * (k // 32)].reshape(m, k // 32)
    return stored(rows, str(call.resolved["layout"]))
