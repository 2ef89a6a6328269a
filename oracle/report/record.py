"""The record of a run: JSON lines, each flushed to disk when it is written, so that a killed run loses none of them.

``fp8-oracle.record/1``; ``oracle/report/schema.json`` describes every line::

    {"kind": "run", "schema": ..., "started": ..., "machine": {}, "versions": {}, "selection": {}, "planned": N}
    {"kind": "outcome", "key": ..., "versions": ..., "outcome": {}}      # as fp8-oracle.report/1 has it
    {"kind": "end", "complaints": [], "seconds": S, "unfinished": 0, "outcomes": N}

Resuming appends another ``run`` line and skips every case whose *key* is there. The key covers the id (which holds the
seed), subject, arch, what the subject declares, and the versions of everything that a verdict depends on: after a
change of version every case runs again. A last line that was cut short is left out, with a note; a damaged line
anywhere else is refused. Fewer outcomes than the ``run`` line plans or the ``end`` line counts, two of one case, and a
missing ``end`` line are gaps of the run: its report is not ok and names them. Of two outcomes the worse one counts.

Not covered: what was run (:mod:`oracle.harness.runner`), reports (:mod:`oracle.report`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from oracle.errors import FixtureError, OptionError, counted
from oracle.fixtures.files import read_bytes
from oracle.fixtures.kinds import kind_of
from oracle.report import schema
from oracle.report.findings import WHOLE, Finding, outcomes, told
from oracle.report.outcome import SCHEMA as REPORT
from oracle.report.outcome import SEVERITY, Outcome, Report, quoted
from oracle.report.part import part_of
from oracle.verdict import heatmap
from oracle.verdict.compare import Error, Status, Tried, Verdict, Worst
from oracle.verdict.loss import Loss

SCHEMA = "fp8-oracle.record/1"
VALIDATION = "fp8-oracle.validation/1"
CALLED = "kernel"
"""In the selection of a validation, whose planned cases may be fewer outcomes: a call outside the domain is none."""
LARGEST = 1 << 30  # bytes of a record; a full run writes a hundredth of that
_NUMBERS = ("actual", "low", "high", "expected", "ratio")


@dataclass(frozen=True)
class Run:
    """What is known before the first case: the ``run`` line."""

    started: str
    machine: dict[str, str]
    versions: dict[str, str]
    selection: dict[str, str]
    planned: int

    @property
    def stamp(self) -> str:
        """Digest of the versions."""
        return _digest(self.versions)

    def to_json(self) -> dict[str, object]:
        return {"kind": "run", "schema": SCHEMA, **self.__dict__}


@dataclass(frozen=True)
class Record:
    """A record as read: its last run, the outcomes of that run's versions by key, and what was wrong with the file.

    ``ended`` is the last ``end`` line after that run, None when the run was killed; ``repeated`` has a sentence for
    each case with more than one outcome.
    """

    run: Run
    outcomes: Mapping[str, Outcome]
    ended: Mapping[str, Any] | None
    notes: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()

    @property
    def unfinished(self) -> int:
        """Cases that the run did not come to."""
        if self.ended is not None:
            return int(self.ended["unfinished"])
        return max(0, self.run.planned - sum(not o.watch for o in self.outcomes.values()))

    @property
    def gaps(self) -> tuple[str, ...]:
        """What of the run the file lacks, beside the cases that the run did not come to."""
        of_run, count = f"of the run of {self.run.started}", len(self.outcomes)
        if self.ended is None:
            text = f"the record {of_run} has no last line: the run was killed, or the file was cut"
            return self.repeated if self.unfinished else (text, *self.repeated)
        due = self.ended.get("outcomes", self.run.planned - self.unfinished)
        due = due if CALLED in self.run.selection else max(due, self.run.planned - self.unfinished)
        if count >= due:
            return self.repeated
        verb = "is" if due - count == 1 else "are"
        return (f"{due - count} of {counted(due, 'outcome')} {of_run} {verb} missing from its record", *self.repeated)

    def report(self) -> Report:
        """The report of the record's last run."""
        end = self.ended or {}
        seconds = float(end.get("seconds", sum(o.seconds for o in self.outcomes.values())))
        complaints = tuple(end.get("complaints", ()))
        run, outcomes = self.run, tuple(self.outcomes.values())
        about = (run.machine, seconds, run.versions, run.started)
        part = part_of(run.selection.get("profile"), outcomes)
        return Report(outcomes, complaints, *about, self.unfinished, self.gaps, part)


