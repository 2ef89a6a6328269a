"""A soak that lasts: every device of a host calls one kernel on fresh cases for hours, and its record can be continued.

Time is cut into *stretches*. A stretch is one validation of profile ``soak`` on one device, in a process of its own,
with a seed of its own: the random words of ``soak/SEED/LANE`` under the number of the stretch, so no two draw alike and
any of them can be repeated alone. Beside its findings a stretch reports

    cases, gmac     judged cases, and 10^9 multiplications of those whose extents are m, n and k
    memory, files   resident bytes and open descriptors of the kernel's process, at its quarter and at its end
    clock           clock of the device in MHz, its temperature, and what slows it, from nvidia-smi, where there is one

The soak stops at its time, after ``most`` stretches with a failure, and when less than ``ROOM`` of the host's memory is
left. A kernel's process whose memory or descriptors grow by more than ``GROWTH`` in a stretch is a failure.

The record is lines of JSON, each on the disk when the next stretch begins: ``soak`` (what is asked, versions), then one
``stretch`` each. Continuing it skips what it holds, and refuses another question or another version.

Not covered: several hosts (run one soak on each with its own seed), cases that somebody chooses.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from oracle.errors import FixtureError, OptionError, counted
from oracle.harness import starting
from oracle.harness.jobs import Lost, Pool, divided
from oracle.harness.report import INTERRUPTED, NUMBERS, Report
from oracle.harness.validation import validate
from oracle.report.record import locked
from oracle.routines import cases
from oracle.routines.data import Stream
from oracle.verdict.compare import Status

SCHEMA = "fp8-oracle.soak/1"
STRETCH = 120.0  # seconds; the start of a process takes one
ROOM = 0.05  # of the host's memory
GROWTH = (256 << 20, 64)  # bytes, descriptors, between a quarter of a stretch and its end
OVER = "its time is over"
LOOK = 1.0  # seconds between looks at the kernel's process
JUDGED = (Status.PASSED, Status.FAILED, Status.MISTRUSTED)


@dataclass
class Soak:
    """What a soak did; ``stretches`` as the record has them, ``ended`` why it stopped."""

    about: Mapping[str, Any]
    stretches: list[dict[str, Any]] = field(default_factory=list)
    ended: str = ""

    @property
    def failures(self) -> list[dict[str, Any]]:
        return [finding for stretch in self.stretches for finding in stretch["failures"]]

    @property
    def cases(self) -> int:
        return sum(stretch["cases"] for stretch in self.stretches)

    @property
    def seconds(self) -> float:
        """Time that passed: stretches of different lanes pass together."""
        by_lane: dict[int, float] = {}
        for stretch in self.stretches:
            by_lane[stretch["lane"]] = by_lane.get(stretch["lane"], 0.0) + stretch["seconds"]
        return max(by_lane.values(), default=0.0)

    @property
    def exit_code(self) -> int:
        """0: cases were judged until the time was over and nothing failed; 1: something failed; 2: nothing could be
        judged, or the soak was stopped early."""
        return 1 if self.failures else 0 if self.cases and self.ended == OVER else 2

    def lines(self) -> Iterator[str]:
        """What is printed at the end."""
        gmac, seconds = sum(stretch["gmac"] for stretch in self.stretches), max(self.seconds, 1e-9)
        lanes = len({stretch["lane"] for stretch in self.stretches})
        stretches = counted(len(self.stretches), "stretch", "stretches")
        yield (
            f"{counted(self.cases, 'case')} in {stretches} on {counted(lanes, 'lane')}, {seconds:.0f} s: "
            f"{self.cases / seconds:.3g} cases/s, {gmac / seconds:.3g} GMAC/s judged"
        )
        for finding in self.failures[:12]:
            verdict = finding["verdict"]
            yield f"{verdict['status']} {finding['watch']}: {finding['case']}: {verdict['summary']}"
        clocks = [s["clock"] for s in self.stretches if s["clock"]]
        if clocks:
            yield f"clocks: {clocks[0]} at the first stretch, {clocks[-1]} at the last"
        yield f"stopped: {self.ended}"


def soak(
    kernel: str,
    contract: str,
    *,
    seconds: float,
    seed: int,
    device: str = "cpu",
    lanes: int | None = None,
    stretch: float = STRETCH,
    most: int = 3,
    record: Path | None = None,
    resume: bool = False,
    said: Callable[[str], None] = lambda line: None,
    **asked: object,
) -> Soak:
    """Validate ``kernel`` until ``seconds`` are over, on every device of the kind ``device``.

    Parameters
    ----------
    seconds : of all runs of one record together.
    lanes : processes that call the kernel at a time; by default one for each CUDA device, or one on the CPU.
    most : stretches with a failure after which it stops.
    record, resume : as of ``fp8-oracle verify``.
    said : is told a line after every stretch.
    asked : further arguments of :func:`oracle.harness.validation.validate`.

    Raises OptionError: the record exists, or asks something else. FixtureError: another run writes it. OracleError: as
    :func:`validate` raises it.
    """
    places = list(range(torch.cuda.device_count())) if device == "cuda" else [None]
    count = max(1, len(places)) if lanes is None else lanes
    about = {
        "kernel": kernel,
        "contract": contract,
        "seed": seed,
        "device": device,
        "lanes": count,
        "asked": {n: v for n, v in sorted(asked.items()) if v},
        "torch": str(torch.__version__),
    }
    with ExitStack() as stack:
        stream = None if record is None else stack.enter_context(locked(record))
        done = Soak(about, _begun(record, about, resume=resume))
        if stream is not None and stream.seek(0, os.SEEK_END) == 0:
            _write(stream, {"kind": "soak", "schema": SCHEMA, **about})
        pools, running, next_of = [], dict[int, int](), dict[int, int]()
        for lane in range(count):
            place = places[lane % len(places)] if places else None
            environment = {} if place is None else {"CUDA_VISIBLE_DEVICES": str(place)}
            make = partial(_stretching, kernel, contract, device, place, {k: v for k, v in asked.items() if v})
            pools.append(stack.enter_context(Pool(make, 1, divided(count, None), [environment])))
            next_of[lane] = sum(s["lane"] == lane for s in done.stretches)
        start, before = time.monotonic(), done.seconds
        while not done.ended:
            for lane in range(count):
                left = seconds - before - (time.monotonic() - start)
                if lane not in running and left > 0:
                    words = Stream(f"soak/{seed}/{lane}/{next_of[lane]}").integers(0, 1 << 31, (1,))
                    running[lane] = pools[lane].submit((int(words[0]), min(stretch, left)))
            if not running:
                done.ended = OVER
                break
            for lane in list(running):
                result = pools[lane].result(running.pop(lane))
                if isinstance(result, BaseException):
                    raise result
                facts = _lost(result) if isinstance(result, Lost) else result
                one = {"kind": "stretch", "lane": lane, "number": next_of[lane], **facts}
                next_of[lane] += 1
                done.stretches.append(one)
                if stream is not None:
                    _write(stream, one)
                failures = counted(len(one["failures"]), "failure")
                said(f"lane {lane}: {counted(one['cases'], 'case')}, {failures}, seed {one['seed']}")
            done.ended = _why_stop(done, most)
    return done


def seed_of(path: Path, otherwise: int) -> int:
    """The seed of a record that is continued; ``otherwise`` where there is none yet."""
    try:
        with open(path) as stream:
            return int(json.loads(stream.readline())["seed"])
    except (OSError, ValueError, KeyError, TypeError):  # `soak` says what is wrong with the file
        return otherwise


def _why_stop(done: Soak, most: int) -> str:
    """The rule by which it stops now, or nothing."""
    if (bad := sum(bool(stretch["failures"]) for stretch in done.stretches)) >= most:
        return f"{counted(bad, 'stretch', 'stretches')} with a failure"
    if (room := _free()) < ROOM:
        return f"{100 * room:.0f}% of the host's memory is left"
    return ""


def _free() -> float:
    """The share of the host's memory that is left."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) / int(lines["MemTotal"].split()[0])


