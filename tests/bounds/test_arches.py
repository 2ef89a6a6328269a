"""The residue bound of every instruction in the table: never violated, attained, and it notices a narrower one.

TF32 and FP4 have no torch dtype with one value per element: a TF32 operand is a float32 (whose low bits the
instruction drops), FP4 an integer code, and the bound of FP4 is that of E4M3 codes with the same values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.bounds import Interval, chain, of_schedule, residue_bound
from oracle.bounds.chain import residue
from oracle.bounds.product import _Side, unrounded
from oracle.bounds.steps import stepwise
from oracle.errors import NumericsError
from oracle.numbers.formats import E2M1, by_name, decode, from_codes
from oracle.numbers.rounding import Overflow, Rounding, encode
from oracle.tensorcore.instructions import INSTRUCTIONS, Instruction, Order, Sum, instruction
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import Epilogue, Promotion, Schedule
from oracle.truth.gemm import Exact, ScaledProduct, exact

ALL = tuple(i for i in INSTRUCTIONS.values() if i.name.count(".") <= 2 or i.name == "sm100.tcgen05.nvf4.counted")
"""Of the readings of block-scaled instructions one; all of them are in test_zero_groups."""
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Data:
    """How operands are drawn: gaussians times powers of two from ``base`` up to ``base + spread``."""

    spread: int
    base: int
    zeros: float = 0.1
    positive: bool = False


DATA = (
    Data(0, 0),
    Data(6, -3),
    Data(14, -7),
    Data(30, -24),
    Data(3, 0, zeros=0.9),
    Data(4, -2, positive=True),
    Data(0, -70),
    Data(4, -66, zeros=0.5),
)


def schedule_of(i: Instruction) -> Schedule:
    """One chain over K without scales; scales inside where the instruction takes them."""
    inside = i.scale_block is not None
    epilogue = Epilogue.NONE if inside else Epilogue.COL_THEN_ROW
    return Schedule(f"{i.name}.chain", i, None, Promotion.NONE, epilogue, "", i.status, scales_inside=inside)


def operand(i: Instruction, rows: int, k: int, data: Data, g: torch.Generator) -> Tensor:
    taken = [f for f in i.operands if f == "tfloat32" or by_name(f).torch_dtype is not None] or list(i.operands)
    fmt = taken[int(torch.randint(0, len(taken), (1,), generator=g))]
    if fmt == "float4_e2m1fn":
        return torch.randint(0, 16, (rows, k), generator=g, dtype=torch.uint8)
    x = torch.randn(rows, k, generator=g, dtype=torch.float64)
    x = x * torch.exp2((data.base + torch.randint(0, data.spread + 1, (rows, k), generator=g)).double())
    x[torch.rand(rows, k, generator=g) < data.zeros] = 0
    x = x.abs() if data.positive else x
    if fmt == "tfloat32":
        return x.float()
    f = by_name(fmt)
    return from_codes(encode(x, f, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE), f)


def scales(i: Instruction, rows: int, blocks: int, g: torch.Generator) -> Tensor:
    if i.scale_block is None:
        return torch.rand(rows, 1, generator=g) + 0.5
    if i.scale_format == "float8_e8m0fnu":
        return torch.exp2(torch.randint(-30, 31, (rows, blocks), generator=g).float())
    codes = torch.randint(0, 0x7F, (rows, blocks), generator=g, dtype=torch.uint8)  # zero, subnormals, up to 448
    return codes.view(E4M3).float()


def product_of(i: Instruction, m: int, n: int, k: int, *, seed: int, data: Data) -> tuple[ScaledProduct, ScaledProduct]:
    """What the instruction multiplies, and the same values in dtypes that have them."""
    g = torch.Generator().manual_seed(seed)
    k = -(-k // 16) * 16 if i.sum is Sum.BLOCK_SCALED_GROUPS else k
    block = i.scale_block or k
    a, b = operand(i, m, k, data, g), operand(i, n, k, data, g)
    given_ = ScaledProduct(a, b, scales(i, m, -(-k // block), g), scales(i, n, -(-k // block), g), block, 1)
    return given_, in_torch(given_)


def in_torch(given_: ScaledProduct) -> ScaledProduct:
    """The product with FP4 codes as E4M3 codes of the same values."""
    if given_.a.is_floating_point():
        return given_
    return replace(given_, a=decode(given_.a, E2M1).to(E4M3), b=decode(given_.b, E2M1).to(E4M3))


def unscaled(given_: ScaledProduct, i: Instruction) -> ScaledProduct:
    """Without what the bound knows exactly: scales outside the instruction, dropped bits, flushed operands."""
    if i.scale_block is None:
        ones = torch.ones(given_.M, 1)
        given_ = replace(given_, a_scale=ones, b_scale=ones[: given_.N])
    return replace(given_, a=_seen(given_.a, i), b=_seen(given_.b, i))


def check(given_: ScaledProduct, twin: ScaledProduct, schedule: Schedule, interval: Interval) -> Tensor:
    """Ratio of the error to the bound on its side, where something is claimed; above 1 is a violation."""
    out = decode(predict_product(given_, schedule, out_dtype=torch.float32, engine="torch"))
    return ratio(out, exact(twin), interval)


def ratio(out: Tensor, value: Exact, interval: Interval) -> Tensor:
    error = (out - value.hi) - value.lo
    edge = torch.where(error > 0, interval.hi, -interval.lo) + value.slack
    found = torch.where(error == 0, torch.zeros_like(error), error.abs() / edge)
    assert interval.open is not None
    return torch.where(interval.open, torch.zeros_like(found), torch.nan_to_num(found, nan=torch.inf))


def chain_interval(product: ScaledProduct, schedule: Schedule) -> Interval:
    """The bound before any scale, which a kernel with unit scales has; that of the sum where scales are inside."""
    acc = of_schedule(schedule)
    if acc.scales_inside:
        return residue_bound(product, acc)
    acc = replace(acc, exact=False)
    a, b = _Side.of(product.left, 1, product, acc), _Side.of(product.right, 1, product, acc)
    found = residue if acc.kind is Sum.FUSED else stepwise
    _, low, high = found(a.converted or a.stored, b.converted or b.stored, acc)
    return Interval(low, high, "chain", open=torch.zeros(low.shape, dtype=torch.bool))


@pytest.mark.turns(4)
class TestSoundness:
    """computed - exact lies in [lo, hi], whatever the data; subnormals, flushed operands and dropped bits included."""

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("i", ALL, ids=lambda i: i.name)
    def test_every_instruction(self, i: Instruction) -> None:
        schedule = schedule_of(i)
        for seed, data in enumerate(DATA):
            given_, twin = product_of(i, 5, 4, 3 * i.k + 5, seed=seed, data=data)
            found = check(given_, twin, schedule, residue_bound(twin, of_schedule(schedule)))
            assert float(found.max()) <= 1, data

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("sabotaged", [False, True])
    def test_a_short_instruction_has_both_of_its_groups(self, monkeypatch: pytest.MonkeyPatch, sabotaged: bool) -> None:
        """An interleaved instruction that ends early sums two short groups, each aligned by itself: never one.

        The twin takes the products of both as one group, as a short row of products without filling would be.
        """
        if sabotaged:
            monkeypatch.setattr(chain, "_ordered", lambda x, acc: x)
        worst = 0.0
        for i in (i for i in ALL if i.order is Order.INTERLEAVED):
            schedule = schedule_of(i)
            for seed, k in enumerate(range(i.k + 1, 2 * i.k)):
                given_, twin = product_of(i, 24, 24, k, seed=seed, data=Data(14, -7))
                found = check(given_, twin, schedule, residue_bound(twin, of_schedule(schedule)))
                worst = max(worst, float(found.max()))
                if worst > 1:
                    break
        assert (worst > 1) == sabotaged

    @settings(max_examples=120, deadline=None)
    @given(
        st.sampled_from(ALL),
        st.integers(0, 2**31),
        st.integers(1, 200),
        st.integers(0, 24),
        st.integers(-60, 6),
        st.sampled_from((0.0, 0.3, 0.95)),
        st.booleans(),
    )
    def test_hypothesis(
        self, i: Instruction, seed: int, k: int, spread: int, base: int, zeros: float, positive: bool
    ) -> None:
        schedule = schedule_of(i)
        given_, twin = product_of(i, 3, 3, k, seed=seed, data=Data(spread, base, zeros, positive))
        assert float(check(given_, twin, schedule, residue_bound(twin, of_schedule(schedule))).max()) <= 1

    @pytest.mark.parametrize("i", [i for i in ALL if i.operands[0] in ("bfloat16", "tfloat32")], ids=lambda i: i.name)
    @pytest.mark.parametrize("base", [-80, 58], ids=["below float32", "beyond float32"])
    def test_the_ends_of_float32(self, i: Instruction, base: int) -> None:
        """Products below 2^-126 are aligned there; where a prefix may overflow nothing is claimed, and only there."""
        schedule, opened, held = schedule_of(i), 0, 0
        for seed in range(6):
            given_, twin = product_of(i, 6, 6, 2 * i.k, seed=seed, data=Data(8, base))
            interval = residue_bound(twin, of_schedule(schedule))
            assert float(check(given_, twin, schedule, interval).max()) <= 1
            assert interval.open is not None
            opened, held = opened + int(interval.open.sum()), held + int((~interval.open).sum())
        assert held > 0 and (opened > 0) == (base > 0)

    def test_opposite_infinities_cancel_in_no_tree(self) -> None:
        """2^130 - 2^130 is 0 in exact arithmetic and NaN in float32."""
        a = torch.tensor([[2.0**65, -(2.0**65), 1.0, 1.0]]).to(torch.bfloat16)
        p = ScaledProduct(a, a.abs(), torch.ones(1, 1), torch.ones(1, 1), 4, 1)
        schedule = schedule_of(instruction("gfx90a.mfma.bf16_1k"))
        assert bool(torch.isnan(predict_product(p, schedule, out_dtype=torch.float32)).all())
        interval = residue_bound(p, of_schedule(schedule))
        assert interval.open is not None and bool(interval.open.all())


@pytest.mark.turns(4)
class TestAdversary:
    """A search that keeps every change which brings the error nearer to the bound gets near, and never across."""

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("i", ALL, ids=lambda i: i.name)
    def test_attained(self, i: Instruction) -> None:
        """Before any scale: the bound is of no use a tenth narrower. (Scales add what other epilogues may round.)"""
        schedule, worst = schedule_of(i), 0.0
        g = torch.Generator().manual_seed(5)
        for start in range(4):
            k = (1, 1, 2, 4)[start] * i.k
            best, _ = product_of(i, 16, 16, k, seed=start, data=DATA[1 + start % 2])
            for _ in range(60):
                given_ = unscaled(best, i)
                twin = in_torch(given_)
                found = check(given_, twin, schedule, chain_interval(twin, schedule))
                worst = max(worst, float(found.max()))
                assert worst <= 1
                if worst >= 0.9:
                    return
                at = divmod(int(found.argmax()), 16)
                fresh, _ = product_of(
                    i, 16, 16, k, seed=int(torch.randint(0, 1 << 30, (1,), generator=g)), data=DATA[1 + start % 2]
                )
                best = replace(
                    given_,
                    a=_children(given_.a, at[0], fresh.a, g),
                    b=_children(given_.b, at[1], fresh.b, g),
                    a_scale=_every(given_.a_scale, at[0]),
                    b_scale=_every(given_.b_scale, at[1]),
                )
        pytest.fail(f"the worst ratio of {i.name} is {worst:.3f}")

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("i", ALL, ids=lambda i: i.name)
    def test_never_crossed_with_scales(self, i: Instruction) -> None:
        schedule, data, reached = schedule_of(i), Data(7, -3), 0.0
        g = torch.Generator().manual_seed(6)
        best, _ = product_of(i, 6, 6, 2 * i.k, seed=9, data=data)
        for _ in range(20):
            fresh, _ = product_of(i, 6, 6, 2 * i.k, seed=int(torch.randint(0, 1 << 30, (1,), generator=g)), data=data)
            trial = replace(best, a=_mixed(best.a, fresh.a, g), b=_mixed(best.b, fresh.b, g))
            twin = in_torch(trial)
            worst = float(check(trial, twin, schedule, residue_bound(twin, of_schedule(schedule))).max())
            assert worst <= 1
            if worst >= reached:
                best, reached = trial, worst
        assert reached > 0


class TestSabotage:
    """A narrower instruction leaves the interval of the declared one."""

    NARROWER = [i for i in ALL if i.align_bits is not None]

    @pytest.mark.parametrize("i", NARROWER, ids=lambda i: i.name)
    def test_fewer_bits(self, i: Instruction) -> None:
        assert i.align_bits is not None
        fewer = {"align_bits": i.align_bits - 4, "out_bits": min(i.out_bits, i.align_bits - 4) - 4}
        narrow = replace(i, **fewer)  # type: ignore[arg-type]
        worst = 0.0
        for seed in range(4):
            given_, twin = product_of(i, 8, 8, i.k, seed=seed, data=DATA[2])
            interval = residue_bound(twin, of_schedule(schedule_of(i)))
            worst = max(worst, float(check(given_, twin, schedule_of(narrow), interval).max()))
        assert worst > 1

    @pytest.mark.parametrize("name", ["gfx90a.mfma.f16", "sm80.mma.tf32", "gfx942.mfma.xf32"])
    def test_operands_as_they_are_given(self, name: str) -> None:
        """Ignoring that the instruction flushes or drops bits makes the bound wrong."""
        i = instruction(name)
        schedule = schedule_of(i)
        given_, twin = product_of(i, 8, 8, i.k, seed=1, data=Data(8, -16 if i.flush_subnormals else 0))
        acc = of_schedule(schedule)
        assert float(check(given_, twin, schedule, residue_bound(twin, acc)).max()) <= 1
        naive = residue_bound(twin, replace(acc, flushes=False, truncates=False))
        assert float(check(given_, twin, schedule, naive).max()) > 1


class TestRefusals:
    """A bound that does not apply says so."""

    def test_scales_of_another_format(self) -> None:
        i = instruction("sm100.tcgen05.nvf4")
        _, twin = product_of(i, 2, 2, 64, seed=0, data=DATA[0])
        acc = of_schedule(schedule_of(i))
        for value in (0.3, -1.0):
            with pytest.raises(NumericsError, match=r"float8_e4m3fn scales; b_scale"):
                residue_bound(replace(twin, b_scale=torch.full_like(twin.b_scale, value)), acc)

    def test_sums_of_sixteen(self) -> None:
        i = instruction("sm120.mma.mxf4")
        a = torch.ones(2, 40).to(E4M3)
        p = ScaledProduct(a, a, torch.ones(2, 2), torch.ones(2, 2), 32, 1)
        with pytest.raises(NumericsError, match="K=40 is no multiple of 16"):
            residue_bound(p, of_schedule(schedule_of(i)))


def _seen(x: Tensor, i: Instruction) -> Tensor:
    if "tfloat32" in i.operands:
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    if i.flush_subnormals:
        return torch.where(x.abs() < torch.finfo(x.dtype).tiny, torch.zeros_like(x), x)
    return x


def _every(x: Tensor, row: int) -> Tensor:
    return x[row : row + 1].expand(x.shape).contiguous()


def _children(x: Tensor, row: int, new: Tensor, g: torch.Generator) -> Tensor:
    """One row many times, all but the first with a few elements from ``new``."""
    made = _mixed(_every(_bits(x), row).view(x.dtype), new, g)
    _bits(made)[0] = _bits(x)[row]
    return made


def _bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def _mixed(old: Tensor, new: Tensor, g: torch.Generator) -> Tensor:
    """``old`` with about one element of eight from ``new``."""
    if old.dtype != new.dtype:
        return old
    take = torch.rand(old.shape, generator=g) < 0.125
    return torch.where(take, _bits(new), _bits(old)).view(old.dtype)


@pytest.mark.turns(4)
class TestNothingRounds:
    """Small integers and powers of two: every accumulator holds every partial sum, so one value alone is right."""

    OUTSIDE = [i for i in ALL if i.scale_block is None]

    def small(self, i: Instruction, bound: int) -> ScaledProduct:
        g = torch.Generator().manual_seed(8)

        def integers(rows: int) -> Tensor:
            x = torch.randint(-bound, bound + 1, (rows, 2 * i.k), generator=g).float()
            dtype = torch.float32 if "tfloat32" in i.operands else by_name(i.operands[0]).torch_dtype
            return x.to(dtype)

        powers = [torch.exp2(torch.randint(-3, 4, (rows, 1), generator=g).float()) for rows in (5, 6)]
        return ScaledProduct(integers(5), integers(6), *powers, 2 * i.k, 1)

    @pytest.mark.parametrize("i", OUTSIDE, ids=lambda i: i.name)
    def test_no_width(self, i: Instruction) -> None:
        p, schedule = self.small(i, 2), schedule_of(i)
        mask = unrounded(p, of_schedule(schedule))
        assert mask is not None and bool(mask.all())
        out, value = decode(predict_product(p, schedule, out_dtype=torch.float32)), exact(p)
        assert torch.equal(out, value.hi) and not bool(value.lo.any())

    @pytest.mark.parametrize("i", [i for i in OUTSIDE if i.sum is not Sum.EXACT], ids=lambda i: i.name)
    def test_a_finer_product_has_width(self, i: Instruction) -> None:
        """One element far below the others: an aligner, a tree or a chain that claims to be exact there is wrong."""
        p, schedule = self.small(i, 2), schedule_of(i)
        tiny = 2.0**-14 if i.align_bits is None or i.align_bits > 13 else 2.0**-8
        a, b = p.a.clone(), p.b.clone()
        a[:, 1], b[:, 1] = tiny, tiny
        a[:, 0], b[:, 0] = 1.0, 8.0
        if i.operands[0].startswith("float8") and tiny < 2.0**-9:
            a, b = (x.to(torch.float32).to(by_name(i.operands[1]).torch_dtype) for x in (a, b))
            a[:, 1], b[:, 1] = tiny, tiny
        p = replace(p, a=a, b=b)
        out = decode(predict_product(p, schedule, out_dtype=torch.float32))
        mask = unrounded(p, of_schedule(schedule))
        assert not torch.equal(out, exact(p).hi)
        assert mask is None or bool((out == exact(p).hi)[mask].all())

    def test_flushed_operands_are_no_exact_ones(self) -> None:
        i = instruction("gfx90a.mfma.f16")
        p = self.small(i, 2)
        p = replace(p, a=(p.a.float() * 2.0**-24).to(torch.float16))
        assert unrounded(p, of_schedule(schedule_of(i))) is None
        naive = replace(of_schedule(schedule_of(i)), kind=Sum.EXACT)
        assert unrounded(p, naive) is not None
