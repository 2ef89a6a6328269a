"""How a kernel of a contract computes, found by probing it in a worker process.

:func:`probe` sends the probes of :func:`oracle.tensorcore.fingerprint.fingerprint` through the worker that
:func:`oracle.validate` uses, with its calling convention, time limit, guard zones and poison. A kernel that
raises, crashes, hangs or exits ends the question, not the process; what it prints, forks or does to its inputs reaches
nobody. The numbers are not judged, and what the watches see is not reported: that is :func:`validate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from oracle.errors import OptionError, SubjectError
from oracle.harness.memory import is_poison
from oracle.harness.process import Worker
from oracle.harness.session import Session
from oracle.harness.validation import LIMIT, arch_of, importable
from oracle.routines import get, registered
from oracle.tensorcore.fingerprint import Fingerprint, Kernel, fingerprint
from oracle.tensorcore.probes import Shape


def probe(
    kernel: str | Callable[..., object],
    contract: str,
    *,
    adapter: str | Callable[..., object] | None = None,
    device: str = "cpu",
    k: int = 512,
    out_dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    limit: float = LIMIT,
) -> Fingerprint:
    """Find out how ``kernel`` computes.

    Parameters
    ----------
    kernel, adapter : as for :func:`oracle.validate`.
    contract : one whose scales are known to the probes (:attr:`~oracle.routines.base.Contract.probed`).
    device : ``"cpu"`` or ``"cuda"``.
    k : length of the sums, a positive multiple of 128.
    out_dtype : float32 tells most; bfloat16 and float16 also show the store's rounding.
    seed : of the random probes.
    limit : seconds for one call.

    Returns
    -------
    Fingerprint

    Raises
    ------
    SubjectError
        The kernel cannot be loaded or called, raised, crashed, hung, ended its process, or returned another shape or
        dtype than the call declares.
    NumericsError
        Its answers are no scaled product of its operands (a NaN or infinity in them included).
    OptionError, DeviceError
        The question is wrong.
    """
    if (scales := get(contract).probed) is None:
        can = ", ".join(name for name, found in registered().items() if found.probed is not None)
        raise OptionError(f"kernels of {contract!r} cannot be probed; those of {can} can")
    if k < 128 or k % 128:
        raise OptionError(f"k={k} is not a positive multiple of 128")
    if not 0 < limit < math.inf:
        raise OptionError(f"limit={limit:g} is no number of seconds; give a positive one")
    name, arch, found = importable(kernel), arch_of(device), get(contract)
    block, b_rows = scales
    called = None if adapter is None else importable(adapter)
    with Worker(name, adapter=called, device=device, limit=limit) as worker:
        session = Session(worker, found, device=device, arch=arch, numerics=None)
        shape = Shape(torch.float8_e4m3fn, k, block, b_rows)
        return fingerprint(_asked(session, name), shape, out_dtype=out_dtype, seed=seed)


def _asked(session: Session, name: str) -> Kernel:
    """The kernel of a session as the probes call it; SubjectError for every answer that is none."""
    role = session.contract.roles
    transposed = session.contract.b_columns  # torch's weight is the column-major [K, N] view

    def ask(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
        inputs = {"a": a, "b": b.t() if transposed else b, "a_scale": a_scale, "b_scale": b_scale}
        answer = session.call({role[key]: x for key, x in inputs.items()}, {"out_dtype": out_dtype})
        if answer.problem is not None:
            raise SubjectError(f"{name} {answer.problem.reason}")
        out = answer.outputs["out"]
        if bool(is_poison(out, 0).all()):
            raise SubjectError(f"{name} returned nothing, and left its output as it was: no element of it is written")
        return out

    return ask
