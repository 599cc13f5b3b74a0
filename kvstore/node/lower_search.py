"""Searches beyond the arena: blocks that are not there are fetched from each lower tier, then from another node.

Fetched blocks are put into the arena like written ones, and are pinned under the request's lease. The deadline is the
request's: blocks that have not arrived by then count as a miss, and those that have arrived stay in the arena.

A prefetch does the same for a request that has not come yet: its blocks are still being computed on the other node, and
each comes as soon as it is committed there. The request itself then waits only for what is still on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from kvstore import metrics
from kvstore.arena.in_flight_block import BlockShape, InFlightBlock
from kvstore.node.incoming_slots import IncomingSlots
from kvstore.node.node_store import MAX_BLOCKS, NodeStore
from kvstore.node.packed_slots import split_whole_hashes
from kvstore.tiers.interface import LowerTier, PeerStores
from kvstore.transfer.interface import BlockRequest
from shared.blocks import HASH_BYTES, BlockHash, split_hashes
from shared.ids import LeaseId, NodeId
from shared.messages.kvstore import Find, FindReply, KvStoreRefusal, LeaseOwner, Prefetch, Release
from shared.reliability.retry import Deadline

MAX_SEARCHES = 32
"""At a time; beyond that, what the arena has is the reply."""
MAX_SECONDS = 10.0
"""The most seconds for one search, however long the request's deadline is."""
SEARCH_SHARE = 0.9
"""Share of a deadline that a search may use; the rest is left for giving the answer."""
TIER_SHARE = 0.5
"""Share of a search's time that is left which a tier may use if others, or another node, come after it."""
MAX_PREFETCHES = 64
"""At a time; further ones are ignored, and their blocks looked up when their requests come."""
PREFETCH_PATIENCE = 10.0
"""Seconds without another block after which a prefetch ends: its prompt was given up, or could not be saved."""
MAX_PREFETCH_SECONDS = 600.0
SLOT_BYTES = 4
"""The bytes of one slot in `FindReply.slots`."""

FindOutcome = FindReply | KvStoreRefusal


class _Key(NamedTuple):
    """The lease under which a search's blocks are pinned."""

    owner: LeaseOwner
    lease: LeaseId


