"""Which schedule made an output: every registered one is tried, and ranked by the fraction of equal bits.

A random product separates instructions and promotions at once; epilogue orders differ in a few elements in a
thousand (float32) or fewer (bfloat16), so several schedules may fit equally: use
:mod:`oracle.tensorcore.probes` to make inputs that separate them.

:func:`find_split` finds how a kernel cut K into partial sums, given the schedule of its parts.

NaN: any NaN of an output equals any NaN of a prediction.
Source: derived from :mod:`oracle.tensorcore.predict`, whose bits are compared.
Not covered: kernels that no registered schedule describes (the best fraction is then far below 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.errors import NumericsError, ShapeError
from oracle.numbers.formats import same_bits
from oracle.tensorcore.instructions import Status
from oracle.tensorcore.predict import Engine, predict_product
from oracle.tensorcore.schedules import Schedule, Split, get, schedules
from oracle.truth.gemm import ScaledProduct

SAMPLE = 1 << 15
"""Outputs compared when the product has more: evenly spaced rows and columns."""
SPLIT_SAMPLE = 1 << 9
"""Outputs that reject a split; one that reproduces them is compared with all outputs."""
TRIED = 4  # schedules whose splits are tried where none has every bit
MOST_PARTS = {128: 16, 64: 8, 256: 8, 32: 4}
"""Parts that are tried at most, for each tile in products: cuBLASLt took up to 6 of 128, published kernels 2 to 16."""


@dataclass(frozen=True)
class Match:
    """How well one schedule explains an output.

    Attributes
    ----------
    equal : float, fraction of the compared elements with equal bits (any NaN equals any NaN).
    compared : int, number of elements compared.
    """

    schedule: str
    equal: float
    compared: int


def identify_product(
    product: ScaledProduct,
    output: Tensor,
    arch: str | None = None,
    *,
    sample: int | None = SAMPLE,
    engine: Engine = "auto",
) -> list[Match]:
    """Rank the schedules that can compute ``product`` by how many bits of ``output`` they reproduce.

    Parameters
    ----------
    output : Tensor, ``[M, N]``, float32, bfloat16 or float16.
    arch : str or None, try one architecture only.
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
    rows, columns = _sample(shape, sample, output.device)
    part, wanted = subset(product, rows, columns), output[rows][:, columns]
    matches = []
    for schedule in candidates:
        predicted = predict_product(part, schedule, out_dtype=output.dtype, engine=engine)
        matches.append(Match(schedule.name, float(same_bits(predicted, wanted).double().mean()), wanted.numel()))
    exact = [match for match in matches if match.equal == 1.0]
    if not exact:
        best = sorted(matches, key=lambda m: -m.equal)[:TRIED]
        splits = (find_split(product, output, get(match.schedule), engine=engine) for match in best if match.equal > 0)
        if (split := next((s for s in splits if s is not None), None)) is not None:
            return [Match(split.name, 1.0, output.numel()), *best]
    order = {s.name: (s.status is not Status.SEEN_ON_HARDWARE, i) for i, s in enumerate(candidates)}
    return sorted(matches, key=lambda m: (-m.equal, order[m.schedule]))


def find_split(
    product: ScaledProduct, output: Tensor, schedule: Schedule, *, most: int = 16, engine: Engine = "auto"
) -> Schedule | None:
    """The split of ``schedule`` that reproduces every bit of ``output``: fewest parts first; None when there is none.

    Parameters
    ----------
    output : Tensor, ``[M, N]``, float32, bfloat16 or float16.
    schedule : an unsplit schedule, which every part follows.
    most : int, most parts tried, at most one a tile.

    Tried are contiguous and interleaved tiles of 128, 64, 256 and 32 products (``MOST_PARTS``).
    """
    rows, columns = _sample((product.M, product.N), SPLIT_SAMPLE, output.device)
    part, wanted = subset(product, rows, columns), output[rows][:, columns]
    for split in _splits(product.K, most):
        candidate = schedule.into(split)
        if candidate.why_not(product, out_dtype=output.dtype) is not None:
            continue
        if not bool(same_bits(predict_product(part, candidate, out_dtype=output.dtype, engine=engine), wanted).all()):
            continue
        whole = predict_product(product, candidate, out_dtype=output.dtype, engine=engine)
        if bool(same_bits(whole, output).all()):
            return candidate
    return None


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
