"""What changed between two runs, for eyes: what broke first, then what healed, then facts without a verdict."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from oracle.report.changes import Comparison, Kind

MOST = 20  # changes of one kind in words; ``--verbose`` prints all
STYLES: Mapping[Kind, str] = {
    Kind.BROKE: "bold red",
    Kind.NEW_FAILURE: "bold red",
    Kind.HEALED: "green",
    Kind.FAILS_DIFFERENTLY: "yellow",
    Kind.LOST: "yellow",
}


def print_comparison(found: Comparison, console: Console, *, verbose: bool = False, quiet: bool = False) -> None:
    """Versions, then the changes by kind, then one closing line; ``quiet`` leaves the closing line and what broke."""
    if not quiet:
        for name, old, new in found.versions:
            console.print(Text(f"{name}: {old} -> {new}", style="dim"), soft_wrap=True)
    for kind in Kind:
        changes = found.of(kind)
        if not changes or (quiet and kind not in (Kind.BROKE, Kind.NEW_FAILURE)):
            continue
        console.print(Text(f"{kind} ({len(changes)})", style=STYLES.get(kind, "bold")))
        for change in changes if verbose else changes[:MOST]:
            o = change.outcome
            where = f"  {o.id} [{o.subject}, {o.arch}]"
            console.print(Text(f"{where}\n    {change.words}"), soft_wrap=True)
            if kind in (Kind.BROKE, Kind.NEW_FAILURE):
                for line in _why(change.outcome.verdict.explained_by, change.outcome.repro):
                    console.print(Text(f"    {line}"), soft_wrap=True)
        if not verbose and len(changes) > MOST:
            console.print(Text(f"  ... and {len(changes) - MOST} more; --verbose prints all", style="dim"))
    for complaint in found.complaints:
        console.print(Text.assemble(("LEDGER ", "bold red"), complaint), soft_wrap=True)
    if found.unfinished:
        console.print(Text(f"the new run is unfinished: {found.unfinished} cases did not run", style="yellow"))
    console.print(_closing(found), soft_wrap=True)


def _why(explained_by: tuple[str, ...], repro: str) -> list[str]:
    lines = [f"explained by: {', '.join(explained_by)}"] if explained_by else []
    return [*lines, f"repro: {repro}"] if repro else lines


def _closing(found: Comparison) -> Text:
    counted = [f"{count} {kind}" for kind in Kind if (count := len(found.of(kind)))]
    word = ("OK", "bold green") if found.ok else ("NOT OK", "bold red")
    return Text.assemble(word, f"  {', '.join([*counted, f'{found.same} the same'])}")
