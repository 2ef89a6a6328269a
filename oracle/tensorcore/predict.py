"""The exact bits a kernel writes, given its schedule.

:func:`predict_product` evaluates ``y[m, n] = sum_b a_scale b_scale sum_k a b (+ bias) (+ c)`` as the hardware does:
chains of fused sums (:mod:`oracle.tensorcore.fused`), promotions, scales and the store, all in the order that
the schedule names. :func:`mma` evaluates one instruction, ``d = a.b + c``.

Engines ``cpu`` (compiled) and ``cuda`` give the same bits as ``torch``, the readable definition; ``auto``
takes the fastest that supports the product where its tensors are.

NaN and infinities are those of IEEE 754 addition; every NaN that is stored is the canonical one (0x7FFFFFFF, 0x7FFF).
Source: derived from :mod:`oracle.tensorcore.fused` and the schedules, of which each names its own.

Memory of the torch engine beyond operands and result: below 256 MiB for any shape (output tiles, K slices).
Not covered: kernels that no schedule describes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from oracle import loading
from oracle.errors import NumericsError, ShapeError
from oracle.numbers import fast_math
from oracle.numbers.formats import in_blocks
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.tensorcore.cpu_cold import waits
from oracle.tensorcore.fused import ABSENT, Operand, accumulate, float32_scale, flush, fma32, operand, scaled_addends
from oracle.tensorcore.instructions import NAN_FLOAT16, NAN_FLOAT32, Instruction, Sum
from oracle.tensorcore.instructions import instruction as instruction_named
from oracle.tensorcore.packing import narrow_lanes, supported
from oracle.tensorcore.schedules import Epilogue, Promotion, Scales, Schedule, get

if TYPE_CHECKING:
    from oracle.truth.gemm import Decoded, ScaledProduct

Engine = Literal["auto", "torch", "cpu", "cuda"]

LITTLE = 1 << 22  # products of a device that the CPU predicts faster than the device sums one chain over K
_TILE_M, _TILE_N = 128, 512  # output tile of the torch engine
_SLICE = 1 << 19  # products held at once by the general form: 4 MiB a temporary


def predict_product(
    product: ScaledProduct, schedule: Schedule | str, *, out_dtype: torch.dtype, engine: Engine = "auto"
) -> Tensor:
    """Bits of a kernel that computes ``product`` by ``schedule``.

    Parameters
    ----------
    product : ScaledProduct, ``a [M, K]``, ``b [N, K]``, scales, optional bias.
    schedule : Schedule or str, a record, or the name of a registered one (:func:`oracle.tensorcore.schedules.get`).
    out_dtype : torch.dtype
        float32, bfloat16 or float16: the float32 result rounded to nearest even, overflow to infinity.
    engine : ``"auto"``, ``"torch"``, ``"cpu"`` or ``"cuda"``; all give the same bits.
        ``"auto"`` takes the fastest one; for a small product on a device that is the CPU's.

    Returns
    -------
    Tensor
        ``[M, N]`` of ``out_dtype`` on the operands' device. NaNs are canonical (0x7FFFFFFF, 0x7FFF).

    Raises
    ------
    NumericsError
        Unknown schedule or engine, or a product that the schedule cannot compute (the reason is in the message).
    """
    if isinstance(schedule, str):
        schedule = get(schedule)
    little = product.M * product.N * product.K <= LITTLE
    if engine == "auto" and product.nearby is not None and (little or _engine(product, schedule, engine) is None):
        return predict_product(product.nearby, schedule, out_dtype=out_dtype).to(product.a.device)
    schedule.check(product, out_dtype=out_dtype)
    if product.c is not None:
        sums = predict_product(replace(product, c=None), schedule, out_dtype=torch.float32, engine=engine)
        if product.c.dtype is torch.bfloat16:
            sums = store(sums, torch.bfloat16).to(torch.float32)
        return store(product.c.to(torch.float32) + sums, out_dtype)
    if schedule.dequantises or schedule.widens:
        seen, plain = schedule.lowered(product), replace(schedule, dequantises=False, widens=False)
        assert seen is not None, "checked"
        return predict_product(seen, plain, out_dtype=out_dtype, engine=engine)
    if schedule.bias_after_cast:
        assert product.bias is not None, "checked"
        plain = replace(schedule, bias_after_cast=False)
        stored = predict_product(replace(product, bias=None), plain, out_dtype=out_dtype, engine=engine)
        return store(stored.to(torch.float32) + product.bias.to(torch.float32), out_dtype)
    if schedule.split is not None:
        return store(finish(_partial_sums(product, schedule, engine), product, schedule), out_dtype)
    fast = None if engine == "auto" and _waits(product, schedule) else _engine(product, schedule, engine)
    if fast is not None:
        bits: Tensor = fast.predict(product, schedule, out_dtype=out_dtype)
        return bits
    near = _on_the_cpu(product) if engine == "auto" else None
    if near is not None and (fast := _engine(near, schedule, engine)) is not None:
        bits = fast.predict(near, schedule, out_dtype=out_dtype)
        return bits.to(product.a.device)
    return store(_float32(product, schedule), out_dtype)


def _on_the_cpu(product: ScaledProduct) -> ScaledProduct | None:
    """The copy on the CPU of a device's product, None for a product of the CPU. It serves a schedule that no engine of
    the device takes: the definition would start several operations on the device for every instruction."""
    return product.to("cpu") if product.a.is_cuda else None


def predict_blocks(product: ScaledProduct, schedule: Schedule) -> Tensor | None:
    """Float32 ``[B, M, N]``: the bits of every K block alone; None where no engine gives them together."""
    if product.a.is_cuda or product.B == 1 or schedule.why_not(product, out_dtype=torch.float32):
        return None
    if schedule.dequantises or schedule.widens or schedule.split is not None or _waits(product, schedule):
        return None
    engine = _engine(product, schedule, "auto")
    bits: Tensor | None = None if engine is None else engine.blocks(product, schedule)
    return bits


def mma(
    instruction: Instruction | str,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    out: torch.dtype,
    a_format: str | None = None,
    b_format: str | None = None,
) -> Tensor:
    """``d[i] = sum_k a[i, k] b[i, k] + c[i]`` through one instruction (or a chain of them when K is longer).

    Parameters
    ----------
    a, b : Tensor
        ``[..., K]`` rows, paired; in the operand dtype, or float32 values with ``a_format`` / ``b_format`` named.
    c : Tensor, ``[...]``; rounded to ``out`` (nearest even) first, as a kernel that loads it does.
    out : torch.dtype, float32, or float16 where the instruction has it.

    Returns ``[...]`` of dtype ``out``, NaNs canonical.
    Raises ShapeError: the shapes disagree; DtypeError: the instruction does not take the operands; NumericsError: it
    has no such accumulator.
    """
    if isinstance(instruction, str):
        instruction = instruction_named(instruction)
    if a.shape != b.shape or a.shape[:-1] != c.shape:
        raise ShapeError(f"a {list(a.shape)} and b {list(b.shape)} must agree, c {list(c.shape)} be one per row")
    left, right = operand(a, instruction, format=a_format), operand(b, instruction, format=b_format)
    p = left.values * right.values
    e = torch.where(p == 0, ABSENT, left.exponents + right.exponents)
    start = to_dtype(c.to(torch.float64), out, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
    total = accumulate(p, e, start.to(torch.float64), instruction, out=out)
    return store(total.to(torch.float32), out)


def scaled_mma(
    instruction: Instruction | str, a: Operand, b: Operand, a_scale: Tensor, b_scale: Tensor, c: Tensor
) -> Tensor:
    """``d[i] = sum_k sa[i, k] sb[i, k] a[i, k] b[i, k] + c[i]`` through a chain of block-scaled instructions.

    Parameters
    ----------
    a, b : Operand, ``[..., K]`` rows, paired (:func:`oracle.tensorcore.fused.operand` decodes codes).
    a_scale, b_scale : Tensor, ``[..., ceil(K / block)]``, float32 or codes of the scale format.
    c : Tensor, ``[...]``, float32.

    Returns float32 ``[...]``, NaNs canonical. Raises ShapeError: a length that the instruction cannot take.
    """
    if isinstance(instruction, str):
        instruction = instruction_named(instruction)
    fp4 = instruction.sum is Sum.BLOCK_SCALED_GROUPS
    k, unit = a.values.shape[-1], 16 if fp4 else 1
    if instruction.scale_block is None or k % unit:
        raise ShapeError(f"{instruction.name} takes no K={k} with block scales; pad with zeros to a multiple of {unit}")
    blocks = torch.arange(0, k, unit, device=a.values.device) // instruction.scale_block
    sa, sb = (float32_scale(s).to(torch.float64)[..., blocks] for s in (a_scale, b_scale))
    p, e = scaled_addends(a, b, sa, sb, instruction)
    total, step = c.to(torch.float64), instruction.k // (instruction.summed if fp4 else 1)
    for start in range(0, p.shape[-1], step):
        part = slice(start, start + step)
        total = accumulate(p[..., part], e[..., part], total, instruction)
    return store(total.to(torch.float32), torch.float32)


def store(acc: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Float32 ``acc`` of any shape rounded to nearest even into ``out_dtype``, same shape, NaNs canonical."""
    if out_dtype == torch.float32:
        return canonical_nan(acc.clone())
    if out_dtype == torch.bfloat16:
        return in_blocks(_bfloat16_bits, acc, dtype=torch.int16).view(torch.bfloat16)
    return canonical_nan(acc.to(torch.float16))  # keeps float16 subnormals where float32 ones are flushed


