"""Whole-kernel schedules: scales inside the instruction, special values, ragged shapes, bias, and refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from tensorcore_scalar import Product, aligned_sum, exponent, rounded, to_float32

from oracle.errors import NumericsError, ShapeError
from oracle.numbers.formats import by_name, codes_of, decode
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.tensorcore import predict
from oracle.tensorcore.fused import fma32
from oracle.tensorcore.logits import predict_logits
from oracle.tensorcore.predict import canonical_nan, predict_product, store
from oracle.tensorcore.schedules import get, schedules
from oracle.truth.gemm import ScaledProduct

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("one_thread")]

E4M3 = torch.float8_e4m3fn


def fp8(rows: int, k: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, k, generator=random).to(E4M3)


def blockwise(m: int = 5, n: int = 130, k: int = 300) -> ScaledProduct:
    random = torch.Generator().manual_seed(9)
    blocks = -(-k // 128)
    sa, sb = torch.rand(m, blocks, generator=random), torch.rand(-(-n // 128), blocks, generator=random)
    return ScaledProduct(fp8(m, k, 1), fp8(n, k, 2), sa, sb, 128, 128)


class TestScalesInside:
    """Block scales as exponents (MX) and as significands (FP4), against Fractions."""

    def test_ue8m0(self) -> None:
        """sm100: 32 products and c aligned together, scale exponents added, over the whole K."""
        m, n, k = 3, 4, 96
        random = torch.Generator().manual_seed(0)
        sa = torch.exp2(torch.randint(-6, 7, (m, 3), generator=random).float())
        sb = torch.exp2(torch.randint(-6, 7, (n, 3), generator=random).float())
        product = ScaledProduct(fp8(m, k, 1), fp8(n, k, 2), sa, sb, 32, 1)
        got = predict_product(product, "sm100.chain_ue8m0", out_dtype=torch.float32, engine="torch")
        a, b = decode(product.a).tolist(), decode(product.b).tolist()
        for i in range(m):
            for j in range(n):
                c = Fraction(0)
                for block in range(3):
                    scale = Fraction(float(sa[i, block])) * Fraction(float(sb[j, block]))
                    shift = exponent(scale, -300)
                    addends: list[tuple[Fraction, int | None]] = [(c, exponent(c, -126) if c else None)]
                    for x, y in zip(a[i][32 * block :][:32], b[j][32 * block :][:32], strict=True):
                        p = Fraction(x) * Fraction(y)
                        e = exponent(Fraction(x), -6) + exponent(Fraction(y), -6) + shift if p else None
                        addends.append((p * scale, e))
                    total, _ = aligned_sum(addends, 25, -126)
                    value = rounded(total, 23, -126, 127, nearest=False)
                    assert isinstance(value, Fraction)
                    c = value
                assert c == got[i, j].item()

    @pytest.mark.parametrize("reading", ["", ".zero_sums", ".counted"])
    @pytest.mark.parametrize(("name", "block"), [("sm100.chain_nvf4", 16), ("sm100.chain_mxf4", 32)])
    def test_fp4(self, name: str, block: int, reading: str) -> None:
        """Exact sums of 16 products times the scales' significands, aligned at the scales' exponents, t = 35; groups of
        zeros and groups that cancel under scales far above the others, as each reading aligns them."""
        m, n, k = 2, 3, 128
        floor = -126 if reading else -139
        random = torch.Generator().manual_seed(1)
        a = torch.randint(0, 16, (m, k), generator=random, dtype=torch.uint8)
        b = torch.randint(0, 16, (n, k), generator=random, dtype=torch.uint8)
        shape_a, shape_b = (m, k // block), (n, k // block)
        a[:, 64:80], b[:, 97:112:2] = 0, b[:, 96:112:2]
        a[:, 97:112:2] = a[:, 96:112:2] ^ 8  # the same magnitudes with the other sign
        if block == 16:
            sa, sb = (torch.rand(s, generator=random).mul(400).to(E4M3).float() for s in (shape_a, shape_b))
        else:
            sa, sb = (torch.exp2(torch.randint(-9, 9, s, generator=random).float()) for s in (shape_a, shape_b))
        sa[:, 64 // block], sa[:, 96 // block] = (448.0, 256.0) if block == 16 else (2.0**30, 2.0**40)
        got = predict_product(
            ScaledProduct(a, b, sa, sb, block, 1), name + reading, out_dtype=torch.float32, engine="torch"
        )
        e2m1 = by_name("float4_e2m1fn")
        x, y = decode(a, e2m1).tolist(), decode(b, e2m1).tolist()
        for i in range(m):
            for j in range(n):
                c = Fraction(0)
                for start in range(0, k, 64):
                    addends: list[tuple[Fraction, int | None]] = [(c, exponent(c, -126) if c else None)]
                    for first in range(start, start + 64, 16):
                        u, v = (Fraction(float(s)) for s in (sa[i, first // block], sb[j, first // block]))
                        least = -6 if block == 16 else -127
                        pairs = zip(x[i][first:][:16], y[j][first:][:16], strict=True)
                        terms = [Fraction(p) * Fraction(q) for p, q in pairs]
                        present = {"": any(terms), ".zero_sums": sum(terms) != 0, ".counted": True}[reading]
                        e = exponent(u, least) + exponent(v, least)
                        addends.append((sum(terms) * u * v, e if present else None))
                    summed, _ = aligned_sum(addends, 35, floor)
                    value = rounded(summed, 23, -126, 127, nearest=False)
                    assert isinstance(value, Fraction)
                    c = value
                assert c == got[i, j].item()


class TestWidened:
    """FP8 codes as float16."""

    @pytest.mark.parametrize(("group", "same"), [(8, True), (16, False)])
    def test_promoted_chains(self, group: int, same: bool) -> None:
        """sm80: groups of 8 products, 16 of them from zero for each block of 128, then one fma; of 32 products, first
        those of k mod 4 in {0, 1}. Groups of 16, as many as an instruction takes, give other bits (the twin)."""
        m, n, k = 2, 3, 256
        random = torch.Generator().manual_seed(4)
        powers = (torch.exp2(torch.randint(-8, 9, (rows, k), generator=random).float()) for rows in (m, n))
        a, b = ((torch.randn(power.shape, generator=random) * power).clamp(-448, 448).to(E4M3) for power in powers)
        sa, sb = torch.rand(m, 2, generator=random), torch.rand(1, 2, generator=random)
        product = ScaledProduct(a, b, sa, sb, 128, 128)
        got = predict_product(product, "sm80.f16.promote128", out_dtype=torch.float32)
        x, y, scales = decode(a).tolist(), decode(b).tolist(), (sa * sb).tolist()
        equal = []
        for i in range(m):
            for j in range(n):
                total: Fraction | float = Fraction(0)
                for block in range(2):
                    c = Fraction(0)
                    pieces = [range(k, k + 32) for k in range(128 * block, 128 * (block + 1), 32)]
                    order = [q for piece in pieces for half in (0, 2) for q in piece if q % 4 - half in (0, 1)]
                    for start in range(0, 128, group):
                        terms = [Product(x[i][q], y[j][q], -14, -14) for q in order[start : start + group]]
                        addends = [(c, exponent(c, -126) if c else None), *((t.value, t.e) for t in terms)]
                        value = rounded(aligned_sum(addends, 24, -126)[0], 23, -126, 127, nearest=False)
                        assert isinstance(value, Fraction)
                        c = value
                    assert isinstance(total, Fraction)
                    total = to_float32(Fraction(scales[i][block]) * c + total)
                equal.append(total == got[i, j].item())
        assert all(equal) == same

    @pytest.mark.parametrize(("tile", "same"), [(64, True), (128, False)])
    def test_quarters_of_a_tile(self, tile: int, same: bool) -> None:
        """FlashInfer's product of few rows: a warp has the w-th quarter of each tile of 256, a block of 32 is two
        instructions from zero and one fma, and the sums of the warps are added in their order. Quarters of tiles of 512
        give other bits (the twin)."""
        random = torch.Generator().manual_seed(4)
        a, b = (torch.randn(rows, 1024, generator=random).to(E4M3) for rows in (2, 3))
        scales = [torch.exp2(torch.randint(-6, 7, (rows, 32), generator=random).float()) for rows in (2, 3)]
        product = ScaledProduct(a, b, *scales, 32, 1)
        got = predict_product(product, f"sm100.f16.promote32.interleaved4x{tile}", out_dtype=torch.float32)
        equal = []
        for i, j in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)):
            total = torch.zeros(1)
            for warp in range(4):
                acc = torch.zeros(1)
                for block in (q for q in range(32) if q * 32 // 64 % 4 == warp):
                    part = torch.zeros(1)
                    for k in (32 * block, 32 * block + 16):
                        x, y = a[i : i + 1, k : k + 16].half(), b[j : j + 1, k : k + 16].half()
                        part = predict.mma("sm100.tcgen05.f16", x, y, part, out=torch.float32)
                    acc = fma32(part, scales[0][i, block] * scales[1][j, block], acc)
                total = total + acc
            equal.append(total.item() == got[i, j].item())
        assert all(equal) == same

    def test_what_float16_does_not_hold(self) -> None:
        """Codes that are no float16 values are refused by name; both FP8 formats and float16 are taken."""
        wide = replace(blockwise(), a=torch.full((5, 300), 2.0**20).bfloat16())
        with pytest.raises(NumericsError, match=r"sm86.f16.promote128 widens codes to float16, which does not hold"):
            predict_product(wide, "sm86.f16.promote128", out_dtype=torch.float32)
        for dtype in (torch.float16, torch.float8_e5m2):
            product = replace(blockwise(), a=blockwise().a.float().to(dtype))
            assert get("sm86.f16.promote128").why_not(product, out_dtype=torch.bfloat16) is None


class TestStore:
    """Epilogue, bias, output formats and special values."""

    @pytest.mark.parametrize("added", [0x7FFF, 0x8000])
    def test_bfloat16_is_the_rounding(self, monkeypatch: pytest.MonkeyPatch, added: int) -> None:
        """Every upper half with the lower halves around its ties, NaN and infinities included; half of the range added
        also to an even code rounds ties away and is caught."""
        upper = torch.arange(1 << 16)[:, None] << 16
        acc = (upper | torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).to(torch.int32).view(torch.float32)
        nearest = to_dtype(acc.double(), torch.bfloat16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
        monkeypatch.setattr(predict, "BELOW_HALF", added)
        same = torch.equal(codes_of(store(acc, torch.bfloat16)), codes_of(canonical_nan(nearest)))
        assert same == (added == 0x7FFF)

    def test_bias_is_one_fused_multiply_add(self) -> None:
        random = torch.Generator().manual_seed(3)
        sa, sb = torch.rand(6, 1, generator=random), torch.rand(7, 1, generator=random)
        bias = torch.randn(7, generator=random)
        product = ScaledProduct(fp8(6, 64, 4), fp8(7, 64, 5), sa, sb, 64, 1, bias)
        one = torch.ones(1, 1)
        plain = ScaledProduct(product.a, product.b, one, one, 64, 7)
        acc = predict_product(plain, "sm90.chain", out_dtype=torch.float32, engine="torch")
        got = predict_product(product, "sm90.chain", out_dtype=torch.float32, engine="torch")
        assert torch.equal(got, fma32(sa.expand(6, 7), sb.T * acc, bias.expand(6, 7)))
        apart = replace(get("sm90.chain"), fused_bias=False)
        assert torch.equal(
            predict_product(product, apart, out_dtype=torch.float32, engine="torch"), sa * (sb.T * acc) + bias
        )

    def test_nan_and_infinity_stay_in_their_row_and_column(self) -> None:
        product = blockwise()
        a = product.a.view(torch.uint8).clone()
        a[2, 200] = 0x7F  # NaN
        hit = replace(product, a=a.view(E4M3))
        clean, got = (
            predict_product(p, "sm90.promote128", out_dtype=torch.bfloat16, engine="torch") for p in (product, hit)
        )
        assert torch.isnan(got[2]).all() and (got[2].view(torch.int16) == 0x7FFF).all()
        keep = torch.arange(5) != 2
        assert torch.equal(got[keep], clean[keep])

    def test_an_overflowing_scale_stores_infinity(self) -> None:
        product = replace(blockwise(), a_scale=torch.full((5, 3), 3e38), b_scale=torch.full((2, 3), 1e3))
        got = predict_product(product, "sm90.promote128", out_dtype=torch.float32, engine="torch")
        assert not torch.isfinite(got).any()

    def test_zero_operands_give_plus_zero(self) -> None:
        product = replace(blockwise(), a=torch.full((5, 300), -0.0).to(E4M3))
        got = predict_product(product, "sm90.promote128", out_dtype=torch.float32, engine="torch")
        assert (got.view(torch.int32) == 0).all()

    def test_tiles_do_not_show(self) -> None:
        """More rows and columns than one tile: the same bits as row by row."""
        product = blockwise(m=140, n=520, k=160)
        whole = predict_product(product, "sm90.promote128", out_dtype=torch.float32, engine="torch")
        for rows in (slice(0, 3), slice(126, 131)):
            part = product.rows(rows.start, rows.stop)
            again = predict_product(part, "sm90.promote128", out_dtype=torch.float32, engine="torch")
            assert torch.equal(again, whole[rows])

    def test_zero_padding_of_k_changes_nothing(self) -> None:
        product = blockwise(k=256)
        ragged = replace(
            product,
            a=torch.cat([product.a.view(torch.uint8), torch.zeros(5, 3, dtype=torch.uint8)], 1).view(E4M3),
            b=torch.cat([product.b.view(torch.uint8), torch.zeros(130, 3, dtype=torch.uint8)], 1).view(E4M3),
            a_scale=torch.cat([product.a_scale, torch.ones(5, 1)], 1),
            b_scale=torch.cat([product.b_scale, torch.ones(2, 1)], 1),
        )
        results = [
            predict_product(p, "sm90.promote128", out_dtype=torch.float32, engine="torch") for p in (product, ragged)
        ]
        assert torch.equal(results[0], results[1])


class TestLogits:
    """Head counts and refusals; the captured bits are in test_tensorcore_captures."""

    def test_relu_drops_nan(self) -> None:
        q = torch.full((1, 8, 32), math.nan).to(E4M3)
        got = predict_logits(q, fp8(3, 32, 0), torch.ones(3), torch.ones(1, 8))
        assert got.tolist() == [[0.0, 0.0, 0.0]]

    def test_refusals(self) -> None:
        q, k, w = torch.zeros(2, 12, 32).to(E4M3), fp8(3, 32, 0), torch.ones(2, 12)
        with pytest.raises(NumericsError, match="H=12 is not a multiple of 8"):
            predict_logits(q, k, torch.ones(3), w)
        with pytest.raises(NumericsError, match=r"There are: sm90\.mqa_logits"):
            predict_logits(q, k, torch.ones(3), w, schedule="sm80.mqa_logits")
        with pytest.raises(ShapeError, match="must be"):
            predict_logits(q, k, torch.ones(3), torch.ones(2, 8))


class TestRefusals:
    """Typed errors that list what exists."""

    def test_unknown_schedule(self) -> None:
        with pytest.raises(NumericsError, match=r"of sm90; did you mean 'sm90\.promote128'"):
            get("sm90.promoted128")
        with pytest.raises(NumericsError, match="no model for arch 'gfx950'; did you mean .* There are: sm90"):
            get("gfx950.chain")
        with pytest.raises(NumericsError, match="no model for arch 'sm61'; did you mean .* There are: sm70"):
            schedules("sm61")

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            ("sm90.chain", {}, "applies the scales once after the whole K=300, .* 3 scale blocks of 128"),
            ("sm90.bf16.chain", {}, "takes a in bfloat16, not float8_e4m3fn"),
            ("sm100.chain_ue8m0", {}, "every scale must be a power of two"),
            ("sm90.promote128", {"block": 100}, "scale blocks|blocks of 100 are no multiple"),
        ],
    )
    def test_shapes_a_schedule_cannot_have(self, name: str, change: dict[str, int], message: str) -> None:
        product = replace(blockwise(), **change)  # type: ignore[arg-type]
        with pytest.raises(NumericsError, match=message):
            predict_product(product, name, out_dtype=torch.bfloat16)

    def test_output_and_engine(self) -> None:
        with pytest.raises(NumericsError, match="stores float32, bfloat16 or float16"):
            predict_product(blockwise(), "sm90.promote128", out_dtype=torch.float64)
        with pytest.raises(NumericsError, match="engines: auto, torch, cpu, cuda"):
            predict_product(blockwise(), "sm90.promote128", out_dtype=torch.float32, engine="tpu")  # type: ignore[arg-type]

    def test_every_schedule_names_its_source(self) -> None:
        assert all(s.seen_in and s.instruction.source for s in schedules())
        assert len({s.name for s in schedules()}) == len(schedules())


class TestTruncation:
    """The kernel that rounds toward zero in hardware gives the bits of the one that truncates every product."""

    @pytest.mark.parametrize("name", ["sm90.promote128", "sm89.chain"])
    def test_equal(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("numba")
        from oracle.tensorcore import cpu_truncation, engine_cpu

        if (why := cpu_truncation.why_not(get(name).instruction)) is not None:
            pytest.skip(why)
        product = (
            blockwise(m=37, n=200, k=300)
            if "promote" in name
            else replace(
                blockwise(m=37, n=200, k=300), a_scale=torch.ones(1, 1), b_scale=torch.ones(1, 1), block=300, b_rows=200
            )
        )
        found = [next(engine_cpu.sums(product, get(name)))[1]]
        monkeypatch.setattr(engine_cpu, "why_not", lambda instruction: "asked for the other one")
        found.append(next(engine_cpu.sums(product, get(name)))[1])
        assert torch.equal(*(codes_of(x) for x in found))
        wider = replace(get(name).instruction, align_bits=14, out_bits=14)  # drops one bit less: other results
        monkeypatch.undo()
        other = next(engine_cpu.sums(product, replace(get(name), instruction=wider)))[1]
        assert not torch.equal(codes_of(found[0]), codes_of(other))

    def test_rounding_is_as_it_was(self) -> None:
        """The direction is set for the kernel alone: afterwards this thread rounds to nearest."""
        predict_product(blockwise(), "sm90.promote128", out_dtype=torch.float32)
        assert float(torch.tensor(1.0) + torch.tensor(2.0**-24 + 2.0**-30)) == 1.0 + 2.0**-23

    @pytest.mark.parametrize("side", ["a", "b"])
    def test_nan_takes_the_other_kernel(self, side: str) -> None:
        product = blockwise(m=5, n=140, k=256)
        codes = getattr(product, side).clone()
        codes.view(torch.uint8)[3, 7] = 0x7F
        product = replace(product, **{side: codes})
        made = (
            predict_product(product, "sm90.promote128", out_dtype=torch.float32, engine=e) for e in ("cpu", "torch")
        )
        cpu, plain = made
        assert torch.equal(codes_of(cpu), codes_of(plain)) and int(torch.isnan(cpu).sum()) == (
            140 if side == "a" else 5
        )
