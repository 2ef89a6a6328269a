"""Experts of MX and NVFP4 as a layer: from checkpoints of each layout and from meta to the first call, on described
machines."""

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
from kernels.errors import CheckpointError, KernelError
from kernels.mx_blocks import FORMATS
from kernels.mx_moe import LAYERS
from oracle.routines import get
from oracle.verdict.compare import Status
from tests.support.fake_blackwell import described
from tests.support.operations import operations

E, H, I, T = 3, 160, 96, 5  # noqa: E741  # the symbols of the layer
NAME = "model.layers.0.mlp.experts"
X = torch.randn(T, H, generator=torch.Generator().manual_seed(0)).bfloat16()
IDS = torch.tensor([[0, 1], [1, 2], [2, 0], [-1, 1], [0, 2]])
WEIGHTS = torch.tensor([[0.5, 0.25]] * T)
"""Powers of two: a weight that is rounded to bf16 is the same."""
JUDGE = {
    "mxfp8": "cutlass_fused_moe_mxfp8",
    "mxfp4": "cutlass_moe_mxfp4",
    "mxfp8_mxfp4": "cutlass_fused_moe_mxfp8_mxfp4",
    "nvfp4": "cutlass_fused_moe_nvfp4",
}
"""Contracts of layers that give what this one gives, of weights that are powers of two."""
GPT_OSS = nn.SWIGLUOAI._replace(limit=0.75)


