"""From meta over a checkpoint to the first call, on described machines: what is prepared once is not done again."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkpoints as cp
import pytest
import torch
from torch import Tensor

import kernels
from kernels import blockscaled, context, nn, routes
from kernels.backends import eager
from kernels.backends.deep_gemm import symbol
from kernels.config import Config
from kernels.errors import KernelError, ValueRangeError
from kernels.nn import linear as module
from kernels.platform import Machine, use_machine
from oracle.routines import get
from tests.support.fake_blackwell import simulated
from tests.support.operations import operations

N, K = 192, 640
X = torch.randn(5, K, generator=torch.Generator().manual_seed(0)).bfloat16()
ARCHES = ("sm90", "sm100", "sm103", "sm120")
NAME = "model.layers.0.self_attn.o_proj"


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """In float64, rounded to bf16."""
    left = a.double() * a_scale.double().repeat_interleave(128, 1)
    right = b.double() * b_scale.double().repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)
    return (left @ right.t()).bfloat16()


@contextmanager
def machine(arch: str, library: Any, config: Config | None = None) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The machine with a DeepGEMM that multiplies as its contract has it; the weights that it was given."""
    seen: list[tuple[Tensor, Tensor]] = []

    def fp8_gemm_nt(a: Any, b: Any, out: Tensor, **options: bool) -> None:
        (x, xs), (w, ws) = a, b
        packed = arch != "sm90"
        assert (xs.dtype is ws.dtype is torch.int32) is packed and options == {"disable_ue8m0_cast": not packed}
        seen.append(b)
        if packed:
            assert tuple(ws.shape) == (N, -(-K // 512)) and ws.stride() == (1, N)
            xs, ws = (kernels.formulas.unpack_ue8m0(words, K // 128) for words in (xs, ws[::128]))
        out.copy_(product(x, xs, w, ws))

    library.fp8_gemm_nt = fp8_gemm_nt
    alone = {"deep_gemm": "sgl-deep-gemm==0.2.3.post2"}
    with simulated(Machine.described(arch, packages=alone), config, own=("fp8_gemm_nt",)):
        yield seen


def due(arch: str, weight: Tensor, scale: Tensor) -> Tensor:
    """What the layer gives: of requantised codes where the machine takes powers of two."""
    if powers := arch != "sm90":
        whole = weight.float() * scale.float().repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
        weight, scale = kernels.per_block_cast_to_fp8(whole, use_ue8m0=True)
    a, a_scale = kernels.per_token_group_quant_fp8(X, 128, use_ue8m0=powers)
    return product(a, a_scale, weight, scale.float())


def on_meta() -> nn.Fp8Linear:
    with torch.device("meta"):
        return nn.Fp8Linear(torch.empty(N, K, dtype=torch.float8_e4m3fn), torch.empty(2, 5))


def from_file(folder: Path, weight: Tensor, scale: Tensor, kind: str) -> nn.Fp8Linear:
    made = {f"{NAME}.weight": weight, f"{NAME}.weight_scale_inv": scale}
    quantization = cp.FP8_BLOCK
    if kind != "fp8":
        made[f"{NAME}.weight_scale"] = made.pop(f"{NAME}.weight_scale_inv")
        quantization = cp.compressed("block") if kind == "compressed-tensors" else cp.modelopt("FP8_PB_WO")
    if kind == "modelopt":
        made[f"{NAME}.weight_scale"] = scale[:, None, :, None].contiguous()
    return nn.from_checkpoint(cp.write(folder, quantization, made), NAME)


LOADED: dict[str, Callable[[Path, Tensor, Tensor], nn.Fp8Linear]] = {
    "made": lambda _, w, s: nn.Fp8Linear(w, s),
    "assign": lambda _, w, s: assigned(on_meta(), w, s),
    "to_empty": lambda _, w, s: filled(on_meta().to_empty(device="cpu"), w, s),
    "again": lambda _, w, s: filled(nn.Fp8Linear(*cp.linear(N, K, 9, "block")), w, s),
    "after a call": lambda _, w, s: filled(called(nn.Fp8Linear(*cp.linear(N, K, 9, "block"))), w, s),
    "its own state": lambda _, w, s: assigned(on_meta(), **without_layout(nn.Fp8Linear(w, s).state_dict())),
    "fp8": lambda folder, w, s: from_file(folder, w, s, "fp8"),
    "compressed-tensors": lambda folder, w, s: from_file(folder, w, s, "compressed-tensors"),
    "modelopt": lambda folder, w, s: from_file(folder, w, s, "modelopt"),
    "a deep copy": lambda _, w, s: copy.deepcopy(nn.Fp8Linear(w, s)),
    "a pickle": lambda _, w, s: pickled(nn.Fp8Linear(w, s)),
    "scale.data": lambda _, w, s: with_data(called(nn.Fp8Linear(*cp.linear(N, K, 9, "block"))), w, s),
}


def assigned(layer: nn.Fp8Linear, weight: Tensor, weight_scale: Tensor) -> nn.Fp8Linear:
    layer.load_state_dict({"weight": weight, "weight_scale": weight_scale}, assign=True)
    return layer


def filled(layer: nn.Fp8Linear, weight: Tensor, scale: Tensor) -> nn.Fp8Linear:
    layer.load_state_dict({"weight": weight, "weight_scale_inv": scale})
    return layer


def with_data(layer: nn.Fp8Linear, weight: Tensor, scale: Tensor) -> nn.Fp8Linear:
    layer.weight.data, layer.weight_scale.data = weight.clone(), scale.float()
    return layer


def called(layer: nn.Fp8Linear) -> nn.Fp8Linear:
    layer(X)
    return layer


def without_layout(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in state.items() if name != "layout"}


def pickled(layer: nn.Fp8Linear) -> nn.Fp8Linear:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    made: nn.Fp8Linear = torch.load(file, weights_only=False)
    return made


@pytest.mark.parametrize("way", LOADED)
@pytest.mark.parametrize("arch", ARCHES)
def test_from_loading_to_the_first_call(library: Any, tmp_path: Path, arch: str, way: str) -> None:
    """Right, of scales that are no powers of two; the tensors of the first call are those of the second; and the state
    is one that a checkpoint could have."""
    weight, scale = cp.linear(N, K, 1, "block")
    with machine(arch, library) as seen:
        layer = LOADED[way](tmp_path, weight.clone(), scale.clone())
        seen.clear()
        first, second = layer(X), layer(X)
        assert torch.equal(first, due(arch, weight, scale)) and torch.equal(second, first)
        for given in seen:
            assert given[0].data_ptr() == layer.weight.data_ptr()
            assert given[1].data_ptr() == layer.weight_scale.data_ptr()
        state = layer.state_dict()
        assert state["weight_scale"].dtype is torch.float32 and tuple(state["weight_scale"].shape) == (2, 5)
        assert torch.equal(assigned(on_meta(), state["weight"], state["weight_scale"])(X), first)
        assert torch.equal(blockscaled.block_scale(layer.weight_scale, K), state["weight_scale"])


@pytest.mark.parametrize("arch", ARCHES)
def test_operations_of_the_second_call(library: Any, arch: str) -> None:
    """Those of the quantiser, and the allocation of the output: nothing is done to the weight. A verb with float32
    scales packs them in each call (the negative test)."""
    weight, scale = cp.linear(N, K, 1, "block")
    with machine(arch, library):
        library.fp8_gemm_nt = lambda *operands, **options: None
        symbol.cache_clear()
        layer = called(nn.Fp8Linear(weight, scale))
        state = layer.state_dict()
        quantise = tma_quantised if arch == "sm90" else kernels.per_token_group_quant_fp8_packed
        few = operations(lambda: quantise(X, 128)) + 1
        assert operations(lambda: layer(X)) == few
        plain = state["weight"], state["weight_scale"]
        verb = operations(lambda: blockscaled.deepgemm_blockscale_linear(X, *plain, 128, arch != "sm90"))
        assert verb == few if arch == "sm90" else verb > few + 16


def tma_quantised(x: Tensor, group: int) -> object:
    return kernels.per_token_group_quant_fp8(x, group, column_major_scales=True, tma_aligned_scales=True)


@pytest.mark.parametrize("verb", ["dynamic", "deepgemm", "product", "kept linear", "kept product", "few rows"])
def test_a_packed_scale_is_that_scale_everywhere(verb: str) -> None:
    """Where a library reads float32 scales, as on this CPU, the verbs take the packed ones too, with the same bits."""
    weight, scale = cp.linear(N, K, 1, "block", torch.float8_e8m0fnu)
    plain = scale.float()
    packed = kernels.transform_sf_into_required_layout(
        plain, N, K, (1, 128, 128), is_sfa=False, machine=Machine.described("sm100")
    )
    assert torch.equal(blockscaled.block_scale(packed, K), plain)

    def call(scale: Tensor) -> Tensor:
        if verb in ("product", "kept product"):
            a, out = kernels.per_token_group_quant_fp8(X, 128, use_ue8m0=True), torch.zeros(5, N).bfloat16()
            if verb == "product":
                kernels.fp8_gemm_nt(a, (weight, scale), out)
            else:
                blockscaled.prepare_fp8_gemm_nt((weight, scale))(a, out)
            return out
        run: Callable[[Tensor], Tensor] = {
            "dynamic": lambda x: kernels.dynamic_flashinfer_deepgemm_blockscale_gemm(x, weight, scale, 128, True),
            "deepgemm": lambda x: kernels.deepgemm_blockscale_linear(x, weight, scale, 128, True),
            "kept linear": blockscaled.prepare_blockscale_linear(weight, scale, use_deep_gemm_e8m0=True),
            "few rows": lambda x: kernels.fp8_blockscale_gemm_sm90(x, weight, None, scale),
        }[verb]
        return torch.stack([run(X), run(X)])

    assert torch.equal(call(packed), call(plain))
    for wrong in (packed.contiguous(), packed[:, :1], packed[:1], packed.t()):
        with pytest.raises(KernelError):
            call(wrong)


def test_nothing_is_prepared_on_meta_or_twice(library: Any) -> None:
    with machine("sm100", library):
        layer = on_meta()
        layer.process_weights_after_loading()
        assert layer.weight_scale.is_meta and layer.weight_scale.dtype is torch.float32
        weight, scale = cp.linear(N, K, 1, "block")
        assigned(layer, weight, scale).process_weights_after_loading()
        kept = layer.weight, layer.weight_scale
        layer.process_weights_after_loading()
        assert layer.weight is kept[0] and layer.weight_scale is kept[1] and kept[1].dtype is torch.int32
        assert layer.half().weight_scale.dtype is torch.int32


@pytest.mark.parametrize("powers", [False, True])
def test_scales_of_powers_of_two_without_packing(powers: bool) -> None:
    """As on Hopper with UE8M0: the codes are shared where nothing is due; other scales are followed when they are
    loaded, assigned or written; and a first call in inference mode leaves ordinary parameters."""
    weight, scale = cp.linear(N, K, 1, "block", torch.float8_e8m0fnu if powers else torch.float32)
    layer = nn.Fp8Linear(weight, scale, ue8m0=True)
    assert (layer.weight.data_ptr() == weight.data_ptr()) is powers
    right = layer(X)
    other = nn.Fp8Linear(*cp.linear(N, K, 2, "block"), ue8m0=True)
    before = other(X)
    with torch.inference_mode():
        assert torch.equal(filled(other, weight, scale)(X), right) and not torch.equal(before, right)
    assert not other.weight_scale.is_inference()
    with torch.no_grad():
        other.weight_scale.mul_(0.75)
    assert not torch.equal(other(X), right)
    other.weight_scale.data = other.weight_scale.detach() * 0.75
    assert not torch.equal(other(X), right)
    assert torch.equal(kernels.ceil_to_ue8m0(other.weight_scale), other.weight_scale)


def test_bad_scales_are_refused_by_name_at_the_first_call() -> None:
    layer = nn.Fp8Linear(*cp.linear(N, K, 1, "block"), ue8m0=True, name="down")
    layer.weight_scale.data.fill_(torch.nan)
    layer._ready.clear()
    with pytest.raises(ValueRangeError, match="weight_scale of down holds nan"):
        layer(X)


def test_a_capture_prepares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = assigned(nn.Fp8Linear(*cp.linear(N, K, 2, "block"), ue8m0=True), *cp.linear(N, K, 1, "block"))
    monkeypatch.setattr(module.checks, "capturing", lambda device: True)
    with pytest.raises(KernelError, match="before the capture"):
        layer(X)


def test_threads_prepare_once(library: Any) -> None:
    """Eight first calls at once: one requantises, and every answer is right."""
    weight, scale = cp.linear(N, K, 1, "block")
    layer = assigned(nn.Fp8Linear(*cp.linear(N, K, 2, "block"), ue8m0=True), weight, scale)
    right, made, gate = nn.Fp8Linear(weight, scale, ue8m0=True)(X), list[Tensor](), threading.Barrier(8)

    def first() -> None:
        gate.wait()
        made.append(layer(X))

    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8 and all(torch.equal(y, right) for y in made)


def test_warm_up() -> None:
    """The layer is called with so many rows; experts with tokens for their own."""
    rows = list[int]()
    layer = nn.Fp8Linear(*cp.linear(N, K, 1, "block"))
    layer.register_forward_hook(lambda _, inputs, output: rows.append(inputs[0].shape[0]))
    layer.process_weights_after_loading()
    layer.process_weights_after_loading(warm_up=(1, 40))
    assert rows == [1, 40]
    with pytest.raises(KernelError, match="rows must be a positive integer"):
        layer.process_weights_after_loading(warm_up=(0,))
    codes, scales = cp.linear(256, 128, 1, "channel"), cp.linear(128, 128, 1, "channel")
    w13, w13_scale = codes[0][None].repeat(2, 1, 1), codes[1].view(1, -1).repeat(2, 1)
    w2, w2_scale = scales[0][None].repeat(2, 1, 1), scales[1].view(1, -1).repeat(2, 1)
    experts = nn.Fp8Experts(w13, w13_scale, w2, w2_scale, first_expert=4)
    experts.register_forward_hook(lambda _, inputs, output: rows.append(int(inputs[2].min())))
    experts.process_weights_after_loading(warm_up=(3,))
    assert rows == [1, 40, 4]


def test_a_layer_has_its_own_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned once; one that cannot serve says why, and nothing takes its place; the other layers keep theirs."""
    weight, scale = cp.linear(48, 80, 2, "channel")
    layer, other = nn.Fp8Linear(weight, scale, kind="channel"), nn.Fp8Linear(weight, scale, kind="channel")
    x, planned = X[:, :80].contiguous(), list[str]()
    decide = routes._decide
    monkeypatch.setattr(routes, "_decide", lambda op, *key: planned.append(op) or decide(op, *key))
    with context.use(), kernels.trace() as calls:
        right = other(x)
        layer.backend = "linear=eager,quant_token=eager"
        assert torch.equal(layer(x), right)
        first = len(planned)
        assert torch.equal(layer(x), right) and torch.equal(other(x), right) and len(planned) == first
        layer.backend = "linear=cutlass"
        with pytest.raises(KernelError, match="only cutlass is asked for"):
            layer(x)
        assert torch.equal(other(x), right)
        with pytest.raises(KernelError, match="unknown backend 'fast'"):
            layer.backend = "fast"
        layer.backend = None
        assert torch.equal(layer(x), right) and calls
    layer.backend = "eager"
    with pytest.raises(Exception, match="compiled graph plans when it runs"):
        torch.compile(layer, backend="eager", fullgraph=True)(x)
    assert copy.deepcopy(layer).backend == "eager"


def test_every_layer_of_a_model_is_processed() -> None:
    """Of two that need the same kernels one is warmed up."""
    layers = [nn.Fp8Linear(*cp.linear(n, K, seed, "block")) for seed, n in enumerate((N, N, 2 * N))]
    rows = list[tuple[int, int]]()
    for layer in layers:
        layer.register_forward_hook(lambda _, inputs, output: rows.append((inputs[0].shape[0], output.shape[1])))
    nn.process_weights_after_loading(torch.nn.Sequential(*layers), warm_up=(2,))
    assert rows == [(2, N), (2, 2 * N)]


@pytest.mark.parametrize("kind", ["block", "channel"])
def test_experts_from_meta(kind: str) -> None:
    def experts(device: str) -> nn.Fp8Experts:
        shapes = {"w13": (2, 256, 128), "w2": (2, 128, 128)}
        made: dict[str, Tensor] = {}
        for seed, (name, (e, n, k)) in enumerate(shapes.items()):
            parts = [cp.linear(n, k, 10 * seed + i, kind) for i in range(e)]
            made[name] = torch.stack([w.view(torch.uint8) for w, _ in parts]).view(torch.float8_e4m3fn).to(device)
            scale = torch.stack([s for _, s in parts]).to(device)
            made[f"{name}_scale"] = scale if kind == "block" else scale.flatten(1)
        return nn.Fp8Experts(**made)

    layer, right = experts("meta"), experts("cpu")
    layer.process_weights_after_loading()
    x, weights, ids = X[:, :128].contiguous(), torch.ones(5, 2), torch.tensor([[0, 1]] * 5)
    for loaded in (layer.to_empty(device="cpu"), experts("meta")):
        loaded.load_state_dict(right.state_dict(), assign=loaded.w13.is_meta)
        assert torch.equal(loaded(x, weights, ids), right(x, weights, ids))


@pytest.mark.parametrize("arch", ["sm90", "sm89", "sm120"])
@pytest.mark.parametrize("kind", ["tensor", "channel"])
def test_scales_of_tensors_and_channels_from_meta(kind: str, arch: str) -> None:
    weight, scale = cp.linear(48, 80, 2, kind)
    with use_machine(Machine.described(arch, torch_version=torch.__version__)):
        with torch.device("meta"):
            layer = nn.Fp8Linear(torch.empty(48, 80, dtype=torch.float8_e4m3fn), torch.empty(scale.shape), kind=kind)
        filled(layer.to_empty(device="cpu"), weight, scale)
        x = X[:, :80].contiguous()
        assert torch.equal(layer(x), nn.Fp8Linear(weight, scale, kind=kind)(x))


@contextmanager
def grouped(arch: str, library: Any, release: str) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The machine with DeepGEMM's grouped product, which multiplies the words as they lie; what it was given."""
    seen: list[tuple[Tensor, Tensor]] = []

    def product(a: Any, b: Any, out: Tensor, m_indices: Tensor, disable_ue8m0_cast: bool) -> None:
        (x, xs), (w, ws) = a, b
        packed = arch != "sm90"
        assert (xs.dtype is ws.dtype is torch.int32) is packed is not disable_ue8m0_cast
        seen.append(b)
        if packed:
            lead = -(-x.shape[0] // 4) * 4
            assert xs.stride(0) == 1 and (xs.shape[1] == 1 or xs.stride(1) == lead)
            xs, ws = (kernels.formulas.unpack_ue8m0(words, x.shape[1] // 128) for words in (xs, ws[:, ::128]))
        eager.grouped_contiguous(x, xs, w, ws, out, m_indices, disable_ue8m0_cast)

    library.m_grouped_fp8_gemm_nt_contiguous = product
    library.get_mk_alignment_for_contiguous_layout = lambda: 128
    with simulated(Machine.described(arch, packages={"deep_gemm": release}), own=("grouped_contiguous", "alignment")):
        yield seen


@pytest.mark.parametrize("arch", ARCHES)
def test_experts_of_deep_gemm(library: Any, arch: str) -> None:
    """Judged by the contract of the layer, under powers of two where the machine takes them; packed once, and followed
    when other weights are loaded. A state has float32 scales."""
    given: dict[str, Tensor] = {}
    for seed, (name, (e, n, k)) in enumerate({"w13": (2, 256, 640), "w2": (2, 640, 128)}.items()):
        parts = [cp.linear(n, k, 10 * seed + i, "block") for i in range(e)]
        given[name] = torch.stack([w.view(torch.uint8) for w, _ in parts]).view(torch.float8_e4m3fn)
        given[f"{name}_scale"] = torch.stack([s for _, s in parts])
    weights, ids = torch.full((5, 2), 0.5), torch.tensor([[0, 1]] * 4 + [[-1, 1]])
    powers = arch != "sm90"
    with grouped(arch, library, "sgl-deep-gemm==0.2.3.post2") as seen:
        with torch.device("meta"):
            layer = nn.Fp8Experts(**{name: torch.empty_like(x, device="meta") for name, x in given.items()})
        layer.process_weights_after_loading()
        assert layer.ue8m0 is powers and layer.w13_scale.is_meta
        layer.load_state_dict({name: x.clone() for name, x in given.items()}, assign=True)
        first, second = layer(X, weights, ids), layer(X, weights, ids)
        assert torch.equal(first, second) and len(seen) == 4
        assert seen[2][1].data_ptr() == layer.w13_scale.data_ptr() and seen[3][0].data_ptr() == layer.w2.data_ptr()
        state = {name: x.clone() for name, x in layer.state_dict().items()}
        layer.load_state_dict({**state, "w2_scale": state["w2_scale"] * 2})
        assert torch.equal(layer(X, weights, ids), first * 2)
        assert state["w13_scale"].dtype is state["w2_scale"].dtype is torch.float32
    operands = {name: x for name, x in state.items() if "w13" in name or "w2" in name and "input" not in name}
    assert all(torch.equal(operands[name], given[name]) is not powers for name in ("w13_scale", "w2_scale"))
    options = {
        "recipe": "vllm_group_ue8m0_bits" if powers else None,
        "activation_rounding": "PRODUCT",
        "combine": "STORED",
    }
    inputs = {"x": X, **operands, "topk_ids": ids, "topk_weights": weights}
    judge = get("moe_fp8")
    for recipe, right in ((options["recipe"], True), (None if powers else "vllm_group_ue8m0_bits", False)):
        verdict = judge.judge(inputs, first, arch="cpu", numerics="ieee32.any", **options | {"recipe": recipe})
        assert verdict.status.is_failure is not right, verdict.summary
    with pytest.raises(KernelError, match="ue8m0=True"):
        packed = kernels.layout.pack_ue8m0(torch.ones(2, 256, 5))
        kernels.moe_block_scaled(X, given["w13"], packed, given["w2"], given["w2_scale"], weights, ids)
