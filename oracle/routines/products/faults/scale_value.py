"""Faults of scale values in scaled products: the right place, another number."""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.routines.fault import Call, Change, Family, Fault, Stage, WhyNot, always
from oracle.routines.products.faults.scale_index import several_rows
from oracle.routines.products.roles import BLOCKS, PRODUCTS, Matrix, matrix, read

POWERS = "every scale is a power of two"
EXPONENT = 0x7F80_0000
MANTISSA = 0x007F_FFFF
SENTINEL = -448.0  # finfo(float8_e4m3fn).min, the value of a scale that no checkpoint has filled


def exponent_only(scale: Tensor) -> Tensor:
    """The largest power of two not above a float32 scale: its mantissa cleared. NaN becomes infinity."""
    return _from_bits(_bits(scale) & EXPONENT)


def rounded_up(scale: Tensor) -> Tensor:
    """The smallest power of two not below a float32 scale."""
    bits = _bits(scale)
    special = (bits & EXPONENT) == EXPONENT
    up = (bits & EXPONENT) + torch.where((bits & MANTISSA) != 0, 1 << 23, 0)
    return _from_bits(torch.where(special, bits, up))


def one_ulp_up(scale: Tensor) -> Tensor:
    """The next float32 away from zero; infinity and NaN stay."""
    bits = _bits(scale)
    special = (bits & EXPONENT) == EXPONENT
    return _from_bits(torch.where(special, bits, bits + 1))


def _bits(scale: Tensor) -> Tensor:
    return scale.contiguous().view(torch.int32)


def _from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).contiguous().view(torch.float32)


def _truncated(call: Call, scale: Tensor) -> Tensor:
    return exponent_only(scale)


def _ceiled(call: Call, scale: Tensor) -> Tensor:
    return rounded_up(scale)


def _ulp(call: Call, scale: Tensor) -> Tensor:
    return one_ulp_up(scale)


