"""Decisions: the first backend without a reason, every reason kept, never a silent fallback."""

import dataclasses

import pytest

from kernels import routes
from kernels.backends.declaration import Backend
from kernels.config import Config
from kernels.errors import MissingPackageError, NoBackendError, OptionError, Unavailable, Unsupported
from kernels.plan import MODULES, ROUTINES, TABLE, Problem, backend_of, describe, listed, markdown_table, order, plan
from kernels.platform import ARCHES, Machine, use_machine
from kernels.records import Package
from kernels.support import NEEDS, built, rowwise_cublas, shared_memory

BARE = Config()


def chosen(op: str, arch: str, config: Config = BARE, **dims: object) -> str:
    machine = Machine.described(arch)
    try:
        return plan(Problem(op, **{"device": machine.device, **dims}), machine, config).backend
    except NoBackendError:
        return "-"


@pytest.mark.whole("a look into a table")
@pytest.mark.parametrize("op", TABLE)
@pytest.mark.parametrize("arch", ARCHES)
def test_every_rejection_has_a_reason(op: str, arch: str) -> None:
    """A plan, or an error, accounts for every backend of its row up to the chosen one."""
    machine = Machine.described(arch)
    problem = Problem(op, device=machine.device, m=16, n=256, k=256)
    try:
        made = plan(problem, machine, BARE)
        asked = [name for name, _ in made.reasons] + [made.backend]
        reasons = dict(made.reasons)
    except NoBackendError as error:
        asked, reasons = list(error.reasons), error.reasons
        assert asked == list(order(op, machine))
        assert all(name in str(error) and why in str(error) for name, why in reasons.items())
    assert asked == list(order(op, machine))[: len(asked)]
    assert set(TABLE[op]) <= set(order(op, machine)) <= listed(op)
    assert all(len(why) > 10 for why in reasons.values())


class TestSwitchAt32:
    """M < 32 one kernel, else DeepGEMM; batch-invariant mode always DeepGEMM."""

    @pytest.mark.parametrize(
        ("m", "backend"), [(1, "triton_linear"), (31, "triton_linear"), (32, "deep_gemm"), (33, "deep_gemm")]
    )
    def test_sm90(self, m: int, backend: str) -> None:
        assert chosen("dynamic_blockscale", "sm90", m=m, n=4096, k=7168) == backend

    @pytest.mark.parametrize("m", [1, 31, 32, 4096])
    def test_batch_invariant(self, m: int) -> None:
        assert chosen("dynamic_blockscale", "sm90", Config(batch_invariant=True), m=m, n=128, k=128) == "deep_gemm"

    @pytest.mark.parametrize("m", [31, 32])
    @pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89", "sm121", "gfx90a", "gfx942", "gfx950"])
    def test_elsewhere_no_library(self, m: int, arch: str) -> None:
        own = "triton_linear" if m < 32 else "triton_gemm"
        assert chosen("dynamic_blockscale", arch, m=m, n=128, k=128) == (own if arch.startswith("sm") else "-")

    def test_ue8m0(self) -> None:
        """The one kernel has float32 scales: with others FlashInfer and DeepGEMM serve, as without it."""
        for arch, m, backend in (("sm90", 31, "flashinfer"), ("sm100", 31, "deep_gemm"), ("sm100", 32, "deep_gemm")):
            assert chosen("dynamic_blockscale", arch, m=m, n=128, k=128, ue8m0=True) == backend

    def test_switched_off(self) -> None:
        assert (
            chosen("dynamic_blockscale", "sm90", Config(blockscale_gemm_flashinfer=False), m=8, n=128, k=128)
            == "deep_gemm"
        )


