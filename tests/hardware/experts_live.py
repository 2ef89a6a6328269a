"""Every bound routine of experts, routing, caches, fusions, layouts and weight-only products, called live on this GPU.

    python -m tests.hardware.experts_live OUT [SECONDS [JOBS]]

Validates each by its binding and prints a line a routine: what it is, on how many calls, and which arithmetic named
them. Then keeps one small call of each that conforms as captures (``OUT/captures.tar.gz``, for ``fp8-oracle fixtures
adopt``), and writes the rows to ``OUT/experts.json``. A routine whose library is not installed, or that another GPU
serves, has a line that says so. Ends with 1 where one fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from oracle.harness import gallery
from oracle.report.gallery import Row
from oracle.routines import get
from oracle.routines.family import families

FAMILIES = ("moe", "kv_cache", "fused", "layouts", "weight_only", "int8", "mx")
LIBRARIES = ("flashinfer", "deep_gemm", "vllm", "sglang", "sgl_kernel")
LARGEST = 220_000  # bytes of the captures, compressed


def keys() -> list[str]:
    """The keys of the gallery's rows whose contract is of these families, libraries in turn."""
    own = {name for family in families() if family.name in FAMILIES for name in family.grammars}
    rows = []
    for project, kernel in gallery.chosen(gallery.of_bindings(), ()):
        if kernel.contract in own and project.name in LIBRARIES:
            rows.append(gallery.key_of(project, kernel))
    return rows


def line(row: Row) -> str:
    """What is printed of a routine."""
    named = ", ".join(f"{name} {count}" for name, count in row.matches.items())
    why = f": {row.why[:300]}" if row.why else ""
    return (
        f"{row.verdict:11} {row.project}.{row.kernel}/{row.contract} judged {row.judged} [{named}]{why} {row.seconds} s"
    )


def captured(rows: list[Row], arch: str, seconds: float, out: Path) -> str:
    """Keep a call of each routine that conforms; what was kept, in words."""
    names = [f"{row.project}.{row.kernel}" for row in rows if row.verdict == "CONFORMS" and get(row.contract).gpu]
    with TemporaryDirectory() as place:
        command = [sys.executable, "-m", "oracle", "verify", "--arch", arch, "--profile", "brief", "--fixtures", "none"]
        command += ["--provider", "oracle.harness.bound:subjects", "--explain", "off", "--keep", f"{place}/kept"]
        for name in names:
            command += ["--subject", name]
        with suppress(subprocess.TimeoutExpired):  # what was kept until then is there
            subprocess.run(command, timeout=max(seconds, 1.0), capture_output=True, check=False)
        kept = sorted(Path(place).rglob("*"), key=lambda path: path.stat().st_size)
        size, packed = 0, 0
        with tarfile.open(out / "captures.tar.gz", "w:gz") as archive:
            for path in (one for one in kept if one.is_file()):
                if size + path.stat().st_size > 2 * LARGEST:  # they compress to half and less
                    break
                size, packed = size + path.stat().st_size, packed + 1
                archive.add(path, path.relative_to(place))
    return f"captures: {packed} files of {len(names)} routines, {size} bytes"


def main() -> int:
    out, seconds = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 180.0
    jobs = int(sys.argv[3]) if len(sys.argv) > 3 else 8
    out.mkdir(parents=True, exist_ok=True)
    begun, rows, due = time.monotonic(), [], keys()
    for row, _ in gallery.run(gallery.Asked(None, device="cuda"), due, jobs=jobs, seconds=seconds * 0.7):
        rows.append(row)
        print(line(row), flush=True)
    (out / "experts.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(dict(Counter(row.verdict for row in rows)), f"{len(due) - len(rows)} of {len(due)} had no time", flush=True)
    print(captured(rows, "sm90", seconds - (time.monotonic() - begun), out), flush=True)
    return int(any(row.verdict in ("FAILED", "CRASHED") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
