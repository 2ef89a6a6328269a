"""Cases of products: dense, scaled, grouped, of a layer that quantises its input.

The shapes sit where kernels change behaviour: M around 32 (the switch to another kernel) and around a tile, M = 1,
K of 1, 2, 3 and 5 blocks, N that is no multiple of 128, scale matrices that are square (a transposed one has the
same shape), whole tiles (M of 64, 128, 256), N beyond five tiles of 128, a K of 4096 and one that ends inside a block.
Every dtype of a grammar has a case. Profile ``full`` repeats the families at three more shapes and three more seeds.

NaN and infinity stand where data of a family have them: codes of ``nan``, scales of ``nanscale``.

Source: derived in :mod:`oracle.routines.data`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from oracle.errors import CaseError
from oracle.routines import data
from oracle.routines.case import (
    DTYPES,
    MATRICES,
    TABLE_ROWS,
    Case,
    Grammar,
    given_scale,
    no_options,
    out_dtype,
    seeds,
    with_corners,
)
from oracle.routines.products.grouped import RUN
from oracle.routines.products.linear import DispatchTable

# M, N, K; what each is for stands beside it.
BLOCK_SHAPES = (
    (1, 128, 128),  # one row, one block
    (31, 256, 256),  # below the switch; b_scale is square (2 x 2)
    (32, 192, 384),  # at the switch; N ends inside a block
    (33, 128, 640),  # above the switch; five blocks
    (5, 640, 640),  # a_scale and b_scale are square (5 x 5)
    (7, 512, 2688),  # 21 blocks: the scale of the wrong block shows
    (129, 64, 256),  # M ends inside a second tile; N is half a block
)
# On the first scheme only, but for the first of them: whole tiles of M, more columns than five tiles, a long K.
LARGE_SHAPES = ((64, 128, 256), (128, 704, 384), (256, 64, 256), (3, 64, 4096))
TAIL_SHAPE = (5, 192, 208)  # K ends inside a block, on a multiple of 16 as the loads of a kernel want it
# Below and above every tile height; long K.
FULL_SHAPES = ((16, 64, 512), (65, 64, 256), (127, 192, 256), (255, 64, 128), (257, 128, 256), (2, 64, 7168))
FAMILY_SHAPE = (33, 256, 384)
MORE_SHAPES = ((5, 640, 640), (130, 384, 512), (17, 128, 1152))
LINEAR_SHAPES = ((17, 64, 256), (1, 128, 128), (33, 192, 384))
Shape = tuple[int, int, int, int]


# --- inputs -----------------------------------------------------------------------------------------------


def operands(case: Case, m: int, n: int, k: int) -> dict[str, Tensor]:
    a, b = case.operand_dtypes
    return {
        "a": data.operand(case.label("a"), case.family, m, k, dtype=a, side="a"),
        "b": data.operand(case.label("b"), case.family, n, k, dtype=b, side="b"),
    }


def scale(case: Case, name: str, part: int, rows: int, k: int, *lead: int) -> Tensor:
    """Float32 scales of operand ``part`` ``[rows, k]`` in the shape that the scheme gives, behind the axes ``lead``."""
    return data.scales(case.label(name), case.family, (*lead, *case.scaling(part).scale_shape((rows, k))))


def product(case: Case) -> dict[str, Tensor]:
    m, n, k = case["m"], case["n"], case["k"]
    inputs = operands(case, m, n, k)
    inputs["a_scale"] = scale(case, "a_scale", 0, m, k)
    inputs["b_scale"] = scale(case, "b_scale", 1, n, k)
    if (bias := case.option("bias")) is not None:
        inputs["bias"] = _vector(case, "bias", (n,), DTYPES[bias])
    return inputs


def _torch_product(case: Case) -> dict[str, Tensor]:
    """torch's names; ``weight`` is the column-major ``[K, N]`` view that its kernels want."""
    inputs = product(case)
    names = {"a": "qinput", "b": "weight", "a_scale": "scale_a", "b_scale": "scale_b", "bias": "bias"}
    return {names[name]: tensor.t() if name == "b" else tensor for name, tensor in inputs.items()}


