"""Calls like one that was checked skip the checks of their verb; any other call is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import checks, context, fused
from kernels.config import Config, use_config
from kernels.errors import DtypeError, InputError, OptionError, ShapeError
from kernels.fast import torch as fast

X, W, S = torch.randn(6, 256).bfloat16(), torch.randn(256).bfloat16(), torch.full((1,), 0.05)
needs_guard = pytest.mark.skipif(fast.GUARDS is None, reason=f"torch {torch.__version__} has no guard that is known")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that were checked, in a context of their own."""
    seen: list[str] = []
    rank = checks.rank

    def counted(name: str, x: Any, *ranks: int) -> Tensor:
        seen.append(name)
        return rank(name, x, *ranks)

    monkeypatch.setattr(checks, "rank", counted)
    return seen


def static(x: Tensor = X, w: Tensor = W, s: Tensor = S, **more: Any) -> Tensor:
    return fused.rms_norm_static_fp8_quant(x, w, s, **more)


@needs_guard
def test_a_call_like_a_checked_one_is_not_checked(checked: list[str]) -> None:
    with context.use():
        first = static()
        count = len(checked)
        assert count
        assert torch.equal(static().view(torch.uint8), first.view(torch.uint8))
        static(torch.cat([X, X]))  # another number of rows
        assert len(checked) == count
        static(rounding="product")
        assert len(checked) == 2 * count
        with use_config(Config(fast_paths=False)):
            static()
            static()
        assert len(checked) == 4 * count


BAD: tuple[tuple[Callable[[], object], type[Exception]], ...] = (
    (lambda: static(w=W.float()), DtypeError),
    (lambda: static(w=W[:-1]), ShapeError),
    (lambda: static(s=torch.ones(2)), ShapeError),
    (lambda: static(X[0]), ShapeError),
    (lambda: static(X.to(torch.int8)), DtypeError),
    (lambda: static(rounding="twice"), OptionError),
    (lambda: static(epsilon=True), OptionError),
    (lambda: static(freed()), InputError),
    (lambda: fused.fused_add_rms_norm_static_fp8_quant(X, X[:3], W, S), ShapeError),
    (lambda: fused.rms_norm_per_block_quant(X, W, residual=X[:3]), ShapeError),
)


def freed() -> Tensor:
    x = X.clone()
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize(("call", "error"), BAD)
def test_every_other_call_is_checked(call: Callable[[], object], error: type[Exception]) -> None:
    """After right calls of the same verbs: what the guard does not see would reach a kernel."""
    with context.use():
        static()
        fused.fused_add_rms_norm_static_fp8_quant(X, X, W, S)
        fused.rms_norm_per_block_quant(X, W, residual=X)
        with pytest.raises(error):
            call()


@needs_guard
def test_columns_of_another_distance_are_checked_again(checked: list[str]) -> None:
    with context.use():
        static()
        count = len(checked)
        apart = torch.cat([X, X], dim=1)[:, :256]
        assert torch.equal(static(apart).view(torch.uint8), static().view(torch.uint8))
        assert len(checked) == 2 * count
