"""The page of a contract: what a kernel of it takes, computes and returns, printed from the contract's own record.

Inputs, options, numerics and the record of every admitted recipe are printed as they stand. The shape of an output is a
formula of the dims of the inputs that holds on every small case of the profile, or that of one call where no short
formula does. What a recipe gives for a block of zeros, an infinity, a NaN and -0 is computed by the recipe. Everything
else stands in the docstrings of the contract's classes, those of its family first, up to the section ``Subclasses``.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from importlib import import_module
from itertools import permutations
from types import ModuleType

import torch
from torch import Tensor

from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.cli import releases
from oracle.errors import DtypeError, OptionError
from oracle.numbers.formats import codes_of
from oracle.numbers.quantize import WIDE, Quantized, quantize, suits
from oracle.numbers.recipes import CodeRounding, NanAmax, Recipe, ScaleFormula
from oracle.routines import Contract, profiles
from oracle.routines.base import Call, OptionSpec, TensorSpec
from oracle.routines.case import Case
from oracle.routines.options import word
from oracle.tensorcore.schedules import Schedule, schedules

FEW = 1 << 16  # elements of the inputs of a case that is small
EVERY = "Inputs have any strides but for those marked contiguous; a tensor without elements is refused."
_ROLE = re.compile(r":\w+:`~?\.?(?:[\w.]+\.)?(\w+)`")
_FOR_SUBCLASSES = re.compile(r"^Subclasses\n-+\n.*", re.MULTILINE | re.DOTALL)


def page(contract: Contract, profile: str) -> Iterator[str]:
    """The lines of the page."""
    calls = _calls(contract, profile)
    yield contract.name
    yield f"  {contract.summary}"
    yield f"  source: {contract.source}"
    yield releases_of(contract)
    for kind in reversed(type(contract).__mro__):
        if kind not in Contract.__mro__:
            yield from _paragraph(vars(kind).get("__doc__") or "")
    yield from _paragraph(_truth(contract))
    yield f"  {EVERY}"
    yield from (f"  {line}" for line in _sources(type(contract)))
    yield from map(_input, contract.inputs)
    yield from map(_option, contract.options)
    yield from _outputs(contract, calls)
    yield from _recipes(contract, calls)
    yield from _numerics(contract)
    yield f"  cases: {len(profiles.cases(contract.name, profile))} in profile {profile}"


def releases_of(contract: Contract) -> str:
    """The line of the releases that a contract describes."""
    recipes = [recipe for kind in type(contract).__mro__ for value in vars(kind).values() for recipe in _stated(value)]
    texts = " ".join(_sources(type(contract))), *(recipe.source for recipe in recipes)
    return releases.line(contract.name, contract.source, texts)


def _paragraph(docstring: str) -> Iterator[str]:
    yield from (f"  {line}".rstrip() for line in _rules(docstring))


def _truth(contract: Contract) -> str:
    """The docstring of the function of the contract's name in the files of truth that its own file reads."""
    for module in vars(import_module(type(contract).__module__)).values():
        if isinstance(module, ModuleType) and module.__name__.startswith("oracle.truth."):
            function = getattr(module, contract.name, None)
            if function is not None and function.__module__ == module.__name__:
                return inspect.getdoc(function) or ""
    return ""


def _rules(docstring: str) -> list[str]:
    """The paragraphs of a class that are about the routine."""
    text = _FOR_SUBCLASSES.sub("", inspect.cleandoc(docstring)).strip()
    return _ROLE.sub(r"\1", text).replace("``", "").split("\n") if text else []


def _sources(kind: type[Contract]) -> list[str]:
    """What the file of a contract says of the releases that it describes, and of what is not covered."""
    text = inspect.cleandoc(import_module(kind.__module__).__doc__ or "")
    at = re.search(r"\bSources?: ", text)
    return _rules(text[at.start() :].partition("\n\n")[0]) if at is not None else []


def _shape(spec: TensorSpec) -> str:
    return "" if spec.dims is None else f" [{', '.join(spec.dims)}]"


def _input(spec: TensorSpec) -> str:
    dtypes = "|".join(str(word(dtype)) for dtype in spec.dtypes)
    marks = "".join(f" ({mark})" for mark, on in (("optional", spec.optional), ("contiguous", spec.contiguous)) if on)
    return f"  input {spec.name}{_shape(spec)} {spec.kind}, {dtypes}{marks}: {spec.doc}"


