"""The production dispatch layer for FP8 GEMMs, grouped GEMMs, MoE, attention logits and quantisation.

An inference engine imports the verbs of this package. Each verb checks its arguments, looks the decision up in a
plan (:mod:`kernels.plan`) and makes one call. Importing the package imports torch and nothing else: GPU libraries
are loaded when a plan first chooses them. What a file declares as public (:mod:`kernels.verbs`) is public here.
"""

from __future__ import annotations

from kernels import operators
from kernels.batched import *
from kernels.blockscaled import *
from kernels.calc import *
from kernels.fused import *
from kernels.grouped import *
from kernels.kv_cache import *
from kernels.layout import *
from kernels.linear import *
from kernels.logits import *
from kernels.moe import *
from kernels.moe_layer import *
from kernels.moe_pipelines import *
from kernels.mx import *
from kernels.mx_columns import *
from kernels.mx_experts import *
from kernels.mx_forms import *
from kernels.mx_logits import *
from kernels.mx_products import *
from kernels.platform import *
from kernels.quantize import *
from kernels.routes import *
from kernels.tiles import *
from kernels.verbs import PUBLIC

NAMESPACE = operators.NAMESPACE
"""Namespace of the custom operators: ``torch.ops.fp8_kernels``."""

__all__ = sorted(["NAMESPACE", *PUBLIC])