def stored(kind: str, seed: int = 1, biases: bool = False) -> dict[str, Tensor]:
    """Codes, scales row by row, and what else there is."""
    form, g = FORMATS[LAYERS[kind].weights], torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, n, k in (("w13", 2 * I, H), ("w2", H, I)):
        made[name] = torch.randint(0, 256, (E, n, k // form.packed), dtype=torch.uint8, generator=g)
        if form.packed == 1:
            made[name] = torch.randn(E, n, k, generator=g).to(torch.float8_e4m3fn)
        low, high = (40, 60) if kind == "nvfp4" else (120, 124)
        made[f"{name}_scale"] = torch.randint(low, high, (E, n, k // form.width), dtype=torch.uint8, generator=g)
        if biases:
            made[f"{name}_bias"] = torch.randn(E, n, generator=g).bfloat16()
        if kind == "nvfp4":
            made[f"{name}_scale_2"] = 0.03125 * torch.arange(seed, seed + E)
            made[f"{name}_input_scale"] = 0.0015 * torch.arange(1.0, 1 + E)
    return made


def layer_of(kind: str, seed: int = 1, biases: bool = False, **more: Any) -> nn.MxExperts:
    return nn.MxExperts(**stored(kind, seed, biases), kind=kind, **more)


def good(kind: str, tensors: dict[str, Tensor], y: Tensor, gates: nn.Activation | None = None, first: int = 0) -> bool:
    """By the contract of a library's layer, whose rows of up come first."""
    name, given = JUDGE[kind], dict(tensors)
    inputs = {key: given[key] for key in ("w13", "w13_scale", "w2", "w2_scale")}
    if up_first := LAYERS[name].up_first:
        inputs |= {key: kernels.swap_w13_to_w31(inputs[key]) for key in ("w13", "w13_scale")}
        inputs |= {"alpha1": torch.ones(E), "alpha2": torch.ones(E)}
    if kind == "nvfp4":
        for number, key in ((1, "w13"), (2, "w2")):
            inputs[f"a{number}_gscale"] = given[f"{key}_input_scale"].reciprocal()
            inputs[f"alpha{number}"] = given[f"{key}_input_scale"] * given[f"{key}_scale_2"]
    if "w13_bias" in given:
        b1 = given["w13_bias"].float()
        inputs |= {"b1": torch.cat(b1.chunk(2, 1)[::-1], 1) if up_first else b1, "b2": given["w2_bias"].float()}
    if gates is not None:
        inputs["gates"] = torch.tensor(gates).expand(E, 3).contiguous()
    options = {"combine": "STORED"} if up_first else {}
    inputs = {"x": X, **inputs, "topk_ids": IDS, "topk_weights": WEIGHTS}
    verdict = get(name).judge(inputs, y, arch="cpu", numerics="ieee32.any", first_expert=first, **options)
    return verdict.status in (Status.PASSED, Status.MISTRUSTED)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def in_turn(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, 1)
    return torch.stack([gate, up], 2).flatten(1, 2).contiguous()


def gpt_oss(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """As published: blocks of 16 bytes, rows of gate and up in turn."""
    made = {}
    for stem, name in (("gate_up_proj", "w13"), ("down_proj", "w2")):
        order = in_turn if name == "w13" else Tensor.contiguous
        made[f"{NAME}.{stem}_blocks"] = order(tensors[name]).unflatten(2, (-1, 16))
        made[f"{NAME}.{stem}_scales"] = order(tensors[f"{name}_scale"])
        made[f"{NAME}.{stem}_bias"] = order(tensors[f"{name}_bias"])
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    return cp.write(folder, config, made, swiglu_limit=GPT_OSS.limit)


def apart(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], keys: tuple[str, str, str]) -> Path:
    """A linear layer for each weight of each expert."""
    packed = config["quant_method"] == "compressed-tensors" and tensors["w13"].dtype is torch.uint8
    inverted = config["quant_method"] == "compressed-tensors"
    made = {}
    for expert in range(E):
        for position, key in enumerate(keys):
            name, weight = f"{NAME}.{expert}.{key}", "w2" if position == 2 else "w13"
            rows = slice(None) if position == 2 else slice(I * position, I * (position + 1))
            made[f"{name}.{'weight_packed' if packed else 'weight'}"] = tensors[weight][expert, rows].contiguous()
            made[f"{name}.weight_scale"] = tensors[f"{weight}_scale"][expert, rows].contiguous()
            if f"{weight}_bias" in tensors:
                made[f"{name}.bias"] = tensors[f"{weight}_bias"][expert, rows].contiguous()
            if f"{weight}_scale_2" in tensors:
                second, inputs = (tensors[f"{weight}_{part}"][expert] for part in ("scale_2", "input_scale"))
                inputs = inputs if position else inputs / 2  # the larger one counts
                names = ("weight_global_scale", "input_global_scale") if inverted else ("weight_scale_2", "input_scale")
                for part, x in zip(names, (second, inputs), strict=True):
                    made[f"{name}.{part}"] = x.reciprocal().reshape(1) if inverted else x.clone()
    return cp.write(folder, config, made)


def mixed() -> dict[str, Any]:
    config = cp.compressed_blocks(4, "group", 32)
    config["config_groups"]["g"]["input_activations"] |= {"num_bits": 8}
    return config


GATE_UP, W123 = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
LAYOUTS: dict[str, tuple[str, Callable[[Path, dict[str, Tensor]], Path]]] = {
    "gpt-oss": ("mxfp8_mxfp4", gpt_oss),
    "modelopt nvfp4": ("nvfp4", lambda folder, x: apart(folder, cp.modelopt("NVFP4"), x, GATE_UP)),
    "modelopt mxfp8": ("mxfp8", lambda folder, x: apart(folder, cp.modelopt("MXFP8"), x, W123)),
    "compressed nvfp4": (
        "nvfp4",
        lambda folder, x: apart(folder, cp.compressed_blocks(4, "tensor_group", 16), x, GATE_UP),
    ),
    "compressed mxfp4": ("mxfp4", lambda folder, x: apart(folder, cp.compressed_blocks(4, "group", 32), x, GATE_UP)),
    "compressed mxfp8": ("mxfp8", lambda folder, x: apart(folder, cp.compressed_blocks(8, "group", 32), x, GATE_UP)),
    "compressed mixed": ("mxfp8_mxfp4", lambda folder, x: apart(folder, mixed(), x, W123)),
}
ARCHES = ("sm90", "sm100", "sm103", "sm120")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_a_checkpoint(tmp_path: Path, layout: str) -> None:
    kind, write = LAYOUTS[layout]
    biases, gates = kind == "mxfp8_mxfp4", GPT_OSS if layout == "gpt-oss" else None
    tensors = stored(kind, biases=biases)
    layer = nn.MxExperts.from_checkpoint(write(tmp_path, tensors), NAME)
    assert layer.kind == kind and layer.activation == gates
    assert good(kind, tensors, layer(X, WEIGHTS, IDS), gates)
    for name, x in layer.state_dict().items():
        near = tensors.get(name)
        if near is not None and "scale_2" not in name and "input_scale" not in name:  # which a checkpoint may invert
            assert torch.equal(x.view(torch.uint8), near.view(torch.uint8))


NATIVE = {"mxfp8": ARCHES[1:2], "mxfp4": ARCHES[1:3], "mxfp8_mxfp4": ARCHES[1:], "nvfp4": ARCHES[1:]}
"""Where a library has the product, which adds no bias; elsewhere Triton emulates it."""


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_a_checkpoint_to_the_first_call(tmp_path: Path, layout: str, arch: str) -> None:
    """And from meta, by a state that is loaded. The second call makes the operations of the verb: no scale is laid out
    again."""
    kind, write = LAYOUTS[layout]
    biases, gates = kind == "mxfp8_mxfp4", GPT_OSS if layout == "gpt-oss" else None
    tensors = stored(kind, biases=biases)
    with described(arch, cp.PACKAGES) as libraries:
        layer = nn.MxExperts.from_checkpoint(write(tmp_path, tensors), NAME)
        y = layer(X, WEIGHTS, IDS)
        assert good(kind, tensors, y, gates)
        multiplied = [call for call in libraries.calls if "quantize" not in call.name]
        assert len(multiplied) == 2 * (arch in NATIVE[kind] and not biases)
        state = layer.state_dict()
        other = nn.MxExperts(**{name: x.to("meta") for name, x in tensors.items()}, kind=kind, activation=gates)
        other.process_weights_after_loading()
        assert other.w13_scale.is_meta
        other.load_state_dict({name: x.clone() for name, x in state.items()}, assign=True)
        assert torch.equal(other(X, WEIGHTS, IDS), y)
        few = operations(lambda: other(X, WEIGHTS, IDS))
        assert operations(lambda: layer(X, WEIGHTS, IDS)) == few
        anew = {"kind": kind, "activation": gates, **tensors}
        assert operations(lambda: nn.MxExperts(**anew)(X, WEIGHTS, IDS)) > few, "the negative test: it lays them out"


def rolled(x: dict[str, Tensor]) -> None:
    x["w2_scale"] = x["w2_scale"].roll(1, 1)


def nibbles(x: dict[str, Tensor]) -> None:
    x["w13"] = (x["w13"] >> 4) | (x["w13"] << 4)


def turned(x: dict[str, Tensor]) -> None:
    x |= {key: in_turn(x[key]) for key in ("w13", "w13_scale")}


def exchanged(x: dict[str, Tensor]) -> None:
    x |= {key: kernels.swap_w13_to_w31(x[key]) for key in ("w13", "w13_scale")}


def inverted(x: dict[str, Tensor]) -> None:
    x["w2_scale_2"] = x["w2_scale_2"].reciprocal()


def next_expert(x: dict[str, Tensor]) -> None:
    x["w13_bias"] = x["w13_bias"].roll(1, 0)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("mxfp8", rolled),
        ("mxfp4", nibbles),
        ("mxfp8_mxfp4", turned),
        ("mxfp8_mxfp4", next_expert),
        ("nvfp4", exchanged),
        ("nvfp4", inverted),
    ],
)
def test_what_goes_wrong_in_a_loader_is_seen(kind: str, fault: Callable[[dict[str, Tensor]], None]) -> None:
    """The negative test."""
    right = stored(kind, biases=kind == "mxfp8_mxfp4")
    wrong = dict(right)
    fault(wrong)
    y = nn.MxExperts(**wrong, kind=kind)(X, WEIGHTS, IDS)
    assert not good(kind, right, y) and good(kind, wrong, y)


def test_operations_of_the_second_call() -> None:
    """Those of the verb: no scale is laid out again. A layer that lays them out makes more (the negative test)."""
    layer = layer_of("nvfp4")
    layer(X, WEIGHTS, IDS)

    def alone() -> None:
        given = {"w13": layer.w13, "w13_scale": layer.w13_scale, "w2": layer.w2, "w2_scale": layer.w2_scale}
        kernels.moe_block_experts(X, **given, topk_weights=WEIGHTS, topk_ids=IDS, layer="nvfp4", **layer._of_nvfp4())

    few = operations(alone)
    assert operations(lambda: layer(X, WEIGHTS, IDS)) <= few + 4  # views of the inputs and of the output
    raw = layer._by_row("w13_scale")
    assert operations(lambda: (alone(), kernels.swizzle_scale(raw))) > few + 4


CHANGES: dict[str, Callable[[nn.MxExperts, dict[str, Tensor]], object]] = {
    "load": lambda layer, new: layer.load_state_dict(new),
    "assign": lambda layer, new: layer.load_state_dict(new, assign=True),
    "codes unseen": lambda layer, new: layer.w2.data[..., : new["w2"].shape[2]].copy_(new["w2"]),
    "scale.data": lambda layer, new: setattr(layer.w13_scale, "data", layer._wide("w13_scale", new["w13_scale"])),
    "scalar": lambda layer, new: layer.w13_input_scale.data.mul_(1.5),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_stale(change: str) -> None:
    """A change of the layer is in its state and in its next call."""
    layer, new = layer_of("nvfp4"), stored("nvfp4", 2)
    before = layer(X, WEIGHTS, IDS)
    CHANGES[change](layer, {key: x.clone() for key, x in new.items()})
    y, state = layer(X, WEIGHTS, IDS), layer.state_dict()
    assert not torch.equal(y, before)
    assert good("nvfp4", {key: x for key, x in state.items() if key != "layout"}, y)


def test_copies_compiled_layers_and_ranks(tmp_path: Path) -> None:
    tensors = stored("mxfp8_mxfp4", biases=True)
    layer = nn.MxExperts(**tensors, kind="mxfp8_mxfp4", activation=GPT_OSS, out_dtype=torch.float32)
    y = layer(X, WEIGHTS, IDS)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.half().float()):
        assert torch.equal(other(X, WEIGHTS, IDS), y)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(X, WEIGHTS, IDS), y)
    torch._dynamo.reset()
    folder = gpt_oss(tmp_path, tensors)
    few = IDS[:, :1]  # one expert: the sum over ranks adds zeros

    def rank(number: int, parallel: str) -> nn.MxExperts:
        return nn.MxExperts.from_checkpoint(
            folder, NAME, rank=number, world=3, parallel=parallel, out_dtype=torch.float32
        )

    whole = layer(X, WEIGHTS[:, :1], few)
    parts = [rank(number, "expert")(X, WEIGHTS[:, :1], few) for number in range(3)]
    assert torch.equal(nn.sum_ranks(parts), whole)
    zeros = {name: x.clone() for name, x in tensors.items()}
    zeros["w2"][..., 16:] = 0
    first = nn.MxExperts(**zeros, kind="mxfp8_mxfp4", activation=GPT_OSS, out_dtype=torch.float32)
    assert torch.equal(rank(0, "tensor")(X, WEIGHTS, IDS), first(X, WEIGHTS, IDS))
    last = rank(2, "tensor")
    assert last.w2_bias is not None and not bool(last.w2_bias.any()) and last.inner == I // 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "fp4"}, "kind='fp4'"),
        ({"w13": torch.zeros(E, 2 * I, H)}, "w13 of MxExperts"),
        ({"w2": torch.zeros(E, H, I, dtype=torch.uint8)}, "w2 \\["),
        ({"w2_scale": torch.zeros(E, H, 2, dtype=torch.uint8)}, "w2_scale"),
        ({"w13_scale_2": None}, "NVFP4 has w13_scale_2"),
        ({"w13_bias": torch.zeros(E, I)}, "w13_bias"),
        ({"first_expert": -1}, "first_expert"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(KernelError, match=said):
        nn.MxExperts(**{**stored("nvfp4"), "kind": "nvfp4", **change})


def test_checkpoints_that_are_refused(tmp_path: Path) -> None:
    cp.deepseek(tmp_path / "fp8")
    with pytest.raises(CheckpointError, match="Fp8Experts"):
        nn.MxExperts.from_checkpoint(tmp_path / "fp8", "model.layers.1.mlp.experts")
    folder = LAYOUTS["compressed mixed"][1](tmp_path / "mixed", stored("mxfp8_mxfp4"))
    with pytest.raises(CheckpointError, match="MxExperts"):
        nn.MxLinear.from_checkpoint(folder, f"{NAME}.0.w1")
    with pytest.raises(CheckpointError, match="3 experts, not 4"):
        nn.MxExperts.from_checkpoint(folder, NAME, experts=4)
    with pytest.raises(KernelError, match="parallel='column'"):
        nn.MxExperts.from_checkpoint(folder, NAME, parallel="column")
    oss = gpt_oss(tmp_path / "oss", stored("mxfp8_mxfp4", biases=True))
    with pytest.raises(CheckpointError, match="excludes it"):
        nn.from_checkpoint(oss, "model.layers.0.self_attn.q_proj")
    different = stored("nvfp4")
    folder = LAYOUTS["modelopt nvfp4"][1](tmp_path / "nvfp4", different)
    source = nn.Checkpoint(folder)
    read = source.tensor
    source.tensor = lambda name: torch.tensor(2.0) if name.endswith("0.up_proj.weight_scale_2") else read(name)  # type: ignore[assignment,method-assign,return-value]
    with pytest.raises(CheckpointError, match="quantise them together"):
        nn.MxExperts.from_checkpoint(source, NAME)
