"""Each script of ``findings`` in a process of its own: what it printed, and whether the fault is there.

    python tests/hardware/run_findings.py --out DIR [--only NAME ...] [--jobs N]

Writes ``DIR/findings.json``: of each script ``there`` (it ended with 1), ``healed`` (with 0) or ``did not run`` (its
library is not installed, or it raised), and its last line. Exits 1 where a fault is there, 2 where no script ran. The
head of a script is ``PROJECT VERSION, ROUTINE: WHAT HAPPENS.``, and a paragraph that says what it means to a user.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from oracle.harness import provenance

HERE = Path(__file__).resolve().parent / "findings"
SECONDS = 300.0
"""Of one script: some libraries compile at first use."""
ENDS = {0: "healed", 1: "there"}


@dataclass(frozen=True)
class About:
    """The head of a script."""

    project: str
    routine: str
    happens: str
    matters: str


def about(path: Path) -> About:
    """The head of a script; ValueError where it has another form."""
    first, _, matters = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")
    project, comma, rest = first.partition(", ")
    routine, colon, happens = rest.partition(": ")
    if not (comma and colon and matters):
        raise ValueError(f"{path.name}: its head is not `PROJECT VERSION, ROUTINE: WHAT.` and what it means to a user")
    return About(project, routine, happens, " ".join(matters.split()))


def run(path: Path, seconds: float = SECONDS) -> dict[str, str]:
    """What became of one script."""
    command = [sys.executable, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"status": "did not run", "said": f"no end within {seconds:g} s"}
    raised = done.returncode not in ENDS or "Traceback (most recent call last)" in done.stderr
    said = (done.stderr if raised else done.stdout).strip().splitlines() or ["it said nothing"]
    return {"status": "did not run" if raised else ENDS[done.returncode], "said": said[-1]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=HERE, help="of the scripts")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="gets findings.json")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="these scripts alone")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="scripts at a time")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help=f"of one script ({SECONDS:g})")
    given = parser.parse_args(arguments)
    scripts = [path for path in sorted(given.folder.glob("*.py")) if not given.only or path.stem in given.only]
    given.out.mkdir(parents=True, exist_ok=True)
    found = {}
    with ThreadPoolExecutor(given.jobs) as pool:
        for path, one in zip(scripts, pool.map(partial(run, seconds=given.seconds), scripts), strict=True):
            found[path.stem] = one
            print(f"{one['status']:<11} {path.stem}: {one['said']}", flush=True)
    date = datetime.now(UTC).date().isoformat()
    record = {"machine": {"date": date, **provenance.machine()}, "scripts": found}
    (given.out / "findings.json").write_text(json.dumps(record, indent=1) + "\n")
    ends = {one["status"] for one in found.values()}
    return 1 if "there" in ends else 0 if "healed" in ends else 2


if __name__ == "__main__":
    sys.exit(main())
