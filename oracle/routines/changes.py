"""What of a call differs from what a case makes: any option, the dtype of any input, its presence and its strides.

    slot_mapping:i64,kv_layout:HND,k_scale:none,x:f16,x:pitch

Each is ``name:value``; ``name`` is an input or an option of the contract. The values of an input are

``DTYPE``  its values in another dtype (:data:`DTYPES`), rounded to nearest and saturated; the same bits where either
           dtype holds bits alone; the same integers. An optional input that the case does not make is made, from its
           kind and dims;
``none``   it is left out;
``ties``, ``zeros``, ``nan``, ``equal``, ``unassigned``, ``empty``, ...
           other data of its kind (:data:`oracle.routines.patterns.DATA`), beside scales that go with them;
``axes``, ``column``
           the same elements with one more axis in front; a vector as a column ``[N, 1]`` (:data:`SHAPES`; of an input
           whose dims the contract does not name);
``pitch``  it is a view of memory with longer rows; behind each of them lie bytes of ones.

The value of an option is its word (:mod:`oracle.routines.options`); the default of an option is left out of the call.
Not covered: whether the contract takes such a call, which is asked of it (:func:`oracle.routines.edges.valid`).

Source: derived in :mod:`oracle.routines.data` and :mod:`oracle.routines.patterns`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from oracle.errors import CaseError, OptionError, OracleError, among
from oracle.numbers.formats import decode
from oracle.routines import data, options
from oracle.routines.base import Call, Contract
from oracle.routines.patterns import DATA, Input, bits, rounded, words_of
from oracle.routines.traits import Kind, TensorSpec

DTYPES: Mapping[str, torch.dtype] = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
    "e8m0": torch.float8_e8m0fnu,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "u8": torch.uint8,
    "i8": torch.int8,
    "i32": torch.int32,
    "i64": torch.int64,
}
NONE, PITCH, EMPTY = "none", "pitch", "''"
BEHIND = 16  # elements behind each row of a pitched view: 16 bytes or more, as vector loads and TMA want them
BITS = (torch.uint8, torch.int8, torch.float8_e8m0fnu)  # dtypes of bytes whose values are not to be converted
GAIN = 512.0  # brings the scales of a stream (around 2**-8) to where a bound of amax binds some rows of ordinary values
Changes = tuple[tuple[str, str], ...]
SHAPES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "axes": lambda x: x.unsqueeze(0) if x.dim() == 2 else x,
    "column": lambda x: x.reshape(-1, 1) if x.numel() in x.shape and x.numel() > 1 else x,
}
"""Other shapes of the same elements; an input that has none stays as it is."""


def word_of(dtype: torch.dtype) -> str:
    """The word of a dtype of an input."""
    return next(word for word, known in DTYPES.items() if known == dtype)


def option_word(value: object) -> str:
    """The word of the value of an option; of extents, as ``64x128``."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(options.word(value)) or EMPTY


def ordered(contract: Contract, changes: Iterable[tuple[str, str]]) -> Changes:
    """The changes in the order of the contract's inputs and options, which is that of an id."""
    names = [*(spec.name for spec in contract.inputs), *(spec.name for spec in contract.options)]
    return tuple(sorted(set(changes), key=lambda one: (names.index(one[0]), one[1] == PITCH, one[1])))


def added(changes: Changes, more: Changes) -> Changes:
    """The changes, and those of more that change another aspect of an input, or another option."""
    known = {(name, _aspect(value)) for name, value in changes}
    return (*changes, *((name, value) for name, value in more if (name, _aspect(value)) not in known))


