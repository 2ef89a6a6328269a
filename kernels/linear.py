"""Scaled FP8 matrix products: per tensor, per token, per channel and block scales, and the engine's linear layer.

``y = scale_a * scale_b * (a @ b) + bias``; ``a [M, K]`` and ``b [K, N]`` E4M3, ``b`` a column-major view
(``weight.t()`` of a contiguous ``[N, K]``), as torch and CUTLASS require.

Not covered: zero points, FNUZ operands, fast accumulation.

NaN in a code, a scale or the bias makes every element that it reaches NaN; an infinite scale gives infinity
or NaN.
Source: vLLM (w8a8_utils, csrc/quantization/cutlass_w8a8), torch (``_scaled_mm``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import checks, operators
from . import platform as machines
from .adapters import Inputs, Options, by_name, out_dtype_of
from .checks import FP8
from .context import Memo
from .errors import DeviceError, DtypeError, OptionError, ShapeError
from .quantize import scaled_fp8_quant
from .routes import dtype_name, route
from .support import BLOCK
from .verbs import exported, serve, verb

OUTPUT_PADDING = 17
"""Least number of rows passed to ``torch._scaled_mm``, which is faster with more than 16."""
_identity: Memo[torch.device, Tensor] = Memo()


# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


_TO_BF16 = by_name(defaults={"out_dtype": torch.bfloat16})


def _of_stored(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """``b`` is stored ``[N, K]``; a block scale is stored ``[N/128, K/128]``, recognised by both shapes."""
    a_scale, b_scale = inputs["a_scale"], inputs["b_scale"]
    n, k = inputs["b"].shape
    nb, kb = -(-n // 128), -(-k // 128)
    stored = tuple(b_scale.shape) == (nb, kb)
    block = stored and (a_scale.dim() == 2 and a_scale.shape[1] == kb > 1 or (kb == 1 and nb not in (1, n)))
    scale = b_scale.t() if block else b_scale
    return verb(inputs["a"], inputs["b"].t(), a_scale, scale, out_dtype_of(options), inputs.get("bias"))


def _asked_dtype(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    return verb(**inputs, out_dtype=out_dtype_of(options))


# --- the verbs -----------------------------------------------------------------------------------------------------


@verb("layout", adapter=lambda verb, inputs, options: verb(inputs["x"].device))
def maybe_create_device_identity(device: torch.device | str = "cpu") -> Tensor:
    """The float32 ``[1]`` one on ``device`` that unit-scale products pass as a scale; cached for each device.

    Not cached where later calls could not use it: under a fake mode it has no value, and inside a graph capture it has
    one only when the graph is replayed.

    Raises DeviceError.
    """
    try:
        key = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"{device!r:.80} is no device ({error!s:.200}); pass one as cpu or cuda:0") from None
    if key.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"{key}: torch sees no such device here")
    if (cached := _identity.get(key)) is not None:
        return cached
    with torch.inference_mode(False):
        one = torch.ones(1, dtype=torch.float32, device=key)
    if type(one) is Tensor and not checks.capturing(key):
        _identity.keep(key, one)
    return one


@verb("linear", adapter=_of_stored, fake=operators.matrix)
def cutlass_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``scale_a * (scale_b * (a @ b)) + bias``, the bias added in float32 before the output cast.

    Parameters
    ----------
    a
        ``[M, K]`` E4M3.
    b
        ``[K, N]`` E4M3, a column-major view.
    scale_a
        float32: one value, ``[M, 1]``, or blocks ``[M, ceil(K/128)]`` in any strides.
    scale_b
        float32: one value, ``[1, N]``, ``[N, 1]`` or ``[N]``, or with block scales ``[ceil(K/128), ceil(N/128)]`` (the
        transpose of the stored ``[N/128, K/128]``).
    bias
        ``[N]`` of a wide float dtype.

    Returns
    -------
    Tensor
        ``[M, N]`` of ``out_dtype`` (bf16, f16 or f32).

    Raises
    ------
    ShapeError, DtypeError, DeviceError, OptionError, InputError
        An operand does not fit the contract.
    NoBackendError
        No library serves the problem on this machine.
    """
    m, n, k = _operands("a", a, "b", b)
    kind_a, kind_b = scale_kinds(scale_a, scale_b, m, n, k)
    _bias(bias, n)
    device = checks.same_device(a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias)
    checks.out_dtype(out_dtype)
    if is_compiling():
        out: Tensor = torch.ops.fp8_kernels.cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype, bias)
        return out
    run = route(
        "block_linear" if kind_a == "block" else "linear",
        device,
        ("n", n),
        ("k", k),
        ("a_scale", kind_a),
        ("b_scale", kind_b),
        ("out_dtype", dtype_name(out_dtype)),
        ("bias", None if bias is None else dtype_name(bias.dtype)),
    )
    if m == 0:
        return torch.empty(0, n, dtype=out_dtype, device=device)
    if kind_a == "block":
        return run.block_linear(a, b, scale_a, scale_b, bias, out_dtype)
    return run.linear(a, b, scale_a.reshape(-1, 1), scale_b.reshape(1, -1), bias, out_dtype)


