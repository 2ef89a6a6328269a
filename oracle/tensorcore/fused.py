"""One fused sum, and chains of them: the readable definition of every instruction in the table.

For products ``p_k`` with exponents ``e_k`` and an accumulator ``c``::

    m   = max(max_k e_k, E(c), min_exponent)            E(x) = max(floor(log2|x|), emin); zeros take no part
    q   = 2^(m - t)
    S   = tz_q(c) + sum_k tz_q(p_k)                     tz_q(x) = sign(x) floor(|x|/q) q; the sum is exact
    out = S rounded to `to` fraction bits (toward zero for float32; to nearest even for float16)

With block scales (:func:`scaled_addends`) the products, or exact sums of 16 of them, are scaled before they are
aligned, and the instruction says which zeros take part (:class:`oracle.tensorcore.instructions.Zeros`).

Every number here is a float64 tensor and every operation on it is exact: products have at most 22 significant
bits, scaled terms are integers below 2^46, sums of them stay below 2^53. This file is the definition
that the compiled engines must equal bit for bit; it is not fast.

NaN or infinity among the products or in ``c`` decides the result as IEEE 754 addition would (NaN, or the infinity,
whatever the order); an exponent beyond the output format gives infinity, also when rounding toward zero; an all-zero
sum is +0; every NaN that is stored is the canonical one (0x7FFFFFFF, 0x7FFF).

Sources: MMA-Sim (arXiv 2511.10909), Khattak and Mikaitis (10.1145/3830409); see
:mod:`oracle.tensorcore.instructions` for which fact comes from where.
Not covered: exception flags, sparsity, the payload of NaNs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.errors import DtypeError, NumericsError
from oracle.numbers.formats import E2M1, by_name, decode, of_dtype
from oracle.numbers.rounding import power_of_two, two_sum
from oracle.tensorcore.instructions import Instruction, Order, Sum, Zeros

ABSENT = -20_000
"""Exponent of a zero: below every real one, also when two of them are added."""

FLOAT32_EMIN, FLOAT32_EMAX = -126, 127
FLOAT16_EMIN = -14
FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**FLOAT32_EMAX
NEAREST = {torch.float32: (23, FLOAT32_EMIN, FLOAT32_EMAX), torch.float16: (10, FLOAT16_EMIN, 15)}
"""Fraction bits, least and largest exponent of the formats that are rounded to nearest."""


@dataclass(frozen=True)
class Operand:
    """Decoded operand: exact values and alignment exponents.

    Attributes
    ----------
    values : Tensor, float64.
    exponents : Tensor, int32 of the same shape: ``max(floor(log2|x|), emin)``, :data:`ABSENT` for zeros.
    """

    values: Tensor
    exponents: Tensor


def operand(x: Tensor, instruction: Instruction, *, format: str | None = None) -> Operand:
    """Decode one operand of an instruction.

    Parameters
    ----------
    x : Tensor, any shape
        Elements in the operand's torch dtype; float4 as unpacked integer codes, one per element. With
        ``format`` named, such codes of it (FP6 too), or a float32 or float64 tensor of values that this format holds.
    format : str or None, format of the values; None takes the dtype's own (float32 is read as TF32).

    Returns Operand: TF32 ignores the 13 low bits of a float32 (truncation); a NaN stays NaN. Subnormals keep the
    exponent ``emin``, or become zero where the instruction flushes them.
    Raises DtypeError: the instruction does not take this format.
    """
    name = format or _format_name(x, instruction)
    if name not in instruction.operands:
        raise DtypeError(f"{instruction.name} does not take {name}; it takes {', '.join(instruction.operands)}")
    emin = FLOAT32_EMIN if name == "tfloat32" else by_name(name).emin
    if name == "tfloat32":
        bits = x.to(torch.float32).contiguous().view(torch.int32)
        # Masking a NaN could leave an infinity: keep one bit that survives.
        bits = torch.where(torch.isnan(x), torch.full_like(bits, 0x7FC00000), bits & ~0x1FFF)
        values = bits.view(torch.float32).to(torch.float64)
    elif format is not None and x.dtype in (torch.float32, torch.float64):
        values = x.to(torch.float64)
    else:
        values = decode(x, by_name(name))
    if instruction.flush_subnormals:
        values = torch.where(values.abs() < 2.0**emin, torch.zeros_like(values), values)
    return Operand(values, exponent(values, emin=emin))


def _format_name(x: Tensor, instruction: Instruction) -> str:
    if x.dtype == torch.float32 and "tfloat32" in instruction.operands:
        return "tfloat32"
    if not x.dtype.is_floating_point and E2M1.name in instruction.operands:
        return E2M1.name
    return of_dtype(x.dtype).name


def exponent(x: Tensor, *, emin: int) -> Tensor:
    """``max(floor(log2|x|), emin)`` of float64 ``x`` of any shape, int32 of the same shape, from its bits;
    :data:`ABSENT` for zeros.

    NaN and infinities get an exponent above every finite one; callers settle them apart.
    """
    e = ((x.view(torch.int64) >> 52) & 0x7FF).to(torch.int32) - 1023
    return torch.where(x == 0, ABSENT, e.clamp(min=emin))


def truncate(x: Tensor, quantum_exponent: Tensor) -> Tensor:
    """``tz_q(x) / q`` with ``q = 2^quantum_exponent``: an integer, exact, in float64.

    ``x`` is float64, ``quantum_exponent`` int32, of shapes that broadcast; the result has that shape.
    """
    return torch.trunc(x * power_of_two(-quantum_exponent))


def round_significand(x: Tensor, *, fraction_bits: int, emin: int, emax: int, toward_zero: bool) -> Tensor:
    """Round float64 ``x`` of any shape to a binary format, gradual underflow included, overflow to infinity: float64 of
    the same shape.

    An exponent above ``emax`` gives infinity in both directions: hardware truncates the significand, not the range
    (MMA-Sim; Khattak and Mikaitis). NaN and infinities pass.
    """
    e = exponent(x, emin=emin).clamp(min=emin) - fraction_bits
    scaled = x * power_of_two(-e)
    whole = torch.trunc(scaled) if toward_zero else torch.round(scaled)
    out = whole * power_of_two(e)
    out = torch.where(out.abs() >= 2.0 ** (emax + 1), torch.sign(x) * math.inf, out)
    return torch.where(torch.isfinite(x), out, x)


def round_accumulator(x: Tensor, instruction: Instruction, *, out: torch.dtype) -> Tensor:
    """Round an exact sum ``x``, float64 of any shape, to the instruction's float32 or float16 accumulator: float64 of
    the same shape."""
    if out == torch.float16:
        return round_to_nearest(x, out)
    rounded = round_significand(
        x,
        fraction_bits=instruction.out_bits,
        emin=FLOAT32_EMIN,
        emax=FLOAT32_EMAX,
        toward_zero=instruction.round_toward_zero,
    )
    if not instruction.saturates:
        return rounded
    return torch.where(torch.isfinite(x), rounded.clamp(-FLOAT32_MAX, FLOAT32_MAX), rounded)


def round_to_nearest(x: Tensor, out: torch.dtype) -> Tensor:
    """:func:`round_significand` to float32 or float16, ties to even: float64 ``x`` of any shape as float64 of the same
    shape."""
    fraction_bits, emin, emax = NEAREST[out]
    return round_significand(x, fraction_bits=fraction_bits, emin=emin, emax=emax, toward_zero=False)


def fused_sum(p: Tensor, e: Tensor, c: Tensor, *, align_bits: int, min_exponent: int, c_emin: int) -> Tensor:
    """``S = tz_q(c) + sum_k tz_q(p_k)``, exact.

    Parameters
    ----------
    p, e : Tensor, products float64 ``[..., G]`` and their exponents int32 ``[..., G]`` (:data:`ABSENT` for zeros).
    c : Tensor, accumulator float64 ``[...]``, finite.
    align_bits : int, ``t``.
    min_exponent, c_emin : int, least exponent of the alignment; fixed exponent of subnormal ``c``.

    Returns float64 ``[...]``; an all-zero sum is +0.
    """
    m = torch.maximum(e.amax(dim=-1), exponent(c, emin=c_emin)).clamp(min=min_exponent)
    quantum = m - align_bits
    total = truncate(p, quantum.unsqueeze(-1)).sum(dim=-1) + truncate(c, quantum)
    return (total + 0.0) * power_of_two(quantum)  # + 0.0 turns an all-zero sum into +0


def accumulate(
    p: Tensor, e: Tensor, c: Tensor, instruction: Instruction, *, out: torch.dtype = torch.float32
) -> Tensor:
    """Run products through as many instructions as they fill: ``d = sum_k p_k + c`` as the hardware adds.

    Parameters
    ----------
    p, e : Tensor
        Products float64 ``[..., K]`` and exponents int32 ``[..., K]``; short of a multiple of ``k`` zeros are
        understood.
    c : Tensor, float64 ``[...]``, holding values of ``out``.
    out : torch.dtype, float32, or float16 where the instruction has it.

    Returns float64 ``[...]`` of values of ``out``; a NaN or an infinity among the addends decides it as IEEE 754
    addition does.
    Raises NumericsError: the instruction has no such accumulator.
    """
    if out not in (torch.float32, torch.float16) or (out == torch.float16 and not instruction.float16_out):
        raise NumericsError(f"{instruction.name} has no {out} accumulator; use torch.float32")
    special = p.sum(dim=-1) + c
    settled = ~torch.isfinite(special)
    if settled.any():
        p, c = torch.where(torch.isfinite(p), p, 0.0), torch.where(settled, 0.0, c)
    for start in range(0, p.shape[-1], instruction.k):
        part = slice(start, start + instruction.k)
        c = _instruction_step(p[..., part], e[..., part], c, instruction, out)
    return torch.where(settled, special, c) if settled.any() else c


def _instruction_step(p: Tensor, e: Tensor, c: Tensor, instruction: Instruction, out: torch.dtype) -> Tensor:
    """One instruction, with overflowed accumulators kept as they are."""
    overflowed = ~torch.isfinite(c)
    if overflowed.any():
        before, c = c, torch.where(overflowed, 0.0, c)
    if instruction.sum is Sum.FUSED_THEN_ADD:
        total = _groups(p, e, torch.zeros_like(c), instruction, out)
        # Two float32 of far exponents do not fit a float64 sum: add them with their rounding error.
        result = round_to_nearest(round_to_odd(*two_sum(total, c)), out)
    else:
        result = _groups(p, e, c, instruction, out)
    return torch.where(overflowed, before, result) if overflowed.any() else result


def _groups(p: Tensor, e: Tensor, c: Tensor, instruction: Instruction, out: torch.dtype) -> Tensor:
    """The groups of one instruction, one after the other."""
    if instruction.order is Order.INTERLEAVED:
        index = torch.arange(p.shape[-1], device=p.device)
        first = index % 4 < 2
        splits = [g for half in (index[first], index[~first]) for g in torch.split(half, instruction.group)]
    else:
        splits = list(torch.split(torch.arange(p.shape[-1], device=p.device), instruction.group))
    for split in splits:
        if split.numel():
            c = _group_step(p[..., split], e[..., split], c, instruction, out)
    return c


def _group_step(p: Tensor, e: Tensor, c: Tensor, instruction: Instruction, out: torch.dtype) -> Tensor:
    kind = instruction.sum
    if kind is Sum.EXACT:
        return _exact_step(p, c)
    if kind is Sum.TREE_FLUSH:
        return _tree_step(p, c)
    if kind in (Sum.LATE_FLOOR, Sum.LATE_FLOOR_ODD_EVEN):
        return _late_floor_step(p, e, c, instruction)
    assert instruction.align_bits is not None
    c_emin = FLOAT16_EMIN if out == torch.float16 else FLOAT32_EMIN
    total = fused_sum(p, e, c, align_bits=instruction.align_bits, min_exponent=instruction.min_exponent, c_emin=c_emin)
    return round_accumulator(total, instruction, out=out)


def scaled_addends(
    a: Operand, b: Operand, a_scale: Tensor, b_scale: Tensor, instruction: Instruction
) -> tuple[Tensor, Tensor]:
    """What an instruction with block scales adds (float64), and the exponents at which it aligns (int32): both
    ``[..., K]``, or for FP4 ``[..., K / 16]``.

    mxf8f6f4: products times both scales ``[..., K]``, exponents ``E(a) + E(b) + E(sa) + E(sb)``. FP4: the exact sum of
    16 products (``summed``) times the scales' significands ``[..., K / 16]``, at the exponent of the scales alone.
    Which zeros have the exponent :data:`ABSENT` is the instruction's ``zeros``. The sign of an E4M3 scale is ignored
    (UE4M3); a NaN among scales makes its addends NaN.

    Parameters
    ----------
    a, b : Operand, ``[..., K]``, broadcast; FP4: ``K % 16 == 0``.
    a_scale, b_scale : Tensor, float64, one for each product ``[..., K]``; FP4: one for each 16 ``[..., K / 16]``.
    """
    counted, p = instruction.zeros is Zeros.COUNTED, a.values * b.values
    if instruction.scale_format == "float8_e4m3fn":
        a_scale, b_scale = a_scale.abs(), b_scale.abs()
    scale = a_scale * b_scale
    shift = scale_exponents(a_scale, instruction) + scale_exponents(b_scale, instruction)
    if instruction.sum is not Sum.BLOCK_SCALED_GROUPS:
        ea, eb = (x.exponents.clamp(min=FLOAT32_EMIN) if counted else x.exponents for x in (a, b))
        return p * scale, torch.where((p == 0) & (not counted), ABSENT, ea + eb + shift)
    if instruction.summed > 16:  # under one scale; the last sum may be of fewer
        scale, shift = (x[..., :: instruction.summed // 16] for x in (scale, shift))
        p = torch.nn.functional.pad(p, (0, -p.shape[-1] % instruction.summed))
    groups = p.reshape(*p.shape[:-1], -1, instruction.summed)
    addends = groups.sum(dim=-1) * scale
    if counted:
        return addends, shift.expand_as(addends)
    sums = instruction.zeros is Zeros.SUMS
    return addends, torch.where(addends == 0 if sums else (groups == 0).all(dim=-1) | (scale == 0), ABSENT, shift)


def scale_exponents(scale: Tensor, instruction: Instruction) -> Tensor:
    """Alignment exponents of float64 block scales ``scale`` of any shape, int32 of the same shape: those of their
    format; a zero has that of a zero float32."""
    assert instruction.scale_format is not None
    return torch.where(scale == 0, FLOAT32_EMIN, exponent(scale, emin=by_name(instruction.scale_format).emin))


def round_to_odd(high: Tensor, low: Tensor) -> Tensor:
    """``high + low`` rounded to odd in float64, of the same shape as both, so that a later rounding to fewer bits is a
    single one.

    Boldo and Melquiond: correct for any target with at least two bits fewer. ``|low| <= ulp(high) / 2``. Where ``high``
    is NaN or infinite it is the result.
    """
    bits = high.view(torch.int64)
    toward = torch.where((low > 0) == (high > 0), 1, -1)
    fix = (low != 0) & ((bits & 1) == 0) & torch.isfinite(high)
    return torch.where(fix, bits + toward, bits).view(torch.float64)


def fma32(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``fl32(a * b + c)`` with one rounding, for float32 tensors whose shapes broadcast: float32 of that shape. NaN,
    infinities as IEEE 754."""
    product = a.to(torch.float64) * b.to(torch.float64)  # 48 bits: exact
    high, low = two_sum(product, c.to(torch.float64))
    return torch.where(torch.isfinite(high), round_to_odd(high, low), high).to(torch.float32)


