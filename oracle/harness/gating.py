"""Calls of bound routines, each accepted by the gate or raised: a judge for a harness that makes the calls itself.

    with gated("flashinfer.gemm:bmm_fp8"):
        fuzz()                              # an AssertionError where an output is inadmissible

A harness that fuzzes a library, or replays an engine, knows its own inputs and has a comparison of its own. Here the
calls are taken where they are made (:mod:`oracle.harness.interception`), read by the routine's binding
(:mod:`oracle.bindings`), and judged before the caller gets the result. Nothing else changes.

Not covered: what :mod:`oracle.harness.interception` does not see.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor

import oracle
from oracle.bindings.binding import Binding, UnboundError
from oracle.bindings.known import bindings
from oracle.errors import OptionError, among
from oracle.harness.interception import Interception, Run
from oracle.harness.recorder import arch_of


def gated(*targets: str | Binding, arch: str | None = None) -> Gated:
    """A context manager in which every call of these routines is accepted, or raises.

    Parameters
    ----------
    targets : ``"MODULE:CALLABLE"`` of a known binding (``fp8-oracle list bindings``), or a binding.
    arch : whose arithmetic is admitted, as for :func:`oracle.judge`; None is that of the device of the call.

    Returns
    -------
    Gated
        ``accepted`` counts calls; ``left`` has those that no binding describes, by the reason: they are not judged. A
        call whose output is rejected raises :class:`oracle.NonconformanceError`, an AssertionError that says why.

    Raises
    ------
    OptionError
        No target is named, or one has no binding.
    """
    own: dict[str, list[Binding]] = {}
    known = [one.target for one in bindings()]
    for target in targets:
        if isinstance(target, str) and target not in known:
            raise OptionError(f"{target} has no binding; {among(target, known, see='fp8-oracle list bindings')}")
        result = [target] if isinstance(target, Binding) else [one for one in bindings() if one.target == target]
        own.setdefault(result[0].target, []).extend(result)
    if not own:
        raise OptionError("name a routine whose calls pass the gate, as flashinfer.gemm:bmm_fp8")
    return Gated(own, arch)


class Gated:
    """Made by :func:`gated`; may be entered once."""

    def __init__(self, targets: Mapping[str, Sequence[Binding]], arch: str | None) -> None:
        self.accepted, self.left = 0, Counter[str]()
        self._bindings, self._arch, self._inside = targets, arch, threading.local()

    def __enter__(self) -> Self:
        loads = {module for several in self._bindings.values() for one in several for module in one.loads}
        self._interception = Interception(self._bindings, loads, self._around)
        return self

    def __exit__(self, *_: object) -> None:
        self._interception.remove()

    def _around(self, target: str, run: Run, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if getattr(self._inside, "judging", False):  # the judge may call the routine too
            return run()
        updated = {one.name: _before(one, args, kwargs) for one in self._bindings[target]}
        result, reasons = run(), list[str]()
        for binding in self._bindings[target]:
            try:
                bound = binding.read(args, kwargs, returned=result)
            except UnboundError as error:  # counted below, unless another binding describes the call
                reasons.append(str(error))
                continue
            inputs = {**bound.inputs, **updated[binding.name]}
            self._inside.judging = True
            try:
                self._pass(binding, inputs, bound.outputs, bound.options)
            finally:
                self._inside.judging = False
            return result
        self.left["; ".join(reasons)] += 1
        return result

    def _pass(
        self,
        binding: Binding,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        options: Mapping[str, Any],
    ) -> None:
        """Raises NonconformanceError: the gate rejects the output."""
        arch = self._arch or arch_of(next(iter(inputs.values())).device)
        named = {name: value for name, value in options.items() if name != "out_dtype"}
        if not oracle.gate(binding.contract, arch=arch)(inputs, outputs, **named):
            oracle.judge(binding.contract, inputs, outputs, arch=arch, **named).raise_for_status()
        self.accepted += 1


def _before(binding: Binding, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The inputs that a call updates in place, as they are before it."""
    try:
        return binding.updated(args, kwargs)
    except UnboundError:  # read() says it again
        return {}