def _beneath(case: Case) -> dict[str, Tensor]:
    """``terms=small``: two products of 2^14 beside fourteen below 2^-8, all of which an alignment of 22 bits loses."""
    inputs = _torch_product(case)
    if case.option("terms") is None:
        return inputs
    for name, values in (("qinput", (1.75, 1.875)), ("weight", (2.0, 2.0))):
        rows, k = (inputs[name] if name == "qinput" else inputs[name].t()).shape
        picked = torch.from_numpy(case.stream(f"{name} terms").integers(0, 2, (rows, k)))
        elements = torch.where(picked == 0, *values).to(torch.float64) * 2.0**-5
        elements[:, :2], elements[:, 16:] = 128.0, 0.0
        codes = elements.to(torch.float32).to(inputs[name].dtype)  # every value is one of the format
        inputs[name] = codes if name == "qinput" else codes.t()
    return inputs


def _flashinfer_product(case: Case) -> dict[str, Tensor]:
    """A bfloat16 operand is quantised by the kernel and has no scale."""
    inputs = product(case)
    names = {"a": "input", "b": "weight", "a_scale": "input_scale", "b_scale": "weight_scale"}
    wide = [side for side, dtype in zip("ab", case.operand_dtypes, strict=True) if dtype == torch.bfloat16]
    return {new: inputs[old] for old, new in names.items() if old.removesuffix("_scale") not in wide or old in wide}


