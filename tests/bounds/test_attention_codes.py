"""The interval of the codes of a pipeline: by hand, of kernels of other arithmetic, and of wrong ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.bounds.attention import Scores, codes_bound, split_bound
from oracle.bounds.product import ETA
from oracle.numbers.formats import decode
from oracle.tensorcore.attention import ANY, PIPELINES, TILE_SUMS, Pipeline, pipeline, predict_attention, split_walks
from oracle.truth.attention import Attention, exact

pytestmark = pytest.mark.usefixtures("one_thread")
E4M3, U, E = torch.float8_e4m3fn, 2.0**-24, 2.0**-21
FORWARD = "sm90.attention.forward.32.lift8.any"


def problem(seed: int, rows: int = 3, keys: int = 90, depth: int = 32, *, sink: bool = False) -> Attention:
    """Causal rows; the last key of the first row scores far above the others."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, depth, generator=g).to(E4M3) for n in (rows, keys, keys))
    q[0], k[-1] = torch.ones(depth).to(E4M3), torch.full((depth,), 0.5).to(E4M3)
    stop = torch.arange(rows).flip(0) * -7 + keys
    scales = torch.rand(3, generator=g) + 0.5
    sinks = torch.randn(rows, generator=g, dtype=torch.float64) if sink else None
    start = torch.zeros(rows, dtype=torch.int64)
    return Attention(q, k, v, 0.4, scales[0].expand(rows), scales[1], scales[2], start, stop, sinks)


def code(x: float, way: int) -> float:
    """The value of E4M3 nearest to ``x``, ties to even, at most 448; half a step beyond ``x`` with ``way``."""
    step = math.ldexp(1.0, max(math.frexp(x)[1] - 1, -6) - 3)
    return max(0.0, x + way * max(x / 16, 2.0**-10)) if way else min(round(x / step) * step, 448.0)


def gamma(n: int) -> float:
    return n * U / (1 - n * U)


Row = tuple[list[float], list[float], float, float]


def by_hand(p: Attention, one: Pipeline, row: int, errors: list[float]) -> Row:
    """Low and high edges of a row before their store, the log-sum-exp and its error, key by key."""
    ln2, n, keys = math.log(2.0), int(p.stop[row]), len(p.k)
    raised, c = one.lift + math.log2(one.gain), float(p.factor[row]) / ln2
    y = [c * s for s in p.scores()[row].tolist()]
    most, moved = max(map(abs, y[:n])), abs(c) * max(errors[:n])
    width = keys if one.free else one.tile(p.q.shape[1], len(p.q))
    spans = [(i, min(i + width, keys)) for i in range(0, keys, width)]
    count = keys // 8 + 1 if one.free else len(spans)
    dy = [abs(c) * e + moved + 6 * U * (abs(x) + most + raised) for e, x in zip(errors, y, strict=True)]
    eps = [math.expm1(ln2 * d + E + 2 * U) for d in dy]
    factor = math.exp(2 * ln2 * moved + count * (E + 12 * U * most)) * (1 + gamma(keys + 2 * count + 2))
    columns, total, lost_sum, top = decode(p.v).t().tolist(), 0.0, 0.0, -math.inf
    middle, radius, lost, size = ([0.0] * len(columns) for _ in range(4))
    for first, end in spans[::-1] if one.backward else spans:
        seen = range(first, min(end, n))
        before, top = top, max([top, *(y[j] for j in seen)])
        a = 2.0 ** (before - top) if before > -math.inf else 0.0
        x = {j: 2.0 ** (y[j] - top + raised) for j in seen}
        codes = {j: [code(x[j] * (1 + sign * eps[j]), sign if one.free else 0) for sign in (-1, 1)] for j in seen}
        total = total * a + sum(x.values())
        lost_sum = lost_sum * a + sum(x[j] * eps[j] for j in seen)
        for d, v in enumerate(columns):
            whole = sum(codes[j][1] * abs(v[j]) for j in seen)
            old = middle[d] * a, radius[d] * a, lost[d] * a
            m, r, cut = (0.0, 0.0, 0.0) if one.promoted else (whole, 0.0, 0.0) if one.free else old
            sums = 0.0, 0.0
            for at in range(first, end, 32):
                step = [j for j in range(at, min(at + 32, end)) if j in codes]
                widest = max(2.0**-6, *(abs(v[j]) for j in range(at, min(at + 32, end))))
                held = max(max([2.0**-6, *(codes[j][1] for j in step)]) * widest, abs(m) + r + cut)
                of_step = (
                    sum(sum(codes[j]) / 2 * v[j] for j in step),
                    sum((codes[j][1] - codes[j][0]) / 2 * abs(v[j]) for j in step),
                )
                m, r, sums = m + of_step[0], r + of_step[1], (sums[0] + of_step[0], sums[1] + of_step[1])
                cut += 2.0**-13 * (33 * held + abs(m) + r + cut)
            kept = old if one.promoted else (0.0, 0.0, 0.0)
            m, r = sums if one.free else (m, r)
            middle[d], radius[d], lost[d], size[d] = m + kept[0], r + kept[1], cut + kept[2], size[d] * a + whole
    if p.sink is not None:
        s = float(p.sink[row]) / ln2
        own = 2.0 ** (s - top + raised)
        total += own
        lost_sum += own * math.expm1(ln2 * (moved + 6 * U * (abs(s) + most + raised)) + E)
    sum_lost, low, high = factor * (total + lost_sum) - total, [], []
    for d, v in enumerate(columns):
        spread = radius[d] + factor * lost[d] + (factor - 1) * (size[d] + lost[d]) + 448 * 2.0**-126 * sum(map(abs, v))
        numerators = (middle[d] - spread) * float(p.v_scale), (middle[d] + spread) * float(p.v_scale)
        ends = [o / divisor for o in numerators for divisor in (total - sum_lost, total + sum_lost)]
        more = (4 * U + 2.0**-22) * max(map(abs, ends)) + 8 * ETA
        low.append(min(ends) - more)
        high.append(max(ends) + more)
    lse = (top - raised) * ln2 + math.log(total)
    lse_lost = 2 * (sum_lost / total + ln2 * moved) + 2 * E * (abs(lse) + 1) + 8 * U * (most + abs(lse) + 16)
    return low, high, lse, lse_lost


