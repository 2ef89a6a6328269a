"""Which cases a profile runs: every family at one hostile shape, every hostile shape on ordinary data.

The shapes sit where kernels change behaviour: M around 32 (the switch to another kernel) and around a tile, M = 1,
K of 1, 2, 3 and 5 blocks, N that is no multiple of 128, scale matrices that are square (a transposed one has the
same shape), whole tiles (M of 64, 128, 256), N beyond five tiles of 128, a K of 4096 and one that ends inside a block.
Every dtype of a grammar has a case. ``full`` repeats the families at three more shapes and three more seeds;
``compact`` is ``quick`` thinned out, for outputs that are to be stored: every dtype, option and family once, every
dtype on ordinary data, every scheme once at each shape.

Not covered: shapes of real models; name them with ``--case``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from oracle.errors import CaseError
from oracle.routines.cases import Case, grammars, parse

PROFILES = ("quick", "full", "compact")

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
TAILS = ("fp8_gemm_nt", "cutlass_scaled_mm")  # contracts of both scale kinds that take such a K
# Below and above every tile height; long K.
FULL_SHAPES = ((16, 64, 512), (65, 64, 256), (127, 192, 256), (255, 64, 128), (257, 128, 256), (2, 64, 7168))
FAMILY_SHAPE = (33, 256, 384)
MORE_SHAPES = ((5, 640, 640), (130, 384, 512), (17, 128, 1152))
SEEDS = (1, 2, 3)

# M, N, K, G: contiguous rows come in runs of 128 for all experts together; masked M is each expert's own.
GROUPED_SHAPES = {
    "m_grouped_fp8_gemm_nt_contiguous": (
        ((128, 128, 128, 1), (384, 192, 256, 4), (512, 128, 640, 3), (256, 704, 256, 2), (128, 64, 4096, 1)),
        (384, 128, 256, 4),
    ),
    "fp8_m_grouped_gemm_nt_masked": (
        (
            (1, 64, 128, 1), (5, 192, 256, 4), (33, 128, 640, 3), (64, 64, 128, 2), (130, 192, 256, 3),
            (257, 64, 128, 2), (128, 192, 256, 3),
        ),
        (17, 128, 256, 4),
    ),
    # M is that of all experts together, in runs of any length.
    "scaled_grouped_mm": (((1, 64, 128, 1), (70, 192, 256, 4), (129, 128, 640, 3)), (40, 128, 256, 4)),
}

# Tokens, experts, H, I, experts of a token, of a layer that quantises its input; what each is for stands beside it.
EXPERT_SHAPES = (
    "t=1,e=2,h=128,i=128,k=1",  # one row, one block
    "t=3,e=7,h=384,i=256,k=2",  # experts with one row and with none; the input's scales are square (3 x 3)
    "t=160,e=1,h=128,i=128,k=1",  # an expert whose rows end inside a second tile of 128
)
EXPERT_FAMILY_SHAPE = "t=9,e=5,h=256,i=128,k=3"
EXPERT_OPTIONS = (
    (EXPERT_FAMILY_SHAPE, "rounding=PRODUCT"),
    (EXPERT_FAMILY_SHAPE, "first=2"),  # experts of other ranks on both sides
    (EXPERT_FAMILY_SHAPE, "limit=7"),
    ("t=9,e=3,h=256,i=128,k=1", "on_input=1"),
    ("t=9,e=3,h=256,i=128,k=1", "rounding=PRODUCT,limit=0.5,first=2,on_input=1"),
)
EXPERT_ELSEWHERE = "t=17,e=2,h=128,i=128,k=1/first=2"  # most tokens go to other ranks, NaN among them

LOGITS_SHAPES = {
    "fp8_mqa_logits": ("m=7,n=128,h=32,d=128", "m=1,n=64,h=32,d=128", "m=5,n=256,h=64,d=128", "m=64,n=192,h=32,d=64"),
    "fp8_paged_mqa_logits": ("b=3,t=1,n=150,h=32,d=128", "b=1,t=1,n=64,h=32,d=128", "b=4,t=2,n=300,h=64,d=128"),
}
LINEAR_SHAPES = ((17, 64, 256), (1, 128, 128), (33, 192, 384))
# Ragged and aligned, one and several; keyed by the extents that the contract's ids name.
LAYOUT_SHAPES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("m", "c", "g"): ("m=1,c=1,g=1", "m=31,c=7,g=1", "m=128,c=4,g=1", "m=130,c=21,g=3"),
    ("m", "k", "g"): ("m=128,k=128,g=1", "m=130,k=896,g=1", "m=256,k=640,g=3"),
    ("m", "k"): ("m=128,k=128", "m=256,k=256", "m=512,k=64"),
    ("e", "h", "i"): ("e=1,h=128,i=128", "e=3,h=128,i=72", "e=2,h=256,i=192"),
    ("r",): ("r=1", "r=64", "r=500"),
    ("t", "e", "k"): ("t=1,e=8,k=1", "t=40,e=32,k=4"),
    ("b", "n"): ("b=1,n=64", "b=7,n=5000", "b=200,n=900"),
    ("s", "n"): ("s=1,n=8", "s=3,n=96"),
    ("s", "n", "k"): ("s=1,n=8,k=64", "s=3,n=96,k=128"),
    ("s",): ("s=1", "s=3"),
    ("e",): ("e=1", "e=16"),
}

# The shuffle of expert rows takes whole blocks of 32; block scales are exchanged in two halves; unread values are few.
OWN_SHAPES: Mapping[str, tuple[str, ...]] = {
    "rotate_weights_for_fi_trtllm_fp8_per_tensor_moe": ("e=1,h=128,i=128", "e=3,h=128,i=96", "e=2,h=256,i=192"),
    "prepare_fp8_moe_layer_for_fi": ("e=1,h=128,i=128", "e=3,h=128,i=72", "e=2,h=256,i=256"),
    "maybe_create_device_identity": ("m=1,k=1", "m=3,k=32"),
}

# M, K of a quantiser's input: one group, square scales, a ragged block of rows, long rows.
QUANT_SHAPES = ((1, 128), (3, 384), (31, 256), (129, 640), (6, 2688))
QUANT_FAMILY_SHAPE = (130, 384)


def cases(contract: str, profile: str) -> list[Case]:
    """The cases of one contract in one profile; empty for a contract that no case exists for.

    Raises
    ------
    CaseError
        The profile does not exist.
    """
    if profile not in PROFILES:
        raise CaseError(f"no profile {profile!r}; there are: {', '.join(PROFILES)}")
    if contract not in grammars():
        return []
    if profile == "compact":
        return _thinned(cases(contract, "quick"))
    lists = _LISTS.get(contract, _layout if grammars()[contract].schemes == ("-",) else _quantiser)
    ids = dict.fromkeys(lists(contract, profile))
    return [parse(text) for text in ids]


def _thinned(chosen: Iterable[Case]) -> list[Case]:
    """Those that show something for the first time."""
    seen: set[tuple[object, ...]] = set()
    kept = []
    for case in chosen:
        shows = {(case.dtypes, case.extents), (case.scheme, case.extents), ("family", case.family)}
        shows |= set(case.options)
        if case.family == "randn":  # on exact data equal scales hide much
            shows.add(("ordinary", case.dtypes))
        if shows - seen:
            kept.append(case)
        seen |= shows
    return kept


def _gemm(contract: str, profile: str) -> Iterable[str]:
    grammar = grammars()[contract]
    first, *others = grammar.schemes
    bias = "bias" in grammar.options
    for scheme in grammar.schemes:
        for m, n, k in BLOCK_SHAPES:
            yield _product(contract, grammar.dtypes[0], scheme, m, n, k, "randn", 1)
        if bias:
            yield _product(contract, grammar.dtypes[0], scheme, *FAMILY_SHAPE, "randn", 1, "bias=bf16/")
            yield _product(contract, grammar.dtypes[0], scheme, *FAMILY_SHAPE, "exact", 1, "bias=bf16/")
    if bias:
        for dtype in ("f16", "f32"):
            yield _product(contract, grammar.dtypes[0], first, *FAMILY_SHAPE, "randn", 1, f"bias={dtype}/")
    for m, n, k in (*LARGE_SHAPES, *((TAIL_SHAPE,) if contract in TAILS else ())):
        yield _product(contract, grammar.dtypes[0], first, m, n, k, "randn", 1)
    for scheme in others:
        yield _product(contract, grammar.dtypes[0], scheme, *LARGE_SHAPES[0], "randn", 1)
    for dtypes in grammar.dtypes:
        for family in ("randn", "codes") if "e5m2" in dtypes else ("exact", "ties", "randn", "codes"):
            yield _product(contract, dtypes, first, *FAMILY_SHAPE, family, 2)
        if _operands(dtypes) != _operands(grammar.dtypes[0]):  # kernels change at M = 32
            yield _product(contract, dtypes, first, *BLOCK_SHAPES[1], "randn", 2)
    for scheme in (first, *others) if profile == "full" else (first,):
        for family in grammar.families:
            yield _product(contract, grammar.dtypes[0], scheme, *FAMILY_SHAPE, family, 1)
    if profile == "full":
        for m, n, k in FULL_SHAPES:
            yield _product(contract, grammar.dtypes[0], first, m, n, k, "randn", 1)
        for shape in MORE_SHAPES:
            for seed in SEEDS:
                for family in grammar.families:
                    yield _product(contract, grammar.dtypes[0], first, *shape, family, seed)


def _operands(dtypes: str) -> str:
    """``bf16xe4m3-bf16`` -> ``bf16xe4m3``."""
    return dtypes.partition("-")[0]


def _product(
    contract: str, dtypes: str, scheme: str, m: int, n: int, k: int, family: str, seed: int, options: str = ""
) -> str:
    return f"{contract}/{dtypes}/{scheme}/m={m},n={n},k={k}/{options}family={family}/seed={seed}"


def _grouped(contract: str, profile: str) -> Iterable[str]:
    grammar = grammars()[contract]
    heads = [f"{contract}/{dtypes}/{grammar.schemes[0]}" for dtypes in grammar.dtypes]
    shapes, family_shape = GROUPED_SHAPES[contract]
    for shape in shapes:
        yield _group_case(heads[0], shape, "randn", 1)
    for family in grammar.families:
        for seed in SEEDS if profile == "full" else SEEDS[:1]:
            yield _group_case(heads[0], family_shape, family, seed)
    for head in heads[1:]:
        yield _group_case(head, family_shape, "randn", 2)


def _group_case(head: str, shape: tuple[int, int, int, int], family: str, seed: int) -> str:
    m, n, k, g = shape
    return f"{head}/m={m},n={n},k={k},g={g}/family={family}/seed={seed}"


def _logits(contract: str, profile: str) -> Iterable[str]:
    head = f"{contract}/e4m3xe4m3-f32/tensor:token"
    first, *shapes = LOGITS_SHAPES[contract]
    for shape in shapes:
        yield f"{head}/{shape}/family=randn/seed=1"
        yield f"{head}/{shape}/clean=1/family=randn/seed=1"
    for family in grammars()[contract].families:
        for seed in SEEDS if profile == "full" else SEEDS[:1]:
            yield f"{head}/{first}/family={family}/seed={seed}"


def _linear(contract: str, profile: str) -> Iterable[str]:
    grammar = grammars()[contract]
    for scheme in grammar.schemes:
        head = f"{contract}/{grammar.dtypes[0]}/{scheme}"
        for m, n, k in LINEAR_SHAPES:
            yield f"{head}/m={m},n={n},k={k}/family=randn/seed=1"
        m, n, k = LINEAR_SHAPES[0]
        yield f"{head}/m={m},n={n},k={k}/bias=bf16/family=randn/seed=1"
        for family in grammar.families:
            for seed in SEEDS if profile == "full" else SEEDS[:1]:
                yield f"{head}/m={m},n={n},k={k}/family={family}/seed={seed}"
    for dtypes in grammar.dtypes[1:]:
        yield f"{contract}/{dtypes}/{grammar.schemes[0]}/m=17,n=64,k=256/family=randn/seed=1"


def _experts(contract: str, profile: str) -> Iterable[str]:
    """Input that is quantised already, then input that the layer quantises."""
    quantised, wide = grammars()[contract].dtypes
    for scheme in grammars()[contract].schemes:
        head = f"{contract}/{quantised}/{scheme}"
        for shape in ("t=1,e=2,h=128,i=128,k=1", "t=9,e=5,h=256,i=128,k=3"):
            for family in ("randn", "codes", "zeros", "outlier"):
                for seed in SEEDS if profile == "full" else SEEDS[:1]:
                    yield f"{head}/{shape}/family={family}/seed={seed}"
    yield from _wide_experts(f"{contract}/{wide}", profile)


def _wide_experts(head: str, profile: str) -> Iterable[str]:
    """Shapes; every option, alone and together; every family. With a given scale: one shape and every family."""
    blocks, tensor = grammars()["moe_fp8"].schemes
    for shape in EXPERT_SHAPES:
        yield f"{head}/{blocks}/{shape}/family=randn/seed=1"
    for shape, options in EXPERT_OPTIONS:
        for seed in SEEDS if profile == "full" else SEEDS[:1]:
            yield f"{head}/{blocks}/{shape}/{options}/family=randn/seed={seed}"
    for scheme in (blocks, tensor):
        for family in grammars()["moe_fp8"].families:
            for seed in SEEDS if profile == "full" else SEEDS[:1]:
                yield f"{head}/{scheme}/{EXPERT_FAMILY_SHAPE}/family={family}/seed={seed}"
    yield f"{head}/{blocks}/{EXPERT_ELSEWHERE}/family=nan/seed=1"


def _tensor_experts(contract: str, profile: str) -> Iterable[str]:
    """An aligned and a padded intermediate size, one rank of several, every kind of logits."""
    head = f"{contract}/{grammars()[contract].dtypes[0]}/tensor:tensor"
    small, ranks, padded = "t=1,g=2,e=2,h=128,i=128", "t=33,g=9,e=3,h=128,i=64", "t=17,g=6,e=3,h=160,i=72"
    for family in grammars()[contract].families:
        for seed in SEEDS if profile == "full" else SEEDS[:1]:
            yield f"{head}/{padded}/family={family}/seed={seed}"
    yield f"{head}/{small}/family=randn/seed=1"
    for option in ("rank=1", "rank=2", "logits=bf16", "logits=f16", "logits=ties", "logits=far", "rank=1,logits=ties"):
        for seed in SEEDS if profile == "full" else SEEDS[:1]:
            yield f"{head}/{ranks}/{option}/family=randn/seed={seed}"


def _activation(contract: str, profile: str) -> Iterable[str]:
    """The first dtype on every family, clamped or not, rounded once or twice; the others on what rounds hardest."""
    grammar = grammars()[contract]
    for dtypes in grammar.dtypes:
        first = dtypes == grammar.dtypes[0]
        for option in ("", "each=1/", "limit=0.5/", "limit=7,each=1/"):
            for family in grammar.families if first else ("randn", "ties", "special", "nan"):
                for seed in SEEDS if profile == "full" else SEEDS[:1]:
                    yield f"{contract}/{dtypes}/-/m=33,i=96/{option}family={family}/seed={seed}"
    for shape in ("m=1,i=1", "m=3,i=1000"):
        yield f"{contract}/{grammar.dtypes[0]}/-/{shape}/family=randn/seed=1"


def _quantiser(contract: str, profile: str) -> Iterable[str]:
    """Shapes on ordinary data; every family with every single option; the other dtypes on what rounds hardest."""
    grammar = grammars()[contract]
    options = [f"{key}={value}/" for key, values in grammar.options.items() for value in values]
    whole = 128 if "128x1" in grammar.schemes else 1  # a contract that takes whole blocks of rows only
    m, k = -(-QUANT_FAMILY_SHAPE[0] // whole) * whole, QUANT_FAMILY_SHAPE[1]
    for scheme in grammar.schemes:
        for height, cols in QUANT_SHAPES:
            rows = -(-height // whole) * whole
            yield f"{contract}/{grammar.dtypes[0]}/{scheme}/m={rows},k={cols}/family=randn/seed=1"
        for option in ["", *options]:
            few = grammar.families if profile == "full" or option in ("", "ue8m0=1/") else grammar.families[:2]
            for family in few:
                for seed in SEEDS if profile == "full" else SEEDS[:1]:
                    yield f"{contract}/{grammar.dtypes[0]}/{scheme}/m={m},k={k}/{option}family={family}/seed={seed}"
    for dtypes in grammar.dtypes[1:]:
        for family in ("randn", "ties", "amax"):
            yield f"{contract}/{dtypes}/{grammar.schemes[0]}/m={max(31, whole)},k=256/family={family}/seed=1"


def _layout(contract: str, profile: str) -> Iterable[str]:
    """Every listed shape with every single option and family."""
    grammar = grammars()[contract]
    options = ["", *(f"{key}={value}/" for key, values in grammar.options.items() for value in values)]
    for shape in OWN_SHAPES.get(contract) or LAYOUT_SHAPES[grammar.extents]:
        for option in options:
            for family in grammar.families:
                for seed in SEEDS if profile == "full" else SEEDS[:1]:
                    yield f"{contract}/{grammar.dtypes[0]}/-/{shape}/{option}family={family}/seed={seed}"


_LISTS: dict[str, Callable[[str, str], Iterable[str]]] = {
    "fp8_gemm_nt": _gemm,
    "cutlass_scaled_mm": _gemm,
    "cutlass_w8a8_scaled_mm": _gemm,
    "rocm_per_tensor_w8a8_scaled_mm": _gemm,
    "torch_per_tensor_w8a8_scaled_mm": _gemm,
    "Fp8LinearOp": _linear,
    "moe_fp8": _experts,
    "apply_fi_trtllm_fp8_per_tensor_moe": _tensor_experts,
    "silu_and_mul": _activation,
    "torch_per_token_w8a8_scaled_mm": _gemm,
    "torch_channelwise_w8a8_scaled_mm": _gemm,
    "fp8_blockscale_gemm_sm90": _gemm,
    "flashinfer_fp8_blockscale_gemm": _gemm,
    "dynamic_flashinfer_deepgemm_blockscale_gemm": _gemm,
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel": _gemm,
    "m_grouped_fp8_gemm_nt_contiguous": _grouped,
    "fp8_m_grouped_gemm_nt_masked": _grouped,
    "scaled_grouped_mm": _grouped,
    "fp8_mqa_logits": _logits,
    "fp8_paged_mqa_logits": _logits,
}
