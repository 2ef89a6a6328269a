"""Quantised layers as modules, and checkpoints to load them from.

    from . import Checkpoint, Fp8Linear

    model = Checkpoint("DeepSeek-V3")
    down = Fp8Linear.from_checkpoint(model, "model.layers.3.mlp.down_proj", parallel="row", rank=0, world=8)
    y = down(x)

Importing it imports safetensors; ``import kernels`` does not import it.
"""

from __future__ import annotations

from .checkpoint import Checkpoint
from .linear import Fp8Linear, Fp8Mlp, from_checkpoint, process_weights_after_loading, sum_ranks
from .moe import Fp8Experts, Fp8Moe
from .mx import MxLinear
from .mx_experts import SWIGLUOAI, Activation, MxExperts
from .shards import Shard

__all__ = [
    "SWIGLUOAI",
    "Activation",
    "Checkpoint",
    "Fp8Experts",
    "Fp8Linear",
    "Fp8Mlp",
    "Fp8Moe",
    "MxExperts",
    "MxLinear",
    "Shard",
    "from_checkpoint",
    "process_weights_after_loading",
    "sum_ranks",
]
