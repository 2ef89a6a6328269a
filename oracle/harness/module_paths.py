"""Where in a model a call is made: the path of the module that runs, as ``model.layers.17.mlp.down_proj``.

The outermost module that is called is the root; a path is the name that the root has for a module (``named_modules``),
and the name of its class for the root itself. Hooks that all modules share keep a stack of each thread.

Not covered: modules inside a compiled graph, whose hooks a compiler leaves out. Their calls carry the path of the last
module outside, and :attr:`ModulePaths.compiled` names the graphs.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class _Running(NamedTuple):
    module: nn.Module
    root: nn.Module
    path: str


class ModulePaths:
    """The paths of the modules that run, from :meth:`start` to :meth:`end`."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._hooks: list[Any] = []
        self.compiled: dict[str, None] = {}

    def start(self) -> None:
        self._hooks = [
            register_module_forward_pre_hook(self._enters),
            register_module_forward_hook(self._leaves, always_call=True),
        ]

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def path(self) -> str:
        """The path of the innermost module that runs in this thread; "" outside of any."""
        stack = self._stack
        return stack[-1].path if stack else ""

    @property
    def _stack(self) -> list[_Running]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[_Running] = self._local.stack
        return stack

    def _enters(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():  # a constant to a compiler, which would read what comes behind it
            return
        stack = self._stack
        root = stack[-1].root if stack else module
        stack.append(_Running(module, root, self._path(module, root, stack[-1].path if stack else "")))

    def _leaves(self, module: nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._stack
        if stack and stack[-1].module is module:
            stack.pop()

    def _path(self, module: nn.Module, root: nn.Module, above: str) -> str:
        names = self._names.get(root)
        if names is None or id(module) not in names:
            names = self._name(root)
        kind = type(getattr(module, "_orig_mod", module)).__name__  # what torch.compile(module) wraps
        if id(module) not in names:
            return f"{above}.{kind}"  # a module that the root does not have
        return names[id(module)] or kind

    def _name(self, root: nn.Module) -> dict[int, str]:
        """The names that a root has for its modules, read anew."""
        names = self._names[root] = {}
        for name, module in root.named_modules():
            names[id(module)] = ".".join(part for part in name.split(".") if part != "_orig_mod")
            if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
                self.compiled[names[id(module)] or type(getattr(module, "_orig_mod", module)).__name__] = None
        return names
