"""Scaled products and the engine's linear layer against float64."""

import pytest
import torch

from kernels import linear, routes
from kernels.backends import torch_ops
from kernels.config import Config
from kernels.errors import DtypeError, NoBackendError, OptionError, ShapeError
from kernels.plan import Problem, plan
from kernels.platform import Machine, use_machine
from kernels.quantize import scaled_fp8_quant

M, N, K = 5, 48, 160
EPS = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def truth(a, b, sa, sb, bias=None) -> torch.Tensor:
    y = (a.double() @ b.double().t()) * sa.double().reshape(-1, 1) * sb.double().reshape(1, -1)
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("backend", ["torch", "eager"])
@pytest.mark.parametrize("kind", ["tensor-tensor", "token-channel", "tensor-channel", "token-tensor"])
@pytest.mark.parametrize("bias", [False, True])
def test_cutlass_scaled_mm(make, dtype, backend, kind, bias) -> None:
    a, b = make.codes(M, K), make.codes(N, K, seed=1)
    sa = make.scales(M, 1) if kind.startswith("token") else make.scales(1)
    sb = make.scales(1, N, seed=1) if kind.endswith("channel") else make.scales(1, seed=1)
    shift = torch.randn(N).to(torch.bfloat16) if bias else None
    with routes.only(backend):
        y = linear.cutlass_scaled_mm(a, b.t(), sa, sb, dtype, shift)
    assert y.dtype == dtype and make.error(y, truth(a, b, sa, sb, shift)) < EPS[dtype]


class TestScaleKinds:
    """A shape can mean two things; both scales decide together."""

    @pytest.mark.parametrize(
        ("a", "b", "m", "n", "k", "kinds"),
        [
            ((1,), (1,), 4, 8, 256, ("tensor", "tensor")),
            ((4, 1), (1, 8), 4, 8, 256, ("token", "channel")),
            ((4, 1), (8,), 4, 8, 256, ("token", "channel")),
            ((4, 8), (8, 1), 4, 8, 1024, ("block", "block")),  # [8, 1] alone would read as per channel
            ((4, 1), (1, 3), 4, 300, 128, ("block", "block")),
            ((1, 2), (2, 1), 1, 8, 256, ("block", "block")),
            ((1, 1), (1, 8), 1, 8, 256, ("tensor", "channel")),
        ],
    )
    def test_decision(self, a, b, m, n, k, kinds) -> None:
        assert linear.scale_kinds(torch.ones(a), torch.ones(b), m, n, k) == kinds

    @pytest.mark.parametrize(
        ("a", "b"),
        [((4, 2), (1, 2)), ((4, 2), (1,)), ((3, 1), (1,)), ((4, 1), (2, 300)), ((2, 4), (2, 3)), ((4,), (1,))],
    )
    def test_refused(self, a, b) -> None:
        with pytest.raises(ShapeError):
            linear.scale_kinds(torch.ones(a), torch.ones(b), 4, 300, 256)

    def test_block_scales_in_any_strides(self, make) -> None:
        a, b = make.codes(6, 256), make.codes(192, 256, seed=1)
        sa, sb = make.scales(6, 2), make.scales(2, 2, seed=1)
        expected = make.product(a, sa, b, sb)
        for scale in (sa, sa.t().contiguous().t()):
            y = linear.cutlass_scaled_mm(a, b.t(), scale, sb.t(), torch.float32)
            assert make.error(y, expected) < 1e-6


