"""Attention logits: exact against rationals, the recorded kernel, sound bounds, pages, and the split of the work."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
from oracle.bounds import Interval, of_schedule, residue_bound
from oracle.bounds.logits import logits_bound
from oracle.errors import DtypeError, InputError, NumericsError, ShapeError
from oracle.fixtures.files import read_tensors
from oracle.numbers.formats import decode
from oracle.routines.base import get
from oracle.routines.cases import parse
from oracle.routines.logits import contract as contracts
from oracle.tensorcore.logits import FP4, predict_logits
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth import logits
from oracle.truth.gemm import ScaledProduct
from oracle.truth.layout import pack_kv_cache
from oracle.truth.logits import Logits
from oracle.verdict.compare import Status, Verdict

assert contracts  # imported for its registration
NAMES = ("q", "k", "k_scale", "weights", "cu_seqlen_ks", "cu_seqlen_ke")
POISON = 0x7F  # a NaN code
CHAIN_FP4 = "sm100.chain_mxf4"


pytestmark = pytest.mark.usefixtures("one_thread")


def codes(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)


def make(m: int = 6, n: int = 96, h: int = 8, d: int = 64, *, seed: int = 0) -> Logits:
    g = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, n + 1, (2, m), generator=g).sort(dim=0).values.to(torch.int32)
    ends[:, 0] = torch.tensor([0, n])
    return Logits(
        codes(m, h, d, seed=seed),
        codes(n, d, seed=seed + 1),
        torch.rand(n, generator=g) + 0.5,
        torch.randn(m, h, generator=g),
        ends[0],
        ends[1],
    )


def inputs_of(p: Logits) -> dict[str, Tensor]:
    return dict(zip(NAMES, (p.q, p.k, p.k_scale, p.weights, p.start, p.stop), strict=True))


def judge(p: Logits, out: Tensor, *, numerics: str | None = None, arch: str = "sm90", **options: object) -> Verdict:
    return get("fp8_mqa_logits").judge(inputs_of(p), out, arch=arch, numerics=numerics, **options)


def plain(p: Logits, *, order: Tensor | None = None, relu: bool = True) -> Tensor:
    """The formula in float32, heads in a given order."""
    x = torch.einsum("mhd,nd->mhn", p.q.float(), p.k.float())
    x = torch.relu(x) if relu else x
    total = torch.zeros(p.q.shape[0], p.k.shape[0])
    for h in range(p.heads) if order is None else order.tolist():
        total = total + p.weights[:, h, None] * x[:, h]
    return total * p.k_scale


@pytest.fixture(scope="module")
def captured() -> tuple[Logits, Tensor]:
    path = Path(__file__).resolve().parents[3] / "fixtures/captures/h200_mqa_logits.safetensors"
    tensors = read_tensors(path)
    return Logits(*(tensors[name] for name in NAMES)), tensors["out.deep_gemm.fp8_mqa_logits"]


def chain_bound(product: ScaledProduct) -> Interval:
    return residue_bound(product, of_schedule(get_schedule("sm90.chain")))


class TestExact:
    """hi + lo is the exact value within slack."""

    def rational(self, p: Logits, m: int, n: int) -> Fraction:
        k = [Fraction(v) for v in decode(p.k[n]).tolist()]
        total = Fraction(0)
        for h in range(p.heads):
            x = sum((Fraction(a) * b for a, b in zip(decode(p.q[m, h]).tolist(), k, strict=True)), Fraction(0))
            total += Fraction(float(p.weights[m, h])) * max(x, Fraction(0))
        return total * Fraction(float(p.k_scale[n]))

    @pytest.mark.parametrize("seed", [0, 1])
    def test_against_rationals(self, seed: int) -> None:
        p = make(3, 7, 8, 32, seed=seed)
        value = logits.exact(p)
        for m in range(3):
            for n in range(7):
                error = Fraction(float(value.hi[m, n])) + Fraction(float(value.lo[m, n])) - self.rational(p, m, n)
                assert abs(error) <= Fraction(float(value.slack[m, n]))
                assert value.slack[m, n] <= 2.0**-98 * max(1.0, abs(float(value.hi[m, n])))

    def test_sabotaged_low_word_is_noticed(self) -> None:
        p = make(1, 1, 8, 32)
        value = logits.exact(p)
        assert abs(Fraction(float(value.hi)) - self.rational(p, 0, 0)) > Fraction(float(value.slack))

    def test_nan_reaches_its_own_rows_and_columns(self) -> None:
        p = make()
        bits = p.q.clone().view(torch.uint8)
        bits[2, 3, 5] = POISON
        scale = p.k_scale.clone()
        scale[7] = torch.nan
        hi = logits.exact(replace(p, q=bits.view(p.q.dtype), k_scale=scale)).hi
        nan = torch.isnan(hi)
        assert bool(nan[2].all()) and bool(nan[:, 7].all()) and int(nan.sum()) == 96 + 5


@pytest.mark.turns(2)
class TestRecordedKernel:
    """DeepGEMM's output on an H200, equal bit for bit and inside the interval that knows no order of heads."""

    def test_equal_bits(self, captured: tuple[Logits, Tensor]) -> None:
        p, out = captured
        verdict = judge(p, out, numerics="sm90.mqa_logits")
        assert verdict.status is Status.PASSED and verdict.matches == "sm90.mqa_logits", verdict.summary
        assert verdict.total == int(p.window().sum()) == 14368

    def few(self, captured: tuple[Logits, Tensor]) -> tuple[Logits, Tensor]:
        p, out = captured
        rows = slice(0, 12)
        return Logits(p.q[rows], p.k, p.k_scale, p.weights[rows], p.start[rows], p.stop[rows]), out[rows]

    def test_within_the_interval(self, captured: tuple[Logits, Tensor]) -> None:
        verdict = judge(*self.few(captured), numerics="sm90.mqa_logits.any")
        assert verdict.status is Status.PASSED and verdict.matches is None and 0 < verdict.margin < 1

    def test_it_is_no_float32_sum(self, captured: tuple[Logits, Tensor]) -> None:
        assert judge(*self.few(captured), numerics="ieee32.any").status is Status.FAILED

    def test_it_did_not_clean(self, captured: tuple[Logits, Tensor]) -> None:
        p, out = self.few(captured)
        verdict = judge(p, out, numerics="sm90.mqa_logits", clean_logits=True)
        assert verdict.status is Status.FAILED and verdict.outside == int((~p.window() & torch.isfinite(out)).sum())


