"""Verdicts of a run over the bindings beside those of the stored page, which adapters gave.

    fp8-oracle gallery run --bindings --out DIR
    python tests/hardware/gallery_by_bindings.py DIR/gallery.json fixtures/gallery/gallery.json

Kernels of one project under one contract are compared, whatever their names: an adapter may choose among several
routines. Ends with 1 where a routine has a verdict that no kernel of the page has.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from oracle.report.gallery import Row, read


def beside(rows: tuple[Row, ...], stored: tuple[Row, ...]) -> tuple[list[str], int]:
    """A line for each routine, and how many have another verdict than the page."""
    pages: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in stored:
        pages[row.project, row.contract].append(row)
    lines, moved, same, other = [], 0, 0, 0
    for row in rows:
        page = pages.get((row.project, row.contract), [])
        verdicts = sorted({one.verdict for one in page})
        if row.verdict == "UNSUPPORTED" or not page:
            word, other = "not on the page" if not page else "not run", other + 1
        elif row.verdict in verdicts:
            word, same = "same", same + 1
        else:
            word, moved = "MOVED", moved + 1
        why = "" if row.verdict == "CONFORMS" else row.why[:160]
        lines.append(f"{word:<16} {row.verdict:<11} page {','.join(verdicts) or '-':<11} {row.key} {why}".rstrip())
    lines.append(f"{same} verdicts as on the page, {moved} others, {other} not compared")
    return lines, moved


def main(new: str, old: str) -> int:
    lines, moved = beside(read(Path(new)).rows, read(Path(old)).rows)
    print("\n".join(lines))
    return int(moved > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
