"""What quantising by the truth and judging the output cost beside a float64 matmul, in one run on the same threads.

``python -m tests.benchmarks.test_bench_quantisers [M K]`` takes the sides in turn, several times, and prints for each
contract the least CPU seconds of all threads as a ratio to the least of a matmul of ``M x K x 128``; then which share
of the judgement the figures of error and loss take, and how far the memory of the process rose above its inputs.
``pytest tests/benchmarks/test_bench_quantisers.py --benchmark-enable --benchmark-only`` compares within one group.
Required at 4096x7168: truth and judgement within 10 matmuls. Nothing here asserts a time.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.routines import get
from oracle.routines.base import Call
from oracle.routines.quantisers.contract import QuantiserContract, prepared
from oracle.routines.quantisers.verdict import measured
from oracle.verdict.compare import Status

pytestmark = pytest.mark.turns(4)

SHAPE, SMALL = (4096, 7168), (8, 256)
COLUMNS = 128  # of the matmul
REQUIRED = 10.0  # float64 matmuls
CONTRACTS: Mapping[str, Mapping[str, object]] = {
    "mxfp8_quantize": {},
    "mxfp4_quantize": {},
    "nvfp4_quantize": {},
    "per_token_group_quant_fp8": {},
    "mxfp8_quantize, e5m2, floor": {"element": "e5m2", "rounding": "floor"},
    "per_token_group_quant_fp8, ue8m0": {"use_ue8m0": True},
}
Side = Callable[[], object]


class Sides:
    """A call of a contract: its truth, the judgement of that, and the figures within it."""

    def __init__(self, name: str, m: int, k: int) -> None:
        contract = get(name.split(",")[0])
        assert isinstance(contract, QuantiserContract)
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        self.contract, self.options, self.inputs = contract, CONTRACTS[name], {"x": x}
        if "global_scale" in {spec.name for spec in contract.inputs}:
            self.inputs["global_scale"] = 2688.0 / x.abs().max().to(torch.float32).reshape(1)
        self.out = self.truth()

    def truth(self) -> dict[str, Tensor]:
        return self.contract.reference(self.inputs, **self.options)

    def judge(self) -> None:
        verdict = self.contract.judge(self.inputs, self.out, arch=None, numerics=None, **self.options)
        assert verdict.status is Status.PASSED and verdict.loss is not None

    def figures(self) -> Side:
        call = Call(self.contract, self.inputs, self.options).checked()
        x, recipe = prepared(call), call.operands.recipes[0]
        q, scale = self.contract.split(self.out, call, (recipe,))
        return lambda: measured(x, q, scale, recipe)


def matmul(m: int, k: int) -> Side:
    a, b = torch.randn(m, k, dtype=torch.float64), torch.randn(k, COLUMNS, dtype=torch.float64)
    return lambda: a @ b


@pytest.mark.benchmark(group="quantisers")
@pytest.mark.parametrize("side", ["truth and judgement", "figures", "float64 matmul"])
@pytest.mark.parametrize("name", CONTRACTS)
def test_quantiser(benchmark: Any, name: str, side: str) -> None:
    """A small shape where nothing is timed."""
    shape = SMALL if benchmark.disabled else SHAPE
    sides = Sides(name, *shape)
    run = {
        "truth and judgement": lambda: (sides.truth(), sides.judge()),
        "figures": sides.figures(),
        "float64 matmul": matmul(*shape),
    }[side]
    benchmark.pedantic(run, rounds=1 if benchmark.disabled else 3, warmup_rounds=0 if benchmark.disabled else 1)


def main(m: int, k: int, rounds: int = 5) -> None:
    """One table."""
    print(f"{m}x{k}, {torch.get_num_threads()} threads; in float64 matmuls of {m}x{k}x{COLUMNS}")
    plain: Side | None = None
    for name in CONTRACTS:
        sides = Sides(name, m, k)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sides.judge()
        rise = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        plain = plain or matmul(m, k)
        runs = {"truth": sides.truth, "judgement": sides.judge, "figures": sides.figures(), "matmul": plain}
        best = dict.fromkeys(runs, float("inf"))
        for _ in range(rounds):
            for side, run in runs.items():
                start = time.process_time()
                run()
                best[side] = min(best[side], time.process_time() - start)
        truth, judgement, figures = (best[side] / best["matmul"] for side in ("truth", "judgement", "figures"))
        print(
            f"{name:34} truth {truth:5.2f} + judgement {judgement:5.2f} = {truth + judgement:5.2f} (required "
            f"{REQUIRED:g}), figures {figures:5.2f} = {figures / judgement:4.0%} of it, memory +{rise:.0f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    given = tuple(map(int, sys.argv[1:3]))
    main(*(given or SHAPE))
