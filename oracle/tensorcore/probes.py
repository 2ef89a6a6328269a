"""Inputs that tell schedules apart: one fact each, read off the diagonal of a product.

A probe is a list of *cases*; a case says which products stand at which ``k``. Case ``i`` is row ``i`` of
``a`` and row ``i`` of ``b``, so its answer is element ``(i, i)`` of the output; a product ``s 2^e`` is split
into ``a = s 2^x`` and ``b = 2^y``, both representable. With ``G`` the group, ``t`` the aligner's fraction
bits and ``q = 2^(m-t)``:

single          one product in each row, each at another k: what comes back is it, or nothing can be read
masks           M at 0, -M at j, tiny ones elsewhere: the output counts the ones that are added after M and -M have
                met, so ``K - count`` is the size of the smallest partial sum that holds both (FPRev)
alignment       M, 2^-d M and -M in one group: what survives is ``tz_q(2^-d M)``, so t is the largest d that does
direction       the same with +0.75 q and -0.25 q: truncation, floor and nearest differ
accumulator     M + 2^-d M in one group, -M in the next: what survives passed the accumulator's rounding
store           values just above, on and below a tie of the output format
cancelling      random blocks, the second nearly minus the first: rounding in the promotion becomes visible
near_ties       per-channel scales and sums whose epilogue orders round to different outputs

Source: Xie et al., FPRev, USENIX ATC 2025, for the masks; Fasi et al., PeerJ CS 7:e330, for the rest.
Not covered: group sizes above 512, accumulators that depend on the element's place in a tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.errors import NumericsError
from oracle.numbers.formats import of_dtype
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.numbers.scaling import GROUP_128, TILE_128
from oracle.tensorcore.predict import epilogue, store
from oracle.tensorcore.schedules import Epilogue
from oracle.truth.gemm import ScaledProduct

Case = Mapping[int, float]
"""Products by their k; each is ``s 2^e`` with a significand ``s`` that the operand format holds."""


@dataclass(frozen=True)
class Shape:
    """What the kernel under test takes.

    Attributes
    ----------
    dtype : torch.dtype, of both operands.
    k : int, length of the sums, a multiple of 128.
    block, b_rows : int or None, scale blocks along K (None: one scale for a row) and rows of ``b`` that share a scale.
    edge : int, rows and columns of every probe, at least 64; tiled kernels want 128.
    """

    dtype: torch.dtype
    k: int = 512
    block: int | None = GROUP_128.columns
    b_rows: int = TILE_128.rows or 1
    edge: int = 128

    @property
    def blocks(self) -> int:
        """Scale blocks along K."""
        return 1 if self.block is None else -(-self.k // self.block)


def least_exponent(dtype: torch.dtype) -> int:
    """Exponent of the smallest operand the probes use: subnormal for 8 bits, normal for 16."""
    fmt = of_dtype(dtype)
    return max(fmt.emin - (fmt.fraction_bits if fmt.bits == 8 else 0), -50)


def greatest_exponent(dtype: torch.dtype) -> int:
    """Exponent of the largest power of two the probes use."""
    return min(math.frexp(of_dtype(dtype).max_finite)[1] - 1, 50)


def diagonal(cases: Sequence[Case], shape: Shape, *, background: float = 0.0) -> ScaledProduct:
    """At most :attr:`Shape.edge` cases as a product with unit scales; ``background`` is the product at every other
    k."""
    if len(cases) > shape.edge:
        raise NumericsError(f"{len(cases)} cases do not fit a probe of {shape.edge}; split them")
    pair = split(background, shape.dtype) if background else (0.0, 0.0)
    a = torch.full((shape.edge, shape.k), pair[0], dtype=torch.float64, device="cpu")
    b = torch.full((shape.edge, shape.k), pair[1], dtype=torch.float64, device="cpu")
    for row, case in enumerate(cases):
        for k, value in case.items():
            a[row, k], b[row, k] = split(value, shape.dtype)
    return scaled(encode(a, shape.dtype), encode(b, shape.dtype), shape)


def scaled(
    a: Tensor, b: Tensor, shape: Shape, *, a_scale: Tensor | None = None, b_scale: Tensor | None = None
) -> ScaledProduct:
    """A product of ``a`` ``[edge, K]`` and ``b`` ``[N, K]`` of a float dtype, with unit scales unless given.

    ``a_scale`` ``[edge, blocks]`` and ``b_scale`` ``[ceil(N / b_rows), blocks]`` are float32. No values are read.
    """
    ones_a = torch.ones((a.shape[0], shape.blocks), dtype=torch.float32, device="cpu")
    ones_b = torch.ones((-(-b.shape[0] // shape.b_rows), shape.blocks), dtype=torch.float32, device="cpu")
    sa, sb = ones_a if a_scale is None else a_scale, ones_b if b_scale is None else b_scale
    return ScaledProduct(a, b, sa, sb, shape.block or shape.k, shape.b_rows)


def split(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """Factors ``s 2^x`` and ``2^y`` of a product, both within the operand format's range."""
    if value == 0.0:
        return 0.0, 0.0
    low, high = least_exponent(dtype), greatest_exponent(dtype)
    significand, exponent = math.frexp(value)
    significand, exponent = 2 * significand, exponent - 1
    # A significand of several bits wants a normal factor; the power of two takes the rest.
    floor = max(low, of_dtype(dtype).emin) if abs(significand) != 1.0 else low
    x = min(high - (abs(significand) > 1.0), max(floor, exponent - exponent // 2))
    y = exponent - x
    if y < low:
        x, y = exponent - low, low
    if y > high:
        x, y = exponent - high, high
    if not (floor <= x <= high and low <= y <= high):
        raise NumericsError(f"no two {dtype} values have the product {value!r}")
    return significand * 2.0**x, 2.0**y


def encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float64 ``values`` of any shape rounded to the nearest of the format, as a tensor of ``dtype`` of the same shape;
    NaN beyond its largest."""
    return to_dtype(values, dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.NAN)


def single(shape: Shape) -> tuple[ScaledProduct, Tensor]:
    """A power of two at another k in every row, 1/4 to 4, which every format holds; also its output, float64 ``[edge,
    edge]``. No value is NaN or infinite."""
    rows = [{row % shape.k: 2.0 ** (row % 5 - 2)} for row in range(min(shape.edge, shape.k))]
    product = diagonal(rows, shape)
    wanted = torch.zeros((shape.edge, shape.edge), dtype=torch.float64, device="cpu")
    for row, case in enumerate(rows):
        wanted[row, row] = next(iter(case.values()))
    return product, wanted


def masks(shape: Shape, partners: Sequence[int]) -> tuple[ScaledProduct, float]:
    """M at 0 and -M at each partner, ones elsewhere; also the value of a one, to divide the output by."""
    big = 2.0 ** (2 * greatest_exponent(shape.dtype))
    one = 2.0 ** (2 * least_exponent(shape.dtype))
    return diagonal([{0: big, j: -big} for j in partners], shape, background=one), one


def alignment(shape: Shape, places: Sequence[int]) -> tuple[ScaledProduct, list[int]]:
    """M, 2^-d M, -M at three places of one group; the depths d, in order of the rows."""
    top = 2 * greatest_exponent(shape.dtype)
    depths = list(range(1, min(top - 2 * least_exponent(shape.dtype), 60) + 1))
    big = 2.0**top
    first, middle, last = places[:3]
    return diagonal([{first: big, middle: 2.0 ** (top - d), last: -big} for d in depths], shape), depths


def direction(shape: Shape, places: Sequence[int], *, align_bits: int) -> tuple[ScaledProduct, float]:
    """Rows +0.75 q, -0.25 q and +q next to M and -M; also q."""
    top = 2 * greatest_exponent(shape.dtype)
    q = 2.0 ** (top - align_bits)
    first, middle, last = places[:3]
    rows = [{first: 2.0**top, middle: x, last: -(2.0**top)} for x in (0.75 * q, -0.25 * q, q)]
    return diagonal(rows, shape), q


def accumulator(shape: Shape, group: Sequence[int], following: int) -> tuple[ScaledProduct, list[int]]:
    """M and 2^-d M in one group, -M in the next; the depths d."""
    top = 2 * greatest_exponent(shape.dtype)
    depths = list(range(1, 31))
    rows = [{group[0]: 2.0**top, group[1]: 2.0 ** (top - d), following: -(2.0**top)} for d in depths]
    return diagonal(rows, shape), depths


def accumulator_rounding(
    shape: Shape, group: Sequence[int], following: Sequence[int], *, out_bits: int
) -> tuple[ScaledProduct, float]:
    """Sums whose last bits lie at 0.75 of an ulp of the accumulator, positive and negative; also that ulp.

    ``3 x 1.75 M + 0.75 ulp`` has exponent ``m + 2``; the next group takes ``5.25 M`` away again.
    """
    top = 2 * greatest_exponent(shape.dtype) - 2
    big, ulp = 1.75 * 2.0**top, 2.0 ** (top + 2 - out_bits)
    rows = []
    for sign in (1.0, -1.0):
        row = {k: sign * big for k in group[:3]} | {group[3]: sign * 0.75 * ulp}
        rows.append(row | {k: -sign * big for k in following[:3]})
    return diagonal(rows, shape), ulp


def store_ties(shape: Shape, places: Sequence[int], *, out_dtype: torch.dtype) -> ScaledProduct:
    """Rows above a tie, on an even tie, on an odd tie, and their negatives, around 1."""
    ulp = 2.0 ** -of_dtype(out_dtype).fraction_bits
    above = {places[0]: 1.0, places[1]: ulp / 2, places[2]: ulp / 4}
    even = {places[0]: 1.0, places[1]: ulp / 2}
    odd = {places[0]: 1.0, places[1]: ulp, places[2]: ulp / 2}
    below = {places[0]: 1.0, places[1]: ulp / 4}
    rows = [above, even, odd, below]
    return diagonal(rows + [{k: -v for k, v in row.items()} for row in rows], shape)


def cancelling(shape: Shape, *, seed: int) -> ScaledProduct:
    """Random blocks, each odd one minus its neighbour, under scales that differ by a few parts in 2^20."""
    assert shape.block is not None
    random = torch.Generator().manual_seed(seed)
    a = torch.randn(shape.edge, shape.k, generator=random, dtype=torch.float64, device="cpu")
    b = torch.randn(shape.edge, shape.k, generator=random, dtype=torch.float64, device="cpu")
    for start in range(0, shape.k - shape.block, 2 * shape.block):
        here, there = (slice(s, s + shape.block) for s in (start, start + shape.block))
        a[:, there], b[:, there] = -a[:, here], b[:, here]
    a_scale, b_scale = _scales(shape, random)
    for block in range(1, shape.blocks, 2):
        nudge = 1 + 2.0**-20 * torch.rand(a_scale.shape[0], generator=random, dtype=torch.float32, device="cpu")
        a_scale[:, block] = a_scale[:, block - 1] * nudge
        b_scale[:, block] = b_scale[:, block - 1]
    return scaled(encode(a, shape.dtype), encode(b, shape.dtype), shape, a_scale=a_scale, b_scale=b_scale)


def randoms(shape: Shape, *, seed: int) -> ScaledProduct:
    """Normal operands and random scales."""
    random = torch.Generator().manual_seed(seed)
    draws = [torch.randn(shape.edge, shape.k, generator=random, dtype=torch.float64, device="cpu") for _ in range(2)]
    a, b = (encode(x, shape.dtype) for x in draws)
    a_scale, b_scale = _scales(shape, random)
    return scaled(a, b, shape, a_scale=a_scale, b_scale=b_scale)


def near_ties(shape: Shape, *, out_dtype: torch.dtype, seed: int) -> ScaledProduct:
    """One scale a row: sums and scales for which the three epilogue orders store different values.

    Per-tensor scales of ``b`` allow one value of it; the rows of ``a`` are then searched for that one.
    """
    random = torch.Generator().manual_seed(seed)
    # Orders differ in a float32 ulp of every third result; a store to p bits shows one in 2^(24 - p) of those.
    tries = 1 << (27 - min(of_dtype(out_dtype).fraction_bits + 1, 16))
    acc = torch.randint(1, 16, (tries,), generator=random, device="cpu").to(torch.float32)
    sa = torch.rand(tries, generator=random, dtype=torch.float32, device="cpu") + 0.5
    shared = shape.b_rows >= shape.edge
    sb = torch.rand(1 if shared else tries, generator=random, dtype=torch.float32, device="cpu").expand(tries) + 0.5
    factors = (epilogue(kind, acc, sa, sb) for kind in Epilogue if kind is not Epilogue.NONE)
    col, row, both = (store(inner * outer, out_dtype) for inner, outer in factors)
    distinct = [(col != row).nonzero()[:, 0], (col != both).nonzero()[:, 0], (row != both).nonzero()[:, 0]]
    chosen = torch.cat([d[: shape.edge // 3] for d in distinct])
    a = torch.zeros((shape.edge, shape.k), dtype=torch.float64, device="cpu")
    b = torch.zeros((shape.edge, shape.k), dtype=torch.float64, device="cpu")
    a[: len(chosen), 0], b[:, 0] = acc[chosen].to(torch.float64), 1.0
    a_scale = torch.ones((shape.edge, 1), dtype=torch.float32, device="cpu")
    b_scale = torch.ones((-(-shape.edge // shape.b_rows), 1), dtype=torch.float32, device="cpu")
    a_scale[: len(chosen), 0] = sa[chosen]
    if shared:
        b_scale[:, 0] = sb[0]
    else:
        b_scale[: len(chosen), 0] = sb[chosen]
    return scaled(encode(a, shape.dtype), encode(b, shape.dtype), shape, a_scale=a_scale, b_scale=b_scale)


def _scales(shape: Shape, random: torch.Generator) -> tuple[Tensor, Tensor]:
    a_scale = torch.rand((shape.edge, shape.blocks), generator=random, dtype=torch.float32, device="cpu") + 0.5
    groups = -(-shape.edge // shape.b_rows)
    b_scale = torch.rand((groups, shape.blocks), generator=random, dtype=torch.float32, device="cpu") + 0.5
    return a_scale, b_scale