class TestBound:
    """Every order of heads, float32 and tensor-core dot products: inside; one ulp beyond the edge: outside."""

    @settings(max_examples=12)
    @given(seed=st.integers(0, 1000))
    def test_any_order_of_heads_is_inside(self, seed: int) -> None:
        p = make(3, 16, 16, 32, seed=seed)
        order = torch.randperm(16, generator=torch.Generator().manual_seed(seed))
        assert judge(p, plain(p, order=order), arch="cpu").status is Status.PASSED

    @pytest.mark.parametrize("schedule", ["sm90.mqa_logits", "sm90.mqa_logits.second_fused"])
    def test_both_contractions_are_inside(self, schedule: str) -> None:
        p = make(3, 64, 16, 64, seed=3)
        out = predict_logits(p.q, p.k, p.k_scale, p.weights, schedule=schedule)
        verdict = judge(p, out)
        assert verdict.status is Status.PASSED and (verdict.matches is not None) == (schedule == "sm90.mqa_logits")

    def test_the_edge_is_sharp(self) -> None:
        p = make(2, 16, 8, 32)
        interval = logits_bound(p, chain_bound)
        value = logits.exact(p)
        beyond = (value.hi + 1.001 * interval.hi + 1e-5 * value.hi.abs()).float()
        verdict = judge(p, beyond, numerics="sm90.mqa_logits.any")
        assert verdict.outside == int((p.window() & (value.hi != 0)).sum()) >= verdict.total - 1

    def test_exact_dot_products_leave_rounding_only(self) -> None:
        """One power of two a head: the dot products are exact, and float32 roundings are left (H + 3, 4 of a head)."""
        p = make(2, 16, 8, 32)
        q = torch.zeros(2, 8, 32).index_fill_(2, torch.tensor([3]), 4.0).to(torch.float8_e4m3fn)
        p = replace(p, q=q, k=torch.full((16, 32), 2.0).to(torch.float8_e4m3fn))
        interval = logits_bound(p, chain_bound)
        size = 8.0 * p.weights.double().abs().sum(dim=1)[:, None] * p.k_scale.double()
        assert bool((interval.hi <= 15.01 * 2.0**-24 * size).all())

    def test_nan_dot_products_are_open(self) -> None:
        p = make()
        bits = p.q.clone().view(torch.uint8)
        bits[2, 3, 5] = POISON
        p = replace(p, q=bits.view(p.q.dtype), start=torch.zeros_like(p.start), stop=torch.full_like(p.stop, 96))
        for keep in (True, False):  # torch.relu keeps NaN, fmaxf does not
            x = torch.einsum("mhd,nd->mhn", p.q.float(), p.k.float())
            x = torch.relu(x) if keep else torch.where(x > 0, x, 0.0)
            out = torch.einsum("mh,mhn->mn", p.weights, x) * p.k_scale
            verdict = judge(p, out, arch="cpu")
            assert verdict.status is Status.PASSED and verdict.unconstrained == 96

    def test_infinite_scales_are_open_and_nan_ones_are_not(self) -> None:
        p = make(seed=1)
        scale = p.k_scale.clone()
        scale[4], scale[9] = torch.inf, torch.nan
        p = replace(p, k_scale=scale, start=torch.zeros_like(p.start), stop=torch.full_like(p.stop, 96))
        out = predict_logits(p.q, p.k, p.k_scale, p.weights)
        verdict = judge(p, out, numerics="sm90.mqa_logits.any")
        assert verdict.status is Status.PASSED and verdict.unconstrained == 6
        out[:, 9] = 1.0
        assert judge(p, out, numerics="sm90.mqa_logits.any").outside == 6


