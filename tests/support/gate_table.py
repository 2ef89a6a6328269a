"""40 candidates of a block-scaled product in Triton, and three broken ones, at the gate.

    TRITON_INTERPRET=1 python -m tests.support.gate_table        # on the CPU, by Triton's interpreter
    python -m tests.support.gate_table --extents 4096 4096 7168  # on a GPU

Candidates differ in tiles, stages, splits of K, and the order in which tiles and blocks of K are taken: what an
autotuner or a generator of kernels tries. Prints a row for each, what the gate and the judge cost, and at last the
answers as JSON. Ends with 1 where a legal one is rejected or a broken one accepted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

import oracle
from oracle.routines import cases

GEMM = "fp8_gemm_nt"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
RIGHT, TAIL_LOST, NEXT_SCALE, HALF = range(4)
FAULTS = {TAIL_LOST: "last block of K lost", NEXT_SCALE: "weight scale of the next block", HALF: "sums in float16"}


@triton.jit
def product(a, b, sa, sb, parts, m, n, k,
            BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr,
            DOWN: tl.constexpr, FAULT: tl.constexpr):  # fmt: skip  # fewer lines
    """``parts[split] = a b^T`` over a share of K: rows of ``a`` and ``b`` dense, scales of 1x128 and 128x128."""
    program, split = tl.program_id(0), tl.program_id(1)
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    strip = program // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - strip * GROUP, GROUP)
    row = (strip * GROUP + program % (GROUP * tiles_n) % height) * BM + tl.arange(0, BM)
    column = program % (GROUP * tiles_n) // height * BN + tl.arange(0, BN)
    blocks = k // BK // SPLIT
    if FAULT == 1:
        blocks -= 1
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(blocks):
        block = split * (k // BK // SPLIT) + (blocks - 1 - step if DOWN else step)
        at = block * BK + tl.arange(0, BK)
        x = tl.load(a + row[:, None] * k + at[None, :], mask=row[:, None] < m, other=0.0)
        y = tl.load(b + column[None, :] * k + at[:, None], mask=column[None, :] < n, other=0.0)
        group = block * BK // 128
        scale = group
        if FAULT == 2:
            scale = (group + 1) % (k // 128)
        left = tl.load(sa + row * (k // 128) + group, mask=row < m, other=0.0)
        right = tl.load(sb + column // 128 * (k // 128) + scale, mask=column < n, other=0.0)
        total += tl.dot(x, y) * left[:, None] * right[None, :]
        if FAULT == 3:
            total = total.to(tl.float16).to(tl.float32)
    inside = (row[:, None] < m) & (column[None, :] < n)
    tl.store(parts + split * m * n + row[:, None] * n + column[None, :], total, mask=inside)


class Candidate(NamedTuple):
    """What a tuner chooses."""

    rows: int
    columns: int
    block: int
    split: int
    stages: int
    group: int
    down: bool
    fault: int = RIGHT

    def __call__(self, inputs: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        a, b = inputs["a"], inputs["b"]
        if INTERPRETED:  # which loads no E4M3
            a, b = a.to(torch.float16), b.to(torch.float16)
        (m, k), n = a.shape, b.shape[0]
        parts = torch.empty(self.split, m, n, device=a.device)
        grid = (triton.cdiv(m, self.rows) * triton.cdiv(n, self.columns), self.split)
        product[grid](a, b, inputs["a_scale"], inputs["b_scale"], parts, m, n, k,
                      self.rows, self.columns, self.block, self.split, self.group, self.down, self.fault,
                      num_stages=self.stages)  # fmt: skip  # fewer lines
        return parts.sum(0).to(dtype)


LEGAL = [
    *(
        Candidate(rows, columns, block, split, 2 + (rows + split) % 3, 4 if columns == block else 1, rows == 32)
        for rows in (16, 32, 64)
        for columns in (64, 128)
        for block in (64, 128)
        for split in (1, 2, 4)
    ),
    *(Candidate(128, 128, 128, split, 3, group, False) for split in (1, 2) for group in (1, 4)),
]
BROKEN = [Candidate(64, 64, 64, 1, 3, 4, False, fault) for fault in FAULTS]


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds, the least of three."""
    found = []
    for _ in range(3):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - start))
    return min(found)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--extents", type=int, nargs=3, default=[20, 128, 512], metavar=("M", "N", "K"))
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the outputs")
    asked = parser.parse_args(arguments)
    (m, n, k), dtype = asked.extents, getattr(torch, asked.dtype)
    if INTERPRETED:
        from tests.support.interpreter import repair  # imports Triton's interpreter

        repair()
        warnings.simplefilter("ignore")  # the interpreter overflows in numpy
    arch = "cpu" if DEVICE == "cpu" else "sm{}{}".format(*torch.cuda.get_device_capability())
    case = cases.parse(f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m={m},n={n},k={k}/family=randn/seed=1")
    inputs = {name: x.to(DEVICE) for name, x in case.inputs().items()}
    accepts = oracle.gate(GEMM, arch=arch)
    check = accepts.prepared(inputs)
    answers, outputs = [], set[bytes]()
    for one in (*LEGAL, *BROKEN):
        out = one(inputs, dtype)
        outputs.add(out.cpu().view(torch.uint8).numpy().tobytes())
        answers.append(check(out))
        print(f"{str(one):<110} {FAULTS.get(one.fault, 'legal'):<32} {'accepted' if answers[-1] else 'rejected'}")
    right, wrong = LEGAL[0](inputs, dtype), BROKEN[1](inputs, dtype)
    x, y = (torch.randn(rows, k, dtype=torch.float64, device=DEVICE) for rows in (m, n))
    base = timed(lambda: x @ y.T)
    spent = {
        "judge, right": timed(lambda: oracle.judge(GEMM, inputs, right, arch=arch, explain="off")),
        "judge, wrong": timed(lambda: oracle.judge(GEMM, inputs, wrong, arch=arch, explain="off")),
        "gate, right": timed(lambda: accepts(inputs, right)),
        "gate, wrong": timed(lambda: accepts(inputs, wrong)),
        "prepared, right": timed(lambda: check(right)),
        "prepared, wrong": timed(lambda: check(wrong)),
    }
    for what, one in spent.items():
        print(f"{what:<16} {one:9.2f} ms, {one / base:6.2f} times one float64 product ({base:.2f} ms)")
    print(f"{len(outputs)} different outputs of {len(answers)}")
    print(json.dumps({"legal": answers[: len(LEGAL)], "broken": answers[len(LEGAL) :], "outputs": len(outputs)}))
    return int(not all(answers[: len(LEGAL)]) or any(answers[len(LEGAL) :]))


if __name__ == "__main__":
    sys.exit(main())
