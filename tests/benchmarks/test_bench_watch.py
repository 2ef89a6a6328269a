"""What ``oracle.watch`` costs a model: not watched, one call in 100 judged, one in 100 recorded, every call judged.

``python -m tests.benchmarks.test_bench_watch [PASSES]`` runs 24 layers (``tests/support/watched_model.py``) PASSES
times in each mode, in turn, and prints CPU seconds a pass as ratios to the model that was never watched. Nothing here
asserts a time.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import oracle
from tests.support import watched_kernels
from tests.support.watched_model import LAYERS, Model, prompt

BUDGET = "8 GiB, 600 s"
MODES = ("never", "off", "sampled", "recorded", "full")


def mode_of(name: str, folder: Path) -> AbstractContextManager[Any]:
    """``off`` is after a watch has ended."""
    asked: dict[str, Any] = {"budget": BUDGET, "bindings": watched_kernels.BINDINGS}
    if name in ("never", "off"):
        return nullcontext()
    if name == "full":
        return oracle.watch(**asked)
    return oracle.watch(every=100, to=folder if name == "recorded" else None, **asked)


@pytest.mark.sampled(2)
@pytest.mark.benchmark(group="watch")
@pytest.mark.parametrize("name", MODES[1:])
def test_watch(benchmark: Any, name: str, tmp_path: Path) -> None:
    """One pass; of a sampled watch after the first calls, which are judged."""
    model, x = Model(layers=1 if benchmark.disabled else LAYERS), prompt(8)
    with mode_of(name, tmp_path), torch.inference_mode():
        model(x)
        benchmark(model, x)


def main(passes: int) -> None:
    """A line for each mode."""
    model, x, spent = Model(), prompt(), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for number, name in itertools.product(range(3), MODES):
            few = max(1, passes // 50) if name == "full" else passes
            with mode_of(name, Path(folder) / f"{name}{number}"):
                model(x)
                start = time.process_time()
                for _ in range(few):
                    model(x)
                spent[name] = min(spent.get(name, float("inf")), (time.process_time() - start) / few)
    for name in MODES:
        print(f"{name:<9} {1e3 * spent[name]:8.2f} ms of CPU a pass, {spent[name] / spent['never']:6.2f} of never")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("passes", type=int, nargs="?", default=100)
    torch.set_num_threads(1)
    main(**vars(parser.parse_args()))
