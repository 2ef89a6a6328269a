"""Layouts: every map is a bijection with an inverse, padding is never read, and the row orders are FlashInfer's."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oracle.errors import InputError, LayoutError, OptionError, ShapeError
from oracle.numbers.formats import E4M3FN, E4M3FNUZ, codes_of, decode
from oracle.routines.base import Output, get
from oracle.routines.layouts import contract as contracts
from oracle.routines.layouts import shards as shard_contracts
from oracle.truth import layout, logits, shards
from oracle.verdict.compare import Status, Verdict

assert contracts and shard_contracts  # imported for their registration
POISON = 0xA5
sides = st.integers(1, 40)
groups = st.sampled_from([None, 1, 3])


def codes(*shape: int, seed: int = 0) -> Tensor:
    """Every byte but the NaN codes, as float8_e4m3fn."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, shape, generator=g).to(torch.uint8)
    return torch.where((x & 0x7F) == 0x7F, x ^ 1, x).view(torch.float8_e4m3fn)


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def unpacked(packed: Tensor, columns: int) -> Tensor:
    """The inverse of packing: float32 powers of two ``[..., M, columns]``; bytes past the last column are not read."""
    byte = torch.stack([(packed.to(torch.int64) >> (8 * j)) & 0xFF for j in range(4)], dim=-1).flatten(-2)
    exponents = byte[..., :columns] - 127
    return torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents).to(torch.float32)


def unaligned(w13: Tensor, w2: Tensor, is_act_and_mul: bool, *, intermediate: int) -> tuple[Tensor, Tensor]:
    """The inverse of ``align_fp8_moe_weights_for_fi``; padding is not read."""
    starts = (0, w2.shape[-1]) if is_act_and_mul else (0,)
    halves = [raw(w13)[:, start : start + intermediate] for start in starts]
    return torch.cat(halves, dim=1).view(w13.dtype), w2[..., :intermediate]


