"""The production dispatch layer for FP8 GEMMs, grouped GEMMs, MoE, attention, its logits and quantisation.

An inference engine imports the verbs of this package. Each verb checks its arguments, looks the decision up in a
plan (:mod:`kernels.plan`) and makes one call. Importing the package imports torch and nothing else: GPU libraries
are loaded when a plan first chooses them. What a file declares as public (:mod:`kernels.verbs`) is public here.
"""

from __future__ import annotations

from . import operators
from .attention import *
from .batched import *
from .blockscaled import *
from .calc import *
from .fused import *
from .grouped import *
from .kv_cache import *
from .layout import *
from .linear import *
from .logits import *
from .moe import *
from .moe_layer import *
from .moe_pipelines import *
from .mx import *
from .mx_columns import *
from .mx_experts import *
from .mx_forms import *
from .mx_fused import *
from .mx_logits import *
from .mx_moe import *
from .mx_products import *
from .platform import *
from .quantize import *
from .routers import *
from .routes import *
from .tiles import *
from .verbs import PUBLIC
from .warming import *

NAMESPACE = operators.NAMESPACE
"""Namespace of the custom operators: ``torch.ops.fp8_kernels``."""

__all__ = sorted(["NAMESPACE", *PUBLIC])
