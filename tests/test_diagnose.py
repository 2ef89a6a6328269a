"""Diagnosis: the fault is named from the output alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import oracle
from oracle import captures, cases
from oracle.compare import Status
from oracle.contracts import get
from oracle.diagnose import diagnose
from oracle.effective_scales import factors
from oracle.failing_case import FailingCase, read, write
from oracle.faults import Call, run
from oracle.faults import get as get_fault
from oracle.minimise import extents, minimise
from oracle.tensorcore.schedules import get as get_schedule
from tests.conftest import Cli

ROW_MAJOR = "row-major A scale read as [K/128, align(M, 4)]"
BITS = "bfloat16 bits in a float16 buffer"
GEMM = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=40,n=256,k=640/family=randn/seed=5"
FLASHINFER = "fp8_blockscale_gemm_sm90/e4m3xe4m3-bf16/1x128:1x128/m=12,n=256,k=512/family=randn/seed=5"
CUTLASS = "cutlass_scaled_mm/e4m3xe4m3-bf16/1x128:128x128/m=16,n=128,k=512/family=randn/seed=5"
GATED = "align_fp8_moe_weights_for_fi/e4m3/-/e=2,h=128,i=24/family=codes/seed=1"


def mutant(
    text: str, fault: str, *, schedule: str = "sm90.promote128"
) -> tuple[Call, torch.Tensor | dict[str, torch.Tensor]]:
    """A call and the output of a kernel with this fault."""
    case = cases.parse(text)
    call = Call(get(case.contract), case.inputs(), case.call_options(), get_schedule(schedule), case.out_dtype)
    return call, run(call, get_fault(fault))


class TestSilentWrongAnswers:
    """Wrong numbers that shipped kernels returned without a word."""

    @pytest.mark.parametrize("shape", ["m16_n128_k512", "m40_n256_k1024"])
    @pytest.mark.parametrize(
        ("output", "names"), [("w8a8_rowmajor_scale", (ROW_MAJOR,)), ("w8a8_fp16_out", (f"{ROW_MAJOR} and {BITS}",))]
    )
    def test_captured(self, fixtures_folder: Path, shape: str, output: str, names: tuple[str, ...]) -> None:
        """Named from what the H200 wrote; the float16 call had the row-major scale as well."""
        wanted = f"captures/h200_dense_{shape}/out.flashinfer.{output}"
        (capture,) = [c for c in captures.load(fixtures_folder / "captures") if c.id == wanted]
        verdict = oracle.judge(capture.contract, capture.inputs(), capture.outputs(("out",)), numerics=capture.numerics)
        assert verdict.status is Status.FAILED and verdict.explained_by == names

    @pytest.mark.parametrize(
        ("text", "fault"),
        [
            (GEMM.replace("m=40", "m=42"), "unpadded A scale read with leading dimension align(M, 4)"),
            (FLASHINFER, "per-token weight scale indexed per 128x128 block"),
            (CUTLASS, "row-major A scale read M-major"),
        ],
    )
    def test_products(self, text: str, fault: str) -> None:
        """The scale layouts that no capture holds."""
        call, output = mutant(text, fault)
        assert diagnose(call.contract.name, call.inputs, output, **call.options).names == (fault,)

    def test_partial_amax_scan(self) -> None:
        """The weight quantiser that leaves rows out, from its codes and scales."""
        case = cases.parse("flashinfer_quantize_128x128/bf16-e4m3/128x128/m=130,k=384/family=outlier/seed=1")
        call = Call(get(case.contract), case.inputs(), case.call_options())
        output = run(call, get_fault("amax scan tests the row index where the column index is meant"))
        names = diagnose(case.contract, call.inputs, output).names
        assert "amax scan tests the row index where the column index is meant" in names

    def test_gated_padding(self) -> None:
        """The published padding of gated weights."""
        case = cases.parse(GATED)
        call = Call(get(case.contract), case.inputs(), case.call_options() | {"is_act_and_mul": True})
        fault = get_fault("gated weights padded as one run (up half at the unpadded offset)")
        names = diagnose(case.contract, call.inputs, run(call, fault), **call.options).names
        assert names == (fault.name,)


class TestInternalQuantisers:
    """A routine that quantises its bfloat16 operands itself is explained through its own product."""

    def test_a_row_of_another(self, fixtures_folder: Path) -> None:
        """One row zeroed in what the H200 wrote: the row is found, nothing is invented."""
        wanted = "captures/h200_dense_m40_n256_k1024/out.flashinfer.bf16_fp8"
        (capture,) = [c for c in captures.load(fixtures_folder / "captures") if c.id == wanted]
        output = capture.outputs(("out",))
        assert isinstance(output, torch.Tensor)
        output = output.clone()
        output[3] = 0
        verdict = oracle.judge(capture.contract, capture.inputs(), output)
        assert verdict.status is Status.FAILED and "row 3" in verdict.summary


class TestWhere:
    """Which rows, which K blocks, which experts."""

    def test_a_right_output_has_no_explanation(self) -> None:
        """Nothing fails, nothing is found."""
        call, _ = mutant(GEMM, ROW_MAJOR)
        found = diagnose("fp8_gemm_nt", call.inputs, run(call))
        assert found.failing == 0 and found.names == ()

    def test_a_fault_of_nobodys_catalogue_is_located(self) -> None:
        """The scale of K block 3 of row 7 a quarter too large: no name, but the row, the block and the factor."""
        call, _ = mutant(GEMM, ROW_MAJOR)
        scale = call.inputs["a_scale"].clone()
        scale[7, 3] *= 1.25
        output = run(Call(call.contract, {**call.inputs, "a_scale": scale}, call.options, call.schedule))
        found = diagnose("fp8_gemm_nt", call.inputs, output)
        assert found.names == () and found.first_block == 3 and "row 7" in found.where
        assert any("K block 3" in f and "rows 7" in f and "with 1.2" in f for f in found.findings)

    def test_factors_of_a_right_output_are_one(self) -> None:
        """The least squares do not invent anything."""
        call, _ = mutant(GEMM, ROW_MAJOR)
        output = run(call)
        assert isinstance(output, torch.Tensor)
        found = factors(call.parts[0].product, output)
        assert found is not None and found.first_block() is None

    def test_moved_rows(self) -> None:
        """Rows 2 and 30 exchanged: said without a hypothesis."""
        call, _ = mutant(GEMM, ROW_MAJOR)
        output = run(call)
        assert isinstance(output, torch.Tensor)
        output[[2, 30]] = output[[30, 2]]
        found = diagnose("fp8_gemm_nt", call.inputs, output)
        assert any("2 that of row 30" in f for f in found.findings)

    def test_experts(self) -> None:
        """Only the group that fails is named."""
        text = "fp8_m_grouped_gemm_nt_masked/e4m3xe4m3-bf16/1x128:128x128/m=17,n=128,k=256,g=4/family=randn/seed=1"
        case = cases.parse(text)
        call = Call(get(case.contract), case.inputs(), case.call_options(), get_schedule("sm90.promote128"))
        output = run(call)
        assert isinstance(output, torch.Tensor)
        output[3, 0] = 0
        found = diagnose(case.contract, call.inputs, output)
        assert any(f.startswith("experts 3 only") for f in found.findings)

    def test_a_sample_is_enough_for_a_large_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Above the limit a fault inside the product is named from some rows and columns."""
        monkeypatch.setattr("oracle.diagnose.WHOLE", 1 << 10)
        call, output = mutant(GEMM, "B scale of the next K block")
        assert diagnose("fp8_gemm_nt", call.inputs, output).names == ("B scale of the next K block",)


