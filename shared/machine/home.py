"""Homes of users, which `~` in a path stands for."""

from __future__ import annotations

from pathlib import Path


class NoHome(ValueError):
    """A path begins with `~`, and there is nothing that this could stand for."""


def expanded(path: str | Path) -> Path:
    """The path with its `~` or `~USER` replaced. Raises NoHome."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        why = "there is no home that ~ could stand for (no HOME, no line in /etc/passwd)"
        raise NoHome(f"{str(path)!r}: {why}; allowed: a path without it, or HOME=DIR") from None
