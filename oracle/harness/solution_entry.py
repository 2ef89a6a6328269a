"""What the worker imports to run a solution of an evaluation suite: a copy of this file beside ``plan.json``.

The sources of the solution lie in ``sources/``, which comes first on the path; ``solution`` is its function, ``call``
the adapter that passes inputs in the order of the definition and, in destination-passing style, outputs that it makes.
It keeps the outputs of the last call, and raises where they have changed before the next one begins.
It needs nothing but torch, as it runs in a sandbox without the oracle.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCES = os.path.join(HERE, "sources")


def loaded(plan: Mapping[str, Any]) -> Any:
    """The function of a solution; whatever its sources raise is raised."""
    sys.path.insert(0, SOURCES)
    name = os.path.basename(plan["file"]).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, os.path.join(SOURCES, plan["file"]))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    function: Any = module
    for part in plan["function"].split("."):
        function = getattr(function, part)
    return function


def call(kernel: Any, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> Any:
    """The outputs of one call by the contract's names, or what the solution returned in their place."""
    del options  # numbers are in the plan
    for remaining, copy in LAST:
        if not torch.equal(_bytes(remaining), copy):
            raise RuntimeError("an output of the last call was written after that call had returned")
    axes, arguments = dict(PLAN["axes"]), []
    for one in PLAN["inputs"]:
        if "value" in one:
            arguments.append(one["value"])
            continue
        tensor = inputs[one["from"]]
        arguments.append(tensor.t() if one["transposed"] else tensor)
        axes.update(zip(one["shape"], arguments[-1].shape, strict=True))
    due = PLAN["outputs"]
    if not PLAN["destination"]:
        result = kernel(*arguments)
        if isinstance(result, Mapping):
            result = [result[one["name"]] for one in due]
        result = [result] if isinstance(result, Tensor) else result
    else:
        device = next(iter(inputs.values())).device
        result = [
            torch.empty([axes[axis] for axis in one["shape"]], dtype=getattr(torch, one["dtype"]), device=device)
            for one in due
        ]
        kernel(*arguments, *result)
    if not isinstance(result, tuple | list) or len(result) != len(due):
        return result  # no result, as the worker says
    supplied = {x.untyped_storage().data_ptr() for x in inputs.values()}
    own = [x for x in result if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in supplied]
    LAST[:] = [(x, _bytes(x).clone()) for x in own]
    return {one["as"]: x for one, x in zip(due, result, strict=True)}


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().flatten().view(torch.uint8)


LAST: list[tuple[Tensor, Tensor]] = []


if os.path.exists(os.path.join(HERE, "plan.json")):
    with open(os.path.join(HERE, "plan.json")) as _stream:
        PLAN: Mapping[str, Any] = json.load(_stream)
    solution = loaded(PLAN)
