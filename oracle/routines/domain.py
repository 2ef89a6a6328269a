"""The extents that a routine takes: stated as conditions, or learned from what it refuses.

    m % 4 == 0, n % 128 == 0, 1 <= m <= 4096, m * k < 2**31, d in (64, 128, 256)

Conditions are comparisons (``== != < <= > >=``, chains of them too, and ``in`` some values) of integer expressions
(``+ - * // %``, and ``**`` of two numbers) over the names of extents; all of them must hold. The text is parsed, never
evaluated as code.

A domain that is learned (:func:`learned`) has the form ``name % step == 0, low <= name <= high`` for each extent.
Not covered: conditions on dtypes, schemes and options, which are no extents.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from oracle.errors import OptionError

LONGEST = 500  # characters of a domain: deeper nesting than this holds would exhaust the parser's stack
LARGEST = 1 << 62
STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # powers of two: vector widths, tiles and scale blocks of every known kernel
SPAN = 4096  # values on either side of an extent among which the nearest admitted one is sought
NEAR = 6  # admitted values of one extent that are combined with those of the others
EXAMPLE = "m % 4 == 0, n % 128 == 0"

Extents = Mapping[str, int]
_ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclass(frozen=True)
class Condition:
    """One comparison: its text, the extents it names, and the tree that decides it."""

    text: str
    names: frozenset[str]
    tree: ast.Compare

    def holds(self, extents: Extents) -> bool:
        """Whether these extents satisfy it; a division by zero does not."""
        try:
            if (members := _members(self.tree)) is not None:
                value = _value(self.tree.left, extents)
                return any(value == _value(member, extents) for member in members)
            values = [_value(node, extents) for node in (self.tree.left, *self.tree.comparators)]
        except ZeroDivisionError:
            return False
        pairs = zip(self.tree.ops, itertools.pairwise(values), strict=True)
        return all(_COMPARISONS[type(op)](*pair) for op, pair in pairs)


@dataclass(frozen=True)
class Domain:
    """Conditions that all must hold; ``str`` gives the text that :func:`parse` reads. Without any it holds everything,
    and is false."""

    conditions: tuple[Condition, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.conditions)

    def __str__(self) -> str:
        return ", ".join(condition.text for condition in self.conditions)

    def holds(self, extents: Extents) -> bool:
        """Whether these extents lie in the domain."""
        return all(condition.holds(extents) for condition in self.conditions)

    def nearest(self, extents: Extents, free: Sequence[str]) -> dict[str, int] | None:
        """The admitted extents nearest to these (least sum of ``|log(new / old)|``), of which ``free`` may change.

        None when none is found within :data:`SPAN` of each extent, or its own size if that is more.
        """
        if self.holds(extents):
            return dict(extents)
        choices = [list(itertools.islice(self._near(extents, name), NEAR)) for name in free]
        candidates = (dict(zip(free, choice, strict=True)) for choice in itertools.product(*choices))
        admitted = [new for new in candidates if self.holds({**extents, **new})]
        if not admitted:
            return None
        new = min(admitted, key=lambda new: sum(abs(math.log(new[name] / extents[name])) for name in free))
        return {**extents, **new}

    def _near(self, extents: Extents, name: str) -> Iterator[int]:
        """Values of one extent by distance that satisfy what is said of it alone; then halves of it, for what is said
        of products."""
        alone = [condition for condition in self.conditions if condition.names == {name}]
        value, candidates = extents[name], []
        for distance in range(max(SPAN, value)):
            for near in dict.fromkeys((value + distance, value - distance)):
                if near > 0 and all(condition.holds({name: near}) for condition in alone):
                    candidates.append(near)
            if len(candidates) >= NEAR // 2 or (candidates and distance > 2 * abs(candidates[0] - value) + SPAN // 16):
                break
        yield from candidates[: NEAR // 2]
        for smaller in (value >> shift for shift in range(1, value.bit_length())):
            down = next((v for v in range(smaller, 0, -1) if all(c.holds({name: v}) for c in alone)), None)
            if down is not None:
                yield down


EVERYTHING = Domain()


def parse(text: str, names: Sequence[str]) -> Domain:
    """The domain of a text over the extents ``names``.

    Raises OptionError: names the part that is no comparison of such extents, and what there is.
    """
    way_out = f"write comparisons of {', '.join(names)}, as {EXAMPLE!r}"
    if len(text) > LONGEST:
        raise OptionError(f"domain of {len(text)} characters; it takes at most {LONGEST}")
    try:
        tree = ast.parse(f"({text.strip().rstrip(',')},)", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise OptionError(f"domain={text!r} is no list of comparisons; {way_out}") from None
    conditions = []
    for node in tree.elts if isinstance(tree, ast.Tuple) else [tree]:
        comparison = ast.unparse(node)
        members = _members(node) if isinstance(node, ast.Compare) else None
        compared = isinstance(node, ast.Compare) and all(type(op) in _COMPARISONS for op in node.ops)
        if not isinstance(node, ast.Compare) or (members is None and not compared):
            raise OptionError(f"domain={text!r}: {comparison!r} is no comparison; {way_out}")
        used = frozenset(child.id for child in ast.walk(node) if isinstance(child, ast.Name))
        if unknown := sorted(used - set(names)):
            raise OptionError(f"domain={text!r}: {unknown[0]!r} is no extent; {way_out}")
        for side in (node.left, *(node.comparators if members is None else members)):
            if (wrong := _refused(side)) is not None:
                raise OptionError(f"domain={text!r}: {wrong!r} is no integer expression of extents; {way_out}")
        conditions.append(Condition(comparison, used, node))
    return Domain(tuple(conditions))


def learned(
    admits: Callable[[Extents], bool], base: Extents, names: Sequence[str], largest: Extents
) -> tuple[Domain, list[str]]:
    """The domain of a routine that admits ``base``, by asking about one extent after the other; and the extents that
    it fixes: those of which no neighbour of ``base`` is admitted.

    For each of ``names`` the least step of :data:`STEPS` at which a neighbour of ``base`` is admitted, then the least
    and (up to ``largest``) the greatest multiple of that step, by bisection. At most some 30 questions an extent, three
    where everything is admitted.
    """
    conditions, fixed = [], []
    for name in names:
        at = base[name]

        def admitted(value: int, name: str = name) -> bool:
            return value > 0 and admits({**base, name: value})

        step = next((s for s in STEPS if at % s == 0 or s == 1 if admitted(at + s) or admitted(at - s)), None)
        if step is None:
            fixed.append(name)
            conditions.append(f"{name} == {at}")
            continue
        if step > 1:
            conditions.append(f"{name} % {step} == 0")
        low = _edge(admitted, at, step if at % step == 0 else at % step, step)
        if low > step:
            conditions.append(f"{name} >= {low}")
        top = at + max(0, -(-(largest[name] - at) // step)) * step
        high = _edge(admitted, at, top, step)
        if high < top:
            conditions.append(f"{name} <= {high}")
    return parse(", ".join(conditions), names) if conditions else EVERYTHING, fixed


def _edge(admitted: Callable[[int], bool], inside: int, outer: int, step: int) -> int:
    """The admitted value farthest from ``inside`` on the way to ``outer``, in steps, by bisection."""
    if inside == outer or admitted(outer):
        return outer
    sign, good, bad = (1 if outer > inside else -1), 0, abs(outer - inside) // step
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if admitted(inside + sign * middle * step) else (good, middle)
    return inside + sign * good * step


def _members(node: ast.Compare) -> list[ast.expr] | None:
    """The values of ``x in (1, 2, 4)``; None for any other comparison."""
    (*_, last) = node.comparators
    return last.elts if [type(op) for op in node.ops] == [ast.In] and isinstance(last, ast.Tuple) else None


def _refused(node: ast.expr) -> str | None:
    """The first part of an expression that is neither an extent, an integer nor their arithmetic."""
    if isinstance(node, ast.Name):
        return None
    if isinstance(node, ast.Constant):
        good = type(node.value) is int and abs(node.value) < LARGEST
        return None if good else ast.unparse(node)
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Pow):
            return None if _power(node) is not None else ast.unparse(node)
        if type(node.op) in _ARITHMETIC:
            return _refused(node.left) or _refused(node.right)
    return ast.unparse(node)


def _power(node: ast.BinOp) -> int | None:
    """``2**31``: a number to the power of a number, below :data:`LARGEST`."""
    left, right = (side.value if isinstance(side, ast.Constant) else None for side in (node.left, node.right))
    if type(left) is not int or type(right) is not int or not (0 < left < LARGEST and 0 <= right < 62):
        return None
    return left**right if left**right < LARGEST else None


def _value(node: ast.expr, extents: Extents) -> int:
    if isinstance(node, ast.Name):
        return extents[node.id]
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        return node.value
    assert isinstance(node, ast.BinOp)
    if isinstance(node.op, ast.Pow):
        power = _power(node)
        assert power is not None
        return power
    return _ARITHMETIC[type(node.op)](_value(node.left, extents), _value(node.right, extents))
