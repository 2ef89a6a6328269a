"""Contracts of FP8 attention: FlashAttention-3's forward pass and FlashInfer's prefill.

Sources: vllm-project/flash-attention ``hopper/`` @617264c and vLLM 0.20.2 ``_vllm_fa3_C.fwd``; FlashInfer 0.6.18
``single_prefill_with_kv_cache`` with FP8 queries. Not covered: soft caps, rotary embedding, keys that are appended in
the call, context parallelism, E5M2.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.attention import Edges, float32_bound, pipeline_bound
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.errors import InputError, NumericsError, OptionError, ShapeError
from oracle.numbers.formats import decode, same_bits
from oracle.routines.base import (
    E4M3,
    F32,
    Call,
    Contract,
    Inputs,
    Options,
    OptionSpec,
    Out,
    Output,
    TensorSpec,
    register,
)
from oracle.routines.fault import Fault, Stage, fold
from oracle.routines.traits import Kind
from oracle.tensorcore.attention import FEW, Pipeline, Walk, candidates, pipeline, predict_attention, walks
from oracle.tensorcore.identify import Match
from oracle.truth.attention import Attention, Value, exact
from oracle.verdict.compare import Admissible
from oracle.verdict.sets import Elements, Found, Prediction, Sets, all_equal, mostly_zero, rounded_to

FIRST, SAMPLED = 32, FEW + 32  # rows and columns that are compared; more rows where few have tiles of their own
Rows = Callable[[Attention], dict[str, Tensor]]
"""What is computed of one attention: float64 ``[S heads, ..]`` by name."""


@dataclass(frozen=True)
class Place:
    """One attention of a call, and where its rows lie in the output ``[B, S, H, Dv]``: those of heads ``heads`` of
    sequence ``batch``, the heads of one query side by side."""

    problem: Attention
    batch: int
    heads: slice

    def put(self, rows: Tensor, into: Tensor) -> None:
        """Write ``rows`` ``[S heads, ..]`` of any dtype into ``into`` ``[B, S, H, ..]``, rounded to its dtype; NaN
        stays NaN."""
        group = self.heads.stop - self.heads.start
        into[self.batch, :, self.heads] = rows.reshape(-1, group, *rows.shape[1:]).to(into.dtype)


class AttentionContract(Contract):
    """The queries of a head read the keys of one KV head: query head ``h`` of ``H`` reads KV head ``h // (H / G)``.

        y[s, j] = softmax_scale q_scale k_scale <q[s], k[j]>
        out[s]  = v_scale sum_j exp(y[s, j]) v[j] / (exp(sink) + sum_j exp(y[s, j]))
        lse[s]  = log(exp(sink) + sum_j exp(y[s, j]))

    A kernel that multiplies P = exp(y - max) with V on FP8 tensor cores rounds P to E4M3. Which codes that gives
    depends on the keys of a tile, the direction of the walk, and the power of two by which P is lifted: its *pipeline*.
    An output is right if it has the bits of an admitted pipeline, or lies in the interval of that pipeline's codes with
    the sums in another order, or in that of float32 arithmetic that does not round P at all. Another pipeline is
    declared by name, as ``numerics="sm90.attention.forward.64.lift8.tile"``: direction, keys of a tile, lift or gain of
    P, and whether each tile is summed from zero (``tile``) or one chain goes over all (``chain``).

    NaN in a query, or in a key that it sees, leaves its row open; NaN in ``v`` leaves that column open for its head.
    Scales are positive and finite.

    Subclasses
    ----------
    A subclass says which attentions fill which rows (``places``), and the base of the log-sum-exp."""

    section = "Attention"
    gpu = True
    golden_arches: ClassVar[tuple[str, ...]] = ("cpu", "sm90")
    log_base: ClassVar[float] = math.e
    scales: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def places(self, inputs: Inputs, options: Options) -> Iterator[Place]:
        """The attentions of a call."""

    @abstractmethod
    def shape(self, inputs: Inputs) -> tuple[int, int, int, int]:
        """``B, S, H, Dv`` of the output."""

    @abstractmethod
    def laid(self, name: str, x: Tensor) -> Tensor:
        """The output ``name``, of which ``x`` is ``[B, S, H, ..]`` of any dtype, as the routine returns it: a view of
        that dtype, NaN too; :attr:`shapes` says its shape."""

    def refuse(self, inputs: Inputs, options: Options) -> None:
        for name in self.scales:
            scale = inputs.get(name)
            if scale is not None and not bool(((scale > 0) & torch.isfinite(scale)).all()):
                raise InputError(f"{self.name}: {name} holds {float(scale.min()):g}; scales are positive and finite")

    def reference(self, inputs: Inputs, **options: object) -> dict[str, Tensor]:
        """``out`` and the log-sum-exp in float64, in their shapes; NaN where a NaN enters."""
        resolved = self.check(inputs, options)
        return self._assembled(inputs, resolved, lambda problem: _both(exact(problem), self.log_base))

    def predict(self, inputs: Inputs, *, numerics: str | None, **options: object) -> dict[str, Tensor]:
        """``out`` by a pipeline, in the dtype that the options name; the log-sum-exp is rounded from its exact value
        for the scores of that pipeline, whose logarithm no model has bit for bit."""
        resolved = self.check(inputs, options)
        call = Call(self, inputs, options)
        return self._by(call, inputs, resolved, _named(self.arithmetics(call, numerics)[0]))

    @abstractmethod
    def dtype(self, options: Options) -> torch.dtype:
        """That of ``out``."""

    def outputs(self, call: Call) -> dict[str, Out]:
        batch, queries, heads, width = self.shape(call.inputs)
        row = torch.empty((batch, queries, heads), dtype=torch.float32, device="meta")
        specified = self._specified(call)
        out, lse = self.laid("out", row[..., None].expand(*row.shape, width)), self.laid("lse", row)
        return {
            "out": Out(tuple(out.shape), (self.dtype(call.resolved),), specified["out"]),
            self.returns[1]: Out(tuple(lse.shape), F32, specified[self.returns[1]], optional=True),
        }

    def _specified(self, call: Call) -> dict[str, Tensor | None]:
        """Bool masks in the shapes of the outputs; None where every row says something."""
        return dict.fromkeys(self.returns)

    def expected(self, call: Call) -> dict[str, Tensor]:
        """The truth, rounded; NaN where nothing is claimed."""
        (out, lse), dtype = self.returns, self.dtype(call.resolved)
        return {out: rounded_to(call.truth[out], dtype), lse: rounded_to(call.truth[lse], torch.float32)}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        names = self.arithmetics(call, numerics)
        every = names if numerics is not None or IEEE32 in names else (*names, IEEE32)
        return [self._sets(call, name) for name in every]

    def _sets(self, call: Call, name: str) -> Sets:
        """The bits of a pipeline with its log-sum-exp in the interval, then the intervals of both."""
        chosen, hidden = _named(name), {}
        for output, mask in self._specified(call).items():
            hidden[output] = False if mask is None else ~mask

        def admitted() -> dict[str, Admissible]:
            return call.cached(f"admitted by {name}", lambda: self._admitted(call, chosen))

        def bits() -> Tensor:
            return call.cached(f"bits of {name}", lambda: self._by(call, call.inputs, call.resolved, chosen)["out"])

        def same(outputs: Found) -> bool:
            equal = same_bits(bits().to(outputs["out"].device).contiguous(), outputs["out"].contiguous())
            if not bool((equal | hidden["out"]).all()):
                return False
            lse, due = outputs[self.returns[1]].to(torch.float64), admitted()[self.returns[1]]
            assert due.open is not None
            return bool(((lse >= due.low) & (lse <= due.high) | due.open | hidden[self.returns[1]]).all())

        def predictions() -> Iterator[Prediction]:
            if chosen is not None:
                mask = self._specified(call)["out"]
                total = math.prod(self.shape(call.inputs)) if mask is None else int(mask.sum())
                yield Prediction(f"bits of {name}", name, total, same)

        def make() -> tuple[Mapping[str, Admissible], str]:
            basis = f"sums of {name} in any order" if chosen is not None else "float32 in any order, P not rounded"
            return admitted(), basis

        return Elements(make, name, False, predictions, lambda outputs: self._why_mistrust(call, outputs))

    def _admitted(self, call: Call, chosen: Pipeline | None) -> dict[str, Admissible]:
        (out, lse), masks = self.returns, self._specified(call)
        edges = self._assembled(call.inputs, call.resolved, lambda problem: _edges(problem, chosen, self.log_base))

        def admitted(name: str, kind: torch.dtype) -> Admissible:
            low, high = (decode(rounded_to(edges[f"{name}.{end}"], kind)) for end in ("low", "high"))
            truth = decode(rounded_to(call.truth[name], kind))
            if name == lse:  # that of the exact scores is right beside any pipeline's
                low, high = torch.fmin(low, truth), torch.fmax(high, truth)
            middle = torch.maximum(torch.minimum(truth, high), low)
            opened = edges[f"{name}.open"].to(torch.bool)
            return Admissible(low, high, torch.where(opened, torch.nan, middle), masks[name], opened)

        return {out: admitted(out, self.dtype(call.resolved)), lse: admitted(lse, torch.float32)}

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        """The usual pipeline of the call's arch (on a CPU, float32 that rounds no P), with the stages READ, OPTIONS,
        SCHEDULE (its record), PRODUCT (each attention) and WRITE."""
        inputs = fold(call, faults, Stage.READ, dict(call.inputs))
        options = fold(call, faults, Stage.OPTIONS, dict(call.resolved))
        chosen = fold(call, faults, Stage.SCHEDULE, _named(self.arithmetics(call)[0]))
        outputs: dict[str, Tensor] = fold(call, faults, Stage.WRITE, self._by(call, inputs, options, chosen, faults))
        return outputs

    def why_not(self, call: Call, numerics: str) -> str | None:
        if numerics == IEEE32:
            return None
        chosen = pipeline(numerics)
        return next(
            (reason for place in self.places(call.inputs, call.resolved) if (reason := chosen.why_not(place.problem))),
            None,
        )

    def identify(self, inputs: Inputs, output: Output, *, arch: str | None, **options: object) -> list[Match]:
        """Pipelines ranked by equal bits of ``out``, those with a name first, then spelt ones; see
        :func:`oracle.identify`. Compared are rows of the first KV head that a query reads."""
        if arch not in (None, "sm90"):
            raise NumericsError(f"{self.name} has no pipelines for arch {arch!r}; known: sm90")
        call = Call(self, inputs, options).checked()
        out = self.validate_output(call, output)["out"]
        place = next((x for x in self.places(inputs, call.resolved) if bool(x.problem.seen().any())), None)
        if place is None:
            raise NumericsError(f"{self.name}: no query sees a key, so every pipeline gives the same")
        wanted = out.reshape(self.shape(inputs))[place.batch, :, place.heads].flatten(0, 1)
        matches = []
        for one in candidates(place.problem.k.shape[0]):
            part = place.problem.rows(slice(0, SAMPLED if one.few_keys else FIRST))
            if part.v.shape[1] <= part.q.shape[1]:  # a tile is chosen by the wider of both
                part = replace(part, v=part.v[:, :FIRST])
            if one.why_not(part) is None:
                bits, rows = rounded_to(predict_attention(part, one).to(torch.float64), out.dtype), len(part.q)
                equal = same_bits(bits, wanted[:rows, : bits.shape[1]].contiguous())
                matches.append(Match(one.name, float(equal.double().mean()), equal.numel()))
        return sorted(matches, key=lambda match: -match.equal)

    def _by(
        self,
        call: Call,
        inputs: Inputs,
        options: Options,
        chosen: Pipeline | None,
        faults: tuple[Fault, ...] = (),
    ) -> dict[str, Tensor]:
        """The outputs of a pipeline, or for None of the truth, rounded."""

        def value(problem: Attention) -> dict[str, Tensor]:
            problem = fold(call, faults, Stage.PRODUCT, problem)
            if chosen is None:
                return _both(exact(problem), self.log_base)
            parts = [(walk.out, _lse(walk, chosen)) for walk in walks(problem, chosen)]
            out, lse = (torch.cat(same) for same in zip(*parts, strict=True))
            return {"out": out.to(torch.float64), "lse": lse / math.log(self.log_base)}

        computed = self._assembled(inputs, options, value)
        out, lse = self.returns
        return {out: rounded_to(computed[out], self.dtype(options)), lse: rounded_to(computed[lse], torch.float32)}

    def _assembled(self, inputs: Inputs, options: Options, value: Rows) -> dict[str, Tensor]:
        """What ``value`` gives of every attention, float64 in the shapes of the outputs."""
        batch, queries, heads, width = self.shape(inputs)
        device = next(iter(inputs.values())).device
        whole: dict[str, Tensor] = {}
        for place in self.places(inputs, options):
            for name, rows in value(place.problem).items():
                shape = (batch, queries, heads, *rows.shape[1:])
                into = whole.setdefault(name, torch.zeros(shape, dtype=torch.float64, device=device))
                place.put(rows, into)
        named = {"out": self.returns[0], "lse": self.returns[1]}
        return {
            ".".join([named[head], *rest]): self.laid(head, x).contiguous()
            for name, x in whole.items()
            for head, *rest in [name.split(".")]
        }

    def _why_mistrust(self, call: Call, outputs: Found) -> str | None:
        for name in self.scales:
            if name in call.inputs and (reason := all_equal(name, [call.inputs[name]])):
                return reason
        spread = 0.0
        for place in self.places(call.inputs, call.resolved):
            for tile in place.problem.tiles() if place.problem.k.shape[0] else ():
                y = (tile.factor[:, None] * tile.scores()).nan_to_num(nan=0.0)
                window = tile.window()
                top = y.masked_fill(~window, -torch.inf).amax(dim=1)
                low = y.masked_fill(~window, torch.inf).amin(dim=1)
                spread = max(spread, float((top - low)[tile.seen()].amax()) if bool(tile.seen().any()) else 0.0)
        if spread < 1.0:
            return "no score of a row exceeds another by a factor of e, so that P is nearly the same for every key"
        return mostly_zero(outputs["out"])


def _named(name: str) -> Pipeline | None:
    return None if name == IEEE32 else pipeline(name)


def _both(value: Value, base: float) -> dict[str, Tensor]:
    return {"out": value.out, "lse": value.lse / math.log(base)}


def _lse(walk: Walk, chosen: Pipeline) -> Tensor:
    """The natural log-sum-exp of the rows of a walk, float64."""
    exponent = walk.top.nan_to_num(neginf=0.0) * walk.factor - chosen.lift
    lse = (exponent + torch.log2(walk.total)) * math.log(2.0)
    return torch.where(walk.problem.seen(), lse, torch.full_like(lse, -torch.inf))


def _edges(problem: Attention, chosen: Pipeline | None, base: float) -> dict[str, Tensor]:
    """The edges of both outputs before their store, float64."""
    if chosen is None:
        parts = [float32_bound(problem)]
    else:
        parts = [pipeline_bound(walk, chosen) for walk in walks(problem, chosen)]
    low, high, lse_low, lse_high, opened = (
        torch.cat([getattr(part, name) for part in parts]) for name in Edges.__dataclass_fields__
    )
    scale = 1.0 / math.log(base)
    lost = 2.0**-50 * torch.maximum(lse_low.abs(), lse_high.abs()).nan_to_num(posinf=0.0) * scale
    ends = {"lse.low": lse_low * scale - lost, "lse.high": lse_high * scale + lost}
    nan = torch.isnan(lse_low) | torch.isnan(lse_high)
    return {
        "out.low": low,
        "out.high": high,
        "out.open": opened.to(torch.float64),
        "lse.open": (nan | opened.all(dim=1)).to(torch.float64),
        **{name: x.masked_fill(nan, 0.0) for name, x in ends.items()},
    }


def _windows(queries: int, keys: int, group: int, left: int, right: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First key and end of each row ``[queries group]``: the last query stands at the last key."""
    place = torch.arange(queries, device=device).repeat_interleave(group) + keys - queries
    start = torch.zeros_like(place) if left < 0 else (place - left).clamp(min=0)
    stop = torch.full_like(place, keys) if right < 0 else (place + right + 1).clamp(min=0, max=keys)
    return start, stop


