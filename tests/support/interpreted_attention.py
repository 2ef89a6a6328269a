"""Walks of many problems at once by Triton's interpreter beside the definition's, bit for bit.

    TRITON_INTERPRET=1 python -m tests.support.interpreted_attention

prints, as JSON, for each pipeline and kind of data how many bytes of the outputs, row sums, maxima and codes differ;
and for a sum of which one bit was changed. The interpreter must be chosen before Triton is imported.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from oracle.tensorcore import device_attention
from oracle.tensorcore.attention import Walk, pipeline, walk_together, walks
from oracle.truth.attention import Attention
from tests.support.interpreter import repair

E4M3 = torch.float8_e4m3fn
PIPELINES = ("sm90.fa3.tile", "sm90.fa3.chain", "sm90.flashinfer.fp8")
KINDS = ("plain", "sink", "nan", "far")


def problem(seed: int, kind: str, rows: int = 5, keys: int = 150, depth: int = 48, width: int = 32) -> Attention:
    """``far``: zeros among values and keys, and scores so far apart that P and what rescales it underflow."""
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(n, depth, generator=g).mul(2).to(E4M3) for n in (rows, keys))
    v = torch.randn(keys, width, generator=g).to(E4M3)
    if kind == "far":
        v[:, ::3] = 0
        k[keys // 2 :] = 0
    if kind == "nan":
        for x in (q, k, v):
            x.view(torch.uint8).view(-1)[torch.randint(0, x.numel(), (1,), generator=g)] = 0x7F
    stop = torch.randint(0, keys + 1, (rows,), generator=g)
    scales = torch.rand(rows + 2, generator=g) + 0.5
    sink = torch.randn(rows, generator=g, dtype=torch.float64) if kind == "sink" else None
    scale = 3.0 if kind == "far" else 0.4
    return Attention(q, k, v, scale, scales[:rows], scales[-2], scales[-1], torch.zeros_like(stop), stop, sink)


def parts(walked: Walk) -> Iterator[Tensor]:
    """What two walks have in common, float64 or codes; a NaN is like any other."""
    for x in (walked.out, walked.sums, walked.total, walked.top):
        yield torch.where(torch.isnan(x), torch.nan, x.to(torch.float64)).view(torch.uint8)
    for step in walked.steps:
        yield step.codes.contiguous().view(torch.uint8)
        yield torch.where(torch.isnan(step.x), torch.nan, step.x.to(torch.float64)).view(torch.uint8)


def main() -> None:
    repair()
    warnings.simplefilter("ignore")  # the interpreter overflows in numpy
    different = {}
    for name in PIPELINES:
        for kind in KINDS:
            problems = [problem(seed, kind) for seed in range(2)]
            one = walk_together(problems, pipeline(name))
            assert one is not None
            each = [list(parts(next(walks(x, pipeline(name))))) for x in problems]
            rights = (torch.cat([x.flatten() for x in same]) for same in zip(*each, strict=True))
            different[f"{name} {kind}"] = sum(
                int((left.flatten() != right).sum()) for left, right in zip(parts(one), rights, strict=True)
            )
    sums, other = device_attention.sums, pipeline(PIPELINES[0])
    device_attention.sums = lambda *x, **options: sums(*x, **options) * (1 + 2.0**-23)  # type: ignore[assignment]
    wrong = walk_together([problem(0, "plain")], other)
    device_attention.sums = sums
    right = next(walks(replace(problem(0, "plain")), other))
    assert wrong is not None
    different["a changed bit"] = int((wrong.out != right.out).sum())
    print(json.dumps(different))


if __name__ == "__main__":
    main()
