"""Adapters: how the named inputs and options of a contract become one call of a verb.

An adapter takes the verb, inputs and options; it allocates outputs where the verb writes into one, and never writes
into an input. The usual one passes everything by name (:func:`by_name`); one that serves a single family stands in the
file of the family.

NaN and infinity: no value is read.
Source: the signatures of the verbs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .errors import OptionError, shown

Inputs = Mapping[str, Tensor]
Options = Mapping[str, Any]
Outputs = Tensor | dict[str, Tensor]
Adapter = Callable[[Callable[..., Any], Inputs, Options], Outputs]
Runner = Callable[[Inputs, Options], Outputs]
"""A verb on the inputs and options of its contract."""
NONE: Mapping[str, Any] = MappingProxyType({})


def by_name(
    *outputs: str,
    renamed: Mapping[str, str] = NONE,
    defaults: Mapping[str, Any] = NONE,
    converted: Mapping[str, Callable[[Tensor], Any]] = NONE,
) -> Adapter:
    """Inputs and options under their own names, or as ``renamed`` says.

    outputs : names of the results in order, those that are None left out; none where the contract has one output.
    defaults : options of the verb where the contract's call names none.
    converted : functions of inputs that the verb takes otherwise.
    """

    def run(verb: Callable[..., Any], inputs: Inputs, options: Options) -> Outputs:
        arguments = {name: converted[name](x) if name in converted else x for name, x in inputs.items()}
        result = verb(**{renamed.get(name, name): x for name, x in arguments.items()}, **{**defaults, **options})
        if not outputs:
            whole: Tensor = result
            return whole
        parts = (result,) if isinstance(result, Tensor) else result
        return {name: x for name, x in zip(outputs, parts, strict=True) if x is not None}

    return run


def in_place(*written: str) -> Adapter:
    """Verbs that write into inputs: copies of these, as the verb left them."""

    def run(verb: Callable[..., Any], inputs: Inputs, options: Options) -> dict[str, Tensor]:
        copies = {name: torch.empty_like(inputs[name]).copy_(inputs[name]) for name in written}
        verb(**{**inputs, **copies}, **options)
        return copies

    return run


def by_row(*outputs: str) -> Adapter:
    """Integer verbs, called once for each row of the input columns of either width: int64, as Python's integers; of a
    record one output for each field."""

    def run(verb: Callable[..., Any], inputs: Inputs, options: Options) -> Outputs:
        columns = {name: t.tolist() for name, t in inputs.items()}
        rows = [verb(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        table = torch.tensor(rows, dtype=torch.int64, device="cpu")
        return {name: table[:, i].contiguous() for i, name in enumerate(outputs)} if outputs else table

    return run


def paired(*extents: tuple[str, int], more: tuple[str, ...] = ()) -> Adapter:
    """DeepGEMM's verbs ``(a, scale), (b, scale), out``, into a fresh output of zeros.

    extents : the input and its axis of each extent of the output.
    more : further inputs.
    """

    def run(verb: Callable[..., Any], inputs: Inputs, options: Options) -> Tensor:
        dtype = options.get("out_dtype", torch.float32 if "c" in more else torch.bfloat16)
        out = torch.zeros([inputs[name].shape[axis] for name, axis in extents], dtype=dtype, device=inputs["a"].device)
        named = {name: inputs[name] for name in more if name in inputs}
        verb(*pairs(inputs), out, **{name: int32(x) if name == "m_indices" else x for name, x in named.items()})
        return out

    return run


def pairs(inputs: Inputs) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Codes and scales of ``a`` and ``b``.

    Codes E4M3 and scales float32 of any shape; returns the same tensors, ``(a, a_scale), (b, b_scale)``.
    """
    return (inputs["a"], inputs["a_scale"]), (inputs["b"], inputs["b_scale"])


def runs(verb: Callable[..., Any], inputs: Inputs, options: Options) -> Tensor:
    """Products of runs of rows, whose integers a contract may give as int64.

    Returns the verb's result, ``[M, N]`` of the output dtype.
    """
    whole = ("m_indptr", "expert_offsets", "problem_sizes")
    arguments = {name: int32(x) if name in whole else x for name, x in inputs.items()}
    result: Tensor = verb(**arguments, out_dtype=out_dtype_of(options))
    return result


def out_dtype_of(options: Options) -> torch.dtype:
    """The output dtype of a call, bf16 when none is named; OptionError when it is no dtype."""
    dtype = options.get("out_dtype", torch.bfloat16)
    if not isinstance(dtype, torch.dtype):
        raise OptionError(f"out_dtype must be a torch dtype, got {shown(dtype)}")
    return dtype


def int32(x: Tensor) -> Tensor:
    """The same integers as int32.

    ``x`` integers of any shape; returns int32 of the same shape.
    """
    return x.to(torch.int32)
