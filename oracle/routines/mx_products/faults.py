"""Faults of block-scaled products: where a scale is read, what a byte or a nibble means, alpha, groups, K, the store.

Stages are those of every product. A scale that is read at a wrong index (:class:`contract.Side`) is written there, so
that a right reader gets the value of the wrong read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oracle.numbers.formats import E2M1, E4M3FN, decode
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.routines.fault import (
    ARITHMETIC,
    CAST,
    INDEX,
    MOVEMENT,
    VALUE,
    Call,
    Change,
    Faults,
    WhyNot,
    both,
    entry,
    need,
    way,
)
from oracle.routines.ideas import itself, pairs_swapped, rolled
from oracle.routines.mutants import Sum, stale
from oracle.routines.mx.contract import LINEAR
from oracle.routines.mx_products.contract import (
    FLAT,
    PACKED,
    TIGHT,
    TILE,
    UE4M3,
    UE8M0,
    Fp8Fp4,
    MxProduct,
    ScaledGroupedMmMxKGroups,
    Side,
    group_starts,
    places,
    size_of,
)
from oracle.routines.mx_products.deep_gemm import GroupedFp8Fp4Psum, Turned
from oracle.routines.traits import GROUPED, Stated, Trait, of_class, takes
from oracle.tensorcore.predict import store
from oracle.truth.gemm import ScaledProduct, exact, rounded
from oracle.truth.layout import HEIGHTS, WIDTH, row_order


def _of_weight(contract: Stated) -> tuple[str, ...]:
    """The dims of the codes of b."""
    name = getattr(contract, "names", ("", ""))[1]
    return next((spec.dims for spec in contract.inputs if spec.name == name and spec.dims is not None), ())


PRODUCT = of_class(MxProduct).called("is a product of MX or NVFP4")
STACKED = PRODUCT & Trait("has a matrix b for each group", lambda c: len(_of_weight(c)) == 3)
IN_TILES = STACKED - of_class(Fp8Fp4)
GROUPS_OF_K = (PRODUCT & (GROUPED - STACKED)).called("has operands whose K lies in groups")
IN_COLUMNS = PRODUCT & Trait("has a b of columns", lambda c: c.b_columns)
ALPHAS = ("alpha", "global_scale_a", "global_scale_b")
WITH_ALPHA = (PRODUCT & (takes("alpha") | takes("global_scale_a"))).called("has a factor of the sum")
BIASED = PRODUCT & takes("bias")
# A fault is a row: what is wrong and where it was met; the change; when it shows.
FAULTS = Faults(PRODUCT)
fault = FAULTS.declare
MINE = "no public thread: "
EQUAL = "neighbours have equal scales"
LETTERS = "AB"


def _contract(call: Call) -> MxProduct:
    assert isinstance(call.contract, MxProduct)
    return call.contract


def _side(call: Call, part: int) -> Side:
    return _contract(call).sides(call.inputs, call.resolved)[part]


def _product(call: Call) -> ScaledProduct:
    return call.parts[0].product


def _codes(call: Call, part: int) -> Tensor:
    return _contract(call).matrix(call.inputs, part)


# --- where a scale is read ------------------------------------------------------------------------------------------


def _read_at(part: int, wrong: Callable[[Side], Tensor]) -> Callable[[Call, dict[str, Tensor]], dict[str, Tensor]]:
    """READ: every scale of an operand read at another index; an index past the end wraps around."""

    def change(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        side = _side(call, part)
        memory = inputs[side.scale]
        raw = side.flat(memory).clone()
        raw[side.at] = raw[wrong(side) % side.size]
        return inputs | {side.scale: raw.view(memory.dtype).reshape(memory.shape)}

    return change


def _of_side(part: int, holds: Callable[[Side], bool], otherwise: str) -> WhyNot:
    return need(lambda call: holds(_side(call, part)), otherwise)


def _grid(side: Side) -> tuple[Tensor, Tensor]:
    return torch.arange(side.rows, device="cpu")[:, None], torch.arange(side.columns, device="cpu")[None, :]


def _plain_rows(side: Side) -> Tensor:
    """Rows of a 128x4 tile in their order, whichever tile it is."""
    inside = side.at % 512
    row = inside // 16 + inside % 16 // WIDTH * 32
    return side.at - inside + row * WIDTH + inside % WIDTH


def _tiles_down(side: Side) -> Tensor:
    """Tiles column by column."""
    (m, c), inside = _grid(side), places(HEIGHTS[side.tile], WIDTH, side.tile)
    height = HEIGHTS[side.tile]
    return (c // WIDTH * -(-side.rows // height) + m // height) * height * WIDTH + inside[m % height, c % WIDTH]


def _fewer_across(side: Side) -> Tensor:
    """Whole tiles across counted, the ragged one left out."""
    (m, c), inside = _grid(side), places(HEIGHTS[side.tile], WIDTH, side.tile)
    height = HEIGHTS[side.tile]
    return (m // height * (side.columns // WIDTH) + c // WIDTH) * height * WIDTH + inside[m % height, c % WIDTH]


def _behind_the_last(side: Side) -> Tensor:
    """The padding beside the last column for that column."""
    at = side.at.clone()
    at[:, -1] += 1
    return at


def _from_the_highest(side: Side) -> Tensor:
    """The bytes of every word from the other end."""
    return side.at - side.at % WIDTH + WIDTH - 1 - side.at % WIDTH


def _words_row_by_row(side: Side) -> Tensor:
    """Words of one row one behind the other, where those of one block are."""
    columns = -(-side.columns // WIDTH)
    word = side.at // WIDTH
    return (word % side.rows * columns + word // side.rows) % (side.size // WIDTH) * WIDTH + side.at % WIDTH


def _words_unpadded(side: Side) -> Tensor:
    """Columns of words one behind the other, without the rows that pad them."""
    m, c = _grid(side)
    return (c // WIDTH * side.rows + m) * WIDTH + c % WIDTH


def _pairs(at: Tensor) -> Tensor:
    return at[:, ::2].repeat_interleave(2, dim=1)[:, : at.shape[1]]


for part, letter in enumerate(LETTERS):
    tiled = _of_side(part, lambda side: side.tile in HEIGHTS, "the scales are not in tiles")
    words = _of_side(part, lambda side: side.tile == PACKED, "the scales are not packed in words")
    tall = _of_side(part, lambda side: side.tile == TILE and side.rows > 1, "rows are not interleaved")
    across = _of_side(part, lambda side: side.columns > 1, "one block across")
    down = _of_side(part, lambda side: side.rows > 1, "one row")
    ragged = _of_side(part, lambda side: side.tile != LINEAR and side.columns % WIDTH > 0, "no padding across")
    grid = _of_side(
        part,
        lambda side: side.tile in HEIGHTS and side.columns > WIDTH and side.rows > HEIGHTS[side.tile],
        "there are not several tiles in both directions",
    )
    for name, wrong, when, seen, same in (
        (
            "scale bytes row-major where tiles are meant",
            lambda s: places(s.rows, s.columns, LINEAR),
            tiled,
            "PyTorch _scaled_mm: a linear scale of equal size is accepted",
            "one block of one row",
        ),
        (
            "scale bytes in tiles of the other height",
            lambda s: places(s.rows, s.columns, FLAT if s.tile == TILE else TILE),
            tiled,
            "flashinfer 3604",
            "the first rows and columns lie alike",
        ),
        ("rows of 128x4 scale tiles not interleaved", _plain_rows, tall, "triton PR 10382", "one row"),
        ("scale tiles column by column", _tiles_down, grid, "FlashInfer group placement against tight tiles", EQUAL),
        (
            "scale tiles across rounded down",
            _fewer_across,
            both(ragged, grid),
            "vLLM nvfp4 scale padding: columns to ceil(C, 4) / 4",
            EQUAL,
        ),
        (
            "padding of the scales read for the last block",
            _behind_the_last,
            ragged,
            "flashinfer PR 3650, 2861",
            "the padding holds the scale",
        ),
        ("block scale of the previous row", lambda s: s.at.roll(1, dims=0), down, "NVIDIA/cutlass 2087", EQUAL),
        ("block scale of the next row", lambda s: s.at.roll(-1, dims=0), down, "NVIDIA/cutlass 2087", EQUAL),
        (
            "block scale of the previous block",
            lambda s: s.at.roll(1, dims=1),
            across,
            "mlc-ai/TIRx-kernels PR 5",
            EQUAL,
        ),
        ("block scale of the next block", lambda s: s.at.roll(-1, dims=1), across, "mlc-ai/TIRx-kernels PR 5", EQUAL),
        (
            "block scale of the first block for all",
            lambda s: s.at[:, :1].expand_as(s.at),
            across,
            MINE + "a scale loaded before the loop over K",
            EQUAL,
        ),
        (
            "block scale of the first row for all",
            lambda s: s.at[:1].expand_as(s.at),
            down,
            MINE + "a scale loaded by one lane and shared",
            EQUAL,
        ),
        (
            "one block scale for two blocks",
            lambda s: _pairs(s.at),
            across,
            MINE + "blocks of 32 where 16 are meant",
            EQUAL,
        ),
        (
            "block scales counted by four",
            lambda s: s.at[:, torch.arange(s.columns, device=s.at.device) % WIDTH],
            _of_side(part, lambda side: side.columns > WIDTH, "at most four blocks across"),
            "tile-ai/tilelang 2644: the number of a scale modulo 4",
            EQUAL,
        ),
        (
            "words of exponents in columns of the rows that are not padded",
            _words_unpadded,
            both(words, _of_side(part, lambda side: side.columns > WIDTH and side.rows % 4 > 0, "whole columns")),
            "ROCm/rocm-libraries PR 12232: the stride over K of the raw rows",
            EQUAL,
        ),
        (
            "block scales of the rows exchanged by 32",
            lambda s: s.at.roll(32, dims=0),
            _of_side(part, lambda side: side.rows > 32, "at most 32 rows"),
            MINE + "the four row groups of a tile taken in another order",
            EQUAL,
        ),
        ("exponents of a word from the highest byte", _from_the_highest, words, "TransformerEngine PR 2589", EQUAL),
        (
            "first exponent of a word for all four",
            lambda s: s.at - s.at % WIDTH,
            both(words, across),
            MINE + "DeepGEMM passes the number of the byte to each instruction",
            EQUAL,
        ),
        (
            "words of exponents with the strides of the other order",
            _words_row_by_row,
            both(words, _of_side(part, lambda side: side.columns > WIDTH and side.rows > 1, "one word of a row")),
            MINE + "DeepGEMM get_mn_major_tma_aligned_packed_ue8m0_tensor: words lie in columns",
            EQUAL,
        ),
    ):
        fault(f"{letter}: {name}", INDEX, seen=seen, read=_read_at(part, wrong), needs=when, same_if=same)


def _recoded(part: int, change: Callable[[Tensor], Tensor]) -> Change:
    """READ: the codes ``[R, K]``, one each, of an operand; uint8 for both widths."""

    def apply(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        contract = _contract(call)
        codes = change(contract.matrix(inputs, part).contiguous().view(torch.uint8))
        return inputs | {contract.names[part]: contract.given(inputs, part, codes)}

    return apply


# --- groups ---------------------------------------------------------------------------------------------------------


several = need(lambda call: len(call.parts) > 1, "one group has rows")


fault(
    "codes of the next expert's weight",
    MOVEMENT,
    seen="sglang PR 28418",
    on=STACKED,
    needs=several,
    read=lambda call, inputs: entry(_contract(call).names[1], rolled(-1))(call, inputs),
)


def _exchanged(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each operand by the scales of the other."""
    a, b = (_side(call, part).scale for part in (0, 1))
    return inputs | {a: inputs[b], b: inputs[a]}


