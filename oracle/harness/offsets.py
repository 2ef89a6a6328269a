"""Offsets beyond 32 bits: a call whose largest operand has more than 2^31 elements, judged on rows around the limit.

A kernel that computes an offset in 32 bits is right on every ordinary shape. Rows of such products and quantisers do
not depend on each other, so the rows of an ordinary case are repeated, with a period that no power of two is a
multiple of: an offset that wraps lands on a row with other data. Judged are the rows on both sides of every multiple
of 2^31 elements and the last ones; nothing of the size of the operand is computed by the judge.

Not covered: grouped products, weights beyond the limit, machines without the memory (a note says so).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from oracle.harness.report import LARGE, Finding
from oracle.harness.session import Answer, Session, failed
from oracle.harness.watches import Note
from oracle.routines.base import Call
from oracle.truth.gemm import take_rows
from oracle.verdict.compare import Status

LIMIT = 1 << 31
PERIOD = 61  # rows at most; the period is odd, so that no power of two is a multiple of it
COPIES = 8  # of the operand in memory: the file, the guarded tensor, its snapshot, and what a kernel makes of it
MARGIN = 4  # rows judged on either side of a multiple of the limit


def large_offsets(
    session: Session, case: str, inputs: Mapping[str, Tensor], options: Mapping[str, object], *, scheme: str
) -> Iterator[Finding | Note]:
    """One call beyond the limit, or a note why there is none; nothing where rows are few or depend on each other."""
    names = _by_row(session, inputs, scheme)
    if names is None:
        return
    operand = inputs[names[0]]
    if operand.shape[0] < 3:
        return
    width = max(operand.shape[1], _columns(session, inputs))
    rows = LIMIT // width + 2 * PERIOD
    size = rows * (operand.shape[1] * operand.element_size() + 2 * _columns(session, inputs)) * COPIES
    if size > (there := _memory(session.device)):
        yield Note(case, LARGE, f"not tried: it may take {size >> 30} GiB, and {there >> 30} GiB are free")
        return
    period = torch.arange(rows, device="cpu") % (min(PERIOD, operand.shape[0] - 1) | 1)
    large = {name: take_rows(t, period) if name in names else t for name, t in inputs.items()}
    answer = session.call(large, options)
    if answer.problem is not None and answer.problem.status is Status.FAILED:
        yield Finding(case, LARGE, answer.problem)
        return
    if answer.problem is not None:
        yield Note(case, LARGE, f"not judged: {answer.problem.reason or answer.problem.summary}")
        return
    if wrong := [name for name, t in answer.outputs.items() if t.dim() == 0 or t.shape[0] != rows]:
        shape = list(answer.outputs[wrong[0]].shape)
        yield Finding(case, LARGE, failed(f"{wrong[0]} has shape {shape} for {rows} rows"))
        return
    near = _rows(rows, {operand.shape[1], _columns(session, inputs)})
    part = Answer({name: take_rows(t, near) for name, t in answer.outputs.items()})
    verdict = session.judge({**large, **{name: take_rows(large[name], near) for name in names}}, options, part)
    if verdict.status is not Status.UNSUPPORTED:
        yield Finding(case, LARGE, verdict)


def _by_row(session: Session, inputs: Mapping[str, Tensor], scheme: str) -> tuple[str, ...] | None:
    """The inputs that have a row for each row of the output, the widest first; None where rows depend on each other."""
    operands = Call(session.contract, inputs).optional_operands
    if operands is None or operands.groups is not None or not operands.roles:
        return None
    role = operands.roles
    if operands.parts:
        rows, scale = inputs[role["a"]].shape[0], inputs.get(role["a_scale"])
        per_row = scale is not None and scale.dim() == 2 and scale.shape[0] == rows > 1
        return (role["a"], role["a_scale"]) if per_row else (role["a"],)
    return ("x",) if scheme in ("1x128", "token") and set(inputs) == {"x"} else None


def _columns(session: Session, inputs: Mapping[str, Tensor]) -> int:
    """Columns of the widest output."""
    return Call(session.contract, inputs).operands.shape[1]


def _rows(rows: int, widths: set[int]) -> Tensor:
    """Rows next to every multiple of the limit in operands of these widths, and the first and the last ones."""
    wanted = {*range(MARGIN), *range(rows - MARGIN, rows)}
    for width in widths:
        for multiple in range(1, rows * width // LIMIT + 1):
            at = multiple * LIMIT // width
            wanted |= set(range(at - MARGIN, at + MARGIN))
    return torch.tensor(sorted(row for row in wanted if 0 <= row < rows), dtype=torch.int64, device="cpu")


def _memory(device: str) -> int:
    """Bytes that are free on the device, or on the host as Linux counts them."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024
