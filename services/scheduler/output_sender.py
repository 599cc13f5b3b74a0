"""Sends what the core decides: to ranks, detokenizers, gateways, KV stores, connectors and other engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import assert_never

from services.scheduler.connector_host import ConnectorHost
from services.scheduler.core.events import (
    ConnectorLookUp,
    ConnectorReport,
    ConnectorRequestFinished,
    EndProcess,
    Event,
    ForwardControl,
    HandOverRefused,
    Output,
    ReleaseLease,
    SendHandOver,
    SendPlan,
    SendPrefetch,
    SendStoreRequest,
    SendToGateway,
    SendTokens,
)
from services.scheduler.request_log import RequestLog
from services.scheduler.store_requests import StoreRequests
from shared import topics
from shared.bus import Bus, PayloadTooLarge
from shared.ids import EngineId, NodeId


class EngineWedged(Exception):
    """A step did not end in time. Every request was failed; the process ends, and its supervisor starts a new one."""


class OutputSender:
    """Knows where each output goes. What cannot be sent comes back to the core as an event."""

    def __init__(
        self,
        bus: Bus,
        engine: EngineId,
        node: NodeId | None,
        store: StoreRequests | None,
        connector: ConnectorHost | None,
        log: RequestLog,
        decide: Callable[[Event], Awaitable[None]],
    ) -> None:
        self._bus, self._engine, self._node = bus, engine, node
        self._store, self._connector = store, connector
        self._log, self._decide = log, decide

    async def send(self, output: Output) -> None:
        """Sends one output. Raises EngineWedged where that is to end the process."""
        match output:
            case SendPlan(plan):
                if plan.connector is not None and self._connector is not None:
                    plan = await self._connector.complete(plan)
                # It has left when the tokens behind it are encoded: a device may wait for it.
                await self._bus.publish(topics.engine_steps(self._engine), plan, confirm=True)
                self._log.planned(plan)
            case SendTokens(detokenizer, batch):
                self._log.sent(batch)
                await self._bus.publish(topics.detokenizer_tokens(detokenizer), batch, confirm=True)
            case SendToGateway(gateway, message):
                self._log.answered(message)
                await self._bus.publish(topics.gateway_inbox(gateway), message, confirm=True)
            case ConnectorLookUp() | ConnectorRequestFinished() | ConnectorReport():
                assert self._connector is not None, "only with a connector there is anything to ask"
                self._connector.take(output)
            case SendStoreRequest() | ReleaseLease() | SendHandOver() | SendPrefetch() | ForwardControl():
                await self._send_elsewhere(output)
            case EndProcess(reason):
                await self._bus.flush()
                raise EngineWedged(reason)
            case _:
                assert_never(output)

    async def _send_elsewhere(
        self, output: SendStoreRequest | ReleaseLease | SendHandOver | SendPrefetch | ForwardControl
    ) -> None:
        """To KV stores, and to other engines."""
        node = self._node
        match output:
            case SendStoreRequest():
                assert self._store is not None, "only with a node there is a store to ask"
                self._store.send(output)
            case ReleaseLease(release):
                assert node is not None, "only with a node there are leases"
                await self._bus.publish(topics.kvstore_releases(node), release)
            case SendHandOver():
                self._log.handed_over(output)
                await self._send_hand_over(output)
            case SendPrefetch(other, prefetch):
                await self._bus.publish(topics.kvstore_prefetches(other), prefetch)
            case ForwardControl(engine, message):
                await self._bus.publish(topics.engine_control(engine), message)
            case _:
                assert_never(output)

    async def _send_hand_over(self, output: SendHandOver) -> None:
        try:
            await self._bus.publish(topics.engine_requests(output.engine), output.generate, confirm=True)
        except PayloadTooLarge:
            await self._decide(HandOverRefused(output.generate, output.engine))
