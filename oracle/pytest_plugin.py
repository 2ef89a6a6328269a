"""The pytest plugin: verdicts inside another project's tests.

    def test_gemm(assert_conforms):
        assert_conforms(out, "cutlass_scaled_mm", {"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale}, arch="sm90")

    @pytest.mark.oracle_cases("cutlass_scaled_mm", profile="quick")
    def test_gemm_cases(oracle_case, assert_conforms):
        assert_conforms(oracle_case.call(my_gemm), oracle_case, arch="sm90")

Fixtures ``assert_conforms`` and ``oracle_case``, marker ``oracle_cases``, options ``--oracle-profile``,
``--oracle-explain`` and ``--oracle-report FILE`` (a record, :mod:`oracle.report.record`). A failure prints the words of
``fp8-oracle verify``. MISTRUSTED is a :class:`MistrustedWarning`, which
``-W error::oracle.pytest_plugin.MistrustedWarning`` turns into a failure. A test that takes a case and judges nothing
fails.

A case is a parameter whose id ``-k`` takes: ``m=5,n=192`` of the case id is ``m:5-n:192`` there. The other parameters
of a test are part of its subject, ``test_it[eager]``, so that tables and ``fp8-oracle compare`` tell them apart.

Verdicts are attributes of pytest's own test reports, so with pytest-xdist the controller alone writes the file, one
line at a time as tests end; a killed run leaves the lines that it wrote. While a report is written, SIGTERM ends the
run as SIGINT does: with the closing line, and a record that is whole up to there.

Importing this file loads neither torch nor any other part of the suite; the first verdict or marked test does.
Source: derived from :func:`oracle.judge`, whose verdicts these are.
Not covered: running a kernel in a process of its own (pytest-xdist restarts a worker that dies).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oracle.diagnosis.level import explain_level, explaining
from oracle.errors import NonconformanceError, OptionError, among, counted

if TYPE_CHECKING:
    from torch import Tensor

    from oracle.cli.pytest_outcome import Test
    from oracle.routines.cases import Case
    from oracle.verdict.compare import Verdict

CASE = "oracle_case"
MARKER = "oracle_cases"
DEFAULT_PROFILE = "quick"
_LINES = pytest.StashKey[list[dict[str, object]]]()
_JUDGED = pytest.StashKey[int]()
_running: list[pytest.Item] = []  # the test that runs now; more than one when pytest runs inside a test


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
        What the kernel returned, in the shape of the contract's output; a mapping for a contract with several
        outputs. NaN and zeros as for :func:`oracle.judge`.
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
    NonconformanceError
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
    test = pytest_outcome.OUTSIDE if item is None else _named(item)
    source = "" if item is None else sources.place(item.path, (item.location[1] or 0) + 1)
    outcome = pytest_outcome.judge(
        output, contract, inputs, arch=arch, numerics=numerics, given=options, test=test, source=source, ordinal=ordinal
    )
    if item is not None:
        item.stash[_JUDGED] = ordinal
        item.stash[_LINES].append(pytest_outcome.line(outcome))
    verdict, text = outcome.verdict, outcome.words
    if verdict.status.is_failure:
        raise NonconformanceError(text, verdict)
    if verdict.status is Status.MISTRUSTED:
        warnings.warn(MistrustedWarning(text), stacklevel=2)
    return verdict


def _named(item: pytest.Item) -> Test:
    """A test by its id, and without the case among its parameters; the command that runs it from here."""
    from oracle.cli.pytest_outcome import Test

    path, *names = item.nodeid.split("::")  # relative to the root, which pytest may not have been started in
    here = os.path.relpath(item.config.rootpath / path, item.config.invocation_params.dir)
    words = ["pytest", "::".join([here, *names])]
    if (profile := item.config.getoption("oracle_profile")) is not None:
        words.append(f"--oracle-profile={profile}")  # without it pytest may not have the case
    callspec = getattr(item, "callspec", None)
    case = None if callspec is None else callspec.params.get(CASE)
    base = item.nodeid.removesuffix(f"[{callspec.id}]") if callspec is not None else item.nodeid
    if case is None:
        return Test(item.nodeid, item.nodeid, item.nodeid, shlex.join(words))
    assert callspec is not None
    others = "-".join(part for part in callspec.id.replace(_id(case), "\0", 1).split("-") if part != "\0")
    return Test(item.nodeid, f"{base}[{_id(case)}]", f"{base}[{others}]" if others else base, shlex.join(words))


def _id(case: Case) -> str:
    """The id of a case as a parameter: what ``-k`` cannot parse is replaced."""
    return str(case).translate(str.maketrans("=,", ":-"))


# --- fixtures and cases ---------------------------------------------------------------------------------------


@pytest.fixture(name="assert_conforms")
def _assert_conforms() -> Callable[..., Verdict]:
    """assert_conforms(output, contract_or_case, inputs=None, *, arch, numerics=None, **options): judge one output.

    Fails the test, with the words of `fp8-oracle verify`, unless the output is admissible; returns the verdict.
    """
    return assert_conforms


@pytest.fixture(name=CASE)
def _oracle_case(request: pytest.FixtureRequest) -> Case:
    """One case of the contract that the mark oracle_cases names: .call(kernel), .inputs(), .out_dtype, ["m"]."""
    text = f"{request.node.name} takes {CASE} but is not marked; add @pytest.mark.{MARKER}('cutlass_scaled_mm')"
    pytest.fail(text, pytrace=False)


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
        result = dict.fromkeys(
            case for mark in reversed(markers) for case in pytest_outcome.marked(profile, *mark.args, **mark.kwargs)
        )
    except (OracleError, TypeError) as error:
        pytest.fail(f"@pytest.mark.{MARKER} of {metafunc.function.__name__}: {error}", pytrace=False)
    metafunc.parametrize(CASE, list(result), ids=[_id(case) for case in result])


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
            raise pytest.UsageError(f"--oracle-profile {profile}: {among(profile, profiles.PROFILES)}")
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
        text = f"{item.name} took {CASE} and judged no output; call assert_conforms(output, {CASE}, arch=...)"
        pytest.fail(f"UNTESTED: {text}", pytrace=False)
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
        self.descriptor: int | None = None
        self.problem = ""  # why the file holds less than was judged
        self.ran: set[str] = set()
        self.keys: set[str] = set()  # of the outcomes that were written
        self.crashed: list[str] = []  # tests that ended a process of pytest-xdist, with whatever they had judged
        self.collected: set[str] = set()  # tests that take a verdict or, with pytest-xdist, all of them
        self.before: Any = None
        if self.path is not None:
            self.descriptor = _opened(self.path)
            main = threading.current_thread() is threading.main_thread()
            if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                self.before = signal.signal(signal.SIGTERM, signal.default_int_handler)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        judging = {CASE, "assert_conforms"}
        self.collected |= {i.nodeid for i in session.items if judging & set(getattr(i, "fixturenames", ()))}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.collected |= set(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.ran.add(report.nodeid)
        if report.when not in ("setup", "call", "teardown"):  # pytest-xdist's own report on a test without an end
            self.crashed.append(f"{report.nodeid} ended the process that ran it; what it judged is lost")
        result = getattr(report, "fp8_oracle", None)
        if result is None:
            return
        if not self.counts:
            self._write(result["run"])
        for line in result["lines"]:
            self.keys.add(line["key"])
            known = line["outcome"]["known_failure"] is not None
            self.counts["KNOWN" if known else line["outcome"]["verdict"]["status"]] += 1
            self._write(line)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.counts:
            seconds = round(time.perf_counter() - self.start, 3)
            interrupted = exitstatus == pytest.ExitCode.INTERRUPTED
            left = len(self.collected - self.ran) if interrupted else 0
            counts = {"unfinished": left, "outcomes": len(self.keys)}
            self._write({"kind": "end", "complaints": self.crashed, "seconds": seconds, **counts})
        if self.problem and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED  # what was asked for is not there

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.counts:
            each = ", ".join(f"{count} {status.lower()}" for status, count in sorted(self.counts.items()))
            where = "" if self.path is None or self.problem else f"; {self.path}"
            terminalreporter.write_line(f"fp8-oracle: {counted(self.counts.total(), 'verdict')}: {each}{where}")
        if self.problem:
            terminalreporter.write_line(f"fp8-oracle: {self.problem}", red=True)

    def pytest_unconfigure(self) -> None:
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)
        if self.descriptor is not None:
            os.close(self.descriptor)

    def _write(self, line: Mapping[str, object]) -> None:
        """Append a line, the whole of it or nothing."""
        if self.descriptor is None or self.problem:
            return
        content = (json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n").encode()
        begin = os.lseek(self.descriptor, 0, os.SEEK_CUR)
        try:
            while content:
                content = content[os.write(self.descriptor, content) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # no regular file
                os.ftruncate(self.descriptor, begin)
            rest = f"{self.path} lacks {'verdicts from here on' if begin else 'every verdict'}"
            self.problem = f"--oracle-report {self.path} cannot be written ({error.strerror}); {rest}"


def _opened(path: Path) -> int:
    """The descriptor of an empty report; UsageError where it cannot be written, or another run writes it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    except OSError as error:
        raise pytest.UsageError(f"--oracle-report {path}: cannot be written ({error.strerror})") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(OSError):  # a device or a pipe
            os.ftruncate(descriptor, 0)
    except BlockingIOError:
        os.close(descriptor)
        raise pytest.UsageError(f"--oracle-report {path}: another run is writing it; name another file") from None
    return descriptor
