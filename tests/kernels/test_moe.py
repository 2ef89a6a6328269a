"""MoE: choice of kernels, preparation of weights and scales, routing, and whole layers against float64."""

import logging

import pytest
import torch

from kernels import layout, moe, moe_layer
from kernels.config import Config
from kernels.errors import ConfigError, InputError, OptionError, ShapeError
from kernels.moe import FlashinferMoeBackend as Backend
from kernels.platform import Machine
from kernels.quantize import per_block_cast_to_fp8, scaled_fp8_quant


class TestBackendChoice:
    """VLLM_FLASHINFER_MOE_BACKEND."""

    @pytest.mark.parametrize(
        ("arch", "value", "expected"),
        [
            ("sm90", None, Backend.CUTLASS),
            ("sm90", "throughput", Backend.CUTLASS),
            ("sm90", "latency", Backend.CUTLASS),
            ("sm100", "latency", Backend.TENSORRT_LLM),
            ("sm103", "latency", Backend.TENSORRT_LLM),
            ("sm120", "latency", Backend.CUTLASS),
            ("sm100", "masked_gemm", Backend.CUTEDSL),
        ],
    )
    def test_table(self, arch, value, expected, caplog) -> None:
        with caplog.at_level(logging.INFO):
            got = moe.get_flashinfer_moe_backend(Machine.described(arch), Config(flashinfer_moe_backend=value))
        assert got is expected
        assert ("sm100 family" in caplog.text) is (value == "latency" and expected is Backend.CUTLASS)

    @pytest.mark.parametrize(("arch", "value"), [("sm100", None), ("sm89", None), ("sm90", "fastest")])
    def test_otherwise_the_choices(self, arch, value) -> None:
        with pytest.raises(ConfigError, match="throughput, latency, masked_gemm"):
            moe.get_flashinfer_moe_backend(Machine.described(arch), Config(flashinfer_moe_backend=value))

    def test_global_scale(self) -> None:
        assert all(moe.is_flashinfer_supporting_global_sf(b) for b in Backend)
        assert not moe.is_flashinfer_supporting_global_sf(None)


class TestScales:
    """g1, g2 and what is registered."""

    def test_alphas(self) -> None:
        g1, g2 = moe.make_fp8_moe_alpha_scales_for_fi(
            torch.tensor([[2.0], [3.0]]), torch.tensor(0.5), torch.tensor([4.0, 5.0]), torch.tensor([0.1, 0.2])
        )
        assert g1.tolist() == [1.0, 1.5] and torch.equal(g2, torch.tensor([4.0, 5.0]) * torch.tensor([0.1, 0.2]))
        with pytest.raises(ShapeError, match="experts"):
            moe.make_fp8_moe_alpha_scales_for_fi(torch.ones(2), torch.ones(1), torch.ones(3), torch.ones(1))

    def test_registered(self) -> None:
        layer = torch.nn.Module()
        w2_input = torch.tensor([0.3])
        moe.register_scales_for_trtllm_fp8_per_tensor_moe(
            layer, torch.ones(2), torch.tensor([0.7]), torch.ones(2) * 2, w2_input
        )
        assert torch.equal(layer.output1_scales_gate_scalar, torch.full((2,), 0.7))
        assert torch.equal(layer.output1_scales_scalar, torch.full((2,), 0.7) / w2_input)
        assert torch.equal(layer.output2_scales_scalar, torch.full((2,), 2.0) * 0.3)


