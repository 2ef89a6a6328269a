"""``fp8-oracle doctor``: what is here, what is usable, and why not.

Looks at this machine: versions, devices, GPU libraries, subjects, fixtures, and the right ``kernels`` package.

A GPU library is imported in a process of its own with a time limit, so that one which crashes or hangs while it
loads is a finding and not the end. Nothing is downloaded or compiled.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Literal

import torch
from rich.table import Table

from oracle.cli.common import Commands, console
from oracle.errors import FixtureError
from oracle.fixtures import captures
from oracle.fixtures import files as fixtures
from oracle.harness import subjects
from oracle.report import ledger

# Import names and what they are for; each is optional.
OPTIONAL = {
    "triton": "our own quantisation kernels",
    "deep_gemm": "install sgl-deep-gemm; PyPI's deep-gemm 1.0.0 is an unofficial upload",
    "flashinfer": "install flashinfer-python",
    "vllm": "vLLM's compiled operators",
}
IMPORT_SECONDS = 60


@dataclass(frozen=True)
class Finding:
    """One line of the examination; ``absent`` is no problem, only a fact."""

    what: str
    state: Literal["ok", "absent", "problem"]
    said: str


def examine(fixtures_folder: str | None = None) -> list[Finding]:
    """Every finding, in the order in which a reader needs them."""
    return [
        *_versions(),
        *_devices(),
        our_kernels(),
        *_optional(),
        *_subjects(),
        *_fixtures(fixtures_folder),
    ]


def our_kernels(search: list[str] | None = None) -> Finding:
    """Whether ``import kernels`` finds the package that belongs to this distribution.

    Parameters
    ----------
    search : folders to look through instead of ``sys.path``.
    """
    ours = Path(__file__).resolve().parents[2] / "kernels"
    spec = (
        importlib.util.find_spec("kernels")
        if search is None
        else importlib.machinery.PathFinder.find_spec("kernels", search)
    )
    if spec is None or not spec.origin:
        return Finding("kernels", "problem", f"not importable; expected {ours}; install with pip install -e .")
    found = Path(spec.origin).resolve().parent
    if found != ours:
        owner = ", ".join(packages_distributions().get("kernels", [])) or "no known distribution"
        said = (
            f"another package named kernels is imported instead of ours: {found} (of {owner}); Hugging Face's "
            "`kernels` on PyPI has the same name: uninstall it, or use a virtual environment without it"
        )
        return Finding("kernels", "problem", said)
    return Finding("kernels", "ok", str(found))


def _versions() -> Iterator[Finding]:
    yield Finding("python", "ok", sys.version.split()[0])
    try:
        yield Finding("fp8-oracle", "ok", version("fp8-oracle"))
    except PackageNotFoundError:
        yield Finding("fp8-oracle", "problem", "not installed, so no subject is registered: pip install -e .")
    for package in ("torch", "numpy", "numba", "safetensors", "rich"):
        yield Finding(package, "ok", version(package))


def _devices() -> Iterator[Finding]:
    yield Finding("cpu", "ok", f"{torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda or torch.version.hip else " (this torch is built for the CPU)"
        yield Finding("gpu", "absent", f"torch sees no device{built}; captures are replayed, nothing runs live on one")
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield Finding(f"gpu {index}", "ok", f"{torch.cuda.get_device_name(index)}, sm{major}{minor}")


def _optional() -> Iterator[Finding]:
    for name, purpose in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            yield Finding(name, "absent", f"not installed ({purpose})")
            continue
        code = f"import {name}; print(getattr({name}, '__version__', 'version unknown'))"
        try:
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            yield Finding(name, "problem", f"import takes longer than {IMPORT_SECONDS} s")
            continue
        if done.returncode == 0:
            yield Finding(name, "ok", next(iter(done.stdout.splitlines()[-1:]), "version unknown"))
        else:
            last = next(iter(done.stderr.strip().splitlines()[-1:]), f"exit status {done.returncode}")
            yield Finding(name, "problem", f"installed, but import fails: {last}")


def _subjects() -> Iterator[Finding]:
    providers = subjects.providers()
    if not providers:
        yield Finding("subjects", "problem", f"no entry point in group {subjects.GROUP}: pip install -e .")
    for provider in providers:
        if provider.problem is not None:
            yield Finding("subjects", "problem", provider.problem)
        for subject in provider.subjects:
            reason = subject.why_not()
            what = f"{subject.contract} [{subject.name}, {subject.arch}]"
            yield Finding(what, "ok" if reason is None else "absent", reason or f"declares {subject.numerics}")


def _fixtures(given: str | None) -> Iterator[Finding]:
    try:
        folder = fixtures.folder(given)
        count = len(captures.load(folder / "captures"))
        known = len(ledger.load(folder / ledger.FILE))
    except FixtureError as error:
        yield Finding("fixtures", "problem", str(error))
    else:
        yield Finding("fixtures", "ok", f"{folder}: {count} captures, {known} known failures")


def add(commands: Commands) -> None:
    command = commands.add_parser("doctor", help="what is importable and usable here, and why not")
    command.add_argument("--fixtures", metavar="DIR", help="the fixtures folder")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    findings = examine(arguments.fixtures)
    table = Table(title="doctor", title_justify="left")
    table.add_column("what")
    table.add_column("state")
    table.add_column("found, or why not", overflow="fold")
    styles = {"ok": "green", "absent": "dim", "problem": "bold red"}
    for finding in findings:
        table.add_row(finding.what, finding.state, finding.said, style=styles[finding.state])
    console().print(table)
    return 1 if any(finding.state == "problem" for finding in findings) else 0
