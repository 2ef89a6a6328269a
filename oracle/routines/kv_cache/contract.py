"""Contracts of KV caches as pieces: what a kernel puts where in memory that held something before.

    Copied      bits go to their places
    Coded       code(float32(x / scale)) of a scale that is given; a division, rounded once, then the cast
    Quantised   codes and scales by a recipe (:mod:`oracle.numbers.kv_recipes`), the scales bytes of the same memory
    Products    T(float32(value(code) * scale)), on reading

A *place* is an index into the elements of an output in the order of its logical shape. What no piece writes holds the
bits that it held: the memory before the call is an input of the same name as the output.

*Admitted*: one code where the scale is given (any NaN for a NaN, -0 for +0), of ``x`` times the rounded reciprocal
where ``numerics`` declares a recipe that multiplies by it (``vllm_static``); for ``Quantised`` the sets of
:mod:`oracle.bounds.quantiser`; for ``Products`` the two values that one or two roundings give, and what lies between
them: the product of a code and a float32 value has at most 28 bits, so float64 holds it, and a kernel rounds it to
float32 or not before it rounds it to T. Everything else is judged bit for bit.

Faults have the stages READ, OPTIONS, STORE (the pieces, whose places they change), QUOTIENT and CODES (of what is
``Coded``), those of the quantiser, and WRITE. Not covered: E5M2, two tokens in one slot (the order of two stores).

NaN values are coded as any NaN; bits that are moved keep theirs.
Sources: those of :mod:`oracle.routines.kv_cache.writers` and :mod:`oracle.routines.kv_cache.readers`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.interval import Admissible
from oracle.errors import ContractError, NumericsError, OptionError, ShapeError
from oracle.numbers import recipe_table
from oracle.numbers.formats import E2M1, E4M3FN, codes_of, decode, from_codes
from oracle.numbers.recipes import CodeFormula, Recipe, ScaleFormula
from oracle.numbers.rounding import Overflow, Rounding, encode, f32, to_dtype
from oracle.numbers.scaling import ScaleFormat, grid
from oracle.routines.base import F32, Call, Contract, Inputs, Operands, Options, Out, Output, TensorSpec
from oracle.routines.fault import Fault, Stage, fold
from oracle.routines.fused.contract import INNER, Inner
from oracle.routines.mx.contract import pack, unpack
from oracle.routines.quantisers.contract import QuantiserSets, run_quantiser
from oracle.routines.traits import Kind, Trait
from oracle.tensorcore.identify import Match
from oracle.verdict.compare import Verdict, compare, verdict
from oracle.verdict.sets import Found, Range, Sets, judge_bits, ranged, rounded_to, worst_of

QUANTISER_STAGES = {Stage.RECIPE, Stage.AMAX, Stage.QUOTIENT, Stage.CODES, Stage.SCALE}
DIVIDED, READ = "x / scale, rounded once", "code times scale, one rounding or two"
MULTIPLIED = "x times the rounded reciprocal of the scale"


@dataclass(frozen=True)
class Copied:
    """Bits ``[R, K]`` (integers as wide as the elements of the output) and their places."""

    name: str
    bits: Tensor
    at: Tensor


@dataclass(frozen=True)
class Coded:
    """Values ``[R, K]``, the scale of each row ``[R, 1]`` (float64), and the places of their codes."""

    name: str
    x: Tensor
    scale: Tensor
    at: Tensor


@dataclass(frozen=True)
class Quantised:
    """Values ``[R, K]``, recipes, the places of their codes (two to a byte for E2M1) and of the bytes of their scales.

    ``scales`` names the output of the scales; ``scale_at`` is ``[R, G * bytes of a scale]``, of a float32 output
    ``[R, G]``. ``exponents``: a scale is a byte, its exponent.
    """

    name: str
    x: Tensor
    recipes: tuple[Recipe, ...]
    at: Tensor
    scales: str
    scale_at: Tensor
    global_scale: Tensor | None = None
    exponents: bool = False

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.recipes[0].element == E2M1


@dataclass(frozen=True)
class Products:
    """Codes ``[R, K]``, the scale of each ``[R, K]`` (float64), and the places of their products."""

    name: str
    codes: Tensor
    scale: Tensor
    at: Tensor


Piece = Copied | Coded | Quantised | Products


SIDE_BY_SIDE = Trait("casts compressed and rotated columns side by side, in one piece")
SCALE_OF_HEADS = Trait("takes a scale for each head")
INDEX_PAGES = Trait("has pages of codes, then of their scales")
ROWS_READ = Trait("reads rows of 656 bytes")
FILLS = Trait("writes all of the memory that it is given")


def puts(kind: type[Piece]) -> Trait:
    """Contracts of caches that have pieces of this kind."""
    return Trait(f"has {kind.__name__} pieces", lambda c: isinstance(c, CacheContract) and kind in c.kinds)


@dataclass(frozen=True)
class Quotients:
    """What a change of stage QUOTIENT gets, and of ``Coded`` values returns: ``quotient [R, K]``, float64."""

    x: Tensor
    scale: Tensor
    quotient: Tensor
    rounding: Rounding = Rounding.NEAREST_EVEN
    overflow: Overflow = Overflow.SATURATE

    def codes(self) -> Tensor:
        """uint8 codes ``[R, K]`` of E4M3; NaN is 0x7F."""
        undefined = torch.isnan(self.quotient)
        quotients = encode(
            self.quotient.masked_fill(undefined, 0.0), E4M3FN, rounding=self.rounding, overflow=self.overflow
        )
        return quotients.masked_fill(undefined, 0x7F)


class CacheInner(Inner):
    """The quantiser of one piece; a scale of the tensor may stand over its scales."""

    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        *INNER,
        TensorSpec("global_scale", Kind.SCALES, F32, None, "multiplies", optional=True),
    )

    def __init__(self, outer: Call, piece: Quantised) -> None:
        super().__init__(outer, piece.recipes, None)
        self.piece = piece


class CacheContract(Contract):
    """A routine that writes into, or reads from, a cache of pages.

    An output of the name of an input holds what the memory of that input holds after the call: what the routine does
    not write has the bits that it had. A fresh output is written whole, where nothing else is said. What is neither
    quantised nor multiplied is moved bit for bit. Two tokens do not share a slot.

    Subclasses
    ----------
    A subclass writes ``pieces``, and ``before`` where it allocates an output; ``kinds`` says which pieces a call may
    have, from which its faults follow. ``memory`` are the inputs that are written into: outputs of the same names.
    """

    section = "KV cache"
    gpu = True
    kinds: ClassVar[tuple[type[Piece], ...]]
    memory: ClassVar[tuple[str, ...]] = ()
    interval: ClassVar[bool] = True  # whether admissible outputs are an interval around the expected ones
    divides: ClassVar[bool] = False  # whether codes are those of quotients by a given scale

    @abstractmethod
    def pieces(self, inputs: Inputs, options: Options) -> list[Piece]:
        """What a right kernel puts where, for checked inputs."""

    def paged(self, name: str) -> bool:
        return name in self.memory

    def before(self, inputs: Inputs, options: Options) -> dict[str, Tensor]:
        """The memory of every output before the call; NaN bits in fresh outputs."""
        return {name: inputs[name] for name in self.memory}

    def unwritten(self, call: Call) -> dict[str, Tensor]:
        """Elements of fresh outputs, bool in their shapes, that may hold anything."""
        return {}

    # --- what follows ---------------------------------------------------------------------------------------

    @property
    def takes_numerics(self) -> bool:
        return self.loses or self.divides

    def work(self, call: Call) -> list[Piece]:
        """The pieces of a checked call.

        Raises ContractError: a piece is of no kind that the contract states.
        """
        return call.cached("pieces", lambda: self._stated(self.pieces(call.inputs, call.resolved)))

    def _stated(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            if not isinstance(piece, self.kinds):
                raise ContractError(f"{self.name} has a {type(piece).__name__} piece; state it in its kinds")
        return pieces

    def inner(self, call: Call) -> Call:
        """The quantiser of the first piece that has one."""
        return call.cached("inner", lambda: _inside(call, next(p for p in self.work(call) if isinstance(p, Quantised))))

    def operands(self, call: Call) -> Operands | None:
        quantised = [piece for piece in self.work(call) if isinstance(piece, Quantised)]
        return Operands({}, tuple(quantised[0].x.shape), recipes=quantised[0].recipes) if quantised else None

    def outputs(self, call: Call) -> dict[str, Out]:
        before = self.before(call.inputs, call.resolved)
        free = self.unwritten(call)
        return {
            name: Out(tuple(x.shape), (x.dtype,), ~free[name] if name in free else None) for name, x in before.items()
        }

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        inputs = fold(call, faults, Stage.READ, dict(call.inputs))
        options = fold(call, faults, Stage.OPTIONS, dict(call.resolved))
        pieces: list[Piece] = fold(call, faults, Stage.STORE, self.pieces(inputs, options))
        memory = {name: x.clone() for name, x in self.before(call.inputs, call.resolved).items()}
        for piece in pieces:
            for name, bits, at in _written(call, piece, faults):
                inside = (at >= 0) & (at < memory[name].numel())  # what leaves the memory is nobody's output
                memory[name] = put(memory[name], at[inside], bits[inside])
        outputs: dict[str, Tensor] = fold(call, faults, Stage.WRITE, memory)
        return outputs

    def reference(self, inputs: Inputs, **options: object) -> Tensor | dict[str, Tensor]:
        outputs = self.kernel(Call(self, inputs, options).checked())
        return outputs["out"] if tuple(outputs) == ("out",) else outputs

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [CacheSets(self, call, numerics)]

    def why_mistrust(self, call: Call) -> str | None:
        """The reason for which a pass would prove little, or None."""
        scales = [call.inputs[name] for name in ("k_scale", "v_scale") if name in call.inputs]
        if len(scales) == 2 and torch.equal(*scales):
            return "k_scale and v_scale are equal, so one in place of the other changes nothing"
        return None

    def refused(self, call: Call, outputs: Found, right: Found) -> dict[str, Tensor] | None:
        sets = CacheSets(self, call, None)
        return {name: sets.bad(name, out, outputs) for name, out in outputs.items()}

    def predict(self, inputs: Inputs, *, numerics: str | None, **options: object) -> dict[str, Tensor]:
        """The bits of one recipe, the contract's first when none is named."""
        call = Call(self, inputs, options).checked()
        if not self.loses:
            super().predict(inputs, numerics=numerics, **options)
        outputs = self.kernel(call)
        for piece in self.work(call):
            if isinstance(piece, Quantised):
                inside = _inside(call, piece)
                assert isinstance(inside.contract, CacheInner)
                chosen = replace(piece, recipes=tuple(inside.contract.recipes(inside, numerics)))
                for name, bits, at in _written(call, chosen, ()):
                    flat(outputs[name])[at] = bits
        return outputs

    def identify(self, inputs: Inputs, output: Output, *, arch: str | None, **options: object) -> list[Match]:
        """Recipes by the fraction of codes and scales of the first quantised piece that they reproduce, best first."""
        call = Call(self, inputs, options).checked()
        if not self.loses:
            super().identify(inputs, output, arch=arch, **options)
        inside = self.inner(call)
        assert isinstance(inside.contract, CacheInner)
        codes = _split(inside.contract.piece, self.validate_output(call, output))
        return inside.contract.identify(inside.inputs, codes, arch=arch)


