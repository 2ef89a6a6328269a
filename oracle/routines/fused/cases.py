"""Cases of the fused quantisers: activations of every family, ordinary and extreme, rows in use at every edge.

NaN and infinity stand where data of a family have them (:mod:`oracle.routines.data`); rows that are not in use are NaN.

Source: derived in :mod:`oracle.routines.data` and, for the family ``range``, in :data:`EXPONENTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from oracle.numbers.formats import of_dtype
from oracle.numbers.rounding import Overflow, Rounding, power_of_two, to_dtype
from oracle.routines import data
from oracle.routines.case import Case, Grammar, given_scale, no_options, seeds

SHAPES = ("m=1,i=128", "m=3,i=384", "m=37,i=256")
FAMILY_SHAPE = "m=33,i=384"
MASKED_SHAPES = ("e=1,t=1,i=128", "e=1,t=3,i=384", "e=3,t=9,i=256")
MASKED_FAMILY_SHAPE = "e=4,t=13,i=384"


# Exponents of the up half in the groups of family ``range``, in turn. silu of a normal gate is at most 4, so the first
# gives an amax between 2^126 and 2^128, where an approximate 448/amax is 0; the last is subnormal in bfloat16.
EXPONENTS = (125, 0, -120, 119, 60, -30, -20, 20, -60, 90, -100, -133)


def gate_and_up(case: Case) -> Tensor:
    """``[M, 2 I]``, or ``[E T, 2 I]``, in the dtype of the case: both halves of its family.

    Of ``range``: a normal gate, and an up half of one binade in each group.
    """
    (dtype,) = case.operand_dtypes
    rows, width = case["m"] if "m" in dict(case.extents) else case["e"] * case["t"], case["i"]
    if case.family != "range":
        x = data.activations(case.label("x"), case.family, rows, 2 * width, dtype=dtype)
        return x * 64 if case.family == "heavy" else x  # above the floor of a scale of 1/(448 * 512), too
    return torch.cat([data.normal(case.label("gate"), (rows, width), dtype=dtype), binades(case, rows, width)], dim=1)


def binades(case: Case, rows: int, width: int, *, name: str = "binades", per_row: bool = False) -> Tensor:
    """Values ``[rows, width]`` in the dtype of the case, of one binade in each group of 128 (or row), all finite.

    The binades are those of :data:`EXPONENTS`, as far as the dtype has them.
    """
    (dtype,) = case.operand_dtypes
    fmt, groups = of_dtype(dtype), -(-width // 128)
    turn = torch.arange(rows * groups, device="cpu").reshape(rows, groups)
    turn = (turn // groups if per_row else turn) % len(EXPONENTS)
    chosen = torch.tensor(EXPONENTS, dtype=torch.int64, device="cpu")[turn].clamp(fmt.emin - 2, fmt.emax - 2)
    stream = case.stream(name)
    significand = 1 + torch.from_numpy(stream.integers(0, 1 << 7, (rows, width))).double() / 128
    signs = torch.from_numpy(stream.signs((rows, width))).double()
    power = power_of_two(chosen.repeat_interleave(128, dim=1)[:, :width])
    return to_dtype(signs * significand * power, dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def _bounded(case: Case) -> dict[str, Tensor]:
    x = gate_and_up(case)
    if case.option("ub") is None:
        return {"x": x}
    return {"x": x, "scale_ub": torch.tensor([float(case.option("ub") or 0)], dtype=torch.float32, device="cpu")}


def in_use(case: Case) -> Tensor:
    """Rows of each expert that are in use, int32 ``[E]``: all, none, one, and any number between."""
    e, t = case["e"], case["t"]
    drawn = torch.from_numpy(case.stream("masked_m").integers(0, t + 1, (e,)))
    for at, count in ((0, t), (1, 0), (2, 1)):
        if at < e:
            drawn[at] = count
    return drawn.to(torch.int32)


def _masked(case: Case) -> dict[str, Tensor]:
    e, t = case["e"], case["t"]
    x, rows = gate_and_up(case).reshape(e, t, -1), in_use(case)
    unused = torch.arange(t, device="cpu")[None, :] >= rows[:, None]
    return {"x": x.masked_fill(unused[..., None], torch.nan), "masked_m": rows}


def _rounding(case: Case) -> dict[str, object]:
    word = case.option("rounding")
    return {} if word is None else {"rounding": word}


def _biased(case: Case) -> dict[str, object]:
    """``alpha``: gpt-oss's activation with a limit of 2, or ``free`` of one."""
    word = case.option("alpha")
    if word is None:
        return {}
    alpha: dict[str, object] = {"gemm1_alpha": 1.702, "rounding": "none"}
    return alpha if word == "free" else alpha | {"gemm1_clamp_limit": 2.0}


