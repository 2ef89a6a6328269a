"""Bad input of every verb: one typed error that names an argument, or a right answer; nothing else.

The bad calls follow from the verb: its signature, the shapes of its docstring, what it writes, and one right call
(:mod:`tests.support.bad_input`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kernels import checks
from kernels.errors import DtypeError, KernelError, LayoutError, ShapeError
from kernels.verbs import VERBS
from tests.support.bad_input import problems
from tests.support.declared_shapes import shapes, symbols
from tests.support.verb_calls import arguments, fresh, unserved

CALLS = arguments("cpu")
UNSERVED = [pytest.param(name, marks=pytest.mark.skip(reason=why)) for name, why in unserved("cpu").items()]
NAMES = [*CALLS, *UNSERVED]


def writes(name: str) -> tuple[str, ...]:
    """The arguments that a verb writes, those of its operator, or ``out``."""
    return (*(VERBS[name.partition(" ")[0]].writes or ()), "out")


def outcome(name: str, given: dict[str, Any]) -> tuple[Any, Any]:
    """What a call returns and writes, and its other arguments after it."""
    result = CALLS[name][0](**given)
    written = {n: x for n, x in given.items() if n in writes(name)}
    return bits((None if callable(result) else result, written)), bits({**given, **dict.fromkeys(written)})


@pytest.mark.filterwarnings("ignore:Use of index_put_ on expanded tensors")
@pytest.mark.parametrize("name", NAMES)
def test_one_typed_error(name: str) -> None:
    assert not problems(*CALLS[name], writes(name))


def strided(x: Any) -> Any:
    """The same values in every second element of a wider tensor."""
    if not isinstance(x, Tensor) or not x.dim():
        return x
    stored = x.view(torch.uint8) if x.element_size() == 1 else x
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=stored.dtype)
    wide[..., ::2] = stored
    return wide[..., ::2].view(x.dtype)


def raw(x: Any) -> Any:
    """The bytes of a tensor in the order of its elements."""
    if not isinstance(x, Tensor):
        return x
    dense = torch.empty(x.shape, dtype=x.dtype).copy_(x)
    return dense.flatten().view(torch.uint8).numpy().tobytes()


def bits(result: Any) -> Any:
    return tree_map(raw, result)


@pytest.mark.parametrize("name", NAMES)
def test_strides_are_followed_or_refused(name: str) -> None:
    """An operand in every second element gives the bits of a dense one, or a LayoutError; no operand is written."""
    given = CALLS[name][1]
    operands = {n: bits(x) for n, x in given.items() if n not in writes(name)}
    right, after = outcome(name, fresh(given))
    assert all(after[n] == x for n, x in operands.items())
    for argument in operands:
        with contextlib.suppress(LayoutError):
            result, after = outcome(name, {**fresh(given), argument: tree_map(strided, given[argument])})
            assert result == right, argument
            assert all(after[n] == x for n, x in operands.items())


@pytest.mark.parametrize("name", NAMES)
def test_declared_shapes_are_those_of_a_right_call(name: str) -> None:
    """A symbol that stands alone in two shapes is one extent; a shape has the rank of its operand."""
    verb, given = CALLS[name]
    extents: dict[str, set[int]] = {}
    for argument, x in given.items():
        for dims in shapes(verb).get(argument, ()) if isinstance(x, Tensor) else ():
            if len(dims) == x.dim() and "..." not in dims and x.numel() > 1:
                for extent, size in zip(dims, x.shape, strict=True):
                    if len(shapes(verb)[argument]) == 1 and symbols(extent) == {extent}:
                        extents.setdefault(extent, set()).add(size)
                    assert not extent.isdecimal() or len(shapes(verb)[argument]) > 1 or int(extent) == size
        ranks = {len(dims) for dims in shapes(verb).get(argument, ())}
        if isinstance(x, Tensor) and ranks and not any("..." in d for d in shapes(verb)[argument]):
            assert x.dim() in ranks or x.numel() == 1, argument
    assert {symbol: sizes for symbol, sizes in extents.items() if len(sizes) > 1} == {}


def careful(a: Tensor, scale: Tensor, out: Tensor, eps: float = 0.5) -> None:
    """``out = a * scale``.

    ``a`` ``[M, K]`` and ``out`` ``[M, K]`` float32, ``scale`` ``[M, 1]`` float32.
    """
    m, k = checks.dtype("a", checks.rank("a", a, 2), torch.float32).shape
    checks.operand("scale", scale, (m, 1), "[M, 1]", torch.float32)
    checks.output("out", out, (m, k), "[M, K]", torch.float32)
    checks.same_device(a=a, scale=scale, out=out)
    out.copy_(a * scale * checks.number("eps", eps))


RIGHT = {"a": torch.ones(4, 6), "scale": torch.ones(4, 1), "out": torch.zeros(4, 6), "eps": 0.5}


def test_a_verb_with_every_check() -> None:
    assert not problems(checks.checked(careful), RIGHT, ("out",))


def test_a_tensor_is_shown_without_its_elements() -> None:
    """A freed tensor, and one whose subclass differs: the message reads no memory."""
    from kernels.errors import shown

    freed = torch.ones(3, device="cpu")
    freed.untyped_storage().resize_(0)
    assert shown(freed) == "a Tensor of torch.float32"
    assert shown([freed, "floor"]) == "[a Tensor of torch.float32, 'floor']"


@pytest.mark.parametrize(
    ("check", "without", "missed"),
    [
        ("dtype", lambda name, x, *dtypes: x, "complex"),
        ("rank", lambda name, x, *ranks: x, "axis"),
        ("shape", lambda name, x, expected, meaning: x, "scale: axis 0"),
        ("same_device", lambda **tensors: next(iter(tensors.values())).device, "on another device"),
        ("disjoint", lambda name, x: x, "elements at one address"),
        ("number", lambda name, value: value, "nan"),
    ],
)
def test_a_verb_without_a_check_is_noticed(
    monkeypatch: pytest.MonkeyPatch, check: str, without: Callable[..., Any], missed: str
) -> None:
    """The negative test: each check of a verb in turn does nothing."""
    monkeypatch.setattr(checks, check, without)
    assert any(missed in problem for problem in problems(checks.checked(careful), RIGHT, ("out",)))


def test_an_error_that_names_nothing_is_noticed() -> None:
    """The negative test of the message, and of the class."""

    def mute(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise DtypeError("wrong")
        if x.dim() != 2:
            raise ValueError("x has another rank")
        return x * 2

    found = problems(checks.checked(mute), {"x": torch.ones(2, 3)})
    assert any("without a name" in problem for problem in found)
    assert any("raises ValueError" in problem for problem in found)


@pytest.mark.parametrize(
    "name", ["mm_fp4", "mm_mxfp8", "scaled_mm", "bmm_mxfp8", "cutlass_scaled_mm", "torch_per_tensor_w8a8_scaled_mm"]
)
def test_a_row_major_square_is_refused(name: str) -> None:
    """A weight ``[N, K]`` whose transpose was forgotten has the right shape where it is square."""
    verb, given = CALLS[name]
    operand = next(n for n in ("b", "mat_b", "weight") if n in inspect.signature(verb).parameters)
    stored = given[operand].view(torch.uint8)
    with pytest.raises((LayoutError, ShapeError), match=f"{operand} .* row-major"):
        verb(**{**fresh(given), operand: stored.contiguous().view(given[operand].dtype)})


@pytest.mark.turns(4)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.whole("each is another verb")
@pytest.mark.parametrize("name", NAMES)
def test_a_nested_tensor_after_a_right_call(name: str) -> None:
    """Refused; torch's guard of a repeated call would end the process at one."""
    function, right = arguments("cpu")[name]
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for _ in range(2):
        function(**fresh(right))
    for key, value in right.items():
        if isinstance(value, torch.Tensor):
            with pytest.raises(KernelError):
                function(**{**fresh(right), key: nested})
