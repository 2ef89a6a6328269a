"""Contracts of the attention logits of DeepSeek's sparse indexer, plain and paged, and of the split of their work.

Sources: DeepGEMM fp8_mqa_logits, fp8_fp4_mqa_logits, their paged forms and their metadata, @54e2261. Not covered:
tokens of several requests in one (``indices``).

NaN of a weight, or of the scale of a key, stays in every logit that it enters; that of a dot product may be left out.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.accumulator import Accumulator, of_schedule
from oracle.bounds.engines import residue_bound
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.bounds.ieee32 import ieee32_bound
from oracle.bounds.interval import Interval, admissible
from oracle.bounds.logits import logits_bound
from oracle.errors import InputError, OptionError, ShapeError
from oracle.numbers.formats import same_bits
from oracle.numbers.rounding import Overflow, Rounding, pair_to_dtype
from oracle.routines.base import (
    E4M3,
    F32,
    INTEGERS,
    Call,
    Contract,
    Inputs,
    Options,
    OptionSpec,
    Out,
    TensorSpec,
    positive,
    register,
)
from oracle.routines.fault import Fault, Stage, fold
from oracle.routines.traits import Kind
from oracle.tensorcore.logits import FP4, LOGITS, predict_logits
from oracle.tensorcore.schedules import Schedule
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth.gemm import Exact, ScaledProduct
from oracle.truth.logits import BLOCK, Logits, exact, from_pages, nibbles, schedule, shares, words
from oracle.verdict.compare import Admissible, Comparison, Status, Verdict, Worst, verdict
from oracle.verdict.sets import Elements, Found, Prediction, Property, Sets, mostly_zero, rounded_to, with_float32

CLEAN = OptionSpec("clean_logits", False, (False, True), "-inf outside the window, instead of unspecified")
NUMERICS: Mapping[str, tuple[str, ...]] = {
    "sm90": ("sm90.mqa_logits",),
    "sm100": ("sm100.mqa_logits",),
    "sm120": ("sm120.chain.any",),
    "cpu": (IEEE32,),
}
NUMERICS_FP4: Mapping[str, tuple[str, ...]] = {
    "sm100": tuple(name for name in LOGITS if name.startswith(FP4)),
    **{arch: (f"{arch}.bf16.dequantised.any",) for arch in ("sm90", "sm89", "sm86", "sm80")},
    "cpu": (IEEE32,),
}
BYTES, WORDS = (torch.uint8,), (torch.int32,)


class LogitsContract(Contract):
    """Weighted sums over heads, for the keys ``n`` in the window of a row ``m``:

        logits[m, n] = k_scale[n] * sum_h weights[m, h] * max(0, <q[m, h], k[n]>)

    Dot products, products and sums are float32 operations; heads may be summed in any order, ``k_scale`` may multiply
    before or after. Outside its window a logit may hold anything, or is -inf with ``clean_logits``; a window may be
    empty. NaN in a weight or scale gives NaN in every logit of the window that it enters, and so does an infinite
    weight or scale times 0. NaN in a query or key may give NaN there, or be left out by ``max(0, .)``, as ``fmaxf`` of
    a GPU does: nothing is claimed of those logits. ``numerics`` names a reduction of the heads, ``<schedule>.any`` for
    the dot products of a schedule with heads in any order, or ``ieee32.any``.

    Subclasses
    ----------
    A subclass says which problem fills which rows (``problems``), and how many columns the output has."""

    section = "Attention logits"
    options: ClassVar[tuple[OptionSpec, ...]] = (CLEAN,)
    numerics = NUMERICS
    golden_arches: ClassVar[tuple[str, ...]] = ("cpu", "sm90")

    @abstractmethod
    def problems(self, inputs: Inputs, options: Options) -> list[Logits]:
        """The problems whose rows, one after the other, are the output's."""

    @abstractmethod
    def columns(self, inputs: Inputs, options: Options) -> int:
        """Columns of the output; those beyond a problem's keys are outside every window."""

    def laid(self, problem: Logits, x: Tensor, columns: int, fill: float) -> Tensor:
        """What the keys of a problem hold, ``x`` ``[M, N]`` of any dtype, in so many columns of the output: ``[M,
        columns]`` of that dtype."""
        return _widened(x, columns, fill)

    def dtypes(self, call: Call) -> tuple[torch.dtype, ...]:
        """Those that the output may have."""
        return F32

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        """Float64 ``[rows, columns]``, or what the options name; outside the window -inf when cleaned, else NaN."""
        resolved = self.check(inputs, options)
        dtype = resolved.get("out_dtype")

        def value(problem: Logits) -> Tensor:
            logits = exact(problem)
            return _nearest(logits, dtype) if isinstance(dtype, torch.dtype) else logits.hi + logits.lo

        return self._assembled(inputs, resolved, value)

    def predict(self, inputs: Inputs, *, numerics: str | None, **options: object) -> Tensor:
        """The bits of a reduction (None: the usual one), ``[rows, columns]`` in float32, or in the dtype that the
        options name; outside the window as :meth:`reference`."""
        resolved = self.check(inputs, options)
        named = resolved.get("out_dtype")
        bits = self._assembled(inputs, resolved, lambda p: self._bits(p, numerics))
        return bits.to(named) if isinstance(named, torch.dtype) else bits

    def by_schedule(self, call: Call, schedule: Schedule, numerics: str) -> dict[str, Tensor]:
        """The dot products by ``schedule``, the heads added as the reduction ``numerics`` adds them."""
        bits = self._assembled(call.inputs, call.resolved, lambda p: self._bits(p, numerics, schedule))
        return {"out": bits.to(self.dtypes(call)[0])}

    def _bits(self, p: Logits, numerics: str | None = None, chain: Schedule | None = None) -> Tensor:
        name = numerics or next(iter(self.numerics.values()))[0]
        return predict_logits(
            p.q, p.k, p.k_scale, p.weights, q_blocks=p.q_blocks, k_blocks=p.k_blocks, schedule=name, chain=chain
        )

    def _assembled(self, inputs: Inputs, options: Options, value: Callable[[Logits], Tensor]) -> Tensor:
        """The values of every problem inside its window, one problem after the other."""
        columns, outside, rows = self.columns(inputs, options), -torch.inf if options["clean_logits"] else torch.nan, []
        for problem in self.problems(inputs, options):
            inside = value(problem).masked_fill(~problem.window(), outside)
            rows.append(self.laid(problem, inside, columns, outside))
        return torch.cat(rows)

    def outputs(self, call: Call) -> dict[str, Out]:
        problems, columns = self.problems(call.inputs, call.resolved), self.columns(call.inputs, call.resolved)
        shape = sum(p.q.shape[0] for p in problems), columns
        return {"out": Out(shape, self.dtypes(call), self.specified(call, problems))}

    def specified(self, call: Call, problems: list[Logits]) -> Tensor | None:
        """Bool ``[rows, columns]``: inside the windows; None where the rest is to be cleaned."""
        if call.resolved["clean_logits"]:
            return None
        return self._windows(problems, self.columns(call.inputs, call.resolved))

    def _windows(self, problems: list[Logits], columns: int) -> Tensor:
        """Bool ``[rows, columns]``: the keys that each row attends to."""
        return torch.cat([self.laid(problem, problem.window(), columns, False) for problem in problems])

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        problems, columns = self.problems(call.inputs, call.resolved), self.columns(call.inputs, call.resolved)
        window = self._windows(problems, columns)
        specified = torch.ones_like(window) if call.resolved["clean_logits"] else window
        names = self.arithmetics(call, numerics)

        def same(outputs: Found, name: str) -> bool:
            bits = self.predict(call.inputs, numerics=name, **call.options).to(outputs["out"].dtype)
            return bool((same_bits(bits, outputs["out"]) | ~specified).all())

        def predictions(wider: bool) -> Iterator[Prediction]:
            for name in () if wider else names:
                if name in LOGITS and all(problem.heads % LOGITS[name].heads == 0 for problem in problems):
                    check = partial(same, name=name)
                    yield Prediction(f"bits of {name}", name, int(specified.sum()), check)

        def sets(name: str, wider: bool) -> Sets:
            def make() -> tuple[dict[str, Admissible], str]:
                admitted, basis = self._admissible(call, problems, name, specified)
                return {"out": admitted}, basis

            mistrust = lambda outputs: _why_mistrust(problems, outputs["out"], window)  # noqa: E731
            return Elements(make, name, wider, lambda: predictions(wider), mistrust)

        return with_float32(sets, names[0], declared=numerics is not None)

    def expected(self, call: Call) -> dict[str, Tensor]:
        """NaN outside the window (-inf when cleaning) and where a float32 sum may overflow."""
        problems = self.problems(call.inputs, call.resolved)
        window = self._windows(problems, self.columns(call.inputs, call.resolved))
        specified = torch.ones_like(window) if call.resolved["clean_logits"] else window
        intervals, _ = self._admissible(call, problems, IEEE32, specified)
        assert intervals.open is not None and intervals.specified is not None
        value = torch.where(intervals.open | ~intervals.specified, torch.nan, intervals.expected)
        return {"out": rounded_to(value, self.dtypes(call)[0])}

    def why_not(self, call: Call, numerics: str) -> str | None:
        base = numerics.removesuffix(".any")
        if numerics == IEEE32:
            return None
        schedule = get_schedule(LOGITS[base].chain if base in LOGITS else base)
        for problem in self.problems(call.inputs, call.resolved):
            if (reason := schedule.why_not(problem.products(), out_dtype=torch.float32)) is not None:
                return reason
        return None

    def _admissible(self, call: Call, problems: list[Logits], name: str, specified: Tensor) -> tuple[Admissible, str]:
        basis, columns, acc, dtype = "", specified.shape[1], _accumulator(name), self.dtypes(call)[0]

        def bound(product: ScaledProduct) -> Interval:
            return ieee32_bound(product) if acc is None else residue_bound(product, acc)

        edges: tuple[list[Tensor], ...] = ([], [], [])
        opened = []
        for problem in problems:
            value = exact(problem)
            interval = logits_bound(problem, bound)
            basis = interval.name
            intervals = admissible(value, _nearest(value, dtype), interval)
            window = problem.window()
            for rows, edge in zip(edges, (intervals.low, intervals.high, intervals.expected), strict=True):
                rows.append(self.laid(problem, edge.masked_fill(~window, -torch.inf), columns, -torch.inf))
            assert intervals.open is not None
            opened.append(self.laid(problem, intervals.open & window, columns, False))
        low, high, expected = (torch.cat(rows) for rows in edges)
        return Admissible(low, high, expected, specified=specified, open=torch.cat(opened)), basis

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        inputs = fold(call, faults, Stage.READ, dict(call.inputs))
        problems, columns = self.problems(inputs, call.resolved), self.columns(inputs, call.resolved)
        out = torch.cat([self.laid(p, self._bits(p), columns, -torch.inf) for p in problems])
        out = out.masked_fill(~self._windows(problems, columns), -torch.inf).to(self.dtypes(call)[0])
        outputs: Tensor = fold(call, faults, Stage.WRITE, out)
        return {"out": outputs}


