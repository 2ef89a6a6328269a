"""The judge of an evaluation suite: right solutions PASS, each wrong one has its own status, and files are checked."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints as cp
import pytest
import torch
from commandline import Cli
from safetensors.torch import save_file
from torch import Tensor

import oracle
from oracle.errors import FixtureError, OptionError, OracleError
from oracle.fixtures import layers, suite
from oracle.harness import sandbox
from oracle.harness.evaluation import evaluate
from oracle.routines import cases

GEMM = "fp8_gemm_nt"
CASE = f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=5,n=128,k=256/family=randn/seed=7"
NAMES = {"a": "X", "a_scale": "XS", "b": "W.T", "b_scale": "WS"}
"""The weight is ``[K, N]`` in the definition."""
RUN = """
import torch
from helper import spread

def values(X, XS, W, WS):
    x = X.float() * spread(XS, 1)[:, : X.shape[1]]
    w = W.t().float() * spread(spread(WS, 0)[: W.shape[1]], 1)[:, : W.shape[0]]
    return (x @ w.t()).bfloat16()
"""
HELPER = "def spread(s, axis):\n    return s.repeat_interleave(128, axis)\n"
RIGHT = RUN + "\ndef run(X, XS, W, WS, factor):\n    return values(X, XS, W, WS)\n"


def tensor(dtype: str, *shape: str) -> dict[str, object]:
    return {"shape": list(shape), "dtype": dtype}


DEFINITION: dict[str, Any] = {
    "name": "block_gemm", "op_type": "gemm", "reference": "def run(X, XS, W, WS, factor):\n    return X\n",
    "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 128}, "K": {"type": "const", "value": 256},
             "KB": {"type": "const", "value": 2}, "NB": {"type": "const", "value": 1}},
    "inputs": {"X": tensor("float8_e4m3fn", "M", "K"), "XS": tensor("float32", "M", "KB"),
               "W": tensor("float8_e4m3fn", "K", "N"), "WS": tensor("float32", "NB", "KB"),
               "factor": {"shape": None, "dtype": "float32"}},
    "outputs": {"Y": tensor("bfloat16", "M", "N")},
}  # fmt: skip  # a table, one row a line
SCALAR = {"type": "scalar", "value": 1.0}
RANDOM = {**{name: {"type": "random"} for name in ("X", "XS", "W", "WS")}, "factor": SCALAR}


def solution(content: str, **spec: Any) -> dict[str, Any]:
    spec = {"language": "python", "entry_point": "main.py::run", "destination_passing_style": False, **spec}
    sources = [{"path": "main.py", "content": content}, {"path": "helper.py", "content": HELPER}]
    return {"name": "s", "definition": "block_gemm", "author": "x", "spec": spec, "sources": sources}


def written(folder: Path, made: dict[str, Any], definition: Any = DEFINITION, inputs: Any = RANDOM, m: Any = 3) -> Path:
    folder.mkdir(exist_ok=True)
    workload = {"uuid": f"u{m}", "axes": {"M": m}, "inputs": inputs}
    trace = {"definition": "block_gemm", "workload": workload, "solution": None, "evaluation": None}
    (folder / "d.json").write_text(json.dumps(definition))
    (folder / "w.jsonl").write_text(json.dumps(trace) + "\n" + json.dumps({**workload, "uuid": "again"}) + "\n")
    (folder / "s.json").write_text(json.dumps(made))
    return folder


def traces(folder: Path, **more: Any) -> list[dict[str, Any]]:
    definition = suite.read_definition(folder / "d.json")
    workloads = suite.read_workloads(folder / "w.jsonl", definition)
    made = suite.read_solution(folder / "s.json", definition)
    asked = {"root": folder, "renamed": NAMES, **more}
    return list(evaluate(definition, workloads, made, GEMM, **asked))


STATUSES = {
    "values returned": (RIGHT, {}, "PASSED"),
    "a dict returned": (RIGHT.replace("return values(X, XS, W, WS)", "return {'Y': values(X, XS, W, WS)}"), {},
                        "PASSED"),
    "outputs passed": (RUN + "\ndef run(X, XS, W, WS, factor, Y):\n    Y.copy_(values(X, XS, W, WS))\n",
                       {"destination_passing_style": True}, "PASSED"),
    "nothing written": (RUN + "\ndef run(*given):\n    pass\n", {"destination_passing_style": True},
                        "INCORRECT_NUMERICAL"),
    "rows swapped": (RIGHT.replace("W, WS)\n", "W, WS).roll(1, 0)\n").replace("XS, W, WS):", "XS, W, WS):"), {},
                     "INCORRECT_NUMERICAL"),
    "another dtype": (RIGHT + "    \nright = run\ndef run(*x):\n    return right(*x).float()\n", {}, "INCORRECT_DTYPE"),
    "another shape": (RIGHT + "    \nright = run\ndef run(*x):\n    return right(*x)[1:]\n", {}, "INCORRECT_SHAPE"),
    "raises": ("def run(*x):\n    raise ValueError('no')\n", {}, "RUNTIME_ERROR"),
    "nothing returned": ("def run(*x):\n    return 3\n", {}, "RUNTIME_ERROR"),
    "an input changed": (RIGHT + "    \nright = run\ndef run(X, *x):\n    y = right(X, *x)\n    "
                         "x[0].add_(1)\n    return y\n", {}, "RUNTIME_ERROR"),
    "no such module": ("import nothing_of_this_name\ndef run(*x):\n    pass\n", {}, "COMPILE_ERROR"),
    "no such function": ("def walk(*x):\n    pass\n", {}, "COMPILE_ERROR"),
}  # fmt: skip  # a table, one row a line


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A solution in this process leaves its folder on the path, and its modules."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("main", "helper"):
        sys.modules.pop(name, None)


@pytest.mark.turns(4)
@pytest.mark.usefixtures("in_process")
class TestStatus:
    """Each status of the schema, with correctness and performance where it demands them."""

    @pytest.mark.sampled(12)
    @pytest.mark.parametrize("what", STATUSES)
    def test_each(self, tmp_path: Path, what: str) -> None:
        content, spec, status = STATUSES[what]
        found = traces(written(tmp_path, solution(content, **spec)))
        assert [t["evaluation"]["status"] for t in found] == [status] * 2, found[0]["evaluation"]["log"]
        evaluation = found[0]["evaluation"]
        assert (evaluation["correctness"] is None) is (status not in ("PASSED", "INCORRECT_NUMERICAL"))
        assert (evaluation["performance"] is None) is (status != "PASSED")
        assert evaluation["environment"]["libs"]["torch"] == torch.__version__ and evaluation["log"]
        assert found[0]["workload"]["uuid"] == "u3" and found[0]["solution"] == "s"
        if evaluation["correctness"] is not None:
            extra = evaluation["correctness"]["extra"]
            assert extra["contract"] == GEMM and (extra["verdict"] == "PASSED") is (status == "PASSED")
            error = evaluation["correctness"]["max_relative_error"]
            assert error == "Infinity" or (error < 0.01) is (status == "PASSED")

    def test_tensors_in_files(self, tmp_path: Path) -> None:
        """Inputs of a case, stored; a number for each workload; sabotaged: another shape than the definition's."""
        made = cases.parse(CASE).inputs()
        stored = {"X": made["a"], "XS": made["a_scale"], "W": made["b"].t().contiguous(), "WS": made["b_scale"]}
        save_file(stored, tmp_path / "x.safetensors")
        files = {n: {"type": "safetensors", "path": "x.safetensors", "tensor_key": n} for n in stored}
        folder = written(tmp_path, solution(RIGHT), inputs={**files, "factor": SCALAR}, m=5)
        assert [t["evaluation"]["status"] for t in traces(folder)] == ["PASSED"] * 2
        with pytest.raises(FixtureError, match=r"X is float8_e4m3fn \[5, 256\]; block_gemm says .* \[4, 256\]"):
            traces(written(tmp_path, solution(RIGHT), inputs={**files, "factor": SCALAR}, m=4))
        files["X"]["tensor_key"] = "Q"
        with pytest.raises(FixtureError, match="has no tensor 'Q'"):
            traces(written(tmp_path, solution(RIGHT), inputs={**files, "factor": SCALAR}, m=5))

    def test_stored_data_are_shifted(self, tmp_path: Path) -> None:
        """A solution that knows the stored tensors alone."""
        made = cases.parse(CASE).inputs()
        stored = {"X": made["a"], "XS": made["a_scale"], "W": made["b"].t().contiguous(), "WS": made["b_scale"]}
        save_file(stored, tmp_path / "x.safetensors")
        files = {n: {"type": "safetensors", "path": "x.safetensors", "tensor_key": n} for n in stored}
        total = float(made["a"].float()[0].sum())
        known = f"float(x[0].float()[0].sum()) == {total}"
        table = RIGHT + f"\nright = run\ndef run(*x):\n    return right(*x) * ({known})\n"
        found = traces(written(tmp_path, solution(table), inputs={**files, "factor": SCALAR}, m=5))
        assert [t["evaluation"]["status"] for t in found] == ["INCORRECT_NUMERICAL"] * 2
        files["X"]["path"] = "x\0.safetensors"
        with pytest.raises(FixtureError, match="holds a NUL"):
            traces(written(tmp_path, solution(RIGHT), inputs={**files, "factor": SCALAR}, m=5))


