"""The other side of the score: every legal variant must pass.

A variant is a random case and one way in which a right kernel may compute it: any schedule that the contract admits on
any arch, with any of its epilogues; float32 sums in another order or after dequantising, on every arch; any declared
recipe of a quantiser. Each is judged without a declared numerics, and one of a schedule also with its own declared, and
with a sibling of the same accumulator declared, so that the interval and not only the equality of bits is asked. A
failure is a false alarm. Not covered: products that quantise an operand themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.diagnosis.mutate import contracts_with_cases, listed, poisoned
from oracle.errors import OptionError, OracleError
from oracle.numbers.formats import decode
from oracle.numbers.recipes import Recipe
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.routines import cases, data, get
from oracle.routines.base import Call
from oracle.routines.cases import Case
from oracle.routines.catalogue import Family, Fault, Stage, run
from oracle.tensorcore.predict import store
from oracle.tensorcore.schedules import get as get_schedule
from oracle.verdict.compare import Verdict

ARCHES = ("sm90", "sm89", "sm100", "sm120", "cpu")


@dataclass(frozen=True)
class Variant:
    """One legal output: where it comes from, what it is judged by, and the verdict."""

    case: str
    arch: str
    computed_by: str
    declared: str | None
    verdict: Verdict

    @property
    def false_alarm(self) -> bool:
        """A right output that fails."""
        return self.verdict.status.is_failure


def legal(count: int, *, seed: int, contracts: Sequence[str] | None = None) -> Iterator[Variant]:
    """``count`` random legal variants, the same ones for the same seed."""
    names = [
        n
        for n in (contracts or contracts_with_cases())
        if get(n).roles
    ]
    if not names:
        raise OptionError(f"{', '.join(contracts or ())}: no legal variants are known; name a product of FP8 operands")
    stream = data.Stream(f"legal/seed={seed}")
    made = 0
    while made < count:
        name = names[int(stream.integers(0, len(names), (1,))[0])]
        for variant in _variants(_random_case(name, stream), stream):
            yield variant
            made += 1
            if made == count:
                return


def _random_case(contract: str, stream: data.Stream) -> Case:
    """A case of the quick profile or an extra one with other extents, family and seed."""
    known = listed(contract, "quick")
    base = known[int(stream.integers(0, len(known), (1,))[0])]
    dims = []
    for name, extent in base.extents:
        if name == "m":
            extent = int(stream.integers(1, 70, (1,))[0]) if extent % 128 else extent
        elif name == "n":
            extent = int(stream.integers(1, 24, (1,))[0]) * 8
        elif name == "k" and contract not in ("per_token_group_quant_fp8",):
            extent = int(stream.integers(1, 40, (1,))[0]) * 16
        dims.append((name, extent))
    family = base.family
    seed = int(stream.integers(0, 1 << 30, (1,))[0])
    try:
        return cases.parse(str(replace(base, extents=tuple(dims), family=family, seed=seed)))
    except OracleError:
        return replace(base, seed=seed)


def _variants(case: Case, stream: data.Stream) -> Iterator[Variant]:
    contract, options = get(case.contract), case.call_options()
    call = Call(contract, case.inputs(), options, out_dtype=case.out_dtype)
    try:
        call = replace(call, inputs=poisoned(call.checked()))
    except OracleError:
        return  # the random extents do not suit the contract
    if call.operands.recipes:
        yield from _quantised(case, call)
        return
    if not call.operands.given:
        return  # quantised inside: not every schedule has an interval through a quantiser
    inputs = call.inputs
    arches = [arch for arch in ARCHES if arch in contract.numerics]
    arch = arches[int(stream.integers(0, len(arches), (1,))[0])]
    try:
        names = contract.arithmetics(replace(call, arch=arch))
    except OracleError:
        return  # no model of this arch fits (formats, scale kinds)
    if arch == "cpu":
        for how, output in _float32(call):
            yield Variant(
                str(case), arch, how, None, contract.judge(inputs, output, arch=arch, numerics=None, **options)
            )
        return
    chosen = names[int(stream.integers(0, len(names), (1,))[0])]
    out = run(replace(call, schedule=get_schedule(chosen)))
    assert isinstance(out, Tensor)
    floats = list(_float32(call))
    how, output = floats[int(stream.integers(0, len(floats), (1,))[0])]
    yield Variant(str(case), arch, how, None, contract.judge(inputs, output, arch=arch, numerics=None, **options))
    siblings = [n for n in names if n != chosen and _accumulator(n) == _accumulator(chosen)]
    for declared in (None, chosen, *siblings[:1]):
        verdict = contract.judge(inputs, out, arch=arch, numerics=declared, **options)
        yield Variant(str(case), arch, chosen, declared, verdict)


def _accumulator(name: str) -> tuple[object, ...]:
    schedule = get_schedule(name)
    return schedule.instruction, schedule.interval, schedule.scales_inside


def _quantised(case: Case, call: Call) -> Iterator[Variant]:
    contract, inputs, options = call.contract, call.inputs, call.options
    for recipe in call.operands.recipes:
        if not recipe.approximate:
            out = run(call, _by(recipe, contract.name))
            for declared in (None, recipe.name):
                verdict = contract.judge(inputs, out, arch="sm90", numerics=declared, **options)
                yield Variant(str(case), "sm90", recipe.name, declared, verdict)


def _by(recipe: Recipe, contract: str) -> Fault:
    """Another declared recipe, put in as a change: no fault, but the same machinery."""
    changes = {Stage.RECIPE: lambda call, value: recipe}
    return Fault(f"recipe {recipe.name}", Family.ARITHMETIC, "", changes, frozenset({contract}))


def _float32(call: Call) -> Iterator[tuple[str, Tensor]]:
    """Float32 kernels: scaled after each block, dequantised first, and backwards in K."""
    parts, shape, dtype = call.parts, call.operands.shape, call.out_dtype
    for how in ("float32 by blocks", "float32 dequantised", "float32 backwards"):
        out = torch.full((call.rows, shape[-1]), torch.nan, dtype=dtype, device="cpu")
        for part in parts:
            p = part.product
            if how != "float32 by blocks" and not bool(
                torch.isfinite(p.a_scale).all() and torch.isfinite(p.b_scale).all()
            ):
                break
            a, b = decode(p.a).to(torch.float32), decode(p.b).to(torch.float32)
            sb = p.b_scale.repeat_interleave(p.b_rows, dim=0)[: p.N]
            if how == "float32 by blocks":
                acc = torch.zeros((p.M, p.N), dtype=torch.float32, device="cpu")
                for block in range(p.B):
                    k = slice(block * p.block, min(p.K, (block + 1) * p.block))
                    acc = acc + (a[:, k] @ b[:, k].T) * (p.a_scale[:, block, None] * sb[None, :, block])
            else:
                a = a * p.a_scale.repeat_interleave(p.block, dim=1)[:, : p.K]
                b = b * sb.repeat_interleave(p.block, dim=1)[:, : p.K]
                acc = a.flip(1) @ b.flip(1).T if how == "float32 backwards" else a @ b.T
            if p.bias is not None:
                bias = to_dtype(decode(p.bias), torch.float32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
                acc = acc + bias[None, :]
            out[part.place] = store(acc, dtype)
        else:
            yield how, out.view(shape)
