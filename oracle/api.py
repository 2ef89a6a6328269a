"""The public verbs: look the contract up, check the call, delegate."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from oracle.compare import Verdict
from oracle.contracts import Contract, get, registered
from oracle.errors import NumericsError


def contracts() -> Mapping[str, Contract]:
    """All contracts by name; each knows its inputs, options, outputs, source and summary."""
    return registered()


def reference(contract: str, inputs: Mapping[str, Tensor], **options: object) -> Tensor | dict[str, Tensor]:
    """The truth of ``contract`` for ``inputs``.

    Products return a float64 tensor, the float64 nearest to the exact value; with ``out_dtype=torch.bfloat16``
    (float16, float32) the exact value correctly rounded, once, to nearest even. Quantisers return
    ``{"q": codes, "scale": scales}`` of the contract's recipe. Elements that the contract leaves unspecified are NaN;
    a NaN operand gives NaN wherever it reaches. Deterministic, with the same bits on every machine and device.

    Raises
    ------
    OracleError
        A subclass names what is wrong with the call and the way out.
    """
    return get(contract).reference(inputs, **options)


def judge(
    contract: str,
    inputs: Mapping[str, Tensor],
    output: Tensor | Mapping[str, Tensor],
    *,
    arch: str = "sm90",
    numerics: str | None = None,
    **options: object,
) -> Verdict:
    """The verdict on ``output``: is every specified element what the contract admits?

    Parameters
    ----------
    contract : name of :func:`contracts`.
    inputs : logical, contiguous operands under the contract's names; float8 tensors hold codes.
    output : the tensor of the kernel (its dtype is the output dtype), or a mapping for several outputs.
    arch : ``"sm90"``, ``"sm89"``, ``"sm100"``, ``"cpu"``...: whose arithmetic is admitted.
    numerics : a declared schedule (``"sm90.promote128"``), ``"<schedule>.any"`` for its accumulator in unknown order,
        or ``"ieee32.any"`` for float32 arithmetic in any order; None admits what the contract's kernels use.

    Returns
    -------
    Verdict
        PASSED when all bits equal an admitted schedule's, or every element lies in the sound interval of the first
        admitted numerics; FAILED otherwise; MISTRUSTED when the inputs could not have shown a fault.

    Raises
    ------
    OracleError
        The call is wrong (names, dtypes, shapes, devices, options, numerics); never for a wrong kernel.
    """
    return get(contract).judge(inputs, output, arch=arch, numerics=numerics, **options)


def predict(contract: str, inputs: Mapping[str, Tensor], *, numerics: str, **options: object) -> Tensor:
    """The bits that ``numerics`` (a schedule's name) produces; unspecified rows hold NaN.

    ``out_dtype`` defaults to bfloat16. Raises NumericsError, listing what exists, for an unknown schedule or one that
    cannot compute this product.
    """
    found = get(contract)
    if not hasattr(found, "predict"):
        raise NumericsError(f"{contract} has no schedules to predict; reference() gives its exact bits")
    prediction = found.predict(inputs, numerics=numerics, **options)
    assert isinstance(prediction, Tensor)
    return prediction
