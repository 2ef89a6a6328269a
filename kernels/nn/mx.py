"""A linear layer of block-scaled codes as a module: MXFP8, MXFP4 and NVFP4.

``y = alpha * dequantised(q(x)) @ dequantised(weight).T + bias``, with ``x`` quantised on the way: in blocks of 32 with
E8M0 scales (:func:`kernels.mxfp8_quantize`, :func:`kernels.mxfp4_quantize`), or of 16 with E4M3 scales under one scale
of the tensor (:func:`kernels.nvfp4_quantize`), which a checkpoint brings. The product is :func:`kernels.scaled_mm`: one
rounding, behind the bias. Where no library of the machine has block-scaled instructions, it is emulated, as its plan
says.

After loading (:meth:`~kernels.nn.linear.Fp8Module.process_weights_after_loading`) the scales of the weight lie in the
tiles of 128x4 that the instructions read; before, row by row as in a checkpoint. A state dict has them row by row.
Nothing else is derived from a value: ``alpha`` is multiplied in every call, so that a scale which is written is
followed.

NaN and infinity follow the quantisers and the product. An input that requires a gradient is refused; autocast changes
nothing (:mod:`kernels.nn.linear`).

Not covered: experts (:mod:`kernels.nn.mx_experts`); weight-only schemes; rotations; K that is no multiple of a block.

Source: OCP MX 1.0; NVIDIA NVFP4; compressed-tensors (``nvfp4-pack-quantized``, ``mxfp4-pack-quantized``), ModelOpt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import checks
from ..errors import CheckpointError, OptionError, ShapeError, shown
from ..layout import swizzle_scale
from ..mx import mxfp4_quantize, mxfp8_quantize, nvfp4_quantize
from ..mx_blocks import FORMATS, Format
from ..mx_products import scaled_mm
from .checkpoint import Checkpoint, Scheme
from .linear import Fp8Module, LinearModule, Part, processing
from .shards import Source, Span, whole


class MxModule(Fp8Module):
    """A module whose weights have bytes of scales, which lie in tiles after loading and row by row in a state."""

    format: Format
    scales: Mapping[str, tuple[int, ...]]
    """Names of the scales, and their shapes row by row."""

    def _tiled(self, name: str) -> bool:
        return self._parameter(name).dim() < len(self.scales[name])

    @property
    def _laid_out(self) -> bool:
        return all(map(self._tiled, self.scales))

    def _prepare(self) -> None:
        if self._laid_out or self._parameter(next(iter(self.scales))).is_meta:
            return
        with processing, torch.inference_mode(False), torch.no_grad():
            for name in self.scales:
                if not self._tiled(name):
                    tiled = swizzle_scale(self._parameter(name).detach().contiguous())
                    self.register_parameter(name, torch.nn.Parameter(tiled, requires_grad=False))

    def _in_tiles(self, name: str) -> Tensor:
        """The scales flat in tiles, laid out here where a compiled graph finds them row by row."""
        scale = self._parameter(name)
        return scale if self._tiled(name) else swizzle_scale(scale)

    def _by_row(self, name: str) -> Tensor:
        """The scales as in a checkpoint, uint8."""
        scale = self._parameter(name).detach()
        *groups, rows, columns = self.scales[name]
        if not self._tiled(name):
            return scale
        down, across = -(-rows // 128), -(-columns // 4)
        tiles = scale.view(*groups, down, across, 32, 4, 4).transpose(-4, -2)
        return tiles.reshape(*groups, down * 128, across * 4)[..., :rows, :columns].contiguous()

    def _bytes_of(self, name: str, scale: Tensor) -> Tensor:
        checks.dtype(name, scale, self.format.scale, torch.uint8)
        return scale.view(torch.uint8)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """The scales row by row, as in a checkpoint."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.scales:
            destination[f"{prefix}{name}"] = self._by_row(name)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Scales of a checkpoint: row by row, of uint8 or of their own dtype."""
        for name in self.scales:
            if (scale := state_dict.get(key := f"{prefix}{name}")) is not None:
                state_dict[key] = self._bytes_of(f"{name} of the state of {self.name}", scale)
                self.register_parameter(name, torch.nn.Parameter(self._by_row(name), requires_grad=False))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class MxLinear(MxModule, LinearModule):
    """A linear layer with a weight of MXFP8, MXFP4 or NVFP4.

    Parameters
    ----------
    weight
        ``[N, K]`` E4M3, or uint8 ``[N, K/2]`` of two E2M1 codes each, the first in the low bits.
    weight_scale
        ``[N, K/32]`` E8M0, or ``[N, K/16]`` E4M3 of NVFP4; uint8 of the same bits.
    bias
        ``[N]`` bf16, f16 or f32.
    kind
        ``mxfp8``, ``mxfp4`` or ``nvfp4``.
    weight_scale_2, input_scale
        One float32 value each, of NVFP4 and of nothing else: they multiply the weight's scales and the input's.
    out_dtype
        The dtype of the output; default: that of the input.
    name
        Named in errors.

    Raises
    ------
    DtypeError, ShapeError, OptionError, DeviceError, InputError, LayoutError
        An operand does not fit; the message names the layer.
    """

    kinds = tuple(FORMATS)
    fixed_parameters = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    weight: torch.nn.Parameter
    weight_scale: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    weight_scale_2: torch.nn.Parameter | None
    input_scale: torch.nn.Parameter | None

    @checks.checked(gradients=True)
    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        *,
        kind: str,
        weight_scale_2: Tensor | None = None,
        input_scale: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        name: str = "MxLinear",
    ) -> None:
        super().__init__()
        if kind not in FORMATS:
            raise OptionError(f"kind={shown(kind)} of {name}; it is one of {', '.join(FORMATS)}")
        self.kind, self.name, self.format = kind, name, FORMATS[kind]
        checks.same_device(
            weight=weight, weight_scale=weight_scale, bias=bias, weight_scale_2=weight_scale_2, input_scale=input_scale
        )
        checks.dtype(f"the weight of {name}", checks.rank(f"the weight of {name}", weight, 2), self.format.codes)
        checks.nonempty(f"the weight of {name}", weight, 0, 1)
        self.out_features, self.in_features = weight.shape[0], weight.shape[1] * self.format.packed
        checks.multiple(f"K of {name}", self.in_features, self.format.width, "quantise a weight padded with zeros")
        self.scales = {"weight_scale": (due := (self.out_features, self.in_features // self.format.width))}
        scale = checks.operand(
            f"the scale of {name}", weight_scale, due, "[N, K/width]", self.format.scale, torch.uint8
        )
        if bias is not None:
            checks.operand(f"the bias of {name}", bias, (self.out_features,), "[N]", *checks.WIDE)
        for key, value in (("weight_scale_2", weight_scale_2), ("input_scale", input_scale)):
            if (value is None) is (kind == "nvfp4"):
                raise OptionError(f"{name}: NVFP4 has {key}, and no other kind; this is {kind}")
            checks.scalar(f"{key} of {name}", value)
        self.out_dtype = None if out_dtype is None else checks.out_dtype(out_dtype)
        tensors = {"weight": weight, "weight_scale": scale.view(torch.uint8), "bias": bias}
        tensors |= {"weight_scale_2": weight_scale_2, "input_scale": input_scale}
        for key, tensor in tensors.items():
            if tensor is not None and key in ("weight_scale_2", "input_scale"):
                tensor = tensor.reshape(1)
            parameter = None if tensor is None else torch.nn.Parameter(tensor.detach(), requires_grad=False)
            self.register_parameter(key, parameter)
        self._prepare()

    def forward(self, input: Tensor) -> Tensor:
        """``[..., K]`` bf16, f16 or f32 to ``[..., N]`` of the same dtype (or ``out_dtype``).

        ``input`` ``[..., K]``.
        """
        return self._forward(input)

    @checks.checked(name="MxLinear")
    def _forward(self, input: Tensor) -> Tensor:
        return self._planned(self._compute, input)

    def _compute(self, input: Tensor) -> Tensor:
        checks.dtype(f"the input of {self.name}", input, *checks.WIDE)
        if input.dim() < 1 or input.shape[-1] != self.in_features:
            raise ShapeError(
                f"the input of {self.name} is {list(input.shape)}; it is [..., K] with K={self.in_features}"
            )
        checks.same_device(weight=self.weight, input=input)
        if not is_compiling():
            self._prepare()
        x, dtype = input.reshape(-1, self.in_features), self.out_dtype or input.dtype
        if x.shape[0] == 0:
            return input.new_empty(*input.shape[:-1], self.out_features, dtype=dtype)
        y = scaled_mm(
            *self._operands(x, self._in_tiles("weight_scale").view(self.format.scale)),
            self.input_scale,
            self.weight_scale_2,
            self.bias,
            dtype,
        )
        return y.view(*input.shape[:-1], self.out_features)

    def _operands(self, x: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self.kind == "mxfp8":
            q, scale = mxfp8_quantize(x)
        elif self.kind == "mxfp4":
            q, scale = mxfp4_quantize(x)
        else:
            q, scale = nvfp4_quantize(x, self._of_input(), is_global_scale_inversed=True)
        return q, self.weight.t(), scale.view(self.format.scale), weight_scale

    def _of_input(self) -> Tensor:
        assert self.input_scale is not None  # of NVFP4
        return self.input_scale

    def _warm_up(self, rows: int) -> None:
        dtype = self.out_dtype or torch.bfloat16
        self(torch.zeros(rows, self.in_features, dtype=dtype, device=self.weight.device))

    def _placement(self) -> Tensor:
        """The kind and the extents."""
        numbers = [list(FORMATS).index(self.kind), self.out_features, self.in_features]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def extra_repr(self) -> str:
        """The extents and the kind."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.kind}"

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Scalars of any shape of one value, too."""
        for name in ("weight_scale_2", "input_scale"):
            if (value := state_dict.get(f"{prefix}{name}")) is not None:
                checks.scalar(f"{name} of the state of {self.name}", value)
                state_dict[f"{prefix}{name}"] = value.reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @classmethod
    def _of_checkpoint(
        cls,
        source: Checkpoint,
        scheme: Scheme,
        names: Sequence[str],
        part: Part,
        device: torch.device | str,
        **options: Any,
    ) -> MxLinear:
        if scheme.inputs:
            raise CheckpointError(f"{', '.join(names)}: {scheme.kind} with inputs of {scheme.inputs} is of MxExperts")
        parts = [_part(source, scheme, name, part) for name in names]
        weight, scale = (torch.cat([bits(own[i]) for own in parts]).to(device) for i in (0, 1))
        if scheme.kind == "nvfp4":
            second = scalars(source, scheme, names, scheme.second)
            if len(set(second)) > 1:
                raise CheckpointError(f"{', '.join(names)} have scales {second} of their tensors; load them one by one")
            inputs = max(scalars(source, scheme, names, scheme.input))
            options |= {
                "weight_scale_2": torch.tensor([second[0]], dtype=torch.float32, device=device),
                "input_scale": torch.tensor([inputs], dtype=torch.float32, device=device),
            }
        bias = part.bias(source, names)
        return cls(
            weight.view(FORMATS[scheme.kind].codes),
            scale,
            None if bias is None else bias.to(device),
            kind=scheme.kind,
            name=" + ".join(names),
            **options,
        )


def bits(x: Tensor) -> Tensor:
    """``x`` of a one-byte dtype as uint8, dense; of the same shape."""
    return x.contiguous().view(torch.uint8)


def _part(source: Checkpoint, scheme: Scheme, name: str, part: Part) -> tuple[Tensor, Tensor]:
    """This rank's codes and scales."""
    weight, scale, n, blocks = stored(source, scheme, name)
    rows, columns = part.rows(name, n), part.columns(name, blocks, "blocks")
    return cut(scheme, weight, scale, rows, columns)


