"""Number formats as frozen records, and the value of every code.

A code ``S E F`` (sign, exponent field, fraction field) of a format with ``f`` fraction bits and exponent bias
``b`` has the value ::

    (-1)^S * 2^(E - b) * (1 + F / 2^f)        E > 0, or a format without subnormals
    (-1)^S * 2^(1 - b) * (F / 2^f)            E = 0

except for the codes that the record gives to infinity and NaN; a record without exponent bits is a fixed-point number
(E is 0), whose negative codes may be two's complements. :func:`decode_scalar` is this definition in
exact integers; :func:`decode` is its form for tensors (a table made by the definition up to 8 bits and by integer bit
arithmetic up to 16, that arithmetic above), with the same bits on every device.

Sources: OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2); Noune et al., arXiv 2206.02915 (FNUZ); OCP
Microscaling Formats 1.0 (E8M0, E2M1, E3M2, E2M3, INT8); IEEE 754-2019 (binary16, binary32); bfloat16 is binary32
cut to 16 bits.

Not here: encoding (:mod:`oracle.numbers.rounding`), scales, packed sub-byte storage (a code of 4 or 6 bits is one
``uint8``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache, partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from oracle.errors import DtypeError, InputError, OptionError
from oracle.extensions import added


class NanEncoding(Enum):
    """Which codes are NaN."""

    IEEE = "exponent field all ones and a non-zero fraction"
    ALL_ONES = "every bit below the sign is one"
    NEGATIVE_ZERO = "the code that would be -0, and no other"
    NONE = "no code is NaN"


@dataclass(frozen=True)
class Format:
    """One binary floating-point format of at most 32 bits.

    A *code* is the bit pattern as a non-negative integer; a *magnitude* is a code without its sign bit.
    Magnitudes increase with the values they stand for, so rounding and comparing can be done on either.

    Parameters
    ----------
    name : str, the name of the torch dtype where there is one.
    bits, exponent_bits, fraction_bits, bias : int, widths in bits and the exponent bias.
    signed : bool, whether the top bit is a sign.
    nan : NanEncoding, which codes are NaN.
    has_inf : bool, whether the exponent field of all ones with a zero fraction is infinity.
    has_subnormals : bool
        Whether exponent field 0 means zero and subnormals; without, field 0 is an ordinary binade and the
        format has no zero at all (E8M0).
    complement : bool
        Whether a negative code is the two's complement of its magnitude instead of sign and magnitude (INT8). The one
        code without a positive twin, -2 of INT8, is read and never written: OCP leaves it to the implementation.
    """

    name: str
    bits: int
    exponent_bits: int
    fraction_bits: int
    bias: int
    signed: bool
    nan: NanEncoding
    has_inf: bool
    has_subnormals: bool
    complement: bool = False

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)  # formats are keys of every table

    @cached_property
    def precision(self) -> int:
        """Significant bits of a normal value, the hidden one included."""
        return self.fraction_bits + 1

    @cached_property
    def emin(self) -> int:
        """Exponent of the smallest normal value."""
        return 1 - self.bias if self.has_subnormals else -self.bias

    @cached_property
    def emax(self) -> int:
        """Exponent of the largest finite value."""
        return (self.max_code >> self.fraction_bits) - self.bias

    @cached_property
    def has_zero(self) -> bool:
        """Whether some code is zero."""
        return self.has_subnormals

    @cached_property
    def has_negative_zero(self) -> bool:
        """Whether +0 and -0 have different codes."""
        return self.signed and self.has_zero and self.nan is not NanEncoding.NEGATIVE_ZERO and not self.complement

    @cached_property
    def has_nan(self) -> bool:
        """Whether some code is NaN."""
        return self.nan is not NanEncoding.NONE

    @cached_property
    def code_mask(self) -> int:
        """All the bits of a code."""
        return (1 << self.bits) - 1

    @cached_property
    def sign_mask(self) -> int:
        """The sign bit, 0 in an unsigned format."""
        return 1 << (self.bits - 1) if self.signed else 0

    @cached_property
    def magnitude_mask(self) -> int:
        """The bits of a code below its sign."""
        return self.code_mask ^ self.sign_mask

    @cached_property
    def max_code(self) -> int:
        """Code of the largest finite value."""
        if self.nan is NanEncoding.IEEE:
            return (((1 << self.exponent_bits) - 1) << self.fraction_bits) - 1
        return self.magnitude_mask - (1 if self.nan is NanEncoding.ALL_ONES else 0)

    @cached_property
    def inf_code(self) -> int | None:
        """Code of +infinity, None where the format has none."""
        return self.max_code + 1 if self.has_inf else None

    @cached_property
    def nan_code(self) -> int | None:
        """The code written for NaN: positive and quiet where there is a choice; None without NaN."""
        if self.nan is NanEncoding.NONE:
            return None
        if self.nan is NanEncoding.NEGATIVE_ZERO:
            return self.sign_mask
        if self.nan is NanEncoding.ALL_ONES:
            return self.magnitude_mask
        return self.max_code + 1 + (1 << (self.fraction_bits - 1))

    @cached_property
    def max_finite(self) -> float:
        """Largest finite value."""
        return decode_scalar(self.max_code, self)

    @cached_property
    def min_normal(self) -> float:
        """Smallest positive normal value, ``2**emin``."""
        return math.ldexp(1.0, self.emin)

    @cached_property
    def min_subnormal(self) -> float:
        """Smallest positive value; equal to :attr:`min_normal` in a format without subnormals."""
        return math.ldexp(1.0, self.emin - self.fraction_bits) if self.has_subnormals else self.min_normal

    @cached_property
    def torch_dtype(self) -> torch.dtype | None:
        """The torch dtype with one value per element, None where torch has none (4 and 6 bits, INT8)."""
        dtype = getattr(torch, self.name, None)
        return dtype if isinstance(dtype, torch.dtype) else None

    @cached_property
    def tensor_dtype(self) -> torch.dtype:
        """The dtype of a tensor of such values: :attr:`torch_dtype`, or :attr:`storage` where torch has none."""
        return self.torch_dtype or self.storage

    @cached_property
    def storage(self) -> torch.dtype:
        """The torch integer dtype in which tensors of codes are held."""
        return _STORAGE[(self.bits + 7) // 8]


_STORAGE: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64)


def _record(
    name: str,
    exponent_bits: int,
    fraction_bits: int,
    bias: int,
    nan: NanEncoding,
    *,
    signed: bool = True,
    has_inf: bool = False,
    has_subnormals: bool = True,
    complement: bool = False,
) -> Format:
    bits = int(signed) + exponent_bits + fraction_bits
    return Format(name, bits, exponent_bits, fraction_bits, bias, signed, nan, has_inf, has_subnormals, complement)


E4M3FN = _record("float8_e4m3fn", 4, 3, 7, NanEncoding.ALL_ONES)
E4M3FNUZ = _record("float8_e4m3fnuz", 4, 3, 8, NanEncoding.NEGATIVE_ZERO)
E5M2 = _record("float8_e5m2", 5, 2, 15, NanEncoding.IEEE, has_inf=True)
E5M2FNUZ = _record("float8_e5m2fnuz", 5, 2, 16, NanEncoding.NEGATIVE_ZERO)
E8M0 = _record("float8_e8m0fnu", 8, 0, 127, NanEncoding.ALL_ONES, signed=False, has_subnormals=False)
E2M1 = _record("float4_e2m1fn", 2, 1, 1, NanEncoding.NONE)
E3M2 = _record("float6_e3m2fn", 3, 2, 3, NanEncoding.NONE)
E2M3 = _record("float6_e2m3fn", 2, 3, 1, NanEncoding.NONE)
MXINT8 = _record("mxint8", 0, 7, 0, NanEncoding.NONE, complement=True)
BF16 = _record("bfloat16", 8, 7, 127, NanEncoding.IEEE, has_inf=True)
FP16 = _record("float16", 5, 10, 15, NanEncoding.IEEE, has_inf=True)
FP32 = _record("float32", 8, 23, 127, NanEncoding.IEEE, has_inf=True)

FORMATS: Mapping[str, Format] = MappingProxyType(
    {fmt.name: fmt for fmt in (E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, E2M1, E3M2, E2M3, MXINT8, BF16, FP16, FP32)}
)
_OF_DTYPE = {fmt.torch_dtype: fmt for fmt in FORMATS.values() if fmt.torch_dtype is not None}


def by_name(name: str) -> Format:
    """The format of that name.

    Raises OptionError: no format has this name.
    """
    if name in FORMATS:
        return FORMATS[name]
    if name not in foreign_formats():
        raise OptionError(f"no format is named {name!r}; there are {', '.join((*FORMATS, *foreign_formats()))}")
    return foreign_formats()[name]


@lru_cache(maxsize=1)
def foreign_formats() -> Mapping[str, Format]:
    """Formats that other distributions add, by name (:mod:`oracle.extensions`)."""
    return {fmt.name: fmt for fmt in added("fp8_oracle.formats", Format, known=FORMATS, many=True)}


def of_dtype(dtype: torch.dtype) -> Format:
    """The format of the elements of a torch dtype.

    Raises DtypeError: the dtype is no floating-point dtype with a record here (``float64`` is the oracle's own
    arithmetic, and ``float4_e2m1fn_x2`` packs two values: unpack it to ``uint8`` codes of :data:`E2M1`).
    """
    if dtype not in _OF_DTYPE:
        raise DtypeError(f"{dtype} is not a format of the oracle; take one of {', '.join(FORMATS)}")
    return _OF_DTYPE[dtype]


def decode_scalar(code: int, fmt: Format) -> float:
    """The value of one code: the definition.

    Parameters
    ----------
    code : int, ``0 <= code < 2**fmt.bits``.

    Returns float: exact; -0.0, infinities and NaN where the format has them.
    Raises OptionError: the code does not fit the format.
    """
    if not 0 <= code <= fmt.code_mask:
        raise OptionError(f"code {code} does not fit {fmt}; codes are 0..{fmt.code_mask}")
    if fmt.nan is NanEncoding.NEGATIVE_ZERO and code == fmt.sign_mask:
        return math.nan
    negative, magnitude = bool(code & fmt.sign_mask), code & fmt.magnitude_mask
    if fmt.complement and negative:
        magnitude = fmt.sign_mask - magnitude
        return -math.ldexp(float(magnitude), fmt.emin - fmt.fraction_bits)
    if magnitude == fmt.inf_code:
        return -math.inf if negative else math.inf
    if magnitude > fmt.max_code:
        return math.nan
    field, significand = divmod(magnitude, 1 << fmt.fraction_bits)
    if field > 0 or not fmt.has_subnormals:
        significand += 1 << fmt.fraction_bits
    exponent = max(field - fmt.bias, fmt.emin)
    value = math.ldexp(float(significand), exponent - fmt.fraction_bits)
    return -value if negative else value


def decode(codes: Tensor, fmt: Format | None = None) -> Tensor:
    """The values of a tensor of codes, exactly.

    Parameters
    ----------
    codes : Tensor
        Any shape and strides. Either a tensor of a torch dtype that has a format (``fmt`` may then be left
        out), or an integer tensor of codes of ``fmt``: of the width of ``fmt.storage`` (read as bits), or
        wider (read as ``0 <= code < 2**fmt.bits``).
    fmt : Format, optional, needed for integer tensors.

    Returns
    -------
    Tensor
        Float64, contiguous, same shape and device. NaN is the canonical quiet NaN whatever the code's payload and sign;
        infinities and -0 as in the format.

    Raises
    ------
    DtypeError
        No format was given for an integer tensor, or the one given is not the tensor's.
    InputError
        An integer is no code of the format.
    """
    fmt, stored = _stored(codes, fmt)
    if fmt is FP32 and keeps_subnormals(stored.device):
        return in_blocks(_widened, stored, dtype=torch.float64)
    if fmt.bits > 16:
        return in_blocks(partial(_from_bits, fmt=fmt), stored, dtype=torch.float64)
    return in_blocks(partial(_from_table, table=_table(fmt, stored.device)), stored, dtype=torch.float64)


def codes_of(x: Tensor, fmt: Format | None = None) -> Tensor:
    """The bits of a floating-point tensor as integers, without a copy.

    Parameters
    ----------
    x : Tensor, any shape, strides and floating-point dtype of 1, 2, 4 or 8 bytes, float64 included.
    fmt : Format, optional
        With it ``x`` must hold values of that format; integer codes of it, as :func:`decode` reads them, are taken too.

    Returns uint8, int16, int32 or int64 view of the same memory, same shape and strides.
    Raises DtypeError: the tensor is not floating point, or holds packed values, or values of another format.
    """
    if fmt is not None:
        return _stored(x, fmt)[1]
    if not x.is_floating_point() or x.dtype == getattr(torch, "float4_e2m1fn_x2", None):
        raise DtypeError(f"codes_of takes a floating-point tensor with one value per element, not {x.dtype}")
    return x.detach().view(_STORAGE[x.element_size()])


def from_codes(codes: Tensor, fmt: Format) -> Tensor:
    """The tensor of ``fmt.torch_dtype`` with these bits, without a copy when ``codes`` has ``fmt.storage``.

    Parameters
    ----------
    codes : Tensor, integer tensor of any shape and strides, read as by :func:`decode`.

    Raises DtypeError: torch has no such dtype (4 and 6 bits, INT8), or ``codes`` is no integer tensor; InputError: an
    integer is no code of the format.
    """
    dtype = fmt.torch_dtype
    if dtype is None:
        raise DtypeError(f"torch has no dtype with one {fmt} value per element; keep the {fmt.storage} codes")
    if codes.is_floating_point():
        raise DtypeError(f"from_codes takes integer codes, not {codes.dtype}; take codes_of(x) first")
    return _stored(codes, fmt)[1].view(dtype)


def is_nan(codes: Tensor, fmt: Format) -> Tensor:
    """Which integer ``codes`` (any shape, ``fmt.storage``) are NaN; bool of their shape."""
    if fmt.nan is NanEncoding.NEGATIVE_ZERO:
        return codes == fmt.sign_mask
    return (codes & fmt.magnitude_mask) > (fmt.inf_code or fmt.max_code)


def same_bits(x: Tensor, y: Tensor) -> Tensor:
    """Elements of ``x`` and ``y``, of one shape and one dtype that has a format, whose bits are equal; bool of that
    shape.

    Any NaN equals any NaN (hardware does not agree on payloads); -0 differs from +0. Raises DtypeError: the dtype has
    no format.
    """
    fmt = of_dtype(x.dtype)

    def same(p: Tensor, q: Tensor) -> Tensor:
        return (p == q) | (is_nan(p, fmt) & is_nan(q, fmt))

    return in_blocks(same, codes_of(x), codes_of(y), dtype=torch.bool)


# Up to 32768 elements torch starts no second thread for an operation. Waiting for threads after every short
# operation of a chain gains a factor of 2 on an idle machine and loses one of 10 on a busy one.
CPU_BLOCK = 1 << 15
DEVICE_BLOCK = 1 << 24


def share(mask: Tensor) -> float:
    """The part of the elements of ``mask`` (bool, any shape) that are True: 1.0 if and only if all are; NaN of an empty
    mask.

    torch's mean may be less than 1 where all are True: on a GPU it multiplies by a rounded reciprocal, and the mean of
    32,761 ones is 1 - 2**-53.
    """
    return int(torch.count_nonzero(mask)) / mask.numel() if mask.numel() else math.nan


def in_blocks(chain: Callable[..., Tensor], *operands: Tensor, dtype: torch.dtype) -> Tensor:
    """An elementwise chain of operations, block by block, so that its temporaries stay in the cache; the same bits.

    Parameters
    ----------
    chain : callable
        Takes one contiguous 1-D block of every operand, returns a tensor of the block's length and of
        ``dtype``. It must not write into its arguments.
    *operands : Tensor, of one shape and device, any strides.
    dtype : torch.dtype, of the result.

    Returns the results of ``chain``, contiguous, of ``dtype`` and of the operands' shape; NaN and infinities as
    ``chain`` gives them.
    """
    first = operands[0]
    block = DEVICE_BLOCK if first.is_cuda else CPU_BLOCK
    flat = [operand.detach().reshape(-1) for operand in operands]
    if first.numel() <= block:
        return chain(*flat).view(first.shape)
    result = torch.empty(first.numel(), dtype=dtype, device=first.device)
    for start in range(0, first.numel(), block):
        end = start + block
        result[start:end] = chain(*(operand[start:end] for operand in flat))
    return result.view(first.shape)


def _stored(codes: Tensor, fmt: Format | None) -> tuple[Format, Tensor]:
    """The format and the codes in ``fmt.storage``."""
    codes = codes.detach()
    if codes.is_floating_point():
        tensor_format = of_dtype(codes.dtype)
        if fmt is not None and fmt != tensor_format:
            raise DtypeError(f"a {codes.dtype} tensor is not one of {fmt}; codes_of(x) gives its bits")
        return tensor_format, codes_of(codes)
    if fmt is None or codes.dtype not in _INTEGERS:
        raise DtypeError(f"{codes.dtype} does not say what its codes are; pass integer codes and fmt")
    width = 8 * codes.element_size()
    if width < fmt.bits:
        raise DtypeError(f"{codes.dtype} is too narrow for codes of {fmt}; use {fmt.storage}")
    if width > fmt.bits and codes.numel():
        low, high = (int(bound) for bound in torch.aminmax(codes))
        if low < 0 or high > fmt.code_mask:
            raise InputError(f"{low if low < 0 else high} is no code of {fmt}; codes are 0..{fmt.code_mask}")
    return fmt, codes.view(fmt.storage) if width == 8 * fmt.storage.itemsize else codes.to(fmt.storage)


def keeps_subnormals(device: torch.device) -> bool:
    """Whether conversions between float64 and float32, one operation in place of twenty, are those of IEEE 754 there:
    on a CPU whose thread was not told to flush subnormal numbers to zero (``torch.set_flush_denormal``)."""
    return device.type == "cpu" and bool(_LEAST.to(torch.float32).to(torch.float64) == _LEAST)


_LEAST = torch.tensor(2.0**-149, dtype=torch.float64, device="cpu")


def _widened(codes: Tensor) -> Tensor:
    value = codes.view(torch.float32).to(torch.float64)
    return value.masked_fill_(value.isnan(), math.nan)


def _from_table(codes: Tensor, *, table: Tensor) -> Tensor:
    """Values of codes of up to 16 bits; those of 16 bits are read as signed integers."""
    if codes.dtype is torch.uint8 and codes.device.type == "cpu":  # NumPy takes bytes as indices; all lie in the table
        return torch.from_numpy(np.take(table.numpy(), codes.numpy(), mode="clip"))
    return table.index_select(0, codes.int() if codes.dtype is torch.uint8 else codes.int().bitwise_and_(0xFFFF))


def _from_bits(codes: Tensor, *, fmt: Format) -> Tensor:
    """Values of a format of the IEEE family, by moving the fields of its codes to those of a float64."""
    wide = codes.to(torch.int64)
    magnitude = wide & fmt.magnitude_mask
    moved = (magnitude << (52 - fmt.fraction_bits)).add_((1023 - fmt.bias) << 52).view(torch.float64)
    tiny = magnitude.to(torch.float64).mul_(fmt.min_subnormal)
    value = torch.where(magnitude < (1 << fmt.fraction_bits), tiny, moved)
    value.masked_fill_(magnitude == fmt.max_code + 1, math.inf)
    value = torch.copysign(value, (wide << (64 - fmt.bits)).view(torch.float64))
    return value.masked_fill_(magnitude > fmt.max_code + 1, math.nan)


@lru_cache(maxsize=64)
def _table(fmt: Format, device: torch.device) -> Tensor:
    if fmt.bits > 8:
        return _from_bits(torch.arange(fmt.code_mask + 1, device=device), fmt=fmt)
    values = [decode_scalar(code, fmt) for code in range(fmt.code_mask + 1)]
    return torch.tensor(values, dtype=torch.float64, device=device)
