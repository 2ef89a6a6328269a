"""No call waits for a GPU, by default: each runs under torch's sync debug mode, and is captured into a CUDA graph.

On a CPU the calls only run, so that the table below stays right.
"""

from __future__ import annotations

import subprocess
import sys
import typing
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import kernels
from kernels.config import Config, use_config
from kernels.errors import NoBackendError, ValueRangeError
from kernels.verbs import VERBS
from tests.support.verb_calls import calls, unserved

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
FP8 = torch.float8_e4m3fn
M, N, K, HEADS = 40, 256, 256, 32
NOT_CAPTURED = {"maybe_create_device_identity"}  # gives what it made before the capture


@pytest.fixture
def no_sync() -> Iterator[Callable[[], None]]:
    """Switches torch's sync debug mode to raise, until the test ends."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    if GPU:
        torch.cuda.set_sync_debug_mode("default")


def bits(found: object) -> list[Tensor]:
    return [t.flatten().view(torch.uint8) for t in tree_leaves(found) if isinstance(t, Tensor)]


@pytest.mark.turns(4)
@pytest.mark.whole("a call of 10 ms each")
@pytest.mark.parametrize("name", list(calls(DEVICE)))
def test_no_call_waits(name: str, no_sync: Callable[[], None]) -> None:
    """After a first one, which may compile; and what a graph replays has the bits of the call."""
    call = calls(DEVICE)[name]
    if name in unserved(DEVICE):
        with pytest.raises(NoBackendError):
            call()
        return
    expected = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, call())
    if not GPU:
        return
    call()
    torch.cuda.synchronize()
    no_sync()
    found = call()
    torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(y, z) for y, z in zip(bits(found), bits(expected), strict=True))
    with use_config(Config(fast_paths=False)):
        assert all(torch.equal(y, z) for y, z in zip(bits(call()), bits(expected), strict=True)), "the public way"
    if name in NOT_CAPTURED:
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for t in tree_leaves(captured):
        if isinstance(t, Tensor) and t.data_ptr() not in {u.data_ptr() for u in tree_leaves(found)}:
            t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(y, z) for y, z in zip(bits(captured), bits(expected), strict=True))


def test_every_verb_is_called() -> None:
    """But those that give a number, a record or an object; a bool is a value, which has to be waited for."""
    called = {name.split(" ")[0] for name in calls(DEVICE)}
    python = {name for name, verb in VERBS.items() if not gives_tensors(verb.function)}
    assert called >= set(VERBS) - python and not called & python
    assert called - set(VERBS) == {"Fp8LinearOp", "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"}
    of_calls = {"compilations", "explain", "rows_to_warm_up", "trace", "warm_up"}
    assert set(kernels.__all__) - set(VERBS) - called == {"FlashinferMoeBackend", "NAMESPACE", *of_calls}


def gives_tensors(verb: Callable[..., object]) -> bool:
    """Whether a verb returns tensors, a plan made of the tensors it takes, or nothing, because it writes into them."""
    hints = typing.get_type_hints(verb)
    result = hints.pop("return")
    plan = "Callable" in str(result) and any("Tensor" in str(hint) for hint in hints.values())
    return result is type(None) or plan or "Tensor" in str(result) and "Callable" not in str(result)


WRONG = {
    # calls with a value outside of the contract
    "m_indices": lambda check: kernels.m_grouped_fp8_gemm_nt_contiguous(
        (torch.zeros(128, 128, device=DEVICE).to(FP8), torch.ones(128, 1, device=DEVICE)),
        (torch.zeros(2, 128, 128, device=DEVICE).to(FP8), torch.ones(2, 1, 1, device=DEVICE)),
        torch.zeros(128, 128, device=DEVICE, dtype=torch.bfloat16),
        torch.full((128,), 2, dtype=torch.int32, device=DEVICE),
        check=check,
    ),
    "scale": lambda check: kernels.get_mn_major_tma_aligned_packed_ue8m0_tensor(
        torch.full((4, 4), 0.3, device=DEVICE), check=check
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
@pytest.mark.parametrize("check", [None, True, False])
def test_values_are_checked_where_that_waits_for_nothing(name: str, check: bool | None) -> None:
    """On a CPU by default and on demand; on a GPU on demand, which the debug mode sees (the twin)."""
    if check is None and GPU:
        pytest.skip("the flag of a GPU ends its process: see the next test")
    if check is not False:
        with pytest.raises(ValueRangeError, match=name):
            WRONG[name](check)
    elif name == "scale":
        WRONG[name](check)


@pytest.mark.skipif(not GPU, reason="there is no CUDA device")
@pytest.mark.parametrize(("switch", "status"), [("1", 3), ("0", 0)])
def test_a_flag_fails_the_next_synchronisation(switch: str, status: int) -> None:
    """Where the switch asks for it, and not before; without it (the twin) the call goes through."""
    program = f"""
import os, sys
os.environ["FP8_KERNELS_CHECK"] = "{switch}"
import torch
from kernels import checks
torch.cuda.set_sync_debug_mode("error")
x = torch.full((4,), 7, dtype=torch.int32, device="cuda")
if checks.wanted(None, x.device):
    checks.within("x", None, x, x, (0, 3), "[0, 3]")
torch.cuda.set_sync_debug_mode("default")
try:
    torch.cuda.synchronize()
except RuntimeError:
    os._exit(3)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == status


def test_the_switch_asks_for_checks_on_a_gpu() -> None:
    from kernels import checks

    gpu, cpu = torch.device("cuda:0"), torch.device("cpu")
    assert not checks.wanted(None, gpu) and checks.wanted(None, cpu)
    assert checks.wanted(True, gpu) and not checks.wanted(False, cpu)
    with use_config(Config(check_values=True)):
        assert checks.wanted(None, gpu) and not checks.wanted(False, gpu)
