"""The reports of ``validate`` that are kept: consistent, of real hardware, and repeatable by their own command."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from oracle.cli import parser
from oracle.harness.report import SCHEMA

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "validations"
REPORTS = sorted(FOLDER.glob("*.json"))
LIBRARIES = {
    "deep_gemm:fp8_gemm_nt",
    "flashinfer.gemm:fp8_blockscale_gemm_sm90",
    "torch:_scaled_mm",
    "kernels.backends.cutlass:operators",
}
WATCHES = {
    "numbers",
    "guard zones",
    "inputs unchanged",
    "every element written",
    "rerun determinism",
    "stale state",
    "uninitialised memory",
    "side stream",
    "CUDA graph",
}


def report(path: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(path.read_text())
    return made


def complaints(made: dict[str, Any]) -> list[str]:
    """What in a report contradicts itself or says nothing."""
    found = []
    failed = [f for f in made["findings"] if f["fails"]]
    if made["schema"] != SCHEMA:
        found.append(f"schema {made['schema']}")
    if made["conforms"] != (made["exit_code"] == 0) or made["conforms"] != (not failed and made["judged"] > 0):
        found.append("conforms says something else than the findings")
    counts = {name: sum(f["watch"] == name for f in made["findings"]) for name in made["watches"]}
    if counts != {name: entry["findings"] for name, entry in made["watches"].items()}:
        found.append("the watches count other findings")
    wanted = ("gpu", "driver", "cuda", "torch", "captured", "command")
    found += [f"no {name}" for name in wanted if not made["provenance"].get(name)]
    if made["device"] != "cuda" or not made["arch"].startswith("sm"):
        found.append(f"made on {made['device']} ({made['arch']})")
    return found


def test_the_four_libraries_conform_by_name() -> None:
    conforming = {made["kernel"] for made in map(report, REPORTS) if made["conforms"]}
    assert conforming >= LIBRARIES


@pytest.mark.parametrize("path", REPORTS, ids=lambda p: p.stem)
def test_report(path: Path) -> None:
    """No contradiction, every watch of the quick profile, and a command that the command line takes."""
    made = report(path)
    assert complaints(made) == []
    large = "large" in path.stem
    assert set(made["watches"]) >= ({"large offsets"} if large else WATCHES)
    arguments = parser().parse_args(shlex.split(made["provenance"]["command"])[1:])
    assert (arguments.kernel, arguments.contract, arguments.device) == (made["kernel"], made["contract"], "cuda")


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("findings", 0, "fails"), True, "conforms says"),
        (("conforms",), False, "conforms says"),
        (("schema",), "other/1", "schema other/1"),
        (("watches", "numbers", "findings"), 0, "count other findings"),
        (("provenance", "driver"), "", "no driver"),
        (("device",), "cpu", "made on cpu"),
    ],
    ids=lambda v: "-".join(map(str, v)) if isinstance(v, tuple) else None,
)
def test_an_edited_report_is_noticed(place: tuple[Any, ...], value: object, said: str) -> None:
    """Negative tests."""
    made = copy.deepcopy(report(REPORTS[0]))
    at: Any = made
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    assert any(said in c for c in complaints(made))
