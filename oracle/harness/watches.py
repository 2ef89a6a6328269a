"""What is watched besides the numbers. Each watch makes a few calls and gives findings of its own name.

Some demand what every right kernel gives (guard zones, inputs unchanged, every element written, the same bits on
rerun, no trace of the previous call, exact behaviour under powers of two and signs): they fail. Others describe
(batch invariance, bits under permutation, refused strides): they are notes, unless they are required.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.harness import concurrency
from oracle.harness.memory import is_poison
from oracle.harness.report import BATCH, THREADS, Finding
from oracle.harness.session import Answer, Session, failed, passed
from oracle.numbers.formats import decode, same_bits
from oracle.routines.base import Call, Operands
from oracle.routines.catalogue import agree
from oracle.truth.gemm import take_rows
from oracle.verdict.compare import Status, Verdict
from oracle.verdict.pattern import describe

Inputs = Mapping[str, Tensor]
Options = Mapping[str, object]
SMALLER = "numbers of smaller batches"


@dataclass(frozen=True)
class Note:
    """An observation that does not decide."""

    case: str
    watch: str
    text: str


def memory(session: Session, case: str, answer: Answer) -> Iterator[Finding]:
    """Guard zones and inputs after one call, whatever its result is."""
    if not answer.facts:
        return
    wrong, right = f"written out of bounds: {'; '.join(answer.guards)}", "no byte outside the buffers was written"
    yield Finding(case, "guard zones", failed(wrong) if answer.guards else passed(right))
    wrong = f"the kernel wrote to its inputs: {', '.join(answer.changed)}"
    yield Finding(case, "inputs unchanged", failed(wrong) if answer.changed else passed("every input has its bits"))


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


def repeats(
    session: Session, case: str, inputs: Inputs, options: Options, other: tuple[Inputs, Options]
) -> Iterator[Finding]:
    """Reruns: the same call, the same call after ``other`` (same shapes, other data), and over another poison.

    Each situation is met twice: where its two answers differ the kernel is not deterministic, and nothing else is
    concluded from it.
    """
    plain = [session.call(inputs, options) for _ in range(4)]
    after = []
    for _ in range(2):
        session.call(*other)
        after.append(session.call(inputs, options))
    dirty = [session.call(inputs, options, poison=1) for _ in range(3)]
    answers = (*plain, *after, *dirty)
    first = next((a.problem for a in answers if a.problem is not None), None)
    if first is not None:
        if first.status is not Status.UNSUPPORTED:
            yield Finding(case, "rerun determinism", first)
        return
    both = {name: (x, dirty[1].outputs[name]) for name, x in after[1].outputs.items()}
    unwritten = {name: is_poison(x, 0) & is_poison(y, 1) & _specified(session, inputs, x)
                 for name, (x, y) in both.items() if x.shape == y.shape and x.dtype == y.dtype}  # fmt: skip
    yield _finding(case, "every element written", unwritten, "never written: {}", "every specified element was written")
    known = {name: ~mask for name, mask in unwritten.items()}
    pairs = ((plain[1], plain[2]), (plain[2], plain[3]), (after[0], after[1]), (dirty[1], dirty[2]))
    changed: dict[str, Tensor] = {}
    for x, y in pairs:
        for name, mask in _differ(session, inputs, x, y, known).items():
            changed[name] = changed.get(name, mask) | mask
    yield _finding(case, "rerun determinism", changed, "other bits on rerun: {}", "the same bits on rerun")
    if _any(changed):
        return
    stale = _differ(session, inputs, plain[3], after[0], known)
    first_call = _differ(session, inputs, plain[0], plain[1], known)
    stale = {name: mask | first_call[name] for name, mask in stale.items()}
    yield _finding(case, "stale state", stale, "depends on the previous call: {}", "no trace of the previous call")
    if _any(stale):
        return
    left = _differ(session, inputs, plain[3], dirty[1], known)
    said = ("depends on memory that nobody wrote, or on padding: {}", "no trace of uninitialised memory or padding")
    yield _finding(case, "uninitialised memory", left, *said)


def strided(session: Session, case: str, inputs: Inputs, options: Options) -> Iterator[Finding | Note]:
    """Operands with padded rows, where the contract does not ask for contiguous ones."""
    named = [s.name for s in session.contract.inputs if not s.contiguous and s.name in inputs]
    free = [name for name in named if inputs[name].dim() == 2]
    if not free:
        return
    answer = session.call(inputs, options, lead=dict.fromkeys(free, 16))
    if answer.problem is not None and answer.problem.status is not Status.FAILED:
        text = f"refused with padded rows of {', '.join(free)}: {answer.problem.reason}"
        yield Note(case, "non-contiguous inputs", text)
        return
    yield Finding(case, "non-contiguous inputs", session.judge(inputs, options, answer))


def metamorphic(session: Session, case: str, inputs: Inputs, options: Options) -> Iterator[Finding | Note]:
    """Relations that hold exactly for every right kernel of a scaled product, and some that describe it."""
    operands = _given(session, inputs)
    if operands is None or "bias" in inputs:
        return
    role, base = operands.roles, session.call(inputs, options)
    if base.problem is not None:
        return
    right = base.outputs["out"]
    doubled = session.call({**inputs, role["a_scale"]: inputs[role["a_scale"]] * 2}, options)
    wanted = decode(right)
    yield from _relation(session, case, "scale doubled", inputs, doubled, wanted * 2, "the result is not doubled")
    a = inputs[role["a"]]
    negated = (a.view(torch.uint8) ^ 0x80).view(a.dtype)
    flipped = session.call({**inputs, role["a"]: negated}, options)
    yield from _relation(session, case, "sign flipped", inputs, flipped, -wanted, "the result is not negated")
    if operands.groups is not None:
        return
    order = torch.arange(a.shape[0] - 1, -1, -1, device="cpu")
    turned = {**inputs, role["a"]: take_rows(a, order)}
    if inputs[role["a_scale"]].numel() > 1:
        turned[role["a_scale"]] = inputs[role["a_scale"]][order].contiguous()
    answer = session.call(turned, options)
    if answer.problem is None:
        yield Finding(case, "rows permuted", session.judge(turned, options, answer))
        if not bool(same_bits(answer.outputs["out"], take_rows(right, order)).all()):
            yield Note(case, "rows permuted", "the bits of a row depend on its place in the batch")


def batch(session: Session, case: str, inputs: Inputs, options: Options, *, required: bool) -> Iterator[Finding | Note]:
    """A row alone, and in the first rows up to each dispatch threshold, against the row in the whole batch.

    Other bits are a note (a failure when required); but a batch with other bits was not judged with the whole one, so
    its numbers are, and a smaller batch that the kernel cannot take is a finding of its own.
    """
    operands = _given(session, inputs)
    if operands is None or operands.groups is not None:
        return
    role = operands.roles
    rows = inputs[role["a"]].shape[0]
    base = session.call(inputs, options)
    if base.problem is not None or rows < 2:
        return
    differing = []
    for count in (1, 4, 8, 16, 31, 32, 33, 64, 128):
        if count >= rows:
            break
        cut = {**inputs, role["a"]: inputs[role["a"]][:count].contiguous()}
        scale = inputs[role["a_scale"]]
        if scale.numel() > 1 and scale.shape[0] == rows:
            cut[role["a_scale"]] = scale[:count].contiguous()
        answer = session.call(cut, options)
        if answer.problem is None and bool(same_bits(answer.outputs["out"], base.outputs["out"][:count]).all()):
            continue
        if answer.problem is None:
            differing.append(count)
        verdict = session.judge(cut, options, answer)
        if verdict.status.is_failure:
            what = f"the first {count} of {rows} rows as a batch: {verdict.summary}"
            yield Finding(case, SMALLER, replace(verdict, summary=what))
    text = f"rows have other bits in batches of {', '.join(map(str, differing))} than in one of {rows}"
    if required:
        same = passed("a row has the same bits in every batch tried")
        yield Finding(case, BATCH, failed(text) if differing else same)
    elif differing:
        yield Note(case, BATCH, text)


def launches(session: Session, case: str, inputs: Inputs, options: Options) -> Iterator[Finding | Note]:
    """On a GPU: on a side stream, and captured in a graph."""
    if not session.device.startswith("cuda"):
        return
    base = session.call(inputs, options)
    for mode, name in (("stream", "side stream"), ("graph", "CUDA graph")):
        answer = session.call(inputs, options, mode=mode)
        if answer.problem is not None:
            yield Note(case, name, f"refused: {answer.problem.reason}")
        elif base.problem is None:
            masks = _differ(session, inputs, base, answer, {})
            yield _finding(case, name, masks, "other bits than a plain call: {}", "the bits of a plain call")


def threads(
    session: Session, case: str, inputs: Inputs, options: Options, other: Inputs, *, required: bool
) -> Generator[Finding | Note, None, bool]:
    """The call among calls of other threads, half of them with ``other`` data of the same shapes.

    Wrong numbers of a call that is right alone, a write outside of an output, a call that raises or is refused and a
    lost process are a note, a failure when required; other bits whose numbers are right are a note. Returns whether
    it was tried.
    """
    base = session.call(inputs, options)
    if base.problem is not None or session.judge(inputs, options, base).status.is_failure:
        return False  # already fails single-threaded
    if base.seconds * (concurrency.THREADS + 1) + concurrency.SECONDS > session.worker.limit:
        limit = session.worker.limit
        text = f"not tried: a call takes {base.seconds:.1f} s of the limit of {limit:g} s; raise the limit"
        untested = Verdict(Status.UNTESTED, text, reason=text)
        yield Finding(case, THREADS, untested) if required else Note(case, THREADS, text)
        return True
    answer = session.call(inputs, options, beside=other)
    same = answer.problem is None and not _any(_differ(session, inputs, base, answer, {}))
    wrong = None
    if answer.problem is not None:
        wrong = answer.problem.summary
    elif answer.guards:
        wrong = f"written out of bounds: {'; '.join(answer.guards)}"
    elif not same and (verdict := session.judge(inputs, options, answer)).status.is_failure:
        wrong = verdict.summary
    if wrong is not None:
        text = f"called from several threads at once: {wrong}"
        yield Finding(case, THREADS, failed(text)) if required else Note(case, THREADS, text)
        return True
    if required:
        yield Finding(case, THREADS, passed("right numbers while other threads call it"))
    if not same:
        yield Note(case, THREADS, "other bits when called from several threads at once")
    return True


def _given(session: Session, inputs: Inputs) -> Operands | None:
    """The operands of a scaled product of given codes and scales; one that quantises has no exact relations."""
    operands = Call(session.contract, inputs).optional_operands
    return operands if operands is not None and operands.given and operands.roles else None


# --- comparing ----------------------------------------------------------------------------------------------


def _relation(
    session: Session, case: str, name: str, inputs: Inputs, answer: Answer, wanted: Tensor, what: str
) -> Iterator[Finding]:
    if answer.problem is not None:
        if answer.problem.status is Status.FAILED:
            yield Finding(case, name, answer.problem)
        return
    out, dtype = decode(answer.outputs["out"]), answer.outputs["out"].dtype
    least = 2.0**-13 if dtype == torch.float16 else 1e-30  # doubled subnormals were rounded at another place
    ordinary = torch.isfinite(wanted) & (wanted.abs() > least) & (wanted.abs() < torch.finfo(dtype).max)
    bad = ordinary & (out != wanted) & _specified(session, inputs, out)
    yield _finding(case, name, {"out": bad}, what + ": {}", "holds exactly")


def _finding(case: str, name: str, masks: Mapping[str, Tensor], wrong: str, right: str) -> Finding:
    bad = {output: mask for output, mask in masks.items() if bool(mask.any())}
    found = [f"{output} {describe(mask)} ({int(mask.sum())} elements)" for output, mask in bad.items()]
    return Finding(case, name, failed(wrong.format("; ".join(found))) if found else passed(right))


def _any(masks: Mapping[str, Tensor]) -> bool:
    return any(bool(mask.any()) for mask in masks.values())


def _differ(
    session: Session, inputs: Inputs, first: Answer, second: Answer, known: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    masks = {}
    for name, x in first.outputs.items():
        y = second.outputs[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            masks[name] = torch.ones(x.shape, dtype=torch.bool, device="cpu")
            continue
        masks[name] = ~agree(x, y) & _specified(session, inputs, x)
        if name in known:
            masks[name] &= known[name]
    return masks


def _specified(session: Session, inputs: Inputs, output: Tensor) -> Tensor:
    """Elements of an output that the contract specifies."""
    inside = torch.ones(output.shape, dtype=torch.bool, device="cpu")
    operands = Call(session.contract, inputs).optional_operands
    if operands is not None and (rows := operands.specified()) is not None:
        inside.view(-1, output.shape[-1])[~rows] = False
    return inside
