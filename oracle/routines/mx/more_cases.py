"""Cases of the further quantisers: other elements, training forms, rows and experts with scales of their own, casts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from oracle.numbers.formats import from_codes, of_dtype
from oracle.routines import data
from oracle.routines.case import Case, Grammar, seeds, with_corners
from oracle.routines.mx.cases import CORNER, TOP, poisoned
from oracle.routines.mx.columns import COMPACT
from oracle.routines.mx.contract import LAYOUTS, LINEAR
from oracle.routines.mx.experts import PLACEMENTS
from oracle.truth.hadamard import LARGEST

FAMILIES = ("randn", "fp4ties", "steps", "heavy", "special", "range", "nan")
FINITE = ("randn", "fp4ties", "steps", "heavy", "nan")
SHAPE = "m=17,k=192"
UNOWNED = (float("nan"), float("inf"), -3.0e38, 1.0e30)
"""What lies in the rows of no expert."""


def _x(case: Case, name: str = "x", rows: int | None = None) -> Tensor:
    (dtype,) = case.operand_dtypes
    return data.activations(case.label(name), case.family, rows or case["m"], case["k"], dtype=dtype)


def _amax(x: Tensor) -> float:
    wide = x.float()
    return float(wide[torch.isfinite(wide)].abs().amax().clamp(min=2.0**-100))


def _f32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _or_of_zeros(build: Callable[[Case], dict[str, Tensor]]) -> Callable[[Case], dict[str, Tensor]]:
    """``global=inf``: zeros under the global scale 2688/0 of a tensor of zeros."""

    def inputs(case: Case) -> dict[str, Tensor]:
        tensors = build(case)
        if case.option("global") != "inf":
            return tensors
        zeros = torch.zeros(tensors["x"].shape, dtype=tensors["x"].dtype, device="cpu")
        return tensors | {"x": zeros, "global_scale": _f32(torch.inf)}

    return inputs


def _batch(case: Case) -> dict[str, Tensor]:
    x = _x(case, rows=case["g"] * case["m"])
    one = case.option("global") == "one"
    return {"x": x.reshape(case["g"], case["m"], case["k"]), "global_scale": _f32(1.0 if one else TOP / _amax(x))}


@_or_of_zeros
def _gated(case: Case) -> dict[str, Tensor]:
    """Gates and values of any size: the global scale is that of values of a few units."""
    (dtype,) = case.operand_dtypes
    x = data.activations(case.label("x"), case.family, case["m"], 2 * case["k"], dtype=dtype).clamp(-64.0, 64.0)
    if case.contract != "silu_and_mul_nvfp4_quantize":
        return {"x": x}
    return {"x": x, "global_scale": _f32(1.0 if case.option("global") == "one" else TOP / 4096.0)}


@_or_of_zeros
def _normed(case: Case) -> dict[str, Tensor]:
    """Rows whose values spread over several binades, weights of both signs, and a residual of the size of ``x``."""
    (dtype,) = case.operand_dtypes
    inputs = {"x": _x(case), "weight": data.normal(case.label("weight"), (case["k"],), dtype=dtype)}
    if case.option("residual") == "1":
        inputs["residual"] = _x(case, "residual")
    if "nvfp4" in case.contract:
        inputs["global_scale"] = _f32(1.0 if case.option("global") == "one" else TOP / 16.0)
    return inputs


def _norm_options(case: Case) -> dict[str, object]:
    named = {"epsilon": float(case.option("epsilon") or 1e-6), "rounding": case.option("rounding") or "each"}
    return _layout(case) | named


def _layout(case: Case) -> dict[str, object]:
    return {"layout": case.option("layout") or LAYOUTS[0]}


def _values(case: Case) -> dict[str, Tensor]:
    return {"x": _x(case)}


@_or_of_zeros
def _encoded(case: Case) -> dict[str, Tensor]:
    """The global scale of the values, or 1: every formula is exact under a power of two."""
    x = _x(case)
    if case.contract == "nvfp4_quantize_rht":
        x = x.clamp(-LARGEST, LARGEST)
    top = 6.0 * float(case.option("e4m3_max") or 0) or TOP
    return {"x": x, "global_scale": _f32(1.0 if case.option("global") == "one" else top / _amax(x))}


@_or_of_zeros
def _per_token(case: Case) -> dict[str, Tensor]:
    """A row of zeros between others, where there are several."""
    x = _x(case)
    if len(x) > 2:
        x[1] = 0.0
    return {"x": x, "global_scale": _f32(1.0 / 2048 if case.option("global") == "one" else 1.0 / TOP)}


def _eight(case: Case) -> Tensor:
    (dtype,) = case.operand_dtypes
    return data.operand(case.label("x"), case.family, case["m"], case["k"], dtype=dtype, side="a")


@_or_of_zeros
def _of_fp8(case: Case) -> dict[str, Tensor]:
    amax = float(data.scales(case.label("global_scale"), "randn", (1,))) * 512.0
    return {"x": _eight(case), "global_scale": _f32(0.75 if case.option("global") == "one" else TOP / amax)}


def _six(case: Case) -> dict[str, object]:
    return _layout(case) | {"element": case.dtypes}


def _mxfp6(case: Case) -> dict[str, object]:
    return _layout(case) | {"element": case.option("element") or "e3m2", "rounding": case.option("rounding") or "rceil"}


def _one_a_byte(case: Case) -> dict[str, Tensor]:
    """Every code; scale bytes of ordinary values, or all bytes."""
    m, k, bits = case["m"], case["k"], 8 if case.contract.startswith("mxint8") else 6
    low, high = (112, 142) if case.family == "randn" else (0, 0x100)
    q, scale = (
        torch.from_numpy(case.stream(name).integers(first, last, shape)).to(torch.uint8)
        for name, first, last, shape in (("q", 0, 1 << bits, (m, k)), ("scale", low, high, (m, k // 32)))
    )
    if case.family == "codes":
        scale.view(-1)[0], scale.view(-1)[-1] = 0, 0xFF
    return {"q": q, "scale": poisoned(scale, case.option("layout") or LAYOUTS[0])}


def _fp4_cast(case: Case) -> dict[str, object]:
    packed = case.option("packed") == "1"
    options: dict[str, object] = {"use_ue8m0": packed or case.option("ue8m0") == "1"}
    options |= {"gran_k": int(case.option("gran") or 128)}
    return options | ({"use_packed_ue8m0": True} if packed else {})


def _packed(case: Case) -> dict[str, Tensor]:
    m, k, gran = case["m"], case["k"], int(case.option("gran") or 128)
    q = torch.from_numpy(case.stream("q").integers(0, 256, (m, k // 2))).to(torch.uint8)
    return {"q": q, "scale": data.scales(case.label("scale"), case.family, (m, -(-k // gran)))}


def _gran(case: Case) -> dict[str, object]:
    return {"gran_k": int(case.option("gran") or 128)}


def _nibbles(case: Case) -> dict[str, Tensor]:
    codes = torch.from_numpy(case.stream("q").integers(0, 256, (case["m"], case["k"] // 2))).to(torch.uint8)
    return {"q": codes.view(torch.int8)}


# --- columns and squares --------------------------------------------------------------------------------------------


def _columns(case: Case) -> dict[str, Tensor]:
    """The values of a family that has blocks along rows, down the columns."""
    dtype = case.operand_dtypes[0]
    return {"x": data.activations(case.label("x"), case.family, case["k"], case["m"], dtype=dtype).t().contiguous()}


def _weights_down(case: Case) -> dict[str, Tensor]:
    """The values of :func:`_columns`, of all weights below one another."""
    e, n, k = (case[name] for name in _GMK)
    x = data.activations(case.label("x"), case.family, k, e * n, dtype=case.operand_dtypes[0]).t().contiguous()
    return {"x": x.reshape(e, n, k)}


def _both_ways(case: Case) -> dict[str, Tensor]:
    """Values whose squares of 32x32 differ in amax: of 1 to 1/8."""
    x = data.activations(case.label("x"), case.family, case["m"], case["k"], dtype=case.operand_dtypes[0])
    row, column = (torch.arange(extent, device="cpu") // 32 for extent in x.shape)
    return {"x": x * torch.exp2(-(3 * row[:, None] + column[None, :]) % -4).to(x.dtype)}


def _of_columns(case: Case) -> dict[str, object]:
    element = case.dtypes.partition("-")[2]
    return _layout(case) | {"element": element, "rounding": case.option("rounding") or "rceil"}


def _square(case: Case) -> dict[str, object]:
    options = _layout(case) | {"element": case.dtypes.partition("-")[2]}
    return options | {"direction": case.option("direction") or "rowwise"}


def _tall(case: Case) -> dict[str, Tensor]:
    """Codes without NaN of E4M3 and E5M2 (``randn``) or any; scale bytes of ordinary values, or all of them."""
    m, k = case["m"], case["k"]
    codes = torch.from_numpy(case.stream("q").integers(0, 256, (m, k))).to(torch.uint8)
    low, high = (112, 142) if case.family == "randn" else (0, 0x100)
    scale = torch.from_numpy(case.stream("scale").integers(low, high, (k, m // 32))).to(torch.uint8)
    if case.family == "randn":
        codes = codes & 0xBF
    else:
        scale.view(-1)[0], scale.view(-1)[-1] = 0, 0xFF
    layout = case.option("layout") or LAYOUTS[0]
    memory = scale.t().contiguous() if layout == COMPACT else poisoned(scale, layout)
    return {"q": from_codes(codes, of_dtype(case.operand_dtypes[0])), "scale": memory}


def _seeded(case: Case) -> dict[str, object]:
    return _layout(case) | {"seed": case.seed * 1_000_003}


def _error(case: Case) -> dict[str, object]:
    return _layout(case) | {"error": case.option("error") or "mae", "e4m3_max": int(case.option("e4m3_max") or 448)}


def _signed(case: Case) -> dict[str, object]:
    options: dict[str, object] = {} if case.option("signs") is None else {"sign_mask": 0}
    return options if case.contract == "hadamard_transform" else _layout(case) | options


def _summable(case: Case) -> dict[str, Tensor]:
    return {"x": _x(case).clamp(-LARGEST, LARGEST)}


# --- experts --------------------------------------------------------------------------------------------------------


def _spoiled(x: Tensor, owned: Tensor) -> Tensor:
    """Rows of no expert hold what no kernel may read."""
    poison = torch.tensor(UNOWNED, dtype=x.dtype, device="cpu").repeat(-(-x.shape[1] // len(UNOWNED)))[: x.shape[1]]
    return torch.where(owned[:, None], x, poison)


def _masked(case: Case) -> dict[str, Tensor]:
    """The first expert has all of its rows, the second none, the others some."""
    g, m, k = case["g"], case["m"], case["k"]
    counts = case.stream("mask").integers(1, m + 1, (g,))
    counts[0] = m
    if g > 1:
        counts[1] = 0
    mask = torch.from_numpy(counts).to(torch.int32)
    owned = (torch.arange(m, device="cpu")[None, :] < mask[:, None]).flatten()
    x = _spoiled(_x(case, rows=g * m), owned).reshape(g, m, k)
    return {"x": x, "mask": mask} | _globals(case, [x[i, :count] for i, count in enumerate(mask.tolist())])


def _masked_gates(case: Case) -> dict[str, Tensor]:
    """As :func:`_masked`, with gates beside the values and global scales of a few units."""
    inputs, wide = _masked(case), case["k"]
    x = _x(case, "up", case["g"] * case["m"]).reshape(case["g"], case["m"], wide).clamp(-64.0, 64.0)
    owned = torch.arange(case["m"], device="cpu")[None, :, None] < inputs["mask"][:, None, None]
    gates = torch.where(owned, inputs["x"].clamp(-64.0, 64.0), inputs["x"])
    level = [TOP / (1024.0 + 512.0 * g) for g in range(case["g"])]
    return {"x": torch.cat([gates, x], dim=2), "mask": inputs["mask"], "global_scale": _f32(*level)}


def _contiguous(case: Case) -> dict[str, Tensor]:
    """Experts of any number of rows, the second none; rows behind the last one's belong to nobody."""
    g, m = case["g"], case["m"]
    cuts = sorted(int(cut) for cut in case.stream("offsets").integers(1, max(m, 2), (g,)))
    offsets = [0, *cuts]
    if g > 1:
        offsets[2] = offsets[1]
    owned = torch.arange(m, device="cpu") < offsets[-1]
    x = _spoiled(_x(case), owned)
    rows = [x[first:last] for first, last in zip(offsets, offsets[1:], strict=False)]
    inputs = {"x": x, "expert_offsets": torch.tensor(offsets, dtype=torch.int32, device="cpu")}
    return inputs | _globals(case, rows)


