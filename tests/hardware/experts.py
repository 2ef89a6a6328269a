"""Layers of experts put together from vLLM's operators, and sglang-kernel's routing: judged, as a script or by verify.

    python tests/hardware/experts.py          (with the tree and tests/ on PYTHONPATH)
    fp8-oracle verify --provider hardware.experts:subjects --subject vllm ...

``vllm``: ``cutlass_moe_fp8`` and ``cutlass_moe_fp8_channel`` as vllm's run_cutlass_moe_fp8 calls them, step by step:
``static_scaled_fp8_quant`` or ``dynamic_per_token_scaled_fp8_quant``, ``cutlass_moe_mm``, ``silu_and_mul``, the
quantiser again, ``cutlass_moe_mm``, and a weighted float32 sum in torch; ``silu_and_mul`` by itself. ``sgl``:
``topk_softmax`` and ``moe_fused_gate`` as ``moe_routing``. ``flashinfer``: ``cutlass_fused_moe`` of FP8 weights. The
libraries are those of :mod:`hardware.fused_libraries`. On a machine without a GPU the steps are taken from the layer's
CPU path, to try the script. Not covered: vLLM's choice between kernels.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from hardware.fused_libraries import exchanged, load, offered
from hardware.libraries import Library, _module, named
from torch import Tensor

import kernels
from kernels.moe_layer import sorted_rows
from oracle.routines import cases, get, profiles
from oracle.routines.moe.pipeline_cases import MANY

Inputs, Options = Mapping[str, Tensor], Mapping[str, Any]
FP8, GPU = torch.float8_e4m3fn, torch.cuda.is_available()
LAYERS = ("cutlass_moe_fp8", "cutlass_moe_fp8_channel")
GATE = ("moe_routing/f32/-/t=40,e=32,k=4/groups=4,bias=1,renormalize=1/family=randn/seed=1",)
"""What moe_fused_gate takes: a bias, groups, weights that are renormalised."""
SWAP = 64
"""Rows up to which the operator takes exchanged problem sizes."""


def quantised(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    if not GPU:
        return kernels.scaled_fp8_quant(x, scale, use_per_token_if_dynamic=scale is None)
    q = torch.empty(x.shape, dtype=FP8, device=x.device)
    if scale is not None:
        torch.ops._C.static_scaled_fp8_quant(q, x, scale)
        return q, scale
    made = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(q, x, made, None)
    return q, made


def multiplied(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, ends: Tensor) -> Tensor:
    """Rows of every expert times its weight, bf16."""
    g, n, k = b.shape
    per_row, per_channel = a_scale.numel() > 1, b_scale.dim() > 1
    if not GPU:
        scales = a_scale.reshape(-1, 1).expand(a.shape[0], 1), b_scale.reshape(g, -1).expand(g, n)
        return kernels.scaled_grouped_mm(a, b, *(s.contiguous() for s in scales), ends)
    out = torch.empty(a.shape[0], n, dtype=torch.bfloat16, device=a.device)
    starts = torch.nn.functional.pad(ends, (1, 0))[:-1].to(torch.int64)
    rows, columns = ends - starts.to(torch.int32), torch.full_like(ends, n)
    sizes = torch.stack([rows, columns, torch.full_like(ends, k)], dim=1)
    if a.shape[0] <= SWAP:
        sizes = exchanged(sizes)
    strides = [torch.full((g,), v, dtype=torch.int64, device=a.device) for v in (k, k, n)]
    b_scale = b_scale if per_channel else b_scale.reshape(g, 1)
    torch.ops._C.cutlass_moe_mm(out, a, b, a_scale, b_scale, starts, sizes.contiguous(), *strides, per_row, per_channel)
    return out


def activated(h: Tensor) -> Tensor:
    if not GPU:
        return kernels.silu_and_mul(h, round_silu=True)
    out = torch.empty(h.shape[0], h.shape[1] // 2, dtype=h.dtype, device=h.device)
    torch.ops._C.silu_and_mul(out, h)
    return out


def rounded_twice(inputs: Inputs, options: Options) -> Tensor:
    offered(options["round_silu"] and options["limit"] is None, "silu rounded, no limit")
    return activated(inputs["x"].contiguous())


def layer(inputs: Inputs, options: Options) -> Tensor:
    """run_cutlass_moe_fp8, in its order."""
    offered("expert_map" not in inputs and not options.get("apply_router_weight_on_input"), "ids of this rank")
    offered(options.get("combine") in (None, "STORED"), "weighted in float32")
    offered(not GPU or all(x.is_contiguous() for x in inputs.values()), "dense operands")
    ids, e = inputs["topk_ids"].long(), inputs["w13"].shape[0]
    target, groups, ends = sorted_rows(ids, e, int(options.get("first_expert", 0)), 1, ids.numel())
    q, scale = quantised(inputs["x"], inputs.get("a1_scale"))
    token = torch.zeros(ids.numel() + 1, dtype=torch.int64, device=ids.device)
    token[target.flatten()] = torch.arange(ids.numel(), device=ids.device) // ids.shape[1]
    rows = q.view(torch.uint8)[token[:-1]].view(FP8)
    own = scale if scale.numel() == 1 else scale[token[:-1]]
    h = multiplied(rows, inputs["w13"], own, inputs["w13_scale"], ends)
    act = activated(h.masked_fill((groups < 0)[:, None], 0.0))
    q, scale = quantised(act, inputs.get("a2_scale"))
    y = multiplied(q, inputs["w2"], scale, inputs["w2_scale"], ends)
    padded = torch.cat([y.masked_fill((groups < 0)[:, None], 0.0), y.new_zeros(1, y.shape[1])])
    terms = padded[target.flatten()].view(*target.shape, -1).float() * inputs["topk_weights"][:, :, None]
    return terms.sum(dim=1).to(torch.bfloat16)


def cutlass_fused(blocks: bool, inputs: Inputs, options: Options) -> Tensor:
    """FlashInfer's ``cutlass_fused_moe`` of FP8 weights, compiled at first use or from its folder ``data/aot``."""
    call = _module("flashinfer.fused_moe").cutlass_fused_moe
    ids, e = inputs["topk_ids"], inputs["w13"].shape[0]
    offered(options.get("first_expert", 0) == 0 and int(ids.min()) >= 0 and int(ids.max()) < e, "experts of this rank")
    x = inputs["x" if blocks else "a"]
    scales = [inputs["w13_scale"], inputs["w2_scale"]]
    if not blocks:  # the last one, of the input, is a part of the first
        scales = [scales[0], inputs["fc2_act_scale"], scales[1], torch.ones(1, device=x.device)]
    made = call(
        x.contiguous(),
        ids.int(),
        inputs["topk_weights"],
        inputs["w13"],
        inputs["w2"],
        torch.bfloat16,
        scales,
        use_deepseek_fp8_block_scale=blocks,
        use_fused_finalize=options.get("combine") != "STORED",
    )
    out: Tensor = made if isinstance(made, Tensor) else made[0]
    return out


