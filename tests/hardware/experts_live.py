"""Routines of experts, norms and fusions that libraries ship for sm90, called live: validated by their bindings.

    python -m tests.hardware.experts_live OUT [SECONDS]

Prints a line a routine: what validate says, and how many calls; a library's error is printed as such. Layers whose call
no binding can state (routing inside, symmetric buffers) are judged on a call each. Writes nothing else than reports.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

BOUND = (
    "flashinfer.norm:layernorm_quant",
    "flashinfer.triton.norm:rms_norm",
    "flashinfer.triton.norm:rms_norm_add_residual",
    "flashinfer.norm:fused_rmsnorm_silu",
)


def validated(target: str, out: Path, limit: float) -> str:
    """The last line that says what a routine is, by its binding."""
    command = [sys.executable, "-m", "oracle", "validate", target, "--device", "cuda", "--explain", "quick", "-x"]
    report = out / f"{target.rpartition(':')[2]}.txt"
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        report.write_text(f"{error.stdout}\n{error.stderr}")
        return f"not done in {limit:.0f} s"
    report.write_text(ran.stdout + ran.stderr)
    lines = [line for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
    return f"exit {ran.returncode}: " + " | ".join(lines[-6:])[:700]


def main() -> None:
    out, seconds = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 140.0
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    for target in BOUND:
        left = seconds - (time.monotonic() - begun)
        print(
            f"{target}: {validated(target, out, max(1.0, min(left, 60.0)))} [{time.monotonic() - begun:.0f} s]",
            flush=True,
        )


if __name__ == "__main__":
    main()
