"""The public verbs: look the contract up, check the call, delegate.

Source: each contract names its own (``oracle.contracts()[name].source``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oracle.diagnosis.explain import explain_verdict
from oracle.diagnosis.level import explain_level
from oracle.errors import InputError, NumericsError, OptionError
from oracle.routines import Contract, get, registered
from oracle.routines.base import Call, by_name, plain
from oracle.tensorcore.identify import Match
from oracle.verdict.classes import Class, tightest_class
from oracle.verdict.compare import Verdict
from oracle.verdict.loss import Loss
from oracle.verdict.plot import Picture
from oracle.verdict.sets import Bounds

KEPT = 1 << 26  # bytes of the tensors of one call that its verdict keeps, for a picture


def contracts() -> Mapping[str, Contract]:
    """All contracts by name, those of installed plug-ins too; each has its inputs, options, outputs and source.

    Returns
    -------
    mapping of str to Contract
        In alphabetical order. ``contracts()["mm_mxfp8"].inputs`` are records with a name, a shape as extents, dtypes
        and a note; a notebook shows a contract as a table.

    Raises
    ------
    ExtensionError
        A plug-in that offers contracts cannot be loaded.
    """
    return registered()


def reference(contract: str, inputs: Mapping[str, Tensor], **options: object) -> Tensor | dict[str, Tensor]:
    """The truth of a contract for these inputs, with the same bits on every machine and device.

    Parameters
    ----------
    contract : name of :func:`contracts`.
    inputs : operands under the contract's names, in its shapes and dtypes (:func:`contracts`), all on one device;
        float8 tensors hold codes.
    options : options of the contract, as ``out_dtype=torch.bfloat16``.

    Returns
    -------
    Tensor or dict of Tensor
        A product ``[M, N]`` in float64, nearest to the exact value; with ``out_dtype`` (bfloat16, float16, float32) the
        exact value correctly rounded, once, to nearest even, overflow to infinity. Of a quantiser
        ``{"q": codes, "scale": scales}`` by the contract's recipe. Elements that the contract leaves unspecified are
        NaN; a NaN operand gives NaN wherever it reaches, infinities are added as IEEE 754 says, and a sum of nothing
        is +0.

    Raises
    ------
    OracleError
        A subclass names what is wrong with the call and the way out.
    """
    return get(contract).reference(_values(inputs), **options)


def judge(
    contract: str,
    inputs: Mapping[str, Tensor],
    output: Tensor | Mapping[str, Tensor],
    *,
    arch: str = "sm90",
    numerics: str | None = None,
    explain: str | None = None,
    **options: object,
) -> Verdict:
    """The verdict on ``output``: is every specified element what the contract admits?

    Parameters
    ----------
    contract : name of :func:`contracts`.
    inputs : logical, contiguous operands under the contract's names; float8 tensors hold codes.
    output : the tensor of the kernel, in the shape of the contract's output (its dtype is the output dtype), or a
        mapping for several outputs. Here and in ``inputs`` gradients, subclasses, strides and pending negations change
        nothing. A NaN is right where the exact value is one, and there alone; -0 equals +0, but for a layout, which
        must keep every bit.
    arch : ``"sm90"``, ``"sm89"``, ``"sm100"``, ``"cpu"``...: whose arithmetic is admitted.
    numerics : a declared schedule (``"sm90.promote128"``), one that splits K (``"sm90.chain.split3"``,
        ``"sm90.chain.interleaved2x64"``, ``"sm90.chain.cut1024+5120"``), ``"<schedule>.split"`` for K split anywhere,
        ``"<schedule>.any"`` for its accumulator in unknown order, or ``"ieee32.any"`` for float32 arithmetic in any
        order; None admits what the contract's kernels use on ``arch`` and, for an output that lies in the interval as
        a whole, float32 in any order or K split anywhere.
    explain : how much is said of why an output fails: ``"off"`` nothing; ``"quick"`` (the default) the first known
        fault that holds, for about the price of the judgement; ``"full"`` all that
        :func:`oracle.diagnosis.explain.diagnose` finds, at any price. The verdict is the same. A failure of at most
        2^27 products on a CPU has all of it at ``"quick"``.

    options : options of the contract, as for :func:`reference`; ``out_dtype`` is that of the output.

    Returns
    -------
    Verdict
        PASSED when all bits equal an admitted schedule's, or every element lies in the sound interval of the first
        admitted numerics (undeclared, of any one of them); FAILED otherwise; MISTRUSTED when the inputs could not have
        shown a fault.

    Raises
    ------
    OracleError
        The call is wrong (names, dtypes, shapes, devices, options, numerics); never for a wrong kernel.
    """
    result, values, supplied = get(contract), _values(inputs), _values_of(output)
    _name("arch", arch)
    _name("numerics", numerics)
    explain_level(explain)
    asked = result.asked(values, supplied, arch=arch, **options)
    verdict = explain_verdict(
        result.judged(asked, supplied, numerics), asked, supplied, numerics=numerics, explain=explain
    )
    call: dict[str, Any] = {"arch": arch, "numerics": numerics, "passed": not verdict.status.is_failure, **options}
    return replace(verdict, pictures=_pictures(result, inputs, by_name(output), call))


@dataclass(frozen=True)
class Gate:
    """Accepts or rejects outputs of one contract; made by :func:`gate`."""

    contract: str
    arch: str
    numerics: str | None

    def __call__(self, inputs: Mapping[str, Tensor], output: Tensor | Mapping[str, Tensor], **options: object) -> bool:
        """Whether ``output`` is accepted; inputs, output, options, NaN and errors as for :func:`judge`."""
        return self.prepared(inputs, **options)(output)

    def prepared(
        self, inputs: Mapping[str, Tensor], **options: object
    ) -> Callable[[Tensor | Mapping[str, Tensor]], bool]:
        """The gate for one call, which may be asked of many outputs, from any thread. What it computes of the inputs,
        float64 tensors of the output's shape, it keeps; they must not be written meanwhile."""
        contract, values = get(self.contract), _values(inputs)
        result = dict[torch.dtype, Callable[[Tensor | Mapping[str, Tensor]], bool]]()

        def accepts(output: Tensor | Mapping[str, Tensor]) -> bool:
            supplied = _values_of(output)
            out = supplied.get("out") if isinstance(supplied, Mapping) else supplied
            dtype = out.dtype if isinstance(out, Tensor) else torch.bfloat16
            if dtype not in result:
                call = Call(contract, values, options, out_dtype=dtype, arch=self.arch)
                result[dtype] = contract.accepting(call, self.numerics)
            return result[dtype](supplied)

        return accepts


