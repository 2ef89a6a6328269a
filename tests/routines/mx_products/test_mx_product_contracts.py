"""Products of MX and NVFP4: places of scales, padding nobody reads, formulas in numpy, alpha, faults, bad calls."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from oracle.bounds import engines
from oracle.bounds.interval import Interval
from oracle.errors import DtypeError, InputError, LayoutError, NumericsError, OptionError, OracleError, ShapeError
from oracle.numbers.formats import E2M1, decode
from oracle.routines import cases, get, registered
from oracle.routines.base import by_name
from oracle.routines.catalogue import faults_of, run
from oracle.routines.fault import Call
from oracle.routines.mx.contract import LAYOUTS, LINEAR, pack, stored
from oracle.routines.mx_products import contract as mx
from oracle.routines.mx_products.contract import MxProduct
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth import gemm
from oracle.truth.gemm import ScaledProduct
from oracle.verdict.products import interval_of

E4M3 = torch.float8_e4m3fn
SMALL = {
    "mm_mxfp8": "e4m3xe4m3-bf16/1x32/m=5,n=16,k=96",
    "mm_fp4": "e2m1xe2m1-bf16/1x16/m=5,n=16,k=96",
    "scaled_mm": "e2m1xe2m1-bf16/1x16/m=5,n=16,k=96/levels=2",
    "bmm_mxfp8": "e4m3xe4m3-bf16/1x32/m=5,n=16,k=96,g=2",
    "group_gemm_mxfp8_mxfp4_nt_groupwise": "e4m3xe2m1-bf16/1x32/m=12,n=16,k=96,g=3",
    "group_gemm_nvfp4_nt_groupwise": "e2m1xe2m1-bf16/1x16/m=12,n=16,k=96,g=3",
    "scaled_grouped_mm_mx": "e4m3xe4m3-bf16/1x32/m=9,n=16,k=96,g=3",
    "scaled_grouped_mm_mx_k_groups": "e4m3xe4m3-bf16/1x32/m=5,n=16,k=416,g=3",
    "fp8_fp4_gemm_nt": "e4m3xe2m1-bf16/1x128:1x32/m=5,n=16,k=160",
    "m_grouped_fp8_fp4_gemm_nt_contiguous": "e4m3xe2m1-bf16/1x128:1x32/m=128,n=8,k=96,g=2",
    "m_grouped_fp8_fp4_gemm_nt_masked": "e4m3xe2m1-bf16/1x128:1x32/m=3,n=16,k=160,g=3",
    **{f"fp8_fp4_gemm_{form}": "e4m3xe2m1-bf16/1x128:1x32/m=6,n=16,k=160" for form in ("nn", "tn", "tt")},
    "m_grouped_fp8_fp4_gemm_nn_contiguous": "e4m3xe2m1-bf16/1x128:1x32/m=128,n=8,k=96,g=2",
    "m_grouped_fp8_fp4_gemm_nt_psum": "e4m3xe2m1-bf16/1x128:1x32/m=256,n=8,k=96,g=3",
    "k_grouped_fp8_gemm_tn_contiguous": "e4m3xe4m3-f32/1x32:1x32/m=4,n=8,k=160,g=3",
}
PADDED = sorted(name for name in SMALL if not name.startswith(("m_grouped", "k_grouped", "fp8_fp4")))


def call_of(name: str, family: str = "randn", text: str = "", seed: int = 5) -> Call:
    case = cases.parse(f"{name}/{text or SMALL[name]}/family={family}/seed={seed}")
    return Call(get(name), case.inputs(), case.call_options(), out_dtype=case.out_dtype)


def judged(call: Call, output: object, arch: str = "cpu"):  # type: ignore[no-untyped-def]
    return call.contract.judge(call.inputs, output, arch=arch, **call.options)  # type: ignore[arg-type]


class TestPlaces:
    """One index for every layout."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("shape", [(1, 1), (9, 5), (130, 9)])
    def test_they_are_those_of_the_quantisers(self, layout: str, shape: tuple[int, int]) -> None:
        scale = torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        memory, at = stored(scale, layout).flatten(), mx.places(*shape, layout)
        assert torch.equal(memory[at], scale) and memory.numel() == mx.size_of(*shape, layout)
        assert len(at.unique()) == scale.numel()

    def test_published_offsets(self) -> None:
        """cuBLAS, 1D block scaling factors, and TensorRT-LLM's 8x4; seven columns."""
        at = mx.places(200, 7, "128x4")
        asked = ((0, 0), (1, 0), (32, 0), (0, 4), (127, 3), (128, 0), (199, 6))
        assert [int(at[m, c]) for m, c in asked] == [0, 16, 4, 512, 511, 1024, 1658]
        at = mx.places(200, 7, "8x4")
        asked = ((0, 0), (1, 0), (7, 3), (0, 4), (8, 0), (199, 6))
        assert [int(at[m, c]) for m, c in asked] == [0, 4, 31, 32, 64, 1598]

    def test_starts_of_groups(self) -> None:
        """FlashInfer's are not the tight ones."""
        pointers = [0, 4, 132, 132, 260]
        assert mx.group_starts(pointers) == [0, 128, 384, 512, 768]
        tiles = [-(-(j - i) // 128) * 128 for i, j in zip(pointers, pointers[1:], strict=False)]
        assert [sum(tiles[:g]) for g in range(5)] == [0, 128, 256, 256, 384]

    @pytest.mark.parametrize("name", PADDED)
    def test_padding_is_not_read(self, name: str) -> None:
        """NaN, large and zero bytes where no scale lies change nothing; a NaN where one lies does."""
        call = call_of(name)
        contract = call.contract
        assert isinstance(contract, mx.MxProduct)
        right = call.truth["out"]
        for side in contract.sides(call.inputs, call.resolved):
            pads, memory = side.padding(), call.inputs[side.scale]
            raw = memory.view(torch.uint8).flatten()
            assert bool(pads.any()) and int((~pads).sum()) == side.at.numel()
            for byte in (0x00, 0xFF):
                other = raw.masked_fill(pads, byte).view(memory.dtype).reshape(memory.shape)
                made = contract.reference({**call.inputs, side.scale: other}, **call.options)
                assert torch.equal(made, right) or torch.allclose(made, right, rtol=0, atol=0, equal_nan=True)
            nan = raw.masked_fill(~pads, 0xFF).view(memory.dtype).reshape(memory.shape)
            made = contract.reference({**call.inputs, side.scale: nan}, **call.options)
            assert bool(torch.isnan(made).all())


# --- FlashInfer's formulas in numpy ---------------------------------------------------------------------------------

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def numpy_fp4(packed: np.ndarray) -> np.ndarray:
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    return np.where(nibbles > 7, -1, 1) * VALUES[nibbles & 7]


def numpy_e4m3(byte: np.ndarray) -> np.ndarray:
    exponent, fraction = byte >> 3 & 15, byte & 7
    return np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent.astype(float) - 7))


