"""The documentation: what it shows is what the code does now; every page is in the menu; the site needs no network."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import oracle
from oracle.errors import NumericsError
from oracle.tensorcore.schedules import get as schedule
from tests.support.browser import launched, needs_chromium
from tests.support.forked import forked, load_again

PARTS = 4  # of the pages that show what is read off the code
RIGHT = """# A page

<!-- generated: statuses -->
<!-- /generated -->

```python
x = 1
print(x + 1)
```

```python title="hello.py"
print("from a file")
```

```console
$ python hello.py
$ fp8-oracle --version
$ fp8-oracle plan --op nothing 2>&1 | cut -d ';' -f 1
```

<!-- requires: no-such-tool -->
```console
$ no-such-tool
what it printed where it was
```
"""


def pages_of(root: Path, *folders: str) -> list[str]:
    """The pages of some folders of ``docs``, by the names that the generator takes."""
    docs = root / "docs"
    return sorted(str(page.relative_to(docs)) for folder in folders for page in (docs / folder).glob("*.md"))


def generate(root: Path, *arguments: str) -> tuple[int, str]:
    """Run the generator in a process of its own, which loads the package again: its status and what it printed."""

    def action() -> int:
        os.chdir(root)
        load_again()
        sys.argv = [str(root / "docs" / "generate.py"), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0

    with tempfile.TemporaryFile() as said:
        status = forked(action, stdout=said.fileno(), stderr=said.fileno()).wait()
        said.seek(0)
        return status, said.read().decode()


def generate_here(root: Path, *arguments: str) -> tuple[int, str]:
    """Run the generator in this process, which has everything loaded: its status and what it printed."""
    environment, path, printed = dict(os.environ), list(sys.path), io.StringIO()
    sys.path.insert(0, str(root / "docs"))
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            status = importlib.import_module("generate").main([*arguments])
    finally:
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)
    return status, printed.getvalue()


# name of the page: what stands in it, what stands there instead, what the check must say
BROKEN = {
    "output.md": ("```text\n2\n", "```text\n3\n", "-3"),
    "table.md": ("| `CRASHED` | yes |", "| `CRASHED` | no |", "-| `CRASHED` | no | yes |"),
    "console.md": ("from a file\n$", "from nowhere\n$", "-from nowhere"),
    "example.md": ("print(x + 1)", "print(x + 4)", "+5"),
    "raises.md": ("print(x + 1)", "print(y)", "raises.md: Traceback"),
    "block.md": ("generated: statuses", "generated: moods", "no generated block 'moods'"),
    "command.md": ("fp8-oracle --version", "fp8-oracle plan --op nothing", "cannot be carried out: fp8-oracle: error"),
}


@pytest.fixture(scope="class")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A page that was made, and what a check prints about its broken copies."""
    folder, root = tmp_path_factory.mktemp("docs"), Path(__file__).resolve().parents[2]
    (folder / "right.md").write_text(RIGHT)
    status, printed = generate_here(root, "--docs", str(folder))
    assert status == 0, printed
    text = (folder / "right.md").read_text()
    for name, (right, wrong, _) in BROKEN.items():
        assert right in text
        (folder / name).write_text(text.replace(right, wrong, 1))
    status, printed = generate_here(root, "--check", "--docs", str(folder))
    assert status == 1
    for name, (right, wrong, _) in BROKEN.items():
        assert (folder / name).read_text() == text.replace(right, wrong, 1), "a check writes nothing"
    return text, printed


def unsaid(function: Callable[..., object]) -> list[str]:
    """The parameters and sections that a docstring lacks; what it takes as another function does is said there."""
    said = inspect.getdoc(function) or ""
    names = [] if "with the same arguments" in said else list(inspect.signature(function).parameters)
    missing = [name for name in names if not re.search(rf"\b{name}\b", said)]
    missing += [section for section in ("Returns", "Raises") if f"{section}\n--" not in said]
    return [f"{function.__name__}: {part}" for part in missing]