def _vector(case: Case, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A bias or a weight vector that keeps an exact case exact."""
    if case.family in ("exact", "ties"):
        return data.small_integers(case.label(name), shape, bound=8, dtype=dtype)
    return data.normal(case.label(name), shape, dtype=dtype)


def grouped(case: Case) -> dict[str, Tensor]:
    """Rows sorted by expert in runs aligned to 128; some experts empty, the tail of every run is padding."""
    m, n, k, g = case["m"], case["n"], case["k"], case["g"]
    if m % RUN:
        raise CaseError(f"m={m} of {case.contract} is not a multiple of {RUN}, the alignment of an expert's run")
    inputs = operands(case, m, g * n, k)
    inputs["b"] = inputs["b"].reshape(g, n, k)
    inputs["a_scale"] = scale(case, "a_scale", 0, m, k)
    inputs["b_scale"] = scale(case, "b_scale", 1, n, k, g)
    stream = case.stream("m_indices")
    tiles = m // RUN
    owner = sorted(stream.integers(0, g, (tiles,)).tolist())
    used = stream.integers(1, RUN + 1, (tiles,)).tolist()
    indices = torch.full((m,), -1, dtype=torch.int32, device="cpu")
    for tile, expert in enumerate(owner):
        last = tile + 1 == tiles or owner[tile + 1] != expert
        indices[tile * RUN : tile * RUN + (used[tile] if last else RUN)] = expert
    inputs["m_indices"] = indices
    return inputs


def _masked(case: Case) -> dict[str, Tensor]:
    """G matrices of M rows, of which a few, none (group 0 when there are several) or all (the last) are real."""
    m, n, k, g = case["m"], case["n"], case["k"], case["g"]
    inputs = operands(case, g * m, g * n, k)
    real = case.stream("masked_m").integers(0, m + 1, (g,))
    real[0], real[-1] = 0, m
    return {
        "a": inputs["a"].reshape(g, m, k),
        "a_scale": scale(case, "a_scale", 0, m, k, g),
        "b": inputs["b"].reshape(g, n, k),
        "b_scale": scale(case, "b_scale", 1, n, k, g),
        "masked_m": torch.from_numpy(real).to(torch.int32),
    }


def _scaled_grouped(case: Case) -> dict[str, Tensor]:
    """Rows in runs of any length: of several experts the first has none and the second one row; the last eighth of the
    rows, where there are eight, belongs to no expert."""
    m, n, k, g = case["m"], case["n"], case["k"], case["g"]
    inputs = operands(case, m, g * n, k)
    used = m - m // 8
    ends = case.stream("offsets").integers(min(1, used), used + 1, (g,))
    ends.sort()
    ends[-1] = used
    if g > 2:
        ends[:2] = 0, 1
    return {
        "a": inputs["a"],
        "b": inputs["b"].reshape(g, n, k),
        "scale_a": scale(case, "scale_a", 0, m, k),
        "scale_b": data.scales(case.label("scale_b"), case.family, (g, n)),
        "offsets": torch.from_numpy(ends).to(torch.int32),
    }


def _linear(case: Case) -> dict[str, Tensor]:
    """``static`` gives the scale of the input, ``tensor`` and ``token`` leave it to the layer."""
    m, n, k = case["m"], case["n"], case["k"]
    wide, narrow = case.operand_dtypes
    of_a, of_b = case.granularity
    inputs = {
        "input": data.activations(case.label("input"), case.family, m, k, dtype=wide),
        "weight": data.operand(case.label("weight"), "randn", n, k, dtype=narrow, side="b").t(),
        "weight_scale": data.scales(case.label("weight_scale"), "randn", (n,) if of_b == "channel" else (1,)),
    }
    if of_a == "static":
        inputs["input_scale"] = given_scale(case, "input_scale")
    if (bias := case.option("bias")) is not None:
        inputs["bias"] = data.normal(case.label("bias"), (n,), dtype=DTYPES[bias])
    return inputs


def _two(case: Case) -> dict[str, Tensor]:
    """``y`` is ``x`` with a small error in every element, and a tenth of the elements unrelated."""
    (dtype,) = case.operand_dtypes
    m, k = case["m"], case["k"]
    x = data.activations(case.label("x"), case.family, m, k, dtype=dtype)
    other = data.activations(case.label("y"), case.family, m, k, dtype=dtype)
    apart = torch.from_numpy(case.stream("apart").integers(0, 10, (m, k)) == 0)
    return {"x": x, "y": torch.where(apart, other, x)}


def _flags(case: Case) -> dict[str, Tensor]:
    """Row ``i`` holds the six lowest bits of ``i``: 64 rows are the whole table. Only ROCm has a row-wise kernel."""
    rows = torch.arange(case["r"], device="cpu")
    flags = {spec.name: (rows >> bit) & 1 for bit, spec in enumerate(DispatchTable.inputs)}
    return flags | {"rowwise": flags["rowwise"] & flags["rocm"]}


# --- ids of a profile -------------------------------------------------------------------------------------


def _dense_ids(contract: str, grammar: Grammar, profile: str, *, tail: bool = False) -> Iterable[str]:
    """``tail``: also a K that ends inside a block."""
    first, *others = grammar.schemes
    bias = "bias" in grammar.options
    for scheme in grammar.schemes:
        for m, n, k in BLOCK_SHAPES:
            yield _id(contract, grammar.dtypes[0], scheme, m, n, k, "randn", 1)
        if bias:
            yield _id(contract, grammar.dtypes[0], scheme, *FAMILY_SHAPE, "randn", 1, "bias=bf16/")
            yield _id(contract, grammar.dtypes[0], scheme, *FAMILY_SHAPE, "exact", 1, "bias=bf16/")
    if bias:
        for dtype in ("f16", "f32"):
            yield _id(contract, grammar.dtypes[0], first, *FAMILY_SHAPE, "randn", 1, f"bias={dtype}/")
    for m, n, k in (*LARGE_SHAPES, *((TAIL_SHAPE,) if tail else ())):
        yield _id(contract, grammar.dtypes[0], first, m, n, k, "randn", 1)
    for scheme in others:
        yield _id(contract, grammar.dtypes[0], scheme, *LARGE_SHAPES[0], "randn", 1)
    for dtypes in grammar.dtypes:
        for family in ("randn", "codes") if "e5m2" in dtypes else ("exact", "ties", "randn", "codes"):
            yield _id(contract, dtypes, first, *FAMILY_SHAPE, family, 2)
        if _of_operands(dtypes) != _of_operands(grammar.dtypes[0]):  # kernels change at M = 32
            yield _id(contract, dtypes, first, *BLOCK_SHAPES[1], "randn", 2)
    for scheme in (first, *others) if profile == "full" else (first,):
        for family in grammar.families:
            yield _id(contract, grammar.dtypes[0], scheme, *FAMILY_SHAPE, family, 1)
    if profile == "full":
        for m, n, k in FULL_SHAPES:
            yield _id(contract, grammar.dtypes[0], first, m, n, k, "randn", 1)
        for shape in MORE_SHAPES:
            for seed in seeds(profile):
                for family in grammar.families:
                    yield _id(contract, grammar.dtypes[0], first, *shape, family, seed)


def _of_operands(dtypes: str) -> str:
    """``bf16xe4m3-bf16`` -> ``bf16xe4m3``."""
    return dtypes.partition("-")[0]


def _id(
    contract: str, dtypes: str, scheme: str, m: int, n: int, k: int, family: str, seed: int, options: str = ""
) -> str:
    return f"{contract}/{dtypes}/{scheme}/m={m},n={n},k={k}/{options}family={family}/seed={seed}"


def _grouped_ids(
    contract: str, grammar: Grammar, profile: str, *, sizes: Sequence[Shape], of_families: Shape
) -> Iterable[str]:
    """``sizes`` (M, N, K, G) on ordinary data, every family at ``of_families``."""
    heads = [f"{contract}/{dtypes}/{grammar.schemes[0]}" for dtypes in grammar.dtypes]
    for shape in sizes:
        yield _group_case(heads[0], shape, "randn", 1)
    for family in grammar.families:
        for seed in seeds(profile):
            yield _group_case(heads[0], of_families, family, seed)
    for head in heads[1:]:
        yield _group_case(head, of_families, "randn", 2)


def _group_case(head: str, shape: Shape, family: str, seed: int) -> str:
    m, n, k, g = shape
    return f"{head}/m={m},n={n},k={k},g={g}/family={family}/seed={seed}"


def _layer_ids(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    for scheme in grammar.schemes:
        head = f"{contract}/{grammar.dtypes[0]}/{scheme}"
        for m, n, k in LINEAR_SHAPES:
            yield f"{head}/m={m},n={n},k={k}/family=randn/seed=1"
        m, n, k = LINEAR_SHAPES[0]
        yield f"{head}/m={m},n={n},k={k}/bias=bf16/family=randn/seed=1"
        for family in grammar.families:
            for seed in seeds(profile):
                yield f"{head}/m={m},n={n},k={k}/family={family}/seed={seed}"
    for dtypes in grammar.dtypes[1:]:
        yield f"{contract}/{dtypes}/{grammar.schemes[0]}/m=17,n=64,k=256/family=randn/seed=1"


# Ids on which faults show that the data above hide: ragged K, a square output, square scales, overflow of a float16
# store.
def _extra(scheme: str, *wide: str) -> tuple[str, ...]:
    return (
        f"e4m3xe4m3-bf16/{scheme}/m=9,n=136,k=200/family=randn/seed=1",
        f"e4m3xe4m3-bf16/{scheme}/m=64,n=64,k=256/family=randn/seed=1",
        *wide,
    )


def _overflow(scheme: str, *seeds: int) -> tuple[str, ...]:
    return tuple(f"e4m3xe4m3-f16/{scheme}/m=9,n=136,k=256/family=wide/seed={seed}" for seed in seeds)


FAMILIES = tuple(data.OPERAND_FAMILIES)
_FINITE = tuple(family for family in FAMILIES if "nan" not in family)
EDGES = tuple(data.EDGE_FAMILIES)
_OUT = ("e4m3xe4m3-bf16", "e4m3xe4m3-f16", "e4m3xe4m3-f32")
_E5M2 = ("e5m2xe4m3-bf16", "e4m3xe5m2-bf16", "e5m2xe5m2-bf16")
_FNUZ, _FNUZ_F32 = "e4m3fnuzxe4m3fnuz-bf16", "e4m3fnuzxe4m3fnuz-f32"
_ROWS = ("tensor:tensor", "token:channel", "tensor:channel", "token:tensor")
_MNK, _MNKG = ("m", "n", "k"), ("m", "n", "k", "g")


def _scaled_mm(
    schemes: tuple[str, ...],
    build: Callable[[Case], dict[str, Tensor]],
    dtypes: tuple[str, ...] = _OUT,
    *,
    tail: bool = False,
    of: str | None = None,
    seeds: tuple[int, ...] = (1,),
) -> Grammar:
    """``of``: the scheme of the extra ids."""
    bias = {"bias": ("bf16", "f16", "f32")}
    extra = () if of is None else _extra(of, *_overflow(of, *seeds))
    listed = partial(_dense_ids, tail=tail)
    return Grammar(
        _MNK, dtypes, schemes, FAMILIES, build, out_dtype, bias, listed=listed, extra=extra, edge_families=EDGES
    )


_PLAIN: Mapping[str, Grammar] = {
    "fp8_gemm_nt": Grammar(
        _MNK, ("e4m3xe4m3-bf16", "e4m3xe4m3-f32", "e4m3xe4m3-f16", *_E5M2), ("1x128:128x128",), FAMILIES, product,
        out_dtype, listed=partial(_dense_ids, tail=True), extra=_extra("1x128:128x128"), edge_families=EDGES,
    ),
    "fp8_blockscale_gemm_sm90": Grammar(
        _MNK, (*_OUT, "bf16xe4m3-bf16", "bf16xbf16-bf16"), ("1x128:128x128", "1x128:1x128"), FAMILIES,
        _flashinfer_product, out_dtype, listed=_dense_ids,
        extra=_extra("1x128:128x128", *_overflow("1x128:128x128", 1)), edge_families=EDGES,
        domain="k % 128 == 0, n % 64 == 0",  # FlashInfer's page of the routine
    ),
    **{
        name: Grammar(
            _MNK, ("bf16xe4m3-bf16",), ("1x128:128x128",), _FINITE, _flashinfer_product, out_dtype, listed=_dense_ids,
            domain="k % 128 == 0, n % 64 == 0",
        )
        for name in (
            "flashinfer_fp8_blockscale_gemm",
            "dynamic_flashinfer_deepgemm_blockscale_gemm",
            "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
        )
    },
    "cutlass_scaled_mm": _scaled_mm((*_ROWS, "1x128:128x128"), product, (*_OUT, *_E5M2), tail=True, of="token:channel"),
    "cutlass_w8a8_scaled_mm": _scaled_mm(_ROWS, _torch_product, of="token:channel"),
    "rocm_per_tensor_w8a8_scaled_mm": replace(
        _scaled_mm(("tensor:tensor",), _beneath, (*_OUT, _FNUZ, _FNUZ_F32)),
        options={"bias": ("bf16", "f16", "f32"), "terms": ("small",)},
        extra=(
            f"{_FNUZ_F32}/tensor:tensor/m=9,n=16,k=16/terms=small/family=randn/seed=1",
            *(f"{_FNUZ}/tensor:tensor/m=33,n=64,k=200/family={f}/seed=1" for f in ("randn", "codes", "exact")),
            *(f"{_FNUZ_F32}/tensor:tensor/m=33,n=64,k=200/family={f}/seed=1" for f in ("randn", "wide")),
        ),
    ),
    "torch_per_tensor_w8a8_scaled_mm": _scaled_mm(
        ("tensor:tensor",), _torch_product, of="tensor:tensor", seeds=(1, 2, 3, 4)
    ),
    "torch_per_token_w8a8_scaled_mm": _scaled_mm(("token:channel",), _torch_product, of="token:channel"),
    "torch_channelwise_w8a8_scaled_mm": _scaled_mm(
        ("token:channel", "tensor:channel", "token:tensor"), _torch_product, of="token:channel"
    ),
    "m_grouped_fp8_gemm_nt_contiguous": Grammar(
        _MNKG, (*_OUT, *_E5M2), ("1x128:128x128",), FAMILIES, grouped, out_dtype,
        # rows come in runs of 128 for all experts together
        listed=partial(
            _grouped_ids,
            sizes=((128, 128, 128, 1), (384, 192, 256, 4), (512, 128, 640, 3), (256, 704, 256, 2), (128, 64, 4096, 1)),
            of_families=(384, 128, 256, 4),
        ),
        extra=("e4m3xe4m3-bf16/1x128:128x128/m=128,n=136,k=200,g=2/family=randn/seed=1",), edge_families=EDGES,
    ),
    "fp8_m_grouped_gemm_nt_masked": Grammar(
        _MNKG, (*_OUT, *_E5M2), ("1x128:128x128",), FAMILIES, _masked, out_dtype,
        # M is each expert's own
        listed=partial(
            _grouped_ids,
            sizes=(
                (1, 64, 128, 1), (5, 192, 256, 4), (33, 128, 640, 3), (64, 64, 128, 2), (130, 192, 256, 3),
                (257, 64, 128, 2), (128, 192, 256, 3),
            ),
            of_families=(17, 128, 256, 4),
        ),
        extra=(
            "e4m3xe4m3-bf16/1x128:128x128/m=70,n=136,k=200,g=2/family=randn/seed=1",
            "e4m3xe4m3-bf16/1x128:128x128/m=2,n=128,k=256,g=3/family=randn/seed=1",
        ),
        edge_families=EDGES,
    ),
    "scaled_grouped_mm": Grammar(
        _MNKG, _OUT, ("token:channel",), FAMILIES, _scaled_grouped, out_dtype,
        # M is that of all experts together, in runs of any length
        listed=partial(
            _grouped_ids, sizes=((1, 64, 128, 1), (70, 192, 256, 4), (129, 128, 640, 3)),
            of_families=(40, 128, 256, 4),
        ),
        extra=(
            "e4m3xe4m3-bf16/token:channel/m=70,n=136,k=200,g=3/family=randn/seed=1",
            "e4m3xe4m3-bf16/token:channel/m=160,n=64,k=128,g=1/family=randn/seed=1",
            "e4m3xe4m3-f16/token:channel/m=9,n=136,k=256,g=2/family=wide/seed=1",
        ),
        edge_families=EDGES,
    ),
    "Fp8LinearOp": Grammar(
        ("m", "n", "k"), ("bf16xe4m3-bf16", "f16xe4m3-f16", "f32xe4m3-f32"),
        ("static:tensor", "tensor:tensor", "token:channel", "tensor:channel"), tuple(data.ACTIVATION_FAMILIES),
        _linear, lambda case: out_dtype(case) | {"use_per_token_if_dynamic": case.granularity[0] == "token"},
        {"bias": ("bf16", "f32")}, listed=_layer_ids,
    ),
    "calc_diff": Grammar(("m", "k"), ("f32", "bf16"), ("-",), ("randn", "heavy"), _two, no_options, shapes=MATRICES),
    "dispatch_w8a8_scaled_mm": Grammar(("r",), ("i64",), ("-",), ("integers",), _flags, no_options, shapes=TABLE_ROWS),
}  # fmt: skip  # a table, one row a line

# Where the faults show that live in shapes: the last columns and the last of K beside a square matrix of B's scales, a
# square output, five blocks of K beside a square matrix of A's scales, rows beyond a tile of 128.
CORNERS = ("m=9,n=144,k=144", "m=16,n=16,k=144", "m=5,n=16,k=528", "m=144,n=16,k=144")
RUN_CORNERS = tuple(f"{extents},g=2" for extents in CORNERS)
BLOCK = "1x128:128x128"
_WHOLE = ("m=2,n=256,k=256", "m=64,n=64,k=128", "m=5,n=64,k=640", "m=130,n=64,k=128", "m=9,n=192,k=128")
_OF_128 = ("m=128,n=144,k=144,g=2", "m=128,n=16,k=528,g=2", "m=384,n=16,k=144,g=3")
GRAMMARS = with_corners(
    _PLAIN,
    {
        "fp8_gemm_nt": CORNERS,
        "fp8_blockscale_gemm_sm90": _WHOLE,
        "flashinfer_fp8_blockscale_gemm": _WHOLE[-1:],
        "dynamic_flashinfer_deepgemm_blockscale_gemm": _WHOLE[-1:],
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel": _WHOLE[-1:],
        "cutlass_scaled_mm": ("token:channel/m=144,n=16,k=144", "m=16,n=16,k=144", *(f"{BLOCK}/{x}" for x in CORNERS)),
        "cutlass_w8a8_scaled_mm": ("token:channel/m=144,n=16,k=144", CORNERS[0], CORNERS[1]),
        "torch_per_tensor_w8a8_scaled_mm": CORNERS,
        "rocm_per_tensor_w8a8_scaled_mm": CORNERS,
        "torch_per_token_w8a8_scaled_mm": CORNERS,
        "torch_channelwise_w8a8_scaled_mm": CORNERS,
        "m_grouped_fp8_gemm_nt_contiguous": _OF_128,
        "fp8_m_grouped_gemm_nt_masked": RUN_CORNERS,
        "scaled_grouped_mm": RUN_CORNERS,
        "Fp8LinearOp": ("m=9,n=144,k=144",),
    },
)
