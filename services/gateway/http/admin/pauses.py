"""Pauses and resumes what all engines generate, at the paths that vLLM and SGLang have for it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import msgspec

from services.gateway.api.admin.operations import ContinueFields, PauseFields
from services.gateway.api.errors import RequestError, decode_body, not_allowed
from services.gateway.http.admin.coordinator_client import ask_coordinator
from services.gateway.http.admin.query import SWITCH, query
from services.gateway.http.call import Call
from services.gateway.peers import GatewayPeers
from services.gateway.request_table import RequestTable
from shared.bus import Bus

log = logging.getLogger(__name__)

REST_TIMEOUT = 600.0
"""Seconds in which the engines must have come to rest."""
LOOK_EVERY = 0.05
SGLANGS_MODES = {"abort": "abort", "in_place": "keep"}
MODES = {mode: mode for mode in ("abort", "wait", "keep")}
_PAUSE, _CONTINUE = msgspec.json.Decoder(PauseFields), msgspec.json.Decoder(ContinueFields)


class PauseEndpoints:
    """Passes on that engines are to rest: to coordinators, and to all gateways what is aborted."""

    def __init__(self, bus: Bus, table: RequestTable, peers: GatewayPeers) -> None:
        self._bus, self._table, self._peers = bus, table, peers

    async def pause(self, call: Call) -> None:
        """vLLM's `/pause`: answers once the engines rest. Raises RequestError: 503 where one does not answer, 408 where
        they do not come to rest in time."""
        wanted = query(call, {"mode": MODES, "wait_for_inflight_requests": SWITCH, "clear_cache": SWITCH})
        mode = "wait" if wanted.get("wait_for_inflight_requests") else wanted.get("mode", "abort")
        await self.rest(mode, clear_cache=wanted.get("clear_cache", True))
        await call.respond_json({"status": "paused"})

    async def resume(self, call: Call) -> None:
        """vLLM's `/resume`: all goes on."""
        query(call, {})
        await ask_coordinator(self._bus, "resume", {})
        await call.respond_json({"status": "resumed"})

    async def is_paused(self, call: Call) -> None:
        """vLLM's `/is_paused`: whether all engines are; `instances` says it of each."""
        query(call, {})
        states: dict[str, Any] = (await ask_coordinator(self._bus, "paused", {}))["instances"]
        paused = {instance: state["paused"] is not None for instance, state in states.items()}
        await call.respond_json({"is_paused": all(paused.values()), "instances": paused})

    async def pause_generation(self, call: Call) -> None:
        """SGLang's `/pause_generation`; no cache is cleared."""
        body = await call.body()
        mode = decode_body(body, _PAUSE).mode if body.strip() else "abort"
        if mode not in SGLANGS_MODES:
            raise not_allowed("mode", mode, ", ".join(SGLANGS_MODES))
        await self.rest(SGLANGS_MODES[mode], clear_cache=False)
        await call.respond_json({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, call: Call) -> None:
        """SGLang's `/continue_generation`."""
        body = await call.body()
        if body.strip():
            decode_body(body, _CONTINUE)
        await ask_coordinator(self._bus, "resume", {})
        await call.respond_json({"message": "Generation continued successfully.", "status": "ok"})

    async def rest(self, mode: str, *, clear_cache: bool) -> None:
        """Returns once no engine computes anything. abort: what is open ends with what it has. wait: what runs goes on
        to its end. keep: it stops where it is. Raises RequestError."""
        told = await ask_coordinator(self._bus, "pause", {"mode": "all" if mode == "keep" else "new"})
        if mode == "abort":
            here, elsewhere = await asyncio.gather(self._table.abort(None), self._peers.abort(None))
            log.info("requests aborted for a pause", extra={"count": len({*here, *elsewhere})})
        deadline = time.monotonic() + REST_TIMEOUT
        while any(state["busy"] for state in told["instances"].values()):
            if time.monotonic() > deadline:
                raise RequestError(408, f"engines are paused, and still at work after {REST_TIMEOUT:g} s")
            await asyncio.sleep(LOOK_EVERY)
            told = await ask_coordinator(self._bus, "paused", {})
        if clear_cache and mode != "keep":
            await ask_coordinator(self._bus, "reset_prefix_cache", {})
