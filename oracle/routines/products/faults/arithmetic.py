"""Faults of numbers in scaled products: codes decoded wrongly, right operands added wrongly, results stored wrongly.

Codes that a fault turns into values outside E4M3 are carried as float16, which holds them all; the sum is then
taken in exact arithmetic, since no instruction has such operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from oracle.numbers.formats import decode, of_dtype
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.routines.fault import ARITHMETIC, CAST, Call, Change, Faults, WhyNot, both, need, way
from oracle.routines.ideas import itself
from oracle.routines.mutants import PIECE, Sum
from oracle.routines.products.faults.scales import look
from oracle.routines.products.roles import each, matrix, several_blocks
from oracle.routines.products.traits import BIASED, BLOCKS, PRODUCT
from oracle.tensorcore.fused import ABSENT, accumulate, float32_scale, operand
from oracle.tensorcore.predict import store
from oracle.tensorcore.schedules import Promotion, Schedule
from oracle.truth.gemm import ALL, ScaledProduct

# A fault is a row: what is wrong and where it was met; the change; when it shows.
FAULTS = Faults(PRODUCT)
fault = FAULTS.declare

E4M3 = torch.float8_e4m3fn
FIRST = 1 << 16  # codes that are looked at first
NO_SUBNORMALS = "no operand is subnormal"
NO_NAN = "no operand is NaN"
ALL_ZERO = "every code is zero"
has_bias = need(lambda call: "bias" in call.inputs, "there is no bias")


# --- operands: E4M3 codes decoded wrongly -------------------------------------------------------------------


def _codes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _map(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A change of the codes (uint8 to uint8)."""
    return lambda x: change(_codes(x)).view(x.dtype)


def _by_code(role: str, change: Callable[[Tensor], Tensor]) -> Callable[[ScaledProduct], ScaledProduct]:
    """``change`` of every element of a one-byte operand by a table: it maps codes one by one."""

    def product(product: ScaledProduct) -> ScaledProduct:
        x: Tensor = getattr(product, role)
        table = change(torch.arange(256, dtype=torch.uint8, device=x.device).view(x.dtype))
        if x.device.type == "cpu":  # NumPy takes bytes as indices
            bits = table.view({1: torch.uint8, 2: torch.int16}[table.element_size()]).numpy()
            by_byte = torch.from_numpy(np.take(bits, _codes(x).numpy(), mode="clip")).view(table.dtype)
        else:
            by_byte = table.view(torch.uint8).view(256, -1)[_codes(x).to(torch.int32)].flatten(-2).view(table.dtype)
        return replace(product, a=by_byte) if role == "a" else replace(product, b=by_byte)

    return product


def _has(role: str, mask: Callable[[Tensor], Tensor], missing: str) -> WhyNot:
    """The matrix of ``role`` is E4M3 and holds such a code; the first codes are looked at first."""

    def holds(call: Call) -> bool:
        few, x = (name + f" codes of {role}" for name in ("first", "all")), matrix(call, role)
        parts = (lambda: _present(x.flatten()[:FIRST]), lambda: _present(x))
        return any(bool(mask(call.cached(name, codes)).any()) for name, codes in zip(few, parts, strict=True))

    return both(
        need(lambda c: matrix(c, role).dtype == E4M3, lambda c: f"{role} is {matrix(c, role).dtype}, not {E4M3}"),
        need(holds, missing),
    )


def _present(x: Tensor) -> Tensor:
    """The codes (uint8) that occur in ``x``, marked two at a time."""
    codes = _codes(x).flatten()
    even = len(codes) // 2 * 2
    if x.device.type != "cpu":
        return torch.nonzero(torch.bincount(codes.to(torch.int64), minlength=256))[:, 0].to(torch.uint8)
    seen = np.zeros(1 << 16, np.bool_)
    seen[codes[:even].numpy().view(np.uint16)] = True
    pairs = np.flatnonzero(seen)
    present = np.unique(np.concatenate([pairs & 0xFF, pairs >> 8, codes[even:].numpy()]))
    return torch.from_numpy(present.astype(np.uint8))


