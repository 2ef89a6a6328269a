"""Quantisers that libraries keep as references in torch: TransformerEngine's of NVFP4, Model-Optimizer's tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oracle.bindings.binding import UnboundError, bind

TE = "transformer_engine.pytorch.custom_recipes.reference_nvfp4:NVFP4QuantizerRef._quantize_blockwise_reference"
TE_PARAMETERS = (
    "(x, global_amax, tile_len_x, tile_len_y, *, pow_2_scales, row_scaled_nvfp4=False, nvfp4_use_4over6=False, "
    "nvfp4_e4m3_max=448, nvfp4_4over6_err_mode='MAE', nvfp4_4over6_err_use_fast_math=False, eps)"
)
TENSORS = "modelopt.torch.quantization.qtensor"
NO_NAN = {"data of nan": "E2M1 has no NaN, and its reference documents no rule for one"}
NO_RULE = {"data of nan": "its pages document no rule for NaN and infinity"}
FINITE = "global_scale.numel() == 1 and torch.isfinite(x).all()"


def _amax(scale: Tensor, largest: int = 448) -> Tensor:
    """The float32 amax whose ``6 largest/amax`` is this scale. Raises UnboundError: no amax gives it."""
    top = 6.0 * largest
    near = (top / scale.double()).float()
    tried = torch.cat([near, torch.nextafter(near, near * 2), torch.nextafter(near, near * 0)])
    given = tried[torch.full_like(tried, top) / tried == scale]
    if not len(given):
        raise UnboundError(f"no amax has {top:g}/amax as the scale {float(scale):g}")
    return given[:1]


def _scale_of(largest_value: Tensor, largest: int = 448) -> Tensor:
    """:func:`_amax` back."""
    return torch.full_like(largest_value, 6.0 * largest) / largest_value


def _codes(tensor: Any) -> Tensor:
    """The codes of one of Model-Optimizer's tensors."""
    return tensor._quantized_data  # type: ignore[no-any-return]


OF_TE = {"functions": {"amax": (_amax, _scale_of), "word": (str.upper, str.lower)}, "exempt": NO_NAN, "where": FINITE}
OF_TENSORS = {"functions": {"tensor": (_codes, _codes)}, "release": "nvidia-modelopt 0.47.0"}

BINDINGS = (
    *(
        bind(
            TE,
            name,
            f"(x, amax(global_scale), 16, {rows}, pow_2_scales=False, eps=0.0) -> q, scale.view(torch.float8_e4m3fn)",
            TE_PARAMETERS,
            takes={"layout": "linear", "scale": torch.uint8} | more,
            numerics=numerics,
            release="transformer-engine 2.20.2",
            **OF_TE,
        )
        for name, rows, more, numerics in (
            ("nvfp4_quantize", 1, {"is_global_scale_inversed": False}, "te_nvfp4_reference"),
            ("nvfp4_quantize_2d", 16, {}, None),
        )
    ),
    bind(
        TE,
        "nvfp4_quantize_4over6",
        "(x, amax(global_scale, e4m3_max), 16, 1, pow_2_scales=False, eps=0.0, nvfp4_use_4over6=True, "
        "nvfp4_e4m3_max=e4m3_max, nvfp4_4over6_err_mode=word(error)) -> q, scale.view(torch.float8_e4m3fn)",
        TE_PARAMETERS,
        takes={"layout": "linear", "scale": torch.uint8},
        release="transformer-engine 2.20.2",
        **OF_TE,
    ),
    bind(
        f"{TENSORS}:MXFP8QTensor.quantize",
        "mxfp8_quantize",
        "(x) -> tensor(q), scale",
        "(input, weights_scaling_factor=None)",
        takes={"layout": "linear", "element": "e4m3", "rounding": "rceil", "alignment": 32},
        where="torch.isfinite(x).all()",
        numerics="modelopt_mxfp8",
        exempt=NO_RULE,
        **OF_TENSORS,
    ),
    bind(
        f"{TENSORS}:NVFP4QTensor.quantize",
        "nvfp4_quantize",
        "(x, 16, weights_scaling_factor_2=global_scale.squeeze(0)) -> tensor(q), scale.view(torch.float8_e4m3fn), ...",
        "(input, block_size, weights_scaling_factor=None, weights_scaling_factor_2=None, keep_high_precision=False, "
        "try_tensorrt=False)",
        takes={"layout": "linear", "is_global_scale_inversed": True, "scale": torch.uint8},
        numerics="modelopt_0_47_nvfp4",
        exempt=NO_RULE,
        where=FINITE,
        **OF_TENSORS,
    ),
)
