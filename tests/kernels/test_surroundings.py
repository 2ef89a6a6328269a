"""What the caller's torch is set to changes no bit of the layer, and the layer keeps nothing of a call."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import kernels
from kernels import context, linear, routes
from kernels.backends import eager
from kernels.config import Config, use_config
from kernels.errors import OptionError
from kernels.platform import Machine, use_machine

FP8 = torch.float8_e4m3fn
M, N, K = 6, 192, 256


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def verbs(make: SimpleNamespace) -> dict[str, Callable[[], Tensor | tuple[Tensor, ...]]]:
    """One call of each, on operands that were made before."""
    x = torch.randn(40, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    a, sa, b, sb = make.codes(M, K), make.scales(M, 2), make.codes(N, K, seed=1), make.scales(2, 2, seed=1)
    three, threes, one = make.codes(2, N, K, seed=2), make.scales(2, 2, 2, seed=2), torch.ones(1)
    indices, counts = torch.tensor([0, 0, 1, 1, -1, -1], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    low, high = torch.zeros(M, dtype=torch.int32), torch.full((M,), 4, dtype=torch.int32)
    column, row, channels = make.scales(M, 1), make.scales(1, N), make.scales(2, N)
    ends = torch.tensor([2, 6], dtype=torch.int32)

    def into(verb: Callable[..., None], *operands: object, shape: tuple[int, ...] = (M, N)) -> Tensor:
        out = torch.zeros(shape, dtype=torch.float32, device="cpu")
        verb(*operands[:2], out, *operands[2:])
        return out

    torch_linear = {"qinput": a, "weight": b.t(), "out_dtype": torch.float32}
    return {
        "scaled_fp8_quant": lambda: kernels.scaled_fp8_quant(x, num_token_padding=50),
        "scaled_fp8_quant static": lambda: kernels.scaled_fp8_quant(x, one),
        "scaled_fp8_quant token": lambda: kernels.scaled_fp8_quant(
            x, use_per_token_if_dynamic=True, num_token_padding=50
        ),
        "per_token_group_quant_fp8": lambda: kernels.per_token_group_quant_fp8(
            x, 128, column_major_scales=True, tma_aligned_scales=True
        ),
        "per_token_group_quant_fp8_packed": lambda: kernels.per_token_group_quant_fp8_packed(x),
        "per_block_cast_to_fp8": lambda: kernels.per_block_cast_to_fp8(x),
        "flashinfer_quantize_1x128": lambda: kernels.flashinfer_quantize_1x128(x),
        "cutlass_scaled_mm": lambda: kernels.cutlass_scaled_mm(a, b.t(), column, row, torch.float32),
        "cutlass_scaled_mm block": lambda: kernels.cutlass_scaled_mm(a, b.t(), sa, sb.t(), torch.float32),
        "torch tensorwise": lambda: kernels.torch_per_tensor_w8a8_scaled_mm(**torch_linear, scale_a=one, scale_b=one),
        "torch unfused": lambda: kernels.torch_channelwise_w8a8_scaled_mm(**torch_linear, scale_a=column, scale_b=row),
        "fp8_gemm_nt": lambda: into(kernels.fp8_gemm_nt, (a, sa), (b, sb)),
        "fp8_blockscale_gemm_sm90": lambda: kernels.fp8_blockscale_gemm_sm90(x, b, None, sb),
        "dynamic, many rows": lambda: kernels.dynamic_flashinfer_deepgemm_blockscale_gemm(x, b, sb),
        "dynamic, few rows": lambda: kernels.dynamic_flashinfer_deepgemm_blockscale_gemm(x[:5], b, sb),
        "contiguous": lambda: into(kernels.m_grouped_fp8_gemm_nt_contiguous, (a, sa), (three, threes), indices),
        "masked": lambda: into(
            kernels.fp8_m_grouped_gemm_nt_masked,
            (a.view(2, 3, K), sa.view(2, 3, 2)),
            (three, threes),
            counts,
            2,
            shape=(2, 3, N),
        ),
        "scaled_grouped_mm": lambda: kernels.scaled_grouped_mm(a, three, column, channels, ends, torch.float32),
        "fp8_mqa_logits": lambda: kernels.fp8_mqa_logits(
            a.view(M, 8, 32), (b[:5, :32].contiguous(), sb.flatten()[:1].expand(5)), column.expand(M, 8), low, high
        ),
    }


def bits(found: Tensor | tuple[Tensor, ...]) -> list[tuple[object, ...]]:
    made = (found,) if isinstance(found, Tensor) else found
    return [(t.dtype, t.device, tuple(t.shape), t.stride(), t.flatten().view(torch.uint8).tolist()) for t in made]


@pytest.mark.turns(4)
@pytest.mark.parametrize("where", list(SURROUNDINGS))
def test_every_bit_stays(make, where: str) -> None:
    """Defaults, modes and autocast around a call."""
    linear._identity.clear()
    for name, verb in verbs(make).items():
        expected = bits(verb())
        with SURROUNDINGS[where]():
            found = verb()
        assert bits(found) == expected, name


@pytest.mark.parametrize("name", ["linear", "block_linear", "grouped_scaled"])
def test_autocast_would_change_them(make, name: str) -> None:
    """The twin: the same functions without their wrapper round products to bfloat16."""
    a, b = make.codes(4, K), make.codes(N, K, seed=1)
    arguments = {
        "linear": (a, b.t(), torch.ones(1, 1), torch.ones(1, 1), None, torch.float32),
        "block_linear": (a, b.t(), make.scales(4, 2), make.scales(2, 2), None, torch.float32),
        "grouped_scaled": (a, b[None], torch.ones(4, 1), torch.ones(1, N), torch.tensor([4]), torch.float32),
    }[name]
    wrapped = getattr(eager, name)
    expected = wrapped(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(wrapped(*arguments), expected)
        assert not torch.equal(wrapped.__wrapped__(*arguments), expected)


@pytest.mark.turns(4)
class TestNothingIsKept:
    """Neither history, nor operands, nor a decision for every number of rows."""

    def test_a_parameter_leaves_no_history_in_an_output(self, make) -> None:
        """``nn.Parameter`` wants gradients by default; a buffer that is written again would hold every call. Where
        gradients are on, the verb refuses such a weight."""
        weight, out = torch.nn.Parameter(make.codes(N, K)), torch.zeros(2, 3, N)
        stack = weight[None].expand(2, N, K)
        for _ in range(3):
            with torch.no_grad():
                kernels.fp8_m_grouped_gemm_nt_masked(
                    (make.codes(6, K).view(2, 3, K), make.scales(2, 3, 2)),
                    (stack, make.scales(2, 2, 2)),
                    out,
                    torch.tensor([3, 2], dtype=torch.int32),
                    3,
                )
        assert weight.requires_grad and not out.requires_grad
        bare = torch.zeros(2, 3, N)
        eager.grouped_masked.__wrapped__(  # the twin
            make.codes(6, K).view(2, 3, K),
            make.scales(2, 3, 2),
            stack,
            make.scales(2, 2, 2),
            bare,
            torch.tensor([3, 2], dtype=torch.int32),
            3,
            True,
        )
        assert bare.requires_grad

    def test_every_output_is_without_gradients(self, make) -> None:
        """Where gradients are off; where they are on, such an operand is refused (``test_edges.py``)."""
        x = torch.randn(M, K).bfloat16().requires_grad_()
        weight, scale = torch.nn.Parameter(make.codes(N, K)), torch.nn.Parameter(torch.ones(1))
        with torch.no_grad():
            made = self.outputs(x, weight, scale, make.scales(2, 2))
        assert not any(t.requires_grad for t in made)

    @staticmethod
    def outputs(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, blocks: torch.Tensor) -> list[torch.Tensor]:
        return [
            *kernels.scaled_fp8_quant(x),
            *kernels.scaled_fp8_quant(x, use_per_token_if_dynamic=True),
            *kernels.per_token_group_quant_fp8(x, 128),
            kernels.Fp8LinearOp().apply(x, weight.t(), scale),
            kernels.dynamic_flashinfer_deepgemm_blockscale_gemm(x, weight, blocks),
        ]

    def test_routes_do_not_grow_with_rows(self, make) -> None:
        def every(m: int) -> None:
            x, b, sb, one = torch.randn(m, K).bfloat16(), make.codes(N, K), make.scales(2, 2), torch.ones(1)
            q, s = kernels.per_token_group_quant_fp8(x, 128)
            kernels.dynamic_flashinfer_deepgemm_blockscale_gemm(x, b, sb)
            kernels.deepgemm_blockscale_linear(x, b, sb)
            kernels.per_token_group_quant_fp8_packed(x)
            kernels.fp8_gemm_nt((q, s), (b, sb), torch.empty(m, N, dtype=torch.bfloat16))
            kernels.cutlass_scaled_mm(q, b.t(), one, one, torch.bfloat16)
            kernels.Fp8LinearOp().apply(x, b.t(), one)

        for m in (1, 31, 32):
            every(m)
        before = len(context.current().decisions)
        for m in (0, 2, 3, 17, 33, 64, 65):
            if m:
                every(m)
        assert len(context.current().decisions) == before
        kernels.cutlass_scaled_mm(make.codes(2, K), make.codes(64, K).t(), *[torch.ones(1)] * 2, torch.bfloat16)
        assert len(context.current().decisions) == before + 1, "another N is another decision"

    def test_no_operand_outlives_its_call(self, make) -> None:
        x = torch.randn(M, K).bfloat16()
        kept = weakref.ref(x)
        kernels.dynamic_flashinfer_deepgemm_blockscale_gemm(x, make.codes(N, K), make.scales(2, 2))
        kernels.Fp8LinearOp().apply(x, make.codes(N, K).t(), torch.ones(1))
        del x
        assert kept() is None

    def test_a_decision_belongs_to_its_machine_and_switches(self, make) -> None:
        """A road remembered inside a block is gone outside, and the other way round."""
        x, b, sb = torch.randn(5, K).bfloat16(), make.codes(N, K), make.scales(2, 2)
        few = kernels.dynamic_flashinfer_deepgemm_blockscale_gemm(x, b, sb)
        with use_config(Config(batch_invariant=True)):
            assert torch.equal(
                kernels.dynamic_flashinfer_deepgemm_blockscale_gemm(x, b, sb),
                kernels.deepgemm_blockscale_linear(x, b, sb),
            )
        assert torch.equal(kernels.dynamic_flashinfer_deepgemm_blockscale_gemm(x, b, sb), few)
        device = torch.device("cuda")
        with use_machine(Machine.described("sm90")):
            assert routes.route("linear", device, ("n", N), ("k", K)).name == "cutlass"
            with routes.only("torch"):
                assert routes.route("linear", device, ("n", N), ("k", K)).name == "torch"
            assert routes.route("linear", device, ("n", N), ("k", K)).name == "cutlass"
            with use_machine(Machine.described("sm90", packages={})):
                assert routes.route("linear", device, ("n", N), ("k", K)).name == "torch"


class TestTheUnitScale:
    """Kept for a device only when it can serve every later call."""

    @pytest.fixture(autouse=True)
    def forgotten(self) -> Iterator[None]:
        linear._identity.clear()
        yield
        linear._identity.clear()

    def test_one_of_a_fake_mode_is_not_kept(self) -> None:
        with FakeTensorMode():
            assert type(linear.maybe_create_device_identity("cpu")) is not Tensor
        assert type(linear.maybe_create_device_identity("cpu")) is Tensor

    def test_one_of_a_capture_is_not_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It has its value when the graph is replayed only, in memory that is the graph's."""
        monkeypatch.setattr("kernels.checks.capturing", lambda device: True)
        inside = linear.maybe_create_device_identity("cpu")
        monkeypatch.undo()
        assert linear.maybe_create_device_identity("cpu") is not inside

    def test_one_made_in_inference_mode_serves_outside(self) -> None:
        with torch.inference_mode():
            one = linear.maybe_create_device_identity("cpu")
        assert not one.is_inference() and linear.maybe_create_device_identity("cpu") is one


