"""Where reports go: the flags, and writing what they ask for. Every file is a pure function of the report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from oracle.fixtures import files as fixtures
from oracle.report.files import to_json, to_junit
from oracle.report.html import to_html
from oracle.report.markdown import to_markdown
from oracle.report.outcome import Report

_FORMATS: Mapping[str, tuple[Callable[[Report], str], str]] = {
    "json": (to_json, "write the report as JSON; `-` is the standard output"),
    "junit": (to_junit, "write the report as JUnit XML"),
    "markdown": (to_markdown, "write a summary for a pull request; `-` is the standard output"),
    "html": (to_html, "write one self-contained page: pictures of what fails, every case, provenance"),
}


def add_output_arguments(command: argparse.ArgumentParser) -> None:
    """``--json``, ``--junit``, ``--markdown`` and ``--html``."""
    for name, (_, said) in _FORMATS.items():
        command.add_argument(f"--{name}", metavar="FILE", help=said)


def takes_standard_output(arguments: argparse.Namespace) -> bool:
    """Whether a report goes to the standard output, so that words must not."""
    return any(getattr(arguments, name) == "-" for name in _FORMATS)


def write(report: Report, arguments: argparse.Namespace) -> None:
    """Write every file that was asked for."""
    for name, (form, _) in _FORMATS.items():
        target = getattr(arguments, name)
        if target == "-":
            print(form(report), end="")
        elif target is not None:
            fixtures.write_bytes(target, form(report).encode())
