"""What the layer costs: overhead per call, end-to-end linear (eager and replayed), quantiser bandwidth; compilation.

Sides of one table are measured in turns in one run, some 20 calls at a time; see :func:`in_turns`.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from benchmarks import test_bench_cuda as bench
from hardware.notes import Notes
from torch import Tensor

from kernels import blockscaled, fused, linear, mx, mx_experts, mx_fused, plan, quantize
from kernels.backends import _host, cutlass, flashinfer
from kernels.config import Config, use_config
from kernels.nn import Fp8Linear
from oracle.routines import cases, data

ROUNDS = 100
"""Turns of every side."""
IN_GRAPH = 10
"""Calls in one captured graph."""
FP8 = torch.float8_e4m3fn
T = TypeVar("T")


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def in_turns(sides: Mapping[str, T], rounds: int, burst: Callable[[T], float]) -> dict[str, float]:
    """The typical time of each side, of which ``burst`` measures a few calls.

    The sides take turns, and every round begins with another one. What counts is a side's share of the time of its
    round, by the median, so that a host that drifts between two rounds moves no side against another.
    """
    names, taken = list(sides), []
    for i in range(rounds):
        first = i % len(names)
        taken.append({name: burst(sides[name]) for name in names[first:] + names[:first]})
    whole = statistics.median(sum(times.values()) for times in taken)
    shares = {name: statistics.median(times[name] / sum(times.values()) for times in taken) for name in names}
    return {name: round(share * whole, 3) for name, share in shares.items()}


def host_microseconds(calls: Mapping[str, Callable[[], object]], device: str, inner: int = 20) -> dict[str, float]:
    """Host time per call of each side; the device is waited for before each burst, never in it."""
    count = inner if device == "cuda" else 3
    for call in calls.values():
        for _ in range(3):
            call()

    def burst(call: Callable[[], object]) -> float:
        _wait(device)
        started = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - started) / count * 1e6

    found = in_turns(calls, ROUNDS if device == "cuda" else 3, burst)
    _wait(device)
    return found


def device_microseconds(
    calls: Mapping[str, Callable[[int], object]], device: str, inner: int = 20, rounds: int = ROUNDS
) -> dict[str, float]:
    """Device time per call of each side (events on a GPU); a call gets a counter to rotate its operands."""
    if device == "cpu":
        return host_microseconds({name: (lambda c=call: c(0)) for name, call in calls.items()}, device)
    for call in calls.values():
        for i in range(3):
            call(i)

    def burst(call: Callable[[int], object]) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for i in range(inner):
            call(i)
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3 / inner

    return in_turns(calls, rounds, burst)


def replay_of(call: Callable[[int], object]) -> Callable[[int], object]:
    """The replay of a CUDA graph that holds the call :data:`IN_GRAPH` times: device time without the host's."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(3):
            call(i)
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        kept.extend(call(i) for i in range(IN_GRAPH))

    def replay(_: int) -> object:
        graph.replay()
        return kept

    return replay


