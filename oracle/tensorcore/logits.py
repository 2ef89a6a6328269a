"""The head reduction of DeepGEMM's MQA logits kernels, bit for bit.

    logits[m, n] = k_scale[n] * sum_h weights[m, h] * relu(<q[m, h], k[n]>)

One thread of a quad holds heads ``h = 8t + 2c + p`` (``c`` its place in the quad, ``p`` in {0, 1}); with
``x_t = relu(acc_h)`` and ``w_t`` its weight::

    S_{c,p} = fma(x_0, w_0, fl(x_1 w_1)),  then  S = fma(x_t, w_t, S)  for t = 2, 3, ...
    v_c     = fl(fl(S_{c,0} + S_{c,1}) * k_scale)
    logits  = fl(fl(v_0 + v_1) + fl(v_2 + v_3))

The first sum is of two products, and the compiler contracts the *first* of them into the fused multiply-add;
starting with ``fl(x_0 w_0)`` instead gives 86.5 % of the captured bits (that order is registered too, to be
told apart). The product with ``k_scale`` is used twice (sum and shuffle) and is therefore not contracted.

Sources: sm90_fp8_mqa_logits.cuh and sm90_fp8_paged_mqa_logits.cuh of DeepGEMM (the same reduction), the wgmma
accumulator layout of the PTX ISA, and the captured H200 output (every element inside ``[ks, ke)`` equal).
Not covered: what the kernel leaves outside ``[ks, ke)``; H = 8, where each ``S`` is one product and the
contraction of ``S_{c,0} + S_{c,1}`` has not been seen; sm100 (its reduction was not captured).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from oracle.errors import NumericsError, ShapeError
from oracle.tensorcore.fused import fma32
from oracle.tensorcore.instructions import Status
from oracle.tensorcore.predict import Engine, canonical_nan, predict_product
from oracle.truth.gemm import ScaledProduct

_BLOCK = 1 << 22  # accumulators held at once: 16 MiB a temporary


@dataclass(frozen=True)
class LogitsSchedule:
    """How the logits of one element are reduced over heads.

    Attributes
    ----------
    chain : str, Schedule of the dot products.
    first_product_fused : bool
        Whether ``S`` starts as ``fma(x_0, w_0, fl(x_1 w_1))``, else as ``fma(x_1, w_1, fl(x_0 w_0))``.
    """

    name: str
    chain: str
    first_product_fused: bool
    seen_in: str
    status: Status


LOGITS: Mapping[str, LogitsSchedule] = MappingProxyType(
    {
        s.name: s
        for s in (
            LogitsSchedule(
                "sm90.mqa_logits", "sm90.chain", True,
                "DeepGEMM's MQA logits on sm90 (the paged kernel has the same source)",
                Status.SEEN_ON_HARDWARE,
            ),
            LogitsSchedule(
                "sm90.mqa_logits.second_fused", "sm90.chain", False,
                "the contraction a reader would write; no kernel known", Status.LITERATURE,
            ),
        )
    }
)  # fmt: skip


def predict_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    *,
    schedule: LogitsSchedule | str = "sm90.mqa_logits",
    engine: Engine = "auto",
) -> Tensor:
    """Bits of the logits for every pair, as though every ``n`` lay inside ``[ks, ke)``.

    Parameters
    ----------
    q : Tensor, ``[M, H, D]`` float8; H a multiple of 8.
    k, k_scale : Tensor, ``[N, D]`` float8 and ``[N]`` float32.
    weights : Tensor, ``[M, H]`` float32.

    Returns ``[M, N]`` float32. relu of NaN is 0, as ``fmaxf`` has it.
    Raises NumericsError: unknown schedule (the message lists those known), or H not a multiple of 8; ShapeError:
    tensors that disagree.
    """
    if isinstance(schedule, str):
        if schedule not in LOGITS:
            raise NumericsError(f"no logits schedule {schedule!r}; known: {', '.join(LOGITS)}")
        schedule = LOGITS[schedule]
    if q.ndim != 3 or k.ndim != 2 or q.shape[2] != k.shape[1]:
        raise ShapeError(f"q {list(q.shape)} and k {list(k.shape)} must be [M, H, D] and [N, D]")
    m, heads, d = (int(extent) for extent in q.shape)
    if weights.shape != (m, heads) or k_scale.shape != (k.shape[0],):
        raise ShapeError(f"weights {list(weights.shape)} must be [{m}, {heads}], k_scale one per key")
    if heads % 8:
        raise NumericsError(f"H={heads} is not a multiple of 8, which {schedule.name} needs")
    n = int(k.shape[0])
    one = torch.ones((1, 1), dtype=torch.float32, device=q.device)
    out = torch.empty((m, n), dtype=torch.float32, device=q.device)
    step = max(1, _BLOCK // (heads * max(n, 1)))
    for start in range(0, m, step):
        rows = slice(start, min(start + step, m))
        flat = q[rows].reshape(-1, d)
        product = ScaledProduct(flat, k, one, one, d, n)
        acc = predict_product(product, schedule.chain, out_dtype=torch.float32, engine=engine)
        x = torch.where(acc > 0, acc, 0.0).reshape(-1, heads, n)
        out[rows] = _reduce(x, weights[rows], k_scale, schedule)
    return canonical_nan(out)


def _reduce(x: Tensor, weights: Tensor, k_scale: Tensor, schedule: LogitsSchedule) -> Tensor:
    """``x [M, H, N]`` after relu, to ``[M, N]``."""
    m, heads, n = x.shape
    # [M, t, c, p, N]: h = 8 t + 2 c + p
    x = x.reshape(m, heads // 8, 4, 2, n)
    w = weights.to(torch.float32).reshape(m, heads // 8, 4, 2, 1)
    if heads == 8:
        total = x[:, 0] * w[:, 0]
    else:
        first, second = (0, 1) if schedule.first_product_fused else (1, 0)
        total = fma32(x[:, first], w[:, first], x[:, second] * w[:, second])
        for t in range(2, heads // 8):
            total = fma32(x[:, t], w[:, t], total)
    v = (total[:, :, 0] + total[:, :, 1]) * k_scale
    return (v[:, 0] + v[:, 1]) + (v[:, 2] + v[:, 3])
