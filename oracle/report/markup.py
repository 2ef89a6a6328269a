"""The HTML that every page is made of: the document with its styles and script, badges, counts, tables, cut messages.

A page is one file that needs nothing else: styles and script are inline, and a policy forbids the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files

from oracle.errors import counted as count
from oracle.report.outcome import KNOWN, printable

__all__ = ["SIGNS", "TONES", "badge", "count", "cut", "page", "scrolling", "section", "table", "theme_button"]

# Whatever a report quotes, the browser loads nothing: no script, style, font or picture from anywhere else.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"

LONGEST = 1200  # characters of one message
# Colour class and sign of every status word, so that nothing is said by colour alone.
_MARKS: Mapping[str, tuple[str, str]] = {
    "PASSED": ("good", "✓"),
    "FAILED": ("bad", "✗"),
    "CRASHED": ("bad", "✗"),
    "UNTESTED": ("bad", "?"),
    "MISTRUSTED": ("known", "~"),
    "UNSUPPORTED": ("mute", "–"),
    "SKIPPED": ("mute", "–"),
    KNOWN: ("known", "✗"),
}
SIGNS = {word: sign for word, (_, sign) in _MARKS.items()}
TONES = {word: tone for word, (tone, _) in _MARKS.items()} | {"KNOWN": "known"}  # KNOWN is the name of a count


def page(title: str, body: str) -> str:
    """A whole HTML document around ``body`` (trusted HTML; everything quoted in it must be escaped already).

    Control characters, which no document may hold, become ``?``.
    """
    assets = files("oracle.report") / "assets"
    style, script = ((assets / name).read_text("utf-8") for name in ("page.css", "page.js"))
    title, body = printable(title), printable(body)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n"
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


def theme_button() -> str:
    """The switch between the system's theme, light and dark."""
    return '<button type="button" id="theme" hidden>Theme: system</button>'


def badge(word: str) -> str:
    """A status word with its sign and colour; any other word is red, without a sign."""
    sign = f"{SIGNS[word]} " if word in SIGNS else ""
    return f'<span class="badge {TONES.get(word, "bad")}">{sign}{escape(word)}</span>'


def table(head: Sequence[str], rows: Iterable[str], *, kind: str = "") -> str:
    """A table; a name in ``head`` that ends in ``#`` heads a column of numbers. ``rows`` are ``<tr>`` elements."""
    cells = "".join(
        f'<th scope="col"{" class=n" if name.endswith("#") else ""}>{escape(name.removesuffix("#"))}</th>'
        for name in head
    )
    return f'<table class="{kind}"><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def scrolling(content: str, label: str) -> str:
    """Content wider than a phone, in a box that scrolls and can be reached by keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{content}</div>'


def section(name: str, title: str, content: str) -> str:
    """A section with its heading and anchor."""
    return f'<section id="{name}"><h2>{escape(title)}</h2>{content}</section>'


def cut(text: str, longest: int = LONGEST) -> str:
    """A message, escaped; at most ``longest`` of its characters."""
    shown = text if len(text) <= longest else f"{text[:longest]}… ({len(text) - longest} more characters)"
    return escape(shown)
