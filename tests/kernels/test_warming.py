"""Warm-up: after it no call compiles, by a hook on the compiler; and what follows where a backend fails in it."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import checkpoints as cp
import pytest
import torch
from torch import Tensor

import kernels
from kernels import context, nn, plan, routes
from kernels.backends import (
    triton_cache,
    triton_fused,
    triton_gemm,
    triton_linear,
    triton_mx,
    triton_mx_quant,
    triton_quant,
)
from kernels.backends.declaration import Backend, Blocks, Product, Scales
from kernels.config import Config, use_config
from kernels.errors import Failed, KernelError, NoBackendError, OptionError
from kernels.platform import Machine, use_machine
from kernels.warming import RESIDUES, rows_to_warm_up

MOST = 144
BLOCK = 128


def kind(rows: int) -> tuple[object, ...]:
    """What a specialisation may take from a number of rows."""
    multiples = tuple(rows * factor % 16 == 0 for factor in range(1, 17))
    return rows if rows <= 16 else -(-rows // 16), *multiples, -(-rows // 4) * 4 % 16 == 0


class TestRows:
    """Every class of a number of rows has one in the warm-up."""

    @pytest.mark.parametrize("most", [1, 7, 16, 17, 29, 64, 1000])
    def test_every_class_is_there(self, most: int) -> None:
        rows = rows_to_warm_up(most)
        assert {kind(m) for m in range(1, most + 1)} == {kind(m) for m in rows}
        assert rows == tuple(sorted(set(rows))) and rows[-1] == most and rows[0] == 1

    @pytest.mark.parametrize("left_out", RESIDUES)
    def test_each_residue_is_needed(self, monkeypatch: pytest.MonkeyPatch, left_out: int) -> None:
        monkeypatch.setattr("kernels.warming.RESIDUES", tuple(r for r in RESIDUES if r != left_out))
        assert {kind(m) for m in range(1, 96)} != {kind(m) for m in rows_to_warm_up(95)}

    def test_more_rows_than_any_batch_has(self) -> None:
        with pytest.raises(OptionError, match="above 1048576"):
            rows_to_warm_up(1 << 40)

    @pytest.mark.parametrize(("call", "rows", "said"), [(None, 4, "call must be"), (print, None, "rows must be")])
    def test_what_cannot_be_warmed_up(self, call: Any, rows: Any, said: str) -> None:
        with pytest.raises(OptionError, match=said):
            kernels.warm_up(call, rows)

    @pytest.mark.parametrize("most", [0, -1, True, 2.0, None])
    def test_what_is_no_number_of_rows_is_refused(self, most: Any) -> None:
        with pytest.raises(OptionError, match="most must be a positive integer"):
            rows_to_warm_up(most)


class Compiler:
    """A stand-in for Triton's: a kernel is compiled for every class of its arguments, and the hook is told."""

    def __init__(self) -> None:
        self.knobs = SimpleNamespace(runtime=SimpleNamespace(jit_post_compile_hook=None))
        self.kernels = dict[str, object]()

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.kernels.setdefault(name, Kernel(name, self))


class Kernel:
    """A function that computes nothing."""

    def __init__(self, name: str, compiler: Compiler) -> None:
        self.name, self.compiler, self.compiled = name, compiler, set[object]()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.run

    def run(self, *arguments: Tensor | int, **constants: object) -> None:
        key = (*map(self.specialised, arguments), *constants.items())
        if key not in self.compiled:
            self.compiled.add(key)
            if (hook := self.compiler.knobs.runtime.jit_post_compile_hook) is not None:
                hook(repr=f"{self.name}{key}", key=key)

    @staticmethod
    def specialised(x: Tensor | int) -> object:
        """Triton 3.6, ``runtime/jit.py``: 1 is a constant, divisibility by 16 is assumed, wide integers are int64."""
        if isinstance(x, Tensor):
            return str(x.dtype), x.data_ptr() % 16 == 0
        return "one" if x == 1 else ("i64" if x >= 2**31 else "i32", x % 16 == 0)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """In place of Triton, on a described H200."""
    made = Compiler()
    module = ModuleType("triton")
    module.knobs = made.knobs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: object())
    everything = triton_cache, triton_fused, triton_gemm, triton_linear, triton_mx, triton_mx_quant, triton_quant
    for each in everything:
        monkeypatch.setattr(each, "library", lambda: (made, True))
        for name in ("_prepared", "_group_quantiser", "_sum"):
            if (kept := getattr(each, name, None)) is not None:
                kept.cache_clear()
    with use_machine(Machine.of_product("H200")), use_config(Config(fast_paths=False)):
        yield made
    for each in everything:
        for name in ("_prepared", "_group_quantiser", "_sum"):
            if (kept := getattr(each, name, None)) is not None:
                kept.cache_clear()


