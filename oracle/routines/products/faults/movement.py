"""Faults of data movement in scaled products: right numbers from, or to, the wrong place.

Tiles are 128 x 128, the tile of the kernels where these faults were met; tails are what does not fill one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from oracle.numbers.formats import codes_of
from oracle.routines.fault import Call, Change, Family, Fault, Stage, WhyNot, always
from oracle.routines.mutants import stale
from oracle.routines.products.roles import BLOCKS, GROUPED, PRODUCTS, Matrix, matrix, read
from oracle.truth.gemm import ScaledProduct, take_rows

TILE = 128
PITCH = 16
"""Elements between rows whose pitch is not read: the least that keeps rows of FP8 on 16 bytes."""
SAME_ROWS = "the two rows are equal"


# --- what a call must have ----------------------------------------------------------------------------------


def _several_rows(call: Call) -> str | None:
    return None if call.rows > 1 else "there is one row"


def _several_rows_of(role: str) -> WhyNot:
    return lambda call: None if matrix(call, role).shape[0] > 1 else f"{role} has one row"


def _several_columns(call: Call) -> str | None:
    return None if call.parts[0].product.N > 1 else "there is one column"


def _n_tail(call: Call) -> str | None:
    n = call.parts[0].product.N
    return None if n % TILE else f"N={n} fills its tiles"


def _m_tail(call: Call) -> str | None:
    rows = matrix(call, "a").shape[0]
    return None if rows % TILE and rows > 1 else f"M={rows} fills its tiles"


def _k_above(count: int) -> WhyNot:
    def why_not(call: Call) -> str | None:
        k = call.parts[0].product.K
        return None if k > count else f"K={k} is not above {count}"

    return why_not


def _two_n_tiles(call: Call) -> str | None:
    return None if call.parts[0].product.N > TILE else "there is one tile along N"


def _square(call: Call) -> str | None:
    rows, n = call.rows, call.parts[0].product.N
    return None if rows == n else f"the output is {rows} x {n}, not square"


# --- input side ---------------------------------------------------------------------------------------------


def _drop_k(count: int) -> Matrix:
    """The last ``count`` columns of a read as zero."""

    def change(call: Call, a: Tensor) -> Tensor:
        codes = codes_of(a).clone()
        codes[:, -count:] = 0
        return codes.view(a.dtype)

    return change


def _drop_tail_of_128(call: Call, a: Tensor) -> Tensor:
    codes = codes_of(a).clone()
    codes[:, a.shape[1] // TILE * TILE :] = 0
    return codes.view(a.dtype)


def _ragged_k(call: Call) -> str | None:
    k = call.parts[0].product.K
    return None if k % TILE and k > TILE else f"K={k} has no partial block behind a whole one"


def _first_block_twice(call: Call, product: ScaledProduct) -> ScaledProduct:
    """Block 1 computed from the codes of block 0: the prefetch stayed one stage behind."""
    a, b = codes_of(product.a).clone(), codes_of(product.b).clone()
    width = min(product.block, product.K - product.block)
    for codes in (a, b):
        codes[:, product.block : product.block + width] = codes[:, :width]
    return replace(product, a=a.view(product.a.dtype), b=b.view(product.b.dtype))


def _stale_tail_rows(call: Call, a: Tensor) -> Tensor:
    """Rows of the last partial tile hold what the buffer held before: other rows in reverse order."""
    rows = torch.arange(a.shape[0], device=a.device)
    first = a.shape[0] // TILE * TILE
    old = torch.where(rows >= first, (a.shape[0] - 1 - (rows - first)) % a.shape[0], rows)
    return take_rows(a, torch.where((old == rows) & (rows >= first), (rows + 1) % a.shape[0], old))


def _wrapped(call: Call, a: Tensor) -> Tensor:
    """The row offset wraps at half of the matrix, as an int32 offset does at 2**31 elements."""
    half = max(1, a.shape[0] // 2)
    return take_rows(a, torch.arange(a.shape[0], device=a.device) % half)


def _pitch_not_read(call: Call, x: Tensor) -> Tensor:
    """Rows lie :data:`PITCH` elements further apart than they are long, zeros between, and are read as if packed."""
    memory = torch.nn.functional.pad(codes_of(x), (0, PITCH)).flatten()
    return memory[: x.numel()].view(x.shape).view(x.dtype)


def _swap_halves_b(call: Call, b: Tensor) -> Tensor:
    """Rows of b exchanged in halves, without their scales."""
    half = b.shape[0] // 2
    order = torch.arange(b.shape[0], device=b.device)
    return take_rows(b, torch.where(order < 2 * half, (order + half) % (2 * half), order))


# --- output side --------------------------------------------------------------------------------------------


def _tail_in_next_row(call: Call, out: Tensor) -> Tensor:
    """A tile is stored whole: its columns past N, all zero, land at the start of the next row."""
    out = out.clone()
    out[1:, : min(-out.shape[1] % TILE, out.shape[1])] = 0
    return out


def _tail_unwritten(call: Call, out: Tensor) -> Tensor:
    out, old = out.clone(), stale(call, out)
    first = out.shape[1] // TILE * TILE
    out[:, first:] = old[:, first:]
    return out


def _rows_swapped(call: Call, out: Tensor) -> Tensor:
    i, j = _two_rows(call)
    out = out.clone()
    out[[i, j]] = out[[j, i]]
    return out


def _row_duplicated(call: Call, out: Tensor) -> Tensor:
    i, j = _two_rows(call)
    out = out.clone()
    out[j] = out[i]
    return out


def _two_rows(call: Call) -> tuple[int, int]:
    """Two neighbouring specified rows in the middle."""
    rows = _specified(call)
    at = max(0, len(rows) // 2 - 1)
    return rows[at], rows[min(at + 1, len(rows) - 1)]


def _specified(call: Call) -> list[int]:
    if call.parts[0].rows is None:
        return list(range(call.rows))
    return sorted(int(r) for part in call.parts if part.rows is not None for r in part.rows)


def _row_tile_stale(call: Call, out: Tensor) -> Tensor:
    out, old = out.clone(), stale(call, out)
    row = _two_rows(call)[0]
    out[row, -TILE:] = old[row, -TILE:]
    return out


def _tile_unwritten(call: Call, out: Tensor) -> Tensor:
    out, old = out.clone(), stale(call, out)
    top = _specified(call)[-1] // TILE * TILE
    left = (out.shape[1] - 1) // TILE * TILE
    out[top : top + TILE, left:] = old[top : top + TILE, left:]
    return out


def _largest(call: Call, out: Tensor) -> tuple[int, int]:
    """Place of the largest finite specified element."""
    rows = torch.tensor(_specified(call), dtype=torch.int64, device=out.device)
    size = out[rows].to(torch.float32).abs().nan_to_num(0.0, 0.0, 0.0)
    flat = int(size.argmax())
    return int(rows[flat // out.shape[1]]), flat % out.shape[1]


def _element_zeroed(call: Call, out: Tensor) -> Tensor:
    out = out.clone()
    out[_largest(call, out)] = 0
    return out


def _transposed(call: Call, out: Tensor) -> Tensor:
    return out.t().contiguous()


def _columns_reversed_in_pairs(call: Call, out: Tensor) -> Tensor:
    order = torch.arange(out.shape[1], device=out.device)
    return out[:, torch.where((order ^ 1) < out.shape[1], order ^ 1, order)]


def _groups_of_eight(call: Call, out: Tensor) -> Tensor:
    """The 16-byte stores of a bfloat16 row exchanged in pairs."""
    order = torch.arange(out.shape[1], device=out.device)
    return out[:, torch.where((order | 8) < out.shape[1], order ^ 8, order)]


def _halves_swapped(call: Call, out: Tensor) -> Tensor:
    half = out.shape[1] // 2
    order = torch.arange(out.shape[1], device=out.device)
    return out[:, torch.where(order < 2 * half, (order + half) % (2 * half), order)]


def moved(
    name: str,
    met_in: str,
    stage: Stage,
    change: Change,
    why_not: WhyNot = always,
    equivalent: str = "",
    contracts: frozenset[str] = PRODUCTS,
    tolerated: str = "",
) -> Fault:
    """A fault of movement with one change."""
    return Fault(name, Family.MOVEMENT, met_in, {stage: change}, contracts, why_not, equivalent, tolerated)


def faults() -> list[Fault]:
    """The faults of plain products, in the order of the facts."""
    zeros = "what is dropped is zero"
    return [
        moved(
            "N tail written into the next row",
            "kernels-community 1153",
            Stage.WRITE,
            _tail_in_next_row,
            lambda c: _n_tail(c) or _several_rows(c),
        ),
        moved("N tail unwritten", "Primus-Turbo 397", Stage.WRITE, _tail_unwritten, _n_tail),
        moved("last element of K dropped", "H200 mutants", Stage.READ, read("a", _drop_k(1)), _k_above(1), zeros),
        moved("last 32 elements of K dropped", "H200 mutants", Stage.READ, read("a", _drop_k(32)), _k_above(32), zeros),
        moved("last K block dropped", "Primus-Turbo 397", Stage.READ, read("a", _drop_k(128)), _k_above(128), zeros),
        moved("K tail dropped", "Primus-Turbo 397", Stage.READ, read("a", _drop_tail_of_128), _ragged_k, zeros),
        moved(
            "K block 1 computed from the codes of block 0",
            "TransformerEngine 2986",
            Stage.PRODUCT,
            _first_block_twice,
            lambda c: None if c.parts[0].product.B > 1 else "there is one K block",
            contracts=BLOCKS,
        ),
        moved(
            "rows of the M tail reuse older activations",
            "aprender 2765",
            Stage.READ,
            read("a", _stale_tail_rows),
            _m_tail,
            SAME_ROWS,
        ),
        moved(
            "row offset wraps",
            "vllm PR 9425, flash-linear-attention 1080",
            Stage.READ,
            read("a", _wrapped),
            lambda c: None if matrix(c, "a").shape[0] > 1 else "there is one row",
            SAME_ROWS,
        ),
        *(
            moved(
                f"row pitch of {role.upper()} not read",
                "recorded on an H200: cutlass_scaled_mm of vLLM 0.20.2",
                Stage.READ,
                read(role, _pitch_not_read),
                _several_rows_of(role),
                "all rows are equal",
            )
            for role in ("a", "b")
        ),
        moved(
            "gate and up weights swapped without their scales",
            "sglang PR 11081",
            Stage.READ,
            read("b", _swap_halves_b),
            _several_columns,
        ),
        moved(
            "gate and up halves swapped with their scales",
            "sglang PR 32430",
            Stage.WRITE,
            _halves_swapped,
            _several_columns,
        ),
        moved("neighbouring columns exchanged", "pith-train PR 74", Stage.WRITE, _columns_reversed_in_pairs),
        moved(
            "neighbouring groups of eight columns exchanged",
            "no public thread: 16-byte stores through a swizzled staging buffer",
            Stage.WRITE,
            _groups_of_eight,
            lambda c: None if c.parts[0].product.N > 8 else "there is one group of eight columns",
        ),
        moved("two rows swapped", "flashinfer 4396", Stage.WRITE, _rows_swapped, _several_rows, SAME_ROWS),
        moved("one row duplicated", "flashinfer PR 2716", Stage.WRITE, _row_duplicated, _several_rows, SAME_ROWS),
        moved("one row of one N tile stale", "flashinfer 4396", Stage.WRITE, _row_tile_stale),
        moved("one output tile unwritten", "flashinfer PR 2716", Stage.WRITE, _tile_unwritten),
        moved("one element zeroed", "H200 mutants", Stage.WRITE, _element_zeroed),
        moved(
            "output transposed where it is square",
            "pytorch 195751",
            Stage.WRITE,
            _transposed,
            _square,
            contracts=PRODUCTS - GROUPED,
        ),
    ]
