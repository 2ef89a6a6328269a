"""FP8 attention of one head of keys, in float64: the output, its log-sum-exp, and what float64 leaves open of both.

    y[r, j] = softmax_scale q_scale[r] k_scale <q[r], k[j]>                 start[r] <= j < stop[r]
    y[r, j] = cap tanh(that / cap)                                          with a soft cap
    out[r]  = v_scale sum_j exp(y[r, j]) v[j] / (exp(sink[r]) + sum_j exp(y[r, j]))
    lse[r]  = log(exp(sink[r]) + sum_j exp(y[r, j]))

A row without keys gives 0 and -inf, with a sink too. Dot products of E4M3 codes are exact in float64: multiples of
2^-18 below 2^26 for D = 256. Operands may also be 16-bit or float64 values (dequantised keys): their dot products are
float64 sums, within ``D 2^-53 sum |q_k k_jk|``. All that follows is float64 arithmetic around the row's maximum;
``slack`` bounds its error, with an exponential and a hyperbolic tangent of at most one unit in the last place and the
factor ``|y - max|`` that an error of the exponent has. ``x / tanh(x)`` times the slope of the tangent is at most 1, so
that a relative error of its argument is no larger in it.

NaN in a query or key, or an infinity, makes every row NaN whose window has it, and one in ``v`` makes its column NaN in
these rows. In the others 0 times it may do so or not: the bounds leave the column open.
Source: derived in this file; Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), for the shift
by the maximum. Not covered: dropout, biases of positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from oracle.errors import ShapeError
from oracle.numbers.formats import decode, of_dtype
from oracle.truth.gemm import block_sums, quantum_of_codes, zero_nonfinite

TILE = {"cpu": 1 << 21}
"""Scores held at once by kind of device: 16 MiB for each float64 temporary on a CPU."""
DEVICE_TILE = 1 << 26
"""The same of any other device, whose operations cost the more the more there are: 512 MiB."""
LITTLE = 1 << 22
"""Products of queries and keys that a CPU multiplies faster than a device starts its operations."""
UNIT = 2.0**-52
"""Twice the unit roundoff of float64: of an exponential with an error below one unit in the last place, too."""


@dataclass(frozen=True)
class Attention:
    """The rows of queries that read one head of keys.

    Attributes
    ----------
    q : Tensor ``[R, D]``, k : ``[N, D]``, v : ``[N, Dv]``, codes of E4M3, or values: 16-bit or float64.
    softmax_scale : float
    q_scale : Tensor ``[R]`` float32; k_scale : Tensor ``[]`` float32; v_scale : ``[]`` or ``[Dv]`` float32.
    start, stop : Tensor ``[R]`` int64, the keys that a row sees, ``stop`` excluded.
    sink : Tensor ``[R]`` float64 or None, a score without a value.
    cap : float or None, what no score exceeds.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    start: Tensor
    stop: Tensor
    sink: Tensor | None = None
    cap: float | None = None

    def __post_init__(self) -> None:
        (rows, depth), keys = self.q.shape, self.k.shape[0]
        wanted = {"k": (keys, depth), "v": (keys, self.v.shape[-1]), "q_scale": (rows,), "start": (rows,)}
        for name, shape in {**wanted, "stop": (rows,)}.items():
            if tuple(getattr(self, name).shape) != shape:
                actual = list(getattr(self, name).shape)
                raise ShapeError(f"{name} has shape {actual}; this attention takes {list(shape)}")

    @property
    def factor(self) -> Tensor:
        """Float64 ``[R]``: what a dot product is multiplied with before the exponential."""
        return self.softmax_scale * self.q_scale.to(torch.float64) * self.k_scale.to(torch.float64)

    def logits(self, scores: Tensor) -> Tensor:
        """``y`` of dot products ``scores`` ``[R, N]``, float64 of that shape, a new tensor; NaN stays NaN."""
        y = self.factor[:, None] * scores
        return y if self.cap is None else y.div_(self.cap).tanh_().mul_(self.cap)

    def window(self) -> Tensor:
        """Bool ``[R, N]``: the keys that each row sees."""
        j = torch.arange(self.k.shape[0], device=self.k.device)
        return (j >= self.start[:, None]) & (j < self.stop[:, None])

    def seen(self) -> Tensor:
        """Bool ``[R]``: rows that see a key."""
        return self.stop.clamp(max=self.k.shape[0]) > self.start.clamp(min=0)

    def sees(self, bad: Tensor) -> Tensor:
        """Bool ``[R, Dv]``: the columns in which a row sees a key that is ``bad``, bool ``[N, Dv]``."""
        if not bool(bad.any()):
            return torch.zeros((1, bad.shape[1]), dtype=torch.bool, device=bad.device)
        return self.window().to(torch.float64) @ bad.to(torch.float64) > 0

    @property
    def codes(self) -> bool:
        """Whether queries and keys are 8-bit codes, whose dot products float64 holds exactly."""
        return self.q.dtype.itemsize == 1 and self.k.dtype.itemsize == 1

    @property
    def coded(self) -> bool:
        """Whether the values are 8-bit codes too."""
        return self.codes and self.v.dtype.itemsize == 1

    def scores(self) -> Tensor:
        """The dot products, float64 ``[R, N]``, exact for codes; NaN where a NaN or an infinity enters."""
        q, k = values(self.q), values(self.k)
        if not len(k):
            return torch.zeros((len(q), 0), dtype=torch.float64, device=q.device)
        total = torch.zeros((q.shape[0], k.shape[0]), dtype=torch.float64, device=q.device)
        left, right = zero_nonfinite(q), zero_nonfinite(k)
        if self.codes:
            quantum = quantum_of_codes(of_dtype(self.q.dtype), of_dtype(self.k.dtype))
            sums = block_sums(left, right, quantum=quantum)
        else:
            sums = iter((left @ right.t(),))
        for part in sums:
            total = total + part
        bad = (~torch.isfinite(q)).any(dim=1)[:, None] | (~torch.isfinite(k)).any(dim=1)[None, :]
        return total.masked_fill(bad, torch.nan)

    def score_sizes(self) -> Tensor:
        """``sum |q_k k_jk|`` of every dot product, float64 ``[R, N]``, without what is not finite."""
        return zero_nonfinite(values(self.q)).abs() @ zero_nonfinite(values(self.k)).abs().t()

    def score_errors(self) -> Tensor | float:
        """How far :meth:`scores` may be from the exact dot products, float64 ``[R, N]``; 0 of codes, and of NaN."""
        return 0.0 if self.codes else self.q.shape[1] * 2.0**-53 * self.score_sizes()

    @property
    def keys(self) -> int:
        """The keys of all rows."""
        return self.k.shape[0]

    @property
    def at_once(self) -> int:
        """The rows whose scores are held at once, by the keys and the device."""
        return max(1, at_once(self.k.device) // max(1, self.keys))

    def near(self) -> Attention:
        """The copy on the CPU of a problem of a device that has few products; else the problem itself."""
        if self.q.device.type == "cpu" or self.q.numel() * self.k.shape[0] > LITTLE:
            return self
        tensors: dict[str, Any] = {
            f.name: x.cpu() for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)
        }
        return replace(self, **tensors)

    def rows(self, rows: slice | Tensor) -> Attention:
        """The same keys read by some of the ``rows``, a slice or int64 ``[S]``."""
        own = {name: getattr(self, name)[rows] for name in ("q", "q_scale", "start", "stop")}
        return replace(self, sink=None if self.sink is None else self.sink[rows], **own)

    def columns(self, columns: slice) -> Attention:
        """The same rows and keys with some of the ``columns`` of V, each with its scale."""
        scale = self.v_scale[columns] if self.v_scale.dim() else self.v_scale
        return replace(self, v=self.v[:, columns], v_scale=scale)

    def tiles(self) -> Iterator[Attention]:
        """The rows in blocks with at most :data:`TILE` scores each (or one row)."""
        step = self.at_once
        for i in range(0, self.q.shape[0], step):
            yield self.rows(slice(i, i + step))