class TestPreparation:
    """pad, swap, rotate and register, in this order."""

    def test_trtllm_per_tensor(self, make) -> None:
        layer = torch.nn.Module()
        w13, w2 = make.codes(2, 32, 64), make.codes(2, 64, 16)
        one = torch.ones(2)
        a, b, scale = moe.prepare_fp8_moe_layer_for_fi(layer, w13, w2, one, one[:1], one, one[:1], is_trtllm=True)
        expected = layout.rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(layout.swap_w13_to_w31(w13), w2)
        assert torch.equal(a.float(), expected[0].float()) and torch.equal(b.float(), expected[1].float())
        assert scale is one and layer.intermediate_size_per_partition == 16 and hasattr(layer, "output1_scales_scalar")

    def test_block_scales_are_swapped_and_not_padded(self, make) -> None:
        layer = torch.nn.Module()
        layer.weight_block_size = (128, 128)
        w13, w2, scale = make.codes(1, 512, 128), make.codes(1, 128, 256), make.scales(1, 4, 1)
        a, b, s = moe.prepare_fp8_moe_layer_for_fi(layer, w13, w2, scale, None, make.scales(1, 1, 2), None)
        assert torch.equal(s, torch.cat([scale[:, 2:], scale[:, :2]], 1)) and b is w2
        assert torch.equal(a[:, :256].float(), w13[:, 256:].float())

    def test_uneven_block_scales_are_refused(self, make) -> None:
        layer = torch.nn.Module()
        layer.weight_block_size = (128, 128)
        with pytest.raises(ShapeError, match="odd"):
            moe.prepare_fp8_moe_layer_for_fi(
                layer,
                make.codes(1, 384, 128),
                make.codes(1, 128, 192),
                make.scales(1, 3, 1),
                None,
                make.scales(1, 1, 2),
                None,
            )

    def test_static_scales_are_required(self, make) -> None:
        with pytest.raises(InputError, match="w13_input_scale"):
            moe.prepare_fp8_moe_layer_for_fi(
                torch.nn.Module(),
                make.codes(1, 32, 64),
                make.codes(1, 64, 16),
                torch.ones(1),
                None,
                torch.ones(1),
                None,
                True,
            )

    def test_constructors(self) -> None:
        with pytest.raises(OptionError, match="out_dtype"):
            moe.select_cutlass_fp8_gemm_impl(None, None)
        assert moe.select_cutlass_fp8_gemm_impl(None, None, torch.float16).out_dtype == torch.float16
        config = moe.MoeConfig(dp_size=2, ep_rank=1, ep_size=4)
        made = moe.select_cutlass_fp8_gemm_impl(config, "q", use_deepseek_fp8_block_scale=True)
        assert (made.ep_rank, made.ep_size, made.quant_config, made.use_deepseek_fp8_block_scale) == (1, 4, "q", True)
        assert moe.build_flashinfer_fp8_cutlass_moe_prepare_finalize(config).use_dp
        assert not moe.build_flashinfer_fp8_cutlass_moe_prepare_finalize(None, True).use_dp


class TestRouting:
    """Llama-4 and DeepSeek-V3."""

    def test_llama4(self) -> None:
        weights, ids = moe_layer.route_llama4(torch.tensor([[0.1, 3.0, -1.0]]), 2)
        assert ids.tolist() == [[1, 0]] and torch.allclose(weights, torch.tensor([[3.0, 0.1]]).sigmoid())

    def test_deepseek_v3_bias_steers_the_choice_only(self) -> None:
        logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 5.0, -9.0]])
        bias = torch.tensor([0.0, 0.0, 0.0, 9.0, 0.0, 0.0])
        weights, ids = moe_layer.route_deepseek_v3(logits, bias, 2, n_group=3, topk_group=1, routed_scaling_factor=2.5)
        assert ids.tolist() == [[3, 2]]  # the group of expert 3 wins by its bias
        scores = logits.sigmoid()[0, [3, 2]]
        assert torch.allclose(weights[0], scores / scores.sum() * 2.5)

    def test_masked_groups_never_win(self) -> None:
        """A negative bias everywhere: groups left out must stay out (filling them with 0 would choose them)."""
        logits = torch.randn(50, 8)
        _, ids = moe_layer.route_deepseek_v3(logits, torch.full((8,), -5.0), 3, n_group=4, topk_group=2)
        groups = ids // 2
        assert all(len(set(row.tolist())) <= 2 for row in groups)

    @pytest.mark.parametrize(
        "options", [{"n_group": 3, "topk_group": 1}, {"n_group": 8, "topk_group": 2}, {"n_group": 4, "topk_group": 5}]
    )
    def test_refused(self, options: dict[str, int]) -> None:
        with pytest.raises(OptionError):
            moe_layer.route_deepseek_v3(torch.randn(2, 8), torch.zeros(8), 2, **options)

    def test_silu_limit(self) -> None:
        x = torch.tensor([[10.0, -10.0, 10.0, -10.0]])
        clamped = moe_layer.silu_and_mul(x, 7.0)
        gate = torch.tensor([7.0, -10.0])
        assert torch.allclose(clamped, torch.nn.functional.silu(gate) * torch.tensor([7.0, -7.0]))


