"""Fused quantisers on a GPU: every library's judged case by case, ours beside a copy of the same bytes and theirs.

    python tests/hardware/fused_quantisers.py judge SUBJECT ... --out DIR
    python tests/hardware/fused_quantisers.py time --out DIR

Subjects are ``triton`` (this package), ``vllm`` (its compiled operators: ``FP8_KERNELS_VLLM_C`` names the library that
holds ``silu_and_mul_quant`` and the norms), ``sgl`` (``FP8_KERNELS_SGL_OPS``), ``flashinfer``. A call that a library
does not document is not offered. Judging takes the quick profile on the CPU; a failure is printed with its explanation.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import fused, routes
from kernels.subjects import CONTRACTS
from oracle.diagnosis.explain import explain_verdict
from oracle.routines import cases, get, profiles

Inputs, Options = Mapping[str, Tensor], Mapping[str, Any]
FP8 = torch.float8_e4m3fn
ROWS, COLUMNS = 4096, 7168


class NotOffered(Exception):
    """A call that the library's documentation excludes."""


def offered(holds: object, what: str) -> None:
    if not holds:
        raise NotOffered(what)


def _empty(*shape: int, dtype: torch.dtype = FP8) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


# --- this package ---------------------------------------------------------------------------------------------------


def ours(contract: str, inputs: Inputs, options: Options) -> dict[str, Tensor]:
    with routes.only("triton"):
        made: Any = CONTRACTS[contract][1](inputs, options)
        return made


# --- vLLM -----------------------------------------------------------------------------------------------------------


