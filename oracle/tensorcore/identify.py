"""Which schedule made an output: few elements reject most schedules, a larger sample compares what they leave.

Stages, of which each takes what the one before left:

1. *Elements.* :data:`FEW` of a sample of the output, mostly those whose exact values lie nearest to a midpoint of the
   output's dtype, where a small difference of two schedules changes a bit; all schedules are computed there together
   (:mod:`oracle.tensorcore.elements`). Schedules with every bit stay, or the :data:`TRIED` best ones where none has.
2. *Sample.* The rest is compared with :data:`SAMPLE` outputs.
3. *Splits.* Where no schedule has every bit, all ways to cut K are tried at once on such elements, the schedules that
   are named first before others: even cuts, then any two parts of whole tiles, then any three (:data:`UNEVEN`). What is
   left is compared with the whole output, and elements that refuse one cut are asked of the next ones.

Schedules may agree on an output; :func:`told_apart` says which inputs show the difference, and
:mod:`oracle.tensorcore.probes` makes such.

NaN: any NaN of an output equals any NaN of a prediction.
Source: derived from :mod:`oracle.tensorcore.predict`, whose bits are compared.
Not covered: kernels that no registered schedule describes (the best fraction is then far below 1).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.errors import NumericsError, ShapeError
from oracle.numbers.formats import decode, of_dtype, same_bits, share
from oracle.tensorcore.elements import MOST as FEW
from oracle.tensorcore.elements import Elements, alike
from oracle.tensorcore.instructions import Status
from oracle.tensorcore.predict import Engine, predict_product
from oracle.tensorcore.schedules import Promotion, Scales, Schedule, Split, get, schedules
from oracle.truth.gemm import ScaledProduct

SAMPLE = 1 << 15
"""Outputs compared when the product has more: evenly spaced rows and columns."""
POOL = (32, 512)  # rows and columns among which the elements are chosen
SPREAD = 32  # elements that are chosen evenly, and not by their values
TRIED = 4  # schedules that stay where none has every bit
BAND = 1 << 28  # products that are predicted at a time
MOST_PARTS = {128: 16, 64: 8, 256: 8, 32: 4}
"""Parts that are tried at most, for each tile in products: cuBLASLt took up to 6 of 128, published kernels 2 to 16."""
UNEVEN = 512
"""Uneven ways to cut K that are tried at most with three parts: all of up to 33 tiles."""


@dataclass(frozen=True)
class Match:
    """How well one schedule explains an output.

    Attributes
    ----------
    equal : float, fraction of the compared elements with equal bits (any NaN equals any NaN).
    compared : int, number of elements compared: few, and chosen for their differences, where these reject it.
    """

    schedule: str
    equal: float
    compared: int

    @property
    def rank(self) -> tuple[bool, int, float]:
        """Its order among matches: those with every bit, then those compared most."""
        return self.equal != 1.0, -self.compared, -self.equal


def identify_product(
    product: ScaledProduct,
    output: Tensor,
    arch: str | None = None,
    *,
    first: Iterable[str] = (),
    sample: int | None = SAMPLE,
    engine: Engine = "auto",
) -> list[Match]:
    """Rank the schedules that can compute ``product`` by how many bits of ``output`` they reproduce.

    Parameters
    ----------
    output : Tensor, ``[M, N]``, float32, bfloat16 or float16.
    arch : str or None, try one architecture only.
    first : schedules whose splits are tried before those of others.
    sample : int or None, most elements compared; None compares all.

    Returns list of Match: best first; equal fractions keep hardware-checked schedules first, then registry order.
    Raises NumericsError: unknown arch, or no schedule can compute this product (each reason is listed); ShapeError:
    ``output`` is not ``[M, N]``.
    """
    shape = (int(product.a.shape[0]), int(product.b.shape[0]))
    if tuple(output.shape) != shape:
        raise ShapeError(f"output {list(output.shape)} must be {list(shape)}")
    candidates, reasons = [], []
    for schedule in schedules(arch):
        reason = schedule.why_not(product, out_dtype=output.dtype)
        if reason is None:
            candidates.append(schedule)
        else:
            reasons.append(reason)
    if not candidates:
        raise NumericsError("no schedule can compute this product: " + "; ".join(reasons))
    search = Search(product, output, engine=engine)
    matches = {s.name: Match(s.name, search.alike(s), len(search)) for s in candidates}
    order = {s.name: (s.status is not Status.SEEN_ON_HARDWARE, i) for i, s in enumerate(candidates)}
    best = sorted(candidates, key=lambda s: (-matches[s.name].equal, order[s.name]))
    left = [s for s in best if matches[s.name].equal == 1.0]
    matches |= _sampled(product, output, left, sample, engine)
    if not any(matches[s.name].equal == 1.0 for s in left):
        if splits := _splits_of(search, candidates, best, first):
            result = sorted(matches.values(), key=lambda m: (-m.equal, order[m.schedule]))
            return [*(Match(split.name, 1.0, output.numel()) for split in splits), *result]
        if not left:
            matches |= _sampled(product, output, _tried(best), sample, engine)
    return sorted(matches.values(), key=lambda m: (m.rank, order[m.schedule]))


def _sampled(
    product: ScaledProduct, output: Tensor, left: Sequence[Schedule], sample: int | None, engine: Engine
) -> dict[str, Match]:
    """The matches of some schedules on a sample of the output."""
    rows, columns = _sample((product.M, product.N), sample, output.device)
    part, wanted = subset(product, rows, columns), output[rows][:, columns]
    result, equal = dict[str, Match](), dict[Schedule, float]()
    for schedule in left:
        key = _arithmetic(schedule)
        if key not in equal:
            bits = predict_product(part, schedule, out_dtype=output.dtype, engine=engine)
            equal[key] = share(same_bits(bits, wanted))
        result[schedule.name] = Match(schedule.name, equal[key], wanted.numel())
    return result


def _tried(best: Sequence[Schedule]) -> list[Schedule]:
    """The schedules of the first few arithmetics."""
    remaining = list(dict.fromkeys(map(_arithmetic, best)))[:TRIED]
    return [s for s in best if _arithmetic(s) in remaining]


def _arithmetic(schedule: Schedule) -> Schedule:
    """The schedule without its name: equal for two that give the same bits."""
    takes = schedule.instruction.operands if schedule.dequantises or schedule.widens else ()
    instruction = replace(alike(schedule.instruction), operands=takes)
    return replace(schedule, name="", seen_in="", status=Status.LITERATURE, instruction=instruction)


def _splits_of(
    search: Search, candidates: Sequence[Schedule], best: Sequence[Schedule], first: Iterable[str]
) -> list[Schedule]:
    """The splits that reproduce every bit: of the named schedules first, then of the best ones; the first one found,
    and those of the same chains that cut K as it does and treat the scales otherwise."""
    by_name = {s.name: s for s in candidates}
    names = dict.fromkeys([*(name for name in first if name in by_name), *(s.name for s in best[:TRIED])])
    bases = list({_arithmetic(by_name[name]): by_name[name] for name in reversed(names)}.values())[::-1]
    for i, base in enumerate(bases):
        if (result := search.split(base)) is None:
            continue
        assert result.split is not None
        same = [s for s in bases[i + 1 :] if (s.instruction, s.interval) == (base.instruction, base.interval)]
        same = [s for s in same if not s.into(result.split).why_not(search.product, out_dtype=search.output.dtype)]
        return [result, *(s.into(result.split) for s in same if search.reproduces(s.into(result.split)))]
    return []


def find_split(
    product: ScaledProduct, output: Tensor, schedule: Schedule, *, most: int = 16, engine: Engine = "auto"
) -> Schedule | None:
    """The split of ``schedule`` that reproduces every bit of ``output``: fewest parts first; None when there is none.

    Parameters
    ----------
    output : Tensor, ``[M, N]``, float32, bfloat16 or float16.
    schedule : an unsplit schedule, which every part follows.
    most : int, most parts tried, at most one a tile.

    Tried are contiguous and interleaved tiles of 128, 64, 256 and 32 products (``MOST_PARTS``), then cuts anywhere
    between tiles of 128 into two parts, and into three where these are at most ``UNEVEN`` ways.
    """
    return Search(product, output, engine=engine).split(schedule, most=most)


class Search:
    """An output ``[M, N]`` of a product (float32, bfloat16 or float16), and elements that refuse schedules of it."""

    def __init__(self, product: ScaledProduct, output: Tensor, *, engine: Engine = "auto") -> None:
        self.product, self.output, self.engine = product, output, engine
        rows, columns = _chosen(product, output.dtype)
        self._asked = [(Elements.where(product, rows, columns), output[rows, columns].cpu())]

    def __len__(self) -> int:
        return len(self._asked[0][1])

    def alike(self, schedule: Schedule) -> float:
        """The share of equal bits of an unsplit schedule that fits the product, on the elements chosen first."""
        elements, wanted = self._asked[0]
        return share(same_bits(elements.bits(schedule, wanted.dtype), wanted))

    def split(self, schedule: Schedule, *, most: int = 16) -> Schedule | None:
        """As :func:`find_split`."""
        if schedule.scales is Scales.OPERANDS or schedule.promotion is Promotion.RESCALE:
            return None
        for ways in (_splits(self.product.K, most), _uneven(self.product.K, 2), _uneven(self.product.K, 3)):
            if (result := self._among(schedule, ways)) is not None:
                return result
        return None

    def _among(self, schedule: Schedule, ways: Iterable[Split]) -> Schedule | None:
        """The first of these ways to cut ``schedule`` that gives every bit."""
        dtype = self.output.dtype
        left = [s for s in ways if not schedule.into(s).why_not(self.product, out_dtype=dtype)]
        for elements, wanted in self._asked:
            left = _agreeing(schedule, left, elements, wanted)
        while left:
            candidate, asked = schedule.into(left[0]), len(self._asked)
            if self._reproduced(candidate):
                return candidate
            left = left[1:]
            for elements, wanted in self._asked[asked:]:
                left = _agreeing(schedule, left, elements, wanted)
        return None

    def reproduces(self, schedule: Schedule) -> bool:
        """Whether ``schedule`` gives every bit of the output; it must fit the product."""
        if any(not bool(same_bits(x.bits(schedule, wanted.dtype), wanted).all()) for x, wanted in self._asked):
            return False
        return self._reproduced(schedule)

    def _reproduced(self, schedule: Schedule) -> bool:
        """Whether ``schedule`` gives every bit; elements that it does not give are asked of the next one."""
        height = max(1, min(256, BAND // max(1, self.product.N * self.product.K)))
        for start in range(0, self.product.M, height):
            band = self.product.rows(start, min(self.product.M, start + height))
            own = self.output[start : start + height]
            bits = predict_product(band, schedule, out_dtype=own.dtype, engine=self.engine)
            wrong = torch.nonzero(~same_bits(bits, own))
            if len(wrong):
                rows, columns = wrong[:: -(-len(wrong) // FEW)].unbind(dim=1)
                self._asked.append((Elements.where(band, rows, columns), own[rows, columns].cpu()))
                return False
        return True


def _agreeing(schedule: Schedule, splits: Sequence[Split], elements: Elements, wanted: Tensor) -> list[Split]:
    """The ``splits`` that give every one of some elements ``wanted [P]``, in the output's dtype."""
    if not splits:
        return []
    agrees = same_bits(elements.of_splits(schedule, splits, wanted.dtype), wanted.expand(len(splits), -1)).all(dim=1)
    return [split for split, agreed in zip(splits, agrees.tolist(), strict=True) if agreed]


