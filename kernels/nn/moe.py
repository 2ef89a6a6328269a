"""A mixture-of-experts layer as a module: router, experts with E4M3 weights, shared experts.

``y[t] = sum_j weight[t,j] * expert[id[t,j]](x[t]) + shared(x[t])``. Experts with block scales run on
:func:`kernels.moe_block_scaled`, experts per tensor or per channel on :func:`kernels.moe_per_token` (inputs quantised
per token). Products are stored in bf16, the sum over experts is float32 and rounded once to the dtype of the output.

A rank holds whole experts (``expert``) or a part of each (``tensor``: rows of gate and up, the same columns of down; it
may begin and end inside a block). Its output is its part of the sum (:func:`kernels.nn.sum_ranks`); ask for
``out_dtype=torch.float32`` to keep the parts unrounded.

Not covered: the exchange of tokens between ranks, static input scales of experts, experts that are one tensor on disk,
biases of experts, UE8M0 scales of inputs (which DeepGEMM's experts need on sm100).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import checks
from kernels.checks import FP8
from kernels.errors import CheckpointError, OptionError, ShapeError
from kernels.moe_layer import moe_block_scaled, moe_per_token, route_deepseek_v3, route_softmax
from kernels.nn.checkpoint import Checkpoint
from kernels.nn.linear import Fp8Mlp, Fp8Module
from kernels.nn.shards import GEMM_COLUMNS, Layout, Shard, check, fill, finite, lay_out, share
from kernels.support import BLOCK

Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""``logits [T, E] -> (weights [T, k] float32, ids [T, k])``."""
PARALLEL = ("expert", "tensor")


