"""A state that may not follow the present one is refused, and the refusal tells how it came to it."""

from __future__ import annotations

from typing import Literal

import pytest

from shared.reliability.transitions import MAX_HISTORY, IllegalTransition, extend_history

Light = Literal["red", "green", "broken"]
TABLE: dict[Light, frozenset[Light]] = {
    "red": frozenset({"green", "broken"}),
    "green": frozenset({"red", "broken"}),
    "broken": frozenset(),
}


def test_a_step_of_the_table_is_added_to_the_history() -> None:
    history: list[Light] = ["red"]
    assert extend_history(TABLE, history, "green", "light") == ["red", "green"]
    assert history == ["red"]


def test_any_other_step_is_raised_with_the_history() -> None:
    with pytest.raises(IllegalTransition, match="light 7: red → broken → green"):
        extend_history(TABLE, ["red", "broken"], "green", "light 7")
    with pytest.raises(IllegalTransition, match="red → red"):
        extend_history(TABLE, ["red"], "red", "light")


def test_only_the_last_states_are_kept() -> None:
    history: list[Light] = ["red"]
    for _ in range(40):
        history = extend_history(TABLE, history, "green" if history[-1] == "red" else "red", "light")
    assert len(history) == MAX_HISTORY
    assert history[-1] == "red"
