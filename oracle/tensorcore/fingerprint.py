"""How a black-box kernel computes: its group size, aligner, promotion, epilogue and rounding, found by probing.

:func:`fingerprint` runs the probes of :mod:`oracle.tensorcore.probes` through a callable and reads the
answers. The masks give, for every k, the size of the smallest partial sum that it shares with k = 0; the
steps between these sizes are the *levels* of the summation: ``(32, 128)`` is groups of 32 chained up to a
promotion every 128, ``(32,)`` one chain over K. Promotion and epilogue arithmetic are then decided by exact
prediction: the measured values form an instruction, every admissible combination is evaluated, and those
with all bits equal are reported. More than one name means that the output type cannot tell them apart.

Source: as :mod:`oracle.tensorcore.probes`. Not covered: kernels whose sums depend on the position of a row or
column, split-K with atomics (a second run would differ), accumulators of float16, flushed subnormals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.errors import NumericsError, ShapeError
from oracle.numbers.formats import of_dtype, same_bits
from oracle.tensorcore import probes
from oracle.tensorcore.identify import subset
from oracle.tensorcore.instructions import Instruction, Order, Status, Sum
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.probes import Shape
from oracle.tensorcore.schedules import Epilogue, Promotion, Schedule, schedules
from oracle.truth.gemm import ScaledProduct

_NONE = "the kernel is no scaled product of its operands"
_OVERFLOW = f"a partial sum overflows, as those of float16 do beyond 65504, or {_NONE}"
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]
"""``f(a, b, a_scale, b_scale, out_dtype) -> [M, N]``."""


@dataclass(frozen=True)
class Fingerprint:
    """What the probes measured; None where they could not.

    Attributes
    ----------
    group : int, products that meet in one fused sum. 1 or 2: none do (one after the other, pairs, or exact sums).
    levels : tuple of int, sizes of the nested partial sums.
    exact : bool, whether no product is lost beside a larger one, as in sums of float64.
    interleaved : bool, whether a group takes k mod 4 in {0, 1} before {2, 3}.
    interval : int or None, promotion interval; None is one chain over K.
    align_bits : int or None, ``t``; None without an aligner, or with one wider than the probe reaches.
    align_direction : str, ``"toward zero"``, ``"down"``, ``"nearest"`` or ``"unknown"``.
    promotion, epilogue : tuple of str
        Names of the arithmetic that reproduces every bit; several when the output cannot tell them apart.
    schedules : tuple of str, registered schedules that reproduce every bit of every random probe.
    """

    group: int
    levels: tuple[int, ...]
    exact: bool
    interleaved: bool
    interval: int | None
    align_bits: int | None
    align_direction: str
    accumulator_bits: int | None
    accumulator_rounding: str
    promotion: tuple[str, ...]
    epilogue: tuple[str, ...]
    store_rounding: str
    schedules: tuple[str, ...]

    def lines(self) -> list[str]:
        """The findings, one sentence a line."""
        chain = f"promotion every {self.interval}" if self.interval else "one chain over K"
        order = " (interleaved by 2 of 4)" if self.interleaved else ""
        if self.group <= 2:
            bits = f"schedules that reproduce every bit: {', '.join(self.schedules) or 'none registered'}"
            text = "added one by one or in pairs, each sum rounded"
            text = "added exactly: none is lost beside a larger one" if self.exact else text
            text = f"group size: the probes saw no fused sum: products are {text}"
            return [text, f"output rounding: {self.store_rounding}", bits]
        return [
            f"group size: {self.group}{order}",
            f"alignment: {_bits(self.align_bits, self.align_direction)}",
            f"accumulator: {_bits(self.accumulator_bits, self.accumulator_rounding)}",
            f"promotion interval: {chain}; levels {self.levels}",
            f"promotion: {' | '.join(self.promotion) or 'none of the known'}",
            f"epilogue order: {' | '.join(self.epilogue) or 'none of the known'}",
            f"output rounding: {self.store_rounding}",
            f"schedules that reproduce every bit: {', '.join(self.schedules) or 'none registered'}",
        ]


def fingerprint(kernel: Kernel, shape: Shape, *, out_dtype: torch.dtype, seed: int = 0) -> Fingerprint:
    """Probe a kernel, in this process: whatever it raises goes through, and what it does to the process is done.

    :func:`oracle.harness.probing.probe`, and the command line, do the same to a kernel by name in a worker process.

    Parameters
    ----------
    kernel : callable, ``f(a [E, K], b [E, K], a_scale, b_scale, out_dtype) -> [E, E]``, ``E = shape.edge``.
    shape : Shape, operand dtype, K and scale granularity that the kernel takes.
    out_dtype : torch.dtype, float32 separates most schedules; bfloat16 and float16 also show the store's rounding.

    Raises ShapeError: the kernel returns another shape than ``[E, E]``; NumericsError: a single product does not come
    back as it is (this is no scaled product of ``a`` and ``b``, and the probes would read a constant as one sum over
    all of K), an answer holds a NaN, or the answers are those of no sum.
    """
    seen: list[tuple[ScaledProduct, Tensor]] = []

    def run(product: ScaledProduct) -> Tensor:
        out = kernel(product.a, product.b, product.a_scale, product.b_scale, out_dtype)
        if tuple(out.shape) != (shape.edge, shape.edge):
            raise ShapeError(f"the kernel returned {list(out.shape)} for a probe of [{shape.edge}, {shape.edge}]")
        if (nan := torch.nonzero(torch.isnan(out))).numel():
            raise NumericsError(
                f"the probes do not answer: element {tuple(nan[0].tolist())} is nan where every operand is finite; "
                f"{_OVERFLOW}"
            )
        seen.append((product, out.cpu()))
        return seen[-1][1]

    def diagonal(product: ScaledProduct) -> Tensor:
        return run(product).diagonal().to(torch.float64)

    _answers(run, shape)
    sizes = _partial_sums(diagonal, shape)
    group = min(sizes.values())
    first = [0, *(j for j, size in sizes.items() if size == group)]
    interleaved = len(first) > 2 and first[:4] == [0, 1, 4, 5]
    levels = _levels(sizes)
    outer = [x for x in levels if x > (2 * group if interleaved else group)]
    second = min((size for size in sizes.values() if size > group), default=None)
    following = [j for j, size in sizes.items() if size == second]
    align_bits, towards = _alignment(diagonal, shape, first)
    out_bits, rounding = _accumulator(diagonal, shape, first, following)
    # An exact sum loses nothing next to M: its sizes are those of pairs, and say nothing about promotion.
    regular = all(x % group == 0 for x in levels)
    interval = max(outer) if outer and regular else None
    inst = _measured(shape, group, align_bits, out_bits, rounding, interleaved)
    structural = list(seen)
    fitting, registered = _arithmetic(run, shape, inst, interval, out_dtype, seed)
    registered = [s for s in registered if all(_reproduces(s, *pair) for pair in structural)]
    if interval is None and len(promotions := {(s.promotion, s.interval) for s in registered}) == 1:
        ((promotion, every),) = promotions  # a promotion after every group has the levels of a chain
        interval = None if promotion is Promotion.RESCALE else every
    return Fingerprint(
        group,
        levels,
        max(sizes.values()) <= 2,
        interleaved,
        interval,
        align_bits,
        towards,
        out_bits,
        rounding,
        tuple(dict.fromkeys(s.promotion.name for s in fitting)),
        tuple(dict.fromkeys(s.epilogue.name for s in fitting)),
        _store(diagonal, shape, first if len(first) >= 3 else [0, 1, 2], out_dtype),
        tuple(s.name for s in registered),
    )


Diagonal = Callable[[ScaledProduct], Tensor]
Run = Callable[[ScaledProduct], Tensor]


def _answers(run: Run, shape: Shape) -> None:
    """NumericsError unless one product in each row comes back exactly, on the diagonal and nowhere else."""
    product, wanted = probes.single(shape)
    out = run(product).to(torch.float64)
    if (wrong := torch.nonzero(out != wanted)).numel():
        i, j = wrong[0].tolist()
        raise NumericsError(
            f"the probes do not answer: element ({i}, {j}) is {out[i, j].item():g} where one product of "
            f"{wanted[i, j].item():g} is all there is; {_NONE}"
        )


def _partial_sums(diagonal: Diagonal, shape: Shape) -> dict[int, int]:
    """For every ``j > 0`` the size of the smallest partial sum that holds both 0 and j."""
    sizes: dict[int, int] = {}
    for start in range(1, shape.k, shape.edge):
        partners = range(start, min(start + shape.edge, shape.k))
        product, one = probes.masks(shape, partners)
        counts = diagonal(product)[: len(partners)] / one
        for j, count in zip(partners, counts.tolist(), strict=True):
            if not 0 <= count <= shape.k:
                raise NumericsError(
                    f"the probes do not answer: {count:g} of {shape.k} products lie outside the sum of those at 0 and "
                    f"{j}; {_NONE if math.isfinite(count) else _OVERFLOW}"
                )
            sizes[j] = max(1, shape.k - round(count))  # the output's rounding may count one too many
    return sizes


def _levels(sizes: dict[int, int]) -> tuple[int, ...]:
    """Steps between consecutive sizes, each once, increasing."""
    values = sorted(set(sizes.values()))
    return tuple(sorted({b - a for a, b in zip([0, *values], values, strict=False)}))


def _alignment(diagonal: Diagonal, shape: Shape, group: Sequence[int]) -> tuple[int | None, str]:
    if len(group) < 3:
        return None, "unknown"
    product, depths = probes.alignment(shape, group)
    survived = [d for d, x in zip(depths, diagonal(product).tolist(), strict=False) if x != 0]
    if not survived or max(survived) == max(depths):
        return None, "unknown"
    # Lost depths still survive a floor or a rounding as a whole quantum: take the run from the top.
    bits = next((d - 1 for d in depths if d not in survived), max(depths))
    try_product, q = probes.direction(shape, group, align_bits=bits)
    up, down, whole = (x / q for x in diagonal(try_product)[:3].tolist())
    name = {(0, 0): "toward zero", (0, -1): "down", (1, 0): "nearest"}.get((up, down), "unknown")
    return (bits, name) if whole == 1 else (bits, "unknown")


def _accumulator(
    diagonal: Diagonal, shape: Shape, group: Sequence[int], following: Sequence[int]
) -> tuple[int | None, str]:
    if len(group) < 2 or not following:
        return None, "unknown"
    product, depths = probes.accumulator(shape, group, following[0])
    values = diagonal(product).tolist()
    top = 2 * probes.greatest_exponent(shape.dtype)
    surviving = [d for d, x in zip(depths, values, strict=False) if x == 2.0 ** (top - d)]
    if not surviving:
        return None, "unknown"
    bits = max(surviving)
    if len(group) < 4 or len(following) < 3:
        return bits, "unknown"
    product, ulp = probes.accumulator_rounding(shape, group, following, out_bits=bits)
    signs = tuple(x / ulp for x in diagonal(product)[:2].tolist())
    names = {(0, 0): "toward zero", (1, -1): "nearest", (1, 0): "up", (0, -1): "down"}
    return bits, names.get(signs, "unknown")


def _measured(
    shape: Shape, group: int, align_bits: int | None, out_bits: int | None, rounding: str, interleaved: bool
) -> Instruction | None:
    """The measurements as an instruction, where they make one."""
    if align_bits is None or out_bits is None or rounding not in ("toward zero", "nearest", "unknown"):
        return None
    return Instruction(
        name="measured",
        arch="measured",
        operands=(of_dtype(shape.dtype).name,),
        k=2 * group if interleaved else group,
        group=group,
        align_bits=align_bits,
        out_bits=out_bits,
        source="fingerprint",
        status=Status.LITERATURE,
        sum=Sum.FUSED_THEN_ADD if interleaved else Sum.FUSED,
        order=Order.INTERLEAVED if interleaved else Order.SEQUENTIAL,
        round_toward_zero=rounding != "nearest",
    )


def _arithmetic(
    run: Run, shape: Shape, inst: Instruction | None, interval: int | None, out_dtype: torch.dtype, seed: int
) -> tuple[list[Schedule], list[Schedule]]:
    """Combinations of promotion and epilogue, and registered schedules, with all bits of all probes equal."""
    tried = [probes.randoms(shape, seed=seed)]
    if shape.block is None:
        tried += [probes.near_ties(shape, out_dtype=out_dtype, seed=seed + i) for i in range(2)]
    else:
        tried += [probes.cancelling(shape, seed=seed + i) for i in range(2)]
    pairs = [(product, run(product)) for product in tried]
    shown = [s for s in schedules() if not s.flushes]  # no probe has a subnormal result
    registered = [s for s in shown if all(_reproduces(s, *pair) for pair in pairs)]
    measured = [s for s in _combinations(inst, interval) if all(_reproduces(s, *pair) for pair in pairs)]
    return measured or registered, registered


def _reproduces(schedule: Schedule, product: ScaledProduct, out: Tensor) -> bool:
    """Whether every bit is equal; a corner is looked at first, since most candidates fail there."""
    if schedule.why_not(product, out_dtype=out.dtype) is not None:
        return False
    corner = torch.arange(8, device="cpu")
    return _equal(schedule, subset(product, corner, corner), out[:8, :8]) and _equal(schedule, product, out)


def _equal(schedule: Schedule, product: ScaledProduct, out: Tensor) -> bool:
    return bool(same_bits(predict_product(product, schedule, out_dtype=out.dtype), out).all())


def _combinations(inst: Instruction | None, interval: int | None) -> list[Schedule]:
    if inst is None:
        return []
    by_block = [p for p in Promotion if p not in (Promotion.NONE, Promotion.ADD)]
    after = (Epilogue.COL_THEN_ROW, Epilogue.ROW_THEN_COL, Epilogue.PRODUCT)
    pairs = [(Promotion.ADD if interval else Promotion.NONE, e) for e in after]
    if interval:
        pairs += [(p, Epilogue.NONE) for p in by_block]
    return [
        Schedule(f"measured.{p.name}.{e.name}", inst, interval, p, e, "fingerprint", Status.LITERATURE)
        for p, e in pairs
    ]


def _store(diagonal: Diagonal, shape: Shape, places: Sequence[int], out_dtype: torch.dtype) -> str:
    """Name of the rounding of the output, from values about a tie."""
    if out_dtype == torch.float32:
        return "float32 is stored as it is"
    ulp = 2.0 ** -of_dtype(out_dtype).fraction_bits
    product = probes.store_ties(shape, places, out_dtype=out_dtype)
    got = [round((abs(x) - 1.0) / ulp, 3) for x in diagonal(product)[:8].tolist()]
    named = {
        "nearest, ties to even": [1, 0, 2, 0] * 2,
        "nearest, ties away": [1, 1, 2, 0] * 2,
        "toward zero": [0, 0, 1, 0] * 2,
        "away from zero": [1, 1, 2, 1] * 2,
        "up": [1, 1, 2, 1, 0, 0, 1, 0],
        "down": [0, 0, 1, 0, 1, 1, 2, 1],
    }
    return next((name for name, values in named.items() if values == got), "unknown")


def _bits(bits: int | None, rounding: str) -> str:
    return "the probes saw no bit lost" if bits is None else f"{bits} fraction bits, {rounding}"