class WritesCodes(CacheContract):
    """Writing under a given scale: ``code = e4m3(float32(x / scale))``, a division rounded once, then the cast, to
    nearest even and saturated: infinities give +-448; NaN gives any NaN, -0 and +0 either zero. Declared ``numerics``
    of a recipe that multiplies (vllm_static) admit x times the rounded reciprocal instead; undeclared they are not
    admitted. A given scale is one value, positive and finite, where no other shape is said."""


class ReadsCodes(CacheContract):
    """Reading: ``T(float32(value(code) * scale))``, where the rounding to float32 may be left out; NaN codes give NaN.
    A given scale is one value, positive and finite."""


@dataclass(frozen=True)
class CacheSets(Sets):
    """The sets of every piece, and the bits of what no piece writes."""

    contract: CacheContract
    call: Call
    recipe: str | None

    def judge(self, outputs: Found) -> Verdict:
        expected, mistrust = self.call.truth, self.contract.why_mistrust(self.call)
        verdicts = [sets.judge(_split(piece, outputs)) for piece, sets in self.quantised()]
        for name, sets in self.intervals().items():
            coded = MULTIPLIED if self.multiplied() else DIVIDED
            basis = coded if any(isinstance(p, Coded) for p in self.contract.work(self.call)) else READ
            verdicts.append(verdict(compare(outputs[name], sets, output=name), basis=basis, mistrust=mistrust))
        for name, due in expected.items():
            rest = torch.where(self.elsewhere(name), flat(due), flat(outputs[name]))
            same = rest.view(due.dtype).reshape(due.shape)
            verdicts.append(judge_bits(same, due, output=name, mistrust=mistrust))
        return worst_of(verdicts)

    def quantised(self) -> list[tuple[Quantised, QuantiserSets]]:
        """The pieces that a recipe decides, and their sets."""
        judged = []
        for piece in self.contract.work(self.call):
            if isinstance(piece, Quantised):
                inside = _inside(self.call, piece)
                assert isinstance(inside.contract, CacheInner)
                recipes = inside.contract.recipes(inside, self.recipe)
                judged.append((piece, QuantiserSets(inside.contract, inside, recipes)))
        return judged

    def multiplied(self) -> bool:
        """Whether the declared recipe multiplies by the reciprocal of a given scale.

        Raises NumericsError: it is a recipe that computes its scale.
        """
        if self.recipe is None or not self.contract.divides:
            return False
        recipe = recipe_table.get(self.recipe)
        if recipe.formula is not ScaleFormula.GIVEN:
            raise NumericsError(f"{self.contract.name} takes a given scale; declare vllm_static or torch_static")
        return recipe.code is CodeFormula.RECIPROCAL

    def intervals(self) -> dict[str, Admissible]:
        """The ends of every element that is divided or multiplied, in the shape of the output."""
        return self.call.cached(f"intervals of {self.recipe}", self._intervals)

    def _intervals(self) -> dict[str, Admissible]:
        intervals: dict[str, Admissible] = {}
        for name, due in self.call.truth.items():
            pieces = [p for p in self.contract.work(self.call) if isinstance(p, Coded | Products) and p.name == name]
            if not pieces:
                continue
            expected = decode(due).flatten()
            low, high, inside = expected.clone(), expected.clone(), torch.zeros_like(expected, dtype=torch.bool)
            for piece in pieces:
                inside[piece.at] = True
                if isinstance(piece, Products):
                    ends = _products(piece, due.dtype)
                    low[piece.at], high[piece.at] = ends.amin(dim=0), ends.amax(dim=0)
                elif self.multiplied():
                    quotient = f32(decode(piece.x) * f32(torch.ones_like(piece.scale) / piece.scale))
                    codes = Quotients(piece.x, piece.scale, quotient).codes()
                    low[piece.at] = high[piece.at] = expected[piece.at] = decode(codes, E4M3FN)
            low, high, expected, owned = (t.reshape(due.shape) for t in (low, high, expected, inside))
            intervals[name] = Admissible(low, high, expected, specified=owned)
        return intervals

    def elsewhere(self, name: str) -> Tensor:
        """The elements of an output that are not judged bit for bit, bool ``[n]``."""
        return self.call.cached(f"elsewhere {name}", lambda: self._elsewhere(name))

    def _elsewhere(self, name: str) -> Tensor:
        free = torch.zeros(self.call.truth[name].numel(), dtype=torch.bool, device="cpu")
        if (left := self.contract.unwritten(self.call).get(name)) is not None:
            free |= left.flatten()
        for piece in self.contract.work(self.call):
            if not isinstance(piece, Copied) and piece.name == name:
                free[piece.at] = True
            if isinstance(piece, Quantised) and piece.scales == name:
                free[piece.scale_at] = True
        return free

    def bad(self, name: str, out: Tensor, outputs: Found) -> Tensor:
        """The elements of an output ``out`` ``[...]`` (its dtype) that are refused, bool of the same shape."""
        due = self.call.truth[name]
        bad = ((flat(out) != flat(due)) & ~self.elsewhere(name)).reshape(due.shape)
        if (sets := self.intervals().get(name)) is not None:
            bad = bad | compare(out, sets, output=name).bad
        raw = bad.flatten()
        for piece, judged in self.quantised():
            right = _split(piece, self.call.truth)
            wrong = judged.contract.refused(judged.call, _split(piece, outputs), right)
            assert wrong is not None
            if piece.name == name:
                codes = wrong["q"].to(torch.uint8)
                raw[piece.at] = (pack(codes) if piece.packed else codes) != 0
            if piece.scales == name:
                width = piece.scale_at.shape[1] // wrong["scale"].shape[1]
                raw[piece.scale_at] = wrong["scale"].repeat_interleave(width, dim=1)
        return raw.reshape(due.shape)

    def ranges(self, expected: Found) -> dict[str, Range] | None:
        if not self.contract.interval:
            return None
        intervals = {}
        for name, due in expected.items():
            left = self.contract.unwritten(self.call).get(name, torch.zeros(due.shape, dtype=torch.bool, device="cpu"))
            same = Range(due, due, left.to(torch.uint8))
            if (sets := self.intervals().get(name)) is None:
                intervals[name] = same
                continue
            wide, inside = ranged(replace(sets, specified=None), due.dtype), sets.specified
            assert inside is not None
            ends = (torch.where(inside, decode(end), decode(due)) for end in (wide.low, wide.high))
            low, high = (rounded_to(end, due.dtype) for end in ends)
            intervals[name] = Range(low, high, same.free)
        return intervals


