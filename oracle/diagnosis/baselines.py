"""Acceptance rules of other projects, to measure what they would have said. None of them decides anything here.

    DeepGEMM          1 - 2<x, y> / (<x, x> + <y, y>) < 1e-3            deep_gemm/testing, test_fp8
    FlashInfer        cosine(x, y) > 0.99                                tests/gemm/test_fp8_blockscale_gemm
    vLLM              mean |x - y| / mean |y| < 1e-3                     tests/kernels test_block_fp8
    torch             |x - y| <= atol + rtol |y| everywhere, defaults    torch.testing.assert_close
    flashinfer-bench  |x - y| <= 0.01 + 0.01 |y| for 95 % (low-bit)      its default evaluator
    hipBLASLt         |x - y|_F / |y|_F < 0.1, 0.01, 1e-5 by dtype       clients norm_check (rocBLAS' style)

Each is written as the passing condition, evaluated in float64 on the specified elements against the reference
``y`` it is given, in the output dtype: on the suite's data the correctly rounded result, which rejects fewer right
outputs than the project's own reference. On its own data (:func:`own_data`) the reference is the project's: the product
of the *unquantised* operands for DeepGEMM and FlashInfer, of the quantised ones for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.numbers.quantize import quantize
from oracle.numbers.recipes import DEEPGEMM_1X128, DEEPGEMM_128X128
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.numbers.scaling import grid
from oracle.routines import data
from oracle.truth.gemm import ScaledProduct, exact

Passes = Callable[[Tensor, Tensor, torch.dtype], bool]
OWN_CONTRACT = "fp8_gemm_nt"
"""The contract whose inputs the projects' tests make."""


@dataclass(frozen=True)
class Rule:
    """One project's rule; ``passes(actual, reference, dtype)`` with float64 tensors of the specified elements."""

    name: str
    source: str
    passes: Passes


@dataclass(frozen=True)
class OwnData:
    """Inputs of :data:`OWN_CONTRACT` as a project makes them, and the reference that it uses (float64 ``[M, N]``)."""

    inputs: Mapping[str, Tensor]
    reference: Tensor


def rules() -> tuple[Rule, ...]:
    """Every rule, in the order of the module's table."""
    return _RULES


def own_data(rule: Rule, *, m: int, n: int, k: int, seed: int) -> OwnData:
    """Data as the rule's project generates them (shapes are ours)."""
    return _OWN[rule.name](f"{rule.name}/m={m},n={n},k={k}/seed={seed}", m, n, k)


def calc_diff(x: Tensor, y: Tensor) -> float:
    """``1 - 2<x, y> / (<x, x> + <y, y>)`` in float64; 0 for two zero tensors, NaN with any NaN."""
    x, y = x.to(torch.float64), y.to(torch.float64)
    size = float((x * x + y * y).sum())
    return 0.0 if size == 0 else 1.0 - 2.0 * float((x * y).sum()) / size


def cosine(x: Tensor, y: Tensor) -> float:
    """``<x, y> / (|x| |y|)``; 1 for two zero tensors."""
    size = float(x.norm() * y.norm())
    return 1.0 if size == 0 and float((x - y).norm()) == 0 else float((x * y).sum()) / size if size else 0.0


def _vllm(x: Tensor, y: Tensor, dtype: torch.dtype) -> bool:
    size, error = float(y.abs().mean()), float((x - y).abs().mean())
    return error == 0 if size == 0 else error / size < 1e-3


_TORCH = {torch.bfloat16: (1.6e-2, 1e-5), torch.float16: (1e-3, 1e-5), torch.float32: (1.3e-6, 1e-5)}


def _torch(x: Tensor, y: Tensor, dtype: torch.dtype) -> bool:
    rtol, atol = _TORCH[dtype]
    return bool(((x - y).abs() <= atol + rtol * y.abs()).logical_or(x == y).all())


