"""The bits of every schedule lie in the interval of that schedule, whatever finite scales it is given.

Scales go to both ends of float32, so that what an epilogue computes first (``sb acc``, ``sa acc`` or ``sa sb``) leaves
float32 although the result does not.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.bounds import admissible, engines, of_schedule, product
from oracle.bounds.engines import exact
from oracle.bounds.interval import Interval
from oracle.numbers.formats import E2M1, by_name, decode, from_codes
from oracle.numbers.rounding import Overflow, Rounding, encode
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import Epilogue, Promotion, Scales, Schedule, get, schedules
from oracle.truth.gemm import ScaledProduct, rounded
from oracle.verdict.compare import Comparison, compare
from oracle.verdict.products import interval_of

M, N, K = 5, 4, 256
E4M3 = torch.float8_e4m3fn
ENDS = 2.0**-126, 2.0**127


def operand(schedule: Schedule, rows: int, g: torch.Generator) -> Tensor:
    name = schedule.instruction.operands[0]
    if name == "float4_e2m1fn":
        return torch.randint(0, 16, (rows, K), generator=g, dtype=torch.uint8)
    x = torch.randn(rows, K, generator=g, dtype=torch.float64) * 2.0 ** torch.randint(-2, 3, (rows, 1), generator=g)
    if name == "tfloat32":
        return x.float()
    fmt = by_name(name)
    return from_codes(encode(x, fmt, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE), fmt)


def drawn(schedule: Schedule, seed: int, *, bias: bool) -> ScaledProduct:
    """Scales of ``a`` over all of float32, those of ``b`` such that most results are ordinary numbers."""
    g = torch.Generator().manual_seed(seed)
    a, b = operand(schedule, M, g), operand(schedule, N, g)
    if schedule.scales is Scales.OPERANDS:
        block = schedule.instruction.scale_block or K
        if schedule.instruction.scale_format != "float8_e8m0fnu":
            codes = [torch.randint(0, 0x7F, (rows, K // block), generator=g, dtype=torch.uint8) for rows in (M, N)]
            return ScaledProduct(a, b, *(c.view(E4M3).float() for c in codes), block, 1)
        powers = torch.randint(-126, 128, (1, K // block), generator=g)
        of_a, of_b = (torch.randint(-9, 10, (rows, K // block), generator=g) for rows in (M, N))
        sa, sb = (torch.exp2(e.clamp(-126, 127).double()).float() for e in (powers + of_a, of_b - powers))
        return ScaledProduct(a, b, sa, sb, block, 1)
    if schedule.dequantises:  # exact, from the least to the largest that the operands' format holds
        powers = torch.randint(-110, 111, (1, K // 32), generator=g)
        of_a, of_b = (torch.randint(-9, 10, (rows, K // 32), generator=g) for rows in (M, N))
        sa, sb = (torch.exp2(e.double()).float() for e in (powers + of_a, of_b - powers))
        return ScaledProduct(a, b, sa, sb, 32, 1)
    blocks = 2 if schedule.scales is Scales.PROMOTION else 1
    middle = (torch.rand(1, blocks, generator=g, dtype=torch.float64) - 0.5) * 76
    noise = [(torch.rand(rows, blocks, generator=g, dtype=torch.float64) - 0.5) * 12 for rows in (M, N)]
    sa, sb = (10.0**e for e in (middle + noise[0], noise[1] - middle))
    of_a, of_b = (s.clamp(2.0**-140, 2.0**127).float() for s in (sa, sb))
    added = torch.randn(N, generator=g) if bias else None
    return ScaledProduct(a, b, of_a, -of_b, K // blocks, 1, bias=added)


def compared(given: ScaledProduct, schedule: Schedule, interval: Interval | None = None) -> Comparison:
    """The schedule's float32 bits against its interval, around the exact value."""
    out = predict_product(given, schedule, out_dtype=torch.float32, engine="torch")
    same = given
    if not given.a.is_floating_point():
        same = replace(given, a=decode(given.a, E2M1).to(E4M3), b=decode(given.b, E2M1).to(E4M3))
    value = exact(same)
    width = interval_of(same, schedule.name) if interval is None else interval
    return compare(out, admissible(value, rounded(same, value, torch.float32), width))


def constrained(schedule: Schedule, seeds: range) -> int:
    """Elements of these draws about which the interval says something; all of them lie in it."""
    found = [
        compared(drawn(schedule, seed, bias=seed % 2 == 0 and schedule.scales is Scales.EPILOGUE), schedule)
        for seed in seeds
    ]
    assert all(c.outside == 0 for c in found), [c.worst for c in found if c.outside]
    return sum(c.total - c.unconstrained for c in found)


USUAL = [
    s
    for s in schedules()
    if s.fault is None and (s.instruction.name.count(".") <= 2 or s.name == "sm100.chain_ue8m0.counted")
]


@pytest.mark.parametrize("schedule", USUAL, ids=lambda s: s.name)
def test_every_schedule_lies_in_its_own_interval(schedule: Schedule) -> None:
    """One draw; a campaign runs :func:`constrained` over many."""
    constrained(schedule, range(1))


def test_most_of_what_is_drawn_is_constrained() -> None:
    assert sum(constrained(get(name), range(2)) for name in ("sm90.chain", "sm90.promote128", "sm100.chain_nvf4")) > 60
    assert constrained(get("sm90.bf16.dequantised"), range(2)) == 2 * M * N


def late(b_scale: float = 6e33) -> ScaledProduct:
    """No chain of 128 leaves float32 once it is scaled; the sum of all of them does."""
    a, b = (torch.full((n, 1024), 8.0).to(E4M3) for n in (1, 2))
    return ScaledProduct(a, b, torch.full((1, 1), 1e-35), torch.full((2, 1), b_scale), 1024, 1)


AFTER = [s for s in schedules() if s.promotion is Promotion.ADD and "float8_e4m3fn" in s.instruction.operands]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", AFTER, ids=lambda s: s.name)
def test_scales_after_the_promoted_sum(schedule: Schedule) -> None:
    given = late()
    if schedule.epilogue is Epilogue.ROW_THEN_COL:
        given = ScaledProduct(given.b, given.a, given.b_scale, given.a_scale, given.block, 1)
    assert compared(given, schedule).outside == 0
    ordinary = compared(replace(given, b_scale=given.b_scale / 16, a_scale=given.a_scale / 16), schedule)
    assert ordinary.outside == ordinary.unconstrained == 0


def test_without_the_whole_sum_the_bound_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative test: only single chains are looked at."""
    monkeypatch.setattr(product, "scaled_at_the_end", lambda given, acc, interval, bounded: interval)
    schedule = get("sm90.promote128.scale_after")
    given = late()
    for bounded in (product.residue_bound, engines.residue_bound):
        assert compared(given, schedule, bounded(given, of_schedule(schedule))).outside == 2


def test_the_compiled_bound_is_the_definition() -> None:
    acc = of_schedule(get("sm90.promote128.scale_after"))
    for given in (late(), late(1e31), drawn(get("sm90.promote128.scale_after"), 5, bias=True)):
        found, due = engines.residue_bound(given, acc), product.residue_bound(given, acc)
        assert found.open is not None and due.open is not None
        assert torch.equal(found.open, due.open)
        assert torch.equal(found.lo, due.lo) and torch.equal(found.hi, due.hi)
