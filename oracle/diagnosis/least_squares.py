"""Whether an output is what a kernel gives that read some of its activation scales beyond their buffer.

There nothing can be predicted, but much is known: with ``t_b[n] = scale_b[n, b] <a, b[n]>_b`` a row is

    y[n] = sum of s_b t_b[n] over the blocks whose scale the fault predicts + sum of c_b t_b[n] over the others

with unknown ``c_b``, the same for every column. So ``y`` less the known part must lie in the span of the unknown
blocks' terms, up to the rounding of the output: of ``N`` columns as many must agree as exceed the unknown blocks. It is
evidence where the known scales are seen to be the wrong ones that the fault predicts (they are most of the row's, and
with the right ones instead it is no such sum), or where garbage hides them but stands in a few blocks alone.

Source: ordinary least squares. Not covered: unknown weight scales or codes; rows that hold NaN or infinity (garbage may
be either), which say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from oracle.diagnosis.effective_scales import terms
from oracle.numbers.formats import decode
from oracle.routines.catalogue import Call, Fault, Stage
from oracle.routines.fault import touches
from oracle.routines.mutants import products
from oracle.tensorcore.identify import subset
from oracle.truth.gemm import ScaledProduct

LEAST = 16  # columns beyond the unknown blocks that a row must have; each agrees by chance once in 2^7
FEW = 4  # garbage that hides the rest may stand in one block of so many
FIT = 2.0**-7
"""Residual over size of a row: a bfloat16 rounding is 2^-9 of an element, truncated sums of 14 bits add less."""


def beyond_buffer(call: Call, output: Tensor, bad: Tensor, faults: Sequence[Fault]) -> list[Fault]:
    """The faults that read scales beyond their buffer and of which ``output [M, N]`` is what is known; of those only
    the ones that leave the fewest scales open. ``bad`` are the failing elements."""
    if len(call.parts) != 1:
        return []
    rows, columns = torch.nonzero(bad.any(dim=1))[:, 0], torch.arange(output.shape[1], device=output.device)
    right, found = subset(call.parts[0].product, rows, columns), list[tuple[int, Fault]]()
    for fault in faults:
        if not touches((fault,), Stage.READ, Stage.PRODUCT):
            continue
        wrong = products(call, (fault,))[0][0].product
        if wrong.M != call.parts[0].product.M or not bool(torch.isnan(decode(wrong.a_scale)).any()):
            continue
        wrong = subset(wrong, rows, columns)
        if spanned(wrong, output[rows], right):
            found.append((int(torch.isnan(decode(wrong.a_scale)).sum()), fault))
    return [fault for count, fault in found if count == min(found, key=lambda pair: pair[0])[0]]


def spanned(wrong: ScaledProduct, output: Tensor, right: ScaledProduct) -> bool:
    """Whether every row that says something is such a sum, and at least one is evidence.

    Parameters
    ----------
    wrong : the mutant's product; NaN scales in rows and blocks that it reads beyond the buffer, finite ones elsewhere.
    output : Tensor ``[M, N]``, the rows to explain.
    right : the right product of these rows, with the scales to compare with.
    """
    unknown = torch.isnan(decode(wrong.a_scale))
    if unknown.shape != decode(right.a_scale).shape or not bool(unknown.any(dim=1).all()):
        return False
    ones = replace(wrong, a_scale=torch.ones_like(wrong.a_scale), bias=None)
    if not bool(torch.isfinite(decode(wrong.b_scale)).all()):
        return False
    pieces, length = terms(ones)
    if pieces.shape[0] != unknown.shape[1] or wrong.bias is not None or length != wrong.block:
        return False
    evidence = False
    for row, y in enumerate(decode(output)):
        free = unknown[row]
        if not bool(torch.isfinite(y).all()) or len(y) < int(free.sum()) + LEAST:
            continue
        nothing = torch.zeros_like(free)
        known, own = (decode(scale)[row].masked_fill(free, 0.0) for scale in (wrong.a_scale, right.a_scale))
        if _left(y, pieces[:, row], known, free) > FIT:
            return False
        if _left(y, pieces[:, row], decode(right.a_scale)[row], nothing) > FIT:
            seen = 2 * int(free.sum()) <= len(free) and _left(y, pieces[:, row], own, free) > FIT
            evidence = evidence or seen or FEW * int(free.sum()) <= len(free)
    return evidence


def _left(y: Tensor, pieces: Tensor, known: Tensor, free: Tensor) -> float:
    """The residual of ``y [N]`` over its size, once the terms ``pieces [B, N]`` have their ``known [B]`` scales and
    those that are ``free`` the best ones."""
    rest = y - (pieces * known[:, None]).sum(dim=0)
    if bool(free.any()):
        basis = pieces[free].t()
        size = basis.norm(dim=0).clamp(min=2.0**-1000)
        best = torch.linalg.lstsq(basis / size, rest[:, None], driver="gelsd").solution
        rest = rest - (basis / size @ best)[:, 0]
    return float(rest.norm() / y.norm().clamp(min=2.0**-1000))