def vllm(contract: str, inputs: Inputs, options: Options) -> dict[str, Tensor]:
    op, x = getattr(torch.ops._C, contract), inputs["x"]
    offered(x.dtype != torch.float32, "bf16 or f16")
    if contract == "silu_and_mul_quant":
        offered(options.get("rounding", "each") == "each", "two roundings")
        q = _empty(x.shape[0], x.shape[1] // 2)
        op(q, x, inputs["scale"])
        return {"q": q}
    if contract == "silu_and_mul_per_block_quant":
        offered(options.get("rounding", "none") == "none", "float32 throughout")
        q, columns = _empty(x.shape[0], x.shape[1] // 2), options["is_scale_transposed"]
        scale = _scales(x.shape[0], q.shape[1] // options["group_size"], columns)
        op(q, x, scale, options["group_size"], inputs.get("scale_ub"), columns)
        return {"q": q, "scale": scale}
    if contract == "persistent_masked_m_silu_mul_quant":
        q = _empty(*x.shape[:2], x.shape[2] // 2)
        scale = _empty(*x.shape[:2], q.shape[2] // 128, dtype=torch.float32)
        op(x, inputs["masked_m"], q, scale, False)
        return {"q": q, "scale": scale}
    weight, epsilon, q = inputs["weight"], options["epsilon"], _empty(*x.shape)
    residual = inputs["residual"].clone() if "residual" in inputs else None
    beside = {"residual": x.clone() if residual is None else residual}
    if contract == "rms_norm_static_fp8_quant":
        op(q, x, weight, inputs["scale"], epsilon)
        return {"q": q}
    if contract == "fused_add_rms_norm_static_fp8_quant":
        op(q, x, residual, weight, inputs["scale"], epsilon)
        return {"q": q, **beside}
    if contract == "rms_norm_dynamic_per_token_quant":
        scale = _empty(x.shape[0], 1, dtype=torch.float32)
        op(q, x, weight, scale, epsilon, inputs.get("scale_ub"), residual)
        return {"q": q, "scale": scale, **beside}
    columns = options["is_scale_transposed"]
    scale = _scales(x.shape[0], x.shape[1] // options["group_size"], columns)
    op(q, x, weight, scale, epsilon, inputs.get("scale_ub"), residual, options["group_size"], columns)
    return {"q": q, "scale": scale, **beside}


def _scales(rows: int, groups: int, columns: bool) -> Tensor:
    return _empty(groups, rows, dtype=torch.float32).t() if columns else _empty(rows, groups, dtype=torch.float32)


# --- SGLang ---------------------------------------------------------------------------------------------------------


def sgl(contract: str, inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """v2 of the group quantiser: plain rows with float32 scales; fused and masked with packed powers of two only."""
    x, op = inputs["x"], torch.ops.sgl_kernel.sgl_per_token_group_quant_8bit_v2
    offered(x.dtype != torch.float32, "bf16 or f16")
    group = options["group_size"]
    if contract == "per_token_group_quant_fp8":
        offered(group in (16, 32, 64, 128) and not options["use_ue8m0"], "groups of 16 to 128, float32 scales")
        offered(not options.get("column_major_scales"), "row-major scales")
        q, scale = _empty(*x.shape), _empty(x.shape[0], x.shape[1] // group, dtype=torch.float32)
        op(x, q, scale, group, 1e-10, -448.0, 448.0, False, False, None)
        return {"q": q, "scale": scale}
    experts, tokens, width = x.shape[0], x.shape[1], x.shape[2] // 2
    groups = width // group
    offered(options["use_ue8m0"] and options.get("rounding", "each") == "each", "powers of two, two roundings")
    offered(groups % 16 == 0, "groups of a row in multiples of 16")
    lead = tokens + -tokens % 4
    packed = torch.zeros(experts, groups // 4, lead, dtype=torch.int32, device="cuda")
    q = _empty(experts, tokens, width)
    op(x, q, packed[..., :tokens].mT, group, 1e-10, -448.0, 448.0, True, True, inputs["masked_m"])
    byte = packed[..., :tokens].mT.contiguous().view(torch.uint8).reshape(experts, tokens, groups)
    return {"q": q, "scale": (byte.int() << 23).view(torch.float32)}


# --- FlashInfer -----------------------------------------------------------------------------------------------------


def flashinfer(contract: str, inputs: Inputs, options: Options) -> dict[str, Tensor]:
    if contract in ("rope_quantize_fp8", "mla_rope_quantize_fp8"):
        from flashinfer import rope

        names = ("q_rope", "k_rope", "q_nope", "k_nope")
        operands = *(inputs[n] for n in names), inputs["cos_sin_cache"], inputs["pos_ids"]
        made = getattr(rope, contract)(*operands, **options)
        return dict(zip(names, made, strict=True))
    from flashinfer import norm

    x = inputs["x"]
    offered(x.dtype != torch.float32, "bf16 or f16")
    q = _empty(*x.shape)
    if contract == "rmsnorm_quant":
        norm.rmsnorm_quant(q, x, inputs["weight"], inputs["scale"], options["epsilon"])
        return {"q": q}
    residual = inputs["residual"].clone()
    norm.fused_add_rmsnorm_quant(q, x, residual, inputs["weight"], inputs["scale"], options["epsilon"])
    return {"q": q, "residual": residual}


NORMS = ("rms_norm_static_fp8_quant", "fused_add_rms_norm_static_fp8_quant", "rms_norm_dynamic_per_token_quant",
         "rms_norm_per_block_quant")  # fmt: skip
GATED = ("silu_and_mul_quant", "silu_and_mul_per_block_quant", "persistent_masked_m_silu_mul_quant")
FLASHINFER = ("rmsnorm_quant", "fused_add_rmsnorm_quant", "rope_quantize_fp8", "mla_rope_quantize_fp8")
SUBJECTS: Mapping[str, tuple[Callable[[str, Inputs, Options], dict[str, Tensor]], tuple[str, ...]]] = {
    "triton": (ours, (*GATED, "silu_and_mul_masked_post_quant", *NORMS, *FLASHINFER)),
    "vllm": (vllm, (*GATED, *NORMS)),
    "sgl": (sgl, ("per_token_group_quant_fp8", "silu_and_mul_masked_post_quant")),
    "flashinfer": (flashinfer, FLASHINFER),
}
EXTRA = {
    # what the profile lacks: packed scales need 16 groups a row
    ("sgl", "silu_and_mul_masked_post_quant"): tuple(
        f"silu_and_mul_masked_post_quant/bf16-e4m3/1x128/e=3,t=9,i=512/group=32,ue8m0=1/family={f}/seed=1"
        for f in ("randn", "ties", "amax", "special", "nan", "outlier")
    ),
}


def judge(names: list[str], out: Path) -> int:
    found = {}
    for asked in names:
        name, _, only = asked.partition(":")
        run, contracts = SUBJECTS[name]
        for contract in (only,) if only else contracts:
            record = _judged(name, run, contract)
            found[f"{name}/{contract}"] = record
            print(f"{name} {contract}: {record['statuses']}, {record['not_offered']} not offered", flush=True)
            for said in record["failures"][:4]:
                print(f"    {said}"[:700], flush=True)
    (out / f"judged-{names[0].replace(':', '-')}.json").write_text(json.dumps(found, indent=1))
    return 0


def _judged(name: str, run: Callable[[str, Inputs, Options], dict[str, Tensor]], contract: str) -> dict[str, Any]:
    extra = [cases.parse(text) for text in EXTRA.get((name, contract), ())]
    statuses: collections.Counter[str] = collections.Counter()
    failures, left = [], 0
    for case in [*profiles.cases(contract, "quick"), *extra]:
        inputs, options = case.inputs(), case.call_options()
        try:
            made = run(contract, {n: t.cuda() for n, t in inputs.items()}, options)
            torch.cuda.synchronize()
        except NotOffered:
            left += 1
            continue
        except Exception as error:  # what foreign code raises is a result
            statuses["CRASHED"] += 1
            failures.append(f"{case}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        output = {n: _on_host(t) for n, t in made.items()}
        verdict = get(contract).judge(inputs, output, **options)
        statuses[str(verdict.status)] += 1
        if verdict.status.is_failure:
            if len(failures) < 6:
                arguments = {"arch": "sm90", "numerics": None, **options}
                verdict = explain_verdict(verdict, get(contract), inputs, output, **arguments)
            failures.append(f"{case}: {verdict.summary}; explained by: {', '.join(verdict.explained_by) or 'nothing'}")
    return {"statuses": dict(statuses), "not_offered": left, "failures": failures}


def _on_host(x: Tensor) -> Tensor:
    """On the CPU with the strides it had."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


# --- time -----------------------------------------------------------------------------------------------------------


def measure(out: Path) -> int:
    """Device time of a call at ``ROWS x COLUMNS`` by replays of graphs of ten, in turns, and its share of the rate of a
    copy of as many bytes."""
    from hardware.timings import device_microseconds, replay_of

    generator = torch.Generator(device="cuda").manual_seed(1)
    wide = torch.randn(ROWS, 2 * COLUMNS, device="cuda", generator=generator).bfloat16()
    x, residual = wide[:, :COLUMNS].contiguous(), wide[:, COLUMNS:].contiguous()
    weight, scale = x[0].contiguous(), torch.full((1,), 0.05, device="cuda")
    codes = ROWS * COLUMNS
    block = {"group_size": 128, "is_scale_transposed": False, "epsilon": 1e-6}
    have = {name for name in ("vllm", "flashinfer") if _present(name)}
    table: dict[str, tuple[int, dict[str, Callable[[], object]]]] = {
        "silu_and_mul_per_block_quant": (
            5 * codes + codes // 32,
            {"ours": lambda: fused.silu_and_mul_per_block_quant(wide),
             "vllm": lambda: vllm("silu_and_mul_per_block_quant", {"x": wide}, block)},
        ),
        "silu_and_mul_quant": (
            5 * codes,
            {"ours": lambda: fused.silu_and_mul_quant(wide, scale),
             "vllm": lambda: vllm("silu_and_mul_quant", {"x": wide, "scale": scale}, {})},
        ),
        "rms_norm_per_block_quant": (
            3 * codes + codes // 32,
            {"ours": lambda: fused.rms_norm_per_block_quant(x, weight),
             "vllm": lambda: vllm("rms_norm_per_block_quant", {"x": x, "weight": weight}, block)},
        ),
        "rms_norm_per_block_quant + residual": (
            7 * codes + codes // 32,
            {"ours": lambda: fused.rms_norm_per_block_quant(x, weight, residual=residual)},
        ),
        "rms_norm_static_fp8_quant": (
            3 * codes,
            {"ours": lambda: fused.rms_norm_static_fp8_quant(x, weight, scale),
             "vllm": lambda: vllm("rms_norm_static_fp8_quant", {"x": x, "weight": weight, "scale": scale}, block),
             "flashinfer": lambda: flashinfer("rmsnorm_quant", {"x": x, "weight": weight, "scale": scale}, block)},
        ),
        "rms_norm_dynamic_per_token_quant": (
            3 * codes,
            {"ours": lambda: fused.rms_norm_dynamic_per_token_quant(x, weight),
             "vllm": lambda: vllm("rms_norm_dynamic_per_token_quant", {"x": x, "weight": weight}, block)},
        ),
    }  # fmt: skip
    measured = {}
    for name, (bytes_moved, calls) in table.items():
        source = torch.empty(bytes_moved // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        chosen = {"copy": lambda source=source, target=target: target.copy_(source)}
        chosen |= {who: call for who, call in calls.items() if who == "ours" or who in have}
        replays = {who: replay_of(lambda _, call=call: call()) for who, call in chosen.items()}
        times = {who: t / 10 for who, t in device_microseconds(replays, "cuda", inner=3).items()}
        rates = {who: round(times["copy"] / t, 3) for who, t in times.items()}
        measured[name] = {"bytes": bytes_moved, "microseconds": times, "share_of_copy": rates}
        print(f"{name}: {times} us, of the copy's rate {rates}", flush=True)
    measured["sweep"] = _swept(wide, x, weight)
    (out / "timed.json").write_text(json.dumps(measured, indent=1))
    return 0


def _swept(wide: Tensor, x: Tensor, weight: Tensor) -> dict[str, float]:
    """Device time of our two kernels at other extents of a program, microseconds."""
    from hardware.timings import device_microseconds, replay_of

    from kernels.backends import triton_fused as own

    kept, replays = (own.ELEMENTS, own.WARPS, own.PART, own.PART_WARPS), {}
    for size, warps in ((1024, 2), (1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8)):
        own.ELEMENTS, own.WARPS, own.PART, own.PART_WARPS = size, warps, size, warps
        calls = {
            f"gated {size} by {warps} warps": lambda: fused.silu_and_mul_per_block_quant(wide),
            f"norm {size} by {warps} warps": lambda: fused.rms_norm_per_block_quant(x, weight),
        }
        replays |= {name: replay_of(lambda _, call=call: call()) for name, call in calls.items()}
    own.ELEMENTS, own.WARPS, own.PART, own.PART_WARPS = kept
    found = {name: round(t / 10, 2) for name, t in device_microseconds(replays, "cuda", inner=3).items()}
    for name, t in found.items():
        print(f"{name}: {t} us", flush=True)
    return found


def _present(name: str) -> bool:
    if name == "vllm":
        return hasattr(torch.ops._C, "silu_and_mul_quant")
    try:
        import flashinfer.norm  # noqa: F401
    except ImportError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("judge", "time"))
    parser.add_argument("names", nargs="*", metavar="SUBJECT", help=f"of {', '.join(SUBJECTS)}; NAME:CONTRACT for one")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for variable in ("FP8_KERNELS_VLLM_C", "FP8_KERNELS_SGL_OPS"):
        if path := os.environ.get(variable):
            torch.ops.load_library(path)
    begun = time.perf_counter()
    status = measure(arguments.out) if arguments.what == "time" else judge(arguments.names, arguments.out)
    print(f"{arguments.what} {' '.join(arguments.names)}: {time.perf_counter() - begun:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
