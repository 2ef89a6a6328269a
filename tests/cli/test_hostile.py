"""The command line with bad input: one line and status 2, never a traceback."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

import oracle
from oracle.cli import main
from oracle.cli.examples import EXAMPLES
from oracle.errors import OptionError
from oracle.fixtures import files as fixtures
from oracle.fixtures.call_file import SCHEMA
from oracle.harness.report import Finding, Report
from oracle.harness.validation import validate
from oracle.report.outcome import Outcome
from oracle.routines import cases
from oracle.verdict.compare import Status, Verdict
from tests.support.commandline import Cli
from tests.support.forked import forked

pytestmark = pytest.mark.turns(4)

GEMM = "fp8_gemm_nt"
CASE = f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=5,n=256,k=256/family=randn/seed=7"
RIGHT = "tests.support.subjects.right:gemm"
HOSTILE_NAMES = (
    "späße ✓.safetensors",
    'it\'s "quoted" $x.safetensors',
    "new\nline.safetensors",
    "b\udcffd.safetensors",
)


EXPLAINED = "sign of A lost"


@pytest.fixture(scope="module")
def wrong() -> dict[str, Tensor]:
    """A small call of fp8_gemm_nt whose output lost the signs of A: the first hypotheses explain it, in half a second.

    An output that no fault explains takes ten seconds, and nothing here is about the explanation.
    """
    inputs = cases.parse(CASE.replace("n=256,k=256", "n=16,k=128")).inputs()
    positive = (inputs["a"].view(torch.uint8) & 0x7F).view(inputs["a"].dtype)
    out = oracle.predict(GEMM, inputs | {"a": positive}, numerics="sm90.promote128")
    assert isinstance(out, Tensor)
    return inputs | {"out": out}


@pytest.fixture
def good(tmp_path: Path, wrong: dict[str, Tensor]) -> Path:
    fixtures.write_tensors(tmp_path / "call.safetensors", wrong)
    return tmp_path / "call.safetensors"


def header(text: bytes, data: bytes = b"") -> bytes:
    """A safetensors file with this header."""
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: str, end: int) -> bytes:
    return f'{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]}}}}'.encode()


BYTES: dict[str, bytes] = {
    "empty": b"",
    "three bytes": b"abc",
    "no tensors": header(b"{}"),
    "a header longer than any file": (1 << 63).to_bytes(8, "little") + b"{}",
    "nested beyond recursion": header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "metadata of lists": header(b'{"__metadata__":{"a":[1]}}'),
    "an extent beyond 64 bits": header(entry("F32", f"[{2**70},0]", 0)),
    "extents that overflow": header(entry("F32", f"[{2**62},{2**62},0]", 0)),
    "a dtype of other libraries": header(entry("F8_E8M0", "[1]", 1), b"a"),
    "an integer of 5000 digits": header(entry("F32", f"[{'9' * 5000}]", 0)),
    "a name twice": header(entry("U8", "[1]", 1)[:-1] + b"," + entry("U8", "[1]", 1)[1:], b"a"),
}


class TestFiles:
    """Every command that reads tensors, on files that are none."""

    COMMANDS = (
        ("judge", "--contract", GEMM),
        ("identify", "--contract", GEMM),
        ("explain", "--contract", GEMM),
        ("explain",),
        ("predict", "--contract", GEMM, "--numerics", "sm90.promote128", "--write", "out.safetensors"),
    )

    def refused(self, cli: Cli, command: tuple[str, ...], path: object) -> str:
        ran = cli(command[0], path, *command[1:])
        assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1), (command, path, ran)
        assert ran.err.startswith("fp8-oracle: error: ")
        return ran.err

    @pytest.mark.parametrize("name", BYTES)
    def test_no_tensors_in_it(self, cli: Cli, tmp_path: Path, name: str) -> None:
        path = tmp_path / "x.safetensors"
        path.write_bytes(BYTES[name])
        for command in self.COMMANDS:
            self.refused(cli, command, path)

    def test_what_is_no_file(self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A folder, nothing, a link to itself, a device, a path through a file."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "loop").symlink_to("loop")
        (tmp_path / "file").write_text("text")
        for command in self.COMMANDS:
            for path in (tmp_path, "none", "loop", "/dev/null", "file/x"):
                self.refused(cli, command, path)

    def test_a_pickle_by_another_name(self, cli: Cli, tmp_path: Path) -> None:
        torch.save({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
        for command in self.COMMANDS:
            assert "zip archive" in self.refused(cli, command, tmp_path / "x.safetensors")

    def test_no_permission(self, cli: Cli, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As the system says it; a test that runs as root cannot take its own permission away."""

        def denied(self: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "read_bytes", denied)
        for command in self.COMMANDS:
            assert "Permission denied" in self.refused(cli, command, good)

    @pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)
    def test_names(self, cli: Cli, good: Path, name: str) -> None:
        """A name is only a name: the file behind it is judged and explained."""
        path = good.with_name(name)
        good.rename(path)
        judged = cli("judge", path, "--contract", GEMM)
        assert judged.status == 1 and EXPLAINED in judged.out
        assert cli("explain", path, "--contract", GEMM, "--json", path.with_suffix(".json")).status == 1
        assert json.loads(path.with_suffix(".json").read_bytes())["contract"] == GEMM

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"contract": None}, "lacks contract"),
            ({"arch": None}, "lacks arch"),
            ({"contract": "fp9"}, "no contract 'fp9'"),
            ({"options": "[1"}, "no JSON object"),
            ({"options": "[]"}, "no JSON object"),
            ({"strides": "[]"}, "no JSON object"),
            ({"strides": '{"a": [1]}'}, "no strides of a"),
            ({"strides": '{"a": [-1, 5]}'}, "no strides of a"),
            ({"strides": f'{{"a": [1, {10**30}]}}'}, None),
            ({"options": '{"speed": 9}'}, "no option 'speed'"),
            ({"contract": "scaled_fp8_quant"}, "no tensor 'out.q'"),
            ({"arch": "sm42"}, "sm42"),
            ({"schema": "x"}, "does not say what was called"),
            ({}, None),
        ],
    )
    def test_a_call_file_that_lies(
        self, cli: Cli, tmp_path: Path, wrong: dict[str, Tensor], change: dict[str, str | None], said: str | None
    ) -> None:
        """Each entry of the metadata; the last one is the twin without a lie."""
        import safetensors.torch

        truth = {"schema": SCHEMA, "contract": GEMM, "options": "{}", "arch": "sm90", "numerics": "", "strides": "{}"}
        metadata = {key: value for key, value in (truth | change).items() if value is not None}
        safetensors.torch.save_file(wrong, tmp_path / "x.safetensors", metadata=metadata)
        ran = cli("explain", tmp_path / "x.safetensors")
        assert ran.status == (1 if said is None else 2)
        if said is None:
            assert EXPLAINED in ran.out
        else:
            assert said in ran.err and ran.err.count("\n") == 1

    @pytest.mark.parametrize(
        "text", ["", "[]", "null", "{}", "[" * 100_000, '{"schema":"fp8-oracle.report/1"}', "\udcff"]
    )
    def test_no_report(self, cli: Cli, tmp_path: Path, text: str) -> None:
        """Every command that reads a run."""
        path = tmp_path / "run.json"
        path.write_bytes(text.encode("utf-8", "surrogateescape") + b"\n")
        for command in (("report",), ("compare", path), ("history", "add", "--db", tmp_path / "h.db")):
            ran = cli(*command, path)
            assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1), ran

    def test_a_page_that_is_no_text(self, cli: Cli, tmp_path: Path) -> None:
        (tmp_path / "page.md").write_bytes(b"\xff")
        ran = cli("list", "--coverage", "--update", tmp_path / "page.md")
        assert (ran.status, ran.err.count("\n")) == (2, 1) and "UTF-8" in ran.err


