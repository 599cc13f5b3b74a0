"""What operators ask of every engine at once: to forget what is cached, to pause, to resume. JSON in and out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from services.coordinator.operator_requests import parse
from shared import topics
from shared.bus import Bus, BusError, Endpoint, EndpointError
from shared.ids import EngineId
from shared.messages.kv_events import PrefixCacheReset, ResetPrefixCache
from shared.messages.lifecycle import Lifecycle
from shared.messages.scheduler import (
    PauseGeneration,
    PauseMode,
    PauseState,
    ReadPauseState,
    ReadSleepState,
    ResumeGeneration,
    SleepEngine,
    SleepState,
    WakeEngine,
)
from shared.messages.worker import SleepLevel
from shared.registry import Registry
from shared.topics import Topic

ANSWER_SECONDS = 5.0
"""Within which each engine, or KV store, answers."""

R = TypeVar("R")


class ResetPrefixCacheRequest(Struct, forbid_unknown_fields=True):
    """The body of `admin.reset_prefix_cache`."""


class PauseRequest(Struct, forbid_unknown_fields=True):
    """The body of `admin.pause`."""

    mode: PauseMode


class ResumeRequest(Struct, forbid_unknown_fields=True):
    """The body of `admin.resume`."""


class PausedRequest(Struct, forbid_unknown_fields=True):
    """The body of `admin.paused`."""


class SleepRequest(Struct, forbid_unknown_fields=True):
    """The body of `admin.sleep`."""

    level: SleepLevel = 1


class WakeUpRequest(Struct, forbid_unknown_fields=True):
    """The body of `admin.wake_up`."""


class SleepingRequest(Struct, forbid_unknown_fields=True):
    """The body of `admin.sleeping`."""


class EngineAdmin:
    """Passes an operator's wish on to all engines that are known, and answers with what they say."""

    def __init__(self, bus: Bus, registry: Registry) -> None:
        self._bus = bus
        self._registry = registry

    def endpoints(self) -> dict[str, Endpoint]:
        """By subject, without the namespace. Each raises EndpointError for what it refuses, with an HTTP status."""
        return {
            f"{topics.ADMIN}.reset_prefix_cache": self.reset_prefix_cache,
            f"{topics.ADMIN}.pause": self.pause,
            f"{topics.ADMIN}.resume": self.resume,
            f"{topics.ADMIN}.paused": self.paused,
            f"{topics.ADMIN}.sleep": self.sleep,
            f"{topics.ADMIN}.wake_up": self.wake_up,
            f"{topics.ADMIN}.sleeping": self.sleeping,
        }

    async def reset_prefix_cache(self, body: bytes) -> bytes:
        """`{}` → `{"instances": {"engine-1": 42, "kvstore-1": 60}}`: how many blocks each has forgotten. What lies in
        lower tiers of KV stores and behind connectors is found again, and what open requests go on to compute."""
        parse(body, ResetPrefixCacheRequest)
        blocks: dict[str, int] = {}
        for service in ("scheduler", "kvstore"):  # engines first, as they save to stores
            lives = [life for life in self._registry.all(service) if life.engine is not None or life.store is not None]
            answers = await self._ask_all(lives, ResetPrefixCache(), PrefixCacheReset)
            blocks |= {instance: answer.blocks for instance, answer in answers.items()}
        return msgspec.json.encode({"instances": dict(sorted(blocks.items()))})

    async def pause(self, body: bytes) -> bytes:
        """`{"mode": "new"}`: no waiting request is begun; `{"mode": "all"}`: nothing is computed. Answers with
        `{"instances": {"engine-1": {"paused": "new", "busy": 3}}}`; `busy` is 0 once an engine rests."""
        return await self._pauses(PauseGeneration(parse(body, PauseRequest).mode))

    async def resume(self, body: bytes) -> bytes:
        """`{}`: all goes on. Answers as `pause` does."""
        parse(body, ResumeRequest)
        return await self._pauses(ResumeGeneration())

    async def paused(self, body: bytes) -> bytes:
        """`{}` → what `pause` answers, and nothing changes."""
        parse(body, PausedRequest)
        return await self._pauses(ReadPauseState())

    async def _pauses(self, question: PauseGeneration | ResumeGeneration | ReadPauseState) -> bytes:
        answers = await self._ask_all(self._engines(), question, PauseState)
        told = {instance: {"paused": state.mode, "busy": state.busy} for instance, state in sorted(answers.items())}
        return msgspec.json.encode({"instances": told})

    async def sleep(self, body: bytes) -> bytes:
        """`{"level": 1}`: ranks give up their memory; what is open waits elsewhere. Answers with
        `{"instances": {"engine-1": {"asleep": 1, "busy": 1}}}`; `busy` is 0 once all of an engine's ranks sleep."""
        return await self._sleeps(SleepEngine(parse(body, SleepRequest).level))

    async def wake_up(self, body: bytes) -> bytes:
        """`{}`: ranks load their models. Answers as `sleep` does; `busy` is 0 once an engine serves."""
        parse(body, WakeUpRequest)
        return await self._sleeps(WakeEngine())

    async def sleeping(self, body: bytes) -> bytes:
        """`{}` → what `sleep` answers, and nothing changes."""
        parse(body, SleepingRequest)
        return await self._sleeps(ReadSleepState())

    async def _sleeps(self, question: SleepEngine | WakeEngine | ReadSleepState) -> bytes:
        answers = await self._ask_all(self._engines(), question, SleepState)
        if refused := [state.refused for state in answers.values() if state.refused]:
            raise EndpointError(409, refused[0])
        told = {instance: {"asleep": state.level, "busy": state.busy} for instance, state in sorted(answers.items())}
        return msgspec.json.encode({"instances": told})

    def _engines(self) -> list[Lifecycle]:
        """Those without workers, too: what they are told holds when they have some. Raises EndpointError."""
        lives = list(self._registry.all("scheduler"))
        if not lives:
            raise EndpointError(503, "no engine is there")
        return lives

    async def _ask_all(self, lives: Iterable[Lifecycle], question: Any, reply: type[R]) -> dict[str, R]:
        """Their answers by instance. Raises EndpointError where one does not answer in time."""
        lives = list(lives)
        answers = await asyncio.gather(*(self._ask(life, question, reply) for life in lives))
        told = {life.instance: answer for life, answer in zip(lives, answers, strict=True)}
        if silent := sorted(instance for instance, answer in told.items() if answer is None):
            raise EndpointError(503, f"no answer of {', '.join(silent)} within {ANSWER_SECONDS:g} s")
        return {instance: answer for instance, answer in told.items() if answer is not None}

    async def _ask(self, life: Lifecycle, question: Any, reply: type[R]) -> R | None:
        """None: it does not answer."""
        topic: Topic[Any] = topics.engine_probes(EngineId(life.instance))
        if life.store is not None:
            topic = topics.kvstore_requests(life.store.node)
        try:
            answer: R = await self._bus.request(topic, question, reply, ANSWER_SECONDS)
        except BusError:
            return None
        return answer
