"""One fault: a small mutation of a right kernel, and how one is declared.

A right kernel of a scaled product is a sequence of stages; a fault replaces the value that passes between two of them::

    READ        the inputs as the kernel reads them (layouts, casts, indices)
    PRODUCT     each ScaledProduct: which scale meets which block
    SCHEDULE    the arithmetic: instruction, interval, promotion, epilogue
    SUM         the float32 result of one product before the store
    STORE       the same, after the store into the output dtype
    WRITE       the whole output [R, N]

A quantiser has the stages READ, OPTIONS, RECIPE (its record), AMAX, QUOTIENT (x / s before the cast), CODES and SCALE
(what it publishes); MQA logits have READ and WRITE; contracts whose right kernel is their reference READ, OPTIONS and
WRITE. Faults compose: :func:`run` applies the changes of several faults, stage by stage, in the order given.
:meth:`Faults.declare` is how a fault is written down, in this project and in any other.

The value of an out-of-bounds read, and of memory that is never written, cannot be known; ``Call.beyond`` chooses it for
the mutant: other data of the same buffer (``WRAP``), or NaN, which matches anything (``UNKNOWN``).
Not covered: faults of behaviour (crashes, races, writes out of bounds); :mod:`oracle.routines.catalogue` names them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from oracle.errors import ContractError, OptionError
from oracle.numbers.formats import same_bits
from oracle.routines.base import Beyond as Beyond
from oracle.routines.base import Call as Call
from oracle.routines.base import Change as Change
from oracle.routines.base import Fault as Fault
from oracle.routines.base import WhyNot as WhyNot
from oracle.routines.base import always as always
from oracle.routines.base import fold as fold
from oracle.routines.base import registered
from oracle.routines.base import touches as touches
from oracle.routines.records import Family as Family
from oracle.routines.records import Stage as Stage
from oracle.routines.traits import Trait

INDEX, VALUE, CAST = Family.SCALE_INDEX, Family.SCALE_VALUE, Family.CAST
MOVEMENT, ARITHMETIC = Family.MOVEMENT, Family.ARITHMETIC


def need(holds: Callable[[Call], object], otherwise: str | Callable[[Call], str]) -> WhyNot:
    """What a call must have for a fault to show, and the reason to give where it does not hold."""

    def why_not(call: Call) -> str | None:
        if holds(call):
            return None
        return otherwise if isinstance(otherwise, str) else otherwise(call)

    return why_not


def given(name: str) -> WhyNot:
    """The need for an optional input: the call has one of this ``name``."""
    return need(lambda call: name in call.inputs, f"no {name} is given")


def both(*needs: WhyNot) -> WhyNot:
    """All of these needs, in this order: the first reason counts."""
    return lambda call: next((reason for needed in needs if (reason := needed(call)) is not None), None)


def change_of(function: Callable[..., Any]) -> Change:
    """``function`` as a change: called with the call and the value, or with the value alone where it takes one.

    Raises
    ------
    OptionError
        The function takes neither one argument nor two, or does not say (a builtin).
    """
    if isinstance(function, FunctionType) and not hasattr(function, "__wrapped__"):
        # what a signature says, in a tenth of the time: there are some fifteen hundred of them
        takes = function.__code__.co_argcount - len(function.__defaults__ or ())
    else:
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:
            raise OptionError(f"{function!r} does not say what it takes; write a lambda around it") from None
        takes = sum(p.kind <= p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)
    if takes not in (1, 2):
        raise OptionError(f"{function!r} takes {takes} arguments; a change takes (call, value) or (value)")
    return function if takes == 2 else lambda call, value: function(value)


def entry(name: str, function: Callable[..., Any]) -> Change:
    """A change of one tensor by name: an input (READ) or one of several outputs (WRITE)."""
    change = change_of(function)
    return lambda call, tensors: tensors | {name: change(call, tensors[name])}


def entries(names: Iterable[str], function: Callable[[Tensor], Tensor]) -> Change:
    """A change of several tensors, inputs (READ) or outputs (WRITE): those of these ``names`` that are there."""
    return lambda call, tensors: tensors | {n: function(tensors[n]).contiguous() for n in names if n in tensors}


def ones(x: Tensor) -> Tensor:
    """1 for every element of ``x``, in its shape (any) and dtype, for NaN too: a scale or a weight that is dropped.

    Source: derived in this file."""
    return torch.ones_like(x)


Function = TypeVar("Function", bound=Callable[..., Any])


def named(names: Iterable[str]) -> Trait:
    """The contracts of these names; for a fault that one routine alone can have, in the folder of that routine."""
    known = frozenset(names)
    return Trait(", ".join(sorted(known)), lambda contract: contract.name in known)


@dataclass(frozen=True)
class Way:
    """One fault of a declaration of several; see :func:`way`."""

    words: str
    change: Any
    own: Mapping[str, Any]

    def but(self, **own: Any) -> Way:
        """The same with other arguments of its own."""
        return replace(self, own={**self.own, **own})


def way(words: str, change: Any = None, **own: Any) -> Way:
    """One of the ways that a declaration goes ``over``.

    Parameters
    ----------
    words : what stands for ``{}`` in the name.
    change : what the stages of the declaration are made with: a change of a tensor, a part, an option.
    own : arguments of :meth:`Faults.declare` that this way has for itself (``seen``, ``needs``, ``on``, ``same_if``..).
    """
    return Way(words, change, own)


class Faults:
    """The faults of one family of contracts, in the order in which they are declared::

        FAULTS = Faults(of_class(ProductContract))
        fault = FAULTS.declare

        fault(
            "A scale of the {} row",
            INDEX,
            over=(way("previous", 1), way("next", -1)),
            seen="this page",
            read=lambda step: entry("a_scale", lambda scale: scale.roll(step, dims=0)),
        )

        @fault("store truncates", CAST, seen="H200 mutants", same_if="every sum is a value of the output dtype")
        def store_truncated(call, acc): ...

    Iteration gives the :class:`Fault` records. ``on`` is the trait of the contracts that a fault of this family applies
    to unless its declaration gives another.
    """

    def __init__(self, on: Trait) -> None:
        self.on = on
        self._found: dict[str, Fault | None] = {}

    def declare(
        self,
        name: str,
        family: Family,
        *,
        seen: str = "",
        over: tuple[Way, ...] = (),
        needs: WhyNot = always,
        same_if: str = "",
        admissible_if: str = "",
        on: Trait | None = None,
        race: bool = False,
        by_code: bool = False,
        **stages: Callable[..., Any],
    ) -> Callable[[Function], Function]:
        """Declare a fault: a line with its changes as keywords, or a decorator of its one change.

        A change takes the call and the value of its stage, or the value alone, and returns the value that the faulty
        kernel goes on with; it leaves what it was given as it was. The keyword is the stage: ``read=``, ``store=``
        and so on, as :class:`Stage` has them. Without such a keyword the declaration decorates a function, whose name
        is the stage or begins with it: ``def amax(...)``, ``def write_tail_twice(...)``.

        Parts, neighbours and options of one idea are one declaration ``over`` its ways: a fault for each, whose name
        has the words of the way for ``{}``, and whose stages are what the keywords make of the change of the way.

        Parameters
        ----------
        name : what is wrong, in words; unique.
        family : :class:`Family`.
        seen : the source: an issue or a pull request, or the run that measured it; where there is none, "no public
            thread:" and the mechanism.
        over : the ways of a declaration of several faults, in the order of the catalogue; see :func:`way`.
        needs : the reason for which a given call cannot show it, or None; see :func:`need` and :func:`both`.
        same_if : the argument for which the mutant may give the right bits.
        admissible_if : the argument for which its wrong bits may be admissible.
        on : the trait of the contracts that it applies to; None takes that of the family.
        race : whether it is the order of two stores, so that any subset of the changed elements may be right.
        by_code : whether it changes the codes of a product's operands one by one, and nothing else.

        Raises
        ------
        OptionError
            The name or the source is empty, the name is taken, there is no such stage, or no stage is named.
        ContractError
            No registered contract has the trait; raised when the faults are read, since a family may declare faults
            before every contract is known.
        """
        if over:
            common: dict[str, Any] = {"family": family, "seen": seen, "needs": needs, "same_if": same_if, "on": on}
            common |= {"admissible_if": admissible_if, "race": race, "by_code": by_code}
            for one in over:
                own_changes = {stage: make(one.change) for stage, make in stages.items()}
                self.declare(name.replace("{}", one.words), **{**common, **one.own}, **own_changes)
            return _declared
        applied = on or self.on
        if not name or not seen:
            raise OptionError(f"fault {name!r} needs {'a source: where it was met (seen=)' if name else 'a name'}")
        if name in self._found:
            raise OptionError(f"fault {name!r} is declared twice")

        def keep(changes: Mapping[str, Callable[..., Any]]) -> None:
            by_stage = {_stage(name, word): change_of(function) for word, function in changes.items()}
            self._found[name] = Fault(
                name, family, seen, by_stage, applied, needs, same_if, admissible_if, race, by_code
            )

        def decorate(function: Function) -> Function:
            if stages:
                raise OptionError(f"fault {name!r} has its changes already: {', '.join(stages)}")
            keep({function.__name__.split("_")[0]: function})
            return function

        if stages:
            keep(stages)
        else:
            self._found[name] = None  # its place, until the decorated function comes
        return decorate

    def __iter__(self) -> Iterator[Fault]:
        known, held = list(registered().values()), set()
        for name, fault in self._found.items():
            if fault is None:
                raise OptionError(f"fault {name!r} changes nothing: name a stage, or decorate a function with it")
            if fault.on not in held:
                at = next((i for i, contract in enumerate(known) if fault.on.holds(contract)), None)
                if at is None:
                    raise ContractError(
                        f"fault {name!r} applies to no registered contract: none has the trait {fault.on}"
                    )
                known.insert(0, known.pop(at))  # the next one often applies to it too
                held.add(fault.on)
            yield fault


def _declared(function: Function) -> Function:
    raise OptionError(f"a declaration over several ways decorates no function; give {function.__name__} by a keyword")


def _stage(name: str, word: str) -> Stage:
    try:
        return Stage(word)
    except ValueError:
        stages = ", ".join(stage.value for stage in Stage)
        raise OptionError(f"fault {name!r} changes {word!r}, which is no stage; stages are: {stages}") from None


def agree(x: Tensor, y: Tensor) -> Tensor:
    """Bool of their shape: elements of ``x`` and ``y`` (any shape, the same shape) with equal bits.

    Any NaN equals any NaN, and -0 is not 0. Of other dtypes, equal values. Source: derived in
    :func:`oracle.numbers.formats.same_bits`.
    """
    if x.dtype != y.dtype:
        return x.to(torch.float64) == y.to(torch.float64)
    if not x.is_floating_point():
        return x == y
    if x.dtype is torch.float64:  # no format of a kernel, but the output of a contract that measures one
        return (x.view(torch.int64) == y.view(torch.int64)) | (torch.isnan(x) & torch.isnan(y))
    return same_bits(x.contiguous(), y.contiguous())
