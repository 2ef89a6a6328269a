"""What contracts of attention over an FP8 cache have in common: which attentions fill which rows, the outputs of a
pipeline, and what is admitted.

Source: vllm-project/flash-attention ``hopper/`` @617264c, FlashInfer 0.6.18, vLLM 0.20.2 and SGLang 0.5.10, as each
contract says. Not covered: rotary embedding, keys that are appended in the call, context parallelism, E5M2.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.attention import Edges, Scores, codes_bound, float32_bound, lse_bound, pipeline_bound, split_bound
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.errors import InputError, NumericsError, OptionError, ShapeError
from oracle.numbers.formats import decode, same_bits, share
from oracle.routines.base import F32, Call, Contract, Inputs, Options, Out, Output
from oracle.routines.fault import Fault, Stage, fold
from oracle.tensorcore.attention import (
    ANY,
    EVERY_TILE,
    FEW,
    LIFTED,
    Pipeline,
    Walk,
    candidates,
    combined,
    log_sum,
    pipeline,
    predict_attention,
    split_walks,
    together,
    walk_together,
    walks,
)
from oracle.tensorcore.identify import Match
from oracle.truth.attention import Attention, exact
from oracle.verdict.compare import Admissible, Verdict, Worst
from oracle.verdict.ranges import Range
from oracle.verdict.sets import (
    Elements,
    Found,
    Prediction,
    Sets,
    all_equal,
    mostly_zero,
    rounded_to,
    undeclared,
)

SPREAD = 16  # rows, or a few more, of the whole output that a pipeline must hold before it is asked for all
FIRST, SAMPLED = 32, FEW + 32  # rows and columns that are compared; more rows where few have tiles of their own
Computed = Callable[[Attention], dict[str, Tensor]]
"""What is computed of one attention: float64 ``[R, ..]`` by name, its rows the heads of one query side by side."""
OfRows = Callable[[Attention, Tensor | None], dict[str, Tensor]]
"""The same of some of its rows, int64 ``[S]``, ascending; None: of all."""


@dataclass(frozen=True)
class Place:
    """One attention of a call, and where its rows lie in the output ``[T, H, Dv]``: those of heads ``heads`` of the
    tokens ``rows``, which are sequence ``batch``."""

    problem: Attention
    batch: int
    rows: slice
    heads: slice

    @property
    def group(self) -> int:
        """Its heads."""
        return int(self.heads.stop) - int(self.heads.start)

    def has(self, token: int, head: int) -> bool:
        """Whether a row of the output is of this attention."""
        inside = self.rows.start <= token < self.rows.stop and self.heads.start <= head < self.heads.stop
        return bool(inside)

    def ids(self, heads: int) -> Tensor:
        """Its rows among those of all tokens and ``heads``, int64 ``[R]``, on the CPU."""
        tokens, own = (torch.arange(x.start, x.stop, device="cpu") for x in (self.rows, self.heads))
        return (tokens[:, None] * heads + own).flatten()

    def put(self, rows: Tensor, into: Tensor) -> None:
        """Write ``rows`` ``[R, ...]`` of any dtype into ``into`` ``[T, H, ...]``, rounded to its dtype; NaN stays NaN.
        Returns None."""
        into[self.rows, self.heads] = rows.reshape(-1, self.group, *rows.shape[1:]).to(into)


class AttentionContract(Contract):
    """The queries of a head read the keys of one KV head: query head ``h`` of ``H`` reads KV head ``h // (H / G)``.

        y[s, j] = softmax_scale q_scale k_scale <q[s], k[j]>
        out[s]  = v_scale sum_j exp(y[s, j]) v[j] / (exp(sink) + sum_j exp(y[s, j]))
        lse[s]  = log(exp(sink) + sum_j exp(y[s, j]))

    A kernel that multiplies P = exp(y - max) with V on FP8 tensor cores rounds P to E4M3. Which codes that gives
    depends on the keys of a tile, the direction of the walk, and the power of two by which P is lifted: its *pipeline*.
    An output is right if it has the bits of an admitted pipeline, or lies in the interval of that pipeline's codes with
    the sums in another order, or in that of float32 arithmetic that does not round P at all (to the dtype of 16-bit
    queries, which have no codes). Another pipeline is declared by name, as
    ``numerics="sm90.attention.forward.64.lift8.tile"``: direction, keys of a tile, lift or gain of P, and whether each
    tile is summed from zero (``tile``), one chain goes over all (``chain``), or scores and sums are of any accumulator
    (``any``); ``sm90.attention.any`` says nothing of tiles either. Where nothing is declared, the codes of every
    pipeline that lifts P are tried at last, with scores of the instruction, then of any accumulator.

    NaN in a query, or in a key that it sees, leaves its row open; NaN or infinity in ``v`` leaves that column open for
    its head. A declared pipeline that does not read the tile of that key gives a number there.
    Scales are positive and finite.

    Subclasses
    ----------
    A subclass says which attentions fill which rows (``places``), how rows lie in the outputs (``laid``), and the base
    of the log-sum-exp. Its attributes: ``scales``, the inputs that scale queries, keys and values, by the word for
    them; ``sink``, the input with the score of each head; ``lse_sink``, whether the log-sum-exp holds it; ``no_keys``,
    the log-sum-exp of a row without keys; ``plain``, the numerics that are no pipeline."""

    section = "Attention"
    gpu = True
    golden_arches: ClassVar[tuple[str, ...]] = ("cpu", "sm90")
    log_base: ClassVar[float] = math.e
    scales: ClassVar[Mapping[str, str]] = {}
    sink: ClassVar[str] = ""
    lse_sink: ClassVar[bool] = True
    no_keys: ClassVar[float] = -math.inf
    plain: ClassVar[tuple[str, ...]] = (IEEE32,)

    @abstractmethod
    def places(self, inputs: Inputs, options: Options, numerics: str = IEEE32) -> Iterator[Place]:
        """The attentions of a call; of plain numerics that round the operands, with these operands."""

    @abstractmethod
    def shape(self, inputs: Inputs) -> tuple[int, int, int]:
        """``T, H, Dv`` of the output."""

    def laid(self, name: str, x: Tensor, inputs: Inputs) -> Tensor:
        """The output ``out`` or ``lse``, of which ``x`` is ``[T, H, ...]`` of any dtype, as the routine returns it: a
        view ``[...]`` of that dtype, NaN too; :attr:`shapes` says its shape."""
        return x

    def masked(self, options: Options) -> bool:
        """Whether a query does not see the keys behind its place."""
        return True

    def splits(self, options: Options) -> int:
        """At most so many blocks share the keys of a row."""
        return 1

    def capped(self, call: Call) -> bool:
        """Whether scores have a soft cap."""
        return any(place.problem.cap is not None for place in self._places(call))

    def narrow(self, inputs: Inputs) -> torch.dtype | None:
        """The dtype to which float32 arithmetic may round P; None: it does not."""
        return None

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for name in self.scales.values():
            scale = inputs.get(name)
            if scale is not None and not bool(((scale > 0) & torch.isfinite(scale)).all()):
                raise InputError(f"{self.name}: {name} holds {float(scale.min()):g}; scales are positive and finite")
        sink = inputs.get(self.sink)
        if sink is not None and not bool(torch.isfinite(sink).all()):
            raise InputError(f"{self.name}: {self.sink} holds {float(sink.float().abs().max()):g}; sinks are finite")

    def reference(self, inputs: Inputs, **options: object) -> dict[str, Tensor]:
        """``out`` and the log-sum-exp in float64, in their shapes; NaN where a NaN enters."""
        resolved = self.check(inputs, options)
        return self._assembled(inputs, resolved, self._exact)

    def predict(self, inputs: Inputs, *, numerics: str | None, **options: object) -> dict[str, Tensor]:
        """``out`` by a pipeline, in the dtype that the call gives; the log-sum-exp is rounded from its exact value for
        the scores of that pipeline, whose logarithm no model has bit for bit. Nor has any the weights of several
        splits: their sum is computed in float64."""
        resolved = self.check(inputs, options)
        call = Call(self, inputs, options)
        return self._by(call, inputs, resolved, self.arithmetics(call, numerics)[0])

    @abstractmethod
    def dtype(self, inputs: Inputs, options: Options) -> torch.dtype:
        """That of ``out``."""

    @property
    def names(self) -> dict[str, str]:
        """The outputs by ``out`` and ``lse``."""
        return dict(zip(("out", "lse"), self.returns, strict=False))

    def outputs(self, call: Call) -> dict[str, Out]:
        tokens, heads, width = self.shape(call.inputs)
        row = torch.empty((tokens, heads), dtype=torch.float32, device="meta")
        specified, outs = self._specified(call), {}
        for word, name in self.names.items():
            x = row[..., None].expand(*row.shape, width) if word == "out" else row
            dtypes = (self.dtype(call.inputs, call.resolved),) if word == "out" else F32
            shape = tuple(self.laid(word, x, call.inputs).shape)
            outs[name] = Out(shape, dtypes, specified[name], optional=word == "lse")
        return outs

    def _specified(self, call: Call) -> dict[str, Tensor | None]:
        """Bool masks in the shapes of the outputs; None where every row says something."""
        return dict.fromkeys(self.returns)

    def expected(self, call: Call) -> dict[str, Tensor]:
        """The truth, rounded; NaN where nothing is claimed."""
        return {name: rounded_to(call.truth[name], dtype) for name, dtype in self.kinds(call).items()}

    def kinds(self, call: Call) -> dict[str, torch.dtype]:
        """The dtype of every output."""
        own = {"out": self.dtype(call.inputs, call.resolved), "lse": torch.float32}
        return {name: own[word] for word, name in self.names.items()}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        names = self.arithmetics(call, numerics)
        every = names if numerics is not None or names[0] in self.plain else (*names, *self.plain)
        sets = [self._sets(call, name, splits) for name in every for splits in self._counts(call, name)]
        if numerics is None and call.arch != "cpu" and all(place.problem.coded for place in self._places(call)):
            basis = self._basis(call, every[-1])
            sets[-1] = Undeclared(sets[-1], basis, lambda outputs, worst: self._by_codes(call, outputs, worst))
        return sets

    def _counts(self, call: Call, name: str) -> tuple[int, ...]:
        """The numbers of splits that give different sums, the declared one first."""
        if name in self.plain:
            return (1,)
        most, longest = self.splits(call.resolved), max((p.problem.k.shape[0] for p in self._places(call)), default=0)
        distinct = {-(-longest // count): count for count in range(1, most + 1)}  # of like numbers the largest
        return tuple(sorted(distinct.values(), reverse=True))

    def _places(self, call: Call) -> list[Place]:
        return call.cached("places", lambda: list(self.places(call.inputs, call.resolved)))

    def _sets(self, call: Call, name: str, splits: int) -> Sets:
        """The bits of a pipeline with its log-sum-exp in the interval, then the intervals of both."""
        hidden = {output: False if mask is None else ~mask for output, mask in self._specified(call).items()}
        first, words = self.returns[0], "" if splits == 1 else f" over {splits} splits"

        def edges(problem: Attention, some: Tensor | None) -> dict[str, Tensor]:
            return self._edges(call, problem, name, splits, some)

        def admitted() -> dict[str, Admissible]:
            return call.cached(f"admitted by {name}{words}", lambda: self._admitted(call, edges, name))

        def same(outputs: Found) -> bool:
            walked = self._bits(call, pipeline(name))
            equal = same_bits(walked[first].to(outputs[first].device).contiguous(), outputs[first].contiguous())
            if not bool((equal | hidden[first]).all()):
                return False
            for output in self.returns[1:]:
                lse = outputs[output].to(torch.float64)
                low, high = map(decode, _ends(walked, output))
                free = walked[f"{output}.open"].to(torch.bool) | hidden[output]
                if bool(((lse >= low) & (lse <= high) | free).all()):
                    continue
                due = admitted()[output]  # that of the exact scores is right, too
                assert due.open is not None
                if not bool(((lse >= due.low) & (lse <= due.high) | due.open | hidden[output]).all()):
                    return False
            return True

        predicted = name not in self.plain and splits == 1 and _has_bits(pipeline(name))

        def predictions() -> Iterator[Prediction]:
            if predicted:
                mask = self._specified(call)[first]
                total = math.prod(self.shape(call.inputs)) if mask is None else int(mask.sum())
                yield Prediction(f"bits of {name}", name, total, same)

        basis = self._basis(call, name) + words

        def among(outputs: Found) -> tuple[Mapping[str, Admissible], str]:
            return self._beside(call, edges, pipeline(name), outputs), basis

        def holds_row(outputs: Found, worst: Worst) -> bool:
            if splits > 1 or (name in self.plain and name != IEEE32):  # rows of several walks, or of other operands
                return True
            row = self._row(call, outputs, worst)
            if name not in self.plain and (self.capped(call) or not _has_bits(pipeline(name))):
                return row.in_codes_of(pipeline(name))
            return row.lies_in(edges(row.place.problem, row.numbers))

        return Elements(
            lambda: (admitted(), basis),
            name,
            predictions=predictions,
            mistrust=lambda outputs: self._why_mistrust(call, outputs),
            worst=holds_row,
            among=among if predicted else None,
        )

    def _bits(self, call: Call, chosen: Pipeline) -> dict[str, Tensor]:
        """:meth:`_walked`, once for a call."""
        return call.cached(f"bits of {chosen.name}", lambda: self._walked(call, chosen))

    def _walked(self, call: Call, chosen: Pipeline) -> dict[str, Tensor]:
        """What one walk over the keys gives: the stored output, and the edges of the log-sum-exp, float32."""

        def value(walked: Iterable[Walk], seen: Tensor) -> dict[str, Tensor]:
            parts = [(walk.out.to(torch.float64), *lse_bound(walk, chosen)) for walk in walked]
            out, low, high = (torch.cat(same) for same in zip(*parts, strict=True))
            return {"out": out, **self._lse_edges(seen, low, high)}

        whole = self._laid_out(call.inputs, _walked(self._places(call), chosen, value))
        kinds = self.kinds(call)
        return {name: rounded_to(x, kinds[name.split(".")[0]]) for name, x in whole.items()}

    def _by_codes(self, call: Call, outputs: Found, worst: Worst) -> Verdict | None:
        """The verdict by the codes of a pipeline that nobody declared and that holds every element; None where none
        does.

        A pipeline is asked for the row of ``worst`` first, then for rows from all of the output, then for all; the
        worst element of what one refuses is asked of those after it."""
        places, row = self._places(call), self._row(call, outputs, worst)
        if not row.in_codes_of(ANY):
            return None
        length = max(place.problem.k.shape[0] for place in places)
        some = [
            one
            for one in candidates(length, LIFTED, EVERY_TILE)
            if not any(one.why_not(place.problem) for place in places)
        ]
        if any(bool((place.problem.start > 0).any()) for place in places):  # others count tiles from key 0
            some += [replace(one, name=f"{one.name} (from key 0)", from_window=False) for one in some]
        asked = [row, *self._sample(call, outputs)]
        for chosen in some:
            if not all(rows.in_codes_of(chosen) for rows in asked):
                continue
            for predicted in (True, False):
                if predicted and not asked[0].in_codes_of(chosen, predicted=True):
                    continue
                judged = self._codes(call, chosen, predicted).judge(outputs)
                if not judged.status.is_failure:
                    return judged
            assert judged.worst is not None
            asked.insert(0, self._row(call, outputs, judged.worst))
        return None

    def _codes(self, call: Call, chosen: Pipeline, predicted: bool) -> Sets:
        """The interval of the codes of a pipeline, of any arithmetic around them."""
        basis = _basis_of_codes(chosen.name, predicted)

        def edges(problem: Attention, some: Tensor | None) -> dict[str, Tensor]:
            return self._edges_of_codes(problem, chosen, some, predicted=predicted)

        def among(outputs: Found) -> tuple[Mapping[str, Admissible], str]:
            return self._beside(call, edges, chosen, outputs), basis

        return Elements(
            lambda: (self._admitted(call, edges), basis),
            chosen.name,
            mistrust=lambda outputs: self._why_mistrust(call, outputs),
            among=among if _has_bits(chosen) else None,
        )

    def _edges_of_codes(
        self, problem: Attention, chosen: Pipeline, some: Tensor | None, *, predicted: bool
    ) -> dict[str, Tensor]:
        """The edges of both outputs by the codes of ``chosen``, float64, of the rows ``some`` or of all."""
        known = None if some is None else Scores.of(problem, some, predicted=predicted)
        rows = problem if some is None else problem.rows(some).near()
        return self.laid_edges(rows, [codes_bound(problem, chosen, predicted=predicted, known=known)])

    def _row(self, call: Call, outputs: Found, worst: Worst) -> Rows:
        """The row of an element."""
        word = next(word for word, name in self.names.items() if name == worst.output)
        row = self._ids(call)[word][worst.index].reshape(1)
        return next(self._rows(call, outputs, row, int(worst.index[-1]) if word == "out" else None))

    def _sample(self, call: Call, outputs: Found) -> list[Rows]:
        """Some rows of the output, of which something is said, from all of it."""
        mask, heads = self._specified(call)[self.returns[0]], self.shape(call.inputs)[:2]
        some = torch.arange(math.prod(heads), device="cpu")
        if mask is not None:
            some = torch.unique(self._ids(call)["out"][mask.cpu()])
        return list(self._rows(call, outputs, some[:: max(1, len(some) // SPREAD)]))

    def _rows(self, call: Call, outputs: Found, rows: Tensor, column: int | None = None) -> Iterator[Rows]:
        """The ``rows`` of the output, int64 ``[S]``, ascending, on the CPU, by their attentions."""
        ids, heads = self._ids(call), self.shape(call.inputs)[1]
        for place in self._places(call):
            own = place.ids(heads)
            numbers = torch.isin(own, rows).nonzero()[:, 0]
            if not len(numbers):
                continue
            found = {}
            for word, name in self.names.items():
                if name in outputs:
                    at = torch.isin(ids[word], own[numbers])
                    order = torch.argsort(ids[word][at], stable=True)
                    values = decode(outputs[name][at.to(outputs[name].device)].cpu())[order]
                    found[word] = values.reshape(len(numbers), *(() if word == "lse" else (-1,)))
            yield Rows(self, call, place, numbers.to(place.problem.q.device), column, found)

    def _ids(self, call: Call) -> dict[str, Tensor]:
        """The number of every element's row, int64 in the shapes of the outputs, on the CPU."""
        tokens, heads, width = self.shape(call.inputs)
        ids = torch.arange(tokens * heads, device="cpu").reshape(tokens, heads)
        return {
            "out": self.laid("out", ids[..., None].expand(tokens, heads, width), call.inputs),
            "lse": self.laid("lse", ids, call.inputs),
        }

    def _beside(self, call: Call, of: OfRows, chosen: Pipeline, outputs: Found) -> dict[str, Admissible]:
        """:meth:`_admitted` for these outputs, computed of the rows alone that differ from the bits of ``chosen``; the
        others are admitted as these bits, which every interval of its codes holds."""
        bits, hidden, ids = self._bits(call, chosen), self._specified(call), self._ids(call)
        tokens, heads, _ = self.shape(call.inputs)
        needed = torch.zeros(tokens * heads, dtype=torch.bool, device="cpu")
        for word, name in self.names.items():
            if word == "out":
                own, right = outputs[name].contiguous(), bits[name].to(outputs[name].device).contiguous()
                bad = ~same_bits(own, right) | torch.isnan(decode(right))
            else:
                own, *ends = (decode(x).to(outputs[name].device) for x in (outputs[name], *_ends(bits, name)))
                bad = ~((own >= ends[0]) & (own <= ends[1]))
            mask = hidden[name]
            needed[ids[word][(bad if mask is None else bad & mask.to(bad.device)).cpu()]] = True
        exactly = lambda problem, some: self._exact(problem.rows(some).near())  # noqa: E731
        edges, truth = (self._laid_out(call.inputs, self._needed(call, one, needed)) for one in (of, exactly))
        between = self._between(call, edges, truth)

        def with_bits(word: str, output: str) -> Admissible:
            due = between[output]
            assert due.open is not None
            known = ~needed[ids[word]].to(due.low.device)
            ends = (bits[output], bits[output]) if word == "out" else _ends(bits, output)
            low, high = (torch.where(known, decode(x), y) for x, y in zip(ends, (due.low, due.high), strict=True))
            middle = torch.maximum(torch.minimum(due.expected, high), low)
            return replace(due, low=low, high=high, expected=middle, open=due.open & ~known)

        return {output: with_bits(word, output) for word, output in self.names.items()}

    def _basis(self, call: Call, name: str) -> str:
        if name not in self.plain:
            if pipeline(name).integers:
                return f"codes of P as in {name} from exact scores, exponentials and sums of any"
            if self.capped(call) or not pipeline(name).modelled:
                return _basis_of_codes(name, predicted=pipeline(name).modelled)
            return f"sums of {name} in any order"
        narrow = self.narrow(call.inputs)
        of_p = "P not rounded" if narrow is None else f"P rounded to {str(narrow).removeprefix('torch.')} or not"
        return f"float32 in any order, {of_p}" + ("" if name == IEEE32 else f", operands as in {name}")

    def _admitted(self, call: Call, of: OfRows, name: str = IEEE32) -> dict[str, Admissible]:
        """What lies between the edges ``of`` every attention; ``name``: the numerics of the operands."""
        edges = self._assembled(call.inputs, call.resolved, lambda problem: of(problem, None), name)
        return self._between(call, edges, call.truth)

    def _between(self, call: Call, edges: dict[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, Admissible]:
        """The intervals between ``edges``, rounded to the dtypes of the outputs, around the exact values ``right``;
        float64 both, in the shapes of the outputs."""
        masks, kinds = self._specified(call), self.kinds(call)

        def admitted(word: str, output: str) -> Admissible:
            low, high = (decode(rounded_to(x, kinds[output])) for x in _ends(edges, output))
            opened = edges[f"{output}.open"].to(torch.bool)
            truth = decode(rounded_to(right[output], kinds[output]))
            if word != "out":  # that of the exact scores is right beside any pipeline's
                low, high = torch.fmin(low, truth), torch.fmax(high, truth)
            middle = torch.maximum(torch.minimum(truth, high), low)
            return Admissible(low, high, torch.where(opened, torch.nan, middle), masks[output], opened)

        return {output: admitted(word, output) for word, output in self.names.items()}

    def _needed(self, call: Call, of: OfRows, rows: Tensor) -> Iterator[tuple[list[Place], dict[str, Tensor]]]:
        """What ``of`` gives of the ``rows``, bool ``[T H]``, place by place; 0 of the others."""
        heads = self.shape(call.inputs)[1]
        for place in self._places(call):
            some = rows[place.ids(heads)].nonzero()[:, 0]
            if len(some):
                near = place.problem.near()
                some = some.to(near.q.device)
                computed = {name: x.to(near.q.device) for name, x in of(near, some).items()}
                zeros = {name: x.new_zeros((near.q.shape[0], *x.shape[1:])) for name, x in computed.items()}
                yield [place], {name: zeros[name].index_copy(0, some, x) for name, x in computed.items()}

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        """The usual pipeline of the call's arch (on a CPU, and of 16-bit queries, float32 that rounds no P), with the
        stages READ, OPTIONS, SCHEDULE (its record), PRODUCT (each attention) and WRITE."""
        inputs = fold(call, faults, Stage.READ, dict(call.inputs))
        options = fold(call, faults, Stage.OPTIONS, dict(call.resolved))
        name = self.arithmetics(call)[0]
        chosen = fold(call, faults, Stage.SCHEDULE, None if name in self.plain else pipeline(name))
        computed = self._by(call, inputs, options, name, chosen, faults)
        outputs: dict[str, Tensor] = fold(call, faults, Stage.WRITE, computed)
        return outputs

    def why_not(self, call: Call, numerics: str) -> str | None:
        if numerics in self.plain:
            return None
        chosen = pipeline(numerics)
        return next((reason for place in self._places(call) if (reason := chosen.why_not(place.problem))), None)

    def identify(self, inputs: Inputs, output: Output, *, arch: str | None, **options: object) -> list[Match]:
        """Pipelines ranked by equal bits of ``out``, those with a name first, then spelt ones; see
        :func:`oracle.identify`. Compared are rows of the first KV head that a query reads."""
        if arch not in (None, "sm90"):
            raise NumericsError(f"{self.name} has no pipelines for arch {arch!r}; known: sm90")
        call = Call(self, inputs, options).checked()
        out = self.validate_output(call, output)[self.returns[0]]
        place = next((x for x in self._places(call) if bool(x.problem.seen().any())), None)
        if place is None:
            raise NumericsError(f"{self.name}: no query sees a key, so every pipeline gives the same")
        wanted = out.reshape(self.shape(inputs))[place.rows, place.heads].flatten(0, 1)
        matches, refused = [], ""
        for one in candidates(place.problem.k.shape[0]):
            part = place.problem.rows(slice(0, SAMPLED if one.few_keys else FIRST))
            if part.v.shape[1] <= part.q.shape[1]:  # a tile is chosen by the wider of both
                part = part.columns(slice(FIRST))
            refused = one.why_not(part) or ""
            if not refused:
                bits, rows = rounded_to(predict_attention(part, one).to(torch.float64), out.dtype), len(part.q)
                equal = same_bits(bits, wanted[:rows, : bits.shape[1]].contiguous())
                matches.append(Match(one.name, share(equal), equal.numel()))
        if not matches:
            raise NumericsError(f"{self.name}: {refused}")
        return sorted(matches, key=lambda match: -match.equal)

    def _by(
        self,
        call: Call,
        inputs: Inputs,
        options: Options,
        name: str,
        chosen: Pipeline | None = None,
        faults: tuple[Fault, ...] = (),
    ) -> dict[str, Tensor]:
        """The outputs of a pipeline (``chosen`` for that of ``name``), or of plain numerics those of the truth for its
        operands, rounded."""
        taken = None if name in self.plain else (chosen or pipeline(name))

        base, splits = math.log(self.log_base), self.splits(options)

        def changed(problem: Attention) -> Attention:
            new: Attention = fold(call, faults, Stage.PRODUCT, problem)
            return new

        def split(problem: Attention) -> dict[str, Tensor]:
            assert taken is not None
            parts = [combined(one, taken) for one in split_walks(changed(problem), taken, splits)]
            out, lse = (torch.cat(same) for same in zip(*parts, strict=True))
            return {"out": out, "lse": lse / base}

        def whole(walked: Iterable[Walk], seen: Tensor) -> dict[str, Tensor]:
            assert taken is not None
            parts = [(walk.out.to(torch.float64), log_sum(walk, taken)) for walk in walked]
            out, lse = (torch.cat(same) for same in zip(*parts, strict=True))
            return {"out": out, "lse": lse / base}

        if taken is None:
            computed = self._assembled(inputs, options, lambda problem: self._exact(changed(problem)), name)
        elif splits > 1:
            computed = self._assembled(inputs, options, split, name)
        else:
            places = [replace(place, problem=changed(place.problem)) for place in self.places(inputs, options, name)]
            computed = self._laid_out(inputs, _walked(places, taken, whole))
        dtypes = {"out": self.dtype(inputs, options), "lse": torch.float32}
        return {output: rounded_to(computed[output], dtypes[word]) for word, output in self.names.items()}

    def _exact(self, problem: Attention) -> dict[str, Tensor]:
        """The truth of one attention, with the log-sum-exp of this routine."""
        value = exact(problem)
        lse = value.lse if self.lse_sink or problem.sink is None else exact(replace(problem, sink=None)).lse
        lse = torch.where(problem.seen(), lse / math.log(self.log_base), torch.full_like(lse, self.no_keys))
        return {"out": value.out, "lse": lse}

    def _edges(
        self, call: Call, problem: Attention, name: str, splits: int, some: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The edges of both outputs before their store, float64, of the rows ``some`` or of all."""
        rows = problem if some is None else problem.rows(some)
        if name in self.plain:
            rows = rows.near()
            parts = [float32_bound(rows, self.narrow(call.inputs))]
            if not self.lse_sink and rows.sink is not None:
                without = float32_bound(replace(rows, sink=None), self.narrow(call.inputs))
                parts = [replace(parts[0], lse_low=without.lse_low, lse_high=without.lse_high)]
        elif not _has_bits(pipeline(name)) or problem.cap is not None:
            chosen = pipeline(name)  # a soft cap leaves the scores of the instruction known
            return self._edges_of_codes(problem, chosen if splits == 1 else ANY, some, predicted=chosen.modelled)
        elif splits == 1:
            parts = [pipeline_bound(walk, pipeline(name)) for walk in walks(problem, pipeline(name), some)]
        else:
            assert some is None, "rows of several walks are not asked for alone"
            parts = [split_bound(one, pipeline(name)) for one in split_walks(problem, pipeline(name), splits)]
        return self.laid_edges(rows, parts)

    def laid_edges(self, problem: Attention, parts: list[Edges]) -> dict[str, Tensor]:
        """The edges of the rows of ``problem`` by output, with the log-sum-exp of this routine."""
        low, high, lse_low, lse_high, opened = (
            torch.cat([getattr(part, edge) for part in parts]) for edge in Edges.__dataclass_fields__
        )
        laid = self._lse_edges(problem.seen(), lse_low, lse_high)
        laid["lse.open"] = torch.maximum(laid["lse.open"], opened.all(dim=1).to(torch.float64))
        return {"out.low": low, "out.high": high, "out.open": opened.to(torch.float64), **laid}

    def _lse_edges(self, seen: Tensor, low: Tensor, high: Tensor) -> dict[str, Tensor]:
        """The edges of the log-sum-exp to the base of this routine, of natural ones ``[R]`` of rows that have keys,
        bool ``[R]``; NaN leaves it open."""
        scale = 1.0 / math.log(self.log_base)
        lost = 2.0**-50 * torch.maximum(low.abs(), high.abs()).nan_to_num(posinf=0.0) * scale
        nan = torch.isnan(low) | torch.isnan(high)
        ends = {"lse.low": low * scale - lost, "lse.high": high * scale + lost}
        edges = {
            end: torch.where(seen, x.masked_fill(nan, 0.0), torch.full_like(x, self.no_keys)) for end, x in ends.items()
        }
        return {**edges, "lse.open": nan.to(torch.float64)}

    def _assembled(
        self, inputs: Inputs, options: Options, value: Computed, numerics: str = IEEE32
    ) -> dict[str, Tensor]:
        """What ``value`` gives of every attention, float64 in the shapes of the outputs."""
        places = self.places(inputs, options, numerics)
        return self._laid_out(inputs, (([place], value(place.problem.near())) for place in places))

    def _laid_out(self, inputs: Inputs, computed: Iterable[tuple[list[Place], dict[str, Tensor]]]) -> dict[str, Tensor]:
        """What was computed of some places at a time, their rows one after the other: float64 in the shapes of the
        outputs."""
        tokens, heads, width = self.shape(inputs)
        device = next(iter(inputs.values())).device
        whole: dict[str, Tensor] = {}
        for places, results in computed:
            at = torch.cat([place.ids(heads) for place in places]).to(device) if len(places) > 1 else None
            for name, rows in results.items():
                shape = (tokens, heads, *rows.shape[1:])
                into = whole.setdefault(name, torch.zeros(shape, dtype=torch.float64, device=device))
                if at is None:
                    places[0].put(rows, into)
                else:
                    into.flatten(0, 1)[at] = rows.to(into)
        if not whole:  # no sequence: only empty outputs
            whole = {"out": torch.zeros((tokens, heads, width), dtype=torch.float64, device=device)}
            whole["lse"] = whole["out"].sum(dim=2)
            whole |= {f"{word}.{end}": x for word, x in dict(whole).items() for end in ("low", "high", "open")}
        named = self.names
        return {
            ".".join([named[head], *rest]): self.laid(head, x, inputs).clone(memory_format=torch.contiguous_format)
            for name, x in whole.items()
            for head, *rest in [name.split(".")]
            if head in named
        }

    def _why_mistrust(self, call: Call, outputs: Found) -> str | None:
        for name in self.scales.values():
            if name in call.inputs and (reason := all_equal(name, [call.inputs[name]])):
                return reason
        if not any(_spread(part) >= 1.0 for place in self._places(call) for part in _first_rows_first(place.problem)):
            return "no score of a row exceeds another by a factor of e, so that P is nearly the same for every key"
        return mostly_zero(outputs[self.returns[0]])


@dataclass(frozen=True)
class Rows:
    """Rows of the output, of one attention.

    Attributes
    ----------
    place, numbers : their attention, and which rows of that they are, int64 ``[S]``, ascending.
    column : of one row that was refused, that of the element in ``out``; None of the log-sum-exp, and of other rows.
    outputs : what was computed of them, float64 ``[S, Dv]`` and ``[S]``, by the words for outputs, on the CPU.
    """

    contract: AttentionContract
    call: Call
    place: Place
    numbers: Tensor
    column: int | None
    outputs: dict[str, Tensor]

    @cached_property
    def problem(self) -> Attention:
        """The rows alone."""
        return self.place.problem.rows(self.numbers).near()

    @cached_property
    def known(self) -> Scores:
        """Their scores, the same for every pipeline."""
        return Scores.of(self.place.problem, self.numbers)

    @cached_property
    def predicted(self) -> Scores:
        """Those of the instruction."""
        return Scores.of(self.place.problem, self.numbers, predicted=True)

    def lies_in(self, edges: dict[str, Tensor], column: int | None = None) -> bool:
        """Whether all of it lies between the edges of its outputs, or of ``out`` one column, of which these are."""
        names = self.contract.names
        for word, x in self.outputs.items() if column is None else [("out", self.outputs["out"][:, [column]])]:
            kind = self.contract.kinds(self.call)[names[word]]
            low, high = (decode(rounded_to(end, kind)).cpu() for end in _ends(edges, word))
            if not bool(((x >= low) & (x <= high) | edges[f"{word}.open"].cpu().to(torch.bool)).all()):
                return False
        return True

    def in_codes_of(self, one: Pipeline, *, predicted: bool = False) -> bool:
        """Whether the codes of a pipeline hold them, from scores of any accumulator or of the instruction; the column
        is asked first."""

        def holds(column: int | None) -> bool:
            known = self.predicted if predicted else self.known
            bound = codes_bound(self.place.problem, one, predicted=predicted, known=known, column=column)
            return self.lies_in(self.contract.laid_edges(self.problem, [bound]), column)

        return (self.column is None or holds(self.column)) and holds(None)


@dataclass(frozen=True)
class Undeclared(Sets):
    """What is admitted where nothing is declared: ``plain``, which is called ``basis``, and what ``by_codes`` says of
    an output of which it or another alternative refused an element: the verdict of a pipeline that holds it, or None.
    ``asked`` keeps the verdicts that :meth:`may_hold_worst` has come to, for :meth:`judge` of the same output."""

    plain: Sets
    basis: str
    by_codes: Callable[[Found, Worst], Verdict | None]
    asked: list[tuple[Found, Verdict]] = field(default_factory=list)

    @property
    def numerics(self) -> str:  # type: ignore[override]
        """Those of ``plain``."""
        return self.plain.numerics

    def may_hold_worst(self, outputs: Found, worst: Worst) -> bool:
        if self.plain.may_hold_worst(outputs, worst):
            return True
        if (held := self.by_codes(outputs, worst)) is not None:
            where = f"the row of {worst.output}{list(worst.index)}"
            text = f"{held.basis}; {where} leaves the {self.basis}, which is not declared"
            said = replace(held, basis=text, summary=held.summary.replace(held.basis, text, 1))
            self.asked.append((outputs, said))
        return held is not None

    def judge(self, found: Found) -> Verdict:
        if (known := next((held for outputs, held in self.asked if outputs is found), None)) is not None:
            return known
        refused = self.plain.judge(found)
        if not refused.status.is_failure or refused.worst is None:
            return refused
        held = self.by_codes(found, refused.worst)
        return refused if held is None else undeclared(held, refused)

    def ranges(self, expected: Found) -> dict[str, Range] | None:
        return self.plain.ranges(expected)


def _walked(
    places: list[Place], chosen: Pipeline, value: Callable[[Iterable[Walk], Tensor], dict[str, Tensor]]
) -> Iterator[tuple[list[Place], dict[str, Tensor]]]:
    """Some of the places at a time, and what ``value`` gives of their walks and of the rows that have keys."""
    for numbers in together([place.problem for place in places], chosen):
        some = [places[number] for number in numbers]
        walk = walk_together([place.problem for place in some], chosen) if len(some) > 1 else None
        if walk is not None:
            yield some, value([walk], walk.problem.seen())
            continue
        for place in some:
            near = place.problem.near()
            yield [place], value(walks(near, chosen), near.seen())


def _ends(edges: Mapping[str, Tensor], output: str) -> tuple[Tensor, Tensor]:
    """The lower and the upper edges of an output."""
    return edges[f"{output}.low"], edges[f"{output}.high"]


def _has_bits(chosen: Pipeline) -> bool:
    return chosen.modelled and not chosen.integers


def _first_rows_first(problem: Attention) -> Iterator[Attention]:
    """A few rows of a problem, then the others."""
    for tile in problem.tiles():
        yield tile.rows(slice(0, FIRST))
        yield tile.rows(slice(FIRST, None))


def _spread(problem: Attention) -> float:
    """By how much the largest score of a row exceeds its least one, of the row where that is most, in nats."""
    if not problem.k.shape[0] or not bool(problem.seen().any()):
        return 0.0
    y, window = problem.logits(problem.scores()).nan_to_num(nan=0.0), problem.window()
    top, low = y.masked_fill(~window, -torch.inf).amax(dim=1), y.masked_fill(~window, torch.inf).amin(dim=1)
    return float((top - low)[problem.seen()].amax())


def _basis_of_codes(name: str, predicted: bool) -> str:
    scores = "scores of the instruction" if predicted else "scores of any accumulator"
    return f"codes of P as in {name} from {scores}, exponentials and sums of any"


def windows(queries: int, keys: int, group: int, left: int, right: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First key and end of each row, int64 ``[queries group]``: the last query stands at the last key; -1: no limit."""
    place = torch.arange(queries, device=device).repeat_interleave(group) + keys - queries
    start = torch.zeros_like(place) if left < 0 else (place - left).clamp(min=0)
    stop = torch.full_like(place, keys) if right < 0 else (place + right + 1).clamp(min=0, max=keys)
    return start, stop


def group_of(inputs: Inputs, contract: str, keys: str = "k") -> int:
    """Query heads of each KV head.

    Raises ShapeError: the heads of the queries are no multiple."""
    heads, of_keys = inputs["q"].shape[-2], inputs[keys].shape[-2]
    if heads % of_keys:
        raise ShapeError(f"{contract}: {heads} query heads are no multiple of {of_keys} KV heads")
    return heads // of_keys


def paged(cache: Tensor, pages: Tensor, keys: int) -> Tensor:
    """The first ``keys`` rows of the ``pages`` ``[L]`` (integers) of one sequence in a ``cache`` ``[P, page, ...]`` of
    any dtype: ``[keys, ...]`` of that dtype; NaN bits stay."""
    raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    return raw[pages.to(torch.int64)].flatten(0, 1)[:keys].view(cache.dtype)


def check_pages(contract: str, name: str, table: Tensor, pages: int) -> None:
    """Refuse a ``table`` ``[...]`` (integers) whose entries do not all name one of ``pages`` pages.

    Raises InputError."""
    if table.numel() and not bool(((table >= 0) & (table < pages)).all()):
        raise InputError(f"{contract}: {name} names pages {int(table.min())} to {int(table.max())}; there are {pages}")


def check_spans(contract: str, name: str, ends: Tensor, total: int | None = None) -> None:
    """Refuse ``ends`` ``[B + 1]`` (integers) that do not rise from 0, or do not end at ``total``.

    Raises InputError."""
    values = ends.tolist()
    if not values or values[0] != 0 or any(b < a for a, b in zip(values, values[1:], strict=False)):
        raise InputError(f"{contract}: {name} is {values[:8]}; it rises from 0")
    if total is not None and values[-1] != total:
        raise InputError(f"{contract}: {name} ends at {values[-1]}; there are {total} rows")


def positive_or_none(name: str, options: Options, option: str) -> None:
    """Raises OptionError: the option is neither None nor a positive finite number."""
    scale = options[option]
    if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
        raise OptionError(f"{name}: {option}={scale!r}; pass a positive finite number, or None")


def cap_of(name: str, options: Options, option: str) -> float | None:
    """The soft cap; None of 0.

    Raises OptionError: the option is neither 0 nor a positive finite number."""
    cap = options[option]
    if not (isinstance(cap, int | float) and 0 <= cap < math.inf):
        raise OptionError(f"{name}: {option}={cap!r}; pass 0 for none, or a positive finite number")
    return float(cap) or None


def window_size(name: str, options: Options, option: str) -> None:
    """Raises OptionError: the option is neither -1 nor a number of keys."""
    size = options[option]
    if type(size) is not int or size < -1:
        raise OptionError(f"{name}: {option}={size!r}; pass -1 or a number of keys")
