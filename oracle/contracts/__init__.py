"""The contracts of the suite; importing this package registers them all."""

from oracle.contracts import gemm, grouped, logits, quantize, scale_casts
from oracle.contracts.base import Contract, OptionSpec, TensorSpec, get, registered

__all__ = [
    "Contract",
    "OptionSpec",
    "TensorSpec",
    "gemm",
    "get",
    "grouped",
    "logits",
    "quantize",
    "registered",
    "scale_casts",
]
