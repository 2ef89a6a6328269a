"""What the user's process has set, or hung on a tensor, changes no bit of any answer.

Every verb, for the smallest case of every contract: in a process whose default device is ``meta``, whose default dtype
is float64 and which is in inference mode from before the package is imported; and with inputs and outputs that are
parameters, of a subclass, strided, or still to be negated.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import oracle
from oracle import errors
from oracle.numbers.formats import codes_of
from oracle.routines import cases, get
from tests.support.answers import NAMES, Answers, answers, expected, smallest
from tests.support.commandline import CASE
from tests.support.figures import parsed
from tests.support.forked import forked, load_again
from tests.support.subjects import right

pytestmark = pytest.mark.turns(4)

ROOT = Path(__file__).resolve().parents[2]
TIMES = ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today")
WRITTEN = ("isoformat", "date")


def in_hostile_defaults(names: list[str]) -> int:
    """In a child: the package is loaded again, from where the defaults are others."""
    load_again()
    del sys.modules["tests.support.answers"]
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    with torch.inference_mode():
        from tests.support.answers import answers, smallest

        found = {name: answers(name, *smallest(name)) for name in names}
    torch.set_default_device("cpu")
    print(json.dumps(found))
    return 0


@cache
def usual(name: str) -> Answers:
    return answers(name, *smallest(name))


@pytest.fixture(scope="module")
def hostile(request: pytest.FixtureRequest) -> dict[str, Answers]:
    """All answers that this run asks for, of a process with other defaults."""
    asked = [item for item in request.session.items if "hostile" in getattr(item, "fixturenames", ())]
    names = [item.callspec.params["name"] for item in asked if isinstance(item, pytest.Function)]
    with tempfile.TemporaryFile() as said:
        child = forked(lambda: in_hostile_defaults(names), stdout=said.fileno(), stderr=2)
        assert child.wait() == 0
        said.seek(0)
        return json.loads(said.read())  # type: ignore[no-any-return]


class Tagged(Tensor):
    """A subclass that adds nothing."""


BY_MEMORY = ("get_col_major_tma_aligned_tensor",)  # judged by the memory behind the output, which negating replaces


def laden(x: Tensor) -> Tensor:
    """The same values, still to be negated, of a subclass, and with a gradient where torch has one."""
    return negated(x).as_subclass(Tagged).requires_grad_(x.is_floating_point() and x.element_size() > 1)


def tagged(x: Tensor) -> Tensor:
    return x.as_subclass(Tagged)


def negated(x: Tensor) -> Tensor:
    """The same bits behind a pending negation, where torch has one; negating twice keeps no payload of a NaN."""
    if not x.is_floating_point() or x.element_size() == 1 or bool(x.isnan().any()):
        return x
    return torch._neg_view(-x)


def strided(x: Tensor) -> Tensor:
    """The same values with every second element of a larger memory, in the order of the given one."""
    if x.dim() == 0:
        return x
    if x.dim() > 1 and x.mT.is_contiguous() and not x.is_contiguous():
        return strided(x.mT).mT
    memory = torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)
    bits = codes_of(memory) if x.is_floating_point() else memory
    bits[..., ::2] = codes_of(x) if x.is_floating_point() else x
    return memory[..., ::2]


class TestDefaults:
    """Default device and dtype, and inference mode, are the user's; the oracle names its own."""

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("name", NAMES)
    def test_same_answers(self, name: str, hostile: dict[str, Answers]) -> None:
        assert hostile[name] == usual(name)

    def test_every_factory_names_them(self) -> None:
        """A factory without a device makes its tensor where the user says; float ones need a dtype as well."""
        for package in ("oracle", "kernels"):
            for path in sorted((ROOT / package).rglob("*.py")):
                unnamed = without_defaults(parsed(path))
                assert unnamed == [], f"{path.relative_to(ROOT)}: {unnamed[0]}"

    def test_that_check_sees_a_factory_that_does_not(self) -> None:
        for source, unnamed in (
            ("torch.zeros(3, dtype=torch.int64)", ["line 1: torch.zeros has no device"]),
            ("torch.tensor(x, device=d)", ["line 1: torch.tensor has no dtype"]),
            ("torch.arange(3, device=d)", []),
        ):
            assert without_defaults(ast.parse(source)) == unnamed