@register
class Fp8MqaLogits(LogitsContract):
    """The window of row ``m`` is ``cu_seqlen_ks[m] <= n < cu_seqlen_ke[m]``, cut to the N keys."""

    name = "fp8_mqa_logits"
    gpu = True
    summary = "weighted sums over heads of relu(<q, k>), scaled per key, inside [ks, ke)"
    source = "DeepGEMM fp8_mqa_logits"
    inputs = (
        TensorSpec("q", Kind.CODES, E4M3, ("M", "H", "D"), "query codes"),
        TensorSpec("k", Kind.CODES, E4M3, ("N", "D"), "key codes"),
        TensorSpec("k_scale", Kind.SCALES, F32, ("N",), "scale of each key", contiguous=True),
        TensorSpec("weights", Kind.WEIGHTS, F32, ("M", "H"), "weight of each head"),
        TensorSpec("cu_seqlen_ks", Kind.OFFSETS, INTEGERS, ("M",), "first key of each row"),
        TensorSpec("cu_seqlen_ke", Kind.OFFSETS, INTEGERS, ("M",), "end of the keys of each row, excluded"),
    )

    def problems(self, inputs: Inputs, options: Options) -> list[Logits]:
        return [Logits(*(inputs[spec.name] for spec in self.inputs))]

    def columns(self, inputs: Inputs, options: Options) -> int:
        return inputs["k"].shape[0]


