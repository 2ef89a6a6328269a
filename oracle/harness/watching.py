"""``oracle.watch``: the calls of a running model, by kernel and layer, each judged.

The calls of every bound routine (:mod:`oracle.bindings`) are taken where they are made
(:mod:`oracle.harness.interception`), under the path of the module that runs (:mod:`oracle.harness.module_paths`). Of
each kernel in each layer the first call is judged, and then one in so many: at once, in a thread of its own, so that no
mode, autocast or default of the model reaches the judge; or it is recorded into a folder and judged later. Nothing is
changed: the routine gets its own arguments, and the model what it returned.

What is copied: of a call that is judged at once the inputs that it updates in place, and the whole of the first
inadmissible one; of a call that is recorded all tensors.

Not covered: gradients; what :mod:`oracle.harness.interception` and :mod:`oracle.harness.module_paths` do not see.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import oracle
from oracle.bindings.binding import Binding, Bound, UnboundError
from oracle.bindings.known import bindings as known_bindings
from oracle.diagnosis.level import explaining
from oracle.errors import FixtureError, OptionError, OracleError, counted
from oracle.fixtures import call_file
from oracle.fixtures import files as fixtures
from oracle.fixtures.call_file import CallFile
from oracle.harness import provenance, runner
from oracle.harness.interception import Interception, Run
from oracle.harness.module_paths import ModulePaths
from oracle.harness.recorder import Recorder, Taken, arch_of, copied
from oracle.report.outcome import Outcome, quoted
from oracle.report.watched import First, Row, Watched, to_html, to_json, to_text
from oracle.routines import get
from oracle.verdict.compare import Verdict

COUNTS = "fp8-oracle.watch-counts/1"
"""The schema of what a process counted beside its recorded calls."""
OUTSIDE = "(no module)"
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "s": 1.0, "min": 60.0}
_active: list[Watch] = []
_alone = threading.Lock()


def watch(
    every: int = 1,
    budget: str = "2 GiB, 60 s",
    *,
    to: str | Path | None = None,
    arch: str | None = None,
    bindings: Iterable[Binding] = (),
) -> Watch:
    """Judge the calls of a model while it runs: ``with oracle.watch() as seen: model(x)``, then ``seen.report``.

    Parameters
    ----------
    every
        Of each kernel in each layer the first call is judged, and then one in so many.
    budget
        What may be copied and how long may be judged, as ``"2 GiB, 60 s"``: calls beyond that are counted, not judged.
    to
        A folder that takes every such call as a file, for ``fp8-oracle judge`` and ``bisect``; they are judged when
        ``report`` is read. Its size is the bytes of ``budget``, and the seconds are those of the copies. None: calls
        are judged at once, and one of them is kept at most.
    arch
        Whose arithmetic is admitted, as for :func:`oracle.judge`; None is that of the device of the call.
    bindings
        Beside those of ``fp8-oracle list bindings``: which routines are known (:func:`oracle.bindings.binding.bind`).

    Returns
    -------
    Watch
        A context manager. Its ``report`` has ``rows`` by layer and kernel, ``first``, the first inadmissible call in
        program order, ``notes`` of what could not be seen, and ``ok``; ``write(folder)`` writes a page, a JSON file and
        that call, ``print()`` prints a table. What a call raises is raised; a problem of the watch never is.

    Raises
    ------
    OptionError
        A number is below 1, the budget cannot be read, or another watch is on.
    FixtureError
        The folder cannot be made.
    """
    if every < 1:
        raise OptionError(f"every={every} is no number of calls; 1 judges each of them")
    bytes_, seconds = parse_budget(budget)
    return Watch(every, bytes_, seconds, None if to is None else Path(to), arch, (*known_bindings(), *bindings))


def parse_budget(text: str) -> tuple[int, float]:
    """The bytes and the seconds of ``"2 GiB, 60 s"``. Raises OptionError: it is of another form."""
    results: dict[bool, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", part)
        if match is None or match[2] not in _UNITS:
            raise OptionError(f"budget {text!r}: {part.strip()!r} is no size or time; as 2 GiB, 60 s")
        results[isinstance(_UNITS[match[2]], float)] = float(match[1]) * _UNITS[match[2]]
    if len(results) != 2:
        raise OptionError(f"budget {text!r} needs a size and a time; as 2 GiB, 60 s")
    return int(results[False]), results[True]


@dataclass
class _Site:
    """One kernel in one layer, while the model runs."""

    layer: str
    kernel: str
    calls: itertools.count[int] = field(default_factory=itertools.count)
    seen: int = 0
    unread: Counter[str] = field(default_factory=Counter)


class Rows:
    """Verdicts added up by layer and kernel, and the first inadmissible one; calls are added in program order."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self.first: First | None = None

    def explained(self, layer: str, kernel: str) -> bool:
        """Whether a failure of the row has been explained already; the next one need not be."""
        row = self.rows.get((layer, kernel))
        return row is not None and row.fails

    def add(self, layer: str, kernel: str, contract: str, verdict: Verdict) -> None:
        """Add the verdict on one call."""
        row = self.rows.get((layer, kernel)) or Row(layer, kernel, contract, 0)
        counts = Counter(row.counts)
        counts[str(verdict.status)] += 1
        why = row.why
        if not why and verdict.status.is_failure:
            why = "; or ".join(verdict.explained_by) or verdict.reason or verdict.summary
        loss, error = verdict.loss, verdict.error
        sqnr = loss.sqnr if loss is not None else None if error is None else error.sqnr
        self.rows[layer, kernel] = replace(
            row,
            contract=contract,
            counts=dict(counts),
            sqnr=_of(min, row.sqnr, sqnr),
            saturated=_of(max, row.saturated, None if loss is None else loss.saturated),
            ulps=_of(max, row.ulps, None if error is None else error.ulps),
            matches=verdict.matches or row.matches,
            why=why,
            quantises=row.quantises or loss is not None,
        )

    def of(self, sites: Iterable[tuple[str, str, int, Mapping[str, int]]]) -> tuple[Row, ...]:
        """A row for every site ``(layer, kernel, calls, reasons)``, in their order."""
        results: dict[tuple[str, str], Row] = {}
        for layer, kernel, calls, unread in sites:
            row = results.get((layer, kernel)) or self.rows.get((layer, kernel)) or Row(layer, kernel, "", 0)
            reasons = Counter(row.unread)
            reasons.update(unread)
            results[layer, kernel] = replace(row, calls=row.calls + calls, unread=dict(reasons))
        left = [replace(row, calls=sum(row.counts.values())) for key, row in self.rows.items() if key not in results]
        return (*results.values(), *left)


