"""What the judge of FP8 attention rests on, counted: ``python -m tests.support.attention_evidence NAME [N]``.

    truth      N small calls against mpmath at 200 bits: outputs and log-sum-exps outside their slack
    interval   N emulated results of a declared pipeline with its sums in other orders: how many leave its interval,
               and its median width beside 1 ulp of bfloat16, and that of codes of any arithmetic (nothing declared)
    faults     public faults by thread: which fault of the catalogue stands for each, whether a default ``validate``
               refuses it and whether it is named

The exit status is 1 where a count that has to be 0 is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import mpmath
import torch
from torch import Tensor

import oracle
from oracle.bounds.attention import codes_bound, pipeline_bound
from oracle.diagnosis.mutation import trials
from oracle.numbers.formats import decode
from oracle.numbers.rounding import f32
from oracle.routines.attention.faults import FAULTS
from oracle.routines.catalogue import faults_of, run
from oracle.routines.fault import Fault
from oracle.tensorcore.attention import TILE_SUMS, walks
from oracle.truth.attention import Attention, exact

E4M3 = torch.float8_e4m3fn
ROWS = {"diffuse": 0.3, "mixed": 1.5, "peaked": 6.0}
"""By what the queries are multiplied: the scores' standard deviation grows with it."""


def problem(
    seed: int,
    rows: int,
    keys: int,
    depth: int,
    *,
    sink: bool = False,
    size: float = 1.0,
    cap: float | None = None,
) -> Attention:
    """Rows of random windows over random keys, with scales, a soft cap or none and, with ``sink``, a sink each."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, depth, generator=g) for n in (rows, keys, keys))
    stop = torch.randint(0, keys + 1, (rows,), generator=g)
    start = (stop - torch.randint(0, max(keys, 1), (rows,), generator=g)).clamp(min=0)
    scales = torch.rand(rows + 2, generator=g) + 0.5
    sinks = torch.randn(rows, generator=g, dtype=torch.float64) if sink else None
    codes = [x.to(E4M3) for x in (size * q, k, v)]
    return Attention(*codes, depth**-0.5, scales[:rows], scales[-2], scales[-1], start, stop, sinks, cap)


def slowly(p: Attention) -> tuple[list[list[mpmath.mpf]], list[mpmath.mpf]]:
    """Output and log-sum-exp by mpmath, from the values of the codes alone."""
    mpmath.mp.prec = 200
    q, k, v = ([[mpmath.mpf(x) for x in row] for row in decode(x).tolist()] for x in (p.q, p.k, p.v))
    outs, sums = [], []
    for r, row in enumerate(q):
        c = mpmath.mpf(p.softmax_scale) * mpmath.mpf(float(p.q_scale[r])) * mpmath.mpf(float(p.k_scale))
        seen = range(max(0, int(p.start[r])), min(len(k), int(p.stop[r])))
        logits = {j: c * mpmath.fdot(zip(row, k[j], strict=True)) for j in seen}
        if p.cap is not None:
            logits = {j: p.cap * mpmath.tanh(y / p.cap) for j, y in logits.items()}
        weights = {j: mpmath.exp(y) for j, y in logits.items()}
        total = mpmath.fsum(weights.values()) + (mpmath.exp(p.sink[r].item()) if p.sink is not None and weights else 0)
        columns = range(len(v[0]))
        numerators = [mpmath.fsum(w * v[j][d] for j, w in weights.items()) for d in columns]
        outs.append([mpmath.mpf(float(p.v_scale)) * n / total if weights else mpmath.mpf(0) for n in numerators])
        sums.append(mpmath.log(total) if weights else -mpmath.inf)
    return outs, sums


def outside(p: Attention) -> int:
    """The results of ``p`` whose truth is further from mpmath's than its slack."""
    value, (outs, sums), count = exact(p), slowly(p), 0
    for r, row in enumerate(outs):
        for d, right in enumerate(row):
            count += abs(mpmath.mpf(value.out[r, d].item()) - right) > value.out_slack[r, d].item() + 1e-300
        lse = value.lse[r].item()
        count += lse != sums[r] and not abs(mpmath.mpf(lse) - sums[r]) <= value.lse_slack[r].item()
    return count


def truth(calls: int) -> int:
    caps = (None, None, 0.5, 3.0)  # of every four calls two have a soft cap
    wrong = sum(
        outside(problem(seed, 2, 1 + seed % 12, 16, sink=bool(seed % 2), cap=caps[seed % 4])) for seed in range(calls)
    )
    print(f"{calls} calls, {wrong} results outside their slack of mpmath at 200 bits")
    return wrong


