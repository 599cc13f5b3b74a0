"""Exception groups, as task groups raise them."""

from __future__ import annotations


def innermost(error: BaseException) -> BaseException:
    """The first exception inside nested exception groups; `error` itself where it is no group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