def _of(which: Callable[[float, float], float], one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else which(one, other)


class Watch:
    """A watch of this process, on from ``__enter__`` to ``__exit__``; made by :func:`watch`."""

    def __init__(
        self,
        every: int,
        max_bytes: int,
        seconds: float,
        to: Path | None,
        arch: str | None,
        bindings: Sequence[Binding],
    ) -> None:
        self._every, self._max_bytes, self._seconds, self._arch = every, max_bytes, seconds, arch
        self._recorder = None if to is None else Recorder(to, max_bytes, "a watched model")
        self._bindings: dict[str, list[Binding]] = {}
        for one in bindings:
            self._bindings.setdefault(one.target, []).append(one)
        self._paths = ModulePaths()
        self._sites: dict[tuple[str, str], _Site] = {}
        self._numbers = itertools.count()
        self._rows, self._first_call = Rows(), dict[int, CallFile]()
        self._lock = threading.Lock()
        self._judge: ThreadPoolExecutor | None = None
        self._judging = threading.local()
        self._used = self._began = 0.0
        self._late = self._captured = self._replays = 0
        self._on = False
        self._ended: Watched | None = None
        self._interception: Interception | None = None
        itself = weakref.ref(self)

        def in_child() -> None:
            if (seen := itself()) is not None:
                seen._fresh()

        os.register_at_fork(after_in_child=in_child)

    # --- on and off -----------------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        with _alone:
            if _active:
                raise OptionError("a watch is on in this process; end it before another begins")
            _active.append(self)
        self._began, self._on = time.perf_counter(), True
        self._replay = torch.cuda.CUDAGraph.replay
        try:
            self._paths.start()
            loads = {module for several in self._bindings.values() for one in several for module in one.loads}
            self._interception = Interception(self._bindings, loads, self._around)
            torch.cuda.CUDAGraph.replay = self._replayed()  # type: ignore[method-assign]
        except BaseException:  # raised again: nothing stays intercepted
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Take everything back, wait for what is still to be written, and write what was counted."""
        if not self._on:
            return
        self._on = False
        torch.cuda.CUDAGraph.replay = self._replay  # type: ignore[method-assign]
        if self._interception is not None:
            self._interception.remove()
        self._paths.end()
        _active.remove(self)
        if self._judge is not None:
            self._judge.shutdown()
        if self._recorder is not None:
            self._recorder.flush()
            self.write_counts()
        self._taken = time.perf_counter() - self._began

    def _fresh(self) -> None:
        """A child that was forked has no thread that judges, and counts anew."""
        self._judge, self._lock = None, threading.Lock()
        self._sites.clear()

    def _replayed(self) -> Callable[..., Any]:
        replay = self._replay

        def counted_replay(graph: torch.cuda.CUDAGraph) -> None:
            self._replays += 1
            replay(graph)

        return counted_replay

    # --- a call ---------------------------------------------------------------------------------------------

    def _around(self, target: str, run: Run, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make a call, and judge or record it where it is its turn. It gets its number when it has returned, so that
        what a routine calls inside comes before it."""
        if not self._on or getattr(self._judging, "on", False):
            return run()
        layer = self._paths.path or OUTSIDE
        site = self._sites.get((target, layer))
        if site is None:
            site = self._sites.setdefault((target, layer), _Site(layer, target))
        occurrence = next(site.calls)
        site.seen = max(site.seen, occurrence + 1)
        if occurrence % self._every or not self._may_judge():
            result = run()
            next(self._numbers)
            return result
        start = time.perf_counter()
        updated = self._updated(target, args, kwargs)
        before = time.perf_counter() - start
        result = run()
        start, number = time.perf_counter(), next(self._numbers)
        try:
            self._taken_by(site, number, occurrence, updated, args, kwargs, result)
        except OracleError as error:  # UnboundError, and what the contract refuses
            site.unread[str(error)] += 1
        except Exception as error:  # of the watch itself, as a full memory of the device: the model goes on
            site.unread[f"{type(error).__name__}: {error}"] += 1
        self._used += before + time.perf_counter() - start
        return result

    def _may_judge(self) -> bool:
        begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if begun and torch.cuda.is_current_stream_capturing():
            self._captured += 1
            return False
        if self._used > self._seconds:
            self._late += 1
            return False
        return True

    def _updated(self, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The inputs that the call will update in place, as they are before it."""
        for binding in self._bindings[target]:
            try:
                return binding.updated(args, kwargs)
            except (OracleError, RuntimeError):  # read() says it again; or no memory for a copy of a cache
                continue
        return {}

    def _taken_by(
        self,
        site: _Site,
        number: int,
        occurrence: int,
        updated: Mapping[str, Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        """Judge or record a call that has returned. Raises UnboundError: no binding describes it."""
        binding, bound = self._bound(site.kernel, args, kwargs, result)
        inputs = {**bound.inputs, **updated}
        if not bound.outputs:
            raise UnboundError(f"{site.kernel} returned nothing that the binding names")
        device = next(iter(bound.outputs.values())).device
        arch = self._arch or arch_of(device)
        if self._recorder is not None:
            if self._recorder.room(sum(x.nbytes for x in (*inputs.values(), *bound.outputs.values()))):
                built = {name: copied(x, name) for name, x in inputs.items()}
                head = (number, binding.contract, site.kernel, built, bound.options, binding.numerics)
                about = {"layer": site.layer, "call": str(number), "occurrence": str(occurrence)}
                taken = Taken(*head, about=about)
                taken.finish(bound.outputs, arch)
                self._recorder.put(taken, wait=True)
            return
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        if self._judge is None:
            self._judge = ThreadPoolExecutor(1, "fp8-oracle-judge", self._begins, (torch.get_num_threads(),))
        call = (binding, inputs, bound.options, bound.outputs, arch)
        self._judge.submit(self._judged, site, number, *call).result()

    def _bound(self, target: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> tuple[Binding, Bound]:
        """The first binding of a target that describes a call."""
        reasons = []
        for binding in self._bindings[target]:
            try:
                return binding, binding.read(args, kwargs, returned=result)
            except UnboundError as error:  # another binding may read it; the first reason is raised
                reasons.append(str(error))
        raise UnboundError(reasons[0])

    # --- in the thread that judges --------------------------------------------------------------------------

    def _begins(self, threads: int) -> None:
        self._judging.on = True
        torch.set_num_threads(threads)

    def _judged(
        self,
        site: _Site,
        number: int,
        binding: Binding,
        inputs: dict[str, Tensor],
        options: dict[str, object],
        outputs: dict[str, Tensor],
        arch: str,
    ) -> None:
        contract = get(binding.contract)
        output = outputs["out"] if tuple(outputs) == ("out",) else outputs
        known = self._rows.explained(site.layer, site.kernel)
        with explaining("off") if known else nullcontext():
            verdict = runner.judge_outputs(
                contract, inputs, output, arch=arch, numerics=binding.numerics, call=options
            ).settled()
        self._rows.add(site.layer, site.kernel, binding.contract, verdict)
        first = self._rows.first
        if verdict.status.is_failure and (first is None or number < first.number):
            named = (binding.contract, site.kernel, arch)
            self._rows.first = First(number, site.layer, Outcome(f"watched/{number}", *named, verdict, command=""))
            self._first_call.clear()
            if sum(x.nbytes for x in (*inputs.values(), *outputs.values())) <= self._max_bytes:
                remaining = {name: copied(x, name) for name, x in inputs.items()}
                result = {name: copied(x, name) for name, x in outputs.items()}
                if arch.startswith("sm") and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                    torch.cuda.synchronize()
                about = {"layer": site.layer, "call": str(number)}
                single = result["out"] if tuple(result) == ("out",) else result
                head = (binding.contract, remaining, single, options, arch, binding.numerics, site.kernel, "", about)
                self._first_call[number] = CallFile(*head)

    # --- what was seen --------------------------------------------------------------------------------------

    @property
    def report(self) -> Watched:
        """What was seen, by kernel and layer; recorded calls are judged when it is first read.

        Raises OptionError: the watch is still on.
        """
        if self._on:
            raise OptionError("the watch is on; read its report after the with block")
        if self._ended is None:
            if self._recorder is not None:
                self._ended = judged(self._recorder.to)
            else:
                sites = [(s.layer, s.kernel, s.seen, s.unread) for s in self._sites.values()]
                rows = self._rows.of(sites)
                self._ended = Watched(rows, self._rows.first, self._notes(), provenance.machine(), self._taken)
        return self._ended

    @property
    def ok(self) -> bool:
        """Something was judged, and nothing that was judged is inadmissible."""
        return self.report.ok

    @property
    def first(self) -> First | None:
        """The first inadmissible call in program order."""
        return self.report.first

    def __str__(self) -> str:
        return to_text(self.report)

    def print(self) -> None:
        """Print the table by layer and kernel, what is wrong, and what could not be seen."""
        print(self, end="")

    def write(self, folder: str | Path) -> Watched:
        """Write ``watch.html``, ``watch.json`` and, of an inadmissible call, ``first.safetensors`` into a folder.

        Returns the report, whose ``first`` names the file; ``fp8-oracle explain`` repeats the judgement from it.
        """
        where, report = Path(folder), self.report
        fixtures.make_folder(where)
        if report.first is not None and (call := self._first_call.get(report.first.number)) is not None:
            path = where / f"first{call_file.SUFFIX}"
            call_file.write(path, call)
            report = self._ended = replace(report, first=_in_file(report.first, path))
        fixtures.write_bytes(where / "watch.html", to_html(report).encode())
        fixtures.write_json(where / "watch.json", to_json(report))
        return report

    def write_counts(self) -> None:
        """Write what this process counted beside its recorded calls, for :func:`judged`."""
        if self._recorder is None:
            return
        sites = [[s.layer, s.kernel, s.seen, dict(s.unread)] for s in self._sites.values()]
        counts = {"schema": COUNTS, "sites": sites, "notes": list(self._notes()), "process": os.getpid()}
        fixtures.write_json(self._recorder.to / f"watch-{os.getpid()}-{id(self):x}.json", counts)

    def _notes(self) -> tuple[str, ...]:
        """What could not be seen or judged, in sentences."""
        notes = []
        if compiled := [*self._paths.compiled, *_compiled_functions()]:
            few = ", ".join(compiled[:4]) + (f" and {len(compiled) - 4} more" if len(compiled) > 4 else "")
            notes.append(
                f"inside of what torch.compile compiled ({few}) operators alone, under the layer outside of it; "
                "torch.compiler.set_stance('force_eager') shows the rest, with the arithmetic of the uncompiled model"
            )
        if self._captured:
            notes.append(
                f"{counted(self._captured, 'call')} while a CUDA graph was captured: run the model without graphs"
            )
        if self._replays:
            notes.append(
                f"calls inside {counted(self._replays, 'replay')} of CUDA graphs: run the model without graphs"
            )
        if self._late:
            notes.append(f"{counted(self._late, 'call')} beyond the budget of {self._seconds:g} s: raise it, or every")
        if self._recorder is not None:
            if self._recorder.dropped:
                notes.append(f"{counted(self._recorder.dropped, 'call')} beyond the budget of {self._max_bytes} bytes")
            notes += list(dict.fromkeys(self._recorder.problems))
        return tuple(notes)


def _in_file(first: First, path: Path) -> First:
    command = f"fp8-oracle explain {quoted(str(path))}"
    return replace(first, file=str(path), outcome=replace(first.outcome, command=command))


def _compiled_functions() -> Iterator[str]:
    """The functions that torch.compile has compiled in this process, those of torch left out."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    inside = (os.path.dirname(torch.__file__), os.path.dirname(oracle.__file__), "<")
    for reference in getattr(getattr(frames, "input_codes", None), "seen", ()):
        code = reference()
        if code is not None and not code.co_filename.startswith(inside):
            yield f"{code.co_qualname} at {os.path.basename(code.co_filename)}:{code.co_firstlineno}"


# --- a folder of recorded calls -------------------------------------------------------------------------------


def ordered(folder: Path) -> list[tuple[Path, dict[str, str]]]:
    """The calls of a folder in the order in which they returned, each with what its file says about it.

    Raises FixtureError: there is no such folder, or it holds no call of a watch.
    """
    results = []
    for path in call_file.within(folder)[0]:
        metadata = fixtures.read_metadata(path)
        about = {**json.loads(metadata.get("about", "{}")), **metadata}
        if "layer" in about and str(about.get("call", "")).isdecimal():
            results.append((path, about))
    if not results and not list(folder.glob("watch-*.json")):
        raise FixtureError(
            f"{folder}: holds no call of a watch; `fp8-oracle watch --to {folder} -- COMMAND` records them"
        )
    return sorted(results, key=lambda each: (each[1].get("time", ""), int(each[1]["call"])))


def judged(folder: Path, *, arch: str | None = None, advance: Callable[[str], None] = lambda layer: None) -> Watched:
    """Judge the recorded calls of a folder, in the order in which they returned; ``advance`` is called for each.

    Raises FixtureError: as :func:`ordered`; a file of counts is damaged.
    """
    start, rows = time.perf_counter(), Rows()
    for path, about in ordered(folder):
        layer, kernel, contract = about["layer"], about.get("kernel", ""), about["contract"]
        advance(layer)
        whose = arch or about.get("arch") or "sm90"
        with explaining("off") if rows.explained(layer, kernel) else nullcontext():
            verdict = runner.judge_call(partial(call_file.read, path), whose, None).settled()
        rows.add(layer, kernel, contract, verdict)
        if verdict.status.is_failure and rows.first is None:
            outcome = Outcome(f"calls/{path}", contract, kernel, whose, verdict)
            rows.first = _in_file(First(int(about["call"]), layer, outcome), path)
    sites, notes = list[tuple[str, str, int, Mapping[str, int]]](), dict[str, None]()
    for path in sorted(folder.glob("watch-*.json")):
        record: Any = fixtures.read_json(path, schema=COUNTS)
        sites += [(str(layer), str(kernel), int(calls), unread) for layer, kernel, calls, unread in record["sites"]]
        notes |= dict.fromkeys(map(str, record["notes"]))
    return Watched(rows.of(sites), rows.first, tuple(notes), provenance.machine(), time.perf_counter() - start)
