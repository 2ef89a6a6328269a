"""The judge: right outputs pass, every negative test fails for its own reason, bad calls get one typed error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from oracle import errors
from oracle.numbers.formats import decode
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import Promotion, get
from oracle.verdict.compare import Status, Verdict
from oracle.verdict.products import Part
from tests.support.products import at_the_edge, block_scaled, judge_parts, row_scaled

Inputs = dict[str, Tensor]
FP8 = torch.float8_e4m3fn


def gemm_inputs(*, m: int = 6, n: int = 256, k: int = 384, seed: int = 1, kind: str = "randn") -> Inputs:
    p = block_scaled(kind, m, n, k, seed=seed)
    return {"a": p.a, "a_scale": p.a_scale, "b": p.b, "b_scale": p.b_scale}


def hopper(inputs: Inputs, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return oracle.predict("fp8_gemm_nt", inputs, numerics="sm90.promote128", out_dtype=dtype)


def judge(inputs: Inputs, out: Tensor, **options: object) -> Verdict:
    return oracle.judge("fp8_gemm_nt", inputs, out, **options)  # type: ignore[arg-type]


class TestRightOutputsPass:
    """Predicted bits, the correctly rounded truth, and legal variants are all admissible."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_prediction(self, dtype: torch.dtype) -> None:
        inputs = gemm_inputs()
        verdict = judge(inputs, hopper(inputs, dtype))
        assert (verdict.status, verdict.matches, verdict.outside) == (Status.PASSED, "sm90.promote128", 0)

    def test_truth(self) -> None:
        inputs = gemm_inputs()
        verdict = judge(inputs, oracle.reference("fp8_gemm_nt", inputs, out_dtype=torch.bfloat16))  # type: ignore[arg-type]
        assert verdict.status is Status.PASSED and verdict.margin == 0

    @pytest.mark.parametrize("name", ["muladd", "row_then_col"])
    def test_legal_epilogues(self, name: str) -> None:
        inputs = gemm_inputs()
        out = oracle.predict("fp8_gemm_nt", inputs, numerics=f"sm90.promote128.{name}")
        assert judge(inputs, out).status is Status.PASSED
        assert judge(inputs, out, numerics="sm90.promote128").status is Status.PASSED

    def test_exact_float32_accumulation_with_its_own_numerics(self) -> None:
        inputs = gemm_inputs()
        scale_a = inputs["a_scale"].repeat_interleave(128, 1)
        scale_b = inputs["b_scale"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        out = (inputs["a"].float() * scale_a) @ (inputs["b"].float() * scale_b).T
        for arch, numerics in (("cpu", None), ("sm90", "ieee32.any")):
            verdict = judge(inputs, out, arch=arch, numerics=numerics)
            assert verdict.status is Status.PASSED and "float32" in verdict.basis

    @pytest.mark.usefixtures("unexplained")
    def test_float32_scales_that_overflow_before_the_product(self) -> None:
        inputs = gemm_inputs(m=2, n=3, k=128)
        inputs["a"] = (inputs["a"].float() * 2.0**-9).to(FP8)
        inputs["a_scale"] = torch.tensor([[2.0**100], [1.0]])
        inputs["b_scale"] = torch.tensor([[2.0**30]])
        out = (inputs["a"].float() @ inputs["b"].float().T) * (inputs["a_scale"] * inputs["b_scale"])
        assert bool(torch.isinf(out[0]).all())
        verdict = judge(inputs, out, arch="cpu")
        assert verdict.status is not Status.FAILED and verdict.unconstrained == 3
        out[1, 1] *= 1.01
        assert judge(inputs, out, arch="cpu").outside == 1

    def test_an_infinite_code_may_meet_a_scale_product_that_is_zero_in_float32(self) -> None:
        inputs = gemm_inputs(m=2, n=3, k=128)
        inputs["a"], inputs["b"] = (inputs[x].float().to(torch.float8_e5m2) for x in ("a", "b"))
        inputs["a"].view(torch.uint8)[0, 0] = 0x7C
        inputs["a_scale"] *= 2.0**-80
        inputs["b_scale"] *= 2.0**-80
        out = (inputs["a"].float() @ inputs["b"].float().T) * (inputs["a_scale"] * inputs["b_scale"])
        assert bool(torch.isnan(out[0]).all())
        assert judge(inputs, out, arch="cpu").status is not Status.FAILED
        out[1] = torch.nan
        assert judge(inputs, out, arch="cpu").outside == 3

    def test_weak_bound_says_that_it_is_weak(self) -> None:
        inputs = gemm_inputs(n=8)
        verdict = judge(inputs, hopper(inputs), numerics="sm90.promote128.any")
        assert verdict.status is Status.PASSED and "weak" in verdict.summary

    @pytest.mark.parametrize("declared", ["sm90.promote128.any", "sm90.promote128.split"])
    def test_a_wrong_output_under_a_declared_class_is_explained(self, declared: str) -> None:
        inputs = gemm_inputs(n=128)
        verdict = judge(inputs, hopper({**inputs, "a_scale": inputs["a_scale"].roll(1, 0)}), numerics=declared)
        assert verdict.status is Status.FAILED and verdict.explained_by
        assert judge(inputs, hopper(inputs), numerics=declared).status is Status.PASSED

    @pytest.mark.usefixtures("unexplained")
    def test_nan_where_nan_is_due(self) -> None:
        inputs = gemm_inputs(n=128)
        inputs["a"].view(torch.uint8)[2, 5] = 0x7F
        out = oracle.reference("fp8_gemm_nt", inputs, out_dtype=torch.bfloat16)
        assert isinstance(out, Tensor) and bool(torch.isnan(out[2]).all())
        assert judge(inputs, out).status is Status.PASSED
        out[2] = 0
        assert judge(inputs, out).outside == 128


def zero_a_row(inputs: Inputs) -> Tensor:
    out = hopper(inputs)
    out[3] = 0
    return out


def swap_two_scales(inputs: Inputs) -> Tensor:
    scale = inputs["a_scale"].clone()
    scale[[1, 2]] = scale[[2, 1]]
    return hopper({**inputs, "a_scale": scale})


def drop_the_last_block(inputs: Inputs) -> Tensor:
    b = inputs["b"].clone().view(torch.uint8)
    b[:, -128:] = 0
    return hopper({**inputs, "b": b.view(FP8)})


def nan_one_element(inputs: Inputs) -> Tensor:
    out = hopper(inputs)
    out[4, 7] = torch.nan
    return out


def off_by_one_code(inputs: Inputs) -> Tensor:
    out = hopper(inputs, torch.float32)
    big = int(out.abs().argmax())
    out.view(-1)[big] *= 1 + 2.0**-6  # two bfloat16 codes
    return out.to(torch.bfloat16)


def neighbour_block_scale(inputs: Inputs) -> Tensor:
    return hopper({**inputs, "b_scale": inputs["b_scale"].roll(1, 1).contiguous()})


def drop_the_last_element(inputs: Inputs) -> Tensor:
    b = inputs["b"].clone().view(torch.uint8)
    b[:, -1] = 0
    return hopper({**inputs, "b": b.view(FP8)})


def truncating_store(inputs: Inputs) -> Tensor:
    wide = decode(hopper(inputs, torch.float32))
    return to_dtype(wide, torch.bfloat16, rounding=Rounding.TOWARD_ZERO, overflow=Overflow.SATURATE)


def bfloat16_running_sum(inputs: Inputs) -> Tensor:
    total = torch.zeros(inputs["a"].shape[0], inputs["b"].shape[0], dtype=torch.bfloat16)
    for block in range(inputs["a"].shape[1] // 128):
        k = slice(block * 128, block * 128 + 128)
        part = {name: inputs[name].view(torch.uint8)[:, k].contiguous().view(FP8) for name in ("a", "b")}
        scales = {f"{name}_scale": inputs[f"{name}_scale"][:, [block]].contiguous() for name in ("a", "b")}
        total = (total.float() + hopper({**part, **scales}, torch.float32)).to(torch.bfloat16)
    return total


SABOTAGE: dict[Callable[[Inputs], Tensor], str] = {
    zero_a_row: "row 3 only",
    swap_two_scales: "rows 1..2 only",
    drop_the_last_block: "",
    nan_one_element: "only element (4, 7)",
    off_by_one_code: "only element",
    neighbour_block_scale: "",
    drop_the_last_element: "",
    truncating_store: "",
    bfloat16_running_sum: "",
}


class TestSabotage:
    """A check that cannot fail is a defect: every twin of a right output fails, with its place named."""

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("sabotage", SABOTAGE, ids=lambda f: f.__name__)
    @pytest.mark.usefixtures("unexplained")
    def test_is_caught(self, sabotage: Callable[[Inputs], Tensor]) -> None:
        inputs = gemm_inputs(m=8, n=256, k=640)
        assert judge(inputs, hopper(inputs)).status is Status.PASSED
        verdict = judge(inputs, sabotage(inputs))
        assert verdict.status is Status.FAILED and verdict.outside > 0 and verdict.worst is not None
        assert verdict.pattern.startswith(SABOTAGE[sabotage])
        worst = verdict.worst
        assert not worst.low <= worst.actual <= worst.high and worst.ratio > 1

    def test_missing_promotion(self) -> None:
        p = row_scaled("randn", 16, 64, 1024, seed=5)
        inputs = {"a": p.a, "b": p.b, "a_scale": p.a_scale, "b_scale": p.b_scale}
        out = oracle.predict("cutlass_scaled_mm", inputs, numerics="sm90.chain", out_dtype=torch.float32)
        verdict = oracle.judge("cutlass_scaled_mm", inputs, out, numerics="sm90.promote128.scale_after")
        assert verdict.status is Status.FAILED and verdict.explained_by == ("no promotion",)
        declared = oracle.judge("cutlass_scaled_mm", inputs, out)
        assert declared.status is Status.PASSED and declared.matches == "sm90.chain"

    def test_narrow_alignment_by_its_bits(self) -> None:
        """On ordinary data a 12-bit aligner stays in every sound interval; its bits give it away."""
        p = block_scaled("randn", 16, 128, 512, seed=6)
        i = get("sm90.promote128").instruction
        narrow = replace(get("sm90.promote128"), instruction=replace(i, align_bits=12, out_bits=12))
        out = predict_product(p, narrow, out_dtype=torch.bfloat16, engine="torch")
        inputs = {"a": p.a, "a_scale": p.a_scale, "b": p.b, "b_scale": p.b_scale}
        verdict = judge(inputs, out)
        assert verdict.status is Status.FAILED and verdict.explained_by == ("alignment to 12 bits",)

    def test_narrow_alignment_by_its_interval(self) -> None:
        """On data at the aligner's edge the interval alone refuses it."""
        p = at_the_edge(13, 4, 4, 384)
        schedule = get("sm90.promote128")
        narrow = replace(schedule, instruction=replace(schedule.instruction, align_bits=11, out_bits=11))
        out = predict_product(p, narrow, out_dtype=torch.float32, engine="torch")
        verdict = judge_parts([Part(p)], out, numerics=["sm90.promote128"], faults=())
        assert "residue bound" in verdict.basis and verdict.status is Status.FAILED

    def test_no_promotion_has_no_product_with_block_scales(self) -> None:
        with pytest.raises(errors.NumericsError, match="promoting schedule"):
            oracle.predict("fp8_gemm_nt", gemm_inputs(), numerics="sm90.chain")
        assert get("sm90.promote128").promotion is Promotion.FMA


@pytest.mark.usefixtures("unexplained")
class TestMistrust:
    """A pass on data that could not have failed says so; a failure stays a failure."""

    def test_equal_scales(self) -> None:
        inputs = gemm_inputs()
        inputs["a_scale"].fill_(0.5)
        verdict = judge(inputs, hopper(inputs))
        assert verdict.status is Status.MISTRUSTED and "a_scale" in str(verdict.reason)
        broken = hopper(inputs)
        broken[0] = 0
        assert judge(inputs, broken).status is Status.FAILED

    def test_mostly_zeros(self) -> None:
        inputs = gemm_inputs()
        inputs["a"].view(torch.uint8)[:4] = 0
        verdict = judge(inputs, hopper(inputs))
        assert verdict.status is Status.MISTRUSTED and "zero" in str(verdict.reason)

    def test_a_status_needs_its_reason(self) -> None:
        with pytest.raises(ValueError, match="reason"):
            Verdict(Status.SKIPPED, "skipped")


class TestBadCalls:
    """One typed error each, naming the value and the way out."""

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            (lambda i: i.pop("b_scale"), errors.InputError, "missing b_scale"),
            (lambda i: i.update(bias=torch.ones(256)), errors.InputError, "unexpected bias"),
            (lambda i: i.update(a=i["a"].float()), errors.DtypeError, "torch.float32"),
            (lambda i: i.update(a=i["a"][0]), errors.ShapeError, "rank 1"),
            (lambda i: i.update(a=i["a"][:0]), errors.ShapeError, "empty"),
            (lambda i: i.update(a_scale=i["a_scale"][:, :2].contiguous()), errors.ShapeError, "K/128 = 3"),
            (lambda i: i.update(a_scale=i["a_scale"][:5].contiguous()), errors.ShapeError, "M=5"),
            (lambda i: i.update(a_scale=i["a_scale"].t().contiguous().t()), errors.LayoutError, "contiguous"),
            (lambda i: i.update(b=i["b"].view(torch.uint8)[:, :256].view(FP8)), errors.ShapeError, "K=256"),
            (lambda i: i.update(a=i["a"].to("meta")), errors.LayoutError, "meta"),
            (lambda i: i.update(a=[1.0]), errors.InputError, "list"),
        ],
        ids=lambda v: getattr(v, "__name__", str(v)) if not callable(v) or isinstance(v, type) else "change",
    )
    def test_inputs(self, change: Callable[[Inputs], object], error: type[Exception], words: str) -> None:
        inputs = gemm_inputs()
        out = hopper(inputs)
        change(inputs)
        with pytest.raises(error, match=words):
            judge(inputs, out)
        assert issubclass(error, errors.OracleError)

    def test_outputs(self) -> None:
        inputs = gemm_inputs()
        out = hopper(inputs)
        with pytest.raises(errors.ShapeError, match=r"\[6, 256\]"):
            judge(inputs, out[:3])
        with pytest.raises(errors.DtypeError, match="float64"):
            judge(inputs, out.double())
        with pytest.raises(errors.DtypeError, match="float16"):
            judge(inputs, out, out_dtype=torch.float16)
        with pytest.raises(errors.InputError, match="one output"):
            judge(inputs, {"q": out, "scale": out})  # type: ignore[arg-type]

    def test_names(self) -> None:
        inputs = gemm_inputs()
        out = hopper(inputs)
        with pytest.raises(errors.ContractError, match="fp8_gemm_nt"):
            oracle.judge("fp8_gemm", inputs, out)
        with pytest.raises(errors.NumericsError, match="sm90"):
            judge(inputs, out, arch="sm42")
        with pytest.raises(errors.NumericsError, match="sm90.promote128"):
            judge(inputs, out, numerics="sm90.promoted128")
        with pytest.raises(errors.OptionError, match="out_dtype"):
            judge(inputs, out, output_dtype=torch.float16)
        with pytest.raises(errors.OptionError, match="int8"):
            judge(inputs, out, out_dtype=torch.int8)


