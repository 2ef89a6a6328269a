"""Custom operators: opcheck, and the M switch under torch.compile."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.library import opcheck
from torch.utils._pytree import tree_leaves, tree_map

import kernels
from kernels import checks, context, quantize
from kernels.config import Config, use_config
from kernels.errors import OptionError
from kernels.fast import torch as fast_torch
from tests.support.cache_calls import operands as cache_operands

OPS = torch.ops.fp8_kernels
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
M, N, K, BLOCK = 6, 256, 256, 128
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No compiled graph outlives its test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def float8_is_comparable(monkeypatch: pytest.MonkeyPatch) -> None:
    """opcheck compares operands before and after with ``torch.allclose``, which has no float8: compare their bits."""
    plain = torch.allclose

    def allclose(a: torch.Tensor, b: torch.Tensor, **options: object) -> bool:
        if a.dtype == torch.float8_e4m3fn:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        return plain(a, b, **options)

    monkeypatch.setattr(torch, "allclose", allclose)


def operands(make):
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    a, sa = kernels.per_token_group_quant_fp8(x, 128)
    return x, a, sa, make.codes(N, K), make.scales(2, 2)


FORMS = (
    "mxfp8_quantize_columnwise", "mxfp8_quantize_2d", "mxfp8_quantize_3d",
    "nvfp4_batched_quantize", "nvfp4_quantize_shuffled",
    "silu_and_mul_nvfp4_quantize", "silu_and_mul_scaled_nvfp4_experts_quantize",
    "mxfp6_quantize", "mxint8_quantize", "per_token_cast_to_fp4", "nvfp4_quantize_stochastic", "nvfp4_quantize_2d",
    "nvfp4_quantize_4over6", "nvfp4_quantize_rht", "nvfp4_quantize_per_token", "nvfp4_quantize_of_fp8",
    "mxfp4_quantize_of_fp8", "fp8_block_to_mxfp8", "mxfp8_to_fp8_block", "scaled_fp4_grouped_quantize",
    "mxfp8_grouped_quantize", "scaled_fp4_experts_quant", "mxfp8_experts_quant",
)  # fmt: skip  # a table, one row a line
"""Verbs whose operator takes their own arguments."""


def calls(make) -> dict[str, tuple[object, ...]]:
    x, a, sa, b, sb = operands(make)
    one, out = torch.ones(1), torch.empty(M, N, dtype=torch.bfloat16)
    three, rows = make.codes(2, N, K), torch.tensor([0, 0, 1, 1, -1, -1], dtype=torch.int32)
    scales, cube = make.scales(2, 2, 2), make.codes(2, 3, K)
    counts, lens = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([5, 70], dtype=torch.int32)
    q, k = make.codes(M, 32, 32), make.codes(5, 32)
    codes4 = torch.full((N, K // 2), 0x42, dtype=torch.uint8)
    ks, ke = torch.zeros(M, dtype=torch.int32), torch.full((M,), 4, dtype=torch.int32)
    return {
        "scaled_fp8_quant dynamic": (x, None, None, None, False),
        "scaled_fp8_quant token": (x, None, 17, torch.ones(1), True),
        "scaled_fp8_quant static": (x, one, 17, None, False),
        "per_token_group_quant_fp8 row": (x, 128, 1e-10, "row", False),
        "per_token_group_quant_fp8 col": (x, 128, 1e-10, "col", True),
        "per_token_group_quant_fp8 tma": (x, 128, 1e-10, "tma", False),
        "per_token_group_quant_fp8_packed": (x, 128, 1e-10),
        "silu_and_mul_quant": (x, one, "each"),
        "silu_and_mul_per_block_quant": (x, 64, one, False, "none"),
        "silu_and_mul_per_block_quant columns": (x, 64, None, True, "product"),
        "silu_and_mul_masked_post_quant": (x.view(2, -1, K), torch.tensor([1, 2], dtype=torch.int32), 32, True, "each"),
        "persistent_masked_m_silu_mul_quant": (x.view(2, -1, K), torch.tensor([1, 0], dtype=torch.int32)),
        "per_token_group_quant_fp8_masked": (
            x.view(2, -1, K),
            torch.tensor([1, 0], dtype=torch.int32),
            16,
            1e-10,
            True,
        ),
        "rms_norm_static_fp8_quant": (x, x[0], one, 1e-6, "each"),
        "rmsnorm_quant": (x, x[0], one, 1e-6),
        "fused_add_rms_norm_static_fp8_quant": (x, x + 1, x[0], one, 1e-6, "product"),
        "fused_add_rmsnorm_quant": (x, x + 1, x[0], one, 1e-6),
        "rms_norm_dynamic_per_token_quant": (x, x[0], 1e-6, one, x + 1),
        "rms_norm_per_block_quant": (x, x[0], 1e-6, 128, None, None, True),
        "rope_quantize_fp8": (
            x.view(M, 4, 64),
            x[:, :64],
            x.view(M, 4, 64),
            x,
            torch.ones(M, 64),
            counts.long().repeat(3),
            True,
            2.0,
            0.5,
        ),
        "mxfp8_quantize": (x, "128x4", "rceil", "e4m3"),
        "mxfp8_quantize linear": (x, "linear", "even", "e4m3"),
        "mxfp4_quantize": (x, "8x4", "floor"),
        "nvfp4_quantize": (x, one, "128x4", False),
        "mxfp8_quantize_columnwise": (x.repeat(16, 1)[:64], "compact", "floor", "e4m3"),
        "mxfp8_quantize_columnwise tiles": (x.repeat(16, 1)[:64], "128x4", "rceil", "e5m2"),
        "mxfp8_quantize_2d": (x.repeat(16, 1)[:64], "128x4", "columnwise", "e4m3"),
        "mxfp8_quantize_2d rows": (x.repeat(16, 1)[:64], "linear", "rowwise", "e4m3"),
        "mxfp8_quantize_3d": (x.repeat(16, 1)[:64].reshape(2, 32, K), "128x4", "floor", "e5m2"),
        "nvfp4_batched_quantize": (x.reshape(2, -1, K), one, "8x4"),
        "nvfp4_quantize_shuffled": (x.repeat(16, 1)[:64], one),
        "silu_and_mul_nvfp4_quantize": (x, one, "128x4"),
        "silu_and_mul_scaled_nvfp4_experts_quantize": (x.reshape(2, -1, K), counts, torch.ones(2)),
        "nvfp4_quantize rows": (x, torch.ones(M), "linear", True),
        "per_token_cast_to_fp4 packed": (x, True, 32, True),
        "mxfp6_quantize": (x, "8x4", "rceil", "e2m3"),
        "mxint8_quantize": (x, "linear"),
        "per_token_cast_to_fp4": (x, True, 32, False),
        "nvfp4_quantize_stochastic": (x, one, "128x4", 3),
        "nvfp4_quantize_2d": (x.repeat(16, 1), one, "128x4"),
        "nvfp4_quantize_4over6": (x, one, "128x4", "mse"),
        "nvfp4_quantize_rht": (x, one, "128x4", 7),
        "nvfp4_quantize_per_token": (x, one, "8x4"),
        "nvfp4_quantize_of_fp8": (a, one, "128x4"),
        "mxfp4_quantize_of_fp8": (a, "128x4"),
        "fp8_block_to_mxfp8": (a, sa, "128x4", "bfloat16"),
        "mxfp8_to_fp8_block": (a, torch.full((M, K // 32), 127, dtype=torch.uint8), "linear", "float32"),
        "scaled_fp4_grouped_quantize": (x.reshape(2, -1, K), counts, torch.ones(2)),
        "mxfp8_grouped_quantize": (x.reshape(2, -1, K), counts),
        "scaled_fp4_experts_quant": (x, torch.ones(2), torch.tensor([0, 2, M - 1], dtype=torch.int32), "flashinfer"),
        "mxfp8_experts_quant": (x, torch.tensor([0, 2, M - 1], dtype=torch.int32), "tight"),
        "cutlass_scaled_mm": (a, b.t(), one, one, torch.bfloat16, None),
        "cutlass_scaled_mm block": (a, b.t(), sa, sb.t(), torch.bfloat16, None),
        "torch_scaled_mm": (a, b.t(), one, one, None, torch.bfloat16, "tensorwise"),
        "torch_scaled_mm unfused": (a, b.t(), one, torch.ones(1, N), None, torch.bfloat16, "unfused"),
        "mx_product": (
            *(codes4[:M], make.codes(128 * 16), 16, "128x4"),
            *(codes4[None], make.codes(N * K // 16), 16, "linear"),
            *(out, None, None, None, one, None, False),
        ),
        "fp8_gemm_nt": (a, sa, b, sb, out, None, True),
        "fp8_blockscale_gemm_sm90": (x, b, None, sb),
        "fp8_blockscale_gemm_sm90 quantised": (a, b, sa, sb),
        "flashinfer_fp8_blockscale_gemm": (x, b, sb),
        "deepgemm_blockscale_linear": (x, b, sb, 128, False),
        "dynamic_flashinfer_deepgemm_blockscale_gemm": (x, b, sb, 128, False),
        "few_rows_blockscale_linear": (x[:3], b, sb),
        "few_rows_blockscale_linear float16": (x[:3].half(), b, sb),
        "m_grouped_fp8_gemm_nt_contiguous": (a, sa, three, scales, out, rows, True, False),
        "fp8_m_grouped_gemm_nt_masked": (
            cube,
            make.scales(2, 3, 2),
            three,
            scales,
            torch.zeros(2, 3, N, dtype=torch.bfloat16),
            counts,
            2,
            True,
            False,
        ),
        "scaled_grouped_mm": (
            a,
            three,
            make.scales(M, 1),
            make.scales(2, N),
            torch.tensor([2, 6], dtype=torch.int32),
            torch.bfloat16,
            True,
        ),
        "fp8_paged_mqa_logits": (
            make.codes(2, 1, 32, 32),
            torch.zeros(3, 64, 1, 36, dtype=torch.uint8),
            torch.randn(2, 32),
            lens,
            torch.tensor([[0, 0], [1, 2]], dtype=torch.int32),
            kernels.get_paged_mqa_logits_metadata(lens, 64, 132),
            100,
            True,
            False,
        ),
        "fp8_gemm_nt_1d1d": (  # 64 rows: the library has no kernel of at most 32 on a GPU
            make.codes(64, K),
            make.scales(64, 2),
            b,
            make.scales(N, 2),
            torch.zeros(64, N),
            torch.ones(64, N),
        ),
        "k_grouped_fp8_gemm_nt_contiguous": (
            make.codes(64 * K),
            make.scales(64, 2),
            make.codes(N * K),
            make.scales(N, 2),
            torch.zeros(2, 64, N),
            [0, K],
            torch.tensor([0, K], dtype=torch.int32),
            torch.ones(2, 64, N),
        ),
        "fp8_gemm_nt_skip_head_mid": (
            a,
            sa,
            b,
            sb,
            torch.zeros(M, 3 * N // 2, dtype=torch.bfloat16),
            [N // 4, N // 4, N // 4],
            True,
        ),
        "fp8_einsum": (a[:, None], sa[:, None], b[None], sb[None], out[:, None].clone()),
        "moe_experts": (
            x,
            make.codes(2, 256, K),
            make.scales(2, 2, 2),
            make.codes(2, K, BLOCK),
            make.scales(2, 2, 1),
            torch.ones(M, 2),
            torch.tensor([[0, 1]] * M),
            "deep_gemm_moe",
        ),
        "bmm_fp8": (cube, three.mT, one, one, torch.bfloat16),
        "fp8_mqa_logits": (q, k, make.scales(5), torch.randn(M, 32), ks, ke, True, False),
        **cache_operands(),
    }


NOTHING = SimpleNamespace(
    codes=lambda *s, **k: torch.zeros(s).to(torch.float8_e4m3fn), scales=lambda *s, **k: torch.zeros(s)
)


def names() -> list[str]:
    return list(calls(NOTHING))


def operator_of(name: str) -> torch._ops.OpOverload:
    return getattr(OPS, name.split(" ")[0]).default


def placed(make, name: str, device: str) -> tuple[object, ...]:
    return tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, calls(make)[name])


@pytest.mark.whole("every operator of the layer")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", names())
def test_opcheck(make, name: str, device: str) -> None:
    opcheck(operator_of(name), placed(make, name, device), test_utils=CHECKS)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", names())
def test_opcheck_compiled(make, name: str, device: str) -> None:
    """What torch.compile traces, with symbolic extents: nine tenths of the time of opcheck."""
    opcheck(operator_of(name), placed(make, name, device), test_utils="test_aot_dispatch_dynamic")


@pytest.mark.parametrize("name", names())
def test_gradients_and_vmap_are_refused(make, name: str) -> None:
    """With a sentence that names the operator; without a gradient, and without them enabled, it runs (the twins)."""
    op, operands = operator_of(name), calls(make)[name]
    floats = [isinstance(t, torch.Tensor) and t.is_floating_point() for t in operands]
    wanted = [t.clone().requires_grad_() if wide else t for t, wide in zip(operands, floats, strict=True)]
    if any(floats):
        with pytest.raises(OptionError, match=f"fp8_kernels::{name.split(' ')[0]} has no gradient"):
            op(*wanted)
    with torch.no_grad():
        op(*wanted)
    op(*operands)
    first, *rest = operands
    with pytest.raises(OptionError, match="has no vmap"):
        torch.vmap(lambda x: op(x, *rest))(first.unsqueeze(0))


@pytest.mark.parametrize(
    "name",
    [
        "fp8_gemm_nt",
        "deepgemm_blockscale_linear",
        "dynamic_flashinfer_deepgemm_blockscale_gemm",
    ],
)
def test_a_call_like_an_earlier_one_refuses_gradients_too(make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Wherever the earlier one was made; the tensors are the same objects. Calls like it are not checked again."""
    op, operands, seen = operator_of(name), calls(make)[name], []
    matrix = checks.matrix
    monkeypatch.setattr(checks, "matrix", lambda *given: seen.append(given) or matrix(*given))
    floats = [t for t in operands if isinstance(t, torch.Tensor)]
    with context.use():
        for wanted in (False, True):
            with torch.set_grad_enabled(not wanted):
                for t in floats:
                    t.requires_grad_(wanted)
                op(*operands)
                seen.clear()
                op(*operands)
                assert bool(seen) == (fast_torch.GUARDS is None)
        for t in floats:
            t.requires_grad_(False)
        for t in floats:
            op(*operands)
            t.requires_grad_()
            with pytest.raises(OptionError, match="has no gradient"):
                op(*operands)
            t.requires_grad_(False)