def numpy_tiles(memory: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The page's reshape: [tiles down, tiles across, 32, 4, 4] with axes moved."""
    tiles = memory.reshape(-(-rows // 128), -(-columns // 4), 32, 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-(-rows // 128) * 128, -1)[:rows, :columns]


@pytest.mark.parametrize("family", ["randn", "codes", "wide"])
def test_mm_fp4_in_numpy(family: str) -> None:
    """``alpha * (e2m1 * e4m3) @ (e2m1 * e4m3).T`` in float64."""
    call = call_of("mm_fp4", family, "e2m1xe2m1-bf16/1x16/m=130,n=24,k=96")
    given = {name: t.numpy() for name, t in call.inputs.items()}
    a, b = numpy_fp4(given["a"]), numpy_fp4(np.ascontiguousarray(given["b"].T))
    sa, sb = (numpy_e4m3(numpy_tiles(given[n], rows, 6)) for n, rows in (("a_descale", 130), ("b_descale", 24)))
    due = float(given["alpha"][0]) * ((a * sa.repeat(16, 1)) @ (b * sb.repeat(16, 1)).T)
    found = call.contract.reference(call.inputs, **{**call.options, "out_dtype": None})
    assert isinstance(found, Tensor)
    np.testing.assert_allclose(found.numpy(), due, rtol=1e-12, atol=1e-9 * np.abs(due).max())


def test_group_gemm_in_numpy() -> None:
    """FlashInfer's groups, MXFP8 by MXFP4, by rows of one tiled matrix of scales."""
    call = call_of("group_gemm_mxfp8_mxfp4_nt_groupwise", "randn", "e4m3xe2m1-bf16/1x32/m=140,n=16,k=96,g=3")
    given = {name: (t.view(torch.uint8) if t.element_size() == 1 else t).numpy() for name, t in call.inputs.items()}
    ends, a = given["m_indptr"], call.inputs["a"].to(torch.float64).numpy()
    rows = (140 + 127 * 3) // 128 * 128
    scale = 2.0 ** (numpy_tiles(given["a_scale"], rows, 3).astype(float) - 127)
    due = np.zeros((140, 16))
    for g in range(3):
        first, last = int(ends[g]), int(ends[g + 1])
        start = (first + 127 * g) // 128 * 128
        b = numpy_fp4(given["b"][g]) * (
            2.0 ** (numpy_tiles(given["b_scale"].reshape(3, -1)[g], 16, 3).astype(float) - 127)
        ).repeat(32, 1)
        due[first:last] = (a[first:last] * scale[start : start + last - first].repeat(32, 1)) @ b.T
    found = call.contract.reference(call.inputs, **{**call.options, "out_dtype": None})
    assert isinstance(found, Tensor)
    np.testing.assert_allclose(found.numpy(), due, rtol=1e-12, atol=1e-9 * np.abs(due).max())


# --- alpha and dequantised operands ---------------------------------------------------------------------------------


def product(alpha: tuple[float, ...] | None, seed: int = 1) -> ScaledProduct:
    """NVFP4 operands, four rows by five columns."""
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(0, 16, (rows, 64), generator=g, dtype=torch.uint8) for rows in (4, 5))
    sa, sb = (torch.randint(1, 0x7E, (rows, 4), generator=g, dtype=torch.uint8).view(E4M3) for rows in (4, 5))
    factor = None if alpha is None else torch.tensor(alpha, dtype=torch.float32)
    return ScaledProduct(a, b, sa, sb, 16, 1, bias=torch.randn(5, generator=g), alpha=factor)


class TestAlpha:
    """``alpha * sum + bias``: exact, rounded once, bounded."""

    @pytest.mark.parametrize("alpha", [(0.3,), (-1.7e-3, 0.9), (2.0,)])
    def test_truth_is_rational(self, alpha: tuple[float, ...]) -> None:
        p = product(alpha)
        for value in (gemm.exact(p), engines.exact(p)):
            for m, n in ((0, 0), (3, 4), (2, 1)):
                due = gemm.rational(p, m, n)
                found = Fraction(float(value.hi[m, n])) + Fraction(float(value.lo[m, n]))
                assert abs(found - due) <= Fraction(float(value.slack[m, n]))
        assert gemm.rational(p, 0, 0) != gemm.rational(replace(p, alpha=None), 0, 0)

    @pytest.mark.parametrize("name", ["ieee32.any", "sm90.bf16.dequantised", "sm100.chain_nvf4"])
    def test_the_interval_holds_other_orders(self, name: str) -> None:
        """Alpha last and in the scales in float32; the bits of a schedule; an alpha cut to bfloat16 leaves it."""
        outside = 0
        for seed in range(4):
            p = product((0.37, 1.3), seed)
            width, value = interval_of(p, name), gemm.exact(p)
            a, b = p.left.value().float(), p.right.value().float()
            sa, sb = (s.to(torch.float32).repeat_interleave(16, dim=1) for s in (p.a_scale, p.b_scale))
            assert p.alpha is not None
            both = p.alpha.prod()
            if name == "ieee32.any":
                made = [both * ((a * sa) @ (b * sb).T) + p.bias, (a * (sa * both)) @ (b * sb).T + p.bias]
                cut = both.bfloat16().float() * ((a * sa) @ (b * sb).T) + p.bias
            else:
                made = [predict_product(p, name, out_dtype=torch.float32)]
                cut = predict_product(replace(p, alpha=p.alpha.bfloat16().float()), name, out_dtype=torch.float32)
            for out in made:
                assert self.held(out, value, width).all()
            outside += int((~self.held(cut, value, width)).sum())
        assert outside > 40

    @staticmethod
    def held(out: Tensor, value: gemm.Exact, width: Interval) -> Tensor:
        error = out.double() - value.hi
        slack = value.hi.abs() * 2.0**-50
        return (error >= width.lo - slack) & (error <= width.hi + slack)

    def test_powers_of_two_round_nothing(self) -> None:
        one = torch.ones(3, 1)
        p = ScaledProduct(one.to(E4M3), one.to(E4M3), one, one, 1, 1, alpha=torch.tensor([0.5]))
        assert float(interval_of(p, "ieee32.any").hi.max()) == 0
        assert float(interval_of(replace(p, alpha=torch.tensor([0.3])), "ieee32.any").hi.min()) > 0


class TestDequantised:
    """Codes times scales as bfloat16: exact or refused."""

    def test_exact(self) -> None:
        p = product(None)
        seen = p.dequantised(torch.bfloat16)
        assert seen is not None and torch.equal(gemm.exact(seen).hi, gemm.exact(p).hi)

    def test_what_bfloat16_does_not_hold_is_refused(self) -> None:
        p = replace(product(None), a_scale=torch.full((4, 4), 1.01), bias=None)
        assert p.dequantised(torch.bfloat16) is None
        with pytest.raises(NumericsError, match="does not hold every operand"):
            predict_product(p, "sm90.bf16.dequantised", out_dtype=torch.float32)
        with pytest.raises(NumericsError, match="does not hold every operand"):
            interval_of(p, "sm90.bf16.dequantised")


# --- verdicts -------------------------------------------------------------------------------------------------------


@pytest.mark.turns(4)
class TestVerdicts:
    """A right kernel of each arch passes; every fault that shows is caught."""

    @pytest.mark.parametrize("name", sorted(SMALL))
    def test_right_kernels(self, name: str) -> None:
        call = call_of(name)
        assert not judged(call, by_name(run(call))).status.is_failure
        for schedule in call.contract.arithmetics(replace(call, arch="sm90")):
            out = by_name(run(replace(call, schedule=get_schedule(schedule))))
            assert judged(call, out, "sm90").matches == schedule

    def test_faults(self) -> None:
        """Every third of those that show in this call: each changes a bit and fails, or says why it may not."""
        call = call_of("group_gemm_nvfp4_nt_groupwise")
        right = torch.nan_to_num(by_name(run(call))["out"], 7e4)
        shown = [fault for fault in faults_of(call.contract.name) if fault.applies(call) is None][::3]
        for fault in shown:
            out = by_name(run(call, fault))
            if not judged(call, out).status.is_failure:
                assert torch.equal(torch.nan_to_num(out["out"], 7e4), right), fault.name
                assert fault.same_if, fault.name
        assert len(shown) > 20

    def test_names(self) -> None:
        assert set(SMALL) == {name for name, one in registered().items() if isinstance(one, MxProduct)}


WORDS = sorted(name for name in SMALL if mx.PACKED in cases.grammars()[name].options.get("scales", ()))


class TestWords:
    """Scales packed in int32, as DeepGEMM takes them on sm100: the exponents of the float32 form, byte by byte."""

    def test_every_form_of_deepgemm_takes_them(self) -> None:
        assert sorted(name for name in SMALL if "fp8_fp4" in name or name.startswith("k_grouped")) == WORDS

    @pytest.mark.parametrize("name", WORDS)
    def test_they_are_the_powers_of_two(self, name: str) -> None:
        """Truth, by the rows of numpy's view of the bytes."""
        call = call_of(name, text=f"{SMALL[name]}/scales=words")
        contract, given = call.contract, dict(call.inputs)
        assert isinstance(contract, mx.MxProduct)
        for side in contract.sides(call.inputs, call.resolved):
            words = call.inputs[side.scale]
            assert words.dtype is torch.int32 and int(side.padding().sum()) == side.size - side.at.numel()
            byte = np.ascontiguousarray(words.numpy()).view(np.uint8).reshape(*words.shape, 4)
            given[side.scale] = self.unpacked(call, name, side.codes, byte)
        due = contract.reference(given, **call.options)
        found = contract.reference(call.inputs, **call.options)
        assert isinstance(due, Tensor) and isinstance(found, Tensor)
        assert torch.equal(found.nan_to_num(7e4), due.nan_to_num(7e4))

    @staticmethod
    def unpacked(call: Call, name: str, codes: str, byte: np.ndarray) -> Tensor:
        """Float32 scales of bytes ``[.., rows, words, 4]``, or ``[.., words, rows, 4]`` of what is transposed."""
        power = np.exp2(byte.astype(np.float32) - 127)
        if name.startswith("k_grouped"):
            ends, start = [], 0
            for k in call.inputs["ks"].tolist():
                four = power[start : start + -(-k // 128)].transpose(0, 2, 1).reshape(-1, power.shape[1])
                ends.append(four[: k // 32])
                start += -(-k // 128)
            return torch.from_numpy(np.concatenate(ends))
        turned = codes in getattr(call.contract, "turned", ())
        rows = power.swapaxes(-3, -2) if turned else power
        blocks = -(-call.parts[0].product.K // int(str(call.options[f"gran_k_{codes}"])))
        flat = np.ascontiguousarray(rows.reshape(*rows.shape[:-2], -1)[..., :blocks])
        return torch.from_numpy(flat.swapaxes(-1, -2).copy() if turned else flat)

    @pytest.mark.parametrize("name", ["fp8_fp4_gemm_nt", "fp8_fp4_gemm_tn", "k_grouped_fp8_gemm_tn_contiguous"])
    def test_faults_of_words(self, name: str) -> None:
        """Each is refused, and none shows where the scales are float32."""
        call, plain = call_of(name, text=f"{SMALL[name]}/scales=words", seed=6), call_of(name)
        found = [fault for fault in faults_of(name) if "word" in fault.name]
        shown = [fault for fault in found if fault.applies(call) is None]
        assert len(shown) >= 5 and all(fault.applies(plain) for fault in found)
        for fault in shown:
            assert judged(call, by_name(run(call, fault))).status.is_failure, fault.name


BAD = (
    ("mm_fp4", {}, {"block_size": 32}, InputError, "block_size=32"),
    ("mm_fp4", {"a_descale": torch.zeros(4, dtype=torch.uint8)}, {}, ShapeError, "a_descale holds 4 scales"),
    ("mm_fp4", {"alpha": torch.tensor([torch.inf])}, {}, InputError, "inf"),
    ("scaled_mm", {"scale_b": torch.zeros(1024).to(torch.float8_e8m0fnu)}, {}, DtypeError, "one recipe"),
    ("group_gemm_nvfp4_nt_groupwise", {"m_indptr": torch.tensor([0, 8, 4, 12])}, {}, InputError, "rises"),
    ("scaled_grouped_mm_mx", {"offs": torch.tensor([0, 0, 0])}, {}, InputError, "all zero"),
    ("fp8_fp4_gemm_nt", {"a_scale": torch.full((5, 2), 0.3)}, {}, InputError, "power of two"),
    ("fp8_fp4_gemm_nt", {"b_scale": torch.ones(16, 4)}, {}, ShapeError, "b_scale"),
    ("fp8_fp4_gemm_nn", {"b_scale": torch.ones(16, 5)}, {}, ShapeError, r"\[5, 16\]"),
    ("fp8_fp4_gemm_nt", {"b_scale": torch.full((16, 2), -1, dtype=torch.int32)}, {}, InputError, "byte 255"),
    ("fp8_fp4_gemm_nt", {"b_scale": torch.ones(16, 3, dtype=torch.int32)}, {}, ShapeError, "192 scales; 16 x 5"),
    ("fp8_fp4_gemm_nt", {}, {"gran_n": True}, OptionError, "gran_n=True is not one of 1, 128"),
    ("fp8_fp4_gemm_nt", {"b_scale": torch.ones(16, 2, dtype=torch.int32)}, {"gran_n": 128}, OptionError,
     "words hold the exponents of one row"),
    ("fp8_fp4_gemm_tn", {"c": torch.zeros(6, 15, dtype=torch.bfloat16)}, {}, ShapeError, r"\[6, 16\]"),
    ("fp8_fp4_gemm_nt", {"c": torch.zeros(5, 16)}, {}, DtypeError, "the same"),
    ("m_grouped_fp8_fp4_gemm_nt_psum", {"ends": torch.tensor([5, 3, 200])}, {}, InputError, "never back"),
    ("k_grouped_fp8_gemm_tn_contiguous", {"ks": torch.tensor([33, 0, 127])}, {}, InputError, "33"),
    ("k_grouped_fp8_gemm_tn_contiguous", {"ks": torch.tensor([32, 0, 64])}, {}, ShapeError, "96"),
)  # fmt: skip  # a table, one row a line


@pytest.mark.parametrize(("name", "inputs", "options", "error", "message"), BAD)
def test_a_bad_call_is_one_typed_error(
    name: str, inputs: dict[str, Tensor], options: dict[str, object], error: type[OracleError], message: str
) -> None:
    call = call_of(name)
    with pytest.raises(error, match=message):
        call.contract.check({**call.inputs, **inputs}, {**call.options, **options})
    call.contract.check(call.inputs, call.options)


@pytest.mark.parametrize("name", ["mm_fp4", "mm_mxfp8", "bmm_mxfp8", "scaled_mm"])
def test_a_row_major_weight_is_refused(name: str) -> None:
    """Its strides tell a forgotten transpose, which a square shape hides; one column or row has no order."""
    call = call_of(name)
    b = call.contract.names[1]  # type: ignore[attr-defined]
    codes = call.inputs[b].view(torch.uint8).contiguous()
    square = codes[..., : (k := min(codes.shape[-2:])), :k].contiguous()
    with pytest.raises(LayoutError, match=rf"{b} .* is row-major .* --input {b}=WEIGHT.T"):
        mx._check_columns(b, square)
    mx._check_columns(b, square.mT)
    mx._check_columns(b, square[..., :1])
    mx._check_columns(b, square[..., :1, :])


def test_nibbles() -> None:
    """The low nibble is the even column, as in :func:`decode` of unpacked codes."""
    codes = torch.arange(16, dtype=torch.uint8).reshape(1, 16)
    call = call_of("mm_fp4")
    contract = call.contract
    assert isinstance(contract, mx.MxProduct)
    assert torch.equal(contract.matrix({"a": pack(codes)}, 0), codes) and float(decode(codes, E2M1)[0, 7]) == 6.0
    assert LINEAR not in {side.tile for side in contract.sides(call.inputs, call.resolved)}