def cut(scheme: Scheme, weight: Source, scale: Source, rows: Span, blocks: Span) -> tuple[Tensor, Tensor]:
    """Codes and scales of some rows and blocks of columns.

    ``weight`` ``[N, K]`` or, of four bits, ``[N, K/2]``, ``scale`` ``[N, blocks]``; returns the parts in the dtypes in
    store.
    """
    form = FORMATS[scheme.kind]
    step = form.width // form.packed
    return weight[slice(*rows), slice(blocks[0] * step, blocks[1] * step)], scale[slice(*rows), slice(*blocks)]


def stored(source: Checkpoint, scheme: Scheme, name: str) -> tuple[Source, Source, int, int]:
    """The codes and scales of a layer, its rows, and the blocks of one.

    Returns codes ``[N, K]``, or two a byte, and scales ``[N, blocks]`` in the dtypes in store.

    Raises CheckpointError, ShapeError.
    """
    form = FORMATS[scheme.kind]
    weight, scale = source.tensor(f"{name}.{scheme.weight}"), source.tensor(f"{name}.{scheme.scale}")
    if weight.dtype != form.codes or len(weight.shape) != 2:
        raise CheckpointError(
            f"{name}.{scheme.weight} is {weight.dtype} {list(weight.shape)}; of {scheme.kind} it is {form.codes} [N, K]"
        )
    n, blocks = weight.shape[0], weight.shape[1] * form.packed // form.width
    if tuple(scale.shape) != (n, blocks):
        raise ShapeError(f"the scale of {name} has shape {list(scale.shape)}; it is [{n}, {blocks}]")
    return weight, scale, n, blocks


def scalars(source: Checkpoint, scheme: Scheme, names: Sequence[str], key: str) -> list[float]:
    """A scale of each tensor that multiplies; a format that divides by it has its inverse, in float32.

    Raises CheckpointError.
    """
    values = torch.stack([whole(source.tensor(f"{name}.{key}")).to(torch.float32).reshape(()) for name in names])
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        raise CheckpointError(f"{key} of {', '.join(names)} holds {values.tolist()}; scales are finite and positive")
    made: list[float] = (values.reciprocal() if scheme.divides else values).tolist()
    return made
