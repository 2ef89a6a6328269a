"""Public threads of experts, routing, fusions and weight-only products: whether the fault of each is caught and named.

    python -m tests.support.threads [--list]

Of each thread every fault of the catalogue that names it as its source is put into a right kernel, on the first quick
case of a contract of these families that can show it. Caught: the default judgement refuses the mutant. Named: what it
says explains the failure has the fault's name, or another of the same thread. Prints a row a thread and the shares;
``--list`` prints the faults alone. Ends with 1 where a fault is not caught, or fewer than 70% are named.

A thread without a fault is one of which :data:`NONE` says why.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping

import oracle
from oracle.diagnosis.mutation import Trial, trials_of
from oracle.routines import profiles
from oracle.routines.catalogue import catalogue, faults_of
from oracle.routines.family import families
from oracle.routines.fault import Fault
from oracle.routines.mutants import run

FAMILIES = ("moe", "weight_only", "layouts", "int8", "fused", "mx", "mx_products", "kv_cache", "products", "quantisers")
THREADS = (
    "TensorRT-LLM 13767", "aiter 4637", "flashinfer 2569", "flashinfer 3803", "flashinfer 3946", "flashinfer 4486",
    "flashinfer 4653", "pytorch 190449", "sglang 22928", "sglang 29055", "sglang 30989", "sglang 39920",
    "sglang 39939", "sglang 4396", "transformers 40197", "triton 10772", "triton 6527", "vllm 34577", "vllm 37502",
    "vllm 42118", "vllm 45212", "vllm 45361", "vllm 45738", "vllm 47303", "vllm 47315", "vllm 48324", "vllm 48895",
    "vllm 52051", "vllm 54189",
)  # fmt: skip  # in order
NONE: Mapping[str, str] = {
    "flashinfer 4486": "a tile of 192 rows of one kernel gave NaN: no arithmetic of its own, every NaN is refused",
    "flashinfer 4653": "a check that refuses a right call; nothing is computed",
    "vllm 52051": "sizes of two ranks that differ; the call is refused by its shapes",
}
MOST = 3
"""Cases on which a fault is tried."""


def faults(thread: str) -> list[Fault]:
    """Those whose source is the thread."""
    project, number = thread.rsplit(" ", 1)
    pattern = re.compile(rf"{project}(?: PR)?(?: [0-9]+,)* {number}\b|\b{number}\b", re.IGNORECASE)
    return [one for one in catalogue().values() if pattern.search(one.seen)]


def shown(fault: Fault) -> Iterator[Trial]:
    """Calls of the first contracts of these families that can show a fault, small ones first."""
    names = [name for family in families() if family.name in FAMILIES for name in family.grammars]
    for name in (one for one in names if fault in faults_of(one)):
        for case in sorted(profiles.cases(name, "quick"), key=lambda case: len(str(case)))[:40]:
            yield from (trial for trial in trials_of(case) if fault.applies(trial.call) is None)


def found(fault: Fault, known: set[str]) -> tuple[bool, bool, str]:
    """Whether a fault is caught and named on one of :data:`MOST` calls, and the contract."""
    caught = False
    for tried, trial in enumerate(shown(fault), 1):
        call = trial.call
        verdict = oracle.judge(
            call.contract.name, call.inputs, run(call, fault), arch=trial.arch or "cpu", explain="quick", **call.options
        )
        caught = caught or verdict.status.is_failure
        if known & set(verdict.explained_by):
            return True, True, call.contract.name
        if tried == MOST:
            return caught, False, call.contract.name
    return caught, False, ""


def main(only: bool) -> int:
    counts = [0, 0, 0]
    for thread in THREADS:
        own = faults(thread)
        if only or thread in NONE:
            print(f"{thread}: {', '.join(one.name for one in own) or NONE[thread]}", flush=True)
            continue
        known = {one.name for one in own}
        rows = [found(one, known) for one in own[:2]]
        caught, named = any(row[0] for row in rows), any(row[1] for row in rows)
        counts = [count + more for count, more in zip(counts, (1, caught, named), strict=True)]
        where = next((row[2] for row in rows if row[0]), "")
        print(f"{thread}: caught {caught}, named {named} [{where}] {own[0].name}", flush=True)
    if not only:
        print(f"{counts[1]} of {counts[0]} threads caught, {counts[2]} named", flush=True)
    return int(not only and (counts[1] < counts[0] or counts[2] < 0.7 * counts[0]))


if __name__ == "__main__":
    sys.exit(main("--list" in sys.argv))
