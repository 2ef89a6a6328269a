"""The sandbox of an untrusted kernel: what of the machine it contains, and by which means.

    read-only   the Python installation, the folders of ``sys.path`` and of the kernel, system libraries
    private     /tmp, /dev/shm, process table, IPC, host name; no network
    absent      this package, its distribution and every other file

``bwrap`` (bubblewrap) makes it where it is installed and works; else the launcher makes the same tree with user
namespaces (:mod:`oracle.harness.launcher`). :func:`why_not` tries both. Not covered: limits on memory and time of the
processor beyond the time of a call, faults of the operating system's own isolation, and a copy of the oracle that a
kernel brings along under another name (it is a right kernel then).
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from oracle.errors import SandboxError
from oracle.harness import program

PLACE = "/run/worker"  # where the program of the worker lies in the sandbox
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/opt",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/localtime",
    "/etc/passwd",
    "/etc/group",
)
NODES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
KEPT = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "TRITON_INTERPRET",
)
"""Variables of the environment that a kernel may need; it gets no other."""
LAUNCHED = ("PATH", "LD_LIBRARY_PATH")
"""Variables that the launcher gets, whose environment a kernel may read."""
PRIVATE = {"HOME": "/run/tmp", "TMPDIR": "/run/tmp", "USER": "kernel"}  # /tmp may be a folder of ``sys.path``
OURS = ("oracle", "*fp8_oracle*")  # of a folder with packages: the package, its distribution and its import hook


def environment(names: Sequence[str] = KEPT) -> dict[str, str]:
    """The environment of a sandboxed worker; of ``names`` alone, as that of the launcher."""
    variables = {name: os.environ[name] for name in names if name in os.environ}
    return variables | ({"PYTHONDONTWRITEBYTECODE": "1", **PRIVATE} if names is KEPT else {})


def steps(search: Sequence[str], kernel: str, device: str, folder: str) -> list[list[str]]:
    """What the sandbox shows, as the steps of :mod:`oracle.harness.launcher`, outer folders before inner ones.

    ``search`` are the folders from which the kernel is imported, ``kernel`` its name MODULE:CALLABLE, ``folder`` that
    of the worker's program (:mod:`oracle.harness.program`).
    """
    nodes = [*NODES, *(str(path) for path in Path("/dev").glob("nvidia*"))] if device != "cpu" else [*NODES]
    shown = {*SYSTEM, *nodes, *search, sys.prefix, sys.base_prefix, *_home(kernel)}
    shown |= {"/sys"} if device != "cpu" else set()
    shown |= {entry for entry in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if entry}
    absolute = {os.path.abspath(path) for path in shown}
    real = sorted(p for p in absolute | set(map(os.path.realpath, absolute)) if os.path.exists(p) and p != "/")
    outer = [path for path in real if not _within(path, real)]
    result = [["link", path, os.readlink(path)] if os.path.islink(path) else ["bind", path] for path in outer]
    holding = {path for path in (*search, *_packages()) if any(_ours(path))}
    for held in sorted(map(os.path.abspath, holding)):
        result.append(["hide", held])
        result += [["bind", str(p)] for p in sorted(Path(held).iterdir()) if p.exists() and p not in _ours(held)]
    return [*result, ["bind", folder, PLACE]]


def bubblewrap(mounts: Sequence[Sequence[str]], command: Sequence[str], folder: str, *, program: str) -> list[str]:
    """The command line that runs ``command`` in the sandbox of these steps through ``bwrap``, which is ``program``."""
    words = [program, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--tmpfs", "/tmp", "--proc", "/proc"]
    words += ["--tmpfs", "/dev/shm", "--tmpfs", "/run/tmp"]
    hidden = []
    for step, path, *rest in mounts:
        if step == "link":
            words += ["--symlink", rest[0], path]
        elif step == "hide":
            words += ["--tmpfs", path]
            hidden.append(path)
        else:
            words += ["--dev-bind" if path.startswith("/dev/") else "--ro-bind", path, rest[0] if rest else path]
    words += [word for path in hidden for word in ("--remount-ro", path)]
    return [*words, "--remount-ro", "/", "--chdir", folder, "--", *command]


@functools.cache
def means() -> str | None:
    """``"bwrap"`` or ``"namespaces"``, whichever works here first; None where neither does."""
    return next((name for name in ("bwrap", "namespaces") if why_not(name) is None), None)


@functools.cache
def why_not(name: str) -> str | None:
    """Why this means makes no sandbox on this machine; None when it does. It is tried once."""
    if name == "bwrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as folder:
        program.write(Path(folder))
        shown = steps([], "", "cpu", folder)
        plan_of_probe = plan([sys.executable, "-I", "-S", "-c", "pass"], {}, "/", name, shown, root)
        command = program.launcher(folder)
        launcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert launcher.stdin is not None and launcher.stdout is not None and launcher.stderr is not None
        with launcher:
            launcher.stdin.write(json.dumps(plan_of_probe | {"status": 1, "channel": -1}).encode() + b"\n")
            launcher.stdin.flush()
            status, printed = launcher.stdout.read(), launcher.stderr.read()
    if status == bytes(4):
        return None
    return printed.decode(errors="replace").strip() or f"its launcher ended with status {launcher.returncode}"


def required() -> str:
    """The means of this machine.

    Raises SandboxError: there is none.
    """
    available = means()
    if available is None:
        reasons = "; ".join(f"{name}: {why_not(name)}" for name in ("bwrap", "namespaces"))
        raise SandboxError(
            f"no sandbox on this machine ({reasons}); install bubblewrap, or allow user namespaces "
            "(sysctl kernel.apparmor_restrict_unprivileged_userns=0), or validate a kernel that you trust without "
            "--untrusted"
        )
    return available


def plan(
    command: Sequence[str],
    variables: Mapping[str, str],
    folder: str,
    name: str | None,
    mounts: Sequence[Sequence[str]],
    root: str,
) -> dict[str, object]:
    """The plan of a launcher without its descriptors; ``name`` is the means of the sandbox, None for none."""
    if name == "bwrap":
        command = bubblewrap(mounts, command, folder, program=shutil.which("bwrap") or "bwrap")
        folder = "/"
    inside = mounts if name == "namespaces" else None
    return {"command": list(command), "environment": dict(variables), "folder": folder, "sandbox": inside, "root": root}


def _within(path: str, folders: Sequence[str]) -> bool:
    """Whether another of these folders, which is no link, shows the path already."""
    return any(path.startswith(folder + "/") and not os.path.islink(folder) for folder in folders)


def _packages() -> list[str]:
    """Folders of installed packages that are not on ``sys.path`` of this process."""
    prefixes = {sys.prefix, sys.base_prefix}
    return [str(path) for prefix in prefixes for path in Path(prefix).glob("lib*/python*/*-packages")]


def _ours(folder: str) -> list[Path]:
    return [path for pattern in OURS for path in Path(folder).glob(pattern)] if folder else []


def _home(kernel: str) -> list[str]:
    """Where the package of the kernel lies, when an import hook finds it outside of ``sys.path``."""
    top = kernel.partition(":")[0].partition(".")[0]
    try:
        spec = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):  # the worker says what is wrong with it
        return []
    if spec is None or top == "oracle":
        return []
    return [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location and spec.origin else [])]