class TestThresholds:
    """Around each extent that a backend looks at."""

    @pytest.mark.parametrize(
        ("op", "dims", "backend"),
        [
            ("linear", {"n": 256, "k": 256}, "cutlass"),
            ("linear", {"n": 256, "k": 264}, "-"),
            ("linear", {"n": 250, "k": 256}, "-"),
            ("linear", {"n": 256, "k": 256, "out_dtype": "float32"}, "torch"),
            ("linear", {"n": 256, "k": 256, "bias": "bfloat16"}, "cutlass"),
            ("linear", {"n": 256, "k": 256, "bias": "float32"}, "torch"),
            ("block_linear", {"n": 256, "k": 256}, "cutlass"),
            ("block_linear", {"n": 256, "k": 256, "out_dtype": "float32"}, "torch"),
            ("block_linear", {"n": 192, "k": 256}, "triton_gemm"),
            ("fp8_gemm_nt", {"n": 192, "k": 128}, "deep_gemm"),
            ("fp8_gemm_nt", {"n": 96, "k": 128}, "triton_gemm"),
            ("fp8_gemm_nt", {"n": 128, "k": 192}, "triton_gemm"),
            ("fp8_gemm_nt", {"n": 128, "k": 128, "out_dtype": "float32"}, "triton_gemm"),
            ("fp8_gemm_nt", {"n": 128, "k": 128, "c": "float32"}, "-"),
            ("blockscale_sm90", {"n": 64, "k": 128}, "flashinfer"),
            ("blockscale_sm90", {"n": 64, "k": 128, "out_dtype": "float16"}, "-"),
            ("mqa_logits", {"heads": 32, "head_dim": 128}, "deep_gemm"),
            ("mqa_logits", {"heads": 16, "head_dim": 128}, "-"),
            ("paged_mqa_logits", {"heads": 64, "head_dim": 128, "block_size": 16}, "-"),
            ("quant_group", {"group_size": 128}, "triton"),
            ("quant_group", {"group_size": 8192}, "eager"),
        ],
    )
    def test_sm90(self, op: str, dims: dict[str, object], backend: str) -> None:
        assert chosen(op, "sm90", **dims) == backend

    @pytest.mark.parametrize(("cuda", "backend"), [("12.3", "torch"), ("12.4", "cutlass")])
    def test_sm89_cutlass_needs_cuda_12_4(self, cuda: str, backend: str) -> None:
        machine = Machine.described("sm89", cuda=cuda)
        assert plan(Problem("linear", n=128, k=128), machine, BARE).backend == backend

    @pytest.mark.parametrize(
        ("arch", "backend"), [("sm90", "cutlass"), ("sm103", "cutlass"), ("sm120", "-"), ("sm121", "-")]
    )
    def test_a_grouped_product_of_cutlass_ends_at_sm109(self, arch: str, backend: str) -> None:
        """vLLM's ``cutlass_moe_mm`` dispatches 90 to 99 and 100 to 109 and raises elsewhere, though its
        ``cutlass_group_gemm_supported`` has no upper end (scaled_mm_entry.cu)."""
        assert chosen("grouped_scaled", arch, n=256, k=256) == backend

    def test_shared_memory_of_a_block(self) -> None:
        """A block can have what a multiprocessor has, but for 1 KiB that the system keeps of each block (CUDA C++
        programming guide, compute capabilities: KiB of one multiprocessor)."""
        of_one = {80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 103: 228, 120: 100, 121: 100}
        assert {sm: shared_memory(sm) for sm in of_one} == {sm: (kib - 1) << 10 for sm, kib in of_one.items()}

    @pytest.mark.parametrize(
        ("sm", "cuda", "compiled"),
        [
            (89, (12, 4), False),
            (90, (12, 3), False),
            (90, (12, 4), True),
            (99, (12, 4), True),
            (100, (12, 7), False),
            (100, (12, 8), True),
            (120, (13, 0), True),
            (120, None, False),
        ],
    )
    def test_built(self, sm: int, cuda: tuple[int, ...] | None, compiled: bool) -> None:
        """From the first capability and CUDA of a row, and before the first capability of the next."""
        assert built(((90, 100, (12, 4)), (100, None, (12, 8))), sm, cuda) is compiled

    @pytest.mark.parametrize(
        ("arch", "cuda", "has"),
        [("sm90", "12.8", False), ("sm90", "12.9", True), ("sm89", "12.9", False), ("sm100", "13.0", False)],
    )
    def test_rowwise_cublas(self, arch: str, cuda: str, has: bool) -> None:
        """Of Hopper alone, from CUDA 12.9 on: others write bf16 only."""
        assert rowwise_cublas(Machine.described(arch, cuda=cuda)) is has


