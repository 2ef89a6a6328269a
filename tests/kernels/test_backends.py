"""Backends against stand-ins for their libraries: what is handed over, in which layout, across releases."""

import contextlib
import dataclasses
import sys
import threading
import time
import types
from collections.abc import Iterator

import pytest
import torch

from kernels import blockscaled
from kernels.backends import cutlass, deep_gemm, flashinfer, sgl_kernel, torch_ops
from kernels.backends import eager as plain
from kernels.backends._host import lane_major
from kernels.config import Config, use_config
from kernels.errors import DtypeError, MissingPackageError, NoBackendError, OptionError, Unavailable
from kernels.plan import Problem, plan
from kernels.platform import Machine
from oracle.numbers.formats import decode
from oracle.numbers.quantize import quantize
from oracle.numbers.recipes import FLASHINFER_1X128_FAST_MATH

FP8 = torch.float8_e4m3fn


class TestDeepGemmDrift:
    """Renamed symbols, options that old releases lack, one- or two-dimensional context lengths."""

    def test_new_names(self, library, make) -> None:
        seen = []
        library.fp8_gemm_nt = lambda a, b, out, **options: seen.append((a, b, options))
        a, b, out = make.codes(4, 128), make.codes(128, 128), torch.empty(4, 128, dtype=torch.bfloat16)
        deep_gemm.gemm_nt(a, torch.ones(4, 1), b, torch.ones(1, 1), out, None, True)
        assert seen[0][2] == {"disable_ue8m0_cast": True} and seen[0][0][0] is a

    @pytest.mark.parametrize("version", ["0.1.4.post1", "9.9.9", None])
    def test_every_release_is_called_by_its_public_name(self, library, make, version: str | None) -> None:
        """What lies below it would save less than 1 us a call."""
        seen = []
        library.fp8_gemm_nt = lambda a, b, out, **options: seen.append((*a, *b, out, options["disable_ue8m0_cast"]))
        if version is not None:
            library.__version__ = version
        a, xs, b, ws = make.codes(4, 128), torch.ones(4, 1), make.codes(128, 128), torch.ones(1, 1)
        out = torch.empty(4, 128, dtype=torch.bfloat16)
        deep_gemm.dense_gemm_nt()(a, xs, b, ws, out, None, False)
        assert len(seen[0]) == 6 and all(x is y for x, y in zip(seen[0], (a, xs, b, ws, out, False), strict=True))

    def test_old_names(self, library, make) -> None:
        seen = []
        library.gemm_fp8_fp8_bf16_nt = lambda a, b, out: seen.append(a)
        library.get_col_major_tma_aligned_tensor = lambda s: plain.column_major(s, 4)
        scale = torch.rand(5, 2)
        out = torch.empty(5, 128, dtype=torch.bfloat16)
        deep_gemm.gemm_nt(make.codes(5, 256), scale, make.codes(128, 256), torch.ones(1, 2), out, None, True)
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
        deep_gemm.gemm_nt(
            make.codes(4, 128), torch.ones(4, 1), make.codes(128, 128), torch.ones(1, 1), wide[:, :128], None, True
        )
        assert (wide[:, :128] == 3).all() and (wide[:, 128:] == 0).all()

    def test_absent_library_names_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in deep_gemm.IMPORT_NAMES:
            monkeypatch.setitem(sys.modules, name, None)
        deep_gemm.library.cache_clear()
        with pytest.raises(MissingPackageError, match="sgl-deep-gemm"):
            deep_gemm.library()


