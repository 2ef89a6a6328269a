"""FP8 attention: the truth against mpmath and torch, captured bits, intervals of legal variants, refused calls."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracle
from oracle.bounds.attention import float32_bound, pipeline_bound, split_bound
from oracle.errors import InputError, NumericsError, OptionError, ShapeError
from oracle.fixtures.captures import load
from oracle.fixtures.files import folder
from oracle.numbers import mufu
from oracle.numbers.formats import decode
from oracle.numbers.rounding import f32
from oracle.report import ledger
from oracle.routines import cases, get
from oracle.routines.attention.cases import GRAMMARS
from oracle.routines.base import Call, by_name
from oracle.routines.catalogue import get as get_fault
from oracle.routines.catalogue import run
from oracle.tensorcore.attention import (
    PIPELINES,
    TILE_SUMS,
    combined,
    pipeline,
    predict_attention,
    split_walks,
    walks,
)
from oracle.truth.attention import UNIT, Attention, exact
from oracle.verdict.compare import Status
from tests.support.attention_evidence import slowly

E4M3 = torch.float8_e4m3fn
CASE = "mha_fwd/e4m3xe4m3-bf16/head/b=2,s=12,n=150,h=6,g=2,d=64,v=64"
LONG = "mha_fwd/e4m3xe4m3-bf16/head/b=1,s=70,n=400,h=2,g=1,d=128,v=128"


pytestmark = pytest.mark.usefixtures("one_thread")


def problem(seed: int, rows: int = 5, keys: int = 40, depth: int = 32, *, sink: bool = False) -> Attention:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, depth, generator=g).to(E4M3) for n in (rows, keys, keys))
    stop = torch.randint(0, keys + 1, (rows,), generator=g)
    start = (stop - torch.randint(0, max(keys, 1), (rows,), generator=g)).clamp(min=0)
    scales = torch.rand(rows + 2, generator=g) + 0.5
    sinks = torch.randn(rows, generator=g, dtype=torch.float64) if sink else None
    return Attention(q, k, v, 0.4, scales[:rows], scales[-2], scales[-1], start, stop, sinks)


class TestTruth:
    @given(st.integers(0, 1 << 30), st.booleans())
    def test_within_its_slack_of_mpmath(self, seed: int, sink: bool) -> None:
        p = problem(seed, rows=2, keys=9, depth=16, sink=sink)
        value, (outs, sums) = exact(p), slowly(p)
        for r in range(2):
            for d in range(16):
                assert abs(mpmath.mpf(value.out[r, d].item()) - outs[r][d]) <= value.out_slack[r, d].item() + 1e-300
            lse = value.lse[r].item()
            assert lse == sums[r] or abs(mpmath.mpf(lse) - sums[r]) <= value.lse_slack[r].item()

    def test_slack_is_what_float64_leaves_open(self) -> None:
        """Each weight is right within ``3 Y + 4`` units, numerator and divisor within as many and those of the sums."""
        p = problem(1, sink=True)
        assert p.sink is not None
        most = max(float((p.factor[:, None] * p.scores()).abs().max()), float(p.sink.abs().max()))
        units = 2 * (3 * most + 4) + 2 * (len(p.k) + 8)
        largest = float(decode(p.v).abs().max() * p.v_scale)
        assert float(exact(p).out_slack.max()) <= units * UNIT * largest * (1 + 2.0**-30)

    @pytest.mark.parametrize("causal", [False, True])
    def test_torch_in_float64(self, causal: bool) -> None:
        case = cases.parse(f"{CASE}{'/causal=1' if causal else ''}/family=randn/seed=3")
        inputs, options = case.inputs(), case.call_options()
        out = oracle.reference("mha_fwd", inputs, **options)["out"]
        q, k, v = (decode(inputs[name]).transpose(1, 2) for name in "qkv")
        of_q, of_k, of_v = (
            inputs[name].double().repeat_interleave(3, 1)[..., None, None] for name in get("mha_fwd").scales.values()
        )
        mask = torch.ones(12, 150, dtype=torch.bool).tril(138) if causal else None
        k, v = (x.repeat_interleave(3, 1) for x in (k, v))
        right = torch.nn.functional.scaled_dot_product_attention(q * of_q, k * of_k, v * of_v, attn_mask=mask)
        assert torch.allclose(out.transpose(1, 2), right, rtol=1e-12, atol=1e-12)

    def test_unused_slots_change_nothing(self) -> None:
        case = cases.parse(f"{CASE}/used=1/family=randn/seed=1")
        inputs = case.inputs()
        assert bool(torch.isnan(inputs["v"].float()).any())
        clean = {
            name: torch.where(torch.isnan(x.float()), 0.0, x.float()).to(x.dtype) if name in "kv" else x
            for name, x in inputs.items()
        }
        for one, other in zip(*(oracle.reference("mha_fwd", x).values() for x in (inputs, clean)), strict=True):
            assert torch.equal(one, other)


class TestExactCases:
    """Integer scores with ``c = 1``: every P is a power of two, so what rounds P exactly gives the rounded truth."""

    # SageAttention lifts P by 2^8.807, which is no 448: its sums are of other values than its codes
    @pytest.mark.parametrize(
        "name", [*(n for n in PIPELINES if not pipeline(n).integers), "sm90.attention.forward.64.lift8.tile"]
    )
    def test_the_truth_but_for_the_last_division(self, name: str) -> None:
        g = torch.Generator().manual_seed(5)
        q, k = (torch.randint(0, 2, (n, 64), generator=g).float() for n in (24, 90))
        q[:, 4:] = 0
        v = torch.randint(-4, 5, (90, 64), generator=g).float()
        one = torch.ones(())
        ends = torch.zeros(24, dtype=torch.int64), torch.full((24,), 90)
        p = Attention(q.to(E4M3), k.to(E4M3), v.to(E4M3), math.log(2.0), one.expand(24), one, one, *ends)
        found, right = predict_attention(p, pipeline(name)).double(), exact(p).out
        # a reciprocal within an ulp and two roundings; FlashInfer rounds the scale of the values by 448 too
        assert bool(((found - right).abs() <= 5 * 2.0**-24 * right.abs() + 2.0**-40).all())


@pytest.mark.turns(4)
class TestCaptured:
    """What vLLM's FlashAttention-3, FlashInfer, and the Triton kernels of vLLM and SGLang gave on an H100."""

    def test_every_bit_of_fp8_queries_in_one_split(self) -> None:
        known = [entry.id for entry in ledger.load(folder() / ledger.FILE)]
        for one in load(folder() / "captures"):
            contract = get(one.contract)
            if contract.section != "Attention" or one.id in known:
                continue
            outputs = one.outputs(contract.returns)
            verdict = oracle.judge(one.contract, one.inputs(), outputs, arch="sm90", explain="off", **one.call())
            assert verdict.status is Status.PASSED, one.id
            bits = contract.numerics["sm90"][0].startswith("sm90") and one.call().get("num_splits", 1) == 1
            assert bits == ("bits of sm90" in verdict.basis), one.id

    @pytest.mark.parametrize(
        ("subject", "fault"),
        [
            ("sglang_triton.decode_attention_fwd", "P is cast to the FP8 of the cache without a lift"),
            ("sglang_triton.extend_attention_fwd", "queries and P of the cached keys cast to FP8"),
        ],
    )
    def test_shipped_kernels_are_refused_and_named(self, subject: str, fault: str) -> None:
        one = [one for one in load(folder() / "captures") if subject in one.id][-1]
        out = one.outputs(("out",))
        verdict = oracle.judge(one.contract, one.inputs(), out, arch="sm90", **one.call())
        assert verdict.status is Status.FAILED and list(verdict.explained_by) == [fault]

    def test_one_changed_bit_is_no_longer_the_bits(self) -> None:
        one = next(one for one in load(folder() / "captures") if "flashinfer_fa3" in one.id)
        outputs = {name: x.clone() for name, x in one.outputs(("out", "lse")).items()}  # type: ignore[union-attr]
        outputs["out"].view(torch.int16)[0, 0, 0] ^= 1 << 6
        verdict = oracle.judge(one.contract, one.inputs(), outputs, arch="sm90", explain="off", **one.call())
        assert verdict.status is Status.FAILED and verdict.outside == 1