class TestSabotage:
    """Each fault is found, whether bits or the interval decide."""

    @pytest.mark.parametrize("arch", ["sm90", "cpu"])
    @pytest.mark.parametrize(
        "fault",
        [
            "relu omitted",
            "scale of the next key",
            "head dropped",
            "heads shifted",
            "no scale",
            "k tail dropped",
            "stale row",
        ],
    )
    def test_fault(self, fault: str, arch: str) -> None:
        p = make(seed=5)
        faulty = {
            "scale of the next key": lambda: replace(p, k_scale=p.k_scale.roll(-1)),
            "head dropped": lambda: replace(p, weights=p.weights * (torch.arange(8) != 5)),
            "heads shifted": lambda: replace(p, weights=p.weights.roll(1, dims=1)),
            "no scale": lambda: replace(p, k_scale=torch.ones_like(p.k_scale)),
            "k tail dropped": lambda: replace(p, k=(p.k.float() * (torch.arange(64) < 32)).to(p.k.dtype)),
            "stale row": lambda: replace(p, q=p.q.view(torch.uint8)[[0, 0, 2, 3, 4, 5]].view(p.q.dtype)),
        }
        out = plain(p, relu=False) if fault == "relu omitted" else plain(faulty[fault]())
        numerics = None if arch == "cpu" else "sm90.mqa_logits"
        assert judge(p, plain(p), arch="cpu").status is Status.PASSED
        assert judge(p, out, arch=arch, numerics=numerics).status is Status.FAILED

    def test_window_is_part_of_a_cleaned_output(self) -> None:
        p = make(seed=2)
        out = torch.where(p.window(), plain(p), -torch.inf)
        assert judge(p, out, arch="cpu", clean_logits=True).status is Status.PASSED
        later = replace(p, start=p.start + 1)
        wrong = torch.where(later.window(), plain(p), -torch.inf)
        assert judge(p, wrong, arch="cpu", clean_logits=True).status is Status.FAILED
        assert judge(p, plain(p), arch="cpu", clean_logits=True).status is Status.FAILED

    def test_outside_is_unspecified_otherwise(self) -> None:
        p = make(seed=2)
        out = torch.where(p.window(), plain(p), torch.nan)
        assert judge(p, out, arch="cpu").status is Status.PASSED

    def test_what_proves_little_is_said(self) -> None:
        p = make()
        p = replace(p, k_scale=torch.ones_like(p.k_scale))
        assert judge(p, plain(p), arch="cpu").status is Status.MISTRUSTED
        p = replace(make(), stop=make().start)
        assert "empty" in str(judge(p, plain(p), arch="cpu").reason)

    def test_unknown_names_list_what_exists(self) -> None:
        p = make()
        for numerics in ("sm90.mqa", "sm90.nothing.any"):
            with pytest.raises(NumericsError):
                judge(p, plain(p), numerics=numerics)
        with pytest.raises(NumericsError, match="sm90"):
            judge(p, plain(p), arch="gfx942")
        with pytest.raises(ShapeError, match="weights"):
            replace(p, weights=p.weights[:2])


