"""Scale factors solved from an output: which ones a kernel really used, and whether some came from beyond a buffer.

A row of a block-scaled product is linear in the right terms ``z_b[n]`` of its K blocks:

    y[n] = sum of c_b z_b[n]

1. *All factors unknown* (:func:`effective_factors`). For a right kernel every ``c_b`` is 1. With at least twice as many
   columns as blocks they follow by least squares, whatever the kernel did to its scales: 0 is a dropped block, a wrong
   scale shows as the ratio of the scale used to the right one, and the first factor that is not 1 is where the
   accumulation leaves the right path. Not covered: faults that are not linear in the blocks (casts, stores, moved
   rows); there the residual is large and no factor is reported.
2. *Some scales unknown* (:func:`read_beyond_buffer`). A fault that reads activation scales beyond their buffer
   predicts the scales of the other blocks. So ``y`` less the known part must lie in the span of the unknown blocks'
   terms (``t_b[n] = scale_b[n, b] <a, b[n]>_b``), up to the rounding of the output: of ``N`` columns as many must agree
   as exceed the unknown blocks. This is evidence where the known scales are seen to be the wrong ones that the fault
   predicts (they are most of the row's, and with the right ones instead the row is no such sum), or where the unknown
   scales hide them but are those of a few blocks. Not covered: unknown weight scales or codes; rows with NaN or
   infinity, which beyond a buffer may be any number and so are no evidence.

Source: ordinary least squares.

NaN and infinite elements of an output are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.diagnosis.mutated import Mutated
from oracle.numbers.formats import decode
from oracle.routines.catalogue import Fault
from oracle.truth.gemm import ScaledProduct

CHUNK = 128  # of K, where one scale covers all of it
SURE = 0.02  # a factor this far from 1 is no rounding of a bfloat16 output; only used to put a finding into words
FIT = 0.05  # residual over size above which the output is not such a sum
ERRORS = 5.0  # standard errors within which a factor is known; noise leaves them once in a million
LEAST = 16  # columns beyond the unknown blocks that a row must have; each agrees by chance once in 2^7
FEW = 4  # unknown scales that hide the known ones may be those of one block in so many
FIT_WITH_UNKNOWN = 2.0**-7
"""Residual over size of a row: a bfloat16 rounding is 2^-9 of an element, truncated sums of 14 bits add less."""


@dataclass(frozen=True)
class Factors:
    """``factor [M, B]`` (NaN where not determined), its standard ``error [M, B]`` by the residual, and the number of
    products of one block."""

    factor: Tensor
    error: Tensor
    block: int

    @property
    def known(self) -> float:
        """Of how many rows the factors are determined, and not all 0, as a share."""
        return float((self.factor.nan_to_num(nan=0.0) != 0).any(dim=1).double().mean())

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
    a, b = product.left.value(), product.right.value()
    results = []
    for start in range(0, product.K, length):
        k = slice(start, min(start + length, product.K))
        results.append(product.sigma(start // product.block if product.B > 1 else 0) * (a[:, k] @ b[:, k].T))
    return torch.stack(results), length


def effective_factors(product: ScaledProduct, output: Tensor, *, of_columns: bool = False) -> Factors | None:
    """The factors of every row (or ``of_columns``) of ``output [M, N]`` (any float dtype); None when the shape or the
    data do not determine them."""
    z, length = terms(product)
    y = decode(output)
    if product.bias is not None:
        y = y - decode(product.bias)[None, :]
    if product.c is not None:
        y = y - decode(product.c)
    if of_columns:
        z, y = z.transpose(1, 2), y.t()
    blocks, _, columns = z.shape
    if columns < 2 * blocks or not bool(torch.isfinite(z).all()):
        return None
    usable = torch.isfinite(y)
    y = torch.where(usable, y, torch.zeros_like(y))
    design = torch.where(usable[None], z, torch.zeros_like(z)).permute(1, 2, 0)
    normal = design.transpose(1, 2) @ design
    diagonal, identity = normal.diagonal(dim1=1, dim2=2), torch.eye(blocks, dtype=z.dtype, device=z.device)
    ridge = 1e-12 * diagonal.amax(dim=1)[:, None, None] * identity
    solvable = diagonal.amin(dim=1) > 0
    system = torch.where(solvable[:, None, None], normal + ridge, identity[None])
    solved = torch.linalg.solve(system, design.transpose(1, 2) @ y[:, :, None])[:, :, 0]
    left = (y - (design @ solved[:, :, None])[:, :, 0]).norm(dim=1)
    free = (usable.sum(dim=1) - blocks).clamp(min=1)
    spread = torch.linalg.inv(system).diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    error = spread * (left / free.sqrt())[:, None]
    good = solvable & (left <= FIT * y.norm(dim=1)) & (usable.sum(dim=1) >= 2 * blocks)
    solved = torch.where(good[:, None], solved, torch.full_like(solved, torch.nan))
    return Factors(solved, error, length) if bool(good.any()) else None


def read_beyond_buffer(mutated: Mutated, output: Tensor, bad: Tensor, faults: Sequence[Fault]) -> list[Fault]:
    """The faults of a call that read scales beyond their buffer and agree with ``output [M, N]`` (its own dtype) in all
    that is known; of those only the ones that leave the fewest scales unknown. ``bad`` (bool ``[M, N]``): what fails.
    """
    if len(mutated.own) != 1 or len(output) != mutated.own[0].product.M:
        return []
    rows = torch.nonzero(bad.any(dim=1))[:, 0]
    results = list[tuple[int, Fault]]()
    for fault in (fault for fault in faults if mutated.unknown_scales(fault)):
        wrong = mutated.products((fault,)).parts[0].product
        unknown = torch.isnan(wrong.left.scales).expand(wrong.M, -1)[rows]
        if not bool(unknown.any(dim=1).all()):
            continue
        key = fault.name, rows.cpu().numpy().tobytes()
        if key not in mutated.beyond:
            mutated.beyond[key] = _sums_of_known_and_unknown(wrong, output, mutated.own[0].product, rows)
        if mutated.beyond[key]:
            results.append((int(unknown.sum()), fault))
    return [fault for count, fault in results if count == min(results, key=lambda pair: pair[0])[0]]


def _sums_of_known_and_unknown(wrong: ScaledProduct, output: Tensor, right: ScaledProduct, rows: Tensor) -> bool:
    """Whether every finite one of these rows is such a sum, and at least one is evidence; one row refuses most."""
    if len(rows) > 1 and _evidence(wrong.take(rows[:1]), output[rows[:1]], right.take(rows[:1])) is None:
        return False
    return bool(_evidence(wrong.take(rows), output[rows], right.take(rows)))


def _evidence(wrong: ScaledProduct, output: Tensor, right: ScaledProduct) -> bool | None:
    """Whether at least one row is evidence; None where some finite row is no such sum.

    wrong : the mutant's product; NaN scales in rows and blocks that it reads beyond the buffer, finite ones elsewhere.
    output : Tensor ``[M, N]``, the rows to explain.
    right : the right product of these rows, with the scales to compare with.
    """
    unknown = torch.isnan(decode(wrong.a_scale))
    if unknown.shape != decode(right.a_scale).shape or not bool(unknown.any(dim=1).all()):
        return None
    if not bool(torch.isfinite(decode(wrong.b_scale)).all()):
        return None
    bare = replace(wrong, a_scale=torch.ones_like(wrong.a_scale), bias=None)
    bare.learn(wrong)
    unscaled, length = terms(bare)
    if unscaled.shape[0] != unknown.shape[1] or wrong.bias is not None or length != wrong.block:
        return None
    evidence = False
    for row, y in enumerate(decode(output)):
        free, count = unknown[row], int(unknown[row].sum())
        if not bool(torch.isfinite(y).all()) or len(y) < count + LEAST:
            continue
        own = decode(right.a_scale)[row]
        known, own_known = (s.masked_fill(free, 0.0) for s in (decode(wrong.a_scale)[row], own))
        if _residual(y, unscaled[:, row], known, free) > FIT_WITH_UNKNOWN:
            return None
        if _residual(y, unscaled[:, row], own, torch.zeros_like(free)) > FIT_WITH_UNKNOWN:
            seen = 2 * count <= len(free) and _residual(y, unscaled[:, row], own_known, free) > FIT_WITH_UNKNOWN
            evidence = evidence or seen or FEW * count <= len(free)
    return evidence


def _residual(y: Tensor, unscaled: Tensor, known: Tensor, free: Tensor) -> float:
    """The residual of ``y [N]`` over its size, once the terms ``unscaled [B, N]`` have their ``known [B]`` scales and
    those that are ``free`` the best ones; infinite where a term is NaN or infinite, for which there is no best one."""
    if not bool(unscaled.isfinite().all()):
        return math.inf
    rest = y - (unscaled * known[:, None]).sum(dim=0)
    if bool(free.any()):
        basis = unscaled[free].t()
        size = basis.norm(dim=0).clamp(min=2.0**-1000)
        best = torch.linalg.lstsq(basis / size, rest[:, None], driver="gelsd").solution
        rest = rest - (basis / size @ best)[:, 0]
    return float(rest.norm() / y.norm().clamp(min=2.0**-1000))
