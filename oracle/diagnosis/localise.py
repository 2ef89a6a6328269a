"""Placements: faults at rows, columns, experts or K blocks that no catalogue can list, found on the output.

Each is guessed from the failing elements ``y``, with a threshold, and then judged without one:

    moved      64 columns of a row correlate with the right result of another row, or of other columns
    weights    y is close to the rows of its expert times the codes, the scales, or both, of another expert
    a K block  y - right is close to what the right terms of one block (of some, where they are lost) would change

The judgement is the one that refused the output (:meth:`oracle.diagnosis.candidates.FailingOutput.attempt_placement`):
every failing element must lie in the interval of the *mutated* product, by the declared numerics or one of the classes
that an undeclared kernel may use. So thresholds can cause misses, never false explanations, and kernels of any
arithmetic are explained. The rest of the output is right as it is. More elements must fail than agree by coincidence,
and with more than one value.

Not covered: two such faults at once, moves by less than 64 columns, calls in which many experts fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from oracle.bounds.engines import exact
from oracle.diagnosis.candidates import (
    LISTED,
    Explanation,
    FailingOutput,
    Piece,
    Placement,
    evenly,
    rows_of_output,
    varied,
)
from oracle.diagnosis.least_squares import CHUNK
from oracle.numbers.formats import codes_of, decode
from oracle.routines.catalogue import Call, faults_of, get
from oracle.routines.products.roles import matrices
from oracle.tensorcore.identify import subset
from oracle.truth.gemm import ScaledProduct
from oracle.verdict.pattern import lines, ranges
from oracle.verdict.products import COINCIDENCES, Part

# Thresholds of the guesses: they can cause misses, never false explanations.
PIECE = 64  # columns of a row that are looked for elsewhere; cosines of as many independent values deviate by 1/8
ALIKE = 0.99  # cosine of a piece with what it is a copy of, which roundings of 2^-8 leave above 0.9999
SEARCH, SEARCH_ON_DEVICE = 1 << 33, 1 << 37
"""Products of one search for pieces: those of a float32 call of 2048 x 2048 x 2048, or of 4096 x 4096 x 8192."""
GUESS = (64, 128)  # rows and columns that a guess is made from
FEW_GUESS = (8, 16)  # those of them on which it is made first
NEAR = 0.25  # residual over size: of the rest at most a sixteenth of what is to be explained, in squares
VARIED = 1 << 14  # failing elements that must differ
FEW = 256  # pairs of a failing expert and another that are tried
OPERANDS = (  # of another expert: the codes, the scales, and what that is called
    (True, False, "B codes of another group"),
    (False, True, "B scale of another group"),
    (True, True, "weights of another group"),
)
Terms = Sequence[tuple[int, int, int]]
"""What is added for one K block: the blocks whose scale of a, whose scale of b and whose codes enter."""
Effect = tuple[str, Mapping[int, Terms]]


def placements(failure: FailingOutput, numerics: Sequence[str], known: Sequence[Explanation]) -> list[Explanation]:
    """Explanations of everything that fails, each with its place.

    ``numerics`` are the names of the intervals to judge by, of which one must hold. Where one of the ``known``
    explanations is a fault that acts in all that fails, only moves are looked for.
    """
    return moved(failure, numerics) or ([] if any(e.local for e in known) else replaced(failure, numerics))


def moved(failure: FailingOutput, numerics: Sequence[str]) -> list[Explanation]:
    """:func:`placements` of rows and tiles that stand elsewhere."""
    return _holding(failure, numerics, _moves(failure)) if _enough(failure) else []


def replaced(failure: FailingOutput, numerics: Sequence[str]) -> list[Explanation]:
    """:func:`placements` of other operands: another expert's weights, or other terms for a K block."""
    if not _enough(failure):
        return []
    return _holding(failure, numerics, _weights(failure)) or _holding(failure, numerics, _blocks(failure))


