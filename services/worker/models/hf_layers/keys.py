"""Keys of `config.json` that files call by several names. No torch."""

from __future__ import annotations

from typing import TypeVar

_Value = TypeVar("_Value")


def first_given(*values: _Value | None) -> _Value:
    """The first that is not None, as the last one is: of a key by its names, in their order, then by default."""
    return next(value for value in values if value is not None)
