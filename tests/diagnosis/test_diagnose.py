"""Diagnosis: the fault is named from the output alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import oracle
from oracle.diagnosis.explain import diagnose
from oracle.diagnosis.least_squares import effective_factors
from oracle.diagnosis.minimise import extents, minimise
from oracle.fixtures import captures
from oracle.fixtures.call_file import CallFile, read, write
from oracle.routines import cases, get
from oracle.routines.base import by_name
from oracle.routines.catalogue import Call, run
from oracle.routines.catalogue import get as get_fault
from oracle.tensorcore.schedules import Schedule
from oracle.tensorcore.schedules import get as get_schedule
from oracle.verdict.compare import Status
from tests.support.commandline import Cli
from tests.support.mutants import GEMM, ROW_MAJOR, mutant

BITS = "bfloat16 bits in a float16 buffer"
FLASHINFER = "fp8_blockscale_gemm_sm90/e4m3xe4m3-bf16/1x128:1x128/m=12,n=256,k=512/family=randn/seed=5"
CUTLASS = "cutlass_scaled_mm/e4m3xe4m3-bf16/1x128:128x128/m=16,n=128,k=512/family=randn/seed=5"
GATED = "align_fp8_moe_weights_for_fi/e4m3/-/e=2,h=128,i=24/family=codes/seed=1"


@pytest.mark.turns(4)
@pytest.mark.replay_sm90
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


@pytest.mark.turns(4)
@pytest.mark.replay_sm90
class TestInternalQuantisers:
    """A routine that quantises its bfloat16 operands itself is explained through its own product."""

    @pytest.mark.usefixtures("unexplained")
    def test_a_row_of_another(self, fixtures_folder: Path) -> None:
        """One row zeroed in what the H200 wrote: the row is found. (That no fault is invented for such a row:
        ``test_flashinfer.py``.)"""
        wanted = "captures/h200_dense_m40_n256_k1024/out.flashinfer.bf16_fp8"
        (capture,) = [c for c in captures.load(fixtures_folder / "captures") if c.id == wanted]
        output = capture.outputs(("out",))
        assert isinstance(output, torch.Tensor)
        output = output.clone()
        output[3] = 0
        verdict = oracle.judge(capture.contract, capture.inputs(), output)
        assert verdict.status is Status.FAILED and "row 3" in verdict.summary


@pytest.mark.turns(4)
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
        found = diagnose("fp8_gemm_nt", call.inputs, output, numerics="sm90.promote128")
        assert found.names == () and found.first_block == 3 and "row 7" in found.where
        assert any("K block 3" in f and "rows 7" in f and "with 1.2" in f for f in found.findings)

    def test_factors_of_a_right_output_are_one(self) -> None:
        """The least squares do not invent anything."""
        call, _ = mutant(GEMM, ROW_MAJOR)
        output = run(call)
        assert isinstance(output, torch.Tensor)
        found = effective_factors(call.parts[0].product, output)
        assert found is not None and found.first_block() is None

    def test_moved_rows(self) -> None:
        """Rows 2 and 30 exchanged: said without a hypothesis."""
        call, _ = mutant(GEMM, ROW_MAJOR)
        output = run(call)
        assert isinstance(output, torch.Tensor)
        output[[2, 30]] = output[[30, 2]]
        found = diagnose("fp8_gemm_nt", call.inputs, output)
        assert any("2 that of row 30" in f for f in found.findings)

    @pytest.mark.repeats("TestWhere::test_moved_rows")
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
        monkeypatch.setattr("oracle.diagnosis.candidates.WHOLE", 1 << 10)
        call, output = mutant(GEMM, "B scale of the next K block")
        assert diagnose("fp8_gemm_nt", call.inputs, output).names == ("B scale of the next K block",)


# Drawn at random from all pairs of a fault and a contract, with a case of the quick profile that shows it.
DRAWN = (
    (
        "A codes saturate at 240",
        "fp8_m_grouped_gemm_nt_masked/e4m3xe4m3-bf16/1x128:128x128/m=17,n=128,k=256,g=4/family=randn/seed=1",
    ),
    (
        "store rounds half away from zero",
        "scaled_grouped_mm/e4m3xe4m3-bf16/token:channel/m=40,n=128,k=256,g=4/family=ties/seed=1",
    ),
    (
        "second half of a split K missing",
        "fp8_blockscale_gemm_sm90/e4m3xe4m3-f16/1x128:128x128/m=33,n=256,k=384/family=codes/seed=2",
    ),
    (
        "A scale rounded to bfloat16",
        "torch_per_tensor_w8a8_scaled_mm/e4m3xe4m3-bf16/tensor:tensor/m=33,n=256,k=384/family=subnormal/seed=1",
    ),
    (
        "B scale of the first row throughout",
        "m_grouped_fp8_gemm_nt_contiguous/e4m3xe4m3-bf16/1x128:128x128/m=384,n=192,k=256,g=4/family=randn/seed=1",
    ),
    (
        "inverse of the B scale used",
        "torch_per_token_w8a8_scaled_mm/e4m3xe4m3-bf16/token:channel/m=33,n=256,k=384/family=exact/seed=2",
    ),
    (
        "A codes saturate at 256",
        "torch_channelwise_w8a8_scaled_mm/e4m3xe4m3-bf16/token:tensor/m=33,n=256,k=384/bias=bf16/family=randn/seed=1",
    ),
    (
        "shard scale row overwritten by the next shard",
        "torch_per_token_w8a8_scaled_mm/e4m3xe4m3-bf16/token:channel/m=31,n=256,k=256/family=randn/seed=1",
    ),
    (
        "B scale of the previous N block",
        "scaled_grouped_mm/e4m3xe4m3-bf16/token:channel/m=40,n=128,k=256,g=4/family=spike/seed=1",
    ),
    (
        "logits outside the window finite",
        "fp8_mqa_logits/e4m3xe4m3-f32/tensor:token/m=5,n=256,h=64,d=128/clean=1/family=randn/seed=1",
    ),
    (
        "codes rounded toward zero",
        "per_token_group_quant_fp8/bf16-e4m3/1x128/m=130,k=384/columns=plain/family=randn/seed=1",
    ),
    (
        "rows of gated weights reordered backwards",
        "reorder_rows_for_gated_act_gemm/e4m3/-/m=256,k=256/family=codes/seed=1",
    ),
    ("softmax for sigmoid", "moe_routing/f32/-/t=40,e=32,k=4/family=randn/seed=1"),
    ("last row not written", "flashinfer_quantize_1x128/bf16-e4m3/1x128/m=129,k=640/family=randn/seed=1"),
    (
        "N tail unwritten",
        "cutlass_w8a8_scaled_mm/e4m3xe4m3-bf16/tensor:tensor/m=32,n=192,k=384/family=randn/seed=1",
    ),
)


@pytest.mark.turns(4)
class TestExplainAFile:
    """From a file with nothing but the call and its output, the fault that was put in stands first, or tied."""

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize(("fault", "text"), DRAWN, ids=[fault for fault, _ in DRAWN])
    def test_first_or_tied(self, tmp_path: Path, cli: Cli, fault: str, text: str) -> None:
        case = cases.parse(text)
        contract, options = get(case.contract), case.call_options()
        dtype = case.out_dtype if contract.multiplies else torch.bfloat16
        call = Call(contract, case.inputs(), options, _first_admitted(case), dtype)
        path = tmp_path / "case.safetensors"
        output = run(call, get_fault(fault))
        write(path, CallFile(case.contract, call.inputs, output, options, "sm90", None))
        assert cli("explain", path, "--json", tmp_path / "said.json").status == 1
        found = json.loads((tmp_path / "said.json").read_text())["diagnosis"]["explanations"]
        worth = [(e["complete"], e["explained"] - e["contradicted"], e["placed"]) for e in found]
        assert fault in [e["name"] for e, w in zip(found, worth, strict=True) if w == worth[0]]

    @pytest.mark.parametrize(("arch", "classed"), [("cpu", False), ("sm90", True)])
    def test_a_class_where_there_are_schedules(self, tmp_path: Path, cli: Cli, arch: str, classed: bool) -> None:
        """A file that `validate` wrote on a CPU is explained too: no instruction models that arch, so none is named."""
        call, output = mutant(GEMM, "B scale of the next K block")
        path = tmp_path / "case.safetensors"
        write(path, CallFile("fp8_gemm_nt", call.inputs, output, {}, arch, None))
        ran = cli("explain", path)
        assert ran.status == 1 and "elements fail" in ran.out
        assert (f"of what is known of {arch}" in ran.out) == classed

    @pytest.mark.repeats("TestWhere::test_moved_rows")
    def test_by_place(self) -> None:
        """What an unwritten tail holds cannot be predicted, where it is can; one wrong element beside it, and the
        place explains nothing."""
        call, output = mutant(GEMM.replace("m=40,n=256", "m=136,n=192"), "N tail unwritten")
        assert isinstance(output, torch.Tensor)
        assert [name.partition(" (by")[0] for name in diagnose("fp8_gemm_nt", call.inputs, output).names] == [
            "N tail unwritten"
        ]
        output[0, 0] += 1
        assert not any("N tail" in name for name in diagnose("fp8_gemm_nt", call.inputs, output).names)

    def test_everything_unwritten_is_no_place(self) -> None:
        """Where the tail is all there is, the hypothesis would fit any output."""
        call, _ = mutant(GEMM.replace("n=256", "n=64"), "N tail unwritten")
        output = torch.ones(40, 64, dtype=torch.bfloat16)
        assert not any(e.placed for e in diagnose("fp8_gemm_nt", call.inputs, output).explanations)


def _first_admitted(case: cases.Case) -> Schedule | None:
    """The schedule of the right kernel of a product."""
    contract = get(case.contract)
    if not contract.multiplies:
        return None
    names = contract.arithmetics(Call(contract, case.inputs(), case.call_options(), out_dtype=case.out_dtype))
    return get_schedule(next(name for name in names if not name.endswith(".any")))


@pytest.mark.turns(4)
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
        write(path, CallFile("fp8_gemm_nt", smallest.inputs, output, call.options, "sm90", None, note="test"))
        assert path.stat().st_size < 8000
        again = read(path)
        assert torch.equal(again.inputs["a"].view(torch.uint8), smallest.inputs["a"].view(torch.uint8))
        ran = cli("explain", path)
        assert ran.status == 1 and fault.name in ran.out

    def test_a_right_case_is_said_to_be_right(self, tmp_path: Path, cli: Cli) -> None:
        """Status 0."""
        call, _ = mutant(GEMM, ROW_MAJOR)
        path = tmp_path / "right.safetensors"
        write(path, CallFile("fp8_gemm_nt", call.inputs, run(call), call.options, "sm90", None))
        ran = cli("explain", path)
        assert ran.status == 0 and "no element fails" in ran.out

    def test_a_transposed_weight_survives_the_file(self, tmp_path: Path) -> None:
        """torch's contracts take a column-major weight."""
        text = "torch_per_token_w8a8_scaled_mm/e4m3xe4m3-bf16/token:channel/m=3,n=32,k=64/family=randn/seed=1"
        case = cases.parse(text)
        inputs = case.inputs()
        output = get(case.contract).reference(inputs, out_dtype=torch.bfloat16)
        path = tmp_path / "case.safetensors"
        write(path, CallFile(case.contract, inputs, output, case.call_options(), "cpu", None))
        again = read(path)
        assert again.inputs["weight"].stride() == inputs["weight"].stride()
        assert oracle.judge(case.contract, again.inputs, again.output, arch="cpu").status is Status.PASSED

    def test_strides_and_padding_survive_the_file(self, tmp_path: Path) -> None:
        """Columns of a TMA-aligned scale with what stands between them; a kernel may also return its own input."""
        contract = "get_col_major_tma_aligned_tensor"
        case = cases.parse(f"{contract}/f32/-/m=31,c=7,g=1/family=randn/seed=1")
        output = get(contract).reference(case.inputs())
        assert isinstance(output, torch.Tensor)
        path = tmp_path / "case.safetensors"
        for padding, status in ((0.0, Status.PASSED), (1.0, Status.FAILED)):
            output.as_strided((output.shape[1], 1), (32, 1), 31).fill_(padding)
            write(path, CallFile(contract, case.inputs(), output, {}, "cpu", None))
            again = read(path)
            assert isinstance(again.output, torch.Tensor) and again.output.stride() == output.stride() == (1, 32)
            assert oracle.judge(contract, again.inputs, again.output, arch="cpu").status is status
        same = case.inputs()["scale"]
        write(path, CallFile(contract, {"scale": same}, same, {}, "cpu", None))
        assert torch.equal(read(path).inputs["scale"], same)


def test_an_output_whose_dtype_no_option_states_is_explained() -> None:
    """A routine that quantises its input inside, with ``out_dtype`` left out: its truth was float64 here, and the
    question ended with an error instead of a failure."""
    case = cases.parse("Fp8LinearOp/bf16xe4m3-bf16/static:tensor/m=17,n=64,k=256/family=randn/seed=1")
    options = {name: value for name, value in case.call_options().items() if name != "out_dtype"}
    wrong = by_name(get("Fp8LinearOp").reference(case.inputs(), **options))["out"].to(torch.bfloat16)
    wrong[:, 1:3] = 0
    verdict = oracle.judge("Fp8LinearOp", case.inputs(), wrong, **options)
    assert verdict.status is Status.FAILED and "every failing element is 0" in verdict.observed
