"""Contracts of NVFP4 in training: stochastic rounding, the random Hadamard transform, 16x16 weights, four over six.

TransformerEngine's quantiser combines them; here each is a contract of its own, along the last axis of ``x`` (its
columnwise outputs are those of ``x^T``). The global scale is ``2688/amax`` of what is quantised, given by the caller:
of the transform, where there is one.

* *Stochastic rounding.* Any random bits are right: a code is either neighbour of its quotient, a quotient on the grid
  is itself. The recipe ``nvfp4_seeded`` declares the bits (:func:`oracle.truth.hadamard.random_bytes` of ``seed``):
  then one code is right.
* *Hadamard.* The transform is rounded to bfloat16, in a sum of 16 whose order is the kernel's own: an interval of
  values, so of scales and codes.
* *16x16.* One scale for 16 rows, published 16 times.
* *Four over six.* The scale of a block or 1.5 times it, whichever errs less. With ``e4m3_max=256`` the global scale is
  ``1536/amax``, so that 1.5 times any scale is below 448. Libraries take the error of ``q scale amax / (6 e4m3_max)``,
  or of ``q scale`` against ``x`` times the global scale: but for roundings both are the error under the global scale.

Sources: TransformerEngine common/cast/nvfp4, common/util/ptx.cuh, custom_recipes/reference_nvfp4.py @d0067d0;
FlashInfer quantization_utils.cuh @fb28d7242 (four over six). Not covered: the order of Philox words in a published
kernel.

NaN and infinities are as the recipe has them; bytes that are only moved keep them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.errors import InputError, ShapeError
from oracle.numbers import mx_recipes
from oracle.numbers.formats import decode
from oracle.numbers.quantize import WIDE, Ends, Prepared, prepare
from oracle.numbers.recipes import Candidates, Recipe
from oracle.routines.base import Call, Contract, Inputs, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.mx.contract import GLOBAL, LAYOUT, Nvfp4Quantize
from oracle.routines.traits import Kind
from oracle.truth.hadamard import LARGEST, SIGNS, SIZE, matrix, random_bytes, transform_ends
from oracle.verdict.compare import Admissible
from oracle.verdict.sets import Elements, Sets

ENCODE = (TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "values to quantise, K a multiple of 16"), GLOBAL)
BF16 = (torch.bfloat16,)
SIGN_MASK = OptionSpec("sign_mask", SIGNS, None, "bit i is set where column i of 16 changes its sign; 0: none does")
SEED = OptionSpec("seed", 0, None, "of the random bits, where a kernel declares them")
ERROR = OptionSpec("error", "mae", tuple(e.name.lower() for e in Candidates), "how the error of a block is measured")
E4M3_MAX = OptionSpec("e4m3_max", 448, (448, 256), "scale of the block of amax: global_scale is 6 of it over amax")


class _Training(Nvfp4Quantize):
    """An NVFP4 quantiser whose global scale is 2688/amax."""

    inputs = ENCODE

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return mx_recipes.TE_NVFP4, mx_recipes.FLASHINFER_NVFP4


@register
class Nvfp4QuantizeStochastic(_Training):
    """Any random bits are right: a code is either neighbour of its quotient; a quotient on the grid is itself. The
    recipe ``nvfp4_seeded``, when it is declared, draws the bits of ``seed``: then one code is right."""

    name = "nvfp4_quantize_stochastic"
    gpu = False  # its libraries compile it for sm100 and later alone, and no capture is of one
    summary = "NVFP4 whose codes are rounded stochastically: either neighbour of a quotient is right"
    source = "TransformerEngine NVFP4Quantizer(stochastic_rounding=True); util/ptx.cuh stochastic_round_fp4_e2m1"
    options = (LAYOUT, SEED)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        random_bytes((1,), options["seed"])  # refuses what is no seed

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return mx_recipes.TE_NVFP4_STOCHASTIC, mx_recipes.NVFP4_SEEDED

    def prepared_of(self, inputs: Inputs, options: Options) -> Prepared:
        x = inputs["x"]
        bits = random_bytes(x.shape, options["seed"]).to(x.device)
        return prepare(x, global_scale=inputs["global_scale"], random=bits)


@register
class Nvfp4Quantize2d(_Training):
    """One scale for 16 rows and 16 columns, whose byte stands in each of the 16 rows."""

    name = "nvfp4_quantize_2d"
    summary = "NVFP4 of weights: one scale for 16x16, so that a weight and its transpose have the same codes"
    source = "TransformerEngine NVFP4Quantizer(with_2d_quantization=True)"
    options = (LAYOUT,)
    repeats = 16

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (m := inputs["x"].shape[0]) % self.repeats:
            raise ShapeError(f"M={m} is not a multiple of {self.repeats}, the rows that share a scale; pad M")

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return mx_recipes.TE_NVFP4_2D, mx_recipes.TE_NVFP4_2D_REFERENCE


@register
class Nvfp4Quantize4over6(_Training):
    """The scale of a block, or 1.5 times it where the ``error`` of the values it gives is smaller; on equality the
    scale itself. With ``e4m3_max=256`` the global scale is ``1536/amax``, so that 1.5 times any scale is below 448."""

    name = "nvfp4_quantize_4over6"
    summary = "NVFP4 with the scale of a block or 1.5 times it, whichever errs less"
    source = "FlashInfer with FLASHINFER_NVFP4_4OVER6 (_E4M3_USE_256); TransformerEngine quantize_4over6_nvfp4.cuh"
    options = (LAYOUT, ERROR, E4M3_MAX)

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        error = Candidates[str(options["error"]).upper()]
        by_error = mx_recipes.FLASHINFER_4OVER6, mx_recipes.FLASHINFER_4OVER6_FAST, mx_recipes.TE_4OVER6_REFERENCE
        return tuple(recipes[error] for recipes in by_error)


def _summable(x: Tensor) -> None:
    """Refuse values of which 16 may overflow float32 in some order."""
    largest = decode(x).abs().nan_to_num(nan=0.0, posinf=0.0).max()
    if float(largest) > LARGEST:
        raise InputError(f"x holds {float(largest):g}; a sum of {SIZE} may overflow float32, pass values up to 2^122")


def _signs(options: Options) -> int:
    mask = options["sign_mask"]
    matrix(mask if isinstance(mask, int) else -1)  # refuses what is no mask
    assert isinstance(mask, int)
    return mask


@register
class HadamardTransform(Contract):
    """``out[:, 16 j + i] = RN_bf16(1/4 sum_l sign_l H[l, i] x[:, 16 j + l])``, ``H[l, i] = (-1)^popcount(l & i)``, a
    sum in float32 whose order is free: values beside a midpoint of bfloat16 admit two. NaN gives 16 NaN, an infinity
    infinities; of infinite terms of both signs infinity or NaN. Magnitudes are at most 2^122.
    """

    name = "hadamard_transform"
    section = "Quantisation"
    summary = "each 16 columns times diag(signs) H / 4, rounded to bfloat16"
    source = "TransformerEngine common/hadamard_transform; reference_nvfp4.py _apply_rht"
    inputs = (TensorSpec("x", Kind.VALUES, BF16, ("M", "K"), "K a multiple of 16"),)
    options = (SIGN_MASK,)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if (k := inputs["x"].shape[1]) % SIZE:
            raise ShapeError(f"K={k} is not a multiple of {SIZE}, the columns of a transform; pad K")
        _signs(options)
        _summable(inputs["x"])

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        return transform_ends(inputs["x"], torch.bfloat16, _signs(self.check(inputs, options)))[0]

    def outputs(self, call: Call) -> dict[str, Out]:
        return {"out": Out(tuple(call.inputs["x"].shape), BF16)}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        def sets() -> tuple[dict[str, Admissible], str]:
            ends = transform_ends(call.inputs["x"], torch.bfloat16, _signs(call.resolved))
            nominal, low, high = (decode(y) for y in ends)
            special = torch.isinf(nominal)  # infinite terms of both signs: infinity or NaN
            return {
                "out": Admissible(low, high, nominal, open=special)
            }, "a float32 sum of 16 in any order, in bfloat16"

        return [Elements(sets)]


@register
class Nvfp4QuantizeRht(_Training):
    """What is quantised is ``hadamard_transform`` of ``x``, rounded to bfloat16; its sums of 16 may be in any order, so
    that the value, its scale and its codes are intervals. The global scale is that of the transform."""

    name = "nvfp4_quantize_rht"
    summary = "NVFP4 of the random Hadamard transform of 16 columns"
    source = "TransformerEngine NVFP4Quantizer(with_rht=True), columnwise output; hadamard_transform_cast_fusion.cu"
    inputs = (TensorSpec("x", Kind.VALUES, BF16, ("M", "K"), "what is transformed, K a multiple of 16"), GLOBAL)
    options = (LAYOUT, SIGN_MASK)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        _signs(options)
        _summable(inputs["x"])

    def prepared_of(self, inputs: Inputs, options: Options) -> Prepared:
        nominal, low, high = transform_ends(inputs["x"], torch.bfloat16, _signs(options))
        return prepare(nominal, global_scale=inputs["global_scale"], ends=Ends(low, high))
