"""Routines that have bindings, as subjects of ``verify``: their verdicts and captures beside those of the layer.

    fp8-oracle verify --provider oracle.harness.bound:subjects --subject vllm.cutlass_scaled_mm --arch sm90 --keep DIR

A subject is named as its row of the gallery, ``PROJECT.ROUTINE``. Not covered: calls that a routine takes and answers
wrongly, which are scripts (:mod:`oracle.harness.finding_scripts`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oracle.bindings.binding import Binding
from oracle.bindings.known import bindings, find
from oracle.errors import OptionError
from oracle.harness.recorder import arch_of


def routine_of(binding: Binding) -> Callable[..., Any]:
    """The function or operator of a binding, once its library has registered it.

    Raises ImportError: the library is not installed; AttributeError: its release has no such routine.
    """
    binding.load()
    module, _, name = binding.target.partition(":")
    routine: Any = importlib.import_module(module)
    for part in name.split("."):
        routine = getattr(routine, part.removesuffix("()"))
        routine = routine() if part.endswith("()") else routine
    return routine  # type: ignore[no-any-return]


def call_of(
    target: str, contract: str, inputs: Mapping[str, Tensor], options: Mapping[str, object]
) -> Callable[[], Any]:
    """A call of a routine that is laid out already, to be timed: it writes its outputs into the same memory each time.

    Takes inputs and options as :func:`oracle.judge`; NaN and infinities are handed on. Raises OptionError: the routine
    has no binding under this contract; NotImplementedError: the routine does not take the call. Source: the binding.
    """
    if (binding := find(target, contract)) is None:
        raise OptionError(f"{target} has no binding under {contract}; see fp8-oracle list bindings")
    chosen = {spec.name: spec.default for spec in binding.routine.options} | dict(options)
    routine, (positional, named, _) = routine_of(binding), binding.arguments(inputs, chosen)
    return lambda: routine(*positional, **named)


@dataclass(frozen=True)
class Bound:
    """One routine; see :class:`oracle.harness.subjects.Subject`."""

    binding: Binding

    @property
    def name(self) -> str:
        return self.binding.shown

    @property
    def contract(self) -> str:
        return self.binding.contract

    @property
    def numerics(self) -> str | None:
        return self.binding.numerics

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def arch(self) -> str:
        return arch_of(torch.device(self.device))

    def why_not(self) -> str | None:
        if (unserved := self.binding.unserved(self.arch)) is not None:
            return unserved
        try:
            routine_of(self.binding)
        except (ImportError, AttributeError) as error:  # the reason why it cannot run, which is what is asked for
            return f"{type(error).__name__}: {error}"
        return None

    def run(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> dict[str, Tensor]:
        """The outputs by the contract's names, NaN and infinities as the routine gives them. Raises as the binding's
        call. Source: the binding."""
        return self.binding(routine_of(self.binding), inputs, options)


def subjects() -> list[Bound]:
    """Every routine that has a binding."""
    return list(map(Bound, bindings()))