class LowerTierSearch:
    """Owns the searches of lower tiers and other nodes that are under way. They need `run` to be running."""

    def __init__(self, store: NodeStore, tiers: Sequence[LowerTier], peers: PeerStores | None) -> None:
        """`tiers`: in the order in which they are searched."""
        self._store = store
        self._tiers = tiers
        self._peers = peers
        self._tasks: asyncio.TaskGroup | None = None
        self._waiting: dict[_Key, asyncio.Timeout | None] = {}
        """None until the search takes its first step."""
        self._fetching: dict[tuple[str, BlockHash], asyncio.Event] = {}
        """The blocks being fetched. Another search for one of them waits for that fetch to end, and searches again."""
        self.running = 0
        self.prefetching = 0

    async def run(self) -> None:
        """Tiers, peers, searches and prefetches, until cancelled. A bug in any of them is raised here."""
        async with asyncio.TaskGroup() as self._tasks:
            for each in (*self._tiers, *((self._peers,) if self._peers is not None else ())):
                self._tasks.create_task(each.run())
            # The group is there for searches to come, even where nothing else runs in it.
            await asyncio.Event().wait()

    def find(self, request: Find) -> FindOutcome | asyncio.Future[FindOutcome]:
        """The reply at once if the arena has everything or there is no other place to search; otherwise a future."""
        found = self._store.find(request)
        if isinstance(found, KvStoreRefusal):
            return found
        if self._tasks is None or blocks_in(found) == _requested_blocks(request) or not self._can_search(request):
            self._count(request, found)
            return found
        self._waiting[_Key(request.owner, request.lease)] = None
        self.running += 1
        return self._tasks.create_task(self._search(request, blocks_in(found)))

    def _can_search(self, request: Find) -> bool:
        # A second request under the lease of a search that is under way: one reply from below is enough.
        alone = _Key(request.owner, request.lease) not in self._waiting
        somewhere = bool(self._tiers) or self._source(request) is not None
        return somewhere and alone and self.running < MAX_SEARCHES

    def _source(self, request: Find) -> NodeId | None:
        """The node to ask beside the lower tiers; None where the hint is this node."""
        return request.source if self._peers is not None and request.source != self._store.node else None

    # ---- searches whose reply is no longer needed

    def released(self, release: Release) -> None:
        """The search under this lease ends, and pins nothing."""
        self._end(_Key(release.owner, release.lease))

    def owner_gone(self, owner: LeaseOwner) -> None:
        """Ends the searches that a process waits for which has ended."""
        for key in [key for key in self._waiting if key.owner == owner]:
            self._end(key)

    def _end(self, key: _Key) -> None:
        deadline = self._waiting.pop(key, None)
        if deadline is not None and not deadline.expired():
            deadline.reschedule(0.0)

    # ---- blocks that are still being computed elsewhere

    def prefetch(self, request: Prefetch) -> None:
        """Starts to copy blocks from a node that is about to compute them, unless there is too much of it already."""
        arena, peers, tasks = self._store.arena_of(request.layout), self._peers, self._tasks
        if arena is None or peers is None or tasks is None or request.source == self._store.node:
            return
        if self.prefetching >= MAX_PREFETCHES:
            metrics.TIER_FAILED.labels("peer", "busy").inc()
            return
        self.prefetching += 1
        tasks.create_task(self._follow(request, arena.shape, peers))

    async def _follow(self, request: Prefetch, shape: BlockShape, peers: PeerStores) -> None:
        source, layout = request.source, request.layout
        hashes = split_whole_hashes(request.hashes)[:MAX_BLOCKS]

        async def fetch(missing: Sequence[BlockHash]) -> None:
            while missing:
                with IncomingSlots(self._store, layout) as room:
                    blocks = peers.fetch(source, BlockRequest(layout, missing, PREFETCH_PATIENCE), shape, room)
                    self._store.count_prefetched(await self._land("peer", room, len(missing), blocks))
                before, missing = len(missing), self._store.missing(layout, missing)
                if len(missing) == before:
                    return

        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MAX_PREFETCH_SECONDS):
                    await self._bring(layout, self._store.missing(layout, hashes), fetch)
        finally:
            self.prefetching -= 1

    # ---- one search

    async def _search(self, request: Find, here: int) -> FindOutcome:
        key = _Key(request.owner, request.lease)
        now = _now()
        deadline = Deadline(now + min(request.deadline, MAX_SECONDS)).after(now, SEARCH_SHARE)
        try:
            async with asyncio.timeout_at(deadline.at) as timeout:
                if key in self._waiting:
                    self._waiting[key] = timeout
                    missing = list(split_hashes(request.hashes))[here:]
                    await self._bring(request.layout, missing, partial(self._fetch, request, deadline))
        except TimeoutError:
            pass  # the blocks that have arrived by now are the reply
        finally:
            self.running -= 1
            waited_for = self._waiting.pop(key, None) is not None
        return self._outcome(request, here) if waited_for else KvStoreRefusal("the lease ended during the search")

    def _outcome(self, request: Find, here: int) -> FindOutcome:
        """Pins the fetched blocks under the lease that already pins the others, so that one release ends both."""
        found = self._store.find(request)
        if isinstance(found, FindReply):
            found = replace(found, from_lower=max(0, blocks_in(found) - here))
            self._count(request, found)
        return found

    async def _bring(
        self, layout: str, missing: Sequence[BlockHash], fetch: Callable[[Sequence[BlockHash]], Awaitable[None]]
    ) -> None:
        """Fetches the missing blocks. When several searches want the same blocks, one fetches them; the others wait for
        it and then fetch only what it did not find."""
        while missing and (other := self._fetching.get((layout, missing[0]))) is not None:
            await other.wait()
            missing = self._store.missing(layout, missing)
        done = asyncio.Event()
        mine = [(layout, name) for name in missing if (layout, name) not in self._fetching]
        self._fetching.update(dict.fromkeys(mine, done))
        try:
            await fetch(missing)
        finally:
            for place in mine:
                del self._fetching[place]
            done.set()

    async def _fetch(self, request: Find, deadline: Deadline, missing: Sequence[BlockHash]) -> None:
        arena, source, layout = self._store.arena_of(request.layout), self._source(request), request.layout
        if arena is None or not missing:
            return
        for after, tier in zip(reversed(range(len(self._tiers))), self._tiers, strict=True):
            if not missing:
                return
            share = TIER_SHARE if after or source is not None else 1.0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline.after(_now(), share).at):
                    with IncomingSlots(self._store, layout) as room:
                        blocks = tier.fetch(layout, missing, arena.shape)
                        await self._land(tier.name, room, len(missing), blocks)
            missing = self._store.missing(layout, missing)
        if self._peers is not None and source is not None and missing:
            link, each = self._peers.link(source), request.block_seconds
            if (
                link is not None
                and each
                and link.seconds(len(missing) * arena.shape.payload_bytes) > len(missing) * each
            ):
                metrics.TIER_FAILED.labels("peer", "slower").inc()
                return
            with IncomingSlots(self._store, layout) as room:
                blocks = self._peers.fetch(source, BlockRequest(layout, missing), arena.shape, room)
                await self._land("peer", room, len(missing), blocks)

    async def _land(
        self, tier: str, room: IncomingSlots, missing: int, blocks: AsyncGenerator[InFlightBlock, None]
    ) -> int:
        """Puts what comes into the arena, until it is full; returns how many blocks."""
        landed = 0
        try:
            with metrics.TIER_SECONDS.labels(tier).time():
                async with contextlib.aclosing(blocks):
                    async for block in blocks:
                        if not room.land(block):
                            break
                        landed += 1
                        await self._store.copying(len(block.payload))
                        # Checking and copying took a while: others' turn, and the deadline's.
                        await asyncio.sleep(0)
        finally:
            metrics.TIER_MISSES.labels(tier).inc(missing - landed)
        return landed

    def _count(self, request: Find, found: FindReply) -> None:
        hits = blocks_in(found)
        self._store.count(hits, found.from_lower, _requested_blocks(request) - hits)


def blocks_in(found: FindReply) -> int:
    """How many blocks the reply gives."""
    return len(found.slots) // SLOT_BYTES


def _requested_blocks(request: Find) -> int:
    return len(request.hashes) // HASH_BYTES


def _now() -> float:
    return asyncio.get_running_loop().time()