class TestIdentify:
    @pytest.mark.turns(4)
    def test_a_recorded_output(self) -> None:
        one = next(one for one in load(folder() / "captures") if "h100_attention_vllm_fa3" in one.id)
        first = oracle.identify("mha_fwd", one.inputs(), one.outputs(("out", "softmax_lse")), **one.call())[0]
        assert (first.schedule, first.equal) == ("sm90.fa3.tile", 1.0)

    @pytest.mark.turns(4)
    def test_a_spelt_pipeline_and_one_that_is_none(self) -> None:
        inputs, name = cases.parse(f"{CASE}/family=codes/seed=1").inputs(), "sm90.attention.forward.64.lift0.chain"
        out = oracle.predict("mha_fwd", inputs, numerics=name)
        first, second, *_ = oracle.identify("mha_fwd", inputs, out)
        assert (first.schedule, first.equal) == (name, 1.0) and second.equal < 1.0
        truth = {key: x.to(out[key].dtype) for key, x in oracle.reference("mha_fwd", inputs).items()}
        assert oracle.identify("mha_fwd", inputs, truth)[0].equal < 1.0

    def test_no_key_and_no_arch(self) -> None:
        inputs = cases.parse(f"{CASE}/family=randn/seed=1").inputs()
        out = oracle.predict("mha_fwd", inputs, numerics="sm90.fa3.tile")
        with pytest.raises(NumericsError, match="no pipelines for arch 'sm80'"):
            oracle.identify("mha_fwd", inputs, out, arch="sm80")
        with pytest.raises(NumericsError, match="no query sees a key"):
            oracle.identify("mha_fwd", inputs | {"seqused_k": torch.zeros(2, dtype=torch.int32)}, out)


