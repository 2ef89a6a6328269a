"""Blocks for every bfloat16 amax, and the published formulas of NVFP4 in numpy, which share no code with the oracle."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oracle.numbers import recipes as R
from oracle.numbers.formats import E2M1, E2M3, E3M2, E4M3FN, E5M2, MXINT8, Format, decode

Reals = NDArray[np.float32]
CASTS = {
    E4M3FN: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E3M2: ml_dtypes.float6_e3m2fn,
    E2M3: ml_dtypes.float6_e2m3fn,
    E2M1: ml_dtypes.float4_e2m1fn,
}


def cast(values: Reals, fmt: Format) -> NDArray[np.uint8]:
    """Codes of clamped float32 values, by another library."""
    values = np.clip(values, -np.float32(fmt.max_finite), np.float32(fmt.max_finite))
    if fmt is MXINT8:
        return np.rint(values * 64).astype(np.int8).view(np.uint8)
    return values.astype(CASTS[fmt]).view(np.uint8)


def cast_by(values: Reals, recipe: R.Recipe) -> NDArray[np.uint8]:
    """Codes of float32 values as a recipe rounds them: to whole quanta first, where it is not to the nearest even."""
    fmt, wide, way = recipe.element, np.nan_to_num(values.astype(np.float64)), R.CodeRounding
    if recipe.rounding is not way.NEAREST_EVEN:
        exponent = 0 if fmt is MXINT8 else np.maximum(np.frexp(wide)[1] - 1, fmt.emin)
        quantum = np.ldexp(1.0, exponent - (6 if fmt is MXINT8 else fmt.fraction_bits))
        whole = {
            way.NEAREST_AWAY: lambda m: np.floor(m + 0.5),
            way.NEAREST_ZERO: lambda m: np.ceil(m - 0.5),
            way.TRUNCATED: np.floor,
        }[recipe.rounding](np.abs(wide) / quantum)
        wide = np.copysign(whole * quantum, wide)
    codes = cast(wide.astype(np.float32), fmt)
    if fmt is not MXINT8 and recipe.zero_sign is not R.ZeroSign.KEPT:
        codes = np.where(values == 0, np.uint8(fmt.sign_mask if recipe.zero_sign is R.ZeroSign.ZEROS else 0), codes)
    return codes


def every_amax(fmt: Format, width: int, *, seed: int = 1) -> Tensor:
    """Blocks ``[32640, width]``, the amax of each another finite bfloat16, beside midpoints of the element format."""
    top = torch.arange(0x7F80).to(torch.int16).view(torch.bfloat16)[:, None]
    codes = torch.arange(fmt.max_code)
    values = decode(torch.arange(fmt.max_code + 1), fmt)
    middle = torch.cat([(values[codes] + values[codes + 1]) / 2, values])
    rng = torch.Generator().manual_seed(seed)
    picked = middle[torch.randint(0, len(middle), (len(top), width - 1), generator=rng)]
    down = torch.randint(0, 3, (len(top), 1), generator=rng)
    unit = torch.exp2(torch.floor(torch.log2(top.double().clamp(min=2.0**-133))) - fmt.emax - down)
    sign = torch.randint(0, 2, picked.shape, generator=rng) * 2 - 1
    rest = torch.minimum(picked * unit, top.double()) * sign
    return torch.cat([top, rest.to(torch.bfloat16)], dim=1)


def nvfp4_witness(x: Reals, recipe: R.Recipe, g: np.float32) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Scale bytes and codes by the published formulas, each a line of float32 operations."""
    with np.errstate(all="ignore"):
        one, six, sixth = np.float32(1), np.float32(6), np.float32(1) / np.float32(6)
        am = np.abs(x).max(axis=1)
        if recipe.candidates is not None:
            return four_over_six(x, recipe, g)
        family = recipe.name.split("_")[0]
        if family == "te" or recipe.name.endswith("exact"):
            t = am * (g * sixth)
        elif family == "torchao":
            t = np.maximum(am / six / g, np.float32(2.0**-6))
        elif recipe.global_order is R.GlobalOrder.TOP and family != "modelopt":
            t = am / (six * g)
        elif family == "modelopt":
            t = am / (six * g)
            t = np.maximum(np.where(t == 0, one, t), np.float32(recipe.published_floor))
        else:
            t = g * (am * sixth) if recipe.encodes else am * sixth / g
        stored = np.minimum(t, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        sf = stored.astype(np.float32)[:, None]
        if family == "torchao":
            quotient = x * ((one / g) / sf)
        elif family == "modelopt":
            quotient = x / (sf * g)
        else:
            quotient = x * np.minimum(one / (sf * (one / g if recipe.encodes else g)), np.finfo(np.float32).max)
        return stored.view(np.uint8), signed(cast(np.nan_to_num(quotient, nan=6.0).astype(np.float32), E2M1), x, recipe)


def signed(codes: NDArray[np.uint8], x: Reals, recipe: R.Recipe) -> NDArray[np.uint8]:
    """Codes without the sign of -0, where a recipe has none: of zeros alone, or of all that rounds to zero."""
    if recipe.zero_sign is R.ZeroSign.SMALL:
        return np.where(x == 0, np.uint8(0), codes)
    return np.where(codes & 7 == 0, np.uint8(0), codes) if recipe.zero_sign is R.ZeroSign.DROPPED else codes


def errors_of_libraries(
    x: Reals, amax: np.float32, top: float, measure: str, domain: str, measured: float | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Four over six as TransformerEngine's and FlashInfer's kernels measure the errors, ``e4m3_max`` being ``top``.

    ``input``: ``q sf amax / (6 top)`` against x; ``scaled``: ``q sf`` in float16 against x times the global scale;
    ``halves``: the former, summed as 8 and 8. ``measured``: another maximum for the denominator of the error.
    """
    one, denominator = np.float32(1), np.float32(6 * (measured or top))
    g, am, made = np.float32(6 * top) / amax, np.abs(x).max(axis=1), []
    for factor in (np.float32(1), np.float32(1.5)):
        stored = np.minimum(am / np.float32(6) * g * factor, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        sf = stored.astype(np.float32)[:, None]
        with np.errstate(all="ignore"):
            quotient = x * np.minimum(one / (sf * (one / g)), np.finfo(np.float32).max)
        codes = cast(np.nan_to_num(quotient, nan=6.0).astype(np.float32), E2M1)
        q = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        difference = (q * sf).astype(np.float16).astype(np.float32) - x * g
        if domain != "scaled":
            difference = q * sf * amax / denominator - x
        terms = difference * difference if measure == "mse" else np.abs(difference)
        if domain == "halves":
            terms = terms.reshape(-1, 2, 8)
        error = np.add.accumulate(terms, axis=-1, dtype=np.float32)[..., -1]
        made.append((stored.view(np.uint8), codes, error[:, 0] + error[:, 1] if domain == "halves" else error))
    wide = made[1][2] < made[0][2]
    return np.where(wide, made[1][0], made[0][0]), np.where(wide[:, None], made[1][1], made[0][1])


def four_over_six(x: Reals, recipe: R.Recipe, g: np.float32) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The smaller error of a block under ``sf`` and ``1.5 sf``, summed in the order of K; ``sf`` on equality."""
    one, am, made = np.float32(1), np.abs(x).max(axis=1), []
    fast = recipe.name.endswith("fast")
    t = g * (am * (one / np.float32(6))) if fast else am / np.float32(6) * g
    for factor in (np.float32(1), np.float32(1.5)):
        stored = np.minimum(t * factor, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        both = (stored.astype(np.float32) * (one / g))[:, None]
        quotient = x * np.minimum(one / both, np.finfo(np.float32).max)
        codes = cast(np.nan_to_num(quotient, nan=6.0).astype(np.float32), E2M1)
        difference = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * both - x
        terms = difference * difference if "mse" in recipe.name else np.abs(difference)
        error = np.add.accumulate(terms, axis=1, dtype=np.float32)[:, -1]
        made.append((stored.view(np.uint8), signed(codes, x, recipe), error))
    wide = made[1][2] < made[0][2]
    return np.where(wide, made[1][0], made[0][0]), np.where(wide[:, None], made[1][1], made[0][1])
