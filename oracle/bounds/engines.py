"""The exact value and its bounds by the fastest engine that takes a product: compiled ones, else torch.

All give the same bits, those of :func:`oracle.truth.gemm.exact` and of :mod:`oracle.bounds.product`; the choice is one
of speed alone. On the CPU :mod:`oracle.bounds.cpu_kernels` is threaded and computes both in one pass;
rows and columns with a NaN or an infinity among their inputs are computed by the definition. Numba is imported at the
first use, and a machine for which it does not exist takes the definitions; so do the first small calls where nothing is
compiled yet (:mod:`oracle.tensorcore.cpu_cold`). On a GPU the value is that of
:mod:`oracle.bounds.triton_sums`, and the bounds are those of :mod:`oracle.bounds.cuda_residue` once the definition has
confirmed a sample of them (:func:`_confirmed`), in which *deciding* elements are, those that a verdict rests on.

:func:`why_not` says what the compiled engine of the CPU does not cover: products whose float64 sums are not exact
without splitting, scales inside the instruction, operands wider than 16 bits (for the bound: 8), tensors elsewhere.
Memory beyond operands and results: below 300 MiB on the CPU for any shape.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oracle.bounds import cuda_residue, triton_sums
from oracle.bounds import product as definition
from oracle.bounds.accumulator import Accumulator, chains
from oracle.bounds.chain import subsequences
from oracle.bounds.interval import Interval
from oracle.bounds.product import Promotion
from oracle.errors import NumericsError
from oracle.numbers.formats import decode
from oracle.tensorcore.cpu_cold import waits
from oracle.tensorcore.instructions import Order, Sum
from oracle.tensorcore.packing import TILE, UNROLL, Packed, code_table, codes_array, pack, packed_rows
from oracle.truth import gemm
from oracle.truth.gemm import Decoded, Exact, ScaledProduct

CHUNK_BYTES = 1 << 26  # of unpacked rows of a
SLOWER = 4  # times as long as the prediction of a product takes its bound, and more
DECIDING = 16  # elements that a verdict rests on, of those that are confirmed
SHARE = 8  # a GPU computes bounds one by one where at most one element in so many is wanted, else all in tiles
Deciding = Callable[[], Tensor]
"""Bool ``[M, N]``: the elements whose bounds decide a verdict; called where a sample of bounds is confirmed."""
Run = Callable[[ScaledProduct, NDArray[np.float64], int], Callable[..., None]]
"""``f(some rows, out, their first row)``, which gives a kernel that takes (row0, row1, panel0, panel1)."""


def exact(product: ScaledProduct) -> Exact:
    """:func:`oracle.truth.gemm.exact` by the fastest engine that takes ``product``."""
    return product.cached("exact", lambda: _exact(product))


def _exact(product: ScaledProduct) -> Exact:
    if product.nearby is not None:
        return exact(product.nearby).to(product.a.device)
    if product.alpha is not None:
        return gemm.finished(product, exact(replace(product, alpha=None, bias=None, c=None)))
    if product.c is not None:
        return gemm.with_summand(exact(replace(product, c=None)), product.c)
    if why_not(product):
        return gemm.exact(product) if triton_sums.why_not(product) else triton_sums.exact(product)
    return gemm.exact(product) if _waits("exact_value", product) else compiled_exact(product)


def residue_bound(product: ScaledProduct, acc: Accumulator) -> Interval:
    """:func:`oracle.bounds.product.residue_bound` by the fastest engine that takes ``product``."""
    if not why_not_on_device(product, acc):
        return _on_device(product, acc)
    plain = product.c is not None or why_not(product, acc) or _waits("residue", product)
    return definition.residue_bound(product, acc) if plain else compiled_residue(product, acc)[1]


def exact_and_residue(
    product: ScaledProduct, acc: Accumulator, deciding: Deciding | None = None
) -> tuple[Exact | None, Interval]:
    """:func:`residue_bound` and, where the same pass gives it, :func:`exact`."""
    if deciding is None or why_not_on_device(product, acc):
        return product.cached(("residue", acc), lambda: _exact_and_residue(product, acc))
    return None, _on_device(product, acc, deciding)


def _exact_and_residue(product: ScaledProduct, acc: Accumulator) -> tuple[Exact | None, Interval]:
    if not why_not_on_device(product, acc):
        return None, _on_device(product, acc)
    if product.c is not None:
        value, interval = exact_and_residue(replace(product, c=None), acc)
        value = exact(replace(product, c=None)) if value is None else value
        return gemm.with_summand(value, product.c), definition.with_summand(value, interval, product.c)
    if why_not(product, acc) or _waits("residue", product):
        return None, definition.residue_bound(product, acc)
    return compiled_residue(product, acc)


def any_order_bound(product: ScaledProduct, acc: Accumulator, deciding: Deciding | None = None) -> Interval:
    """:func:`oracle.bounds.product.any_order_bound` by the fastest engine that takes ``product``."""
    if not why_not_on_device(product, acc):
        interval = cuda_residue.any_order_bound(product, acc)
        return _confirmed(interval, product, acc, definition.any_order_bound, deciding)
    plain = product.c is not None or why_not(product, acc) or _waits("any_order", product)
    computed = None if plain else compiled_any_order(product, acc)
    return definition.any_order_bound(product, acc) if computed is None else computed


def split_bound(product: ScaledProduct, acc: Accumulator, deciding: Deciding | None = None) -> Interval:
    """:func:`oracle.bounds.product.split_bound` by the fastest engine that takes ``product``."""
    if not why_not_on_device(product, acc) and acc.promotion is not None:
        return _confirmed(cuda_residue.split_bound(product, acc), product, acc, definition.split_bound, deciding)
    kernel = "split" if acc.promotion is None else "residue"
    plain = product.c is not None or why_not(product, acc) or _waits(kernel, product)
    computed = None if plain else compiled_split(product, acc)
    return definition.split_bound(product, acc) if computed is None else computed


def _waits(kernel: str, product: ScaledProduct) -> bool:
    """Whether the definition computes this product, because the kernel is not compiled yet."""
    return waits(kernel, product.M, product.N, product.K)


def why_not(product: ScaledProduct, acc: Accumulator | None = None) -> str | None:
    """Reason for which the compiled pass cannot take this product (with ``acc``: and its bound), or None."""
    if product.a.device.type != "cpu":
        return f"the operands are on {product.a.device}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    if product.a.element_size() > 2 or product.b.element_size() > 2:
        return "an operand is wider than 16 bits"
    if product.alpha is not None:
        return "an alpha multiplies the sum"
    return _unfit(product, acc)


def why_not_on_device(product: ScaledProduct, acc: Accumulator) -> str | None:
    """Reason for which the bound of this product cannot be computed by CUDA C++ where its operands lie, or None."""
    return cuda_residue.why_not(product, acc) or _unfit(product, acc)


def _on_device(product: ScaledProduct, acc: Accumulator, deciding: Deciding | None = None) -> Interval:
    def bounded(part: ScaledProduct) -> tuple[Exact, Interval]:
        return exact(part), cuda_residue.residue_bound(part, acc)

    interval = definition.scaled_at_the_end(product, acc, cuda_residue.residue_bound(product, acc), bounded)
    return _confirmed(interval, product, acc, definition.residue_bound, deciding)


def _confirmed(
    computed: Interval | None,
    product: ScaledProduct,
    acc: Accumulator,
    defined: Callable[..., Interval],
    deciding: Deciding | None,
) -> Interval:
    """What CUDA C++ gave, once a sample of it has the definition's bits; else the definition of all, and a warning: a
    bound that a driver or a device gets wrong must decide nothing.

    The sample is made of rows and columns at random, which the data seed: one of each place in a tile, so all that a
    block of threads computes is in it, and those of up to ``DECIDING`` elements on which a verdict rests. An error in
    one of a thousand elements escapes the 4,096 of the tile in 2 of 100 calls. The CPU's compiled pass computes the
    sample where it can: the definition of one chain of 7,168 products takes a device 0.26 s, four times as long as
    CUDA C++ takes for 4096x4096 of them.
    """
    if computed is None:
        return defined(product, acc)
    agrees = partial(_agrees, computed, product, acc, defined)
    if agrees(deciding, everywhere=True):
        return replace(computed, confirm=agrees)
    warnings.warn(
        f"the {computed.name} in CUDA C++ differs from its definition on {product.a.device}; the definition is "
        "computed instead (14 s at 4096x4096x7168 on an H200). Report the device and its driver.",
        RuntimeWarning,
        stacklevel=2,
    )
    return defined(product, acc)


def _agrees(
    computed: Interval,
    product: ScaledProduct,
    acc: Accumulator,
    defined: Callable[..., Interval],
    deciding: Deciding | None,
    *,
    everywhere: bool = False,
) -> bool:
    """Whether the sample of :func:`_confirmed` has the definition's bits; not ``everywhere``, what is ``deciding``."""
    digest = sum(int(x.view(torch.uint8).sum(dtype=torch.int64)) for x in (product.a, product.b))
    g = torch.Generator("cpu").manual_seed(digest)
    tall, wide = cuda_residue.TILE
    sample = [_of_each_place(product.M, tall, g), _of_each_place(product.N, wide, g)]
    sample = sample if everywhere else [at[:0] for at in sample]
    if deciding is not None and (at := torch.nonzero(deciding().flatten())[:, 0]).numel():
        if len(at) > DECIDING:
            at = at[torch.randint(len(at), (DECIDING,), generator=g, device="cpu").to(at.device)]
        some = at.cpu()
        sample = [torch.cat(pair) for pair in zip(sample, (some // product.N, some % product.N), strict=True)]
    if not all(map(len, sample)):
        return True
    rows, columns = (at.to(product.a.device) for at in sample)
    part = product.take(rows).take_columns(columns)
    near = part.to("cpu")
    if defined is definition.residue_bound and near.c is None and not why_not(near, acc):
        due = compiled_residue(near, acc)[1].to(product.a.device)
    else:
        due = defined(part, acc)
    return all(_equal_at(x, y, rows, columns) for x, y in zip(_ends(computed), _ends(due), strict=True))


def _of_each_place(size: int, tile: int, g: torch.Generator) -> Tensor:
    """Of the rows (or columns) with one place in a tile, one at random; the last row too."""
    place = torch.arange(min(size, tile), device="cpu")
    number = (size - place + tile - 1) // tile  # of the tiles that have the place
    at = torch.rand(len(place), generator=g, dtype=torch.float64, device="cpu") * number
    index = place + tile * at.to(torch.int64)
    index[(size - 1) % tile] = size - 1
    return index


def _ends(x: Interval) -> tuple[Tensor, Tensor, Tensor]:
    assert x.open is not None
    return x.lo, x.hi, x.open


def _equal_at(x: Tensor, due: Tensor, rows: Tensor, columns: Tensor) -> bool:
    """Whether ``x`` has the values of ``due`` at these rows and columns; NaN is equal to NaN."""
    actual = x[rows[:, None], columns]
    return bool(((actual == due) | ((actual != actual) & (due != due))).all())


def _unfit(product: ScaledProduct, acc: Accumulator | None) -> str | None:
    """What of the arithmetic no compiled engine covers."""
    if acc is not None:
        if acc.dequantised is not None or acc.widened is not None or acc.flushes or acc.truncates:
            return f"{acc.name} converts its operands"
        if acc.split is not None:
            return f"{acc.name} splits K"
        if acc.scales_inside:
            return f"{acc.name} applies scales inside the instruction"
        if acc.kind is not Sum.FUSED or acc.order is not Order.SEQUENTIAL:
            return f"{acc.name} does not add by fused truncating steps in ascending order"
        if product.a.element_size() > 1 or product.b.element_size() > 1:
            return "the bound's recursion is exact in float64 for 8-bit operands only"
    left, right = product.left, product.right
    room = 2.0**53 * left.fmt.min_subnormal * right.fmt.min_subnormal
    length = min(product.block, product.K)
    if length * left.fmt.max_finite * right.fmt.max_finite <= room:
        return None  # whatever the codes are
    largest = left.facts.largest * right.facts.largest
    if length * largest > room:
        return f"sums of {product.block} products up to {largest} leave float64"
    return None


def compiled_exact(product: ScaledProduct) -> Exact:
    """:func:`oracle.truth.gemm.exact`, bit for bit.

    Raises NumericsError: the compiled pass cannot take this product.
    """
    refused = why_not(product)
    if refused is not None:
        raise NumericsError(f"no compiled exact value: {refused}; use oracle.truth.gemm.exact")
    from oracle.bounds import cpu_kernels as kernels  # numba takes a second to import

    order = _packed(product, None, kernels.CHAIN_END, kernels.BLOCK_END)
    values, exponents = (x.numpy() for x in code_table(product.left.fmt, kernels.ABSENT, special=False))
    b_value = code_table(product.right.fmt, kernels.ABSENT, special=False)[0].numpy()

    def run(rows: ScaledProduct, out: NDArray[np.float64], origin: int) -> Callable[..., None]:
        a = _one_more_row(packed_rows(rows.a, order, values, exponents, kernels.ABSENT)[0])
        sa = _one_more_row(rows.left.scales.expand(rows.M, -1).numpy())
        return lambda *piece: kernels.exact_value(
            a, sa, b, b_value, sb, product.b_rows, source, tiles, bias, product.bias is not None, out, origin, *piece
        )

    b, sb, bias, source, tiles = _shared(product, order)
    out = _pass(product, order, run, 3, bytes_each=8)
    _overlay(product, out, lambda part: _stack(gemm.exact(part), None), known=True)
    return Exact(out[0], out[1], out[2])


def compiled_residue(product: ScaledProduct, acc: Accumulator) -> tuple[Exact, Interval]:
    """:func:`oracle.truth.gemm.exact` and :func:`oracle.bounds.residue_bound`, bit for bit, in one pass.

    Raises NumericsError: the compiled pass cannot take this product, or no kernel with ``acc`` can compute it.
    """
    result = _compiled(product, acc, definition.residue_bound, f"residue bound of {acc.name}")
    assert result is not None
    value, interval = result
    return value, definition.scaled_at_the_end(product, acc, interval, lambda part: compiled_residue(part, acc))


def compiled_split(product: ScaledProduct, acc: Accumulator) -> Interval | None:
    """:func:`oracle.bounds.split_bound`, bit for bit; None where an error keeps growing. Raises as
    :func:`compiled_residue`."""
    result = _compiled(product, acc, definition.split_bound, f"residue bound of {acc.name}, K split anywhere")
    return None if result is None else result[1]


def compiled_any_order(product: ScaledProduct, acc: Accumulator) -> Interval | None:
    """:func:`oracle.bounds.any_order_bound`, bit for bit; None where an error keeps growing. Raises as
    :func:`compiled_residue`."""
    result = _compiled(product, acc, definition.any_order_bound, f"any-order bound of {acc.name} (weak)")
    return None if result is None else result[1]


def residue_at(product: ScaledProduct, acc: Accumulator, wanted: Tensor) -> tuple[Tensor, Tensor] | None:
    """``lo`` and ``hi`` of :func:`residue_bound` where ``wanted``, bool ``[M, N]``: float64 ``[P]``, row by row. None
    where an operand is not finite, or no compiled engine takes the product; on a GPU also where more than one element
    in :data:`SHARE` is wanted, or a sample has not the bits of the CPU.

    No interval may be open (:func:`oracle.bounds.product.may_overflow`): that is not looked at. No NaN is given.
    Source: :func:`oracle.bounds.product.residue_bound`, whose values these are.
    """
    summands = [decode(x) for x in (product.bias, product.c) if x is not None]
    numbers = [product.left.scales, product.right.scales, *summands]
    if not (product.left.finite and product.right.finite and all(bool(torch.isfinite(x).all()) for x in numbers)):
        return None
    if not why_not_on_device(product, acc):
        return _at_on_device(product, acc, torch.nonzero(wanted.flatten())[:, 0])
    if product.c is not None or why_not(product, acc):
        return None
    whole = _Pass(product, acc, definition.residue_bound)
    parts = list[Interval]()
    step = max(1, CHUNK_BYTES // (9 * max(1, whole.length)))
    for start in range(0, product.M, step):
        some = wanted[start : start + step]
        if not len(columns := torch.nonzero(some)[:, 1]):
            continue
        at, found = some.numpy(), dict[int, NDArray[np.float64]]()
        whole.unpack(start, start + len(at))

        def run(row: int, at: NDArray[np.bool_] = at, found: dict[int, NDArray[np.float64]] = found) -> None:
            found[row] = whole.empty(1, own := np.nonzero(at[row])[0])
            whole.run(own, found[row], row, 0, 1, 0, whole.panels(own))

        rows = np.nonzero(at.any(axis=1))[0].tolist()
        whole.each(run, [(row,) for row in rows], SLOWER * len(columns) * product.K)
        promotion = whole.promotion(np.concatenate([found[row] for row in rows], axis=2))
        bias = [] if product.bias is None else [(decode(product.bias)[None, columns], definition.ETA)]
        parts.append(promotion.interval(*bias, name="", alpha=None))
    low, high = (
        torch.cat([torch.empty(0, dtype=torch.float64, device="cpu"), *(ends[0] for ends in of)])
        for of in ([part.lo for part in parts], [part.hi for part in parts])
    )
    return low, high


def _at_on_device(product: ScaledProduct, acc: Accumulator, at: Tensor) -> tuple[Tensor, Tensor] | None:
    """The same of the places ``at`` (int64 ``[P]``) on a GPU."""
    if SHARE * len(at) > product.M * product.N:
        return None
    found = cuda_residue.residue_at(product, acc, at)
    if len(at):
        few = torch.linspace(0, len(at) - 1, min(len(at), DECIDING), dtype=torch.float64, device="cpu").long()
        some = at[few.to(at.device)].cpu()
        near = product.take((some // product.N).to(at.device)).take_columns((some % product.N).to(at.device)).to("cpu")
        due = residue_bound(near, acc)
        for ends, wanted in ((found.lo, due.lo), (found.hi, due.hi)):
            if not torch.equal(ends[few.to(at.device)].cpu(), wanted.diagonal()):
                return None
    return found.lo, found.hi


def _compiled(
    product: ScaledProduct, acc: Accumulator, defined: Callable[[ScaledProduct, Accumulator], Interval], name: str
) -> tuple[Exact, Interval] | None:
    """The bound ``defined``, and with it the exact value unless the order of products is unknown."""
    refused = why_not(product, acc)
    if refused is not None:
        raise NumericsError(f"no compiled bound: {refused}; use oracle.bounds.{defined.__name__}")
    definition.check_fit(product, acc)
    from oracle.bounds.cpu_lanes import LANES  # numba takes a second to import
    from oracle.tensorcore.cpu_jit import task_pieces, workers_for

    whole, columns = _Pass(product, acc, defined), np.arange(product.N)
    out = torch.zeros((6, product.M, product.N), dtype=torch.float64, device="cpu")
    step = max(1, CHUNK_BYTES // (9 * max(1, whole.length) + 8 * whole.quantities * max(1, product.N)))
    for start in range(0, product.M, step):
        rows = min(product.M - start, step)
        whole.unpack(start, start + rows)
        sums, work = whole.empty(rows, columns), SLOWER * rows * product.N * product.K
        pieces = task_pieces(rows, product.N, lanes=LANES, workers=workers_for(work))
        whole.each(partial(whole.run, columns, sums, None), pieces, work)
        if not whole.rests:
            return None
        part = definition.finished(product, start, whole.promotion(sums), name)
        assert part.open is not None
        value = map(torch.from_numpy, sums[:3])
        for quantity, some in zip(out, (*value, part.lo, part.hi, part.open), strict=True):
            quantity[start : start + rows] = some
    _overlay(product, out, lambda part: _stack(gemm.exact(part), defined(part, acc)))
    return Exact(out[0], out[1], out[2]), Interval(out[3], out[4], name, whole.weak, out[5] != 0)


class _Pass:
    """What a kernel of bounds takes of one product, ready for any of its rows and columns."""

    def __init__(
        self, product: ScaledProduct, acc: Accumulator, defined: Callable[[ScaledProduct, Accumulator], Interval]
    ) -> None:
        from oracle.bounds import cpu_kernels as kernels

        self.product, self.rests = product, True
        ordered, self.weak = defined is definition.residue_bound, defined is definition.any_order_bound
        self.order = _packed(product, acc, kernels.CHAIN_END, kernels.BLOCK_END)
        self.length = self.order.source.numel()
        self.tables, (b_value, b_exponent) = (
            (value.numpy(), exponent.to(torch.int8).numpy())
            for value, exponent in (
                code_table(x.fmt, kernels.ABSENT, special=False) for x in (product.left, product.right)
            )
        )
        b, sb, bias, source, tiles = _shared(product, self.order)
        relative = 2.0**-acc.out + (2.0**-24 if acc.promotion is None else 0.0)
        own: tuple[Any, ...] = (relative,) if self.weak else (acc.out, bias, product.bias is not None)
        cut = defined is definition.split_bound and acc.promotion is None
        if cut:
            of_chains = subsequences(-(-product.K // acc.group), acc.group)
            ends = np.cumsum([0, *map(len, of_chains)])
            own = acc.out, np.concatenate(of_chains).astype(np.int64), ends.astype(np.int64)
        self.of_b = b, b_value, b_exponent, sb, product.b_rows
        self.of_sums = source, tiles, self.order.group, acc.align, *own
        self.kernel: Callable[..., bool | None] = kernels.residue
        if self.weak or cut:
            self.kernel = kernels.any_order if self.weak else kernels.split
        self.quantities = kernels.ORDERED if ordered else kernels.UNORDERED
        self.unordered = None if ordered else sum(1 for _ in chains(product, acc.promotion))

    def unpack(self, start: int, stop: int) -> None:
        """Make these rows of ``a`` those of the next calls."""
        from oracle.bounds.cpu_kernels import ABSENT

        rows = self.product.rows(start, stop)
        scales = np.ascontiguousarray(rows.left.scales.expand(rows.M, -1).numpy())
        self.of_a = *packed_rows(rows.a, self.order, *self.tables, ABSENT), scales

    def empty(self, rows: int, columns: NDArray[np.int64]) -> NDArray[np.float64]:
        """Room for the sums of so many rows."""
        return np.zeros((self.quantities, rows, len(columns)))

    def panels(self, columns: NDArray[np.int64]) -> int:
        from oracle.bounds.cpu_lanes import LANES

        return -(-len(columns) // LANES)

    def run(self, columns: NDArray[np.int64], sums: NDArray[np.float64], row: int | None, *piece: int) -> None:
        """The sums of one piece of all rows, or of one ``row``."""
        of_a = self.of_a if row is None else [x[row : row + 1] for x in self.of_a]
        self.rests &= self.kernel(*of_a, *self.of_b, columns, *self.of_sums, sums, *piece) is not False

    def each(self, run: Callable[..., None], pieces: Sequence[tuple[int, ...]], products: int) -> None:
        from oracle.tensorcore.cpu_jit import run_tasks, workers_for

        run_tasks(run, pieces, workers_for(products))

    def promotion(self, sums: NDArray[np.float64]) -> Promotion:
        """The running bound of the promoted ``sums``."""
        _, promoted, opened, unordered = np.split(sums, (3, 7, 8))
        state = [torch.from_numpy(x) for x in (*promoted, *unordered)]
        return Promotion.from_sums(state, torch.from_numpy(opened[0] != 0), self.unordered)


def _packed(product: ScaledProduct, acc: Accumulator | None, chain_end: int, block_end: int) -> Packed:
    """Chains that never cross a scale block, in steps of ``acc.group`` products; without one, blocks."""
    group, promotion = (TILE, None) if acc is None else (min(acc.group, TILE), acc.promotion)
    ends = tuple(k.stop for _, k in product.blocks())
    return _packed_chains(tuple(chains(product, promotion)), ends, group, chain_end, block_end)


@lru_cache(maxsize=64)
def _packed_chains(
    spans: tuple[tuple[int, int, int], ...], ends: tuple[int, ...], group: int, chain_end: int, block_end: int
) -> Packed:
    unit = max(1, TILE // (-(-group // UNROLL) * UNROLL)) * group
    flagged = ((start, stop, block, chain_end | (block_end if stop in ends else 0)) for block, start, stop in spans)
    return pack(flagged, group=group, unit=unit)


def _shared(product: ScaledProduct, order: Packed) -> tuple[NDArray[Any], ...]:
    """Codes of ``b``, its scales, the bias, source and tiles: what every chunk of rows needs."""
    bias = np.zeros(1) if product.bias is None else decode(product.bias).numpy()
    return codes_array(product.b), product.right.scales.numpy(), bias, order.source.numpy(), order.tiles.numpy()


def _pass(product: ScaledProduct, order: Packed, run: Run, quantities: int, *, bytes_each: int) -> Tensor:
    """Run a kernel over chunks of rows of ``a``, unpacked one at a time; float64 ``[quantities, M, N]``."""
    from oracle.bounds.cpu_lanes import LANES
    from oracle.tensorcore.cpu_jit import run_tasks, task_pieces, workers_for

    out = np.empty((quantities, product.M, product.N))
    step = max(1, CHUNK_BYTES // (bytes_each * max(1, order.source.numel())))
    for start in range(0, product.M, step):
        rows = product.rows(start, min(product.M, start + step))
        workers = workers_for(SLOWER * rows.M * product.N * product.K)
        run_tasks(run(rows, out, start), task_pieces(rows.M, product.N, lanes=LANES, workers=workers), workers)
    return torch.from_numpy(out)


def _one_more_row(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([x, np.zeros((1, x.shape[1]))])


def _stack(value: Exact, interval: Interval | None) -> Tensor:
    parts = [value.hi, value.lo, value.slack]
    if interval is not None:
        assert interval.open is not None
        parts += [interval.lo, interval.hi, interval.open.to(torch.float64)]
    return torch.stack(parts)


def _overlay(
    product: ScaledProduct, out: Tensor, plain: Callable[[ScaledProduct], Tensor], *, known: bool = False
) -> None:
    """Replace rows and columns with a NaN or an infinity among their inputs by the definition's; ``known``: a NaN makes
    every result NaN, which needs no definition."""
    rows = ~_finite(product.left, torch.arange(product.M, device="cpu"))
    columns = ~_finite(product.right, torch.arange(product.N, device="cpu") // product.b_rows)
    if product.bias is not None:
        columns |= ~torch.isfinite(decode(product.bias))
    if (index := torch.nonzero(rows)[:, 0]).numel():
        some = product.take(index)
        sure = _holds_nan(some.left) & known
        out[:, index[sure]] = _nan(out)
        if not bool(sure.all()):
            out[:, index[~sure]] = plain(some.take(torch.nonzero(~sure)[:, 0]))
    if (index := torch.nonzero(columns)[:, 0]).numel():
        some = product.take_columns(index)
        sure = _holds_nan(some.right) & known
        out[:, :, index[sure]] = _nan(out)
        if not bool(sure.all()):
            out[:, :, index[~sure]] = plain(some.take_columns(torch.nonzero(~sure)[:, 0]))


def _nan(out: Tensor) -> Tensor:
    """What stands for NaN: the high word is, and nothing is missing."""
    return torch.tensor([torch.nan, *[0.0] * (len(out) - 1)], dtype=out.dtype, device=out.device)[:, None, None]


def _holds_nan(x: Decoded) -> Tensor:
    """Rows with a NaN among their codes or scales."""
    return torch.isnan(x.value()).any(dim=1) | torch.isnan(x.scales).any(dim=1)


def _finite(x: Decoded, groups: Tensor) -> Tensor:
    """Whether the codes of a row, and the scales of its group, are all finite."""
    scales = torch.isfinite(x.scales).all(dim=1)
    return x.finite_rows & (scales if len(scales) == 1 else scales[groups])
