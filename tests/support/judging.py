"""Judgements of several outputs of one call: what does not depend on the output is found once."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from oracle.routines import get
from oracle.routines.base import Call
from oracle.verdict.compare import Verdict

KEPT = 8
_calls: dict[tuple[object, ...], Call] = {}


def judged(name: str, inputs: Mapping[str, Tensor], out: Tensor, *, arch: str, **options: object) -> Verdict:
    """The verdict on ``out``; the call is that of the last outputs where the inputs are the same tensors, unwritten."""
    tensors = tuple((n, id(x), x._version) for n, x in inputs.items())
    key = (name, arch, out.dtype, tensors, tuple(sorted(options.items(), key=str)))
    if key not in _calls:
        if len(_calls) == KEPT:
            del _calls[next(iter(_calls))]
        _calls[key] = Call(get(name), dict(inputs), options, out_dtype=out.dtype, arch=arch)
    return get(name).judged(_calls[key], out)
