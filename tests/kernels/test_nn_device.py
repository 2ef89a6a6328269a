"""Layers on a GPU: judged live, sliced over ranks, compiled, captured in a graph, and called by several threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import checkpoints as cp
import pytest
import torch
from torch import Tensor

import kernels
from kernels import context, nn
from kernels.config import current_config, use_config
from kernels.errors import DtypeError, InputError, NoBackendError
from kernels.nn.linear import _product_dtype
from kernels.plan import Problem, plan
from oracle.routines import get
from oracle.verdict.compare import Status

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here")
DEVICE, ARCH = "cuda", "sm90"
MOE, ATTENTION = "model.layers.2.mlp", "model.layers.0.self_attn"
ONE = torch.ones(1)
GOOD = (Status.PASSED, Status.MISTRUSTED)


def needs(op: str, **extents: int) -> None:
    """Skip where no library serves an operation, with the reasons of the plan."""
    try:
        plan(Problem(op, device=DEVICE, **extents))  # type: ignore[arg-type]  # extents are integers
    except NoBackendError as error:
        pytest.skip(str(error))


def data(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def status(contract: str, given: dict[str, Tensor], out: Tensor, **options: object) -> Status:
    here = {name: t.detach().to(DEVICE).contiguous() for name, t in given.items()}
    return get(contract).judge(here, out.contiguous(), arch=ARCH, numerics=None, **options).status


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Checkpoint, dict[str, Tensor]]:
    folder: Path = tmp_path_factory.mktemp("device")
    made = cp.deepseek(folder)
    return nn.Checkpoint(folder), made


class TestLinear:
    """Judged as on the CPU, against the schedules of the architecture."""

    @pytest.mark.parametrize("rows", [1, 5, 40, 200])
    @pytest.mark.parametrize(("n", "k"), [(256, 512), (100, 200), (576, 384)])
    def test_block(self, rows: int, n: int, k: int) -> None:
        needs("fp8_gemm_nt", n=-(-n // 64) * 64, k=-(-k // 128) * 128)
        weight, scale = cp.linear(n, k, 1, "block")
        layer, x = nn.Fp8Linear(weight, scale).to(DEVICE), data(rows, k)
        a, a_scale = kernels.per_token_group_quant_fp8(kernels.layout.pad_k(x), 128)
        given = {"a": a[:, :k], "a_scale": a_scale, "b": weight, "b_scale": scale}
        assert status("fp8_gemm_nt", given, layer(x)) in GOOD
        assert status("fp8_gemm_nt", {**given, "b_scale": scale * 2}, layer(x)) is Status.FAILED

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_other_dtypes(self, dtype: torch.dtype) -> None:
        """The product is written in float32 where a library writes that, else in bf16; then the bias, in float32."""
        needs("fp8_gemm_nt", n=256, k=512)
        weight, scale = cp.linear(256, 512, 1, "block")
        x, bias = data(5, 512, dtype=dtype), data(256, dtype=dtype)
        own = nn.Fp8Linear(weight, scale, out_dtype=_product_dtype(DEVICE, 256, 512, dtype, True)).to(DEVICE)
        y = nn.Fp8Linear(weight, scale, bias.cpu()).to(DEVICE)(x)
        assert y.dtype == dtype and torch.equal(y, (own(x).float() + bias.float()).to(dtype))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("kind", ["tensor", "channel"])
    def test_tensor_and_channel(self, dtype: torch.dtype, kind: str) -> None:
        weight, scale = cp.linear(272, 528, 2, kind)
        bias, x = data(272, dtype=dtype), data(5, 528, dtype=dtype)
        layer = nn.Fp8Linear(weight, scale, bias.cpu()).to(DEVICE)
        a, a_scale = kernels.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        b_scale = scale.view(1, -1) if kind == "channel" else scale
        given = {"a": a, "a_scale": a_scale, "b": weight, "b_scale": b_scale, "bias": bias}
        assert status("cutlass_scaled_mm", given, layer(x)) in GOOD

    def test_a_device_to_load_to(self, model: tuple[nn.Checkpoint, dict[str, Tensor]]) -> None:
        name = "model.layers.0.mlp.down_proj"
        there = nn.from_checkpoint(model[0], name, device=DEVICE, parallel="row", rank=1, world=2)
        moved = nn.from_checkpoint(model[0], name, parallel="row", rank=1, world=2).to(DEVICE)
        assert torch.equal(there.weight.view(torch.uint8), moved.weight.view(torch.uint8))
        assert torch.equal(there.weight_scale, moved.weight_scale) and there.weight_scale.is_cuda


class TestRanks:
    """Slices on one GPU."""

    @pytest.mark.parametrize("rows", [3, 64])
    def test_columns_and_rows(self, model: tuple[nn.Checkpoint, dict[str, Tensor]], rows: int) -> None:
        needs("fp8_gemm_nt", n=256, k=384)
        source, name = model[0], "model.layers.0.mlp.down_proj"
        whole, x = nn.from_checkpoint(source, name, device=DEVICE), data(rows, 384)
        for parallel in ("column", "row"):
            parts = [
                nn.from_checkpoint(source, name, parallel=parallel, rank=r, world=2, device=DEVICE) for r in (0, 1)
            ]
            if parallel == "column":
                assert torch.equal(torch.cat([part(x) for part in parts], 1), whole(x))
                continue
            for rank, part in enumerate(parts):
                masked, mine = torch.zeros_like(x), slice(192 * rank, 192 * (rank + 1))
                masked[:, mine] = x[:, mine]
                assert torch.equal(part(x[:, mine]), whole(masked))

    def test_experts(self, model: tuple[nn.Checkpoint, dict[str, Tensor]]) -> None:
        needs("grouped_contiguous", n=512, k=256, groups=2)
        weights, x = torch.rand(6, 2, device=DEVICE), data(6, 256)
        ids = torch.tensor([[0, 1]] * 6, device=DEVICE)
        whole, *parts = (
            nn.Fp8Experts.from_checkpoint(
                model[0], f"{MOE}.experts", 2, rank=r, world=w, out_dtype=torch.float32, device=DEVICE
            )
            for r, w in ((0, 1), (0, 2), (1, 2))
        )
        assert torch.equal(nn.sum_ranks([part(x, weights, ids) for part in parts]), whole(x, weights, ids))
        given = {"x": x, "topk_weights": weights, "topk_ids": ids}
        given |= {name: getattr(whole, name) for name in ("w13", "w13_scale", "w2", "w2_scale")}
        y = whole(x, weights, ids).bfloat16()
        assert status("moe_fp8", given, y, activation_rounding="PRODUCT") in GOOD
        given["w2_scale"] = whole.w2_scale.flip(0)
        assert status("moe_fp8", given, y, activation_rounding="PRODUCT") is Status.FAILED


def layers(source: nn.Checkpoint) -> dict[str, torch.nn.Module]:
    """A layer of each kind."""
    weight, scale = cp.linear(272, 256, 2, "channel")
    return {
        "block": nn.from_checkpoint(source, f"{ATTENTION}.q_a_proj", f"{ATTENTION}.kv_a_proj_with_mqa"),
        "channel": nn.Fp8Linear(weight, scale, torch.ones(272)),
        "mlp": nn.Fp8Mlp.from_checkpoint(source, "model.layers.0.mlp", rank=1, world=2),
        "moe": nn.Fp8Moe.from_checkpoint(source, MOE),
    }


@pytest.fixture(params=["block", "channel", "mlp", "moe"])
def layer(request: pytest.FixtureRequest, model: tuple[nn.Checkpoint, dict[str, Tensor]]) -> torch.nn.Module:
    needs("grouped_contiguous", n=512, k=256, groups=2)
    needs("fp8_gemm_nt", n=320, k=256)
    return layers(model[0])[request.param].to(DEVICE)


class TestUse:
    """What an engine does with a layer."""

    def test_compiled(self, layer: torch.nn.Module) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        for rows in (3, 64):
            x = data(rows, 256)
            y, expected = compiled(x), layer(x)
            # inductor contracts what stands between the operators to fused multiply-adds: not always the same bits
            assert y.dtype == expected.dtype and torch.allclose(
                y, expected, rtol=2**-6, atol=2**-6 * expected.abs().max()
            )
        eager = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch._dynamo.reset()
        assert torch.equal(eager(data(3, 256)), layer(data(3, 256)))
        torch._dynamo.reset()

    def test_graph(self, layer: torch.nn.Module) -> None:
        """Replays follow the input that lies in the captured memory."""
        x, other = data(5, 256), data(5, 256, seed=8)
        expected, of_other = layer(x).clone(), layer(other).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
        assert torch.equal(y, expected) and not torch.equal(expected, of_other)
        x.copy_(other)
        graph.replay()
        assert torch.equal(y, of_other)

    def test_threads(self, layer: torch.nn.Module) -> None:
        """Each with a stream of its own."""
        inputs = [data(5, 256, seed=seed) for seed in range(4)]
        expected = [layer(x) for x in inputs]
        torch.cuda.synchronize()

        def work(number: int) -> bool:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                answers = [layer(inputs[number]) for _ in range(20)]
                stream.synchronize()
            return all(torch.equal(answer, expected[number]) for answer in answers)

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(4)))

    @pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to("cpu").to(DEVICE)], ids=["half", "moved"])
    def test_moves(self, layer: torch.nn.Module, cast: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
        before = {name: value.clone() for name, value in layer.state_dict().items() if value.element_size() == 1}
        after = cast(layer).state_dict()
        assert before and all(
            torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)) for name in before
        )
        assert layer(data(3, 256)).isfinite().all()

    def test_no_call_waits(self, layer: torch.nn.Module) -> None:
        """torch raises at a synchronisation that it sees."""
        x = data(5, 256)
        layer(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


class TestAfterLoading:
    """Prepared once, warmed up, and never stale."""

    @pytest.mark.parametrize("ue8m0", [False, True])
    def test_from_meta(self, ue8m0: bool) -> None:
        needs("fp8_gemm_nt", n=256, k=512)
        weight, scale = (t.to(DEVICE) for t in cp.linear(256, 512, 1, "block"))
        right, x = nn.Fp8Linear(weight, scale, ue8m0=ue8m0)(data(40, 512)), data(40, 512)
        with torch.device("meta"):
            layer = nn.Fp8Linear(torch.empty(256, 512, dtype=weight.dtype), torch.empty(2, 4), ue8m0=ue8m0)
        layer.load_state_dict({"weight": weight, "weight_scale": scale}, assign=True)
        layer.process_weights_after_loading()
        assert torch.equal(layer(x), right)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer(x)
        graph.replay()
        assert torch.equal(captured, right)

    def test_a_changed_weight(self) -> None:
        """Kept plans and verbs, with the bits of a call that keeps nothing; weights share addresses in turn."""
        needs("fp8_gemm_nt", n=256, k=512)
        x, linear = data(40, 512), kernels.deepgemm_blockscale_linear

        def uncached(weight: Tensor, scale: Tensor) -> Tensor:
            with context.use(), use_config(replace(current_config(), fast_paths=False)):
                return linear(x, weight, scale)

        weight, scale = (t.to(DEVICE) for t in cp.linear(256, 512, 1, "block"))
        kept = kernels.prepare_blockscale_linear(weight, scale)
        kept(x), kept(x)
        weight.copy_(cp.linear(256, 512, 2, "block")[0])
        assert torch.equal(kept(x), uncached(weight, scale))
        weight.data = weight.to(torch.float8_e5m2)
        with pytest.raises(DtypeError):
            kept(x)
        del weight
        with pytest.raises(InputError, match="replaced or released"):
            kept(x)
        addresses = set[int]()
        for seed in range(40):
            weight = cp.linear(256, 512, seed, "block")[0].to(DEVICE)
            addresses.add(weight.data_ptr())
            assert torch.equal(linear(x, weight, scale), uncached(weight, scale))
            del weight
        assert len(addresses) < 20

    @pytest.mark.parametrize("kind", ["mxfp8", "mxfp4", "nvfp4"])
    def test_block_scaled(self, kind: str) -> None:
        """Codes of the input by the public quantisers, which their own contracts judge; the product by its contract."""
        needs("mx_product")
        packed, width = (1, 32) if kind == "mxfp8" else (2, 16 if kind == "nvfp4" else 32)
        codes = torch.randint(0, 120, (256, 512 // packed), dtype=torch.uint8, device=DEVICE)
        scale = torch.full((256, 512 // width), 50 if kind == "nvfp4" else 120, dtype=torch.uint8, device=DEVICE)
        weight = codes.view(torch.float8_e4m3fn) if packed == 1 else codes
        twice = {key: torch.tensor([0.002], device=DEVICE) for key in ("weight_scale_2", "input_scale")}
        layer, x = nn.MxLinear(weight, scale, kind=kind, **(twice if kind == "nvfp4" else {})), data(40, 512)
        if kind == "nvfp4":
            q, a_scale = kernels.nvfp4_quantize(x, twice["input_scale"], is_global_scale_inversed=True)
        else:
            q, a_scale = (kernels.mxfp8_quantize if kind == "mxfp8" else kernels.mxfp4_quantize)(x)
        dtype = torch.float8_e4m3fn if kind == "nvfp4" else torch.float8_e8m0fnu
        given = {"mat_a": q, "mat_b": weight.t(), "scale_a": a_scale.view(dtype)}
        given["scale_b"] = kernels.swizzle_scale(scale).view(dtype)
        if kind == "nvfp4":
            given |= {"global_scale_a": twice["input_scale"], "global_scale_b": twice["weight_scale_2"]}
        assert get("scaled_mm").judge(given, layer(x), arch=ARCH, numerics=None).status in GOOD


@pytest.mark.parametrize("kind", ["block", "channel", "mxfp8", "nvfp4"])
def test_nothing_compiles_in_serving(kind: str) -> None:
    """After a warm-up for so many rows, by the hook on Triton's compiler."""
    most, k = 160, 512
    if kind in ("block", "channel"):
        layer: nn.Fp8Linear | nn.MxLinear = nn.Fp8Linear(*cp.linear(256, k, 1, kind))
    else:
        one = {"weight_scale_2": torch.ones(1), "input_scale": torch.ones(1)} if kind == "nvfp4" else {}
        quantised = kernels.mxfp8_quantize if kind == "mxfp8" else partial(kernels.nvfp4_quantize, global_scale=ONE)
        layer = nn.MxLinear(*quantised(torch.randn(256, k).bfloat16(), layout="linear"), kind=kind, **one)
    layer = layer.to(DEVICE)
    layer.process_weights_after_loading(warm_up=most)
    with kernels.compilations() as compiled:
        for rows in range(1, most + 1):
            layer(data(rows, k))
    assert compiled == []
