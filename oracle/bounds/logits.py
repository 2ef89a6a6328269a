"""Bound of the attention logits: the error of each head's dot product, through relu and the weighted sum.

With ``l_h <= c_h - x_h <= h_h`` the bound of head ``h``'s accumulator (:mod:`oracle.bounds.product`, unit scales), relu
is monotone and 1-Lipschitz, so ``relu(c_h) - relu(x_h)`` lies in ``[dl_h, dh_h] = [relu(x_h + l_h), relu(x_h + h_h)] -
relu(x_h)``, and

    lo = s sum_h min(w_h dl_h, w_h dh_h) - |s| R,  hi likewise (exchanged for s < 0)
    R  = n u / (1 - n u) sum_h |w_h| (relu(x_h) + max(-dl_h, dh_h)) + eta,   n = H + 3

as each term meets at most one rounding of its product, ``H - 1`` additions in any order and grouping, and two for the
scale (once more if it is multiplied into the weight first). ``eta`` is ``2**-149`` for each of these operations, times
what may multiply it later. With bfloat16 weights the accumulators are rounded to bfloat16 (``n = H + 4``), in which
the kernel reduces: ``u`` is ``2**-8`` instead of ``2**-24``, and ``eta`` ``2**-133``. Where an intermediate,
doubled (``a + |a|`` stands for relu on sm100), may overflow, nothing is claimed.
Source: DeepGEMM sm90_fp8_mqa_logits.cuh and sm100_mqa_logits.cuh for the sum that it bounds; Jeannerod and Rump for
any order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from oracle.bounds.interval import Interval
from oracle.bounds.product import BF16_MAX, ETA, FLOAT32_MAX, U
from oracle.numbers.formats import decode
from oracle.truth.gemm import ScaledProduct, zero_nonfinite
from oracle.truth.logits import Logits

REDUCED = {torch.float32: (U, ETA, FLOAT32_MAX), torch.bfloat16: (2.0**-8, 2.0**-133, BF16_MAX)}
"""Unit roundoff, least subnormal and largest value of the sum over heads, by the dtype of the weights."""


def logits_bound(problem: Logits, dot_bound: Callable[[ScaledProduct], Interval]) -> Interval:
    """The interval of every logit ``[M, N]``; ``dot_bound`` is the bound of the dot products as a product.

    Elements that a NaN dot product enters are open: relu keeps NaN in torch, and ``fmaxf`` makes it 0. So are those of
    an infinite weight or scale: partial sums scaled apart may be infinities of both signs.
    """
    parts = [_tile(tile, dot_bound) for tile in problem.tiles()]
    opened = [part.open for part in parts if part.open is not None]
    low, high = (torch.cat(edges) for edges in zip(*((part.lo, part.hi) for part in parts), strict=True))
    return Interval(low, high, parts[0].name, True, torch.cat(opened))


def _tile(problem: Logits, dot_bound: Callable[[ScaledProduct], Interval]) -> Interval:
    weights, scale = (zero_nonfinite(decode(x)) for x in (problem.weights[:, :, None], problem.k_scale[None, :]))
    dot_value = problem.dots
    x, apart = dot_value.hi, 2 * (dot_value.lo.abs() + dot_value.slack)  # relu is 1-Lipschitz, twice
    infinite = torch.isinf(problem.weights).any(dim=1)[:, None] | torch.isinf(problem.k_scale)[None, :]
    open_ = torch.isnan(x).any(dim=1) | infinite
    x = zero_nonfinite(x)
    dot = dot_bound(problem.products())
    rest = torch.relu(x)
    down = torch.relu(x + dot.lo.reshape(x.shape)) - rest - apart
    up = torch.relu(x + dot.hi.reshape(x.shape)) - rest + apart
    low = torch.minimum(weights * down, weights * up).sum(dim=1)
    high = torch.maximum(weights * down, weights * up).sum(dim=1)
    size = (weights.abs() * (rest + torch.maximum(-down, up))).sum(dim=1)
    if dot.open is not None:
        open_ = open_ | dot.open.reshape(x.shape).any(dim=1)
    unit, quantum, largest = REDUCED[problem.weights.dtype]
    n = problem.heads + 3 + (unit != U)
    gamma = n * unit / (1 - n * unit) * (1 + 2.0**-20)
    factor = torch.maximum(scale.abs(), torch.ones_like(scale)) * weights.abs().amax().clamp(min=1.0)
    # beside the float32 roundings: the float64 ones of the sums above
    rounding = gamma * size + problem.heads * 2.0**-51 * torch.maximum(-low, high)
    rounding = rounding * scale.abs() + quantum * 2 * n * factor
    left, right = torch.minimum(scale * low, scale * high), torch.maximum(scale * low, scale * high)
    reach = torch.maximum(size * scale.abs().clamp(min=1.0), factor.expand(size.shape))
    open_ = open_ | ~(2 * reach < largest * (1 - 2.0**-20))
    return Interval(left - rounding, right + rounding, f"sum over heads in any order of {dot.name}", True, open_)
