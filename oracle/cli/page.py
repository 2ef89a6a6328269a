"""The page of a contract: what a kernel of it takes, computes and returns, printed from the contract's own record.

Inputs, options, numerics and the record of every admitted recipe are printed as they stand. The shape of an output is
what the contract states of it (``shapes``), else a formula of the dims of the inputs that holds on every small case of
the profile, or that of one call where no short formula does; where a value of an option gives another formula, or other
recipes, that is printed too: every value is tried on the cases that admit it. What a recipe gives for a block of zeros,
an infinity, a NaN and -0 is computed by the recipe. Everything else stands in the docstrings of the contract's classes,
those of its family first, up to the section ``Subclasses``, without the sentences about inputs and options that the
contract has not.
"""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from importlib import import_module
from itertools import permutations
from types import ModuleType

import torch
from torch import Tensor

from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.cli import releases
from oracle.cli.common import CALLED
from oracle.errors import DtypeError, OptionError, OracleError
from oracle.harness.report import IN_PLACE
from oracle.numbers.formats import FP32, codes_of
from oracle.numbers.quantize import WIDE, Quantized, quantize, suits
from oracle.numbers.recipe_table import recipes
from oracle.numbers.recipes import CodeFormula, CodeRounding, NanAmax, PowerOfTwo, Recipe, ScaleFormula
from oracle.routines import Contract, profiles, registered
from oracle.routines.base import Call, OptionSpec, Out, TensorSpec
from oracle.routines.case import Case
from oracle.routines.changes import word_of
from oracle.routines.options import word
from oracle.routines.reached import Calls
from oracle.routines.traits import Kind
from oracle.tensorcore.schedules import Schedule, schedules

OF = "the dtype of "  # an input
FEW = 1 << 16  # elements of the inputs of a case that is small
FEW_CALLS = 3  # below which no formula of a shape is trusted
EVERY = "Inputs have any strides but for those marked contiguous. No call has a tensor without elements."
_ROLE = re.compile(r":\w+:`~?\.?(?:[\w.]+\.)?(\w+)`")
_FOR_SUBCLASSES = re.compile(r"^Subclasses\n-+\n.*", re.MULTILINE | re.DOTALL)


def page(contract: Contract, profile: str) -> Iterator[str]:
    """The lines of the page."""
    parts = sections(contract, profile)
    yield contract.name
    yield f"  {contract.summary}"
    yield f"  source: {contract.source}"
    yield releases_of(contract)
    yield from (f"  {line}" for line in textwrap.wrap(CALLED, 118))
    yield from (f"  {line}".replace("``", "").rstrip() for line in parts.rules)
    yield from (*parts.inputs, *parts.options, *parts.outputs, *parts.recipes, *parts.numerics)
    yield f"  cases: {len(profiles.cases(contract.name, profile))} in profile {profile}"


@dataclass(frozen=True)
class Sections:
    """The lines of a page below its head. ``rules`` are text as it stands in the docstrings; the others are those of
    :func:`page`."""

    rules: list[str]
    inputs: list[str]
    options: list[str]
    outputs: list[str]
    recipes: list[str]
    numerics: list[str]


def sections(contract: Contract, profile: str) -> Sections:
    """What the page says of a contract, by what it is about."""
    calls = _calls(contract, profile)
    rules = []
    for kind in reversed(type(contract).__mro__):
        if kind not in Contract.__mro__:
            rules += _rules(_about(contract, vars(kind).get("__doc__") or ""))
    rules += [*_rules(_about(contract, _truth(contract))), EVERY, *_in_place(contract), *_sources(type(contract))]
    recipes_of = list(_recipes(contract, calls))
    recipes_of += _named_in_text(contract, "\n".join(recipes_of))
    inputs, options = [*map(_input, contract.inputs)], [*map(_option, contract.options)]
    return Sections(rules, inputs, options, [*_outputs(contract, calls)], recipes_of, [*_numerics(contract)])


def _in_place(contract: Contract) -> list[str]:
    """What holds where an output has the name of an input."""
    inputs = {spec.name for spec in contract.inputs if spec.kind is not Kind.PARAMETERS}
    if inputs.isdisjoint(contract.returns):
        return []
    text = "An output of the name of an input is a new tensor, and that input itself stays unchanged: "
    return textwrap.wrap(f"{text}{IN_PLACE}.", 118)


