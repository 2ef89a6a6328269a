"""Operands on a GPU that is not the current one: libraries are called with theirs current."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterator

import pytest
import torch

from kernels import blockscaled
from kernels.backends import _host, cutlass, deep_gemm, flashinfer, flashinfer_mx, sgl_kernel
from kernels.plan import backend_of

HELPERS = {
    "operators",
    "m_major",
    "columns",
    "addressable",
    "writable",
    "lanes",
    "context_lens",  # torch alone
    "blockscale_sm90",
    "gemm_nt",
    "aligned_gemm_nt",
    "dense_gemm_nt",  # two look by themselves, else the callers do
}


class Elsewhere(torch.Tensor):
    """A CPU tensor that says it lies on the second GPU."""

    device = torch.device("cuda:1")  # type: ignore[assignment]


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices made current, the first being the one from the start; the last is current."""
    stack = [0]

    @contextlib.contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        stack.append(device.index)
        yield
        stack.append(0)

    monkeypatch.setattr(_host.fast, "DEVICE", lambda: stack[-1])
    monkeypatch.setattr(torch.cuda, "device", made_current)
    return stack


def elsewhere(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape).as_subclass(Elsewhere)


def test_the_first_tensor_decides(current: list[int]) -> None:
    seen = []

    @_host.on_its_device
    def call(*args: object, **kwargs: object) -> None:
        seen.append(current[-1])

    call(elsewhere(2))
    call(None, elsewhere(2))
    call(x=None, y=elsewhere(2))
    call(torch.zeros(2), elsewhere(2))  # the CPU's first
    assert seen == [1, 1, 1, 0] and current[-1] == 0


def test_the_current_one_is_left_alone(current: list[int]) -> None:
    current.append(1)
    assert not _host.is_other_device(torch.device("cuda:1")) and _host.is_other_device(torch.device("cuda:0"))
    assert not _host.is_other_device(torch.device("cpu"))


def test_flashinfer(current: list[int], flashinfer_calls, make, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_calls("0.6.18.post1")
    seen = []
    allocate = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(flashinfer, "allocator", lambda device: seen.append(current[-1]) or allocate)
    x = make.codes(4, 128).as_subclass(Elsewhere)
    flashinfer.blockscale_sm90(x, torch.ones(1, 4), make.codes(64, 128), torch.ones(1, 1))
    assert seen == [1] and current[-1] == 0


def test_deep_gemm(current: list[int], library, make) -> None:
    seen = []
    library.fp8_gemm_nt = lambda a, b, out, **_: seen.append(current[-1])
    a, out = make.codes(4, 128).as_subclass(Elsewhere), torch.zeros(4, 64, dtype=torch.bfloat16)
    deep_gemm.gemm_nt(a, torch.ones(4, 1), make.codes(64, 128), torch.ones(1, 1), out, None, True)
    assert seen == [1] and current[-1] == 0


def test_quantise_then_gemm(current: list[int], make, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    allocate = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)  # noqa: E731
    quantised = make.codes(4, 128), torch.ones(4, 1)
    monkeypatch.setattr(blockscaled, "_quantiser", lambda backend, e8m0: lambda x, out, allocate: quantised)
    monkeypatch.setattr(blockscaled, "route", lambda *_: backend_of("eager"))
    monkeypatch.setattr(blockscaled, "allocators", lambda device: lambda: seen.append(current[-1]) or allocate)
    linear = blockscaled._quantise_then_gemm(torch.device("cuda:1"), torch.bfloat16, 128, 128, False)
    x = torch.zeros(4, 128).bfloat16().as_subclass(Elsewhere)
    assert linear(x, make.codes(128, 128), torch.ones(1, 1)).shape == (4, 128)
    assert seen == [1] and current[-1] == 0


def uncovered(module: object, name_of: str) -> list[str]:
    """Public functions that take a tensor first and are not covered, but for what torch alone does."""
    return [
        name
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and inspect.unwrap(function).__module__ == name_of
        and not name.startswith("_")
        and name not in HELPERS
        and next(iter(inspect.get_annotations(inspect.unwrap(function)).values()), "") in ("Tensor", "Any")
        and not hasattr(function, "__wrapped__")
    ]


@pytest.mark.parametrize(
    "module", [cutlass, deep_gemm, flashinfer, flashinfer_mx, sgl_kernel], ids=lambda m: m.__name__
)
def test_every_call_of_a_library_is_covered(module: types.ModuleType) -> None:
    assert uncovered(module, module.__name__) == []


def test_a_bare_call_is_seen() -> None:
    """The twin."""
    bare = types.SimpleNamespace(linear=inspect.unwrap(cutlass.linear), moe=inspect.unwrap(flashinfer.moe_cutlass))
    assert uncovered(bare, cutlass.__name__) == ["linear"] and uncovered(bare, flashinfer.__name__) == ["moe"]