@pytest.mark.parametrize("dtype", EPS)
class TestTorchRoutines:
    """As published; padded rows are dropped, the shape is given back."""

    def test_per_tensor(self, make, dtype) -> None:
        a, b, sa, sb = make.codes(M, K), make.codes(N, K, seed=1), make.scales(1), make.scales(1, seed=1)
        y = linear.torch_per_tensor_w8a8_scaled_mm(
            qinput=a, weight=b.t(), out_dtype=dtype, scale_a=sa, scale_b=sb, output_shape=[1, 3, N]
        )
        assert y.shape == (1, 3, N) and make.error(y[0], truth(a, b, sa, sb)[:3]) < EPS[dtype] * 4

    @pytest.mark.parametrize("shape", [(N, 1), (1, N), (N,)])
    def test_per_token_and_channelwise(self, make, rowwise_refused, dtype, shape) -> None:
        a, b, sa, sb = make.codes(M, K), make.codes(N, K, seed=1), make.scales(M, 1), make.scales(N, seed=1)
        shift = torch.randn(N).to(torch.bfloat16)
        given = dict(qinput=a, weight=b.t(), out_dtype=dtype, scale_a=sa, scale_b=sb.view(shape), bias=shift)
        y = linear.torch_channelwise_w8a8_scaled_mm(**given)
        assert make.error(y, truth(a, b, sa, sb, shift)) < EPS[dtype]
        if rowwise_refused:
            with pytest.raises(NoBackendError, match="row-wise scales on a CPU"):
                linear.torch_per_token_w8a8_scaled_mm(**given)
        else:
            assert make.error(linear.torch_per_token_w8a8_scaled_mm(**given), truth(a, b, sa, sb, shift)) < EPS[dtype]


class TestRowwiseOnTheCpu:
    """torch before 2.12 multiplies on a CPU with per-tensor scales only: a reason, and the unfused product instead."""

    OLD, NEW = (Machine.described("cpu", torch_version=v) for v in ("2.11.0", "2.12.0"))

    def test_the_version_is_right(self, make, rowwise_refused) -> None:
        a, b, sa, sb = make.codes(M, K), make.codes(N, K, seed=1), make.scales(M, 1), make.scales(1, N)
        try:
            torch._scaled_mm(a, b.t(), scale_a=sa, scale_b=sb, out_dtype=torch.float32)
        except RuntimeError:
            assert rowwise_refused
        else:
            assert rowwise_refused is None

    @pytest.mark.parametrize(("machine", "mode"), [(OLD, "unfused"), (NEW, "rowwise")])
    def test_plan(self, machine: Machine, mode: str) -> None:
        for m in (machine, Machine.described("sm90", torch_version=".".join(map(str, machine.torch)))):  # CPU tensors
            made = plan(Problem("linear", device="cpu", a_scale="token", b_scale="channel"), m, Config())
            assert made.backend == "torch" and made.kernel == f"torch._scaled_mm ({mode})"
            assert bool(made.steps) == (mode == "unfused")

    @pytest.mark.parametrize("bias", [False, True])
    def test_old_torch_multiplies_unfused(self, make, monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
        real = torch._scaled_mm

        def per_tensor_only(*operands, scale_a, scale_b, **rest):
            assert scale_a.numel() == scale_b.numel() == 1
            return real(*operands, scale_a=scale_a, scale_b=scale_b, **rest)

        monkeypatch.setattr(torch, "_scaled_mm", per_tensor_only)
        a, b, sa, sb = make.codes(M, K), make.codes(N, K, seed=1), make.scales(M, 1), make.scales(1, N, seed=1)
        shift = torch.randn(N).to(torch.bfloat16) if bias else None
        with use_machine(self.OLD):
            y = linear.cutlass_scaled_mm(a, b.t(), sa, sb, torch.float32, shift)
            assert make.error(y, truth(a, b, sa, sb, shift)) < 1e-6
        with use_machine(self.NEW), pytest.raises(AssertionError):
            linear.cutlass_scaled_mm(a, b.t(), sa, sb, torch.float32, shift)

    def test_the_rowwise_routine_says_what_to_use(self, make) -> None:
        a, b, sa, sb = make.codes(M, K), make.codes(N, K, seed=1), make.scales(M, 1), make.scales(N, 1)
        with use_machine(self.OLD), pytest.raises(NoBackendError, match="torch 2.12; use torch_channelwise"):
            linear.torch_per_token_w8a8_scaled_mm(
                qinput=a, weight=b.t(), out_dtype=torch.float32, scale_a=sa, scale_b=sb
            )


class TestRowwiseOnAGpu:
    """Only cuBLASLt writes more than bf16, on Hopper from CUDA 12.9 on; elsewhere torch raises after the decision."""

    MACHINES = (
        # machine, whether its row-wise product writes f16 and f32
        (Machine.described("sm89"), False),
        (Machine.described("sm90"), True),
        (Machine.described("sm90", cuda="12.8"), False),
        (Machine.described("sm100"), False),
        (Machine.described("gfx942"), False),
    )

    @pytest.mark.parametrize("out_dtype", list(EPS))
    @pytest.mark.parametrize(("machine", "any_dtype"), MACHINES, ids=lambda m: getattr(m, "arch", None))
    def test_plan_and_call_agree(self, monkeypatch: pytest.MonkeyPatch, machine, any_dtype: bool, out_dtype) -> None:
        """Row-wise where it is written, else a product at unit scale; the bare routine is refused with the way out."""
        seen = []

        def product(a, b, *, out_dtype, scale_a, scale_b, bias):
            seen.append((scale_a.numel(), out_dtype))
            return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)

        monkeypatch.setattr(torch, "_scaled_mm", product)
        a, b = (torch.empty(rows, 32, dtype=torch.float8_e4m3fn, device="meta") for rows in (4, 16))
        scales = torch.empty(4, 1, device="meta"), torch.empty(1, 16, device="meta")
        named = str(out_dtype).removeprefix("torch.")
        given = {"n": 16, "k": 32, "a_scale": "token", "b_scale": "channel", "out_dtype": named}
        fused = any_dtype or out_dtype is torch.bfloat16
        with use_machine(machine):
            y = torch_ops.linear(a, b.t(), *scales, None, out_dtype)
            made = plan(Problem("linear", **given), machine, Config(backend="torch"))
            bare = torch_ops.BACKEND.why_not(Problem("torch_linear", kernel="rowwise", **given), machine, Config())
        assert y.dtype is out_dtype and seen == [(4, out_dtype) if fused else (1, torch.float32)]
        assert made.kernel == f"torch._scaled_mm ({'rowwise' if fused else 'unfused'})"
        assert bare is None if fused else "use torch_channelwise_w8a8_scaled_mm" in bare