@pytest.mark.turns(4)
class TestFaults:
    @pytest.mark.parametrize(
        ("fault", "case"),
        [
            ("P is cast to FP8 without a lift", f"{CASE}/family=hot/seed=1"),
            ("P is lifted so far that it saturates", f"{CASE}/family=randn/seed=1"),
            ("row sum of the rounded P", f"{CASE}/family=ones/seed=1"),
            ("output and row sum not rescaled at a new maximum", f"{LONG}/family=fall/seed=1"),
            ("causal mask from the top left", f"{CASE}/causal=1/family=randn/seed=1"),
            ("query head h reads KV head h mod G", f"{CASE}/family=randn/seed=1"),
            ("sink left out", f"{CASE}/sink=1/family=randn/seed=1"),
        ],
    )
    def test_refused_and_named(self, fault: str, case: str) -> None:
        parsed = cases.parse(case)
        call = Call(get("mha_fwd"), parsed.inputs(), parsed.call_options())
        verdict = oracle.judge("mha_fwd", call.inputs, run(call, get_fault(fault)), arch="sm90", **call.options)
        assert verdict.status is Status.FAILED
        assert fault in verdict.explained_by


class TestLegalVariants:
    """Sums in other orders lie in the interval of the pipeline; another P does not."""

    @pytest.mark.parametrize("seed", range(4))
    def test_any_order(self, seed: int) -> None:
        p = problem(seed, rows=70, keys=330, depth=64, sink=bool(seed % 2))
        (walk,) = walks(p, TILE_SUMS)
        p = walk.problem
        edges, g = pipeline_bound(walk, TILE_SUMS), torch.Generator().manual_seed(seed)
        total = torch.zeros_like(walk.total)
        out = torch.zeros_like(walk.sums)
        for step in walk.steps:
            order = torch.randperm(step.x.shape[1], generator=g)
            a = torch.ones_like(total) if step.factor is None else step.factor
            total = f32(total * a)
            for j in order.tolist():
                total = f32(total + step.x[:, j])
            part = f32(decode(step.codes)[:, order] @ decode(p.v[step.keys])[order])
            out = f32(f32(out * a[:, None]) + part)
        without = walk.total - sum_of(walk)
        total = f32(total + (without.clamp(min=0.0) if p.sink is not None else 0.0))
        scaled = out / total.clamp(min=2.0**-100)[:, None] * p.v_scale.double()
        scaled = torch.where(p.seen()[:, None], scaled, torch.zeros_like(scaled))
        assert bool(((scaled >= edges.low) & (scaled <= edges.high)).all())

    def test_another_lift_leaves_it(self) -> None:
        p = problem(3, rows=70, keys=330, depth=64)
        (walk,) = walks(p, TILE_SUMS)
        edges, other = pipeline_bound(walk, TILE_SUMS), predict_attention(p, replace(TILE_SUMS, lift=0.0)).double()
        assert bool(((other < edges.low) | (other > edges.high)).any())

    def test_float32_holds_its_own_and_refuses_a_rounded_p(self) -> None:
        p = problem(4, rows=70, keys=330, depth=64)
        edges = float32_bound(p)
        q, k, v = (x.float() for x in (p.q, p.k, p.v))
        y = (q @ k.T) * p.factor.float()[:, None]
        plain = torch.softmax(y.masked_fill(~p.window(), -torch.inf), dim=1).nan_to_num() @ v * p.v_scale
        rounded = predict_attention(p, TILE_SUMS).double()
        assert bool(((plain >= edges.low) & (plain <= edges.high)).all())
        assert bool(((rounded < edges.low) | (rounded > edges.high)).any())


