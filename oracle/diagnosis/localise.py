"""Faults whose place no catalogue can say, found on the output: where, and what stands there instead.

Each is a guess and then a judgement. The guess comes from the failing elements ``y``:

    moved      64 columns of a row correlate with the right result of another row, or of other columns
    weights    y lies near the rows of its expert times the codes, the scales, or both, of another expert
    a K block  y - right is what the right terms of one block (of some, where they are lost) would change

The judgement is the one that refused the output: every failing element must lie in the interval of the *mutated*
product, by the declared numerics or one of the classes that an undeclared kernel may use. So a guess needs no tolerance
of its own, and kernels of any arithmetic are explained. A few rows and columns are judged first, and the whole where
those hold. The rest of the output is right as it is; what fails must be more than coincidence and no constant.

Source: :mod:`oracle.verdict.products` for the interval. Not covered: two such faults at once, moves by less than 64 columns,
calls in which many experts fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.bounds import admissible
from oracle.bounds.engines import exact
from oracle.diagnosis.effective_scales import CHUNK
from oracle.diagnosis.explanations import LISTED, Explanation
from oracle.diagnosis.hypotheses import View, telling
from oracle.numbers.formats import codes_of, decode
from oracle.routines.catalogue import Call, faults_of, get
from oracle.tensorcore.identify import subset
from oracle.truth.gemm import ScaledProduct, rounded
from oracle.verdict.compare import compare
from oracle.verdict.pattern import ranges
from oracle.verdict.products import COINCIDENCES, SAMPLE_COLUMNS, SAMPLE_ROWS, Part, interval_of

# What a guess is made by: none of it can make a name, only miss one, for the judgement decides.
PIECE = 64  # columns of a row that are looked for elsewhere; cosines of as many independent values deviate by 1/8
ALIKE = 0.99  # cosine of a piece with what it is a copy of, which roundings of 2^-8 leave above 0.9999
SEARCH = 1 << 33  # products of one search for pieces: those of a float32 call of 2048 x 2048 x 2048
GUESS = (64, 128)  # rows and columns that a guess is made from
NEAR = 0.25  # residual over size: of the rest at most a sixteenth of what is to be explained, in squares
FEW = 256  # pairs of a failing expert and another that are tried
OPERANDS = (  # of another expert: the codes, the scales, and what that is called
    (True, False, "B codes of another group"),
    (False, True, "B scale of another group"),
    (True, True, "weights of another group"),
)
Terms = Sequence[tuple[int, int, int]]
"""What is added for one K block: the blocks whose scale of a, whose scale of b and whose codes enter."""


@dataclass(frozen=True)
class Piece:
    """Rows and columns of the output, and the product ``[rows, columns]`` of which they would be the right result."""

    rows: Tensor
    columns: Tensor
    product: ScaledProduct


def found(view: View, numerics: Sequence[str], known: Sequence[Explanation]) -> list[Explanation]:
    """Explanations of everything that fails, each with its place.

    ``numerics`` are the names of the intervals to judge by, of which one must hold. Where a fault of the catalogue is
    ``known`` that is at work in all that fails, only moves are looked for.
    """
    if view.failing < COINCIDENCES or not telling(view.output[view.bad]):
        return []
    made = _moves(view, numerics)
    if not made and not any(e.local for e in known):
        made = _weights(view, numerics) or _blocks(view, numerics)
    return made


def group_names(call: Call) -> list[int]:
    """The experts of the parts of a grouped call."""
    if "m_indices" in call.inputs:
        return [int(g) for g in torch.unique(call.inputs["m_indices"]).tolist() if g >= 0]
    if "offsets" in call.inputs:
        ends = call.inputs["offsets"].tolist()
        return [g for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > start]
    return [g for g, count in enumerate(call.inputs["masked_m"].tolist()) if count]


# --- the judgement ------------------------------------------------------------------------------------------


def _judged(view: View, numerics: Sequence[str], pieces: Sequence[Piece]) -> str | None:
    """The numerics by which all that fails is right in these pieces; None when there is none or some fails beside."""
    covered = torch.zeros_like(view.bad)
    for piece in pieces:
        covered[piece.rows[:, None], piece.columns[None, :]] = True
    if bool((view.bad & ~covered).any()):
        return None
    tried = (name for name in numerics if all(_holds(view, piece, name, some=True) for piece in pieces))
    return next((name for name in tried if all(_holds(view, piece, name, some=False) for piece in pieces)), None)


def _holds(view: View, piece: Piece, name: str, *, some: bool) -> bool:
    """Whether the failing elements of the piece, or of ``some`` of its rows and columns, lie in its interval."""
    bad = view.bad[piece.rows[:, None], piece.columns[None, :]]
    rows, columns = torch.nonzero(bad.any(dim=1))[:, 0], torch.nonzero(bad.any(dim=0))[:, 0]
    if not len(rows):
        return True
    if some:
        rows, columns = _evenly(rows, SAMPLE_ROWS), _evenly(columns, SAMPLE_COLUMNS)
    product = subset(piece.product, rows, columns)
    value = exact(product)
    expected = rounded(product, value, view.output.dtype)
    interval = admissible(value, expected, interval_of(product, name))
    outside = compare(view.output[piece.rows[rows][:, None], piece.columns[columns][None, :]], interval).bad
    if interval.open is not None:
        outside = outside | interval.open
    return not bool((outside & bad[rows][:, columns]).any())


def _explained(view: View, name: str, where: str, numerics: str, met_in: str) -> Explanation:
    return Explanation(name, numerics, view.failing, view.failing, view.failing, 0, met_in, where=where)


# --- moved --------------------------------------------------------------------------------------------------


def _moves(view: View, numerics: Sequence[str]) -> list[Explanation]:
    """One rectangle that holds what belongs to another, or two that hold each other's."""
    shifts = _shifts(view)
    if not 0 < len(shifts) < 3:
        return []
    (down, right), (rows, columns) = next(iter(shifts.items()))
    swapped = len(shifts) == 2
    if swapped and (-down, -right) not in shifts:
        return []
    pieces = [_moved(view, *place, shift) for shift, place in shifts.items()]
    if any(piece is None for piece in pieces):
        return []
    name = _judged(view, numerics, [piece for piece in pieces if piece is not None])
    if name is None:
        return []
    if len(rows) == 1 and right == 0:
        fault = get("two rows swapped" if swapped else "one row duplicated")
        said = f"rows {rows[0]} and {rows[0] + down}" if swapped else f"row {rows[0]} holds row {rows[0] + down}"
        part = "" if len(columns) == view.output.shape[1] else f", columns {ranges(columns.tolist())}"
        return [_explained(view, fault.name, said + part, name, fault.met_in)]
    here, there = _rectangle(rows, columns), _rectangle(rows + down, columns + right)
    said = f"{here} and {there}" if swapped else f"{here} hold {there}"
    title = "two output tiles swapped" if swapped else "one output tile stored at another tile's place"
    return [_explained(view, title, said, name, "")]