def reordered(p: Attention, seed: int) -> tuple[Tensor, Tensor]:
    """The float32 output of the pipeline's codes with the sums of each tile in a random order, and which of it leaves
    the interval, both ``[R, Dv]``."""
    (walk,) = walks(p, TILE_SUMS)
    p, edges, g = walk.problem, pipeline_bound(walk, TILE_SUMS), torch.Generator().manual_seed(seed)
    total, out = torch.zeros_like(walk.total), torch.zeros_like(walk.sums)
    for step in walk.steps:
        order = torch.randperm(step.x.shape[1], generator=g)
        a = torch.ones_like(total) if step.factor is None else step.factor
        total = f32(total * a)
        for j in order.tolist():
            total = f32(total + step.x[:, j])
        part = torch.zeros_like(out)
        values = decode(p.v[step.keys])
        for some in order.split(32):
            part = f32(part + f32(decode(step.codes)[:, some] @ values[some]))
        out = f32(f32(out * a[:, None]) + part)
    scaled = f32(f32(out / total.clamp(min=2.0**-100)[:, None]) * p.v_scale.double())
    scaled = torch.where(p.seen()[:, None], scaled, torch.zeros_like(scaled))
    return scaled, ~((scaled >= edges.low) & (scaled <= edges.high) | edges.open)


def interval(results: int) -> int:
    seen, left, seed = 0, 0, 0
    while seen < results:
        p = problem(seed, 128, 64 + 97 * (seed % 5), 64, size=[*ROWS.values()][seed % len(ROWS)])
        out, bad = reordered(p, seed)
        seen, left, seed = seen + out.numel(), left + int(bad.sum()), seed + 1
    print(f"{seen} emulated results of sm90.fa3.tile with sums in other orders, {left} outside the interval")
    print("| rows | ulp of bfloat16 | declared | codes of any arithmetic |\n|---|---|---|---|")
    for name, size in ROWS.items():
        p = problem(7, 128, 600, 64, size=size)
        (walk,) = walks(replace(p, start=torch.zeros_like(p.start), stop=torch.full_like(p.stop, 600)), TILE_SUMS)
        declared = pipeline_bound(walk, TILE_SUMS)
        free = codes_bound(walk.problem, TILE_SUMS, predicted=False)
        middle = exact(walk.problem).out.abs()
        ulp = torch.exp2(torch.floor(torch.log2(middle)) - 7)
        widths = [(x.high - x.low).median().item() for x in (declared, free)]
        print(f"| {name} | {ulp.median().item():.2g} | {widths[0]:.2g} | {widths[1]:.2g} |")
    return left


def faults(cases: int) -> int:
    """Every fault of attention with a public thread, over the cases of a default ``validate``, of which at most
    ``cases`` that refuse it are asked for its name."""
    survivors, named, rows = 0, 0, 0
    print("| fault | seen | contract | refused by | named |\n|---|---|---|---|---|")
    for contract, fault in _public():
        refused, name_found, first = 0, False, ""
        for trial in trials(contract, "quick"):
            call = trial.call
            if refused >= cases or name_found:
                break
            if fault.applies(call) is not None:
                continue
            verdict = oracle.judge(
                contract, call.inputs, run(call, fault), arch=trial.arch, numerics=trial.numerics, **call.options
            )
            if verdict.status.is_failure:
                refused, first = refused + 1, first or str(trial.case)
                name_found = fault.name in verdict.explained_by
        rows, named, survivors = rows + 1, named + name_found, survivors + (not refused)
        print(f"| {fault.name} | {fault.seen} | {contract} | {first or 'no case'} | {name_found} |", flush=True)
    print(f"{rows} faults with a public thread: {rows - survivors} refused, {named} named")
    return survivors


def _public() -> Iterator[tuple[str, Fault]]:
    """The first contract of each fault that a public thread names."""
    seen: set[str] = set()
    own = {fault.name for fault in FAULTS}
    for contract in ("mha_fwd", "unified_attention", "flash_mla_with_kvcache", "merge_attn_states", "merge_state"):
        for fault in faults_of(contract):
            if fault.name in own and fault.name not in seen and "no public thread" not in fault.seen:
                seen.add(fault.name)
                yield contract, fault


COMMANDS = {"truth": (truth, 2000), "interval": (interval, 1_000_000), "faults": (faults, 4)}

if __name__ == "__main__":
    command, default = COMMANDS[sys.argv[1]]
    sys.exit(command(int(sys.argv[2]) if len(sys.argv) > 2 else default) != 0)
