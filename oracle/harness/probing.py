"""How a kernel of a contract, or one with block scales, computes, found by probing it in a worker process.

:func:`probe` and :func:`probe_block_scaled` send the probes of :mod:`oracle.tensorcore.fingerprint` and of
:mod:`oracle.tensorcore.block_probes` through the worker that :func:`oracle.validate` uses, with its calling convention,
time limit, guard zones and poison. A kernel that raises, crashes, hangs or exits ends the probing, not the process;
what it prints or does to its inputs is not reported. The numbers are not judged and nothing is watched: that is
:func:`validate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from oracle.errors import NumericsError, OptionError, SubjectError
from oracle.harness.memory import is_poison
from oracle.harness.process import Worker
from oracle.harness.report import LIMIT
from oracle.harness.session import Session
from oracle.harness.validation import arch_of, importable
from oracle.routines import get, registered, traits
from oracle.routines.base import Call, Contract, OptionSpec, Out, TensorSpec
from oracle.routines.products.contract import OUT_DTYPES
from oracle.tensorcore.block_probes import BlockFingerprint, Kind, fingerprint_block_scaled
from oracle.tensorcore.fingerprint import Fingerprint, Kernel, fingerprint
from oracle.tensorcore.probes import Shape
from oracle.verdict.sets import Sets

_CODES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (torch.float8_e8m0fnu, torch.float8_e4m3fn)
_PLAIN = {name: name for name in ("a", "b", "a_scale", "b_scale")}


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
        can = ", ".join(name for name, routine in registered().items() if routine.probed is not None)
        raise OptionError(f"kernels of {contract!r} cannot be probed; those of {can} can")
    if k < 128 or k % 128:
        raise OptionError(f"k={k} is not a positive multiple of 128")
    if not 0 < limit < math.inf:
        raise OptionError(f"limit={limit:g} is no number of seconds; give a positive one")
    name, arch, routine = importable(kernel), arch_of(device), get(contract)
    block, b_rows = scales
    called = None if adapter is None else importable(adapter)
    with Worker(name, adapter=called, device=device, limit=limit) as worker:
        session = Session(worker, routine, device=device, arch=arch, numerics=None)
        shape = Shape(torch.float8_e4m3fn, k, block, b_rows)
        return fingerprint(_asked(session, name, routine.roles), shape, out_dtype=out_dtype, seed=seed)


class _BlockScaled(Contract):
    """What a kernel with block scales is called with (:class:`oracle.tensorcore.block_probes.Inputs`); not registered:
    nothing of it is judged."""

    name, summary, source = "block_scaled_probe", "a product with block scales inside the instruction", "probes"
    inputs = tuple(TensorSpec(name, traits.Kind.CODES, _CODES, None, "as the probes lay it out") for name in ("a", "b"))
    inputs += tuple(
        TensorSpec(name, traits.Kind.SCALES, _SCALES, None, "[M, K / block]") for name in ("a_scale", "b_scale")
    )
    options = (OptionSpec("out_dtype", torch.float32, OUT_DTYPES, "dtype of the output"),)

    def reference(self, inputs: Mapping[str, Tensor], **options: object) -> Tensor:
        raise NumericsError(f"{self.name} has no reference: its readings differ")

    def outputs(self, call: Call) -> dict[str, Out]:
        dtype = call.resolved["out_dtype"]
        assert isinstance(dtype, torch.dtype)
        return {"out": Out((len(call.inputs["a"]), len(call.inputs["b"])), (dtype,))}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        raise NumericsError(f"{self.name} is not judged: fp8-oracle fingerprint says which reading a kernel follows")


def probe_block_scaled(
    kernel: str | Callable[..., object],
    kind: Kind,
    *,
    adapter: str | Callable[..., object] | None = None,
    device: str = "cpu",
    out_dtype: torch.dtype = torch.float32,
    limit: float = LIMIT,
) -> BlockFingerprint:
    """Find out which named reading of a block-scaled instruction ``kernel`` follows, with one call.

    Parameters
    ----------
    kernel, adapter : as for :func:`oracle.validate`; called with ``a``, ``b``, ``a_scale``, ``b_scale`` and
        ``out_dtype`` (:class:`oracle.tensorcore.block_probes.Inputs`: scales by row and block, not swizzled).
    kind : what the kernel takes.
    device : ``"cpu"`` or ``"cuda"``.
    out_dtype : float32 tells every pair of readings apart; bfloat16 and float16 may not.

    Raises SubjectError, NumericsError, DeviceError, OptionError: as :func:`probe`.
    """
    if not 0 < limit < math.inf:
        raise OptionError(f"limit={limit:g} is no number of seconds; give a positive one")
    name, arch = importable(kernel), arch_of(device)
    called = None if adapter is None else importable(adapter)
    with Worker(name, adapter=called, device=device, limit=limit) as worker:
        session = Session(worker, _BlockScaled(), device=device, arch=arch, numerics=None)
        return fingerprint_block_scaled(_asked(session, name, _PLAIN), kind, out_dtype=out_dtype)


def _asked(session: Session, name: str, role: Mapping[str, str]) -> Kernel:
    """The kernel of a session as the probes call it; SubjectError for every answer that is none."""
    transposed = session.contract.b_columns  # torch's weight is the column-major [K, N] view, its scale [1, N]

    def ask(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
        right = (b.t(), b_scale.t()) if transposed else (b, b_scale)
        inputs = {"a": a, "b": right[0], "a_scale": a_scale, "b_scale": right[1]}
        answer = session.call({role[key]: x for key, x in inputs.items()}, {"out_dtype": out_dtype})
        if answer.problem is not None:
            raise SubjectError(f"{name} {answer.problem.reason}")
        out = answer.outputs["out"]
        if bool(is_poison(out, 0).all()):
            raise SubjectError(f"{name} returned nothing, and left its output as it was: no element of it is written")
        return out

    return ask
