"""What the layer passes to FlashInfer, DeepGEMM and vLLM, against the files of pinned releases.

Signatures and claims of capabilities are read off the source, schemas off the compiled module. FlashInfer's own checks
are asked on tensors without memory, in a process that imports it. Without the wheels a test says UNSUPPORTED, and the
command that runs it with them.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from kernels import layout
from kernels.backends.deep_gemm import SYMBOLS
from kernels.backends.flashinfer_mx import BACKENDS, NAMES, OF_TWELVE, ROUTINES
from kernels.config import Config
from kernels.platform import Machine
from kernels.support import BLACKWELL, MX_LAYERS
from tests.support.fake_blackwell import CLAIMS, INDEXERS, LAYERS, OF_DEEP_GEMM, OF_VLLM, QUANTISERS, Libraries, grid
from tests.support.wheels import DEEP_GEMM, FLASHINFER, VLLM, installed, search_path

PRODUCTS = tuple(dict.fromkeys(routine for op, routine in ROUTINES.items() if op not in MX_LAYERS))
MORE = (*QUANTISERS, *LAYERS, *OF_TWELVE.values())
"""Routines of FlashInfer beside its products."""


@cache
def functions(package: Path) -> dict[str, ast.FunctionDef]:
    """The functions of FlashInfer by name: its products, quantisers and fused layers."""
    homes = ("gemm/*.py", "quantization/*.py", "fused_moe/core.py", "grouped_mm/cute_sm120_fp8_groupwise/core.py")
    trees = [ast.parse(path.read_bytes()) for home in homes for path in sorted(package.glob(home))]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}


def named(arguments: ast.arguments) -> list[str]:
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def capabilities(function: ast.FunctionDef) -> set[int]:
    """What ``supported_compute_capability([...])`` above a function says."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "supported_compute_capability":
            return set(ast.literal_eval(decorator.args[0]))
    return set()


def claims(of: dict[str, ast.FunctionDef], routine: str) -> dict[str, set[int]]:
    """Capabilities by backend, as ``backend_requirement({...}, common_check=...)`` above a routine says."""
    (required,) = (
        decorator
        for decorator in of[routine].decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "backend_requirement"
    )
    checks = required.args[0]
    assert isinstance(checks, ast.Dict)
    pairs = zip(checks.keys, checks.values, strict=True)
    found = {
        ast.literal_eval(key): capabilities(of[ast.unparse(check)])
        for key, check in pairs
        if key is not None and ast.unparse(check) in of  # experimental ones stand elsewhere
    }
    common = next(word.value for word in required.keywords if word.arg == "common_check")
    return found or {"": capabilities(of[ast.unparse(common)])}


@pytest.mark.whole("a look into a file that is parsed once")
@pytest.mark.parametrize("routine", [*PRODUCTS, *MORE])
@pytest.mark.parametrize("pin", FLASHINFER)
def test_parameters_of_flashinfer(pin: str, routine: str) -> None:
    """The fake, whose calls are judged, has the names and the order of the newest release, and of its products the
    defaults; an older one lacks some."""
    theirs = functions(installed(pin) / "flashinfer")[routine].args
    ours = inspect.signature(getattr(Libraries, routine)).parameters
    names = [name for name in ours if name != "self"]
    if pin != FLASHINFER[0]:
        assert [name for name in names if name in named(theirs)] == named(theirs)
        return
    assert names == named(theirs)
    if routine in PRODUCTS:
        defaults = [ast.unparse(value) for value in theirs.defaults]
        spoken = [p.default for p in ours.values() if p.default is not inspect.Parameter.empty]
        assert [str(value) if not isinstance(value, str) else repr(value) for value in spoken] == defaults


@pytest.mark.whole("a look into a file that is parsed once")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pin", FLASHINFER)
def test_no_arch_is_planned_that_flashinfer_does_not_claim(pin: str, backend: str) -> None:
    of = functions(installed(pin) / "flashinfer")
    for op, routine in ROUTINES.items():
        if op in MX_LAYERS or not BACKENDS[backend].declares(op):
            continue
        claimed = claims(of, routine)
        capable = claimed[NAMES[backend] if "" not in claimed else ""]
        for sm in BLACKWELL:
            machine, switches = Machine.described(f"sm{sm}"), Config(split_k=True)
            problems = [p for p in grid(op) if BACKENDS[backend].kernel(p, machine).startswith(routine)]
            planned = any(BACKENDS[backend].why_not(p, machine, switches) is None for p in problems)
            assert not planned or sm in capable, (op, sm)
            named_here = "" if "" in claimed else NAMES[backend]
            assert not planned or sm in CLAIMS[routine, named_here], "the fake claims less"


