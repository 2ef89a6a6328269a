"""What libraries quantise, value by value, beside the recipe that carries their name. No GPU is needed.

    PYTHONPATH=tests python -m hardware.mx_values [LIBRARY ...] [--blocks N]

Each recipe is compared on five kinds of values: normal, of many sizes, random bits of bfloat16, a grid of ties, and
small ones; ``--blocks`` of 32 of each (32768, which is 2^20 values). A line says how many codes and scales differ, and
how many values lie outside what the recipe admits: where a library sums or divides in another order, its codes differ
and are admitted. Exit 1 where a library is not what its recipe says. Libraries that are not installed are named;
of TransformerEngine and DeepGEMM, which load compiled libraries, what ``pack.py`` leaves of their wheels will do.

torchao 0.18.0, TransformerEngine 2.20 (its reference), DeepGEMM 2.6 (its casts in torch), Model-Optimizer 0.47
and microxcaling 7bc4195 (a checkout on PYTHONPATH). Not covered: NaN and infinity, which these leave undefined.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oracle.bounds.quantiser import judge_recipe
from oracle.numbers import mx_recipes as M
from oracle.numbers.formats import codes_of, decode
from oracle.numbers.quantize import prepare, quantize
from oracle.numbers.recipes import Candidates, Recipe
from oracle.numbers.scaling import Block
from oracle.routines.mx.contract import unpack

MX = "torchao.prototype.mx_formats"
Quantised = tuple[Tensor, Tensor | None]
"""Codes and scales, one each; of a library that gives values alone, these."""


@dataclass(frozen=True)
class Witness:
    """A library's function of a float32 matrix ``[R, K]`` (and of amax, where it scales the tensor as a whole)."""

    library: str
    recipe: Recipe
    run: Callable[[Tensor, float], Quantised]
    known: str = ""


