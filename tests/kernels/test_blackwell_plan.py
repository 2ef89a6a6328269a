"""Plans on Blackwell: limits one step outside, releases, orders by arch, claims of sums, explanations."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest
import torch

import kernels
from kernels.config import Config, use_config
from kernels.errors import NoBackendError, OptionError
from kernels.plan import ORDERS, TABLE, backend_of, considered, decisions, explanation, order, plan, record_of, summary
from kernels.records import ARCHES, PRODUCTS, Machine, Problem
from kernels.support import BLACKWELL, MIXED, MX_OPERATIONS
from oracle.tensorcore.instructions import ALIKE
from oracle.tensorcore.schedules import schedules
from tests.support.fake_blackwell import grid, simulated

BARE = Config()
MX8 = Problem("mxfp8_product", m=33, n=256, k=256, tiles="128x4")
NV4 = Problem("nvfp4_product", m=33, n=256, k=256, tiles="128x4", a_dtype="uint8", b_dtype="uint8")
MX4 = dataclasses.replace(NV4, op="mxfp4_product")
BATCH = Problem("mxfp8_batched", m=128, n=256, k=256, groups=2, tiles="128x4")
ROWS8 = Problem("mxfp8_mxfp4_grouped", n=256, k=256, groups=2, tiles="128x4", b_dtype="uint8", row_alignment=4)
ROWS4 = dataclasses.replace(ROWS8, op="nvfp4_grouped", a_dtype="uint8")
TIGHT8 = Problem("mxfp8_tight", n=256, k=256, groups=2, tiles="128x4")
TIGHT4 = dataclasses.replace(TIGHT8, op="nvfp4_tight", a_dtype="uint8", b_dtype="uint8")
MIX = Problem("mixed_contiguous", n=256, k=256, groups=2, b_dtype="uint8", a_width=128, b_width=32)
LAYER = Problem("moe_nvfp4", n=256, k=256, a_dtype="bfloat16", b_dtype="uint8")
RUN = Problem("fp8_block_runs", n=256, k=256, groups=2, row_alignment=4, scale_format="float32")
BLOCK = Problem("fp8_block_product", n=256, k=256, scale_format="float32")
E5M2 = "float8_e5m2"
LIMITS = (
    # backend, machine, a problem that it serves, and fields that it does not take, each alone
    ("flashinfer_cutlass", "sm100", MX8, {"n": 240, "k": 272, "tiles": "8x4", "out_dtype": "float32", "alpha": "one",
                                          "bias": "bfloat16", "c": "bfloat16", "a_dtype": E5M2, "b_dtype": E5M2}),
    ("flashinfer_cutlass", "sm120", MX8, {"n": 96, "k": 96}),
    ("flashinfer_cutlass", "sm100", NV4, {"n": 272, "k": 272, "tiles": "linear", "alpha": "group"}),
    ("flashinfer_cutlass", "sm120", BATCH, {"n": 144, "k": 272, "a_dtype": E5M2}),
    ("flashinfer_cudnn", "sm120", BATCH, {"m": 1, "n": 160}),
    ("flashinfer_cutlass", "sm100", ROWS8, {"n": 252, "k": 192, "row_alignment": 2, "alpha": "group"}),
    ("flashinfer_cutlass", "sm120", ROWS4, {"n": 252, "k": 192, "row_alignment": 1}),
    ("flashinfer_b12x", "sm120", MX8, {"k": 192, "n": 252, "out_dtype": "float32"}),
    ("flashinfer_b12x", "sm120", NV4, {"k": 272, "n": 252}),
    ("flashinfer_cudnn", "sm100", BATCH, {"m": 1, "n": 272}),
    ("flashinfer_cute_dsl", "sm100", MX4, {"n": 252, "alpha": "group"}),
    ("flashinfer_cute_dsl", "sm100", NV4, {"n": 252, "m": 32}),
    ("flashinfer_cutlass", "sm120", BLOCK, {"n": 192, "k": 192, "out_dtype": "float32", "c": "bfloat16"}),
    ("cutlass", "sm120", BLOCK, {"n": 192, "k": 192, "out_dtype": "float32", "c": "bfloat16"}),
    ("cutlass", "sm100", NV4, {"n": 272, "k": 272, "tiles": "8x4", "out_dtype": "float32", "bias": "bfloat16",
                               "alpha": "group", "c": "bfloat16"}),
    ("torch", "sm100", MX8, {"n": 264, "k": 272, "tiles": "linear", "c": "bfloat16", "bias": "float32",
                             "alpha": "one"}),
    ("torch", "sm100", NV4, {"alpha": "group"}),
    ("torch", "sm100", TIGHT8, {"n": 264, "k": 272}),
    ("torch", "sm100", TIGHT4, {"n": 264, "k": 272, "alpha": "group"}),
    ("cutlass", "sm120", TIGHT4, {"n": 252, "k": 272, "out_dtype": "float16"}),
    ("flashinfer_cutlass", "sm120", LAYER, {"n": 192, "k": 192, "bias": "float32"}),
    ("flashinfer_cutlass", "sm100", RUN, {"n": 192, "k": 192, "row_alignment": 2, "out_dtype": "float32"}),
    ("flashinfer_cutlass", "sm120", RUN, {"n": 192, "k": 192, "out_dtype": "float16"}),
    ("deep_gemm", "sm100", MIX, {"n": 96, "k": 192, "out_dtype": "float16", "bias": "bfloat16", "a_dtype": "uint8"}),
)  # fmt: skip  # a table, one row a line


@pytest.mark.parametrize(("rows", "serves"), [(1, True), (32, True), (33, False)])
def test_few_rows_of_an_mxfp8_product_are_up_to_32(rows: int, serves: bool) -> None:
    """FlashInfer's CuTe DSL kernel is taken for few rows, where a kernel may cut K."""
    problem, machine = dataclasses.replace(MX8, m=rows), Machine.described("sm100")
    why = considered(problem, machine, Config(split_k=True))["flashinfer_cute_dsl"]
    assert why is None if serves else "M > 32" in str(why)


