"""A launcher of the harness around any command; ``python -m tests.support.launched COMMAND`` holds it for a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from oracle.harness import launcher as launching
from oracle.harness import sandbox


def launched(*words: str) -> tuple[subprocess.Popen[bytes], int]:
    """A launcher that runs this command, and the descriptor of its status."""
    status, theirs = os.pipe()
    made = sandbox.plan(words, dict(os.environ), "/", None, [], "")
    command = [sys.executable, "-I", "-S", launching.__file__]
    launcher = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(theirs,), start_new_session=True)
    os.close(theirs)
    assert launcher.stdin is not None
    launcher.stdin.write(json.dumps(made | {"status": theirs, "channel": -1}).encode() + b"\n")
    launcher.stdin.flush()
    return launcher, status


if __name__ == "__main__":
    launched(*sys.argv[1:])
    time.sleep(60)
