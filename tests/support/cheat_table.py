"""Which cheats of :mod:`tests.support.subjects.cheats` are seen, by each mode of ``fp8-oracle validate``, as Markdown.

    python -m tests.support.cheat_table [--update FILE] [CHEAT ...]

Two runs a cheat, of a few seconds each: ``CASES`` in the default mode, and ``--untrusted`` on the same shapes with a
fresh seed. With ``--update`` the table replaces what stands between its markers in the file. Status 1 when one
conforms untrusted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from secrets import randbelow

from oracle.harness.report import Report
from oracle.harness.validation import validate
from oracle.routines import cases
from tests.support.subjects.cheats import CHEATS, digest

GEMM = "fp8_gemm_nt"
CASES = (
    f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=33,n=192,k=384/family=randn/seed=1",
    f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=9,n=128,k=256/family=randn/seed=1",
)
WHOLE = ("refuses_all_but_one",)  # cheats that a few cases do not show: the quick profile
LIMIT = 10.0  # seconds a call, as long as the kernel that never returns takes
START, END = "<!-- cheats -->\n", "<!-- end of cheats -->"


def fresh(published: Sequence[str] = CASES) -> list[str]:
    """The same cases with a seed that is not published."""
    seed = 1000 + randbelow(1 << 30)
    return [str(replace(cases.parse(case), seed=seed)) for case in published]


def judged(name: str, *, untrusted: bool, limit: float = LIMIT) -> Report:
    """One cheat over the cases, as ``validate`` runs it; untrusted on data of a fresh seed, as that does by itself."""
    given = None if name in WHOLE else fresh() if untrusted else list(CASES)
    return validate(f"tests.support.subjects.cheats:{name}", GEMM, case=given, untrusted=untrusted, limit=limit)


def published(folder: Path) -> None:
    """The table of :func:`~tests.support.subjects.cheats.knows_published_cases`, as a module in this folder."""
    known = [cases.parse(case) for case in CASES]
    known += [replace(case, seed=case.seed + 1) for case in known]  # those that the reruns ask for
    (folder / "published_cases.py").write_text(f"KNOWN = {[digest(case.inputs()['b']) for case in known]}\n")


def said(report: Report) -> str:
    """What was seen, in a few words."""
    if report.conforms:
        return "conforms"
    first = report.failures[0]
    others = sorted({f.watch for f in report.failures} - {first.watch})
    words = first.verdict.summary.removeprefix("CRASHED: ").partition("\n")[0].partition("; worst")[0]
    return f"{first.watch}: {words[:120]}" + (f"; and {', '.join(others)}" if others else "")


def row(name: str) -> tuple[str, bool, bool]:
    """A line of the table, whether the default mode sees the cheat, and whether it is rejected untrusted."""
    told = " ".join((CHEATS[name].__doc__ or "").split())
    default, untrusted = judged(name, untrusted=False), judged(name, untrusted=True)
    cells = (f"`{name}`", told, said(default), said(untrusted))
    line = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    return line, not default.conforms, not untrusted.conforms


def main() -> int:
    """Print the table and how many are rejected."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cheats", nargs="*", default=list(CHEATS))
    parser.add_argument("--update", type=Path)
    arguments = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        published(Path(folder))
        sys.path.append(folder)
        rows = []
        for name in arguments.cheats:
            rows.append(row(name))
            print(rows[-1][0], end="", flush=True)
    seen, rejected = sum(one[1] for one in rows), sum(one[2] for one in rows)
    figure = f"{len(rows)} cheats: the default mode sees {seen}, `--untrusted` rejects {rejected}."
    print(f"{figure} {time.perf_counter() - start:.0f} s")
    if arguments.update is not None:
        text = arguments.update.read_text()
        head, _, rest = text.partition(START)
        table = "| Cheat | What it does | Default mode | `--untrusted` |\n|---|---|---|---|\n"
        made = figure + "\n\n" + table + "".join(one[0] for one in rows)
        arguments.update.write_text(head + START + made + END + rest.partition(END)[2])
    return int(rejected < len(rows))


if __name__ == "__main__":
    sys.exit(main())