@verb("linear", adapter=_asked_dtype)
def cutlass_w8a8_scaled_mm(
    *,
    qinput: Tensor,
    weight: Tensor,
    out_dtype: torch.dtype,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    output_shape: Sequence[int] | None = None,
) -> Tensor:
    """:func:`cutlass_scaled_mm` viewed as ``output_shape [..., N]`` (default ``[M, N]``), padded rows dropped.

    ``qinput`` ``[M, K]`` and ``weight`` ``[K, N]`` are its ``a`` and ``b``; ``scale_a``, ``scale_b``, ``bias`` and
    dtypes as of :func:`cutlass_scaled_mm`. Returns ``[..., N]`` of ``out_dtype``.

    Raises DeviceError, InputError.
    """
    m, n, _ = _operands("qinput", qinput, "weight", weight)
    target = _rows(output_shape, m, n)
    if qinput.device != weight.device:
        checks.same_device(qinput=qinput, weight=weight)
    y = cutlass_scaled_mm(qinput, weight, scale_a, scale_b, out_dtype, bias)
    return y.narrow(0, 0, math.prod(target[:-1])).view(target)


@verb("torch_linear", adapter=_TO_BF16)
def torch_per_tensor_w8a8_scaled_mm(
    *,
    qinput: Tensor,
    weight: Tensor,
    out_dtype: torch.dtype,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    output_shape: Sequence[int] | None = None,
) -> Tensor:
    """``torch._scaled_mm`` with one scale for each operand; padded rows of ``qinput`` are dropped.

    ``scale_a`` and ``scale_b`` have any shape of one value, ``bias`` ``[N]`` is bf16, f16 or f32. Returns ``[..., N]``
    of ``out_dtype``.

    Parameters
    ----------
    qinput, weight
        ``[M, K]`` and ``[K, N]`` E4M3 (``weight`` a column-major view).
    scale_a, scale_b
        One float32 value each.
    output_shape
        ``[..., N]``: its leading extents multiply to the real row count, at most M. Default ``[M, N]``.
    """
    return _torch_linear("tensorwise", qinput, weight, scale_a, scale_b, bias, out_dtype, output_shape)


@verb("torch_linear", adapter=_TO_BF16)
def rocm_per_tensor_w8a8_scaled_mm(
    *,
    qinput: Tensor,
    weight: Tensor,
    out_dtype: torch.dtype,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    output_shape: Sequence[int] | None = None,
) -> Tensor:
    """The ROCm case of :func:`dispatch_w8a8_scaled_mm`: hipBLASLt through ``torch._scaled_mm``, per tensor.

    Operands and result as of :func:`torch_per_tensor_w8a8_scaled_mm`.
    """
    return torch_per_tensor_w8a8_scaled_mm(
        qinput=qinput,
        weight=weight,
        out_dtype=out_dtype,
        scale_a=scale_a,
        scale_b=scale_b,
        bias=bias,
        output_shape=output_shape,
    )


@verb("torch_linear", adapter=_TO_BF16)
def torch_per_token_w8a8_scaled_mm(
    *,
    qinput: Tensor,
    weight: Tensor,
    out_dtype: torch.dtype,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    output_shape: Sequence[int] | None = None,
) -> Tensor:
    """``torch._scaled_mm`` row-wise: ``scale_a [M, 1]`` and ``scale_b`` ``[N, 1]`` (as stored) or ``[1, N]``.

    The other operands, and the result, as of :func:`torch_per_tensor_w8a8_scaled_mm`.
    """
    return _torch_linear("rowwise", qinput, weight, scale_a, scale_b, bias, out_dtype, output_shape)