def powers(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    exponents = torch.randint(1, 255, shape, generator=g).to(torch.int32) << 23
    return exponents.view(torch.float32)


def judge(name: str, inputs: dict[str, Tensor], output: Output, **options: object) -> Verdict:
    return get(name).judge(inputs, output, arch="cpu", numerics=None, **options)


def raw(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


@pytest.mark.turns(4)
class TestIntegers:
    """ceil_div, align, padded rows and tile sizes against their definitions in rationals."""

    @given(st.integers(0, 10**9), st.integers(1, 10**6))
    def test_align_is_the_least_multiple(self, x: int, y: int) -> None:
        assert layout.ceil_div(x, y) == -(-Fraction(x, y) // 1)
        a = layout.align(x, y)
        assert a % y == 0 and x <= a < x + y

    def test_ranges_are_checked(self) -> None:
        for x, y in ((-1, 4), (4, 0), (4, -2)):
            with pytest.raises(OptionError, match="ceil_div"):
                layout.ceil_div(x, y)

    @pytest.mark.parametrize(("mn", "size", "expected"), [(31, 4, 32), (32, 4, 32), (1, 4, 4), (1, 1, 16), (5, 8, 6)])
    def test_tma_alignment_is_16_bytes(self, mn: int, size: int, expected: int) -> None:
        assert layout.tma_aligned(mn, size) == expected

    @given(st.integers(0, 20000), st.integers(1, 32), st.integers(1, 512))
    def test_tile_size(self, tokens: int, top_k: int, experts: int) -> None:
        """The published float expression, in floats."""
        needed = int((tokens * top_k // experts) * 1.3)
        tile = 1
        while tile < needed:
            tile *= 2
        assert layout.calculate_tile_tokens_dim(tokens, top_k, experts) == min(max(tile, 8), 64)

    def test_tables_are_judged(self) -> None:
        tokens = torch.arange(0, 4000, 37)
        table = {"num_tokens": tokens, "top_k": torch.full_like(tokens, 8), "num_experts": torch.full_like(tokens, 64)}
        right = get("calculate_tile_tokens_dim").reference(table)
        assert isinstance(right, Tensor)
        assert judge("calculate_tile_tokens_dim", table, right).status is Status.PASSED
        wrong = right.clone()
        wrong[50] *= 2
        verdict = judge("calculate_tile_tokens_dim", table, wrong)
        assert verdict.status is Status.FAILED and "50" in verdict.pattern


class TestColumnMajor:
    """[M, C] float32 to strides (1, align(M, 4)); pad lanes zero."""

    def test_measured_strides(self) -> None:
        made = layout.get_col_major_tma_aligned_tensor(floats(31, 7))
        assert made.shape == (31, 7) and made.stride() == (1, 32)

    @given(sides, sides, groups)
    def test_round_trip(self, m: int, c: int, g: int | None) -> None:
        x = floats(*([g] if g else []), m, c, seed=m * 41 + c)
        made = layout.get_col_major_tma_aligned_tensor(x)
        assert torch.equal(made, x) and torch.equal(made.contiguous(), x)
        assert made.stride()[-2:] == (1, layout.align(m, 4))
        assert bool((layout.pad_lanes(made) == 0).all())

    def test_poison_in_the_padding_is_not_read(self) -> None:
        x = floats(2, 5, 3)
        made = layout.get_col_major_tma_aligned_tensor(x)
        layout.pad_lanes(made).fill_(torch.nan)
        assert torch.equal(made.contiguous(), x)

    @pytest.mark.parametrize(
        "sabotage", ["row-major", "leading dimension M", "transposed", "poisoned padding", "no memory for padding"]
    )
    def test_sabotaged_layouts_fail(self, sabotage: str) -> None:
        x = floats(5, 5, seed=3)
        right = layout.get_col_major_tma_aligned_tensor(x)
        wrong = {
            "row-major": x,
            "leading dimension M": x.t().contiguous().t(),
            "transposed": layout.get_col_major_tma_aligned_tensor(x.t()),
            "poisoned padding": layout.get_col_major_tma_aligned_tensor(x),
            "no memory for padding": torch.zeros(4 * 8 + 5).as_strided((5, 5), (1, 8)).copy_(x),
        }[sabotage]
        if sabotage == "poisoned padding":
            layout.pad_lanes(wrong).fill_(torch.nan)
        name = "get_col_major_tma_aligned_tensor"
        assert judge(name, {"scale": x}, right).status is Status.PASSED
        assert judge(name, {"scale": x}, wrong).status is Status.FAILED

    def test_equal_scales_prove_little(self) -> None:
        x = torch.ones(5, 5)
        made = layout.get_col_major_tma_aligned_tensor(x)
        assert judge("get_col_major_tma_aligned_tensor", {"scale": x}, made).status is Status.MISTRUSTED

    def test_one_column(self) -> None:
        """Its second stride says nothing; its bytes are those of a row-major one."""
        k, scale = codes(5, 1, 16), floats(5, 1)
        by_columns = torch.empty_strided((5, 1), (1, 8)).copy_(scale)
        assert torch.equal(layout.pack_kv_cache(k, by_columns), layout.pack_kv_cache(k, scale))
        assert torch.equal(raw(logits.words(by_columns, 128)), raw(logits.words(scale, 128)))


class TestPackedUe8m0:
    """Four exponent bytes in an int32, K padded to 4; no bit of a neighbour."""

    def test_measured_shape_and_strides(self) -> None:
        made = layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(powers(31, 7))
        assert (made.dtype, tuple(made.shape), made.stride()) == (torch.int32, (31, 2), (1, 32))

    def test_bytes_by_hand(self) -> None:
        made = layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(torch.tensor([[1.0, 2.0, 0.5, 2.0**127, 2.0**-127]]))
        words = [word & 0xFFFFFFFF for word in made[0].tolist()]
        assert words == [127 | 128 << 8 | 126 << 16 | 254 << 24, 0]

    @given(sides, sides, groups)
    def test_round_trip(self, m: int, c: int, g: int | None) -> None:
        x = powers(*([g] if g else []), m, c, seed=m * 43 + c)
        made = layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(x)
        assert torch.equal(unpacked(made, c), x)
        assert made.stride()[-2:] == (1, layout.align(m, 4))

    def test_padding_bytes_are_zero_and_not_read(self) -> None:
        x = powers(3, 5)
        made = layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(x)
        assert bool((made[:, 1] >> 8 == 0).all())
        poisoned = made.clone()
        poisoned[:, 1] |= 0x7F7F7F00
        assert torch.equal(unpacked(poisoned, 5), x)
        name = "get_mn_major_tma_aligned_packed_ue8m0_tensor"
        assert judge(name, {"scale": x}, poisoned).status is Status.FAILED

    @pytest.mark.parametrize("value", [1.5, 0.0, -1.0, float("inf"), float("nan"), 2.0**-128, 1.0000001])
    def test_anything_else_is_refused(self, value: float) -> None:
        """The first of them is named."""
        x = powers(3, 5)
        x[1, 2] = x[2, 4] = value
        with pytest.raises(InputError, match=r"scale\[1, 2\]"):
            layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(x)

    @pytest.mark.parametrize("sabotage", ["big endian", "mantissa bleeds", "next block", "row-major words"])
    def test_sabotaged_packing_fails(self, sabotage: str) -> None:
        x = powers(6, 8, seed=2)
        right = layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(x)
        made = {
            "big endian": layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(x.reshape(6, 2, 4).flip(2).reshape(6, 8)),
            "mantissa bleeds": layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(x) | 0x100,
            "next block": layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(x.roll(-1, dims=1)),
            "row-major words": right.contiguous(),
        }[sabotage]
        name = "get_mn_major_tma_aligned_packed_ue8m0_tensor"
        assert judge(name, {"scale": x}, right).status is Status.PASSED
        assert judge(name, {"scale": x}, made).status is Status.FAILED

    @pytest.mark.parametrize("gran", [1, 128])
    @pytest.mark.parametrize("target", ["sm90", "sm100"])
    def test_required_layout(self, gran: int, target: str) -> None:
        """sm90: float32 columns for 1x128, untouched for 128x128; sm100: packed, block rows repeated."""
        mn, k = 200, 700
        x = powers(-(-mn // gran), 6, seed=gran)
        made = layout.transform_sf_into_required_layout(x, mn=mn, k=k, gran_mn=gran, arch=target)
        if target == "sm90":
            assert torch.equal(made, x) and (made.stride() == (1, 200) if gran == 1 else made is x)
        else:
            rows = x if gran == 1 else x[torch.arange(mn) // 128]
            assert made.stride() == (1, 200) and torch.equal(unpacked(made, 6), rows)
        options = {"mn": mn, "k": k, "gran_mn": gran, "target": target}
        name = "transform_sf_into_required_layout"
        assert judge(name, {"scale": x}, made, **options).status is Status.PASSED
        wrong = made.clone(memory_format=torch.preserve_format)
        wrong[0, 0] = wrong[-1, 0]
        assert judge(name, {"scale": x}, wrong, **options).status is Status.FAILED

    def test_a_scale_of_128_rows_is_contiguous(self) -> None:
        """A pitched one is copied; its own strides are refused."""
        x = powers(2, 7, seed=1)[:, :6]
        options = {"mn": 200, "k": 700, "gran_mn": 128, "target": "sm90"}
        due = [judge("transform_sf_into_required_layout", {"scale": x}, y, **options) for y in (x.contiguous(), x)]
        assert [one.status for one in due] == [Status.PASSED, Status.FAILED]

    def test_shapes_are_checked(self) -> None:
        with pytest.raises(ShapeError, match="take"):
            layout.transform_sf_into_required_layout(powers(3, 6), mn=200, k=700, gran_mn=128, arch="sm90")
        with pytest.raises(OptionError, match="sm90, sm100"):
            layout.transform_sf_into_required_layout(powers(2, 6), mn=200, k=700, gran_mn=128, arch="sm70")


class TestSwizzle:
    """128x4: 32 rows by four groups of rows by four columns; 8x4: row by row within a tile."""

    @pytest.mark.parametrize("tile", ["128x4", "8x4"])
    @given(m=st.integers(1, 300), c=st.integers(1, 9), g=groups)
    def test_round_trip_and_injective(self, tile: str, m: int, c: int, g: int | None) -> None:
        x = codes(*([g] if g else []), m, c, seed=m)
        made = layout.swizzle_scale(x, tile=tile)
        assert torch.equal(raw(layout.unswizzle_scale(made, m, c, tile=tile)), raw(x))
        offsets = layout.swizzle_offsets(m, c, tile=tile).flatten()
        assert len(set(offsets.tolist())) == m * c and int(offsets.max()) < made.shape[-1]

    def test_as_a_reshape(self) -> None:
        """The same map as a permutation of axes: [Mt, 4, 32, Kt, 4] to [Mt, Kt, 32, 4, 4]."""
        x = codes(256, 12)
        expected = raw(x).reshape(2, 4, 32, 3, 4).permute(0, 3, 2, 1, 4).flatten()
        assert torch.equal(raw(layout.swizzle_scale(x)), expected)
        expected = raw(x).reshape(32, 8, 3, 4).permute(0, 2, 1, 3).flatten()
        assert torch.equal(raw(layout.swizzle_scale(x, tile="8x4")), expected)

    @pytest.mark.parametrize("tile", ["128x4", "8x4"])
    def test_padding_is_not_read(self, tile: str) -> None:
        x = codes(2, 130, 5)
        poisoned = layout.swizzle_scale(x, tile=tile, fill=POISON)
        assert not torch.equal(raw(poisoned), raw(layout.swizzle_scale(x, tile=tile)))
        assert torch.equal(raw(layout.unswizzle_scale(poisoned, 130, 5, tile=tile)), raw(x))
        assert judge("swizzle_scale", {"scale": x}, poisoned, tile=tile).status is Status.PASSED

    def test_sabotaged_swizzles_fail(self) -> None:
        x = codes(128, 4, seed=5)
        for wrong in (raw(x).flatten().view(x.dtype), layout.swizzle_scale(x, tile="8x4")):  # omitted; 8x4 for 128x4
            assert judge("swizzle_scale", {"scale": x}, wrong).status is Status.FAILED


class TestRowOrders:
    """Bijections, undone by their inverse, and the installed or recorded FlashInfer's index for index."""

    @given(st.integers(1, 20), st.sampled_from([128, 64]))
    def test_shuffle_round_trip(self, blocks: int, tile: int) -> None:
        rows = blocks * 32
        w = codes(rows, 3, seed=blocks)
        order = layout.row_order(rows, epilogue_tile_m=tile)
        assert torch.equal(order.sort().values, torch.arange(rows))
        made = layout.shuffle_matrix_a(w, tile)
        assert torch.equal(raw(layout.undo_rows(made, order)), raw(w))

    @given(st.integers(1, 100))
    def test_gated_round_trip(self, half: int) -> None:
        w = codes(2 * half, 2, seed=half)
        made = layout.reorder_rows_for_gated_act_gemm(w)
        assert torch.equal(raw(made)[0::2], raw(w)[:half]) and torch.equal(raw(made)[1::2], raw(w)[half:])
        assert torch.equal(raw(layout.undo_rows(made, layout.gated_row_order(2 * half))), raw(w))

    @given(st.integers(1, 6), st.integers(1, 5), st.sampled_from([None, 1, 4]))
    def test_swap_is_an_involution(self, half: int, columns: int, experts: int | None) -> None:
        x = codes(*([experts] if experts else []), 2 * half, columns, seed=half)
        made = layout.swap_w13_to_w31(x)
        assert torch.equal(raw(made)[..., :half, :], raw(x)[..., half:, :])
        assert torch.equal(raw(layout.swap_w13_to_w31(made)), raw(x))

    def test_a_block_over_both_halves_is_refused(self) -> None:
        with pytest.raises(ShapeError, match="a block spans gate and up"):
            layout.swap_w13_to_w31(floats(2, 3, 4))

    @pytest.mark.parametrize("gated", [True, False])
    def test_rotation_round_trip(self, gated: bool) -> None:
        gemm1, gemm2 = codes(3, 64, 32), codes(3, 32, 32, seed=1)
        made = layout.rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(gemm1, gemm2, is_gated=gated)
        back = layout.unrotate_weights(*made, is_gated=gated)
        assert torch.equal(raw(back[0]), raw(gemm1)) and torch.equal(raw(back[1]), raw(gemm2))
        if gated:
            by_hand = layout.shuffle_matrix_a(layout.reorder_rows_for_gated_act_gemm(gemm1[1]))
            assert torch.equal(raw(made[0][1]), raw(by_hand))

    def test_recorded_orders(self, fixtures_folder: Path) -> None:
        recorded = json.loads((fixtures_folder / "golden/layout/row_orders.json").read_text())["orders"]
        assert len(recorded) == 11
        for name, order in recorded.items():
            assert own_order(name) == order, name

    def test_another_order_of_rows_is_noticed(self, fixtures_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The twin: a layout whose first two rows change places differs from every recorded order."""
        recorded = json.loads((fixtures_folder / "golden/layout/row_orders.json").read_text())["orders"]

        def swapped(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def order(*arguments: Any, **options: Any) -> Tensor:
                made = real(*arguments, **options)
                return torch.cat([made[1:2], made[:1], made[2:]])

            return order

        for function in ("row_order", "gated_row_order"):
            monkeypatch.setattr(layout, function, swapped(getattr(layout, function)))
        direct = [name for name in recorded if not name.startswith("rotate")]
        assert len(direct) > 8
        for name in direct:
            assert own_order(name) != recorded[name], name

    @pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer cannot be imported")
    def test_installed_flashinfer(self) -> None:
        flashinfer = pytest.importorskip("flashinfer")
        for rows in (64, 128, 992):
            index = torch.arange(rows)[:, None]
            for tile in (128, 64):
                theirs = flashinfer.shuffle_matrix_a(index, tile)[:, 0]
                assert torch.equal(theirs, layout.row_order(rows, epilogue_tile_m=tile)), (rows, tile)
            theirs = flashinfer.reorder_rows_for_gated_act_gemm(index)[:, 0]
            assert torch.equal(theirs, layout.gated_row_order(rows)), rows

    @pytest.mark.parametrize("name", ["reorder_rows_for_gated_act_gemm", "shuffle_matrix_a", "swap_w13_to_w31"])
    def test_contracts_and_twins(self, name: str) -> None:
        w = codes(64, 16, seed=9)
        key = "x" if name == "swap_w13_to_w31" else "w"
        right = get(name).reference({key: w})
        assert isinstance(right, Tensor)
        assert judge(name, {key: w}, right).status is Status.PASSED
        assert judge(name, {key: w}, w).status is Status.FAILED  # left as it was
        swapped = raw(right).clone()
        swapped[[3, 4]] = swapped[[4, 3]]
        verdict = judge(name, {key: w}, swapped.view(w.dtype))
        assert verdict.status is Status.FAILED and "rows 3..4" in verdict.summary

    def test_rotation_contract_wants_both_weights(self) -> None:
        inputs = {"gemm1_weights": codes(2, 64, 32), "gemm2_weights": codes(2, 32, 32, seed=4)}
        name = "rotate_weights_for_fi_trtllm_fp8_per_tensor_moe"
        right = get(name).reference(inputs)
        assert isinstance(right, dict) and judge(name, inputs, right).status is Status.PASSED
        verdict = judge(name, inputs, {**right, "gemm2_weights": inputs["gemm2_weights"]})
        assert verdict.status is Status.FAILED and verdict.worst is not None and verdict.worst.output == "gemm2_weights"


def own_order(name: str) -> list[int]:
    """This suite's order of a recorded one."""
    routine, *rest = name.split("/")
    if routine == "reorder_rows_for_gated_act_gemm":
        return layout.gated_row_order(int(rest[0])).tolist()
    if routine == "shuffle_matrix_a":
        return layout.row_order(int(rest[0]), epilogue_tile_m=int(rest[1])).tolist()
    index = torch.arange(192, dtype=torch.uint8).reshape(1, 192, 1).expand(1, 192, 32).contiguous()
    gemm2 = torch.zeros(1, 32, 96, dtype=torch.uint8)
    return layout.rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(index, gemm2)[0][0, :, 0].tolist()


def fused_product(w13: Tensor, w2: Tensor, x: Tensor, *, gated: bool) -> list[list[Fraction]]:
    """w13, then gate * up (or up alone) in place of silu(gate) * up, then w2, in rationals.

    The identity instead of silu keeps the product exact and, like silu, maps 0 to 0.
    """

    def times(w: Tensor, v: list[Fraction]) -> list[Fraction]:
        return [sum((Fraction(a) * b for a, b in zip(row, v, strict=True)), Fraction(0)) for row in decode(w).tolist()]

    out = []
    for expert in range(w13.shape[0]):
        h = times(w13[expert], [Fraction(v) for v in x.tolist()])
        half = len(h) // 2
        act = [g * u for g, u in zip(h[:half], h[half:], strict=True)] if gated else h
        out.append(times(w2[expert], act))
    return out


class TestIntermediatePadding:
    """Each half padded in its own place; the published placement moves the up half."""

    E, H, SIZE = 2, 3, 20

    def weights(self, *, gated: bool) -> tuple[Tensor, Tensor]:
        return codes(self.E, (2 if gated else 1) * self.SIZE, self.H, seed=1), codes(self.E, self.H, self.SIZE, seed=2)

    @pytest.mark.parametrize("gated", [True, False])
    def test_fused_product_is_unchanged(self, gated: bool) -> None:
        w13, w2 = self.weights(gated=gated)
        x = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
        p13, p2, padded = layout.align_fp8_moe_weights_for_fi(w13, w2, gated)
        assert padded == 32 and p2.shape == (self.E, self.H, 32)
        assert fused_product(p13, p2, x, gated=gated) == fused_product(w13, w2, x, gated=gated)

    def test_published_gated_placement_changes_it(self) -> None:
        w13, w2 = self.weights(gated=True)
        x = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
        p13, p2, _ = layout.align_fp8_moe_weights_for_fi_published(w13, w2, True)
        wrong, right = fused_product(p13, p2, x, gated=True), fused_product(w13, w2, x, gated=True)
        assert all(a != b for rows in zip(wrong, right, strict=True) for a, b in zip(*rows, strict=True))

    def test_published_ungated_placement_is_right(self) -> None:
        w13, w2 = self.weights(gated=False)
        published = layout.align_fp8_moe_weights_for_fi_published(w13, w2, False)
        ours = layout.align_fp8_moe_weights_for_fi(w13, w2, False)
        assert torch.equal(raw(published[0]), raw(ours[0])) and torch.equal(raw(published[1]), raw(ours[1]))

    def test_verdicts_name_the_rows(self) -> None:
        """up[0:12] lies in the gate's tail (rows 20..31); the up half is shifted by 12 (rows 32..51)."""
        w13, w2 = self.weights(gated=True)
        inputs, name = {"w13": w13, "w2": w2}, "align_fp8_moe_weights_for_fi"
        right = get(name).reference(inputs)
        assert isinstance(right, dict) and judge(name, inputs, right).status is Status.PASSED
        p13, p2, _ = layout.align_fp8_moe_weights_for_fi_published(w13, w2, True)
        verdict = judge(name, inputs, {"w13": p13, "w2": p2})
        assert verdict.status is Status.FAILED
        assert "rows 20..51 only" in verdict.summary
        assert verdict.explained_by == ("up half of gated weights left at the unpadded offset",)

    def test_aligned_weights_are_the_same_objects(self) -> None:
        w13, w2 = codes(1, 64, 4), codes(1, 4, 32)
        p13, p2, padded = layout.align_fp8_moe_weights_for_fi(w13, w2, True)
        assert p13 is w13 and p2 is w2 and padded == 32

    @pytest.mark.parametrize("gated", [True, False])
    @given(intermediate=st.integers(1, 50), columns=st.integers(1, 4))
    def test_round_trip_without_reading_padding(self, gated: bool, intermediate: int, columns: int) -> None:
        w13 = codes(2, (2 if gated else 1) * intermediate, columns, seed=intermediate)
        w2 = codes(2, columns, intermediate, seed=columns)
        p13, p2, padded = layout.align_fp8_moe_weights_for_fi(w13, w2, gated)
        q13, q2 = raw(p13).clone(), raw(p2).clone()
        q13.reshape(2, -1, padded, columns)[:, :, intermediate:] = POISON
        q2[..., intermediate:] = POISON
        b13, b2 = unaligned(q13.view(w13.dtype), q2.view(w2.dtype), gated, intermediate=intermediate)
        assert torch.equal(raw(b13), raw(w13)) and torch.equal(raw(b2), raw(w2))


class TestPreparation:
    """Pad, swap, rotate, in that order; block scales are swapped, never padded."""

    def inputs(self, *, block: bool) -> dict[str, Tensor]:
        shape13, shape2 = ((2, 4, 1), (2, 1, 2)) if block else ((2,), (2,))
        size = 256 if block else 20
        return {
            "w13": codes(2, 2 * size, 32, seed=1),
            "w2": codes(2, 32, size, seed=2),
            "w13_scale": floats(*shape13),
            "w2_scale": floats(*shape2, seed=3),
        }

    def test_order_of_the_steps(self) -> None:
        inputs = self.inputs(block=False)
        made = layout.prepare_fp8_moe_layer_for_fi(*inputs.values(), block_quant=False, is_trtllm=True)
        w13, w2 = layout.unrotate_weights(made[0], made[1])
        w13 = layout.swap_w13_to_w31(w13)
        back = unaligned(w13, w2, True, intermediate=20)
        assert torch.equal(raw(back[0]), raw(inputs["w13"])) and torch.equal(raw(back[1]), raw(inputs["w2"]))

    @pytest.mark.parametrize(("block", "trtllm"), [(False, False), (False, True), (True, False)])
    def test_contract_and_twins(self, block: bool, trtllm: bool) -> None:
        inputs, name = self.inputs(block=block), "prepare_fp8_moe_layer_for_fi"
        options = {"block_quant": block, "is_trtllm": trtllm}
        right = get(name).reference(inputs, **options)
        assert isinstance(right, dict) and judge(name, inputs, right, **options).status is Status.PASSED
        twins = [{**right, "w13": raw(right["w13"]).roll(1, dims=1).view(right["w13"].dtype)}]
        if block:
            twins.append({**right, "w13_scale": inputs["w13_scale"]})
            twins.append({**right, "w13": inputs["w13"]})
        else:
            other = get(name).reference(inputs, block_quant=False, is_trtllm=not trtllm)
            assert isinstance(other, dict)
            twins.append(other)
        for wrong in twins:
            assert judge(name, inputs, wrong, **options).status is Status.FAILED


class TestKvCache:
    """All codes of a block, then all of its scales."""

    @given(st.integers(1, 4), st.sampled_from([32, 64, 128]))
    def test_round_trip(self, blocks: int, d: int) -> None:
        k, scale = codes(blocks, 64, d, seed=d), floats(blocks, 64, seed=blocks)
        packed = layout.pack_kv_cache(k, scale)
        assert packed.shape == (blocks, 64, 1, d + 4)
        k2, scale2 = layout.unpack_kv_cache(packed)
        assert torch.equal(raw(k2), raw(k)) and torch.equal(scale2, scale)

    def test_bytes_by_hand(self) -> None:
        k, scale = codes(2, 64, 32), floats(2, 64)
        flat = layout.pack_kv_cache(k, scale)[1].flatten()
        assert flat[5 * 32 + 7] == raw(k)[1, 5, 7]
        assert flat[64 * 32 + 4 * 9 : 64 * 32 + 4 * 10].view(torch.float32) == scale[1, 9]

    def test_scale_beside_its_codes_is_noticed(self) -> None:
        k, scale = codes(1, 64, 32), floats(1, 64)
        interleaved = torch.cat([raw(k), scale.view(torch.uint8).reshape(1, 64, 4)], dim=2)[:, :, None]
        assert not torch.equal(raw(layout.unpack_kv_cache(interleaved)[0]), raw(k))


class TestFnuz:
    """Every code keeps its value times the scale, except -0, and NaN, which FNUZ reads as +-240."""

    def test_all_codes(self) -> None:
        every = torch.arange(256).to(torch.uint8)
        scale = torch.tensor([0.75])
        out, doubled, none = shards.normalize_e4m3fn_to_e4m3fnuz(every.view(torch.float8_e4m3fn), scale)
        assert none is None and float(doubled) == 1.5
        before, after = decode(every, E4M3FN) * 0.75, decode(codes_of(out), E4M3FNUZ) * 1.5
        ordinary = (every & 0x7F) != 0x7F
        assert torch.equal(before[ordinary], after[ordinary])
        assert not torch.isnan(after).any()
        assert [float(after[0x7F]), float(after[0xFF])] == [360.0, -360.0]

    @pytest.mark.parametrize("sabotage", ["-0 kept", "scale not doubled", "input scale dropped"])
    def test_contract_and_twins(self, sabotage: str) -> None:
        every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
        inputs = {"weight": every, "weight_scale": torch.tensor([0.75]), "input_scale": torch.tensor([0.3])}
        name = "normalize_e4m3fn_to_e4m3fnuz"
        right = get(name).reference(inputs)
        assert isinstance(right, dict) and judge(name, inputs, right).status is Status.PASSED
        if sabotage == "input scale dropped":
            with pytest.raises(InputError, match="input_scale"):
                judge(name, inputs, {k: v for k, v in right.items() if k != "input_scale"})
            return
        wrong = dict(right)
        if sabotage == "-0 kept":
            wrong["weight"] = every.view(torch.float8_e4m3fnuz)
        else:
            wrong["weight_scale"] = inputs["weight_scale"]
        assert judge(name, inputs, wrong).status is Status.FAILED


class TestShards:
    """One scale for fused shards; the sentinel says that there is one already."""

    WIDTHS = torch.tensor([3, 0, 5])

    def inputs(self, scales: list[float]) -> dict[str, Tensor]:
        return {"weight": codes(8, 64, seed=7), "weight_scale": torch.tensor(scales), "logical_widths": self.WIDTHS}

    def test_channelwise(self) -> None:
        inputs = {"weight_scale": torch.tensor([0.1, 0.2, 0.3]), "logical_widths": self.WIDTHS}
        right = get("convert_to_channelwise").reference(inputs)
        assert isinstance(right, Tensor) and right.shape == (8, 1)
        assert torch.equal(right[:, 0], torch.tensor([0.1] * 3 + [0.3] * 5))
        assert judge("convert_to_channelwise", inputs, right).status is Status.PASSED
        assert judge("convert_to_channelwise", inputs, right.flip(0)).status is Status.FAILED

    def test_requantised_values_are_nearest(self) -> None:
        """Each code is the nearest to value * s_i / s_max, but for the float16 rounding on the way."""
        inputs = self.inputs([0.011, 0.5, 0.019])
        made = get("requantize_with_max_scale").reference(inputs)
        assert isinstance(made, dict) and float(made["max_scale"]) == 0.5
        before = decode(inputs["weight"]) * torch.tensor([0.011] * 3 + [0.019] * 5)[:, None].to(torch.float64)
        after = decode(made["weight"]) * 0.5
        room = torch.maximum(before.abs() * (2.0**-4 + 2.0**-10), torch.tensor(0.5 * 2.0**-10 * 1.01))
        assert bool(((before - after).abs() <= room).all())
        assert judge("requantize_with_max_scale", inputs, made).status is Status.PASSED

    @pytest.mark.parametrize(
        "sabotage", ["scale without requantising", "wrong shard's scale", "one code up", "min scale"]
    )
    def test_requantisation_twins(self, sabotage: str) -> None:
        inputs, name = self.inputs([0.011, 0.5, 0.019]), "requantize_with_max_scale"
        made = get(name).reference(inputs)
        assert isinstance(made, dict)
        wrong = dict(made)
        if sabotage == "scale without requantising":
            wrong["weight"] = inputs["weight"]
        elif sabotage == "wrong shard's scale":
            other = get(name).reference({**inputs, "weight_scale": torch.tensor([0.019, 0.5, 0.011])})
            assert isinstance(other, dict)
            wrong["weight"] = other["weight"]
        elif sabotage == "one code up":
            wrong["weight"] = (raw(made["weight"]) + 1).view(torch.float8_e4m3fn)
        else:
            wrong["max_scale"] = torch.tensor(0.011)
        assert judge(name, inputs, wrong).status is Status.FAILED

    def test_sentinel_means_fused_on_disk(self) -> None:
        inputs = self.inputs([0.011, 0.5, -448.0])
        made = get("requantize_with_max_scale").reference(inputs)
        assert isinstance(made, dict) and torch.equal(raw(made["weight"]), raw(inputs["weight"]))
        assert judge("requantize_with_max_scale", inputs, made).status is Status.PASSED
        forced = shards.requantize_with_max_scale(inputs["weight"], torch.tensor([0.011, 0.5, 0.5]), [3, 0, 5])[1]
        wrong = {"max_scale": made["max_scale"], "weight": forced}
        assert judge("requantize_with_max_scale", inputs, wrong).status is Status.FAILED

    @pytest.mark.parametrize(
        ("x", "expected"),
        [
            ([1.0, 1.0, 1.0], True),
            ([1.0, 1.000009, 1.0], True),
            ([1.0, 1.0001], False),
            ([float("nan")], False),
            ([float("inf")] * 2, True),
            ([1.0, float("inf")], False),
            ([0.0, 1e-9], True),
            ([0.0, 1e-7], False),
        ],
    )
    def test_all_close(self, x: list[float], expected: bool) -> None:
        tensor = torch.tensor(x)
        assert shards.all_close_1d(tensor) is expected
        assert all(torch.allclose(tensor[0], value) for value in tensor) is expected
        assert judge("all_close_1d", {"x": tensor}, torch.tensor(expected)).status is Status.PASSED
        assert judge("all_close_1d", {"x": tensor}, torch.tensor(not expected)).status is Status.FAILED

    def test_all_close_takes_vectors(self) -> None:
        with pytest.raises(ShapeError, match="vector"):
            shards.all_close_1d(torch.ones(2, 2))

    @pytest.mark.parametrize(
        "name", ["make_fp8_moe_alpha_scales_for_fi", "register_scales_for_trtllm_fp8_per_tensor_moe"]
    )
    def test_alpha_scales(self, name: str) -> None:
        inputs = {
            "w13_scale": floats(4),
            "w13_input_scale": torch.tensor(0.37),
            "w2_scale": floats(4, seed=1),
            "w2_input_scale": torch.tensor(0.11),
        }
        right = get(name).reference(inputs)
        assert isinstance(right, dict) and judge(name, inputs, right).status is Status.PASSED
        for output in right:
            wrong = {**right, output: right[output] * (1 + 2.0**-20)}
            assert judge(name, inputs, wrong).status is Status.FAILED
        with pytest.raises(ShapeError, match="w2_input_scale has shape"):
            judge(name, {**inputs, "w2_input_scale": torch.ones(4, 1)}, right)
        if "output1_scales_scalar" in right:  # the inverse used for the scale
            wrong = {**right, "output1_scales_scalar": right["output1_scales_gate_scalar"] * 0.11}
            assert judge(name, inputs, wrong).status is Status.FAILED


def test_pad_lanes_refuses_memory_that_is_not_there() -> None:
    with pytest.raises(LayoutError, match="ends before"):
        layout.pad_lanes(torch.zeros(5, 5).t())


LIMITS: dict[str, tuple[Callable[[], object], object]] = {
    # the last that is taken, its answer; the first that is not, the error
    "no token": (lambda: layout.calculate_tile_tokens_dim(0, 1, 1), 8),
    "no choice": (lambda: layout.calculate_tile_tokens_dim(1, 0, 1), 8),
    "fewer tokens": (lambda: layout.calculate_tile_tokens_dim(-1, 1, 1), OptionError),
    "fewer choices": (lambda: layout.calculate_tile_tokens_dim(1, -1, 1), OptionError),
    "no expert": (lambda: layout.calculate_tile_tokens_dim(1, 1, 0), OptionError),
    "an element of 16 bytes": (lambda: layout.tma_aligned(5, 16), 5),
    "an element of 1 byte": (lambda: layout.tma_aligned(5, 1), 16),
    "an element of no byte": (lambda: layout.tma_aligned(5, 0), OptionError),
    "an element of 3 bytes": (lambda: layout.tma_aligned(5, 3), OptionError),
    "a tile of one row": (lambda: len(layout.row_order(16, epilogue_tile_m=1)), 16),
    "a tile of no row": (lambda: layout.row_order(16, epilogue_tile_m=0), OptionError),
    "a block of 16 rows": (lambda: len(layout.row_order(48, epilogue_tile_m=64)), 48),
    "half a block of 32 rows": (lambda: layout.row_order(48, epilogue_tile_m=128), ShapeError),
    "one gate and one up row": (lambda: layout.gated_row_order(2).tolist(), [0, 1]),
    "three rows of gate and up": (lambda: layout.gated_row_order(3), ShapeError),
    "sm100 has blocks of 32": (lambda: required("sm100", 1, 32), [8, 1]),
    "sm100 has blocks of 128": (lambda: required("sm100", 1, 128), [8, 1]),
    "sm90 has none of 32": (lambda: required("sm90", 1, 32), OptionError),
    "sm90 has blocks of 128": (lambda: required("sm90", 1, 128), [8, 1]),
    "none has rows of 2": (lambda: required("sm100", 2, 128), OptionError),
    "none has blocks of 64": (lambda: required("sm100", 1, 64), OptionError),
    "a shard of no row": (lambda: shards._widths(torch.ones(2), [0, 3]), [0, 3]),
    "no shard": (lambda: shards._widths(torch.ones(0), []), ShapeError),
    "a shard of fewer rows": (lambda: shards._widths(torch.ones(2), [3, -1]), ShapeError),
    "no arch before sm90": (lambda: required("sm80", 1, 128), OptionError),
}


def required(arch: str, rows: int, block: int) -> list[int]:
    """The shape of the scales of 8x128 values in the layout that an arch takes."""
    scale = torch.ones(8 // rows, 128 // block)
    return [*layout.transform_sf_into_required_layout(scale, mn=8, k=128, gran_mn=rows, gran_k=block, arch=arch).shape]


@pytest.mark.whole("a comparison of numbers")
@pytest.mark.parametrize("name", LIMITS)
def test_limits(name: str) -> None:
    call, due = LIMITS[name]
    if isinstance(due, type) and issubclass(due, Exception):
        with pytest.raises(due):
            call()
    else:
        assert call() == due