class Paged(LogitsContract):
    """``out [B T, max_model_len]`` (None: ``L P`` columns), row ``b T + t`` of new token ``t`` of request ``b``. Key
    ``n`` of request ``b`` lies in block ``block_tables[b, n // P]`` at ``n mod P``; entries behind the last block are
    not read.

    ``context_lens [B]`` counts the keys of a request with its T new tokens: token ``t`` sees the keys
    ``n < context_lens[b] - T + 1 + t``; a length is T - 1 or more, or 0, and then none is seen. With
    ``context_lens [B, T]`` it sees ``n < context_lens[b, t]``. A length is at most ``max_model_len``.

    A block of the cache is ``P * D`` codes, key after key, then P scales of four bytes: ``[blocks, P, 1, D + 4]`` is
    its size, not its layout. Byte i of a block is its element ``[i // C, 0, i % C]``, of C columns, whatever the
    strides are. A kernel that needs the bytes of a block side by side raises NotImplementedError where they are not."""

    def refuse(self, inputs: Inputs, options: Options) -> None:
        bound = self.extents(inputs)
        check_cache(inputs["kv_cache"], bound, bound.get("D", bound.get("D2", 0)))
        lens = inputs["context_lens"]
        short = lens[(lens != 0) & (lens < bound["T"] - 1)] if lens.dim() == 1 else lens[:0]
        if short.numel():
            least = bound["T"] - 1
            raise InputError(
                f"context_lens has {int(short.min())}; with T={bound['T']} new tokens the least is {least}, or 0"
            )

    def columns(self, inputs: Inputs, options: Options) -> int:
        return paged_columns(inputs, options)


