"""The environment switches as one typed record, under vLLM's names.

A copy of its environment reproduces a deployment. Nothing else in this package reads ``os.environ``, and nothing in it
writes there. The page of the documentation that lists the variables is made from the fields below.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from kernels import context
from kernels.errors import ConfigError

MOE_BACKENDS = ("throughput", "latency", "masked_gemm")
"""Values of ``VLLM_FLASHINFER_MOE_BACKEND``: CUTLASS, TensorRT-LLM, CUTEDSL."""
T = TypeVar("T")


def _integer(name: str, text: str) -> bool:
    try:
        return bool(int(text))
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not an integer; set 0 or 1") from None


def _moe(name: str, text: str) -> str:
    if text not in MOE_BACKENDS:
        raise ConfigError(f"{name}={text!r}; choose one of {', '.join(MOE_BACKENDS)}")
    return text


def _text(name: str, text: str) -> str:
    return text


def _nonzero(name: str, text: str) -> bool:
    return text != "0"


def _variable(default: T, read: Callable[[str, str], T], meaning: str, *names: str) -> T:
    """A field with its variables (any of several), how a text that is not empty is read, and what it means."""
    made: T = field(default=default, metadata={"names": names, "read": read, "meaning": meaning})
    return made


@dataclass(frozen=True)
class Config:
    """One field for each switch."""

    use_deep_gemm: bool = _variable(True, _integer, "DeepGEMM may be chosen", "VLLM_USE_DEEP_GEMM")
    use_deep_gemm_e8m0: bool = _variable(
        True, _integer, "DeepGEMM takes UE8M0 scales on sm100", "VLLM_USE_DEEP_GEMM_E8M0"
    )
    use_deep_gemm_e8m0_hopper: bool = _variable(
        False, _integer, "DeepGEMM takes UE8M0 scales on sm90", "VLLM_USE_DEEP_GEMM_E8M0_HOPPER"
    )
    deep_gemm_tma_aligned_scales: bool = _variable(
        True, _integer, "an engine's quantisers write TMA-aligned scales", "VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES"
    )
    use_flashinfer_moe_fp8: bool = _variable(
        False, _integer, "FlashInfer's experts replace DeepGEMM", "VLLM_USE_FLASHINFER_MOE_FP8"
    )
    flashinfer_moe_backend: str | None = _variable(
        None, _moe, f"FlashInfer's kernel family for experts: {', '.join(MOE_BACKENDS)}", "VLLM_FLASHINFER_MOE_BACKEND"
    )
    blockscale_gemm_flashinfer: bool = _variable(
        True, _integer, "FlashInfer's block-scaled product may be chosen", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"
    )
    batch_invariant: bool = _variable(False, _integer, "one kernel for every number of rows", "VLLM_BATCH_INVARIANT")
    vllm_ops_library: str | None = _variable(
        None,
        _text,
        "paths of vLLM's compiled operators, separated as in `PATH`, where the package cannot be found by name",
        "FP8_KERNELS_VLLM_OPS",
    )
    flashinfer_observed: bool = _variable(
        False,
        _nonzero,
        "FlashInfer logs or traces its calls: they are made through its public function",
        "FLASHINFER_LOGLEVEL",
        "FLASHINFER_TRACE_DUMP",
    )
    backend: str = _variable(
        "",
        _text,
        "the backend to take or none: a name (`torch`) for every operation that lists it, or "
        "`operation=name`, several separated by commas",
        "FP8_KERNELS_BACKEND",
    )
    log_decisions: bool = _variable(
        False, _integer, "log each new decision once, with the reason of every refused backend", "FP8_KERNELS_LOG"
    )
    check_values: bool = _variable(
        False,
        _integer,
        "calls check values on a GPU too, without waiting: a wrong one fails the next synchronisation",
        "FP8_KERNELS_CHECK",
    )
    fast_paths: bool = _variable(
        True, _integer, "known releases of libraries are started past their public functions", "FP8_KERNELS_FAST_PATHS"
    )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Config:
        """Read every switch; an unset or empty one takes its default.

        Raises
        ------
        ConfigError
            A boolean switch holds something other than an integer, or the MoE backend is unknown.
        """
        env = os.environ if environment is None else environment
        given: dict[str, Any] = {}
        for f in fields(cls):
            texts = [(name, env[name]) for name in f.metadata["names"] if env.get(name)]
            if texts:
                read = [f.metadata["read"](*text) for text in texts]
                given[f.name] = next(filter(None, read), read[0])
        return cls(**given)


@context.constant
def current_config() -> Config:
    """The switches of this process, read at first use, or those of the block around the caller.

    A compiled graph keeps those of the moment when it was traced.
    """
    once = context.current().config
    return once.value or once.get(Config.from_environment)


@contextmanager
def use_config(config: Config | None) -> Iterator[None]:
    """Replace the current record within the block (None: read the environment again)."""
    with context.use(config=context.Once(config)):
        yield


def environment_table() -> str:
    """Every variable as a table in Markdown."""
    lines = ["| variable | default | meaning |", "|:--|:--|---|"]
    for f in fields(Config):
        default = f"`{int(f.default)}`" if isinstance(f.default, bool) else "unset"
        names = ", ".join(f"`{name}`" for name in f.metadata["names"])
        lines.append(f"| {names} | {default} | {f.metadata['meaning']} |")
    return "\n".join(lines) + "\n"
