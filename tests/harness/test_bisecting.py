"""Two recordings of one model: equal, legally different, with a fault, and with a difference that was not recorded."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import oracle
from oracle.bindings.binding import bind
from oracle.errors import FixtureError
from oracle.fixtures import call_file
from oracle.harness.bisecting import bisect
from oracle.report.bisected import Bisected
from tests.support import watched_kernels
from tests.support.commandline import Cli

FIRST, SECOND = "sm90.promote128", "sm90.promote128.muladd"
X = torch.randn(4, 256, generator=torch.Generator().manual_seed(3))


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, schedule: str = FIRST) -> Tensor:
    """The bits of a schedule; ``wrong`` swaps two rows of them."""
    inputs = {"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale}
    wrong = schedule == "wrong"
    out = oracle.predict("fp8_gemm_nt", inputs, numerics=FIRST if wrong else schedule, out_dtype=torch.float32)
    assert isinstance(out, Tensor)
    return out[[1, 0, 2, 3]] if wrong else out


class Layer(nn.Module):
    def __init__(self, schedule: str) -> None:
        super().__init__()
        weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(4))
        self.scale, self.schedule = torch.tensor([[0.01, 0.02], [0.03, 0.015]]), schedule
        self.weight = (weight / 0.16).to(torch.float8_e4m3fn)

    def forward(self, x: Tensor) -> Tensor:
        here = sys.modules[__name__]
        return here.product(*watched_kernels.per_token_cast(x), self.weight, self.scale, self.schedule)  # type: ignore[no-any-return]


BINDINGS = (
    watched_kernels.BINDINGS[0],
    bind(
        f"{__name__}:product",
        "fp8_gemm_nt",
        "(a, a_scale, b, b_scale)",
        "(a, a_scale, b, b_scale, schedule='')",
        takes={"out_dtype": torch.float32},
        ignores=("schedule",),
    ),
)


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Path]:
    """Records a model whose layers have these schedules; ``between`` is added to the input of the second."""

    def record(name: str, *schedules: str, between: float = 0.0) -> Path:
        layers = nn.ModuleDict({f"layer{i}": Layer(schedule) for i, schedule in enumerate(schedules)})

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = layers

            def forward(self, x: Tensor) -> Tensor:
                for number, layer in enumerate(self.layers.values()):
                    x = layer(x + between * number)
                return x

        with oracle.watch(to=tmp_path / name, arch="sm90", bindings=BINDINGS) as seen:
            Model()(X)
        assert seen._recorder is not None and seen._recorder.recorded == 2 * len(schedules)
        return tmp_path / name

    return record


def told(report: Bisected) -> str:
    return "\n".join(report.lines())


class TestThreePairs:
    """The same bits; other bits that are right; a fault. The status of the command is 0, 0 and 1."""

    def test_the_same(self, recorded: Callable[..., Path], cli: Cli) -> None:
        one, other = recorded("a", FIRST, SECOND), recorded("b", FIRST, SECOND)
        report = bisect(one, other)
        assert (report.word, report.ok, report.pairs, report.equal) == ("SAME", True, 4, 4)
        done = cli("bisect", str(one), str(other))
        assert done.status == 0 and "SAME  every pair of calls has equal bits; 4 pairs" in done.out

    def test_a_legal_difference(self, recorded: Callable[..., Path], cli: Cli, tmp_path: Path) -> None:
        """Two schedules of one arch: both are named, and what follows is judged by its own inputs."""
        one, other = recorded("a", FIRST, FIRST), recorded("b", SECOND, SECOND)
        report = bisect(one, other)
        assert (report.word, report.ok, report.equal) == ("LEGAL", True, 1)
        assert report.parting is not None and report.parting.layer == "layers.layer0" and not report.parting.inputs
        assert [side.verdict.matches for side in report.parting.sides] == [FIRST, SECOND]
        (difference,) = report.parting.outputs
        assert difference.differing is not None and 0 < difference.differing < 4 * 256
        page = tmp_path / "b.json"
        done = cli("bisect", str(one), str(other), "--json", str(page))
        assert done.status == 0 and f"PASSED, the bits of {SECOND}" in done.out and "LEGAL" in done.out
        assert json.loads(page.read_text())["parting"]["sides"][1]["verdict"]["matches"] == SECOND

    @pytest.mark.parametrize("first", [FIRST, SECOND])
    def test_a_fault(self, recorded: Callable[..., Path], cli: Cli, first: str) -> None:
        """In the second layer, behind equal calls or behind a legal difference."""
        one, other = recorded("a", FIRST, FIRST), recorded("b", first, "wrong")
        report = bisect(one, other)
        assert (report.word, report.ok) == ("FAULT", False)
        ((side),) = report.wrong
        assert (side.which, side.layer) == ("B", "layers.layer1")
        assert side.verdict.explained_by == ("two rows swapped (rows 0 and 1)",)
        assert report.parting is not None and report.parting.layer == f"layers.layer{int(first == FIRST)}"
        done = cli("bisect", str(one), str(other))
        assert done.status == 1 and "the first inadmissible call of B, in layers.layer1" in done.out
        assert cli("explain", side.file).status == 1
        if first == SECOND:
            assert bisect(one, other, only_first=True).word == "LEGAL"


class TestWhatIsNotThere:
    def test_a_difference_that_was_not_recorded(self, recorded: Callable[..., Path], cli: Cli) -> None:
        one, other = recorded("a", FIRST, FIRST), recorded("b", FIRST, FIRST, between=0.5)
        report = bisect(one, other)
        assert (report.word, report.ok, report.equal) == ("UNSEEN", False, 2)
        assert "inputs differ: x; nothing that was recorded before" in told(report)
        assert cli("bisect", str(one), str(other)).status == 1

    def test_calls_of_one_side(self, recorded: Callable[..., Path]) -> None:
        report = bisect(recorded("a", FIRST), recorded("b", FIRST, FIRST))
        assert (report.word, report.pairs, report.alone) == ("SAME", 2, (0, 2))
        assert "2 calls that the other has not" in told(report)

    def test_another_shape(self, recorded: Callable[..., Path]) -> None:
        """An output of another dtype cannot be counted, and is judged."""
        one, other = recorded("a", FIRST), recorded("b", FIRST)
        path = next(p for p in call_file.within(other)[0] if "fp8_gemm_nt" in p.name)
        call = call_file.read(path)
        assert isinstance(call.output, Tensor)
        half = {**call.options, "out_dtype": torch.bfloat16}
        call_file.write(path, call_file.CallFile(**{**vars(call), "output": call.output.bfloat16(), "options": half}))
        report = bisect(one, other)
        assert report.word == "UNSEEN" and "out has another shape or dtype" in told(report)
        assert report.parting is not None and report.parting.inputs == ("out_dtype",)

    def test_what_is_refused(self, recorded: Callable[..., Path], tmp_path: Path, cli: Cli) -> None:
        one = recorded("a", FIRST)
        (tmp_path / "empty").mkdir()
        with pytest.raises(FixtureError, match="holds no call of a watch"):
            bisect(one, tmp_path / "empty")
        assert "no such folder" in cli("bisect", str(one), str(tmp_path / "nowhere")).err
        other = recorded("b", FIRST)
        for path in call_file.within(other)[0]:
            call = call_file.read(path)
            about = {**call.about, "layer": "elsewhere"}
            call_file.write(path, call_file.CallFile(**{**vars(call), "about": about}))
        with pytest.raises(
            FixtureError, match=r"has no call of .*elsewhere per_token_cast_to_fp8.* here, layers.layer0"
        ):
            bisect(one, other)
