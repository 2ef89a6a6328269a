"""A mixture-of-experts layer as a module: router, experts with E4M3 weights, shared experts.

``y[t] = sum_j weight[t,j] * expert[id[t,j]](x[t]) + shared(x[t])``. Experts with block scales run on
:func:`kernels.moe_block_scaled`, experts per tensor or per channel on :func:`kernels.moe_per_token` (inputs quantised
per token). Products are stored in bf16, the sum over experts is float32 and rounded once to the dtype of the output.
With ``pipeline`` they compute what one library's layer computes (:func:`kernels.moe_experts`): its quantisers, its
roundings, its sum; static scales of the input and of the intermediate where that layer has them.

A rank holds whole experts (``expert``) or a part of each (``tensor``: rows of gate and up, the same columns of down; it
may begin and end inside a block). Its output is its part of the sum (:func:`kernels.nn.sum_ranks`); ask for
``out_dtype=torch.float32`` to keep the parts unrounded.

On Blackwell, where DeepGEMM multiplies, block scales are powers of two, packed once after loading; a state dict has
them in float32.

Not covered: the exchange of tokens between ranks, experts that are one tensor on disk, int4 weights, biases of experts,
pipelines on Blackwell.

NaN in a row makes the row of its token NaN; a scale that is not finite is refused when a layer is made.
Source: vLLM (fused_moe layer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import checks
from .. import platform as machines
from ..checks import FP8
from ..errors import CheckpointError, InputError, OptionError, ShapeError, shown
from ..grouped import loaded_experts
from ..moe import make_fp8_moe_alpha_scales_for_fi
from ..moe_layer import moe_block_scaled, moe_per_token, route_deepseek_v3, route_softmax
from ..moe_pipelines import PIPELINES, Pipeline, moe_experts, row_of, way_of
from ..quantize import per_token_group_quant_fp8, requantize_with_max_scale, scaled_fp8_quant
from ..support import BLOCK
from .checkpoint import Checkpoint, Scheme
from .linear import Fp8Mlp, Fp8Module, static_scale
from .shards import GEMM_COLUMNS, KINDS, Layout, Shard, Span, check, fill, finite, lay_out, share

Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""``logits [T, E] -> (weights [T, k] float32, ids [T, k])``."""
PARALLEL = ("expert", "tensor")
TOP_K = 8
"""Experts of a token in a call that warms up."""


