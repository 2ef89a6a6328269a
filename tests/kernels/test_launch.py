"""Starting a compiled Triton kernel past Triton's launcher: the arguments in the order that the real releases take."""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import fast
from kernels.backends import _launch, triton_linear, triton_mx_quant, triton_quant
from kernels.backends.declaration import Blocks
from kernels.config import Config, use_config
from kernels.platform import Machine, use_machine

pytestmark = pytest.mark.interpreter

GRID = ("gridX", "gridY", "gridZ", "stream", "function")
HANDED_ON = ("packed_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")
MODES, SCRATCH = ("launch_cooperative_grid", "launch_pdl"), ("global_scratch", "profile_scratch")
COMPILED = (*GRID, *MODES, *SCRATCH, *HANDED_ON)
DESCRIBED = (*GRID, *MODES, *HANDED_ON, *SCRATCH, "arg_annotations", "kernel_signature")
LAUNCH_ARGUMENTS = {
    # release: positional parameters of ``launch`` before those of the kernel, which the latter kind takes as one tuple.
    # Read from the wheels of PyPI: triton/backends/nvidia/driver.py, CudaLauncher.__call__, and the PyArg_ParseTuple of
    # make_launcher, from 3.7 on that of launchKernel in driver.c.
    **dict.fromkeys(("3.5.1", "3.6.0"), COMPILED),
    **dict.fromkeys(("3.7.0", "3.7.1", "3.8.0", "3.9.0"), DESCRIBED),
}
NO_HOOKS: dict[str, object] = dict.fromkeys(HANDED_ON[1:])
VALUES: dict[str, object] = {
    **dict(zip(GRID, (3, 1, 1, 7, "function"), strict=True)),
    **{"launch_cooperative_grid": "cooperative", "launch_pdl": "pdl", "packed_metadata": "metadata"},
    **{"global_scratch": None, "profile_scratch": None, **NO_HOOKS},
    **{"arg_annotations": "annotations", "kernel_signature": b"signature"},
}
PARAMETERS = ("pointer", 48, 32)


def handed_over(release: str) -> tuple[object, ...]:
    """The arguments of one start in a release."""
    names = LAUNCH_ARGUMENTS[release]
    return (*(VALUES[name] for name in names), *((PARAMETERS,) if names is DESCRIBED else PARAMETERS))


class Started(list[tuple[object, ...]]):
    """Every call, its positional arguments."""

    def __call__(self, *arguments: object) -> None:
        self.append(arguments)


def ready(run: object) -> Any:
    """The parts of a ``CompiledKernel`` that the start is made of."""
    return SimpleNamespace(run=run, function=VALUES["function"], packed_metadata=VALUES["packed_metadata"])


def launcher(scratch: int = 0, profile: int = 0) -> Any:
    """The attributes of a ``CudaLauncher``; calling it is recorded apart from its ``launch``."""

    class Launcher(Started):
        launch, launch_cooperative_grid, launch_pdl = Started(), "cooperative", "pdl"
        global_scratch_size, profile_scratch_size = scratch, profile
        arg_annotations, kernel_signature = VALUES["arg_annotations"], VALUES["kernel_signature"]

    return Launcher()


def start(run: Any) -> None:
    made = fast.starter(ready(run))
    assert made is not None
    made.call(*(VALUES[name] for name in GRID[:4]), *made.fixed, *PARAMETERS)


class OnGpu(torch.Tensor):
    """A CPU tensor that says it lies on the current GPU."""

    device = torch.device("cuda:0")  # type: ignore[assignment]

    @staticmethod
    def of(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16).as_subclass(OnGpu)

    @staticmethod
    def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype).as_subclass(OnGpu)


