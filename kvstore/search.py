"""A search that does not end at the arena: what is not there is asked of the tier below, then of another node.

What comes lands in the arena like any written block, and is pinned for the asker. The deadline is the question's: what
has not come by then is a miss this time, and what has come stays.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from kvstore import tier_metrics as metrics
from kvstore.carried import CarriedBlock
from kvstore.node_store import NodeStore
from kvstore.tiers import Neighbours, Tier
from shared.blocks import HASH_BYTES, BlockHash, split_hashes
from shared.ids import LeaseId, NodeId
from shared.messages.kvstore import Find, Found, NotServed, Owner, Release

MAX_SEARCHES = 32
"""Below the arena at a time; above it, the arena's answer is the answer."""
LONGEST_SECONDS = 10.0
"""For one search, whatever the asker allows."""
FOR_THE_ANSWER = 0.1
"""Share of a deadline that is left for giving the answer."""
FOR_THE_TIER = 0.5
"""Share of the time below the arena that the tier may take where another node can be asked, too."""
SLOT_BYTES = 4
"""Of one slot in `Found.slots`."""

Answer = Found | NotServed


class _Key(NamedTuple):
    """Who waits for a search."""

    owner: Owner
    lease: LeaseId


class DeepSearch:
    """Owns the searches below the arena that are under way. They need `run` to be running."""

    def __init__(self, store: NodeStore, tier: Tier | None, neighbours: Neighbours | None) -> None:
        self._store = store
        self._tier = tier
        self._neighbours = neighbours
        self._tasks: asyncio.TaskGroup | None = None
        self._waiting: dict[_Key, asyncio.Timeout | None] = {}
        """None until the search takes its first step."""
        self._coming: dict[tuple[str, BlockHash], asyncio.Event] = {}
        """What is being fetched. Whoever needs it, too, waits for that fetch to end, and looks again."""
        self.running = 0

    async def run(self) -> None:
        """Tier, neighbours and searches, until cancelled. A bug in any of them is raised here."""
        async with asyncio.TaskGroup() as self._tasks:
            for each in (self._tier, self._neighbours):
                if each is not None:
                    self._tasks.create_task(each.run())
            # The group is there for searches to come, even where nothing else runs in it.
            await asyncio.Event().wait()

    def answer(self, question: Find) -> Answer | asyncio.Future[Answer]:
        """At once where the arena has everything, or nobody can be asked for more; otherwise when the search ends."""
        found = self._store.find(question)
        if isinstance(found, NotServed):
            return found
        if self._tasks is None or blocks_in(found) == _asked(question) or not self._may_search(question):
            self._count(question, found)
            return found
        self._waiting[_Key(question.owner, question.lease)] = None
        self.running += 1
        return self._tasks.create_task(self._search(question, blocks_in(found)))

    def _may_search(self, question: Find) -> bool:
        # A lease that is searched under already is its owner's confusion; one answer is enough.
        alone = _Key(question.owner, question.lease) not in self._waiting
        somewhere = self._tier is not None or self._source(question) is not None
        return somewhere and alone and self.running < MAX_SEARCHES

    def _source(self, question: Find) -> NodeId | None:
        """Whom else to ask. Nobody where the hint is this node."""
        return question.source if self._neighbours is not None and question.source != self._store.node else None

    # ---- nobody waits any more

    def released(self, release: Release) -> None:
        """The search under this lease ends, and pins nothing."""
        self._end(_Key(release.owner, release.lease))

    def owner_gone(self, owner: Owner) -> None:
        for key in [key for key in self._waiting if key.owner == owner]:
            self._end(key)

    def _end(self, key: _Key) -> None:
        deadline = self._waiting.pop(key, None)
        if deadline is not None and not deadline.expired():
            deadline.reschedule(0.0)

    # ---- one search

    async def _search(self, question: Find, here: int) -> Answer:
        key = _Key(question.owner, question.lease)
        until = _now() + min(question.deadline, LONGEST_SECONDS) * (1 - FOR_THE_ANSWER)
        try:
            async with asyncio.timeout_at(until) as deadline:
                if key in self._waiting:
                    self._waiting[key] = deadline
                    await self._bring(question, here, until)
        except TimeoutError:
            pass  # what has come by now is the answer
        finally:
            self.running -= 1
            waited_for = self._waiting.pop(key, None) is not None
        return self._outcome(question, here) if waited_for else NotServed("the lease ended during the search")

    def _outcome(self, question: Find, here: int) -> Answer:
        """Pins what has landed under the lease that pins what was here already, so that one release ends both."""
        found = self._store.find(question)
        if isinstance(found, Found):
            found = replace(found, from_lower=max(0, blocks_in(found) - here))
            self._count(question, found)
        return found

    async def _bring(self, question: Find, here: int, until: float) -> None:
        """Of searches for the same blocks, one fetches; the others wait for it, and fetch what it did not."""
        layout = question.layout
        missing: Sequence[BlockHash] = list(split_hashes(question.hashes))[here:]
        while missing and (other := self._coming.get((layout, missing[0]))) is not None:
            await other.wait()
            missing = self._store.missing(layout, missing)
        done = asyncio.Event()
        mine = [(layout, name) for name in missing if (layout, name) not in self._coming]
        self._coming.update(dict.fromkeys(mine, done))
        try:
            await self._fetch(question, missing, until)
        finally:
            for place in mine:
                del self._coming[place]
            done.set()

    async def _fetch(self, question: Find, missing: Sequence[BlockHash], until: float) -> None:
        arena, source, layout = self._store.arena_of(question.layout), self._source(question), question.layout
        if arena is None or not missing:
            return
        if self._tier is not None:
            share = FOR_THE_TIER if source is not None else 1.0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until - (until - _now()) * (1 - share)):
                    await self._land("redis", layout, missing, self._tier.fetch(layout, missing, arena.shape))
            missing = self._store.missing(layout, missing)
        if self._neighbours is not None and source is not None and missing:
            blocks = self._neighbours.fetch(source, layout, missing, arena.shape)
            await self._land("peer", layout, missing, blocks)

    async def _land(
        self, tier: str, layout: str, missing: Sequence[BlockHash], blocks: AsyncGenerator[CarriedBlock, None]
    ) -> None:
        landed = 0
        try:
            with metrics.SECONDS.labels(tier).time():
                async with contextlib.aclosing(blocks):
                    async for block in blocks:
                        if not self._store.land(layout, block):
                            return
                        landed += 1
                        # Checking and copying took a while: others' turn, and the deadline's.
                        await asyncio.sleep(0)
        finally:
            metrics.MISSES.labels(tier).inc(len(missing) - landed)

    def _count(self, question: Find, found: Found) -> None:
        hits = blocks_in(found)
        self._store.count(hits, found.from_lower, _asked(question) - hits)


def blocks_in(found: Found) -> int:
    return len(found.slots) // SLOT_BYTES


def _asked(question: Find) -> int:
    return len(question.hashes) // HASH_BYTES


def _now() -> float:
    return asyncio.get_running_loop().time()
