"""One mixture-of-experts layer in FP8, as its kernels compute it, in float64.

For each token ``t`` and each of its experts ``e`` (of this rank's ``first <= e < first + E``) ::

    h    = store(a[t] @ w13[e].T)             gate rows first, then up rows; the product is exact, the store rounds
    act  = round(silu(clamp(gate)) * clamp(up))        silu(x) = x / (1 + exp(-x))
    q, s = quantise(act)                      with a given scale, or one for each 1x128 group
    y    = store((q, s) @ w2[e].T)
    out  = sum over the token's experts of weight * y             or as another :class:`Combine` says

:class:`Steps` lists the roundings that a kernel makes in between; each is one correct rounding here. The optional limit
clamps the gate from above and the up half on both sides. With ``on_input`` the weight multiplies the input, in its
dtype, before quantisation, and not the output.

Sources: vLLM fused_moe/experts/deep_gemm_moe.py, csrc/activation_kernels.cu, deep_gemm_utils.py (gather in float32);
TensorRT-LLM cutlass fused MoE (static scale). Not covered: the other admissible outputs
(:mod:`oracle.routines.moe.moe_ranges`), communication between ranks, shared experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from oracle.errors import InputError, ShapeError
from oracle.numbers.formats import FP32, Format, decode, of_dtype
from oracle.numbers.quantize import quantize
from oracle.numbers.recipes import VLLM_GROUP, Recipe, ScaleFormula
from oracle.numbers.rounding import Overflow, Rounding, round_to, to_dtype
from oracle.truth.gemm import ScaledProduct, exact, rounded, take_rows
from oracle.truth.layout import ceil_div
from oracle.truth.routing import sigmoid

BLOCK = 128


class Activation(StrEnum):
    """Where the activation is rounded to the dtype of the stored intermediate."""

    EACH = "silu, then the product"
    PRODUCT = "the product"
    NONE = "not at all: float32 until it is quantised"


class Combine(StrEnum):
    """How the second products ``acc`` (float32) of a token's experts become its output; ``w`` are their weights.

    STORED      DeepGEMM and CUTLASS layers: the products are stored, a second kernel weights and adds them
    WEIGHTED    Triton's fused_moe_kernel with MUL_ROUTED_WEIGHT, then at::sum_out, which adds in float32
    FLOAT32     one kernel that keeps the products in registers
    RUNNING     as WEIGHTED, then vLLM's moe_sum: the slots of a token one after the other, each sum rounded
    """

    STORED = "w * store(acc), added in float32"
    WEIGHTED = "store(w * acc), added in float32"
    FLOAT32 = "w * acc, added in float32"
    RUNNING = "store(w * acc), added slot by slot in the dtype of the store"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The roundings of a kernel between its two products and after them.

    Attributes
    ----------
    store : dtype in which the products are stored.
    activation : roundings of silu(gate) * up.
    recipe : quantiser of the intermediate; one with a given scale, or of 1x128 groups.
    limit : clamp of gate and up, None for none.
    combine : weights, store and sum of the experts' outputs.
    """

    store: torch.dtype = torch.bfloat16
    activation: Activation = Activation.EACH
    recipe: Recipe = VLLM_GROUP
    limit: float | None = None
    combine: Combine = Combine.STORED


