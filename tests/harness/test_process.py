"""The parent survives the child and outlives it: channel, memory, launcher, sandbox."""

from __future__ import annotations

import ast
import math
import mmap
import os
import secrets
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle.errors import OptionError, SandboxError
from oracle.harness import program, sandbox
from oracle.harness import session as sessions
from oracle.harness.memory import GUARD, Guarded, Shared, Wanted, opened
from oracle.harness.process import Worker, interrupted_by_every_end
from oracle.harness.protocol import LIMIT, NONCE, SIZE, Claim, GarbledError, Reply, pack, unpack
from oracle.harness.session import Session, read
from oracle.harness.validation import validate
from oracle.routines import cases, get
from oracle.routines.base import Call
from tests.support import cheat_table
from tests.support.commandline import Cli
from tests.support.launched import launched
from tests.support.subjects.cheats import CHEATS

GEMM = "fp8_gemm_nt"
EXACT = [f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=33,n=192,k=384/family=exact/seed=1"]  # no watch but numbers and memory
CHEAT = "tests.support.subjects.cheats:"
NEEDS_SANDBOX = pytest.mark.skipif(
    sandbox.means() is None, reason=f"no sandbox here: {sandbox.why_not('bwrap')}; {sandbox.why_not('namespaces')}"
)
CLAIM = Claim(torch.bfloat16, (3, 4), (4, 1))


class TestProtocol:
    """A reply has one size, one nonce and values within their limits; anything else is none."""

    def test_there_and_back(self) -> None:
        """Every field, with as many outputs and axes as there may be."""
        wide = Claim(torch.float8_e4m3fn, (1,) * 8, (0,) * 8, "cuda", 3, 77, 5, True)
        made = Reply("ok", "two\nlines", (CLAIM, *[wide] * 7), (0, 7), True)
        nonce = secrets.token_bytes(NONCE)
        assert unpack(pack(nonce, made), nonce) == made

    @pytest.mark.parametrize(
        "message",
        [
            b"",
            b"null",
            b"true",
            b"3",
            b'"text"',
            b"[]",
            b'{"ok": true}',
            bytes(SIZE - 1),
            bytes(SIZE + 1),
            bytes(SIZE),
            b"\xff" * SIZE,
            secrets.token_bytes(SIZE),
        ],
        ids=["nothing", "null", "true", "number", "string", "list", "object", "short", "long", "zero", "ones", "noise"],
    )
    def test_what_is_no_reply(self, message: bytes) -> None:
        """JSON of any type, zeros, noise."""
        with pytest.raises(GarbledError):
            unpack(message, secrets.token_bytes(NONCE))

    @pytest.mark.parametrize(
        ("at", "value"),
        [(NONCE, 200), (NONCE + 1, 9), (NONCE + 2, 255), (NONCE + 3, 2), (NONCE + 5, 255), (0, None)],
        ids=["kind", "outputs", "late", "disturbed", "length of text", "nonce"],
    )
    def test_fields_beyond_their_values(self, at: int, value: int | None) -> None:
        """One byte of a good reply."""
        nonce = secrets.token_bytes(NONCE)
        message = bytearray(pack(nonce, Reply("ok", "", (CLAIM,))))
        message[at] = message[at] ^ 1 if value is None else value
        with pytest.raises(GarbledError):
            unpack(bytes(message), nonce)

    @pytest.mark.parametrize(
        "claim",
        [
            replace(CLAIM, shape=(LIMIT, 4)),
            replace(CLAIM, stride=(-1, 1)),
            replace(CLAIM, slot=-2),
            replace(CLAIM, offset=-1),
            replace(CLAIM, offset=LIMIT),
            replace(CLAIM, length=-1),
        ],
        ids=["extent", "negative stride", "slot", "negative offset", "offset", "length"],
    )
    def test_claims_beyond_their_values(self, claim: Claim) -> None:
        """Extents, strides and offsets that no memory has."""
        with pytest.raises(GarbledError):
            unpack(pack(bytes(NONCE), Reply("ok", "", (claim,))), bytes(NONCE))

    def test_no_terminal_is_driven(self) -> None:
        """Escape sequences in what a kernel raises."""
        assert unpack(pack(bytes(NONCE), Reply("raised", "\x1b[2Jgone\r")), bytes(NONCE)).text == "?[2Jgone?"


class TestMemory:
    """What is claimed is compared with the memory that there is, which belongs to the parent."""

    @pytest.fixture
    def laid(self) -> tuple[Shared, list[Any]]:
        shared = Shared(1 << 16)
        wanted = [Wanted.copy("x", torch.arange(12.0).reshape(3, 4)), Wanted.fresh("out", (3, 4), torch.bfloat16)]
        return shared, shared.lay_out(wanted, 0)

    def test_the_worker_is_asked_after_the_snapshots(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a GPU a snapshot is enqueued, and a worker that is asked meanwhile may write other inputs there first;
        `test_process_device.py` delays one."""
        order: list[str] = []
        monkeypatch.setattr(Guarded, "snapshot", lambda made: order.append(made.name))
        monkeypatch.setattr("oracle.harness.session.settle", lambda place: order.append(f"settled on {place}"))

        class Asked(Exception):
            pass

        class Silent:
            place = "cpu"

            def memory(self, size: int) -> Shared:
                return Shared(size)

            def ask(self, request: object) -> Reply:
                raise Asked

        case = cases.parse(EXACT[0])
        session = Session(Silent(), get(GEMM), device="cpu", arch="sm90", numerics=None)  # type: ignore[arg-type]
        with pytest.raises(Asked):
            session.call(case.inputs(), case.call_options())
        assert order == [*case.inputs(), "settled on cpu"]

    @pytest.mark.parametrize(("room", "enough"), [(sessions.ROOM, True), (1 << 20, False)])
    def test_there_is_room_for_an_output_of_short_k(
        self, monkeypatch: pytest.MonkeyPatch, room: int, enough: bool
    ) -> None:
        """An output may be much larger than 16 times the inputs, where the contract's parent lays out none itself."""
        monkeypatch.setattr(sessions, "ROOM", room)
        asked: list[int] = []

        class Asked(Exception):
            pass

        class Silent:
            place = "cpu"

            def memory(self, size: int) -> Shared:
                asked.append(size)
                raise Asked

        long = "m=16384,n=192,k=4/family=randn/seed=11"
        case = cases.parse(f"fp8_gemm_nt_skip_head_mid/e4m3xe4m3-bf16/1x128:128x128/{long}")
        contract = get(case.contract)
        one = Session(Silent(), contract, device="cpu", arch="sm90", numerics=None)  # type: ignore[arg-type]
        with pytest.raises(Asked):
            one.call(case.inputs(), case.call_options())
        due = contract.outputs(Call(contract, case.inputs(), case.call_options()))["out"].shape
        assert due is not None
        assert (asked[0] >= math.prod(due) * 2) == enough

    def test_an_output(self, laid: tuple[Shared, list[Any]]) -> None:
        """What the other process writes in its own mapping of the memory is read here."""
        shared, slots = laid
        theirs = mmap.mmap(os.dup(shared.descriptor), shared.size)
        opened("out", slots[1][1], theirs).tensor.copy_(torch.arange(12.0).reshape(3, 4))
        found = read(replace(CLAIM, slot=1, offset=GUARD), shared, [made for made, _ in slots])
        assert found is not None and found.tolist() == torch.arange(12.0).reshape(3, 4).tolist()
        assert all(made.damage() is None for made, _ in slots)

    @pytest.mark.parametrize(
        "claim",
        [
            replace(CLAIM, slot=2, offset=GUARD),
            replace(CLAIM, slot=1, offset=0),
            replace(CLAIM, slot=1, offset=GUARD + 1),
            replace(CLAIM, slot=1, offset=GUARD + 2),
            replace(CLAIM, slot=1, offset=GUARD, shape=(1 << 40, 4), stride=(0, 0)),
            replace(CLAIM, slot=1, offset=GUARD, stride=(1 << 40, 1)),
            replace(CLAIM, offset=0, length=12),
            replace(CLAIM, offset=1 << 15, length=11),
            replace(CLAIM, offset=(1 << 16) - 22, length=12),
            replace(CLAIM, offset=1 << 15, length=1 << 32, shape=(1 << 16, 1 << 16)),
            replace(CLAIM, offset=1 << 15, length=12, stride=(5, 1), padded=True),
        ],
        ids=[
            "no slot",
            "guard zone",
            "misaligned",
            "behind its end",
            "8 TiB",
            "far stride",
            "before the room",
            "too few",
            "behind the memory",
            "8 GiB",
            "padding",
        ],
    )
    def test_an_output_that_is_elsewhere(self, claim: Claim, laid: tuple[Shared, list[Any]]) -> None:
        """Outside of every slot and of the room, or larger than both."""
        shared, slots = laid
        assert read(claim, shared, [made for made, _ in slots]) is None

    def test_nothing_is_left_in_the_room(self, laid: tuple[Shared, list[Any]]) -> None:
        """Answers and outputs of an earlier call are no answer to the next one."""
        shared, _ = laid
        shared.bytes.fill_(7)
        shared.lay_out([Wanted.fresh("out", (3,), torch.float32)], 0)
        assert int(shared.bytes[shared.room :].max()) == 0

    def test_its_size_stays(self, laid: tuple[Shared, list[Any]]) -> None:
        """A process that cut it would end this one by SIGBUS."""
        for size in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(laid[0].descriptor, size)


def _alive(mark: str) -> list[int]:
    """Processes with this word on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if mark.encode() in words:
            found.append(int(path.parent.name))
    return found


def _until(condition: Any) -> bool:
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class TestLauncher:
    """Whatever the worker starts ends with it, and it ends with the oracle."""

    @pytest.mark.parametrize("end", ["lifeline", "SIGTERM", "worker"])
    def test_descendants_end(self, end: str) -> None:
        """In another session, in the background, ignoring every signal that can be ignored."""
        mark = f"3{secrets.randbelow(1 << 30)}"
        worker = "true" if end == "worker" else f"exec sleep {mark}"
        launcher, status = launched(
            "/bin/sh", "-c", f"trap '' TERM HUP INT; setsid sleep {mark} & sleep {mark} & {worker}"
        )
        if end != "worker":
            assert _until(lambda: len(_alive(mark)) == 3)
        assert launcher.stdin is not None
        if end == "SIGTERM":
            launcher.terminate()
        elif end == "lifeline":
            launcher.stdin.close()
        assert launcher.wait(20) == 0 and _until(lambda: not _alive(mark))
        (written,) = struct.unpack("i", os.read(status, 4))
        assert os.waitstatus_to_exitcode(written) == (0 if end == "worker" else -signal.SIGKILL)
        os.close(status)

    def test_the_status_of_the_worker(self) -> None:
        """As it was, signal or number."""
        for script, code in (("exit 7", 7), ("kill -SEGV $$", -signal.SIGSEGV)):
            launcher, status = launched("/bin/sh", "-c", script)
            launcher.wait(20)
            assert os.waitstatus_to_exitcode(struct.unpack("i", os.read(status, 4))[0]) == code
            os.close(status)

    def test_the_oracle_is_killed(self, root: Path) -> None:
        """Not even then is anything left: the lifeline ends with the process that holds it."""
        mark = f"3{secrets.randbelow(1 << 30)}"
        script = f"setsid sleep {mark} & exec sleep {mark}"
        command = [sys.executable, "-m", "tests.support.launched", "/bin/sh", "-c", script]
        with subprocess.Popen(command, cwd=root) as holder:
            assert _until(lambda: len(_alive(mark)) == 2)
            holder.kill()
        assert _until(lambda: not _alive(mark))

    @pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP])
    def test_an_end_is_an_interrupt(self, end: signal.Signals) -> None:
        """SIGTERM and SIGHUP go the way of SIGINT while a worker runs, and no longer."""
        before = signal.getsignal(end)
        with pytest.raises(KeyboardInterrupt), interrupted_by_every_end():
            os.kill(os.getpid(), end)
            time.sleep(10)
        assert signal.getsignal(end) is before


@pytest.mark.turns(4)
class TestSandbox:
    """What a kernel sees that nobody trusts."""

    @NEEDS_SANDBOX
    def test_alone(self, request: pytest.FixtureRequest) -> None:
        """A right kernel conforms that raises where it can reach anything else, `oracle` too; outside of a sandbox it
        fails (the negative test)."""
        report = validate(CHEAT + "finds_itself_alone", GEMM, case=EXACT, untrusted=True)
        assert [f.verdict.summary for f in report.failures] == [] and report.conforms
        assert "--untrusted" in report.command(report.findings[0])
        request.getfixturevalue("forked_workers")
        (wrong,) = validate(CHEAT + "finds_itself_alone", GEMM, case=EXACT).failures
        assert "temporary files" in wrong.verdict.summary or "can be written" in wrong.verdict.summary

    @NEEDS_SANDBOX
    @pytest.mark.repeats("TestSandbox::test_alone")
    def test_no_oracle(self) -> None:
        """A kernel that asks the oracle has nobody to ask."""
        (wrong,) = validate(CHEAT + "asks_the_oracle", GEMM, case=EXACT, untrusted=True).failures
        assert "ModuleNotFoundError: No module named 'oracle'" in wrong.verdict.summary

    def test_no_judge(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Outside of a sandbox too, nothing of its process and of its parent names the judge; in a child of the test's
        process, and under the judge's variables, everything does (the negative test)."""
        monkeypatch.setenv("FP8_ORACLE_SAMPLE", "0")
        report = validate(CHEAT + "finds_no_judge", GEMM, case=EXACT)
        assert [f.verdict.summary for f in report.failures] == [] and report.conforms
        request.getfixturevalue("forked_workers")
        monkeypatch.setattr(program, "environment", lambda: {**os.environ, "_": "/bin/fp8-oracle"})
        monkeypatch.setattr(sys, "argv", ["/bin/fp8-oracle", "validate"])
        (wrong,) = validate(CHEAT + "finds_no_judge", GEMM, case=EXACT).failures
        assert "the oracle is named by command line, environment, modules, stack" in wrong.verdict.summary

    def test_no_sandbox(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        """Status 2 and what to do; nothing is run."""
        monkeypatch.setattr(sandbox, "means", lambda: None)
        ran = cli("validate", CHEAT + "constant", "--contract", GEMM, "--untrusted", "--case", EXACT[0])
        assert ran.status == 2 and "install bubblewrap" in ran.err and "bwrap:" in ran.err
        with pytest.raises(SandboxError):
            Worker("a:b", adapter=None, device="cpu", limit=1, untrusted=True)

    def test_the_worker_stands_alone(self) -> None:
        """Its files import torch, the standard library and each other, so that nothing else has to be shown."""
        names = {f"oracle.{name.removesuffix('.py').replace('/', '.')}" for name in program.FILES}
        for name in program.FILES:
            for node in ast.walk(ast.parse((program.PACKAGE / name).read_text())):
                if isinstance(node, ast.ImportFrom) and node.module is not None:
                    found = {node.module} if node.module in names else {f"{node.module}.{a.name}" for a in node.names}
                elif isinstance(node, ast.Import):
                    found = {a.name for a in node.names}
                else:
                    continue
                top = {f.split(".")[0] for f in found}
                assert found <= names or top <= {*sys.stdlib_module_names, "torch"}, (name, found)

    def test_what_is_shown(self, tmp_path: Path) -> None:
        """Of a folder that holds the package everything but the package and its distribution."""
        for name in ("oracle", "mine", "fp8_oracle-0.1.dist-info", "broken"):
            (tmp_path / name).mkdir()
        made = sandbox.steps([str(tmp_path)], "", "cpu", "/program")
        at = made.index(["hide", str(tmp_path)])
        assert made[at + 1 : at + 3] == [["bind", str(tmp_path / "broken")], ["bind", str(tmp_path / "mine")]]
        assert made[-1] == ["bind", "/program", sandbox.PLACE]
        assert not any(step[1].startswith(str(program.PACKAGE)) for step in made)
        words = sandbox.bubblewrap(made, ["python"], "/", program="bwrap")
        assert words[-4:] == ["--chdir", "/", "--", "python"] and words.index("--tmpfs") < words.index("--ro-bind")


class TestCheats:
    """The catalogue; the whole table is ``python -m tests.support.cheat_table``."""

    @pytest.mark.usefixtures("forked_workers")
    def test_the_code_of_the_process(self) -> None:
        """Checks that are replaced in the kernel's process are not made there; a forged reply is none."""
        report = validate(CHEAT + "patches_equal", GEMM, case=EXACT, limit=60)
        assert {f.watch for f in report.failures} == {"guard zones", "inputs unchanged"}
        (wrong,) = validate(CHEAT + "takes_the_channel", GEMM, case=EXACT, limit=60).failures
        assert "the kernel wrote to the channel of the worker" in wrong.verdict.summary

    def test_the_table(self, root: Path) -> None:
        """It has every cheat, and none conforms with --untrusted."""
        lines = (root / "docs/explanation/untrusted.md").read_text().partition(cheat_table.START)[2].splitlines()
        rows = [line.split(" | ") for line in lines if line.startswith("| `")]
        assert [row[0].strip("| `") for row in rows] == list(CHEATS)
        assert all(row[3].removesuffix(" |") != "conforms" for row in rows)


def test_the_sandbox_is_for_the_cpu() -> None:
    with pytest.raises(OptionError, match="on the CPU alone, not on cuda"):
        validate("torch:matmul", "fp8_gemm_nt", device="cuda", untrusted=True)