def gate(contract: str, *, arch: str = "sm90", numerics: str | None = None) -> Gate:
    """A callable that accepts or rejects outputs of a contract, for a tuner or a generator of kernels.

    Parameters
    ----------
    contract, arch, numerics : as for :func:`judge`.

    Returns
    -------
    Gate
        ``accepts(inputs, output, **options)`` is True or False; ``accepts.prepared(inputs, **options)`` is asked of
        many outputs of one call. It keeps no state, and threads may share it.

        A rejected output is one that :func:`judge` calls FAILED. An accepted one has the bits of a schedule, or lies as
        a whole in a proved interval of the contract, to within half a unit in the last place. Of a product,
        :func:`judge` may still find the bits of a known fault of accumulation in it, and says MISTRUSTED where the
        inputs could not have shown a fault. For a product one float64 matrix product and an eighth of another are
        computed, once for each call that is prepared; a second one only where many elements are left open, a third
        where all scales are powers of two. An output outside of float32 in any order is refused by its worst element;
        one of which a few elements lie within another accumulator of ``arch``
        costs what :func:`judge` does; so does a declared schedule.

    Raises
    ------
    OracleError
        There is no such contract; from the callable, where the call or the numerics is wrong, never for a wrong kernel.
    """
    _name("arch", arch)
    _name("numerics", numerics)
    get(contract).check_numerics(numerics)
    return Gate(contract, arch, numerics)