def releases_of(contract: Contract) -> str:
    """The line of the releases that a contract describes."""
    recipes = [recipe for kind in type(contract).__mro__ for value in vars(kind).values() for recipe in _stated(value)]
    texts = " ".join(_sources(type(contract))), *(recipe.source for recipe in recipes)
    return releases.line(contract.name, contract.source, texts)


def _truth(contract: Contract) -> str:
    """The docstring of the function of the contract's name in the files of truth that its own file reads."""
    for module in vars(import_module(type(contract).__module__)).values():
        if isinstance(module, ModuleType) and module.__name__.startswith("oracle.truth."):
            function = getattr(module, contract.name, None)
            if function is not None and function.__module__ == module.__name__:
                return inspect.getdoc(function) or ""
    return ""


def _about(contract: Contract, docstring: str) -> str:
    """The docstring without the sentences, and the parameters, that are about inputs and options of other contracts."""
    own = {*_takes(contract), *contract.returns}
    own |= {choice for option in contract.options for choice in option.choices or () if isinstance(choice, str)}
    foreign = (_named() | {"c"} if contract.multiplies else _named()) - own  # elsewhere c is a column
    remaining = []
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        if paragraph.startswith(" ") or _UNDERLINED.search(paragraph):
            lines = paragraph.split("\n")
            remaining.append(
                "\n".join(line for line in lines if (m := _ENTRY.match(line)) is None or m[1] not in foreign)
            )
            continue
        text = [one for one in _SENTENCE.split(paragraph) if foreign.isdisjoint(_QUOTED.findall(one))]
        remaining.append(
            paragraph if len(text) == len(_SENTENCE.split(paragraph)) else textwrap.fill(" ".join(text), 118)
        )
    return "\n\n".join(remaining)


@lru_cache(maxsize=1)
def _named() -> frozenset[str]:
    """Every name of an input or an option that is no symbol of a formula."""
    return frozenset(name for contract in registered().values() for name in _takes(contract) if len(name) > 1)


def _takes(contract: Contract) -> tuple[str, ...]:
    return (*(spec.name for spec in contract.inputs), *(option.name for option in contract.options))


_QUOTED = re.compile(r"``([A-Za-z_]\w*)``")
_SENTENCE = re.compile(r"(?<=\.)\s+(?=[A-Z`])")
_ENTRY = re.compile(r"(\w+) : ")
_UNDERLINED = re.compile(r"^-{3,}$", re.MULTILINE)


def _rules(docstring: str) -> list[str]:
    """The paragraphs of a class that are about the routine."""
    text = _FOR_SUBCLASSES.sub("", inspect.cleandoc(docstring)).strip()
    return _ROLE.sub(r"\1", text).split("\n") if text else []


def _sources(kind: type[Contract]) -> list[str]:
    """What the file of a contract says of the releases that it describes, and of what is not covered."""
    text = inspect.cleandoc(import_module(kind.__module__).__doc__ or "")
    at = re.search(r"\bSources?: ", text)
    return _rules(text[at.start() :].partition("\n\n")[0]) if at is not None else []


def _shape(spec: TensorSpec) -> str:
    if spec.dims is None:
        return ""
    dims = (_DIVIDED.sub(r"ceil(\1)", dim) for dim in spec.dims)  # a division is rounded up
    return f" [{', '.join(dims)}]"


_DIVIDED = re.compile(r"(\w+/\d+)")


def _input(spec: TensorSpec) -> str:
    dtypes = "|".join(str(word(dtype)) for dtype in spec.dtypes)
    marks = "".join(f" ({mark})" for mark, on in (("optional", spec.optional), ("contiguous", spec.contiguous)) if on)
    return f"  input {spec.name}{_shape(spec)} {spec.kind}, {dtypes}{marks}: {spec.doc}"


def _option(option: OptionSpec) -> str:
    listed = option.choices or option.names
    choices = f" (of {', '.join(str(word(c)) for c in listed)})" if listed else ""
    declared = "; a kernel without this parameter is judged under None" if option.declares else ""
    return f"  option {option.name}={word(option.default)}{choices}: {option.doc}{declared}"


