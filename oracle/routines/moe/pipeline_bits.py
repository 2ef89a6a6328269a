"""The bits of a layer of experts: its steps as :func:`oracle.truth.moe.layer` has them, in the arithmetic of a device.

    h    = the first product by a schedule, stored
    act  = silu(gate) * up in float32: silu(x) = fl(x / fl(1 + fl(exp(-x)))), rounded where the steps say so
    q, s = the recipe of the intermediate
    y    = the second product by the schedule, stored or float32
    out  = the weighted outputs, added as a :class:`~oracle.truth.moe.Combine` says

Three things are not told by a row of :mod:`oracle.routines.moe.pipelines`: the schedules, whether a weighted term joins
a sum by one fma, and in which order terms are added. Each is tried (:func:`named`). The exponential is rounded
correctly here and within 2 ulp of that on a device, so a code of the intermediate may differ, seldom.

Sources: the rows' own; vLLM csrc/activation_kernels.cu; torch Reduce.cuh (four sums of every fourth term, then these).
Not covered: routing inside the layer, and inputs whose quantiser the row leaves open.

NaN of a token stays in its output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.numbers.formats import decode, same_bits, share
from oracle.numbers.rounding import f32
from oracle.tensorcore.fused import fma32
from oracle.tensorcore.identify import Match
from oracle.tensorcore.predict import predict_product, store
from oracle.tensorcore.schedules import Schedule
from oracle.truth.moe import (
    Activation,
    Addition,
    Combine,
    Experts,
    Steps,
    Tokens,
    quantised,
    read_back,
    running_sum,
)

EVERY = 4
"""Terms of one of torch's partial sums lie this far apart."""


@dataclass(frozen=True)
class Outputs:
    """What the experts of each token have given: float32 ``[k, T, H]`` before the store, zeros where there is none."""

    sums: Tensor
    weights: Tensor
    """Float32 ``[k, T]``."""


def outputs(tokens: Tokens, experts: Experts, steps: Steps, first: Schedule, second: Schedule) -> Outputs | None:
    """The second products, where both follow these schedules; None where one cannot compute its product."""
    dtype = steps.first or steps.store
    shape = (tokens.ids.shape[1], tokens.codes.shape[0], experts.w2.shape[1])
    sums = torch.zeros(shape, dtype=torch.float32, device=tokens.codes.device)
    for expert, token, slot in tokens.slots(experts):
        left = experts.product("w13", expert, *tokens.rows(token))
        if first.why_not(left, out_dtype=dtype) is not None:
            return None
        h = predict_product(left, first, out_dtype=dtype)
        act = decode(activated(read_back(h, steps), steps))
        if steps.weighted:
            act = f32(act * decode(tokens.weights)[token, slot, None])
        codes, scale = quantised(act, experts, steps)
        right = experts.product("w2", expert, codes, scale)
        if second.why_not(right, out_dtype=torch.float32) is not None:
            return None
        sums[slot, token] = predict_product(right, second, out_dtype=torch.float32)
    return Outputs(sums, tokens.output_weights(steps).to(torch.float32).T)


def activated(h: Tensor, steps: Steps) -> Tensor:
    """:func:`oracle.truth.moe.activated` of ``h`` ``[R, 2 I]`` in float32: ``[R, I]`` of the dtype that is
    quantised."""
    gate, up = h.to(torch.float32).chunk(2, dim=1)
    if steps.limit is not None:
        gate, up = gate.clamp(max=steps.limit), up.clamp(-steps.limit, steps.limit)
    left = gate / (1 + torch.exp(-gate.to(torch.float64)).to(torch.float32))
    if steps.activation is Activation.EACH:
        left = store(left, steps.store).to(torch.float32)
    return left * up if steps.activation is Activation.NONE else store(left * up, steps.store)


def added(outs: Outputs, steps: Steps) -> Iterator[Tensor]:
    """The layer's outputs ``[T, H]`` in the stored dtype, one for each order and each contraction of its sums."""
    combine = steps.combine.value
    y = store(outs.sums, steps.store).to(torch.float32) if combine.stored else outs.sums
    w = outs.weights[..., None]
    if combine.weight:
        w = store(w, steps.store).to(torch.float32)
    terms = w * y
    if combine.term:
        terms = store(terms, steps.store).to(torch.float32)
    if combine.addition is not Addition.FLOAT32:
        exact = decode(w) * decode(y) if not combine.term else decode(terms)
        for slots in (exact, exact.flip(0)):
            yield store(running_sum(slots, steps.store).to(torch.float32), steps.store)
        return
    yield store(_total(list(terms)), steps.store)
    if not combine.term:
        total = torch.zeros_like(terms[0])
        for weight, value in zip(w, y, strict=True):
            total = fma32(weight.expand_as(value), value, total)
        yield store(total, steps.store)
    if len(terms) > EVERY:
        yield store(_total([_total(list(terms[i::EVERY])) for i in range(EVERY)]), steps.store)


def named(
    tokens: Tokens, experts: Experts, steps: Steps, out: Tensor, schedules: Sequence[Schedule], ways: Sequence[Combine]
) -> list[Match]:
    """Schedules and ways to combine by the fraction of equal bits of ``out`` ``[T, H]``, bfloat16; no further schedule
    is tried once one has all.

    Both products follow one schedule, or the second one the same promotion by another instruction of the arch, which
    Triton takes for tiles of few rows.
    """
    matches: list[Match] = []
    for first in schedules:
        alike = [s for s in schedules if s is not first and _joins(s) == _joins(first)]
        for second in (first, *alike):
            outs = outputs(tokens, experts, steps, first, second)
            if outs is None:
                continue
            arithmetic = first.name if second is first else f"{first.name}, {second.name}"
            for combine in ways:
                sums = added(outs, replace(steps, combine=combine))
                equal = max(share(same_bits(o, out)) for o in sums)
                matches.append(Match(f"{arithmetic} and {combine.name}", equal, out.numel()))
            if any(match.equal == 1 for match in matches):
                return matches
    return matches


def _joins(schedule: Schedule) -> tuple[object, ...]:
    """What becomes of the chains, whatever the instruction."""
    return schedule.interval, schedule.promotion, schedule.epilogue, schedule.flushes, schedule.scales_inside


def _total(terms: Sequence[Tensor]) -> Tensor:
    """Float32 terms, one after the other."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
