"""What peers compute by their own releases is not refused; beside each stands what no release computes."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import oracle
from oracle.errors import InputError, OptionError
from oracle.harness.validation import validate
from oracle.routines import cases, get
from oracle.routines.base import by_name
from oracle.routines.mx.contract import pack
from oracle.truth.tiles import to_blocked
from oracle.verdict.compare import Status, Verdict

INF = torch.inf


def buckets(x: Tensor, scale: Tensor, *, nan_code: int) -> Tensor:
    """DeepGEMM's codes of float32 ``x`` ``[M, K]`` under ``scale`` ``[M, 1]``: the boundaries passed, no -0."""
    quotient = x * (1.0 / scale)
    boundaries = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    index = sum((quotient.abs() > boundary).to(torch.uint8) for boundary in boundaries)
    assert isinstance(index, Tensor)
    index = torch.where(quotient.isnan(), nan_code, index).to(torch.uint8)
    return index | ((quotient < 0) & (index != 0)).to(torch.uint8) << 3


class TestDeepGemmFp4:
    """``per_token_cast_to_fp4``: an infinite element makes the scale infinite and its row's quotients NaN, which the
    release of April 2026 codes 7 (``torch.bucketize``) and that of June 0 (comparisons). Codes are int8."""

    X = torch.randn(3, 32, generator=torch.Generator().manual_seed(5))
    X[1, 3], X[1, 4] = INF, -INF

    def judged(self, nan_code: int, dtype: torch.dtype = torch.int8) -> Verdict:
        scale = self.X.abs().amax(dim=1, keepdim=True) / torch.full((1, 1), 6.0)
        q = pack(buckets(self.X, scale, nan_code=nan_code)).view(dtype)
        return get("per_token_cast_to_fp4").judge({"x": self.X}, {"q": q, "scale": scale}, gran_k=32)

    def test_both_releases_pass(self) -> None:
        for code, recipe in ((0, "deepgemm_fp4"), (7, "deepgemm_2604_fp4")):
            for dtype in (torch.int8, torch.uint8):
                verdict = self.judged(code, dtype)
                assert verdict.status is Status.PASSED and verdict.matches == recipe, verdict.summary

    def test_another_code_of_nan_fails(self) -> None:
        for code in (1, 6):
            assert self.judged(code).status is Status.FAILED

    def test_codes_of_both_releases_in_one_output_fail(self) -> None:
        """One recipe admits the whole output."""
        scale = self.X.abs().amax(dim=1, keepdim=True) / torch.full((1, 1), 6.0)
        old, new = (buckets(self.X, scale, nan_code=code) for code in (7, 0))
        mixed = pack(torch.where(torch.arange(32) < 4, old, new))
        verdict = get("per_token_cast_to_fp4").judge({"x": self.X}, {"q": mixed, "scale": scale}, gran_k=32)
        assert verdict.status is Status.FAILED


class TestModelOptimizer:
    """``nvfp4_quantize`` under an inverse global scale: Model-Optimizer 0.47 raises a block scale to 2^-9, the least of
    E4M3; its earlier releases let it round to 0."""

    X = torch.randn(4, 64, generator=torch.Generator().manual_seed(6))
    X[2, :16] *= 2.0**-30
    G = (X.abs().amax() / 2688.0).reshape(1)

    def output(self, recipe: str) -> dict[str, Tensor]:
        made = get("nvfp4_quantize").predict(
            {"x": self.X, "global_scale": self.G}, numerics=recipe, is_global_scale_inversed=True, layout="linear"
        )
        assert isinstance(made, dict)
        return made

    def judged(self, output: dict[str, Tensor]) -> Verdict:
        return get("nvfp4_quantize").judge(
            {"x": self.X, "global_scale": self.G}, output, is_global_scale_inversed=True, layout="linear"
        )

    def test_both_releases_pass(self) -> None:
        for recipe, least in (("modelopt_nvfp4", 0), ("modelopt_0_47_nvfp4", 1)):
            made = self.output(recipe)
            assert int(made["scale"].view(torch.uint8)[2, 0]) == least
            assert self.judged(made).status is Status.PASSED

    def test_a_larger_least_scale_fails(self) -> None:
        made = self.output("modelopt_0_47_nvfp4")
        raw = made["scale"].view(torch.uint8).clone()
        raw[2, 0] = 2
        assert self.judged(made | {"scale": raw}).status is Status.FAILED