@register
class Fp8PagedMqaLogits(Paged):
    """P is 64."""

    name = "fp8_paged_mqa_logits"
    shapes = {"out": "[B T, max_model_len], None: L P columns"}
    gpu = True
    summary = "the same logits with keys and scales in the blocks of a paged cache"
    source = "DeepGEMM fp8_paged_mqa_logits"
    inputs = (
        TensorSpec("q", Kind.CODES, E4M3, ("B", "T", "H", "D"), "query codes of the T new tokens of each request"),
        TensorSpec(
            "kv_cache", Kind.CODES, (torch.uint8,), None, "[blocks, 64, 1, D + 4]: codes of a block, then its scales"
        ),
        TensorSpec("weights", Kind.WEIGHTS, F32, ("R", "H"), "weight of each head, R = B T"),
        TensorSpec("context_lens", Kind.COUNTS, INTEGERS, None, "[B] or [B, T]: keys of each request"),
        TensorSpec("block_tables", Kind.PAGES, INTEGERS, ("B", "L"), "blocks of each request"),
    )
    options = (CLEAN, OptionSpec("max_model_len", None, None, "columns of the output"))

    def problems(self, inputs: Inputs, options: Options) -> list[Logits]:
        q, cache, weights, lens, tables = (inputs[spec.name] for spec in self.inputs)
        return from_pages(q, cache, weights, lens, tables, max_model_len=self.columns(inputs, options))


