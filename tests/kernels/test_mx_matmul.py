"""Block-scaled products of the production layer: quantised and multiplied, rows of nobody, one typed error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernels
from kernels import mx_products
from kernels.errors import DtypeError, KernelError, OptionError, ShapeError
from kernels.plan import plan
from kernels.platform import Machine

M, N, K = 7, 16, 96


def matrices(seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(M, K, generator=g), torch.randn(N, K, generator=g)


def two_levels(x: Tensor, layout: str = "128x4") -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and what multiplies them."""
    g = (2688 / x.abs().amax()).reshape(1)
    return *kernels.nvfp4_quantize(x, g, layout), 1 / g


def near(found: Tensor, x: Tensor, w: Tensor, least: float) -> bool:
    """Signal over noise in dB, at least."""
    due = x @ w.t()
    return bool(10 * torch.log10(due.square().sum() / (found.float() - due).square().sum()) > least)


class TestQuantisedAndMultiplied:
    """The products read what the quantisers write; a scale one block on is seen."""

    @pytest.mark.parametrize("small", [False, True])
    def test_mxfp8(self, small: bool) -> None:
        x, w = matrices()
        (a, sa), (b, sb) = kernels.mxfp8_quantize(x, "8x4" if small else "128x4"), kernels.mxfp8_quantize(w)
        assert near(kernels.mm_mxfp8(a, b.t(), sa, sb, use_8x4_sf_layout=small), x, w, 28)
        assert not near(kernels.mm_mxfp8(a.roll(32, 1), b.t(), sa, sb, use_8x4_sf_layout=small), x, w, 28)

    def test_fp4(self) -> None:
        x, w = matrices()
        (a, sa, ga), (b, sb, gb) = two_levels(x), two_levels(w)
        out = kernels.mm_fp4(a, b.t(), sa, sb, ga * gb)
        assert near(out, x, w, 16) and not near(kernels.mm_fp4(a, b.t(), sa, sb, ga), x, w, 16)
        views = (s.view(torch.float8_e4m3fn) for s in (sa, sb))
        assert torch.equal(kernels.scaled_mm(a, b.t(), *views, ga, gb), out)
        assert torch.equal(kernels.mm_fp4(a, b.t(), sa.view(128, 8), sb.view(128, 8).t(), ga * gb), out)

    @pytest.mark.parametrize("nvfp4", [False, True])
    def test_an_alpha_of_every_row(self, nvfp4: bool) -> None:
        """Powers of two multiply exactly, so each row is that of the product with its alpha alone (the twin: not with
        that of the row before)."""
        x, w = matrices()
        sides = [two_levels(t) if nvfp4 else (*kernels.mxfp4_quantize(t), None) for t in (x, w)]
        (a, sa, _), (b, sb, _) = sides
        alpha = torch.exp2(torch.arange(M, dtype=torch.float32) - 3)
        options = {"block_size": 16 if nvfp4 else 32, "use_nvfp4": nvfp4}
        out = kernels.mm_fp4(a, b.t(), sa, sb, alpha, **options)
        each = [kernels.mm_fp4(a, b.t(), sa, sb, alpha[m : m + 1], **options)[m] for m in range(M)]
        assert torch.equal(out, torch.stack(each))
        assert not torch.equal(kernels.mm_fp4(a, b.t(), sa, sb, alpha.roll(1), **options), out)

    def test_groups(self) -> None:
        """Two experts: FlashInfer's placement and torch's are the dense products of their rows."""
        (x, w), (_, v) = matrices(), matrices(2)
        a, b = kernels.mxfp8_quantize(x, "linear"), [kernels.mxfp8_quantize(z) for z in (w, v)]
        weights, scales = torch.stack([q for q, _ in b]), torch.cat([s for _, s in b]).view(torch.float8_e8m0fnu)
        parts = [kernels.swizzle_scale(rows, "128x4") for rows in (a[1][:4], a[1][4:])]
        own = torch.cat(parts).view(torch.float8_e8m0fnu)
        out = kernels.scaled_grouped_mm_mx(a[0], weights, own, scales, torch.tensor([4, 7], dtype=torch.int32))
        for rows, part, (q, s) in ((slice(0, 4), parts[0], b[0]), (slice(4, 7), parts[1], b[1])):
            assert torch.equal(out[rows], kernels.mm_mxfp8(a[0][rows], q.t(), part, s))

    def test_groups_of_k(self) -> None:
        """Each group is the dense product over its own columns; one without K is zero."""
        x, w = (torch.cat([matrices(seed)[side] for seed in (1, 2)], dim=1) for side in (0, 1))
        pairs = [kernels.mxfp8_quantize(t, "linear") for t in (x, w)]
        ends = torch.tensor([32, 32, 192], dtype=torch.int32)
        scales = (kernels.to_blocked_k_groups(s, torch.tensor([1, 1, 6])) for _, s in pairs)
        a, b = (q for q, _ in pairs)
        out = kernels.scaled_grouped_mm_mx_k_groups(a, b, *scales, ends)
        assert out.shape == (3, M, N) and not bool(out[1].any())
        for g, k in ((0, slice(0, 32)), (2, slice(32, 192))):
            own = (kernels.swizzle_scale(s[:, k.start // 32 : k.stop // 32].contiguous(), "128x4") for _, s in pairs)
            assert torch.equal(out[g], kernels.mm_mxfp8(a[:, k], b[:, k].t(), *own))

    def test_shuffled_weights(self) -> None:
        x, w = torch.randn(M, K), torch.randn(32, K)
        (a, sa), (b, sb) = kernels.mxfp8_quantize(x), kernels.mxfp8_quantize(w, "linear")
        plain = kernels.mm_mxfp8(a, b.t(), sa, kernels.swizzle_scale(sb, "128x4"))
        other = kernels.swizzle_scale(kernels.shuffle_matrix_a(sb), "128x4")
        moved = kernels.shuffle_matrix_a(b).t()
        assert torch.equal(kernels.mm_mxfp8(a, moved, sa, other, shuffled=True), plain)
        assert not torch.equal(kernels.mm_mxfp8(a, moved, sa, other), plain)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_summand(self, dtype: torch.dtype) -> None:
        """A matrix of its own, or the output itself; DeepGEMM's int8 holds the same codes."""
        x, w = matrices()
        (a, sa), (b, sb) = kernels.mxfp8_quantize(x, "linear"), kernels.mxfp4_quantize(w, "linear")
        given = (a, torch.exp2(sa.float() - 127)), (b.view(torch.int8), torch.exp2(sb.float() - 127))
        c, out, zero = torch.randn(M, N).to(dtype), torch.empty(M, N, dtype=dtype), torch.empty(M, N, dtype=dtype)
        kernels.fp8_fp4_gemm_nt(*given, zero, recipe=(1, 1, 32))
        kernels.fp8_fp4_gemm_nt(*given, out, c, recipe_a=(1, 32))
        own = c.clone()
        kernels.fp8_fp4_gemm_nt(*given, own, own, recipe_a=(1, 32))
        assert torch.equal(out, own) and not torch.equal(out, zero)
        assert torch.allclose(out.float(), zero.float() + c.float(), rtol=2.0**-7, atol=2.0**-7)

    @pytest.mark.parametrize("gran", [32, 128])
    def test_packed_exponents(self, gran: int) -> None:
        """Four exponents in an int32 give the bits of the powers of two; a word from its other end does not."""
        g, k = torch.Generator().manual_seed(3), 160
        a, b = (torch.randn(rows, k, generator=g).to(torch.float8_e4m3fn) for rows in (M, N))
        powers = [torch.exp2(torch.randint(-8, 8, (rows, -(-k // gran)), generator=g).float()) for rows in (M, N)]
        words = [kernels.get_mn_major_tma_aligned_packed_ue8m0_tensor(s) for s in powers]
        due, out, backward = (torch.empty(M, N) for _ in range(3))
        kernels.fp8_fp4_gemm_nt((a, powers[0]), (b, powers[1]), due, recipe=(1, 1, gran))
        kernels.fp8_fp4_gemm_nt((a, words[0]), (b, words[1]), out, recipe=(1, 1, gran))
        byte = words[1].clone(memory_format=torch.contiguous_format).view(torch.uint8).unflatten(1, (-1, 4))
        other = byte.flip(2).flatten(1).view(torch.int32)
        kernels.fp8_fp4_gemm_nt((a, words[0]), (b, other), backward, recipe=(1, 1, gran))
        assert torch.equal(out, due) and not torch.equal(backward, due)

    @pytest.mark.parametrize("blocks", [1, 2, 4, 5])
    def test_exponents_of_words_lie_densely(self, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A kernel reads a row's scales as they lie, also where one of a word's four is used (an H100 gave NaN)."""
        codes = torch.ones(M, 32 * blocks).to(torch.float8_e4m3fn)
        words = torch.arange(M * -(-blocks // 4), dtype=torch.int32).view(M, -1) * 0x01010101
        seen = []
        monkeypatch.setattr(mx_products, "run_product", lambda *operands, **_: seen.append(operands))
        out = torch.zeros(M, M)
        kernels.fp8_fp4_gemm_nt((codes, words), (codes, words), out, recipe_a=(1, 32), recipe_b=(1, 32))
        for scales in (seen[0][1], seen[0][3]):
            assert scales.memory.is_contiguous() and scales.memory.numel() == M * blocks
            due = words.view(torch.uint8).view(M, -1)[:, :blocks]
            assert torch.equal(scales.memory.view(torch.uint8).view(M, blocks), due)

    def test_packed_exponents_of_groups_of_k(self) -> None:
        g, ks = torch.Generator().manual_seed(4), (160, 0, 32)
        a, b = (torch.randn(sum(ks), rows, generator=g).to(torch.float8_e4m3fn) for rows in (8, 12))
        powers = [torch.exp2(torch.randint(-8, 8, (sum(ks) // 32, r), generator=g).float()) for r in (8, 12)]
        words = [kernels.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(s, ks, gran_k=32) for s in powers]
        due, out = torch.zeros(3, 8, 12), torch.zeros(3, 8, 12)
        kernels.k_grouped_fp8_gemm_tn_contiguous((a, powers[0]), (b, powers[1]), due, ks, recipe=(1, 1, 32))
        kernels.k_grouped_fp8_gemm_tn_contiguous((a, words[0]), (b, words[1]), out, ks, recipe=(1, 1, 32))
        assert torch.equal(out, due) and bool(due[0].any()) and not bool(due[1].any())

    def test_rows_of_nobody_are_left_alone(self) -> None:
        x, w = matrices()
        a, b = x.to(torch.float8_e4m3fn)[None], kernels.mxfp4_quantize(w, "linear")[0][None]
        sa, sb, out = torch.ones(1, M, 1), torch.ones(1, N, 3), torch.full((1, M, N), 7.0)
        kernels.m_grouped_fp8_fp4_gemm_nt_masked((a, sa), (b, sb), out, torch.tensor([5], dtype=torch.int32))
        assert bool((out[:, 5:] == 7).all()) and not bool((out[:, :5] == 7).any())


BAD = (
    (lambda a, b, s, t: kernels.mm_fp4(a, b.t(), s, t, block_size=32), OptionError, "block_size=32"),
    (lambda a, b, s, t: kernels.scaled_mm(a, b.t(), s, t), DtypeError, "scale_a must be float8_e8m0fnu"),
    (lambda a, b, s, t: kernels.mm_fp4(a, b.t(), s, t, torch.ones(M + 1)), ShapeError, "alpha.*\\[1\\] or \\[M\\]"),
    (lambda a, b, s, t: kernels.mm_fp4(a, b.t(), s, t, torch.ones(M).double()), DtypeError, "alpha"),
    (lambda a, b, s, t: kernels.scaled_grouped_mm_mx_k_groups(
        *(x.view(torch.float8_e4m3fn)[:, :32] for x in (a, b)), s[:32], t, torch.tensor([32], dtype=torch.int32)
    ), ShapeError, "scale_a holds 32 scales; these groups of 7 rows take 512"),
    (lambda a, b, s, t: kernels.fp8_fp4_gemm_nt(
        (a, torch.ones(M, 1, dtype=torch.int32)), (b, torch.ones(1, 1, dtype=torch.int32)), torch.empty(M, N),
        recipe_b=(128, 128)), OptionError, "packed scales"),
    (lambda a, b, s, t: kernels.fp8_fp4_gemm_nt(
        (a, torch.ones(M, 2, dtype=torch.int32)), (b, torch.ones(N, 1, dtype=torch.int32)), torch.empty(M, N)
    ), ShapeError, "ceil.K / .4 gran_k"),
)  # fmt: skip  # a table, one row a line


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_a_bad_call_is_one_typed_error(call, error: type[KernelError], message: str) -> None:
    x, w = matrices()
    (a, sa, _), (b, sb, _) = two_levels(x), two_levels(w)
    with pytest.raises(error, match=message):
        call(a, b, sa, sb)


def test_the_plan() -> None:
    """Triton where there is an NVIDIA GPU from sm80, else plain torch on a CPU only."""
    from kernels.config import Config
    from kernels.plan import Problem

    for arch, backend in (("sm80", "triton_mx"), ("sm90", "triton_mx"), ("cpu", "eager")):
        machine = Machine.described(arch)
        assert plan(Problem("mx_product", device=machine.device), machine, Config()).backend == backend