class TestScaleKinds:
    """cutlass_scaled_mm reads the kind of its scales off their shapes."""

    def test_all(self) -> None:
        p = row_scaled("randn", 4, 6, 256, seed=2)
        one = torch.full((1,), 0.75)
        for a_scale in (one, p.a_scale):
            for b_scale in (one, p.b_scale, p.b_scale.t().contiguous(), p.b_scale[:, 0].contiguous()):
                for bias in ({}, {"bias": p.bias}):
                    inputs = {"a": p.a, "b": p.b, "a_scale": a_scale, "b_scale": b_scale, **bias}
                    out = oracle.predict("cutlass_scaled_mm", inputs, numerics="sm90.chain")  # type: ignore[arg-type]
                    verdict = oracle.judge("cutlass_scaled_mm", inputs, out)  # type: ignore[arg-type]
                    assert verdict.status is Status.PASSED and verdict.matches == "sm90.chain"

    def test_mixed_blocks_are_refused(self) -> None:
        p = row_scaled("randn", 4, 6, 256, seed=2)
        with pytest.raises(errors.ShapeError, match="b_scale"):
            inputs = {"a": p.a, "b": p.b, "a_scale": torch.ones(4, 2), "b_scale": p.b_scale}
            oracle.reference("cutlass_scaled_mm", inputs)


