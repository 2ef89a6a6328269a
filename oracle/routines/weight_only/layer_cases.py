"""Cases of layers of experts with weights of 4 or 8 bits: tokens without experts, one expert with all, each type."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from oracle.routines import data
from oracle.routines.case import Case, Grammar
from oracle.routines.weight_only.kernels import E8M0, TYPES

FAMILIES = ("randn", "heavy", "special", "outlier")
TYPED = ("uint8b128", "float8_e4m3fn", "float4_e2m1f")


def _integers(case: Case, name: str, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(case.stream(name).integers(low, high, shape)).to(torch.int64)


def _layer(case: Case) -> dict[str, Tensor]:
    """Weights small enough that the activation is curved; biases with ``bias=1``."""
    m, e, h, i, k = (case[name] for name in "mehik")
    (dtype,) = case.operand_dtypes
    marlin = "triton" not in case.contract
    kind = (case.option("type") or "uint4b8") if marlin else "float4_e2m1f"
    bits, _, fmt = TYPES[kind]
    inputs = {"hidden_states": data.activations(case.label("x"), case.family, m, h, dtype=dtype)}
    for name, rows, columns in (("w1", h, 2 * i), ("w2", i, h)):
        q = _integers(case, name, 0, 1 << bits, (e, rows, columns))
        q = torch.where(q % 128 == 127, q - 1, q) if bits == 8 and fmt is not None else q
        inputs[name] = q.to(torch.uint8)
        if kind == "float4_e2m1f":
            exponents = _integers(case, f"{name}_scale", 120, 125, (e, rows // 32, columns))
            inputs[f"{name}_scale"] = exponents.to(torch.uint8)
            if case.option("bytes") != "1":
                inputs[f"{name}_scale"] = inputs[f"{name}_scale"].view(E8M0)
        else:
            groups = 1 if case.option("column") == "1" else rows // 32
            spread = {4: 8.0, 8: 256.0}[bits] if fmt is None else 128.0
            scale = data.scales(case.label(f"{name}_scale"), "randn", (e, groups, columns)) * 8 / spread
            inputs[f"{name}_scale"] = scale.to(dtype)
    if case.option("bias") == "1":
        of = dtype if marlin else torch.float32
        for name, width in (("bias1", 2 * i), ("bias2", h)):
            inputs[name] = data.normal(case.label(name), (e, width), dtype=of)
    inputs["topk_weights"] = data.scales(case.label("weights"), "randn", (m, k)).abs() * 8
    first = _integers(case, "first", 0, e, (m, 1))
    ids = (first + torch.arange(k, device="cpu")[None, :]) % e
    if case.option("one") == "1":
        ids = torch.arange(k, device="cpu")[None, :].expand(m, k) % e
    if case.option("none") == "1":
        ids = ids.clone()
        ids[-1], ids[0, -1] = -1, -1
    inputs["topk_ids"] = ids.to(torch.int64 if case.option("ids") == "64" else torch.int32)
    return inputs


_MEHIK, _COMMON = ("m", "e", "h", "i", "k"), {"bias": ("1",), "none": ("1",), "one": ("1",), "ids": ("64",)}
_SHAPES = ("m=5,e=4,h=64,i=32,k=2", "m=3,e=8,h=32,i=64,k=6")
GRAMMARS: Mapping[str, Grammar] = {
    "fused_marlin_moe": Grammar(
        _MEHIK, ("bf16", "f16"), ("-",), FAMILIES, _layer, lambda case: {"b_type": case.option("type") or "uint4b8"},
        {"type": TYPED, "column": ("1",), **_COMMON}, shapes=_SHAPES, fixed=True,
        domain="h % 32 == 0, i % 32 == 0, k <= e",
    ),
    "trtllm_mxint4_block_scale_moe": Grammar(
        _MEHIK, ("bf16",), ("-",), FAMILIES, _layer, lambda case: {},
        {name: values for name, values in _COMMON.items() if name != "bias"}, shapes=_SHAPES, fixed=True,
        domain="h % 32 == 0, i % 32 == 0, k <= e",
    ),
    "triton_kernel_fused_experts": Grammar(
        _MEHIK, ("bf16",), ("-",), FAMILIES, _layer, lambda case: {}, {"bytes": ("1",), **_COMMON}, shapes=_SHAPES,
        fixed=True, domain="h % 32 == 0, i % 32 == 0, k <= e",
    ),
}  # fmt: skip  # a table, one row a line