def _alike(call: Call) -> bool:
    a, b = (_side(call, part) for part in (0, 1))
    memory = [call.inputs[side.scale] for side in (a, b)]
    return a.at.shape == b.at.shape and a.tile == b.tile and len({(x.shape, x.dtype, x.stride()) for x in memory}) == 1


fault(
    "block scales of a and b exchanged",
    INDEX,
    seen="NVIDIA/CUDALibrarySamples 248",
    read=_exchanged,
    needs=need(_alike, "the scales of a and b are of two shapes"),
    same_if="they are equal",
)


def _weights_next(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every weight's scales those of the next one."""
    side, count = _side(call, 1), inputs[_contract(call).names[1]].shape[0]
    moved = replace(side, at=side.at.roll(-(side.rows // count), dims=0))
    return _read_at(1, lambda _: moved.at)(call, inputs)


fault(
    "block scales of the next expert's weight",
    INDEX,
    seen="flashinfer 2595",
    on=STACKED,
    needs=several,
    read=_weights_next,
    same_if=EQUAL,
)
fault(
    "alpha of the next expert",
    VALUE,
    seen=MINE + "one alpha loaded for a tile of two experts",
    on=WITH_ALPHA & STACKED,
    read=lambda inputs: inputs | {name: inputs[name].roll(-1) for name in ALPHAS if name in inputs},
    needs=both(several, need(lambda call: any(name in call.inputs for name in ALPHAS), "there is no alpha")),
)


def _at_the_border(first: bool) -> Callable[[Call, Tensor], Tensor]:
    """WRITE: the first (last) row of every group but the first (last) against the weight of its neighbour."""

    def change(call: Call, out: Tensor) -> Tensor:
        written = out.clone()
        for before, after in zip(call.parts, call.parts[1:], strict=False):
            own, other = (after, before) if first else (before, after)
            at = 0 if first else own.product.M - 1
            product = replace(own.product.rows(at, at + 1), b=other.product.b, b_scale=other.product.b_scale)
            assert own.rows is not None
            written[own.rows[at]] = store(rounded(product, exact(product), torch.float32), out.dtype)[0]
        return written

    return change


for name, first in (
    ("first row of a group meets the weight of the group before", True),
    ("last row of a group meets the weight of the next group", False),
):
    fault(
        name,
        MOVEMENT,
        seen="DeepGEMM 37: an expert's border inside a tile",
        on=STACKED,
        write=_at_the_border(first),
        needs=several,
    )


def _row_by_row(call: Call, side: Side) -> Tensor:
    """One tiled matrix of the rows in order, without a gap between groups."""
    return places(side.rows, side.columns, TILE)


def _gaps_of_flashinfer(call: Call, side: Side) -> Tensor:
    """Groups, those without rows too, at FlashInfer's starts; an index past the end wraps around."""
    ends, begin = call.inputs[str(call.contract.groups)].tolist(), 0
    pieces = [side.at[:0]]
    for start, end in zip(group_starts([0, *ends]), ends, strict=False):
        if end > begin:
            pieces.append(places(start + end - begin, side.columns, TILE)[start:])
        begin = end
    return torch.cat(pieces)


def _tight(call: Call, side: Side) -> Tensor:
    """Each group in tiles of its own, one behind the other."""
    pieces, start = [], 0
    for part in call.parts:
        pieces.append(start + places(part.product.M, side.columns, TILE))
        start += size_of(part.product.M, side.columns, TILE)
    return torch.cat(pieces)


def _placed(wrong: Callable[[Call, Side], Tensor]) -> Change:
    def change(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return _read_at(0, lambda side: wrong(call, side))(call, inputs)

    return change


def _differs(wrong: Callable[[Call, Side], Tensor]) -> WhyNot:
    return need(
        lambda call: not torch.equal(wrong(call, _side(call, 0)) % _side(call, 0).size, _side(call, 0).at),
        "both placements are one here",
    )


for name, elsewhere, on in (
    ("scales of the groups without gaps", _row_by_row, IN_TILES),
    ("scales of the groups placed tightly where FlashInfer's starts are meant", _tight, IN_TILES - TIGHT),
    ("scales of the groups at FlashInfer's starts where tight ones are meant", _gaps_of_flashinfer, IN_TILES & TIGHT),
):
    fault(
        name,
        INDEX,
        seen="FlashInfer group placement against tight tiles of torch and vLLM",
        on=on,
        read=_placed(elsewhere),
        needs=both(several, _differs(elsewhere)),
        same_if=EQUAL,
    )


# --- groups of K, shuffled rows ---------------------------------------------------------------------------------------


def _one_matrix(side: Side) -> Tensor:
    """The blocks of all groups as one matrix in tiles."""
    return places(side.rows, side.columns, TILE)


for part, letter in enumerate(LETTERS):
    fault(
        f"{letter}: scales of all groups of K in one matrix of tiles",
        INDEX,
        on=of_class(ScaledGroupedMmMxKGroups),
        same_if=EQUAL,
        seen="FlashInfer group placement against tight tiles of torch and vLLM",
        read=_read_at(part, _one_matrix),
        needs=_of_side(part, lambda side: not torch.equal(_one_matrix(side), side.at), "both are one here"),
    )


@fault(
    "K of a group begins at 0",
    MOVEMENT,
    seen=MINE + "the first offset taken for all",
    on=GROUPS_OF_K,
    needs=several,
)
def write_from_zero(call: Call, out: Tensor) -> Tensor:
    """Every group adds what the groups before it have."""
    written, total = out.clone(), torch.zeros_like(out[: call.parts[0].product.M], dtype=torch.float32)
    for part in call.parts:
        assert part.rows is not None
        total = total + out[part.rows].to(torch.float32)
        written[part.rows] = total.to(out.dtype)
    return written


@fault(
    "groups of K written one place on",
    INDEX,
    on=GROUPS_OF_K,
    needs=several,
    seen=MINE + "empty groups left out of the count",
)
def write_one_on(call: Call, out: Tensor) -> Tensor:
    """The results of the groups with K exchanged in a ring."""
    written, rows = out.clone(), [part.rows for part in call.parts]
    for own, other in zip(rows, rows[1:] + rows[:1], strict=True):
        assert own is not None and other is not None
        written[own] = out[other]
    return written


# --- transposed operands, groups by their ends ----------------------------------------------------------------------


def _in_storage_order(codes: Tensor) -> Tensor:
    return codes.t().contiguous().reshape(codes.shape)


def _is_turned(part: int) -> WhyNot:
    def holds(call: Call) -> bool:
        return "ab"[part] in getattr(call.contract, "turned", ()) or (part == 1 and call.contract.b_columns)

    return need(holds, "it is not transposed")


for part, letter in enumerate(LETTERS):
    fault(
        f"{letter}: transposed codes read as they lie",
        MOVEMENT,
        on=of_class(Turned) | IN_COLUMNS if letter == "B" else of_class(Turned),
        needs=_is_turned(part),
        seen="DeepGEMM fp8_gemm_nn: a transposed view handed to a kernel of K-major operands",
        read=_recoded(part, _in_storage_order),
    )
    fault(
        f"{letter}: transposed scales read as they lie",
        INDEX,
        on=of_class(Turned),
        same_if=EQUAL,
        needs=both(
            _is_turned(part),
            _of_side(part, lambda side: side.columns > 1 and side.rows > 1, "one row or block of scales"),
        ),
        seen="DeepGEMM fp8_gemm_nn: a transposed view handed to a kernel of K-major operands",
        read=_read_at(part, lambda side: side.at.t().reshape(side.at.shape)),
    )


@fault(
    "groups begin at multiples of 256 rows",
    INDEX,
    on=of_class(GroupedFp8Fp4Psum),
    seen="DeepGEMM get_mk_alignment_for_contiguous_layout: the alignment can be set",
    needs=need(
        lambda call: any(int(part.rows[0]) % 256 for part in call.parts if part.rows is not None),
        "every group begins at a multiple of 256",
    ),
)
def write_from_256(call: Call, out: Tensor) -> Tensor:
    written, old = out.clone(), stale(call, out)
    for part in call.parts:
        assert part.rows is not None
        late = part.rows[part.rows < -(-int(part.rows[0]) // 256) * 256]
        written[late] = old[late]
    return written


shuffled = need(lambda call: bool(call.resolved.get("shuffled")), "the weight is not shuffled")


def _unshuffled(product: ScaledProduct) -> ScaledProduct:
    """The weight in storage order."""
    return product.take_columns(row_order(product.N))


fault(
    "{}",
    MOVEMENT,
    on=takes("shuffled"),
    seen="FlashInfer mm_fp4: the trtllm backend requires a shuffled weight, the others a plain one",
    needs=shuffled,
    over=(
        way("shuffled weight multiplied as it lies", _unshuffled),
        way(
            "codes of a shuffled weight in order, its scales as they lie",
            lambda product: replace(product, b_scale=_unshuffled(product).b_scale),
            family=INDEX,
            same_if=EQUAL,
        ),
    ),
    product=itself,
)


# --- what a scale means ---------------------------------------------------------------------------------------------


def _scales(part: int, change: Callable[[Tensor], Tensor]) -> Callable[[ScaledProduct], ScaledProduct]:
    """PRODUCT: float32 scales that ``change`` makes of the scale tensor."""
    name = ("a_scale", "b_scale")[part]

    def product(product: ScaledProduct) -> ScaledProduct:
        return replace(product, **{name: change(getattr(product, name)).to(torch.float32)})  # type: ignore[arg-type]

    return product


def _values(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda scale: change(decode(scale))


def _bytes(scale: Tensor) -> Tensor:
    return scale.contiguous().view(torch.uint8)


def _as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda scale: decode(_bytes(scale).view(dtype))


def _any_scale(part: int, holds: Callable[[Tensor], Tensor], missing: str) -> WhyNot:
    return need(
        lambda call: any(bool(holds(decode((p.product.a_scale, p.product.b_scale)[part])).any()) for p in call.parts),
        missing,
    )


for part, letter in enumerate(LETTERS):
    powers = _of_side(part, lambda side: side.dtype is UE8M0, "the scales are not E8M0")
    fractions = _of_side(part, lambda side: side.dtype is UE4M3, "the scales are not E4M3")
    nan = _any_scale(part, torch.isnan, "no scale is NaN")
    tiny = _any_scale(part, lambda s: (s > 0) & (s < E4M3FN.min_normal), "no scale is subnormal")
    many = _any_scale(part, lambda s: s != 1.0, "every scale is 1")
    for name, change, when, seen in (
        ("block scales left out", _values(torch.ones_like), many, "pytorch 195751"),
        ("block scales multiplied twice", _values(lambda s: s * s), many, "vllm PR 36297"),
        ("block scales divide", _values(lambda s: 1.0 / s), many, "vllm PR 36297"),
        (
            "bytes of block scales multiplied as integers",
            lambda scale: _bytes(scale).double(),
            _of_side(part, lambda side: side.dtype is not torch.float32, "the scales are float32"),
            "ml-explore/mlx 3762",
        ),
        (
            "scale exponent read with a bias of 128",
            _values(lambda s: s * 0.5),
            powers,
            MINE + "the bias of a signed byte",
        ),
        (
            "E8M0 byte 255 read as infinity",
            _values(lambda s: s.nan_to_num(nan=torch.inf)),
            both(powers, nan),
            "FlashInfer mxfp8_dequantize_host: byte << 23",
        ),
        (
            "NaN of a block scale read as a number",
            _values(lambda s: s.nan_to_num(nan=480.0)),
            nan,
            MINE + "a table of values that ends below NaN",
        ),
        (
            "E8M0 scales read as E4M3",
            _as(UE4M3),
            powers,
            "FlashInfer e2m1_and_ufp8sf_scale_to_float: ufp8_type 1 for 0",
        ),
        (
            "E4M3 scales read as E8M0",
            _as(UE8M0),
            fractions,
            "FlashInfer e2m1_and_ufp8sf_scale_to_float: ufp8_type 0 for 1",
        ),
        ("E4M3 scales read as E5M2", _as(torch.float8_e5m2), fractions, "vllm PR 12134"),
        (
            "subnormal block scales flushed to zero",
            _values(lambda s: torch.where(s < E4M3FN.min_normal, 0.0, s)),
            both(fractions, tiny),
            MINE + "a cast under flush-to-zero",
        ),
        (
            "block scales rounded to powers of two",
            _values(lambda s: 2.0 ** (torch.frexp(s)[1] - 1).double() * (s > 0)),
            fractions,
            "vLLM nvfp4_utils.cuh with UE8M0_SF",
        ),
    ):
        fault(
            f"{letter}: {name}",
            VALUE,
            seen=seen,
            product=_scales(part, change),
            needs=when,
            same_if="infinities of both signs, and times 0, are NaN too" if "infinity" in name else "",
        )


# --- what a code means ----------------------------------------------------------------------------------------------


def _sides_codes(part: int, change: Callable[[Tensor], Tensor]) -> Callable[[ScaledProduct], ScaledProduct]:
    """PRODUCT: values that the codes of an operand are wrongly decoded to, carried as float16."""
    name = "ab"[part]

    def product(product: ScaledProduct) -> ScaledProduct:
        codes = to_dtype(
            change(getattr(product, name)), torch.float16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF
        )
        return replace(product, **{name: codes})  # type: ignore[arg-type]

    return product


def _nibbles(codes: Tensor) -> Tensor:
    """Signed integers of four bits."""
    return (codes.to(torch.float64) + 8) % 16 - 8


def _e2m1(codes: Tensor) -> Tensor:
    return decode(codes, E2M1)


def _halved_twice(codes: Tensor) -> Tensor:
    half = codes.shape[1] // 2
    return torch.cat([codes[:, :half], codes[:, half // 2 : half // 2 + half]], dim=1)


def _of_codes(part: int, holds: Callable[[Tensor], bool], otherwise: str) -> WhyNot:
    return need(lambda call: holds(_codes(call, part)), otherwise)


def _nan_code(part: int) -> WhyNot:
    return need(
        lambda call: bool(
            torch.isnan(_product(call).left.value() if part == 0 else _product(call).right.value()).any()
        ),
        "no code is NaN",
    )


for part, letter in enumerate(LETTERS):
    four = _of_codes(part, lambda codes: codes.dtype is torch.uint8, "the codes have eight bits")
    eight = _of_codes(part, lambda codes: codes.dtype is not torch.uint8, "the codes have four bits")
    e4m3 = _of_codes(part, lambda codes: codes.dtype is torch.float8_e4m3fn, "the codes are not E4M3")
    has_nan = _nan_code(part)
    fault(
        f"{letter}: nibbles of a byte exchanged",
        MOVEMENT,
        seen="pith-train PR 74",
        read=_recoded(part, pairs_swapped),
        needs=four,
        same_if="the two codes of every byte are equal",
    )
    fault(
        f"{letter}: neighbouring codes exchanged",
        MOVEMENT,
        seen="pith-train PR 74",
        read=_recoded(part, pairs_swapped),
        needs=eight,
        same_if="the two codes of every pair are equal",
    )
    fault(
        f"{letter}: codes of the next row",
        MOVEMENT,
        seen="NVIDIA/cutlass 2087",
        read=_recoded(part, rolled(-1)),
        needs=_of_codes(part, lambda codes: codes.shape[0] > 1, "one row"),
    )
    fault(
        f"{letter}: codes of the next block",
        MOVEMENT,
        seen="mlc-ai/TIRx-kernels PR 5",
        read=_recoded(part, rolled(-16, 1)),
        needs=_of_codes(part, lambda codes: codes.shape[1] > 16, "one block"),
    )
    fault(
        f"{letter}: codes of the second half of K from the middle of the first",
        MOVEMENT,
        seen="hw-native-sys/PTOAS 1060: the first column of packed codes halved twice",
        read=_recoded(part, _halved_twice),
        needs=both(four, _of_codes(part, lambda codes: codes.shape[1] % 4 == 0, "K is no multiple of 4")),
    )
    for name, change, when, seen in (
        ("E2M1 codes read as integers", _nibbles, four, MINE + "int4 kernels fed with FP4 weights"),
        (
            "E2M1 subnormal read as 0",
            lambda c: torch.where((c & 7) == 1, 0.0, _e2m1(c)),
            four,
            MINE + "a decoder without the subnormal",
        ),
        (
            "E2M1 subnormal decoded as a normal",
            lambda c: torch.where((c & 7) == 1, _e2m1(c) * 1.5, _e2m1(c)),
            four,
            MINE + "(1 + f/2) 2^-1 for the exponent field 0",
        ),
        ("E2M1 codes saturate at 4", lambda c: _e2m1(c).clamp(-4.0, 4.0), four, MINE + "a table of seven magnitudes"),
        ("sign of E2M1 codes lost", lambda c: _e2m1(c).abs(), four, "flashinfer PR 3932"),
        ("E4M3 codes read as E5M2", lambda c: decode(c.contiguous().view(torch.float8_e5m2)), e4m3, "vllm PR 12134"),
        (
            "E4M3 subnormals flushed to zero",
            lambda c: torch.where(decode(c).abs() < E4M3FN.min_normal, 0.0, decode(c)),
            e4m3,
            MINE + "a conversion under flush-to-zero",
        ),
        ("NaN of E4M3 read as 480", lambda c: decode(c).nan_to_num(nan=480.0), both(e4m3, has_nan), "vllm PR 12134"),
    ):
        fault(
            f"{letter}: {name}",
            CAST,
            seen=seen,
            product=_sides_codes(part, change),
            needs=when,
            same_if="no such code meets another that is not zero",
        )


# --- K --------------------------------------------------------------------------------------------------------------


def _kept(stop: Callable[[int], int], start: Callable[[int], int] = lambda k: 0) -> Callable[[Sum], Tensor]:
    """SUM: the products from ``start`` to ``stop`` alone."""

    def change(total: Sum) -> Tensor:
        product = total.product
        first, last = start(product.K), stop(product.K)
        piece = _piece(product, first, last) if last > first else _of_zeros(product)
        return total.right(replace(piece, bias=product.bias, alpha=product.alpha, c=product.c))

    return change


def _of_zeros(product: ScaledProduct) -> ScaledProduct:
    """No product at all: zeros for the codes of ``a``."""
    return replace(product, a=torch.zeros_like(_bytes(product.a)).view(product.a.dtype))


def _piece(product: ScaledProduct, start: int, stop: int) -> ScaledProduct:
    """The columns from ``start`` to ``stop`` (borders of blocks, or the end) without bias and alpha."""
    first, last = start // product.block, -(-stop // product.block)
    return replace(
        product,
        a=product.a[:, start:stop],
        b=product.b[:, start:stop],
        a_scale=product.a_scale[:, first:last],
        b_scale=product.b_scale[:, first:last],
        bias=None,
        alpha=None,
        c=None,
    )


def _finished(product: ScaledProduct, acc: Tensor) -> Tensor:
    """Alpha, bias and summand of a float32 sum."""
    if product.alpha is not None:
        acc = acc * product.alpha.to(torch.float32).prod()
    if product.c is not None:
        return store(acc, product.c.dtype).to(torch.float32) + product.c.to(torch.float32)
    return acc if product.bias is None else acc + decode(product.bias).to(torch.float32)


def _running(dtype: torch.dtype) -> Callable[[Sum], Tensor]:
    """SUM: what was added up kept in ``dtype`` after every 64 products."""

    def change(total: Sum) -> Tensor:
        product = total.product
        acc = torch.zeros((product.M, product.N), dtype=torch.float32, device=product.a.device)
        for start in range(0, product.K, 64):
            piece = _piece(product, start, min(start + 64, product.K))
            acc = store(acc + total.right(piece), dtype).to(torch.float32)
        return _finished(product, acc)

    return change


def _twice(total: Sum) -> Tensor:
    """The first 64 products added again."""
    product = total.product
    bare = total.right(replace(product, bias=None, alpha=None, c=None))
    return _finished(product, bare + total.right(_piece(product, 0, min(64, product.K))))


def _run_on(total: Sum) -> Tensor:
    """The first 128 products of the next row of both operands added behind the last of each."""
    product = total.product
    bare = total.right(replace(product, bias=None, alpha=None, c=None))
    piece = _piece(product, 0, min(128, product.K))
    following = replace(
        piece,
        a=rolled(-1)(piece.a),
        b=rolled(-1)(piece.b),
        a_scale=rolled(-1)(piece.a_scale),
        b_scale=rolled(-1)(piece.b_scale),
    )
    return _finished(product, bare + total.right(following))


deep = need(lambda call: _product(call).K > 64, "K is at most 64")
tail = need(lambda call: _product(call).K % 128 > 0 and _product(call).K > 128, "K has no tail of a tile of 128")
fault(
    "{}",
    MOVEMENT,
    seen="flashinfer 2861",
    over=(
        way(
            "last block of K left out",
            sum=lambda total: _kept(lambda k: (k - 1) // total.product.block * total.product.block)(total),
            needs=deep,
        ),
        way("tail of K behind whole tiles of 128 left out", sum=_kept(lambda k: k // 128 * 128), needs=tail),
    ),
)
fault("first 64 of K left out", MOVEMENT, seen="DeepGEMM 392", needs=deep, sum=_kept(lambda k: k, lambda k: 64))
fault(
    "K runs on into the next row by a tile of 128",
    MOVEMENT,
    seen="NVIDIA/cutlass 3568: whole buffers of stages are consumed",
    sum=_run_on,
    needs=_of_side(0, lambda side: side.rows > 1, "there is one row"),
)
fault("first 64 of K added twice", MOVEMENT, seen=MINE + "two splits of K that overlap", needs=deep, sum=_twice)

for dtype, word, seen in ((torch.bfloat16, "bfloat16", "H200 mutants"), (torch.float16, "float16", "cutlass PR 3149")):
    fault(
        f"block-scaled running sum kept in {word}",
        ARITHMETIC,
        seen=seen,
        sum=_running(dtype),
        needs=deep,
        same_if=f"every partial sum is a {word} value",
    )


@fault(
    "scales applied once after the sum",
    ARITHMETIC,
    seen="DeepGEMM 37",
    needs=need(lambda call: _product(call).B > 1, "one block"),
    same_if="every block of a row has one scale",
)
def product_of_one_scale(product: ScaledProduct) -> ScaledProduct:
    """Those of the last block."""
    return replace(product, block=product.K, a_scale=product.a_scale[:, -1:], b_scale=product.b_scale[:, -1:])


@fault(
    "padding of the scales multiplied beside zero codes",
    MOVEMENT,
    seen="flashinfer PR 3650",
    needs=_of_side(0, lambda side: side.tile in HEIGHTS and side.columns % WIDTH > 0, "no padding across"),
    same_if="the padding holds no NaN",
)
def read_and_multiplied(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """K runs to the end of a tile of scales: 0 times a NaN scale is NaN; here the last real scale
    is NaN instead."""
    side = _side(call, 0)
    memory = inputs[side.scale].reshape(-1).view(torch.uint8).clone()
    pads = memory[side.at[:, -1] + 1]
    nan = torch.isnan(decode(pads.view(side.dtype)))
    memory[side.at[:, -1][nan]] = pads[nan]
    return inputs | {side.scale: memory.view(inputs[side.scale].dtype).reshape(inputs[side.scale].shape)}


# --- alpha and bias -------------------------------------------------------------------------------------------------


def _alpha(change: Callable[[Tensor], Tensor | None]) -> Callable[[ScaledProduct], ScaledProduct]:
    return lambda product: replace(product, alpha=None if product.alpha is None else change(product.alpha))


def _factors(call: Call) -> int:
    alpha = _product(call).alpha
    return 0 if alpha is None else alpha.numel()


has_alpha = need(lambda call: _product(call).alpha is not None and _product(call).factor != 1.0, "no alpha, or 1")
two = need(lambda call: _factors(call) == 2, "one global scale")
for name, factor, when, seen in (
    ("alpha ignored", lambda alpha: None, has_alpha, "torchao NVFP4Tensor matmul: _scaled_mm without alpha"),
    (
        "alpha multiplied twice",
        lambda alpha: alpha * alpha,
        has_alpha,
        MINE + "alpha in the scales and in the epilogue",
    ),
    ("alpha divides", lambda alpha: 1.0 / alpha, has_alpha, "flashinfer fp4_quantize: gs or 1/gs"),
    (
        "alpha rounded to bfloat16",
        lambda alpha: alpha.bfloat16().float(),
        has_alpha,
        MINE + "a scalar cast with the output dtype",
    ),
    ("second global scale forgotten", lambda alpha: alpha[:1], two, "PyTorch scaled_mm: the meta function checks one"),
    ("first global scale forgotten", lambda alpha: alpha[1:], two, "PyTorch scaled_mm: the meta function checks one"),
    ("global scale of a taken for both", lambda alpha: alpha[:1].repeat(2), two, MINE + "one pointer passed twice"),
):
    fault(
        name,
        VALUE,
        seen=seen,
        on=WITH_ALPHA,
        product=_alpha(factor),
        needs=when,
        same_if="alpha has few bits" if "bfloat16" in name else "",
    )


def _rounded_first(call: Call, total: Sum) -> Tensor:
    """The sum stored in the output dtype, then alpha and bias by more roundings."""
    product = total.product
    stored = store(total.right(replace(product, alpha=None, bias=None)), call.out_dtype).to(torch.float32)
    return _finished(product, stored)


fault(
    "sum rounded to the output dtype before alpha",
    ARITHMETIC,
    on=WITH_ALPHA,
    seen="torchao NVFP4Tensor matmul: three roundings",
    sum=_rounded_first,
    needs=both(has_alpha, need(lambda call: call.out_dtype is not torch.float32, "the output is float32")),
    same_if="every sum is a value of the output dtype",
)
has_bias = need(lambda call: "bias" in call.inputs, "there is no bias")
for name, bias in (
    ("bias of a block-scaled product ignored", lambda bias: None),
    ("bias of a block-scaled product added twice", lambda bias: bias * 2),
    ("bias of the next column of a block-scaled product", lambda bias: torch.roll(bias, -1)),
):
    fault(
        name,
        ARITHMETIC,
        seen="cutlass PR 3149",
        on=BIASED,
        needs=has_bias,
        product=lambda product, bias=bias: replace(product, bias=bias(product.bias)),
    )
for name, summand, same in (
    ("c of a block-scaled product ignored", lambda c: torch.zeros_like(c), ""),
    ("c of a block-scaled product added twice", lambda c: c * 2, ""),
    ("c of a block-scaled product read from the next row", lambda c: c.roll(-1, dims=-2), "its rows are equal"),
    ("c of a block-scaled product read from the next column", lambda c: c.roll(-1, dims=-1), "its columns are equal"),
):
    fault(
        name,
        ARITHMETIC,
        seen="cutlass PR 3149",
        on=PRODUCT & takes("c"),
        needs=need(lambda call: "c" in call.inputs, "there is no c"),
        same_if=same,
        read=entry("c", summand),
    )
fault(
    "sum rounded to the output dtype before the bias",
    ARITHMETIC,
    seen="H200 mutants",
    on=BIASED,
    sum=_rounded_first,
    same_if="every sum is a value of the output dtype",
    needs=both(has_bias, need(lambda call: call.out_dtype is not torch.float32, "the output is float32")),
)


# --- the store ------------------------------------------------------------------------------------------------------


def _toward_zero(call: Call, acc: Tensor) -> Tensor:
    return to_dtype(acc.double(), call.out_dtype, rounding=Rounding.TOWARD_ZERO, overflow=Overflow.INF)


def _through(other: torch.dtype) -> Callable[[Call, Tensor], Tensor]:
    return lambda call, acc: store(store(acc, other).to(torch.float32), call.out_dtype)


def _not_of(dtype: torch.dtype, word: str) -> WhyNot:
    return need(lambda call: call.out_dtype is not dtype, f"the output is {word}")


half = need(lambda call: call.out_dtype is not torch.float32, "the output is float32")
fault(
    "block-scaled store truncates",
    CAST,
    seen="H200 mutants",
    store=_toward_zero,
    needs=half,
    same_if="every sum is a value of the output dtype",
)
for dtype, word in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
    fault(
        f"block-scaled result stored through {word}",
        CAST,
        seen="cutlass PR 3149",
        store=_through(dtype),
        needs=_not_of(dtype, word),
        same_if=f"every sum is a {word} value",
    )
fault(
    "NaN of a block-scaled result stored as 0",
    CAST,
    seen=MINE + "a clamp that drops NaN",
    write=lambda out: torch.nan_to_num(out, nan=0.0, posinf=torch.inf, neginf=-torch.inf),
    same_if="no result is NaN",
)


def _unwritten(rows: bool) -> Callable[[Call, Tensor], Tensor]:
    def change(call: Call, out: Tensor) -> Tensor:
        written, old = out.clone(), stale(call, out)
        at = (slice(-1, None), slice(None)) if rows else (slice(None), slice(-8, None))
        written[at] = old[at]
        return written

    return change


fault(
    "last row of a block-scaled result not written",
    MOVEMENT,
    seen="flashinfer 2861",
    write=_unwritten(True),
    needs=need(lambda call: call.operands.specified() is None, "rows that nobody owns end the output"),
)
fault(
    "block-scaled result zero",
    MOVEMENT,
    seen="flashinfer 3398: zeros for some M",
    write=lambda out: torch.where(torch.isnan(out), out, torch.zeros_like(out)),
    same_if="every result is zero",
)
fault("last columns of a block-scaled result not written", MOVEMENT, seen="flashinfer 2861", write=_unwritten(False))