def _option(option: OptionSpec) -> str:
    choices = "" if option.choices is None else f" (of {', '.join(str(word(c)) for c in option.choices)})"
    return f"  option {option.name}={word(option.default)}{choices}: {option.doc}"


# --- outputs --------------------------------------------------------------------------------------------------


def _calls(contract: Contract, profile: str) -> list[Call]:
    """The small cases of the profile as calls, in the usual dtype of the output where they admit it."""
    listed = sorted(profiles.cases(contract.name, profile), key=_size)
    small: list[Call] = []
    for case in listed[:24]:
        inputs = case.inputs()
        if len(small) >= 4 and sum(x.numel() for x in inputs.values()) > FEW:
            break
        named = case.call_options()
        usual = {name: value for name, value in named.items() if name != "out_dtype"}
        try:
            small.append(Call(contract, inputs, usual).checked())
        except (
            DtypeError,
            OptionError,
        ):  # the usual dtype does not go with these inputs: from E4M3 to E4M3, bf16 weights
            small.append(Call(contract, inputs, named).checked())
    return small


def _size(case: Case) -> int:
    return math.prod(max(1, extent) for _, extent in case.extents)


def _outputs(contract: Contract, calls: Sequence[Call]) -> Iterator[str]:
    if not calls:
        yield f"  outputs: {', '.join(contract.returns)}"
        return
    usual = [call for call in calls if all(call.resolved[o.name] == o.default for o in contract.options)] or calls
    dues = [contract.outputs(call) for call in usual]
    for name in dues[0]:
        dtypes = _dtypes(usual, [each[name].dtypes for each in dues])
        shapes = [each[name].shape or tuple(call.truth[name].shape) for each, call in zip(dues, usual, strict=True)]
        partly = any(each[name].specified is not None for each in dues)
        said = "; some elements are unspecified" if partly else ""
        yield f"  output {name} {_formula(name, usual, shapes)}, {dtypes}{said}"


def _dtypes(calls: Sequence[Call], dtypes: Sequence[tuple[torch.dtype, ...]]) -> str:
    """The dtypes of an output, or the input whose dtype it has."""
    found = dict.fromkeys(str(word(dtype)) for each in dtypes for dtype in each)
    for name in calls[0].inputs if len(found) > 1 else ():
        if all(name in c.inputs and (c.inputs[name].dtype,) == due for c, due in zip(calls, dtypes, strict=True)):
            return f"the dtype of {name}"
    return "|".join(found)


def _formula(name: str, calls: Sequence[Call], shapes: Sequence[tuple[int, ...]]) -> str:
    """The shape as that of an input, as formulas of the dims of the inputs, or that of one call."""
    for like in sorted(calls[0].inputs, key=lambda one: one != name):
        same = all(like in c.inputs and tuple(c.inputs[like].shape) == s for c, s in zip(calls, shapes, strict=True))
        if same and (like == name or calls[0].contract.inputs[0].dims is None):
            return f"of the shape of {like}"
    known = [_extents(call) for call in calls]
    if len({len(shape) for shape in shapes}) == 1:
        numbers = {*(int(d) for spec in calls[0].contract.inputs for d in spec.dims or () if d.isdecimal())}
        axes = [_axis(known, [shape[axis] for shape in shapes], numbers) for axis in range(len(shapes[0]))]
        if all(axes):
            return f"[{', '.join(map(str, axes))}]"
    x = calls[-1].inputs
    return f"{list(shapes[-1])} for {', '.join(f'{name} {list(t.shape)}' for name, t in x.items())}"


def _extents(call: Call) -> dict[str, int]:
    """Extents and numbers of a call by the name that a page has for them."""
    found: dict[str, int] = {}
    for spec in call.contract.inputs:
        for axis, dim in enumerate(spec.dims or ()):
            if spec.name in call.inputs and dim.isidentifier():
                found.setdefault(dim, call.inputs[spec.name].shape[axis])
    numbers = {name: n for name, n in call.resolved.items() if isinstance(n, int) and not isinstance(n, bool)}
    return found | {name: n for name, n in numbers.items() if n > 0}