class TestPages:
    """Outputs, tables and signatures are produced from the code; examples are executed."""

    @pytest.mark.turns(2)
    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("part", range(PARTS))
    def test_up_to_date(self, root: Path, part: int) -> None:
        """What is read off the code: contracts, commands, faults, signatures. A part of the pages in each turn."""
        status, said = generate(root, "--check", *pages_of(root, "reference", "explanation")[part::PARTS])
        assert status == 0, said[-4000:]

    @pytest.mark.repeats("TestPages::test_up_to_date")
    def test_executed_pages(self, root: Path) -> None:
        """Pages whose examples run: the tutorial, the findings, each how-to."""
        status, said = generate(root, "--check", *pages_of(root, "how-to", "."))
        assert status == 0, said[-4000:]

    def test_what_is_made(self, pages: tuple[str, str]) -> None:
        shown = "$ python hello.py\nfrom a file\n$ fp8-oracle", "error: unknown op"
        for part in ("| `CRASHED` | yes | yes |", "```text\n2\n```", *shown):
            assert part in pages[0]

    @pytest.mark.parametrize("name", BROKEN)
    def test_what_is_stale_is_found(self, pages: tuple[str, str], name: str) -> None:
        assert BROKEN[name][2] in pages[1]

    def test_what_is_right_is_left_alone(self, pages: tuple[str, str]) -> None:
        assert "right.md (stored)" not in pages[1]

    def test_durations_are_left_out(self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of what a command prints; a number of the output stays."""
        monkeypatch.syspath_prepend(root / "docs")
        stable, scratch = importlib.import_module("generate")._stable, SimpleNamespace(folder=tmp_path)
        printed = '3 passed in 4.71s\nOK  1 passed; 0.3 s\n<testsuites time="12.5">\n0.25 dB\n'
        left = '3 passed in … s\nOK  1 passed; … s\n<testsuites time="…">\n0.25 dB\n'
        assert stable(printed, scratch) == left

    def test_what_a_reader_must_not_miss(self, root: Path) -> None:
        """The tutorial shows the sentence that names the fault, and the schedule that a page adds is not there yet."""
        shown = (root / "docs" / "tutorial.md").read_text().split("--save failing.safetensors")[1].partition("```")[0]
        assert re.search("^  explained by: A scale of K block 0 throughout", shown, re.MULTILINE)
        assert "DOES NOT CONFORM" in shown and "  repro: " not in shown
        page = (root / "docs" / "how-to" / "schedule.md").read_text()
        (added,) = re.findall(r"replace\(known, name=\"([\w.]+)\"", page)
        assert schedule("sm90.promote128").name == "sm90.promote128"
        with pytest.raises(NumericsError, match="no schedule"):
            schedule(added)

    def test_the_name_of_the_layer_in_its_wheel(self, root: Path) -> None:
        """A page that imports the layer of a checkout says how that of the wheel is called."""
        pages = [page.read_text() for page in sorted((root / "docs" / "how-to").glob("*.md"))]
        using = [text for text in pages if re.search(r"^(import|from) kernels\b", text, re.MULTILINE)]
        assert len(using) >= 2 and all("fp8_oracle_kernels" in text for text in using)

    def test_private_names(self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Names of others that begin with an underscore, also by their text; not those of the package itself."""
        monkeypatch.syspath_prepend(root / "docs")
        blocks = importlib.import_module("blocks")
        del sys.modules["blocks"]  # it holds the package as it is here; children of later tests load another
        (tmp_path / "own.py").write_text("import torch\nfrom ._launch import _x\nself._y\ntorch.mm(_x)\n")
        assert blocks.private_names(str(tmp_path)).count("\n") == 1
        (tmp_path / "others.py").write_text(
            "import torch as t\nfrom a._b import c\nt._C._d\ngetattr(t, '_e')\nt.__version__\n"
        )
        assert "`_e`, `a._b.c`, `t._C._d` |" in blocks.private_names(str(tmp_path))

    def test_docstrings(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A sentence in the first line; a type and a description of each parameter; nothing else among them."""
        monkeypatch.syspath_prepend(root / "docs")
        blocks, said = importlib.import_module("blocks"), "One line.\n\nParameters\n----------\n{}"
        made = blocks._markdown(said.format("x : Tensor, optional\n    The input.\ny : the output, of a\n    dtype."))
        assert made.endswith("- `x` (Tensor, optional): The input.\n- `y`: the output, of a dtype.")
        with pytest.raises(ValueError, match="names none"):
            blocks._markdown(said.format("x : Tensor\n\nReturns the output, as it is."))
        assert blocks._whole("f", "One line.\n\nMore.") and blocks.api("oracle.judge")
        with pytest.raises(ValueError, match="no whole sentence in its first line: 'One line,'"):
            blocks._whole("f", "One line,\nand more.")

    def test_a_distribution_of_a_page_is_installed(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its name and its entry points are found where its modules lie; without a name it is none."""
        monkeypatch.syspath_prepend(root / "docs")
        install = importlib.import_module("generate")._install
        install(tmp_path, {"name": "relu2", "version": "1.0", "entry-points": {"fp8_oracle.families": {"a": "b:C"}}})
        (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
        points = {(point.group, point.name, point.value) for point in found.entry_points}
        assert (found.name, points) == ("relu2", {("fp8_oracle.families", "a", "b:C")})
        with pytest.raises(KeyError, match="name"):
            install(tmp_path, {"version": "1.0"})

    def test_public_functions(self) -> None:
        """Each names its parameters, what it returns and what it raises; the negative test: one that does not."""
        functions = [thing for name in oracle.__all__ if inspect.isfunction(thing := getattr(oracle, name))]
        assert len(functions) > 10 and not [said for thing in functions for said in unsaid(thing)]

        def vague(inputs: object, out: object = None) -> None:
            """Compute ``inputs``.

            Raises
            ------
            ValueError
            """

        assert unsaid(vague) == ["vague: out", "vague: Returns"]

    def test_a_tool_that_is_not_here_is_named(self, pages: tuple[str, str]) -> None:
        assert "what it printed where it was" in pages[0]
        assert "right.md: no-such-tool is not here; what it prints was not compared" in pages[1]


LOOKED_AT = (
    *(".", "tutorial", "findings", "explanation/others", "explanation/bounds"),
    *(f"reference/{name}" for name in ("benchmarks", "coverage", "measurements", "numerics", "routines")),
    *("reference/gallery", "reference/contracts", "reference/contracts/fp8_gemm_nt"),
)
BUILT = ("fp8_gemm_nt", "nvfp4_quantize", "reshape_and_cache")
"""The contracts whose pages the tests build; `mkdocs build` makes all."""
BOXES = ".md-typeset__scrollwrap, .md-typeset__table, pre, figure.drawing, .md-sidebar"
"""What scrolls by itself."""


@pytest.fixture(scope="class")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built strictly and without a network."""
    for name in ("mkdocs", "material"):
        pytest.importorskip(name, reason="needs the extra `docs`; `tox run` has it")
    root, target = Path(__file__).resolve().parents[2], tmp_path_factory.mktemp("built") / "site"
    arguments = ["build", "--strict", "--site-dir", str(target)]
    nowhere = {"http_proxy": "http://0.0.0.0:1", "https_proxy": "http://0.0.0.0:1"}

    def action() -> int:
        os.chdir(root)
        sys.path[:0] = [str(root), str(root / "tests")]
        load_again("docs")
        from mkdocs.__main__ import cli

        cli(arguments)
        return 0

    with tempfile.TemporaryFile() as said:
        environment = {"NO_MKDOCS_2_WARNING": "1", "CONTRACT_PAGES": ",".join(BUILT)} | nowhere
        status = forked(action, stdout=said.fileno(), stderr=said.fileno(), **environment).wait()
        said.seek(0)
        assert status == 0, said.read().decode()
    return target


BOOK = """# A book

[As a notebook](book.ipynb).

```python
x = 2
print(x)
```

```python
from pathlib import Path

start, said = 7, "t" + "wo"
svg = f'<?xml version="1.0"?><svg><path d="M{start}"/><text x="1">{said}</text></svg>'
Path("drawn.svg").write_text(svg + chr(10))
```

![A picture](pictures/drawn.svg)

The end.
"""


class TestNotebook:
    """A page whose fences are the cells of a notebook, what they print and draw their outputs."""

    def test_what_is_made_and_what_is_stale(self, root: Path, tmp_path: Path) -> None:
        """And the negative tests: another cell, another output, other words in a picture; its lines may differ."""
        (tmp_path / "book.md").write_text(BOOK)
        assert generate_here(root, "--docs", str(tmp_path)) == (
            0,
            "".join(f"{name}: written\n" for name in ("book.md", "pictures/drawn.svg", "book.ipynb")),
        )
        notebook, picture = tmp_path / "book.ipynb", tmp_path / "pictures" / "drawn.svg"
        book = json.loads(notebook.read_text())
        assert [cell["cell_type"] for cell in book["cells"]] == ["markdown", "code", "code", "markdown"]
        assert book["cells"][1]["outputs"][0]["text"] == "2\n"
        assert book["cells"][2]["outputs"][0]["data"]["image/svg+xml"] == picture.read_text()
        check = ("--check", "--docs", str(tmp_path))
        for file, right, wrong, stale in (
            (notebook, "x = 2", "x = 3", True),
            (notebook, '"2\\n"', '"3\\n"', True),
            (notebook, "M7", "M8", False),
            (notebook, ">two<", ">ten<", True),
            (picture, ">two<", ">ten<", True),
            (picture, "M7", "M8", False),
        ):
            text = file.read_text()
            assert right in text
            file.write_text(text.replace(right, wrong))
            assert generate_here(root, *check)[0] == int(stale), (file, wrong)
            file.write_text(text)
        assert generate_here(root, *check) == (0, "")

    def test_the_notebook(self, root: Path) -> None:
        """Small, of a format that every Jupyter reads, without a path of the machine that made it."""
        text = (root / "docs" / "notebook.ipynb").read_text()
        book = json.loads(text)
        assert len(text) < 200_000 and (book["nbformat"], book["nbformat_minor"]) == (4, 4)
        for cell in book["cells"]:
            code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
            assert set(cell) == {"cell_type", "metadata", "source"} | code
        assert text.count('"image/svg+xml": "') == 2 and 'image/png":' not in text and str(root) not in text


@pytest.mark.turns(4)
class TestSite:
    """mkdocs, strictly; nothing is fetched when it is built or read."""

    def test_every_page_is_in_the_menu(self, root: Path) -> None:
        menu = re.findall(r": ([\w/-]+\.md)$", (root / "mkdocs.yml").read_text(), re.MULTILINE)
        pages = [path.relative_to(root / "docs").as_posix() for path in (root / "docs").rglob("*.md")]
        assert sorted(menu) == sorted(pages)

    def test_build(self, site: Path) -> None:
        html = list(site.rglob("*.html"))
        assert len(html) > 15
        fetched = {url for file in html for url in external(file.read_text())}
        assert not fetched
        assert not list(site.rglob("*.py"))

    def test_a_contract_has_a_page(self, site: Path) -> None:
        """With all of its parts, linked from the list, which keeps the address of a name; the others have none."""
        pages = site / "reference" / "contracts"
        assert sorted(path.name for path in pages.iterdir() if path.is_dir()) == sorted(BUILT)
        html = (pages / "fp8_gemm_nt" / "index.html").read_text()
        heads = re.findall(r'<h2[^>]*? id="([\w-]+)"', html)
        parts = ("what-is-right", "inputs", "options", "outputs", "numerics", "releases", "kernels-that-were-judged")
        assert heads == [*parts, "faults", "cases"]
        assert "sm90.promote128" in html and "flag_gems" in html and "row-major A scale read" in html
        listed = (pages / "index.html").read_text()
        assert re.search(r'<a href="fp8_gemm_nt/" id="fp8_gemm_nt">', listed)
        assert "<code>mxfp8_quantize</code>" in listed and 'href="mxfp8_quantize/"' not in listed
        assert 'href="../contracts/fp8_gemm_nt/"' in (site / "reference" / "coverage" / "index.html").read_text()

    @needs_chromium()
    def test_tables_break_no_name_and_nothing_sticks_out(self, site: Path, full: bool) -> None:
        """On a phone, a tablet and two desktops: a name in a table stays in one line, but for rows that are cards on a
        phone, and what is wider than the page scrolls in a box of its own; each check has a negative test. Five pages,
        all of ``LOOKED_AT`` with ``--full``."""
        broken = """[...document.querySelectorAll('td code')].filter(e => !e.closest('.rows')
          && e.getClientRects().length > 1).length"""
        wide = "document.documentElement.scrollWidth > innerWidth"
        out = f"""[...document.querySelectorAll('main *')].filter(e => !e.closest('{BOXES}')
          && e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 1).length"""
        with launched() as browser:
            for width in (390, 768, 1280, 1920):
                window = {"width": width, "height": 844}
                page = browser.new_context(viewport=window).new_page()  # type: ignore[attr-defined]
                for name in LOOKED_AT if full else LOOKED_AT[::3]:
                    page.goto(f"file://{site / name / 'index.html'}")
                    assert page.locator("h1").count() == 1, name
                    found = {what: page.evaluate(what) for what in (broken, wide, out)}
                    assert not any(found.values()), (width, name, found)
            page.set_viewport_size({"width": 390, "height": 844})
            page.add_style_tag(content="td code { white-space: normal !important; word-break: break-all !important }")
            page.evaluate("document.querySelectorAll('td').forEach(e => { e.style.maxWidth = '60px'; })")
            assert page.evaluate(broken)
            page.evaluate("document.querySelector('main h1').style.width = '700px'")
            assert page.evaluate(wide) and page.evaluate(out)

    def test_a_broken_link_stops_the_build(self, root: Path, tmp_path: Path) -> None:
        pytest.importorskip("mkdocs", reason="needs the extra `docs`; `tox run` has it")
        (tmp_path / "mkdocs.yml").write_text((root / "mkdocs.yml").read_text().partition("\nnav:")[0])
        (tmp_path / "docs").mkdir()
        (tmp_path / "docs" / "index.md").write_text("[a page](tutorials.md)\n")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode != 0
        assert "tutorials.md" in done.stderr

    def test_an_external_asset_is_found(self) -> None:
        """The negative test of the check above."""
        assert external('<link rel="stylesheet" href="https://fonts.example/x.css">') == ["https://fonts.example/x.css"]
        assert external('<script src="//cdn.example/x.js"></script>') == ["//cdn.example/x.js"]
        assert external('<img src="http://example/x.png"> <a href="https://example/">read</a>') == [
            "http://example/x.png"
        ]


def external(html: str) -> list[str]:
    """Addresses that a browser would fetch from elsewhere by itself; links to follow are no such."""
    tags = re.findall(r"<(?:link|script|img|iframe|source|video)\b[^>]*>", html)
    kept = [tag for tag in tags if 'rel="canonical"' not in tag]
    return [url for tag in kept for url in re.findall(r"""(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""", tag)]
