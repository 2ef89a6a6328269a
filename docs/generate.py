"""Everything in these pages that a program can say is said by one: run this file after a change, ``--check`` in CI.

    python docs/generate.py [--check] [PAGE ...]

Three kinds of text are made and compared:

* ``<!-- generated: NAME arguments -->`` ... ``<!-- /generated -->``: the block ``NAME`` of :mod:`blocks`.
* a ``python`` fence is executed, all fences of a page in one namespace; a ``text`` fence right after it is what it
  prints. With ``title="FILE"`` it (or a ``cpp`` or ``toml`` fence) is written to that file of the page's scratch folder
  instead; a ``pyproject.toml`` is installed there too, as ``pip install -e .`` does, and what follows finds it.
* a ``console`` fence: each line after ``$`` runs in the scratch folder; the lines below it are what it prints.

An image ``![...](FOLDER/NAME.svg)`` of which an example wrote ``NAME.svg`` is a picture of the page, stored in
that folder. A page that links to ``PAGE.ipynb`` is that notebook too: its text and its fences become the cells, what
they print and the pictures after them their outputs.

Under ``<!-- requires: TOOL [TOOL ...] -->`` a fence is left as it is where one of these tools is not here, with a note
on the standard error.
An example that raises, or a command of ours that cannot be carried out (without ``2>&1``), is an error of its page.
Durations are left out (``… s``): they change with the machine. Exit 1 with a diff when ``--check``
finds a page that differs from what was made.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
WIDTH = "100"
SHOWN = " 2>&1"  # of a command whose error the page shows
_BLOCK = re.compile(r"<!-- generated: (?P<call>.+?) -->\n.*?<!-- /generated -->", re.DOTALL)
_FENCE = re.compile(
    r"^(?:<!-- requires: (?P<tools>[^>]+?) -->\n)?"
    r"```(?P<kind>python|cpp|toml|console)(?P<rest>[^\n]*)\n(?P<body>.*?)^```\n",
    re.DOTALL | re.MULTILINE,
)
_OUTPUT = re.compile(r"\n?```text\n.*?^```\n", re.DOTALL | re.MULTILINE)
_PICTURE = re.compile(r"^!\[[^\]]*\]\((?P<path>[\w/]+\.svg)\)\n", re.MULTILINE)
_CELL = re.compile(
    r"^```python\n(?P<source>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```\n)?(?:\n!\[[^\]]*\]\((?P<picture>[\w/]+\.svg)\)\n)?",
    re.DOTALL | re.MULTILINE,
)
_DURATIONS = ((r"\b\d+\.\d+ ?s\b", "… s"), (r'\btime="[\d.]+"', 'time="…"'))


@dataclass
class Scratch:
    """What the fences of one page share: a namespace and a folder."""

    folder: Path
    namespace: dict[str, object] = field(default_factory=lambda: {"__name__": "page"})


def main(arguments: list[str] | None = None) -> int:
    """Write or check the pages; see the head of this file."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 with a diff if a page is stale")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of the pages")
    parser.add_argument("page", nargs="*", help="only these, as tutorial.md")
    given = parser.parse_args(arguments)
    _surroundings()
    stale = broken = 0
    for path in pages(given.docs, given.page):
        old, name = path.read_text(encoding="utf-8"), path.relative_to(given.docs).as_posix()
        try:
            new, files = made(old, name=name)
        except Exception as error:  # an example that raises is a finding about its page; the others are still made
            print(f"{name}: {''.join(traceback.format_exception(error, limit=-1))}", file=sys.stderr)
            broken += 1
            continue
        for target, content in {path: new, **{path.parent / file: text for file, text in files.items()}}.items():
            stored = target.read_text(encoding="utf-8") if target.is_file() else ""
            if _text(target, stored) == _text(target, content):
                continue
            name = target.relative_to(given.docs).as_posix()
            if given.check:
                stale += 1
                pair = (_text(target, x).splitlines() for x in (stored, content))
                print("\n".join(difflib.unified_diff(*pair, f"{name} (stored)", f"{name} (made)", n=1)))
            else:
                target.parent.mkdir(exist_ok=True)
                target.write_text(content, encoding="utf-8")
                print(f"{name}: written")
    if stale or broken:
        print(f"{stale} pages are out of date, {broken} cannot be made; run `python docs/generate.py`", file=sys.stderr)
    return 1 if stale or broken else 0


