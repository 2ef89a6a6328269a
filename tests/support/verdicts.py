"""Write every verdict of the suite into one folder, times apart: two versions that judge alike write the same bytes.

    python tests/support/verdicts.py OUT [--profile quick] [--legal 500] [--fixtures fixtures] [--only PART ...]
                                      [--contracts NAME ...]

Only the command line is used, so that the script runs on any version whose ``python -m oracle`` is found:

    verify.json    every outcome of ``verify``: production subjects over the profile's cases, and the captures replayed
    mutate.json    every mutant with its fate and reason, the scores, false alarms of legal variants
    faults.txt     the fault catalogue with the contracts of each fault
    golden-ARCH.json, golden-ARCH-changed.json
                   the goldens' expected outputs judged as somebody's answers, as they are and with one bit flipped
    plan-ARCH.json what the layer takes there with every package, and of each other backend why not
    SHA256SUMS     of the above

``--only`` writes some of these: faults, golden, plan, verify, mutate; ``--contracts`` writes verify-NAME.json of these
routines and their captures, in the place of verify.json. A worktree of an earlier commit is compared by
running this file there (``python /here/tests/support/verdicts.py``), and then ``diff`` of both SHA256SUMS.

``seconds``, ``started``, ``versions`` and ``machine`` are left out, everything else is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMES = ("seconds", "started", "versions", "machine", "unfinished")
ARCHES = ("cpu", "sm90")
PARTS = ("faults", "golden", "plan", "verify", "mutate")


def cli(*words: str, admitted: tuple[int, ...] = (0, 1)) -> str:
    """The standard output of one command; a status that is not admitted ends the script."""
    done = subprocess.run([sys.executable, "-m", "oracle", *words], capture_output=True, text=True, check=False)
    if done.returncode not in admitted:
        sys.exit(f"fp8-oracle {' '.join(words)}: exit {done.returncode}\n{done.stderr}")
    return done.stdout


def timeless(record: Any) -> Any:
    """The record without what differs from run to run."""
    if isinstance(record, dict):
        return {key: timeless(value) for key, value in record.items() if key not in TIMES}
    return [timeless(value) for value in record] if isinstance(record, list) else record


def write(path: Path, text: str) -> None:
    record = timeless(json.loads(text))
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def answers(exported: Path, target: Path, *, flip: bool) -> None:
    """The expected outputs of an exported goldens folder as somebody's answers; ``flip`` changes one bit of each."""
    target.mkdir()
    for case in json.loads((exported / "manifest.json").read_text())["cases"]:
        content = (exported / case["file"]).read_bytes()
        for tensor in case["tensors"]:
            if tensor["role"] != "expected":
                continue
            raw = bytearray(content[tensor["offset"] : tensor["offset"] + tensor["bytes"]])
            if flip and raw:
                raw[len(raw) // 2] ^= 1
            (target / f"{case['case']}.{tensor['name']}.bin").write_bytes(bytes(raw))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", default="quick")
    parser.add_argument("--legal", default="500", help="random legal variants to judge")
    parser.add_argument("--fixtures", default="fixtures")
    parser.add_argument("--contracts", nargs="+", default=(), metavar="NAME")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    arguments = parser.parse_args()
    out: Path = arguments.out
    shutil.rmtree(out, ignore_errors=True)
    (out / "scratch").mkdir(parents=True)
    os.environ["FP8_ORACLE_FIXTURES"] = str(Path(arguments.fixtures).resolve())
    if "faults" in arguments.only:
        (out / "faults.txt").write_text(cli("mutate", "--list"))
    for arch in ARCHES if "plan" in arguments.only else ():
        write(out / f"plan-{arch}.json", cli("plan", "--arch", arch, "--json", "-"))
    exported = out / "scratch" / "goldens"
    if "golden" in arguments.only:
        cli("fixtures", "export", str(exported))
    for flip in (False, True) if "golden" in arguments.only else ():
        theirs = out / "scratch" / f"answers{'-changed' if flip else ''}"
        answers(exported, theirs, flip=flip)
        for arch in ARCHES:
            report = out / "scratch" / "judged.json"
            words = ("fixtures", "judge", str(exported), "--outputs", str(theirs), "--arch", arch)
            cli(*words, "--json", str(report), admitted=(0, 1, 2))  # 2: a routine has no model of this arch
            write(out / f"golden-{arch}{'-changed' if flip else ''}.json", report.read_text())
    judged = ("verify", "--quiet", "--profile", arguments.profile)
    named = {f"verify-{name}": (*judged, "--contract", name) for name in arguments.contracts} or {"verify": judged}
    for name, words in {
        **named,
        "mutate": ("mutate", "--profile", arguments.profile, "--legal", arguments.legal),
    }.items():
        if name.partition("-")[0] not in arguments.only:
            continue
        report = out / "scratch" / f"{name}.json"
        cli(*words, "--json", str(report))
        write(out / f"{name}.json", report.read_text())
    shutil.rmtree(out / "scratch")
    sums = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in sorted(out.iterdir())]
    (out / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="")


if __name__ == "__main__":
    main()
