"""The GitHub action: its shell steps run here in order, on kernels that are right, wrong, crash or cannot be judged."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from oracle.cli import main
from oracle.harness import subjects
from tests.support.action import Run, evaluated, run
from tests.support.commandline import CASE
from tests.support.sarif import check
from tests.support.served import judge_once, serve

pytestmark = pytest.mark.turns(4)

ROOT = Path(__file__).resolve().parents[2]
ACTION = ROOT / ".github" / "actions" / "fp8-oracle" / "action.yml"

KERNEL = """from dataclasses import dataclass

import torch


@dataclass
class Mine:
    name: str = "mine"
    contract: str = "fp8_gemm_nt"
    arch: str = "cpu"
    numerics: str = "ieee32.any"
    device: str = "cpu"

    def why_not(self):
        return None

    def run(self, inputs, options):
        return gemm(**inputs, **options)


def subjects():
    return [Mine()]


def gemm(a, a_scale, b, b_scale, *, out_dtype=torch.bfloat16):
    total = torch.zeros(a.shape[0], b.shape[0])
    for block in range(a_scale.shape[1]):
        k = slice(128 * block, 128 * (block + 1))
        columns = b_scale[:, block].repeat_interleave(128)[: b.shape[0]]
        total += (a[:, k].double() @ b[:, k].double().T).float() * a_scale[:, block, None] * columns
    return total.to(out_dtype)
"""
WRONG = ("a_scale[:, block, None]", "a_scale[:, :1]")  # the scale of the first K block throughout
CRASHES = ("    total = torch.zeros", "    __import__('os').abort()\n    total = torch.zeros")
TEST = """import pytest
from my_kernels import gemm


@pytest.mark.oracle_cases("fp8_gemm_nt", cases=["{case}"])
def test_gemm(oracle_case, assert_conforms):
    assert_conforms(gemm(**oracle_case.inputs()), oracle_case, arch="cpu")
"""
VERIFY = f"fp8-oracle verify --provider my_kernels:subjects --subject mine --fixtures none --case {CASE}"
VALIDATE = f"fp8-oracle validate my_kernels:gemm --contract fp8_gemm_nt --case {CASE}"
LINE, GEMM = (KERNEL[: KERNEL.index(name)].count("\n") + 1 for name in ("def run", "def gemm"))

# What the action asks of GitHub's command line: the number of the comment that begins with the marker, then a change.
GH = """import os, sys
from pathlib import Path
words, comments = sys.argv[1:], Path(os.environ["COMMENTS"])
stored = comments.read_text() if comments.exists() else ""
with comments.with_name("asked").open("a") as log:
    log.write(" ".join(words) + "\\n")
if "--jq" in words:
    print("41\\n" * stored.startswith(os.environ["MARKER"] + "\\n"), end="")
else:
    field = words[words.index("--field") + 1]
    comments.write_text(Path(field.removeprefix("body=@")).read_text())