def x_of(m: int, k: int = 512, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(m, k, dtype=dtype)


def codes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def dense(m: int) -> None:
    scale = torch.zeros(4, m + -m % 4).t()[:m]
    out = torch.empty(m, 320, dtype=torch.bfloat16)
    triton_gemm.gemm_nt(codes(m, 512), scale, codes(320, 512), torch.zeros(3, 4), out, None, True)


def masked(m: int) -> None:
    out, lens = torch.empty(4, m, 320, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    a, b = (codes(4, m, 512), torch.zeros(4, m, 4)), (codes(4, 320, 512), torch.zeros(4, 3, 4))
    triton_gemm.grouped_masked(*a, *b, out, lens, m, True)


def mx(m: int) -> None:
    left, right = (
        Scales(torch.zeros(-(-rows // 128) * 2048).view(torch.float8_e8m0fnu), 32, "128x4") for rows in (m, 320)
    )
    out = torch.empty(m, 320, dtype=torch.bfloat16)
    triton_mx.mx_product(Product(codes(m, 512), left, codes(1, 320, 512), right, out, None, None, None, False))


CALLS: dict[str, Callable[[int], object]] = {
    **{
        f"quant_group {layout}": lambda m, layout=layout: triton_quant.quant_group(x_of(m), BLOCK, 1e-10, False, layout)
        for layout in ("row", "col", "tma")
    },
    "quant_group_packed": lambda m: triton_quant.quant_group_packed(x_of(m), BLOCK, 1e-10),
    "quant_token": lambda m: triton_quant.quant_token(x_of(m), None),
    "quant_tensor": lambda m: triton_quant.quant_tensor(x_of(m, 40)),
    **{
        f"quant_blocks {layout}": lambda m, layout=layout: triton_mx_quant.quant_blocks(
            x_of(m), Blocks("e4m3", "rceil", layout, False, False), 512, None
        )
        for layout in ("linear", "128x4")
    },
    "fp8_gemm_nt": dense,
    "grouped_masked": masked,
    "few_rows": lambda m: triton_linear.few_rows(torch.bfloat16, 4096, 7168)(
        x_of(min(m, 31), 7168), codes(4096, 7168), torch.zeros(32, 56)
    ),
    "mx_product": mx,
}


class TestNothingCompilesInServing:
    """By the hook on the compiler."""

    @pytest.mark.parametrize("name", CALLS)
    def test_after_a_warm_up(self, compiler: Compiler, name: str) -> None:
        first = kernels.warm_up(CALLS[name], MOST)
        assert first  # the hook is heard
        with kernels.compilations() as compiled:
            for m in range(1, MOST + 1):
                CALLS[name](m)
        assert compiled == []

    def test_few_numbers_of_rows_are_too_few(self, compiler: Compiler) -> None:
        """The twin: what is not called is not compiled."""
        missed = set[str]()
        for name, call in CALLS.items():
            kernels.warm_up(call, (1, 32))
            with kernels.compilations() as compiled:
                for m in range(1, MOST + 1):
                    call(m)
            missed |= {name} if compiled else set()
        assert missed > {"fp8_gemm_nt", "mx_product", "few_rows", "quant_group tma"}

    def test_another_listener_hears_too(self, compiler: Compiler) -> None:
        heard, runtime = list[object](), compiler.knobs.runtime
        runtime.jit_post_compile_hook = mine = lambda **compilation: heard.append(compilation["repr"])
        with kernels.compilations() as outer, kernels.compilations() as inner:
            CALLS["quant_token"](3)
        assert heard == outer == inner and len(heard) == 1 and runtime.jit_post_compile_hook is mine


class TestWithoutTriton:
    def test_nothing_is_listed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
        assert kernels.warm_up(lambda m: None, (1, 2)) == []

    def test_what_is_refused(self) -> None:
        called = list[int]()
        for rows in (0, True, (0,), (1, 2.0)):
            with pytest.raises(OptionError, match="positive integer"):
                kernels.warm_up(called.append, rows)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="tune=1; it is True or False"):
            kernels.warm_up(called.append, 1, tune=1)  # type: ignore[arg-type]
        assert called == []

    def test_tuning_is_flashinfers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where FlashInfer is; elsewhere there is nothing to tune."""
        seen = list[object]()

        class Tuning:
            def __init__(self, tune: bool) -> None:
                seen.append(tune)

            def __enter__(self) -> None:
                seen.append("on")

            def __exit__(self, *_: object) -> None:
                seen.append("off")

        package, module = ModuleType("flashinfer"), ModuleType("flashinfer.autotuner")
        module.autotune = Tuning  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flashinfer", package)
        monkeypatch.setitem(sys.modules, "flashinfer.autotuner", module)
        with use_machine(Machine.described("sm100")):
            kernels.warm_up(seen.append, (5,), tune=True)
            kernels.warm_up(seen.append, (6,))
        with use_machine(Machine.described("cpu")):
            kernels.warm_up(seen.append, (7,), tune=True)
        assert seen == [True, "on", 5, "off", 6, 7]


X = torch.randn(6, 256, generator=torch.Generator().manual_seed(3)).bfloat16()


def quantised(m: int = 6) -> tuple[Tensor, Tensor]:
    return kernels.per_token_group_quant_fp8(X[:m], BLOCK)


class Willing(Backend):
    """A backend that serves every problem."""

    def why_not(self, *_: object) -> None:
        return None


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Let ``triton`` serve groups on this CPU, and raise what it is told to; or lack what ``missing`` says."""

    def put(*errors: Exception, missing: str | None = None) -> None:
        left = list(errors)

        def quant_group(*_: object) -> tuple[Tensor, Tensor]:
            if left:
                raise left[0] if len(left) == 1 else left.pop(0)
            return torch.empty(0), torch.empty(0)

        stand_in = Willing(
            name="triton", kernel=lambda p, m: "stand-in", quant_group=quant_group, missing=lambda p, m: missing
        )
        of = plan.backend_of
        for module in (plan, routes):
            monkeypatch.setattr(module, "backend_of", lambda name: stand_in if name == "triton" else of(name))

    routes._log_once.cache_clear()
    with context.use(machine=context.Once()):
        yield put
    routes._log_once.cache_clear()


class TestFallback:
    """A backend that fails in a warm-up is passed over, with one warning, or refused."""

    right = quantised()

    def warnings(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    @pytest.mark.parametrize("fallback", ["warn", "next"])
    def test_the_next_one_serves(
        self, broken: Callable[..., None], caplog: pytest.LogCaptureFixture, fallback: str
    ) -> None:
        broken(RuntimeError("nvcc is not there"))
        with use_config(Config(fallback=fallback)), kernels.explain() as plans:
            kernels.warm_up(quantised, (2, 6))
            assert all(map(torch.equal, quantised(), self.right))
            assert all(map(torch.equal, quantised(), self.right))
        last = plans[-1]
        assert last.backend == "eager" and isinstance(dict(last.reasons)["triton"], Failed)
        assert dict(last.reasons)["triton"] == "RuntimeError: nvcc is not there"
        said = self.warnings(caplog)
        assert len(said) == (fallback == "warn") and all("triton failed, and eager serves instead" in x for x in said)

    def test_refused(self, broken: Callable[..., None]) -> None:
        broken(RuntimeError("nvcc is not there"))
        with use_config(Config(fallback="refuse")):
            for call in (lambda: kernels.warm_up(quantised, (2,)), quantised):  # the failure is not forgotten
                with pytest.raises(NoBackendError, match="triton: RuntimeError: nvcc is not there") as caught:
                    call()
                assert (
                    caught.value.reasons["eager"]
                    == "triton failed, and FP8_KERNELS_FALLBACK=refuse lets nothing take its place"
                )

    def test_what_fails_in_serving_is_an_error(self, broken: Callable[..., None]) -> None:
        """It may have written: nothing repeats it."""
        broken(RuntimeError("nvcc is not there"))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="nvcc"):
                quantised()

    @pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), OptionError("a wrong option")])
    def test_whose_fault_it_is_not(self, broken: Callable[..., None], error: Exception) -> None:
        """A lack of memory, and a refusal of the layer."""
        broken(error)
        with pytest.raises(type(error)):
            kernels.warm_up(quantised, (2,))
        assert not context.current().failures

    def test_an_error_of_the_caller_is_his(self, broken: Callable[..., None]) -> None:
        with pytest.raises(ZeroDivisionError):
            kernels.warm_up(lambda m: m / 0, (1,))
        broken(RuntimeError("once"), RuntimeError("once"))
        assert not context.current().failures

    def test_a_failure_belongs_to_its_problem(self, broken: Callable[..., None]) -> None:
        broken(RuntimeError("nvcc is not there"))
        with use_config(Config(fallback="next")):
            kernels.warm_up(quantised, (2,))
            ((problem, name),) = context.current().failures
            assert name == "triton" and plan.plan(problem).backend == "eager"
            assert plan.plan(dataclasses.replace(problem, group_size=64)).backend == "triton"

    def test_another_machine_has_no_failures(self, broken: Callable[..., None]) -> None:
        broken(RuntimeError("nvcc is not there"))
        kernels.warm_up(quantised, (2,))
        with context.use(config=context.Once(Config())):
            assert context.current().failures
        with use_machine(Machine.described("sm90")):
            assert not context.current().failures

    def test_a_release_that_lacks_it(self, broken: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
        """Where it fails to load, no call is needed to learn that."""
        broken(missing="release 9 has no such function")
        assert all(map(torch.equal, quantised(), self.right)) and all(map(torch.equal, quantised(), self.right))
        assert len(self.warnings(caplog)) == 1
        with use_config(Config(fallback="refuse")), pytest.raises(NoBackendError, match="release 9"):
            quantised()

    def test_of_a_layer(self, broken: Callable[..., None]) -> None:
        """One refuses, its neighbour falls back; the word is checked, and goes with a copy."""
        broken(RuntimeError("nvcc is not there"))
        layer, other = (nn.Fp8Linear(*cp.linear(256, 256, 1, "block")) for _ in range(2))
        layer.fallback = "refuse"
        with pytest.raises(NoBackendError, match="nvcc is not there"):
            layer.process_weights_after_loading(warm_up=(2,))
        other.process_weights_after_loading(warm_up=(2,))
        assert other(X).shape == (6, 256)
        with pytest.raises(NoBackendError, match="nvcc is not there"):
            layer(X)
        layer.fallback = None
        assert torch.equal(layer(X), other(X)) and layer.backend is None
        with pytest.raises(KernelError, match="fallback='never'; it is one of next, warn, refuse"):
            layer.fallback = "never"
        layer.backend, layer.fallback = "eager", "next"
        layer.backend = None
        assert layer.fallback == "next"

    def test_the_variable(self) -> None:
        assert Config.from_environment({"FP8_KERNELS_FALLBACK": "refuse"}).fallback == "refuse"
        with pytest.raises(KernelError, match="FP8_KERNELS_FALLBACK='never'; choose one of next, warn, refuse"):
            Config.from_environment({"FP8_KERNELS_FALLBACK": "never"})