def _splits(k: int, most: int) -> Iterator[Split]:
    """Splits of ``k`` products into 2 parts and more, each way of cutting once."""
    seen = set()
    for parts in range(2, most + 1):
        for interleaved in (False, True):
            for tile in (tile for tile, limit in MOST_PARTS.items() if parts <= limit):
                split = Split(parts, tile, interleaved)
                pieces = [tuple(part) for part in split.pieces(k) if part]
                if len(pieces) > 1 and parts <= -(-k // tile) and tuple(pieces) not in seen:
                    seen.add(tuple(pieces))
                    yield split


def _uneven(k: int, parts: int) -> Iterator[Split]:
    """Ways to cut ``k`` products between tiles of 128 into two or three parts that are not as even as these allow."""
    borders = range(128, k, 128)
    even = {tuple(part[0][0] for part in Split(parts).pieces(k)[1:] if part)}
    if parts == 2 or math.comb(len(borders), parts - 1) <= UNEVEN:
        yield from (Split(parts, cuts=cuts) for cuts in itertools.combinations(borders, parts - 1) if cuts not in even)


def told_apart(names: Sequence[str]) -> str:
    """Which inputs show the difference between schedules that give the same bits, by what their records differ in."""
    records = [get(name) for name in names]
    if len({_arithmetic(s) for s in records}) == 1:
        return "they are one arithmetic under several names"
    results = []
    if len({(s.promotion, s.epilogue, s.flushes) for s in records}) > 1:
        results.append("scales that are no powers of two")
    if len({(s.interval, s.split, s.promotion is Promotion.NONE) for s in records}) > 1:
        results.append("a longer K")
    if len({alike(s.instruction) for s in records}) > 1:
        results.append("products of far exponents (`fp8-oracle fingerprint` makes such inputs)")
    if len({s.bias_after_cast for s in records}) > 1:
        results.append("a bias that is not 0")
    return " and ".join(filter(None, (", ".join(results), "a float32 output"))) + " would tell them apart"


def _chosen(product: ScaledProduct, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and columns, int64 ``[P]`` each, of the elements that are asked first: of a sample most of those nearest to
    a midpoint of ``dtype``, and some evenly."""
    extents = [min(extent, most) for extent, most in zip((product.M, product.N), POOL, strict=True)]
    rows, columns = (
        torch.arange(count, device=product.a.device) * extent // count
        for count, extent in zip(extents, (product.M, product.N), strict=True)
    )
    total = extents[0] * extents[1]
    spread = torch.arange(0, total, -(-total // (FEW if dtype is torch.float32 else SPREAD)), device="cpu")
    at = spread
    if dtype is not torch.float32 and total > FEW:
        near = midpoint_distance(subset(product, rows, columns).to("cpu"), dtype)[0].flatten()
        near[spread] = torch.inf
        at = torch.cat([spread, near.argsort()[: FEW - len(spread)]])
    elif total <= FEW:
        at = torch.arange(total, device="cpu")
    at = at.to(rows.device)
    return rows[at // extents[1]], columns[at % extents[1]]


def midpoint_distance(product: ScaledProduct, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """:func:`off_midpoint` of the value of each element, a float64 sum, in ``dtype``: float64 ``[M, N]`` both."""
    value = sum(product.sigma(b) * (product.left.value(k) @ product.right.value(k).T) for b, k in product.blocks())
    assert isinstance(value, Tensor)
    value = value * product.factor
    if product.bias is not None:
        value = value + decode(product.bias)
    if product.c is not None:
        value = value + decode(product.c)
    return off_midpoint(value, dtype)


def off_midpoint(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """How far each ``value``, float64 ``[M, N]``, lies from the nearest midpoint of ``dtype``, in units in the last
    place, infinite where it is not finite; and that unit. Returns float64 ``[M, N]`` both."""
    fmt = of_dtype(dtype)
    unit = torch.exp2((torch.frexp(value)[1] - 1).clamp(min=fmt.emin).to(torch.float64) - fmt.fraction_bits)
    return ((value / unit).frac().abs() - 0.5).abs().nan_to_num(nan=torch.inf), unit


def subset(product: ScaledProduct, rows: Tensor, columns: Tensor) -> ScaledProduct:
    """The product restricted to some ``rows`` of ``a`` and ``columns``, rows of ``b``: int64 indices ``[rows]`` and
    ``[columns]``."""
    return product.take(rows).take_columns(columns)


def _sample(shape: tuple[int, int], sample: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    m, n = shape
    if sample is None or m * n <= sample:
        return torch.arange(m, device=device), torch.arange(n, device=device)
    columns = min(n, max(1, int(sample**0.5)))
    rows = min(m, max(1, sample // columns))
    return torch.arange(rows, device=device) * m // rows, torch.arange(columns, device=device) * n // columns
