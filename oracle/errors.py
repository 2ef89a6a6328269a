"""Typed errors of the oracle.

One class per kind of mistake, all below :class:`OracleError`, so that a caller can catch the family and the
command line can print one sentence without a stack trace. Every message names the offending value and the way
out. A wrong *kernel* is a verdict (:mod:`oracle.verdict.compare`), not an error; the one exception is
:class:`NonconformanceError`, which a caller asks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def near(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'X'?)"`` for the known name that is most like ``name``; nothing where none is like it."""
    found = get_close_matches(name, list(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


class OracleError(Exception):
    """Base of every error the oracle raises on purpose."""


class ShapeError(OracleError, ValueError):
    """A tensor has the wrong rank or extent, or two tensors disagree."""


class DtypeError(OracleError, TypeError):
    """A tensor has a dtype that the contract does not take."""


class DeviceError(OracleError, ValueError):
    """Tensors of one call lie on different devices, or on one that the routine cannot use."""


class LayoutError(OracleError, ValueError):
    """A tensor's strides are not the ones the contract requires."""


class InputError(OracleError, ValueError):
    """An input is missing, unexpected, or not a tensor at all."""


class OptionError(OracleError, ValueError):
    """An option is unknown or outside its admitted values."""


class ContractError(OracleError, LookupError):
    """No contract has this name."""


class NumericsError(OracleError, LookupError):
    """No schedule or accumulator class has this name, or it does not fit the contract, arch or shape."""


class CaseError(OracleError, ValueError):
    """A case id does not parse, or names parameters that the contract refuses."""


class FixtureError(OracleError, ValueError):
    """A fixture file is missing, truncated, tampered with, of another schema, or of a refused kind (pickle)."""


class SubjectError(OracleError, LookupError):
    """A subject (``MODULE:CALLABLE``) cannot be imported or does not offer what was asked."""


class SandboxError(OracleError, RuntimeError):
    """This machine offers no means to run a kernel apart from everything else."""


class ExtensionError(OracleError, ImportError):
    """What another distribution adds by entry point cannot be loaded, or is no record of its kind."""


class ExactnessError(OracleError, ArithmeticError):
    """The data exceed the range in which the reference is exact; refused rather than answered approximately."""


class NonconformanceError(OracleError, AssertionError):
    """A verdict that is not PASSED, as ``Verdict.raise_for_status`` raises it; ``verdict`` is the verdict."""

    def __init__(self, message: str, verdict: object = None) -> None:
        super().__init__(message)
        self.verdict = verdict
