"""Formats: published constants, the value of every code, and the ways between codes and tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction

import gfloat  # type: ignore[import-untyped]
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import formats as gfloat_formats

from oracle.errors import DtypeError, InputError, OptionError
from oracle.numbers.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FORMATS,
    FP16,
    FP32,
    MXINT8,
    Format,
    NanEncoding,
    by_name,
    codes_of,
    decode,
    decode_scalar,
    from_codes,
    of_dtype,
    share,
)

ALL = list(FORMATS.values())
SMALL = [fmt for fmt in ALL if fmt.bits <= 16]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
Decoder = Callable[[int, Format], float]
each_format = pytest.mark.parametrize("fmt", ALL, ids=str)
each_small_format = pytest.mark.parametrize("fmt", SMALL, ids=str)

# largest finite, smallest normal, smallest positive; codes of the largest, of infinity and of NaN.
PUBLISHED: dict[Format, tuple[float, float, float, int, int | None, int | None]] = {
    E4M3FN: (448.0, 2.0**-6, 2.0**-9, 0x7E, None, 0x7F),
    E4M3FNUZ: (240.0, 2.0**-7, 2.0**-10, 0x7F, None, 0x80),
    E5M2: (57344.0, 2.0**-14, 2.0**-16, 0x7B, 0x7C, 0x7E),
    E5M2FNUZ: (57344.0, 2.0**-15, 2.0**-17, 0x7F, None, 0x80),
    E8M0: (2.0**127, 2.0**-127, 2.0**-127, 0xFE, None, 0xFF),
    E2M1: (6.0, 1.0, 0.5, 0x7, None, None),
    E3M2: (28.0, 0.25, 0.0625, 0x1F, None, None),
    E2M3: (7.5, 1.0, 0.125, 0x1F, None, None),
    MXINT8: (1.984375, 2.0, 0.015625, 0x7F, None, None),
    BF16: ((2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133, 0x7F7F, 0x7F80, 0x7FC0),
    FP16: (65504.0, 2.0**-14, 2.0**-24, 0x7BFF, 0x7C00, 0x7E00),
    FP32: ((2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149, 0x7F7FFFFF, 0x7F800000, 0x7FC00000),
}
NUMPY_TYPES: dict[Format, type] = {
    E4M3FN: ml_dtypes.float8_e4m3fn,
    E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    E5M2: ml_dtypes.float8_e5m2,
    E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
    E8M0: ml_dtypes.float8_e8m0fnu,
    E2M1: ml_dtypes.float4_e2m1fn,
    E3M2: ml_dtypes.float6_e3m2fn,
    E2M3: ml_dtypes.float6_e2m3fn,
    BF16: ml_dtypes.bfloat16,
    FP16: np.float16,
    FP32: np.float32,
}
_P3109 = {info.name: info for info in gfloat_formats.p3109_binary8_formats}
GFLOAT = {
    E4M3FN: gfloat_formats.format_info_ocp_e4m3,
    E4M3FNUZ: _P3109["p3109_k8p4sf"],
    E5M2: gfloat_formats.format_info_ocp_e5m2,
    E5M2FNUZ: _P3109["p3109_k8p3sf"],
    E8M0: gfloat_formats.format_info_ocp_e8m0,
    E2M1: gfloat_formats.format_info_ocp_e2m1,
    E3M2: gfloat_formats.format_info_ocp_e3m2,
    E2M3: gfloat_formats.format_info_ocp_e2m3,
    MXINT8: gfloat_formats.format_info_ocp_int8,
    BF16: gfloat_formats.format_info_bfloat16,
    FP16: gfloat_formats.format_info_binary16,
    FP32: gfloat_formats.format_info_binary32,
}


def by_fractions(code: int, fmt: Format) -> float:
    """Significand times power of two in exact rationals, from the fields written as a string of bits."""
    if fmt.complement:
        return float(Fraction(code - 2 * fmt.sign_mask * (code >= fmt.sign_mask), 1 << (fmt.bits - 2)))
    bits = f"{code:0{fmt.bits}b}"
    sign, body = (bits[0] == "1", bits[1:]) if fmt.signed else (False, bits)
    exponent, fraction = body[: fmt.exponent_bits], body[fmt.exponent_bits :]
    if fmt.nan is NanEncoding.NEGATIVE_ZERO and sign and "1" not in body:
        return math.nan
    if fmt.nan is NanEncoding.ALL_ONES and "0" not in body:
        return math.nan
    if fmt.nan is NanEncoding.IEEE and "0" not in exponent:
        return math.nan if "1" in fraction else (-math.inf if sign else math.inf)
    hidden = "0" if fmt.has_subnormals and "1" not in exponent else "1"
    power = int(exponent, 2) - fmt.bias + (hidden == "0")
    value = Fraction(int(hidden + fraction, 2)) * Fraction(2) ** (power - fmt.fraction_bits)
    return math.copysign(float(value), -1.0 if sign else 1.0)


def by_gfloat(code: int, fmt: Format) -> float:
    """The value according to gfloat."""
    return float(gfloat.decode_float(GFLOAT[fmt], code).fval)


def by_numpy(code: int, fmt: Format) -> float:
    """The value according to ml_dtypes, or to numpy where the type is its own."""
    if fmt is MXINT8:
        return float(np.array([code], dtype=np.uint8).view(np.int8)[0]) / 64
    integer = {1: np.uint8, 2: np.uint16, 4: np.uint32}[(fmt.bits + 7) // 8]
    with np.errstate(invalid="ignore"):
        return float(np.array([code], dtype=integer).view(NUMPY_TYPES[fmt]).astype(np.float64)[0])


def same(a: float, b: float) -> bool:
    """Equal with the sign of zero, or both NaN."""
    return (a == b and math.copysign(1.0, a) == math.copysign(1.0, b)) or (a != a and b != b)


def disagreements(ours: Decoder, theirs: Decoder, fmt: Format) -> list[int]:
    """Codes that two decoders read differently: all codes up to 8 bits, else the ends and a stride."""
    last = fmt.code_mask
    if fmt.bits <= 8:
        codes = list(range(last + 1))
    else:
        binades = range(0, last + 1, 1 << fmt.fraction_bits)
        codes = [code for first in binades for code in (first, first + 1, (first - 1) & last)]
        codes += range(0, last + 1, 97 if fmt.bits == 16 else 8_675_309)
    return [code for code in codes if not same(ours(code, fmt), theirs(code, fmt))]


class TestRecords:
    """Derived properties against the published tables and three other libraries' records."""

    @each_format
    def test_constants(self, fmt: Format) -> None:
        largest, normal, smallest, max_code, inf_code, nan_code = PUBLISHED[fmt]
        assert (fmt.max_finite, fmt.min_normal, fmt.min_subnormal) == (largest, normal, smallest)
        assert (fmt.max_code, fmt.inf_code, fmt.nan_code) == (max_code, inf_code, nan_code)
        assert 2.0**fmt.emin == normal
        assert 2.0**fmt.emax <= largest < 2.0 ** (fmt.emax + 1)
        assert fmt.bits == fmt.signed + fmt.exponent_bits + fmt.fraction_bits

    @pytest.mark.parametrize("fmt", NUMPY_TYPES, ids=str)
    def test_finfo(self, fmt: Format) -> None:
        info = ml_dtypes.finfo(NUMPY_TYPES[fmt])  # type: ignore[no-untyped-call]
        assert (float(info.max), float(info.smallest_normal)) == (fmt.max_finite, fmt.min_normal)
        assert (info.bits, info.nmant) == (fmt.bits, fmt.fraction_bits)
        if fmt.has_subnormals:
            assert float(info.smallest_subnormal) == fmt.min_subnormal
        if fmt.torch_dtype is not None:
            assert torch.finfo(fmt.torch_dtype).max == fmt.max_finite
            assert torch.finfo(fmt.torch_dtype).tiny == fmt.min_normal

    @each_format
    def test_gfloat(self, fmt: Format) -> None:
        info = GFLOAT[fmt]
        assert (info.max, info.smallest, info.bias) == (fmt.max_finite, fmt.min_subnormal, fmt.bias)
        assert (info.precision, info.expBits) == (fmt.precision, fmt.exponent_bits)
        assert (info.has_nz, info.has_zero) == (fmt.has_negative_zero, fmt.has_zero)
        assert (info.num_nans > 0, info.domain is gfloat.Domain.Extended) == (fmt.has_nan, fmt.has_inf)

    def test_frozen(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            E4M3FN.bias = 8  # type: ignore[misc]
        with pytest.raises(TypeError):
            FORMATS["float64"] = FP32  # type: ignore[index]

    def test_names(self) -> None:
        """Every format but those of MX elements is a torch dtype, under its name."""
        for name, fmt in FORMATS.items():
            assert by_name(name) is fmt
            assert str(fmt) == name
            if fmt in (E2M1, E3M2, E2M3, MXINT8):
                assert fmt.torch_dtype is None
            else:
                assert fmt.torch_dtype is getattr(torch, name)
                assert of_dtype(getattr(torch, name)) is fmt
                assert fmt.storage.itemsize * 8 == fmt.bits
        with pytest.raises(OptionError, match="no format is named 'fp8'; there are float8_e4m3fn"):
            by_name("fp8")
        for dtype in (torch.float64, torch.int8, torch.bool, torch.float4_e2m1fn_x2):
            with pytest.raises(DtypeError, match="is not a format"):
                of_dtype(dtype)


class TestDefinition:
    """One code, one value (exhaustive up to 8 bits; every binade's ends and a stride above)."""

    @each_format
    @pytest.mark.parametrize("witness", [by_fractions, by_gfloat, by_numpy])
    def test_agrees(self, fmt: Format, witness: Decoder) -> None:
        assert disagreements(decode_scalar, witness, fmt) == []

    @pytest.mark.parametrize(
        ("fmt", "change"),
        [
            (E4M3FN, {"bias": 8}),
            (E4M3FN, {"nan": NanEncoding.IEEE, "has_inf": True}),
            (E4M3FNUZ, {"nan": NanEncoding.ALL_ONES}),
            (E5M2, {"has_inf": False, "nan": NanEncoding.ALL_ONES}),
            (E5M2FNUZ, {"bias": 15}),
            (E8M0, {"has_subnormals": True}),
            (E8M0, {"nan": NanEncoding.NONE}),
            (E2M1, {"exponent_bits": 1, "fraction_bits": 2}),
            (E3M2, {"exponent_bits": 2, "fraction_bits": 3}),
            (E2M3, {"bias": 2}),
            (MXINT8, {"complement": False}),
            (BF16, {"exponent_bits": 7, "fraction_bits": 8}),
            (FP16, {"has_subnormals": False}),
            (FP32, {"signed": False}),
        ],
        ids=str,
    )
    def test_a_wrong_record_is_seen(self, fmt: Format, change: dict[str, object]) -> None:
        """The negative test: the same comparison with one field of the record wrong."""
        broken = dataclasses.replace(fmt, **change)  # type: ignore[arg-type]
        assert disagreements(lambda code, _: decode_scalar(code, broken), by_gfloat, fmt)

    @pytest.mark.parametrize("fmt", [fmt for fmt in ALL if fmt.has_subnormals], ids=str)
    def test_flushed_subnormals_are_seen(self, fmt: Format) -> None:
        def flushed(code: int, fmt: Format) -> float:
            value = decode_scalar(code, fmt)
            return value * 0.0 if abs(value) < fmt.min_normal else value

        assert disagreements(flushed, by_fractions, fmt)

    @each_format
    def test_a_code_that_does_not_fit_is_refused(self, fmt: Format) -> None:
        for code in (-1, fmt.code_mask + 1):
            with pytest.raises(OptionError, match=f"code {code} does not fit {fmt}"):
                decode_scalar(code, fmt)


@pytest.mark.parametrize("device", DEVICES)
class TestVectors:
    """The vectorised twin: the same bits as the definition for every code, from every kind of tensor."""

    @each_small_format
    def test_all_codes(self, fmt: Format, device: str) -> None:
        definition = [decode_scalar(code, fmt) for code in range(fmt.code_mask + 1)]
        expected = torch.tensor(definition, dtype=torch.float64)
        codes = torch.arange(fmt.code_mask + 1, device=device)
        values = decode(codes, fmt).cpu()
        assert torch.equal(codes_of(values), codes_of(expected))
        stored = codes.to(fmt.storage)
        assert torch.equal(codes_of(decode(stored, fmt).cpu()), codes_of(expected))
        if fmt.torch_dtype is not None:
            tensor = from_codes(codes, fmt)
            assert tensor.dtype is fmt.torch_dtype
            assert torch.equal(codes_of(tensor), stored)
            assert torch.equal(codes_of(decode(tensor).cpu()), codes_of(expected))

    def test_float32(self, device: str) -> None:
        """Random patterns, and all binades' ends, against the processor's widening."""
        generator = torch.Generator().manual_seed(4)
        ends = (torch.arange(512)[:, None] * 2**23 + torch.tensor([0, 1, 2**22, 2**23 - 1])).flatten()
        codes = torch.cat([ends, torch.randint(0, 2**32, (200_000,), generator=generator)])
        with np.errstate(invalid="ignore"):
            widened = torch.from_numpy(codes.numpy().astype(np.uint32).view(np.float32).astype(np.float64))
        widened.masked_fill_(widened.isnan(), math.nan)
        assert torch.equal(codes_of(decode(codes.to(device), FP32).cpu()), codes_of(widened))

    def test_strides(self, device: str) -> None:
        codes = torch.arange(240, dtype=torch.uint8, device=device).reshape(12, 20)
        for view in (codes.t(), codes[::2, 1::3], codes[0].expand(3, 20), codes[:0], codes[3, 4]):
            expected = [repr(decode_scalar(code, E4M3FN)) for code in view.flatten().tolist()]
            for tensor in (view, from_codes(view, E4M3FN)):
                values = decode(tensor, E4M3FN)
                assert values.shape == view.shape
                assert values.is_contiguous()
                assert list(map(repr, values.flatten().tolist())) == expected
            assert torch.equal(codes_of(from_codes(view, E4M3FN)), view)
        halves = torch.arange(60, device=device).reshape(6, 10).t()
        assert torch.equal(codes_of(from_codes(halves, FP16)).long(), halves)
        assert codes_of(torch.zeros(3, dtype=torch.float64, device=device)).dtype is torch.int64

    def test_codes_are_views(self, device: str) -> None:
        x = torch.zeros(4, dtype=torch.bfloat16, device=device)
        codes_of(x)[1] = 0x3F80
        assert x.tolist() == [0.0, 1.0, 0.0, 0.0]
        assert from_codes(codes_of(x), BF16).data_ptr() == x.data_ptr()

    def test_what_is_no_code_is_refused(self, device: str) -> None:
        wide = torch.tensor([0, 256], device=device)
        for function in (decode, from_codes):
            with pytest.raises(InputError, match=r"256 is no code of float8_e5m2; codes are 0..255"):
                function(wide, E5M2)
            with pytest.raises(InputError, match="-1 is no code"):
                function(wide - 257 + 256, E5M2)
            with pytest.raises(DtypeError, match="bool"):
                function(wide.bool(), E5M2)
            with pytest.raises(DtypeError, match="uint8 is too narrow"):
                function(wide.to(torch.uint8), BF16)
        with pytest.raises(InputError, match="16 is no code of float4_e2m1fn"):
            decode(torch.tensor([16], dtype=torch.uint8, device=device), E2M1)
        with pytest.raises(DtypeError, match="pass integer codes and fmt"):
            decode(wide)
        with pytest.raises(DtypeError, match="is not one of float8_e5m2"):
            decode(torch.zeros(1, dtype=torch.bfloat16, device=device), E5M2)
        with pytest.raises(DtypeError, match="keep the torch.uint8 codes"):
            from_codes(wide, E2M1)
        with pytest.raises(DtypeError, match="codes_of"):
            from_codes(torch.zeros(1, device=device), FP32)
        for tensor in (wide, torch.zeros(2, dtype=torch.float4_e2m1fn_x2).to(device)):
            with pytest.raises(DtypeError, match="one value per element"):
                codes_of(tensor)


def test_the_share_of_all_elements_is_one() -> None:
    """Whatever their number is: the product of 49 and the rounded 1/49 is below 1; and less where one is missing."""
    assert 49 * (1 / 49) < 1.0
    for n in (1, 49, 32761):
        mask = torch.ones(n, dtype=torch.bool)
        assert share(mask) == 1.0
        mask[-1] = False
        assert share(mask) == (n - 1) / n < 1.0
    assert math.isnan(share(torch.ones(0, dtype=torch.bool)))
