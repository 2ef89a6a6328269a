"""The plain-torch definition of fused sums against Fractions, and special values."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from tensorcore_scalar import Product, dot, to_float32

from oracle.errors import DtypeError, NumericsError, ShapeError
from oracle.numbers.formats import by_name
from oracle.numbers.rounding import Overflow, Rounding, encode, to_dtype
from oracle.tensorcore.fused import fma32, operand
from oracle.tensorcore.instructions import INSTRUCTIONS, Instruction, Sum, arches, instruction
from oracle.tensorcore.predict import mma

pytestmark = pytest.mark.emulated

DIRECT = [i for i in INSTRUCTIONS.values() if i.sum is not Sum.BLOCK_SCALED_GROUPS and i.scale_block is None]


def format_and_emin(inst: Instruction) -> tuple[str, int, int]:
    name = inst.operands[-1]
    if name == "tfloat32":
        return name, -126, 10
    return name, by_name(name).emin, by_name(name).fraction_bits


def hostile(inst: Instruction, rows: int, k: int, seed: int) -> torch.Tensor:
    """Values of the operand format: wide exponents, zeros, subnormals, and near-cancelling pairs."""
    name, emin, fraction_bits = format_and_emin(inst)
    random = torch.Generator().manual_seed(seed)
    significand = torch.randint(-(2 ** (fraction_bits + 1)) + 1, 2 ** (fraction_bits + 1), (rows, k), generator=random)
    spread = torch.randint(0, 14, (rows, k), generator=random) * torch.randint(0, 2, (rows, 1), generator=random)
    # The last rows live at the bottom of the range, subnormals included.
    base = torch.where(torch.arange(rows)[:, None] % 5 == 4, max(emin, -20), -4)
    exponent = (base + spread - fraction_bits).clamp(min=max(emin, -60) - fraction_bits)
    values = significand.double() * torch.exp2(exponent.double())
    values[torch.rand((rows, k), generator=random) < 0.15] = 0.0
    if inst.flush_subnormals:
        values = torch.where(values.abs() < 2.0**emin, torch.zeros_like(values), values)
    top = 2.0**30 if name == "tfloat32" else by_name(name).max_finite
    return values.clamp(-top, top)


@pytest.mark.parametrize("inst", DIRECT, ids=lambda i: i.name)
@pytest.mark.parametrize("out", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_every_instruction_equals_the_fractions(inst: Instruction, out: torch.dtype) -> None:
    """d = a.b + c over two instructions, element by element, in every bit."""
    half = out == torch.float16
    name, emin, _ = format_and_emin(inst)
    rows, k = 15, 2 * inst.k
    a, b = hostile(inst, rows, k, 1), hostile(inst, rows, k, 2)
    random = torch.Generator().manual_seed(3)
    c = torch.randn(rows, generator=random) * 2.0 ** torch.randint(-12, 6, (rows,), generator=random).float()
    c[::7] = 0.0
    if half and not inst.float16_out:
        with pytest.raises(NumericsError, match="has no torch.float16 accumulator"):
            mma(inst, a, b, c, out=out, a_format=name, b_format=name)
        return
    got = mma(inst, a, b, c, out=out, a_format=name, b_format=name)
    starts = to_dtype(c.double(), out, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
    for i in range(rows):
        products = [Product(x, y, emin, emin) for x, y in zip(a[i].tolist(), b[i].tolist(), strict=True)]
        assert dot(inst, products, Fraction(float(starts[i])), half=half) == got[i].item(), (i, inst.name)


@pytest.mark.parametrize(
    "change",
    [{"align_bits": 12}, {"group": 16}, {"round_toward_zero": False}, {"out_bits": 14}],
    ids=lambda c: next(iter(c)),
)
def test_a_sabotaged_instruction_is_caught(change: dict[str, int]) -> None:
    """The same comparison fails for 12-bit alignment, groups of 16, nearest rounding and a 14-bit accumulator."""
    inst = instruction("sm90.wgmma.fp8")
    wrong = replace(inst, **change)  # type: ignore[arg-type]
    a, b = hostile(inst, 200, 64, 4), hostile(inst, 200, 64, 5)
    c = torch.zeros(200)
    names = {"a_format": inst.operands[-1], "b_format": inst.operands[-1]}
    right = mma(inst, a, b, c, out=torch.float32, **names)
    assert not torch.equal(mma(wrong, a, b, c, out=torch.float32, **names), right)


class TestSpecialValues:
    """NaN and infinities decide as IEEE addition would; NaNs leave canonical; an all-zero sum is +0."""

    def run(
        self, name: str, a: list[float], b: list[float], c: float, out: torch.dtype = torch.float32
    ) -> torch.Tensor:
        inst = instruction(name)
        k = max(len(a), 1)
        rows = [torch.zeros(1, k, dtype=torch.float64) for _ in range(2)]
        rows[0][0, : len(a)], rows[1][0, : len(b)] = torch.tensor(a), torch.tensor(b)
        fmt = inst.operands[-1]
        return mma(inst, rows[0], rows[1], torch.tensor([c]), out=out, a_format=fmt, b_format=fmt)

    def test_nan_is_canonical(self) -> None:
        assert self.run("sm90.wgmma.fp8", [math.nan], [1.0], 0.0).view(torch.int32).item() == 0x7FFFFFFF
        half = self.run("sm90.wgmma.f16", [math.nan], [1.0], 0.0, torch.float16)
        assert half.view(torch.int16).item() == 0x7FFF

    def test_infinities(self) -> None:
        assert self.run("sm90.wgmma.fp8", [math.inf, 1.0], [1.0, 1.0], 5.0).item() == math.inf
        assert self.run("sm90.wgmma.fp8", [math.inf], [-1.0], 5.0).item() == -math.inf
        assert math.isnan(self.run("sm90.wgmma.fp8", [math.inf, math.inf], [1.0, -1.0], 0.0).item())
        assert math.isnan(self.run("sm90.wgmma.fp8", [math.inf], [0.0], 0.0).item())
        assert math.isnan(self.run("sm90.wgmma.fp8", [math.inf], [-1.0], math.inf).item())

    def test_zeros(self) -> None:
        for a in ([0.0, 0.0], [-0.0, -0.0], [1.0, -1.0]):
            assert self.run("sm90.wgmma.fp8", a, [1.0, 1.0], -0.0).view(torch.int32).item() == 0

    def test_zeros_take_no_part_in_the_alignment(self) -> None:
        """448 * 0 must not push the aligner up: 2^-9 * 2^-9 + 2^-9 * 2^-6 keeps every bit."""
        small = 2.0**-9
        got = self.run("sm90.wgmma.fp8", [448.0, small, small], [0.0, 2.0**-9, 2.0**-6], 0.0)
        assert got.item() == 2.0**-18 + 2.0**-15

    def test_subnormals_keep_their_fixed_exponent(self) -> None:
        """E4M3's 2^-9 aligns as 2^-6: next to 2^8 * 2^0 it is exact, and with t = 13 2^-9 * 2^-6 is lost."""
        inst = "sm89.mma.fp8"
        assert instruction(inst).operands[0] == "float8_e4m3fn"
        a = torch.tensor([[2.0**-9, 2.0**-9]], dtype=torch.float64)
        b = torch.tensor([[448.0, 2.0**-9]], dtype=torch.float64)
        got = mma(inst, a, b, torch.zeros(1), out=torch.float32, a_format="float8_e4m3fn", b_format="float8_e4m3fn")
        # m = -6 + 8, q = 2^-11: 448 * 2^-9 = 0.875 stays, 2^-18 goes. A normalised exponent would give q = 2^-14.
        assert got.item() == 0.875

    def test_overflow_is_infinite_also_toward_zero(self) -> None:
        assert self.run("sm90.wgmma.bf16", [2.0**100], [2.0**100], 0.0).item() == math.inf
        assert self.run("sm90.wgmma.bf16", [2.0**100, -1.0], [2.0**100, 2.0**100], 0.0).item() == math.inf
        assert self.run("sm90.wgmma.f16", [256.0], [256.0], 0.0, torch.float16).item() == math.inf

    def test_an_overflowed_chain_stays(self) -> None:
        inst = instruction("sm90.wgmma.bf16")
        a = torch.zeros(1, 32, dtype=torch.float64)
        a[0, 0], a[0, 16] = 2.0**120, -(2.0**120)
        got = mma(inst, a, a.abs(), torch.zeros(1), out=torch.float32, a_format="bfloat16", b_format="bfloat16")
        assert got.item() == math.inf

    def test_tf32_ignores_the_low_bits(self) -> None:
        x = torch.tensor([[1.0 + 2.0**-11]])
        got = mma("sm80.mma.tf32", x, torch.ones(1, 1), torch.zeros(1), out=torch.float32)
        assert got.item() == 1.0


