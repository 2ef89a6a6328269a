"""The examples of ``docs/how-to/gate.md`` for other projects' tools: Triton's with Triton where it is installed, a
harness's with a library of ours, Helion's and flashinfer-bench's with stand-ins of the same parameters, and with the
tool where it is installed (``pip install --no-deps helion flashinfer-bench``, and pydantic).
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from oracle.routines import cases
from tests.support import tuning_tools, watched_kernels

GEMM = "fp8_gemm_nt"
CASE = f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=16,n=128,k=256/family=randn/seed=1"
TUNED = """
import torch, triton, triton.language as tl
def check(x): return bool((x == 3).all())
exec({block!r})
def bench(call, quantiles):
    call()
    return [1.0, 1.0, 1.0]
@triton.autotune([triton.Config({{"V": v}}) for v in (4, 3)], key=[], post_hook={hook}, do_bench=bench)
@triton.jit
def kernel(c_ptr, V: tl.constexpr):
    tl.store(c_ptr + tl.arange(0, 16), tl.full((16,), V, tl.float32))
kernel[(1,)](torch.zeros(16))
print(kernel.best_config.kwargs["V"])
"""


def example(root: Path, heading: str) -> str:
    """The code of a section of the page."""
    section = (root / "docs/how-to/gate.md").read_text().partition(f"\n## {heading}")[2].partition("\n## ")[0]
    return section.partition("```py\n")[2].partition("```")[0]


def outputs() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Inputs of a product, a right output, and one of which an element is wrong."""
    inputs = cases.parse(CASE).inputs()
    right = oracle.reference(GEMM, inputs, out_dtype=torch.bfloat16)
    assert isinstance(right, Tensor)
    return inputs, right, torch.where(torch.arange(right.numel()).view_as(right) == 7, 2 * right + 1, right)


def run(code: str, root: Path) -> list[str]:
    """The lines that a program prints, under Triton's interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    path = root / "build" / "tuned"  # Triton reads the source of a kernel off its file
    path.mkdir(parents=True, exist_ok=True)
    script = path / f"{os.getpid()}.py"
    script.write_text(code)
    try:
        ran = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
        )
    finally:
        script.unlink()
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.splitlines()


@pytest.mark.interpreter
@pytest.mark.turns(4)
class TestTriton:
    """Its autotuner, with a clock of the test's own."""

    @pytest.mark.parametrize(("hook", "chosen"), [("reject", "3"), ("None", "4")])
    def test_a_configuration_is_rejected(self, hook: str, chosen: str, root: Path, tmp_path: Path) -> None:
        """Without the hook the wrong one wins, as it is the first of two of the same speed."""
        pytest.importorskip("triton", reason="Triton is not installed; the tox factor `interpreter` has it")
        block = example(root, "Triton's autotuner")
        assert run(TUNED.format(block=block, hook=hook), root)[-1] == chosen


@pytest.mark.interpreter
@pytest.mark.turns(8)
def test_forty_candidates(root: Path) -> None:
    """Every legal tile, split and order is accepted, and each broken one rejected (about 10 CPU seconds)."""
    pytest.importorskip("triton", reason="Triton is not installed; the tox factor `interpreter` has it")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.gate_table", "--dtype", "float32"]
    ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert ran.returncode == 0 and found["legal"] == [True] * 40 and found["broken"] == [False] * 3
    assert found["outputs"] > 5


SCREENED = """
import torch
import oracle
from oracle.bounds import screen
from oracle.routines import cases

case = cases.parse("fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=2,n=2,k=32/family=randn/seed=1")
inputs = case.inputs()
right = oracle.reference("fp8_gemm_nt", inputs, out_dtype=torch.bfloat16)
wrong = torch.where(torch.arange(4).view_as(right) == 3, 2 * right + 1, right)
asked, known = [], screen._kernels
screen._kernels = lambda x: (asked.append(found := known(x)), found)[1]
for screen.INTERPRETED in (screen.INTERPRETED, 0):
    gates = [oracle.gate("fp8_gemm_nt", arch=arch) for arch in ("cpu", "sm90")]
    answers = [accepts(inputs, out) for accepts in gates for out in (right, wrong)]
    print(answers, sum(one is not None for one in asked), len(asked))
    asked.clear()
"""


@pytest.mark.interpreter
@pytest.mark.turns(4)
def test_the_passes_of_triton_and_of_torch(root: Path) -> None:
    """One answer by Triton's kernels, which the interpreter runs for so few elements, and by torch's operations."""
    pytest.importorskip("triton", reason="Triton is not installed; the tox factor `interpreter` has it")
    *_, by_triton, by_torch = run(SCREENED, root)
    assert by_triton.startswith("[True, False, True, False]") and by_torch.startswith("[True, False, True, False] 0 ")
    used, asked = map(int, by_triton.split()[-2:])
    assert used == asked > 0, "every pass is Triton's"