def _contiguous_gates(case: Case) -> dict[str, Tensor]:
    """As :func:`_contiguous`, with gates beside the values and global scales of a few units."""
    inputs = _contiguous(case)
    offsets, up = inputs["expert_offsets"], _x(case, "up").clamp(-64.0, 64.0)
    owned = torch.arange(case["m"], device="cpu")[:, None] < offsets[-1]
    gates = torch.where(owned, inputs["x"].clamp(-64.0, 64.0), inputs["x"])
    scales = {"global_scale": _f32(*(TOP / (1024.0 + 512.0 * g) for g in range(case["g"])))}
    return inputs | {"x": torch.cat([gates, up], dim=1)} | (scales if "global_scale" in inputs else {})


def _globals(case: Case, rows: list[Tensor]) -> dict[str, Tensor]:
    if "fp4_" not in case.contract or "mxfp4" in case.contract:
        return {}
    return {"global_scale": _f32(*(TOP / _amax(part) if len(part) else 1.0 + i for i, part in enumerate(rows)))}


def _placement(case: Case) -> dict[str, object]:
    return {"placement": case.option("placement") or PLACEMENTS[0]}


# --- casts ----------------------------------------------------------------------------------------------------------


def _block_scaled(case: Case) -> dict[str, Tensor]:
    m, k = case["m"], case["k"]
    shape = (m if case.scheme == "1x128" else -(-m // 128), -(-k // 128))
    if case.contract == "block_scales_to_mxfp8":
        return {"x": _eight(case), "scale": data.powers_of_two(case.label("scale"), shape)}
    return {"x": _eight(case), "block_scale": data.scales(case.label("scale"), case.family, shape)}


def _mx_scaled(case: Case) -> dict[str, Tensor]:
    """``scale=large``: the largest bytes that keep 448 times the scale finite; ``nan``: one byte is NaN."""
    low, high = (240, 246) if case.option("scale") == "large" else (112, 142)
    scale = torch.from_numpy(case.stream("scale").integers(low, high, (case["m"], case["k"] // 32))).to(torch.uint8)
    if case.option("scale") == "nan":
        scale.view(-1)[:1] = 0xFF  # a shape of less than a block has no scale
    return {"x": _eight(case), "mx_scale": poisoned(scale, case.option("layout") or LAYOUTS[0])}


def _between(case: Case) -> dict[str, object]:
    return _layout(case) | {"dtype": case.option("dtype") or "bfloat16"}


# --- the table ------------------------------------------------------------------------------------------------------


def _ids(shapes: tuple[str, ...], few: int = 2) -> Callable[[str, Grammar, str], Iterable[str]]:
    """Every family on the last shape, the first families on the others and with every option; other dtypes once."""

    def listed(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
        options = ["", *(f"{key}={value}/" for key, values in grammar.options.items() for value in values)]
        for scheme in grammar.schemes:
            head = f"{contract}/{grammar.dtypes[0]}/{scheme}"
            for shape in shapes:
                yield f"{head}/{shape}/family={grammar.families[0]}/seed=1"
            for option in options:
                families = grammar.families if profile == "full" or not option else grammar.families[:few]
                for family in families[:1] if option == "global=inf/" else families:  # of zeros, whatever the family
                    for seed in seeds(profile):
                        if not (option == "" and family == grammar.families[0] and seed == 1):
                            yield f"{head}/{shapes[-1]}/{option}family={family}/seed={seed}"
        for dtypes in grammar.dtypes[1:]:
            for family in grammar.families[:few]:
                yield f"{contract}/{dtypes}/{grammar.schemes[0]}/{shapes[-1]}/family={family}/seed=1"

    return listed


_MK, _GMK = ("m", "k"), ("g", "m", "k")
_TILES: Mapping[str, tuple[str, ...]] = {"layout": ("8x4", LINEAR)}
_GLOBAL: Mapping[str, tuple[str, ...]] = {"global": ("one", "inf")}
_ONE = {**_TILES, **_GLOBAL}
_BOTH = ("bf16", "f32")
_PLAIN, _CODED = ("m=1,k=160", SHAPE), ("randn", "codes")
_EXPERTS = ("g=1,m=5,k=64", "g=4,m=37,k=192")
_EIGHT = ("bf16-e4m3", "f32-e4m3", "bf16-e5m2")
_STOOD = {"layout": ("8x4", LINEAR, COMPACT)}
_TALL = ("m=32,k=6", "m=160,k=130", "m=96,k=18")

_GRAMMARS: Mapping[str, Grammar] = {
    "mxfp6_quantize": Grammar(
        _MK, _BOTH, ("1x32",), FAMILIES, _values, _mxfp6,
        {**_TILES, "element": ("e2m3",), "rounding": ("floor", "ceil", "even")},
        listed=_ids(_PLAIN, 3),
    ),
    "mxfp6_dequantize": Grammar(_MK, ("e3m2", "e2m3"), ("1x32",), _CODED, _one_a_byte, _six, _TILES,
                                listed=_ids(_PLAIN)),
    "mxint8_quantize": Grammar(_MK, _BOTH, ("1x32",), FAMILIES, _values, _layout, _TILES, listed=_ids(_PLAIN)),
    "mxint8_dequantize": Grammar(_MK, ("int8",), ("1x32",), _CODED, _one_a_byte, _layout, _TILES, listed=_ids(_PLAIN)),
    "per_token_cast_to_fp4": Grammar(
        _MK, _BOTH, ("1x128",), FAMILIES, _values, _fp4_cast, {"ue8m0": ("1",), "gran": ("32",), "packed": ("1",)},
        listed=_ids(("m=1,k=130", "m=9,k=320"), 3),
        extra=("bf16/1x128/m=9,k=320/packed=1,gran=32/family=fp4ties/seed=1",),
    ),
    "mxfp8_quantize_columnwise": Grammar(
        _MK, _EIGHT, ("32x1",), FAMILIES, _columns, _of_columns, {**_STOOD, "rounding": ("floor", "ceil", "even")},
        listed=_ids(_TALL), domain="m % 32 == 0",
    ),
    "mxfp8_dequantize_columnwise": Grammar(
        _MK, ("e4m3", "e5m2"), ("32x1",), _CODED, _tall, _layout, _STOOD, listed=_ids(_TALL), domain="m % 32 == 0",
    ),
    "mxfp8_quantize_3d": Grammar(
        _GMK, _EIGHT, ("32x1",), FAMILIES, _weights_down, _of_columns,
        {"layout": (COMPACT,), "rounding": ("floor", "ceil", "even")},
        listed=_ids(("g=1,m=32,k=6", "g=3,m=160,k=130", "g=4,m=96,k=18")), domain="m % 32 == 0",
    ),
    "mxfp8_quantize_2d": Grammar(
        _MK, _EIGHT, ("32x32",), FAMILIES, _both_ways, _square, {**_STOOD, "direction": ("columnwise",)},
        listed=_ids(("m=32,k=64", "m=160,k=160", "m=64,k=96")), domain="m % 32 == 0",
    ),
    "transpose_packed_fp4": Grammar(
        _MK, ("e2m1",), ("1x128",), ("randn",), _nibbles, lambda case: {}, listed=_ids(("m=2,k=34", "m=10,k=64")),
        domain="m % 2 == 0", fixed=True,
    ),
    "cast_back_from_fp4": Grammar(
        _MK, ("e2m1",), ("1x128",), ("randn", "wide"), _packed, _gran, {"gran": ("32",)},
        listed=_ids(("m=1,k=130", "m=9,k=320")),
    ),
    "nvfp4_batched_quantize": Grammar(
        _GMK, _BOTH, ("1x16",), FAMILIES, _batch, _layout, {"layout": ("8x4",), "global": ("one",)},
        listed=_ids(("g=1,m=5,k=64", "g=3,m=130,k=96", "g=3,m=9,k=160")),
    ),
    "nvfp4_quantize_shuffled": Grammar(
        _MK, _BOTH, ("1x16",), FAMILIES, _encoded, lambda case: {}, _GLOBAL,
        listed=_ids(("m=160,k=96", "m=64,k=160")), domain="m % 32 == 0",
    ),
    "silu_and_mul_nvfp4_quantize": Grammar(
        _MK, _BOTH, ("1x16",), ("randn", "heavy", "steps"), _gated, _layout, _ONE,
        listed=_ids(("m=1,k=160", "m=130,k=96", "m=17,k=192")),
    ),
    **{
        f"silu_and_mul_{kind}_quantize": Grammar(
            _MK, _BOTH, ("1x32",), ("randn", "heavy", "steps"), _gated, _layout, _TILES,
            listed=_ids(("m=1,k=160", "m=130,k=96", "m=17,k=192")),
        )
        for kind in ("mxfp8", "mxfp4")
    },
    **{
        f"rms_norm_{kind}_quantize": Grammar(
            _MK, _BOTH, (scheme,), ("randn", "heavy", "steps", "range"), _normed, _norm_options,
            {**_TILES, "residual": ("1",), "rounding": ("product", "none"), "epsilon": ("1e-3",), **options},
            listed=_ids(("m=1,k=160", "m=130,k=96", "m=17,k=192")),
        )
        for kind, scheme, options in (
            ("mxfp8", "1x32", {}), ("mxfp4", "1x32", {}), ("nvfp4", "1x16", _GLOBAL))
    },
    "nvfp4_quantize_stochastic": Grammar(_MK, _BOTH, ("1x16",), FAMILIES, _encoded, _seeded, _ONE, listed=_ids(_PLAIN)),
    "nvfp4_quantize_2d": Grammar(
        _MK, _BOTH, ("16x16",), FAMILIES, _encoded, _layout, _ONE, listed=_ids(("m=16,k=160", "m=48,k=192")),
        domain="m % 16 == 0",
    ),
    "nvfp4_quantize_4over6": Grammar(
        _MK, _BOTH, ("1x16",), FAMILIES, _encoded, _error, {**_ONE, "error": ("mse",), "e4m3_max": ("256",)},
        listed=_ids(_PLAIN, 3),
    ),
    "hadamard_transform": Grammar(
        _MK, ("bf16",), ("1x16",), FINITE, _summable, _signed, {"signs": ("0",)}, listed=_ids(_PLAIN),
    ),
    "nvfp4_quantize_rht": Grammar(
        _MK, ("bf16",), ("1x16",), FINITE, _encoded, _signed, {**_ONE, "signs": ("0",)}, listed=_ids(_PLAIN),
    ),
    "nvfp4_quantize_per_token": Grammar(
        _MK, _BOTH, ("1x16",), FAMILIES, _per_token, _layout, _ONE, listed=_ids(_PLAIN),
    ),
    "nvfp4_quantize_of_fp8": Grammar(
        _MK, ("e4m3",), ("1x16",), ("randn", "codes", "nan", "outlier"), _of_fp8, _layout, _ONE, listed=_ids(_PLAIN),
    ),
    "mxfp4_quantize_of_fp8": Grammar(
        _MK, ("e4m3",), ("1x32",), ("randn", "codes", "nan", "outlier"), lambda case: {"x": _eight(case)}, _layout,
        _TILES,
        listed=_ids(_PLAIN),
    ),
    "scaled_fp4_grouped_quantize": Grammar(
        _GMK, _BOTH, ("1x16",), FAMILIES, _masked, lambda case: {}, listed=_ids(_EXPERTS), fixed=True,
    ),
    "silu_and_mul_scaled_nvfp4_experts_quantize": Grammar(
        _GMK, _BOTH, ("1x16",), ("randn", "heavy", "steps"), _masked_gates, lambda case: {}, listed=_ids(_EXPERTS),
        fixed=True,
    ),
    "mxfp8_grouped_quantize": Grammar(
        _GMK, _BOTH, ("1x32",), FAMILIES, _masked, lambda case: {}, listed=_ids(_EXPERTS), fixed=True,
    ),
    "scaled_fp4_experts_quant": Grammar(
        _GMK, _BOTH, ("1x16",), FAMILIES, _contiguous, _placement, {"placement": PLACEMENTS[1:]},
        listed=_ids(("g=1,m=5,k=64", "g=4,m=140,k=192")), fixed=True,
    ),
    "mxfp4_experts_quant": Grammar(
        _GMK, _BOTH, ("1x32",), ("randn", "fp4ties", "steps", "heavy", "range", "nan"), _contiguous, _placement,
        {"placement": PLACEMENTS[1:]}, listed=_ids(("g=1,m=5,k=64", "g=4,m=140,k=192")), fixed=True,
    ),
    **{
        name: Grammar(
            _GMK, _BOTH, (scheme,), ("randn", "heavy", "steps"), _contiguous_gates, _placement,
            {"placement": PLACEMENTS[1:]}, listed=_ids(("g=1,m=5,k=64", "g=4,m=140,k=192")), fixed=True,
        )
        for name, scheme in (
            ("silu_and_mul_scaled_fp4_experts_quant", "1x16"), ("silu_and_mul_mxfp4_experts_quant", "1x32"))
    },
    "mxfp8_experts_quant": Grammar(
        _GMK, _BOTH, ("1x32",), FAMILIES, _contiguous, _placement, {"placement": PLACEMENTS[1:]},
        listed=_ids(("g=1,m=5,k=64", "g=4,m=140,k=192")), fixed=True,
    ),
    "block_scales_to_mxfp8": Grammar(
        _MK, ("e4m3",), ("1x128", "128x128"), ("randn",), _block_scaled, _layout, _TILES,
        listed=_ids(("m=3,k=160", "m=130,k=160")), fixed=True,
    ),
    "fp8_block_to_mxfp8": Grammar(
        _MK, ("e4m3",), ("1x128", "128x128"), ("randn", "codes", "nan", "wide"), _block_scaled, _between,
        {**_TILES, "dtype": ("float32",)}, listed=_ids(("m=3,k=160", "m=130,k=160")), fixed=True,
    ),
    "mxfp8_to_fp8_block": Grammar(
        _MK, ("e4m3",), ("128x128",), ("randn", "codes"), _mx_scaled, _between,
        {**_TILES, "dtype": ("float32",), "scale": ("large", "nan")}, listed=_ids(("m=3,k=160", "m=130,k=160")),
        fixed=True,
    ),
}  # fmt: skip  # a table, one row a line
GRAMMARS = with_corners(_GRAMMARS, {name: CORNER for name, grammar in _GRAMMARS.items() if grammar.extents == _MK})