def with_triton(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    module = ModuleType("triton")
    module.__version__ = release  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", module)


def test_the_table_has_every_release() -> None:
    assert set(LAUNCH_ARGUMENTS) == set(fast.RELEASES["triton"])


@pytest.mark.parametrize("release", LAUNCH_ARGUMENTS)
def test_a_known_release_is_started_past_its_launcher(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    """Each argument in its place, then the kernel's own."""
    with_triton(monkeypatch, release)
    run = launcher()
    start(run)
    assert list(run) == []
    assert run.launch == [handed_over(release)]


@pytest.mark.parametrize(
    ("release", "scratch", "profile"),
    [
        ("3.4.0", 0, 0),
        ("3.6.1", 0, 0),
        ("3.10.0", 0, 0),
        ("3.60.0", 0, 0),
        ("3.6.0", 64, 0),
        ("3.9.0", 64, 0),
        ("3.6.0", 0, 8),
        ("3.9.0", 0, 8),
    ],
)
def test_elsewhere_triton_starts_it(monkeypatch: pytest.MonkeyPatch, release: str, scratch: int, profile: int) -> None:
    """Of a release that was not read, and where scratch memory is to be allocated."""
    with_triton(monkeypatch, release)
    run = launcher(scratch, profile)
    assert fast.starter(ready(run)) is None and run.launch == [] and list(run) == []


@pytest.mark.parametrize("release", ["3.8.0", "3.9.0"])
def test_a_sanitised_kernel_is_started_by_triton(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    """Its launcher appends the sanitiser's parameters."""
    with_triton(monkeypatch, release)
    run = launcher()
    run.gsan_enabled = True
    assert fast.starter(ready(run)) is None


class TestAgain:
    """The group quantiser and the layer of few rows, which start extents that they have met without a further look."""

    @pytest.fixture
    def starts(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """How each kernel was started, and a GPU of its own for tensors of the CPU."""
        with_triton(monkeypatch, fast.RELEASES["triton"][-1])
        runtime = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None, debug=False)
        monkeypatch.setattr(fast, "_knobs", lambda: (runtime, {}))
        seen: list[str] = []
        run = launcher()
        made: list[tuple[object, ...]] = []
        run.__class__.launch = staticmethod(
            lambda *arguments: seen.append("started") or made.append((*arguments[:-1], *arguments[-1]))
        )
        monkeypatch.setattr(_launch.Launch, "_by_triton", lambda *_: seen.append("by Triton") or ready(run))
        here = _launch.Launch.here
        monkeypatch.setattr(_launch.Launch, "here", lambda *given: seen.append("looked at") or here(*given))
        monkeypatch.setattr(fast, "STREAM", lambda index: 7)
        monkeypatch.setattr(fast, "DEVICE", lambda: 0)
        self.runtime, self.made = runtime, made
        quantisers = (triton_quant, "_prepared _group_quantiser"), (triton_mx_quant, "_prepared")
        for module, names in (*quantisers, (triton_linear, "_prepared _sum")):
            kernels = SimpleNamespace(group_kernel=None, block_kernel=None, linear_kernel=None, sum_kernel=None)
            monkeypatch.setattr(module, "library", lambda kernels=kernels: (kernels, True))
            monkeypatch.setattr(module, "allocator", lambda device: OnGpu.allocate)
            for name in names.split():
                monkeypatch.setattr(module, name, functools.lru_cache(getattr(module, name).__wrapped__))
        monkeypatch.setattr(triton_linear, "allocators", lambda device: lambda: OnGpu.allocate)
        return seen

    @staticmethod
    def quantise(x: torch.Tensor, layout: str = "tma", out: torch.Tensor | None = None) -> tuple[object, ...]:
        """The addresses that a start must get, the programs, and the integers of the kernel."""
        quantiser = triton_quant.group_quantiser(128, 1e-10, False, layout)
        q, scale = quantiser(x, out, OnGpu.allocate)
        assert q.shape == x.shape and q.is_contiguous() and q.dtype is torch.float8_e4m3fn
        rows, groups = x.shape[0], x.shape[1] // 128
        assert scale.shape == (rows, groups) and scale.dtype is torch.float32
        assert scale.stride() == ((groups, 1) if layout == "row" else (1, rows + -rows % 4))
        return x.data_ptr(), q.data_ptr(), scale.data_ptr(), rows, groups, x.stride(0)

    @pytest.mark.parametrize(("layout", "programs"), [("row", 5), ("tma", 8)])
    def test_both_ways_start_the_same(self, starts: list[str], layout: str, programs: int) -> None:
        x = OnGpu.of(40, 512)
        known = [self.quantise(x, layout) for _ in range(4)]
        assert starts == ["looked at", "by Triton", "looked at", "started", "started", "started"]
        first = len(LAUNCH_ARGUMENTS[fast.RELEASES["triton"][-1]])
        for arguments, right in zip(self.made, known[1:], strict=True):
            assert arguments[:4] == (programs, 1, 1, 7) and arguments[first:][:6] == right

    @pytest.mark.parametrize("layout", ["128x4", "linear"])
    @pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1", "nvfp4"])
    def test_blocks_start_the_same(self, starts: list[str], element: str, layout: str) -> None:
        """The quantisers whose blocks share a scale byte: pointers, programs and integers of both ways."""
        g = OnGpu.of(1).float() if element == "nvfp4" else None
        how = Blocks("e2m1" if g is not None else element, "rceil", layout, False, False)
        x, other = OnGpu.of(40, 512), OnGpu.of(40, 1024)[:, :512]

        def quantise(x: torch.Tensor) -> tuple[object, ...]:
            q, scale = triton_mx_quant.quant_blocks(x, how, 512, g)
            assert q.shape == (40, 512 >> (how.element == "e2m1")) and scale.dtype is torch.uint8
            blocks = 512 // (16 if g is not None else 32)
            assert scale.shape == ((40, blocks) if layout == "linear" else (128 * blocks,))
            pointers = x.data_ptr(), (x if g is None else g).data_ptr(), q.data_ptr(), scale.data_ptr()
            return *pointers, 40, blocks, blocks, x.stride(0), 0

        known = [quantise(x) for _ in range(4)]
        assert starts == ["looked at", "by Triton", "looked at", "started", "started", "started"]
        first = len(LAUNCH_ARGUMENTS[fast.RELEASES["triton"][-1]])
        for arguments, right in zip(self.made, known[1:], strict=True):
            assert arguments[first:][:9] == right and arguments[1:4] == (1, 1, 7)
        assert len({arguments[0] for arguments in self.made}) == 1
        starts.clear()
        quantise(other)
        assert "looked at" in starts

    def test_what_differs_is_looked_at(self, starts: list[str]) -> None:
        x, runtime = OnGpu.of(64, 512), self.runtime

        def looked_at(x: torch.Tensor, out: torch.Tensor | None = None) -> bool:
            starts.clear()
            self.quantise(x, out=out)
            return "looked at" in starts

        assert [looked_at(x) for _ in range(3)] == [True, True, False]
        unaligned = OnGpu.of(65, 512).flatten()[1 : 1 + 64 * 512].view(64, 512)
        others = (
            unaligned,
            OnGpu.of(68, 512),
            OnGpu.of(64, 640),
            OnGpu.of(64, 640)[:, :512],
            OnGpu.of(64, 512).half(),
            OnGpu.of(512, 64).t(),
        )
        assert all(looked_at(other) for other in others) and not looked_at(x)
        assert looked_at(x, torch.empty(64, 512, dtype=torch.float8_e4m3fn))
        runtime.debug = True
        assert looked_at(x)
        runtime.debug, runtime.launch_enter_hook = False, print
        assert looked_at(x) and starts[-1] == "by Triton"
        runtime.launch_enter_hook = None
        assert not looked_at(x)
        with use_config(Config(fast_paths=False)):
            assert looked_at(x) and starts[-1] == "by Triton"

    @pytest.mark.parametrize(("k", "parts"), [(1024, 1), (4096, 4)])
    def test_few_rows(self, starts: list[str], k: int, parts: int) -> None:
        """The product, and where K is cut the sum of its parts."""
        with use_machine(Machine.of_product("H200")):
            layer = triton_linear.few_rows(torch.bfloat16, 256, k)
        x, w, scale = OnGpu.of(16, k), torch.zeros(256, k).to(torch.float8_e4m3fn), torch.ones(2, k // 128)

        def looked_at(*operands: torch.Tensor) -> bool:
            starts.clear()
            y = layer(*operands)
            assert y.shape == (operands[0].shape[0], 256) and y.dtype is torch.bfloat16
            return "looked at" in starts

        assert [looked_at(x, w, scale) for _ in range(4)] == [True, True, False, False]
        launches, first = 1 + (parts > 1), len(LAUNCH_ARGUMENTS[fast.RELEASES["triton"][-1]])
        for looked, again in zip(self.made[-3 * launches :][:launches], self.made[-launches:], strict=True):
            pointers = slice(first, first + (4 if looked is self.made[-3 * launches] else 2))
            assert len(looked) == len(again)
            assert [a for a, b in zip(looked, again, strict=True) if a != b and a not in looked[pointers]] == []
        at = self.made[-launches][first:]
        assert at[:3] == (x.data_ptr(), w.data_ptr(), scale.data_ptr()) and at[4:9] == (16, 256, k, k, k)
        assert parts == 1 or self.made[-1][first] == at[3]  # the sums
        unaligned = torch.zeros(256 * k + 1, dtype=torch.uint8)[1:].view(w.dtype).view(256, k)
        wide = torch.zeros(256, k + 16, dtype=torch.uint8).view(w.dtype)[:, :k]
        for other in (
            (OnGpu.of(17, k), w, scale),
            (x, unaligned, scale),
            (x, wide, scale),
            (OnGpu.of(16, k + 8)[:, :k], w, scale),
            (x, w, scale.t().contiguous().t()),
        ):
            assert looked_at(*other) and not looked_at(x, w, scale)
        self.runtime.debug = True
        assert looked_at(x, w, scale)
        with use_config(Config(fast_paths=False)), use_machine(Machine.of_product("H200")):
            layer = triton_linear.few_rows(torch.bfloat16, 256, k)
            assert all(looked_at(x, w, scale) and starts[-1] == "by Triton" for _ in range(3))


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed; the tox factor `interpreter` has it"
)
class TestInstalled:
    """Triton's own ``CompiledKernel`` and ``CudaLauncher``, without a GPU: only the compiled ``launch`` is recorded."""

    @pytest.fixture(autouse=True)
    def no_hooks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of profilers; a release may hold an empty chain of them, which the compiled ``launch`` would call."""
        from triton.runtime import driver

        runtime = fast._knobs()[0]
        assert not fast.modes()[0]
        monkeypatch.setattr(driver, "_active", SimpleNamespace())  # from 3.8 on the launcher asks for one
        monkeypatch.setattr(runtime, "launch_enter_hook", None)
        monkeypatch.setattr(runtime, "launch_exit_hook", None)

    def kernel(self) -> tuple[Any, Started]:
        from triton.backends.nvidia.driver import CudaLauncher
        from triton.compiler.compiler import CompiledKernel

        class Loaded(CompiledKernel):  # type: ignore[misc]
            def __del__(self) -> None:
                """No module was loaded that could be unloaded."""

        run, kernel, started = object.__new__(CudaLauncher), object.__new__(Loaded), Started()
        run.launch, run.launch_cooperative_grid, run.launch_pdl = started, "cooperative", "pdl"
        run.num_ctas, run.global_scratch_align, run.profile_scratch_align = 1, 1, 1
        run.global_scratch_size = run.profile_scratch_size = 0
        run.arg_annotations, run.kernel_signature = VALUES["arg_annotations"], VALUES["kernel_signature"]
        run.gsan_enabled = False
        kernel.module, kernel._run, kernel.src = "loaded", run, None
        kernel.function, kernel.packed_metadata = VALUES["function"], VALUES["packed_metadata"]
        return kernel, started

    def test_both_starts_hand_over_the_same(self) -> None:
        """Triton's own start of a compiled kernel, and ours; of a release that was not read there is only Triton's."""
        import triton

        kernel, started = self.kernel()
        if triton.__version__ not in fast.RELEASES["triton"]:
            assert fast.starter(kernel) is None
            return
        kernel[(3, 1, 1)](*PARAMETERS, stream=VALUES["stream"])
        made = fast.starter(kernel)
        assert made is not None
        made.call(*(VALUES[name] for name in GRID[:4]), *made.fixed, *PARAMETERS)
        assert len(started) == 2 and started[0] == started[1]

    def test_the_table_is_true(self) -> None:
        """What the table says of a release is what that release does."""
        import triton

        if triton.__version__ not in LAUNCH_ARGUMENTS:
            assert triton.__version__ not in fast.RELEASES["triton"], "read this release and enter it in the table"
            pytest.skip(f"Triton {triton.__version__} is started by its launcher")
        kernel, started = self.kernel()
        kernel[(3, 1, 1)](*PARAMETERS, stream=VALUES["stream"])
        assert started == [handed_over(triton.__version__)]