BELOW_HALF = 0x7FFF  # of the lower half of a float32, what rounds up to an odd code but leaves a tie at an even one


def _bfloat16_bits(acc: Tensor) -> Tensor:
    """:func:`store` into bfloat16, the upper half of a float32: half of the lower half's range is added, and one less
    where the last bit that stays is even."""
    bits = acc.view(torch.int32)
    code = (bits >> 16).bitwise_and_(1).add_(BELOW_HALF).add_(bits).bitwise_right_shift_(16).to(torch.int16)
    return code.masked_fill_(torch.isnan(acc), NAN_FLOAT16)


def canonical_nan(x: Tensor) -> Tensor:
    """Every NaN of ``x``, float32, bfloat16 or float16 of any shape, replaced, in place, by the hardware's own; returns
    the same tensor, of the same shape."""
    wide = x.dtype == torch.float32
    bits = x.view(torch.int32 if wide else torch.int16)
    bits.masked_fill_(torch.isnan(x), NAN_FLOAT32 if wide else NAN_FLOAT16)
    return x


def _engine(product: ScaledProduct, schedule: Schedule, engine: Engine) -> Any:
    """The compiled engine to use, or None for plain torch."""
    if engine not in ("auto", "torch", "cpu", "cuda"):
        raise NumericsError(f"no engine {engine!r}; engines: auto, torch, cpu, cuda")
    if engine == "torch":
        return None
    kind = engine if engine != "auto" else ("cuda" if product.a.is_cuda else "cpu")
    module = loading.compiled(f"oracle.tensorcore.engine_{kind}")
    if module is None:
        if engine == "auto":
            return None
        needed = {"cpu": "numba", "cuda": "triton"}[kind]
        raise NumericsError(f"engine {engine!r} needs {needed}; use engine='torch'")
    if module.supports(product, schedule):
        return module
    if engine == "auto":
        return None
    raise NumericsError(f"engine {engine!r} does not support {schedule.name} for this product; use engine='torch'")


