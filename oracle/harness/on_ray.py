"""Tasks on the machines of a Ray cluster, their results in order, as :func:`oracle.harness.jobs.in_order`.

Ray schedules: one of its tasks for each of ours, with one CPU, and one GPU where ``gpus`` says so. A task that is lost
with its worker or machine is given to another one once (``lost`` is told), then it is a :class:`Lost`. On the machine a
process of :mod:`oracle.harness.jobs` carries tasks out, so a subject that dies costs its case and not the Ray worker.

Every machine must have the same package installed; the function that ``make`` gives is the place to refuse another
version. Source: Ray 2.60, "Tasks", "Fault tolerance".

Not covered: starting a cluster, copying code to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from oracle.errors import OptionError, SubjectError
from oracle.harness.jobs import Lost, Make, Pool

R = TypeVar("R")
CHECKED = 1.0  # seconds between looks at an interrupt of the user


def in_order(
    make: Make[R],
    tasks: Sequence[int],
    *,
    address: str | None,
    threads: int,
    gpus: Callable[[int], bool] = lambda task: False,
    started: Callable[[int], None] = lambda task: None,
    lost: Callable[[int, str], None] = lambda task, cause: None,
) -> Generator[R | Lost]:
    """The results of ``tasks``, in this order, by the cluster at ``address`` (None: the one that Ray finds, or a new
    one on this machine).

    Raises OptionError: Ray is not installed, or there is no cluster at the address; SubjectError: a machine of it lacks
    what the task needs. What a task raises is raised here,
    at its turn.
    """
    ray = _ray()
    begun = not ray.is_initialized()
    if begun:
        try:
            ray.init(address=address, logging_level="error", log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise OptionError(f"--ray {address or ''}: no cluster there ({error}); see `ray start`") from None
    errors = ray.exceptions
    gone = (errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError, errors.OutOfMemoryError)
    remote = ray.remote(max_retries=0, num_cpus=1)(_carry_out)

    def given(task: int) -> Any:
        return remote.options(num_gpus=1 if gpus(task) else 0).remote(make, threads, task)

    try:
        waiting = {task: given(task) for task in tasks}
        for task in tasks:
            started(task)
            for attempt in (1, 2):
                try:
                    result = _got(ray, waiting[task])
                except gone as error:
                    cause = f"its Ray worker was lost ({type(error).__name__})"
                    result = Lost(f"{cause}, twice")
                    if attempt == 1:
                        lost(task, cause)
                        waiting[task] = given(task)
                        continue
                except errors.RayTaskError as error:
                    why = str(error).strip().splitlines()[-1]
                    raise SubjectError(f"a machine of the cluster cannot judge ({why}); install the same") from None
                break
            del waiting[task]
            if isinstance(result, BaseException):
                raise result
            yield result
    finally:
        for reference in waiting.values():
            ray.cancel(reference, force=True)
        if begun:
            ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise OptionError("--ray needs the package ray: pip install 'fp8-oracle[ray]'") from None
    return ray


def _got(ray: Any, reference: Any) -> Any:
    """The value, waited for in pieces, between which an interrupt of the user arrives."""
    while not ray.wait([reference], timeout=CHECKED)[0]:
        pass
    return ray.get(reference)


_places: dict[tuple[object, ...], Pool[Any]] = {}


def _carry_out(make: Make[R], threads: int, task: int) -> R | Lost | BaseException:
    """In a Ray worker: the result by its process, which is started at the first task and kept."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    key = (repr(make), threads, visible)
    if key not in _places:
        environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        _places[key] = Pool(make, 1, threads, [environment])
    return _places[key].result(_places[key].submit(task))