def kernel(p: Attention, tile: int, *, backward: bool, gain: float, first_sum: str) -> Tensor:
    """Float32 of another kind: scores in float32, ``exp`` of scaled differences, sums by a matmul."""
    q, k, v = (decode(x).float() for x in (p.q, p.k, p.v))
    y = ((q @ k.T) * p.factor.float()[:, None]).masked_fill(~p.window(), -torch.inf)
    spans = [slice(i, i + tile) for i in range(0, len(k), tile)]
    top, total, out = torch.full((len(q), 1), -torch.inf), torch.zeros(len(q), 1), torch.zeros(len(q), v.shape[1])
    for span in spans[::-1] if backward else spans:
        grown = torch.maximum(top, y[:, span].amax(dim=1, keepdim=True))
        level = grown.masked_fill(torch.isneginf(grown), 0.0)
        x, a = torch.exp(y[:, span] - level), torch.exp(top - level)
        out = out * a + (x * gain).to(E4M3).float() @ v[span]
        total, top = total * a + (x.flip(1) if first_sum == "last" else x).sum(dim=1, keepdim=True), grown
    if p.sink is not None:
        total = total + torch.exp(p.sink.float()[:, None] - level)
    return (out / total / gain * p.v_scale).double()


class TestAnyArithmetic:
    @pytest.mark.parametrize("backward", [False, True])
    @pytest.mark.parametrize("gain", [256.0, 448.0])
    def test_held_and_without_a_lift_refused(self, backward: bool, gain: float) -> None:
        p = problem(7, rows=9, keys=300, depth=64, sink=backward)
        k = 0.1 * decode(p.k)
        k[0] = k[-1] = 0.375  # of a query of ones 7 nats above the others, whatever the direction
        one = torch.ones(())
        p = replace(p, q=torch.ones(9, 64).to(E4M3), k=k.to(E4M3), v=decode(p.v).abs().to(E4M3), k_scale=one)
        p = replace(p, q_scale=one.expand(9), softmax_scale=7.3 / 24)
        raised = "lift8" if gain == 256 else "gain448"
        name = f"sm90.attention.{'backward' if backward else 'forward'}.48.{raised}.any"
        bounds = [codes_bound(p, pipeline(name), predicted=False), codes_bound(p, ANY, predicted=False)]
        right = kernel(p, 48, backward=backward, gain=gain, first_sum="last")
        wrong = kernel(p, 48, backward=backward, gain=1.0, first_sum="first")
        for bound in bounds:
            assert bool(((right >= bound.low) & (right <= bound.high)).all())
        assert bool(((wrong < bounds[0].low) | (wrong > bounds[0].high)).any())

    @pytest.mark.parametrize("name", [n for n in PIPELINES if not pipeline(n).integers])  # whose scores are exact
    def test_of_predicted_scores_it_is_narrower_and_holds_the_bits(self, name: str) -> None:
        p, one = problem(5, rows=9, keys=300, depth=64), pipeline(name)
        out = predict_attention(p, one).double()
        narrow, wide = (codes_bound(p, one, predicted=known) for known in (True, False))
        assert bool(((out >= narrow.low) & (out <= narrow.high)).all())
        assert float((narrow.high - narrow.low).sum()) < float((wide.high - wide.low).sum())

    def test_scores_of_any_accumulator(self) -> None:
        """Products that no aligner cuts: a sum of 64 loses what 13 bits do not hold, one of 0 what float32 does."""
        p, signs = problem(1), torch.tensor([1.0, -1.0]).repeat(16)
        for q, size in ((torch.ones(3, 32), 2.0**-13 * 64), (signs.repeat(3, 1), gamma(32) * 64)):
            same = replace(p, q=q.to(E4M3), k=torch.full((90, 32), 2.0).to(E4M3))
            assert Scores.of(same, torch.tensor([1])).errors.tolist() == [[pytest.approx(size, rel=0.01)] * 90]

    def test_nan_and_rows_without_keys(self) -> None:
        p = problem(2)
        p.k.view(torch.uint8)[80] = 0x7F  # the third row does not see it
        p = replace(p, stop=torch.tensor([90, 0, 70]))
        bound = codes_bound(p, pipeline(FORWARD), predicted=False)
        assert bound.open.all(dim=1).tolist() == [True, False, False]
        assert not bool(bound.low[1].any() or bound.high[1].any()) and float(bound.lse_high[1]) == -math.inf
        assert bool(((exact(p).lse >= bound.lse_low) & (exact(p).lse <= bound.lse_high))[1:].all())


