"""Cases of quantisers and of the element-wise casts next to them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from oracle.routines import data
from oracle.routines.case import BLOCK, Case, Grammar, no_options


def _activation(case: Case) -> dict[str, Tensor]:
    (dtype,) = case.operand_dtypes
    inputs = {"x": data.activations(case.label("x"), case.family, case["m"], case["k"], dtype=dtype)}
    if case.option("static") == "1":
        inputs["scale"] = data.scales(case.label("scale"), case.family, (1,))
    return inputs


def _codes(case: Case) -> dict[str, Tensor]:
    (dtype,) = case.operand_dtypes
    return {
        "q": data.operand(case.label("q"), case.family, case["m"], case["k"], dtype=dtype, side="a"),
        "inv_scale": data.scales(case.label("inv_scale"), case.family, (1,)),
    }


def _group(case: Case) -> dict[str, object]:
    return {"group_size": int(case.option("group") or BLOCK)} | _ue8m0(case) | _columns(case)


def _columns(case: Case) -> dict[str, object]:
    """``columns=plain`` and ``columns=tma``: how column-major scales are stored."""
    columns = case.option("columns")
    return {} if columns is None else {"column_major_scales": True, "tma_aligned_scales": columns == "tma"}


def _ue8m0(case: Case) -> dict[str, object]:
    return {"use_ue8m0": case.option("ue8m0") == "1"}


def _per_token(case: Case) -> dict[str, object]:
    return {"use_per_token_if_dynamic": case.scheme == "token"}


_FAMILIES = tuple(data.ACTIVATION_FAMILIES)
_MK = ("m", "k")
_WIDE = ("bf16-e4m3", "f16-e4m3", "f32-e4m3")
_POWERS = {"ue8m0": ("1",)}

GRAMMARS: Mapping[str, Grammar] = {
    "scaled_fp8_quant": Grammar(
        _MK, _WIDE, ("tensor", "token"), _FAMILIES, _activation, _per_token, {"static": ("1",)}
    ),
    "per_token_group_quant_fp8": Grammar(
        _MK,
        _WIDE,
        ("1x128",),
        _FAMILIES,
        _activation,
        _group,
        {"group": ("32", "64"), "columns": ("plain", "tma"), **_POWERS},
    ),
    "per_token_cast_to_fp8": Grammar(_MK, _WIDE, ("1x128",), _FAMILIES, _activation, _ue8m0, _POWERS),
    "per_block_cast_to_fp8": Grammar(_MK, _WIDE, ("128x128",), _FAMILIES, _activation, _ue8m0, _POWERS),
    "per_channel_cast_to_fp8": Grammar(_MK, _WIDE, ("128x1",), _FAMILIES, _activation, _ue8m0, _POWERS),
    "flashinfer_quantize_1x128": Grammar(_MK, ("bf16-e4m3",), ("1x128",), _FAMILIES, _activation, no_options),
    "flashinfer_quantize_128x128": Grammar(_MK, ("bf16-e4m3",), ("128x128",), _FAMILIES, _activation, no_options),
    "per_tensor_dequantize": Grammar(_MK, ("e4m3-f16",), ("tensor",), tuple(data.OPERAND_FAMILIES), _codes, no_options),
    "ceil_to_ue8m0": Grammar(_MK, ("f32",), ("-",), _FAMILIES, _activation, no_options),
}
