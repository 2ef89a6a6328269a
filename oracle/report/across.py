"""What calls give on several architectures (:mod:`oracle.diagnosis.across`), as tables, JSON and one page.

A row joins the calls of one routine for one pair of arches. The share behind a step is that of the differing elements
which get the other arch's bits when this step alone is replaced; all steps of a call together give every bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape

from rich.console import Console
from rich.table import Table

from oracle.diagnosis.across import POWERS, Compared, Pair, Same, Step
from oracle.errors import counted
from oracle.report.markup import badge, cut, page, scrolling, section, table, theme_button

SCHEMA = "fp8-oracle.across/1"
HEAD = ("calls", "equal bits", "ulps", "intervals", "which step")
LEGEND = (
    "equal bits: share of the elements with equal bits. ulps: largest distance, in ulps of the output. intervals: "
    "largest distance, in admissible intervals of either arch. which step: share of the differing elements that get "
    "the other arch's bits when this step alone is replaced; the steps named give every bit together. sm90 "
    "on sm100: calls whose output of sm90 passes when it is judged under sm100."
)


@dataclass(frozen=True)
class Across:
    """What was compared: calls, routines with one right result, and lines about what could not be compared."""

    arches: tuple[str, ...]
    compared: tuple[Compared, ...]
    same: tuple[Same, ...]
    notes: tuple[str, ...]
    machine: Mapping[str, str]
    seconds: float

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Every two arches, in the order in which they were named."""
        return [(one, other) for i, one in enumerate(self.arches) for other in self.arches[i + 1 :]]

    def of(self, one: str, other: str) -> dict[str, list[tuple[Compared, Pair]]]:
        """The calls of a pair of arches by routine: cases, not captures."""
        rows: dict[str, list[tuple[Compared, Pair]]] = {}
        for compared in self.compared:
            for pair in compared.pairs:
                if (pair.one, pair.other) == (one, other) and not _captured(compared):
                    rows.setdefault(compared.contract, []).append((compared, pair))
        return rows

    @property
    def captured(self) -> list[Compared]:
        """The calls in which the hardware's own output stands for an arch."""
        return [compared for compared in self.compared if _captured(compared)]

    def unsupported(self) -> dict[tuple[str, str], list[str]]:
        """By arch and reason, the routines of which no call could be compared on this arch."""
        why: dict[tuple[str, str], list[str]] = {}
        for compared in self.compared:
            for side in compared.sides:
                why.setdefault((compared.contract, side.arch), []).append(side.why)
        by_reason: dict[tuple[str, str], list[str]] = {}
        for (contract, arch), reasons in why.items():
            if all(reasons):
                text = reasons[0].partition("; known:")[0].replace(f"{contract} ", "").replace(f" of {contract}", "")
                by_reason.setdefault((arch, text), []).append(contract)
        return by_reason


@dataclass(frozen=True)
class Row:
    """Some calls of one pair of arches, added up."""

    name: str
    calls: int
    elements: int
    equal: int
    ulps: float
    intervals: tuple[float | None, float | None]
    steps: tuple[tuple[str, int | None], ...]
    passes: tuple[int, int]

    @classmethod
    def of(cls, name: str, pairs: Sequence[Pair]) -> Row:
        columns: dict[str, int | None] = {}
        for step in (step for pair in pairs for step in pair.steps):
            before = columns.get(step.name)
            columns[step.name] = before if step.alone is None else (before or 0) + step.alone
        steps = sorted(columns.items(), key=lambda each: -(each[1] or 0))
        widest = [max((w for pair in pairs if (w := pair.intervals[i]) is not None), default=None) for i in (0, 1)]
        return cls(
            name,
            len(pairs),
            sum(pair.elements for pair in pairs),
            sum(pair.equal for pair in pairs),
            max(pair.ulps for pair in pairs),
            (widest[0], widest[1]),
            tuple(steps),
            (sum(pair.accepted[0].passes for pair in pairs), sum(pair.accepted[1].passes for pair in pairs)),
        )

    def cells(self) -> tuple[str, ...]:
        """The texts of :data:`HEAD`, then how many outputs pass on the other arch, in either direction."""
        differing = self.elements - self.equal
        steps = " + ".join(n if alone is None else f"{n} {share(alone, differing)}" for n, alone in self.steps)
        widths = " | ".join("-" if w is None else f"{w:.3g}" for w in self.intervals)
        passes = (f"{count} of {self.calls}" for count in self.passes)
        return str(self.calls), share(self.equal, self.elements), f"{self.ulps:.3g}", widths, steps or "none", *passes