def _lost(result: Lost) -> dict[str, Any]:
    verdict = {"status": "CRASHED", "summary": f"CRASHED: {result.cause}"}
    return {
        "seed": None,
        "seconds": 0.0,
        "cases": 0,
        "gmac": 0.0,
        "memory": None,
        "files": None,
        "clock": "",
        "failures": [{"case": "-", "watch": NUMBERS, "verdict": verdict}],
    }


@contextmanager
def _stretching(
    kernel: str, contract: str, device: str, place: int | None, asked: Mapping[str, Any]
) -> Iterator[Callable[[tuple[int, float]], dict[str, Any]]]:
    """Carries out stretches, given as seed and seconds."""

    def run(task: tuple[int, float]) -> dict[str, Any]:
        seed, seconds = task
        with _Watched() as watched:
            report = validate(kernel, contract, device=device, profile="soak", seed=seed, seconds=seconds, **asked)
        if report.stopped == INTERRUPTED:
            raise KeyboardInterrupt  # this process was told to end: the stretch is lost
        failures = [finding.to_json() for finding in report.failures]
        growth = watched.growth()
        if any(grown > most for grown, most in zip(growth, GROWTH, strict=True)):
            text = f"the kernel's process grew by {growth[0] >> 20} MiB and {growth[1]} descriptors in one stretch"
            failures.append({"case": "-", "watch": "leak", "verdict": {"status": "FAILED", "summary": text}})
        return {
            "seed": seed,
            "seconds": round(report.seconds, 3),
            "cases": report.judged,
            "gmac": round(_gmac(report), 6),
            "memory": watched.at(0),
            "files": watched.at(1),
            "clock": _clock(place),
            "failures": failures,
        }

    yield run