# --- pieces to memory and back --------------------------------------------------------------------------------


def flat(x: Tensor) -> Tensor:
    """The elements of ``x`` ``[...]`` in the order of its logical shape, as integers ``[n]`` of their width."""
    raw = x.contiguous()
    return (codes_of(raw) if raw.is_floating_point() else raw).flatten()


def put(x: Tensor, at: Tensor, bits: Tensor) -> Tensor:
    """Memory ``x`` ``[...]`` of any dtype that holds ``bits`` in the places ``at`` (integers ``[R, K]``) and everywhere
    else what it held; returns ``[...]`` of the same dtype. Of ``bits`` ``[R, K]`` the lowest bits are taken."""
    memory = flat(x).clone()
    memory[at] = bits.to(memory.dtype)
    return memory.view(x.dtype).reshape(x.shape)


def _written(call: Call, piece: Piece, faults: tuple[Fault, ...]) -> list[tuple[str, Tensor, Tensor]]:
    """What a kernel with these faults writes of a piece: an output, bits and their places."""
    match piece:
        case Copied():
            return [(piece.name, piece.bits, piece.at)]
        case Coded():
            right = Quotients(piece.x, piece.scale, f32(decode(piece.x) / piece.scale))
            codes = fold(call, faults, Stage.QUOTIENT, right).codes()
            return [(piece.name, fold(call, faults, Stage.CODES, codes), piece.at)]
        case Products():
            read = rounded_to(f32(decode(piece.codes) * piece.scale), _dtype(call, piece.name))
            return [(piece.name, codes_of(read), piece.at)]
        case Quantised() if not len(piece.x):
            return []
        case Quantised():
            inside = _inside(call, piece)
            quantised = run_quantiser(inside, tuple(f for f in faults if QUANTISER_STAGES & set(f.changes)))
            codes = codes_of(quantised["q"], E2M1) if piece.packed else codes_of(quantised["q"])
            scales = _scale_bytes(quantised["scale"], piece, _dtype(call, piece.scales).itemsize)
            return [
                (piece.name, pack(codes) if piece.packed else codes, piece.at),
                (piece.scales, scales, piece.scale_at),
            ]


