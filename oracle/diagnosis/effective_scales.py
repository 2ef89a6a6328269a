"""Which scale a kernel really used for each row and K block, read off its output.

A row of a block-scaled product is ``y[n] = sum_b c_b z_b[n]`` with ``z_b`` the right term of K block ``b``; for a right
kernel every factor ``c_b`` is 1. With at least twice as many columns as blocks the factors follow by least squares,
whatever the kernel did to its scales: a factor of 0 is a dropped block, a wrong scale shows as the ratio of the scale
used to the right one, and the first factor that is not 1 is where the accumulation leaves the right path.

Source: ordinary least squares. Not covered: faults that are not linear in the blocks (casts, stores, moved rows): there
the residual is large and nothing is claimed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.truth.gemm import ScaledProduct

CHUNK = 128  # of K, where one scale covers all of it
SURE = 0.02  # a factor this far from 1 is no rounding of a bfloat16 output; only used to put a finding into words
FIT = 0.05  # residual over size above which the output is not such a sum
ERRORS = 5.0  # standard errors within which a factor is known; noise leaves them once in a million


@dataclass(frozen=True)
class Factors:
    """``factor [M, B]`` (NaN where nothing is claimed), its standard ``error [M, B]`` by the residual, and the number
    of products of one block."""

    factor: Tensor
    error: Tensor
    block: int

    def wrong(self) -> Tensor:
        """Rows and blocks whose factor is surely not 1, bool ``[M, B]``."""
        return (self.factor - 1).abs() > SURE + ERRORS * self.error

    def first_block(self) -> int | None:
        """The first K block whose factor is not 1 in some row."""
        blocks = torch.nonzero(self.wrong().any(dim=0))[:, 0].tolist()
        return int(blocks[0]) if blocks else None


def terms(product: ScaledProduct) -> tuple[Tensor, int]:
    """The right terms ``[B, M, N]`` (float64) of the K blocks, and their length."""
    length = product.block if product.B > 1 else min(CHUNK, product.K)
    a, b = decode(product.a), decode(product.b)
    found = []
    for start in range(0, product.K, length):
        k = slice(start, min(start + length, product.K))
        found.append(product.sigma(start // product.block if product.B > 1 else 0) * (a[:, k] @ b[:, k].T))
    return torch.stack(found), length


def factors(product: ScaledProduct, output: Tensor) -> Factors | None:
    """The factors of every row of ``output [M, N]``; None when the shape or the data do not determine them."""
    z, length = terms(product)
    y = decode(output)
    if product.bias is not None:
        y = y - decode(product.bias)[None, :]
    blocks, _, columns = z.shape
    if columns < 2 * blocks or not bool(torch.isfinite(z).all()):
        return None
    usable = torch.isfinite(y)
    y = torch.where(usable, y, torch.zeros_like(y))
    design = torch.where(usable[None], z, torch.zeros_like(z)).permute(1, 2, 0)
    normal = design.transpose(1, 2) @ design
    ridge = (
        1e-12
        * normal.diagonal(dim1=1, dim2=2).amax(dim=1)[:, None, None]
        * torch.eye(blocks, dtype=z.dtype, device=z.device)
    )
    solvable = normal.diagonal(dim1=1, dim2=2).amin(dim=1) > 0
    system = torch.where(
        solvable[:, None, None], normal + ridge, torch.eye(blocks, dtype=z.dtype, device=z.device)[None]
    )
    solved = torch.linalg.solve(system, design.transpose(1, 2) @ y[:, :, None])[:, :, 0]
    left = (y - (design @ solved[:, :, None])[:, :, 0]).norm(dim=1)
    free = (usable.sum(dim=1) - blocks).clamp(min=1)
    spread = torch.linalg.inv(system).diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    error = spread * (left / free.sqrt())[:, None]
    good = solvable & (left <= FIT * y.norm(dim=1)) & (usable.sum(dim=1) >= 2 * blocks)
    solved = torch.where(good[:, None], solved, torch.full_like(solved, torch.nan))
    return Factors(solved, error, length) if bool(good.any()) else None