def _waits(product: ScaledProduct, schedule: Schedule) -> bool:
    """Whether plain torch computes this product of the CPU although an engine would, which is not compiled yet."""
    if product.a.is_cuda or not supported(product, schedule):
        return False
    rescales, half = schedule.promotion is Promotion.RESCALE, schedule.accumulator is torch.float16
    narrow = narrow_lanes(schedule.instruction) and not rescales and not half
    return waits("truncating" if narrow else "wide", product.M, product.N, product.K)


def _partial_sums(product: ScaledProduct, schedule: Schedule, engine: Engine) -> Tensor:
    """The float32 sum of a split schedule before scales that its parts did not use."""
    assert schedule.split is not None
    inner = replace(schedule, split=None, epilogue=Epilogue.NONE)
    total = torch.zeros((product.M, product.N), dtype=torch.float32, device=product.a.device)
    for number, ranges in enumerate(schedule.split.pieces(product.K)):
        if ranges:
            part = predict_product(product.over(ranges), inner, out_dtype=torch.float32, engine=engine)
            total = part if number == 0 else total + part
    return total


def finish(acc: Tensor, product: ScaledProduct, schedule: Schedule) -> Tensor:
    """Scales that the sum did not use, then alpha, then the bias; ``acc`` float32 ``[M, N]`` of the whole ``product``.

    Two factors of alpha are multiplied first, in float32.
    """
    columns = torch.arange(product.N, device=acc.device) // product.b_rows
    sa, sb = float32_scale(product.a_scale)[:, 0, None], float32_scale(product.b_scale)[columns, 0][None, :]
    return finished(acc, sa, sb, product.bias, product.alpha, schedule)