def check_cache(cache: Tensor, bound: Mapping[str, int], width: int) -> None:
    """Refuse ``cache`` ``[blocks, P, 1, width + 4]``, uint8, of another width than codes and scale of a key take, and
    another number of weights. Raises ShapeError."""
    if bound["R"] != bound["B"] * bound["T"]:
        raise ShapeError(f"weights has {bound['R']} rows; B={bound['B']} requests of T={bound['T']} tokens differ")
    if cache.dim() != 4 or cache.shape[3] != width + 4:
        raise ShapeError(f"kv_cache has shape {list(cache.shape)}; pass [blocks, P, 1, {width + 4}]")


def paged_columns(inputs: Inputs, options: Options) -> int:
    """``max_model_len``, or what the blocks of the table hold."""
    if options["max_model_len"] is None:
        return inputs["block_tables"].shape[1] * inputs["kv_cache"].shape[1]
    columns = positive(options, "max_model_len")
    if columns >= 1 << 31:
        raise OptionError(f"max_model_len={columns}; context lengths are int32, so it is below {1 << 31}")
    return columns


OUT = OptionSpec(
    "out_dtype",
    None,
    (None, torch.float32, torch.bfloat16),
    "logits_dtype; None: either dtype of the output below is right",
)
WEIGHTS = TensorSpec(
    "weights", Kind.WEIGHTS, (torch.float32, torch.bfloat16), None, "weight of each head; bf16 with a bf16 output"
)


class Fp4Logits(LogitsContract):
    """E2M1 codes, two in a byte, the even one in the low nibble. Their scales lie four in an int32: byte j (bits 8 j to
    8 j + 7, from the lowest) is the scale 2^(byte - 127) of elements 32 j to 32 j + 31, and 255 is NaN; of ``D = 64``
    two bytes are used. They enter the dot products, and NaN of one is like NaN of a code; k_scale is 1 here. The output
    is float32 or bfloat16, rounded once; ``weights`` are bfloat16 only with a bfloat16 output."""

    numerics = NUMERICS_FP4
    golden_arches = ("cpu", "sm90", "sm100")

    def dtypes(self, call: Call) -> tuple[torch.dtype, ...]:
        named = call.resolved["out_dtype"]
        if isinstance(named, torch.dtype):
            return (named,)
        return tuple(sorted((torch.bfloat16, torch.float32), key=lambda dtype: dtype is not call.out_dtype))

    def refuse(self, inputs: Inputs, options: Options) -> None:
        bound = self.extents(inputs)
        if 2 * bound["D2"] not in (BLOCK * n for n in (1, 2, 3, 4)):
            raise ShapeError(f"q has D={2 * bound['D2']}; a word holds the scales of one to four blocks of {BLOCK}")
        half = inputs["weights"].dtype is torch.bfloat16
        if half and options["out_dtype"] is not torch.bfloat16:
            raise OptionError(f"weights are bfloat16 and out_dtype={options['out_dtype']}; pass torch.bfloat16")


