"""One mixture-of-experts layer in FP8, as its kernels compute it, in float64.

For each token ``t`` and each of its experts ``e`` (of this rank's ``first <= e < first + E``) ::

    h    = store(a[t] @ w13[e].T)             gate rows first, then up rows; the product is exact, the store rounds
    h    = value(quantise(h))                 where the first product leaves its kernel as codes
    act  = round(silu(clamp(gate)) * clamp(up))        or another :class:`oracle.truth.activation.Formula`
    act  = round(act * multiplier)            where one is given: a scale that multiplies before the quantiser
    q, s = quantise(act)                      with a given scale, or one for each token or 1x128 group
    y    = store((q, s) @ w2[e].T)
    out  = sum over the token's experts of weight * y             or as another :class:`Combine` says

:class:`Steps` lists the roundings that a kernel makes in between; each is one correct rounding here. The optional limit
clamps the gate from above and the up half on both sides. With ``on_input`` the weight multiplies the input, in its
dtype, before quantisation, and not the output.

NaN and infinities follow IEEE 754 through products, sums and silu (silu of minus infinity is NaN); the quantiser's
recipe says what becomes of them as codes.
Sources: vLLM fused_moe/experts/deep_gemm_moe.py, csrc/activation_kernels.cu, deep_gemm_utils.py (gather in float32);
TensorRT-LLM cutlass fused MoE (static scale). Not covered: the other admissible outputs
(:mod:`oracle.routines.moe.moe_ranges`), communication between ranks, shared experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, StrEnum

import torch
from torch import Tensor

from oracle.errors import InputError, ShapeError
from oracle.numbers.formats import FP32, Format, decode, of_dtype
from oracle.numbers.quantize import quantize
from oracle.numbers.recipes import VLLM_GROUP, Recipe, ScaleFormula
from oracle.numbers.rounding import Overflow, Rounding, f32, pair_to_dtype, round_to, to_dtype, two_sum
from oracle.numbers.scaling import ScaleFormat
from oracle.truth.activation import SWIGLU, Formula, bounded, curved, halves
from oracle.truth.gemm import ScaledProduct, exact, rounded, take_rows
from oracle.truth.layout import ceil_div

BLOCK = 128


class Activation(StrEnum):
    """Where the activation is rounded to the dtype of the stored intermediate."""

    EACH = "silu, then the product"
    PRODUCT = "the product"
    NONE = "not at all: float32 until it is quantised"


class Addition(StrEnum):
    """How the terms of a token are added. FLOAT32 and ANY: no order of the terms is promised."""

    FLOAT32 = "in float32, one rounding at the end"
    SLOTS = "slot by slot, each sum rounded once, to the stored dtype"
    ANY = "in any order, each sum rounded once, to the stored dtype"


@dataclass(frozen=True, kw_only=True)
class Ways:
    """From the second products ``acc`` (float32) of a token's experts, weights ``w``, to its output.

    Attributes
    ----------
    stored : ``acc`` is rounded to the stored dtype before it is weighted.
    weight : the weight is rounded to the stored dtype.
    term : the weighted product is rounded to the stored dtype.
    addition : how the terms are added.
    """

    stored: bool = False
    weight: bool = False
    term: bool = False
    addition: Addition = Addition.FLOAT32


class Combine(Enum):
    """How the second products of a token's experts become its output.

    STORED      DeepGEMM and CUTLASS layers: the products are stored, a second kernel weights and adds them
    WEIGHTED    Triton's fused_moe_kernel with MUL_ROUTED_WEIGHT, then at::sum_out, which adds in float32
    FLOAT32     one kernel that keeps the products in registers
    RUNNING     as WEIGHTED, then vLLM's moe_sum: the slots of a token one after the other, each sum rounded
    SCALED      vLLM's first CUTLASS layer: stored products times stored weights, rounded, added in float32
    REORDERED   SGLang's post_reorder: stored products times stored weights, rounded, added slot by slot
    FUSED       the same where the compiler makes one operation of product and sum
    ATOMIC      FlashInfer's fused finalize: weighted in the epilogue, then atomic additions of the stored dtype
    SCATTERED   FlashInfer's kernels of sm120: stored first, then as ATOMIC
    """

    STORED = Ways(stored=True)
    WEIGHTED = Ways(term=True)
    FLOAT32 = Ways()
    RUNNING = Ways(term=True, addition=Addition.SLOTS)
    SCALED = Ways(stored=True, weight=True, term=True)
    REORDERED = Ways(stored=True, weight=True, term=True, addition=Addition.SLOTS)
    FUSED = Ways(stored=True, weight=True, addition=Addition.SLOTS)
    ATOMIC = Ways(term=True, addition=Addition.ANY)
    SCATTERED = Ways(stored=True, term=True, addition=Addition.ANY)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The roundings of a kernel between its two products and after them.

    Attributes
    ----------
    store : dtype in which the products are stored, and to which activations and terms are rounded.
    first : dtype of the first product, where it is another; float32 where nothing is stored before the activation.
    activation : roundings of the activation, silu(gate) * up or another.
    formula : which activation it is.
    hidden : quantiser of the first product, which is read back as codes times scale; None: it is not quantised.
    recipe : quantiser of the intermediate; one with a given scale, or of tokens or 1x128 groups.
    limit : clamp of gate and up, or as the formula has it; None for none.
    combine : weights, store and sum of the experts' outputs.
    weighted : the weight multiplies the activation in float32 before it is quantised, and not the output.
    """

    store: torch.dtype = torch.bfloat16
    first: torch.dtype | None = None
    activation: Activation = Activation.EACH
    formula: Formula = SWIGLU
    hidden: Recipe | None = None
    recipe: Recipe = VLLM_GROUP
    limit: float | None = None
    combine: Combine = Combine.STORED
    weighted: bool = False


