"""How sensitive the oracle is: every fault must be noticed, and every output of a right kernel accepted.

1. *Mutation score* (:func:`mutate`): every fault, in every contract, over the cases of a profile. A mutant is KILLED by
   a case whose verdict fails. One that no case kills is

    EQUIVALENT   its output equals the right one in every bit wherever it is specified, and the catalogue argues why
    TOLERATED    its bits differ, but stay within what right kernels may differ by, and the catalogue argues why
    SURVIVED     neither: the oracle, or its data, is too weak
    UNTRIED      no case of the profile can show it; the reason is kept

   The score of a contract is killed / (killed + survived). Other projects' rules (:mod:`oracle.diagnosis.baselines`)
   are measured on the same data: a rule notices a mutant when it rejects it in a case whose right output it accepts,
   and raises a false alarm when it rejects a right output.

2. *False alarms* (:func:`right_variants`): a random case, and one way in which a right kernel may compute it: any
   schedule that the contract admits on any arch, with any of its epilogues; float32 sums in another order or after
   dequantising, on every arch; any declared recipe of a quantiser. Each is judged without a declared numerics; one of a
   schedule also with its own declared, and with another of the same accumulator declared, so that the interval and not
   only the equality of bits is tested. A failure is a false alarm. Not covered: products that quantise an operand
   themselves.

NaN equals any NaN.
Source: mutation testing (DeMillo, Lipton and Sayward, Computer 11(4), 1978).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.diagnosis.baselines import OWN_CONTRACT, Rule, own_data, rules
from oracle.diagnosis.explain import with_recipe
from oracle.errors import CaseError, OptionError, OracleError, among
from oracle.numbers.formats import decode, same_bits
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.routines import Contract, cases, data, get, profiles, registered
from oracle.routines.base import Call, Output, by_name
from oracle.routines.cases import Case
from oracle.routines.catalogue import Fault, agree, faults_of, run
from oracle.routines.edges import domain_of, valid
from oracle.tensorcore.logits import LOGITS
from oracle.tensorcore.predict import predict_product, store
from oracle.tensorcore.schedules import Split
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth.gemm import ScaledProduct, exact, rounded
from oracle.verdict.compare import Verdict

AFTER = "sm90.promote128.scale_after"
HOPELESS = 200


class Fate(StrEnum):
    """What became of a mutant."""

    KILLED = "KILLED"
    EQUIVALENT = "EQUIVALENT"
    TOLERATED = "TOLERATED"
    SURVIVED = "SURVIVED"
    UNTRIED = "UNTRIED"


@dataclass(frozen=True)
class Mutant:
    """One fault in one contract. ``by`` is the case that killed it; ``why`` the argument or the reason."""

    fault: str
    family: str
    contract: str
    fate: Fate
    by: str = ""
    why: str = ""
    noticed: Mapping[str, bool] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """A JSON-ready dict."""
        return {
            "fault": self.fault,
            "family": self.family,
            "contract": self.contract,
            "fate": str(self.fate),
            "by": self.by,
            "why": self.why,
            "noticed_by_rules": dict(self.noticed),
        }


@dataclass(frozen=True)
class Score:
    """All mutants of one contract, and the rules' false alarms on right outputs of the same cases."""

    contract: str
    mutants: tuple[Mutant, ...]
    cases: int
    alarms: Mapping[str, int]

    def count(self, fate: Fate) -> int:
        """Mutants of this fate."""
        return sum(mutant.fate is fate for mutant in self.mutants)

    @property
    def ratio(self) -> float:
        """Killed over killed and survived; 1 when there is neither."""
        killed, survived = self.count(Fate.KILLED), self.count(Fate.SURVIVED)
        return killed / (killed + survived) if killed + survived else 1.0

    def noticed(self, rule: str) -> int:
        """Killed mutants that the rule notices too."""
        return sum(m.noticed.get(rule, False) for m in self.mutants if m.fate is Fate.KILLED)