def overhead(notes: Notes, device: str) -> None:
    """Host time of our fp8_gemm_nt and of the M switch against the bare library calls."""
    t = product(16, 512, 512, device)
    scale = _host.column_major(t["a_scale"], 4)
    out = torch.empty(16, 512, dtype=torch.bfloat16, device=device)
    with notes.attempt("timing: overhead of fp8_gemm_nt"):
        dense: dict[str, Callable[[], object]] = {
            "layer": lambda: blockscaled.fp8_gemm_nt((t["a"], scale), (t["b"], t["b_scale"]), out)
        }
        kept = blockscaled.prepare_fp8_gemm_nt((t["b"], t["b_scale"]))
        dense["kept plan"] = lambda: kept((t["a"], scale), out)
        if device == "cuda":
            bare = importlib.import_module("deep_gemm").fp8_gemm_nt
            dense["bare"] = lambda: bare((t["a"], scale), (t["b"], t["b_scale"]), out, disable_ue8m0_cast=True)
        notes.time("host_us.fp8_gemm_nt", host_microseconds(dense, device))
    x = activation(64, 512, device)
    with notes.attempt("timing: overhead of the M switch"):
        switch = blockscaled.dynamic_flashinfer_deepgemm_blockscale_gemm
        kept_linear = blockscaled.prepare_blockscale_linear(t["b"], t["b_scale"])
        operator = torch.ops.fp8_kernels.dynamic_flashinfer_deepgemm_blockscale_gemm
        calls = {
            m: {
                "layer": lambda m=m: switch(x[:m], t["b"], t["b_scale"]),
                "operator": lambda m=m: operator(x[:m], t["b"], t["b_scale"], 128, False),
                "kept plan": lambda m=m: kept_linear(x[:m]),
            }
            for m in (16, 64)
        }
        if device == "cuda":
            small = flashinfer.library("flashinfer.gemm").fp8_blockscale_gemm_sm90
            bare = importlib.import_module("deep_gemm").fp8_gemm_nt
            calls[16]["bare FlashInfer"] = lambda: small(x[:16], t["b"], None, t["b_scale"])

            def sequence() -> None:
                q, s = quantize.per_token_group_quant_fp8(x, 128, column_major_scales=True, tma_aligned_scales=True)
                y = torch.empty(64, 512, dtype=torch.bfloat16, device=device)
                bare((q, s), (t["b"], t["b_scale"]), y, disable_ue8m0_cast=True)

            calls[64]["layer's quantiser, bare DeepGEMM"] = sequence
            with notes.attempt("bare vLLM quantiser and DeepGEMM"):
                linear_bare = _bare_linear(x, t["b"], t["b_scale"])
                calls[64]["bare vLLM quantiser and DeepGEMM"] = lambda: linear_bare(0)
        for m, candidates in calls.items():
            notes.time(f"host_us.switch M={m}", host_microseconds(candidates, device))


def modules(notes: Notes, device: str) -> None:
    """Host time of a layer as a module, and of the verb that it calls."""
    t, x = product(64, 512, 512, device), activation(64, 512, device)
    layer = Fp8Linear(t["b"], t["b_scale"])
    calls = {
        "module": lambda: layer(x),
        "verb": lambda: blockscaled.deepgemm_blockscale_linear(x, t["b"], t["b_scale"]),
    }
    notes.time("host_us.Fp8Linear M=64", host_microseconds(calls, device))


def fast_paths(notes: Notes, device: str) -> None:
    """Host time of each way past a library's public function (``kernels/fast.py``), and of the public way."""
    t, x = product(16, 512, 512, device), activation(64, 512, device)
    scale, out = _host.column_major(t["a_scale"], 4), torch.empty(16, 512, dtype=torch.bfloat16, device=device)
    lanes = _host.lane_major(t["a_scale"])
    backend, where = "deep_gemm" if device == "cuda" else "eager", out.device
    gemm = plan.backend_of(backend).aligned_gemm_nt
    quantise = plan.backend_of("triton" if device == "cuda" else "eager")
    small = plan.backend_of("flashinfer" if device == "cuda" else "eager").blockscale_sm90
    ways: dict[str, Callable[[], object]] = {
        "deep_gemm": lambda: gemm(t["a"], scale, t["b"], t["b_scale"], out, None, True),
        "flashinfer": lambda: small(t["a"], lanes, t["b"], t["b_scale"], None),
        "triton": lambda: quantise.quant_group(x, 128, 1e-10, False, "tma", None),
        "torch": lambda: _host.allocator(where)((64, 512), (512, 1), torch.bfloat16),
    }

    def public(call: Callable[[], object]) -> object:
        with use_config(Config(fast_paths=False)):
            return call()

    def known(call: Callable[[], object]) -> object:
        with use_config(Config()):
            return call()

    for library, call in ways.items():
        with notes.attempt(f"timing: fast path of {library}"):
            both = {"fast": lambda call=call: known(call), "public": lambda call=call: public(call)}
            notes.time(f"host_us.fast {library}", host_microseconds(both, device))


