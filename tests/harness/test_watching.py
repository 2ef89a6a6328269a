"""A watched model: which layer and which kernel is wrong, that nothing else changes, and what could not be seen."""

from __future__ import annotations

import json
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import oracle
from oracle.bindings.binding import bind
from oracle.errors import FixtureError, OptionError
from oracle.fixtures import call_file
from oracle.harness import interception, runner, watching
from oracle.harness.watching import Watch, parse_budget
from oracle.report.watched import to_html, to_json
from oracle.routines import cases, profiles
from tests.support import watched_kernels
from tests.support.commandline import Cli
from tests.support.watched_model import LAYERS, Model, prompt

GUILTY, LEGAL = 17, 5
X = prompt(8)


def watched(**asked: object) -> Watch:
    return oracle.watch(bindings=watched_kernels.BINDINGS, **asked)  # type: ignore[arg-type]


def row_of(seen: Watch, layer: str, kernel: str) -> object:
    return next(row for row in seen.report.rows if row.layer == layer and row.kernel.endswith(kernel))


@pytest.fixture(scope="module")
def ran() -> tuple[Watch, Tensor, Tensor]:
    model = Model({GUILTY: "wrong_scale", LEGAL: "reversed"})
    before = (torch._scaled_mm, watched_kernels.block_gemm)
    with torch.inference_mode():
        plain = model(X)
        with watched() as seen:
            out = model(X)
    assert (torch._scaled_mm, watched_kernels.block_gemm) == before
    return seen, plain, out


@pytest.mark.turns(4)
class TestAModel:
    """24 layers: one reads the scale of another block, one adds in another order, an ulp off here and there."""

    def test_the_guilty_layer_and_its_fault(self, ran: tuple[Watch, Tensor, Tensor]) -> None:
        seen, plain, out = ran
        assert torch.equal(plain, out), "a watch changes no result"
        assert len(seen.report.rows) == 5 * LAYERS == seen.report.judged
        assert [row.layer for row in seen.report.rows if row.fails] == [f"model.layers.{GUILTY}.mlp.down_proj"]
        assert seen.first is not None and not seen.ok
        assert seen.first.layer == f"model.layers.{GUILTY}.mlp.down_proj" and seen.first.number == 5 * GUILTY + 4
        assert seen.first.outcome.verdict.explained_by == ("A scale swapped between the two K blocks of a tile",)

    def test_the_legal_layer(self, ran: tuple[Watch, Tensor, Tensor]) -> None:
        """Its bits are others, and it is PASSED."""
        row = row_of(ran[0], f"model.layers.{LEGAL}.mlp.down_proj", ":block_gemm")
        assert row.verdict == "PASSED"  # type: ignore[attr-defined]
        given = cases.parse("fp8_gemm_nt/e4m3xe4m3-f32/1x128:128x128/m=8,n=128,k=256/family=randn/seed=1").inputs()
        one, other = (watched_kernels.block_gemm(**given, config=c) for c in ("plain", "reversed"))
        assert not torch.equal(one, other) and torch.allclose(one, other, rtol=1e-3)

    def test_what_it_writes(self, ran: tuple[Watch, Tensor, Tensor], tmp_path: Path, cli: Cli) -> None:
        """A file repeats the judgement; page, JSON and text name the layer."""
        report = ran[0].write(tmp_path)
        assert report.first is not None
        assert cli("explain", report.first.file).status == 1
        record = json.loads((tmp_path / "watch.json").read_text())
        assert record["first"]["layer"] == report.first.layer and record["ok"] is False
        page = (tmp_path / "watch.html").read_text()
        for text in (
            report.first.layer,
            "A scale swapped between",
            "Loss by layer",
            'class="dot bad"',
            report.first.file,
        ):
            assert text in page
        assert "FAILED model.layers.17.mlp.down_proj: A scale swapped" in str(ran[0])

    def test_loss_of_quantisers(self, ran: tuple[Watch, Tensor, Tensor]) -> None:
        losses = [row for row in ran[0].report.rows if row.quantises]
        assert len(losses) == LAYERS
        assert all(row.sqnr is not None and 25 < row.sqnr < 40 and row.saturated is not None for row in losses)


