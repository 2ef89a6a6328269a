"""The command line ``fp8-oracle``.

Exit status: 0 everything is as it must be, 1 it is not, 2 the command is wrong or cannot be carried out (one line
on the standard error says why and what to do), 130 interrupted, 141 the output was closed by its reader.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oracle.cli import installed
from oracle.errors import OptionError, OracleError

if TYPE_CHECKING:
    import argparse


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as `>&-` does; the exit status still counts
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # open as long as the process
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # a file name may hold what the terminal's encoding does not
            stream.reconfigure(errors="backslashreplace")
    try:
        return _status(argv)
    except OracleError as error:
        _say(f"fp8-oracle: error: {' '.join(str(error).split())}")
        return 2
    except KeyboardInterrupt:
        print("fp8-oracle: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()  # the reader has closed the pipe, as `head` does
        return 141
    except MemoryError as error:
        _say(f"fp8-oracle: error: not enough memory: {error or 'for this question'}")
        return 2
    except UnicodeEncodeError as error:
        print(f"fp8-oracle: error: {error.object[:80]!r} is no Unicode text ({error.reason})", file=sys.stderr)
        return 2
    except OSError as error:
        what = "the output cannot be written" if error.filename is None else error.filename
        _say(f"fp8-oracle: error: {what}: {error.strerror or error}")
        if error.errno == errno.ENOSPC:
            _drop_output()
        return 2


def _status(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    if (answer := installed.answer(words)) is not None:
        print(answer, end="", flush=True)
        return 0
    from oracle.harness import server

    server.start_if_asked(words)
    from oracle.cli import settings

    commands = parser(*words[:1])
    settings.install(commands, settings.load())
    try:
        arguments = commands.parse_args(argv)
    except SystemExit:  # --help and --version
        sys.stdout.flush()
        raise
    for name, value in vars(arguments).items():  # `--flag ''`, as from a shell variable that was never set
        if "" in (value if isinstance(value, list) else [value]):
            raise OptionError(f"argument {name} is empty; give it a value, or leave it out")
    with installed.kept(words):
        status: int = arguments.run(arguments)
    sys.stdout.flush()  # here, where main() catches the error when it cannot be written
    return status


def _say(text: str) -> None:
    from oracle.cli.common import say

    say(text, stderr=True)


def _drop_output() -> None:
    """Send what is still buffered to /dev/null, so that it does not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser(command: str = "") -> argparse.ArgumentParser:
    """The parser with every command, or that of one (:func:`oracle.cli.commands.parser`)."""
    from oracle.cli import commands

    return commands.parser(command)
