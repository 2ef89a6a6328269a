"""The pytest plugin: verdicts inside another project's tests.

    def test_gemm(assert_conforms):
        assert_conforms(out, "cutlass_scaled_mm", {"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale}, arch="sm90")

    @pytest.mark.oracle_cases("cutlass_scaled_mm", profile="quick")
    def test_gemm_cases(oracle_case, assert_conforms):
        assert_conforms(my_gemm(**oracle_case.inputs()), oracle_case, arch="sm90")

Fixtures ``assert_conforms`` and ``oracle_case``, marker ``oracle_cases``, options ``--oracle-profile``,
``--oracle-explain`` and ``--oracle-report FILE`` (a record, :mod:`oracle.report.record`). A failure prints the words of
``fp8-oracle verify``.
MISTRUSTED is a :class:`MistrustedWarning`, which ``-W error::oracle.pytest_plugin.MistrustedWarning`` turns into a
failure. A test that takes a case and judges nothing fails.

Verdicts are attributes of pytest's own test reports, so with pytest-xdist the controller alone writes the file, one
line at a time as tests end; a killed run leaves the lines that it wrote.

Importing this file loads neither torch nor any other part of the suite; the first verdict or marked test does.
Not covered: running a kernel in a process of its own (pytest-xdist restarts a worker that dies).
"""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import pytest

from oracle.diagnosis.level import explain_level, explaining
from oracle.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

    from oracle.routines.cases import Case
    from oracle.verdict.compare import Verdict

CASE = "oracle_case"
MARKER = "oracle_cases"
DEFAULT_PROFILE = "quick"
_LINES = pytest.StashKey[list[dict[str, object]]]()
_JUDGED = pytest.StashKey[int]()
_running: list[pytest.Item] = []  # the test that runs now; more than one when pytest runs inside a test


class NonConforming(AssertionError):
    """An output that its contract does not admit; ``verdict`` is the verdict on it."""

    def __init__(self, message: str, verdict: Verdict) -> None:
        super().__init__(message)
        self.verdict = verdict


class MistrustedWarning(pytest.PytestWarning):
    """Nothing is wrong with an output, but these inputs could not have shown it."""


def assert_conforms(
    output: Tensor | Mapping[str, Tensor],
    contract: str | Case,
    inputs: Mapping[str, Tensor] | None = None,
    *,
    arch: str,
    numerics: str | None = None,
    **options: object,
) -> Verdict:
    """Judge one output and fail the test unless it is admissible.

    Works outside pytest as well; inside, the verdict goes into the report of the running test.

    Parameters
    ----------
    output : Tensor or mapping of str to Tensor
        What the kernel returned; a mapping for a contract with several outputs.
    contract : str or Case
        A name of :func:`oracle.contracts`, or a case, which has inputs and options.
    inputs : mapping of str to Tensor, optional
        The operands under the contract's names. Left out for a case: they are made again from its id, so a kernel
        that overwrote its operands is judged by what it was given.
    arch : str
        Whose arithmetic is admitted: ``"sm90"``, ``"cpu"``...
    numerics : str, optional
        The declared schedule; None admits what the contract's kernels use on ``arch``.
    **options
        Options of the contract, as ``out_dtype=torch.bfloat16``.

    Returns
    -------
    Verdict
        PASSED or MISTRUSTED; the latter also warns.

    Raises
    ------
    NonConforming
        The output is not admissible, or cannot be judged (wrong dtype, shape or device).
    OracleError
        The question is wrong: contract, inputs or options.
    """
    __tracebackhide__ = True
    from oracle.cli import pytest_outcome
    from oracle.harness import sources
    from oracle.verdict.compare import Status

    item = _running[-1] if _running else None
    ordinal = 1 if item is None else item.stash[_JUDGED] + 1
    test = "" if item is None else item.nodeid
    source = "" if item is None else sources.place(item.path, (item.location[1] or 0) + 1)
    outcome = pytest_outcome.judge(
        output, contract, inputs, arch=arch, numerics=numerics, given=options, test=test, source=source, ordinal=ordinal
    )
    if item is not None:
        item.stash[_JUDGED] = ordinal
        item.stash[_LINES].append(pytest_outcome.line(outcome))
    verdict, said = outcome.verdict, outcome.words
    if verdict.status.is_failure:
        raise NonConforming(said, verdict)
    if verdict.status is Status.MISTRUSTED:
        warnings.warn(MistrustedWarning(said), stacklevel=2)
    return verdict


# --- fixtures and cases ---------------------------------------------------------------------------------------


@pytest.fixture(name="assert_conforms")
def _assert_conforms() -> Callable[..., Verdict]:
    """assert_conforms(output, contract_or_case, inputs=None, *, arch, numerics=None, **options): judge one output.

    Fails the test, with the words of `fp8-oracle verify`, unless the output is admissible; returns the verdict.
    """
    return assert_conforms


