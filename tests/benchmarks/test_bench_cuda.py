"""Rates of the CUDA engine beside a float64 matmul on the same GPU, and its bits on a corner of the product.

``pytest tests/benchmarks/test_bench_cuda.py --benchmark-enable --benchmark-only`` on a machine with a GPU;
``python tests/benchmarks/test_bench_cuda.py`` prints GMAC/s and the ratio to ``mmaemu`` where that is installed, an
emulator of ``torch._scaled_mm`` with one scale an operand (its bits are compared with ours first). The data
of :mod:`oracle.routines.data` are the same on every machine, so that :func:`corner` of a GPU can be compared with the
CPU engine's anywhere. Nothing here asserts a time.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.numbers.formats import codes_of, decode
from oracle.routines import data
from oracle.tensorcore.predict import predict_product
from oracle.truth.gemm import ScaledProduct

PROMOTE = "sm90.promote128"
CHAINS = ("sm90.chain", "sm100.chain", "sm90.mma_sync.promote128.scale_after")
SHAPE = (4096, 4096, 7168)
CORNER = (64, 512)
ROWS = "sm90.chain, a scale for each row"
PEERS = {PROMOTE: "mmaemu promoted", "sm90.chain": "mmaemu chain", ROWS: "mmaemu chain"}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here")


def product(m: int, n: int, k: int, device: str = "cpu") -> ScaledProduct:
    """1x128 x 128x128 scales, normal-like codes."""
    a, b = (
        data.operand(f"bench/{side}/{rows}x{k}", "randn", rows, k, dtype=torch.float8_e4m3fn, side=side)
        for side, rows in (("a", m), ("b", n))
    )
    sa, sb = (data.scales(f"bench/scale/{rows}", "randn", (rows, k // 128)) for rows in (m, n // 128))
    return ScaledProduct(*(t.to(device) for t in (a, b, sa, sb)), 128, 128)


def per_tensor(p: ScaledProduct) -> ScaledProduct:
    """The same operands with one scale each."""
    return replace(p, a_scale=p.a_scale[:1, :1], b_scale=p.b_scale[:1, :1], block=p.K, b_rows=p.N)


def per_row(p: ScaledProduct) -> ScaledProduct:
    """The same operands with a scale for each row of both."""
    sa, sb = (data.scales(f"bench/row/{rows}", "randn", (rows, 1)).to(p.a.device) for rows in (p.M, p.N))
    return replace(p, a_scale=sa, b_scale=sb, block=p.K, b_rows=1)


def corner(p: ScaledProduct, rows: int = CORNER[0], columns: int = CORNER[1]) -> ScaledProduct:
    """The first rows and columns of the result as a product of its own."""
    scales = p.b_scale[: -(-columns // p.b_rows)] if p.b_scale.shape[0] > 1 else p.b_scale
    return replace(
        p,
        a=p.a[:rows],
        a_scale=p.a_scale[:rows] if p.a_scale.shape[0] > 1 else p.a_scale,
        b=p.b[:columns],
        b_scale=scales,
    )


def predict(p: ScaledProduct, schedule: str, engine: str = "cuda") -> Tensor:
    """Float32 bits of the whole product."""
    return predict_product(p, schedule, out_dtype=torch.float32, engine=engine)


def peer(p: ScaledProduct, fast: bool) -> Callable[[], Tensor]:
    """``mmaemu`` on the same operands: a chain over the whole K where ``fast``, else promoted; bfloat16."""
    import mmaemu

    one = torch.ones((), device=p.a.device)
    return lambda: mmaemu.scaled_mm(p.a, p.b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast, splitk=1)


def calls(shape: tuple[int, int, int] = SHAPE, device: str = "cuda") -> dict[str, Callable[[], Tensor]]:
    """What is compared: the engine by schedule, and a float64 matmul."""
    p = product(*shape, device)
    left, right = decode(p.a), decode(p.b).T
    one, rows = per_tensor(p), per_row(p)
    named: dict[str, Callable[[], Tensor]] = {PROMOTE: lambda: predict(p, PROMOTE), "matmul": lambda: left @ right}
    named |= {name: (lambda name=name: predict(one, name)) for name in CHAINS}
    named[ROWS] = lambda: predict(rows, "sm90.chain")
    if importlib.util.find_spec("mmaemu"):
        named |= {PEERS[PROMOTE]: peer(one, False), PEERS["sm90.chain"]: peer(one, True)}
    return named


def rates(shape: tuple[int, int, int] = SHAPE, rounds: int = 6) -> dict[str, float]:
    """GMAC/s of each call, the best of some rounds after one to warm up.

    A round measures every call once, in turn: a clock that drifts is then the same for those that are compared.
    """
    made = calls(shape)
    best = dict.fromkeys(made, float("inf"))
    for turn in range(rounds + 1):
        for name, run in made.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if turn:
                best[name] = min(best[name], time.perf_counter() - start)
    return {name: round(shape[0] * shape[1] * shape[2] / seconds / 1e9, 1) for name, seconds in best.items()}


def corners(shape: tuple[int, int, int] = SHAPE) -> dict[str, Tensor]:
    """First rows and columns of what the CUDA engine computes of the whole shape, by schedule."""
    p = product(*shape, "cuda")
    rows, columns = CORNER
    named = {PROMOTE: p} | {name: per_tensor(p) for name in CHAINS}
    return {name: predict(q, name)[:rows, :columns].clone() for name, q in named.items()}


@pytest.mark.benchmark(group="CUDA engine, 4096x4096x7168")
@needs_gpu
@pytest.mark.parametrize("name", [PROMOTE, *CHAINS, ROWS, "matmul"])
def test_rate(benchmark: Any, name: str) -> None:
    run = calls()[name]

    def waited() -> None:
        run()
        torch.cuda.synchronize()

    benchmark.pedantic(waited, rounds=3, warmup_rounds=1)
    if benchmark.enabled:
        benchmark.extra_info["GMAC/s"] = round(SHAPE[0] * SHAPE[1] * SHAPE[2] / benchmark.stats.stats.min / 1e9, 1)


@needs_gpu
@pytest.mark.parametrize("name", [PROMOTE, *CHAINS, ROWS])
def test_bits_of_a_large_product(name: str) -> None:
    """The corner of a large product has the bits of the plain definition."""
    small = product(256, 1024, 1024, "cuda")
    p = small if name == PROMOTE else per_row(small) if name == ROWS else per_tensor(small)
    schedule = name.partition(",")[0]
    whole = predict(p, schedule)[:16, :128]
    plain = predict(corner(p, 16, 128), schedule, "torch")
    assert torch.equal(codes_of(whole), codes_of(plain))


@needs_gpu
@pytest.mark.skipif(importlib.util.find_spec("mmaemu") is None, reason="mmaemu is not installed")
@pytest.mark.parametrize("fast", [False, True])
def test_bits_of_the_peer(fast: bool) -> None:
    name = "sm90.chain.product" if fast else "sm90.promote128.scale_after.product"
    p = per_tensor(product(256, 1024, 1024, "cuda"))
    one = replace(p, a_scale=torch.ones_like(p.a_scale), b_scale=torch.ones_like(p.b_scale))
    mine = predict_product(one, name, out_dtype=torch.bfloat16, engine="cuda")
    assert torch.equal(codes_of(mine), codes_of(peer(one, fast)()))


def test_corner_is_the_corner() -> None:
    """On the CPU: a product of the first rows and columns is the corner of the product."""
    p = product(40, 256, 256)
    for name, q in ((PROMOTE, p), (CHAINS[0], per_tensor(p)), (CHAINS[0], per_row(p))):
        whole = predict(q, name, "torch")[:16, :128]
        assert torch.equal(codes_of(whole), codes_of(predict(corner(q, 16, 128), name, "torch")))
        assert not torch.equal(codes_of(whole), codes_of(predict(q, name, "torch")[16:32, :128]))


if __name__ == "__main__":
    for shape in ((2048, 4096, 4096), SHAPE):
        found = rates(shape)
        print(shape, found, {x: round(found[x] / found[y], 2) for x, y in PEERS.items() if y in found})