def pages(docs: Path, only: list[str]) -> list[Path]:
    """The Markdown files: those that execute nothing first, then the reference (an example may register something)."""

    def order(path: Path) -> tuple[bool, bool, Path]:
        return bool(_FENCE.search(path.read_text())), path.parent.name != "reference", path

    found = sorted(docs.rglob("*.md"), key=order)
    kept = [path for path in found if not only or path.relative_to(docs).as_posix() in only]
    if missing := set(only) - {path.relative_to(docs).as_posix() for path in kept}:
        raise SystemExit(f"no page {', '.join(sorted(missing))} in {docs}")
    return kept


def made(text: str, *, name: str) -> tuple[str, dict[str, str]]:
    """The page as it should be, and the files that belong to it, by their paths from it."""
    import blocks

    text = _BLOCK.sub(lambda match: _generated(match["call"], blocks.BLOCKS), text)
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        scratch = Scratch(Path(folder).resolve())
        with contextlib.chdir(scratch.folder), _importable(scratch.folder):
            new = "".join(_executed(text, scratch, name))
        pictures = {path: scratch.folder / Path(path).name for path in _PICTURE.findall(new)}
        files = {path: file.read_text(encoding="utf-8") for path, file in pictures.items() if file.is_file()}
    notebook = f"{Path(name).stem}.ipynb"
    return new, files | ({notebook: _notebook(new, files)} if f"]({notebook})" in new else {})


def _text(path: Path, content: str) -> str:
    """What is compared of a file: of a picture its words, since its lines depend on the version that drew it."""
    if path.suffix == ".ipynb":
        content = re.sub(r'"<\?xml.*</svg>\\n"', lambda found: json.dumps(_words(json.loads(found[0]))), content)
    return _words(content) if path.suffix == ".svg" else content


def _words(svg: str) -> str:
    return "\n".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg))