def assert_conforms(
    contract: str,
    inputs: Mapping[str, Tensor],
    output: Tensor | Mapping[str, Tensor],
    *,
    arch: str = "sm90",
    numerics: str | None = None,
    explain: str | None = None,
    **options: object,
) -> Verdict:
    """Judge an output, as :func:`judge` does with the same arguments, and raise an error unless it is PASSED.

    Returns
    -------
    Verdict
        It is PASSED.

    Raises
    ------
    NonconformanceError
        The output is not admissible, or these inputs could not have shown a fault (MISTRUSTED). It is an
        AssertionError; its message is what the verdict says and how to write the call into a file that
        ``fp8-oracle explain`` repeats it from; its ``verdict`` is the verdict.
    InputError
        ``contract`` is no name: the pytest fixture of this name takes the output first, this function the contract.
    OracleError
        The call is wrong in another way.
    """
    if not isinstance(contract, str):
        what = "oracle.assert_conforms takes the contract first, as oracle.judge does"
        raise InputError(
            f"{what}: assert_conforms(contract, inputs, out); the fixture of pytest takes the output first"
        )
    verdict = judge(contract, inputs, output, arch=arch, numerics=numerics, explain=explain, **options)
    case = f"CallFile({contract!r}, inputs, output, {options!r}, {arch!r}, {numerics!r})"
    verdict.raise_for_status(
        "from oracle.fixtures.call_file import CallFile, write\n"
        f"       write('failing.safetensors', {case})\n"
        "       $ fp8-oracle explain failing.safetensors"
    )
    return verdict


def interval(
    contract: str,
    inputs: Mapping[str, Tensor],
    *,
    arch: str = "sm90",
    numerics: str | None = None,
    **options: object,
) -> dict[str, Bounds]:
    """The admissible values of every output of a call, before there is a kernel.

    Parameters
    ----------
    contract, inputs, arch, numerics, options : as for :func:`judge`. Where ``out_dtype`` is left open it is the first
        that the contract lists, bfloat16 for most products.

    Returns
    -------
    dict of Bounds
        By output ``low`` and ``high``, the least and the greatest admissible value on the grid of the output's dtype,
        as float64 in its shape on the device of the inputs; both NaN where a NaN is due; ``free``, the elements of
        which nothing is said (padding, rows that nobody fills, an intermediate that may overflow), ``-inf`` to ``inf``.
        They are those of the first admitted numerics, of a quantiser of its first recipe: its codes as values, for the
        scale that is due. Undeclared, :func:`judge` also admits what the contract's other recipes, and float32 in any
        order, give for the output as a whole.

    Raises
    ------
    NumericsError
        Right outputs are no interval for each element (packed codes, a choice of experts); or unknown numerics or arch.
    OracleError
        The call is wrong.
    """
    _name("arch", arch)
    _name("numerics", numerics)
    return get(contract).bounds(_values(inputs), arch=arch, numerics=numerics, **options)


def predict(
    contract: str, inputs: Mapping[str, Tensor], *, numerics: str | None = None, **options: object
) -> Tensor | dict[str, Tensor]:
    """The exact bits that a kernel with these ``numerics`` produces.

    Parameters
    ----------
    contract, inputs, options : as for :func:`reference`.
    numerics : a schedule (``"sm90.promote128"``), for a quantiser a recipe; None is what the contract's kernels use on
        sm90.

    Returns
    -------
    Tensor or dict of Tensor
        A product ``[M, N]`` in ``out_dtype``, bfloat16 unless named; of a quantiser ``{"q": codes, "scale": scales}``.
        Unspecified rows hold NaN, and every NaN is the one that the hardware writes.

    Raises
    ------
    NumericsError
        Unknown numerics, or numerics that cannot compute this call; the message lists what exists.
    OracleError
        The call is wrong.
    """
    _name("numerics", numerics)
    return get(contract).predict(_values(inputs), numerics=numerics, **options)


def identify(
    contract: str,
    inputs: Mapping[str, Tensor],
    output: Tensor | Mapping[str, Tensor],
    *,
    arch: str | None = None,
    **options: object,
) -> list[Match]:
    """Which known arithmetic produced these bits: every schedule (for a quantiser, every recipe) that could have.

    Parameters
    ----------
    contract, inputs, output, options : as for :func:`judge`. Any NaN equals any NaN; +0 and -0 differ.
    arch : only schedules of this arch; None is every arch.

    Returns
    -------
    list of Match
        ``schedule``, ``equal`` (the fraction of compared elements whose bits agree) and ``compared``; best first.
        Few elements, chosen where schedules differ, reject most of them; what these leave is compared with more.
        Ties are real: two schedules may agree on these inputs.

    Raises
    ------
    OracleError
        The call is wrong, or nothing known can compute it.
    """
    _name("arch", arch)
    return get(contract).identify(_values(inputs), _values_of(output), arch=arch, **options)