class TestDispatch:
    """The decision table, every branch."""

    @pytest.mark.parametrize(
        ("arch", "cutlass", "weights", "activations", "per_token", "routine"),
        [
            ("sm90", True, True, True, False, linear.cutlass_w8a8_scaled_mm),
            ("sm90", True, False, False, True, linear.cutlass_w8a8_scaled_mm),
            ("sm89", False, True, True, False, linear.torch_per_tensor_w8a8_scaled_mm),
            ("sm89", False, True, True, True, linear.torch_per_tensor_w8a8_scaled_mm),
            ("sm89", False, False, False, True, linear.torch_channelwise_w8a8_scaled_mm),
            ("sm89", False, False, True, False, linear.torch_channelwise_w8a8_scaled_mm),
            ("sm89", False, True, False, True, linear.torch_channelwise_w8a8_scaled_mm),
            ("gfx942", False, True, True, False, linear.rocm_per_tensor_w8a8_scaled_mm),
            ("gfx942", False, False, False, True, linear.torch_per_token_w8a8_scaled_mm),
            ("gfx942", False, False, False, False, linear.torch_channelwise_w8a8_scaled_mm),
            ("gfx942", False, False, True, True, linear.torch_channelwise_w8a8_scaled_mm),
            ("gfx90a", False, False, False, True, linear.torch_channelwise_w8a8_scaled_mm),
            ("cpu", False, True, True, False, linear.torch_per_tensor_w8a8_scaled_mm),
        ],
    )
    def test_branches(self, arch, cutlass, weights, activations, per_token, routine) -> None:
        assert (
            linear.dispatch_w8a8_scaled_mm(cutlass, weights, activations, per_token, Machine.described(arch)) is routine
        )