@verb("torch_linear", adapter=_TO_BF16)
def torch_channelwise_w8a8_scaled_mm(
    *,
    qinput: Tensor,
    weight: Tensor,
    out_dtype: torch.dtype,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    output_shape: Sequence[int] | None = None,
) -> Tensor:
    """Unfused: unit-scale product to float32, then ``* scale_a * scale_b.T + bias`` in float32, then the cast.

    ``scale_a`` ``[M, 1]`` and ``scale_b`` ``[N, 1]`` or ``[1, N]`` float32; the other operands, and the result, as of
    :func:`torch_per_tensor_w8a8_scaled_mm`. Returns ``[..., N]`` of ``out_dtype``.

    ``scale_a`` one value or ``[M, 1]``; ``scale_b`` one value, ``[N, 1]`` (as stored) or ``[1, N]``.
    """
    return _torch_linear("unfused", qinput, weight, scale_a, scale_b, bias, out_dtype, output_shape)


TORCH_ROUTINES: dict[str, Callable[..., Tensor]] = {
    "tensorwise": torch_per_tensor_w8a8_scaled_mm,
    "rowwise": torch_per_token_w8a8_scaled_mm,
    "unfused": torch_channelwise_w8a8_scaled_mm,
}
"""The torch routines by kernel."""


@verb()
def dispatch_w8a8_scaled_mm(
    cutlass_fp8_supported: bool,
    per_tensor_weights: bool,
    per_tensor_activations: bool,
    use_per_token_if_dynamic: bool | None,
    machine: machines.Machine | None = None,
) -> Callable[..., Tensor]:
    """The routine for a linear layer.

    CUTLASS where it is supported; else per tensor when both scales are (the ROCm routine on an AMD machine); else
    row-wise when neither is and the machine supports it (ROCm, torch >= 2.7, capability >= 9.4); else channel-wise.
    """
    machine = machine or machines.current_machine()
    if cutlass_fp8_supported:
        return cutlass_w8a8_scaled_mm
    if per_tensor_weights and per_tensor_activations:
        return rocm_per_tensor_w8a8_scaled_mm if machine.vendor == "amd" else torch_per_tensor_w8a8_scaled_mm
    neither = not per_tensor_weights and not per_tensor_activations
    if use_per_token_if_dynamic and neither and machines.use_rowwise_torch_scaled_mm(machine):
        return torch_per_token_w8a8_scaled_mm
    return torch_channelwise_w8a8_scaled_mm


