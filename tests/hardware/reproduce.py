"""What is stored of other projects' kernels, run again on this machine: gate, watch, findings and gallery in one call.

    PYTHONPATH=.:tests python tests/hardware/reproduce.py --out DIR [--seconds 900] [--jobs 12]

In this order, each a process of its own within what is left of the seconds: the gate's times beside their bar; the
layers of vLLM's operators under a watch, where vLLM is installed; the findings; the gallery by bindings, kernels of the
stored record alone, those first whose row was recorded longest ago. What ended is kept in DIR, and the same call goes
on. At last each finding and each kernel stands beside what is stored. Exit 1 where one of those that ran is another,
a time is beyond its bar, or the watch names other calls; 2 where nothing ran.

Not covered: kernels without a stored row (`fp8-oracle gallery run`); libraries that are not installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from oracle.fixtures import files as fixtures
from oracle.harness import gallery
from oracle.harness.finding_scripts import LEFT
from oracle.report.gallery import Run, read, verdicts_beside

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "fixtures" / "gallery"
ROWS, SCRIPTS = "gallery.json", "findings.json"
TOOL = (sys.executable, "-m", "oracle")
EXTENTS = ("4096", "4096", "7168")  # of the gate's bar
ENDING = 8.0
"""Seconds in which a step that ends by itself writes what it has."""


class Step(NamedTuple):
    """A command, the most seconds that it gets, and whether its status is one of this script."""

    name: str
    command: tuple[str, ...]
    limit: float
    decides: bool


def kernels(kept: Run) -> list[str]:
    """Keys of the kernels by bindings that the record has and this machine's libraries can run, the oldest first."""
    dates: dict[tuple[str, str], str] = {}
    for row in kept.rows:
        date = dict(row.recorded or kept.machine).get("date", "")
        dates[row.project, row.contract] = min(date, dates.get((row.project, row.contract), date))
    here = [project for project in gallery.of_bindings() if project.versions()]
    pairs = [(project, kernel) for project in here for kernel in project.kernels]
    known = [pair for pair in pairs if (pair[0].name, pair[1].contract) in dates]
    known.sort(key=lambda pair: dates[pair[0].name, pair[1].contract])
    return [gallery.key_of(*pair) for pair in known]


def steps(out: Path, jobs: int, device: str) -> Iterator[Step]:
    """What is run; a gallery's kernels in two turns, so that the oldest rows are there where time is short."""
    if device != "cpu":
        gate = (
            sys.executable,
            "-m",
            "tests.benchmarks.test_bench_gate",
            *EXTENTS,
            "--device",
            device,
            "--only",
            "gate",
        )
        yield Step("gate", gate, 60, True)
        if find_spec("vllm") is not None:
            watch = (sys.executable, "tests/hardware/watched_vllm.py", "--out", str(out / "watch"))
            yield Step("watch", watch, 90, True)
    shared = ("--out", str(out), "--resume", "--jobs", str(jobs))
    yield Step("findings", (*TOOL, "findings", *shared, "--seconds", "150"), 300, False)
    keys = kernels(read(STORED / ROWS))
    for part in (keys[: len(keys) // 2], keys):
        only = [word for key in part for word in ("--only", key)]
        if only:
            run = (*TOOL, "gallery", "run", *shared, "--device", device, "--seconds", "{left}", *only)
            yield Step("gallery", run, 3600, False)


def run(out: Path, seconds: float, jobs: int, device: str) -> bool:
    """Run the steps within the seconds; whether one that decides failed."""
    until, failed = time.monotonic() + seconds, False
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    for step in steps(out, jobs, device):
        left = min(step.limit, until - time.monotonic() - ENDING)
        if left <= 0:
            print(f"== {step.name}: no time is left", flush=True)
            continue
        command, begun = [word.replace("{left}", f"{left:.0f}") for word in step.command], time.monotonic()
        try:
            status = subprocess.run(command, cwd=ROOT, env=environment, timeout=left + ENDING, check=False).returncode
        except subprocess.TimeoutExpired:  # said below; what it wrote is there
            status = None
        ended = "no end in time" if status is None else f"exit {status}"
        print(f"== {step.name}: {ended}, {time.monotonic() - begun:.0f} s", flush=True)
        failed |= step.decides and status != 0
    return failed


def beside(out: Path) -> tuple[list[str], int, int]:
    """Lines that set what ran beside what is stored, how many are the same, and how many are others."""
    lines, same, others = list[str](), 0, 0
    if (out / SCRIPTS).exists():
        stored = fixtures.read_json(STORED / SCRIPTS)["scripts"]
        now = fixtures.read_json(out / SCRIPTS)["scripts"]
        assert isinstance(stored, dict) and isinstance(now, dict), "records of the command"
        for name, one in now.items():
            if one["status"] != LEFT:
                known = stored[name]["status"] if name in stored else "-"
                word = "same" if known == one["status"] else "MOVED" if name in stored else "new"
                same, others = same + (word == "same"), others + (word == "MOVED")
                lines.append(f"{word:<16} {one['status']:<11} page {known:<11} finding {name}: {one['said'][:120]}")
    if (out / ROWS).exists():
        rows = [row for row in read(out / ROWS).rows if row.verdict != "UNSUPPORTED"]
        more, moved = verdicts_beside(rows, read(STORED / ROWS).rows)
        same, others = same + sum(line.startswith("same ") for line in more), others + moved
        lines += more
    return lines, same, others


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="keeps what ended, and the watch's page")
    parser.add_argument("--seconds", type=float, default=900.0, help="of all (default: %(default)g)")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 4) - 3))
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args(arguments)
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    failed = run(out, asked.seconds, asked.jobs, asked.device)
    lines, same, others = beside(out)
    print("\n".join(lines))
    print(f"{same} as stored, {others} others")
    return 1 if failed or others else 0 if same else 2


if __name__ == "__main__":
    sys.exit(main())
