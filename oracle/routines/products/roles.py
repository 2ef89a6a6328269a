"""Where each contract of scaled products keeps ``a``, ``b`` and their scales, and how a fault rewrites them.

A scale is rewritten as matrices ``[rows, blocks]``: one for a dense call, one per group for the grouped contracts,
whatever shape the contract gives it. Codes are rewritten as ``[rows, K]`` matrices in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from oracle.routines.base import registered
from oracle.routines.fault import Call, Change, WhyNot, change_of, need
from oracle.routines.products import (
    batched,
    batched_cases,
    cases,
    contract,
    deep_gemm,
    flashinfer,
    grouped,
    linear,
    mixed,
)

# importing them registers what ROLES lists
PRODUCT_MODULES = (contract, flashinfer, grouped, linear, deep_gemm, batched, mixed)

FLASHINFER = "fp8_blockscale_gemm_sm90"
CUTLASS = "cutlass_scaled_mm"
CONTIGUOUS = "m_grouped_fp8_gemm_nt_contiguous"
MASKED = "fp8_m_grouped_gemm_nt_masked"
SCALED = "scaled_grouped_mm"

ROLES: Mapping[str, Mapping[str, str]] = {
    name: found.roles for name, found in registered().items() if "a" in found.roles
}
PRODUCTS = frozenset(ROLES)
GROUPED = frozenset(name for name in ROLES if registered()[name].groups is not None)
BY_INDEX = frozenset({CONTIGUOUS, "m_grouped_fp8_gemm_nn_contiguous"})
BY_COUNT = frozenset({MASKED, "batch_deepgemm_fp8_nt_groupwise"})
RUNS = GROUPED - BY_INDEX - BY_COUNT
GRAMMARS = {**cases.GRAMMARS, **batched_cases.GRAMMARS}
BLOCKS = frozenset(name for name in ROLES if {"1x128:128x128", "1x128:1x128"} & set(GRAMMARS[name].schemes))
TORCH_NAMES = frozenset(name for name, role in ROLES.items() if role["a"] == "qinput")
WITH_BIAS = TORCH_NAMES | {CUTLASS}


def quantised(call: Call) -> Mapping[str, Tensor]:
    """The inputs of a call; codes and scales of its own product where the routine quantises them itself."""
    operands = call.operands
    if operands.given or not operands.roles:
        return call.inputs
    product, role = operands.parts[0].product, operands.roles
    made = {"a": product.a, "b": product.b, "a_scale": product.a_scale, "b_scale": product.b_scale}
    return {name: tensor for name, tensor in call.inputs.items() if name not in role.values()} | {
        role[key]: tensor for key, tensor in made.items()
    }


def each(role: str, function: Callable[..., Tensor]) -> Change:
    """A READ change: ``function`` rewrites every matrix of ``role`` ("a", "b", "a_scale" or "b_scale"), where there is
    one."""
    change = change_of(function)

    def apply(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        name = ROLES[call.contract.name].get(role)
        return inputs if name is None else inputs | {name: _rewritten(call, role, inputs[name], change)}

    return apply


def matrix(call: Call, role: str) -> Tensor:
    """The first matrix of ``role`` as the contract gives it: ``[rows, blocks]`` or ``[rows, K]``; one 1 without it."""
    name = ROLES[call.contract.name].get(role)
    one = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    return one if name is None else matrices(call, role, call.inputs[name])[0]


def has(role: str) -> WhyNot:
    """The contract has an input for ``role``."""
    return need(lambda call: role in ROLES[call.contract.name], f"there is no {role}")


several_blocks = need(lambda call: call.parts[0].product.B > 1, "there is one K block")


def several_rows(role: str) -> WhyNot:
    """The matrix of ``role`` has more than one row."""
    return need(lambda call: matrix(call, role).shape[0] > 1, f"{role} has one row")


def _rewritten(call: Call, role: str, given: Tensor, change: Change) -> Tensor:
    changed = [change(call, m) for m in matrices(call, role, given)]
    if call.contract.laid_out:
        same = changed[0].dtype == given.dtype
        made = given.clone() if same else torch.zeros(given.shape, dtype=changed[0].dtype, device=given.device)
        for place, m in zip(matrices(call, role, made), changed, strict=True):
            place.copy_(m)
        return made
    if role in ("a_scale", "b_scale"):
        return torch.stack(changed).reshape(given.shape).contiguous()
    bits = [m.view(torch.uint8) if m.element_size() == 1 else m for m in changed]
    result = changed[0] if given.dim() == 2 else torch.stack(bits).view(changed[0].dtype)
    return contract.transposed(result) if call.operands.b_columns and role == "b" else result


def matrices(call: Call, role: str, given: Tensor) -> list[Tensor]:
    """The operand ``given`` for ``role``, or one like it, as matrices: one, or one for each group."""
    if call.contract.laid_out:
        return call.contract.matrices(call, role, given)
    if given.dim() == 3:
        return list(given)
    if role in ("a", "b"):
        return [contract.transposed(given) if call.operands.b_columns and role == "b" else given]
    product = call.parts[0].product
    if role == "b_scale" and call.operands.groups is not None:
        return [channels[:, None] for channels in given]
    return [given.reshape(-1, product.B)]