class TestPaged:
    """The pages hold the same keys: the logits are those of the plain contract."""

    H, D, P = 8, 32, 64

    def case(self, *, poison: bool = False) -> tuple[dict[str, Tensor], list[Logits]]:
        g = torch.Generator().manual_seed(3)
        k, scale = codes(9, self.P, self.D, seed=4), torch.rand(9, self.P, generator=g) + 0.5
        tables = torch.randperm(9, generator=g).reshape(3, 3).to(torch.int32)
        lens = torch.tensor([130, 64, 0], dtype=torch.int32)
        q, weights = codes(3, 2, self.H, self.D, seed=5), torch.randn(6, self.H, generator=g)
        expected = []
        for b, length in enumerate(lens.tolist()):
            keys = k.view(torch.uint8)[tables[b].long()].flatten(0, 1).view(k.dtype)
            stop = torch.tensor([max(0, length - 1), length])
            rows = weights[2 * b : 2 * b + 2]
            expected.append(Logits(q[b], keys, scale[tables[b].long()].flatten(), rows, torch.zeros_like(stop), stop))
        if poison:  # blocks, keys and table entries that no query may see
            bits = k.view(torch.uint8).clone()
            bits[tables[0, 2].long(), 2:] = POISON
            bits[tables[2].long()] = POISON
            k = bits.view(k.dtype)
            tables[1, 1:], tables[2] = -7, 1000
        cache = pack_kv_cache(k, scale)
        return {"q": q, "kv_cache": cache, "weights": weights, "context_lens": lens, "block_tables": tables}, expected

    def judge(self, inputs: dict[str, Tensor], out: Tensor, **options: object) -> Verdict:
        return get("fp8_paged_mqa_logits").judge(inputs, out, arch="cpu", numerics=None, max_model_len=200, **options)

    def output(self, problems: list[Logits]) -> Tensor:
        rows = [torch.where(p.window(), plain(p), -torch.inf) for p in problems]
        return torch.nn.functional.pad(torch.cat(rows), (0, 8), value=-torch.inf)

    @pytest.mark.parametrize("poison", [False, True])
    def test_equal_to_plain_logits(self, poison: bool) -> None:
        inputs, problems = self.case(poison=poison)
        verdict = self.judge(inputs, self.output(problems), clean_logits=True)
        assert verdict.status is Status.PASSED and verdict.total == 6 * 200 and verdict.unconstrained == 0

    def test_reference_is_that_of_the_keys(self) -> None:
        inputs, problems = self.case(poison=True)
        made = get("fp8_paged_mqa_logits").reference(inputs, max_model_len=200)
        assert isinstance(made, Tensor)
        first = logits.exact(problems[0])
        assert torch.equal(made[1, :130], (first.hi + first.lo)[1, :130])
        assert bool(torch.isnan(made[1, 130:]).all()) and bool(torch.isnan(made[4:]).all())

    @pytest.mark.parametrize("fault", ["only key 0 of a page", "pages in order", "one key late", "scales of page 0"])
    def test_sabotage(self, fault: str) -> None:
        inputs, problems = self.case()
        p = problems[0]
        if fault == "only key 0 of a page":
            first = p.k.view(torch.uint8).reshape(3, self.P, self.D)[:, :1].expand(3, self.P, self.D)
            p = replace(p, k=first.reshape(-1, self.D).contiguous().view(p.k.dtype))
        elif fault == "pages in order":
            p = replace(p, k=p.k.view(torch.uint8).roll(self.P, dims=0).view(p.k.dtype))
        elif fault == "one key late":
            p = replace(p, stop=p.stop - 1)
        else:
            p = replace(p, k_scale=p.k_scale[: self.P].repeat(3))
        wrong = self.output([p, *problems[1:]])
        assert self.judge(inputs, wrong, clean_logits=True).status is Status.FAILED

    def test_two_axes_of_lengths(self) -> None:
        inputs, problems = self.case()
        inputs["context_lens"] = torch.tensor([[129, 130], [63, 64], [0, 0]], dtype=torch.int32)
        assert self.judge(inputs, self.output(problems), clean_logits=True).status is Status.PASSED

    def test_bad_pages_are_named(self) -> None:
        inputs, problems = self.case()
        inputs["block_tables"][0, 1] = 9
        with pytest.raises(InputError, match="block_tables"):
            self.judge(inputs, self.output(problems))