def test_a_compiled_layer_refuses_gradients(make) -> None:
    weight, scale = make.codes(N, K), make.scales(2, 2)
    compiled = torch.compile(lambda x: kernels.deepgemm_blockscale_linear(x, weight, scale), backend="aot_eager")
    x = torch.randn(M, K).bfloat16()
    with pytest.raises(Exception, match="has no gradient"):
        compiled(x.clone().requires_grad_())
    assert torch.equal(compiled(x), kernels.deepgemm_blockscale_linear(x, weight, scale))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", names())
def test_autocast_changes_no_bit(make, name: str, device: str) -> None:
    operands = placed(make, name, device)

    def run() -> object:
        made = operator_of(name)(*operands)
        return [t for t in operands if isinstance(t, torch.Tensor)] if made is None else made  # what it writes into

    expected = tree_map(lambda t: t.clone(), run())
    with torch.autocast(device, torch.bfloat16):
        found = run()
    for y, z in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert y.dtype is z.dtype and torch.equal(y.flatten().view(torch.uint8), z.flatten().view(torch.uint8))


def test_every_operator_is_checked() -> None:
    registered = {s.name.split("::")[1] for s in torch._C._jit_get_all_schemas() if s.name.startswith("fp8_kernels::")}
    assert registered == {name.split(" ")[0] for name in names()}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_switch_keeps_both_branches(make, backend: str) -> None:
    """dynamic=True, fullgraph=True, one graph for rows on both sides of 32, bits of the eager call."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler; there is no g++ here")
    weight, scale = make.codes(N, K), make.scales(2, 2)
    switch = kernels.dynamic_flashinfer_deepgemm_blockscale_gemm
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: switch(x, weight, scale), dynamic=True, fullgraph=True, backend=backend)
    traced = torch.compile(lambda x: switch(x, weight, scale), dynamic=True, fullgraph=True, backend=keep)
    for m in (31, 32, 5, 40):
        x = torch.randn(m, K, generator=torch.Generator().manual_seed(m)).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), switch(x, weight, scale))
        assert torch.equal(traced(x), switch(x, weight, scale))
    assert len(graphs) == 1, "no recompilation at 32"
    code = "".join(m.code for m in graphs[0].modules() if isinstance(m, torch.fx.GraphModule))
    few = "fp8_kernels.dynamic_flashinfer_deepgemm_blockscale_gemm"
    assert few in code and "fp8_kernels.deepgemm_blockscale_linear" in code and "cond" in code


def test_compiled_batch_invariant_has_one_branch(make) -> None:
    weight, scale = make.codes(N, K), make.scales(2, 2)
    with use_config(Config(batch_invariant=True)):
        compiled = torch.compile(
            lambda x: kernels.dynamic_flashinfer_deepgemm_blockscale_gemm(x, weight, scale),
            fullgraph=True,
            backend="eager",
        )
        x = torch.randn(8, K).bfloat16()
        assert torch.equal(compiled(x), kernels.deepgemm_blockscale_linear(x, weight, scale))


@pytest.mark.parametrize("per_token", [False, True])
def test_compiled_linear_layer(make, per_token: bool) -> None:
    layer = kernels.Fp8LinearOp(use_per_token_if_dynamic=per_token, pad_output=False)
    weight, scale = kernels.scaled_fp8_quant(torch.randn(32, 64), use_per_token_if_dynamic=per_token)
    compiled = torch.compile(
        lambda x: layer.apply(x, weight.t(), scale), dynamic=True, fullgraph=True, backend="aot_eager"
    )
    for m in (3, 19):
        x = torch.randn(m, 64)
        assert torch.equal(compiled(x), layer.apply(x, weight.t(), scale))


def graphs_of(make) -> dict[str, Callable[[], object]]:
    """Every verb that has an operator, called as engines call it."""
    x, a, sa, b, sb = operands(make)
    one, three, scales = torch.ones(1), make.codes(2, N, K), make.scales(2, 2, 2)
    out, cube, made = torch.zeros(M, N), torch.zeros(2, 3, N), calls(make)
    rows, counts = torch.tensor([0, 0, 1, 1, -1, -1], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    wide = torch.zeros(M, N + 3, dtype=torch.bfloat16)[:, :N]
    q, k, k_scale, weights, ks, ke = made["fp8_mqa_logits"][:6]

    quantised = [kernels.nvfp4_quantize(z, one) for z in (x, torch.ones(N, K))]
    four_bits = quantised[0][0], quantised[1][0].t(), quantised[0][1], quantised[1][1]

    def masked() -> torch.Tensor:
        left, right = (a.view(2, 3, K), sa.view(2, 3, 2)), (three, scales)
        kernels.fp8_m_grouped_gemm_nt_masked(left, right, cube, counts, 2)
        return cube

    def contiguous() -> torch.Tensor:
        kernels.m_grouped_fp8_gemm_nt_contiguous((a, sa), (three, scales), out, rows)
        return out

    def dense() -> torch.Tensor:
        kernels.fp8_gemm_nt((a, sa), (b, sb), out)
        return out

    k_grouped, steps, sums = "k_grouped_fp8_gemm_nt_contiguous", *made["k_grouped_fp8_gemm_nt_contiguous"][6:8]

    def into(verb: Callable[..., object], name: str, *rest: object) -> Callable[[], torch.Tensor]:
        """A verb on the operands of its operator: two pairs, the output, and what follows."""
        left, left_scale, right, right_scale, target = made[name][:5]
        return lambda: verb((left, left_scale), (right, right_scale), target, *rest) or target

    return {
        "fp8_gemm_nt_1d1d": into(kernels.fp8_gemm_nt_1d1d, "fp8_gemm_nt_1d1d"),
        k_grouped: into(partial(kernels.k_grouped_fp8_gemm_nt_contiguous, c=sums), k_grouped, (0, K), steps),
        "fp8_gemm_nt_skip_head_mid": into(
            kernels.fp8_gemm_nt_skip_head_mid, "fp8_gemm_nt_skip_head_mid", (N // 4, N // 4, N // 4)
        ),
        "fp8_einsum": into(lambda a, b, out: kernels.fp8_einsum("bhr,hdr->bhd", a, b, out), "fp8_einsum"),
        "bmm_fp8": lambda: kernels.bmm_fp8(*made["bmm_fp8"]),
        "moe_experts": lambda: kernels.moe_experts(*made["moe_experts"]),
        "scaled_fp8_quant": lambda: kernels.scaled_fp8_quant(x, use_per_token_if_dynamic=True),
        "per_token_group_quant_fp8": lambda: kernels.per_token_group_quant_fp8(x, 128, column_major_scales=True),
        "per_token_group_quant_fp8_packed": lambda: kernels.per_token_group_quant_fp8_packed(x),
        "cutlass_scaled_mm": lambda: kernels.cutlass_scaled_mm(a, b.t(), one, one, torch.float32),
        "torch_scaled_mm": lambda: kernels.torch_channelwise_w8a8_scaled_mm(
            qinput=a, weight=b.t(), out_dtype=torch.float32, scale_a=one, scale_b=one
        ),
        "fp8_gemm_nt": dense,
        "fp8_blockscale_gemm_sm90": lambda: kernels.fp8_blockscale_gemm_sm90(x, b, None, sb),
        "silu_and_mul_quant": lambda: kernels.silu_and_mul_quant(x, one),
        "silu_and_mul_per_block_quant": lambda: kernels.silu_and_mul_per_block_quant(x, is_scale_transposed=True),
        "silu_and_mul_masked_post_quant": lambda: kernels.silu_and_mul_masked_post_quant(x.view(2, 3, K), counts),
        "persistent_masked_m_silu_mul_quant": lambda: kernels.persistent_masked_m_silu_mul_quant(
            x.view(2, 3, K), counts
        ),
        "per_token_group_quant_fp8_masked": lambda: kernels.per_token_group_quant_fp8_masked(x.view(2, 3, K), counts),
        "rms_norm_static_fp8_quant": lambda: kernels.rms_norm_static_fp8_quant(x, x[0], one),
        "rmsnorm_quant": lambda: kernels.rmsnorm_quant(x, x[0], one),
        "fused_add_rms_norm_static_fp8_quant": lambda: kernels.fused_add_rms_norm_static_fp8_quant(x, x, x[0], one),
        "fused_add_rmsnorm_quant": lambda: kernels.fused_add_rmsnorm_quant(x, x, x[0], one),
        "rms_norm_dynamic_per_token_quant": lambda: kernels.rms_norm_dynamic_per_token_quant(x, x[0], scale_ub=one)[:2],
        "rms_norm_per_block_quant": lambda: kernels.rms_norm_per_block_quant(x, x[0], residual=x)[:2],
        "rope_quantize_fp8": lambda: kernels.mla_rope_quantize_fp8(
            x.view(M, 4, 64), x[:, :64], x.view(M, 4, 64), x, torch.ones(M, 64), counts.repeat(3)
        ),
        "mxfp8_quantize": lambda: kernels.mxfp8_quantize(x),
        "mxfp8_quantize linear": lambda: kernels.mxfp8_quantize(x, "linear", "even", "e5m2"),
        "mxfp4_quantize": lambda: kernels.mxfp4_quantize(x, "8x4"),
        "nvfp4_quantize": lambda: kernels.nvfp4_quantize(x, torch.ones(1), "linear", True),
        **{name: lambda name=name: getattr(kernels, name)(*made[name]) for name in FORMS},
        "mx_product": lambda: kernels.mm_fp4(*four_bits, one, torch.float16),
        "fp8_blockscale_gemm_sm90 into": lambda: kernels.fp8_blockscale_gemm_sm90(a, b, sa, sb, out=wide),
        "flashinfer_fp8_blockscale_gemm": lambda: kernels.flashinfer_fp8_blockscale_gemm(x, b, sb),
        "deepgemm_blockscale_linear": lambda: kernels.deepgemm_blockscale_linear(x, b, sb),
        "few_rows_blockscale_linear": lambda: kernels.few_rows_blockscale_linear(x[:3], b, sb),
        "m_grouped_fp8_gemm_nt_contiguous": contiguous,
        "fp8_m_grouped_gemm_nt_masked": masked,
        "scaled_grouped_mm": lambda: kernels.scaled_grouped_mm(*made["scaled_grouped_mm"][:5]),
        "fp8_mqa_logits": lambda: kernels.fp8_mqa_logits(q, (k, k_scale), weights, ks, ke),
        "fp8_paged_mqa_logits": lambda: kernels.fp8_paged_mqa_logits(*made["fp8_paged_mqa_logits"][:7]),
        **{name: lambda name=name: in_place(name, made[name]) for name in cache_operands()},
    }


def in_place(name: str, operands: tuple[object, ...]) -> object:
    """What a verb gives, or the operands that it writes into."""
    made = getattr(kernels, name)(*operands)
    return [t for t in operands if isinstance(t, torch.Tensor)] if made is None else made


VERBS = list(graphs_of(NOTHING))


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_decides_inside_a_graph(make, verb: str) -> None:
    """One opaque call in one graph, though nothing was decided before; the bits are those of the plain call."""
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph.code)
        return graph

    call = graphs_of(make)[verb]
    expected = tree_map(lambda t: t.clone(), call())
    context.current().decisions.clear()
    found = torch.compile(call, fullgraph=True, backend=keep)()
    for y, z in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert y.dtype is z.dtype and torch.equal(y.flatten().view(torch.uint8), z.flatten().view(torch.uint8))
    assert len(graphs) == 1 and f"torch.ops.fp8_kernels.{verb.split(' ')[0]}(" in graphs[0]


def test_every_operator_has_a_verb() -> None:
    """But the switch, whose graph holds its two roads (above)."""
    assert {name.split(" ")[0] for name in names()} - {name.split(" ")[0] for name in VERBS} == {
        "dynamic_flashinfer_deepgemm_blockscale_gemm"
    }


@pytest.mark.parametrize("columns", [False, True])
def test_compiled_group_quantiser_with_its_defaults(columns: bool) -> None:
    """Called as engines call it: no option names a float that would be traced."""
    x = torch.randn(33, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)

    def quantised(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize.per_token_group_quant_fp8(z, 128, column_major_scales=columns)

    made = torch.compile(quantised, dynamic=True, fullgraph=True, backend="aot_eager")
    for m in (33, 5, 1):
        (q, scale), (right, right_scale) = made(x[:m]), quantised(x[:m])
        assert torch.equal(q.view(torch.uint8), right.view(torch.uint8)) and torch.equal(scale, right_scale)
