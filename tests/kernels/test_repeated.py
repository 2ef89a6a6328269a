"""Fast path for repeated calls: a repeated call skips the checks of its verb; any other call is checked."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels import blockscaled, checks, context, fast, fused, kv_cache, repeated
from kernels.config import Config, use_config
from kernels.errors import DtypeError, InputError, KernelError, OptionError, ShapeError

X, W, S = torch.randn(6, 256).bfloat16(), torch.randn(256).bfloat16(), torch.full((1,), 0.05)


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


def test_a_repeated_call_is_not_checked(checked: list[str]) -> None:
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


def append(tokens: int = 4, pages: int = 3, **other: Tensor) -> Tensor:
    """Keys and values of one request, of the numbers from 0; the keys' cache."""
    key = torch.arange(tokens * 32).reshape(tokens, 2, 16).bfloat16()
    cache = torch.zeros(pages, 4, 2, 16, dtype=torch.bfloat16)
    place = torch.zeros(tokens, dtype=torch.int32), torch.arange(tokens, dtype=torch.int32)
    tables = torch.arange(pages).int(), torch.tensor([0, pages]).int(), torch.ones(1).int()
    arguments = {
        "append_key": key,
        "append_value": key.clone(),
        "batch_indices": place[0],
        "positions": place[1],
        "k_cache": cache,
        "v_cache": cache.clone(),
        "kv_indices": tables[0],
        "kv_indptr": tables[1],
        "kv_last_page_len": tables[2],
    }
    kv_cache.append_paged_kv_cache(**{**arguments, **other})
    return cache


def test_tokens_and_tables_may_have_another_length(checked: list[str]) -> None:
    """Of a cache: what has a row for each token, and the pages in use."""
    with context.use():
        append()
        count = len(checked)
        assert append(9)[2, 0, 1, 15] == 8 * 32 + 31
        assert torch.equal(append(2, kv_indices=torch.arange(9).int()).flatten()[:64], torch.arange(64).bfloat16())
        assert len(checked) == count
        append(4, 5)  # another cache
        assert len(checked) == 2 * count
        once = append(4, 5, **dict.fromkeys(("append_key", "append_value"), torch.ones(4, 2, 16).bfloat16()))
        assert len(checked) == 3 * count and once[0].sum() == 4 * 32  # one tensor twice is not what the guard has seen


@pytest.mark.parametrize(
    "other",
    [
        {"append_value": torch.zeros(5, 2, 16).bfloat16()},
        {"positions": torch.zeros(5).int()},
        {"positions": torch.zeros(4).long()},
        {"append_key": torch.zeros(4, 2, 16)},
        {"kv_indptr": torch.zeros(3).int()},
        {"v_cache": torch.zeros(3, 4, 2, 8).bfloat16()},
        {"k_cache": torch.zeros(3, 4, 2, 32).bfloat16()[..., ::2]},
    ],
)
def test_other_operands_of_a_cache_are_checked(other: dict[str, Tensor]) -> None:
    with context.use():
        append()
        with pytest.raises(KernelError):
            append(**other)


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


def test_columns_of_another_distance_are_checked_again(checked: list[str]) -> None:
    with context.use():
        static()
        count = len(checked)
        apart = torch.cat([X, X], dim=1)[:, :256]
        assert torch.equal(static(apart).view(torch.uint8), static().view(torch.uint8))
        assert len(checked) == 2 * count


def between(x: Tensor) -> Tensor:
    """The same values from an address between two words of 16 bytes."""
    memory = torch.empty(x.nbytes + x.element_size(), dtype=torch.uint8)
    return memory[x.element_size() :].view(x.dtype).view(x.shape).copy_(x)


