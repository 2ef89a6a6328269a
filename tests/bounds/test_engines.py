"""Compiled engines and bounds: the bits of the plain definitions, whatever the data, the shape and the blocking."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import tracemalloc
import warnings
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from oracle.bounds import Accumulator, cpu_lanes, engines, of_schedule, residue_bound, triton_sums
from oracle.bounds import product as definition
from oracle.errors import NumericsError
from oracle.numbers.formats import codes_of, decode
from oracle.tensorcore import cpu_jit, engine_cpu, engine_cuda, predict
from oracle.tensorcore.instructions import Sum
from oracle.tensorcore.packing import PROMOTE, plan, supported
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import Promotion, Schedule, get, schedules
from oracle.truth import gemm
from oracle.verdict.products import exact_and_interval
from tests.support.schedule_products import differing, formats_of, product_of

SHAPES = [(1, 5, 7), (3, 130, 96), (5, 9, 300)]  # ragged in M, N (panels of 128), K (groups, tiles and intervals)
FP8 = ("float8_e4m3fn", "float8_e5m2")


def compiled() -> list[Schedule]:
    """Schedules with a torch operand dtype that the CPU engine takes."""
    return [s for s in schedules() if formats_of(s) and supported(product_of(s, 1, 1, 32, seed=0), s)]


def _same(x: Tensor, y: Tensor) -> bool:
    """Equal float64 values, NaN equal to NaN."""
    return bool(torch.equal(torch.nan_to_num(x, 0.125), torch.nan_to_num(y, 0.125))) and bool(
        torch.equal(torch.isnan(x), torch.isnan(y))
    )


def compiled_sums(add: Any) -> Any:
    """``add`` of 32 products, in compiled code, which alone may call it."""
    lanes = cpu_lanes.LANES

    @numba.njit
    def run(a: Any, b: Any, sums: Any) -> None:
        add(a, 0, b, 0, 32, sums, lanes)

    return run


@pytest.mark.turns(4)
class TestPrediction:
    """The CPU engine writes the bits of the plain definition for every schedule it takes."""

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("schedule", compiled(), ids=lambda s: s.name)
    def test_every_schedule(self, schedule: Schedule) -> None:
        """Bell-shaped and uniform codes, NaN and infinities among them, ragged shapes, a bias."""
        for seed, (m, n, k) in enumerate(SHAPES):
            for data in ("bell", "finite", "special"):
                bias = seed == 1 or schedule.bias_after_cast
                product = product_of(schedule, m, n, k, seed=seed, data=data, bias=bias)
                plain = predict_product(product, schedule, out_dtype=torch.float32, engine="torch")
                fast = predict_product(product, schedule, out_dtype=torch.float32, engine="cpu")
                assert differing(plain, fast) == 0, (data, m, n, k)

    @pytest.mark.parametrize("formats", [(a, b) for a in FP8 for b in FP8], ids="-".join)
    @pytest.mark.parametrize("name", ["sm90.promote128", "sm90.chain", "sm89.promote128", "sm100.chain"])
    def test_mixed_formats(self, name: str, formats: tuple[str, str]) -> None:
        for data in ("finite", "special"):
            product = product_of(get(name), 4, 131, 260, seed=3, formats=formats, data=data)
            plain = predict_product(product, name, out_dtype=torch.bfloat16, engine="torch")
            assert differing(plain, predict_product(product, name, out_dtype=torch.bfloat16, engine="cpu")) == 0

    @pytest.mark.parametrize("special", [float("nan"), float("inf")])
    def test_special_scales(self, special: float) -> None:
        product = product_of(get("sm90.promote128"), 3, 5, 256, seed=4)
        product.a_scale[1, 1] = special
        product.b_scale[2, 0] = special
        plain = predict_product(product, "sm90.promote128", out_dtype=torch.float32, engine="torch")
        fast = predict_product(product, "sm90.promote128", out_dtype=torch.float32, engine="cpu")
        assert differing(plain, fast) == 0

    @pytest.mark.parametrize("promotion", [p for p in Promotion if p not in (Promotion.NONE, Promotion.RESCALE)])
    def test_every_promotion(self, promotion: Promotion) -> None:
        schedule = replace(get("sm90.promote128"), promotion=promotion)
        product = product_of(schedule, 3, 70, 384, seed=5)
        plain = predict_product(product, schedule, out_dtype=torch.float32, engine="torch")
        assert differing(plain, predict_product(product, schedule, out_dtype=torch.float32, engine="cpu")) == 0

    @pytest.mark.parametrize("group, t, to", [(32, 12, 13), (32, 14, 13), (16, 13, 13), (32, 13, 12), (8, 16, 16)])
    def test_other_widths(self, group: int, t: int, to: int) -> None:
        """Parameters that no hardware has are computed alike, and differ from sm90's own: they matter."""
        own = get("sm90.chain")
        schedule = replace(own, instruction=replace(own.instruction, group=group, align_bits=t, out_bits=to))
        product = product_of(schedule, 16, 40, 512, seed=6)
        plain = predict_product(product, schedule, out_dtype=torch.float32, engine="torch")
        fast = predict_product(product, schedule, out_dtype=torch.float32, engine="cpu")
        assert differing(plain, fast) == 0
        assert differing(fast, predict_product(product, own, out_dtype=torch.float32, engine="cpu")) > 0

    def test_one_code_changes_one_row(self) -> None:
        product = product_of(get("sm90.promote128"), 5, 7, 200, seed=7)
        before = predict_product(product, "sm90.promote128", out_dtype=torch.float32, engine="cpu")
        codes_of(product.a)[3, 190] += 8
        after = predict_product(product, "sm90.promote128", out_dtype=torch.float32, engine="cpu")
        rows = (codes_of(before) != codes_of(after)).any(dim=1)
        assert rows.tolist() == [False, False, False, True, False]

    def test_not_covered(self) -> None:
        """FP4 and AMD stay with the definition, and asking for the engine by name says so."""
        for schedule in schedules():
            if schedule.instruction.sum is not Sum.FUSED and schedule.instruction.sum is not Sum.FUSED_THEN_ADD:
                name = "bfloat16" if "bfloat16" in schedule.instruction.operands else "float8_e4m3fn"
                assert not engine_cpu.supports(product_of(schedule, 1, 1, 32, seed=0, formats=(name, name)), schedule)
        product = product_of(get("gfx942.chain"), 2, 2, 64, seed=0)
        with pytest.raises(NumericsError, match="engine='torch'"):
            predict_product(product, "gfx942.chain", out_dtype=torch.float32, engine="cpu")