@register
class Fp4MqaLogits(Fp4Logits):
    """The window of row ``m`` is ``cu_seqlen_ks[m] <= n < cu_seqlen_ke[m]``, cut to the N keys. With
    ``max_seqlen_k`` (at least the longest window, without ``clean_logits``) row ``m`` has so many columns, of which
    column 0 is its key ``cu_seqlen_ks[m]``."""

    name = "fp8_fp4_mqa_logits"
    shapes = {"out": "[M, N]; with max_seqlen_k [M, max_seqlen_k]"}
    gpu = True
    summary = "the same logits of E2M1 codes with E8M0 scales of 32 inside the dot products"
    source = "DeepGEMM fp8_fp4_mqa_logits with a scale of q"
    inputs = (
        TensorSpec("q", Kind.CODES, BYTES, ("M", "H", "D2"), "query codes, two a byte: [M, H, D/2]"),
        TensorSpec("q_sf", Kind.SCALES, WORDS, ("M", "H"), "four E8M0 bytes of each head"),
        TensorSpec("k", Kind.CODES, BYTES, ("N", "D2"), "key codes, two a byte"),
        TensorSpec("k_sf", Kind.SCALES, WORDS, ("N",), "four E8M0 bytes of each key"),
        replace(WEIGHTS, dims=("M", "H")),
        TensorSpec("cu_seqlen_ks", Kind.OFFSETS, INTEGERS, ("M",), "first key of each row"),
        TensorSpec("cu_seqlen_ke", Kind.OFFSETS, INTEGERS, ("M",), "end of the keys of each row, excluded"),
    )
    options = (CLEAN, OUT, OptionSpec("max_seqlen_k", 0, None, "columns, each row from its first key; 0: every key"))

    def refuse(self, inputs: Inputs, options: Options) -> None:
        longest = int((inputs["cu_seqlen_ke"].long() - inputs["cu_seqlen_ks"].long()).max())
        columns = options["max_seqlen_k"]
        if not isinstance(columns, int) or columns < 0 or columns and (columns < longest or options["clean_logits"]):
            raise OptionError(
                f"max_seqlen_k={columns}, clean_logits={options['clean_logits']}: it is 0, or at least the longest "
                f"window ({longest}) and cleans nothing"
            )

    def problems(self, inputs: Inputs, options: Options) -> list[Logits]:
        q, q_sf, k, k_sf, weights, start, stop = (inputs[spec.name] for spec in self.inputs)
        depth, one = 2 * k.shape[1], torch.ones(k.shape[0], dtype=torch.float32, device=k.device)
        blocks = words(q_sf, depth), words(k_sf, depth)
        problem = Logits(nibbles(q), nibbles(k), one, weights, start, stop, *blocks)
        return [replace(problem, first=start) if options["max_seqlen_k"] else problem]

    def columns(self, inputs: Inputs, options: Options) -> int:
        return int(str(options["max_seqlen_k"])) or inputs["k"].shape[0]

    def laid(self, problem: Logits, x: Tensor, columns: int, fill: float) -> Tensor:
        if problem.first is None:
            return super().laid(problem, x, columns, fill)
        at = problem.first[:, None].long() + torch.arange(columns, device=x.device)
        inside = x.gather(1, at.clamp(max=x.shape[1] - 1))
        return inside.masked_fill(at >= problem.stop[:, None], fill)


@register
class Fp4PagedMqaLogits(Paged, Fp4Logits):
    """The four bytes behind the codes of a block are the E8M0 scales of each key."""

    name = "fp8_fp4_paged_mqa_logits"
    shapes = {"out": "[B T, max_model_len], None: L P columns"}
    gpu = True
    summary = "the FP4 logits with keys and scales in the blocks of a paged cache"
    source = "DeepGEMM fp8_fp4_paged_mqa_logits with a scale of q"
    inputs = (
        TensorSpec("q", Kind.CODES, BYTES, ("B", "T", "H", "D2"), "query codes of the T new tokens, two a byte"),
        TensorSpec("q_sf", Kind.SCALES, WORDS, ("B", "T", "H"), "four E8M0 bytes of each head"),
        TensorSpec(
            "kv_cache",
            Kind.CODES,
            BYTES,
            None,
            "[blocks, P, 1, D/2 + 4]: codes of a block, then the words of its scales",
        ),
        replace(WEIGHTS, dims=("R", "H")),
        *Fp8PagedMqaLogits.inputs[-2:],
    )
    options = (CLEAN, OUT, Fp8PagedMqaLogits.options[-1])

    def problems(self, inputs: Inputs, options: Options) -> list[Logits]:
        q, q_sf, cache, weights, lens, tables = (inputs[spec.name] for spec in self.inputs)
        blocks, longest = words(q_sf, 2 * q.shape[-1]), self.columns(inputs, options)
        return from_pages(nibbles(q), cache, weights, lens, tables, longest, q_blocks=blocks)