def end_to_end(notes: Notes, device: str) -> None:
    """bf16-to-bf16 block-scaled linear: the layer against the bare sequence of library calls."""
    n, k = (4096, 7168) if device == "cuda" else (256, 512)
    weight = product(1, n, k, device)
    b, bs = weight["b"], weight["b_scale"]
    for m in (1, 8, 16, 31, 64, 512, 4096) if device == "cuda" else (16, 64):
        with notes.attempt(f"timing: linear M={m}"):
            x = activation(m, k, device)
            kept = blockscaled.prepare_blockscale_linear(b, bs)
            calls: dict[str, Callable[[int], object]] = {
                "layer": lambda _, x=x: blockscaled.dynamic_flashinfer_deepgemm_blockscale_gemm(x, b, bs),
                "kept plan": lambda _, x=x, kept=kept: kept(x),
            }
            if device == "cuda":
                calls["bare"] = _bare_linear(x, b, bs)
            notes.time(f"device_us.linear M={m} N={n} K={k}", device_microseconds(calls, device))
            if device == "cuda":
                replays = {name: replay_of(call) for name, call in calls.items()}
                times = device_microseconds(replays, device, inner=4)
                notes.time(
                    f"graph_us.linear M={m} N={n} K={k}", {name: round(us / IN_GRAPH, 3) for name, us in times.items()}
                )


