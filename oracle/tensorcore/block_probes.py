"""Which reading of a block-scaled instruction a kernel follows: rows that separate the named ones.

Every row is one sum over K from ``c = 0``, read off the diagonal of a product of ``EDGE`` rows. An earlier step of the
chain makes the accumulator ``c`` that a later one meets. Products that no row names are zeros under the least scale
there is, which no reading notices. With ``q = 2^(m - t)`` the quantum of an alignment:

empty         ``c`` of 24 bits, then a step of zeros under a large scale: does it align ``c``?
cancelled     the same with a group (or a step) whose products cancel
alignment     M, small, -M: what survives is ``tz_q(small)``, so t is the largest depth that does
direction     the same with 1.5 times a power of two, of both signs: truncation, floor and nearest differ
rounding      sums 3/4 of an ulp above a float32, of both signs
floor         ``2^-149 - 2^-e``: 0 where the second is not below the quantum of the least exponent
sums          two groups of 16 in one scale block, each with half a quantum more: a sum of 32 keeps both halves
depth         M, small, then -M behind 64 products: small survives where 96 meet in one step, and not where the sum of
              64 was rounded to float32 before
subnormals    c = 1, then the least operands, cancelling: their exponent is that at which c is lost
overflow      a sum beyond float32; and one that only the addends leave
scale_sign    an E4M3 scale with its sign bit set

Source: derived from the readings of the instructions (:mod:`oracle.tensorcore.instructions` names theirs).
Not covered: float16 accumulators, sparsity, two-CTA forms, kernels that cut K (their partial sums start from 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from oracle.errors import NumericsError, OptionError, ShapeError
from oracle.numbers.formats import E4M3FN, Format, by_name, decode, from_codes, same_bits
from oracle.numbers.rounding import Overflow, Rounding, encode
from oracle.tensorcore.fused import operand
from oracle.tensorcore.instructions import F8F6F4, FP4, Instruction, Sum
from oracle.tensorcore.predict import scaled_mma, store
from oracle.tensorcore.schedules import Schedule, schedules

EDGE, K = 128, 256
T = TypeVar("T")
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]
"""``f(a, b, a_scale, b_scale, out_dtype) -> [EDGE, EDGE]``: see :class:`Inputs`."""


@dataclass(frozen=True)
class Kind:
    """What a kernel takes: ``mxf8f6f4`` (two formats, UE8M0 of 32), ``mxf4`` (UE8M0 of 32), ``nvf4`` (E4M3 of 16)."""

    name: str
    a_format: str = "float8_e4m3fn"
    b_format: str = "float8_e4m3fn"

    def __post_init__(self) -> None:
        if self.name not in _CHAINS:
            raise OptionError(f"no block-scaled kind {self.name!r}; kinds: {', '.join(_CHAINS)}")
        admitted = F8F6F4 if self.name == "mxf8f6f4" else FP4
        if odd := [f for f in (self.a_format, self.b_format) if f not in admitted]:
            raise OptionError(f"{self.name} takes no {odd[0]}; it takes {', '.join(admitted)}")

    @classmethod
    def of(cls, name: str, a_format: str | None = None, b_format: str | None = None) -> Kind:
        """The kind of this name; formats as they are usual: E4M3, or E2M1 where there is no other."""
        usual = F8F6F4[0] if name == "mxf8f6f4" else FP4[0]
        return cls(name, a_format or usual, b_format or usual)

    @property
    def formats(self) -> tuple[Format, Format]:
        return by_name(self.a_format), by_name(self.b_format)

    @property
    def fp4(self) -> bool:
        """Whether 16 products are summed before they are aligned."""
        return self.instruction.sum is Sum.BLOCK_SCALED_GROUPS

    @property
    def instruction(self) -> Instruction:
        return self.candidates[0].instruction

    @property
    def candidates(self) -> list[Schedule]:
        """The named readings, of every architecture that has the kind."""
        return [s for s in schedules() if s.name.split(".")[1] == _CHAINS[self.name]]


_CHAINS = {"mxf8f6f4": "chain_ue8m0", "mxf4": "chain_mxf4", "nvf4": "chain_nvf4"}
KINDS = tuple(_CHAINS)


@dataclass(frozen=True)
class Row:
    """One sum: operands by k, and the scales of blocks by their number; all others are 0 and the least scale."""

    label: float
    products: Mapping[int, tuple[float, float]]
    scales: Mapping[int, tuple[float, float]]


@dataclass(frozen=True)
class Probe:
    """Rows that answer one question; ``read`` puts their float32 outputs, by label, into words."""

    name: str
    rows: tuple[Row, ...]
    read: Callable[[dict[float, float]], str] = field(repr=False)


@dataclass(frozen=True)
class Inputs:
    """One product for a kernel: codes ``[EDGE, K]`` and scales ``[EDGE, K / block]`` in their order.

    FP8 operands have their torch dtype, FP6 is uint8 with one code each, FP4 packed uint8 ``[EDGE, K / 2]``, the lower
    nibble first. Scales are float8_e8m0fnu or float8_e4m3fn, rows by blocks, not swizzled.
    """

    a: Tensor
    b: Tensor
    a_scale: Tensor
    b_scale: Tensor


@dataclass(frozen=True)
class BlockFingerprint:
    """The readings that the probes give.

    Attributes
    ----------
    schedules : names of the readings with every bit equal; empty: it is none of those that have a name.
    readings : by probe, what its rows say. Empty where the output is not float32.
    closest : of the readings that do not fit the one with most rows equal, and the probes in which it differs.
    """

    kind: Kind
    schedules: tuple[str, ...]
    readings: Mapping[str, str]
    closest: tuple[str, tuple[str, ...]]

    def lines(self) -> list[str]:
        """The findings, one sentence a line."""
        readings = [f"{name}: {text}" for name, text in self.readings.items()]
        if self.schedules:
            return [*readings, f"schedules that reproduce every bit: {', '.join(self.schedules)}"]
        name, probes = self.closest
        return [
            *readings,
            "schedules that reproduce every bit: none of the named readings; "
            f"the closest is {name}, which differs in: {', '.join(probes)}",
        ]


def fingerprint_block_scaled(kernel: Kernel, kind: Kind, *, out_dtype: torch.dtype = torch.float32) -> BlockFingerprint:
    """Probe a block-scaled kernel, in this process, with one call.

    Raises ShapeError: another shape than ``[EDGE, EDGE]``; NumericsError: an ordinary row (one product of 1 under
    scales of 1) does not come back, so this is no product of the operands under these scales.
    """
    operands = inputs(kind)
    out = kernel(operands.a, operands.b, operands.a_scale, operands.b_scale, out_dtype)
    if tuple(out.shape) != (EDGE, EDGE):
        raise ShapeError(f"the kernel returned {list(out.shape)} for a probe of [{EDGE}, {EDGE}]")
    got = out.detach().cpu().diagonal()[: len(_rows(kind))].contiguous()
    if float(got[0]) != 1.0:
        raise NumericsError(
            f"the probes do not answer: element (0, 0) is {float(got[0]):g} where one product of 1 under scales of 1 "
            "is all there is; the kernel is no product of these operands under block scales"
        )
    models = zip(kind.candidates, _predicted(kind), strict=True)
    equal = {s.name: same_bits(store(p, out_dtype), got) for s, p in models}
    fitting = tuple(name for name, same in equal.items() if bool(same.all()))
    worst = {name: same for name, same in equal.items() if name not in fitting}
    name = max(worst, key=lambda n: int(worst[n].sum()))
    differs = tuple(p.name for p, same in _by_probe(kind, worst[name].tolist()) if not all(same))
    readings = {}
    if out_dtype == torch.float32:
        for probe, values in _by_probe(kind, got.tolist()):
            readings[probe.name] = probe.read({r.label: v for r, v in zip(probe.rows, values, strict=True)})
    return BlockFingerprint(kind, fitting, readings, (name, differs))


def pairs(kind: Kind) -> dict[tuple[str, str], tuple[str, ...]]:
    """For each pair of named readings of one architecture the probes whose float32 bits differ."""
    probes_of_pair: dict[tuple[str, str], tuple[str, ...]] = {}
    arch = kind.candidates[0].instruction.arch
    predictions = [(s, p) for s, p in zip(kind.candidates, _predicted(kind), strict=True) if s.instruction.arch == arch]
    for i, (first, x) in enumerate(predictions):
        for second, y in predictions[i + 1 :]:
            names = tuple(p.name for p, same in _by_probe(kind, same_bits(x, y).tolist()) if not all(same))
            probes_of_pair[first.name, second.name] = names
    return probes_of_pair


def inputs(kind: Kind) -> Inputs:
    """The rows of every probe as one product."""
    a, b, sa, sb = _stacked(kind)
    scale = from_codes if kind.name == "nvf4" else _e8m0
    return Inputs(_laid(a, kind.formats[0]), _laid(b, kind.formats[1]), scale(sa, E4M3FN), scale(sb, E4M3FN))


def predicted(kind: Kind, instruction: Instruction) -> Tensor:
    """Float32 outputs ``[rows]`` of every row by ``instruction``; a sum beyond float32 is infinite, or the largest
    value where the instruction saturates."""
    a, b, sa, sb = (x[: len(_rows(kind))] for x in _stacked(kind))
    left, right = (
        operand(codes, instruction, format=fmt.name) for codes, fmt in zip((a, b), kind.formats, strict=True)
    )
    sa, sb = (from_codes(s, E4M3FN) if kind.name == "nvf4" else _e8m0(s) for s in (sa, sb))
    return scaled_mma(instruction, left, right, sa, sb, torch.zeros(len(a), dtype=torch.float32, device="cpu"))


@lru_cache(maxsize=32)
def _predicted(kind: Kind) -> list[Tensor]:
    """Of every candidate; readings that are one function on two architectures are evaluated once."""
    by_reading: dict[tuple[object, ...], Tensor] = {}
    predictions = []
    for s in kind.candidates:
        i = s.instruction
        key = (i.zeros, i.min_exponent, i.align_bits, i.out_bits, i.group, i.k, i.summed, i.saturates)
        if key not in by_reading:
            by_reading[key] = predicted(kind, i)
        predictions.append(by_reading[key])
    return predictions


def _by_probe(kind: Kind, values: Sequence[T]) -> list[tuple[Probe, list[T]]]:
    """Values of rows, probe by probe."""
    pairs_of_probes, start = [], 0
    for probe in probes(kind):
        pairs_of_probes.append((probe, list(values[start : start + len(probe.rows)])))
        start += len(probe.rows)
    return pairs_of_probes


# --- rows ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def probes(kind: Kind) -> tuple[Probe, ...]:
    """Every probe that the kind can express; the first is the ordinary row that a product must answer."""
    maker = _Rows(kind)
    probes_of_kind = [
        Probe("ordinary", (maker.row(1, (0, 0, 1.0, 0)),), lambda seen: f"one product of 1 gives {seen[1]:g}"),
        *(_fp4(maker) if kind.fp4 else _fp8(maker)),
        Probe("rounding", maker.rounding(), _read_rounding),
    ]
    if kind.name != "nvf4":
        beyond = (
            maker.row(1, (0, 0, 1.0, 127), (0, 1, 1.0, 127)),
            maker.row(2, (0, 0, 1.0, 129), (0, 1, -1.0, 129), (0, 2, 1.0, 127)),
            maker.row(3, (0, 0, 1.0, 127), (0, 1, 1.0, 127), (1, 0, -1.0, 127)),
        )
        probes_of_kind += [Probe("overflow", beyond, _read_overflow), Probe("floor", maker.floor(), _read_floor)]
    else:
        signed = maker.row(1, (0, 0, 1.0, 0))
        flipped = Row(1, signed.products, {0: (-signed.scales[0][0], signed.scales[0][1])})
        probes_of_kind.append(
            Probe("scale_sign", (flipped,), lambda seen: "ignored" if seen[1] == 1 else f"gives {seen[1]:g}")
        )
    return tuple(probes_of_kind)


_DEPTHS = tuple(range(31, 41))
_FLOORS = (150, 151, 152, 153, 157, 158, 159, 160, 161, 162, 173, 174, 175)


def _fp4(maker: _Rows) -> list[Probe]:
    """Every 16 products have scales of their own (UE8M0: every 32), so the terms of a step lie far apart."""
    nvf4 = maker.kind.name == "nvf4"
    top = 16 if nvf4 else 20
    # E4M3 scales: the least term is 2^-20, the lowest bit of a float32 at 8
    c = ((0, 0, 1.0, 3), (0, 2, 0.25, -18))
    empty = maker.row(top, *c, scales=((1, top),))
    cancelled = maker.row(top, *c, (1, 0, 36.0, top), (1, 0, -36.0, top))
    far = maker.apart(top)
    if nvf4:
        deep = [maker.row(36 - i, *far, (0, 3, 0.25 * 2**i, -18)) for i in range(6)]
        turned = [maker.row(s * (35 - i), *far, (0, 3, s * 0.75 * 2**i, -18)) for i in range(3) for s in (1, -1)]
    else:
        deep = [maker.row(d, *far, (0, 3, 1.0, top - d)) for d in _DEPTHS]
        turned = [maker.row(s * d, *far, (0, 3, s * 1.5, top - d)) for d in _DEPTHS for s in (1, -1)]
    deeper = maker.row(30, (0, 0, 1.0, 16), (0, 2, 1.0, -14), (0, 4, -1.0, 16))
    probes_of_kind = [
        Probe("depth", (deeper,), _read_step),
        Probe("empty", (empty,), lambda seen: _read_lost(seen[top], 8.0, "a group of zeros", nvf4)),
        Probe("cancelled", (cancelled,), lambda seen: _read_lost(seen[top], 8.0, "a group that cancels", nvf4)),
        Probe("alignment", tuple(deep), _read_depth),
        Probe("direction", tuple(turned), lambda seen: _read_direction(seen, top)),
    ]
    if not nvf4:
        other = maker.apart(top, first=2)
        halves = [maker.row(d, (0, 0, 1.5, top - d), (0, 1, 1.5, top - d), *other) for d in _DEPTHS]
        whole = [maker.row(-d, (0, 0, 1.5, top - d), (0, 0, 1.5, top - d), *other) for d in _DEPTHS]
        probes_of_kind.append(Probe("sums", (*halves, *whole), _read_sums))
    return probes_of_kind


def _fp8(maker: _Rows) -> list[Probe]:
    """One scale for a step of 32: c is made by the steps before it."""
    one, depths = (0, 0, 1.0, 0), range(22, 30)
    empty = maker.row(200, one, (1, 0, 1.0, -23), zeros=(2, 200))
    deep = [maker.row(s, one, (1, 0, 1.0, s), (1, 1, -1.0, s)) for s in depths]
    turned = [maker.row(x * s, (0, 0, 1.5 * x, 0), (1, 0, 1.0, s), (1, 1, -1.0, s)) for s in depths for x in (1, -1)]
    nominal = sum(f.emin for f in maker.kind.formats)
    low = [maker.row(s, one, least=(1, s - nominal)) for s in range(20, 40)]
    return [
        Probe("empty", (empty,), lambda seen: _read_lost(seen[200], 1.0, "a zero product", False)),
        Probe("alignment", tuple(deep), _read_depth),
        Probe("direction", tuple(turned), lambda seen: _read_direction(seen, None)),
        Probe("subnormals", tuple(low), _read_subnormals),
    ]


class _Rows:
    """Rows of one kind: terms ``(step, slot, value of the product, exponent of the scales)``."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.inst = kind, kind.instruction

    def row(
        self,
        label: float,
        *terms: tuple[int, int, float, int],
        scales: tuple[tuple[int, int], ...] = (),
        zeros: tuple[int, int] | None = None,
        least: tuple[int, int] | None = None,
    ) -> Row:
        """A row of these terms; slots are groups of 16 (FP4), else products of the step, whose scale is that of its
        first term.

        ``scales``: steps of zeros and the exponent of their scales. ``zeros``, ``least``: a step and the exponent of
        its scales; zeros times the largest operand, and the least operands, cancelling.
        """
        products: dict[int, tuple[float, float]] = {}
        where: dict[int, tuple[float, float]] = {}
        for step, slot, value, exponent in terms:
            k = step * self.step + (16 * slot if self.kind.fp4 else 0)
            while k in products:
                k += 1
            x, y = where.setdefault(k // self.block, self._scale(exponent))
            products[k] = self._factors(value * (2.0**exponent / x) / y)
        for step, exponent in scales:
            first = step * self.step // self.block
            where |= {block: self._scale(exponent) for block in range(first, first + self.inst.k // self.block)}
        a, b = self.kind.formats
        if zeros is not None:
            first = zeros[0] * self.step
            products |= {first + i: (0.0, b.max_finite) for i in range(self.inst.k)}
            where[first // self.block] = self._scale(zeros[1])
        if least is not None:
            first = least[0] * self.step
            products |= {first: (a.min_subnormal, b.min_subnormal), first + 1: (-a.min_subnormal, b.min_subnormal)}
            where[first // self.block] = self._scale(least[1])
        return Row(label, products, where)

    @property
    def step(self) -> int:
        """Products from one step of a row to the next: of FP4 a step of 64 and one of 96 begin there."""
        return math.lcm(*(s.instruction.k for s in self.kind.candidates))

    @property
    def block(self) -> int:
        assert self.inst.scale_block is not None
        return self.inst.scale_block

    def apart(self, exponent: int, *, first: int = 0) -> tuple[tuple[int, int, float, int], ...]:
        """M and -M of this exponent in two groups of step 0."""
        return (0, first, 1.0, exponent), (0, first + 1, -1.0, exponent)

    def floor(self) -> tuple[Row, ...]:
        """``2^-149 - 2^-e`` in one step, for the e that the operands reach."""
        if self.kind.fp4:
            return tuple(self.row(e, (0, 0, 1.0, -149), (0, 2, -1.0, -e)) for e in _FLOORS)
        a, b = self.kind.formats
        high = sum(math.frexp(f.max_finite)[1] - 1 for f in (a, b))
        reached = [e for e in _FLOORS if 2.0 ** (high + 149 - e) >= a.min_subnormal * b.min_subnormal]
        return tuple(
            self.row(e, (0, 0, 2.0**high, -149 - high), (0, 1, -(2.0 ** (high + 149 - e)), -149 - high))
            for e in reached
        )

    def rounding(self) -> tuple[Row, ...]:
        """A power of two and 3/4 of an ulp more, of both signs."""
        if self.kind.fp4:
            return tuple(self.row(s, (0, 0, s * 1.0, 6), (0, 2, s * 1.5, -18)) for s in (1, -1))
        return tuple(self.row(s, (0, 0, s * 1.0, 0), (1, 0, s * 1.5, -24)) for s in (1, -1))

    def _factors(self, value: float) -> tuple[float, float]:
        """Two operands whose product is ``value``, of exponents as near to each other as they go."""
        a, b = self.kind.formats
        significand = math.frexp(abs(value))[0]
        middle = math.frexp(value)[1] // 2
        for shift in sorted(range(middle - 40, middle + 41), key=lambda x: abs(x - middle)):
            for part in (2 * significand, 1.5, 1.0):
                left, right = part * 2.0**shift, abs(value) / (part * 2.0**shift)
                if _holds(a, left) and _holds(b, right):
                    return math.copysign(left, value), right
        raise NumericsError(f"no {a} and {b} have the product {value:g}")

    def _scale(self, exponent: int) -> tuple[float, float]:
        """Two scales whose product is this power of two."""
        low, high = (-9, 8) if self.kind.name == "nvf4" else (-127, 127)
        x = min(high, max(low, exponent // 2))
        y = exponent - x
        if not low <= y <= high:
            raise NumericsError(f"no two scales of {self.kind.name} have the product 2**{exponent}")
        return 2.0**x, 2.0**y


def _holds(fmt: Format, value: float) -> bool:
    if not fmt.min_subnormal <= value <= fmt.max_finite:
        return False
    exponent = max(math.frexp(value)[1] - 1, fmt.emin)
    return (value * 2.0 ** (fmt.fraction_bits - exponent)).is_integer()


@lru_cache(maxsize=32)
def _rows(kind: Kind) -> tuple[Row, ...]:
    rows = tuple(row for probe in probes(kind) for row in probe.rows)
    if len(rows) > EDGE:
        raise NumericsError(f"{len(rows)} rows do not fit a probe of {EDGE}")
    return rows


@lru_cache(maxsize=32)
def _stacked(kind: Kind) -> tuple[Tensor, ...]:
    """Codes of ``a`` and ``b`` ``[EDGE, K]`` and of their scales ``[EDGE, K / block]``, one uint8 each."""
    block = kind.instruction.scale_block or K
    least = 2.0**-9 if kind.name == "nvf4" else 2.0**-127
    values = torch.zeros(2, EDGE, K, dtype=torch.float64, device="cpu")
    scales = torch.full((2, EDGE, K // block), least, dtype=torch.float64, device="cpu")
    for i, row in enumerate(_rows(kind)):
        for k, pair in row.products.items():
            values[:, i, k] = torch.tensor(pair, dtype=torch.float64, device="cpu")
        for b, pair in row.scales.items():
            scales[:, i, b] = torch.tensor(pair, dtype=torch.float64, device="cpu")
    codes = [_codes(v, fmt) for v, fmt in zip(values, kind.formats, strict=True)]
    for code, v, fmt in zip(codes, values, kind.formats, strict=True):
        assert torch.equal(decode(code, fmt), v), "an operand of a probe is no value of its format"
    if kind.name == "nvf4":
        return *codes, *(_codes(s, E4M3FN) for s in scales)
    return *codes, *((torch.frexp(s)[1] + 126).to(torch.uint8) for s in scales)


def _codes(values: Tensor, fmt: Format) -> Tensor:
    """The codes of values that a format holds, uint8."""
    return encode(values, fmt, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE).to(torch.uint8)


def _e8m0(codes: Tensor, _: Format | None = None) -> Tensor:
    return codes.view(torch.float8_e8m0fnu)


def _laid(codes: Tensor, fmt: Format) -> Tensor:
    """Codes as a kernel takes them (:class:`Inputs`)."""
    if fmt.bits == 4:
        return codes[:, 0::2] | (codes[:, 1::2] << 4)
    return codes if fmt.torch_dtype is None else codes.view(fmt.torch_dtype)


# --- words --------------------------------------------------------------------------------------------------


def _read_lost(seen: float, without: float, what: str, nvf4: bool) -> str:
    if seen <= without:
        return f"{what} takes part in the alignment"
    return f"{what} does not take part in the alignment" + (", or it has 36 bits and more" if nvf4 else "")


def _read_step(seen: dict[float, float]) -> str:
    """M, M 2^-30 and -M, the last behind 64 products."""
    (left,) = seen.values()
    return f"{96 if left else 64} products meet in one step"


def _read_depth(seen: dict[float, float]) -> str:
    surviving = [d for d, value in seen.items() if value != 0]
    if not surviving:
        return f"fewer than {min(seen):g} fraction bits"
    most = max(surviving)
    if any(value == 0 for d, value in seen.items() if d < most):
        return f"no one depth: {', '.join(f'{d:g}' for d in sorted(surviving))} survive"
    return f"{most:g} fraction bits" + (" or more" if most == max(seen) else "")


def _read_direction(seen: dict[float, float], top: int | None) -> str:
    """1.5 times a power of two at the depth where its half is lost: toward zero leaves the power alone on both
    sides."""
    names = set()
    for d in sorted({abs(x) for x in seen}):
        exact = 1.5 if top is None else 1.5 * 2.0 ** (top - d)
        unit = exact / 1.5
        up, down = seen[d] / unit, seen[-d] / unit
        directions = {(1.0, -1.0): "toward zero", (1.0, -2.0): "down", (2.0, -2.0): "nearest", (2.0, -1.0): "up"}
        if (up, down) in directions:
            names.add(directions[up, down])
    return " and ".join(sorted(names)) or "unknown"


def _read_rounding(seen: dict[float, float]) -> str:
    up, down = seen[1], seen[-1]
    unit = 2.0 ** math.floor(math.log2(abs(up)))
    grown = (abs(up) > unit, abs(down) > unit)
    return {(False, False): "toward zero", (True, True): "nearest", (True, False): "up", (False, True): "down"}[grown]


def _read_overflow(seen: dict[float, float]) -> str:
    inside = "exact" if seen[2] == 2.0**127 else f"{seen[2]:g}"
    return f"a sum beyond float32 is {seen[1]:g}, less 2^127 it is {seen[3]:g}; with addends beyond it is {inside}"


def _read_floor(seen: dict[float, float]) -> str:
    lost = [e for e, value in seen.items() if value == 0]
    if not lost:
        return "no term below 2^-149 is kept"
    reading = f"terms down to 2^-{max(lost):g} are kept next to 2^-149"
    return reading + (" (no less was tried)" if max(lost) == max(seen) else "")


def _read_sums(seen: dict[float, float]) -> str:
    """3 times a power of two as two halves in two groups (``d``) and in one (``-d``)."""
    if any(seen[d] != seen[-d] for d in _DEPTHS):
        return "16 products are summed before they are aligned"
    return "32 products are summed before they are aligned"


def _read_subnormals(seen: dict[float, float]) -> str:
    least = max((s for s, value in seen.items() if value != 0), default=None)
    return "unknown" if least is None else f"c survives down to {least:g} binades below products of their formats' emin"
