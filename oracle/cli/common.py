"""What several commands share: consoles, ``name=value`` arguments, JSON output, a verdict in a line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from oracle.diagnosis.level import Explain
from oracle.errors import OptionError
from oracle.fixtures import files as fixtures
from oracle.numbers import recipe_table
from oracle.report.console import STYLES
from oracle.report.files import to_json, to_junit, to_markdown
from oracle.report.html import to_html
from oracle.report.outcome import Report, printable
from oracle.report.sarif import to_annotations, to_sarif
from oracle.routines import get
from oracle.verdict.compare import Verdict

# argparse has no public name for what add_subparsers returns.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
CALLED = (
    "A kernel is called as f(**inputs, **options), by the names of the contract's inputs and options. Left out are the "
    "optional inputs that a call lacks, the options that it does not set, and options for which the kernel has no "
    "parameter. A dtype is a torch.dtype. The kernel returns the tensor, or the outputs as a tuple in the order of the "
    "contract or as a dict by name; or it has a parameter out, writes the output out into that and returns None. It "
    "raises NotImplementedError for a call that it does not take."
)
PIPE_WIDTH = 160  # columns of a table that does not go to a terminal
FORMATS: Mapping[str, tuple[Callable[[Report], str], str]] = {
    "json": (to_json, "write the report as JSON; `-` is the standard output"),
    "junit": (to_junit, "write the report as JUnit XML"),
    "markdown": (to_markdown, "write a summary for a pull request; `-` is the standard output"),
    "html": (to_html, "write one self-contained page: pictures of what fails, every case, provenance"),
    "sarif": (to_sarif, "write what fails as SARIF 2.1.0, each at the line of its kernel, for code scanning"),
    "annotations": (to_annotations, "write what fails as annotations of GitHub Actions; `-` is the standard output"),
}


class _Console(Console):
    """A console that shows control characters of others as ``?``, and raises on a closed pipe.

    :func:`oracle.cli.main` handles that; rich would exit with status 1.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)  # control: rich's own

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for the table when there is none."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return _Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def say(text: str, *, stderr: bool = False) -> None:
    """Print lines that may quote a file or a kernel."""
    print(printable(text), file=sys.stderr if stderr else sys.stdout)


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], said: str, more: str | None = None
) -> argparse.ArgumentParser:
    """A command that ``run`` carries out, with its help and description."""
    command = commands.add_parser(name, help=said, description=more)
    command.set_defaults(run=run)
    return command


def repeated(command: argparse.ArgumentParser, flag: str, metavar: str, said: str) -> None:
    """A flag that may be given several times, each with a value."""
    command.add_argument(flag, action="append", default=[], metavar=metavar, help=said)


