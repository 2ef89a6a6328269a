"""The head reduction of DeepGEMM's MQA logits kernels, bit for bit.

    logits[m, n] = k_scale[n] * sum_h weights[m, h] * relu(<q[m, h], k[n]>)

One thread of a quad holds heads ``h = 8t + 2c + p`` (``c`` its place in the quad, ``p`` in {0, 1}); with
``x_t = relu(acc_h)`` and ``w_t`` its weight::

    S_{c,p} = fma(x_0, w_0, fl(x_1 w_1)),  then  S = fma(x_t, w_t, S)  for t = 2, 3, ...
    v_c     = fl(fl(S_{c,0} + S_{c,1}) * k_scale)
    logits  = fl(fl(v_0 + v_1) + fl(v_2 + v_3))

The first sum is of two products, and the compiler contracts the *first* of them into the fused multiply-add;
starting with ``fl(x_0 w_0)`` instead gives 86.5 % of the captured bits (that order is registered too, to be
distinguished). The product with ``k_scale`` is used twice (sum and shuffle) and is therefore not contracted.

sm100 adds the heads ``j`` mod 4 apart, ascending from 0, ``a + |a|`` for twice the relu (NaN stays NaN)::

    s_i     = fma(fl(a_j + |a_j|), w_j, s_i),  i = j mod 4
    logits  = fl(fl(s_0 + s_2) + fl(s_1 + s_3)) / 2 * k_scale

and with bfloat16 weights the same in bfloat16, of ``bf16(relu(a_j))`` without the half. FP4 kernels have their scales
in the dot products and no ``k_scale``.

Sources: sm90_fp8_mqa_logits.cuh and sm90_fp8_paged_mqa_logits.cuh of DeepGEMM (the same reduction), the wgmma
accumulator layout of the PTX ISA, and the captured H200 output (every element inside ``[ks, ke)`` equal);
sm100_mqa_logits.cuh of DeepGEMM @54e2261 (no output of it was seen). Not covered: what the kernel leaves outside
``[ks, ke)``; H = 8 on sm90, where each ``S`` is one product and the contraction of ``S_{c,0} + S_{c,1}`` was not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from oracle.errors import NumericsError, ShapeError, among
from oracle.numbers.rounding import Overflow, Rounding, pair_to_dtype, two_sum
from oracle.tensorcore.fused import fma32
from oracle.tensorcore.instructions import Status
from oracle.tensorcore.predict import Engine, canonical_nan, predict_product
from oracle.tensorcore.schedules import Schedule, schedules
from oracle.truth.logits import Logits

_BLOCK = 1 << 22  # accumulators held at once: 16 MiB a temporary


@dataclass(frozen=True)
class LogitsSchedule:
    """How the logits of one element are reduced over heads.

    Attributes
    ----------
    chain : str, Schedule of the dot products.
    first_product_fused : bool
        Whether ``S`` starts as ``fma(x_0, w_0, fl(x_1 w_1))``, else as ``fma(x_1, w_1, fl(x_0 w_0))``; sm90.
    by_fours : bool, the reduction of sm100.
    """

    name: str
    chain: str
    first_product_fused: bool
    seen_in: str
    status: Status
    by_fours: bool = False

    @property
    def heads(self) -> int:
        """What divides the number of heads."""
        return 4 if self.by_fours else 8


def _sm100(name: str, chain: str) -> LogitsSchedule:
    return LogitsSchedule(name, chain, False, "DeepGEMM's MQA logits on sm100", Status.LITERATURE, by_fours=True)


FP4 = "sm100.mqa_logits_fp4"
LOGITS: Mapping[str, LogitsSchedule] = MappingProxyType(
    {
        s.name: s
        for s in (
            LogitsSchedule(
                "sm90.mqa_logits",
                "sm90.chain",
                True,
                "DeepGEMM's MQA logits on sm90 (the paged kernel has the same source)",
                Status.SEEN_ON_HARDWARE,
            ),
            LogitsSchedule(
                "sm90.mqa_logits.second_fused",
                "sm90.chain",
                False,
                "the contraction a reader would write; no kernel known",
                Status.LITERATURE,
            ),
            _sm100("sm100.mqa_logits", "sm100.chain"),
            *(
                _sm100(s.name.replace("sm100.chain_mxf4", FP4), s.name)
                for s in schedules("sm100")
                if s.name.startswith("sm100.chain_mxf4")
            ),
        )
    }
)


def predict_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    *,
    q_blocks: Tensor | None = None,
    k_blocks: Tensor | None = None,
    schedule: LogitsSchedule | str = "sm90.mqa_logits",
    chain: Schedule | None = None,
    engine: Engine = "auto",
) -> Tensor:
    """Bits of the logits for every pair, as though every ``n`` lay inside ``[ks, ke)``.

    Parameters
    ----------
    q : Tensor, ``[M, H, D]`` float8, or uint8 of E2M1; H a multiple of 8 (sm100: 4).
    k, k_scale : Tensor, ``[N, D]`` of that kind and ``[N]`` float32.
    weights : Tensor, ``[M, H]`` float32, or on sm100 bfloat16.
    q_blocks, k_blocks : Tensor ``[M, H, D / 32]``, ``[N, D / 32]`` E8M0, with E2M1.
    chain : Schedule of the dot products, None: that of ``schedule``.

    Returns ``[M, N]`` float32. relu of NaN is 0 on sm90, as ``fmaxf`` has it, and NaN on sm100.
    Raises NumericsError: unknown schedule (the message lists those known), or a wrong multiple of heads; ShapeError:
    tensors that disagree.
    """
    if isinstance(schedule, str):
        if schedule not in LOGITS:
            raise NumericsError(f"no logits schedule {schedule!r}; {among(schedule, LOGITS)}")
        schedule = LOGITS[schedule]
    if q.ndim != 3 or k.ndim != 2 or q.shape[2] != k.shape[1]:
        raise ShapeError(f"q {list(q.shape)} and k {list(k.shape)} must be [M, H, D] and [N, D]")
    m, heads, d = (int(extent) for extent in q.shape)
    if weights.shape != (m, heads) or k_scale.shape != (k.shape[0],):
        raise ShapeError(f"weights {list(weights.shape)} must be [{m}, {heads}], k_scale one per key")
    if heads % schedule.heads:
        raise NumericsError(f"H={heads} is not a multiple of {schedule.heads}, which {schedule.name} needs")
    n = int(k.shape[0])
    out = torch.empty((m, n), dtype=torch.float32, device=q.device)
    step = max(1, _BLOCK // (heads * max(n, 1)))
    for start in range(0, m, step):
        rows = slice(start, min(start + step, m))
        blocks = None if q_blocks is None else q_blocks[rows]
        window = torch.zeros(q[rows].shape[0], dtype=torch.int64, device=q.device)
        product = Logits(q[rows], k, k_scale, weights[rows], window, window, blocks, k_blocks).products()
        acc = predict_product(product, chain or schedule.chain, out_dtype=torch.float32, engine=engine)
        acc = acc.reshape(-1, heads, n)
        if schedule.by_fours:
            out[rows] = _by_fours(acc, weights[rows], k_scale)
        else:
            out[rows] = _reduce(torch.where(acc > 0, acc, 0.0), weights[rows], k_scale, schedule)
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


def _by_fours(acc: Tensor, weights: Tensor, k_scale: Tensor) -> Tensor:
    """``acc [M, H, N]`` to ``[M, N]``: four sums over heads, in the dtype of the weights."""
    m, heads, n = acc.shape
    bf16 = weights.dtype is torch.bfloat16
    twice = acc + acc.abs()
    x = _bf16(torch.where(acc <= 0, 0.0, acc).double()) if bf16 else twice
    x = x.reshape(m, heads // 4, 4, n)
    w = weights.to(torch.float32).reshape(m, heads // 4, 4, 1).expand(x.shape)
    total = torch.zeros_like(x[:, 0])
    for t in range(heads // 4):
        if bf16:  # the product has 16 bits and is exact in float64; the sum is a pair
            total = _bf16(*two_sum(x[:, t].double() * w[:, t].double(), total.double()))
        else:
            total = fma32(x[:, t], w[:, t], total)
    if bf16:
        pair = _bf16(total[:, :2].double() + total[:, 2:].double())
        sum_ = _bf16(pair[:, 0].double() + pair[:, 1].double())
        return _bf16(sum_.double() * _bf16(k_scale.double()).double())
    pair = total[:, :2] + total[:, 2:]
    return (pair[:, 0] + pair[:, 1]) / 2 * k_scale


def _bf16(high: Tensor, low: Tensor | None = None) -> Tensor:
    """A pair rounded to bfloat16, as float32."""
    low = torch.zeros_like(high) if low is None else torch.where(torch.isfinite(high), low, 0.0)
    rounding, overflow = Rounding.NEAREST_EVEN, Overflow.INF
    return pair_to_dtype(high, low, torch.bfloat16, rounding=rounding, overflow=overflow).to(torch.float32)