class Fp8Experts(Fp8Module):
    """The experts of a layer, or those of a rank.

    Parameters
    ----------
    w13, w2
        ``[E, 2I, H]`` (gate rows first) and ``[E, H, I]`` E4M3; ``H`` and ``I`` multiples of 128 with block scales, of
        16 otherwise.
    w13_scale, w2_scale
        float32 per block, ``[E, 2I/128, H/128]`` and ``[E, H/128, I/128]``, or per channel, ``[E, 2I]`` and ``[E, H]``.
    first_expert
        The global number of this rank's first expert; other experts contribute nothing.
    limit, weight_on_input, round_silu
        As of :func:`kernels.moe_block_scaled`.
    out_dtype
        The dtype of the output; default: that of the input.
    """

    kept = ("w13", "w13_scale", "w2", "w2_scale")
    w13: torch.nn.Parameter
    w13_scale: torch.nn.Parameter
    w2: torch.nn.Parameter
    w2_scale: torch.nn.Parameter

    @checks.verb
    def __init__(
        self,
        w13: Tensor,
        w13_scale: Tensor,
        w2: Tensor,
        w2_scale: Tensor,
        *,
        first_expert: int = 0,
        limit: float | None = None,
        weight_on_input: bool = False,
        round_silu: bool = False,
        out_dtype: torch.dtype | None = None,
        name: str = "Fp8Experts",
    ) -> None:
        super().__init__()
        for said, codes, scale in (("w13", w13, w13_scale), ("w2", w2, w2_scale)):
            checks.dtype(f"{said} of {name}", checks.rank(f"{said} of {name}", codes, 3), FP8)
            checks.dtype(f"{said}_scale of {name}", checks.rank(f"{said}_scale of {name}", scale, 2, 3), torch.float32)
        experts, up, hidden = w13.shape
        if up % 2 or tuple(w2.shape) != (experts, hidden, up // 2):
            raise ShapeError(f"{name}: w13 {list(w13.shape)} is [E, 2I, H], and w2 {list(w2.shape)} is [E, H, I]")
        self.kind = "block" if w13_scale.dim() == 3 else "channel"
        step = GEMM_COLUMNS[self.kind]
        for said, extent in (("H", hidden), ("I", up // 2)):
            checks.multiple(f"{said} of {name}", extent, step, "pad the weights with zero codes")
        for said, codes, scale in (("w13", w13, w13_scale), ("w2", w2, w2_scale)):
            e, n, k = codes.shape
            expected = (e, n // BLOCK, k // BLOCK) if self.kind == "block" else (e, n)
            checks.shape(f"{said}_scale of {name}", scale, expected, f"per {self.kind}")
            finite(f"{said}_scale of {name}", scale)
        self.name, self.hidden, self.first_expert = name, hidden, first_expert
        self.span = (0, up // 2)
        self.limit, self.weight_on_input, self.round_silu = limit, weight_on_input, round_silu
        self.out_dtype = None if out_dtype is None else checks.out_dtype(out_dtype)
        for key, value in (("w13", w13), ("w13_scale", w13_scale), ("w2", w2), ("w2_scale", w2_scale)):
            self.register_parameter(key, torch.nn.Parameter(value.detach(), requires_grad=False))

    def _check_input(self, input: Tensor) -> None:
        """Refuse what is not ``[..., H]`` of a wide dtype."""
        checks.dtype(f"the input of {self.name}", checks.tensor(f"the input of {self.name}", input), *checks.WIDE)
        if input.dim() < 1 or input.shape[-1] != self.hidden:
            raise ShapeError(f"the input of {self.name} is {list(input.shape)}; it is [..., H] with H={self.hidden}")

    @checks.verb
    def forward(self, input: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """``[..., H]`` bf16, f16 or f32 with ``[..., top_k]`` float32 weights and global ids to ``[..., H]``."""
        self._check_input(input)
        x, weights, ids = (t.reshape(-1, t.shape[-1]) for t in (input, topk_weights, topk_ids))
        run = moe_block_scaled if self.kind == "block" else moe_per_token
        y = run(
            x, self.w13, self.w13_scale, self.w2, self.w2_scale, weights, ids,
            limit=self.limit, expert_offset=self.first_expert, weight_on_input=self.weight_on_input,
            round_silu=self.round_silu, out_dtype=self.out_dtype,
        )  # fmt: skip
        return y.view(input.shape)

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | Path | Checkpoint,
        name: str,
        experts: int,
        *,
        parallel: str = "expert",
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> Fp8Experts:
        """The experts ``NAME.0`` to ``NAME.{experts - 1}`` with ``gate_proj``, ``up_proj`` and ``down_proj``.

        Raises
        ------
        CheckpointError
            A tensor is missing, or the experts are quantised in a way that has no kernel here.
        """
        if parallel not in PARALLEL:
            raise OptionError(f"parallel={parallel!r}; experts are split by {' or by '.join(PARALLEL)}")
        source = folder if isinstance(folder, Checkpoint) else Checkpoint(folder)
        first, end = share(name, "experts", experts, rank, world) if parallel == "expert" else (0, experts)
        part = (rank, world) if parallel == "tensor" else (0, 1)
        loaded = [_expert(source, f"{name}.{number}", *part) for number in range(first, end)]
        w13, w13_scale = _stacked([up for up, _ in loaded], torch.device(device))
        w2, w2_scale = _stacked([down for _, down in loaded], torch.device(device))
        layer = cls(w13, w13_scale, w2, w2_scale, first_expert=first, name=name, **options)
        layer.span = (loaded[0][1][0].lead, loaded[0][1][0].columns)
        return layer

    def _placement(self) -> Tensor:
        """The first expert, the zeros before the intermediate columns, and the number of these."""
        return torch.tensor([self.first_expert, *self.span], dtype=torch.int64, device="cpu")


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
        """``[..., H]`` to ``[..., H]``; a rank's part of the sum where the experts are split."""
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
        """
        source = folder if isinstance(folder, Checkpoint) else Checkpoint(folder)
        gate = source.read(f"{name}.gate.weight").to(device)
        route = router or configured_router(source, f"{name}.gate", device)
        part: Mapping[str, Any] = {"rank": rank, "world": world, "device": device}
        experts = Fp8Experts.from_checkpoint(
            source, f"{name}.experts", gate.shape[0], parallel=parallel, **part, **options
        )
        shared = None
        if f"{name}.shared_experts.down_proj.weight" in source:
            shared = Fp8Mlp.from_checkpoint(source, f"{name}.shared_experts", out_dtype=experts.out_dtype, **part)
        return cls(gate, route, experts, shared)


class ConfiguredRouter(torch.nn.Module):
    """A router as ``config.json`` describes it; its bias moves with the module and stays float32."""

    def __init__(self, bias: Tensor | None, *, top_k: int, renormalize: bool, factor: float, sigmoid: bool,
                 n_group: int, topk_group: int) -> None:  # fmt: skip
        super().__init__()
        self.bias: Tensor | None
        self.register_buffer("bias", bias)
        self.top_k, self.renormalize, self.factor = top_k, renormalize, factor
        self.sigmoid, self.n_group, self.topk_group = sigmoid, n_group, topk_group

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids of the chosen experts."""
        if self.sigmoid:
            return route_deepseek_v3(
                logits, self.bias, self.top_k, n_group=self.n_group, topk_group=self.topk_group,
                renormalize=self.renormalize, routed_scaling_factor=self.factor,
            )  # fmt: skip
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
        top_k=config["num_experts_per_tok"], renormalize=bool(config.get("norm_topk_prob", False)),
        factor=float(config.get("routed_scaling_factor") or 1.0), sigmoid=scoring == "sigmoid",
        n_group=config.get("n_group") or 1, topk_group=config.get("topk_group") or 1,
    )  # fmt: skip


Pieces = tuple[Layout, list[Shard]]


def _expert(source: Checkpoint, name: str, rank: int, world: int) -> tuple[Pieces, Pieces]:
    """Gate above up, and down: where they will lie, and from where they come."""
    scheme = source.scheme(f"{name}.down_proj")
    if scheme.static:
        raise CheckpointError(
            f"{name} has a static input_scale; the experts here quantise per token: "
            "prepare_fp8_moe_layer_for_fi and apply_fi_trtllm_fp8_per_tensor_moe take static scales"
        )
    kind = "block" if scheme.kind == "block" else "channel"
    found = {}
    for key in ("gate_proj", "up_proj", "down_proj"):
        if source.scheme(f"{name}.{key}") != scheme:
            raise CheckpointError(f"{name}.{key} is quantised otherwise than {name}.down_proj")
        weight = source.tensor(f"{name}.{key}.weight")
        found[key] = (f"{name}.{key}", weight, source.tensor(f"{name}.{key}.{scheme.scale}"))
    hidden, inner = found["down_proj"][1].shape
    span = share(name, "intermediate rows", inner, rank, world)
    step = GEMM_COLUMNS[kind]
    up = [check(Shard(*found[key], span, (0, hidden)), kind) for key in ("gate_proj", "up_proj")]
    down = [check(Shard(*found["down_proj"], (0, hidden), span), kind)]
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
