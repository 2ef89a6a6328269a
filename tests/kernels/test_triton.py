"""The Triton quantisers: bits equal to plain torch (interpreter), and what they compile to for sm90."""

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed; the tox factor `interpreter` has it")

import triton.language as tl  # noqa: E402  # only where Triton is installed
from ptx import divides_truly, ptx_of  # noqa: E402

import kernels  # noqa: E402
from kernels import context, fast  # noqa: E402
from kernels.backends import _launch, _triton_kernels, _triton_mx_quant, triton_mx, triton_mx_quant, triton_quant  # noqa: E402
from kernels.backends.declaration import Blocks  # noqa: E402
from kernels.config import Config, use_config  # noqa: E402
from kernels.mx_blocks import FP4_VALUES, fp4_codes  # noqa: E402

pytestmark = [pytest.mark.interpreter, pytest.mark.turns(4)]

HERE = Path(__file__).resolve().parent
WORD = 0xFFFFFFFF


@pytest.fixture(scope="module")
def checks() -> dict[str, bool]:
    """Results of ``interpreted_quantisers.py``: the interpreter must be chosen before Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "interpreted_quantisers.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, bool] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_bits_equal_plain_torch(checks: dict[str, bool]) -> None:
    """Scales, codes and strides of every kernel, dtype, layout and special value."""
    wrong = [name for name, good in checks.items() if not good and not name.startswith("sabotaged")]
    assert not wrong
    assert len(checks) > 60


def test_another_formula_is_seen(checks: dict[str, bool]) -> None:
    """Negative tests: a different floor, a different limit of 448/amax, another rounding of a shared exponent."""
    assert [good for name, good in checks.items() if name.startswith("sabotaged")] == [False] * 8


TILE = {"GROUP": 128, "LANES": 128, "BLOCK": 32, "EPS": 0x2EDBE6FF, "NATIVE": True}  # 1e-10
BF16_MAX = 0x7F7F0000
TYPES = {"x": "*bf16", "q": "*fp8e4nv", "s": "*fp32", "bound": "*fp32", "amax": "*i32"}
KERNELS = {
    "group": ("group_kernel", TILE | {"LEAD": 0, "UE8M0": False, "LIMIT": 0}),
    "group transposed": ("group_kernel", TILE | {"LEAD": 4, "UE8M0": False, "LIMIT": 0}),
    "group ue8m0": ("group_kernel", TILE | {"LEAD": 1, "UE8M0": True, "LIMIT": 0}),
    "reciprocal": ("group_kernel", TILE | {"LEAD": 4, "UE8M0": False, "LIMIT": BF16_MAX}),
    "packed": ("packed_kernel", TILE),
    "token": ("token_kernel", {"BLOCK": 4096, "PARTS": 2, "BOUNDED": True, "NATIVE": True}),
    "tensor": ("tensor_kernel", {"BLOCK": 4096, "STATIC": False, "NATIVE": True}),
}
BLOCKS = {
    # what the quantiser of shared scale bytes is prepared for: type of its codes, and whether it divides
    (Blocks("e4m3", "rceil", "128x4", False, False), False): ("*fp8e4nv", False),
    (Blocks("e5m2", "even", "8x4", False, False), False): ("*u8", False),
    (Blocks("e2m1", "floor", "linear", False, False), False): ("*u8", False),
    (Blocks("e2m1", "rceil", "128x4", False, False), True): ("*u8", True),
    (Blocks("e2m1", "rceil", "128x4", False, True), True): ("*u8", True),
}


@triton.jit
def flushing_kernel(x, s, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    v = tl.load(x + lane).to(tl.float32)
    tl.store(s + lane, tl.inline_asm_elementwise("div.rn.ftz.f32 $0, $1, $1;", "=f,f", [v], tl.float32, True, 1))


@triton.jit
def approximate_kernel(x, s, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    v = tl.load(x + lane).to(tl.float32)
    tl.store(s + lane, v / (v + 1.0))


@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_sm90_with_true_division(name: str) -> None:
    """IEEE division whatever the Triton, saturating conversion and, on aligned rows, wide loads."""
    kernel, constants = KERNELS[name]
    types = TYPES | ({"s": "*i32"} if name == "packed" else {})
    ptx = ptx_of(getattr(_triton_kernels, kernel), constants, types)
    assert divides_truly(ptx)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "ld.global.v4" in ptx


@pytest.mark.parametrize("prepared", BLOCKS, ids=str)
def test_shared_scale_bytes_compile_for_sm90(prepared: tuple[Any, ...]) -> None:
    """As above; E8M0 scales need no division."""
    codes, divides = BLOCKS[prepared]
    launch = triton_mx_quant._prepared(*prepared, 16).start
    ptx = ptx_of(launch.kernel, launch.constants, {"x": "*bf16", "q": codes, "s": "*u8", "g": "*fp32"})
    assert "ld.global.v4" in ptx and ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (codes == "*fp8e4nv" or prepared[1])
    assert len(re.findall(r"\b(?:div|rem)\.[su]32", ptx)) == 2, "of the program's own number, and of no block's"
    if prepared[0].gated:  # silu divides within 2 ulp
        assert "div.full" not in ptx and "ex2.approx.ftz" in ptx and "rcp.approx.ftz" in ptx
        return
    assert divides_truly(ptx) if divides else "div.rn.f32" not in ptx and "div.full" not in ptx


@pytest.mark.parametrize("factors", range(4))
def test_a_block_scaled_product_compiles_for_sm90(factors: int) -> None:
    """Without a factor, with one, with one of each group and of each row."""
    values = (triton_mx.DENSE, 2, 2, 1, 1, 128, 128, 16, 16, factors, 0, 0)  # NVFP4 on both sides, in tiles
    launch = triton_mx._prepared("mx_kernel", triton_mx.Tile(16, 64, 128, 4), 90, *values)
    types = dict.fromkeys(("a", "sa", "b", "sb"), "*i32") | dict.fromkeys(("out", "table", "bias"), "*bf16")
    ptx = ptx_of(launch.kernel, launch.constants, types | {"alpha": "*fp32"})
    assert ptx.count(".entry") == 1 and "wgmma" in ptx


@pytest.mark.parametrize(("kind", "divides"), [("mxfp8", False), ("mxfp4", False), ("nvfp4", True)])
def test_rows_of_experts_compile_for_sm90(kind: str, divides: bool) -> None:
    """One kernel, which loads 16 bytes at once."""
    element, rounding = kernels.mx_experts.ROWS[kind]
    how = Blocks(element, rounding, "128x4", False, False)
    launch = triton_mx_quant._of_experts(how, divides, True, 256, 64).start
    types = {"x": "*bf16", "q": "*fp8e4nv" if kind == "mxfp8" else "*u8", "s": "*u8", "g": "*fp32", "offsets": "*i32"}
    ptx = ptx_of(launch.kernel, launch.constants, types)
    assert "ld.global.v4" in ptx and ptx.count(".entry") == 1
    assert divides_truly(ptx) if divides else "div.rn.f32" not in ptx


@pytest.mark.parametrize("layout", ["128x4", "linear"])
def test_norms_compile_for_sm90(layout: str) -> None:
    """One kernel of a whole row of 7168, which loads 16 bytes at once and spills nothing."""
    how = Blocks("e2m1", "rceil", layout, False, False)
    launch = triton_mx_quant._of_norm(how, True, 7168, "each", True, 1e-6).start
    types = {"q": "*u8", "s": "*u8", "g": "*fp32"} | dict.fromkeys(("x", "weight", "residual", "z"), "*bf16")
    ptx = ptx_of(launch.kernel, launch.constants, types, num_warps=launch.num_warps)
    assert "ld.global" in ptx and ".v4.b32" in ptx and "rsqrt.approx" in ptx and ptx.count(".entry") == 1


@pytest.mark.parametrize("exact", [False, True])
def test_packed_codes_are_those_of_plain_torch(exact: bool) -> None:
    """The PTX of eight codes, executed here line by line: around every midpoint, at every binade, NaN and infinity;
    ``exact``: every bfloat16 number."""
    if exact:
        y = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()
        y = torch.where(y.isnan(), float("nan"), y)
        y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(5))]
    else:
        values = torch.tensor(FP4_VALUES)
        points = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.exp2(torch.arange(-149.0, 128.0))])
        points = torch.cat([points, torch.tensor([6.5, float("inf"), float("nan")])])
        near = torch.tensor([0.0, float("inf")])
        y = torch.cat([points, *(torch.nextafter(points, n) for n in near), *(points * (1 + 2.0**-e) for e in (8, 9))])
        y = torch.cat([y, -y[~y.isnan()], torch.rand(4000) * 8 - 4])
    y = y[: y.numel() // 8 * 8].view(-1, 4, 2)
    right = fp4_codes(y)
    ptx = _triton_mx_quant._packed_e2m1(exact)
    executed = execute(ptx, [*y[..., 0].T, *y[..., 1].T])
    packed = right[..., 0].int() | right[..., 1].int() << 4
    assert torch.equal(executed, sum((packed[:, i].long() << 8 * i for i in range(4)), torch.zeros(len(y)).long()))
    wrong = ptx.replace("0x42864286", "0x42804280") if exact else _triton_mx_quant._packed_e2m1(True)
    assert not torch.equal(execute(wrong, [*y[..., 0].T, *y[..., 1].T]), executed), "the negative test"


def execute(ptx: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    """What straight-line PTX leaves in ``$0``, 32 bits in int64; the inputs are ``$1`` and on, float32."""
    registers = {f"${i + 1}": x.contiguous().view(torch.int32).long() & WORD for i, x in enumerate(inputs)}

    def of(name: str) -> torch.Tensor:
        if name in registers:
            return registers[name]
        return torch.full_like(registers["$1"], int(name, 0))

    def in_pairs(function: Callable[..., torch.Tensor], *names: str) -> torch.Tensor:
        """Of two bfloat16 numbers in a register; exact in float64 where bfloat16 could be halfway."""
        halves = []
        for shift in (0, 16):
            parts = [(of(name) >> shift & 0xFFFF).to(torch.int16).view(torch.bfloat16).double() for name in names]
            halves.append(function(*parts).bfloat16().view(torch.int16).long() & 0xFFFF)
        return halves[0] | halves[1] << 16

    def bytes_of(low: torch.Tensor, high: torch.Tensor, chosen: int) -> torch.Tensor:
        both = [(part >> 8 * i) & 0xFF for part in (low, high) for i in range(4)]
        return sum((both[chosen >> 4 * i & 7] << 8 * i for i in range(4)), torch.zeros_like(low))

    how = {
        "mov.b32": of,
        "add.u32": lambda a, b: (of(a) + of(b)) & WORD,
        "abs.bf16x2": lambda a: of(a) & 0x7FFF7FFF,
        "min.bf16x2": lambda a, b: in_pairs(torch.fmin, a, b),
        "max.bf16x2": lambda a, b: in_pairs(torch.fmax, a, b),
        "fma.rn.bf16x2": lambda a, b, c: in_pairs(lambda x, y, z: x * y + z, a, b, c),
        "and.b32": lambda a, b: of(a) & of(b),
        "or.b32": lambda a, b: of(a) | of(b),
        "shr.b32": lambda a, b: of(a) >> int(b),
        "shl.b32": lambda a, b: (of(a) << int(b)) & WORD,
        "prmt.b32": lambda a, b, c: bytes_of(of(a), of(b), int(c, 0)),
    }
    for line in ptx.strip().strip("{}").split(";"):
        name, _, rest = line.strip().strip("{}").strip().partition(" ")
        if name and not name.startswith(".reg"):
            target, *operands = (word.strip() for word in rest.split(","))
            registers[target] = how[name](*operands)
    return registers["$0"]


@pytest.mark.parametrize("kernel", [flushing_kernel, approximate_kernel], ids=["flushing", "approximate"])
def test_another_division_is_seen(kernel: Any) -> None:
    """Negative tests: a division that flushes subnormals, and Triton's own ``/``."""
    assert not divides_truly(ptx_of(kernel, {"BLOCK": 128}, TYPES))


