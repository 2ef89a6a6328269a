"""Experts with weights of MXFP8, MXFP4 and NVFP4 as a module, and what reads them from checkpoints.

``kind`` says what is multiplied (:data:`kernels.mx_moe.OWN`): ``mxfp8``, ``mxfp4``, ``nvfp4``, or ``mxfp8_mxfp4``,
weights of MXFP4 and inputs of MXFP8, which is how engines run gpt-oss on Blackwell. The steps are those of
:func:`kernels.moe_block_experts`: products and activations in bf16, the sum over experts in float32, rounded once.

K of both weights is brought to multiples of 128 with codes of zero, as the libraries take it (gpt-oss has 2880
columns); a state dict has the columns of the checkpoint. Scales lie in tiles after loading, row by row in a state
(:class:`~kernels.nn.mx.MxModule`). Rows of gate stand before those of up; a checkpoint that has them in turn is read
so.

A rank holds whole experts (``expert``) or a part of each (``tensor``), which begins and ends between two blocks; then
the bias of the second product is rank 0's.

Not covered: weights with inputs in bf16, gate and up under different scales of their tensor, the exchange of tokens.

NaN in a row makes the row of its token NaN. Inputs that require gradients are refused.
Source: gpt-oss (``mxfp4``), compressed-tensors, ModelOpt; vLLM (fused_moe layer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..errors import CheckpointError, InputError, OptionError, ShapeError, shown
from ..layout import align
from ..mx_blocks import FORMATS
from ..mx_moe import OWN, moe_block_experts
from .checkpoint import Checkpoint, Scheme
from .moe import ExpertsModule, experts_of
from .mx import MxModule, bits, cut, scalars, stored
from .shards import Source, Span, share, whole

ALIGNMENT = 128
"""What K of both weights is a multiple of in memory."""
PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of the weights of an expert: gate, up and down."""


class Activation(NamedTuple):
    """``g / (1 + exp(-alpha g)) * (u + beta)`` of the gate, clamped from above, and of up, on both sides."""

    alpha: float = 1.0
    beta: float = 0.0
    limit: float = float("inf")


SWIGLUOAI = Activation(1.702, 1.0, 7.0)
"""gpt-oss."""


