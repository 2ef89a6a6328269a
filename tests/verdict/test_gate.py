"""``oracle.gate``: what it rejects is wrong, what is right it accepts; its interval holds that of float32."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import oracle
from oracle.bounds import of_schedule
from oracle.bounds.engines import exact
from oracle.bounds.ieee32 import float64_and_bound, ieee32_bound, near
from oracle.bounds.screen import Screen
from oracle.errors import NumericsError, OptionError, OracleError
from oracle.routines import cases, get, profiles
from oracle.routines.base import Call
from oracle.routines.catalogue import faults_of
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get as get_schedule
from oracle.tensorcore.schedules import schedules
from oracle.verdict.parts import interval_of
from tests.support.schedule_products import product_of

GEMM = "fp8_gemm_nt"
CASE = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=64,n=128,k=512/family={}/seed=1"
INPUTS = cases.parse(CASE.format("randn")).inputs()
CONTRACTS = ("cutlass_scaled_mm", "per_token_group_quant_fp8", "scaled_fp8_quant", "set_mla_kv_buffer", "mm_mxfp8")


def candidate(block_m: int, block_k: int, split: int, *, fault: str = "") -> Tensor:
    """A float32 GEMM by tiles of rows and of K, K in parts; ``fault`` is one thing that a generator gets wrong."""
    a = INPUTS["a"].float() * INPUTS["a_scale"].repeat_interleave(128, 1)
    b = INPUTS["b"].float() * INPUTS["b_scale"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    out = torch.zeros(64, 128)
    for m in range(0, 64, block_m):
        rows = slice(m, m + block_m)
        parts = []
        for part in range(split):
            sums = torch.zeros(block_m, 128)
            for k in range(part * 512 // split, (part + 1) * 512 // split, block_k):
                if fault == "last block of K" and k + block_k == 512:
                    continue
                tile = a[rows, k : k + block_k]
                sums += (tile.flip(0) if fault == "rows of a tile" and m == 0 else tile) @ b[:, k : k + block_k].T
            parts.append(sums)
        out[rows] = sum(parts[1:], parts[0])
    if fault == "half accumulator":
        out = out.to(torch.float8_e5m2).float()
    return out


LEGAL = [(m, k, split) for m in (8, 16, 32, 64) for k in (16, 32, 64, 128) for split in (1, 2, 4)][:37]
FAULTS = ("last block of K", "rows of a tile", "half accumulator")


class TestCandidates:
    """37 legal tilings and three broken ones, of one call, asked from four threads."""

    @pytest.mark.parametrize("arch", ["cpu", "sm90"])
    def test_forty(self, arch: str) -> None:
        accepts = oracle.gate(GEMM, arch=arch).prepared(INPUTS)
        outputs = [candidate(*tiles) for tiles in LEGAL] + [candidate(16, 64, 1, fault=fault) for fault in FAULTS]
        assert len({out.numpy().tobytes() for out in outputs}) > 5
        with ThreadPoolExecutor(4) as threads:
            answers = [list(threads.map(accepts, outputs)) for _ in range(2)]
        assert answers[0] == answers[1] == [True] * 37 + [False] * 3

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_forty_on_a_device(self, dtype: torch.dtype) -> None:
        """By the passes of Triton, and, in float32, by torch's operations."""
        accepts = oracle.gate(GEMM, arch="sm90").prepared({name: x.cuda() for name, x in INPUTS.items()})
        outputs = [candidate(*tiles) for tiles in LEGAL] + [candidate(16, 64, 1, fault=fault) for fault in FAULTS]
        assert [accepts(out.to(dtype).cuda()) for out in outputs] == [True] * 37 + [False] * 3

    @pytest.mark.usefixtures("unexplained")
    def test_beside_judge(self) -> None:
        outputs = [candidate(*LEGAL[0]), *(candidate(16, 64, 1, fault=fault) for fault in FAULTS)]
        judged = [bool(oracle.judge(GEMM, INPUTS, out, arch="cpu")) for out in outputs]
        assert judged == [oracle.gate(GEMM, arch="cpu")(INPUTS, out) for out in outputs] == [True, False, False, False]


