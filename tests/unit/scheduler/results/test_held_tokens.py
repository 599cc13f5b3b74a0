"""Tokens of several steps that are sent together (`Generation.stream_interval`)."""

from __future__ import annotations

from msgspec.structs import replace

from services.scheduler.core.events import TimePassed
from shared.ids import Attempt, RequestId
from shared.messages.generation import TokenLogprobs
from shared.messages.scheduler import Cancel, GenerateRequest
from tests.support.engines.checking_worker import continuation, generate
from tests.support.engines.single_engine import PROMPT, Ring, abandoned

OTHER = PROMPT[::-1]


def paced(request: str, prompt: list[int], interval: int, **stopping: object) -> GenerateRequest:
    made = generate(request, prompt, ignore_eos=True, **stopping)  # type: ignore[arg-type]
    return replace(made, generation=replace(made.generation, stream_interval=interval))


def test_the_first_token_comes_at_once_the_others_together_and_the_rest_with_the_last() -> None:
    ring = Ring()
    ring.send(paced("a", PROMPT, 4, max_tokens=11))
    ring.finish()
    sent = [(entry.position, len(entry.tokens), entry.finish) for entry in ring.entries]
    assert sent == [(0, 1, None), (1, 3, None), (4, 4, None), (8, 3, "length")]
    assert ring.output_of("a") == continuation(PROMPT, 11)


def test_streams_of_an_interval_share_their_messages_whenever_they_began_and_others_do_not_wait() -> None:
    ring = Ring()
    ring.send(paced("a", PROMPT, 4, max_tokens=20))
    ring.step()
    ring.step()
    ring.send(paced("b", OTHER, 4, max_tokens=17))
    ring.send(generate("c", PROMPT[:9], ignore_eos=True, max_tokens=15))
    messages: list[set[str]] = []
    while ring.plans:
        before = len(ring.entries)
        ring.step()
        messages.append({entry.request for entry in ring.entries[before:]})
    assert {"a", "b", "c"} in messages
    assert sum("a" in message and "b" not in message for message in messages[2:]) <= 1, "but for the last of each"
    assert [len(entry.tokens) for entry in ring.entries if entry.request == "c"] == [1] * 15
    for request, prompt, count in (("a", PROMPT, 20), ("b", OTHER, 17), ("c", PROMPT[:9], 15)):
        assert ring.output_of(request) == continuation(prompt, count)


def test_slow_steps_hold_nothing_back_for_long() -> None:
    ring = Ring()
    ring.send(paced("a", PROMPT, 1024, max_tokens=20))
    ring.step()
    ring.step()
    assert ring.output_of("a") == continuation(PROMPT, 1)
    assert ring.engine.probe(RequestId("a"), Attempt(1)).produced == 1, "what nobody was sent is nothing that is missed"
    ring.now += 0.5
    ring.send(TimePassed())
    assert ring.output_of("a") == continuation(PROMPT, 2)
    ring.now += 0.5
    ring.step()
    ring.now += 0.5
    ring.step()
    assert ring.output_of("a") == continuation(PROMPT, 4)[: len(ring.output_of("a"))]
    assert len(ring.output_of("a")) >= 3


def test_what_was_held_back_of_a_request_that_is_called_off_is_never_sent() -> None:
    ring = Ring()
    ring.send(paced("a", PROMPT, 1024, max_tokens=200))
    ring.step()
    ring.step()
    outputs = ring.send(Cancel(RequestId("a"), Attempt(1)))
    assert [each.request for each in abandoned(outputs)] == ["a"]
    ring.now += 0.5
    ring.send(TimePassed())
    ring.finish()
    assert ring.output_of("a") == continuation(PROMPT, 1)


def test_with_stop_strings_each_token_is_sent_at_once() -> None:
    ring = Ring()
    ring.send(paced("a", PROMPT, 8, max_tokens=9, stop=("x",)))
    ring.finish()
    assert [len(entry.tokens) for entry in ring.entries] == [1] * 9


def test_log_probabilities_are_sent_with_their_tokens() -> None:
    ring = Ring()
    made = paced("a", PROMPT, 4, max_tokens=9)
    ring.send(made)
    while ring.plans:
        result = ring.worker.step(ring.plans.pop(0))
        sampled = tuple(
            replace(each, logprobs=tuple(TokenLogprobs(token, -1.0, ()) for token in each.tokens))
            for each in result.sampled
        )
        ring.send(replace(result, sampled=sampled))
    assert max(len(entry.tokens) for entry in ring.entries) == 4
    for entry in ring.entries:
        assert entry.logprobs is not None
        assert tuple(each.token for each in entry.logprobs) == entry.tokens
