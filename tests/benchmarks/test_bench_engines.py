"""Rates of the compiled engines beside a float64 matmul and a direct scalar implementation of the same model.

``pytest tests/benchmarks/test_bench_engines.py --benchmark-enable --benchmark-only`` compares within each group (one
shape a group); ``python tests/benchmarks/test_bench_engines.py`` prints one table of GMAC/s. The CUDA engine has its
own file beside this one. Nothing here asserts a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
import torch

from oracle.bounds import Accumulator, engines, of_schedule, residue_bound
from oracle.numbers.formats import codes_of, decode
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get
from oracle.truth.gemm import ScaledProduct

pytestmark = pytest.mark.turns(4)

PROMOTE = "sm90.promote128"
DEEPSEEK = (128, 4096, 7168)
SMALL = (32, 512, 2048)
BOUND = (64, 1024, 2048)
REFERENCE = (512, 4096, 4096)
UNTIMED = (8, 256, 512)  # where nothing is measured, that everything runs is shown by any shape
INTERPRETED = (2, 128, 256)


def product(m: int, n: int, k: int) -> ScaledProduct:
    """1x128 x 128x128 scales, bell-shaped codes."""
    g = torch.Generator().manual_seed(1)
    a, b = (torch.randn(rows, k, generator=g).to(torch.float8_e4m3fn) for rows in (m, n))
    sa, sb = (torch.rand(rows, k // 128, generator=g) + 0.5 for rows in (m, n // 128))
    return ScaledProduct(a, b, sa, sb, 128, 128)


def timed(benchmark: Any, shape: tuple[int, int, int]) -> ScaledProduct:
    """The product of a shape, or a small one where nothing is measured."""
    return product(*(shape if benchmark.enabled else UNTIMED))


def accumulator() -> Accumulator:
    return of_schedule(get(PROMOTE))


@numba.njit(nogil=True, error_model="numpy")
def _scalar(a: Any, a_exponent: Any, b: Any, b_exponent: Any, sa: Any, sb: Any, out: Any) -> None:
    """promote128 as one would write it first: an element at a time, integers shifted right by ``m - e``.

    ``a``, ``b`` are significands in units of ``2^(E-3)``; the fma is a float64 one, so a rare result is one ulp off.
    """
    for i in range(a.shape[0]):
        for j in range(b.shape[0]):
            total = np.float32(0)
            for block in range(a.shape[1] // 128):
                c, c_exponent = 0, -126  # c * 2^(c_exponent - 13)
                for k in range(block * 128, block * 128 + 128, 32):
                    m = c_exponent
                    for kk in range(k, k + 32):
                        if a[i, kk] != 0 and b[j, kk] != 0:
                            m = max(m, a_exponent[i, kk] + b_exponent[j, kk])
                    s = (abs(c) >> min(m - c_exponent, 62)) * (1 if c >= 0 else -1)
                    for kk in range(k, k + 32):
                        p = a[i, kk] * b[j, kk]
                        if p != 0:
                            part = (abs(p) << 7) >> min(m - a_exponent[i, kk] - b_exponent[j, kk], 62)
                            s += part if p > 0 else -part
                    size, shift = abs(s), 0
                    while size >> shift >= 1 << 14:
                        shift += 1
                    while 0 < size << -shift < 1 << 13:
                        shift -= 1
                    c = size >> shift if shift >= 0 else size << -shift
                    c, c_exponent = (c if s >= 0 else -c), (m + shift if s != 0 else -126)
                scale = np.float64(np.float32(sa[i, block] * sb[j // 128, block]))
                total = np.float32(np.float64(total) + scale * (c * 2.0 ** (c_exponent - 13)))
            out[i, j] = total


def scalar(p: ScaledProduct, *, compiled: bool = True) -> torch.Tensor:
    """The direct implementation, one thread; compiling it takes some seconds."""

    def parts(x: torch.Tensor) -> tuple[Any, Any]:
        value = decode(x)
        exponent = (torch.frexp(value)[1] - 1).clamp(min=-6).to(torch.int64)
        return (value * torch.exp2(3.0 - exponent)).to(torch.int64).numpy(), exponent.numpy()

    out = np.empty((p.M, p.N), np.float32)
    run = _scalar if compiled else _scalar.py_func
    run(*parts(p.a), *parts(p.b), p.a_scale.numpy(), p.b_scale.numpy(), out)
    return torch.from_numpy(out)


def predict(p: ScaledProduct, engine: str) -> torch.Tensor:
    return predict_product(p, PROMOTE, out_dtype=torch.bfloat16, engine=engine)  # type: ignore[arg-type]


def matmul(p: ScaledProduct) -> Callable[[], torch.Tensor]:
    a, b = decode(p.a), decode(p.b)
    return lambda: a @ b.T


def _measure(benchmark: Any, run: Callable[[], object], p: ScaledProduct, *, rounds: int = 5) -> None:
    benchmark.pedantic(run, rounds=rounds, warmup_rounds=1)
    if benchmark.stats is not None:
        benchmark.extra_info["GMAC/s"] = p.M * p.N * p.K / benchmark.stats.stats.min / 1e9


@pytest.mark.benchmark(group="promote128, 32x512x2048")
class TestPredictionBesideScalar:
    """The engine, the plain definition, a scalar implementation and a matmul of one shape."""

    @pytest.mark.repeats("TestPrediction::test_cpu_engine")
    def test_cpu_engine(self, benchmark: Any) -> None:
        p = timed(benchmark, SMALL)
        _measure(benchmark, lambda: predict(p, "cpu"), p)

    def test_plain_torch(self, benchmark: Any) -> None:
        p = timed(benchmark, SMALL)
        _measure(benchmark, lambda: predict(p, "torch"), p, rounds=3)

    def test_scalar(self, benchmark: Any) -> None:
        p = product(*(SMALL if benchmark.enabled else INTERPRETED))
        _measure(benchmark, lambda: scalar(p, compiled=benchmark.enabled), p, rounds=2)
        made = scalar(p, compiled=benchmark.enabled)
        same = codes_of(made) == codes_of(predict_product(p, PROMOTE, out_dtype=torch.float32, engine="cpu"))
        assert int((~same).sum()) < 10

    def test_float64_matmul(self, benchmark: Any) -> None:
        p = timed(benchmark, SMALL)
        _measure(benchmark, matmul(p), p)


@pytest.mark.benchmark(group="promote128, 128x4096x7168")
class TestPrediction:
    """The engine at a DeepSeek shape, packing and store included."""

    def test_cpu_engine(self, benchmark: Any) -> None:
        p = timed(benchmark, DEEPSEEK)
        _measure(benchmark, lambda: predict(p, "cpu"), p, rounds=3)

    def test_float64_matmul(self, benchmark: Any) -> None:
        p = timed(benchmark, DEEPSEEK)
        _measure(benchmark, matmul(p), p, rounds=3)


@pytest.mark.benchmark(group="residue bound, 64x1024x2048")
class TestResidueBound:
    """B2, compiled; the plain definition takes an eighth of the columns."""

    def test_cpu(self, benchmark: Any) -> None:
        p = timed(benchmark, BOUND)
        _measure(benchmark, lambda: engines.compiled_residue(p, accumulator()), p)

    def test_plain_torch_one_eighth(self, benchmark: Any) -> None:
        p = timed(benchmark, (BOUND[0], BOUND[1] // 8, BOUND[2]))
        _measure(benchmark, lambda: residue_bound(p, accumulator()), p, rounds=1)

    def test_float64_matmul(self, benchmark: Any) -> None:
        p = timed(benchmark, BOUND)
        _measure(benchmark, matmul(p), p)


@pytest.mark.benchmark(group="exact value, 512x4096x4096")
class TestReference:
    """The exact reference beside one float64 matmul of the same shape."""

    def test_exact(self, benchmark: Any) -> None:
        p = timed(benchmark, REFERENCE)
        _measure(benchmark, lambda: engines.compiled_exact(p), p, rounds=3)

    def test_float64_matmul(self, benchmark: Any) -> None:
        p = timed(benchmark, REFERENCE)
        _measure(benchmark, matmul(p), p, rounds=3)


def _seconds(run: Callable[[], object], rounds: int = 3) -> float:
    run()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def _row(name: str, p: ScaledProduct, run: Callable[[], object], rounds: int = 3) -> float:
    seconds = _seconds(run, rounds)
    rate = p.M * p.N * p.K / seconds / 1e9
    print(f"{name:48s} {p.M:5d} x {p.N:5d} x {p.K:5d}  {seconds:9.4f} s  {rate:10.3f} GMAC/s")
    return seconds


def benchmark_cpu() -> None:
    """One table of every rate on the CPU."""
    p = product(*SMALL)
    _row("scalar, element by element", p, lambda: scalar(p), 1)
    _row("plain torch definition", p, lambda: predict(p, "torch"))
    q = product(*DEEPSEEK)
    _row("CPU engine, promote128", q, lambda: predict(q, "cpu"))
    _row("float64 matmul", q, matmul(q))
    r = product(*BOUND)
    _row("residue bound B2", r, lambda: engines.compiled_residue(r, accumulator()))
    s = product(*REFERENCE)
    exact = _row("exact value", s, lambda: engines.compiled_exact(s))
    plain = _row("float64 matmul", s, matmul(s))
    print(f"exact value / float64 matmul: {exact / plain:.2f}")


if __name__ == "__main__":
    benchmark_cpu()
