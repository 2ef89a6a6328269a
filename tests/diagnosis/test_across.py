"""Calls on several architectures: a made-up difference is named as the cause, and hardware confirms what is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.diagnosis.across import Change, Compared, Pair, across, changes, ulps_apart
from oracle.fixtures import captures
from oracle.harness.across import Task, compared, same
from oracle.numbers.formats import same_bits
from oracle.routines import cases, get
from oracle.routines.base import Call
from oracle.tensorcore import schedules, vectors
from oracle.tensorcore.instructions import Order
from oracle.tensorcore.schedules import Epilogue, Promotion, Schedule
from oracle.tensorcore.schedules import get as schedule_named
from tests.support.paths import FIXTURES, SHARED

pytestmark = pytest.mark.turns(4)

WIDTH, BITS = "instruction width", "alignment bits"
VECTORS = SHARED / "vectors" / "tensor_core"
BLOCKS = "fp8_gemm_nt/e4m3xe4m3-f32/1x128:128x128/m=5,n=32,k=512/family=randn/seed=1"
ROWS = "torch_per_token_w8a8_scaled_mm/e4m3xe4m3-f32/token:channel/m=5,n=48,k=512/family=randn/seed=1"
LOGITS = "fp8_mqa_logits/e4m3xe4m3-f32/tensor:token/m=3,n=64,h=32,d=128/family=randn/seed=1"
LINEAR = "Fp8LinearOp/bf16xe4m3-bf16/token:channel/m=5,n=64,k=256/family=randn/seed=1"
SKIPPING = "fp8_gemm_nt_skip_head_mid/e4m3xe4m3-bf16/1x128:128x128/m=17,n=384,k=256/family=randn/seed=1"


def call_of(text: str) -> Call:
    case = cases.parse(text)
    options = case.call_options()
    return Call(get(case.contract), case.inputs(), options, out_dtype=options.get("out_dtype", torch.float32)).checked()


def found(text: str, *arches: str, **captured: tuple[str, Tensor, str]) -> Compared:
    return across(call_of(text), arches, id=text, captured=captured)


def made_up(monkeypatch: pytest.MonkeyPatch, contract: str, schedule: Schedule) -> None:
    """An arch ``made`` whose kernels of a routine compute by this schedule."""
    kind = type(get(contract))
    monkeypatch.setattr(schedules, "_REGISTRY", {**schedules._REGISTRY, schedule.name: schedule})
    monkeypatch.setattr(kind, "numerics", {**kind.numerics, "made": (schedule.name,)})


def changed(name: str, of_instruction: dict[str, Any] | None = None, **of_schedule: Any) -> Schedule:
    own = schedule_named(name)
    inst = replace(own.instruction, **(of_instruction or {}))
    return replace(own, name="made.up", instruction=inst, **of_schedule)


ONE_FIELD = [
    (BLOCKS, changed("sm90.promote128", {"align_bits": 14, "out_bits": 14}), "alignment bits"),
    (BLOCKS, changed("sm90.promote128", {"align_bits": 12}), "alignment bits"),
    (BLOCKS, changed("sm90.promote128", {"group": 16}), "instruction width"),
    (BLOCKS, changed("sm90.promote128", {"order": Order.INTERLEAVED, "group": 16}), "instruction width"),
    (BLOCKS, changed("sm90.promote128", interval=64), "promotion interval"),
    (BLOCKS, changed("sm90.promote128", promotion=Promotion.MUL_ADD), "promotion arithmetic"),
    (ROWS, changed("sm90.chain", epilogue=Epilogue.PRODUCT), "epilogue"),
    (ROWS, changed("sm90.chain", interval=128, promotion=Promotion.ADD), "promotion interval"),
]


class TestCauses:
    """A step is named as the cause where it is one, and only there."""

    @pytest.mark.parametrize(("case", "schedule", "step"), ONE_FIELD, ids=lambda x: x if isinstance(x, str) else "")
    def test_one_field_is_the_cause(
        self, monkeypatch: pytest.MonkeyPatch, case: str, schedule: Schedule, step: str
    ) -> None:
        made_up(monkeypatch, case.partition("/")[0], schedule)
        (pair,) = found(case, "sm90", "made").pairs
        assert pair.differing > 0
        assert [(s.name, s.alone, s.together) for s in pair.steps] == [(step, pair.differing, pair.differing)]

    def test_equal_schedules_differ_nowhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another name is no difference: no step, no distance, and either output passes by its bits."""
        made_up(monkeypatch, "fp8_gemm_nt", replace(schedule_named("sm90.promote128"), name="made.up"))
        (pair,) = found(BLOCKS, "sm90", "made").pairs
        assert (pair.equal, pair.ulps, pair.intervals, pair.steps) == (pair.elements, 0.0, (0.0, 0.0), ())
        assert [judged.status for judged in pair.accepted] == ["PASSED", "PASSED"]

    def test_two_fields_are_two_causes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither explains all alone; both together do."""
        made_up(monkeypatch, "fp8_gemm_nt", changed("sm90.promote128", {"align_bits": 15, "out_bits": 15}, interval=32))
        (pair,) = found(BLOCKS, "sm90", "made").pairs
        assert {step.name for step in pair.steps} == {"alignment bits", "promotion interval"}
        assert all(step.alone is not None and step.alone < pair.differing for step in pair.steps)
        assert pair.steps[-1].together == pair.differing

    def test_a_step_without_effect_is_no_cause(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The least exponent differs too, and no bit of these data depends on it."""
        schedule = changed("sm90.promote128", {"group": 16, "min_exponent": -133})
        assert {change.name for change in changes(schedule_named("sm90.promote128"), schedule)} == {
            "instruction width",
            "min exponent",
        }
        made_up(monkeypatch, "fp8_gemm_nt", schedule)
        (pair,) = found(BLOCKS, "sm90", "made").pairs
        assert [step.name for step in pair.steps] == ["instruction width"]

    def test_every_pair_of_schedules_has_all_its_steps(self) -> None:
        """With every step replaced a schedule computes as the other one, whatever the two are."""
        every = schedules.schedules()
        for a in every[::3]:
            for b in every:
                made = a
                for change in changes(a, b):
                    made = change.made(made)
                assert changes(made, b) == [], (a.name, b.name)

    def test_place_of_the_scales_is_one_step_with_the_promotion(self) -> None:
        steps = changes(schedule_named("sm90.promote128"), schedule_named("sm100.chain_ue8m0"))
        assert [s.name for s in steps] == ["promotion and place of the scales", "alignment bits", "min exponent"]

    def test_reduction_over_heads(self) -> None:
        (pair,) = found(LOGITS, "sm90", "sm100").pairs
        assert [step.name for step in pair.steps] == ["alignment bits", "sum over heads"]
        assert pair.steps[-1].together == pair.differing

    def test_to_the_exact_value(self) -> None:
        """Float32 in any order has no one output: a wide accumulator explains what it does, the rest is named."""
        (pair,) = found(BLOCKS, "sm90", "cpu").pairs
        assert [step.name for step in pair.steps] == ["alignment bits", "other roundings to float32"]
        assert pair.steps[0].alone is not None and 0 < pair.steps[0].alone < pair.differing
        assert pair.steps[-1].alone is None and pair.steps[-1].why