@exported
class Fp8LinearOp:
    """The linear layer of an engine: quantise the input, multiply, restore the leading axes.

    Parameters
    ----------
    cutlass_supported
        Use the CUTLASS routine; default: whether this machine supports it and the operators are installed.
    use_per_token_if_dynamic
        Quantise a dynamic input per token.
    pad_output
        Pad to at least 17 rows for ``torch._scaled_mm``; default: on the torch path. Never while compiling (dynamic
        shapes).
    """

    @checks.checked
    def __init__(
        self,
        *,
        cutlass_supported: bool | None = None,
        use_per_token_if_dynamic: bool = False,
        pad_output: bool | None = None,
    ) -> None:
        self.machine = machine = machines.current_machine()
        if cutlass_supported is None:
            usable = machine.package("vllm_ops").why_not is None
            cutlass_supported = machines.cutlass_fp8_supported(machine) and usable
        self.cutlass_supported = cutlass_supported
        self.use_per_token_if_dynamic = use_per_token_if_dynamic
        pad = not cutlass_supported if pad_output is None else pad_output
        self.output_padding: int | None = OUTPUT_PADDING if pad else None

    @checks.checked(name="Fp8LinearOp")
    def apply(
        self,
        input: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        out_dtype: torch.dtype | None = None,
        input_scale: Tensor | None = None,
        input_scale_ub: Tensor | None = None,
        bias: Tensor | None = None,
        use_per_token_if_dynamic: bool | None = None,
    ) -> Tensor:
        """``[..., K] @ [K, N] -> [..., N]``.

        ``input`` ``[..., K]``; ``input_scale`` and ``input_scale_ub`` float32 of any shape with one value; ``bias``
        ``[N]`` bf16, f16 or f32. Returns ``[..., N]`` of ``out_dtype``.

        Parameters
        ----------
        input
            bf16, f16 or f32, or already E4M3 (torch path only; then ``input_scale`` and ``out_dtype`` are needed).
        weight
            ``[K, N]`` E4M3, a column-major view.
        weight_scale
            One value, or per channel ``[N, 1]`` / ``[1, N]``.
        out_dtype
            Default: the dtype of the input.

        Raises
        ------
        DtypeError, InputError, LayoutError, OptionError, ShapeError
        """
        per_token = self.use_per_token_if_dynamic if use_per_token_if_dynamic is None else use_per_token_if_dynamic
        if checks.tensor("input", input).dim() < 1:
            raise ShapeError("input must be [..., K], got a scalar")
        checks.nonempty("weight", checks.rank("weight", weight, 2), 0, 1)
        checks.nonempty("input", input, -1)
        flat = input.reshape(-1, input.shape[-1])
        shape = [*input.shape[:-1], weight.shape[1]]
        if input.dtype == FP8:
            if self.cutlass_supported:
                raise DtypeError("an E4M3 input is accepted on the torch path only; pass the unquantised input")
            if input_scale is None or out_dtype is None:
                raise OptionError("an E4M3 input needs input_scale and out_dtype")
            quantised, scale = flat, input_scale
        else:
            padding = None if is_compiling() else self.output_padding
            bound = input_scale_ub if input_scale is None and per_token else None
            quantised, scale = scaled_fp8_quant(
                flat, input_scale, num_token_padding=padding, scale_ub=bound, use_per_token_if_dynamic=per_token
            )
        routine = dispatch_w8a8_scaled_mm(
            self.cutlass_supported, weight_scale.numel() == 1, scale.numel() == 1, per_token, self.machine
        )
        return routine(
            qinput=quantised,
            weight=weight,
            out_dtype=out_dtype or input.dtype,
            scale_a=scale,
            scale_b=weight_scale,
            bias=bias,
            output_shape=shape,
        )


