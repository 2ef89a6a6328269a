"""Weights of 2, 3, 4 and 8 bits: how words hold them, Marlin's tiles, and the value that a kernel multiplies.

    GPTQ     a stream of fields along K, least bits first: 32 codes of 3 bits take three words; zeros along N
    AWQ      eight nibbles (four bytes) of a word along N, column j in field (0 4 1 5 2 6 3 7)[j], or (0 2 1 3)[j]
    Marlin   words of a 16 x 64 tile in the order in which the threads of a warp multiply them

A code ``q`` with the zero point ``z`` and the scale ``s`` of its group becomes ``w``, in the dtype of the activations:
one :class:`Form` of rounding or another. Fields are integers without a sign; NaN and infinite scales stay so.

Source: vLLM csrc/quantization/gptq/q_gemm.cu and qdq_*.cuh, awq/dequantize.cuh, marlin/gptq_marlin_repack.cu,
marlin/awq_marlin_repack.cu, marlin/dequant.h, marlin/marlin_template.h, machete/machete_mainloop.cuh.
Not covered: sparse (2:4) weights, activations of 8 bits but for their tiles, codebooks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.numbers.rounding import Overflow, Rounding, pair_to_dtype, two_sum

WORD, TILE = 32, 1024
"""Bits of a word; codes of a tile of Marlin."""
PAIRS = {2: (*range(0, 16, 2), *range(1, 16, 2)), 4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
"""Even codes first: field ``i`` of a word holds the code of this number."""


# --- words --------------------------------------------------------------------------------------------------


def fields(words: Tensor, bits: int) -> Tensor:
    """Codes of ``bits`` bits, int64 ``[R * 32 / bits, N]``, of a stream of int32 ``words`` ``[R, N]`` down the rows,
    least bits first; 3 bits take whole threes of rows. Integers: there is no NaN."""
    wide = words.to(torch.int64) & 0xFFFFFFFF
    first = torch.arange(wide.shape[0] * WORD // bits, device=words.device) * bits
    at, offset = first // WORD, (first % WORD)[:, None]
    after = torch.cat([wide[1:], torch.zeros_like(wide[:1])])
    return (wide[at] >> offset | (after[at] & 0xFF) << (WORD - offset)) & ((1 << bits) - 1)


def words(codes: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`fields`: int32 ``[C * bits / 32, N]`` of ``codes`` ``[C, N]``, integers in range of any
    dtype. Integers: there is no NaN."""
    first = torch.arange(codes.shape[0], device=codes.device) * bits
    spread = codes.to(torch.int64) << (first % WORD)[:, None]
    wide = torch.zeros((codes.shape[0] * bits // WORD + 1, codes.shape[1]), dtype=torch.int64, device=codes.device)
    wide.index_add_(0, first // WORD, spread & 0xFFFFFFFF)
    wide.index_add_(0, first // WORD + 1, spread >> WORD)
    return signed(wide[:-1])


def signed(x: Tensor) -> Tensor:
    """Integers ``x`` (int64, any shape) below 2^32 as int32 of the same bits and shape; there is no NaN."""
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)


def reordered(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """``codes`` ``[R, C]`` of any dtype with column ``i`` of every ``len(order)`` taken from column ``order[i]``, of
    the same shape and dtype; NaN is moved like any other."""
    at = torch.tensor(order, dtype=torch.int64, device=codes.device)
    return codes.reshape(-1, len(order))[:, at].reshape(codes.shape)


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """The inverse permutation."""
    return tuple(order.index(i) for i in range(len(order)))


def awq_fields(packed: Tensor, bits: int = 4) -> Tensor:
    """Codes, int64 ``[R, C * 32 / bits]``, of AWQ's int32 words ``packed`` ``[R, C]``; no NaN."""
    return reordered(fields(packed.t(), bits).t(), inverse(PAIRS[bits]))


def awq_words(codes: Tensor, bits: int = 4) -> Tensor:
    """The inverse of :func:`awq_fields`: int32 ``[R, C * bits / 32]`` of integers ``codes`` ``[R, C]``, which
    hold no NaN."""
    return words(reordered(codes, PAIRS[bits]).t(), bits).t().contiguous()


# --- Marlin's tiles -----------------------------------------------------------------------------------------


def marlin_places(bits: int, is_a_8bit: bool = False) -> tuple[Tensor, Tensor]:
    """Row and column in its tile of each field of each word: int64 ``[32 * bits, 32 / bits]`` both, no NaN.

    Thread ``t`` of warp ``v`` multiplies column ``c = 16 v + t // 4`` and ``c + 8``, in each the rows ``2 (t % 4) + (0,
    1, 8, 9)``; beside activations of 8 bits a tile has 32 x 32 codes, and a thread the rows ``4 (t % 4) + (0 .. 3)``
    and 16 below of one column."""
    t, v = torch.meshgrid(torch.arange(32, device="cpu"), torch.arange(4, device="cpu"), indexing="ij")
    t, v, i = t[..., None], v[..., None], torch.arange(8, device="cpu")
    if is_a_8bit:
        k, n = t % 4 * 4 + i % 4 + i // 4 * 16, v // 2 * 16 + v % 2 * 8 + t // 4 + 0 * i
    else:
        k, n = t % 4 * 2 + i % 2 + i % 4 // 2 * 8, v * 16 + t // 4 + i // 4 * 8
    if bits == 4:
        order = torch.tensor((0, 4, 1, 5, 2, 6, 3, 7) if is_a_8bit else PAIRS[4], dtype=torch.int64, device="cpu")
    else:
        half = torch.tensor((0, 1, 2, 3) if is_a_8bit else PAIRS[8], dtype=torch.int64, device="cpu")
        order = torch.cat([half, half + 4])
    return k[..., order].reshape(-1, WORD // bits), n[..., order].reshape(-1, WORD // bits)


def to_marlin(codes: Tensor, bits: int, *, is_a_8bit: bool = False) -> Tensor:
    """Marlin's words, int32 ``[K / 16, N * bits / 2]``, of integers ``codes`` ``[K, N]``; the extents are whole tiles
    of 16 x 64, or of 32 x 32. There is no NaN."""
    k, n = marlin_places(bits, is_a_8bit)
    tall, wide = (32, 32) if is_a_8bit else (16, 64)
    rows, columns = codes.shape
    tiles = codes.to(torch.int64).reshape(rows // tall, tall, columns // wide, wide).transpose(1, 2)
    each = tiles[:, :, k, n] << torch.arange(0, WORD, bits, device=codes.device)
    return signed(each.sum(dim=-1)).reshape(rows // 16, columns * bits // 2)


def from_marlin(packed: Tensor, bits: int, *, is_a_8bit: bool = False) -> Tensor:
    """The inverse of :func:`to_marlin`: codes, int64 ``[K, N]``, of int32 ``packed`` ``[K / 16, N * bits / 2]``.
    There is no NaN."""
    k, n = marlin_places(bits, is_a_8bit)
    tall, wide = (32, 32) if is_a_8bit else (16, 64)
    rows, columns = packed.shape[0] * 16, packed.shape[1] * 2 // bits
    every = packed.reshape(rows // tall, columns // wide, TILE * bits // WORD, 1).to(torch.int64)
    each = every >> torch.arange(0, WORD, bits, device=packed.device) & ((1 << bits) - 1)
    tiles = torch.empty((rows // tall, columns // wide, tall, wide), dtype=torch.int64, device=packed.device)
    tiles[:, :, k, n] = each
    return tiles.transpose(1, 2).reshape(rows, columns)


# --- values -------------------------------------------------------------------------------------------------


class Form(StrEnum):
    """How ``w`` is rounded; RN to the dtype of the activations, ``q - z`` exact."""

    DIFFERENCE = "RN((q - z) * s)"
    FUSED = "RN(q * s - RN(z * s)), one fused multiply-add"
    ADDED = "RN(RN(q * s) + z)"
    ADDED_FUSED = "RN(q * s + z), one fused multiply-add"
    EXACT = "(q - z) * s"


@dataclass(frozen=True)
class Weights:
    """The weight before it is rounded.

    Attributes
    ----------
    codes : float64 ``[K, N]``, the value of each code.
    scale, zero : float64 ``[G, N]``; None: 1, and 0.
    group : int64 ``[K]``, the row of both for each row of the weight.
    """

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    group: Tensor

    def values(self, form: Form, dtype: torch.dtype) -> Tensor:
        """``w``, float64 ``[K, N]``, by a form in ``dtype``; infinite beyond its range, NaN where a scale is NaN."""
        one = torch.ones((1, 1), dtype=torch.float64, device=self.codes.device)
        scale = one if self.scale is None else self.scale[self.group]
        zero = 0.0 * one if self.zero is None else self.zero[self.group]
        if form is Form.EXACT:
            return (self.codes - zero) * scale
        if form is Form.DIFFERENCE:
            return _rounded((self.codes - zero) * scale, 0.0 * one, dtype)
        if form is Form.FUSED:
            return _rounded(self.codes * scale, -_rounded(zero * scale, 0.0 * one, dtype), dtype)
        product = self.codes * scale
        return _rounded(product if form is Form.ADDED_FUSED else _rounded(product, 0.0 * one, dtype), zero, dtype)


def _rounded(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """``x + y`` rounded once to ``dtype``, float64 of the broadcast shape."""
    high, low = two_sum(x + torch.zeros_like(y), y + torch.zeros_like(x))
    low = torch.where(torch.isfinite(high), low, 0.0)
    return decode(pair_to_dtype(high, low, dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF))


# --- weights and scales as kernels take them ----------------------------------------------------------------


def gptq_shuffle(packed: Tensor, perm: Tensor | None, *, bit: int) -> Tensor:
    """GPTQ's int32 words ``packed`` ``[W, N]`` with the rows of the codes in the order ``perm`` (``[K]``, None: as they
    are), and the codes of a word in the order in which exllama's kernels take pairs; of the same shape and dtype.
    There is no NaN.

    Of 3 bits the even ones of ten codes lie in the low half of a word, the odd ones in the high half, and bits 15 and
    31 of the three words are those of codes 30 and 31."""
    codes = fields(packed, bit)
    codes = codes if perm is None else codes[perm.to(torch.int64)]
    if bit != 3:
        order = PAIRS[bit] if bit < 8 else tuple(range(4))
        return words(reordered(codes.t(), order).t(), bit)
    each = codes.reshape(-1, WORD, codes.shape[1])
    result = []
    for word in range(3):
        ten = each[:, 10 * word : 10 * word + 10]
        halves = [
            sum((ten[:, 2 * i + odd] << 3 * i for i in range(5)), each[:, 30 + odd] >> word << 15 & 1 << 15)
            for odd in (0, 1)
        ]
        result.append(signed(halves[0] | halves[1] << 16))
    return torch.stack(result, dim=1).reshape(packed.shape)


SCALES = tuple(i + 8 * j for i in range(8) for j in range(8))
SINGLE = tuple(2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25))
"""Columns of 64 scales of groups, and of 32 scales of columns, in the order of Marlin's threads."""


def marlin_permute_scales(s: Tensor, *, size_k: int, group_size: int, is_a_8bit: bool) -> Tensor:
    """Scales ``s`` ``[G, N]`` of any dtype in Marlin's order, of the same shape and dtype; NaN is moved like any
    other."""
    grouped = group_size not in (-1,) and group_size < size_k and not is_a_8bit
    return reordered(s, SCALES if grouped else SINGLE)


def marlin_permute_bias(s: Tensor) -> Tensor:
    """A bias ``s`` of any dtype and any shape whose elements are a multiple of 32, in Marlin's order, of the same shape
    and dtype; NaN is moved like any other."""
    return reordered(s.reshape(1, -1), SINGLE).reshape(s.shape)


def marlin_zero_points(zp: Tensor, *, num_bits: int, is_a_8bit: bool) -> Tensor:
    """Zero points ``zp`` ``[G, N]``, int32, in Marlin's words: int32 ``[G, N * num_bits / 32]``. There is no NaN."""
    placed = reordered(zp.to(torch.int64), SCALES)
    return words((placed if is_a_8bit else reordered(placed, PAIRS[num_bits])).t(), num_bits).t().contiguous()


def awq_to_marlin_zero_points(packed: Tensor, *, num_bits: int, is_a_8bit: bool) -> Tensor:
    """:func:`marlin_zero_points` of AWQ's int32 words ``packed`` ``[G, C]``; int32 of their shape, no NaN."""
    return marlin_zero_points(awq_fields(packed, num_bits), num_bits=num_bits, is_a_8bit=is_a_8bit)


def nvfp4_marlin_scales(scales: Tensor, factor: float) -> Tensor:
    """Bytes S0E5M3, as float8_e4m3fn ``[R, C]``, of NVFP4's ``scales`` ``[R, C]`` (values of E4M3 in 16 bits) times
    ``factor``: the top of the bits of ``scale * factor * 2^7`` in float16 shifted left, which is 0 below 2, columns 1
    and 2 of every four exchanged. NaN is not expected."""
    value = decode(reordered(scales, (0, 2, 1, 3))) * factor * 128.0
    exponent = torch.frexp(value)[1] - 1
    fraction = torch.round(value / torch.exp2(exponent.to(torch.float64)) * 8 - 8)
    code = (exponent + 15) * 8 + fraction.to(torch.int64)
    return torch.where(value < 2, 0, code).to(torch.uint8).view(torch.float8_e4m3fn)


def lift_of(scales: Tensor) -> float:
    """The power of two by which NVFP4's ``scales``, any shape, bf16, f16 or E4M3, may be multiplied so that none passes
    448; 1 of zeros. NaN is not expected."""
    top = float(decode(scales).max())
    return 2.0 ** (math.frexp(448 / top)[1] - 1) if 0 < top < 448 else 1.0