class TestStartsWithinAPage:
    """vLLM 0.33 (PR 51739) gathers from the exact token of ``seq_starts``; earlier releases from its page."""

    CACHE = torch.arange(4 * 4 * 2, dtype=torch.uint8).reshape(4, 4, 2)
    INPUTS: ClassVar[dict[str, Tensor]] = {
        "src_cache": CACHE,
        "dst": torch.zeros(6, 2, dtype=torch.uint8),
        "block_table": torch.tensor([[3, 1], [0, 2]], dtype=torch.int32),
        "cu_seq_lens": torch.tensor([0, 4, 6], dtype=torch.int32),
        "seq_starts": torch.tensor([3, 2], dtype=torch.int32),
    }

    def test_the_rows_of_the_exact_tokens_pass(self) -> None:
        pages = self.CACHE.flatten(0, 1)
        due = torch.cat([pages[[15, 4, 5, 6]], pages[[2, 3]]])
        verdict = get("cp_gather_cache").judge(self.INPUTS, {"dst": due})
        assert not verdict.status.is_failure, verdict.summary

    def test_starts_rounded_down_to_the_page_fail(self) -> None:
        pages = self.CACHE.flatten(0, 1)
        rounded = torch.cat([pages[[12, 13, 14, 15]], pages[[0, 1]]])
        assert get("cp_gather_cache").judge(self.INPUTS, {"dst": rounded}).status is Status.FAILED

    def test_a_request_beyond_its_table_is_refused(self) -> None:
        late = {**self.INPUTS, "seq_starts": torch.tensor([5, 2], dtype=torch.int32)}
        with pytest.raises(OptionError, match="request 0 of 4 tokens needs pages"):
            get("cp_gather_cache").check(late, {})
        with pytest.raises(OptionError, match="are no tokens"):
            get("cp_gather_cache").check({**self.INPUTS, "seq_starts": torch.tensor([-1, 0], dtype=torch.int32)}, {})


class TestSumsThatOverflow:
    """A row whose squares sum to more than float32 holds: a float32 sum gives the norm 0, a float64 sum the norm."""

    X = torch.full((2, 64), 2.0**62)
    X[1] = torch.linspace(-2.0, 2.0, 64)
    INPUTS: ClassVar[dict[str, Tensor]] = {
        "x": X,
        "weight": torch.linspace(0.5, 1.5, 64),
        "scale": torch.tensor([0.01]),
    }

    def judged(self, norm: Tensor) -> Verdict:
        value = (norm.float() * self.INPUTS["weight"]).double() / self.INPUTS["scale"].double()
        q = value.clamp(-448, 448).float().to(torch.float8_e4m3fn)
        return get("rms_norm_static_fp8_quant").judge(self.INPUTS, {"q": q})

    def norm(self, dtype: torch.dtype) -> Tensor:
        x = self.X.to(dtype)
        return x / torch.sqrt(x.square().sum(dim=1, keepdim=True) / 64 + 1e-6)

    def test_both_sums_pass(self) -> None:
        for dtype in (torch.float32, torch.float64):
            verdict = self.judged(self.norm(dtype))
            assert not verdict.status.is_failure, (dtype, verdict.summary)

    def test_more_than_the_norm_and_another_sign_fail(self) -> None:
        for factor in (2.0, -1.0):
            wrong = self.norm(torch.float64)
            wrong[0] *= factor
            assert self.judged(wrong).status is Status.FAILED


