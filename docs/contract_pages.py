"""The page of each contract, made while the site is built: a hook of mkdocs, which writes nothing into the repository.

A page has the formula with its roundings, inputs, options, outputs, numerics, recipes, releases, kernels of other
projects that were judged, faults and cases: what ``fp8-oracle list contracts --contract NAME`` prints, and what is
recorded. The committed page ``reference/contracts.md`` lists all of them; the names in it, and in the first column of
the pages of ``LINKED``, become links. ``extra.contracts`` in mkdocs.yml is ``all``, or the names of those that get a
page, which is how the tests build the site.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from blocks import _SECTION, _paragraphs, _rows, _table, _words  # noqa: E402

from oracle import contracts  # noqa: E402
from oracle.cli.page import releases_of, sections  # noqa: E402
from oracle.fixtures import captures  # noqa: E402
from oracle.fixtures import files as fixtures  # noqa: E402
from oracle.report import gallery  # noqa: E402
from oracle.routines import Contract, profiles  # noqa: E402
from oracle.routines.catalogue import catalogue  # noqa: E402
from oracle.routines.options import word  # noqa: E402

INDEX, FOLDER = "reference/contracts.md", "reference/contracts"
LINKED = (INDEX, "reference/coverage.md", "reference/cases.md", "reference/captures.md", "reference/validations.md")
PROFILE = "quick"
SHOWN = 3  # case ids that a page shows
_FIRST = re.compile(r"^\| `(?P<name>\w+)` \|", re.MULTILINE)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """The pages beside those of the folder."""
    for name, contract in contracts().items():
        if _wanted(config, name):
            files.append(File.generated(config, f"{FOLDER}/{name}.md", content=page(contract)))
    return files


def _wanted(config: MkDocsConfig, name: str) -> bool:
    names = str(config["extra"]["contracts"])
    return name in contracts() and (names == "all" or name in names.split(","))


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page with links to those of the contracts, which the index also marks with their names."""
    if page.file.src_uri not in LINKED:
        return markdown
    mark = "{ #%s }" if page.file.src_uri == INDEX else "%.0s"

    def linked(found: re.Match[str]) -> str:
        name = found["name"]
        return f"| [`{name}`](contracts/{name}.md){mark % name} |" if _wanted(config, name) else found[0]

    return _FIRST.sub(linked, markdown)


@lru_cache(maxsize=512)
def page(contract: Contract) -> str:
    """The Markdown of a page."""
    anchor = contract.section.lower().replace(" ", "-")
    lines = [f"# `{contract.name}`", "", f"{contract.summary[:1].upper()}{contract.summary[1:]}.", ""]
    lines += [f"[{contract.section}](../contracts.md#{anchor}) · source: {contract.source}", ""]
    return "\n".join([*lines, *_body(contract)]) + "\n"


def _body(contract: Contract) -> Iterator[str]:
    said = sections(contract, PROFILE)
    yield from ("## What is right", "", _rules("\n".join(said.rules)), "")
    yield from ("## Inputs", "", _inputs(contract), "")
    if contract.options:
        rows = [(f"`{o.name}`", f"`{word(o.default)}`", _words(o.choices), o.doc) for o in contract.options]
        yield from ("## Options", "", _table(("option", "default", "values", "note"), rows), "")
    yield from ("## Outputs", "", _printed(said.outputs), "")
    if said.numerics:
        rows = [(arch, ", ".join(f"`{name}`" for name in names)) for arch, names in contract.numerics.items()]
        yield from ("## Numerics", "", "The arithmetic of one of the architecture's, the usual one first.", "")
        yield from (_table(("arch", "schedules"), rows), "")
        yield from (_printed(said.numerics[1 + len(rows) :]), "")
    if said.recipes:
        yield from ("## Recipes { data-search-exclude }", "", _printed(said.recipes), "")
    yield from ("## Releases", "", _sentence(releases_of(contract).strip().removeprefix("releases: ")), "")
    yield from _judged(contract)
    faults = [(f.name, f.seen, f.same_if or "-") for f in catalogue().values() if contract.name in f.contracts]
    if faults:
        head = ("fault", "met in", "gives the right bits when")
        yield from (
            "## Faults { data-search-exclude }",
            "",
            f"{len(faults)} known ones are tried where an output is wrong.",
            "",
        )
        yield from (_rows(_table(head, faults)), "")
    cases = profiles.cases(contract.name, PROFILE)
    yield from ("## Cases", "", f"{len(cases)} in profile {PROFILE}. The first of them:", "")
    yield from ("```text", *(str(case) for case in cases[:SHOWN]), "```", "")
    yield from ("```sh", f"fp8-oracle validate mykernels:kernel --contract {contract.name}", "```", "")


def _rules(text: str) -> str:
    """The text of docstrings: a title in bold, a paragraph of parameters as a list, all else as it is."""
    text = _SECTION.sub(r"**\1**\n", text.replace("``", "`"))
    parts = []
    for part in re.split(r"\n[ \t]*\n", text):
        entries = re.split(r"\n(?=\S)", part)
        if all(_ENTRY.match(entry) for entry in entries):
            part = "\n".join(f"- {' '.join(entry.split())}" for entry in entries)
        parts.append(part)
    return _paragraphs("\n\n".join(parts))


_ENTRY = re.compile(r"\w[\w, ]*(?: : \S|\n +\S)")  # of a parameter: its type behind it, or its description below it


def _inputs(contract: Contract) -> str:
    rows = []
    for spec in contract.inputs:
        shape = f"`[{', '.join(spec.dims)}]`" if spec.dims is not None else "see the note"
        marks = ", ".join(mark for mark, on in (("optional", spec.optional), ("contiguous", spec.contiguous)) if on)
        dtypes = ", ".join(str(word(dtype)) for dtype in spec.dtypes)
        rows.append((f"`{spec.name}`", shape, dtypes, spec.doc + (f" ({marks})" if marks else "")))
    return _table(("input", "shape", "dtypes", "note"), rows)


def _judged(contract: Contract) -> Iterator[str]:
    """Rows of the gallery, and the recorded outputs."""
    rows = [row for row in _gallery() if row.contract == contract.name]
    if rows:
        yield from ("## Kernels that were judged", "", *gallery.table(rows), "")
        yield from ("From the [gallery](../gallery.md).", "")
    if count := sum(1 for name in _captured() if name == contract.name):
        yield from (f"[Captures](../captures.md): {count} outputs of real hardware are judged in every run.", "")


@lru_cache(maxsize=1)
def _gallery() -> tuple[gallery.Row, ...]:
    run = gallery.read(fixtures.folder() / "gallery" / "gallery.json")
    return tuple(sorted(run.rows, key=lambda row: (gallery.ORDER.index(row.verdict), row.key)))


@lru_cache(maxsize=1)
def _captured() -> tuple[str, ...]:
    return tuple(c.contract for c in captures.load(fixtures.folder() / "captures") if c.unsupported is None)


def _printed(lines: list[str]) -> str:
    text = textwrap.dedent("\n".join(lines))
    return f"```text\n{text}\n```"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
