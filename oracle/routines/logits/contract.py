"""Contracts of the attention logits of DeepSeek's sparse indexer, plain and paged, and of the split of their work.

Judged by the bits of an admitted reduction first (:mod:`oracle.tensorcore.logits`), else by the interval of its dot
products with the heads summed in any order. Outside its window a logit is unspecified, or -inf where the kernel is
asked to clean (``clean_logits=True``). ``numerics`` names a reduction, ``<schedule>.any`` for the dot products of a
schedule with heads in any order, or ``ieee32.any``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.accumulator import Accumulator, of_schedule
from oracle.bounds.engines import residue_bound
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.bounds.ieee32 import ieee32_bound
from oracle.bounds.interval import Interval, admissible
from oracle.bounds.logits import logits_bound
from oracle.errors import OptionError, ShapeError
from oracle.numbers.formats import same_bits
from oracle.numbers.rounding import Overflow, Rounding, pair_to_dtype
from oracle.routines.base import E4M3, F32, INTEGERS, Call, Contract, OptionSpec, Out, TensorSpec, positive, register
from oracle.routines.fault import Fault, Stage, fold
from oracle.tensorcore.logits import LOGITS, predict_logits
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth.gemm import ScaledProduct
from oracle.truth.logits import Logits, exact, from_pages, schedule, shares
from oracle.verdict.compare import Admissible, Comparison, Status, Verdict, Worst, verdict
from oracle.verdict.sets import Elements, Found, Prediction, Property, Sets, mostly_zero, rounded_to, with_float32

CLEAN = OptionSpec("clean_logits", False, (False, True), "-inf outside the window, instead of unspecified")
NUMERICS: Mapping[str, tuple[str, ...]] = {
    "sm90": ("sm90.mqa_logits",),
    "sm100": ("sm100.chain.any",),
    "cpu": (IEEE32,),
}


class LogitsContract(Contract):
    """A contract whose output is a matrix of logits; subclasses say which problem fills which rows."""

    section = "Attention logits"
    options: ClassVar[tuple[OptionSpec, ...]] = (CLEAN,)
    numerics = NUMERICS
    golden_arches = ("cpu", "sm90")

    @abstractmethod
    def problems(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> list[Logits]:
        """The problems whose rows, one after the other, are the output's."""

    @abstractmethod
    def columns(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> int:
        """Columns of the output; those beyond a problem's keys are outside every window."""

    def reference(self, inputs: Mapping[str, Tensor], **options: object) -> Tensor:
        """Float64; outside the window -inf when cleaning, else NaN."""

        def value(problem: Logits) -> Tensor:
            found = exact(problem)
            return found.hi + found.lo

        return self._assembled(inputs, self.check(inputs, options), value)

    def predict(self, inputs: Mapping[str, Tensor], *, numerics: str | None, **options: object) -> Tensor:
        """The bits of a reduction (None: the one of sm90), float32; outside the window as :meth:`reference`."""
        schedule = numerics or NUMERICS["sm90"][0]
        return self._assembled(
            inputs,
            self.check(inputs, options),
            lambda p: predict_logits(p.q, p.k, p.k_scale, p.weights, schedule=schedule),
        )

    def _assembled(
        self, inputs: Mapping[str, Tensor], options: Mapping[str, object], value: Callable[[Logits], Tensor]
    ) -> Tensor:
        """The values of every problem inside its window, one problem after the other."""
        columns, outside, rows = self.columns(inputs, options), -torch.inf if options["clean_logits"] else torch.nan, []
        for problem in self.problems(inputs, options):
            inside = value(problem).masked_fill(~problem.window(), outside)
            rows.append(_widened(inside, columns, outside))
        return torch.cat(rows)

    def outputs(self, call: Call) -> dict[str, Out]:
        problems, columns = self.problems(call.inputs, call.resolved), self.columns(call.inputs, call.resolved)
        return {"out": Out((sum(p.q.shape[0] for p in problems), columns), F32, self.specified(call, problems))}

    def specified(self, call: Call, problems: list[Logits]) -> Tensor | None:
        """Bool ``[rows, columns]``: inside the windows; None where the rest is to be cleaned."""
        return None if call.resolved["clean_logits"] else _windows(problems, self.columns(call.inputs, call.resolved))

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        problems, columns = self.problems(call.inputs, call.resolved), self.columns(call.inputs, call.resolved)
        window = _windows(problems, columns)
        specified = torch.ones_like(window) if call.resolved["clean_logits"] else window

        def predictions(name: str) -> Iterator[Prediction]:
            if name in LOGITS and all(problem.heads % 8 == 0 for problem in problems):
                total = int(specified.sum())

                def same(found: Found) -> bool:
                    bits = self.predict(call.inputs, numerics=name, **call.options)
                    return bool((same_bits(bits, found["out"]) | ~specified).all())

                yield Prediction(f"bits of {name}", name, total, same)

        def sets(name: str, wider: bool) -> Sets:
            def make() -> tuple[dict[str, Admissible], str]:
                admitted, basis = _admissible(problems, name, specified)
                return {"out": admitted}, basis

            mistrust = lambda found: _why_mistrust(problems, found["out"], window)  # noqa: E731
            return Elements(make, name, wider, lambda: predictions(name), mistrust)

        name = self.arithmetics(call, numerics)[0]
        return with_float32(sets, name, declared=numerics is not None)

    def expected(self, call: Call) -> dict[str, Tensor]:
        """Float32; NaN outside the window (-inf when cleaning) and where a float32 sum may overflow."""
        problems = self.problems(call.inputs, call.resolved)
        window = _windows(problems, self.columns(call.inputs, call.resolved))
        found, _ = _admissible(problems, IEEE32, torch.ones_like(window) if call.resolved["clean_logits"] else window)
        assert found.open is not None and found.specified is not None
        return {"out": rounded_to(torch.where(found.open | ~found.specified, torch.nan, found.expected), torch.float32)}

    def why_not(self, call: Call, numerics: str) -> str | None:
        if numerics not in LOGITS and numerics.removesuffix(".any") not in LOGITS:
            _accumulator(numerics)
        return None

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        given = fold(call, faults, Stage.READ, dict(call.inputs))
        problems, columns = self.problems(given, call.resolved), self.columns(given, call.resolved)
        bits = (predict_logits(p.q, p.k, p.k_scale, p.weights) for p in problems)
        out = torch.cat([_widened(rows, columns, -torch.inf) for rows in bits])
        out = out.masked_fill(~_windows(problems, columns), -torch.inf)
        made: Tensor = fold(call, faults, Stage.WRITE, out)
        return {"out": made}


@register
class Fp8MqaLogits(LogitsContract):
    name = "fp8_mqa_logits"
    gpu = True
    summary = "weighted sums over heads of relu(<q, k>), scaled per key, inside [ks, ke)"
    source = "DeepGEMM fp8_mqa_logits"
    inputs = (
        TensorSpec("q", E4M3, ("M", "H", "D"), "query codes"),
        TensorSpec("k", E4M3, ("N", "D"), "key codes"),
        TensorSpec("k_scale", F32, ("N",), "scale of each key", contiguous=True),
        TensorSpec("weights", F32, ("M", "H"), "weight of each head"),
        TensorSpec("cu_seqlen_ks", INTEGERS, ("M",), "first key of each row"),
        TensorSpec("cu_seqlen_ke", INTEGERS, ("M",), "end of the keys of each row, excluded"),
    )

    def problems(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> list[Logits]:
        return [Logits(*(inputs[spec.name] for spec in self.inputs))]

    def columns(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> int:
        return inputs["k"].shape[0]


@register
class Fp8PagedMqaLogits(LogitsContract):
    """``[B * next_n, max_model_len]``; ``max_model_len`` None takes the blocks of the table."""

    name = "fp8_paged_mqa_logits"
    gpu = True
    summary = "the same logits with keys and scales in the blocks of a paged cache"
    source = "DeepGEMM fp8_paged_mqa_logits"
    inputs = (
        TensorSpec("q", E4M3, ("B", "T", "H", "D"), "query codes of the T new tokens of each request"),
        TensorSpec("kv_cache", (torch.uint8,), None, "[blocks, 64, 1, D + 4]: codes of a block, then its scales"),
        TensorSpec("weights", F32, ("R", "H"), "weight of each head, R = B T"),
        TensorSpec("context_lens", INTEGERS, None, "[B] or [B, T]: keys of each request"),
        TensorSpec("block_tables", INTEGERS, ("B", "L"), "blocks of each request"),
    )
    options = (CLEAN, OptionSpec("max_model_len", None, None, "columns of the output"))

    def extents(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        bound = super().extents(inputs)
        if bound["R"] != bound["B"] * bound["T"]:
            raise ShapeError(f"weights has {bound['R']} rows; B={bound['B']} requests of T={bound['T']} tokens differ")
        if inputs["kv_cache"].dim() != 4 or inputs["kv_cache"].shape[3] != bound["D"] + 4:
            shape = list(inputs["kv_cache"].shape)
            raise ShapeError(f"kv_cache has shape {shape}; pass [blocks, P, 1, {bound['D'] + 4}]")
        return bound

    def problems(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> list[Logits]:
        q, cache, weights, lens, tables = (inputs[spec.name] for spec in self.inputs)
        return from_pages(q, cache, weights, lens, tables, max_model_len=self.columns(inputs, options))

    def columns(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> int:
        if options["max_model_len"] is None:
            return inputs["block_tables"].shape[1] * inputs["kv_cache"].shape[1]
        columns = positive(options, "max_model_len")
        if columns >= 1 << 31:
            raise OptionError(f"max_model_len={columns}; context lengths are int32, so it is below {1 << 31}")
        return columns


@register
class PagedMqaLogitsMetadata(Contract):
    """Any partition is right: every segment of four blocks once, in order, shares that differ by one at most."""

    name = "get_paged_mqa_logits_metadata"
    gpu = True
    section = "Attention logits"
    summary = "[num_sms + 1, 2] starts (request, segment) that split the work evenly"
    source = "DeepGEMM get_paged_mqa_logits_metadata"
    inputs = (TensorSpec("context_lens", INTEGERS, None, "[B] or [B, next_n]"),)
    options = (OptionSpec("block_size", 64, None, "keys of a block"), OptionSpec("num_sms", 132, None, "processors"))

    def reference(self, inputs: Mapping[str, Tensor], **options: object) -> Tensor:
        resolved = self.check(inputs, options)
        return schedule(inputs["context_lens"], positive(resolved, "block_size"), positive(resolved, "num_sms"))

    def outputs(self, call: Call) -> dict[str, Out]:
        return {"out": Out((positive(call.resolved, "num_sms") + 1, 2), (torch.int32,))}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        block, processors = positive(call.resolved, "block_size"), positive(call.resolved, "num_sms")

        def decide(found: Found) -> Verdict:
            split = shares(found["out"], call.inputs["context_lens"], block)
            if isinstance(split, str):
                said = f"no partition of the work: {split}"
                basis = "partition of the work"
                return Verdict(Status.FAILED, said, processors, processors, basis=basis, pattern=split)
            return _judge_balance(split)

        return [Property(decide)]


def _judge_balance(found: list[int]) -> Verdict:
    share = torch.tensor(found, dtype=torch.float64, device="cpu")
    low, high = sum(found) // len(found), -(-sum(found) // len(found))
    bad = (share < low) | (share > high)
    worst = None
    if bool(bad.any()):
        at = int(torch.where(bad, (share - low).abs(), -torch.ones_like(share)).argmax())
        worst = Worst((at,), float(share[at]), low, high, low, math.inf, "segments")
    comparison = Comparison(int(bad.sum()), len(found), 0, math.inf if worst else 0.0, worst, bad)
    mistrust = "there is no work to split" if sum(found) == 0 else None
    return verdict(comparison, basis="every segment once, shares that differ by one at most", mistrust=mistrust)


def _admissible(problems: list[Logits], name: str, specified: Tensor) -> tuple[Admissible, str]:
    basis, columns, acc = "", specified.shape[1], _accumulator(name)

    def bound(product: ScaledProduct) -> Interval:
        return ieee32_bound(product) if acc is None else residue_bound(product, acc)

    edges: tuple[list[Tensor], ...] = ([], [], [])
    opened = []
    for problem in problems:
        value = exact(problem)
        interval = logits_bound(problem, bound)
        basis = interval.name
        nearest = pair_to_dtype(
            value.hi, value.lo, torch.float32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF
        )
        found = admissible(value, nearest, interval)
        window = problem.window()
        for rows, edge in zip(edges, (found.low, found.high, found.expected), strict=True):
            rows.append(_widened(edge.masked_fill(~window, -torch.inf), columns, -torch.inf))
        assert found.open is not None
        opened.append(_widened(found.open & window, columns, False))
    low, high, expected = (torch.cat(rows) for rows in edges)
    return Admissible(low, high, expected, specified=specified, open=torch.cat(opened)), basis


def _accumulator(name: str) -> Accumulator | None:
    """The accumulator of the dot products of a named reduction; None for float32."""
    if name == IEEE32:
        return None
    base = name.removesuffix(".any")
    return of_schedule(get_schedule(LOGITS[base].chain if base in LOGITS else base))


def _why_mistrust(problems: list[Logits], out: Tensor, window: Tensor) -> str | None:
    if not bool(window.any()):
        return "every window is empty"
    for what in ("k_scale", "weights"):
        tensors = [getattr(problem, what) for problem in problems if getattr(problem, what).numel()]
        if max(t.numel() for t in tensors) > 1 and all(bool((t == t.flatten()[0]).all()) for t in tensors):
            return f"all values of {what} are equal, so a wrong index changes nothing"
    return mostly_zero(out[window])


def _windows(problems: list[Logits], columns: int) -> Tensor:
    """Bool ``[rows, columns]``: the keys that each row attends to."""
    return torch.cat([_widened(problem.window(), columns, False) for problem in problems])


def _widened(x: Tensor, columns: int, fill: float) -> Tensor:
    """``x [M, N]`` with columns appended, or cut, to ``columns``."""
    missing = columns - x.shape[1]
    if missing <= 0:
        return x[:, :columns]
    return torch.cat([x, torch.full((x.shape[0], missing), fill, dtype=x.dtype, device=x.device)], dim=1)
