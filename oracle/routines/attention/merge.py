"""Contracts that merge two attention states, each an output and its log-sum-exp.

Sources: vLLM 0.20.2 ``vllm/v1/attention/ops/merge_attn_states.py`` and ``triton_merge_attn_states.py``; SGLang 0.5.10
``sgl_kernel.merge_state_v2`` and its Triton form; FlashInfer 0.6.18 ``merge_state``. Bounds are derived in
:func:`oracle.bounds.attention.merged_bound`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.attention import merged_bound
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.errors import InputError, OptionError
from oracle.numbers.formats import decode
from oracle.routines.base import E4M3, F32, Call, Contract, Inputs, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.fault import Fault, Stage, fold
from oracle.routines.traits import Kind
from oracle.truth.attention import merged
from oracle.verdict.compare import Admissible
from oracle.verdict.sets import Elements, Found, Sets, mostly_zero, rounded_to

WIDE = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class States:
    """Two states: outputs ``[2, M, H, D]`` and natural log-sum-exps ``[2, M, H]``, float64; -inf without keys."""

    outputs: Tensor
    sums: Tensor


class MergeContract(Contract):
    """Two states of the same queries are weighted by their log-sum-exps:

        w_i = exp(lse_i) / (exp(lse_a) + exp(lse_b))
        out = w_a out_a + w_b out_b          lse = log(exp(lse_a) + exp(lse_b))

    An infinite log-sum-exp of either sign is that of a state without keys: its output counts nothing. Where both have
    none the result may be anything. NaN in an output that counts makes its element NaN; NaN in a log-sum-exp leaves its
    row open. Float32 in any order, with approximate exponentials, is admitted.

    Subclasses
    ----------
    A subclass names its inputs (``names``: outputs and log-sum-exps of the first and second state), the axes of the
    log-sum-exps and their base."""

    dispatched = False
    section = "Attention"
    gpu = True
    golden_arches: ClassVar[tuple[str, ...]] = ("cpu",)
    numerics: ClassVar[Mapping[str, tuple[str, ...]]] = {"cpu": (IEEE32,), "sm90": (IEEE32,)}
    names: ClassVar[tuple[str, str, str, str]]
    heads_first: ClassVar[bool] = False
    log_base: ClassVar[float] = math.e
    either_sign: ClassVar[bool] = True
    """Whether ``+inf`` is that of a state without keys, too; where not, its row may be anything."""

    def refuse(self, inputs: Inputs, options: Options) -> None:
        self.extents(inputs)
        first, _, second, _ = self.names
        if inputs[first].dtype is not inputs[second].dtype:
            dtypes = f"{inputs[first].dtype} and {inputs[second].dtype}"
            raise InputError(f"{self.name}: {first} and {second} are {dtypes}; they have one dtype")

    def states(self, inputs: Inputs, options: Options) -> States:
        """What is merged."""
        outputs = torch.stack([decode(inputs[self.names[i]]) for i in (0, 2)])
        sums = torch.stack([decode(inputs[self.names[i]]) for i in (1, 3)]) * math.log(self.log_base)
        sums = sums.transpose(1, 2) if self.heads_first else sums
        return States(outputs, sums.masked_fill(torch.isinf(sums), -torch.inf))

    def scale(self, inputs: Inputs) -> Tensor | None:
        """What the output is divided by before it is rounded to E4M3, float64 ``[]``, no NaN; None: nothing."""
        return None

    @abstractmethod
    def dtype(self, inputs: Inputs) -> torch.dtype:
        """That of the output."""

    def reference(self, inputs: Inputs, **options: object) -> dict[str, Tensor]:
        """Both outputs in float64; NaN where neither state has keys."""
        return self._value(inputs, self.states(inputs, self.check(inputs, options)))

    def _value(self, inputs: Inputs, given: States) -> dict[str, Tensor]:
        out, lse = merged(given.outputs, given.sums)
        scale = self.scale(inputs)
        return self._named((out if scale is None else out / scale, lse / math.log(self.log_base)))

    def _named(self, results: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        out, lse = results
        laid = lse.transpose(0, 1).contiguous() if self.heads_first else lse
        return dict(zip(self.returns, (out, laid), strict=True))

    def predict(self, inputs: Inputs, *, numerics: str | None, **options: object) -> dict[str, Tensor]:
        """The truth, rounded: no bits are known."""
        return self._rounded(inputs, self.reference(inputs, **options))

    def _rounded(self, inputs: Inputs, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kinds = (self.dtype(inputs), torch.float32)
        return {name: rounded_to(results[name], kind) for name, kind in zip(self.returns, kinds, strict=True)}

    def outputs(self, call: Call) -> dict[str, Out]:
        shape, known = tuple(call.inputs[self.names[0]].shape), self._known(call)
        out, lse = self.returns
        return {
            out: Out(shape, (self.dtype(call.inputs),), known[out]),
            lse: Out(tuple(known[lse].shape), F32, known[lse], optional=True),
        }

    def _known(self, call: Call) -> dict[str, Tensor]:
        """Where a state has keys, bool in the shapes of the outputs."""
        some = ~torch.isneginf(self.states(call.inputs, call.resolved).sums).all(dim=0)
        if not self.either_sign:
            for name in (self.names[1], self.names[3]):
                above = torch.isposinf(decode(call.inputs[name]))
                some &= ~(above.transpose(0, 1) if self.heads_first else above)
        return self._named((some[..., None].expand(call.inputs[self.names[0]].shape), some))

    def expected(self, call: Call) -> dict[str, Tensor]:
        """The truth, rounded; NaN where nothing is claimed."""
        return self._rounded(call.inputs, call.truth)

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        name = self.arithmetics(call, numerics)[0]

        def make() -> tuple[Mapping[str, Admissible], str]:
            given, known = self.states(call.inputs, call.resolved), self._known(call)
            bounds = merged_bound(given.outputs, given.sums, self.scale(call.inputs), self.log_base)
            sides = [self._named(side) for side in bounds]  # low, high, open
            kinds, found = (self.dtype(call.inputs), torch.float32), {}
            for output, kind in zip(self.returns, kinds, strict=True):
                low, high = (decode(rounded_to(side[output], kind)) for side in sides[:2])
                truth = decode(rounded_to(call.truth[output], kind))
                opened = sides[2][output].to(torch.bool)
                middle = torch.maximum(torch.minimum(truth, high), low).masked_fill(opened, torch.nan)
                found[output] = Admissible(low, high, middle, known[output], opened)
            return found, "float32 in any order, approximate exponentials"

        return [Elements(make, name, False, mistrust=lambda outputs: self._why_mistrust(call, outputs))]

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        """The truth of inputs that stage READ changed, of states that PRODUCT changed, and of WRITE."""
        inputs = fold(call, faults, Stage.READ, dict(call.inputs))
        options = fold(call, faults, Stage.OPTIONS, dict(call.resolved))
        given = fold(call, faults, Stage.PRODUCT, self.states(inputs, options))
        computed = self._rounded(inputs, self._value(inputs, given))
        outputs: dict[str, Tensor] = fold(call, faults, Stage.WRITE, computed)
        return outputs

    def _why_mistrust(self, call: Call, outputs: Found) -> str | None:
        sums = self.states(call.inputs, call.resolved).sums
        if bool(((sums[0] - sums[1]).abs() > 20).all()):
            return "one state has all the weight in every row"
        return mostly_zero(decode(outputs[self.returns[0]]))


@register
class MergeAttnStates(MergeContract):
    """Tokens from ``prefill_tokens_with_context`` on (None: none) have no prefix: they get the suffix as it is. With
    ``output_scale`` the output is divided by it and rounded to E4M3, saturated."""

    name = "merge_attn_states"
    summary = "vLLM's merge of the attention over a cached prefix with that over the new tokens"
    source = "vLLM 0.20.2 vllm/v1/attention/ops/merge_attn_states.py merge_attn_states"
    returns = ("output", "output_lse")
    shapes: ClassVar[Mapping[str, str]] = {"output": "[M, H, D]", "output_lse": "[H, M]"}
    names = ("prefix_output", "prefix_lse", "suffix_output", "suffix_lse")
    heads_first = True
    inputs = (
        TensorSpec("prefix_output", Kind.VALUES, WIDE, ("M", "H", "D"), "output over the prefix"),
        TensorSpec("prefix_lse", Kind.LOGITS, F32, ("H", "M"), "its natural log-sum-exp"),
        TensorSpec("suffix_output", Kind.VALUES, WIDE, ("M", "H", "D"), "output over the suffix"),
        TensorSpec("suffix_lse", Kind.LOGITS, F32, ("H", "M"), "its natural log-sum-exp"),
        TensorSpec("output_scale", Kind.SCALES, F32, ("1",), "scale of an E4M3 output", optional=True),
    )
    options = (OptionSpec("prefill_tokens_with_context", None, None, "tokens that have a prefix; None: all"),)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        scale = inputs.get("output_scale")
        if scale is not None and not bool(((scale > 0) & torch.isfinite(scale)).all()):
            raise InputError(f"{self.name}: output_scale is {float(scale[0]):g}; scales are positive and finite")
        count = options["prefill_tokens_with_context"]
        if count is not None and (type(count) is not int or not 0 <= count <= inputs["prefix_output"].shape[0]):
            tokens = inputs["prefix_output"].shape[0]
            raise OptionError(f"{self.name}: prefill_tokens_with_context={count!r}; pass 0 to {tokens}, or None")

    def states(self, inputs: Inputs, options: Options) -> States:
        given, count = super().states(inputs, options), options["prefill_tokens_with_context"]
        if count is None:
            return given
        sums = given.sums.clone()
        sums[0, int(str(count)) :] = -torch.inf
        return States(given.outputs, sums)

    def scale(self, inputs: Inputs) -> Tensor | None:
        """``output_scale`` as float64 ``[]``; :meth:`refuse` sees to NaN."""
        return decode(inputs["output_scale"])[0] if "output_scale" in inputs else None

    def dtype(self, inputs: Inputs) -> torch.dtype:
        return E4M3[0] if "output_scale" in inputs else inputs["prefix_output"].dtype


class MergeState(MergeContract):
    """``v_a`` and ``v_b`` are the outputs, ``s_a`` and ``s_b`` their log-sum-exps."""

    names = ("v_a", "s_a", "v_b", "s_b")
    inputs = (
        TensorSpec("v_a", Kind.VALUES, WIDE, ("M", "H", "D"), "output of the first state"),
        TensorSpec("s_a", Kind.LOGITS, F32, ("M", "H"), "its log-sum-exp"),
        TensorSpec("v_b", Kind.VALUES, WIDE, ("M", "H", "D"), "output of the second state"),
        TensorSpec("s_b", Kind.LOGITS, F32, ("M", "H"), "its log-sum-exp"),
    )
    options = ()

    def dtype(self, inputs: Inputs) -> torch.dtype:
        return inputs["v_a"].dtype


@register
class MergeStateV2(MergeState):
    """The log-sum-exps are natural."""

    name = "merge_state_v2"
    summary = "SGLang's merge of two attention states"
    source = "SGLang 0.5.10 sgl_kernel.merge_state_v2; sglang/srt/layers/attention/triton_ops/merge_state.py"
    returns = ("v_merged", "s_merged")
    shapes: ClassVar[Mapping[str, str]] = {"v_merged": "[M, H, D]", "s_merged": "[M, H]"}


@register
class FlashInferMergeState(MergeState):
    """The log-sum-exps are to base 2. Only ``-inf`` is that of a state without keys: the kernel subtracts the larger of
    two, so ``+inf`` gives NaN, and a row that has it may be anything."""

    name = "merge_state"
    summary = "FlashInfer's merge of two attention states, log-sum-exps to base 2"
    source = "FlashInfer 0.6.18 flashinfer/cascade.py merge_state"
    returns = ("V", "S")
    shapes: ClassVar[Mapping[str, str]] = {"V": "[M, H, D]", "S": "[M, H]"}
    log_base = 2.0
    either_sign = False
