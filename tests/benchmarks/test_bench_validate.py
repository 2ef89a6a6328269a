"""What a default `validate` costs beside that of another checkout, in CPU seconds, both sides in turn.

    python -m tests.benchmarks.test_bench_validate CHECKOUT [--pairs 3] [--jobs N] [--contract NAME ...]

CHECKOUT is a folder with the other ``oracle`` (``git archive COMMIT oracle``). Each of 20 right kernels
(:mod:`tests.support.subjects.plain`) is validated by both, once untimed, then in pairs, each pair of one seed; which
side begins alternates. CPU seconds are those of the command and all that it starts. The last line has the median over
the contracts of the median ratio of a contract's pairs, for which :data:`REQUIRED` is demanded. Nothing here asserts
a time.
"""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.support.subjects import plain

REQUIRED = 1.2
HERE = Path(__file__).resolve().parents[2]
CONTRACTS = [name for name, of in inspect.getmembers(plain, inspect.isfunction) if not name.startswith("_")]
SMALL = "pad_token_groups"


def seconds(root: Path, folder: Path, contract: str, seed: int) -> float:
    """CPU seconds of a validation by the ``oracle`` of ``root``; ``folder`` has the kernels and the caches.

    Raises RuntimeError: the right kernel does not conform.
    """
    path = os.pathsep.join([str(root), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
    words = ["-m", "oracle", "validate", f"plain:{contract}", "--contract", contract, "--seed", str(seed), "-q"]
    with (folder / f"{contract}.log").open("w") as log:
        child = subprocess.Popen([sys.executable, *words], cwd=root, env=environment, stdout=log, stderr=log)
        _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{root}: {contract}: {(folder / f'{contract}.log').read_text()[-300:]}")
    return used.ru_utime + used.ru_stime


def pairs(other: Path, folder: Path, count: int, contract: str) -> list[tuple[float, float]]:
    """CPU seconds of the other checkout and of this one, ``count`` times; a first run of each is not counted."""
    sides = {root: list[float]() for root in (other, HERE)}
    for seed in range(count + 1):
        for root in (other, HERE) if seed % 2 else (HERE, other):
            sides[root].append(seconds(root, folder, contract, seed))
    return list(zip(sides[other][1:], sides[HERE][1:], strict=True))


def main(checkout: Path, count: int, jobs: int, contracts: Sequence[str]) -> float:
    """A line a contract, then the median; returns it."""
    ratios = list[float]()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(jobs) as pool:
        shutil.copy(Path(inspect.getfile(plain)), name)
        of = partial(pairs, checkout.resolve(), Path(name), count)
        for contract, measured in zip(contracts, pool.map(of, contracts), strict=True):
            ratios.append(median(ours / theirs for theirs, ours in measured))
            each = ", ".join(f"{theirs:.2f} -> {ours:.2f}" for theirs, ours in measured)
            print(f"{contract:34} {ratios[-1]:.2f}   CPU s: {each}", flush=True)
    within = sum(ratio <= REQUIRED for ratio in ratios)
    print(f"median of {len(ratios)} contracts {median(ratios):.3f} (required: {REQUIRED}); {within} at or below it")
    return median(ratios)


@pytest.mark.sampled(1)
@pytest.mark.benchmark(group="validate")
def test_a_validation_beside_another(benchmark: Any, tmp_path: Path) -> None:
    """The kernel of one contract conforms, and the time of its processes is counted."""
    shutil.copy(Path(inspect.getfile(plain)), tmp_path)
    assert benchmark.pedantic(lambda: seconds(HERE, tmp_path, SMALL, 0), rounds=1) > 0.5


def test_a_kernel_that_does_not_conform_is_an_error(tmp_path: Path) -> None:
    """Its time would be that of a failure."""
    (tmp_path / "plain.py").write_text(f"def {SMALL}(x, group_end_offsets, alignment_size=32):\n    return x\n")
    with pytest.raises(RuntimeError, match=SMALL):
        seconds(HERE, tmp_path, SMALL, 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--contract", nargs="+", choices=CONTRACTS, default=CONTRACTS, metavar="NAME")
    asked = parser.parse_args()
    main(asked.checkout, asked.pairs, asked.jobs, asked.contract)