def _notebook(page: str, pictures: Mapping[str, str]) -> str:
    """The page as a Jupyter notebook (format 4.4)."""
    cells, at = list[dict[str, object]](), 0

    def text(said: str) -> None:
        if said.strip():
            cells.append({"cell_type": "markdown", "metadata": {}, "source": said.strip()})

    for count, cell in enumerate(_CELL.finditer(page), 1):
        text(page[at : cell.start()])
        at, outputs = cell.end(), list[dict[str, object]]()
        if cell["printed"]:
            outputs.append({"name": "stdout", "output_type": "stream", "text": cell["printed"]})
        if cell["picture"]:
            data = {"image/svg+xml": pictures[cell["picture"]]}
            outputs.append({"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"})
        known = {"cell_type": "code", "execution_count": count, "metadata": {}, "outputs": outputs}
        cells.append({**known, "source": cell["source"].rstrip("\n")})
    text(page[at:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Files of the scratch folder can be imported, as from where a reader stands, and are forgotten afterwards."""
    path = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = path
        _forget(folder)


def _forget(folder: Path) -> None:
    """Modules of the scratch folder are loaded afresh: their files may have been written again."""
    importlib.invalidate_caches()
    for name, loaded in list(sys.modules.items()):
        if str(getattr(loaded, "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


def _generated(call: str, known: dict[str, Callable[..., str]]) -> str:
    name, *arguments = shlex.split(call)
    if name not in known:
        raise LookupError(f"no generated block {name!r}; there are: {', '.join(known)}")
    return f"<!-- generated: {call} -->\n{known[name](*arguments).strip()}\n<!-- /generated -->"


def _executed(text: str, scratch: Scratch, page: str) -> Iterator[str]:
    at = 0
    while (fence := _FENCE.search(text, at)) is not None:
        yield text[at : fence.start()]
        at = fence.end()
        if absent := [tool for tool in (fence["tools"] or "").split() if shutil.which(tool) is None]:
            print(f"{page}: {', '.join(absent)} is not here; what it prints was not compared", file=sys.stderr)
            yield fence[0]  # and, as it stands, the output of a python fence
            continue
        if fence["kind"] == "console":
            yield f"{fence[0][: fence.start('body') - fence.start()]}{_console(fence['body'], scratch, page)}```\n"
            continue
        yield fence[0]
        if (title := re.search(r'title="([^"]+)"', fence["rest"])) is not None:
            target = scratch.folder / title[1]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(fence["body"], encoding="utf-8")
            if title[1] == "pyproject.toml":
                _install(scratch.folder, tomllib.loads(fence["body"])["project"])
            _forget(scratch.folder)
            continue
        if fence["kind"] != "python":
            continue
        printed = _python(fence["body"], scratch, f"{page}:{text[: fence.start()].count(chr(10)) + 1}")
        if (output := _OUTPUT.match(text, at)) is not None:
            at = output.end()
        if printed:
            yield f"\n```text\n{_stable(printed, scratch)}```\n"
    yield text[at:]


def _install(folder: Path, project: Mapping[str, Any]) -> None:
    """The metadata of a distribution whose modules lie in ``folder``: its name, its version, its entry points."""
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in named.items())
        for group, named in project.get("entry-points", {}).items()
    )
    (info / "entry_points.txt").write_text("".join(groups))


def _python(source: str, scratch: Scratch, where: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, where, "exec"), scratch.namespace)
    return printed.getvalue()


def _console(body: str, scratch: Scratch, page: str) -> str:
    lines = []
    for command in (line[2:] for line in body.splitlines() if line.startswith("$ ")):
        _forget(scratch.folder)  # a command before it may have changed a file
        printed = _stable(_run(command), scratch)
        if "fp8-oracle: error:" in printed and SHOWN not in command:
            raise ValueError(f"{page}: `{command}` cannot be carried out: {printed}")
        lines += [f"$ {command}", *printed.rstrip("\n").splitlines()]
    if not lines:
        raise ValueError(f"{page}: a console fence without a line that begins with $")
    return "\n".join(lines) + "\n"


def _run(command: str) -> str:
    """What a command prints. Ours and pytest run in this process, which has everything loaded already; ours in one of
    their own where the page has installed a distribution, whose routines this process has not loaded."""
    first, _, rest = command.partition(" | ")
    words = shlex.split(first.removesuffix(SHOWN))
    if words[0] == "fp8-oracle":
        installed = any(Path.cwd().glob("*.dist-info"))
        text = _apart(words[1:]) if installed else _in_process(_ours, words[1:])
    elif words[:3] == ["python", "-m", "pytest"]:
        text = _in_process(_pytest, words[3:])
    else:
        return _shell(command)
    return _shell(rest, text) if rest else text


def _shell(command: str, text: str | None = None) -> str:
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, input=text)
    return done.stdout + done.stderr


def _apart(arguments: list[str]) -> str:
    from tests.support.forked import forked, load_again

    def action() -> int:
        load_again(str(Path.cwd()))
        return _ours(arguments)

    with tempfile.TemporaryFile() as printed:
        forked(action, stdout=printed.fileno(), stderr=printed.fileno()).wait()
        printed.seek(0)
        return printed.read().decode()


def _in_process(run: Callable[[list[str]], object], arguments: list[str]) -> str:
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        contextlib.suppress(SystemExit),  # how argparse ends --help, and a mistake
    ):
        run(arguments)
    return printed.getvalue()


def _ours(arguments: list[str]) -> int:
    from oracle.cli import main as command_line

    return command_line(arguments)


def _pytest(arguments: list[str]) -> object:
    import pytest

    # The package is loaded before pytest could rewrite its assertions; a reader's pytest is not.
    return pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments])


def _stable(text: str, scratch: Scratch) -> str:
    for folder, said in ((f"{scratch.folder}{os.sep}", ""), (str(scratch.folder), "."), (str(ROOT), "REPOSITORY")):
        text = text.replace(folder, said)
    for pattern, said in _DURATIONS:
        text = re.sub(pattern, said, text)
    return "\n".join(line.rstrip() for line in text.rstrip("\n").split("\n")) + "\n"


def _surroundings() -> None:
    """What the pages take for granted: our commands on the path, the stored captures, plain text 100 columns wide."""
    # the checkout before its tests, whose folder `kernels` would be taken for the package
    sys.path[:0] = [str(DOCS), str(ROOT), str(ROOT / "tests")]
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    os.environ.update(
        COLUMNS=WIDTH,
        LC_ALL="C.UTF-8",
        NO_COLOR="1",
        TERM="dumb",
        PYTHONPATH="",
        PYTHONDONTWRITEBYTECODE="1",
        FP8_ORACLE_FIXTURES=str(ROOT / "fixtures"),
        OMP_NUM_THREADS="1",
        PYTEST_ADDOPTS="-p no:cacheprovider",
    )
    import torch

    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