@pytest.mark.whole("a look into a table")
@pytest.mark.parametrize(
    ("backend", "arch", "problem", "field", "value"),
    [(name, arch, p, *item) for name, arch, p, outside in LIMITS for item in outside.items()],
)
def test_one_step_outside_is_refused(backend: str, arch: str, problem: Problem, field: str, value: object) -> None:
    """Limits of the libraries' C++ that their Python omits are the plan's: it refuses what they would misread."""
    machine = Machine.described(arch)
    assert considered(problem, machine, BARE)[backend] is None
    why = considered(dataclasses.replace(problem, **{field: value}), machine, BARE)[backend]
    assert why is not None and len(why) > 10


RELEASED = (
    # backend, machine, problem, the package, releases that serve and that do not
    ("flashinfer_cutlass", "sm120", NV4, "flashinfer", ("0.6.18.post1", "0.7.2.post1"), ("0.6.12", "0.8.0")),
    ("flashinfer_cutlass", "sm100", LAYER, "flashinfer", ("0.6.18.post1", "0.7.2"), ("0.6.16.post4", "0.6.17")),
    ("flashinfer_cudnn", "sm100", MX8, "flashinfer", ("0.7.2",), ("0.6.18.post1",)),
    ("flashinfer_cudnn", "sm100", NV4, "cudnn", ("9.15.0",), ("9.14.0",)),
    ("flashinfer_cudnn", "sm120", MX4, "cudnn", ("9.14.0",), ("9.13.1",)),
    ("flashinfer_b12x", "sm120", MX8, "cutlass_dsl", ("4.6.0",), ("4.5.1",)),
    ("flashinfer_b12x", "sm120", NV4, "cutlass_dsl", ("4.5.1",), ("4.5.0",)),
    ("flashinfer_cute_dsl", "sm100", MX4, "cutlass_dsl", ("4.5.1",), ("4.5.0",)),
)


