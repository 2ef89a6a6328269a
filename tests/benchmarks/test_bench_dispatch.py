"""What a call of the dispatch layer costs on the host beside the launches that it makes, with stand-ins for these.

``python -m tests.benchmarks.test_bench_dispatch`` takes the sides in turn, some hundred times, and prints for each the
least microseconds a call. ``pytest tests/benchmarks/test_bench_dispatch.py --benchmark-enable --benchmark-only``
compares within one group. No GPU is needed: tensors of the CPU say that they lie on one, their memory comes from
torch's short allocator of CPU tensors, and a library that is called takes its arguments and does nothing. Nothing here
asserts a time.
"""

from __future__ import annotations

import contextlib
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from kernels import blockscaled, context, fast
from kernels.backends import _launch, deep_gemm, triton_linear, triton_quant
from kernels.config import Config, use_config
from kernels.platform import Machine, use_machine

pytestmark = pytest.mark.turns(4)

FP8, N, K = torch.float8_e4m3fn, 512, 512
Side = Callable[[], object]
_guards: Any = torch._C._dynamo.guards
launched: Any = "".format  # takes any arguments in compiled code, as a library does


class _Knobs:
    """As of Triton, without a profiler."""

    runtime = types.SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None, debug=False)
    compilation = types.SimpleNamespace(instrumentation_mode="")


class _Ready:
    """A compiled kernel."""

    run = types.SimpleNamespace(
        launch=launched, global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False, launch_pdl=False
    )
    function, packed_metadata = 1, (4, 1, 0)


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """A process with one H200, DeepGEMM and Triton, of which every library call does nothing."""
    triton, library = types.ModuleType("triton"), types.ModuleType("deep_gemm")
    triton.__dict__.update(__version__=fast.COMPILED[-1], knobs=_Knobs)
    library.__dict__.update(__version__="0.1.4.post1", fp8_gemm_nt=launched)
    native = types.SimpleNamespace(group_kernel=None, linear_kernel=None, sum_kernel=None), True
    caches: list[Any] = [
        deep_gemm.library,
        deep_gemm.symbol,
        fast._knobs,
        triton_quant._prepared,
        triton_quant._group_quantiser,
        triton_linear._prepared,
        triton_linear._sum,
    ]

    def forget() -> None:
        for cache in caches:
            cache.cache_clear()

    forget()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(sys.modules, {"triton": triton, "deep_gemm": library}))
            for where, name, value in (
                (fast, "EMPTY", _guards._empty_strided_cpu),
                (fast, "DEVICE", torch._C._len_torch_function_stack),  # compiled code that gives 0
                (fast, "STREAM", abs),
                (torch.cuda, "device_count", lambda: 1),
                (triton_quant, "library", lambda: native),
                (triton_linear, "library", lambda: native),
                (_launch.Launch, "_by_triton", lambda *_: _Ready),
            ):
                stack.enter_context(mock.patch.object(where, name, value))
            torch.Tensor.device = torch.device("cuda:0")  # type: ignore[assignment]
            stack.callback(lambda: delattr(torch.Tensor, "device"))
            stack.enter_context(use_machine(Machine.of_product("H200")))
            stack.enter_context(use_config(Config()))
            yield
    finally:
        forget()