def share(part: int, whole: int) -> str:
    """A share in percent; 0% and 100% only where it is exactly that."""
    if part in (0, whole):
        return "100%" if part == whole else "0%"
    return f"{min(99.9, max(0.1, 100 * part / whole)):.1f}%"


def _captured(compared: Compared) -> bool:
    return any(side.captured for side in compared.sides)


def _summary(report: Across) -> Iterator[tuple[tuple[str, str], int, Row]]:
    """Each pair of arches, its routines, and the sum of all its calls."""
    for one, other in report.pairs:
        if routines := report.of(one, other):
            pairs = [pair for calls in routines.values() for _, pair in calls]
            yield (one, other), len(routines), Row.of(f"{one} to {other}", pairs)


# --- words --------------------------------------------------------------------------------------------------------


def lines(report: Across) -> Iterator[str]:
    """What no table says: routines with one right result, what has no model, notes."""
    agreed = [same for same in report.same if not same.otherwise]
    every = ", ".join(report.arches)
    for quantises, what in ((True, "quantisers"), (False, "other routines")):
        names = [same.contract for same in agreed if bool(same.recipes) is quantises]
        if names:
            by = ", by the same recipes" if quantises else ""
            yield f"one right result on {every}{by}: {len(names)} {what}: {', '.join(names)}"
    for same in report.same:
        if same.otherwise:
            yield f"DIFFERENT {same.contract}: the right result is another on {', '.join(same.otherwise)} ({same.id})"
    for (arch, why), names in report.unsupported().items():
        yield f"UNSUPPORTED {arch}: {counted(len(names), 'routine')}: {why}: {', '.join(names)}"
    notes: dict[str, list[str]] = {}
    for note in report.notes:
        name, _, reason = note.partition(": ")
        notes.setdefault(reason, []).append(name)
    for reason, names in notes.items():
        yield f"{reason}: {', '.join(names)}"


def print_across(report: Across, screen: Console, *, verbose: bool) -> None:
    """Two arches as a table of routines, more as a table of their pairs; ``verbose``: the routines of every pair."""
    both = len(report.arches) == 2
    if not both:
        screen.print(_table("every two architectures", "pair", "routines", rows=(
            (f"{one} to {other}", str(routines), *row.cells()) for (one, other), routines, row in _summary(report)
        ), under=("first on second", "second on first")))  # fmt: skip  # one call
    for one, other in report.pairs if both or verbose else ():
        by_contract = report.of(one, other)
        under = (f"{one} on {other}", f"{other} on {one}")
        if not by_contract:
            continue
        if len(by_contract) == 1:
            ((name, calls),) = by_contract.items()
            screen.print(_table(f"{one} to {other}: {name}", "call", rows=map(_call_row, calls), under=under))
            continue
        rows = [Row.of(name, [pair for _, pair in calls]) for name, calls in by_contract.items()]
        rows.append(Row.of("all", [pair for calls in by_contract.values() for _, pair in calls]))
        cells = ((row.name, *row.cells()) for row in rows)
        screen.print(_table(f"{one} to {other}", "routine", rows=cells, under=under))
    if report.captured:
        screen.print(_of_captures(report))
    for line in lines(report):
        screen.print(line, soft_wrap=True)
    screen.print(LEGEND, style="dim", soft_wrap=True)
    if not both and not verbose:
        screen.print("Name two arches, or add --verbose or --html, for every routine.", style="dim")


def _call_row(call: tuple[Compared, Pair]) -> tuple[str, ...]:
    """One call of a table of calls: statuses in place of counts."""
    compared, pair = call
    return _called(compared), *Row.of("", [pair]).cells()[1:-2], *(judged.status for judged in pair.accepted)


