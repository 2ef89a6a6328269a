"""Backends against stand-ins for their libraries: what is handed over, in which layout, across releases."""

import sys
import types
from collections.abc import Iterator

import pytest
import torch

from kernels.backends import cutlass, deep_gemm, flashinfer
from kernels.backends import eager as plain
from kernels.errors import MissingPackageError

FP8 = torch.float8_e4m3fn


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """An empty module in place of DeepGEMM."""
    module = types.ModuleType("deep_gemm")
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "unused")
    caches = (deep_gemm.library, deep_gemm.symbol, deep_gemm.takes_2d_lens)
    for cache in caches:
        cache.cache_clear()
    yield module
    for cache in caches:
        cache.cache_clear()


class TestDeepGemmDrift:
    """Renamed symbols, options that old releases lack, one- or two-dimensional context lengths."""

    def test_new_names(self, library, make) -> None:
        seen = []
        library.fp8_gemm_nt = lambda a, b, out, **options: seen.append((a, b, options))
        a, b, out = make.codes(4, 128), make.codes(128, 128), torch.empty(4, 128, dtype=torch.bfloat16)
        deep_gemm.fp8_gemm_nt(a, torch.ones(4, 1), b, torch.ones(1, 1), out, None, True)
        assert seen[0][2] == {"disable_ue8m0_cast": True} and seen[0][0][0] is a

    def test_old_names(self, library, make) -> None:
        seen = []
        library.gemm_fp8_fp8_bf16_nt = lambda a, b, out: seen.append(a)
        library.get_col_major_tma_aligned_tensor = lambda s: plain.column_major(s, 4)
        scale = torch.rand(5, 2)
        out = torch.empty(5, 128, dtype=torch.bfloat16)
        deep_gemm.fp8_gemm_nt(make.codes(5, 256), scale, make.codes(128, 256), torch.ones(1, 2), out, None, True)
        assert torch.equal(seen[0][1], scale) and seen[0][1].stride() == (1, 8)

    @pytest.mark.parametrize("name", deep_gemm.SYMBOLS["grouped_masked"])
    def test_every_name_of_a_routine(self, library, name: str) -> None:
        setattr(library, name, lambda: None)
        assert deep_gemm.symbol("grouped_masked")[1] == name

    def test_a_release_without_the_routine(self, library) -> None:
        with pytest.raises(MissingPackageError, match="has no fp8_mqa_logits"):
            deep_gemm.symbol("mqa_logits")

    @pytest.mark.parametrize("two", [False, True])
    def test_context_lens(self, library, two: bool) -> None:
        if two:
            library.get_paged_mqa_logits_metadata = lambda context_lens, block_kv, num_sms, indices=None: context_lens
        else:
            library.get_paged_mqa_logits_metadata = lambda context_lens, block_kv, num_sms: context_lens
        lens = torch.tensor([[3, 4], [7, 8]], dtype=torch.int32)
        got = deep_gemm.paged_metadata(lens, 64, 132)
        assert torch.equal(got, lens if two else lens[:, 1])

    @pytest.mark.parametrize("name", deep_gemm.SYMBOLS["alignment"])
    def test_alignment(self, library, name: str) -> None:
        setattr(library, name, lambda: 128)
        assert deep_gemm.alignment() == 128

    def test_a_strided_output_is_filled(self, library, make) -> None:
        library.fp8_gemm_nt = lambda a, b, out, **_: out.fill_(3.0)
        wide = torch.zeros(4, 200, dtype=torch.bfloat16)
        deep_gemm.fp8_gemm_nt(
            make.codes(4, 128), torch.ones(4, 1), make.codes(128, 128), torch.ones(1, 1), wide[:, :128], None, True
        )
        assert (wide[:, :128] == 3).all() and (wide[:, 128:] == 0).all()

    def test_absent_library_names_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in deep_gemm.IMPORT_NAMES:
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setenv("DG_JIT_CACHE_DIR", "unused")
        deep_gemm.library.cache_clear()
        with pytest.raises(MissingPackageError, match="sgl-deep-gemm"):
            deep_gemm.library()


def test_tma_addressable(make) -> None:
    """Copied only when TMA cannot address it."""
    a = make.codes(8, 128)
    assert deep_gemm.addressable(a) is a
    padded = make.codes(8, 144)[:, :128]
    assert deep_gemm.addressable(padded) is padded
    for awkward in (make.codes(8, 130)[:, :128], make.codes(8, 256)[:, ::2], make.codes(8, 144)[:, 1:129]):
        fixed = deep_gemm.addressable(awkward)
        assert fixed.is_contiguous() and fixed.data_ptr() != awkward.data_ptr()
        assert torch.equal(fixed.float(), awkward.float())


