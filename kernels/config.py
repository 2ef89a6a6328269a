"""The environment switches as one typed record, under vLLM's names.

A copy of its environment reproduces a deployment. Nothing else in this package reads ``os.environ``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath

from kernels.errors import ConfigError

MOE_BACKENDS = ("throughput", "latency", "masked_gemm")
"""Values of ``VLLM_FLASHINFER_MOE_BACKEND``: CUTLASS, TensorRT-LLM, CUTEDSL."""


@dataclass(frozen=True)
class Config:
    """One field for each switch; the comment names the variable.

    ``vllm_ops_library`` is this layer's own (``FP8_KERNELS_VLLM_OPS``): a path to vLLM's compiled operators for
    installations where the package cannot be found by name; several paths are separated as in ``PATH``.
    """

    use_deep_gemm: bool = True  # VLLM_USE_DEEP_GEMM
    use_deep_gemm_e8m0: bool = True  # VLLM_USE_DEEP_GEMM_E8M0
    use_deep_gemm_e8m0_hopper: bool = False  # VLLM_USE_DEEP_GEMM_E8M0_HOPPER
    deep_gemm_tma_aligned_scales: bool = True  # VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES
    use_flashinfer_moe_fp8: bool = False  # VLLM_USE_FLASHINFER_MOE_FP8
    flashinfer_moe_backend: str | None = None  # VLLM_FLASHINFER_MOE_BACKEND
    blockscale_gemm_flashinfer: bool = True  # VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER
    batch_invariant: bool = False  # VLLM_BATCH_INVARIANT
    cache_root: str = ""  # VLLM_CACHE_ROOT (else XDG_CACHE_HOME/vllm, else ~/.cache/vllm)
    jit_cache_dir: str | None = None  # DG_JIT_CACHE_DIR
    vllm_ops_library: str | None = None  # FP8_KERNELS_VLLM_OPS
    flashinfer_observed: bool = False  # FLASHINFER_LOGLEVEL or FLASHINFER_TRACE_DUMP is neither empty nor 0

    @property
    def deep_gemm_cache(self) -> str:
        """Folder of DeepGEMM's compiled kernels: ``DG_JIT_CACHE_DIR``, else ``deep_gemm`` under the cache root."""
        return self.jit_cache_dir or str(PurePath(self.cache_root) / "deep_gemm")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Config:
        """Read every switch; an unset or empty one takes its default.

        Raises
        ------
        ConfigError
            A boolean switch holds something other than an integer, or the MoE backend is unknown.
        """
        env = os.environ if environment is None else environment

        def switch(name: str, default: bool) -> bool:
            text = env.get(name, "")
            if not text:
                return default
            try:
                return bool(int(text))
            except ValueError:
                raise ConfigError(f"{name}={text!r} is not an integer; set 0 or 1") from None

        backend = env.get("VLLM_FLASHINFER_MOE_BACKEND") or None
        if backend is not None and backend not in MOE_BACKENDS:
            raise ConfigError(f"VLLM_FLASHINFER_MOE_BACKEND={backend!r}; choose one of {', '.join(MOE_BACKENDS)}")
        home_cache = env.get("XDG_CACHE_HOME") or str(PurePath(env.get("HOME", "~")) / ".cache")
        return cls(
            use_deep_gemm=switch("VLLM_USE_DEEP_GEMM", True),
            use_deep_gemm_e8m0=switch("VLLM_USE_DEEP_GEMM_E8M0", True),
            use_deep_gemm_e8m0_hopper=switch("VLLM_USE_DEEP_GEMM_E8M0_HOPPER", False),
            deep_gemm_tma_aligned_scales=switch("VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES", True),
            use_flashinfer_moe_fp8=switch("VLLM_USE_FLASHINFER_MOE_FP8", False),
            flashinfer_moe_backend=backend,
            blockscale_gemm_flashinfer=switch("VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", True),
            batch_invariant=switch("VLLM_BATCH_INVARIANT", False),
            cache_root=os.path.expanduser(env.get("VLLM_CACHE_ROOT") or str(PurePath(home_cache) / "vllm")),
            jit_cache_dir=env.get("DG_JIT_CACHE_DIR") or None,
            vllm_ops_library=env.get("FP8_KERNELS_VLLM_OPS") or None,
            flashinfer_observed=any(
                env.get(name, "0") not in ("", "0") for name in ("FLASHINFER_LOGLEVEL", "FLASHINFER_TRACE_DUMP")
            ),
        )

    def export_jit_cache(self) -> None:
        """Set ``DG_JIT_CACHE_DIR`` for DeepGEMM, before it is imported, unless it is set already."""
        os.environ.setdefault("DG_JIT_CACHE_DIR", self.deep_gemm_cache)


_current: Config | None = None


def current_config() -> Config:
    """The switches of this process, read at first use."""
    global _current
    if _current is None:
        _current = Config.from_environment()
    return _current


@contextmanager
def use_config(config: Config | None) -> Iterator[None]:
    """Replace the current record within the block (None: read the environment again)."""
    global _current
    before, _current = _current, config
    try:
        yield
    finally:
        _current = before
