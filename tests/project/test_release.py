"""What a release and its repository need, held to what exists; tests/project/test_wheel.py has the wheels."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import release

COMMANDS = ["make verify", "make test"]
"""The two commands of README.md."""
STEPS = ("version", "notes", "build", "check", "extras", "tools")
SECTION = (
    "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2026-12-01\n\n### Added\n\n- A thing.\n\n## [0.0.9] - 2026-11-01\n"
)


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """The files that `version` reads, as a person leaves them for a release."""
    for name in ("kernels/VERSION", *release.PLACED):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((root / name).read_text().replace("OWNER", "someone"))
    (tmp_path / "CHANGELOG.md").write_text(SECTION)
    return tmp_path


class TestVersion:
    """One file has the version; a tag must agree with it, and with the changelog."""

    def test_a_tag_that_agrees(self, checkout: Path) -> None:
        assert release.version("v0.1.0", checkout) == "0.1.0"
        assert release.notes(checkout) == "### Added\n\n- A thing.\n"

    @pytest.mark.parametrize(
        ("file", "old", "new", "said"),
        [
            ("kernels/VERSION", "0.1.0", "0.2.0", "the tag v0.1.0 is not v0.2.0"),
            ("CHANGELOG.md", "## [0.1.0] - 2026-12-01", "## [0.1.0]", "has no section"),
            ("CHANGELOG.md", "### Added\n\n- A thing.\n", "", "has no section"),
            ("pyproject.toml", "someone", "OWNER", "now OWNER, in pyproject.toml: RELEASING.md"),
        ],
    )
    def test_one_that_does_not(self, checkout: Path, file: str, old: str, new: str, said: str) -> None:
        text = (checkout / file).read_text()
        assert old in text
        (checkout / file).write_text(text.replace(old, new))
        with pytest.raises(release.ReleaseError, match=re.escape(said)):
            release.version("v0.1.0", checkout)

    def test_it_stands_nowhere_else(self, root: Path) -> None:
        for name in ("pyproject.toml", "kernels/pyproject.toml"):
            project = tomllib.loads((root / name).read_text())
            assert "version" in project["project"]["dynamic"] and "version" not in project["project"]
            assert Path(name).parent / project["tool"]["setuptools"]["dynamic"]["version"]["file"] == Path(
                "kernels/VERSION"
            )

    def test_nothing_old_is_published(self, tmp_path: Path) -> None:
        (tmp_path / "old.whl").write_text("")
        with pytest.raises(release.ReleaseError, match="is not empty"):
            release.build(tmp_path)

    def test_changelog(self, root: Path) -> None:
        """Keep a changelog: versions, newest first, with the six categories and no other."""
        assert not wrong_changelog((root / "CHANGELOG.md").read_text())
        assert wrong_changelog("# Changelog\n\n## 0.1.0 (unreleased)\n\n- A thing.\n")
        assert wrong_changelog("# Changelog\n\n## [Unreleased]\n\n### News\n\n- A thing.\n")


def wrong_changelog(text: str) -> list[str]:
    """Headings that keep-a-changelog does not have, and entries under none of its categories."""
    categories = "Added|Changed|Deprecated|Removed|Fixed|Security"
    allowed = rf"## \[Unreleased\]|## \[\d+\.\d+\.\d+\] - \d{{4}}-\d\d-\d\d|### ({categories})"
    wrong, under = [], ""
    for line in text.splitlines()[1:]:
        if line.startswith("#"):
            under = line
            wrong += [] if re.fullmatch(allowed, line) else [line]
        elif line.startswith("- ") and not under.startswith("### "):
            wrong.append(line)
    return wrong


class TestWorkflow:
    """Nothing is uploaded but what was checked, by a job that a person approves."""

    @pytest.fixture
    def jobs(self, root: Path) -> dict[str, Any]:
        whole = yaml.safe_load((root / ".github" / "workflows" / "release.yml").read_text())
        assert whole["permissions"] == {"contents": "read"}
        jobs = whole["jobs"]
        assert isinstance(jobs, dict)
        return jobs

    def test_order(self, jobs: dict[str, Any]) -> None:
        assert [jobs[name].get("needs") for name in ("build", "check", "publish", "announce")] == [
            None,
            "build",
            "check",
            "publish",
        ]
        assert {name for name, job in jobs.items() if job.get("environment")} == {"publish"}
        assert not any("run" in step for step in jobs["publish"]["steps"])  # what may upload runs no code of ours
        assert len(jobs["check"]["strategy"]["matrix"]["python"]) == 3

    def test_every_step_is_a_command_that_exists(self, jobs: dict[str, Any], root: Path) -> None:
        steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
        assert sum("tests.support.release" in step for step in steps) == 7
        assert not [step for step in steps if not known(step, root)]
        assert not known("python -m tests.support.release upload dist", root) and not known("make publish", root)

    def test_actions_are_pinned(self, root: Path) -> None:
        used = re.findall(r"uses: ([^./\s]\S*)", "\n".join(p.read_text() for p in (root / ".github").rglob("*.yml")))
        assert len(used) > 10 and all(re.fullmatch(r"[\w./-]+@(v\d+|release/v\d+)", name) for name in used)


def known(step: str, root: Path) -> bool:
    """Whether a step calls what this repository has, or another program."""
    words = shlex.split(step.partition(">")[0].replace('"$(', "").replace(')"', ""))
    for i, word in enumerate(words):
        if word == "tests.support.release" and words[i + 1] not in STEPS:
            return False
    return words[0] != "make" or f"\n{words[1]}:" in (root / "Makefile").read_text()


class TestContainer:
    """The container and the image run the two commands of README.md, and those alone."""

    def test_commands(self, root: Path) -> None:
        readme = (root / "README.md").read_text()
        assert all(f"\n    {command} " in readme for command in COMMANDS)
        assert image_runs((root / ".devcontainer" / "Dockerfile").read_text()) == COMMANDS
        container = json.loads((root / ".devcontainer" / "devcontainer.json").read_text())
        assert container["postCreateCommand"].split(" && ") == COMMANDS
        assert image_runs("FROM x\nRUN make verify\nRUN pip install .\n") != COMMANDS  # the negative test

    def test_the_image_ignores_what_git_ignores(self, root: Path) -> None:
        ignored = {line.strip("/") for line in (root / ".gitignore").read_text().splitlines()}
        wanted = {line.removeprefix("**/") for line in (root / ".dockerignore").read_text().splitlines()}
        assert wanted <= ignored


def image_runs(dockerfile: str) -> list[str]:
    return re.findall(r"^RUN (.+)$", dockerfile, re.MULTILINE)


class TestRoutes:
    """What a bare environment is asked for is what exists: the lines of README.md, the extras of both wheels."""

    def test_tools_are_the_lines_of_readme(self, root: Path) -> None:
        readme = (root / "README.md").read_text()
        assert all(f"`{line}`" in readme for line, _ in release.TOOLS)
        assert readme.count("`pipx ") + readme.count("`uvx ") == len(release.TOOLS)

    def test_every_extra_has_a_command(self, root: Path) -> None:
        tables = [tomllib.loads((root / name).read_text()) for name in ("pyproject.toml", "kernels/pyproject.toml")]
        extras = {extra for table in tables for extra in table["project"]["optional-dependencies"]}
        assert {*release.WORKS, release.ON_A_GPU} == extras

    def test_a_route_that_says_something_else_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With a program of the test in the place of uvx; one that fails is refused, too."""
        uvx = tmp_path / "uvx"
        uvx.write_text('#!/bin/sh\n[ "$1" = pipx ] && echo "$@" || echo nothing\n')
        uvx.chmod(0o755)
        monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
        said = (("pipx install fp8-oracle", "install fp8-oracle"), ("uvx fp8-oracle doctor", "fp8_oracle_kernels"))
        monkeypatch.setattr(release, "TOOLS", said)
        with pytest.raises(release.ReleaseError, match="uvx fp8-oracle doctor does not say 'fp8_oracle_kernels'"):
            release.tools(tmp_path)
        uvx.write_text("#!/bin/sh\nexit 3\n")
        with pytest.raises(release.ReleaseError, match="uvx pipx install fp8-oracle: 3"):
            release.tools(tmp_path)


