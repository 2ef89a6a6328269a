"""One HTML file that needs nothing else: styles and script inline, a policy that forbids the network."""

from __future__ import annotations

import re
from html import escape
from importlib.resources import files

# Whatever a report quotes, the browser loads nothing: no script, style, font or picture from anywhere else.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def page(title: str, body: str) -> str:
    """A whole HTML document around ``body`` (trusted HTML; everything quoted in it must be escaped already).

    Control characters, which no document may hold, become ``?``.
    """
    style, script = (asset(name) for name in ("page.css", "page.js"))
    title, body = (_CONTROL.sub("?", text) for text in (title, body))
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


def asset(name: str) -> str:
    """The text of a file in ``oracle/report/assets``."""
    return files("oracle.report").joinpath("assets", name).read_text("utf-8")