class ExpertsModule(Fp8Module):
    """The experts of a layer, or those of a rank, whatever their weights are."""

    w13: torch.nn.Parameter
    hidden: int
    first_expert: int
    _forward: Callable[..., Tensor]
    """:meth:`_flattened` with its arguments checked, under the name of the class."""

    def forward(self, input: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """``[..., H]`` bf16, f16 or f32 with ``[..., top_k]`` float32 weights and global ids to ``[..., H]``.

        ``input`` ``[T, H]``, ``topk_weights`` and ``topk_ids`` ``[T, top_k]``.

        Raises DtypeError, InputError, LayoutError, OptionError, ShapeError.
        """
        return self._forward(input, topk_weights, topk_ids)

    def _flattened(self, input: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        return self._planned(self._of_rows, input, topk_weights, topk_ids)

    def _of_rows(self, input: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        self._check_input(input)
        if not is_compiling():
            self._prepare()
        return self._compute(*(t.reshape(-1, t.shape[-1]) for t in (input, topk_weights, topk_ids))).view(input.shape)

    def _compute(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """``[T, H]`` of ``x [T, H]``, weights and ids ``[T, top_k]``."""
        raise NotImplementedError

    def _check_input(self, input: Tensor) -> None:
        """Refuse what is not ``[..., H]`` of a wide dtype."""
        checks.dtype(f"the input of {self.name}", checks.tensor(f"the input of {self.name}", input), *checks.WIDE)
        if input.dim() < 1 or input.shape[-1] != self.hidden:
            raise ShapeError(f"the input of {self.name} is {list(input.shape)}; it is [..., H] with H={self.hidden}")

    def _warm_up(self, rows: int) -> None:
        """Every token goes to the first experts of this rank, as many as a token could."""
        device = self.w13.device
        ids = torch.arange(min(TOP_K, self.w13.shape[0]), device=device).expand(rows, -1) + self.first_expert
        x = torch.zeros(rows, self.hidden, dtype=torch.bfloat16, device=device)
        self(x, torch.ones(ids.shape, dtype=torch.float32, device=device), ids)


def experts_of(name: str, count: int, parallel: str, rank: int, world: int) -> Span:
    """The experts of a rank: its share of ``count`` where whole ones are split, else all.

    Raises OptionError.
    """
    if parallel not in PARALLEL:
        raise OptionError(f"parallel={shown(parallel)}; experts are split by {' or by '.join(PARALLEL)}")
    return share(name, "experts", count, rank, world) if parallel == "expert" else (0, count)


class Fp8Experts(ExpertsModule):
    """The experts of a layer, or those of a rank.

    Parameters
    ----------
    w13, w2
        ``[E, 2I, H]`` (gate rows first; up rows first for a pipeline whose library has them so) and ``[E, H, I]`` E4M3;
        ``H`` and ``I`` multiples of 128 with block scales, of 16 otherwise.
    w13_scale, w2_scale
        float32 per block, ``[E, 2I/128, H/128]`` and ``[E, H/128, I/128]``, or per channel, ``[E, 2I]`` and ``[E, H]``;
        per expert, ``[E]``, for a pipeline of such weights.
    pipeline
        A name of ``kernels.moe_pipelines.PIPELINES``, as ``"deep_gemm_moe"``: the layer computes what that library's
        layer computes, for bf16 inputs and outputs. None: float32 sums of bf16 products, as the module's text says.
    w13_input_scale, w2_input_scale
        One float32 value each, which multiplies the codes of the input and of the intermediate: of pipelines with
        weights per expert, and of no others.
    combine
        Another way of the pipeline to weight and add, as of :func:`kernels.moe_experts`.
    first_expert
        The global number of this rank's first expert; other experts contribute nothing.
    weight_on_input
        As of :func:`kernels.moe_block_scaled`, or with a pipeline of :func:`kernels.moe_experts`.
    limit, round_silu
        As of :func:`kernels.moe_block_scaled`; a pipeline has its own rounding and no limit.
    ue8m0
        Block scales that are powers of two, which DeepGEMM needs on Blackwell; default:
        :func:`kernels.platform.quantises_to_ue8m0`. Weights with other scales are quantised again after loading.
    out_dtype
        The dtype of the output; default: that of the input.

    Raises
    ------
    OptionError, InputError, ShapeError, DtypeError, ValueRangeError
        An operand does not fit the others or the pipeline; the message names it.
    """

    fixed_parameters = ("w13", "w13_scale", "w2", "w2_scale", "w13_input_scale", "w2_input_scale")
    w13: torch.nn.Parameter
    w13_scale: torch.nn.Parameter
    w2: torch.nn.Parameter
    w2_scale: torch.nn.Parameter
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
        pipeline: str | None = None,
        w13_input_scale: Tensor | None = None,
        w2_input_scale: Tensor | None = None,
        combine: str | None = None,
        first_expert: int = 0,
        limit: float | None = None,
        weight_on_input: bool = False,
        round_silu: bool = False,
        ue8m0: bool | None = None,
        out_dtype: torch.dtype | None = None,
        name: str = "Fp8Experts",
    ) -> None:
        super().__init__()
        for key, codes, scale in (("w13", w13, w13_scale), ("w2", w2, w2_scale)):
            checks.dtype(f"{key} of {name}", checks.rank(f"{key} of {name}", codes, 3), FP8)
            checks.dtype(f"{key}_scale of {name}", checks.tensor(f"{key}_scale of {name}", scale), torch.float32)
        experts, up, hidden = w13.shape
        if up % 2 or tuple(w2.shape) != (experts, hidden, up // 2):
            raise ShapeError(f"{name}: w13 {list(w13.shape)} is [E, 2I, H], and w2 {list(w2.shape)} is [E, H, I]")
        if pipeline is None:
            if combine is not None:
                raise OptionError(f"combine={combine!r:.80} is of a pipeline; name one with pipeline=")
            self.kind = "block" if w13_scale.dim() == 3 else "channel"
        else:
            self.kind = _row(name, pipeline).weights
            way_of(PIPELINES[pipeline].combine, combine, 1)
            for option, asked in (("limit", limit), ("round_silu", round_silu)):
                if asked not in (None, False):
                    raise OptionError(f"{option}={asked} of {name}: {pipeline} has its own activation; leave it out")
            if ue8m0:
                raise OptionError(f"ue8m0={ue8m0} of {name}: {pipeline} has float32 scales; leave it out")
            if out_dtype not in (None, torch.bfloat16):
                raise OptionError(f"out_dtype={out_dtype} of {name}: {pipeline} writes bfloat16; leave it out")
        step = GEMM_COLUMNS["block" if self.kind == "block" else "channel"]
        for symbol, extent in (("H", hidden), ("I", up // 2)):
            checks.multiple(f"{symbol} of {name}", extent, step, "pad the weights with zero codes")
        for key, codes, scale in (("w13", w13, w13_scale), ("w2", w2, w2_scale)):
            e, n, k = codes.shape
            due = {"block": (e, n // BLOCK, k // BLOCK), "channel": (e, n), "expert": (e,)}[self.kind]
            checks.shape(f"{key}_scale of {name}", scale, due, f"per {self.kind}")
            finite(f"{key}_scale of {name}", scale)
        static = {"w13_input_scale": w13_input_scale, "w2_input_scale": w2_input_scale}
        for key, value in static.items():
            if (value is None) is (self.kind == "expert"):
                need = "quantises by static scales; pass" if value is None else "has no static scales; leave out"
                raise InputError(f"{name}: {'pipeline=None' if pipeline is None else pipeline} {need} {key}")
            checks.scalar(f"{key} of {name}", value)
            if value is not None:
                finite(f"{key} of {name}", value)
        self.name, self.hidden, self.first_expert = name, hidden, first_expert
        self.pipeline, self.combine = pipeline, combine
        self.span = (0, up // 2)
        powers = machines.quantises_to_ue8m0() if ue8m0 is None else ue8m0
        self.ue8m0 = powers and self.kind == "block" and pipeline is None
        self.block_scales = {"w13_scale": hidden, "w2_scale": up // 2} if self.kind == "block" else {}
        self._ready = {}
        self.limit, self.weight_on_input, self.round_silu = limit, weight_on_input, round_silu
        self.out_dtype = None if out_dtype is None else checks.out_dtype(out_dtype)
        tensors = {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}
        checks.same_device(**tensors)
        tensors |= {key: value.to(w13.device).reshape(1) for key, value in static.items() if value is not None}
        for key in self.fixed_parameters:
            value = tensors.get(key)
            self.register_parameter(
                key, None if value is None else torch.nn.Parameter(value.detach(), requires_grad=False)
            )
        self._prepare()

    def _prepare(self) -> None:
        if self.ue8m0:
            self._load_powers("w13", loaded_experts)
            self._load_powers("w2", loaded_experts)

    _forward = checks.checked(name="Fp8Experts")(ExpertsModule._flattened)

    def _check_input(self, input: Tensor) -> None:
        super()._check_input(input)
        if self.pipeline is not None:
            checks.dtype(f"the input of {self.name} ({self.pipeline})", input, torch.bfloat16)

    def _compute(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if self.pipeline is not None:
            return self._by_pipeline(self.pipeline, x, weights, ids)
        run = partial(moe_block_scaled, ue8m0=self.ue8m0) if self.kind == "block" else moe_per_token
        return run(
            x,
            self.w13,
            self.w13_scale,
            self.w2,
            self.w2_scale,
            weights,
            ids,
            limit=self.limit,
            expert_offset=self.first_expert,
            weight_on_input=self.weight_on_input,
            round_silu=self.round_silu,
            out_dtype=self.out_dtype,
        )

    def _by_pipeline(self, pipeline: str, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """``[T, H]`` bf16; quantises where the library's layer takes codes, and merges scales where it takes products
        of scales."""
        row, x_scale, up_scale = PIPELINES[pipeline], None, None
        first: Tensor = self.w13_scale
        second: Tensor = self.w2_scale
        a1: Tensor | None = self.w13_input_scale
        a2: Tensor | None = self.w2_input_scale
        if row.quantise is None and row.weights == "block":
            x, x_scale = per_token_group_quant_fp8(x, BLOCK)
        elif row.quantise is None and a1 is not None and a2 is not None:
            x, _ = scaled_fp8_quant(x, a1)
            first, second = make_fp8_moe_alpha_scales_for_fi(first, a1, second, a2)
            if row.multiplied:
                a2 = a2.reciprocal()
            else:
                up_scale, a2 = first / a2, None
        y: Tensor = moe_experts(
            x,
            self.w13,
            first,
            self.w2,
            second,
            weights,
            ids,
            pipeline,
            x_scale=x_scale,
            a1_scale=None if row.quantise is None else a1,
            a2_scale=a2,
            up_scale=up_scale,
            expert_offset=self.first_expert,
            weight_on_input=self.weight_on_input,
            combine=self.combine,
        )
        return y

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | Path | Checkpoint,
        name: str,
        experts: int,
        *,
        pipeline: str | None = None,
        parallel: str = "expert",
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> Fp8Experts:
        """The experts ``NAME.0`` to ``NAME.{experts - 1}`` with ``gate_proj``, ``up_proj`` and ``down_proj``.

        Rows and scales are laid out as the pipeline takes them. Where an expert has one scale, gate and up are
        requantised with the larger of theirs (:func:`kernels.requantize_with_max_scale`). A static scale is the largest
        of all experts, on every rank.

        Raises
        ------
        CheckpointError
            A tensor is missing, or the experts are quantised in a way that has no kernel here, or that is not the
            pipeline's.
        """
        row = None if pipeline is None else _row(name, pipeline)
        first, end = experts_of(name, experts, parallel, rank, world)
        source = folder if isinstance(folder, Checkpoint) else Checkpoint(folder)
        part = (rank, world) if parallel == "tensor" else (0, 1)
        loaded = [_expert(source, f"{name}.{number}", row, *part) for number in range(first, end)]
        w13, w13_scale = _stacked([up for up, _ in loaded], torch.device(device))
        w2, w2_scale = _stacked([down for _, down in loaded], torch.device(device))
        if row is not None and row.weights == "expert":
            w13_scale, w2_scale = _per_expert(w13, w13_scale, loaded[0][0][0].pieces), w2_scale[:, 0].contiguous()
            every = [f"{name}.{number}" for number in range(experts)]
            gate, up, down = (
                static_scale(source, f"{name}.*.{key}_proj", [f"{expert}.{key}_proj" for expert in every])
                for key in ("gate", "up", "down")
            )
            options = {"w13_input_scale": torch.maximum(gate, up), "w2_input_scale": down, **options}
        layer = cls(w13, w13_scale, w2, w2_scale, pipeline=pipeline, first_expert=first, name=name, **options)
        layer.span = (loaded[0][1][0].lead, loaded[0][1][0].columns)
        layer.process_weights_after_loading()
        return layer

    def _placement(self) -> Tensor:
        """The first expert, the zeros before the intermediate columns, the number of these, and whether up rows come
        first."""
        up_first = self.pipeline is not None and PIPELINES[self.pipeline].up_first
        return torch.tensor([self.first_expert, *self.span, up_first], dtype=torch.int64, device="cpu")


class Fp8Moe(torch.nn.Module):
    """A whole layer: logits and routing, experts, shared experts.

    Parameters
    ----------
    gate
        ``[E, H]`` bf16, f16 or f32; the logits are computed in float32.
    router
        From logits to weights and ids, as a call of :func:`kernels.route_deepseek_v3`.
    experts, shared
        The experts; what is added to them for every token, or None.
    """

    def __init__(
        self, gate: Tensor, router: Router, experts: Fp8Experts, shared: torch.nn.Module | None = None
    ) -> None:
        super().__init__()
        checks.dtype("gate", checks.rank("gate", gate, 2), *checks.WIDE)
        if gate.shape[1] != experts.hidden:
            raise ShapeError(f"gate {list(gate.shape)} must be [E, H] with H={experts.hidden}")
        self.gate = torch.nn.Parameter(gate.detach(), requires_grad=False)
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, input: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., H]``; a rank's part of the sum where the experts are split.

        ``input`` ``[..., H]`` bf16, f16 or f32; returns ``[..., H]`` of the dtype of the experts.
        """
        self.experts._check_input(input)
        with torch.autocast(input.device.type, enabled=False):  # it would round the logits
            logits = torch.nn.functional.linear(input.to(torch.float32), self.gate.to(torch.float32))
        weights, ids = self.router(logits.view(-1, logits.shape[-1]))
        rows = input.reshape(-1, input.shape[-1])
        y: Tensor = self.experts(rows, weights, ids).view(input.shape)
        return y if self.shared is None else y + self.shared(input).to(y.dtype)

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | Path | Checkpoint,
        name: str,
        *,
        pipeline: str | None = None,
        parallel: str = "expert",
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        router: Router | None = None,
        **options: Any,
    ) -> Fp8Moe:
        """A layer as ``model.layers.3.mlp``: ``gate``, ``experts.*`` and, where there are any, ``shared_experts``.

        The router follows ``config.json`` (``scoring_func``, ``n_group``, ``topk_group``, ``norm_topk_prob``,
        ``routed_scaling_factor``, ``num_experts_per_tok``; DeepSeek-V3's sigmoid with ``e_score_correction_bias``, or a
        softmax) unless one is given. Shared experts are split by their intermediate size on every rank.
        ``pipeline`` and ``options`` are those of :class:`Fp8Experts`.
        """
        source = folder if isinstance(folder, Checkpoint) else Checkpoint(folder)
        gate = source.read(f"{name}.gate.weight").to(device)
        route = router or configured_router(source, f"{name}.gate", device)
        part: Mapping[str, Any] = {"rank": rank, "world": world, "device": device}
        experts = Fp8Experts.from_checkpoint(
            source, f"{name}.experts", gate.shape[0], pipeline=pipeline, parallel=parallel, **part, **options
        )
        shared = None
        if f"{name}.shared_experts.down_proj.weight" in source:
            shared = Fp8Mlp.from_checkpoint(source, f"{name}.shared_experts", out_dtype=experts.out_dtype, **part)
        return cls(gate, route, experts, shared)


class ConfiguredRouter(torch.nn.Module):
    """A router as ``config.json`` describes it; its bias moves with the module and stays float32."""

    def __init__(
        self,
        bias: Tensor | None,
        *,
        top_k: int,
        renormalize: bool,
        factor: float,
        sigmoid: bool,
        n_group: int,
        topk_group: int,
    ) -> None:
        super().__init__()
        self.bias: Tensor | None
        self.register_buffer("bias", bias)
        self.top_k, self.renormalize, self.factor = top_k, renormalize, factor
        self.sigmoid, self.n_group, self.topk_group = sigmoid, n_group, topk_group

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids of the chosen experts.

        ``logits`` ``[T, E]`` bf16, f16 or f32; returns weights float32 and ids int64 ``[T, top_k]``.
        """
        if self.sigmoid:
            return route_deepseek_v3(
                logits,
                self.bias,
                self.top_k,
                n_group=self.n_group,
                topk_group=self.topk_group,
                renormalize=self.renormalize,
                routed_scaling_factor=self.factor,
            )
        weights, ids = route_softmax(logits, self.top_k, renormalize=self.renormalize)
        return weights * self.factor, ids


def configured_router(source: Checkpoint, gate: str, device: torch.device | str) -> ConfiguredRouter:
    """The router of ``config.json``.

    Raises
    ------
    CheckpointError
        It describes another one, or lacks a setting.
    """
    config = source.config
    if "num_experts_per_tok" not in config:
        raise CheckpointError(f"{source.folder}/config.json has no num_experts_per_tok; pass router=")
    scoring, method = config.get("scoring_func", "softmax"), config.get("topk_method", "greedy")
    bias = f"{gate}.e_score_correction_bias"
    if scoring not in ("sigmoid", "softmax") or scoring == "softmax" and (method != "greedy" or bias in source):
        raise CheckpointError(f"scoring_func={scoring!r} with topk_method={method!r} is no router here; pass router=")
    return ConfiguredRouter(
        source.read(bias).to(device, torch.float32) if bias in source else None,
        top_k=config["num_experts_per_tok"],
        renormalize=bool(config.get("norm_topk_prob", False)),
        factor=float(config.get("routed_scaling_factor") or 1.0),
        sigmoid=scoring == "sigmoid",
        n_group=config.get("n_group") or 1,
        topk_group=config.get("topk_group") or 1,
    )


Pieces = tuple[Layout, list[Shard]]


def _row(name: str, pipeline: str) -> Pipeline:
    """The pipeline of a layer of E4M3 weights."""
    row = row_of(pipeline)
    if row.weights == "group":
        raise OptionError(f"{name} has E4M3 weights; {pipeline} takes int4 ones: call kernels.moe_experts")
    return row


def _fit(name: str, scheme: Scheme, pipeline: Pipeline | None) -> str:
    """The kind of scale to lay an expert's weights out by: ``block``, or ``channel`` also where there is one scale.

    Raises
    ------
    CheckpointError
        The checkpoint has other scales than the pipeline.
    """
    if scheme.kind not in KINDS:
        raise CheckpointError(f"{name} is {scheme.kind}; no experts of such weights are read here")
    stored = "block" if scheme.kind == "block" else "expert" if scheme.static else "channel"
    if scheme.static and scheme.kind == "channel":
        raise CheckpointError(f"{name} has a static input_scale with weights per channel; no kernel here serves that")
    wanted = ("block", "channel") if pipeline is None else (pipeline.weights,)
    if stored not in wanted:
        description = {
            "block": "weights per block",
            "channel": f"weights per {scheme.kind} and inputs quantised per token",
            "expert": "a static input_scale and one scale for a weight",
        }[stored]
        fitting = ", ".join(key for key, row in PIPELINES.items() if row.weights == stored)
        raise CheckpointError(f"{name} has {description}; of pipelines these take it: {fitting}")
    return "block" if stored == "block" else "channel"


def _expert(source: Checkpoint, name: str, pipeline: Pipeline | None, rank: int, world: int) -> tuple[Pieces, Pieces]:
    """Gate above up (or up above gate, as the pipeline has them), and down: where they will lie and come from."""
    scheme = source.scheme(f"{name}.down_proj")
    kind = _fit(name, scheme, pipeline)
    projections = {}
    for key in ("gate_proj", "up_proj", "down_proj"):
        if source.scheme(f"{name}.{key}") != scheme:
            raise CheckpointError(f"{name}.{key} is quantised otherwise than {name}.down_proj")
        weight = source.tensor(f"{name}.{key}.weight")
        projections[key] = (f"{name}.{key}", weight, source.tensor(f"{name}.{key}.{scheme.scale}"))
    hidden, inner = projections["down_proj"][1].shape
    span = share(name, "intermediate rows", inner, rank, world)
    step = GEMM_COLUMNS[kind]
    order = ("up_proj", "gate_proj") if pipeline is not None and pipeline.up_first else ("gate_proj", "up_proj")
    up = [check(Shard(*projections[key], span, (0, hidden)), kind) for key in order]
    down = [check(Shard(*projections["down_proj"], (0, hidden), span), kind)]
    for shard in up:
        if tuple(shard.weight.shape) != (inner, hidden):
            raise ShapeError(
                f"the weight of {shard.name} is {list(shard.weight.shape)}, {name}.down_proj {[hidden, inner]}"
            )
    above = lay_out(kind, up, rows=step, every=step)
    return (above, up), (lay_out(kind, down, rows=step), down)


def _stacked(pieces: Sequence[Pieces], device: torch.device) -> tuple[Tensor, Tensor]:
    first = pieces[0][0]
    if any(layout != first for layout, _ in pieces):
        raise ShapeError(f"experts differ in their extents: {', '.join(layout.describe() for layout, _ in pieces)}")
    weight = torch.zeros(len(pieces), first.height, first.width, dtype=torch.uint8, device=device).view(FP8)
    scale = torch.ones(len(pieces), *first.blocks, dtype=torch.float32, device=device)
    for expert, (layout, shards) in enumerate(pieces):
        fill(layout, shards, weight[expert], scale[expert])
    return weight, scale if first.kind == "block" else scale.flatten(1)


def _per_expert(w13: Tensor, scale: Tensor, pieces: Sequence[tuple[int, int]]) -> Tensor:
    """One scale ``[E]`` for gate and up, the larger one; ``w13`` is requantised in place where they differ."""
    rows, both = w13.shape[1] // 2, scale[:, [start for start, _ in pieces]]
    for expert, pair in enumerate(both):
        if bool(pair[0] != pair[1]):
            w13[expert] = requantize_with_max_scale(w13[expert], pair, [rows, rows])[1]
    return both.amax(dim=1)