def finished(
    acc: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None, alpha: Tensor | None, schedule: Schedule
) -> Tensor:
    """:func:`finish` of sums ``acc``, float32 of any shape, with the float32 scales ``sa`` and ``sb`` and the ``bias``
    (any float dtype) of each, of shapes that broadcast to it; ``alpha`` ``[1]`` or ``[2]``, float32."""
    bias = None if bias is None else bias.to(torch.float32)
    if alpha is not None:
        scaled = finished(acc, sa, sb, None, None, schedule)
        factor = alpha.to(torch.float32).prod().expand_as(scaled)
        if bias is None:
            return factor * scaled
        return fma32(factor, scaled, bias) if schedule.fused_bias else factor * scaled + bias
    if schedule.epilogue is Epilogue.NONE:
        return acc if bias is None else acc + bias
    if schedule.flushes:
        return _flushed(acc, sa, sb, bias, schedule)
    inner, outer = epilogue(schedule.epilogue, acc, sa, sb)
    if bias is None:
        return inner * outer
    return fma32(outer, inner, bias) if schedule.fused_bias else inner * outer + bias


def _flushed(acc: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None, schedule: Schedule) -> Tensor:
    """The scaled sum and the bias by instructions with ``.ftz``."""
    inner, outer = epilogue(schedule.epilogue, *(flush(x) for x in (acc, sa, sb)))
    inner, outer = flush(inner), flush(outer)
    return flush(inner * outer if bias is None else fma32(outer, inner, flush(bias)))


def epilogue(kind: Epilogue, acc: Tensor, sa: Tensor, sb: Tensor) -> tuple[Tensor, Tensor]:
    """The two float32 factors, of shapes that broadcast to that of ``acc``, of which a scaled result is the product,
    the inner one first.

    ``acc`` ``[M, N]``, ``sa`` ``[M, 1]`` and ``sb`` ``[1, N]``, or what broadcasts so, are float32; NaN stays.
    """
    if kind is Epilogue.COL_THEN_ROW:
        return sb * acc, sa
    return (acc * sa, sb) if kind is Epilogue.ROW_THEN_COL else (acc, sa * sb)