class MxExperts(MxModule, ExpertsModule):
    """The experts of a layer, or those of a rank.

    Parameters
    ----------
    w13, w2
        ``[E, 2I, H]`` (gate rows first) and ``[E, H, I]`` E4M3, or uint8 of two E2M1 codes each, the first in the low
        bits.
    w13_scale, w2_scale
        ``[E, N, K/32]`` E8M0, or ``[E, N, K/16]`` E4M3 of NVFP4; uint8 of the same bits.
    kind
        One of :data:`kernels.mx_moe.OWN`.
    w13_bias, w2_bias
        ``[E, 2I]`` and ``[E, H]`` bf16, f16 or f32, or None.
    w13_scale_2, w2_scale_2, w13_input_scale, w2_input_scale
        ``[E]`` float32, of NVFP4 and of nothing else: they multiply the scales of the weights and of the inputs.
    activation
        None: ``silu(gate) * up``.
    first_expert
        The global number of this rank's first expert; other experts contribute nothing.
    out_dtype
        The dtype of the output; default: that of the input.
    name
        Named in errors.

    Raises
    ------
    DtypeError, ShapeError, OptionError, DeviceError, InputError, LayoutError
        An operand does not fit; the message names the layer.
    """

    fixed_parameters = (
        *("w13", "w13_scale", "w2", "w2_scale"),
        *("w13_scale_2", "w2_scale_2", "w13_input_scale", "w2_input_scale"),
    )
    w13: torch.nn.Parameter
    w13_scale: torch.nn.Parameter
    w2: torch.nn.Parameter
    w2_scale: torch.nn.Parameter
    w13_bias: torch.nn.Parameter | None
    w2_bias: torch.nn.Parameter | None
    w13_scale_2: torch.nn.Parameter | None
    w2_scale_2: torch.nn.Parameter | None
    w13_input_scale: torch.nn.Parameter | None
    w2_input_scale: torch.nn.Parameter | None

    @checks.checked(gradients=True)
    def __init__(
        self,
        w13: Tensor,
        w13_scale: Tensor,
        w2: Tensor,
        w2_scale: Tensor,
        *,
        kind: str,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        w13_scale_2: Tensor | None = None,
        w2_scale_2: Tensor | None = None,
        w13_input_scale: Tensor | None = None,
        w2_input_scale: Tensor | None = None,
        activation: Activation | None = None,
        first_expert: int = 0,
        out_dtype: torch.dtype | None = None,
        name: str = "MxExperts",
    ) -> None:
        super().__init__()
        if kind not in OWN:
            raise OptionError(f"kind={shown(kind)} of {name}; it is one of {', '.join(OWN)}")
        self.kind, self.name, self.format = kind, name, FORMATS[OWN[kind].weights]
        for key, x in (("w13", w13), ("w2", w2)):
            checks.dtype(f"{key} of {name}", checks.rank(f"{key} of {name}", x, 3), self.format.codes)
            checks.nonempty(f"{key} of {name}", x, 0, 1, 2)
        (experts, up, _), (_, hidden, _) = w13.shape, w2.shape
        self.experts, self.inner, self.hidden, packed = experts, up // 2, hidden, self.format.packed
        due = [experts, up, hidden // packed], [experts, hidden, up // 2 // packed]
        if up % 2 or (list(w13.shape), list(w2.shape)) != due:
            raise ShapeError(f"{name}: w13 {list(w13.shape)} is [E, 2I, H], and w2 {list(w2.shape)} is [E, H, I]")
        self.columns = {"w13": hidden, "w2": self.inner}
        for symbol, extent in (("H", hidden), ("I", self.inner)):
            checks.multiple(f"{symbol} of {name}", extent, self.format.width, "quantise weights padded with zeros")
        self.activation = None if activation is None else Activation(*map(float, activation))
        self.out_dtype = None if out_dtype is None else checks.out_dtype(out_dtype)
        checks.not_negative("first_expert", first_expert)
        self.first_expert = first_expert
        self._gates: Tensor | None = None
        scales, self.scales = {"w13": w13_scale, "w2": w2_scale}, {}
        tensors: dict[str, Tensor | None] = {}
        for key, x in (("w13", w13), ("w2", w2)):
            lies = x.shape[0], x.shape[1], self.columns[key] // self.format.width
            label = f"{key}_scale of {name}"
            scale = checks.operand(label, scales[key], lies, "[E, N, K/width]", self.format.scale, torch.uint8)
            self.scales[f"{key}_scale"] = (*lies[:2], align(self.columns[key], ALIGNMENT) // self.format.width)
            tensors |= {key: self._wide(key, x), f"{key}_scale": self._wide(f"{key}_scale", scale.view(torch.uint8))}
        for key, bias, n in (("w13_bias", w13_bias, up), ("w2_bias", w2_bias, hidden)):
            if bias is not None:
                checks.operand(f"{key} of {name}", bias, (experts, n), "[E, N]", *checks.WIDE)
            tensors[key] = bias
        of_nvfp4 = {"w13_scale_2": w13_scale_2, "w2_scale_2": w2_scale_2}
        of_nvfp4 |= {"w13_input_scale": w13_input_scale, "w2_input_scale": w2_input_scale}
        for key, value in of_nvfp4.items():
            if (value is None) is (kind == "nvfp4"):
                raise InputError(f"{name}: NVFP4 has {key}, and no other kind; this is {kind}")
            if value is not None:
                checks.operand(f"{key} of {name}", value, (experts,), "[E]", torch.float32)
            tensors[key] = value
        checks.same_device(**tensors)
        for key, tensor in tensors.items():
            parameter = None if tensor is None else torch.nn.Parameter(tensor.detach(), requires_grad=False)
            self.register_parameter(key, parameter)
        self._prepare()

    def _wide(self, key: str, x: Tensor) -> Tensor:
        """Codes or scales with zeros behind K, up to its alignment."""
        weight = key.removesuffix("_scale")
        each = self.format.packed if weight == key else self.format.width
        behind = align(self.columns[weight], ALIGNMENT) // each - x.shape[-1]
        return torch.nn.functional.pad(x.view(torch.uint8), (0, behind)).view(x.dtype) if behind else x

    _forward = checks.checked(name="MxExperts")(ExpertsModule._flattened)

    def _compute(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        y: Tensor = moe_block_experts(
            x,
            self.w13,
            self._in_tiles("w13_scale"),
            self.w2,
            self._in_tiles("w2_scale"),
            weights,
            ids,
            self.kind,
            b1=self.w13_bias,
            b2=self.w2_bias,
            gates=self._activated(x.device),
            expert_offset=self.first_expert,
            out_dtype=self.out_dtype,
            **self._of_nvfp4(),
        )
        return y

    def _of_nvfp4(self) -> dict[str, Any]:
        """The factors that follow from the scales of tensors, in every call, so that one which is written is
        followed."""
        given = self.w13_input_scale, self.w13_scale_2, self.w2_input_scale, self.w2_scale_2
        a1, s1, a2, s2 = given
        if a1 is None or s1 is None or a2 is None or s2 is None:
            return {}
        return {"a1_gscale": a1.reciprocal(), "a2_gscale": a2.reciprocal(), "alpha1": a1 * s1, "alpha2": a2 * s2}

    def _activated(self, device: torch.device) -> Tensor | None:
        """``gates`` of the verb, made once for a device."""
        if self.activation is None:
            return None
        if self._gates is None or self._gates.device != device:
            with torch.inference_mode(False):
                one = torch.tensor(self.activation, dtype=torch.float32, device="cpu")
                self._gates = one.expand(self.experts, 3).contiguous().to(device)
        return self._gates

    def _prepare(self) -> None:
        super()._prepare()
        if not self.w13.is_meta:
            self._activated(self.w13.device)

    def _placement(self) -> Tensor:
        """The kind, the first expert and the extents."""
        numbers = [list(OWN).index(self.kind), self.first_expert, self.experts, self.inner, self.hidden]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def extra_repr(self) -> str:
        """The extents and the kind."""
        return f"experts={self.experts}, hidden={self.hidden}, intermediate={self.inner}, {self.kind}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """The columns of the checkpoint."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for weight, extent in self.columns.items():
            for key, each in ((weight, self.format.packed), (f"{weight}_scale", self.format.width)):
                destination[f"{prefix}{key}"] = destination[f"{prefix}{key}"][..., : extent // each].contiguous()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for key in ("w13", "w2", *self.scales):
            if (x := state_dict.get(f"{prefix}{key}")) is not None:
                state_dict[f"{prefix}{key}"] = self._wide(key, x)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | Path | Checkpoint,
        name: str,
        *,
        experts: int | None = None,
        parallel: str = "expert",
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> MxExperts:
        """The experts of a layer, as ``model.layers.3.mlp.experts``.

        They are one tensor each of blocks, scales and biases (gpt-oss: ``NAME.gate_up_proj_blocks``, rows of gate and
        up in turn, with its activation), or ``NAME.0.gate_proj`` and so on (compressed-tensors, ModelOpt).

        Parameters
        ----------
        experts
            Their number; default: as many as are there.
        parallel
            ``expert``: this rank's experts; ``tensor``: its part of each.
        options
            ``activation`` and ``out_dtype`` of the class.

        Raises
        ------
        CheckpointError, OptionError, ShapeError
            A tensor is missing, or the experts are quantised in a way that is not read here.
        """
        source = folder if isinstance(folder, Checkpoint) else Checkpoint(folder)
        reader: Callable[[Checkpoint, str], _Stored] = _Fused if f"{name}.gate_up_proj_blocks" in source else _Apart
        whole_layer: _Stored = reader(source, name)
        count = whole_layer.experts if experts is None else experts
        if count != whole_layer.experts:
            raise CheckpointError(f"{name} has {whole_layer.experts} experts, not {count}")
        first, end = experts_of(name, count, parallel, rank, world)
        blocks = whole_layer.blocks
        span = share(name, "blocks", blocks, rank, world) if parallel == "tensor" else (0, blocks)
        loaded = [whole_layer.expert(number, span) for number in range(first, end)]
        tensors: dict[str, Any] = {key: torch.stack([own[key] for own in loaded]).to(device) for key in loaded[0]}
        scheme = whole_layer.scheme
        for key in ("w13", "w2"):
            tensors[key] = tensors[key].view(FORMATS[scheme.kind].codes)
        if parallel == "tensor" and rank and "w2_bias" in tensors:
            tensors["w2_bias"] = torch.zeros_like(tensors["w2_bias"])
        kind = f"{scheme.inputs}_{scheme.kind}" if scheme.inputs else scheme.kind
        made: dict[str, Any] = {"kind": kind, "first_expert": first, "name": name, **whole_layer.options, **options}
        layer = cls(**tensors, **made)
        layer.process_weights_after_loading()
        return layer


# --- checkpoints ------------------------------------------------------------------------------------------------------


class _Stored:
    """The experts of a checkpoint: their number, the blocks of I, and the tensors of one."""

    experts: int
    blocks: int
    scheme: Scheme
    options: Mapping[str, Any] = {}

    def expert(self, number: int, span: Span) -> dict[str, Tensor]:
        """Codes and scales as uint8, and what else there is, of the blocks ``span`` of I."""
        raise NotImplementedError


class _Fused(_Stored):
    """gpt-oss: ``[E, 2I, H/32, 16]`` blocks of bytes, ``[E, 2I, H/32]`` scales and ``[E, 2I]`` biases, gate and up in
    turn; ``[E, H, I/32, 16]`` and so on of down."""

    def __init__(self, source: Checkpoint, name: str) -> None:
        self.scheme = source.scheme(name)
        if self.scheme.weight != "blocks":
            raise CheckpointError(f"{name} has blocks, but is quantised as {self.scheme}")
        self.parts: dict[str, Source] = {
            f"{weight}_{part}": source.tensor(f"{name}.{stem}_{part}")
            for weight, stem in (("w13", "gate_up_proj"), ("w2", "down_proj"))
            for part in ("blocks", "scales", "bias")
            if part != "bias" or f"{name}.{stem}_bias" in source
        }
        (self.experts, up, across, width), down = self.parts["w13_blocks"].shape, self.parts["w2_blocks"].shape
        form = FORMATS["mxfp4"]
        due = (self.experts, across * form.width, up // 2 // form.width, form.width // form.packed)
        if width != due[3] or tuple(down) != due:
            raise ShapeError(f"{name}: blocks {[self.experts, up, across, width]} of gate and up, {list(down)} of down")
        self.blocks = due[2]
        limit = source.config.get("swiglu_limit")
        self.options = {"activation": SWIGLUOAI if limit is None else SWIGLUOAI._replace(limit=float(limit))}

    def expert(self, number: int, span: Span) -> dict[str, Tensor]:
        here, everything, width = slice(number, number + 1), slice(None), FORMATS["mxfp4"].width
        rows, made = slice(2 * width * span[0], 2 * width * span[1]), dict[str, Tensor]()
        for key, part in self.parts.items():
            weight, what = key.split("_")
            ways = (here, rows) if weight == "w13" else (here, everything, slice(*span))
            own = part[(*ways, *[everything] * (len(part.shape) - len(ways)))[: len(part.shape)]][0]
            if weight == "w13":
                own = torch.cat([own[::2], own[1::2]])
            name = {"blocks": weight, "scales": f"{weight}_scale", "bias": f"{weight}_bias"}[what]
            made[name] = own.flatten(1) if what == "blocks" else own
        return made


class _Apart(_Stored):
    """``NAME.0.gate_proj``, ``.up_proj`` and ``.down_proj``, or ``w1``, ``w3`` and ``w2``; each a linear layer."""

    def __init__(self, source: Checkpoint, name: str) -> None:
        self.source, self.name = source, name
        self.keys = next(
            (keys for keys in PROJECTIONS if any(_has(source, f"{name}.0.{key}") for key in keys)), PROJECTIONS[0]
        )
        self.experts = 0
        while _has(source, f"{name}.{self.experts}.{self.keys[0]}"):
            self.experts += 1
        self.scheme = source.scheme(f"{name}.0.{self.keys[2]}")
        if self.scheme.kind not in FORMATS:
            raise CheckpointError(
                f"{name}: experts of {self.scheme.kind} scales are read by Fp8Experts.from_checkpoint"
            )
        self.blocks = stored(source, self.scheme, f"{name}.0.{self.keys[2]}")[3]

    def expert(self, number: int, span: Span) -> dict[str, Tensor]:
        source, scheme = self.source, self.scheme
        names = [f"{self.name}.{number}.{key}" for key in self.keys]
        if any(source.scheme(name) != scheme for name in names):
            raise CheckpointError(f"{', '.join(names)} are quantised differently")
        rows = tuple(extent * FORMATS[scheme.kind].width for extent in span)
        gate, up, down = (stored(source, scheme, name) for name in names)
        cuts = [cut(scheme, *own[:2], (rows[0], rows[1]), (0, own[3])) for own in (gate, up)]
        cuts.append(cut(scheme, *down[:2], (0, down[2]), span))
        bytes_of = [tuple(map(bits, pair)) for pair in cuts]
        made = {"w13": torch.cat([bytes_of[0][0], bytes_of[1][0]]), "w2": bytes_of[2][0]}
        made |= {"w13_scale": torch.cat([bytes_of[0][1], bytes_of[1][1]]), "w2_scale": bytes_of[2][1]}
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in source]
        if biases and len(biases) != len(names):
            raise CheckpointError(f"of {', '.join(names)} only {', '.join(biases)} is there")
        if biases:
            gate_bias, up_bias = (source.tensor(bias)[(slice(*rows),)] for bias in biases[:2])
            made |= {"w13_bias": torch.cat([gate_bias, up_bias]), "w2_bias": whole(source.tensor(biases[2]))}
        return made | (self._scalars(names) if scheme.kind == "nvfp4" else {})

    def _scalars(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Of gate and up the one scale of their weights, and the larger of their inputs."""
        gate, up, down = scalars(self.source, self.scheme, names, self.scheme.second)
        if gate != up:
            raise CheckpointError(
                f"{names[0]} and {names[1]} have scales {gate} and {up} of their tensors; quantise them together"
            )
        inputs = scalars(self.source, self.scheme, names, self.scheme.input)
        values = {
            "w13_scale_2": gate,
            "w2_scale_2": down,
            "w13_input_scale": max(inputs[:2]),
            "w2_input_scale": inputs[2],
        }
        return {key: torch.tensor(value, dtype=torch.float32, device="cpu") for key, value in values.items()}


def _has(source: Checkpoint, layer: str) -> bool:
    return f"{layer}.weight" in source or f"{layer}.weight_packed" in source