def parse(contract: Contract, text: str) -> Changes:
    """The changes of a segment ``name:value,...`` of an id.

    Raises
    ------
    CaseError
        Names what the contract does not have, or does not admit.
    """
    by_aspect: dict[tuple[str, str], str] = {}
    specs = {spec.name: spec for spec in contract.inputs}
    known = {spec.name: spec for spec in contract.options}
    for pair in text.split(","):
        name, colon, value = pair.partition(":")
        if not (name and colon and value):
            raise CaseError(f"{pair!r} in {text!r} is not of the form name:value")
        if name in specs:
            words = [word for word, dtype in DTYPES.items() if dtype in specs[name].dtypes]
            words += [NONE] if specs[name].optional else []
            words += words_of(specs[name])
            words += SHAPES if specs[name].dims is None else ()
            words += [] if specs[name].contiguous else [PITCH]
            if value not in words:
                raise CaseError(f"{value!r} is no change of input {name} of {contract.name}; {among(value, words)}")
        elif name in known:
            try:
                options.parse(contract, {name: "" if value == EMPTY else value})
            except OptionError as error:
                raise CaseError(f"{pair!r} changes no option: {error}") from None
        else:
            raise CaseError(f"{contract.name} has no input or option {name!r}; {among(name, [*specs, *known])}")
        if by_aspect.setdefault((name, _aspect(value)), value) != value:
            raise CaseError(f"{name!r} is changed twice in {text!r}")
    return ordered(contract, ((name, value) for (name, _), value in by_aspect.items()))


def changed_options(contract: Contract, plain: Mapping[str, object], changes: Changes) -> dict[str, object]:
    """The options of a call with the changes of options in place; one at its default is left out."""
    names = {spec.name: spec for spec in contract.options}
    words: dict[str, object] = {name: "" if value == EMPTY else value for name, value in changes if name in names}
    new = options.parse(contract, words)
    unchanged = {name: value for name, value in plain.items() if name not in new}
    return unchanged | {name: value for name, value in new.items() if not _same(value, names[name].default)}


def changed(
    contract: Contract, inputs: Mapping[str, Tensor], call: Mapping[str, object], changes: Changes, label: str
) -> dict[str, Tensor]:
    """The inputs of a call with the changes of inputs in place; data of a new input come from the stream of ``label``.

    Where the shape of a new input does not follow from the others it is the first that the contract takes, or the first
    where it takes none.
    """
    specs = {spec.name: spec for spec in contract.inputs}
    pitched = [name for name, value in changes if value == PITCH]
    shaped = [(name, SHAPES[value]) for name, value in changes if value in SHAPES]
    absent = {name for name, value in changes if value == NONE}
    patterns = [(specs[name], DATA[value]) for name, value in changes if name in specs and value in DATA]
    dtypes = {name: DTYPES[value] for name, value in changes if name in specs and value in DTYPES}
    present = {name: x for name, x in inputs.items() if name not in absent}
    ways: list[list[tuple[str, Tensor]]] = []
    for name, dtype in dtypes.items():
        if name in present:
            ways.append([(name, _recast(specs[name], present[name], dtype))])
        else:
            shapes = _shapes(contract, specs[name], present)
            ways.append([(name, made(specs[name], shape, dtype, f"{label}#{name}")) for shape in shapes])
    first: dict[str, Tensor] | None = None
    for way in itertools.product(*ways):
        tensors = {**present, **dict(way)}
        if len(ways) and patterns and not _takes(contract, tensors, call):
            first = tensors if first is None else first
            continue  # of such a call no pattern can be made
        for spec, pattern in patterns:
            tensors |= pattern.make(Input(spec, Call(contract, tensors, call))) if spec.name in tensors else {}
        tensors |= {name: shape(tensors[name]) for name, shape in shaped if name in tensors}
        tensors = {name: pitch(x) if name in pitched else x for name, x in tensors.items()}
        tensors = {name: tensors[name] for name in specs if name in tensors}
        first = tensors if first is None else first
        if len(ways) and not _takes(contract, tensors, call):
            continue
        return tensors
    assert first is not None
    return first


