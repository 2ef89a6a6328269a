"""Cases of the products of MX and NVFP4: rows and K blocks beside the borders of tiles, scales of every size, poison.

Every byte of a scale memory that no scale lies in holds poison (:data:`oracle.routines.mx.cases.POISON`): NaN of either
format, the largest finite values, -0. Rows that no group owns hold NaN codes or arbitrary ones.

NaN stands there, in codes of 8 bits and in a scale of the family ``nan``; E2M1 has none.

Source: derived in :mod:`oracle.routines.data`; the layouts of scales as :mod:`oracle.truth.layout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from oracle.errors import CaseError
from oracle.numbers.formats import E2M1, decode
from oracle.numbers.rounding import Overflow, Rounding, encode
from oracle.routines import base, data
from oracle.routines.case import DTYPES, Case, Grammar, seeds, with_corners
from oracle.routines.mx.cases import POISON
from oracle.routines.mx.contract import pack
from oracle.routines.mx_products.contract import MX, NV, PACKED, UE4M3, UE8M0, Fp8Fp4, MxProduct, Side
from oracle.routines.mx_products.deep_gemm import KGroupedGemmTn, Turned, turned
from oracle.routines.products.grouped import RUN
from oracle.truth.layout import WIDTH

FAMILIES = ("randn", "exact", "codes", "zeros", "cancel", "heavy", "wide", "nan", "subnormal")
SCHEMES = {"1x16": (NV, UE4M3), "1x32": (MX, UE8M0)}
FOUR_BITS = "e2m1"
# One row and one whole tile of scales; a row and columns beyond a tile; fewer columns than a tile; a long K.
SHAPES = ((1, 128, 256), (130, 136, 160), (33, 128, 352), (9, 192, 1056))
FAMILY_SHAPE = (17, 136, 224)
SHUFFLED_SHAPE = (17, 160, 224)
EVEN_SHAPES = ((2, 128, 256), (18, 136, 224))
Shape = tuple[int, int, int, int]
NO_NAN = 0xBF  # clears a bit that every NaN of E4M3 has
# Bytes of scales by family: [low, high) of a, then of b.
E8M0_BYTES = {"exact": ((126, 129), (126, 129)), "wide": ((3, 200), (107, 147))}
E4M3_BYTES = {"wide": ((0x01, 0x7F), (0x01, 0x7F)), "codes": ((0x00, 0x7F), (0x00, 0x7F))}
ORDINARY = {UE8M0: ((119, 136), (119, 136)), UE4M3: ((0x28, 0x59), (0x28, 0x59))}
HALVES = (0x30, 0x38, 0x40)  # 0.5, 1 and 2 of E4M3
NAN_BYTE = {UE8M0: 0xFF, UE4M3: 0x7F}


def of_scheme(case: Case) -> tuple[int, torch.dtype]:
    """Codes of a scale, and its dtype."""
    return SCHEMES[case.scheme]


def elements(case: Case) -> tuple[str, str]:
    """The words of both operands."""
    a, _, b = case.dtypes.partition("-")[0].partition("x")
    return a, b


def codes(case: Case, name: str, part: int, rows: int, k: int) -> Tensor:
    """An operand: ``[rows, K]`` of its 8-bit dtype, or ``[rows, K / 2]`` uint8, two codes of E2M1 a byte.

    Raises CaseError: K of E2M1 is odd.
    """
    word, side = elements(case)[part], "ab"[part]
    if word != FOUR_BITS:
        return data.operand(case.label(name), case.family, rows, k, dtype=DTYPES[word], side=side)
    if k % 2:
        raise CaseError(f"k={k} of {case.contract}: codes of four bits lie two in a byte")
    if case.family == "codes":
        return pack(torch.from_numpy(case.stream(name).integers(0, 16, (rows, k))).to(torch.uint8))
    family = "randn" if case.family == "nan" else case.family
    value = decode(data.operand(case.label(name), family, rows, k, dtype=torch.float8_e4m3fn, side=side))
    value = value * {"exact": 1.0, "heavy": 16.0, "subnormal": 64.0}.get(family, 1 / 64)  # of variance 128^2 made 2^2
    rounded = encode(value, E2M1, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE)
    return pack(rounded.to(torch.uint8))


def memory(case: Case, side: Side, part: int) -> Tensor:
    """The memory of the scales of an operand, ``[side.size]``: uint8 with poison where no scale lies, or float32.

    Float32 scales are powers of two.
    """
    stream, shape = case.stream(side.scale), (side.rows, side.columns)
    if side.dtype is torch.float32:
        low, high = E8M0_BYTES.get(case.family, ORDINARY[UE8M0])[part]
        powers = torch.empty(side.size, dtype=torch.int32, device="cpu")
        powers[:] = torch.from_numpy(stream.integers(low, high, (side.size,))).to(torch.int32) << 23
        return powers.view(torch.float32)
    if side.dtype is UE4M3 and case.family == "exact":
        scales = torch.tensor(HALVES, dtype=torch.uint8, device="cpu")[torch.from_numpy(stream.integers(0, 3, shape))]
    else:
        special = E4M3_BYTES if side.dtype is UE4M3 else E8M0_BYTES
        low, high = special.get(case.family, ORDINARY[side.dtype])[part]
        scales = torch.from_numpy(stream.integers(low, high, shape)).to(torch.uint8)
    if case.family == "nan":
        scales.view(-1)[int(stream.integers(0, scales.numel(), (1,))[0])] = NAN_BYTE[side.dtype]
    held = POISON.repeat(side.size // len(POISON) + 1)[: side.size].clone()
    if side.tile == PACKED:  # a kernel multiplies what is behind the last block with zeros
        held[held == NAN_BYTE[side.dtype]] = 0
    held[side.at] = scales
    return held


def as_words(flat: Tensor, shape: tuple[int, ...], *, across: bool) -> Tensor:
    """The bytes ``flat`` ``[4 * words]``, uint8, as int32 words of the shape ``shape``, strided as DeepGEMM holds them.

    The words of one block lie one behind the other, at strides that are multiples of 4 rows; lanes behind the last row
    are NaN. ``across``: the rows are the last axis of ``shape``.
    """
    words = flat.view(torch.int32).reshape(shape)
    words = words if across else words.mT
    rows = words.shape[-1]
    held = torch.full((*words.shape[:-1], -(-rows // WIDTH) * WIDTH), -1, dtype=torch.int32, device="cpu")
    held[..., :rows] = words
    return held[..., :rows] if across else held[..., :rows].mT


def alpha(case: Case, name: str, count: int = 1) -> Tensor:
    """Factors ``[count]``, float32, finite: around 2^-8, and 0.5 where sums are exact."""
    if case.family == "exact":
        return torch.full((count,), 0.5, dtype=torch.float32, device="cpu")
    return data.scales(case.label(name), "randn", (count,))


def bias(case: Case, n: int) -> Tensor:
    """A bias ``[N]`` of the dtype that the id names, finite; small integers on exact data."""
    dtype = DTYPES[str(case.option("bias"))]
    if case.family == "exact":
        return data.small_integers(case.label("bias"), (n,), bound=8, dtype=dtype)
    return data.normal(case.label("bias"), (n,), dtype=dtype)


def contract_of(case: Case) -> MxProduct:
    contract = base.get(case.contract)
    assert isinstance(contract, MxProduct)
    return contract


def with_scales(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """``inputs`` with the memories of both scales."""
    sides = contract_of(case).sides(inputs, case.call_options())
    for part, side in enumerate(sides):
        dtype = inputs[side.scale].dtype if side.scale in inputs else torch.uint8
        scales = memory(case, side, part)
        inputs[side.scale] = scales if scales.dtype is torch.float32 else scales.view(dtype)
    return inputs


# --- dense --------------------------------------------------------------------------------------------------------


def _dense(case: Case) -> dict[str, Tensor]:
    """b is the ``[K, N]`` view of a row-major weight."""
    m, n, k = case["m"], case["n"], case["k"]
    if k % MX:
        raise CaseError(f"k={k} of {case.contract} is not a multiple of {MX}")
    return {"a": codes(case, "a", 0, m, k), "b": codes(case, "b", 1, n, k).t()}


def _mm(case: Case) -> dict[str, Tensor]:
    inputs = with_scales(case, _dense(case))
    if case.contract == "mm_fp4" and case.option("alpha") != "none":
        inputs["alpha"] = alpha(case, "alpha")
    return inputs


def _options(case: Case) -> dict[str, object]:
    return {"out_dtype": case.out_dtype}


def _small_tiles(case: Case) -> dict[str, object]:
    if case.option("order") == "shuffled" and case["n"] % 32:
        raise CaseError(f"n={case['n']} of {case.contract}: shuffled rows come in blocks of 32")
    shuffled = {"shuffled": True} if case.option("order") else {}
    return _options(case) | {"use_8x4_sf_layout": case.option("layout") == "8x4"} | shuffled


def _fp4(case: Case) -> dict[str, object]:
    width, dtype = of_scheme(case)
    return _small_tiles(case) | {"block_size": width, "use_nvfp4": dtype is UE4M3}


def _scaled_mm(case: Case) -> dict[str, Tensor]:
    operands, (_, dtype) = _dense(case), of_scheme(case)
    if dtype is UE4M3 and elements(case)[0] != FOUR_BITS:
        raise CaseError(f"{case.dtypes} with {case.scheme}: scales of 16 belong to codes of four bits")
    empty = torch.empty(0, dtype=dtype, device="cpu")
    inputs = with_scales(case, {"mat_a": operands["a"], "mat_b": operands["b"], "scale_a": empty, "scale_b": empty})
    if case.option("levels") == "2":
        inputs |= {f"global_scale_{side}": alpha(case, f"global_scale_{side}") for side in "ab"}
    return inputs | ({"bias": bias(case, case["n"])} if case.option("bias") else {})


def _swizzle(case: Case) -> dict[str, object]:
    return _options(case) | {"swizzle": "NO_SWIZZLE" if case.option("swizzle") == "none" else "SWIZZLE_32_4_4"}


# --- batched and grouped ------------------------------------------------------------------------------------------


def _weights(case: Case, name: str, groups: int, n: int, k: int) -> Tensor:
    """``[G, N, K]`` or packed."""
    flat = codes(case, name, 1, groups * n, k)
    return flat.reshape(groups, n, flat.shape[1])


def _batched(case: Case) -> dict[str, Tensor]:
    batch, m, n, k = case["g"], case["m"], case["n"], case["k"]
    if k % MX:
        raise CaseError(f"k={k} of {case.contract} is not a multiple of {MX}")
    a = codes(case, "a", 0, batch * m, k).reshape(batch, m, k)
    return with_scales(case, {"a": a, "b": _weights(case, "b", batch, n, k).mT})


def _placement(case: Case) -> dict[str, object]:
    return _options(case) | {"placement": case.option("placement") or "rows"}


def _ends(case: Case, name: str, unit: int, used: int) -> list[int]:
    """Where the rows of each expert end: multiples of ``unit``; of several experts the second has no rows."""
    ends = sorted(int(x) * unit for x in case.stream(name).integers(0, used // unit + 1, (case["g"],)))
    ends[-1] = used
    if len(ends) > 1:
        ends[0] = max(ends[0], min(unit, used))
        ends[1] = ends[0]
        ends = [*ends[:-1], used]
    return sorted(ends)


def _pointers(case: Case) -> dict[str, Tensor]:
    """Rows in runs of multiples of 4, as FlashInfer wants them; the last run takes what is left."""
    m, n, k, g = case["m"], case["n"], case["k"], case["g"]
    if k % MX:
        raise CaseError(f"k={k} of {case.contract} is not a multiple of {MX}")
    inputs = {"a": codes(case, "a", 0, m, k), "b": _weights(case, "b", g, n, k)}
    ends = _ends(case, "m_indptr", 4 if m >= 4 else 1, m)
    inputs["m_indptr"] = torch.tensor([0, *ends], dtype=torch.int32, device="cpu")
    if case.contract == "group_gemm_nvfp4_nt_groupwise" and case.option("alpha") != "none":
        inputs["alpha"] = alpha(case, "alpha", g)
    return with_scales(case, inputs)


def _unowned(inputs: dict[str, Tensor], name: str, rows: Tensor) -> None:
    """NaN codes in rows that no group owns; 4-bit codes have none and become the largest."""
    filled = inputs[name].clone()
    filled.view(torch.uint8).reshape(-1, filled.shape[-1])[rows] = 0x7F
    inputs[name] = filled


def _offsets(case: Case) -> dict[str, Tensor]:
    """Runs of any length; the last eighth of the rows, where there are eight, belongs to nobody."""
    m, n, k, g = case["m"], case["n"], case["k"], case["g"]
    if k % MX:
        raise CaseError(f"k={k} of {case.contract} is not a multiple of {MX}")
    _, dtype = of_scheme(case)
    if dtype is UE4M3 and elements(case)[0] != FOUR_BITS:
        raise CaseError(f"{case.dtypes} with {case.scheme}: scales of 16 belong to codes of four bits")
    empty = torch.empty(0, dtype=dtype, device="cpu")
    inputs = {"mat_a": codes(case, "mat_a", 0, m, k), "mat_b": _weights(case, "mat_b", g, n, k)}
    ends = _ends(case, "offs", 1, m - m // 8)
    inputs |= {"offs": torch.tensor(ends, dtype=torch.int32, device="cpu"), "scale_a": empty, "scale_b": empty}
    _unowned(inputs, "mat_a", torch.arange(m, device="cpu") >= ends[-1])
    inputs = with_scales(case, inputs)
    if case.option("room") == "more":  # torchao allocates up to 128 rows of scales more for each group
        inputs["scale_a"] = torch.cat([inputs["scale_a"].view(torch.uint8), POISON.repeat(128)]).view(dtype)
    if case.option("levels") == "2":
        inputs |= {f"global_scale_{side}": alpha(case, f"global_scale_{side}", g) for side in "ab"}
    return inputs


def _k_groups(case: Case) -> dict[str, Tensor]:
    """Groups of any multiple of 32; the second of several is empty, and a last eighth of K belongs to nobody."""
    m, n, k = case["m"], case["n"], case["k"]
    if k % MX:
        raise CaseError(f"k={k} of {case.contract} is not a multiple of {MX}")
    inputs = {"mat_a": codes(case, "mat_a", 0, m, k), "mat_b": codes(case, "mat_b", 1, n, k)}
    ends = _ends(case, "offs", MX, k - k // 8 // MX * MX)
    empty = torch.empty(0, dtype=torch.uint8 if case.option("scales") else UE8M0, device="cpu")
    inputs |= {"offs": torch.tensor(ends, dtype=torch.int32, device="cpu"), "scale_a": empty, "scale_b": empty}
    for name in ("mat_a", "mat_b"):
        inputs[name].view(torch.uint8)[:, ends[-1] :] = 0x7F
    inputs = with_scales(case, inputs)
    if case.option("room") == "more":
        for name in ("scale_a", "scale_b"):
            inputs[name] = torch.cat([inputs[name].view(torch.uint8), POISON.repeat(128)]).view(inputs[name].dtype)
    return inputs


def _with_powers(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Float32 scales in the shapes that the granularities give, or their exponents in words."""
    contract = contract_of(case)
    assert isinstance(contract, Fp8Fp4 | KGroupedGemmTn)
    options, names = case.call_options(), ("a_scale", "b_scale")
    if packed := case.option("scales") == PACKED:
        if options.get("gran_n", 1) != 1:
            raise CaseError(f"{case.scheme} of {case.contract}: words hold the exponents of one row")
        inputs = inputs | dict.fromkeys(names, torch.empty(0, dtype=torch.int32, device="cpu"))
    shapes, sides = contract.scale_shapes(inputs, options), contract.sides(inputs, options)
    scales = {}
    for part, (side, due) in enumerate(zip(sides, shapes, strict=True)):
        flat = memory(case, side, part)
        across = side.codes in (contract.turned if isinstance(contract, Turned) else ())
        columns = packed and isinstance(contract, Fp8Fp4)
        scales[side.scale] = (
            as_words(flat, due, across=across)
            if columns
            else (flat.view(torch.int32 if packed else torch.float32).reshape(due))
        )
    return inputs | scales


