"""Published hardware vectors: no mismatch, sabotage caught, and a loader that takes the whole collection's names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oracle.errors import FixtureError, NumericsError
from oracle.tensorcore.instructions import Order, instruction
from oracle.tensorcore.predict import mma
from oracle.tensorcore.vectors import Model, arch_of, check, conformance, format_of, load, model_of, sets
from tests.support.paths import SHARED

pytestmark = pytest.mark.emulated

VECTORS = SHARED / "vectors" / "tensor_core"

needs_vectors = pytest.mark.needs_shared("vectors/tensor_core")


@needs_vectors
def test_no_mismatch() -> None:
    """Every set present, float32 and float16 results, 5000 vectors each."""
    rows = conformance(VECTORS)
    assert {(r.gpu, r.format, r.output, r.instruction) for r in rows} >= {
        ("A100", "bf16", "float32", "sm80.mma.bf16"),
        ("B200", "E4M3", "float32", "sm100.mma.fp8"),
        ("B200", "E4M3", "float16", "sm100.mma.fp8"),
        ("H100", "E4M3", "float32", "sm90.wgmma.fp8"),
        ("H100", "E4M3", "float16", "sm90.mma.fp8"),
        ("H100", "bf16", "float32", "sm90.wgmma.bf16"),
        ("L40S", "E4M3", "float32", "sm89.mma.fp8"),
        ("V100", "fp16", "float32", "sm70.mma.f16"),
        ("V100", "fp16", "float16", "sm70.mma.f16"),
    }
    assert [(r.gpu, r.format, r.output, r.mismatches) for r in rows if r.mismatches] == []
    assert all(r.vectors >= 5000 for r in rows)


@needs_vectors
@pytest.mark.parametrize(
    ("folder", "output", "change"),
    [
        ("H100/E4M3", "fp32", {"align_bits": 12}),
        ("H100/E4M3", "fp32", {"group": 16}),
        ("H100/E4M3", "fp32", {"round_toward_zero": False}),
        ("L40S/E4M3", "fp32", {"group": 32}),
        ("L40S/E4M3", "fp32", {"align_bits": 14, "out_bits": 14}),
        ("A100/bf16", "fp32", {"align_bits": 23}),
        ("A100/bf16", "fp32", {"round_toward_zero": False}),
        ("H100/bf16", "fp32", {"group": 8}),
        ("V100/fp16", "fp32", {"align_bits": 24}),
        ("V100/fp16", "fp16", {"group": 2}),
        ("B200/E4M3", "fp16", {"order": Order.SEQUENTIAL}),
    ],
    ids=str,
)
def test_a_sabotaged_model_is_caught(folder: str, output: str, change: dict[str, object]) -> None:
    """The same check finds mismatches for another aligner, group or rounding."""
    vectors = load(VECTORS / folder)
    dtype = torch.float32 if output == "fp32" else torch.float16
    right = model_of(vectors.gpu, vectors.a_format, vectors.b_format, dtype)
    wrong = replace(right, instruction=replace(right.instruction, **change))  # type: ignore[arg-type]
    row = check(vectors, output, model=wrong)
    assert row.mismatches > 0 and row.first.startswith("line ")


@needs_vectors
def test_which_instruction_made_the_fp8_files() -> None:
    """H100's float32 file ignores c; B200's is not a fused tcgen05 sum (1793 of 5000 would be off)."""
    h100, b200 = load(VECTORS / "H100/E4M3"), load(VECTORS / "B200/E4M3")
    wgmma, tcgen05 = instruction("sm90.wgmma.fp8"), instruction("sm100.tcgen05.f8f6f4")
    assert check(h100, "fp32", model=Model(wgmma, uses_c=True)).mismatches == 5000
    assert check(h100, "fp16", model=Model(wgmma)).mismatches > 0
    assert check(b200, "fp32", model=Model(tcgen05)).mismatches == 1793


@pytest.mark.parametrize(
    ("gpu", "arch"),
    [
        ("V100", "sm70"),
        ("T4", "sm75"),
        ("A100", "sm80"),
        ("A30", "sm80"),
        ("A2", "sm86"),
        ("A40", "sm86"),
        ("RTX3060", "sm86"),
        ("Ada", "sm89"),
        ("Ada RTX 1000", "sm89"),
        ("RTX_1000_Ada", "sm89"),
        ("L40S", "sm89"),
        ("RTX4090", "sm89"),
        ("H100", "sm90"),
        ("H100_PCIe", "sm90"),
        ("H200", "sm90"),
        ("GH200", "sm90"),
        ("B200", "sm100"),
        ("B300", "sm103"),
        ("RTXPRO6000", "sm120"),
        ("RTX5090", "sm120"),
        ("MI100", "gfx908"),
        ("MI250X", "gfx90a"),
        ("MI300X", "gfx942"),
        ("sm120", "sm120"),
    ],
)
def test_gpu_names(gpu: str, arch: str) -> None:
    assert arch_of(gpu) == arch


@pytest.mark.parametrize(
    ("gpu", "fmt", "output", "name"),
    [
        ("H200", "E5M2", torch.float32, "sm90.wgmma.fp8"),
        ("H200", "E5M2", torch.float16, "sm90.mma.fp8"),
        ("Ada", "E5M2", torch.float16, "sm89.mma.fp8"),
        ("Ada", "tf32", torch.float32, "sm89.mma.tf32"),
        ("A2", "fp16", torch.float16, "sm86.mma.f16"),
        ("B200", "bf16", torch.float32, "sm100.tcgen05.bf16"),
        ("B200", "E5M2", torch.float32, "sm100.mma.fp8"),
        ("RTXPRO6000", "E4M3", torch.float32, "sm120.mma.f8f6f4"),
        ("MI300X", "tf32", torch.float32, "gfx942.mfma.xf32"),
        ("MI300X", "fp8-e4m3", torch.float32, "gfx942.mfma.fp8"),
    ],
)
def test_models(gpu: str, fmt: str, output: torch.dtype, name: str) -> None:
    assert model_of(gpu, fmt, fmt, output).instruction.name == name


def test_mixed_operands_have_a_model() -> None:
    assert model_of("L40S", "E4M3", "E5M2", torch.float32).instruction.name == "sm89.mma.fp8"


class TestRefusals:
    """Unknown names and broken files are typed errors that list what exists."""

    def test_names(self) -> None:
        with pytest.raises(NumericsError, match="no model for GPU 'TPUv5'; names known"):
            arch_of("TPUv5")
        with pytest.raises(NumericsError, match="no format 'int8'"):
            format_of("int8")
        with pytest.raises(NumericsError, match=r"sm80 has sm80\.mma\.f16"):
            model_of("A100", "E4M3", "E4M3", torch.float32)
        with pytest.raises(NumericsError, match="no sm80 instruction takes bf16 with torch.float16"):
            model_of("A100", "bf16", "bf16", torch.float16)
        with pytest.raises(NumericsError, match="mixes"):
            model_of("H100", "E4M3", "bf16", torch.float32)

    def test_files(self, tmp_path: Path) -> None:
        with pytest.raises(FixtureError, match="no a_<GPU>"):
            sets(tmp_path)
        folder = write(tmp_path, "L40S", "E4M3")
        (folder / "c_L40S_fp32.txt").write_text("0101\n")
        with pytest.raises(FixtureError, match="32 bits"):
            load(folder)
        (folder / "c_L40S_fp32.txt").unlink()
        with pytest.raises(FixtureError, match="holds 0 files"):
            load(folder)

    def test_ragged_operands(self, tmp_path: Path) -> None:
        folder = write(tmp_path, "L40S", "E4M3")
        with (folder / "a_L40S_E4M3.txt").open("a") as file:
            file.write("3f800000\n")
        with pytest.raises(FixtureError, match="agree in columns"):
            load(folder)


class TestTolerance:
    """Sets of other GPUs and formats, without an output, or with files of other lengths."""

    @pytest.mark.parametrize(
        ("gpu", "fmt"), [("A2", "tf32"), ("Ada RTX 1000", "fp16"), ("H200", "E5M2"), ("MI300X", "bf16")]
    )
    def test_written_sets_conform(self, tmp_path: Path, gpu: str, fmt: str) -> None:
        write(tmp_path, gpu, fmt)
        (row,) = conformance(tmp_path)
        assert (row.gpu, row.format, row.vectors, row.mismatches) == (gpu, fmt, 20, 0)

    def test_without_results_there_is_no_row(self, tmp_path: Path) -> None:
        folder = write(tmp_path, "L40S", "E4M3")
        (folder / "d_L40S_fp32.txt").unlink()
        assert conformance(tmp_path) == []

    def test_a_wrong_bit_is_named(self, tmp_path: Path) -> None:
        folder = write(tmp_path, "A100", "bf16")
        path = folder / "d_A100_fp32.txt"
        lines = path.read_text().splitlines()
        lines[6] = lines[6][:-1] + ("0" if lines[6][-1] == "1" else "1")
        path.write_text("\n".join(lines) + "\n")
        (row,) = conformance(tmp_path)
        assert row.mismatches == 1 and row.first.startswith("line 7: hardware ")

    def test_lengths_may_differ(self, tmp_path: Path) -> None:
        folder = write(tmp_path, "L40S", "E4M3")
        with (folder / "d_L40S_fp32.txt").open("a") as file:
            file.write("0" * 32 + "\n")
        (row,) = conformance(tmp_path)
        assert row.vectors == 20 and row.mismatches == 0 and "21" in row.note


def write(root: Path, gpu: str, fmt: str) -> Path:
    """A set in the published layout, with the model's own results."""
    folder = root / gpu / fmt
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-7, 8, (20, 8), generator=random).float() / 4 for _ in range(2))
    c = torch.randn(20, generator=random)
    model = model_of(gpu, fmt, fmt, torch.float32)
    name = format_of(fmt)[0]
    start = c if model.uses_c else torch.zeros(20)
    d = mma(model.instruction, a, b, start, out=torch.float32, a_format=name, b_format=name)
    for letter, x in (("a", a), ("b", b)):
        words = [[f"{v & 0xFFFFFFFF:08x}" for v in row] for row in x.view(torch.int32).tolist()]
        (folder / f"{letter}_{gpu}_{fmt}.txt").write_text("".join(" ".join(row) + " \n" for row in words))
    for letter, y in (("c", c), ("d", d)):
        lines = [f"{v & 0xFFFFFFFF:032b}\n" for v in y.view(torch.int32).tolist()]
        (folder / f"{letter}_{gpu}_fp32.txt").write_text("".join(lines))
    return folder
