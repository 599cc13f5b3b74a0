"""What was placed a moment ago counts until a report or an event must show it, and no longer."""

from __future__ import annotations

import pytest

from services.coordinator.core import reservations
from services.coordinator.core.reservations import (
    EXPECT_SECONDS,
    NO_WORK,
    ExpectedPrompts,
    PromptPrefix,
    Reservations,
    ReservedWork,
)
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.ids import EngineId, InstanceId, ModelName
from tests.support.engines.coordinator_events import route

A, B = InstanceId("a"), InstanceId("b")


def prefix(number: int, blocks: int = 3) -> PromptPrefix:
    return PromptPrefix(ModelName("m"), number.to_bytes(16), blocks)


@pytest.fixture
def placed() -> Reservations:
    return Reservations(settle=0.1)


def test_placements_add_up_by_instance_and_ones_own_are_known_from_those_of_others(placed: Reservations) -> None:
    placed.add(A, 1.0, prefill=3, blocks=5)
    placed.add(A, 1.0, own=False, blocks=2)
    placed.add(B, 1.0)
    assert placed.on(A) == ReservedWork(requests=2, own=1, prefill=3, blocks=7)
    assert placed.on(B) == ReservedWork(requests=1, own=1)
    assert placed.on(InstanceId("c")) == NO_WORK


def test_a_report_counts_what_had_time_to_get_there(placed: Reservations) -> None:
    placed.add(A, 1.0, prefill=3, blocks=5)
    placed.add(A, 1.0, blocks=7, delay=1.0)
    placed.add(B, 1.0)
    placed.reported(A, 1.05)
    assert placed.on(A).requests == 2, "the report may have crossed both"
    placed.reported(A, 1.2)
    assert placed.on(A) == ReservedWork(requests=1, own=1, blocks=7), "the hand-over is still on its way"
    placed.reported(A, 2.2)
    assert (placed.on(A), placed.on(B).requests) == (NO_WORK, 1)


def test_what_was_placed_on_an_instance_that_is_gone_is_forgotten(placed: Reservations) -> None:
    placed.add(A, 1.0)
    placed.forget(A)
    placed.reported(A, 9.0)
    assert placed.on(A) == NO_WORK


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 0), (BLOCK_SIZE, 0), (BLOCK_SIZE + 1, 1), (3 * BLOCK_SIZE, 2)])
def test_a_prefix_leaves_out_a_block_that_ends_with_the_last_token(tokens: int, blocks: int) -> None:
    generation = route("r", prompt=tokens).generation
    found = PromptPrefix.of(generation, 16)
    assert found.blocks == blocks
    assert found.last_block == (generation.block_hashes[16 * (blocks - 1) : 16 * blocks] if blocks else b"")


def test_a_prompt_is_expected_for_a_moment_at_the_engine_that_got_it_last() -> None:
    expected = ExpectedPrompts()
    expected.add(prefix(1), EngineId("a"), 0.0)
    expected.add(prefix(1), EngineId("b"), 1.0)
    assert expected.engine_for(prefix(1), 1.0 + EXPECT_SECONDS - 0.01) == "b"
    assert expected.engine_for(prefix(1), 1.0 + EXPECT_SECONDS) is None
    assert expected.engine_for(prefix(2), 1.0) is None


def test_prompts_without_a_full_block_are_not_expected_and_their_number_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reservations, "MAX_PROMPTS", 2)
    expected = ExpectedPrompts()
    expected.add(prefix(0, blocks=0), EngineId("a"), 0.0)
    assert expected.engine_for(prefix(0, blocks=0), 0.0) is None
    for number in (1, 2, 1, 3):
        expected.add(prefix(number), EngineId("a"), 0.0)
    assert [number for number in (1, 2, 3) if expected.engine_for(prefix(number), 0.0)] == [1, 3]
