"""Padding and layout: nothing changes a value; what is right already is left alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import layout
from kernels.errors import OptionError, ShapeError, ValueRangeError
from kernels.platform import Machine

FP8 = torch.float8_e4m3fn


class TestIntegers:
    """align, ceil_div, calculate_tile_tokens_dim."""

    @given(st.integers(0, 10**6), st.integers(1, 10**4))
    def test_align(self, x: int, y: int) -> None:
        assert layout.align(x, y) % y == 0 and 0 <= layout.align(x, y) - x < y
        assert layout.ceil_div(x, y) * y == layout.align(x, y)

    @pytest.mark.parametrize("bad", [(1, 0), (-1, 4), (3, -2)])
    def test_refused(self, bad: tuple[int, int]) -> None:
        with pytest.raises(OptionError):
            layout.ceil_div(*bad)

    @pytest.mark.parametrize(
        ("tokens", "top_k", "experts", "expected"),
        [
            (0, 8, 256, 8),
            (1, 1, 1, 8),
            (7, 1, 1, 16),
            (8, 1, 1, 16),
            (16, 1, 1, 32),
            (50, 1, 1, 64),
            (49, 1, 1, 64),
            (24, 1, 1, 32),
            (25, 1, 1, 32),
            (10**6, 8, 16, 64),
            (256, 8, 256, 16),
        ],
    )
    def test_tile_tokens(self, tokens: int, top_k: int, experts: int, expected: int) -> None:
        assert layout.calculate_tile_tokens_dim(tokens, top_k, experts) == expected


class TestScaleLayouts:
    """DeepGEMM's layouts."""

    @pytest.mark.parametrize("shape", [(31, 7), (4, 1), (1, 5), (3, 31, 7)])
    def test_col_major(self, shape: tuple[int, ...]) -> None:
        scale = torch.rand(shape)
        out = layout.get_col_major_tma_aligned_tensor(scale)
        lead = layout.align(shape[-2], 4)
        assert torch.equal(out, scale) and out.stride()[-2:] == (1, lead)
        assert layout.get_col_major_tma_aligned_tensor(out) is out

    def test_measured_packing(self) -> None:
        """``[31, 7]`` float32 becomes int32 ``[31, 2]`` with strides (1, 32)."""
        scale = torch.exp2(torch.randint(-20, 20, (31, 7)).float())
        packed = layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(scale)
        assert packed.shape == (31, 2) and packed.stride() == (1, 32) and packed.dtype == torch.int32
        for group in range(8):
            byte = (packed[:, group // 4] >> (8 * (group % 4))) & 0xFF
            expected = torch.log2(scale[:, group]).int() + 127 if group < 7 else torch.zeros(31, dtype=torch.int32)
            assert torch.equal(byte, expected)

    @pytest.mark.parametrize("bad", [1.5, 0.0, -2.0, float("inf"), float("nan"), 2.0**-128])
    def test_packing_refuses_what_it_would_lose(self, bad: float) -> None:
        scale = torch.ones(4, 4)
        scale[2, 1] = bad
        with pytest.raises(ValueRangeError, match="power of two"):
            layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(scale)

    def test_smallest_scale_packs_to_byte_0(self) -> None:
        packed = layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(torch.full((1, 1), 2.0**-127))
        assert packed.item() == 0

    @pytest.mark.parametrize("arch", ["sm90", "sm100", "cpu"])
    @pytest.mark.parametrize("is_sfa", [True, False])
    def test_required_layout(self, arch: str, is_sfa: bool) -> None:
        mn, k = 200, 384
        scale = torch.exp2(torch.randint(-3, 3, (mn if is_sfa else 2, 3)).float())
        out = layout.transform_sf_into_required_layout(
            scale, mn, k, (1, 128, 128), is_sfa=is_sfa, machine=Machine.described(arch)
        )
        if arch != "sm100":
            assert torch.equal(out, scale) and out.stride() == ((1, 200) if is_sfa else (3, 1))
        else:
            assert out.dtype == torch.int32 and out.shape == (200, 1) and out.stride() == (1, 200)
            first = scale[:, 0] if is_sfa else scale[:, 0].repeat_interleave(128)[:200]
            assert torch.equal((out[:, 0] & 0xFF) - 127, torch.log2(first).int())

    def test_sm100_refuses_to_round_a_finished_scale(self) -> None:
        with pytest.raises(ValueRangeError, match="power of two"):
            layout.transform_sf_into_required_layout(
                torch.full((4, 1), 0.3), 4, 128, (1, 128, 128), machine=Machine.described("sm100")
            )


class TestRowOrders:
    """Bijections; equal to FlashInfer's own where it is installed."""

    @pytest.mark.parametrize("n", [32, 64, 96, 256])
    @pytest.mark.parametrize("tile", [64, 128])
    def test_bijections(self, n: int, tile: int) -> None:
        for rows in (layout.shuffled_rows(n, tile), layout.gated_rows(n)):
            assert sorted(rows.tolist()) == list(range(n))
            assert torch.equal(rows[rows.argsort()], torch.arange(n))

    def test_interleave(self) -> None:
        w = torch.arange(6).view(6, 1)
        assert layout.reorder_rows_for_gated_act_gemm(w).flatten().tolist() == [0, 3, 1, 4, 2, 5]
        strided = torch.arange(12).view(6, 2)[:, :1]
        assert layout.reorder_rows_for_gated_act_gemm(strided).flatten().tolist() == [0, 6, 2, 8, 4, 10]

    def test_shuffle_within_32(self) -> None:
        assert layout.shuffled_rows(64)[:10].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 1, 5]
        assert layout.shuffled_rows(32, 64)[:10].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3]

    @pytest.mark.parametrize("n", [32, 96, 256])
    def test_equal_to_flashinfer(self, n: int) -> None:
        flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
        w = torch.arange(n * 16, dtype=torch.int32).view(n, 16)
        assert torch.equal(flashinfer.reorder_rows_for_gated_act_gemm(w), layout.reorder_rows_for_gated_act_gemm(w))
        for tile in (64, 128):
            theirs = flashinfer.shuffle_matrix_a(w.view(torch.uint8), tile)
            assert torch.equal(theirs, layout.shuffle_matrix_a(w.view(torch.uint8), tile))

    def test_rotation_is_both_orders(self, make) -> None:
        g1, g2 = make.codes(2, 64, 8), make.codes(2, 32, 16)
        r1, r2 = layout.rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(g1, g2)
        for e in range(2):
            one = layout.shuffle_matrix_a(layout.reorder_rows_for_gated_act_gemm(g1[e].float()))
            assert torch.equal(r1[e].float(), one)
            assert torch.equal(r2[e].float(), layout.shuffle_matrix_a(g2[e].float()))

    def test_odd_rows(self) -> None:
        for call in (layout.reorder_rows_for_gated_act_gemm, layout.shuffle_matrix_a, layout.swap_w13_to_w31):
            with pytest.raises(ShapeError):
                call(torch.ones(33, 4))