def _shifts(view: View) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """How far from their right place the failing pieces stand, with the rows and columns between which those of one
    shift lie; nothing where a piece is nobody's."""
    height, width = view.output.shape
    size = min(PIECE, width)
    count = width // size

    def cut(x: Tensor) -> Tensor:
        values = torch.nan_to_num(decode(x[:, : count * size]), 0.0, 0.0, 0.0)
        values = values / values.abs().amax(dim=1, keepdim=True).clamp(min=2.0**-1000)
        values = values.reshape(height * count, size).to(torch.float32)
        unit: Tensor = values / values.norm(dim=1, keepdim=True).clamp(min=2.0**-100)
        return unit

    failing = view.bad[:, : count * size].reshape(height * count, size).any(dim=1)
    at = torch.nonzero(failing)[:, 0]
    if not len(at) or len(at) * height * count * size > SEARCH:
        return {}
    mine, right = cut(view.output), cut(view.right)
    shifts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for some in (at[:: -(-len(at) // 8)], *torch.split(at, 512)):
        best = (mine[some] @ right.T).max(dim=1)
        if bool((best.values < ALIKE).any()):
            return {}
        for piece, source in zip(some.tolist(), best.indices.tolist(), strict=True):
            shift = (source // count - piece // count, (source % count - piece % count) * size)
            shifts.setdefault(shift, []).append((piece // count, piece % count * size))
        if len(shifts) > 2:
            return {}
    return {shift: _between(places, shift, size, width) for shift, places in shifts.items()}


def _between(places: Sequence[tuple[int, int]], shift: tuple[int, int], size: int, width: int) -> tuple[Tensor, Tensor]:
    rows, columns = [r for r, _ in places], [c for _, c in places]
    end = max(columns) + size
    if shift[1] == 0 and end + size > width:
        end = width  # what is left of a row is no piece
    spans = (min(rows), max(rows) + 1), (min(columns), end)
    down, across = (torch.arange(first, past, device="cpu") for first, past in spans)
    return down, across


def _moved(view: View, rows: Tensor, columns: Tensor, shift: tuple[int, int]) -> Piece | None:
    """The rectangle as the right result of another; None where that one is not all of one expert."""
    wanted = rows + shift[0]
    for part in view.call.parts:
        own = torch.arange(part.product.M, device="cpu") if part.rows is None else part.rows.cpu()
        at = torch.searchsorted(own, wanted).clamp(max=len(own) - 1)
        if bool((own[at] == wanted).all()):
            device = view.bad.device
            product = subset(part.product, at.to(device), (columns + shift[1]).to(device))
            return Piece(rows.to(device), columns.to(device), product)
    return None


def _rectangle(rows: Tensor, columns: Tensor) -> str:
    return f"rows {ranges(rows.tolist())} of columns {ranges(columns.tolist())}"


# --- another expert's weights -------------------------------------------------------------------------------


def _weights(view: View, numerics: Sequence[str]) -> list[Explanation]:
    """Experts that fail and are right by the weights of another, in use or not: the same operands for each."""
    call, parts = view.call, view.call.parts
    failing = [i for i, part in enumerate(parts) if bool(part.of(view.bad).any())]
    if call.operands.groups is None:
        return []
    weights, scales = (call.inputs[call.operands.roles[role]] for role in ("b", "b_scale"))
    if len(failing) * len(weights) > FEW:
        return []
    own, made = group_names(call), []
    for of_codes, of_scales, title in OPERANDS:
        pieces, said = [], []
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
            j = _nearest(view, part, wrong)
            if j is None:
                break
            rows, columns = _failing(view, part)
            pieces.append(Piece(_flat(part, rows), columns, subset(wrong[j], rows, columns)))
            said.append(f"expert {own[i]} by those of expert {j}")
        name = _judged(view, numerics, pieces) if len(said) == len(failing) else None
        if name is not None:
            met_in = get("previous group's descriptor used at a group switch").met_in
            made.append(_explained(view, title, ", ".join(said), name, met_in))
    return made


def _nearest(view: View, part: Part, wrong: Mapping[int, ScaledProduct]) -> int | None:
    """Which of these products what fails in ``part`` is nearest to, if by far nearer than to its own; on a sample."""
    rows, columns = (_evenly(at, most) for at, most in zip(_failing(view, part), GUESS, strict=True))
    y, bad = (decode(part.of(view.output))[rows][:, columns], part.of(view.bad)[rows][:, columns])
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


def _blocks(view: View, numerics: Sequence[str]) -> list[Explanation]:
    """What was done to one K block, or which ones are lost, where that is all that is wrong."""
    call, made = view.call, []
    failing = [part for part in call.parts if bool(part.of(view.bad).any())]
    first = failing[0].product
    length = first.block if first.B > 1 else CHUNK
    count = -(-first.K // length)
    if count < 2:
        return []
    most = max(failing, key=lambda part: int(part.of(view.bad).sum()))
    for title, blocks in _guesses(view, most, length, count):
        pieces = []
        for part in failing:
            rows, columns = _failing(view, part)
            product = mutated(subset(part.product, rows, columns), blocks, length)
            pieces.append(Piece(_flat(part, rows), columns, product))
        name = _judged(view, numerics, pieces)
        if name is not None:
            which = [f"K block {min(blocks)}"] if title.endswith("K block") else []
            met_in = {fault.name: fault.met_in for fault in faults_of(view.call.contract.name)}.get(title, "")
            made.append(_explained(view, title, ", ".join(which + _place(view)), name, met_in))
    return made


def effects(count: int, *, scaled: bool) -> Iterator[tuple[str, Mapping[int, Terms]]]:
    """What may happen to one K block (or, lost, to some) of ``count``: a name, and the terms instead of the right one.

    ``scaled``: every block has scales of its own; otherwise those of block 0 are the only ones.
    """
    for b in range(count):
        for end in range(b + 1, count if b == 0 else count + 1):
            lost = list(range(b, end))
            yield f"K block{'s' if len(lost) > 1 else ''} {ranges(lost)} lost", dict.fromkeys(lost, ())
    for b in range(count):
        s = b if scaled else 0
        yield f"K block {b} counted twice", {b: ((s, s, b), (s, s, b))}
        if b > 0:
            yield f"K block {b} computed from the codes of block {b - 1}", {b: ((s, s, b - 1),)}
            yield f"accumulator not cleared before K block {b}", {b: ((s, s, b), (s, s, b - 1))}
        for word, other in (("next", b + 1), ("previous", b - 1)):
            if scaled and 0 <= other < count:
                yield f"A scale of the {word} K block", {b: ((other, b, b),)}
                yield f"B scale of the {word} K block", {b: ((b, other, b),)}
                yield f"A and B scale of the {word} K block", {b: ((other, other, b),)}


def mutated(product: ScaledProduct, blocks: Mapping[int, Terms], length: int) -> ScaledProduct:
    """``product`` with other terms for some of its K blocks of ``length``; ``b_rows`` must be 1."""
    scaled, count = product.B > 1, -(-product.K // length)
    kept = [term for k in range(count) for term in blocks.get(k, ((k, k, k) if scaled else (0, 0, k),))]
    table = torch.tensor(kept, dtype=torch.int64, device=product.a.device)
    of_a, of_b, of_codes = table.unbind(dim=1)

    def codes(x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(codes_of(x), (0, count * length - product.K))
        return padded.view(len(x), count, length)[:, of_codes].reshape(len(x), -1).view(x.dtype)

    a, b = codes(product.a), codes(product.b)
    if not scaled:
        return replace(product, a=a, b=b, block=a.shape[1])
    return replace(product, a=a, b=b, a_scale=product.a_scale[:, of_a], b_scale=product.b_scale[:, of_b])


def _guesses(view: View, part: Part, length: int, count: int) -> list[tuple[str, Mapping[int, Terms]]]:
    """The effects that come near to what fails in ``part``, on a sample of it."""
    rows, columns = (_evenly(at, most) for at, most in zip(_failing(view, part), GUESS, strict=True))
    product = subset(part.product, rows, columns)
    a, b, scaled = decode(product.a), decode(product.b), product.B > 1
    sums = torch.stack([x @ y.T for x, y in zip(torch.split(a, length, 1), torch.split(b, length, 1), strict=True)])
    y = decode(part.of(view.output)[rows][:, columns])
    right = exact(product).hi
    inside = part.of(view.bad)[rows][:, columns] & torch.isfinite(y) & torch.isfinite(right)
    sums, missing = sums[:, inside], (y - right)[inside]
    of_a, of_b = (decode(s).t() for s in (product.a_scale, product.b_scale))
    of_a = of_a[:, :, None].expand(-1, *inside.shape)[:, inside]
    of_b = of_b[:, None, :].expand(-1, *inside.shape)[:, inside]
    terms = sums * of_a * of_b if scaled else sums * (of_a * of_b)
    size = float(missing.norm())
    if not size:
        return []
    found = []
    for title, blocks in effects(count, scaled=scaled):
        change = -terms[min(blocks) : max(blocks) + 1].sum(dim=0)
        for s, t, k in (term for terms_of in blocks.values() for term in terms_of):
            change = change + of_a[s] * of_b[t] * sums[k]
        if float((missing - change).norm()) <= NEAR * size:
            found.append((title, blocks))
    return found


def _place(view: View) -> list[str]:
    """Rows and columns of what fails, where they are not all: ``rows 3..9`` and ``columns 128..255``."""
    said = []
    for word, axis in (("rows", 1), ("columns", 0)):
        specified = torch.nonzero(view.specified.any(dim=axis))[:, 0]
        failing = torch.nonzero(view.bad.any(dim=axis))[:, 0]
        inside = specified[(specified >= failing[0]) & (specified <= failing[-1])]
        shown = inside if len(failing) > LISTED * len(inside) else failing
        if len(shown) < len(specified):
            said.append(f"{word} {ranges(shown.tolist())}")
    return said


# --- places -------------------------------------------------------------------------------------------------


def _failing(view: View, part: Part) -> tuple[Tensor, Tensor]:
    """Rows of ``part`` (its own numbers) and columns in which something fails."""
    bad = part.of(view.bad)
    return torch.nonzero(bad.any(dim=1))[:, 0], torch.nonzero(bad.any(dim=0))[:, 0]


def _flat(part: Part, rows: Tensor) -> Tensor:
    """Rows of a part as rows of the output."""
    return rows if part.rows is None else part.rows[rows]


def _evenly(at: Tensor, most: int) -> Tensor:
    return at[:: max(1, -(-len(at) // most))]
