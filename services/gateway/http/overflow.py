"""Requests that cannot be served here in time: when the provider is asked, and how its answer gets to the client."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

from services.gateway.api.errors import RequestError
from services.gateway.api.forwarding import ForwardedRequest, read_forwarded
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.response import GenerationResponse
from services.gateway.core.cluster import ClusterView
from services.gateway.core.overflow import FirstTokenDelays, NotForwardable
from services.gateway.core.remote_clusters import RemoteClusters
from services.gateway.http.access import AccessControl
from services.gateway.http.call import Call
from services.gateway.http.streaming import DONE, error_frame
from services.gateway.overflow_provider import (
    HOP_HEADER,
    OverflowCause,
    OverflowOutcome,
    OverflowProvider,
    ProviderAnswer,
    ProviderError,
)
from shared.ids import ModelName

SERVED_BY = b"x-baton-served-by"
"""Header of every answer that is the provider's."""
OVERFLOW_HEADERS = ((SERVED_BY, b"overflow"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))

Kind = Literal["chat", "completion"]


class Overflow:
    """Decides for each call whether the provider is asked: once at most, and never behind what was sent to the client.
    Owns how long requests wait here; the budget is the provider's."""

    def __init__(
        self,
        provider: OverflowProvider,
        cluster: ClusterView,
        access: AccessControl,
        read_timeout: float,
        others: RemoteClusters | None = None,
    ) -> None:
        """`read_timeout`: seconds that a client may take to read what it was sent. `others`: clusters that come before
        the provider, as they have the same model."""
        self._provider, self._cluster, self._access = provider, cluster, access
        self._read_timeout = read_timeout
        self._others = others
        self._wait = provider.settings.wait
        self._delays = FirstTokenDelays(self._wait)

    async def in_place_of(self, call: Call, kind: Kind, error: RequestError) -> bool:
        """The request was refused here with `error`: answers it from the provider. False where that is not possible, or
        another server could not do better. Raises RequestError for what the client may not have at all."""
        if not error.elsewhere or call.asked_elsewhere:
            return False
        return await self._answer(call, kind, "full" if error.status == 429 else "unavailable")

    async def ahead_of(self, call: Call, kind: Kind, generation: GenerationRequest) -> bool:
        """Answers a request from the provider that would wait here for too long. False where it has to wait, or another
        cluster takes it."""
        lora = None if generation.lora is None else generation.lora.id
        if self._others is not None and self._others.has_room(generation.model.name, lora):
            return False
        if self._delays.predicted(generation.served_name, time.monotonic()) <= self._wait:
            return False
        return await self._answer(call, kind, "slow")

    async def beside(self, call: Call, kind: Kind, response: GenerationResponse) -> ProviderAnswer | None:
        """Waits for the response's first token. Where it does not come in time the provider is asked, too; returns its
        answer if that begins first, for `relay`. Otherwise None, and the response has begun or ended."""
        model, now = ModelName(response.header.model), time.monotonic()
        self._delays.record_arrival(response, model, now)
        try:
            async with asyncio.timeout(None if call.asked_elsewhere else self._wait):
                await asyncio.shield(response.begun)
            return None
        except TimeoutError:
            answer = await self._race(call, kind, response)
            if answer is None:
                await asyncio.shield(response.begun)
            return answer
        finally:
            started = response.first_token_at is not None
            self._delays.record_end_of_wait(response, model, time.monotonic(), started=started)

    async def _race(self, call: Call, kind: Kind, response: GenerationResponse) -> ProviderAnswer | None:
        request = await self._forwarded(call, kind, "slow")
        if request is None:
            return None
        asked = asyncio.create_task(self._provider.ask(request, "slow"))
        try:
            await asyncio.wait((asked, response.begun), return_when=asyncio.FIRST_COMPLETED)
            if response.error is not None:  # it will not be served here: the provider is what is left
                await asyncio.wait((asked,))
            if not asked.done():
                return None
            answer = asked.result()
            if answer is not None and response.begun.done() and response.error is None:
                await answer.close("not needed")
                return None
            return answer
        finally:
            if not asked.done():
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)

    async def _answer(self, call: Call, kind: Kind, cause: OverflowCause) -> bool:
        request = await self._forwarded(call, kind, cause)
        answer = None if request is None else await self._ask_while_there(call, request, cause)
        if answer is None:
            return False
        await self.relay(call, answer)
        return True

    async def _ask_while_there(
        self, call: Call, request: ForwardedRequest, cause: OverflowCause
    ) -> ProviderAnswer | None:
        """Asks as long as the client is there: nobody pays for what nobody reads."""
        asked, connection = asyncio.create_task(self._provider.ask(request, cause)), call.connection

        def give_up() -> None:
            asked.cancel()

        connection.on_lost = give_up
        if connection.is_closing():
            asked.cancel()
        try:
            await asyncio.wait((asked,))
            return None if asked.cancelled() else asked.result()
        finally:
            asked.cancel()
            connection.on_lost = None

    async def _forwarded(self, call: Call, kind: Kind, cause: OverflowCause) -> ForwardedRequest | None:
        """What the provider would be asked; None where it is not to be. Raises RequestError."""
        if call.asked_elsewhere or HOP_HEADER in call.headers or not self._provider.usable:
            return None
        call.asked_elsewhere = True
        settings, began = self._provider.settings, time.monotonic()
        served = [card.name for card in self._cluster.models()]
        try:
            own_name = self._cluster.counted_as
            request = read_forwarded(await call.body(), kind, settings.dialect, settings.models, served, own_name)
        except NotForwardable as error:
            self._provider.record(cause, "not forwardable", None, began, why=str(error))
            return None
        names = (ModelName(request.model), ModelName(own_name(request.model)))
        self._access.admit_elsewhere(call, names, request.expected_tokens)
        return request

    async def relay(self, call: Call, answer: ProviderAnswer) -> None:
        """Sends the provider's answer to the client, and closes it."""
        outcome: OverflowOutcome = "served"
        why: str | None = None
        connection = call.connection
        connection.on_lost = answer.abort
        if connection.is_closing():
            answer.abort()
        call.record.model = ModelName(answer.request.model)
        try:
            await call.start(200, answer.content_type, OVERFLOW_HEADERS)
            try:
                async for data in answer.parts():
                    await self._send(call, data)
            except ProviderError as error:
                outcome, why = "broken off", str(error)
                if not connection.is_closing():
                    text = "the provider that this request was passed on to broke off its answer"
                    await self._send(call, error_frame(RequestError(503, text)) + DONE)
            await self._send(call, b"", last=True)
        except TimeoutError:
            outcome, why = "client left", "it did not read"
            connection.abort()
        finally:
            connection.on_lost = None
            if connection.is_closing():
                outcome = "client left"
            await answer.close(outcome, why, request=call.id, client_request=call.client_id)
            call.record.outcome = "overflowed" if outcome == "served" else "failed"
            call.record.prompt_tokens = max(0, answer.usage.prompt_tokens)
            call.record.output_tokens = max(0, answer.usage.completion_tokens)

    async def _send(self, call: Call, data: bytes, *, last: bool = False) -> None:
        """Sends a piece, once the client has read most of what came before. Raises TimeoutError."""
        if data or last:
            async with asyncio.timeout(self._read_timeout):
                await call.send({"type": "http.response.body", "body": data, "more_body": not last})
