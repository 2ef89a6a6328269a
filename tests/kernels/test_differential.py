"""The production layer against the references, where a subject is more than one call: preparation, records, runs.

Every case of the quick profile passes; and each sabotage of a piece of the layer is noticed through the subject.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from kernels import grouped, layout, linear, moe, moe_layer, platform
from kernels.backends import eager
from kernels.platform import Machine, use_machine
from kernels.subjects import BY_CONTRACT, Subject, subjects
from kernels.verbs import SERVED
from oracle.routines import cases, get, profiles
from oracle.truth import layout as truth
from oracle.verdict.compare import Status, Verdict

LAYER = "apply_fi_trtllm_fp8_per_tensor_moe"
CONTRACTS = (
    LAYER,
    "silu_and_mul",
    "scaled_grouped_mm",
    "get_num_sms",
    "select_cutlass_fp8_gemm_impl",
    "build_flashinfer_fp8_cutlass_moe_prepare_finalize",
    "maybe_create_device_identity",
)
HEAD = f"{LAYER}/bf16xe4m3-bf16/tensor:tensor"
PREPARED = f"{HEAD}/t=17,g=6,e=3,h=64,i=40/rank=1/family=randn/seed=5"
Sabotage = Callable[[pytest.MonkeyPatch], object]
Change = Callable[[dict[str, Any]], dict[str, Any]]

with use_machine(Machine.described("cpu")):
    CPU = {s.contract: s for s in subjects() if s.contract in CONTRACTS}


def run(text: str, subject: Subject | None = None) -> Verdict:
    """The verdict on a production subject over one case."""
    case = cases.parse(text)
    inputs, call = case.inputs(), case.call_options()
    chosen = subject or CPU[case.contract]
    output = chosen.run({name: tensor.clone() for name, tensor in inputs.items()}, dict(call))
    return get(case.contract).judge(inputs, output, arch="cpu", numerics=chosen.numerics, **call)


class TestEveryCase:
    """The quick profile: hostile data, ties, specials, empty groups, ranks, padded and aligned sizes."""

    def test_all_are_subjects(self) -> None:
        assert set(CPU) == set(CONTRACTS)

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("contract", CONTRACTS)
    def test_passes(self, contract: str) -> None:
        verdicts = {str(case): run(str(case)) for case in profiles.cases(contract, "quick")}
        assert [f"{i}: {v.summary}" for i, v in verdicts.items() if v.status.is_failure] == []
        assert sum(v.status is Status.PASSED for v in verdicts.values()) > len(verdicts) / 2


def registered(change: Callable[[torch.nn.Module, dict[str, Tensor]], None]) -> Sabotage:
    """Scales registered as they should be, then changed."""

    def sabotage(monkeypatch: pytest.MonkeyPatch) -> None:
        right = moe.register_scales_for_trtllm_fp8_per_tensor_moe

        def wrong(layer: torch.nn.Module, *scales: Tensor) -> None:
            right(layer, *scales)
            change(layer, dict(zip(("w13", "in13", "w2", "in2"), scales, strict=True)))

        monkeypatch.setattr(moe, "register_scales_for_trtllm_fp8_per_tensor_moe", wrong)

    return sabotage


def preparation(name: str, wrong: Callable[..., Any]) -> Sabotage:
    return lambda monkeypatch: monkeypatch.setattr(moe, name, wrong)


def kernel(change: Change) -> Sabotage:
    """The kernel called with other arguments."""

    def sabotage(monkeypatch: pytest.MonkeyPatch) -> None:
        right = eager.moe_trtllm
        wrong = replace(eager.BACKEND, moe_trtllm=lambda **arguments: right(**(arguments | change(arguments))))
        monkeypatch.setattr(eager, "BACKEND", wrong)

    return sabotage


LAYERS: dict[str, Sabotage] = {
    "halves left as w13": preparation("swap_w13_to_w31", lambda x: x),
    "rows not permuted": preparation(
        "rotate_weights_for_fi_trtllm_fp8_per_tensor_moe", lambda first, second, gated: (first, second)
    ),
    "gate and up rows not interleaved": preparation(
        "rotate_weights_for_fi_trtllm_fp8_per_tensor_moe",
        lambda first, second, gated: layout.rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(first, second, False),
    ),
    "padded as published": preparation(
        "align_fp8_moe_weights_for_fi", lambda a, b, gated: truth.align_fp8_moe_weights_for_fi_published(a, b, gated)
    ),
    "gate in the scale of the second input": registered(
        lambda layer, s: setattr(layer, "output1_scales_gate_scalar", layer.output1_scales_scalar)
    ),
    "first product not scaled for the second input": registered(
        lambda layer, s: setattr(layer, "output1_scales_scalar", layer.output1_scales_gate_scalar)
    ),
    "second input's scale left out of the second": registered(
        lambda layer, s: setattr(layer, "output2_scales_scalar", s["w2"])
    ),
    "scales of the weights exchanged": registered(
        lambda layer, s: setattr(layer, "output2_scales_scalar", s["w13"] * s["in2"])
    ),
    "input quantised in the other scale": registered(
        lambda layer, s: setattr(layer, "w13_input_scale_scalar", s["in2"])
    ),
    "rank's first expert not subtracted": kernel(lambda a: {"local_expert_offset": 0}),
    "one expert more in the offset": kernel(lambda a: {"local_expert_offset": a["local_expert_offset"] + 1}),
    "routing weight dropped": kernel(lambda a: {"routing_logits": a["routing_logits"] * 1e4}),
    "least logit in front": kernel(lambda a: {"routing_logits": -a["routing_logits"]}),
    "tokens of the row before": kernel(
        lambda a: {"hidden_states": a["hidden_states"].view(torch.uint8).roll(1, 0).view(torch.float8_e4m3fn)}
    ),
}


@pytest.mark.turns(4)
class TestByName:
    """``kernels.subjects:BY_CONTRACT.<contract>`` for tools that take a function."""

    def test_every_contract(self) -> None:
        assert set(vars(BY_CONTRACT)) == set(SERVED)

    @pytest.mark.sampled(1)
    @pytest.mark.usefixtures("forked_workers")
    @pytest.mark.parametrize("contract", [LAYER, "scaled_grouped_mm", "select_cutlass_fp8_gemm_impl"])
    def test_validated_in_a_worker(self, contract: str) -> None:
        few = [str(case) for case in profiles.cases(contract, "quick")[:4]]  # TestEveryCase has them all
        report = oracle.validate(f"kernels.subjects:BY_CONTRACT.{contract}", contract, case=few)
        assert report.exit_code == 0, report.findings

    def test_what_is_not_offered(self) -> None:
        x = torch.ones(2, 4)
        with pytest.raises(NotImplementedError, match="out_dtype"):
            BY_CONTRACT.fp8_gemm_nt(a=x, a_scale=x, b=x, b_scale=x, out_dtype="bfloat16")


class TestPreparedLayer:
    """Weights go in as a checkpoint stores them, so whatever goes wrong on the way is in the result."""

    def test_untouched(self) -> None:
        assert run(PREPARED).status is Status.PASSED

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("name", LAYERS)
    def test_sabotaged(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        LAYERS[name](monkeypatch)
        verdict = run(PREPARED)
        assert verdict.status is Status.FAILED, f"{name}: {verdict.summary}"

    def test_a_weight_kept_in_bfloat16_is_not_offered_here(self) -> None:
        with pytest.raises(NotImplementedError, match="float32"):
            run(f"{HEAD}/t=1,g=2,e=2,h=32,i=16/weight=bf16/family=randn/seed=1")


class TestRecords:
    """Every field of a record is an output, so that no exchange of two of them goes unnoticed."""

    SELECT = "select_cutlass_fp8_gemm_impl/i64/-/r=500/family=integers/seed=1"
    BUILD = "build_flashinfer_fp8_cutlass_moe_prepare_finalize/i64/-/r=500/family=integers/seed=1"

    @pytest.mark.parametrize(("i", "j"), [(2, 4), (3, 5), (2, 3), (4, 5), (3, 4), (2, 5)])
    def test_exchanged_ranks(self, i: int, j: int, monkeypatch: pytest.MonkeyPatch) -> None:
        right = moe.FlashInferExperts

        def wrong(*fields: Any, **named: Any) -> Any:
            given = list(fields)
            if len(given) > j:
                given[i], given[j] = given[j], given[i]
            return right(*given, **named)

        monkeypatch.setattr(moe, "FlashInferExperts", wrong)
        assert run(self.SELECT).status is Status.FAILED

    @pytest.mark.parametrize("field", ["out_dtype", "quant_config", "use_deepseek_fp8_block_scale"])
    def test_a_field_left_at_a_default(self, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
        right = moe.select_cutlass_fp8_gemm_impl
        default = {"out_dtype": torch.bfloat16, "quant_config": None, "use_deepseek_fp8_block_scale": False}[field]

        def wrong(*arguments: Any) -> Any:
            made = right(*arguments)
            object.__setattr__(made, field, default)
            return made

        monkeypatch.setattr(moe, "select_cutlass_fp8_gemm_impl", wrong)
        assert run(self.SELECT).status is Status.FAILED

    def test_a_refusal_is_an_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither a configuration nor a dtype: a record with some default dtype is wrong."""
        right = moe.select_cutlass_fp8_gemm_impl
        lenient = lambda config, quant, dtype=None, block=False: right(config, quant, dtype or torch.bfloat16, block)  # noqa: E731
        monkeypatch.setattr(moe, "select_cutlass_fp8_gemm_impl", lenient)
        assert run(self.SELECT).status is Status.FAILED

    @pytest.mark.parametrize("limit", [0, 2])
    def test_data_parallel_is_more_than_one(self, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(config: moe.MoeConfig | None, block: bool = False) -> moe.PrepareFinalize:
            return moe.PrepareFinalize(config is not None and config.dp_size > limit, block)

        monkeypatch.setattr(moe, "build_flashinfer_fp8_cutlass_moe_prepare_finalize", wrong)
        assert run(self.BUILD).status is Status.FAILED

    @pytest.mark.parametrize("sizes", [lambda c: c.ep_size, lambda c: c.tp_size])
    def test_another_size_for_the_data_parallel_one(
        self, sizes: Callable[[moe.MoeConfig], int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def wrong(config: moe.MoeConfig | None, block: bool = False) -> moe.PrepareFinalize:
            return moe.PrepareFinalize(config is not None and sizes(config) > 1, block)

        monkeypatch.setattr(moe, "build_flashinfer_fp8_cutlass_moe_prepare_finalize", wrong)
        assert run(self.BUILD).status is Status.FAILED


class TestMultiprocessors:
    """Two tables of two sources must agree in every product, and a refusal must be one."""

    CASE = "get_num_sms/i64/-/r=500/family=recent/seed=1"

    @pytest.mark.parametrize("product", platform.PRODUCTS)
    def test_one_wrong_count(self, product: str, monkeypatch: pytest.MonkeyPatch) -> None:
        arch, count = platform.PRODUCTS[product]
        monkeypatch.setitem(platform.PRODUCTS, product, (arch, count + 2))
        assert run(self.CASE).status is Status.FAILED

    def test_nobody_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(platform, "get_num_sms", lambda machine: machine.sms or 132)
        assert run(self.CASE).status is Status.FAILED

    def test_the_product_stands_above_the_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = Machine.of_product
        monkeypatch.setattr(Machine, "of_product", classmethod(lambda cls, product, *, sms=None: right(product)))
        assert run(self.CASE).status is Status.FAILED


class TestIdentity:
    """Float32, one element, one."""

    @pytest.mark.parametrize(
        "wrong", [torch.zeros(1), torch.ones(()), torch.ones(1, dtype=torch.float64), torch.ones(2), -torch.ones(1)]
    )
    def test_another(self, wrong: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(linear._identity, torch.device("cpu"), wrong)
        text = "maybe_create_device_identity/bf16/-/m=3,k=32/family=randn/seed=1"
        if tuple(wrong.shape) == (1,) and wrong.dtype == torch.float32:
            assert run(text).status is Status.FAILED
        else:
            with pytest.raises(Exception, match="shape|dtype"):
                run(text)


def other_silu(change: Callable[[Tensor], Tensor]) -> Sabotage:
    return lambda monkeypatch: monkeypatch.setattr(torch.nn.functional, "silu", change)


class TestActivation:
    """An activation that is nearly silu is not silu."""

    @pytest.mark.parametrize(
        ("text", "sabotage"),
        [
            ("bf16/-/m=33,i=96", other_silu(torch.nn.functional.gelu)),
            ("bf16/-/m=33,i=96", other_silu(torch.sigmoid)),
            ("bf16/-/m=33,i=96", other_silu(lambda x: x * torch.sigmoid(1.002 * x))),
            ("f32/-/m=33,i=96", other_silu(lambda x: x * torch.sigmoid(x) * (1 + 2.0**-18))),
            ("bf16/-/m=33,i=96/each=1", other_silu(lambda x: x * torch.sigmoid(x.to(torch.bfloat16)).float())),
        ],
    )
    def test_found(self, text: str, sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch) -> None:
        case = f"silu_and_mul/{text}/family=randn/seed=1"
        assert run(case).status is Status.PASSED
        sabotage(monkeypatch)
        assert run(case).status is Status.FAILED

    def test_a_device_exponential_is_right(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two ulp of an exponential and of a reciprocal are within what a right kernel may err."""
        near = other_silu(lambda x: x * (1 / (1 + torch.exp(-x) * (1 + 2.0**-22))) * (1 - 2.0**-22))
        near(monkeypatch)
        for dtype in ("bf16", "f16", "f32"):
            assert run(f"silu_and_mul/{dtype}/-/m=33,i=96/family=randn/seed=1").status is Status.PASSED

    def test_the_limit_bounds_the_gate_above_only(self) -> None:
        def both_sides(x: Tensor, limit: float | None = None, *, round_silu: bool = False) -> Tensor:
            return moe_layer.silu_and_mul(x if limit is None else x.clamp(-limit, limit), round_silu=round_silu)

        wrong = Subject("eager", "silu_and_mul", "cpu", None, "cpu", lambda i, o: both_sides(**i, **o))
        case = "silu_and_mul/bf16/-/m=33,i=96/limit=0.5/family=randn/seed=1"
        assert run(case).status is Status.PASSED
        assert run(case, wrong).status is Status.FAILED


@pytest.mark.turns(4)
class TestRuns:
    """Runs of any length: where they end is the whole difficulty."""

    CASE = "scaled_grouped_mm/e4m3xe4m3-bf16/token:channel/m=40,n=128,k=256,g=4/family=randn/seed=1"

    @pytest.mark.parametrize(
        "change",
        [
            lambda a: {"offsets": torch.minimum(a["offsets"] + 1, a["offsets"][-1])},
            lambda a: {"scale_a": a["scale_a"].roll(1, 0)},
            lambda a: {"scale_b": a["scale_b"].roll(1, 0)},
            lambda a: {"scale_b": a["scale_b"].roll(1, 1)},
            lambda a: {"b": a["b"].view(torch.uint8).roll(1, 0).view(torch.float8_e4m3fn)},
        ],
    )
    def test_sabotaged(self, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
        right = eager.grouped_scaled
        names = ("a", "b", "scale_a", "scale_b", "offsets", "out_dtype")

        def wrong(*arguments: Any) -> Tensor:
            named = dict(zip(names, arguments, strict=True))
            return right(**(named | change(named)))

        assert run(self.CASE).status is Status.PASSED
        monkeypatch.setattr(eager, "BACKEND", replace(eager.BACKEND, grouped_scaled=wrong))
        assert run(self.CASE).status is Status.FAILED

    def test_rows_of_nobody_may_hold_anything(self) -> None:
        case = cases.parse(self.CASE)
        inputs = case.inputs()
        end = int(inputs["offsets"][-1])
        assert end < 40
        inputs["a"].view(torch.uint8)[end:] = 0x7F
        inputs["scale_a"][end:] = torch.nan
        out = grouped.scaled_grouped_mm(**inputs)
        out[end:] = torch.nan
        contract = get("scaled_grouped_mm")
        assert contract.judge(inputs, out, arch="cpu", numerics=None).status is Status.PASSED
        out[end - 1, 0] = torch.nan
        assert contract.judge(inputs, out, arch="cpu", numerics=None).status is Status.FAILED
