"""Run commands side by side, print what each said in their order, and exit 1 if one of them fails.

    python tests/support/together.py "python -m oracle fixtures check" "mypy -p oracle -p kernels"

Each takes one core; the tests that come after them take all.
"""

from __future__ import annotations

import shlex
import subprocess
import sys


def main(commands: list[str]) -> int:
    started = [
        (command, subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        for command in commands
    ]
    failed = False
    for command, process in started:
        said, _ = process.communicate()
        print(f"$ {command}\n{said}", end="", flush=True)
        failed |= process.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
