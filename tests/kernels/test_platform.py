"""The machine, the switches, and the questions engines ask of them."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import platform, records
from kernels.config import Config, current_config, use_config
from kernels.errors import ConfigError, DeviceError, OptionError
from kernels.platform import ARCHES, Machine, current_machine, use_machine, version


class TestVersions:
    """Versions are compared as versions, never as strings."""

    def test_ten_is_after_nine(self) -> None:
        assert version("2.10.0") > version("2.9.1")
        assert version("2.11.0+cu130") == (2, 11, 0)

    def test_no_version(self) -> None:
        with pytest.raises(OptionError, match="nightly"):
            version("nightly")

    @pytest.mark.parametrize(("torch_version", "good"), [("2.6.0", False), ("2.7.0", True), ("2.10.0", True)])
    def test_rowwise_on_rocm(self, torch_version: str, good: bool) -> None:
        assert platform.use_rowwise_torch_scaled_mm(Machine.described("gfx942", torch_version=torch_version)) is good


INSTALLED_BY = {
    "deep_gemm": "sgl-deep-gemm",
    "flashinfer": "`flashinfer-python`",
    "flashinfer_cubin": "`flashinfer-cubin`",
    "vllm_ops": "FP8_KERNELS_VLLM_OPS",
    "vllm_fa3": "_vllm_fa3_C.abi3.so in FP8_KERNELS_VLLM_OPS",
    "flashmla": "_flashmla_C.abi3.so in FP8_KERNELS_VLLM_OPS",
    "sgl_kernel": "`sgl-kernel`",
    "triton": "`triton`",
    "cudnn": "`nvidia-cudnn-frontend`",
    "cutlass_dsl": "`nvidia-cutlass-dsl`",
}
"""What the reason for a missing package must name."""


class TestMachine:
    """A described machine carries what torch would report."""

    @pytest.mark.parametrize(
        ("arch", "capability", "sm"),
        [
            ("sm80", (8, 0), 80),
            ("sm103", (10, 3), 103),
            ("sm120", (12, 0), 120),
            ("gfx90a", (9, 0), -1),
            ("gfx942", (9, 4), -1),
            ("gfx950", (9, 5), -1),
            ("cpu", None, -1),
        ],
    )
    def test_described(self, arch: str, capability: tuple[int, int] | None, sm: int) -> None:
        machine = Machine.described(arch)
        assert (machine.capability, machine.sm) == (capability, sm)

    def test_unknown_arch_lists_the_known(self) -> None:
        with pytest.raises(OptionError, match="sm90"):
            Machine.described("volta")

    def test_nothing_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each package is missing, and says by its own name how to get it."""
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        machine = Machine.detect(Config())
        assert tuple(package.name for package in machine.packages) == platform.PACKAGES
        for name, wanted in INSTALLED_BY.items():
            package = machine.package(name)
            assert package.version is None and package.why_not is not None
            assert f"package {name} is not installed" in package.why_not and wanted in package.why_not

    def test_everything_installed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """The twin: each package is found, with the version of the distribution that carries it."""
        libraries = [tmp_path / name for name in ("ops.so", "_vllm_fa3_C.abi3.so", "_flashmla_C.abi3.so")]
        for library in libraries:
            library.write_bytes(b"")
        monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(submodule_search_locations=[]))
        monkeypatch.setattr("importlib.metadata.version", lambda name: f"9 of {name}")
        machine = Machine.detect(Config(vllm_ops_library=os.pathsep.join(map(str, libraries))))
        found = {package.name: (package.version, package.why_not) for package in machine.packages}
        assert found == {
            "deep_gemm": ("9 of sgl-deep-gemm", None),
            "flashinfer": ("9 of flashinfer-python", None),
            "flashinfer_cubin": ("9 of flashinfer-cubin", None),
            "vllm_ops": ("9 of vllm", None),
            "vllm_fa3": ("9 of vllm", None),
            "flashmla": ("9 of vllm", None),
            "sgl_kernel": ("9 of sglang-kernel", None),
            "triton": ("9 of triton", None),
            "cudnn": ("9 of nvidia-cudnn-cu13", None),
            "cutlass_dsl": ("9 of nvidia-cutlass-dsl", None),
        }

    def test_one_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Only the package whose module is not found."""
        present = SimpleNamespace(submodule_search_locations=[])
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "triton" else present)
        machine = Machine.detect(Config())
        assert machine.package("triton").why_not is not None and machine.package("flashinfer").why_not is None
        assert machine.package("no_such_package").why_not == "package no_such_package is not installed; install it"

    def test_the_unofficial_deep_gemm_is_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        present = SimpleNamespace(submodule_search_locations=[])
        monkeypatch.setattr("importlib.util.find_spec", lambda name: present)
        for released, usable in (("1.0.0", False), ("2.1.0", True)):
            monkeypatch.setattr(records, "_metadata", {"deep_gemm": released}.get)
            found = Machine.detect(Config()).package("deep_gemm")
            assert (found.why_not is None) is usable
            assert usable or "unofficial" in str(found.why_not)

    def test_override_ends_with_the_block(self) -> None:
        before = current_machine()
        with use_machine(Machine.described("sm100")):
            assert current_machine().sm == 100
        assert current_machine() is before


SUPPORT = {
    # predicate: {arch: lowest CUDA that supports it, or None}
    platform.cutlass_fp8_supported: {
        "sm80": None,
        "sm86": None,
        "sm89": "12.4",
        "sm90": "12.0",
        "sm100": "12.0",
        "sm120": "12.0",
    },
    platform.cutlass_block_fp8_supported: {
        "sm89": None,
        "sm90": "12.0",
        "sm100": "12.8",
        "sm103": "12.8",
        "sm120": "12.8",
    },
    platform.cutlass_group_gemm_supported: {"sm89": None, "sm90": "12.3", "sm100": "12.8", "sm120": "12.8"},
    platform.sparse_cutlass_supported: {"sm89": None, "sm90": "12.2", "sm100": None},
}
CUDAS = ("11.8", "12.0", "12.1", "12.2", "12.3", "12.4", "12.8", "13.0")


@pytest.mark.parametrize("predicate", SUPPORT, ids=lambda f: f.__name__)
def test_cutlass_support(predicate) -> None:
    for arch, lowest in SUPPORT[predicate].items():
        for cuda in CUDAS:
            expected = lowest is not None and version(cuda) >= version(lowest)
            assert predicate(Machine.described(arch, cuda=cuda)) is expected, (arch, cuda)
    for arch in ("gfx942", "cpu"):
        assert predicate(Machine.described(arch)) is False


class TestDeepGemm:
    """sm90 or sm100, the package, VLLM_USE_DEEP_GEMM, not VLLM_USE_FLASHINFER_MOE_FP8."""

    @pytest.mark.parametrize("arch", ARCHES)
    def test_architectures(self, arch: str) -> None:
        assert platform.is_deep_gemm_supported(Machine.described(arch), Config()) is (arch in ("sm90", "sm100"))

    def test_every_other_condition(self) -> None:
        machine = Machine.described("sm90")
        assert not platform.is_deep_gemm_supported(machine.with_package("deep_gemm", "broken"), Config())
        assert not platform.is_deep_gemm_supported(machine, Config(use_deep_gemm=False))
        assert not platform.is_deep_gemm_supported(machine, Config(use_flashinfer_moe_fp8=True))

    @pytest.mark.parametrize("arch", ["sm90", "sm100", "sm103", "sm120", "sm121", "sm89"])
    def test_scales_of_a_layer(self, arch: str) -> None:
        """UE8M0 where DeepGEMM multiplies and its switch is on: by the family, not by the published predicate."""
        machine, deep_gemm = Machine.described(arch), arch not in ("sm121", "sm89")
        for blackwell in (False, True):
            for hopper in (False, True):
                config = Config(use_deep_gemm_e8m0=blackwell, use_deep_gemm_e8m0_hopper=hopper)
                due = deep_gemm and (hopper if arch == "sm90" else blackwell)
                assert platform.quantises_to_ue8m0(machine, config) is due
                if arch in ("sm90", "sm100"):
                    assert platform.is_deep_gemm_e8m0_used(machine, config) is due
        assert not platform.quantises_to_ue8m0(machine.with_package("deep_gemm", "broken"), Config())
        assert platform.packs_ue8m0(machine) is (machine.sm >= 100)

    @pytest.mark.parametrize("arch", ["sm90", "sm100", "sm120"])
    @pytest.mark.parametrize("blackwell", [False, True])
    @pytest.mark.parametrize("hopper", [False, True])
    def test_e8m0(self, arch: str, blackwell: bool, hopper: bool) -> None:
        config = Config(use_deep_gemm_e8m0=blackwell, use_deep_gemm_e8m0_hopper=hopper)
        expected = {"sm90": hopper, "sm100": blackwell, "sm120": False}[arch]
        assert platform.is_deep_gemm_e8m0_used(Machine.described(arch), config) is expected

    @pytest.mark.parametrize(
        ("dtype", "shape", "good"),
        [
            (torch.bfloat16, (128, 256), True),
            (torch.float16, (128, 256), False),
            (torch.bfloat16, (64, 256), False),
            (torch.bfloat16, (128, 192), False),
        ],
    )
    def test_linear(self, dtype: torch.dtype, shape: tuple[int, int], good: bool) -> None:
        machine, config = Machine.described("sm90"), Config()
        assert platform.should_use_deepgemm_for_fp8_linear(dtype, torch.empty(shape), machine, config) is good
        assert not platform.should_use_deepgemm_for_fp8_linear(dtype, shape, Machine.described("sm89"), config)


class TestConfig:
    """vLLM's names, read in one place."""

    def test_defaults(self) -> None:
        config = Config.from_environment({"HOME": "/home/x"})
        assert config.use_deep_gemm and not config.use_deep_gemm_e8m0_hopper and not config.batch_invariant

    def test_every_switch_is_read(self) -> None:
        config = Config.from_environment(
            {
                "VLLM_USE_DEEP_GEMM": "0",
                "VLLM_USE_DEEP_GEMM_E8M0": "0",
                "VLLM_USE_DEEP_GEMM_E8M0_HOPPER": "1",
                "VLLM_USE_FLASHINFER_MOE_FP8": "1",
                "VLLM_FLASHINFER_MOE_BACKEND": "throughput",
                "VLLM_BATCH_INVARIANT": "1",
                "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
                "VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES": "0",
                "FLASHINFER_LOGLEVEL": "3",
                "FP8_KERNELS_BACKEND": "linear=torch",
                "FP8_KERNELS_LOG": "1",
                "FP8_KERNELS_CHECK": "1",
                "FP8_KERNELS_FAST_PATHS": "0",
                "FP8_KERNELS_VLLM_OPS": "/v.so",
            }
        )
        assert config == Config(
            False, False, True, False, True, "throughput", False, True, "/v.so", True, "linear=torch", True, True, False
        )

    @pytest.mark.parametrize("value", ["yes", "true", "1.0"])
    def test_a_boolean_must_be_an_integer(self, value: str) -> None:
        with pytest.raises(ConfigError, match="VLLM_USE_DEEP_GEMM="):
            Config.from_environment({"VLLM_USE_DEEP_GEMM": value})

    def test_unknown_moe_backend(self) -> None:
        with pytest.raises(ConfigError, match="throughput, latency, masked_gemm"):
            Config.from_environment({"VLLM_FLASHINFER_MOE_BACKEND": "fastest"})

    def test_nothing_is_written_into_the_environment(self) -> None:
        before = dict(os.environ)
        Config.from_environment()
        assert dict(os.environ) == before

    def test_override_ends_with_the_block(self) -> None:
        before = current_config()
        with use_config(Config(batch_invariant=True)):
            assert current_config().batch_invariant
        assert current_config() is before


