"""What a notebook shows of a record (``_repr_html_``): a title, a sentence and a small table. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def card(title: str, said: str, rows: Iterable[tuple[str, str]] = ()) -> str:
    """HTML without style, script or address, so that the notebook's own theme holds; empty rows are left out."""
    lines = [f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows if text]
    table = f"<table>{''.join(lines)}</table>" if lines else ""
    return f"<div><b>{escape(title)}</b> {escape(said)}{table}</div>"
