"""Quantised checkpoints: which scales a layer has, and tensors that are read when they are indexed.

A folder as published: ``config.json``, ``model.safetensors.index.json`` (or one ``model.safetensors``) and the files it
names. A file is opened when a tensor of it is first asked for, and only the bytes of the asked part are read.

``quantization_config`` in ``config.json`` names one of four formats:

* ``fp8`` (DeepSeek-V3 and others): ``weight_block_size [128, 128]`` with ``weight_scale_inv [N/128, K/128]``, or none
  with one ``weight_scale``; ``activation_scheme`` dynamic, or static with an ``input_scale``; layers left out are in
  ``modules_to_not_convert`` or ``ignored_layers``. In spite of its name ``weight_scale_inv`` multiplies. Sources:
  transformers ``integrations/finegrained_fp8.py``; vLLM ``quantization/fp8.py``.
* ``compressed-tensors`` (llm-compressor): ``config_groups`` with ``targets`` (a class, a name, ``re:`` and a pattern)
  and ``weights`` of strategy tensor, channel (``weight_scale [N, 1]``) or block (``block_structure``);
  ``input_activations`` dynamic, or static with an ``input_scale``; ``ignore``. Block-scaled: NVFP4 (4 bits,
  ``tensor_group`` of 16: ``weight_packed``, ``weight_scale``, and ``weight_global_scale`` and ``input_global_scale``,
  which divide), MXFP4 (4 bits, ``group`` of 32: ``weight_packed``), MXFP8 (8 bits, ``group`` of 32). Sources:
  compressed-tensors ``quantization/lifecycle/initialize.py``; vLLM ``schemes/compressed_tensors_w8a8_fp8.py``.
* ``modelopt``: ``quant_algo`` FP8 (``weight_scale`` and ``input_scale``, one value each), FP8_PER_CHANNEL_PER_TOKEN
  (``weight_scale [N]``), FP8_PB_WO (``weight_scale [N/128, 1, K/128, 1]``), NVFP4 (``weight_scale [N, K/16]`` with
  ``weight_scale_2`` and ``input_scale``) or MXFP8 (``weight_scale [N, K/32]``), in either case of letters; ``ignore``,
  or in the older ``hf_quant_config.json`` ``exclude_modules``, with wildcards. Sources: Model-Optimizer
  ``torch/export/convert_hf_config.py``; vLLM ``quantization/modelopt.py``.
* ``mxfp4`` (gpt-oss): experts of MXFP4 in one tensor each, ``gate_up_proj_blocks [E, 2I, H/32, 16]`` with ``_scales``
  and ``_bias``, rows of gate and up in turn, and ``down_proj_blocks``; inputs are MXFP8 here. What
  ``modules_to_not_convert`` names, with wildcards, is not quantised. Source: transformers ``integrations/mxfp4.py``.

Not covered: pickled files (they run code), weight-only schemes, other sizes of blocks, KV-cache scales.

NaN and infinity: tensors are read as they are stored.
Source: the formats of Hugging Face FP8, compressed-tensors, ModelOpt and gpt-oss checkpoints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from ..support import BLOCK
from .shards import Source, whole

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Dtypes of safetensors that a weight or a scale can have."""


