"""The contracts of the suite; importing this package registers them all."""

from oracle.contracts import (
    dynamic,
    experts,
    flashinfer,
    gemm,
    grouped,
    layout,
    linear,
    logits,
    moe,
    platforms,
    quantize,
    scale_casts,
    shards,
)
from oracle.contracts.base import Contract, OptionSpec, TensorSpec, get, registered

__all__ = [
    "Contract",
    "OptionSpec",
    "TensorSpec",
    "dynamic",
    "experts",
    "flashinfer",
    "gemm",
    "get",
    "grouped",
    "layout",
    "linear",
    "logits",
    "moe",
    "platforms",
    "quantize",
    "registered",
    "scale_casts",
    "shards",
]