class TestNumSms:
    """A live device is asked; a described machine answers for itself; nothing is guessed."""

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    def test_no_device(self) -> None:
        with pytest.raises(DeviceError, match="CUDA"):
            platform.get_num_sms()

    @pytest.mark.parametrize("product", platform.PRODUCTS)
    def test_products(self, product: str) -> None:
        machine = Machine.of_product(product)
        arch, count = platform.PRODUCTS[product]
        assert (machine.arch, platform.get_num_sms(machine=machine)) == (arch, count)
        assert platform.get_num_sms(machine=Machine.of_product(product, sms=count // 7)) == count // 7

    def test_unknown_product_lists_the_known(self) -> None:
        with pytest.raises(OptionError, match="H100 PCIe"):
            Machine.of_product("Voodoo 2")

    def test_an_architecture_stands_for_its_first_product(self) -> None:
        assert platform.get_num_sms(machine=Machine.described("sm100")) == 148
        assert platform.get_num_sms(machine=Machine.described("sm90", sms=78)) == 78

    @pytest.mark.parametrize(
        "machine",
        [
            Machine.described("cpu"),
            Machine.described("cpu", sms=132),
            Machine.described("sm90", sms=0),
            Machine.described("sm103"),
            Machine.described("gfx942"),
        ],
    )
    def test_none_or_unknown_is_refused(self, machine: Machine) -> None:
        with pytest.raises(DeviceError, match="found 0"):
            platform.get_num_sms(machine=machine)

    def test_the_driver_of_the_device_that_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Device 0 is device 0 also where another one is current."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda d: SimpleNamespace(multi_processor_count=(114, 132)[d])
        )
        assert (platform.get_num_sms(), platform.get_num_sms(0), platform.get_num_sms(1)) == (132, 114, 132)
        assert platform.get_num_sms(machine=Machine.described("sm90", sms=78)) == 78
