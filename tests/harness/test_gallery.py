"""A gallery of kernels: loaded, run into rows, written as a page, two runs beside each other."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oracle.cli import main
from oracle.errors import DeviceError, FixtureError, OptionError, SubjectError
from oracle.harness import gallery, process
from oracle.harness.report import NUMBERS, Finding, Report
from oracle.harness.session import UNWRITTEN, failed
from oracle.report.gallery import Row, Run, beside, page, read, stored
from tests.support import forked_worker
from tests.support.commandline import Cli
from tests.support.forked import forked

pytestmark = pytest.mark.turns(4)

ROOT = Path(__file__).resolve().parents[2]
CASE = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=5,n=32,k=256/family=randn/seed=1"
GROUPS = "per_token_group_quant_fp8/bf16-e4m3/1x128/m=31,k=256/family=randn/seed=1"
FILE = """
from oracle.harness.gallery import Kernel, Project

def by_name(kernel, inputs, options):
    return kernel(**inputs, out_dtype=options["out_dtype"])

PROJECT = Project(
    name="ours", distributions=("torch", "no-such-distribution"), carried="here", devices=("cpu",),
    kernels=(
        Kernel("fp8_gemm_nt", "tests.support.subjects.right:gemm_out", name="right", case=({case!r},)),
        Kernel("fp8_gemm_nt", "tests.support.subjects.broken:drops_last_k", pinned="one tile", case=({case!r},)),
        Kernel("fp8_gemm_nt", "tests.support.subjects.broken:dies", case=({case!r},)),
        Kernel("per_token_group_quant_fp8", "kernels.subjects:BY_CONTRACT.per_token_group_quant_fp8",
               case=({groups!r},)),
    ),
)
"""
ABSENT = """
from oracle.harness.gallery import Kernel, Project

PROJECT = Project("absent", ("no-such-distribution",), "pip download no-such-distribution",
                  (Kernel("fp8_gemm_nt", "no_such:kernel"),))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("somewhere") / "shown_kernels"
    made.mkdir()
    (made / "ours.py").write_text(FILE.format(case=CASE, groups=GROUPS))
    (made / "absent.py").write_text(ABSENT)
    (made / "_helper.py").write_text("raise RuntimeError('no project')")
    return made


@pytest.fixture(scope="module")
def out(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ran") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", forked_worker.SHIM)
        assert main(["gallery", "run", "--folder", str(folder), "--out", str(made), "--device", "cpu"]) == 1
    return made


@pytest.fixture(scope="module")
def rows(out: Path) -> dict[str, Row]:
    return {row.key: row for row in read(out / "gallery.json").rows}


