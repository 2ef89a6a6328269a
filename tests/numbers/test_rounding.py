"""Rounding of numbers and pairs: by construction, against the scalar definition, and sabotaged."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from rounding_points import F64, TINY, Points, points, policies, sentence, wrong
from torch import Tensor

from oracle.errors import DeviceError, DtypeError, InputError, OptionError, ShapeError
from oracle.numbers import formats
from oracle.numbers.formats import (
    BF16,
    E2M1,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FORMATS,
    FP16,
    FP32,
    Format,
    codes_of,
    decode,
)
from oracle.numbers.rounding import (
    Overflow,
    Rounding,
    encode,
    encode_pair,
    encode_scalar,
    exponent_of,
    f32,
    pair_to_dtype,
    power_of_two,
    round_pair,
    round_to,
    to_dtype,
)

RNE, SATURATE, NAN, INF = Rounding.NEAREST_EVEN, Overflow.SATURATE, Overflow.NAN, Overflow.INF
ALL = list(FORMATS.values())
NARROW = [fmt for fmt in ALL if fmt.bits <= 8]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
Encoder = Callable[..., Tensor]
each_format = pytest.mark.parametrize("fmt", ALL, ids=str)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plain() -> Callable[[Format], Points]:
    """The points of a format, made once."""
    made = {fmt: points(fmt) for fmt in ALL}
    return lambda fmt: made[fmt]


@pytest.fixture(scope="module")
def paired() -> Callable[[Format], Points]:
    """The pairs of a format, made once."""
    made = {fmt: points(fmt, pairs=True) for fmt in ALL}
    return lambda fmt: made[fmt]


def mismatches(encoder: Encoder, at: Points, rounding: Rounding, overflow: Overflow) -> Tensor:
    """Run an encoder over points; where it is wrong."""
    operands = (at.hi, at.lo) if bool((at.lo != 0).any()) else (at.hi,)
    codes = encoder(*operands, at.fmt, rounding=rounding, overflow=overflow)
    return wrong(codes, at.expected(rounding, overflow), at.fmt)


@pytest.mark.turns(4)
class TestByConstruction:
    """All codes, all midpoints and their neighbours, both signs, all roundings, all policies."""

    @pytest.mark.sampled(3)
    @each_format
    @pytest.mark.parametrize("device", DEVICES)
    def test_numbers(self, fmt: Format, device: str, plain: Callable[[Format], Points]) -> None:
        at = plain(fmt)
        x = at.hi.to(device)
        for rounding in Rounding:
            for overflow in policies(fmt):
                expected = at.expected(rounding, overflow)
                codes = encode(x, fmt, rounding=rounding, overflow=overflow).cpu()
                bad = wrong(codes, expected, fmt)
                assert not bad.any(), f"{rounding.name} {overflow.name}: {sentence(bad, at, codes, expected)}"
                values = round_to(x, fmt, rounding=rounding, overflow=overflow).cpu()
                assert torch.equal(codes_of(values), codes_of(decode(codes, fmt)))

    @pytest.mark.sampled(5)
    @each_format
    @pytest.mark.parametrize("device", DEVICES)
    def test_pairs(self, fmt: Format, device: str, paired: Callable[[Format], Points]) -> None:
        at = paired(fmt)
        hi, lo = at.hi.to(device), at.lo.to(device)
        for rounding in Rounding:
            for overflow in policies(fmt):
                expected = at.expected(rounding, overflow)
                codes = encode_pair(hi, lo, fmt, rounding=rounding, overflow=overflow).cpu()
                bad = wrong(codes, expected, fmt)
                assert not bad.any(), f"{rounding.name} {overflow.name}: {sentence(bad, at, codes, expected)}"
                values = round_pair(hi, lo, fmt, rounding=rounding, overflow=overflow).cpu()
                assert torch.equal(codes_of(values), codes_of(decode(codes, fmt)))

    @pytest.mark.sampled(3)
    @each_format
    def test_the_scalar_definition(self, fmt: Format, plain: Callable[[Format], Points]) -> None:
        """All points up to 8 bits; wider, every 29th and the ends, where the policies act."""
        at = plain(fmt)
        half = len(at.hi) // 2
        chosen = torch.arange(0, len(at.hi), 1 if fmt in NARROW else 29)
        ends = torch.cat([torch.arange(0, 60), torch.arange(half - 60, half)])
        for indices, overflows in ((chosen, policies(fmt)[:1]), (ends, policies(fmt))):
            indices = torch.cat([indices, indices + half]) if indices is ends else indices
            indices = indices[indices < len(at.hi)]
            numbers = at.hi[indices].tolist()
            for rounding in Rounding:
                for overflow in policies(fmt) if fmt in NARROW else overflows:
                    expected = at.expected(rounding, overflow)[indices].tolist()
                    codes = [encode_scalar(x, fmt, rounding=rounding, overflow=overflow) for x in numbers]
                    assert codes == expected, (rounding, overflow)


def _half_up(x: Tensor, fmt: Format, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    return encode(x, fmt, rounding=Rounding.NEAREST_AWAY if rounding is RNE else rounding, overflow=overflow)


def _through_float32(x: Tensor, fmt: Format, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    return encode(x.float().double(), fmt, rounding=rounding, overflow=overflow)


def _flush_subnormals(x: Tensor, fmt: Format, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    return encode(torch.where(x.abs() < fmt.min_normal, x * 0, x), fmt, rounding=rounding, overflow=overflow)


def _saturate_at_256(x: Tensor, fmt: Format, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    return encode(x.clamp(-256, 256), fmt, rounding=rounding, overflow=overflow)


def _overflow_first(x: Tensor, fmt: Format, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    beyond = torch.where(x.abs() > fmt.max_finite, x * math.inf, x)
    return encode(beyond, fmt, rounding=rounding, overflow=overflow)


def _lose_the_sign_of_zero(x: Tensor, fmt: Format, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    return encode(x + 0.0, fmt, rounding=rounding, overflow=overflow)


def _clamp_nan(x: Tensor, fmt: Format, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    numbers = x.nan_to_num(fmt.max_finite, math.inf, -math.inf)
    return encode(numbers, fmt, rounding=rounding, overflow=overflow)


def _up_means_away(x: Tensor, fmt: Format, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    return encode(x, fmt, rounding=Rounding.AWAY if rounding is Rounding.UP else rounding, overflow=overflow)


def _one_code_off(x: Tensor, fmt: Format, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    codes = encode(x, fmt, rounding=rounding, overflow=overflow)
    return torch.where(codes == fmt.max_code - 1, codes - 1, codes)


def _ignore_lo(hi: Tensor, lo: Tensor, fmt: Format, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    return encode(hi, fmt, rounding=rounding, overflow=overflow)


def _add_first(hi: Tensor, lo: Tensor, fmt: Format, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    return encode(hi + lo, fmt, rounding=rounding, overflow=overflow)


def _sticky_without_truncation(
    hi: Tensor, lo: Tensor, fmt: Format, *, rounding: Rounding, overflow: Overflow
) -> Tensor:
    sticky = (hi.view(torch.int64) | (lo != 0).long()).view(F64)
    return encode(sticky, fmt, rounding=rounding, overflow=overflow)


def _always_step(hi: Tensor, lo: Tensor, fmt: Format, *, rounding: Rounding, overflow: Overflow) -> Tensor:
    away = torch.copysign(torch.full_like(hi, math.inf), lo)
    return encode(torch.where(lo == 0, hi, hi.nextafter(away)), fmt, rounding=rounding, overflow=overflow)


SABOTAGE: list[tuple[Encoder, list[Format], Rounding, Overflow]] = [
    (_half_up, ALL, RNE, SATURATE),
    (_through_float32, ALL[:-1], RNE, SATURATE),
    (_flush_subnormals, [fmt for fmt in ALL if fmt.has_subnormals], RNE, SATURATE),
    (_saturate_at_256, [E4M3FN, E5M2, BF16, FP16, FP32], RNE, SATURATE),
    (_overflow_first, [E4M3FN, E5M2, BF16, FP16, FP32], RNE, NAN),
    (_lose_the_sign_of_zero, [E4M3FN, E5M2, E2M1, BF16, FP16, FP32], RNE, SATURATE),
    (_clamp_nan, [fmt for fmt in ALL if fmt.has_nan], RNE, SATURATE),
    (_up_means_away, [fmt for fmt in ALL if fmt.signed], Rounding.UP, SATURATE),
    (_one_code_off, ALL, RNE, SATURATE),
]
PAIR_SABOTAGE: list[tuple[Encoder, list[Format], Rounding, Overflow]] = [
    (_ignore_lo, ALL, RNE, SATURATE),
    (_add_first, ALL, RNE, SATURATE),
    (_sticky_without_truncation, ALL, RNE, SATURATE),
    (_always_step, ALL, RNE, SATURATE),
]


class TestSabotage:
    """The check above catches encoders that are wrong in the ways encoders are wrong."""

    @pytest.mark.parametrize(
        ("encoder", "fmt", "rounding", "overflow"),
        [
            pytest.param(encoder, fmt, rounding, overflow, id=f"{encoder.__name__.strip('_')}-{fmt}")
            for encoder, formats, rounding, overflow in SABOTAGE
            for fmt in formats
        ],
    )
    def test_numbers(
        self,
        encoder: Encoder,
        fmt: Format,
        rounding: Rounding,
        overflow: Overflow,
        plain: Callable[[Format], Points],
    ) -> None:
        assert not mismatches(encode, plain(fmt), rounding, overflow).any()
        assert mismatches(encoder, plain(fmt), rounding, overflow).any()

    @pytest.mark.parametrize(
        ("encoder", "fmt", "rounding", "overflow"),
        [
            pytest.param(encoder, fmt, rounding, overflow, id=f"{encoder.__name__.strip('_')}-{fmt}")
            for encoder, formats, rounding, overflow in PAIR_SABOTAGE
            for fmt in formats
        ],
    )
    def test_pairs(
        self,
        encoder: Encoder,
        fmt: Format,
        rounding: Rounding,
        overflow: Overflow,
        paired: Callable[[Format], Points],
    ) -> None:
        assert not mismatches(encode_pair, paired(fmt), rounding, overflow).any()
        assert mismatches(encoder, paired(fmt), rounding, overflow).any()


def float64(*values: float) -> Tensor:
    """A float64 vector."""
    return torch.tensor(values, dtype=F64)


class TestRules:
    """The decisions that a table of points could hide."""

    def test_a_cast_through_float32_is_a_trap(self) -> None:
        """17 + 2^-30 lies above the tie between 16 and 18; float32 puts it onto the tie: 16."""
        x = float64(17 + 2.0**-30)
        assert x.float().item() == 17.0
        assert round_to(x, E4M3FN, rounding=RNE, overflow=NAN).item() == 18.0
        hi, lo = float64(17, 17, 17), float64(2.0**-30, 2.0**-80, -(2.0**-80))
        pair = round_pair(hi, lo, E4M3FN, rounding=RNE, overflow=NAN)
        assert pair.tolist() == [18.0, 18.0, 16.0]
        assert to_dtype(x, torch.float8_e4m3fn, rounding=RNE, overflow=NAN).view(torch.uint8).item() == 0x59
        y = float64(1 + 2.0**-8 + 2.0**-40)
        assert to_dtype(y, torch.bfloat16, rounding=RNE, overflow=INF).float().item() == 1 + 2.0**-7

    def test_464_is_the_last_that_fits_e4m3fn(self) -> None:
        """The tie above 448 goes to its even code; rounding comes before overflow."""
        x = float64(464.0, math.nextafter(464.0, math.inf), -465.0)
        assert encode(x, E4M3FN, rounding=RNE, overflow=NAN).tolist() == [0x7E, 0x7F, 0x7F]
        assert encode(x, E4M3FN, rounding=RNE, overflow=SATURATE).tolist() == [0x7E, 0x7E, 0xFE]

    def test_rounding_toward_zero_never_overflows(self) -> None:
        """IEEE 754, 7.4; an infinite input is no overflow and follows the policy."""
        x = float64(1e300, -1e300, math.inf, -math.inf)
        big = BF16.max_finite
        for rounding, signs in (
            (Rounding.TOWARD_ZERO, [big, -big]),
            (Rounding.UP, [math.inf, -big]),
            (Rounding.DOWN, [big, -math.inf]),
            (Rounding.AWAY, [math.inf, -math.inf]),
        ):
            values = round_to(x, BF16, rounding=rounding, overflow=INF).tolist()
            assert values == [*signs, math.inf, -math.inf]

    def test_e8m0_has_no_zero_and_no_sign(self) -> None:
        """[0, 2^-127) becomes 2^-127, negative values become NaN; the tie goes to the even code."""
        x = float64(0.0, -0.0, TINY, -TINY, 1.5, 3.0, 2.0**127 * 1.5, math.nan)
        codes = [0, 0, 0, 0xFF, 0x80, 0x80, 0xFE, 0xFF]
        assert encode(x, E8M0, rounding=RNE, overflow=NAN).tolist() == codes
        assert [encode_scalar(v, E8M0, rounding=RNE, overflow=NAN) for v in x.tolist()] == codes

    def test_fnuz_has_one_zero(self) -> None:
        for fmt in (E4M3FNUZ, E5M2FNUZ):
            x = float64(-0.0, -TINY, math.nan, -math.inf)
            assert encode(x, fmt, rounding=RNE, overflow=NAN).tolist() == [0, 0, 0x80, 0x80]
            assert math.copysign(1.0, round_to(x, fmt, rounding=RNE, overflow=NAN)[0].item()) == 1.0

    def test_a_pair_takes_any_two_numbers(self) -> None:
        """Unnormalised, cancelling, huge and infinite pairs; a zero sum has the sign of hi."""
        big = torch.finfo(F64).max
        hi = float64(2.0**-60, 1.0, -1.0, -0.0, 0.0, big, -big, math.inf, math.nan, 1.0, 1.0, math.inf, TINY)
        lo = float64(17.0, -1.0, 1.0, 0.0, -0.0, big, -big, 3.0, 0.0, math.nan, -math.inf, -math.inf, -TINY)
        values = round_pair(hi, lo, FP32, rounding=Rounding.UP, overflow=INF)
        expected = [17 + 2.0**-19, 0.0, -0.0, -0.0, 0.0, math.inf, -FP32.max_finite, math.inf]
        expected += [math.nan, math.nan, -math.inf, math.inf, 0.0]
        assert torch.equal(codes_of(values), codes_of(float64(*expected)))
        alone = round_pair(float64(math.inf), float64(3.0), FP32, rounding=RNE, overflow=INF)
        assert alone.item() == math.inf

    def test_e2m1_refuses_nan(self) -> None:
        with pytest.raises(InputError, match="float4_e2m1fn has no NaN"):
            encode(float64(1.0, math.nan), E2M1, rounding=RNE, overflow=SATURATE)
        with pytest.raises(InputError, match="float4_e2m1fn has no NaN"):
            round_pair(float64(1.0), float64(math.nan), E2M1, rounding=RNE, overflow=SATURATE)
        with pytest.raises(InputError, match="float4_e2m1fn has no NaN"):
            encode_scalar(math.nan, E2M1, rounding=RNE, overflow=SATURATE)
        assert encode(float64(math.inf, -math.inf), E2M1, rounding=RNE, overflow=SATURATE).tolist() == [7, 15]

    @each_format
    def test_an_impossible_policy_is_refused(self, fmt: Format) -> None:
        for overflow in set(Overflow) - set(policies(fmt)):
            with pytest.raises(OptionError, match=f"{fmt} has no"):
                encode_scalar(1.0, fmt, rounding=RNE, overflow=overflow)
            for function in (encode, round_to):
                with pytest.raises(OptionError, match="use SATURATE"):
                    function(float64(1.0), fmt, rounding=RNE, overflow=overflow)

    def test_wrong_operands_are_refused(self) -> None:
        x = float64(1.0, 2.0)
        with pytest.raises(DtypeError, match="float32"):
            encode(x.float(), BF16, rounding=RNE, overflow=INF)
        with pytest.raises(DtypeError, match="float64 is not a format"):
            to_dtype(x, F64, rounding=RNE, overflow=INF)
        with pytest.raises(ShapeError, match=r"hi is \(2,\), lo \(1,\)"):
            encode_pair(x, x[:1], BF16, rounding=RNE, overflow=INF)
        with pytest.raises(DeviceError, match="lo on meta"):
            round_pair(x, x.to("meta"), BF16, rounding=RNE, overflow=INF)
        with pytest.raises(DtypeError, match="integer exponents"):
            power_of_two(x)
        with pytest.raises(DtypeError, match="float32"):
            exponent_of(x.float())


class TestToFloat32:
    """The conversion of the device is the rounding of the definition, subnormals, overflow and NaN included."""

    @pytest.mark.parametrize("offset", [-1, 0, 1])
    def test_at_midpoints_and_beside_them(self, offset: int) -> None:
        low = torch.arange(0, 0x7F800001, 0x3FFF1, dtype=torch.int64).to(torch.int32).view(torch.float32).double()
        high = torch.nextafter(low.float(), torch.tensor(math.inf)).double()
        x = ((low + high) / 2).view(torch.int64).add(offset).view(torch.float64)
        x = torch.cat([x, -x, torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 2.0**-1074], dtype=F64)])
        due, codes = round_to(x, FP32, rounding=RNE, overflow=INF), encode(x, FP32, rounding=RNE, overflow=INF)
        assert torch.equal(codes_of(f32(x)), codes_of(due))
        assert torch.equal(codes_of(to_dtype(x, torch.float32, rounding=RNE, overflow=INF)), codes)


class TestShapes:
    """Strides, blocks, empty and scalar tensors change no value."""

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4)], ids=str)
    def test_shape_is_kept(self, shape: tuple[int, ...]) -> None:
        x = torch.full(shape, 17.25, dtype=F64)
        assert encode(x, E4M3FN, rounding=RNE, overflow=NAN).shape == shape
        assert round_pair(x, x * 0, FP16, rounding=RNE, overflow=INF).shape == shape
        assert pair_to_dtype(x, x * 0, torch.bfloat16, rounding=RNE, overflow=INF).shape == shape
        assert power_of_two(exponent_of(x)).shape == shape

    def test_strides_are_followed(self) -> None:
        x = torch.randn(6, 10, dtype=F64, generator=torch.Generator().manual_seed(1))
        for view in (x.t(), x[::2, 1::3], x[0].expand(4, 10), x.flip(0)):
            whole = encode(view.contiguous(), BF16, rounding=RNE, overflow=INF)
            assert torch.equal(encode(view, BF16, rounding=RNE, overflow=INF), whole)
            assert torch.equal(encode_pair(view, view * 0, BF16, rounding=RNE, overflow=INF), whole)
            assert torch.equal(exponent_of(view), exponent_of(view.contiguous()))

    def test_blocks_leave_no_seam(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x = torch.randn(1001, dtype=F64, generator=torch.Generator().manual_seed(2))
        lo = x * 2.0**-55
        whole = encode_pair(x, lo, FP16, rounding=Rounding.UP, overflow=INF)
        values = round_pair(x, lo, FP16, rounding=Rounding.UP, overflow=INF)
        monkeypatch.setattr(formats, "CPU_BLOCK", 100)
        assert torch.equal(encode_pair(x, lo, FP16, rounding=Rounding.UP, overflow=INF), whole)
        assert torch.equal(round_pair(x, lo, FP16, rounding=Rounding.UP, overflow=INF), values)
        assert torch.equal(decode(whole, FP16), values)

    def test_operands_are_not_written(self) -> None:
        x, lo = float64(1.1, -0.0, math.nan, 1e300), float64(1e-20, 1.0, 0.0, 1e290)
        before = codes_of(x).clone(), codes_of(lo).clone()
        for rounding in Rounding:
            encode(x, E8M0, rounding=rounding, overflow=NAN)
            round_to(x, E4M3FNUZ, rounding=rounding, overflow=NAN)
            round_pair(x, lo, FP32, rounding=rounding, overflow=INF)
        assert torch.equal(codes_of(x), before[0])
        assert torch.equal(codes_of(lo), before[1])

    def test_gradients_do_not_enter(self) -> None:
        x = float64(1.1).requires_grad_()
        assert not round_to(x, BF16, rounding=RNE, overflow=INF).requires_grad


@pytest.mark.parametrize("device", DEVICES)
class TestPowersOfTwo:
    """Exponents from bits, over the whole range of float64."""

    def test_power_of_two(self, device: str) -> None:
        e = torch.arange(-1100, 1100)
        expected = float64(*(math.ldexp(1.0, k) if k < 1024 else math.inf for k in e.tolist()))
        for dtype in (torch.int16, torch.int32, torch.int64):
            assert torch.equal(power_of_two(e.to(device, dtype)).cpu(), expected)
        far = torch.tensor([-(2**63), 2**63 - 1], device=device)
        assert power_of_two(far).tolist() == [0.0, math.inf]

    def test_exponent_of(self, device: str) -> None:
        e = torch.arange(-1074, 1024)
        one = power_of_two(e)
        below = one.nextafter(float64(0.0))
        x = torch.cat([one, -one, one.nextafter(float64(math.inf)).clamp(max=torch.finfo(F64).max), below])
        expected = [math.frexp(v)[1] - 1 if v else -1075 for v in x.tolist()]
        assert exponent_of(x.to(device)).tolist() == expected
        special = float64(0.0, -0.0, math.inf, math.nan).to(device)
        assert exponent_of(special).tolist() == [-1075, -1075, 1024, 1024]