@dataclass(frozen=True)
class Experts:
    """Weights of this rank's experts.

    Attributes
    ----------
    w13 : Tensor ``[E, 2 I, H]`` float8_e4m3fn; ``w2`` ``[E, H, I]``.
    w13_scale, w2_scale : float32, for rows and columns of a weight: ``[E]`` (one for each expert), ``[E, rows]`` (one
        for each row), ``[E, ceil(rows / 128), ceil(columns / 128)]``, or ``[E, rows, ceil(columns / 128)]``.
    intermediate_scale : one float32 value, given exactly when the recipe's scale is.
    multiplier : what the activation is multiplied by before it is quantised, float32 ``[1]`` or ``[I]``, or None; the
        product is rounded to the dtype of the activation.
    first : number of the first expert among all ranks'.
    alpha : the scales ``[E]`` of the two products' left operands, where they belong to the expert and the operands have
        none of their own (all are 1); else None.
    width : columns that share a scale where a scale does not belong to a whole row.
    factors : what the two products are multiplied by, float32 ``[E]`` each, or None.
    globals : the global scales under which an expert quantises the input and the intermediate, float32 ``[E]`` each.
    biases : what is added to the two products, float32 ``[E, 2 I]`` and ``[E, H]``, or None.
    gates : alpha, beta and limit of each expert's activation, float32 ``[E, 3]``, or None; an infinite limit is none.
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    intermediate_scale: Tensor | None = None
    first: int = 0
    multiplier: Tensor | None = None
    alpha: tuple[Tensor, Tensor] | None = None
    width: int = BLOCK
    factors: tuple[Tensor, Tensor] | None = None
    globals: tuple[Tensor, Tensor] | None = None
    biases: tuple[Tensor, Tensor] | None = None
    gates: Tensor | None = None

    def __post_init__(self) -> None:
        e, h, i = self.w2.shape
        if tuple(self.w13.shape) not in ((e, 2 * i, h), (e, i, h)):
            raise ShapeError(f"w13 has shape {list(self.w13.shape)}; w2 {[e, h, i]} takes [{e}, {2 * i}, {h}]")
        for name, rows, columns in (("w13", self.w13.shape[1], h), ("w2", h, i)):
            shape, across = tuple(getattr(self, f"{name}_scale").shape), ceil_div(columns, self.width)
            admitted = (e,), (e, rows), (e, ceil_div(rows, BLOCK), across), (e, rows, across)
            if shape not in admitted:
                raise ShapeError(
                    f"{name}_scale has shape {list(shape)}; pass one of {', '.join(str(list(one)) for one in admitted)}"
                )

    def scale(self, which: str, expert: int) -> tuple[Tensor, int, int]:
        """The scale ``[N / b_rows, K / block]`` of a weight of one local expert, float32, ``block`` and ``b_rows``."""
        (rows, columns), scale = getattr(self, which)[expert].shape, getattr(self, f"{which}_scale")[expert]
        if scale.dim() < 2:
            return scale.reshape(-1, 1), columns, rows if scale.dim() == 0 else 1
        return scale, self.width, 1 if scale.shape[0] == rows else BLOCK

    def affine(self, which: str, expert: int) -> tuple[Tensor | None, Tensor | None]:
        """What multiplies a product of one local expert, ``[1]``, and what is added to it, ``[N]``; float32 or None."""
        at = which == "w2"
        factor = None if self.factors is None else self.factors[at][expert].reshape(1)
        return factor, None if self.biases is None else self.biases[at][expert]

    def steps(self, expert: int, steps: Steps) -> Steps:
        """The steps with the parameters of one local expert's activation."""
        if self.gates is None:
            return steps
        alpha, beta, limit = self.gates[expert].tolist()
        formula = replace(steps.formula, alpha=alpha, beta=beta)
        return replace(steps, formula=formula, limit=None if limit == torch.inf else limit)

    def product(self, which: str, expert: int, a: Tensor, a_scale: Tensor) -> ScaledProduct:
        """``a [R, K]`` (codes) times a weight of one local expert, transposed.

        ``a_scale``: float32 ``[1, 1]``, ``[R, 1]`` (one scale holds for every block) or ``[R, ceil(K / 128)]``.
        """
        scale, block, b_rows = self.scale(which, expert)
        if self.alpha is not None:
            a_scale = self.alpha[which == "w2"][expert].reshape(1, 1)
        spread = a_scale.expand(-1, scale.shape[1]) if a_scale.shape[1] == 1 else a_scale
        factor, bias = self.affine(which, expert)
        weight = getattr(self, which)[expert]
        return ScaledProduct(a, weight, spread, scale, block=block, b_rows=b_rows, bias=bias, alpha=factor)