@pytest.mark.parametrize("splits", [1, 3])
def test_splits_of_values_of_zero_leave_what_underflows(splits: int) -> None:
    """8 units of each part, one for each part and for each of 8 operations: of one part nothing is added."""
    p = problem(1, keys=500)
    p = replace(p, v=torch.zeros_like(p.v.float()).to(E4M3))
    (parts,) = split_walks(p, TILE_SUMS, splits)
    units = split_bound(parts, TILE_SUMS).high / ETA
    assert torch.equal(units.round(), torch.full_like(units, 8.0 if splits == 1 else 8 + len(parts) + 8))


class TestByHand:
    @pytest.mark.parametrize("name", [FORWARD, "sm90.attention.backward.64.gain448.chain", "sm90.fa3.tile", ANY.name])
    @pytest.mark.parametrize("sink", [False, True])
    def test_every_term(self, name: str, sink: bool) -> None:
        p, one, row = problem(3, sink=sink), pipeline(name), 1
        errors = (torch.arange(90, dtype=torch.float64) % 7 * 0.004)[None]
        known = Scores(torch.tensor([row]), p.scores()[row : row + 1], errors)
        bound = codes_bound(p, one, predicted=False, known=known)
        low, high, lse, lost = by_hand(p, one, row, errors[0].tolist())
        width = (bound.high - bound.low)[0]
        for found, right in ((bound.low[0], low), (bound.high[0], high)):
            assert bool(((found - torch.tensor(right, dtype=torch.float64)).abs() <= 2.0**-26 * width).all())
        half = (bound.lse_high - bound.lse_low) / 2
        assert float(half) == pytest.approx(lost, rel=2.0**-26)
        assert float(bound.lse_low + half) == pytest.approx(lse, abs=1e-12)
