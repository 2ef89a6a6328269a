"""The layer's own Triton product: judged under the interpreter, compiled for every architecture, its tiles chosen."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.backends import triton_gemm
from kernels.backends.triton_gemm import DENSE, TILES, Tile, tile_for
from kernels.platform import Machine, use_machine
from kernels.support import shared_memory
from oracle.tensorcore import schedules

pytestmark = [pytest.mark.interpreter, pytest.mark.turns(4)]

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def checks() -> dict[str, bool]:
    """Results of ``interpreted_gemm.py``: the interpreter must be chosen before Triton is imported."""
    pytest.importorskip("triton", reason="Triton is not installed; the tox factor `interpreter` has it")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "interpreted_gemm.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, bool] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_the_oracle_passes_every_mode_and_tail(checks: dict[str, bool]) -> None:
    """Dense, contiguous, masked; tails of M, N and K; row pitches; every code; rows of nobody left alone."""
    wrong = [name for name, good in checks.items() if not good and not name.startswith("sabotaged")]
    assert not wrong and len(checks) == 18


def test_every_fault_is_seen(checks: dict[str, bool]) -> None:
    """Negative tests: the kernel with one expression replaced."""
    faults = {name: good for name, good in checks.items() if name.startswith("sabotaged")}
    assert len(faults) == 9 and not any(faults.values())


INSTRUCTIONS = {
    80: "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    90: "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3",
    100: "tcgen05.mma.cta_group::1.kind::f8f6f4",
    120: "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
}
"""By capability: what the products become; the oracle's schedules are named after them."""


def smallest(sm: int) -> str:
    """The PTX of the smallest tile."""
    pytest.importorskip("triton", reason="Triton is not installed; the tox factor `interpreter` has it")
    from tests.support.ptx import ptx_of_launch

    start, code = triton_gemm._prepared(Tile(32, 8), DENSE, True, sm, True), "*u8" if sm < 89 else "*fp8e4nv"
    types = {"a": code, "b": code, "sa": "*fp32", "sb": "*fp32", "out": "*bf16", "rows": "*bf16"}
    return ptx_of_launch(start, sm, types)


@pytest.mark.parametrize("sm", INSTRUCTIONS)
def test_compiles_with_the_tensor_cores_of(sm: int) -> None:
    """The matrix instruction; one rounding of ``scale * part + sum``, one of the product of scales; copies ahead."""
    ptx = smallest(sm)
    assert INSTRUCTIONS[sm] in ptx and "cp.async" in ptx
    assert set(re.findall(r"\b(fma|mul|add|sub)\.(?:\w+\.)*f32", ptx)) == {"fma", "mul"}


def test_codes_as_float16_are_one_chain_a_block() -> None:
    """Before sm89: 8 instructions a block of 128 and accumulator, each onto the last; the oracle's schedule says so, in
    steps of two instructions, which share 32 products."""
    ptx = smallest(80)
    found = re.findall(r"mma\.sync[\w.]+ \{([^}]*)\}, \{[^}]*\}, \{[^}]*\}, \{([^}]*)\};", ptx)
    assert found and all(result == summand for result, summand in found)
    assert {[result for result, _ in found].count(result) for result, _ in found} == {8}
    schedule = schedules.get("sm80.f16.promote128")
    assert schedule.interval == 8 * schedule.instruction.k // 2 == 128 and schedule.promotion is schedules.Promotion.FMA
    assert schedule.instruction.operands == ("float16",) and schedule.widens