def _dtype(call: Call, name: str) -> torch.dtype:
    contract = call.contract
    assert isinstance(contract, CacheContract)
    return contract.before(call.inputs, call.resolved)[name].dtype


def _products(piece: Products, dtype: torch.dtype) -> Tensor:
    """The product rounded twice and once, float64 ``[2, R, K]``."""
    exact = decode(piece.codes) * piece.scale
    return torch.stack([decode(rounded_to(value, dtype)) for value in (f32(exact), exact)])


def _scale_bytes(scale: Tensor, piece: Quantised, width: int) -> Tensor:
    """Scales ``[R, G]`` as elements of ``width`` bytes: float32 ``[R, 4 G]`` of one byte or ``[R, G]`` of four, bytes
    of exponents ``[R, G]``, or of E4M3 under a scale of the tensor."""
    if piece.exponents:
        return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    if width == 4:
        return scale.contiguous().view(torch.int32)
    if piece.recipes[0].scale_format is ScaleFormat.E4M3:
        narrow = torch.float8_e4m3fn
        return codes_of(to_dtype(decode(scale), narrow, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE))
    return scale.clone(memory_format=torch.contiguous_format).view(torch.uint8).reshape(scale.shape[0], -1)


def _inside(call: Call, piece: Quantised) -> Call:
    """The quantiser of a piece as a call of its own."""
    scales = {} if piece.global_scale is None else {"global_scale": piece.global_scale}
    return Call(CacheInner(call, piece), {"x": piece.x, **scales})


