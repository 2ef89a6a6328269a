"""A quantised linear layer as a module: ``y = x @ dequantised(weight).T + bias`` with ``x`` quantised on the way.

The scales of the weight decide the product. Per block (128x128): ``x`` is quantised in groups of 128 along K and
multiplied by :func:`kernels.fp8_gemm_nt`. Per tensor or per channel: ``x`` is quantised per token (or with the static
scale of the checkpoint) and multiplied by :func:`kernels.cutlass_scaled_mm`.

Roundings of a block-scaled layer: the product is written in the dtype of the output and rounded once; with a bias it
is written in float32, and rounded when the bias is added. On a GPU a bf16 output with a bias keeps the library that the
plan takes for bf16; where that writes bf16 only (DeepGEMM), the product is rounded to bf16 first, as in engines. So are
f16 and float32 outputs where no library writes them. Per tensor and per channel the bias is added in float32 before the
one rounding.

After loading, :meth:`Fp8Module.process_weights_after_loading` brings the weight into the form that the kernels of this
machine take, once: a layer of UE8M0 scales is quantised again where they are no powers of two, and its scale is packed
where the product reads packed exponents (DeepGEMM on Blackwell). A state dict has float32 scales either way. A layer
may be made on meta, loaded later by ``load_state_dict``, with ``assign=True`` or after ``to_empty``, and called.

NaN and infinity follow the quantisers (:mod:`kernels.quantize`). An input that requires a gradient is refused, in eager
calls as in compiled ones. Autocast changes nothing: the output has the dtype of the input or ``out_dtype``, where
``torch.nn.Linear`` would give the region's.

Not covered: training, communication between ranks (:func:`sum_ranks` is the arithmetic of a sum, not its transport),
replication of key and value heads over more ranks than there are heads.

Source: vLLM (fp8.py), compressed-tensors, ModelOpt.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import checks, warming
from .. import platform as machines
from ..backends._host import ALIGNMENT
from ..blockscaled import block_scale, deepgemm_blockscale_linear, fp8_gemm_nt, loaded_weight
from ..checks import FP8
from ..context import constant, entered
from ..errors import CheckpointError, NoBackendError, OptionError, ShapeError, shown
from ..linear import cutlass_scaled_mm
from ..moe_layer import silu_and_mul
from ..plan import forced_backends, plan
from ..quantize import per_token_group_quant_fp8, scaled_fp8_quant
from ..records import FALLBACKS, Problem
from ..repeated import PLAIN
from ..routes import cached, dtype_name, preferring
from ..support import BLOCK, DENSE, SWITCH_M
from .checkpoint import Checkpoint, Scheme
from .shards import KINDS, SCALES, Layout, Shard, Span, check, fill, finite, kind_of, lay_out, share, whole

PARALLEL = (None, "column", "row")
UNUSED = frozenset({"name", "training", "first_expert"})
"""Attributes of a layer on which no kernel depends."""
WARM_UP = 2 * SWITCH_M
"""The most rows of the calls that compile a layer's kernels on a GPU, unless others are named."""
processing = threading.RLock()
"""Held while a layer is prepared: threads that call it first at once prepare it once."""