@pytest.mark.parametrize("pin", FLASHINFER)
def test_what_the_plan_admits_flashinfer_admits(pin: str) -> None:
    """Its own checks of every planned call, on tensors without memory; they refuse some that the plan refuses (the
    twin). Its orders of the rows of a weight are the layer's, index by index."""
    environment = {**os.environ, "PYTHONPATH": search_path(pin)}
    command = [sys.executable, "-m", "tests.support.flashinfer_checks"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    record = json.loads(ran.stdout.strip().splitlines()[-1])
    asked, refusals = record["admitted"]
    assert asked > 2000 and refusals == []
    refused, kept_out = record["refused"]
    assert refused == len(kept_out) > 2
    for key, rows in record["rows"].items():
        first, _, last = key.partition("-")
        ours = layout.gated_rows(int(last)) if first == "gated" else layout.shuffled_rows(int(first), int(last))
        assert rows == ours.tolist(), key


def test_a_renamed_parameter_is_noticed(tmp_path: Path) -> None:
    """The negative test: another name, another claim."""
    gemm = tmp_path / "gemm"
    gemm.mkdir()
    (gemm / "one.py").write_text(
        "@supported_compute_capability([100])\ndef _check(a): pass\n"
        "@backend_requirement({'cutlass': _check}, common_check=_check)\ndef mm_mxfp8(x, b): pass\n"
        "@backend_requirement({}, common_check=_check)\ndef grouped(a): pass\n"
    )
    of = functions(tmp_path)
    assert named(of["mm_mxfp8"].args) == ["x", "b"]
    assert claims(of, "mm_mxfp8") == {"cutlass": {100}} and claims(of, "grouped") == {"": {100}}


@pytest.mark.parametrize("pin", DEEP_GEMM)
def test_names_of_deep_gemm(pin: str) -> None:
    """Every routine has a name that the layer knows, but for those that a row refuses of some releases; of mixed
    products a fake has the parameters of the newest release, of which an older one lacks the last."""
    package = installed(pin) / "deep_gemm"
    tree = ast.parse((package / "__init__.py").read_bytes())
    defined = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    have = set(defined)
    have |= {
        t.id for node in ast.walk(tree) if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)
    }
    lacks = {name for name, names in SYMBOLS.items() if not have & set(names)}
    assert lacks <= {"skip_head_mid", "mqa_logits", "paged_mqa_logits"}
    for name in OF_DEEP_GEMM:
        ours = [p for p in inspect.signature(getattr(Libraries, name)).parameters if p != "self"]
        theirs = named(defined[name].args)
        assert ours[: len(theirs)] == theirs and set(ours[len(theirs) :]) <= {"epilogue"}
    for name in (*INDEXERS, "get_paged_mqa_logits_metadata"):
        if name in defined:
            ours = [p for p in inspect.signature(getattr(Libraries, name)).parameters if p != "self"]
            assert ours == named(defined[name].args)
    compiled = b"".join(path.read_bytes() for path in package.glob("_C*.so"))
    schemas = set(re.findall(rb"([a-z0-9_]+)\([A-Z][^\n\x00]*\) -> ", compiled))
    assert {b"fp8_fp4_gemm_nt", b"m_grouped_fp8_fp4_gemm_nt_masked"} <= schemas


def test_schemas_of_vllm() -> None:
    """The fakes of its operators have the parameters of the schemas in its compiled module."""
    package = installed(VLLM) / "vllm"
    compiled = b"".join(path.read_bytes() for path in package.glob("_C*.so"))
    for name in (*OF_VLLM, "scaled_fp4_quant.out"):
        (schema,) = set(re.findall(re.escape(name.encode()) + rb"\(Tensor[^)]*(?:\([a-z]!\)[^)]*)*\) -> ", compiled))
        theirs = re.findall(rb"\w+(?=\s*[,)](?!\w))", re.sub(rb"\([a-z]!\)", b"", schema.partition(b"(")[2]))
        ours = [p for p in inspect.signature(getattr(Libraries, name.partition(".")[0])).parameters if p != "self"]
        assert [x.decode() for x in theirs] == ours or name == "cutlass_scaled_mm", schema


