"""Starting a compiled Triton kernel past Triton's launcher: the arguments in the order that the real releases take."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kernels.fast import triton as fast

GRID = ("gridX", "gridY", "gridZ", "stream", "function")
HANDED_ON = ("packed_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")
LAUNCH_ARGUMENTS = {
    # release: positional parameters of the compiled ``launch`` before those of the kernel. Read from the wheels of
    # PyPI: triton/backends/nvidia/driver.py, CudaLauncher.__call__ and the PyArg_ParseTuple of make_launcher.
    "3.5.1": (*GRID, "launch_cooperative_grid", "launch_pdl", "global_scratch", "profile_scratch", *HANDED_ON),
    "3.6.0": (*GRID, "launch_cooperative_grid", "launch_pdl", "global_scratch", "profile_scratch", *HANDED_ON),
}
NO_HOOKS: dict[str, object] = dict.fromkeys(HANDED_ON[1:])
VALUES: dict[str, object] = {
    **dict(zip(GRID, (3, 1, 1, 7, "function"), strict=True)),
    **{"launch_cooperative_grid": "cooperative", "launch_pdl": "pdl", "packed_metadata": "metadata"},
    **{"global_scratch": None, "profile_scratch": None, **NO_HOOKS},
}
PARAMETERS = ("pointer", 48, 32)


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

    return Launcher()


def start(run: Any) -> None:
    made = fast.starter(ready(run))
    assert made is not None
    made.call(*(VALUES[name] for name in GRID[:4]), *made.fixed, *PARAMETERS)


def with_triton(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    module = ModuleType("triton")
    module.__version__ = release  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", module)


def test_the_table_has_every_release() -> None:
    assert set(LAUNCH_ARGUMENTS) == set(fast.RELEASES)


@pytest.mark.parametrize("release", LAUNCH_ARGUMENTS)
def test_a_known_release_is_started_past_its_launcher(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    """Each argument in its place, then the kernel's own."""
    with_triton(monkeypatch, release)
    run = launcher()
    start(run)
    assert list(run) == []
    assert run.launch == [(*(VALUES[name] for name in LAUNCH_ARGUMENTS[release]), *PARAMETERS)]


@pytest.mark.parametrize(
    ("release", "scratch", "profile"),
    [("3.4.0", 0, 0), ("3.6.1", 0, 0), ("3.7.0", 0, 0), ("3.60.0", 0, 0), ("3.6.0", 64, 0), ("3.6.0", 0, 8)],
)
def test_elsewhere_triton_starts_it(
    monkeypatch: pytest.MonkeyPatch, release: str, scratch: int, profile: int
) -> None:
    """Of a release that was not read, and where scratch memory is to be allocated."""
    with_triton(monkeypatch, release)
    run = launcher(scratch, profile)
    assert fast.starter(ready(run)) is None and run.launch == [] and list(run) == []


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed; the tox factor `interpreter` has it"
)
class TestInstalled:
    """Triton's own ``CompiledKernel`` and ``CudaLauncher``, without a GPU: only the compiled ``launch`` is recorded."""

    @pytest.fixture(autouse=True)
    def no_hooks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of profilers; a release may hold an empty chain of them, which the compiled ``launch`` would call."""
        runtime = fast._knobs()[0]
        assert not fast.modes()[0]
        monkeypatch.setattr(runtime, "launch_enter_hook", None)
        monkeypatch.setattr(runtime, "launch_exit_hook", None)

    def kernel(self) -> tuple[Any, Started]:
        from triton.backends.nvidia.driver import CudaLauncher
        from triton.compiler.compiler import CompiledKernel

        run, kernel, started = object.__new__(CudaLauncher), object.__new__(CompiledKernel), Started()
        run.launch, run.launch_cooperative_grid, run.launch_pdl = started, "cooperative", "pdl"
        run.num_ctas, run.global_scratch_align, run.profile_scratch_align = 1, 1, 1
        run.global_scratch_size = run.profile_scratch_size = 0
        kernel.module, kernel._run, kernel.src = "loaded", run, None
        kernel.function, kernel.packed_metadata = VALUES["function"], VALUES["packed_metadata"]
        return kernel, started

    def test_both_starts_hand_over_the_same(self) -> None:
        """Triton's own start of a compiled kernel, and ours."""
        kernel, started = self.kernel()
        kernel[(3, 1, 1)](*PARAMETERS, stream=VALUES["stream"])
        made = fast.starter(kernel)
        assert made is not None
        made.call(*(VALUES[name] for name in GRID[:4]), *made.fixed, *PARAMETERS)
        assert len(started) == 2 and started[0] == started[1]

    def test_the_table_is_true(self) -> None:
        """What the table says of a release is what that release does."""
        import triton

        if triton.__version__ not in LAUNCH_ARGUMENTS:
            assert triton.__version__ not in fast.RELEASES, "read this release and enter it in the table"
            pytest.skip(f"Triton {triton.__version__} is started by its launcher")
        kernel, started = self.kernel()
        kernel[(3, 1, 1)](*PARAMETERS, stream=VALUES["stream"])
        assert started == [(*(VALUES[name] for name in LAUNCH_ARGUMENTS[triton.__version__]), *PARAMETERS)]
