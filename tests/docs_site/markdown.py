"""Text of docstrings as text of a page."""

from __future__ import annotations


def one_line(text: str | None) -> str:
    """Without its line breaks."""
    return " ".join((text or "").split())


def cell(text: str) -> str:
    """In a cell of a table: one line, in which `|` divides nothing."""
    return one_line(text).replace("|", "\\|").replace("<", "&lt;") if "`" not in text else _with_code(text)


def _with_code(text: str) -> str:
    parts = one_line(text).replace("|", "\\|").split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))
