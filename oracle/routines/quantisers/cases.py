"""Cases of quantisers and of the element-wise casts next to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from oracle.numbers.scaling import COLUMN_128
from oracle.routines import data
from oracle.routines.case import MATRICES, Case, Grammar, no_options, seeds, with_corners

# M, K of a quantiser's input: one group, square scales, a ragged block of rows, long rows.
QUANT_SHAPES = ((1, 128), (3, 384), (31, 256), (129, 640), (6, 2688))
QUANT_FAMILY_SHAPE = (130, 384)


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
    """``columns=plain`` and ``columns=tma``: how column-major scales are stored."""
    group, columns = case.option("group"), case.option("columns")
    size = case.scaling().block.columns if group is None else int(group)
    stored = {"column_major_scales": True, "tma_aligned_scales": columns == "tma"}
    return {"group_size": size} | _ue8m0(case) | ({} if columns is None else stored)


def _ue8m0(case: Case) -> dict[str, object]:
    return {"use_ue8m0": case.option("ue8m0") == "1"}


def _ids(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    """Shapes on ordinary data; every family with every single option; the other dtypes on what rounds hardest."""
    options = [f"{key}={value}/" for key, values in grammar.options.items() for value in values]
    whole = (COLUMN_128.rows or 1) if str(COLUMN_128) in grammar.schemes else 1  # it takes whole blocks of rows only
    m, k = -(-QUANT_FAMILY_SHAPE[0] // whole) * whole, QUANT_FAMILY_SHAPE[1]
    for scheme in grammar.schemes:
        for height, cols in QUANT_SHAPES:
            rows = -(-height // whole) * whole
            yield f"{contract}/{grammar.dtypes[0]}/{scheme}/m={rows},k={cols}/family=randn/seed=1"
        for option in ["", *options]:
            few = grammar.families if profile == "full" or option in ("", "ue8m0=1/") else grammar.families[:2]
            for family in few:
                for seed in seeds(profile):
                    yield f"{contract}/{grammar.dtypes[0]}/{scheme}/m={m},k={k}/{option}family={family}/seed={seed}"
    for dtypes in grammar.dtypes[1:]:
        for family in ("randn", "ties", "amax"):
            yield f"{contract}/{dtypes}/{grammar.schemes[0]}/m={max(31, whole)},k=256/family={family}/seed=1"


_FAMILIES = tuple(data.ACTIVATION_FAMILIES)
_MK = ("m", "k")
_WIDE = ("bf16-e4m3", "f16-e4m3", "f32-e4m3")
_POWERS = {"ue8m0": ("1",)}

_PLAIN: Mapping[str, Grammar] = {
    "scaled_fp8_quant": Grammar(
        _MK, _WIDE, ("tensor", "token"), _FAMILIES, _activation,
        lambda case: {"use_per_token_if_dynamic": case.scheme == "token"}, {"static": ("1",)}, listed=_ids,
    ),
    "per_token_group_quant_fp8": Grammar(
        _MK, _WIDE, ("1x128",), _FAMILIES, _activation, _group,
        {"group": ("32", "64"), "columns": ("plain", "tma"), **_POWERS}, listed=_ids, kept=("k",),
    ),
    "per_token_cast_to_fp8": Grammar(_MK, _WIDE, ("1x128",), _FAMILIES, _activation, _ue8m0, _POWERS, listed=_ids),
    "per_block_cast_to_fp8": Grammar(
        _MK, _WIDE, ("128x128",), _FAMILIES, _activation, _ue8m0, _POWERS, listed=_ids,
        extra=("bf16-e4m3/128x128/m=256,k=256/family=randn/seed=1",),
    ),
    "per_channel_cast_to_fp8": Grammar(_MK, _WIDE, ("128x1",), _FAMILIES, _activation, _ue8m0, _POWERS, listed=_ids),
    **{
        f"flashinfer_quantize_{s}": Grammar(_MK, _WIDE[:1], (s,), _FAMILIES, _activation, no_options, listed=_ids)
        for s in ("1x128", "128x128")
    },
    "per_tensor_dequantize": Grammar(
        _MK, ("e4m3-f16",), ("tensor",), tuple(data.OPERAND_FAMILIES), _codes, no_options, listed=_ids,
        edge_families=("overflow", "underflow16"),
    ),
    "ceil_to_ue8m0": Grammar(_MK, ("f32",), ("-",), _FAMILIES, _activation, no_options, shapes=MATRICES),
}  # fmt: skip  # a table, one row a line
# Square matrices of scales, two blocks of rows.
GRAMMARS = with_corners(
    _PLAIN,
    {
        **dict.fromkeys(
            ("per_token_group_quant_fp8", "per_token_cast_to_fp8", "flashinfer_quantize_1x128"), ("m=2,k=256",)
        ),
        "per_block_cast_to_fp8": ("m=144,k=144",),
        "flashinfer_quantize_128x128": ("m=256,k=256",),
        "per_channel_cast_to_fp8": ("m=256,k=2",),
    },
)