class TestTurns:
    """The first call of each kernel in each layer, then one in so many, until the budget is spent."""

    def test_one_in_two(self) -> None:
        """A right model; without a wrong layer nothing is named."""
        model = Model(layers=1)
        with watched(every=2) as seen:
            for _ in range(3):
                model(X)
        assert seen.ok and seen.first is None and "OK  15 calls of 3 kernels" in str(seen)
        assert {(row.calls, row.judged) for row in seen.report.rows} == {(3, 2)}

    def test_no_time(self) -> None:
        model = Model({0: "wrong_scale"}, layers=1)
        with watched(budget="1 GiB, 0 s") as seen:
            model(X)
        assert seen.report.judged == 1, "time is read after a call"
        assert not [row for row in seen.report.rows if row.fails]
        assert seen.report.notes[-1] == "4 calls beyond the budget of 0 s: raise it, or every"

    def test_no_memory(self) -> None:
        """The verdict needs no copy; the file of the first inadmissible call does."""
        gemm = Model({0: "wrong_scale"}, layers=1).model.layers[0].mlp.down_proj  # type: ignore[index, union-attr]
        with watched(budget="1 KiB, 60 s") as seen:
            gemm(torch.randn(2, 256))
        assert not seen.ok and seen._first_call == {}

    @pytest.mark.parametrize("text", ["2 GiB", "2 GiB, 1 MiB", "2 GB, 60 s", "60 s, much", ""])
    def test_budgets_that_cannot_be_read(self, text: str) -> None:
        with pytest.raises(OptionError, match="as 2 GiB, 60 s"):
            parse_budget(text)
        assert parse_budget("1.5 KiB, 2 min") == (1536, 120.0)


