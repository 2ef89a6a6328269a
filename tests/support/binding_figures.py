"""Figures of the bindings: how many there are, how long one is, and which rows of the stored gallery have one.

    python -m tests.support.binding_figures

A binding is as long as what a reader must write of it: target, contract, pattern and what is stated beside, in lines of
120 columns; the parameters, which a release prints, are counted apart. That each is read back from its own call is a
test (``tests/bindings/test_round_trip.py``).
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from dataclasses import MISSING, fields
from pathlib import Path

from oracle.bindings.binding import Binding
from oracle.bindings.known import bindings
from oracle.report.gallery import read

WIDTH = 120
READ = ("signature", "release", "project", "cases", "exempt")  # what says nothing about the call
STORED = Path("fixtures/gallery/gallery.json")


def lines(one: Binding, *, parameters: bool = False) -> int:
    """Lines of a binding, the parameters of the routine apart or not."""
    words = []
    for field in fields(one):
        default = field.default if field.default is not MISSING else {}
        value = getattr(one, field.name)
        if (field.name not in READ or (parameters and field.name == "signature")) and value not in (
            default,
            "",
            {},
            (),
        ):
            names = {name: "..." for name in value} if field.name == "functions" else value
            words.append(repr(names) if field.name in ("target", "contract", "pattern") else f"{field.name}={names!r}")
    return -(-len(f"bind({', '.join(words)})") // WIDTH)


def main() -> int:
    """Prints the figures."""
    every = bindings()
    counts = Counter(one.shown.partition(".")[0] for one in every)
    print(f"{len(every)} bindings of {len(counts)} projects: " + ", ".join(f"{k} {n}" for k, n in counts.most_common()))
    bare, whole = ([lines(one, parameters=p) for one in every] for p in (False, True))
    print(f"lines of {WIDTH} columns: median {statistics.median(bare):g}, with parameters {statistics.median(whole):g}")
    print(f"with a function of their own: {sum(bool(one.functions) for one in every)}")
    bound = {(one.shown.partition(".")[0], one.contract) for one in every}
    rows = read(STORED).rows
    lacking = [row.key for row in rows if (row.project, row.contract) not in bound]
    print(f"{len(rows) - len(lacking)} of {len(rows)} rows of {STORED} have a binding; without: {', '.join(lacking)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