class TestRun:
    def test_right(self, rows: dict[str, Row]) -> None:
        row = rows["ours.right/fp8_gemm_nt"]
        assert (row.verdict, row.judged, row.identified, row.reruns) == ("CONFORMS", 1, 1, "same")
        assert row.batch == "same" and "torch" in row.versions and list(row.cases) == [CASE]
        groups = rows["ours.BY_CONTRACT.per_token_group_quant_fp8/per_token_group_quant_fp8"]
        assert groups.identified == 1 and groups.matches == {"vllm_group": 1} and groups.sqnr is not None

    def test_the_order_is_that_of_the_gallery(self, rows: dict[str, Row], folder: Path) -> None:
        assert list(rows) == [gallery.key_of(*pair) for pair in gallery.chosen(gallery.load(folder), ())]

    def test_wrong_is_found_and_named(self, rows: dict[str, Row], out: Path) -> None:
        row = rows["ours.drops_last_k/fp8_gemm_nt"]
        assert row.verdict == "FAILED" and "outside" in row.why and row.identified == 0
        assert any("last element of K" in name for name in row.explained), row.explained
        assert "--adapter" not in row.command and CASE in row.command
        assert (out / "calls" / "ours.drops_last_k.fp8_gemm_nt.safetensors").exists()

    def test_dead_and_absent(self, rows: dict[str, Row]) -> None:
        assert rows["ours.dies/fp8_gemm_nt"].verdict == "CRASHED" and rows["ours.dies/fp8_gemm_nt"].why
        assert rows["absent.kernel/fp8_gemm_nt"].verdict == "UNSUPPORTED"
        assert "pip download" in rows["absent.kernel/fp8_gemm_nt"].why

    @pytest.mark.repeats("TestEnded::test_by_a_signal")
    def test_two_jobs(self, rows: dict[str, Row], folder: Path, tmp_path: Path, cli: Cli) -> None:
        """They give what one gives, in the same order."""
        words = ("gallery", "run", "--folder", str(folder), "--out", str(tmp_path), "--device", "cpu")
        assert cli(*words, "--jobs", "2").status == 1
        two = read(tmp_path / "gallery.json").rows
        assert [replace(row, seconds=0.0) for row in two] == [replace(row, seconds=0.0) for row in rows.values()]

    def test_page(self, out: Path) -> None:
        said = (out / "gallery.md").read_text()
        assert said.startswith("4 kernels of 1 project, 3 outputs judged. 2 of them (67%)")
        assert said.index("| FAILED |") < said.index("| CRASHED |") < said.index("| CONFORMS |")
        assert "`drops_last_k` (one tile)" in said and "Not run here" in said

    def test_reports(self, out: Path) -> None:
        said = json.loads((out / "reports" / "ours.right.fp8_gemm_nt.json").read_text())
        assert said["conforms"] and said["judged"] == 1

    def test_resumed(self, out: Path, folder: Path, cli: Cli) -> None:
        """Nothing is run again; without --resume a record is never overwritten."""
        words = ("gallery", "run", "--folder", str(folder), "--out", str(out), "--device", "cpu")
        again = cli(*words, "--resume")
        assert again.status == 1 and "ours." not in again.out
        refused = cli(*words)
        assert refused.status == 2 and "--resume" in refused.err


WAITING = """
import os, time
from pathlib import Path
from oracle.harness.gallery import Kernel, Project

def waits(a, a_scale, b, b_scale, out):
    Path(__file__).with_suffix(".pid").write_text(str(os.getpid()))
    time.sleep(600)

PROJECT = Project("ours", ("torch",), "here", (
    Kernel("fp8_gemm_nt", "waiting_kernels.ours:waits", case=({case!r},)),
    Kernel("fp8_gemm_nt", "tests.support.subjects.right:gemm_out", name="right", case=({case!r},)),
    Kernel("fp8_gemm_nt", "tests.support.subjects.right:gemm_out", name="misdirected", case=({groups!r},)),
), devices=("cpu",))
"""


