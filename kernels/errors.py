"""Typed errors of the dispatch layer.

They are raised before a kernel is launched; the message names the offending value and a remedy. One class for each kind
of mistake, all derived from :class:`KernelError` and from the built-in error that a caller would expect.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

import torch


class _Shown(reprlib.Repr):
    def repr1(self, x: object, level: int) -> str:
        return f"a {type(x).__name__} of {x.dtype}" if isinstance(x, torch.Tensor) else super().repr1(x, level)


_SHOWN = _Shown()
_SHOWN.maxstring = _SHOWN.maxother = 200


def shown(value: object) -> str:
    """An argument as a message prints it: of a tensor its type and dtype.

    The ``repr`` of a tensor waits for its device, and reads memory that its storage no longer has.
    """
    return _SHOWN.repr(value)


class KernelError(Exception):
    """Base of every error this layer raises on purpose."""


class InputError(KernelError, TypeError):
    """An operand is missing, or is not a tensor where a tensor is required."""


class ShapeError(KernelError, ValueError):
    """A tensor has the wrong rank or extent, or two tensors disagree."""


class DtypeError(KernelError, TypeError):
    """A tensor has a dtype that the routine does not take."""


class DeviceError(KernelError, ValueError):
    """Tensors of one call lie on different devices, or on one that the routine cannot use."""


class LayoutError(KernelError, ValueError):
    """The routine cannot use a tensor's strides, and a silent copy would hide a mistake."""


class ValueRangeError(KernelError, ValueError):
    """A tensor holds values outside the contract: a scale that is no power of two, an index out of range."""


class OptionError(KernelError, ValueError):
    """An option is unknown, missing or outside its admitted values."""


class CheckpointError(KernelError, ValueError):
    """A checkpoint lacks a file or a tensor, or is quantised in a way that no layer here reads."""


class ConfigError(KernelError, ValueError):
    """An environment switch has an invalid value."""


class Reason(str):
    """Why a backend does not serve a problem; the class says of what kind the reason is."""

    __slots__ = ()


class Unsupported(Reason):
    """The backend has no kernel for this problem on this machine."""

    __slots__ = ()


class SwitchedOff(Reason):
    """A switch of the configuration excludes the backend, or another one is asked for."""

    __slots__ = ()


class Unavailable(Reason):
    """A package, or an operator of its release, is not installed or does not load."""

    __slots__ = ()


class Failed(Unavailable):
    """The package is installed, and failed: it does not load, lacks the operation, or did not compile or start it."""

    __slots__ = ()


class NoBackendError(KernelError, NotImplementedError):
    """No backend can serve a problem. ``reasons`` maps every backend that was considered to why it was rejected."""

    def __init__(self, problem: str, reasons: Mapping[str, str]) -> None:
        self.problem = problem
        self.reasons = dict(reasons)
        lines = "".join(f"\n  {name}: {why}" for name, why in self.reasons.items())
        super().__init__(f"no backend can serve {problem}:{lines}")

    def __reduce__(self) -> tuple[type[NoBackendError], tuple[str, dict[str, str]]]:
        """Made again of what it was made of, as an error of a worker is."""
        return type(self), (self.problem, self.reasons)


class MissingPackageError(NoBackendError, ImportError):
    """A required library is missing or cannot be loaded; the message says what to install."""
