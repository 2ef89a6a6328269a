"""One call in N of a running engine: what is recorded, that it costs nothing when off, and that a fault is found."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from commandline import CASE, Cli
from forked import forked
from torch import Tensor

import oracle
from oracle.errors import ContractError, OptionError
from oracle.fixtures import call_file
from oracle.harness import recorder, sampling
from oracle.routines import cases
from oracle.routines.base import Call
from tests.support.subjects import right, wrong

GEMM = "fp8_gemm_nt"
INPUTS = cases.parse(CASE).inputs()
CALL = {"out_dtype": torch.bfloat16}


def files(folder: Path) -> list[Path]:
    return call_file.within(folder)[0]


class TestOff:
    """``every=0`` and the switch give back the routine itself; the switch turns on, too."""

    @pytest.mark.parametrize(("every", "switch", "same"), [(0, "", True), (5, "0", True), (0, "7", False)])
    def test_the_routine_itself(
        self, every: int, switch: str, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(sampling.SWITCH, switch)
        made = oracle.sample(right.gemm, every=every, to=tmp_path / "c", contract=GEMM)
        assert (made is right.gemm) is same and (tmp_path / "c").exists() is not same
        if not same:
            assert made.sampler.every == int(switch or every) and made.__wrapped__ is right.gemm

    def test_what_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def other(x: Tensor, w: Tensor) -> Tensor:
            return x

        with pytest.raises(OptionError, match="no parameter 'a', an input of fp8_gemm_nt"):
            oracle.sample(other, every=1, to=tmp_path, contract=GEMM)
        with pytest.raises(OptionError, match="every=-1"):
            oracle.sample(other, every=-1, to=tmp_path, contract=GEMM)
        with pytest.raises(ContractError):
            oracle.sample(other, every=1, to=tmp_path, contract="nothing")
        with pytest.raises(OptionError, match="no signature"):
            oracle.sample(torch.matmul, every=1, to=tmp_path, contract=GEMM, name="f")
        monkeypatch.setenv(sampling.SWITCH, "often")
        with pytest.raises(OptionError, match="often"):
            oracle.sample(other, every=1, to=tmp_path, contract=GEMM)


@pytest.mark.turns(4)
class TestWhatIsRecorded:
    """The first call and one in N; inputs as they were before it, strides, options and versions."""

    def test_one_in_three(self, tmp_path: Path) -> None:
        gemm = oracle.sample(every=3, to=tmp_path, contract=GEMM)(right.gemm)
        made = [gemm(**INPUTS, **CALL) for _ in range(7)]
        assert gemm.sampler.flush(60) and gemm.sampler.recorded == 3 and gemm.sampler.problems == []
        assert len(files(tmp_path)) == 3
        call = call_file.read(files(tmp_path)[0])
        assert call.options == CALL and call.arch == "cpu" and call.kernel == "tests.support.subjects.right:gemm"
        assert {"torch", "fp8-oracle", "time", "process"} <= set(call.about)
        assert all(torch.equal(call.inputs[n].view(torch.uint8), t.view(torch.uint8)) for n, t in INPUTS.items())
        assert isinstance(call.output, Tensor) and torch.equal(call.output, made[0])

    def test_arguments_of_other_names_and_an_output_given(self, tmp_path: Path) -> None:
        """DeepGEMM's convention, whose output is the last parameter; a column-major weight keeps its strides."""

        def deep(lhs: tuple[Tensor, Tensor], rhs: tuple[Tensor, Tensor], d: Tensor) -> None:
            d.copy_(right.gemm(*lhs, *rhs, out_dtype=d.dtype))

        def named(lhs: tuple[Tensor, Tensor], rhs: tuple[Tensor, Tensor], d: Tensor) -> dict[str, object]:
            return {"a": lhs[0], "a_scale": lhs[1], "b": rhs[0], "b_scale": rhs[1], "out_dtype": d.dtype}

        gemm = oracle.sample(deep, every=1, to=tmp_path, contract=GEMM, inputs=named, out="d", name="deep")
        b = INPUTS["b"].view(torch.uint8).t().contiguous().t().view(torch.float8_e4m3fn)
        out = torch.empty(INPUTS["a"].shape[0], b.shape[0], dtype=torch.bfloat16)
        gemm((INPUTS["a"], INPUTS["a_scale"]), (b, INPUTS["b_scale"]), out)
        kept = out.clone()
        out.zero_()
        assert gemm.sampler.flush(60)
        call = call_file.read(files(tmp_path)[0])
        assert call.inputs["b"].stride() == b.stride() and call.kernel == "deep"
        assert isinstance(call.output, Tensor) and torch.equal(call.output, kept)

    def test_inputs_are_those_before_the_call(self, tmp_path: Path, cli: Cli) -> None:
        """A cache is input and output of its writer; sabotaged: the writer writes another row, and that is found."""
        contract, case = "set_mla_kv_buffer", cases.parse(oracle_case("set_mla_kv_buffer"))
        call = Call(oracle.contracts()[contract], case.inputs(), case.call_options())
        due = oracle.reference(contract, case.inputs(), **case.call_options())
        assert isinstance(due, dict)

        def writer(kv_buffer: Tensor, loc: Tensor, cache_k_nope: Tensor, cache_k_rope: Tensor) -> None:
            written = due["kv_buffer"].view(torch.uint8)
            kv_buffer.view(torch.uint8).copy_(written.roll(1, 0) if wrong_row else written)

        status = []
        for wrong_row in (False, True):
            folder = tmp_path / str(wrong_row)
            sampled = oracle.sample(writer, every=1, to=folder, contract=contract)
            given = {name: t.clone() for name, t in call.inputs.items()}
            sampled(**given)
            assert sampled.sampler.flush(60) and sampled.sampler.problems == []
            kept = call_file.read(files(folder)[0])
            before = case.inputs()["kv_buffer"].view(torch.uint8)
            assert torch.equal(kept.inputs["kv_buffer"].view(torch.uint8), before)
            assert not torch.equal(given["kv_buffer"].view(torch.uint8), before)
            status.append(cli("judge", str(folder)).status)
        assert status == [0, 1]

    def test_not_while_a_graph_is_captured(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gemm = oracle.sample(right.gemm, every=1, to=tmp_path, contract=GEMM)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        for capturing in (True, False):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)  # noqa: B023
            gemm(**INPUTS, **CALL)
            assert gemm.sampler.flush(60) and gemm.sampler.recorded == (not capturing)

    def test_compiled(self, tmp_path: Path) -> None:
        """A compiler inlines the routine, without a graph break; sampled outside, the compiled function is recorded."""
        counted = []

        def plain(x: Tensor) -> Tensor:
            return x * 2

        inner = oracle.sample(plain, every=1, to=tmp_path / "a", contract="silu_and_mul")
        compiled = torch.compile(inner, fullgraph=True, backend=lambda graph, _: counted.append(graph) or graph.forward)
        assert torch.equal(compiled(torch.ones(2, 4)), torch.full((2, 4), 2.0)) and len(counted) == 1
        outer = oracle.sample(compiled, every=1, to=tmp_path / "b", contract="silu_and_mul", name="outer")
        outer(torch.ones(2, 4))
        assert inner.sampler.flush(60) and outer.sampler.flush(60)
        assert (inner.sampler.recorded, outer.sampler.recorded) == (0, 1)


