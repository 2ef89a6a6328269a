"""What the caller of a kernel sees on a GPU, with streams and graphs on the CPU (:mod:`tests.support.fake_cuda`).

The kernels are ``out = 2 x``; the same ones run on a GPU in ``test_launches_device.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oracle.harness.launches import (
    CAPTURING,
    FIRST,
    GRAPH,
    HELD,
    LATE,
    REPLACED,
    SECOND,
    SIDE,
    Call,
    Made,
    Uncapturable,
    launch,
)
from tests.support.fake_cuda import FakeCuda

MODES = (SIDE, HELD, LATE, GRAPH, REPLACED, FIRST, SECOND)
MINE, THEIRS = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 7.0])


class Kept:
    """What a kernel keeps between its calls."""

    def __init__(self) -> None:
        self.last = torch.zeros(2)
        self.workspace = torch.zeros(2)
        self.replays = 0


def right(cuda: FakeCuda, x: Tensor, out: Tensor, kept: Kept) -> Tensor:
    cuda.work(lambda: torch.mul(x, 2, out=out))
    return out


def joined(cuda: FakeCuda, x: Tensor, out: Tensor, kept: Kept) -> Tensor:
    """On a stream of its own, as it should be."""
    side, current = cuda.Stream(), cuda.current_stream()
    side.wait_stream(current)
    with cuda.stream(side):
        right(cuda, x, out, kept)
    current.wait_stream(side)
    return out


def unjoined(cuda: FakeCuda, x: Tensor, out: Tensor, kept: Kept) -> Tensor:
    """The caller's stream does not wait for it."""
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        right(cuda, x, out, kept)
    return out


def unforked(cuda: FakeCuda, x: Tensor, out: Tensor, kept: Kept) -> Tensor:
    """It does not wait for the caller's stream."""
    side = cuda.Stream()
    with cuda.stream(side):
        right(cuda, x, out, kept)
    cuda.current_stream().wait_stream(side)
    return out


def bakes_inputs(cuda: FakeCuda, x: Tensor, out: Tensor, kept: Kept) -> Tensor:
    """Copies what it computed at the last call before the capture."""
    if cuda.is_current_stream_capturing():
        last = kept.last.clone()
        cuda.work(lambda: out.copy_(last))
    else:
        right(cuda, x, out, kept)
        cuda.work(lambda: kept.last.copy_(out))
    return out


def first_replay_only(cuda: FakeCuda, x: Tensor, out: Tensor, kept: Kept) -> Tensor:
    """Writes nothing in a second replay."""

    def once() -> None:
        kept.replays += 1
        if kept.replays == 1:
            torch.mul(x, 2, out=out)

    if cuda.is_current_stream_capturing():
        cuda.work(once)
        return out
    return right(cuda, x, out, kept)


def shares_workspace(cuda: FakeCuda, x: Tensor, out: Tensor, kept: Kept) -> Tensor:
    """Its result lies in one workspace for all captured calls."""
    return right(cuda, x, kept.workspace if cuda.is_current_stream_capturing() else out, kept)


def counts_down(cuda: FakeCuda, x: Tensor, out: Tensor, kept: Kept) -> Tensor:
    """A workspace that is cleared when the kernel is called, not when it is replayed."""
    kept.workspace = torch.zeros(2)
    workspace = kept.workspace

    def accumulate() -> None:
        workspace.add_(2 * x)
        out.copy_(workspace)

    cuda.work(accumulate)
    return out


def nothing_captured(cuda: FakeCuda, x: Tensor, out: Tensor, kept: Kept) -> Tensor:
    """Computes on the host at once, whatever stream there is."""
    return torch.mul(x, 2, out=out)


def waits(cuda: FakeCuda, x: Tensor, out: Tensor, kept: Kept) -> Tensor:
    """Right, and waits for the device, which a capture does not permit."""
    right(cuda, x, out, kept)
    cuda.current_stream().synchronize()
    return out


def launched(kernel: Callable[..., Tensor], mode: str, *, mine: Tensor = MINE) -> Tensor:
    """The answer to ``mine`` that the caller's stream sees in this mode, after a plain call."""
    cuda, kept = FakeCuda(), Kept()

    def call(own: Tensor, theirs: Tensor) -> Call:
        x, out = own.clone(), torch.full((2,), torch.nan)

        def run() -> Made:
            return {"out": kernel(cuda, x, out, kept)}

        return Call(run, lambda: cuda.work(lambda: x.copy_(own)), lambda: cuda.work(lambda: x.copy_(theirs)))

    one, other = call(mine, THEIRS), call(THEIRS, mine)
    one.run()
    _, seen = launch(mode, one, other, lambda made: made["out"].clone(), poison=0, cuda=cuda)
    return seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernel", [right, joined])
def test_right_kernels(kernel: Callable[..., Tensor], mode: str) -> None:
    """One stream, or one of its own that is waited for."""
    assert torch.equal(launched(kernel, mode), 2 * MINE)


# kernel, the modes in which the caller sees something else
WRONG = (
    (unjoined, {HELD, LATE}),
    (unforked, {LATE}),
    (bakes_inputs, {REPLACED, FIRST}),
    (first_replay_only, {REPLACED, FIRST, SECOND}),
    (shares_workspace, {FIRST}),
    (counts_down, {REPLACED, FIRST, SECOND}),
    (nothing_captured, {LATE, GRAPH, REPLACED, FIRST, SECOND}),
)


@pytest.mark.parametrize(("kernel", "modes"), WRONG, ids=[kernel.__name__ for kernel, _ in WRONG])
def test_sabotaged_kernels(kernel: Callable[..., Tensor], modes: set[str]) -> None:
    """Each in these modes and no other; every plain call of it is right."""
    assert {mode for mode in MODES if not torch.equal(launched(kernel, mode), 2 * MINE)} == modes


def test_what_is_stale_is_the_other_answer() -> None:
    """Inputs that were baked in, and memory that was handed out again, hold the answer to the other inputs."""
    assert torch.equal(launched(bakes_inputs, REPLACED), 2 * THEIRS)
    assert torch.equal(launched(unjoined, HELD), 2 * THEIRS)


def test_a_kernel_that_cannot_be_captured() -> None:
    """It is told from one that fails."""
    for mode in (GRAPH, REPLACED, FIRST, SECOND):
        with pytest.raises(Uncapturable, match="not permitted when stream is capturing"):
            launched(waits, mode)
    assert torch.equal(launched(waits, SIDE), 2 * MINE)

    for said in CAPTURING:

        def refused(cuda: FakeCuda, x: Tensor, out: Tensor, kept: Kept, said: str = said) -> Tensor:
            if cuda.is_current_stream_capturing():
                raise RuntimeError(f"CUDA error: operation {said}")
            return right(cuda, x, out, kept)

        with pytest.raises(Uncapturable, match=said):
            launched(refused, GRAPH)

    def breaks(cuda: FakeCuda, x: Tensor, out: Tensor, kept: Kept) -> Tensor:
        if cuda.is_current_stream_capturing():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return right(cuda, x, out, kept)

    with pytest.raises(RuntimeError, match="illegal memory access"):
        launched(breaks, GRAPH)