def _enough(failure: FailingOutput) -> bool:
    """Whether more elements fail than agree by coincidence, with more than one value."""
    at = evenly(failure.failing_places, VARIED)
    return failure.failing >= COINCIDENCES and varied(failure.output.flatten()[at])


def _holding(failure: FailingOutput, numerics: Sequence[str], candidates: Iterable[Placement]) -> list[Explanation]:
    attempts = (failure.attempt_placement(candidate, numerics) for candidate in candidates)
    return [explanation for explanation in attempts if explanation is not None]


def groups_in_use(call: Call) -> list[int]:
    """The experts of the parts of a grouped call."""
    return [part.group for part in call.parts]


# --- moved --------------------------------------------------------------------------------------------------


def _moves(failure: FailingOutput) -> Iterator[Placement]:
    """One rectangle that holds the right result of another, or two that hold each other's."""
    shifts = _shifts(failure)
    if not 0 < len(shifts) < 3 or (0, 0) in shifts:
        return
    (down, right), (rows, columns) = next(iter(shifts.items()))
    swapped = len(shifts) == 2
    if swapped and (-down, -right) not in shifts:
        return
    results = [_moved(failure, *rectangle, shift) for shift, rectangle in shifts.items()]
    pieces = [piece for piece in results if piece is not None]
    if len(pieces) < len(results):
        return
    if len(rows) == 1 and right == 0:
        fault = get("two rows swapped" if swapped else "one row duplicated")
        text = f"rows {rows[0]} and {rows[0] + down}" if swapped else f"row {rows[0]} holds row {rows[0] + down}"
        part = "" if len(columns) == failure.output.shape[1] else f", columns {ranges(columns.tolist())}"
        yield Placement(fault.name, text + part, pieces, fault.seen)
        return
    places = ((rows, columns), (rows + down, columns + right))
    here, there = (f"rows {ranges(r.tolist())} of columns {ranges(c.tolist())}" for r, c in places)
    text = f"{here} and {there}" if swapped else f"{here} hold {there}"
    title = "two output tiles swapped" if swapped else "one output tile stored at another tile's place"
    yield Placement(title, text, pieces)