def oracle_case(contract: str) -> str:
    from oracle.routines import profiles

    return str(profiles.cases(contract, "quick")[0])


class TestTheEngineGoesOn:
    """Whatever is wrong with the recording is counted and said once; the result is the routine's."""

    def test_problems(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        def raises(**_: object) -> dict[str, object]:
            raise RuntimeError("no")

        gemm = oracle.sample(right.gemm, every=1, to=tmp_path, contract=GEMM, inputs=raises)
        for _ in range(3):
            assert gemm(**INPUTS, **CALL).shape == (5, 256)
        assert gemm.sampler.problems == ["RuntimeError: no"] * 3 and files(tmp_path) == []
        assert [r.getMessage() for r in caplog.records] == [
            "a call of tests.support.subjects.right:gemm was not recorded: no"
        ]

        def nothing(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
            return None

        empty = oracle.sample(nothing, every=1, to=tmp_path, contract=GEMM)
        assert empty(**INPUTS) is None and "without out" in empty.sampler.problems[0]

    def test_what_the_routine_raises_is_raised(self, tmp_path: Path) -> None:
        def fails(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
            raise KeyError("its own")

        gemm = oracle.sample(fails, every=1, to=tmp_path, contract=GEMM)
        with pytest.raises(KeyError, match="its own"):
            gemm(**INPUTS)
        assert gemm.sampler.flush(60) and gemm.sampler.recorded == 0

    def test_the_disk_is_bounded(self, tmp_path: Path) -> None:
        """No call passes ``max_bytes``, of several samplers together, and recording ends there; nor after its time."""
        size = sum(t.nbytes for t in INPUTS.values())
        samplers = [oracle.sample(right.gemm, every=1, to=tmp_path, contract=GEMM, max_bytes=3 * size) for _ in "ab"]
        for _ in range(3):
            for gemm in samplers:
                gemm(**INPUTS, **CALL)
                assert gemm.sampler.flush(60)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3 * size
        assert [gemm.sampler.recorded for gemm in samplers] == [1, 1]
        late = oracle.sample(right.gemm, every=1, to=tmp_path / "l", contract=GEMM, seconds=0.0)
        late(**INPUTS, **CALL)
        assert late.sampler.flush(60) and files(tmp_path / "l") == []
        small = oracle.sample(right.gemm, every=1, to=tmp_path / "s", contract=GEMM, max_bytes=size - 1)
        small(**INPUTS, **CALL)
        assert small.sampler.flush(60) and files(tmp_path / "s") == [] and small.sampler.dropped == 1

    def test_a_slow_disk_holds_nobody_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Calls that find ``PENDING`` others waiting are dropped, and counted."""
        gate = threading.Event()
        monkeypatch.setattr(sampling.Sampler, "_write", lambda self, taken: gate.wait(60))
        gemm = oracle.sample(right.gemm, every=1, to=tmp_path, contract=GEMM)
        for _ in range(recorder.PENDING + 4):
            gemm(**INPUTS, **CALL)
        assert 3 <= gemm.sampler.dropped <= 4
        gate.set()
        assert gemm.sampler.flush(60)

    def test_threads_and_processes(self, tmp_path: Path) -> None:
        """Every file has its own name and is whole; a child that was forked records under its own."""
        gemm = oracle.sample(right.gemm, every=1, to=tmp_path, contract=GEMM)

        def run() -> None:
            for _ in range(2):
                gemm(**INPUTS, **CALL)
                gemm.sampler.flush(60)

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        def child() -> int:
            gemm(**INPUTS, **CALL)
            return int(not (gemm.sampler.flush(60) and gemm.sampler.recorded == 1))

        with open(os.devnull, "w") as nowhere:
            assert forked(child, stdout=None, stderr=nowhere.fileno()).wait() == 0
        assert len(files(tmp_path)) == 7 and gemm.sampler.recorded == 6 and gemm.sampler.dropped == 0
        assert all(call_file.read(path).contract == GEMM for path in files(tmp_path))

    def test_fork_while_the_folder_is_locked(self, tmp_path: Path) -> None:
        """The child keeps no lock: another sampler writes while it lives. Negative: a lock that is held is reported."""
        gemm = oracle.sample(right.gemm, every=1, to=tmp_path, contract=GEMM)
        gate, held = os.pipe(), gemm.sampler._alone()
        held.__enter__()
        if not (child := os.fork()):
            os._exit(len(os.read(gate[0], 1)))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(recorder, "LOCKED", 0.1)
            other = oracle.sample(right.gemm, every=1, to=tmp_path, contract=GEMM)
            other(**INPUTS, **CALL)
            assert other.sampler.flush(60) and "another process holds" in other.sampler.problems[0]
        held.__exit__(None, None, None)
        other(**INPUTS, **CALL)
        assert other.sampler.flush(60) and other.sampler.recorded == 1
        os.write(gate[1], b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1, "the child lived so long"

    def test_killed_while_the_folder_is_locked(self, tmp_path: Path) -> None:
        """The lock ends with the process that took it, though a child of it lives."""
        gemm = oracle.sample(right.gemm, every=1, to=tmp_path, contract=GEMM)
        gate, born = os.pipe(), os.pipe()
        if not (holder := os.fork()):
            held = gemm.sampler._alone()
            held.__enter__()
            if not os.fork():
                os.write(born[1], b"x")
                os.read(gate[0], 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(holder, 0)[1]) == 0 and os.read(born[0], 1) == b"x"
        gemm(**INPUTS, **CALL)
        written = gemm.sampler.flush(30)
        os.write(gate[1], b"x")
        assert written and gemm.sampler.recorded == 1

    def test_a_link_to_nothing(self, tmp_path: Path) -> None:
        """It counts as a link: the folder takes calls. Negative: a folder that is full takes none."""
        (tmp_path / "latest").symlink_to("nowhere")
        gemm = oracle.sample(right.gemm, every=1, to=tmp_path, contract=GEMM)
        gemm(**INPUTS, **CALL)
        assert gemm.sampler.flush(60) and gemm.sampler.recorded == 1 and gemm.sampler.problems == []
        (tmp_path / "large").write_bytes(bytes(1 << 20))
        full = oracle.sample(right.gemm, every=1, to=tmp_path, contract=GEMM, max_bytes=1 << 20)
        full(**INPUTS, **CALL)
        assert full.sampler.flush(60) and full.sampler.recorded == 0

    def test_inputs_that_exit(self, tmp_path: Path) -> None:
        """SystemExit of ``inputs=`` is a problem of the recording; KeyboardInterrupt is the engine's."""

        def leaves(**arguments: object) -> dict[str, object]:
            raise SystemExit(3)

        def interrupted(**arguments: object) -> dict[str, object]:
            raise KeyboardInterrupt

        gemm = oracle.sample(right.gemm, every=1, to=tmp_path, contract=GEMM, inputs=leaves)
        assert gemm(**INPUTS, **CALL).dtype == torch.bfloat16 and gemm.sampler.problems == ["SystemExit: 3"]
        with pytest.raises(KeyboardInterrupt):
            oracle.sample(right.gemm, every=1, to=tmp_path, contract=GEMM, inputs=interrupted)(**INPUTS, **CALL)


@pytest.mark.turns(4)
class TestJudgeAFolder:
    """``fp8-oracle judge DIR``: an outcome for each call, reports, and what is half-written is named."""

    @pytest.fixture
    def calls(self, tmp_path: Path) -> Path:
        for name, kernel in (("gemm", right.gemm), ("rows_swapped", wrong.rows_swapped)):
            gemm = oracle.sample(kernel, every=1, to=tmp_path / "calls", contract=GEMM, name=name)
            gemm(**INPUTS, **CALL)
            assert gemm.sampler.flush(60)
        return tmp_path / "calls"

    def test_a_wrong_kernel_is_found(self, calls: Path, tmp_path: Path, cli: Cli) -> None:
        junit, record, page = tmp_path / "j.xml", tmp_path / "r.jsonl", tmp_path / "r.json"
        done = cli("judge", str(calls), "--junit", str(junit), "--record", str(record), "--json", str(page))
        assert done.status == 1 and "1 passed, 1 failed" in done.out
        report = json.loads(page.read_text())
        (failed,) = [o for o in report["outcomes"] if o["fails"]]
        assert failed["subject"] == "rows_swapped" and failed["repro"].startswith("fp8-oracle explain '")
        assert 'failures="1"' in junit.read_text()
        assert cli("report", str(record)).status == 1
        assert cli("explain", failed["repro"].partition("'")[2][:-1]).status == 1

    def test_half_written(self, calls: Path, cli: Cli) -> None:
        """A file that was begun is left out and named; one that is torn fails the judgement, as it was to be judged."""
        bad, good = sorted(files(calls), key=lambda p: call_file.read(p).kernel == "gemm")
        bad.unlink()
        (calls / f".{good.name}.x1.partial").write_bytes(good.read_bytes()[:100])
        done = cli("judge", str(calls))
        assert done.status == 0 and "half-written, and left out" in done.err and ".x1.partial" in done.err
        (calls / "torn.safetensors").write_bytes(good.read_bytes()[:-1])
        done = cli("judge", str(calls))
        assert done.status == 1 and "truncated" in done.out and "1 passed" in done.out

    def test_what_is_refused(self, calls: Path, tmp_path: Path, cli: Cli) -> None:
        assert "name the call of one file" in cli("judge", str(calls), "--input", "a=x").err
        assert {cli("judge", str(path)).status for path in files(calls)} == {0, 1}, "a file says its call itself"
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "notes.txt").write_text("")
        done = cli("judge", str(tmp_path / "empty"))
        assert done.status == 2 and "holds no call" in done.err