"""


def pytest_here(words: list[str]) -> int:
    """The reader's pytest: without what this project's tests configure."""
    for name in [name for name in sys.modules if name.startswith("tests.") or name == "conftest"]:
        del sys.modules[name]
    sys.path.insert(0, "")
    return int(pytest.main(["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", *words]))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PATH with `fp8-oracle`, `pytest` and a `gh` that keeps one comment in a file."""
    judge_once()
    folder = tmp_path_factory.mktemp("bin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subjects, "entry_points", lambda group: ())  # the production layer takes a second to load
        with serve(folder, {"fp8-oracle": main, "pytest": pytest_here}) as found:
            gh = folder / "commands" / "gh"
            gh.write_text(f"#!{sys.executable} -ISB\n{GH}")
            gh.chmod(0o755)
            yield found


Act = Callable[..., Run]


@pytest.fixture
def act(path: str, tmp_path: Path) -> Act:
    """Run the action in a new checkout whose kernel was changed by one replacement."""
    checkout = tmp_path / "checkout"
    (checkout / ".git").mkdir(parents=True)

    def acting(command: str, change: tuple[str, str] = ("", ""), **inputs: str) -> Run:
        text = KERNEL.replace(*change, 1)
        assert change == ("", "") or text != KERNEL
        (checkout / "my_kernels.py").write_text(text)
        (checkout / "test_mine.py").write_text(TEST.format(case=CASE))
        given = {name.replace("_", "-"): value for name, value in inputs.items()}
        environment = {"PATH": path, "COMMENTS": str(tmp_path / "comment"), "PYTEST_ADDOPTS": "", "COLUMNS": "200"}
        return run(
            ACTION, {"command": command, **given}, workspace=checkout, temporary=tmp_path, environment=environment
        )

    return acting


def results(found: Run) -> list[dict[str, object]]:
    return check(json.loads(Path(found.outputs["sarif"]).read_text()))


class TestKernels:
    """Job summary, annotations at the kernel's line, SARIF, artefact and exit status."""

    def test_right(self, act: Act) -> None:
        found = act(VERIFY)
        assert (found.status, found.outputs["status"], found.annotations) == (0, "0", []), found.log
        assert results(found) == []
        assert found.summary.startswith("### ✅ fp8-oracle: all as it must be\n\n1 passed")
        kept = found.used["actions/upload-artifact@v4"]
        assert kept == {"name": "fp8-oracle", "path": found.outputs["folder"]}
        assert {file.name for file in Path(kept["path"]).iterdir()} == {
            *("record.jsonl", "log.txt", "summary.md", "annotations.txt", "report.sarif", "report.html", "junit.xml")
        }
        assert "github/codeql-action/upload-sarif@v3" not in found.used and found.outputs["comment"] == ""

    @pytest.mark.parametrize(
        "command",
        [f"{VERIFY}\n", f"\n{VERIFY}", f"{VERIFY}  # all of them", f"# all of them\n{VERIFY}\n\n", f"true && {VERIFY}"],
    )
    def test_lines_and_comments(self, act: Act, command: str) -> None:
        """As YAML's block scalars give them; the negative of each is a kernel that is wrong."""
        right = act(command)
        assert (right.status, results(right)) == (0, []), right.log
        wrong = act(command, WRONG)
        assert (wrong.status, len(results(wrong))) == (1, 1), wrong.log

    def test_wrong(self, act: Act) -> None:
        found = act(VERIFY, WRONG, code_scanning="true", name="gemm")
        assert (found.status, found.outputs["status"]) == (1, "1")
        (line,) = found.annotations
        assert line.startswith(
            f"::error file=my_kernels.py,line={LINE},title=FAILED%3A mine::fp8_gemm_nt on cpu: 1 of 1"
        )
        assert f"repro: fp8-oracle verify --case '{CASE}' --subject 'mine'" in line
        (result,) = results(found)
        assert '"my_kernels.py"' in json.dumps(result) and result["ruleId"] == "wrong-result"
        assert "❌" in found.summary and "A scale of K block 0 throughout" in found.summary
        assert found.used["github/codeql-action/upload-sarif@v3"] == {
            "sarif_file": found.outputs["sarif"],
            "category": "gemm",
        }

    def test_a_crash(self, act: Act) -> None:
        found = act(VERIFY, CRASHES)
        (line,) = found.annotations
        assert found.status == 1 and results(found)[0]["ruleId"] == "no-result"
        assert line.startswith(f"::error file=my_kernels.py,line={LINE},title=CRASHED%3A mine::")
        assert "died by SIGABRT" in line and "SIGABRT" in found.summary

    def test_validate(self, act: Act) -> None:
        """A kernel by name: right, wrong, one that crashes, and one that cannot be imported."""
        right = act(VALIDATE)
        assert (right.status, right.annotations, results(right)) == (0, [], []), right.log
        said = {WRONG: "A scale of K block 0", CRASHES: "SIGABRT", ("import torch", "import torhc"): "named 'torhc'"}
        statuses = []
        for change, words in said.items():
            found = act(VALIDATE, change)
            assert found.annotations[0].startswith(f"::error file=my_kernels.py,line={GEMM},title="), found.log
            assert words in found.annotations[0] and words in found.summary
            assert "'uri': 'my_kernels.py'" in str(results(found)[0]["locations"])
            statuses.append(found.status)
        assert statuses == [1, 1, 2]

    def test_pytest(self, act: Act) -> None:
        """The annotation is at the test; the other reports are as of `verify`."""
        assert act("pytest -q").status == 0
        found = act("pytest -q", WRONG)
        (line,) = found.annotations
        assert found.status == 1 and len(results(found)) == 1
        assert line.startswith("::error file=test_mine.py,line=5,title=FAILED%3A test_mine.py%3A%3Atest_gemm::")

    def test_another_test_fails(self, act: Act) -> None:
        """Every verdict is right, and the job fails all the same."""
        found = act("pytest -q && { echo 100% '::wrong::'; false; }", name="mine")
        assert (found.status, found.annotations) == (
            1,
            ["::error title=mine::the command ended with status 1: 100%25 ::wrong::"],
        )
        assert "✅" in found.summary and "    100% ::wrong::" in found.summary

    @pytest.mark.parametrize(
        ("command", "said", "status"),
        [
            (VERIFY.replace(CASE, "fp8_gemm_nt/nonsense"), "fp8-oracle: error: ", 2),
            ("pytest -q --collect-only", "1 test collected", 2),
            ("no-such-command pytest", "no-such-command: command not found", 127),
            ("true pytest", "", 2),
        ],
    )
    def test_nothing_judged(self, act: Act, command: str, said: str, status: int) -> None:
        """One annotation with the last line, no SARIF, and never a green job."""
        found = act(command)
        (line,) = found.annotations
        assert (found.status, found.outputs["sarif"]) == (status, "")
        assert line.startswith("::error title=fp8-oracle::the command ended with status") and said in line
        assert found.summary.startswith("### ❌ fp8-oracle: nothing was judged\n") and said in found.summary


class TestJourney:
    """A base record, a change that breaks the kernel, its comment, the repair: what a pull request goes through."""

    def test_pull_request(self, act: Act, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
        base, comment = tmp_path / "base.jsonl", tmp_path / "comment"
        first = act(VERIFY, base=str(base), comment="true")
        assert first.status == 0 and not comment.exists()
        assert first.annotations == [
            f"::notice title=fp8-oracle::nothing is compared: {base} is no record of the base branch"
        ]
        base.write_bytes(Path(first.outputs["record"]).read_bytes())

        broken = act(VERIFY, WRONG, base=str(base), comment="true")
        assert broken.status == 1 and len(broken.annotations) == 1
        assert comment.read_text() == Path(broken.outputs["comment"]).read_text()
        assert "### ❌ fp8-oracle: 1 broke, 0 the same" in comment.read_text()
        assert f"at `my_kernels.py:{LINE}`" in comment.read_text() and f"\n\n{comment.read_text()}" in broken.summary

        healed = act(VERIFY, base=str(base), comment="true")
        assert healed.status == 0 and "### ✅ fp8-oracle: 1 the same" in comment.read_text()
        asked = (tmp_path / "asked").read_text().splitlines()
        changes = [re.sub(" --field.*", "", line) for line in asked if "--jq" not in line]
        assert changes == [
            "api --method POST repos/owner/name/issues/7/comments",
            "api --method PATCH repos/owner/name/issues/comments/41",
        ]
        for name, found in (("base", first), ("broken", broken), ("healed", healed)):
            steps = ", ".join(f"{step} {seconds:.1f}" for step, seconds in found.seconds.items())
            record_property("printed", f"CI journey, {name}: {sum(found.seconds.values()):.1f} s ({steps})")

    def test_a_comment_that_is_refused(self, act: Act, tmp_path: Path) -> None:
        """As in a pull request of a fork: a warning, and the verdict decides."""
        base = tmp_path / "base.jsonl"
        base.write_bytes(Path(act(VERIFY).outputs["record"]).read_bytes())
        (tmp_path / "comment").mkdir()
        found = act(VERIFY, base=str(base), comment="true")
        assert found.status == 0 and found.annotations[0].startswith(
            "::warning title=fp8-oracle::the comment could not"
        )


def test_without_the_package(act: Act, tmp_path: Path) -> None:
    """The action installs what it stands in, its own version, where `fp8-oracle` is not there yet."""
    place = tmp_path / "bin"
    place.mkdir()
    (place / "python").write_text('#!/bin/sh\necho "::asked::$*"\n')
    (place / "python").chmod(0o755)
    found = run(
        ACTION,
        {"command": "true"},
        workspace=tmp_path,
        temporary=tmp_path,
        environment={"PATH": f"{place}:/usr/bin:/bin"},
    )
    assert found.annotations[0] == f"::asked::-m pip install {ACTION.parent}/../../.."
    assert (ACTION.parent / "../../../pyproject.toml").is_file()


def test_no_input_is_pasted_into_a_script() -> None:
    """What a caller gives reaches a script by the environment only; a pasted text could be a command."""
    scripts = re.findall(r"^ +run: \|\n((?:^ {8}.*\n|\n)+)", ACTION.read_text(), re.MULTILINE)
    assert len(scripts) == 5 and not [script for script in scripts if "${{" in script]


def uses(text: str) -> list[dict[str, str]]:
    """What a workflow gives to the action, a mapping for each use."""
    steps = [step for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"]]
    return [step.get("with", {}) for step in steps if "actions/fp8-oracle" in step.get("uses", "")]


def test_workflows_use_what_there_is() -> None:
    """Those of the project and of the pages name inputs that the action has, and outputs."""
    made = yaml.safe_load(ACTION.read_text())
    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    whole = [
        block for page in pages for block in re.findall(r"^```yaml\n(name:.*?)^```", page, re.MULTILINE | re.DOTALL)
    ]
    texts = [*whole, *(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))]
    given = [one for text in texts for one in uses(text)]
    assert len(given) >= 3 and all({"command"} <= set(one) <= set(made["inputs"]) for one in given)
    named = {name for text in texts for name in re.findall(r"steps\.oracle\.outputs\.([\w-]+)", text)}
    assert named and named <= set(made["outputs"])
    assert uses("jobs: {a: {steps: [{uses: x/actions/fp8-oracle@v1, with: {comand: y}}]}}") == [{"comand": "y"}]


def test_conditions() -> None:
    context = {"inputs": {"a-b": "true"}, "steps": {"x": {"y": "z"}}, "github": {"event_name": "push"}}
    assert evaluated("inputs.a-b == 'true' && steps.x.outputs.y != ''", context) is True
    assert evaluated("always() && github.event_name == 'pull_request'", context) is False
    assert evaluated("steps.none.outputs.y", context) == ""