class TestReleases:
    """What a distribution has in some of its releases only is refused outside of them, with the release that has it."""

    @pytest.mark.parametrize(
        ("op", "arch", "release", "wanted"),
        [
            ("mqa_logits", "sm90", "sgl-deep-gemm==0.2.3.post2", None),
            ("mqa_logits", "sm90", "sgl-deep-gemm==0.2.5", "install 0.2.3.post2"),
            ("paged_mqa_logits", "sm100", "sgl-deep-gemm==0.2.5", "install 0.2.3.post2"),
            ("skip_head_mid", "sm90", "sgl-deep-gemm==0.2.5", "0.2.5 has this routine no more"),
            ("skip_head_mid", "sm90", "vllm==0.33.0", None),
            ("fp8_gemm_nt", "sm120", "sgl-deep-gemm==0.1.4.post1", "0.1.4 has no kernels for sm120"),
            ("fp8_gemm_nt", "sm120", "sgl-deep-gemm==0.1.7", None),
            ("fp8_gemm_nt", "sm120", "vllm==0.20.2", "0.20.2 vendors no kernels"),
            ("fp8_gemm_nt", "sm120", "vllm==0.33.0", None),
            ("fp8_gemm_nt", "sm120", "deep_gemm==2.6.1", "this is deep_gemm's"),
            ("fp8_gemm_nt", "sm103", "deep_gemm==2.6.1", None),
            ("fp8_gemm_nt", "sm121", "sgl-deep-gemm==0.2.5", "vllm-project/vllm 54125"),
        ],
    )
    def test_deep_gemm(self, op: str, arch: str, release: str, wanted: str | None) -> None:
        machine = Machine.described(arch).with_package("deep_gemm", version=release)
        why = backend_of("deep_gemm").why_not(Problem(op, n=128, k=128, heads=32, head_dim=128), machine, BARE)
        assert why is None if wanted is None else why is not None and wanted in why

    def test_a_range_is_a_property_of_the_installed_release(self) -> None:
        """Its class is that of a missing package; an unknown version passes: on the machine the library is asked."""
        known = Machine.described("sm90").with_package("deep_gemm", version="sgl-deep-gemm==0.2.5")
        problem = Problem("mqa_logits", heads=32, head_dim=128)
        assert isinstance(backend_of("deep_gemm").why_not(problem, known, BARE), Unavailable)
        unknown = dataclasses.replace(known, packages=(Package("deep_gemm"), *Machine.described("sm90").packages[1:]))
        assert backend_of("deep_gemm").why_not(problem, unknown, BARE) is None

    @pytest.mark.parametrize(("release", "served"), [("0.4.4", True), ("sglang-kernel==0.4.10", False)])
    def test_sgl_kernel(self, release: str, served: bool) -> None:
        machine = Machine.described("sm90").with_package("sgl_kernel", version=release)
        assert (backend_of("sgl_kernel").why_not(Problem("block_linear"), machine, BARE) is None) is served
        assert backend_of("sgl_kernel").why_not(Problem("linear"), machine, BARE) is None


@pytest.mark.parametrize("arch", ["sm100", "sm103", "sm120"])
@pytest.mark.parametrize("op", ["fp8_gemm_nt", "grouped_contiguous", "grouped_masked"])
def test_float32_scales_are_not_given_to_kernels_of_ue8m0(op: str, arch: str) -> None:
    """DeepGEMM's kernels of Blackwell would keep the exponent of a float32 scale alone; Hopper's read it (the twin)."""
    other = "triton_gemm" if op == "fp8_gemm_nt" else "flashinfer_cutlass"
    for scales, backend in (("ue8m0", "deep_gemm"), ("float32", other), (None, "deep_gemm")):
        assert chosen(op, arch, n=128, k=128, scale_format=scales) == backend
    assert chosen(op, "sm90", n=128, k=128, scale_format="float32") == "deep_gemm"


class TestMissing:
    """A missing package is one clear error that names what to install."""

    @pytest.mark.parametrize(
        "op", ["fp8_gemm_nt", "grouped_contiguous", "grouped_masked", "mqa_logits", "paged_mqa_logits"]
    )
    def test_deep_gemm(self, op: str) -> None:
        machine = Machine.described("sm90", packages={})
        with pytest.raises(MissingPackageError, match="sgl-deep-gemm") as caught:
            plan(Problem(op, n=128, k=128), machine, BARE)
        assert isinstance(caught.value, ImportError) and isinstance(caught.value, NotImplementedError)

    def test_trtllm_moe_never_downloads(self) -> None:
        machine = Machine.described("sm100", packages={"flashinfer": "0.6"})
        with pytest.raises(MissingPackageError, match="flashinfer-cubin"):
            plan(Problem("moe_trtllm"), machine, BARE)

    def test_wrong_architecture_is_not_a_missing_package(self) -> None:
        with pytest.raises(NoBackendError) as caught:
            plan(Problem("fp8_gemm_nt", n=128, k=128), Machine.described("gfx942"), BARE)
        assert not isinstance(caught.value, ImportError)

    @pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
    def test_block_scales_on_rocm_are_refused_with_a_way_that_serves(self, arch: str) -> None:
        for op in ("fp8_gemm_nt", "grouped_contiguous", "grouped_masked"):
            with pytest.raises(NoBackendError, match="quantise the weight per channel") as caught:
                plan(Problem(op, n=128, k=128), Machine.described(arch), BARE)
            assert arch in str(caught.value)
        way = Problem("linear", n=128, k=128, a_scale="token", b_scale="channel")
        assert plan(way, Machine.described(arch), BARE).backend == "torch"

    def test_a_gpu_never_falls_back_to_plain_torch(self) -> None:
        products = [op for op in TABLE if "eager" in TABLE[op] and not op.startswith(("quant", "cast", "layout"))]
        machine = Machine.described("sm90", packages={})
        for op in products:
            why = backend_of("eager").why_not(Problem(op), machine, BARE)
            assert why is not None and "CPU" in why


