"""Options as text: the words of a command line or of a JSON manifest, and the values that a contract takes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from oracle.errors import OptionError, among
from oracle.routines.base import Contract


def parse(contract: Contract, words: Mapping[str, object]) -> dict[str, object]:
    """Option values of a contract from their names: ``{"out_dtype": "bfloat16"}`` to a ``torch.dtype``, ``"64x128"`` to
    a tuple where the default is one; OptionError for an unknown option, or a word that names none of its values."""
    specs = {spec.name: spec for spec in contract.options}
    values: dict[str, object] = {}
    for name, word in words.items():
        if name not in specs:
            raise OptionError(f"{contract.name} has no option {name!r}; {among(name, specs)}")
        spec = specs[name]
        if spec.choices is not None:
            values[name] = _choice(contract.name, name, word, spec.choices)
        else:
            values[name] = _like(contract.name, name, word, spec.default)
    return values


def word(value: object) -> object:
    """The JSON-ready name of an option value; the inverse of :func:`parse`."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _choice(contract: str, name: str, value: object, choices: tuple[object, ...]) -> object:
    for choice in choices:
        if value == choice or str(value).lower() == str(word(choice)).lower():
            return choice
    raise OptionError(f"{contract}: {name}={value!r} is not admitted; {among(value, map(word, choices))}")


def _like(contract: str, name: str, value: object, default: object) -> object:
    if not isinstance(value, str):
        return value
    text = value.strip()
    if isinstance(default, tuple) and all(part.isdigit() for part in text.split("x")):
        return tuple(map(int, text.split("x")))
    if text.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text.lower()]
    if isinstance(default, torch.dtype) or isinstance(getattr(torch, text, None), torch.dtype):
        dtype = getattr(torch, text.removeprefix("torch."), None)
        if isinstance(dtype, torch.dtype):
            return dtype
        raise OptionError(f"{contract}: {name}={text!r} is no torch dtype, such as bfloat16")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:  # not of this kind
            continue
    return text