def _heads(inputs: Inputs, name: str) -> int:
    """Query heads of each KV head."""
    heads, of_keys = inputs["q"].shape[-2], inputs["k"].shape[-2]
    if heads % of_keys:
        raise ShapeError(f"{name}: {heads} query heads are no multiple of {of_keys} KV heads")
    return heads // of_keys


def _depth(name: str, tensor: str, depth: int, admitted: tuple[int, ...] | None = None) -> None:
    if admitted is not None and depth not in admitted:
        raise ShapeError(f"{name}: {tensor} has head dim {depth}; it takes {', '.join(map(str, admitted))}")
    if depth % 16 or depth > 256:
        raise ShapeError(f"{name}: {tensor} has head dim {depth}; it takes multiples of 16 up to 256")


@register
class MhaFwd(AttentionContract):
    """Sequence ``b`` has ``seqused_k[b]`` keys (all N without it), and query ``s`` stands at key ``seqused_k[b] - S +
    s``. It sees the keys from ``window_size_left`` before that place to ``window_size_right`` after it (-1: no limit);
    ``is_causal`` sets the right one to 0. Keys and values from ``seqused_k[b]`` on may hold anything.

    ``q_descale``, ``k_descale`` and ``v_descale`` are one for each sequence and KV head, that of the queries too; 1
    where they are not given. ``s_aux`` is a score for each query head that has no value. A row without keys gives 0 and
    -inf. ``softmax_scale`` is D^-0.5 where it is None."""

    name = "mha_fwd"
    summary = "FlashAttention-3 forward of E4M3 queries, keys and values, with scales per sequence and KV head"
    source = "vLLM 0.20.2 torch.ops._vllm_fa3_C.fwd; Dao-AILab/flash-attention hopper"
    returns = ("out", "softmax_lse")
    shapes = {"out": "[B, S, H, V]", "softmax_lse": "[B, H, S]"}
    numerics: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "sm90": ("sm90.fa3.tile", "sm90.fa3.chain"),
        "cpu": (IEEE32,),
    }
    scales = ("q_descale", "k_descale", "v_descale")
    inputs = (
        TensorSpec("q", Kind.CODES, E4M3, ("B", "S", "H", "D"), "query codes"),
        TensorSpec("k", Kind.CODES, E4M3, ("B", "N", "G", "D"), "key codes of the G KV heads"),
        TensorSpec("v", Kind.CODES, E4M3, ("B", "N", "G", "V"), "value codes"),
        TensorSpec("q_descale", Kind.SCALES, F32, ("B", "G"), "scale of the queries of a KV head", optional=True),
        TensorSpec("k_descale", Kind.SCALES, F32, ("B", "G"), "scale of its keys", optional=True),
        TensorSpec("v_descale", Kind.SCALES, F32, ("B", "G"), "scale of its values", optional=True),
        TensorSpec("seqused_k", Kind.COUNTS, (torch.int32,), ("B",), "keys of each sequence", optional=True),
        TensorSpec("s_aux", Kind.LOGITS, (torch.bfloat16,), ("H",), "a sink: the score of each head", optional=True),
    )
    options = (
        OptionSpec("softmax_scale", None, None, "what multiplies a score; None: D^-0.5"),
        OptionSpec("is_causal", False, (False, True), "no key behind the place of a query"),
        OptionSpec("window_size_left", -1, None, "keys before the place of a query; -1: all"),
        OptionSpec("window_size_right", -1, None, "keys behind it; -1: all"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        self.extents(inputs)
        _heads(inputs, self.name)
        _depth(self.name, "q", inputs["q"].shape[3])
        _depth(self.name, "v", inputs["v"].shape[3])
        used, keys = inputs.get("seqused_k"), inputs["k"].shape[1]
        if used is not None and not bool(((used >= 0) & (used <= keys)).all()):
            raise InputError(f"{self.name}: seqused_k is {used.tolist()}; there are {keys} keys")
        sink = inputs.get("s_aux")
        if sink is not None and not bool(torch.isfinite(sink).all()):
            raise InputError(f"{self.name}: s_aux holds {float(sink.float().abs().max()):g}; sinks are finite")
        _positive_or_none(self.name, options, "softmax_scale")
        for name in ("window_size_left", "window_size_right"):
            size = options[name]
            if type(size) is not int or size < -1:
                raise OptionError(f"{self.name}: {name}={size!r}; pass -1 or a number of keys")

    def places(self, inputs: Inputs, options: Options) -> Iterator[Place]:
        q, k, v = (inputs[name] for name in "qkv")
        (batch, queries, _, depth), group = q.shape, _heads(inputs, self.name)
        ones = torch.ones((batch, k.shape[2]), dtype=torch.float32, device=q.device)
        of_q, of_k, of_v = (inputs.get(name, ones) for name in self.scales)
        scale = float(options["softmax_scale"] or depth**-0.5)
        left, right = int(options["window_size_left"]), int(options["window_size_right"])
        right = 0 if options["is_causal"] else right
        for b in range(batch):
            keys = k.shape[1] if "seqused_k" not in inputs else int(inputs["seqused_k"][b])
            start, stop = _windows(queries, keys, group, left, right, q.device)
            for g in range(k.shape[2]):
                heads = slice(g * group, (g + 1) * group)
                sink = inputs["s_aux"][heads].to(torch.float64).repeat(queries) if "s_aux" in inputs else None
                rows = q[b, :, heads].reshape(queries * group, depth)
                problem = Attention(
                    rows, k[b, :keys, g], v[b, :keys, g], scale, of_q[b, g].expand(len(rows)), of_k[b, g],
                    of_v[b, g], start, stop, sink,
                )  # fmt: skip  # the operands, then the windows
                yield Place(problem, b, heads)

    def shape(self, inputs: Inputs) -> tuple[int, int, int, int]:
        (batch, queries, heads, _), width = inputs["q"].shape, inputs["v"].shape[3]
        return batch, queries, heads, width

    def laid(self, name: str, x: Tensor) -> Tensor:
        """As of :meth:`AttentionContract.laid`."""
        return x.transpose(1, 2) if name == "lse" else x

    def dtype(self, options: Options) -> torch.dtype:
        return torch.bfloat16


@register
class SinglePrefillWithKvCache(AttentionContract):
    """One sequence of N keys; query ``m`` of M stands at key ``N - M + m``, and with ``causal`` it sees no key behind
    that. ``scale_q`` is one for each query head, ``scale_k`` and ``scale_v`` one for each KV head; 1 where they are not
    given. ``sm_scale`` is D^-0.5 where it is None. The log-sum-exp is to base 2. A query without keys may give
    anything."""

    name = "single_prefill_with_kv_cache"
    summary = "FlashInfer's prefill of one sequence with E4M3 queries, keys and values"
    source = "FlashInfer 0.6.18 single_prefill_with_kv_cache, backend fa3, FP8 queries"
    returns = ("out", "lse")
    shapes = {"out": "[M, H, D]", "lse": "[M, H]"}
    numerics: ClassVar[Mapping[str, tuple[str, ...]]] = {"sm90": ("sm90.flashinfer.fp8",), "cpu": (IEEE32,)}
    log_base = 2.0
    scales = ("scale_q", "scale_k", "scale_v")
    inputs = (
        TensorSpec("q", Kind.CODES, E4M3, ("M", "H", "D"), "query codes"),
        TensorSpec("k", Kind.CODES, E4M3, ("N", "G", "D"), "key codes of the G KV heads"),
        TensorSpec("v", Kind.CODES, E4M3, ("N", "G", "D"), "value codes"),
        TensorSpec("scale_q", Kind.SCALES, F32, ("H",), "scale of each query head", optional=True),
        TensorSpec("scale_k", Kind.SCALES, F32, ("G",), "scale of the keys of each KV head", optional=True),
        TensorSpec("scale_v", Kind.SCALES, F32, ("G",), "scale of the values of each KV head", optional=True),
    )
    options = (
        OptionSpec("o_dtype", torch.bfloat16, (torch.bfloat16, torch.float16), "dtype of the output"),
        OptionSpec("causal", False, (False, True), "no key behind the place of a query"),
        OptionSpec("sm_scale", None, None, "what multiplies a score; None: D^-0.5"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        self.extents(inputs)
        _heads(inputs, self.name)
        _depth(self.name, "q", inputs["q"].shape[2], (64, 128, 256))
        _positive_or_none(self.name, options, "sm_scale")

    def places(self, inputs: Inputs, options: Options) -> Iterator[Place]:
        q, k, v = (inputs[name] for name in "qkv")
        (queries, heads, depth), (keys, of_keys, _), group = q.shape, k.shape, _heads(inputs, self.name)
        ones = torch.ones(heads, dtype=torch.float32, device=q.device)
        of_q = inputs.get("scale_q", ones)
        of_k, of_v = (inputs.get(name, ones[:of_keys]) for name in self.scales[1:])
        scale = float(options["sm_scale"] or depth**-0.5)
        start, stop = _windows(queries, keys, group, -1, 0 if options["causal"] else -1, q.device)
        for g in range(of_keys):
            own = slice(g * group, (g + 1) * group)
            rows = q[:, own].reshape(queries * group, depth)
            problem = Attention(rows, k[:, g], v[:, g], scale, of_q[own].repeat(queries), of_k[g], of_v[g], start, stop)
            yield Place(problem, 0, own)

    def shape(self, inputs: Inputs) -> tuple[int, int, int, int]:
        queries, heads, width = inputs["q"].shape
        return 1, queries, heads, width

    def laid(self, name: str, x: Tensor) -> Tensor:
        """As of :meth:`AttentionContract.laid`."""
        return x[0]

    def dtype(self, options: Options) -> torch.dtype:
        dtype = options["o_dtype"]
        assert isinstance(dtype, torch.dtype)
        return dtype

    def _specified(self, call: Call) -> dict[str, Tensor | None]:
        (queries, heads, width), keys = call.inputs["q"].shape, call.inputs["k"].shape[0]
        if not call.resolved["causal"] or queries <= keys:
            return dict.fromkeys(self.returns)
        seen = torch.arange(queries, device=call.inputs["q"].device) >= queries - keys
        lse = seen[:, None].expand(queries, heads)
        return {"out": lse[:, :, None].expand(queries, heads, width), "lse": lse}


def _positive_or_none(name: str, options: Options, option: str) -> None:
    scale = options[option]
    if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
        raise OptionError(f"{name}: {option}={scale!r}; pass a positive finite number, or None for D^-0.5")