@dataclass(frozen=True)
class Tokens:
    """The inputs of a layer and their routing.

    Attributes
    ----------
    codes, scale : the quantised input ``[T, H]`` and its scale (``[1, 1]``, ``[T, 1]`` or ``[T, ceil(H / 128)]``).
    ids : Tensor ``[T, k]`` integers, experts of all ranks; -1 for none.
    weights : Tensor ``[T, k]`` float32.
    on_input : the input is multiplied by the weights already.
    each : codes and scale of the input as each local expert quantises it, where that differs; else None.
    """

    codes: Tensor
    scale: Tensor
    ids: Tensor
    weights: Tensor
    on_input: bool = False
    each: tuple[tuple[Tensor, Tensor], ...] | None = None

    def slots(self, experts: Experts) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For each local expert with work: its index, and the tokens and slots that chose it, both int64 ``[rows]``."""
        local = self.ids.to(torch.int64) - experts.first
        for expert in range(experts.w13.shape[0]):
            token, slot = torch.nonzero(local == expert, as_tuple=True)
            if token.numel():
                yield expert, token, slot

    def rows(self, token: Tensor, expert: int = 0) -> tuple[Tensor, Tensor]:
        """Codes ``[rows, H]`` and scale of the tokens in ``token`` (int64 ``[rows]``) for a local expert, of the dtypes
        of the input; a scale ``[1, 1]`` stays."""
        codes, scale = (self.codes, self.scale) if self.each is None else self.each[expert]
        return take_rows(codes, token), scale if scale.shape[0] == 1 else scale.index_select(0, token)

    def output_weights(self, steps: Steps) -> Tensor:
        """What multiplies an expert's output by these steps, float64 ``[T, k]``."""
        w = decode(self.weights)
        return torch.ones_like(w) if self.on_input or steps.weighted else w


