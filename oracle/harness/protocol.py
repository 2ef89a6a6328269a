"""What a worker process may say: one message of fixed size a request, and nothing else.

    nonce  kind  outputs  late  disturbed  text
    8 times: dtype  axes  device  padded  slot  offset  length  shape[8]  stride[8]

The nonce is that of the request, so that a message written in advance, or twice, is no reply. Numbers are claims:
whoever reads them compares them with what was asked for and with the memory that there is. A tensor travels in shared
memory (:mod:`oracle.harness.memory`): ``slot`` is the place in the request's list of tensors in which it lies, -1 for
the room behind them; ``offset`` counts bytes from there. Not covered: requests, which only the parent writes (JSON).

Needs nothing but torch: it is part of the worker, which runs where the rest of the oracle cannot be imported.
"""

from __future__ import annotations

import os
import re
import struct
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch

NONCE = 16  # bytes
REQUEST = 1 << 17  # bytes at most; one message of a Unix socket may have more (net.core.wmem_default: 208 KiB)
AXES, OUTPUTS, TEXT = 8, 8, 2048
FRAMES = 8  # of a traceback
PASSED_THROUGH = ("torch/overrides.py", "torch/utils/_device.py", "torch/utils/_contextlib.py", "importlib/__init__.py")
LIMIT = 1 << 48  # of an extent, stride or offset: more than any memory has
KINDS = ("ok", "result", "signature", "memory", "unsupported", "exit", "device", "raised", "uncapturable", "untested")
DEVICES = ("cpu", "cuda", "another device")
_WHOLE = re.compile(r"torch\.(bool|u?int(8|16|32|64)|b?float\w+|complex\d+)")
_ALL = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
DTYPES = tuple(sorted((d for d in _ALL if _WHOLE.fullmatch(str(d))), key=str))
"""The dtypes of whole bytes, which both sides read off the same torch."""
_HEAD = struct.Struct(f"<{NONCE}sBBBBH{TEXT}s")
_CLAIM = struct.Struct(f"<BBBBiqq{AXES}q{AXES}q")
SIZE = _HEAD.size + OUTPUTS * _CLAIM.size


class GarbledError(Exception):
    """A message is no reply."""


@dataclass(frozen=True)
class Claim:
    """Where a worker says that an output lies, and what it is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str = "cpu"
    slot: int = -1
    offset: int = 0
    length: int = 0  # in the room: how many elements were written there
    padded: bool = False  # in the room: they are its memory with the padding, not its elements one after the other


@dataclass(frozen=True)
class Reply:
    """What came of a request; ``kind`` is ``"ok"`` or says why there is no result, ``text`` in words."""

    kind: str
    text: str = ""
    outputs: tuple[Claim, ...] = ()
    late: tuple[int, ...] = ()  # outputs that changed after the caller's stream was done
    disturbed: bool = False  # the outputs are those of a call on the inputs beside
    seconds: float = 0.0  # on the clock of the parent, the way there and back included

    @property
    def ok(self) -> bool:
        return self.kind == "ok"


def pack(nonce: bytes, reply: Reply) -> bytes:
    """The message; ``text`` is cut to :data:`TEXT` bytes."""
    text = reply.text.encode(errors="replace")[:TEXT]
    late = sum(1 << i for i in reply.late)
    head = _HEAD.pack(nonce, KINDS.index(reply.kind), len(reply.outputs), late, reply.disturbed, len(text), text)
    claims = b"".join(
        _CLAIM.pack(
            DTYPES.index(c.dtype),
            len(c.shape),
            DEVICES.index(c.device),
            c.padded,
            c.slot,
            c.offset,
            c.length,
            *c.shape,
            *[0] * (AXES - len(c.shape)),
            *c.stride,
            *[0] * (AXES - len(c.stride)),
        )
        for c in reply.outputs
    )
    return (head + claims).ljust(SIZE, b"\0")


def unpack(message: bytes, nonce: bytes) -> Reply:
    """The reply to the request of this nonce.

    Raises GarbledError: another size or nonce, or a field outside of its values.
    """
    if len(message) != SIZE:
        raise GarbledError(f"a message of {len(message)} bytes; a reply has {SIZE}")
    echoed, kind, count, late, disturbed, length, text = _HEAD.unpack_from(message)
    if echoed != nonce:
        raise GarbledError("a message that answers another request")
    if kind >= len(KINDS) or count > OUTPUTS or late >> count or disturbed > 1 or length > TEXT:
        raise GarbledError(f"a message of kind {kind} with {count} outputs and {length} bytes of text")
    claims = tuple(_claim(_CLAIM.unpack_from(message, _HEAD.size + i * _CLAIM.size)) for i in range(count))
    changed = tuple(i for i in range(count) if late >> i & 1)
    return Reply(KINDS[kind], printable(text[:length].decode(errors="replace")), claims, changed, bool(disturbed))


def frames_of(error: BaseException) -> tuple[str, ...]:
    """The frames of foreign code in the traceback of what it raised, outermost first, each in one line; the first and
    the last ones where there are more than :data:`FRAMES`. Those of the harness, of torch's way through it and of the
    import are left out."""
    seen = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((OURS, "<frozen importlib")) and not frame.filename.endswith(PASSED_THROUGH)
    ]
    shown = seen if len(seen) <= FRAMES else [*seen[:1], *seen[1 - FRAMES :]]
    here = os.getcwd() + os.sep
    return tuple(
        f"{frame.filename.removeprefix(here)}:{frame.lineno} in {frame.name}: {(frame.line or '')[:160]}".rstrip(": ")
        for frame in shown
    )


OURS = os.path.dirname(frames_of.__code__.co_filename)
"""Where code of the harness says that it lies, in whichever process."""


def printable(text: str) -> str:
    """The text with every character that a terminal could act on replaced."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _claim(fields: Sequence[int]) -> Claim:
    dtype, axes, device, padded, slot, offset, length, *extents = fields
    valid = dtype < len(DTYPES) and axes <= AXES and device < len(DEVICES) and padded < 2
    if not (valid and slot >= -1 and 0 <= offset < LIMIT and 0 <= length < LIMIT):
        raise GarbledError(f"an output of dtype {dtype}, {axes} axes, device {device}, slot {slot}, offset {offset}")
    shape, stride = tuple(extents[:axes]), tuple(extents[AXES : AXES + axes])
    if any(not 0 <= n < LIMIT for n in (*shape, *stride)):
        raise GarbledError(f"an output of shape {list(shape)} with strides {list(stride)}")
    return Claim(DTYPES[dtype], shape, stride, DEVICES[device], slot, offset, length, bool(padded))