@dataclass(frozen=True)
class Trial:
    """One case prepared for mutation: the call, the numerics it is judged by, the right output."""

    case: Case
    call: Call
    numerics: str | None
    arch: str = "sm90"

    @property
    def product(self) -> bool:
        """Whether the output consists of scaled products."""
        return self.call.optional_operands is not None and bool(self.call.parts)

    @cached_property
    def right(self) -> dict[str, Tensor]:
        """The output of the right kernel, by name."""
        return by_name(run(self.call))

    @cached_property
    def truth(self) -> Tensor:
        """The correctly rounded result of a product on its specified elements, float64 ``[specified]``."""
        dtype = self.call.out_dtype
        return torch.cat([decode(rounded(p.product, exact(p.product), dtype)).flatten() for p in self.call.parts])

    def values(self, output: Tensor) -> Tensor:
        """The specified elements of a product's ``output [..., N]``, float64 ``[specified]``, in the order of
        :attr:`truth`."""
        flat = output.reshape(-1, output.shape[-1])
        return torch.cat([decode(part.of(flat)).flatten() for part in self.call.parts])

    def fails(self, output: Tensor | dict[str, Tensor]) -> bool:
        """Whether the contract's verdict on ``output`` (any shape and dtype that it admits) is a failure."""
        call, out = self.call, by_name(output).get("out")
        dtype = torch.bfloat16 if out is None else out.dtype
        if dtype not in self._asked:
            self._asked[dtype] = Call(call.contract, call.inputs, call.options, out_dtype=dtype, arch=self.arch)
        return call.contract.judged(self._asked[dtype], output, self.numerics).status.is_failure

    @cached_property
    def _asked(self) -> dict[torch.dtype, Call]:
        """The call as it is judged, by the dtype of the output: what does not depend on the output is found once."""
        return {}

    def same(self, output: Tensor | dict[str, Tensor]) -> bool:
        """Whether every specified bit of ``output`` (any shape and dtype) is that of the right kernel."""
        mine = by_name(output)
        if self.product:
            out, right = (x["out"].reshape(-1, x["out"].shape[-1]) for x in (mine, self.right))
            return all(bool(same_bits(part.of(out), part.of(right)).all()) for part in self.call.parts)
        pairs = [(mine[name], right) for name, right in self.right.items()]
        return all(x.shape == right.shape and bool(agree(x, right).all()) for x, right in pairs)


@lru_cache(maxsize=1)
def _trials(contract: str, profile: str) -> list[Trial]:
    """:func:`trials`, kept while the same contract is asked again."""
    return trials(contract, profile)


def trials(contract: str, profile: str) -> list[Trial]:
    """The cases of a profile and the extra ones, smallest first, as trials; CaseError when there are none."""
    results = [trial for case in listed(contract, profile) for trial in trials_of(case)]
    return sorted(results, key=lambda trial: sum(t.numel() for t in trial.call.inputs.values()))


def listed(contract: str, profile: str) -> list[Case]:
    """The cases of a profile and the extra ones of a contract; CaseError when there are none."""
    grammar = cases.grammars().get(contract)
    extra = () if grammar is None else (cases.parse(f"{contract}/{text}") for text in grammar.extra)
    chosen = [] if grammar is None else [*profiles.cases(contract, profile), *extra]
    if not chosen:
        sentence = among(contract, cases.grammars(), see="fp8-oracle list contracts")
        raise CaseError(f"no contract with cases is named {contract!r}; {sentence}")
    return list(dict.fromkeys(chosen))


def mutate(
    contract: str, *, profile: str = "quick", faults: Sequence[Fault] | None = None, with_rules: bool = True
) -> Score:
    """Every fault of ``contract`` over the trials of ``profile``.

    Parameters
    ----------
    faults : those to try; None tries all that apply to the contract.
    with_rules : also ask the other projects' rules (scaled products only), which runs every case.
    """
    prepared = _trials(contract, profile)
    asked = rules() if with_rules and all(trial.product for trial in prepared) else ()
    accepted = {rule.name: [t for t in prepared if _passes(rule, t, t.right["out"])] for rule in asked}
    alarms = {name: len(prepared) - len(passing) for name, passing in accepted.items()}
    results = [
        _mutant(fault, prepared, asked, accepted) for fault in (faults_of(contract) if faults is None else faults)
    ]
    return Score(contract, tuple(results), len(prepared), alarms)