# --- outputs --------------------------------------------------------------------------------------------------


def _calls(contract: Contract, profile: str) -> list[Call]:
    """The small cases of the profile, one of each size and options, as calls, in the usual dtype of the output where
    they admit it; the smallest with each other dtype of an input too."""
    listed = sorted(profiles.cases(contract.name, profile), key=_size)
    alike = {(case.extents, case.options, case.dtypes): case for case in reversed(listed)}
    cases = list(reversed(alike.values()))
    of_dtypes = list({case.dtypes: case for case in reversed(cases)}.values())
    known, small = Calls(), list[Call]()
    of_dtypes += [new for new in _retyped(contract, cases[0]) if known.admits(new)] if cases else []
    for case in dict.fromkeys((*cases[:24], *of_dtypes)):
        inputs = case.inputs()
        if case not in of_dtypes and len(small) >= 4 and sum(x.numel() for x in inputs.values()) > FEW:
            continue
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


def _retyped(contract: Contract, case: Case) -> Iterator[Case]:
    """The case with each other dtype of each of its inputs."""
    for spec in contract.inputs:
        yield from (replace(case, changes=((spec.name, word_of(dtype)),)) for dtype in spec.dtypes)


def _size(case: Case) -> int:
    return math.prod(max(1, extent) for _, extent in case.extents)


def _outputs(contract: Contract, calls: Sequence[Call]) -> Iterator[str]:
    if not calls:
        yield from (f"  output {name}: {contract.shapes.get(name, '')}" for name in contract.returns)
        return
    others = _varied(contract, calls)
    every = [(call, contract.outputs(call)) for call in calls]
    for name in dict.fromkeys(name for _, due in every for name in due):  # some inputs take the place of an output
        having = [(call, due) for call, due in every if name in due]
        pairs = [p for p in having if all(p[0].resolved[o.name] == o.default for o in contract.options)] or having
        usual, dues = [call for call, _ in pairs], [due for _, due in pairs]
        every_dtype = _dtypes([call for call, _ in having], [due[name].dtypes for _, due in having])
        dtypes = every_dtype if every_dtype.startswith(OF) else _dtypes(usual, [each[name].dtypes for each in dues])
        partly = any(each[name].specified is not None for each in dues)
        text = "; some elements are unspecified" if partly else ""
        text += "; may be left out" if any(each[name].optional for each in dues) else ""
        shape = _formula(name, usual, [_shape_of(call, name) for call in usual])
        if name in contract.shapes:
            yield f"  output {name} {dtypes}{text}: {contract.shapes[name]}"
        else:
            yield f"  output {name} {shape}, {dtypes}{text}"
        known = {id(call.inputs): due[name].dtypes for call, due in zip(usual, dues, strict=True)}
        for (option, value), these in others.items():
            due = [(call, contract.outputs(call).get(name)) for call in these]
            changed = []
            if all(out is None for _, out in due):
                changed.append("not returned")
            elif all(out is not None for _, out in due) and name not in contract.shapes and len(these) >= FEW_CALLS:
                other = _formula(name, these, [_shape_of(call, name) for call in these])
                changed += [other] if other != shape and " for " not in other else []
            here = [(known.get(id(call.inputs)), out.dtypes) for call, out in due if out is not None]
            if any(was not in (None, now) and now != (value,) for was, now in here):
                changed.append(_dtypes(these, [out.dtypes for _, out in due if out is not None]))
            if changed:
                yield f"    with {option}={word(value)}: {', '.join(changed)}"
        yield from _left_out(name, contract, every)


def _left_out(name: str, contract: Contract, calls: Sequence[tuple[Call, Mapping[str, Out]]]) -> Iterator[str]:
    """The optional inputs, given or not, and the default options with which no call returns the output."""
    words = {}
    for spec in contract.inputs:
        words[f"with {spec.name}"] = [name in due for call, due in calls if spec.name in call.inputs]
        words[f"without {spec.name}"] = [name in due for call, due in calls if spec.name not in call.inputs]
    for option in (option for option in contract.options if option.choices):
        usual = [name in due for call, due in calls if call.resolved[option.name] == option.default]
        words[f"with {option.name}={word(option.default)}"] = usual
    yield from (f"    {when}: not returned" for when, returned in words.items() if returned and not any(returned))


