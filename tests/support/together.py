"""Run commands side by side; exit 1 if one of them fails.

    python tests/support/together.py "mypy -p oracle" "ruff check ." -- python -m oracle fixtures check --then pytest -q

The words after ``--`` are the commands in the foreground, which print as they run; ``--then`` stands between commands
that run one after the other, also when one fails, and ``--else`` before one that runs only where the last one failed,
to say more of it. The others run beside them, and what they print comes after it.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from itertools import groupby

THEN, ELSE = "--then", "--else"


def main(arguments: list[str]) -> int:
    at = arguments.index("--")
    background, foreground = arguments[:at], arguments[at + 1 :]
    started = [
        (command, subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        for command in background
    ]
    failed, status, separator = False, 0, THEN
    for is_separator, words in groupby(foreground, lambda word: word in (THEN, ELSE)):
        command = [*words]
        if is_separator:
            (separator,) = command
        elif separator == THEN or status:
            print(f"$ {shlex.join(command)}", flush=True)
            status = subprocess.run(command, check=False).returncode
            failed |= status != 0
    for text, process in started:
        printed, _ = process.communicate()
        print(f"$ {text}\n{printed}", end="", flush=True)
        failed |= process.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
