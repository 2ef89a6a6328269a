"""What a new user types, from the first command to the last: each script beside this file, run as it stands.

The scripts run in a shell too. ``#= 1`` behind a command is the exit status that it must have (0 where nothing stands),
``#> words`` below it are words that it must print. Here every command is a child of this process, which has loaded
torch, and a kernel is called without a process of its own; the last lines of the run say what each journey took.
"""

from __future__ import annotations

import os
import resource
import runpy
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

import oracle
from oracle.routines import cases
from tests.support.forked import forked
from tests.support.in_process import InProcess

FOLDER = Path(__file__).parent
JOURNEYS = sorted(path.stem for path in FOLDER.glob("*.sh"))


@dataclass
class Step:
    """A command, or a file to write (``content``), and what must come of it."""

    line: str
    content: str | None = None
    status: int = 0
    says: list[str] = field(default_factory=list)


def steps(text: str) -> Iterator[Step]:
    """The steps of a script."""
    found: list[Step] = []
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("cat > "):
            name, end = line.removeprefix("cat > ").split(" <<")
            written = []
            while (inner := next(lines)) != shlex.split(end)[0]:
                written.append(inner)
            found.append(Step(name, "\n".join(written) + "\n"))
        elif line.startswith("#> "):
            found[-1].says.append(line.removeprefix("#> ").strip())
        elif line and not line.startswith("#"):
            command, _, status = line.partition("  #= ")
            found.append(Step(command, status=int(status or 0)))
    yield from found


def run(line: str) -> int:
    """A command of a script, in a child: its status."""
    from oracle.cli import main
    from oracle.harness import validation

    program, *words = shlex.split(line)
    for module in Path().glob("*.py"):  # edited since, or another test has one of this name
        sys.modules.pop(module.stem, None)
    sys.path.insert(0, os.getcwd())
    sys.argv = [program, *words]
    if program == "fp8-oracle":
        validation.Worker = InProcess  # type: ignore[assignment,misc]
        return main(words)
    assert program == "python"
    if words[:2] == ["-m", "pytest"]:
        return int(pytest.main(["-p", "no:cacheprovider", *words[2:]]))
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What the children need not load and compile each for itself."""
    from oracle.cli import parser
    from oracle.diagnosis.explain import diagnose

    parser()
    case = cases.parse("fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=3,n=64,k=256/seed=1")
    wrong = torch.ones(3, 64, dtype=torch.bfloat16)
    for arch, numerics in (("cpu", None), ("sm90", "sm90.promote128")):
        oracle.judge("fp8_gemm_nt", case.inputs(), wrong, arch=arch, numerics=numerics)
        diagnose("fp8_gemm_nt", case.inputs(), wrong, arch=arch, numerics=numerics)


def travel(script: Path, folder: Path) -> int:
    """Carry out a script in a folder; how many commands it has."""
    commands = 0
    for step in steps(script.read_text()):
        if step.content is not None:
            (folder / step.line).write_text(step.content)
            continue
        commands += 1
        with open(folder / ".said", "wb") as said:
            status = forked(partial(run, step.line), stdout=said.fileno(), stderr=said.fileno()).wait()
        text = (folder / ".said").read_text()
        assert status == step.status, f"{step.line}\nends with {status}, not {step.status}:\n{text}"
        missing = [words for words in step.says if words not in text]
        assert not missing, f"{step.line}\ndoes not say {missing}:\n{text}"
    return commands


@pytest.mark.turns(4)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("journey", JOURNEYS)
def test_journey(journey: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    commands = travel(FOLDER / f"{journey}.sh", tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    took = f"{journey}: {commands} commands in {time.perf_counter() - begun:.1f} s, {spent:.1f} s of CPU"
    request.node.user_properties.append(("printed", f"journey {took}"))


SHORT = """
cat > hello.py <<'EOF'
print("read", open("hello.py").read().count("print"))
EOF

python hello.py
#> read 2
fp8-oracle list contrats  #= 2
#> did you mean 'contracts'
"""


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("", ""), ""),
        (("#= 2", "#= 1"), "did you mean"),
        (("#> read 2", "#> read 1"), "does not say"),
        (("print(", "exit(3, "), "TypeError"),
    ],
)
def test_a_wrong_script_fails(
    edit: tuple[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative tests of a short script: another status, other words, another file."""
    assert edit[0] in SHORT
    (tmp_path / "short.sh").write_text(SHORT.replace(*edit))
    monkeypatch.chdir(tmp_path)
    if said:
        with pytest.raises(AssertionError, match=said):
            travel(tmp_path / "short.sh", tmp_path)
    else:
        assert travel(tmp_path / "short.sh", tmp_path) == 2
