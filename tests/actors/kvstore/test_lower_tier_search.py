"""Searches below the arena: the order in which others are asked, the deadline, and askers who go away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence

import pytest
from msgspec.structs import replace

from kvstore.arena.in_flight_block import BlockShape, InFlightBlock
from kvstore.node import lower_search as search_module
from kvstore.node.lower_search import LowerTierSearch, blocks_in
from kvstore.node.node_store import NodeStore
from kvstore.tiers.interface import LowerTier, PeerStores
from kvstore.transfer.interface import BlockDestination, BlockRequest
from kvstore.transfer.link_rates import LinkRate
from shared.blocks import BlockHash
from shared.ids import LeaseId, NodeId
from shared.messages.kvstore import Find, FindReply, KvStoreRefusal, LinkReport, Prefetch, Release
from shared.messages.lifecycle import Lifecycle, TierReport
from tests.support.kv import random_blocks as carried_blocks
from tests.support.kv.arenas import (
    NODE,
    Client,
    Clock,
    chain,
    contents,
    holds,
    new_directory,
    remove,
    slots_of,
    store_in,
)

PATIENCE = 60.0
ELSEWHERE = NodeId("elsewhere")
NAMES = chain("searched", 8)
ROOMY = 64 * 8192


class Below:
    """A tier and a neighbour alike: has some blocks, and gives each after as many turns of the loop as told."""

    address = ""
    endpoints = ()

    def __init__(self, names: Sequence[BlockHash] = (), *, stuck_after: int | None = None) -> None:
        self.names = list(names)
        self.stuck_after = stuck_after
        self.stuck, self.unstuck = asyncio.Event(), asyncio.Event()
        self.asked: list[tuple[NodeId | None, list[BlockHash]]] = []
        self.open = 0

    async def run(self) -> None:
        await asyncio.Event().wait()

    def offer(self, layout: str, block: InFlightBlock) -> bool:
        return False

    def has(self, layout: str, name: BlockHash) -> bool:
        return False

    def record_lifecycle(self, lifecycle: Lifecycle) -> None: ...

    def gone(self, last: Lifecycle) -> None: ...

    async def give(self, hashes: Sequence[BlockHash], shape: BlockShape) -> AsyncGenerator[InFlightBlock, None]:
        self.open += 1
        try:
            for at, name in enumerate(hashes):
                if at == self.stuck_after:
                    self.stuck.set()
                    await self.unstuck.wait()
                if name not in self.names:
                    return
                parent = NAMES[NAMES.index(name) - 1] if name != NAMES[0] else bytes(16)
                payload = b"".join(contents(name, head, shape.cell_bytes) for head in range(shape.cells))
                yield carried_blocks.carried(name, parent, payload, shape)
        finally:
            self.open -= 1


class Lower(Below):
    name = "lower"

    def report(self) -> TierReport:
        return TierReport(name=self.name, present=True)

    def fetch(self, layout: str, hashes: Sequence[BlockHash], shape: BlockShape) -> AsyncGenerator[InFlightBlock, None]:
        self.asked.append((None, list(hashes)))
        return self.give(hashes, shape)


class Others(Below):
    patience = 0.0
    rate: LinkRate | None = None

    def link(self, source: NodeId) -> LinkRate | None:
        return self.rate

    def links(self) -> tuple[LinkReport, ...]:
        return ()

    def fetch(
        self, source: NodeId, request: BlockRequest, shape: BlockShape, room: BlockDestination
    ) -> AsyncGenerator[InFlightBlock, None]:
        self.asked.append((source, list(request.hashes)))
        self.patience = request.patience
        return self.give(request.hashes, shape)


@pytest.fixture
def store() -> Iterator[NodeStore]:
    directory = new_directory()
    made = store_in(directory, ROOMY, Clock())
    yield made
    made.close()
    remove(directory)


@contextlib.asynccontextmanager
async def searching(
    store: NodeStore,
    tier: LowerTier | None = None,
    peers: PeerStores | None = None,
    *,
    second: LowerTier | None = None,
) -> AsyncIterator[LowerTierSearch]:
    search = LowerTierSearch(store, [each for each in (tier, second) if each is not None], peers)
    task = asyncio.create_task(search.run())
    await asyncio.sleep(0)
    try:
        yield search
        assert search.running == 0
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def asks(
    client: Client, lease: int, *, deadline: float = PATIENCE, source: NodeId | None = None, names: int = 8
) -> Find:
    hashes = b"".join(NAMES[:names])
    return Find(
        layout=client.layout, owner=client.owner, lease=LeaseId(lease), hashes=hashes, deadline=deadline, source=source
    )


async def answered(search: LowerTierSearch, question: Find) -> FindReply:
    answer = search.find(question)
    if isinstance(answer, asyncio.Future):
        async with asyncio.timeout(PATIENCE):
            answer = await answer
    assert isinstance(answer, FindReply), answer
    return answer


def right(client: Client, found: FindReply) -> bool:
    """Whether each slot holds the block that was asked for."""
    return all(holds(client.arena, slot, name) for name, (slot, _) in zip(NAMES, slots_of(found), strict=False))


def pinned(store: NodeStore) -> int:
    return store.report().pinned


async def test_what_the_arena_has_is_answered_at_once(store: NodeStore) -> None:
    client, tier = Client(store), Lower(NAMES)
    client.save(NAMES)
    async with searching(store, tier) as search:
        answer = search.find(asks(client, 100, source=ELSEWHERE))
        assert isinstance(answer, FindReply)
        assert (blocks_in(answer), answer.from_lower, tier.asked) == (8, 0, [])


async def test_nobody_is_asked_where_nobody_is(store: NodeStore) -> None:
    client = Client(store)
    client.save(NAMES[:3])
    async with searching(store) as search:
        answer = search.find(asks(client, 100, source=ELSEWHERE))
        assert isinstance(answer, FindReply)
        assert blocks_in(answer) == 3
        assert (store.report().hits, store.report().misses) == (3, 5)


async def test_the_tier_is_asked_for_what_is_missing_and_the_other_node_for_what_is_missing_still(
    store: NodeStore,
) -> None:
    client, tier, others = Client(store), Lower(NAMES[:5]), Others(NAMES)
    client.save(NAMES[:2])
    async with searching(store, tier, others) as search:
        found = await answered(search, asks(client, 100, source=ELSEWHERE))
        assert (blocks_in(found), found.from_lower) == (8, 6)
        assert right(client, found)
        assert tier.asked == [(None, NAMES[2:])]
        assert others.asked == [(ELSEWHERE, NAMES[5:])]
        assert (store.report().hits, store.report().lower_hits, store.report().misses) == (8, 6, 0)


async def test_tiers_are_asked_in_their_order_each_for_what_those_before_did_not_have(store: NodeStore) -> None:
    client, near, far = Client(store), Lower(NAMES[:3]), Lower(NAMES)
    async with searching(store, near, second=far) as search:
        found = await answered(search, asks(client, 100))
        assert (blocks_in(found), found.from_lower) == (8, 8)
        assert (near.asked, far.asked) == ([(None, NAMES)], [(None, NAMES[3:])])


async def test_a_tier_that_hangs_leaves_time_for_the_next(store: NodeStore) -> None:
    client, near, far = Client(store), Lower(NAMES, stuck_after=2), Lower(NAMES)
    async with searching(store, near, second=far) as search:
        assert blocks_in(await answered(search, asks(client, 100, deadline=2.0))) == 8
        assert far.asked == [(None, NAMES[2:])]


@pytest.mark.parametrize(("block_seconds", "asked"), [(0.0, 1), (0.5, 0), (2.0, 1)])
async def test_a_node_whose_blocks_would_be_computed_sooner_is_not_asked(
    store: NodeStore, block_seconds: float, asked: int
) -> None:
    """Its link was measured to take a second for a block."""
    client, others = Client(store), Others(NAMES)
    others.rate = LinkRate(bytes_per_second=client.arena.shape.payload_bytes, latency=0.1)
    async with searching(store, None, others) as search:
        wanted = replace(asks(client, 100, source=ELSEWHERE), block_seconds=block_seconds)
        assert blocks_in(await answered(search, wanted)) == 8 * asked
        assert len(others.asked) == asked


async def test_what_came_is_pinned_until_the_one_release(store: NodeStore) -> None:
    client, tier = Client(store), Lower(NAMES)
    client.save(NAMES[:2])
    async with searching(store, tier) as search:
        await answered(search, asks(client, 100))
        assert pinned(store) == 8
        client.release(LeaseId(100))
        assert pinned(store) == 0


async def test_a_hint_at_this_node_itself_is_none(store: NodeStore) -> None:
    client, others = Client(store), Others(NAMES)
    async with searching(store, None, others) as search:
        assert blocks_in(await answered(search, asks(client, 100, source=NODE))) == 0
        assert blocks_in(await answered(search, asks(client, 101))) == 0
        assert others.asked == []


async def test_at_the_deadline_what_has_come_is_the_answer(store: NodeStore) -> None:
    client, tier = Client(store), Lower(NAMES, stuck_after=3)
    async with searching(store, tier) as search:
        found = await answered(search, asks(client, 100, deadline=1.0))
        assert (blocks_in(found), found.from_lower) == (3, 3)
        assert right(client, found)
        assert tier.open == 0


async def test_a_tier_that_hangs_leaves_time_for_the_other_node(store: NodeStore) -> None:
    client, tier, others = Client(store), Lower(NAMES, stuck_after=0), Others(NAMES)
    async with searching(store, tier, others) as search:
        found = await answered(search, asks(client, 100, deadline=2.0, source=ELSEWHERE))
        assert blocks_in(found) == 8
        assert (tier.open, others.open) == (0, 0)


async def test_of_two_searches_for_the_same_one_fetches_and_both_have_it(store: NodeStore) -> None:
    client, tier = Client(store), Lower(NAMES, stuck_after=4)
    async with searching(store, tier) as search:
        both = asyncio.gather(*(answered(search, asks(client, lease)) for lease in (100, 101)))
        while not tier.asked:
            await asyncio.sleep(0)
        tier.unstuck.set()
        first, second = await both
        assert first.slots == second.slots
        assert (blocks_in(first), tier.asked) == (8, [(None, NAMES)])
        client.release(LeaseId(100))
        assert pinned(store) == 8
        client.release(LeaseId(101))
        assert pinned(store) == 0


async def test_whoever_waits_for_another_search_goes_on_where_that_was_given_up(store: NodeStore) -> None:
    client, tier = Client(store), Lower(NAMES, stuck_after=2)
    async with searching(store, tier) as search:
        given_up = search.find(asks(client, 100))
        patient = asyncio.create_task(answered(search, asks(client, 101)))
        async with asyncio.timeout(PATIENCE):
            await tier.stuck.wait()
        search.released(Release(layout=client.layout, owner=client.owner, lease=LeaseId(100)))
        assert isinstance(await given_up, KvStoreRefusal)  # type: ignore[misc]
        tier.unstuck.set()
        assert blocks_in(await patient) == 8
        assert [len(names) for _, names in tier.asked] == [8, 6]


@pytest.mark.parametrize("end", ["released", "owner gone"])
async def test_a_search_that_nobody_waits_for_ends_and_pins_nothing(store: NodeStore, end: str) -> None:
    client, tier = Client(store), Lower(NAMES, stuck_after=5)
    client.save(NAMES[:2])
    async with searching(store, tier) as search:
        answer = search.find(asks(client, 100))
        assert isinstance(answer, asyncio.Future)
        while not tier.asked:
            await asyncio.sleep(0)
        if end == "released":
            release = Release(layout=client.layout, owner=client.owner, lease=LeaseId(100))
            search.released(release)
            store.release(release)
        else:
            search.owner_gone(client.owner)
            store.owner_gone(client.owner)
        async with asyncio.timeout(PATIENCE):
            assert isinstance(await answer, KvStoreRefusal)
        assert (pinned(store), tier.open) == (0, 0)
        assert len(store.core.leases) == 0


async def test_a_release_before_the_search_has_begun_ends_it_too(store: NodeStore) -> None:
    client, tier = Client(store), Lower(NAMES)
    async with searching(store, tier) as search:
        answer = search.find(asks(client, 100))
        assert isinstance(answer, asyncio.Future)
        search.released(Release(layout=client.layout, owner=client.owner, lease=LeaseId(100)))
        assert isinstance(await answer, KvStoreRefusal)
        assert tier.asked == []


async def test_no_more_searches_run_than_allowed(store: NodeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "MAX_SEARCHES", 2)
    client, tier = Client(store), Lower(NAMES, stuck_after=0)
    async with searching(store, tier) as search:
        answers = [search.find(asks(client, lease)) for lease in (100, 101, 102)]
        assert [isinstance(answer, asyncio.Future) for answer in answers] == [True, True, False]
        tier.unstuck.set()
        for answer in answers[:2]:
            assert isinstance(answer, asyncio.Future)
            assert blocks_in(await answer) == 8  # type: ignore[arg-type]


async def test_an_arena_without_room_takes_what_fits() -> None:
    directory = new_directory()
    small = store_in(directory, 6 * 4096, Clock())
    client, tier = Client(small), Lower(NAMES)
    room = client.arena.slots
    assert 1 < room < 8
    async with searching(small, tier) as search:
        found = await answered(search, asks(client, 100))
        assert blocks_in(found) == room == pinned(small)
        assert right(client, found)
        client.release(LeaseId(100))
    small.close()
    remove(directory)


async def test_a_layout_that_goes_during_the_search_is_not_served(store: NodeStore) -> None:
    client, tier = Client(store), Lower(NAMES, stuck_after=0)
    async with searching(store, tier) as search:
        answer = search.find(asks(client, 100))
        assert isinstance(answer, asyncio.Future)
        await asyncio.sleep(0)
        store._forget(client.layout)
        tier.unstuck.set()
        assert isinstance(await answer, KvStoreRefusal)


# ---- prompts that are still being computed elsewhere


def prefetches(client: Client, names: int = 8, source: NodeId = ELSEWHERE) -> Prefetch:
    return Prefetch(layout=client.layout, source=source, hashes=b"".join(NAMES[:names]))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0)


async def test_what_was_prefetched_is_there_when_its_request_comes(store: NodeStore) -> None:
    client, others = Client(store), Others(NAMES)
    client.save(NAMES[:2])
    async with searching(store, None, others) as search:
        search.prefetch(prefetches(client))
        await until(lambda: search.prefetching == 0)
        assert others.asked == [(ELSEWHERE, NAMES[2:])]
        assert others.patience > 0
        assert pinned(store) == 0, "it holds nothing: no request is there yet"
        assert store.report().prefetched == 6
        found = search.find(asks(client, 100, source=ELSEWHERE))
        assert isinstance(found, FindReply)
        assert blocks_in(found) == 8
        assert right(client, found)


async def test_a_request_waits_for_what_is_on_its_way_to_it_and_fetches_nothing_twice(store: NodeStore) -> None:
    client, others = Client(store), Others(NAMES, stuck_after=5)
    async with searching(store, None, others) as search:
        search.prefetch(prefetches(client))
        await others.stuck.wait()
        waiting = asyncio.create_task(answered(search, asks(client, 100, source=ELSEWHERE)))
        await until(lambda: search.running == 1)
        others.unstuck.set()
        assert blocks_in(await waiting) == 8
        assert len(others.asked) == 1


async def test_a_request_whose_prefetch_has_stopped_short_gets_at_its_deadline_what_has_come(store: NodeStore) -> None:
    client, others = Client(store), Others(NAMES, stuck_after=5)
    async with searching(store, None, others) as search:
        search.prefetch(prefetches(client))
        await others.stuck.wait()
        assert blocks_in(await answered(search, asks(client, 100, source=ELSEWHERE, deadline=0.2))) == 5
        others.unstuck.set()
        await until(lambda: search.prefetching == 0)


async def test_a_prefetch_whose_source_brings_no_more_ends(store: NodeStore) -> None:
    client, others = Client(store), Others(NAMES[:3])
    async with searching(store, None, others) as search:
        search.prefetch(prefetches(client))
        await until(lambda: search.prefetching == 0)
        assert [len(asked) for _, asked in others.asked] == [8, 5], "asked again as long as something comes"


async def test_prefetches_are_bounded_and_of_other_nodes_only(
    store: NodeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_module, "MAX_PREFETCHES", 1)
    client, others = Client(store), Others(NAMES, stuck_after=0)
    async with searching(store, None, others) as search:
        search.prefetch(prefetches(client, source=NODE))
        assert search.prefetching == 0
        for _ in range(3):
            search.prefetch(prefetches(client))
        assert search.prefetching == 1
        others.unstuck.set()
        await until(lambda: search.prefetching == 0)
        assert len(others.asked) == 1
