"""The imported FlashInfer, and the lock that its calls hold."""

from __future__ import annotations

import functools
import importlib
import threading
from types import ModuleType

from ..errors import MissingPackageError

ONE_CALL = threading.Lock()
"""Held for a call: the process has one runner, and releases whose source was not read store a workspace in it.

Not covered: calls of FlashInfer in other threads that bypass this module."""


@functools.cache
def library(name: str = "flashinfer") -> ModuleType:
    """A module of the imported library, or :class:`MissingPackageError` with the reason."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever a foreign library raises while it loads is the reason given below
        why = f"{type(error).__name__}: {error}"
        raise MissingPackageError("FlashInfer; install `flashinfer-python`", {name: why}) from error