def _called(compared: Compared) -> str:
    """A case of a known routine: scheme, extents, options, data and output, in words that stand on several lines."""
    _, _, scheme, *parts = compared.id.removesuffix(POWERS).split("/")
    words = [part.removeprefix("family=").replace(",", ", ") for part in parts if not part.startswith("seed=")]
    return " ".join([*words, compared.dtype, scheme, *(["powers of two"] if compared.id.endswith(POWERS) else [])])


def _table(title: str, *first: str, rows: Iterable[Sequence[str]], under: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in first:
        table.add_column(name, overflow="fold", justify="right" if name == "routines" else "left")
    for name in (*(HEAD[1:] if "call" in first else HEAD), *under):
        table.add_column(name, justify="left" if name == HEAD[-1] else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _of_captures(report: Across) -> Table:
    """What the hardware gave, beside what every other arch would give."""
    table = Table(title="captured outputs", title_justify="left")
    for name in ("captured output", "arch", "has the bits of", "other", "equal bits", "ulps"):
        table.add_column(name, overflow="fold", justify="right" if name in ("equal bits", "ulps") else "left")
    table.add_column("which step")
    table.add_column("passes there")
    for cells in _capture_rows(report):
        table.add_row(*cells)
    return table


def _capture_rows(report: Across) -> Iterator[tuple[str, ...]]:
    for compared in report.captured:
        (side,) = [side for side in compared.sides if side.captured]
        for pair in compared.pairs:
            if side.arch in (pair.one, pair.other):
                first = pair.one == side.arch
                row, judged = Row.of(compared.id, [pair]), pair.accepted[0 if first else 1]
                basis = judged.basis.partition(";")[0]
                outside = f" ({basis})" if judged.passes else f" ({judged.outside} outside the {basis})"
                _, equal, ulps, _, steps, *_ = row.cells()
                yield (
                    f"{compared.contract} [{side.captured}]",
                    side.arch,
                    side.numerics,
                    pair.other if first else pair.one,
                    equal,
                    ulps,
                    steps,
                    f"{judged.status}{outside}",
                )


# --- JSON ---------------------------------------------------------------------------------------------------------


def to_json(report: Across) -> dict[str, object]:
    """A JSON-ready dict; non-finite numbers become the strings ``"inf"`` and ``"nan"``."""
    record = {"schema": SCHEMA, **asdict(report)}
    summary = [
        {"one": one, "other": other, "routines": routines, **asdict(row)}
        for (one, other), routines, row in _summary(report)
    ]
    plain: dict[str, object] = {name: _plain(value) for name, value in {**record, "summary": summary}.items()}
    return plain


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


# --- page ---------------------------------------------------------------------------------------------------------


def to_html(report: Across) -> str:
    """One self-contained page: the pairs, every routine of each, every call, captured outputs, what has no model."""
    summary = list(_summary(report))
    parts = [("summary", "Every two architectures", _summary_table(summary))]
    if report.captured:
        parts.append(("captures", "Captured outputs", _captures(report)))
    parts += [(f"p{n}", row.name, _pair(report, *arches)) for n, (arches, _, row) in enumerate(summary)]
    listed = "".join(
        f"<li><span>{_mark(line)}</span><div><p>{cut(line, 4000)}</p></div></li>" for line in lines(report)
    )
    parts.append(("rest", "One right result everywhere, and what has no model", f'<ul class="glance">{listed}</ul>'))
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in sorted(report.machine.items()))
    legend = f'<p class="lead">{escape(LEGEND)}</p><dl class="facts">{facts}</dl>'
    parts.append(("legend", "How to read this", legend))
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in parts)
    calls = len(report.compared) - len(report.captured)
    routines = len({compared.contract for compared in report.compared if compared.pairs})
    text = f"{counted(calls, 'call')} of {counted(routines, 'routine')} on {', '.join(report.arches)}"
    head = (
        '<a class="skip" href="#summary">Skip to the table</a>\n<header>'
        f'<div class="top"><h1>fp8-oracle across</h1>{theme_button()}</div>'
        f'<p class="verdict">{escape(text)}</p>'
        f'<p class="soft">{counted(len(report.captured), "captured call")}; {report.seconds:.1f} s</p></header>'
    )
    content = "\n".join(section(*part) for part in parts)
    body = f'{head}\n<nav aria-label="sections">{links}</nav><main>\n{content}\n</main>'
    return page(f"fp8-oracle: {' and '.join(report.arches)}", body)


