"""Holds a JSON value that was read to ``schema.json``, before anything is made of it.

The keywords are those that the file uses. A number must be one of float64, an integer one of 64 bits: what is larger
overflows wherever it is used. Not covered: other keywords of JSON Schema.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

LARGEST = (1 << 63) - 1
_TYPES: Mapping[str, type] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
}


def problem(value: object, name: str | None = None) -> str | None:
    """Why ``value`` is not as the schema says, or its definition ``name``; None when it is."""
    schema = _schema()
    return next(_problems(value, schema if name is None else schema["$defs"][name], ""), None)


def loads(content: bytes) -> Any:
    """The JSON value of some bytes; ValueError for what is none: a NaN without quotes, a nest beyond recursion."""

    def no_number(word: str) -> object:
        raise ValueError(f"{word} is no JSON; a number that is not finite is a string")

    try:
        return json.loads(content, parse_constant=no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@lru_cache(maxsize=1)
def _schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((files("oracle.report") / "schema.json").read_text("utf-8"))
    return loaded


def _problems(value: Any, schema: Mapping[str, Any], at: str) -> Iterator[str]:
    """One sentence for each keyword that ``value`` does not hold to, at a place as ``outcomes[3].verdict``."""
    where = at or "the value"
    kinds = schema.get("type", ())
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield f"{where} is {_shown(value)}, not {' or '.join(kinds)}"
        return
    if "const" in schema and not (isinstance(value, str) and value == schema["const"]):
        yield f"{where} is {_shown(value)}, not {schema['const']!r}"
    if "enum" in schema and not (isinstance(value, str) and value in schema["enum"]):
        yield f"{where} is {_shown(value)}, not one of {', '.join(schema['enum'])}"
    if "$ref" in schema:
        yield from _problems(value, _schema()["$defs"][schema["$ref"].rpartition("/")[2]], at)
    if "oneOf" in schema:
        problems = [next(_problems(value, inner, at), None) for inner in schema["oneOf"]]
        if None not in problems:
            yield problems[-1] or where
    if isinstance(value, dict):
        known, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        if missing := [name for name in schema.get("required", ()) if name not in value]:
            yield f"{where} lacks {', '.join(missing)}"
        for name, inner in value.items():
            place = f"{at}.{name}" if at else name
            if name in known:
                yield from _problems(inner, known[name], place)
            elif isinstance(more, dict):
                yield from _problems(inner, more, place)
            elif not more:
                yield f"{where} has {name!r}, which this version does not know"
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf):
            yield f"{where} has {len(value)} entries"
        for number, inner in enumerate(value if "items" in schema else ()):
            yield from _problems(inner, schema["items"], f"{at}[{number}]")
    elif isinstance(value, str):
        if "pattern" in schema and re.fullmatch(schema["pattern"], value) is None:
            yield f"{where} is {_shown(value)}, not of the form {schema['pattern']}"
    elif _is(value, "number") and not schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf):
        yield f"{where} is {_shown(value)}, out of its range"


def _is(value: object, kind: str) -> bool:
    """Whether a value is of a JSON type; ``true`` is no number, nor is what no machine type holds."""
    if kind == "number":
        return isinstance(value, float) and math.isfinite(value) or _is(value, "integer")
    whole = not isinstance(value, bool) and isinstance(value, int) and abs(value) <= LARGEST
    return whole if kind == "integer" else isinstance(value, _TYPES[kind])


def _shown(value: object) -> str:
    """A value of somebody's file in a few characters."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
