"""Block-scaled products: CPU paths against float64, the safe FlashInfer wrapper, the M switch, the layer object."""

import pytest
import torch

from kernels import blockscaled as bs
from kernels import context, fast, quantize, repeated, routes
from kernels.config import Config, use_config
from kernels.errors import (
    DeviceError,
    DtypeError,
    InputError,
    KernelError,
    LayoutError,
    NoBackendError,
    OptionError,
    ShapeError,
)

FP8 = torch.float8_e4m3fn


def operands(make, m: int, n: int, k: int):
    kb, nb = -(-k // 128), -(-n // 128)
    return make.codes(m, k), make.scales(m, kb), make.codes(n, k, seed=1), make.scales(nb, kb, seed=1)


class TestFp8GemmNt:
    """``out = a @ b.T`` with 1x128 and 128x128 scales."""

    @pytest.mark.parametrize(
        ("m", "n", "k"), [(1, 128, 128), (31, 192, 384), (4, 130, 640), (3, 100, 200), (0, 128, 128)]
    )
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_float64(self, make, m, n, k, dtype) -> None:
        a, sa, b, sb = operands(make, m, n, k)
        out = torch.full((m, n), float("nan"), dtype=dtype)
        bs.fp8_gemm_nt((a, sa), (b, sb), out)
        if m:
            assert make.error(out, make.product(a, sa, b, sb)) < (1e-6 if dtype == torch.float32 else 2**-8)

    def test_c_is_added_before_the_cast(self, make) -> None:
        a, sa, b, sb = operands(make, 4, 128, 128)
        c = torch.randn(4, 128)
        out = torch.empty(4, 128)
        bs.fp8_gemm_nt((a, sa), (b, sb), out, c=c)
        assert make.error(out, make.product(a, sa, b, sb) + c.double()) < 1e-6

    def test_any_strides(self, make) -> None:
        a, sa, b, sb = operands(make, 5, 128, 256)
        wide = torch.empty(5, 200)
        bs.fp8_gemm_nt((a, sa.t().contiguous().t()), (b, sb), wide[:, 3:131])
        assert make.error(wide[:, 3:131], make.product(a, sa, b, sb)) < 1e-6


class TestSafeFlashInfer:
    """What the shipped kernel gets wrong without a word is right or refused."""

    def test_row_major_and_column_major_scales_agree(self, make) -> None:
        a, sa, b, sb = operands(make, 7, 64, 256)
        y = bs.fp8_blockscale_gemm_sm90(a, b, sa, sb)
        assert torch.equal(y, bs.fp8_blockscale_gemm_sm90(a, b, sa.t().contiguous().t(), sb))
        assert make.error(y, make.product(a, sa, b, sb)) < 2**-8

    def test_lane_major_is_made_or_left_alone(self) -> None:
        from kernels.backends._host import lane_major

        row = torch.rand(7, 3)
        ready = lane_major(row)
        assert ready.shape == (3, 8) and ready.is_contiguous() and torch.equal(ready[:, :7], row.t())
        _, tma = quantize.per_token_group_quant_fp8(
            torch.randn(7, 384), 128, column_major_scales=True, tma_aligned_scales=True
        )
        assert lane_major(tma).data_ptr() == tma.data_ptr(), "no copy when the layout is right"
        column = row.t().contiguous().t()  # stride 7, not 8: reading it as it is would run past the end
        assert lane_major(column).data_ptr() != column.data_ptr()
        short = torch.rand(24)[:23].as_strided((7, 3), (1, 8))  # right strides, but its storage ends early
        assert lane_major(torch.rand(23).as_strided((7, 3), (1, 8))).shape == (3, 8) and short.shape == (7, 3)

    def test_float16_is_refused(self, make) -> None:
        a, sa, b, sb = operands(make, 4, 64, 128)
        with pytest.raises(OptionError, match="bf16 bits"):
            bs.fp8_blockscale_gemm_sm90(a, b, sa, sb, out_dtype=torch.float16)
        with pytest.raises(OptionError, match="bf16 bits"):
            bs.fp8_blockscale_gemm_sm90(a, b, sa, sb, out=torch.empty(4, 64, dtype=torch.float16))

    def test_weight_scale_per_row_is_refused(self, make) -> None:
        x, b = torch.randn(4, 256).bfloat16(), make.codes(128, 256)
        with pytest.raises(ShapeError, match="per_block_cast_to_fp8"):
            bs.fp8_blockscale_gemm_sm90(x, b, None, torch.ones(128, 2))

    def test_bf16_weights_are_scanned_in_full(self, make) -> None:
        x = torch.randn(5, 256).bfloat16()
        w = (torch.randn(128, 256) * 0.1).bfloat16()
        w[97, 200] = 30.0  # clipped to a fraction by the shipped scan
        y = bs.fp8_blockscale_gemm_sm90(x, w)
        expected = x.double() @ w.double().t()
        assert (y.double() - expected).abs()[:, 97].max() / expected[:, 97].abs().max() < 0.07
        q, s = quantize.flashinfer_quantize_128x128(w)
        assert torch.equal(y, bs.fp8_blockscale_gemm_sm90(x, q, None, s))

    def test_pairs(self, make) -> None:
        a, sa, b, sb = operands(make, 4, 64, 128)
        w = torch.randn(64, 128).bfloat16()
        with pytest.raises(DtypeError, match="quantise the weight"):
            bs.fp8_blockscale_gemm_sm90(a, w, sa)
        with pytest.raises(InputError, match="input_scale is required"):
            bs.fp8_blockscale_gemm_sm90(a, b, None, sb)
        with pytest.raises(InputError, match="quantised inside"):
            bs.fp8_blockscale_gemm_sm90(w[:4], b, sa, sb)
        with pytest.raises(ShapeError, match="N=65"):
            bs.fp8_blockscale_gemm_sm90(a, make.codes(65, 128), sa, sb)
        with pytest.raises(ShapeError, match="K=192"):
            bs.fp8_blockscale_gemm_sm90(make.codes(4, 192), make.codes(64, 192), sa, sb)

    def test_out_is_written(self, make) -> None:
        a, sa, b, sb = operands(make, 4, 64, 128)
        out = torch.empty(4, 64, dtype=torch.bfloat16)
        assert bs.fp8_blockscale_gemm_sm90(a, b, sa, sb, out) is out
        assert make.error(out, make.product(a, sa, b, sb)) < 2**-8


class TestSwitch:
    """Below 32 rows one road, from 32 the other; batch-invariant mode keeps one."""

    @staticmethod
    def parts(make):
        return (
            torch.randn(40, 256, generator=torch.Generator().manual_seed(3)).bfloat16(),
            make.codes(128, 256),
            make.scales(1, 2),
        )

    def test_roads(self, make) -> None:
        x, w, s = self.parts(make)
        for m in (1, 31):
            y = bs.dynamic_flashinfer_deepgemm_blockscale_gemm(x[:m], w, s)
            assert torch.equal(y, bs.flashinfer_fp8_blockscale_gemm(x[:m], w, s))
        for m in (32, 40):
            y = bs.dynamic_flashinfer_deepgemm_blockscale_gemm(x[:m], w, s)
            assert torch.equal(y, bs.deepgemm_blockscale_linear(x[:m], w, s))

    def test_the_roads_differ(self, make) -> None:
        """Negative test: the two quantisers give different bits, so the test above can tell them apart."""
        x, w, s = self.parts(make)
        assert not torch.equal(bs.flashinfer_fp8_blockscale_gemm(x, w, s), bs.deepgemm_blockscale_linear(x, w, s))

    def test_batch_invariant(self, make) -> None:
        x, w, s = self.parts(make)
        with use_config(Config(batch_invariant=True)):
            whole = bs.dynamic_flashinfer_deepgemm_blockscale_gemm(x, w, s)
            for m in (1, 7, 31, 32):
                assert torch.equal(bs.dynamic_flashinfer_deepgemm_blockscale_gemm(x[:m], w, s), whole[:m])

    def test_e8m0(self, make) -> None:
        x, w, _ = self.parts(make)
        y = bs.deepgemm_blockscale_linear(x, w, torch.ones(1, 2), use_deep_gemm_e8m0=True)
        q, s = quantize.per_token_group_quant_fp8(x, 128, use_ue8m0=True)
        assert make.error(y, make.product(q, s, w, torch.ones(1, 2))) < 2**-8

    def test_group_size(self, make) -> None:
        x, w, s = self.parts(make)
        with pytest.raises(OptionError, match="group_size=64"):
            bs.deepgemm_blockscale_linear(x, w, s, 64)

    def test_one_backend_only(self, make) -> None:
        x, w, s = self.parts(make)
        with routes.only("flashinfer"), pytest.raises(NoBackendError):
            bs.dynamic_flashinfer_deepgemm_blockscale_gemm(x, w, s)


def freed(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(0)
    return x


def inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


class TestWhatIsRemembered:
    """The right call first, so that it is remembered; then one with a single thing changed."""

    @pytest.mark.parametrize(
        ("name", "change", "error"),
        [
            ("input", lambda x: x.float(), DtypeError),
            ("input", lambda x: x.half(), DtypeError),
            ("input", lambda x: x.to("meta"), DeviceError),
            ("input", lambda x: x.to_sparse(), LayoutError),
            ("input", lambda x: x[:, :128], ShapeError),
            ("input", lambda x: x[0], ShapeError),
            ("weight", lambda x: x.to(torch.float8_e5m2), DtypeError),
            ("weight", lambda x: x.to("meta"), DeviceError),
            ("weight", lambda x: x.float().to_sparse(), LayoutError),
            ("weight", lambda x: x[:64], ShapeError),
            ("weight_scale", lambda x: x.double(), DtypeError),
            ("weight_scale", lambda x: x.to("meta"), DeviceError),
            ("weight_scale", lambda x: x.to_sparse(), LayoutError),
            ("weight_scale", lambda x: x.t(), ShapeError),
        ],
    )
    @pytest.mark.parametrize("m", [4, 40])
    def test_does_not_cover_another_call(self, make, name: str, change, error: type[Exception], m: int) -> None:
        x, w, s = torch.randn(m, 256).bfloat16(), make.codes(384, 256), make.scales(3, 2)
        right = {"input": x, "weight": w, "weight_scale": s}
        for _ in range(2):
            bs.dynamic_flashinfer_deepgemm_blockscale_gemm(**right)
        with pytest.raises(error):
            bs.dynamic_flashinfer_deepgemm_blockscale_gemm(**{**right, name: change(right[name])})

    @pytest.mark.parametrize("verb", ["linear", "gemm"])
    @pytest.mark.parametrize(
        ("change", "error"),
        [
            (lambda w, s: w.t_(), ShapeError),
            (lambda w, s: s.t_(), ShapeError),
            (lambda w, s: setattr(w, "data", w.data.view(torch.float8_e5m2)), DtypeError),
            (lambda w, s: w.untyped_storage().resize_(0), InputError),
            (lambda w, s: s.untyped_storage().resize_(0), InputError),
        ],
        ids=["weight transposed", "scale transposed", "another dtype", "weight freed", "scale freed"],
    )
    def test_a_weight_that_changed_in_place_is_another(self, make, verb: str, change, error: type[Exception]) -> None:
        """Though the object is the one that was met; new values in the same memory are read (the twin)."""
        x, w, s = torch.randn(40, 256).bfloat16(), make.codes(384, 256), make.scales(3, 2)
        out = torch.zeros(40, 384, dtype=torch.bfloat16)
        q, xs = quantize.per_token_group_quant_fp8(x, 128)

        def call() -> torch.Tensor:
            if verb == "linear":
                return bs.dynamic_flashinfer_deepgemm_blockscale_gemm(x, w, s)
            bs.fp8_gemm_nt((q, xs), (w, s), out)
            return out.clone()

        first = call()
        assert len(context.current().weights) and torch.equal(call(), first)
        w.copy_(make.codes(384, 256, seed=1))
        assert not torch.equal(call(), first)
        change(w, s)
        with pytest.raises(error):
            call()

    @pytest.mark.parametrize("guarded", [True, False], ids=["known torch", "another torch"])
    @pytest.mark.parametrize(
        "change",
        [
            lambda q, xs, out: (q[:, :128], xs, out),
            lambda q, xs, out: (q[:7], xs, out),
            lambda q, xs, out: (q, xs[:7], out),
            lambda q, xs, out: (q, xs, out[:7]),
            lambda q, xs, out: (q.view(torch.uint8), xs, out),
            lambda q, xs, out: (q, xs.double(), out),
            lambda q, xs, out: (q, torch._neg_view(xs), out),
            lambda q, xs, out: (q, xs.to_sparse(), out),
            lambda q, xs, out: (q, xs, out.to("meta")),
            lambda q, xs, out: (freed(q), xs, out),
            lambda q, xs, out: (q, freed(xs), out),
            lambda q, xs, out: (q, xs, freed(out)),
            lambda q, xs, out: (q, xs, freed(torch.empty(80, 384, dtype=torch.bfloat16)[40:])),
            lambda q, xs, out: (q, xs, inference(out)),
            lambda q, xs, out: (q, None, out),
            lambda q, xs, out: ((q, xs), xs, out),
        ],
    )
    def test_what_a_product_met_does_not_cover_another(self, make, monkeypatch, change, guarded: bool) -> None:
        """Each property of an operand that torch's guard stands for; of another release by public names."""
        if not guarded:
            monkeypatch.setattr(fast, "GUARDS", None)
        context.current().weights.clear()  # a weight of another test may have lain here
        w, s, out = make.codes(384, 256), make.scales(3, 2), torch.zeros(40, 384, dtype=torch.bfloat16)
        q, xs = quantize.per_token_group_quant_fp8(torch.randn(40, 256).bfloat16(), 128, column_major_scales=True)
        bs.fp8_gemm_nt((q, xs), (w, s), out)
        met = repeated.find("fp8_gemm_nt", w, s)
        assert met is not None and met.rows(w, s, q, xs, out) == 40
        q, xs, out = change(q, xs, out)
        with pytest.raises(KernelError):
            bs.fp8_gemm_nt((q, xs), (w, s), out)

    def test_what_a_library_could_not_take_is_not_covered(self, make) -> None:
        """Rows that begin between two words of 16 bytes, or lie at a distance: computed, in the checked way."""
        w, s = make.codes(384, 256), make.scales(3, 2)
        q, xs = quantize.per_token_group_quant_fp8(torch.randn(40, 256).bfloat16(), 128)
        right, out = torch.zeros(2, 40, 384, dtype=torch.bfloat16)
        bs.fp8_gemm_nt((q, xs), (w, s), right)
        met = repeated.find("fp8_gemm_nt", w, s)
        between = torch.empty(40 * 256 + 1, dtype=torch.uint8)[1:].view(q.dtype).view(40, 256).copy_(q)
        wide = torch.empty(40, 272, dtype=torch.uint8).view(q.dtype)[:, :256].copy_(q)
        for other in (between, wide):
            assert met.rows(w, s, other, xs, out) == 0
            bs.fp8_gemm_nt((other, xs), (w, s), out.zero_())
            assert torch.equal(out, right)
            bs.fp8_gemm_nt((q, xs), (w, s), out.zero_())
        assert met.rows(w, s, q, xs, out) == 40 and met.rows(w, s, q[:7], xs[:7], out[:7]) == 7

    def test_a_kept_plan_gives_the_bits_and_the_errors_of_the_verb(self, make) -> None:
        w, s = make.codes(384, 256), make.scales(3, 2)
        linear, gemm = bs.prepare_blockscale_linear(w, s), bs.prepare_fp8_gemm_nt((w, s))
        for m in (0, 1, 31, 32, 40):
            x, out = torch.randn(m, 256).bfloat16(), torch.zeros(m, 384, dtype=torch.bfloat16)
            right = bs.dynamic_flashinfer_deepgemm_blockscale_gemm(x, w, s)
            assert torch.equal(linear(x), right)
            q, xs = quantize.per_token_group_quant_fp8(x, 128)
            gemm((q, xs), out)
            assert torch.equal(out, bs.deepgemm_blockscale_linear(x, w, s))
            for wrong, error in ((x.float(), DtypeError), (x[:, :128], ShapeError), (x.to("meta"), DeviceError)):
                with pytest.raises(error):
                    linear(wrong)
            with pytest.raises(ShapeError):
                gemm((q, xs), out[:, :64])
            with pytest.raises(DtypeError):
                gemm((q.view(torch.uint8), xs), out)
        with pytest.raises(ShapeError, match="b_scale"):
            bs.prepare_fp8_gemm_nt((w, s[:2]))
        with pytest.raises(ShapeError, match="weight_scale"):
            bs.prepare_blockscale_linear(w, s[:2])

    def test_the_option_is_part_of_it(self, make) -> None:
        x, w, s = torch.randn(40, 256).bfloat16(), make.codes(384, 256), make.scales(3, 2)
        for e8m0 in (False, True, False):
            made = bs.dynamic_flashinfer_deepgemm_blockscale_gemm(x, w, s, 128, e8m0)
            assert torch.equal(made, bs.deepgemm_blockscale_linear(x, w, s, 128, e8m0))
        plain, powers = (bs.deepgemm_blockscale_linear(x, w, s, 128, e8m0) for e8m0 in (False, True))
        assert not torch.equal(plain, powers)

    def test_no_rows_need_no_backend(self, make) -> None:
        """Not even where the one asked for takes few rows only."""
        with routes.only("eager"):
            made = bs.dynamic_flashinfer_deepgemm_blockscale_gemm(
                torch.zeros(0, 256).bfloat16(), make.codes(384, 256), make.scales(3, 2)
            )
        assert made.shape == (0, 384)


class TestLayerObject:
    """process_weights_after_loading, apply_block_scaled_mm, apply_input_quant."""

    @staticmethod
    def layer(make, name: str = "weight_scale_inv") -> torch.nn.Module:
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(make.codes(192, 256), requires_grad=False)
        setattr(layer, name, torch.nn.Parameter(make.scales(2, 2), requires_grad=False))
        return layer

    @pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
    def test_float32_scales_are_left_alone(self, make, name) -> None:
        layer, kernel = self.layer(make, name), bs.FlashInferFp8DeepGEMMDynamicBlockScaledKernel(False)
        before = getattr(layer, name).clone(), layer.weight.clone()
        kernel.process_weights_after_loading(layer)
        assert torch.equal(getattr(layer, name), before[0])
        assert torch.equal(layer.weight.view(torch.uint8), before[1].view(torch.uint8))
        assert kernel.apply_input_quant is False

    def test_e8m0_requantises_the_payload(self, make) -> None:
        layer, kernel = self.layer(make), bs.FlashInferFp8DeepGEMMDynamicBlockScaledKernel(True)
        old = (
            layer.weight.float() * layer.weight_scale_inv.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)
        ).clone()
        kernel.process_weights_after_loading(layer)
        scale = layer.weight_scale_inv
        assert torch.equal(quantize.ceil_to_ue8m0(scale.data), scale.data)
        new = layer.weight.float() * scale.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)
        assert ((new - old).abs() <= old.abs() * 2**-4 + 1e-3).all()
        x = torch.randn(3, 256).bfloat16()
        assert (
            make.error(kernel.apply_block_scaled_mm(x, layer.weight, None, scale), x.double() @ new.double().t()) < 0.1
        )

    def test_rounding_the_scale_alone_is_seen(self, make) -> None:
        """Negative test: powers of two without requantising change the values by up to a factor of two."""
        layer = self.layer(make)
        rounded = quantize.ceil_to_ue8m0(layer.weight_scale_inv.data)
        assert (rounded / layer.weight_scale_inv.data).max() > 1.1

    def test_a_quantised_input_is_refused(self, make) -> None:
        with pytest.raises(InputError, match="As must be None"):
            bs.FlashInferFp8DeepGEMMDynamicBlockScaledKernel(False).apply_block_scaled_mm(
                torch.randn(3, 256).bfloat16(), make.codes(128, 256), torch.ones(3, 2), torch.ones(1, 2)
            )


