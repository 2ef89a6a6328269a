"""Shared by the tests of the dispatch layer: seeded operands and plain float64 definitions to compare with."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels import fast
from kernels.backends import deep_gemm, flashinfer, torch_ops
from kernels.config import Config
from kernels.plan import Problem
from kernels.platform import current_machine

FP8 = torch.float8_e4m3fn


def _codes(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).clamp(-448, 448).to(FP8)


def _scales(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000)
    return torch.rand(*shape, generator=generator) * 0.1 + 0.01


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """Block-scaled product in float64: 1x128 scales on ``a [M,K]``, 128x128 on ``b [N,K]``."""
    left = a.double() * a_scale.double().repeat_interleave(128, 1)[:, : a.shape[1]]
    wide = b_scale.double().repeat_interleave(128, 0)[: b.shape[0]].repeat_interleave(128, 1)[:, : b.shape[1]]
    return left @ (b.double() * wide).t()


def _error(actual: Tensor, expected: Tensor) -> float:
    """Largest error over the largest expected magnitude; NaN anywhere gives NaN, which no bound admits."""
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """``codes``, ``scales``: seeded operands; ``product``, ``error``: float64 truth and distance from it."""
    return SimpleNamespace(codes=_codes, scales=_scales, product=_product, error=_error)


@pytest.fixture(scope="session")
def rowwise_refused() -> str | None:
    """Why this machine's torch has no row-wise product for CPU tensors, or None."""
    rowwise = Problem("torch_linear", device="cpu", kernel="rowwise")
    return torch_ops.BACKEND.why_not(rowwise, current_machine(), Config())


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """An empty module in place of DeepGEMM."""
    module = types.ModuleType("deep_gemm")
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    caches = (deep_gemm.library, deep_gemm.symbol, deep_gemm.takes_2d_lens)
    for cache in caches:
        cache.cache_clear()
    yield module
    for cache in caches:
        cache.cache_clear()


class Runner:
    """As FlashInfer's: it runs once it has a workspace, and quantises a bfloat16 input into it."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.workspaces, self.kernel = 0, run

    def configure_workspace(self, workspace: Tensor) -> None:
        self.workspaces += workspace.numel() > 0

    def run_gemm(self, x: Tensor, w: Tensor, out: Tensor, xs: Tensor, ws: Tensor) -> None:
        assert self.workspaces == 1 and x.dtype is w.dtype is torch.float8_e4m3fn
        self.kernel(x, w, out, xs, ws)


@pytest.fixture
def flashinfer_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[tuple[Tensor | None, ...]]]]:
    """A stand-in for a release of FlashInfer that writes 2 everywhere and lists the operands of its calls.

    The runner of a known release and the public function of any other take part; each refuses the other's place.
    """
    seen: list[tuple[Tensor | None, ...]] = []
    forget = flashinfer._run.cache_clear

    def kernel(x: Tensor, w: Tensor, out: Tensor, xs: Tensor | None, ws: Tensor) -> None:
        seen.append((x, w, out, xs, ws))
        out.fill_(2.0)

    def release(version: str) -> list[tuple[Tensor | None, ...]]:
        known = version in fast.RELEASES["flashinfer"]

        def public(x: Tensor, w: Tensor, xs: Tensor | None, ws: Tensor, out: Tensor) -> None:
            assert not known
            kernel(x, w, out, xs, ws)

        def run(*operands: Tensor) -> None:
            assert known
            kernel(*operands)

        runner = Runner(run)
        module = SimpleNamespace(
            __version__=version,
            fp8_blockscale_gemm_sm90=public,
            get_fp8_blockscale_gemm_runner_sm90=lambda: runner,
        )
        monkeypatch.setattr(flashinfer, "library", lambda name="flashinfer": module)
        forget()
        return seen

    yield release
    forget()
