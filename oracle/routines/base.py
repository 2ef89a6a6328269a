"""What a routine promises: its inputs, options and outputs, its truth, and how an output of it is judged.

A contract is a record of tensor and option specifications plus two verbs, :meth:`Contract.reference` and
:meth:`Contract.judge`. Everything that can be wrong with a *call* is refused here with one typed error that
names the value and the way out; everything that can be wrong with a *kernel* is a verdict.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import (
    ContractError,
    DeviceError,
    DtypeError,
    InputError,
    LayoutError,
    NumericsError,
    OptionError,
    ShapeError,
)
from oracle.tensorcore.identify import Match
from oracle.verdict.compare import Verdict

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
Output = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class TensorSpec:
    """One input: its name, dtypes and symbolic dims.

    A dim is a symbol (``"M"``), a number (``"1"``), a ceiling division (``"K/128"``), or alternatives
    separated by ``|`` (``"1|M"``). ``dims=None`` leaves the shape to the contract's own check.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    dims: tuple[str, ...] | None
    doc: str
    optional: bool = False
    contiguous: bool = False


@dataclass(frozen=True)
class OptionSpec:
    """One option: its default and, where they are few, the values it admits (``None``: any)."""

    name: str
    default: object
    choices: tuple[object, ...] | None
    doc: str