def joined(kind: Promotion, total: Tensor, part: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    """A finished chain ``part`` joined to the sum ``total``, float32 of one shape, with the block's scales ``sa`` and
    ``sb``, float32 of shapes that broadcast to it."""
    if kind in (Promotion.NONE, Promotion.RESCALE):
        return part
    if kind is Promotion.ADD:
        return total + part
    if kind is Promotion.FMA:
        return fma32(sa * sb, part, total)
    if kind is Promotion.MUL_ADD:
        return total + (sa * sb) * part
    if kind is Promotion.ROW_COL_FMA:
        return fma32(part * sa, sb, total)
    if kind is Promotion.COL_ROW_FMA:
        return fma32(part * sb, sa, total)
    return total + (part * sa) * sb


def rescale(now: Tensor, before: Tensor) -> Tensor:
    """The factor, float32, from a sum under the scales ``before`` to one under ``now``, float32 of one shape:
    ``div.full``."""
    return fast_math.divide(before.to(torch.float64), now.to(torch.float64), flushed=False).to(torch.float32)


def _float32(product: ScaledProduct, schedule: Schedule) -> Tensor:
    """The float32 result before the store, tile by tile."""
    a, b = _decoded(product.left, schedule.instruction), _decoded(product.right, schedule.instruction)
    out = torch.empty((product.M, product.N), dtype=torch.float32, device=product.a.device)
    for j in range(0, product.N, _TILE_N):
        columns = slice(j, min(j + _TILE_N, product.N))
        part = product.columns(columns.start, columns.stop)
        for i in range(0, product.M, _TILE_M):
            rows = slice(i, min(i + _TILE_M, product.M))
            tile = _Tile(part.rows(rows.start, rows.stop), schedule, _rows(a, rows), _rows(b, columns))
            out[rows, columns] = tile.result()
    return out


def _decoded(side: Decoded, inst: Instruction) -> Operand:
    """The operand as the instruction sees it; TF32 and unpacked FP4 codes have no value without the instruction."""
    if side.codes.dtype == torch.float32 or not side.codes.is_floating_point():
        return operand(side.codes, inst)
    return operand(side.value(), inst, format=side.fmt.name)


def _rows(x: Operand, rows: slice) -> Operand:
    return Operand(x.values[rows], x.exponents[rows])


class _Tile:
    """One output tile: ``product`` restricted to it, and its operands."""

    def __init__(self, product: ScaledProduct, schedule: Schedule, a: Operand, b: Operand) -> None:
        self.product, self.schedule, self.a, self.b = product, schedule, a, b
        self.a_scale = float32_scale(product.a_scale).expand(product.M, -1)
        self.b_scale = float32_scale(product.b_scale)

    def result(self) -> Tensor:
        """Promotions over K, then the epilogue."""
        k = self.product.K
        interval = self.schedule.interval or max(k, 1)
        total = torch.zeros((self.product.M, self.product.N), dtype=torch.float32, device=self.a.values.device)
        rescales, before = self.schedule.promotion is Promotion.RESCALE, torch.ones_like(total)
        for start in range(0, k, interval):
            block = start // self.product.block if self.product.B > 1 else 0
            if rescales:
                now = self.a_scale[:, block, None] * self.b_scale[None, :, block]
                total, before = total * rescale(now, before), now
            total = self.promote(total, self.chain(start, min(start + interval, k), total if rescales else None), block)
        return finish(total * before if rescales else total, self.product, self.schedule)

    def promote(self, total: Tensor, part: Tensor, block: int) -> Tensor:
        """Join a finished chain to the sum."""
        sa, sb = self.a_scale[:, block, None], self.b_scale[None, :, block]
        return joined(self.schedule.promotion, total, part, sa, sb)

    def chain(self, start: int, stop: int, first: Tensor | None = None) -> Tensor:
        """One chain of instructions over ``[start, stop)``, from zero or from ``first``, float32 ``[M, N]``."""
        step = self.schedule.instruction.k
        rows = max(1, _SLICE // (self.product.N * step))
        parts = []
        for i in range(0, self.product.M, rows):
            extent = (min(rows, self.product.M - i), self.product.N)
            acc = torch.zeros(extent, dtype=torch.float64, device=self.a.values.device)
            if first is not None:
                acc = first[i : i + rows].to(torch.float64)
            for k in range(start, stop, step):
                p, e = self.products(slice(i, i + rows), k, min(k + step, stop))
                acc = accumulate(p, e, acc, self.schedule.instruction, out=self.schedule.accumulator)
            parts.append(acc)
        return torch.cat(parts).to(torch.float32)

    def products(self, rows: slice, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Products ``[m, N, k]`` of one instruction and their exponents, block scales included."""
        ks, inst = slice(start, stop), self.schedule.instruction
        a = Operand(self.a.values[rows, None, ks], self.a.exponents[rows, None, ks])
        b = Operand(self.b.values[None, :, ks], self.b.exponents[None, :, ks])
        if self.schedule.scales is not Scales.OPERANDS:
            p = a.values * b.values
            return p, torch.where(p == 0, ABSENT, a.exponents + b.exponents)
        blocks = torch.arange(start, stop, device=a.values.device) // self.product.block
        if inst.sum is Sum.BLOCK_SCALED_GROUPS:
            if (stop - start) % 16:
                k = self.product.K
                raise ShapeError(f"K={k} is not a multiple of 16, which {self.schedule.name} needs; pad with zeros")
            blocks = blocks[::16]
        sa, sb = self.a_scale[rows].to(torch.float64), self.b_scale.to(torch.float64)
        return scaled_addends(a, b, sa[:, None, blocks], sb[None, :, blocks], inst)