def at_once(device: torch.device) -> int:
    """Scores that are held at once on a device."""
    return TILE.get(device.type, DEVICE_TILE)


def values(x: Tensor) -> Tensor:
    """The values of ``x`` ``[...]``, codes or values, as float64 ``[...]``, exactly; NaN stays NaN."""
    return x if x.dtype is torch.float64 else decode(x)


@dataclass(frozen=True)
class Softmax:
    """The weights of a tile of rows, relative to its maximum.

    Attributes
    ----------
    scores : Tensor ``[R, N]`` float64, the exact dot products.
    weights : Tensor ``[R, N]`` float64, ``exp(y - top)``, 0 outside the window.
    top : Tensor ``[R]`` float64, the largest ``y`` or sink; 0 of a row without keys.
    sink : Tensor ``[R]`` float64, ``exp(sink - top)``, or 0.
    error : Tensor ``[R, N]`` float64, bounds of the errors of ``weights``.
    """

    scores: Tensor
    weights: Tensor
    top: Tensor
    sink: Tensor
    error: Tensor


def softmax(problem: Attention) -> Softmax:
    """The weights of one tile (:meth:`Attention.tiles`); a row whose window has a NaN score is NaN."""
    scores, hidden = problem.scores(), ~problem.window()
    some = bool(hidden.any())
    y = problem.logits(scores)
    y = y.masked_fill_(hidden, -torch.inf) if some else y
    none = torch.zeros_like(problem.factor) - torch.inf
    sink = none if problem.sink is None else torch.where(problem.seen(), problem.sink, none)
    top = torch.maximum(y.amax(dim=1), sink) if y.shape[1] else sink
    top = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    below = y - top[:, None]
    weights = torch.exp(below)
    roundings = 1.0 if problem.cap is None else 5.0
    moved = below.abs_().add_(y.abs_().mul_(roundings)).add_(4.0).mul_(UNIT)
    if not problem.codes:
        moved += problem.factor.abs()[:, None] * problem.score_errors()
    moved = moved.masked_fill_(hidden, 0.0) if some else moved
    return Softmax(scores, weights, top, torch.exp(sink - top), moved.mul_(weights))