@pytest.mark.turns(4)
class TestInt4Experts:
    """``cutlass_w4a8_moe_mm``: a wrong output gets a verdict, with experts that are looked up among the decoded
    weights, not the int8 codes that the routine takes."""

    def call(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        case = cases.parse("cutlass_w4a8_moe_mm/e4m3xi4-bf16/token:channel/m=24,n=32,k=128,g=2/family=randn/seed=1")
        return case.inputs(), case.call_options()

    def test_wrong_numbers_fail(self) -> None:
        inputs, options = self.call()
        right = by_name(get("cutlass_w4a8_moe_mm").reference(inputs, **options))["out"]
        verdict = oracle.judge("cutlass_w4a8_moe_mm", inputs, right * 2, **options)
        assert verdict.status is Status.FAILED and verdict.outside > 0

    def test_weights_of_another_expert_are_named(self) -> None:
        inputs, options = self.call()
        moved = {
            **inputs,
            "b_q": inputs["b_q"].flip(0),
            "b_group_scales": inputs["b_group_scales"].flip(0).contiguous(),
        }
        wrong = by_name(get("cutlass_w4a8_moe_mm").reference(moved, **options))["out"]
        verdict = oracle.judge("cutlass_w4a8_moe_mm", inputs, wrong, **options)
        assert verdict.status is Status.FAILED
        assert any("expert" in name for name in verdict.explained_by), verdict.explained_by


class TestReleasesOfDsMla:
    """``concat_and_cache_ds_mla``: by default the powers of two of vLLM since PR 49435, or amax/448 of releases before;
    one of them for the whole output."""

    CASE = "concat_and_cache_ds_mla/bf16-u8/1x128/t=11,p=16/family=randn/seed=1"

    def output(self, *, ue8m0: bool) -> dict[str, Tensor]:
        made = get("concat_and_cache_ds_mla").reference(cases.parse(self.CASE).inputs(), ue8m0=ue8m0)
        return dict(by_name(made))

    def judged(self, output: dict[str, Tensor], **options: Any) -> Verdict:
        return get("concat_and_cache_ds_mla").judge(cases.parse(self.CASE).inputs(), output, **options)

    def test_either_release_passes_unless_one_is_named(self) -> None:
        for ue8m0 in (False, True):
            made = self.output(ue8m0=ue8m0)
            assert not self.judged(made).status.is_failure
            assert not self.judged(made, ue8m0=ue8m0).status.is_failure
            assert self.judged(made, ue8m0=not ue8m0).status is Status.FAILED

    def test_rows_of_both_releases_fail(self) -> None:
        old, new = (self.output(ue8m0=ue8m0)["kv_cache"].flatten(0, 1) for ue8m0 in (False, True))
        differ = torch.nonzero((old != new).any(dim=1))[:, 0]
        assert len(differ) >= 2
        mixed = old.clone()
        mixed[differ[0]] = new[differ[0]]
        shape = self.output(ue8m0=False)["kv_cache"].shape
        assert self.judged({"kv_cache": mixed.reshape(shape)}).status is Status.FAILED


@pytest.mark.turns(4)
class TestNormsWithoutResidual:
    """A kernel that was given no residual returns none, or ``x``; one that was given it returns the sum."""

    NAME = "rms_norm_dynamic_per_token_quant"
    CASE = f"{NAME}/bf16-e4m3/token/m=3,h=96"

    def call(self, residual: str = "") -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
        case = cases.parse(f"{self.CASE}/{residual}family=randn/seed=7")
        inputs, options = case.inputs(), case.call_options()
        return inputs, options, dict(by_name(get(self.NAME).reference(inputs, **options)))

    def test_none_is_asked_for(self) -> None:
        inputs, options, made = self.call()
        bare = {name: made[name] for name in ("q", "scale")}
        assert get(self.NAME).judge(inputs, bare, **options).status is Status.PASSED
        assert get(self.NAME).judge(inputs, made, **options).status is Status.PASSED

    def test_wrong_outputs_fail(self) -> None:
        inputs, options, made = self.call()
        doubled = {"q": made["q"], "scale": made["scale"] * 2}
        assert oracle.judge(self.NAME, inputs, doubled, explain="full", **options).status is Status.FAILED
        other = made | {"residual": made["residual"] + 1}
        assert get(self.NAME).judge(inputs, other, **options).status is Status.FAILED

    def test_a_sum_that_was_asked_for_is_returned(self) -> None:
        inputs, options, made = self.call("residual=1/")
        with pytest.raises(InputError, match="returns q, scale, residual; the output is q, scale"):
            get(self.NAME).judge(inputs, {name: made[name] for name in ("q", "scale")}, **options)

    @pytest.mark.usefixtures("in_process", "unexplained")
    @pytest.mark.parametrize(
        ("kernel", "options", "conforms"),
        [
            ("never_a_residual", "family=randn", True),
            ("without_residual", "residual=1/family=ties", True),
            ("never_a_residual", "residual=1/family=ties", False),
        ],
    )
    def test_validate_takes_it(self, kernel: str, options: str, conforms: bool) -> None:
        kernel, case = f"tests.support.subjects.norms:{kernel}", f"{self.CASE}/{options}/seed=7"
        report = validate(kernel, self.NAME, case=case, arch="sm90", limit=60)
        assert report.conforms is conforms, report.failures


@pytest.mark.repeats("TestModelOptimizer")
def _torchao() -> tuple[Any, Any]:
    """``to_mx`` and its modes of scaling."""
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError:
        pytest.skip("torchao is missing: pip install --no-deps torchao")
    return to_mx, ScaleCalculationMode


class TestTorchao:
    """``to_mx`` of the wheel against the codes of ``mxfp8_quantize``, for the three roundings that both have."""

    @pytest.mark.parametrize("family", ["randn", "heavy"])
    @pytest.mark.parametrize("rounding", ["floor", "even", "ceil"])
    def test_codes_are_those_of_the_same_rounding(self, rounding: str, family: str) -> None:
        to_mx, modes = _torchao()
        text = f"mxfp8_quantize/bf16-e4m3/1x32/m=16,k=160/rounding={rounding}/family={family}/seed=2"
        case = cases.parse(text)
        inputs = case.inputs()
        right = by_name(get(case.contract).reference(inputs, **case.call_options()))["q"]
        for mode in ("floor", "even", "ceil"):
            _, q = to_mx(inputs["x"], torch.float8_e4m3fn, 32, modes[mode.upper()])
            same = torch.equal(q.reshape(right.shape).view(torch.uint8), right.view(torch.uint8))
            assert same == (mode == rounding)

    @pytest.mark.parametrize("family", ["special", "nan"])
    @pytest.mark.parametrize("rounding", ["floor", "even", "ceil"])
    def test_special_values_are_those_of_its_release(self, rounding: str, family: str) -> None:
        """Scales of NaN and blocks below the least scale: the recipes that name the release have every bit of it, the
        default ones have not."""
        to_mx, modes = _torchao()
        case = cases.parse(f"mxfp8_quantize/bf16-e4m3/1x32/m=16,k=160/rounding={rounding}/family={family}/seed=2")
        inputs = case.inputs()
        scale, q = to_mx(inputs["x"], torch.float8_e4m3fn, 32, modes[rounding.upper()])
        made = {"q": q.reshape(16, 160), "scale": to_blocked(scale.view(torch.uint8).reshape(16, 5)).flatten()}
        contract, options = get(case.contract), case.call_options()
        assert not contract.judge(inputs, made, numerics=f"torchao_0_18_mx_{rounding}", **options).status.is_failure
        assert contract.judge(inputs, made, **options).status.is_failure
