"""The matrix of the project: Python x torch x mode. What a cell leaves behind, and what differs between cells.

    python -m tests.support.matrix cells                 # every cell, and why one cannot run on this machine
    python -m tests.support.matrix cells --here          # the environments of those that can, as tox takes them
    python -m tests.support.matrix run NAME ...          # a cell, or all cells of an environment; tox does this in one
    python -m tests.support.matrix path                  # where their interpreters are, to stand before PATH
    python -m tests.support.matrix unsupported DIR       # the record of each cell that cannot run on this machine
    python -m tests.support.matrix sample DIR/CELL       # verdicts and bits of a sample of cases, in the cell's mode
    python -m tests.support.matrix step COMMAND ...      # run a command, and keep its exit status
    python -m tests.support.matrix page DIR --html FILE --markdown FILE
    python -m tests.support.matrix next-cell             # which further cell the commit at hand should run: one of the
                                                         # modes that take a minute or two, not the whole of the tests

The record of a cell is the folder ``DIR/CELL``:

    unsupported.json    the reason why this cell cannot exist, and then nothing else
    run.jsonl           verdicts of the sample, as ``fp8-oracle verify --record`` writes them
    bits.safetensors    the bits of every output of the sample, by key of its outcome
    tests-N.json        what the N-th run of pytest did; FP8_ORACLE_MATRIX=DIR/CELL makes pytest write it
    step-N.json         the N-th command under ``step``

``sample`` comes first: it removes an earlier record. Where ``FP8_ORACLE_TURN`` is set, as in CI, it takes one of
``SHARES`` shares of its cases, the next one in the next turn. A cell without a record is an error of the page. Cells of
one mode are compared: what most of them say is *common*, and every other cell is named with what it says, and with
every fact (torch, Python, a library) that all the odd cells have and no other.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from oracle.errors import counted

if TYPE_CHECKING:
    import pytest
    from torch import Tensor

    from oracle.harness.runner import Item
    from oracle.report.outcome import Outcome

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "FP8_ORACLE_MATRIX"
TESTS, STEP, UNSUPPORTED = "fp8-oracle.tests/1", "fp8-oracle.step/1", "fp8-oracle.unsupported/1"
T = TypeVar("T")


# --- the cells --------------------------------------------------------------------------------------------------

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.9", "2.13", "2.15")
MODES = ("cpu", "interpreter", "replay_sm90", "emulated")
PINNED = "2.13"  # of constraints.txt
FEWER = 1  # instances of a test with parameters, where a cell does not run the usual tests
PARTS = 3  # of the files of tests: each part runs with every Python once, and with every torch once


@dataclass(frozen=True)
class Cell:
    """One Python, one torch (its major and minor version) and one mode."""

    python: str
    torch: str
    mode: str

    @property
    def environment(self) -> str:
        """The name of what the four modes share: ``py311-torch29``."""
        return f"py{self.python.replace('.', '')}-torch{self.torch.replace('.', '')}"

    @property
    def usual(self) -> bool:
        """Whether the Python is the first one and the torch the pinned one: this cell runs the usual tests."""
        return (self.python, self.torch) == (PYTHONS[0], PINNED)

    @property
    def part(self) -> str:
        """The files of tests that run in the mode cpu: all in the usual cell, elsewhere one of ``PARTS`` in a Latin
        square. The other modes, which take a minute, run all of theirs."""
        if self.usual or self.mode != MODES[0]:
            return "0/1"
        return f"{(PYTHONS.index(self.python) + TORCHES.index(self.torch)) % PARTS}/{PARTS}"

    @property
    def fewer(self) -> tuple[str, ...]:
        """What pytest leaves out in a cell that is not the usual one."""
        if self.usual:
            return ()
        return ("--most", str(FEWER), *(("--part", self.part) if self.part != "0/1" else ()))

    @property
    def commands(self) -> tuple[tuple[str, ...], ...]:
        """What runs in the cell after its sample. Every fixture is made again by each Python and by each torch once: in
        the usual cell, and in the others of one part."""
        every = COMMANDS[self.mode]
        checks = self.usual or self.part == replace(self, python=PYTHONS[1], torch=TORCHES[0]).part
        return every if checks else tuple(command for command in every if command != FIXTURES_CHECK)

    def __str__(self) -> str:
        return f"{self.environment}-{self.mode}"


CELLS = tuple(Cell(python, torch, mode) for python in PYTHONS for torch in TORCHES for mode in MODES)
"""Every cell: a page misses the record of one that is not there."""


def cell_of(name: str) -> Cell:
    """The cell of this name; ValueError where there is none."""
    if name not in (known := {str(cell): cell for cell in CELLS}):
        raise ValueError(f"{name!r} is no cell of the matrix; `python -m tests.support.matrix cells` lists them")
    return known[name]


def in_part(test: str, part: str) -> bool:
    """Whether the file of a test is in this part: ``1/3`` is the part 1 of 0, 1 and 2, ``0/1`` is all.

    Raises ValueError: ``part`` is not of this form.
    """
    which, slash, parts = part.partition("/")
    if not (slash and which.isdecimal() and parts.isdecimal() and int(which) < int(parts)):
        raise ValueError(f"--part is {part!r}, not I/N with I below N, as 0/3")
    return zlib.crc32(test.partition("::")[0].encode()) % int(parts) == int(which)


def interpreter(version: str) -> str | None:
    """A Python of this version on this machine: on the PATH, of pyenv or of uv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    uv = Path.home() / ".local/share/uv/python"
    name = f"python{version}"
    folders = (*sorted(pyenv.glob(f"{version}.*")), *sorted(uv.glob(f"cpython-{version}*")))
    places = (sys.executable, shutil.which(name), *(folder / "bin" / name for folder in folders))
    for place in (str(place) for place in places if place is not None and Path(place).exists()):
        asked = [place, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        answer = subprocess.run(asked, capture_output=True, text=True, check=False)
        if answer.stdout.strip() == version:  # a shim of pyenv may lead nowhere
            return place
    return None


def why_not(cell: Cell) -> str | None:
    """Why a cell cannot run on this machine, or None."""
    return None if interpreter(cell.python) else f"no interpreter of Python {cell.python} on this machine"


def next_cell(commits: int, cells: Sequence[Cell]) -> Cell:
    """The cell whose turn it is after this many commits: each of ``cells`` once in ``len(cells)`` commits.

    Neighbours in turn differ in Python and torch, so that few commits meet every version.
    """
    by_mode = sorted(cells, key=lambda cell: (CELLS.index(cell) // len(MODES) + MODES.index(cell.mode)) % len(MODES))
    return by_mode[commits % len(by_mode)]


# --- the commands of a cell ------------------------------------------------------------------------------------

_STEP = ("python", "-m", "tests.support.matrix", "step")
FIXTURES_CHECK = (*_STEP, "python", "-m", "oracle", "fixtures", "check")  # here, where tests find what numba compiled
_PYTEST = ("pytest", "-q", "-n", "2", "--assert=plain")
COMMANDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "cpu": (
        (*_STEP, "fp8-oracle", "doctor"),
        FIXTURES_CHECK,
        (*_PYTEST, "--dist", "worksteal", "-m", " and ".join(f"not {mode}" for mode in MODES[1:])),
    ),
    "interpreter": (
        (
            *(*_PYTEST, "-m", "interpreter", "tests/kernels", "tests/bounds"),
            *("tests/routines/attention/test_evidence.py", "tests/verdict/test_gate_tools.py"),
        ),
    ),
    "replay_sm90": ((*_PYTEST, "-m", "replay_sm90", "tests/tensorcore", "tests/cli", "tests/diagnosis"),),
    "emulated": ((*_PYTEST, "-m", "emulated", "tests/tensorcore", "tests/bounds"),),
}
"""What runs in a mode after its sample. The four modes of an environment run each test once."""


def run(name: str, more: Sequence[str]) -> int:
    """Run the cell of this name, or the cells of this environment; 1 if a command fails. ``more`` are words for pytest.

    Raises ValueError: there is no such cell or environment.
    """
    cells = [cell for cell in CELLS if cell.environment == name] or [cell_of(name)]
    folders = {cell: ROOT / "build/matrix" / str(cell) for cell in cells}
    judged = [subprocess.Popen([*_STEP[:-1], "sample", str(folder)], cwd=ROOT) for folder in folders.values()]
    statuses = [process.wait() for process in judged]
    for cell, folder in folders.items():
        for command in cell.commands:
            words = [*command, *cell.fewer, *more] if command[0] == "pytest" else [*command]
            print(f"{cell}: {' '.join(words)}", flush=True)
            environment = os.environ | {VARIABLE: str(folder)}
            statuses.append(subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode)
    return int(any(statuses))


# --- the record of a cell: verdicts and bits of a sample ----------------------------------------------------------

EACH = 2  # cases of each routine in the mode cpu
SHARES = 4  # of a sample: CI takes one, `make matrix` all
Keep = Callable[..., None]


def sample(folder: Path) -> int:
    """Write the record of the sample of a cell into its folder; the number of failing outcomes.

    An earlier record in the folder is removed.
    """
    cell = cell_of(folder.name)
    if cell.mode == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    from oracle.diagnosis.level import explaining
    from oracle.fixtures import files
    from oracle.harness import provenance, subjects
    from oracle.report import ledger, record

    warnings.simplefilter("ignore")  # Triton's interpreter divides by zero in numpy
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is not written, as unassigned rows
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    produced: dict[tuple[str, str, str, str], dict[str, Tensor]] = {}

    def keep(subject: Any, case: Any, inputs: Mapping[str, Tensor], output: Any, bounds: bool = False) -> None:
        named = output if isinstance(output, Mapping) else {"out": output}
        key = (subject.contract, subject.arch, subject.name, str(case))
        produced.setdefault(key, {}).update({name: bits_of(x) for name, x in named.items()})

    items = shared(SAMPLES[cell.mode](keep), os.environ.get("FP8_ORACLE_TURN", ""))
    started = datetime.now(UTC).isoformat(timespec="seconds")
    versions = provenance.versions([subjects.provider("kernels.subjects:subjects")])
    about = record.Run(started, provenance.machine(), versions, {"matrix": str(cell)}, len(items))
    recorder = record.start(folder / "run.jsonl", about, resume=False)
    entries = ledger.load(ROOT / "fixtures" / ledger.FILE)
    start, cpu, failing, all_bits = time.perf_counter(), time.process_time(), 0, {}
    with explaining("off"):
        for item in items:
            ((outcome,), _) = ledger.apply([_outcome(item)], entries, whole=False)
            key = record.key_of(item.id, item.subject, item.arch, item.stamp, about)
            recorder.append(key, outcome)
            failing += outcome.fails
            bits = produced.pop((item.contract, item.arch, item.subject, item.id), {})
            all_bits |= {f"{key}/{name}": x for name, x in bits.items()}
    recorder.end((), time.perf_counter() - start, 0)
    files.write_tensors(folder / "bits.safetensors", all_bits)
    cost = f"{time.process_time() - cpu:.1f} s of CPU"
    print(f"{cell}: {len(items)} outcomes, {failing} failing, {len(all_bits)} outputs, {cost}")
    return failing


def shared(items: Sequence[T], turn: str) -> Sequence[T]:
    """The share of this turn, evenly spread; all without one."""
    return items[int(turn) % SHARES :: SHARES] if turn else items


def _outcome(item: Item) -> Outcome:
    """The outcome of an item; CRASHED where the oracle raises, as on a torch that it does not know."""
    from oracle.verdict.compare import Status, Verdict

    try:
        return item.outcome()
    except Exception as error:  # one routine must not hide the others
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return item.told(Verdict(Status.CRASHED, f"CRASHED: the oracle raised {reason}", reason=reason))


def bits_of(x: Tensor) -> Tensor:
    """The bits of a tensor, as integers of its element size in its shape; every NaN of a dtype has the same."""
    import torch

    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.detach().clone(memory_format=torch.contiguous_format).view(size)
    if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) or (x.is_floating_point() and x.element_size() > 1):
        wide = x.detach().to(torch.float32) if x.element_size() == 1 else x.detach()
        bits[torch.isnan(wide)] = torch.iinfo(size).max & (0x7F if size is torch.uint8 else -1)  # a NaN of all of them
    return bits


def _cpu(keep: Keep) -> list[Item]:
    """The CPU's subjects over ``EACH`` cases of each routine, evenly spread over the profile ``compact``."""
    from oracle.harness import runner, subjects
    from oracle.routines import profiles, registered

    production = subjects.provider("kernels.subjects:subjects").subjects
    chosen = []
    for contract in registered():
        every = profiles.cases(contract, "compact")
        chosen += every[:: max(1, -(-len(every) // EACH))]
    here = [subject for subject in production if subject.arch == "cpu"]
    return runner.live(here, profile="compact", cases=chosen, keep=keep)


def _replay(keep: Keep) -> list[Item]:
    """The first captured output of each routine and subject."""
    from oracle.harness import runner

    first: dict[tuple[str, str], Item] = {}
    for item in runner.replay(ROOT / "fixtures" / "captures"):
        first.setdefault((item.contract, item.subject), item)
    return [*first.values()]


@dataclass(frozen=True)
class _Model:
    """A schedule as a subject: its output is what it predicts."""

    contract: str
    arch: str
    name: str
    device: str = "cpu"

    @property
    def numerics(self) -> str:
        return self.name

    def why_not(self) -> None:
        return None

    def run(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> Any:
        from oracle.errors import NumericsError
        from oracle.routines import get

        try:
            return get(self.contract).predict(dict(inputs), numerics=self.name, **options)
        except NumericsError as error:
            raise NotImplementedError(str(error)) from error


def _emulated(keep: Keep) -> list[Item]:
    """The first case of each routine by every schedule of every arch, judged, and the bounds of that arch."""
    from oracle.errors import OracleError
    from oracle.harness import runner
    from oracle.routines import get, profiles, registered
    from oracle.routines.base import Call

    bounded: set[tuple[str, str]] = set()

    def keep_bounds(subject: Any, case: Any, inputs: Mapping[str, Tensor], output: Any) -> None:
        keep(subject, case, inputs, output)
        if (subject.contract, subject.arch) in bounded:
            return
        bounded.add((subject.contract, subject.arch))
        with contextlib.suppress(OracleError):  # no interval for each element, or no model of this arch
            for name, each in get(case.contract).bounds(inputs, arch=subject.arch, **case.call_options()).items():
                keep(subject, case, inputs, {f"{name}.low": each.low, f"{name}.high": each.high})

    items = []
    for contract in (get(name) for name in registered()):
        if not (contract.takes_numerics and (cases := profiles.cases(contract.name, "compact")[:1])):
            continue
        call = Call(contract, cases[0].inputs(), cases[0].call_options()).checked()
        models = [_Model(contract.name, arch, n) for arch, names in contract.numerics_of(call).items() for n in names]
        items += runner.live(models, profile="compact", cases=cases, keep=keep_bounds)
    return items


def _interpreted(keep: Keep) -> list[Item]:
    """What ``tests/kernels/interpreted_*.py`` run through Triton's interpreter, without the broken kernels."""
    from functools import partial

    from oracle.harness.runner import Item
    from oracle.routines.base import Contract
    from oracle.verdict.compare import Status, Verdict

    sys.path.insert(0, str(ROOT / "tests" / "kernels"))
    import interpreted_cache
    import interpreted_fused
    import interpreted_gemm
    import interpreted_linear
    import interpreted_quantisers

    judged: list[tuple[Any, Verdict]] = []
    judge = Contract.judge

    def watched(self: Contract, inputs: Any, output: Any, **options: Any) -> Verdict:
        judged.append((output, judge(self, inputs, output, **options)))
        return judged[-1][1]

    setattr(Contract, "judge", watched)  # noqa: B010  # final: mypy refuses the assignment

    def one(contract: str, name: str, run: Callable[[], object]) -> Verdict:
        """The verdict on the last output that ``run`` has judged."""
        judged.clear()
        try:
            run()
        except Exception as error:  # whatever Triton's interpreter raises is the outcome
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return Verdict(Status.CRASHED, f"CRASHED: {reason}", reason=reason)
        output, verdict = judged[-1]
        keep(_Model(contract, "cpu", "triton"), name, {}, output)
        return verdict

    def same(contract: str, name: str, outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> Verdict:
        keep(_Model(contract, "cpu", "triton"), name, {}, {str(i): x for i, x in enumerate(outputs)})
        if all(interpreted_quantisers.same(x, y) for x, y in zip(outputs, wanted, strict=True)):
            return Verdict(Status.PASSED, "every bit is that of plain torch")
        return Verdict(Status.FAILED, "other bits than plain torch")

    def item(contract: str, name: str, verdict: Callable[[], Verdict]) -> Item:
        return Item(name, contract, "triton", "cpu", verdict)

    interpreted_fused.fused.route = interpreted_fused.interpreted
    interpreted_cache.kv_cache.route = interpreted_cache.interpreted
    items = [
        item(text.partition("/")[0], text, partial(one, text.partition("/")[0], text, partial(program.run, text)))
        for program in (interpreted_fused, interpreted_cache)
        for text in program.ids()
    ]
    for name, outputs, wanted in interpreted_quantisers.pairs():
        if not name.startswith("sabotaged"):
            contract = f"triton_quant {name.split()[0]}"
            items.append(
                item(contract, f"triton_quant/{name}", partial(same, contract, f"triton_quant/{name}", outputs, wanted))
            )
    interpreted_gemm.repair()
    products, linear = interpreted_gemm.triton_gemm.library()[0], interpreted_linear.triton_linear.library()[0]
    for name, mode, text, tile, pitch in interpreted_gemm.sites():
        run = partial(interpreted_gemm.right, mode, text, tile, products, pitch)
        contract, named = text.partition("/")[0], f"{text} ({name})"
        items.append(item(contract, named, partial(one, contract, named, run)))
    for name in interpreted_linear.CUTS:
        named = f"fp8_gemm_nt/few rows ({name})"
        run = partial(interpreted_linear.good, name, linear)
        items.append(item("fp8_gemm_nt", named, partial(one, "fp8_gemm_nt", named, run)))
    return items


SAMPLES: Mapping[str, Callable[[Keep], list[Item]]] = {
    "cpu": _cpu,
    "interpreter": _interpreted,
    "replay_sm90": _replay,
    "emulated": _emulated,
}
"""What is judged in each mode; each output goes to the function that it is given."""


# --- the record of a cell: tests and commands ---------------------------------------------------------------------


class TestRecord:
    """A plugin of pytest: writes how many tests of each file and how many instances of each test ran, and every test
    that did not pass, with its reason."""

    __test__ = False  # pytest collects classes of this name

    def __init__(self, folder: Path, most: int | None = None, part: str = "0/1") -> None:
        self.folder, self.start = folder, time.perf_counter()
        self.taken = {"most": most, "part": part}
        self.files: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()
        self.others: dict[str, dict[str, str]] = {"failed": {}, "error": {}, "skipped": {}, "xfailed": {}}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.others["error"][report.nodeid] = _reason(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self.files[report.nodeid.partition("::")[0]] += 1
            self.functions[report.nodeid.partition("[")[0]] += 1
        if report.failed:
            self.others["failed" if report.when == "call" else "error"][report.nodeid] = _reason(report)
        elif report.skipped:
            self.others["xfailed" if hasattr(report, "wasxfail") else "skipped"][report.nodeid] = _reason(report)
        elif report.when == "call":
            self.passed[report.nodeid.partition("::")[0]] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        about = {"seconds": round(time.perf_counter() - self.start, 1), "status": int(exitstatus), **self.taken}
        found = {"files": self.files, "functions": self.functions, "passed": self.passed, **self.others}
        _write(self.folder, "tests", {"schema": TESTS, **about, **found})


def _reason(report: Any) -> str:
    """Why a test failed or was skipped, in one line."""
    if isinstance(report.longrepr, tuple):  # file, line and reason of a skip
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(report.longrepr if crash is None else crash.message).strip().splitlines() or ["no message"]
    shown = [line.removeprefix("E").strip() for line in lines if crash is not None or line.startswith("E ")]
    return (shown or lines[-1:])[0][:400]


def step(command: Sequence[str]) -> int:
    """Run a command; its exit status. Where ``FP8_ORACLE_MATRIX`` names the folder of a cell, it is kept there."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    last: list[str] = []
    for line in process.stdout or ():
        print(line, end="", flush=True)
        last = [*last[-4:], line.rstrip()]
    status = process.wait()
    if folder := os.environ.get(VARIABLE):
        about = {"seconds": round(time.perf_counter() - start, 1), "status": status, "last": [*filter(None, last)]}
        _write(Path(folder), "step", {"schema": STEP, "command": " ".join(command), **about})
    return status


def unsupported(folder: Path, cell: Cell, reason: str) -> None:
    """Write the record of a cell that cannot exist."""
    shutil.rmtree(folder / str(cell), ignore_errors=True)
    (folder / str(cell)).mkdir(parents=True)
    _dump(folder / str(cell) / "unsupported.json", {"schema": UNSUPPORTED, "reason": reason})


def _write(folder: Path, name: str, content: Mapping[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _dump(folder / f"{name}-{len([*folder.glob(f'{name}-*.json')]) + 1}.json", content)


def _dump(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


# --- reading records ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellRecord:
    """What a cell left behind. ``problems`` are what is wrong with it by itself, whatever the other cells say."""

    cell: Cell
    unsupported: str = ""
    problems: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    outcomes: Mapping[tuple[str, ...], Outcome] = field(default_factory=dict)
    bits: Mapping[tuple[str, ...], Mapping[str, Tensor]] = field(default_factory=dict)
    tests: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0
    whole: bool = True
    """Whether the sample came to its end: what a cut one lacks is no difference of its own."""
    most: int | None = None
    """How many instances of a test with parameters ran, at most; cells of other numbers have as many tests, with other
    numbers of instances."""
    steps: tuple[str, ...] = ()
    """The commands that ran before the tests."""
    part: str = "0/1"
    """Which files of tests ran, as ``--part`` of pytest takes it."""

    @property
    def failing(self) -> list[Outcome]:
        return [o for o in self.outcomes.values() if o.fails]

    @property
    def broken(self) -> dict[str, str]:
        """Tests that failed or could not run, with their reasons."""
        return {**self.tests.get("failed", {}), **self.tests.get("error", {})}

    @property
    def word(self) -> str:
        if self.unsupported:
            return "UNSUPPORTED"
        return "FAILED" if self.problems or self.failing or self.broken else "PASSED"


def load(folder: Path) -> list[CellRecord]:
    """The records of all cells, of those too that left none."""
    return [_load(folder / str(cell), cell) for cell in CELLS]


def _load(folder: Path, cell: Cell) -> CellRecord:
    from oracle.errors import FixtureError
    from oracle.fixtures import files
    from oracle.report import record

    if not folder.is_dir():
        return CellRecord(cell, problems=("no record",))
    if (path := folder / "unsupported.json").exists():
        more = sorted(p.name for p in folder.iterdir() if p != path)
        problems = (f"UNSUPPORTED, and yet it left {', '.join(more)}",) if more else ()
        return CellRecord(cell, json.loads(path.read_text())["reason"], problems)
    problems, facts, seconds, whole = [], {}, 0.0, True
    outcomes: dict[tuple[str, ...], Outcome] = {}
    bits: dict[tuple[str, ...], dict[str, Tensor]] = {}
    try:
        read = record.read(folder / "run.jsonl")
        named = {key: (o.contract, o.arch, o.subject, o.id) for key, o in read.outcomes.items()}
        outcomes = {named[key]: o for key, o in read.outcomes.items()}
        facts = read.run.versions | read.run.machine
        report = read.report()
        seconds += report.seconds
        whole = not report.unfinished
        if not whole:
            problems.append(f"the sample ended early: {report.unfinished} cases without an outcome")
        problems += _another_version(cell, facts)
        for name, x in files.read_tensors(folder / "bits.safetensors").items():
            key, _, output = name.partition("/")
            bits.setdefault(named[key], {})[output] = x
    except FixtureError as error:
        problems.append(f"no record of verdicts: {error}")
    tests: dict[str, dict[str, Any]] = {}
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("tests-*.json"))]
    if not runs:
        problems.append("no record of tests")
    for run in runs:
        seconds += run["seconds"]
        if run["status"] not in (0, 1):
            problems.append(f"pytest ended with status {run['status']}")
        for name, found in run.items():
            if isinstance(found, dict):
                tests.setdefault(name, {}).update(found)
    steps = [json.loads(path.read_text()) for path in sorted(folder.glob("step-*.json"))]
    for ran in steps:
        seconds += ran["seconds"]
        if ran["status"]:
            problems.append(f"`{ran['command']}` ended with status {ran['status']}: {' / '.join(ran['last'][-2:])}")
    most, part = (runs[-1].get("most"), runs[-1].get("part", "0/1")) if runs else (None, "0/1")
    commands = tuple(ran["command"].removeprefix("python -m oracle ").removeprefix("fp8-oracle ") for ran in steps)
    return CellRecord(cell, "", tuple(problems), facts, outcomes, bits, tests, seconds, whole, most, commands, part)


def _another_version(cell: Cell, facts: Mapping[str, str]) -> Iterator[str]:
    for name, wanted in (("python", cell.python), ("torch", cell.torch)):
        if not facts.get(name, "").startswith(f"{wanted}."):
            yield f"the record is of {name} {facts.get(name, 'unknown')}"


# --- what differs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """What some cells of a mode say otherwise than most: ``kind`` is verdict, bits, count, or test.

    ``cells`` are the odd ones, ``others`` how many say the common thing; ``what`` names routine, arch and subject, or a
    test; ``words`` how it differs, for the first of ``cases``; ``cause`` which facts all odd cells share and no other.
    ``admitted``: no fault: every cell's output passes, and the contract admits several values, as sums in any order; or
    a test or a routine is skipped, for the reason that the line gives.
    """

    kind: str
    mode: str
    cells: tuple[Cell, ...]
    others: int
    what: str
    words: str
    cause: str
    cases: tuple[str, ...] = ()
    admitted: bool = False

    @property
    def where(self) -> str:
        names = [str(cell) for cell in self.cells]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def __str__(self) -> str:
        more = f" (and {counted(len(self.cases) - 1, 'more case')})" if len(self.cases) > 1 else ""
        return f"{self.where}: {self.what}: {self.words}{more}. {self.cause}"


@dataclass(frozen=True)
class Matrix:
    """All records, and what differs between them."""

    records: tuple[CellRecord, ...]
    differences: tuple[Difference, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        ran = any(not record.unsupported for record in self.records)
        failing = any(record.word == "FAILED" for record in self.records)
        return ran and not (failing or self.wrong or self.problems)

    @property
    def wrong(self) -> list[Difference]:
        """The differences that must not be."""
        return [one for one in self.differences if not one.admitted]

    @property
    def admitted(self) -> list[Difference]:
        """The differences between values that the contract admits."""
        return [one for one in self.differences if one.admitted]


def merge(records: Iterable[CellRecord]) -> Matrix:
    """Compare the cells of each mode."""
    every = tuple(records)
    problems = [f"{record.cell}: {problem}" for record in every for problem in record.problems]
    for name in ("fp8-oracle", "subjects subjects"):
        if len(states := {record.facts[name] for record in every if name in record.facts}) > 1:
            problems.append(
                f"all cells: records of {len(states)} states of the code ({name} {', '.join(sorted(states))})"
            )
    found: list[Difference] = []
    for mode in MODES:
        ran = [record for record in every if record.cell.mode == mode and (record.outcomes or record.tests)]
        alike = itertools.groupby(sorted(ran, key=_taken), key=_taken)
        tested = [_tests(mode, [*records]) for _, records in alike]
        found += _grouped([*_cases(mode, ran), *_missing(mode, ran), *itertools.chain(*tested)])
    return Matrix(every, tuple(found), tuple(problems))


def _cases(mode: str, records: Sequence[CellRecord]) -> Iterator[Difference]:
    """Cases that some cells lack, verdicts and bits that differ."""
    judged = [record for record in records if record.outcomes]
    for known in dict.fromkeys(key for record in judged for key in record.outcomes):
        contract, arch, subject, case = known
        routine, what = f"{contract} on {arch}", f"{contract} on {arch} [{subject}]"
        have = {record.cell: record.outcomes[known] for record in judged if known in record.outcomes}
        whole = {record.cell: record for record in judged if record.whole}
        for odd, common, others in _odd({cell: cell in have for cell in whole}):
            usual = next(cell for cell in whole if (cell in have) == common)
            here, there = (sum(key[:2] == known[:2] for key in whole[cell].outcomes) for cell in (odd[0], usual))
            words = f"{counted(here, 'case')} here, {there} in {_cells(others)}: "
            lost = f"{case} [{subject}]"
            words += f"{lost} was {'not judged' if common else 'judged here alone'}"
            reason = _skipped(known, have, whole)
            words += f"; skipped: {reason}" if reason else ""
            yield _difference("count", mode, judged, odd, others, routine, words, lost, reason is not None)
        of = [record for record in judged if record.cell in have]
        admitted = _admitted(mode, have.values())
        verdicts = {cell: (o.word, o.verdict.summary) for cell, o in have.items()}
        for odd, usual_verdict, others in _odd(verdicts):
            (status, said), (usually, there_said) = verdicts[odd[0]], usual_verdict
            words = f"{status} here, {usually} in {_cells(others)}: {case}: {said}"
            words += "" if status != usually else f"; there: {there_said}"
            yield _difference("verdict", mode, of, odd, others, what, words, case, admitted)
        drawn = {record.cell: record.bits[known] for record in of if known in record.bits}  # a crash has none
        digests = {cell: tuple((name, _digest(x)) for name, x in sorted(by.items())) for cell, by in drawn.items()}
        for odd, common_digest, others in _odd(digests):
            usual_bits = next(drawn[cell] for cell in digests if digests[cell] == common_digest)
            words = f"{case}: other bits than {_cells(others)}: {_apart(drawn[odd[0]], usual_bits)}"
            yield _difference("bits", mode, of, odd, others, what, words, case, admitted)


def _skipped(
    known: tuple[str, str, str, str], have: Mapping[Cell, Outcome], whole: Mapping[Cell, CellRecord]
) -> str | None:
    """Why a case was not judged where the subject says that it cannot serve the routine there; else None."""
    if all(o.word == "SKIPPED" for o in have.values()):
        return next(iter(have.values())).verdict.reason  # the line that says so
    said = [
        [o.verdict.reason for key, o in record.outcomes.items() if key[:3] == known[:3] and o.word == "SKIPPED"]
        for cell, record in whole.items()
        if cell not in have
    ]
    return said[0][0] if all(said) else None


def _admitted(mode: str, outcomes: Iterable[Outcome]) -> bool:
    """Whether outputs may differ: kernels ran, every output passes, and one of them by its admissible set.

    A prediction, and the replay of a capture, depend on nothing but their inputs.
    """
    if mode not in ("cpu", "interpreter"):
        return False
    from oracle.report.outcome import PASSING

    every = [*outcomes]
    return all(o.status in PASSING for o in every) and any(o.verdict.matches is None for o in every)


def _tests(mode: str, records: Sequence[CellRecord]) -> Iterator[Difference]:
    """Tests that fail or are skipped in some cells, and files of which more or fewer tests ran."""
    tested = [record for record in records if record.tests]
    for kind in ("failed", "error", "skipped"):
        said = {record.cell: record.tests.get(kind, {}) for record in tested}
        for test in dict.fromkeys(test for of in said.values() for test in of):
            for odd, common, others in _odd({cell: test in of for cell, of in said.items()}):
                reason = next(of[test] for of in said.values() if test in of)
                words = f"{kind} here, not in {_cells(others)}: {reason}"
                words = f"not {kind} here, but in {_cells(others)}: {reason}" if common else words
                yield _difference("test", mode, tested, odd, others, test, words, test, kind == "skipped")
    counts = {record.cell: record.tests.get("files", {}) for record in tested}
    for file in dict.fromkeys(file for of in counts.values() for file in of):
        for odd, common, others in _odd({cell: of.get(file, 0) for cell, of in counts.items()}):
            words = f"{counted(counts[odd[0]].get(file, 0), 'test')} here, {common} in {_cells(others)}"
            yield _difference("count", mode, tested, odd, others, file, words, file)


def _taken(record: CellRecord) -> tuple[str, int]:
    """Which tests a cell takes; only cells that take the same ones have the same numbers of tests."""
    return record.part, record.most or 0


def _missing(mode: str, records: Sequence[CellRecord]) -> Iterator[Difference]:
    """Tests of which no instance ran in some cells that have their file: a cell takes one of each test at least."""
    tested = [record for record in records if "functions" in record.tests]
    for test in dict.fromkeys(test for record in tested for test in record.tests["functions"]):
        due = [record for record in tested if in_part(test, record.part)]
        for odd, common, others in _odd({record.cell: test in record.tests["functions"] for record in due}):
            words = f"{'not run' if common else 'run'} here, {'run' if common else 'not run'} in {_cells(others)}"
            yield _difference("count", mode, tested, odd, others, test, words, test)


def _odd(values: Mapping[Cell, T]) -> Iterator[tuple[tuple[Cell, ...], T, int]]:
    """For each value but the most frequent: its cells, the most frequent value, and how many cells have that.

    Of two equally frequent values the one of the later cell is common: that of the newer torch.
    """
    groups: dict[T, list[Cell]] = {}
    for cell, value in values.items():
        groups.setdefault(value, []).append(cell)
    if groups:
        common = max(reversed(groups), key=lambda value: len(groups[value]))
        yield from ((tuple(cells), common, len(groups[common])) for value, cells in groups.items() if value != common)


def _difference(
    kind: str,
    mode: str,
    of: Sequence[CellRecord],
    odd: tuple[Cell, ...],
    others: int,
    what: str,
    words: str,
    case: str,
    admitted: bool = False,
) -> Difference:
    return Difference(kind, mode, odd, others, what, words, cause(odd, of), (case,), admitted)


def cause(odd: Sequence[Cell], records: Sequence[CellRecord]) -> str:
    """The facts that each odd cell has and no other: torch and Python or, where neither has, libraries."""
    here = [record for record in records if record.cell in odd]
    there = [record for record in records if record.cell not in odd]

    def shared(values: Mapping[Cell, str]) -> str | None:
        ours, theirs = ({values[record.cell] for record in side} for side in (here, there))
        return None if ours & theirs else f"{' or '.join(sorted(ours))} (elsewhere {', '.join(sorted(theirs))})"

    known = {"torch": {r.cell: r.cell.torch for r in records}, "Python": {r.cell: r.cell.python for r in records}}
    libraries = dict.fromkeys(name for record in records for name in record.facts if name not in ("torch", "python"))
    others = {name: {r.cell: r.facts.get(name, "none") for r in records} for name in libraries}
    for facts in (known, others):
        if found := [f"{name} {said}" for name, values in facts.items() if (said := shared(values)) is not None]:
            which = "the only cell" if len(here) == 1 else f"all {len(here)} cells, and no other,"
            return f"Cause: {which} with {'; '.join(found)}."
    return "Cause: no version that these cells share and the others lack."


def _grouped(found: Sequence[Difference]) -> list[Difference]:
    """One difference for the same cells, kind and routine; its cases together."""
    groups: dict[tuple[object, ...], Difference] = {}
    for one in found:
        key = (one.kind, one.cells, one.what, one.admitted)
        groups[key] = replace(groups[key], cases=groups[key].cases + one.cases) if key in groups else one
    order = ("verdict", "bits", "count", "test")
    return sorted(groups.values(), key=lambda one: order.index(one.kind))


def _cells(number: int) -> str:
    return counted(number, "other cell")


def _digest(x: Tensor) -> str:
    import hashlib

    return hashlib.sha256(f"{list(x.shape)} {x.dtype}".encode() + x.numpy().tobytes()).hexdigest()[:12]


def _apart(here: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> str:
    """How bits differ: of which output, in how many elements, and the first of them."""
    for name in sorted({*here, *there}):
        x, y = here.get(name), there.get(name)
        if x is None or y is None:
            return f"{name} is {'absent' if x is None else 'there'} here"
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return f"{name} is {list(x.shape)} {x.dtype}, not {list(y.shape)} {y.dtype}"
        if (differs := (x != y)).any():
            at = differs.nonzero()[0].tolist()
            digits, size = 2 * x.element_size(), 256 ** x.element_size()
            first, second = (f"0x{int(z[tuple(at)]) % size:0{digits}x}" for z in (x, y))
            count = f"{int(differs.sum())} of {x.numel()} elements of {name} differ"
            return f"{count}, the first at {at}: {first}, not {second} (digest {_digest(x)}, not {_digest(y)})"
    return "the same bits"


# --- the command line ---------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.matrix")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("cells").add_argument("--here", action="store_true")
    runs = actions.add_parser("run")
    runs.add_argument("name")
    runs.add_argument("more", nargs=argparse.REMAINDER)
    actions.add_parser("path")
    actions.add_parser("next-cell")
    actions.add_parser("sample").add_argument("folder", type=Path)
    actions.add_parser("step").add_argument("command", nargs=argparse.REMAINDER)
    excluded = actions.add_parser("unsupported")
    excluded.add_argument("folder", type=Path)
    excluded.add_argument("--cell", type=cell_of)
    excluded.add_argument("--reason")
    shown = actions.add_parser("page")
    shown.add_argument("folder", type=Path)
    shown.add_argument("--html", type=Path)
    shown.add_argument("--markdown", type=Path)
    options = parser.parse_args(argv)
    if options.action == "cells" and options.here:
        print(*dict.fromkeys(cell.environment for cell in CELLS if why_not(cell) is None), sep=",")
    elif options.action == "cells":
        for cell in CELLS:
            print(cell, f"UNSUPPORTED: {reason}" if (reason := why_not(cell)) else "", sep="\t")
    elif options.action == "run":
        return run(options.name, options.more)
    elif options.action == "path":
        places = [place for version in PYTHONS if (place := interpreter(version)) is not None]
        print(*(Path(place).parent for place in places), sep=os.pathsep)
    elif options.action == "next-cell":
        commits = subprocess.run(["git", "rev-list", "--count", "HEAD"], capture_output=True, text=True, check=True)
        print(next_cell(int(commits.stdout), [cell for cell in CELLS if cell.mode != "cpu" and why_not(cell) is None]))
    elif options.action == "sample":
        return int(sample(options.folder) > 0)
    elif options.action == "step":
        return step(options.command)
    elif options.action == "unsupported":
        reasons = {options.cell: options.reason} if options.cell else {cell: why_not(cell) for cell in CELLS}
        for cell, reason in reasons.items():
            if reason:
                unsupported(options.folder, cell, reason)
    else:
        from tests.support import matrix_page

        matrix = merge(load(options.folder))
        if options.html:
            options.html.write_text(matrix_page.to_html(matrix))
        if options.markdown:
            options.markdown.write_text(matrix_page.to_markdown(matrix))
        print(matrix_page.to_text(matrix))
        return int(not matrix.ok)
    return 0


if __name__ == "__main__":
    from tests.support import matrix  # the page looks cells up by their class, and this module's has another name

    sys.exit(matrix.main(sys.argv[1:]))