def scale_kinds(scale_a: object, scale_b: object, m: int, n: int, k: int) -> tuple[str, str]:
    """The kinds of both scales (tensor, token or channel, block), from both shapes: one alone can be ambiguous.

    Raises
    ------
    ShapeError
        A scale has no admitted shape, or only one of them is per block.
    """
    a = checks.dtype("scale_a", checks.tensor("scale_a", scale_a), torch.float32)
    b = checks.dtype("scale_b", checks.tensor("scale_b", scale_b), torch.float32)
    kb, nb = -(-k // BLOCK), -(-n // BLOCK)
    blocks = kb > 1 and tuple(a.shape) == (m, kb)
    if blocks or (kb == 1 and tuple(a.shape) == (m, 1) and tuple(b.shape) == (1, nb) and nb not in (1, n)):
        if tuple(b.shape) != (kb, nb):
            raise ShapeError(
                f"scale_a {list(a.shape)} is per block, so scale_b must be [ceil(K/128), ceil(N/128)] = [{kb}, {nb}]; "
                f"got {list(b.shape)} (transpose a stored [N/128, K/128])"
            )
        return "block", "block"
    if a.numel() != 1 and tuple(a.shape) != (m, 1):
        raise ShapeError(
            f"scale_a must hold one value or be [{m}, 1] or [{m}, {kb}] (M, ceil(K/128)); got {list(a.shape)}"
        )
    if b.numel() != 1 and tuple(b.shape) not in ((1, n), (n, 1), (n,)):
        raise ShapeError(
            f"scale_b must hold one value or be [1, {n}] (N), as scale_a is not per block; got {list(b.shape)}"
        )
    return ("tensor" if a.numel() == 1 else "token"), ("tensor" if b.numel() == 1 else "channel")


def _operands(name_a: str, a: object, name_b: str, b: object) -> tuple[int, int, int]:
    left = checks.dtype(name_a, checks.rank(name_a, a, 2), FP8)
    right = checks.dtype(name_b, checks.rank(name_b, b, 2), FP8)
    (m, k), (k_b, n) = left.shape, right.shape
    if k != k_b:
        raise ShapeError(f"{name_a} {list(left.shape)} and {name_b} {list(right.shape)} disagree in K")
    if k == 0 or n == 0:
        checks.nonempty(name_b, right, 0, 1)
    checks.column_major(name_b, right)
    return m, n, k


def _counts(name: str, scale: object, *counts: int) -> None:
    t = checks.dtype(name, checks.tensor(name, scale), torch.float32)
    if t.numel() not in counts or t.dim() > 2 or (t.dim() == 2 and t.numel() not in t.shape):
        wanted = " or ".join(str(c) for c in counts)
        raise ShapeError(f"{name} must hold {wanted} values in one row or column, got {list(t.shape)}")


def _bias(bias: object, n: int) -> None:
    if bias is not None:
        checks.shape("bias", checks.dtype("bias", checks.rank("bias", bias, 1), *checks.WIDE), (n,), "[N]")


def _rows(output_shape: Sequence[int] | None, m: int, n: int) -> list[int]:
    if output_shape is None:
        return [m, n]
    target = checks.integers("output_shape", output_shape)
    if not target or target[-1] != n or math.prod(target[:-1]) > m or any(v < 0 for v in target):
        raise ShapeError(f"output_shape {target} must end in N={n} with at most M={m} rows before it")
    return target


def _torch_linear(
    mode: str,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    output_shape: Sequence[int] | None,
) -> Tensor:
    m, n, k = _operands("qinput", a, "weight", b)
    rows, columns = {"tensorwise": ((1,), (1,)), "rowwise": ((m,), (n,)), "unfused": ((1, m), (1, n))}[mode]
    _counts("scale_a", scale_a, *rows)
    _counts("scale_b", scale_b, *columns)
    target = _rows(output_shape, m, n)
    if mode != "tensorwise":
        scale_a, scale_b = scale_a.reshape(-1, 1), scale_b.reshape(1, -1)
    checks.out_dtype(out_dtype)
    _bias(bias, n)
    device = checks.same_device(qinput=a, weight=b, scale_a=scale_a, scale_b=scale_b, bias=bias)
    real_rows = math.prod(target[:-1])
    if is_compiling():
        y: Tensor = torch.ops.fp8_kernels.torch_scaled_mm(a, b, scale_a, scale_b, bias, out_dtype, mode)
        return y.narrow(0, 0, real_rows).view(target)
    run = route(
        "torch_linear",
        device,
        ("n", n),
        ("k", k),
        ("kernel", mode),
        *((("a_scale", "token"), ("b_scale", "channel")) if mode == "rowwise" else ()),
        ("out_dtype", dtype_name(out_dtype)),
        ("bias", None if bias is None or mode == "unfused" else dtype_name(bias.dtype)),
    )
    if m == 0:
        return torch.empty(target, dtype=out_dtype, device=device)
    if mode == "unfused":
        one = maybe_create_device_identity(device)
        y = run.unfused(a, b, scale_a, scale_b, bias, out_dtype, one)
    else:
        y = run.scaled_mm(a, b, scale_a.contiguous(), scale_b.contiguous(), bias, out_dtype)
    return y.narrow(0, 0, real_rows).view(target)


def _torch_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, mode: str
) -> Tensor:
    """The operator under torch's three verbs; ``mode`` says which."""
    return TORCH_ROUTINES[mode](qinput=a, weight=b, out_dtype=out_dtype, scale_a=scale_a, scale_b=scale_b, bias=bias)


def _layer(layer: Callable[..., Fp8LinearOp], inputs: Inputs, options: Options) -> Tensor:
    """The layer of an engine, made for one call."""
    module = layer(
        cutlass_supported=bool(options.get("cutlass_fp8_supported", False)),
        use_per_token_if_dynamic=bool(options.get("use_per_token_if_dynamic", False)),
    )
    arguments: dict[str, Any] = {**inputs, "out_dtype": options.get("out_dtype")}
    return module.apply(**arguments)


operators.register("torch_scaled_mm", _torch_scaled_mm, operators.matrix)
serve("Fp8LinearOp", "linear", Fp8LinearOp, _layer)
