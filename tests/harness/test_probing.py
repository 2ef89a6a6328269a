"""Probing in the worker: the answers are those of this process, and nothing that a kernel does reaches it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oracle.errors import DeviceError, OptionError, SubjectError
from oracle.harness import probing
from oracle.harness.probing import probe
from oracle.harness.process import Worker
from oracle.routines import get, registered
from oracle.tensorcore.fingerprint import fingerprint
from oracle.tensorcore.probes import Shape
from tests.support.commandline import Cli
from tests.support.in_process import InProcess
from tests.support.subjects import probed

SCALES = {name: contract.probed for name, contract in registered().items() if contract.probed is not None}

GEMM = "fp8_gemm_nt"
BROKEN, PROBED = "tests.support.subjects.broken", "tests.support.subjects.probed"
KERNELS: dict[str, Callable[..., Tensor | None]] = {
    GEMM: probed.promoting,
    "fp8_blockscale_gemm_sm90": probed.flashinfer,
    "cutlass_scaled_mm": probed.chained,
    "torch_per_token_w8a8_scaled_mm": probed.torch_names,
    "torch_channelwise_w8a8_scaled_mm": probed.torch_names,
}
# kernel, what the one line says
IN_PROCESS = (
    ("raises", "raised: RuntimeError: tile scheduler: unsupported M"),
    ("nan", "the probes do not answer: element (0, 0) is nan"),
    ("unwritten_tail", "the probes do not answer: element (0, 125) is nan"),
    ("nothing", "broken:nothing returned nothing"),
    ("float32_out", "out has dtype torch.float32; expected torch.bfloat16"),
    ("flat", "out has shape [16384]; these inputs give [128, 128]"),
    ("wrong_names", "has another signature: the kernel cannot be called with"),
)
# these end the worker, or stop it from loading
IN_WORKER = (
    ("dies", "crashed: the worker died by SIGSEGV"),
    ("killed", "crashed: the worker died by SIGKILL"),
    ("exits", "crashed: the kernel ended the process with status 3"),
    ("quits", "ended the process: the kernel called exit(4)"),
    ("out_of_memory", "ran out of memory: out of memory: cannot allocate 1 TiB"),
    ("not_callable", "is a int, not callable"),
    ("absent", "has no 'absent'"),
)
BAD = (*IN_PROCESS, *IN_WORKER)


@pytest.mark.turns(4)
class TestSameAnswers:
    """What a kernel computes does not depend on the process that runs it."""

    @pytest.mark.sampled(1)
    @pytest.mark.usefixtures("forked_workers")
    @pytest.mark.parametrize("contract", SCALES)
    def test_as_in_this_process(self, contract: str) -> None:
        """Every field, for every contract, block scales and row scales."""
        block, b_rows = SCALES[contract]

        def here(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
            if block:
                return probed.promoting(a, b, a_scale, b_scale, out_dtype)
            return probed.torch_names(a, b.t(), a_scale, b_scale.t(), out_dtype)

        shape = Shape(torch.float8_e4m3fn, 256, block, b_rows)
        found = probe(KERNELS[contract], contract, k=256, out_dtype=torch.float32)
        assert found == fingerprint(here, shape, out_dtype=torch.float32)
        assert found.schedules == (("sm90.promote128",) if block else ("sm90.chain",))
        assert found.interval == (128 if block else None)

    def test_every_contract_has_its_kernel(self) -> None:
        assert set(KERNELS) == set(SCALES) and all(get(name).returns == ("out",) for name in SCALES)

    @pytest.mark.usefixtures("forked_workers")
    @pytest.mark.parametrize("kernel", ["scales_in_place", "noisy"])
    def test_what_a_kernel_does_besides(self, kernel: str, cli: Cli) -> None:
        """Overwritten inputs, a megabyte of output and forks change no answer, and print nothing."""
        ran = cli("fingerprint", f"{PROBED}:{kernel}", "--contract", GEMM, "--k", 256)
        assert (ran.status, ran.err) == (0, "")
        assert ran.out.endswith("schedules that reproduce every bit: sm90.promote128\n") and ran.out.count("\n") == 8

    @pytest.mark.usefixtures("in_process")
    def test_an_adapter(self, cli: Cli) -> None:
        """As ``validate`` takes it; without it the kernel has no names (the twin)."""
        words = ("fingerprint", f"{PROBED}:by_place", "--contract", GEMM, "--k", 256)
        ran = cli(*words, "--adapter", f"{PROBED}:unpacked")
        assert ran.status == 0 and "sm90.promote128" in ran.out
        assert cli(*words).status == 2


@pytest.mark.usefixtures("forked_workers")
class TestBadKernels:
    """Named in one line, exit 2, nothing on the output; the process lives on."""

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize(("kernel", "said"), BAD, ids=[name for name, _ in BAD])
    def test_named(self, monkeypatch: pytest.MonkeyPatch, cli: Cli, kernel: str, said: str) -> None:
        if (kernel, said) in IN_PROCESS:
            monkeypatch.setattr(probing, "Worker", InProcess)
        ran = cli("fingerprint", f"{BROKEN}:{kernel}", "--contract", GEMM, "--k", 128, "--limit", 60)
        assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert ran.err.startswith("fp8-oracle: error: ") and said in ran.err

    def test_a_hang_ends_at_the_limit(self, cli: Cli) -> None:
        ran = cli("fingerprint", f"{BROKEN}:hangs", "--contract", GEMM, "--limit", 3)
        assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert f"{BROKEN}:hangs hangs: no answer within 3 s; the worker was killed" in ran.err

    def test_death_in_the_middle_prints_nothing(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        """After three answers; no second worker is tried, and the first is gone."""
        workers: list[Worker] = []
        made = Worker.__init__

        def kept(self: Worker, *arguments: object, **options: object) -> None:
            workers.append(self)
            made(self, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(Worker, "__init__", kept)
        ran = cli("fingerprint", f"{PROBED}:dies_later", "--contract", GEMM, "--k", 256)
        assert (ran.status, ran.out) == (2, "") and "crashed: the worker died by SIGABRT" in ran.err
        (worker,) = workers
        assert worker.starts == 1 and worker._process is None


@pytest.mark.usefixtures("forked_workers")
class TestBlockScaled:
    """A kernel with block scales; the readings themselves are in tests/tensorcore/test_block_probes.py."""

    def test_the_reading_is_named(self, cli: Cli) -> None:
        ran = cli("fingerprint", f"{PROBED}:nvf4_counted", "--block-scaled", "nvf4")
        said = "schedules that reproduce every bit: sm100.chain_nvf4.counted, sm120.chain_nvf4.counted"
        assert ran.status == 0 and ran.out.splitlines()[-1] == said
        assert "alignment: 35 fraction bits" in ran.out

    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            (("--block-scaled", "nvf4", "--a-format", "float8_e5m2"), "nvf4 takes no float8_e5m2"),
            (("--contract", GEMM, "--b-format", "float8_e5m2"), "belong to --block-scaled"),
        ],
    )
    def test_refused(self, cli: Cli, asked: tuple[str, ...], said: str) -> None:
        ran = cli("fingerprint", f"{PROBED}:nvf4_counted", *asked)
        assert ran.status == 2 and said in ran.err


class TestQuestions:
    """Wrong questions are told from wrong kernels."""

    @pytest.mark.parametrize(
        ("change", "error", "said"),
        [
            ({"contract": "silu_and_mul"}, OptionError, "those of cutlass_scaled_mm"),
            ({"k": 130}, OptionError, "k=130"),
            ({"k": 0}, OptionError, "k=0"),
            ({"limit": float("nan")}, OptionError, "limit=nan"),
            ({"device": "tpu"}, DeviceError, "neither cpu nor cuda"),
            ({"kernel": "nonsense"}, SubjectError, "not of the form"),
            ({"kernel": lambda **_: None}, SubjectError, "cannot be imported by the worker"),
        ],
        ids=["contract", "k", "no k", "limit", "device", "name", "lambda"],
    )
    def test_refused(self, change: dict[str, object], error: type[Exception], said: str) -> None:
        asked = {"kernel": probed.promoting, "contract": GEMM} | change
        with pytest.raises(error, match=said):
            probe(asked.pop("kernel"), asked.pop("contract"), **asked)  # type: ignore[arg-type]

    def test_a_gpu_that_is_not_there(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        """One line, as for ``validate``."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        ran = cli("fingerprint", f"{PROBED}:promoting", "--contract", GEMM, "--device", "cuda")
        assert (ran.status, ran.err.count("\n")) == (2, 1) and "torch sees no GPU" in ran.err