class TestSoftCap:
    """Its tangent has a model, so that bits decide; a codes' interval holds what has another."""

    def test_bits_and_interval(self) -> None:
        case = cases.parse(f"{CASE}/cap=2/family=randn/seed=1")
        inputs, options = case.inputs(), case.call_options()
        outputs = oracle.predict("mha_fwd", inputs, numerics="sm90.fa3.tile", **options)
        judge = functools.partial(oracle.judge, "mha_fwd", inputs, explain="off", **options)
        assert judge(outputs, arch="sm90").basis == "bits of sm90.fa3.tile"
        moved = outputs | {"out": (outputs["out"].double() * (1 + 2.0**-7)).bfloat16()}
        assert str(judge(moved, arch="sm90").basis).startswith("codes of P")
        assert judge(outputs | {"out": -outputs["out"]}, arch="sm90").status is Status.FAILED


class TestSomeRows:
    """Rows with the bits of the declared pipeline stand for themselves; the others are judged as all are."""

    @pytest.mark.parametrize("changed", ["out", "softmax_lse"])
    def test_counts_what_leaves_the_interval(self, changed: str) -> None:
        inputs, name = cases.parse(f"{CASE}/family=randn/seed=1").inputs(), "sm90.fa3.tile"
        outputs = oracle.predict("mha_fwd", inputs, numerics=name)
        some = outputs[changed].view(-1)[::7]
        some += torch.tensor([0.0, 1e-6, 4.0])[torch.arange(len(some)) % 3].to(some)
        verdict = oracle.judge("mha_fwd", inputs, outputs, numerics=name, explain="off")
        bounds = oracle.interval("mha_fwd", inputs, numerics=name)
        outside = {
            key: int((~bounds[key].free & ((x.double() < bounds[key].low) | (x.double() > bounds[key].high))).sum())
            for key, x in outputs.items()
        }
        assert outside[changed] > 0 and verdict.outside == sum(outside.values())


class TestUndeclared:
    """Tiles that nobody declared: judged by the codes of a pipeline that lifts P, of scores that are known or not."""

    @pytest.mark.parametrize("option", ["", "/window=40_0"])
    def test_other_tiles(self, option: str) -> None:
        """In a window they may be counted from key 0, too."""
        case = cases.parse(f"{CASE}{option}/family=randn/seed=1")
        call = Call(get("mha_fwd"), case.inputs(), case.call_options(), arch="sm90").checked()
        chosen = replace(pipeline("sm90.attention.forward.48.lift8.chain"), from_window=False)
        out = call.contract._by(call, call.inputs, call.resolved, "sm90.fa3.tile", chosen)  # type: ignore[attr-defined]
        verdict = oracle.judge("mha_fwd", call.inputs, out, arch="sm90", explain="off", **call.options)
        assert verdict.status is Status.PASSED and "codes of P as in sm90." in verdict.basis
        assert "not declared" in verdict.basis

    @pytest.mark.parametrize("lift", ["lift8", "lift0"])
    def test_without_a_lift_it_fails(self, lift: str) -> None:
        """The first and the last key lie 7.3 nats above the others, whose values are of one sign."""
        inputs, one = cases.parse(f"{CASE}/family=randn/seed=1").inputs(), torch.ones(2, 2)
        k = 0.1 * inputs["k"].float()
        k[:, [0, -1]] = 0.375
        inputs |= {"q": torch.ones(2, 12, 6, 64).to(E4M3), "k": k.to(E4M3), "v": inputs["v"].float().abs().to(E4M3)}
        inputs |= {"q_descale": one, "k_descale": one}
        name, scale = f"sm90.attention.forward.48.{lift}.tile", 7.3 / 24
        out = oracle.predict("mha_fwd", inputs, numerics=name, softmax_scale=scale)
        verdict = oracle.judge("mha_fwd", inputs, out, arch="sm90", explain="off", softmax_scale=scale)
        assert verdict.status.is_failure == (lift == "lift0")

    def test_another_order_of_the_scales(self) -> None:
        """FlashInfer's row 29 of this call as an H100 gave it, in bits that its declared pipeline has not."""
        case = cases.parse(
            "single_prefill_with_kv_cache/e4m3xe4m3-bf16/head/m=31,n=120,h=2,g=1,d=128/family=randn/seed=0"
        )
        call = Call(get("single_prefill_with_kv_cache"), case.inputs(), case.call_options(), arch="sm90").checked()
        name = "sm90.flashinfer.fp8"
        chosen = replace(pipeline(name), scales_first=False)
        out = call.contract._by(call, call.inputs, call.resolved, name, chosen)  # type: ignore[attr-defined]
        assert float(out["out"][29, 0, 5]) == -0.37890625
        judge = functools.partial(oracle.judge, call.contract.name, call.inputs, explain="off", **call.options)
        assert judge(out, arch="sm90").status is Status.PASSED
        assert judge(out, numerics=name).status is Status.FAILED
        assert judge(out | {"out": out["out"].roll(1, dims=0)}, arch="sm90").status is Status.FAILED

    def test_declared_of_any_accumulator(self) -> None:
        inputs = cases.parse(f"{CASE}/family=randn/seed=1").inputs()
        names = ("sm90.attention.forward.48.lift8.any", "sm90.attention.any")
        out = oracle.predict("mha_fwd", inputs, numerics="sm90.attention.forward.48.lift8.tile")
        for name in names:
            verdict = oracle.judge("mha_fwd", inputs, out, numerics=name, explain="off")
            assert verdict.status is Status.PASSED and f"{name} from scores of any accumulator" in verdict.basis
            with pytest.raises(NumericsError, match="no bits follow"):
                oracle.predict("mha_fwd", inputs, numerics=name)
        moved = out | {"out": out["out"].roll(1, dims=1)}
        assert oracle.judge("mha_fwd", inputs, moved, numerics=names[0], explain="off").status is Status.FAILED

    def test_nothing_to_ask(self) -> None:
        """A call on a CPU, and one whose queries are wider, have no codes of P."""
        inputs = cases.parse(f"{CASE}/family=randn/seed=1").inputs()
        out = oracle.predict("mha_fwd", inputs, numerics="sm90.attention.forward.48.lift8.tile")
        assert oracle.judge("mha_fwd", inputs, out, arch="cpu", explain="off").status is Status.FAILED


