"""Small pieces of HTML that the sections of a page share: badges, counts, tables, cut messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from oracle.verdict.compare import Status

LONGEST = 1200  # characters of one message
TONES: Mapping[Status, str] = {
    Status.PASSED: "good",
    Status.FAILED: "bad",
    Status.CRASHED: "bad",
    Status.UNTESTED: "bad",
    Status.MISTRUSTED: "known",
    Status.UNSUPPORTED: "mute",
    Status.SKIPPED: "mute",
}
KNOWN = "KNOWN FAILURE"
# Every status has its sign, so that nothing is said by colour alone.
SIGNS: Mapping[str, str] = {
    "PASSED": "✓",
    "FAILED": "✗",
    "CRASHED": "✗",
    "UNTESTED": "?",
    "MISTRUSTED": "~",
    "UNSUPPORTED": "–",
    "SKIPPED": "–",
    KNOWN: "✗",
}


def badge(word: str, tone: str) -> str:
    """A status word with its sign and colour."""
    sign = f"{SIGNS[word]} " if word in SIGNS else ""
    return f'<span class="badge {tone}">{sign}{escape(word)}</span>'


def status_badge(status: Status, *, known: bool) -> str:
    """The badge of an outcome or a group."""
    return badge(KNOWN, "known") if known else badge(str(status), TONES[status])


def tone(name: str) -> str:
    """The colour class of a status, a count's name (``KNOWN``) or ``KNOWN FAILURE``."""
    return "known" if name in ("KNOWN", KNOWN) else TONES[Status(name)]


def table(head: Sequence[str], rows: Iterable[str], *, kind: str = "") -> str:
    """A table; a name in ``head`` that ends in ``#`` heads a column of numbers. ``rows`` are ``<tr>`` elements."""
    cells = "".join(
        f'<th scope="col"{" class=n" if name.endswith("#") else ""}>{escape(name.removesuffix("#"))}</th>'
        for name in head
    )
    return f'<table class="{kind}"><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def scrolling(content: str, said: str) -> str:
    """Content wider than a phone, in a box that scrolls and can be reached by keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(said)}">{content}</div>'


def section(name: str, title: str, content: str) -> str:
    """A section with its heading and anchor."""
    return f'<section id="{name}"><h2>{escape(title)}</h2>{content}</section>'


def count(n: int, noun: str, plural: str | None = None) -> str:
    """``1 case``, ``2 cases``."""
    return f"{n} {noun}" if n == 1 else f"{n} {plural or noun + 's'}"


def cut(text: str, longest: int = LONGEST) -> str:
    """A message, escaped, no longer than a page can bear."""
    shown = text if len(text) <= longest else f"{text[:longest]}… ({len(text) - longest} more characters)"
    return escape(shown)
