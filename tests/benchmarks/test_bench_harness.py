"""What the harness costs: a ``validate --profile quick`` run beside the same calls bare and judged, in one run.

    share = seconds of a part / seconds of the whole run

Parts: poison and guard zones, and the snapshots of the inputs (the recorded calls replayed in one process with and
without them), the rerun checks (timed inside the run, guards and process boundary included), the shared memory and the
channel, the start of the worker. Required: poison, guard zones, snapshots and rerun checks below 30% of the run.
Both sides run warm: engines are compiled before the clock starts, so that the run is short and the shares are large.
``pytest tests/benchmarks/test_bench_harness.py --benchmark-enable --benchmark-only`` has the shares in ``extra_info``
of the run; ``python -m tests.benchmarks.test_bench_harness`` prints them as a table (``whole``: the last lines alone).
A second group compares what a run tries by default (drawn data and shapes, edges, a kernel with a domain) with the
published cases alone, as seconds for one judged case: required below 1.5. The last lines are CPU seconds, which other
programs change less: of a whole run with its worker, less those of a worker that starts and ends, and of its calls and
judgements bare. Nothing here asserts a time; the bits of a bare call are compared with those of the watched one. Not
covered: kernels on a GPU, and the watch of threads, which calls for a fixed time once a run (left out, since it would
only make the shares smaller).
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from oracle.harness import memory, watches, worker
from oracle.harness.memory import Guarded
from oracle.harness.process import Worker
from oracle.harness.protocol import Reply
from oracle.harness.session import Answer, Session
from oracle.harness.validation import validate
from oracle.routines import get, profiles
from oracle.routines.catalogue import agree
from tests.support.in_process import InProcess
from tests.support.subjects.right import gemm_out

pytestmark = pytest.mark.turns(4)

GEMM = "fp8_gemm_nt"
KERNEL = "tests.support.subjects.right:gemm_out"
NOISE = "tests.support.subjects.wrong:noise"
FEW = [
    f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=33,n=192,k=384/family=randn/seed=1",
    f"{GEMM}/e4m3xe4m3-f32/1x128:128x128/m=5,n=128,k=256/family=randn/seed=2",
]
ROUNDS = 5  # of every replayed call; the fastest counts
OWN, TOTAL = ("poison and guard zones", "snapshots of inputs", "rerun checks"), "the harness' own"
REQUIRED = 0.30  # share of TOTAL, the sum of OWN
TRIED, PUBLISHED = "by default", "published cases alone"
REQUIRED_TRIED = 1.5  # seconds for a judged case by default, in those of the published cases alone


@dataclass
class Run:
    """One watched run: its calls, what of them was judged, and where its seconds went."""

    calls: list[tuple[Mapping[str, Tensor], Mapping[str, object], dict[str, Any], Answer]] = field(default_factory=list)
    judged: list[tuple[Mapping[str, Tensor], Mapping[str, object], Answer]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start


def watched(case: list[str] | None, kernel: str = KERNEL) -> Run:
    """``validate --profile quick``, recorded: every call with its answer, and the seconds of its parts."""
    run = Run()
    start, call, judge, repeats = Worker._start, Session.call, Session.judge, watches.repeats

    def started(self: Worker) -> Reply:
        with run.timed("start of the worker"):
            return start(self)

    def called(self: Session, inputs: Mapping[str, Tensor], options: Mapping[str, object], **how: Any) -> Answer:
        with run.timed("calls"):
            answer = call(self, inputs, options, **how)
        run.calls.append((inputs, options, how, answer))
        return answer

    def judging(self: Session, inputs: Mapping[str, Tensor], options: Mapping[str, object], answer: Answer) -> Any:
        run.judged.append((inputs, options, answer))
        with run.timed("judging"):
            return judge(self, inputs, options, answer)

    def repeating(*given: Any) -> list[Any]:
        with run.timed("rerun checks"):
            return list(repeats(*given))

    with ExitStack() as stack:
        for where, name, instead in (
            (Worker, "_start", started),
            (Session, "call", called),
            (Session, "judge", judging),
            (watches, "repeats", repeating),
            (watches, "threads", lambda *_, **__: iter(())),
        ):
            stack.enter_context(patch.object(where, name, instead))
        with run.timed("run"):
            report = validate(kernel, GEMM, case=case)
    assert report.conforms is (kernel == KERNEL), [f.verdict.summary for f in report.failures]
    run.seconds["kernel, inside"] = sum(answer.seconds for *_, answer in run.calls)
    return run


# --- the same calls with less around them -------------------------------------------------------------------


class Off:
    """No poison in what Python allocates."""

    made: tuple[Guarded, ...] = ()

    def __init__(self, poison: int) -> None:
        pass

    def __enter__(self) -> Off:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def without_snapshots() -> Iterator[None]:
    """Buffers guarded and poisoned, inputs never compared."""
    with (
        patch.object(Guarded, "snapshot", lambda self: self.buffer[:0]),
        patch.object(Guarded, "changed", lambda self, before: False),
    ):
        yield


@contextmanager
def without_anything() -> Iterator[None]:
    """No poison, no guard zone looked at, no snapshot."""
    with (
        without_snapshots(),
        patch.object(memory, "fill", lambda *_: None),
        patch.object(Guarded, "damage", lambda self: None),
        patch.object(worker, "Poisoning", Off),
    ):
        yield


def _fastest(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def ablated(run: Run) -> dict[str, float]:
    """Seconds of poison with guard zones and of snapshots, over every call of the run."""
    total = {"full": 0.0, "without snapshots": 0.0, "without anything": 0.0}
    with InProcess(KERNEL, adapter=None, device="cpu", limit=60) as here:
        session = Session(here, get(GEMM), device="cpu", arch="cpu", numerics=None)  # type: ignore[arg-type]
        for inputs, options, how, _ in run.calls:

            def again(called: tuple[Any, ...] = (inputs, options), how: dict[str, Any] = how) -> object:
                return session.call(*called, **how)

            total["full"] += _fastest(again)
            with without_snapshots():
                total["without snapshots"] += _fastest(again)
            with without_anything():
                total["without anything"] += _fastest(again)
    return {
        "poison and guard zones": total["without snapshots"] - total["without anything"],
        "snapshots of inputs": total["full"] - total["without snapshots"],
    }


def plainly(inputs: Mapping[str, Tensor], answer: Answer) -> Tensor:
    """One call in this process, on plain tensors."""
    out = torch.empty_like(answer.outputs["out"])
    gemm_out(**inputs, out=out)
    return out


def bare(run: Run) -> float:
    """Seconds of the same calls and the same judgements with nothing around them: what a careless run would cost."""
    found, start = get(GEMM), time.perf_counter()
    for inputs, _, _, answer in run.calls:
        plainly(inputs, answer)
    for inputs, options, answer in run.judged:
        found.judge(inputs, answer.outputs["out"], arch="cpu", numerics=None, **options)
    return time.perf_counter() - start


def shares(run: Run) -> dict[str, float]:
    """Every part as a share of the run; differences of two measurements may come out a little below zero."""
    whole, seconds = run.seconds["run"], dict(run.seconds)
    seconds |= ablated(run)
    seconds["shared memory and channel"] = seconds["calls"] - seconds["kernel, inside"] - seconds["start of the worker"]
    seconds["shared memory and channel"] -= seconds["poison and guard zones"] + seconds["snapshots of inputs"]
    seconds["bare and judged"] = bare(run)
    seconds["beyond bare and judged"] = whole - seconds["bare and judged"]
    seconds[TOTAL] = sum(seconds[name] for name in OWN)
    return {name: value / whole for name, value in seconds.items() if name != "run"}


@pytest.mark.benchmark(group="validate --profile quick")
class TestCost:
    """The watched run and its calls without the harness; two cases when benchmarks are off."""

    def test_watched(self, benchmark: Any) -> None:
        """The whole run; its parts are in ``extra_info``."""
        case = None if benchmark.enabled else FEW
        run = benchmark.pedantic(watched, args=(case,), rounds=1, warmup_rounds=1)
        benchmark.extra_info.update({"required": f"{TOTAL} below {REQUIRED:.0%}", **shares(run)})
        assert len(run.calls) > len(run.judged) > 0

    @pytest.mark.repeats("TestCost::test_watched")
    def test_bare(self, benchmark: Any) -> None:
        """The same calls and judgements without it, and the same bits."""
        run = watched(None if benchmark.enabled else FEW)
        benchmark.pedantic(bare, args=(run,), rounds=3, warmup_rounds=1)
        for inputs, _, _, answer in run.calls:
            assert bool(agree(plainly(inputs, answer), answer.outputs["out"]).all())


RUNS: Mapping[str, tuple[str, str | None]] = {  # kernel, and which of its cases
    PUBLISHED: (KERNEL, "published"),
    TRIED: (KERNEL, None),
    f"{TRIED}, moved into a learned domain": ("tests.support.subjects.limited:cutlass", None),
}


def tried(kernel: str, which: str | None, few: list[str] | None = None) -> float:
    """Seconds for one judged case, without the start of the worker."""
    given = [str(case) for case in profiles.cases(GEMM, "quick")] if which else None
    run = Run()
    start = Worker._start

    def started(self: Worker) -> dict[str, Any]:
        with run.timed("start"):
            return start(self)

    with patch.object(Worker, "_start", started):
        report = validate(kernel, GEMM, seed=0, case=few or given)
    assert report.conforms, [f.verdict.summary for f in report.failures]
    return (report.seconds - run.seconds["start"]) / report.judged


@pytest.mark.benchmark(group="validate: seconds for a judged case")
class TestTried:
    """What a run tries by default beside the published cases alone."""

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("name", RUNS)
    def test_tried(self, benchmark: Any, name: str) -> None:
        """``extra_info`` has the seconds for one judged case; two cases when benchmarks are off."""
        few = None if benchmark.enabled else FEW
        kernel = RUNS[name][0] if benchmark.enabled else KERNEL
        each = benchmark.pedantic(tried, args=(kernel, RUNS[name][1], few), rounds=1, warmup_rounds=1)
        benchmark.extra_info.update({"required": f"below {REQUIRED_TRIED} of {PUBLISHED}", "seconds for a case": each})


def ratios(rounds: int = 3) -> dict[str, float]:
    """Seconds for a judged case, the least of some rounds in turn."""
    found = [{name: tried(*how) for name, how in RUNS.items()} for _ in range(rounds + 1)][1:]
    return {name: min(one[name] for one in found) for name in RUNS}


def main() -> None:
    """Two tables: seconds and shares of one run, and seconds for a judged case."""
    each = ratios()
    for name, seconds in each.items():
        print(f"  {name:45s} {seconds * 1e3:6.1f} ms a case {seconds / each[PUBLISHED]:5.2f}")
    print(f"required: below {REQUIRED_TRIED}")
    watched(None)
    run = watched(None)
    parts = shares(run)
    print(f"{GEMM}: {run.seconds['run']:.2f} s, {len(run.calls)} calls, {len(run.judged)} judged")
    for name, share in parts.items():
        print(f"  {name:32s} {share * run.seconds['run']:8.3f} s  {share:6.1%}")
    print(f"required: {TOTAL} below {REQUIRED:.0%}")
    whole()


def whole(rounds: int = 3) -> None:
    """A line of a right and of a garbage kernel, by the CPU seconds of this process and of the worker."""
    watched(FEW)
    idle = min(_processor(_started)[0] for _ in range(rounds))
    for kernel, most in ((KERNEL, 1.2), (NOISE, 2.4)):
        seen = list[tuple[float, float]]()
        for _ in range(rounds):
            took, run = _processor(lambda kernel=kernel: watched(None, kernel))
            seen.append((took - idle, _processor(lambda run=run: bare(run))[0]))
        least = [min(one[at] for one in seen) for at in range(2)]
        said = f"{least[0]:6.2f} CPU s, {least[0] / least[1]:5.2f} of its calls and judgements (at most {most})"
        print(f"validate {kernel:40s} {said}", flush=True)


def _started() -> None:
    with Worker(KERNEL, adapter=None, device="cpu", limit=60) as worker:
        worker._start()


def _processor(run: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process and of those that have ended, and what ``run`` gives."""

    def used() -> float:
        usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    start = used()
    made = run()
    return used() - start, made


if __name__ == "__main__":
    whole() if sys.argv[1:] == ["whole"] else main()
