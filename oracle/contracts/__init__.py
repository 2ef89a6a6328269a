"""The contracts of the suite; importing this package registers them all."""

from oracle.contracts import (
    experts,
    flashinfer,
    gemm,
    grouped,
    layout,
    linear,
    logits,
    moe,
    quantize,
    scale_casts,
    shards,
)
from oracle.contracts.base import Contract, OptionSpec, TensorSpec, get, registered

__all__ = [
    "Contract",
    "OptionSpec",
    "TensorSpec",
    "experts",
    "flashinfer",
    "gemm",
    "get",
    "grouped",
    "layout",
    "linear",
    "logits",
    "moe",
    "quantize",
    "registered",
    "scale_casts",
    "shards",
]
