"""What the README shows is what the commands print, durations and the width of a terminal aside."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import oracle
from oracle.report.console import family_table
from oracle.report.outcome import Report
from oracle.routines import registered
from tests.support.commandline import Cli

CASE = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=33,n=256,k=384/family=randn/seed=1"
ID = "captures/h200_dense_m16_n128_k512/out.flashinfer.w8a8_rowmajor_scale"


def words(text: str) -> set[str]:
    """The words of an output, without frames and durations; a table wraps its cells where the terminal ends."""
    plain = re.sub(r"(\b\d+\.\d|…) s\b", "", text)
    return set(re.sub(r"[┏┳┓┃┡╇┩│└┴┘━─]", " ", plain).split())


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("block", "command"),
    [("sample", ("verify", "--contract", "fp8_gemm_nt")), ("failure", ("verify", "--case", ID))],
)
def test_samples(block: str, command: tuple[str, ...], root: Path, cli: Cli) -> None:
    shown = (root / "README.md").read_text().split(f"<!-- {block} -->")[1].split(f"<!-- /{block} -->")[0]
    shown = shown.replace("```", "").replace("$ fp8-oracle verify --contract fp8_gemm_nt", "")
    ran = cli(*command)
    assert ran.status == 0 and len(words(shown)) > 10
    missing = words(shown) - words(ran.out)
    assert not missing, f"the README shows what the command no longer prints: {sorted(missing)}"
    assert words(re.sub("passed|2022", "spoiled", shown)) - words(ran.out)


@pytest.mark.turns(2)
def test_whole_run(root: Path, cli: Cli) -> None:
    """The screen of a whole run has a row for each family, in the columns of the command, and counts as many cases and
    captures as are listed now, but for a tenth: what is added costs no edit of the README each time."""
    shown = (root / "README.md").read_text().split("<!-- minute -->")[1].split("<!-- /minute -->")[0]
    listed = [line.split("\t")[0] for line in cli("verify", "--list").out.splitlines()]
    captures = sum(id_.startswith("captures/") for id_ in listed)
    cases = sum("/" in id_ for id_ in listed) - captures
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    judged = {id_.split("/")[0] for id_ in listed if "/" in id_} & set(registered())
    assert sorted(row[0] for row in rows) == sorted({registered()[name].section for name in judged})
    (part,) = re.findall(r"profile brief: (\d+) of \d+ cases, one of each class, and (\d+) captures", shown)
    for said, now in zip(map(int, part), (cases, captures), strict=True):
        assert abs(said - now) <= now / 10, f"the README says {said}, {now} are listed"
    heads = {str(column.header) for column in family_table(Report(())).columns}
    assert heads == {"family", "routines", "subjects", "worst margin"} and all(head in shown for head in heads)


@pytest.mark.turns(2)
def test_contrast(root: Path) -> None:
    """What a tolerance says of a right and of a wrong output, and what the oracle says, as the comments have it."""
    (contrast, *_) = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    right, wrong, strict, loose, *judged = contrast.strip().splitlines()
    inputs = oracle.cases.parse(CASE).inputs()
    exact = oracle.reference("fp8_gemm_nt", inputs, out_dtype=torch.bfloat16)
    made: dict[str, Any] = {"oracle": oracle, "torch": torch, "inputs": inputs, "exact": exact}
    exec(f"{right}\n{wrong}", made)
    assert int((made["right"] != made["wrong"]).sum()) == 1 and made["right"][26, 7] != made["wrong"][26, 7]
    assert "# AssertionError" in strict and "# silent" in loose
    with pytest.raises(AssertionError):
        exec(strict, made)
    exec(loose, made)
    with pytest.raises(AssertionError):  # the right output needs a tolerance of that size
        torch.testing.assert_close(made["right"], exact, rtol=0.05, atol=1e-4)
    for line in judged:
        asked, _, said = line.partition("  # ")
        assert eval(asked, made) == said.partition(":")[0]


@pytest.mark.turns(2)
def test_python(root: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of the README is right, its lines of Python run, and the file that they write is judged as it says."""
    _, kernel, *lines = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    (tmp_path / "mykernels.py").write_text(kernel)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    made: dict[str, Any] = {}
    exec("".join(lines), made)
    assert made["verdict"].status == "PASSED" and made["ranked"][0].equal == 1.0 and len(lines) == 2
    asked = ("judge", "mine.safetensors", "--contract", "fp8_gemm_nt", "--arch", "sm90")
    assert cli(*asked).status == 0
    save_file(made["inputs"] | {"out": -made["out"]}, "mine.safetensors")
    assert cli(*asked, "--explain", "off").status == 1