def _shape_of(call: Call, name: str) -> tuple[int, ...]:
    return call.contract.outputs(call)[name].shape or tuple(call.truth[name].shape)


def _varied(contract: Contract, calls: Sequence[Call]) -> dict[tuple[str, object], list[Call]]:
    """Calls with every value of every option that has few, but for the default: those of the cases that admit it."""
    results: dict[tuple[str, object], list[Call]] = {}
    for option in contract.options:
        for value in option.choices or ():
            if value == option.default:
                continue
            these = []
            for call in calls:
                try:
                    these.append(Call(contract, call.inputs, {**call.options, option.name: value}).checked())
                    contract.outputs(these[-1])
                except OracleError:  # the value does not go with these inputs, or with another option
                    these = [one for one in these if one.inputs is not call.inputs]
            if these:
                results[option.name, value] = these
    return results


def _dtypes(calls: Sequence[Call], dtypes: Sequence[tuple[torch.dtype, ...]]) -> str:
    """The dtypes of an output, or the input whose dtype it has, in all calls or where that is no 8-bit one."""
    result = dict.fromkeys(str(word(dtype)) for each in dtypes for dtype in each)
    for name in calls[0].inputs if len(result) > 1 else ():
        pairs = [(c.inputs[name].dtype, due) for c, due in zip(calls, dtypes, strict=True) if name in c.inputs]
        others = {due for own, due in pairs if (own,) != due}
        if len(pairs) == len(calls) and not others:
            return f"{OF}{name}"
        narrow = [own.itemsize == 1 for own, _ in pairs]
        told = not all(narrow) and narrow == [(own,) != due for own, due in pairs]
        if len(pairs) == len(calls) and len(others) == 1 and told:
            return f"{OF}{name}, {'|'.join(str(word(one)) for one in others.pop())} for one of 8 bits"
    return "|".join(result)


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
    results: dict[str, int] = {}
    for spec in call.contract.inputs:
        for axis, dim in enumerate(spec.dims or ()):
            if spec.name in call.inputs and dim.isidentifier():
                results.setdefault(dim, call.inputs[spec.name].shape[axis])
        if spec.dims is None and spec.name in call.inputs and (text := _BRACKET.match(spec.doc)) is not None:
            shape, dims = call.inputs[spec.name].shape, text[1].split(", ")
            if len(shape) == len(dims) and all(dim.isidentifier() for dim in dims):
                results |= {dim: n for dim, n in zip(dims, shape, strict=True) if dim not in results}
    numbers = {name: n for name, n in call.resolved.items() if isinstance(n, int) and not isinstance(n, bool)}
    return results | {name: n for name, n in numbers.items() if n > 0}


_BRACKET = re.compile(r"\[([^\]]+)\]")


def _axis(known: Sequence[Mapping[str, int]], extents: Sequence[int], numbers: Container[int]) -> str | None:
    """The one shortest formula of dims that gives an extent in every call, or one of ``numbers``; else None."""
    names = [name for name in known[0] if all(name in each for each in known)]
    every = [*known, {name: 331 * (i + 2) ** 2 + 1 for i, name in enumerate(names)}]  # where other formulas differ
    for formulas in (_PLAIN, _SCALED, _TILES):
        if formulas is not _PLAIN and len(set(extents)) < 3:  # too few to tell formulas apart
            return str(extents[0]) if len(set(extents)) == 1 and extents[0] in numbers else None
        results: dict[tuple[int, ...], str] = {}
        for text, steps in formulas:
            for of in permutations(names, len(steps)):
                pairs = [tuple(zip((each[name] for name in of), steps, strict=True)) for each in every]
                values = [math.prod(_rounded(extent, *step) for extent, step in pair) for pair in pairs]
                if values[: len(known)] == list(extents):
                    results.setdefault(tuple(values), text.format(*of))
        if results:
            return next(iter(results.values())) if len(results) == 1 else None
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


