"""State of the layer: contexts of threads, memos with a limit, decisions that are forced, logged and explained."""

from __future__ import annotations

import ast
import logging
import re
import threading
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import kernels
from kernels import context, routes
from kernels.backends.declaration import DECISIONS, _absent, traced
from kernels.config import Config, current_config, environment_table, use_config
from kernels.errors import ConfigError, NoBackendError, SwitchedOff, Unavailable, Unsupported
from kernels.plan import MODULES, TABLE, Problem, backend_of, plan
from kernels.platform import Machine, current_machine, use_machine

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SM90 = Machine.described("sm90")


class TestContexts:
    """A block is seen by the thread that enters it; the rest of the process keeps its own."""

    def test_another_thread_does_not_see_a_block(self) -> None:
        seen: list[object] = []

        def look() -> None:
            seen.append((current_config().batch_invariant, current_machine().arch, len(context.current().decisions)))

        before = current_config().batch_invariant, current_machine().arch
        with use_config(Config(batch_invariant=True)), use_machine(SM90):
            routes.route("linear", torch.device("cuda", 0), ("n", 128), ("k", 128))
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            look()
        (other, own), process = seen, len(context.current().decisions)
        assert other == (*before, process) and own == (True, "sm90", 1)

    def test_threads_force_their_own_backend(self) -> None:
        """At once, in every order; with one state for the process each would meet the other's."""
        found: dict[str, set[str]] = {"eager": set(), "torch": set()}
        start = threading.Barrier(2)

        def run(name: str) -> None:
            for _ in range(50):
                start.wait()
                with routes.only(name):
                    found[name].add(routes.route("linear", CPU, ("n", 16), ("k", 16)).name)

        threads = [threading.Thread(target=run, args=(name,)) for name in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {"eager": {"eager"}, "torch": {"torch"}}

    def test_a_value_is_made_once(self) -> None:
        made: list[int] = []
        once: context.Once[int] = context.Once()
        start = threading.Barrier(8)

        def ask() -> None:
            start.wait()
            assert once.get(lambda: made.append(1) or 7) == 7  # type: ignore[func-returns-value]

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made == [1]

    def test_a_memo_has_a_limit(self) -> None:
        """A full one forgets its older half, and so stays quick for what is in use."""
        memo: context.Memo[int, int] = context.Memo(4)
        for i in range(20):
            assert memo.keep(i, -i) == -i and memo.get(i) == -i and len(memo) <= 4
            assert i == 0 or memo.get(i - 1) == 1 - i
        assert context.MOST_WEIGHTS >= 100_000  # live weights, whose calls stay as quick as those of one

    def test_no_module_keeps_another_dictionary(self) -> None:
        """Whatever a module keeps and fills is a memo; none writes a global name or starts with an empty dictionary.

        But ``verbs.py``, whose tables are full when the package is imported.
        """

        def kept(source: str) -> list[ast.AST]:
            tree = ast.parse(source)
            values = [n.value for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign)]
            empty = [value for value in values if isinstance(value, ast.Dict) and not value.keys]
            return [*empty, *(n for n in ast.walk(tree) if isinstance(n, ast.Global))]

        assert len(kept("_seen: dict[str, int] = {}\ndef f():\n    global x\n    x = 1")) == 2  # the twin
        for path in (ROOT / "kernels").rglob("*.py"):
            assert path.name == "verbs.py" or not kept(path.read_text()), path


class TestForced:
    """``FP8_KERNELS_BACKEND``: one backend or none, for all operations that list it or for one."""

    @pytest.mark.parametrize(
        ("text", "op", "backend"),
        [
            ("", "linear", "cutlass"),
            ("torch", "linear", "torch"),
            ("torch", "quant_group", "triton"),
            ("linear=torch,quant_group=eager", "linear", "torch"),
            ("linear=torch,quant_group=eager", "quant_group", "eager"),
            ("linear=torch,quant_group=eager", "block_linear", "cutlass"),
        ],
    )
    def test_it_is_taken(self, text: str, op: str, backend: str) -> None:
        made = plan(Problem(op, n=128, k=128), SM90, Config(backend=text))
        assert made.backend == backend
        refused = [why for name, why in made.reasons if text and backend != "cutlass" and backend in text]
        assert all(isinstance(why, SwitchedOff) for why in refused)

    def test_or_none(self) -> None:
        with pytest.raises(NoBackendError, match="only eager is asked for") as caught:
            plan(Problem("linear", n=128, k=128), SM90, Config(backend="linear=eager"))
        assert isinstance(caught.value.reasons["eager"], Unsupported)

    @pytest.mark.parametrize("text", ["cublas", "linear=cublas", "linear=flashinfer", "matmul=torch", "linear="])
    def test_a_wrong_name_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="known|listed"):
            plan(Problem("linear", n=128, k=128), SM90, Config(backend=text))

    def test_the_variable(self) -> None:
        with use_config(Config.from_environment({"FP8_KERNELS_BACKEND": "linear=eager"})):
            assert routes.route("linear", CPU, ("n", 16), ("k", 16)).name == "eager"
        assert routes.route("linear", CPU, ("n", 16), ("k", 16)).name == "torch"