@register
class PagedMqaLogitsMetadata(Contract):
    """``out [num_sms + 1, 2]`` int32: processor ``i`` takes the segments from ``out[i] = (request, segment)`` to
    ``out[i + 1]``, excluded; the last row is ``(B, 0)``. A request has ``ceil(length / (4 block_size))`` segments, of
    ``context_lens [B, T]`` the last column counts; one without keys has none. A start on the border of two requests is
    ``(r + 1, 0)``, where a request without segments may be named with segment 0 or passed over; a batch without any key
    gives starts of segment 0, and the last row. Any partition is right that has every segment once, in order, and
    shares that differ by one at most."""

    name = "get_paged_mqa_logits_metadata"
    shapes = {"out": "[num_sms + 1, 2]"}
    gpu = True
    section = "Attention logits"
    summary = "[num_sms + 1, 2] starts (request, segment) that split the work evenly"
    source = "DeepGEMM get_paged_mqa_logits_metadata"
    inputs = (TensorSpec("context_lens", Kind.COUNTS, INTEGERS, None, "[B] or [B, next_n]"),)
    options = (OptionSpec("block_size", 64, None, "keys of a block"), OptionSpec("num_sms", 132, None, "processors"))

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        """One right split of the work, int32 ``[num_sms + 1, 2]``; OptionError: an option is no positive integer."""
        resolved = self.check(inputs, options)
        return schedule(inputs["context_lens"], positive(resolved, "block_size"), positive(resolved, "num_sms"))

    def outputs(self, call: Call) -> dict[str, Out]:
        return {"out": Out((positive(call.resolved, "num_sms") + 1, 2), (torch.int32,))}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        block, processors = positive(call.resolved, "block_size"), positive(call.resolved, "num_sms")

        def decide(outputs: Found) -> Verdict:
            split = shares(outputs["out"], call.inputs["context_lens"], block)
            if isinstance(split, str):
                text = f"no partition of the work: {split}"
                basis = "partition of the work"
                return Verdict(Status.FAILED, text, processors, processors, basis=basis, pattern=split)
            return _judge_balance(split)

        return [Property(decide)]


def _judge_balance(counts: list[int]) -> Verdict:
    share = torch.tensor(counts, dtype=torch.float64, device="cpu")
    low, high = sum(counts) // len(counts), -(-sum(counts) // len(counts))
    bad = (share < low) | (share > high)
    worst = None
    if bool(bad.any()):
        at = int(torch.where(bad, (share - low).abs(), -torch.ones_like(share)).argmax())
        worst = Worst((at,), float(share[at]), low, high, low, math.inf, "segments")
    comparison = Comparison(int(bad.sum()), len(counts), 0, math.inf if worst else 0.0, worst, bad)
    mistrust = "there is no work to split" if sum(counts) == 0 else None
    return verdict(comparison, basis="every segment once, shares that differ by one at most", mistrust=mistrust)


def _nearest(value: Exact, dtype: torch.dtype) -> Tensor:
    return pair_to_dtype(value.hi, value.lo, dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def _accumulator(name: str) -> Accumulator | None:
    """The accumulator of the dot products of a named reduction; None for float32."""
    if name == IEEE32:
        return None
    base = name.removesuffix(".any")
    return of_schedule(get_schedule(LOGITS[base].chain if base in LOGITS else base))


def _why_mistrust(problems: list[Logits], out: Tensor, window: Tensor) -> str | None:
    if not bool(window.any()):
        return "every window is empty"
    for what in ("k_scale" if problems[0].k_blocks is None else "k_blocks", "weights"):
        tensors = [getattr(problem, what) for problem in problems if getattr(problem, what).numel()]
        raw = [t.view(torch.uint8) if t.element_size() == 1 else t for t in tensors]
        if max(t.numel() for t in raw) > 1 and all(bool((t == t.flatten()[0]).all()) for t in raw):
            return f"all values of {what} are equal, so a wrong index changes nothing"
    return mostly_zero(out[window])


def _widened(x: Tensor, columns: int, fill: float) -> Tensor:
    """``x [M, N]`` with columns appended, or cut, to ``columns``."""
    missing = columns - x.shape[1]
    if missing <= 0:
        return x[:, :columns]
    return torch.cat([x, torch.full((x.shape[0], missing), fill, dtype=x.dtype, device=x.device)], dim=1)
