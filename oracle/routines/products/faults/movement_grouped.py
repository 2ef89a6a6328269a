"""Faults of data movement in grouped products: the wrong expert's weights, padding rows that join in, rows not written.

The last real row of every group and what stands behind it are where group boundaries go wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.routines.fault import Call, Change, Family, Fault, Stage, always
from oracle.routines.mutants import stale
from oracle.routines.products.faults.movement import TILE, moved
from oracle.routines.products.roles import CONTIGUOUS, GROUPED, MASKED

STORE_TILE = 64
"""Rows of the smallest tile that DeepGEMM's masked product stores (seen on an H200: 64 or 128)."""
TMA_ROWS = 4
"""Float32 scales in 16 bytes: columns of a scale are padded to a multiple."""
UNSPECIFIED = "only rows that the contract leaves unspecified change"


def _indices(change: Change) -> Change:
    """A READ change of m_indices that keeps the rows which the right kernel writes."""

    def apply(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return inputs | {"m_indices": change(call, inputs["m_indices"])}

    return apply


def _minus_one_as_expert(call: Call, index: Tensor) -> Tensor:
    return torch.where(index < 0, call.inputs["b"].shape[0] - 1, index).to(index.dtype)


def _first_of_tile(tile: int) -> Change:
    def change(call: Call, index: Tensor) -> Tensor:
        place = torch.arange(len(index), device=index.device) // tile * tile
        return torch.where(index < 0, index, index[place].clamp(min=0)).to(index.dtype)

    return change


def _next_expert(call: Call, index: Tensor) -> Tensor:
    groups = call.inputs["b"].shape[0]
    return torch.where(index < 0, index, (index + 1) % groups).to(index.dtype)


def _expert_offset(call: Call, index: Tensor) -> Tensor:
    """Global expert numbers on a rank that holds the upper half: the offset is not subtracted."""
    groups = call.inputs["b"].shape[0]
    return torch.where(index < 0, index, (index + groups // 2) % groups).to(index.dtype)


def _descriptor_of_previous(call: Call, index: Tensor) -> Tensor:
    """The first tile of a group runs with the previous group's descriptor."""
    place = torch.arange(len(index), device=index.device) // TILE
    starts = index[::TILE]
    shifted = torch.cat([starts[:1], starts[:-1]])
    use = shifted[place]
    return torch.where((index < 0) | (use < 0), index, use).to(index.dtype)


def _padding_scale(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The last real row of a run takes the scale of the padding row behind it."""
    index, scale = inputs["m_indices"], inputs["a_scale"].clone()
    last = (index[:-1] >= 0) & (index[1:] < 0)
    scale[:-1][last] = scale[1:][last]
    return inputs | {"a_scale": scale}


def _nan_spreads(call: Call, out: Tensor) -> Tensor:
    """A padding row that holds NaN makes its whole tile NaN."""
    out = out.clone()
    for tile in _poisoned_tiles(call):
        out[tile * TILE : (tile + 1) * TILE] = torch.nan
    return out


def _poisoned_tiles(call: Call) -> list[int]:
    index = call.inputs["m_indices"]
    poison = torch.isnan(call.inputs["a"].to(torch.float32)).any(dim=1) | torch.isnan(call.inputs["a_scale"]).any(dim=1)
    return sorted({int(r) // TILE for r in torch.nonzero(poison & (index < 0))[:, 0]})


def _padding_poisoned(call: Call) -> str | None:
    return None if _poisoned_tiles(call) else "no padding row holds a NaN"


def _has_padding(call: Call) -> str | None:
    index = call.inputs["m_indices"]
    return None if bool(((index[:-1] >= 0) & (index[1:] < 0)).any()) else "no real row stands before a padding row"


def _several_experts(call: Call) -> str | None:
    used = torch.unique(call.inputs["m_indices"])
    return None if int((used >= 0).sum()) > 1 else "one expert is used"


def _more_than_one_expert(call: Call) -> str | None:
    return None if call.inputs["b"].shape[0] > 1 else "there is one expert"


def _weights_of_next_group(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    b = inputs["b"]
    bits = torch.roll(b.view(torch.uint8), -1, dims=0).view(b.dtype)
    return inputs | {"b": bits, "b_scale": torch.roll(inputs["b_scale"], -1, dims=0)}


def _one_row_short(call: Call, out: Tensor) -> Tensor:
    """The last real row of every group is not written."""
    out, old = out.clone(), stale(call, out)
    for part in call.parts:
        assert part.rows is not None
        last = int(part.rows[-1])
        out[last] = old[last]
    return out


def _whole_tiles_stored(call: Call, out: Tensor) -> Tensor:
    """A group's last tile is stored whole and last: its rows past M lie in later groups.

    Their scales come from the padding of the scale's columns, which nobody wrote (NaN here), and behind it are 0.
    """
    m, out = call.inputs["a"].shape[1], out.clone()
    padding = -m % TMA_ROWS
    for start, stop in _past_the_groups(call):
        out[start:stop] = 0
        out[start : min(stop, start + padding)] = torch.nan
    return out


def _past_the_groups(call: Call) -> list[tuple[int, int]]:
    """Rows of ``[G * M]``, first and end, that each group's last tile of :data:`STORE_TILE` rows covers past it."""
    groups, m = call.inputs["a"].shape[:2]
    ends = (g * m + -(-count // STORE_TILE) * STORE_TILE for g, count in enumerate(call.inputs["masked_m"].tolist()))
    return [((g + 1) * m, min(end, groups * m)) for g, end in enumerate(ends) if end > (g + 1) * m < groups * m]


def _tiles_reach_further(call: Call) -> str | None:
    m = call.inputs["a"].shape[1]
    for g, count in enumerate(call.inputs["masked_m"].tolist()):
        if any(start < g * m + count and g * m < stop for start, stop in _past_the_groups(call)):
            return None
    return f"no tile of {STORE_TILE} rows reaches a real row"


def faults() -> list[Fault]:
    """The faults of grouped products, in the order of the facts."""
    contiguous, masked = frozenset({CONTIGUOUS}), frozenset({MASKED})
    return [
        moved(
            "m_indices of -1 taken as an expert",
            "DeepGEMM 34",
            Stage.READ,
            _indices(_minus_one_as_expert),
            _has_padding,
            UNSPECIFIED,
            contiguous,
        ),
        moved(
            "all rows of a tile use the first row's expert",
            "DeepGEMM PR 450",
            Stage.READ,
            _indices(_first_of_tile(TILE)),
            _several_experts,
            "every expert's run is aligned to the tile, as the contract demands",
            contiguous,
        ),
        moved(
            "all rows of 256 use the first row's expert",
            "DeepGEMM PR 450",
            Stage.READ,
            _indices(_first_of_tile(2 * TILE)),
            _several_experts,
            "every expert's run is aligned to 256 rows",
            contiguous,
        ),
        moved(
            "group offset off by one",
            "flashinfer 3547",
            Stage.READ,
            _indices(_next_expert),
            _more_than_one_expert,
            "",
            contiguous,
        ),
        moved(
            "expert-parallel offset not applied",
            "flashinfer 3547",
            Stage.READ,
            _indices(_expert_offset),
            _more_than_one_expert,
            "",
            contiguous,
        ),
        moved(
            "previous group's descriptor used at a group switch",
            "DeepGEMM PR 343",
            Stage.READ,
            _indices(_descriptor_of_previous),
            _several_experts,
            "",
            contiguous,
        ),
        moved(
            "last real row uses a padding row's scale",
            "vllm 45741",
            Stage.READ,
            _padding_scale,
            _has_padding,
            "both scales are equal",
            contiguous,
        ),
        moved(
            "NaN of a padding row spreads to its tile",
            "flashinfer PR 3650, 2861",
            Stage.WRITE,
            _nan_spreads,
            _padding_poisoned,
            "",
            contiguous,
        ),
        moved(
            "weights of the next group",
            "DeepGEMM PR 343",
            Stage.READ,
            _weights_of_next_group,
            _more_than_one_expert,
            "",
            masked,
        ),
        Fault(
            "a group's last tile overwrites the next group",
            Family.MOVEMENT,
            "recorded on an H200: masked product of sgl-deep-gemm 0.1.4.post1",
            {Stage.WRITE: _whole_tiles_stored},
            masked,
            _tiles_reach_further,
            "those rows are zero",
            race=True,
        ),
        moved(
            "last real row of each group not written",
            "flashinfer 3547",
            Stage.WRITE,
            _one_row_short,
            always,
            "",
            GROUPED,
        ),
    ]
