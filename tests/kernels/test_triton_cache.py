"""The Triton kernels of KV caches: judged by their contracts in the interpreter, and what they compile to for sm90."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed; the tox factor `interpreter` has it")

from ptx import FUSED_TYPES, GATED, ptx_of  # noqa: E402

from kernels.backends import _launch, _triton_cache, triton_cache  # noqa: E402
from kernels.backends.declaration import CacheRows, Part, Slots  # noqa: E402

pytestmark = pytest.mark.interpreter

HERE = Path(__file__).resolve().parent
CODES = "*fp8e4nv"
WIDE = {
    "x0": "*bf16",
    "x1": "*bf16",
    "m0": CODES,
    "m1": CODES,
    "s0": "*fp32",
    "s1": "*fp32",
    "slots": "*i64",
    "positions": "*i32",
    "indices": "*i32",
    "indptr": "*i32",
}
STORE = {
    "MODE": 2,
    "PER_HEAD": False,
    "CHUNK0": 0,
    "CHUNK1": 0,
    "BLOCK0": 1024,
    "PARTS0": 1,
    "FLAT0": True,
    "BLOCK1": 1024,
    "PARTS1": 1,
    "FLAT1": True,
    "TABLE": False,
    "SKIP": False,
    "SMALL": True,
    "NATIVE": True,
}
TILE = {
    "TILES": 4,
    "ROPE": 64,
    "MODE": 0,
    "EPS": 0,
    "FLOOR": 0x00800000,
    "SLOTTED": True,
    "SMALL": True,
    "NATIVE": True,
}
TILED = {"x": "*bf16", "rope": "*i16", "q": CODES, "s": "*fp32", "r": "*i16", "slots": "*i64"}
ROWS = {
    "TABLE": True,
    "REQUESTS": 4,
    "STARTS": False,
    "LENS": False,
    "SCALED": True,
    "BESIDE": 0,
    "WIDTH": 1024,
    "NATIVE": True,
}
READ = {
    "c": CODES,
    "s": "*fp32",
    "b": CODES,
    "out": "*bf16",
    "beside": "*bf16",
    "table": "*i32",
    "starts": "*i32",
    "seq_starts": CODES,
    "lens": CODES,
}
BYTES = {"x0": "*u8", "x1": "*u8", "m0": "*u8", "m1": "*u8", "s0": "*i32", "s1": "*i32", "slots": "*i32"}
FOURS = {
    "x0": "*bf16",
    "x1": "*bf16",
    "q0": "*u8",
    "q1": "*u8",
    "s0": "*u8",
    "s1": "*u8",
    "g0": "*fp32",
    "g1": "*fp32",
    "slots": "*i64",
}
KERNELS = {
    "store": ("store_kernel", STORE, WIDE),
    "store by heads in chunks": ("store_kernel", STORE | {"PER_HEAD": True, "CHUNK0": 16, "FLAT0": False}, WIDE),
    "store copies": ("store_kernel", STORE | {"MODE": 0, "TABLE": True}, WIDE | BYTES),
    "tiles": ("tile_kernel", TILE, TILED),
    "tiles of powers": ("tile_kernel", TILE | {"MODE": 1, "TILES": 1, "ROPE": 0, "EPS": 0x38D1B717, "FLOOR": 0}, TILED),
    "tiles of a whole cache": ("tile_kernel", TILE | {"MODE": 2, "SLOTTED": False, "FLOOR": 0}, TILED),
    "nvfp4": ("nvfp4_kernel", {"BLOCK": 64, "PARTS": 1, "SMALL": True, "NATIVE": True}, FOURS),
    "read": ("gather_kernel", ROWS, READ),
    "read into float16": ("gather_kernel", ROWS, READ | {"out": "*fp16"}),
    "read into float32": ("gather_kernel", ROWS, READ | {"out": "*fp32"}),
    "read rows": (
        "gather_kernel",
        ROWS | {"LENS": True, "BESIDE": 64, "WIDTH": 512},
        READ | {"lens": "*i32", "b": "*i16", "beside": "*i16"},
    ),
}


@pytest.mark.turns(4)
def test_every_case_passes_in_the_interpreter() -> None:
    """``interpreted_cache.py``: the interpreter must be chosen before Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "interpreted_cache.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    assert set(found.values()) <= {"PASSED", "MISTRUSTED"} and len(found) > 40
    assert list(found.values()).count("PASSED") > 0.9 * len(found)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_sm90(name: str) -> None:
    """Writers divide truly and readers not at all; bits are copied unconverted; loads are wide."""
    kernel, constants, types = KERNELS[name]
    function = getattr(_triton_cache, kernel)
    small = ("heads0", "heads1", "skip", "requests", "tiles", "m0_c", "m1_c")
    whole = tuple(n for n in function.arg_names if n not in constants and n not in small)
    ptx = ptx_of(function, constants, types, whole=whole)
    divisions = set(re.findall(r"\b(?:div|rcp)\.[\w.]*f(?:16|32|64)", ptx))
    reads = kernel == "gather_kernel" or "copies" in name
    assert divisions == (set() if reads else {"div.rn.f32"})
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (not reads and kernel != "nvfp4_kernel")
    assert ".ftz" not in ptx
    assert re.search(r"ld\.global\.(v[248]|b64|b32)", ptx)


def test_another_division_is_seen() -> None:
    """The negative test: a kernel of the fused quantisers divides otherwise."""
    from kernels.backends import _triton_fused

    assert "div.full.f32" in ptx_of(_triton_fused.gated_kernel, GATED, FUSED_TYPES)


def test_every_start_gives_every_parameter_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch of each call; a compiled kernel takes its constants by position, behind the arguments."""
    seen = []

    def look(self: _launch.Launch, programs: int, pointers: tuple[object, ...], integers: tuple[int, ...]) -> None:
        seen.append(self.kernel.__name__)
        assert self.kernel.arg_names[len(pointers) + len(integers) :] == list(self.constants)

    monkeypatch.setattr(_launch.Launch, "here", look)
    monkeypatch.setattr(triton_cache, "library", lambda: (_triton_cache, True))
    x, one, slot = torch.zeros(3, 2, 16, dtype=torch.bfloat16), torch.ones(1), torch.arange(3)
    memory = torch.zeros(2, 4, 2, 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    part = Part(x, memory, one)
    triton_cache.store((part, part), Slots(slot))
    row = torch.zeros(3, 512, dtype=torch.bfloat16)
    rows = torch.zeros(2, 4, 656, dtype=torch.uint8)
    codes, scales = rows[..., :512], rows.view(torch.float32)[..., 128:132]
    rope = rows.view(torch.int16)[..., 264:]
    triton_cache.tiles(row, row[:, :64], (codes, scales, rope), slot, 0.0, 2.0**-126, False, False)
    fours = Part(x, torch.zeros(2, 4, 2, 8, dtype=torch.uint8), one)
    triton_cache.nvfp4((fours, fours), (memory[..., :1], memory[..., :1]), slot)
    table, ends = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    triton_cache.gather(codes, row, scales, (rope, row[:, :64]), CacheRows(table, ends, None, None))
    assert seen == ["store_kernel", "tile_kernel", "nvfp4_kernel", "gather_kernel"]