def sum_of(walk: object) -> Tensor:
    total = torch.zeros_like(walk.total)  # type: ignore[attr-defined]
    for step in walk.steps:  # type: ignore[attr-defined]
        total = total * (1.0 if step.factor is None else step.factor) + step.x.sum(dim=1)
    return total


class TestSplits:
    """Parts of the keys, each a walk, added by the exponentials of their log-sum-exps."""

    @pytest.mark.parametrize("splits", [2, 3, 7])
    def test_one_split_and_many_agree_with_the_truth_of_their_codes(self, splits: int) -> None:
        p = problem(splits, rows=12, keys=420, depth=64, sink=True)
        (parts,) = split_walks(p, TILE_SUMS, splits)
        edges, g = split_bound(parts, TILE_SUMS), torch.Generator().manual_seed(splits)
        out, lse = combined(parts, TILE_SUMS)
        noise = torch.rand(out.shape, generator=g, dtype=torch.float64) * 2 - 1
        moved = out + noise * 2.0**-24 * out.abs()
        assert bool(((moved >= edges.low) & (moved <= edges.high)).all())
        seen = p.seen()
        assert bool(((lse >= edges.lse_low) & (lse <= edges.lse_high))[seen].all())
        unlifted = replace(TILE_SUMS, lift=0.0)
        (other,) = (combined(one, unlifted)[0] for one in split_walks(p, unlifted, splits))
        assert bool(((other < edges.low) | (other > edges.high)).any())

    def test_few_keys_are_one_part(self) -> None:
        p = problem(2, rows=5, keys=40)
        (parts,) = split_walks(p, TILE_SUMS, 8)
        assert len(parts) == 1 and torch.equal(combined(parts, TILE_SUMS)[0].float(), predict_attention(p, TILE_SUMS))

    def test_no_keys(self) -> None:
        """0 and a log-sum-exp of -inf, in one part as in arithmetic that rounds nothing."""
        none, taken = problem(3, keys=0), pipeline("sm90.fa3.tile")
        for edges in (float32_bound(none), pipeline_bound(next(walks(none, taken)), taken)):
            assert not bool(edges.low.any() or edges.high.any() or edges.open.any())
            assert bool((torch.isneginf(edges.lse_low) & torch.isneginf(edges.lse_high)).all())

    def test_a_sink_in_every_part_is_refused(self) -> None:
        case = cases.parse(f"{LONG}/sink=1/family=randn/seed=1")
        inputs, options = case.inputs(), case.call_options() | {"num_splits": 2}
        call = Call(get("mha_fwd"), inputs, options)
        wrong = run(call, get_fault("sink added once for each of two splits"))
        right = oracle.predict("mha_fwd", inputs, numerics="sm90.fa3.tile", **options)
        statuses = [oracle.judge("mha_fwd", inputs, out, arch="sm90", **options).status for out in (right, wrong)]
        assert statuses == [Status.PASSED, Status.FAILED]


