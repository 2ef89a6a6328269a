"""Cases of MX and NVFP4: amax where a shared scale steps, ties of E2M1, ends of the range, poisoned padding.

Source: derived in :mod:`oracle.routines.data`; the layouts of scales as :mod:`oracle.truth.layout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from oracle.numbers.formats import from_codes, of_dtype
from oracle.routines import data
from oracle.routines.case import Case, Grammar, no_options, seeds, with_corners
from oracle.routines.mx.contract import LAYOUTS, LINEAR, padding_of, stored

# M, K: one row, rows of one tile and a tail, columns of one tile of scales and a tail, long rows.
SHAPES = ((1, 160), (3, 32), (130, 160), (33, 1056))
FAMILY_SHAPE = (17, 192)
FAMILIES = ("randn", "fp4ties", "steps", "heavy", "special", "range", "nan")
TOP = 448.0 * 6.0
STALE = 0.25  # the amax that a calibrated global scale knew, of the one that comes
POISON = torch.tensor([0xFF, 0x7F, 0xFE, 0x7E, 0x80], dtype=torch.uint8, device="cpu")
"""NaN of E8M0, NaN of E4M3 (2^0 as E8M0), the largest finite of each, and -0 of E4M3 (2 as E8M0)."""


def _values(case: Case) -> dict[str, Tensor]:
    (dtype,) = case.operand_dtypes
    return {"x": data.activations(case.label("x"), case.family, case["m"], case["k"], dtype=dtype)}


def _two_levels(case: Case) -> dict[str, Tensor]:
    """``global=one``: every formula is exact under a power of two; ``stale``: the scale of a smaller amax, so that
    blocks saturate; ``rows``: one of each row; ``inf``: 2688/0 and zeros."""
    inputs = _values(case)
    x = inputs["x"].float()
    amax = x[torch.isfinite(x)].abs().amax().clamp(min=2.0**-100)
    if case.option("global") == "inf":
        infinite = torch.full((1,), torch.inf, dtype=torch.float32, device="cpu")
        return {"x": torch.zeros_like(inputs["x"]), "global_scale": infinite}
    if case.option("global") == "one":
        return {"x": inputs["x"], "global_scale": torch.ones(1, dtype=torch.float32, device="cpu")}
    if case.option("global") == "rows":  # one of each row, a row without magnitude under that of the tensor
        amax = torch.where(torch.isfinite(x), x.abs(), 0.0).amax(dim=1)
        amax = torch.where(amax > 2.0**-100, amax, amax.amax().clamp(min=2.0**-100))
    wide = amax.double() * (STALE if case.option("global") == "stale" else 1.0)
    g = wide / TOP if case.option("inversed") == "1" else TOP / wide
    return {"x": inputs["x"], "global_scale": g.float().reshape(-1)}


def _layout(case: Case) -> dict[str, object]:
    return {"layout": case.option("layout") or LAYOUTS[0]}


def _quantise(case: Case) -> dict[str, object]:
    return _layout(case) | {"rounding": case.option("rounding") or "rceil"}


def _mxfp8(case: Case) -> dict[str, object]:
    options = _quantise(case) | {"element": case.dtypes.partition("-")[2]}
    return options | ({"alignment": int(str(case.option("alignment")))} if case.option("alignment") else {})


def _nvfp4(case: Case) -> dict[str, object]:
    return _layout(case) | {"is_global_scale_inversed": case.option("inversed") == "1"}


def poisoned(scale: Tensor, layout: str) -> Tensor:
    """The bytes ``scale`` ``[M, C]``, uint8, in a layout, with NaN and large values (:data:`POISON`) in the padding.

    The result is uint8 ``[bytes]``; ``[M, C]`` in the linear layout, which has no padding.
    """
    memory, pads = stored(scale, layout), padding_of((scale.shape[0], scale.shape[1]), layout)
    if pads is not None:
        memory[pads] = POISON.repeat(memory.numel() // len(POISON) + 1)[: int(pads.sum())]
    return memory


def _codes(case: Case) -> dict[str, Tensor]:
    """Codes of any value; scale bytes of a family: ``randn`` ordinary ones, ``codes`` every byte of the format, of
    E4M3 without its sign, and ``signed`` with it."""
    (dtype,) = (torch.uint8,) if case.dtypes.startswith("e2m1") else case.operand_dtypes
    two_levels, m, k = case.contract.startswith("nvfp4"), case["m"], case["k"]
    width = k // 2 if dtype is torch.uint8 else k
    codes = torch.from_numpy(case.stream("q").integers(0, 256, (m, width))).to(torch.uint8)
    if dtype is not torch.uint8 and case.family == "randn":
        codes = codes & 0xBF  # E4M3 and E5M2 without NaN and infinity
    low, high = (
        ((0, 0x80) if two_levels else (0, 0x100))
        if case.family == "codes"
        else (0, 0x100)
        if case.family == "signed"
        else ((0x28, 0x58), (112, 142))[not two_levels]
    )
    shape = (m, k // (16 if two_levels else 32))
    scale = torch.from_numpy(case.stream("scale").integers(low, high, shape)).to(torch.uint8)
    if case.family == "codes" and not two_levels:
        scale.view(-1)[0], scale.view(-1)[-1] = 0, 0xFF  # 2^-127 and NaN
    q = codes if dtype is torch.uint8 else from_codes(codes, of_dtype(dtype))
    inputs = {
        "q": q,
        "scale": poisoned(scale, case.option("layout") or (LINEAR if "_kv_" in case.contract else LAYOUTS[0])),
    }
    return inputs | ({"global_scale": data.scales(case.label("global_scale"), "randn", (1,))} if two_levels else {})


def _ids(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    """Shapes on ordinary data; every family with every single option; the other dtypes where rounding is hardest."""
    head = f"{contract}/{grammar.dtypes[0]}/{grammar.schemes[0]}"
    options = ["", *(f"{key}={value}/" for key, values in grammar.options.items() for value in values)]
    for m, k in SHAPES:
        for option in options[:3]:
            yield f"{head}/m={m},k={k}/{option}family=randn/seed=1"
    m, k = FAMILY_SHAPE
    for option in options:
        few = grammar.families if profile == "full" or not option.startswith("layout") else grammar.families[:2]
        few = few[:1] if option == "global=inf/" else few  # of zeros, whatever the family
        for family in few:
            for seed in seeds(profile):
                yield f"{head}/m={m},k={k}/{option}family={family}/seed={seed}"
    for dtypes in grammar.dtypes[1:]:
        for family in grammar.families[:3]:
            yield f"{contract}/{dtypes}/{grammar.schemes[0]}/m={m},k={k}/family={family}/seed=1"


_MK = ("m", "k")
_TILES: Mapping[str, tuple[str, ...]] = {"layout": ("8x4", LINEAR)}
_POWERS = {**_TILES, "rounding": ("floor", "ceil", "even")}
_WIDE = ("bf16", "f16", "f32")
_TWO_LEVELS = {**_TILES, "inversed": ("1",), "global": ("one", "stale", "inf", "rows")}

_PLAIN: Mapping[str, Grammar] = {
    "mxfp8_quantize": Grammar(
        _MK, ("bf16-e4m3", "f16-e4m3", "f32-e4m3", "bf16-e5m2"), ("1x32",), FAMILIES, _values, _mxfp8,
        {**_POWERS, "alignment": ("128",)}, listed=_ids,
    ),
    "mxfp4_quantize": Grammar(
        _MK, _WIDE, ("1x32",), FAMILIES, _values, _quantise, _POWERS, listed=_ids,
    ),
    "nvfp4_quantize": Grammar(
        _MK, _WIDE, ("1x16",), FAMILIES, _two_levels, _nvfp4, _TWO_LEVELS, listed=_ids,
    ),
    "scaled_fp4_quant": Grammar(
        _MK, _WIDE[:2], ("1x16",), FAMILIES, _two_levels, no_options, {"global": ("one", "stale", "inf")}, listed=_ids,
    ),
    "mxfp8_dequantize": Grammar(
        _MK, ("e4m3-f32", "e5m2-f32"), ("1x32",), ("randn", "codes"), _codes, _layout, _TILES, listed=_ids,
    ),
    "mxfp4_dequantize": Grammar(_MK, ("e2m1",), ("1x32",), ("randn", "codes"), _codes, _layout, _TILES, listed=_ids),
    "nvfp4_dequantize": Grammar(
        _MK, ("e2m1",), ("1x16",), ("randn", "codes", "signed"), _codes, _layout, _TILES, listed=_ids,
    ),
    "nvfp4_kv_dequantize": Grammar(
        _MK, ("e2m1-bf16", "e2m1-f16"), ("1x16",), ("randn", "codes", "signed"), _codes,
        lambda case: {"out_dtype": case.out_dtype}, listed=_ids,
    ),
}  # fmt: skip  # a table, one row a line
# Two tiles of 128 rows of scales, two of four blocks.
CORNER = ("m=160,k=160",)
GRAMMARS = with_corners(_PLAIN, {name: CORNER for name, grammar in _PLAIN.items() if grammar.extents == _MK})
