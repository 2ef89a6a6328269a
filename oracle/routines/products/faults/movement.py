"""Faults of data movement in scaled products: right numbers from, or to, the wrong place.

Tiles are 128 x 128, the tile of the kernels where these faults were met; tails are what does not fill one. In grouped
products the last real row of every group and the padding behind it are where errors of group boundaries show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oracle.numbers.formats import codes_of
from oracle.routines.fault import INDEX, MOVEMENT, Call, Faults, WhyNot, both, need, way
from oracle.routines.ideas import itself
from oracle.routines.mutants import stale
from oracle.routines.products import roles
from oracle.routines.products import traits as of
from oracle.truth.gemm import ScaledProduct, take_rows

# A fault is a row: what is wrong and where it was met; the change; when it shows.
FAULTS = Faults(of.PRODUCT)
fault = FAULTS.declare

TILE = 128
PITCH = 16
"""Elements between rows whose pitch is not read: the least that keeps rows of FP8 on 16 bytes."""
STORE_TILE = 64
"""Rows of the smallest tile that DeepGEMM's masked product stores (seen on an H200: 64 or 128)."""
TMA_ROWS = 4
"""Float32 scales in 16 bytes: columns of a scale are padded to a multiple."""
SAME_ROWS = "the two rows are equal"

several_output_rows = need(lambda call: call.rows > 1, "there is one row")
several_rows_of_a = need(lambda call: roles.matrix(call, "a").shape[0] > 1, "there is one row")
several_columns = need(lambda call: call.parts[0].product.N > 1, "there is one column")
several_experts = need(lambda call: roles.operand(call, "b").shape[0] > 1, "there is one expert")
n_tail = need(lambda c: c.parts[0].product.N % TILE, lambda c: f"N={c.parts[0].product.N} fills its tiles")
m_tail = need(
    lambda c: roles.matrix(c, "a").shape[0] % TILE and roles.matrix(c, "a").shape[0] > 1,
    lambda c: f"M={roles.matrix(c, 'a').shape[0]} fills its tiles",
)
k_tail = need(
    lambda c: c.parts[0].product.K % TILE and c.parts[0].product.K > TILE,
    lambda c: f"K={c.parts[0].product.K} has no partial block behind a whole one",
)


# --- the input side -----------------------------------------------------------------------------------------


def _zero_from(first: Callable[[int], int]) -> Callable[[Tensor], Tensor]:
    """Columns from ``first(K)`` on read as zero."""

    def change(a: Tensor) -> Tensor:
        codes = codes_of(a).clone()
        codes[:, first(a.shape[1]) :] = 0
        return codes.view(a.dtype)

    return change


def _k_above(count: int) -> WhyNot:
    return need(lambda c: count < c.parts[0].product.K, lambda c: f"K={c.parts[0].product.K} is not above {count}")


def _halves_exchanged(count: int, device: torch.device) -> Tensor:
    """Row or column numbers with the two halves of an even part exchanged."""
    half, order = count // 2, torch.arange(count, device=device)
    return torch.where(order < 2 * half, (order + half) % (2 * half), order)


@fault(
    "N tail written into the next row", MOVEMENT, seen="kernels-community 1153", needs=both(n_tail, several_output_rows)
)
def write_tail_into_next_row(out: Tensor) -> Tensor:
    """A tile is stored whole: its columns past N, all zero, land at the start of the next row."""
    out = out.clone()
    out[1:, : min(-out.shape[1] % TILE, out.shape[1])] = 0
    return out


@fault("N tail unwritten", MOVEMENT, seen="Primus-Turbo 397", needs=n_tail)
def write_no_tail(call: Call, out: Tensor) -> Tensor:
    out, old = out.clone(), stale(call, out)
    first = out.shape[1] // TILE * TILE
    out[:, first:] = old[:, first:]
    return out