class TestJudgement:
    """An output passes on another arch where the oracle says so, and not otherwise."""

    def test_a_truncated_sum_does_not_pass_where_sums_are_wider(self) -> None:
        (pair,) = found(BLOCKS, "sm90", "sm100").pairs
        on_sm100, on_sm90 = pair.accepted
        assert (on_sm100.status, on_sm100.passes) == ("FAILED", False) and on_sm100.outside > 0
        assert (on_sm90.status, on_sm90.passes, on_sm90.outside) == ("PASSED", True, 0)

    def test_an_element_outside_does_not_pass(self) -> None:
        """One wrong element of an output that is said to be a capture is outside on the other arch."""
        call = call_of(BLOCKS)
        by = schedule_named("sm100.promote128")  # of which every output passes on sm90
        right = call.contract.by_schedule(call, by, by.name)["out"]
        wrong = right.clone()
        wrong[2, 3] = wrong[2, 3] * 1.5 + 1.0
        for output, outside in ((right, 0), (wrong, 1)):
            (pair,) = found(BLOCKS, "sm90", "sm100", sm100=("kernel", output, by.name)).pairs
            judged = pair.accepted[1]
            assert (judged.outside, judged.passes) == (outside, outside == 0)
            assert (pair.steps[0].name == "not explained") is (outside > 0)

    @pytest.mark.parametrize("case", [BLOCKS, ROWS, LOGITS, LINEAR, SKIPPING], ids=lambda x: x.partition("/")[0])
    def test_a_prediction_is_right_where_it_is_made(self, case: str) -> None:
        """Every arch's own output has the bits of the schedule that is named, by the judgement of that arch."""
        call = call_of(case)
        for side in found(case, "sm89", "sm90", "sm100").sides:
            if not side.why:
                own = call.on(side.arch)
                schedule = side.numerics if "logits" not in side.numerics else f"{side.arch}.chain"
                made = call.contract.by_schedule(own, schedule_named(schedule), side.numerics)
                assert call.contract.judged(own, made).matches == side.numerics

    def test_no_model(self) -> None:
        """An arch without a model, and a layer, say why."""
        sides = found(ROWS, "sm80", "sm90").sides
        assert "no numerics model for arch 'sm80'" in sides[0].why and not sides[1].why
        layer = cases.parse("deep_gemm_moe/bf16xe4m3-bf16/1x128:128x128/t=4,e=3,h=128,i=128,k=2/family=randn/seed=1")
        call = Call(get(layer.contract), layer.inputs(), layer.call_options()).checked()
        (side,) = across(call, ("sm90",), id="", captured={}).sides
        assert "no schedule alone gives the bits" in side.why

    def test_one_right_result(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A quantiser has one on every arch; a kernel that asked for the arch would be seen."""
        case = cases.parse("per_token_group_quant_fp8/bf16-e4m3/1x128/m=31,k=256/family=randn/seed=1")
        call = Call(get(case.contract), case.inputs(), case.call_options()).checked()
        assert same(call, ("sm80", "sm90", "cpu"), id="").otherwise == ()
        kind, plain = type(call.contract), type(call.contract).kernel

        def kernel(self: Any, call: Call, faults: tuple[Any, ...] = ()) -> dict[str, Tensor]:
            made = plain(self, call, faults)
            return {**made, "scale": made["scale"] * 2} if call.arch == "sm90" else made

        monkeypatch.setattr(kind, "kernel", kernel)
        assert same(call, ("sm80", "sm90", "cpu"), id="").otherwise == ("sm90",)


def test_ulps_are_those_of_the_larger() -> None:
    one = torch.tensor([1.0, 1.0, 2.0, 0.0, torch.nan, 1.0, torch.inf, -1.0], dtype=torch.bfloat16)
    other = torch.tensor([1.0, 1.0078125, 1.9921875, -0.0, torch.nan, torch.nan, torch.inf, 1.0], dtype=torch.bfloat16)
    assert ulps_apart(one, other).tolist() == [0.0, 1.0, 0.5, 0.0, 0.0, torch.inf, 0.0, 256.0]


# --- what is said, against hardware -------------------------------------------------------------------------


def pair_of(result: Compared, one: str, other: str) -> Pair:
    return next(pair for pair in result.pairs if (pair.one, pair.other) == (one, other))


def replaced(schedule: Schedule, steps: Sequence[Change]) -> Schedule:
    for step in steps:
        schedule = step.made(schedule)
    return schedule


def subsets(steps: Sequence[Change]) -> list[tuple[Change, ...]]:
    """Every choice of some but not all steps."""
    return [chosen for count in range(len(steps)) for chosen in combinations(steps, count)]


@pytest.mark.needs_shared("vectors/tensor_core")
class TestPublishedVectors:
    """A GPU's own results confirm the steps between it and another one: the other's instruction has every bit where
    those steps are replaced that the vectors can show, and only there."""

    @pytest.mark.parametrize(
        ("start", "end", "folder", "output", "names", "shown"),
        [
            ("sm89.chain", "sm90.chain", "H100/E4M3", "fp32", [WIDTH], [WIDTH]),
            ("sm90.chain", "sm89.chain", "L40S/E4M3", "fp32", [WIDTH], [WIDTH]),
            ("sm100.chain", "sm90.chain", "H100/E4M3", "fp32", [BITS], [BITS]),
            ("sm80.bf16.chain", "sm90.bf16.chain", "H100/bf16", "fp32", [WIDTH, BITS], [WIDTH, BITS]),
            # the vectors of the A100 have 8 products, which are one sum on either
            ("sm90.bf16.chain", "sm80.bf16.chain", "A100/bf16", "fp32", [WIDTH, BITS], [BITS]),
            ("sm90.chain", "sm100.mma_sync.chain", "B200/E4M3", "fp32", [WIDTH, BITS], [WIDTH, BITS]),
            ("sm100.mma_sync.chain", "sm90.mma_sync.chain", "H100/E4M3", "fp16", [], []),
            ("sm100.bf16.chain", "sm90.bf16.chain", "H100/bf16", "fp32", [], []),
        ],
        ids=lambda x: x if isinstance(x, str) else "",
    )
    def test_steps(self, start: str, end: str, folder: str, output: str, names: list[str], shown: list[str]) -> None:
        steps = changes(schedule_named(start), schedule_named(end))
        assert [step.name for step in steps] == names
        published = vectors.load(VECTORS / folder)
        own = vectors.model_of(published.gpu, published.a_format, published.b_format, vectors.OUTPUTS[output])
        for chosen in (tuple(steps), *subsets(steps)):
            model = replace(own, instruction=replaced(schedule_named(start), chosen).instruction)
            mismatches = vectors.check(published, output, model=model).mismatches
            assert (mismatches == 0) == (set(shown) <= {step.name for step in chosen}), (chosen, mismatches)


class TestCaptures:
    """What an H200 gave: the step that the page names turns another arch's schedule into one with all its bits."""

    @pytest.mark.parametrize(
        ("contract", "capture", "other", "names"),
        [
            ("fp8_gemm_nt", "h200_deep_gemm", "sm100", ["alignment bits"]),
            ("fp8_gemm_nt", "h200_deep_gemm", "sm89", ["instruction width"]),
            ("bmm_fp8", "h200_forms_flashinfer", "sm100", ["alignment bits"]),
            ("torch_per_tensor_w8a8_scaled_mm", "h200_", "sm89", ["instruction width"]),
            ("bmm_mxfp8", "sm90_triton_mx", "sm100", []),
        ],
    )
    def test_steps(self, contract: str, capture: str, other: str, names: list[str]) -> None:
        ids = [c.id for c in captures.load(FIXTURES / "captures") if c.contract == contract and capture in c.id]
        (result,) = compared(Task(contract, captures=tuple(ids)), ("sm90", other), FIXTURES)
        assert isinstance(result, Compared)
        pair, numerics = pair_of(result, "sm90", other), {side.arch: side.numerics for side in result.sides}
        assert [step.name for step in pair.steps] == names
        (taken,) = [c for c in captures.load(FIXTURES / "captures") if c.id == result.id]
        given = taken.outputs(("out",))
        assert isinstance(given, Tensor)
        call = Call(get(contract), taken.inputs(), taken.call(), out_dtype=given.dtype).checked()
        start, end = schedule_named(numerics[other]), schedule_named(numerics["sm90"])
        steps = [change for change in changes(start, end) if change.name in names]

        def equal(chosen: Sequence[Change]) -> bool:
            made = call.contract.by_schedule(call, replaced(start, chosen), numerics[other])["out"]
            return bool(same_bits(made, given).all())

        assert equal(steps)
        assert not any(equal(chosen) for chosen in subsets(steps))
