"""Acceptance rules of other projects, to measure what they would have said. None of them decides anything here.

    DeepGEMM          1 - 2<x, y> / (<x, x> + <y, y>) < 1e-3            deep_gemm/testing, test_fp8
    FlashInfer        cosine(x, y) > 0.99                                tests/gemm/test_fp8_blockscale_gemm
    vLLM              mean |x - y| / mean |y| < 1e-3                     tests/kernels test_block_fp8
    torch             |x - y| <= atol + rtol |y| everywhere, defaults    torch.testing.assert_close
    flashinfer-bench  |x - y| <= 0.01 + 0.01 |y| for 95 % (low-bit)      its default evaluator
    hipBLASLt         |x - y|_F / |y|_F < 0.1, 0.01, 1e-5 by dtype       clients norm_check (rocBLAS' style)

Each is a figure beside its limit, evaluated in float64 on the specified elements against the reference ``y`` it is
given, in the output dtype: on the suite's data the correctly rounded result, which rejects fewer right outputs than the
project's own reference. On its own data (:func:`own_data`) the reference is the project's: the product of the
*unquantised* operands for DeepGEMM and FlashInfer, of the quantised ones for the others. :func:`compare_close` asks all
of them about any two tensors.

NaN in either tensor fails every rule.
Source: the tests of the projects as named in the table.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from oracle.errors import DeviceError, DtypeError, InputError, OptionError, ShapeError
from oracle.numbers.formats import decode
from oracle.numbers.quantize import quantize
from oracle.numbers.recipes import DEEPGEMM_1X128, DEEPGEMM_128X128
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.numbers.scaling import grid
from oracle.routines import data
from oracle.routines.products.contract import Fp8GemmNt
from oracle.truth.gemm import ScaledProduct, exact
from oracle.verdict.notebook import card

Figure = Callable[[Tensor, Tensor, torch.dtype], float]
_CONDITIONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}  # all false of a NaN
OWN_CONTRACT = Fp8GemmNt.name
"""The contract whose inputs the projects' tests make."""


@dataclass(frozen=True)
class Rule:
    """One project's rule: ``figure(actual, reference, dtype)``, of float64 tensors of the specified elements, is
    ``condition`` (``"<"``, ``"<="``, ``">"``, ``">="``) its ``limit``, one number or one for each output dtype."""

    name: str
    source: str
    figure: Figure
    condition: str
    limit: float | Mapping[torch.dtype, float]

    def said(self, actual: Tensor, reference: Tensor, dtype: torch.dtype) -> Said:
        """What the rule says of ``actual`` beside ``reference``, float64 of any one shape."""
        limit = self.limit if isinstance(self.limit, float) else self.limit[dtype]
        figure = self.figure(actual, reference, dtype)
        return Said(self.name, figure, self.condition, limit, _CONDITIONS[self.condition](figure, limit))

    def passes(self, actual: Tensor, reference: Tensor, dtype: torch.dtype) -> bool:
        """Whether the rule accepts ``actual`` beside ``reference``, float64 of any one shape; no NaN is accepted."""
        return self.said(actual, reference, dtype).passed


@dataclass(frozen=True)
class Said:
    """One row of :class:`Closeness`: ``passed`` where ``figure condition limit`` holds, which it does of no NaN."""

    name: str
    figure: float
    condition: str
    limit: float
    passed: bool

    def __str__(self) -> str:
        text = "passed: {}" if self.passed else "failed: {}, not"
        return f"{self.name:<18} {text.format(f'{self.figure:.4g}')} {self.condition} {self.limit:g}"