class TestWords:
    """What the command line and the documentation print."""

    def test_describe_names_choice_and_reasons(self) -> None:
        text = describe(op="dynamic_blockscale", arch="sm100", m=32, n=4096, k=4096)
        assert "on sm100: deep_gemm -> fp8_gemm_nt" in text
        assert "rejected flashinfer: fp8_blockscale_gemm_sm90 needs sm90; this is sm100" in text

    def test_describe_takes_routines(self) -> None:
        assert "flashinfer" in describe(op="dynamic_flashinfer_deepgemm_blockscale_gemm", arch="sm90", m=31)

    def test_describe_without_backend_lists_all(self) -> None:
        text = describe(op="fp8_gemm_nt", arch="gfx942", m=4, n=128, k=128)
        assert "no backend" in text and text.count("rejected") == 3

    @pytest.mark.parametrize(
        "bad",
        [
            {"op": "gemm"},
            {"op": "linear", "widht": 3},
            {"op": "linear", "arch": "sm1"},
            {"op": "linear", "arch": "sm42"},
            {"op": "linear", "arch": ""},
            {"op": "linear", "m": -1},
            {"op": "linear", "n": 0},
            {"op": "linear", "k": 0},
            {"op": "linear", "k": "many"},
            {"op": "linear", "a_scale": "row"},
            {"op": "linear", "out_dtype": "fp8"},
            {"op": "linear", "bias": "yes"},
            {"op": "linear", "device": "tpu"},
            {"op": "quant_group", "ue8m0": "maybe"},
            {"op": "quant_group", "ue8m0": 1},
        ],
    )
    def test_describe_refuses(self, bad: dict[str, object]) -> None:
        with pytest.raises(OptionError):
            describe(**bad)

    def test_table_has_every_routine_and_arch(self) -> None:
        lines = markdown_table().splitlines()
        assert len(lines) == 2 + len(ROUTINES)
        assert all(line.count("|") == len(ARCHES) + 2 for line in lines[2:])
        assert all(not line.endswith("| - |") for line in lines[2:]), "every routine has a CPU path"


class TestRoutes:
    """Decisions are remembered for one machine and one configuration."""

    def test_only_takes_one_backend(self) -> None:
        import torch

        cpu = torch.device("cpu")
        with routes.only("eager"):
            assert routes.route("linear", cpu, ("n", 16), ("k", 16)).name == "eager"
        assert routes.route("linear", cpu, ("n", 16), ("k", 16)).name == "torch"
        with routes.only("cutlass"), pytest.raises(NoBackendError, match="CPU"):
            routes.route("linear", cpu, ("n", 16), ("k", 16))
        with pytest.raises(OptionError, match="unknown backend"), routes.only("cublas"):
            pass

    def test_another_machine_forgets(self) -> None:
        import torch

        with use_machine(Machine.described("sm90")):
            assert routes.route("fp8_gemm_nt", torch.device("cuda"), ("n", 128), ("k", 128)).name == "deep_gemm"
        with use_machine(Machine.described("sm89")):
            assert routes.route("fp8_gemm_nt", torch.device("cuda"), ("n", 128), ("k", 128)).name == "triton_gemm"


def test_every_backend_of_is_pure() -> None:
    """Asking for reasons, kernels and steps loads no library and touches no tensor."""
    for name in MODULES:
        module = backend_of(name)
        for op, row in TABLE.items():
            if name in row:
                problem, machine = Problem(op), Machine.described("sm90")
                assert isinstance(module.kernel(problem, machine), str)
                assert isinstance(module.steps(problem, machine), tuple)