class TestTensors:
    """Gradients, subclasses, strides and pending negations are no part of a value."""

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("name", NAMES)
    def test_same_answers(self, name: str) -> None:
        inputs, options = smallest(name)
        changed = {n: laden(x) for n, x in inputs.items()}
        change = tagged if name in BY_MEMORY else laden
        assert answers(name, changed, options, change) == usual(name)

    def test_parameters(self) -> None:
        inputs, options = smallest("cutlass_scaled_mm")
        changed = {n: torch.nn.Parameter(x, requires_grad=x.dtype == torch.float32) for n, x in inputs.items()}
        assert answers("cutlass_scaled_mm", changed, options, torch.nn.Parameter) == usual("cutlass_scaled_mm")  # type: ignore[arg-type]

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("name", NAMES)
    def test_strides(self, name: str) -> None:
        """Contracts that judge strides say so; the others read values."""
        inputs, options = smallest(name)
        packed = {spec.name for spec in get(name).inputs if spec.contiguous}
        changed = {n: x if n in packed else strided(x) for n, x in inputs.items()}
        assert answers(name, changed, options) == usual(name)

    def test_expanded_views(self) -> None:
        """Strides of zero: one row of memory for all rows of the matrix."""
        codes = torch.arange(0, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)[None].expand(6, 128)
        inputs = {"a": codes, "a_scale": torch.rand(6, 1), "b": codes[:1].expand(8, 128), "b_scale": torch.ones(1, 1)}
        dense = {n: x.contiguous() for n, x in inputs.items()}
        inputs["a"], dense["a"] = inputs["a"][:, :126], dense["a"][:, :126].contiguous()
        inputs["b"], dense["b"] = inputs["b"][:, :126], dense["b"][:, :126].contiguous()
        assert answers("fp8_gemm_nt", inputs, {}) == answers("fp8_gemm_nt", dense, {})
        out = torch.zeros(1, 1, dtype=torch.bfloat16).expand(6, 8)
        verdict = oracle.judge("fp8_gemm_nt", dense, out)
        assert verdict.outside == oracle.judge("fp8_gemm_nt", dense, out.contiguous()).outside == 48

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # they are refused here, however young
    def test_what_has_no_values_is_refused(self) -> None:
        inputs, options = smallest("fp8_gemm_nt")
        out = expected("fp8_gemm_nt", inputs, **options)["out"]
        from torch._subclasses.fake_tensor import FakeTensorMode

        fake = FakeTensorMode().from_tensor(out)
        nested = torch.nested.nested_tensor([out[0], out[0, :3]])
        for wrong, error in (
            (fake, errors.InputError),
            (nested, errors.LayoutError),
            (out.to("meta"), errors.DeviceError),
            (out.float().to_sparse(), errors.LayoutError),
        ):
            with pytest.raises(error, match="out (is|lies on)"):
                oracle.judge("fp8_gemm_nt", inputs, wrong, **options)  # type: ignore[arg-type]

    def test_below_the_verbs_a_pending_negation_is_refused(self) -> None:
        """A contract called directly does not read bits that are not those of the values."""
        inputs, options = smallest("fp8_gemm_nt")
        contract = get("fp8_gemm_nt")
        with pytest.raises(errors.LayoutError, match=r"a_scale\.resolve_neg\(\)"):
            contract.reference(inputs | {"a_scale": negated(inputs["a_scale"])}, **options)
        out = negated(expected(contract.name, inputs, **options)["out"])
        with pytest.raises(errors.LayoutError, match=r"out\.resolve_neg\(\)"):
            contract.judge(inputs, out, arch="sm90", numerics=None, **options)