AGAIN = RIGHT + "\nright, seen = run, []\n"
REPLAYED = AGAIN + "kept = {}\ndef run(X, *x):\n    return kept.setdefault(KEY, right(X, *x)).clone()\n"
COUNTED = AGAIN + "def run(*x):\n    seen.append(1)\n    y = right(*x)\n"
LATER = "    import threading, time\n    threading.Thread(target=lambda: (time.sleep(0.02), y.zero_())).start()\n"
CHEATS = {
    "a cache by shape": (REPLAYED.replace("KEY", "X.shape"), "INCORRECT_NUMERICAL"),
    "a cache by pointer": (REPLAYED.replace("KEY", "X.data_ptr()"), "INCORRECT_NUMERICAL"),
    "a cache by first value": (REPLAYED.replace("KEY", "float(X.flatten()[0])"), "INCORRECT_NUMERICAL"),
    "right first calls": (COUNTED + "    return y * (len(seen) <= 12)\n", "INCORRECT_NUMERICAL"),
    "other bits on each call": (
        COUNTED + "    y.view(torch.int16)[0, 0] ^= len(seen) % 2\n    return y\n",
        "INCORRECT_NUMERICAL",
    ),
    "written after the return": (COUNTED + LATER + "    return y\n", "RUNTIME_ERROR"),
}