@dataclass(frozen=True)
class Closeness:
    """What the usual checks say of two tensors, a row for each; true when all of them pass. It is no verdict."""

    rows: tuple[Said, ...]

    def __bool__(self) -> bool:
        return all(row.passed for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        rows = [(row.name, str(row).removeprefix(row.name).strip()) for row in self.rows]
        return card(f"{sum(row.passed for row in self.rows)} of {len(rows)} pass", "this is no verdict", rows)


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


def compare_close(
    actual: Tensor, expected: Tensor, *, rtol: float | None = None, atol: float | None = None
) -> Closeness:
    """What the acceptance rules of other projects say of ``actual`` beside ``expected``; a verdict is :func:`judge`'s.

    Parameters
    ----------
    actual : bfloat16, float16 or float32, any shape, at least one element; tolerances are those of its dtype.
    expected : the same shape and device; any of these dtypes, or float64.
    rtol, atol : of torch's rule, both or neither; None takes the defaults of ``torch.testing.assert_close``.

    Returns
    -------
    Closeness
        ``rows`` (``name``, ``figure``, ``condition``, ``limit``, ``passed``), computed in float64: DeepGEMM's
        ``calc_diff``, the cosine similarity, vLLM's relative mean, the largest ``|x - y| / (atol + rtol |y|)`` of
        torch, flashinfer-bench's share of close elements, hipBLASLt's norm. A NaN in either fails every rule; equal
        infinities are close to torch alone. Two tensors of zeros pass.

    Raises
    ------
    InputError, DtypeError, ShapeError, DeviceError, OptionError
        What is given cannot be compared so.
    """
    for name, x in (("actual", actual), ("expected", expected)):
        if not isinstance(x, Tensor):
            raise InputError(f"{name} is a {type(x).__name__}; pass a tensor")
        known = tuple(_TORCH) if x is actual else (*_TORCH, torch.float64)
        if x.dtype not in known:
            words = ", ".join(str(dtype).removeprefix("torch.") for dtype in known)
            raise DtypeError(f"{name} is {x.dtype}; these rules compare {words}: decode codes, then .to(torch.float32)")
    if actual.shape != expected.shape or not actual.numel():
        shapes = f"actual has shape {list(actual.shape)}, expected {list(expected.shape)}"
        raise ShapeError(f"{shapes}; pass equal shapes with at least one element")
    if actual.device != expected.device:
        raise DeviceError(f"actual is on {actual.device}, expected on {expected.device}; move one with .to(device)")
    asked = _RULES if rtol is None and atol is None else _with_tolerances(rtol, atol)
    x, y = (t.detach().to(torch.float64) for t in (actual, expected))
    return Closeness(tuple(rule.said(x, y, actual.dtype) for rule in asked))


def _with_tolerances(rtol: float | None, atol: float | None) -> tuple[Rule, ...]:
    """The rules, torch's with these tolerances."""
    if rtol is None or atol is None:
        raise OptionError(f"rtol is {rtol}, atol {atol}; torch takes both or neither")
    if not all(isinstance(x, (int, float)) and 0 <= x < math.inf for x in (rtol, atol)):
        raise OptionError(f"rtol is {rtol!r}, atol {atol!r}; both must be numbers, finite and not negative")
    supplied = rtol, atol
    return tuple(
        replace(rule, figure=lambda x, y, dtype: _beyond(x, y, *supplied)) if rule.figure is _torch else rule
        for rule in _RULES
    )


def calc_diff(x: Tensor, y: Tensor) -> float:
    """``1 - 2<x, y> / (<x, x> + <y, y>)`` of two tensors of any one shape, in float64; 0 for two zero tensors, NaN with
    any NaN."""
    x, y = x.to(torch.float64), y.to(torch.float64)
    size = float((x * x + y * y).sum())
    return 0.0 if size == 0 else 1.0 - 2.0 * float((x * y).sum()) / size


def cosine(x: Tensor, y: Tensor) -> float:
    """``<x, y> / (|x| |y|)`` of two float64 tensors of any one shape; 1 for two zero tensors, NaN with any NaN."""
    size = float(x.norm() * y.norm())
    return 1.0 if size == 0 and float((x - y).norm()) == 0 else float((x * y).sum()) / size if size else 0.0


def _relative(error: float, size: float) -> float:
    """``error / size``; 0 for two zeros, infinity for an error beside zero."""
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return error / size


def _vllm(x: Tensor, y: Tensor, dtype: torch.dtype) -> float:
    return _relative(float((x - y).abs().mean()), float(y.abs().mean()))


_TORCH = {torch.bfloat16: (1.6e-2, 1e-5), torch.float16: (1e-3, 1e-5), torch.float32: (1.3e-6, 1e-5)}


def _torch(x: Tensor, y: Tensor, dtype: torch.dtype) -> float:
    return _beyond(x, y, *_TORCH[dtype])


def _beyond(x: Tensor, y: Tensor, rtol: float, atol: float) -> float:
    """The largest ``|x - y| / (atol + rtol |y|)``, where equal elements are 0; an infinite ``y`` is close to itself
    only. A quotient of float64 is at most 1 exactly when its dividend is at most its divisor."""
    ratio = torch.where(torch.isinf(y), torch.inf, (x - y).abs() / (atol + rtol * y.abs()))
    ratio = torch.where(torch.isnan(x), torch.nan, ratio)
    return float(torch.where(x == y, 0.0, ratio).max())


def _flashinfer_bench(x: Tensor, y: Tensor, dtype: torch.dtype) -> float:
    """The share of close elements; 0 where one of ``x`` is not finite."""
    close = (x - y).abs() <= 1e-2 + 1e-2 * y.abs()
    return float(close.to(torch.float64).mean()) if bool(torch.isfinite(x).all()) else 0.0


_NORM = {torch.bfloat16: 0.1, torch.float16: 0.01, torch.float32: 1e-5}


def _hipblaslt(x: Tensor, y: Tensor, dtype: torch.dtype) -> float:
    return _relative(float((x - y).norm()), float(y.norm()))


_RULES = (
    Rule("DeepGEMM calc_diff", "deep_gemm/testing: calc_diff < 1e-3", lambda x, y, dtype: calc_diff(x, y), "<", 1e-3),
    Rule("FlashInfer cosine", "tests/gemm: cosine similarity > 0.99", lambda x, y, dtype: cosine(x, y), ">", 0.99),
    Rule("vLLM mean relative", "tests/kernels test_block_fp8: relative mean difference < 1e-3", _vllm, "<", 1e-3),
    Rule("torch assert_close", "torch.testing default tolerances of the output dtype", _torch, "<=", 1.0),
    Rule("flashinfer-bench", "default evaluator: close for 95 % of the elements", _flashinfer_bench, ">=", 0.95),
    Rule("hipBLASLt norm", "clients norm_check: relative Frobenius norm", _hipblaslt, "<", _NORM),
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
