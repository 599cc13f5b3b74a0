"""The state machine of an open request: its table, what it refuses, and its page in the documentation."""

from __future__ import annotations

import pytest

from services.gateway.core.open_request import TRANSITIONS, OpenRequest, choice_requests
from shared.ids import Attempt, EngineId, GatewayId, ModelName, RequestId
from shared.messages.generation import SamplingOptions, StopConditions
from shared.messages.tokenizer import TextPrompt, Tokenize
from shared.reliability.transitions import IllegalTransition
from tests.support.paths import REPOSITORY


def opened() -> OpenRequest:
    tokenize = Tokenize(
        request=RequestId("r"),
        attempt=Attempt(1),
        gateway=GatewayId("g"),
        model=ModelName("m"),
        prompt=TextPrompt("p"),
        sampling=SamplingOptions(seed=0),
        stopping=StopConditions(),
        arrival=0.0,
    )
    return OpenRequest(tokenize, 0.0, 0.0, 0.0)


def test_an_illegal_step_raises_with_the_history() -> None:
    request = opened()
    request.apply("queue")
    request.apply("place")
    with pytest.raises(IllegalTransition) as raised:
        request.apply("queue")
    text = str(raised.value)
    assert "queue is not allowed while placed" in text
    assert "dispatched --queue--> queued (attempt 1); queued --place--> placed (attempt 1)" in text
    assert request.state == "placed"


def test_the_history_is_bounded() -> None:
    request = opened()
    for _ in range(100):
        request.apply("dispatch")
    assert request.history.maxlen == len(request.history) < 100


def test_nothing_follows_the_end() -> None:
    request = opened()
    request.place(EngineId("e"), None, 1.0)
    request.apply("end")
    for event in ("queue", "place", "pause", "dispatch", "end"):
        with pytest.raises(IllegalTransition):
            request.apply(event)


def test_every_state_can_be_reached_and_left() -> None:
    reachable = {target for steps in TRANSITIONS.values() for target in steps.values()}
    assert reachable == set(TRANSITIONS)
    assert [state for state, steps in TRANSITIONS.items() if not steps] == ["ended"]


def test_the_documentation_shows_the_table() -> None:
    events = ("queue", "place", "pause", "dispatch", "end")
    rows = [f"| state | {' | '.join(events)} |", "|---" * (len(events) + 1) + "|"]
    for state, steps in TRANSITIONS.items():
        rows.append(f"| {state} | {' | '.join(steps.get(event, '–') for event in events)} |")
    assert "\n".join(rows) + "\n" in (REPOSITORY / "docs" / "requests.md").read_text()


def test_a_choice_has_a_request_of_its_own() -> None:
    assert choice_requests("s", 1) == ["s"]
    assert choice_requests("s", 2) == ["s-0", "s-1"]