@pytest.mark.turns(4)
@pytest.mark.usefixtures("in_process")
class TestFurtherCalls:
    """What is right on the first call of each workload alone is found by further ones; a right kernel PASSES them."""

    @pytest.mark.parametrize("what", CHEATS)
    def test_each(self, tmp_path: Path, what: str) -> None:
        content, status = CHEATS[what]
        found = traces(written(tmp_path, solution(content)))
        assert status in [t["evaluation"]["status"] for t in found], found[0]["evaluation"]["log"]
        assert "PASSED" not in [t["evaluation"]["status"] for t in found]

    def test_random_inputs_are_new_in_each_run(self, tmp_path: Path) -> None:
        """A run says its seed, which gives its data again."""
        folder = written(tmp_path, solution(RIGHT))
        found = [traces(folder, seed=seed)[0]["evaluation"]["correctness"] for seed in (None, None, 7, 7)]
        seeds = [one["extra"]["seed"] for one in found]
        assert seeds[0] != seeds[1] and seeds[2:] == [7, 7] and found[2] == found[3]

    @pytest.mark.parametrize("limit", [float("nan"), float("inf"), -1.0, 0.0])
    def test_limits(self, tmp_path: Path, limit: float) -> None:
        with pytest.raises(OptionError, match="no number of seconds"):
            traces(written(tmp_path, solution(RIGHT)), limit=limit)

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32"])
    def test_rank_0(self, tmp_path: Path, dtype: str) -> None:
        """A tensor without an axis is drawn; the contract says what it takes."""
        record = changed(DEFINITION, "inputs", "X", value=tensor(dtype))
        with pytest.raises(OracleError, match="rank|dtype|shape"):
            traces(written(tmp_path, solution(RIGHT), record))


