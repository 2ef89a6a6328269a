"""Where each contract of scaled products keeps ``a``, ``b`` and their scales, and how a fault rewrites them.

A scale is rewritten as matrices ``[rows, blocks]``: one for a dense call, one per group for the grouped contracts,
whatever shape the contract gives it. Codes are rewritten as ``[rows, K]`` matrices in the same way.

NaN codes and scales stay NaN, and make NaN of every sum that they enter; placing them reads no value.
Source: derived from the roles of a contract and the dims of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from oracle.routines.fault import Call, Change, WhyNot, change_of, need
from oracle.routines.products import contract


def quantised(call: Call) -> Mapping[str, Tensor]:
    """The inputs of a call; codes and scales of its own product where the routine quantises them itself."""
    operands = call.operands
    if operands.given or not operands.roles:
        return call.inputs
    product, role = operands.parts[0].product, operands.roles
    tensors = {"a": product.a, "b": product.b, "a_scale": product.a_scale, "b_scale": product.b_scale}
    return {name: tensor for name, tensor in call.inputs.items() if name not in role.values()} | {
        role[key]: tensor for key, tensor in tensors.items()
    }


def each(role: str, function: Callable[..., Tensor]) -> Change:
    """A READ change: ``function`` rewrites every matrix of ``role`` ("a", "b", "a_scale" or "b_scale"), where there is
    one."""
    change = change_of(function)

    def apply(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        name = call.contract.roles.get(role)
        return inputs if name is None else inputs | {name: _rewritten(call, role, inputs[name], change)}

    return apply


def operand(call: Call, role: str) -> Tensor:
    """The input ``[...]`` for ``role``, of its own dtype, which the contract has."""
    return call.inputs[call.contract.roles[role]]


def groups(call: Call) -> Tensor:
    """The input ``[G]`` or ``[M]``, integers, that says which rows belong to which group, which the contract has."""
    return call.inputs[str(call.contract.groups)]


def of_groups(function: Callable[..., Tensor]) -> Change:
    """A READ change of the input that says which rows belong to which group."""
    change = change_of(function)

    def apply(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        name = str(call.contract.groups)
        return inputs | {name: change(call, inputs[name])}

    return apply


def of_the_next(*roles: str) -> Change:
    """A READ change: the inputs for these roles by one entry along their first axis, as far as there are such."""

    def apply(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        names = [call.contract.roles[role] for role in roles if role in call.contract.roles]
        return inputs | {name: rolled(inputs[name]) for name in names}

    return apply


def rolled(x: Tensor, dim: int = 0) -> Tensor:
    """Every entry of ``x`` ``[...]`` along an axis replaced by the next, of the same shape and any dtype."""
    raw = x.view(torch.uint8) if x.element_size() == 1 else x
    return torch.roll(raw, -1, dims=dim).view(x.dtype)


def matrix(call: Call, role: str) -> Tensor:
    """The first matrix of ``role`` as the contract gives it, of its own dtype: ``[rows, blocks]`` or ``[rows, K]``; one
    1 without it."""
    name = call.contract.roles.get(role)
    if name is None:
        return torch.ones(1, 1, dtype=torch.float32, device="cpu")
    return call.cached(f"matrix of {role}", lambda: matrices(call, role, call.inputs[name])[0])


def has(role: str) -> WhyNot:
    """The contract has an input for ``role``."""
    return need(lambda call: role in call.contract.roles, f"there is no {role}")


b_by_row = need(lambda c: c.parts[0].product.b_rows == 1 < c.parts[0].product.N, "a scale of b serves 128 rows")
several_blocks = need(lambda call: call.parts[0].product.B > 1, "there is one K block")


def several_rows(role: str) -> WhyNot:
    """The matrix of ``role`` has more than one row."""
    return need(lambda call: matrix(call, role).shape[0] > 1, f"{role} has one row")


def _rewritten(call: Call, role: str, tensor: Tensor, change: Change) -> Tensor:
    changed = [change(call, m) for m in matrices(call, role, tensor)]
    if call.contract.laid_out:
        same = changed[0].dtype == tensor.dtype
        written = tensor.clone() if same else torch.zeros(tensor.shape, dtype=changed[0].dtype, device=tensor.device)
        for place, m in zip(matrices(call, role, written), changed, strict=True):
            place.copy_(m)
        return written
    if role in ("a_scale", "b_scale"):
        return torch.stack(changed).reshape(tensor.shape).contiguous()
    bits = [m.view(torch.uint8) if m.element_size() == 1 else m for m in changed]
    result = changed[0] if tensor.dim() == 2 else torch.stack(bits).view(changed[0].dtype)
    return contract.transposed(result) if call.operands.b_columns and role == "b" else result


def matrices(call: Call, role: str, tensor: Tensor) -> list[Tensor]:
    """The operand ``tensor`` ``[...]`` for ``role``, or one like it, as matrices ``[rows, columns]`` of the same dtype:
    one, or one for each group."""
    if call.contract.laid_out:
        return call.contract.matrices(call, role, tensor)
    if tensor.dim() == 3:
        return list(tensor)
    if role in ("a", "b"):
        return [contract.transposed(tensor) if call.operands.b_columns and role == "b" else tensor]
    product = call.parts[0].product
    if role == "b_scale" and call.operands.groups is not None:
        return [channels[:, None] for channels in tensor]
    return [tensor.reshape(-1, product.B)]