def test_every_row_is_declared() -> None:
    """A backend stands in the rows of the operations that it declares, and of those that its rows refuse by name."""
    for op in TABLE:
        row = listed(op)
        for name in row:
            refused = {(need.field, need.relation) for need in NEEDS[name] if op in need.ops} >= {("op", "none")}
            assert backend_of(name).declares(op) or refused or name == "eager" and op == "moe_cutlass", (op, name)
        for name in set(MODULES) - set(row) - {"torch", "flashinfer", "eager"}:
            assert op in ("cast", "layout", "dynamic_blockscale") or not backend_of(name).declares(op), (op, name)
    assert not Backend(name="empty", kernel=lambda p, machine: "").declares("linear")


def test_what_is_not_declared_is_known_before_the_call() -> None:
    """A backend without the function is refused by its declaration; with it, it is chosen (the twin)."""
    problem, machine = Problem("linear", n=128, k=128), Machine.described("sm90")
    whole = backend_of("cutlass")
    assert whole.why_not(problem, machine, BARE) is None
    part = dataclasses.replace(whole, linear=Backend(name="empty", kernel=whole.kernel).linear)
    why = part.why_not(problem, machine, BARE)
    assert isinstance(why, Unsupported) and "linear" in why


class TestSglKernel:
    """SGLang's operators: only where the package is, never above vLLM's, never where they promise something else."""

    OPS = ("quant_tensor", "quant_token", "quant_group", "quant_group_packed", "linear", "block_linear")

    def machine(self, arch: str, *without: str) -> Machine:
        machine = Machine.described(arch).with_package("sgl_kernel")
        for name in without:
            machine = machine.with_package(name, f"package {name} is not installed; install it")
        return machine

    def chosen(self, op: str, arch: str, *without: str, **dims: object) -> str:
        problem = Problem(op, n=4096, k=4096, **dims)  # type: ignore[arg-type]  # fields of a problem
        try:
            return plan(problem, self.machine(arch, *without), BARE).backend
        except NoBackendError:
            return "-"

    def test_below_vllm(self) -> None:
        """In every row of the table, and so in every decision."""
        for op, row in TABLE.items():
            assert ("sgl_kernel" in row) == (op in self.OPS)
            if "sgl_kernel" in row:
                assert row.index("cutlass") < row.index("sgl_kernel")
        for op in self.OPS:
            for arch in ("sm89", "sm90", "sm100", "sm103", "sm120", "sm121"):
                with_vllm = self.chosen(op, arch, "triton")
                assert with_vllm != "sgl_kernel" or self.chosen(op, arch, "triton", "sgl_kernel") != "cutlass"

    @pytest.mark.parametrize(
        ("op", "serves"),
        [
            ("quant_group", {"sm89", "sm90", "sm100", "sm103", "sm120", "sm121"}),
            ("quant_group_packed", {"sm89", "sm90", "sm100", "sm103", "sm120", "sm121"}),
            ("linear", {"sm89", "sm90", "sm100"}),
            ("block_linear", {"sm90", "sm100"}),
            ("quant_tensor", set()),
            ("quant_token", set()),
        ],
    )
    def test_without_vllm(self, op: str, serves: set[str]) -> None:
        """What it serves with neither vLLM nor Triton, and nothing where the package is missing."""
        for arch in ARCHES:
            if arch == "cpu":
                continue
            taken = self.chosen(op, arch, "triton", "vllm_ops")
            assert (taken == "sgl_kernel") == (arch in serves), (arch, taken)
            assert self.chosen(op, arch, "triton", "vllm_ops", "sgl_kernel") != "sgl_kernel"

    @pytest.mark.parametrize(
        ("op", "dims"),
        [
            ("linear", {"n": 4104}),
            ("linear", {"k": 4104}),
            ("linear", {"out_dtype": "float32"}),
            ("linear", {"bias": "float16"}),
            ("block_linear", {"n": 4160}),
            ("block_linear", {"k": 4160}),
            ("block_linear", {"bias": "bfloat16"}),
            ("quant_group", {"group_size": 64}),
            ("quant_group", {"a_dtype": "float32"}),
            ("quant_group", {"ue8m0": True}),
            ("quant_group_packed", {"k": 4096 + 128}),
        ],
    )
    def test_refusals(self, op: str, dims: dict[str, object]) -> None:
        """Extents, dtypes and scales that its kernels read wrongly, or refuse at run time."""
        problem = Problem(op, **{"n": 4096, "k": 4096, **dims})  # type: ignore[arg-type]  # fields of a problem
        machine = self.machine("sm90")
        assert backend_of("sgl_kernel").why_not(problem, machine, BARE) is not None
        assert backend_of("sgl_kernel").why_not(Problem(op, n=4096, k=4096), machine, BARE) is None
