"""Kernels of ``fp8_gemm_nt`` whose first answer to every case is right, and that misbehave in a later call.

What a kernel saw first for a shape is kept here; a relation to it tells the later call.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tests.support.subjects.right import _product

_Seen = dict[tuple[int, ...], tuple[Tensor, Tensor]]
_seen: _Seen = {}
_calls: dict[tuple[int, ...], int] = {}
_scratch: list[Tensor] = []
_among = itertools.count()
FIRST = 2762089  # sum of the bytes of b in fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=33,n=64,k=256/family=randn/seed=1
ROWS = 200  # only a call beyond a limit of elements has so many


def forget() -> None:
    """As in a new process."""
    _seen.clear()
    _calls.clear()
    _scratch.clear()


def _counted(a: Tensor, b: Tensor) -> int:
    """How many calls of these shapes there were, and keeps nothing else."""
    key = (*a.shape, *b.shape)
    _calls[key] = _calls.get(key, 0) + 1
    return _calls[key]


def _first(a: Tensor, a_scale: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return _seen.setdefault((*a.shape, *b.shape), (a.view(torch.uint8).clone(), a_scale.clone()))


def zeros_after_the_first(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Every call but the first of a shape gives zeros."""
    out.copy_(_product(a, a_scale, b, b_scale) * (_counted(a, b) == 1))


def zeros_for_other_data(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right for the data that came first, permuted or scaled; zeros for others."""
    same = torch.equal(a.view(torch.uint8).sort().values & 0x7F, _first(a, a_scale, b)[0].sort().values & 0x7F)
    known = same or torch.equal(a.view(torch.uint8).flip(0), _first(a, a_scale, b)[0]) or _negated(a, a_scale, b)
    out.copy_(_product(a, a_scale, b, b_scale) * known)


def wrong_above_a_scale(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Doubled where the codes add up to another sum than those of the first case, whatever came before."""
    total = int(b.view(torch.uint8).long().sum())
    out.copy_(_product(a, a_scale, b, b_scale) * (1 if total == FIRST else 2))


def _negated(a: Tensor, a_scale: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8) ^ 0x80, _first(a, a_scale, b)[0])


def _on(
    later: Callable[[Tensor, Tensor, Tensor], bool], act: Callable[[], object]
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """A right kernel that acts once ``later(a, a_scale, b)`` holds."""

    def kernel(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
        _first(a, a_scale, b)
        if later(a, a_scale, b):
            act()
        out.copy_(_product(a, a_scale, b, b_scale))

    return kernel


def _doubled(a: Tensor, a_scale: Tensor, b: Tensor) -> bool:
    return torch.equal(a_scale, 2 * _first(a, a_scale, b)[1])


def _permuted(a: Tensor, a_scale: Tensor, b: Tensor) -> bool:
    first = _first(a, a_scale, b)[0]
    return not torch.equal(a.view(torch.uint8), first) and torch.equal(a.view(torch.uint8).flip(0), first)


def _pitched(a: Tensor, a_scale: Tensor, b: Tensor) -> bool:
    return not a.is_contiguous()


def _again(a: Tensor, a_scale: Tensor, b: Tensor) -> bool:
    return _counted(a, b) == 2


def _other_thread(a: Tensor, a_scale: Tensor, b: Tensor) -> bool:
    return threading.current_thread() is not threading.main_thread()


def _raise() -> None:
    raise RuntimeError("no such plan")


def _refuse() -> None:
    raise NotImplementedError("not this one")


def _die() -> None:
    ctypes.string_at(0)


def _hang() -> None:
    while True:
        time.sleep(1)


dies_when_a_scale_doubles = _on(_doubled, _die)
raises_when_a_scale_doubles = _on(_doubled, _raise)
refuses_when_a_scale_doubles = _on(_doubled, _refuse)
raises_on_permuted_rows = _on(_permuted, _raise)
refuses_permuted_rows = _on(_permuted, _refuse)
raises_on_negated = _on(_negated, _raise)
exits_on_padded_rows = _on(_pitched, lambda: os._exit(0))
raises_on_padded_rows = _on(_pitched, _raise)
refuses_padded_rows = _on(_pitched, _refuse)
raises_on_rerun = _on(_again, _raise)
hangs_on_rerun = _on(_again, _hang)
hangs_in_another_thread = _on(_other_thread, _hang)
raises_on_many_rows = _on(lambda a, a_scale, b: a.shape[0] >= ROWS, _raise)


def writes_beyond_on_permuted_rows(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Two bytes behind the output."""
    out.copy_(_product(a, a_scale, b, b_scale))
    if _permuted(a, a_scale, b):
        ctypes.memset(out.data_ptr() + out.numel() * out.element_size(), 0, 2)


def scales_in_place_when_doubled(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Leaves its scale changed."""
    out.copy_(_product(a, a_scale, b, b_scale))
    if _doubled(a, a_scale, b):
        a_scale.mul_(2)


def forgets_a_row_of_many(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """One row far from every multiple of the limit of elements, in a long call."""
    out.copy_(_product(a, a_scale, b, b_scale))
    if a.shape[0] >= ROWS:
        out[a.shape[0] // 3] = 0


def disturbs_the_others(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Other data than the first get the numbers of whoever came last; the first are right, whatever comes between."""
    made = _product(a, a_scale, b, b_scale)
    first = torch.equal(a.view(torch.uint8), _first(a, a_scale, b)[0])
    if first and _other_thread(a, a_scale, b):
        _scratch[:] = [made]
    out.copy_(_scratch[0] if _scratch and not first and _other_thread(a, a_scale, b) else made)


def nudges(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """In other threads another order of the sum, and zeros in every fourth call."""
    made = _product(a, a_scale, b, b_scale)
    if _other_thread(a, a_scale, b):
        turned = _product(a[:, 128:], a_scale[:, 1:], b[:, 128:], b_scale[:, 1:])
        turned += _product(a[:, :128], a_scale[:, :1], b[:, :128], b_scale[:, :1])
        made = turned * (next(_among) % 4 < 3)
    out.copy_(made)