def whole(least: int) -> Callable[[str], int]:
    """A type of argparse: an integer that is at least ``least``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return parse


def pairs(given: Sequence[str], flag: str) -> dict[str, str]:
    """``["k=v", ...]`` as a dict; OptionError for a text of another form or a name that occurs twice."""
    result: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise OptionError(f"{flag} {text!r} is not of the form name=value")
        if name in result:
            raise OptionError(f"{flag} gives {name!r} twice")
        result[name] = value
    return result


def add_recipe(command: argparse.ArgumentParser) -> None:
    """``--recipe NAME``, whose value :func:`declared` reads."""
    command.add_argument(
        "--recipe", metavar="NAME", help="the recipe that a quantiser declares, as lmdeploy_1x128 (docs: numerics)"
    )


def declared(arguments: argparse.Namespace) -> str | None:
    """The declared numerics: a schedule (``--numerics``), or a quantiser's recipe (``--recipe``).

    Raises OptionError: both are given, or the recipe is declared for a contract that publishes no codes and scale.
    NumericsError: no recipe has this name; the message lists those that exist.
    """
    recipe: str | None = arguments.recipe
    numerics: str | None = arguments.numerics
    if recipe is None:
        return numerics
    if numerics is not None:
        raise OptionError(f"--recipe {recipe} and --numerics {numerics}: a quantiser declares one of them, its recipe")
    recipe_table.get(recipe)
    if arguments.contract is not None and get(arguments.contract).returns != ("q", "scale"):
        option_names = ", ".join(spec.name for spec in get(arguments.contract).options)
        hint = "; its option recipe names one" if "recipe" in option_names.split(", ") else ""
        raise OptionError(f"--recipe {recipe}: {arguments.contract} publishes no codes and scale{hint}")
    return recipe


def add_explain_level(command: argparse.ArgumentParser) -> None:
    """``--explain LEVEL``, a level of :mod:`oracle.diagnosis.level`."""
    text = "how much is said of why an output fails: nothing, the first known fault that holds (default), or everything"
    command.add_argument("--explain", choices=[str(level) for level in Explain], default=str(Explain.QUICK), help=text)


def add_jobs(command: argparse.ArgumentParser) -> None:
    """``--jobs N``, for :func:`oracle.harness.jobs.in_order`."""
    text = "processes that judge at the same time (default: 1); what is written is the same with any number"
    command.add_argument("--jobs", type=whole(1), default=1, metavar="N", help=text)


class Bar:
    """A bar with what runs, the rate and the time that is left; nothing where the output is no terminal. ``total`` is
    None for what has no end."""

    def __init__(self, screen: Console, total: int | None) -> None:
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self._bar = Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)
        self._task = self._bar.add_task("", total=total, rate="")

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def runs(self, what: str) -> None:
        """Say what runs now."""
        self._bar.update(self._task, description=what)

    def advance(self) -> None:
        """One more is done."""
        self._bar.advance(self._task)
        speed = self._bar.tasks[0].finished_speed or self._bar.tasks[0].speed
        self._bar.update(self._task, rate="" if not speed else f"{speed:.3g}/s")


def add_output_arguments(command: argparse.ArgumentParser) -> None:
    """The reports of a run, which :func:`write_reports` writes."""
    for name, (_, text) in FORMATS.items():
        command.add_argument(f"--{name}", metavar="FILE", help=text)


def add_volume_arguments(command: argparse.ArgumentParser) -> None:
    """``--quiet`` and ``--verbose``."""
    volume = command.add_mutually_exclusive_group()
    volume.add_argument("-q", "--quiet", action="store_true", help="only what fails, and the closing line")
    volume.add_argument("-v", "--verbose", action="store_true", help="a line for every case")


def screen_of(arguments: argparse.Namespace) -> Console:
    """The console; standard error where a report goes to the standard output."""
    return console(stderr=any(getattr(arguments, name) == "-" for name in FORMATS))


def write_reports(report: Report, arguments: argparse.Namespace, *, but: Sequence[str] = ()) -> None:
    """Write every report that is asked for, ``but`` those that the command writes itself."""
    for name, (form, _) in FORMATS.items():
        if name not in but and (target := getattr(arguments, name)) is not None:
            write_text(target, form(report))


def add_json(command: argparse.ArgumentParser, what: str) -> None:
    """``--json FILE``, whose value :func:`write_json` takes."""
    command.add_argument("--json", metavar="FILE", help=f"write {what} as JSON; `-` is the standard output")


def write_json(target: str | None, record: Mapping[str, object]) -> None:
    """Write a record as JSON into a file; ``-`` is the standard output, indented; None writes nothing."""
    if target == "-":
        print(json.dumps(record, indent=2, allow_nan=False))
    elif target is not None:
        fixtures.write_json(target, record)


def write_text(target: str, text: str) -> None:
    """Write a text into a file, or to the standard output for ``-``."""
    if target == "-":
        print(text, end="")
    else:
        fixtures.write_bytes(target, text.encode())


def verdict_line(verdict: Verdict, text: str) -> Text:
    """The status in its colour, a text, then what explains a failure, the measured error and the loss,
    each on a line."""
    line = Text.assemble((str(verdict.status), STYLES[verdict.status]), f" {text}")
    for why in verdict.because:
        line.append(f"\n  {why}")
    if verdict.error is not None:
        line.append(f"\n  {verdict.error}")
    if verdict.loss is not None:
        line.append(f"\n  {verdict.loss}")
    return line
