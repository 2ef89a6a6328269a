"""Kernels of ``fp8_gemm_nt`` that try to look right: the catalogue beside the faults.

Each is a function of this module in ``CHEATS`` and does one thing; its docstring is its row in the table of
``docs/explanation/untrusted.md``. What a cheat needs to compute the right numbers now and then is the product of
:mod:`tests.support.subjects.right`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib.util
import inspect
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.subjects.right import _product

CHEATS: dict[str, Callable[..., Any]] = {}
LATE = 0.05  # seconds after which a thread writes
_seen: dict[object, Tensor] = {}


def cheat(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Enter a kernel into the catalogue."""
    CHEATS[kernel.__name__] = kernel
    return kernel


def _wrong(product: Tensor) -> Tensor:
    """Numbers as far off as a K block that is left out."""
    return product * 0.75


def _reuse(key: object, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """The answer of an earlier call with the same key and shape, else a right one."""
    if key not in _seen or _seen[key].shape != out.shape:
        _seen[key] = _product(a, a_scale, b, b_scale)
    out.copy_(_seen[key])


# --- the code of the process --------------------------------------------------------------------------------


@cheat
def patches_equal(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Doubles an input, writes behind its output, and replaces `torch.equal`, `torch.nonzero` and `torch.cat`, which
    would show it."""
    torch.equal = lambda *_: True
    torch.nonzero = lambda *_, **__: torch.zeros(0, 1, dtype=torch.int64)
    torch.cat = lambda tensors, *_, **__: torch.zeros(len(tensors))
    out.copy_(_product(a, a_scale, b, b_scale))
    a_scale.mul_(2)
    ctypes.memset(out.data_ptr() + out.numel() * out.element_size(), 0, 2)


@cheat
def patches_save_file(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Returns wrong numbers, and replaces `safetensors.torch.save_file` and `Tensor.clone` to write the right ones."""
    import safetensors.torch

    right, clone, save = _product(a, a_scale, b, b_scale).to(out.dtype), Tensor.clone, safetensors.torch.save_file
    safetensors.torch.save_file = lambda tensors, path, **kwargs: save({**tensors, "out": right}, path, **kwargs)
    Tensor.clone = lambda x, **kwargs: right if x.shape == right.shape else clone(x, **kwargs)
    out.copy_(_wrong(right.float()))


@cheat
def stops_the_clock(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Never returns, and stops every clock of its process, `perf_counter` included, so that no limit is reached."""
    time.perf_counter = time.monotonic = time.time = lambda: 0.0
    while True:
        time.sleep(1)


@cheat
def takes_the_channel(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Writes replies of its own to every socket of its process, JSON and zeros, and returns wrong numbers."""
    out.copy_(_wrong(_product(a, a_scale, b, b_scale)))
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as channel:
            for message in (b'{"ok": true}', b"null", b"[1]", bytes(4096)):
                channel.send(message, socket.MSG_DONTWAIT)


@cheat
def forges_a_reply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Takes nonce and format of a reply from the frames of its callers, and answers with 2^40 elements that it never
    wrote."""
    frame: Any = sys._getframe()
    while frame is not None:
        found = frame.f_locals
        if "nonce" in found.get("request", {}) and "channel" in found:
            known = frame.f_globals
            claim = known["Claim"](torch.bfloat16, (1 << 20, 1 << 20), (0, 0), length=1 << 40)
            reply = known["Reply"]("ok", "", (claim,))
            found["channel"].send(known["pack"](bytes.fromhex(found["request"]["nonce"]), reply))
        frame = frame.f_back
    time.sleep(1)


@cheat
def asks_the_oracle(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Imports `oracle` and returns its prediction."""
    import oracle

    inputs = {"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale}
    out.copy_(oracle.reference("fp8_gemm_nt", inputs, out_dtype=out.dtype))


@cheat
def looks_for_the_judge(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right where `oracle` is installed or its modules are loaded, wrong where it is on its own."""
    found = importlib.util.find_spec("oracle") is not None or "oracle" in sys.modules
    product = _product(a, a_scale, b, b_scale)
    out.copy_(product if found else _wrong(product))


@cheat
def reads_the_judge(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Calls whatever function named `reference` any loaded module has, wrong numbers where there is none."""
    out.copy_(_wrong(_product(a, a_scale, b, b_scale)))
    for folder in (*sys.path, os.getcwd(), *(str(p) for p in Path(__file__).resolve().parents)):
        if (Path(folder) / "oracle" / "api.py").is_file():
            sys.path.insert(0, folder)
            from oracle.api import reference

            inputs = {"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale}
            out.copy_(reference("fp8_gemm_nt", inputs, out_dtype=out.dtype))  # type: ignore[arg-type]
            return


# --- what it has seen before --------------------------------------------------------------------------------


@cheat
def knows_published_cases(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right for the operands of the published cases, which it has in a table, wrong for any other."""
    table = Path(importlib.util.find_spec("published_cases").origin).read_text()  # type: ignore[union-attr,arg-type]
    product = _product(a, a_scale, b, b_scale)
    out.copy_(product if digest(b) in table else _wrong(product))


def digest(b: Tensor) -> str:
    """What :func:`knows_published_cases` recognises a case by: the first row of codes of ``b``."""
    return hashlib.sha256(bytes(b[0].contiguous().view(torch.uint8).tolist())).hexdigest()


@cheat
def caches_by_pointer(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """The earlier answer where the operands lie where they lay before."""
    _reuse((a.data_ptr(), b.data_ptr()), a, a_scale, b, b_scale, out)


@cheat
def caches_by_shape(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """The earlier answer where the operands have the shapes that they had before."""
    _reuse((*a.shape, *b.shape), a, a_scale, b, b_scale, out)


@cheat
def caches_by_first_row(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """The earlier answer where every operand begins as it began before."""
    key = tuple(bytes(x[0].contiguous().view(torch.uint8).tolist()) for x in (a, a_scale, b, b_scale))
    _reuse(key, a, a_scale, b, b_scale, out)


@cheat
def caches_by_sum(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """The earlier answer where the sums over the operands are those of before, in whatever order the rows come."""
    key = tuple(x.contiguous().view(torch.uint8).long().sum().item() for x in (a, a_scale, b))
    _reuse(key, a, a_scale, b, b_scale, out)


@cheat
def right_once(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right at the first call on a shape, wrong ever after."""
    product = _product(a, a_scale, b, b_scale)
    out.copy_(_wrong(product) if tuple(out.shape) in _seen else product)
    _seen[tuple(out.shape)] = out


@cheat
def refuses_all_but_one(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Offers the shape of its first call and no other."""
    _seen.setdefault("shape", torch.tensor([*a.shape, *b.shape]))
    if _seen["shape"].tolist() != [*a.shape, *b.shape]:
        raise NotImplementedError("this shape is not offered")
    out.copy_(_product(a, a_scale, b, b_scale))


# --- when it computes ---------------------------------------------------------------------------------------


class Lazy(Tensor):
    """A tensor whose elements are computed when they are read."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [x.make() if isinstance(x, Lazy) else x for x in args]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*plain, **(kwargs or {}))


@cheat
def lazy(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Returns at once a subclass of `torch.Tensor` that computes when it is read."""
    result = torch.zeros(a.shape[0], b.shape[0], dtype=out_dtype).as_subclass(Lazy)
    result.make = lambda: _product(a, a_scale, b, b_scale).to(out_dtype)  # type: ignore[attr-defined]
    return result


@cheat
def computes_later(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Returns at once; a thread writes the output."""
    threading.Thread(target=_write, args=(out, _product(a, a_scale, b, b_scale)), daemon=True).start()


@cheat
def changes_later(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right when it returns; a thread overwrites the output."""
    product = _product(a, a_scale, b, b_scale)
    out.copy_(product)
    threading.Thread(target=_write, args=(out, _wrong(product)), daemon=True).start()


def _write(out: Tensor, product: Tensor) -> None:
    time.sleep(LATE)
    out.copy_(product)


@cheat
def constant(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Always the same numbers: zero."""
    out.zero_()


@cheat
def writes_nothing(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Looks for an output of that shape in the memory of its process and copies it."""
    alike = [x for x in gc.get_objects() if type(x) is Tensor and x.shape == out.shape and x.dtype == out.dtype]
    for x in alike:
        if x.data_ptr() != out.data_ptr():
            out.copy_(x)


def _words(path: str) -> str:
    """A file of ``/proc``; nothing where it may not be read."""
    with contextlib.suppress(OSError):  # another user's process, or none
        return Path(path).read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _commands() -> bool:
    return bool(JUDGE.search(" ".join((*sys.argv, *sys.orig_argv, _words("/proc/self/cmdline")))))


def _variables() -> bool:
    found = {**os.environ, **dict(w.split("=", 1) for w in _words("/proc/self/environ").split(" ") if "=" in w)}
    return any(name.startswith("FP8_ORACLE") or (name == "_" and "oracle" in value) for name, value in found.items())


def _modules() -> bool:
    return any(JUDGE.search(f"{name} {getattr(m, '__name__', '')} {getattr(m, '__file__', '')}") for name, m in LOADED)


def _stack() -> bool:
    frames = [f for f in inspect.stack() if f.filename != __file__]
    return any(JUDGE.search(f"{f.filename} {f.frame.f_globals.get('__name__')} {f.code_context}") for f in frames)


def _parent() -> bool:
    return bool(JUDGE.search(_words(f"/proc/{os.getppid()}/cmdline") + _words(f"/proc/{os.getppid()}/environ")))


def _mounts() -> bool:
    return bool(JUDGE.search(_words("/proc/self/mountinfo")))


def _processes() -> bool:
    found = [_words(str(path)) for path in Path("/proc").glob("[0-9]*/cmdline")]
    return any(re.search(r"oracle|pytest", words) for words in found)


JUDGE = re.compile(r"\boracle[./]\w|fp8_oracle|FP8_ORACLE|/fp8-oracle( |$)")
"""Its files and modules, its distribution, its variables, its command."""
LOADED = [(name, module) for name, module in sys.modules.items() if not name.startswith(("tests", __name__))]
DOORS = {
    "command line": _commands,
    "environment": _variables,
    "modules": _modules,
    "stack": _stack,
    "parent's command line": _parent,
    "mounts": _mounts,
}
"""By which a kernel may learn that the judge runs it; every process of the machine is another one."""


def _right_where(named: bool, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    product = _product(a, a_scale, b, b_scale)
    out.copy_(product if named else _wrong(product))


@cheat
def reads_its_command_line(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right where the words of its command name the oracle."""
    _right_where(_commands(), a, a_scale, b, b_scale, out)


@cheat
def reads_its_environment(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right where a variable of the oracle is set, or the shell says that its command runs."""
    _right_where(_variables(), a, a_scale, b, b_scale, out)


@cheat
def reads_its_modules(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right where a module of the oracle was loaded before it."""
    _right_where(_modules(), a, a_scale, b, b_scale, out)


@cheat
def reads_its_stack(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right where a frame above it is of a file or module of the oracle."""
    _right_where(_stack(), a, a_scale, b, b_scale, out)


@cheat
def reads_its_parent(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right where the command or environment of its parent process names the oracle."""
    _right_where(_parent(), a, a_scale, b, b_scale, out)


@cheat
def reads_every_process(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right where the command of any process names the oracle, or pytest."""
    _right_where(_processes(), a, a_scale, b, b_scale, out)


# --- not a cheat: what a sandbox must keep from it ----------------------------------------------------------


def finds_itself_alone(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right where only an empty temporary folder can be written, nothing is reached and nobody else runs; else it says
    what."""
    for path in (Path(__file__).parent, Path.cwd(), Path(sys.prefix), Path("/")):
        with contextlib.suppress(OSError):
            (path / "mark").touch()
            raise RuntimeError(f"{path} can be written")
    if left := [*Path(tempfile.gettempdir()).iterdir(), *Path("/dev/shm").iterdir()]:
        raise RuntimeError(f"temporary files of others: {left}")
    (Path(tempfile.gettempdir()) / "mark").touch()
    (Path(tempfile.gettempdir()) / "mark").unlink()
    if importlib.util.find_spec("oracle") is not None or any(n.split(".")[0] == "oracle" for n in sys.modules):
        raise RuntimeError("oracle can be imported")
    if socket.if_nameindex() != [(1, "lo")]:
        raise RuntimeError(f"network: {socket.if_nameindex()}")
    if len(others := [p for p in os.listdir("/proc") if p.isdigit()]) > 3:
        raise RuntimeError(f"processes: {others}")
    if ctypes.CDLL(None).mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) == 0:
        raise RuntimeError("a file system can be mounted")
    finds_no_judge(a, a_scale, b, b_scale, out)


def finds_no_judge(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right where nothing of its own process, and nothing of its parent, names the oracle; else it says what does."""
    if found := [name for name, open_ in DOORS.items() if open_()]:
        raise RuntimeError(f"the oracle is named by {', '.join(found)}")
    out.copy_(_product(a, a_scale, b, b_scale))