@pytest.mark.usefixtures("unexplained")
class TestGrouped:
    """Rows meet the weight of their expert; padding rows are not judged, real ones are."""

    @pytest.fixture
    def inputs(self) -> Inputs:
        p, q = block_scaled("randn", 8, 128, 256, seed=1), block_scaled("randn", 8, 256, 256, seed=2)
        return {
            "a": p.a,
            "a_scale": p.a_scale,
            "b": q.b.view(torch.uint8).reshape(2, 128, 256).view(FP8),
            "b_scale": q.b_scale[:, None].contiguous(),
            "m_indices": torch.tensor([0, 0, 0, -1, 1, 1, -1, -1], dtype=torch.int32),
        }

    def test_contiguous(self, inputs: Inputs) -> None:
        name = "m_grouped_fp8_gemm_nt_contiguous"
        out = oracle.predict(name, inputs, numerics="sm90.promote128")
        assert bool(torch.isnan(out[[3, 6, 7]]).all()) and not bool(torch.isnan(out[[0, 4]]).any())
        out[3] = 9.0
        assert oracle.judge(name, inputs, out).status is Status.PASSED
        moved = {**inputs, "m_indices": torch.tensor([0, 0, 1, -1, 1, 1, -1, -1], dtype=torch.int32)}
        verdict = oracle.judge(name, inputs, oracle.predict(name, moved, numerics="sm90.promote128"))
        assert verdict.status is Status.FAILED and verdict.pattern.startswith("row 2 only")

    def test_masked(self, inputs: Inputs) -> None:
        name = "fp8_m_grouped_gemm_nt_masked"
        masked = {
            **{k: v for k, v in inputs.items() if k != "m_indices"},
            "a": inputs["a"].view(torch.uint8).reshape(2, 4, 256).view(FP8),
            "a_scale": inputs["a_scale"].reshape(2, 4, 2),
            "masked_m": torch.tensor([3, 0], dtype=torch.int32),
        }
        out = oracle.predict(name, masked, numerics="sm90.promote128")
        assert out.shape == (2, 4, 128) and oracle.judge(name, masked, out).status is Status.PASSED
        out[0, 1, 5] += 3
        assert oracle.judge(name, masked, out).outside == 1

    def test_refusals(self, inputs: Inputs) -> None:
        inputs["m_indices"][0] = 2
        with pytest.raises(errors.InputError, match=r"experts are 0\.\.1"):
            oracle.reference("m_grouped_fp8_gemm_nt_contiguous", inputs)


