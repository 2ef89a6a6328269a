"""The catalogue of faults that FP8 kernels have really had, each as a mutation of a right kernel.

    catalogue()                     every fault, by name
    faults_of(contract)             those that apply to a contract
    run(call, *faults)              the output of a right kernel with these faults in it

Used three ways: as mutants (:mod:`oracle.diagnosis.mutation`), as hypotheses (:mod:`oracle.diagnosis.explain`) and as
documentation. ``BEHAVIOURS`` are the faults that no single output shows: they mutate no numbers, and each names the
watch of :mod:`oracle.harness` that sees it. Not covered: attention beyond the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import MappingProxyType

from oracle.errors import OptionError, among
from oracle.loading import collector_at_rest
from oracle.routines.base import Beyond, Call, Contract
from oracle.routines.family import BUILT_IN, families, registered
from oracle.routines.fault import Family, Fault, Stage, agree
from oracle.routines.mutants import run


@dataclass(frozen=True)
class Behaviour:
    """One way to misbehave, and the watch that notices."""

    name: str
    seen: str
    watch: str


BEHAVIOURS: tuple[Behaviour, ...] = (
    Behaviour("out-of-bounds write", "flashinfer 3978", "guard zones"),
    Behaviour("input overwritten", "flashinfer 3978", "inputs unchanged"),
    Behaviour("output left partly unwritten", "Primus-Turbo 397", "every element written"),
    Behaviour("padding read into the result", "flashinfer PR 3650, 2861", "padding poisoned"),
    Behaviour("uninitialised memory read into the result", "vllm 45741", "two poisons"),
    Behaviour("different bits on rerun (race)", "TransformerEngine 2986, DeepGEMM 392", "rerun determinism"),
    Behaviour("previous call's data reused", "aprender 2765", "stale state"),
    Behaviour("memory between calls shared by threads", "FlashInfer 0.6.18.post1 on an H200", "threads"),
    Behaviour("a captured call replays what it was captured with", "SageAttention 392, DeepGEMM PR 451", "CUDA graph"),
    Behaviour("work on another stream than the caller's, not joined", "fvdb-core PR 587", "stream order"),
    Behaviour("kernel chosen by M gives different bits for the same row", "vllm PR 37718", "batch invariance"),
    Behaviour("strides of an operand ignored", "pytorch 195751", "non-contiguous inputs"),
    Behaviour("result of another dtype, shape or device", "FlashInfer 0.6.18 on an H200", "result as declared"),
    Behaviour("crash, abort or device error", "DeepGEMM 34", "worker process"),
    Behaviour("hang", "DeepGEMM 392", "time limit"),
)


__all__ = [
    "BEHAVIOURS",
    "Behaviour",
    "Beyond",
    "Call",
    "Family",
    "Fault",
    "Stage",
    "agree",
    "catalogue",
    "faults_of",
    "get",
    "run",
]


@lru_cache(maxsize=1)
def catalogue() -> Mapping[str, Fault]:
    """Every fault by name, in the order of the families.

    A fault of another distribution whose name an earlier family has is listed as ``name (its family)``: a name that
    this project takes later breaks nobody.

    Raises OptionError: a family, or this project, has a name twice.
    """
    listed_faults: dict[str, Fault] = {}
    with collector_at_rest():
        for family in families():
            own: set[str] = set()
            for fault in (fault for table in family.faults for fault in table):
                listed = fault
                if fault.name in listed_faults and fault.name not in own and family.name not in BUILT_IN:
                    listed = replace(fault, name=f"{fault.name} ({family.name})")
                if fault.name in own or listed.name in listed_faults:
                    label = f"fault {fault.name!r} of family {family.name!r}"
                    raise OptionError(f"{label} stands twice in the catalogue; rename it")
                own.add(fault.name)
                listed_faults[listed.name] = listed
    return MappingProxyType(listed_faults)


def faults_of(contract: str) -> tuple[Fault, ...]:
    """The faults that apply to a contract, by its name; none of a name that nobody has."""
    known = registered().get(contract)
    return () if known is None else _applying(known)


@cache
def _applying(contract: Contract) -> tuple[Fault, ...]:
    """Those whose trait a contract has: what a contract is does not change."""
    held = {trait for trait in {fault.on for fault in catalogue().values()} if trait.holds(contract)}
    return tuple(fault for fault in catalogue().values() if fault.on in held)


def get(name: str) -> Fault:
    """The fault of this name; OptionError lists those that share a word with it."""
    if name not in catalogue():
        words = set(name.lower().split())
        shared = {known: len(words & set(known.lower().split())) for known in catalogue()}
        near = sorted((known for known in shared if shared[known]), key=lambda known: -shared[known])
        see = "fp8-oracle list faults"
        shown = f"did you mean one of: {'; '.join(near[:8])}" if near else among(name, catalogue(), see=see)
        raise OptionError(f"no fault {name!r}; {shown}")
    return catalogue()[name]
