"""Further quantisers of MX and NVFP4: other elements, training forms, rows with scales of their own, FP8 inputs, casts.

    MXFP6, MXINT8                codes one a byte (six bits in the low ones; two's complement, value code/64)
    FP4 under float32 scales     DeepGEMM's: groups of 32 or 128, ties toward zero, no code of -0, NaN coded 0
    stochastic rounding          |v| + u step(|v|), truncated; u = byte / 256 of Philox4x32-10 under ``seed``
    random Hadamard transform    16 columns times diag(signs) H / 4, rounded to bfloat16
    16x16                        one scale for 16 rows, repeated in the bytes
    four over six                the scale of a block or 1.5 times it, by the smaller error of its values
    per token                    a float32 scale of each row, returned as well
    casts                        FP8 under scales of 128 and MXFP8

Arguments, layouts and refusals are those of :mod:`kernels.mx`. Under ``torch.compile`` each quantiser is one operator.

NaN and infinity are as of :mod:`kernels.mx` where a function does not say otherwise.
Source: OCP Microscaling Formats 1.0; TransformerEngine, FlashInfer, DeepGEMM and torchao, as the functions name them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .backends.declaration import Matrices
from .checks import WIDE
from .errors import OptionError, ShapeError, shown
from .layout import shuffled_rows
from .mx import mxfp4_fake, mxfp8_fake, mxfp8_quantize, nvfp4_fake
from .mx_blocks import (
    FP4_EMAX,
    FP4_FRACTION,
    FP4_MAX,
    FP4_VALUES,
    HEIGHTS,
    MX_BLOCK,
    NAN_BYTE,
    NVFP4_BLOCK,
    block_amax,
    compiled_op,
    e4m3_scale,
    fp4_codes,
    fp4_decoded,
    fp4_values,
    load_scale,
    pack,
    pack_nearest,
    power,
    quantised,
    scale_bytes,
    shared_exponent,
    split_blocks,
    store_scale,
    times,
    two_levels,
)
from .operators import empty
from .quantize import per_block_cast_to_fp8
from .support import BLOCK
from .verbs import verb

# Largest value, its exponent, fraction bits, exponent of the smallest normal value (OCP Microscaling Formats 1.0, 5.3).
FP6_ELEMENTS = {"e3m2": (28.0, 4, 2, -2), "e2m3": (7.5, 2, 3, 0)}
INT8_MAX, INT8_UNIT = 127.0 / 64.0, 64.0
GRANULARITIES = (32, 128)
FP4_FLOOR = 1e-4  # DeepGEMM's floor of an amax
HADAMARD = 16
SIGN_MASK = 0b1101_0111_1110_1000
"""TransformerEngine's signs: bit ``i`` is set where column ``i`` of 16 changes its sign."""
ERRORS = ("mae", "mse")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_ROUNDS, _M0, _M1, _W0, _W1, _WORD = 10, 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xFFFFFFFF


# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def _one_a_byte_fake(x: Tensor, layout: str = "128x4", *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return empty(*x.shape, like=x, dtype=torch.uint8), scale_bytes(x, MX_BLOCK, layout)


def _two_levels_fake(
    x: Tensor, global_scale: Tensor, layout: str = "128x4", *_: object, **__: object
) -> tuple[Tensor, Tensor]:
    return nvfp4_fake(x, global_scale, layout)


def _per_token_fake(x: Tensor, global_scale: Tensor, layout: str = "128x4") -> tuple[Tensor, Tensor, Tensor]:
    return *nvfp4_fake(x, global_scale, layout), empty(x.shape[0], like=x, dtype=torch.float32)