for words, seen, first, needs in (
    ("last element of K", "H200 mutants", lambda k: k - 1, _k_above(1)),
    ("last 32 elements of K", "H200 mutants", lambda k: k - 32, _k_above(32)),
    ("last K block", "Primus-Turbo 397", lambda k: k - 128, _k_above(128)),
    ("K tail", "Primus-Turbo 397", lambda k: k // TILE * TILE, k_tail),
):
    fault(
        f"{words} dropped",
        MOVEMENT,
        seen=seen,
        read=roles.each("a", _zero_from(first)),
        needs=needs,
        same_if="what is dropped is zero",
    )


@fault(
    "K block 1 computed from the codes of block 0",
    MOVEMENT,
    seen="TransformerEngine 2986",
    on=of.BLOCKS,
    needs=roles.several_blocks,
)
def product_of_block_0_twice(product: ScaledProduct) -> ScaledProduct:
    """The prefetch stayed one stage behind."""
    a, b = codes_of(product.a).clone(), codes_of(product.b).clone()
    width = min(product.block, product.K - product.block)
    for codes in (a, b):
        codes[:, product.block : product.block + width] = codes[:, :width]
    return replace(product, a=a.view(product.a.dtype), b=b.view(product.b.dtype))


def _first_of_k(a: Tensor) -> Tensor:
    """The first 128 of K again and again."""
    codes = codes_of(a)
    return codes[:, torch.arange(a.shape[1], device=a.device) % TILE].contiguous().view(a.dtype)


fault(
    "A codes of the first K block for all of K",
    MOVEMENT,
    seen="1bit-MONSTER/1bit-MONSTER 1273: a tile of activations loaded before the loop over K",
    read=roles.each("a", _first_of_k),
    needs=_k_above(TILE),
    same_if="the blocks are equal",
)


def _stale_tail_rows(a: Tensor) -> Tensor:
    """Rows of the last partial tile are stale: other rows in reverse order stand for them."""
    rows = torch.arange(a.shape[0], device=a.device)
    first = a.shape[0] // TILE * TILE
    old = torch.where(rows >= first, (a.shape[0] - 1 - (rows - first)) % a.shape[0], rows)
    return take_rows(a, torch.where((old == rows) & (rows >= first), (rows + 1) % a.shape[0], old))


def _pitch_not_read(x: Tensor) -> Tensor:
    """Rows lie :data:`PITCH` elements further apart than they are long, zeros between, and are read as if packed."""
    codes = codes_of(x) if x.is_floating_point() else x
    memory = torch.nn.functional.pad(codes, (0, PITCH)).flatten()
    return memory[: x.numel()].view(x.shape).view(x.dtype)


fault(
    "rows of the M tail reuse older activations",
    MOVEMENT,
    seen="aprender 2765",
    read=roles.each("a", _stale_tail_rows),
    needs=m_tail,
    same_if=SAME_ROWS,
)
# at half of the matrix, as an int32 offset does at 2**31 elements
fault(
    "row offset wraps",
    MOVEMENT,
    seen="vllm PR 9425, flash-linear-attention 1080",
    read=roles.each("a", lambda a: take_rows(a, torch.arange(a.shape[0], device=a.device) % max(1, a.shape[0] // 2))),
    needs=several_rows_of_a,
    same_if=SAME_ROWS,
)
for role in ("a", "b"):
    fault(
        f"row pitch of {role.upper()} not read",
        MOVEMENT,
        seen="recorded on an H200: cutlass_scaled_mm of vLLM 0.20.2",
        read=roles.each(role, _pitch_not_read),
        needs=roles.several_rows(role),
        same_if="all rows are equal",
    )
fault(
    "gate and up weights swapped without their scales",
    MOVEMENT,
    seen="sglang PR 11081",
    read=roles.each("b", lambda b: take_rows(b, _halves_exchanged(b.shape[0], b.device))),
    needs=several_columns,
)


# --- the output side ----------------------------------------------------------------------------------------


def _specified(call: Call) -> list[int]:
    if call.parts[0].rows is None:
        return list(range(call.rows))
    return sorted(int(r) for part in call.parts if part.rows is not None for r in part.rows)


def _two_rows(call: Call) -> tuple[int, int]:
    """Two neighbouring specified rows in the middle."""
    rows = _specified(call)
    at = max(0, len(rows) // 2 - 1)
    return rows[at], rows[min(at + 1, len(rows) - 1)]


def _in_pairs(unit: int) -> Callable[[Tensor], Tensor]:
    """Columns exchanged in pairs of groups of ``unit``, where the second group is there."""

    def change(out: Tensor) -> Tensor:
        order = torch.arange(out.shape[1], device=out.device)
        return out[:, torch.where((order | unit) < out.shape[1], order ^ unit, order)]

    return change


fault(
    "gate and up halves swapped with their scales",
    MOVEMENT,
    seen="sglang PR 32430",
    write=lambda out: out[:, _halves_exchanged(out.shape[1], out.device)],
    needs=several_columns,
)
fault("neighbouring columns exchanged", MOVEMENT, seen="pith-train PR 74", write=_in_pairs(1))
fault(
    "neighbouring groups of eight columns exchanged",
    MOVEMENT,
    seen="no public thread: 16-byte stores through a swizzled staging buffer",
    write=_in_pairs(8),  # the 16-byte stores of a bfloat16 row
    needs=need(lambda call: call.parts[0].product.N > 8, "there is one group of eight columns"),
)


@fault("two rows swapped", MOVEMENT, seen="flashinfer 4396", needs=several_output_rows, same_if=SAME_ROWS)
def write_rows_swapped(call: Call, out: Tensor) -> Tensor:
    i, j = _two_rows(call)
    out = out.clone()
    out[[i, j]] = out[[j, i]]
    return out


@fault("one row duplicated", MOVEMENT, seen="flashinfer PR 2716", needs=several_output_rows, same_if=SAME_ROWS)
def write_row_duplicated(call: Call, out: Tensor) -> Tensor:
    i, j = _two_rows(call)
    out = out.clone()
    out[j] = out[i]
    return out


@fault("one row of one N tile stale", MOVEMENT, seen="flashinfer 4396")
def write_row_of_tile_stale(call: Call, out: Tensor) -> Tensor:
    out, old = out.clone(), stale(call, out)
    row = _two_rows(call)[0]
    out[row, -TILE:] = old[row, -TILE:]
    return out


@fault("one output tile unwritten", MOVEMENT, seen="flashinfer PR 2716")
def write_no_last_tile(call: Call, out: Tensor) -> Tensor:
    out, old = out.clone(), stale(call, out)
    top = _specified(call)[-1] // TILE * TILE
    left = (out.shape[1] - 1) // TILE * TILE
    out[top : top + TILE, left:] = old[top : top + TILE, left:]
    return out


@fault("one element zeroed", MOVEMENT, seen="H200 mutants")
def write_largest_zeroed(call: Call, out: Tensor) -> Tensor:
    """The largest finite specified element."""
    rows = torch.tensor(_specified(call), dtype=torch.int64, device=out.device)
    flat = int(out[rows].to(torch.float32).abs().nan_to_num(0.0, 0.0, 0.0).argmax())
    out = out.clone()
    out[int(rows[flat // out.shape[1]]), flat % out.shape[1]] = 0
    return out


fault(
    "output transposed where it is square",
    MOVEMENT,
    seen="pytorch 195751",
    on=of.DENSE,
    write=lambda out: out.t().contiguous(),
    needs=need(
        lambda c: c.rows == c.parts[0].product.N,
        lambda c: f"the output is {c.rows} x {c.parts[0].product.N}, not square",
    ),
)


fault(
    "output of exchanged operands written as [N, M]",
    MOVEMENT,
    seen="sglang PR 15763: an output of [M, N] handed to a kernel that computes the transpose",
    on=of.DENSE - of.BATCHED,
    write=lambda out: out.t().contiguous().reshape(out.shape),
    needs=need(
        lambda c: len(c.parts) == 1 and c.rows != c.parts[0].product.N and min(c.rows, c.parts[0].product.N) > 1,
        "the output is square, or one row or column",
    ),
)


# --- contiguous groups: the index of each row ---------------------------------------------------------------

several_used = need(lambda call: int((torch.unique(roles.groups(call)) >= 0).sum()) > 1, "one expert is used")
has_padding = need(
    lambda c: bool(((roles.groups(c)[:-1] >= 0) & (roles.groups(c)[1:] < 0)).any()),
    "no real row stands before a padding row",
)


def _experts(index: Tensor, other: Tensor) -> Tensor:
    """``other`` experts for the rows that have one."""
    return torch.where(index < 0, index, other).to(index.dtype)


def _first_of(rows: int) -> Callable[[Tensor], Tensor]:
    def change(index: Tensor) -> Tensor:
        place = torch.arange(len(index), device=index.device) // rows * rows
        return _experts(index, index[place].clamp(min=0))

    return change


def _descriptor_of_previous(index: Tensor) -> Tensor:
    """The first tile of a group runs with the previous group's descriptor."""
    starts = index[::TILE]
    use = torch.cat([starts[:1], starts[:-1]])[torch.arange(len(index), device=index.device) // TILE]
    return torch.where((index < 0) | (use < 0), index, use).to(index.dtype)


for name, seen, change, needs, same_if in (
    (
        "m_indices of -1 taken as an expert",
        "DeepGEMM 34",
        lambda call, index: torch.where(index < 0, roles.operand(call, "b").shape[0] - 1, index).to(index.dtype),
        has_padding,
        "only rows that the contract leaves unspecified change",
    ),
    (
        "all rows of a tile use the first row's expert",
        "DeepGEMM PR 450",
        _first_of(TILE),
        several_used,
        "every expert's run is aligned to the tile, as the contract demands",
    ),
    (
        "all rows of 256 use the first row's expert",
        "DeepGEMM PR 450",
        _first_of(2 * TILE),
        several_used,
        "every expert's run is aligned to 256 rows",
    ),
    (
        "group offset off by one",
        "flashinfer 3547",
        lambda call, index: _experts(index, (index + 1) % roles.operand(call, "b").shape[0]),
        several_experts,
        "",
    ),
    # global expert numbers on a rank that holds the upper half
    (
        "expert-parallel offset not applied",
        "flashinfer 3547",
        lambda call, index: _experts(
            index, (index + roles.operand(call, "b").shape[0] // 2) % roles.operand(call, "b").shape[0]
        ),
        several_experts,
        "",
    ),
    (
        "previous group's descriptor used at a group switch",
        "DeepGEMM PR 343",
        _descriptor_of_previous,
        several_used,
        "",
    ),
):
    fault(
        name,
        MOVEMENT,
        seen=seen,
        on=of.BY_INDEX,
        read=roles.of_groups(change),
        needs=needs,
        same_if=same_if,
    )


@fault(
    "last real row uses a padding row's scale",
    MOVEMENT,
    seen="vllm 45741",
    on=of.BY_INDEX,
    needs=has_padding,
    same_if="both scales are equal",
)
def read_padding_scale(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    name = call.contract.roles["a_scale"]
    index, scale = inputs[str(call.contract.groups)], inputs[name].clone()
    last = (index[:-1] >= 0) & (index[1:] < 0)
    scale[:-1][last] = scale[1:][last]
    return inputs | {name: scale}


def _poisoned_tiles(call: Call) -> list[int]:
    index, codes, scale = roles.groups(call), roles.operand(call, "a"), roles.operand(call, "a_scale")
    poison = torch.isnan(codes.to(torch.float32)).any(dim=1) | torch.isnan(scale).any(dim=1)
    return sorted({int(r) // TILE for r in torch.nonzero(poison & (index < 0))[:, 0]})


@fault(
    "NaN of a padding row spreads to its tile",
    MOVEMENT,
    seen="flashinfer PR 3650, 2861",
    on=of.BY_INDEX,
    needs=need(_poisoned_tiles, "no padding row holds a NaN"),
)
def write_poisoned_tiles(call: Call, out: Tensor) -> Tensor:
    out = out.clone()
    for tile in _poisoned_tiles(call):
        out[tile * TILE : (tile + 1) * TILE] = torch.nan
    return out


# --- groups: the wrong weights, and rows not written --------------------------------------------------------


fault(
    "weights of the next group",
    MOVEMENT,
    seen="DeepGEMM PR 343",
    on=of.BY_COUNT,
    read=roles.of_the_next("b", "b_scale"),
    needs=several_experts,
)


def _past_the_groups(call: Call) -> list[tuple[int, int]]:
    """Rows of ``[G * M]``, first and end, that each group's last tile of :data:`STORE_TILE` rows covers past it."""
    groups, m = roles.operand(call, "a").shape[:2]
    ends = (g * m + -(-count // STORE_TILE) * STORE_TILE for g, count in enumerate(roles.groups(call).tolist()))
    return [((g + 1) * m, min(end, groups * m)) for g, end in enumerate(ends) if end > (g + 1) * m < groups * m]


def _tiles_reach_further(call: Call) -> bool:
    m, past = roles.operand(call, "a").shape[1], _past_the_groups(call)
    counts = enumerate(roles.groups(call).tolist())
    return any(start < g * m + count and g * m < stop for g, count in counts for start, stop in past)


@fault(
    "a group's last tile overwrites the next group",
    MOVEMENT,
    seen="recorded on an H200: masked product of sgl-deep-gemm 0.1.4.post1",
    on=of.BY_COUNT,
    needs=need(_tiles_reach_further, f"no tile of {STORE_TILE} rows reaches a real row"),
    same_if="those rows are zero",
    race=True,
)
def write_whole_tiles(call: Call, out: Tensor) -> Tensor:
    """A group's last tile is stored whole and last: its rows past M lie in later groups.

    Their scales come from the padding of the scale's columns, unwritten (NaN here); rows after it have scale 0.
    """
    m, out = roles.operand(call, "a").shape[1], out.clone()
    for start, stop in _past_the_groups(call):
        out[start:stop] = 0
        out[start : min(stop, start + -m % TMA_ROWS)] = torch.nan
    return out


def _wrapped(x: Tensor) -> Tensor:
    """The matrices of the second half of the groups replaced by those of the first."""
    return take_rows(x, torch.arange(len(x), device=x.device) % -(-len(x) // 2))


fault(
    "weights of the second half of the groups read from the first",
    INDEX,
    seen="DeepSpeed PR 8261, axolotl PR 3865: expert times stride beyond 32 bits",
    on=of.IN_GROUPS,
    read=lambda call, inputs: inputs | {(name := call.contract.roles["b"]): _wrapped(inputs[name])},
    needs=several_experts,
    same_if="the weights are equal",
)


def _unwritten_rows(which: Callable[[int, Tensor], Tensor]) -> Callable[[Call, Tensor], Tensor]:
    """WRITE: rows of every part ``which(number of the part, its rows)`` left as they were."""

    def change(call: Call, out: Tensor) -> Tensor:
        out, old = out.clone(), stale(call, out)
        for number, part in enumerate(call.parts):
            assert part.rows is not None
            rows = which(number, torch.as_tensor(part.rows, dtype=torch.int64, device=out.device))
            out[rows] = old[rows]
        return out

    return change


fault(
    "{}",
    MOVEMENT,
    on=of.IN_GROUPS,
    over=(
        way(
            "rows of each group behind its first 128 not written",
            _unwritten_rows(lambda number, rows: rows[TILE:]),
            seen="flashinfer PR 4020: tiles counted from a bound below the rows of a group",
            needs=need(lambda call: max(part.product.M for part in call.parts) > TILE, f"no group has {TILE} rows"),
        ),
        way(
            "groups behind the first not computed",
            _unwritten_rows(lambda number, rows: rows if number else rows[:0]),
            seen="sglang PR 8679: a kernel compiled for one group",
            needs=need(lambda call: len(call.parts) > 1, "one group has rows"),
        ),
    ),
    write=itself,
)


def _first_behind_tiles(call: Call) -> bool:
    """Whether one group alone has rows, and its last is the first behind a power of two of them, as a loop may end."""
    full = call.parts[0].product.M - 1
    return len(call.parts) == 1 and full >= 8 and full & (full - 1) == 0


@fault(
    "last real row of each group not written",
    MOVEMENT,
    seen="flashinfer 3547",
    on=of.IN_GROUPS,
    needs=need(lambda call: not _first_behind_tiles(call), "it is the first row behind whole tiles"),
)
def write_one_row_short(call: Call, out: Tensor) -> Tensor:
    out, old = out.clone(), stale(call, out)
    for part in call.parts:
        assert part.rows is not None
        out[part.rows[-1]] = old[part.rows[-1]]
    return out


# --- groups that end where their offsets say ----------------------------------------------------------------

RUNS = Faults(of.RUNS & of.BY_ENDS)
"""They stand beside those of the expert layer in the catalogue."""

# every group but the last in use takes the first row of the group behind it
RUNS.declare(
    "groups end one row late",
    MOVEMENT,
    seen="flashinfer 3547",
    read=roles.of_groups(lambda ends: torch.minimum(ends + 1, ends[-1]).to(ends.dtype)),
    needs=need(lambda call: len(call.parts) > 1, "one expert is used"),
)
RUNS.declare(
    "weights of the next group of a run",
    MOVEMENT,
    seen="DeepGEMM PR 343",
    read=roles.of_the_next("b", "b_scale"),
    needs=several_experts,
)
