"""Sequences, loads and saves enter only states that may follow the present one, by their tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from services.scheduler.core.sequence import NEXT_PHASES, QueueKey, Sequence
from services.scheduler.core.transfer.loads import NEXT_LOAD_STATES
from services.scheduler.core.transfer.saves import NEXT_SAVE_STATES
from shared.messages.generation import Grammar
from shared.reliability.transitions import MAX_HISTORY, IllegalTransition, extend_history
from tests.support.engines.checking_worker import generate


def sequence(name: str, ticket: int, priority: int = 0, arrival: float = 0.0) -> Sequence:
    return Sequence(generate(name, [4]), QueueKey(priority, arrival, ticket), 10, frozenset(), 16)


def test_an_illegal_phase_raises_with_the_history() -> None:
    member = sequence("a", 1)
    member.move("prefilling")
    with pytest.raises(IllegalTransition, match="a: waiting → prefilling → returning"):
        member.move("returning")


def test_a_grammar_ends_a_sequence_before_min_tokens() -> None:
    """No stop token is drawn there but where nothing else may follow."""
    for grammar, finish in ((Grammar("regex", "ab"), "stop"), (None, None)):
        request = generate("a", [4], min_tokens=5, grammar=grammar)
        member = Sequence(request, QueueKey(0, 0.0, 1), 10, frozenset({7}), 16)
        assert (member.tokens.append(6), member.tokens.append(7)) == (None, finish)


TABLES = {"phases": NEXT_PHASES, "loads": NEXT_LOAD_STATES, "saves": NEXT_SAVE_STATES}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_names_every_state_and_each_can_end(table: Mapping[str, frozenset[str]]) -> None:
    states = table.keys()
    assert frozenset().union(*table.values()) <= states
    (last,) = (state for state in states if not table[state])
    reached = {last}
    while more := {state for state in states - reached if table[state] & reached}:
        reached |= more
    assert reached == states


def test_a_save_is_not_committed_before_slots_are_granted() -> None:
    with pytest.raises(IllegalTransition, match="save 7: reserving → committing"):
        extend_history(NEXT_SAVE_STATES, ["reserving"], "committing", "save 7")


def test_a_load_that_is_over_stays_over() -> None:
    history = extend_history(NEXT_LOAD_STATES, ["asked", "found"], "over", "load 3")
    with pytest.raises(IllegalTransition, match="load 3: asked → found → over → copying"):
        extend_history(NEXT_LOAD_STATES, history, "copying", "load 3")


def test_a_history_keeps_the_latest_phases() -> None:
    history = ["waiting"]
    for _ in range(MAX_HISTORY):
        for phase in ("prefilling", "waiting"):
            history = extend_history(NEXT_PHASES, history, phase, "r")
    assert history == ["prefilling", "waiting"] * (MAX_HISTORY // 2)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_the_documentation_shows_the_table(table: Mapping[str, frozenset[str]]) -> None:
    rows = [f"| {state} | {', '.join(sorted(after)) or 'nothing'} |" for state, after in table.items()]
    assert "\n".join(rows) in (Path(__file__).parents[3] / "docs" / "engine.md").read_text()
