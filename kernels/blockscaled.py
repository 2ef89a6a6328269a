"""Block-scaled products: 1x128 activations against 128x128 weights (DeepSeek-V3's recipe).

``y[m,n] = sum_kb a_scale[m,kb] * b_scale[n//128,kb] * <a[m], b[n]>_kb``. Scales are always passed in their logical
shape, ``[M, K/128]`` and ``[N/128, K/128]``, in any strides; they are converted here to the layout a kernel needs.

NaN in a code or a scale makes every element of its row or column NaN; an infinite scale gives infinity
or NaN.
Source: DeepSeek-V3 technical report; DeepGEMM (``fp8_gemm_nt``), FlashInfer (``fp8_blockscale_gemm_sm90``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from . import checks, fast, layout, repeated
from . import platform as machines
from .adapters import Inputs, Options, out_dtype_of, pairs
from .backends._host import allocator, allocators, is_dense, is_other_device, lane_major
from .backends.declaration import Backend, Gemm, Pair, Quantiser, WideLinear
from .checks import FP8
from .config import current_config
from .errors import DtypeError, InputError, LayoutError, NoBackendError, OptionError, ShapeError
from .formulas import flashinfer_blocks, unpack_ue8m0
from .operators import empty
from .quantize import GROUP_EPS, ceil_to_ue8m0, per_block_cast_to_fp8, per_token_group_quant_fp8_packed
from .routes import cached, dtype_name, route
from .support import BLACKWELL, BLOCK, BLOCKS, DENSE, SWITCH_M
from .verbs import exported, serve, verb

# --- as a contract, and as an operator, calls it -------------------------------------------------------------------


def _into_fresh(verb: Callable[..., None], inputs: Inputs, options: Options) -> Tensor:
    a, b = inputs["a"], inputs["b"]
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype_of(options), device=a.device)
    verb(*pairs(inputs), out, c=inputs.get("c"))
    return out


def _blockscale_sm90(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """A weight scale per token is not offered."""
    scale = inputs.get("weight_scale")
    if scale is not None and scale.shape[0] != -(-inputs["weight"].shape[0] // 128):
        raise NotImplementedError("weight_scale [N, K/128]: the kernel indexes it per 128x128 block; it is refused")
    return verb(inputs["input"], inputs["weight"], inputs.get("input_scale"), scale, out_dtype=out_dtype_of(options))


def _wide_input(verb: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    """Verbs with a bf16 input, which give bf16 and take no output dtype."""
    if out_dtype_of(options) != torch.bfloat16:
        raise OptionError(f"out_dtype={out_dtype_of(options)}: the routine gives bfloat16")
    return verb(inputs["input"], inputs["weight"], inputs["weight_scale"])


def _linear_fake(input: Tensor, weight: Tensor, *_: object, **__: object) -> Tensor:
    return empty(input.shape[0], weight.shape[0], like=input, dtype=torch.bfloat16)


def _like_input_fake(input: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    return empty(input.shape[0], weight.shape[0], like=input, dtype=input.dtype)


def _blockscale_operator(
    input: Tensor, weight: Tensor, input_scale: Tensor | None, weight_scale: Tensor | None
) -> Tensor:
    return fp8_blockscale_gemm_sm90(input, weight, input_scale, weight_scale)


def _gemm_operator(checked: Callable[..., None]) -> Callable[..., None]:
    """The verb as an operator: ``checked``, with a fast path for repeated calls.

    Inside of an operator torch's guard sees other dispatch keys, so that the operator has cached calls of its own. The
    guard compares ``requires_grad``, so that a call that requires a gradient reaches ``checked``, which refuses it.
    """

    def run(
        a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, c: Tensor | None, float_scales: bool
    ) -> None:
        call = repeated.find(run, b, b_scale)
        if call is not None and c is None and call.rows(b, b_scale, a, a_scale, out):
            call.run(a, a_scale, b, b_scale, out, None, float_scales)
            return
        checked(a, a_scale, b, b_scale, out, c, float_scales)
        checked_call = repeated.find(DENSE, b, b_scale)
        if checked_call is not None and checked_call.rows(b, b_scale, a, a_scale, out):
            repeated.store_as(run, b, b_scale, checked_call)

    return run


def _linear_operator(verb_keys: Mapping[bool, object]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """A linear layer as an operator (see :func:`_gemm_operator`); its verb caches calls under ``verb_keys[e8m0]``."""

    def of(checked: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(
            input: Tensor,
            weight: Tensor,
            weight_scale: Tensor,
            group_size: int = BLOCK,
            use_deep_gemm_e8m0: bool = False,
        ) -> Tensor:
            call = repeated.find(keys[use_deep_gemm_e8m0], weight, weight_scale)
            if call is not None and group_size == BLOCK and (m := call.rows(weight, weight_scale, input)):
                y: Tensor = call.run[m < SWITCH_M](input, weight, weight_scale)
                return y
            y = checked(input, weight, weight_scale, group_size, use_deep_gemm_e8m0)
            checked_call = repeated.find(verb_keys[use_deep_gemm_e8m0], weight, weight_scale)
            if checked_call is not None and checked_call.rows(weight, weight_scale, input):
                repeated.store_as(keys[use_deep_gemm_e8m0], weight, weight_scale, checked_call)
            return y

        keys = object(), object()
        return run

    return of


# --- the verbs -----------------------------------------------------------------------------------------------------


@verb(
    DENSE,
    adapter=_into_fresh,
    writes=("out",),
    fast_path=_gemm_operator,
    kinds=False,
    native=(BLOCKS,),
)
def fp8_gemm_nt(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    out: Tensor,
    *,
    c: Tensor | None = None,
    disable_ue8m0_cast: bool = True,
) -> None:
    """DeepGEMM's dense product, written into ``out``.

    Parameters
    ----------
    a
        ``(a [M, K] E4M3, a_scale [M, ceil(K/128)] float32)``.
    b
        ``(b [N, K] E4M3, b_scale [ceil(N/128), ceil(K/128)] float32)``, or the scale as :func:`loaded_weight` packs it.
    out
        ``[M, N]`` bf16 (the CPU path takes f16 and f32 too).
    c
        ``[M, N]`` added in float32 before the cast (CPU path only: the kernel for these scales has no such input).
    disable_ue8m0_cast
        False lets DeepGEMM take the exponents of the scales only; they must then be powers of two.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, InputError
        An operand does not fit the contract.
    MissingPackageError, NoBackendError
        DeepGEMM is needed and absent, or does not serve the problem.
    """
    if c is None and type(a) is type(b) is tuple and len(a) == len(b) == 2 and not is_dynamo_compiling():
        (x, xs), (w, ws) = a, b
        call = repeated.find(DENSE, w, ws)
        if call is not None and call.rows(w, ws, x, xs, out) and type(disable_ue8m0_cast) is bool:
            call.run(x, xs, w, ws, out, None, disable_ue8m0_cast)
            return
    _gemm_with_checks(a, b, out, c=c, disable_ue8m0_cast=disable_ue8m0_cast)


@checks.checked(name=DENSE)
def _gemm_with_checks(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: Tensor, *, c: Tensor | None, disable_ue8m0_cast: bool
) -> None:
    """The verb with every check."""
    (x, xs), (w, ws) = checks.pair("a", a), checks.pair("b", b)
    _check_gemm(x, xs, w, ws, out, c)
    if is_compiling():
        torch.ops.fp8_kernels.fp8_gemm_nt(x, xs, w, ws, out, c, disable_ue8m0_cast)
        return
    _product(x, xs, w, ws, out, c, disable_ue8m0_cast)
    if c is None and out.dtype is torch.bfloat16:
        repeated.store(DENSE, w, ws, _decided_gemm(w, ws), x, xs, out)


@verb()
def prepare_fp8_gemm_nt(
    b: tuple[Tensor, Tensor], *, disable_ue8m0_cast: bool = True
) -> Callable[[tuple[Tensor, Tensor], Tensor], None]:
    """:func:`fp8_gemm_nt` for one weight, checked and decided once: a plan that the caller keeps.

    Parameters
    ----------
    b
        ``(b [N, K] E4M3, b_scale [ceil(N/128), ceil(K/128)] float32)``; neither copied nor kept alive.

    Returns
    -------
    Callable
        ``run(a, out)`` with ``a`` and ``out`` (bf16) as of :func:`fp8_gemm_nt`. It checks dtypes, shapes and devices,
        does not validate the storage of ``a`` and ``out``, and looks at the weight again: what was written into it is
        followed, one that no longer fits is refused, and so is a plan whose weight was replaced. Machine and
        configuration are those of the preparation.

    Raises
    ------
    LayoutError
    """
    w, ws = checks.pair("b", b)
    n, k = checks.matrix("b", w)
    _check_scale("b_scale", ws, n, k)
    checks.same_device(b=w, b_scale=ws)
    weight, weight_scale = _reference(w), _reference(ws)
    call: repeated.GuardedCall[Any] = repeated.GuardedCall(_decided_gemm(w, ws))

    def run(a: tuple[Tensor, Tensor], out: Tensor) -> None:
        nonlocal call
        w, ws, now = weight(), weight_scale(), call  # another thread may replace the call
        if type(a) is tuple and not is_dynamo_compiling():
            try:
                x, xs = a
            except ValueError:  # no pair: the checks of the verb refuse it by name
                xs = None
            if now.rows(w, ws, x, xs, out):
                now.run(x, xs, w, ws, out, None, disable_ue8m0_cast)
                return
        if w is None or ws is None:
            raise repeated.gone("b" if w is None else "b_scale")
        _gemm_with_checks(a, (w, ws), out, c=None, disable_ue8m0_cast=disable_ue8m0_cast)
        if out.dtype is torch.bfloat16 and not is_compiling():
            x, xs = a
            call = repeated.of_class(prepare_fp8_gemm_nt, w, ws, _decided_gemm(w, ws), x, xs, out, owned=False)

    return run


def _reference(x: Tensor) -> Callable[[], Any]:
    """What gives the tensor as long as its owner keeps it, then None."""
    return weakref.ref(x)


def _decided_gemm(w: Tensor, ws: Tensor) -> Gemm:
    """The bf16 product of a checked weight, for operands that a :class:`~kernels.repeated.GuardedCall` admits."""
    return cached(_gemm_run, w.device, *w.shape, is_dense(w, ws), ws.dtype is torch.int32)


def _gemm_run(device: torch.device, n: int, k: int, dense: bool, packed: bool) -> Gemm:
    if packed or machines.packs_ue8m0():
        return _product  # which scales the call may hold decides
    product = _aligned(_gemm(device, n, k, torch.bfloat16, None, True)[0], dense)
    if device.index is None or torch.cuda.device_count() == 1:  # no other device can be the current one
        return product
    here, index = fast.DEVICE, device.index

    def run(x: Tensor, xs: Tensor, w: Tensor, ws: Tensor, out: Tensor, c: Tensor | None, float_scales: bool) -> None:
        if here() == index:
            return product(x, xs, w, ws, out, c, float_scales)
        with torch.cuda.device(device):
            return product(x, xs, w, ws, out, c, float_scales)

    return run


def _aligned(backend: Backend, dense: bool) -> Gemm:
    """The backend's product of dense operands, for a weight that is ``dense`` as well, or may not be."""
    return backend.dense_gemm_nt() if dense and backend.dense_gemm_nt is not None else backend.aligned_gemm_nt


