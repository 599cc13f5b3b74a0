"""State machines as tables: which state may follow which, checked at each step. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

MAX_HISTORY = 16
"""States that are kept for the text of `IllegalTransition`."""

State = TypeVar("State", bound=str)


class IllegalTransition(Exception):
    """A state that may not follow the present one, which is a bug. The text names the subject and its last states."""


def extend_history(
    table: Mapping[State, frozenset[State]], history: list[State], state: State, subject: str
) -> list[State]:
    """The last states of `subject` with `state` added, as `table` allows it. Raises IllegalTransition."""
    if state not in table[history[-1]]:
        raise IllegalTransition(f"{subject}: {' → '.join([*history, state])}")
    return [*history[1 - MAX_HISTORY :], state]
