"""What ``identify`` and a judgement by a found split cost beside a float64 matmul of the same shape, in one run.

``python -m tests.benchmarks.test_bench_identify [ROUNDS]`` prints CPU seconds (``OMP_NUM_THREADS=1``: of one core), the
ratio to the least of the matmul beside it, and what was named; ``pytest tests/benchmarks/test_bench_identify.py
--benchmark-enable --benchmark-only`` compares within one group. Required: 0.3 s at 64x256x2048, 60 matmuls at
256x2048x2048, 3 s for a K of 16,384 that is split in 6, with bfloat16 and with float32 outputs. Nothing here asserts a
time. ``python -m tests.benchmarks.test_bench_identify calls`` identifies and judges 96 calls of ``torch._scaled_mm`` as
``mmaemu`` computes them, cut as cuBLASLt cuts them on an H200 (``fixtures/splits``), and stops at one that is not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from oracle.numbers.formats import decode
from tests.support.products import block_scaled, operand
from tests.support.splits import calls as recorded

pytestmark = pytest.mark.turns(4)

GEMM, SPLIT = "fp8_gemm_nt", "torch_per_tensor_w8a8_scaled_mm"
SHAPES = ((64, 256, 2048), (256, 2048, 2048))
LONG = (64, 512, 16384)
UNTIMED = (8, 128, 512)
Call = tuple[str, dict[str, Tensor], Tensor, dict[str, object]]


def blocks(m: int, n: int, k: int) -> Call:
    """A product of blocks by the arithmetic of DeepGEMM."""
    p = block_scaled("randn", m, n, k, seed=1)
    inputs = {"a": p.a, "b": p.b, "a_scale": p.a_scale, "b_scale": p.b_scale}
    out = oracle.predict(GEMM, inputs, numerics="sm90.promote128")
    assert isinstance(out, Tensor)
    return GEMM, inputs, out, {}


def split(m: int, n: int, k: int, *, fast: bool, dtype: torch.dtype, parts: int = 6) -> Call:
    """A product of ``torch._scaled_mm`` with one scale an operand, whose K is cut in parts as cuBLASLt cuts it."""
    a, b = (operand("codes", rows, k, seed=seed) for seed, rows in enumerate((m, n)))
    inputs = {"qinput": a, "weight": b.t(), "scale_a": torch.tensor(0.37), "scale_b": torch.tensor(1.9)}
    base = "sm90.chain.product" if fast else "sm90.promote128.scale_after.product"
    out = oracle.predict(SPLIT, inputs, numerics=f"{base}.split{parts}", out_dtype=dtype)
    assert isinstance(out, Tensor)
    return SPLIT, inputs, out, {"out_dtype": dtype}


def matmul(call: Call) -> Callable[[], object]:
    a, b = (decode(x) for x in list(call[1].values())[:2])
    return lambda: a @ (b if call[0] == SPLIT else b.T)


def identified(call: Call) -> str:
    contract, inputs, out, options = call
    return oracle.identify(contract, inputs, out, **options)[0].schedule


def judged(call: Call) -> str:
    contract, inputs, out, options = call
    verdict = oracle.judge(contract, inputs, out, arch="sm90", **options)
    return f"{verdict.status.name}, {verdict.matches or verdict.summary}"


def calls() -> dict[str, Call]:
    made = {f"blocks {'x'.join(map(str, shape))}": blocks(*shape) for shape in SHAPES}
    for fast in (True, False):
        for dtype in (torch.bfloat16, torch.float32):
            name = f"split6 {'x'.join(map(str, LONG))} {'chain' if fast else 'promoted'} {str(dtype)[6:]}"
            made[name] = split(*LONG, fast=fast, dtype=dtype)
    return made


@pytest.mark.benchmark(group="identify")
@pytest.mark.parametrize("name", ["blocks", "split", "float64 matmul"])
def test_identify(benchmark: Any, name: str) -> None:
    """A small shape where nothing is timed."""
    shape = UNTIMED if benchmark.disabled else SHAPES[0]
    call = split(*shape, fast=True, dtype=torch.float32, parts=2) if name == "split" else blocks(*shape)
    side = matmul(call) if name == "float64 matmul" else lambda: identified(call)
    found = benchmark.pedantic(side, rounds=1 if benchmark.disabled else 3)
    if name != "float64 matmul":
        assert found.endswith("product.split2" if name == "split" else "sm90.promote128")


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    made = run()
    return time.process_time() - start, made


def main(rounds: int) -> None:
    for name, call in calls().items():
        beside = matmul(call)
        least = min(seconds(beside)[0] for _ in range(5))
        for verb in (identified, judged):
            runs = [seconds(lambda verb=verb, call=call: verb(call)) for _ in range(rounds)]
            best = min(time_ for time_, _ in runs)
            print(f"{name:42} {verb.__name__:10} {best:8.3f} s {best / least:8.1f} matmuls  {runs[0][1]}", flush=True)


def emulated(one: dict[str, Any]) -> Call:
    """A recorded call of ``torch._scaled_mm``, computed by ``mmaemu`` and cut as the record says."""
    import mmaemu

    from tests.hardware.split_k import operands

    p = operands(one["m"], one["n"], one["k"], one["kind"], "cpu")
    scales, dtype = [x.reshape(()) for x in (p.a_scale, p.b_scale)], getattr(torch, one["dtype"])
    parts = one["schedule"].rpartition(".split")[2] if ".split" in one["schedule"] else "1"
    cut = 1 if parts == "1" else (int(parts), "contiguous")
    out = mmaemu.scaled_mm(
        p.a, p.b.t(), *scales, out_dtype=dtype, use_fast_accum=one["fast"], profile="hopper", splitk=cut
    )
    return (
        SPLIT,
        {"qinput": p.a, "weight": p.b.t(), "scale_a": scales[0], "scale_b": scales[1]},
        out,
        {"out_dtype": dtype},
    )


def all_emulated() -> None:
    """96 calls: of every length of K the smallest shapes of the record."""
    kept: dict[int, list[dict[str, Any]]] = {}
    for one in sorted(recorded("h200"), key=lambda c: c["m"] * c["n"] * c["k"]):
        if one["kind"] == "all codes" and len(kept.setdefault(one["k"], [])) < 12:
            kept[one["k"]].append(one)
    for number, one in enumerate((one for calls in kept.values() for one in calls), 1):
        contract, inputs, out, options = emulated(one)
        (took, matches), (judging, verdict) = (
            seconds(partial(verb, contract, inputs, out, arch="sm90", **options))
            for verb in (oracle.identify, oracle.judge)
        )
        assert matches[0].equal == 1.0 and matches[0].compared == out.numel() and verdict.matches, one
        said = f"{one['m']}x{one['n']}x{one['k']} {one['dtype']} {'fast' if one['fast'] else 'precise'}"
        print(f"{number:3} {said:34} {took:6.2f} s {judging:6.2f} s  {matches[0].schedule}, judged {verdict.matches}")


if __name__ == "__main__":
    all_emulated() if sys.argv[1:] == ["calls"] else main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
