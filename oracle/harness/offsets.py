"""Offsets beyond 32 bits: a call whose largest operand has more than 2^31 elements, judged on rows around the limit.

A kernel that computes an offset in 32 bits is right on every ordinary shape. Rows of such products and quantisers do
not depend on each other, so the rows of an ordinary case are repeated, with a period that no power of two is a
multiple of: an offset that wraps lands on a row with other data. Judged are the rows of the first period, those on both
sides of every multiple of 2^31 elements, the last ones, and every row whose bits are not those of the row of the first
period with the same data; rows with the same bits are proved by it. Nothing of the size of the operand is computed by
the judge.

Not covered: grouped products, weights beyond the limit, machines without the memory, more than 16384 rows with other
bits, of which as many are judged (a note says so).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from oracle.harness.concurrency import bytes_of
from oracle.harness.report import LARGE, Finding
from oracle.harness.session import CAUSES, Answer, failed
from oracle.harness.watches import Calls, Note
from oracle.routines.base import Call
from oracle.truth.gemm import take_rows

LIMIT = 1 << 31
PERIOD = 61  # rows at most; the period is odd, so that no power of two is a multiple of it
COPIES = 8  # of the operand in memory: the file, the guarded tensor, its snapshot, and what a kernel makes of it
MARGIN = 4  # rows judged on either side of a multiple of the limit
LONGEST = 1 << 10  # rows among which one number must lie in the stated domain: more than any tile has
MOST = 1 << 14  # rows with other bits than the same data elsewhere that are judged


def large_offsets(
    calls: Calls, inputs: Mapping[str, Tensor], options: Mapping[str, object], *, scheme: str
) -> Iterator[Finding | Note]:
    """One call beyond the limit, or a note why there is none; nothing where rows are few or depend on each other.

    A crash, hang or raise fails, unless it says that memory ran out; a refusal does not.
    """
    session, case = calls.session, calls.case
    call = Call(session.contract, inputs, options)
    names = _by_row(call, scheme)
    if names is None:
        return
    operand = inputs[names[0]]
    if operand.shape[0] < 3:
        return
    width = max(operand.shape[1], _columns(call))
    least = LIMIT // width + 2 * PERIOD
    rows = next((rows for rows in range(least, least + LONGEST) if session.takes(case, m=rows)), None)
    if rows is None:
        yield Note(case, LARGE, f"not tried: the stated domain has no number of rows from {least} on")
        return
    size = rows * (operand.shape[1] * operand.element_size() + 2 * _columns(call)) * COPIES
    if size > (there := _memory(session.device)):
        yield Note(case, LARGE, f"not tried: it may take {size >> 30} GiB, and {there >> 30} GiB are free")
        return
    length = min(PERIOD, operand.shape[0] - 1) | 1
    period = torch.arange(rows, device="cpu") % length
    large = {name: take_rows(t, period) if name in names else t for name, t in inputs.items()}
    answer = session.call(large, options)
    calls.look(answer)
    if answer.problem is not None:
        if (answer.problem.reason or "").startswith(CAUSES["memory"]):
            yield Note(case, LARGE, f"not judged: {answer.problem.reason}")
        else:
            yield Finding(case, LARGE, answer.problem)
        return
    if wrong := [name for name, t in answer.outputs.items() if t.dim() == 0 or t.shape[0] != rows]:
        shape = list(answer.outputs[wrong[0]].shape)
        yield Finding(case, LARGE, failed(f"{wrong[0]} has shape {shape} for {rows} rows"))
        return
    other = torch.unique(torch.cat([_apart(t, length) for t in answer.outputs.values()]))
    if len(other) > MOST:
        yield Note(case, LARGE, f"{len(other)} rows have other bits than the same data elsewhere; {MOST} are judged")
        other = other[torch.arange(MOST, device="cpu") * len(other) // MOST]
    near = _rows(rows, {operand.shape[1], _columns(call)})
    near = torch.unique(torch.cat([torch.arange(min(length, rows), device="cpu"), near, other]))
    part = Answer({name: take_rows(t, near) for name, t in answer.outputs.items()})
    verdict = session.judge({**large, **{name: take_rows(large[name], near) for name in names}}, options, part)
    yield Finding(case, LARGE, verdict)


def _apart(x: Tensor, length: int) -> Tensor:
    """Rows of ``x`` whose bits are not those of the row of the first ``length`` that had the same data."""
    first, result = _row_bits(x[:length]), []
    step = length * max(1, (1 << 26) // max(1, first.numel()))  # some 64 MiB at once
    for start in range(0, x.shape[0], step):
        bits = _row_bits(x[start : start + step])
        differs = (bits != first.repeat(-(-len(bits) // length), 1)[: len(bits)]).any(dim=1)
        result.append(torch.nonzero(differs)[:, 0] + start)
    return torch.cat(result)


def _row_bits(x: Tensor) -> Tensor:
    """The bytes ``[rows, B]`` of every row."""
    return bytes_of(x).reshape(x.shape[0], -1)


def _by_row(call: Call, scheme: str) -> tuple[str, ...] | None:
    """The inputs that have a row for each row of the output, the widest first; None where rows depend on each other."""
    operands, inputs = call.optional_operands, call.inputs
    if operands is None or not operands.by_row or not operands.roles:
        return None
    role = operands.roles
    if operands.parts:
        rows, scale = inputs[role["a"]].shape[0], inputs.get(role["a_scale"])
        per_row = scale is not None and scale.dim() == 2 and scale.shape[0] == rows > 1
        return (role["a"], role["a_scale"]) if per_row else (role["a"],)
    return ("x",) if scheme in ("1x128", "token") and set(inputs) == {"x"} else None


def _columns(call: Call) -> int:
    """Columns of the widest output."""
    return call.operands.shape[1]


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
