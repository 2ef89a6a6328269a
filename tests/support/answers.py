"""What every verb answers about the smallest case of a contract, in a form that JSON keeps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from math import prod

import torch
from torch import Tensor

import oracle
from oracle import errors
from oracle.numbers.formats import codes_of
from oracle.routines import cases, get, profiles, registered
from oracle.routines.base import Call, plain
from oracle.tensorcore.identify import Match

NAMES = sorted(name for name in registered() if name in cases.grammars())
Answers = dict[str, object]


def smallest(name: str) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Inputs and options of the case with the smallest extents."""
    case = min(profiles.cases(name, "quick"), key=lambda c: (prod(size for _, size in c.extents), str(c)))
    return case.inputs(), case.call_options()


def expected(name: str, inputs: Mapping[str, Tensor], **options: object) -> dict[str, Tensor]:
    """The right outputs of a call, by name."""
    contract = get(name)
    return contract.expected(Call(contract, inputs, options).checked())


def answers(
    name: str,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, object],
    change: Callable[[Tensor], Tensor] = lambda x: x,
) -> Answers:
    """What every verb says about the expected output and about a wrong one; ``change`` is made to every output."""
    right = expected(name, {n: plain(x, n) for n, x in inputs.items()}, **options)
    broken = {n: x.clone(memory_format=torch.preserve_format) for n, x in right.items()}
    bits = next(iter(broken.values()))
    bits = codes_of(bits) if bits.is_floating_point() else bits
    bits[(-1,) * bits.dim()] = ~bits[(-1,) * bits.dim()]
    right, wrong = ({n: change(x) for n, x in out.items()} for out in (right, broken))
    return {
        "reference": said(lambda: oracle.reference(name, inputs, **options)),
        "judge": said(lambda: oracle.judge(name, inputs, right, **options)),  # type: ignore[arg-type]
        "judge a wrong one": said(lambda: oracle.judge(name, inputs, wrong, **options)),  # type: ignore[arg-type]
        "predict": said(lambda: oracle.predict(name, inputs, **options)),  # type: ignore[arg-type]
        "identify": said(lambda: oracle.identify(name, inputs, right, **options)),  # type: ignore[arg-type]
    }


def said(call: Callable[[], object]) -> object:
    """An answer in a form that JSON keeps; a typed error is one."""
    try:
        found = call()
    except errors.OracleError as error:
        return f"{type(error).__name__}: {error}"
    if isinstance(found, Tensor):
        return digest(found)
    if isinstance(found, dict):
        return {name: digest(x) for name, x in found.items()}
    if isinstance(found, list):
        return [[m.schedule, m.equal, m.compared] for m in found if isinstance(m, Match)]
    assert isinstance(found, oracle.Verdict)
    return json.loads(json.dumps(found.to_json()))


def digest(x: Tensor) -> str:
    bits = codes_of(x) if x.is_floating_point() else x
    held = hashlib.sha256(bits.contiguous().numpy().tobytes()).hexdigest()
    return f"{x.dtype} {list(x.shape)} {x.device} {type(x).__name__} {x.requires_grad} {held}"
