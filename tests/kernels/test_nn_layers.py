"""Layers as modules: every output judged by the contract of what the layer computes, and twins that must fail."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import checkpoints as cp
import pytest
import torch
from torch import Tensor

import kernels
from kernels import nn
from kernels.errors import DtypeError, KernelError, OptionError, ShapeError, ValueRangeError
from kernels.nn import linear
from kernels.platform import Machine, use_machine
from oracle.routines import get
from oracle.verdict.compare import Status, Verdict

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
E8M0 = torch.float8_e8m0fnu
GOOD = (Status.PASSED, Status.MISTRUSTED)


def data(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def block_verdict(x: Tensor, weight: Tensor, scale: Tensor, y: Tensor, bias: Tensor | None = None) -> Verdict:
    """Quantise ``x`` by the public routine (its own contract judges it elsewhere), then judge the product."""
    flat = kernels.layout.pad_k(x.reshape(-1, x.shape[-1]))
    a, a_scale = kernels.per_token_group_quant_fp8(flat, 128)
    operands = {
        "a": a[:, : x.shape[-1]].contiguous(),
        "a_scale": a_scale,
        "b": weight,
        "b_scale": scale.float(),
    }
    out = y.reshape(-1, y.shape[-1])
    if bias is None:
        return get("fp8_gemm_nt").judge(operands, out, arch="cpu", numerics="ieee32.any")
    return get("cutlass_scaled_mm").judge({**operands, "bias": bias}, out, arch="cpu", numerics="ieee32.any")


def scaled_verdict(x: Tensor, weight: Tensor, scale: Tensor, y: Tensor, **more: Any) -> Verdict:
    """The whole layer, quantiser included, by the contract of vLLM's linear layer."""
    per_token = more.pop("per_token", True)
    given = {"input": x, "weight": weight.t(), "weight_scale": scale.float().reshape(-1, 1), **more}
    given = {name: t.contiguous() for name, t in given.items() if t is not None}
    return get("Fp8LinearOp").judge(given, y, arch="cpu", numerics="ieee32.any", use_per_token_if_dynamic=per_token)


