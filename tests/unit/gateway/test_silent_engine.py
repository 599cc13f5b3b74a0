"""How soon it is noticed that an engine has died without a word, on virtual time: by those who wait for its tokens, and
by those who only hear that it lives."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from msgspec.structs import replace

from services.coordinator.core.fleet_heartbeat import interval_for
from services.gateway.actor import Gateway
from services.gateway.core.effects import DispatchAttempt, Effect, ProbeEngine
from services.gateway.core.open_request import NoAnswer, RetryPolicy
from services.gateway.core.supervisor import RequestSupervisor
from services.gateway.engine_prober import PROBE_TIMEOUT, EngineProber
from shared import topics
from shared.bus.memory_bus import MemoryBus
from shared.ids import Attempt, DetokenizerId, EngineId, GatewayId, Incarnation, InstanceId, ModelName, RequestId
from shared.messages.gateway import Delta, Deltas, RequestPlaced, StreamOpened
from shared.messages.generation import SamplingOptions, StopConditions
from shared.messages.lifecycle import KEEP_ALIVE_SECONDS, Lifecycle
from shared.messages.scheduler import Probe, ProbeReply
from shared.messages.tokenizer import TextPrompt, Tokenize
from shared.registry import Registry
from tests.support.virtual_time import VirtualTimeLoop

R, ENGINE, DETOKENIZER = RequestId("r"), EngineId("engine-1"), DetokenizerId("detokenizer-1")
DIES_AT = 100.0
LIFE = Lifecycle(
    service="scheduler",
    instance=InstanceId(ENGINE),
    incarnation=Incarnation(1),
    phase="ready",
    pid=1,
    host="h",
    started=0.0,
)
Death = Literal["its process is gone", "it hangs, or its host is gone"]


class GatewayOnVirtualTime:
    """The real supervision and probes of one request of a dead engine, and a registry that hears lifecycles."""

    def __init__(self, keep_alive: float) -> None:
        self.bus = MemoryBus(liveness=asyncio.get_running_loop().time)
        self.prober = EngineProber(self._ask, self._answered)
        self.supervisor = RequestSupervisor(RetryPolicy())
        self.registry = Registry()
        self.retried_at: float | None = None
        self.gone_at: float | None = None
        self._life = replace(LIFE, keep_alive=keep_alive)

    async def run(self, death: Death) -> None:
        if death == "it hangs, or its host is gone":
            await self.bus.serve(topics.engine_probes(ENGINE), _never_answer)
        probing = asyncio.create_task(self.prober.run())
        self.registry.record_lifecycle(self._life, DIES_AT)
        self._stream_until_death()
        await asyncio.sleep(DIES_AT)
        while self.gone_at is None or self.retried_at is None:
            await asyncio.sleep(Gateway.tick_every or 0.0)
            now = asyncio.get_running_loop().time()
            self._act(self.supervisor.tick(now), now)
            if self.registry.expire(now) and self.gone_at is None:
                self.gone_at = now
        probing.cancel()

    def _stream_until_death(self) -> None:
        """The last lifecycle and the last token come at the same moment."""
        tokenize = Tokenize(
            request=R,
            attempt=Attempt(1),
            gateway=GatewayId("gateway-1"),
            model=ModelName("m"),
            prompt=TextPrompt("hi"),
            sampling=SamplingOptions(seed=7),
            stopping=StopConditions(),
        )
        self.supervisor.open(tokenize, DIES_AT)
        self.supervisor.handle(RequestPlaced(R, Attempt(1), ENGINE, DETOKENIZER), DIES_AT)
        opened, delta = StreamOpened(R, Attempt(1), 1, 0), Delta(R, Attempt(1), 0, (5,), "five")
        told = Deltas(detokenizer=DETOKENIZER, epoch=Incarnation(1), number=0, opened=(opened,), deltas=(delta,))
        self.supervisor.handle(told, DIES_AT)

    def _act(self, effects: list[Effect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, ProbeEngine):
                self.prober.probe(effect)
            elif isinstance(effect, DispatchAttempt) and self.retried_at is None:
                assert effect.tokenize.attempt == 2
                assert effect.tokenize.avoid == (ENGINE,)
                self.retried_at = now

    async def _ask(self, probe: ProbeEngine) -> ProbeReply:
        reply: ProbeReply = await self.bus.request(
            topics.engine_probes(probe.engine), probe.probe, ProbeReply, PROBE_TIMEOUT
        )
        return reply

    async def _answered(self, sent: ProbeEngine, reply: ProbeReply | NoAnswer) -> None:
        now = asyncio.get_running_loop().time()
        self._act(self.supervisor.record_probe_reply(sent.probe.request, sent.probe.attempt, reply, now), now)


async def _never_answer(_: Probe) -> ProbeReply:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize(("death", "within"), [("its process is gone", 3.0), ("it hangs, or its host is gone", 6.5)])
@pytest.mark.parametrize(("engines", "gone"), [(4, 2.0), (128, 2.0), (1024, 16.0)])
def test_who_waits_for_an_engine_learns_of_its_death_as_soon_in_a_fleet_of_any_size(
    engines: int, gone: float, death: Death, within: float
) -> None:
    keep_alive = interval_for(engines, budget=128.0)
    assert keep_alive == max(KEEP_ALIVE_SECONDS, engines / 128)

    async def story() -> GatewayOnVirtualTime:
        gateway = GatewayOnVirtualTime(keep_alive)
        await gateway.run(death)
        return gateway

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        gateway = runner.run(story())
    assert gateway.gone_at is not None
    assert gone <= gateway.gone_at - DIES_AT <= gone + 0.5, "by those who only hear that it lives"
    assert gateway.retried_at is not None
    assert 2.0 < gateway.retried_at - DIES_AT <= within, "by its probe"