def test_fma_rounds_once() -> None:
    """Against Fractions, with addends that make two roundings differ from one."""
    random = torch.Generator().manual_seed(0)
    a, b = torch.randn(300, generator=random), torch.randn(300, generator=random)
    c = -(a * b) * (1 + 2.0 ** torch.randint(-30, 30, (300,), generator=random).float())
    got = fma32(a, b, c)
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        assert to_float32(Fraction(x) * Fraction(y) + Fraction(z)) == r
    # 1 + 2^-24 + 2^-60 needs the last bit: through float64 alone it would round to even.
    one = fma32(torch.tensor(2.0**-30), torch.tensor(2.0**-30), torch.tensor(1.0))
    assert one.item() == 1.0
    x = torch.tensor(1.0 + 2.0**-12)  # x * x = 1 + 2^-11 + 2^-24: a tie in float32
    assert fma32(x, x, torch.tensor(2.0**-80)).item() > (x * x).item()


class TestRefusals:
    """Typed errors that list what exists."""

    def test_unknown_instruction(self) -> None:
        with pytest.raises(NumericsError, match=r"There are: sm90\.wgmma\.fp8"):
            instruction("sm90.wgmma.int4")
        with pytest.raises(NumericsError, match="did you mean .* There are: sm70"):
            instruction("sm61.dp4a")

    def test_wrong_format(self) -> None:
        with pytest.raises(DtypeError, match="sm90.wgmma.bf16 does not take float16; it takes bfloat16"):
            operand(torch.zeros(1, 1, dtype=torch.float16), instruction("sm90.wgmma.bf16"))

    def test_shapes(self) -> None:
        with pytest.raises(ShapeError, match="must agree"):
            mma("sm90.wgmma.bf16", torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(1), out=torch.float32)

    def test_table_is_complete(self) -> None:
        """Every architecture and family that the project names has a record with a source."""
        assert set(arches()) >= {
            "sm70",
            "sm75",
            "sm80",
            "sm86",
            "sm89",
            "sm90",
            "sm100",
            "sm103",
            "sm120",
            "gfx908",
            "gfx90a",
            "gfx942",
        }
        assert all(i.source and i.k % i.group == 0 for i in INSTRUCTIONS.values())


def test_float4_codes_are_read() -> None:
    codes = encode(
        torch.tensor([[0.5, -6.0]], dtype=torch.float64),
        by_name("float4_e2m1fn"),
        rounding=Rounding.NEAREST_EVEN,
        overflow=Overflow.SATURATE,
    )
    assert operand(codes, instruction("sm100.tcgen05.nvf4")).values.tolist() == [[0.5, -6.0]]