@pytest.mark.usefixtures("forked_workers")
def test_the_limit_covers_the_import(tmp_path: Path) -> None:
    """Negative: the same solution has the time for its import."""
    slow = RIGHT.replace("import torch", "import time\nimport torch\ntime.sleep(3)", 1)
    for limit, status in ((1.0, "COMPILE_ERROR"), (30.0, "PASSED")):
        folder = written(tmp_path / str(limit), solution(slow))
        assert {t["evaluation"]["status"] for t in traces(folder, limit=limit)} == {status}


CHANNEL = """
import os, socket, stat
for fd in range(3, 64):
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            socket.socket(fileno=os.dup(fd)).send(b"a reply")
    except OSError:
        pass
"""


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (RIGHT + CHANNEL, "RUNTIME_ERROR: the kernel wrote to the channel"),
        (RIGHT + "import os\nos._exit(3)\n", "COMPILE_ERROR: the kernel ended the process with status 3"),
    ],
)
def test_a_solution_that_answers_for_its_process(tmp_path: Path, content: str, said: str) -> None:
    """At its import, which went well; one that ends its process there was not imported."""
    evaluation = traces(written(tmp_path, solution(content)))[0]["evaluation"]
    status, _, text = said.partition(": ")
    assert evaluation["status"] == status and text in evaluation["log"], evaluation["log"]


def changed(record: Any, *path: Any, value: Any) -> Any:
    """A copy with one entry replaced."""
    if not path:
        return value
    copy = dict(record) if isinstance(record, dict) else list(record)
    copy[path[0]] = changed(copy[path[0]] if path[1:] else None, *path[1:], value=value)
    return copy


class TestFiles:
    """What is wrong with a file is one typed error before anything runs."""

    @pytest.mark.parametrize(
        ("path", "value", "said"),
        [
            (("axes", "N"), {"type": "const"}, "axis 'N'"),
            (("inputs", "X", "dtype"), "float4_e2m1", "X has the dtype 'float4_e2m1'"),
            (("inputs", "X", "shape"), ["M", "Q"], "lists axes"),
            (("inputs", "X", "shape"), ["M", ["K"]], "lists axes"),
            (("outputs",), {"X": tensor("bfloat16", "M", "N")}, "is an input and an output"),
            (("name",), 3, "name is 3"),
        ],
    )
    def test_a_definition(self, tmp_path: Path, path: Any, value: Any, said: str) -> None:
        folder = written(tmp_path, solution(RIGHT), changed(DEFINITION, *path, value=value))
        with pytest.raises(FixtureError, match=said):
            suite.read_definition(folder / "d.json")

    @pytest.mark.parametrize(
        ("path", "value", "said"),
        [
            (("definition",), "other", "is a solution of 'other'"),
            (("sources", 0, "path"), "../main.py", "no path"),
            (("sources", 0, "path"), "/main.py", "no path"),
            (("sources", 1, "path"), "main.py", "no path of one source"),
            (("spec", "entry_point"), "main.py::run()", "names no function"),
            (("spec", "entry_point"), "other.py::run", "names no function"),
            (("spec", "language"), "cuda", "compiled first"),
            (("spec", "destination_passing_style"), "yes", "true or false"),
        ],
    )
    def test_a_solution(self, tmp_path: Path, path: Any, value: Any, said: str) -> None:
        folder = written(tmp_path, changed(solution(RIGHT), *path, value=value))
        definition = suite.read_definition(folder / "d.json")
        with pytest.raises(OracleError, match=said):
            suite.read_solution(folder / "s.json", definition)

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("{", "is no JSON"),
            ("3", "is no object"),
            ("", "holds no workload"),
            ('{"definition": "x", "workload": {}}', "a workload of 'x'"),
            ('{"uuid": "u", "axes": {}, "inputs": {}}', "axes.M is None"),
            ('{"uuid": "u", "axes": {"M": 1}, "inputs": {"X": 1}}', "input 'X' is 1"),
            ('{"uuid": "u", "axes": {"M": 1, "K": 128}, "inputs": {}}', "axes.K is 128; block_gemm fixes it to 256"),
            (
                "\n".join([json.dumps({"uuid": "u", "axes": {"M": 1}, "inputs": RANDOM})] * 2),
                "w.jsonl:2: uuid 'u' stands",
            ),
        ],
    )
    def test_a_workload(self, tmp_path: Path, line: str, said: str) -> None:
        folder = written(tmp_path, solution(RIGHT))
        (folder / "w.jsonl").write_text(line + "\n")
        with pytest.raises(FixtureError, match=said):
            suite.read_workloads(folder / "w.jsonl", suite.read_definition(folder / "d.json"))

    def test_names_of_the_contract(self, tmp_path: Path) -> None:
        folder = written(tmp_path, solution(RIGHT))
        with pytest.raises(OptionError, match="has no input 'a', which fp8_gemm_nt needs"):
            traces(folder, renamed={})
        with pytest.raises(OptionError, match="has no such input"):
            traces(folder, renamed={**NAMES, "q": "X"})
        with pytest.raises(OptionError, match="CPU alone"):
            traces(folder, untrusted=True, device="cuda")
        two = {**DEFINITION, "outputs": {"Y": DEFINITION["outputs"]["Y"], "Z": DEFINITION["outputs"]["Y"]}}
        with pytest.raises(OptionError, match="has the outputs Y, Z"):
            traces(written(tmp_path, solution(RIGHT), two))