@dataclass(frozen=True)
class Rows:
    """What one expert has after a step, for the (token, slot) pairs that chose it, in this order."""

    expert: int
    token: Tensor
    slot: Tensor
    value: Tensor
    scale: Tensor | None = None


Change = Callable[[str, Rows], Rows]


def unchanged(step: str, rows: Rows) -> Rows:
    """The change of a right kernel: none."""
    return rows


def layer(tokens: Tokens, experts: Experts, steps: Steps, change: Change = unchanged) -> Tensor:
    """The output ``[T, H]`` in float64, before it is rounded: the sum of weighted outputs as ``steps.combine`` says.

    A token without a local expert gives 0. The float64 sum over at most ``k`` terms is not exact; its error is below
    ``k 2^-53`` of the sum of magnitudes (where every sum is rounded, it is as it is: in the order of the slots).
    ``change`` is what a faulty kernel does after a step: ``first`` (float64 values of the stored first product),
    ``activated``, ``quantised`` (codes and scale) and ``term`` (weighted second products).
    """
    shape = (tokens.codes.shape[0], experts.w2.shape[1])
    combine, weights = steps.combine.value, tokens.output_weights(steps)
    slots = torch.zeros((tokens.ids.shape[1], *shape), dtype=torch.float64, device=tokens.codes.device)
    if combine.weight:
        weights = nearest(weights, of_dtype(steps.store))
    for expert, token, slot in tokens.slots(experts):
        h = stored(experts.product("w13", expert, *tokens.rows(token, expert)), steps.first or steps.store)
        first = change("first", Rows(expert, token, slot, read_back(h, steps)))
        value = activated(first.value, experts.steps(expert, steps))
        if steps.weighted:
            value = nearest(value * decode(tokens.weights)[token, slot, None], FP32)
        act = change("activated", replace(first, value=value))
        codes, scale = quantised(act.value, experts, steps, expert)
        quantized = change("quantised", replace(act, value=codes, scale=scale))
        assert quantized.scale is not None
        y = stored(experts.product("w2", expert, quantized.value, quantized.scale), stored_as(steps))
        term = weights[token, slot, None] * decode(y)
        if combine.term:
            term = nearest(term, of_dtype(steps.store))
        last = change("term", replace(quantized, value=term))
        slots[last.slot, last.token] = last.value
    return slots.sum(dim=0) if combine.addition is Addition.FLOAT32 else running_sum(slots, steps.store)


def stored_as(steps: Steps) -> torch.dtype:
    """The dtype to which the second product is rounded before it is weighted."""
    return steps.store if steps.combine.value.stored else torch.float32


def read_back(h: Tensor, steps: Steps) -> Tensor:
    """What the activation reads of a stored first product ``h [R, 2 I]`` of a float dtype: float64 ``[R, 2 I]``, its
    values, or codes times scale, rounded to float32."""
    if steps.hidden is None:
        return decode(h)
    quantized = quantize(h, steps.hidden)
    width = steps.hidden.block.columns or h.shape[1]
    return nearest(
        decode(quantized.codes) * decode(quantized.scale).repeat_interleave(width, dim=1)[:, : h.shape[1]], FP32
    )


