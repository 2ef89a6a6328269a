"""Where scales lie on Blackwell, address by address, and that bytes of padding reach no result.

The addresses are the formulas of the libraries' sources, written out here; codes and scales of the layer are read by
them. In the products every byte behind a scale is NaN.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import kernels
from kernels.backends import deep_gemm
from kernels.errors import ShapeError
from kernels.mx_blocks import size_of

ROWS, COLUMNS = (1, 31, 128, 130), (1, 3, 4, 9)


def tiled(r: int, c: int, columns: int, height: int) -> int:
    """The address of a scale in tiles of ``height`` x 4 (cuBLAS; TensorRT-LLM for 8)."""
    across = -(-columns // 4)
    if height == 8:
        return (r // 8 * across + c // 4) * 32 + r % 8 * 4 + c % 4
    return (r // 128 * across + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


def numbered(rows: int, columns: int) -> Tensor:
    """Bytes from 1 on, none of them 0."""
    return (torch.arange(rows * columns) % 251 + 1).to(torch.uint8).view(rows, columns)


@pytest.mark.whole("a look into some hundred bytes")
@pytest.mark.parametrize("tile", ["128x4", "8x4"])
def test_tiles(tile: str) -> None:
    """Every scale at its address, zeros elsewhere; back again padding is not read (the twin: one byte moved)."""
    height = 8 if tile == "8x4" else 128
    for rows, columns in itertools.product(ROWS, COLUMNS):
        scale = numbered(rows, columns)
        memory = kernels.swizzle_scale(scale, tile)
        due = torch.zeros(size_of(rows, columns, tile), dtype=torch.uint8)
        for r, c in itertools.product(range(rows), range(columns)):
            due[tiled(r, c, columns, height)] = scale[r, c]
        assert torch.equal(memory, due)
        poisoned = torch.where(due == 0, 0xFF, due)
        assert torch.equal(kernels.from_blocked(poisoned, rows, columns, tile), scale)
        assert not torch.equal(memory.roll(1), due)


@pytest.mark.parametrize("rows", ROWS)
def test_words(rows: int) -> None:
    """Four exponents a word, the first in the lowest byte, words column by column, rows on 16 bytes: of float32 powers
    and of bytes alike."""
    for columns in COLUMNS:
        byte = numbered(rows, columns)
        for scale in (torch.exp2(byte.float() - 127), byte):
            words = deep_gemm._packed_words(scale[None])[0]
            lead = -(-rows // 4) * 4
            assert words.shape == (rows, -(-columns // 4)) and words.stride(0) == 1
            assert words.shape[1] == 1 or words.stride(1) == lead
            for r, c in itertools.product(range(rows), range(columns)):
                assert int(words[r, c // 4]) >> 8 * (c % 4) & 0xFF == byte[r, c]


@pytest.mark.parametrize("placement", ["tight", "flashinfer"])
def test_rows_of_experts(placement: str) -> None:
    """Where the scales of each expert begin: behind the whole tiles of those before it, or by FlashInfer's formula."""
    offsets, columns = [0, 5, 5, 140, 161], 5
    x = torch.randn(170, 32 * columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    memory = kernels.mxfp8_experts_quant(x, torch.tensor(offsets, dtype=torch.int32), placement)[1]
    scale = kernels.mxfp8_quantize(x, "linear")[1]
    tight = [0, *itertools.accumulate(-(-(end - begin) // 128) * 128 for begin, end in itertools.pairwise(offsets))]
    starts = tight if placement == "tight" else [(o + 127 * g) // 128 * 128 for g, o in enumerate(offsets)]
    due = torch.zeros_like(memory)
    for g, (begin, end) in enumerate(itertools.pairwise(offsets)):
        for r, c in itertools.product(range(begin, end), range(columns)):
            due[tiled(starts[g] + r - begin, c, columns, 128)] = scale[r, c]
    assert torch.equal(memory, due)
    assert (starts == tight) is (placement == "tight")


def test_padding_reaches_no_result() -> None:
    """NaN in every byte that no scale lies in: of a dense product and of groups in both placements (the twin: NaN in
    the byte of a scale)."""
    generator = torch.Generator().manual_seed(2)
    x, w = (torch.randn(n, 160, generator=generator).bfloat16() for n in (33, 40))
    (a, sa), (b, sb) = kernels.mxfp8_quantize(x), kernels.mxfp8_quantize(w)
    right = kernels.mm_mxfp8(a, b.t(), sa, sb)
    ones = torch.ones(33, 5, dtype=torch.uint8), torch.ones(40, 5, dtype=torch.uint8)
    held = [kernels.swizzle_scale(one).bool() for one in ones]
    poisoned = [torch.where(h, s, 0xFF) for h, s in zip(held, (sa, sb), strict=True)]
    assert torch.equal(kernels.mm_mxfp8(a, b.t(), *poisoned), right)
    poisoned[0][0] = 0xFF
    assert bool(kernels.mm_mxfp8(a, b.t(), *poisoned)[0].isnan().all())
    offsets = torch.tensor([0, 5, 33], dtype=torch.int32)
    weight, of_weight = b.view(2, 20, 160), [kernels.mxfp8_quantize(part)[1] for part in w.view(2, 20, 160)]
    due = torch.cat(
        [
            kernels.mm_mxfp8(a[i:j], weight[g].t(), kernels.mxfp8_quantize(x[i:j])[1], of_weight[g])
            for g, (i, j) in enumerate(((0, 5), (5, 33)))
        ]
    )
    q, memory = kernels.mxfp8_experts_quant(x, offsets, "tight")
    memory = torch.where(memory == 0, 0xFF, memory)
    tiles = torch.cat([torch.where(s == 0, 0xFF, s) for s in of_weight])
    scales = memory.view(torch.float8_e8m0fnu), tiles.view(torch.float8_e8m0fnu)
    assert torch.equal(kernels.scaled_grouped_mm_mx(q, weight, *scales, offsets[1:]), due)


@pytest.mark.parametrize("tile", [64, 128])
def test_orders_of_rows_have_their_inverses(tile: int) -> None:
    """There and back, for weights and their scales; a marker row says which half is up."""
    weight = numbered(256, 48)
    assert torch.equal(kernels.unshuffle_matrix_a(kernels.shuffle_matrix_a(weight, tile), tile), weight)
    assert not torch.equal(kernels.shuffle_matrix_a(weight, tile), weight)
    memory = kernels.shuffle_matrix_sf_a(weight, tile)
    assert torch.equal(kernels.unshuffle_matrix_sf_a(memory, 256, 48, tile), weight)
    gated = kernels.reorder_rows_for_gated_act_gemm(weight)
    assert torch.equal(gated[::2], weight[:128]) and torch.equal(kernels.restore_rows_of_gated_act_gemm(gated), weight)
    both = weight.view(1, 256, 48), numbered(32, 128).view(1, 32, 128)
    turned = kernels.rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(*both)
    back = kernels.unrotate_weights_of_fi_trtllm_fp8_per_tensor_moe(*turned)
    assert all(torch.equal(x, y) for x, y in zip(back, both, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(turned, both, strict=True))
    with pytest.raises(ShapeError):
        kernels.shuffle_matrix_a(numbered(136, 4))