def _split(piece: Quantised, outputs: Found) -> dict[str, Tensor]:
    """Codes and scales of a piece out of the outputs."""
    codes, scales = flat(outputs[piece.name])[piece.at], flat(outputs[piece.scales])[piece.scale_at]
    recipe = piece.recipes[0]
    q = unpack(codes) if piece.packed else from_codes(codes, recipe.element)
    shape = grid(piece.x.shape, recipe.block).scale_shape
    if piece.exponents:
        # the exponent of infinity is no finite power: what a kernel stores of an infinite amax
        powers = (scales.to(torch.int32) << 23).view(torch.float32)
        return {"q": q, "scale": powers.reshape(shape)}
    if recipe.scale_format is ScaleFormat.E4M3:
        return {"q": q, "scale": rounded_to(decode(scales.view(torch.float8_e4m3fn)), torch.float32).reshape(shape)}
    return {"q": q, "scale": scales.contiguous().view(torch.float32).reshape(shape)}


# --- checks ---------------------------------------------------------------------------------------------------


def slots_of(slot_mapping: Tensor, name: str, slots: int, tokens: int, *, skip: int | None = None) -> None:
    """Refuse ``slot_mapping`` ``[T]``, integers, of slots beyond the cache, two tokens of one slot, none at all, and
    more slots than tokens. Negative slots (or ``skip``) belong to tokens that are not written. Raises ShapeError,
    OptionError."""
    if slot_mapping.numel() > tokens:
        raise ShapeError(f"{name} names {slot_mapping.numel()} slots for {tokens} tokens")
    used = slot_mapping[slot_mapping >= 0] if skip is None else slot_mapping[slot_mapping != skip]
    if not used.numel():
        raise ShapeError(f"{name} names no slot; there is nothing to judge")
    if int(used.max()) >= slots or int(used.min()) < 0:
        raise OptionError(f"{name} reaches from {int(used.min())} to {int(used.max())}; the cache has {slots} slots")
    if len(set(used.tolist())) != used.numel():
        raise OptionError(f"{name} names a slot twice; which of two tokens stays there is not defined")


def one_scale(inputs: Inputs, *names: str, heads: int = 1) -> None:
    """Refuse scales that are not one value, or one for each head, or not positive and finite."""
    for name in names:
        scale = inputs[name]
        if scale.numel() not in (1, heads):
            due = "one value" if heads == 1 else f"one value or one for each of the {heads} heads"
            raise ShapeError(f"{name} has shape {list(scale.shape)}; it must hold {due}")
        if not bool(((scale > 0) & torch.isfinite(scale)).all()):
            raise OptionError(f"{name} is {scale.flatten().tolist()}; a scale is positive and finite")


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory ``[...]`` of this shape and dtype that a routine allocates: every bit set."""
    return (
        torch.full((torch.Size(shape).numel() * dtype.itemsize,), 0xFF, dtype=torch.uint8, device="cpu")
        .view(dtype)
        .reshape(shape)
    )