def _bare_linear(x: Tensor, b: Tensor, bs: Tensor) -> Callable[[int], object]:
    m, k = x.shape
    if m < blockscaled.SWITCH_M:
        small = flashinfer.library("flashinfer.gemm").fp8_blockscale_gemm_sm90
        return lambda _: small(x, b, None, bs)
    gemm = importlib.import_module("deep_gemm").fp8_gemm_nt
    quantise = cutlass.operators().per_token_group_fp8_quant

    def run(_: int) -> Tensor:
        s, q = torch.empty(k // 128, m, device=x.device).t(), torch.empty(m, k, dtype=FP8, device=x.device)
        quantise(x, q, s, 128, 1e-10, -448.0, 448.0, False, True, True)
        y = torch.empty(m, b.shape[0], dtype=torch.bfloat16, device=x.device)
        gemm((q, s), (b, bs), y, disable_ue8m0_cast=True)
        return y

    return run


def bandwidth(notes: Notes, device: str) -> None:
    """Our 1x128 quantiser against a copy of the same bytes and against vLLM's operator, at 4096 x 7168."""
    m, k = (4096, 7168) if device == "cuda" else (64, 512)
    copies = 8 if device == "cuda" else 1  # together far beyond the cache
    xs = [torch.randn(m, k, device=device, dtype=torch.bfloat16) for _ in range(copies)]
    moved = m * k * 3 + m * (k // 128) * 4
    source = [torch.empty(moved // 2, dtype=torch.uint8, device=device) for _ in range(copies)]
    target = [torch.empty_like(s) for s in source]
    with notes.attempt("timing: quantiser bandwidth"):
        calls: dict[str, Callable[[int], object]] = {
            "copy of the same bytes": lambda i: target[i % copies].copy_(source[i % copies]),
            "layer row-major": lambda i: quantize.per_token_group_quant_fp8(xs[i % copies], 128),
            "layer TMA-aligned": lambda i: quantize.per_token_group_quant_fp8(
                xs[i % copies], 128, column_major_scales=True, tma_aligned_scales=True
            ),
            "layer packed": lambda i: quantize.per_token_group_quant_fp8_packed(xs[i % copies], 128),
            "layer per token": lambda i: quantize.scaled_fp8_quant(xs[i % copies], use_per_token_if_dynamic=True),
            "layer per tensor": lambda i: quantize.scaled_fp8_quant(xs[i % copies]),
        }
        if device == "cuda":
            calls |= _vllm_quantisers(xs, m, k, copies)
        found = device_microseconds(calls, device)
        notes.time(f"device_us.quantiser {m}x{k}", found)
        notes.time("quantiser_gb_per_s", {name: round(moved / us / 1e3, 1) for name, us in found.items()})


def quantisers(notes: Notes, device: str) -> None:
    """Every quantiser at 16384 x 7168, alone, fused and of experts: whether the device gives the bits of plain torch,
    kernels a call starts, and the rate beside a copy of as many bytes.

    Every row is in use, so that a copy moves what the kernel must: values, codes and scales. The operands of all copies
    are many times the cache. Both sides are replayed from a graph, so that no host time counts.
    """
    m, k, experts = (16384, 7168, 32) if device == "cuda" else (64, 512, 4)
    copies = 4 if device == "cuda" else 1
    xs = [torch.randn(m, k, device=device, dtype=torch.bfloat16) for _ in range(copies)]
    pairs = [torch.randn(m, 2 * k, device=device, dtype=torch.bfloat16) for _ in range(copies)]
    for name, entry in every_quantiser(m, k, experts, device).items():
        with notes.attempt(f"timing: quantiser {name}"):
            inputs = pairs if entry.gated else xs
            sides = _beside_copy(entry, inputs, int(m * k * entry.moved))
            entry.call(inputs[0])
            with torch.profiler.profile() as profile:
                entry.call(inputs[0])
                _wait(device)
            started = sum("cuda" in str(e.device_type).lower() for e in profile.events())
            part = inputs[0][:4096] if "experts" not in name and "masked" not in name else inputs[0]
            with use_config(Config(backend="eager")):
                right = entry.call(part)
            differ = sum(int((_bytes(a) != _bytes(b)).sum()) for a, b in zip(entry.call(part), right, strict=True))
            notes.check(f"bytes that differ from plain torch: {name}", differ)
            found = _replayed(sides, device)
            rate = {"rate beside copy": round(found["copy"] / found["layer"], 3), "kernels": float(started)}
            notes.time(f"device_us.quantiser {name}", found | rate)


def small_quantisers(notes: Notes, device: str) -> None:
    """The same of few rows, whose operands the cache holds: beside a copy and a kernel that does next to nothing, which
    is what a launch costs."""
    one, (k, *rows) = torch.zeros(1, device=device), (7168, 1, 16, 128, 1024) if device == "cuda" else (512, 1)
    for m in rows:
        x = [torch.randn(m, k, device=device, dtype=torch.bfloat16)]
        for name in ("mxfp8 128x4", "nvfp4 128x4", "rms norm nvfp4 128x4", "fp8 group"):
            with notes.attempt(f"timing: quantiser {name}, {m} rows"):
                entry = every_quantiser(m, k, 1, device)[name]
                sides = {"launch": lambda i: one.zero_(), **_beside_copy(entry, x, int(m * k * entry.moved))}
                found = _replayed(sides, device)
                share = {"share of the launch": round(found["launch"] / found["layer"], 3)}
                notes.time(f"device_us.quantiser {name}, {m} rows", found | share)


class Quantiser(NamedTuple):
    """A call to measure: whether a row holds gates and ups, bytes read and written for a value, and what to call."""

    gated: bool
    moved: float
    call: Callable[[Tensor], tuple[Tensor, ...]]


def _bytes(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def _beside_copy(entry: Quantiser, inputs: Sequence[Tensor], moved: int) -> dict[str, Callable[[int], object]]:
    source = [torch.empty(moved // 2, dtype=torch.uint8, device=x.device) for x in inputs]
    target = [torch.empty_like(s) for s in source]
    return {
        "copy": lambda i: target[i % len(inputs)].copy_(source[i % len(inputs)]),
        "layer": lambda i: entry.call(inputs[i % len(inputs)]),
    }


def _replayed(sides: Mapping[str, Callable[[int], object]], device: str) -> dict[str, float]:
    """Device microseconds of a call of each side, in graphs on a GPU."""
    if device != "cuda":
        return device_microseconds(sides, device, inner=1, rounds=20)
    found = device_microseconds({side: replay_of(each) for side, each in sides.items()}, device, inner=1, rounds=20)
    return {side: round(us / IN_GRAPH, 3) for side, us in found.items()}


def every_quantiser(m: int, k: int, experts: int, device: str) -> dict[str, Quantiser]:
    """Every quantiser of ``[m, k]`` values."""
    one, factors = torch.full((1,), 400.0, device=device), torch.full((experts,), 400.0, device=device)
    ends = torch.arange(experts + 1, device=device, dtype=torch.int32) * (m // experts)
    used = torch.full((experts,), m // experts, dtype=torch.int32, device=device)
    weight, scale = torch.ones(k, device=device, dtype=torch.bfloat16), torch.full((1,), 0.05, device=device)
    written = {"mxfp8": 1 + 1 / 32, "mxfp4": 0.5 + 1 / 32, "nvfp4": 0.5 + 1 / 16, "fp8": 1.0, "group": 1 + 1 / 32}

    def buffers(x: Tensor) -> Tensor:
        return x.view(experts, m // experts, -1)

    made: dict[str, Quantiser] = {}

    def add(name: str, kind: str, call: Callable[[Tensor], Any], read: int = 2) -> None:
        gated = "silu" in name
        made[name] = Quantiser(gated, read + 2 * gated + written[kind], lambda x: _tuple(call(x)))

    for layout in ("128x4", "linear"):
        add(f"mxfp8 {layout}", "mxfp8", lambda x, layout=layout: mx.mxfp8_quantize(x, layout))
        add(f"mxfp4 {layout}", "mxfp4", lambda x, layout=layout: mx.mxfp4_quantize(x, layout))
        add(f"nvfp4 {layout}", "nvfp4", lambda x, layout=layout: mx.nvfp4_quantize(x, one, layout))
        for kind in ("mxfp8", "mxfp4", "nvfp4"):
            more = {"global_scale": one if kind == "nvfp4" else None, "layout": layout}
            silu = functools.partial(mx_fused.silu_and_mul_block_scaled_quant, kind=kind, **more)
            norm = functools.partial(mx_fused.rms_norm_block_scaled_quant, weight=weight, kind=kind, **more)
            add(f"silu {kind} {layout}", kind, silu)
            add(f"rms norm {kind} {layout}", kind, lambda x, norm=norm: norm(x)[:2])
    rows = mx_experts
    add("nvfp4 experts", "nvfp4", lambda x: rows.scaled_fp4_experts_quant(x, factors, ends))
    add("nvfp4 experts flashinfer", "nvfp4", lambda x: rows.scaled_fp4_experts_quant(x, factors, ends, "flashinfer"))
    add("mxfp8 experts", "mxfp8", lambda x: rows.mxfp8_experts_quant(x, ends))
    add("mxfp4 experts", "mxfp4", lambda x: rows.mxfp4_experts_quant(x, ends))
    add("silu nvfp4 experts", "nvfp4", lambda x: rows.silu_and_mul_scaled_fp4_experts_quant(x, factors, ends))
    add("silu mxfp4 experts", "mxfp4", lambda x: rows.silu_and_mul_mxfp4_experts_quant(x, ends))
    add("nvfp4 masked", "nvfp4", lambda x: rows.scaled_fp4_grouped_quantize(buffers(x), used, factors))
    add("mxfp8 masked", "mxfp8", lambda x: rows.mxfp8_grouped_quantize(buffers(x), used))
    add(
        "silu nvfp4 masked",
        "nvfp4",
        lambda x: rows.silu_and_mul_scaled_nvfp4_experts_quantize(buffers(x), used, factors),
    )
    columns = {"column_major_scales": True, "tma_aligned_scales": True}
    add("fp8 group", "group", lambda x: quantize.per_token_group_quant_fp8(x, 128))
    add("fp8 group columns", "group", lambda x: quantize.per_token_group_quant_fp8(x, 128, **columns))
    add("fp8 group packed", "fp8", lambda x: quantize.per_token_group_quant_fp8_packed(x, 128))
    add("fp8 token", "fp8", lambda x: quantize.scaled_fp8_quant(x, use_per_token_if_dynamic=True))
    add("fp8 static", "fp8", lambda x: quantize.scaled_fp8_quant(x, scale)[0])
    add("fp8 tensor, read twice", "fp8", lambda x: quantize.scaled_fp8_quant(x), read=4)
    add("silu fp8 group", "group", lambda x: fused.silu_and_mul_per_block_quant(x))
    add("silu fp8 static", "fp8", lambda x: fused.silu_and_mul_quant(x, scale))
    add("rms norm fp8 group", "group", lambda x: fused.rms_norm_per_block_quant(x, weight)[:2])
    add("rms norm fp8 token", "fp8", lambda x: fused.rms_norm_dynamic_per_token_quant(x, weight)[:2])
    add("rms norm fp8 static", "fp8", lambda x: fused.rms_norm_static_fp8_quant(x, weight, scale))
    return made


def _tuple(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def _vllm_quantisers(xs: Sequence[Tensor], m: int, k: int, copies: int) -> dict[str, Callable[[int], object]]:
    def run(i: int, column: bool) -> Tensor:
        x = xs[i % copies]
        s = torch.empty(k // 128, m, device=x.device).t() if column else torch.empty(m, k // 128, device=x.device)
        q = torch.empty(m, k, dtype=FP8, device=x.device)
        cutlass.into_scale(x, q, s, 128, 1e-10, False)
        return q

    cutlass.operators()
    return {"vllm row-major": lambda i: run(i, False), "vllm column-major": lambda i: run(i, True)}


def graphs(notes: Notes, device: str) -> None:
    """CUDA-graph capture of the linear paths gives the eager bits, also on new data."""
    if device == "cpu":
        raise RuntimeError("graph capture needs a GPU")
    t, x, other = product(64, 512, 512, device), activation(64, 512, device), activation(64, 512, device, seed=2)
    layer = linear.Fp8LinearOp(use_per_token_if_dynamic=True)
    w, ws = quantize.scaled_fp8_quant(activation(512, 512, device), use_per_token_if_dynamic=True)
    paths: dict[str, Callable[[Tensor], Tensor]] = {
        "switch M=16": lambda z: blockscaled.dynamic_flashinfer_deepgemm_blockscale_gemm(z[:16], t["b"], t["b_scale"]),
        "switch M=64": lambda z: blockscaled.dynamic_flashinfer_deepgemm_blockscale_gemm(z, t["b"], t["b_scale"]),
        "Fp8LinearOp": lambda z: layer.apply(z, w.t(), ws),
    }
    for name, call in paths.items():
        with notes.attempt(f"graph capture: {name}"):
            eager_bits = [call(z).clone() for z in (x, other)]
            given, stream = x.clone(), torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    call(given)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = call(given)
            for z, right in zip((x, other), eager_bits, strict=True):
                given.copy_(z)
                captured.zero_()
                graph.replay()
                torch.cuda.synchronize()
                notes.check(f"graph replay = eager: {name}", torch.equal(captured, right))


def compiled(notes: Notes, device: str) -> None:
    """The compiled M switch gives the eager bits on both sides of M = 32."""
    t, x = product(64, 512, 512, device), activation(64, 512, device)
    switch = blockscaled.dynamic_flashinfer_deepgemm_blockscale_gemm
    for backend in ("aot_eager", "inductor"):
        with notes.attempt(f"torch.compile {backend}"):
            torch._dynamo.reset()
            made = torch.compile(
                lambda z: switch(z, t["b"], t["b_scale"]), dynamic=True, fullgraph=True, backend=backend
            )
            good = True
            for m in (31, 32, 5, 64):
                z = x[:m].clone()
                torch._dynamo.mark_dynamic(z, 0)
                good &= torch.equal(made(z), switch(z, t["b"], t["b_scale"]))
            notes.check(f"torch.compile {backend} over M=32 = eager", good)


def engines(notes: Notes, device: str) -> None:
    """Rates of the oracle's CUDA engine and a corner of what it computed, to be compared with the CPU engine's."""
    if device == "cpu":
        raise RuntimeError("the CUDA engine needs a GPU")
    notes.time("engine GMAC/s", bench.rates())
    notes.keep("engine", bench.corners())


def product(m: int, n: int, k: int, device: str) -> dict[str, Tensor]:
    """Inputs of one block-scaled product, by the contract's names."""
    text = f"fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m={m},n={n},k={k}/family=randn/seed=1"
    return {name: t.to(device) for name, t in cases.parse(text).inputs().items()}


def activation(m: int, k: int, device: str, *, seed: int = 1) -> Tensor:
    """A bf16 activation ``[m, k]``."""
    return data.activations(f"timing/{m}x{k}/{seed}", "randn", m, k, dtype=torch.bfloat16).to(device)
