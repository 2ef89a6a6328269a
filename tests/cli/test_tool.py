"""Habits of a tool: help with examples, completion, settings in pyproject.toml, colours, broken pipes."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from reports import every_status

from oracle.cli import main, parser, settings
from oracle.cli.commands import COMMANDS, SHELLS
from oracle.cli.examples import EXAMPLES
from oracle.errors import OptionError
from oracle.report.files import to_json
from tests.support.commandline import Cli
from tests.support.forked import forked


def commands() -> dict[str, object]:
    (action,) = (a for a in parser()._actions if a.choices is not None and a.dest == "command")
    assert isinstance(action.choices, dict)
    return action.choices


class TestHelp:
    """Every command has examples, and every example is a command line that parses."""

    def test_every_command_has_examples(self) -> None:
        assert set(EXAMPLES) == set(commands())
        assert len(COMMANDS) == len(EXAMPLES)

    @pytest.mark.parametrize("line", [line for examples in EXAMPLES.values() for _, line in examples])
    def test_an_example_parses(self, line: str) -> None:
        words = shlex.split(line.partition(" > ")[0])
        assert callable(parser(words[0]).parse_args(words).run)

    @pytest.mark.parametrize("command", list(EXAMPLES))
    def test_help_prints_them(self, cli: Cli, command: str) -> None:
        ran = cli(command, "--help")
        assert (ran.status, ran.err) == (0, "")
        assert f"  fp8-oracle {EXAMPLES[command][0][1]}" in ran.out


class TestCompletion:
    """A script for each shell that names every command."""

    @pytest.mark.parametrize("shell", SHELLS)
    def test_every_shell(self, cli: Cli, shell: str) -> None:
        ran = cli("completion", shell)
        assert ran.status == 0
        assert all(name in ran.out for name in EXAMPLES)

    def test_bash_completes(self, cli: Cli, tmp_path: Path) -> None:
        """bash itself is asked what stands after `fp8-oracle hist` and after `verify --prof`."""
        script = tmp_path / "completion"
        script.write_text(cli("completion", "bash").out)
        ask = (
            f"source {script}; complete -p fp8-oracle >/dev/null || exit 3; f=$(complete -p fp8-oracle | "
            "sed 's/.*-F \\([^ ]*\\).*/\\1/'); COMP_WORDS=(fp8-oracle {0}); COMP_CWORD={1}; $f; echo ${{COMPREPLY[@]}}"
        )
        asked = (("hist", 1, "history"), ("verify --prof", 2, "--profile"), ("compl", 1, "completion"))
        for words, at, wanted in asked:
            command = ask.replace("{0}", words).replace("{1}", str(at)).replace("{{", "{").replace("}}", "}")
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
            assert wanted in done.stdout.split(), done.stderr


@pytest.mark.turns(4)
class TestSettings:
    """[tool.fp8-oracle]: flags beat the environment, which beats the file; a mistake is one line."""

    def write(self, folder: Path, text: str) -> None:
        (folder / "pyproject.toml").write_text(f"[tool.fp8-oracle]\n{text}\n")

    def test_defaults(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("FP8_ORACLE_FIXTURES", raising=False)
        self.write(tmp_path, 'profile = "full"\nfixtures = "stored"\nsubjects = ["mine*"]')
        inner = tmp_path / "a" / "b"
        inner.mkdir(parents=True)
        found = parser()
        settings.install(found, settings.load(inner))
        verify = found.parse_args(["verify"])
        assert (verify.profile, verify.fixtures, verify.subjects) == ("full", str(tmp_path / "stored"), ("mine*",))
        assert found.parse_args(["verify", "--profile", "quick", "--fixtures", "x"]).profile == "quick"
        assert found.parse_args(["fixtures", "check"]).fixtures == str(tmp_path / "stored")
        monkeypatch.setenv("FP8_ORACLE_FIXTURES", "elsewhere")
        found = parser()
        settings.install(found, settings.load(inner))
        assert found.parse_args(["verify"]).fixtures is None

    def test_the_nearest_table_counts(self, tmp_path: Path) -> None:
        self.write(tmp_path, 'profile = "full"')
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
        assert settings.load(tmp_path / "a").profile == "full"
        assert settings.load(tmp_path / "a").source == tmp_path / "pyproject.toml"

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("speed = 9", "no setting 'speed'"),
            ('profile = "huge"', "'huge'"),
            ("fixtures = 3", "fixtures=3"),
            ('subjects = "one"', "is no list"),
            ("subjects = [1]", "is no list"),
            ("profile = ", "not TOML"),
        ],
    )
    def test_a_mistake_is_one_line(
        self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
    ) -> None:
        self.write(tmp_path, text)
        with pytest.raises(OptionError, match=re.escape(said)):
            settings.load(tmp_path)
        monkeypatch.chdir(tmp_path)
        ran = cli("list", "numerics")
        assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert said in ran.err

    def test_subjects_choose(self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.write(tmp_path, 'subjects = ["deep_gemm.*"]')
        monkeypatch.chdir(tmp_path)
        listed = cli("verify", "--list").out.splitlines()
        assert listed
        assert all(line.split("\t")[1].startswith("deep_gemm.") for line in listed)
        one = cli("verify", "--list", "--subject", "eager").out.splitlines()
        assert one
        assert all(line.endswith("\teager") for line in one)


def on_a_terminal(arguments: list[str], **environment: str) -> str:
    """What the command prints where its standard output is a terminal."""
    leader, follower = pty.openpty()

    def said_there() -> int:
        for name in {"NO_COLOR", "FORCE_COLOR", "COLUMNS"} - {*environment}:
            os.environ.pop(name, None)
        return main(arguments)

    started = forked(said_there, stdout=follower, stderr=follower, TERM="xterm-256color", **environment)
    os.close(follower)
    said = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # the terminal closed with its last writer
            break
        if not piece:
            break
        said += piece
    started.wait()
    os.close(leader)
    return said.decode()


class TestOutput:
    """Colour on a terminal, none under NO_COLOR or in a pipe."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        (tmp_path / "run.json").write_text(to_json(every_status()))
        return tmp_path / "run.json"

    def test_colour(self, source: Path) -> None:
        assert re.search(r"\x1b\[[0-9;]*3[0-9]", on_a_terminal(["report", str(source)]))
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", on_a_terminal(["report", str(source)], NO_COLOR="1"))

    def test_a_pipe(self, cli: Cli, source: Path) -> None:
        assert "\x1b" not in cli("report", source).out
