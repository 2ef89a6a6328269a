"""The random Hadamard transform of 16 columns, and the counter-based bits of stochastic rounding.

    y = x diag(signs) H / 4         each 16 columns of x by themselves; H[i, j] = (-1)^popcount(i & j) (Sylvester)

A kernel multiplies on a tensor core, in float32, and stores bfloat16. Products by +-1/4 are exact. With 16 terms of
magnitudes ``|x|/4`` a sum in any order, rounded or truncated, of terms aligned at ``2^-23`` of the largest or finer,
errs by at most ``16 2^-23 sum |x|/4``, its rounding to float32 by ``2^-23`` of the result. Where every term is a
multiple of ``q`` and ``sum |x| <= 2^23 q``, no sum of some of them rounds or is cut: the error is 0.
:func:`transform_ends` rounds both ends to the output dtype, so that nearly all elements have one value.

Philox4x32-10 makes four 32-bit words of a 128-bit counter and a 64-bit key. The bits of element ``i`` of a flattened
tensor are byte ``i % 16`` (little endian) of the words of counter ``i // 16`` under ``key = seed``.

Sources: TransformerEngine custom_recipes/reference_nvfp4.py ``_apply_rht``, ``get_wgrad_sign_vector`` (the signs),
hadamard_transform.cu (bfloat16 in and out); J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
Which thread of a published kernel takes which word of its generator is no interface and not modelled.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from oracle.errors import OptionError, ShapeError
from oracle.numbers.formats import decode, of_dtype
from oracle.numbers.rounding import Overflow, Rounding, exponent_of, power_of_two, to_dtype

SIZE: Final = 16
SIGNS: Final = 0b1101_0111_1110_1000
"""Bit ``i`` is set where the sign of column ``i`` is -1: ``+ + + - + - - - - - - + - + - -``."""
LARGEST: Final = 2.0**122
"""Magnitudes up to here keep every partial sum of 16 in float32."""
_ERROR: Final = (SIZE + 1) * 2.0**-23
_ROUNDS, _M0, _M1, _W0, _W1, _WORD = 10, 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xFFFFFFFF


def matrix(signs: int = SIGNS) -> Tensor:
    """``diag(signs) H / 4``, float64 ``[16, 16]``, without NaN or infinity.

    Raises OptionError: ``signs`` is no mask of 16 bits.
    """
    if not 0 <= signs < 1 << SIZE:
        raise OptionError(f"sign_mask={signs} is no mask of {SIZE} bits")
    parity = [[1.0 - 2.0 * (((i & j).bit_count() ^ signs >> i) & 1) for j in range(SIZE)] for i in range(SIZE)]
    return torch.tensor(parity, dtype=torch.float64, device="cpu") / 4.0


def transform(x: Tensor, signs: int = SIGNS) -> tuple[Tensor, Tensor]:
    """The exact transform of ``x`` ``[M, K]``, bfloat16, float16 or float32, and the largest error of a kernel: both
    float64 ``[M, K]``.

    Each of the 16 terms is a value of ``x`` over 4; float64 sums them within ``16 2^-53``, which the error holds too.
    NaN and infinities make NaN or infinity of their 16.

    Raises ShapeError: K is no multiple of 16.
    """
    if x.dim() != 2 or x.shape[1] % SIZE:
        raise ShapeError(f"x has shape {list(x.shape)}; pass [M, K], K a multiple of {SIZE}")
    blocks = torch.unflatten(decode(x), 1, (-1, SIZE))
    exact = (blocks[..., None] * matrix(signs).to(x.device)).sum(dim=-2)
    total = blocks.abs().sum(dim=-1, keepdim=True)
    least = torch.where(blocks == 0, torch.inf, blocks.abs()).amin(dim=-1, keepdim=True)
    precision = of_dtype(x.dtype)
    unit = power_of_two(exponent_of(least).clamp(precision.emin, precision.emax) - precision.fraction_bits)
    error = torch.where(total <= 2.0**23 * unit, 0.0, _ERROR * total / 4.0)
    return exact.flatten(1), error.expand_as(exact).flatten(1)


def transform_ends(x: Tensor, dtype: torch.dtype, signs: int = SIGNS) -> tuple[Tensor, Tensor, Tensor]:
    """The transform of ``x [M, K]`` in ``dtype``, and the least and the largest value that a kernel may give: three
    tensors ``[M, K]`` of ``dtype``.

    An infinity makes infinity or NaN of the ends of its 16. Errors as of :func:`transform`.
    """
    exact, error = transform(x, signs)
    values = (exact, exact - error, exact + error)
    low_high = [to_dtype(y, dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF) for y in values]
    return low_high[0], low_high[1], low_high[2]


def philox(counter: Tensor, seed: int) -> Tensor:
    """Philox4x32-10: the words ``[..., 4]``, int64 below 2^32, of ``counter`` ``[...]`` (int64, its low 64 bits) under
    a key of 64 bits."""
    zero = torch.zeros_like(counter)
    c = [counter & _WORD, counter >> 32 & _WORD, zero, zero]
    key = [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(_ROUNDS):
        (high0, low0), (high1, low1) = _product(c[0], _M0), _product(c[2], _M1)
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [key[0] + _W0 & _WORD, key[1] + _W1 & _WORD]
    return torch.stack(c, dim=-1)


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of ``x * factor``, both of 32 bits; by halves, whose products fit int64."""
    low, high = x * (factor & 0xFFFF), x * (factor >> 16)
    middle = high + (low >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF


def random_bytes(shape: tuple[int, ...] | torch.Size, seed: int) -> Tensor:
    """The bits of stochastic rounding of a tensor of ``shape``: uint8 of that shape.

    Raises OptionError: the seed is no integer of 64 bits.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise OptionError(f"seed={seed!r} is no integer from 0 to 2^64 - 1")
    count = torch.Size(shape).numel()
    words = philox(torch.arange(-(-count // SIZE), device="cpu"), seed)
    lanes = words[..., None] >> torch.arange(0, 32, 8, device="cpu") & 0xFF
    return lanes.flatten()[:count].to(torch.uint8).reshape(shape)
