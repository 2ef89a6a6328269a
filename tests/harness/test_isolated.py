"""Subjects of ``verify`` in a process of their own: what they do to it costs their row and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from hostile_subjects import CRASHED, PASSED

import oracle
from oracle.harness import isolated, provenance, subjects
from oracle.harness.isolated import Crash, Host, Isolated
from oracle.harness.subjects import Provider
from oracle.routines import cases
from tests.support.commandline import CASE, Cli

CASES = [CASE.replace("m=5,n=256,k=256", f"m={m},n=16,k=128") for m in (1, 2, 3, 4)]


def provide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    points = [EntryPoint(name, f"hostile_subjects:{name}", "fp8_oracle.subjects") for name in names]
    monkeypatch.setattr("oracle.harness.subjects.entry_points", lambda group: points)


def forked() -> set[int]:
    """Processes that were forked from this one, those that lost their parent too; not those of another worker of
    pytest-xdist, which has the same command line."""
    own, parents = Path("/proc/self/cmdline").read_bytes(), {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended
                if (folder / "cmdline").read_bytes() == own and (folder / "cwd").samefile(Path.cwd()):
                    parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])

    def first(pid: int) -> int:
        return first(parents[pid]) if parents.get(pid) in parents else pid

    return {pid for pid in parents if parents[first(pid)] != os.getppid()}


def test_a_process_that_is_left_is_found() -> None:
    """The negative test of what follows each test."""
    before = forked()
    if not (pid := os.fork()):
        signal.pause()
        os._exit(0)
    try:
        assert forked() - before == {pid}
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process and no descriptor, whatever the subjects did."""
    before, descriptors = forked(), len(os.listdir("/proc/self/fd"))
    yield
    end = time.monotonic() + 5
    while not forked() <= before and time.monotonic() < end:  # orphans of another worker, which it ends at once
        time.sleep(0.05)
    assert forked() <= before
    assert len(os.listdir("/proc/self/fd")) == descriptors