@dataclass(frozen=True)
class Value:
    """Float64 results: ``out`` ``[R, Dv]``, ``lse`` ``[R]`` and how far each may be from the exact one."""

    out: Tensor
    lse: Tensor
    out_slack: Tensor
    lse_slack: Tensor


def exact(problem: Attention) -> Value:
    """The attention of every row; see the module for rows without keys and for NaN."""
    parts = [_tile(tile) for tile in problem.tiles()]
    return Value(*(torch.cat([getattr(part, name) for part in parts]) for name in Value.__dataclass_fields__))


def _tile(problem: Attention) -> Value:
    soft, v = softmax(problem), values(problem.v)
    total = soft.weights.sum(dim=1) + soft.sink
    divisor = torch.where(total == 0, torch.ones_like(total), total)
    scale = problem.v_scale.to(torch.float64)
    weights = soft.weights.nan_to_num(nan=0.0)
    out = (weights @ zero_nonfinite(v)) / divisor[:, None] * scale
    size = (weights @ zero_nonfinite(v).abs()) / divisor[:, None] * scale.abs()
    moved = soft.error.nan_to_num(nan=0.0)
    lost = (moved.sum(dim=1) / divisor) + (problem.k.shape[0] + 8) * UNIT
    slack = (moved @ zero_nonfinite(v).abs()) / divisor[:, None] * scale.abs() + (size + out.abs()) * lost[:, None]
    bad = torch.isnan(soft.weights).any(dim=1)[:, None] | problem.sees(~torch.isfinite(v))
    seen = problem.seen()
    lse = torch.where(seen, soft.top + torch.log(divisor), torch.full_like(total, -torch.inf))
    out, lse = out.masked_fill(bad & seen[:, None], torch.nan), lse + 0.0 * total
    return Value(out, lse, slack * (1 + 2.0**-40), 2 * lost + UNIT * (lse.abs().nan_to_num(posinf=0.0) + 1))


def merged(outputs: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Two states of the same rows as one: ``outputs`` ``[2, M, H, D]`` and natural log-sum-exps ``sums`` ``[2, M, H]``,
    float64.

    Returns the output ``[M, H, D]`` and the log-sum-exp ``[M, H]``, float64. A log-sum-exp of -inf has no weight,
    whatever its output is, NaN too; two of them give NaN and -inf. Otherwise NaN goes through.
    Source: derived in this file.
    """
    top = sums.amax(dim=0)
    weights = torch.exp(sums - torch.where(torch.isneginf(top), torch.zeros_like(top), top))
    total = weights.sum(dim=0)
    parts = torch.where((weights == 0)[..., None], torch.zeros_like(outputs), weights[..., None] * outputs)
    return parts.sum(dim=0) / total[..., None], top + torch.log(total)