class TestEnded:
    """Before every kernel has a row."""

    @pytest.fixture
    def waiting(self, tmp_path: Path) -> Path:
        made = tmp_path / "waiting_kernels"
        made.mkdir()
        (made / "ours.py").write_text(WAITING.format(case=CASE, groups=GROUPS))
        return made

    def test_by_a_signal(self, waiting: Path, tmp_path: Path) -> None:
        """What was found is kept, what runs is ended, and a kernel that was not judged has no row."""
        words = ["gallery", "run", "--folder", str(waiting), "--out", str(tmp_path / "out"), "--device", "cpu"]
        with open(tmp_path / "said", "wb") as said:
            child = forked(lambda: main([*words, "--jobs", "2"]), stdout=said.fileno(), stderr=said.fileno())
        record, pid = tmp_path / "out" / "gallery.json", waiting / "ours.pid"

        def ready() -> bool:
            return pid.exists() and bool(pid.read_text()) and record.exists() and len(read(record).rows) > 1

        while child.running() and not ready():
            time.sleep(0.1)
        os.kill(child.pid, signal.SIGINT)
        assert child.wait() == 130, (tmp_path / "said").read_text()
        rows = read(record).rows
        assert [(row.kernel, row.verdict) for row in rows] == [("right", "CONFORMS"), ("misdirected", "UNTESTED")]
        assert "is a case of" in rows[1].why and (tmp_path / "out" / "gallery.md").exists()
        while Path(f"/proc/{pid.read_text()}").exists():  # the launcher ends it; a test's limit ends this loop
            time.sleep(0.05)

    def test_by_its_deadline(self, waiting: Path, tmp_path: Path, cli: Cli) -> None:
        words = ("gallery", "run", "--folder", str(waiting), "--out", str(tmp_path), "--device", "cpu", "--only")
        ended = cli(*words, "ours.waits", "--seconds", "0.001")
        assert ended.status == 2 and "1 of 1 kernels were not validated" in ended.out
        assert not (tmp_path / "gallery.json").exists()
        assert "positive" in cli(*words, "ours.waits", "--seconds", "0").err

    def test_kernels_that_are_left(
        self, waiting: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Status 1 where the time was over before one of them, though every row conforms; 0 where all have one."""
        for count in (2, 3):

            def ran(_: object, keys: list[str], *, count: int = count, **__: object) -> Iterator[tuple[Row, None]]:
                for key in keys[:count]:
                    kernel, _, contract = key.partition(".")[2].rpartition("/")
                    yield Row("ours", kernel, contract, "CONFORMS"), None

            monkeypatch.setattr(gallery, "run", ran)
            words = ("gallery", "run", "--folder", str(waiting), "--out", str(tmp_path / str(count)), "--device", "cpu")
            ended = cli(*words, "--seconds", "60")
            assert (ended.status, "1 of 3 kernels were not validated" in ended.out) == (3 - count, count == 2)

    def test_in_this_process(self, waiting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A validation that was interrupted is no row that FAILED."""
        report = Report("k", "fp8_gemm_nt", "cpu", "cpu", (), stopped="interrupted")
        monkeypatch.setattr(gallery, "validate", lambda *_, **__: report)
        with pytest.raises(KeyboardInterrupt):
            list(gallery.run(gallery.Asked(waiting, "cpu"), ["ours.right/fp8_gemm_nt"]))


class TestPlaces:
    @pytest.fixture(autouse=True)
    def gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def test_each_process_sees_one_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert gallery.places("cpu") == ("cpu", [{}]) and gallery.places("cuda:0") == ("cuda", [{}])
        assert [e["CUDA_VISIBLE_DEVICES"] for e in gallery.places("cuda")[1]] == ["0", "1"]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-7")
        assert gallery.places("cuda:1")[1] == [{"CUDA_VISIBLE_DEVICES": "GPU-7"}]

    @pytest.mark.parametrize("device", ["cuda:2", "cuda:0,cuda:", "cuda0"])
    def test_what_is_not_there(self, device: str) -> None:
        with pytest.raises(DeviceError, match="cuda:0 to cuda:1"):
            gallery.places(device)


class TestBesideEachOther:
    def test_nothing(self, rows: dict[str, Row]) -> None:
        run = Run({}, tuple(rows.values()))
        assert list(beside(run, run)) == []

    def test_broke_and_moved(self, rows: dict[str, Row]) -> None:
        old = rows["ours.right/fp8_gemm_nt"]
        new = replace(old, verdict="FAILED", why="numbers: 3", cases={CASE: "FAILED bound"}, versions={"torch": "9"})
        lines = list(beside(Run({}, (old,)), Run({}, (new,))))
        assert "broke: CONFORMS to FAILED (torch" in lines[0] and "1 of 1 cases changed" in lines[1]
        assert "healed: FAILED to CONFORMS" in next(beside(Run({}, (new,)), Run({}, (old,))))

    def test_commands(self, out: Path, cli: Cli) -> None:
        record = str(out / "gallery.json")
        assert "nothing changed" in cli("gallery", "compare", record, record).out
        assert cli("gallery", "page", record).out.startswith("4 kernels")


class TestStored:
    """The rows of a run in a record that is kept, each with where it was recorded."""

    OLD = Run(
        {"date": "1", "gpu": "A"},
        (
            Row("p", "by an adapter", "gemm", "CONFORMS", versions={"p": "1"}),
            Row("p", "another", "gemm", "CONFORMS"),
            Row("p", "cast", "cast", "CONFORMS"),
            Row("q", "cast", "cast", "FAILED", recorded={"date": "0", "gpu": "C"}),
        ),
    )
    NEW = Run(
        {"date": "2", "gpu": "B"},
        (
            Row("p", "gemm", "gemm", "FAILED", why="w" * 500, cases={CASE: "FAILED"}, versions={"p": "2"}),
            Row("p", "cast", "cast", "UNSUPPORTED", why="not installed"),
            Row("r", "cast", "cast", "CONFORMS"),
        ),
    )

    def test_rows(self) -> None:
        kept = stored(self.OLD, self.NEW)
        assert kept.machine == self.NEW.machine
        assert [row.key for row in kept.rows] == ["p.gemm/gemm", "p.cast/cast", "q.cast/cast", "r.cast/cast"]
        assert [row.recorded.get("gpu", "") for row in kept.rows] == ["", "A", "C", ""]
        assert kept.rows[0].cases == {} and len(kept.rows[0].why) <= 200
        again = stored(kept, self.NEW)
        assert again == kept
        assert [row.recorded for row in stored(kept, self.OLD).rows if row.project == "r"] == [self.NEW.machine]

    def test_the_page_says_where(self) -> None:
        said = page(stored(self.OLD, self.NEW))
        assert "2 kernels recorded with date 2, gpu B, p 2." in said
        assert "1 kernel recorded with date 1, gpu A." in said and "1 kernel recorded with date 0, gpu C." in said
        assert "Recorded with date 2, gpu B, p 2." in page(self.NEW)

    def test_the_command(self, tmp_path: Path, cli: Cli) -> None:
        new, kept = tmp_path / "new.json", tmp_path / "kept.json"
        self.NEW.write(new)
        self.OLD.write(kept)
        ran = cli("gallery", "store", str(new), "--into", str(kept))
        assert ran.status == 0 and "4 rows in" in ran.out and "p.another/gemm: gone" in ran.out
        assert read(kept) == stored(self.OLD, self.NEW)
        assert "nothing changed" in cli("gallery", "store", str(new), "--into", str(kept)).out
        assert cli("gallery", "store", str(new), "--into", str(tmp_path / "none.json")).status == 2


class TestRefused:
    def test_folders(self, tmp_path: Path) -> None:
        for name, text, said in (
            ("none", None, "no folder"),
            ("empty_one", "", "no file of a project"),
            ("a-b", "", "identifier"),
        ):
            if text is not None:
                (tmp_path / name).mkdir()
            with pytest.raises(SubjectError, match=said):
                gallery.load(tmp_path / name)

    @pytest.mark.parametrize(
        ("name", "text", "said"),
        [
            ("raising_kernels", "1 / 0", "ZeroDivisionError"),
            ("bare_kernels", "PROJECT = 3", "no PROJECT"),
            ("misnamed_kernels", ABSENT.replace('"fp8_gemm_nt"', '"fp8_gem_nt"'), "fp8_gem_nt"),
        ],
    )
    def test_files(self, tmp_path: Path, name: str, text: str, said: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.py").write_text(text)
        with pytest.raises(SubjectError, match=said):
            gallery.load(tmp_path / name)

    def test_only(self, folder: Path) -> None:
        with pytest.raises(OptionError, match="absent, ours"):
            gallery.chosen(gallery.load(folder), ["theirs"])
        assert len(gallery.chosen(gallery.load(folder), ["ours"])) == 4

    def test_records(self, tmp_path: Path) -> None:
        for text in ("{", "{}", json.dumps({"schema": "fp8-oracle.gallery/1", "rows": [{"project": 1}]})):
            (tmp_path / "r.json").write_text(text)
            with pytest.raises(FixtureError):
                read(tmp_path / "r.json")


class TestIdentified:
    """What a row counts as identified bit for bit."""

    def test_memory_that_nothing_was_written_to(self) -> None:
        verdict = replace(failed("nothing was written"), explained_by=(UNWRITTEN,))
        assert gallery._identified(Finding("case", NUMBERS, verdict)) == "what the memory held"
        other = replace(verdict, explained_by=("another fault",))
        assert gallery._identified(Finding("case", NUMBERS, other)) == ""
