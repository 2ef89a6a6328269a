"""The first hour of a machine: what becomes of each step, what is kept, and what is asked again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oracle import cli
from oracle.errors import FixtureError
from oracle.harness import firstlight, subjects
from oracle.harness.firstlight import ABSENT, DIFFERS, DONE, FAILED, HOLDS, LATE, LEFT, UNASKED, Step
from oracle.routines import registered
from oracle.tensorcore.fingerprint import fingerprint
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.probes import Shape
from oracle.tensorcore.schedules import get
from oracle.truth.gemm import ScaledProduct

TOOL = """
import sys, time
from pathlib import Path
with open(sys.argv[2], "a") as file:
    file.write("x")
print("first line")
print("answer | of", sys.argv[1])
try:
    time.sleep(60 * (sys.argv[1] in ("slow", "deaf")))
except KeyboardInterrupt:
    print("wrote what it has", flush=True)
    time.sleep(60 * (sys.argv[1] == "deaf"))
sys.exit(3 * (sys.argv[1] == "broken"))
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tool that imports nothing, and counts its runs in a file for each step."""
    script = tmp_path / "tool.py"
    script.write_text(TOOL)
    monkeypatch.setattr(firstlight, "TOOL", (sys.executable, str(script)))
    return tmp_path


def step(name: str, tool: Path, seconds: float = 60.0) -> Step:
    return Step(name, (name, str(tool / f"{name}.count")), seconds, f"what of {name}")


def test_what_becomes_of_steps(tool: Path) -> None:
    """An answer, another exit status, no end in time, a spent budget; only what has no answer is asked again."""
    folder, chosen = tool / "out", [step("right", tool), step("broken", tool), step("slow", tool, 0.5)]
    ran = {one.name: one for one in firstlight.run(chosen, folder, arch="sm90", seconds=60.0)}
    assert {name: (one.status, one.code) for name, one in ran.items()} == {
        "right": (DONE, 0),
        "broken": (FAILED, 3),
        "slow": (LATE, -1),
    }
    assert ran["right"].said == "answer | of right"
    record = json.loads((folder / firstlight.RECORD).read_text())
    assert record["machine"]["arch"] == "sm90" and [one["name"] for one in record["steps"]] == list(ran)
    again = {
        one.name: one for one in firstlight.run([*chosen[:2], step("new", tool)], folder, arch="sm90", seconds=60.0)
    }
    assert again["right"] == ran["right"] and (tool / "right.count").read_text() == "x"
    assert (tool / "broken.count").read_text() == "xx" and again["new"].status == DONE
    (late,) = firstlight.run([step("more", tool)], folder, arch="sm90", seconds=0.0)
    assert late.status == LEFT and not (tool / "more.count").exists()
    text = firstlight.page(chosen, ran, folder, "sm90")
    assert "| what of right | answer \\| of right |" in text and f"**{LATE}**" in text and "first line" in text


MEETS = """
import sys, time
from pathlib import Path
folder, mine, other = Path(sys.argv[1]), *sys.argv[2:4]
(folder / mine).touch()
ends = time.monotonic() + float(sys.argv[4])
while time.monotonic() < ends and not (folder / other).exists():
    time.sleep(0.01)
met = (folder / other).exists()
print("met" if met else "alone")
if not met:
    (folder / mine).unlink()
"""


@pytest.mark.parametrize(("beside", "said"), [((True, True), {"met"}), ((True, False), {"alone"})])
def test_steps_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: tuple[bool, ...], said: set[str]
) -> None:
    """Those that may run side by side meet; one that is timed runs alone."""
    script = tmp_path / "tool.py"
    script.write_text(MEETS)
    monkeypatch.setattr(firstlight, "TOOL", (sys.executable, str(script)))
    wait = "60" if said == {"met"} else "0.3"
    chosen = [
        Step(mine, (str(tmp_path), mine, other, wait), 120.0, "what", beside=side)
        for (mine, other), side in zip((("a", "b"), ("b", "a")), beside, strict=True)
    ]
    ran = list(firstlight.run(chosen, tmp_path / "out", arch="sm90", seconds=120.0))
    assert {one.said for one in ran} == said and {one.name for one in ran} == {"a", "b"}


def test_what_runs_ends_with_the_run(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is given up ends the processes of its steps."""
    begun, begins = [], firstlight._begun
    monkeypatch.setattr(firstlight, "_begun", lambda *asked: begun.append(begins(*asked)) or begun[-1])
    asked = firstlight.run([step("right", tool), step("slow", tool)], tool / "out", arch="sm90", seconds=60.0)
    assert next(asked).name == "right"
    asked.close()
    assert len(begun) == 2 and all(one.process.poll() is not None for one in begun)


