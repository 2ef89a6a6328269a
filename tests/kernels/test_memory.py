"""The allocator that bypasses torch's dispatcher: used on a GPU while no torch mode is active."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import fast
from kernels.backends import _host
from kernels.config import Config, use_config

CUDA = torch.device("cuda:0")


class Listening(TorchFunctionMode):
    """A function mode."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


class Below(TorchDispatchMode):
    """A dispatch mode."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


@pytest.fixture
def shortest(monkeypatch: pytest.MonkeyPatch) -> object:
    """A stand-in."""

    def made(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype)

    monkeypatch.setattr(fast, "EMPTY", made)
    return made


def test_taken_on_a_gpu(shortest: object) -> None:
    assert _host.allocator(CUDA) is _host.allocators(CUDA)() is shortest


def test_not_taken_elsewhere(shortest: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU, a listening mode, the switch, and a torch that is not known."""
    cpu, kept = torch.device("cpu"), _host.allocators(CUDA)
    assert _host.allocator(cpu) is not shortest and _host.allocators(cpu)() is not shortest
    for mode in (Listening(), Below()):
        with mode:
            assert _host.allocator(CUDA) is not shortest and kept() is not shortest
    assert kept() is shortest
    with use_config(Config(fast_paths=False)):
        assert _host.allocator(CUDA) is not shortest and _host.allocators(CUDA)() is not shortest
    monkeypatch.setattr(fast, "EMPTY", None)
    assert _host.allocator(CUDA) is not shortest and _host.allocators(CUDA)() is not shortest


def test_torch_gives_what_was_asked_for() -> None:
    made = _host.allocator(torch.device("cpu"))((3, 4), (1, 5), torch.float8_e4m3fn)
    assert (made.shape, made.stride(), made.dtype) == ((3, 4), (1, 5), torch.float8_e4m3fn)


@pytest.mark.skipif(
    not torch.__version__.startswith(fast.RELEASES["torch"]),
    reason=f"torch {torch.__version__} is called by its public names",
)
def test_what_is_called_is_what_inductor_generates() -> None:
    """In the installed release: the names that the compiled code of every user calls, and the body of the device's."""
    codegen = Path(torch.__file__).parent / "_inductor" / "codegen"
    text = "".join((codegen / name).read_text() for name in ("wrapper.py", "cuda/device_op_overrides.py"))
    named = {"torch._C._dynamo.guards._empty_strided_cuda", "from torch._C import _cuda_getCurrentRawStream"}
    assert {name for name in (*named, "torch._C._no_such_call") if name in text} == named
    assert inspect.getsource(torch.cuda.current_device).rstrip().endswith("return torch._C._cuda_getDevice()")


def test_only_known_releases_are_bypassed() -> None:
    """Of any other neither entry is taken, though it may have them; without it everything is as right, and slower."""
    assert (fast.EMPTY is not None) == (fast.STREAM is not fast.public_stream) == fast.KNOWN
    assert (torch.__version__.startswith(fast.RELEASES["torch"]) and torch.version.cuda is not None) == fast.KNOWN
    assert fast._entry("_dynamo", "guards", "_empty_strided_cuda") is not None and fast._entry("no", "entry") is None
