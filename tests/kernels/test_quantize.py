"""Quantisers: scales and codes against their formulas, special values, padding, layouts, fused shards."""

import math

import pytest
import torch

from kernels import quantize as q
from kernels.errors import DtypeError, LayoutError, OptionError, ShapeError

FP8 = torch.float8_e4m3fn
INF, NAN = float("inf"), float("nan")


def nearest_code_error(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Distance from ``x / scale`` to the code, in units of half the spacing of E4M3 there (1 is a tie)."""
    v = (x.double() / scale.double()).clamp(-448, 448)
    exponent = torch.frexp(v.abs().clamp(min=2.0**-6)).exponent.double() - 1
    return (v - codes.double()).abs() / 2.0 ** (exponent - 4)


class TestCeilToUe8m0:
    """Smallest power of two >= |x|, by exponent bits; 2**-127 to 2**127."""

    @pytest.mark.parametrize(
        ("x", "expected"),
        [
            (1.0, 1.0),
            (1.0000001, 2.0),
            (-3.0, 4.0),
            (2.0**127, 2.0**127),
            (2.0**-126, 2.0**-126),
            (1.5 * 2.0**-127, 2.0**-126),
            (2.0**-127, 2.0**-127),
            (2.0**-149, 2.0**-127),
            (0.0, 2.0**-127),
            (1.5 * 2.0**127, INF),
            (INF, INF),
            (-INF, INF),
        ],
    )
    def test_values(self, x: float, expected: float) -> None:
        assert q.ceil_to_ue8m0(torch.tensor([x])).item() == expected

    def test_nan_stays(self) -> None:
        assert q.ceil_to_ue8m0(torch.tensor([NAN, -NAN])).isnan().all()

    def test_every_binade_around_its_power(self) -> None:
        power = torch.tensor([2.0**e for e in range(-126, 127)])
        above = torch.nextafter(power, torch.tensor(INF))
        below = torch.nextafter(power, torch.tensor(0.0))
        assert torch.equal(q.ceil_to_ue8m0(power), power)
        assert torch.equal(q.ceil_to_ue8m0(above), power * 2)
        assert torch.equal(q.ceil_to_ue8m0(below[1:]), power[1:])

    def test_float32_only(self) -> None:
        with pytest.raises(DtypeError, match="float32"):
            q.ceil_to_ue8m0(torch.ones(1, dtype=torch.float64))


class TestScaledQuant:
    """Static, dynamic per tensor, dynamic per token."""

    def test_per_tensor(self, make) -> None:
        x = torch.randn(9, 70)
        codes, scale = q.scaled_fp8_quant(x)
        assert scale.shape == (1,) and scale.item() == (x.abs().max() / torch.tensor(448.0)).item()
        assert (nearest_code_error(x, codes, scale) <= 1 + 1e-5).all()

    def test_static_divides(self) -> None:
        scale = torch.tensor([0.3])
        x = torch.randn(5, 64)
        codes, same = q.scaled_fp8_quant(x, scale)
        assert same is scale
        assert torch.equal(codes.view(torch.uint8), (x / scale).clamp(-448, 448).to(FP8).view(torch.uint8))

    def test_static_saturates(self) -> None:
        codes, _ = q.scaled_fp8_quant(torch.tensor([[1e9, -1e9, INF, 448.0]]), torch.tensor([1.0]))
        assert codes.float().tolist() == [[448.0, -448.0, 448.0, 448.0]]

    def test_per_token_floor_and_bound(self) -> None:
        x = torch.tensor([[0.0, 0.0], [1e-9, 0.0], [4.0, 1.0], [100.0, -3.0]])
        _, scale = q.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        floor = torch.tensor(1.0) / torch.tensor(448.0 * 512)
        assert scale[:, 0].tolist() == [
            floor,
            floor,
            (torch.tensor(4.0) / 448).item(),
            (torch.tensor(100.0) / 448).item(),
        ]
        codes, bounded = q.scaled_fp8_quant(x, scale_ub=torch.tensor([10.0]), use_per_token_if_dynamic=True)
        assert bounded[3].item() == (torch.tensor(10.0) / 448).item() and codes[3, 0].float().item() == 448.0

    def test_zeros_give_zero_codes(self) -> None:
        for per_token in (False, True):
            codes, _ = q.scaled_fp8_quant(torch.zeros(3, 8), use_per_token_if_dynamic=per_token)
            assert (codes.float() == 0).all()
        tiny = torch.full((2, 4), 2.0**-149)
        codes, scale = q.scaled_fp8_quant(tiny)
        assert scale.item() == 0 and (codes.float() == 0).all()

    def test_nan_poisons_its_group_only(self) -> None:
        x = torch.ones(3, 4)
        x[1, 2] = NAN
        codes, scale = q.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        assert scale.isnan()[:, 0].tolist() == [False, True, False]
        assert codes.float().isnan().sum().item() == 4

    @pytest.mark.parametrize("padding", [1, 5, 17])
    @pytest.mark.parametrize("per_token", [False, True])
    def test_padding_never_touches_a_real_row(self, padding: int, per_token: bool) -> None:
        x = torch.randn(5, 32)
        plain = q.scaled_fp8_quant(x, use_per_token_if_dynamic=per_token)
        padded = q.scaled_fp8_quant(x, num_token_padding=padding, use_per_token_if_dynamic=per_token)
        assert padded[0].shape == (max(5, padding), 32)
        assert torch.equal(padded[0][:5].view(torch.uint8), plain[0].view(torch.uint8))
        assert torch.equal(padded[1][:5], plain[1])

    def test_no_rows(self) -> None:
        for per_token in (False, True):
            codes, _ = q.scaled_fp8_quant(torch.empty(0, 8), use_per_token_if_dynamic=per_token)
            assert codes.shape == (0, 8)

    @pytest.mark.parametrize(
        "options",
        [
            {"scale_ub": torch.ones(1)},
            {"scale": torch.ones(1), "scale_ub": torch.ones(1), "use_per_token_if_dynamic": True},
            {"num_token_padding": 0},
            {"num_token_padding": True},
        ],
    )
    def test_options_without_meaning(self, options: dict[str, object]) -> None:
        with pytest.raises(OptionError):
            q.scaled_fp8_quant(torch.ones(2, 4), **options)


class TestGroupQuant:
    """``scale = max(amax, eps)/448`` per row and group."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("shape", [(4, 256), (2, 3, 384), (128,)])
    def test_formula(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        x = torch.randn(shape).to(dtype)
        codes, scale = q.per_token_group_quant_fp8(x, 128)
        amax = x.float().abs().unflatten(-1, (-1, 128)).amax(-1)
        assert torch.equal(scale, amax / torch.full((), 448.0))
        wide = scale.repeat_interleave(128, -1)
        assert (nearest_code_error(x, codes, wide) <= 1 + 1e-5).all()

    def test_eps_is_a_floor_of_the_amax(self) -> None:
        _, scale = q.per_token_group_quant_fp8(torch.zeros(1, 128), 128, eps=1e-3)
        assert scale.item() == (torch.tensor(1e-3) / 448).item()

    def test_ue8m0_rounds_up_before_the_payload(self) -> None:
        x = torch.full((1, 128), 449.0)
        codes, scale = q.per_token_group_quant_fp8(x, 128, use_ue8m0=True)
        assert scale.item() == 2.0 and (codes.float() == 224.0).all()

    @pytest.mark.parametrize("m", [1, 3, 4, 5, 31])
    def test_layouts_keep_values(self, m: int) -> None:
        x = torch.randn(m, 384)
        row = q.per_token_group_quant_fp8(x, 128)
        col = q.per_token_group_quant_fp8(x, 128, column_major_scales=True)
        tma = q.per_token_group_quant_fp8(x, 128, column_major_scales=True, tma_aligned_scales=True)
        assert torch.equal(row[1], col[1]) and torch.equal(row[1], tma[1])
        assert col[1].stride() == (1, m) and tma[1].stride() == (1, m + (-m % 4))
        lanes = tma[1].as_strided((3, m + (-m % 4)), (m + (-m % 4), 1))
        assert (lanes[:, m:] == 0).all()

    def test_packed_equals_the_exponents(self) -> None:
        x = torch.randn(5, 128 * 6)
        codes, scale = q.per_token_group_quant_fp8(x, 128, use_ue8m0=True)
        again, packed = q.per_token_group_quant_fp8_packed(x, 128)
        assert torch.equal(codes.view(torch.uint8), again.view(torch.uint8))
        assert packed.shape == (5, 2) and packed.stride() == (1, 8)
        for row in range(5):
            for group in range(6):
                byte = (packed[row, group // 4].item() >> (8 * (group % 4))) & 0xFF
                assert byte - 127 == math.log2(scale[row, group].item())

    def test_out_is_written(self) -> None:
        x, out = torch.randn(3, 128), torch.empty(3, 128, dtype=FP8)
        codes, _ = q.per_token_group_quant_fp8(x, 128, out=out)
        assert codes is out
        with pytest.raises(LayoutError, match="contiguous"):
            q.per_token_group_quant_fp8(x, 128, out=torch.empty(128, 3, dtype=FP8).t())

    @pytest.mark.parametrize("k", [1, 127, 129, 200])
    def test_ragged_k_is_refused(self, k: int) -> None:
        with pytest.raises(ShapeError, match=f"K={k}"):
            q.per_token_group_quant_fp8(torch.ones(2, k), 128)


class TestCasts:
    """DeepGEMM's casts: floor 1e-4 on the amax, ragged edges padded for the amax only."""

    @pytest.mark.parametrize("shape", [(128, 128), (130, 200), (1, 1), (256, 100)])
    def test_block(self, shape: tuple[int, int]) -> None:
        x = torch.randn(shape)
        codes, scale = q.per_block_cast_to_fp8(x)
        assert codes.shape == shape and codes.is_contiguous()
        assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
        assert (
            scale[-1, -1].item()
            == (x[(shape[0] - 1) // 128 * 128 :, (shape[1] - 1) // 128 * 128 :].abs().max() / 448).item()
        )
        wide = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
        assert (nearest_code_error(x, codes, wide) <= 1 + 1e-4).all()

    def test_floor(self) -> None:
        for cast in (q.per_block_cast_to_fp8, q.per_token_cast_to_fp8, q.per_channel_cast_to_fp8):
            _, scale = cast(torch.full((128, 128), 1e-7))
            assert (scale == torch.tensor(1e-4) / 448).all()

    def test_token_and_channel(self) -> None:
        x = torch.randn(256, 200)
        _, token = q.per_token_cast_to_fp8(x)
        assert token.shape == (256, 2) and token[3, 1].item() == (x[3, 128:].abs().max() / 448).item()
        _, channel = q.per_channel_cast_to_fp8(x)
        assert channel.shape == (2, 200) and channel[1, 7].item() == (x[128:, 7].abs().max() / 448).item()

    def test_flashinfer(self) -> None:
        x = torch.randn(5, 256).bfloat16()
        x[2] = 0
        codes, scale = q.flashinfer_quantize_1x128(x)
        assert scale.shape == (2, 8) and scale.is_contiguous()
        inverse = torch.tensor(448.0) / x[0, :128].float().abs().max()
        assert scale[0, 0].item() == (1 / inverse).item() and scale[0, 2].item() == 1.0 and (scale[:, 5:] == 0).all()
        assert (codes[2].float() == 0).all()

    @pytest.mark.parametrize("amax", [2.0**-133, 2.0**-127, 2.0**-120, 2.0**-118, 2.0**126, 2.0**127])
    @pytest.mark.parametrize("rows", [1, 128])
    def test_flashinfer_keeps_finite_values_finite(self, amax: float, rows: int) -> None:
        """Where the shipped kernel gives NaN: zeros beside tiny values, subnormals, beyond 2^126."""
        x = torch.zeros(128, 128).bfloat16()
        x[5, 9], x[5, 10] = amax, -amax / 2
        codes, scale = q.formulas.flashinfer_blocks(x, rows)
        value = codes.double() * scale.double().repeat_interleave(rows, 0)
        assert not codes.float().isnan().any()
        assert ((value - x.double()).abs() <= amax / 16).all() and value[5, 9] != 0

    def test_flashinfer_weight_scans_every_row(self) -> None:
        w = torch.ones(128, 256).bfloat16()
        w[97, 130] = 50.0  # a row that the published scan leaves out
        _, scale = q.flashinfer_quantize_128x128(w)
        assert scale[0, 1].item() == pytest.approx(50 / 448, rel=1e-6)


class TestShards:
    """Fused shards and per-tensor scales on disk."""

    def test_requantise_only_when_every_shard_has_a_scale(self, make) -> None:
        w = make.codes(8, 16)
        own = torch.tensor([0.5, 2.0])
        top, fused = q.requantize_with_max_scale(w, own, [3, 5])
        assert top.item() == 2.0
        assert torch.equal(fused[3:].view(torch.uint8), w[3:].view(torch.uint8))
        assert torch.equal(fused[:3].float(), (w[:3].float() * 0.25).to(FP8).float())
        _, same = q.requantize_with_max_scale(w, torch.tensor([0.5, torch.finfo(FP8).min]), [3, 5])
        assert torch.equal(same.view(torch.uint8), w.view(torch.uint8))

    def test_dequantise_goes_through_float16(self) -> None:
        codes = torch.tensor([448.0, 1.0, -448.0]).to(FP8)
        assert q.per_tensor_dequantize(codes, 200.0).tolist() == [INF, 200.0, -INF]
        assert q.per_tensor_dequantize(codes, 2.0**-26).tolist()[1] == 0.0
        assert q.per_tensor_dequantize(codes, torch.tensor([0.5])).dtype == torch.float16

    def test_channelwise(self) -> None:
        out = q.convert_to_channelwise(torch.tensor([0.5, 2.0]), [1, 3])
        assert out.tolist() == [[0.5], [2.0], [2.0], [2.0]] and out.dtype == torch.float32
        with pytest.raises(ShapeError, match="shards"):
            q.convert_to_channelwise(torch.tensor([0.5]), [1, 3])

    def test_all_close_1d(self) -> None:
        assert q.all_close_1d(torch.tensor([1.0, 1.0 + 1e-7])) and not q.all_close_1d(torch.tensor([1.0, 1.1]))
        assert not q.all_close_1d(torch.tensor([NAN, NAN]))
        with pytest.raises(ShapeError):
            q.all_close_1d(torch.ones(2, 2))

    def test_fnuz_keeps_every_value(self) -> None:
        """All 256 codes: the value survives, -0 becomes 0; the fn NaN codes keep their bits and read as +-240."""
        fn = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FP8)
        out, scale, none = q.normalize_e4m3fn_to_e4m3fnuz(fn, torch.tensor([0.5]))
        assert none is None and out.dtype == torch.float8_e4m3fnuz
        before, after = fn.float() * 0.5, out.float() * scale
        nan = before.isnan()
        assert torch.equal(before[~nan], after[~nan]) and nan.sum() == 2
        assert out.float()[nan].tolist() == [240.0, -240.0]