def sides() -> dict[str, dict[str, Side]]:
    """The ways to call a routine, each checked and decided already; ``bare`` are the launches and their memory."""
    w, ws = torch.zeros(N, K).to(FP8), torch.ones(N // 128, K // 128)
    a, out = torch.zeros(16, K).to(FP8), torch.empty(16, N, dtype=torch.bfloat16)
    scale = torch.ones(K // 128, 16).t()
    kept, kept_linear = blockscaled.prepare_fp8_gemm_nt((w, ws)), blockscaled.prepare_blockscale_linear(w, ws)
    product = {
        "layer": lambda: blockscaled.fp8_gemm_nt((a, scale), (w, ws), out),
        "operator": lambda: torch.ops.fp8_kernels.fp8_gemm_nt(a, scale, w, ws, out, None, True),
        "kept plan": lambda: kept((a, scale), out),
        "bare": lambda: launched((a, scale), (w, ws), out, disable_ue8m0_cast=True),
    }
    made: dict[str, dict[str, Side]] = {"fp8_gemm_nt": product}
    switch = torch.ops.fp8_kernels.dynamic_flashinfer_deepgemm_blockscale_gemm
    empty = _guards._empty_strided_cpu

    def bare(x: Tensor, m: int) -> Tensor:
        y = empty((m, N), (N, 1), torch.bfloat16)
        if m < blockscaled.SWITCH_M:
            launched(4, 1, 1, 0, 1, False, False, None, None, (4, 1, 0), None, None, None, x, w, ws, y, m, N, K, K, K)
            return y
        q, s = empty((m, K), (K, 1), FP8), empty((m, K // 128), (1, m), torch.float32)
        launched(4, 1, 1, 0, 1, False, False, None, None, (4, 1, 0), None, None, None, x, q, s, m, K // 128, K)
        launched((q, s), (w, ws), y, disable_ue8m0_cast=True)
        return y

    for m in (16, 64):
        x = torch.zeros(m, K, dtype=torch.bfloat16)
        made[f"switch M={m}"] = {
            "layer": lambda x=x: blockscaled.dynamic_flashinfer_deepgemm_blockscale_gemm(x, w, ws),
            "operator": lambda x=x: switch(x, w, ws, 128, False),
            "kept plan": lambda x=x: kept_linear(x),
            "bare": lambda x=x, m=m: bare(x, m),
        }
    for calls in made.values():
        for call in calls.values():
            call(), call()  # the second one is like the first, which was checked
    return made


@pytest.mark.benchmark(group="dispatch")
@pytest.mark.parametrize("side", ["layer", "operator", "kept plan", "bare"])
@pytest.mark.parametrize("routine", ["fp8_gemm_nt", "switch M=16", "switch M=64"])
def test_call(benchmark: Any, routine: str, side: str) -> None:
    with context.use(), stand_ins():
        every = sides()  # a kept plan does not keep its weight
        benchmark(every[routine][side])


def least(calls: dict[str, Side], rounds: int = 300, inner: int = 100) -> dict[str, float]:
    """Microseconds a call, the sides in turn."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            for _ in range(inner):
                call()
            found[name] = min(found[name], (time.perf_counter() - started) / inner * 1e6)
    return found


class _Known:
    """What any memo of weights must read: an entry of its own."""

    __slots__ = ("at", "scale_at")

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.at, self.scale_at = weight.data_ptr(), scale.data_ptr()


def live_weights(count: int, rounds: int = 5) -> dict[str, float]:
    """The least microseconds of the thread for a product, of rounds over so many weights that are all in use.

    ``kept plan`` and ``layer`` are ours. Three controls read memory that belongs to a weight, which lies outside of the
    caches where there are many: ``bare``, a product that reads the addresses of the weight and its scale, as a library
    does; ``memo``, that and the addresses in an entry which a dictionary has for the two; ``attributes``, four
    attributes of each tensor, and no product.
    """
    step = 16  # bytes: the weights overlap, which no call sees
    codes, scales = torch.zeros(step * count + 128 * 128).to(FP8), torch.ones(4 * count + 1)
    weights = [
        (codes[step * i : step * i + 128 * 128].view(128, 128), scales[4 * i : 4 * i + 1].view(1, 1))
        for i in range(count)
    ]
    a, scale = torch.zeros(16, 128).to(FP8), torch.ones(1, 16).t()
    out, pair = torch.empty(16, 128, dtype=torch.bfloat16), (a, scale)
    plans = [blockscaled.prepare_fp8_gemm_nt(weight) for weight in weights]
    known = {(id(w), id(s)): _Known(w, s) for w, s in weights}

    def bare(weight: tuple[Tensor, Tensor]) -> None:
        launched(pair, weight[0].data_ptr(), weight[1].data_ptr(), out)

    def memo(weight: tuple[Tensor, Tensor]) -> None:
        w, s = weight
        entry = known[id(w), id(s)]
        if w.data_ptr() == entry.at and s.data_ptr() == entry.scale_at:
            launched(pair, w, s, out)

    def attributes(weight: tuple[Tensor, Tensor]) -> None:
        for x in weight:
            x.dtype, x.shape, x.requires_grad, x.data_ptr()

    sides: dict[str, tuple[Callable[[Any], object], list[Any]]] = {
        "kept plan": (lambda plan: plan(pair, out), plans),
        "layer": (lambda weight: blockscaled.fp8_gemm_nt(pair, weight, out), weights),
        "bare": (bare, weights),
        "memo": (memo, weights),
        "attributes": (attributes, weights),
    }
    found = dict.fromkeys(sides, float("inf"))
    for i in range(2 + rounds):
        for name, (product, each) in sides.items():
            started = time.thread_time()
            for one in each:
                product(one)
            if i > 1:
                found[name] = min(found[name], round((time.thread_time() - started) / count * 1e6, 2))
    return found


def main() -> None:
    """Each routine with the compiled guard of torch and with the public one, then the number of weights."""
    print("torch", torch.__version__)
    for public in (False, True):
        guards = None if public else fast.GUARDS
        with mock.patch.object(fast, "GUARDS", guards), context.use(), stand_ins():
            print("guard:", "public" if guards is None else "compiled")
            for routine, calls in sides().items():
                print(" ", routine, {name: round(us, 2) for name, us in least(calls).items()})
            for count in (1, 100, 4_000, 20_000, 100_000):
                rounds = max(5, 20_000 // count)
                print(f"  fp8_gemm_nt, {count} weights in use", live_weights(count, rounds), flush=True)


if __name__ == "__main__":
    main()
