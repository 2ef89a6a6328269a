"""Runs a foreign kernel safely and watches what it does; :func:`validate` is the verb.

    process, worker    the kernel behind a process boundary, with a time limit and the cause of every loss
    memory             guard zones and poison
    session            one call, one verdict
    watches            what is watched besides the numbers
    probing            how a kernel computes, by probes that run in the worker
    report             what was found

The harness judges nothing by itself: numbers go to the contract. The names below are loaded when first used, so that a
worker process loads no more than it runs. Not covered: several devices at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oracle.harness.report import Finding, Report
    from oracle.harness.validation import validate

__all__ = ["Finding", "Report", "validate"]

_HOME = {"Finding": "report", "Report": "report", "validate": "validation"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
