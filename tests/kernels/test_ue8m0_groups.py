"""Grouped products on a described Blackwell machine: DeepGEMM is given packed exponents, never float32 scales."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.backends import deep_gemm
from kernels.errors import ValueRangeError
from kernels.platform import Machine, use_machine
from oracle.numbers.formats import decode

G, M, N, K = 2, 128, 64, 256


def powers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.exp2(torch.randint(-6, 6, shape, generator=generator).float())


def unpacked(words: Tensor, blocks: int) -> Tensor:
    """The powers of two of words ``[..., ceil(blocks / 4)]`` by the format's definition, first in the lowest byte."""
    lanes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)[..., :blocks]
    return decode(lanes.contiguous().view(torch.float8_e8m0fnu)).float()


@pytest.mark.parametrize("arch", ["sm100", "sm103", "sm120", "sm90"])
@pytest.mark.parametrize("masked", [False, True])
def test_scales_reach_the_library_packed(library, make, arch: str, masked: bool) -> None:
    """Four exponents a word of every row, rows of a 128-row weight scale repeated; on Hopper float32 (the twin)."""
    seen: list[tuple[Tensor, ...]] = []
    library.fp8_m_grouped_gemm_nt_masked = lambda a, b, out, *_, **__: seen.append((a[1], b[1]))
    library.m_grouped_fp8_gemm_nt_contiguous = library.fp8_m_grouped_gemm_nt_masked
    lead = (G, M) if masked else (G * M,)
    a, b = make.codes(*lead, K), make.codes(G, N, K)
    a_scale, b_scale = powers(*lead, K // 128, seed=1), powers(G, 1, K // 128, seed=2)
    out, rows = torch.empty(*lead, N, dtype=torch.bfloat16), torch.tensor([M, 3], dtype=torch.int32)
    with use_machine(Machine.described(arch)):
        if masked:
            deep_gemm.grouped_masked(a, a_scale, b, b_scale, out, rows, M, False)
        else:
            indices = torch.arange(G, dtype=torch.int32).repeat_interleave(M)
            deep_gemm.grouped_contiguous(a, a_scale, b, b_scale, out, indices, False)
        left, right = seen[0]
        if arch == "sm90":
            assert left is a_scale and right is b_scale
            return
        assert left.dtype is right.dtype is torch.int32 and left.stride(-2) == right.stride(-2) == 1
        assert torch.equal(unpacked(left, K // 128), a_scale)
        assert torch.equal(unpacked(right, K // 128), b_scale.expand(G, N, K // 128))
        if masked:
            with pytest.raises(ValueRangeError):
                deep_gemm.grouped_masked(a, a_scale * 0.75, b, b_scale, out, rows, M, False)