def _bf16(call: Call, scale: Tensor) -> Tensor:
    bf16 = to_dtype(scale.to(torch.float64), torch.bfloat16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
    return bf16.to(torch.float32)


def _reciprocal_twice(call: Call, scale: Tensor) -> Tensor:
    one = torch.ones_like(scale)
    return one / (one / scale)


def _inverse(call: Call, scale: Tensor) -> Tensor:
    return torch.ones_like(scale) / scale


def _squared(call: Call, scale: Tensor) -> Tensor:
    return scale * scale


def _dropped(call: Call, scale: Tensor) -> Tensor:
    return torch.ones_like(scale)


def _half_truncated_rows(call: Call, scale: Tensor) -> Tensor:
    """The scale of one row, in the middle, a little too large."""
    scale = scale.clone()
    scale[scale.shape[0] // 2] *= 1.0 + 2.0**-7
    return scale


def _bleeding(call: Call, scale: Tensor) -> Tensor:
    """Packed without a mask: the top mantissa bit of block b lands in bit 7 of the exponent byte of block b - 1."""
    bits = _bits(scale)
    byte = bits >> 23 & 0xFF
    carry = torch.zeros_like(byte)
    carry[:, :-1] = (bits[:, 1:] >> 22 & 1) << 7
    place = torch.arange(scale.shape[1], device=scale.device)
    byte = torch.where(place % 4 != 3, byte | carry, byte)
    return _from_bits(byte << 23)


def _bytes_as_exponents(call: Call, scale: Tensor) -> Tensor:
    """Block b takes byte b mod 4 of float32 word b // 4 as an exponent."""
    blocks = scale.shape[1]
    column = torch.arange(blocks, device=scale.device)
    words = _bits(scale)[:, column // 4]
    byte = words >> (8 * (column % 4)).to(torch.int32) & 0xFF
    return _from_bits(byte << 23)


def _bf16_pairs(call: Call, scale: Tensor) -> Tensor:
    """A bfloat16 buffer read as float32: two neighbours make one number, and half the buffer is behind its end."""
    high = _bits(_bf16(call, scale)).flatten() >> 16 & 0xFFFF
    first = torch.arange(high.numel(), device=high.device) * 2 % high.numel()
    second = (first + 1) % high.numel()
    return _from_bits(high[first] | high[second] << 16).reshape(scale.shape)


def _default_byte(call: Call, scale: Tensor) -> Tensor:
    return torch.full_like(scale, 2.0**-126)


def _sentinel(call: Call, scale: Tensor) -> Tensor:
    scale = scale.clone()
    scale[-1] = SENTINEL
    return scale


def _shared(call: Call, scale: Tensor) -> Tensor:
    """Pairs of neighbouring rows share the larger scale; their codes stay as they are."""
    place = torch.arange(scale.shape[0], device=scale.device)
    partner = torch.where((place ^ 1) < scale.shape[0], place ^ 1, place)
    return torch.maximum(scale, scale[partner])


def _no_powers(role: str) -> WhyNot:
    def why_not(call: Call) -> str | None:
        scale = matrix(call, role)
        return POWERS if bool(((_bits(scale) & MANTISSA) == 0).all()) else None

    return why_not


def _one(
    name: str,
    met_in: str,
    role: str,
    change: Matrix,
    why_not: WhyNot = always,
    equivalent: str = POWERS,
    contracts: frozenset[str] = PRODUCTS,
    tolerated: str = "",
) -> Fault:
    changes: dict[Stage, Change] = {Stage.READ: read(role, change)}
    return Fault(name, Family.SCALE_VALUE, met_in, changes, contracts, why_not, equivalent, tolerated)


def faults() -> list[Fault]:
    """The faults of this family, in the order of the facts."""
    found = []
    for role, what in (("a_scale", "A scale"), ("b_scale", "B scale")):
        found += [
            _one(
                f"mantissa of the {what} truncated",
                "DeepGEMM PR 112, vllm PR 22399",
                role,
                _truncated,
                _no_powers(role),
            ),
            _one(
                f"{what} rounded up to a power of two without requantising",
                "transformers 47030, sglang PR 28418",
                role,
                _ceiled,
                _no_powers(role),
            ),
            _one(
                f"{what} rounded to bfloat16",
                "pytorch/ao PR 4725",
                role,
                _bf16,
                _no_powers(role),
                "every scale is a bfloat16 value",
            ),
            _one(f"{what} one ulp high", "sglang PR 32616", role, _ulp, equivalent=""),
            _one(f"inverse of the {what} used", "vllm PR 36297", role, _inverse, equivalent="every scale is 1"),
            _one(f"{what} applied twice", "NVIDIA/cutlass 3596", role, _squared, equivalent="every scale is 1"),
            _one(
                f"{what} dropped",
                "pytorch 190449, TensorRT-LLM PR 14199",
                role,
                _dropped,
                equivalent="every scale is 1",
            ),
        ]
    found += [
        _one(
            "A scale replaced by the reciprocal of its reciprocal",
            "sglang PR 4362, flashinfer 2441",
            "a_scale",
            _reciprocal_twice,
            _no_powers("a_scale"),
            "1/(1/s) = s for these scales",
            tolerated="1/(1/s) is s or its neighbour: orders of the epilogue differ by as much",
        ),
        _one(
            "A scale of one row 2^-7 too large",
            "H200 mutants",
            "a_scale",
            _half_truncated_rows,
            equivalent="every sum of that row is zero",
        ),
        _one(
            "mantissa bit of an A scale bleeds into the neighbour byte",
            "sglang PR 25733, TransformerEngine PR 2589",
            "a_scale",
            _bleeding,
            _no_powers("a_scale"),
            POWERS,
            BLOCKS,
        ),
        _one(
            "float32 bits of the A scale read as four exponents",
            "sglang PR 26306",
            "a_scale",
            _bytes_as_exponents,
            contracts=BLOCKS,
            equivalent="",
        ),
        _one(
            "bfloat16 bits of the A scale read as float32",
            "flashinfer PR 3497",
            "a_scale",
            _bf16_pairs,
            several_rows("a_scale"),
            "",
            PRODUCTS,
        ),
        _one(
            "A scale left at exponent byte 1",
            "triton-ascend PR 2280",
            "a_scale",
            _default_byte,
            contracts=BLOCKS,
            equivalent="",
        ),
        _one("last B scale left at its unloaded sentinel", "vllm-omni 5263", "b_scale", _sentinel, equivalent=""),
        _one(
            "two shards share the larger B scale without requantising",
            "vllm PR 41021",
            "b_scale",
            _shared,
            several_rows("b_scale"),
            "both scales are equal",
        ),
    ]
    return found
