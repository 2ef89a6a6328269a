"""For all tests: repeatable hypothesis, the fixtures folder, the command line in process, ``needs_shared``,
``needs_tools``, ``--full``.

``@pytest.mark.needs_shared("captures/x.safetensors")`` is for a test that reads recorded data from outside the
repository (``FP8_ORACLE_SHARED``, default ``../shared``). Without the data the test is skipped, and the last lines of
the run count what was skipped and say how to run it. Where ``FP8_ORACLE_SHARED`` is set, missing data fail the test.
``@pytest.mark.needs_tools("g++", "cmake", "gtest/gtest.h")`` is for a test that builds programs: skipped and counted
where a tool or a header is absent.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from oracle.tensorcore import cpu_cold
from tests.support.commandline import Cli, Ran
from tests.support.cpu import Costs
from tests.support.full import MARKERS, MOST, TURN, left_out
from tests.support.matrix import MODES
from tests.support.paths import FIXTURES, ROOT, SHARED
from tests.support.tools import found

# A run in the background ignores these, and some tests send them.
for ignored in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler if ignored == signal.SIGINT else signal.SIG_DFL)

# The tensors here are small: threads of one process, or of two test workers on two cores, only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Processes that tests start read each other's bytecode from where numba keeps its cache too, instead of compiling all
# of the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Collecting tests makes objects by the hundred thousand and drops none: the garbage collector would walk through them
# again and again, for a third of the time. ``pytest_collection_finish`` turns it on again.
gc.disable()

# Compiled kernels are what is tested beside definitions, whether they are on disk already or not.
_at_once = cpu_cold.compiled_at_once()
_at_once.__enter__()
atexit.register(_at_once.__exit__, None, None, None)  # a context manager that is collected leaves its block

collect_ignore = ["support"]  # another project's suite; test_pytest_plugin.py runs it

# The same examples at each run: the first thirty of what ``--full`` tries, where a test does not name a number.
# A mutant of tests/support/mutation.py fails at the first one that shows it.
for profile, examples, phases in (
    ("repeatable", 30, tuple(Phase)),
    ("unshrunk", 30, (Phase.explicit, Phase.generate)),
    ("full", 100, tuple(Phase)),
):
    settings.register_profile(
        profile,
        max_examples=examples,
        phases=phases,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


# --- tests that need data from outside the repository ----------------------------------------------------------


HOW_TO_RUN = "set FP8_ORACLE_SHARED to the folder that holds captures/ and vectors/"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", metavar="FILE", type=Path, help="write what every test costs (support/cpu.py)")
    parser.addoption("--most", metavar="N", type=int, default=MOST, help="instances of a test with parameters")
    parser.addoption("--part", metavar="I/N", default="0/1", help="the files of this part, as 0/3, 1/3 and 2/3")
    parser.addoption("--every-turn", action="store_true", help="tests of all turns (support/full.py)")
    parser.addoption("--full", action="store_true", help="also what repeats a check on more cases (support/full.py)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full") or config.getoption("--last-failed", False):  # as without its plugin
        return
    turn = None if config.getoption("--every-turn") else TURN
    if out := left_out(items, config.args, config.getoption("--most"), turn, config.getoption("--part")):
        items[:] = [item for item in items if item not in out]
        config.hook.pytest_deselected(items=[*out])


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """The first worker of pytest-xdist alone, then the others: these read the bytecode of the tests that it wrote."""
    worker = getattr(session.config, "workerinput", {}).get("workerid")
    with open(__file__) as lock:
        if worker is not None:
            fcntl.flock(lock, fcntl.LOCK_EX if worker == "gw0" else fcntl.LOCK_SH)
        return (yield)


def pytest_collection_finish() -> None:
    """What was collected lives until the end: no later round of the collector walks through it."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--full"):
        settings.load_profile("full")
    if path := config.getoption("--cpu"):
        config.pluginmanager.register(Costs(path))
    # not inherited: workers, and runs of pytest that tests start, are no runs of the cell
    if folder := os.environ.pop("FP8_ORACLE_MATRIX", None):
        from tests.support.matrix import TestRecord

        config.pluginmanager.register(TestRecord(Path(folder), config.getoption("--most"), config.getoption("--part")))
    config.addinivalue_line("markers", "needs_shared(path): reads this file or folder of FP8_ORACLE_SHARED")
    config.addinivalue_line("markers", "needs_tools(name): runs this program, or compiles with this header")
    for mode in MODES:
        config.addinivalue_line("markers", f"{mode}: also run in this mode of the matrix (tox.ini)")
    for marker in MARKERS:
        config.addinivalue_line("markers", f"{marker}: what runs without --full (support/full.py)")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, or fail where the folder was named, before any fixture of the test is made."""
    tools = [name for mark in item.iter_markers("needs_tools") for name in mark.args if not found(name)]
    if tools:
        item.user_properties.append(("needs_tools", tools))
        pytest.skip(f"{', '.join(tools)}: not on this machine")
    needed = [str(path) for mark in item.iter_markers("needs_shared") for path in mark.args]
    absent = [path for path in needed if not (SHARED / path).exists()]
    if not absent:
        return
    reason = f"no {', '.join(absent)} in {SHARED}: {HOW_TO_RUN}"
    if os.environ.get("FP8_ORACLE_SHARED"):
        pytest.fail(reason, pytrace=False)
    item.user_properties.append(("needs_shared", absent))
    pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The property ``printed`` of passed tests; how many tests did not run because data are absent, which data, and how
    to run them."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in getattr(report, "user_properties", ()):
            if name == "printed" and report.when == "call":
                terminalreporter.write_line(str(value))
    reports = terminalreporter.stats.get("skipped", [])
    properties = [pair for report in reports for pair in getattr(report, "user_properties", ())]
    absent = [value for name, value in properties if name == "needs_shared"]
    tools = [value for name, value in properties if name == "needs_tools"]
    if tools:
        missing = ", ".join(sorted({tool for names in tools for tool in names}))
        terminalreporter.write_sep("!", f"{len(tools)} tests did not run: no {missing}", yellow=True)
        terminalreporter.write_line("Debian and Ubuntu have them as g++, cmake, libgtest-dev and catch2")
    if absent:
        files = sorted({path for paths in absent for path in paths})
        terminalreporter.write_sep("!", f"{len(absent)} tests did not run: no recorded data", yellow=True)
        terminalreporter.write_line(f"absent from {SHARED}: {', '.join(files)}")
        terminalreporter.write_line(f"to run them, {HOW_TO_RUN}")


# --- fixtures --------------------------------------------------------------------------------------------------


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of small tensors, where threads only wait for each other."""
    from oracle.numbers import threads

    with threads.one_thread():
        yield


