"""Faults that no single output shows: what a kernel does to the world around its result.

They have no mutation of numbers; each names the watch of :mod:`oracle.harness` that sees it. They belong to the
catalogue as documentation and as the list that the harness is tested against.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Behaviour:
    """One way to misbehave, and the watch that notices."""

    name: str
    met_in: str
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
    Behaviour("kernel chosen by M gives different bits for the same row", "vllm PR 37718", "batch invariance"),
    Behaviour("strides of an operand ignored", "pytorch 195751", "non-contiguous inputs"),
    Behaviour("result of another dtype, shape or device", "FlashInfer 0.6.18 on an H200", "result as declared"),
    Behaviour("crash, abort or device error", "DeepGEMM 34", "worker process"),
    Behaviour("hang", "DeepGEMM 392", "time limit"),
)