@dataclass(frozen=True)
class Experts:
    """Weights of this rank's experts.

    Attributes
    ----------
    w13 : Tensor ``[E, 2 I, H]`` float8_e4m3fn; ``w2`` ``[E, H, I]``.
    w13_scale, w2_scale : float32, ``[E]`` (one for each expert) or ``[E, ceil(rows / 128), ceil(columns / 128)]``.
    intermediate_scale : one float32 value, given exactly when the recipe's scale is.
    first : number of the first expert among all ranks'.
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    intermediate_scale: Tensor | None = None
    first: int = 0

    def __post_init__(self) -> None:
        e, h, i = self.w2.shape
        if tuple(self.w13.shape) != (e, 2 * i, h):
            raise ShapeError(f"w13 has shape {list(self.w13.shape)}; w2 {[e, h, i]} takes [{e}, {2 * i}, {h}]")
        for name, rows, columns in (("w13", 2 * i, h), ("w2", h, i)):
            shape = tuple(getattr(self, f"{name}_scale").shape)
            blocks = (e, ceil_div(rows, BLOCK), ceil_div(columns, BLOCK))
            if shape not in ((e,), blocks):
                raise ShapeError(f"{name}_scale has shape {list(shape)}; pass [{e}] or {list(blocks)}")

    def product(self, which: str, expert: int, a: Tensor, a_scale: Tensor) -> ScaledProduct:
        """``a`` (codes) times a weight of one local expert, transposed; one scale of ``a`` holds for every block."""
        w, scale = getattr(self, which)[expert], getattr(self, f"{which}_scale")[expert]
        if scale.dim() == 0:
            return ScaledProduct(a, w, a_scale, scale.reshape(1, 1), block=w.shape[1], b_rows=w.shape[0])
        spread = a_scale.expand(-1, scale.shape[1]) if a_scale.shape[1] == 1 else a_scale
        return ScaledProduct(a, w, spread, scale, block=BLOCK, b_rows=BLOCK)


@dataclass(frozen=True)
class Tokens:
    """The inputs of a layer and their routing.

    Attributes
    ----------
    codes, scale : the quantised input ``[T, H]`` and its scale (``[1, 1]``, ``[T, 1]`` or ``[T, ceil(H / 128)]``).
    ids : Tensor ``[T, k]`` integers, experts of all ranks; -1 for none.
    weights : Tensor ``[T, k]`` float32.
    on_input : the input is multiplied by the weights already.
    """

    codes: Tensor
    scale: Tensor
    ids: Tensor
    weights: Tensor
    on_input: bool = False

    def slots(self, experts: Experts) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For each local expert with work: its index, and the tokens and slots that chose it."""
        local = self.ids.to(torch.int64) - experts.first
        for expert in range(experts.w13.shape[0]):
            token, slot = torch.nonzero(local == expert, as_tuple=True)
            if token.numel():
                yield expert, token, slot

    def rows(self, token: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scale of some tokens."""
        scale = self.scale if self.scale.shape[0] == 1 else self.scale.index_select(0, token)
        return take_rows(self.codes, token), scale

    def output_weights(self) -> Tensor:
        """What multiplies an expert's output, float64 ``[T, k]``."""
        w = decode(self.weights)
        return torch.ones_like(w) if self.on_input else w


def layer(tokens: Tokens, experts: Experts, steps: Steps) -> Tensor:
    """The output ``[T, H]`` in float64, before it is rounded: the sum of weighted outputs as ``steps.combine`` says.

    A token without a local expert gives 0. The float64 sum over at most ``k`` terms is not exact; its error is below
    ``k 2^-53`` of the sum of magnitudes (of RUNNING every sum is rounded as it is).
    """
    out = torch.zeros((tokens.codes.shape[0], experts.w2.shape[1]), dtype=torch.float64, device=tokens.codes.device)
    weights, combine = tokens.output_weights(), steps.combine
    slots = torch.zeros((tokens.ids.shape[1], *out.shape), dtype=torch.float64, device=out.device)
    kept = steps.store if combine is Combine.STORED else torch.float32
    for expert, token, slot in tokens.slots(experts):
        h = stored(experts.product("w13", expert, *tokens.rows(token)), steps.store)
        intermediate = quantised(activated(decode(h), steps), experts, steps)
        y = weights[token, slot, None] * decode(stored(experts.product("w2", expert, *intermediate), kept))
        if combine in (Combine.WEIGHTED, Combine.RUNNING):
            y = nearest(y, of_dtype(steps.store))
        if combine is Combine.RUNNING:
            slots[slot, token] = y
        else:
            out.index_add_(0, token, y)
    return running_sum(slots, steps.store) if combine is Combine.RUNNING else out


def running_sum(slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first axis of float64 values of ``dtype``, one after the other, each rounded to float32 and then
    to ``dtype``; adding 0 changes nothing. Monotone in every term."""
    total = torch.zeros_like(slots[0])
    for term in slots:
        total = nearest(nearest(total + term, FP32), of_dtype(dtype))
    return total


def stored(product: ScaledProduct, dtype: torch.dtype) -> Tensor:
    """The exact product rounded once."""
    return rounded(product, exact(product), dtype)


def activated(h: Tensor, steps: Steps) -> Tensor:
    """``silu(gate) * up`` of float64 ``h [R, 2 I]`` with the steps' roundings and clamp, float64 ``[R, I]``."""
    gate, up = h.chunk(2, dim=1)
    if steps.limit is not None:
        gate, up = gate.clamp(max=steps.limit), up.clamp(-steps.limit, steps.limit)
    fmt = of_dtype(steps.store)
    left = gate * sigmoid(gate)
    if steps.activation is Activation.EACH:
        left = nearest(left, fmt)
    return nearest(left * up, FP32 if steps.activation is Activation.NONE else fmt)


def quantised(act: Tensor, experts: Experts, steps: Steps) -> tuple[Tensor, Tensor]:
    """Codes ``[R, I]`` and scale (``[1, 1]`` or ``[R, ceil(I / 128)]``) of the intermediate.

    Raises InputError unless a scale is given exactly when the recipe takes a given one.
    """
    dtype = torch.float32 if steps.activation is Activation.NONE else steps.store
    given = experts.intermediate_scale
    if (steps.recipe.formula is ScaleFormula.GIVEN) != (given is not None):
        raise InputError(
            f"recipe {steps.recipe.name} {'needs' if given is None else 'computes its own scale, so pass no'} "
            "intermediate_scale"
        )
    x = to_dtype(act, dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
    made = quantize(x, steps.recipe, scale=given)
    return made.codes, made.scale.reshape(1, 1) if given is not None else made.scale


def weighted_input(x: Tensor, weights: Tensor, *, on_input: bool) -> Tensor:
    """The input ``x [T, H]`` of the quantiser: multiplied by its weight, in its dtype, with ``on_input``.

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
    """Float64 values rounded once to a format."""
    return round_to(x, fmt, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