@dataclass
class Recorder:
    """A record that is being written; :func:`start` opens one."""

    run: Run
    stream: BinaryIO
    finished: Mapping[str, Outcome] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    _keys: set[str] = field(default_factory=set)

    def append(self, key: str, outcome: Outcome) -> None:
        """Append one outcome; it is on the disk when this returns."""
        self._line(_outcome_line(self.run, key, outcome))
        self._keys.add(key)

    def end(self, complaints: tuple[str, ...], seconds: float, unfinished: int) -> None:
        """Append the last line and close."""
        count = len(self._keys.union(self.finished))
        self._line(end_line(complaints, seconds, unfinished, count))
        self.stream.close()

    def _line(self, record: Mapping[str, object]) -> None:
        self.stream.write(_bytes(record))
        self.stream.flush()
        os.fsync(self.stream.fileno())


def start(path: Path, run: Run, *, resume: bool) -> Recorder:
    """Open a record for writing and append its ``run`` line.

    Raises OptionError: the file exists and ``resume`` is false; or it records another selection of cases. FixtureError:
    the file cannot be written, is no record, is damaged, or another run is writing it.
    """
    if path.exists() and not path.is_file():
        raise FixtureError(f"{path}: is no regular file; a record is locked, appended to and read again")
    if path.exists() and path.stat().st_size and not resume:
        raise OptionError(f"{path} exists; --resume continues it, or name another file")
    stream = locked(path)
    try:
        recorder = _continued(stream, path, run)
    except BaseException:
        stream.close()
        raise
    recorder._line(run.to_json())
    return recorder


def _continued(stream: BinaryIO, path: Path, run: Run) -> Recorder:
    """A recorder at the end of what the file holds."""
    finished: Mapping[str, Outcome] = {}
    notes: tuple[str, ...] = ()
    if path.stat().st_size:
        runs, earlier, _, notes, _, length = _parse(path)
        if runs and runs[-1].selection != run.selection:
            raise OptionError(f"{path} records {_words(runs[-1].selection)}; this run is {_words(run.selection)}")
        finished = {key: outcome for key, (stamp, outcome) in earlier.items() if stamp == run.stamp}
        if stale := len(earlier) - len(finished):
            old, new = runs[-1].versions if runs else run.versions, run.versions
            moved = [
                f"{n} {old.get(n, 'none')} -> {new.get(n, 'none')}"
                for n in sorted({*old, *new})
                if old.get(n) != new.get(n)
            ]
            notes = (*notes, f"{stale} recorded outcomes are of other versions ({', '.join(moved)}) and are run again")
        stream.truncate(length)
        stream.seek(length)
    return Recorder(run, stream, finished, notes)


def read(path: str | Path) -> Record:
    """A record, whole or cut short.

    Raises FixtureError: the file is missing, holds no run, is of another schema, or is damaged elsewhere than in its
    last line.
    """
    path = Path(path)
    runs, outcomes, ended, notes, repeated, _ = _parse(path)
    if not runs:
        what = kind_of(path)
        if what is not None and not what.startswith("the record of a run"):
            raise FixtureError(f"{path}: this is {what}; the record of a run is wanted here")
        raise FixtureError(f"{path}: holds no run; write one with `fp8-oracle verify --record {path}`")
    last = {key: outcome for key, (stamp, outcome) in outcomes.items() if stamp == runs[-1].stamp}
    counts = {key: count for key, count in repeated.items() if key in last}
    sentences = tuple(
        f"{last[key].id} [{last[key].subject}]: the record has {count} outcomes of it; the worst one counts"
        for key, count in counts.items()
    )
    return Record(runs[-1], last, ended, notes, sentences)


def read_report(path: str | Path) -> tuple[Report, tuple[str, ...]]:
    """The report in a record or in a ``--json`` file, and what was wrong with the file.

    Raises FixtureError: the file is neither.
    """
    path = Path(path)
    content = read_bytes(path, most=LARGEST)
    try:
        whole = schema.loads(content)
    except ValueError:  # several lines, as a record has: ``read`` below refuses what is no record either
        whole = None
    readers = {REPORT: report_from_json, VALIDATION: _of_validation}
    if isinstance(whole, dict) and (read_ := readers.get(str(whole.get("schema")))) is not None:
        try:
            return read_(whole), ()
        except ValueError as error:
            raise FixtureError(f"{path}: not a sound {whole['schema']} file: {error}") from None
    record = read(path)
    return record.report(), record.notes


def lines_of(record: Record) -> Iterator[bytes]:
    """The lines of a record as a run writes them."""
    yield _bytes(record.run.to_json())
    yield from (_bytes(_outcome_line(record.run, key, outcome)) for key, outcome in record.outcomes.items())
    if record.ended is not None:
        yield _bytes(record.ended)


def end_line(complaints: Sequence[str], seconds: float, unfinished: int, outcomes: int) -> dict[str, object]:
    """The last line of a record."""
    counts = {"unfinished": unfinished, "outcomes": outcomes}
    return {"kind": "end", "complaints": list(complaints), "seconds": round(seconds, 3), **counts}