class TestForms:
    """Issue forms, owners, updates and the citation are of the form that their readers take."""

    @pytest.mark.parametrize("name", ["wrong-verdict", "missing-routine", "finding"])
    def test_issue_form(self, root: Path, name: str) -> None:
        form = yaml.safe_load((root / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
        assert not wrong_form(form)
        del form["body"][0]["attributes"]["label"]
        assert wrong_form(form)

    def test_owners(self, root: Path) -> None:
        lines = (root / ".github" / "CODEOWNERS").read_text().splitlines()
        rules = [line.split() for line in lines if line and not line.startswith("#")]
        paths = [f"/{path.relative_to(root).as_posix()}{'/' * path.is_dir()}" for path in root.glob("*")]
        paths += [f"/{path.relative_to(root).as_posix()}/" for path in root.glob("oracle/*") if path.is_dir()]
        paths.append("/.github/")
        assert all(any(fnmatch(path, pattern) for path in paths) for pattern, *_ in rules)
        assert all(owner.startswith("@") for _, *owners in rules for owner in owners)

    def test_updates(self, root: Path) -> None:
        updates = yaml.safe_load((root / ".github" / "dependabot.yml").read_text())["updates"]
        folders = [folder for update in updates for folder in (update.get("directories") or [update["directory"]])]
        assert all(list(root.glob(folder.strip("/") or "pyproject.toml")) for folder in folders)
        assert {update["package-ecosystem"] for update in updates} == {"github-actions", "docker"}

    def test_citation(self, root: Path) -> None:
        citation = yaml.safe_load((root / "CITATION.cff").read_text())
        assert {"cff-version", "message", "title", "authors"} <= set(citation)
        assert citation["title"] == tomllib.loads((root / "pyproject.toml").read_text())["project"]["name"]
        assert "version" not in citation  # it stands in one place


def wrong_form(form: dict[str, Any]) -> list[str]:
    """What GitHub's schema of issue forms does not take."""
    wrong = [key for key in ("name", "description", "body") if not form.get(key)]
    ids = [field["id"] for field in form["body"]]
    wrong += [name for name in ids if ids.count(name) > 1 or not re.fullmatch(r"[\w-]+", name)]
    for field in form["body"]:
        wrong += [] if field["type"] in ("input", "textarea", "dropdown", "checkboxes") else [field["type"]]
        wrong += [] if field["attributes"].get("label") else [field["id"]]
        options = field["attributes"].get("options")
        wrong += [field["id"]] if (field["type"] in ("dropdown", "checkboxes")) != bool(options) else []
    return wrong


def test_the_packages_of_the_layer_are_its_folders(root: Path) -> None:
    declared = tomllib.loads((root / "kernels" / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = sorted(path.parent.relative_to(root / "kernels") for path in (root / "kernels").rglob("__init__.py"))
    assert sorted(declared) == sorted(".".join(["fp8_oracle_kernels", *folder.parts]) for folder in folders)


def test_pages_have_versions(root: Path) -> None:
    """`make pages` makes them, and the theme offers them."""
    assert "provider: mike" in (root / "mkdocs.yml").read_text()
    assert "mike deploy" in (root / "Makefile").read_text()