def routing(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """sglang-kernel's two routing operators."""
    logits, k = inputs["logits"], options["top_k"]
    router, factor = options["router"], options.get("routed_scaling_factor", 1.0)
    offered(router in ("softmax", "deepseek_v3") and factor == 1.0 and GPU, "softmax, or DeepSeek-V3 without a factor")
    if router == "softmax":
        offered("bias" not in inputs, "softmax without a bias")
        weights = torch.empty(logits.shape[0], k, dtype=torch.float32, device=logits.device)
        ids = torch.empty(logits.shape[0], k, dtype=torch.int32, device=logits.device)
        torch.ops.sgl_kernel.topk_softmax(weights, ids, logits, options["renormalize"], 0.0, None)
        return {"topk_weights": weights, "topk_ids": ids}
    offered("bias" in inputs and options["renormalize"], "a bias, renormalised")
    groups = options["num_expert_group"], options["topk_group"]
    made = torch.ops.sgl_kernel.moe_fused_gate(logits, inputs["bias"], *groups, k, 0, 1.0, False)
    return {"topk_weights": made[0], "topk_ids": made[1]}


def subjects() -> list[Library]:
    """The layers and the routing."""
    if GPU:
        load()
    return [
        *(Library("vllm", name, layer, "sm90.chain") for name in LAYERS),
        Library("vllm", "silu_and_mul", rounded_twice),
        Library("sgl", "moe_routing", routing),
        Library("flashinfer", "cutlass_fused_moe_block", functools.partial(cutlass_fused, True), "sm90.promote128"),
        Library("flashinfer", "cutlass_fused_moe_tensor", functools.partial(cutlass_fused, False), "sm90.chain"),
    ]


def __getattr__(name: str) -> object:
    """``NAMED``, as of :mod:`hardware.libraries`."""
    if name == "NAMED":
        return named(subjects())
    raise AttributeError(name)


def main() -> int:
    """A line for each case; the status says whether one failed."""
    failed = 0
    for subject in subjects():
        contract = get(subject.contract)
        routed = subject.contract == "moe_routing"
        beside = [text for text in (*GATE, *MANY) if text.startswith(f"{subject.contract}/")]
        listed = profiles.cases(subject.contract, "quick" if routed else "full")
        for case in (*listed, *map(cases.parse, beside)):
            options = {spec.name: spec.default for spec in contract.options} | case.call_options()
            inputs = {name: x.cuda() if GPU else x for name, x in case.inputs().items()}
            try:
                made = subject.run(inputs, options)
            except NotImplementedError:
                continue
            found = {n: x.cpu() for n, x in made.items()} if isinstance(made, dict) else made.cpu()
            judged = functools.partial(contract.judge, case.inputs(), found, arch="sm90" if GPU else "cpu")
            verdict = judged(**case.call_options())
            failed += verdict.status.is_failure
            print(f"{subject.name} {case}: {verdict.status} {verdict.summary[:150]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