class TestTheModelGoesOn:
    """What is wrong with the watch is counted; what a kernel raises is raised."""

    def test_a_call_that_does_not_bind(self) -> None:
        """Codes as the output: counted with its reason."""
        one = torch.ones(())
        with watched() as seen:
            for dtype in (torch.bfloat16, torch.float8_e4m3fn):
                torch._scaled_mm(CODES, CODES.t(), one, one, out_dtype=dtype)
        (row,) = seen.report.rows
        assert (row.layer, row.calls, row.judged) == (watching.OUTSIDE, 2, 1)
        ((reason, count),) = row.unread.items()
        assert count == 1 and "takes out_dtype as torch.bfloat16" in reason and "float8_e4m3fn" in reason
        assert f"not judged: 1 call of torch:_scaled_mm: {reason}" in str(seen)

    def test_an_error_of_the_judge(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def breaks(*_: object, **__: object) -> None:
            raise RuntimeError("no memory")

        monkeypatch.setattr(runner, "judge_outputs", breaks)
        model = Model(layers=1)
        with watched() as seen:
            model(X)
        assert not seen.ok and seen.report.judged == 0
        assert {tuple(row.unread.items()) for row in seen.report.rows} == {(("RuntimeError: no memory", 1),)}

    def test_a_binding_of_nothing(self) -> None:
        """A contract that does not exist is the reason of every call."""
        binding = bind(f"{watched_kernels.__name__}:block_gemm", "nothing", "(a)", "(a, *_, **__)")
        with oracle.watch(bindings=(binding,)) as seen:
            Model(layers=1)(X)
        (row,) = [row for row in seen.report.rows if row.kernel == binding.target]
        ((reason, count),) = row.unread.items()
        assert count == 1 and "no contract 'nothing'" in reason

    def test_an_error_of_the_kernel(self) -> None:
        """It is raised, the path is left, and what follows is judged."""
        model = Model(layers=1)
        with watched() as seen:
            with pytest.raises(RuntimeError):
                model(torch.randn(8, 7))
            model(X)
        assert seen.ok and {row.layer.split(".")[0] for row in seen.report.rows} == {"model"}

    def test_a_watch_that_cannot_begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It leaves nothing behind, and another one begins."""
        cast, scaled = watched_kernels.per_token_cast, interception.operator_of("torch:_scaled_mm")
        with monkeypatch.context() as patched:
            patched.setattr(interception.Interception, "_wrapper", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                watched().__enter__()
        assert watched_kernels.per_token_cast is cast and scaled is not None
        with watched() as seen:
            Model(layers=1)(X)
        assert seen.ok

    def test_what_is_refused(self, tmp_path: Path) -> None:
        with watched() as seen, pytest.raises(OptionError, match="a watch is on"):
            watched().__enter__()
        with pytest.raises(OptionError, match="every=0"):
            watched(every=0)
        with watched() as seen, pytest.raises(OptionError, match="after the with block"):
            _ = seen.report
        with pytest.raises(FixtureError, match="no call of a watch"):
            watching.judged(tmp_path)


class Rows(nn.Module):
    """One product."""

    def forward(self, x: Tensor) -> Tensor:
        one = torch.ones((), device=x.device)
        return torch._scaled_mm(x, x.t(), one, one, out_dtype=torch.bfloat16)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Rows(), Rows()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)  # type: ignore[no-any-return]


CODES = torch.ones(16, 32).to(torch.float8_e4m3fn)


class TestWhatIsSeen:
    """Operators wherever they are called, Python functions in every module that has them, now or later."""

    @pytest.fixture
    def library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """A library and a module that has imported its function by name."""
        text = (
            "from tests.support.watched_kernels import per_token_cast as _cast\n\ndef cast(x):\n    return _cast(x)\n"
        )
        (tmp_path / "a_library.py").write_text(text)
        (tmp_path / "an_engine.py").write_text("from a_library import cast\n")
        monkeypatch.syspath_prepend(tmp_path)
        yield
        for name in ("a_library", "an_engine"):
            sys.modules.pop(name, None)

    @pytest.mark.usefixtures("library")
    @pytest.mark.parametrize("later", [False, True])
    def test_python_functions(self, later: bool) -> None:
        if not later:
            import an_engine  # type: ignore[import-not-found]  # before the watch
        binding = bind("a_library:cast", "per_token_cast_to_fp8", "(x)", "(x)")
        with oracle.watch(bindings=(binding,)) as seen:
            import an_engine

            wrapped = an_engine.cast
            an_engine.cast(torch.randn(2, 128))
        assert [(row.kernel, row.verdict) for row in seen.report.rows] == [("a_library:cast", "PASSED")]
        assert an_engine.cast is not wrapped and an_engine.cast is sys.modules["a_library"].cast
        assert not [finder for finder in sys.meta_path if type(finder).__name__ == "AfterImport"]

    def test_a_class_stays_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its instances are asked for by isinstance."""
        (tmp_path / "library_of_codes.py").write_text("class Codes:\n    def __init__(self, x):\n        self.x = x\n")
        monkeypatch.syspath_prepend(tmp_path)
        import library_of_codes  # type: ignore[import-not-found]

        binding = bind("library_of_codes:Codes", "per_token_cast_to_fp8", "(x)", "(x)")
        with oracle.watch(bindings=(binding,)) as seen:
            assert isinstance(library_of_codes.Codes(torch.ones(1, 128)), library_of_codes.Codes)
        assert not seen.report.rows

    def test_threads_and_an_output_that_is_given(self) -> None:
        """Another thread, inference mode and ``out=`` pass by the same place."""
        out, one = torch.empty(16, 16, dtype=torch.bfloat16), torch.ones(())
        keywords = {"out_dtype": torch.bfloat16, "out": out}
        model = Two()
        with watched() as seen:
            thread = threading.Thread(target=lambda: model(CODES))
            thread.start()
            thread.join()
            with torch.inference_mode(), torch.autocast("cpu"):
                torch.ops.aten._scaled_mm.out(CODES, CODES.t(), one, one, **keywords)
        assert {row.verdict for row in seen.report.rows} == {"PASSED"}
        assert [row.layer for row in seen.report.rows] == ["first", "second", watching.OUTSIDE]

    @pytest.mark.turns(4)
    def test_compiled(self) -> None:
        """Operators of a graph are seen, under the layer outside of it, and a note says what is not."""
        graphs = []
        model = nn.Sequential(Two(), nn.Identity())
        model[0].compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
        model(CODES)
        with watched() as seen:
            model(CODES)
        assert len(graphs) == 1, "the watch compiles nothing anew"
        assert [(row.layer, row.calls) for row in seen.report.rows] == [("Sequential", 2)]
        assert "what torch.compile compiled (0, " in seen.report.notes[0]

    @pytest.mark.turns(4)
    def test_compiled_under_the_watch(self) -> None:
        """A compiler reads neither the hooks nor the judge; torch itself warns of hooks."""
        graphs = []
        model = torch.compile(Two(), fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
        with watched() as seen, pytest.warns(UserWarning, match="global hooks"):
            model(CODES)
        assert len(graphs) == 1 and [(row.layer, row.calls) for row in seen.report.rows] == [("Two", 2)]
        assert torch.equal(model(CODES), Two()(CODES))

    def test_cuda_graphs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Calls while a graph is captured, and replays, are counted; without either there is no note."""
        replays = []
        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(graph))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        for capturing in (True, False):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)  # noqa: B023
            with watched() as seen:
                Rows()(CODES)
                if capturing:
                    torch.cuda.CUDAGraph.replay(SimpleNamespace())  # type: ignore[arg-type]
            notes = [note for note in seen.report.notes if "CUDA" in note]
            assert len(notes) == 2 * capturing and seen.report.judged == (not capturing)
        assert len(replays) == 1

    def test_an_output_that_is_an_input(self) -> None:
        """A cache is judged by what it held before; the negative twin writes another row."""
        contract = "set_mla_kv_buffer"
        case = cases.parse(str(profiles.cases(contract, "quick")[0]))
        due = oracle.reference(contract, case.inputs(), **case.call_options())["kv_buffer"]  # type: ignore[index]
        names = [spec.name for spec in oracle.contracts()[contract].inputs]
        binding = bind(f"{__name__}:write", contract, f"({', '.join(names)})", f"({', '.join(names)})")
        verdicts = []
        for turned in (0, 1):
            WRITTEN["due"] = due.view(torch.uint8).roll(turned, 0)
            with oracle.watch(bindings=(binding,)) as seen:
                sys.modules[__name__].write(*(case.inputs()[name] for name in names))
            verdicts.append(seen.report.rows[0].verdict)
        assert verdicts == ["PASSED", "FAILED"]


WRITTEN: dict[str, Tensor] = {}


def write(kv_buffer: Tensor, *_: Tensor) -> None:
    """A kernel that writes what :data:`WRITTEN` has."""
    kv_buffer.view(torch.uint8).copy_(WRITTEN["due"])


@pytest.mark.turns(4)
class TestRecorded:
    """The same calls in files, judged later."""

    def test_the_same_rows(self, tmp_path: Path, cli: Cli) -> None:
        model = Model({1: "wrong_scale"}, layers=2)
        with watched() as seen:
            model(X)
        with watched(to=tmp_path / "calls") as recorded:
            model(X)
        assert to_json(recorded.report)["rows"] == to_json(seen.report)["rows"]
        assert recorded.first is not None and seen.first is not None and recorded.first.layer == seen.first.layer
        assert call_file.read(recorded.first.file).about["layer"] == "model.layers.1.mlp.down_proj"
        page = tmp_path / "w.html"
        done = cli("watch", "--recorded", str(tmp_path / "calls"), "--html", str(page), "--quiet")
        assert done.status == 1 and "model.layers.1.mlp.down_proj" in done.out and "layers.0" not in done.out
        assert "model.layers.0.mlp.up_proj" in page.read_text()
        assert to_html(recorded.report).count("<tr>") == page.read_text().count("<tr>")

    def test_a_full_folder(self, tmp_path: Path) -> None:
        with watched(to=tmp_path, budget="1 KiB, 60 s") as seen:
            Model(layers=1)(X)
        assert seen.report.judged == 0 and not seen.ok
        assert seen.report.notes[-1] == "5 calls beyond the budget of 1024 bytes"

    def test_a_command(self, tmp_path: Path, cli: Cli, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A program and its child are watched from their import of torch on; the status of a program that fails
        counts, though all its calls are right."""
        program = tmp_path / "program.py"
        text = """
            import multiprocessing, sitecustomize, sys
            from tests.support.watched_model import Model, prompt
            model = Model(layers=1)
            model(prompt(8))
            child = multiprocessing.get_context("fork").Process(target=model, args=(prompt(4),))
            child.start()
            child.join()
            sys.exit(sitecustomize.STATUS)
        """
        program.write_text(textwrap.dedent(text))
        (tmp_path / "sitecustomize.py").write_text("STATUS = 3\n")  # one that was there before
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
        done = cli("watch", "--to", str(tmp_path / "c"), "--every", "2", "--", sys.executable, str(program))
        assert done.status == 1 and "ended with status 3" in done.err
        assert "OK  6 calls of 1 kernel in 3 layers, 6 judged" in done.out

    def test_what_is_refused(self, tmp_path: Path, cli: Cli) -> None:
        assert "name a command behind --" in cli("watch").err
        assert "no-such-program: cannot be run" in cli("watch", "--", "no-such-program").err
        assert "as 2 GiB, 60 s" in cli("watch", "--budget", "much", "--", "true").err
        assert "not an empty folder" in cli("watch", "--to", str(tmp_path.parent), "--", "true").err
        assert "holds no call of a watch" in cli("watch", "--", "true").err
