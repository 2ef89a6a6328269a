"""``fp8-oracle lint``: what is wrong with a quantised checkpoint, and what its quantisation lost."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from oracle.cli.common import Commands, add_command, add_json, console, whole, write_json
from oracle.fixtures import checkpoint
from oracle.report.outcome import printable

STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
SHOWN = 3
"""Names that are shown of a kind of finding; ``--json`` and ``--all`` have every one."""


def add(commands: Commands) -> None:
    command = add_command(
        commands,
        "lint",
        _lint,
        "what is wrong with a quantised checkpoint",
        "Read the safetensors files of a folder: scales that are missing, misnamed, dead or of another shape, codes "
        "that are not finite, scales that are no powers of two where scale_fmt says so, and what the codes do not use. "
        "Exit 1 when there is an error; warnings and notes change nothing.",
    )
    command.add_argument("folder", type=Path, metavar="DIR", help="holds model.safetensors.index.json and config.json")
    command.add_argument("--against", type=Path, metavar="DIR", help="the original in bf16: adds the SQNR")
    text = "name the weights that N ranks would cut inside a block; may be repeated"
    command.add_argument("--ranks", action="append", default=[], type=whole(1), metavar="N", help=text)
    command.add_argument("--only", default="*", metavar="PATTERN", help="weights to read, as 'model.layers.3.*'")
    command.add_argument("--all", action="store_true", help="every finding on a line of its own")
    add_json(command, "findings and figures")


def _lint(arguments: argparse.Namespace) -> int:
    screen, told = console(stderr=True), sys.stderr.isatty()
    with screen.status("reading") as status:
        report = checkpoint.lint(
            arguments.folder,
            against=arguments.against,
            worlds=arguments.ranks,
            only=arguments.only,
            progress=lambda name: status.update(printable(name)) if told else None,
        )
    if arguments.json != "-":
        _print(report, arguments.all)
    write_json(arguments.json, report.to_json())
    return 0 if report.ok else 1


def _print(report: checkpoint.Report, everything: bool) -> None:
    screen = console()
    if report.weights:
        screen.print("\n".join(_figures(report)), soft_wrap=True, highlight=False, markup=False)
    kinds: dict[tuple[str, str], list[checkpoint.Finding]] = defaultdict(list)
    for finding in report.findings:
        kinds[finding.level, finding.kind].append(finding)
    for (level, kind), result in sorted(kinds.items(), key=lambda item: checkpoint.LEVELS.index(item[0][0])):
        screen.print(Text.assemble((level, STYLES[level]), f"  {kind}, {len(result)}"))
        for finding in result if everything else result[:SHOWN]:
            screen.print(f"    {finding.tensor}: {finding.said}", soft_wrap=True)
        if len(result) > SHOWN and not everything:
            screen.print(f"    and {len(result) - SHOWN} more; --all shows them")
    counts = ", ".join(f"{sum(f.level == level for f in report.findings)} {level}s" for level in checkpoint.LEVELS)
    screen.print(f"{'OK' if report.ok else 'NOT OK'}  {len(report.weights)} quantised weights; {counts}")


def _figures(report: checkpoint.Report) -> Iterator[str]:
    """Of each kind of layer its name, whole, and the mean over its weights with the least SQNR."""
    kinds: dict[tuple[str, str, str], list[checkpoint.Weight]] = defaultdict(list)
    for w in report.weights:
        block = "x".join(str(size) if size not in (w.rows, w.columns) or size <= 128 else "all" for size in w.block)
        kinds[checkpoint.pattern(w.name), w.format, block].append(w)
    for (name, fmt, block), weights in kinds.items():
        zero, saturated, dead = (
            f"{statistics.fmean(getattr(w, key) for w in weights):.2%}" for key in ("zeros", "saturated", "dead_blocks")
        )
        unused = f"{statistics.fmean(w.unused_codes for w in weights):.3g}"
        ratios = [w.sqnr_db for w in weights if w.sqnr_db is not None]
        least = [f"least SQNR {'exact' if min(ratios) == math.inf else f'{min(ratios):.1f} dB'}"] if ratios else []
        largest = f"largest {max(w.largest for w in weights):.3g}"
        codes = f"{unused} unused codes", f"{zero} zero", f"{saturated} saturated", f"{dead} dead blocks"
        yield name
        yield f"    {len(weights)} {fmt.removeprefix('float8_')} {block}: {', '.join((*codes, largest, *least))}"