def joined(pieces: Sequence[Score]) -> Score:
    """The score of a contract whose faults were tried in pieces, over the same trials."""
    ran = max(pieces, key=lambda piece: piece.cases)  # a lost piece has none
    return replace(ran, mutants=tuple(mutant for piece in pieces for mutant in piece.mutants))


def mutate_own_data(
    rule: Rule, *, faults: Sequence[Fault] | None = None, seed: int = 1
) -> dict[str, bool | None] | None:
    """What ``rule`` says of every fault of that contract on its project's own data: True noticed, None untried.

    None as a whole: the rule rejects a right result of that data, so nothing can be measured with it.
    The shape is 256 x 512 x 1024, as its test has it in kind.
    """
    result, contract = own_data(rule, m=256, n=512, k=1024, seed=seed), get(OWN_CONTRACT)
    call = Call(contract, result.inputs, {}, get_schedule("sm90.promote128"))
    right = decode(by_name(run(call))["out"])
    bf16 = to_dtype(result.reference, torch.bfloat16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
    reference = decode(bf16).flatten()
    if not rule.passes(right.flatten(), reference, torch.bfloat16):
        return None
    text: dict[str, bool | None] = {}
    for fault in faults_of(contract.name) if faults is None else faults:
        if fault.applies(call) is not None:
            text[fault.name] = None
            continue
        out = decode(by_name(run(call, fault))["out"])
        same = bool(((out == right) | (torch.isnan(out) & torch.isnan(right))).all())
        text[fault.name] = None if same else not rule.passes(out.flatten(), reference, torch.bfloat16)
    return text


def contracts_with_cases() -> list[str]:
    """Contracts that can be mutated: registered, with cases, with faults."""
    return [name for name in registered() if name in cases.grammars() and faults_of(name)]


def _mutant(
    fault: Fault, prepared: Sequence[Trial], asked: Iterable[Rule], accepted: Mapping[str, list[Trial]]
) -> Mutant:
    killer, tried, same, reasons = "", 0, True, dict[str, None]()
    for trial in prepared:
        if (reason := fault.applies(trial.call)) is not None:
            reasons[reason] = None
            continue
        tried += 1
        output = run(trial.call, fault)
        if trial.same(output):
            continue
        same = False
        if trial.fails(output):
            killer = str(trial.case)
            break
    fate, why = _fate(fault, killer, tried, same, reasons)
    noticed = {rule.name: _noticed(rule, fault, accepted[rule.name]) for rule in asked} if killer else {}
    return Mutant(fault.name, str(fault.family), prepared[0].call.contract.name, fate, killer, why, noticed)


def _fate(fault: Fault, killer: str, tried: int, same: bool, reasons: Mapping[str, None]) -> tuple[Fate, str]:
    if killer:
        return Fate.KILLED, ""
    if tried == 0:
        return Fate.UNTRIED, next(iter(reasons), "no case")
    if same and fault.same_if:
        return Fate.EQUIVALENT, fault.same_if
    if not same and fault.admissible_if:
        return Fate.TOLERATED, fault.admissible_if
    return Fate.SURVIVED, "same bits in every case" if same else "admissible in every case"


def _noticed(rule: Rule, fault: Fault, passing: Sequence[Trial]) -> bool:
    reached = (trial for trial in passing if fault.applies(trial.call) is None)
    return any(not _passes(rule, trial, by_name(run(trial.call, fault))["out"]) for trial in reached)


def _passes(rule: Rule, trial: Trial, output: Tensor) -> bool:
    return rule.passes(trial.values(output), trial.truth, output.dtype)


def trials_of(case: Case) -> Iterator[Trial]:
    """The trials of one case: its call with the poisons and the options that mutants are tried with."""
    contract, options = get(case.contract), case.call_options()
    call = Call(contract, case.inputs(), options)
    call = replace(call, inputs=poisoned(call))
    if call.optional_operands is None or not call.parts:
        out_dtype = case.out_dtype if "out_dtype" in options else torch.float32
        if case.contract == "per_channel_cast_to_fp8" and case.family == "randn":
            x = call.inputs["x"].clone()
            x[:, ::3] = 0  # channels below the floor, which no family has
            yield Trial(case, Call(contract, {"x": x}, options, out_dtype=torch.float32), None)
        for extra in ({}, *case.grammar.extra_options):
            more = {**options, **extra}
            if _admits(contract, call.inputs, more):
                yield Trial(case, Call(contract, call.inputs, more, out_dtype=out_dtype), None)
        return
    if call.operands.roles and not call.operands.given:
        return  # the routine quantises by itself: its quantisers are mutated under their own contracts
    arch, names = _arithmetics(replace(call, out_dtype=case.out_dtype))
    first = None if names[0] == IEEE32 else get_schedule(names[0])
    yield Trial(case, Call(contract, call.inputs, options, first, case.out_dtype), None, arch)
    if AFTER in names and case.family in ("randn", "positive"):
        yield Trial(case, Call(contract, call.inputs, options, get_schedule(AFTER), case.out_dtype), AFTER, arch)


def _arithmetics(call: Call) -> tuple[str, tuple[str, ...]]:
    """The arch whose right kernel is mutated and the numerics it admits: sm90 where the contract has a model of it."""
    refused: OracleError | None = None
    for arch in ("sm90", *call.contract.numerics):
        try:
            return arch, call.contract.arithmetics(replace(call, arch=arch))
        except OracleError as error:
            refused = error
    assert refused is not None
    raise refused


def _admits(contract: Contract, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> bool:
    try:
        contract.check(inputs, options)
    except OracleError:  # the contract takes no such call
        return False
    return True


def poisoned(call: Call) -> Mapping[str, Tensor]:
    """The inputs of a call with NaN in every row of ``a`` that the contract leaves unspecified."""
    operands = call.optional_operands
    filled = None if operands is None else operands.specified()
    if operands is None or filled is None or not operands.roles:
        return call.inputs
    padding, names = ~filled, (operands.roles["a"], operands.roles["a_scale"])
    a, scale = (call.inputs[name].clone() for name in names)
    a.view(torch.uint8).reshape(operands.rows, -1)[padding] = 0x7F
    if scale.numel() > 1:  # one scale serves all rows
        scale.reshape(operands.rows, -1)[padding] = torch.nan
    return {**call.inputs, names[0]: a, names[1]: scale}


# --- outputs of right kernels ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One output of a right kernel: where it comes from, what it is judged by, and the verdict."""

    case: str
    arch: str
    computed_by: str
    declared: str | None
    verdict: Verdict

    @property
    def false_alarm(self) -> bool:
        """A right output that fails."""
        return self.verdict.status.is_failure


def _draw(stream: data.Stream, low: int, high: int) -> int:
    return int(stream.integers(low, high, (1,))[0])


def right_variants(
    count: int, *, seed: int, contracts: Sequence[str] | None = None, arch: str | None = None
) -> Iterator[Variant]:
    """``count`` random outputs of right kernels, of products unless ``contracts`` says otherwise; the same ones for the
    same arguments. ``arch``: whose arithmetic, one that each contract has numerics for; None draws one for each case.

    Raises OptionError: ``HOPELESS`` cases in a row fit no numerics of the arch.
    """
    names = contracts or [n for n in contracts_with_cases() if get(n).roles]
    stream, result, empty = data.Stream(f"legal/seed={seed}"), 0, 0
    while result < count:
        name = names[_draw(stream, 0, len(names))]
        empty += 1
        for variant in _variants(_random_case(name, stream), stream, arch):
            yield variant
            result, empty = result + 1, 0
            if result == count:
                return
        if empty == HOPELESS:
            wanted = ", ".join(names)
            raise OptionError(f"{wanted}: no case fits any numerics of {arch}; see `fp8-oracle list numerics`")


def _random_case(contract: str, stream: data.Stream) -> Case:
    """A case of the quick profile or an extra one with another seed, and of a product with other extents."""
    known = listed(contract, "quick")
    base = known[_draw(stream, 0, len(known))]
    dims = []
    for name, extent in base.extents if get(contract).roles else ():
        if name == "m":
            extent = _draw(stream, 1, 70) if extent % 128 else extent
        elif name == "n":
            extent = _draw(stream, 1, 24) * 8
        elif name == "k" and name not in cases.grammars()[contract].kept:
            extent = _draw(stream, 1, 40) * 16
        dims.append((name, extent))
    seed = _draw(stream, 0, 1 << 30)
    extents = domain_of(contract).nearest(dict(dims), base.grammar.free) if dims else None
    try:
        case = cases.parse(str(replace(base, extents=tuple((extents or dict(base.extents)).items()), seed=seed)))
    except OracleError:
        return replace(base, seed=seed)
    return case if not dims or valid(case) else replace(base, seed=seed)


def _variants(case: Case, stream: data.Stream, only: str | None) -> Iterator[Variant]:
    contract, options = get(case.contract), case.call_options()
    dtype = case.out_dtype if "-" in case.dtypes else torch.bfloat16
    try:
        call = Call(contract, case.inputs(), options, out_dtype=dtype)
        call = replace(call, inputs=poisoned(call.checked()))
    except OracleError:
        return  # the random extents do not suit the contract

    def judged(output: Output, arch: str, how: str, declared: str | None = None) -> Variant:
        verdict = contract.judge(call.inputs, output, arch=arch, numerics=declared, **options)
        return Variant(str(case), arch, how, declared, verdict)

    arches = [only] if only is not None else [*contract.numerics] or ["sm90"]
    arch = arches[_draw(stream, 0, len(arches))]
    operands = call.optional_operands
    for recipe in operands.recipes if operands is not None else ():
        if not recipe.approximate:
            out = run(call, with_recipe(recipe, contract.name))
            for declared in (None, recipe.name):
                yield judged(out, arch, recipe.name, declared)
    if operands is None or operands.recipes or not operands.given:
        for how, output in _whole(replace(call, arch=arch)):
            yield judged(output, arch, how)
        return  # quantised inside: not every schedule has an interval through a quantiser
    try:
        names = contract.arithmetics(replace(call, arch=arch))
    except OracleError:
        return  # no model of this arch fits (formats, scale kinds)
    if arch == "cpu":
        for how, output in _float32(call):
            yield judged(output, arch, how)
        return
    chosen = names[_draw(stream, 0, len(names))]
    out = run(replace(call, schedule=get_schedule(chosen)))
    floats = list(_float32(call))
    how, output = floats[_draw(stream, 0, len(floats))]
    yield judged(output, arch, how)
    same_accumulator = [n for n in names if n != chosen and _accumulator(n) == _accumulator(chosen)]
    for declared in (None, chosen, *same_accumulator[:1]):
        yield judged(out, arch, chosen, declared)
    for how, output in _reordered(replace(call, schedule=get_schedule(chosen)), stream):
        yield judged(output, arch, how)


def _whole(call: Call) -> Iterator[tuple[str, Output]]:
    """The results of a routine by its definition, also with each value of an option that None leaves open, but for the
    dtype of the output; of logits by every arithmetic of the arch, their heads in both orders."""
    contract, options = call.contract, call.options
    if contract.numerics and set(LOGITS) & {name for names in contract.numerics.values() for name in names}:
        yield "the definition", contract.expected(call)
        heads = {"q": -2, "weights": -1, "q_sf": -1}
        backwards = {name: x.flip(heads[name]) if name in heads else x for name, x in call.inputs.items()}
        for name in set(contract.arithmetics(call)) & set(LOGITS):
            for how, inputs in (("", call.inputs), (", heads backwards", backwards)):
                yield name + how, contract.predict(inputs, numerics=name, **options)
        return
    yield "the definition", contract.kernel(call)
    for spec in contract.options:
        if options.get(spec.name) is None and spec.default is None and spec.name not in ("out_dtype", "out_type"):
            for value in spec.choices or ():
                if value is not None:
                    yield f"{spec.name}={value}", contract.kernel(replace(call, options={**options, spec.name: value}))


def _reordered(call: Call, stream: data.Stream) -> Iterator[tuple[str, Tensor]]:
    """The same sums by a kernel that splits K, cuts it elsewhere for every tile of columns, or permutes its steps."""
    schedule = call.schedule
    assert schedule is not None
    if schedule.scales_inside:
        return
    unit = schedule.interval or schedule.instruction.k
    steps = -(-max(part.product.K for part in call.parts) // unit)
    if steps < 2:
        return
    parts = _draw(stream, 2, min(steps, 6) + 1)
    split = Split(parts, unit, interleaved=bool(_draw(stream, 0, 2)))
    if all(schedule.into(split).why_not(p.product, out_dtype=call.out_dtype) is None for p in call.parts):
        result = run(replace(call, schedule=schedule.into(split)))
        assert isinstance(result, Tensor)
        yield f"{schedule.name}{split.suffix}", result
    cuts = [_draw(stream, 1, steps) * unit for _ in range(3)]
    width = 8 * _draw(stream, 1, 8)

    def by_tile(product: ScaledProduct) -> Tensor:
        tiles = [product.columns(j, min(product.N, j + width)) for j in range(0, product.N, width)]
        each = [schedule.into(Split(2, cuts=(cuts[i % 3],))) for i in range(len(tiles))]
        pairs = zip(tiles, each, strict=True)
        return torch.cat([predict_product(t, s, out_dtype=call.out_dtype) for t, s in pairs], dim=1)

    def permuted(product: ScaledProduct) -> Tensor:
        order = [int(i) for i in stream.order(product.K // unit)]
        ranges = [(i * unit, (i + 1) * unit) for i in order] + [(product.K // unit * unit, product.K)]
        moved = replace(product.over([ends for ends in ranges if ends[0] < ends[1]]), bias=product.bias)
        moved = replace(moved, c=product.c, alpha=product.alpha)
        return predict_product(moved, schedule, out_dtype=call.out_dtype)

    ways = {f"cut at {sorted(set(cuts))} by tiles of {width} columns": by_tile}
    if all(part.product.B == 1 for part in call.parts):
        ways["steps in random order"] = permuted
    for how, way in ways.items():
        out = torch.full((call.rows, call.parts[0].product.N), torch.nan, dtype=call.out_dtype, device="cpu")
        for part in call.parts:
            out[part.place] = way(part.product)
        yield f"{schedule.name}, {how}", out.view(call.operands.shape)


def _accumulator(name: str) -> tuple[object, ...]:
    schedule = get_schedule(name)
    return schedule.instruction, schedule.interval, schedule.scales_inside


def _float32(call: Call) -> Iterator[tuple[str, Tensor]]:
    """Float32 kernels: scaled after each block, dequantised first, and backwards in K."""
    shape, dtype = call.operands.shape, call.out_dtype
    for how in ("float32 by blocks", "float32 dequantised", "float32 backwards"):
        out = torch.full((call.rows, shape[-1]), torch.nan, dtype=dtype, device="cpu")
        for part in call.parts:
            p = part.product
            sa, sb = (x.scales.to(torch.float32) for x in (p.left, p.right))
            finite = bool(torch.isfinite(sa).all() and torch.isfinite(sb).all())
            if how != "float32 by blocks" and not finite:
                break
            a, b = p.left.value().to(torch.float32), p.right.value().to(torch.float32)
            sb = sb.repeat_interleave(p.b_rows, dim=0)[: p.N]
            if how == "float32 by blocks":
                acc = torch.zeros((p.M, p.N), dtype=torch.float32, device="cpu")
                for block in range(p.B):
                    k = slice(block * p.block, min(p.K, (block + 1) * p.block))
                    acc = acc + (a[:, k] @ b[:, k].T) * (sa[:, block, None] * sb[None, :, block])
            else:
                a = a * sa.repeat_interleave(p.block, dim=1)[:, : p.K]
                b = b * sb.repeat_interleave(p.block, dim=1)[:, : p.K]
                acc = a.flip(1) @ b.flip(1).T if how == "float32 backwards" else a @ b.T
            if p.alpha is not None:
                acc = acc * p.alpha.to(torch.float32).prod()
            if p.bias is not None:
                bias = to_dtype(decode(p.bias), torch.float32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
                acc = acc + bias[None, :]
            acc = acc if p.c is None else acc + p.c
            out[part.place] = store(acc, dtype)
        else:
            yield how, out.view(shape)