class Contract(ABC):
    """One routine of the suite. Subclasses are stateless; one instance is registered per name."""

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    inputs: ClassVar[tuple[TensorSpec, ...]]
    options: ClassVar[tuple[OptionSpec, ...]] = ()
    outputs: ClassVar[tuple[str, ...]] = ("out",)

    @abstractmethod
    def reference(self, inputs: Mapping[str, Tensor], **options: object) -> Tensor | dict[str, Tensor]:
        """The truth for checked inputs; see :func:`oracle.reference`."""

    @abstractmethod
    def judge(
        self,
        inputs: Mapping[str, Tensor],
        output: Output,
        *,
        arch: str,
        numerics: str | None,
        **options: object,
    ) -> Verdict:
        """The verdict on ``output``; see :func:`oracle.judge`."""

    def predict(
        self, inputs: Mapping[str, Tensor], *, numerics: str | None, **options: object
    ) -> Tensor | dict[str, Tensor]:
        """The exact bits under named numerics; see :func:`oracle.predict`."""
        raise NumericsError(f"{self.name} has one right result and no numerics to choose; reference() gives its bits")

    def identify(
        self, inputs: Mapping[str, Tensor], output: Output, *, arch: str | None, **options: object
    ) -> list[Match]:
        """Known arithmetic ranked by equal bits; see :func:`oracle.identify`."""
        raise NumericsError(f"{self.name} has one right result and no numerics to identify; judge() compares with it")

    def check(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> dict[str, object]:
        """Refuse a bad call; return the options with their defaults filled in.

        Raises
        ------
        InputError, DtypeError, ShapeError, LayoutError, DeviceError, OptionError
        """
        resolved = self._check_options(options)
        self._check_names(inputs)
        for spec in self.inputs:
            if spec.name in inputs:
                _check_tensor(spec, inputs[spec.name])
        self._check_devices(inputs)
        self.extents(inputs)
        return resolved

    def extents(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        """Bind the symbols of the specs (``M``, ``N``, ``K``...) and check every dim against them."""
        bound: dict[str, int] = {}
        present = [s for s in self.inputs if s.name in inputs and s.dims is not None]
        for spec in present:
            for axis, dim in enumerate(spec.dims or ()):
                if dim.isidentifier():
                    extent = inputs[spec.name].shape[axis]
                    if bound.setdefault(dim, extent) != extent:
                        raise ShapeError(
                            f"{spec.name} has {dim}={extent} in axis {axis}, but {dim}={bound[dim]} elsewhere; "
                            f"shapes: {_shapes(inputs)}"
                        )
        for spec in present:
            for axis, dim in enumerate(spec.dims or ()):
                extent = inputs[spec.name].shape[axis]
                admitted = [_evaluate(alternative, bound) for alternative in dim.split("|")]
                if extent not in admitted:
                    raise ShapeError(
                        f"{spec.name} has extent {extent} in axis {axis}, but {dim} = "
                        f"{' or '.join(map(str, admitted))} for {_symbols(bound)}; pass {spec.name} "
                        f"[{', '.join(spec.dims or ())}]"
                    )
        return bound

    def _check_options(self, options: Mapping[str, object]) -> dict[str, object]:
        known = {spec.name: spec for spec in self.options}
        for name, value in options.items():
            if name not in known:
                raise OptionError(
                    f"{self.name} has no option {name!r}; its options: {', '.join(known) or 'none'}"
                )
            choices = known[name].choices
            if choices is not None and not _among(value, choices):
                raise OptionError(
                    f"{self.name}: {name}={value!r} is not one of {', '.join(map(repr, choices))}"
                )
        return {name: options.get(name, spec.default) for name, spec in known.items()}

    def _check_names(self, inputs: Mapping[str, Tensor]) -> None:
        known = [spec.name for spec in self.inputs]
        missing = [s.name for s in self.inputs if not s.optional and s.name not in inputs]
        unexpected = [name for name in inputs if name not in known]
        if missing or unexpected:
            what = f"missing {', '.join(missing)}" if missing else f"unexpected {', '.join(unexpected)}"
            raise InputError(f"{self.name}: {what}; it takes {', '.join(known)}")

    def _check_devices(self, inputs: Mapping[str, Tensor]) -> None:
        devices = {name: str(t.device) for name, t in inputs.items()}
        if len(set(devices.values())) > 1:
            raise DeviceError(
                f"{self.name}: inputs lie on different devices ({devices}); move them to one with .to(device)"
            )


_REGISTRY: dict[str, Contract] = {}


def register(contract: type[Contract]) -> type[Contract]:
    """Class decorator: make the contract known under its name."""
    if contract.name in _REGISTRY:
        raise ValueError(f"contract {contract.name!r} is registered twice")
    _REGISTRY[contract.name] = contract()
    return contract


def registered() -> Mapping[str, Contract]:
    return dict(sorted(_REGISTRY.items()))


def get(name: str) -> Contract:
    """The contract of this name; ContractError lists what exists."""
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ContractError(f"no contract {name!r}; there are: {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name]


def check_output(
    output: Tensor, *, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Refuse an output that cannot be judged at all: wrong kind, dtype, shape or device."""
    _check_memory(name, output)
    if output.dtype not in dtypes:
        raise DtypeError(f"{name} has dtype {output.dtype}; expected {' or '.join(map(str, dtypes))}")
    if tuple(output.shape) != shape:
        raise ShapeError(f"{name} has shape {list(output.shape)}; these inputs give {list(shape)}")
    if output.device != device:
        raise DeviceError(f"{name} lies on {output.device}, the inputs on {device}; move one with .to(device)")


def plain(tensor: Tensor, name: str) -> Tensor:
    """The same values as a plain tensor: no gradient, no subclass, no negation or conjugation that is still pending.

    Raises
    ------
    InputError
        The tensor is of a subclass that holds no memory of its own (a fake or a distributed one).
    """
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise InputError(f"{name} is a {type(tensor).__name__}, which has no values of its own; pass a plain tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        return tensor  # refused by the contract, under its name there
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()


def _check_memory(name: str, tensor: Tensor) -> None:
    """Refuse what has no bits to look at as they stand."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} is a {type(tensor).__name__}, not a torch.Tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise LayoutError(f"{name} is {'nested' if tensor.is_nested else tensor.layout}; pass a dense tensor")
    if tensor.is_neg() or tensor.is_conj():
        raise LayoutError(f"{name} is a view that is yet to be negated or conjugated; pass {name}.resolve_neg()")


def _check_tensor(spec: TensorSpec, tensor: Tensor) -> None:
    _check_memory(spec.name, tensor)
    if tensor.device.type == "meta":
        raise LayoutError(f"{spec.name} is on {tensor.device}; pass a dense tensor with data")
    if tensor.dtype not in spec.dtypes:
        raise DtypeError(
            f"{spec.name} has dtype {tensor.dtype}; expected {' or '.join(map(str, spec.dtypes))}"
        )
    if spec.dims is not None and tensor.dim() != len(spec.dims):
        raise ShapeError(
            f"{spec.name} has rank {tensor.dim()} (shape {list(tensor.shape)}); expected [{', '.join(spec.dims)}]"
        )
    if tensor.numel() == 0:
        raise ShapeError(f"{spec.name} is empty (shape {list(tensor.shape)}); there is nothing to judge")
    if spec.contiguous and not tensor.is_contiguous():
        raise LayoutError(
            f"{spec.name} is not contiguous (strides {tensor.stride()}); the oracle takes logical values, "
            f"pass {spec.name}.contiguous()"
        )


def _among(value: object, choices: tuple[object, ...]) -> bool:
    try:
        return value in choices
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor has no one truth value
        return False


def _evaluate(dim: str, bound: Mapping[str, int]) -> int:
    if dim.isdigit():
        return int(dim)
    symbol, _, divisor = dim.partition("/")
    value = bound[symbol]
    return -(-value // int(divisor)) if divisor else value


def _shapes(inputs: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(t.shape)}" for name, t in inputs.items())


def _symbols(bound: Mapping[str, int]) -> str:
    return ", ".join(f"{k}={v}" for k, v in bound.items())