def key_of(outcome_id: str, subject: str, arch: str, stamp: str, run: Run) -> str:
    """The key of one case; ``stamp`` is what else its verdict depends on, as the digest of a captured file."""
    return _digest([outcome_id, subject, arch, stamp, run.versions])


def report_from_json(record: Mapping[str, Any]) -> Report:
    """The inverse of :meth:`oracle.report.outcome.Report.to_json`; fields that older files lack are empty.

    Raises ValueError: what is wrong with ``record``.
    """
    whole = {"versions": {}, "started": "", "unfinished": 0, **record}
    if isinstance(whole.get("outcomes"), list):
        whole["outcomes"] = [_as_now(outcome) for outcome in whole["outcomes"]]
    whole = _sound(whole)
    outcomes, complaints = tuple(map(_outcome, whole["outcomes"])), tuple(whole["complaints"])
    later = (whole["versions"], whole["started"], whole["unfinished"])
    return Report(outcomes, complaints, whole["machine"], float(whole["seconds"]), *later, part=whole.get("part", ""))


# --- reading ------------------------------------------------------------------------------------------------


def _sound(value: Any, name: str | None = None) -> Any:
    """``value``; ValueError when it is not as ``schema.json`` says."""
    if (why := schema.problem(value, name)) is not None:
        raise ValueError(why)
    return value


def _as_now(outcome: Any) -> Any:
    """An outcome with the evidence, the error and the loss that older files lack; anything else as it is."""
    if not isinstance(outcome, dict) or not isinstance(outcome.get("verdict"), dict):
        return outcome
    return {**outcome, "verdict": {"evidence": None, "error": None, "loss": None, **outcome["verdict"]}}


def _outcome(record: Mapping[str, Any]) -> Outcome:
    """An outcome of a checked record; ValueError where its parts contradict each other."""
    names = (record["id"], record["contract"], record["subject"], record["arch"])
    verdict = _verdict(record["verdict"])
    facts = (float(record["seconds"]), record["known_failure"], record["repro"])
    more = (record.get("watch", ""), tuple(record.get("also", ())), record.get("source", ""))
    return Outcome(*names, verdict, *facts, *more)


def _of_validation(record: Mapping[str, Any]) -> Report:
    """The report of a file of ``fp8-oracle validate --json``; ValueError says what is wrong with ``record``."""
    names = {name: record.get(name) for name in ("kernel", "contract", "arch")}
    names["source"] = record.get("source", "")  # older files lack it
    if wrong := [name for name, value in names.items() if not isinstance(value, str)]:
        raise ValueError(f"it has no {wrong[0]}")
    entries = record.get("findings")
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise ValueError("its findings are no list of objects")
    findings_read = []
    for one in entries:
        case, watch, seconds, follows = told(one)
        checked = _sound(_as_now({"verdict": one.get("verdict")})["verdict"], "verdict")
        findings_read.append(Finding(case, watch, _verdict(checked), seconds, follows))
    about = {"machine": {}, "seconds": 0.0, "provenance": {}, **record}
    machine, made_by = (_sound(about[name], "facts") for name in ("machine", "provenance"))
    call = made_by.get("command", "")

    def command(finding: Finding) -> str:
        return "" if finding.case == WHOLE or not call else f"{call} --case {quoted(finding.case)}"

    outcomes_read = outcomes(
        findings_read,
        contract=str(names["contract"]),
        subject=str(names["kernel"]),
        arch=str(names["arch"]),
        source=str(names["source"]),
        command=command,
    )
    if not isinstance(about["seconds"], int | float):
        raise ValueError("its seconds are no number")
    stopped, left = (about.get(name, empty) for name, empty in (("stopped", ""), ("unfinished", 0)))
    if not isinstance(stopped, str) or not isinstance(left, int) or left < 0:
        raise ValueError("it does not say why it was stopped, or how many cases are left")
    gaps = (f"the validation ended early: {stopped}",) if stopped and not left else ()
    facts = (machine, float(about["seconds"]), made_by, made_by.get("captured", ""))
    return Report(outcomes_read, (), *facts, left, gaps)


def _verdict(record: Mapping[str, Any]) -> Verdict:
    worst, seen, error, loss = (record[name] for name in ("worst", "evidence", "error", "loss"))
    if worst is not None:
        worst = Worst(**{**worst, "index": tuple(worst["index"]), **{n: float(worst[n]) for n in _NUMBERS}})
    read = {
        "status": Status(record["status"]),
        "worst": worst,
        "explained_by": tuple(record["explained_by"]),
        "frames": tuple(record.get("frames", ())),
        "observed": tuple(record.get("observed", ())),
        "tried": tuple(Tried(**recipe) for recipe in record.get("tried", ())),
        "margin": float(record["margin"]),
        "evidence": None if seen is None else _evidence(seen),
        "error": None if error is None else Error(**{name: float(x) for name, x in error.items()}),
        "loss": None if loss is None else Loss(**{name: float(x) for name, x in loss.items()}),
    }
    return Verdict(**{**record, **read})


