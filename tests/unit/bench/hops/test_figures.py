"""What hops took, from messages that passed at known times."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.bench.hops.figures import (
    ClientTimes,
    Passage,
    followed,
    paired,
    request_hops,
    step_figures,
)
from services.bench.hops.recording import BusRecording, hop_of
from shared import topics
from shared.bus.memory_bus import MemoryBus
from shared.ids import (
    Attempt,
    Count,
    DetokenizerId,
    EngineId,
    GatewayId,
    Incarnation,
    InstanceId,
    ModelName,
    RequestId,
    SequenceId,
    TokenId,
)
from shared.messages.coordinator import Route
from shared.messages.detokenizer import NewTokens, TokenBatch
from shared.messages.gateway import Delta, Deltas
from shared.messages.generation import Generation, SamplingOptions, StopConditions
from shared.messages.scheduler import GenerateRequest, SampledTokens, StepFinished, StepTiming
from shared.messages.tokenizer import TextPrompt, Tokenize
from shared.messages.worker import SequenceWork, StepPlan

ENGINE, GATEWAY, DETOKENIZER = EngineId("engine-1"), GatewayId("gateway-1"), DetokenizerId("detokenizer-1")
EPOCH = Incarnation(5)
PROBE, OTHER = RequestId("probe"), RequestId("other")


def test_what_follows_is_found_by_number_although_one_overtakes_the_next() -> None:
    first = [Passage(float(n), n) for n in range(10)]
    second = [Passage(n + (1.2 if n == 3 else 0.2), n + 7) for n in range(10)]
    assert paired(first, second) == pytest.approx([0.2, 0.2, 0.2, 1.2, *[0.2] * 6])
    assert paired(first, []) == []


def test_a_result_is_followed_by_the_next_plan_unless_another_result_comes_first() -> None:
    assert followed([1.0, 2.0, 3.0], [0.5, 1.1, 3.5, 3.6]) == [(1.0, 1.1), (3.0, 3.5)]


@pytest.mark.parametrize(
    ("topic", "hop"),
    [
        (topics.tokenize(ModelName("a/b.c")), "tokenize"),
        (topics.route(), "route"),
        (topics.engine_requests(ENGINE), "generate"),
        (topics.engine_steps(ENGINE), "plan"),
        (topics.engine_results(ENGINE), "result"),
        (topics.detokenizer_tokens(DETOKENIZER), "tokens"),
        (topics.gateway_inbox(GATEWAY), "deltas"),
        (topics.lifecycle_of("gateway", InstanceId("gateway-1")), None),
        (topics.engine_control(ENGINE), None),
        (topics.withdrawals(), None),
    ],
)
def test_each_subject_belongs_to_its_hop(topic: topics.Topic[Any], hop: str | None) -> None:
    assert hop_of(topic.subject) == hop


class _Clock:
    """Passes a second with each message."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


async def _recorded(sent: list[tuple[topics.Topic[Any], Any]]) -> BusRecording:
    bus, recording = MemoryBus(), BusRecording(_Clock())
    await recording.listen(bus)
    recording.begin()
    for topic, message in sent:
        await bus.publish(topic, message)
        await asyncio.sleep(0)
    await bus.flush()
    recording.end()
    return recording


def _step(number: int, answer: float = 0.25) -> StepFinished:
    sampled = tuple(SampledTokens(SequenceId(each), (TokenId(7),)) for each in (1, 2))
    timing = StepTiming(wait=0.0, prepare=0.0, forward=0.0, sample=0.0, answer=answer)
    return StepFinished(epoch=EPOCH, step=number, sampled=sampled, timing=timing)


def _tokens(position: int, *requests: RequestId) -> TokenBatch:
    entries = tuple(NewTokens(request, Attempt(1), Count(position), (TokenId(7),)) for request in requests)
    return TokenBatch(engine=ENGINE, epoch=EPOCH, number=Count(position), entries=entries)


def _deltas(position: int, *requests: RequestId) -> Deltas:
    deltas = tuple(Delta(request, Attempt(1), Count(position), (TokenId(7),), "x") for request in requests)
    return Deltas(detokenizer=DETOKENIZER, epoch=EPOCH, number=Count(position), deltas=deltas)


async def test_a_steps_hops_are_those_of_the_probe() -> None:
    work = (SequenceWork(SequenceId(1), 1, b"", sample=True),)
    sent: list[tuple[topics.Topic[Any], Any]] = []
    for number in range(4):
        sent += [
            (topics.engine_results(ENGINE), _step(number)),
            (topics.engine_steps(ENGINE), StepPlan(epoch=EPOCH, step=number + 2, work=work)),
            (topics.detokenizer_tokens(DETOKENIZER), _tokens(30 + number, OTHER, PROBE)),
            (topics.gateway_inbox(GATEWAY), _deltas(30 + number, OTHER, PROBE)),
        ]
    recording = await _recorded(sent)
    frames = [(4.5 + 4 * number, 31 + number) for number in range(4)]
    steps = step_figures(recording, PROBE, frames)
    assert (steps.steps, steps.tokens, steps.seconds) == (4, 8, 12.0)
    assert {hop.name: hop.seconds for hop in steps.hops} == {
        "worker: end of the step → result": [0.25] * 4,
        "scheduler: result → next plan": [1.0] * 4,
        "scheduler: result → tokens": [2.0] * 4,
        "detokenizer: tokens → text": [1.0] * 4,
        "gateway: text → client": pytest.approx([0.5] * 4),
    }
    assert all(hop.bytes > 0 for hop in steps.hops if hop.actor != "gateway")
    assert steps.plan_and_result == [1.25] * 4
    with pytest.raises(ValueError, match="two steps"):
        step_figures(await _recorded(sent[:4]), PROBE, [])


async def test_a_requests_hops_are_followed_by_its_seed() -> None:
    sampling, stopping = SamplingOptions(seed=Count(99)), StopConditions(max_tokens=1)
    tokenize = Tokenize(
        request=PROBE,
        attempt=Attempt(1),
        gateway=GATEWAY,
        model=ModelName("m"),
        prompt=TextPrompt("hello"),
        sampling=sampling,
        stopping=stopping,
    )
    generation = Generation(
        request=PROBE,
        attempt=Attempt(1),
        gateway=GATEWAY,
        model=ModelName("m"),
        tokens=b"\1\0\0\0",
        prompt_length=Count(1),
        block_hashes=b"",
        sampling=sampling,
        stopping=stopping,
        arrival=0.0,
    )
    sent: list[tuple[topics.Topic[Any], Any]] = [
        (topics.tokenize(ModelName("m")), tokenize),
        (topics.route(), Route(generation)),
        (topics.engine_requests(ENGINE), GenerateRequest(generation, DETOKENIZER)),
        (topics.detokenizer_tokens(DETOKENIZER), _tokens(0, OTHER)),
        (topics.detokenizer_tokens(DETOKENIZER), _tokens(0, PROBE)),
        (topics.gateway_inbox(GATEWAY), _deltas(0, PROBE)),
    ]
    recording = await _recorded(sent)
    hops = request_hops(recording, {99: ClientTimes(sent=0.5, first=6.75)})
    assert [hop.seconds for hop in hops] == [[0.5], [1.0], [1.0], [2.0], [1.0], [0.75]]
    assert request_hops(recording, {98: ClientTimes(0.0, 0.0)})[0].seconds == []