class TestAgreesWithTheJudge:
    """It rejects what is FAILED and accepts what is not, for right kernels and for faults of the catalogue."""

    @pytest.mark.sampled(3)
    @pytest.mark.usefixtures("unexplained")
    @pytest.mark.parametrize("name", CONTRACTS)
    def test_contracts(self, name: str) -> None:
        contract, accepts = get(name), oracle.gate(name, arch="sm90")
        case = next(case for case in profiles.cases(name, "quick") if case.family == cases.DEFAULT_FAMILY)
        inputs, options = case.inputs(), case.call_options()
        call = Call(contract, inputs, options, arch="sm90").checked()
        assert accepts(inputs, contract.kernel(call), **options)
        rejected = 0
        for fault in [fault for fault in faults_of(name) if fault.needs(call) is None][:8]:
            out = contract.kernel(call, (fault,))
            failed = oracle.judge(name, inputs, out, arch="sm90", **options).status.is_failure
            accepted = accepts(inputs, out, **options)
            assert failed or accepted, "what is rejected is wrong"
            rejected += not accepted
        assert rejected

    @pytest.mark.parametrize("schedule", ["sm90.promote128", "sm90.promote128.muladd"])
    def test_bits_of_a_schedule(self, schedule: str) -> None:
        """A truncating accumulator leaves the interval of float32; undeclared and declared it is accepted."""
        inputs = cases.parse(CASE.format("cancel")).inputs()
        out = oracle.predict(GEMM, inputs, numerics=schedule, out_dtype=torch.float32)
        assert isinstance(out, Tensor)
        (part,) = Call(get(GEMM), inputs, {}, out_dtype=torch.float32).checked().parts
        assert not bool(near(out, *float64_and_bound(part.product)).all())
        for numerics in (None, schedule):
            accepts = oracle.gate(GEMM, arch="sm90", numerics=numerics).prepared(inputs)
            assert accepts(out) and not accepts(out * 1.001)

    def test_values_of_no_number(self) -> None:
        """A NaN where none is due is rejected, one that is due accepted; an infinity too."""
        inputs = {name: x.clone() for name, x in INPUTS.items()}
        inputs["a"].view(torch.uint8)[3, 5] = 0x7F
        right = oracle.reference(GEMM, inputs, out_dtype=torch.bfloat16)
        assert isinstance(right, Tensor) and bool(right[3].isnan().all())
        accepts = oracle.gate(GEMM, arch="cpu").prepared(inputs)
        assert accepts(right) and not accepts(right.nan_to_num(nan=0.0))
        for wrong in (torch.nan, torch.inf):
            assert not accepts(torch.where(torch.arange(64)[:, None] == 9, wrong, right))

    def test_what_is_refused(self) -> None:
        with pytest.raises(NumericsError, match="nothing"):
            oracle.gate(GEMM, numerics="sm90.nothing")(INPUTS, candidate(*LEGAL[0]))
        with pytest.raises(NumericsError, match="arch is empty"):
            oracle.gate(GEMM, arch="")
        with pytest.raises(OracleError, match="shape|expected"):
            oracle.gate(GEMM)(INPUTS, torch.zeros(3, 3, dtype=torch.bfloat16))
        with pytest.raises(OptionError):
            oracle.gate(GEMM)(INPUTS, candidate(*LEGAL[0]), nothing=1)


