"""Contracts of rows padded by groups: rows sorted by expert, of which every expert's begin at a multiple of a tile.

Sources: torchao
prototype/moe_training/utils.py, kernels/mxfp8/quant.py torch_pad_token_groups, csrc fused_pad_token_groups.cu @36027d8.
Its plain function refuses rows of no group; its CUDA kernel copies them behind the last group, and reads float32 as
bfloat16 (found by reading). Not covered: columns that a vector of 16 bytes does not divide, on which that kernel fails.

NaN bytes are moved like any others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oracle.errors import InputError, ShapeError
from oracle.routines.base import Inputs, Options, OptionSpec, TensorSpec, positive, register
from oracle.routines.layouts.contract import LayoutContract
from oracle.routines.traits import Kind
from oracle.truth.layout import align

ROWS = (torch.bfloat16, torch.float16, torch.float32)
ENDS = TensorSpec("group_end_offsets", Kind.OFFSETS, (torch.int32,), ("G",), "the row behind the last of each group")
ALIGNMENT = OptionSpec("alignment_size", 32, None, "rows of which the padded groups are multiples")


def groups_of(ends: Tensor) -> list[tuple[int, int]]:
    """The first row of each group and the one behind its last; ``ends`` ``[G]``, int32."""
    bounds = ends.tolist()
    return list(zip([0, *bounds], bounds, strict=False))


def padded_starts(ends: Tensor, alignment: int) -> list[int]:
    """The row at which each padded group begins, and the one behind the last; ``ends`` ``[G]``, int32."""
    starts = [0]
    for begin, end in groups_of(ends):
        starts.append(starts[-1] + align(end - begin, alignment))
    return starts


def padded_height(rows: int, groups: int, alignment: int) -> int:
    """Rows that the padded matrix has whatever the groups are."""
    return align(rows + groups * alignment, alignment)


def check_ends(ends: Tensor, rows: int) -> None:
    """Refuse ``ends`` ``[G]``, int32, that go back or beyond the rows. Raises InputError."""
    values = ends.tolist()
    if values != sorted(values) or values[0] < 0 or values[-1] > rows:
        raise InputError(f"group_end_offsets are {values}; they run from 0 to at most {rows} and never back")


def _numbers(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=like.device)


class _TokenGroups(LayoutContract):
    """Rows moved by groups."""

    def why_mistrust(self, inputs: Inputs) -> str | None:
        return super().why_mistrust({name: x for name, x in inputs.items() if x.is_floating_point()})


@register
class PadTokenGroups(_TokenGroups):
    """``out [align(M + G A, A), K]``, A the alignment: the rows of each group from ``starts[g]`` on, a multiple of A,
    up to ``ends[g] = starts[g] + align(rows, A)``, zeros (+0) between and behind them. A group without rows takes none.
    ``group_end_offsets`` never fall and end at M or before; rows behind the last end are dropped."""

    name = "pad_token_groups"
    shapes = {"out": "[align(M + G A, A), K] for A = alignment_size, in the dtype of x", "starts": "[G]", "ends": "[G]"}
    summary = "rows of groups, each padded with zeros to a multiple of 32 rows; where the padded groups begin and end"
    source = "torchao prototype/moe_training pad_token_groups, fused_pad_token_groups.cu"
    inputs = (TensorSpec("x", Kind.VALUES, ROWS, ("M", "K"), "rows sorted by group"), ENDS)
    options = (ALIGNMENT,)
    returns = ("out", "starts", "ends")

    def refuse(self, inputs: Inputs, options: Options) -> None:
        positive(options, "alignment_size")
        check_ends(inputs["group_end_offsets"], inputs["x"].shape[0])

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        x, ends, alignment = inputs["x"], inputs["group_end_offsets"], positive(options, "alignment_size")
        places = padded_starts(ends, alignment)
        out = x.new_zeros(padded_height(x.shape[0], len(ends), alignment), x.shape[1])
        for (begin, end), place in zip(groups_of(ends), places, strict=False):
            out[place : place + end - begin] = x[begin:end]
        return {"out": out, "starts": _numbers(places[:-1], x), "ends": _numbers(places[1:], x)}


@register
class UnpadTokenGroups(_TokenGroups):
    """``out [num_tokens, K]``: the rows of each group, as many as ``group_end_offsets`` say, from its start on; padding
    is never read, whatever it holds."""

    name = "unpad_token_groups"
    summary = "the rows of padded groups one behind the other"
    source = "torchao prototype/moe_training unpad_token_groups, fused_pad_token_groups.cu"
    inputs = (
        TensorSpec("padded", Kind.VALUES, ROWS, ("R", "K"), "rows of groups, each from its start"),
        ENDS,
        TensorSpec(
            "padded_group_start_offsets",
            Kind.OFFSETS,
            (torch.int32,),
            ("G",),
            "the row at which each padded group begins",
        ),
    )
    options = (ALIGNMENT, OptionSpec("num_tokens", None, None, "rows of all groups, the last of group_end_offsets"))

    def refuse(self, inputs: Inputs, options: Options) -> None:
        rows, total = positive(options, "num_tokens"), inputs["padded"].shape[0]
        ends, starts = inputs["group_end_offsets"], inputs["padded_group_start_offsets"].tolist()
        check_ends(ends, rows)
        if rows != int(ends[-1]):
            raise ShapeError(f"num_tokens={rows}, group_end_offsets end at {int(ends[-1])}; they are the same")
        for (begin, end), start in zip(groups_of(ends), starts, strict=True):
            if start < 0 or start + end - begin > total:
                raise InputError(f"padded_group_start_offsets hold {start} for {end - begin} of {total} rows")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        starts = inputs["padded_group_start_offsets"].tolist()
        pairs = zip(groups_of(inputs["group_end_offsets"]), starts, strict=True)
        return {"out": torch.cat([inputs["padded"][start : start + end - begin] for (begin, end), start in pairs])}


@register
class RemapTopkToLocal(LayoutContract):
    """``out = expert_map[id]`` where ``id`` is 0 or more, else -1: an absent slot stays absent. ``expert_map`` has the
    local number of every global expert, -1 for those of other ranks. Ids are below its entries."""

    name = "remap_topk_to_local"
    dispatched = False
    section = "MoE"
    summary = "global experts of tokens as those of this rank, -1 for others and for none"
    source = "vLLM layers/fused_moe remap_topk_to_local"
    shapes = {"out": "[T, k], int32 or int64"}
    inputs = (
        TensorSpec("topk_ids", Kind.IDS, (torch.int32, torch.int64), ("T", "k"), "global experts, -1 for none"),
        TensorSpec("expert_map", Kind.IDS, (torch.int32,), ("X",), "local expert of each global one, or -1"),
    )
    options = (OptionSpec("out_dtype", torch.int32, (torch.int32, torch.int64), "dtype of out"),)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        ids, count = inputs["topk_ids"], inputs["expert_map"].numel()
        if bool((ids < -1).any()) or bool((ids >= count).any()):
            raise InputError(f"topk_ids reach from {int(ids.min())} to {int(ids.max())}; there are {count} experts")

    def made(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        ids, known = inputs["topk_ids"].long(), inputs["expert_map"].long()
        return {"out": torch.where(ids >= 0, known[ids.clamp(min=0)], -1).to(options["out_dtype"])}
