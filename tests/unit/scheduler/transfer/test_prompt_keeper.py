"""A prompt is kept for a later request: what the store holds, what the gateway is told, and what ends it."""

from __future__ import annotations

from msgspec.structs import replace

from services.scheduler.core.events import ForwardControl, StoreGone, TimePassed, WorkersLost
from shared.ids import EngineId, RequestId
from shared.messages.gateway import PromptKept
from shared.messages.generation import KeptPrompt
from shared.messages.kvstore import KEEP_SECONDS
from shared.messages.scheduler import GenerateRequest, ReleaseKept
from tests.support.engines.checking_worker import generate, right_output
from tests.support.engines.engines_and_store import NODE, EnginesAndStore

PROMPT = [5 + i % 17 for i in range(37)]


def first(prompt: list[int] = PROMPT, **more: object) -> GenerateRequest:
    """What has the prompt computed."""
    asked = generate("first", prompt, **{"max_tokens": 1, "ignore_eos": True, **more})  # type: ignore[arg-type]
    return GenerateRequest(replace(asked.generation, keep=True), asked.detokenizer)


def second(prompt: list[int] = PROMPT) -> GenerateRequest:
    """What goes on from there."""
    asked = generate("second", prompt, max_tokens=8, ignore_eos=True)
    kept = KeptPrompt(EngineId("p"), RequestId("first"), NODE)
    return GenerateRequest(replace(asked.generation, kept=kept), asked.detokenizer)


def outcome(engines: EnginesAndStore) -> PromptKept:
    (kept,) = [message for message in engines.told if isinstance(message, PromptKept)]
    return kept


def computed(engines: EnginesAndStore, name: str) -> int:
    return sum(work.count for plan in engines[name].sent_plans for work in plan.work)


def test_another_engine_goes_on_from_what_is_kept_and_then_it_is_kept_no_more() -> None:
    engines = EnginesAndStore("p", "d")
    asked = first()
    engines["p"].send(asked)
    engines.settle()
    kept = outcome(engines)
    assert (kept.request, kept.blocks, kept.tokens, kept.engine, kept.node) == ("first", 2, 32, "p", NODE)
    assert (kept.ranks, kept.stages) == (1, 1)
    assert engines.stream("first").finish == "length"
    (pinned,) = engines.store.pinned.values()
    for number in range(len(engines.store.slots)):
        engines.store.evict(number)
    assert all(engines.store.slots[number].committed for number in pinned), "what is kept is not evicted"
    later = second()
    engines["d"].send(later)
    engines.settle()
    assert engines.stream("second").tokens == right_output(later, 256)[0]
    assert engines.stream("second").cached_tokens == 32
    assert computed(engines, "d") == len(PROMPT) - 32 + 7, "the rest of the prompt, and what was drawn"
    assert ForwardControl(EngineId("p"), ReleaseKept(RequestId("first"))) in engines["d"].outputs
    engines.check_nothing_is_held()


def test_what_nobody_uses_is_kept_for_its_time_only() -> None:
    engines = EnginesAndStore("p")
    engines["p"].send(first())
    engines.settle()
    assert outcome(engines).blocks == 2
    engines.now += KEEP_SECONDS - 1
    engines["p"].send(TimePassed())
    assert engines.store.pinned
    engines.now += 2
    engines["p"].send(TimePassed())
    engines.check_nothing_is_held()


def test_the_gateway_is_told_that_nothing_is_kept() -> None:
    short, uncached = first(PROMPT[:15]), first(prefix_caching=False)
    for asked in (short, uncached):
        engines = EnginesAndStore("p")
        engines["p"].send(asked)
        engines.settle()
        assert (outcome(engines).blocks, outcome(engines).node) == (0, None)
        engines.check_nothing_is_held()
    engines = EnginesAndStore("p")
    engines["p"].send(StoreGone())
    engines["p"].send(first())
    engines.settle()
    assert outcome(engines).blocks == 0


def test_a_full_store_keeps_nothing() -> None:
    engines = EnginesAndStore("p", slots=1)
    engines["p"].send(first())
    engines.settle()
    assert outcome(engines).blocks == 0
    engines.check_nothing_is_held()


def test_workers_that_are_lost_while_it_is_saved_or_behind_that() -> None:
    engines = EnginesAndStore("p")
    engines["p"].send(first())
    engines.until(lambda: ("first", 1) in engines.streams and engines.stream("first").finish is not None)
    engines["p"].send(WorkersLost("died"))
    assert outcome(engines).blocks == 0
    engines = EnginesAndStore("p")
    engines["p"].send(first())
    engines.settle()
    engines["p"].send(WorkersLost("died"))
    assert not engines.store.pinned


def test_a_request_that_names_what_is_not_kept_is_computed() -> None:
    engines = EnginesAndStore("p", "d")
    asked = second()
    engines["d"].send(asked)
    engines.settle()
    assert engines.stream("second").tokens == right_output(asked, 256)[0]
    engines.check_nothing_is_held()
