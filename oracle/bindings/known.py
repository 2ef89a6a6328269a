"""The bindings of the suite and of installed distributions, and how a routine is found among them.

A distribution adds its own by an entry point of group ``fp8_oracle.bindings`` that gives an iterable of
:class:`~oracle.bindings.binding.Binding` records.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from oracle.bindings import blocked, deep_gemm, flag_gems, flashinfer, references, sglang, torch_itself, torchao, vllm
from oracle.bindings.binding import Binding
from oracle.errors import OptionError, among
from oracle.extensions import added

LIBRARIES = (torch_itself, deep_gemm, vllm, flashinfer, sglang, torchao, blocked, flag_gems, references)
OWN = tuple(binding for library in LIBRARIES for binding in library.BINDINGS)
GROUP = "fp8_oracle.bindings"


@cache
def bindings() -> tuple[Binding, ...]:
    """Every binding, those of this suite first.

    Raises ExtensionError: an entry point cannot be loaded, or adds a binding that is there already.
    """
    return (*OWN, *added(GROUP, Binding, known=[one.name for one in OWN], many=True))


def find(target: str, contract: str | None = None) -> Binding | None:
    """The binding of a routine, ``"MODULE:CALLABLE"``, under this contract; without one, under the contract that has
    the routine's name, or else under the only one it has a binding of.

    None: a contract is named, and the routine has no binding under it.

    Raises OptionError: no contract is named, and the routine has no binding, or several.
    """
    own = [one for one in bindings() if one.target == target]
    if contract is not None:
        return next((one for one in own if one.contract == contract), None)
    if not own:
        near = among(target, [one.target for one in bindings()], see="fp8-oracle list bindings")
        raise OptionError(f"no binding says how {target} is called; name a contract, or {near}")
    own = [one for one in own if one.contract == re.split(r"[:.]", target)[-1]] or own
    if len(own) > 1:
        raise OptionError(f"{target} has bindings of several contracts; name one: {', '.join(o.contract for o in own)}")
    return own[0]


def adapter_of(binding: Binding) -> str:
    """The adapter ``"MODULE:NAME"`` by which a worker process calls the binding's routine."""
    path = binding.target.replace(":", ".").replace("()", "")
    return f"{__name__}:BOUND.{binding.contract}.{path}"


class _Bound:
    """``BOUND.CONTRACT.MODULE.CALLABLE``: the binding, once its library has registered its operators."""

    def __init__(self, path: str = "") -> None:
        self._path = path

    def __getattr__(self, name: str) -> _Bound:
        path = f"{self._path}.{name}".lstrip(".")
        for one in bindings():
            known = adapter_of(one).partition(":BOUND.")[2]
            if known == path:
                one.load()
                return _Bound(path)
            if known.startswith(f"{path}."):
                return _Bound(path)
        raise AttributeError(name)

    def __call__(self, kernel: Callable[..., Any], inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> Any:
        """As :meth:`Binding.__call__`. Shapes, dtypes, NaN and errors are those of the binding; source: the same."""
        return next(o for o in bindings() if adapter_of(o).endswith(f":BOUND.{self._path}"))(kernel, inputs, options)


BOUND = _Bound()
