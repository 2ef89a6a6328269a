"""A small DeepSeek-V3-style checkpoint, written with seeded weights in any of the formats that are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
HIDDEN, DENSE, EXPERT, Q, KV = 256, 384, 192, 192, 96
"""Half of ``DENSE`` and of ``EXPERT`` ends inside a block of 128; ``Q`` and ``KV`` end inside one as well."""
LAYERS, EXPERTS = 3, 2
ROUTING = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_shared_experts": 1,
}
GROUP = {
    "targets": ["Linear"],
    "weights": {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True, "dynamic": False},
    "input_activations": {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True},
}
FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed(strategy: str, *, dynamic: bool = True, **more: Any) -> dict[str, Any]:
    """``quantization_config`` of llm-compressor."""
    structure = [128, 128] if strategy == "block" else None
    weights = {**GROUP["weights"], "strategy": strategy, "block_structure": structure}
    inputs = {**GROUP["input_activations"], "dynamic": dynamic, "strategy": "token" if dynamic else "tensor"}
    group = {**GROUP, "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": group}, **more}


def modelopt(algorithm: str) -> dict[str, Any]:
    """``quantization_config`` of Model-Optimizer."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*.gate"]}


def linear(n: int, k: int, seed: int, kind: str, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Codes of an amax near 448 and scales that differ by far more than a rounding from each other."""
    g = torch.Generator().manual_seed(seed)
    codes = (torch.randn(n, k, generator=g) * 64).clamp(-448, 448).to(FP8)
    shape = {"tensor": (1,), "channel": (n, 1), "block": (-(-n // 128), -(-k // 128))}[kind]
    exponents = torch.randint(-14, -8, shape, generator=g)
    scale = torch.ldexp(
        torch.ones(shape) if scale_dtype == torch.float8_e8m0fnu else 1 + torch.randint(0, 8, shape, generator=g) / 8,
        exponents,
    )
    return codes, scale.to(scale_dtype)


def projections() -> dict[str, tuple[int, int]]:
    """Names and extents of the linear layers."""
    found = {}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        found |= {f"{name}.self_attn.q_a_proj": (Q, HIDDEN), f"{name}.self_attn.kv_a_proj_with_mqa": (KV, HIDDEN)}
        found[f"{name}.self_attn.o_proj"] = (HIDDEN, DENSE)
        mlps = {f"{name}.mlp": DENSE}
        if layer:
            mlps = {f"{name}.mlp.shared_experts": EXPERT}
            mlps |= {f"{name}.mlp.experts.{e}": EXPERT for e in range(EXPERTS)}
        for mlp, inner in mlps.items():
            found |= {f"{mlp}.gate_proj": (inner, HIDDEN), f"{mlp}.up_proj": (inner, HIDDEN)}
            found[f"{mlp}.down_proj"] = (HIDDEN, inner)
    return found


def tensors(
    kind: str, scale: str, *, scale_dtype: torch.dtype = torch.float32, static: bool = False, four: bool = False
) -> dict[str, Tensor]:
    """All tensors of the model."""
    made: dict[str, Tensor] = {}
    for seed, (name, extents) in enumerate(projections().items()):
        made[f"{name}.weight"], own = linear(*extents, seed, kind, scale_dtype)
        made[f"{name}.{scale}"] = own[:, None, :, None].contiguous() if four else own
        if static:
            made[f"{name}.input_scale"] = torch.tensor(0.02 + seed / 1024)
    for layer in range(1, LAYERS):
        gate = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(layer))
        made[f"model.layers.{layer}.mlp.gate.weight"] = gate.bfloat16()
        made[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = torch.tensor([0.25, -0.25])
    return made


def write(folder: Path, quantization: Mapping[str, Any], made: Mapping[str, Tensor], **config: Any) -> Path:
    """Two files, an index and a configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    where = {name: f"model-0000{1 + (name > 'model.layers.1')}-of-00002.safetensors" for name in made}
    for file in sorted(set(where.values())):
        save_file({name: made[name] for name in made if where[name] == file}, folder / file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in made.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({**ROUTING, "quantization_config": quantization, **config}))
    return folder


def deepseek(folder: Path, scale_dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The checkpoint with block scales; what was written."""
    made = tensors("block", "weight_scale_inv", scale_dtype=scale_dtype)
    write(folder, FP8_BLOCK, made)
    return made


def sparse(folder: Path, rows: int, columns: int, block: int = 128) -> Path:
    """A checkpoint of one FP8 weight of zeros that takes no space on the disk: a file with a hole; ``block`` 0: one
    scale for all of it."""
    grid = [-(-rows // block), -(-columns // block)] if block else [1, 1]
    scales = torch.ones(grid)
    begin, end = scales.nbytes, scales.nbytes + rows * columns
    entries = {
        "a.weight_scale_inv": {"dtype": "F32", "shape": grid, "data_offsets": [0, begin]},
        "a.weight": {"dtype": "F8_E4M3", "shape": [rows, columns], "data_offsets": [begin, end]},
    }
    header = json.dumps(entries).encode()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header + scales.numpy().tobytes())
        stream.truncate(8 + len(header) + end)
    return folder


PACKAGES = {"flashinfer": "0.7.2.post1", "vllm_ops": "0.33.0", "cudnn": "9.15.0", "cutlass_dsl": "4.6.0"}
"""Releases of a described Blackwell machine."""


def compressed_blocks(bits: int, strategy: str, size: int) -> dict[str, Any]:
    """``quantization_config`` of llm-compressor for blocks."""
    weights = {"type": "float", "num_bits": bits, "strategy": strategy, "group_size": size}
    inputs = {**weights, "dynamic": "local" if strategy == "tensor_group" else True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": group}}