def _mark(line: str) -> str:
    word = line.partition(" ")[0]
    return badge(word) if word in ("UNSUPPORTED", "DIFFERENT") else ""


def _summary_table(summary: Sequence[tuple[tuple[str, str], int, Row]]) -> str:
    head = ("pair", "routines#", *_heads(), "first on second#", "second on first#")
    rows = (
        f'<tr><th scope="row"><a href="#p{n}">{escape(row.name)}</a></th><td class=n>{routines}</td>{_cells(row)}</tr>'
        for n, (_, routines, row) in enumerate(summary)
    )
    return scrolling(table(head, rows), "pairs of architectures")


def _heads() -> tuple[str, ...]:
    return tuple(name if name == HEAD[-1] else f"{name}#" for name in HEAD)


def _cells(row: Row) -> str:
    at = HEAD.index("which step")
    return "".join(f"<td{'' if i == at else ' class=n'}>{escape(text)}</td>" for i, text in enumerate(row.cells()))


def _pair(report: Across, one: str, other: str) -> str:
    """Every routine of a pair, and its calls behind it."""
    row = report.of(one, other)
    head = ("routine", *_heads(), f"{one} on {other}#", f"{other} on {one}#")
    rows = (
        f'<tr><th scope="row">{escape(name)}</th>{_cells(Row.of(name, [pair for _, pair in calls]))}</tr>'
        for name, calls in row.items()
    )
    every = "".join(_calls(name, calls) for name, calls in row.items())
    return scrolling(table(head, rows), f"routines on {one} and {other}") + every


def _calls(name: str, calls: Sequence[tuple[Compared, Pair]]) -> str:
    _, first = calls[0]
    under = (f"{first.one} on {first.other}", f"{first.other} on {first.one}")
    head = ("call", "numerics", "equal bits#", "ulps#", "intervals#", "steps", *under)
    listed = table(head, (_call(compared, pair) for compared, pair in calls))
    text = f'{escape(name)} <span class="soft">{counted(len(calls), "call")}</span>'
    return f"<details><summary>{text}</summary>{scrolling(listed, f'calls of {name}')}</details>"


def _call(compared: Compared, pair: Pair) -> str:
    numerics = {side.arch: side.numerics for side in compared.sides}
    _, equal, ulps, widths, *_ = Row.of("", [pair]).cells()
    steps = "".join(
        f"<li>{escape(step.name)}: {escape(step.said)}"
        f"<br><span class=soft>{_alone(step, pair.differing)}, {step.together} with the steps before</span></li>"
        for step in pair.steps
    )
    judged = "".join(
        f"<td>{badge(j.status)} <span class=soft>{cut(j.basis, 200)}"
        f"{'' if j.passes else f': {j.outside} outside'}</span></td>"
        for j in pair.accepted
    )
    called = compared.id.removeprefix(f"{compared.contract}/").replace("/", "/\u200b")
    return (
        f'<tr><td><code class="id">{escape(called)}</code><br><span class="soft">{escape(compared.shape)}; '
        f"{escape(compared.dtype)}</span></td><td>{escape(numerics[pair.one])}<br>{escape(numerics[pair.other])}</td>"
        f"<td class=n>{equal} of {pair.elements}</td><td class=n>{ulps}</td><td class=n>{escape(widths)}</td>"
        f"<td>{f'<ol>{steps}</ol>' if steps else 'none'}</td>{judged}</tr>"
    )


def _alone(step: Step, differing: int) -> str:
    if step.alone is None:
        return f"not alone: {cut(step.why, 200)}"
    return f"alone {step.alone} of {differing} differing elements"


def _captures(report: Across) -> str:
    head = ("captured output", "arch", "has the bits of", "other", "equal bits#", "ulps#", "which step", "passes there")
    rows = (
        "<tr>" + "".join(f"<td{' class=n' if i in (4, 5) else ''}>{cut(text, 300)}</td>" for i, text in enumerate(row))
        for row in _capture_rows(report)
    )
    message = '<p class="lead">Outputs that the hardware gave, replayed; the other arch is predicted.</p>'
    return message + scrolling(table(head, (f"{row}</tr>" for row in rows)), "captured outputs")
