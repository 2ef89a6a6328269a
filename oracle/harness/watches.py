"""What is watched besides the numbers. Each watch makes a few calls and gives findings of its own name.

Some demand what every right kernel gives (guard zones, inputs unchanged, every element written, the same bits on
rerun, no trace of the previous call, exact behaviour under powers of two and signs): they fail. Others describe
(batch invariance, bits under permutation): they are notes, unless they are required.

Whatever a watch concludes, :class:`Calls` judges every answer that it is given, with the inputs that the call had. A
crash, a hang, a raise and a refusal are findings: the first three fail, and so does a refusal of a call that differs
from one that was taken in its data alone. A refusal of padded rows, fewer rows, a capture or other threads is said.

Wrong numbers of other data than the first are asked for again in a new process: where it gives right ones the kernel
remembers something, else it is wrong for these data. :func:`mixed` and :func:`late` tell a kernel from a table of its
earlier answers, and find outputs that are written after their call has returned. Not covered: a cache by the whole
content of the operands, whose answers are right.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oracle.errors import LayoutError, OracleError, counted
from oracle.fixtures.strides import run_of
from oracle.harness import concurrency, launches
from oracle.harness.memory import is_poison
from oracle.harness.report import BATCH, GRAPH, IN_PLACE, JOINED, NUMBERS, PITCHED, SIDE, THREADS, Finding
from oracle.harness.session import UNWRITTEN, Answer, Session, failed, passed
from oracle.numbers.formats import decode, same_bits
from oracle.routines.base import Call, Contract, Operands, TensorSpec, by_name
from oracle.routines.catalogue import agree
from oracle.routines.traits import Kind
from oracle.truth.gemm import take_rows
from oracle.verdict.compare import Status, Verdict
from oracle.verdict.pattern import describe

Inputs = Mapping[str, Tensor]
Options = Mapping[str, object]
RERUN, STALE, DIRTY = "rerun determinism", "stale state", "uninitialised memory"
DOUBLED, FLIPPED, PERMUTED = "scale doubled", "sign flipped", "rows permuted"
SMALLER, OTHER = "numbers of smaller batches", "numbers of other data"
STEP = 32  # rows of a tile, of which some contracts take whole ones
RERUNS = 20  # of the same call on a GPU, where the order of atomics differs in few of them


@dataclass(frozen=True)
class Note:
    """An observation that does not decide."""

    case: str
    watch: str
    text: str


class Calls:
    """The calls that the watches of one case make; every answer is judged, and what is wrong with one is a finding.

    The contract judges an answer with the inputs and options of its call. A judgement is a function of these and of the
    bits, strides and padding of the output, so an answer that has all of those in common with one that was judged for
    the same inputs and options has the same verdict: the equality is the proof, and nothing is judged again. Guard
    zones, inputs, strides and work that came late are looked at after every call.
    """

    def __init__(self, session: Session, case: str) -> None:
        self.session, self.case, self.hung = session, case, False
        self._judged: list[tuple[Inputs, Options, Answer, Verdict]] = []
        self._at_first: bool | None = None
        self._said: set[tuple[str, str]] = set()
        self._findings: list[tuple[Finding, tuple[Inputs, Options] | None]] = []

    def know(self, inputs: Inputs, options: Options, answer: Answer, verdict: Verdict) -> None:
        """Keep the verdict on an answer that the caller has reported, with what is wrong with the memory after it."""
        self._judged.append((inputs, options, answer, verdict))
        self.look(answer)
        self._findings.clear()

    def ask(
        self,
        watch: str,
        what: str,
        inputs: Inputs,
        options: Options,
        *,
        taken: bool = False,
        follows: Callable[[Answer], bool] = lambda answer: False,
        fresh: bool = False,
        **how: Any,
    ) -> tuple[Answer, Verdict]:
        """The answer to one call, and its verdict; a failure or refusal is kept as a finding of this ``watch``.

        ``what`` says in a finding which call it was; a verdict that was reached before is not reported again.
        ``taken``: a call with these shapes, dtypes and options was taken before, so that a refusal is a failure.
        ``follows``: whether the verdict on an answer without a problem follows from one that was reached before.
        ``fresh``: wrong numbers are a finding of this ``watch`` only where a new process gives right ones; else they
        are numbers of other data than the first.
        ``how`` goes to :meth:`Session.call`.
        """
        answer, before = self.session.call(inputs, options, **how), len(self._judged)
        verdict = self.verdict(inputs, options, answer, follows)
        judged_before = answer.problem is None and len(self._judged) == before
        if verdict.explained_by == (UNWRITTEN,) and (how.get("lead") or how.get("step")):
            why = "every element is a NaN with the bits of what lies between the inputs' elements"
            verdict = replace(verdict, explained_by=(), summary=f"{why}, or was not written")
        if taken and verdict.status is Status.UNSUPPORTED:
            verdict = failed(f"refused, though other data of these shapes were taken: {verdict.reason}")
        if not judged_before and (verdict.status.is_failure or verdict.status is Status.UNSUPPORTED):
            wrong = fresh and answer.problem is None and verdict.status is Status.FAILED
            self.add(watch, what, verdict, asked=(inputs, options) if wrong else None)
        self.look(answer)
        return answer, verdict

    def verdict(
        self,
        inputs: Inputs,
        options: Options,
        answer: Answer,
        follows: Callable[[Answer], bool] = lambda answer: False,
    ) -> Verdict:
        """The verdict on an answer to these inputs and options."""
        if answer.problem is not None:
            return answer.problem
        for had, chosen, known, verdict in self._judged:
            if chosen == options and _the_same(had, inputs) and _identical(known, answer):
                return verdict
        if follows(answer):
            return passed("every bit follows from an answer that was judged")
        verdict = self.session.judge(inputs, options, answer)
        self._judged.append((inputs, options, answer, verdict))
        return verdict

    def _right_at_first(self, inputs: Inputs, options: Options) -> bool:
        """Whether a call has right numbers in a new process, which remembers nothing. Not asked where the case itself
        fails, from which this follows, and once a case: a process has its price."""
        if self._judged[0][3].status.is_failure:
            return True
        if self._at_first is None:
            self.session.worker.stop()
            answer = self.session.call(inputs, options)
            wrong = answer.problem is None and self.verdict(inputs, options, answer).status.is_failure
            self._at_first = not wrong
            if self._at_first:  # the calls that follow find the process as it was: it remembers the case
                self.session.worker.stop()
                self.session.call(*self._judged[0][:2])
        return self._at_first

    def look(self, answer: Answer) -> None:
        """Keep what is wrong with the memory after a call, whatever its numbers are."""
        self.hung |= answer.hung
        for result in (*memory(self.session, self.case, answer), *row_major(self.session, self.case, answer)):
            if isinstance(result, Finding) and result.fails:
                self.add(result.watch, "", result.verdict)

    def add(self, watch: str, what: str, verdict: Verdict, *, asked: tuple[Inputs, Options] | None = None) -> None:
        """Keep a finding, the first of each call of a watch; with what was ``asked`` where a new process tells whose
        finding it is."""
        text = f"{what}: {verdict.summary}" if what else verdict.summary
        if (key := (watch, what or verdict.summary)) not in self._said:
            self._said.add(key)
            self._findings.append((Finding(self.case, watch, replace(verdict, summary=text)), asked))

    def findings(self) -> Iterator[Finding]:
        """What was found since it was asked last. The process may be a new one after it, without its memory or with
        that of the case."""
        findings, self._findings = self._findings, []
        for result, asked in findings:
            yield result if asked is None or self._right_at_first(*asked) else replace(result, watch=OTHER)


def folded(found: Sequence[Finding | Note]) -> list[Finding | Note]:
    """What was found of a case, with the failures that say no more than what follows from another one.

    Where its numbers are wrong, wrong numbers of another call (other data, rows, strides, threads) follow, and so does
    a relation to the wrong ones (twice the scale, another sign). Where a rerun has other bits, a relation to bits
    follows. Bytes outside of a buffer, other bits on a rerun, and crashes are causes of their own.
    """
    failing = {one.watch for one in found if isinstance(one, Finding) and one.verdict.status is Status.FAILED}
    cause = next((watch for watch in (NUMBERS, RERUN) if watch in failing), "")

    def follows(one: Finding) -> bool:
        if one.watch == cause or one.verdict.status is not Status.FAILED:
            return False
        return one.watch in (DOUBLED, FLIPPED, PERMUTED) or (cause == NUMBERS and one.verdict.total > 0)

    return [
        one if isinstance(one, Note) or not cause or not follows(one) else replace(one, follows=cause) for one in found
    ]


def memory(session: Session, case: str, answer: Answer) -> Iterator[Finding]:
    """Guard zones and inputs after one call, whatever its result is."""
    if not answer.facts:
        return
    wrong, right = f"written out of bounds: {'; '.join(answer.guards)}", "no byte outside the buffers was written"
    yield Finding(case, "guard zones", failed(wrong) if answer.guards else passed(right))
    wrong = f"the kernel wrote to its inputs: {', '.join(answer.changed)}"
    if any(name in session.contract.returns for name in answer.changed):
        wrong += f"; {IN_PLACE}"
    yield Finding(case, "inputs unchanged", failed(wrong) if answer.changed else passed("every input has its bits"))
    if answer.late:
        what = f"{', '.join(answer.late)} changed after the caller's stream was done: work is left on another stream"
        yield Finding(case, JOINED, failed(what))


def row_major(session: Session, case: str, answer: Answer) -> Iterator[Finding | Note]:
    """The memory of a product: rows one after the other, as an engine that takes its pointer reads it.

    Fails when the elements of a row are apart (a transposed buffer) or rows share memory. Rows with space between them
    are a note: code that asks for strides reads them.
    """
    if answer.problem is not None or not session.contract.multiplies:
        return
    shape, stride = answer.facts["out"]["shape"], answer.facts["out"]["stride"]
    extent, dense = 1, True
    for n, step in reversed([(n, s) for n, s in zip(shape, stride, strict=True) if n != 1]):
        if step < extent or (extent == 1 and step != 1):
            what = f"out {shape} has strides {stride}; a product is row-major, the pointer alone reads other elements"
            yield Finding(case, "row-major output", failed(what))
            return
        dense &= step == extent
        extent = n * step
    yield Finding(case, "row-major output", passed("rows lie one after the other"))
    if not dense:
        yield Note(case, "row-major output", f"rows with space between them: {shape} with strides {stride}")


def repeats(calls: Calls, inputs: Inputs, options: Options, other: tuple[Inputs, Options]) -> Iterator[Finding]:
    """Reruns: the same call, the same call after ``other`` (same shapes, other data), and over another poison.

    Each situation is met twice: where its two answers differ the kernel is not deterministic, and nothing else is
    concluded from it. On a GPU the same call is made :data:`RERUNS` times, whose bits are compared alone.
    """
    session, case = calls.session, calls.case
    again = (RERUN, "called again", inputs, options, 0)
    between = (STALE, "other data of these shapes", *other, 0)
    then = (STALE, "after a call with other data", inputs, options, 0)
    dirty = (DIRTY, "over memory with other contents", inputs, options, 1)
    answers = []
    for watch, what, tensors, chosen, poison in (*[again] * 4, between, then, between, then, *[dirty] * 3):
        answer, _ = calls.ask(watch, what, tensors, chosen, taken=True, poison=poison, fresh=what == between[1])
        if answer.problem is not None:
            return
        answers.append(answer)
    plain, after, dirtied = answers[:4], answers[5:8:2], answers[8:]
    both = {name: (x, dirtied[1].outputs[name]) for name, x in after[1].outputs.items()}
    call = Call(session.contract, inputs, options)
    unwritten = {
        name: is_poison(x, 0) & is_poison(y, 1) & _specified(call, x)
        for name, (x, y) in both.items()
        if x.shape == y.shape and x.dtype == y.dtype
    }
    yield _finding(case, "every element written", unwritten, "never written: {}", "every specified element was written")
    known = {name: ~mask for name, mask in unwritten.items()}
    pairs = [(plain[1], plain[2]), (plain[2], plain[3]), (after[0], after[1]), (dirtied[1], dirtied[2])]
    if session.device.startswith("cuda"):
        for _ in range(RERUNS - 4):
            answer, _ = calls.ask(*again[:4], taken=True)
            if answer.problem is not None:
                return
            pairs.append((plain[3], answer))
    changed: dict[str, Tensor] = {}
    for x, y in pairs:
        for name, mask in _differ(call, x, y, known).items():
            changed[name] = changed.get(name, mask) | mask
    yield _finding(case, RERUN, changed, "other bits on rerun: {}", "the same bits on rerun")
    if _any(changed):
        return
    stale = _differ(call, plain[3], after[0], known)
    first_call = _differ(call, plain[0], plain[1], known)
    stale = {name: mask | first_call[name] for name, mask in stale.items()}
    yield _finding(case, STALE, stale, "depends on the previous call: {}", "no trace of the previous call")
    if _any(stale):
        return
    left = _differ(call, plain[3], dirtied[1], known)
    texts = ("depends on memory that nobody wrote, or on padding: {}", "no trace of uninitialised memory or padding")
    yield _finding(case, DIRTY, left, *texts)


def strided(calls: Calls, inputs: Inputs, options: Options, names: Sequence[str]) -> Iterator[Finding | Note]:
    """Operands with padded rows, and with every element two places behind the last, where the contract does not ask
    for contiguous ones.

    All of ``names`` are strided in one call, and each alone where that is refused; a refusal does not fail."""
    rows = [n for n in names if inputs[n].dim() == 2 or (inputs[n].dim() > 2 and inputs[n].is_contiguous())]
    stepped = [n for n in names if _takes_steps(Call(calls.session.contract, inputs, options), n)]
    for what, how, amount, them in (("padded rows of", "lead", 16, rows), ("elements apart in", "step", 2, stepped)):
        for group in (them, *([name] for name in them if them[1:])):
            if not group or calls.hung:
                break
            text = f"{what} {', '.join(group)}"
            views: dict[str, Any] = {how: dict.fromkeys(group, amount)}
            _, verdict = calls.ask(PITCHED, text, inputs, options, **views)
            if verdict.status is Status.UNSUPPORTED:
                yield Note(calls.case, PITCHED, f"refused with {text}: {verdict.reason}")
                continue
            if not verdict.status.is_failure:
                yield Finding(calls.case, PITCHED, verdict)
            if group is them:
                break


def viewable(contract: Contract, inputs: Inputs) -> list[str]:
    """The inputs of several elements that may have any strides."""
    free = (spec.name for spec in contract.inputs if not spec.contiguous and spec.name in inputs)
    return [name for name in free if inputs[name].numel() > 1]


def _takes_steps(call: Call, name: str) -> bool:
    """Whether the contract takes an input with an element of something else behind each of its own."""
    bits = call.inputs[name].view(_BITS[call.inputs[name].dtype.itemsize])
    view = torch.stack([bits, bits], dim=-1).view(call.inputs[name].dtype)[..., 0]
    try:
        call.contract.check({**call.inputs, name: view}, call.options)
    except LayoutError:  # the contract takes no such view: it is not asked
        return False
    return True


def metamorphic(calls: Calls, inputs: Inputs, options: Options) -> Iterator[Finding | Note]:
    """Relations that hold exactly for every right kernel of a scaled product, and some that describe it."""
    session, case = calls.session, calls.case
    operands = _given(Call(session.contract, inputs, options))
    if operands is None or {"bias", "c"} & inputs.keys():
        return
    role = operands.roles
    base, _ = calls.ask(RERUN, "called again", inputs, options, taken=True)
    if base.problem is not None:
        return
    right = base.outputs["out"]
    a, scale = inputs[role["a"]], inputs[role["a_scale"]]
    negated = {**inputs, role["a"]: (a.view(torch.uint8) ^ 0x80).view(a.dtype)}
    twice, wanted = {**inputs, role["a_scale"]: scale * 2}, decode(right)
    for watch, supplied, due, what in (
        (DOUBLED, twice, wanted * 2, "the result is not doubled"),
        (FLIPPED, negated, -wanted, "the result is not negated"),
    ):
        if calls.hung:
            return
        answer, verdict = calls.ask(watch, "numbers", supplied, options, taken=True)
        if answer.problem is None and not verdict.status.is_failure:  # else its numbers are said to be wrong
            yield _relation(calls, watch, Call(session.contract, inputs, options), answer, due, what)
    if not operands.by_row or calls.hung:
        return
    order = torch.arange(a.shape[0] - 1, -1, -1, device="cpu")
    turned = {**inputs, role["a"]: take_rows(a, order)}
    if scale.numel() > 1:
        turned[role["a_scale"]] = scale[order].contiguous()
    answer, verdict = calls.ask(PERMUTED, "rows in reverse order", turned, options, taken=True)
    if answer.problem is None:
        if not verdict.status.is_failure:
            yield Finding(case, PERMUTED, verdict)
        if not bool(same_bits(answer.outputs["out"], take_rows(right, order)).all()):
            yield Note(case, PERMUTED, "the bits of a row depend on its place in the batch")


def batch(calls: Calls, inputs: Inputs, options: Options, *, required: bool) -> Iterator[Finding | Note]:
    """A row alone, and in the first rows up to each dispatch threshold, against the row in the whole batch.

    The sets of a product say for each row by itself which outputs are right, and an alternative that holds the whole
    output holds its first rows: rows with the bits that they have in a right batch are proved by them, and what is
    wrong with them in a wrong one is said there. Other bits are judged, and are a note (a failure when required).
    Of a contract that is no such product, and of one with groups, see :func:`_rows`.
    """
    session, case = calls.session, calls.case
    operands = _given(Call(session.contract, inputs, options))
    if operands is None or not operands.by_row:
        yield from _rows(calls, inputs, options, required=required)
        return
    role = operands.roles
    rows = inputs[role["a"]].shape[0]
    if rows < 2:
        return
    base, _ = calls.ask(RERUN, "called again", inputs, options, taken=True)
    if base.problem is not None:
        return
    differing = []
    for count in (1, 4, 8, 16, 31, 32, 33, 64, 128):
        if count >= rows or calls.hung:
            break
        if not session.takes(case, m=count):
            continue
        cut = {**inputs, role["a"]: inputs[role["a"]][:count].contiguous()}
        scale = inputs[role["a_scale"]]
        if scale.numel() > 1 and scale.shape[0] == rows:
            cut[role["a_scale"]] = scale[:count].contiguous()

        def same(answer: Answer, count: int = count) -> bool:
            return bool(same_bits(answer.outputs["out"], base.outputs["out"][:count]).all())

        answer, _ = calls.ask(SMALLER, f"the first {count} of {rows} rows as a batch", cut, options, follows=same)
        if answer.problem is None and not same(answer):
            differing.append(count)
    yield _in_batches(case, rows, differing, required=required)


def _rows(calls: Calls, inputs: Inputs, options: Options, *, required: bool) -> Iterator[Finding | Note]:
    """The first row, and half of the rows, against the same rows in the whole call: of the first axis of the first
    input that an axis of an output follows. The last axis counts columns, and is left out unless the contract is a
    product.

    Each answer is judged; a batch that the contract refuses, or whose rows are no extent of the kernel's domain, is
    left out: where no other is left, that is said. Where bits differ the reference says whether rows depend on each
    other, as under the amax of a tensor: then nothing is concluded.
    """
    contract = calls.session.contract
    call = Call(contract, inputs, options)
    first = next((spec for spec in contract.inputs if spec.name in inputs), None)
    beyond = False  # a batch was left out
    for axis in range(0 if first is None else inputs[first.name].dim() - (not contract.multiplies) or 1):
        assert first is not None
        rows = inputs[first.name].shape[axis] if inputs[first.name].dim() else 0
        batches = dict.fromkeys((1, rows // 2, rows // 2 // STEP * STEP) if rows > 1 else ())
        ways = ((count, _fewer(call, first, axis, count)) for count in batches if count)
        smaller = [(count, *result) for count, result in ways if result is not None]
        admitted = [one for one in smaller if calls.session.takes(calls.case, **{_extent(first, axis): one[0]})][:2]
        beyond |= not admitted and bool(smaller)
        if admitted:
            break
    else:
        if beyond:
            yield Note(calls.case, SMALLER, f"not tried: none lies in the domain {calls.session.domain}")
        return
    base, verdict = calls.ask(RERUN, "called again", inputs, options, taken=True)
    if base.problem is not None or verdict.status.is_failure:
        return
    tried, differing = 0, []
    for count, cut, along in admitted:
        answer, _ = calls.ask(SMALLER, f"the first {count} of {rows} rows as a batch", cut.inputs, options)
        if answer.problem is not None or calls.hung:
            continue
        tried += 1
        if not _equal_rows(cut, call, answer.outputs, base.outputs, along):
            due, whole = (by_name(contract.reference(one.inputs, **options)) for one in (cut, call))
            if not _equal_rows(cut, call, due, whole, along):
                return
            differing.append(count)
    if tried:
        yield _in_batches(calls.case, rows, differing, required=required)


def _extent(spec: TensorSpec, axis: int) -> str:
    """The extent that an axis of an input is in the ids of cases; "" where the contract gives the axis no name."""
    return spec.dims[axis].partition("|")[0].lower() if spec.dims else ""


def _fewer(call: Call, first: TensorSpec, axis: int, count: int) -> tuple[Call, dict[str, int]] | None:
    """The call with ``count`` of the rows that an axis of an input has, in every input that has them, whose groups end
    there; and the axis of each output that follows. None where the contract refuses it, or no output follows."""
    rows, symbol = call.inputs[first.name].shape[axis], first.dims[axis] if first.dims else ""
    cut = dict(call.inputs)
    for spec in (spec for spec in call.contract.inputs if spec.name in cut):
        x, dims = cut[spec.name], spec.dims or ()
        named = [at for at, dim in enumerate(dims) if symbol in dim.split("|")] if spec is not first else [axis]
        for at in (at for at in named if at < x.dim() and x.shape[at] == rows):
            x = x.narrow(at, 0, count)
        if spec.kind is Kind.COUNTS and x.dim() == 1 and not named and axis == 0:
            return None  # they add up to the rows
        if spec.kind in (Kind.OFFSETS, Kind.COUNTS) and x.dim() == 1 and not named:
            x = x.clamp(max=count)
        cut[spec.name] = x.contiguous()
    less = Call(call.contract, cut, call.options)
    try:
        due, whole = (one.contract.outputs(one.checked()) for one in (less, call))
    except OracleError:  # the contract takes no such batch: nothing is asked of the kernel
        return None
    along: dict[str, int] = {}
    for name, out in due.items():
        shape, before = out.shape or (), whole[name].shape or ()
        differ = [at for at in range(len(shape)) if shape[at] != before[at]] if len(shape) == len(before) else []
        if [(shape[at], before[at]) for at in differ] == [(count, rows)]:
            along[name] = differ[0]
    return (less, along) if along else None


def _equal_rows(
    less: Call, call: Call, few: Mapping[str, Tensor], all_of: Mapping[str, Tensor], along: Mapping[str, int]
) -> bool:
    """Whether the rows of the smaller call have the bits of the same rows in the whole one, where both specify them; of
    an optional output, where both have it."""
    for name, axis in ((name, axis) for name, axis in along.items() if name in few and name in all_of):
        x, y = few[name], all_of[name]
        part = y.narrow(axis, 0, x.shape[axis])
        owned = _specified(less, x) & _specified(call, y).narrow(axis, 0, x.shape[axis])
        if not bool((agree(x.contiguous(), part.contiguous()) | ~owned).all()):
            return False
    return True


def _in_batches(case: str, rows: int, differing: Sequence[int], *, required: bool) -> Finding | Note:
    text = f"rows have other bits in batches of {', '.join(map(str, differing))} than in one of {rows}"
    if not differing:
        return Finding(case, BATCH, passed("a row has the same bits in every batch tried"))
    return Finding(case, BATCH, failed(text)) if required else Note(case, BATCH, text)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LAUNCHES = (
    (launches.SIDE, SIDE, "on a stream of its own", True),
    (launches.HELD, JOINED, "read on the caller's stream while all others sleep", False),
    (launches.LATE, JOINED, "inputs written on the caller's stream just before", False),
    (launches.GRAPH, GRAPH, "captured and replayed", True),
    (launches.REPLACED, GRAPH, "replayed with other inputs in place", False),
    (launches.FIRST, GRAPH, "the first of two calls in one graph", False),
    (launches.SECOND, GRAPH, "the second of two calls in one graph", False),
)
"""Modes of :mod:`oracle.harness.launches`, their watches, what is said of them, and whether bits are compared too."""


def alike(inputs: Inputs, other: Inputs) -> Inputs:
    """Other inputs of the same shapes: these, or where their shapes depend on data the own numbers in reverse order."""
    if all(x.shape == other[name].shape for name, x in inputs.items()):
        return other

    def turned(x: Tensor) -> Tensor:
        return x.view(_BITS[x.dtype.itemsize]).flip(0).view(x.dtype)

    return {name: turned(x) if x.is_floating_point() and x.dim() else x for name, x in inputs.items()}


def launched(
    calls: Calls, inputs: Inputs, options: Options, other: Inputs, *, exempt: Container[str] = ()
) -> Iterator[Finding | Note]:
    """On a GPU, in each way of :mod:`oracle.harness.launches` whose watch is not ``exempt``; ``other`` are inputs of
    the same shapes."""
    if not calls.session.device.startswith("cuda"):
        return
    base, _ = calls.ask(RERUN, "called again", inputs, options, taken=True)
    for mode, watch, what, compared in LAUNCHES:
        if watch in exempt:
            continue
        if calls.hung or base.problem is not None:
            return
        answer, verdict = calls.ask(watch, what, inputs, options, mode=mode, beside=other, taken=watch == JOINED)
        if verdict.status is Status.UNSUPPORTED:
            yield Note(calls.case, watch, f"refused {what}: {verdict.reason}")
            if watch == GRAPH:
                return  # every mode that is left captures the kernel, and a refused capture costs a process
        if answer.problem is not None:
            continue
        if compared:
            masks = _differ(Call(calls.session.contract, inputs, options), base, answer, {})
            yield _finding(calls.case, watch, masks, "other bits than a plain call: {}", "the bits of a plain call")
        elif not verdict.status.is_failure:
            yield Finding(calls.case, watch, replace(verdict, summary=f"{what}: {verdict.summary}"))


def threads(
    calls: Calls, inputs: Inputs, options: Options, other: Inputs, *, required: bool
) -> Generator[Finding | Note, None, bool]:
    """The call among calls of other threads, half of them with ``other`` data of the same shapes.

    A crash, a hang and a raise fail. Wrong numbers of a call that is right alone, a write outside of an output and a
    refusal are a note, a failure when required; other bits whose numbers are right are a note. Returns whether it was
    tried.
    """
    session, case = calls.session, calls.case
    base, alone = calls.ask(RERUN, "called again", inputs, options, taken=True)
    if base.problem is not None or alone.status.is_failure:
        return False  # already fails single-threaded
    if base.seconds * (concurrency.THREADS + 2) + concurrency.SECONDS > session.worker.limit:
        limit = session.worker.limit
        text = f"not tried: a call takes {base.seconds:.1f} s of the limit of {limit:g} s; raise the limit"
        answer = Answer(problem=Verdict(Status.UNTESTED, text, reason=text))
    else:
        answer = session.call(inputs, options, mode="threads", beside=other)
    if answer.problem is not None and answer.problem.status is Status.UNTESTED:
        text = answer.problem.summary
        yield Finding(case, THREADS, answer.problem) if required else Note(case, THREADS, text)
        return True
    calls.hung |= answer.hung
    what = "called from several threads at once"
    if answer.problem is not None and answer.problem.status is Status.CRASHED:
        calls.add(THREADS, what, answer.problem)
        return True
    verdict = calls.verdict(other if answer.disturbed else inputs, options, answer)
    wrong = None
    if answer.guards:
        wrong = f"written out of bounds: {'; '.join(answer.guards)}"
    elif verdict.status.is_failure or verdict.status is Status.UNSUPPORTED:
        wrong = verdict.summary
    if verdict.status is Status.UNSUPPORTED and not required:
        calls.add(THREADS, what, verdict)
    if wrong is not None:
        text = f"{what}: {wrong}"
        yield Finding(case, THREADS, failed(text)) if required else Note(case, THREADS, text)
        return True
    if required:
        yield Finding(case, THREADS, passed("right numbers while other threads call it"))
    if answer.disturbed or _any(_differ(Call(session.contract, inputs, options), base, answer, {})):
        yield Note(case, THREADS, "other bits when called from several threads at once")
    return True


def _given(call: Call) -> Operands | None:
    """The operands of a scaled product of given codes and scales; one that quantises has no exact relations."""
    operands = call.optional_operands
    return operands if operands is not None and operands.given and operands.roles else None


# --- comparing ----------------------------------------------------------------------------------------------


def _relation(calls: Calls, watch: str, call: Call, answer: Answer, wanted: Tensor, what: str) -> Finding:
    out, dtype = decode(answer.outputs["out"]), answer.outputs["out"].dtype
    least = 2.0**-13 if dtype == torch.float16 else 1e-30  # doubled subnormals were rounded at another place
    ordinary = torch.isfinite(wanted) & (wanted.abs() > least) & (wanted.abs() < torch.finfo(dtype).max)
    bad = ordinary & (out != wanted) & _specified(call, out)
    return _finding(calls.case, watch, {"out": bad}, what + ": {}", "holds exactly")


def _the_same(x: Inputs, y: Inputs) -> bool:
    """Whether two calls were given the same tensors, which nobody writes to."""
    return x.keys() == y.keys() and all(x[name] is y[name] for name in x)


def _identical(x: Answer, y: Answer) -> bool:
    """Whether two answers have the same strides, dtypes and shapes and every byte of memory, padding included."""
    pairs = [(a, y.outputs.get(name)) for name, a in x.outputs.items()]
    return x.facts == y.facts and all(
        b is not None and torch.equal(run_of(a).view(torch.uint8), run_of(b).view(torch.uint8)) for a, b in pairs
    )


def _finding(case: str, name: str, masks: Mapping[str, Tensor], wrong: str, right: str) -> Finding:
    bad = {output: mask for output, mask in masks.items() if bool(mask.any())}
    texts = [f"{output} {describe(mask)} ({counted(int(mask.sum()), 'element')})" for output, mask in bad.items()]
    return Finding(case, name, failed(wrong.format("; ".join(texts))) if texts else passed(right))


def _any(masks: Mapping[str, Tensor]) -> bool:
    return any(bool(mask.any()) for mask in masks.values())


def _differ(call: Call, first: Answer, second: Answer, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    masks = {}
    for name, x in first.outputs.items():
        y = second.outputs[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            masks[name] = torch.ones(x.shape, dtype=torch.bool, device="cpu")
            continue
        masks[name] = ~agree(x, y) & _specified(call, x)
        if name in known:
            masks[name] &= known[name]
    return masks


def _specified(call: Call, output: Tensor) -> Tensor:
    """Elements of an output that the contract specifies."""
    inside = torch.ones(output.shape, dtype=torch.bool, device="cpu")
    operands = call.optional_operands
    if operands is not None and (rows := operands.specified()) is not None:
        inside.view(-1, output.shape[-1])[~rows] = False
    for out in call.contract.outputs(call).values():
        if out.specified is not None and out.shape == tuple(output.shape):
            inside &= out.specified.cpu()
    return inside


# --- mixtures and late writes -------------------------------------------------------------------------------


MIXED = "partial-input memoisation"


def mixed(calls: Calls, inputs: Inputs, options: Options, other: Inputs) -> Iterator[Finding | Note]:
    """The numbers of a call whose operands begin like ``inputs`` and end like ``other``.

    Integers (offsets, sizes, indices) stay as they are. A note says where the contract does not take the mixture.
    """
    second = {name: _mixture(x, other[name]) for name, x in inputs.items()}
    try:
        calls.session.contract.check(second, options)
    except OracleError as error:
        yield Note(calls.case, MIXED, f"not tried, the mixture is no valid call: {error}")
        return
    _, verdict = calls.ask(MIXED, "the last half of every operand replaced", second, options, taken=True, fresh=True)
    if not verdict.status.is_failure:
        yield Finding(calls.case, MIXED, verdict)


def late(session: Session) -> Iterator[Finding]:
    """A failure when an output was written after its call had returned."""
    session.look_back()
    if session.late:
        names = ", ".join(dict.fromkeys(session.late))
        yield Finding("-", "late writes", failed(f"written after the call had returned: {names}"))


def _mixture(x: Tensor, y: Tensor) -> Tensor:
    """The first half of ``x`` and the last half of ``y``, by rows, by elements of a vector; a scalar as it is."""
    if x.shape != y.shape or x.dtype != y.dtype or not x.dtype.is_floating_point or x.dim() == 0 or x.shape[0] < 2:
        return x
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    mixture = x.clone()
    mixture.view(bits)[x.shape[0] // 2 :] = y.view(bits)[x.shape[0] // 2 :]
    return mixture
