"""Cases of layout and padding: scales in the order of a kernel, expert weights, shards, tables of integers.

Data of a layout must be distinct, or a wrong place changes nothing: weights hold every code, scales are all different.

NaN is moved like any other code; padding holds it (:data:`POISON`).

Source: derived in :mod:`oracle.routines.data`; the layouts as :mod:`oracle.truth.layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from oracle.numbers.formats import E4M3FN
from oracle.numbers.scaling import E4M3_128X128, Block, Scaling
from oracle.routines import data
from oracle.routines.case import MATRICES, TABLE_ROWS, Case, Grammar, every_shape, no_options, out_dtype
from oracle.routines.layouts import groups
from oracle.truth.layout import swizzle_scale

Builder = Callable[[Case], dict[str, Tensor]]


def _lead(case: Case, *extents: int) -> tuple[int, ...]:
    """``extents`` behind a group axis when the case has more than one group."""
    return (case["g"], *extents) if case["g"] > 1 else extents


def _scale(case: Case) -> dict[str, Tensor]:
    return {"scale": data.scales(case.label("scale"), "randn", _lead(case, case["m"], case["c"]))}


def _required(case: Case) -> dict[str, Tensor]:
    shape = Scaling(E4M3FN, Block(_gran(case), _gran_k(case))).scale_shape((case["m"], case["k"]))
    return {"scale": data.powers_of_two(case.label("scale"), _lead(case, *shape))}


def _scale_bytes(case: Case) -> dict[str, Tensor]:
    shape = _lead(case, case["m"], case["c"])
    return {"scale": torch.from_numpy(case.stream("scale").integers(0, 256, shape)).to(torch.uint8)}


def _weight(name: str) -> Builder:
    return lambda case: {name: _matrix(case, name, case["m"], case["k"])}


def _experts(first: str, second: str) -> Builder:
    """Weights of E experts; ``gated=0`` has no up half."""

    def build(case: Case) -> dict[str, Tensor]:
        e, h, i = case["e"], case["h"], case["i"]
        rows = i if case.option("gated") == "0" else 2 * i
        return {
            first: _matrix(case, first, e * rows, h).reshape(e, rows, h),
            second: _matrix(case, second, e * h, i).reshape(e, h, i),
        }

    return build


def _halves(case: Case) -> dict[str, Tensor]:
    e, i, h = case["e"], case["i"], case["h"]
    return {"x": _matrix(case, "x", e * 2 * i, h).reshape(e, 2 * i, h)}


def _matrix(case: Case, name: str, rows: int, cols: int) -> Tensor:
    (dtype,) = case.operand_dtypes
    return data.operand(case.label(name), case.family, rows, cols, dtype=dtype, side="b")


def _integers(**ranges: tuple[int, int]) -> Builder:
    """A table of R rows with one column for each named range ``[low, high)``."""

    def build(case: Case) -> dict[str, Tensor]:
        shape = (case["r"],)
        return {name: torch.from_numpy(case.stream(name).integers(*span, shape)) for name, span in ranges.items()}

    return build


def _powers(case: Case) -> dict[str, Tensor]:
    """Powers of two; ``special`` has 0 and infinity among them."""
    x = data.powers_of_two(case.label("x"), (case["m"], 4 * case["c"]))
    if case.family == "special":
        x[::2, ::4], x[::3, 1::4] = 0.0, torch.inf
    return {"x": x}


def _shards(case: Case) -> dict[str, Tensor]:
    """S scales and the rows of each shard, which differ and add up to N."""
    s, n = case["s"], case["n"]
    cuts = sorted((case.stream("widths").order(n - 1)[: s - 1] + 1).tolist())
    widths = [stop - start for start, stop in zip([0, *cuts], [*cuts, n], strict=True)]
    return {
        "weight_scale": data.scales(case.label("weight_scale"), "randn", (s,)),
        "logical_widths": torch.tensor(widths, dtype=torch.int64, device="cpu"),
    }


def _fnuz(case: Case) -> dict[str, Tensor]:
    scales = {name: data.scales(case.label(name), "randn", (1,)) for name in ("weight_scale", "input_scale")}
    return {"weight": _matrix(case, "weight", case["m"], case["k"])} | scales


def _close(case: Case) -> dict[str, Tensor]:
    """Scales that are far apart, or (family ``exact``) all equal but for rounding."""
    if case.family == "randn":
        return {"x": data.scales(case.label("x"), "randn", (case["s"],))}
    one = data.scales(case.label("x"), "randn", (1,)).expand(case["s"]).contiguous()
    one[-1] *= 1 + 2.0**-20
    return {"x": one}


def _moe_scales(case: Case) -> dict[str, Tensor]:
    extents = {"w13_scale": case["e"], "w13_input_scale": 1, "w2_scale": case["e"], "w2_input_scale": 1}
    return {name: data.scales(case.label(name), "randn", (extent,)) for name, extent in extents.items()}


def _prepared(case: Case) -> dict[str, Tensor]:
    """Expert weights with their scales: one for each expert, or (``block=1``) one for each 128x128 block."""
    weights = _experts("w13", "w2")(case)
    blocks = case.option("block") == "1"

    def scale(name: str) -> Tensor:
        e, rows, columns = weights[name].shape
        shape = (e, *E4M3_128X128.scale_shape((rows, columns))) if blocks else (e,)
        return data.scales(case.label(f"{name}_scale"), "randn", shape)

    return weights | {f"{name}_scale": scale(name) for name in ("w13", "w2")}


def _prepared_options(case: Case) -> dict[str, object]:
    return {
        "block_quant": case.option("block") == "1",
        "is_act_and_mul": case.option("gated") != "0",
        "is_trtllm": case.option("trtllm") == "1",
    }


def _gran(case: Case) -> int:
    return int(case.option("gran") or 1)


def _gran_k(case: Case) -> int:
    return int(case.option("gran_k") or 128)


def _required_options(case: Case) -> dict[str, object]:
    target = case.option("target") or ("sm90" if _gran_k(case) == 128 else "sm100")
    return {"mn": case["m"], "k": case["k"], "gran_mn": _gran(case), "gran_k": _gran_k(case), "target": target}


POISON = torch.tensor([0xFF, 0x7F, 0xFE, 0x7E, 0x7C, 0xFC], dtype=torch.uint8, device="cpu")
"""NaN of E8M0 and E4M3, the largest finite bytes of both, infinities of E5M2: what nobody may read."""


def poison(size: int) -> Tensor:
    """Bytes ``[size]``, uint8, that must not be read: NaN, large and infinite in turn (:data:`POISON`)."""
    return POISON.repeat(-(-size // len(POISON)))[:size]


def _blocked(case: Case) -> dict[str, Tensor]:
    """Tiles whose padding is poisoned."""
    zeros = torch.zeros(_lead(case, case["m"], case["c"]), dtype=torch.uint8, device="cpu")
    tile = case.option("tile") or "128x4"
    pads = swizzle_scale(zeros, tile=tile, fill=1).to(torch.bool)
    memory = swizzle_scale(_scale_bytes(case)["scale"], tile=tile)
    memory[pads] = poison(int(pads.sum()))
    return {"memory": memory}


def _blocked_options(case: Case) -> dict[str, object]:
    return {"rows": case["m"], "columns": case["c"], "tile": case.option("tile") or "128x4"}


def _parts(case: Case, total: int, name: str) -> Tensor:
    """``g`` sizes that add up to ``total``: uneven, and one of them 0 where there are three and more."""
    cuts = sorted(case.stream(name).integers(0, total + 1, (case["g"] - 1,)).tolist())
    if case["g"] > 2:
        cuts[1] = cuts[0]
    widths = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    return torch.tensor(widths, dtype=torch.int64, device="cpu")


def _expert_scales(case: Case) -> dict[str, Tensor]:
    """Scales of ``m`` rows cut into experts; masked: room for ``m`` rows each, poison in those that are not filled."""
    m, c, g = case["m"], case["c"], case["g"]
    if case.option("placement") != "masked":
        rows = _parts(case, m, "rows")
        scale = torch.from_numpy(case.stream("scale").integers(0, 256, (m, c))).to(torch.uint8)
        return {"scale": scale, "first": torch.cumsum(rows, 0) - rows, "rows": rows}
    rows = torch.from_numpy(case.stream("rows").integers(0, m + 1, (g,)))
    scale = torch.from_numpy(case.stream("scale").integers(0, 256, (g, m, c))).to(torch.uint8)
    empty = torch.arange(m, device="cpu") >= rows[:, None]
    scale[empty] = poison(int(empty.sum()) * c).reshape(-1, c)
    return {"scale": scale.reshape(g * m, c), "first": torch.arange(g, device="cpu") * m, "rows": rows}


def _placement(case: Case) -> dict[str, object]:
    placement = case.option("placement") or "tight"
    return {"placement": placement, "capacity": case["m"] if placement == "masked" else 0}


def _column_groups(case: Case) -> dict[str, Tensor]:
    scale = torch.from_numpy(case.stream("scale").integers(0, 256, (case["m"], case["c"]))).to(torch.uint8)
    return {"scale": scale, "ends": torch.cumsum(_parts(case, case["c"], "groups"), 0)}


def _packed_groups(case: Case) -> dict[str, Tensor]:
    """K of groups in whole blocks but for the last element of one; ``c`` blocks in all."""
    gran, blocks = _gran_k(case), _parts(case, case["c"], "groups")
    short = (torch.arange(case["g"], device="cpu") == int(blocks.argmax())).to(torch.int64)
    scale = data.powers_of_two(case.label("scale"), (case["c"], 4 * case["m"]))
    return {"scale": scale, "ks": blocks * gran - short}


def _alignment(case: Case) -> dict[str, object]:
    return {"alignment_size": int(case.option("align") or 32)}


def _local_ids(case: Case) -> dict[str, Tensor]:
    """Every second expert is of this rank, in descending order; an id in eight is -1."""
    (dtype,), e = case.operand_dtypes, case["e"]
    place = torch.arange(e, dtype=torch.int32, device="cpu")
    known = torch.where(place % 2 == 1, (e - place) // 2, -1)
    ids = torch.from_numpy(case.stream("topk_ids").integers(0, e, (case["t"], case["k"])))
    absent = torch.from_numpy(case.stream("absent").integers(0, 8, (case["t"], case["k"])) == 0)
    return {"topk_ids": ids.masked_fill(absent, -1).to(dtype), "expert_map": known}


def _token_groups(case: Case) -> dict[str, Tensor]:
    """Rows of groups, of which the last eighth belongs to none with ``tail=1``."""
    rows = _parts(case, case["m"] - (case["m"] // 8 if case.option("tail") else 0), "groups")
    ends = torch.cumsum(rows, 0).to(torch.int32)
    return {"x": _matrix(case, "x", case["m"], case["k"]), "group_end_offsets": ends}


def _padded_groups(case: Case) -> dict[str, Tensor]:
    """Padded rows with NaN between and behind the groups."""
    inputs, alignment = _token_groups(case), int(case.option("align") or 32)
    x, ends = inputs["x"], inputs["group_end_offsets"]
    starts = groups.padded_starts(ends, alignment)
    padded = x.new_full((groups.padded_height(case["m"], case["g"], alignment), case["k"]), torch.nan)
    for (begin, end), start in zip(groups.groups_of(ends), starts, strict=False):
        padded[start : start + end - begin] = x[begin:end]
    first = torch.tensor(starts[:-1], dtype=torch.int32, device="cpu")
    return {"padded": padded, "group_end_offsets": ends, "padded_group_start_offsets": first}


def _every_dtype(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    """The ids of every shape, and the last shape in every other dtype."""
    yield from every_shape(contract, grammar, profile)
    for dtype in grammar.dtypes[1:]:
        yield f"{contract}/{dtype}/-/{grammar.shapes[-1]}/family=randn/seed=1"


def _mega(words: bool) -> Builder:
    """Weights of G experts of DeepGEMM's fused layer with their scales: float32 of blocks, or words of exponents, where
    a byte holds two codes of FP4."""

    def build(case: Case) -> dict[str, Tensor]:
        g, h, i = case["g"], case["h"], case["i"]
        made: dict[str, Tensor] = {}
        for name, rows, columns in (("l1", 2 * i, h), ("l2", h, i)):
            made[name] = _matrix(case, name, g * rows, columns // (1 + words)).reshape(g, rows, -1)
            label, shape = f"{name}_sf", (g, -(-rows // 128), -(-columns // 128))
            made[label] = (
                torch.from_numpy(case.stream(label).integers(0, 1 << 31, (g, rows, -(-columns // 128)))).to(torch.int32)
                if words
                else data.scales(case.label(label), "randn", shape)
            )
        return made

    return build


def _group(case: Case) -> int:
    return int(case.option("group") or 32)


def _lines(case: Case) -> dict[str, Tensor]:
    """Scales of E experts; ``c`` of them, of 32 columns each, are a row."""
    (dtype,) = case.operand_dtypes
    bytes_ = case.stream("scale").integers(0, 256, (case["e"], case["m"], case["c"] * dtype.itemsize))
    return {"scale": torch.from_numpy(bytes_).to(torch.uint8).view(dtype)}


def _codes(case: Case) -> dict[str, Tensor]:
    """Codes of E experts of ``m`` rows, two a byte, ``c`` blocks of 32 columns; of family ``range`` the exponents of an
    expert lie far apart. Experts differ in them."""
    shape = (case["e"], case["m"], case["c"])
    inputs = {"weight": torch.from_numpy(case.stream("w").integers(0, 256, (*shape[:2], 16 * case["c"])))}
    if "humming" in case.contract:
        least, most = (60, 180) if case.family == "range" else (120, 136)
        apart = 7 * torch.arange(case["e"], device="cpu")[:, None, None] % 56
        inputs["raw_scale"] = torch.from_numpy(case.stream("scale").integers(least, most, shape)) + apart
    return {name: x.to(torch.uint8) for name, x in inputs.items()}


def _six_axes(case: Case) -> dict[str, Tensor]:
    shape = (32, 4, -(-case["m"] // 128), 4, -(-case["c"] // 4), case["g"])
    return {"sf_6d": torch.from_numpy(case.stream("sf").integers(0, 256, shape)).to(torch.uint8)}


def _words(case: Case) -> dict[str, Tensor]:
    return {
        "packed_sf": torch.from_numpy(case.stream("words").integers(0, 1 << 31, (case["m"], case["c"]))).to(torch.int32)
    }


def _flag(name: str) -> Callable[[Case], dict[str, object]]:
    return lambda case: {name: case.option("gated") != "0"}


_WEIGHTS = ("codes", "randn")
_GATED = {"gated": ("0",)}
_MK, _MCG, _EHI = ("m", "k"), ("m", "c", "g"), ("e", "h", "i")
# Ragged and aligned, one and several.
_SHAPES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    _MCG: ("m=1,c=1,g=1", "m=31,c=7,g=1", "m=128,c=4,g=1", "m=130,c=21,g=3"),
    ("m", "k", "g"): ("m=128,k=128,g=1", "m=130,k=896,g=1", "m=256,k=640,g=3"),
    _MK: MATRICES,
    _EHI: ("e=1,h=128,i=128", "e=3,h=128,i=72", "e=2,h=256,i=192"),
    ("s", "n"): ("s=1,n=8", "s=3,n=96"),
    ("s", "n", "k"): ("s=1,n=8,k=64", "s=3,n=96,k=128"),
    ("s",): ("s=1", "s=3"),
    ("e",): ("e=1", "e=16"),
    ("r",): TABLE_ROWS,
}
# The shuffle of expert rows takes whole blocks of 32; block scales are exchanged in two halves.
_WHOLE_BLOCKS = ("e=1,h=128,i=128", "e=3,h=128,i=96", "e=2,h=256,i=192")
# Rows or columns of one group, of several, and of groups of which one is empty.
_EXPERTS = ("m=1,c=1,g=1", "m=130,c=7,g=2", "m=200,c=21,g=4")
_FUSED, _PACKED = ("g=1,h=128,i=64", "g=3,h=256,i=192"), ("m=1,c=1", "m=7,c=3", "m=130,c=14")
_TOKENS = ("m=1,k=8,g=1", "m=37,k=24,g=2", "m=100,k=16,g=5")
_HALVES = ("e=1,h=128,i=128", "e=3,h=128,i=72", "e=2,h=256,i=256")


def _of_scales(build: Builder) -> Grammar:
    return Grammar(_MCG, ("f32",), ("-",), ("randn",), build, no_options)


def _of_weights(
    extents: tuple[str, ...],
    build: Builder,
    call: Callable[[Case], dict[str, object]] = no_options,
    gated: bool = False,
    own: tuple[str, ...] = (),
) -> Grammar:
    options = _GATED if gated else {}
    return Grammar(extents, ("e4m3",), ("-",), _WEIGHTS, build, call, options, shapes=own, fixed=bool(own))


def _of_integers(build: Builder) -> Grammar:
    return Grammar(("r",), ("i64",), ("-",), ("integers",), build, no_options)


_GRAMMARS: Mapping[str, Grammar] = {
    "get_col_major_tma_aligned_tensor": _of_scales(_scale),
    "get_mn_major_tma_aligned_packed_ue8m0_tensor": _of_scales(
        lambda case: {"scale": data.powers_of_two(case.label("scale"), _lead(case, case["m"], case["c"]))}
    ),
    "transform_sf_into_required_layout": Grammar(
        ("m", "k", "g"),
        ("f32",),
        ("-",),
        ("randn",),
        _required,
        _required_options,
        {"gran": ("128",), "gran_k": ("32",), "target": ("sm100",)},
    ),
    "to_blocked": Grammar(_MCG, ("u8",), ("-",), ("randn",), _scale_bytes, no_options),
    "from_blocked": Grammar(_MCG, ("u8",), ("-",), ("randn",), _blocked, _blocked_options, {"tile": ("8x4",)}),
    "shuffle_matrix_sf_a": Grammar(
        _MCG,
        ("u8",),
        ("-",),
        ("randn",),
        _scale_bytes,
        no_options,
        shapes=("m=128,c=1,g=1", "m=384,c=7,g=1", "m=256,c=20,g=1"),
    ),
    "swizzle_scale_experts": Grammar(
        _MCG,
        ("u8",),
        ("-",),
        ("randn",),
        _expert_scales,
        _placement,
        {"placement": ("flashinfer", "masked")},
        shapes=_EXPERTS,
    ),
    "to_blocked_k_groups": Grammar(_MCG, ("u8",), ("-",), ("randn",), _column_groups, no_options, shapes=_EXPERTS),
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor": Grammar(
        _MCG,
        ("f32",),
        ("-",),
        ("randn",),
        _packed_groups,
        lambda case: {"gran_k": _gran_k(case)},
        {"gran_k": ("32",)},
        shapes=_EXPERTS,
    ),
    "swizzle_scale": Grammar(
        _MCG,
        ("u8",),
        ("-",),
        ("randn",),
        _scale_bytes,
        lambda case: {"tile": case.option("tile") or "128x4"},
        {"tile": ("8x4",)},
    ),
    "pad_token_groups": Grammar(
        ("m", "k", "g"),
        ("bf16", "f32", "f16"),
        ("-",),
        ("randn",),
        _token_groups,
        _alignment,
        {"align": ("16", "128"), "tail": ("1",)},
        listed=_every_dtype,
        shapes=_TOKENS,
    ),
    "remap_topk_to_local": Grammar(
        ("t", "e", "k"),
        ("i32-i32", "i64-i64", "i64-i32"),
        ("-",),
        ("randn",),
        _local_ids,
        out_dtype,
        shapes=("t=7,e=12,k=4", "t=1,e=3,k=1"),
    ),
    "unpad_token_groups": Grammar(
        ("m", "k", "g"),
        ("bf16", "f32", "f16"),
        ("-",),
        ("randn",),
        _padded_groups,
        lambda case: _alignment(case) | {"num_tokens": case["m"]},
        {"align": ("16", "128")},
        listed=_every_dtype,
        shapes=_TOKENS,
    ),
    "swap_w13_to_w31": _of_weights(_EHI, _halves),
    "reorder_rows_for_gated_act_gemm": _of_weights(_MK, _weight("w")),
    "shuffle_matrix_a": _of_weights(_MK, _weight("w")),
    "rotate_weights_for_fi_trtllm_fp8_per_tensor_moe": _of_weights(
        _EHI, _experts("gemm1_weights", "gemm2_weights"), _flag("is_gated"), gated=True, own=_WHOLE_BLOCKS
    ),
    "align_fp8_moe_weights_for_fi": _of_weights(_EHI, _experts("w13", "w2"), _flag("is_act_and_mul"), gated=True),
    "prepare_fp8_moe_layer_for_fi": Grammar(
        _EHI,
        ("e4m3",),
        ("-",),
        _WEIGHTS,
        _prepared,
        _prepared_options,
        {"block": ("1",), "trtllm": ("1",), **_GATED},
        shapes=_HALVES,
        fixed=True,
    ),
    "transform_weights_for_mega_moe": _of_weights(("g", "h", "i"), _mega(True), own=_FUSED),
    "transform_weights_for_mega_moe_sm90": _of_weights(("g", "h", "i"), _mega(False), own=_FUSED),
    "interleave_for_tma_wgmma_up": _of_weights(
        ("g", "n", "k"),
        lambda c: {"l1": _matrix(c, "l1", 2 * c["g"] * c["n"], c["k"]).reshape(c["g"], 2 * c["n"], -1)},
        own=("g=1,n=64,k=24", "g=3,n=192,k=40"),
    ),
    "interleave_moe_scales_for_sm90_mixed_gemm": Grammar(
        ("e", "m", "c"),
        ("u8", "bf16"),
        ("-",),
        ("randn",),
        _lines,
        lambda case: {"group_size": _group(case)},
        {"group": ("64", "128")},
        shapes=("e=1,m=64,c=4", "e=3,m=192,c=12"),
        listed=_every_dtype,
    ),
    "interleave_moe_weights_for_sm90_mixed_gemm": Grammar(
        ("e", "m", "c"),
        ("u8",),
        ("-",),
        ("randn",),
        _codes,
        lambda case: {"quant_type": case.option("kind") or "fp4"},
        {"kind": ("fp4_fp8", "int4")},
        shapes=("e=1,m=16,c=2", "e=3,m=48,c=6"),
    ),
    "preprocess_moe_weights_for_sm90_mixed_gemm_humming": Grammar(
        ("e", "m", "c"),
        ("u8",),
        ("-",),
        ("randn", "range"),
        _codes,
        lambda case: {"max_range": int(case.option("most") or 11), "interleave": case.option("interleave") != "0"},
        {"most": ("0", "3"), "interleave": ("0",)},
        shapes=("e=1,m=64,c=4", "e=3,m=128,c=8"),
    ),
    "convert_sf_from_mma_layout": Grammar(
        _MCG,
        ("u8",),
        ("-",),
        ("randn",),
        _six_axes,
        no_options,
        shapes=("m=128,c=4,g=1", "m=130,c=9,g=3"),
        fixed=True,
    ),
    "pack_ue8m0_to_int": Grammar(
        ("m", "c"),
        ("f32",),
        ("-",),
        ("randn", "special"),
        _powers,
        no_options,
        shapes=_PACKED,
    ),
    "unpack_ue8m0_from_int": Grammar(("m", "c"), ("i32",), ("-",), ("randn",), _words, no_options, shapes=_PACKED),
    "ceil_div": _of_integers(_integers(x=(0, 1 << 20), y=(1, 300))),
    "align": _of_integers(_integers(x=(0, 1 << 20), y=(1, 300))),
    "calculate_tile_tokens_dim": _of_integers(_integers(num_tokens=(1, 5000), top_k=(1, 9), num_experts=(1, 257))),
    "convert_to_channelwise": Grammar(("s", "n"), ("f32",), ("-",), ("randn",), _shards, no_options),
    "requantize_with_max_scale": _of_weights(
        ("s", "n", "k"), lambda case: {"weight": _matrix(case, "weight", case["n"], case["k"])} | _shards(case)
    ),
    "normalize_e4m3fn_to_e4m3fnuz": _of_weights(_MK, _fnuz),
    "all_close_1d": Grammar(("s",), ("f32",), ("-",), ("randn", "exact"), _close, no_options),
    "make_fp8_moe_alpha_scales_for_fi": Grammar(("e",), ("f32",), ("-",), ("randn",), _moe_scales, no_options),
    "make_nvfp4_global_scale": Grammar(
        ("m", "k"),
        ("bf16", "f16", "f32"),
        ("-",),
        ("randn", "amax", "outlier", "heavy", "special", "nan"),
        lambda c: {"x": data.activations(c.label("x"), c.family, c["m"], c["k"], dtype=c.operand_dtypes[0])},
        lambda c: {"e4m3_max": int(c.option("most") or 448)},
        {"most": ("256",)},
        shapes=("m=3,k=40", "m=1,k=1"),
        listed=_every_dtype,
    ),
    "register_scales_for_trtllm_fp8_per_tensor_moe": Grammar(
        ("e",), ("f32",), ("-",), ("randn",), _moe_scales, no_options
    ),
}
GRAMMARS: Mapping[str, Grammar] = {
    name: grammar if grammar.shapes else replace(grammar, shapes=_SHAPES[grammar.extents])
    for name, grammar in _GRAMMARS.items()
}