def _group(case: Case) -> dict[str, object]:
    group = case.option("group")
    return _rounding(case) | {"group_size": 128 if group is None else int(group)}


def ids(shapes: tuple[str, ...], family_shape: str):  # type: ignore[no-untyped-def]
    """Shapes on ordinary data; every family; every single option on three families; the other dtypes likewise."""

    def listed(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
        head, hard = f"{contract}/{grammar.dtypes[0]}/{grammar.schemes[0]}", ("randn", "ties", "amax")
        few = [family for family in hard if family in grammar.families]
        options = [f"{key}={value}/" for key, values in grammar.options.items() for value in values]
        for shape in shapes:
            yield f"{head}/{shape}/family=randn/seed=1"
        for family in grammar.families:
            for seed in seeds(profile):
                yield f"{head}/{family_shape}/family={family}/seed={seed}"
        for option in options:
            for family in few if profile == "quick" else grammar.families:
                yield f"{head}/{family_shape}/{option}family={family}/seed=1"
        for dtypes in grammar.dtypes[1:]:
            with_options = ((option, family) for option in options for family in ("range", "heavy"))
            for option, family in (*(("", family) for family in (*few, "special", "heavy")), *with_options):
                if family in grammar.families:
                    yield f"{contract}/{dtypes}/{grammar.schemes[0]}/{shapes[-1]}/{option}family={family}/seed=1"

    return listed


ADDING = "fused_add", "allreduce", "rms_norm_add"
"""Norms whose residual is always given."""


def _norm(case: Case) -> dict[str, Tensor]:
    """Rows of ``range`` have a binade each, from beside the overflow of a square to far below epsilon."""
    (dtype,), m, h = case.operand_dtypes, case["m"], case["h"]

    def rows(name: str) -> Tensor:
        if case.family == "range":
            return binades(case, m, h, name=name, per_row=True)
        return data.activations(case.label(name), case.family, m, h, dtype=dtype)

    x = rows("x")
    weight = data.normal(case.label("weight"), (h,), dtype=dtype)
    inputs = {"x": x, "weight": weight}
    if case.contract.startswith(ADDING) or case.option("residual") == "1":
        small = case.family in ("heavy", "range")  # beside which a normal residual would hide x
        inputs["residual"] = rows("residual") if small else data.normal(case.label("residual"), (m, h), dtype=dtype)
    if case.granularity[0] == "tensor":
        inputs["scale"] = given_scale(case, "scale")
    for name in ("in_scale", "out_scale"):
        if name.removesuffix("_scale") in (case.option("factors") or ""):
            factor = 0.37 if name == "in_scale" else 61.5
            inputs[name] = torch.tensor([factor], dtype=torch.float32, device="cpu")
    if (bound := case.option("ub")) is not None:
        inputs["scale_ub"] = torch.tensor([float(bound)], dtype=torch.float32, device="cpu")
    return inputs


def _without(build: Callable[[Case], dict[str, Tensor]], *names: str) -> Callable[[Case], dict[str, Tensor]]:
    return lambda case: {name: x for name, x in build(case).items() if name not in names}


def _layer_norm(case: Case) -> dict[str, Tensor]:
    """The rows of an RMS norm with a mean of their own, float32 gamma and beta."""
    inputs, h = _norm(case), case["h"]
    parameters = {name: data.normal(case.label(name), (h,), dtype=torch.float32) for name in ("gamma", "beta")}
    return {"x": inputs["x"], **parameters, "scale": inputs["scale"]}


def _norm_options(case: Case) -> dict[str, object]:
    epsilon = {"epsilon": float(case.option("epsilon") or 1e-6), **_rounding(case)}
    if (bias := case.option("bias")) is not None:
        epsilon |= {"weight_bias": float(bias)}
    if case.granularity[0] != "1x128":
        return epsilon
    group = case.option("group")
    columns = case.option("columns") == "1"
    return epsilon | {"group_size": 128 if group is None else int(group), "is_scale_transposed": columns}


def _rotary(case: Case) -> dict[str, Tensor]:
    """Positions out of order and repeated; angles whose cosines and sines are no powers of two."""
    t, h, d, n = (case[name] for name in "thdn")
    (dtype,), mla = case.operand_dtypes, case.contract.startswith("mla")
    keys = (t,) if mla else (t, max(1, h // 2))

    def part(name: str, head: tuple[int, ...], width: int) -> Tensor:
        rows = 1
        for extent in head:
            rows *= extent
        return data.activations(case.label(name), case.family, rows, width, dtype=dtype).reshape(*head, width)

    angles = torch.outer(
        torch.arange(t + 3, dtype=torch.float64, device="cpu"),
        0.37 / (1 + torch.arange(d // 2, dtype=torch.float64, device="cpu")),
    )
    # cosines and sines on a grid of 2^-12: library functions differ in last bits between platforms
    cache = (torch.cat([angles.cos(), angles.sin()], dim=1) * 4096).round() / 4096
    return {
        "q_rope": part("q_rope", (t, h), d),
        "k_rope": part("k_rope", keys, d),
        "q_nope": part("q_nope", (t, h), n),
        "k_nope": part("k_nope", keys, n),
        "cos_sin_cache": cache.float(),
        "pos_ids": torch.from_numpy(case.stream("pos_ids").integers(0, t + 3, (t,))).to(torch.int32),
    }


def _falling(count: int) -> Tensor:
    """Frequencies of ``count`` pairs."""
    return 0.37 / (1 + torch.arange(count, dtype=torch.float64, device="cpu"))


def _inverse(case: Case) -> dict[str, Tensor]:
    """The last 32 columns of a head are rotated; the angles of :func:`_rotary`."""
    t, h, d = (case[name] for name in "thd")
    (dtype,) = case.operand_dtypes
    angles = torch.outer(torch.arange(t + 3, dtype=torch.float64, device="cpu"), _falling(16))
    cache = (torch.cat([angles.cos(), angles.sin()], dim=1) * 4096).round() / 4096
    return {
        "o": data.activations(case.label("o"), case.family, t * h, d, dtype=dtype).reshape(t, h, d),
        "positions": torch.from_numpy(case.stream("positions").integers(0, t + 3, (t,))),
        "cos_sin_cache": cache.float(),
    }


def _rotary_options(case: Case) -> dict[str, object]:
    scaled = case.option("scaled") != "0"
    factors = {"quant_scale_q": 37.25, "quant_scale_kv": 5.3} if scaled else {}
    return {"is_neox": case.option("neox") != "0", **factors}


def _plain(case: Case) -> dict[str, Tensor]:
    (dtype,) = case.operand_dtypes
    if "m" in dict(case.extents):
        return {"x": data.activations(case.label("x"), case.family, case["m"], case["k"], dtype=dtype)}
    e, t = case["e"], case["t"]
    x = data.activations(case.label("x"), case.family, e * t, case["k"], dtype=dtype).reshape(e, t, -1)
    rows = in_use(case)
    unused = torch.arange(t, device="cpu")[None, :] >= rows[:, None]
    return {"x": x.masked_fill(unused[..., None], torch.nan), "masked_m": rows}


def _plain_options(case: Case) -> dict[str, object]:
    group, eps = case.option("group"), case.option("eps")
    chosen: dict[str, object] = {"group_size": 128 if group is None else int(group), "eps": float(eps or 1e-10)}
    return chosen | ({"use_ue8m0": case.option("ue8m0") == "1"} if "masked" in case.contract else {})


_FAMILIES = tuple(data.ACTIVATION_FAMILIES)
_WIDE = ("bf16-e4m3", "f16-e4m3", "f32-e4m3")
NORM_SHAPES, NORM_FAMILY_SHAPE = ("m=1,h=128", "m=3,h=384", "m=33,h=640"), "m=21,h=384"
_NORMS = ids(NORM_SHAPES, NORM_FAMILY_SHAPE)
ROTARY_SHAPES, ROTARY_FAMILY_SHAPE = ("t=1,h=1,d=16,n=16", "t=5,h=4,d=64,n=128"), "t=7,h=2,d=32,n=64"
_EPSILON = {"epsilon": ("1e-5",)}
_DENSE, _MASKED_IDS = ids(SHAPES, FAMILY_SHAPE), ids(MASKED_SHAPES, MASKED_FAMILY_SHAPE)
_ROUNDINGS = {"rounding": ("product", "none")}

GRAMMARS: Mapping[str, Grammar] = {
    "silu_and_mul_quant": Grammar(
        ("m", "i"), _WIDE, ("tensor",), _FAMILIES,
        lambda case: {"x": gate_and_up(case), "scale": given_scale(case, "scale")}, _rounding, _ROUNDINGS,
        listed=_DENSE,
    ),
    "silu_and_mul_per_block_quant": Grammar(
        ("m", "i"), _WIDE, ("1x128",), _FAMILIES, _bounded,
        lambda case: _group(case) | {"is_scale_transposed": case.option("columns") == "1"},
        {"group": ("64",), "columns": ("1",), "ub": ("0.008", "0.25"), "rounding": ("each",)},
        listed=_DENSE, domain="i % 128 == 0",
    ),
    "silu_and_mul_masked_post_quant": Grammar(
        ("e", "t", "i"), _WIDE, ("1x128",), _FAMILIES, _masked,
        lambda case: _group(case) | _biased(case) | {"use_ue8m0": case.option("ue8m0") == "1"},
        {"group": ("32", "64"), "ue8m0": ("1",), "rounding": ("none",), "alpha": ("1.702", "free")},
        listed=_MASKED_IDS, domain="i % 128 == 0",
    ),
    "persistent_masked_m_silu_mul_quant": Grammar(
        ("e", "t", "i"), _WIDE[:1], ("1x128",), _FAMILIES, _masked, no_options,
        listed=_MASKED_IDS, domain="i % 128 == 0",
    ),
    **{
        name: Grammar(("m", "h"), _WIDE, ("tensor",), _FAMILIES, _norm, _norm_options, options, listed=_NORMS)
        for name, options in (
            ("rms_norm_static_fp8_quant", {"rounding": ("product",), **_EPSILON}),
            ("fused_add_rms_norm_static_fp8_quant", {"rounding": ("product",), **_EPSILON}),
            ("rmsnorm_quant", _EPSILON), ("fused_add_rmsnorm_quant", _EPSILON))
    },
    "rms_norm_dynamic_per_token_quant": Grammar(
        ("m", "h"), _WIDE, ("token",), _FAMILIES, _norm, _norm_options,
        {"residual": ("1",), "ub": ("5",), **_EPSILON}, listed=_NORMS,
    ),
    "rms_norm_per_block_quant": Grammar(
        ("m", "h"), _WIDE, ("1x128",), _FAMILIES, _norm, _norm_options,
        {"residual": ("1",), "ub": ("5",), "group": ("64",), "columns": ("1",), **_EPSILON}, listed=_NORMS,
        domain="h % 128 == 0",
    ),
    "allreduce_fusion": Grammar(
        ("m", "h"), _WIDE, ("tensor",), _FAMILIES, _norm, _norm_options, {"bias": ("1",), **_EPSILON}, listed=_NORMS,
    ),
    "allreduce_fusion_dynamic": Grammar(
        ("m", "h"), _WIDE, ("token",), _FAMILIES, _norm, _norm_options, {"bias": ("1",), **_EPSILON}, listed=_NORMS,
    ),
    "rms_norm_scaled": Grammar(
        ("m", "h"), _WIDE, ("tensor",), _FAMILIES, _without(_norm, "scale"), _norm_options,
        {"factors": ("in", "out"), **_EPSILON}, listed=_NORMS,
    ),
    "rms_norm_add_residual_scaled": Grammar(
        ("m", "h"), _WIDE, ("tensor",), _FAMILIES, _without(_norm, "scale"), _norm_options,
        {"factors": ("out",), **_EPSILON}, listed=_NORMS,
    ),
    "fused_rmsnorm_silu": Grammar(
        ("m", "h"), _WIDE[:1], ("tensor",), _FAMILIES, _without(_norm, "scale"), _norm_options, _EPSILON, listed=_NORMS,
    ),
    "layernorm_quant": Grammar(
        ("m", "h"), _WIDE[:1], ("tensor",), _FAMILIES, _layer_norm, _norm_options, _EPSILON, listed=_NORMS,
    ),
    "per_token_group_quant_fp8_masked": Grammar(
        ("e", "t", "k"), _WIDE, ("1x128",), _FAMILIES, _plain, _plain_options,
        {"group": ("16", "32", "64", "256"), "ue8m0": ("1",), "eps": ("1e-4",)},
        listed=ids(("e=1,t=1,k=256", "e=1,t=3,k=384", "e=3,t=9,k=512"), "e=4,t=13,k=512"), domain="k % 256 == 0",
    ),
    "per_token_group_quant_fp8_packed": Grammar(
        ("m", "k"), _WIDE, ("1x128",), _FAMILIES, _plain, _plain_options,
        {"group": ("16", "32", "64", "256"), "eps": ("1e-4",)},
        listed=ids(("m=1,k=256", "m=3,k=384", "m=37,k=512"), "m=33,k=1280"), domain="k % 256 == 0",
    ),
    "silu_mul_quant_fp8_packed_triton": Grammar(
        ("m", "i"), _WIDE[:1], ("1x128",), _FAMILIES, lambda case: {"x": gate_and_up(case)},
        lambda case: {"group_size": int(case.option("group") or 128)}
        | ({"clamp_limit": float(case.option("limit") or 0)} if case.option("limit") else {}),
        {"group": ("32", "64"), "limit": ("0.5", "7")}, listed=_DENSE, domain="i % 128 == 0",
    ),
    "fused_inv_rope_fp8_quant": Grammar(
        ("t", "h", "d"), _WIDE[:1], ("1x128",), tuple(f for f in _FAMILIES if f != "range"), _inverse, no_options,
        listed=ids(("t=1,h=1,d=128", "t=5,h=4,d=256"), "t=3,h=2,d=128"), domain="d % 128 == 0",
    ),
    **{
        name: Grammar(
            ("t", "h", "d", "n"), _WIDE[:2], ("tensor",), tuple(f for f in _FAMILIES if f != "range"), _rotary,
            _rotary_options, {"neox": ("0",), "scaled": ("0",)}, listed=ids(ROTARY_SHAPES, ROTARY_FAMILY_SHAPE),
            domain="d % 16 == 0, n % 16 == 0",
        )
        for name in ("rope_quantize_fp8", "mla_rope_quantize_fp8")
    },
}  # fmt: skip  # a table, one row a line
