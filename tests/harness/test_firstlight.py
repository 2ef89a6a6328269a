"""The first hour of a machine: what becomes of each step, what is kept, and what is asked again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from oracle import cli
from oracle.errors import FixtureError
from oracle.harness import firstlight
from oracle.harness.firstlight import DONE, FAILED, LATE, LEFT, Step

TOOL = """
import sys, time
from pathlib import Path
with open(sys.argv[2], "a") as file:
    file.write("x")
print("first line")
print("answer | of", sys.argv[1])
time.sleep(60 * (sys.argv[1] == "slow"))
sys.exit(3 * (sys.argv[1] == "broken"))
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tool that imports nothing, and counts its runs in a file for each step."""
    script = tmp_path / "tool.py"
    script.write_text(TOOL)
    monkeypatch.setattr(firstlight, "TOOL", (sys.executable, str(script)))
    return tmp_path


def step(name: str, tool: Path, seconds: float = 60.0) -> Step:
    return Step(name, (name, str(tool / f"{name}.count")), seconds, f"what of {name}")


def test_what_becomes_of_steps(tool: Path) -> None:
    """An answer, another exit status, no end in time, a spent budget; only what has no answer is asked again."""
    folder, chosen = tool / "out", [step("right", tool), step("broken", tool), step("slow", tool, 0.5)]
    ran = {one.name: one for one in firstlight.run(chosen, folder, arch="sm90", seconds=60.0)}
    assert {name: (one.status, one.code) for name, one in ran.items()} == {
        "right": (DONE, 0),
        "broken": (FAILED, 3),
        "slow": (LATE, -1),
    }
    assert ran["right"].said == "answer | of right"
    record = json.loads((folder / firstlight.RECORD).read_text())
    assert record["machine"]["arch"] == "sm90" and [one["name"] for one in record["steps"]] == list(ran)
    again = list(firstlight.run([*chosen[:2], step("new", tool)], folder, arch="sm90", seconds=60.0))
    assert again[0] == ran["right"] and (tool / "right.count").read_text() == "x"
    assert (tool / "broken.count").read_text() == "xx" and again[2].status == DONE
    (late,) = firstlight.run([step("more", tool)], folder, arch="sm90", seconds=0.0)
    assert late.status == LEFT and not (tool / "more.count").exists()
    text = firstlight.page(chosen, ran, folder, "sm90")
    assert "| what of right | answer \\| of right |" in text and f"**{LATE}**" in text and "first line" in text


def test_answers_of_another_machine_are_not_continued(tool: Path) -> None:
    list(firstlight.run([step("right", tool)], tool / "out", arch="sm90", seconds=60.0))
    with pytest.raises(FixtureError, match="another machine; pass another --out"):
        list(firstlight.run([step("right", tool)], tool / "out", arch="sm100", seconds=60.0))


@pytest.mark.parametrize("arch", ["sm90", "sm103", "sm121"])
def test_every_step_is_a_command_of_the_tool(arch: str, tmp_path: Path) -> None:
    """Their arguments parse; block-scaled instructions are asked where there are some."""
    chosen = firstlight.steps(arch, tmp_path)
    for one in chosen:
        cli.parser().parse_args(one.arguments)
    assert ("reading-nvf4" in {one.name for one in chosen}) == (arch != "sm90")


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One sentence, and nothing is written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["firstlight", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "there is no GPU that torch can see: firstlight asks what a GPU computes\n"
    assert not (tmp_path / "out").exists()