@pytest.mark.whole("a look into a table")
@pytest.mark.parametrize(("backend", "arch", "problem", "package", "good", "bad"), RELEASED)
def test_releases(
    backend: str, arch: str, problem: Problem, package: str, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    """Faults of some releases are rows: a machine with such a release plans around it, and says which to install."""
    for releases, serves in ((good, True), (bad, False)):
        for release in releases:
            machine = Machine.described(arch).with_package(package, version=release)
            why = considered(problem, machine, BARE)[backend]
            assert (why is None) is serves
            assert serves or plan(problem, machine, BARE).backend != backend


@pytest.mark.parametrize("arch", ["sm100", "sm103"])
@pytest.mark.parametrize("release", ["0.6.16.post4", "0.6.17", "0.6.18.post1", "0.7.2.post1"])
def test_layers_of_tensorrt_llm_are_refused_in_every_release(arch: str, release: str) -> None:
    """Those of two releases give NaN; of all of them the weights lie in another order."""
    machine = Machine.described(arch).with_package("flashinfer", version=release)
    reason = str(considered(LAYER, machine, BARE)["flashinfer_trtllm"])
    assert ("older than any that was read" if release < "0.6.18" else "another order") in reason


def test_groups_of_k_go_to_no_library_of_blackwell() -> None:
    """CUTLASS keeps what an accumulator held where a group has no K; DeepGEMM's product of such groups is Hopper's (the
    twin), and torch's is multiplied by Triton, which stores zeros."""
    problem = Problem("k_grouped", m=64, n=128, groups=2, out_dtype="float32")
    assert considered(problem, Machine.described("sm90"), BARE)["deep_gemm"] is None
    for sm in BLACKWELL:
        reason = str(considered(problem, Machine.described(f"sm{sm}"), BARE)["deep_gemm"])
        assert ("GB10" if sm == 121 else "sm90's") in reason
    assert not [op for op in MX_OPERATIONS if "k_groups" in op]


@pytest.mark.parametrize(("problem", "backend", "family", "number"), [
    (NV4, "flashinfer_cutlass", ("sm120", "sm121"), "4549"), (ROWS4, "flashinfer_cutlass", ("sm120", "sm121"), "2723"),
])  # fmt: skip  # a table, one row a line
def test_what_is_noted(problem: Problem, backend: str, family: tuple[str, ...], number: str) -> None:
    """A fault that no release heals and no value shows beforehand stands in the plan's steps; elsewhere not (the
    twin)."""
    for arch in ("sm100", "sm103", "sm120", "sm121"):
        text = " ".join(backend_of(backend).steps(problem, Machine.described(arch)))
        assert (number in text) is (arch in family)


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "blackwell.md"
SECTIONS = {"## What is checked without the hardware": 12, "## Faults that are known": 10}
"""Tables of the page whose lines name tests, and how many lines they have."""


def named_in(section: str) -> list[list[str]]:
    """The tests, or files of tests, that each line of a section's table names."""
    text = PAGE.read_text().partition(section)[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return [re.findall(r"`(test_\w+\.py(?:::\w+)?)`", line) for line in lines]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_line_of_the_page_names_a_test(section: str) -> None:
    """Twelve checks that need no hardware, ten faults that are guarded, each by tests that are there."""
    rows = named_in(section)
    assert len(rows) == SECTIONS[section] and all(rows)
    for name in itertools.chain.from_iterable(rows):
        file, _, test = name.partition("::")
        text = (Path(__file__).parent / file).read_text()
        assert f"def {test}(" in text or not test, name
    assert not named_in("## No such section")


@pytest.mark.parametrize(("arch", "cuda", "serves"), [
    ("sm100", "12.7", False), ("sm100", "12.8", True), ("sm103", "12.8", False), ("sm103", "12.9", True),
    ("sm120", "12.8", True), ("sm121", "12.8", False), ("sm121", "12.9", True),
])  # fmt: skip  # a table, one row a line
def test_cuda(arch: str, cuda: str, serves: bool) -> None:
    assert (considered(MX8, Machine.described(arch, cuda=cuda), BARE)["flashinfer_cutlass"] is None) is serves


DIFFERENT = {"sm103": {"mxfp8_tight", "nvfp4_tight"}, "sm121": {"nvfp4_product", *MIXED}}
"""Operations of which an arch differs from its elder: torch's tight products are sm100's; of a GB10 b12x stands last,
and DeepGEMM faults there."""


@pytest.mark.parametrize("arch", DIFFERENT)
@pytest.mark.parametrize("op", MX_OPERATIONS)
def test_a_younger_arch_plans_as_its_elder(op: str, arch: str) -> None:
    """Rows are by family; sm103 and sm121 differ where a row says so alone."""
    elder, younger = Machine.described(ALIKE[arch]), Machine.described(arch)
    differs = False
    for problem in grid(op):
        for config in (BARE, Config(batch_invariant=True), Config(split_k=True)):
            chosen = [plan(problem, machine, config).backend for machine in (elder, younger)]
            differs |= chosen[0] != chosen[1]
            assert not differs or op in DIFFERENT[arch], (problem, config)
    assert differs is (op in DIFFERENT[arch])
    assert (order(op, elder) == order(op, younger)) is (ORDERS.get((op, ALIKE[arch])) == ORDERS.get((op, arch)))


@pytest.mark.parametrize("op", MX_OPERATIONS)
def test_triton_is_the_last_of_a_gpu_and_the_only_one_before_blackwell(op: str) -> None:
    assert TABLE[op][-2:] == ("triton_mx", "eager")
    for arch in ARCHES:
        machine = Machine.described(arch)
        if machine.vendor == "nvidia" and machine.sm not in BLACKWELL:
            assert {plan(problem, machine, BARE).backend for problem in grid(op)} == {"triton_mx"}


CHAINS = {"flashinfer_cutlass", "flashinfer_b12x", "flashinfer_cute_dsl", "cutlass"}
"""Backends whose sources show one chain over K."""


@pytest.mark.parametrize("sm", BLACKWELL)
def test_what_a_plan_says_of_its_sums(sm: int) -> None:
    """A schedule of the arch, of a backend whose source shows it, or that bounds alone hold. What cuts K is taken where
    a switch allows it alone, and never in batch-invariant mode."""
    machine, known = Machine.described(f"sm{sm}"), {s.name for s in schedules(ALIKE.get(f"sm{sm}", f"sm{sm}"))}
    claimed = set[str]()
    for op in ("mxfp8_product", "nvfp4_product", "mxfp4_product"):
        for problem, config in itertools.product(grid(op), (BARE, Config(batch_invariant=True), Config(split_k=True))):
            made = plan(problem, machine, config)
            if made.backend == "triton_mx":
                continue
            assert made.numerics in known or made.numerics.startswith("bounds only")
            assert "chain" not in made.numerics or made.backend in CHAINS
            assert "it cuts K" not in made.numerics or config.split_k
            assert not config.batch_invariant or "bounds only" not in made.numerics
            claimed.add(made.numerics)
    assert any("chain" in claim for claim in claimed) and any("bounds only" in claim for claim in claimed)


def test_nothing_is_written_where_the_plan_would_have_been_asked_less() -> None:
    """FlashInfer's product of blocks on sm120 leaves the output alone for extents that a row refuses first (the twin: a
    call past the layer, whose poison stays)."""
    with simulated(Machine.described("sm120")) as libraries:
        a, b = torch.ones(3, 128, dtype=torch.float8_e4m3fn), torch.ones(128, 128, dtype=torch.float8_e4m3fn)
        out = torch.full((3, 128), float("nan"), dtype=torch.bfloat16)
        libraries.gemm_fp8_nt_groupwise(a, b, torch.ones(1, 3), torch.ones(1, 1), "MN", out=out)
        assert bool(out.isnan().all())
        with use_config(Config(backend="flashinfer_cutlass")), kernels.explain() as plans:
            kernels.fp8_gemm_nt((a, torch.ones(3, 1)), (b, torch.ones(1, 1)), out)
        assert bool((out == 128).all()) and plans[0].backend == "flashinfer_cutlass"


class TestExplain:
    """Of every backend why it does not serve, or that it would."""

    def test_every_backend_is_said(self) -> None:
        text = kernels.explain("mm_mxfp8", machine="sm103", n=4096, k=7168, m=4)
        first, *rest = text.splitlines()
        assert first.endswith('flashinfer_cutlass -> mm_mxfp8(backend="cutlass")') and "sums: sm100.chain_ue8m0" in text
        said = [line.split()[1].rstrip(":") for line in rest if line.startswith("  not ")]
        assert sorted([*said, "flashinfer_cutlass"]) == sorted(TABLE["mxfp8_product"])
        assert "not torch: it serves this too" in text and "FP8_KERNELS_SPLIT_K=1 allows it" in text

    def test_without_a_backend(self) -> None:
        text = explanation("fp8_gemm_nt_1d1d", Machine.described("sm100"), BARE)
        assert text.splitlines()[0].endswith("no backend") and text.count("  not ") == 2

    def test_a_block_is_explained_on_the_current_machine(self) -> None:
        with kernels.explain() as plans:
            assert plans == []
        for wrong in ({"machine": "sm90"}, {"m": 4}):
            with pytest.raises(OptionError, match="name a routine"):
                kernels.explain(**wrong)
        for routine, fields in (("nothing", {}), ("mm_mxfp8", {"rows": 4}), ("mm_mxfp8", {"tiles": "9x4"})):
            with pytest.raises(OptionError):
                kernels.explain(routine, machine="sm100", **fields)
        with pytest.raises(OptionError, match="sm42"):
            kernels.explain("mm_mxfp8", machine="sm42")


class TestRecords:
    """A machine from a file, and what it takes for every routine."""

    RECORD = {
        "arch": "sm120",
        "cuda": "12.9",
        "torch": "2.11.0",
        "sms": 170,
        "packages": {"flashinfer": "0.6.18.post1", "deep_gemm": "vllm==0.33.0", "triton": "3.6.0"},
    }

    def test_there_and_back(self) -> None:
        machine = Machine.from_record(self.RECORD)
        assert record_of(machine)["machine"] == self.RECORD
        assert machine.package("cudnn").why_not is not None and machine.package("deep_gemm").source == "vllm"
        assert json.loads(json.dumps(record_of(machine)))["machine"] == self.RECORD

    def test_a_product(self) -> None:
        machine = Machine.from_record({"product": "GB10", "packages": {}})
        assert (machine.arch, machine.sms) == PRODUCTS["GB10"]

    @pytest.mark.parametrize(
        "wrong",
        [
            [],
            {},
            {"arch": "sm100", "product": "B200"},
            {"arch": "sm99"},
            {"product": "B1"},
            {"arch": "sm100", "gpus": 8},
            {"arch": "sm100", "sms": 0},
            {"arch": "sm100", "sms": True},
            {"arch": "sm100", "packages": ["flashinfer"]},
            {"arch": "sm100", "packages": {"flashinfer": None}},
            {"arch": "sm100", "packages": {"flash": "1"}},
            {"arch": "sm100", "cuda": "new"},
        ],
    )
    def test_what_is_no_machine_is_one_error(self, wrong: object) -> None:
        with pytest.raises(OptionError):
            Machine.from_record(wrong)

    @pytest.mark.parametrize("arch", ["sm90", "sm100", "sm121", "cpu"])
    def test_decisions_are_those_of_the_plan(self, arch: str) -> None:
        machine = Machine.described(arch)
        rows = decisions(machine)
        assert [row["routine"] for row in rows] == [line[0] for line in summary(machine)]
        for row, line in zip(rows, summary(machine), strict=True):
            problem = Problem(**row["problem"])
            try:
                made = plan(problem, machine, BARE)
            except NoBackendError as error:  # the row has to say the same
                assert row["backend"] is None and line[1:] == ("-", "-", "-")
                assert {b["name"]: b["why_not"] for b in row["backends"]} == error.reasons
                continue
            assert (row["backend"], row["kernel"], row["sums"]) == (made.backend, made.kernel, made.numerics or None)
