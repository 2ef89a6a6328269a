"""Bounds of chains whose steps are not the fused truncating sum of products.

Each step turns the interval ``[x + l, x + h]`` of the accumulator into that of the next. With ``u = 2**-24``, ``top``
the largest product exponent of the step, ``D+`` and ``D-`` the residues of the positive and of the negative products
modulo ``2**(top - t)``, ``E(c)`` the accumulator's exponent, ``S`` the largest possible sum and ``common = max(top,
E(c))``, a step adds, before it rounds to nearest and errs by ``u pw(S)``:

FUSED_THEN_ADD   the residue bound of the groups, chained from zero
EXACT            nothing
TREE_FLUSH       ``u pw(|s| + e) + 2**-126`` for every node ``s`` of the tree, ``e`` its own error, and ``2**-126`` for
                 each value that is flushed on the way
LATE_FLOOR       ``[-D+, D-]``; then the floors, all downwards: ``2**(top - t)`` for the half of lesser exponent,
                 ``2**(common - wide)`` where that grid is coarser than the products', ``2**(top - t)`` for an
                 accumulator that may lie two binades below them; one 25 binades below may be dropped instead

A rounding to nearest errs by ``2**-150`` where the result is subnormal; beyond float32 nothing is claimed.

BLOCK_SCALED_GROUPS is the fused step of :func:`oracle.bounds.chain.residue_step` on other addends: exact sums of 16
products times the significands of their scales, whose exponent is that of the scales alone. Which zeros take part in
the alignment is not known (:class:`oracle.tensorcore.instructions.Zeros`); the largest exponent lies between those of
the sums that are not 0 and those of all, and the interval holds the results of every reading, that of sums of 32 under
one scale too. The same is true of
zero products of mxf8f6f4 (:func:`oracle.bounds.chain.residue`). A least exponent of an alignment below -126 loses less.

Source: the definitions in :mod:`oracle.tensorcore.fused`; standard error analysis (Higham, ch. 2 to 4).
NaN and infinities count as zeros in an operand, as in :mod:`oracle.bounds.chain`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from oracle.bounds.accumulator import Accumulator
from oracle.bounds.chain import (
    EMIN32,
    NONE,
    OVERFLOW,
    Operand,
    exponent_floor,
    fixed_point,
    float64_slack,
    floor_power,
    partial_sums,
    power,
    residue,
    residue_step,
    residues,
    zeros,
)
from oracle.numbers.formats import by_name
from oracle.tensorcore.instructions import Sum

U = 2.0**-24
FLUSHED = 2.0**-126
HALF_SUBNORMAL = 2.0**-150
TOGETHER = 1 << 18  # products held at a time where that spares operations
PRODUCTS = 16  # of one addend of a block-scaled instruction


def stepwise(a: Operand, b: Operand, acc: Accumulator) -> tuple[Tensor, Tensor, Tensor]:
    """``x, l, h``, float64 ``[M, N]`` or ``[C, M, N]``, of one chain over all columns of ``a`` and ``b``."""
    x = zeros(a, b)
    low, high, slack = (torch.zeros_like(x) for _ in range(3))
    width = acc.length if acc.kind is Sum.FUSED_THEN_ADD else acc.group
    before = _residues(a, b, width, acc) if acc.kind is Sum.FUSED_THEN_ADD else None
    for start in range(0, a.value.shape[-1], width):
        sa, sb = a.steps(start, start + width), b.steps(start, start + width)
        slack = slack + float64_slack(sa, sb, a.value.shape[-1], acc)
        if before is not None:
            dx, dl, dh = next(before)
        else:
            dx, (dl, dh) = sa.value @ sb.value.mT, _loss(sa, sb, (x + low - slack, x + high + slack), acc)
        live = (sa.value != 0).to(x.dtype) @ (sb.value != 0).to(x.dtype).mT > 0  # a step of zeros changes nothing
        x, l1, h1 = x + dx, low + dl, high + dh
        reach = torch.maximum((x + l1).abs(), (x + h1).abs()) + slack
        rounding = U * floor_power(reach) + HALF_SUBNORMAL * (reach > 0).to(reach.dtype)
        if acc.kind is Sum.TREE_FLUSH:
            rounding = rounding + 2 * FLUSHED
        rounding = torch.where(reach + rounding > OVERFLOW, torch.inf, rounding)
        low, high = torch.where(live, l1 - rounding, low), torch.where(live, h1 + rounding, high)
    return x, low - slack, high + slack


def _residues(a: Operand, b: Operand, width: int, acc: Accumulator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The residue bound of every step alone; all steps are computed together where they have few products."""
    k = a.value.shape[-1]
    spans = [(start, min(k, start + width)) for start in range(0, k, width)]
    if k % width == 0 and a.value.numel() * b.value.shape[-2] <= TOGETHER:
        yield from zip(*residue(a.together(spans), b.together(spans), acc), strict=True)
    else:
        yield from (residue(a.steps(*span), b.steps(*span), acc) for span in spans)


