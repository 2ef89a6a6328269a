"""Right outputs of every contract on every arch: ``python -m tests.support.legal [--seed N] [--contract NAME ...]``.

``PRODUCT`` of each product of FP8 operands and ``OTHER`` of each other contract, on each arch that it has numerics for:
at least ``TOTAL`` of all contracts. The table says how many were judged and how many failed; the exit status is 1 where
one failed. A contract none of whose cases fits an arch is an error
(:func:`oracle.diagnosis.mutation.right_variants`).
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

TOTAL = 10_000
PRODUCT, OTHER = 40, 12


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
    variants = list(islice(right_variants(wanted, seed=seed, contracts=[contract], arch=arch), wanted))
    alarms = [f"{v.case} on {v.arch} by {v.computed_by}: {v.verdict.summary}" for v in variants if v.false_alarm]
    return Count(contract, arch, len(variants), len({v.computed_by for v in variants}), alarms)


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
    parser.add_argument("--contract", nargs="+", choices=registered(), metavar="NAME", help="these alone")
    arguments = parser.parse_args()
    counts = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        asked = [ask for ask in wanted() if arguments.contract is None or ask[0] in arguments.contract]
        for future in [pool.submit(count, *ask, arguments.seed) for ask in asked]:
            counts.append(of := future.result())
            print(f"{of.contract:50} {of.arch:8} {of.variants:4} {of.ways:4} ways {len(of.alarms)} failed", flush=True)
            print(*(f"    {alarm}" for alarm in of.alarms), sep="\n", end="\n" if of.alarms else "")
    alarms = sum(len(of.alarms) for of in counts)
    variants = sum(of.variants for of in counts)
    print(f"{variants} right outputs, {len(counts)} pairs of a contract and an arch: {alarms} failed")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