@pytest.fixture(name=CASE)
def _oracle_case(request: pytest.FixtureRequest) -> Case:
    """One case of the contract that the mark oracle_cases names: .inputs(), .call_options(), .out_dtype, ["m"]."""
    said = f"{request.node.name} takes {CASE} but is not marked; add @pytest.mark.{MARKER}('cutlass_scaled_mm')"
    pytest.fail(said, pytrace=False)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise ``oracle_case`` over the cases that the markers name."""
    markers = list(metafunc.definition.iter_markers(MARKER))
    if not markers:
        return
    if CASE not in metafunc.fixturenames:
        if any(mark.name == MARKER for mark in metafunc.definition.own_markers):
            pytest.fail(f"{metafunc.function.__name__} is marked {MARKER} but takes no {CASE}", pytrace=False)
        return
    from oracle.cli import pytest_outcome
    from oracle.errors import OracleError

    profile = metafunc.config.getoption("oracle_profile") or DEFAULT_PROFILE
    try:
        found = dict.fromkeys(
            case for mark in reversed(markers) for case in pytest_outcome.marked(profile, *mark.args, **mark.kwargs)
        )
    except (OracleError, TypeError) as error:
        pytest.fail(f"@pytest.mark.{MARKER} of {metafunc.function.__name__}: {error}", pytrace=False)
    metafunc.parametrize(CASE, list(found), ids=[str(case) for case in found])


# --- hooks ----------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fp8-oracle", "verdicts on FP8 kernels")
    group.addoption(
        "--oracle-profile",
        metavar="NAME",
        help=f"profile of the {MARKER} markers that name none (default: {DEFAULT_PROFILE}); "
        "`fp8-oracle verify --help` lists the profiles",
    )
    group.addoption(
        "--oracle-explain",
        metavar="LEVEL",
        help="how much a failing verdict says of why: off, quick (default) or full",
    )
    group.addoption("--oracle-report", metavar="FILE", help="write a record of every verdict into FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARKER}(contract, *, profile=None, cases=None, where=None): run the test once for each case of a contract; "
        f"the test takes `{CASE}`. profile: quick, full (default: --oracle-profile); cases: ids instead of a profile; "
        "where: keeps the cases for which it is true",
    )
    try:
        explain_level(config.getoption("oracle_explain"))
    except OptionError as error:
        raise pytest.UsageError(f"--oracle-explain: {error}") from None
    if (profile := config.getoption("oracle_profile")) is not None:
        from oracle.routines import profiles

        if profile not in profiles.PROFILES:
            raise pytest.UsageError(f"--oracle-profile {profile}: there are {', '.join(profiles.PROFILES)}")
    if not hasattr(config, "workerinput"):  # pytest-xdist's workers leave the report to their controller
        config.pluginmanager.register(_Reporter(config.getoption("oracle_report")), "fp8_oracle_reporter")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note which test runs."""
    _running.append(item)
    try:
        with explaining(item.config.getoption("oracle_explain")):
            return (yield)
    finally:
        _running.remove(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_LINES], item.stash[_JUDGED] = [], 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test that took a case must have judged something."""
    result = yield
    if CASE in getattr(item, "fixturenames", ()) and not item.stash[_JUDGED]:
        said = f"{item.name} took {CASE} and judged no output; call assert_conforms(output, {CASE}, arch=...)"
        pytest.fail(f"UNTESTED: {said}", pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the verdicts to the report, which pytest-xdist sends to its controller."""
    report = yield
    if lines := item.stash.get(_LINES, []):
        from oracle.cli import pytest_outcome

        if report.skipped and hasattr(report, "wasxfail"):
            lines = [pytest_outcome.known(line, report.wasxfail) for line in lines]
        # A report takes any JSON-ready attribute. The first line of a record is attached too: the controller writes it.
        report.__dict__["fp8_oracle"] = {"run": pytest_outcome.this_run().to_json(), "lines": lines}
        item.stash[_LINES] = []
    return report


class _Reporter:
    """Writes the report and the closing line, in the process that the user started."""

    def __init__(self, path: str | None) -> None:
        self.path = None if path is None else Path(path)
        self.counts: Counter[str] = Counter()
        self.start = time.perf_counter()
        self.stream: TextIO | None = None
        if self.path is not None:
            try:
                self.stream = self.path.open("w", encoding="utf-8", buffering=1)
            except OSError as error:
                raise pytest.UsageError(f"--oracle-report {path}: cannot be written ({error.strerror})") from None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = getattr(report, "fp8_oracle", None)
        if found is None:
            return
        if not self.counts:
            self._write(found["run"])
        for line in found["lines"]:
            known = line["outcome"]["known_failure"] is not None
            self.counts["KNOWN" if known else line["outcome"]["verdict"]["status"]] += 1
            self._write(line)

    def pytest_sessionfinish(self) -> None:
        if self.counts:
            seconds = round(time.perf_counter() - self.start, 3)
            self._write({"kind": "end", "complaints": [], "seconds": seconds, "unfinished": 0})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.counts:
            counted = ", ".join(f"{count} {status.lower()}" for status, count in sorted(self.counts.items()))
            where = "" if self.path is None else f"; {self.path}"
            terminalreporter.write_line(f"fp8-oracle: {self.counts.total()} verdicts: {counted}{where}")

    def pytest_unconfigure(self) -> None:
        if self.stream is not None:
            self.stream.close()

    def _write(self, line: Mapping[str, object]) -> None:
        if self.stream is not None:
            self.stream.write(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")