def _axis(known: Sequence[Mapping[str, int]], extents: Sequence[int], numbers: Container[int]) -> str | None:
    """The one shortest formula of dims that gives an extent in every call, or one of ``numbers``; else None."""
    names = [name for name in known[0] if all(name in each for each in known)]
    every = [*known, {name: 331 * (i + 2) ** 2 + 1 for i, name in enumerate(names)}]  # where other formulas differ
    for formulas in (_PLAIN, _SCALED, _TILES):
        if formulas is not _PLAIN and len(set(extents)) < 3:  # too few to tell formulas apart
            return str(extents[0]) if len(set(extents)) == 1 and extents[0] in numbers else None
        found: dict[tuple[int, ...], str] = {}
        for text, steps in formulas:
            for of in permutations(names, len(steps)):
                pairs = [tuple(zip((each[name] for name in of), steps, strict=True)) for each in every]
                values = [math.prod(_rounded(extent, *step) for extent, step in pair) for pair in pairs]
                if values[: len(known)] == list(extents):
                    found.setdefault(tuple(values), text.format(*of))
        if found:
            return next(iter(found.values())) if len(found) == 1 else None
    return None


# A text, and what it says of a dim, or of two to be multiplied: times, divided by (upwards), brought to a multiple of.
Formulas = Sequence[tuple[str, tuple[tuple[int, int, int], ...]]]
_PLAIN: Formulas = (("{}", ((1, 1, 1),)),)
_SCALED: Formulas = (
    ("{}/2", ((1, 2, 1),)),
    ("2 {}", ((2, 1, 1),)),
    *((f"ceil({{}}/{c})", ((1, c, 1),)) for c in (16, 32, 128)),
    ("align({}, 4)", ((1, 1, 4),)),
)
_TILES: Formulas = (
    ("align({}, 128) * align({}, 4)", ((1, 1, 128), (1, 1, 4))),
    *((f"align({{}}, 128) * align({{}}/{c}, 4)", ((1, 1, 128), (1, c, 4))) for c in (16, 32)),
)


def _rounded(extent: int, up: int, down: int, unit: int) -> int:
    return math.ceil(math.ceil(extent * up / down) / unit) * unit


# --- recipes --------------------------------------------------------------------------------------------------


def _recipes(contract: Contract, calls: Iterable[Call]) -> Iterator[str]:
    """Every recipe that the small cases admit, or that the contract's record names, with its special values."""
    found: dict[str, Recipe] = {}
    chosen: dict[tuple[str, ...], str] = {}
    for call in calls:
        operands = call.optional_operands
        admitted = () if operands is None else operands.recipes
        said = ", ".join(f"{name}={word(value)}" for name, value in call.options.items())
        chosen.setdefault(tuple(recipe.name for recipe in admitted), said)
        found |= {recipe.name: recipe for recipe in admitted}
    chosen.pop((), None)
    if chosen:
        yield "  recipes: an output is right when one of them admits all of it; the first is the reference"
        for names, options in chosen.items():
            yield f"    admitted{f' with {options}' if len(chosen) > 1 and options else ''}: {', '.join(names)}"
    else:
        stated = [one for kind in type(contract).__mro__ for value in vars(kind).values() for one in _stated(value)]
        found = {recipe.name: recipe for recipe in stated}
    for recipe in found.values():
        yield from (f"    {line}" for line in recipe_lines(recipe))


def _stated(record: object) -> Iterator[Recipe]:
    """The recipes in the fields of a record."""
    if isinstance(record, Recipe):
        yield record
    elif is_dataclass(record) and not isinstance(record, type):
        for field in fields(record):
            yield from _stated(getattr(record, field.name))


def recipe_lines(recipe: Recipe) -> Iterator[str]:
    """The choices of a recipe in the order in which a quantiser makes them."""
    element, scale = recipe.element, recipe.scale_format
    yield f"{recipe.name}: {recipe.source}"
    yield f"  {element} (max {element.max_finite:g}) in blocks of {recipe.block}, scale {scale}"
    if recipe.formula is not ScaleFormula.GIVEN:
        steps = [
            "a = amax of the block" + (", NaN left out" if recipe.nan_amax is NanAmax.IGNORED else ", NaN if one is")
        ]
        steps += [f"a = max(a, {recipe.amax_floor:g})"] if recipe.amax_floor else []
        steps += [f"a = a + {recipe.amax_added:g}"] if recipe.amax_added else []
        steps += [f"s = {recipe.formula}"]
        steps += [f"s = max(s, {recipe.scale_floor:g})"] if recipe.scale_floor else []
        steps += [str(recipe.global_order)] if recipe.scaling.global_scale else []
        steps += [f"power of two: {recipe.power_of_two}"] if recipe.power_of_two is not None else []
        yield f"  {'; '.join(steps)}; every operation is rounded to float32"
    codes = f"code = {element} of {recipe.code}, {recipe.rounding}, saturated"
    yield f"  {codes}{'; s the given scale' if recipe.formula is ScaleFormula.GIVEN else ''}"
    said = _attributes(Recipe)
    for name in said:
        value = getattr(recipe, name)
        if name not in _IN_STEPS and value != next(field.default for field in fields(recipe) if field.name == name):
            yield f"  {name}={_set(value)}: {said[name]}"
    for what, values, at in _SPECIAL:
        yield f"  {what}: {_given(recipe, values, at)}"


