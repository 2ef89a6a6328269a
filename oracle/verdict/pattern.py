"""Where the failing elements lie, as text: rows, columns, tiles.

The input is a boolean tensor, without values. A tensor of more than two dimensions is described by its leading index
groups first, then as the matrix of its last two dimensions.

Source: derived in this file; nothing but words depends on it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def describe(bad: Tensor, *, tiles: tuple[int, int] = (128, 128)) -> str:
    """One phrase for the failing elements of ``bad`` (bool, any rank); empty string when there are none.

    ``tiles`` is the tile height and width that the kernel family uses; failing elements that fill whole tiles
    are named as tiles.
    """
    failing = count(bad)
    if failing == 0:
        return ""
    if failing == bad.numel():
        return "every element"
    if bad.dim() == 0:
        return "the only element"
    if bad.dim() == 1:
        return f"elements {ranges(torch.nonzero(bad)[:, 0].tolist())}"
    if bad.dim() > 2:
        lead = bad.flatten(0, -3).flatten(1).any(dim=1)
        groups = torch.nonzero(lead)[:, 0].tolist()
        inner = describe(bad.flatten(0, -3).any(dim=0), tiles=tiles)
        where = f"groups {ranges(groups)}" if len(groups) < len(lead) else "every group"
        return f"{where}: {inner}"
    return _matrix(bad, failing, tiles)


def ranges(indices: list[int], *, most: int = 4) -> str:
    """``[0, 1, 2, 7]`` as ``0..2, 7``; after ``most`` runs an ellipsis with the count."""
    runs: list[tuple[int, int]] = []
    for i in sorted(indices):
        if runs and i == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], i)
        else:
            runs.append((i, i))
    words = [str(a) if a == b else f"{a}..{b}" for a, b in runs[:most]]
    if len(runs) > most:
        words.append(f"... ({len(indices)} in all)")
    return ", ".join(words)


def places(mask: Tensor) -> Tensor:
    """The flat indices (int64, ascending) at which ``mask`` (bool, any rank) is True; NumPy finds them twenty times as
    fast as torch on the CPU."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.contiguous().numpy()))
    return torch.nonzero(mask.flatten())[:, 0]


def count(mask: Tensor) -> int:
    """How many elements of ``mask`` (bool, any rank) are True."""
    return int(np.count_nonzero(mask.numpy()) if mask.device.type == "cpu" else torch.count_nonzero(mask))


def lines(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The rows and the columns of ``mask`` (bool ``[R, C]``) that hold a True, bool ``[R]`` and ``[C]``."""
    return _any(mask, 1), _any(mask, 0)


def grid(mask: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`lines` of ``mask`` (bool ``[R, C]``) as indices (int64, ascending, ``[r]`` and ``[c]``)."""
    rows, columns = (torch.nonzero(x)[:, 0] for x in lines(mask))
    return rows, columns


def _any(mask: Tensor, *axes: int) -> Tensor:
    if mask.device.type == "cpu":
        return torch.from_numpy(np.asarray(mask.numpy().any(axis=axes)))
    return mask.any(dim=axes)


def _matrix(bad: Tensor, failing: int, tiles: tuple[int, int]) -> str:
    m, n = bad.shape
    rows, columns = (at.tolist() for at in grid(bad))
    full = failing == len(rows) * len(columns)
    row_tiles, column_tiles = ({i // size for i in at} for at, size in zip((rows, columns), tiles, strict=True))
    if len(rows) == 1 and len(columns) == 1:
        return f"only element ({rows[0]}, {columns[0]})"
    if len(rows) < m and len(columns) == n:
        return f"{_plural('row', rows)} only" + ("" if full else ", scattered within")
    if len(columns) < n and len(rows) == m:
        block = f" (N block {columns[0] // tiles[1]})" if len(column_tiles) == 1 and n > tiles[1] else ""
        return f"{_plural('column', columns)} only{block}" + ("" if full else ", scattered within")
    if full and len(rows) < m and len(columns) < n:
        return f"the rectangle of {_plural('row', rows)} and {_plural('column', columns)}"
    if m > tiles[0] or n > tiles[1]:
        padded = torch.nn.functional.pad(bad, (0, -n % tiles[1], 0, -m % tiles[0]))
        by_tile = _any(padded.view(-1, tiles[0], padded.shape[1] // tiles[1], tiles[1]), 1, 3)
        touched = torch.nonzero(by_tile).tolist()
        if len(touched) == 1:
            ((r, c),) = touched
            return f"scattered within tile ({r}, {c}) of {tiles[0]}x{tiles[1]}"
        if len(row_tiles) * len(column_tiles) > len(touched):
            return f"scattered within {len(touched)} tiles of {tiles[0]}x{tiles[1]}"
    share = 100.0 * failing / bad.numel()
    return f"scattered over {len(rows)} rows and {len(columns)} columns ({share:.3g}% of the elements)"


def _plural(noun: str, indices: list[int]) -> str:
    return f"{noun} {indices[0]}" if len(indices) == 1 else f"{noun}s {ranges(indices)}"
