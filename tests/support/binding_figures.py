"""Figures of the bindings: how many there are, how long one is, and which rows of the stored gallery have one.

    python -m tests.support.binding_figures

A binding is as long as what a reader must write of it, in lines of 120 columns: target, contract, call and extents;
then what is stated beside of dtypes, conditions and memory; the parameters, which a release prints, are counted apart.
That each is read back from its own call is a
test (``tests/bindings/test_round_trip.py``).
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Container
from dataclasses import MISSING, fields
from pathlib import Path

from oracle.bindings.binding import Binding
from oracle.bindings.exemptions import COMPOSED
from oracle.bindings.known import bindings
from oracle.report.gallery import read

WIDTH = 120
CALL = ("target", "contract", "pattern", "domain")
READ = ("signature", "release", "project", "cases", "exempt")  # what says nothing about the call
STORED = Path("fixtures/gallery/gallery.json")


def lines(one: Binding, names: Container[str]) -> int:
    """Lines of what is stated under these names."""
    words = []
    for field in fields(one):
        default = field.default if field.default is not MISSING else {}
        value = getattr(one, field.name)
        if field.name in names and value not in (default, "", {}, ()):
            said = {name: "..." for name in value} if field.name == "functions" else value
            words.append(repr(said) if field.name in CALL[:3] else f"{field.name}={said!r}")
    return -(-len(f"bind({', '.join(words)})") // WIDTH)


def main() -> int:
    """Prints the figures."""
    every = bindings()
    counts = Counter(one.shown.partition(".")[0] for one in every)
    print(f"{len(every)} bindings of {len(counts)} projects: " + ", ".join(f"{k} {n}" for k, n in counts.most_common()))
    stated = [field.name for field in fields(Binding)]
    kinds = {
        "the call and its extents": CALL,
        "with what is stated beside": [name for name in stated if name not in READ],
        "with the parameters": [name for name in stated if name not in READ[1:]],
    }
    for text, names in kinds.items():
        counts_of = [lines(one, names) for one in every]
        print(f"{text}: median {statistics.median(counts_of):g}, most {max(counts_of)} lines of {WIDTH} columns")
    print(f"with a function of their own: {sum(bool(one.functions) for one in every)}")
    bound = {(one.shown.partition(".")[0], one.contract) for one in every}
    rows = read(STORED).rows
    lacking = [row for row in rows if (row.project, row.contract) not in bound]
    composed = [row.key for row in lacking if (row.project, row.contract) in COMPOSED]
    others = [row.key for row in lacking if row.key not in composed]
    print(f"{len(rows) - len(lacking)} of {len(rows)} rows of {STORED} have a binding")
    print(f"of no call of their library, with the reason in exemptions: {len(composed)}: {', '.join(composed)}")
    print(f"without: {len(others)}: {', '.join(others)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
