"""A folder of kernels, wrong and right, each under a default `validate`: what is refused, and what is said of it.

    python -m tests.support.kernel_folder FOLDER --out RECORD [--jobs N] [--within SECONDS] [--only NAME ...]
    python -m tests.support.kernel_folder FOLDER --table RECORD ... [--judged FILE] [--lines]

FOLDER holds modules and ``kernels.json``: a list of ``{"kernel": "MODULE:CALLABLE", "contract": NAME, "right": bool,
"does": TEXT}``. A kernel with another interface than its contract (an input that it does not take, or a parameter that
the contract does not have) is not judged, and said to be so. RECORD gets the rest, a JSON file: every finding that
fails, with its names. What is run is :func:`oracle.harness.validation.validate` with nothing but the kernel and the
contract; ``--forked`` starts its workers as children of this process (:mod:`tests.support.forked_worker`), which saves
the start of interpreters and no judgement. What has not begun after SECONDS is not run.

``--table`` counts: refused, with a name, with words alone (what the elements show, a message of dtype, shape or
strides), without either. Of several records the later one counts for a kernel. Whether a name is right is for a reader
to say, who writes FILE: ``{KERNEL: {"names": [...], "right": bool}}``; it counts while the names are the same.
``--lines`` prints what each wrong kernel does beside what is said of it. Exit status 1: a wrong kernel conforms, a
right one does not, or a name is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from oracle.harness import process
from oracle.harness.report import NUMBERS, Report
from oracle.harness.validation import validate
from oracle.report.outcome import JUDGED
from oracle.routines import get
from tests.support import forked_worker

Row = dict[str, Any]
TABLE = "kernels.json"
TRIED = ("refused", "conforms", "untested", "error")
"""What becomes of a kernel that was run; the first is due to a wrong one, the second to a right one."""
LIMIT = 240.0  # CPU seconds of judging one kernel
KEPT = 12  # failing findings that are written whole
SAYS = re.compile(r"has dtype|has shape|strides|row-major|row major|lies on|torch\.\w+", re.IGNORECASE)
"""Messages that say themselves what is wrong with an output."""


def main() -> int:
    """Judge the kernels, or count what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, metavar="RECORD", help="judge, and write this record")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="kernels, modules or contracts")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--forked", action="store_true")
    parser.add_argument("--table", nargs="+", type=Path, default=(), metavar="RECORD")
    parser.add_argument("--judged", type=Path, metavar="FILE")
    parser.add_argument("--lines", action="store_true")
    of = parser.parse_args()
    rows = json.loads((of.folder / TABLE).read_text())
    if of.only:
        rows = [r for r in rows if {r["kernel"], r["kernel"].partition(":")[0], r["contract"]} & set(of.only)]
    records = list(of.table)
    if of.out is not None:
        judged = list[Row]()
        for row in judge(of.folder.resolve(), rows, jobs=of.jobs, within=of.within, seed=of.seed, forked=of.forked):
            judged.append(row)
            of.out.write_text(json.dumps(judged, indent=0))  # what was found stays where the run is ended
        records.append(of.out)
    found = {row["kernel"]: row for record in records for row in json.loads(record.read_text())}
    known = json.loads(of.judged.read_text()) if of.judged else {}
    lines, status = table([found.get(row["kernel"], row | {"status": "not run"}) for row in rows], known)
    print("\n".join([*(said(found[r["kernel"]]) for r in rows if of.lines and r["kernel"] in found), *lines]))
    return status


def judge(
    folder: Path, rows: Iterable[Row], *, jobs: int, within: float, seed: int | None, forked: bool
) -> Iterator[Row]:
    """The rows with ``status`` and what was found, each from a process of its own, as they end."""
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    ends = time.monotonic() + within
    with ExitStack() as stack:
        if forked:
            stack.enter_context(patch.object(process, "subprocess", forked_worker.SHIM))
        pool = stack.enter_context(multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1))
        yield from pool.imap_unordered(_judged, [(row, ends, seed) for row in rows])


def _judged(asked: tuple[Row, float, int | None]) -> Row:
    row, ends, seed = asked
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, _late)
    return row | (_one(row, seed) if time.monotonic() < ends else {"status": "not run"})


def _late(*_: object) -> None:
    raise TimeoutError(f"not judged within {LIMIT:g} CPU s")


