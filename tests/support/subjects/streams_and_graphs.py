"""Kernels of ``fp8_gemm_nt`` on a GPU: right ones, and ones that are wrong in a graph or on streams only."""

from __future__ import annotations

import time

import torch
from torch import Tensor

_last: dict[tuple[int, ...], Tensor] = {}
_workspace: dict[tuple[int, ...], Tensor] = {}
_side: list[torch.cuda.Stream] = []


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """One block of K after the other in float32, scaled as it joins the sum; no synchronisation."""
    total = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    for block in range(a_scale.shape[1]):
        at = slice(block * 128, min(a.shape[1], (block + 1) * 128))
        of = b_scale[:, block].repeat_interleave(128, output_size=128 * b_scale.shape[0])[: b.shape[0]]
        total += (a[:, at].float() @ b[:, at].float().T) * a_scale[:, block, None] * of[None, :]
    return total


def right(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """On the current stream."""
    out.copy_(_product(a, a_scale, b, b_scale))


def returns(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The same, in a tensor of its own."""
    return torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device).copy_(_product(a, a_scale, b, b_scale))


def _other_stream() -> torch.cuda.Stream:
    if not _side:
        _side.append(torch.cuda.Stream())
    return _side[0]


def joined(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """On a stream of its own, which waits for the caller's and is waited for."""
    side, current = _other_stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        right(a, a_scale, b, b_scale, out)
    current.wait_stream(side)


def unjoined(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """The caller's stream does not wait for it; while no graph is captured, which would refuse it."""
    side, current = _other_stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        right(a, a_scale, b, b_scale, out)
    if torch.cuda.is_current_stream_capturing():
        current.wait_stream(side)


def unjoined_own(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The same, in a tensor of its own."""
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    unjoined(a, a_scale, b, b_scale, out)
    return out


def unforked(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """It does not wait for the caller's stream; during a capture it stays on it."""
    if torch.cuda.is_current_stream_capturing():
        right(a, a_scale, b, b_scale, out)
        return
    side = _other_stream()
    with torch.cuda.stream(side):
        right(a, a_scale, b, b_scale, out)
    torch.cuda.current_stream().wait_stream(side)


def bakes_inputs(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """A captured call copies what the last plain call of the shape computed."""
    key = (*a.shape, *b.shape)
    if not torch.cuda.is_current_stream_capturing():
        _last[key] = _product(a, a_scale, b, b_scale)
    out.copy_(_last[key])


def first_replay_only(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """A captured call writes nothing from the second replay on."""
    made = _product(a, a_scale, b, b_scale)
    key = (*a.shape, *b.shape)
    if not torch.cuda.is_current_stream_capturing():
        _workspace[key] = torch.zeros((), device=a.device)
        out.copy_(made)
        return
    out.copy_(torch.where(_workspace[key] == 0, made.to(out.dtype), out))
    _workspace[key] += 1


def shares_workspace(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Captured calls of a shape give their results in one buffer."""
    key = (*a.shape, *b.shape)
    made = _product(a, a_scale, b, b_scale).to(out_dtype)
    if not torch.cuda.is_current_stream_capturing():
        _workspace[key] = torch.empty_like(made)
        return made
    return _workspace[key].copy_(made)


def uncapturable(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right, and waits for the device."""
    right(a, a_scale, b, b_scale, out)
    torch.cuda.current_stream().synchronize()


def hangs_on_another_stream(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Never returns on a stream that is not the default one."""
    while torch.cuda.current_stream() != torch.cuda.default_stream():
        time.sleep(1)
    right(a, a_scale, b, b_scale, out)
