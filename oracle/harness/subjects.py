"""Routines under test, found by name: the entry points of group ``fp8_oracle.subjects``.

An entry point is a function without arguments that returns records with the attributes of :class:`Subject`. The
oracle never imports what it judges; an installed distribution registers itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from oracle import extensions
from oracle.errors import SubjectError, among
from oracle.fixtures import strides as memory

GROUP = "fp8_oracle.subjects"
LAYER = "production"
"""Name of the entry point of this project's own layer: ``kernels`` of a checkout, ``fp8_oracle_kernels`` of a wheel."""
LONGEST_MESSAGE = 400  # characters of a subject's own error message that a report keeps


class Subject(Protocol):
    """One routine on one backend.

    ``numerics`` is the declared accumulation or None; ``why_not`` the reason why it cannot run on this machine;
    ``run`` gets the contract's inputs and options and returns its output (a dict when there are several), or
    raises ``NotImplementedError`` for a call that the backend does not offer. Reports point at the code of ``run``, or
    of the function ``source`` where a subject has this attribute.
    """

    @property
    def name(self) -> str: ...
    @property
    def contract(self) -> str: ...
    @property
    def arch(self) -> str: ...
    @property
    def numerics(self) -> str | None: ...
    @property
    def device(self) -> str: ...
    def why_not(self) -> str | None: ...
    def run(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> Tensor | dict[str, Tensor]:
        """The output, of any shape and dtype, or several by name; the contract says which shapes and dtypes are right
        and which elements must be NaN or infinite. Source: the kernel that the subject names.

        Raises NotImplementedError: the backend does not offer the call.
        """


@dataclass(frozen=True)
class Provider:
    """One entry point: its subjects, or the reason why there are none.

    ``code`` is a digest of the code that loading it reached, empty where none was computed.
    """

    name: str
    target: str
    subjects: tuple[Subject, ...] = ()
    problem: str | None = None
    code: str = ""


def points(targets: Sequence[str] = ()) -> list[EntryPoint]:
    """Every registered entry point, then the functions ``MODULE:CALLABLE`` that no distribution has registered.

    Raises SubjectError: a target is not of that form.
    """
    unique = {(point.name, point.value): point for point in entry_points(group=GROUP)}
    for target in targets:
        module, colon, name = target.partition(":")
        if not (module and colon and name):
            raise SubjectError(f"{target!r} is no provider of subjects; name a function as MODULE:CALLABLE")
    return [point for _, point in sorted(unique.items())] + [EntryPoint(t.partition(":")[2], t, GROUP) for t in targets]


def providers() -> list[Provider]:
    """Every registered entry point, loaded in this process; a broken one carries its problem instead of subjects."""
    return [load(point) for point in points()]


def layers() -> list[str]:
    """Import names of this project's own layer, as it is installed; several where a checkout and a wheel are."""
    return sorted({point.module.partition(".")[0] for point in entry_points(group=GROUP, name=LAYER)})


def layer_of_the_tree() -> str | None:
    """The target of the layer beside this package, where it is a source tree that no distribution registered: its
    subjects must be named then. None where a layer is registered, or none is importable from there."""
    beside = Path(__file__).resolve().parents[2] / "kernels"
    spec = None if layers() else find_spec(beside.name)
    ours = spec is not None and spec.origin is not None and Path(spec.origin).resolve().parent == beside
    return f"{beside.name}.subjects:subjects" if ours else None


def provider(target: str) -> Provider:
    """The subjects of ``MODULE:CALLABLE``, loaded in this process.

    Raises SubjectError: it cannot be loaded, or ``target`` is not of that form.
    """
    loaded = load(points([target])[-1])
    if loaded.problem is not None:
        raise SubjectError(loaded.problem)
    return loaded


def load(point: EntryPoint) -> Provider:
    """The provider behind an entry point; whatever it raises while it loads is its problem."""
    try:
        with extensions.within(extensions.LOADING):
            loaded = tuple(point.load()())
    except BaseException as error:
        if type(error) is KeyboardInterrupt:
            raise  # the user's
        return broken(point, described(error) + _meant(error))
    return Provider(point.name, point.value, loaded)


def _meant(error: BaseException) -> str:
    """What a module has instead of the name that it lacks."""
    module = getattr(error, "obj", None)
    if not isinstance(error, AttributeError) or not isinstance(module, ModuleType):
        return ""
    functions = {
        name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    }
    offered = [name for name, value in functions.items() if callable(value) and not name.startswith("_")]
    return f"; {among(error.name, offered)}"


def broken(point: EntryPoint, why: str) -> Provider:
    """The provider of an entry point that gives no subjects."""
    text = f"{why}; `fp8-oracle doctor` says which package was found"
    return Provider(
        point.name, point.value, problem=f"subjects {point.name!r} ({point.value}) cannot be loaded: {text}"
    )


def called(subject: Subject, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> Any:
    """What a subject returns for copies of the inputs on its device; tensors come back on the CPU, as laid out."""
    copies = {name: tensor.to(subject.device, copy=True) for name, tensor in inputs.items()}
    output: Any = subject.run(copies, dict(options))
    if subject.device != "cpu":
        torch.cuda.synchronize()
        output = {n: _on_host(t) for n, t in output.items()} if isinstance(output, Mapping) else _on_host(output)
    return output


def one_line(error: BaseException) -> str:
    """What foreign code raised, in one line of at most ``LONGEST_MESSAGE`` characters."""
    try:
        text = " ".join(str(error).split()) or "no message"
    except BaseException:  # a message of foreign code is foreign code
        text = "its message cannot be read"
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}..."


def described(error: BaseException) -> str:
    """The kind of an error, and its message in one line."""
    return f"{type(error).__name__}: {one_line(error)}"


def _on_host(x: Any) -> Any:
    """A tensor on the CPU, laid out as it was; anything else is left for the contract to refuse."""
    return memory.on_host(x) if isinstance(x, Tensor) else x
