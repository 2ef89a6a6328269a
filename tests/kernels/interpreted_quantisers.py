"""Runs under ``TRITON_INTERPRET=1``: every quantiser kernel against plain torch; prints ``{check: good}`` as JSON.

The variable must be set before Triton is imported, so this is a program of its own (see ``test_triton.py``).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator

import torch

from kernels.backends import _host, eager, triton_quant
from kernels.backends.declaration import Blocks, Matrices

warnings.simplefilter("ignore")  # the interpreter divides by zero in numpy
FP8 = torch.float8_e4m3fn


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    a, b = x.contiguous(), y.contiguous()
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    nan = a.float().isnan() & b.float().isnan() if a.is_floating_point() else torch.zeros(a.shape, dtype=torch.bool)
    return a.shape == b.shape and bool(((a.view(size) == b.view(size)) | nan).all())


def hostile(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(m * k)
    x = torch.randn(m, k, generator=generator) * torch.exp2(torch.randint(-12, 12, (m, 1), generator=generator).float())
    x[0, :64] = 0.0
    if m > 6:
        x[1], x[2, 3], x[3, 5], x[4], x[5], x[6, 0] = 0.0, float("nan"), float("inf"), 2.0**-40, -0.0, 3.0e4
    return x.to(dtype)


def extreme(dtype: torch.dtype) -> torch.Tensor:
    """Groups of one value beside zeros: the largest and every binade, subnormal ones too but for bfloat16, whose
    subnormal values the interpreter reads as 0."""
    first = -126.0 if dtype == torch.bfloat16 else -149.0
    values = torch.exp2(torch.arange(first, 128.0)).clamp(max=torch.finfo(dtype).max).to(dtype)
    x = torch.zeros(len(values) + 1, 128, dtype=dtype)
    x[:-1, 5], x[-1, 7] = values, -torch.finfo(dtype).max
    return x


def edges() -> torch.Tensor:
    """Every E4M3 value, every midpoint between neighbours, and one float32 step to either side; both signs."""
    values = torch.arange(127, dtype=torch.int32).to(torch.uint8).view(FP8).float()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([449.0, 464.0, 465.0, 1e30])])
    points = torch.cat(
        [points, torch.nextafter(points, torch.tensor(1e38)), torch.nextafter(points, torch.tensor(-1e38))]
    )
    return torch.cat([points, -points]).unsqueeze(0)


def shared() -> Iterator[tuple[str, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
    """Blocks that share a scale byte: elements, roundings, layouts, zeros behind the values, factors."""

    def both(
        x: torch.Tensor,
        element: str,
        rounding: str,
        layout: str,
        behind: int = 0,
        g: torch.Tensor | None = None,
        inv: bool = False,
        gated: bool = False,
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        how, columns = Blocks(element, rounding, layout, inv, gated), (x.shape[1] >> gated) + behind
        made = [b.BACKEND.quant_blocks(x, how, columns, g) for b in (triton_quant, eager)]
        return made[0], made[1]

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, far = hostile(7, 96, dtype), extreme(dtype)
        for element in ("e4m3", "e5m2", "e2m1"):
            for rounding in ("rceil", "floor", "ceil", "even"):
                for layout in ("linear", "8x4", "128x4"):
                    yield f"blocks {element} {rounding} {layout} {dtype}", *both(x, element, rounding, layout)
                yield f"blocks {element} {rounding} extreme {dtype}", *both(far, element, rounding, "linear")
        for inv in (False, True):
            for g in (
                torch.tensor([3.7]),
                torch.rand(len(far)) + 0.01,
                torch.tensor([1e-30]),
                torch.tensor([2.0**100]),
            ):
                for layout in ("linear", "8x4", "128x4"):
                    given = x if len(g) == 1 else far
                    named = f"nvfp4 {inv} {float(g[0]):.3g} {layout} {dtype}"
                    yield named, *both(given, "e2m1", "rceil", layout, 0, g, inv)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.cat([hostile(9, 96, dtype), hostile(9, 96, torch.float32).flip(0).to(dtype)], 1)
        for layout in ("linear", "8x4", "128x4"):
            for element in ("e4m3", "e5m2", "e2m1"):
                yield f"silu {element} {layout} {dtype}", *both(x, element, "rceil", layout, gated=True)
            for inv in (False, True):
                g = torch.tensor([0.03 if inv else 33.0])
                yield f"silu nvfp4 {inv} {layout} {dtype}", *both(x, "e2m1", "rceil", layout, 0, g, inv, True)
        yield f"silu experts {dtype}", *both(x, "e2m1", "even_of_finite", "linear", gated=True)
        for y in (hostile(9, 96, dtype), extreme(dtype)):
            yield f"experts {dtype} {len(y)}", *both(y, "e2m1", "even_of_finite", "linear")
        yield f"silu zeros behind {dtype}", *both(x, "e4m3", "rceil", "128x4", 64, gated=True)
        rows = torch.rand(9) * 30 + 1
        yield f"silu rows {dtype}", *both(x, "e2m1", "rceil", "linear", 0, rows, False, True)
    x = hostile(7, 192, torch.bfloat16)
    swapped = torch.cat([x[:, 96:], x[:, :96]], 1)
    yield (
        "sabotaged: even of all",
        both(hostile(9, 96, torch.bfloat16), "e2m1", "even_of_finite", "linear")[0],
        both(hostile(9, 96, torch.bfloat16), "e2m1", "even", "linear")[1],
    )
    yield (
        "sabotaged: up and gate",
        both(x, "e4m3", "rceil", "linear", gated=True)[0],
        both(swapped, "e4m3", "rceil", "linear", gated=True)[1],
    )
    yield "zeros behind", *both(hostile(5, 96, torch.bfloat16), "e4m3", "rceil", "128x4", 160)
    yield "pitch of blocks", *both(hostile(5, 256, torch.bfloat16)[:, 32:96], "e4m3", "rceil", "128x4")
    x = hostile(7, 96, torch.float32)
    yield "sabotaged: another rounding", both(x, "e4m3", "rceil", "linear")[0], both(x, "e4m3", "floor", "linear")[1]


def several() -> Iterator[tuple[str, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
    """Rows of several matrices: by offsets in both placements, experts without rows and rows without experts among
    them; matrices of one height."""
    ways = ("e4m3", "rceil", False), ("e2m1", "even_of_finite", False), ("e2m1", "rceil", True)
    offsets = torch.tensor([[0, 5, 5, 20, 37], [0, 0, 37, 37, 37], [0, 10, 20, 25, 30]], dtype=torch.int32)

    def both(
        x: torch.Tensor,
        way: tuple[str, str, bool],
        matrices: Matrices,
        other: Matrices | None = None,
        gated: bool = False,
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        element, rounding, two = way
        how, g = Blocks(element, rounding, "128x4", False, gated), torch.rand(matrices.number) * 30 + 1 if two else None
        sides = (triton_quant, matrices), (eager, other or matrices)
        made = [b.BACKEND.quant_blocks(x, how, x.shape[1] >> gated, g, of) for b, of in sides]
        return made[0], made[1]

    for way in ways:
        for k, gated in ((96, False), (160, True)):
            x = hostile(37, k << gated, torch.bfloat16)
            for ends in offsets:
                for placement in ("tight", "flashinfer"):
                    named = f"experts {way} {k} {ends.tolist()} {placement}"
                    yield named, *both(x, way, Matrices(4, ends, placement), gated=gated)
            yield f"matrices {way} {k}", *both(hostile(39, k << gated, torch.bfloat16), way, Matrices(3), gated=gated)
    one, x = torch.tensor([7.0]), hostile(39, 96, torch.bfloat16)
    for layout in ("128x4", "8x4"):
        how = Blocks("e2m1", "rceil", layout, False, False)
        made = [b.BACKEND.quant_blocks(x, how, 96, one, Matrices(3)) for b in (triton_quant, eager)]
        yield f"matrices under one factor {layout}", *made
    x, (first, *_) = hostile(37, 96, torch.bfloat16), offsets
    yield "sabotaged: placement", *both(x, ways[0], Matrices(4, first), Matrices(4, first, "flashinfer"))
    yield "sabotaged: expert", *both(x, ways[2], Matrices(4, first), Matrices(4, offsets[1]))


def norms() -> Iterator[tuple[str, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
    """RMS norms of rows whose squares, of powers of two, float32 adds exactly in any order; the sum behind codes."""
    generator = torch.Generator().manual_seed(3)
    x, other = (torch.exp2(torch.randint(-3, 4, (5, 160), generator=generator).float()) for _ in range(2))
    one = torch.tensor([33.0])

    def both(
        how: Blocks, g: torch.Tensor | None, rounding: str, dtype: torch.dtype, added: bool, epsilon: float = 1e-6
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        operands = x.to(dtype), (1.0 + other[0]).to(dtype), other.to(dtype) if added else None
        sides = (triton_quant, epsilon), (eager, 1e-6)
        made = [b.BACKEND.norm_blocks(*operands, e, rounding, how, g) for b, e in sides]
        return tuple(t for t in made[0] if t is not None), tuple(t for t in made[1] if t is not None)

    for layout in ("128x4", "8x4", "linear"):
        for element, g in (("e4m3", None), ("e2m1", None), ("e2m1", one)):
            how = Blocks(element, "rceil", layout, False, False)
            for rounding in ("each", "product", "none"):
                for added in (False, True):
                    yield f"norm {how} {rounding} {added}", *both(how, g, rounding, torch.bfloat16, added)
    how = Blocks("e4m3", "rceil", "128x4", False, False)
    yield "norm of float32", *both(how, None, "none", torch.float32, True)
    yield "sabotaged: epsilon", *both(how, None, "each", torch.bfloat16, True, 1.0)


def pairs() -> Iterator[tuple[str, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
    ours, plain = triton_quant, eager
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in ((7, 256), (33, 128)):
            x = hostile(*shape, dtype)
            for layout in ("row", "tma"):
                for ue8m0 in (False, True):
                    made = [b.quant_group(x, 128, 1e-10, ue8m0, layout) for b in (ours, plain)]
                    yield f"group {layout} ue8m0={ue8m0} {dtype} {shape}", made[0], made[1]
                    yield (
                        f"strides {layout} {dtype} {shape} {ue8m0}",
                        *((torch.tensor(m[1].stride(), dtype=torch.int32),) for m in made),
                    )
        for x in (hostile(7, 256, dtype), extreme(dtype)):
            made = [b.reciprocal_quantiser(dtype)(x, None, _host.allocator(x.device)) for b in (ours, plain)]
            yield f"reciprocal {dtype} {tuple(x.shape)}", made[0], made[1]
            yield f"reciprocal strides {dtype} {tuple(x.shape)}", *((torch.tensor(m[1].stride()).int(),) for m in made)
        x, bound = hostile(7, 256, dtype), torch.tensor([0.7])
        calm = x.nan_to_num(1.0, 2.0, -2.0)
        for made, kind in (
            (ours.quant_group(x, 128, 1e-10, False, "tma")[1], "group"),
            (ours.quant_group_packed(calm, 128, 1e-10)[1], "packed"),
        ):
            lanes = made.as_strided((made.shape[1], 8), (8, 1))[:, 7:]
            yield f"pad lanes are zero: {kind} {dtype}", (lanes,), (torch.zeros_like(lanes),)
        yield f"packed {dtype}", ours.quant_group_packed(calm, 128, 1e-10), plain.quant_group_packed(calm, 128, 1e-10)
        yield f"token {dtype}", ours.quant_token(x, None), plain.quant_token(x, None)
        yield f"token bounded {dtype}", ours.quant_token(x, bound), plain.quant_token(x, bound)
        yield f"tensor {dtype}", ours.quant_tensor(x), plain.quant_tensor(x)
        yield f"static {dtype}", (ours.quant_static(x, bound),), (plain.quant_static(x, bound),)
    x = hostile(9, 192, torch.bfloat16)
    for group in (32, 64, 96):
        yield f"group size {group}", ours.quant_group(x, group, 1e-10, False), plain.quant_group(x, group, 1e-10, False)
    x = hostile(8, 512, torch.bfloat16)[:, 128:384]
    yield "row stride", ours.quant_group(x, 128, 1e-10, False, "col"), plain.quant_group(x, 128, 1e-10, False, "col")
    cube = hostile(8, 256, torch.float32).view(2, 4, 256)
    yield (
        "three axes",
        ours.quant_group(cube, 128, 1e-10, False, "tma"),
        plain.quant_group(cube, 128, 1e-10, False, "tma"),
    )
    empty = torch.empty(0, 128)
    yield "no rows", ours.quant_group(empty, 128, 1e-10, False), plain.quant_group(empty, 128, 1e-10, False)
    one = torch.ones(1)
    yield "edges", (ours.quant_static(edges(), one),), (edges().clamp(-448, 448).to(FP8),)
    x, allocate = extreme(torch.float32), _host.allocator(x.device)
    lower, right = ours.reciprocal_quantiser(torch.float16), plain.reciprocal_quantiser(torch.float32)
    yield "sabotaged: another limit", lower(x, None, allocate), right(x, None, allocate)
    yield from shared()
    yield from several()
    yield from norms()
    x = torch.zeros(4, 128)
    yield "sabotaged: another floor", ours.quant_group(x, 128, 1e-10, False), plain.quant_group(x, 128, 1e-9, False)


if __name__ == "__main__":
    assert triton_quant.library()[1] is False, "run with TRITON_INTERPRET=1"
    print(json.dumps({name: all(same(a, b) for a, b in zip(x, y, strict=True)) for name, x, y in pairs()}))