def test_every_start_gives_every_parameter_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled kernel takes its constants by position, behind the arguments."""
    seen = []

    def look(
        self: _launch.Launch,
        programs: int,
        given: tuple[Any, ...],
        integers: tuple[int, ...],
        made: tuple[Any, ...] = (),
    ) -> None:
        seen.append(self.kernel.__name__)
        assert self.kernel.arg_names[len(given) + len(made) + len(integers) :] == list(self.constants)

    monkeypatch.setattr(_launch.Launch, "here", look)
    monkeypatch.setattr(triton_quant, "library", lambda: (_triton_kernels, True))
    monkeypatch.setattr(triton_mx_quant, "library", lambda: (_triton_mx_quant, True))
    triton_mx_quant._prepared.cache_clear()
    x, one = torch.zeros(5, 256, dtype=torch.bfloat16), torch.ones(1)
    triton_quant.quant_static(x, one)
    triton_quant.quant_tensor(x)
    triton_quant.quant_token(x, one)
    triton_quant.quant_group(x, 128, 1e-10, False)
    triton_quant.quant_group_packed(x, 128, 1e-10)
    quantise = triton_quant.reciprocal_quantiser(torch.bfloat16)
    quantise(x, None, lambda shape, strides, dtype: torch.empty(shape, dtype=dtype))
    triton_mx_quant.quant_blocks(x, Blocks("e2m1", "rceil", "128x4", False, False), 256, one)
    assert set(seen) == {kernel for kernel, _ in KERNELS.values()} | {"amax_kernel", "block_kernel"}


class Recorder:
    """A kernel that compiles to itself and writes down how it is started."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.compiled, self.direct, self.started = 0, 0, []  # type: ignore[var-annotated]

    @property
    def run(self) -> Any:
        return Launcher(self)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*arguments: object, **options: object) -> "Recorder":
            self.compiled += bool(options)
            self.started.append((grid, len(arguments) + len(set(options) - {"num_warps", *_launch.EXACT})))
            return self

        return start


