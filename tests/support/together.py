"""Run commands side by side; exit 1 if one of them fails.

    python tests/support/together.py "python -m oracle fixtures check --then pytest -q" "mypy -p oracle" "ruff check ."

The first one prints as it runs, and ``--then`` in it stands between commands that run one after the other, also when
one fails. What the others print comes after it, in their order.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from itertools import groupby

THEN = "--then"


def main(commands: list[str]) -> int:
    first, *others = commands
    started = [
        (command, subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        for command in others
    ]
    failed = False
    for is_separator, words in groupby(shlex.split(first), lambda word: word == THEN):
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
