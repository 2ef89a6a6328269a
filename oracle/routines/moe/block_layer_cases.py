"""Cases of the layers of :mod:`oracle.routines.moe.block_layers`: one grammar, whose inputs are those of the row.

``ids``, ``map`` and ``first`` are those of the other layers. ``bias=1`` gives biases, ``gates=1`` an alpha, a beta and
a limit for each expert, of which the first clamps nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from oracle.errors import ShapeError
from oracle.numbers.quantize import quantize
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.routines import data
from oracle.routines.case import Case, Grammar, with_corners
from oracle.routines.moe.block_layers import CONTRACTS, BlockPipeline
from oracle.routines.moe.pipeline_cases import chosen, layer_options
from oracle.routines.mx.contract import pack

TOP = 2688.0
FAMILIES = ("randn", "steps", "outlier", "nan")


def _inputs(case: Case) -> dict[str, Tensor]:
    row = CONTRACTS[case.contract].row
    t, e, h, i = (case[name] for name in "tehi")
    x = data.activations(case.label("x"), case.family, t, h, dtype=torch.bfloat16)
    inputs = _codes(row, x) if row.given else {"x": x}
    for name, rows, columns in (("w13", 2 * i, h), ("w2", h, i)):
        inputs[name], inputs[f"{name}_scale"] = _weight(case, row, name, (e, rows, columns))
    number = torch.arange(e, dtype=torch.float32, device="cpu")
    if row.leveled:
        inputs |= {"a1_gscale": TOP / (4.0 + number), "a2_gscale": TOP / (16.0 + 8 * number)}
        if row.given:
            del inputs["a1_gscale"]
        inputs |= {"alpha1": (4.0 + number) / TOP / 4, "alpha2": (16.0 + 8 * number) / TOP / 4}
    elif row.factored:
        inputs |= {"alpha1": 0.5 + number / 8, "alpha2": 1.5 - number / 8}
    inputs |= chosen(case)
    if case.option("bias") == "1":
        inputs |= {
            name: data.normal(case.label(name), (e, size), dtype=torch.float32)
            for name, size in (("b1", 2 * i), ("b2", h))
        }
    if case.option("gates") == "1":
        known = torch.tensor(
            [[1.702, 1.0, 0.75], [1.0, 0.0, torch.inf], [0.5, -0.25, 3.0]], dtype=torch.float32, device="cpu"
        )
        inputs["gates"] = known[(torch.arange(e, device="cpu") + 1) % 3]
    return inputs


def _codes(row: BlockPipeline, x: Tensor) -> dict[str, Tensor]:
    """The input as codes and scale bytes, as a quantiser gives them.

    Raises ShapeError: a row is no multiple of a block."""
    if x.shape[1] % row.width:
        raise ShapeError(f"h={x.shape[1]} is no multiple of the {row.width} elements of a scale")
    level = torch.full((1,), TOP / 4, dtype=torch.float32, device="cpu") if row.leveled else None
    made = quantize(x, row.recipe, global_scale=level)
    if row.leveled:
        scale = to_dtype(
            made.scale.double(), torch.float8_e4m3fn, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE
        )
        return {"a": pack(made.codes), "a_scale": scale.view(torch.uint8)}
    byte = torch.frexp(made.scale).exponent + 126  # of a power of two
    return {"a": made.codes, "a_scale": byte.clamp(0, 254).to(torch.uint8)}


def _weight(case: Case, row: BlockPipeline, name: str, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Codes of any value, and scales of a few binades, such that a product of some hundred columns is near 1."""
    e, rows, columns = shape
    if row.packed:
        codes = torch.from_numpy(case.stream(name).integers(0, 256, (e, rows, columns // 2))).to(torch.uint8)
    else:
        whole = data.operand(case.label(name), "randn", e * rows, columns, dtype=torch.float8_e4m3fn, side="b")
        codes = whole.reshape(shape)
    low, high = (24, 56) if row.leveled else (120, 124) if row.packed else (110, 114)
    scale = torch.from_numpy(case.stream(f"{name}_scale").integers(low, high, (e, rows, columns // row.width)))
    return codes, scale.to(torch.uint8)


def _listed(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    """Few cases, since a layer is large: every family, experts of other ranks, uneven experts, every optional input."""
    head, shape = f"{contract}/{grammar.dtypes[0]}/{grammar.schemes[0]}", "t=4,e=3,h=64,i=64,k=2"
    for options, family in (("", "randn"), ("first=2/", "nan"), ("ids=one/", "steps"), ("", "outlier")):
        family = family if family in grammar.families else "randn"
        yield f"{head}/{shape.replace('t=4', 't=16') if family == 'nan' else shape}/{options}family={family}/seed=1"
    for name in ("bias", "gates", "map"):
        if name in grammar.options:
            yield f"{head}/{shape}/{name}=1/family=randn/seed=1"
    for way in grammar.options.get("combine", ()):
        yield f"{head}/t=3,e=5,h=64,i=64,k=4/combine={way}/family=randn/seed=1"


def _grammar(row: BlockPipeline) -> Grammar:
    options: dict[str, tuple[str, ...]] = {"first": ("2",), "ids": ("one",)}
    options |= {"bias": ("1",), "gates": ("1",)} if row.affine else {}
    options |= {"map": ("1",)} if row.mapped else {}
    options |= {"combine": tuple(way.name for way in row.ways)} if len(row.ways) > 1 else {}
    element = "e2m1" if row.packed else "e4m3"
    rows = "bf16" if not row.given else "e2m1" if row.leveled else "e4m3"
    return Grammar(
        ("t", "e", "h", "i", "k"),
        (f"{rows}x{element}-bf16",),
        (f"1x{row.width}:1x{row.width}",),
        tuple(f for f in FAMILIES if not (row.given and row.leveled and f == "nan")),
        _inputs,
        layer_options,
        options,
        listed=_listed,
        domain=f"h % {row.width} == 0, i % {row.width} == 0, h <= 512, i <= 256, t <= 256",
    )


GRAMMARS = with_corners(
    {name: _grammar(contract.row) for name, contract in CONTRACTS.items()},
    {name: ("t=4,e=3,h=64,i=64,k=2/first=2",) for name in CONTRACTS},
)
