"""What task groups raise."""

from __future__ import annotations


def innermost(error: BaseException) -> BaseException:
    """What a task group's error began with."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