def _recipes(contract: Contract, calls: Sequence[Call]) -> Iterator[str]:
    """Every recipe that the small cases admit with any value of the options, or that the contract's record names, with
    its special values."""
    results: dict[str, Recipe] = {}
    chosen: dict[tuple[str, ...], list[dict[str, object]]] = {}
    for call in _with_every_recipe(contract, calls):
        admitted = _admitted(call)
        text: dict[str, object] = {o.name: word(call.resolved[o.name]) for o in contract.options if o.choices}
        text |= {spec.name: "given" for spec in contract.inputs if spec.optional and spec.name in call.inputs}
        chosen.setdefault(tuple(admitted), []).append(text)
        results = admitted | results
    chosen.pop((), None)
    if chosen:
        yield "  recipes: an output is right when one of them admits all of it; the first is the reference"
        every = [text for these in chosen.values() for text in these]
        for names, these in chosen.items():
            alike = {k: v for k, v in these[0].items() if all(one.get(k) == v for one in these)}
            words = ", ".join(f"{k}={v}" for k, v in alike.items() if any(one.get(k) != v for one in every))
            yield f"    admitted{f' with {words}' if words else ''}: {', '.join(names)}"
    else:
        stated = [one for kind in type(contract).__mro__ for value in vars(kind).values() for one in _stated(value)]
        results = {recipe.name: recipe for recipe in stated}
    for recipe in results.values():
        yield from (f"    {line}" for line in recipe_lines(recipe))


def _named_in_text(contract: Contract, printed: str) -> Iterator[str]:
    """The recipes that the contract's own text names and that are not ``printed`` yet."""
    text = " ".join(vars(kind).get("__doc__") or "" for kind in type(contract).__mro__ if kind not in Contract.__mro__)
    text += " ".join(option.doc for option in contract.options)
    names = [name for name in dict.fromkeys(_WORD.findall(text)) if name in recipes() and f" {name}: " not in printed]
    if names:
        yield "  recipes that are named above"
    for name in names:
        yield from (f"    {line}" for line in recipe_lines(recipes()[name]))


_WORD = re.compile(r"[a-z]\w+_\w+")


def _admitted(call: Call) -> dict[str, Recipe]:
    operands = call.optional_operands
    return {} if operands is None else {recipe.name: recipe for recipe in operands.recipes}


def _with_every_recipe(contract: Contract, calls: Sequence[Call]) -> Iterator[Call]:
    """The calls, and for every value of an option that changes what they admit one with each value of the others that
    do so too."""
    yield from sorted(calls, key=lambda call: sum(call.resolved[o.name] != o.default for o in contract.options))
    usual = {id(call.inputs): tuple(_admitted(call)) for call in calls}
    if not any(usual.values()):
        return
    telling = {
        (name, value): these
        for (name, value), these in _varied(contract, calls).items()
        if any(tuple(_admitted(call)) != usual[id(call.inputs)] for call in these)
    }
    names = {name for name, _ in telling}
    for (name, _), these in telling.items():
        yield these[0]
        for (other, _), those in _varied(contract, these[:1]).items():
            if other in names and other != name:
                yield those[0]


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
        steps += [f"a = {recipe.zero_amax:g} where it is 0"] if recipe.zero_amax else []
        steps += (
            ["a = min(a, scale_ub) where one is given"] if recipe.takes_scale_ub and not recipe.bounds_scale else []
        )
        steps += [f"s = {recipe.formula}"]
        steps += ["s = min(s, scale_ub) where one is given"] if recipe.bounds_scale else []
        steps += [f"s = max(s, {recipe.scale_floor:g})"] if recipe.scale_floor else []
        steps += [_published(recipe)] if recipe.scaling.global_scale else []
        if recipe.power_of_two is not None:
            exponents = {"emax": element.emax, "f": element.fraction_bits}
            letters = [f"{k} = {v}" for k, v in exponents.items() if re.search(rf"\b{k}\b", recipe.power_of_two)]
            steps.append(", ".join([f"power of two: {recipe.power_of_two}", *letters]))
        yield f"  {'; '.join(steps)}; every operation is rounded to float32"
    codes = f"code = {element} of {recipe.code}, {recipe.rounding}, saturated"
    yield f"  {codes}{_symbols(recipe)}"
    text = _attributes(Recipe)
    for name in text:
        value = getattr(recipe, name)
        if name not in _IN_STEPS and value != next(field.default for field in fields(recipe) if field.name == name):
            yield f"  {name}={_set(value)}: {text[name]}"
    for what, values, at in _SPECIAL:
        yield f"  {what}: {_given(recipe, values, at)}"