def _module(name: str) -> Any:
    """Raises NotImplementedError: it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotImplementedError(f"{name}: {error}") from error


def values(blocks: int) -> Iterator[tuple[str, Tensor]]:
    """Matrices of 512 columns, so many blocks of 32 each."""
    shape, g = (blocks * 32 // 512, 512), torch.Generator().manual_seed(1)
    normal = torch.randn(shape, generator=g)
    yield "normal", normal
    yield "many sizes", normal * torch.exp2(torch.randint(-30, 30, shape, generator=g))
    bits = torch.randint(-(2**15), 2**15, shape, generator=g).to(torch.int16).view(torch.bfloat16).float()
    yield "random bits", torch.where(bits.abs() < 2.0**100, bits, 1.0)
    quarters = torch.randint(-24, 25, shape, generator=g) / 4
    yield "ties", quarters.float() * torch.exp2(torch.randint(-3, 4, (shape[0], 1), generator=g))
    yield "small", normal * 2.0**-130


# --- torchao ----------------------------------------------------------------------------------------------------------


def _torchao() -> Iterator[Witness]:
    tensor, config = _module(f"{MX}.mx_tensor"), _module(f"{MX}.config")
    constants = _module(f"{MX}.constants")
    formats = {
        "mxfp8_e4m3": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
        "mxfp4": torch.float4_e2m1fn_x2,
        "mxfp6_e3m2": constants.DTYPE_FP6_E3M2,
        "mxfp6_e2m3": constants.DTYPE_FP6_E2M3,
    }
    for name, dtype in formats.items():
        for mode in M.MODES:

            def cast(x: Tensor, amax: float, dtype: object = dtype, mode: str = mode) -> Quantised:
                scale, q = tensor.to_mx(x, dtype, 32, config.ScaleCalculationMode(mode))
                codes = q.view(torch.uint8)
                return unpack(codes) if codes.shape[1] < x.shape[1] else codes, scale.float()

            row = M.TORCHAO_0_18[M.ELEMENTS[name], mode]
            known = "its float32 log2, an ulp or two above a step" if mode == "rceil" else ""
            yield Witness("torchao", row, cast, known)
    quantise = _module(f"{MX}.nvfp4_tensor").nvfp4_quantize

    def two(x: Tensor, amax: float) -> Quantised:
        scale, q = quantise(x, 16, torch.tensor(amax) / torch.tensor(2688.0))
        return unpack(q.view(torch.uint8)), scale.float()

    def one(x: Tensor, amax: float) -> Quantised:
        scale, q = quantise(x, 16)
        return unpack(q.view(torch.uint8)), scale.float()

    yield Witness("torchao", M.TORCHAO_NVFP4, two, "0 times the inverse of a subnormal scale: NaN, coded -1.5")
    yield Witness("torchao", M.TORCHAO_NVFP4_ONE_LEVEL, one)


# --- TransformerEngine ------------------------------------------------------------------------------------------------


def _transformer_engine() -> Iterator[Witness]:
    cast = _module("transformer_engine.pytorch.custom_recipes.reference_nvfp4").NVFP4QuantizerRef

    def run(x: Tensor, amax: float, rows: int = 1, **more: object) -> Quantised:
        options = {"pow_2_scales": False, "eps": 0.0, **more}
        made = cast._quantize_blockwise_reference(x, torch.tensor([amax]), 16, rows, **options)
        codes, scale = unpack(made[0].view(torch.uint8)), made[1].float()
        return codes, scale[::rows].contiguous()

    yield Witness("transformer_engine", M.TE_NVFP4_REFERENCE, run)
    yield Witness("transformer_engine", M.TE_NVFP4_2D_REFERENCE, functools.partial(run, rows=16))
    for error in Candidates:
        over = {"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": error.name}
        for fast in (False, True):
            known = "errors rounded otherwise, beside equal ones"
            chosen = functools.partial(run, **over, nvfp4_4over6_err_use_fast_math=fast)
            yield Witness("transformer_engine", M.TE_4OVER6_REFERENCE[error], chosen, known)


# --- microxcaling, DeepGEMM, Model-Optimizer --------------------------------------------------------------------------


def _microxcaling() -> Iterator[Witness]:
    cast = _module("mx.mx_ops")._quantize_mx
    names = {
        "mxfp8_e4m3": "fp8_e4m3",
        "mxfp8_e5m2": "fp8_e5m2",
        "mxfp6_e3m2": "fp6_e3m2",
        "mxfp6_e2m3": "fp6_e2m3",
        "mxfp4": "fp4_e2m1",
        "mxint8": "int8",
    }
    for name, word in names.items():
        for how in M.ROUNDS:

            def run(x: Tensor, amax: float, word: str = word, how: str = how) -> Quantised:
                return cast(x, 8, word, axes=[-1], block_size=32, round=how), None

            known = "its float32 log2, just below a power of two"
            yield Witness("microxcaling", M.MICROXCALING[M.ELEMENTS[name], how], run, known)


def _deep_gemm() -> Iterator[Witness]:
    cast = _module("deep_gemm.utils.math").per_token_cast_to_fp4
    for row, powers in ((M.DEEPGEMM_FP4, False), (M.DEEPGEMM_FP4_UE8M0, True)):

        def run(x: Tensor, amax: float, powers: bool = powers) -> Quantised:
            q, scale = cast(x, powers, 32)
            return unpack(q.view(torch.uint8)), scale

        yield Witness("deep_gemm", row.with_block(Block(1, 32)), run)


def _modelopt() -> Iterator[Witness]:
    tensors = _module("modelopt.torch.quantization.qtensor")

    def eight(x: Tensor, amax: float) -> Quantised:
        made, scale = tensors.MXFP8QTensor.quantize(x)
        return made._quantized_data.view(torch.uint8), torch.exp2(scale.float() - 127)

    def four(x: Tensor, amax: float) -> Quantised:
        made, scale = tensors.MXFP4QTensor.quantize(x, 32)
        return unpack(made._quantized_data), torch.exp2(scale.float() - 127).reshape(x.shape[0], -1)

    def two(x: Tensor, amax: float) -> Quantised:
        g = torch.tensor(amax) / torch.tensor(2688.0)
        made, scale, _ = tensors.NVFP4QTensor.quantize(x, 16, weights_scaling_factor_2=g)
        return unpack(made._quantized_data), scale.float()

    yield Witness("modelopt", M.MODELOPT_MXFP8, eight)
    yield Witness("modelopt", M.MODELOPT_MXFP4, four)
    yield Witness("modelopt", M.MODELOPT_0_47_NVFP4, two)


LIBRARIES: Mapping[str, Callable[[], Iterator[Witness]]] = {
    "torchao": _torchao,
    "transformer_engine": _transformer_engine,
    "microxcaling": _microxcaling,
    "deep_gemm": _deep_gemm,
    "modelopt": _modelopt,
}


# --- the comparison ---------------------------------------------------------------------------------------------------


@dataclass
class Differences:
    """Of all kinds of values."""

    values: int = 0
    codes: int = 0
    scales: int = 0
    outside: int = 0


def compared(witness: Witness, blocks: int) -> Differences:
    recipe, found = witness.recipe, Differences()
    for _, x in values(blocks):
        amax = float(x.abs().max())
        top, whole, g = torch.tensor([2688.0]), torch.tensor([amax]), None
        if recipe.scaling.global_scale:
            g = top / whole if recipe.encodes else whole / top
            if not bool(torch.isfinite(g) & (g > 0)):
                continue
        codes, scale = witness.run(x, amax)
        made = quantize(x, recipe, global_scale=g)
        ours = codes_of(made.codes, recipe.element)
        found.values += x.numel()
        if scale is None:
            due = decode(made.codes, recipe.element) * recipe.scaling.expand(made.scale, x.shape).double()
            found.codes += int((due != codes.double()).sum())
            continue
        live = recipe.scaling.expand(made.scale, x.shape) != 0
        found.codes += int(((ours != codes) & live).sum())
        found.scales += int((made.scale != scale.reshape(made.scale.shape)).sum())
        q = codes.view(recipe.element.tensor_dtype)
        found.outside += judge_recipe(prepare(x, global_scale=g), q, scale.reshape(made.scale.shape), recipe).outside
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help=", ".join(LIBRARIES))
    parser.add_argument("--blocks", type=int, default=32768, help="blocks of 32 of each kind, a multiple of 256")
    given, wrong = parser.parse_args(arguments), 0
    if given.blocks < 256 or given.blocks % 256:
        parser.error(f"--blocks={given.blocks}: matrices are 512 columns wide and a multiple of 16 rows high")
    print(f"{'library':20}{'recipe':40}{'values':>10}{'codes':>8}{'scales':>8}{'outside':>9}")
    for name in given.libraries or LIBRARIES:
        try:
            witnesses = list(LIBRARIES[name]())
        except (ImportError, NotImplementedError) as error:
            print(f"{name:20}{error}")
            continue
        for witness in witnesses:
            found = compared(witness, given.blocks)
            differ = found.codes + found.scales + found.outside
            wrong += bool(differ) and not witness.known
            said = f"  {witness.known if witness.known else 'DIFFERS'}" if differ else ""
            print(
                f"{name:20}{witness.recipe.name:40}{found.values:10}{found.codes:8}{found.scales:8}{found.outside:9}"
                f"{said}",
                flush=True,
            )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