def _gmac(report: Report) -> float:
    """10^9 multiplications of the judged cases that have the extents m, n and k."""
    total = 0
    for finding in report.findings:
        if finding.watch == NUMBERS and finding.verdict.status in JUDGED:
            extents = dict(cases.parse(finding.case).extents)
            total += extents["m"] * extents["n"] * extents["k"] if {"m", "n", "k"} <= set(extents) else 0
    return total / 1e9


class _Watched:
    """Resident bytes and open descriptors of the processes that this one starts, looked at while they run."""

    def __enter__(self) -> _Watched:
        self._seen: dict[int, list[tuple[int, int]]] = {}
        self._over, self._others = threading.Event(), set(_descendants())  # those before have nothing to do with it
        self._thread = threading.Thread(target=self._look, daemon=True)
        starting.thread("the thread that watches memory", self._thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK):
            for child in set(_descendants()) - self._others:
                try:
                    pages = int(Path(f"/proc/{child}/statm").read_text().split()[1])
                    files = len(os.listdir(f"/proc/{child}/fd"))
                except OSError:  # it has ended
                    continue
                self._seen.setdefault(child, []).append((pages * os.sysconf("SC_PAGE_SIZE"), files))

    def _kernel(self) -> list[tuple[int, int]]:
        """What was seen of the kernel's process: the largest of those that lived long."""
        longest = max(map(len, self._seen.values()), default=0)
        return max((seen for seen in self._seen.values() if 2 * len(seen) > longest), default=[])

    def growth(self) -> tuple[int, int]:
        """Bytes and descriptors, from the first quarter of the kernel's process to its end."""
        seen = self._kernel()
        if len(seen) < 4:
            return 0, 0
        first, last = seen[len(seen) // 4], seen[-1]
        return last[0] - first[0], last[1] - first[1]

    def at(self, which: int) -> list[int] | None:
        """The first quarter and the end."""
        seen = self._kernel()
        return [seen[len(seen) // 4][which], seen[-1][which]] if seen else None


def _descendants(process: int | str = "self") -> list[int]:
    """Processes that this one, or one that it started, has started."""
    children: list[int] = []
    try:
        for task in Path(f"/proc/{process}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    except OSError:  # it has ended
        return children
    return children + [below for child in children for below in _descendants(child)]


def _clock(place: int | None) -> str:
    """MHz, degrees and reasons of throttling of a CUDA device, as nvidia-smi says them."""
    program = shutil.which("nvidia-smi")
    if place is None or program is None:
        return ""
    query = "clocks.sm,temperature.gpu,clocks_throttle_reasons.active"
    words = [program, f"--query-gpu={query}", "--format=csv,noheader", "-i", str(place)]
    return subprocess.run(words, capture_output=True, text=True, timeout=20, check=False).stdout.strip()


def _begun(path: Path | None, about: Mapping[str, Any], *, resume: bool) -> list[dict[str, Any]]:
    """The stretches of a record that is continued."""
    if path is None or not path.exists() or not path.stat().st_size:
        return []
    if not resume:
        raise OptionError(f"{path} exists; --resume continues it, or name another file")
    *whole, _ = path.read_text().split("\n")
    try:
        head, *stretches = [json.loads(line) for line in whole]
    except ValueError:
        raise FixtureError(f"{path}: no record of a soak") from None
    if head.get("schema") != SCHEMA:
        raise FixtureError(f"{path}: schema is {head.get('schema')!r}, this version reads {SCHEMA!r}")
    for name, value in about.items():
        if head.get(name) != value:
            raise OptionError(f"{path} has {name}={head.get(name)!r}, this run {value!r}; name another file")
    os.truncate(path, sum(len(line.encode()) + 1 for line in whole))  # what a kill cut short
    return stretches


def _write(stream: BinaryIO, line: Mapping[str, object]) -> None:
    stream.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    stream.flush()
    os.fsync(stream.fileno())