def _published(recipe: Recipe) -> str:
    """How the scale of a block is published under a global scale."""
    target = recipe.scale_format.number_format(FP32)
    end = "" if target.has_inf else f", saturated at {target.max_finite:g}"
    return f"{recipe.global_order}; the published scale is {recipe.scale_format}(t), to nearest even{end}"


def _symbols(recipe: Recipe) -> str:
    """What the letters of the code's formula are."""
    if recipe.power_of_two is PowerOfTwo.INVERSE_FLOOR:
        return ", q = 1 / s of the published s" if recipe.code is CodeFormula.QUOTIENT else ", s as it is published"
    if recipe.code is CodeFormula.QUOTIENT:
        return f", q = {_INVERSES[recipe.formula]}"
    if recipe.formula is ScaleFormula.GIVEN:
        return ", s the given scale"
    if recipe.code is CodeFormula.SPLIT:
        return ", g the global scale, s the rounded scale of the block"
    if recipe.scaling.global_scale:
        both = "fl(s fl(1/e)), e" if recipe.encodes else "fl(s g), g"
        return f", for s {both} the global scale and s the published scale of the block"
    return ", s as it is published" if recipe.power_of_two is not None else ""


_INVERSES = {
    formula: {
        ScaleFormula.INVERSE: "fl(max / a)",
        ScaleFormula.INVERSE_FLOAT64: "fl32(max / double(a))",
        ScaleFormula.BF16_MULTIPLY: "RN(max / a) in bfloat16",
    }.get(formula, "fl(max / a), not the inverse of the rounded s")
    for formula in ScaleFormula
}


_IN_STEPS = {
    "name", "source", "scaling", "formula", "code", "amax_floor", "amax_added", "scale_floor", "global_order",
    "power_of_two", "nan_amax", "rounding", "takes_scale_ub", "bounds_scale", "zero_amax",
}  # fmt: skip  # what the lines above it say


def _set(value: object) -> object:
    return ", ".join(sorted(map(str, value))) if isinstance(value, frozenset) else value


@lru_cache(maxsize=1)
def _attributes(record: type) -> dict[str, str]:
    """What the docstring of a record says of each of its fields."""
    results: dict[str, str] = {}
    text = inspect.cleandoc(record.__doc__ or "").partition("Attributes\n----------\n")[2]
    for entry in re.split(r"\n(?=\w)", text):
        names, _, sentence = re.sub(
            r"\n *", " ", entry.replace("\n ", " : ", 1) if " : " not in entry else entry
        ).partition(" : ")
        results |= {name: sentence.strip().replace("``", "") for name in names.split(", ")}
    return results


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
    result = _quantized(recipe, x, one)
    codes = codes_of(result.codes, recipe.element).flatten()
    text = f"code {int(codes[at]):#04x}"
    if codes.numel() > 1 and len(values) > 1:
        text += f", of a one {int(codes[-1]):#04x}"
    if recipe.formula is not ScaleFormula.GIVEN:
        if float(result.scale.flatten()[0]) == 0:
            text += " or any other, which stands for 0 under this scale"
        text = f"scale {float(result.scale.flatten()[0]):g}, {text}"
    if recipe.scaling.global_scale:
        wide = _quantized(recipe, x, one * math.inf)
        text += f" (global scale 1); under an infinite one scale {float(wide.scale.flatten()[0]):g}, "
        text += f"code {int(codes_of(wide.codes, recipe.element).flatten()[at]):#04x}"
    return text


def _quantized(recipe: Recipe, x: Tensor, one: Tensor) -> Quantized:
    supplied = one if recipe.formula is ScaleFormula.GIVEN else None
    return quantize(x, recipe, scale=supplied, global_scale=one if recipe.scaling.global_scale else None)


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
