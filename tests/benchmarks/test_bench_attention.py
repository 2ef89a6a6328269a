"""The judge of FP8 attention beside a float64 attention of the same size.

``pytest tests/benchmarks/test_bench_attention.py --benchmark-enable --benchmark-only`` compares within each group;
``python -m tests.benchmarks.test_bench_attention [cpu | cuda]`` prints the ratios, for more heads and keys on a GPU.
Nothing here asserts a time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from oracle.numbers.formats import decode

pytestmark = pytest.mark.turns(4)

PREFILL, DECODE = (1, 1024, 1024, 2, 1, 128), (8, 1, 2048, 8, 1, 128)
"""Sequences, queries, keys, heads, KV heads, head dim."""
ON_A_GPU = ((1, 4096, 4096, 32, 8, 128), (64, 1, 4096, 32, 8, 128))
UNTIMED = (1, 3, 20, 2, 1, 32)
NAME = "sm90.fa3.tile"


def call(shape: tuple[int, ...], device: str = "cpu") -> dict[str, Tensor]:
    batch, queries, keys, heads, of_keys, depth = shape
    g = torch.Generator().manual_seed(1)
    extents = {"q": (queries, heads), "k": (keys, of_keys), "v": (keys, of_keys)}
    inputs = {n: torch.randn(batch, *x, depth, generator=g).to(torch.float8_e4m3fn) for n, x in extents.items()}
    inputs |= {f"{n}_descale": torch.rand(batch, of_keys, generator=g) + 0.5 for n in "qkv"}
    return {name: x.to(device) for name, x in inputs.items()}


def plain(inputs: dict[str, Tensor]) -> Tensor:
    """Softmax and both products in float64."""
    q, k, v = (decode(inputs[name]).transpose(1, 2) for name in "qkv")
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    heads = [torch.softmax(q[:, h] @ k[:, h].mT * q.shape[3] ** -0.5, dim=2) @ v[:, h] for h in range(q.shape[1])]
    return torch.stack(heads, dim=1)


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "right": lambda x: x,
    "one element larger by 1": lambda x: x + 1.0,
    "one element larger by half": lambda x: 1.5 * x + 0.01,
}
"""What becomes of one element: what no codes hold, or what those of some pipelines may."""


def judged(inputs: dict[str, Tensor], kind: str = "right") -> Callable[[], oracle.Verdict]:
    """The judgement of an output with the right bits, or with one other element."""
    outputs = oracle.predict("mha_fwd", inputs, numerics=NAME)
    out = outputs["out"]
    at = (0, out.shape[1] // 2, 0, 5)
    out[at] = WRONG[kind](out[at])
    return lambda: oracle.judge("mha_fwd", inputs, outputs, arch="sm90", explain="off")


@pytest.mark.parametrize("shape", [PREFILL, DECODE], ids=["prefill", "decode"])
class TestJudge:
    def test_judge(self, benchmark: Any, shape: tuple[int, ...]) -> None:
        benchmark.group = f"attention {shape}"
        run = judged(call(shape if benchmark.enabled else UNTIMED))
        assert str(benchmark.pedantic(run, rounds=3, warmup_rounds=1).basis) == f"bits of {NAME}"

    def test_float64(self, benchmark: Any, shape: tuple[int, ...]) -> None:
        benchmark.group = f"attention {shape}"
        inputs = call(shape if benchmark.enabled else UNTIMED)
        benchmark.pedantic(lambda: plain(inputs), rounds=3, warmup_rounds=1)


def _seconds(run: Callable[[], object], device: str, rounds: int) -> float:
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def main(device: str = "cpu", rounds: str = "2") -> None:
    for shape in ON_A_GPU if device == "cuda" else (PREFILL, DECODE):
        inputs = call(shape, device)
        right = _seconds(lambda x=inputs: plain(x), device, int(rounds))  # type: ignore[misc]
        for kind in WRONG:
            run = judged(inputs, kind)
            mine = _seconds(run, device, int(rounds))
            times = f"judge {mine:.3f} s, float64 attention {right:.3f} s, {mine / right:.1f} times"
            print(f"{shape}, {kind}: {run().status}, {times}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