class TestPlacesToWrite:
    """``--json`` and its like: no place, no permission, and what must not be replaced."""

    def outputs(self, cli: Cli, good: Path, place: object) -> list[int]:
        judged = cli("judge", good, "--contract", GEMM, "--json", place)
        written = cli("predict", good, "--contract", GEMM, "--numerics", "sm90.promote128", "--write", place)
        for ran in (judged, written):
            assert ran.status in (0, 1) or ran.err.count("\n") == 1, ran
        return [judged.status, written.status]

    def test_no_place(self, cli: Cli, good: Path, tmp_path: Path) -> None:
        """A folder, below a file, below nothing, a name too long."""
        for place in (tmp_path, good / "x", tmp_path / "none" / "x", tmp_path / ("x" * 300)):
            assert self.outputs(cli, good, place) == [2, 2]

    def test_a_device_stays_a_device(self, cli: Cli, good: Path) -> None:
        """It is written to; a rename over it would put a file in its place."""
        assert self.outputs(cli, good, "/dev/null") == [1, 0]
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode)

    def test_a_full_device(self, cli: Cli, good: Path) -> None:
        assert self.outputs(cli, good, "/dev/full") == [2, 2]
        assert stat.S_ISCHR(os.stat("/dev/full").st_mode)

    def test_a_link_stays_a_link(self, cli: Cli, good: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("target.json")
        (tmp_path / "target.json").write_text("old")
        assert cli("judge", good, "--contract", GEMM, "--json", tmp_path / "link").status == 1
        assert (tmp_path / "link").is_symlink()
        assert json.loads((tmp_path / "target.json").read_text())["ok"] is False

    def test_a_record_is_a_file(self, cli: Cli) -> None:
        ran = cli("verify", "--case", CASE, "--fixtures", "none", "--record", "/dev/null")
        assert (ran.status, ran.err.count("\n")) == (2, 1) and "no regular file" in ran.err

    def test_folders(self, cli: Cli, tmp_path: Path) -> None:
        """Where a command makes a folder of its own."""
        (tmp_path / "file").write_text("")
        for command in (("fixtures", "export"), ("verify", "--case", CASE, "--fixtures", "none", "--keep")):
            ran = cli(*command, tmp_path / "file" / "x")
            assert (ran.status, ran.err.count("\n")) == (2, 1), ran


class TestArguments:
    """Numbers, names and words that mean nothing."""

    @pytest.mark.usefixtures("in_process")
    @pytest.mark.parametrize(
        "arguments",
        [
            ("verify", "--fixtures", "", "--list"),
            ("judge", "FILE", "--contract", GEMM, "--numerics", ""),
            ("judge", "FILE", "--contract", GEMM, "--option", ""),
            ("predict", "FILE", "--contract", GEMM, "--numerics", "", "--write", "x"),
            ("validate", RIGHT, "--contract", GEMM, "--arch", ""),
            ("validate", "", "--contract", GEMM),
            ("validate", RIGHT, "--contract", GEMM, "--case", CASE, "--arch", "sm42"),
            ("validate", RIGHT, "--contract", GEMM, "--case", CASE, "--numerics", "promote128"),
            ("validate", RIGHT, "--contract", GEMM, "--limit", "nan"),
            ("validate", RIGHT, "--contract", GEMM, "--limit", "0"),
            ("validate", RIGHT, "--contract", GEMM, "--limit", "inf"),
            ("validate", RIGHT, "--contract", GEMM, "--profile", "soak", "--seconds", "-1"),
            ("verify", "--case", CASE.replace("m=5", "m=99999999999"), "--fixtures", "none"),
            ("plan", "--op", "linear", "--arch", "sm42"),
            ("plan", "--op", "linear", "--option", "op=linear"),
            ("plan", "--op", "linear", "--option", "arch=sm90"),
            ("plan", "--op", "linear", "--m", "3", "--option", "m=4"),
            ("plan", "--op", "linear", "--m", "-3"),
            ("plan", "--op", "linear", "--option", "m=abc"),
            ("plan", "--op", "linear", "--option", "m=²"),
            ("plan", "--op", "linear", "--option", "bias=zzz"),
            ("plan", "--op", "linear", "--option", "ue8m0=maybe"),
            ("plan", "--op", "linear", "--option", "a_scale=zzz"),
        ],
        ids=" ".join,
    )
    def test_one_line(self, cli: Cli, good: Path, arguments: tuple[str, ...]) -> None:
        ran = cli(*(good if word == "FILE" else word for word in arguments))
        assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1), ran
        assert ran.err.startswith("fp8-oracle: error: ")

    @pytest.mark.parametrize(
        "arguments",
        [
            ("validate", RIGHT, "--contract", GEMM, "--seed", "-1"),
            ("mutate", "--contract", GEMM, "--legal", "-1"),
            ("mutate", "--contract", GEMM, "--seed", "x"),
            ("identify", "FILE", "--contract", GEMM, "--top", "0"),
            ("fingerprint", RIGHT, "--contract", GEMM, "--seed", "-1"),
            ("plan", "--op", "linear", "--m", "1.5"),
            ("nothing",),
            (),
        ],
        ids=" ".join,
    )
    def test_usage(self, cli: Cli, good: Path, arguments: tuple[str, ...]) -> None:
        """Where argparse itself refuses, its usage stands above the line."""
        ran = cli(*(good if word == "FILE" else word for word in arguments))
        assert (ran.status, ran.out) == (2, "") and ran.err.startswith("usage: ")
        assert re.fullmatch(r"fp8-oracle.*: error: .*", ran.err.splitlines()[-1])

    def test_an_unknown_arch_lists_the_known_ones(self, cli: Cli) -> None:
        ran = cli("plan", "--op", GEMM, "--arch", "sm42")
        assert (
            "unknown architecture 'sm42'" in ran.err and "sm90" in ran.err and "gfx942" in ran.err and "cpu" in ran.err
        )
        assert cli("plan", "--op", GEMM, "--arch", "sm90").status == 0

    @pytest.mark.parametrize("change", [{"limit": 0.0}, {"seconds": float("nan")}, {"seed": -1}])
    def test_validate_refuses_them_too(self, change: dict[str, float]) -> None:
        with pytest.raises(OptionError, match=next(iter(change))):
            validate(RIGHT, GEMM, case=CASE, **change)  # type: ignore[arg-type]

    @pytest.mark.parametrize("command", list(EXAMPLES))
    def test_help(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
        """On a terminal of one column too."""
        monkeypatch.setenv("COLUMNS", "1")
        ran = cli(command, "--help")
        assert ran.status == 0 and ran.out.startswith("usage: ") and ran.err == ""

    @pytest.mark.parametrize(
        "text", ["tool = 3", "a = " + "[" * 100_000, '[tool.fp8-oracle]\nfixtures = ""', "[[tool.fp8-oracle]]"]
    )
    def test_settings(self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        """A pyproject.toml of somebody else, or a broken one."""
        (tmp_path / "pyproject.toml").write_text(text)
        monkeypatch.chdir(tmp_path)
        ran = cli("list", "contracts")
        assert ran.status == (0 if text == "tool = 3" else 2) and ran.err.count("\n") <= 1


class TestCommands:
    """The command that repeats a finding is one that a shell takes apart into the same words."""

    NASTY = 'c/it\'s a "case" $HOME `id`; rm -rf x/seed=1'

    def test_an_outcome(self) -> None:
        verdict = Verdict(Status.FAILED, "x", reason="x")
        for name in (self.NASTY, CASE):
            repro = Outcome(name, "c", "my 'own' kernel", "cpu", verdict).repro
            assert shlex.split(repro) == ["fp8-oracle", "verify", "--case", name, "--subject", "my 'own' kernel"]
        assert Outcome(CASE, GEMM, "eager", "cpu", verdict).repro.endswith(f"--case '{CASE}' --subject 'eager'")
        name = f"captures/{self.NASTY}"
        assert shlex.split(Outcome(name, "c", "s", "sm90", verdict).repro)[-1] == name

    def test_a_finding(self) -> None:
        report = Report("m:f; ls", GEMM, "cpu", "sm90", (), adapter="my mod:adapt", numerics="sm90.promote128")
        words = shlex.split(report.command(Finding(self.NASTY, "numbers", Verdict(Status.FAILED, "x", reason="x"))))
        assert words == [
            *("fp8-oracle", "validate", "m:f; ls", "--contract", GEMM, "--adapter", "my mod:adapt", "--device", "cpu"),
            *("--arch", "sm90", "--numerics", "sm90.promote128", "--case", self.NASTY),
        ]


def run(*arguments: object, stdout: object = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "oracle", *map(str, arguments)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, check=False, env=os.environ | environment)  # type: ignore[call-overload,no-any-return]


class TestStreams:
    """Standard output that is full, closed, narrow in its alphabet, or no terminal."""

    def test_a_full_disk(self) -> None:
        with open("/dev/full", "wb") as full:
            done = run("list", "contracts", stdout=full)
        assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"No space left" in done.stderr

    def test_closed(self) -> None:
        with tempfile.TemporaryFile() as stderr:
            child = forked(lambda: main(["list", "contracts"]), stdout=None, stderr=stderr.fileno())
            assert child.wait() == 0 and stderr.tell() == 0

    def test_head(self) -> None:
        """As many bytes as the reader wants; then the status says that nobody reads."""
        listed = lambda: main(["list", "cases"])  # noqa: E731
        for unbuffered in ("", "1"):
            read, write = os.pipe()
            with tempfile.TemporaryFile() as stderr:
                child = forked(listed, stdout=write, stderr=stderr.fileno(), PYTHONUNBUFFERED=unbuffered)
                os.close(write)
                assert os.read(read, 20)
                os.close(read)
                assert (child.wait(), stderr.tell()) == (141, 0)

    @pytest.mark.repeats("TestStreams::test_head")
    def test_closed_before_the_first_byte(self) -> None:
        read, write = os.pipe()
        os.close(read)
        done = run("list", "contracts", stdout=write, PYTHONUNBUFFERED="1")
        os.close(write)
        assert (done.returncode, done.stderr) == (141, b"")

    @pytest.mark.repeats("TestStreams::test_head")
    def test_an_old_alphabet(self, good: Path) -> None:
        """What the encoding does not hold is escaped."""
        path = good.with_name("späße ✓.safetensors")
        good.rename(path)
        done = run("explain", path, "--contract", GEMM, PYTHONIOENCODING="ascii")
        assert done.returncode == 1 and done.stderr == b"" and EXPLAINED.encode() in done.stdout
        done = run("verify", "--case", CASE, "--fixtures", "none", "--markdown", "-", PYTHONIOENCODING="ascii")
        assert done.returncode == 0 and b"Traceback" not in done.stderr

    @pytest.mark.parametrize("columns", ["1", "20", "no number"])
    def test_a_narrow_terminal(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
        monkeypatch.setenv("COLUMNS", columns)
        assert cli("verify", "--case", CASE, "--fixtures", "none").status == 0
        assert cli("mutate", "--contract", GEMM, "--fault", "sign of A lost").status == 0
