"""Right outputs of every contract on every arch, counted one by one: ``python -m tests.support.legal [--seed N]``.

At least ``PRODUCT`` of each product of FP8 operands and ``OTHER`` of each other contract, on each arch that it has
numerics for. The table says how many were judged and how many failed; the exit status is 1 where one failed. A contract
none of whose cases fits an arch is an error (:func:`oracle.diagnosis.mutation.right_variants`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from typing import NamedTuple

import torch

from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.diagnosis.mutation import right_variants
from oracle.errors import OracleError
from oracle.routines import Call, Case, cases, get, registered
from oracle.tensorcore.schedules import get as schedule

PRODUCT, OTHER = 40, 10


class Count(NamedTuple):
    """The variants of one contract on one arch; ``ways`` in which they were computed, and those that failed."""

    contract: str
    arch: str
    variants: int
    ways: int
    alarms: list[str]


def wanted() -> Iterator[tuple[str, str, int]]:
    """Every contract with cases, on every arch that it has numerics for (sm90 where it has one result everywhere)."""
    for name in sorted(set(registered()) & set(cases.grammars())):
        contract = get(name)
        for arch in [*contract.numerics] or ["sm90"]:
            yield name, arch, PRODUCT if "a" in contract.roles else OTHER


def count(contract: str, arch: str, wanted: int, seed: int) -> Count:
    """``wanted`` variants of a contract on an arch."""
    torch.set_num_threads(1)
    made = list(islice(right_variants(wanted, seed=seed, contracts=[contract], arch=arch), wanted))
    alarms = [f"{v.case} on {v.arch} by {v.computed_by}: {v.verdict.summary}" for v in made if v.false_alarm]
    return Count(contract, arch, len(made), len({v.computed_by for v in made}), alarms)


def right_call(case: Case) -> Call:
    """The call of a case by the arithmetic of a right kernel: the usual one of the first arch that has a model of it,
    in the output dtype that the options name, or the first that the contract admits.

    Raises OracleError: no arch of the contract has a model of the call.
    """
    contract, inputs, options = get(case.contract), case.inputs(), case.call_options()
    call = Call(contract, inputs, options).checked()
    due = contract.outputs(call).get("out")
    named = call.resolved.get("out_dtype")
    dtype = named if isinstance(named, torch.dtype) else torch.bfloat16 if due is None else due.dtypes[0]
    refused: OracleError | None = None
    for arch in contract.numerics or ("sm90",):
        call = Call(contract, inputs, options, out_dtype=dtype, arch=arch).checked()
        operands = call.optional_operands
        if operands is None or not operands.parts or (operands.roles and not operands.given):
            return call  # its kernel has one arithmetic, or chooses it
        try:
            first = contract.arithmetics(call)[0]
        except OracleError as error:
            refused = error
            continue
        return call if first == IEEE32 else call.with_schedule(schedule(first))
    assert refused is not None
    raise refused


def main() -> int:
    """The table, a line a contract and arch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=None)
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        asked = [pool.submit(count, *ask, arguments.seed) for ask in wanted()]
        counts = [future.result() for future in asked]
    for found in counts:
        print(f"{found.contract:50} {found.arch:8} {found.variants:4} {found.ways:4} ways {len(found.alarms)} failed")
        print(*(f"    {alarm}" for alarm in found.alarms), sep="\n", end="\n" if found.alarms else "")
    alarms = sum(len(found.alarms) for found in counts)
    made = sum(found.variants for found in counts)
    print(f"{made} right outputs, {len(counts)} pairs of a contract and an arch: {alarms} failed")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
