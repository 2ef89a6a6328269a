"""References in torch that libraries' wheels bring for experts, routing, fusions and weight-only products, beside ours.

    python -m tests.support.wheel_references SITE [SITE ...]

A SITE has unpacked wheels (FlashInfer 0.6.18.post1, vLLM 0.20.2 with its triton_kernels). A function is taken out of
its file, alone with what it calls there, so that the library itself, which wants a GPU, is not imported. It is called
on the quick cases of its contract, and what it returns is judged as a kernel of a CPU is. Prints a table row a
function: on how many cases it agrees, and where one is refused what :data:`SAID` has to say. Ends with 1 where a
function is refused of which nothing is said, or one of which something is said is not.
"""

from __future__ import annotations

import ast
import math
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from oracle.errors import OracleError
from oracle.routines import get, profiles

Inputs, Options = Mapping[str, Tensor], Mapping[str, Any]
MOST = 12
"""Cases of a contract."""


def taken(path: Path, name: str) -> Callable[..., Any]:
    """The function ``name`` of a file, with the functions and constants of the file that it uses.

    Decorators, and checks that a tensor lies on a GPU, are left out. Raises KeyError: the file has no such function.
    """
    known: dict[str, ast.stmt] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            known[node.name] = _OnAnyDevice().visit(node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            known[node.targets[0].id] = node
    kept: dict[str, ast.stmt] = {}
    due = [name]
    while due:
        if (one := due.pop()) in known and one not in kept:
            kept[one] = known[one]
            due += [node.id for node in ast.walk(known[one]) if isinstance(node, ast.Name)]
    given: dict[str, Any] = {"torch": torch, "math": math, "struct": struct, "F": torch.nn.functional}
    given |= {"envs": SimpleNamespace(VLLM_USE_FUSED_MOE_GROUPED_TOPK=False, VLLM_BATCH_INVARIANT=True)}
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    order = [node for one, node in known.items() if one in kept]
    exec(compile(ast.fix_missing_locations(ast.Module([future, *order], [])), str(path), "exec"), given)
    return given[name]  # type: ignore[no-any-return]


class _OnAnyDevice(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> Any:
        return None if "is_cuda" in ast.unparse(node.test) else self.generic_visit(node)


@dataclass(frozen=True)
class Peer:
    """A function of a wheel's file under a contract; ``call(function, inputs, options)`` gives the outputs, and raises
    NotImplementedError where the function says nothing about the call."""

    file: str
    name: str
    contract: str
    call: Callable[[Any, Inputs, Options], Any]

    @property
    def key(self) -> str:
        return f"{self.file.partition('/')[0]} {self.name}"


def _only(wanted: bool) -> None:
    if not wanted:
        raise NotImplementedError


def _gated(f: Any, i: Inputs, o: Options) -> Tensor:
    _only(o["limit"] is None and o["round_silu"])
    return f(i["x"])  # type: ignore[no-any-return]


def _epsilon(f: Any, i: Inputs, o: Options, *names: str) -> Any:
    _only(abs(o["epsilon"] - 1e-6) < 1e-12)
    return f(*(i[name] for name in names))


def _grouped(f: Any, i: Inputs, o: Options) -> Any:
    groups = o["num_expert_group"]
    _only(i["logits"].shape[1] // groups >= 2)
    factor = o["routed_scaling_factor"]
    more = (o["renormalize"], groups, o["topk_group"], "sigmoid", factor)
    return f(i["logits"], i["logits"], o["top_k"], *more, i["bias"])


class _WithCounts:
    """torch, whose ``histc`` counts integers on a CPU too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def histc(x: Tensor, bins: int, max: int) -> Tensor:
        return torch.bincount(x[x >= 0], minlength=bins)


def _pairs(f: Any, i: Inputs, o: Options) -> dict[str, Tensor]:
    words = -(-o["num_local_experts"] // 32) * 32
    f.__globals__.update(BitmatrixMetadata=SimpleNamespace, torch=_WithCounts())
    made = f(i["topk_ids"], SimpleNamespace(shape=(len(i["topk_ids"]), words)))
    flat = i["topk_ids"].flatten()
    weights = i["topk_weights"].flatten().to(torch.bfloat16).masked_fill(flat == -1, -1.0)
    gathered = made.col_sorted_indx.long()
    return {
        "gate_scal": weights[gathered],
        "expt_hist": made.col_sum,
        "gather_indx": gathered.to(torch.int32),
        "scatter_indx": made.row_sorted_indx.to(torch.int32),
    }


def _humming(f: Any, i: Inputs, o: Options) -> dict[str, Tensor]:
    _only(not o["interleave"])
    packed, scale, residual = f(i["weight"], i["raw_scale"], o["max_range"], interleave=False)
    return {"out": packed, "out_scale": scale, "residual": residual}


def _fp4(f: Any, i: Inputs, o: Options) -> Tensor:
    _only((o["out_dtype"] or torch.bfloat16) is torch.bfloat16)
    return f(i["a"], i["b"], i["b_descale"], i.get("alpha"))  # type: ignore[no-any-return]


def _blocks(f: Any, i: Inputs, o: Options) -> Tensor:
    """Keys one behind the other in place of pages."""
    _only(i["k"].shape[2:] == (128, 128) and o["v_global_scale"] is None)
    used = i["seqused_k"].tolist()
    k, v = (
        torch.cat([
            i[name][i["page_table"][b].long()].transpose(1, 2).flatten(0, 1)[:count] for b, count in enumerate(used)
        ])
        for name in "kv"
    )  # fmt: skip  # one row of keys
    ends = torch.tensor([0, *torch.tensor(used).cumsum(0).tolist()])
    return f(i["q"], k, v, i["q2k_indices"], i["cu_seqlens_q"], ends, o["causal"], o["softmax_scale"])  # type: ignore[no-any-return]


def _scale_of(f: Any, i: Inputs, o: Options) -> Tensor:
    f.__globals__.update(nvfp4_e4m3_max=lambda config: config, FLOAT4_E2M1_MAX=6.0)
    return f(i["x"], False, None, float(o["e4m3_max"]))  # type: ignore[no-any-return]


TRACE, FUSED = "flashinfer/trace/templates", "vllm/model_executor/layers/fused_moe"
PEERS = (
    Peer(f"{TRACE}/activation.py", "_silu_and_mul_reference", "silu_and_mul", _gated),
    Peer(f"{TRACE}/activation.py", "_gelu_and_mul_reference", "gelu_and_mul", lambda f, i, o: f(i["x"])),
    Peer(f"{TRACE}/activation.py", "_gelu_tanh_and_mul_reference", "gelu_tanh_and_mul", lambda f, i, o: f(i["x"])),
    Peer(f"{TRACE}/norm.py", "_rmsnorm_quant_reference", "rmsnorm_quant",
         lambda f, i, o: _epsilon(f, i, o, "x", "weight", "scale")),
    Peer(f"{TRACE}/norm.py", "_fused_add_rmsnorm_quant_reference", "fused_add_rmsnorm_quant",
         lambda f, i, o: _epsilon(f, i, o, "x", "residual", "weight", "scale")),
    Peer(f"{TRACE}/norm.py", "_layernorm_quant_reference", "layernorm_quant",
         lambda f, i, o: _epsilon(f, i, o, "x", "gamma", "beta", "scale")),
    Peer(f"{TRACE}/moe.py", "_hash_topk_reference", "hash_topk",
         lambda f, i, o: f(i["logits"], i["input_ids"], i["tid2eid"], **o)),
    Peer(f"{TRACE}/cascade.py", "_merge_state_reference", "merge_state",
         lambda f, i, o: f(i["v_a"], i["s_a"], i["v_b"], i["s_b"])),
    Peer(f"{TRACE}/gemm.py", "_mm_bf16_fp4_cudnn_reference", "mm_bf16_fp4", _fp4),
    Peer(f"{TRACE}/msa.py", "_msa_sparse_attention_reference", "msa_sparse_attention", _blocks),
    Peer("flashinfer/quantization/nvfp4_quantization_utils.py", "make_nvfp4_global_scale", "make_nvfp4_global_scale",
         _scale_of),
    Peer("flashinfer/fused_moe/prepare.py", "preprocess_moe_weights_for_sm90_mixed_gemm_humming",
         "preprocess_moe_weights_for_sm90_mixed_gemm_humming", _humming),
    Peer("flashinfer/fused_moe/prepare.py", "interleave_moe_scales_for_sm90_mixed_gemm",
         "interleave_moe_scales_for_sm90_mixed_gemm", lambda f, i, o: f(i["scale"], o["group_size"])),
    Peer("triton_kernels/tensor_details/bitmatrix.py", "make_bitmatrix_metadata_torch", "make_routing_data", _pairs),
    Peer(f"{FUSED}/cpu_fused_moe.py", "_swigluoai_forward_native", "swigluoai_and_mul",
         lambda f, i, o: f(i["x"], o["alpha"], o["limit"])),
    Peer(f"{FUSED}/router/grouped_topk_router.py", "grouped_topk", "grouped_topk", _grouped),
    Peer("vllm/model_executor/models/gemma4.py", "gemma4_routing_function_torch", "gemma4_routing_function_torch",
         lambda f, i, o: f(i["logits"], o["top_k"], i["per_expert_scale"])),
    Peer("vllm/model_executor/models/phimoe.py", "phimoe_routing_function", "phimoe_routing_function",
         lambda f, i, o: f(i["gating_output"], i["gating_output"], 2, False)),
    Peer("vllm/model_executor/layers/quantization/utils/int8_utils.py", "block_dequant", "block_dequant",
         lambda f, i, o: f(i["x_q_block"], i["x_s"], [o["block_n"], o["block_k"]])),
)  # fmt: skip  # a table, a function a row
"""The functions; ``vllm`` stands for its wheel, ``triton_kernels`` for what vLLM's wheel has beside it."""

SAID: Mapping[str, str] = {
    "triton_kernels make_bitmatrix_metadata_torch": "peer wrong: it numbers the pairs that have an expert "
    "alone, its kernel all of them; they differ where one has none",
    "vllm _swigluoai_forward_native": "peer's reference is not its kernel: it rounds every operation to 16 bits",
    "flashinfer _layernorm_quant_reference": "peer's reference is not its kernel, which rounds the norm to bfloat16 "
    "before the cast: codes beside a midpoint differ",
    "flashinfer _merge_state_reference": "peer wrong: it asks for the dtype of a tensor that it has raised to float32, "
    "and returns float32 for 16 bits",
}
"""Of a function that is refused on some case: what is wrong, and with whom."""
MENDED = {
    "vllm phimoe_routing_function": "ours was wrong and is mended: a logit of 0 beside a largest of 0 was left out, "
    "and the weight was infinite",
}
"""Of a function that agrees: what was wrong with ours when it was first compared."""


@dataclass(frozen=True)
class Row:
    """What was found of a function; ``first`` is the first refusal, ``why`` it was not asked at all."""

    peer: Peer
    agreed: int = 0
    asked: int = 0
    first: str = ""
    why: str = ""


def _narrow(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype is torch.float64 else x


def compared(peer: Peer, sites: list[Path], most: int = MOST) -> Row:
    """Judge a function on the quick cases of its contract that it says something about."""
    path = next((site / peer.file for site in sites if (site / peer.file).is_file()), None)
    if path is None:
        return Row(peer, why=f"{peer.file} is in none of the folders")
    function, contract, agreed, asked, first = taken(path, peer.name), get(peer.contract), 0, 0, ""
    for case in profiles.cases(peer.contract, "quick"):
        if asked == most:
            break
        inputs, options = case.inputs(), case.call_options()
        chosen = {spec.name: spec.default for spec in contract.options} | options
        try:
            made = peer.call(function, {name: x.clone() for name, x in inputs.items()}, chosen)
        except NotImplementedError:
            continue
        asked += 1
        names = contract.returns
        outputs = made if isinstance(made, Tensor | dict) else dict(zip(names, made, strict=True))
        if isinstance(outputs, Tensor) and names != ("out",):
            right = contract.reference(inputs, **options) if len(names) > 1 else {}
            outputs = {names[0]: outputs} | {n: _narrow(right[n]) for n in names[1:]}
        try:
            verdict = contract.judge(inputs, outputs, arch="cpu", **options)
            refused = verdict.status.is_failure
            why = f"{case}: {verdict.reason or verdict.summary}"
        except OracleError as error:  # an output of another shape or dtype is a refusal too
            refused, why = True, f"{case}: {error}"
        agreed += not refused
        first = first or (why if refused else "")
    return Row(peer, agreed, asked, first)


def main(sites: list[Path]) -> int:
    wrong = 0
    print("| peer's reference | contract | cases | found |\n|:--|:--|--:|:--|")
    for peer in PEERS:
        row = compared(peer, sites)
        said = SAID.get(peer.key, "")
        found = row.why or (
            f"agrees; {MENDED[peer.key]}"
            if peer.key in MENDED and not row.first
            else "agrees"
            if not row.first
            else said or f"REFUSED {row.first}"
        )
        wrong += not row.why and (bool(row.first) != bool(said) or not row.asked)
        print(f"| {peer.key} | {peer.contract} | {row.agreed} of {row.asked} | {found[:400]} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main([Path(text) for text in sys.argv[1:]]))