def split(a: Operand, b: Operand, acc: Accumulator) -> tuple[Tensor, Tensor, Tensor]:
    """``x, l, h``, float64 ``[M, N]`` or ``[C, M, N]``, when K is cut into partial sums, no matter where:
    :func:`oracle.bounds.chain.split` for these steps.

    No accumulator exceeds ``R + E`` (R of :func:`oracle.bounds.chain.reach`), whatever steps it has summed before.
    """
    width = acc.length if acc.kind is Sum.FUSED_THEN_ADD else acc.group
    steps = [(a.steps(k, k + width), b.steps(k, k + width)) for k in range(0, a.value.shape[-1], width)]
    slack = float64_slack(a, b, a.value.shape[-1], acc)
    x, largest, one_sign = partial_sums(steps, width, slack)

    def once(error: Tensor) -> tuple[Tensor, Tensor]:
        held = largest + error
        high = len(steps) * U * floor_power(one_sign + error)
        low = -high
        rounding = U * floor_power(held) + HALF_SUBNORMAL + (2 * FLUSHED if acc.kind is Sum.TREE_FLUSH else 0.0)
        for sa, sb in steps:
            if acc.kind is Sum.FUSED_THEN_ADD:
                _, dl, dh = residue(sa, sb, acc)
            else:
                dl, dh = _loss(sa, sb, (-held, held), acc)
            low, high = low + dl - rounding, high + dh + rounding
        return low, high

    low, high = fixed_point(once, largest, one_sign)
    return x, low - slack, high + slack


def scaled_groups(
    a: Operand, b: Operand, scales: tuple[Tensor, Tensor], acc: Accumulator
) -> tuple[Tensor, Tensor, Tensor]:
    """``x, l, h``, float64 ``[M, N]``, of one chain of block-scaled instructions over all columns of ``a`` and ``b``,
    unscaled.

    ``scales`` are those of every 16 columns, ``[M, K / 16]`` and ``[N, K / 16]``, float64.
    """
    sa, sb = scales
    emin = by_name(acc.scale_format).emin
    ea, eb = (torch.frexp(s)[1].to(torch.int64).sub(1).clamp(min=emin) for s in scales)
    x = zeros(a, b)
    low, high, slack = (torch.zeros_like(x) for _ in range(3))
    for start in range(0, a.value.shape[-1], acc.length):
        stop = min(a.value.shape[-1], start + acc.length)
        products = a.value[:, None, start:stop] * b.value[None, :, start:stop]
        g = slice(start // PRODUCTS, stop // PRODUCTS)
        sums = products.reshape(*products.shape[:2], -1, PRODUCTS).sum(dim=3)
        addends = sums * (sa[:, None, g] * sb[None, :, g])
        all_groups = ea[:, None, g] + eb[None, :, g]
        least = torch.where(addends == 0, NONE, all_groups).amax(dim=-1)
        slack = slack + a.value.shape[-1] * 2.0**-51 * addends.abs().sum(dim=-1)
        pairs = None
        if acc.scale_format == "float8_e8m0fnu":  # one scale for 32 products, which may be summed first
            even = torch.nn.functional.pad(addends, (0, addends.shape[-1] % 2))
            pairs = torch.unflatten(even, -1, (-1, 2)).sum(dim=-1)
        x, low, high = residue_step(x, low, high, slack, addends, all_groups.amax(dim=-1), acc, least, pairs)
    return x, low - slack, high + slack


def _loss(a: Operand, b: Operand, held: tuple[Tensor, Tensor], acc: Accumulator) -> tuple[Tensor, Tensor]:
    """What one step may add before its final rounding; ``held`` are the ends of the accumulator."""
    if acc.kind is Sum.EXACT:
        nothing = torch.zeros_like(held[0])
        return nothing, nothing
    p = a.value[..., :, None, :] * b.value[..., None, :, :]
    if acc.kind is Sum.TREE_FLUSH:
        error = _tree(p)
        return -error, error
    return _late_floor(p, a.exponent[..., :, None, :] + b.exponent[..., None, :, :], held, acc)


def _tree(terms: Tensor) -> Tensor:
    """Error of a pairwise tree of float32 additions over the last axis, without the last one."""
    error = torch.full_like(terms, FLUSHED).masked_fill(terms.abs() > OVERFLOW, torch.inf)
    while terms.shape[-1] > 1:
        if terms.shape[-1] % 2:
            terms, error = (torch.nn.functional.pad(t, (0, 1)) for t in (terms, error))
        terms, error = terms[..., 0::2] + terms[..., 1::2], error[..., 0::2] + error[..., 1::2]
        size = terms.abs() * (1 + 2.0**-40) + error
        error = error + U * floor_power(size) + FLUSHED
        error = torch.where(size > OVERFLOW, torch.inf, error)
    return error[..., 0] * (1 + 2.0**-40)


def _late_floor(p: Tensor, e: Tensor, held: tuple[Tensor, Tensor], acc: Accumulator) -> tuple[Tensor, Tensor]:
    split = acc.kind is Sum.LATE_FLOOR_ODD_EVEN
    halves = [slice(0, None, 2), slice(1, None, 2)] if split and p.shape[-1] > 1 else [slice(None)]
    tops = [e[..., half].amax(dim=-1).clamp(min=EMIN32) for half in halves]
    top = torch.stack(tops).amax(dim=0)
    unit = power(top - acc.align)
    low, high = torch.zeros_like(unit), torch.zeros_like(unit)
    for half, own in zip(halves, tops, strict=True):
        positive, negative = residues(p[..., half], power(own - acc.align))
        low, high = low - positive - torch.where(own < top, unit, 0.0), high + negative
    common = torch.maximum(top, exponent_floor(torch.maximum(held[0].abs(), held[1].abs())))
    grid = e.amax(dim=-1) - acc.align  # of the products, also where they lie below 2**-126
    low = low - torch.where(common - acc.wide > grid, power(common - acc.wide), 0.0)
    nearest = torch.where((held[0] <= 0) & (held[1] >= 0), 0.0, torch.minimum(held[0].abs(), held[1].abs()))
    below = (nearest < power(top - 1)) & ((held[0] != 0) | (held[1] != 0))
    low = low - torch.where(below, unit, 0.0)
    if split:
        dropped = torch.minimum(power(common - 25), (-held[0]).clamp(min=0))
        high = high + torch.where(nearest < power(common - 25), dropped, 0.0)
    return low, high