@pytest.mark.usefixtures("unexplained")
class TestCalls:
    """What a caller may pass, and what is refused with one typed error."""

    def test_gradients_do_not_matter(self) -> None:
        inputs = gemm_inputs(m=2, n=8)
        plain = hopper(inputs)
        inputs |= {name: torch.nn.Parameter(inputs[name]) for name in ("a_scale", "b_scale")}
        assert torch.equal(hopper(inputs), plain) and not hopper(inputs, torch.float32).requires_grad
        assert judge(inputs, plain).matches == "sm90.promote128"
        assert judge(inputs, plain * 1.1).status is Status.FAILED
        assert oracle.identify("fp8_gemm_nt", inputs, plain)[0].equal == 1

    @pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (2, 1, 129), (1, 2, 31)])
    def test_a_wrong_output_of_few_elements_is_a_verdict(self, m: int, n: int, k: int) -> None:
        inputs = gemm_inputs(m=m, n=n, k=k)
        assert judge(inputs, torch.full((m, n), 777.0)).status is Status.FAILED

    def test_block_scales_over_one_block_of_k(self) -> None:
        inputs = gemm_inputs(m=3, n=256, k=128)
        out = oracle.predict("cutlass_scaled_mm", inputs)
        assert torch.equal(out, hopper(inputs))
        assert oracle.judge("cutlass_scaled_mm", inputs, out).matches == "sm90.promote128"
        swapped = {**inputs, "b_scale": inputs["b_scale"].flip(0)}
        assert oracle.judge("cutlass_scaled_mm", swapped, out).status is Status.FAILED

    def test_refusals(self) -> None:
        inputs = gemm_inputs(m=2, n=8)
        out = hopper(inputs)
        for wrong in (None, list(inputs), inputs["a"]):
            with pytest.raises(errors.InputError, match="mapping"):
                oracle.reference("fp8_gemm_nt", wrong)  # type: ignore[arg-type]
        with pytest.raises(errors.ContractError, match="given by its name"):
            oracle.reference(["fp8_gemm_nt"], inputs)  # type: ignore[arg-type]
        for options in ({"numerics": 3}, {"numerics": ["sm90.promote128"]}, {"arch": ["sm90"]}, {"arch": 90}):
            with pytest.raises(errors.NumericsError, match=r"as a str"):
                judge(inputs, out, **options)
        with pytest.raises(errors.NumericsError, match="numerics is a int"):
            oracle.predict("fp8_gemm_nt", inputs, numerics=3)  # type: ignore[arg-type]
        with pytest.raises(errors.NumericsError, match="arch is a int"):
            oracle.identify("fp8_gemm_nt", inputs, out, arch=90)  # type: ignore[arg-type]
        with pytest.raises(errors.LayoutError, match="dense"):
            judge(inputs, out.float().to_sparse())
        with pytest.raises(errors.InputError, match="the output is 1"):
            oracle.judge("fp8_gemm_nt", inputs, {1: out})  # type: ignore[dict-item]
        with pytest.raises(errors.OptionError, match="out_dtype"):
            oracle.reference("fp8_gemm_nt", inputs, out_dtype=np.ones(3))


def test_a_legal_epilogue_is_no_fault_on_tiny_outputs() -> None:
    """One element may have the bits of a fault and of a legal epilogue at once; then it is not the fault."""
    schedule = get("sm90.promote128")
    coincidences = 0
    for seed in range(60):
        p = block_scaled("randn", 1, 1, 256, seed=seed)
        out = predict_product(p, "sm90.promote128.row_then_col", out_dtype=torch.float32)
        if torch.equal(out, predict_product(p, schedule, out_dtype=torch.float32)):
            continue
        coincidences += 1
        fault = replace(schedule, name="named a fault here", promotion=Promotion.ROW_COL_ADD)
        assert judge_parts([Part(p)], out, numerics=[schedule.name], faults=(fault,)).status is Status.PASSED
    assert coincidences > 0
