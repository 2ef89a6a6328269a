"""Two recordings of the same prompts: the first call where they part, and whether either side is inadmissible there.

Calls of two folders of :mod:`oracle.harness.watching` are paired by layer, contract and how often the kernel had been
called in the layer. In the order of the first folder, the first pair whose bits differ is the one where they part: with
equal inputs the kernels differ, and each is judged; with other inputs, something between the calls differs that was not
recorded. What comes later has other inputs, so that each call is judged by its own, until one is inadmissible.

Not covered: prompts in other batches, which make other calls; calls before the parting, which are equal and may be
wrong in both. Processes are paired in the order of their first calls.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from oracle.errors import FixtureError
from oracle.fixtures import call_file
from oracle.harness import runner
from oracle.harness.watching import ordered
from oracle.numbers.formats import codes_of, decode, of_dtype
from oracle.report.bisected import Bisected, Difference, Parting, Side
from oracle.routines.base import by_name
from oracle.verdict.compare import measured


class Key(NamedTuple):
    """What two calls have in common that are the same call of two recordings."""

    process: int
    layer: str
    contract: str
    occurrence: int
    kernel: int
    """Which of several kernels of one contract in one layer, in the order of their first calls."""


class _Recorded(NamedTuple):
    path: Path
    about: Mapping[str, str]


def bisect(
    one: Path,
    other: Path,
    *,
    arch: str | None = None,
    only_first: bool = False,
    advance: Callable[[str], None] = lambda layer: None,
) -> Bisected:
    """Where two recordings part, and what is wrong there or later.

    Parameters
    ----------
    one, other : folders that ``fp8-oracle watch --to`` or ``oracle.watch(to=...)`` wrote.
    arch : whose arithmetic is admitted on both sides; None is what each file says.
    only_first : judge the call where they part, and none behind it.
    advance : is called with the layer of each pair.

    Returns
    -------
    Bisected
        Its ``word`` is SAME, LEGAL, FAULT or UNSEEN.

    Raises
    ------
    FixtureError
        A folder holds no call of a watch, or no call of the one is in the other.
    """
    start = time.perf_counter()
    calls = [_keyed(folder) for folder in (one, other)]
    pairs = [key for key in calls[0] if key in calls[1]]
    if not pairs:
        raise FixtureError(f"{other}: has no call of {one}: {_layers(calls[1])} here, {_layers(calls[0])} there")
    alone = (len(calls[0]) - len(pairs), len(calls[1]) - len(pairs))
    parting, equal, wrong = None, 0, list[Side]()
    for key in pairs:
        advance(key.layer)
        recorded = [mine[key] for mine in calls]
        if parting is None:
            if (parting := _parting(key, recorded, arch)) is None:
                equal += 1
                continue
            wrong += [side for side in parting.sides if side.verdict.status.is_failure]
        else:
            sides = [_judged(*each, key, arch) for each in zip("AB", recorded, strict=True)]
            wrong += [side for side in sides if side.verdict.status.is_failure]
        if wrong or only_first:
            break
    return Bisected(str(one), str(other), len(pairs), equal, alone, parting, tuple(wrong), time.perf_counter() - start)


def _keyed(folder: Path) -> dict[Key, _Recorded]:
    processes, kernels, result = dict[str, int](), dict[tuple[int, str, str], dict[str, int]](), dict[Key, _Recorded]()
    for path, about in ordered(folder):
        process = processes.setdefault(about.get("process", ""), len(processes))
        place = process, about["layer"], about["contract"]
        mine = kernels.setdefault(place, {})
        kernel = mine.setdefault(about.get("kernel", ""), len(mine))
        result[Key(*place, int(about.get("occurrence", 0)), kernel)] = _Recorded(path, about)
    return result


def _layers(calls: Mapping[Key, _Recorded]) -> str:
    names = Counter(f"{key.layer} {key.contract}" for key in calls)
    return ", ".join([*names][:3]) or "nothing"


def _parting(key: Key, recorded: list[_Recorded], arch: str | None) -> Parting | None:
    """How a pair differs, both sides judged; None where all bits are equal."""
    first, second = (call_file.read(each.path) for each in recorded)
    inputs = tuple(_different(first.inputs, second.inputs))
    asked = dict(first.options), dict(second.options)
    inputs += tuple(sorted(name for name in {**asked[0], **asked[1]} if asked[0].get(name) != asked[1].get(name)))
    outputs = by_name(first.output), by_name(second.output)
    differing = tuple(_differences(*outputs))
    if not inputs and not differing:
        return None
    sides = (_judged("A", recorded[0], key, arch), _judged("B", recorded[1], key, arch))
    return Parting(key.layer, key.contract, key.occurrence, inputs, differing, sides)


def _different(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Iterator[str]:
    """The names of tensors whose bits differ."""
    for name in {**one, **other}:
        if name not in one or name not in other or not _same(one[name], other[name]):
            yield name


def _same(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and bool((_bits(x) == _bits(y)).all())


def _bits(x: Tensor) -> Tensor:
    """The elements of ``x`` (any shape, float or integer) as integers of their width, NaN by its bits."""
    return codes_of(x) if x.is_floating_point() else x


def _differences(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Iterator[Difference]:
    for name in _different(one, other):
        x, y = one.get(name), other.get(name)
        if x is None or y is None or x.shape != y.shape or x.dtype != y.dtype:
            yield Difference(name, None, 0, None)
            continue
        error = measured(decode(x), decode(y), of_dtype(x.dtype)) if x.is_floating_point() else None
        count = int((_bits(x) != _bits(y)).sum())
        yield Difference(name, count, x.numel(), None if error is None else error.ulps)


def _judged(which: str, recorded: _Recorded, key: Key, arch: str | None) -> Side:
    whose = arch or recorded.about.get("arch") or "sm90"
    verdict = runner.judge_call(partial(call_file.read, recorded.path), whose, None).settled()
    return Side(which, str(recorded.path), recorded.about.get("kernel", ""), key.layer, whose, verdict)
