"""Faults of the scale's index in scaled products: the right values of the scales meet the wrong rows or K blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.routines.fault import Call, Family, Fault, Stage, WhyNot
from oracle.routines.products.roles import BLOCKS, PRODUCTS, Matrix, matrix, read

EQUAL = "the scales that are exchanged are equal"


def scale_fault(
    name: str,
    met_in: str,
    role: str,
    change: Matrix,
    why_not: WhyNot,
    *,
    contracts: frozenset[str] = BLOCKS,
    equivalent: str = EQUAL,
) -> Fault:
    """A fault that changes the scales of ``role`` as the kernel reads them."""
    changes = {Stage.READ: read(role, change)}
    return Fault(name, Family.SCALE_INDEX, met_in, changes, contracts, why_not, equivalent)


# --- what a call must have ----------------------------------------------------------------------------------


def several_blocks(call: Call) -> str | None:
    """K has at least two scale blocks."""
    return None if call.parts[0].product.B > 1 else "there is one K block"


def several_rows(role: str) -> WhyNot:
    """The scale of ``role`` has more than one row."""

    def why_not(call: Call) -> str | None:
        return None if matrix(call, role).shape[0] > 1 else f"{role} has one row"

    return why_not


def _square(role: str) -> WhyNot:
    def why_not(call: Call) -> str | None:
        rows, blocks = matrix(call, role).shape
        return None if rows == blocks > 1 else f"{role} is {rows} x {blocks}, not square"

    return why_not


def _rows_above(count: int) -> WhyNot:
    def why_not(call: Call) -> str | None:
        rows = matrix(call, "a_scale").shape[0]
        return None if rows > count else f"a_scale has {rows} rows, not more than {count}"

    return why_not


# --- which scale --------------------------------------------------------------------------------------------


def _columns(index: Callable[[Tensor, int], Tensor]) -> Matrix:
    def change(call: Call, scale: Tensor) -> Tensor:
        place = torch.arange(scale.shape[1], device=scale.device)
        return scale[:, index(place, scale.shape[1])]

    return change


def rows_of(index: Callable[[Tensor, int], Tensor]) -> Matrix:
    """The scale matrix with row ``index(row, rows)`` in the place of each row."""

    def change(call: Call, scale: Tensor) -> Tensor:
        place = torch.arange(scale.shape[0], device=scale.device)
        return scale[index(place, scale.shape[0])]

    return change


def _ones_from(first: Callable[[int], int]) -> Matrix:
    def change(call: Call, scale: Tensor) -> Tensor:
        scale = scale.clone()
        scale[:, first(scale.shape[1]) :] = 1.0
        return scale

    return change


def _second_wave(call: Call, scale: Tensor) -> Tensor:
    later = torch.arange(scale.shape[0] - 64, device=scale.device)
    return torch.cat([scale[:64], scale[64:] * scale[later % 64]])


def _transposed_square(call: Call, scale: Tensor) -> Tensor:
    return scale.t().contiguous()


_TIRX = "mlc-ai/TIRx-kernels PR 5"
_FBGEMM = "pytorch/FBGEMM 6159"
_CUTLASS = "NVIDIA/cutlass 2087, 2154"
_MATRIX = "pytorch 195751, flashinfer 2147, pytorch/ao PR 4229"


def _both(role: str, what: str) -> list[Fault]:
    return [
        scale_fault(
            f"{what} of the next K block",
            _TIRX,
            role,
            _columns(lambda b, n: (b + 1).clamp(max=n - 1)),
            several_blocks,
        ),
        scale_fault(
            f"{what} of the previous K block",
            "no public thread: the scale's stage advanced after the codes' stage",
            role,
            _columns(lambda b, n: (b - 1).clamp(min=0)),
            several_blocks,
        ),
        scale_fault(f"{what} of K block 0 throughout", _TIRX, role, _columns(lambda b, n: 0 * b), several_blocks),
        scale_fault(
            f"{what} index advances by words of four only",
            _TIRX,
            role,
            _columns(lambda b, n: b // 4 * 4),
            several_blocks,
        ),
        scale_fault(
            f"{what} swapped between the two K blocks of a tile",
            "pytorch 195751",
            role,
            _columns(lambda b, n: torch.where((b ^ 1) < n, b ^ 1, b)),
            several_blocks,
        ),
        scale_fault(
            f"{what} of the last K block not applied", _FBGEMM, role, _ones_from(lambda n: n - 1), several_blocks
        ),
        scale_fault(
            f"{what} of every trailing K block not applied",
            _FBGEMM,
            role,
            _ones_from(lambda n: max(1, n // 4 * 4)),
            lambda call: (
                None
                if call.parts[0].product.B % 4 and call.parts[0].product.B > 1
                else "the K blocks fill whole words of four"
            ),
        ),
        scale_fault(
            f"{what} matrix transposed where it is square",
            _MATRIX,
            role,
            _transposed_square,
            _square(role),
            equivalent="the matrix is symmetric",
        ),
    ]


def faults() -> list[Fault]:
    """The faults of this family, in the order of the facts."""
    found = _both("a_scale", "A scale") + _both("b_scale", "B scale")
    found += [
        scale_fault(
            "A scale of the previous row",
            _CUTLASS,
            "a_scale",
            rows_of(lambda r, n: (r - 1) % n),
            several_rows("a_scale"),
            contracts=PRODUCTS,
        ),
        scale_fault(
            "A scale of one row taken from its neighbour",
            "no public thread: one thread of an epilogue off by a row",
            "a_scale",
            rows_of(lambda r, n: torch.where(r == n // 2, r - 1, r)),
            several_rows("a_scale"),
            contracts=PRODUCTS,
        ),
        scale_fault(
            "B scale of the previous N block",
            _CUTLASS,
            "b_scale",
            rows_of(lambda r, n: (r - 1) % n),
            several_rows("b_scale"),
            contracts=PRODUCTS,
        ),
        scale_fault(
            "A scale per tile instead of per row",
            _CUTLASS,
            "a_scale",
            rows_of(lambda r, n: r // 128 * 128),
            several_rows("a_scale"),
            contracts=PRODUCTS,
        ),
        scale_fault(
            "A scale of the first row throughout",
            "pytorch 159940",
            "a_scale",
            rows_of(lambda r, n: 0 * r),
            several_rows("a_scale"),
            contracts=PRODUCTS,
        ),
        scale_fault(
            "B scale of the first row throughout",
            "pytorch 159940",
            "b_scale",
            rows_of(lambda r, n: 0 * r),
            several_rows("b_scale"),
            contracts=PRODUCTS,
        ),
        scale_fault(
            "second M wave multiplied by the first wave's A scale as well",
            "NVIDIA/cutlass 3596",
            "a_scale",
            _second_wave,
            _rows_above(64),
            contracts=PRODUCTS,
            equivalent="the first wave's scales are 1",
        ),
    ]
    return found