def _shifts(failure: FailingOutput) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """How far from their right position the failing pieces are, with the rows and columns between which those of one
    shift lie; empty where a piece resembles no right one."""
    height, width = failure.output.shape
    size = min(PIECE, width)
    count = width // size

    def cut(x: Tensor) -> Tensor:
        values = torch.nan_to_num(x[:, : count * size].to(torch.float32), 0.0, 0.0, 0.0).view(height * count, size)
        values = values.div_(torch.linalg.vector_norm(values, torch.inf, dim=1, keepdim=True).clamp_(min=2.0**-149))
        return values.div_(torch.linalg.vector_norm(values, dim=1, keepdim=True).clamp_(min=2.0**-100))

    at = torch.nonzero(lines(failure.bad[:, : count * size].reshape(height * count, size))[0])[:, 0]
    if not len(at) or len(at) * height * count * size > (SEARCH_ON_DEVICE if failure.output.is_cuda else SEARCH):
        return {}
    actual, right = cut(failure.output), cut(failure.near)
    shifts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for some in (evenly(at, 8), *torch.split(at, 512)):
        best = (actual[some] @ right.T).max(dim=1)
        if bool((best.values < ALIKE).any()):
            return {}
        for piece, source in zip(some.tolist(), best.indices.tolist(), strict=True):
            shift = (source // count - piece // count, (source % count - piece % count) * size)
            shifts.setdefault(shift, []).append((piece // count, piece % count * size))
        if len(shifts) > 2:
            return {}
    results = {}
    for shift, starts in shifts.items():
        rows, columns = zip(*starts, strict=True)
        end = max(columns) + size
        if shift[1] == 0 and end + size > width:
            end = width  # the last columns of a row are less than a piece
        extents = (min(rows), max(rows) + 1), (min(columns), end)
        results[shift] = (torch.arange(*extents[0], device="cpu"), torch.arange(*extents[1], device="cpu"))
    return results


def _moved(failure: FailingOutput, rows: Tensor, columns: Tensor, shift: tuple[int, int]) -> Piece | None:
    """The rectangle as the right result of another; None where that one is not all of one expert."""
    wanted = rows + shift[0]
    for part in failure.call.parts:
        own = torch.arange(part.product.M, device="cpu") if part.rows is None else part.rows.cpu()
        at = torch.searchsorted(own, wanted).clamp(max=len(own) - 1)
        if bool((own[at] == wanted).all()):
            device = failure.bad.device
            product = subset(part.product, at.to(device), (columns + shift[1]).to(device))
            return Piece(rows.to(device), columns.to(device), product)
    return None


# --- another expert's weights -------------------------------------------------------------------------------


def _weights(failure: FailingOutput) -> Iterator[Placement]:
    """Experts that fail and are right by the weights of another, in use or not: the same operands for each."""
    call, parts = failure.call, failure.call.parts
    failing = [i for i, part in enumerate(parts) if bool(part.of(failure.bad).any())]
    if call.operands.groups is None or "b_scale" not in call.operands.roles:
        return
    weights, scales = (matrices(call, role, call.inputs[call.operands.roles[role]]) for role in ("b", "b_scale"))
    if call.operands.decoded is not None:
        weights = [call.operands.decoded(g) for g in range(len(weights))]
    if len(failing) * len(weights) > FEW:
        return
    own = groups_in_use(call)
    for of_codes, of_scales, title in OPERANDS:
        pieces, text = [], []
        for i in failing:
            part, right = parts[i], parts[i].product
            wrong = {
                j: replace(
                    right,
                    b=weights[j] if of_codes else right.b,
                    b_scale=scales[j].reshape(right.b_scale.shape) if of_scales else right.b_scale,
                )
                for j in range(len(weights))
                if j != own[i]
            }
            j = _nearest(failure, part, wrong)
            if j is None:
                break
            rows, columns = _failing(failure, part)
            pieces.append(Piece(rows_of_output(part, rows), columns, subset(wrong[j], rows, columns)))
            text.append(f"expert {own[i]} by those of expert {j}")
        else:
            met_in = get("previous group's descriptor used at a group switch").seen
            yield Placement(title, ", ".join(text), pieces, met_in)


def _nearest(failure: FailingOutput, part: Part, wrong: Mapping[int, ScaledProduct]) -> int | None:
    """Which of these products the failing elements of ``part`` are nearest to, if much nearer than to its own; on a
    sample."""
    rows, columns, y, bad = _guess_sample(failure, part)
    own = exact(subset(part.product, rows, columns)).hi
    nearest, least = None, NEAR
    for j, product in wrong.items():
        wanted = exact(subset(product, rows, columns)).hi
        inside = bad & torch.isfinite(y) & torch.isfinite(wanted) & torch.isfinite(own)
        size = float((y - own)[inside].norm())
        if size and (away := float((y - wanted)[inside].norm()) / size) < least:
            nearest, least = j, away
    return nearest


# --- one K block --------------------------------------------------------------------------------------------


def _blocks(failure: FailingOutput) -> Iterator[Placement]:
    """What was done to one K block, or which ones are lost, where that is all that is wrong."""
    failing = [part for part in failure.call.parts if bool(part.of(failure.bad).any())]
    first = failing[0].product
    length = first.block if first.B > 1 else CHUNK
    count = -(-first.K // length)
    if count < 2 or any(part.product.K != first.K for part in failing):
        return
    known = {fault.name: fault.seen for fault in faults_of(failure.call.contract.name)}
    most = max(failing, key=lambda part: int(part.of(failure.bad).sum()))
    for title, blocks in _guesses(failure, most, length, count):
        pieces = []
        for part in failing:
            rows, columns = _failing(failure, part)
            product = with_terms(subset(part.product, rows, columns), blocks, length)
            pieces.append(Piece(rows_of_output(part, rows), columns, product))
        which = [f"K block {min(blocks)}"] if title.endswith("K block") else []
        yield Placement(title, ", ".join(which + _rows_and_columns(failure)), pieces, known.get(title, ""))


@lru_cache(maxsize=8)
def effects(count: int, *, scaled: bool) -> tuple[Effect, ...]:
    """What may happen to one K block (or, lost, to some in a row) of ``count``: a name, and at most two terms instead
    of the right one.

    ``scaled``: every block has scales of its own; otherwise those of block 0 are the only ones.
    """
    results = list[Effect]()
    for b in range(count):
        for end in range(b + 1, count if b == 0 else count + 1):
            text = f"K block {b} lost" if end == b + 1 else f"K blocks {b}..{end - 1} lost"
            results.append((text, dict.fromkeys(range(b, end), ())))
    for b in range(count):
        s = b if scaled else 0
        results.append((f"K block {b} counted twice", {b: ((s, s, b), (s, s, b))}))
        if b > 0:
            results.append((f"K block {b} computed from the codes of block {b - 1}", {b: ((s, s, b - 1),)}))
            results.append((f"accumulator not cleared before K block {b}", {b: ((s, s, b), (s, s, b - 1))}))
        for word, other in (("next", b + 1), ("previous", b - 1)):
            if scaled and 0 <= other < count:
                results.append((f"A scale of the {word} K block", {b: ((other, b, b),)}))
                results.append((f"B scale of the {word} K block", {b: ((b, other, b),)}))
                results.append((f"A and B scale of the {word} K block", {b: ((other, other, b),)}))
    return tuple(results)


def with_terms(product: ScaledProduct, blocks: Mapping[int, Terms], length: int) -> ScaledProduct:
    """``product`` with other terms for some of its K blocks of ``length``; ``b_rows`` must be 1."""
    scaled, count = product.B > 1, -(-product.K // length)
    remaining = [term for k in range(count) for term in blocks.get(k, ((k, k, k) if scaled else (0, 0, k),))]
    table = torch.tensor(remaining, dtype=torch.int64, device=product.a.device)
    of_a, of_b, of_codes = table.unbind(dim=1)

    def codes(x: Tensor) -> Tensor:
        stored = codes_of(x) if x.is_floating_point() else x  # E2M1 stands in integers
        padded = torch.nn.functional.pad(stored, (0, count * length - product.K))
        return padded.view(len(x), count, length)[:, of_codes].reshape(len(x), -1).view(x.dtype)

    a, b = codes(product.a), codes(product.b)
    if not scaled:
        return replace(product, a=a, b=b, block=a.shape[1])
    return replace(product, a=a, b=b, a_scale=product.a_scale[:, of_a], b_scale=product.b_scale[:, of_b])


def _guesses(failure: FailingOutput, part: Part, length: int, count: int) -> Sequence[Effect]:
    """The effects that are close to the failing elements of ``part``, on a sample of it: of all those that are half as
    close to a few, which are nearly all refused there."""
    rows, columns, y, bad = _guess_sample(failure, part)
    product, y, bad = subset(part.product, rows, columns).to("cpu"), y.cpu(), bad.cpu()
    inside, known = bad & torch.isfinite(y), effects(count, scaled=product.B > 1)
    if not bool(inside.any()):
        return []
    result = torch.arange(len(known), device="cpu")
    every = [torch.arange(size, device="cpu") for size in y.shape]
    few = [evenly(at, most) for at, most in zip(every, FEW_GUESS, strict=True)]
    for (of_rows, of_columns), near in ((few, 2 * NEAR), (every, NEAR)):
        some, of = y[of_rows][:, of_columns], inside[of_rows][:, of_columns]
        if len(result) and bool(of.any()):
            result = _close(subset(product, of_rows, of_columns), some, of, length, result, near)
    return [known[i] for i in result.tolist()]


def _close(product: ScaledProduct, y: Tensor, inside: Tensor, length: int, known: Tensor, near: float) -> Tensor:
    """Those of the ``known`` effects (int64, numbers of :func:`effects`) that leave at most this part of what is
    missing ``inside``, and of what is there, in norm."""
    a, b, scaled = product.left.value(), product.right.value(), product.B > 1
    sums = torch.stack([x @ y.T for x, y in zip(torch.split(a, length, 1), torch.split(b, length, 1), strict=True)])
    right = exact(product).hi
    inside = inside & torch.isfinite(right)
    sums, missing = sums[:, inside], (y - right)[inside]
    size, there = float(missing.norm()), float(y[inside].norm())
    if not size:
        return known[:0]
    of_a, of_b = (decode(s).t() for s in (product.a_scale, product.b_scale))
    of_a = of_a[:, :, None].expand(-1, *inside.shape)[:, inside]
    of_b = of_b[:, None, :].expand(-1, *inside.shape)[:, inside]
    terms = sums * of_a * of_b if scaled else sums * (of_a * of_b)
    until = torch.nn.functional.pad(terms.cumsum(dim=0), (0, 0, 1, 0))  # the sums up to each block
    first, end, *instead = _tables(len(sums), scaled=scaled)
    left = until[end[known]].sub_(until[first[known]]).add_(missing)
    for table in instead:
        s, t, k = table[known].unbind(dim=1)
        at = torch.nonzero(k >= 0)[:, 0]
        left[at] -= of_a[s[at]] * of_b[t[at]] * sums[k[at]]
    return known[left.norm(dim=1) <= near * min(size, there)]


@lru_cache(maxsize=8)
def _tables(count: int, *, scaled: bool) -> tuple[Tensor, ...]:
    """Of every effect the first block and the end of those that lose their terms, and its two terms, -1 without one."""
    none = (-1, -1, -1)
    changes = [blocks for _, blocks in effects(count, scaled=scaled)]
    terms = [[*next(iter(blocks.values())), none, none][:2] for blocks in changes]
    spans = [[min(blocks), max(blocks) + 1] for blocks in changes]
    first, end = torch.tensor(spans, dtype=torch.int64, device="cpu").unbind(dim=1)
    return first, end, *torch.tensor(terms, dtype=torch.int64, device="cpu").unbind(dim=1)


def _rows_and_columns(failure: FailingOutput) -> list[str]:
    """Rows and columns of what fails, where they are not all: ``rows 3..9`` and ``columns 128..255``."""
    text = []
    for word, axis in (("rows", 1), ("columns", 0)):
        specified = torch.nonzero(failure.specified.any(dim=axis))[:, 0]
        failing = torch.nonzero(failure.bad.any(dim=axis))[:, 0]
        inside = specified[(specified >= failing[0]) & (specified <= failing[-1])]
        shown = inside if len(failing) > LISTED * len(inside) else failing
        if len(shown) < len(specified):
            text.append(f"{word} {ranges(shown.tolist())}")
    return text


# --- failing rows and columns -------------------------------------------------------------------------------


def _failing(failure: FailingOutput, part: Part) -> tuple[Tensor, Tensor]:
    """Rows of ``part`` (its own numbers) and columns in which something fails."""
    bad = part.of(failure.bad)
    return torch.nonzero(bad.any(dim=1))[:, 0], torch.nonzero(bad.any(dim=0))[:, 0]


def _guess_sample(failure: FailingOutput, part: Part) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Some failing rows and columns of ``part``, the values of the output there (float64), and which of them fail."""
    rows, columns = (evenly(at, most) for at, most in zip(_failing(failure, part), GUESS, strict=True))
    return rows, columns, decode(part.of(failure.output)[rows][:, columns]), part.of(failure.bad)[rows][:, columns]
