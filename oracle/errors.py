"""Typed errors of the oracle.

One class per kind of mistake, all below :class:`OracleError`, so that a caller can catch the family and the
command line can print one sentence without a stack trace. Every message names the offending value and the way
out. A wrong *kernel* is a verdict (:mod:`oracle.verdict.compare`), not an error; the one exception is
:class:`NonconformanceError`, which a caller asks for.
"""

from __future__ import annotations

from collections.abc import Iterable

MANY = 12, 60  # names that a message lists beside the one that was meant, and where none is near


def among(name: object, known: Iterable[object], *, see: str = "") -> str:
    """The end of a message about a name that does not exist: what was probably meant, and what there is.

    A long list is left out, a shorter one where a near name is known; ``see`` is the command that prints it.
    """
    import difflib  # here: every pytest run of every project imports this file

    names = list(dict.fromkeys(map(str, known)))
    lower = {n.lower(): n for n in reversed(names)}
    near = [lower[n] for n in difflib.get_close_matches(str(name).lower(), lower, 3, 0.66)]
    meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    if not names:
        return "there is none"
    there = f"{'There' if near else 'there'} {'are' if names[1:] else 'is'}"
    if len(names) > MANY[not near]:
        return f"{meant}{there} {len(names)}" + (f": `{see}` prints them" if see else "")
    return f"{meant}{there}: {', '.join(names)}"


def counted(n: int, noun: str, plural: str | None = None) -> str:
    """``1 case``, ``2 cases``."""
    return f"{n} {noun}" if n == 1 else f"{n} {plural or noun + 's'}"


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


class ProcessError(OracleError, RuntimeError):
    """The system starts no further process or thread for this user."""


class SandboxError(OracleError, RuntimeError):
    """This machine offers no means to run a kernel apart from everything else."""


class ExtensionError(OracleError, ImportError):
    """What another distribution adds by entry point cannot be loaded, or is no record of its kind."""


class ExactnessError(OracleError, ArithmeticError):
    """The data exceed the range in which the reference is exact; refused rather than answered approximately."""


class NonconformanceError(OracleError, AssertionError):
    """An output that does not conform; ``verdict`` is the verdict on it."""

    def __init__(self, message: str, verdict: object = None) -> None:
        super().__init__(message)
        self.verdict = verdict
