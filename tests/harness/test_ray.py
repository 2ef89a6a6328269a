"""A Ray cluster of two nodes on one machine, one killed in the middle: the record is the serial one."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import job_tasks
import pytest

from oracle.errors import OptionError
from oracle.harness import on_ray
from oracle.harness.jobs import Lost, in_order

ABSENT = importlib.util.find_spec("ray") is None


@pytest.mark.skipif(not ABSENT, reason="ray is installed")
def test_without_ray_one_line_says_what_to_install() -> None:
    with pytest.raises(OptionError, match=r"pip install 'fp8-oracle\[ray\]'"):
        next(on_ray.in_order(job_tasks.tasks, [0], address=None, threads=1))


def wait_until_busy(node: str) -> None:
    """Until a task runs on the node."""
    from ray._private.state import available_resources_per_node

    end = time.monotonic() + 60
    while available_resources_per_node()[node].get("CPU", 0.0) > 0:
        assert time.monotonic() < end, "nothing runs on the second node"
        time.sleep(0.1)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the modules of the tests, on both nodes
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.second = made.add_node(num_cpus=1)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.mark.repeats("test_without_ray_one_line_says_what_to_install")
@pytest.mark.skipif(ABSENT, reason="ray is not installed")
def test_a_killed_node_costs_nothing(cluster: Any) -> None:
    tasks = [n for n in range(10) if n != job_tasks.DIES]
    lost: list[tuple[int, str]] = []
    results = on_ray.in_order(
        job_tasks.slowly, tasks, address=cluster.address, threads=1, lost=lambda task, cause: lost.append((task, cause))
    )
    found = [next(results) for _ in range(4)]
    time.sleep(0.2)  # the next ones run: a worker outlives its node for a third of a second
    wait_until_busy(cluster.second.node_id)
    cluster.remove_node(cluster.second, allow_graceful=False)
    found += results
    assert found == list(in_order(job_tasks.slowly, tasks, jobs=1)) and lost


@pytest.mark.repeats("test_without_ray_one_line_says_what_to_install")
@pytest.mark.skipif(ABSENT, reason="ray is not installed")
def test_what_dies_and_what_raises(cluster: Any) -> None:
    tasks = [0, job_tasks.DIES, job_tasks.RAISES]
    results = on_ray.in_order(job_tasks.tasks, tasks, address=cluster.address, threads=1)
    assert [next(results), next(results)] == [(0, 1), Lost("the process that judged it died by SIGKILL")]
    with pytest.raises(OptionError, match="give a smaller one"):
        next(results)