REFUSED = (
    # a file of FlashInfer, and the words by which a row of the plan refuses what is there
    ("grouped_mm/core.py", "2D swizzled 128x4: shape (cum_m, k // block_size)"),
    ("grouped_mm/core.py", "Scaling factor for the output, shape ``(1,)``."),
    ("fused_moe/cute_dsl/fused_moe.py", "interleaved 64-row up/gate pair"),
    ("fused_moe/cute_dsl/blackwell_sm12x/moe_micro_kernel.py", "Scatter: bf16x2 atomic add"),
    ("fused_moe/core.py", "FP4 weights are row-shuffled"),
    ("gemm/gemm_base.py", "a.shape[1] must be >= 256 in TRTLLM"),
    ("gemm/gemm_base.py", "DtypeTrtllmGen.E4m3,\n            DtypeTrtllmGen.Bfloat16,"),
)


@pytest.mark.whole("a look into a file")
@pytest.mark.parametrize(("path", "words"), REFUSED)
def test_why_a_row_refuses(path: str, words: str) -> None:
    """What a row of the plan says of a library stands in the newest release (the twin: no other words do)."""
    text = (installed(FLASHINFER[0]) / "flashinfer" / path).read_text()
    assert words in text and words + " never" not in text


@pytest.mark.parametrize("pin", DEEP_GEMM)
def test_why_a_release_of_deep_gemm_is_refused(pin: str) -> None:
    """The newest has other logits, which begin at a query's first key, of no named dtype; an older one has ours (the
    twin)."""
    package, newest = installed(pin) / "deep_gemm", pin == DEEP_GEMM[0]
    kernel = (package / "include/deep_gemm/impls/sm90_fp8_mqa_logits.cuh").read_text()
    assert ("kv_offset + v_0_offset - seq_k_start[i]] =" in kernel and "kIsCompressedLogits" not in kernel) is newest
    compiled = b"".join(path.read_bytes() for path in package.glob("_C*.so"))
    assert (b"max_seqlen_k > 0" in compiled) is newest
    assert (b"arch_major == 12 or is_varlen == (arch_major == 10)" in compiled) is newest
    for name in (b"mqa_logits", b"paged_mqa_logits"):
        assert (re.search(rb"\bfp8_" + name + rb"\(Tensor q", compiled) is None) is newest
        (schema,) = set(re.findall(rb"\bfp8_fp4_" + name + rb"\(Tensor q[^\x00]*?\) -> Tensor", compiled))
        assert (b"logits_dtype" not in schema) is newest


def test_torch_counts_the_scales_of_mxfp4_by_half() -> None:
    """Its fake function refuses as many scales as two codes a byte have, which is why no plan takes its product; the
    scales of NVFP4 it counts rightly (the twin)."""
    functional = torch.nn.functional
    if not hasattr(functional, "scaled_mm"):
        pytest.skip(f"torch {torch.__version__} has no scaled_mm of recipes")
    tiles, refused = functional.SwizzleType.SWIZZLE_32_4_4, {}
    for kind, width, dtype in (("BlockWise1x32", 32, torch.float8_e8m0fnu), ("BlockWise1x16", 16, torch.float8_e4m3fn)):
        a, b = (torch.empty(128, 128, dtype=torch.float4_e2m1fn_x2, device="meta") for _ in "ab")
        scales = [torch.empty(128 * 256 // width, dtype=dtype, device="meta")]
        recipe = [getattr(functional.ScalingType, kind)]
        try:
            functional.scaled_mm(a, b.t(), scales, recipe, scales, recipe, swizzle_a=[tiles], swizzle_b=[tiles])
            refused[width] = False
        except (RuntimeError, ValueError):  # its refusal
            refused[width] = True
    assert refused == {32: True, 16: False}


@pytest.mark.parametrize(("name", "first"), [("_scaled_mm", 2), ("_scaled_grouped_mm", 2)])
def test_parameters_of_torchs_operators(name: str, first: int) -> None:
    """Behind both matrices, which are passed by their places."""
    theirs = [argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments]
    ours = [p for p in inspect.signature(getattr(Libraries, name)).parameters if p != "self"]
    assert ours[first:] == theirs[first:] and len(ours) > 4


@pytest.mark.parametrize("name", ["scaled_mm", "scaled_grouped_mm"])
def test_parameters_of_torch(name: str) -> None:
    theirs = getattr(torch.nn.functional, name, None)
    if theirs is None:
        pytest.skip(f"torch {torch.__version__} has no {name} of recipes")
    ours = [p for p in inspect.signature(getattr(Libraries, name)).parameters if p != "self"]
    assert ours == list(inspect.signature(theirs).parameters)