def _batched_fake(x: Tensor, global_scale: Tensor, layout: str = "128x4") -> tuple[Tensor, Tensor]:
    b, m, k = x.shape
    scale = scale_bytes(x[0], NVFP4_BLOCK, layout)
    return empty(b, m, k // 2, like=x, dtype=torch.uint8), empty(b, scale.shape[0], like=x, dtype=torch.uint8)


def _silu_fake(x: Tensor, global_scale: Tensor, layout: str = "128x4") -> tuple[Tensor, Tensor]:
    return nvfp4_fake(empty(x.shape[0], x.shape[1] // 2, like=x, dtype=x.dtype), global_scale, layout)


def _fp4_cast_fake(
    x: Tensor, use_ue8m0: bool = False, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    each, dtype = (4 * gran_k, torch.int32) if use_packed_ue8m0 else (gran_k, torch.float32)
    groups = empty(m, (k + each - 1) // each, like=x, dtype=dtype)
    return empty(m, k // 2, like=x, dtype=torch.int8), groups


def _requantised_fake(
    x: Tensor, block_scale: Tensor, layout: str = "128x4", dtype: str = "bfloat16"
) -> tuple[Tensor, Tensor]:
    return mxfp8_fake(x, layout)


def _blocks_fake(x: Tensor, mx_scale: Tensor, layout: str = "128x4", dtype: str = "bfloat16") -> tuple[Tensor, Tensor]:
    m, k = ((extent + BLOCK - 1) // BLOCK for extent in x.shape)
    return empty(*x.shape, like=x, dtype=torch.float8_e4m3fn), empty(m, k, like=x, dtype=torch.float32)


# --- other elements -----------------------------------------------------------------------------------------------


@verb("cast", outputs=("q", "scale"), fake=_one_a_byte_fake)
def mxfp6_quantize(
    x: Tensor, layout: str = "128x4", rounding: str = "rceil", element: str = "e3m2"
) -> tuple[Tensor, Tensor]:
    """Quantise a matrix to MXFP6: ``q [M, K]`` uint8, codes of ``e3m2`` or ``e2m3`` in the low six bits, and the scale.

    ``x`` ``[M, K]`` bf16, f16 or f32.

    A block with a NaN or an infinity has the scale 255 (NaN) and codes of the largest value.

    Raises OptionError.
    """
    if element not in FP6_ELEMENTS:
        raise OptionError(f"element={shown(element)}: there are {', '.join(FP6_ELEMENTS)}")
    if torch.compiler.is_compiling():
        return compiled_op("mxfp6_quantize", x, layout, rounding, element)
    top, emax, fraction, emin = FP6_ELEMENTS[element]
    blocks = split_blocks(x, MX_BLOCK)
    byte = shared_exponent(blocks, rounding, top, emax, fraction)
    byte = torch.where(torch.isfinite(blocks).all(dim=-1), byte, NAN_BYTE)
    scaled = (blocks * power(254 - byte)[..., None]).clamp(-top, top)
    bits = scaled.abs().view(torch.int32)
    exponent = ((bits >> 23) - 127).clamp(min=emin)
    step = torch.ldexp(torch.ones_like(scaled), exponent - fraction)
    magnitude = torch.round(scaled.abs() / step).int()  # to nearest even; a carry is the next binade's first code
    code = magnitude + ((exponent - emin) << fraction)
    largest = (1 << 5) - 1
    code = torch.where((byte == NAN_BYTE)[..., None], largest, code | torch.signbit(scaled).int() << 5)
    return code.to(torch.uint8).flatten(1), store_scale(byte, layout)


@verb("cast")
def mxfp6_dequantize(q: Tensor, scale: Tensor, layout: str = "128x4", element: str = "e3m2") -> Tensor:
    """``float32(value(q) * 2^(byte - 127))`` of codes one a byte; parameters as of the quantiser.

    ``q`` ``[M, K]`` uint8, ``scale`` ``[M, K / 32]`` uint8, or flat in tiles ``[bytes]``. Returns float32 ``[M, K]``.

    Raises DtypeError, InputError, LayoutError, OptionError, ShapeError.
    """
    if element not in FP6_ELEMENTS:
        raise OptionError(f"element={shown(element)}: there are {', '.join(FP6_ELEMENTS)}")
    _, _, fraction, emin = FP6_ELEMENTS[element]
    codes = checks.dtype("q", checks.rank("q", q, 2), torch.uint8).int()
    field, rest = (codes & 31) >> fraction, codes & (1 << fraction) - 1
    significand = rest + torch.where(field > 0, 1 << fraction, 0)
    value = torch.ldexp(significand.float(), (field - 1).clamp(min=0) + emin - fraction)
    return _times_powers(torch.where(codes > 31, -value, value), scale, layout)


@verb("cast", outputs=("q", "scale"), fake=_one_a_byte_fake)
def mxint8_quantize(x: Tensor, layout: str = "128x4") -> tuple[Tensor, Tensor]:
    """Quantise a matrix to MXINT8: ``q [M, K]`` uint8, two's complement of ``64 x / scale`` to nearest even, and the
    scale.

    Codes stop at +-127. The shared scale is OCP's, ``2^floor(log2 amax)``; NaN makes a block NaN, infinity saturates.
    """
    if torch.compiler.is_compiling():
        return compiled_op("mxint8_quantize", x, layout)
    blocks = split_blocks(x, MX_BLOCK)
    byte = shared_exponent(blocks, "floor", INT8_MAX, 0, 7)
    byte = torch.where(torch.isinf(blocks.abs().amax(dim=-1)), 254, byte)
    scaled = (blocks * power(254 - byte)[..., None]).clamp(-INT8_MAX, INT8_MAX)
    code = torch.where((byte == NAN_BYTE)[..., None], 127.0, torch.round(scaled * INT8_UNIT))
    return code.to(torch.int8).view(torch.uint8).flatten(1), store_scale(byte, layout)


@verb("cast")
def mxint8_dequantize(q: Tensor, scale: Tensor, layout: str = "128x4") -> Tensor:
    """``float32(int8(q) / 64 * 2^(byte - 127))``; parameters as of the quantiser.

    ``q`` ``[M, K]`` uint8, ``scale`` ``[M, K / 32]`` uint8, or flat in tiles ``[bytes]``. Returns float32 ``[M, K]``.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    codes = checks.dtype("q", checks.rank("q", q, 2), torch.uint8).view(torch.int8)
    return _times_powers(codes.float() / INT8_UNIT, scale, layout)


def _times_powers(values: Tensor, scale: Tensor, layout: str, name: str = "scale") -> Tensor:
    m, k = values.shape
    checks.same_device(q=values, **{name: scale})
    return times(values, load_scale(scale, m, k, MX_BLOCK, layout, name).view(torch.float8_e8m0fnu).float())


@verb("cast", outputs=("q", "scale"), fake=_fp4_cast_fake)
def per_token_cast_to_fp4(
    x: Tensor, use_ue8m0: bool = False, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """DeepGEMM's cast of rows to E2M1 under float32 scales.

    Parameters
    ----------
    x
        ``[M, K]`` bf16, f16 or f32, ``K`` even; the last group may be shorter.
    use_ue8m0
        Round a scale up to a power of two (from 2^-126).
    gran_k
        32 or 128 elements to a scale.
    use_packed_ue8m0
        Return the exponent bytes of four groups in an int32, the first in the lowest byte; needs ``use_ue8m0``.

    Returns
    -------
    q, scale
        ``q [M, K / 2]`` int8, two codes each; ``scale`` float32 ``[M, ceil(K / gran_k)]``, ``max(amax, 1e-4) / 6``, or
        int32 with a quarter of the columns, in which groups that do not exist have the scale 1.

    Raises
    ------
    DtypeError, InputError, LayoutError, OptionError, ShapeError
    """
    checks.dtype("x", checks.rank("x", x, 2), *WIDE)
    checks.nonempty("x", x, 0, 1)
    checks.multiple("K", x.shape[1], 2, "two codes make a byte; pad K")
    _granularity(gran_k)
    if use_packed_ue8m0 and not use_ue8m0:
        raise OptionError("use_packed_ue8m0=True packs exponents of powers of two: pass use_ue8m0=True as well")
    if torch.compiler.is_compiling():
        return compiled_op("per_token_cast_to_fp4", x, use_ue8m0, gran_k, use_packed_ue8m0)
    m, k = x.shape
    blocks = torch.nn.functional.pad(x.float(), (0, -k % gran_k)).reshape(m, -1, gran_k)
    amax = blocks.abs().amax(dim=2)
    amax = torch.where(amax < FP4_FLOOR, FP4_FLOOR, amax)  # NaN stays
    scale = amax / torch.full_like(amax, FP4_MAX)
    if use_ue8m0:
        bits = scale.view(torch.int32)
        field = ((bits >> 23 & 0xFF) + (bits & 0x7FFFFF != 0).int()).clamp(1, 254)
        scale = (field << 23).view(torch.float32)
    scaled = blocks * (torch.ones_like(scale) / scale)[..., None]
    code = torch.zeros_like(scaled, dtype=torch.uint8)
    for low, high in zip(FP4_VALUES, FP4_VALUES[1:], strict=False):
        code += scaled.abs() > (low + high) / 2
    code = code | ((scaled < 0) & (code != 0)).to(torch.uint8) << 3
    if use_packed_ue8m0:
        exponents = (scale.view(torch.int32) >> 23).to(torch.uint8)
        scale = torch.nn.functional.pad(exponents, (0, -scale.shape[1] % 4), value=127).contiguous().view(torch.int32)
    return pack(code)[:, : k // 2].contiguous().view(torch.int8), scale


@verb("cast")
def transpose_packed_fp4(q: Tensor) -> Tensor:
    """Codes ``q [M, N / 2]`` int8 or uint8, two in a byte along ``N``, as ``[N, M / 2]``, two in a byte along ``M``.

    ``M`` is even. Codes are moved as they are.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.nonempty("q", checks.dtype("q", checks.rank("q", q, 2), torch.int8, torch.uint8), 0, 1)
    checks.multiple("M", q.shape[0], 2, "two rows make a byte of the transpose; pad M")
    codes = q.contiguous().view(torch.uint8)
    turned = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(1).t()
    return (turned[:, ::2] | turned[:, 1::2] << 4).contiguous().view(q.dtype)


@verb("cast")
def cast_back_from_fp4(q: Tensor, scale: Tensor, gran_k: int = 128) -> Tensor:
    """``value(q) * scale`` in float32, the code 8 read as 0.

    Returns float32 ``[M, K]``.

    ``q [M, K / 2]`` int8 or uint8, two codes each; ``scale`` float32 ``[M, ceil(K / gran_k)]``.

    Raises DeviceError, DtypeError, InputError, LayoutError, ShapeError.
    """
    _granularity(gran_k)
    checks.same_device(q=q, scale=scale)
    checks.dtype("q", checks.rank("q", q, 2), torch.int8, torch.uint8)
    values = fp4_values(q.contiguous().view(torch.uint8))
    m, k = values.shape
    checks.dtype("scale", checks.rank("scale", scale, 2), torch.float32)
    checks.shape("scale", scale, (m, -(-k // gran_k)), "[M, ceil(K / gran_k)]")
    return torch.where(values == 0, 0.0, values) * scale.repeat_interleave(gran_k, dim=1)[:, :k]


def _granularity(gran_k: int) -> None:
    if gran_k not in GRANULARITIES:
        raise OptionError(f"gran_k={gran_k}: there are {', '.join(map(str, GRANULARITIES))}")


# --- training -----------------------------------------------------------------------------------------------------


@verb("cast", outputs=("q", "scale"), fake=_two_levels_fake)
def nvfp4_quantize_stochastic(
    x: Tensor, global_scale: Tensor, layout: str = "128x4", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """:func:`kernels.nvfp4_quantize` whose codes are rounded stochastically; the same seed gives the same codes.

    Operands and result as of :func:`kernels.mx.nvfp4_quantize`, one ``global_scale``.

    Raises OptionError.
    """
    blocks, g = _encoded(x, global_scale)
    if not 0 <= seed < 1 << 63:
        raise OptionError(f"seed={seed}: from 0 to 2^63 - 1")
    if torch.compiler.is_compiling():
        return compiled_op("nvfp4_quantize_stochastic", x, global_scale, layout, seed)
    scale, inverse = two_levels(block_amax(blocks), g)
    v = blocks * inverse[..., None]
    a = v.abs()
    step = torch.where(a >= 4, 2.0, torch.where(a >= 2, 1.0, 0.5))
    t = a + _random_bytes(x, seed).reshape(a.shape).float() * (1.0 / 256.0) * step
    code = torch.zeros_like(t, dtype=torch.uint8)
    for value in FP4_VALUES[1:]:
        code += t >= value
    code = torch.where(v.isnan(), 7, code | torch.signbit(v).to(torch.uint8) << 3)
    return pack(code.to(torch.uint8)), store_scale(scale, layout)


def _random_bytes(x: Tensor, seed: int) -> Tensor:
    """A byte for each element: byte ``i % 16`` of Philox4x32-10 of counter ``i // 16`` under the key ``seed``."""
    counter = torch.arange((x.numel() + 15) // 16, device=x.device)
    zero = torch.zeros_like(counter)
    c0, c1, c2, c3 = counter & _WORD, counter >> 32, zero, zero
    k0, k1 = seed & _WORD, seed >> 32
    for _ in range(_ROUNDS):
        (h0, l0), (h1, l1) = _wide_product(c0, _M0), _wide_product(c2, _M1)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    words = torch.stack([c0, c1, c2, c3], dim=1).reshape(-1, 1)
    shifts = torch.arange(0, 32, 8, device=x.device)
    return (words >> shifts & 0xFF).flatten()[: x.numel()]


def _wide_product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of a product of two 32-bit words, by halves that fit int64."""
    low = x * (factor & 0xFFFF)
    middle = x * (factor >> 16) + (low >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF


@verb("cast", outputs=("q", "scale"), fake=_two_levels_fake)
def nvfp4_quantize_2d(x: Tensor, global_scale: Tensor, layout: str = "128x4") -> tuple[Tensor, Tensor]:
    """:func:`kernels.nvfp4_quantize` of a weight ``[M, K]``, both multiples of 16, one scale for 16x16 elements.

    ``x`` ``[M, K]`` and ``global_scale``: dtypes and result as of :func:`kernels.mx.nvfp4_quantize`, one
    ``global_scale``.

    The scale bytes are ``[M, K / 16]`` all the same: each stands in 16 rows.

    Raises ShapeError.
    """
    blocks, g = _encoded(x, global_scale)
    checks.multiple("M", x.shape[0], NVFP4_BLOCK, f"{NVFP4_BLOCK} rows share a scale; pad M")
    if torch.compiler.is_compiling():
        return compiled_op("nvfp4_quantize_2d", x, global_scale, layout)
    m, c, _ = blocks.shape
    amax = block_amax(blocks).reshape(m // NVFP4_BLOCK, NVFP4_BLOCK, c).amax(dim=1)
    scale, inverse = (t.repeat_interleave(NVFP4_BLOCK, dim=0) for t in two_levels(amax, g))
    return pack_nearest(blocks * inverse[..., None]), store_scale(scale, layout)


@verb("cast", outputs=("q", "scale"), fake=_two_levels_fake)
def nvfp4_quantize_4over6(
    x: Tensor, global_scale: Tensor, layout: str = "128x4", error: str = "mae", e4m3_max: int = 448
) -> tuple[Tensor, Tensor]:
    """:func:`kernels.nvfp4_quantize` with the scale of a block or 1.5 times it, whichever has the smaller ``error``.

    Operands and result as of :func:`kernels.mx.nvfp4_quantize`, one ``global_scale``.

    ``error`` is ``mae`` or ``mse``, summed in float32 in the order of ``K``; on equality the own scale.
    ``global_scale`` is ``6 e4m3_max / amax`` with ``e4m3_max`` 448 or 256, which leaves room for 1.5 times every scale;
    values are measured with the global scale that is given.

    Raises OptionError.
    """
    blocks, g = _encoded(x, global_scale)
    if error not in ERRORS:
        raise OptionError(f"error={shown(error)}: there are {', '.join(ERRORS)}")
    if e4m3_max not in (448, 256):
        raise OptionError(f"e4m3_max={e4m3_max}: there are 448, 256")
    if torch.compiler.is_compiling():
        return compiled_op("nvfp4_quantize_4over6", x, global_scale, layout, error, e4m3_max)
    amax, decode = block_amax(blocks), torch.ones_like(g) / g
    base = torch.where(amax == 0, 0.0, amax / torch.full_like(amax, FP4_MAX) * g)
    candidates = [_candidate(blocks, t, decode, error) for t in (base, base * 1.5)]
    wide = candidates[1][2] < candidates[0][2]
    codes = torch.where(wide[..., None], candidates[1][0], candidates[0][0])
    return pack(codes), store_scale(torch.where(wide, candidates[1][1], candidates[0][1]), layout)


def _candidate(blocks: Tensor, t: Tensor, decode: Tensor, error: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale bytes, and the error of every block under ``t``."""
    scale, inverse = e4m3_scale(t, decode)
    codes = fp4_codes(blocks * inverse[..., None])
    back = fp4_decoded(codes) * (scale.view(torch.float8_e4m3fn).float() * decode)[..., None]
    difference = back - blocks
    terms = difference * difference if error == "mse" else difference.abs()
    total, *rest = terms.unbind(dim=-1)
    for term in rest:
        total = total + term
    return codes, scale, total


@verb("cast")
def hadamard_transform(x: Tensor, sign_mask: int = SIGN_MASK) -> Tensor:
    """Each 16 columns of ``x [M, K]`` bf16 times ``diag(signs) H / 4``, summed in float32, bf16.

    Bit ``i`` of ``sign_mask`` is set where column ``i`` changes its sign; 0 for none.

    Raises DtypeError, InputError, LayoutError, OptionError, ShapeError.
    """
    checks.dtype("x", checks.rank("x", x, 2), torch.bfloat16)
    checks.nonempty("x", x, 0, 1)
    checks.multiple("K", x.shape[1], HADAMARD, f"{HADAMARD} columns are transformed together; pad K")
    if not 0 <= sign_mask < 1 << HADAMARD:
        raise OptionError(f"sign_mask={sign_mask}: a mask of {HADAMARD} bits")
    bits = torch.arange(HADAMARD, device=x.device)
    z = x.float().reshape(*x.shape[:1], -1, HADAMARD) * (1.0 - 2.0 * (sign_mask >> bits & 1).float())
    for span in (1, 2, 4, 8):
        pairs = z.reshape(*z.shape[:2], -1, 2, span)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        z = torch.stack([low + high, low - high], dim=-2).reshape(z.shape)
    return (z * 0.25).to(torch.bfloat16).reshape(x.shape)


@verb("cast", outputs=("q", "scale"), fake=_two_levels_fake)
def nvfp4_quantize_rht(
    x: Tensor, global_scale: Tensor, layout: str = "128x4", sign_mask: int = SIGN_MASK
) -> tuple[Tensor, Tensor]:
    """:func:`kernels.nvfp4_quantize` of :func:`hadamard_transform`; ``global_scale`` is 2688/amax of the transform.

    ``x`` bf16; operands and result as of :func:`kernels.mx.nvfp4_quantize`, one ``global_scale``.

    Raises DeviceError, DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.scalar("global_scale", global_scale)
    checks.same_device(x=x, global_scale=global_scale)
    if torch.compiler.is_compiling():
        return compiled_op("nvfp4_quantize_rht", x, global_scale, layout, sign_mask)
    return _two_levels(hadamard_transform(x, sign_mask), global_scale, layout)


def _encoded(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 16, and the global scale."""
    checks.scalar("global_scale", global_scale)
    checks.same_device(x=x, global_scale=global_scale)
    return split_blocks(x, NVFP4_BLOCK), global_scale.reshape(())


def _two_levels(x: Tensor, g: Tensor, layout: str, gated: bool = False) -> tuple[Tensor, Tensor]:
    return quantised("quant_nvfp4", x, "e2m1", layout=layout, global_scale=g.reshape(1), gated=gated)


# --- batches, shuffled rows, silu ---------------------------------------------------------------------------------


@verb("cast", outputs=("q", "scale"), fake=_batched_fake)
def nvfp4_batched_quantize(x: Tensor, global_scale: Tensor, layout: str = "128x4") -> tuple[Tensor, Tensor]:
    """:func:`kernels.nvfp4_quantize` of every matrix of ``x [B, M, K]`` under one global scale.

    ``global_scale`` float32 of any shape with one value.

    Returns ``q [B, M, K / 2]`` and the scale bytes of each matrix in 128x4 or 8x4 tiles of its own, ``[B, ..]``.

    Raises DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError.
    """
    checks.nonempty("x", checks.rank("x", x, 3), 0, 1, 2)
    if layout not in HEIGHTS:
        raise OptionError(f"layout={shown(layout)}: there are {', '.join(HEIGHTS)}")
    if torch.compiler.is_compiling():
        return compiled_op("nvfp4_batched_quantize", x, global_scale, layout)
    checks.scalar("global_scale", global_scale)
    checks.same_device(x=x, global_scale=global_scale)
    batch, m, k = x.shape
    q, scale = quantised(
        "quant_nvfp4",
        x.flatten(0, 1),
        "e2m1",
        layout=layout,
        global_scale=global_scale.reshape(1),
        matrices=Matrices(batch),
    )
    return q.view(batch, m, k // 2), scale.view(batch, -1)


@verb("cast", outputs=("q", "scale"), fake=_two_levels_fake)
def nvfp4_quantize_shuffled(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`kernels.nvfp4_quantize` of a weight ``[M, K]``, ``M`` a multiple of 32, with the rows of codes and of
    scales in the order of :func:`kernels.shuffle_matrix_a`, the scales then in 128x4 tiles.

    ``x`` ``[M, K]``; dtypes and result as of :func:`kernels.mx.nvfp4_quantize`, one ``global_scale``.

    Raises InputError, LayoutError, ShapeError.
    """
    checks.multiple("M", checks.rank("x", x, 2).shape[0], 32, "so many rows are permuted together; pad M")
    if torch.compiler.is_compiling():
        return compiled_op("nvfp4_quantize_shuffled", x, global_scale)
    checks.scalar("global_scale", global_scale)
    checks.same_device(x=x, global_scale=global_scale)
    return _two_levels(x.index_select(0, shuffled_rows(x.shape[0], device=x.device)), global_scale, "128x4")


@verb("quant_nvfp4", outputs=("q", "scale"), fake=_silu_fake)
def silu_and_mul_nvfp4_quantize(x: Tensor, global_scale: Tensor, layout: str = "128x4") -> tuple[Tensor, Tensor]:
    """:func:`kernels.nvfp4_quantize` of ``silu(gate) * up`` of ``x [M, 2 I] = [gate, up]``, ``I`` a multiple of 16.

    ``global_scale`` float32 of any shape with one value. Returns uint8 codes ``[M, I / 2]`` and uint8 scales, ``[M, I /
    16]`` or flat in tiles.

    The product is computed in float32 and rounded once to the dtype of ``x``; ``global_scale`` is 2688 over its amax.

    Raises DeviceError, DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.dtype("x", checks.rank("x", x, 2), *WIDE)
    checks.multiple("2 I", x.shape[1], 2 * NVFP4_BLOCK, f"{NVFP4_BLOCK} values share a scale; pad I")
    checks.scalar("global_scale", global_scale)
    checks.same_device(x=x, global_scale=global_scale)
    if torch.compiler.is_compiling():
        return compiled_op("silu_and_mul_nvfp4_quantize", x, global_scale, layout)
    return _two_levels(x, global_scale, layout, gated=True)


# --- rows and FP8 -------------------------------------------------------------------------------------------------


@verb("cast", outputs=("q", "scale", "row_scale"), fake=_per_token_fake)
def nvfp4_quantize_per_token(x: Tensor, global_scale: Tensor, layout: str = "128x4") -> tuple[Tensor, Tensor, Tensor]:
    """Quantise rows to NVFP4 under a float32 scale of each.

    Returns
    -------
    q, scale, row_scale
        As of :func:`kernels.nvfp4_quantize`, and ``row_scale [M]``: the amax of the row times ``global_scale`` (about
        1/2688); ``x ~= value(q) * scale * row_scale``. A row of zeros has the scale 0 and codes 0.
        uint8, uint8 and float32.
    """
    blocks, g = _encoded(x, global_scale)
    if torch.compiler.is_compiling():
        q, scale, rows = torch.ops.fp8_kernels.nvfp4_quantize_per_token(x, global_scale, layout)
        return q, scale, rows
    amax = block_amax(blocks)
    rows = amax.amax(dim=1) * g
    rows = torch.where(rows > 0, rows.clamp(min=torch.finfo(torch.float32).tiny), rows)  # 1/row_scale is finite
    scale, _ = two_levels(amax, rows[:, None], inversed=True)
    both = (scale.view(torch.float8_e4m3fn).float() * rows[:, None])[..., None]
    inverse = torch.ones_like(both) / both
    scaled = torch.where(torch.isfinite(inverse), blocks * inverse, blocks / both)
    dead = (amax == 0)[..., None] & ~blocks.isnan()
    return pack_nearest(torch.where(dead, blocks, scaled)), store_scale(scale, layout), rows


@verb("cast", outputs=("q", "scale"), fake=_two_levels_fake)
def nvfp4_quantize_of_fp8(x: Tensor, global_scale: Tensor, layout: str = "128x4") -> tuple[Tensor, Tensor]:
    """Quantise E4M3 values ``x [M, K]``, which stand for ``x * 6 / global_scale`` (``global_scale = 2688/amax``), to
    NVFP4.

    The values are rounded to float16 first, as FlashInfer's kernel does.

    Raises DeviceError, DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.scalar("global_scale", global_scale)
    checks.same_device(x=x, global_scale=global_scale)
    if torch.compiler.is_compiling():
        return compiled_op("nvfp4_quantize_of_fp8", x, global_scale, layout)
    g = global_scale.reshape(())
    checks.dtype("x", checks.rank("x", x, 2), torch.float8_e4m3fn)
    halves = (x.float() * (torch.ones_like(g) / g * 6.0)).to(torch.float16)
    return _two_levels(halves, g, layout)


@verb("cast", outputs=("q", "scale"), fake=mxfp4_fake)
def mxfp4_quantize_of_fp8(x: Tensor, layout: str = "128x4") -> tuple[Tensor, Tensor]:
    """Quantise E4M3 values ``x [M, K]`` to MXFP4 under NVIDIA's rounding of the shared scale.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.dtype("x", checks.rank("x", x, 2), torch.float8_e4m3fn)
    if torch.compiler.is_compiling():
        return compiled_op("mxfp4_quantize_of_fp8", x, layout)
    blocks = split_blocks(x.to(torch.bfloat16), MX_BLOCK)
    byte = shared_exponent(blocks, "rceil", FP4_MAX, FP4_EMAX, FP4_FRACTION)
    return pack_nearest(blocks * power(254 - byte)[..., None]), store_scale(byte, layout)


# --- casts --------------------------------------------------------------------------------------------------------


@verb("cast")
def block_scales_to_mxfp8(x: Tensor, scale: Tensor, layout: str = "128x4", check: bool | None = None) -> Tensor:
    """Power-of-two scales of 1x128 or 128x128 blocks of codes ``x [M, K]`` as E8M0 bytes of 1x32, in a layout.

    Parameters
    ----------
    scale
        float32 ``[M, ceil(K / 128)]`` or ``[ceil(M / 128), ceil(K / 128)]``, powers of two from 2^-127.
    check
        Whether to look at the values; see :func:`kernels.checks.values`.

    Raises
    ------
    ValueRangeError
    """
    each = _spread(x, scale)[:, ::MX_BLOCK]
    bits = each.contiguous().view(torch.int32)
    field, rest = bits >> 23, bits & 0x7FFFFF
    byte = torch.where(rest == 0, field, 0)
    if checks.wanted(check, x.device):
        tiny = (field == 0) & (rest == 1 << 22)  # 2^-127, the one subnormal among them
        good = (((rest == 0) & (field > 0) & (field < 255)) | tiny).all()
        checks.values("scale", check, good, lambda: "scale must hold powers of two from 2^-127 to 2^127")
    return store_scale(byte, layout)


@verb("cast", outputs=("q", "scale"), fake=_requantised_fake)
def fp8_block_to_mxfp8(
    x: Tensor, block_scale: Tensor, layout: str = "128x4", dtype: str = "bfloat16"
) -> tuple[Tensor, Tensor]:
    """E4M3 codes ``x [M, K]`` under scales of 1x128 or 128x128, rounded to ``dtype``, quantised to MXFP8.

    Parameters
    ----------
    block_scale
        float32 ``[M, ceil(K / 128)]`` or ``[ceil(M / 128), ceil(K / 128)]``; it multiplies.
    dtype
        ``bfloat16``, ``float16`` or ``float32``: what the values are between the two casts.
    """
    if torch.compiler.is_compiling():
        return compiled_op("fp8_block_to_mxfp8", x, block_scale, layout, dtype)
    each = _spread(x, block_scale, "block_scale")
    return mxfp8_quantize((x.float() * each).to(_dtype(dtype)), layout)


@verb("cast", outputs=("q", "scale"), fake=_blocks_fake)
def mxfp8_to_fp8_block(
    x: Tensor, mx_scale: Tensor, layout: str = "128x4", dtype: str = "bfloat16"
) -> tuple[Tensor, Tensor]:
    """MXFP8 codes ``x [M, K]`` times their scales, rounded to ``dtype``, cast to E4M3 under scales of 128x128.

    ``mx_scale`` ``[M, K / 32]`` uint8, or flat in tiles ``[bytes]``.

    Raises DtypeError, InputError, LayoutError, ShapeError.
    """
    checks.dtype("x", checks.rank("x", x, 2), torch.float8_e4m3fn)
    if torch.compiler.is_compiling():
        return compiled_op("mxfp8_to_fp8_block", x, mx_scale, layout, dtype)
    return per_block_cast_to_fp8(
        _times_powers(x.float(), mx_scale, layout, "mx_scale").to(_dtype(dtype)), use_ue8m0=False
    )


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise OptionError(f"dtype={shown(name)}: there are {', '.join(DTYPES)}")
    return DTYPES[name]


def _spread(x: Tensor, scale: Tensor, name: str = "scale") -> Tensor:
    """Scales of blocks over the elements of ``x``."""
    checks.dtype("x", checks.rank("x", x, 2), torch.float8_e4m3fn)
    checks.nonempty("x", x, 0, 1)
    checks.dtype(name, checks.rank(name, scale, 2), torch.float32)
    checks.same_device(x=x, **{name: scale})
    m, k = x.shape
    checks.multiple("K", k, MX_BLOCK, f"{MX_BLOCK} codes share a scale; pad K")
    rows, columns = scale.shape
    if columns != -(-k // BLOCK) or rows not in (m, -(-m // BLOCK)):
        raise ShapeError(f"{name} has shape {list(scale.shape)}; codes [{m}, {k}] have blocks of 1x128 or 128x128")
    down = scale if rows == m else scale.repeat_interleave(BLOCK, dim=0)[:m]
    return down.repeat_interleave(BLOCK, dim=1)[:, :k]
