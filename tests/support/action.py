"""Runs the shell steps of a composite GitHub action here: its expressions, conditions, files and outputs.

Steps that use another action are not run; what they would be given is in :attr:`Run.used`. Source: GitHub, metadata
syntax for composite actions. Covered are the expressions that the action writes: names with dots, texts, ``==``,
``!=``, ``&&`` and ``always()``.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass
class Run:
    """What one run of an action left: exit status, outputs, job summary, standard output, steps and their seconds."""

    status: int = 0
    outputs: dict[str, str] = field(default_factory=dict)
    summary: str = ""
    log: str = ""
    used: dict[str, dict[str, str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def annotations(self) -> list[str]:
        return [line for line in self.log.splitlines() if line.startswith("::")]


def run(file: Path, inputs: dict[str, str], *, workspace: Path, temporary: Path, environment: dict[str, str]) -> Run:
    """Run the steps in order in ``workspace``; after one that fails only those of ``always()`` run, as on GitHub."""
    made = yaml.safe_load(file.read_text())
    unknown = set(inputs) - set(made["inputs"])
    assert not unknown and all(name in inputs for name, about in made["inputs"].items() if about.get("required")), (
        unknown
    )
    github = {"action_path": str(file.parent), "token": "a token", "event_name": "pull_request"}
    context: dict[str, Any] = {"github": github | {"event.pull_request.number": "7"}, "steps": {}}
    context["inputs"] = {
        n: inputs.get(n, filled(str(about.get("default", "")), context)) for n, about in made["inputs"].items()
    }
    result = Run()
    for number, step in enumerate(made["runs"]["steps"]):
        condition = step.get("if", "")
        if (result.status and "always()" not in condition) or (condition and not evaluated(condition[3:-2], context)):
            continue
        if "uses" in step:
            result.used[step["uses"]] = {name: filled(str(value), context) for name, value in step["with"].items()}
            continue
        files = {name: temporary / f"{name}-{number}" for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        for path in files.values():
            path.write_text("")
        (temporary / "step.sh").write_text(filled(step["run"], context))
        given = {name: filled(str(value), context) for name, value in step.get("env", {}).items()}
        runner = {"RUNNER_TEMP": str(temporary), "GITHUB_REPOSITORY": "owner/name", "GITHUB_WORKSPACE": str(workspace)}
        assert step["shell"] == "bash"
        start = time.perf_counter()
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(temporary / "step.sh")],
            cwd=workspace / filled(step.get("working-directory", "."), context),
            env=os.environ | environment | runner | {name: str(path) for name, path in files.items()} | given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        result.seconds[step["name"]] = time.perf_counter() - start
        result.log += done.stdout
        result.status = result.status or done.returncode
        result.summary += files["GITHUB_STEP_SUMMARY"].read_text()
        lines = files["GITHUB_OUTPUT"].read_text().splitlines()
        context["steps"][step.get("id", "")] = dict(line.split("=", 1) for line in lines)
    result.outputs = {name: filled(about["value"], context) for name, about in made["outputs"].items()}
    return result


def filled(text: str, context: dict[str, Any]) -> str:
    """A text with the values of its expressions."""
    return re.sub(r"\$\{\{(.+?)\}\}", lambda found: str(evaluated(found[1], context)), text)


def evaluated(expression: str, context: dict[str, Any]) -> Any:
    """The value of an expression; a name that is not set is an empty text."""

    def value(found: re.Match[str]) -> str:
        kind, _, name = found[0].partition(".")
        if kind == "steps":
            step, name = name.split(".outputs.")
            return repr(context["steps"].get(step, {}).get(name, ""))
        return repr(context[kind].get(name, ""))

    names = re.sub(r"\b(?:inputs|steps|github)\.[\w.-]+", value, expression.replace("&&", "and"))
    return eval(names.strip(), {"__builtins__": {}, "always": lambda: True})