class TestClock:
    """A clock that is set, or that NTP moves, changes no deadline and no duration: those never go back."""

    def test_no_deadline_is_of_the_clock(self) -> None:
        """The time of day is only ever written down; the cache compares it with the times of files."""
        paths = [path for package in ("oracle", "kernels") for path in (ROOT / package).rglob("*.py")]
        paths.remove(ROOT / "oracle/cache.py")
        paths = [path for path in paths if re.search(r"datetime|time\.time|from time ", path.read_text())]
        assert paths and not [f"{path}:{line}" for path in paths for line in times_of_day(parsed(path))]

    @pytest.mark.parametrize(
        ("text", "lines"),
        [
            ("time.time() + 3", [1]),
            ("from time import monotonic, time", [1]),
            ("x\nend = time.time_ns()", [2]),
            ("datetime.now(UTC) - start", [1]),
            ("datetime.datetime.utcnow() > end", [1]),
            ("datetime.now(UTC).isoformat(timespec='seconds')", []),
            ("time.monotonic(), time.perf_counter()", []),
        ],
    )
    def test_what_that_check_sees(self, text: str, lines: list[int]) -> None:
        assert list(times_of_day(ast.parse(text))) == lines

    @pytest.mark.parametrize(("steady", "recorded"), [(0.0, 2), (100.0, 1)])
    def test_jumps(self, steady: float, recorded: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Years between two calls by the clock end no recording of a minute; time that passed does (the twin)."""
        inputs = cases.parse(CASE).inputs()
        sampled = oracle.sample(right.gemm, every=1, to=tmp_path, contract="fp8_gemm_nt", seconds=60.0)
        day, monotonic = time.time, time.monotonic
        for number in range(2):
            monkeypatch.setattr(time, "time", lambda: day() + (-1) ** number * 1e9)  # noqa: B023  # called in the turn
            monkeypatch.setattr(time, "monotonic", lambda: monotonic() + number * steady)  # noqa: B023
            sampled(**inputs, out_dtype=torch.bfloat16)
            assert sampled.sampler.flush(60.0)
        assert sampled.sampler.recorded == recorded


def name_of(called: ast.expr) -> str:
    """``time.time`` of an expression that ends so."""
    inner = called.value if isinstance(called, ast.Attribute) else None
    last = getattr(inner, "attr", getattr(inner, "id", ""))
    return f"{last}.{called.attr}" if isinstance(called, ast.Attribute) else ""


def times_of_day(tree: ast.Module) -> Iterator[int]:
    """The lines that read the time of day otherwise than to write it down."""
    written = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in WRITTEN}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            if {"time", "time_ns"} & {name.name for name in node.names}:
                yield node.lineno
        elif isinstance(node, ast.Call) and node not in written and name_of(node.func) in TIMES:
            yield node.lineno


def test_identify_keeps_to_the_named_output_dtype() -> None:
    inputs, _ = smallest("fp8_gemm_nt")
    out = oracle.predict("fp8_gemm_nt", inputs)
    assert isinstance(out, Tensor)
    assert oracle.identify("fp8_gemm_nt", inputs, out, out_dtype=torch.bfloat16)[0].equal == 1
    with pytest.raises(errors.DtypeError, match=r"expected torch\.float16"):
        oracle.identify("fp8_gemm_nt", inputs, out, out_dtype=torch.float16)


FACTORIES = {
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
}
INTEGERS = {"arange", "randint", "randperm"}  # int64 for integer arguments, whatever the default is


def without_defaults(module: ast.Module) -> list[str]:
    """Calls of torch's factories that leave the device, or a dtype that matters, to the process."""
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
            factory, named = ast.unparse(node.func).removeprefix("torch."), {word.arg for word in node.keywords}
            if factory in FACTORIES:
                needed = ("device",) if factory in INTEGERS else ("device", "dtype")
                found += [f"line {node.lineno}: torch.{factory} has no {word}" for word in needed if word not in named]
    return found