def _product(x: Tensor, xs: Tensor, w: Tensor, ws: Tensor, out: Tensor, c: Tensor | None, float_scales: bool) -> None:
    """The verb of checked operands."""
    (m, k), n = x.shape, w.shape[0]
    run, packs = cached(_gemm, x.device, n, k, out.dtype, None if c is None else c.dtype, float_scales)
    if m == 0:
        return
    if packs:
        xs, ws = packed_scales(xs, ws, (m, n, k), float_scales)
    elif ws.dtype is torch.int32:
        ws = block_scale(ws, k)
    run.gemm(_operation())(x, xs, w, ws, out, c, float_scales)


def _gemm(
    device: torch.device, n: int, k: int, out: torch.dtype, c: torch.dtype | None, float_scales: bool
) -> tuple[Backend, bool]:
    """The backend of a product, and whether it takes packed scales only."""
    dtypes = (("out_dtype", dtype_name(out)), ("c", None if c is None else dtype_name(c)))
    backend = route(_operation(), device, ("n", n), ("k", k), *dtypes, *held(float_scales))
    return backend, backend.name == "deep_gemm" and machines.packs_ue8m0()


def _operation() -> str:
    return BLOCKS if machines.current_machine().sm in BLACKWELL else DENSE


def held(float_scales: bool) -> tuple[tuple[str, str], ...]:
    """The field of a problem that says what its scales may hold, where a backend of this machine looks at it."""
    if not machines.packs_ue8m0():
        return ()
    return (("scale_format", "float32" if float_scales else "ue8m0"),)