def _subnormal(codes: Tensor) -> Tensor:
    return ((codes & 0x78) == 0) & ((codes & 0x07) != 0)


def _nan(codes: Tensor) -> Tensor:
    return (codes & 0x7F) == 0x7F


def _nonzero(codes: Tensor) -> Tensor:
    return (codes & 0x7F) != 0


def _half(values: Tensor) -> Tensor:
    return to_dtype(values, torch.float16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def _sign(x: Tensor) -> Tensor:
    return 1.0 - 2.0 * (_codes(x) >> 7).to(torch.float64)


def _as_fnuz(x: Tensor) -> Tensor:
    """The bits read as E4M3FNUZ: half the value, 0x80 a NaN, 0x7F and 0xFF finite."""
    return _half(decode(_codes(x), of_dtype(torch.float8_e4m3fnuz)))


def _normal_formula(x: Tensor) -> Tensor:
    """Subnormal codes decoded as (1 + f/8) 2**-7, and zero with them left at zero."""
    codes = _codes(x)
    wrong = _sign(x) * (1.0 + (codes & 0x07).to(torch.float64) / 8.0) * 2.0**-7
    return _half(torch.where(_subnormal(codes), wrong, decode(x)))


def _byte_pairs(codes: Tensor) -> Tensor:
    """A tile transposed in units of two bytes: the off-diagonal of every 2 x 2 block of codes is exchanged."""
    codes = codes.clone()
    rows, columns = codes.shape[0] // 2 * 2, codes.shape[1] // 2 * 2
    upper = codes[0:rows:2, 1:columns:2].clone()
    codes[0:rows:2, 1:columns:2] = codes[1:rows:2, 0:columns:2]
    codes[1:rows:2, 0:columns:2] = upper
    return codes


def _saturating_at(limit: int) -> Callable[[Tensor], Tensor]:
    def change(codes: Tensor) -> Tensor:
        magnitude = codes & 0x7F
        return codes & 0x80 | torch.where(magnitude == 0x7F, magnitude, magnitude.clamp(max=limit))

    return change


def _above(limit: int) -> Callable[[Tensor], Tensor]:
    return lambda codes: ((codes & 0x7F) > limit) & ((codes & 0x7F) != 0x7F)


for code, value, seen in ((0x78, 256, "sglang PR 40581"), (0x77, 240, "vllm PR 12134")):
    fault(
        f"A codes saturate at {value}",
        CAST,
        seen=seen,
        by_code=True,
        product=_by_code("a", _map(_saturating_at(code))),
        needs=_has("a", _above(code), f"no code above {value}"),
    )
for name, seen, role, change, needs in (
    *(
        (
            f"{role.upper()} codes read as E4M3FNUZ without doubling the scale",
            "vllm PR 12134",
            role,
            _as_fnuz,
            _has(role, _nonzero, ALL_ZERO),
        )
        for role in ("a", "b")
    ),
    (
        "A codes read as E5M2",
        "vllm PR 12134",
        "a",
        lambda x: _codes(x).view(torch.float8_e5m2),
        _has("a", _nonzero, ALL_ZERO),
    ),
    (
        "NaN code of A decoded as 480",
        "ml_dtypes 400",
        "a",
        lambda x: _half(torch.where(_nan(_codes(x)), _sign(x) * 480.0, decode(x))),
        _has("a", _nan, NO_NAN),
    ),
    (
        "NaN code of A turned into 448",
        "Model-Optimizer PR 1397",
        "a",
        _map(lambda c: torch.where(_nan(c), c - 1, c)),
        _has("a", _nan, NO_NAN),
    ),
    *(
        (
            f"{role.upper()} subnormals flushed to zero",
            "flashinfer PR 3932",
            role,
            _map(lambda c: torch.where(_subnormal(c), c & 0x80, c)),
            _has(role, _subnormal, NO_SUBNORMALS),
        )
        for role in ("a", "b")
    ),
    (
        "A subnormals decoded with the normal formula",
        "Model-Optimizer PR 1397",
        "a",
        _normal_formula,
        _has("a", _subnormal, NO_SUBNORMALS),
    ),
    (
        "sign of A lost",
        "flashinfer PR 3932",
        "a",
        _map(lambda c: c & 0x7F),
        _has("a", lambda c: _nonzero(c) & (c >= 0x80), "A is never negative"),
    ),
):
    fault(name, CAST, seen=seen, by_code=True, product=_by_code(role, change), needs=needs)
fault(
    "B tile transposed by byte pairs",
    CAST,
    seen="pith-train PR 74",
    read=each("b", _map(_byte_pairs)),
    needs=_has("b", _nonzero, ALL_ZERO),
)


# --- the store ----------------------------------------------------------------------------------------------


def _out(*dtypes: torch.dtype) -> WhyNot:
    return need(lambda call: call.out_dtype in dtypes, lambda call: f"the output is {call.out_dtype}")


def _to_out(call: Call, acc: Tensor, rounding: Rounding, overflow: Overflow = Overflow.INF) -> Tensor:
    return to_dtype(acc.to(torch.float64), call.out_dtype, rounding=rounding, overflow=overflow)


def _keep_nan(acc: Tensor, out: Tensor) -> Tensor:
    return torch.where(torch.isnan(acc), torch.full_like(out, torch.nan), out)


def _truncated(call: Call, acc: Tensor) -> Tensor:
    """Low bits cut off; infinity stays infinity."""
    cut = _to_out(call, acc, Rounding.TOWARD_ZERO, Overflow.SATURATE)
    return torch.where(torch.isfinite(acc), cut, acc.to(call.out_dtype))


def _stochastic(call: Call, acc: Tensor) -> Tensor:
    """Up or down with the probability of the distance, from a fixed stream."""
    down, up = _to_out(call, acc, Rounding.DOWN), _to_out(call, acc, Rounding.UP)
    low, high = decode(down), decode(up)
    share = torch.where(high > low, (acc.to(torch.float64) - low) / (high - low), torch.zeros_like(low))
    seeded = torch.Generator().manual_seed(7)
    draw = torch.rand(acc.shape, generator=seeded, dtype=torch.float64, device="cpu").to(acc.device)
    return _keep_nan(acc, torch.where(draw < share, up, down))


def _through(dtype: torch.dtype) -> Change:
    return lambda call, acc: store(store(acc, dtype).to(torch.float32), call.out_dtype)


def _replaced(mask: Callable[[Tensor], Tensor], by: Callable[[Tensor], Tensor]) -> Change:
    """The right store, with such elements replaced."""

    def change(call: Call, acc: Tensor) -> Tensor:
        out = store(acc, call.out_dtype)
        return torch.where(mask(out), by(out), out)

    return change


NARROW = _out(torch.bfloat16, torch.float16)
EXACT = "every sum is a value of the output dtype"
NO_OVERFLOW = "no sum exceeds the output dtype"
fault(
    "store rounds half away from zero",
    CAST,
    seen="flashinfer 5128",
    store=lambda call, acc: _keep_nan(acc, _to_out(call, acc, Rounding.NEAREST_AWAY)),
    same_if="no sum is a tie of the output dtype",
)
fault("store truncates", CAST, seen="H200 mutants", store=_truncated, needs=NARROW, same_if=EXACT)
fault("store rounds stochastically", CAST, seen="flashinfer 5128", store=_stochastic, needs=NARROW, same_if=EXACT)
fault(
    "{}",
    CAST,
    over=(
        way("store through float16", torch.float16, seen="H200 mutants", needs=_out(torch.bfloat16, torch.float32)),
        way(
            "store through bfloat16",
            torch.bfloat16,
            seen="TensorRT-LLM PR 14464",
            needs=_out(torch.float16, torch.float32),
            same_if="every sum is a bfloat16 value",
        ),
    ),
    store=_through,
)
fault(
    "bfloat16 bits in a float16 buffer",
    CAST,
    seen="FlashInfer 0.6.18 on an H200",
    store=lambda acc: store(acc, torch.bfloat16).view(torch.float16),
    needs=_out(torch.float16),
    same_if="every sum is zero",
)
fault(
    "{}",
    CAST,
    seen="flashinfer PR 3932",
    needs=_out(torch.float16),
    same_if=NO_OVERFLOW,
    over=(
        way("overflow stored as NaN", _replaced(torch.isinf, lambda out: torch.full_like(out, torch.nan))),
        way(
            "overflow stored as the largest finite value",
            _replaced(torch.isinf, lambda out: torch.sign(out) * torch.finfo(out.dtype).max),
        ),
    ),
    store=itself,
)
fault(
    "NaN stored as zero",
    CAST,
    seen="Model-Optimizer PR 1397",
    store=_replaced(torch.isnan, torch.zeros_like),
    same_if="no element is NaN",
)


@fault(
    "bias added after the cast",
    CAST,
    seen="H200 mutants",
    on=BIASED,
    needs=both(has_bias, need(lambda c: c.out_dtype != torch.float32, "a float32 store rounds nothing")),
    same_if="both roundings are exact",
)
def sum_stored_before_the_bias(call: Call, total: Sum) -> Tensor:
    """The sum stored in the output dtype, then the bias added in float32; the store rounds a second time."""
    assert total.product.bias is not None
    first = store(total.right(replace(total.product, bias=None)), call.out_dtype)
    return (decode(first) + decode(total.product.bias)[None, :]).to(torch.float32)


# --- the schedule -------------------------------------------------------------------------------------------


def _interval(call: Call) -> int:
    """Elements of K between promotions, 0 where there are none."""
    return (call.schedule.interval or 0) if call.schedule is not None else 0


aligned = need(
    lambda call: call.schedule is not None and call.schedule.instruction.align_bits is not None,
    "the arithmetic aligns nothing",
)
promoted = both(
    need(lambda call: _interval(call) > 0, "the arithmetic promotes nothing"),
    need(lambda call: _interval(call) < call.parts[0].product.K, "one interval covers K"),
)
may_promote_later = both(
    promoted,
    need(
        lambda c: c.schedule is None or c.schedule.promotion is Promotion.ADD,
        "every block has scales of its own and must be promoted",
    ),
)
several_intervals = need(lambda call: call.parts[0].product.K > 128, "K is one block")


def _twice(schedule: Schedule) -> Schedule:
    assert schedule.interval is not None
    return replace(schedule, name=f"{schedule.name} at twice the interval", interval=2 * schedule.interval)


def _second_scale_for_two(product: ScaledProduct) -> ScaledProduct:
    """Two blocks share one chain and the scales of the second (of the first where there is no second)."""
    last = torch.arange(1, product.B + 1, 2, device=product.a.device).clamp(max=product.B - 1)
    return replace(product, block=2 * product.block, a_scale=product.a_scale[:, last], b_scale=product.b_scale[:, last])


def _narrower(bits: int) -> Callable[[Schedule], Schedule]:
    def change(schedule: Schedule) -> Schedule:
        i = schedule.instruction
        assert i.align_bits is not None
        width = i.align_bits - bits
        narrow = replace(i, align_bits=width, out_bits=min(i.out_bits, width))
        return replace(schedule, name=f"{schedule.name} aligned to {width} bits", instruction=narrow)

    return change


RESCALED = 1 << 24  # products of a call that the definition of an instruction computes in two seconds
ONE_CHAIN = "no partial sum exceeds the accumulator"
fault(
    "{}",
    ARITHMETIC,
    seen="DeepGEMM 37",
    needs=may_promote_later,
    same_if=ONE_CHAIN,
    over=(
        way(
            "no promotion: one chain over K",
            lambda s: replace(s, name=f"{s.name} without promotion", interval=None, promotion=Promotion.NONE),
        ),
        way("promotion at twice the interval", _twice),
    ),
    schedule=itself,
)

fault(
    "two K blocks share one chain and the second's scales",
    ARITHMETIC,
    seen="DeepGEMM 37",
    on=BLOCKS,
    product=_second_scale_for_two,
    schedule=_twice,
    needs=both(several_blocks, promoted),
    same_if="the scales of both blocks are equal and no partial sum is long",
)
for bits, words in ((1, "one bit"), (2, "two bits")):
    fault(
        f"products aligned to {words} less",
        ARITHMETIC,
        seen="H200 mutants",
        schedule=_narrower(bits),
        needs=aligned,
        same_if="no product lies below the narrower alignment",
    )


# --- the sum ------------------------------------------------------------------------------------------------


def _with_summands(product: ScaledProduct, acc: Tensor) -> Tensor:
    """A float32 sum with the bias and the summand."""
    acc = acc if product.bias is None else acc + decode(product.bias).to(torch.float32)[None, :]
    return acc if product.c is None else product.c + acc


def _added(total: Sum, which: slice = ALL, dtype: torch.dtype = torch.float32) -> Tensor:
    """The sum over these pieces kept in ``dtype``, and the bias."""
    product = total.product
    acc = torch.zeros((product.M, product.N), dtype=torch.float32, device=product.a.device)
    for piece in total.pieces(which):
        acc = store(acc + piece, dtype).to(torch.float32)
    return _with_summands(product, acc)


def _middle(total: Sum) -> int:
    """Half of the pieces."""
    return -(-total.product.K // PIECE) // 2


for dtype, word, seen in ((torch.bfloat16, "bfloat16", "H200 mutants"), (torch.float16, "float16", "cutlass PR 3149")):
    fault(
        f"running sum kept in {word}",
        ARITHMETIC,
        seen=seen,
        sum=lambda total, dtype=dtype: _added(total, dtype=dtype),
        needs=several_intervals,
        same_if=f"every partial sum is a {word} value",
    )


@fault(
    "accumulator rescaled between K blocks, never promoted",
    ARITHMETIC,
    seen="LMDeploy 0.18.0 Triton blocked_gemm_fp8, on an H200",
    on=BLOCKS,
    needs=both(
        several_blocks,
        need(lambda call: call.schedule is not None, "sums are exact"),
        need(lambda call: call.schedule is None or not call.schedule.scales_inside, "scales are inside"),
        need(
            lambda call: sum(p.product.M * p.product.N * p.product.K for p in call.parts) <= RESCALED,
            "the call is large, and no fast engine has this arithmetic",
        ),
    ),
    same_if="no partial sum exceeds the accumulator",
)
def sum_rescaled_between_blocks(total: Sum) -> Tensor:
    """One chain over K: before block b the accumulator is multiplied by fl(s_(b-1) / s_b), ``s_b = fl(sa sb)``, and at
    the end by the last one. The division is IEEE's here, within 2 ulp of the device's."""
    schedule = total.schedule
    product = None if schedule is None else schedule.lowered(total.product)
    if schedule is None or product is None:
        return total.right()
    a, b = (operand(x.value(), schedule.instruction, format=x.fmt.name) for x in (product.left, product.right))
    columns = torch.arange(product.N, device=product.a.device) // product.b_rows
    scales = float32_scale(product.a_scale)[:, None, :] * float32_scale(product.b_scale)[columns][None, :, :]
    scales = scales.expand(product.M, -1, -1)
    acc = torch.zeros(scales.shape[:2], dtype=torch.float32, device=product.a.device)
    for block, k in product.blocks():
        ratio = scales[..., block - 1] / scales[..., block] if block else torch.ones_like(acc)
        p = a.values[:, None, k] * b.values[None, :, k]
        e = torch.where(p == 0, ABSENT, a.exponents[:, None, k] + b.exponents[None, :, k])
        acc = accumulate(p, e, (acc * ratio).to(torch.float64), schedule.instruction).to(torch.float32)
    return _with_summands(product, acc * scales[..., -1])


@fault(
    "accumulator not cleared between tiles",
    ARITHMETIC,
    seen="cutlass PR 3149",
    needs=need(lambda call: call.parts[0].product.N > 128, "there is one tile along N"),
)
def sum_of_the_tile_before(total: Sum) -> Tensor:
    """The second N tile starts from the first one's result."""
    acc = total.right()
    width = max(0, min(128, acc.shape[1] - 128))
    acc[:, 128 : 128 + width] += acc[:, :width]
    return acc


def _kept(which: Callable[[int], slice]) -> Callable[[Sum], Tensor]:
    """Of the blocks after the first of B these start from the sum of the one before, and so enter by its scales too."""

    def change(total: Sum) -> Tensor:
        product, acc = total.product, total.right()
        codes = slice((product.B - 1) * product.block)
        old = product.cached(
            "codes of the block before",
            lambda: replace(
                product,
                a=product.a[:, codes].contiguous(),
                b=product.b[:, codes].contiguous(),
                a_scale=product.a_scale[:, 1:],
                b_scale=product.b_scale[:, 1:],
                bias=None,
                c=None,
            ),
        )
        for piece in total.pieces(which(product.B), product=old):
            acc = acc + piece
        return acc

    return change


for name, which in (
    ("accumulator not cleared before the middle K block", lambda n: slice((n - 1) // 2, (n + 1) // 2)),
    ("accumulator keeps the K block before in every K block", lambda n: slice(n - 1)),
):
    fault(
        name,
        ARITHMETIC,
        seen="no public thread: an accumulator not zeroed before the next K block",
        on=BLOCKS,
        sum=_kept(which),
        needs=several_blocks,
    )
for name, seen, change in (
    (
        "last K block added twice",
        "no public thread: two splits of K that overlap in one block",
        lambda total: total.right() + next(total.pieces(slice(-1, None))),
    ),
    ("first half of a split K missing", "DeepGEMM 392", lambda total: _added(total, slice(_middle(total), None))),
    ("second half of a split K missing", "DeepGEMM 392", lambda total: _added(total, slice(_middle(total)))),
    (
        "second half of a split K missing in the last columns of a tile",
        "inclusionAI/humming PR 45: accumulators behind whole vectors not reduced",
        lambda total: torch.where(_ends_a_tile(total), _added(total, slice(_middle(total))), total.right()),
    ),
):
    fault(name, ARITHMETIC, seen=seen, sum=change, needs=several_intervals)


def _ends_a_tile(total: Sum) -> Tensor:
    """Bool ``[N]``: the last 8 columns of every 64, and of a partial tile."""
    count = total.product.N
    column = torch.arange(count, device=total.product.a.device)
    return (column % 64 >= 56) | (column >= count - 8)


@fault(
    "sums of a split K stored in the output dtype before they are added",
    ARITHMETIC,
    seen="FlagGems PR 5876, TransformerEngine PR 3440",
    needs=both(several_intervals, NARROW),
    same_if="both sums are values of the output dtype",
)
def sum_of_stored_halves(call: Call, total: Sum) -> Tensor:
    product = total.product
    bare = Sum(replace(product, bias=None, c=None), total.schedule)
    halves = (slice(_middle(total)), slice(_middle(total), None))
    first, second = (store(_added(bare, half), call.out_dtype).to(torch.float32) for half in halves)
    return _with_summands(product, store(first + second, call.out_dtype).to(torch.float32))


# --- the bias -----------------------------------------------------------------------------------------------


def _bias(change: Callable[[Tensor], Tensor | None]) -> Callable[[ScaledProduct], ScaledProduct]:
    return lambda product: replace(product, bias=None if product.bias is None else change(product.bias))


for name, bias, same_if in (
    ("bias ignored", lambda bias: None, "the bias is zero"),
    ("bias added twice", lambda bias: bias * 2, "the bias is zero"),
    ("bias of the next column", lambda bias: torch.roll(bias, -1), "every bias is equal"),
):
    fault(
        name,
        ARITHMETIC,
        seen="cutlass PR 3149",
        on=BIASED,
        product=_bias(bias),
        needs=has_bias,
        same_if=same_if,
    )


@fault(
    "rows of the second half hold the bias alone",
    ARITHMETIC,
    seen="ROCm/legacy-rocm-build 6595: rows from 2^19 on",
    on=BIASED,
    needs=both(has_bias, need(lambda c: c.parts[0].product.M > 1, "there is one row")),
)
def sum_of_the_first_half(total: Sum) -> Tensor:
    product, acc = total.product, total.right()
    alone = _with_summands(product, torch.zeros_like(acc))
    return torch.cat([acc[: product.M // 2], alone[product.M // 2 :]])


def _as_words(call: Call, product: ScaledProduct) -> ScaledProduct:
    """A bias of 16 bits whose memory is read as float32."""
    if product.bias is None:
        return product
    words = product.bias[: len(product.bias) // 2 * 2].contiguous().view(torch.float32)
    return replace(product, bias=look(call, words, torch.arange(product.N, device=words.device)))


fault(
    "bias of 16 bits read as float32",
    ARITHMETIC,
    seen="trymirai/uzu PR 481: the bias has the output's type in the reduction of a split K",
    on=BIASED,
    product=_as_words,
    needs=both(
        has_bias,
        need(lambda c: c.inputs["bias"].dtype != torch.float32, "the bias is float32"),
        need(lambda c: c.parts[0].product.N > 1, "there is one column"),
    ),
    same_if="the bias is zero",
)


@fault(
    "bias added before the scales",
    ARITHMETIC,
    seen="H200 mutants",
    on=BIASED,
    needs=both(has_bias, need(lambda call: call.parts[0].product.B == 1, "block scales take no bias")),
    same_if="the bias is zero",
)
def sum_scaled_with_its_bias(total: Sum) -> Tensor:
    return _scaled(total.product, total.right(_unscaled(total.product)))


def _unscaled(product: ScaledProduct) -> ScaledProduct:
    """A product of one block of scales with scales of 1."""
    return replace(product, a_scale=torch.ones_like(product.a_scale), b_scale=torch.ones_like(product.b_scale))


def _scaled(product: ScaledProduct, acc: Tensor) -> Tensor:
    """A float32 sum of codes times the scales of its one block."""
    columns = product.b_scale.repeat_interleave(product.b_rows, dim=0)[: product.N, 0]
    return acc * product.a_scale * columns[None, :]


for dtype, word in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
    fault(
        f"sum rounded to {word} before the scales",
        ARITHMETIC,
        seen="no public thread: a product of 16 bits that another kernel scales",
        sum=lambda total, dtype=dtype: _rounded_sum(total, dtype),
        needs=both(
            need(lambda call: call.parts[0].product.B == 1, "there are several blocks of scales"),
            need(lambda call: not all(_even(part.product) for part in call.parts), "every scale is a power of two"),
        ),
        same_if=f"every sum of codes is a {word} value",
    )


def _rounded_sum(total: Sum, dtype: torch.dtype) -> Tensor:
    product = replace(total.product, bias=None, c=None)
    acc = store(total.right(_unscaled(product)), dtype).to(torch.float32)
    return _with_summands(total.product, _scaled(product, acc))


def _even(product: ScaledProduct) -> bool:
    """Whether every scale is a power of two, with which every rounding commutes."""
    return all(bool((torch.frexp(scale)[0].abs() == 0.5).all()) for scale in (product.a_scale, product.b_scale))
