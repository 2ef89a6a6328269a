"""Layers of MXFP8, MXFP4 and NVFP4: from checkpoints and from meta to the first call, on described machines."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints as cp
import pytest
import torch
from torch import Tensor

import kernels
from kernels import nn
from kernels.errors import CheckpointError, DtypeError, KernelError, OptionError, ShapeError
from kernels.mx_blocks import FORMATS
from oracle.routines import get
from oracle.verdict.compare import Status
from tests.support.fake_blackwell import described
from tests.support.operations import operations

N, K = 160, 256
NAME = "model.layers.0.mlp.down_proj"
X = torch.randn(5, K, generator=torch.Generator().manual_seed(0)).bfloat16()
KINDS, ARCHES = tuple(FORMATS), ("sm90", "sm100", "sm103", "sm120")
BIAS = torch.randn(N, generator=torch.Generator().manual_seed(3)).bfloat16()
GOOD = (Status.PASSED, Status.MISTRUSTED)


def stored(kind: str, seed: int = 1, rows: int = N) -> dict[str, Tensor]:
    """What a checkpoint has: codes, scales row by row, and of NVFP4 two scales of tensors."""
    form, g = FORMATS[kind], torch.Generator().manual_seed(seed)
    made = {"weight": torch.randint(0, 256, (rows, K // form.packed), dtype=torch.uint8, generator=g)}
    if kind == "mxfp8":
        made["weight"] = torch.randn(rows, K, generator=g).to(torch.float8_e4m3fn)
    low, high = (40, 60) if kind == "nvfp4" else (120, 130)
    made["weight_scale"] = torch.randint(low, high, (rows, K // form.width), dtype=torch.uint8, generator=g)
    if kind == "nvfp4":
        made |= {"weight_scale_2": torch.tensor([0.03125 * seed]), "input_scale": torch.tensor([0.0015])}
    return made


def made(kind: str, seed: int = 1, **more: Any) -> nn.MxLinear:
    return nn.MxLinear(**stored(kind, seed), kind=kind, **more)


def on_meta(kind: str) -> nn.MxLinear:
    return nn.MxLinear(**{name: x.to("meta") for name, x in stored(kind).items()}, kind=kind)


def good(kind: str, tensors: dict[str, Tensor], x: Tensor, y: Tensor, bias: Tensor | None = None) -> bool:
    """By the contract of the product, of codes by the public quantisers (their own contracts judge these)."""
    if kind == "nvfp4":
        q, scale = kernels.nvfp4_quantize(x, tensors["input_scale"], is_global_scale_inversed=True)
    else:
        q, scale = (kernels.mxfp8_quantize if kind == "mxfp8" else kernels.mxfp4_quantize)(x)
    dtype = FORMATS[kind].scale
    operands = {"mat_a": q, "mat_b": tensors["weight"].t(), "scale_a": scale.view(dtype)}
    operands["scale_b"] = kernels.swizzle_scale(tensors["weight_scale"]).view(dtype)
    if kind == "nvfp4":
        operands |= {"global_scale_a": tensors["input_scale"], "global_scale_b": tensors["weight_scale_2"]}
    if bias is not None:
        operands["bias"] = bias
    return get("scaled_mm").judge(operands, y, arch="cpu").status in GOOD


def written(folder: Path, layout: str, *names: str, seeds: tuple[int, ...] = (1,)) -> tuple[str, Path]:
    """A checkpoint of a layout, and the kind of its layers."""
    producer, kind = layout.split(" ")
    tensors: dict[str, Tensor] = {}
    for name, seed in zip(names or (NAME,), seeds, strict=True):
        own = {**stored(kind, seed), "bias": BIAS.clone()}
        if producer == "modelopt" and kind == "nvfp4":
            own["weight_scale"] = own["weight_scale"].view(torch.float8_e4m3fn)
            own |= {key: own[key].reshape(()) for key in ("weight_scale_2", "input_scale")}
        elif producer == "compressed-tensors" and kind != "mxfp8":
            own["weight_packed"] = own.pop("weight")
        if producer == "compressed-tensors" and kind == "nvfp4":
            own["weight_global_scale"] = own.pop("weight_scale_2").reciprocal()
            own["input_global_scale"] = own.pop("input_scale").reciprocal()
        tensors |= {f"{name}.{key}": x.contiguous() for key, x in own.items()}
    config = {
        "modelopt nvfp4": cp.modelopt("NVFP4"),
        "modelopt mxfp8": cp.modelopt("MXFP8"),
        "compressed-tensors nvfp4": cp.compressed_blocks(4, "tensor_group", 16),
        "compressed-tensors mxfp4": cp.compressed_blocks(4, "group", 32),
        "compressed-tensors mxfp8": cp.compressed_blocks(8, "group", 32),
    }[layout]
    return kind, cp.write(folder, config, tensors)


LAYOUTS = (
    "modelopt nvfp4",
    "modelopt mxfp8",
    "compressed-tensors nvfp4",
    "compressed-tensors mxfp4",
    "compressed-tensors mxfp8",
)


@pytest.mark.parametrize("arch", [*ARCHES, "cpu"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_a_checkpoint_to_the_first_call(tmp_path: Path, layout: str, arch: str) -> None:
    """And the same by a state that is loaded into a layer on meta."""
    kind, folder = written(tmp_path, layout)
    tensors = stored(kind)
    if arch == "cpu":
        assert good(kind, tensors, X, nn.MxLinear.from_checkpoint(folder, NAME)(X), BIAS)
        return
    with described(arch, cp.PACKAGES) as libraries:
        layer = nn.MxLinear.from_checkpoint(folder, NAME)
        layer.bias = None  # which no library but torch adds
        y = layer(X)
        assert good(kind, tensors, X, y) and bool(libraries.calls) == (arch != "sm90")  # there Triton emulates
        other = on_meta(kind)
        other.load_state_dict(layer.state_dict(), assign=True)
        assert torch.equal(other(X), y)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_operations_of_the_second_call(kind: str, arch: str) -> None:
    """Those of the quantiser and the product: the scales of the weight are not laid out again. A layer that lays them
    out in each call makes more (the negative test)."""
    layer, form = made(kind), FORMATS[kind]

    def alone() -> None:
        q, weight, scale, tiled = layer._operands(X, layer.weight_scale.view(form.scale))
        kernels.scaled_mm(q, weight, scale, tiled, layer.input_scale, layer.weight_scale_2, None, X.dtype)

    with described(arch, cp.PACKAGES):
        layer(X)
        few = operations(alone)
        assert operations(lambda: layer(X)) <= few + 3  # views of the input and the output
        raw = layer._by_row("weight_scale")
        assert operations(lambda: (alone(), kernels.swizzle_scale(raw))) > few + 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer(kind: str, dtype: torch.dtype) -> None:
    tensors, x = stored(kind), X.to(dtype)
    y = made(kind, bias=BIAS)(x[None])
    assert y.shape == (1, 5, N) and y.dtype is dtype and good(kind, tensors, x, y[0], BIAS)
    assert made(kind)(x[:0]).shape == (0, N)
    assert made(kind, out_dtype=torch.float32)(x).dtype is torch.float32


def wrong_order(tensors: dict[str, Tensor]) -> None:
    tensors["weight_scale"] = tensors["weight_scale"].roll(1, 0)


def nibbles(tensors: dict[str, Tensor]) -> None:
    codes = tensors["weight"]
    tensors["weight"] = (codes >> 4) | (codes << 4)


def inverted(tensors: dict[str, Tensor]) -> None:
    tensors["weight_scale_2"] = tensors["weight_scale_2"].reciprocal()


@pytest.mark.parametrize(
    ("kind", "fault"),
    [("mxfp8", wrong_order), ("mxfp4", wrong_order), ("nvfp4", wrong_order), ("mxfp4", nibbles), ("nvfp4", inverted)],
)
def test_what_goes_wrong_in_a_loader_is_seen(kind: str, fault: Callable[[dict[str, Tensor]], None]) -> None:
    """The negative test."""
    tensors = stored(kind)
    fault(tensors)
    assert not good(kind, stored(kind), X, nn.MxLinear(**tensors, kind=kind)(X))


CHANGES: dict[str, Callable[[nn.MxLinear, dict[str, Tensor]], object]] = {
    "load": lambda layer, new: layer.load_state_dict(new),
    "assign": lambda layer, new: layer.load_state_dict(new, assign=True),
    "codes in place": lambda layer, new: layer.weight.view(torch.uint8).copy_(new["weight"].view(torch.uint8)),
    "codes unseen": lambda layer, new: layer.weight.data.view(torch.uint8).copy_(new["weight"].view(torch.uint8)),
    "scale.data": lambda layer, new: setattr(layer.weight_scale, "data", new["weight_scale"].clone()),
    "scale unseen": lambda layer, new: layer.weight_scale.data.copy_(kernels.swizzle_scale(new["weight_scale"])),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_stale(kind: str, change: str) -> None:
    """A change of the layer is in its state and in its next call."""
    layer, new = made(kind), stored(kind, 2)
    before = layer(X)
    CHANGES[change](layer, {key: x.clone() for key, x in new.items()})
    y, state = layer(X), layer.state_dict()
    assert not torch.equal(y, before)
    assert good(kind, {key: x for key, x in state.items() if key != "layout"}, X, y)
    if kind == "nvfp4":
        layer.weight_scale_2.data.mul_(2)
        assert torch.equal(layer(X), y * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_states(kind: str) -> None:
    layer = made(kind, bias=BIAS)
    y = layer(X)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.half().float()):
        assert torch.equal(other(X), y)
    empty = on_meta(kind)
    empty.process_weights_after_loading()
    assert empty.weight_scale.is_meta and empty.weight_scale.dim() == 2
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(stored(kind))
    assert torch.equal(filled(X), made(kind)(X))
    assert torch.equal(layer.state_dict()["weight_scale"], stored(kind)["weight_scale"])


@pytest.mark.parametrize("layout", ["compressed-tensors mxfp4", "modelopt nvfp4"])
def test_ranks_and_fused_layers(tmp_path: Path, layout: str) -> None:
    """Column-parallel outputs beside each other are the whole layer's; row-parallel ones are those of zeros outside."""
    kind, folder = written(tmp_path, layout)
    whole = nn.MxLinear.from_checkpoint(folder, NAME)
    parts = [nn.MxLinear.from_checkpoint(folder, NAME, parallel="column", rank=r, world=2) for r in range(2)]
    assert torch.equal(torch.cat([part(X) for part in parts], dim=1), whole(X))
    first = nn.MxLinear.from_checkpoint(folder, NAME, parallel="row", rank=0, world=2)
    assert torch.equal(first(X[:, : K // 2].contiguous()), whole(torch.nn.functional.pad(X[:, : K // 2], (0, K // 2))))
    names = "model.layers.0.gate_proj", "model.layers.0.up_proj"
    _, both = written(tmp_path / "both", layout, *names, seeds=(1, 1))
    assert torch.equal(nn.MxLinear.from_checkpoint(both, *names)(X), torch.cat([whole(X)] * 2, dim=1))
    if kind == "nvfp4":
        _, differing = written(tmp_path / "differing", layout, *names, seeds=(1, 2))
        with pytest.raises(CheckpointError, match="load them one by one"):
            nn.MxLinear.from_checkpoint(differing, *names)


def test_a_compiled_layer_gives_the_bits() -> None:
    layer = made("mxfp8", bias=BIAS)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(X), layer(X))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"kind": "fp4"}, OptionError),
        ({"weight": torch.zeros(N, K)}, DtypeError),
        ({"weight_scale": torch.zeros(N, 3, dtype=torch.uint8)}, ShapeError),
        ({"weight_scale_2": None}, OptionError),
        ({"kind": "mxfp4"}, KernelError),
        ({"bias": torch.zeros(3)}, ShapeError),
        ({"input_scale": torch.ones(2)}, KernelError),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        nn.MxLinear(**{**stored("nvfp4"), "kind": "nvfp4", **change})


def test_calls_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    layer = made("mxfp8", name="down")
    for x, error in ((X[:, :32], ShapeError), (X.double(), DtypeError), (X.to("meta"), KernelError)):
        with pytest.raises(error):
            layer(x)
    _, folder = written(tmp_path, "modelopt nvfp4")
    with pytest.raises(CheckpointError, match="MxLinear"):
        nn.from_checkpoint(folder, NAME)
    cp.deepseek(tmp_path / "fp8")
    with pytest.raises(CheckpointError, match="block is read by Fp8Linear"):
        nn.MxLinear.from_checkpoint(tmp_path / "fp8", NAME)