class FakeOperators:
    """Stands for ``torch.ops._C``: remembers what it was given, computes with the scale it can see."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, ...]] = []

    def cutlass_scaled_mm(self, out, a, b, scale_a, scale_b, bias) -> None:
        self.calls.append((out, a, b, scale_a, scale_b))
        if scale_a.numel() == a.shape[0] * (a.shape[1] // 128):
            out.copy_(plain.block_linear(a, b, scale_a, scale_b, bias, out.dtype))


class TestCutlass:
    """Block scales reach the operator M-major with M padded to a multiple of 4."""

    @pytest.mark.parametrize("m", [1, 4, 7, 16])
    def test_block(self, monkeypatch, make, m: int) -> None:
        fake = FakeOperators()
        monkeypatch.setattr(cutlass, "operators", lambda: fake)
        a, b = make.codes(m, 256), make.codes(128, 256, seed=1)
        sa, sb = make.scales(m, 2), make.scales(1, 2, seed=1)
        y = cutlass.block_linear(a, b.t(), sa, sb.t(), None, torch.bfloat16)
        _, given, weight, scale, scale_b = fake.calls[0]
        lead = m + (-m % 4)
        assert given.shape[0] == lead and scale.shape == (lead, 2) and scale.stride() == (1, lead)
        assert weight.stride(0) == 1 and scale_b.stride() == (1, 2)
        assert y.shape[0] == m and make.error(y, make.product(a, sa, b, sb)) < 2**-8

    @pytest.mark.parametrize("rows", [64, 65])
    def test_grouped_problem_sizes(self, monkeypatch, make, rows: int) -> None:
        """64-bit starts; up to 64 rows the kernel exchanges its operands and wants (N, M, K)."""
        seen = []
        fake = types.SimpleNamespace(cutlass_moe_mm=lambda *arguments: seen.append(arguments))
        monkeypatch.setattr(cutlass, "operators", lambda: fake)
        ends = torch.tensor([10, 10, rows], dtype=torch.int32)
        b = make.codes(3, 32, 64)
        cutlass.grouped_scaled(make.codes(rows, 64), b, torch.ones(rows, 1), torch.ones(3, 32), ends, torch.bfloat16)
        starts, sizes = seen[0][5], seen[0][6]
        assert starts.dtype == torch.int64 and starts.tolist() == [0, 10, 10] and seen[0][2].shape == b.shape
        counts = [10, 0, rows - 10]
        expected = [[32, c, 64] if rows <= 64 else [c, 32, 64] for c in counts]
        assert sizes.dtype == torch.int32 and sizes.tolist() == expected
        assert [s.tolist() for s in seen[0][7:10]] == [[64] * 3, [64] * 3, [32] * 3]

    @pytest.mark.parametrize("layout", ["row", "col", "tma"])
    def test_group_quantiser_has_the_layer_signature(self, monkeypatch, layout: str) -> None:
        """What the verb passes when vLLM's operator is chosen; the operator sees the layout in the strides."""
        seen = []
        fake = types.SimpleNamespace(per_token_group_fp8_quant=lambda *arguments: seen.append(arguments))
        monkeypatch.setattr(cutlass, "operators", lambda: fake)
        x = torch.randn(7, 256)
        ours = plain.quant_group(x, 128, 1e-10, False, layout)
        q, scale = cutlass.quant_group(x, 128, 1e-10, False, layout, None)
        assert q.shape == ours[0].shape and scale.shape == ours[1].shape and scale.stride() == ours[1].stride()
        assert seen[0][3:5] == (128, 1e-10) and seen[0][8] is (layout != "row")

    def test_a_ready_scale_is_not_copied(self) -> None:
        ready = torch.rand(2, 8).t()
        assert cutlass.m_major(ready, 8) is ready

    def test_missing_operators(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if hasattr(torch.ops._C, "cutlass_scaled_mm"):
            pytest.skip("vLLM's operators are loaded in this process")
        cutlass.operators.cache_clear()
        with pytest.raises(MissingPackageError, match="install vLLM"):
            cutlass.operators()


class TestFlashInfer:
    """What reaches the kernel."""

    def test_operands(self, monkeypatch, make) -> None:
        seen = []

        def kernel(x, w, xs, ws, out, out_dtype):
            seen.append((x, w, xs, ws))
            return torch.zeros(x.shape[0], w.shape[0], dtype=torch.bfloat16)

        monkeypatch.setattr(flashinfer, "library", lambda name: types.SimpleNamespace(fp8_blockscale_gemm_sm90=kernel))
        a, sa, b = make.codes(7, 256), make.scales(7, 2), make.codes(64, 256, seed=1)
        flashinfer.blockscale_sm90(a, sa, b, torch.rand(2, 1).t())
        _, _, xs, ws = seen[0]
        assert xs.shape == (2, 8) and torch.equal(xs[:, :7], sa.t()) and ws.is_contiguous()

    def test_a_strided_output_is_filled(self, monkeypatch, make) -> None:
        full = lambda x, w, xs, ws, out, dtype: torch.full((x.shape[0], w.shape[0]), 2.0, dtype=torch.bfloat16)  # noqa: E731
        monkeypatch.setattr(flashinfer, "library", lambda name: types.SimpleNamespace(fp8_blockscale_gemm_sm90=full))
        wide = torch.zeros(4, 100, dtype=torch.bfloat16)
        flashinfer.blockscale_sm90(
            make.codes(4, 128), torch.ones(4, 1), make.codes(64, 128), torch.ones(1, 1), wide[:, :64]
        )
        assert (wide[:, :64] == 2).all() and (wide[:, 64:] == 0).all()
