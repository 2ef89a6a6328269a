"""Data of a kind: what the values of one input may be, whatever the contract, beside what its grammar makes.

Each word of :data:`DATA` names one pattern: the kinds that it applies to, how a call gets it, whether a call has it.

Ties. A quantiser divides by a scale, and rounds. The values of ``ties`` are midpoints of two codes of the target format
times a power of two; every 16th of a row, and a whole row of every 128, is the largest code, so that the scale of any
block is that power of two. ``midpoints`` are those times a *given* scale of 1.75: ``x = 1.75 m`` is exact
in bfloat16 for every midpoint ``m`` of E4M3, and ``x * fl(1/1.75)`` rounds away from some of them. ``halves`` are 1/2,
1, 3/2 of the least subnormal, beside the largest code. A dequantiser multiplies: ``2**q + 1`` times a code with an odd
significand of ``p`` bits has ``p + q`` bits and ends in a one, a tie for a format with one bit less.

Source: derived in this file from the formats (OCP OFP8 1.0, OCP MX 1.0, IEEE 754).

Not covered: ties behind a function of the values (a norm, a rotation, an activation), which are none any more; data of
the kinds in :data:`WITHOUT`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oracle.errors import CaseError, OracleError
from oracle.numbers.formats import E4M3FN, Format, decode, of_dtype
from oracle.numbers.rounding import Overflow, Rounding, exponent_of, power_of_two, to_dtype
from oracle.numbers.scaling import ScaleFormat
from oracle.routines import data
from oracle.routines.base import Call
from oracle.routines.traits import Kind, TensorSpec
from oracle.truth.gemm import take_rows

BEYOND = 96.0  # a logit whose exponential no float32 holds
OUTWEIGHS = 2.0**14  # a summand whose last bit in float32 is worth more than that of a sum of ordinary products
LEAST, BESIDE = 0, 227  # bytes of E8M0: 2^-127 and 2^100, whose products with codes no float32 loses
OTHER = 2  # added to the byte of every third least scale, and taken from that of every third scale beside them
GROUP = 128  # values of a row that are zero together
SHARED = (16, 32, 128)  # columns of a row that share a scale, beside the row and the tensor
FEW = 8  # groups that a loop unrolled for them holds
GIVEN = 1.75  # a scale that is no power of two, and has few bits
EXPONENTS = 6  # of the powers of two that rows of ties are multiplied with: -6 to 6, as far as the dtype has them
TINY = 2.0**-20  # of ordinary values: 1e-6
FAR = 60  # exponents on either side of 0
LOW = 127 - 75  # the byte of 2^-75, of which the square is no float32
TIED = 0.125  # of the values of a call that are ties, at least
WIDE = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Input:
    """One input of a call."""

    spec: TensorSpec
    call: Call

    @property
    def x(self) -> Tensor:
        """Its tensor, any shape and dtype of the specification, NaN included."""
        return self.call.inputs[self.spec.name]


Changed = dict[str, Tensor]


@dataclass(frozen=True)
class Pattern:
    """Data that inputs of some kinds may have.

    Attributes
    ----------
    kinds : of the inputs that it applies to.
    make : the inputs that differ from those of a call that is to have it; CaseError where its dtypes cannot.
    shows : whether a call has it.
    stated : it is drawn for contracts alone that have cases with NaN, and so say what a value that is no number gives.
    everywhere : few calls can have it, by their extents, inputs or options: each is tried.
    shaped : it has another shape than the input, and applies where the dims leave the shape to the contract's check.
    on : the calls that it is drawn in, as they are before it, of ordinary data and without other words where one is;
        None stands for all.
    """

    kinds: frozenset[Kind]
    make: Callable[[Input], Changed]
    shows: Callable[[Input], bool]
    stated: bool = False
    everywhere: bool = False
    shaped: bool = False
    on: Callable[[Input], bool] | None = None


def words_of(spec: TensorSpec) -> list[str]:
    """The words of data that an input of its kind may have."""
    words = [word for word, pattern in DATA.items() if spec.kind in pattern.kinds]
    words = [word for word in words if spec.dims is None or not DATA[word].shaped]
    return [word for word in words if word != "one" or not spec.optional]  # an optional table maps each id to its own


def shown(call: Call) -> frozenset[tuple[str, str]]:
    """Each input of a checked call with each word of data that it has."""
    inputs = [Input(spec, call) for spec in call.contract.inputs if spec.name in call.inputs]
    return frozenset((one.spec.name, word) for one in inputs for word in words_of(one.spec) if DATA[word].shows(one))


def bits(x: Tensor) -> Tensor:
    """The bits of ``x`` (any shape and dtype) as integers of its width in the same shape, of which torch copies every
    stride; NaN has its bits."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(widths[x.element_size()])


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float64 ``values`` (any shape) in ``dtype``, same shape: to nearest even, saturated where the format has 8 bits.

    Beyond the largest value of a wider format: infinity. NaN stays NaN.
    """
    overflow = Overflow.SATURATE if of_dtype(dtype).bits == 8 else Overflow.INF
    return to_dtype(values, dtype, rounding=Rounding.NEAREST_EVEN, overflow=overflow)


# --- one input alone ------------------------------------------------------------------------------------------


def _alone(change: Callable[[Tensor], Tensor]) -> Callable[[Input], Changed]:
    return lambda one: {one.spec.name: change(one.x)}


def _has(holds: Callable[[Tensor], bool]) -> Callable[[Input], bool]:
    return lambda one: holds(one.x)


def _floats(x: Tensor) -> Tensor:
    """The values of a tensor of floats; CaseError for bits in integers."""
    if not x.is_floating_point():
        raise CaseError(f"{x.dtype} holds bits, whose values are not to be changed")
    return decode(x)


def _powers(x: Tensor) -> Tensor:
    """Every value at the greatest power of two below its magnitude; zero, NaN and infinity stay."""
    values = _floats(x)
    unchanged = ~torch.isfinite(values) | (values == 0)
    return rounded(torch.where(unchanged, values, values.sign() * power_of_two(exponent_of(values.abs()))), x.dtype)


def _are_powers(x: Tensor) -> bool:
    if not x.is_floating_point():
        return False
    size = decode(x).abs().flatten()
    size = size[torch.isfinite(size) & (size > 0)]
    return size.numel() > 0 and bool((size == power_of_two(exponent_of(size))).all())


def _zeros(x: Tensor) -> Tensor:
    """Every second group of a row is zero, from the first on; all of a row that has one group."""
    y = x.clone()
    bits(y)[..., torch.arange(x.shape[-1], device=x.device) // GROUP % 2 == 0] = 0
    return y


def _zero_groups(x: Tensor) -> bool:
    """A group is zero, beside one of its row that is not; or the only one of its row."""
    rows = (bits(x) != 0).reshape(-1, x.shape[-1])
    groups = torch.stack([part.any(dim=1) for part in torch.split(rows, GROUP, dim=1)], dim=1)
    return bool((~groups.all(dim=1) & groups.any(dim=1)).any()) if groups.shape[1] > 1 else bool((~groups).any())


def _equal(x: Tensor) -> Tensor:
    """All of them are the first one."""
    return x.reshape(-1)[:1].expand(x.numel()).reshape(x.shape).clone()


def _are_equal(x: Tensor) -> bool:
    return x.numel() > 1 and bool((bits(x) == bits(x).reshape(-1)[0]).all())


def _one(x: Tensor) -> Tensor:
    """Every row has the ids of the row that names most."""
    rows = x.reshape(x.shape[0], -1)
    return rows[(rows >= 0).sum(dim=1).argmax()].expand(rows.shape).reshape(x.shape).clone()


def _are_one(x: Tensor) -> bool:
    return x.shape[0] > 1 and bool((x == x[:1]).all())


def _one_group(x: Tensor) -> Tensor:
    """Every offset is the last one, but a leading zero: all rows belong to the first group."""
    y = x.reshape(-1)[-1:].expand(x.numel()).reshape(x.shape).clone()
    if x.numel() > 1 and int(x.reshape(-1)[0]) == 0:
        y.reshape(-1)[0] = 0
    return y


def _last_group(x: Tensor) -> Tensor:
    """Every offset but the last one is 0: all rows belong to the last group."""
    y = torch.zeros_like(x)
    y.reshape(-1)[-1] = x.reshape(-1)[-1]
    return y


def _unassigned(x: Tensor) -> Tensor:
    """The rows of the second half have -1."""
    y = x.clone()
    y[x.shape[0] // 2 :] = -1
    return y


def _below_minus_one(x: Tensor) -> Tensor:
    """Every second place, or row of places, from the last one on is negative, none of them -1."""
    y, at = x.clone(), torch.arange(len(x) - 1, 0, -2, device=x.device)
    below = -2 - torch.arange(len(at), dtype=x.dtype, device=x.device)
    y[at] = below.reshape(-1, *(1,) * (x.dim() - 1))
    return y


def _half_unassigned(x: Tensor) -> bool:
    return bool((x[x.shape[0] // 2 :] == -1).all()) and bool((x >= 0).any())


def _duplicates(x: Tensor) -> Tensor:
    """Every row has what the first has where both have something: a token the same expert twice, two tokens a slot."""
    if x.dim() < 2:
        return torch.where(x >= 0, x.max(), x)
    return torch.where((x >= 0) & (x[:1] >= 0), x[:1], x)


def _has_duplicates(x: Tensor) -> bool:
    """One entry that is not negative stands twice."""
    real = x[x >= 0]
    return real.numel() > len(set(real.flatten().tolist()))


def _empty(x: Tensor) -> Tensor:
    """Nothing in any but the last."""
    y = torch.zeros_like(x)
    y.reshape(-1)[-1] = x.max()
    return y


def _ones(x: Tensor) -> Tensor:
    """One in each."""
    return torch.ones_like(x)


def _turned(one: Input) -> Changed:
    """The groups in reverse order, with every input that has one row for each; CaseError where offsets place them."""
    if not one.x.dim() or any(spec.kind is Kind.OFFSETS for spec in one.call.contract.inputs):
        raise CaseError(f"{one.spec.name} counts what other inputs place")
    symbol = (one.spec.dims or ("",))[0]
    of_group = [spec.name for spec in one.call.contract.inputs if (spec.dims or ("",))[0] == symbol]
    supplied = {name: one.call.inputs[name] for name in of_group if symbol and name in one.call.inputs}
    return {name: take_rows(x, torch.arange(len(x) - 1, -1, -1, device=x.device)) for name, x in supplied.items()}


def _late(x: Tensor) -> Tensor:
    """All begin where the first group with a row ends: rows before it belong to none."""
    inside = x[(x > 0) & (x < x.max())]
    return x.clamp(min=int(inside.min())) if inside.numel() else x.clone()


def _starts_late(x: Tensor) -> bool:
    return x.numel() > 2 and 0 < int(x.reshape(-1)[0]) < int(x.reshape(-1)[-1])


def _fewer(x: Tensor) -> Tensor:
    """Half as many, of a table the half of its first column: what follows begins behind a gap."""
    y = x.clone()
    counts = y.reshape(len(y), -1)[:, 0] if y.dim() else y.reshape(-1)
    counts -= (counts + 1) // 2 * (counts > 1)
    return y


def _leave_gaps(one: Input) -> bool:
    """The next group begins behind the end of one that has a row, by offsets of the call."""
    offsets = [one.call.inputs[spec.name] for spec in one.call.contract.inputs if spec.kind is Kind.OFFSETS]
    counts = one.x.reshape(len(one.x), -1)[:, 0] if one.x.dim() else one.x.reshape(-1)
    if len(offsets) != 1 or offsets[0].numel() != counts.numel() or counts.numel() < 2:
        return False
    ends, starts = (offsets[0].flatten() + counts)[:-1], offsets[0].flatten()[1:]
    return bool(((ends < starts) & (counts[:-1] > 0)).any())


def _shuffled(x: Tensor) -> Tensor:
    """In an order in which hardly any stands beside one of its own."""
    count = len(x)
    step = next(step for step in range(max(1, count * 5 // 8), count + 2) if math.gcd(step, count) == 1)
    return x[torch.arange(count, device=x.device) * step % count]


def _unsorted(x: Tensor) -> bool:
    if x.dim() > 1:
        return True
    real = x[x >= 0]
    return bool((real[1:] < real[:-1]).any())


def _column(one: Input) -> Changed:
    """A vector as ``[n, 1]``; one value as a column of as many that differ as an extent of the call, the first that
    its contract takes."""
    name, x = one.spec.name, one.x
    if x.numel() > 1:
        return {name: x.reshape(-1, 1)}
    extents = {n: None for other in one.call.inputs.values() for n in other.shape if n > 1}
    for n in extents:
        factors = 1 + torch.arange(n, dtype=torch.float64, device="cpu").reshape(n, 1) % GROUP / 16
        column = {name: rounded(_floats(x).reshape(1, 1) * factors, x.dtype)}
        if _takes(one, column):
            return column
    raise CaseError(f"{name} is one value of a call")


def _each(one: Input) -> Changed:
    """A number for each token of a request, ``[B, T]``: of the last one that of the vector ``[B]``, of those before
    it less."""
    name, x = one.spec.name, one.x
    extents = [other.shape[1] for other in one.call.inputs.values() if other.dim() > 1 and other.shape[1] > 1]
    for n in dict.fromkeys((*extents, 2) if x.dim() == 1 else ()):
        part = torch.arange(1, n + 1, device="cpu")
        table = {name: (x.to(torch.int64)[:, None] * part // n).to(x.dtype)}
        if _takes(one, table):
            return table
    raise CaseError(f"{name} has no number for each token")


def _is_each(x: Tensor) -> bool:
    return x.dim() == 2 and x.shape[1] > 1 and bool((x[:, 0] < x[:, -1]).any())


def _takes(one: Input, changed: Changed) -> bool:
    """Whether the contract takes the call with these inputs."""
    try:
        one.call.contract.check({**one.call.inputs, **changed}, one.call.options)
    except OracleError:
        return False
    return True


def _whole(x: Tensor) -> Tensor:
    """Ends at multiples of a tile, but for the last."""
    y = torch.minimum((x + GROUP // 2) // GROUP * GROUP, x.max()).to(x.dtype)
    y.reshape(-1)[-1] = x.reshape(-1)[-1]
    return y


def _spread(x: Tensor) -> Tensor:
    """Every one of more than :data:`FEW` groups has rows, about as many as the others, in fours where that is enough
    for each."""
    groups = x.numel() - int(x.reshape(-1)[0] == 0)
    if groups <= FEW or bool((x.flatten().diff() < 0).any()):
        raise CaseError(f"{groups} groups are few, or these are no borders of groups: they fall")
    part = torch.arange(groups - x.numel() + 1, groups + 1, device="cpu")
    total = int(x.max())
    step = 4 if total >= 4 * groups else 1
    y = (total * part // groups // step * step).to(x.dtype)
    y[-1] = x.reshape(-1)[-1]
    return y.reshape(x.shape)


def _are_spread(x: Tensor) -> bool:
    """Each of them begins before the next one; the first may be empty where no zero leads."""
    return x.numel() > FEW + 1 and bool((x.flatten().diff() > 0).all())


def _whole_tiles(counts: Tensor) -> bool:
    """One has whole tiles, and a later one is not empty."""
    flat = counts.flatten()
    used = torch.nonzero(flat > 0).flatten()
    return bool((flat[used[:-1]] % GROUP == 0).any())


def _large(one: Input) -> Changed:
    """Summands whose largest magnitude is :data:`OUTWEIGHS`; logits of which :data:`BEYOND` is the least."""
    values = _floats(one.x)
    size = torch.where(torch.isfinite(values), values, 0.0)
    if one.x.dtype not in WIDE or size.numel() == 0:
        raise CaseError(f"{one.x.dtype} has no room for large values")
    if one.spec.kind is Kind.LOGITS:
        return {one.spec.name: rounded(values - size.min() + BEYOND, one.x.dtype)}
    top = size.abs().max()
    return {one.spec.name: rounded(values * (OUTWEIGHS / top if top > 0 else 1.0), one.x.dtype)}


def _is_large(one: Input) -> bool:
    if one.x.dtype not in WIDE:
        return False
    values = decode(one.x)
    finite = values[torch.isfinite(values)]
    if one.spec.kind is Kind.LOGITS:
        return finite.numel() > 0 and bool((finite > 0.99 * BEYOND).all())
    return bool((finite.abs() > OUTWEIGHS / 2).any())


def _any(one: Input) -> bool:
    """Every call may have it; other data beside it would hide it."""
    return True


def _fine(x: Tensor) -> Tensor:
    """Every value with all the bits of its dtype: less by up to 2^-7 of it."""
    stream = data.Stream(f"fine {tuple(x.shape)}")
    part = torch.from_numpy(stream.integers(1, 1 << 16, tuple(x.shape))).double() * 2.0**-23
    return rounded(_floats(x) * (1 - part), x.dtype)


def _are_fine(x: Tensor) -> bool:
    """Half of them are no number of bfloat16; none of a dtype that holds no others."""
    return x.dtype is not torch.float32 or bool((bits(x) & 0xFFFF != 0).double().mean() >= 0.5)


def _small(x: Tensor) -> Tensor:
    """Every second row, from the first on, at 2^-20 of its values: below a floor of 1e-4, above one of 1e-10."""
    values = _floats(x).reshape(-1, x.shape[-1]).clone()
    values[::2] *= TINY
    return rounded(values, x.dtype).reshape(x.shape)


def _small_rows(x: Tensor) -> bool:
    if not x.is_floating_point():
        return False
    top = decode(x).abs().reshape(-1, x.shape[-1]).amax(dim=1)
    return bool(((top > TINY / 1024) & (top < TINY * GROUP)).any())


def _above(one: Input) -> Changed:
    """Each value one unit in the last place above a power of two, and that of every 16th column of every second row
    above the largest code times one, over many exponents."""
    x, top = one.x, float(_codes(targets(one.call)[0])[-1])
    _floats(x)
    rows, columns = x.numel() // max(1, x.shape[-1] if x.dim() else 1), x.shape[-1] if x.dim() else 1
    stream = data.Stream(f"{one.call.contract.name}#{one.spec.name} above {tuple(x.shape)}")
    reach = min(FAR, of_dtype(x.dtype).emax - 12)
    powers = power_of_two(torch.from_numpy(stream.integers(-reach, reach + 1, (rows, 1))))
    values = powers * power_of_two(torch.from_numpy(-stream.integers(0, 8, (rows, columns))))
    values[:, ::16] = powers
    values[::2, ::16] *= top
    y = rounded(values, x.dtype)
    bits(y).add_(1)
    signs = torch.from_numpy(stream.signs((rows, columns)))
    return {one.spec.name: rounded(decode(y) * signs, x.dtype).reshape(x.shape)}


def _are_above(x: Tensor) -> bool:
    if x.dtype not in WIDE or x.numel() == 0:
        return False
    y = torch.where(torch.isfinite(x) & (x != 0), x.abs(), 1.0)
    below = bits(y) - 1
    size = decode(below.view(x.dtype))
    return bool(((size == power_of_two(exponent_of(size))) & (y > size)).double().mean() > TIED)


def _to_powers(one: Input) -> bool:
    """Whether values of the widest dtype, no FP8, are rounded up to powers of two: as the scales of a recipe, or
    alone."""
    if one.x.dtype not in WIDE:
        return False
    operands = one.call.optional_operands
    recipes = operands.recipes if operands is not None else ()
    widest = max(one.spec.dtypes, key=lambda dtype: dtype.itemsize)
    alone = len(one.call.contract.inputs) == 1 and operands is None
    return one.x.dtype is widest and (recipes[0].scaling.scale_format is ScaleFormat.UE8M0 if recipes else alone)


def _lone(one: Input) -> Changed:
    """One value in each 16 columns, the largest code, the others zero: under its scale, and under one of 1.5 of it
    where the format has 2/3 of it, nothing errs. Given scales are 1."""
    x = _zeroed(one.x)
    fmt = targets(one.call)[0]
    x[..., ::16] = float(_codes(fmt)[-1])
    return {one.spec.name: x, **{name: torch.ones_like(one.call.inputs[name]) for name in _scales(one)}}


def _zeroed(x: Tensor) -> Tensor:
    _floats(x)
    return torch.zeros_like(x)


def _are_lone(x: Tensor) -> bool:
    if not x.is_floating_point() or x.shape[-1] < 16:
        return False
    blocks = (x[..., : x.shape[-1] // 16 * 16] != 0).reshape(-1, 16).sum(dim=1)
    return bool((blocks == 1).any())


def _chooses(one: Input) -> bool:
    """Whether the recipe takes the better one of two scales."""
    operands = one.call.optional_operands
    return operands is not None and bool(operands.recipes) and operands.recipes[0].candidates is not None


def _put(value: float) -> Callable[[Tensor], Tensor]:
    def put(x: Tensor) -> Tensor:
        """The value in the middle of the first row, and as the last element where there are two rows or more."""
        element = torch.tensor([value], dtype=torch.float32, device=x.device).to(x.dtype)
        if not x.is_floating_point() or not _same_number(float(decode(element)), value):
            raise CaseError(f"{x.dtype} has no {value}")
        y = x.clone()
        first = (*(0 for _ in x.shape[:-1]), *(extent // 2 for extent in x.shape[-1:]))
        for at in (first, tuple(extent - 1 for extent in x.shape)) if x.numel() > sum(x.shape[-1:]) else (first,):
            bits(y)[at] = bits(element)[0]
        return y

    return put


def _same_number(x: float, y: float) -> bool:
    return x == y or (x != x and y != y)


def _holds(test: Callable[[Tensor], Tensor]) -> Callable[[Tensor], bool]:
    return lambda x: x.is_floating_point() and bool(test(decode(x)).any())


# --- ties -----------------------------------------------------------------------------------------------------


def targets(call: Call) -> tuple[Format, ...]:
    """The formats that values of a call are cast to: those of its recipes, else of its outputs with 8 bits, else of its
    memory and codes; E4M3 where none says."""
    operands = call.optional_operands
    if operands is not None and operands.recipes:
        return (operands.recipes[0].scaling.element,)
    specs = {spec.name: spec.kind for spec in call.contract.inputs}
    outputs = [dtype for out in call.contract.outputs(call).values() for dtype in out.dtypes]
    beside = [x.dtype for name, x in call.inputs.items() if specs[name] in (Kind.STATE, Kind.CODES)]
    for dtypes in (outputs, beside):
        eight = [dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize == 1]
        if eight := [dtype for dtype in eight if dtype is not torch.float8_e8m0fnu]:
            return tuple(dict.fromkeys(map(of_dtype, eight)))
    return (E4M3FN,)


def _codes(fmt: Format) -> Tensor:
    """The finite values from 0 on in order, float64."""
    every = torch.arange(1 << (fmt.bits - 1), dtype=torch.int64, device="cpu").to(fmt.storage)
    values = decode(every, fmt)
    finite: Tensor = torch.unique(values[torch.isfinite(values)])
    return finite


def _midpoints(fmt: Format) -> Tensor:
    codes = _codes(fmt)
    return (codes[:-1] + codes[1:]) / 2


def _scales(one: Input) -> list[str]:
    """The given scales of the values of an input, in a wide dtype: by its role, else all that no codes have."""
    contract, inputs = one.call.contract, one.call.inputs
    names = {spec.name for spec in contract.inputs if spec.kind is Kind.SCALES and spec.name in inputs}
    names = {name for name in names if inputs[name].dtype in WIDE}
    role = next((role for role, name in contract.roles.items() if name == one.spec.name), None)
    of_role = contract.roles.get(f"{role}_scale")
    if of_role is not None:
        return sorted(names & {of_role})
    coded = any(spec.kind is Kind.CODES for spec in contract.inputs)
    return [] if coded else sorted(names)


def _is_global(call: Call) -> bool:
    """Whether a given scale is that of the whole tensor, beside those of blocks that the call computes (NVFP4)."""
    operands = call.optional_operands
    return operands is not None and bool(operands.recipes) and operands.recipes[0].scaling.global_scale


def _least_of(fmt: Format) -> Tensor:
    """1/2, 1, 3/2, 5/2 of the least subnormal."""
    return torch.tensor([0.5, 1.0, 1.5, 2.5], dtype=torch.float64, device="cpu") * float(_codes(fmt)[1])


def _of_target(values: Callable[[Format], Tensor], scale: float | None) -> Callable[[Input], Changed]:
    def make(one: Input) -> Changed:
        """Values of the target, of either sign, with the largest code in every 16th column and every 128th row."""
        x, names, formats = one.x, _scales(one), targets(one.call)
        static = bool(names) and not _is_global(one.call)
        if scale is not None and not static:
            raise CaseError(f"{one.spec.name} has no given scale of floats")
        _floats(x)
        fmt, stream = formats[0], data.Stream(f"{one.call.contract.name}#{one.spec.name} {tuple(x.shape)}")
        rows, columns = x.numel() // x.shape[-1], x.shape[-1]
        drawn = values(fmt)
        m = drawn[torch.from_numpy(stream.integers(0, len(drawn), (rows, columns)))]
        m[:, ::16] = float(_codes(fmt)[-1])
        if rows > 1:
            m[::GROUP] = float(_codes(fmt)[-1])
        m *= torch.from_numpy(stream.signs((rows, columns)))
        wide, least = of_dtype(x.dtype), float(drawn[drawn > 0].min())
        if not static:
            high = min(EXPONENTS, wide.emax - int(exponent_of(_codes(fmt)[-1:])[0]) - 1)
            low = max(-EXPONENTS, wide.emin - int(exponent_of(drawn.new_tensor([least]))[0]))
            powers = torch.from_numpy(stream.integers(min(low, high), high + 1, (rows, 1)))
            m *= power_of_two(powers)
        factors = {name: torch.full_like(one.call.inputs[name], scale or 1.0) for name in names}
        return {one.spec.name: rounded(m * (scale or 1.0), x.dtype).reshape(x.shape), **factors}

    return make


def _tied(values: Callable[[Format], Tensor], share: float, *, odd: bool = False) -> Callable[[Input], bool]:
    def shows(one: Input) -> bool:
        """As large a share of the values over their scale, given or of any block, are of these."""
        x = one.x
        if not x.is_floating_point() or x.numel() == 0:
            return False
        names, size = _scales(one), decode(x).abs().reshape(-1, x.shape[-1])
        size = torch.where(torch.isfinite(size), size, 0.0)
        scales = [decode(one.call.inputs[name]).flatten() for name in names]
        powers = all(bool((s == power_of_two(exponent_of(s))).all()) for s in scales)
        block = not names or _is_global(one.call)
        if powers if odd else block and not powers:
            return False
        if not block and any(s.numel() != 1 for s in scales):
            return False
        for fmt in targets(one.call):
            wanted = values(fmt)
            largest = float(_codes(fmt)[-1])
            tried = [size * (largest / top) for top in _tops(size)] if block else [size / s for s in scales]
            for quotient in tried:
                counted = quotient[quotient > 0]
                if counted.numel() and _count(counted, wanted) >= share * counted.numel():
                    return True
        return False

    return shows


def _count(x: Tensor, values: Tensor) -> int:
    """How many elements of ``x`` (any shape) stand in the ascending ``values [V]``, both float64; NaN does not.

    Bits that no value has are looked at first: few quotients have as short a significand as a midpoint of 8 bits.
    """
    union = int(np.bitwise_or.reduce(values.numpy().view(np.int64)))
    short = x[x.view(torch.int64).bitwise_and((union & -union) - 1) == 0]
    at = torch.searchsorted(values, short).clamp(max=len(values) - 1)
    return int((values[at] == short).sum())


def _tops(size: Tensor) -> list[Tensor]:
    """The largest of every block of a row, of every row and of all, as wide as the values."""
    tops = [size.amax(dim=1, keepdim=True).expand(size.shape), size.amax().expand(size.shape)]
    for width in SHARED:
        blocks = torch.split(size, width, dim=1)
        tops.append(torch.cat([part.amax(dim=1, keepdim=True).expand(part.shape) for part in blocks], dim=1))
    return [torch.where(top > 0, top, 1.0) for top in tops]


def _store(one: Input) -> Format | None:
    """The format that products of codes and scales are stored in, where nothing is summed; None elsewhere."""
    contract = one.call.contract
    kinds = [spec.kind for spec in contract.inputs]
    if kinds.count(Kind.CODES) != 1 or not {Kind.VALUES, Kind.WEIGHTS, Kind.BIAS, Kind.ALPHA}.isdisjoint(kinds):
        return None
    wide = [dtype for out in contract.outputs(one.call).values() for dtype in out.dtypes if dtype in WIDE]
    return of_dtype(wide[0]) if wide and one.x.dtype in WIDE else None


def _factor(one: Input) -> float | None:
    """``2**q + 1``, which makes a tie of each code with an odd significand of all its bits; None without a store."""
    if (store := _store(one)) is None:
        return None
    specs = {spec.name: spec.kind for spec in one.call.contract.inputs}
    dtypes = [x.dtype for name, x in one.call.inputs.items() if specs[name] is Kind.CODES and x.is_floating_point()]
    precision = of_dtype(dtypes[0]).precision if dtypes else 2  # of packed E2M1
    return float((1 << (store.precision + 1 - precision)) + 1)


def _factors(one: Input) -> Changed:
    """Each scale at its binade, with the significand of :func:`_factor`."""
    if (factor := _factor(one)) is None:
        raise CaseError(f"{one.spec.name} is no scale, in a wide float, that codes alone are multiplied with")
    least = exponent_of(torch.tensor([factor], dtype=torch.float64, device="cpu"))
    return {one.spec.name: rounded(power_of_two(exponent_of(decode(one.x).abs()) - least) * factor, one.x.dtype)}


def _has_factor(one: Input) -> bool:
    if (number := _factor(one)) is None:
        return False
    factor = torch.tensor([number], dtype=torch.float64, device="cpu")
    size = decode(one.x).abs()
    size = size[torch.isfinite(size) & (size > 0)]
    return size.numel() > 0 and bool(
        (size / power_of_two(exponent_of(size)) == factor / power_of_two(exponent_of(factor))).all()
    )


# --- two inputs of a product -----------------------------------------------------------------------------------


def _others(one: Input, kind: Kind) -> list[TensorSpec]:
    return [
        spec
        for spec in one.call.contract.inputs
        if spec.kind is kind and spec is not one.spec and spec.name in one.call.inputs
    ]


def _is_e8m0(call: Call, x: Tensor) -> bool:
    """Whether scales are E8M0: by their dtype, or as bytes beside codes of 8 bits, which have no other ones."""
    coded = [call.inputs[s.name] for s in call.contract.inputs if s.kind is Kind.CODES and s.name in call.inputs]
    eight = bool(coded) and all(codes.is_floating_point() for codes in coded)
    return x.dtype is torch.float8_e8m0fnu or (x.dtype is torch.uint8 and eight)


def _least_scales(one: Input) -> Changed:
    """Scales of 2^-127 and 2^-125, beside others of 2^100 and 2^98, without a bias, which would hide the sum."""
    others = [spec.name for spec in _others(one, Kind.SCALES) if _is_e8m0(one.call, one.call.inputs[spec.name])]
    if not _is_e8m0(one.call, one.x) or len(others) != 1:
        raise CaseError(f"{one.spec.name} is no E8M0 scale of two of a product")
    bytes_of = {one.spec.name: (LEAST, LEAST + OTHER), others[0]: (BESIDE, BESIDE - OTHER)}
    filled = {spec.name: torch.zeros_like(one.call.inputs[spec.name]) for spec in _others(one, Kind.BIAS)}
    for name, (most, third) in bytes_of.items():
        x = one.call.inputs[name]
        place = torch.arange(x.numel(), device=x.device).reshape(x.shape)
        filled[name] = torch.where(place % 3 == 1, third, most).to(torch.uint8).view(x.dtype)
    return filled


def _has_least(one: Input) -> bool:
    others = [one.call.inputs[spec.name] for spec in _others(one, Kind.SCALES)]
    least = _is_e8m0(one.call, one.x) and bool((bits(one.x) == LEAST).any())
    least &= not any(bool((one.call.inputs[spec.name] != 0).any()) for spec in _others(one, Kind.BIAS))
    return least and any(_is_e8m0(one.call, x) and bool((bits(x) == BESIDE).any()) for x in others)


def _filled(byte: int, other: int) -> Callable[[Input], Changed]:
    def fill(one: Input) -> Changed:
        """E8M0 scales of one byte, beside others of another."""
        call = one.call
        others = [spec.name for spec in _others(one, Kind.SCALES) if _is_e8m0(call, call.inputs[spec.name])]
        if not _is_e8m0(call, one.x) or len(others) != 1:
            raise CaseError(f"{one.spec.name} is no E8M0 scale of two of a product")
        filled = {one.spec.name: byte, others[0]: other}
        return {name: torch.full_like(bits(call.inputs[name]), b).view(one.x.dtype) for name, b in filled.items()}

    return fill


def _is_filled(byte: int, other: int) -> Callable[[Input], bool]:
    def shows(one: Input) -> bool:
        """One scale at most of this byte, and another at most or, above 1, at least of the other."""
        others = [x for spec in _others(one, Kind.SCALES) if _is_e8m0(one.call, x := one.call.inputs[spec.name])]
        least = _is_e8m0(one.call, one.x) and bool((bits(one.x) <= byte).any())
        return least and any(bool(((bits(x) >= other) if other > 127 else (bits(x) <= other)).any()) for x in others)

    return shows


def _nan_at_zero(one: Input) -> Changed:
    """NaN as the first code of an operand, under a scale of 0: the first of its scales in float32."""
    contract, inputs = one.call.contract, one.call.inputs
    role = next((role for role, name in contract.roles.items() if name == one.spec.name), "")
    scale = inputs.get(contract.roles.get(f"{role}_scale", ""))
    nan = torch.tensor([torch.nan], dtype=torch.float32, device=one.x.device).to(one.x.dtype)
    if scale is None or scale.dtype is not torch.float32 or not bool(decode(nan).isnan()):
        raise CaseError(f"{one.spec.name} has no NaN, or no scale that may be 0")
    x, zero = one.x.clone(), scale.clone()
    bits(x)[(0,) * x.dim()] = bits(nan)[0]
    zero[(0,) * zero.dim()] = 0.0
    return {one.spec.name: x, contract.roles[f"{role}_scale"]: zero}


def _has_nan_at_zero(one: Input) -> bool:
    contract, inputs = one.call.contract, one.call.inputs
    role = next((role for role, name in contract.roles.items() if name == one.spec.name), "")
    scale = inputs.get(contract.roles.get(f"{role}_scale", ""))
    if scale is None or scale.numel() == 0 or not one.x.is_floating_point():
        return False
    first = decode(one.x[(slice(0, 1),) * one.x.dim()])
    return bool(first.isnan().all()) and scale.dtype is torch.float32 and float(scale.flatten()[0]) == 0


def _are_moved(one: Input) -> bool:
    """Whether scales in float32 are the one input of floats, whose bits go elsewhere."""
    others = [spec for spec in one.call.contract.inputs if spec is not one.spec and not spec.kind.is_integer]
    return not others and one.x.dtype is torch.float32 and one.call.optional_operands is None


def _ends(one: Input) -> Changed:
    """2^-127 and 2^127 in turn, in every second place, and -0 in every third where the contract takes it."""
    flat = one.x.clone(memory_format=torch.contiguous_format).reshape(-1)
    flat[::4], flat[2::4] = 2.0**-127, 2.0**127
    plain = flat.clone()
    flat[1::3] = -0.0
    contract, call = one.call.contract, one.call
    try:
        with_zeros = {one.spec.name: flat.reshape(one.x.shape)}
        contract.outputs(Call(contract, {**call.inputs, **with_zeros}, call.options).checked())
    except OracleError:
        return {one.spec.name: plain.reshape(one.x.shape)}
    return with_zeros


def _has_ends(x: Tensor) -> bool:
    return x.dtype is torch.float32 and bool((x == 2.0**-127).any())


def _beyond_half(x: Tensor) -> Tensor:
    """Positive scales, the largest of them 512 and a half: times the codes beyond float16."""
    values = _floats(x)
    top = values[torch.isfinite(values)].abs().max() if bool(torch.isfinite(values).any()) else values.new_ones(())
    return rounded(values * ((512.5 if float(top) > 0 else 1.0) / float(top or 1.0)), x.dtype)


def _is_beyond_half(x: Tensor) -> bool:
    return x.dtype in WIDE and bool((decode(x) > 500).any())


def _recodes(one: Input) -> bool:
    """Whether codes become codes of another scale, and no product is made."""
    call = one.call
    coded = any(spec.kind is Kind.CODES for spec in call.contract.inputs)
    eight = any(dtype in (torch.float8_e4m3fn,) for out in call.contract.outputs(call).values() for dtype in out.dtypes)
    return coded and eight and not call.contract.multiplies


def _summed(spec: TensorSpec) -> int:
    """The axis of K among the dims of an operand of a product."""
    if spec.dims is None or "K" not in spec.dims:
        raise CaseError(f"{spec.name} has no axis K")
    return spec.dims.index("K")


def _zeros_at_nan(one: Input) -> Changed:
    """The first group of K is zero in every row, and NaN in one row of what it is multiplied with."""
    others = _others(one, Kind.CODES)
    if len(others) != 1:
        raise CaseError(f"{one.spec.name} is not one of two operands of codes")
    x, y, axes = one.x.clone(), one.call.inputs[others[0].name].clone(), (_summed(one.spec), _summed(others[0]))
    nan = torch.tensor([torch.nan], dtype=torch.float32, device=x.device).to(y.dtype)
    if not y.is_floating_point() or x.dim() <= axes[0] or y.dim() <= axes[1] or not bool(decode(nan).isnan()):
        raise CaseError(f"{y.dtype} has no NaN")
    bits(x).narrow(axes[0], 0, min(GROUP, x.shape[axes[0]])).zero_()
    first = bits(y).select(axes[1], 0)
    first[tuple(extent - 1 for extent in first.shape)] = bits(nan)[0]
    return {one.spec.name: x, others[0].name: y}


def _has_zeros_at_nan(one: Input) -> bool:
    others = _others(one, Kind.CODES)
    if len(others) != 1 or not one.call.inputs[others[0].name].is_floating_point():
        return False
    try:
        axes = _summed(one.spec), _summed(others[0])
    except CaseError:  # no axis is summed over
        return False
    x, y = one.x, one.call.inputs[others[0].name]
    if x.dim() <= axes[0] or y.dim() <= axes[1]:
        return False
    first = bits(x).narrow(axes[0], 0, min(GROUP, x.shape[axes[0]]))
    return not bool(first.any()) and bool(decode(y.select(axes[1], 0)).isnan().any())


def _by_kind(values: Callable[[Input], Changed], scales: Callable[[Input], Changed]) -> Callable[[Input], Changed]:
    return lambda one: (values if one.spec.kind is Kind.VALUES else scales)(one)


DATA: Mapping[str, Pattern] = {
    "powers": Pattern(
        frozenset({Kind.VALUES, Kind.WEIGHTS, Kind.ALPHA, Kind.SCALES}), _alone(_powers), _has(_are_powers)
    ),
    "zeros": Pattern(frozenset({Kind.VALUES, Kind.CODES}), _alone(_zeros), _has(_zero_groups)),
    "midpoints": Pattern(frozenset({Kind.VALUES}), _of_target(_midpoints, GIVEN), _tied(_midpoints, TIED, odd=True)),
    "ties": Pattern(
        frozenset({Kind.VALUES, Kind.SCALES}),
        _by_kind(_of_target(_midpoints, None), _factors),
        lambda one: _tied(_midpoints, TIED)(one) if one.spec.kind is Kind.VALUES else _has_factor(one),
    ),
    "halves": Pattern(
        frozenset({Kind.VALUES}), _of_target(_least_of, None), _tied(lambda fmt: _least_of(fmt)[:1], 2**-9)
    ),
    "nan": Pattern(
        frozenset({Kind.VALUES, Kind.CODES, Kind.SCALES}), _alone(_put(torch.nan)), _has(_holds(torch.isnan)), True
    ),
    "inf": Pattern(frozenset({Kind.VALUES}), _alone(_put(torch.inf)), _has(_holds(torch.isinf)), True),
    "equal": Pattern(frozenset({Kind.LOGITS, Kind.POSITIONS, Kind.BIAS}), _alone(_equal), _has(_are_equal)),
    "negative": Pattern(
        frozenset({Kind.LOGITS, Kind.BIAS, Kind.WEIGHTS}),
        _alone(lambda x: -x.abs()),
        _has(lambda x: bool((x <= 0).all())),
    ),
    "large": Pattern(frozenset({Kind.LOGITS, Kind.BIAS, Kind.STATE}), _large, _is_large),
    "least": Pattern(frozenset({Kind.SCALES}), _least_scales, _has_least),
    "low": Pattern(frozenset({Kind.SCALES}), _filled(LOW, LOW), _is_filled(LOW, LOW)),
    "ends": Pattern(frozenset({Kind.SCALES}), _ends, _has(_has_ends), on=_are_moved),
    "beyond": Pattern(frozenset({Kind.SCALES}), _alone(_beyond_half), _has(_is_beyond_half), on=_recodes),
    "fine": Pattern(frozenset({Kind.WEIGHTS}), _alone(_fine), _has(_are_fine), on=lambda one: not _are_fine(one.x)),
    "small": Pattern(frozenset({Kind.VALUES}), _alone(_small), _has(_small_rows), on=_any),
    "above": Pattern(frozenset({Kind.VALUES}), _above, _has(_are_above), on=_to_powers, everywhere=True),
    "lone": Pattern(frozenset({Kind.VALUES}), _lone, _has(_are_lone), on=_chooses),
    "nan_at_zero": Pattern(frozenset({Kind.CODES}), _nan_at_zero, _has_nan_at_zero, True),
    "below": Pattern(
        frozenset({Kind.SLOTS}), _alone(_below_minus_one), _has(lambda x: bool((x < -1).any()) and bool((x >= 0).any()))
    ),
    "turned": Pattern(
        frozenset({Kind.COUNTS}), _turned, _has(lambda x: bool((x.flatten()[1:] > x.flatten()[0]).any()))
    ),
    "zeros_at_nan": Pattern(frozenset({Kind.CODES}), _zeros_at_nan, _has_zeros_at_nan, True),
    "shuffled": Pattern(frozenset({Kind.IDS}), _alone(_shuffled), _has(_unsorted)),
    "one": Pattern(frozenset({Kind.IDS}), _alone(_one), _has(_are_one)),
    "one_group": Pattern(
        frozenset({Kind.OFFSETS}),
        _alone(_one_group),
        _has(lambda x: x.numel() > 2 and bool((x == _one_group(x)).all())),
    ),
    "last_group": Pattern(
        frozenset({Kind.OFFSETS}),
        _alone(_last_group),
        _has(lambda x: x.numel() > 2 and bool((x == _last_group(x)).all())),
    ),
    "whole": Pattern(
        frozenset({Kind.OFFSETS}), _alone(_whole), _has(lambda x: _whole_tiles(x.flatten().diff())), everywhere=True
    ),
    "spread": Pattern(frozenset({Kind.OFFSETS}), _alone(_spread), _has(_are_spread), everywhere=True),
    "tiles": Pattern(
        frozenset({Kind.COUNTS}),
        _alone(lambda x: torch.where(x >= GROUP, x // GROUP * GROUP, x)),
        _has(lambda x: _whole_tiles(x)),
        everywhere=True,
    ),
    "column": Pattern(
        frozenset({Kind.SCALES}),
        _column,
        _has(lambda x: x.dim() == 2 and x.shape[1] == 1 and x.shape[0] > 1),
        everywhere=True,
        shaped=True,
    ),
    "each": Pattern(frozenset({Kind.COUNTS}), _each, _has(_is_each), everywhere=True, shaped=True),
    "before": Pattern(
        frozenset({Kind.POSITIONS}),
        _alone(lambda x: (x - 1).clamp(min=0)),
        _has(lambda x: bool((x % 2 == 1).any())),
        everywhere=True,
    ),
    "late": Pattern(frozenset({Kind.OFFSETS}), _alone(_late), _has(_starts_late), everywhere=True),
    "unassigned": Pattern(frozenset({Kind.IDS, Kind.SLOTS}), _alone(_unassigned), _has(_half_unassigned)),
    "duplicates": Pattern(frozenset({Kind.IDS, Kind.SLOTS, Kind.PAGES}), _alone(_duplicates), _has(_has_duplicates)),
    "empty": Pattern(
        frozenset({Kind.COUNTS}), _alone(_empty), _has(lambda x: x.numel() > 1 and bool((x == _empty(x)).all()))
    ),
    "fewer": Pattern(frozenset({Kind.COUNTS}), _alone(_fewer), _leave_gaps),
    "ones": Pattern(frozenset({Kind.COUNTS}), _alone(_ones), _has(lambda x: bool((x == 1).all()))),
}
"""Data by kind: powers of two, groups of zeros, ties, halves of the least subnormal, NaN and infinity, equal and
negative ones, large ones, all in one, out of order, -1, the same twice, rows before the first group and between groups,
empty ones, one each, whole tiles, many groups in use, groups in reverse; a column, one for each token, the place
before; small rows, values just above powers of two, one alone in a block, negative places; of a product the least scale
beside the greatest, two low ones, zeros that meet NaN as codes or as scales."""

WITHOUT: Mapping[Kind, str] = {
    Kind.BOUND: "an upper limit of amax: the data that it limits are drawn",
    Kind.MASK: "a flag for each row: cases of the routine have rows with and without it",
    Kind.RANDOM: "no contract takes them",
    Kind.PARAMETERS: "each row of a table is one case of its own, on both sides of every limit",
}
"""Kinds without a pattern, each with the reason."""
