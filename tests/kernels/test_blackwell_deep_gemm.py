"""Products by DeepGEMM on a described Blackwell machine: it is given packed exponents, never float32 scales.

Calls whose fakes multiply are rows of :mod:`tests.support.blackwell_rows`.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import kernels
import oracle
from kernels.backends import deep_gemm
from kernels.errors import KernelError, ValueRangeError
from kernels.platform import Machine, use_machine
from kernels.verbs import SERVED
from oracle.numbers.formats import decode
from oracle.routines import cases
from oracle.verdict.compare import Status
from tests.support.fake_blackwell import simulated

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
        real = a_scale
        if masked:  # rows that are not there have the scale 1
            real = torch.where((torch.arange(M) < rows[:, None])[..., None], a_scale, 1.0)
        assert torch.equal(unpacked(left, K // 128), real)
        assert torch.equal(unpacked(right, K // 128), b_scale.expand(G, N, K // 128))
        if masked:
            with pytest.raises(ValueRangeError):
                deep_gemm.grouped_masked(a, a_scale * 0.75, b, b_scale, out, rows, M, False)


@pytest.mark.parametrize(("arch", "rows"), [("sm100", 128), ("sm120", 128), ("sm90", 64)])
def test_runs_of_experts_are_aligned_for_each_kind_of_scales(library, arch: str, rows: int) -> None:
    """Float32 scales go to another library on Blackwell, whose tiles are higher than the alignment that is set here."""
    library.get_mk_alignment_for_contiguous_layout = lambda: 64
    with use_machine(Machine.described(arch)):
        assert kernels.get_mk_alignment_for_contiguous_layout() == rows


@pytest.mark.parametrize("arch", ["sm100", "sm120"])
@pytest.mark.parametrize("name", [
    "fp8_m_grouped_gemm_nt_masked/e4m3xe4m3-bf16/1x128:128x128/m=17,n=192,k=640,g=3/family=randn/seed=3",
    "m_grouped_fp8_fp4_gemm_nt_masked/e4m3xe2m1-bf16/1x128:1x32/m=17,n=64,k=256,g=3/family=randn/seed=3",
])  # fmt: skip  # a table, one row a line
def test_scales_of_rows_that_are_not_there_are_not_looked_at(name: str, arch: str) -> None:
    """Those past ``masked_m`` may hold anything; one before it that is no power of two is refused (the twin)."""
    case = cases.parse(name)
    inputs, options = case.inputs(), dict(case.call_options())
    scale = torch.exp2(inputs["a_scale"].log2().round())
    inputs |= {"b_scale": torch.exp2(inputs["b_scale"].log2().round()), "a_scale": scale}
    real = {**inputs, "a_scale": scale.clone()}
    for group, rows in enumerate(inputs["masked_m"].tolist()):
        scale[group, rows:] = float("nan")
    verb = SERVED[case.contract].verb
    if case.contract.startswith("fp8"):
        verb = functools.partial(verb, disable_ue8m0_cast=False)
    with simulated(Machine.described(arch)) as libraries:
        out = SERVED[case.contract].adapter(verb, inputs, options)
        scale[2, 0] *= 0.75
        with pytest.raises(KernelError):
            SERVED[case.contract].adapter(verb, inputs, options)
    assert len(libraries.calls) == 1
    assert oracle.judge(case.contract, real, out, arch=arch, explain="off").status is Status.PASSED


@pytest.mark.parametrize("arch", ["sm100", "sm103", "sm120"])
def test_scales_that_are_no_powers_of_two(arch: str) -> None:
    """Refused before the call where the call says that they are; powers are not (the twin)."""
    case = cases.parse("fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=130,n=192,k=640/family=randn/seed=3")
    inputs = case.inputs()
    right, left = (torch.exp2(inputs[name].log2().round()) for name in ("b_scale", "a_scale"))
    out = torch.empty(130, 192, dtype=torch.bfloat16)
    with simulated(Machine.described(arch)) as libraries:
        kernels.fp8_gemm_nt((inputs["a"], left), (inputs["b"], right), out, disable_ue8m0_cast=False)
        with pytest.raises(KernelError):
            kernels.fp8_gemm_nt((inputs["a"], left * 0.75), (inputs["b"], right), out, disable_ue8m0_cast=False)
    assert [call.name for call in libraries.calls] == ["fp8_gemm_nt"]