def without_memory(x: Tensor) -> Tensor:
    copy = x.clone()
    copy.untyped_storage().resize_(x.nbytes - 64)
    return copy


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("operands", [1, 3])
@pytest.mark.parametrize("known", [False, True])
def test_properties_compared_in_a_repeated_call(
    known: bool, operands: int, owned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each operand with rows: its class, address, memory and rows; of the weight: its class and address. A release
    whose guard is not known sees the same by public names."""
    if not known:
        monkeypatch.setattr(fast, "GUARDS", None)
    weight = torch.zeros(64, 256), torch.ones(2, 2)
    usual = torch.zeros(8, 256).bfloat16(), torch.ones(8, 16), torch.zeros(8, 64)
    call = repeated.guarded(None, weight, usual[:operands], owned=owned).at(*weight)

    def rows(place: int | None = None, other: Tensor | None = None) -> int:
        operands_of: list[Tensor | None] = [*weight, *usual[:operands]]
        if place is not None:
            operands_of[place] = other
        return call.rows(*operands_of)

    assert {rows() for _ in range(repeated.WORTH + 2)} == {8}  # of three operands the last by a guard of its extents
    for place, x in enumerate(usual[:operands], 2):
        shorter = rows(place, x[:5])
        assert shorter == (5 if operands == 1 else 0)
        others = between(x), x.double(), x[None], x.t().contiguous().t(), x.clone().requires_grad_(), x[:, ::2], None
        assert not any(rows(place, other) for other in others)
        with torch.inference_mode():
            assert rows(place, x.clone()) == 0
        assert rows(place, without_memory(x)) == (0 if owned else 8)
        assert rows(place, nested(x)) == 0
    for place, x in enumerate(weight):
        assert rows(place, x.clone()) == rows(place, x.double()) == rows(place, x[:1]) == rows(place, None) == 0
        assert rows(place, x.view(torch.int32)) == rows(place, x.view(torch.float16)[:, ::2]) == 0
    with torch.autocast("cpu"):
        assert rows() == 0
    assert rows() == 8


def nested(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([x, x])


def test_a_guard_that_sees_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative test of the table above."""
    monkeypatch.setattr(fast, "GUARDS", None)
    monkeypatch.setattr(fast, "_facts", lambda x: (type(x),))
    with pytest.raises(AssertionError):
        test_properties_compared_in_a_repeated_call(False, 1, True, monkeypatch)


def test_a_release_with_another_guard_is_asked_by_public_names() -> None:
    """The compiled guard is taken for what it does, on every release of the matrix; one that admits too much, too
    little, or takes other arguments is not."""

    class Lax:
        def __init__(self, *tensors: Tensor, dynamic_dims_sizes: object, dynamic_dims_strides: object) -> None:
            self.check = lambda *_: True

    class Strict(Lax):
        def __init__(self, *tensors: Tensor, **dims: Any) -> None:
            super().__init__(*tensors, **dims)
            self.check = lambda *_: False

    assert fast.GUARDS is not None and fast._discerning(fast.GUARDS)
    assert not any(fast._discerning(other) for other in (Lax, Strict, None, lambda: None))


def test_a_call_learnt_in_inference_mode_is_no_call_outside(checked: list[str]) -> None:
    """Weights of one class share what is kept, but for what only the guard sees: each is quick in its own mode."""
    weight, scale = torch.zeros(64, 128).to(torch.float8_e4m3fn), torch.ones(1, 1)
    with context.use():
        x = torch.zeros(2, 128).bfloat16()
        with torch.inference_mode():
            inside = x.clone()
            blockscaled.deepgemm_blockscale_linear(inside, weight, scale)
        for operand in (x, x.clone()):
            blockscaled.deepgemm_blockscale_linear(operand, weight, scale)
        call = repeated.find(("deepgemm", False), weight, scale)
        assert call is not None and call.rows(weight, scale, x) == 2 and call.rows(weight, scale, inside) == 0


def test_weights_of_a_class_share_what_is_kept() -> None:
    """Whatever the number of rows, of column-major scales too: memory of a model does not grow with its calls."""
    out = torch.zeros(64, 64).bfloat16()
    weights = [(torch.zeros(64, 256).to(torch.float8_e4m3fn), torch.ones(1, 2)) for _ in range(5)]
    with context.use():
        for m, weight in enumerate([*weights, *weights], start=5):
            a = kernels.per_token_group_quant_fp8(torch.zeros(m, 256).bfloat16(), 128, column_major_scales=True)
            kernels.fp8_gemm_nt(a, weight, out[:m])
        kept = [repeated.find("fp8_gemm_nt", *weight) for weight in weights]
        guards = {id(inspect.getclosurevars(call.rows).nonlocals["learn"]) for call in kept if call is not None}
    assert len(guards) == 1 and len(kept) == 5