def pitch(x: Tensor) -> Tensor:
    """The values of ``x`` (any shape and dtype) as a view of the same shape and dtype.

    Its rows (columns of a transposed matrix) lie :data:`BEHIND` elements further apart, the elements of a vector two.
    Between them lie bytes of ones, NaN in most formats.
    """
    if x.dim() == 2 and x.stride(0) == 1 and x.stride(1) != 1:
        return pitch(x.t()).t()
    if x.dim() < 2:
        view = _poison((*x.shape, 2), x)[..., 0]
    else:
        view = _poison((*x.shape[:-1], x.shape[-1] + BEHIND), x)[..., : x.shape[-1]]
    bits(view).copy_(bits(x))
    return view


def made(spec: TensorSpec, shape: Sequence[int], dtype: torch.dtype, label: str) -> Tensor:
    """A new input of its kind in ``dtype``, the result has the shape ``shape``: ordinary values, distinct scales, a
    permutation of ids of which one is -1. It has no NaN and no infinity."""
    shape, count = tuple(shape), torch.Size(shape).numel()
    if spec.kind is Kind.IDS:
        ids = torch.from_numpy(data.Stream(label).order(count)).clone()
        if count > 2:
            ids[1] = -1
        return ids.reshape(shape).to(dtype)
    if spec.kind.is_integer:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    if spec.kind in (Kind.SCALES, Kind.ALPHA, Kind.BOUND):
        gain = GAIN if spec.kind is Kind.BOUND else 1.0
        return rounded((data.scales(label, "randn", (count,)) * gain).double(), dtype).reshape(shape)
    return data.normal(label, shape, dtype=dtype)


def _recast(spec: TensorSpec, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same input in another dtype; bytes that hold bits alone have the values of integers in a wider one."""
    if spec.kind.is_integer:
        return x.to(dtype)
    as_bits = x.dtype in BITS or dtype in BITS
    if as_bits and x.element_size() != dtype.itemsize:
        return x.view(torch.uint8).to(dtype) if x.dtype in BITS else rounded(decode(x), torch.float8_e4m3fn).view(dtype)
    return x.view(dtype) if as_bits else rounded(decode(x), dtype)


def _shapes(contract: Contract, spec: TensorSpec, inputs: Mapping[str, Tensor]) -> list[tuple[int, ...]]:
    """Shapes that a new input may have: those of its dims, a symbol that nothing binds taking any extent of the call;
    one value where it has no dims."""
    if spec.dims is None:
        return [(1,), ()]
    try:
        bound = contract.extents(inputs)
    except OracleError:
        return [(1,) * len(spec.dims)]
    free = dict.fromkeys(dim for dim in spec.dims if dim.isidentifier() and dim not in bound)
    shapes = []
    for extents in itertools.product(sorted(set(bound.values())), repeat=len(free)):
        known = {**bound, **dict(zip(free, extents, strict=True))}
        shapes.append(tuple(_extent(dim.split("|")[-1], known) for dim in spec.dims))
    return shapes


def _extent(dim: str, known: Mapping[str, int]) -> int:
    if dim.isdigit():
        return int(dim)
    symbol, _, divisor = dim.partition("/")
    return -(-known[symbol] // int(divisor)) if divisor else known[symbol]


def _takes(contract: Contract, inputs: Mapping[str, Tensor], call: Mapping[str, object]) -> bool:
    try:
        contract.check(inputs, call)
    except OracleError:  # the contract takes no such call
        return False
    return True


def _poison(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Bytes of ones: NaN in every format of floats here but two, whose code of all ones is negative; -1 of integers."""
    return torch.full((*shape, like.element_size()), 255, dtype=torch.uint8, device="cpu").view(like.dtype)[..., 0]


def _same(value: object, default: object) -> bool:
    return type(value) is type(default) and value == default


def _aspect(value: str) -> str:
    """What a value changes of an input: its data, its shape, its strides, or its dtype and presence."""
    return "data" if value in DATA else "shape" if value in SHAPES else value if value == PITCH else "dtype"