def _one(row: Row, seed: int | None) -> Row:
    """What a default `validate` finds of one kernel."""
    start = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        if other := other_interface(row["kernel"], row["contract"]):
            return {"status": "other interface", "why": other}
        found = of_report(validate(row["kernel"], row["contract"], seed=seed))
    except Exception as error:  # a row of the table; nothing of it counts as judged
        found = {"status": "error", "why": f"{type(error).__name__}: {error}"[:300]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return found | {"seconds": round(time.monotonic() - start, 1)}


def other_interface(kernel: str, contract: str) -> str:
    """How the parameters of a kernel differ from what its contract gives; empty where it can be called."""
    module, _, name = kernel.partition(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters.values()
    takes = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    must = {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    routine = get(contract)
    given = {spec.name for spec in routine.inputs}
    lacks = given - takes if len(takes) == len(parameters) else set()
    needed = {spec.name for spec in routine.inputs if not spec.optional}
    unknown = must - given - {spec.name for spec in routine.options} - {"out"}
    texts = [f"does not take {name}" for name in sorted(lacks & needed)]
    return "; ".join([*texts, *(f"asks for {name}, which no call has" for name in sorted(unknown))])


def of_report(report: Report) -> Row:
    """Status and failing findings of a validation; names, words and messages with how many findings have them."""
    failing = report.failures
    status = "conforms" if report.conforms else "refused" if failing else "untested"
    names = Counter(name for f in failing for name in f.verdict.explained_by)
    words = Counter(word for f in failing for word in f.verdict.observed)
    whole = [
        {
            "case": f.case,
            "watch": f.watch,
            "status": f.verdict.status.name,
            "outside": f.verdict.outside if f.verdict.status in JUDGED else None,
            "total": f.verdict.total if f.verdict.status in JUDGED else None,
            "names": list(f.verdict.explained_by),
            "observed": list(f.verdict.observed),
            "summary": f.verdict.summary[:300],
        }
        for f in sorted(failing, key=lambda f: not f.verdict.explained_by and not f.verdict.observed)[:KEPT]
    ]
    wrong = [f for f in failing if f.watch == NUMBERS]
    return {
        "status": status,
        "why": report.incomplete,
        "seed": report.seed,
        "judged": report.judged,
        "failing": len(failing),
        "watches": dict(Counter(f.watch for f in failing)),
        "cases": sorted({f.case for f in wrong})[:40],
        "names": dict(names),
        "words": dict(words),
        "messages": dict(Counter(f.verdict.summary[:160] for f in failing if SAYS.search(f.verdict.summary))),
        "findings": whole,
    }


def said(row: Row) -> str:
    """A kernel, what it does, and what is said of it."""
    if row["status"] != "refused":
        return f"{row['kernel']} | {row['does']} | {row['status']} | {row.get('why', '')}"
    kinds = [f"{n} x {text}" for text, n in row["names"].items()]
    kinds += [f"({n} x {text})" for text, n in row["words"].items()]
    kinds += [f"[{n} x {text}]" for text, n in list(row["messages"].items())[:2]]
    kinds += [f"<{watch} {n}>" for watch, n in row["watches"].items()]
    return f"{row['kernel']} | {row['does']} | " + " || ".join(kinds)


def table(rows: list[Row], judged: dict[str, Row]) -> tuple[list[str], int]:
    """The lines of the table, and the exit status."""
    wrong = [row for row in rows if not row["right"]]
    right = [row for row in rows if row["right"]]
    lines = [f"{kind}: {_counts(kernels)}" for kind, kernels in (("wrong", wrong), ("right", right)) if kernels]
    refused = [row for row in wrong if row["status"] == "refused"]
    tried = sum(row["status"] in TRIED for row in wrong)
    if tried:
        contracts = len({row["contract"] for row in wrong if row["status"] != "not run"})
        lines.append(f"refused: {len(refused)} of {tried} = {len(refused) / tried:.1%}, over {contracts} contracts")
    kinds = Counter(_kind(row, judged) for row in refused)
    lines += [f"  {kind}: {n} = {n / len(refused):.1%}" for kind, n in kinds.most_common()]
    alarms = [row for row in rows if row["status"] in TRIED and row["status"] != TRIED[row["right"]]]
    lines += [f"{row['status']}: {row['kernel']}: {row['does'] or 'right'}: {row.get('why', '')}" for row in alarms]
    wrongly = [row for row in refused if _kind(row, judged) == "named wrongly"]
    lines += [f"named wrongly: {said(row)}" for row in wrongly]
    others = [row for row in rows if row["status"] == "other interface"]
    lines += [f"other interface: {row['kernel']}: {row['why']}" for row in others]
    return lines, 1 if alarms or wrongly else 0


def _counts(rows: list[Row]) -> str:
    return f"{len(rows)} kernels: " + ", ".join(f"{n} {s}" for s, n in Counter(r["status"] for r in rows).most_common())


def _kind(row: Row, judged: dict[str, Row]) -> str:
    """What a refused kernel's report says, as the table counts it."""
    if row["names"]:
        known = judged.get(row["kernel"])
        if known is None or known["names"] != sorted(row["names"]):
            return "named, not read"
        return "named rightly" if known["right"] else "named wrongly"
    return "words" if row["words"] else "a message of dtype, shape or strides" if row["messages"] else "unnamed"


if __name__ == "__main__":
    sys.exit(main())
