"""Run commands side by side; exit 1 if one of them fails.

    python tests/support/together.py "mypy -p oracle" "ruff check ." -- python -m oracle fixtures check --then pytest -q

The words after ``--`` are the commands in the foreground, which print as they run; ``--then`` stands between commands
that run one after the other, also when one fails. The others run beside them, and what they print comes after it.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from itertools import groupby

THEN = "--then"


def main(arguments: list[str]) -> int:
    at = arguments.index("--")
    background, foreground = arguments[:at], arguments[at + 1 :]
    started = [
        (command, subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        for command in background
    ]
    failed = False
    for is_separator, words in groupby(foreground, lambda word: word == THEN):
        if not is_separator:
            command = [*words]
            print(f"$ {shlex.join(command)}", flush=True)
            failed |= subprocess.run(command, check=False).returncode != 0
    for text, process in started:
        printed, _ = process.communicate()
        print(f"$ {text}\n{printed}", end="", flush=True)
        failed |= process.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