class TestTheInterval:
    """Around a float64 product, it holds the interval of float32 around the exact value."""

    @pytest.mark.parametrize(
        "case",
        [
            *(CASE.format(family) for family in ("randn", "cancel", "outlier")),
            "cutlass_scaled_mm/e4m3xe4m3-bf16/token:channel/m=33,n=256,k=384/bias=bf16/family=randn/seed=1",
            "fp8_fp4_gemm_nt/e4m3xe2m1-bf16/1x128:1x32/m=17,n=136,k=224/c=1/family=randn/seed=2",
            "group_gemm_nvfp4_nt_groupwise/e2m1xe2m1-bf16/1x16/m=4,n=128,k=128,g=1/family=randn/seed=1",
        ],
    )
    def test_it_holds(self, case: str) -> None:
        """With a bias, a summand and an alpha too."""
        called = cases.parse(case)
        (part,) = Call(get(called.contract), called.inputs(), called.call_options()).checked().parts
        value, width = float64_and_bound(part.product)
        due, bound = exact(part.product), ieee32_bound(part.product)
        assert bool(((value - due.hi).abs() + due.lo.abs() + bound.hi <= width).all())
        assert bool((width <= bound.hi * (1 + 2.0**-25)).all()), "and is hardly wider"

    @pytest.mark.parametrize("family", ["randn", "cancel", "outlier"])
    @pytest.mark.parametrize("share", [0.1, 0.99, 1.01, 30.0])
    def test_the_screen(self, family: str, share: float) -> None:
        """What it leaves out or refuses, for one element and for all, is what the whole interval decides."""
        (part,) = Call(get(GEMM), cases.parse(CASE.format(family)).inputs(), {}).checked().parts
        (value, width), screen = float64_and_bound(part.product), Screen.of(part.product)
        assert screen is not None
        due = value.float()
        half = 2.0 ** (torch.frexp(due)[1].double() - 25)
        moved = (due + share * (width + half)).float()
        for out in (moved, torch.where(torch.arange(due.numel()).view_as(due) == 77, moved, due)):
            bad, found = ~near(out, value, width), screen.outside(out)
            assert (found is not None) == bool(bad.any())
            assert found is None or bool(bad[found.rows, found.columns].all())
        assert screen.outside(due) is None
        for wrong in (torch.nan, torch.inf):
            assert screen.outside(torch.where(due == due[3, 4], wrong, due)) is not None

    @pytest.mark.parametrize("name", ["sm90.promote128", "sm90.mma_sync.promote128", "sm90.mma_f16.promote128"])
    @pytest.mark.parametrize("family", ["randn", "cancel", "outlier"])
    def test_reach(self, family: str, name: str) -> None:
        """No accumulator's interval, nor that with K split, ends beyond the screen's reach for it."""
        (part,) = Call(get(GEMM), cases.parse(CASE.format(family)).inputs(), {}).checked().parts
        screen, rows = Screen.of(part.product), torch.arange(64).repeat_interleave(128)
        assert screen is not None
        size = screen._size(rows, torch.arange(128).repeat(64)).view(64, 128)
        reach = screen.reach(size, of_schedule(get_schedule(name)))
        for numerics in (name, f"{name}.split"):
            interval = interval_of(part.product, numerics)
            assert bool((torch.maximum(-interval.lo, interval.hi) <= reach).all())
        unknown = of_schedule(get_schedule("sm90.chain"))
        assert bool(screen.reach(size, unknown).isinf().all()), "K may be cut anywhere"

    @pytest.mark.parametrize("data", ["bell", "finite codes"])
    def test_no_schedule_goes_beyond_its_reach(self, data: str) -> None:
        """The bits of every schedule that promotes, of bell-shaped and of all finite codes. Negative: a
        thousandth of the reach does not hold all of them."""
        largest = []
        for schedule in schedules():
            if (acc := of_schedule(schedule)).promotion is None:
                continue
            product = product_of(schedule, 16, 64, 512, seed=3, data=data)
            screen, rows = Screen.of(product), torch.arange(16).repeat_interleave(64)
            if screen is None:
                continue
            reach = screen.reach(screen._size(rows, torch.arange(64).repeat(16)), acc).view(16, 64)
            if bool(reach.isinf().all()):
                continue
            error = (predict_product(product, schedule, out_dtype=torch.float32).double() - screen._value).abs()
            assert bool((error <= reach).all()), schedule.name
            largest.append(float((error / reach).max()))
        assert len(largest) > 60 and max(largest) > 1e-3

    @pytest.mark.usefixtures("unexplained")
    def test_nothing_is_rounded(self) -> None:
        """Of exact data with powers of two as scales one value is right; the next one is not, to judge neither."""
        inputs = cases.parse(CASE.format("exact")).inputs()
        (part,) = Call(get(GEMM), inputs, {}).checked().parts
        value, width = float64_and_bound(part.product)
        assert bool((width == 0).all()) and torch.equal(value, exact(part.product).hi)
        right = value.float()
        wrong = right.clone()
        wrong[3, 4] = torch.nextafter(right[3, 4], torch.tensor(torch.inf))
        accepts = oracle.gate(GEMM, arch="cpu").prepared(inputs)
        assert accepts(right) and not accepts(wrong) and not oracle.judge(GEMM, inputs, wrong, arch="cpu")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_rounding_is_near(self, dtype: torch.dtype) -> None:
        """The rounded value is near its own; the next value but one is not, nor is one that is no number."""
        value = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).abs() + 0.01
        zero = torch.zeros_like(value)
        rounded = value.to(dtype)
        assert bool(near(rounded, value, zero).all()) and not bool(near(rounded, value * (1 + 2.0**-6), zero).any())
        beyond = torch.where(rounded > 0, torch.nan, torch.inf).to(dtype)
        assert not bool(near(beyond, value, zero + 1).any()) and not bool(near(rounded, value, zero * torch.nan).any())