class TestWholeLayer:
    """From routing to combination, close to the float64 layer on the dequantised weights."""

    E, INNER, H, T = 4, 128, 256, 9

    def reference(self, x, w13, w2, weights, ids, limit=None, offset=0, on_input=False) -> torch.Tensor:
        y = torch.zeros(x.shape, dtype=torch.float64)
        for t in range(x.shape[0]):
            for j in range(ids.shape[1]):
                e = int(ids[t, j]) - offset
                if 0 <= e < self.E:
                    row = x[t].double() * (weights[t, j].double() if on_input else 1.0)
                    gate, up = (w13[e] @ row).chunk(2)
                    if limit is not None:
                        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                    part = w2[e] @ (torch.nn.functional.silu(gate) * up)
                    y[t] += part * (1.0 if on_input else weights[t, j].double())
        return y

    def parts(self):
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(self.T, self.H, generator=generator).bfloat16()
        w13 = torch.randn(self.E, 2 * self.INNER, self.H, generator=generator) * 0.06
        w2 = torch.randn(self.E, self.H, self.INNER, generator=generator) * 0.09
        weights, ids = moe_layer.route_llama4(torch.randn(self.T, self.E + 2, generator=generator), 2)
        return x, w13, w2, weights, ids

    @pytest.mark.parametrize("options", [{}, {"limit": 0.5}, {"expert_offset": 2}, {"weight_on_input": True}])
    def test_block_scaled(self, make, options) -> None:
        x, w13, w2, weights, ids = self.parts()
        a = [per_block_cast_to_fp8(w) for w in w13]
        b = [per_block_cast_to_fp8(w) for w in w2]
        stack = [torch.stack([p[i] for p in pair]) for pair in (a, b) for i in (0, 1)]
        y = moe_layer.moe_block_scaled(x, *stack, weights, ids, **options)
        wide = [
            q.double() * s.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
            for q, s in (stack[:2], stack[2:])
        ]
        named = {
            "limit": options.get("limit"),
            "offset": options.get("expert_offset", 0),
            "on_input": "weight_on_input" in options,
        }
        expected = self.reference(x, *wide, weights, ids, **named)
        assert (y.double() - expected).norm() / expected.norm() < 0.06

    @pytest.mark.parametrize("options", [{}, {"expert_offset": 2}])
    def test_per_token(self, make, options) -> None:
        x, w13, w2, weights, ids = self.parts()
        a = [scaled_fp8_quant(w, use_per_token_if_dynamic=True) for w in w13]
        b = [scaled_fp8_quant(w, use_per_token_if_dynamic=True) for w in w2]
        q13, s13 = torch.stack([p[0] for p in a]), torch.stack([p[1][:, 0] for p in a])
        q2, s2 = torch.stack([p[0] for p in b]), torch.stack([p[1][:, 0] for p in b])
        y = moe_layer.moe_per_token(x, q13, s13, q2, s2, weights, ids, **options)
        wide = q13.double() * s13.double().unsqueeze(2), q2.double() * s2.double().unsqueeze(2)
        expected = self.reference(x, *wide, weights, ids, offset=options.get("expert_offset", 0))
        assert (y.double() - expected).norm() / expected.norm() < 0.06

    def test_another_expert_is_seen(self) -> None:
        """Negative test: one token sent to the wrong expert leaves the bound."""
        x, w13, w2, weights, ids = self.parts()
        right = self.reference(x, w13.double(), w2.double(), weights, ids)
        ids = ids.clone()
        ids[0, 0] = (ids[0, 0] + 1) % self.E
        wrong = self.reference(x, w13.double(), w2.double(), weights, ids)
        assert (wrong - right).norm() / right.norm() > 0.06

    def test_trtllm_cpu_path_undoes_the_row_orders(self, make) -> None:
        x, w13, w2, _, _ = self.parts()
        scales13, scales2 = (w.abs().amax((1, 2)) / 448 for w in (w13, w2))
        q13 = (w13 / scales13.view(-1, 1, 1)).to(torch.float8_e4m3fn)
        q2 = (w2 / scales2.view(-1, 1, 1)).to(torch.float8_e4m3fn)
        layer = torch.nn.Module()
        layer.routing_method_type = moe.LLAMA4
        in13, in2 = torch.tensor([0.02]), torch.tensor([0.05])
        layer.w13_weight, layer.w2_weight, _ = moe.prepare_fp8_moe_layer_for_fi(
            layer, q13, q2, scales13, in13, scales2, in2, is_trtllm=True
        )
        logits = torch.randn(self.T, self.E, generator=torch.Generator().manual_seed(6))
        y = moe.apply_fi_trtllm_fp8_per_tensor_moe(layer, x, logits, None, 1, None, None, self.E, True)
        weights, ids = moe_layer.route_llama4(logits, 1)
        wide = q13.double() * scales13.double().view(-1, 1, 1), q2.double() * scales2.double().view(-1, 1, 1)
        expected = self.reference(x, *wide, weights, ids, on_input=True)
        assert (y.double() - expected).norm() / expected.norm() < 0.08

    def test_trtllm_refuses_other_routings(self) -> None:
        layer = torch.nn.Module()
        layer.routing_method_type = 2
        with pytest.raises(OptionError, match="Llama-4"):
            moe.apply_fi_trtllm_fp8_per_tensor_moe(
                layer, torch.ones(1, 8), torch.ones(1, 2), None, 1, None, None, 2, True
            )
        layer.routing_method_type = moe.LLAMA4
        for top_k, on_input in ((2, True), (1, False)):
            with pytest.raises(OptionError, match="Llama-4"):
                moe.apply_fi_trtllm_fp8_per_tensor_moe(
                    layer, torch.ones(1, 8), torch.ones(1, 2), None, top_k, None, None, 2, on_input
                )
        with pytest.raises(InputError, match="prepare_fp8_moe_layer_for_fi"):
            moe.apply_fi_trtllm_fp8_per_tensor_moe(
                layer, torch.ones(1, 8), torch.ones(1, 2), None, 1, None, None, 2, True
            )