_IN_STEPS = {
    "name", "source", "scaling", "formula", "code", "amax_floor", "amax_added", "scale_floor", "global_order",
    "power_of_two", "nan_amax", "rounding",
}  # fmt: skip  # what the lines above it say


def _set(value: object) -> object:
    return ", ".join(sorted(map(str, value))) if isinstance(value, frozenset) else value


@lru_cache(maxsize=1)
def _attributes(record: type) -> dict[str, str]:
    """What the docstring of a record says of each of its fields."""
    found: dict[str, str] = {}
    text = inspect.cleandoc(record.__doc__ or "").partition("Attributes\n----------\n")[2]
    for entry in re.split(r"\n(?=\w)", text):
        names, _, said = re.sub(
            r"\n *", " ", entry.replace("\n ", " : ", 1) if " : " not in entry else entry
        ).partition(" : ")
        found |= {name: said.strip().replace("``", "") for name in names.split(", ")}
    return found


_INF, _NAN = math.inf, math.nan
_SPECIAL = (
    ("a block of zeros", [0.0], 0),
    ("+inf beside ones", [_INF, 1.0], 0),
    ("NaN beside ones", [_NAN, 1.0], 0),
    ("-0 beside ones", [-0.0, 1.0], 0),
)


def _given(recipe: Recipe, values: Sequence[float], at: int) -> str:
    """Scale and codes of a block that holds these values, by the recipe."""
    if recipe.rounding in (CodeRounding.STOCHASTIC, CodeRounding.SEEDED):
        recipe = replace(recipe, rounding=CodeRounding.NEAREST_EVEN)  # every value here is on the grid
    dtype = next(dtype for dtype in WIDE if suits(recipe, dtype))
    rows, columns = recipe.block.rows or 1, recipe.block.columns or 4
    x = torch.tensor(values[-1], dtype=dtype, device="cpu").repeat(rows, columns)
    x[0, 0] = values[0]
    one = torch.ones(1, dtype=torch.float32, device="cpu")
    made = _quantized(recipe, x, one)
    codes = codes_of(made.codes, recipe.element).flatten()
    said = f"code {int(codes[at]):#04x}"
    if codes.numel() > 1 and len(values) > 1:
        said += f", of a one {int(codes[-1]):#04x}"
    if recipe.formula is not ScaleFormula.GIVEN:
        said = f"scale {float(made.scale.flatten()[0]):g}, {said}"
    if recipe.scaling.global_scale:
        wide = _quantized(recipe, x, one * math.inf)
        said += f" (global scale 1); under an infinite one scale {float(wide.scale.flatten()[0]):g}, "
        said += f"code {int(codes_of(wide.codes, recipe.element).flatten()[at]):#04x}"
    return said


def _quantized(recipe: Recipe, x: Tensor, one: Tensor) -> Quantized:
    given = one if recipe.formula is ScaleFormula.GIVEN else None
    return quantize(x, recipe, scale=given, global_scale=one if recipe.scaling.global_scale else None)


# --- numerics -------------------------------------------------------------------------------------------------


def _numerics(contract: Contract) -> Iterator[str]:
    """The admitted arithmetics of every arch, and what the usual ones do."""
    if not contract.numerics:
        return
    yield "  numerics: the arithmetic of one of the arch's, the usual one first; numerics= declares one"
    for arch, names in contract.numerics.items():
        yield f"    {arch}: {', '.join(names)}"
    known = {schedule.name: schedule for schedule in schedules()}
    for name in dict.fromkeys(names[0] for names in contract.numerics.values()):
        if name == IEEE32:
            yield f"    {name}: float32 operations in any order"
        elif name in known:
            yield f"    {name}: {_arithmetic(known[name])}"


def _arithmetic(schedule: Schedule) -> str:
    every = "the whole K" if schedule.interval is None else f"{schedule.interval} products"
    return (
        f"chains of {schedule.instruction.name} over {every}; {schedule.promotion.value}; scales "
        f"{schedule.scales.value}; epilogue {schedule.epilogue.value}"
    )
