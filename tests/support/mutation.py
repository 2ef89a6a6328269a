"""Mutants of what decides whether an output is right: is a wrong operator, number or summand noticed by a test?

    python tests/support/mutation.py                              every mutant of every room; hours
    python tests/support/mutation.py oracle/truth --sample 80     80 of them, by --seed
    python tests/support/mutation.py --ci                         a few of the files that were run whole

The mutants are those of cosmic-ray's operators in ``OPERATORS`` and of ``DropTerm``. Its own runner imports
torch for each mutant, and mutmut replaces functions by generated ones, which numba cannot compile. Here one process
collects the tests of a room and forks for each mutant: in the fork the mutated function gets its new code, and the
tests that call it run, the cheapest first, until one fails. Which tests call it is recorded by a run of each file of
tests under a profiler, kept in ``build/mutants``. A mutant outside of functions, or of what numba compiles, takes the
place of its module before anything of this repository is imported. No file of the repository is written.

A survivor has its reason in ``tests/survivors.toml``: an argument why no output, or no decision, differs from that of
the right program. The status is 1 where one is not listed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.abc
import importlib.util
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import parso
import pytest
from cosmic_ray.ast import ast_nodes
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.plugins import get_operator
from parso.python.tree import Module, PythonNode

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = "tests/support/goldens.py"
EDGES = "tests/bounds/test_edges.py"
THRESHOLDS, WIDTHS = "tests/bounds/test_thresholds.py", "tests/bounds/test_widths.py"
LIMITS = "tests/bounds/test_limits.py"
BY_HAND = "tests/truth/test_by_hand.py"
TESTS = {
    # what is mutated: the tests of it; of several names that a path begins with, the longest counts
    "oracle/numbers/": ("tests/numbers", GOLDENS),
    "oracle/numbers/mx_recipes.py": ("tests/numbers", "tests/routines/mx", GOLDENS),
    "oracle/numbers/ue8m0.py": ("tests/numbers/test_ue8m0.py", GOLDENS),
    "oracle/truth/": ("tests/truth", GOLDENS),
    "oracle/truth/activation.py": ("tests/routines/moe", GOLDENS),
    "oracle/truth/attention.py": ("tests/routines/attention", GOLDENS),
    "oracle/truth/int8.py": ("tests/routines/int8", GOLDENS),
    "oracle/truth/hadamard.py": ("tests/numbers/test_mx_forms.py", "tests/routines/mx", BY_HAND, GOLDENS),
    "oracle/truth/linear.py": ("tests/truth", "tests/routines/products", GOLDENS),
    "oracle/truth/logits.py": ("tests/routines/logits", BY_HAND, GOLDENS),
    "oracle/truth/moe.py": ("tests/routines/moe", BY_HAND, GOLDENS),
    "oracle/truth/routing.py": ("tests/routines/moe", BY_HAND, GOLDENS),
    "oracle/truth/tiles.py": ("tests/truth/test_tiles.py", GOLDENS),
    "oracle/truth/weight_only.py": ("tests/routines/weight_only", GOLDENS),
    "oracle/bounds/": ("tests/bounds", GOLDENS),
    "oracle/bounds/activation.py": ("tests/routines/moe", GOLDENS),
    "oracle/bounds/attention.py": ("tests/routines/attention", "tests/bounds", GOLDENS),
    "oracle/bounds/boxed.py": ("tests/routines/moe", EDGES, LIMITS, THRESHOLDS, GOLDENS),
    "oracle/bounds/code_boxes.py": ("tests/routines/moe", EDGES, LIMITS, GOLDENS),
    "oracle/bounds/logits.py": ("tests/routines/logits", EDGES, LIMITS, WIDTHS, GOLDENS),
    "oracle/bounds/norm.py": ("tests/routines/fused", EDGES, LIMITS, WIDTHS, GOLDENS),
    "oracle/bounds/outer.py": (
        "tests/routines/products",
        "tests/routines/mx_products",
        "tests/verdict",
        EDGES,
        LIMITS,
        THRESHOLDS,
        WIDTHS,
        GOLDENS,
    ),
    "oracle/bounds/quantiser.py": (
        "tests/bounds/test_quantiser.py",
        "tests/routines/quantisers",
        "tests/routines/mx",
        EDGES,
        LIMITS,
        THRESHOLDS,
        GOLDENS,
    ),
    "oracle/bounds/screen.py": ("tests/bounds", "tests/verdict", GOLDENS),
    "oracle/bounds/rotary.py": ("tests/routines/fused", EDGES, LIMITS, WIDTHS, GOLDENS),
    "oracle/bounds/triton_join.py": ("tests/bounds", "tests/verdict", GOLDENS),
    "oracle/bounds/triton_screen.py": ("tests/bounds", "tests/verdict", GOLDENS),
    "oracle/bounds/triton_sums.py": ("tests/bounds", "tests/verdict", GOLDENS),
    "oracle/verdict/": ("tests/verdict",),
    "kernels/plan.py": ("tests/kernels/test_plan.py",),
    "kernels/support.py": (
        "tests/kernels/test_plan.py",
        "tests/kernels/test_platform.py",
        "tests/kernels/test_blackwell_plan.py",
    ),
    "kernels/checks.py": ("tests/kernels/test_checks.py", "tests/kernels/test_bad_input.py"),
}
ROOMS = [
    "oracle/numbers",
    "oracle/truth",
    "oracle/bounds",
    "oracle/verdict",
    *(name for name in TESTS if "kernels/" in name),
]
SURVIVORS = ROOT / "tests/survivors.toml"
MAPS = ROOT / "build/mutants"
OPERATORS = (
    *(f"core/ReplaceBinaryOperator_{pair}" for pair in
      ("Add_Sub", "Sub_Add", "Mul_Add", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul", "LShift_RShift",
       "RShift_LShift", "BitAnd_BitOr", "BitOr_BitAnd", "BitXor_BitOr")),
    *(f"core/ReplaceComparisonOperator_{pair}" for pair in
      ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")),
    *(f"core/ReplaceUnaryOperator_Delete_{name}" for name in ("USub", "Invert", "Not")),
    *(f"core/{name}" for name in
      ("NumberReplacer", "AddNot", "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse",
       "ReplaceFalseWithTrue", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop")),
)  # fmt: skip  # a table
IDLE_ARGUMENTS = {"lru_cache": ("maxsize",), "dataclass": ("frozen", "kw_only")}  # of decorators
_HELD: tuple[str, ...] = (
    "TILE",
    "BAND",
    "CUBE",
    "KEPT",
    "HELD",
    "TOGETHER",
    "RESULT",
    "NEARBY",
    "CHUNK_BYTES",
    "LONG",
    "LANES",
)
SIZES = (*_HELD, *(f"{name}_ON_DEVICE" for name in _HELD))
"""Constants that say how much is held or computed at once, or by which of two ways whose results are equal."""
APART = tuple(f"oracle/bounds/triton_{name}.py" for name in ("join", "screen", "sums"))
"""What Triton runs: in its interpreter, which must be asked for before it is imported, so in a process of its own where
no mutant is. A folder is drawn from without them; a file that is named is run."""
SURVIVED = "survived"
IN_CI = 4  # mutants
UNRECORDED = 60  # seconds of CPU of a mutant where no run of the tests is on record: they take 20
PART = 8  # mutants
BROKEN = 70  # the exit status of a fork that raises
MEMORY = 6 << 30  # bytes of addresses that a mutant may ask for: tests take 2 to 3 GiB
LONG = 7 * 24 * 3600  # seconds of CPU


class DropTerm(Operator):  # type: ignore[misc]
    """A summand less."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """One for each summand."""
        if node.type == "arith_expr":
            yield from ((child.start_pos, child.end_pos) for child in node.children[::2])

    def mutate(self, node: Any, index: int) -> Any:
        """The summand with the sign before it is gone; of the first one, the sign behind it stays."""
        kept = node.children[: 2 * index - 1] + node.children[2 * index + 1 :] if index else node.children[1:]
        return PythonNode("arith_expr", kept)

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """What cosmic-ray's own operators say of themselves."""
        return (Example("x = a - b", "x = - b"), Example("x = a - b", "x = a", occurrence=1))