class TestLinearOp:
    """2-D view and back; quantisation inside; padding dropped."""

    @pytest.mark.parametrize("per_token", [False, True])
    @pytest.mark.parametrize("channel", [False, True])
    @pytest.mark.parametrize("shape", [(3,), (2, 4), (1, 20)])
    def test_apply(self, make, per_token, channel, shape) -> None:
        x = torch.randn(*shape, 64)
        w = torch.randn(32, 64)
        wq, ws = scaled_fp8_quant(w, use_per_token_if_dynamic=channel)
        layer = linear.Fp8LinearOp(use_per_token_if_dynamic=per_token)
        assert layer.output_padding == 17
        bias = torch.randn(32)
        y = layer.apply(x, wq.t(), ws, bias=bias)
        q, s = scaled_fp8_quant(x.reshape(-1, 64), use_per_token_if_dynamic=per_token)
        expected = truth(q, wq, s, ws, bias).view(*shape, 32)
        assert y.shape == expected.shape and y.dtype == x.dtype and make.error(y, expected) < 1e-6

    def test_static_input_scale_and_bound(self) -> None:
        x, w = torch.randn(4, 64), torch.randn(32, 64)
        wq, ws = scaled_fp8_quant(w)
        layer = linear.Fp8LinearOp()
        static = layer.apply(x, wq.t(), ws, input_scale=torch.tensor([0.02]), input_scale_ub=torch.tensor([1.0]))
        q, s = scaled_fp8_quant(x, torch.tensor([0.02]))
        assert torch.allclose(static, truth(q, wq, s, ws).float(), rtol=1e-5, atol=1e-5)

    def test_quantised_input_on_the_torch_path_only(self, make) -> None:
        x, w = make.codes(4, 64), make.codes(32, 64, seed=1)
        one = torch.ones(1)
        y = linear.Fp8LinearOp().apply(x, w.t(), one, torch.float32, input_scale=one)
        assert make.error(y, truth(x, w, one, one)) < 1e-6
        with pytest.raises(DtypeError, match="torch path only"):
            linear.Fp8LinearOp(cutlass_supported=True).apply(x, w.t(), one, torch.float32, input_scale=one)
        with pytest.raises(OptionError, match="input_scale and out_dtype"):
            linear.Fp8LinearOp().apply(x, w.t(), one)

    @pytest.mark.parametrize(("shape", "weight"), [((4, 0), (16, 0)), ((0,), (16, 0)), ((4, 0), (16, 16))])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, linear.FP8])
    def test_no_columns(self, shape: tuple[int, ...], weight: tuple[int, int], dtype: torch.dtype) -> None:
        """K = 0 is refused with a name; no row (M = 0) is a product without a row."""
        layer, one, codes = linear.Fp8LinearOp(), torch.ones(1), torch.zeros(weight).to(linear.FP8).t()
        with pytest.raises(ShapeError, match="has an empty dimension"):
            layer.apply(torch.zeros(shape).to(dtype), codes, one, torch.bfloat16, input_scale=one)
        some = torch.zeros(16, 16).to(linear.FP8).t()
        assert layer.apply(torch.zeros(0, 16).to(dtype), some, one, torch.bfloat16, input_scale=one).shape == (0, 16)


def test_identity_is_made_once() -> None:
    one = linear.maybe_create_device_identity("cpu")
    assert one is linear.maybe_create_device_identity(torch.device("cpu")) and one.tolist() == [1.0]


def test_old_torch_returns_a_tuple(make, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: (real(*a, **k), torch.zeros(1)))
    a, b, one = make.codes(2, 16), make.codes(16, 16, seed=1), torch.ones(1)
    y = linear.torch_per_tensor_w8a8_scaled_mm(
        qinput=a, weight=b.t(), out_dtype=torch.float32, scale_a=one, scale_b=one
    )
    assert make.error(y, truth(a, b, one, one)) < 1e-6