class TestUnseenNan:
    """NaN in a value that no window holds: an H200's FlashAttention-3 in two splits does not read its tile."""

    CASE = "mha_fwd/e4m3xe4m3-bf16/head/b=2,s=1,n=300,h=4,g=2,d=64,v=64/window=9_30,splits=2/family=randn/seed=3"

    @pytest.mark.parametrize("declared", ["sm90.fa3.tile", None])
    def test_a_key_far_before_the_window(self, declared: str | None) -> None:
        """The number passes, declared or not; NaN is what a kernel gives that multiplies all keys."""
        case = cases.parse(self.CASE)
        inputs, options = case.inputs(), case.call_options()
        out = get("mha_fwd").predict(inputs, numerics="sm90.fa3.tile", **options)
        values = inputs["v"].view(torch.uint8).clone()
        values[1, 20, 0, 7] = 0x7F
        inputs["v"] = values.view(E4M3)
        truth = oracle.reference("mha_fwd", inputs, **options)["out"]
        assert bool(torch.isfinite(truth).all())
        spoilt = out["out"].clone()
        spoilt[1, 0, 0, 7] = math.nan
        right, nan = (
            oracle.judge("mha_fwd", inputs, {**out, "out": x}, arch="sm90", numerics=declared, **options).status
            for x in (out["out"], spoilt)
        )
        assert right is Status.PASSED
        assert nan is (Status.FAILED if declared else Status.PASSED)

    def test_a_key_of_the_window(self) -> None:
        """The negative test: there the truth is NaN."""
        case = cases.parse(self.CASE)
        inputs, options = case.inputs(), case.call_options()
        values = inputs["v"].view(torch.uint8).clone()
        values[1, 295, 0, 7] = 0x7F
        truth = oracle.reference("mha_fwd", inputs | {"v": values.view(E4M3)}, **options)["out"]
        assert torch.isnan(truth).nonzero().tolist() == [[1, 0, head, 7] for head in (0, 1)]


class TestInfiniteValues:
    """An infinite 16-bit value leaves its column open for its head: a sum gives infinity or NaN there, and 0 times it
    is NaN. Negative: in the other columns it excuses nothing."""

    CASE = "extend_attention_fwd/bf16xe4m3-bf16/tensor/b=3,m=1,n=20,h=4,g=4,d=64,v=20/v_extend:inf/family=randn/seed=5"

    def test_any_value_in_its_column(self) -> None:
        case = cases.parse(self.CASE)
        inputs, options = case.inputs(), case.call_options()
        where = torch.isinf(inputs["v_extend"])
        assert bool(where.any()) and not bool(where.all())
        finite = {**inputs, "v_extend": inputs["v_extend"].masked_fill(where, 0.0)}
        right = by_name(get(case.contract).reference(finite, **options))["out"]
        for value in (math.inf, math.nan, 0.0):
            out = right.bfloat16().masked_fill(where, value)
            assert oracle.judge(case.contract, inputs, out, arch="cpu", **options).status is Status.PASSED
        wrong = torch.where(where, right.bfloat16(), right.bfloat16() + 1)
        assert oracle.judge(case.contract, inputs, wrong, arch="cpu", **options).status is Status.FAILED