@dataclass(frozen=True)
class Mutant:
    """One change of one file. ``outer`` and ``inner`` name the function or method it is in, and the innermost one."""

    path: str
    line: int
    before: str
    after: str
    source: str
    outer: str
    inner: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What the list of survivors names it by: the same for equal changes of equal lines of a file."""
        return self.path, self.before, self.after

    @property
    def module(self) -> str:
        """Its name when imported."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {self.before}  =>  {self.after}"


# --- the mutants of a file -------------------------------------------------------------------------------------


def mutants(path: str, only: Collection[str] | None = None) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines; or ``only`` those of such lines, written as in the list."""
    source = (ROOT / path).read_text()
    tree, functions = parso.parse(source), _functions(source)
    lines = [only is None or " ".join(line.split()) in only for line in source.splitlines()]
    nodes = [
        node for node in ast_nodes(tree) if any(lines[node.start_pos[0] - 1 : node.end_pos[0]]) and not _idle(node)
    ]
    made = []
    for operator in (*(get_operator(name)() for name in OPERATORS), DropTerm()):
        for node in nodes:
            for index, (start, _) in enumerate(operator.mutation_positions(node)):
                text = _mutated(tree, node, operator, index)
                before, after = _difference(source, text)
                if before != after:
                    outer, inner = functions(start[0])
                    made.append(Mutant(path, start[0], before, after, text, outer, inner))
        if tree.get_code() != source:
            raise AssertionError(f"{type(operator).__name__} leaves {path} changed")
    return sorted(made, key=lambda mutant: mutant.line)


def _idle(node: Any) -> bool:
    """Whether no result depends on a node: part of an annotation, of what a text says, or the ``strict`` of a zip; what
    a cache holds, or how much is computed at once; whether the fields of a record can be set later, or be given by
    position."""
    argument = ""
    condition = {"if_stmt": 1, "test": 2}.get(node.type)  # what is negated
    if _compares_sizes(node if condition is None else node.children[condition]):
        return True
    while node.parent is not None:
        child, node = node, node.parent
        if node.type in ("annassign", "tfpdef") and node.children[{"annassign": 1, "tfpdef": 2}[node.type]] is child:
            return True
        if node.type == "funcdef" and node.annotation is child:
            return True
        if node.type in ("raise_stmt", "assert_stmt", "fstring_expr"):
            return True
        if _compares_sizes(node):
            return True
        if node.type == "argument":
            argument = node.children[0].get_code().strip()
        if node.type == "decorator":
            return argument in IDLE_ARGUMENTS.get(node.children[1].get_code().strip().partition("(")[0], ())
        if argument == "strict" or (node.type == "expr_stmt" and _sizes(node)):
            return True
    return False


def _compares_sizes(node: Any) -> bool:
    return node.type == "comparison" and any(part.type == "name" and part.value in SIZES for part in node.children)


def _sizes(statement: Any) -> bool:
    """Whether it gives the constants of a module a value that are all in ``SIZES``; or a variable what follows from
    one: ``SIZE_ON_DEVICE if ... else SIZE``, ``max(1, SIZE // ...)``, of such a variable in small letters too."""
    names = statement.children[0].get_code().replace(",", " ").split()
    if statement.parent.parent.type == "file_input":
        return all(name in SIZES for name in names)
    value = statement.children[-1]
    follows = value.type == "test" or (value.type == "atom_expr" and value.children[0].get_code().strip() == "max")
    return follows and any(part.type == "name" and part.value.upper() in SIZES for part in ast_nodes(value))


def _mutated(tree: Module, node: Any, operator: Any, index: int) -> str:
    """The text of the tree with one node changed; the tree stays as it was."""
    siblings = node.parent.children if node.parent else [node]
    place = next(i for i, child in enumerate(siblings) if child is node)
    parts = list(ast_nodes(node))
    kept = [{k: getattr(part, k) for k in ("value", "prefix", "parent") if k in dir(part)} for part in parts]
    children = [list(part.children) if hasattr(part, "children") else None for part in parts]
    siblings[place] = operator.mutate(node, index)
    text: str = tree.get_code()
    siblings[place] = node
    for part, values, below in zip(parts, kept, children, strict=True):
        if below is not None:
            part.children, part.parent = below, values["parent"]
        else:
            part.value, part.prefix, part.parent = values["value"], values["prefix"], values["parent"]
    return text


def _difference(source: str, text: str) -> tuple[str, str]:
    """The lines that differ, without their indentation and with single spaces."""
    old, new = source.splitlines(), text.splitlines()
    first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
    last = next((i for i, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=False)) if a != b), 0)
    return tuple(" ".join(" ".join(lines[first : len(lines) - last]).split()) for lines in (old, new))  # type: ignore[return-value]


