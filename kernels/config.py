"""The environment switches of this process, as the record :class:`~kernels.records.Config`.

A copy of its environment reproduces a deployment. Nothing in this package writes there. The page of the documentation
that lists the variables is made from the fields of the record.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from . import context
from .records import MOE_BACKENDS, Config

__all__ = ["MOE_BACKENDS", "Config", "current_config", "environment_table", "use_config"]


@context.constant
def current_config() -> Config:
    """The switches of this process, read at first use, or those of the block around the caller.

    A compiled graph keeps those of the moment when it was traced.
    """
    once = context.current().config
    return once.value or once.get(Config.from_environment)


@contextmanager
def use_config(config: Config | None) -> Iterator[None]:
    """Replace the current record within the block (None: read the environment again)."""
    with context.use(config=context.Once(config)):
        yield


def environment_table() -> str:
    """Every variable as a table in Markdown."""
    lines = ["| variable | default | meaning |", "|:--|:--|---|"]
    for f in fields(Config):
        default = f"`{int(f.default)}`" if isinstance(f.default, bool) else f"`{f.default}`" if f.default else "unset"
        names = ", ".join(f"`{name}`" for name in f.metadata["names"])
        lines.append(f"| {names} | {default} | {f.metadata['meaning']} |")
    return "\n".join(lines) + "\n"