class TestGatedWeights:
    """Padding the intermediate size keeps the fused product."""

    @staticmethod
    def fused(w13: torch.Tensor, w2: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ w13.double().transpose(1, 2)).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up) @ w2.double().transpose(1, 2)

    @pytest.mark.parametrize("inner", [1, 15, 17, 31])
    def test_fused_product_is_unchanged(self, make, inner: int) -> None:
        w13, w2 = make.codes(2, 2 * inner, 8), make.codes(2, 4, inner)
        a, b, padded = layout.align_fp8_moe_weights_for_fi(w13, w2, True)
        assert padded == layout.align(inner, 16) and a.shape == (2, 2 * padded, 8) and b.shape == (2, 4, padded)
        x = torch.randn(3, 8, dtype=torch.float64)
        assert torch.equal(self.fused(a, b, x), self.fused(w13, w2, x)) or torch.allclose(
            self.fused(a, b, x), self.fused(w13, w2, x), rtol=1e-12
        )

    def test_published_placement_is_seen(self, make) -> None:
        """Negative test: both halves copied as one run give another product."""
        w13, w2 = make.codes(1, 30, 8), make.codes(1, 4, 15)
        _, b, _ = layout.align_fp8_moe_weights_for_fi(w13, w2, True)
        wrong = torch.zeros(1, 32, 8)
        wrong[:, :30] = w13.float()
        x = torch.randn(3, 8, dtype=torch.float64)
        assert not torch.allclose(self.fused(wrong, b, x), self.fused(w13, w2, x), rtol=1e-3)

    def test_aligned_weights_are_the_same_objects(self, make) -> None:
        w13, w2 = make.codes(1, 32, 8), make.codes(1, 4, 16)
        a, b, padded = layout.align_fp8_moe_weights_for_fi(w13, w2, True)
        assert a is w13 and b is w2 and padded == 16

    def test_ungated(self, make) -> None:
        a, _, padded = layout.align_fp8_moe_weights_for_fi(make.codes(1, 5, 8), make.codes(1, 4, 5), False)
        assert a.shape == (1, 16, 8) and padded == 16

    def test_swap_is_an_involution(self, make) -> None:
        w = make.codes(2, 6, 4)
        swapped = layout.swap_w13_to_w31(w)
        assert torch.equal(swapped[:, :3].float(), w[:, 3:].float())
        assert torch.equal(layout.swap_w13_to_w31(swapped).float(), w.float())
