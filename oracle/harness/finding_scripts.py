"""Findings in kernels that ship, each a script of its own, run again: is the fault still there?

A script calls a library as its page says and ends with 1 where the fault is there, with 0 where it is healed; anything
else, a traceback or no end in time is a script that did not run (its library is not installed, or it needs a GPU). Its
head is ``PROJECT VERSION, ROUTINE: WHAT HAPPENS.``, and a paragraph that says what it means to a user. Each runs in a
process of its own. The rest of the script is one call of :func:`again`: a binding that calls the routine as its page
says, a case, what is expected, and the inputs in which it differs from the case. A script that stands alone calls what
has no binding or no contract, chooses another configuration, or shows what lies in no output of one call: a stream that
is not waited for, threads, rows that belong to nobody, values that no longer come back, a code that the recipe of the
release gives.

Not covered: what is a finding; scripts that nobody trusts.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

import oracle
from oracle.bindings.binding import Binding
from oracle.bindings.known import find
from oracle.errors import FixtureError, OptionError, among
from oracle.fixtures.strides import laid_out, on_host, run_of
from oracle.harness import starting
from oracle.harness.bound import routine_of
from oracle.harness.validation import arch_of
from oracle.routines import cases

FOLDER = Path("tests/hardware/findings")
"""Of a checkout."""
SECONDS = 300.0
"""Of one script: some libraries compile at first use."""
THERE, HEALED, LEFT = "there", "healed", "did not run"
ENDS = {0: HEALED, 1: THERE}


@dataclass(frozen=True)
class About:
    """The head of a script."""

    project: str
    routine: str
    happens: str
    matters: str


@dataclass(frozen=True)
class Ran:
    """What became of a script: ``status`` is THERE, HEALED or LEFT, ``said`` its last line."""

    name: str
    status: str
    said: str


def about(path: Path) -> About:
    """The head of a script. Raises FixtureError: it has another form."""
    first, _, matters = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")
    project, comma, rest = first.partition(", ")
    routine, colon, happens = rest.partition(": ")
    if not (comma and colon and matters):
        raise FixtureError(
            f"{path.name}: its head is not `PROJECT VERSION, ROUTINE: WHAT.` and what it means to a user"
        )
    return About(project, routine, happens, " ".join(matters.split()))


def scripts(folder: Path, only: Sequence[str] = ()) -> list[Path]:
    """The scripts of a folder by name, or those of ``only``.

    Raises FixtureError: the folder has none. OptionError: one of ``only`` is not there.
    """
    results = {path.stem: path for path in sorted(folder.glob("*.py"))}
    if not results:
        raise FixtureError(f"{folder}: has no script of a finding; name a folder with --folder")
    if unknown := [name for name in only if name not in results]:
        raise OptionError(f"--only {unknown[0]}: {among(unknown[0], results)}")
    return [results[name] for name in only or results]


def run(chosen: Sequence[Path], *, jobs: int = 1, seconds: float = SECONDS) -> Generator[Ran]:
    """What became of each script, as they end; ``jobs`` at a time are begun in their order."""
    with ThreadPoolExecutor(jobs) as pool:
        begun = [pool.submit(_run, path, seconds) for path in chosen]
        yield from (one.result() for one in as_completed(begun))


def again(binding: str | Binding, case: str, expected: str, *, device: str = "cuda", **changed: Tensor) -> NoReturn:
    """Make one call of a routine and end the process: with 1 where its output is inadmissible, with 0 where it is
    right. Prints what is wrong.

    Parameters
    ----------
    binding : ``"MODULE:CALLABLE"`` of a known binding, or one that says how the routine is called here.
    case : an id of its contract.
    expected : words of the reason or of the explanation of the verdict; a failure without them is no such finding, and
        raises FixtureError.
    changed : inputs that take the place of the case's, of the contract's shapes and dtypes, with their strides; NaN and
        infinities are handed on.

    Raises OptionError: the routine has no binding under the contract. Source: the binding.
    """
    one = cases.parse(case)
    known = find(binding, one.contract) if isinstance(binding, str) else binding
    if known is None:
        raise OptionError(f"{binding} has no binding under {one.contract}; give one that is made by bind()")
    routine = routine_of(known)
    inputs, options = {**one.inputs(), **changed}, dict[str, Any](one.call_options())
    supplied = {key: laid_out(run_of(x).to(device), x.shape, x.stride()) for key, x in inputs.items()}
    outputs: Mapping[str, Tensor] = replace(known, dense=())(
        routine, supplied, options
    )  # that a gap is misread is a finding
    output = {key: on_host(x) for key, x in outputs.items()}
    verdict = oracle.judge(one.contract, inputs, output, arch=arch_of(device), explain="full", **options)
    text = "; ".join(filter(None, (verdict.summary, "; or ".join(verdict.explained_by))))
    if verdict.status.is_failure and expected not in text:
        raise FixtureError(f"another failure than {expected!r}: {text}")
    print(text)
    sys.exit(verdict.status.is_failure)


def _run(path: Path, seconds: float) -> Ran:
    try:
        with starting.process(f"the script {path.name}"):
            command = [sys.executable, str(path)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:  # said in its row: neither there nor healed
        return Ran(path.stem, LEFT, f"no end within {seconds:g} s")
    raised = done.returncode not in ENDS or "Traceback (most recent call last)" in done.stderr
    text = (done.stderr if raised else done.stdout).strip().splitlines() or ["it said nothing"]
    return Ran(path.stem, LEFT if raised else ENDS[done.returncode], text[-1])