def float32_scale(scale: Tensor) -> Tensor:
    """``scale`` of any shape (float32, or E8M0 codes) as float32 of the same shape, exactly; NaN stays NaN."""
    return scale if scale.dtype == torch.float32 else decode(scale).to(torch.float32)


def _exact_step(p: Tensor, c: Tensor) -> Tensor:
    """All addends exactly, one rounding to nearest (gfx908).

    Passes of error-free sums turn the addends into parts of which each is at most half an ulp of the next; the last
    is then the rounded sum, and the one before it has the sign of everything that is missing.
    """
    parts = [*p.unbind(dim=-1), c]
    for _ in parts:
        for i in range(1, len(parts)):
            parts[i], parts[i - 1] = two_sum(parts[i], parts[i - 1])
    return round_to_nearest(round_to_odd(parts[-1], parts[-2]), torch.float32)


def _tree_step(p: Tensor, c: Tensor) -> Tensor:
    """Pairwise float32 tree, then + c; every result flushed (gfx90a)."""
    terms = flush(p.to(torch.float32))
    while terms.shape[-1] > 1:
        if terms.shape[-1] % 2:
            terms = torch.nn.functional.pad(terms, (0, 1))
        terms = flush(terms[..., 0::2] + terms[..., 1::2])
    return flush(flush(c.to(torch.float32)) + terms[..., 0]).to(torch.float64)