def test_reasons_have_classes() -> None:
    """By which an engine tells what it can do about them; the text is for people."""
    bare = Machine.described("sm90", packages={"triton": "1.0"})
    problem = Problem("blockscale_sm90", n=128, k=128)
    off = Config(blockscale_gemm_flashinfer=False)
    for machine, config, kind in ((bare, Config(), Unavailable), (SM90, off, SwitchedOff)):
        with pytest.raises(NoBackendError) as caught:
            plan(problem, machine, config)
        assert type(caught.value.reasons["flashinfer"]) is kind
        assert isinstance(caught.value, ImportError) == (kind is Unavailable)
        assert type(caught.value.reasons["eager"]) is Unsupported


class TestExplained:
    """What decides for a layer, asked at run time."""

    def test_a_layer(self) -> None:
        layer, (w, s) = kernels.Fp8LinearOp(), kernels.scaled_fp8_quant(torch.randn(16, 32))
        layer.apply(torch.randn(3, 32), w.t(), s)  # decided before, and still explained
        kept = dict(context.current().decisions)
        with kernels.explain() as plans:
            for _ in range(2):
                layer.apply(torch.randn(3, 32), w.t(), s)
        assert [p.problem.op for p in plans] == ["quant_tensor", "torch_linear"]
        assert "rejected triton: needs a GPU" in str(plans[0]) and "torch._scaled_mm" in str(plans[1])
        assert dict(context.current().decisions) == kept and context.current().observed is None

    def test_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        """Each decision once in a process, at the switch alone."""
        routes._log_once.cache_clear()
        for switch, lines in (("0", 0), ("1", 1), ("1", 1)):
            config = Config.from_environment({"FP8_KERNELS_LOG": switch})
            with caplog.at_level(logging.INFO, "kernels.routes"), use_config(config):
                routes.route("quant_group", CPU, ("group_size", 128))
            assert len(caplog.records) == lines
        said = caplog.records[0].getMessage()
        assert said.startswith("quant_group device=cpu") and said.count("rejected") == 3


def test_the_page_lists_every_variable() -> None:
    """Those that the code names, and no other of these prefixes."""
    named = re.compile(r"\bFP8_(?:KERNELS|ORACLE)_[A-Z_]+\b")
    page = set(named.findall((ROOT / "docs" / "reference" / "environment.md").read_text()))
    code = {
        name
        for folder in ("kernels", "oracle", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for name in named.findall(path.read_text())
    }
    assert page == code and "`FP8_KERNELS_LOG`" in environment_table()


class TestTrace:
    """Calls of libraries by backend and function; nothing outside of the block."""

    def test_calls_are_counted_and_named(self) -> None:
        x, w, s = torch.randn(4, 256).bfloat16(), torch.zeros(128, 256).to(torch.float8_e4m3fn), torch.ones(1, 2)
        right = kernels.deepgemm_blockscale_linear(x, w, s)
        with kernels.trace() as calls:
            for _ in range(3):  # the later ones by the fast path
                assert torch.equal(kernels.deepgemm_blockscale_linear(x, w, s), right)
            kernels.scaled_fp8_quant(x)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                kernels.deepgemm_blockscale_linear(x, w, s)
        names = {event.key: event.count for event in profile.key_averages()}
        assert calls["eager", "quant_group"] == 4 and calls["eager", "quant_tensor"] == 1
        assert sum(calls.values()) == 9 and {backend for backend, _ in calls} == {"eager"}
        assert names["fp8_kernels.eager.quant_group"] == 1
        kernels.deepgemm_blockscale_linear(x, w, s)
        assert sum(calls.values()) == 9

    @pytest.mark.parametrize("name", MODULES)
    def test_every_operation_of_every_backend_is_counted(self, name: str) -> None:
        """And what was not declared is not there."""
        calls: context.Calls = Counter()
        plain, backend = backend_of(name), traced(backend_of(name), calls)
        ours = [f.name for f in fields(plain) if f.name not in DECISIONS]
        assert any(getattr(backend, f) is not getattr(plain, f) for f in ours)
        for f in ours:
            function = getattr(plain, f)
            assert (getattr(backend, f) is function) is (function in (None, _absent))
        assert all(backend.declares(op) is plain.declares(op) for op in TABLE)