class TestMinimise:
    """The smallest call that still fails, as a file that explains itself."""

    def test_shrinks_and_keeps_the_failure(self, tmp_path: Path, cli: Cli) -> None:
        """From 40 x 256 x 640 to a few kilobytes; ``explain`` names the fault."""
        fault = get_fault("last element of K dropped")
        call, _ = mutant(GEMM, fault.name)

        def fails(inputs: object) -> bool:
            small = Call(call.contract, inputs, call.options, call.schedule)  # type: ignore[arg-type]
            verdict = call.contract.judge(inputs, run(small, fault), arch="sm90", numerics=None)  # type: ignore[arg-type]
            return verdict.status is Status.FAILED

        smallest = minimise(call.contract, call.inputs, fails, budget=80)
        assert fails(smallest.inputs) and extents(call.contract, smallest.inputs) == "K=128, N=16, M=1"
        output = run(Call(call.contract, smallest.inputs, call.options, call.schedule), fault)
        path = tmp_path / "case.safetensors"
        write(path, FailingCase("fp8_gemm_nt", smallest.inputs, output, call.options, "sm90", None, note="test"))
        assert path.stat().st_size < 8000
        again = read(path)
        assert torch.equal(again.inputs["a"].view(torch.uint8), smallest.inputs["a"].view(torch.uint8))
        ran = cli("explain", path)
        assert ran.status == 1 and fault.name in ran.out

    def test_a_right_case_is_said_to_be_right(self, tmp_path: Path, cli: Cli) -> None:
        """Status 0."""
        call, _ = mutant(GEMM, ROW_MAJOR)
        path = tmp_path / "right.safetensors"
        write(path, FailingCase("fp8_gemm_nt", call.inputs, run(call), call.options, "sm90", None))
        ran = cli("explain", path)
        assert ran.status == 0 and "every bit is that of a right kernel" in ran.out

    def test_a_transposed_weight_survives_the_file(self, tmp_path: Path) -> None:
        """torch's contracts take a column-major weight."""
        text = "torch_per_token_w8a8_scaled_mm/e4m3xe4m3-bf16/token:channel/m=3,n=32,k=64/family=randn/seed=1"
        case = cases.parse(text)
        inputs = case.inputs()
        output = get(case.contract).reference(inputs, out_dtype=torch.bfloat16)
        path = tmp_path / "case.safetensors"
        write(path, FailingCase(case.contract, inputs, output, case.call_options(), "cpu", None))
        again = read(path)
        assert again.inputs["weight"].stride() == inputs["weight"].stride()
        assert oracle.judge(case.contract, again.inputs, again.output, arch="cpu").status is Status.PASSED