class TestWide:
    """16-bit queries: float32 of exact or rounded keys, P rounded to 16 bits or not."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("rounded", [False, True])
    def test_a_float32_kernel_lies_in_the_bound(self, dtype: torch.dtype, rounded: bool) -> None:
        g = torch.Generator().manual_seed(3)
        q = torch.randn(9, 64, generator=g).to(dtype)
        k, v = (decode(torch.randn(300, 64, generator=g).to(E4M3)) * 0.37 for _ in range(2))
        one, ends = torch.ones(()), (torch.zeros(9, dtype=torch.int64), torch.full((9,), 300))
        p = Attention(q, k, v, 0.2, one.expand(9), one, one, *ends)
        edges = float32_bound(p, dtype)
        weights = torch.exp(0.2 * (q.float() @ k.float().T))
        total = weights.sum(dim=1, keepdim=True)
        top = weights.amax(dim=1, keepdim=True)
        of_v = (weights / top).to(dtype).float() * top if rounded else weights
        out = ((of_v @ v.float()) / total).double()
        assert bool(((out >= edges.low) & (out <= edges.high)).all())

    def test_p_in_fp8_does_not(self) -> None:
        g = torch.Generator().manual_seed(4)
        q, k, v = (torch.randn(n, 64, generator=g).to(E4M3) for n in (9, 100, 100))
        one, ends = torch.ones(()), (torch.zeros(9, dtype=torch.int64), torch.full((9,), 100))
        p = Attention(q, k, v, 0.1, one.expand(9), one, one, *ends)
        coded = predict_attention(p, replace(TILE_SUMS, lift=0.0)).double()
        wide = float32_bound(replace(p, q=decode(q), k=decode(k), v=decode(v)), torch.bfloat16)
        assert bool(((coded < wide.low) | (coded > wide.high)).any())

    def test_dequantised_keys_are_within_the_slack_of_mpmath(self) -> None:
        p = problem(8, rows=2, keys=9, depth=16)
        wide = replace(p, q=decode(p.q).to(torch.bfloat16), k=decode(p.k) * float(p.k_scale), k_scale=torch.ones(()))
        value, exact_value = exact(wide), exact(p)
        assert bool(((value.out - exact_value.out).abs() <= value.out_slack + exact_value.out_slack).all())
        assert bool((value.out_slack >= exact_value.out_slack).all())


class TestFewRows:
    def test_have_tiles_of_their_own_up_to_128(self) -> None:
        """Seen on an H100 for 60 and 65 rows of each head dim."""
        few = {d: TILE_SUMS.tile(d, 60) for d in (64, 96, 128, 192, 256)}
        many = {d: TILE_SUMS.tile(d, 65) for d in (64, 96, 128, 192, 256)}
        assert few == {64: 128, 96: 128, 128: 96, 192: 96, 256: 128}
        assert many == {64: 128, 96: 128, 128: 192, 192: 96, 256: 128}


class TestMerge:
    """Two states as one, in float32 with torch's exponential, and what leaves the bound."""

    @pytest.mark.parametrize("dtypes", ["bf16xbf16-bf16", "f32xf32-f32"])
    def test_float32_is_admissible_and_exchanged_weights_are_not(self, dtypes: str) -> None:
        inputs = cases.parse(f"merge_state_v2/{dtypes}/row/m=33,h=2,d=40/family=randn/seed=1").inputs()
        v_a, s_a, v_b, s_b = (inputs[name].float() for name in ("v_a", "s_a", "v_b", "s_b"))
        top = torch.maximum(s_a, s_b)
        w_a, w_b = torch.exp(s_a - top), torch.exp(s_b - top)
        merged = (v_a * (w_a / (w_a + w_b))[..., None] + v_b * (w_b / (w_a + w_b))[..., None]).to(inputs["v_a"].dtype)
        right = {"v_merged": merged, "s_merged": torch.log(w_a + w_b) + top}
        fault = "log-sum-exps of the states exchanged"
        wrong = run(Call(get("merge_state_v2"), inputs, {}), get_fault(fault))
        verdicts = [oracle.judge("merge_state_v2", inputs, out) for out in (right, wrong)]
        assert [verdict.status for verdict in verdicts] == [Status.PASSED, Status.FAILED]
        assert list(verdicts[1].explained_by) == [fault]

    def test_a_state_without_keys_counts_nothing(self) -> None:
        inputs = cases.parse("merge_state/f32xf32-f32/row/m=9,h=4,d=64/none=1/family=randn/seed=1").inputs()
        out = oracle.reference("merge_state", inputs)
        alone = torch.isinf(inputs["s_a"]) & ~torch.isinf(inputs["s_b"])
        assert torch.equal(out["V"][alone], inputs["v_b"].double()[alone])
        assert bool(torch.isneginf(out["S"][torch.isinf(inputs["s_a"]) & torch.isinf(inputs["s_b"])]).all())

    def test_refused(self) -> None:
        inputs = cases.parse("merge_attn_states/bf16xbf16-e4m3/row/m=9,h=4,d=64/family=randn/seed=1").inputs()
        with pytest.raises(InputError, match="positive and finite"):
            oracle.reference("merge_attn_states", inputs | {"output_scale": torch.zeros(1)})
        with pytest.raises(OptionError, match="pass 0 to 9"):
            oracle.reference("merge_attn_states", inputs, prefill_tokens_with_context=10)
        with pytest.raises(InputError, match="one dtype"):
            oracle.reference("merge_attn_states", inputs | {"prefix_output": inputs["prefix_output"].half()})