@pytest.mark.turns(4)
@pytest.mark.skipif(sandbox.means() is None, reason="no sandbox here: neither bubblewrap nor user namespaces")
def test_an_untrusted_solution(tmp_path: Path, cli: Cli, request: pytest.FixtureRequest) -> None:
    """A right solution that refuses to load where `oracle` can be imported PASSES in the sandbox, and only there."""
    alone = "import importlib.util as u\nassert u.find_spec('oracle') is None, 'oracle can be imported'\n" + RIGHT
    folder = written(tmp_path, solution(alone))
    files = {"definition": "d.json", "workload": "w.jsonl", "solution": "s.json", "traces": "t.jsonl"}
    flags = [f"--{key}={folder / file}" for key, file in files.items()]
    flags += [f"--input={ours}={theirs}" for ours, theirs in NAMES.items()]

    def evaluated(*more: str) -> tuple[int, str]:
        done = cli("evaluate", *flags, "--contract", GEMM, *more)
        (first, *_) = map(json.loads, (folder / "t.jsonl").read_text().splitlines())
        return done.status, first["evaluation"]["status"]

    assert evaluated("--untrusted") == (0, "PASSED")
    (folder / "t.jsonl").unlink()
    request.getfixturevalue("in_process")
    assert evaluated() == (1, "COMPILE_ERROR")


@pytest.mark.usefixtures("in_process")
def test_a_suite_of_a_checkpoint(tmp_path: Path, cli: Cli) -> None:
    """Calls of real layers as definitions and workloads: they say their contract, and their reference runs."""
    cp.deepseek(tmp_path / "m")
    layers.calls(tmp_path / "m", tmp_path / "c", layer="*.0.self_attn.q_a_proj", tokens=3)
    assert cli("cases", "to-suite", str(tmp_path / "c"), "--to", str(tmp_path / "s")).status == 0
    (definition,) = (tmp_path / "s" / "definitions").iterdir()
    record = json.loads(definition.read_text())
    assert record["axes"]["M"] == {"type": "var"}
    assert record["axes"]["K"] == {"type": "const", "value": cp.HIDDEN}
    run = RUN + "\ndef run(a, a_scale, b, b_scale):\n    return values(a, a_scale, b.t(), b_scale)\n"
    made = {**solution(run), "definition": record["name"]}
    (tmp_path / "right.json").write_text(json.dumps(made))
    space: dict[str, Any] = {}
    exec(record["reference"], space)
    for name, given in (
        ("right", made),
        ("reference", {**made, "sources": [{"path": "main.py", "content": record["reference"]}]}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(given))
        done = cli(
            "evaluate",
            "--definition",
            str(definition),
            "--solution",
            str(tmp_path / f"{name}.json"),
            "--workload",
            str(tmp_path / "s" / "workloads" / f"{record['name']}.jsonl"),
        )
        assert done.status == 0 and json.loads(done.out.splitlines()[0])["evaluation"]["status"] == "PASSED", done.err
    inputs = cases.parse(CASE).inputs()
    out = space["run"](**inputs)
    due = oracle.reference(GEMM, inputs, out_dtype=torch.bfloat16)
    assert isinstance(out, Tensor) and isinstance(due, Tensor) and torch.equal(out, due)