@dataclass(frozen=True)
class Scheme:
    """How a layer is quantised: the kind of its scales, their name, and the scale of its input.

    Of NVFP4 ``second`` and ``input`` name the scales of both tensors; ``divides``: they are stored inverted. ``inputs``
    is the format of inputs that is not the weights'.
    """

    kind: str
    scale: str = "weight_scale"
    static: bool = False
    per_token: bool = True
    weight: str = "weight"
    second: str = "weight_scale_2"
    input: str = "input_scale"
    divides: bool = False
    inputs: str = ""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, read when it is indexed."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """The asked part; no other bytes are read."""
        with torch.device("cpu"):  # else safetensors makes them where the caller's default device is, without values
            part: Tensor = self.file.get_slice(self.name)[index] if self.shape else self.file.get_tensor(self.name)
        return part


class Checkpoint:
    """A folder with a quantised model.

    Parameters
    ----------
    folder
        Holds ``config.json`` and safetensors files. The index is read once; keep the object to load many layers.

    Raises
    ------
    CheckpointError
        A file is missing or is not what its name says.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is no folder; pass the one that holds config.json")
        self.config = self._json("config.json")
        self._files: dict[str, Any] = {}
        self.where = self._index()
        self.quantisation = self._quantisation()

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self.where

    def tensor(self, name: str) -> Source:
        """A tensor by its name, not yet read.

        Raises
        ------
        CheckpointError
            There is none, or its file lacks it or cannot be read.
        """
        if name not in self.where:
            layer = name.rpartition(".")[0]
            beside = sorted(other for other in self.where if other.startswith(f"{layer}."))
            has = f"{layer} has {', '.join(beside[:8])}" if beside else f"no tensor begins with {layer}."
            raise CheckpointError(f"{self.folder} has no tensor {name}; {has}")
        file = self._open(self.where[name])
        try:
            part = file.get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.where[name]} lacks {name}, which the index places there: {error}") from None
        if part.get_dtype() not in DTYPES:
            raise CheckpointError(f"{name} is stored as {part.get_dtype()}; a layer reads {', '.join(DTYPES)}")
        return Stored(file, name, tuple(part.get_shape()), DTYPES[part.get_dtype()])

    def read(self, name: str) -> Tensor:
        """A whole tensor.

        Returns the tensor in its shape and dtype; values are copied as they are stored.
        """
        return whole(self.tensor(name))

    def scheme(self, layer: str) -> Scheme:
        """How a linear layer is quantised.

        Raises
        ------
        CheckpointError
            It is not, or in a way that has no kernel here.
        """
        method = str(self.quantisation.get("quant_method"))
        if method not in METHODS:
            raise CheckpointError(
                f"quant_method={method!r} in {self.folder}/config.json is not one of {', '.join(METHODS)}; "
                "dequantise such a checkpoint, or build Fp8Linear from its tensors"
            )
        return METHODS[method](self.quantisation, layer)

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds a {type(content).__name__}; it is an object")
        return content

    def _index(self) -> Mapping[str, str]:
        if (self.folder / INDEX).is_file():
            files = self._json(INDEX).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
                raise CheckpointError(f"{self.folder / INDEX} has no weight_map from tensors to files")
            for file in set(files.values()):
                if Path(file).name != file or not file.endswith(".safetensors"):
                    raise CheckpointError(
                        f"{self.folder / INDEX} names {file!r}, which is no safetensors file of the folder"
                    )
            return files
        if (self.folder / SINGLE).is_file():
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        pickled = sorted(p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        instead = f"{pickled[0]} is pickled and can run code; convert it to safetensors" if pickled else "download them"
        raise CheckpointError(f"{self.folder} has neither {INDEX} nor {SINGLE}; {instead}")

    def _quantisation(self) -> Mapping[str, Any]:
        quantization = self.config.get("quantization_config")
        if quantization is None and (self.folder / "hf_quant_config.json").is_file():
            inner = self._json("hf_quant_config.json").get("quantization")
            quantization = {"quant_method": "modelopt", **inner} if isinstance(inner, dict) else None
        if not isinstance(quantization, dict):
            raise CheckpointError(f"{self.folder}/config.json has no quantization_config; the model is not quantised")
        return quantization

    def _open(self, name: str) -> Any:
        if name not in self._files:
            path = self.folder / name
            try:
                self._files[name] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from None
        return self._files[name]


def _fp8(config: Mapping[str, Any], layer: str) -> Scheme:
    for key in ("modules_to_not_convert", "ignored_layers"):
        _ignored(layer, _names(key, config.get(key)), _inside)
    if config.get("fmt", "e4m3") != "e4m3":
        raise CheckpointError(f"fmt={config['fmt']!r}: weights are E4M3 here")
    scheme = config.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise CheckpointError(f"activation_scheme={scheme!r}; it is dynamic or static")
    if config.get("weight_block_size") is None:
        return Scheme("tensor", static=scheme == "static")
    _block("weight_block_size", config["weight_block_size"])
    if scheme == "static":
        raise CheckpointError("activation_scheme='static' with weight_block_size: block scales are of dynamic inputs")
    return Scheme("block", "weight_scale_inv")


def _compressed(config: Mapping[str, Any], layer: str) -> Scheme:
    _ignored(layer, _names("ignore", config.get("ignore")), _matches)
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(f"config_groups is {groups!r:.80}; it is an object of objects")
    targets = {name: _names("targets", group.get("targets")) for name, group in groups.items()}
    matching = [group for name, group in groups.items() if any(_matches(layer, target) for target in targets[name])]
    matching = matching or [group for name, group in groups.items() if "Linear" in targets[name]]
    if not matching:
        raise CheckpointError(
            f"no group of config_groups ({', '.join(groups) or 'none'}) targets {layer}: not quantised"
        )
    group = matching[0]
    weights, inputs = group.get("weights"), group.get("input_activations")
    weights = weights if isinstance(weights, dict) else {}
    kind, form = weights.get("strategy", "tensor"), group.get("format") or config.get("format")
    blocks = (weights.get("type"), weights.get("num_bits"), kind, weights.get("group_size"))
    if blocks in BLOCK_SCALED and isinstance(inputs, dict):
        scheme, bits = BLOCK_SCALED[blocks], inputs.get("num_bits")
        if bits == weights.get("num_bits"):
            return scheme
        if (scheme.kind, bits, inputs.get("group_size")) != ("mxfp4", 8, 32):
            raise CheckpointError(f"{layer} is {scheme.kind} with inputs of {bits} bits; no kernel here serves that")
        return replace(scheme, inputs="mxfp8")
    if (weights.get("type"), weights.get("num_bits")) != ("float", 8) or kind not in ("tensor", "channel", "block"):
        description = f"weights {weights.get('type')}{weights.get('num_bits')} per {kind} (format {form})"
        raise CheckpointError(f"{layer} has {description}; FP8 per tensor, channel or block is read here")
    if not isinstance(inputs, dict):
        raise CheckpointError(
            f"{layer} is quantised in its weight only (no input_activations); no kernel here serves that"
        )
    if kind == "block":
        _block("block_structure", weights.get("block_structure"))
    return Scheme(kind, static=not inputs.get("dynamic"), per_token=inputs.get("strategy") != "tensor")


def _modelopt(config: Mapping[str, Any], layer: str) -> Scheme:
    for key in ("ignore", "exclude_modules"):
        _ignored(layer, _names(key, config.get(key)), fnmatchcase)
    algorithm = str(config.get("quant_algo")).upper()
    if algorithm not in ALGORITHMS:
        raise CheckpointError(f"quant_algo={config.get('quant_algo')!r}; {', '.join(ALGORITHMS)} are read here")
    return ALGORITHMS[algorithm]


def _gpt_oss(config: Mapping[str, Any], layer: str) -> Scheme:
    patterns = _names("modules_to_not_convert", config.get("modules_to_not_convert"))
    _ignored(layer, patterns, lambda name, pattern: fnmatchcase(f"{name}.", f"{pattern}.*"))
    return Scheme("mxfp4", scale="scales", weight="blocks", inputs="mxfp8")


METHODS: Mapping[str, Callable[[Mapping[str, Any], str], Scheme]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "mxfp4": _gpt_oss,
}
"""Readers of ``quantization_config`` by ``quant_method``."""
ALGORITHMS: Mapping[str, Scheme] = {
    "FP8": Scheme("tensor", static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("channel"),
    "FP8_PB_WO": Scheme("block"),
    "NVFP4": Scheme("nvfp4", static=True),
    "MXFP8": Scheme("mxfp8"),
}
"""Model-Optimizer's ``quant_algo``."""
BLOCK_SCALED: Mapping[tuple[object, ...], Scheme] = {
    ("float", 4, "tensor_group", 16): Scheme(
        "nvfp4",
        static=True,
        weight="weight_packed",
        second="weight_global_scale",
        input="input_global_scale",
        divides=True,
    ),
    ("float", 4, "group", 32): Scheme("mxfp4", weight="weight_packed"),
    ("float", 8, "group", 32): Scheme("mxfp8"),
}
"""llm-compressor's weights by type, bits, strategy and size of a group."""


def _ignored(layer: str, patterns: Sequence[str], match: Callable[[str, str], bool]) -> None:
    for pattern in patterns:
        if match(layer, pattern):
            raise CheckpointError(f"{layer} is not quantised ({pattern!r} excludes it); load it into torch.nn.Linear")


def _names(key: str, value: object) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(f"{key}={value!r:.80}; it is a list of names")
    return value


def _inside(layer: str, pattern: str) -> bool:
    """Whether the pattern is a run of whole parts of the name (``lm_head``, ``self_attn``, ``model.layers.0``)."""
    return f".{pattern}." in f".{layer}."


def _matches(layer: str, target: str) -> bool:
    """compressed-tensors: ``re:`` and a pattern that matches from the start, else the name of a module."""
    if target.startswith("re:"):
        try:
            return re.match(target[3:], layer) is not None
        except re.error as error:
            raise CheckpointError(f"{target!r} is no regular expression: {error}") from None
    return target == layer


def _block(name: str, value: object) -> None:
    if value != [BLOCK, BLOCK]:
        raise CheckpointError(f"{name}={value}; kernels scale blocks of [{BLOCK}, {BLOCK}]: requantise the weights")
