"""Products by DeepGEMM on a described Blackwell machine: it is given packed exponents, never float32 scales.

The dense product is a fake that multiplies with the oracle from the words as they lie in memory; every argument of its
call is changed, and no change passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
import oracle
from kernels.backends import deep_gemm
from kernels.errors import KernelError, ValueRangeError
from kernels.platform import Machine, use_machine
from oracle.errors import OracleError
from oracle.numbers.formats import decode
from oracle.routines import cases
from oracle.tensorcore.instructions import ALIKE
from oracle.verdict.compare import Status
from tests.support.fake_blackwell import LibraryError, need, simulated

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


@pytest.mark.parametrize(("arch", "rows"), [("sm100", 128), ("sm120", 128), ("sm90", 64)])
def test_runs_of_experts_are_aligned_for_each_kind_of_scales(library, arch: str, rows: int) -> None:
    """Float32 scales go to another library on Blackwell, whose tiles are higher than the alignment that is set here."""
    library.get_mk_alignment_for_contiguous_layout = lambda: 64
    with use_machine(Machine.described(arch)):
        assert kernels.get_mk_alignment_for_contiguous_layout() == rows


class Dense:
    """``fp8_gemm_nt`` with the parameters of sgl-deep-gemm 0.2.3.post2: packed words of every row, MN-major."""

    def __init__(self, arch: str) -> None:
        self.base, self.given = ALIKE.get(arch, arch), dict[str, Any]()

    def __call__(
        self,
        a: Any,
        b: Any,
        d: Tensor,
        c: Tensor | None = None,
        recipe: Any = None,
        recipe_a: Any = None,
        recipe_b: Any = None,
        compiled_dims: str = "",
        disable_ue8m0_cast: bool = False,
        alpha: float | None = None,
    ) -> None:
        self.given = {"a": a, "b": b, "d": d, "disable_ue8m0_cast": disable_ue8m0_cast}
        self.multiply(**self.given)

    def multiply(self, a: Any, b: Any, d: Tensor, disable_ue8m0_cast: bool) -> Tensor:
        (x, xs), (w, ws) = a, b
        (m, k), n = x.shape, w.shape[0]
        need(not disable_ue8m0_cast and xs.dtype is ws.dtype is torch.int32, "Unknown SF transformation")
        need(x.is_contiguous() and w.is_contiguous() and d.is_contiguous() and w.shape[1] == k, "K-major")
        need(d.shape == (m, n) and d.dtype in (torch.bfloat16, torch.float32), "d")
        scales = []
        for words, rows in ((xs, m), (ws, n)):
            lead = -(-rows // 4) * 4  # by address: four rows of words lie on 16 bytes
            need(tuple(words.shape) == (rows, -(-k // 512)) and (words.stride(-2) == 1 or rows == 1), "sf shape")
            need(words.shape[1] == 1 or words.stride(-1) == lead, "sf.stride(-1) % 4 == 0")
            scales.append(unpacked(words, k // 128))
        need(
            all(torch.equal(part, part[:1].expand_as(part)) for part in scales[1].split(128)), "the judge reads blocks"
        )
        operands = {"a": x, "b": w, "a_scale": scales[0], "b_scale": scales[1][::128].contiguous()}
        made = oracle.predict("fp8_gemm_nt", operands, numerics=f"{self.base}.chain_ue8m0", out_dtype=d.dtype)
        assert isinstance(made, Tensor)
        return d.copy_(made)

    def mutants(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every argument of the call, changed."""
        (x, xs), (w, ws) = self.given["a"], self.given["b"]
        swapped = ws.clone(memory_format=torch.contiguous_format).view(torch.uint8).unflatten(1, (-1, 4)).flip(2)
        turned = swapped.flatten(1).view(torch.int32)
        wrong = torch.empty_strided(turned.shape, ws.stride(), dtype=torch.int32).copy_(turned)
        moved = torch.empty_strided(xs.shape, xs.stride(), dtype=torch.int32).copy_(xs.roll(1, 0))
        yield "codes of a", {"a": (x.view(torch.uint8).roll(1, 0).view(x.dtype), xs)}
        yield "codes of b", {"b": (w.view(torch.uint8).roll(128, 1).view(w.dtype), ws)}
        yield "rows of the scales of a", {"a": (x, moved)}
        yield "bytes of the words of b from the other end", {"b": (w, wrong)}
        yield "words row by row", {"a": (x, xs.contiguous())}
        yield "float32 scales", {"a": (x, unpacked(xs, x.shape[1] // 128))}
        yield "operands exchanged", {"a": self.given["b"], "b": self.given["a"]}
        yield "not cast", {"disable_ue8m0_cast": True}
        yield "another output", {"d": torch.empty(*self.given["d"].shape, dtype=torch.float16)}


@pytest.mark.parametrize("arch", ["sm100", "sm103", "sm120"])
def test_the_dense_product(library, arch: str) -> None:
    """Right to the bit by one chain, which the plan names for sm100 and sm103; each change is seen. Scales that are no
    powers of two are refused before the call."""
    case = cases.parse("fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=130,n=192,k=640/family=randn/seed=3")
    inputs = case.inputs()
    for name in ("a_scale", "b_scale"):
        inputs[name] = torch.exp2(inputs[name].log2().round())
    fake = library.fp8_gemm_nt = Dense(arch)
    out = torch.empty(130, 192, dtype=torch.bfloat16)
    a, b = (inputs["a"], inputs["a_scale"]), (inputs["b"], inputs["b_scale"])
    with simulated(Machine.described(arch)), kernels.explain() as plans:
        kernels.fp8_gemm_nt(a, b, out, disable_ue8m0_cast=False)
        with pytest.raises(KernelError):
            kernels.fp8_gemm_nt((a[0], a[1] * 0.75), b, out.clone(), disable_ue8m0_cast=False)
    claim = plans[0].numerics
    assert plans[0].backend == "deep_gemm" and ("chain" in claim) is (arch != "sm120")

    numerics = f"{fake.base}.chain_ue8m0"
    verdict = oracle.judge("fp8_gemm_nt", inputs, out, arch=arch, numerics=numerics, explain="off")
    assert verdict.status is Status.PASSED
    for how, instead in fake.mutants():
        poisoned = {**fake.given, "d": torch.full_like(out, float("nan")), **instead}
        try:
            made = fake.multiply(**poisoned)
        except (LibraryError, OracleError, RuntimeError):  # refused: by the fake, the oracle, or torch on its shapes
            continue
        assert not torch.equal(made, out), how  # whose bits are the only right ones of this chain
