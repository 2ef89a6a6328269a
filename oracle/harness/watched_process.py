"""``fp8-oracle watch -- COMMAND``: every Python process of a command watches the calls of its models.

The command runs with a folder in ``PYTHONPATH`` whose ``sitecustomize`` calls :func:`start`, which waits until torch is
imported and then records calls into a folder (:mod:`oracle.harness.watching`). What the processes wrote is judged when
the command has ended.

Not covered: a Python that ignores ``PYTHONPATH`` (``python -I``) or has no fp8-oracle; a process that ends by
``os._exit`` or a signal, whose calls are in the folder and whose counts are not.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING

from oracle.errors import OptionError, OracleError
from oracle.harness.after_import import AfterImport

if TYPE_CHECKING:
    from oracle.harness.watching import Watch

VARIABLE = "FP8_ORACLE_WATCH"
"""A variable of the environment with the folder, ``every`` and the budget, as JSON."""
STARTUP = """from oracle.harness import watched_process

watched_process.start(__file__)
"""


def run(command: Sequence[str], *, to: Path, every: int, budget: str, arch: str | None) -> int:
    """Run a command whose processes record their calls into ``to``; its exit status.

    Raises OptionError: there is no such program, or the system does not start it.
    """
    asked = {"to": str(to.absolute()), "every": every, "budget": budget, "arch": arch}
    with tempfile.TemporaryDirectory(prefix="fp8-oracle-watch-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(STARTUP)
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, VARIABLE: json.dumps(asked)}
        try:
            return subprocess.run(list(command), env=environment, check=False).returncode
        except OSError as error:  # no such program, or not executable: one typed error
            raise OptionError(f"{command[0]}: cannot be run ({error.strerror or error}); name a program") from None


def start(startup: str) -> None:
    """In a process of the command: watch from the import of torch to the end. ``startup`` is the file that calls this;
    a ``sitecustomize`` that it hides is executed first."""
    folder = os.path.dirname(os.path.abspath(startup))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
    own = sys.modules.pop("sitecustomize")
    if importlib.util.find_spec("sitecustomize") is None:
        sys.modules["sitecustomize"] = own
    else:
        importlib.import_module("sitecustomize")
    if VARIABLE in os.environ:
        AfterImport(("torch",), _watch)


def _watch() -> None:
    from oracle.harness.watching import watch

    asked = json.loads(os.environ[VARIABLE])
    try:
        seen = watch(asked["every"], asked["budget"], to=asked["to"], arch=asked["arch"]).__enter__()
    except OracleError as error:  # a folder that cannot be written: the program goes on
        print(f"fp8-oracle: process {os.getpid()} is not watched: {error}", file=sys.stderr)
        return
    atexit.register(seen.end)
    _ends(seen)
    util.register_after_fork(seen, _ends)


def _ends(seen: Watch) -> None:
    """A process of multiprocessing runs no atexit; what it runs instead is forgotten when it is forked."""
    util.Finalize(None, seen.end, exitpriority=100)
