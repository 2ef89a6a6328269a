"""Chains of other steps where results are subnormal: what is flushed and what a rounding there errs by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.bounds import of_schedule, steps
from oracle.bounds.accumulator import Accumulator
from oracle.bounds.chain import Operand, operand
from oracle.bounds.product import _Side
from oracle.bounds.steps import split, stepwise
from oracle.numbers.formats import FP32, decode
from oracle.tensorcore import fused
from oracle.tensorcore.instructions import INSTRUCTIONS, Instruction, Sum
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import Epilogue, Promotion, Schedule
from oracle.truth.gemm import ScaledProduct
from tests.support.edges import accumulator, grid

pytestmark = pytest.mark.whole("an instruction each, a tenth of a second")

Bound = Callable[[Operand, Operand, Accumulator], tuple[Tensor, Tensor, Tensor]]
LEAST = 2.0**-149  # float32's least subnormal
WIDE = [i for i in INSTRUCTIONS.values() if i.operands[0] in ("bfloat16", "tfloat32") and i.sum is not Sum.FUSED]
"""Instructions of such steps whose products can lie below float32."""


def bounded(bound: Bound, i: Instruction, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the instruction gives for ``a [M, K]`` and ``b [N, K]``, float64, and the ends of its error."""
    a, b = (x.to(torch.float32 if i.operands[0] == "tfloat32" else torch.bfloat16) for x in (a, b))
    product = ScaledProduct(a, b, torch.ones(len(a), 1), torch.ones(len(b), 1), a.shape[1], 1)
    schedule = Schedule("chain", i, None, Promotion.NONE, Epilogue.COL_THEN_ROW, "", i.status)
    acc = replace(of_schedule(schedule), exact=False)
    left, right = (_Side.of(side, 1, product, acc) for side in (product.left, product.right))
    _, low, high = bound(left.converted or left.stored, right.converted or right.stored, acc)
    return decode(predict_product(product, schedule, out_dtype=torch.float32, engine="torch")), low, high


@pytest.mark.parametrize("bound", [stepwise, split])
@pytest.mark.parametrize("i", [i for i in WIDE if i.sum is Sum.TREE_FLUSH], ids=lambda i: i.name)
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_every_flush_of_the_definition_is_counted(
    bound: Bound, i: Instruction, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of numbers near 2^-126 a bound is 2^-126 for each value that the definition flushes, and some more."""
    flushed, flush = [], fused.flush

    def counted(x: Tensor) -> Tensor:
        flushed.append(x.numel())
        return flush(x)

    monkeypatch.setattr(fused, "flush", counted)
    tiny = torch.full((1, groups * i.group), 2.0**-64, dtype=torch.float64)
    _, low, high = bounded(bound, i, tiny, tiny)
    for end in (-low, high):
        assert 0 <= float(end) / 2.0**-126 - sum(flushed) < 2.0**-14


@pytest.mark.parametrize("bound", [stepwise, split])
@pytest.mark.parametrize("i", [i for i in WIDE if not i.flush_subnormals], ids=lambda i: i.name)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_tie_of_subnormals(bound: Bound, i: Instruction, sign: int) -> None:
    """1.5 and 2.5 of the least subnormal round by half of it; the bound holds that, and not twice as much and more."""
    ties = torch.tensor([[1.5], [2.5]], dtype=torch.float64) * 2.0**-74
    out, low, high = bounded(bound, i, sign * ties, torch.tensor([[2.0**-75]], dtype=torch.float64))
    error = (out - sign * ties * 2.0**-75) / LEAST
    assert error.abs().tolist() == [[0.5], [0.5]] and len(error.sign().unique()) == 2
    assert bool((low / LEAST <= error).all() and (error <= high / LEAST).all())
    assert bool((high - low < 2.01 * LEAST).all())


@pytest.mark.parametrize("bound", [stepwise, split])
@pytest.mark.parametrize("i", [i for i in WIDE if i.sum in (Sum.EXACT, Sum.TREE_FLUSH)], ids=lambda i: i.name)
def test_rounding_to_nearest_has_no_direction(bound: Bound, i: Instruction) -> None:
    """The ends of the error are opposite, one chain lies within them, and the sign of the data changes nothing."""
    g = torch.Generator().manual_seed(3)
    drawn = [torch.randn(n, 5 * i.group + 1, generator=g, dtype=torch.float64).bfloat16().double() for n in (4, 3)]
    powers = torch.ones(1, 4 * i.group, dtype=torch.float64)  # whose sums are powers of two
    for a, b in (drawn, (powers, powers)):
        out, low, high = bounded(bound, i, a, b)
        assert torch.equal(-low, high) and bool((high > 0).all())
        assert bool(((out - a @ b.T).abs() <= high).all())
        assert all(torch.equal(x, y) for x, y in zip(bounded(bound, i, -a, b)[1:], (low, high), strict=True))


@pytest.mark.parametrize("kind", [Sum.EXACT, Sum.TREE_FLUSH, Sum.LATE_FLOOR, Sum.LATE_FLOOR_ODD_EVEN])
def test_a_step_begins_where_the_last_one_may_have_ended(kind: Sum, monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends of the interval of the columns before it."""
    a, b, acc = grid(1, 3, 12, unit=1.0), grid(2, 2, 12, unit=1.0), accumulator(kind=kind)
    begun, loss = [], steps._loss

    def seen(p: Operand, q: Operand, held: tuple[Tensor, Tensor], acc: Accumulator) -> tuple[Tensor, Tensor]:
        begun.append(held)
        return loss(p, q, held, acc)

    monkeypatch.setattr(steps, "_loss", seen)
    stepwise(operand(a, FP32), operand(b, FP32), acc)
    for step, held in enumerate(begun[:3]):
        columns = slice(0, step * acc.group)
        x, low, high = stepwise(operand(a[:, columns], FP32), operand(b[:, columns], FP32), acc)
        assert torch.equal(held[0], x + low) and torch.equal(held[1], x + high)
    assert len({id(held) for held in begun[:3]}) == 3 and bool((begun[2][0] < begun[2][1]).any())


@pytest.mark.parametrize("kind", [Sum.LATE_FLOOR, Sum.LATE_FLOOR_ODD_EVEN])
def test_columns_of_one_half_are_alike(kind: Sum) -> None:
    """Whichever of the odd columns, or of the even ones, a product stands in."""
    acc = accumulator(kind=kind, group=8, align=3)
    a, b = grid(3, 4, 8, zeros=0.0), grid(4, 3, 8, zeros=0.0) * 2.0 ** -torch.arange(8)
    due = stepwise(operand(a, FP32), operand(b, FP32), acc)
    for turned in ([2, 1, 4, 3, 6, 5, 0, 7], [0, 3, 2, 5, 4, 7, 6, 1]):
        found = stepwise(operand(a[:, turned], FP32), operand(b[:, turned], FP32), acc)
        assert all(torch.equal(x, y) for x, y in zip(found, due, strict=True))