class TestMaskedTiles:
    """The library stores whole tiles of 64 rows; with fewer rows a group they reach into the next."""

    @staticmethod
    def tiled(a, b, out, masked_m, expected_m, **_) -> None:
        """Tiles of the first groups are stored last, as on a busy GPU; rows past a group have a scale of 0."""
        (x, xs), (w, ws) = a, b
        flat, m = out.view(-1, out.shape[2]), x.shape[1]
        for g in reversed(range(x.shape[0])):
            rows = int(masked_m[g])
            y = torch.zeros(-(-rows // 64) * 64, out.shape[2], dtype=out.dtype)
            real = torch.empty(min(m, len(y)), out.shape[2], dtype=out.dtype)
            plain.gemm_nt(x[g][: len(y)], xs[g][: len(y)], w[g], ws[g], real, None, True)
            y[: len(real)] = real
            space = flat[g * m : g * m + len(y)]
            space.copy_(y[: len(space)])

    @pytest.mark.parametrize("m", [1, 17, 33, 128, 130])
    def test_no_group_is_overwritten(self, library, make, m: int) -> None:
        """Right for any M through the layer; the twin, the library called as it is, is not (unless M is whole)."""
        library.fp8_m_grouped_gemm_nt_masked = self.tiled
        a = torch.stack([make.codes(m, 128, seed=g) for g in range(3)])
        b = torch.stack([make.codes(64, 128, seed=9 + g) for g in range(3)])
        xs, ws = make.scales(3 * m, 1).view(3, m, 1), make.scales(3, 1).view(3, 1, 1)
        rows = torch.tensor([m, m, max(1, m - 1)], dtype=torch.int32)
        layer, bare = (torch.zeros(3, m, 64, dtype=torch.bfloat16) for _ in range(2))
        deep_gemm.grouped_masked(a, xs, b, ws, layer, rows, m, True)
        self.tiled((a, xs), (b, ws), bare, rows, m)
        for g, count in enumerate(rows.tolist()):
            expected = make.product(a[g], xs[g], b[g], ws[g])[:count]
            assert make.error(layer[g, :count], expected) < 2**-8
        right = all(
            make.error(bare[g, :n], make.product(a[g], xs[g], b[g], ws[g])[:n]) < 2**-8
            for g, n in enumerate(rows.tolist())
        )
        assert right == (m % 64 == 0)

    def test_whole_tiles_are_not_copied(self, library, make) -> None:
        seen = []
        library.fp8_m_grouped_gemm_nt_masked = lambda a, b, out, *_, **__: seen.append((a[0], out))
        a, out = make.codes(256, 128).view(2, 128, 128), torch.zeros(2, 128, 64, dtype=torch.bfloat16)
        rows, weight = torch.tensor([3, 4], dtype=torch.int32), make.codes(128, 128).view(2, 64, 128)
        deep_gemm.grouped_masked(a, torch.ones(2, 128, 1), weight, torch.ones(2, 1, 1), out, rows, 4, True)
        assert seen[0][0] is a and seen[0][1] is out


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
    """Stands for ``torch.ops._C``: remembers what it was given, reads operands as packed, scales as they are."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, ...]] = []

    def cutlass_scaled_mm(self, out, a, b, scale_a, scale_b, bias) -> None:
        self.calls.append((out, a, b, scale_a, scale_b))
        a, b = as_packed(a), as_packed(b)
        kind = plain.block_linear if scale_a.numel() == a.shape[0] * (a.shape[1] // 128) > 1 else plain.linear
        out.copy_(kind(a, b, scale_a, scale_b, bias, out.dtype))


class TestCutlass:
    """Block scales reach the operator M-major with M padded to a multiple of 4, operands without a row pitch."""

    @pytest.mark.parametrize("which", ["a", "b"])
    def test_row_pitch(self, monkeypatch, make, which: str) -> None:
        fake = FakeOperators()
        monkeypatch.setattr(cutlass, "operators", lambda: fake)
        a, b = make.codes(7, 64), make.codes(32, 64, seed=1)
        pitched = torch.nn.functional.pad((a if which == "a" else b).view(torch.uint8), (0, 16)).view(FP8)[:, :64]
        left, right = (pitched, b) if which == "a" else (a, pitched)
        one, expected = torch.ones(1, 1), a.double() @ b.double().t()
        assert make.error(cutlass.linear(left, right.t(), one, one, None, torch.bfloat16), expected) < 2**-8
        twin = torch.empty(7, 32, dtype=torch.bfloat16)
        fake.cutlass_scaled_mm(twin, left, right.t(), one, one, None)
        assert not make.error(twin, expected) < 2**-8

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

    def test_a_strided_bias(self, monkeypatch, make) -> None:
        """The operator takes dense ones only."""
        seen = []
        fake = types.SimpleNamespace(cutlass_scaled_mm=lambda *arguments: seen.append(arguments[5]))
        monkeypatch.setattr(cutlass, "operators", lambda: fake)
        bias, one = torch.arange(64, dtype=torch.bfloat16)[::2], torch.ones(1, 1)
        cutlass.linear(make.codes(4, 64), make.codes(32, 64).t(), one, one, bias, torch.bfloat16)
        assert not bias.is_contiguous() and seen[0].is_contiguous() and torch.equal(seen[0], bias)

    def test_no_rows_are_no_launch(self, monkeypatch) -> None:
        """An empty grid is an error of the runtime; with a row each operator is called (the twin)."""
        called: list[str] = []
        names = ("dynamic_per_token_scaled_fp8_quant", "per_token_group_fp8_quant")
        fake = types.SimpleNamespace(**{n: lambda *_, n=n: called.append(n) for n in names})
        monkeypatch.setattr(cutlass, "operators", lambda: fake)
        for m in (0, 1):
            x = torch.zeros(m, 256, dtype=torch.bfloat16)
            made = (
                cutlass.quant_token(x, None),
                cutlass.quant_group(x, 128, 1e-10, False, "tma"),
            )
            assert [t.shape[0] for pair in made for t in pair] == [m] * 4
            assert called == list(names[: m * 2])

    def test_a_ready_scale_is_not_copied(self) -> None:
        ready = torch.rand(2, 8).t()
        assert cutlass.m_major(ready, 8) is ready

    def test_missing_operators(self, unloaded) -> None:
        with pytest.raises(MissingPackageError, match="install vLLM"):
            cutlass.operators()

    def test_no_library_is_loaded_beside_a_file_that_is_none(self, unloaded, tmp_path, monkeypatch) -> None:
        """Loading cannot be undone, so the mistake is seen before; two libraries are loaded, and said (the twin)."""
        good, other, text = (tmp_path / name for name in ("a.so", "b.so", "c.so"))
        for path in (good, other):
            path.write_bytes(cutlass.ELF + b"...")
        text.write_text("no library")
        opened: list[str] = []
        monkeypatch.setattr(torch.ops, "load_library", opened.append)
        for wrong in (text, tmp_path / "absent.so"):
            with use_config(Config(vllm_ops_library=f"{good}:{wrong}")), pytest.raises(MissingPackageError) as caught:
                cutlass.operators()
            assert wrong.name in str(caught.value) and opened == []
        with use_config(Config(vllm_ops_library=f"{good}:{other}")), pytest.raises(MissingPackageError):
            cutlass.operators()  # these two register nothing
        assert opened == [str(good), str(other)]

    def test_an_operator_that_is_missing_is_known_before_the_call(self, monkeypatch) -> None:
        """Of vLLM's two libraries one is there: the plan says which operator is not, and takes the next backend."""
        machine = dataclasses.replace(Machine.described("sm90").with_package("triton", "no triton"), live=True)
        half = types.SimpleNamespace(cutlass_scaled_mm=1)
        whole = types.SimpleNamespace(cutlass_scaled_mm=1, dynamic_per_token_scaled_fp8_quant=1)
        for found, backend in ((whole, "cutlass"), (half, "eager")):
            monkeypatch.setattr(cutlass, "operators", lambda found=found: found)
            monkeypatch.setattr(cutlass, "_loaded", lambda: (None, {"b.so": "cannot open"}))
            monkeypatch.setattr(sgl_kernel, "library", lambda: types.SimpleNamespace())
            made = plan(Problem("quant_token"), machine, Config())
            assert made.backend == backend
        why = dict(made.reasons)["cutlass"]
        assert isinstance(why, Unavailable) and "no dynamic_per_token_scaled_fp8_quant" in why and "b.so" in why
        with pytest.raises(MissingPackageError):
            plan(Problem("quant_token"), machine, Config(backend="cutlass"))

    @pytest.fixture
    def unloaded(self) -> Iterator[None]:
        if hasattr(torch.ops._C, "cutlass_scaled_mm"):
            pytest.skip("vLLM's operators are loaded in this process")
        cutlass._loaded.cache_clear()
        yield
        cutlass._loaded.cache_clear()


class TestFlashInfer:
    """What reaches the kernel."""

    @pytest.mark.parametrize("release", ["0.6.18.post1", "9.9.9"])
    def test_operands(self, flashinfer_calls, make, release: str) -> None:
        """By the runner of a known release, by the public function of any other."""
        seen = flashinfer_calls(release)
        a, sa, b = make.codes(7, 256), make.scales(7, 2), make.codes(64, 256, seed=1)
        out = flashinfer.blockscale_sm90(a, lane_major(sa), b, torch.rand(2, 1).t())
        _, _, given, xs, ws = seen[0]
        assert given is out and out.shape == (7, 64) and out.dtype == torch.bfloat16
        assert xs.shape == (2, 8) and torch.equal(xs[:, :7], sa.t()) and ws.is_contiguous()

    @pytest.mark.parametrize("switch", ["FLASHINFER_LOGLEVEL", "FLASHINFER_TRACE_DUMP"])
    def test_a_logged_release_is_called_as_published(self, flashinfer_calls, make, switch: str) -> None:
        """Who asked FlashInfer to log or to trace its calls sees them."""
        flashinfer_calls("0.6.18.post1")
        for value, direct in (("0", True), ("", True), ("1", False)):
            assert Config.from_environment({switch: value}).flashinfer_observed is not direct
            with use_config(Config.from_environment({switch: value})):
                assert (flashinfer._fast_run() is not None) is direct

    @pytest.mark.parametrize("locked", [True, False])
    def test_calls_of_threads_come_one_after_another(self, make, monkeypatch, locked: bool) -> None:
        """The process has one runner; without the lock calls overlap."""
        inside, overlaps, start = [], [], threading.Barrier(4)

        def run(*operands: object) -> None:
            inside.append(1)
            time.sleep(0.001)
            overlaps.append(len(inside) > 1)
            inside.pop()

        monkeypatch.setattr(flashinfer, "_fast_run", lambda: run)
        if not locked:
            monkeypatch.setattr(flashinfer, "ONE_CALL", contextlib.nullcontext())
        operands = make.codes(4, 128), make.scales(1, 4), make.codes(64, 128), torch.ones(1, 1)

        def body() -> None:
            start.wait()
            for _ in range(10):
                flashinfer.blockscale_sm90(*operands)

        threads = [threading.Thread(target=body) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(overlaps) == 40 and any(overlaps) is not locked

    @pytest.mark.parametrize("m", [1, 31, 40])
    @pytest.mark.parametrize("value", [2.0**126 * 1.0078125, 3.0e38, 2.0**-128 * 448, 2.0**-133])
    def test_its_quantiser_is_never_used(self, flashinfer_calls, make, monkeypatch, m: int, value: float) -> None:
        """It loses finite groups beside these (the twin, in the oracle's model); the layer passes codes and scales."""
        seen = flashinfer_calls("0.6.18.post1")
        x = torch.zeros(m, 256).bfloat16()
        x[m - 1, 130] = value
        shipped = quantize(x, FLASHINFER_1X128_FAST_MATH)
        lost = (decode(shipped.codes) * decode(shipped.scale).repeat_interleave(128, dim=1)).isnan()
        assert lost[m - 1, 128:].any() and not lost[:, :128].any()
        backends = {"quant_reciprocal": plain.BACKEND}
        monkeypatch.setattr(blockscaled, "route", lambda op, *_: backends.get(op, flashinfer.BACKEND))
        verbs = [blockscaled.flashinfer_fp8_blockscale_gemm]
        verbs += [blockscaled.dynamic_flashinfer_deepgemm_blockscale_gemm] if m < 32 else []
        with use_config(Config()):
            for verb in verbs:
                verb(x, make.codes(64, 256), torch.ones(1, 2))
        assert len(seen) == len(verbs)
        for codes, _, _, scales, _ in seen:
            restored = codes[m - 1, 130].double() * scales[1, m - 1].double()
            assert abs(restored / x[m - 1, 130].double() - 1) <= 2.0**-4
            assert codes.dtype == FP8 and int((codes.float() != 0).sum()) == 1

    def test_the_plan_says_so(self) -> None:
        wide, coded = (Problem("blockscale_sm90", m=8, n=64, k=128, a_dtype=d) for d in ("bfloat16", "float8_e4m3fn"))
        machine = Machine.described("sm90")
        assert "quantise the input 1x128" in flashinfer.steps(wide, machine)
        assert "quantise the input 1x128" not in flashinfer.steps(coded, machine)
        assert "quantise the input 1x128" in flashinfer.steps(Problem("dynamic_blockscale"), machine)

    @pytest.mark.parametrize("release", ["0.6.18.post1", "9.9.9"])
    def test_a_strided_output_is_filled(self, flashinfer_calls, make, release: str) -> None:
        flashinfer_calls(release)
        wide = torch.zeros(4, 100, dtype=torch.bfloat16)
        flashinfer.blockscale_sm90(
            make.codes(4, 128), torch.ones(4, 1), make.codes(64, 128), torch.ones(1, 1), wide[:, :64]
        )
        assert (wide[:, :64] == 2).all() and (wide[:, 64:] == 0).all()


def as_packed(x: torch.Tensor) -> torch.Tensor:
    """What a kernel reads that checks one stride and takes the memory for dense."""
    row_major = x.stride(1) == 1
    shape = x.shape if row_major else (x.shape[1], x.shape[0])
    read = torch.as_strided(x.view(torch.uint8) if x.element_size() == 1 else x, shape, (shape[1], 1))
    read = read.clone().view(x.dtype)
    return read if row_major else read.t()


class FakeSglKernel(types.ModuleType):
    """Stands for the package, with its checks and with its silences: dense memory, whole words, a compiled floor."""

    def __init__(self) -> None:
        super().__init__("sgl_kernel")
        self.calls: list[str] = []

    def fp8_scaled_mm(self, mat_a, mat_b, scales_a, scales_b, out_dtype, bias=None):
        assert mat_a.stride(1) == 1 and mat_b.stride(0) == 1
        assert scales_a.numel() == mat_a.shape[0] and scales_b.numel() == mat_b.shape[1]
        assert scales_a.is_contiguous() and scales_b.is_contiguous()
        assert bias is None or (bias.is_contiguous() and bias.dtype == out_dtype)
        y = as_packed(mat_a).double() @ as_packed(mat_b).double() * scales_a.reshape(-1, 1) * scales_b.reshape(1, -1)
        return (y if bias is None else y + bias).to(out_dtype)

    def fp8_blockwise_scaled_mm(self, mat_a, mat_b, scales_a, scales_b, out_dtype):
        m, k = mat_a.shape
        assert mat_a.stride(1) == 1 and mat_b.stride(0) == 1 and out_dtype in (torch.bfloat16, torch.float16)
        assert scales_a.shape == (m, k // 128) and (scales_a.stride(0) == 1 or 1 in scales_a.shape)
        assert scales_b.shape == (k // 128, mat_b.shape[1] // 128)
        assert scales_b.stride(0) == 1 or 1 in scales_b.shape
        read = scales_a.as_strided(scales_a.shape, (1, m))
        return plain.block_linear(as_packed(mat_a), as_packed(mat_b), read, scales_b, None, out_dtype)

    def sgl_per_token_group_quant_8bit(
        self,
        input,
        output_q,
        output_s,
        group_size,
        eps,
        fp8_min,
        fp8_max,
        scale_ue8m0=False,
        fuse_silu_and_mul=False,
        masked_m=None,
        enable_v2=None,
    ):
        assert enable_v2 is False, "asks sglang, which is not installed"
        self.sgl_per_token_group_quant_fp8(input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0)

    def sgl_per_token_group_quant_fp8(
        self, input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0
    ) -> None:
        assert input.is_contiguous() and output_q.is_contiguous() and output_s.dim() == 2 and group_size == 128
        assert abs(eps - 1e-10) < 1e-13 and (fp8_min, fp8_max) == (-448.0, 448.0)
        columns = output_s.stride(0) < output_s.stride(1)
        assert columns or not scale_ue8m0
        if scale_ue8m0:
            assert output_s.dtype == torch.int32 and input.shape[1] // 128 == 4 * output_s.shape[1], "whole words"
            q, scale = plain.quant_group_packed(input, group_size, eps)
        else:
            q, scale = plain.quant_group(input, group_size, eps, False)
        output_q.copy_(q)
        output_s.copy_(scale)


@pytest.mark.skipif(
    not hasattr(torch.nn.functional, "ScalingType"), reason="torch.nn.functional.scaled_mm is there from torch 2.10 on"
)
@pytest.mark.parametrize("k", [128, 384, 512, 640])
@pytest.mark.parametrize("m", [1, 7, 8])
def test_torch_takes_block_scales_in_fours(monkeypatch: pytest.MonkeyPatch, make, m: int, k: int) -> None:
    """As on a GPU: scales ``[align(M, 4), K/128]`` and ``[align(K/128, 4), N/128]``, both column-major."""
    blocks, four, rows = k // 128, -(-k // 512) * 4, -(-m // 4) * 4

    def fake(a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype):
        assert a.shape == (rows, k) and a.is_contiguous()
        assert scale_a.shape == (rows, blocks) and (scale_a.stride() == (1, rows) or blocks == 1)
        assert scale_b.shape == (four, 2) and scale_b.stride() == (1, four)
        return plain.block_linear(a, b, scale_a, scale_b[:blocks], None, output_dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", fake)
    a, b, sa, sb = make.codes(m, k), make.codes(256, k, seed=1), make.scales(m, blocks), make.scales(2, blocks, seed=1)
    y = torch_ops.block_linear(a, b.t(), sa, sb.t(), None, torch.bfloat16)
    assert y.shape == (m, 256) and make.error(y, make.product(a, sa, b, sb)) < 2**-8


class TestSglKernel:
    """Right answers from any strides; the stand-in reads dense memory as the library does."""

    @pytest.fixture
    def package(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSglKernel]:
        fake = FakeSglKernel()
        monkeypatch.setitem(sys.modules, "sgl_kernel", fake)
        sgl_kernel.library.cache_clear()
        yield fake
        sgl_kernel.library.cache_clear()

    @pytest.mark.parametrize("kind", ["tensor", "token"])
    @pytest.mark.parametrize("strided", [False, True])
    def test_linear(self, package, make, kind: str, strided: bool) -> None:
        """Padded rows and one scale for all: each would be read wrongly, or refused."""
        a, b = make.codes(7, 64), make.codes(32, 64, seed=1)
        given = torch.nn.functional.pad(a.view(torch.uint8), (0, 16)).view(FP8)[:, :64] if strided else a
        weight = torch.nn.functional.pad(b.view(torch.uint8), (0, 16)).view(FP8)[:, :64] if strided else b
        sa, sb = (make.scales(7, 1), make.scales(1, 32)) if kind == "token" else (make.scales(1, 1), make.scales(1, 1))
        bias = torch.arange(64, dtype=torch.bfloat16)[::2] if strided else None
        y = sgl_kernel.linear(given, weight.t(), sa, sb, bias, torch.bfloat16)
        expected = a.double() @ b.double().t() * sa * sb + (0 if bias is None else bias)
        assert make.error(y, expected) < 2**-8
        if strided:  # the twin: as it would be without the hook
            spread = sa.expand(7, 1).contiguous(), sb.expand(1, 32).contiguous()
            wrong = package.fp8_scaled_mm(given, weight.t(), *spread, torch.bfloat16)
            assert not make.error(wrong, a.double() @ b.double().t() * sa * sb) < 2**-8

    @pytest.mark.parametrize("m", [1, 4, 7, 16])
    @pytest.mark.parametrize("layout", ["row", "col", "tma"])
    def test_block(self, package, make, m: int, layout: str) -> None:
        """Scales in any strides, weights in any strides; a leading dimension align(M, 4) would be read as M."""
        a, b, sa, sb = make.codes(m, 256), make.codes(128, 256, seed=1), make.scales(m, 2), make.scales(1, 2, seed=1)
        given = sa if layout == "row" else plain.column_major(sa, 1 if layout == "col" else 4)
        padded = torch.nn.functional.pad(a.view(torch.uint8), (0, 128)).view(FP8)[:, :256]
        y = sgl_kernel.block_linear(padded, b.t(), given, sb.t(), None, torch.bfloat16)
        assert make.error(y, make.product(a, sa, b, sb)) < 2**-8
        if layout == "tma" and m == 7:
            wrong = package.fp8_blockwise_scaled_mm(a, b.t(), given, sb.t(), torch.bfloat16)
            assert not make.error(wrong, make.product(a, sa, b, sb)) < 2**-8

    @pytest.mark.parametrize("old", [False, True])
    @pytest.mark.parametrize("layout", ["row", "col", "tma"])
    def test_group_quantiser(self, package, monkeypatch, layout: str, old: bool) -> None:
        """Both names, every layout, a strided input; newer releases must not ask sglang."""
        if old:
            monkeypatch.delattr(FakeSglKernel, "sgl_per_token_group_quant_8bit")
        x = torch.randn(7, 512, dtype=torch.bfloat16)[:, 128:384]
        ours = plain.quant_group(x, 128, 1e-10, False, layout)
        q, scale = sgl_kernel.quant_group(x, 128, 1e-10, False, layout)
        assert torch.equal(q.float(), ours[0].float()) and torch.equal(scale, ours[1])
        assert scale.stride() == ours[1].stride()

    def test_three_axes_and_an_output(self, package) -> None:
        x, out = torch.randn(2, 3, 256, dtype=torch.float16), torch.empty(2, 3, 256, dtype=FP8)
        q, scale = sgl_kernel.quant_group(x, 128, 1e-10, False, "row", out)
        assert q is out and scale.shape == (2, 3, 2)
        assert torch.equal(q.float(), plain.quant_group(x, 128, 1e-10, False)[0].float())

    @pytest.mark.parametrize("m", [1, 5])
    def test_packed(self, package, m: int) -> None:
        x = torch.randn(m, 1024, dtype=torch.bfloat16)
        ours = plain.quant_group_packed(x, 128, 1e-10)
        q, scale = sgl_kernel.quant_group_packed(x, 128, 1e-10)
        assert torch.equal(q.float(), ours[0].float()) and torch.equal(scale, ours[1])
        assert scale.stride() == ours[1].stride()

    def test_no_rows(self, package) -> None:
        """No launch."""
        q, scale = sgl_kernel.quant_group(torch.empty(0, 256, dtype=torch.bfloat16), 128, 1e-10, False)
        assert q.shape == (0, 256) and scale.shape == (0, 2)

    @pytest.mark.parametrize(
        ("call", "error", "said"),
        [
            (lambda x: sgl_kernel.quant_group(x.float(), 128, 1e-10, False), DtypeError, "bfloat16 or float16"),
            (lambda x: sgl_kernel.quant_group(x, 128, 1e-4, False), OptionError, "compiled with 1e-10"),
            (lambda x: sgl_kernel.quant_group(x, 128, 1e-10, True), OptionError, "after the payload"),
            (lambda x: sgl_kernel.quant_group_packed(x[:, :384], 128, 1e-10), NoBackendError, "inside a word"),
            (lambda x: sgl_kernel.quant_group(x[None], 128, 1e-10, False, "col"), NoBackendError, "takes a matrix"),
            (
                lambda x: sgl_kernel.quant_group(
                    x[:1, :128].expand(1 << 24, 128), 128, 1e-10, False, out=x[:1, :1].to(FP8).expand(1 << 24, 128)
                ),
                NoBackendError,
                "32 bits",
            ),
        ],
    )
    def test_what_it_would_get_wrong(self, package, call, error: type[Exception], said: str) -> None:
        """A typed error before anything is launched."""
        with pytest.raises(error, match=said):
            call(torch.randn(4, 512, dtype=torch.bfloat16))

    def test_a_release_without_the_routine(self, package, monkeypatch) -> None:
        monkeypatch.delattr(FakeSglKernel, "fp8_scaled_mm")
        with pytest.raises(MissingPackageError, match="has no fp8_scaled_mm"):
            sgl_kernel.routine("fp8_scaled_mm")

    @pytest.mark.parametrize("error", [ImportError("libcudart.so.12"), OSError("no library"), RuntimeError("")])
    def test_a_package_that_does_not_load(self, monkeypatch, error: Exception) -> None:
        def fails(name: str) -> types.ModuleType:
            raise error

        sgl_kernel.library.cache_clear()
        monkeypatch.setattr("kernels.backends.sgl_kernel.importlib.import_module", fails)
        with pytest.raises(MissingPackageError, match="install it for this torch"):
            sgl_kernel.library()


def test_deep_gemm_takes_k_for_the_pitch_of_rows_that_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its product with a scale for every row of both operands gets dense ones."""
    seen: list[torch.Tensor] = []
    called = lambda left, right, *_, **__: seen.extend((left[0], right[0]))  # noqa: E731
    monkeypatch.setattr(deep_gemm, "symbol", lambda name: (called, name))
    wide = torch.zeros(64, 144, dtype=torch.float8_e4m3fn)[:, :128]
    one, out = torch.ones(64, 1), torch.zeros(64, 64)
    deep_gemm.gemm_1d1d.__wrapped__(wide, one, wide, one, out, None)
    assert not wide.is_contiguous() and [x.is_contiguous() for x in seen] == [True, True]