class Launcher:
    """Counts direct starts, whether past Triton's launcher or through it."""

    profile_scratch_size, launch_cooperative_grid, launch_pdl = 0, False, True
    global_scratch_size, arg_annotations, kernel_signature = 0, (), b""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, x: int, y: int, z: int, stream: int, function: str, metadata: str, *rest: object) -> None:
        assert (stream, function, metadata) == (7, Recorder.function, Recorder.packed_metadata)
        assert rest[:3] == (None, None, None)
        self.recorder.direct += 1
        self.recorder.started.append(((x, y, z), len(rest) - 3))

    def launch(self, x: int, y: int, z: int, stream: int, function: str, *rest: object) -> None:
        """What the real one takes, and when it is called past the launcher: ``test_launch.py``."""
        self(x, y, z, stream, function, *rest[2:6], *rest[-1])  # type: ignore[arg-type, misc]


class Pointer(torch.Tensor):
    """A CPU tensor that says it lies on the current GPU."""

    device = torch.device("cuda:0")  # type: ignore[assignment]  # a property of the base class


def at_hand(monkeypatch: pytest.MonkeyPatch, release: str = fast.RELEASES["triton"][-1]) -> None:
    """A GPU 0, current, with stream 7, and a release of Triton: one whose kernels are started past its launcher."""
    monkeypatch.setattr(triton, "__version__", release)
    monkeypatch.setattr(fast, "DEVICE", lambda: 0)
    monkeypatch.setattr(fast, "STREAM", lambda device: 7)
    monkeypatch.setattr(torch.version, "hip", None)