def _check_gemm(x: Tensor, xs: Tensor, w: Tensor, ws: Tensor, out: Tensor, c: Tensor | None) -> None:
    m, k = checks.matrix("a", x)
    n, k_b = checks.matrix("b", w)
    if k != k_b:
        raise ShapeError(f"a {list(x.shape)} and b {list(w.shape)} disagree in K")
    checks.operand("a_scale", xs, (m, -(-k // BLOCK)), "[M, ceil(K/128)]", torch.float32)
    _check_scale("b_scale", ws, n, k)
    checks.output("out", out, (m, n), "[M, N]", *checks.WIDE)
    if c is not None:
        checks.operand("c", c, (m, n), "[M, N]", *checks.WIDE)
    checks.same_device(a=x, a_scale=xs, b=w, b_scale=ws, out=out, c=c)


def packed_scales(
    a_scale: Tensor, b_scale: Tensor, extents: tuple[int, int, int], float_scales: bool
) -> tuple[Tensor, Tensor]:
    """Both float32 scales as packed UE8M0, which Blackwell's kernels take; every scale must be a power of two.

    ``a_scale`` ``[M, K/128]`` and ``b_scale`` ``[N/128, K/128]`` float32, the latter may be packed. Returns
    int32 ``[M, ceil(K/512)]`` and ``[N, ceil(K/512)]``.

    Raises
    ------
    OptionError
        ``disable_ue8m0_cast``: these kernels take no float32 scales.
    ValueRangeError
        A scale is no power of two; the kernel would drop its mantissa.
    """
    if float_scales:
        raise OptionError(
            "these kernels take UE8M0 scales only; quantise with use_ue8m0=True and pass disable_ue8m0_cast=False"
        )
    m, n, k = extents
    left = layout.transform_sf_into_required_layout(a_scale, m, k, (1, BLOCK, BLOCK), is_sfa=True)
    return left, _packed(b_scale, n, k)


def _packed(b_scale: Tensor, n: int, k: int) -> Tensor:
    if b_scale.dtype is torch.int32:
        return b_scale
    return layout.transform_sf_into_required_layout(b_scale, n, k, (1, BLOCK, BLOCK), is_sfa=False)


def loaded_weight(weight: Tensor, weight_scale: Tensor, *, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """A weight and its scale as this machine's product takes them: what a layer does once, after loading.

    With ``ue8m0`` a weight whose scales are no powers of two is quantised again: dequantised in float32 and cast with
    scales rounded up (to round a scale alone would change every value). Where the plan then takes packed exponents
    only, the scale is packed.

    Parameters
    ----------
    weight, weight_scale
        ``[N, K]`` E4M3 and ``[ceil(N/128), ceil(K/128)]`` float32. Those on meta have no values, and are returned.

    Returns
    -------
    weight, weight_scale
        The same tensors where nothing is due; a packed scale is int32 ``[N, ceil(K/512)]``, column-major.
    """
    if not ue8m0 or weight.is_meta or weight_scale.is_meta or weight_scale.dtype is torch.int32:
        return weight, weight_scale
    n, k = weight.shape
    if not torch.equal(ceil_to_ue8m0(weight_scale), weight_scale):
        weight, weight_scale = under_powers(weight, weight_scale)
    return weight, _packed(weight_scale, n, k) if takes_packed(weight.device, n, k) else weight_scale


def under_powers(weight: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
    """A weight quantised again under powers of two.

    ``weight`` ``[N, K]`` E4M3 and ``weight_scale`` ``[ceil(N/128), ceil(K/128)]`` float32; returns the same shapes and
    dtypes.
    """
    n, k = weight.shape
    per_row = weight_scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return per_block_cast_to_fp8(weight.to(torch.float32) * per_row, use_ue8m0=True)


def takes_packed(device: torch.device, n: int, k: int) -> bool:
    """Whether the bf16 product of UE8M0 scales takes a weight's as packed exponents on this machine."""
    if not machines.packs_ue8m0():
        return False
    try:
        return cached(_gemm, device, n, k, torch.bfloat16, None, False)[1]
    except NoBackendError:  # the first call says why
        return False


def block_scale(weight_scale: Tensor, k: int) -> Tensor:
    """The float32 scale ``[..., ceil(N/128), ceil(K/128)]`` of ``weight_scale``, that itself or packed, int32
    ``[..., N, ceil(K/512)]``; 255 is NaN."""
    if weight_scale.dtype is not torch.int32:
        return weight_scale
    return unpack_ue8m0(weight_scale[..., ::BLOCK, :], -(-k // BLOCK))


def _check_scale(name: str, scale: object, n: int, k: int) -> None:
    kb = -(-k // BLOCK)
    if isinstance(scale, Tensor) and scale.dtype is torch.int32:
        checks.operand(name, scale, (n, -(-kb // 4)), "[N, ceil(K/512)], packed", torch.int32)
        if scale.stride(0) != 1 or (scale.shape[1] > 1 and scale.stride(1) != layout.align(n, layout.TMA_LANES)):
            raise LayoutError(f"{name} has strides {scale.stride()}; packed scales are column-major (loaded_weight)")
        return
    checks.operand(name, scale, (-(-n // BLOCK), kb), "[ceil(N/128), ceil(K/128)]", torch.float32)


@verb("blockscale_sm90", adapter=_blockscale_sm90, fake=_linear_fake, operator=_blockscale_operator)
def fp8_blockscale_gemm_sm90(
    input: Tensor,
    weight: Tensor,
    input_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """FlashInfer's SM90 block-scaled product, with the shipped kernel's silent errors corrected or refused.

    Returns ``[M, N]`` bf16, ``out`` where it is given.

    Three dtype pairs: bf16 + bf16 (both quantised), bf16 + E4M3 (the input quantised), E4M3 + E4M3. A scale of any
    strides is converted to ``[K/128, align(M, 4)]``; bf16 operands are quantised here, by FlashInfer's formula with
    true division and a full scan, whatever their values; float16 outputs and weight scales per token are refused.

    Parameters
    ----------
    input
        ``[M, K]`` bf16 or E4M3, ``K`` a multiple of 128.
    weight
        ``[N, K]`` bf16 or E4M3, ``N`` a multiple of 64.
    input_scale
        ``[M, K/128]`` float32; with an E4M3 input, and only then.
    weight_scale
        ``[ceil(N/128), K/128]`` float32; with an E4M3 weight, and only then.
    out, out_dtype
        ``[M, N]`` bf16 to write into; bfloat16.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, InputError, OptionError, LayoutError
        An operand does not fit the contract.
    """
    m, k = checks.matrix("input", input, FP8, torch.bfloat16)
    n, k_w = checks.matrix("weight", weight, FP8, torch.bfloat16)
    if k != k_w:
        raise ShapeError(f"input {list(input.shape)} and weight {list(weight.shape)} disagree in K")
    checks.multiple("K", k, BLOCK, "pad K with layout.pad_k")
    checks.multiple("N", n, 64, "pad the weight rows")
    if input.dtype == FP8 and weight.dtype != FP8:
        raise DtypeError("an E4M3 input with a bf16 weight has no kernel; quantise the weight")
    _scale_matches("input_scale", input, input_scale, (m, k // BLOCK), "[M, K/128]")
    _weight_scale(weight, weight_scale, n, k)
    if out is not None:
        checks.output("out", out, (m, n), "[M, N]", *checks.WIDE)
        if out_dtype is not None and out_dtype != out.dtype:
            raise OptionError(f"out is {dtype_name(out.dtype)} but out_dtype is {dtype_name(out_dtype)}")
    kind = out.dtype if out is not None else out_dtype or torch.bfloat16
    if kind != torch.bfloat16:
        raise OptionError(
            f"out_dtype={dtype_name(kind)}: the kernel writes bf16 bits whatever it is told; ask for bfloat16 and cast"
        )
    device = checks.same_device(input=input, weight=weight, input_scale=input_scale, weight_scale=weight_scale, out=out)
    if is_compiling():
        y: Tensor = torch.ops.fp8_kernels.fp8_blockscale_gemm_sm90(input, weight, input_scale, weight_scale)
        return y if out is None else out.copy_(y)
    run = route("blockscale_sm90", device, ("n", n), ("k", k), ("a_dtype", dtype_name(input.dtype)))
    if m == 0:
        return torch.empty(0, n, dtype=kind, device=device) if out is None else out
    if input_scale is None:
        input, input_scale = _quantise_here(cached(_reciprocal, device), input)
    else:
        input_scale = lane_major(input_scale)
    if weight_scale is None:
        weight, weight_scale = flashinfer_blocks(weight, BLOCK)
    weight_scale = block_scale(weight_scale, k)
    return run.blockscale_sm90(input, input_scale, weight, weight_scale, out)


def _reciprocal(device: torch.device) -> Quantiser:
    """FlashInfer's formula for bf16 inputs; its own kernel loses groups (:mod:`kernels.backends.flashinfer`)."""
    return route("quant_reciprocal", device, ("a_dtype", "bfloat16")).reciprocal_quantiser(torch.bfloat16)


def _quantise_here(quantise: Quantiser, x: Tensor) -> Pair:
    if is_other_device(x.device):
        with torch.cuda.device(x.device):
            return quantise(x, None, allocator(x.device))
    return quantise(x, None, allocator(x.device))


@verb("blockscale_sm90", adapter=_wide_input, fake=_linear_fake)
def flashinfer_fp8_blockscale_gemm(input: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """:func:`fp8_blockscale_gemm_sm90` for a bf16 input and a quantised weight; a custom op under ``torch.compile``.

    ``input`` ``[M, K]`` bf16, ``weight`` ``[N, K]`` E4M3, ``weight_scale`` ``[ceil(N/128), K/128]`` float32. Returns
    ``[M, N]`` bf16.
    """
    if is_compiling():
        out: Tensor = torch.ops.fp8_kernels.flashinfer_fp8_blockscale_gemm(input, weight, weight_scale)
        return out
    return fp8_blockscale_gemm_sm90(input, weight, None, weight_scale)


@verb(fake=_like_input_fake)
def few_rows_blockscale_linear(input: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """A linear layer of less than 32 rows, which quantises the input 1x128 by FlashInfer's formula inside the product.

    Codes and scales are those of :func:`flashinfer_quantize_1x128` (a subnormal scale may differ by 2^-149). The sum is
    that of :func:`fp8_gemm_nt`, or several of it over equal shares of K, added in float32; how many depends on N, K and
    the GPU, not on M. NaN and infinity reach the elements of their row.

    Parameters
    ----------
    input
        ``[M, K]`` bf16 or f16, M < 32, K a multiple of 128.
    weight, weight_scale
        ``[N, K]`` E4M3 and ``[ceil(N/128), K/128]`` float32.

    Returns
    -------
    Tensor
        ``[M, N]`` of the dtype of ``input``.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, InputError, LayoutError
        An operand does not fit the contract.
    NoBackendError
        No kernel serves the problem on this machine.
    """
    _check_linear(input, weight, weight_scale, torch.bfloat16, torch.float16)
    m, (n, k) = input.shape[0], weight.shape
    if is_compiling():
        out: Tensor = torch.ops.fp8_kernels.few_rows_blockscale_linear(input, weight, weight_scale)
        return out
    if m >= SWITCH_M:
        raise ShapeError(f"input has {m} rows; from {SWITCH_M} use dynamic_flashinfer_deepgemm_blockscale_gemm")
    return cached(_few_rows, input.device, input.dtype, n, k)(input, weight, block_scale(weight_scale, k))


def _few_rows(device: torch.device, dtype: torch.dtype, n: int, k: int) -> WideLinear:
    name = dtype_name(dtype)
    return route("few_rows", device, ("n", n), ("k", k), ("a_dtype", name), ("out_dtype", name)).few_rows(dtype, n, k)


@verb(fake=_linear_fake, fast_path=_linear_operator({e8m0: ("deepgemm", e8m0) for e8m0 in (False, True)}), kinds=False)
def deepgemm_blockscale_linear(
    input: Tensor, weight: Tensor, weight_scale: Tensor, group_size: int = BLOCK, use_deep_gemm_e8m0: bool = False
) -> Tensor:
    """Quantise a bf16 input 1x128, then :func:`fp8_gemm_nt`: ``[M, N]`` bf16.

    ``input`` ``[M, K]`` bf16, f16 or f32, ``weight`` ``[N, K]`` E4M3, ``weight_scale`` ``[ceil(N/128), K/128]``
    float32.
    """
    if group_size is BLOCK and not is_dynamo_compiling() and type(use_deep_gemm_e8m0) is bool:
        call = repeated.find(("deepgemm", use_deep_gemm_e8m0), weight, weight_scale)
        if call is not None and (m := call.rows(weight, weight_scale, input)):
            y: Tensor = call.run[m < SWITCH_M](input, weight, weight_scale)
            return y
    return _deepgemm(input, weight, weight_scale, group_size, use_deep_gemm_e8m0)


@checks.checked(name="deepgemm_blockscale_linear")
def _deepgemm(input: Tensor, weight: Tensor, weight_scale: Tensor, group_size: int, use_deep_gemm_e8m0: bool) -> Tensor:
    """:func:`deepgemm_blockscale_linear` with every check."""
    if is_compiling():
        op = torch.ops.fp8_kernels.deepgemm_blockscale_linear
        out: Tensor = op(input, weight, weight_scale, group_size, use_deep_gemm_e8m0)
        return out
    if group_size != BLOCK:
        raise OptionError(f"group_size={group_size}; DeepGEMM scales in groups of {BLOCK}")
    _check_linear(input, weight, weight_scale, *checks.WIDE)
    dense, packed = is_dense(weight, weight_scale), weight_scale.dtype is torch.int32
    runs = cached(_same_runs, input.device, input.dtype, *weight.shape, use_deep_gemm_e8m0, dense, packed)
    y = runs[False](input, weight, weight_scale)
    repeated.store(("deepgemm", use_deep_gemm_e8m0), weight, weight_scale, runs, input)
    return y


def _same_runs(*key: Any) -> dict[bool, WideLinear]:
    """As :class:`_Runs`, the layer for many rows in both places."""
    return dict.fromkeys((False, True), cached(_quantise_then_gemm, *key))


def _check_linear(input: Tensor, weight: Tensor, weight_scale: Tensor, *dtypes: torch.dtype) -> None:
    m, k = checks.matrix("input", input, *dtypes)
    n, k_w = checks.matrix("weight", weight)
    if k != k_w:
        raise ShapeError(f"input {list(input.shape)} and weight {list(weight.shape)} disagree in K")
    checks.multiple("K", k, BLOCK, "pad K with layout.pad_k")
    _weight_scale(weight, weight_scale, n, k)
    checks.same_device(input=input, weight=weight, weight_scale=weight_scale)


def _quantise_then_gemm(
    device: torch.device, dtype: torch.dtype, n: int, k: int, e8m0: bool, dense: bool = False, packed: bool = False
) -> WideLinear:
    """Quantise, then GEMM, each on the backend that its plan chooses."""
    key = (("group_size", BLOCK), ("a_dtype", dtype_name(dtype)), ("ue8m0", e8m0))
    quantise = _quantiser(route("quant_group", device, *key), e8m0)
    backend, packs = _gemm(device, n, k, torch.bfloat16, None, not e8m0)
    product = backend.gemm(BLOCKS) if _operation() == BLOCKS else _aligned(backend, dense)
    index, here, allocator_now = device.index, fast.DEVICE, allocators(device)

    def linear(input: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
        if index is not None and here() != index:
            with torch.cuda.device(device):
                return linear(input, weight, weight_scale)
        m, allocate = input.shape[0], allocator_now()
        out = allocate((m, n), (n, 1), torch.bfloat16)
        if m == 0:
            return out
        if packs:
            _packed_gemm(backend, input, weight, weight_scale, out)
        else:
            if packed:
                weight_scale = block_scale(weight_scale, k)
            q, scale = quantise(input, None, allocate)
            product(q, scale, weight, weight_scale, out, None, not e8m0)
        return out

    return linear


def _quantiser(backend: Backend, e8m0: bool) -> Quantiser:
    """The backend's 1x128 quantiser; the prepared one where it has that."""
    if backend.group_quantiser is not None:
        return backend.group_quantiser(BLOCK, GROUP_EPS, e8m0, "tma")
    return lambda x, out, _: backend.quant_group(x, BLOCK, GROUP_EPS, e8m0, "tma", out)


@verb(
    "dynamic_blockscale",
    adapter=_wide_input,
    fake=_linear_fake,
    fast_path=_linear_operator({e8m0: e8m0 for e8m0 in (False, True)}),
    kinds=False,
)
def dynamic_flashinfer_deepgemm_blockscale_gemm(
    input: Tensor, weight: Tensor, weight_scale: Tensor, group_size: int = BLOCK, use_deep_gemm_e8m0: bool = False
) -> Tensor:
    """bf16 input: one kernel below 32 rows, else quantise and DeepGEMM; always the latter in batch-invariant mode.

    The one kernel (:func:`few_rows_blockscale_linear`) quantises the input itself; where it does not serve the machine,
    FlashInfer's product does, after a quantiser of the same formula.
    Under ``torch.compile`` the switch is a ``torch.cond``, so that a graph with a dynamic row count has both branches.

    Below 32 rows the input is quantised by FlashInfer's formula, else by that of :func:`per_token_group_quant_fp8`;
    both hold every finite value. Batch-invariant mode or ``VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0`` select the latter
    for every M.

    Parameters
    ----------
    input
        ``[M, K]`` bf16.
    weight, weight_scale
        ``[N, K]`` E4M3 and ``[ceil(N/128), K/128]`` float32.

    Returns
    -------
    Tensor
        ``[M, N]`` bf16.
    """
    if group_size is BLOCK and not is_dynamo_compiling() and type(use_deep_gemm_e8m0) is bool:
        call = repeated.find(use_deep_gemm_e8m0, weight, weight_scale)
        if call is not None and (m := call.rows(weight, weight_scale, input)):
            y: Tensor = call.run[m < SWITCH_M](input, weight, weight_scale)
            return y
    return _dynamic(input, weight, weight_scale, group_size, use_deep_gemm_e8m0)


@checks.checked(name="dynamic_flashinfer_deepgemm_blockscale_gemm")
def _dynamic(input: Tensor, weight: Tensor, weight_scale: Tensor, group_size: int, use_deep_gemm_e8m0: bool) -> Tensor:
    """:func:`dynamic_flashinfer_deepgemm_blockscale_gemm` with every check."""
    if group_size != BLOCK:
        raise OptionError(f"group_size={group_size}; both kernels scale in groups of {BLOCK}")
    _check_switch(input, weight, weight_scale)
    if is_compiling():
        compiled = deepgemm_blockscale_linear if current_config().batch_invariant else _switch
        return compiled(input, weight, weight_scale, group_size, use_deep_gemm_e8m0)
    m, (n, k) = input.shape[0], weight.shape
    if m == 0:
        return _switched(input.device, 0, n, k, use_deep_gemm_e8m0)(input, weight, weight_scale)
    runs = _runs(weight, weight_scale, use_deep_gemm_e8m0)
    y = runs[m < SWITCH_M](input, weight, weight_scale)
    repeated.store(use_deep_gemm_e8m0, weight, weight_scale, runs, input)
    return y


class _Runs(dict[bool, WideLinear]):
    """The layers of one class of weights, for few rows (True) and for many, each decided when it is first asked for."""

    def __init__(self, device: torch.device, n: int, k: int, e8m0: bool, dense: bool, packed: bool) -> None:
        super().__init__()
        self._of = (n, k, e8m0, dense, packed)
        self._device = device

    def __missing__(self, few: bool) -> WideLinear:
        run = self[few] = _switched(self._device, SWITCH_M - 1 if few else SWITCH_M, *self._of)
        return run


def _runs(weight: Tensor, weight_scale: Tensor, e8m0: bool) -> _Runs:
    packed = weight_scale.dtype is torch.int32
    return cached(_Runs, weight.device, *weight.shape, e8m0, is_dense(weight, weight_scale), packed)


@verb()
def prepare_blockscale_linear(
    weight: Tensor, weight_scale: Tensor, *, use_deep_gemm_e8m0: bool = False
) -> Callable[[Tensor], Tensor]:
    """:func:`dynamic_flashinfer_deepgemm_blockscale_gemm` for one weight, checked and decided once.

    Parameters
    ----------
    weight, weight_scale
        ``[N, K]`` E4M3 and ``[ceil(N/128), K/128]`` float32; neither copied nor kept alive.

    Returns
    -------
    Callable
        ``run(input)`` for ``input`` ``[M, K]`` bf16, a strided tensor. It checks dtype, shape and device, does not
        validate the storage of the input, and looks at the weight again: what was written into it is followed, one
        that no longer fits is refused, and so is a plan whose weight was replaced. Machine and configuration are
        those of the preparation.

    Raises
    ------
    DeviceError, DtypeError, InputError, LayoutError, ShapeError
    """
    e8m0, empty = use_deep_gemm_e8m0, weight.new_empty(0, checks.matrix("weight", weight)[1], dtype=torch.bfloat16)
    _check_switch(empty, weight, weight_scale)
    weight_of, scale_of = _reference(weight), _reference(weight_scale)
    call = repeated.GuardedCall(_runs(weight, weight_scale, e8m0))

    def run(input: Tensor) -> Tensor:
        nonlocal call
        w, scale, now = weight_of(), scale_of(), call  # another thread may replace the call
        if not is_dynamo_compiling() and (m := now.rows(w, scale, input)):
            return now.run[m < SWITCH_M](input, w, scale)
        if w is None or scale is None:
            raise repeated.gone("weight" if w is None else "weight_scale")
        y = _dynamic(input, w, scale, BLOCK, e8m0)
        if is_compiling():
            return y
        call = repeated.of_class((prepare_blockscale_linear, e8m0), w, scale, _runs(w, scale, e8m0), input, owned=False)
        return y

    return run


def _check_switch(input: Tensor, weight: Tensor, weight_scale: Tensor) -> None:
    _check_linear(input, weight, weight_scale, torch.bfloat16)
    checks.multiple("N", weight.shape[0], 64, "pad the weight rows")


def _switched(
    device: torch.device, m: int, n: int, k: int, e8m0: bool, dense: bool = False, packed: bool = False
) -> WideLinear:
    """FlashInfer's formula, in one kernel or before its product, where the plan chooses it; else as for many rows."""
    small = m < SWITCH_M and not current_config().batch_invariant
    if m > 0:
        rows = SWITCH_M - 1 if small else SWITCH_M
        key = (("m", rows), ("n", n), ("k", k), ("ue8m0", e8m0), *held(not e8m0))
        run = route("dynamic_blockscale", device, *key)
        if small and run.declares("few_rows"):
            few = run.few_rows(torch.bfloat16, n, k)
            return (lambda x, weight, scale: few(x, weight, block_scale(scale, k))) if packed else few
        if small and run.declares("blockscale_sm90"):
            product, quantise = run.blockscale_sm90, _reciprocal(device)
            return lambda x, weight, scale: product(*_quantise_here(quantise, x), weight, block_scale(scale, k), None)
    return cached(_quantise_then_gemm, device, torch.bfloat16, n, k, e8m0, dense, packed)


def _switch(input: Tensor, weight: Tensor, weight_scale: Tensor, group_size: int, e8m0: bool) -> Tensor:
    def small(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        op = torch.ops.fp8_kernels.dynamic_flashinfer_deepgemm_blockscale_gemm
        out: Tensor = op(x, w, s, group_size, e8m0)
        return out

    def large(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        out: Tensor = torch.ops.fp8_kernels.deepgemm_blockscale_linear(x, w, s, group_size, e8m0)
        return out

    out: Tensor = torch.cond(input.shape[0] < SWITCH_M, small, large, (input, weight, weight_scale))
    return out


@exported
class FlashInferFp8DeepGEMMDynamicBlockScaledKernel:
    """The layer-level object an engine attaches to a block-scaled linear layer.

    Parameters
    ----------
    use_deep_gemm_e8m0
        UE8M0 scales; default: :func:`kernels.platform.quantises_to_ue8m0`.
    """

    apply_input_quant = False
    """The input arrives in bf16; quantisation is part of the product."""

    @checks.checked
    def __init__(self, use_deep_gemm_e8m0: bool | None = None) -> None:
        self.use_deep_gemm_e8m0 = machines.quantises_to_ue8m0() if use_deep_gemm_e8m0 is None else use_deep_gemm_e8m0

    @checks.checked
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Convert ``layer.weight [N, K]`` and ``weight_scale_inv`` (or ``weight_scale``): :func:`loaded_weight`."""
        name = "weight_scale_inv" if hasattr(layer, "weight_scale_inv") else "weight_scale"
        weight, scale = getattr(layer, "weight"), getattr(layer, name)  # noqa: B009  # a module attribute is a union
        n, k = checks.matrix("weight", weight)
        _weight_scale(weight, scale, n, k)
        codes, ready = loaded_weight(weight.detach().contiguous(), scale.detach(), ue8m0=self.use_deep_gemm_e8m0)
        ready = ready if ready.dtype is torch.int32 else ready.contiguous()
        layer.weight = torch.nn.Parameter(codes, requires_grad=False)
        setattr(layer, name, torch.nn.Parameter(ready, requires_grad=False))

    @checks.checked
    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor | None, Bs: Tensor) -> Tensor:
        """``A [M, K]`` bf16 against ``B [N, K]`` with ``Bs [N/128, K/128]``; ``As`` must be None.

        Raises InputError.
        """
        if As is not None:
            raise InputError("As must be None: the input is quantised inside (apply_input_quant is False)")
        return dynamic_flashinfer_deepgemm_blockscale_gemm(A, B, Bs, BLOCK, self.use_deep_gemm_e8m0)


def _packed_gemm(run: Backend, input: Tensor, weight: Tensor, weight_scale: Tensor, out: Tensor) -> None:
    n, k = weight.shape
    q, scale = per_token_group_quant_fp8_packed(input, BLOCK)
    run.gemm_nt(q, scale, weight, _packed(weight_scale, n, k), out, None, False)


def _scale_matches(name: str, x: Tensor, scale: Tensor | None, expected: tuple[int, int], meaning: str) -> None:
    if x.dtype != FP8 and scale is not None:
        raise InputError(
            f"{name} belongs to an E4M3 operand; this one is {dtype_name(x.dtype)} and is quantised inside"
        )
    if x.dtype == FP8:
        if scale is None:
            raise InputError(f"{name} is required with an E4M3 operand: float32 {meaning}")
        checks.operand(name, scale, expected, meaning, torch.float32)


def _weight_scale(weight: Tensor, scale: Tensor | None, n: int, k: int) -> None:
    nb, kb = -(-n // BLOCK), -(-k // BLOCK)
    if scale is not None and isinstance(scale, Tensor) and tuple(scale.shape) == (n, kb) and n != nb:
        raise ShapeError(
            f"weight_scale [N, K/128] = [{n}, {kb}] is per row; the kernel reads it per 128x128 block. "
            f"Requantise the weight with per_block_cast_to_fp8 (scale [{nb}, {kb}])"
        )
    if weight.dtype == FP8 and isinstance(scale, Tensor) and scale.dtype is torch.int32:
        _check_scale("weight_scale", scale, n, k)
    else:
        _scale_matches("weight_scale", weight, scale, (nb, kb), "[ceil(N/128), ceil(K/128)]")


def _layer(layer: Callable[..., Any], inputs: Inputs, options: Options) -> Tensor:
    """The layer object: weights after loading, then the product."""

    def product(input: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
        kernel, module = layer(use_deep_gemm_e8m0=False), torch.nn.Module()
        for name, x in (("weight", weight), ("weight_scale_inv", weight_scale)):
            setattr(module, name, torch.nn.Parameter(x, requires_grad=False))
        kernel.process_weights_after_loading(module)
        weight, scale = (checks.tensor(name, getattr(module, name)) for name in ("weight", "weight_scale_inv"))
        out: Tensor = kernel.apply_block_scaled_mm(input, weight, None, scale)
        return out

    return _wide_input(product, inputs, options)


_KERNEL = FlashInferFp8DeepGEMMDynamicBlockScaledKernel
serve(_KERNEL.__name__, "dynamic_blockscale", _KERNEL, _layer)