@pytest.fixture
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Whether the run has ``--full``: some tests take a part of what they then take whole."""
    return bool(pytestconfig.getoption("--full"))


@pytest.fixture
def fixtures_folder() -> Path:
    """The repository's fixtures, wherever the tests are started."""
    return FIXTURES


@pytest.fixture
def unexplained() -> Iterator[None]:
    """For tests of verdicts: a failure is judged and not explained, which takes nine tenths of the time."""
    from oracle.diagnosis.level import explaining

    with explaining("off"):
        yield


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker process, which takes most of the time of a validation or a probing of one case."""
    from oracle.harness import evaluation, probing, validation
    from tests.support.in_process import InProcess

    monkeypatch.setattr(evaluation, "Worker", InProcess)
    monkeypatch.setattr(validation, "Worker", InProcess)
    monkeypatch.setattr(probing, "Worker", InProcess)


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes that have torch loaded already, for kernels that crash or hang."""
    from oracle.harness import process
    from tests.support import forked_worker

    monkeypatch.setattr(process, "subprocess", forked_worker.SHIM)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fixtures_folder: Path) -> Cli:
    """Run the command line in this process; argparse's own exits become a status too."""
    import torch

    from oracle.cli import main

    threads = torch.get_num_threads()

    monkeypatch.setenv("FP8_ORACLE_FIXTURES", str(fixtures_folder))
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments: object) -> Ran:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = int(stop.code or 0)
        torch.set_num_threads(threads)
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def _cuda_launcher(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    from tests.support.cuda_on_host import launcher  # imports torch, which few tests need this way

    return launcher(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def cuda_on_host(_cuda_launcher: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources of CUDA C++ run on the CPU, compiled by g++ once for all tests (:mod:`tests.support.cuda_on_host`)."""
    from oracle.tensorcore.cuda_source import Source

    monkeypatch.setattr(Source, "launch", _cuda_launcher)
