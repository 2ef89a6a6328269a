"""Something that is done once a module has been imported, whoever imports it.

A finder stands before the others, asks them for the module, and lets its loader say when the module is executed.
Source: Python ``importlib`` (finders and loaders). Not covered: a module that is there already.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterImport(MetaPathFinder):
    """Calls ``loaded`` once one of ``wanted``, names of modules, has been executed; :meth:`end` takes it away."""

    def __init__(self, wanted: Iterable[str], loaded: Callable[[], None]) -> None:
        self._wanted, self._loaded = {name for name in wanted if name not in sys.modules}, loaded
        if self._wanted:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        self._wanted.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders have, whose loader says when the module is there."""
        if fullname not in self._wanted:
            return None
        self._wanted.discard(fullname)  # before the others are asked, which come by here again
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._loaded()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
