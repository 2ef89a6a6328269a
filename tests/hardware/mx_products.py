"""Products of MX and NVFP4 beside torch's bfloat16 product of the same size: ratios, and tiles to choose from.

    python tests/hardware/mx_products.py --out DIRECTORY [--tune]

Needs a GPU from sm80. The layer's product and torch's are called in turns with a cold L2 cache
(:func:`hardware.products.microseconds`). ``--tune`` times every tile that fits instead, and says whether all have the
same bits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from math import inf
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402  # the paths above come first
from hardware.notes import Notes  # noqa: E402
from hardware.products import PROCESSES, Call, microseconds  # noqa: E402
from torch import Tensor  # noqa: E402

import kernels  # noqa: E402
from kernels.backends import triton_mx  # noqa: E402
from kernels.backends.triton_mx import Cut, Tile  # noqa: E402
from oracle.harness import provenance, subjects  # noqa: E402

SIZES = ((4096, 4096), (7168, 2048))
"""N and K."""
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
FORMATS = ("mm_fp4", "mm_mxfp8")


def operands(m: int, n: int, k: int) -> dict[str, Tensor]:
    torch.manual_seed(m + n + k)
    x, w = (torch.randn(r, k, device="cuda", dtype=torch.bfloat16) for r in (m, n))
    (a, sa), (b, sb) = (kernels.nvfp4_quantize(t, torch.ones(1, device="cuda")) for t in (x, w))
    (c, sc), (d, sd) = (kernels.mxfp8_quantize(t) for t in (x, w))
    return {"x": x, "w": w, "a": a, "sa": sa, "b": b, "sb": sb, "c": c, "sc": sc, "d": d, "sd": sd}


def ours(name: str, t: dict[str, Tensor]) -> Tensor:
    if name == "mm_fp4":
        return kernels.mm_fp4(t["a"], t["b"].t(), t["sa"], t["sb"])
    return kernels.mm_mxfp8(t["c"], t["d"].t(), t["sc"], t["sd"])


def compare(notes: Notes) -> None:
    """Microseconds of torch's bfloat16 product and of both of ours, and our ratios to it."""
    for (n, k), m in product(SIZES, ROWS):
        with notes.attempt(f"M={m} N={n} K={k}"):
            t = operands(m, n, k)
            calls: dict[str, Call] = {"bfloat16": lambda t=t: t["x"] @ t["w"].t()}
            calls |= {name: lambda t=t, name=name: ours(name, t) for name in FORMATS}
            found = microseconds(calls)
            notes.time(f"M={m} N={n} K={k}", found)
            notes.check(f"ratios M={m} N={n} K={k}", [round(found[name] / found["bfloat16"], 2) for name in FORMATS])


def candidates(m: int) -> Iterator[Cut]:
    """Tiles worth a look for so many rows."""
    if m <= 64:
        for d, s, wide in product((128, 256), (3, 4), (False, True)):
            yield Cut(inf, Tile(max(16, m), 64, d, s), wide, False)
        yield Cut(inf, Tile(max(16, m), 32, 256, 4), True, False)  # mma.sync: other bits
    elif m <= 512:
        for r, c, w in product((64, 128), (64, 128), (4, 8)):
            yield Cut(inf, Tile(r, c, 128, 3, w), True, False)
    if m >= 256:
        for (r, c, w), s in product(((128, 128, 4), (128, 128, 8), (256, 128, 8), (128, 256, 8)), (3, 4)):
            yield Cut(inf, Tile(r, c, 64, s, w), True, True)


def chosen(cut: Cut | None) -> None:
    """Make the backend take one tile, or its own."""
    triton_mx.cut_for = triton_mx_cut_for if cut is None else lambda *_: cut


triton_mx_cut_for = triton_mx.cut_for


def tried(job: tuple[int, Cut]) -> str:
    """Compile in a process of its own; what is wrong, or nothing."""
    m, cut = job
    chosen(cut)
    t = operands(m, 256, 1024)
    try:
        for name in FORMATS:
            ours(name, t)
        torch.cuda.synchronize()
    except Exception as error:  # a tile that does not fit is left out, whatever is raised
        return str(error)[:200]
    return ""


def tune(notes: Notes) -> None:
    """Every tile for every number of rows; the five fastest, the chosen one, and whether the bits are one."""
    n, k = SIZES[0]
    jobs = [(m, cut) for m in (16, 32, 64, 128, 256, 512, 2048) for cut in candidates(m)]
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        good = [job for job, why in zip(jobs, pool.map(tried, jobs), strict=True) if not why]
    notes.check("tiles", f"{len(good)} of {len(jobs)} run")
    for m in sorted({m for m, _ in good}):
        t = operands(m, n, k)
        for name in FORMATS:
            chosen(None)
            due, mine = ours(name, t), triton_mx.cut_for(m, 1, triton_mx.DENSE)

            def call(cut: Cut | None, t: dict[str, Tensor] = t, name: str = name) -> Tensor:
                chosen(cut)
                return ours(name, t)

            for cut in (cut for of, cut in good if of == m):
                made = [call(cut) for _ in range(3)]
                other = [int((made[i] != due).sum()) for i in range(3)]
                if any(other):
                    notes.check(f"other bits {name} M={m} {tuple(cut[1:])}", other)
            same = [torch.equal(call(cut), due) for of, cut in good if of == m]
            calls: dict[str, Call] = {str(tuple(cut[1:])): lambda c=cut: call(c) for of, cut in good if of == m}
            calls |= {"bfloat16": lambda t=t: t["x"] @ t["w"].t(), f"now {tuple(mine[1:])}": lambda: call(None)}
            found = sorted(microseconds(calls).items(), key=lambda pair: pair[1])
            notes.check(f"one set of bits {name} M={m}", all(same))
            few = found[:5] + [pair for pair in found[5:] if pair[0][0] in "bn"]
            notes.time(f"{name} M={m}", dict(few))
    chosen(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for measurements.json")
    parser.add_argument("--tune", action="store_true", help="time tiles instead")
    given = parser.parse_args()
    notes = Notes(given.out, provenance.machine() | provenance.versions(subjects.providers()))
    (tune if given.tune else compare)(notes)
    notes.write()


if __name__ == "__main__":
    main()
