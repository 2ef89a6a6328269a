"""The contracts of the suite; importing this package registers them all."""

from oracle.routines.base import Contract, OptionSpec, TensorSpec, get, registered
from oracle.routines.decisions import contract as platforms
from oracle.routines.decisions import contract as records
from oracle.routines.layouts import contract as layout
from oracle.routines.layouts import experts, shards
from oracle.routines.logits import contract as logits
from oracle.routines.moe import activation, moe_tensor
from oracle.routines.moe import contract as moe
from oracle.routines.products import contract as gemm
from oracle.routines.products import dynamic, flashinfer, grouped, linear
from oracle.routines.quantisers import contract as quantize
from oracle.routines.quantisers import scale_casts

__all__ = [
    "Contract",
    "OptionSpec",
    "TensorSpec",
    "activation",
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
    "moe_tensor",
    "platforms",
    "quantize",
    "records",
    "registered",
    "scale_casts",
    "shards",
]