class TestPages:
    """Pages in any order are the keys of one row after the other."""

    def test_of_flash_attention(self) -> None:
        case = cases.parse(f"{CASE}/pages=16/family=randn/seed=1")
        inputs = case.inputs()
        plain = dict(inputs)
        table = plain.pop("page_table").long()
        for name in "kv":
            plain[name] = inputs[name].view(torch.uint8)[table].flatten(1, 2).view(E4M3)
        for one, other in zip(*(oracle.reference("mha_fwd", x).values() for x in (inputs, plain)), strict=True):
            assert torch.equal(one, other)
        with pytest.raises(InputError, match="names pages"):
            oracle.reference("mha_fwd", inputs | {"page_table": inputs["page_table"] + 1000})
        with pytest.raises(ShapeError, match="pass page_table"):
            oracle.reference("mha_fwd", {name: x for name, x in inputs.items() if name != "page_table"})

    @pytest.mark.parametrize(
        ("contract", "change", "error"),
        [
            ("BatchPrefillWithRaggedKVCacheWrapper", {"kv_indptr": lambda x: x + 1}, "rises from 0"),
            ("BatchPrefillWithPagedKVCacheWrapper", {"paged_kv_last_page_len": lambda x: x + 16}, "a page holds"),
            ("BatchPrefillWithPagedKVCacheWrapper", {"paged_kv_indices": lambda x: x - 99}, "names pages"),
            ("unified_attention", {"seqused_k": lambda x: x + 999}, "at most"),
            ("unified_attention", {"cu_seqlens_q": lambda x: x - x}, "ends at 0"),
            ("decode_attention_fwd", {"kv_indptr": lambda x: x - x}, "ends at 0"),
            ("extend_attention_fwd", {"k_extend": lambda x: x.half()}, "one dtype"),
            ("flash_mla_with_kvcache", {"indices": lambda x: x + 9999}, "names slots"),
        ],
    )
    def test_refused(self, contract: str, change: dict[str, Callable[[Tensor], Tensor]], error: str) -> None:
        inputs = cases.parse(next(iter(GRAMMARS[contract].ids(contract, "quick")))).inputs()
        changed = {name: make(inputs[name]) for name, make in change.items()}
        with pytest.raises(InputError, match=error):
            oracle.reference(contract, inputs | changed)


class TestExponential:
    def test_negative_values_below_the_last_digit_give_one(self) -> None:
        x = torch.tensor([-(2.0**-24), -(2.0**-30), -0.0], dtype=torch.float64)
        assert mufu.exp2(x).tolist() == [1.0, 1.0, 1.0] and float(mufu.exp2(-(2.0**-23) * x.new_ones(1))) < 1.0


class TestRefused:
    @staticmethod
    def call() -> dict[str, Tensor]:
        return cases.parse(f"{CASE}/family=randn/seed=1").inputs()

    def test_scales(self) -> None:
        inputs = self.call()
        with pytest.raises(InputError, match="scales are positive and finite"):
            oracle.reference("mha_fwd", inputs | {"k_descale": -inputs["k_descale"]})

    def test_lengths(self) -> None:
        with pytest.raises(InputError, match="there are 150 keys"):
            oracle.reference("mha_fwd", self.call() | {"seqused_k": torch.tensor([151, 3], dtype=torch.int32)})

    def test_heads_and_depths(self) -> None:
        inputs = self.call()
        with pytest.raises(ShapeError, match="no multiple of 2 KV heads"):
            oracle.reference("mha_fwd", inputs | {"q": inputs["q"][:, :, :5]})
        with pytest.raises(ShapeError, match="multiples of 16"):
            oracle.reference("mha_fwd", inputs | {"v": inputs["v"][..., :40].contiguous()[..., :39]})

    @pytest.mark.parametrize("option", [{"softmax_scale": -1.0}, {"window_size_left": -2}, {"softmax_scale": math.inf}])
    def test_options(self, option: dict[str, float]) -> None:
        with pytest.raises(OptionError, match="pass"):
            oracle.reference("mha_fwd", self.call(), **option)

    def test_pipelines(self) -> None:
        with pytest.raises(NumericsError, match="spell one out"):
            pipeline("sm90.fa3.tiles")
        with pytest.raises(NumericsError, match="pairs of every 8"):
            pipeline("sm90.attention.forward.60.lift8.tile")
        spelt = pipeline("sm90.attention.backward.192.lift8.tile")
        p = problem(9, rows=70, keys=200, depth=128)
        assert torch.equal(predict_attention(p, spelt), predict_attention(p, TILE_SUMS))