class Fp8Module(torch.nn.Module):
    """A module whose quantised tensors keep their dtypes under ``.half()``, ``.to(dtype)`` and ``load_state_dict``.

    Its state has a ``layout`` beside the tensors: numbers that say which part of a weight lies where.
    """

    fixed_parameters: tuple[str, ...] = ()
    """Names of the parameters that keep their dtype and only move."""
    name: str
    ue8m0 = False
    block_scales: Mapping[str, int] = {}
    """Names of scales of 128x128 blocks, which may be packed, and K of their weights."""
    _preferences: tuple[str | None, str | None] | None = None
    _ready: dict[str, tuple[object, ...]]

    @property
    def backend(self) -> str | None:
        """Backends of this layer instead of the plan's: ``torch``, or ``fp8_gemm_nt=triton_gemm,quant_group=eager``, as
        ``FP8_KERNELS_BACKEND`` names them; None: the plan's. One that cannot serve is an error of the call, which says
        why; nothing takes its place. A compiled graph plans when it runs, and refuses such a layer."""
        return None if self._preferences is None else self._preferences[0]

    @backend.setter
    def backend(self, backends: str | None) -> None:
        forced_backends(backends or "")
        self._prefer(backends, self.fallback)

    @property
    def fallback(self) -> str | None:
        """What follows where a backend of this layer fails to load, or to compile in a warm-up: ``next``, ``warn`` or
        ``refuse``, as ``FP8_KERNELS_FALLBACK`` says for the process; None: as it says. A compiled graph refuses such a
        layer, as of :attr:`backend`."""
        return None if self._preferences is None else self._preferences[1]

    @fallback.setter
    def fallback(self, fallback: str | None) -> None:
        if fallback not in (None, *FALLBACKS):
            raise OptionError(f"fallback={shown(fallback)}; it is one of {', '.join(FALLBACKS)}, or None")
        self._prefer(self.backend, fallback)

    def _prefer(self, backends: str | None, fallback: str | None) -> None:
        self._preferences = None if backends is None and fallback is None else (backends, fallback)

    def _planned(self, run: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        """``run`` with the backends and the fallback of this layer."""
        if self._preferences is None:
            return run(*operands)
        if is_compiling():
            raise OptionError(
                f"{self.name} has backend={self.backend!r} and fallback={self.fallback!r}, and a compiled "
                "graph plans when it runs: compile without them, and set FP8_KERNELS_BACKEND and FP8_KERNELS_FALLBACK, "
                "or run the graph in kernels.routes.only"
            )
        with entered(preferring(*self._preferences)):
            return run(*operands)

    def _placement(self) -> Tensor:
        """The numbers that another state's must equal."""
        raise NotImplementedError

    def process_weights_after_loading(self, warm_up: int | Sequence[int] | None = None, *, tune: bool = False) -> None:
        """Prepare what was loaded for the kernels of this machine; on meta nothing is done yet.

        Called by ``from_checkpoint``, by hand, or by the first call, which costs that call the time and waits for the
        device. Once it is done, it does nothing until other weights are loaded.

        Parameters
        ----------
        warm_up
            The most rows of a call in serving, or numbers of rows (:func:`kernels.warm_up`): the layer is called with
            them, so that every kernel is compiled before serving; default: none on a CPU, :data:`WARM_UP` on a GPU.
        tune
            As of :func:`kernels.warm_up`.

        Raises
        ------
        OptionError
            A CUDA graph is being captured, in which nothing can be prepared.
        NoBackendError
            A backend failed in the warm-up, and nothing takes its place (:attr:`fallback`).
        """
        self._prepare()
        weight = self._parameters[self.fixed_parameters[0]]
        if weight is None or weight.is_meta:
            return
        rows = (WARM_UP if weight.is_cuda else ()) if warm_up is None else warm_up
        warming.warm_up(self._warm_up, rows, tune=tune)

    def _specialisation(self) -> tuple[object, ...]:
        """What the kernels of this layer are compiled for: layers of equal ones need one warm-up."""
        options = ((key, value) for key, value in vars(self).items() if type(value) in PLAIN and key not in UNUSED)
        there = ((key, p) for key, p in self._parameters.items() if p is not None)
        weights = ((key, p.dtype, p.device, p.shape, p.data_ptr() % ALIGNMENT) for key, p in there if not p.is_meta)
        return type(self), self._preferences, *sorted(options), *weights

    def _prepare(self) -> None:
        """Bring the parameters into the form that :meth:`forward` takes."""

    def _parameter(self, name: str) -> torch.nn.Parameter:
        parameter = self._parameters[name]
        assert parameter is not None
        return parameter

    def _is_ready(self, name: str, scale: Tensor) -> bool:
        """Whether this scale, of a layer of UE8M0 scales, is as :meth:`_load_powers` leaves it."""
        return scale.dtype is torch.int32 or self._ready.get(name) == _state(scale)

    def _load_powers(self, name: str, load: Callable[..., tuple[Tensor, Tensor]]) -> None:
        """The weight ``name`` and its scale by ``load``, which quantises under powers of two and packs, once."""
        key = f"{name}_scale"
        if self._parameter(name).is_meta or self._is_ready(key, self._parameter(key)):
            return
        if checks.capturing(self._parameter(name).device):
            raise OptionError(f"{self.name} is not prepared: call process_weights_after_loading() before the capture")
        with processing, torch.inference_mode(False), torch.no_grad():
            loaded = self._parameter(key)
            if self._is_ready(key, loaded):  # another thread was first
                return
            finite(f"{key} of {self.name}", block_scale(loaded, self.block_scales[key]))
            weight, scale = load(self._parameter(name).detach(), loaded.detach(), ue8m0=True)
            if scale.data_ptr() != loaded.data_ptr():
                self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
                self.register_parameter(key, torch.nn.Parameter(scale, requires_grad=False))  # last: it is looked at
            self._ready[key] = _state(self._parameter(key))

    def _float_scale(self, name: str = "weight_scale") -> Tensor:
        """A scale in float32, as in a checkpoint."""
        scale = self._parameter(name).detach()
        return block_scale(scale, self.block_scales[name]) if name in self.block_scales else scale

    def _warm_up(self, rows: int) -> None:
        """Call the layer with so many rows of zeros."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        fixed = {id(p) for name in self.fixed_parameters if (p := self._parameters.get(name)) is not None}

        def moved(t: Tensor) -> Tensor:
            result = fn(t)
            return t.to(result.device) if id(t) in fixed and result.dtype != t.dtype else result

        apply: Any = super()._apply  # torch.nn is typed in part
        return apply(moved, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Codes as bytes: ``pickle`` takes no tensor of them."""
        kept = {name: None if p is None else (p.dtype, _bytes(p)) for name, p in self._parameters.items()}
        return {**self.__dict__, "_parameters": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = state["_parameters"]
        state["_parameters"] = {
            name: None if item is None else torch.nn.Parameter(item[1].view(item[0]), requires_grad=False)
            for name, item in kept.items()
        }
        restore: Any = super().__setstate__  # torch.nn is typed in part
        restore(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Not by the state: parameters that are shared stay so."""
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}layout"] = self._placement()
        for name in self.block_scales:
            if self._parameter(name).dtype is torch.int32:
                destination[f"{prefix}{name}"] = self._float_scale(name)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Refuse what ``copy_`` would cast or misplace."""
        layout, placement = state_dict.pop(f"{prefix}layout", None), self._placement()
        if layout is not None and not torch.equal(layout.cpu(), placement):
            raise ShapeError(
                f"{self.name} is laid out as {placement.tolist()}; the state is of another slice: {layout.tolist()}"
            )
        for name in self.block_scales:
            if f"{prefix}{name}" in state_dict:
                if self._parameter(name).dtype is torch.int32:
                    self.register_parameter(name, torch.nn.Parameter(self._float_scale(name), requires_grad=False))
                self._ready.pop(name, None)
        for name in self.fixed_parameters:
            value, mine = state_dict.get(f"{prefix}{name}"), self._parameters.get(name)
            if value is not None and mine is not None:
                checks.dtype(f"{name} of the state of {self.name}", value, mine.dtype)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Part(NamedTuple):
    """What a rank holds of a layer: ``parallel`` as of :meth:`LinearModule.from_checkpoint`, and which part of how
    many."""

    parallel: str | None
    rank: int
    world: int

    @classmethod
    def checked(cls, parallel: str | None, rank: int, world: int) -> Part:
        """Raises OptionError."""
        if parallel not in PARALLEL:
            raise OptionError(f"parallel={shown(parallel)}; it is one of {', '.join(map(str, PARALLEL))}")
        if parallel is None and (rank, world) != (0, 1):
            raise OptionError(f"rank={shown(rank)} of world={shown(world)} without parallel=; say column or row")
        return cls(parallel, rank, world)

    def rows(self, name: str, extent: int) -> Span:
        """Its rows of a weight."""
        return share(name, "rows", extent, self.rank, self.world) if self.parallel == "column" else (0, extent)

    def columns(self, name: str, extent: int, axis: str = "columns") -> Span:
        """Its columns, or blocks of columns."""
        return share(name, axis, extent, self.rank, self.world) if self.parallel == "row" else (0, extent)

    def bias(self, source: Checkpoint, names: Sequence[str]) -> Tensor | None:
        """Its part of the biases below each other, ``[N]`` of the dtype of the checkpoint; of a sum over ranks
        they are rank 0's.

        Raises CheckpointError.
        """
        having = [name for name in names if f"{name}.bias" in source]
        if having and len(having) != len(names):
            raise CheckpointError(f"only {having[0]} of {len(names)} fused layers has a bias; load them one by one")
        if not having or (self.parallel == "row" and self.rank):
            return None
        biases = {name: source.tensor(f"{name}.bias") for name in names}
        return torch.cat([bias[(slice(*self.rows(name, bias.shape[0])),)] for name, bias in biases.items()])


class LinearModule(Fp8Module):
    """A linear layer that a checkpoint holds; ``kinds`` of scales (:class:`~kernels.nn.checkpoint.Scheme`) that its
    class reads."""

    kinds: ClassVar[Collection[str]]

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | Path | Checkpoint,
        *names: str,
        parallel: str | None = None,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> Self:
        """A layer of a checkpoint; of several names, their rows below each other as one layer.

        Parameters
        ----------
        folder
            The folder with ``config.json``, or a :class:`~kernels.nn.Checkpoint` to load many layers with.
        names
            As ``model.layers.3.mlp.down_proj``: the tensors' names without ``.weight``.
        parallel
            ``column``: this rank's part of the rows of each weight, its outputs stand beside those of other ranks;
            ``row``: its part of the columns, its outputs are added (:func:`sum_ranks`), and the bias is rank 0's.
            None: the whole weight. A part of a weight with 128x128 blocks may begin and end inside one; columns of MX
            and NVFP4 begin and end between two.
        rank, world
            The part.
        options
            ``out_dtype``, ``ue8m0`` of the class.

        Raises
        ------
        CheckpointError
            A file or a tensor is missing, fused layers are quantised differently or have scales that cannot be one, or
            a layer is quantised in a way that this class does not read.
        OptionError, ShapeError
            There is no such part, or no name.
        """
        part = Part.checked(parallel, rank, world)
        if not names:
            raise OptionError("name at least one layer, as model.layers.3.mlp.down_proj")
        source = folder if isinstance(folder, Checkpoint) else Checkpoint(folder)
        schemes = [source.scheme(name) for name in names]
        if len(set(schemes)) > 1:
            raise CheckpointError(f"{', '.join(names)} are quantised differently ({schemes}); load them one by one")
        scheme = schemes[0]
        if scheme.kind not in cls.kinds:
            reader = next((c.__name__ for c in LinearModule.__subclasses__() if scheme.kind in c.kinds), "no layer")
            raise CheckpointError(f"{', '.join(names)}: {scheme.kind} is read by {reader}.from_checkpoint")
        layer = cls._of_checkpoint(source, scheme, names, part, device, **options)
        layer.process_weights_after_loading()
        return layer

    @classmethod
    def _of_checkpoint(
        cls,
        source: Checkpoint,
        scheme: Scheme,
        names: Sequence[str],
        part: Part,
        device: torch.device | str,
        **options: Any,
    ) -> Self:
        """The layer of these names, which are quantised alike."""
        raise NotImplementedError


class Fp8Linear(LinearModule):
    """A linear layer with an E4M3 weight.

    Parameters
    ----------
    weight
        ``[N, K]`` E4M3. Kept as it is where no padding is needed, so that ranks of one process can share it.
    weight_scale
        float32, bf16, f16 or E8M0; it multiplies, whatever its name in a checkpoint. One value; ``[N]`` or ``[N, 1]``;
        or ``[ceil(N/128), ceil(K/128)]``.
    bias
        ``[N]`` bf16, f16 or f32.
    input_scale
        One float32 value: static activations. Only per tensor and per channel.
    kind
        ``tensor``, ``channel`` or ``block``, where the shape of the scale leaves two open.
    per_token
        Dynamic activations get a scale for each token, else one for all. Not per block.
    out_dtype
        The dtype of the output; default: that of the input.
    ue8m0
        Scales that are powers of two, which DeepGEMM needs on Blackwell; default:
        :func:`kernels.platform.quantises_to_ue8m0`. A weight with other scales is quantised again.
    name
        Named in errors.

    Raises
    ------
    DtypeError, ShapeError, OptionError, ValueRangeError
        An operand does not fit; the message names the layer and the way out.
    """

    kinds = KINDS
    fixed_parameters = ("weight", "weight_scale", "input_scale")
    weight: torch.nn.Parameter
    weight_scale: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    input_scale: torch.nn.Parameter | None

    @checks.checked(gradients=True)
    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        *,
        input_scale: Tensor | None = None,
        kind: str | None = None,
        per_token: bool = True,
        out_dtype: torch.dtype | None = None,
        ue8m0: bool | None = None,
        name: str = "Fp8Linear",
    ) -> None:
        checks.same_device(weight=weight, weight_scale=weight_scale, bias=bias, input_scale=input_scale)
        rows, columns = ((0, extent) for extent in checks.rank(f"the weight of {name}", weight, 2).shape)
        shard = Shard(name, weight, weight_scale, rows, columns)
        self._place(
            [shard],
            kind or kind_of(name, weight, weight_scale),
            bias,
            weight.device,
            input_scale=input_scale,
            per_token=per_token,
            out_dtype=out_dtype,
            ue8m0=ue8m0,
            name=name,
        )

    @classmethod
    def from_shards(
        cls,
        shards: Sequence[Shard],
        *,
        kind: str,
        bias: Tensor | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> Fp8Linear:
        """A layer of several weights below each other (qkv, gate and up), each cut to its own rows.

        ``bias`` ``[N]`` bf16, f16 or f32.

        Shards per tensor with different scales become one weight per channel, which changes no value. ``options`` are
        those of the class.

        Raises OptionError.
        """
        if not shards:
            raise OptionError("a layer needs at least one shard")
        layer = cls.__new__(cls)
        layer._place(list(shards), kind, bias, torch.device(device), **options)
        return layer

    @classmethod
    def _of_checkpoint(
        cls,
        source: Checkpoint,
        scheme: Scheme,
        names: Sequence[str],
        part: Part,
        device: torch.device | str,
        **options: Any,
    ) -> Fp8Linear:
        shards = [_shard(source, name, scheme.scale, part) for name in names]
        return cls.from_shards(
            shards,
            kind=scheme.kind,
            bias=part.bias(source, names),
            device=device,
            input_scale=static_scale(source, " + ".join(names), names) if scheme.static else None,
            per_token=scheme.per_token,
            name=" + ".join(names),
            **options,
        )

    def _place(
        self,
        shards: list[Shard],
        kind: str,
        bias: Tensor | None,
        device: torch.device,
        *,
        input_scale: Tensor | None = None,
        per_token: bool = True,
        out_dtype: torch.dtype | None = None,
        ue8m0: bool | None = None,
        name: str = "Fp8Linear",
    ) -> None:
        super().__init__()
        shards = [check(shard, kind) for shard in shards]
        if kind == "tensor" and len(shards) > 1:
            kind = "channel"
        layout = lay_out(kind, shards)
        self.name, self.layout, self.gaps = name, layout, not layout.gapless
        self.out_features = sum(stop - start for start, stop in layout.pieces)
        self.in_features = layout.columns
        self.per_token = per_token
        self.out_dtype = None if out_dtype is None else checks.out_dtype(out_dtype)
        self.ue8m0 = kind == "block" and (machines.quantises_to_ue8m0() if ue8m0 is None else ue8m0)
        weight, scale = _placed(layout, shards, device)
        self._ready = {}
        self.block_scales = {"weight_scale": layout.width} if kind == "block" else {}
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        if input_scale is not None and kind == "block":
            raise OptionError(f"{name}: block scales are of dynamic inputs; leave input_scale out")
        checks.scalar(f"the input_scale of {name}", input_scale)
        if bias is not None:
            checks.dtype(f"the bias of {name}", checks.tensor(f"the bias of {name}", bias), *checks.WIDE)
            checks.shape(f"the bias of {name}", bias, (self.out_features,), "[N]")
        self._bare = (
            kind == "block"
            and bias is None
            and self.out_dtype in (None, torch.bfloat16)
            and not self.gaps
            and layout.width == layout.columns
        )
        """Whether a bf16 matrix is multiplied as it is, and the product is the output."""
        for key, value in (("bias", bias), ("input_scale", input_scale)):
            parameter = None if value is None else torch.nn.Parameter(value.detach().to(device), requires_grad=False)
            self.register_parameter(key, parameter)
        self._prepare()

    def _prepare(self) -> None:
        if self.ue8m0:
            self._load_powers("weight", loaded_weight)

    def _warm_up(self, rows: int) -> None:
        dtype = self.out_dtype or torch.bfloat16
        self(torch.zeros(rows, self.in_features, dtype=dtype, device=self.weight.device))

    def forward(self, input: Tensor) -> Tensor:
        """``[..., K]`` bf16, f16 or f32 to ``[..., N]`` of the same dtype (or ``out_dtype``), contiguous.

        ``input`` ``[..., K]``.
        """
        if (
            self._bare
            and self._preferences is None
            and isinstance(input, Tensor)
            and input.dtype is torch.bfloat16
            and input.dim() == 2
        ):
            scale = self._parameters["weight_scale"]
            ready = not self.ue8m0 or is_compiling() or (scale is not None and self._is_ready("weight_scale", scale))
            weight = self._parameters["weight"]  # behind the scale: they are prepared in the other order
            if ready and weight is not None and scale is not None and input.shape[1] == self.in_features:
                return deepgemm_blockscale_linear(input, weight, scale, BLOCK, self.ue8m0)
        return self._forward(input)

    @checks.checked(name="Fp8Linear")
    def _forward(self, input: Tensor) -> Tensor:
        """:meth:`forward` of any input."""
        return self._planned(self._compute, input)

    def _compute(self, input: Tensor) -> Tensor:
        fits = input.dim() > 0 and input.shape[-1] == self.in_features
        if not fits or input.dtype not in checks.WIDE or input.device != self.weight.device:
            self._refuse(input)
        if not is_compiling():
            self._prepare()
        x, layout = input.reshape(-1, self.in_features), self.layout
        if layout.width != layout.columns:
            x = torch.nn.functional.pad(x, (layout.lead, layout.width - layout.lead - layout.columns))
        kind = self.out_dtype or input.dtype
        y = self._blocks(x, kind) if layout.kind == "block" else self._scaled(x, kind)
        return y.view(*input.shape[:-1], self.out_features)

    def _refuse(self, input: Tensor) -> None:
        checks.dtype(f"the input of {self.name}", input, *checks.WIDE)
        checks.same_device(weight=self.weight, input=input)
        raise ShapeError(f"the input of {self.name} is {list(input.shape)}; it is [..., K] with K={self.in_features}")

    def _scaled(self, x: Tensor, kind: torch.dtype) -> Tensor:
        q, scale = scaled_fp8_quant(x, self.input_scale, use_per_token_if_dynamic=self.per_token)
        bias: Tensor | None = self.bias
        missing = self.layout.height - self.out_features
        if bias is not None and missing:
            bias = torch.nn.functional.pad(bias, (0, missing))
        y = cutlass_scaled_mm(q, self.weight.t(), scale.reshape(-1, 1), self.weight_scale.t(), kind, bias)
        return y[:, : self.out_features].contiguous()

    def _blocks(self, x: Tensor, kind: torch.dtype) -> Tensor:
        height, width = self.layout.height, self.layout.width
        wanted = _product_dtype(x.device.type, height, width, kind, self.bias is not None)
        if wanted == torch.bfloat16:
            y = deepgemm_blockscale_linear(x, self.weight, self.weight_scale, BLOCK, self.ue8m0)
        else:
            a = per_token_group_quant_fp8(
                x, BLOCK, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=self.ue8m0
            )
            y = torch.empty(x.shape[0], height, dtype=wanted, device=x.device)
            fp8_gemm_nt(a, (self.weight, self.weight_scale), y, disable_ue8m0_cast=not self.ue8m0)
        if self.gaps:
            y = self._without_padding(y)
        if self.bias is not None:
            y = y.to(torch.float32) + self.bias.to(torch.float32)
        return y.to(kind)

    def _without_padding(self, y: Tensor) -> Tensor:
        real, at = torch.empty(y.shape[0], self.out_features, dtype=y.dtype, device=y.device), 0
        for start, stop in self.layout.pieces:  # torch.cat refuses f16 under a CPU's autocast
            real[:, at : at + stop - start] = y[:, start:stop]
            at += stop - start
        return real

    def dequantised(self) -> Tensor:
        """The weight ``[N, K]`` in float32: each code times its scale, rounded once; padding left out."""
        values = _values(self.weight, self._float_scale(), self.layout.kind)
        rows = torch.cat([values[start:stop] for start, stop in self.layout.pieces])
        return rows[:, self.layout.lead : self.layout.lead + self.layout.columns]

    def extra_repr(self) -> str:
        """The extents and the kind."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.layout.kind} scales"

    def _placement(self) -> Tensor:
        """The kind, the extents and the pieces of :class:`~kernels.nn.shards.Layout`."""
        lay, pieces = self.layout, sum(self.layout.pieces, ())
        numbers = [KINDS.index(lay.kind), lay.height, lay.lead, lay.columns, lay.width, *pieces]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Take a whole weight's scale by its name, dtype and shape in a checkpoint, too."""
        if f"{prefix}layout" not in state_dict and not self.layout.plain:
            raise ShapeError(
                f"{self.name} has {self.layout.describe()}; a state without a layout fits whole weights only"
            )
        inverse, key = f"{prefix}weight_scale_inv", f"{prefix}weight_scale"
        if inverse in state_dict and key not in state_dict:
            state_dict[key] = state_dict.pop(inverse)
        if (scale := state_dict.get(key)) is not None:
            checks.dtype(f"weight_scale of the state of {self.name}", scale, *SCALES)
            wide = finite(f"weight_scale of the state of {self.name}", scale.to(torch.float32))
            if wide.numel() == math.prod(self.layout.blocks) and (self.layout.kind != "block" or wide.dim() == 4):
                wide = wide.reshape(self.layout.blocks)  # [N] and [N, 1]; [N/128, 1, K/128, 1]
            state_dict[key] = wide
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Fp8Mlp(torch.nn.Module):
    """``down(silu(gate(x)) * up(x))`` of a dense layer or of shared experts.

    Parameters
    ----------
    gate_up
        Gate and up below each other.
    down
        The projection back.
    """

    def __init__(self, gate_up: Fp8Linear, down: Fp8Linear) -> None:
        super().__init__()
        if gate_up.out_features != 2 * down.in_features:
            raise ShapeError(
                f"gate and up give {gate_up.out_features}, twice the {down.in_features} of {down.name} are due"
            )
        self.gate_up, self.down = gate_up, down

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | Path | Checkpoint,
        name: str,
        *,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> Fp8Mlp:
        """``NAME.gate_proj``, ``.up_proj`` (column parallel) and ``.down_proj`` (row parallel)."""
        source = folder if isinstance(folder, Checkpoint) else Checkpoint(folder)
        part: Mapping[str, Any] = {"rank": rank, "world": world, "device": device}
        gate_up = Fp8Linear.from_checkpoint(source, f"{name}.gate_proj", f"{name}.up_proj", parallel="column", **part)
        return cls(gate_up, Fp8Linear.from_checkpoint(source, f"{name}.down_proj", parallel="row", **part, **options))

    def forward(self, input: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., H]``; a rank's part of the sum where the layers are sliced.

        ``input`` ``[..., H]`` bf16, f16 or f32; returns ``[..., H]`` of the dtype of the layer.
        """
        y: Tensor = self.down(silu_and_mul(self.gate_up(input)))
        return y


def process_weights_after_loading(
    model: torch.nn.Module, warm_up: int | Sequence[int] | None = None, *, tune: bool = False
) -> None:
    """:meth:`Fp8Module.process_weights_after_loading` of every layer of this package in a model; of layers that need
    the same kernels one is warmed up."""
    warm = set[object]()
    for module in model.modules():
        if isinstance(module, Fp8Module):
            module.process_weights_after_loading(())
            kernels_of = module._specialisation()
            if kernels_of not in warm:
                module.process_weights_after_loading(warm_up, tune=tune)
            warm.add(kernels_of)


def sum_ranks(parts: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """The outputs of row-parallel ranks added in float32, rank 0 first, and rounded once to ``dtype`` (or theirs).

    ``parts`` of one shape; returns the same shape.

    Raises OptionError, ShapeError.
    """
    if not parts:
        raise OptionError("there are no parts to add; pass the outputs of all ranks, rank 0 first")
    total = parts[0].to(torch.float32)
    for part in parts[1:]:
        checks.shape("a part", part, tuple(parts[0].shape), "the shape of rank 0's")
        total = total + part.to(torch.float32)
    return total.to(dtype or parts[0].dtype)


@constant
def _product_dtype(device: str, n: int, k: int, kind: torch.dtype, bias: bool) -> torch.dtype:
    """The dtype in which the product of a block-scaled layer is written, for an output of dtype ``kind``."""
    return cached(_decided_dtype, device, n, k, kind, bias)


def _decided_dtype(device: str, n: int, k: int, kind: torch.dtype, bias: bool) -> torch.dtype:
    serves = {dtype: _server(device, n, k, dtype) for dtype in (torch.bfloat16, torch.float32, kind)}
    if kind == torch.bfloat16:
        wider = bias and serves[torch.float32] == serves[kind]
        return torch.float32 if wider else kind
    wanted = torch.float32 if bias else kind
    return wanted if serves[wanted] else torch.bfloat16


def _server(device: str, n: int, k: int, dtype: torch.dtype) -> str | None:
    """The backend that writes a product in ``dtype``; None where none does, and another dtype is asked for."""
    try:
        return plan(Problem(DENSE, device=device, n=n, k=k, out_dtype=dtype_name(dtype))).backend
    except NoBackendError:
        return None


def _bytes(x: Tensor) -> Tensor:
    return x.detach().view(torch.uint8) if x.element_size() == 1 else x.detach()


def _state(x: Tensor) -> tuple[object, ...]:
    """What another tensor, other memory or a write changes."""
    return id(x), x.dtype, x.data_ptr(), 0 if x.is_inference() else x._version


def _placed(layout: Layout, shards: list[Shard], device: torch.device) -> tuple[Tensor, Tensor]:
    """The weight and its scales on the device; a single whole tensor that needs no padding is not copied."""
    only = shards[0].weight
    scale = torch.ones(layout.blocks, dtype=torch.float32, device=device)
    if layout.plain and isinstance(only, Tensor) and tuple(only.shape) == (layout.height, layout.width):
        weight = only.detach().to(device).contiguous()
        fill(layout, shards, None, scale)
        return weight, scale
    weight = torch.zeros(layout.height, layout.width, dtype=torch.uint8, device=device).view(FP8)
    fill(layout, shards, weight, scale)
    return weight, scale


def _values(weight: Tensor, scale: Tensor, kind: str) -> Tensor:
    if kind == "block":
        scale = scale.repeat_interleave(BLOCK, 0)[: weight.shape[0]].repeat_interleave(BLOCK, 1)
    return weight.to(torch.float32) * scale


def _shard(source: Checkpoint, name: str, scale: str, part: Part) -> Shard:
    weight = source.tensor(f"{name}.weight")
    if len(weight.shape) != 2:
        raise ShapeError(f"the weight of {name} has shape {list(weight.shape)}; it is [N, K]")
    rows, columns = part.rows(name, weight.shape[0]), part.columns(name, weight.shape[1])
    return Shard(name, weight, source.tensor(f"{name}.{scale}"), rows, columns)


def static_scale(source: Checkpoint, name: str, names: Sequence[str]) -> Tensor:
    """The scale of an input that several layers share: the largest of theirs, which clips none of them.

    Returns a float32 scalar.
    """
    scales = [whole(source.tensor(f"{name}.input_scale")).to(torch.float32).reshape(-1) for name in names]
    return finite(f"the input_scale of {name}", torch.cat(scales).max().reshape(1))


from_checkpoint = Fp8Linear.from_checkpoint
"""A linear layer of a checkpoint: :meth:`Fp8Linear.from_checkpoint`."""