@pytest.mark.turns(4)
class TestBlocking:
    """Chunks, tasks and threads change the memory and the time, not a bit."""

    def test_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        schedule = get("sm90.promote128")
        product = product_of(schedule, 37, 300, 384, seed=8, bias=True)
        whole = predict_product(product, schedule, out_dtype=torch.bfloat16, engine="cpu")
        monkeypatch.setattr(engine_cpu, "CHUNK_BYTES", 5 * 384 * 7)
        monkeypatch.setattr(engine_cpu, "CPU_BLOCK", 300 * 3)
        monkeypatch.setattr(cpu_jit, "TASK_ROWS", 2)
        assert differing(whole, predict_product(product, schedule, out_dtype=torch.bfloat16, engine="cpu")) == 0

    def test_bound_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        acc = of_schedule(get("sm90.promote128"))
        product = product_of(get("sm90.promote128"), 9, 140, 256, seed=9)
        value, residue = engines.compiled_exact(product), engines.compiled_residue(product, acc)[1]
        monkeypatch.setattr(engines, "CHUNK_BYTES", 9 * 256 * 4)
        monkeypatch.setattr(cpu_jit, "TASK_ROWS", 3)
        again = engines.compiled_exact(product)
        assert _same(value.hi, again.hi) and _same(value.lo, again.lo)
        assert _same(residue.lo, engines.compiled_residue(product, acc)[1].lo)

    @pytest.mark.parametrize("workers", [1, 2, 16])
    @pytest.mark.parametrize("rows, columns", [(1, 1), (1, 1000), (1000, 1), (300, 300), (257, 129)])
    def test_pieces_cover_once(self, rows: int, columns: int, workers: int) -> None:
        count = np.zeros((rows, -(-columns // 128)), int)
        for row0, row1, panel0, panel1 in cpu_jit.task_pieces(rows, columns, lanes=128, workers=workers):
            count[row0:row1, panel0:panel1] += 1
        assert (count == 1).all()

    def test_memory(self) -> None:
        """A long K is unpacked by few rows: arrays beyond operands and result stay below 256 MiB."""
        product = product_of(get("sm90.chain"), 160, 32, 1 << 18, seed=10)
        tracemalloc.start()
        try:
            engine_cpu.predict(product, get("sm90.chain"), out_dtype=torch.float32)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert 2**20 < peak < 2**28

    def test_without_a_cache_directory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """numba refuses to cache where nothing is writable; the kernel compiles all the same."""

        def refusing(*_: object) -> None:
            raise RuntimeError("cannot cache function: no locator available")

        monkeypatch.setattr(cpu_jit, "KernelCache", refusing)
        assert cpu_jit.jit(lambda x: x + 1)(2) == 3


class TestPlan:
    """Packing takes every product once, keeps groups whole and promotes where the schedule says."""

    @pytest.mark.parametrize("schedule", compiled(), ids=lambda s: s.name)
    def test_every_product_once(self, schedule: Schedule) -> None:
        order = plan(product_of(schedule, 1, 1, 300, seed=0), schedule)
        taken = order.source[order.source >= 0]
        assert sorted(taken.tolist()) == list(range(300))
        assert order.source.numel() % order.group == 0
        promotions = int((order.tiles[:, 3] & PROMOTE != 0).sum())
        assert promotions == (1 if schedule.interval is None else -(-300 // schedule.interval))

    def test_interleaved(self) -> None:
        schedule = get("sm90.mma_sync.chain")
        order = plan(product_of(schedule, 1, 1, 32, seed=0), schedule)
        expected = [k for k in range(32) if k % 4 < 2] + [k for k in range(32) if k % 4 >= 2]
        assert order.source.tolist() == expected

    def test_short_groups_are_padded(self) -> None:
        schedule = get("sm70.f16.chain")
        order = plan(product_of(schedule, 1, 1, 8, seed=0), schedule)
        assert order.source.tolist() == [0, 1, 2, 3, -1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, -1]


ACCUMULATORS = [
    *(of_schedule(get(name)) for name in ("sm90.promote128", "sm90.chain", "sm89.promote128", "sm100.chain")),
    Accumulator("odd group", 5, 13, 13, 64),
]


class TestBounds:
    """The compiled exact value, B2 and B3 are the plain definitions', bit for bit."""

    @pytest.mark.parametrize("acc", ACCUMULATORS, ids=lambda a: a.name)
    @pytest.mark.parametrize("data", ["bell", "finite", "special"])
    def test_equal(self, acc: Accumulator, data: str) -> None:
        schedule = get("sm90.chain" if acc.promotion is None else "sm90.promote128")
        for seed, (m, n, k) in enumerate(SHAPES):
            product = product_of(schedule, m, n, k, seed=seed, data=data, bias=seed == 1)
            plain, x = gemm.exact(product), residue_bound(product, acc)
            value, y = engines.compiled_residue(product, acc)
            for alone in (engines.compiled_exact(product), value):
                assert _same(alone.hi, plain.hi) and _same(alone.lo, plain.lo) and _same(alone.slack, plain.slack)
            assert _same(x.lo, y.lo) and _same(x.hi, y.hi)
            assert x.open is not None and y.open is not None and torch.equal(x.open, y.open)

    @pytest.mark.parametrize("acc", ACCUMULATORS, ids=lambda a: a.name)
    @pytest.mark.parametrize("data", ["bell", "finite", "special"])
    def test_in_any_order_and_split(self, acc: Accumulator, data: str) -> None:
        """Chains of one tile and of many, scales of few blocks and of many; one chain over K is cut anywhere."""
        schedule = get("sm90.chain" if acc.promotion is None else "sm90.promote128")
        for seed, (m, n, k) in enumerate(SHAPES):
            product = product_of(schedule, m, n, k, seed=seed, data=data, bias=seed == 1)
            pairs = [
                (engines.compiled_any_order(product, acc), definition.any_order_bound(product, acc)),
                (engines.compiled_split(product, acc), definition.split_bound(product, acc)),
            ]
            for mine, plain in pairs:
                assert mine is not None and (mine.name, mine.weak) == (plain.name, plain.weak)
                assert _same(mine.lo, plain.lo) and _same(mine.hi, plain.hi)
                assert mine.open is not None and plain.open is not None and torch.equal(mine.open, plain.open)

    def test_an_error_that_grows_on_is_left_to_the_definition(self) -> None:
        """Few bits and no promotion: the definition leaves every result open."""
        coarse, product = Accumulator("few bits", 8, 4, 3, None), product_of(get("sm90.chain"), 2, 3, 300, seed=3)
        for compiled, bound in (
            (engines.compiled_any_order, engines.any_order_bound),
            (engines.compiled_split, engines.split_bound),
        ):
            assert compiled(product, coarse) is None
            due = bound(product, coarse)
            assert due.open is not None and bool(due.open.all())

    def test_a_split_that_cancels(self) -> None:
        """Steps whose products add up to nothing: an accumulator of 0 still loses what its least exponent does."""
        acc, product = of_schedule(get("sm90.chain")), product_of(get("sm90.chain"), 3, 5, 192, seed=4)
        product.a[:, 1::2] = product.a[:, ::2]
        product.b[:, 1::2] = (-product.b[:, ::2].float()).to(product.b.dtype)
        mine, plain = engines.compiled_split(product, acc), definition.split_bound(product, acc)
        assert mine is not None and _same(mine.lo, plain.lo) and _same(mine.hi, plain.hi)

    @pytest.mark.parametrize("field", ["align", "out", "group"])
    def test_a_split_notices_another_accumulator(self, field: str) -> None:
        """One bit of the alignment or of the result, or shorter steps, give another bound."""
        acc, product = of_schedule(get("sm90.chain")), product_of(get("sm90.chain"), 3, 5, 1024, seed=5)
        other = replace(acc, **{field: getattr(acc, field) // 2 if field == "group" else getattr(acc, field) - 1})
        mine, plain = engines.compiled_split(product, other), definition.split_bound(product, acc)
        assert mine is not None and not _same(mine.hi, plain.hi)

    def test_notices_another_order(self) -> None:
        """Chains added as they come, in any order, and their products too: each bound is wider than the one before."""
        acc = of_schedule(get("sm90.promote128"))
        product = product_of(get("sm90.promote128"), 4, 8, 512, seed=12)
        loose = engines.compiled_any_order(product, acc)
        assert loose is not None
        split = engines.compiled_split(product, acc)
        assert split is not None
        bounds = engines.compiled_residue(product, acc)[1], split, loose
        for narrow, wide in itertools.pairwise(bounds):
            assert float((wide.hi - wide.lo).mean()) > float((narrow.hi - narrow.lo).mean())

    def test_floors_on_a_machine_that_rounds_to_nearest_alone(self) -> None:
        """Each product cut apart gives what rounding toward zero does; rounding to nearest does not."""
        g = torch.Generator().manual_seed(3)
        a = decode(torch.randn(32, generator=g).to(torch.float8_e4m3fn)).numpy()
        b = decode(torch.randn(32, cpu_lanes.LANES, generator=g).to(torch.float8_e4m3fn)).numpy()
        halves = np.ascontiguousarray(np.stack([b.clip(min=0), (-b).clip(min=0)], axis=1))
        found = []
        for add in (cpu_lanes.toward_zero, cpu_lanes.apart, cpu_lanes.add_products):
            sums = np.full(3 * cpu_lanes.LANES, 2.0 ** (52 - 9))
            compiled_sums(add)(a, halves, sums)
            found.append(sums)
        assert (found[0] == found[1]).all() and (found[0] != found[2]).any()
        products = torch.from_numpy(a[:, None] * b) * 2.0**9
        cut = torch.stack([products.clamp(min=0).floor().sum(dim=0), (-products).clamp(min=0).floor().sum(dim=0)])
        assert (found[0][cpu_lanes.LANES :] == 2.0**43 + cut.flatten().numpy() * 2.0**-9).all()

    @pytest.mark.parametrize("special", [float("nan"), float("inf")])
    def test_special_values_under_one_scale(self, special: float) -> None:
        """A scale per tensor belongs to every row; a scale of one row and group to that row alone."""
        acc = of_schedule(get("sm90.promote128"))
        product = product_of(get("sm90.promote128"), 3, 5, 256, seed=16, formats=("float8_e5m2",) * 2)
        product.a.view(torch.uint8)[1, 7] = codes_of(torch.tensor([special]).to(torch.float8_e5m2))[0]
        one = replace(product, a_scale=product.a_scale[:1, :1].clone(), block=256, b_scale=product.b_scale[:, :1])
        product.b_scale[2, 1] = special
        for some in (product, one):
            plain, x = gemm.exact(some), residue_bound(some, acc)
            value, y = engines.compiled_residue(some, acc)
            assert _same(value.hi, plain.hi) and _same(x.lo, y.lo) and _same(x.hi, y.hi)
            assert [bool(row) for row in plain.hi.isfinite().any(dim=1)] == [True, False, True]

    @pytest.mark.parametrize("fmt, large", [(torch.float8_e4m3fn, 0x7B), (torch.float8_e5m2, 0x5B)], ids=str)
    def test_a_step_whose_products_are_all_zero_costs_nothing(self, fmt: torch.dtype, large: int) -> None:
        """Also where the other operand is large."""
        acc = of_schedule(get("sm90.promote128"))
        product = product_of(get("sm90.promote128"), 3, 5, 65, seed=14)
        a, b = (x.float().to(fmt) for x in (product.a, product.b))
        a.view(torch.uint8)[:, 64:] = 0
        b.view(torch.uint8)[:, 64:] = large
        product = replace(product, a=a, b=b)
        mine, plain = engines.compiled_residue(product, acc)[1], residue_bound(product, acc)
        shorter = residue_bound(replace(product, a=a[:, :64], b=b[:, :64], block=128), acc)
        assert _same(mine.lo, plain.lo) and _same(mine.hi, plain.hi)
        assert _same(mine.lo, shorter.lo) and _same(mine.hi, shorter.hi)

    def test_wide_exponents(self) -> None:
        """E5M2 whose sums still fit float64."""
        acc = of_schedule(get("sm90.promote128"))
        product = product_of(get("sm90.promote128"), 5, 9, 300, seed=11, formats=("float8_e5m2", "float8_e4m3fn"))
        assert engines.why_not(product, acc) is None
        mine, plain = engines.compiled_residue(product, acc)[1], residue_bound(product, acc)
        assert _same(mine.lo, plain.lo) and _same(mine.hi, plain.hi)

    def test_scales_far_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Low words that are not zero, what even they cannot hold, and scales so small that underflow counts; tasks of
        few rows."""
        monkeypatch.setattr(cpu_jit, "TASK_ROWS", 3)
        acc = of_schedule(get("sm90.promote128"))
        product = product_of(get("sm90.promote128"), 9, 140, 512, seed=15)
        for powers in ((0, -50, -100, 0), (-70, -70, -70, -70)):
            scale = (product.a_scale.double() * 2.0 ** torch.tensor(powers)).float()
            some = replace(product, a_scale=scale, b_scale=product.b_scale * (2.0**-70 if powers[0] else 1.0))
            plain, x = gemm.exact(some), residue_bound(some, acc)
            value, y = engines.compiled_residue(some, acc)
            assert bool(plain.lo.any()) and (powers[0] != 0 or bool(plain.slack.any()))
            for alone in (engines.compiled_exact(some), value):
                assert _same(alone.hi, plain.hi) and _same(alone.lo, plain.lo) and _same(alone.slack, plain.slack)
            assert _same(x.lo, y.lo) and _same(x.hi, y.hi)

    def test_notices_another_accumulator(self) -> None:
        """One alignment bit fewer widens the interval."""
        acc = of_schedule(get("sm90.promote128"))
        product = product_of(get("sm90.promote128"), 4, 8, 256, seed=12)
        narrow = engines.compiled_residue(product, acc)[1]
        wide = engines.compiled_residue(product, replace(acc, align=acc.align - 1))[1]
        assert bool((wide.hi - wide.lo > narrow.hi - narrow.lo).all())

    def test_refusals(self) -> None:
        acc = of_schedule(get("sm90.promote128"))
        fits = product_of(get("sm90.promote128"), 2, 2, 128, seed=13)
        too_wide = product_of(get("sm90.chain"), 2, 2, 128, seed=13, formats=("float8_e5m2",) * 2, data="finite")
        inside = replace(acc, scales_inside=True)
        for product, accumulator, word in ((too_wide, acc, "leave float64"), (fits, inside, "inside")):
            reason = engines.why_not(product, accumulator)
            assert reason is not None and word in reason
            with pytest.raises(NumericsError, match=word):
                engines.compiled_residue(product, accumulator)
        with pytest.raises(NumericsError, match="leave float64"):
            engines.compiled_exact(too_wide)


INTERPRETED = """
from dataclasses import replace
import torch
from oracle.bounds import screen, triton_sums
from oracle.routines import cases, get as cases_get
from oracle.routines.base import Call
from oracle.tensorcore import engine_cuda
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get
from oracle.truth import gemm
from tests.support.schedule_products import differing, product_of
CALLS = ("fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=5,n=200,k=300/family=cancel/seed=1",
         "cutlass_scaled_mm/e4m3xe4m3-bf16/token:channel/m=7,n=32,k=48/bias=bf16/family=randn/seed=1",
         "cutlass_scaled_mm/e4m3xe4m3-bf16/tensor:tensor/m=7,n=32,k=48/a:pitch/family=randn/seed=1")
for name, k, data in (("sm90.promote128", 160, "special"), ("sm90.mma_sync.chain", 40, "bell"),
                      ("sm100.promote128.muladd", 64, "finite"), ("sm89.promote128.row_then_col", 32, "finite")):
    product = product_of(get(name), 3, 5, k, seed=k, data=data, formats=("float8_e4m3fn", "float8_e5m2"), bias=True)
    assert engine_cuda.supports(product, get(name)), name
    fast = predict_product(product, name, out_dtype=torch.bfloat16, engine="cuda")
    assert differing(fast, predict_product(product, name, out_dtype=torch.bfloat16, engine="torch")) == 0, name
for kind in ("ones", "wide", "halves"):
    p = product_of(get("sm90.promote128"), 5, 1100, 384, seed=4, data="bell", bias=True)
    if kind == "wide":
        g = torch.Generator().manual_seed(5)
        scales = (torch.rand(s.shape, generator=g).mul(200).sub(100).exp2() for s in (p.a_scale, p.b_scale))
        p = replace(p, **dict(zip(("a_scale", "b_scale"), scales)))
    if kind == "halves":  # 16 bits, and a last block of 44
        p = replace(p, a=p.a[:, :300].to(torch.float32).to(torch.float16), b=p.b[:, :300])
    triton_sums.HELD = 2 * 8 * p.M * p.N  # two blocks at a time, then the last
    assert triton_sums.why_not(p) is None
    made, due = triton_sums.exact(p), gemm.exact(p)
    assert all(torch.equal(getattr(made, x), getattr(due, x)) for x in ("hi", "lo", "slack")), kind
    assert kind != "wide" or float(due.slack.max()) > 0
    other = gemm.exact(replace(p, a_scale=p.a_scale.flip(1)))
    assert not torch.equal(made.hi, other.hi)
product = product_of(get("sm90.chain"), 2, 2, 32, seed=1)
fast = predict_product(product, "sm90.chain", out_dtype=torch.float32, engine="cuda")
product.a.view(torch.uint8)[0, 0] += 8
assert differing(fast, predict_product(product, "sm90.chain", out_dtype=torch.float32, engine="torch")) > 0
def of_case(name):
    case = cases.parse(name)
    return Call(cases_get(case.contract), case.inputs(), case.call_options()).checked().parts[0].product
screen.LANES, kernels, outside = 64, screen._kernels, 0
for p in map(of_case, CALLS):
    pairs = torch.arange(p.M).repeat_interleave(p.N), torch.arange(p.N).repeat(p.M)
    made = screen.Screen.of(p)
    screen._kernels = lambda _: None
    due = screen.Screen.of(p)
    size, screen._kernels = due._size(*pairs), kernels
    assert torch.equal(made._value, due._value) and torch.equal(made._least, due._least)
    assert torch.allclose(made._size(*pairs), size, rtol=1e-13, atol=0)
    right = due._value.to(torch.bfloat16)
    wrong = torch.where(torch.arange(p.M * p.N).view(p.M, p.N) == 3, torch.nan, right)
    for out in (right, wrong, right.half(), torch.zeros_like(right)):
        screen._kernels = kernels
        left, count, worst = made._left(out)
        screen._kernels = lambda _: None
        known, also, column = due._left(out)
        screen._kernels = kernels
        assert torch.equal(left, known) and count == also == int(left.sum())
        if count > p.M + p.N:  # any of the worst ones
            ratio = screen._excess(out, due._value) / due._least
            assert torch.equal(*(ratio.gather(1, x[:, None]) for x in (worst, column)))
        outside += made.outside(out) is not None
        assert (made.outside(out) is None) == (due.outside(out) is None)
assert outside >= 6
print("same bits")
"""


@pytest.mark.parametrize("name", ["sm90.promote128", "ieee32.any", "sm90.promote128.split"])
def test_a_small_product_of_a_device_is_computed_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact value, interval and prediction are those of its copy; here that is another product, to be told apart."""
    product = product_of(get("sm90.promote128"), 4, 6, 256, seed=15, bias=True)
    other = replace(product, a=product.a.flip(0)).to("cpu")
    due = (
        engines.exact(other),
        exact_and_interval(other, name)[1],
        predict_product(other, "sm90.promote128", out_dtype=torch.float32),
    )
    monkeypatch.setattr(gemm.ScaledProduct, "nearby", property(lambda self: other if self.a is product.a else None))
    value, interval = engines.exact(product), exact_and_interval(product, name)[1]
    assert torch.equal(value.hi, due[0].hi) and torch.equal(value.lo, due[0].lo)
    assert torch.equal(interval.lo, due[1].lo) and torch.equal(interval.hi, due[1].hi) and interval.name == due[1].name
    assert torch.equal(predict_product(product, "sm90.promote128", out_dtype=torch.float32), due[2])
    assert not torch.equal(predict_product(product, "sm90.promote128", out_dtype=torch.float32, engine="cpu"), due[2])


def test_a_device_without_an_engine_for_a_schedule_takes_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction is that of the product's copy on the CPU; here that is another product, to be told apart."""
    product = product_of(get("sm90.promote128"), 4, 6, 256, seed=15, bias=True)
    other = replace(product, a=product.a.flip(0))
    due = predict_product(other, "sm90.promote128", out_dtype=torch.float32)
    engine_of = predict._engine
    monkeypatch.setattr(predict, "_engine", lambda p, *more: None if p is product else engine_of(p, *more))
    assert not torch.equal(predict_product(product, "sm90.promote128", out_dtype=torch.float32), due)
    monkeypatch.setattr(predict, "_on_the_cpu", lambda p: other)
    assert torch.equal(predict_product(product, "sm90.promote128", out_dtype=torch.float32), due)


@pytest.mark.turns(4)
@pytest.mark.interpreter
class TestCuda:
    """The Triton kernel gives the same bits in its interpreter, and on a device where there is one."""

    @pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
    def test_interpreter(self) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        command = [sys.executable, "-c", INTERPRETED]
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
        assert done.stdout.strip() == "same bits", done.stderr

    @pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
    @pytest.mark.parametrize("ones", [(), ("rows",), ("columns",), ("blocks", "count"), ("b_rows",)])
    def test_the_join_compiles(self, ones: tuple[str, ...]) -> None:
        """For sm90; Triton compiles an integer that is 1 as a constant."""
        from oracle.bounds import triton_join
        from tests.support.ptx import ptx_of

        types = dict.fromkeys(("sums", "a_scale", "b_scale", "hi", "lo", "slack"), "*fp64")
        ptx = ptx_of(triton_join.join, {"BLOCK": 1024, **dict.fromkeys(ones, 1)}, types)
        assert ".f64" in ptx and "fma." not in ptx  # no product is joined with a sum

    @pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
    @pytest.mark.parametrize("kernel", ["scaled", "beyond", "sizes"])
    def test_the_screen_compiles(self, kernel: str) -> None:
        """For sm90, in float64."""
        from oracle.bounds import triton_screen
        from tests.support.ptx import ptx_of

        bytes_, wide = dict.fromkeys(("codes", "a", "b"), "*u8"), dict.fromkeys(("rows", "columns", "worst"), "*i64")
        types = {"codes": "*i16", "left": "*i8", "counts": "*i32"} if kernel == "beyond" else bytes_
        types |= {"columns": "i32"} | ({} if kernel == "scaled" else wide)
        types |= {"columns": "*i64" if kernel == "sizes" else "i32"}
        tables = ("values", "halves", "value", "least", "scales", "a_values", "b_values", "a_scales", "b_scales", "out")
        ptx = ptx_of(getattr(triton_screen, kernel), {"BLOCK": 1024}, types | dict.fromkeys(tables, "*fp64"))
        assert ".f64" in ptx and ".f32" not in ptx

    def test_needs_its_device(self) -> None:
        """Operands on the CPU are not for this engine."""
        schedule = get("sm90.chain")
        assert not engine_cuda.supports(product_of(schedule, 1, 1, 32, seed=0), schedule)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    def test_exact_on_a_device(self) -> None:
        product = product_of(get("sm90.promote128"), 200, 300, 1000, seed=14, data="bell")
        there = replace(product, **{f: getattr(product, f).cuda() for f in ("a", "b", "a_scale", "b_scale")})
        assert triton_sums.why_not(there) is None
        made, due = triton_sums.exact(there), gemm.exact(product)
        assert all(torch.equal(getattr(made, x).cpu(), getattr(due, x)) for x in ("hi", "lo", "slack"))

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    @pytest.mark.parametrize("name", ["sm90.promote128", "sm90.chain", "sm89.promote128", "sm100.promote128"])
    def test_bounds_on_a_device(self, name: str) -> None:
        """Those in CUDA C++ have the bits of the definitions; elsewhere they are run on the CPU."""
        acc, schedule = of_schedule(get(name)), get("sm90.chain" if "chain" in name else "sm90.promote128")
        fields = ("a", "b", "a_scale", "b_scale", "bias")
        for m, n, k, data in ((70, 130, 300, "special"), (9, 40, 7168, "finite")):  # few chains, and many
            product = product_of(schedule, m, n, k, seed=16, data=data, bias=True)
            there = replace(product, **{f: getattr(product, f).cuda() for f in fields})
            assert engines.why_not_on_device(there, acc) is None
            for kind in ("residue_bound", "any_order_bound", "split_bound"):
                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # a bound that is not confirmed is the definition's
                    made = getattr(engines, kind)(there, acc).to("cpu")
                due = getattr(definition, kind)(product, acc)
                assert _same(made.lo, due.lo) and _same(made.hi, due.hi) and torch.equal(made.open, due.open), kind

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    @pytest.mark.parametrize(
        "name", ["sm90.promote128", "sm90.chain", "sm89.promote128", "sm90.mma_sync.promote128", "sm100.chain"]
    )
    def test_device(self, name: str) -> None:
        product = product_of(get(name), 200, 300, 1000, seed=14, data="special")
        there = replace(product, **{f: getattr(product, f).cuda() for f in ("a", "b", "a_scale", "b_scale")})
        fast = predict_product(there, name, out_dtype=torch.float32, engine="cuda").cpu()
        assert differing(fast, predict_product(product, name, out_dtype=torch.float32, engine="cpu")) == 0
