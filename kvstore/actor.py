"""The store's shell: requests in, replies and events out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from kvstore import metrics
from kvstore.arena.directory import StoreDirectory
from kvstore.node.background import BackgroundSpill, MemoryPreparation
from kvstore.node.lower_search import FindOutcome, LowerTierSearch
from kvstore.node.node_store import NodeStore
from kvstore.tiers.interface import LowerTier, PeerStores
from kvstore.tiers.tier_chain import TierChain
from shared import topics
from shared.actor import Actor, Tick, TopicSubscription
from shared.bus import Bus
from shared.ids import InstanceId, NodeId
from shared.kv_events.publisher import KvEventPublisher
from shared.messages.kv_events import KvDumpRequest, PrefixCacheReset, ResetPrefixCache
from shared.messages.kvstore import (
    Attach,
    Commit,
    Find,
    FindAny,
    KvStoreReply,
    LeaseOwner,
    Prefetch,
    Release,
    Reserve,
)
from shared.messages.lifecycle import HeartbeatInterval, Lifecycle, StoreReport
from shared.registry import InstanceGone, Registry

CHECK_SECONDS, CHECK_EVERY = 0.002, 0.01
"""For how long, and how often, found blocks are compared with their checksums: no request waits longer."""


class KvStoreActor(Actor):
    """Owns a `NodeStore`, and with it the arenas of one node. There is one on each node."""

    service = "kvstore"
    tick_every = 0.5

    def __init__(
        self,
        bus: Bus,
        instance: InstanceId,
        node: NodeId,
        directory: StoreDirectory,
        *,
        memory: int,
        lease_seconds: float = 10.0,
        tiers: Sequence[LowerTier] = (),
        peers: PeerStores | None = None,
        copy_bandwidth: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(bus, instance)
        announced_as = (instance, node, self.incarnation)
        chain = TierChain(tiers) if tiers else None
        self.store = NodeStore(
            directory, memory, lease_seconds, announced_as, tier=chain, bandwidth=copy_bandwidth, clock=clock
        )
        self._kv = KvEventPublisher(bus, instance, self.store.announcer)
        self._search = LowerTierSearch(self.store, tiers, peers)
        self._tiers = tiers
        self._peers = peers
        self._memory = MemoryPreparation(self.store)
        self._spill = None if chain is None else BackgroundSpill(self.store, chain)
        self._owners = Registry(lease_seconds)
        """Schedulers. One that is only slow keeps its leases until they run out; that it died is announced."""
        self._stores = Registry()

    def subscriptions(self) -> Sequence[TopicSubscription[Any]]:
        """Requests of schedulers, their releases and prefetches, dump requests of coordinators, and the lifecycles of
        lease owners and peers."""
        return [
            TopicSubscription(topics.kvstore_requests(self.store.node), intake=True, request=True),
            TopicSubscription(topics.kvstore_releases(self.store.node)),
            TopicSubscription(topics.kvstore_prefetches(self.store.node)),
            TopicSubscription(topics.kv_dump_requests(self.instance)),
            TopicSubscription(topics.lifecycles("scheduler")),
            TopicSubscription(topics.lifecycles("kvstore")),
        ]

    async def set_up(self) -> None:
        """Takes over the arenas that a former store left in the directory."""
        self.store.recover()

    async def background(self) -> None:
        """Compares blocks found at the start with their checksums between requests; runs searches and tiers."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._kv.run())
            tasks.create_task(self._search.run())
            tasks.create_task(self._memory.run())
            if self._spill is not None:
                tasks.create_task(self._spill.run())
            while self.store.check_some(CHECK_SECONDS):
                await asyncio.sleep(CHECK_EVERY)

    async def respond(self, request: Any) -> KvStoreReply | PrefixCacheReset | asyncio.Future[FindOutcome]:
        """The reply to one request; a future where lower tiers or other nodes are searched for a `Find`."""
        with metrics.SECONDS.labels(type(request).__name__.lower()).time():
            answer = self._answer(request)
        self._record_changes()
        return answer

    def _answer(self, request: Any) -> KvStoreReply | PrefixCacheReset | asyncio.Future[FindOutcome]:
        match request:
            case Find():
                return self._search.find(request)
            case FindAny():
                return self.store.find_any(request)
            case Reserve():
                self._memory.request(request.layout)
                return self.store.reserve(request)
            case Commit():
                return self.store.commit(request)
            case Attach():
                return self.store.attach(request)
            case ResetPrefixCache():
                return self.store.reset()
            case _:
                raise TypeError(f"a store does not reply to {type(request).__name__}")

    async def handle(self, message: Any) -> None:
        """Handles a release, a prefetch, a lifecycle, a dump request or a tick; events that come of it follow."""
        match message:
            case Release():
                self._search.released(message)
                self.store.release(message)
            case Prefetch():
                self._search.prefetch(message)
            case Lifecycle():
                self._record_lifecycle(message)
            case KvDumpRequest():
                self._kv.request_dump(message)
            case Tick():
                self._time_passed(message)
            case _:
                raise TypeError(f"a store handles no {type(message).__name__}")
        self._record_changes()

    def _record_lifecycle(self, message: Lifecycle) -> None:
        others = self._owners if message.service == "scheduler" else self._stores
        gone = others.record_lifecycle(message, self.bus.liveness_now())
        if gone is not None:
            self._forget(gone)
        if self._peers is not None:
            self._peers.record_lifecycle(message)

    def _time_passed(self, tick: Tick) -> None:
        for gone in (*self._owners.expire(tick.alive_now), *self._stores.expire(tick.alive_now)):
            self._forget(gone)
        self.store.time_passed()
        metrics.set_gauges(
            self.store.report(), leases=len(self.store.core.leases), memory=self.store.core.budget.memory
        )

    def _forget(self, gone: InstanceGone) -> None:
        if gone.last.service == "scheduler":
            owner = LeaseOwner(gone.last.instance, gone.last.incarnation)
            self._search.owner_gone(owner)
            self.store.owner_gone(owner)
        elif self._peers is not None:
            self._peers.gone(gone.last)

    def set_interval(self, interval: HeartbeatInterval) -> None:
        """As `Actor` has it: changes of blocks are gathered for as long as the fleet's size asks for."""
        self._kv.set_interval(interval)

    def _record_changes(self) -> None:
        if self.store.announcer.pending:
            self._kv.record_change()

    async def tear_down(self) -> None:
        """Gives up the directory; the arenas stay there for the next store."""
        self.store.close()

    def is_idle(self) -> bool:
        """Whether no search of lower tiers is under way. A prefetch need not end: its request can do without."""
        return not self._search.running

    def load(self) -> int:
        """Searches of lower tiers that are under way."""
        return self._search.running

    def store_report(self) -> StoreReport:
        """Slots, bytes and hits for the lifecycle, with the tiers and the address where other nodes fetch blocks."""
        report = replace(self.store.report(), tiers=tuple(tier.report() for tier in self._tiers))
        if (peers := self._peers) is None:
            return report
        return replace(report, transfer=peers.address, links=peers.links(), endpoints=peers.endpoints)