@pytest.fixture(params=["stand-in", "package"])
def tool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of a tool, of the stand-ins or of the installed package."""
    if request.param == "stand-in":
        for name, module in tuning_tools.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        return lambda name: sys.modules[name]
    return lambda name: pytest.importorskip(
        name, reason=f"{name.partition('.')[0]} is not installed", exc_type=ImportError
    )


class TestHelion:
    """Its autotuner's own comparison calls the function, and takes an AssertionError for a mismatch."""

    def test_a_candidate_is_rejected(self, root: Path, tool: Callable[[str], Any]) -> None:
        provider, settings = tool("helion.autotuner.benchmark_provider"), tool("helion.runtime.settings")
        inputs, right, wrong = outputs()
        names: dict[str, Any] = {"check": oracle.gate(GEMM, arch="cpu").prepared(inputs)}
        exec(example(root, "Helion's accuracy check"), names)
        search = SimpleNamespace(
            settings=settings.Settings(autotune_baseline_accuracy_check_fn=names["admissible"]),
            mutated_arg_indices=(),
            log=SimpleNamespace(warning=lambda *_: None),
            _baseline_output=wrong,
        )
        compare = provider.LocalBenchmarkProvider._validate_against_baseline
        assert [compare(search, None, out, ()) for out in (right, wrong)] == [True, False]


class TestHarness:
    """A test of a library under the fixture of the page, which names another routine there."""

    def test_a_fixture(self, root: Path) -> None:
        gemm = watched_kernels.BINDINGS[1]
        code = example(root, "FlashInfer's fuzz harness").replace('"flashinfer.gemm:bmm_fp8"', "routine")
        names: dict[str, Any] = {"routine": gemm}
        exec(code.replace("@pytest.fixture(autouse=True)\n", ""), names)
        inputs, *_ = outputs()
        operands = (inputs["a"], inputs["a_scale"], inputs["b"], inputs["b_scale"])
        fixture: Iterator[Any] = names["judged"]()
        seen = next(fixture)
        watched_kernels.block_gemm(*operands)
        assert seen.accepted == 1
        with pytest.raises(AssertionError, match="outside the bound"):
            watched_kernels.block_gemm(*operands, config="wrong_scale")
        assert next(fixture, None) is None


class TestFlashinferBench:
    """Its registry chooses the evaluator, which calls a solution of either style."""

    def test_solutions(self, root: Path, tool: Callable[[str], Any]) -> None:
        registry = tool("flashinfer_bench.bench.evaluators.registry")
        data = tool("flashinfer_bench.data")
        Definition, EvaluationStatus = data.Definition, data.EvaluationStatus

        def of(dtype: str, *shape: str) -> dict[str, object]:
            return {"shape": list(shape), "dtype": dtype}

        definition = Definition(
            name="block_gemm",
            op_type="gemm",
            reference="def run(X, XS, W, WS):\n    ...\n",
            axes={"M": {"type": "var"}, **{k: {"type": "const", "value": v} for k, v in AXES.items()}},
            inputs={
                "X": of("float8_e4m3fn", "M", "K"),
                "XS": of("float32", "M", "KB"),
                "W": of("float8_e4m3fn", "N", "K"),
                "WS": of("float32", "NB", "KB"),
            },
            outputs={"Y": of("bfloat16", "M", "N")},
        )
        before = list(registry._EVALUATORS)
        try:
            exec(example(root, "flashinfer-bench's evaluator"), {"accepts": oracle.gate(GEMM, arch="cpu")})
            evaluator = registry.resolve_evaluator(definition)
        finally:
            registry._EVALUATORS[:] = before
        inputs, right, wrong = outputs()
        values = [inputs[name] for name in ("a", "a_scale", "b", "b_scale")]
        for made, status in ((right, None), (wrong, EvaluationStatus.INCORRECT_NUMERICAL)):
            for style, call in ((False, lambda *_, made=made: made), (True, lambda *a, made=made: a[-1].copy_(made))):
                call.metadata = SimpleNamespace(destination_passing_style=style)  # type: ignore[attr-defined]
                _, found = evaluator.check_correctness(definition, call, [values], [], None, "", "cpu")
                assert (found and found.status) == status


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("helion.autotuner.benchmark_provider", ["LocalBenchmarkProvider._validate_against_baseline"]),
        (
            "flashinfer_bench.bench.evaluators",
            ["DefaultEvaluator.can_evaluate", "DefaultEvaluator.check_correctness"],
        ),
        ("flashinfer_bench.bench.evaluators.utils", ["allocate_outputs", "normalize_result"]),
        ("flashinfer_bench.bench.utils", ["make_eval"]),
    ],
)
def test_the_stand_ins_have_the_parameters(module: str, names: list[str]) -> None:
    """Of the packages, where they are installed."""
    real = pytest.importorskip(module, reason=f"{module.partition('.')[0]} is not installed", exc_type=ImportError)
    for name in names:
        ours, theirs = (attrgetter(name)(one) for one in (tuning_tools.modules()[module], real))
        assert [*inspect.signature(ours).parameters] == [*inspect.signature(theirs).parameters], name


AXES = {"N": 128, "K": 256, "KB": 2, "NB": 1}