class TestSubjects:
    """Whatever a subject does, the other rows are as they would be without it."""

    def test_every_way_to_end(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        provide(monkeypatch, "subjects")
        case = cases.parse(CASES[2])
        monkeypatch.setattr("oracle.routines.profiles.cases", lambda *_: [case])
        oracle.predict("fp8_gemm_nt", case.inputs(), numerics="sm90.promote128")  # what is compiled here is inherited
        asked = ("verify", "--contract", "fp8_gemm_nt", "--fixtures", "none", "--limit", 2)
        ran = cli(*asked, "--json", tmp_path / "run.json")
        assert ran.status == 1
        outcomes = json.loads((tmp_path / "run.json").read_bytes())["outcomes"]
        found = {o["subject"]: (o["verdict"]["status"], o["verdict"]["summary"]) for o in outcomes}
        for work, said in CRASHED.items():
            status, summary = found.pop(work.__name__)
            assert status == "CRASHED" and said in summary, summary
        assert found.keys() == {work.__name__ for work in PASSED}
        assert {status for status, _ in found.values()} == {"PASSED"}
        assert "?[2Jall is well?" in ran.err and "\x1b" not in ran.out + ran.err

    @pytest.mark.parametrize("hangs", [1, isolated.HANGS])
    def test_a_hanging_subject_is_given_up(self, monkeypatch: pytest.MonkeyPatch, hangs: int) -> None:
        provide(monkeypatch, "hanging")
        with Host(subjects.points(), limit=0.1, hangs=hangs) as host:
            (subject,) = host.providers()[0].subjects
            said = []
            for case in map(cases.parse, CASES):
                with pytest.raises(Crash) as crash:
                    subject.run(case.inputs(), case.call_options())
                said.append(str(crash.value).partition(":")[0])
            assert said == ["hangs"] * hangs + ["not called"] * (len(CASES) - hangs)
            assert host.workers == hangs

    def test_hosts_of_one_run_give_it_up_together(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """What hung in one process is not called in another one (the twin: in a run of its own it is)."""
        provide(monkeypatch, "hanging")
        case = cases.parse(CASES[0])
        for folder, due in ((tmp_path, "hangs"), (tmp_path, "not called"), (tmp_path / "other", "hangs")):
            folder.mkdir(exist_ok=True)
            with Host(subjects.points(), limit=0.1, hangs=1, told=folder) as host:
                (subject,) = host.providers()[0].subjects
                with pytest.raises(Crash, match=due):
                    subject.run(case.inputs(), case.call_options())

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("exiting", "SystemExit: 0"),
            ("dying", "ended the process with status 0"),
            ("nameless", "Example.name is int, not a name"),
            ("no_subjects", "'int' object is not iterable"),
            ("nowhere", "AttributeError"),
        ],
    )
    def test_a_provider_is_foreign_code_too(self, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
        provide(monkeypatch, name, "hanging")
        with Host(subjects.points(), limit=1) as host:
            hanging, problem = sorted(host.providers(), key=lambda p: p.problem is not None)
            assert [s.name for s in hanging.subjects] == ["hangs"]
            assert problem.subjects == () and problem.problem is not None and said in problem.problem

    def test_tensors_travel_as_they_lie(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Strides, padding, empty and 0-d tensors; the options with their types."""
        wide = torch.arange(40, dtype=torch.float32).view(5, 8)
        sent = {
            "rows": wide[:, :3],
            "columns": wide.t(),
            "one": torch.tensor(1.5),
            "none": torch.empty(0, 3),
            "repeated": torch.ones(1).expand(4, 4),
            "codes": wide.to(torch.float8_e4m3fn),
            "yes": wide > 3,
        }
        options = {"dtype": torch.bfloat16, "block": (1, 128), "limit": None, "factor": 2.5, "on": True, "name": "x"}
        ours, theirs = isolated.socket.socketpair()
        with ours, theirs:
            isolated._send(ours, {n: isolated._word(o) for n, o in options.items()}, sent, isolated.inf)
            record, got = isolated._received(theirs, isolated.inf)
        assert {n: isolated._value(word) for n, word in record.items()} == options
        for name, t in sent.items():
            assert (got[name].dtype, got[name].shape, got[name].stride()) == (t.dtype, t.shape, t.stride())
            assert torch.equal(got[name].to(torch.float32), t.to(torch.float32))

    def test_an_interrupt_ends_the_question(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The next question gets an answer of its own, not the one to the interrupted question."""
        provide(monkeypatch, "subjects")

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with Host(subjects.points(), limit=60) as host:
            right = host.providers()[0].subjects[-1]
            assert isinstance(right, Isolated)
            first, second = (cases.parse(case) for case in CASES[:2])
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(isolated, "_received", interrupted)
                right.run(first.inputs(), first.call_options())
            out = right.run(second.inputs(), second.call_options())
            assert isinstance(out, torch.Tensor) and out.shape == (2, 16)


@pytest.mark.turns(4)
class TestCode:
    """What ``--resume`` compares: every file that loading a provider reached outside of installed distributions."""

    def code(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr("oracle.harness.subjects.entry_points", lambda group: ())
        with Host(subjects.points(["theirs.entry:subjects"]), limit=1) as host:
            (provider,) = host.providers()
        assert provider.problem is None
        return provenance.versions([provider])["subjects subjects"]

    @pytest.fixture
    def files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
        texts = {
            "theirs/__init__.py": "",
            "theirs/entry.py": "import helper.inner\nfrom pathlib import Path\n"
            "text = (Path(__file__).parent / 'kernel.cu').read_text()\ndef subjects(): return []\n",
            "theirs/kernel.cu": "0",
            "theirs/later.py": "x = 1\n",
            "helper/__init__.py": "",
            "helper/inner.py": "x = 1\n",
            "helper/later.py": "x = 1\n",
            "unrelated.py": "x = 1\n",
        }
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return {name: tmp_path / name for name in texts}

    def test_reached_and_changed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]) -> None:
        """The provider, what it imports, the packages of both with what they import later, what it read."""
        codes = [self.code(tmp_path, monkeypatch)]
        files["unrelated.py"].write_text("x = 2\n")
        assert self.code(tmp_path, monkeypatch) == codes[0], "what loading did not reach"
        for changed in ("theirs/kernel.cu", "theirs/later.py", "helper/inner.py", "helper/later.py"):
            files[changed].write_text(files[changed].read_text() + "\n# other\n")
            codes.append(self.code(tmp_path, monkeypatch))
        assert len(set(codes)) == 5

    def test_the_version_of_an_installed_distribution(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]
    ) -> None:
        monkeypatch.setattr(provenance, "_installed", lambda: (files["helper/inner.py"].parent,))
        before = self.code(tmp_path, monkeypatch)
        files["helper/inner.py"].write_text("x = 2\n")
        assert self.code(tmp_path, monkeypatch) == before
        real = provenance._version
        monkeypatch.setattr(provenance, "_version", lambda name: "2" if name == "helper" else real(name))
        assert self.code(tmp_path, monkeypatch) != before

    def test_an_unloaded_provider_counts_by_its_package(self) -> None:
        assert provenance.versions([Provider("x", "json:f")])["subjects x"].startswith("json+")
