"""What the interpreters of some releases of Triton get wrong, put right; imported by programs that run under
``TRITON_INTERPRET=1`` only."""

from __future__ import annotations

import threading
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def repair() -> None:
    """Scalars as indices, conditions that become blocks, and calls from several threads.

    Up to Triton 3.6 the interpreter asks numpy for the integer of an array with one axis, which numpy 2.4 refuses;
    Triton 3.5 patches its class of tensors for good, later releases pass a scope that takes the patch back. Triton 3.9
    makes integers of a scalar condition that becomes a block, and then refuses them as a mask. Every release patches
    `triton.language` for the time of a launch, which another thread's launch then takes back: launches take turns.
    """
    patch, splat = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_splat

    def patched(tensor: object, *scope: Any) -> None:
        patch(tensor, *scope)
        put = scope[0].set_attr if scope else setattr
        put(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def splatted(self: object, shape: object, scalar: Any) -> object:
        if scalar.data.dtype == bool:
            scalar = interpreter.TensorHandle(scalar.data, tl.int1)
        return splat(self, shape, scalar)

    launch, turns = interpreter.GridExecutor.__call__, threading.RLock()

    def launched(self: object, *arguments: Any, **options: Any) -> object:
        with turns:
            return launch(self, *arguments, **options)

    interpreter.GridExecutor.__call__ = launched
    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_splat = splatted
