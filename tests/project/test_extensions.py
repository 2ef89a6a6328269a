"""A family, a format and a schedule of another distribution, added by entry point, are treated as ours are.

The distribution is ``tests/support/foreign_family``: two files that know only the public API. It is not installed;
its entry points stand in a ``dist-info`` folder on the path of each process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from oracle import extensions
from oracle.errors import ExtensionError
from oracle.harness import subjects
from oracle.tensorcore.schedules import Schedule
from tests.support.forked import forked, load_again
from tests.support.paths import ROOT

pytestmark = pytest.mark.turns(4)

FOREIGN = ROOT / "tests" / "support" / "foreign_family"
CONTRACT = "dequantize_rows"
CASE = f"{CONTRACT}/e4m3-bf16/token/m=7,k=130/family=randn/seed=1"
PAGE = "# Contracts\n\n<!-- generated: contracts -->\n<!-- /generated -->\n"
# Every command in one process, which loads torch once: what each returned and printed.
COMMANDS = f"""
import contextlib, io, json, runpy, sys
from pathlib import Path
import oracle, safetensors.torch
from foreign_family import kernel
from oracle.cli import main
from oracle.fixtures import golden
from oracle.numbers.formats import by_name
from oracle.routines import cases
folder = Path(sys.argv[1])
inputs = cases.parse({CASE!r}).inputs()
call = folder / "call.safetensors"
stored = {{n: t.contiguous() for n, t in inputs.items()}}
safetensors.torch.save_file({{**stored, "out": kernel(inputs["q"], inputs["scale"].roll(1))}}, call)
said = {{"verb": str(oracle.judge({CONTRACT!r}, inputs, kernel(**inputs)).status)}}
said["format"] = by_name("float8_foreign").name
def run(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main([str(word) for word in words])
    said[" ".join(map(str, words[:2]))] = [status, out.getvalue()]
for what in ("contracts", "cases", "subjects", "numerics"):
    run("list", what)
run("list", "--coverage", "--markdown", "--fixtures", "fixtures")
run("verify", "--contract", {CONTRACT!r}, "--fixtures", "none")
run("validate", "foreign_family:kernel", "--contract", {CONTRACT!r})
run("mutate", "--contract", {CONTRACT!r}, "--json", folder / "scores.json")
run("judge", call, "--contract", {CONTRACT!r})
run("explain", call, "--contract", {CONTRACT!r})
sys.argv = ["docs/generate.py", "--docs", str(folder / "pages")]
with contextlib.suppress(SystemExit):
    runpy.run_path(sys.argv[0], run_name="__main__")
golden.registered = lambda: {{{CONTRACT!r}: None}}  # of a new folder, this routine's alone
golden.families = lambda: ()
golden.generate(folder / "golden")
said["goldens"] = golden.check(folder / "golden")
print(json.dumps(said))
"""


class Process:
    """Commands in processes that find the foreign distribution."""

    def __init__(self, folder: Path, points: dict[str, dict[str, str]]) -> None:
        info = folder / "foreign_family-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-family\nVersion: 1.0\n")
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in points.items()]
        (info / "entry_points.txt").write_text("".join(lines))
        self.folder = folder

    def run(self, program: str, *words: str | Path) -> tuple[int, str]:
        """The status of a program in a process that loads the package again, and all that it printed."""

        def action() -> int:
            os.chdir(ROOT)
            load_again(str(self.folder), str(FOREIGN), str(ROOT))
            sys.argv = ["program", *map(str, words)]
            exec(compile(program, "program", "exec"), {"__name__": "program"})
            return 0

        with tempfile.TemporaryFile() as said:
            fixtures = str(self.folder / "fixtures")
            child = forked(action, stdout=said.fileno(), stderr=said.fileno(), FP8_ORACLE_FIXTURES=fixtures)
            status = child.wait()
            said.seek(0)
            return status, said.read().decode()

    def oracle(self, *words: str | Path, status: int = 0) -> str:
        returned, said = self.run("import sys; from oracle.cli import main; sys.exit(main())", *words)
        assert returned == status, said
        return said


@pytest.fixture(scope="module")
def declared() -> dict[str, dict[str, str]]:
    table = tomllib.loads((FOREIGN / "pyproject.toml").read_text())["project"]["entry-points"]
    assert isinstance(table, dict)
    return table


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory, declared: dict[str, dict[str, str]]) -> Process:
    return Process(tmp_path_factory.mktemp("foreign"), declared)


def test_it_is_one_small_folder() -> None:
    lines = [len(path.read_text().splitlines()) for path in FOREIGN.iterdir() if path.is_file()]
    assert sum(lines) <= 150


@pytest.fixture(scope="module")
def said(foreign: Process, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the commands returned and printed, and the scores of ``mutate``."""
    folder = tmp_path_factory.mktemp("said")
    (folder / "pages").mkdir()
    (folder / "pages" / "page.md").write_text(PAGE)
    status, printed = foreign.run(COMMANDS, folder)
    assert status == 0, printed
    scores = json.loads((folder / "scores.json").read_text())["scores"]
    found = json.loads(printed.splitlines()[-1])
    made = {"scores": scores, "page": (folder / "pages" / "page.md").read_text()}
    return {name.partition("/")[0].strip(): value for name, value in found.items()} | made


class TestTreatedAsOurs:
    """Every command takes the routine; nothing of ours names it."""

    @pytest.mark.parametrize(
        ("command", "status", "shown"),
        [
            ("list contracts", 0, "codes times the scale of their row"),
            ("list cases", 0, CASE),
            ("list subjects", 0, "foreign torch"),
            ("list numerics", 0, "sm90.foreign"),
            ("list --coverage", 0, f"| `{CONTRACT}` |"),
            ("verify --contract", 0, "OK  3 passed"),
            ("validate foreign_family:kernel", 0, "CONFORMS"),
            ("judge", 1, "FAILED out"),
            ("explain", 1, "1. dequantised by the row above: 910 of 910"),
        ],
    )
    @pytest.mark.sampled(3)
    def test_command(self, said: dict[str, Any], command: str, status: int, shown: str) -> None:
        returned, printed = said[command]
        assert returned == status and shown in printed, printed

    def test_verbs_and_formats(self, said: dict[str, Any]) -> None:
        assert (said["verb"], said["format"]) == ("PASSED", "float8_foreign")

    def test_mutate(self, said: dict[str, Any]) -> None:
        """Every fault is killed."""
        (score,) = said["scores"]
        assert [mutant["fate"] for mutant in score["mutants"]] == ["KILLED"] * 3

    def test_goldens(self, said: dict[str, Any]) -> None:
        """Chosen, stored with their intervals, and computed again."""
        (line,) = said["goldens"]
        assert line.startswith(f"{CONTRACT}: 3 stored")

    def test_pages(self, said: dict[str, Any]) -> None:
        assert CONTRACT not in PAGE and CONTRACT in said["page"]


class TestSabotage:
    """What cannot be loaded, or is no record, is one line that names the entry point."""

    @pytest.mark.parametrize(
        ("group", "target", "command", "said"),
        [
            ("fp8_oracle.families", "no_such_module:FAMILY", ("list", "contracts"), "cannot be loaded: ModuleNotFound"),
            ("fp8_oracle.families", "foreign_family:kernel", ("list", "contracts"), "gives a function; it must give"),
            ("fp8_oracle.schedules", "foreign_family:FORMATS", ("list", "numerics"), "gives a Format; it must give"),
        ],
    )
    def test_a_broken_entry_point(
        self, tmp_path: Path, group: str, target: str, command: tuple[str, ...], said: str
    ) -> None:
        ran = Process(tmp_path, {group: {"broken": target}}).oracle(*command, status=2)
        assert "entry point 'broken'" in ran and said in ran
        assert "Traceback" not in ran

    def test_an_entry_point_that_exits(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
        monkeypatch.syspath_prepend(str(tmp_path))
        point = EntryPoint("broken", "leaves:IT", "fp8_oracle.schedules")
        monkeypatch.setattr(extensions, "entry_points", lambda group: [point])
        with pytest.raises(ExtensionError, match="entry point 'broken' .* cannot be loaded: SystemExit: 3"):
            extensions.added("fp8_oracle.schedules", Schedule, known=(), many=True)

    def test_an_entry_point_that_hangs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of a record, and of subjects: an error that says so, and the alarm is as it was."""
        (tmp_path / "waits.py").write_text("import time\ntime.sleep(60)")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(extensions, "LOADING", 0.2)
        point = EntryPoint("slow", "waits:IT", "fp8_oracle.schedules")
        monkeypatch.setattr(extensions, "entry_points", lambda group: [point])
        with pytest.raises(ExtensionError, match=r"entry point 'slow' .* Expired: it did not load within 0.2 s"):
            extensions.added("fp8_oracle.schedules", Schedule, known=(), many=True)
        assert "did not load within 0.2 s" in str(subjects.load(point).problem)
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        with pytest.raises(extensions.Expired), extensions.within(0.2), contextlib.suppress(Exception):
            time.sleep(60)  # what it suppresses does not hold the alarm

    def test_an_alarm_of_somebody_else_stays(self) -> None:
        """The negative test: with an alarm of another's the block has no limit."""
        signal.setitimer(signal.ITIMER_REAL, 600)
        try:
            with extensions.within(0.05):
                time.sleep(0.1)
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 500
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def test_a_name_that_is_taken(self, tmp_path: Path) -> None:
        twice = {"fp8_oracle.schedules": {"one": "foreign_family:SCHEDULES", "two": "foreign_family:SCHEDULES"}}
        # the same records under two names are two claims on one name
        assert "has already" in Process(tmp_path, twice).oracle("list", "numerics", status=2)

    def test_without_it(self) -> None:
        """The negative test of the checks above: without the distribution the routine is not registered."""
        from oracle.routines import registered

        assert CONTRACT not in registered()
