"""What operators do with engines and requests over HTTP, at the paths that vLLM and SGLang have for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any

import msgspec

from services.gateway.api.admin.operations import (
    AbortFields,
    DrainFields,
    ScaleFields,
    ScalePoolFields,
    StrikeFields,
    UndrainFields,
)
from services.gateway.api.errors import RequestError, abbreviated, decode_body, invalid, unsupported
from services.gateway.http.admin.coordinator_client import ask_coordinator
from services.gateway.http.admin.query import SWITCH, query, query_list
from services.gateway.http.admin.waiting import until
from services.gateway.http.call import Call
from services.gateway.peers import GatewayPeers
from services.gateway.request_table import RequestTable
from shared import topics
from shared.bus import Bus
from shared.messages.encoder import ForgetRows
from shared.messages.tokenizer import ReadTokenizerInfo, TokenizerInfo
from shared.packing import to_plain

log = logging.getLogger(__name__)

_DRAIN, _UNDRAIN = msgspec.json.Decoder(DrainFields), msgspec.json.Decoder(UndrainFields)
_STRIKE = msgspec.json.Decoder(StrikeFields)
_SCALE_POOL = msgspec.json.Decoder(ScalePoolFields)
_ABORT, _SCALE = msgspec.json.Decoder(AbortFields), msgspec.json.Decoder(ScaleFields)


class FleetEndpoints:
    """Passes on what operators want: to coordinators, and to all gateways that share the port."""

    def __init__(self, bus: Bus, table: RequestTable, peers: GatewayPeers, version: str) -> None:
        self._bus, self._table, self._peers, self._version = bus, table, peers, version
        self._scaling = False

    async def reset_prefix_cache(self, call: Call) -> None:
        """`/reset_prefix_cache` of vLLM and `/flush_cache` of SGLang: no engine finds again what it has computed until
        now. Raises RequestError: 400 for what vLLM could do besides, 503 where an engine does not answer."""
        options = query(call, {"reset_running_requests": SWITCH, "reset_external": SWITCH})
        for name, wanted in options.items():
            if wanted:
                raise unsupported(name, "more than the engines' own prefix caches")
        done = await ask_coordinator(self._bus, "reset_prefix_cache", {})
        await call.respond_json({"success": True, **done})  # the former is vLLM's

    async def reset_encoder_cache(self, call: Call) -> None:
        """`/reset_mm_cache` and `/reset_encoder_cache` of vLLM: encoders find none of the images, sounds or prompts
        again that they have encoded until now. As there, nobody waits for it."""
        query(call, {})
        for card in self._table.cluster.models():
            await self._bus.publish(topics.rows_leases(card.name), ForgetRows())
        await call.respond(b"")

    async def tokenizer_info(self, call: Call) -> None:
        """`/tokenizer_info`: what the files of a model's tokenizer say; `model` in the query where there are several.
        Raises RequestError."""
        cards = [card for card in self._table.cluster.models() if call.key.allows_model(card.name)]
        names = query_list(call, "model") or [card.name for card in cards][: 2 if len(cards) > 1 else 1]
        if len(names) != 1:
            raise invalid("model", f"one is needed in the query; allowed are {', '.join(card.name for card in cards)}")
        card = next((each for each in cards if names[0] in (each.name, *each.aliases)), None)
        if card is None:
            message = f"The model `{abbreviated(names[0])[1:-1]}` does not exist."
            raise RequestError(404, message, param="model", code="model_not_found")
        found = await self._table.tokenizer.ask(card, ReadTokenizerInfo(), TokenizerInfo)
        await call.respond(found.info)

    async def abort_requests(self, call: Call) -> None:
        """`/abort_requests`: these responses end with what their clients have, and the finish reason `abort`."""
        body = await call.body()
        wanted: Collection[str] | None = decode_body(body, _ABORT).request_ids if body.strip() else None
        await self._abort(call, frozenset(wanted) if wanted else None)

    async def abort_named(self, call: Call) -> None:
        """`/inference/v1/abort_requests`: the same, of which ids must be given."""
        fields = decode_body(await call.body(), _ABORT)
        if not fields.request_ids:
            raise invalid("request_ids", "this field is required, and must name a request")
        await self._abort(call, frozenset(fields.request_ids))

    async def _abort(self, call: Call, wanted: frozenset[str] | None) -> None:
        here, elsewhere = await asyncio.gather(self._table.abort(wanted), self._peers.abort(wanted))
        aborted = sorted((*here, *elsewhere))  # clients may have given one id to several, and each is one
        log.info("requests aborted", extra={"count": len(aborted)})
        await call.respond_json({"status": "aborted", "aborted": len(aborted), "request_ids": aborted})

    async def scale(self, call: Call) -> None:
        """`/scale_elastic_ep`: so many engines, in one group where they share experts. Answers once they are ready.
        Raises RequestError: 409 while another such request is under way, or where the supervisor refuses; 408 where it
        takes too long."""
        wanted = decode_body(await call.body(), _SCALE)
        if self._scaling:
            raise RequestError(409, "the number of engines is being changed already")
        self._scaling = True
        try:
            size, cluster = wanted.new_data_parallel_size, self._table.cluster
            change = await ask_coordinator(self._bus, "scale", {"service": "engines", "count": size, "one_group": True})
            leaving = frozenset((*change["stopping"], *change["superseded"]))

            def done() -> bool:
                ready = {life.instance for life in cluster.engines() if life.phase == "ready"}
                return len(ready) == size and not ready & leaving

            if not await until(done, wanted.drain_timeout):
                raise RequestError(408, f"it is not done within {wanted.drain_timeout:g} s, and goes on")
        finally:
            self._scaling = False
        await call.respond_json({"message": f"Scaled to {wanted.new_data_parallel_size} data parallel engines"})

    async def drain(self, call: Call) -> None:
        """`/admin/drain`, as `baton drain`. Raises RequestError: 404 for an instance that is not known, 409 where it is
        the last of its kind."""
        await self._pass_on(call, "drain", _DRAIN)

    async def undrain(self, call: Call) -> None:
        """`/admin/undrain`, as `baton undrain`. Raises RequestError."""
        await self._pass_on(call, "undrain", _UNDRAIN)

    async def scale_pool(self, call: Call) -> None:
        """`/admin/scale`, as `baton scale`: answers what is started and stopped for it, without waiting for these.
        Raises RequestError."""
        await self._pass_on(call, "scale", _SCALE_POOL)

    async def strike(self, call: Call) -> None:
        """`/admin/strike`: a process is killed, or stands still for a while, to see what follows. Raises RequestError:
        404 where the host has no such process."""
        await self._pass_on(call, "strike", _STRIKE)

    async def prefixes(self, call: Call) -> None:
        """`/console/prefixes`: the top of the tree of the prompts that a coordinator placed last, and who holds what of
        it. Raises RequestError 503."""
        await call.respond_json(await ask_coordinator(self._bus, "prefixes", {}))

    async def _pass_on(self, call: Call, operation: str, decoder: msgspec.json.Decoder[Any]) -> None:
        fields = msgspec.structs.asdict(decode_body(await call.body(), decoder))
        answer = await ask_coordinator(self._bus, operation, fields)
        log.info("operated", extra={"operation": operation, **fields})
        await call.respond_json(answer)

    async def is_scaling(self, call: Call) -> None:
        """`/is_scaling_elastic_ep`: whether `scale` is under way here."""
        await call.respond_json({"is_scaling_elastic_ep": self._scaling})

    async def server_info(self, call: Call) -> None:
        """`/server_info`: the version, the models, and what each engine said last."""
        cluster = self._table.cluster
        engines = {
            life.instance: {"phase": life.phase, "host": life.host, **to_plain(life.engine)}
            for life in cluster.engines()
        }
        models = [to_plain(card) for card in cluster.models()]
        await call.respond_json({"version": self._version, "models": models, "engines": engines})