class TestLinear:
    """Kinds of scales, dtypes of inputs and scales, biases, any number of axes."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, E8M0])
    @pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
    def test_block(self, dtype: torch.dtype, scale_dtype: torch.dtype, bias: torch.dtype | None) -> None:
        weight, scale = cp.linear(192, 384, 1, "block", scale_dtype)
        shift = None if bias is None else data(192, dtype=bias) * 8
        layer, x = nn.Fp8Linear(weight, scale, shift), data(2, 3, 384, dtype=dtype)
        y = layer(x)
        assert y.shape == (2, 3, 192) and y.dtype == dtype and y.is_contiguous()
        assert block_verdict(x, weight, scale, y, shift).status in GOOD

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", ["tensor", "channel"])
    @pytest.mark.parametrize("static", [False, True])
    def test_tensor_and_channel(self, dtype: torch.dtype, kind: str, static: bool) -> None:
        weight, scale = cp.linear(48, 80, 2, kind)
        given, shift = torch.tensor([0.01]) if static else None, data(48, dtype=torch.bfloat16)
        layer, x = nn.Fp8Linear(weight, scale, shift, input_scale=given), data(3, 80, dtype=dtype)
        assert scaled_verdict(x, weight, scale, layer(x), bias=shift, input_scale=given).status in GOOD

    def test_one_scale_for_all_tokens(self) -> None:
        weight, scale = cp.linear(48, 80, 2, "tensor")
        x = data(3, 80) * torch.tensor([[1.0], [30.0], [900.0]]).bfloat16()
        y = nn.Fp8Linear(weight, scale, per_token=False)(x)
        assert scaled_verdict(x, weight, scale, y, per_token=False).status in GOOD
        assert scaled_verdict(x, weight, scale, y).status is Status.FAILED

    @pytest.mark.parametrize(("n", "k"), [(100, 200), (576, 128), (1, 130), (65, 8)])
    @pytest.mark.parametrize("kind", ["block", "channel"])
    def test_extents_that_no_kernel_takes_are_padded(self, n: int, k: int, kind: str) -> None:
        weight, scale = cp.linear(n, k, 3, kind)
        layer, x = nn.Fp8Linear(weight, scale, kind=kind), data(4, k)
        y = layer(x)
        assert y.shape == (4, n) and layer.weight.shape[0] % 16 == layer.weight.shape[1] % 16 == 0
        verdict = block_verdict if kind == "block" else scaled_verdict
        assert verdict(x, weight, scale, y).status in GOOD

    def test_nothing_is_copied_without_padding(self) -> None:
        weight, scale = cp.linear(128, 256, 4, "block")
        assert nn.Fp8Linear(weight, scale).weight.data_ptr() == weight.data_ptr()

    def test_pieces_without_a_gap(self) -> None:
        """As of DeepSeek-V3's first projections (1536 and 576 rows): the product is the output, without a copy."""
        parts = {n: cp.linear(n, 128, n, "block") for n in (256, 64)}
        both = [nn.Shard(str(n), *part, (0, n), (0, 128)) for n, part in parts.items()]
        layer, x = nn.Fp8Linear.from_shards(both, kind="block"), data(3, 128)
        assert layer.layout.plain and not layer.gaps
        for (weight, scale), y in zip(parts.values(), layer(x).split([256, 64], 1), strict=True):
            assert block_verdict(x, weight, scale, y.contiguous()).status in GOOD
        assert nn.Fp8Linear.from_shards(both[::-1], kind="block").gaps

    @pytest.mark.parametrize("shape", [(0, 384), (384,), (1, 1, 2, 384), (2, 0, 384)])
    @pytest.mark.parametrize("kind", ["block", "channel"])
    def test_axes(self, shape: tuple[int, ...], kind: str) -> None:
        weight, scale = cp.linear(96, 384, 5, kind)
        assert nn.Fp8Linear(weight, scale, data(96))(data(*shape)).shape == (*shape[:-1], 96)

    def test_strides(self) -> None:
        weight, scale = cp.linear(96, 384, 5, "block")
        layer, x = nn.Fp8Linear(weight, scale), data(384, 5).t()
        assert torch.equal(layer(x), layer(x.contiguous()))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", ["block", "channel"])
    def test_surroundings(self, kind: str, dtype: torch.dtype) -> None:
        """Autocast, inference mode and gradients that are off change nothing; a gradient is refused."""
        weight, scale = cp.linear(100, 384, 5, kind)
        layer, x = nn.Fp8Linear(weight, scale, data(100)), data(3, 384, dtype=dtype)
        y = layer(x)
        with torch.autocast("cpu"):
            assert torch.equal(layer(x), y)
        with torch.inference_mode():
            assert torch.equal(layer(x), y)
        wanting = x.clone().requires_grad_()
        with torch.no_grad():
            assert torch.equal(layer(wanting), y)
        with pytest.raises(OptionError, match="has no gradient"):
            layer(wanting)

    def test_out_dtype(self) -> None:
        weight, scale = cp.linear(96, 384, 5, "block")
        x = data(3, 384)
        y = nn.Fp8Linear(weight, scale, out_dtype=torch.float32)(x)
        assert y.dtype == torch.float32 and block_verdict(x, weight, scale, y).status in GOOD

    def test_a_product_in_bf16_is_cast(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As on a GPU whose library writes bf16 only: one rounding to bf16, then the bias and the cast."""
        weight, scale = cp.linear(128, 384, 5, "block")
        x, bias = data(3, 384, dtype=torch.float16), data(128, dtype=torch.float16)
        plain, layer = nn.Fp8Linear(weight, scale, out_dtype=torch.bfloat16)(x), nn.Fp8Linear(weight, scale, bias)
        monkeypatch.setattr("kernels.nn.linear._product_dtype", lambda *_: torch.bfloat16)
        assert torch.equal(layer(x), (plain.float() + bias.float()).half())

    @pytest.mark.parametrize(
        ("device", "arch", "kind", "bias", "product"),
        [
            ("cpu", "cpu", torch.bfloat16, False, torch.bfloat16),
            ("cpu", "cpu", torch.bfloat16, True, torch.float32),
            ("cpu", "cpu", torch.float16, False, torch.float16),
            ("cuda", "sm90", torch.bfloat16, True, torch.bfloat16),  # DeepGEMM's, not the other library's float32
            ("cuda", "sm90", torch.float16, False, torch.float16),
            ("cuda", "sm90", torch.float16, True, torch.float32),
            ("cuda", "sm120", torch.bfloat16, True, torch.bfloat16),  # DeepGEMM's, in the same way
            ("cuda", "sm89", torch.bfloat16, True, torch.float32),  # one library for both
            ("cuda", "gfx942", torch.float16, True, torch.bfloat16),  # none: the product says why
        ],
    )
    def test_dtype_of_the_product(
        self, device: str, arch: str, kind: torch.dtype, bias: bool, product: torch.dtype
    ) -> None:
        with use_machine(Machine.described(arch)):
            assert linear._product_dtype(device, 256, 512, kind, bias) == product

    def test_powers_of_two(self) -> None:
        """A weight with other scales is quantised again; inputs get scales that are powers of two."""
        weight, scale = cp.linear(128, 256, 6, "block")
        layer, x = nn.Fp8Linear(weight, scale, ue8m0=True), data(3, 256)
        assert torch.equal(layer.weight_scale, kernels.ceil_to_ue8m0(layer.weight_scale.detach()))
        a, a_scale = kernels.per_token_group_quant_fp8(x, 128, use_ue8m0=True)
        given = {"a": a, "a_scale": a_scale, "b": layer.weight.detach(), "b_scale": layer.weight_scale.detach()}
        assert get("fp8_gemm_nt").judge(given, layer(x), arch="cpu", numerics="ieee32.any").status in GOOD
        exact, powers = cp.linear(128, 256, 6, "block", E8M0)
        assert nn.Fp8Linear(exact, powers, ue8m0=True).weight.data_ptr() == exact.data_ptr()


def next_block(scale: Tensor) -> Tensor:
    return scale.roll(1, 0)


def turned(scale: Tensor) -> Tensor:
    return scale.t().contiguous()


def inverted(scale: Tensor) -> Tensor:
    return scale.reciprocal()


class TestTwins:
    """What goes wrong in a loader; the verdict sees it."""

    @pytest.mark.parametrize("wrong", [next_block, turned, inverted], ids=lambda f: f.__name__)
    def test_scales(self, wrong: Callable[[Tensor], Tensor]) -> None:
        weight, scale = cp.linear(256, 256, 1, "block")
        x = data(4, 256)
        assert block_verdict(x, weight, scale, nn.Fp8Linear(weight, scale)(x)).status in GOOD
        y = nn.Fp8Linear(weight, wrong(scale))(x)
        assert block_verdict(x, weight, scale, y).status is Status.FAILED

    def test_fused_shards_with_swapped_scales(self) -> None:
        (w1, s1), (w2, s2) = cp.linear(128, 256, 1, "block"), cp.linear(128, 256, 2, "block")

        def fused(*scales: Tensor) -> nn.Fp8Linear:
            both = zip(("gate", "up"), (w1, w2), scales, strict=True)
            return nn.Fp8Linear.from_shards([nn.Shard(*shard, (0, 128), (0, 256)) for shard in both], kind="block")

        x, weight, scale = data(4, 256), torch.cat([w1.view(torch.uint8), w2.view(torch.uint8)]), torch.cat([s1, s2])
        weight = weight.view(torch.float8_e4m3fn)
        assert block_verdict(x, weight, scale, fused(s1, s2)(x)).status in GOOD
        assert block_verdict(x, weight, scale, fused(s2, s1)(x)).status is Status.FAILED

    def test_bytes_of_e8m0_as_numbers(self) -> None:
        """uint8 is refused with the way out; the numbers of the bytes in float32 are wrong by far."""
        weight, scale = cp.linear(256, 256, 1, "block", E8M0)
        with pytest.raises(DtypeError, match="view bytes of E8M0 as torch.float8_e8m0fnu"):
            nn.Fp8Linear(weight, scale.view(torch.uint8))
        x, y = data(4, 256), nn.Fp8Linear(weight, scale.view(torch.uint8).float())(data(4, 256))
        assert block_verdict(x, weight, scale, y).status is Status.FAILED

    def test_a_lost_bias(self) -> None:
        weight, scale = cp.linear(128, 256, 1, "block")
        x, bias = data(4, 256), data(128) * 8
        assert block_verdict(x, weight, scale, nn.Fp8Linear(weight, scale)(x), bias).status is Status.FAILED


class TestErrors:
    """One typed error that names the layer, the value and the way out."""

    W, S = cp.linear(256, 384, 1, "block")

    @pytest.mark.parametrize(
        ("change", "kind", "said"),
        [
            (
                {"weight": W.float()},
                DtypeError,
                "float32, not float8_e4m3fn; an unquantised weight belongs in torch.nn",
            ),
            ({"weight": W.to(torch.float8_e5m2)}, DtypeError, "float8_e5m2"),
            ({"weight": W[0]}, ShapeError, "2 dimensions"),
            ({"weight": W[:0]}, ShapeError, "neither of them 0"),
            (
                {"weight_scale": S.t()},
                ShapeError,
                r"\[3, 2\]; per block of \[256, 384\] it is \[2, 3\]; it is transposed",
            ),
            ({"weight_scale": S[:1]}, ShapeError, r"\[1, 3\]"),
            ({"weight_scale": S.double()}, DtypeError, "float64"),
            ({"weight_scale": -S}, ValueRangeError, "finite and positive"),
            ({"weight_scale": S * torch.nan}, ValueRangeError, r"nan at \[0, 0\], and 6 such values of 6"),
            ({"weight_scale": [1.0]}, KernelError, "weight_scale must be a torch.Tensor, got list"),
            ({"bias": torch.ones(255)}, ShapeError, "the bias of down"),
            ({"bias": torch.ones(256).double()}, DtypeError, "the bias of down"),
            ({"input_scale": torch.ones(1)}, OptionError, "leave input_scale out"),
            ({"kind": "row"}, OptionError, "per tensor, channel, block"),
            ({"out_dtype": torch.int8}, OptionError, "out_dtype"),
        ],
    )
    def test_making(self, change: dict[str, Any], kind: type[Exception], said: str) -> None:
        with pytest.raises(kind, match=said):
            nn.Fp8Linear(**{"weight": self.W, "weight_scale": self.S, "name": "down", **change})

    @pytest.mark.parametrize("rows", [(-1, 5), (5, 5), (0, 257)])
    def test_shards(self, rows: tuple[int, int]) -> None:
        with pytest.raises(ShapeError, match="rows .* of down are not within its 256"):
            nn.Fp8Linear.from_shards([nn.Shard("down", self.W, self.S, rows, (0, 384))], kind="block")
        with pytest.raises(OptionError, match="at least one shard"):
            nn.Fp8Linear.from_shards([], kind="block")

    def test_two_readings_of_one_scale(self) -> None:
        weight, scale = cp.linear(64, 64, 1, "block")
        with pytest.raises(OptionError, match="can be per tensor or per block; say which with kind="):
            nn.Fp8Linear(weight, scale)
        assert nn.Fp8Linear(weight, scale, kind="block").layout.kind == "block"

    @pytest.mark.parametrize(
        ("x", "kind"),
        [
            (torch.ones(2, 256), ShapeError),
            (torch.tensor(1.0), ShapeError),
            (torch.ones(2, 384).double(), DtypeError),
            (torch.ones(2, 384, device="meta"), KernelError),
            (W, DtypeError),
            ([1.0], KernelError),
        ],
    )
    def test_calling(self, x: Any, kind: type[Exception]) -> None:
        with pytest.raises(kind, match="input"):
            nn.Fp8Linear(self.W, self.S, name="down")(x)


@pytest.mark.turns(4)
class TestModule:
    """As any module: moved, copied, saved, loaded, compiled; its codes and scales keep their dtypes."""

    W, S = cp.linear(192, 384, 1, "block")

    def layer(self) -> nn.Fp8Linear:
        return nn.Fp8Linear(self.W.clone(), self.S.clone(), data(192, dtype=torch.float32))

    @pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double().float()])
    def test_a_cast_keeps_codes_and_scales(self, cast: Callable[[Any], Any]) -> None:
        layer = cast(torch.nn.Sequential(self.layer()))[0]
        assert layer.weight.dtype == torch.float8_e4m3fn and layer.weight_scale.dtype == torch.float32
        assert torch.equal(layer.weight.view(torch.uint8), self.W.view(torch.uint8))
        assert torch.equal(layer.weight_scale, self.S)

    def test_the_twin_casts(self) -> None:
        """Without the rule of the class a cast makes floats of the codes."""
        plain = torch.nn.Module()
        plain.weight = torch.nn.Parameter(self.W.clone(), requires_grad=False)
        assert plain.half().weight.dtype == torch.float16

    def test_moves(self) -> None:
        layer = self.layer().to("meta")
        assert layer.weight.device.type == layer.weight_scale.device.type == layer.bias.device.type == "meta"
        assert layer.weight.dtype == torch.float8_e4m3fn

    def test_state(self) -> None:
        layer, other, x = self.layer(), self.layer(), data(3, 384)
        with torch.no_grad():
            other.weight.view(torch.uint8).zero_(), other.weight_scale.fill_(1.0), other.bias.zero_()
        assert not torch.equal(other(x), layer(x))
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(x), layer(x)) and torch.equal(copy.deepcopy(layer)(x), layer(x))

    @pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, E8M0])
    def test_state_of_a_checkpoint(self, scale_dtype: torch.dtype) -> None:
        """Under the names of DeepSeek-V3's files, in the dtype that they have."""
        weight, scale = cp.linear(192, 384, 9, "block", scale_dtype)
        layer = torch.nn.ModuleDict({"down": nn.Fp8Linear(self.W.clone(), self.S.clone())})
        layer.load_state_dict({"down.weight": weight, "down.weight_scale_inv": scale})
        assert torch.equal(layer["down"](data(3, 384)), nn.Fp8Linear(weight, scale)(data(3, 384)))

    @pytest.mark.parametrize(
        ("key", "value", "kind"),
        [
            ("weight", W.float(), DtypeError),
            ("weight_scale", S.view(torch.int32), DtypeError),
            ("weight_scale", -S, ValueRangeError),
            ("weight_scale", S.t(), RuntimeError),
            ("weight_scale", S.to(torch.float64), DtypeError),
            ("layout", torch.tensor([2, 192, 64, 320, 384, 0, 192]), ShapeError),
        ],
    )
    def test_a_state_that_does_not_fit(self, key: str, value: Tensor, kind: type[Exception]) -> None:
        layer = self.layer()
        with pytest.raises(kind):
            layer.load_state_dict({**layer.state_dict(), key: value})

    def test_a_slice_takes_no_state_of_another(self) -> None:
        def part(start: int) -> nn.Fp8Linear:
            return nn.Fp8Linear.from_shards(
                [nn.Shard("w", self.W, self.S, (start, start + 96), (0, 384))], kind="block"
            )

        second = part(96)
        second.load_state_dict(part(96).state_dict())
        with pytest.raises(ShapeError, match="another slice"):
            second.load_state_dict(part(0).state_dict())
        bare = {key: value for key, value in second.state_dict().items() if key != "layout"}
        with pytest.raises(ShapeError, match="without a layout"):
            second.load_state_dict(bare)

    def test_compiled(self) -> None:
        """One graph, also for another number of tokens, with the same bits. The page for engines compiles more."""
        weight, scale = cp.linear(100, 200, 3, "block")
        layer = nn.Fp8Linear(weight, scale, data(100))
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
        for rows in (2, 40):
            assert torch.equal(compiled(data(rows, 3, 200)), layer(data(rows, 3, 200)))
        torch._dynamo.reset()