def _flashinfer_bench(x: Tensor, y: Tensor, dtype: torch.dtype) -> bool:
    close = (x - y).abs() <= 1e-2 + 1e-2 * y.abs()
    return bool(torch.isfinite(x).all()) and float(close.to(torch.float64).mean()) >= 0.95


_NORM = {torch.bfloat16: 0.1, torch.float16: 0.01, torch.float32: 1e-5}


def _hipblaslt(x: Tensor, y: Tensor, dtype: torch.dtype) -> bool:
    size, error = float(y.norm()), float((x - y).norm())
    return error == 0 if size == 0 else error / size < _NORM[dtype]


_RULES = (
    Rule("DeepGEMM calc_diff", "deep_gemm/testing: calc_diff < 1e-3", lambda x, y, dtype: calc_diff(x, y) < 1e-3),
    Rule("FlashInfer cosine", "tests/gemm: cosine similarity > 0.99", lambda x, y, dtype: cosine(x, y) > 0.99),
    Rule("vLLM mean relative", "tests/kernels test_block_fp8: relative mean difference < 1e-3", _vllm),
    Rule("torch assert_close", "torch.testing default tolerances of the output dtype", _torch),
    Rule("flashinfer-bench", "default evaluator: atol = rtol = 1e-2 for 95 % of the elements", _flashinfer_bench),
    Rule("hipBLASLt norm", "clients norm_check: relative Frobenius norm", _hipblaslt),
)


# --- their own data -----------------------------------------------------------------------------------------


def _quantised_normal(label: str, m: int, n: int, k: int) -> OwnData:
    """bfloat16 normal data, DeepGEMM's casts, the product of the unquantised operands."""
    x, w = (data.normal(f"{label}#{s}", (r, k), dtype=torch.bfloat16) for s, r in (("a", m), ("b", n)))
    a, b = quantize(x, DEEPGEMM_1X128), quantize(w, DEEPGEMM_128X128)
    inputs = {"a": a.codes, "a_scale": a.scale, "b": b.codes, "b_scale": b.scale}
    return OwnData(inputs, decode(x) @ decode(w).T)


def _uniform_codes(label: str, m: int, n: int, k: int) -> OwnData:
    """Uniform codes over the whole range, uniform scales below 1e-2, the product of the quantised operands."""
    inputs = {name: _uniform(f"{label}#{name}", (rows, k)) for name, rows in (("a", m), ("b", n))}
    of_a, of_b = grid((m, k), DEEPGEMM_1X128.block), grid((n, k), DEEPGEMM_128X128.block)
    for name, cell in (("a_scale", of_a), ("b_scale", of_b)):
        draws = data.Stream(f"{label}#{name}").integers(1, 1 << 20, cell.scale_shape)
        inputs[name] = torch.from_numpy(draws / (1 << 20) * 1e-2).to(torch.float32)
    return _of_quantised(inputs)


def _normal_codes(label: str, m: int, n: int, k: int) -> OwnData:
    return _of_quantised(dict(_quantised_normal(label, m, n, k).inputs))


def _of_quantised(inputs: dict[str, Tensor]) -> OwnData:
    product = ScaledProduct(inputs["a"], inputs["b"], inputs["a_scale"], inputs["b_scale"], block=128, b_rows=128)
    return OwnData(inputs, exact(product).hi)


def _uniform(label: str, shape: tuple[int, ...]) -> Tensor:
    values = torch.from_numpy(data.Stream(label).integers(-(1 << 20), 1 << 20, shape) / (1 << 20) * 448.0)
    return to_dtype(values, torch.float8_e4m3fn, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE)


_OWN: Mapping[str, Callable[[str, int, int, int], OwnData]] = MappingProxyType(
    {
        "DeepGEMM calc_diff": _quantised_normal,
        "FlashInfer cosine": _quantised_normal,
        "vLLM mean relative": _uniform_codes,
        "torch assert_close": _normal_codes,
        "flashinfer-bench": _normal_codes,
        "hipBLASLt norm": _normal_codes,
    }
)
