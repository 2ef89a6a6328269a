"""The exported header ``fp8_judge.h`` as a shared library, called from here."""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.tools import found

STATUSES = ("PASSED", "FAILED", "MISTRUSTED", "UNSUPPORTED", "CRASHED")


class Found(ctypes.Structure):
    """``fp8_verdict``."""

    _fields_ = [
        ("status", ctypes.c_int),
        ("outside", ctypes.c_int64),
        ("total", ctypes.c_int64),
        ("unconstrained", ctypes.c_int64),
        ("output", ctypes.c_char * 96),
        ("rank", ctypes.c_int),
        ("index", ctypes.c_int64 * 8),
        ("actual", ctypes.c_double),
        ("low", ctypes.c_double),
        ("high", ctypes.c_double),
        ("expected", ctypes.c_double),
        ("sentence", ctypes.c_char * 1024),
    ]

    @property
    def word(self) -> str:
        return STATUSES[self.status]

    @property
    def said(self) -> str:
        return self.sentence.decode()

    @property
    def at(self) -> tuple[int, ...]:
        return tuple(self.index[: self.rank])


class Header:
    """``fp8_judge.h`` of an exported folder, compiled in ``build``."""

    def __init__(self, exported: Path, build: Path) -> None:
        source, library = build / "judge.cpp", build / "libjudge.so"
        source.write_text('#define FP8_JUDGE_API extern "C"\n#include "fp8_judge.h"\n')
        flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", f"-I{exported}"]
        subprocess.run([str(found("g++")), *flags, str(source), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))

    def judge(self, folder: Path, case: str, arch: str | None, outputs: Mapping[str, bytes]) -> Found:
        held, verdict = ctypes.create_string_buffer(4096), Found()
        if not self._library.fp8_case_open(str(folder).encode(), case.encode(), held):
            self._library.fp8_judge(str(folder).encode(), case.encode(), None, None, 0, ctypes.byref(verdict))
            return verdict
        count = len(outputs)
        memory = [ctypes.create_string_buffer(raw, len(raw) or 1) for raw in outputs.values()]
        names = (ctypes.c_char_p * count)(*(name.encode() for name in outputs))
        starts = (ctypes.c_void_p * count)(*map(ctypes.addressof, memory))
        sizes = (ctypes.c_int64 * count)(*map(len, outputs.values()))
        named = None if arch is None else arch.encode()
        self._library.fp8_judge_outputs(held, named, count, names, starts, sizes, ctypes.byref(verdict))
        self._library.fp8_case_close(held)
        return verdict


def records(folder: Path) -> list[dict[str, Any]]:
    """The cases of an exported folder."""
    cases: list[dict[str, Any]] = json.loads((folder / "manifest.json").read_text())["cases"]
    return cases


def stored(folder: Path, record: Mapping[str, Any], role: str) -> dict[str, bytes]:
    """The bytes of the tensors of a role by name."""
    content = (folder / record["file"]).read_bytes()
    return {t["name"]: content[t["offset"] :][: t["bytes"]] for t in record["tensors"] if t["role"] == role}