def started(
    monkeypatch: pytest.MonkeyPatch, *calls: tuple[Any, ...], release: str = fast.RELEASES["triton"][-1]
) -> Recorder:
    at_hand(monkeypatch, release)
    kernel = Recorder()
    start = _launch.Launch(kernel, {"BLOCK": 32})
    for pointer, *integers in calls:
        start(3, (pointer,), tuple(integers))
    return kernel


def pointer(offset: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(64, dtype=dtype)[offset:].as_subclass(Pointer)


def test_a_profiler_sees_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hook, plain or in a chain, Triton starts the compiled kernel itself, and calls it."""
    from triton.knobs import HookChain

    chain: Any = HookChain()
    monkeypatch.setattr(fast._knobs()[0], "launch_enter_hook", chain)
    calls = [(pointer(), 48, 7), (pointer(), 48, 7)]
    assert started(monkeypatch, *calls).direct == 1  # nobody listens yet
    chain.add(print)
    assert started(monkeypatch, *calls).direct == 0
    monkeypatch.setattr(fast._knobs()[0], "launch_enter_hook", print)
    assert started(monkeypatch, *calls).direct == 0


def test_a_class_of_arguments_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = started(monkeypatch, (pointer(), 48, 7), (pointer(), 96, 9), (pointer(8), 16, 5))
    assert kernel.compiled == 1
    assert kernel.started == [((3,), 4), ((3, 1, 1), 4), ((3, 1, 1), 4)]  # every start gets every parameter


@pytest.mark.parametrize(
    "other",
    [
        (pointer(1), 48, 7),
        (pointer(0, torch.float16), 48, 7),
        (pointer(), 50, 7),
        (pointer(), 48, 1),
        (pointer(), 48, 2**31),
    ],
    ids=["unaligned", "dtype", "no multiple of 16", "one", "64 bits"],
)
def test_what_triton_compiles_in_makes_a_class(monkeypatch: pytest.MonkeyPatch, other: tuple[object, ...]) -> None:
    """An unaligned pointer must never reach a kernel with 16-byte loads, nor a wide integer one with 32-bit strides."""
    usual = (pointer(), 48, 7)
    seen = started(monkeypatch, usual, usual, usual, other, other, other, usual)
    assert seen.compiled == 2 and seen.direct == 5


def test_every_pointer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One unaligned pointer among aligned ones is a class of its own, whichever it is, remembered or not."""
    at_hand(monkeypatch)
    kernel = Recorder()
    start = _launch.Launch(kernel, {"BLOCK": 32})
    good, bad = pointer(), pointer(1)
    for pair in [(good, good)] * 3 + [(good, bad)] * 3 + [(bad, good)] * 3 + [(good, good)]:
        start(3, pair, (48,))
    assert kernel.compiled == 3


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    at_hand(monkeypatch)
    start = _launch.Launch(Recorder(), {"BLOCK": 32})
    start._launches = context.Memo(8)
    for rows in range(16, 16 * 40, 16):
        start(3, (pointer(),), (rows,))
        assert len(start._launches) <= 8


def test_every_dtype_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every pointer, not of the first alone: a kernel for float32 scales never gets packed ones."""
    at_hand(monkeypatch)
    kernel = Recorder()
    start = _launch.Launch(kernel, {"BLOCK": 32})
    for scale in [pointer(0, torch.float32)] * 3 + [pointer(0, torch.int32)] * 3:
        start(3, (pointer(), scale), (48,))
    assert kernel.compiled == 2 and kernel.direct == 4


def test_own_pointers_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory that was allocated for a launch neither address nor dtype makes a class; of the others both do."""
    at_hand(monkeypatch)
    kernel = Recorder()
    start = _launch.Launch(kernel, {"BLOCK": 32})
    for given in [pointer()] * 3 + [pointer(1)] * 2 + [pointer(0, torch.float16)] * 2:
        start.here(3, (given,), (48,), (pointer(),))
    assert kernel.compiled == 3 and kernel.direct == 4
    start.here(3, (pointer(),), (48,), (pointer(0, torch.int32),))
    assert kernel.compiled == 3
    start.here(3, (pointer(), pointer(0, torch.int32)), (48,))
    assert kernel.compiled == 4, "the twin"


def test_modes_of_triton_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel compiled without debug assertions is not started where they are on."""
    at_hand(monkeypatch)
    kernel = Recorder()
    start = _launch.Launch(kernel, {"BLOCK": 32})
    for debug in (False, True, True, False):
        monkeypatch.setattr(fast._knobs()[0], "debug", debug)
        start(3, (pointer(),), (48,))
    assert kernel.compiled == 2 and kernel.direct == 2


def test_other_releases_and_the_switch_take_the_public_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton does every launch of a release that was not checked, and of all where fast paths are off."""
    calls = [(pointer(), 48, 7)] * 3
    with use_config(Config(fast_paths=False)):
        assert (made := started(monkeypatch, *calls)).compiled == 3 and made.direct == 0
    assert started(monkeypatch, *calls).direct == 2  # the twin
    made = started(monkeypatch, *calls, release="9.9.9")
    assert made.compiled == 3 and made.direct == 0


def test_classes_are_those_of_triton() -> None:
    """Triton's own specialisation tells apart nothing that ours puts together (64-bit integers included)."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import jit

    if hasattr(jit, "native_specialize_impl"):
        specialize = functools.partial(jit.native_specialize_impl, CUDABackend)
    else:  # before Triton 3.6 in Python
        specialize = jit.create_specialize_impl(CUDABackend.get_arg_specialization)
    far = [sign * 2**p + d for p in (15, 31, 32, 40) for d in (-16, -1, 0, 1, 16) for sign in (1, -1)]
    pointers = [torch.zeros(64, dtype=d)[o:] for d in (torch.bfloat16, torch.float32) for o in range(9)]
    seen: dict[object, set[object]] = {}
    for value in (*range(-40, 60), *far, *pointers):
        theirs = specialize(value, False, True, True)
        seen.setdefault(_launch.class_of(value), set()).add(theirs)  # type: ignore[arg-type]
    assert all(len(theirs) == 1 for theirs in seen.values())
    assert len(seen) > 6


@pytest.mark.parametrize("layout", ["row", "tma"])
def test_nothing_compiles_after_a_warm_up(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """By the hook on Triton's own compiler, which needs no GPU: kernels are compiled for sm90 and not launched."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    device = {"device": lambda: 0, "stream": lambda device: 7, "target": lambda: GPUTarget("cuda", 90, 32)}
    monkeypatch.setattr(
        driver, "_active", SimpleNamespace(**{f"get_current_{key}": how for key, how in device.items()})
    )

    def compile_only(start: Any, programs: int, pointers: Any, integers: Any) -> None:
        how = {**start.constants, "num_warps": start.num_warps, **_launch.EXACT}
        start.kernel.warmup(*pointers, *integers, **how, grid=(programs,))

    monkeypatch.setattr(_launch.Launch, "_by_triton", compile_only)

    def call(rows: int) -> object:
        return triton_quant.quant_group(torch.zeros(rows, 256, dtype=torch.bfloat16), 128, 1e-10, False, layout)

    few = kernels.warm_up(call, (1, 16))
    warm = kernels.warm_up(call, 48)
    with kernels.compilations() as compiled:
        for rows in range(1, 49):
            call(rows)
    assert compiled == [] and few and warm and all(name.startswith("group_kernel") for name in few + warm)
