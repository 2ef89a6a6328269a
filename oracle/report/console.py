"""A report on the console: one sentence and one command for every failure, then the table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oracle.errors import counted
from oracle.report.outcome import LOSS, LOSS_COLUMNS, SEVERITY, Group, Outcome, Report, counts_of, losses
from oracle.routines import registered
from oracle.verdict.compare import Status

SCREEN = 30  # rows of a table that, with the lines around it, stays on one screen
EXPLAINED = ("KNOWN", *map(str, (Status.MISTRUSTED, Status.UNSUPPORTED, Status.SKIPPED)))
"""What a table by family counts and leaves to the whole one to explain."""

STYLES = {
    Status.PASSED: "green",
    **dict.fromkeys((Status.FAILED, Status.CRASHED, Status.UNTESTED), "bold red"),
    Status.MISTRUSTED: "yellow",
    **dict.fromkeys((Status.UNSUPPORTED, Status.SKIPPED), "dim"),
}


def print_report(report: Report, console: Console, *, quiet: bool = False, verbose: bool = False) -> None:
    """Failures, reasons, the table, problems of the ledger and of the record, how much was judged, and a closing line.

    A table of more than :data:`SCREEN` rows has one row for each family of routines, without the reasons and the losses
    that go with the whole one. ``verbose`` prints the whole, with a line for every outcome; ``quiet`` leaves open
    failures, complaints, how much was judged, and the closing line.
    """
    whole = verbose or len(report.groups()) <= SCREEN
    if verbose:
        for outcome in report.outcomes:
            console.print(line(outcome), soft_wrap=True)
    print_failures(report.failures, console)
    if not quiet and not whole:
        console.print(family_table(report))
        if hidden := [f"{n} {name.lower()}" for name, n in report.counts().items() if n and name in EXPLAINED]:
            console.print(f"{', '.join(hidden)}: --verbose and --html say why, and show every subject", soft_wrap=True)
    elif not quiet:
        for outcome in report.outcomes:
            if outcome.known is not None:
                console.print(sentence(outcome), soft_wrap=True)
        _print_reasons(report, console)
        console.print(table(report))
        if losses(report):
            console.print(loss_table(report))
    for problem in report.problems:
        console.print(Text.assemble(("PROBLEM ", "bold red"), problem), soft_wrap=True)
    if report.part:
        console.print(report.part, soft_wrap=True)
    console.print(closing(report), soft_wrap=True)


def print_failures(failing: Iterable[Outcome], console: Console) -> None:
    """The first failure of each cause as a sentence, and how many more have it.

    A cause: one routine, subject, arch, watch and status, and one explanation or the same last frame of a traceback.
    Failures that nothing explains count as the first explained cause of their kind where there is one.
    """
    causes: dict[tuple[object, ...], dict[tuple[str, ...], list[Outcome]]] = {}
    for o in failing:
        kind = (o.contract, o.subject, o.arch, o.watch, o.status, o.verdict.frames[-1:])
        causes.setdefault(kind, {}).setdefault(o.verdict.explained_by, []).append(o)
    for kinds in causes.values():
        unexplained = kinds.pop((), [])
        groups = list(kinds.values()) or [[]]
        groups[0] += unexplained
        for first, *more in groups:
            console.print(sentence(first), soft_wrap=True)
            if more:
                fails = f"{counted(len(more), 'more case')} {'fails' if len(more) == 1 else 'fail'}"
                console.print(f"  {fails}; --verbose names each", soft_wrap=True)


def table(report: Report) -> Table:
    """One row for each contract, subject and arch."""
    result = Table(title="verdicts", title_justify="left", header_style="bold")
    result.add_column("routine", overflow="fold")
    result.add_column("subject", overflow="fold")
    result.add_column("arch")
    result.add_column("cases", justify="right")
    result.add_column("verdict")
    result.add_column("worst margin", justify="right")
    for group in report.groups():
        margin = "" if group.margin is None else f"{group.margin:.3g}"
        statuses = [o.status for o in group.outcomes if o.known is None and not o.watch]
        watched = [o.watch for o in group.outcomes if o.watch and o.fails]
        counted = [f"{count} {status}" for status in Status if (count := statuses.count(status))]
        words = str(group.status) if len(counted) == 1 else ", ".join(counted)
        words += f", {group.known} KNOWN" if group.known else ""
        cell_text = Text(f"{words}; {', '.join(watched)}" if watched else words, style=STYLES[group.status])
        cell = cell_text if statuses or watched else Text("KNOWN FAILURE", style="yellow")
        result.add_row(group.contract, group.subject, group.arch, str(group.judged or ""), cell, margin)
    return result


def family_table(report: Report) -> Table:
    """One row for each family of routines, the section of its contracts: how many outcomes have which status, and the
    worst margin."""
    families: dict[str, list[Group]] = {}
    known = registered()
    for group in report.groups():
        contract = known.get(group.contract)
        families.setdefault("other" if contract is None else contract.section, []).append(group)
    statuses = [name for name, n in report.counts().items() if n]
    result = Table(title="verdicts by family", title_justify="left", header_style="bold")
    for name in ("family", "routines", "subjects", *map(str.lower, statuses), "worst margin"):
        result.add_column(name, justify="left" if name == "family" else "right", overflow="fold")
    for name, groups in families.items():
        worst = max((g.margin for g in groups if g.margin is not None), default=None)
        counts = counts_of(o for g in groups for o in g.outcomes)
        open_ones = (g.status for g in groups if g.known < len(g.outcomes))
        style = STYLES[min(open_ones, key=SEVERITY.index, default=Status.PASSED)]
        sizes = len({g.contract for g in groups}), len({g.subject for g in groups} - {"-"})
        cells = (str(counts[status] or "") for status in statuses)
        margin = "" if worst is None else f"{worst:.3g}"
        result.add_row(Text(name, style=style), *map(str, sizes), *cells, margin)
    return result


def loss_table(report: Report) -> Table:
    """One row for each contract, subject and arch that quantises."""
    result = Table(title=LOSS, title_justify="left", header_style="bold")
    for i, name in enumerate(LOSS_COLUMNS):
        result.add_column(name, overflow="fold", justify="left" if i < 3 else "right")
    for row in losses(report):
        result.add_row(*row)
    return result


def closing(report: Report) -> Text:
    """The last line: what was counted and whether the run is good."""
    word = ("OK", "bold green") if report.ok else ("NOT OK", "bold red")
    left = f"; interrupted, {report.unfinished} not run" if report.unfinished else ""
    return Text.assemble(word, f"  {report.words}; {report.seconds:.1f} s{left}")


def line(outcome: Outcome) -> Text:
    """One outcome in one line."""
    word, style = _word(outcome)
    took = f" {outcome.seconds:.2f} s" if outcome.seconds else ""  # a fact that nothing was run for takes no time
    text = Text.assemble((f"{word:<11}", style), f" {outcome.id} [{outcome.subject}]{took}")
    return text.append(f" {outcome.verdict.matches}") if outcome.verdict.matches else text


def sentence(outcome: Outcome) -> Text:
    """A failure as a sentence and a command."""
    lines = Text.assemble(_word(outcome), f" {outcome.id} [{outcome.subject}]\n  {outcome.verdict.summary}")
    for frame in outcome.verdict.frames:
        lines.append(f"\n    at {frame}")
    for why in outcome.verdict.because:
        lines.append(f"\n  {why}")
    if outcome.verdict.error is not None:
        lines.append(f"\n  {outcome.verdict.error}")
    if outcome.verdict.loss is not None:
        lines.append(f"\n  {outcome.verdict.loss}")
    if outcome.also:
        lines.append(f"\n  only because of that: {', '.join(outcome.also)}")
    if outcome.known is not None:
        lines.append(f"\n  known failure: {outcome.known}")
    if outcome.repro:
        lines.append(f"\n  repro: {outcome.repro}")
    return lines


def _word(outcome: Outcome) -> tuple[str, str]:
    """The status and its style."""
    return ("KNOWN", "yellow") if outcome.known is not None else (str(outcome.status), STYLES[outcome.status])


def _print_reasons(report: Report, console: Console) -> None:
    """SKIPPED, UNSUPPORTED and MISTRUSTED, outcomes with one reason together."""
    for status in (Status.MISTRUSTED, Status.UNSUPPORTED, Status.SKIPPED):
        reasons: dict[tuple[str, str], list[Outcome]] = {}
        for o in report.outcomes:
            if o.status is status:
                reasons.setdefault((f"{o.contract} [{o.subject}]", o.verdict.reason or ""), []).append(o)
        for (where, reason), outcomes in reasons.items():
            count = f" ({len(outcomes)} cases)" if len(outcomes) > 1 else ""
            ids = [o.id for o in outcomes if "/" in o.id]
            text = f" {where}{count}: {reason}" + (f"; {ids[0]}" if len(ids) == 1 else "")
            console.print(Text.assemble((str(status), STYLES[status]), text), soft_wrap=True)