def flush(x: Tensor) -> Tensor:
    """``x`` of any shape, float32, with subnormals replaced by zeros of their sign: float32 of the same shape."""
    return torch.where(x.abs() < 2.0**FLOAT32_EMIN, x * 0.0, x)


def _late_floor_step(p: Tensor, e: Tensor, c: Tensor, instruction: Instruction) -> Tensor:
    """CDNA3: products by themselves, then floored onto a grid common with c, then rounded to nearest.

    FP8 sums even and odd products apart and drops a ``c`` that lies more than 25 binades below.
    """
    t, wide = instruction.align_bits, instruction.wide_out_bits
    assert t is not None and wide is not None
    odd_even = instruction.sum is Sum.LATE_FLOOR_ODD_EVEN
    halves = [(p, e)]
    if odd_even and p.shape[-1] > 1:  # a single product has no odd neighbour
        halves = [(p[..., 0::2], e[..., 0::2]), (p[..., 1::2], e[..., 1::2])]
    sums, tops = [], []
    for values, exponents in halves:
        top = exponents.amax(dim=-1)
        top = torch.where(top <= ABSENT // 2, instruction.min_exponent, top)
        sums.append(truncate(values, (top - t).unsqueeze(-1)).sum(dim=-1) * power_of_two(top - t))
        tops.append(top)
    top = torch.stack(tops).amax(dim=0)
    if odd_even:
        total = sum((torch.floor(s * power_of_two(t - top)) for s in sums), torch.zeros_like(c))
        total = total * power_of_two(top - t)
    else:
        total = sums[0]
    c_exponent = exponent(c, emin=FLOAT32_EMIN).clamp(min=FLOAT32_EMIN)
    common = torch.maximum(top, c_exponent)
    total = torch.floor(total * power_of_two(wide - common)) * power_of_two(common - wide)
    floored = torch.floor(c * power_of_two(t - common)) * power_of_two(common - t)
    if odd_even:
        floored = torch.where(c_exponent >= common - 25, floored, 0.0)
    return round_significand(total + floored, fraction_bits=23, emin=FLOAT32_EMIN, emax=FLOAT32_EMAX, toward_zero=False)
