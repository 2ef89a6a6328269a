"""``[tool.fp8-oracle]`` of the nearest ``pyproject.toml``: defaults for flags.

``profile`` (a profile's name), ``fixtures`` (a folder, relative to that file, or ``"none"``), ``subjects`` (names,
``*`` and ``?`` match: the only ones that ``verify`` judges). A flag beats the environment, which beats the file.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from oracle.errors import OptionError, among
from oracle.fixtures.files import FOLDER_VARIABLE
from oracle.routines import profiles

TABLE = "tool.fp8-oracle"
KEYS = ("profile", "fixtures", "subjects")


@dataclass(frozen=True)
class Settings:
    """The values of the table; None and () where it has none."""

    profile: str | None = None
    fixtures: str | None = None
    subjects: tuple[str, ...] = ()
    source: Path | None = None


def load(start: Path | None = None) -> Settings:
    """The settings of the nearest ``pyproject.toml`` at or above ``start`` (the current folder) that has the table.

    Raises OptionError: the table has an unknown key or a value of another kind; or the file is not TOML.
    """
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        path = folder / "pyproject.toml"
        if path.is_file() and (table := _table(path)) is not None:
            return _checked(table, path)
    return Settings()


def install(parser: argparse.ArgumentParser, settings: Settings) -> None:
    """Make the settings the defaults of every command that has such a flag."""
    for command in commands_of(parser):
        flags = {action.dest for action in command._actions}  # argparse lists its flags nowhere else
        if settings.profile is not None and "profile" in flags:
            command.set_defaults(profile=settings.profile)
        if settings.fixtures is not None and "fixtures" in flags and not os.environ.get(FOLDER_VARIABLE):
            command.set_defaults(fixtures=settings.fixtures)
        if settings.subjects and "subject" in flags and "case" in flags:
            command.set_defaults(subjects=settings.subjects)


def commands_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Every subcommand's parser, however deep."""
    for action in parser._actions:  # argparse has no public way to walk subcommands
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command
                yield from commands_of(command)


def _table(path: Path) -> dict[str, object] | None:
    try:
        tools = tomllib.loads(path.read_text("utf-8")).get("tool")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OptionError(f"{path}: is not TOML ({error})") from None
    section = tools.get("fp8-oracle") if isinstance(tools, dict) else None
    if section is not None and not isinstance(section, dict):
        raise OptionError(f"{path}: {TABLE} is no table")
    return section


def _checked(table: dict[str, object], path: Path) -> Settings:
    if unknown := [key for key in table if key not in KEYS]:
        raise OptionError(f"{path}: [{TABLE}] has no setting {unknown[0]!r}; {among(unknown[0], KEYS)}")
    profile, fixtures, subjects = (table.get(key) for key in KEYS)
    if profile is not None and profile not in profiles.PROFILES:
        raise OptionError(f"{path}: [{TABLE}] profile={profile!r}; {among(profile, profiles.PROFILES)}")
    if fixtures is not None and not (isinstance(fixtures, str) and fixtures):
        raise OptionError(f'{path}: [{TABLE}] fixtures={fixtures!r} is no path; name a folder, or "none"')
    if subjects is not None and not (isinstance(subjects, list) and all(isinstance(s, str) and s for s in subjects)):
        raise OptionError(f"{path}: [{TABLE}] subjects={subjects!r} is no list of names")
    place = fixtures if fixtures in (None, "none") else str(path.parent / str(fixtures))
    return Settings(None if profile is None else str(profile), place, tuple(subjects or ()), path)