def compiles(text: str) -> bool:
    """Whether the text is Python; an operator takes the ``*`` of a signature for a product."""
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _functions(source: str) -> Callable[[int], tuple[str, str]]:
    """For a line, the qualified names of the outermost and of the innermost function whose body holds it."""
    spans: list[tuple[int, int, str, str]] = []

    def walk(node: ast.AST, name: str, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                own = f"{name}{child.name}"
                spans.append((child.body[0].lineno, child.end_lineno or 0, outer or own, own))
                walk(child, f"{own}.<locals>.", outer or own)
            else:
                walk(child, f"{name}{child.name}." if isinstance(child, ast.ClassDef) else name, outer)

    walk(ast.parse(source), "", "")

    def around(line: int) -> tuple[str, str]:
        holding = [span for span in spans if span[0] <= line <= span[1]]
        return max(holding)[2:] if holding else ("", "")

    return around


# --- a mutant takes its place ----------------------------------------------------------------------------------


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def target(mutant: Mutant) -> FunctionType | None:
    """The function whose code a mutant replaces; None where that is not enough."""
    found: Any = sys.modules.get(mutant.module)
    if not mutant.outer or found is None:
        return None
    for name in mutant.outer.split("."):
        found = vars(found).get(name) if isinstance(found, (type, ModuleType)) else None
    while found is not None and not isinstance(found, FunctionType):
        if hasattr(found, "cache_clear"):
            found.cache_clear()
        found = getattr(found, "__wrapped__", None) or getattr(found, "__func__", None) or getattr(found, "fget", None)
    while found is not None and hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found if isinstance(found, FunctionType) and found.__qualname__ == mutant.outer else None


def apply(mutant: Mutant, function: FunctionType) -> None:
    """Give the function the mutant's code."""
    codes = [
        code
        for code in _codes(compile(mutant.source, function.__code__.co_filename, "exec", dont_inherit=True))
        if code.co_qualname == mutant.outer
    ]
    function.__code__ = codes[-1]


class Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A mutant is what an import of its module finds."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Of the mutant's module only."""
        if name != self.mutant.module:
            return None
        return importlib.util.spec_from_file_location(name, ROOT / self.mutant.path, loader=self)  # type: ignore[arg-type]

    def exec_module(self, module: ModuleType) -> None:
        """The mutant's text under the file's name."""
        exec(compile(self.mutant.source, str(ROOT / self.mutant.path), "exec", dont_inherit=True), vars(module))


# --- a room's tests --------------------------------------------------------------------------------------------


def started(work: Callable[[], int], cpu: float) -> int:
    """The process id of a fork that runs ``work``, ends with its status, and may take so many seconds of CPU."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        status = BROKEN
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu) + 1, int(cpu) + 2))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            log = os.open(os.environ.get("MUTANTS_LOG", os.devnull), os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            status = work()
        finally:
            os._exit(status)
    return pid


def forked(work: Callable[[], int], cpu: float) -> tuple[int, float]:
    """The exit status of ``work`` in a fork that may take so many seconds of CPU, and those that it took."""
    _, state, used = os.wait4(started(work, cpu), 0)
    return os.waitstatus_to_exitcode(state), used.ru_utime + used.ru_stime


class Room:
    """A pytest plugin that runs the collected tests for each mutant instead of once; results go to ``report``."""

    def __init__(
        self, paths: Sequence[str], chosen: Sequence[Mutant], report: Callable[[Mutant, str, float], None]
    ) -> None:
        self.paths, self.chosen, self.report = paths, chosen, report

    @cached_property
    def recorded(self) -> dict[str, Any]:
        """CPU seconds of each test, and the tests that call each function: ``calls[file:qualified name]``."""
        whole: dict[str, Any] = {"costs": {}, "calls": {}}
        for record in filter(Path.exists, map(record_of, files_of(self.paths))):
            own = json.loads(record.read_text())
            whole["costs"] |= own["costs"]
            for function, tests in own["calls"].items():
                whole["calls"][function] = sorted({*whole["calls"].get(function, ()), *tests})
        return whole

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """One fork for each mutant whose function can be replaced here, or which was imported in its place."""
        self.killer = MAPS / f"killer-{os.getpid()}"
        if session.testsfailed:
            raise session.Interrupted("tests cannot be collected")
        for mutant in self.chosen:
            function = None if self.inside(mutant) else target(mutant)
            # perhaps an import calls it, before the tests
            imported = self.recorded["costs"] and not self.callers(mutant)
            if not self.inside(mutant) and (function is None or imported):
                continue  # its turn comes alone
            tests = self.tests(session.items, mutant)
            cost = sum(self.recorded["costs"].get(test.nodeid, 2.0) for test in tests)
            limit = 20 + 4 * cost if self.recorded["costs"] else UNRECORDED
            status, took = forked(lambda: self.work(session, mutant, function, tests), limit)  # noqa: B023
            killer = self.killer.read_text() if status == 1 else f"exit {status}"
            self.killer.unlink(missing_ok=True)
            if status == BROKEN:
                raise RuntimeError(
                    f"{mutant}: not the mutant failed, but what runs it; MUTANTS_LOG=FILE keeps its output"
                )
            self.report(mutant, killer if status else f"{SURVIVED} {len(tests)} tests", took)
        return True

    def work(self, session: pytest.Session, mutant: Mutant, function: FunctionType | None, tests: Any) -> int:
        """1 where a test fails, whose name is written down."""
        if function is not None:
            apply(mutant, function)
        for test, following in zip(tests, [*tests[1:], None], strict=True):
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            if session.testsfailed:
                self.killer.write_text(test.nodeid)
                return 1
        return 0

    def inside(self, mutant: Mutant) -> bool:
        """Whether the mutant is what was imported here."""
        return any(isinstance(finder, Instead) and finder.mutant is mutant for finder in sys.meta_path)

    def callers(self, mutant: Mutant) -> list[str]:
        """The tests that the record has for the mutant's function."""
        found: list[str] = self.recorded["calls"].get(f"{mutant.path}:{mutant.inner}", [])
        return found

    def tests(self, items: Sequence[pytest.Item], mutant: Mutant) -> list[pytest.Item]:
        """Those that call the function, and those that are not in the record, the cheapest first."""
        costs = self.recorded["costs"]
        if costs and not self.inside(mutant):
            callers = self.callers(mutant)
            items = [item for item in items if item.nodeid in callers or item.nodeid not in costs]
        own = f"test_{Path(mutant.path).stem}"
        return sorted(items, key=lambda item: (costs.get(item.nodeid, 0.0), not item.path.stem.startswith(own)))


class Record(Room):
    """Runs every test of one file once under a profiler and keeps which of them call what."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of the tests."""
        costs: dict[str, float] = {}
        calls: dict[str, list[str]] = {}
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            seen: set[CodeType] = set()

            def profile(frame: FrameType, event: str, _: object, seen: set[CodeType] = seen) -> None:
                if event == "call":
                    seen.add(frame.f_code)

            start = time.process_time()
            threading.setprofile(profile)
            sys.setprofile(profile)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            sys.setprofile(None)
            costs[item.nodeid] = round(time.process_time() - start, 3)
            for code in seen:
                path = code.co_filename.removeprefix(f"{ROOT}/")
                if path.startswith(tuple(TESTS)):
                    calls.setdefault(f"{path}:{code.co_qualname}", []).append(item.nodeid)
        (path,) = self.paths
        record_of(path).write_text(json.dumps({"costs": costs, "calls": calls}))
        return True


def record_of(file: str) -> Path:
    """Where it is kept which functions the tests of a file call."""
    return MAPS / f"{file.replace('/', '-')}.json"


def files_of(paths: Sequence[str]) -> list[str]:
    """The files of tests that the ``paths`` of files and folders stand for."""
    found = [path for path in paths if path.endswith(".py")]
    folders = [ROOT / path for path in paths if not path.endswith(".py")]
    found += [str(file.relative_to(ROOT)) for folder in folders for file in folder.rglob("test_*.py")]
    return sorted({*found})


def collect(tests: Sequence[str], room: Room) -> int:
    """The plugin's loop over these tests; pytest's status."""
    os.chdir(ROOT)
    os.environ["HYPOTHESIS_PROFILE"] = "unshrunk"
    os.environ["FP8_ORACLE_CACHE"] = "0"  # no mutant's answer is kept
    # pytest rewrites the assertions of whatever brings a plugin, as this package does: its importer would come before
    # :class:`Instead`, and the mutant never run
    options = ["-q", "-x", "--tb=no", "-p", "no:cacheprovider", "--assert=plain", "--every-turn"]
    return int(pytest.main([*tests, *options], plugins=[room]))


def alone(mutant: Mutant, tests: Sequence[str], report: Callable[[Mutant, str, float], None]) -> int:
    """The mutant takes the place of its module, then the tests are collected."""
    sys.meta_path.insert(0, Instead(mutant))
    return collect(tests, Room(tests, [mutant], report))


def judge(chosen: Sequence[Mutant], results: Path, *, record: bool, jobs: int = 1) -> dict[Mutant, str]:
    """What became of each mutant: the test that failed, or ``SURVIVED`` and how many tests. Written to ``results``, by
    ``jobs`` processes at once."""
    MAPS.mkdir(parents=True, exist_ok=True)
    results.write_text("")

    def report(mutant: Mutant, result: str, took: float) -> None:
        with results.open("a") as file:
            file.write(json.dumps([chosen.index(mutant), result, round(took, 2), str(mutant)]) + "\n")

    def reported() -> dict[Mutant, str]:
        lines = map(json.loads, results.read_text().splitlines())
        return {chosen[index]: result for index, result, *_ in lines}

    rooms = {name: [mutant for mutant in chosen if room_of(mutant.path) == name] for name in TESTS}
    if record:
        named = [path for name, own in rooms.items() if own for path in TESTS[name]]
        files = [file for file in files_of(named) if not record_of(file).exists()]
        together([partial(collect, [file], Record([file], [], report)) for file in files], jobs)
    together(
        [
            partial(collect, TESTS[name], Room(TESTS[name], part, report))
            for name, own in rooms.items()
            for part in split(own, jobs)
            if any(mutant.inner for mutant in part)
        ],
        jobs,
    )
    left = [(name, mutant) for name, own in rooms.items() for mutant in own if mutant not in reported()]
    statuses = together([partial(alone, mutant, TESTS[name], report) for name, mutant in left], jobs)
    for (_, mutant), status in zip(left, statuses, strict=True):
        if mutant not in reported():
            report(mutant, f"collection: exit {status}", 0.0)
    return reported()


def split(own: Sequence[Mutant], jobs: int) -> list[Sequence[Mutant]]:
    """Parts of at least ``PART`` mutants, at most ``jobs``: each part collects the tests once more."""
    step = max(PART, -(-len(own) // jobs))
    return [own[start : start + step] for start in range(0, len(own), step)] if jobs > 1 else [own]


def together(works: Sequence[Callable[[], int]], jobs: int) -> list[int]:
    """The exit status of each work in a fork of its own, ``jobs`` of them at once."""
    statuses, running = [0] * len(works), dict[int, int]()
    for index, work in enumerate(works):
        if len(running) == jobs:
            pid, state = os.wait()
            statuses[running.pop(pid)] = os.waitstatus_to_exitcode(state)
        running[started(work, LONG)] = index
    for pid, index in running.items():
        statuses[index] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return statuses


def room_of(path: str) -> str:
    """The longest name of ``TESTS`` that a path begins with."""
    return max((name for name in TESTS if path.startswith(name)), key=len)


# --- the list of survivors -------------------------------------------------------------------------------------


def listed() -> tuple[list[str], dict[tuple[str, str, str], str]]:
    """The files of which every mutant was run, and the reason of each survivor."""
    kept = tomllib.loads(SURVIVORS.read_text())
    reasons = {(entry["file"], *pair): entry["reason"] for entry in kept["survivor"] for pair in entry["mutants"]}
    return kept["whole"], reasons


def main() -> int:
    """Draw, run, print; 1 where a mutant survives that is not listed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=ROOMS, help="files, or folders")
    parser.add_argument("--sample", type=int, help="so many mutants instead of all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--match", default="", help="only mutants whose line in the answer contains this")
    parser.add_argument("--ci", action="store_true", help="some of the files that were run whole, by the commit count")
    options = parser.parse_args()
    whole, reasons = listed()
    if options.ci:
        count = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
        options.seed, options.sample = int(count or 0), IN_CI
        options.paths = [whole[options.seed % len(whole)]]
    files = sorted(
        {
            str(file.relative_to(ROOT))
            for path in options.paths
            for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).glob("*.py"))
            if path.endswith(".py") or str(file.relative_to(ROOT)) not in APART
        }
    )
    drawn = [mutant for file in files for mutant in mutants(file) if options.match in str(mutant)]
    if options.sample:
        random.Random(options.seed).shuffle(drawn)
    if options.ci:
        drawn = [mutant for mutant in drawn if mutant.inner and mutant.key not in reasons]
    valid = (mutant for mutant in drawn if compiles(mutant.source))
    drawn = list(itertools.islice(valid, options.sample))
    found = judge(drawn, MAPS / f"results-{os.getpid()}.jsonl", record=not options.ci, jobs=options.jobs)
    unlisted = 0
    for path in APART:
        if path not in files and path.startswith(tuple(options.paths)):
            print(f"{path}: not drawn from; its tests run in processes of their own")
    for room in ROOMS:
        own = {mutant: result for mutant, result in found.items() if mutant.path.startswith(room)}
        survived = [mutant for mutant, result in own.items() if result.startswith(SURVIVED)]
        new = [mutant for mutant in survived if mutant.key not in reasons]
        unlisted += len(new)
        if own:
            killed = len(own) - len(survived)
            print(f"{room}: {len(own)} mutants, {killed} killed, {len(survived) - len(new)} survive with a reason")
        for mutant in new:
            print(f"  no reason: {mutant} ({own[mutant]})")
    return int(unlisted > 0)


if __name__ == "__main__":
    sys.exit(main())
