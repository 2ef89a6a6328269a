"""`verify --keep` and `fixtures adopt`: what ran once is judged again anywhere, and a changed bit is noticed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oracle.errors import FixtureError, LayoutError
from oracle.fixtures import captures
from oracle.fixtures import files as fixtures
from oracle.fixtures import strides as memory
from oracle.harness.recording import CaptureWriter
from oracle.harness.runner import replay
from oracle.routines import cases, profiles
from oracle.verdict.compare import Status
from tests.support.commandline import CASE, Cli, only_case, provide

LAYOUT = "get_col_major_tma_aligned_tensor/f32/-/m=31,c=7,g=1/family=randn/seed=1"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Path:
    """The folder that a run of one right subject leaves."""
    provide(monkeypatch, "right")
    only_case(monkeypatch)
    folder = tmp_path / "recorded"
    ran = cli("verify", "--keep", folder, "--fixtures", "none", "--contract", "fp8_gemm_nt")
    assert ran.status == 0, ran.err
    return folder


@pytest.fixture
def home(tmp_path: Path, fixtures_folder: Path) -> Path:
    """A copy of the fixtures."""
    return Path(shutil.copytree(fixtures_folder, tmp_path / "fixtures"))


@pytest.mark.turns(4)
class TestKeep:
    """One safetensors file and one manifest; the inputs are made again."""

    def test_files_and_provenance(self, kept: Path) -> None:
        manifest = json.loads((kept / captures.MANIFEST).read_text())
        (entry,) = manifest["files"].values()
        assert entry["arch"] == "sm90" and "--keep DIR" in entry["provenance"]["command"]
        assert str(kept) not in json.dumps(manifest)
        (call,) = entry["outputs"].values()
        assert call["case"] == CASE and call["numerics"] == "sm90.promote128"
        assert {p.name for p in kept.iterdir()} == {captures.MANIFEST, "recorded.safetensors"}

    def test_replayed_as_it_was(self, kept: Path) -> None:
        (item,) = replay(kept)
        assert (item.subject, item.arch, item.judge().status) == ("right", "sm90", Status.PASSED)

    @pytest.mark.usefixtures("unexplained")
    def test_wrong_outputs_are_kept_too_and_fail_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
    ) -> None:
        provide(monkeypatch, "zero_row")
        only_case(monkeypatch)
        assert cli("verify", "--keep", tmp_path / "w", "--fixtures", "none", "--contract", "fp8_gemm_nt").status == 1
        (item,) = replay(tmp_path / "w")
        assert item.judge().status is Status.FAILED

    def test_padding_is_kept(self, tmp_path: Path) -> None:
        """The pad lanes of a TMA layout are judged, so they are stored: a poisoned one fails on replay."""
        from oracle.harness.subjects import provider

        case = cases.parse(LAYOUT)
        (eager,) = [
            s
            for s in provider("kernels.subjects:subjects").subjects
            if (s.contract, s.name, s.device) == (case.contract, "eager", "cpu")
        ]
        out = eager.run(case.inputs(), case.call_options())
        assert isinstance(out, Tensor) and not out.is_contiguous()
        for poison, status in ((None, Status.PASSED), (1.0, Status.FAILED)):
            writer, folder = CaptureWriter(), tmp_path / f"poison {poison}"
            if poison is not None:
                memory.run_of(out)[31] = poison
            writer.add(eager, case, case.inputs(), out)
            writer.write(folder, provenance={})
            (item,) = replay(folder)
            assert item.judge().status is status

    def test_equal_outputs_once(self, tmp_path: Path) -> None:
        class Named:
            contract, arch, numerics, device = "fp8_gemm_nt", "sm90", None, "cpu"

            def __init__(self, name: str) -> None:
                self.name = name

        case, writer = cases.parse(CASE), CaptureWriter()
        for name, value in (("one", 1.0), ("same", 1.0), ("other", 2.0)):
            writer.add(Named(name), case, case.inputs(), torch.full((5, 256), value))  # type: ignore[arg-type]
        assert (len(writer.tensors), len(writer.calls)) == (2, 3)
        writer.write(tmp_path / "k", provenance={})
        values = [c.outputs(("out",)) for c in captures.load(tmp_path / "k")]
        assert [float(v.flatten()[0]) for v in values if isinstance(v, Tensor)] == [1.0, 1.0, 2.0]

    def test_refusals(self, tmp_path: Path, kept: Path, cli: Cli) -> None:
        assert "not an empty folder" in cli("verify", "--keep", kept).err
        with_record = ("--record", tmp_path / "r.jsonl", "--resume")
        assert "--resume skips" in cli("verify", "--keep", tmp_path / "n", *with_record).err
        with pytest.raises(FixtureError, match="nothing was judged"):
            CaptureWriter().write(tmp_path / "empty", provenance={})
        assert not (tmp_path / "empty").exists()


class TestAdopt:
    """Into the fixtures, sealed; a damaged folder or a second time is refused and changes nothing."""

    def test_adopted(self, kept: Path, home: Path, cli: Cli) -> None:
        assert cli("fixtures", "adopt", kept, "--fixtures", home).status == 0
        ran = cli("verify", "--fixtures", home, "--case", f"captures/recorded/out.right.{_slug()}")
        assert ran.status == 0 and "1 passed" in ran.out
        ran = cli("fixtures", "adopt", kept, "--fixtures", home)
        assert ran.status == 2 and "is there already" in ran.err

    def test_damage_is_named(self, kept: Path, home: Path, cli: Cli) -> None:
        before = (home / "captures" / captures.MANIFEST).read_bytes()
        path = kept / "recorded.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        ran = cli("fixtures", "adopt", kept, "--fixtures", home)
        assert ran.status == 2 and "recorded.safetensors" in ran.err
        assert (home / "captures" / captures.MANIFEST).read_bytes() == before
        assert not (home / "captures" / "recorded.safetensors").exists()

    def test_inputs_that_changed(self, kept: Path) -> None:
        path = kept / captures.MANIFEST
        path.write_text(path.read_text().replace("seed=7", "seed=8"))
        with pytest.raises(FixtureError, match="other inputs than those of the capture"):
            captures.check(kept)


def _slug() -> str:
    from oracle.fixtures.golden import slug

    return slug(CASE)


class TestMemory:
    """A tensor with what lies between its elements."""

    @given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 3), st.integers(0, 2), st.data())
    def test_there_and_back(self, shape: list[int], offset: int, gap: int, draw: st.DataObject) -> None:
        order = draw.draw(st.permutations(range(len(shape))))
        strides, step = [0] * len(shape), 1
        for axis in order:
            strides[axis] = step
            step = step * shape[axis] + gap
        base = torch.arange(offset + step + 7, dtype=torch.float32)
        x = base.as_strided(shape, strides, offset)
        run = memory.run_of(x)
        assert run.data_ptr() == x.data_ptr()
        assert torch.equal(memory.laid_out(run.clone(), x.shape, x.stride()), x)
        assert run.numel() >= max(n * s for n, s in zip(shape, strides, strict=True))

    def test_the_end_of_the_storage(self) -> None:
        x = torch.zeros(10).as_strided((3, 2), (1, 5), 2)
        assert memory.run_of(x).numel() == 8 and memory.run_of(torch.zeros(0, 3)).numel() == 0

    def test_too_short(self) -> None:
        with pytest.raises(LayoutError, match="needs 9 elements"):
            memory.laid_out(torch.zeros(8), (3, 2), (2, 4))


class TestCompact:
    """Everything that quick shows, in fewer cases."""

    @pytest.mark.parametrize("contract", ["fp8_gemm_nt", "cutlass_scaled_mm", "per_token_group_quant_fp8"])
    def test_covers_quick(self, contract: str) -> None:
        quick, compact = profiles.cases(contract, "quick"), profiles.cases(contract, "compact")
        assert set(map(str, compact)) < set(map(str, quick))
        for part in ("dtypes", "scheme", "extents", "family"):
            assert {getattr(c, part) for c in quick} == {getattr(c, part) for c in compact}
        assert {o for c in quick for o in c.options} == {o for c in compact for o in c.options}


def test_provider_and_arch(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """Subjects that nobody registered, and only one arch."""
    provide(monkeypatch)
    only_case(monkeypatch)
    wanted = ("verify", "--fixtures", "none", "--contract", "fp8_gemm_nt", "--provider", "example_subjects:right")
    assert "1 passed" in cli(*wanted, "--arch", "sm90").out
    ran = cli(*wanted, "--arch", "sm80")
    assert ran.status == 2 and "sm80" in ran.err
    ran = cli("verify", "--provider", "example_subjects:nothing_of_the_kind")
    assert ran.status == 2 and "cannot be loaded" in ran.err
    assert "MODULE:CALLABLE" in cli("verify", "--provider", "example_subjects").err


def test_reading_a_layout(tmp_path: Path) -> None:
    """A manifest that asks for more memory than the file holds is refused."""
    writer, case = CaptureWriter(), cases.parse(LAYOUT)

    class Subject:
        name, contract, arch, numerics, device = "s", case.contract, "sm90", None, "cpu"

    writer.add(Subject(), case, case.inputs(), torch.zeros(7, 32).t()[:31])  # type: ignore[arg-type]
    writer.write(tmp_path / "k", provenance={})
    path = tmp_path / "k" / captures.MANIFEST
    record = fixtures.read_json(path)
    text = json.dumps(record).replace('"strides": [1, 32]', '"strides": [1, 320]')
    path.write_text(text)
    with pytest.raises((FixtureError, LayoutError)):
        captures.check(tmp_path / "k")