def running_sum(slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first axis of float64 ``slots`` ``[k, T, H]``, one after the other, each rounded once to
    ``dtype``: float64 ``[T, H]``.

    Adding 0 changes nothing. Monotone in every term. Rounding to float32 first, as torch's bfloat16 addition does,
    gives the same bits: 24 bits are more than twice 8 and two.
    """
    total = torch.zeros_like(slots[0])
    for term in slots:
        total = added(total, term, dtype)
    return total


def added(total: Tensor, term: Tensor, dtype: torch.dtype) -> Tensor:
    """``total + term``, two float64 tensors of one shape, the exact sum rounded once to ``dtype``: float64 of that
    shape."""
    high, low = two_sum(total, term)
    low = torch.where(torch.isfinite(high), low, 0.0)
    return decode(pair_to_dtype(high, low, dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF))


def stored(product: ScaledProduct, dtype: torch.dtype) -> Tensor:
    """The exact product rounded once: ``[M, N]`` of ``dtype``."""
    return rounded(product, exact(product), dtype)


def clamped(h: Tensor, steps: Steps) -> tuple[Tensor, Tensor | None]:
    """Gate and up ``[..., I]`` of float64 ``h [..., 2 I]``, clamped where the formula clamps them; NaN stays NaN."""
    (gate, up), limit = halves(h, steps.formula), steps.limit
    if limit is not None:
        # the curve of a gate above twice the limit and 1024 is above the limit
        gate = gate.clamp(max=max(2 * limit, 1024.0) if steps.formula.late else limit)
        gate = nearest(gate, of_dtype(steps.store)) if steps.formula.narrow else gate
        up = None if up is None else up.clamp(-limit, limit)
    return gate, up


def left_of(gate: Tensor, steps: Steps) -> Tensor:
    """What becomes of a clamped ``gate`` (float64, any shape) before a rounding: float64 of that shape; NaN stays."""
    left = curved(gate, steps.formula)
    return left.clamp(max=steps.limit) if steps.limit is not None and steps.formula.late else left


def activated(h: Tensor, steps: Steps) -> Tensor:
    """The activation of float64 ``h [..., 2 I]`` with the steps' roundings and clamp, float64 ``[..., I]``."""
    (gate, up), formula, fmt = clamped(h, steps), steps.formula, of_dtype(steps.store)
    left = left_of(gate, steps)
    if steps.activation is Activation.EACH:
        left = nearest(left, fmt)
    if up is not None:
        right = bounded(up, formula)
        left = left * (f32(right + formula.beta) if formula.beta else right)
    return nearest(left, FP32 if steps.activation is Activation.NONE else fmt)


def between(steps: Steps) -> torch.dtype:
    """The dtype of the activation that is quantised."""
    return torch.float32 if steps.activation is Activation.NONE else steps.store


def quantised(act: Tensor, experts: Experts, steps: Steps, expert: int = 0) -> tuple[Tensor, Tensor]:
    """Codes ``[R, I]`` of the recipe's element and scale (float32 ``[1, 1]``, ``[R, 1]`` or one for each block of a
    row) of the intermediate ``act``, float64 ``[R, I]``, of a local expert.

    Raises InputError unless a scale is given exactly when the recipe takes a given one.
    """
    dtype = between(steps)
    if experts.multiplier is not None:
        act = nearest(act * decode(experts.multiplier), of_dtype(dtype))
    static_scale = experts.intermediate_scale
    if (steps.recipe.formula is ScaleFormula.GIVEN) != (static_scale is not None):
        raise InputError(
            f"recipe {steps.recipe.name} {'needs' if static_scale is None else 'computes its own scale, so pass no'} "
            "intermediate_scale"
        )
    x = to_dtype(act, dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
    supplied = None if experts.globals is None else experts.globals[1][expert]
    quantized = quantize(x, steps.recipe, scale=static_scale, global_scale=supplied)
    if steps.recipe.scale_format is not ScaleFormat.FLOAT32:
        return quantized.codes, as_float32(quantized.scale)
    return quantized.codes, quantized.scale.reshape(1, 1) if static_scale is not None else quantized.scale


def as_float32(scale: Tensor) -> Tensor:
    """``scale`` of any format and shape as float32 of that shape, which holds each of them; NaN stays NaN."""
    return to_dtype(decode(scale), torch.float32, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def weighted_input(x: Tensor, weights: Tensor, *, on_input: bool) -> Tensor:
    """The input ``x [T, H]`` of the quantiser: multiplied by its weight, in its dtype, with ``on_input``. ``weights``:
    float32 ``[T, k]``.

    Raises InputError for more than one expert a token: the input would need as many copies (Llama-4 has one).
    """
    if not on_input:
        return x
    if weights.shape[1] != 1:
        raise InputError(f"weights on the input need one expert for each token, not {weights.shape[1]}")
    fmt = of_dtype(x.dtype)
    w = nearest(decode(weights), fmt)
    return to_dtype(nearest(decode(x) * w, fmt), x.dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def nearest(x: Tensor, fmt: Format) -> Tensor:
    """Float64 ``x`` of any shape rounded once to a format, to nearest even: float64 of the same shape."""
    return round_to(x, fmt, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
