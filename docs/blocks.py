"""The generated blocks: each is a function of words to Markdown, computed from the code that it describes."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from importlib import import_module
from pathlib import Path

import figures

from oracle import cli, contracts
from oracle.fixtures import captures
from oracle.fixtures import files as fixtures
from oracle.harness import coverage
from oracle.harness.finding_scripts import about
from oracle.harness.gallery import chosen, of_bindings
from oracle.harness.runner import replay
from oracle.report import ledger
from oracle.report.console import sentence
from oracle.report.gallery import page, read
from oracle.report.outcome import SEVERITY, Outcome
from oracle.routines import profiles
from oracle.routines.cases import parse
from oracle.routines.catalogue import BEHAVIOURS, Family, catalogue
from oracle.routines.options import word
from oracle.tensorcore.block_probes import KINDS, Kind, pairs
from oracle.tensorcore.instructions import INSTRUCTIONS
from oracle.tensorcore.schedules import schedules
from oracle.verdict.compare import Status

_ROLE = re.compile(r":(?:func|class|mod|meth|attr|data):`~?(?:[\w.]+\.)?(\w+)`")
_COLUMNS = re.compile(r"^[^\s|`][^\n`]*\S {2,}\S", re.MULTILINE)
_NAMES = re.compile(r"[*\w.\[\]{}\"|]+(?:(?:, | or | of | to )[*\w.\[\]{}\"|]+)*")
_TYPE = re.compile(
    r"(?:(?:Tensor|Path|str|int|float|bool|dict|list|tuple|set|mapping|sequence|callable|iterable|None|[A-Z]\w+|[\w.]+\.\w+"
    r"|or|of|to|and)[,\[\]|]* ?)+(?:optional)?"
)
_SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}$", re.MULTILINE)


def api(*names: str) -> str:
    """Signature and docstring of public names, as ``oracle.judge``."""
    return "\n\n".join(_documented(name) for name in names)


def module(name: str) -> str:
    """The head of a file: what it computes, its formula, its source, and what it does not cover."""
    return _markdown(inspect.getdoc(import_module(name)) or "")


def contract_list() -> str:
    """Every contract by its heading, with what it computes and how many cases it has; each has a page in the site."""
    by_section: dict[str, list[tuple[str, str, str]]] = {}
    for routine in coverage.routines():
        contract = routine.contract
        if routine.name == contract.name:
            cases = str(len(profiles.cases(contract.name, "quick")))
            by_section.setdefault(contract.section, []).append((f"`{contract.name}`", contract.summary, cases))
    head = ("contract", "what it computes", "cases")
    parts = (f"## {section}\n\n{_rows(_table(head, rows))}" for section, rows in by_section.items())
    return "\n\n".join(parts)


def schedule_table() -> str:
    """Every schedule with what it is made of."""
    rows = [
        (
            f"`{s.name}`",
            s.status.value,
            f"`{s.instruction.name}`",
            "K" if s.interval is None else str(s.interval),
            f"`{s.promotion.value}`",
            f"`{s.epilogue.value}`",
            s.seen_in,
        )
        for s in schedules()
    ]
    return _table(("schedule", "checked", "instruction", "chain", "promotion", "epilogue", "seen in"), rows)


def instruction_table() -> str:
    """The table of matrix instructions."""
    rows = [
        (
            f"`{i.name}`",
            i.status.value,
            " ".join(f"`{o}`" for o in i.operands),
            str(i.k),
            str(i.group),
            "-" if i.align_bits is None else str(i.align_bits),
            str(i.out_bits),
            i.source,
            i.unshown or "-",
        )
        for i in INSTRUCTIONS.values()
    ]
    head = ("instruction", "checked", "operands", "k", "group", "t", "result", "source", "no hardware has shown")
    return _table(head, rows)


def probe_pairs() -> str:
    """For every pair of readings of a block-scaled instruction the probes whose bits differ."""
    rows = []
    for kind in map(Kind.of, KINDS):
        for (first, second), names in pairs(kind).items():
            short = [name.split(".", 1)[1] for name in (first, second)]
            rows.append((kind.name, *(f"`{name}`" for name in short), ", ".join(names)))
    return _table(("kind", "reading", "other reading", "probes that differ"), rows)


def fault_catalogue() -> str:
    """Every fault, by family; the faults of behaviour last."""
    faults = list(catalogue().values())
    lines = [f"{len(faults)} faults of numbers and {len(BEHAVIOURS)} of behaviour.", ""]
    for family in Family:
        chosen = [fault for fault in faults if fault.family is family]
        if not chosen:
            continue
        lines += [f"## {family.value.capitalize()}", ""]
        rows = []
        for fault in chosen:
            names = sorted(fault.contracts)
            applies = f"{len(names)} contracts" if len(names) > 2 else _words(names)
            rows.append((fault.name, applies, fault.seen, fault.same_if or "-"))
        lines += [_table(("fault", "applies to", "met in", "gives the right bits when"), rows), ""]
    watches = [(b.name, b.seen, b.watch) for b in BEHAVIOURS]
    lines += ["## Behaviour", "", _table(("fault", "met in", "noticed by"), watches)]
    return "\n".join(lines)


def routine_table() -> str:
    """Which backend serves which routine on which architecture, all packages present."""
    return str(import_module("kernels.plan").markdown_table())


def blackwell() -> str:
    """What each architecture of Blackwell takes for the products of blocks and experts, and how that sums."""
    plan = import_module("kernels.plan")
    described = [plan.Machine.described(arch) for arch in ("sm100", "sm103", "sm120", "sm121")]
    chosen = [plan.summary(machine) for machine in described]
    lines = ["| routine | " + " | ".join(machine.arch for machine in described) + " |", "|:--" * 5 + "|"]
    for rows in zip(*chosen, strict=True):
        if any(word in rows[0][0] for word in ("mm", "fused_moe")) and any(row[1] != "-" for row in rows):
            cells = (f"{backend}{f', `{sums}`' if 'chain' in sums else ''}" for _, backend, _, sums in rows)
            lines.append(f"| `{rows[0][0]}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def environment() -> str:
    """The variables that the production layer reads."""
    return str(import_module("kernels.config").environment_table())


def release_rows() -> str:
    """Which releases each backend accepts."""
    return str(import_module("kernels.releases").markdown_backends())


def release_matrix() -> str:
    """How many routines each release of a package serves on each architecture."""
    return str(import_module("kernels.releases").markdown_matrix())


def release_packages() -> str:
    """Each package, its distributions, and the releases that are started past their public functions."""
    return str(import_module("kernels.releases").markdown_packages())


def private_names(folder: str = "") -> str:
    """Names that begin with an underscore, of other packages, by the file of the production layer that uses them."""
    home = Path(folder or Path(inspect.getfile(import_module("kernels"))).parent)
    rows = []
    for path in sorted(home.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
        foreign = {(a.asname or a.name).partition(".")[0] for node in imports for a in node.names} | {"module"}
        used = {name for node in ast.walk(tree) for name in _private(node, foreign)}
        whole = sorted(name for name in used if not any(other.startswith(f"{name}.") for other in used))
        if whole:
            rows.append((f"`{path.relative_to(home.parent).as_posix()}`", ", ".join(f"`{name}`" for name in whole)))
    return _table(("file", "names"), rows)


def _private(node: ast.AST, foreign: set[str]) -> Iterable[str]:
    parts, inner = [], node
    while isinstance(inner, ast.Attribute):
        parts, inner = [inner.attr, *parts], inner.value
    if isinstance(inner, ast.Name) and inner.id in foreign and _hidden(*parts):
        yield ".".join([inner.id, *parts])
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}.{a.name}" for a in node.names if _hidden(*node.module.split("."), a.name))
    if isinstance(node, ast.Call):  # a name that is looked up by its text
        texts = (arg.value for arg in node.args if isinstance(arg, ast.Constant))
        yield from (
            text for text in texts if isinstance(text, str) and len(text) > 1 and text.isidentifier() and _hidden(text)
        )


def _hidden(*parts: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


def exported(name: str) -> str:
    """A file of an exported folder, as it is."""
    text = (Path(fixtures.__file__).parent / "data" / name).read_text("utf-8")
    return f"```cpp\n{text.strip()}\n```"


def capture(identity: str) -> str:
    """The verdict on a captured output, in the words of ``verify``, with the known failure that it is."""
    folder = fixtures.folder()
    (item,) = [item for item in replay(folder / "captures") if item.id == identity]
    outcome: Outcome = item.outcome()
    (outcome,), complaints = ledger.apply([outcome], ledger.load(folder / ledger.FILE), whole=False)
    assert not complaints, complaints
    (recorded,) = [c for c in captures.load(folder / "captures") if c.id == identity]
    return f"```text\n{sentence(outcome).plain}\n```\n\nRecorded with {_place(recorded.recording.provenance)}."


def right_captures() -> str:
    """What passes among the captures, by file and contract, and by what: equal bits or the bound."""
    passed = [item.outcome() for item in replay(fixtures.folder() / "captures")]
    kinds: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in passed:
        if outcome.status is Status.PASSED:
            kinds.setdefault((outcome.id.split("/")[1], outcome.contract), []).append(outcome)
    rows = [
        (
            f"`{contract}`",
            str(len(found)),
            str(sum(o.verdict.matches is not None for o in found)),
            ", ".join(sorted({f"`{o.verdict.matches}`" for o in found if o.verdict.matches})) or "-",
            f"`{stem}`",
        )
        for (stem, contract), found in kinds.items()
    ]
    return _table(("contract", "outputs", "bit for bit", "as", "file"), rows)


def capture_list() -> str:
    """Every file of captures, by contract and declared numerics."""
    kinds = Counter(
        (
            c.recording.path.stem,
            c.contract,
            c.recording.arch,
            f"not judged: {c.unsupported}" if c.unsupported else f"`{c.numerics}`" if c.numerics else "-",
        )
        for c in captures.load(fixtures.folder() / "captures")
    )
    rows = [
        (f"`{stem}`", f"`{contract}`", arch, str(count), said) for (stem, contract, arch, said), count in kinds.items()
    ]
    return _table(("file", "contract", "arch", "outputs", "declared numerics"), rows)


def known_failures() -> str:
    """The ledger of known failures."""
    entries = ledger.load(fixtures.folder() / ledger.FILE)
    rows = [(f"`{e.id.removeprefix('captures/')}`", str(e.outside), e.reason, e.source) for e in entries]
    return _table(("capture", "elements outside", "reason", "seen in"), rows)


def validations() -> str:
    """The kept reports of ``validate``: what ran, where, what was found, and the command."""
    reports = [json.loads(path.read_text()) for path in sorted((fixtures.folder() / "validations").glob("*.json"))]
    words = {0: "conforms", 1: "does not conform", 2: "not judged"}
    rows = [
        (
            f"`{r['kernel']}`",
            f"`{r['contract']}`",
            words[r["exit_code"]],
            str(r["judged"]),
            str(len(r["findings"])),
            f"{r['seconds']:.0f} s",
        )
        for r in reports
    ]
    table = _table(("kernel", "contract", "verdict", "cases", "findings", "time"), rows)
    commands_run = "\n".join(r["provenance"]["command"] for r in reports)
    places = {_place(r["provenance"]) for r in reports}
    return f"{table}\n\n```sh\n{commands_run}\n```\n\nRecorded with {'; '.join(sorted(places))}."


def gallery() -> str:
    """The page of the run that is kept, and the kernels of the gallery that it has not."""
    run = read(fixtures.folder() / "gallery" / "gallery.json")
    every, rows = chosen(of_bindings(), ()), {(row.project, row.contract) for row in run.rows}
    left = [f"{p.name} `{k.named}`" for p, k in every if (p.name, k.contract) not in rows]
    said = f"\n\n{len(left)} of {len(every)} kernels of the gallery have no row: {', '.join(left)}." if left else ""
    return page(run).strip() + said


def findings() -> str:
    """Every script of a finding: what it means to a user, what happens, and what it printed when it ran last."""
    folder = Path(__file__).resolve().parents[1] / "tests" / "hardware"
    others: dict[str, list[str]] = {}
    record = json.loads((fixtures.folder() / "gallery" / "findings.json").read_text())
    rows, ends, projects = [], Counter[str](), set[str]()
    for path in sorted((folder / "findings").glob("*.py")):
        head, ran = about(path), record["scripts"].get(path.stem)
        project, _, versions = (
            head.project.partition(" ") if "GenAI" not in head.project else head.project.rpartition(" ")
        )
        ends["not run yet" if ran is None else ran["status"]] += 1
        projects.add(project)
        status, said = ("not run yet", "") if ran is None else (ran["status"], f"{ran['said']}.<br>")
        if ran is not None and "machine" in ran:  # of an earlier run, whose library the last one had not
            others.setdefault(_place(ran["machine"]), []).append(f"`{path.name}`")
        where = f"**{project}** {versions}<br>`{head.routine}`"
        last = f"<details><summary>last run: {status}</summary>{said}`tests/hardware/findings/{path.name}`</details>"
        rows.append((where, head.matters, f"{head.happens} {last}"))
    heads = ("where", "what it means to a user", "what happens")
    counts = f"**{len(rows)} findings in {len(projects)} projects.** In the last run: {_counts(ends)}."
    places = [_place(record["machine"]), *(f"{', '.join(names)} with {place}" for place, names in others.items())]
    return f"{counts}\n\n{_rows(_table(heads, rows))}\n\nThe scripts were run with {'; '.join(places)}."


def _counts(ends: Mapping[str, int]) -> str:
    words = {"there": "still there"}
    return ", ".join(f"{count} {words.get(end, end)}" for end, count in ends.items())


def _rows(table: str) -> str:
    """A table of few columns that a reader can filter, and whose rows are cards on a narrow screen."""
    return f'<div class="rows" markdown>\n\n{table}\n\n</div>'


def measurements() -> str:
    """What was timed on a GPU, side by side in one run, and its ratio to the bare library calls."""
    found = []
    for path in sorted((fixtures.folder() / "measurements").glob("*.json")):
        made = json.loads(path.read_text())
        rows = []
        for group, timings in made["timings"].items():
            if "_us." not in group:
                continue
            base = figures.base(timings)
            clock, what = group.split("_us.", 1)
            rows += [
                (what, clock, name, f"{us:.1f}", "-" if base is None else f"{us / base:.2f}")
                for name, us in timings.items()
            ]
        table = _table(("what", "time of", "candidate", "us a call", "ratio"), rows)
        found.append(f"{table}\n\nMeasured with {_place(made['environment'])}.")
    return "\n\n".join(found)


def runs() -> str:
    """The runs behind the history of ratios: when, with which code and libraries."""
    rows = []
    for i, run in enumerate(figures.runs(), 1):
        made: Mapping[str, str] = run["environment"]  # type: ignore[assignment]
        names = {"torch": "torch", "triton": "triton", "flashinfer": "flashinfer-python", "deep_gemm": "sgl-deep-gemm"}
        used = ", ".join(f"{word} {made[name]}" for word, name in names.items() if name in made)
        when = str(run["recorded"]).replace("T", " ")
        rows.append((str(i), when, made.get("fp8-oracle", "-"), made.get("gpu", "-"), used))
    return _rows(_table(("run", "recorded (UTC)", "code", "GPU", "libraries"), rows))


def _place(provenance: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {provenance[name]}" for name in PLACE if name in provenance)


def statuses() -> str:
    """The statuses of a verdict, worst first."""
    rows = [(f"`{s}`", "yes" if s.is_failure else "no", "yes" if s.needs_reason else "no") for s in SEVERITY]
    return _table(("status", "fails a run", "carries a reason"), rows)


def errors() -> str:
    """Every error that is raised on purpose."""
    found = import_module("oracle.errors")
    rows = [
        (f"`{name}`", str(inspect.getdoc(kind)))
        for name, kind in vars(found).items()
        if inspect.isclass(kind) and kind.__module__ == "oracle.errors"
    ]
    return _table(("error", "raised when"), rows)


def commands() -> str:
    """The command line, read off its parser."""
    lines = []
    for name, parser, said in _parsers(cli.parser(), "fp8-oracle"):
        skipped = argparse._HelpAction | argparse._SubParsersAction
        rows = [_argument(action) for action in parser._actions if not isinstance(action, skipped)]
        if name == "fp8-oracle" or (not rows and not said):
            continue
        lines += [f"### `{name}`", "", f"{said[:1].upper()}{said[1:].rstrip('.')}.", ""]
        lines += [_table(("argument", "meaning", "values"), rows), ""] if rows else []
    return "\n".join(lines)


def profile_counts() -> str:
    """How many cases each contract has in each profile."""
    names = [name for name in contracts() if profiles.cases(name, "quick")]
    rows = [(f"`{n}`", *(str(len(profiles.cases(n, p))) for p in profiles.PROFILES)) for n in names]
    totals = [sum(len(profiles.cases(n, p)) for n in names) for p in profiles.PROFILES]
    return _table(("contract", *profiles.PROFILES), [*rows, ("all", *(str(t) for t in totals))])


PLACE = (
    "captured",
    "device",
    "gpu",
    "driver",
    "cuda",
    "python",
    "torch",
    "triton",
    "flashinfer",
    "flashinfer-python",
    "deep_gemm",
    "sgl-deep-gemm",
    "vllm",
)
"""What of a provenance a page says."""


def case_parts(identity: str) -> str:
    """What the parts of a case id say, and the tensors they make."""
    case = parse(identity)
    rows = [(f"`{name}`", f"`{list(t.shape)}`", str(word(t.dtype))) for name, t in case.inputs().items()]
    return f"`{case}`\n\n" + _table(("input", "shape", "dtype"), rows)


BLOCKS: dict[str, Callable[..., str]] = {
    "api": api, "module": module, "contracts": contract_list, "schedules": schedule_table,
    "instructions": instruction_table, "probe_pairs": probe_pairs, "faults": fault_catalogue,
    "routines": routine_table, "capture": capture, "environment": environment, "private-names": private_names,
    "blackwell": blackwell, "release-rows": release_rows, "release-packages": release_packages,
    "release-matrix": release_matrix,
    "right-captures": right_captures, "captures": capture_list, "known-failures": known_failures,
    "validations": validations, "measurements": measurements, "gallery": gallery, "findings": findings, "runs": runs,
    "statuses": statuses,
    "errors": errors, "commands": commands, "profiles": profile_counts, "case": case_parts, "figure": figures.figure,
    "exported": exported,
}  # fmt: skip  # a table, one row a line


# --- docstrings ---------------------------------------------------------------------------------------------------


def _documented(name: str) -> str:
    home, _, attribute = name.rpartition(".")
    thing = getattr(import_module(home), attribute)
    thing = getattr(thing, "_get_wrapped_function", lambda: thing)()
    bare = inspect.isclass(thing) and issubclass(thing, BaseException | Enum)
    shown = "" if bare else _signature(thing)
    text = _whole(name, inspect.getdoc(thing) or "")
    lines = [f"### `{name}`", "", *([f"```py\n{attribute}{shown}\n```", ""] if shown else []), _markdown(text)]
    if inspect.isclass(thing) and issubclass(thing, Enum):
        lines += ["", *(f"- `{m.name}`" + ("" if m.value == m.name else f": {m.value}") for m in thing)]
    elif inspect.isclass(thing):
        for key, value in vars(thing).items():
            if not key.startswith("_") and (inspect.isfunction(value) or isinstance(value, (property, classmethod))):
                said, call = inspect.getdoc(value), "" if isinstance(value, property) else "()"
                lines += ["", f"**`{key}{call}`**: {_markdown(_whole(f'{name}.{key}', said))}"] if said else []
    return "\n".join(lines)


def _whole(name: str, text: str) -> str:
    """A docstring whose first line, which is all that an editor or a list shows, is a sentence."""
    first = text.partition("\n")[0]
    if not first.endswith((".", "?", ":")):
        raise ValueError(f"the docstring of {name} has no whole sentence in its first line: {first!r}")
    return text


def _signature(thing: Callable[..., object]) -> str:
    signature = inspect.signature(thing)
    shown = [_parameter(parameter) for parameter in signature.parameters.values()]
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    keyword = inspect.Parameter.KEYWORD_ONLY
    if keyword in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        shown.insert(kinds.index(keyword), "*")
    returns = "" if inspect.isclass(thing) else f" -> {signature.return_annotation}"
    one = f"({', '.join(shown)}){returns}"
    return one if len(one) < 90 else "(\n" + "".join(f"    {parameter},\n" for parameter in shown) + f"){returns}"


def _parameter(parameter: inspect.Parameter) -> str:
    star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = "" if parameter.annotation is inspect.Parameter.empty else f": {parameter.annotation}"
    default = parameter.default
    if default is inspect.Parameter.empty or "factory" in repr(default):
        return f"{star}{parameter.name}{kind}"
    return f"{star}{parameter.name}{kind} = {default.__name__ if inspect.isfunction(default) else repr(default)}"


def _markdown(text: str) -> str:
    """A NumPy docstring as Markdown."""
    text = _ROLE.sub(r"`\1`", text).replace("``", "`")
    pieces = _SECTION.split(text)
    lines = [_paragraphs(pieces[0])]
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        lines += ["", f"**{title}**", ""]
        named = title in ("Parameters", "Attributes", "Raises", "Returns", "Warns")
        lines.append(_items(body) if named else _paragraphs(body))
    return "\n".join(lines).strip()


def _paragraphs(text: str) -> str:
    """Indented lines are code already, and lines with columns in them become so; a `::` before code is a colon."""
    text = re.sub(r"::$", ":", text.strip("\n"), flags=re.MULTILINE)
    parts = re.split(r"\n[ \t]*\n", text)
    plain = [part.replace("`", "") for part in parts]
    return "\n\n".join(
        f"```text\n{bare}\n```" if _COLUMNS.search(part) else part for part, bare in zip(parts, plain, strict=True)
    )


def _items(body: str) -> str:
    """``name : type`` with a description below it, ``name : description``, or ``type`` with a description below it.

    A line that is none of them belongs to no item: it has to stand before the section, or in one of its own.
    """
    items: list[tuple[str, list[str]]] = []
    for line in body.strip("\n").splitlines():
        if line.startswith(" ") and items:
            items[-1][1].append(line.strip())
        elif line.strip():
            name, _, rest = line.partition(" : ")
            if not _NAMES.fullmatch(name.strip()):
                raise ValueError(f"a docstring has {line!r} among its parameters or errors, which names none")
            items.append((name.strip(), [rest.strip()]))
    return "\n".join(_item(name, rest) for name, rest in items)


def _item(name: str, lines: list[str]) -> str:
    kind, *body = lines
    typed = bool(body) and _TYPE.fullmatch(kind) is not None
    said = " ".join(body if typed else [kind, *body]).strip()
    return f"- `{name}`" + (f" ({kind})" if typed and kind else "") + (f": {said}" if said else "")


# --- tables -------------------------------------------------------------------------------------------------------


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Numbers to the right, names and short words to the left; columns of prose are left to the style of the page."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"

    listed = list(rows)
    marks = [_alignment([row[column] for row in listed]) for column in range(len(heads))]
    return "\n".join([line(heads), f"|{'|'.join(marks)}|", *(line(row) for row in listed)])


def _alignment(cells: list[str]) -> str:
    if cells and all(re.fullmatch(r"-|[<+-]?\d+(\.\d+)?( s)?", cell) for cell in cells):
        return "--:"
    short = (len(cell) <= 40 or re.fullmatch("`[^`]+`", cell) is not None for cell in cells)
    return ":--" if all(short) else "---"


def _words(values: Iterable[object] | None) -> str:
    return "any" if values is None else ", ".join(f"`{word(value)}`" for value in values)


def _parsers(parser: argparse.ArgumentParser, name: str) -> Iterable[tuple[str, argparse.ArgumentParser, str]]:
    yield name, parser, parser.description or ""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for word_, child in action.choices.items():
                for found, below, said in _parsers(child, f"{name} {word_}"):
                    yield found, below, said or helps.get(found.rpartition(" ")[2], "")


def _argument(action: argparse.Action) -> tuple[str, str, str]:
    names = ", ".join(f"`{flag}`" for flag in action.option_strings)
    value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    shown = "" if action.nargs == 0 or (action.option_strings and action.choices) else f"`{value}`"
    choices = ", ".join(f"`{choice}`" for choice in action.choices or ())
    default = "" if action.default in (None, False, [], argparse.SUPPRESS) else f" (default `{action.default}`)"
    said = action.help or ""
    if "%(default)" in said:
        said %= {"default": action.default}
    if "(default" in said:
        default = ""
    return f"{names} {shown}".strip(), said.replace("%%", "%"), choices + default