class TestMetadata:
    """Every segment exactly once, shares that differ by one at most."""

    def judge(self, lens: Tensor, out: Tensor, sms: int) -> Verdict:
        contract = get("get_paged_mqa_logits_metadata")
        return contract.judge({"context_lens": lens}, out, arch="sm90", numerics=None, num_sms=sms)

    @given(st.lists(st.integers(0, 5000), min_size=1, max_size=12), st.integers(1, 40))
    def test_reference_is_a_partition(self, lengths: list[int], sms: int) -> None:
        lens = torch.tensor(lengths, dtype=torch.int32)
        made = logits.schedule(lens, 64, sms)
        found = logits.shares(made, lens, 64)
        assert isinstance(found, list) and sum(found) == sum(-(-length // 256) for length in lengths)
        status = Status.PASSED if sum(found) else Status.MISTRUSTED
        assert self.judge(lens, made, sms).status is status

    def test_extra_work_may_come_first(self) -> None:
        """Older releases give the first processors one more."""
        lens = torch.tensor([2560], dtype=torch.int32)
        table = torch.tensor([[0, 0], [0, 4], [0, 7], [1, 0]], dtype=torch.int32)
        assert self.judge(lens, table, 3).status is Status.PASSED

    @pytest.mark.parametrize(
        ("table", "said"),
        [
            ([[0, 0], [0, 5], [0, 7], [1, 0]], "outside the bound"),  # unbalanced
            ([[0, 0], [0, 4], [0, 3], [1, 0]], "done twice"),
            ([[0, 1], [0, 4], [0, 7], [1, 0]], "goes from segment 1"),
            ([[0, 0], [0, 4], [0, 7], [0, 9]], "to 9"),
            ([[0, 0], [0, 10], [0, 7], [1, 0]], "no segment"),
            ([[0, 0], [-1, 4], [0, 7], [1, 0]], "no segment"),
        ],
    )
    def test_sabotage(self, table: list[list[int]], said: str) -> None:
        verdict = self.judge(torch.tensor([2560]), torch.tensor(table, dtype=torch.int32), 3)
        assert verdict.status is Status.FAILED and said in verdict.summary

    def test_two_axes_of_lengths(self) -> None:
        lens = torch.tensor([[299, 300], [99, 100]], dtype=torch.int32)
        assert logits.segments(lens, 256) == [2, 1]


class TestFp4:
    """Scales inside the dot products; sm100's four sums over heads."""

    @staticmethod
    def parts(weights: torch.dtype, seed: int = 3) -> tuple[Logits, Tensor]:
        g = torch.Generator().manual_seed(seed)
        q, k = (torch.randint(0, 16, shape, generator=g, dtype=torch.uint8) for shape in ((2, 8, 64), (5, 64)))
        a, b = (torch.randint(120, 134, (*x.shape[:-1], 2), generator=g, dtype=torch.uint8) for x in (q, k))
        w, window = torch.randn(2, 8, generator=g).to(weights), torch.zeros(2, dtype=torch.int32)
        blocks = a.view(torch.float8_e8m0fnu), b.view(torch.float8_e8m0fnu)
        p = Logits(q, k, torch.ones(5), w, window, window + 5, *blocks)
        return p, predict_product(p.products(), CHAIN_FP4, out_dtype=torch.float32).reshape(2, 8, 5)

    @pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
    def test_the_reduction_step_by_step(self, weights: torch.dtype) -> None:
        """One logit at a time, every operation rounded by torch; another grouping of the heads gives other bits."""
        p, acc = self.parts(weights)
        bits = predict_logits(p.q, p.k, p.k_scale, p.weights, q_blocks=p.q_blocks, k_blocks=p.k_blocks, schedule=FP4)

        def one(x: Tensor, w: Tensor, apart: int) -> float:
            s = [torch.zeros((), dtype=weights) for _ in range(4)]
            x = x.relu().to(weights)
            for j in range(8):  # products are exact in float64, where a sum of few bits is too
                s[j // apart % 4] = (x[j].double() * w[j].double() + s[j // apart % 4].double()).to(weights)
            return float((s[0] + s[2]) + (s[1] + s[3]))

        rows = [(m, n) for m in range(2) for n in range(5)]
        assert [float(bits[m, n]) for m, n in rows] == [one(acc[m, :, n], p.weights[m], 1) for m, n in rows]
        assert [float(bits[m, n]) for m, n in rows] != [one(acc[m, :, n], p.weights[m], 2) for m, n in rows]

    def test_predicted_in_the_dtype_that_is_named(self) -> None:
        """As a kernel returns them, so that they pass; without a name in float32."""
        case = parse("fp8_fp4_mqa_logits/e2m1xe2m1-bf16/1x32/m=4,n=40,h=8,d=128/family=randn/seed=1")
        inputs, options = case.inputs(), case.call_options()
        predicted = oracle.predict(case.contract, inputs, numerics=FP4, **options)
        assert isinstance(predicted, Tensor) and predicted.dtype is torch.bfloat16
        assert oracle.judge(case.contract, inputs, predicted, arch="sm100", **options).status is Status.PASSED
        wide = get(case.contract).predict(inputs, numerics=FP4, **{**options, "out_dtype": None})
        assert isinstance(wide, Tensor) and wide.dtype is torch.float32
        assert torch.equal(wide.bfloat16().nan_to_num(), predicted.nan_to_num())  # NaN outside the window

    def test_a_dtype_that_no_kernel_returns_is_refused(self) -> None:
        """Without out_dtype either of two is right."""
        case = parse("fp8_fp4_mqa_logits/e2m1xe2m1-bf16/1x32/m=4,n=40,h=8,d=128/family=randn/seed=1")
        inputs, contract = case.inputs(), get(case.contract)
        out = contract.reference(inputs)
        assert isinstance(out, Tensor)
        for dtype in (torch.float32, torch.bfloat16):
            assert contract.judge(inputs, out.to(dtype), arch="cpu").status is Status.PASSED
        with pytest.raises(DtypeError, match="float16"):
            contract.judge(inputs, out.half(), arch="cpu")

    def test_exact_and_bounded(self) -> None:
        """Dequantised in float64; the reductions in both dtypes inside, and not inside without a head."""
        for weights in (torch.float32, torch.bfloat16):
            p, acc = self.parts(weights)
            left, right = p.products().left, p.products().right
            x = (left.value().reshape(-1, 2, 32) * left.scales[:, :, None]).flatten(1)
            y = (right.value().reshape(-1, 2, 32) * right.scales[:, :, None]).flatten(1)
            due = ((x @ y.t()).reshape(2, 8, 5).relu() * p.weights.double()[:, :, None]).sum(dim=1)
            value = logits.exact(p)
            assert torch.equal(value.hi, due)
            interval = logits_bound(p, lambda product: residue_bound(product, of_schedule(get_schedule(CHAIN_FP4))))
            made = predict_logits(
                p.q, p.k, p.k_scale, p.weights, q_blocks=p.q_blocks, k_blocks=p.k_blocks, schedule=FP4
            ).double()
            less = made - acc[:, 0].relu().double() * p.weights[:, :1].double()
            good, bad = ((z - due >= interval.lo) & (z - due <= interval.hi) for z in (made, less))
            assert good.all() and (weights is torch.bfloat16 or not bad.all())
