"""What the README shows is what the commands print, durations and the width of a terminal aside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.commandline import Cli

ID = "captures/h200_dense_m16_n128_k512/out.flashinfer.w8a8_rowmajor_scale"


def words(text: str) -> set[str]:
    """The words of an output, without frames and durations; a table wraps its cells where the terminal ends."""
    plain = re.sub(r"\b\d+\.\d s\b", "", text)
    return set(re.sub(r"[┏┳┓┃┡╇┩│└┴┘━─]", " ", plain).split())


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
