"""Commands on the PATH of a shell, carried out by children of this process, which has torch loaded already.

    with serve(folder, {"fp8-oracle": main}) as path:
        subprocess.run(["bash", "-c", "fp8-oracle --version"], env={"PATH": path})

A command is a file that hands its arguments, folder, environment and standard streams to a server, which forks a child
for it. Kernels run in workers of :mod:`tests.support.forked_worker`. Not part of it: the start of an interpreter.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from tests.support.commandline import CASE
from tests.support.forked import Forked, forked

Main = Callable[[list[str]], object]

_CLIENT = """#!{python} -ISB
import json, os, socket, sys
wire = socket.socket(socket.AF_UNIX)
wire.connect({address!r})
asked = json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(wire, [len(asked).to_bytes(8, "little")], [0, 1, 2])
wire.sendall(asked)
sys.exit(int(wire.makefile().read() or 1))
"""


@contextlib.contextmanager
def serve(folder: Path, commands: Mapping[str, Main], prepare: Callable[[], object] = tuple) -> Iterator[str]:
    """A server of these commands while the context lasts; gives the PATH that finds them first.

    ``prepare`` is called in the server before the first command, as to load the package again from elsewhere.
    """
    address, place = str(folder / "socket"), folder / "commands"
    place.mkdir()
    for name in commands:
        (place / name).write_text(_CLIENT.format(python=sys.executable, address=address, name=name))
        (place / name).chmod(0o755)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    server = Forked(os.fork())
    if not server.pid:
        try:
            prepare()
            _serve(listening, commands)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    listening.close()
    try:
        yield os.pathsep.join([str(place), os.environ["PATH"]])
    finally:
        os.kill(server.pid, signal.SIGKILL)
        server.wait()


def judge_once() -> None:
    """Load here what a verdict and the command line load when they are first needed, so that no child does."""
    oracle, commands = importlib.import_module("oracle"), importlib.import_module("oracle.cli.commands")
    commands.parser()
    inputs = oracle.cases.parse(CASE).inputs()
    wrong = -oracle.reference("fp8_gemm_nt", inputs, out_dtype=torch.bfloat16)
    assert oracle.judge("fp8_gemm_nt", inputs, wrong, arch="cpu").status == "FAILED"


def _serve(listening: socket.socket, commands: Mapping[str, Main]) -> None:
    process = importlib.import_module("oracle.harness.process")
    forked_worker = importlib.import_module("tests.support.forked_worker")
    process.subprocess = forked_worker.SHIM
    while True:
        wire = listening.accept()[0]
        size, streams, *_ = socket.recv_fds(wire, 8, 3)
        name, words, folder, environment = json.loads(_read(wire, int.from_bytes(size, "little")))

        def action(run: Main = commands[name], words: list[str] = words, folder: str = folder) -> int:
            os.chdir(folder)
            return int(run(words) or 0)  # type: ignore[call-overload]

        os.environ.clear()
        child = forked(action, stdout=streams[1], stderr=streams[2], **environment)
        wire.sendall(str(child.wait() & 0xFF).encode())
        wire.close()
        for stream in streams:
            os.close(stream)


def _read(wire: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        found += wire.recv(size - len(found))
    return found
