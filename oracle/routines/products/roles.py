"""Where each contract of scaled products keeps ``a``, ``b`` and their scales, and how a fault rewrites them.

A scale is rewritten as matrices ``[rows, blocks]``: one for a dense call, one per group for the grouped contracts,
whatever shape the contract gives it. Codes are rewritten as ``[rows, K]`` matrices in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from oracle.routines.fault import Call, Change
from oracle.routines.products.contract import ProductContract

FLASHINFER = "fp8_blockscale_gemm_sm90"
CUTLASS = "cutlass_scaled_mm"
CONTIGUOUS = "m_grouped_fp8_gemm_nt_contiguous"
MASKED = "fp8_m_grouped_gemm_nt_masked"
SCALED = "scaled_grouped_mm"

_PLAIN = MappingProxyType({"a": "a", "b": "b", "a_scale": "a_scale", "b_scale": "b_scale"})
_TORCH = MappingProxyType({"a": "qinput", "b": "weight", "a_scale": "scale_a", "b_scale": "scale_b"})
ROLES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "fp8_gemm_nt": _PLAIN,
        FLASHINFER: MappingProxyType(
            {"a": "input", "b": "weight", "a_scale": "input_scale", "b_scale": "weight_scale"}
        ),
        CUTLASS: _PLAIN,
        CONTIGUOUS: _PLAIN,
        MASKED: _PLAIN,
        SCALED: MappingProxyType({"a": "a", "b": "b", "a_scale": "scale_a", "b_scale": "scale_b"}),
        "torch_per_tensor_w8a8_scaled_mm": _TORCH,
        "torch_per_token_w8a8_scaled_mm": _TORCH,
        "torch_channelwise_w8a8_scaled_mm": _TORCH,
        "cutlass_w8a8_scaled_mm": _TORCH,
        "rocm_per_tensor_w8a8_scaled_mm": _TORCH,
    }
)
PRODUCTS = frozenset(ROLES)
GROUPED = frozenset({CONTIGUOUS, MASKED, SCALED})
BLOCKS = frozenset({"fp8_gemm_nt", FLASHINFER, CUTLASS, CONTIGUOUS, MASKED})
TORCH_NAMES = frozenset(name for name, role in ROLES.items() if role is _TORCH)
WITH_BIAS = TORCH_NAMES | {CUTLASS}

Matrix = Callable[[Call, Tensor], Tensor]


def quantised(contract: ProductContract, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The inputs as FP8 codes and scales where the routine quantises them itself: those of its own product."""
    if contract.name not in ROLES:
        return inputs
    role = ROLES[contract.name]
    if all(name in inputs and inputs[name].element_size() == 1 for name in (role["a"], role["b"])):
        return inputs
    product = contract.parts(inputs)[0].product
    made = {"a": product.a, "b": product.b, "a_scale": product.a_scale, "b_scale": product.b_scale}
    return {name: tensor for name, tensor in inputs.items() if name not in role.values()} | {
        role[key]: tensor for key, tensor in made.items()
    }


def read(role: str, change: Matrix) -> Change:
    """A READ change: ``change`` rewrites every matrix of ``role`` ("a", "b", "a_scale" or "b_scale")."""

    def apply(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        name = ROLES[call.contract.name][role]
        return inputs | {name: _rewritten(call, role, inputs[name], change)}

    return apply


def matrix(call: Call, role: str) -> Tensor:
    """The first matrix of ``role`` as the contract gives it: ``[rows, blocks]`` or ``[rows, K]``."""
    given = call.inputs[ROLES[call.contract.name][role]]
    return _matrices(call, role, given)[0]


def _rewritten(call: Call, role: str, given: Tensor, change: Matrix) -> Tensor:
    changed = [change(call, m) for m in _matrices(call, role, given)]
    if role in ("a_scale", "b_scale"):
        return torch.stack(changed).reshape(given.shape).contiguous()
    result = changed[0] if given.dim() == 2 else _stack(changed)
    return _transposed(result) if _is_torch(call) and role == "b" else result


def _matrices(call: Call, role: str, given: Tensor) -> list[Tensor]:
    if given.dim() == 3:
        return list(given)
    if role in ("a", "b"):
        return [_transposed(given) if _is_torch(call) and role == "b" else given]
    product = call.parts[0].product
    if call.contract.name == CONTIGUOUS:
        return [given]
    if call.contract.name == SCALED and role == "b_scale":
        return [channels[:, None] for channels in given]
    blocks = product.B
    return [given.reshape(-1, blocks)]


def _is_torch(call: Call) -> bool:
    return call.contract.name in TORCH_NAMES


def _transposed(x: Tensor) -> Tensor:
    if x.element_size() > 1:
        return x.t().contiguous()
    return x.view(torch.uint8).t().contiguous().view(x.dtype)


def _stack(matrices: list[Tensor]) -> Tensor:
    first = matrices[0]
    if first.element_size() > 1:
        return torch.stack(matrices)
    return torch.stack([m.view(torch.uint8) for m in matrices]).view(first.dtype)