def loss(contract: str, inputs: Mapping[str, Tensor], *, numerics: str | None = None, **options: object) -> Loss | None:
    """What the recipe of a quantiser loses on ``inputs``, before there is a kernel.

    The figures are those of the bits that :func:`predict` gives.

    Parameters
    ----------
    contract, inputs, options : as for :func:`judge`.
    numerics : a recipe by name; None is the contract's own.

    Returns
    -------
    Loss or None
        SQNR in dB, the largest relative error, and the shares of elements that saturate and that are lost to zero; NaN
        and infinities among ``inputs`` say nothing. None where no finite value is quantised. A verdict has the same
        figures of a kernel's output (``verdict.loss``); none depends on them.

    Raises
    ------
    OptionError
        The contract is no quantiser whose loss is measured.
    OracleError
        The call is wrong.
    """
    _name("numerics", numerics)
    match, values = get(contract), _values(inputs)
    if not match.loses:
        known = ", ".join(name for name, other in registered().items() if other.loses)
        raise OptionError(f"{contract!r} is no quantiser whose loss is measured; those are {known}")
    result = match.predict(values, numerics=numerics, **options)
    call: dict[str, Any] = {"numerics": numerics, **options}
    return match.judge(values, result, **call).loss


def classify(
    contract: str,
    inputs: Mapping[str, Tensor],
    output: Tensor | Mapping[str, Tensor],
    *,
    arch: str = "sm90",
    **options: object,
) -> Class:
    """The tightest class of arithmetic that holds the whole output of a product, admitted by the contract or not.

    Parameters
    ----------
    contract, inputs, output, options : as for :func:`judge`.
    arch : whose schedules and accumulators are tried; of ``"cpu"`` float32 in any order alone is known.

    Returns
    -------
    Class
        ``name``, ``bits`` and the number of ``elements`` compared. Bit-equal to a schedule of ``arch``, plain, with K
        split (the partition is found from the output) or with a float16 accumulator; or else the narrowest interval
        that holds it: of an accumulator, of that with K split anywhere, of float32 in any order, of products in any
        order; or ``"none"``. A NaN lies in an interval where one is due, and there alone. A class is no verdict:
        :func:`judge` gives that.

    Raises
    ------
    NumericsError
        The contract has no product, or quantises inside; or nothing known of ``arch`` can compute the call.
    OracleError
        The call is wrong.
    """
    _name("arch", arch)
    result, values = get(contract), _values(inputs)
    output = result.validate_output(call := Call(result, values, options, arch=arch).checked(), _values_of(output))[
        "out"
    ]
    if not call.parts or not call.operands.given:
        raise NumericsError(f"{contract} has no product of given operands to classify; judge() names its numerics")
    return tightest_class(call.parts, output.reshape(-1, output.shape[-1]), arch)


def _pictures(
    contract: Contract, inputs: Mapping[str, Tensor], output: Mapping[str, Tensor], call: Mapping[str, Any]
) -> Callable[[], dict[str, Picture]]:
    """What makes the pictures of a call. It keeps the tensors of a small call, and of a large one none: without one of
    them there are no pictures."""

    def known(x: Tensor) -> Callable[[], Tensor | None]:
        return weakref.ref(x) if large else lambda: x

    large = sum(x.nbytes for x in (*inputs.values(), *output.values())) > KEPT
    remaining = [{name: known(x) for name, x in tensors.items()} for tensors in (inputs, output)]

    def made() -> dict[str, Picture]:
        supplied, outputs = ({name: x for name, get in of.items() if (x := get()) is not None} for of in remaining)
        whole = len(supplied) + len(outputs) == len(remaining[0]) + len(remaining[1])
        return contract.pictures(_values(supplied), _values(outputs), **call) if whole else {}

    return made


def _values(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs as plain tensors; anything that is no tensor is left for the contract to refuse."""
    if not isinstance(inputs, Mapping):
        raise InputError(f"inputs is a {type(inputs).__name__}; pass a mapping from the contract's names to tensors")
    return {name: plain(x, str(name)) if isinstance(x, Tensor) else x for name, x in inputs.items()}


def _values_of(output: Tensor | Mapping[str, Tensor]) -> Tensor | Mapping[str, Tensor]:
    """An output, or every one of several, as plain tensors."""
    if isinstance(output, Tensor):
        return plain(output, "out")
    return _values(output) if isinstance(output, Mapping) else output


def _name(what: str, value: object) -> None:
    """Refuse an arch or numerics that is no name."""
    if value is not None and not isinstance(value, str):
        raise NumericsError(f"{what} is a {type(value).__name__}; pass its name as a str")
    if value == "":
        raise NumericsError(f"{what} is empty; pass its name, or leave it out")
