"""How much faster N processes are than one, and that they find the same; in one run, both sides in turn.

``python -m tests.benchmarks.test_bench_jobs [N] [--contract NAME]`` runs ``mutate`` of a contract with one job and
with N, twice each, and prints the ratio of the least times; the JSON files are compared byte by byte. Required with 2
jobs on 2 idle cores: 1.7. Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from oracle.cli import main as command

pytestmark = pytest.mark.turns(4)

REQUIRED = 1.7
CONTRACT = "fp8_gemm_nt"


@pytest.mark.sampled(1)  # several processes: tests/harness/test_jobs.py
@pytest.mark.benchmark(group="jobs")
@pytest.mark.parametrize("jobs", [1, 2])
def test_jobs(benchmark: Any, jobs: int, tmp_path: Path) -> None:
    """The same scores; a few faults where nothing is timed."""
    pattern = "A scale of the*" if benchmark.disabled else "*"
    target = tmp_path / f"{jobs}.json"
    words = ["mutate", "--contract", CONTRACT, "--fault", pattern, "--jobs", str(jobs), "--json", str(target)]
    status = benchmark.pedantic(lambda: command(words), rounds=1)
    assert status == 0 and '"SURVIVED"' not in target.read_text()


def main(jobs: int, contract: str) -> None:
    """One line: seconds of each side, their ratio, whether the results are equal."""
    best, found = dict[int, float](), dict[int, bytes]()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            for count in (1, jobs):
                target = Path(folder) / f"{count}.json"
                words = ["mutate", "--contract", contract, "--profile", "full", "--jobs", str(count), "--json", target]
                start = time.perf_counter()
                asked = [sys.executable, "-m", "oracle", *map(str, words)]
                environment = os.environ | {"OMP_NUM_THREADS": "1"}  # one core a job, so that the ratio is of jobs
                subprocess.run(asked, check=True, stdout=subprocess.DEVNULL, env=environment)
                best[count] = min(best.get(count, float("inf")), time.perf_counter() - start)
                found[count] = target.read_bytes()
    ratio, same = best[1] / best[jobs], "the same" if found[1] == found[jobs] else "OTHER"
    print(
        f"mutate {contract}: 1 job {best[1]:.1f} s, {jobs} jobs {best[jobs]:.1f} s; ratio {ratio:.2f} "
        f"(required with 2 on 2 idle cores: {REQUIRED}); {same} results"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", type=int, nargs="?", default=2)
    parser.add_argument("--contract", default=CONTRACT)
    main(**vars(parser.parse_args()))