def _fp8_fp4(case: Case) -> dict[str, Tensor]:
    m, n, k = case["m"], case["n"], case["k"]
    if k % MX:
        raise CaseError(f"k={k} of {case.contract} is not a multiple of {MX}")
    return _plus(case, _with_powers(case, {"a": codes(case, "a", 0, m, k), "b": codes(case, "b", 1, n, k)}))


def _plus(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs, and where the id asks for it a summand of the sums' own size."""
    m, n = case["m"], case["n"]
    if case.option("c") is None:
        return inputs
    if case.family == "exact":
        return inputs | {"c": data.small_integers(case.label("c"), (m, n), bound=8, dtype=case.out_dtype)}
    size = contract_of(case).reference(inputs, **case.call_options() | {"out_dtype": None})  # of the sums' own size
    assert isinstance(size, Tensor)
    c = data.normal(case.label("c"), (m, n), dtype=torch.float32) * float(size.abs().median().clamp(2.0**-60, 2.0**60))
    return inputs | {"c": c.to(case.out_dtype)}


def _turned(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Operands of a transposed form as it takes them, and their scales."""
    contract = contract_of(case)
    assert isinstance(contract, Turned)
    odd = [name for name in contract.turned if inputs[name].dtype is torch.uint8 and inputs[name].shape[-2] % 2]
    if odd:
        raise CaseError(f"{odd[0]} of {case.contract} has an odd number of rows, of which two lie in a byte")
    operands = {name: turned(x) if name in contract.turned else x for name, x in inputs.items()}
    return _with_powers(case, operands)


def _transposed(case: Case) -> dict[str, Tensor]:
    m, n, k = case["m"], case["n"], case["k"]
    if k % MX:
        raise CaseError(f"k={k} of {case.contract} is not a multiple of {MX}")
    return _plus(case, _turned(case, {"a": codes(case, "a", 0, m, k), "b": codes(case, "b", 1, n, k)}))


def _k_grouped(case: Case) -> dict[str, Tensor]:
    """Groups of any multiple of a scale's codes; the second of several has none."""
    m, n, k, g = case["m"], case["n"], case["k"], case["g"]
    gran = _k_options(case)["gran_k"]
    assert isinstance(gran, int)
    if k % gran:
        raise CaseError(f"k={k} of {case.contract} is not a multiple of {gran}")
    ends = _ends(case, "ks", gran, k)
    ks = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    inputs = {
        "a": turned(codes(case, "a", 0, m, k)),
        "b": turned(codes(case, "b", 1, n, k)),
        "ks": torch.tensor(ks, dtype=torch.int32, device="cpu"),
    }
    if case.family == "exact":
        c = data.small_integers(case.label("c"), (g * m, n), bound=8, dtype=torch.float32)
    else:
        c = data.normal(case.label("c"), (g * m, n), dtype=torch.float32) * 64.0
    return _with_powers(case, inputs) | {"c": c.reshape(g, m, n)}


def _k_options(case: Case) -> dict[str, object]:
    return _options(case) | {"gran_k": int(case.granularity[0].split("x")[1])}


def _ended(case: Case) -> dict[str, Tensor]:
    """The runs of :func:`_contiguous` by their ends."""
    inputs = _contiguous(case)
    indices, ends, last = inputs.pop("m_indices").tolist(), [], 0
    for g in range(case["g"]):
        last = max([row + 1 for row, expert in enumerate(indices) if expert == g], default=last)
        ends.append(last)
    return inputs | {"ends": torch.tensor(ends, dtype=torch.int32, device="cpu")}


def _contiguous(case: Case) -> dict[str, Tensor]:
    """Runs of whole tiles of 128 rows, of which the tail is padding; some experts empty."""
    m, n, k, g = case["m"], case["n"], case["k"], case["g"]
    if m % RUN or k % MX:
        raise CaseError(f"m={m}, k={k} of {case.contract}: runs are multiples of {RUN} rows, K of {MX}")
    stream, tiles = case.stream("m_indices"), m // RUN
    owner = sorted(stream.integers(0, g, (tiles,)).tolist())
    used = stream.integers(1, RUN + 1, (tiles,)).tolist()
    indices = torch.full((m,), -1, dtype=torch.int32, device="cpu")
    for tile, expert in enumerate(owner):
        last = tile + 1 == tiles or owner[tile + 1] != expert
        indices[tile * RUN : tile * RUN + (used[tile] if last else RUN)] = expert
    inputs = {"a": codes(case, "a", 0, m, k), "b": _weights(case, "b", g, n, k), "m_indices": indices}
    _unowned(inputs, "a", indices < 0)
    return _turned(case, inputs) if isinstance(contract_of(case), Turned) else _with_powers(case, inputs)


def _masked(case: Case) -> dict[str, Tensor]:
    """A few, none (group 0 of several) or all (the last) of M rows are real."""
    m, n, k, g = case["m"], case["n"], case["k"], case["g"]
    if k % MX:
        raise CaseError(f"k={k} of {case.contract} is not a multiple of {MX}")
    real = torch.from_numpy(case.stream("masked_m").integers(0, m + 1, (g,))).to(torch.int32)
    real[0], real[-1] = 0, m
    flat = codes(case, "a", 0, g * m, k)
    inputs = {"a": flat.reshape(g, m, flat.shape[1]), "b": _weights(case, "b", g, n, k), "masked_m": real}
    _unowned(inputs, "a", (torch.arange(m, device="cpu")[None, :] >= real[:, None]).flatten())
    return _with_powers(case, inputs)


def _granularity(case: Case) -> dict[str, object]:
    """``1x128:1x32``: of a, then of b; ``128x128`` of b is a scale for 128 rows too."""
    of_a, of_b = (part.split("x") for part in case.granularity)
    return _options(case) | {"gran_k_a": int(of_a[1]), "gran_k_b": int(of_b[1]), "gran_n": int(of_b[0])}


# --- ids of a profile -----------------------------------------------------------------------------------------------


def _ids(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    """Shapes and single options on ordinary data, families at one shape, every other pair of dtypes and scheme."""
    pairs = [(dtypes, scheme) for dtypes in grammar.dtypes for scheme in grammar.schemes if _fits(dtypes, scheme)]
    head = _head(contract, *pairs[0])
    options = ["", *(f"{key}={value}/" for key, values in grammar.options.items() for value in values)]
    for shape in SHAPES:
        yield _id(head, shape, "randn", 1)
    for option in options[1:]:
        near = next((pair for pair in pairs if _admits(option, *pair)), pairs[0])
        shape = SHUFFLED_SHAPE if option.startswith("order") else FAMILY_SHAPE
        yield _id(_head(contract, *near), shape, "randn", 2, option)
        yield _id(_head(contract, *near), shape, "exact", 2, option)
    for dtypes, scheme in pairs[1:]:
        few = [family for family in ("randn", "exact", "nan") if family in grammar.families]
        for family in few if profile == "quick" else grammar.families:
            yield _id(_head(contract, dtypes, scheme), FAMILY_SHAPE, family, 1)
    for family in grammar.families:
        for seed in seeds(profile):
            yield _id(head, FAMILY_SHAPE, family, seed)


def _head(contract: str, dtypes: str, scheme: str) -> str:
    return f"{contract}/{dtypes}/{scheme}"


def _fits(dtypes: str, scheme: str) -> bool:
    """Scales of 16 belong to codes of four bits."""
    return scheme != "1x16" or dtypes.startswith(f"{FOUR_BITS}x{FOUR_BITS}")


def _admits(option: str, dtypes: str, scheme: str) -> bool:
    return not option.startswith("levels") or scheme == "1x16"


def _grouped(contract: str, grammar: Grammar, profile: str, *, sizes: tuple[Shape, ...]) -> Iterable[str]:
    """``sizes`` (M, N, K, G) on ordinary data, the last of them for every family, option, pair and scheme."""
    pairs = [(dtypes, scheme) for dtypes in grammar.dtypes for scheme in grammar.schemes if _fits(dtypes, scheme)]
    head, last = _head(contract, *pairs[0]), sizes[-1]
    for size in sizes[:-1]:
        yield _group_id(head, size, "randn", 1)
    for option in (f"{key}={value}/" for key, values in grammar.options.items() for value in values):
        near = next((pair for pair in pairs if _admits(option, *pair)), pairs[0])
        for family in ("randn", "exact"):
            yield _group_id(_head(contract, *near), last, family, 2, option)
    for dtypes, scheme in pairs[1:]:
        for family in ("randn",) if profile == "quick" else grammar.families:
            yield _group_id(_head(contract, dtypes, scheme), last, family, 1)
    for family in grammar.families:
        for seed in seeds(profile):
            yield _group_id(head, last, family, seed)


def _few(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    """Even shapes: the first on ordinary data, the last for every family, pair of dtypes and granularity."""
    pairs = [(dtypes, scheme) for dtypes in grammar.dtypes for scheme in grammar.schemes]
    for shape in EVEN_SHAPES[:-1]:
        yield _id(_head(contract, *pairs[0]), shape, "randn", 1)
    for dtypes, scheme in pairs[1:]:
        for family in ("randn",) if profile == "quick" else grammar.families:
            yield _id(_head(contract, dtypes, scheme), EVEN_SHAPES[-1], family, 1)
    for option in (f"{key}={value}/" for key, values in grammar.options.items() for value in values):
        for shape, family in zip(EVEN_SHAPES, ("exact", "randn"), strict=True):
            yield _id(_head(contract, *pairs[0]), shape, family, 2, option)
    for family in grammar.families:
        for seed in seeds(profile):
            yield _id(_head(contract, *pairs[0]), EVEN_SHAPES[-1], family, seed)


def _group_id(head: str, size: Shape, family: str, seed: int, option: str = "") -> str:
    m, n, k, g = size
    return f"{head}/m={m},n={n},k={k},g={g}/{option}family={family}/seed={seed}"


def _id(head: str, shape: tuple[int, int, int], family: str, seed: int, option: str = "") -> str:
    m, n, k = shape
    return f"{head}/m={m},n={n},k={k}/{option}family={family}/seed={seed}"


_MNK, _MNKG = ("m", "n", "k"), ("m", "n", "k", "g")
_DEEP = ("e4m3xe2m1-bf16", "e4m3xe4m3-bf16", "e2m1xe2m1-bf16", "e2m1xe4m3-f32")
_GRANULARITIES = ("1x128:1x32", "1x32:1x32", "1x128:1x128", "1x128:128x128")
DEEP_FAMILIES = tuple(family for family in FAMILIES if family != "nan")  # 4-bit codes and powers of two have no NaN
_BIAS = ("bf16", "f16", "f32")
_WORDS = {"scales": (PACKED,)}

_PLAIN: Mapping[str, Grammar] = {
    "mm_mxfp8": Grammar(
        _MNK, ("e4m3xe4m3-bf16", "e4m3xe4m3-f16"), ("1x32",), FAMILIES, _mm, _small_tiles,
        {"layout": ("8x4",), "order": ("shuffled",)},
        listed=_ids, domain="k % 32 == 0, k >= 128, n >= 128",
    ),
    "mm_fp4": Grammar(
        _MNK, ("e2m1xe2m1-bf16", "e2m1xe2m1-f16"), ("1x16", "1x32"), FAMILIES, _mm, _fp4,
        {"layout": ("8x4",), "alpha": ("none",), "order": ("shuffled",)}, listed=_ids, domain="k % 32 == 0",
    ),
    "scaled_mm": Grammar(
        _MNK, ("e4m3xe4m3-bf16", "e2m1xe2m1-bf16", "e5m2xe4m3-bf16", "e4m3xe4m3-f32", "e2m1xe2m1-f16"),
        ("1x32", "1x16"), FAMILIES, _scaled_mm, _swizzle, {"levels": ("2",), "swizzle": ("none",), "bias": _BIAS},
        listed=_ids, domain="k % 32 == 0, n % 16 == 0",
    ),
    "bmm_mxfp8": Grammar(
        _MNKG, ("e4m3xe4m3-bf16", "e5m2xe4m3-bf16", "e4m3xe4m3-f16"), ("1x32",), FAMILIES, _batched, _placement,
        {"placement": ("batch",)},
        listed=partial(_grouped, sizes=((1, 128, 128, 1), (128, 128, 160, 2), (9, 136, 160, 3))),
        domain="k % 32 == 0, k >= 128, n >= 128",
    ),
    "group_gemm_mxfp8_mxfp4_nt_groupwise": Grammar(
        _MNKG, ("e4m3xe2m1-bf16", "e5m2xe2m1-bf16", "e4m3xe2m1-f16"), ("1x32",), FAMILIES, _pointers, _options,
        listed=partial(_grouped, sizes=((4, 128, 128, 1), (260, 72, 128, 4), (24, 136, 160, 3))),
        domain="k % 128 == 0, n % 8 == 0",
    ),
    "group_gemm_nvfp4_nt_groupwise": Grammar(
        _MNKG, ("e2m1xe2m1-bf16", "e2m1xe2m1-f16"), ("1x16",), FAMILIES, _pointers, _options, {"alpha": ("none",)},
        listed=partial(_grouped, sizes=((4, 128, 128, 1), (260, 72, 128, 4), (24, 136, 160, 3))),
        domain="k % 128 == 0, n % 8 == 0",
    ),
    "scaled_grouped_mm_mx": Grammar(
        _MNKG, ("e4m3xe4m3-bf16", "e2m1xe2m1-bf16"), ("1x32", "1x16"), FAMILIES, _offsets, _options,
        {"levels": ("2",), "room": ("more",)},
        listed=partial(_grouped, sizes=((1, 128, 128, 1), (300, 72, 128, 3), (33, 136, 160, 3))),
        domain="k % 32 == 0, n % 16 == 0",
    ),
    "scaled_grouped_mm_mx_k_groups": Grammar(
        _MNKG, ("e4m3xe4m3-bf16",), ("1x32",), FAMILIES, _k_groups, _options,
        {"room": ("more",), "scales": ("bytes",)},
        listed=partial(_grouped, sizes=((130, 72, 160, 1), (33, 136, 416, 4), (17, 40, 512, 3))),
        domain="k % 32 == 0, n % 16 == 0",
    ),
    "fp8_fp4_gemm_nt": Grammar(
        _MNK, _DEEP, _GRANULARITIES, DEEP_FAMILIES, _fp8_fp4, _granularity, {"c": ("1",), **_WORDS}, listed=_ids,
        domain="k % 32 == 0, n % 8 == 0",
        extra=("e4m3xe4m3-bf16/1x128:1x32/m=17,n=136,k=224/family=subnormal/seed=1",),
    ),
    "m_grouped_fp8_fp4_gemm_nt_contiguous": Grammar(
        _MNKG, _DEEP[:2], _GRANULARITIES[:2], DEEP_FAMILIES, _contiguous, _granularity, _WORDS,
        also_dtypes=_DEEP[2:], also_schemes=_GRANULARITIES[2:],
        listed=partial(_grouped, sizes=((384, 64, 128, 3), (256, 72, 160, 3))), domain="m % 128 == 0, k % 32 == 0",
    ),
    **{
        f"fp8_fp4_gemm_{form}": Grammar(
            _MNK, _DEEP, _GRANULARITIES, DEEP_FAMILIES, _transposed, _granularity, {"c": ("1",), **_WORDS},
            listed=_few,
            extra=("e4m3xe4m3-bf16/1x128:1x32/m=18,n=136,k=224/family=subnormal/seed=1",),
            domain="k % 32 == 0, m % 2 == 0, n % 8 == 0",
        )
        for form in ("nn", "tn", "tt")
    },
    "m_grouped_fp8_fp4_gemm_nn_contiguous": Grammar(
        _MNKG, _DEEP[:2], _GRANULARITIES[:2], DEEP_FAMILIES, _contiguous, _granularity, _WORDS,
        also_dtypes=_DEEP[2:], also_schemes=_GRANULARITIES[2:],
        listed=partial(_grouped, sizes=((256, 72, 160, 3),)), domain="m % 128 == 0, k % 32 == 0, n % 2 == 0",
    ),
    "m_grouped_fp8_fp4_gemm_nt_psum": Grammar(
        _MNKG, _DEEP[:2], _GRANULARITIES[:2], DEEP_FAMILIES, _ended, _granularity, _WORDS,
        also_dtypes=_DEEP[2:], also_schemes=_GRANULARITIES[2:],
        listed=partial(_grouped, sizes=((384, 64, 128, 3), (384, 72, 160, 4))), domain="m % 128 == 0, k % 32 == 0",
    ),
    "k_grouped_fp8_gemm_tn_contiguous": Grammar(
        _MNKG, ("e4m3xe4m3-f32",), ("1x32:1x32", "1x128:1x128"), DEEP_FAMILIES, _k_grouped, _k_options, _WORDS,
        listed=partial(_grouped, sizes=((132, 72, 128, 1), (20, 136, 512, 4))),
        domain="k % 128 == 0, m % 4 == 0, n % 4 == 0",
    ),
    "m_grouped_fp8_fp4_gemm_nt_masked": Grammar(
        _MNKG, _DEEP[:2], _GRANULARITIES[:2], DEEP_FAMILIES, _masked, _granularity, _WORDS,
        also_dtypes=_DEEP[2:], also_schemes=_GRANULARITIES[2:],
        listed=partial(_grouped, sizes=((1, 128, 256, 2), (17, 136, 160, 3))), domain="k % 32 == 0",
    ),
}  # fmt: skip  # a table, one row a line

# Two tiles of 128 rows of scales, two of four blocks, and a tail of K behind 128, on either side.
_CORNERS = ("m=144,n=144,k=160",)
_SIDES = ("m=144,n=16,k=160,g=2", "m=9,n=144,k=160,g=2")
GRAMMARS = with_corners(
    _PLAIN,
    {
        **dict.fromkeys(("mm_mxfp8", "mm_fp4", "scaled_mm"), _CORNERS),
        "bmm_mxfp8": ("m=144,n=144,k=160,g=2",),
        **dict.fromkeys(
            ("group_gemm_mxfp8_mxfp4_nt_groupwise", "group_gemm_nvfp4_nt_groupwise"),
            ("m=272,n=16,k=256,g=2", "m=8,n=144,k=256,g=2"),
        ),
        "scaled_grouped_mm_mx": ("m=272,n=16,k=160,g=2", _SIDES[1]),
        "scaled_grouped_mm_mx_k_groups": _SIDES,
        "fp8_fp4_gemm_nt": ("m=40,n=40,k=288",),
        "m_grouped_fp8_fp4_gemm_nt_contiguous": ("m=384,n=40,k=288,g=3",),
        "m_grouped_fp8_fp4_gemm_nt_masked": ("m=40,n=40,k=288,g=3",),
    },
)