class TestBlackwellScales:
    """sm100 reads exponents only: float32 scales are packed when they are powers of two, else refused."""

    def test_packed(self) -> None:
        from kernels.platform import Machine, use_machine

        a_scale, b_scale = torch.full((5, 2), 0.5), torch.full((2, 2), 4.0)
        with use_machine(Machine.described("sm100")):
            left, right = bs.packed_scales(a_scale, b_scale, (5, 192, 256), False)
            assert left.shape == (5, 1) and right.shape == (192, 1) and left.dtype == torch.int32
            assert (left[0, 0].item(), right[0, 0].item()) == (126 | 126 << 8, 129 | 129 << 8)
            with pytest.raises(ValueError, match="power of two"):
                bs.packed_scales(a_scale * 0.3, b_scale, (5, 192, 256), False)
            with pytest.raises(OptionError, match="UE8M0 scales only"):
                bs.packed_scales(a_scale, b_scale, (5, 192, 256), True)


class TestOutput:
    """An output whose elements share memory is refused before anything is launched; any other view is written."""

    @staticmethod
    def _call(out: torch.Tensor) -> None:
        a, b = torch.zeros(4, 128).to(FP8), torch.zeros(256, 128).to(FP8)
        bs.fp8_gemm_nt((a, torch.ones(4, 1)), (b, torch.ones(2, 1)), out)

    @pytest.mark.parametrize("strides", [(0, 1), (128, 1), (1, 2), (1, 1)])
    def test_shared_memory(self, strides: tuple[int, int]) -> None:
        with pytest.raises(LayoutError, match="share memory"):
            self._call(torch.empty(1024, dtype=torch.bfloat16).as_strided((4, 256), strides))

    @pytest.mark.parametrize("strides", [(256, 1), (1, 4), (1024, 2), (300, 1)])
    def test_views(self, strides: tuple[int, int]) -> None:
        memory = torch.ones(4096, dtype=torch.bfloat16)
        view = memory.as_strided((4, 256), strides)
        self._call(view)
        assert not view.any() and int(memory.sum()) == 4096 - 1024