def _evidence(record: Mapping[str, Any]) -> heatmap.Evidence:
    """What a report draws; ValueError where it cannot be drawn."""
    seen = heatmap.from_json(dict(record))
    width = sum(seen.fields)
    if len({len(row) for row in seen.levels}) != 1:
        raise ValueError("evidence.levels has rows of different lengths")
    if not 1 <= width <= 64 or any(int(bits, 16) >> width for e in seen.elements for bits in (e.bits, e.expected_bits)):
        raise ValueError(f"evidence.fields are {list(seen.fields)}, which the bits of its elements do not fit")
    for e in seen.elements:
        if len(e.index) != len(seen.shape) or any(i >= n for i, n in zip(e.index, seen.shape, strict=True)):
            raise ValueError(f"evidence.elements has the index {list(e.index)}, the shape is {list(seen.shape)}")
    return seen


_Outcomes = dict[str, tuple[str, Outcome]]
_Parsed = tuple[list[Run], _Outcomes, Mapping[str, Any] | None, tuple[str, ...], Mapping[str, int], int]


def _parse(path: Path) -> _Parsed:
    """Runs, ``key -> (versions, outcome)``, the ``end`` line if it is the last line, notes, the number of outcomes of
    each key with several, and the length in bytes without a last line that was cut short.

    Of several outcomes of a case the worst one counts. A watch is recorded again when more of it is known, and what no
    case shows (an id without a slash) in each run: of these the last one counts.
    """
    content = read_bytes(path, most=LARGEST)
    *pieces, torn = content.split(b"\n")
    runs: list[Run] = []
    outcomes: _Outcomes = {}
    repeated: dict[str, int] = {}
    line: Any = None
    for number, piece in enumerate(pieces, 1):
        try:
            line = schema.loads(piece)
        except ValueError:  # refused below, as every line that is no mapping
            line = None
        if not isinstance(line, dict) or "kind" not in line:
            what = kind_of(path) if number == 1 else None
            other = f"{path}: this is {what}; the record of a run is wanted here" if what else ""
            text = f"{path}:{number}: no line of a record; the file is damaged or is something else"
            raise FixtureError(other or text)
        if line["kind"] != "outcome" and line.get("schema", SCHEMA) != SCHEMA:
            same = str(line["schema"]).startswith(SCHEMA.partition("/")[0])
            if not same and (what := kind_of(path)) is not None:
                raise FixtureError(f"{path}: this is {what}; the record of a run is wanted here")
            raise FixtureError(f"{path}: schema is {line['schema']!r}, this version reads {SCHEMA!r}")
        try:
            if line["kind"] == "outcome":
                line = {**line, "outcome": _as_now(line.get("outcome"))}
            elif line["kind"] not in ("run", "end"):
                raise ValueError(f"unknown kind {line['kind']!r}")
            _sound(line, str(line["kind"]) + " line")
            if line["kind"] == "run":
                runs.append(Run(**{k: v for k, v in line.items() if k not in ("kind", "schema")}))
            elif line["kind"] == "outcome":
                key, outcome = line["key"], _outcome(line["outcome"])
                _, before = outcomes.pop(key, ("", outcome))
                if before is not outcome and "/" in outcome.id and not outcome.watch:
                    repeated[key] = repeated.get(key, 1) + 1
                    outcome = min(before, outcome, key=lambda o: SEVERITY.index(o.status))
                outcomes[key] = (line["versions"], outcome)
        except ValueError as error:
            raise FixtureError(f"{path}:{number}: no sound line of a record: {error}") from None
    notes = (f"{path}: the last line was cut short ({len(torn)} bytes) and is left out",) if torn else ()
    ended = line if line is not None and line["kind"] == "end" else None
    return runs, outcomes, ended, notes, repeated, len(content) - len(torn)


def locked(path: Path) -> BinaryIO:
    """A file that one run at a time writes; FixtureError: another one writes it, or it cannot be written."""
    try:
        stream = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
    except OSError as error:
        raise FixtureError(f"{path}: cannot be written ({error.strerror}); choose a writable folder") from None
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise FixtureError(f"{path}: another run is writing it; wait for that one or name another file") from None
    return stream


def _outcome_line(run: Run, key: str, outcome: Outcome) -> dict[str, object]:
    return {"kind": "outcome", "key": key, "versions": run.stamp, "outcome": outcome.to_json()}


def _bytes(line: Mapping[str, object]) -> bytes:
    return json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _words(selection: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in selection.items()) or "everything"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
