"""The process between the oracle and a worker: ``python -I -S launcher.py``; standard library only.

    oracle  -- lifeline (standard input), socket, status -->  launcher  -->  worker  -->  what the kernel starts
                                                             [ in a sandbox: launcher --> process 1 of its own --> ... ]

The launcher starts the worker and waits until it ends or the lifeline does, which happens when the oracle stops it or
is killed. Then it ends every descendant: orphans come to it (``PR_SET_CHILD_SUBREAPER``), wherever their
session or process group went. At last it writes the worker's wait status. The first line of the lifeline is the plan,
as JSON: ``command``, ``environment``, ``folder``, the descriptors ``channel`` and ``status`` (-1: none), ``sandbox``
(None or the steps of its tree) and ``root``, an empty folder on which that tree is mounted.

In a sandbox the worker gets user, mount, process, network and IPC namespaces, a tree of read-only binds with a private
``/tmp``, and no capability (Linux 5.12: ``mount_setattr``). Source: namespaces(7), pivot_root(2), mount_setattr(2).
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 36, 24, 38
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_MOUNT_SETATTR = 442  # on every architecture
LAST_CAP = 63
UNUSABLE = 125  # exit status of a launcher that could not make the sandbox
_libc = ctypes.CDLL(None, use_errno=True)


def main(plan: dict[str, Any]) -> int:
    """Run the worker of this plan; 0 when it was run, whatever became of it."""
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)  # a handler that raised could cut off the end of the descendants
    signal.signal(signal.SIGTERM, lambda *_: None)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if plan["sandbox"] is None:
        supervise(lambda: _exec(plan), plan, until=(0, told))
        return 0
    try:
        _unshare()
    except OSError as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return UNUSABLE
    return supervise(lambda: _inside(plan), plan | {"status": -1}, until=(0, told))


def supervise(run: Callable[[], object], plan: dict[str, Any], *, until: tuple[int, ...] = ()) -> int:
    """Start ``run`` in a child, wait for its end or for one of these descriptors, end every descendant; its status."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        try:
            run()
        except OSError as error:
            print(f"cannot start: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(UNUSABLE)
    if plan["channel"] >= 0:
        os.close(plan["channel"])  # it ends with the worker and what the worker started
    select.select([os.pidfd_open(child), *until], [], [])
    os.kill(child, signal.SIGKILL)  # a child that has ended is not yet waited for
    _, status = os.waitpid(child, 0)
    end_descendants()
    if plan["status"] >= 0:
        os.write(plan["status"], struct.pack("i", status))
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def end_descendants() -> None:
    """Kill every child until none is left; those of a child that dies come to this process."""
    while True:
        with open("/proc/thread-self/children", encoding="ascii") as file:
            for child in file.read().split():
                os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:  # no child is left
            return


def _exec(plan: dict[str, Any]) -> NoReturn:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if plan["status"] >= 0:
        os.close(plan["status"])
    os.chdir(plan["folder"])
    os.execve(plan["command"][0], plan["command"], plan["environment"])


# --- the sandbox --------------------------------------------------------------------------------------------


def _unshare() -> None:
    """New namespaces for this process, and for its children a process table of their own; the user stays the same."""
    user, group = os.getuid(), os.getgid()
    flags = CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
    _checked(_libc.unshare(flags), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _inside(plan: dict[str, Any]) -> NoReturn:
    """Process 1 of the sandbox: make the tree, give up every capability, run the worker."""
    _checked(_libc.unshare(CLONE_NEWNS), "unshare")  # here: the launcher keeps its own tree and its own /proc
    _make_tree(plan["sandbox"], plan["root"])
    for capability in range(LAST_CAP + 1):
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    supervise(lambda: _exec(plan), plan)
    os._exit(0)


def _make_tree(steps: list[list[str]], root: str) -> None:
    """The tree of these steps as the root of this process: ``bind PATH``, ``hide PATH``, ``link PATH TARGET``.

    ``bind`` shows a file or folder, ``hide`` an empty folder (whose entries later steps may bind), all read-only;
    ``/tmp``, ``/run/tmp``, ``/dev/shm`` and ``/proc`` are new ones.
    """
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    private = {}
    for folder in ("/tmp", "/dev/shm", "/run/tmp"):
        os.makedirs(root + folder)
        _mount("tmpfs", root + folder, "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
        private[root + folder] = os.stat(root + folder).st_dev
    for step, path, *rest in steps:
        target = root + (rest[0] if step == "bind" and rest else path)
        if step == "link":
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(rest[0], target)
        elif step == "hide":
            os.makedirs(target, exist_ok=True)
            _mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
        else:
            _point(path, target)
            _mount(path, target, None, MS_BIND | MS_REC)
    os.makedirs(root + "/proc")
    _mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY)
    _set_attributes(root, AT_RECURSIVE, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0)
    for path, device in private.items():
        if os.stat(path).st_dev == device:  # else a folder to be shown lies on it
            _set_attributes(path, 0, 0, MOUNT_ATTR_RDONLY)
    os.chdir(root)
    _checked(_libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")


def _point(source: str, target: str) -> None:
    """Something of the kind of ``source`` to mount it over."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb"):
            pass


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    result = _libc.mount(*words, ctypes.c_ulong(flags), None if data is None else data.encode())
    _checked(result, f"mount {kind or source} on {target}")


def _set_attributes(target: str, flags: int, on: int, off: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(on, off, 0, 0)
    result = _libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(target), flags, attributes, ctypes.c_size_t(32))
    _checked(result, f"mount_setattr {target}")


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n") and (part := os.read(descriptor, 1 << 16)):
        line += part
    return line


if __name__ == "__main__":
    if line := _line(0):  # else the oracle was killed before it wrote the plan
        sys.exit(main(json.loads(line)))
