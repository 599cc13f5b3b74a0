"""Puts all engines to sleep and wakes them up, at the paths that vLLM has for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any

import msgspec

from services.gateway.api.admin.operations import MemoryFields
from services.gateway.api.errors import RequestError, decode_body, not_allowed
from services.gateway.http.admin.coordinator_client import ask_coordinator
from services.gateway.http.admin.pauses import MODES, PauseEndpoints
from services.gateway.http.admin.query import query, query_list
from services.gateway.http.admin.waiting import until
from services.gateway.http.call import Call
from services.gateway.request_table import RequestTable
from shared.bus import Bus

CHANGE_TIMEOUT = 600.0
"""Seconds in which the engines must have fallen asleep, or serve again."""
LOOK_EVERY = 0.05
RETURN_SECONDS = 20.0
"""Within which there is an answer again: an engine's process may be a coordinator, too, which falls asleep with it."""
HEARD_SECONDS = 5.0
"""Within which an engine's word that it serves has come here."""
LEVELS = {"1": 1, "2": 2}
TAGS = frozenset({"weights", "kv_cache", "cuda_graph"})
"""What clients call parts of what a rank gives up; vLLM's know no graphs."""
_MEMORY = msgspec.json.Decoder(MemoryFields)


class SleepEndpoints:
    """Passes on to coordinators what is wanted, and waits until it is so."""

    def __init__(self, bus: Bus, table: RequestTable, pauses: PauseEndpoints) -> None:
        self._bus, self._table, self._pauses = bus, table, pauses

    async def sleep(self, call: Call) -> None:
        """vLLM's `/sleep`: engines rest as for `/pause`, prefix caches are reset, then ranks give up their memory.
        Answers once they have. Raises RequestError: 503 where an engine does not answer, 408 where it takes too
        long, 409 where it may not sleep: all go on then."""
        wanted = query(call, {"level": LEVELS, "mode": MODES})
        level = wanted.get("level", 1)
        await self._fall_asleep(wanted.get("mode", "abort"), level)
        await call.respond_json({"status": "sleeping", "level": level, "is_sleeping": True})

    async def wake_up(self, call: Call) -> None:
        """vLLM's `/wake_up`: answers once all engines serve again. Raises RequestError as `sleep` does, and 400 for a
        part of what a rank gave up: it gets back all."""
        tags = query_list(call, "tags")
        _check_all(tags)
        await self._awake()
        await call.respond_json({"status": "awake", "tags": tags or None, "is_sleeping": False})

    async def release_memory(self, call: Call) -> None:
        """SGLang's `/release_memory_occupation`: what runs ends before, as it wants an idle server."""
        await self._check_tags(call)
        await self._fall_asleep("wait", 1)
        await call.respond_json(None)

    async def resume_memory(self, call: Call) -> None:
        """SGLang's `/resume_memory_occupation`."""
        await self._check_tags(call)
        await self._awake()
        await call.respond_json(None)

    async def is_sleeping(self, call: Call) -> None:
        """vLLM's `/is_sleeping`: whether all engines are to; `instances` says it of each."""
        query(call, {})
        states: dict[str, Any] = (await ask_coordinator(self._bus, "sleeping", {}))["instances"]
        asleep = {instance: state["asleep"] is not None for instance, state in states.items()}
        await call.respond_json({"is_sleeping": all(asleep.values()), "instances": asleep})

    async def _check_tags(self, call: Call) -> None:
        body = await call.body()
        _check_all(decode_body(body, _MEMORY).tags or () if body.strip() else ())

    async def _fall_asleep(self, mode: str, level: int) -> None:
        await self._pauses.rest(mode, clear_cache=False)
        await ask_coordinator(self._bus, "reset_prefix_cache", {})
        try:
            told = await ask_coordinator(self._bus, "sleep", {"level": level})
        except RequestError:  # they do not rest for nothing
            await ask_coordinator(self._bus, "resume", {})
            raise
        await self._until_done(told)

    async def _awake(self) -> None:
        engines = await self._until_done(await ask_coordinator(self._bus, "wake_up", {}))
        await until(lambda: engines <= self._started(), HEARD_SECONDS)  # else it would refuse what comes at once

    def _started(self) -> set[str]:
        """The engines that this gateway has heard to be ready, or drained."""
        return {life.instance for life in self._table.cluster.engines() if life.phase != "starting"}

    async def _until_done(self, told: dict[str, Any]) -> set[str]:
        """The engines, once none is on its way."""
        answered, deadline = time.monotonic(), time.monotonic() + CHANGE_TIMEOUT
        while any(state["busy"] for state in told["instances"].values()):
            if time.monotonic() > deadline:
                raise RequestError(408, f"it is not done within {CHANGE_TIMEOUT:g} s, and goes on")
            await asyncio.sleep(LOOK_EVERY)
            try:
                told = await ask_coordinator(self._bus, "sleeping", {})
                answered = time.monotonic()
            except RequestError as error:
                if error.status != 503 or time.monotonic() - answered > RETURN_SECONDS:
                    raise
        return set(told["instances"])


def _check_all(tags: Collection[str]) -> None:
    """Raises RequestError 400 for a part of what ranks give up."""
    if tags and not TAGS >= set(tags) >= {"weights", "kv_cache"}:
        raise not_allowed("tags", ", ".join(tags), "allowed are none, or both of weights, kv_cache")