def test_a_step_out_of_time_writes_what_it_has(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is interrupted first; one that goes on all the same is killed."""
    monkeypatch.setattr(firstlight, "GRACE", 0.5)
    chosen = [step("slow", tool, 1.0), step("deaf", tool, 1.0)]
    ran = list(firstlight.run(chosen, tool / "out", arch="sm90", seconds=60.0))
    assert len(ran) == 2
    for one in ran:
        assert (one.status, one.said) == (LATE, "wrote what it has") and one.seconds < 20


def test_a_step_is_told_what_is_left(tool: Path) -> None:
    """The seconds of its own limit or of the budget, whichever ends first, less those in which it writes."""
    one = Step("right", (firstlight.REST, str(tool / "count")), 300.0, "what")
    for budget, told in ((1000.0, "270"), (100.0, "69"), (5.0, "1")):
        (ran,) = firstlight.run([one], tool / f"out{told}", arch="sm90", seconds=budget)
        assert ran.said == f"answer | of {told}"


def chain_of(name: str, block: int | None, rows: int) -> str:
    """What the fingerprint of a kernel prints whose sums are those of a schedule."""
    schedule, shape = get(name), Shape(torch.float8_e4m3fn, 512, block, rows)

    def kernel(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, out: torch.dtype) -> torch.Tensor:
        return predict_product(ScaledProduct(a, b, sa, sb, block or 512, rows), schedule, out_dtype=out)

    return "\n".join(fingerprint(kernel, shape, out_dtype=torch.bfloat16).lines()) + "\n"


@pytest.mark.usefixtures("one_thread")
def test_known_facts_stand_beside_the_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of sm90 hold of kernels with the schedules that its captures show, and differ of another one; a finding is
    there, healed, or did not run; a library that is not installed is named."""
    there = {"torch", "deep_gemm", "vllm", "sgl_kernel", "flashinfer"}
    monkeypatch.setattr(firstlight, "find_spec", lambda name: name if name in there else None)
    logs = {
        "chain-fp8_gemm_nt": chain_of("sm90.promote128", 128, 128),
        "chain-torch_per_token_w8a8_scaled_mm": chain_of("sm90.promote128.scale_after", None, 1),
        "chain-cutlass_scaled_mm": chain_of("sm100.chain", None, 1),
        "findings": "there       torch_strided_bias: x\nhealed      sgl_kernel_infinity: y\n"
        "did not run vllm_attention_unused_slots: ModuleNotFoundError: No module named 'vllm'\n",
    }
    assert {(fact.package, status) for fact, _, status in firstlight.answered(tmp_path, "sm90")} == {
        *((name, UNASKED) for name in there),
        ("triton", ABSENT),
    }
    for name, text in logs.items():
        (tmp_path / f"{name}.log").write_text(text)
    found = {fact.what: (answer, status) for fact, answer, status in firstlight.answered(tmp_path, "sm90")}
    of = {prefix: {s for what, (_, s) in found.items() if what.startswith(prefix)} for prefix in ("DeepGEMM", "torch.")}
    assert of == {"DeepGEMM": {HOLDS}, "torch.": {HOLDS}}
    assert found["vLLM's cutlass_scaled_mm: alignment"] == ("25 fraction bits, toward zero", DIFFERS)
    assert found["finding torch_strided_bias"] == ("there", HOLDS)
    assert found["finding sgl_kernel_infinity"] == ("healed", DIFFERS)
    unused = found["finding vllm_attention_unused_slots"]
    assert unused == (logs["findings"].splitlines()[-1], UNASKED) and found["finding flashinfer_sm90_fp4"][1] == UNASKED
    assert found["finding triton_autotuner_threads"] == ("triton is not installed", ABSENT)
    text = firstlight.page([], {}, tmp_path, "sm90")
    holds = [status for _, status in found.values()].count(HOLDS)
    assert f"{holds} of 18 known facts of sm90 hold; 6 were not asked; 1 need triton, not installed here." in text
    assert 13 <= holds < 18
    assert f"| finding sgl_kernel_infinity | there | healed | **{DIFFERS}** |" in text
    assert not firstlight.answered(tmp_path, "sm103") and "What is known" not in firstlight.page(
        [], {}, tmp_path, "sm103"
    )


def test_every_known_fact_is_asked(tmp_path: Path) -> None:
    """Its step is one of the arch, where its library is installed, and its finding a script."""
    chains = {f"chain-{contract}" for contract, _ in firstlight.CHAINS}
    scripts = {path.stem for path in Path("tests/hardware/findings").glob("*.py")}
    for arch, facts in firstlight.KNOWN.items():
        named = {step.name for step in firstlight.steps(arch, tmp_path)} | chains
        assert {fact.step for fact in facts} <= named
        assert {fact.what.split()[1] for fact in facts if fact.step == "findings"} <= scripts


def test_a_folder_that_a_command_wants_new(tool: Path) -> None:
    """It is removed before the step runs, and stays where the step has answered before."""
    for name, stays in (("broken", False), ("right", False), ("right", True)):
        kept = tool / "kept" / name
        kept.mkdir(parents=True, exist_ok=True)
        one = Step(name, (name, str(tool / "count")), 60.0, "what", fresh=kept)
        list(firstlight.run([one], tool / "out", arch="sm90", seconds=60.0))
        assert kept.exists() == stays


BARE = """
import sys
from dataclasses import replace
from pathlib import Path
from oracle.harness import firstlight, subjects
assert not subjects.layers() and subjects.layer_of_the_tree() == "kernels.subjects:subjects"
folder = Path(sys.argv[1])
few = ("--contract", "fp8_gemm_nt", "--subject", "eager")
chosen = [step for step in firstlight.steps("cpu", folder) if step.name in ("plan", "verify", "captures")]
chosen = [step if step.name == "plan" else replace(step, arguments=step.arguments + few) for step in chosen]
for again in range(2):  # the second time as after an interruption
    for one in firstlight.run(chosen, folder, arch="cpu", seconds=500.0):
        print(one.name, one.status, one.code)
    (folder / firstlight.RECORD).unlink()
    chosen = chosen[1:]
"""


def test_a_bare_source_tree(tmp_path: Path) -> None:
    """Nothing of this project is installed, and the path alone finds it: the layer plans, is judged, and its outputs
    are kept, twice into one folder."""
    site, root = Path(torch.__file__).parents[1], Path(firstlight.__file__).parents[2]
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in site.iterdir():
        if not entry.name.lower().startswith(("fp8_oracle", "__editable__", "_virtualenv")) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    environment = {**os.environ, "PYTHONPATH": f"{root}:{packages}", "PYTHONDONTWRITEBYTECODE": "1"}
    asked = [sys.executable, "-S", "-c", BARE, str(tmp_path / "out")]
    done = subprocess.run(asked, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [*["captures done 0"] * 2, "plan done 0", *["verify done 0"] * 2]
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["schema"] == "fp8-oracle.plan/1"
    assert any((tmp_path / "out" / "captures").iterdir())


def test_the_layer_is_named_only_where_none_is_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed layer is not judged twice."""
    assert subjects.layer_of_the_tree() is None
    assert not any("--provider" in step.arguments for step in firstlight.steps("sm90", tmp_path))
    monkeypatch.setattr(subjects, "layers", list)
    named = {step.name for step in firstlight.steps("sm90", tmp_path) if "--provider" in step.arguments}
    assert named == {"plan", "verify", "timings", "captures"}


def test_answers_of_another_machine_are_not_continued(tool: Path) -> None:
    list(firstlight.run([step("right", tool)], tool / "out", arch="sm90", seconds=60.0))
    with pytest.raises(FixtureError, match="another machine; pass another --out"):
        list(firstlight.run([step("right", tool)], tool / "out", arch="sm100", seconds=60.0))


@pytest.mark.parametrize("arch", ["sm90", "sm103", "sm121"])
def test_every_step_is_a_command_of_the_tool(arch: str, tmp_path: Path) -> None:
    """Their arguments parse and name contracts; block-scaled instructions are asked where there are some."""
    chosen = firstlight.steps(arch, tmp_path)
    for one in chosen:
        arguments = cli.parser().parse_args(one.asked(one.seconds))
        assert getattr(arguments, "contract", None) in (None, *registered())
    assert ("reading-nvf4" in {one.name for one in chosen}) == (arch != "sm90")


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One sentence, and nothing is written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["firstlight", "--out", str(tmp_path / "out")]) == 2
    assert (
        capsys.readouterr().err
        == "fp8-oracle: error: there is no GPU that torch can see: firstlight asks what a GPU computes\n"
    )
    assert not (tmp_path / "out").exists()