class TestNoRows:
    """No row is no launch and no error, on every road of the linear layer."""

    @pytest.mark.parametrize("arch", ["sm90", "sm100", "cpu"])
    @pytest.mark.parametrize("e8m0", [False, True])
    def test_linear(self, make, arch: str, e8m0: bool) -> None:
        x, b, sb = torch.empty(0, K, dtype=torch.bfloat16), make.codes(N, K), make.scales(2, 2)
        with use_machine(Machine.described(arch)):
            made = kernels.deepgemm_blockscale_linear(x, b, sb, 128, e8m0)
            assert made.shape == (0, N) and made.dtype is torch.bfloat16
            assert kernels.dynamic_flashinfer_deepgemm_blockscale_gemm(x, b, sb, 128, e8m0).shape == (0, N)

    def test_packed_scales(self) -> None:
        q, scale = kernels.per_token_group_quant_fp8_packed(torch.empty(0, K, dtype=torch.bfloat16))
        assert q.shape == (0, K) and scale.shape == (0, 1) and scale.dtype is torch.int32


@pytest.mark.parametrize("eps", [0.0, -1.0, 1e39, 1e-50, float("nan"), float("inf"), 1])
def test_floors_that_float32_cannot_hold(eps: float) -> None:
    """Both group quantisers refuse them by name; the ends of the range are taken (the twin)."""
    x = torch.randn(2, K).bfloat16()
    for verb in (kernels.per_token_group_quant_fp8, kernels.per_token_group_quant_fp8_packed):
        with pytest.raises(OptionError, match="eps must be a positive finite float"):
            verb(x, 128, eps=eps)
        for good in (2.0**-149, torch.finfo(torch.float32).max):
            assert verb(x, 128, eps=good)[0].dtype is FP8


@pytest.mark.parametrize("strides", ["columns", "every second", "expanded"])
def test_payloads_are_contiguous(strides: str) -> None:
    """As the fake implementations promise to a compiler, whatever the input's strides."""
    x = {
        "columns": torch.randn(K, M).bfloat16().t(),
        "every second": torch.randn(M, 2 * K).bfloat16()[:, ::2],
        "expanded": torch.randn(1, K).bfloat16().expand(M, K),
    }[strides]
    op = torch.ops.fp8_kernels.scaled_fp8_quant.default
    for arguments in ((x, torch.ones(1), None, None, False), (x, None, None, None, False), (x, None, 9, None, True)):
        torch.library.opcheck(op, arguments, test_utils=("test_faketensor",))
    for layout in ("row", "col", "tma"):
        group = torch.ops.fp8_kernels.per_token_group_quant_fp8.default
        torch.library.opcheck(group, (x, 128, 1e-10, layout, False), test_utils=("test_faketensor",))
    if strides == "columns":  # the twin: arithmetic alone keeps the strides of its operand
        assert not eager.divide_and_saturate(x, torch.ones(())).is_contiguous()