class TestTiles:
    """The tile that costs least; what does not fit an architecture is not taken."""

    @pytest.mark.parametrize(
        ("m", "n", "tile"),
        [
            (64, 4096, (64, 32, 8)),
            (128, 4096, (64, 64, 8)),
            (256, 4096, (64, 64, 6)),
            (512, 4096, (64, 128, 4)),
            (1024, 4096, (128, 128, 3)),
            (4096, 4096, (128, 128, 3)),
            (128, 7168, (64, 64, 6)),
            (256, 7168, (64, 128, 4)),
            (64, 2112, (64, 32, 8)),
            (256, 2112, (64, 64, 8)),
            (512, 2112, (64, 64, 6)),
            (1024, 2112, (128, 64, 4)),
            (2048, 2112, (128, 64, 4)),
        ],
    )
    def test_the_fastest_on_an_h200(self, m: int, n: int, tile: tuple[int, int, int]) -> None:
        """Of all that ``tests/hardware/products.py --tune`` timed there."""
        chosen = tile_for(m, n, 1, 132, 90)
        assert (chosen.rows, chosen.columns, chosen.stages) == tile

    def test_waves_count(self) -> None:
        """One program more than there is place for costs a further wave."""
        cost = TILES[Tile(128, 3, pair=True, width=16)]
        assert cost.of(1, 132) == cost.of(132, 132) == 45.0 and cost.of(133, 132) == cost.of(264, 132) == 61.0
        assert cost.of(265, 132) == 61.0 + 45.0
        alone = TILES[Tile(64, 8)]
        assert alone.of(132, 132) == 20.9 and alone.of(133, 132) == 2 * 20.9

    @pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 103, 120])
    def test_fit_the_shared_memory(self, sm: int) -> None:
        """Of every architecture, with two blocks in flight at least, and no more stages would."""
        assert tile_for(4096, 4096, 1, 0, sm) in TILES
        for tile, cost in TILES.items():
            if sm in cost.sms:
                stages = triton_gemm._stages(tile, sm)
                space = shared_memory(sm)
                used = (tile.rows + tile.columns) * 128
                assert 2 <= stages <= tile.stages and stages * used < space
                assert stages == tile.stages or (stages + 1) * used > space - triton_gemm.SPARE

    def test_groups_count(self) -> None:
        """Eight groups of 64 rows are as good as one of 512, and of 128 rows as one of 1024; none is half empty."""
        assert tile_for(64, 4096, 8, 132, 90) == tile_for(512, 4096, 1, 132, 90)
        assert tile_for(128, 4096, 8, 132, 90) == tile_for(1024, 4096, 1, 132, 90)
        assert not any(tile_for(64, 1 << 20, groups, 132, 90).pair for groups in (1, 64))

    def test_columns_lie_in_one_row_of_weight_scales(self) -> None:
        assert all(128 % tile.columns == 0 and triton_gemm.alignment() % tile.rows == 0 for tile in TILES)


def test_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program a tile and group; strides as given; rows that are not dense are copied; codes are bytes on sm80."""
    seen: list[tuple[Any, ...]] = []

    class Start:
        constants = {"DECODE": True}

        def __call__(self, *arguments: object) -> None:
            seen.append(arguments)

    monkeypatch.setattr(triton_gemm, "library", lambda: (None, True))
    monkeypatch.setattr(triton_gemm, "_prepared", lambda *key: Start())
    x = torch.zeros(70, 512, dtype=torch.uint8).view(torch.float8_e4m3fn)
    w, out = torch.zeros(3, 96, 256, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.zeros(70, 96)
    scale, weights = torch.ones(2, 72)[:, :70].t(), torch.ones(3, 1, 2)
    with use_machine(Machine.described("sm80", sms=108)):
        triton_gemm.gemm_nt(x[:, :256], scale, w[0], weights[0], out, None, True)
        triton_gemm.grouped_contiguous(x[:, ::2], scale, w, weights, out, torch.zeros(70, dtype=torch.int32), True)
        grid = x[:, :256].expand(3, 70, 256)
        triton_gemm.grouped_masked(grid, scale.expand(3, 70, 2), w, weights, out, torch.ones(3).int(), 70, True)
    (dense, operands, integers), contiguous, masked = seen
    assert (dense, contiguous[0], masked[0]) == (6, 6, 18)
    assert operands[0].dtype == torch.uint8 and operands[0].data_ptr() == x.data_ptr()
    assert integers == (70, 96, 256, 512, 256, 0, 1, 72, 2, 2, 1)
    assert contiguous[1][0].data_ptr() != x.data_ptr() and contiguous[2][3] == 256
    assert masked[1][0].is_contiguous() and masked[2][3:7] == (256, 256, 0, 1)
