"""Requests of other clusters' gateways that this one serves: opened here, and their output sent back."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from msgspec.structs import replace

from services.gateway.core.open_request import EmittedOutput
from services.gateway.core.remote_clusters import OwnCluster
from services.gateway.federation.topics import relayed_output
from services.gateway.request_table import RequestTable
from shared.bus import Bus, BusError
from shared.ids import FIRST_ATTEMPT, Attempt, ClusterName, DetokenizerId, GatewayId, RequestId, relay_id
from shared.messages.federation import ClusterRequest
from shared.messages.gateway import (
    Delta,
    Deltas,
    PooledDelta,
    PromptLogprobsDelta,
    RequestMessage,
    RequestPlaced,
    RequestRejected,
    StreamOpened,
)
from shared.messages.scheduler import Cancel, Probe, ProbeReply
from shared.messages.tokenizer import Tokenize
from shared.packing import unpack

log = logging.getLogger(__name__)

Peer = tuple[ClusterName, GatewayId]
"""A gateway of another cluster."""
Output = Delta | StreamOpened | PromptLogprobsDelta | PooledDelta | RequestRejected


class _Relayed(NamedTuple):
    peer: Peer
    request: RequestId
    attempt: Attempt
    """As its own gateway calls it."""


class _Batch:
    """Output for one gateway, in the order in which `Deltas` takes effect."""

    def __init__(self) -> None:
        self.opened: list[StreamOpened] = []
        self.scored: list[PromptLogprobsDelta] = []
        self.pooled: list[PooledDelta] = []
        self.deltas: list[Delta] = []
        self.rejected: list[RequestRejected] = []


class RelayedRequests:
    """Owns which requests of other clusters are open here, and the numbers of what was sent to their gateways.

    Here a request has another name, for each attempt a new one: a former attempt of it may still be open at another
    gateway of this cluster.
    """

    def __init__(self, own: OwnCluster, requests: RequestTable) -> None:
        self._own, self._requests = own, requests
        self._id = relay_id(own.name, own.gateway)
        self._open: dict[RequestId, _Relayed] = {}
        self._names: dict[RequestId, RequestId] = {}
        """The name here of each request, by its gateway's own."""
        self._numbers: dict[Peer, int] = {}
        self._batches: dict[Peer, _Batch] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def open(self, bus: Bus, forwarded: ClusterRequest, refusal: RequestRejected | None) -> None:
        """Serves a request, or answers with the refusal."""
        theirs = forwarded.tokenize
        peer = (forwarded.cluster, theirs.gateway)
        if refusal is not None:
            await self._publish(bus, peer, refusal)
            return
        await self._drop(self._names.get(theirs.request))
        ours = RequestId(f"{forwarded.cluster}/{theirs.request}/{theirs.attempt}")
        self._open[ours] = _Relayed(peer, theirs.request, theirs.attempt)
        self._names[theirs.request] = ours
        await self._publish(bus, peer, RequestPlaced(theirs.request, theirs.attempt, self._id, DetokenizerId(self._id)))
        log.info("taken for another cluster", extra={"request": ours, "cluster": forwarded.cluster})
        age = max(0.0, time.time() - theirs.arrival)
        emitted = EmittedOutput(FIRST_ATTEMPT, list(unpack(theirs.resume)), theirs.sent_chars, None, age)
        await self._requests.open_relayed(self._renamed(forwarded.cluster, theirs, ours), emitted)

    def _renamed(self, cluster: ClusterName, theirs: Tokenize, ours: RequestId) -> Tokenize:
        """As a request of this cluster. Its key and its salt are the other cluster's: here their names may be those of
        other people."""
        card = self._requests.cluster.model(theirs.model)
        return replace(
            theirs,
            request=ours,
            attempt=FIRST_ATTEMPT,
            gateway=self._own.gateway,
            resume=b"",
            sent_chars=0,
            avoid=(),
            key=theirs.key and f"{cluster}/{theirs.key}",
            cache_salt=None if theirs.cache_salt is None else f"{cluster}/{theirs.cache_salt}",
            keep=False,  # blocks are kept for this cluster's own clients
            kept=None,
            hears_held=True,
            max_model_len=None if card is None else self._requests.cluster.max_model_len(card),
        )

    async def cancel(self, cancel: Cancel) -> None:
        """Its gateway wants no more of it, up to this attempt."""
        ours = self._names.get(cancel.request)
        if ours is not None and self._open[ours].attempt <= cancel.attempt:
            await self._drop(ours)

    def answer(self, probe: Probe) -> ProbeReply:
        """Whether a request is open here, and how much of it was sent."""
        ours = self._names.get(probe.request)
        if ours is None or self._open[ours].attempt != probe.attempt:
            return ProbeReply("unknown", 0)
        return self._requests.state_of(ours)

    async def forget(self, peer: Peer) -> None:
        """A gateway of another cluster is gone: nobody reads what comes of its requests."""
        self._numbers.pop(peer, None)
        self._batches.pop(peer, None)
        for ours in [name for name, relayed in self._open.items() if relayed.peer == peer]:
            await self._drop(ours)

    async def give_back(self, reason: str) -> None:
        """Ends all that is open: each goes on elsewhere, if its gateway finds a place."""
        for ours, (_, request, attempt) in list(self._open.items()):
            self.record(_refusal(ours, attempt, reason))
            await self._requests.abandon([ours])
            log.info("given back", extra={"request": request, "reason": reason})

    async def _drop(self, ours: RequestId | None) -> None:
        if ours is not None and (relayed := self._open.pop(ours, None)) is not None:
            self._names.pop(relayed.request, None)
            await self._requests.abandon([ours])

    def record(self, output: Output) -> bool:
        """Takes what came of a request, for `flush`; False where it is none of another cluster."""
        relayed = self._open.get(output.request)
        if relayed is None:
            return False
        peer, request, attempt = relayed
        batch = self._batches.setdefault(peer, _Batch())
        ended = False
        match output:
            case Delta():
                batch.deltas.append(replace(output, request=request, attempt=attempt))
                ended = output.finish is not None
            case StreamOpened():
                batch.opened.append(replace(output, request=request, attempt=attempt, engine=self._id))
            case PromptLogprobsDelta():
                batch.scored.append(replace(output, request=request, attempt=attempt))
            case PooledDelta():
                batch.pooled.append(replace(output, request=request, attempt=attempt))
            case RequestRejected():
                batch.rejected.append(replace(output, request=request, attempt=attempt))
                ended = True
        if ended:
            del self._open[output.request]
            self._names.pop(request, None)
        return True

    async def flush(self, bus: Bus) -> None:
        """Sends what `record` has taken since, one message for each gateway, numbered: a loss on the link shows."""
        batches, self._batches = self._batches, {}
        for peer, batch in batches.items():
            if batch.opened or batch.scored or batch.pooled or batch.deltas:
                number = self._numbers.get(peer, 0)
                self._numbers[peer] = number + 1
                deltas = Deltas(
                    detokenizer=DetokenizerId(self._id),
                    epoch=self._own.incarnation,
                    number=number,
                    opened=tuple(batch.opened),
                    deltas=tuple(batch.deltas),
                    scored=tuple(batch.scored),
                    pooled=tuple(batch.pooled),
                )
                await self._publish(bus, peer, deltas)
            for rejected in batch.rejected:
                await self._publish(bus, peer, rejected)

    async def _publish(self, bus: Bus, peer: Peer, message: RequestMessage) -> None:
        try:
            await bus.publish(relayed_output(*peer), message)
        except BusError as error:  # the gap in the numbers shows it there
            log.warning("message not published", extra={"cluster": peer[0], "error": str(error)})


def _refusal(request: RequestId, attempt: Attempt, reason: str) -> RequestRejected:
    return RequestRejected(request=request, attempt=attempt, kind="unavailable", message=reason, retry_after=1.0)


def refusal_of(forwarded: ClusterRequest, kind: str, reason: str) -> RequestRejected:
    """The answer to a request that is not taken; its gateway tries another cluster."""
    theirs = forwarded.tokenize
    rejected = _refusal(theirs.request, theirs.attempt, reason)
    return replace(rejected, kind="overloaded") if kind == "overloaded" else rejected
