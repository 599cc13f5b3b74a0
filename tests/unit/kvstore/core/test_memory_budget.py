"""Who would be evicted next: as eviction itself goes about it, without evicting anybody."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import pytest

from kvstore.core.actions import EvictBlock
from kvstore.core.memory_budget import next_victims
from kvstore.node.background import BackgroundSpill
from kvstore.node.node_store import NodeStore
from shared.blocks import BlockHash
from shared.ids import LeaseId
from tests.support.kv.arenas import LARGE, SMALL, Client, Clock, chain, new_directory, remove, store_in


@pytest.fixture
def store() -> Iterator[NodeStore]:
    directory = new_directory()
    made = store_in(directory, 2**20, Clock())
    yield made
    made.close()
    remove(directory)


def evicted_in_order(store: NodeStore) -> list[BlockHash]:
    """Empties the store of what can go."""
    budget = store.core.budget
    actions: list[object] = []
    while budget._evict(budget.tables.values(), 0.0, actions):  # type: ignore[arg-type]
        pass
    return [action.hash for action in actions if isinstance(action, EvictBlock)]


@pytest.mark.parametrize("seed", range(8))
def test_the_next_to_go_are_those_that_go_next(store: NodeStore, seed: int) -> None:
    chance = random.Random(seed)
    small, large = Client(store, SMALL), Client(store, LARGE)
    chains = [chain((seed, n), chance.randint(1, 8)) for n in range(6)]
    for at, names in enumerate(chains):
        client = chance.choice([small, large])
        client.save(names)
        # A branch, which its stem must outlive.
        stem = chance.randint(0, len(names) - 1)
        branch = chain((seed, at, "branch"), 3)
        client.save(branch, parents=[names[stem], *branch[:-1]])
    for _ in range(10):
        chance.choice([small, large]).found(chance.choice(chains))
    lease, _ = small.find(chains[0])
    told = [block.hash for _, block in next_victims(store.core.budget.tables.values())]
    assert told == evicted_in_order(store)
    assert len(told) > 10
    small.release(lease)


def test_asking_changes_nothing_and_may_stop_early(store: NodeStore) -> None:
    client = Client(store)
    client.save(chain("a", 10))
    tables = store.core.budget.tables.values()
    first = [block.hash for _, block in islice(next_victims(tables), 3)]
    assert [block.hash for _, block in islice(next_victims(tables), 10)][:3] == first
    assert client.found(chain("a", 10)) == 10


class Taking:
    """A tier that takes as many blocks as it is told to."""

    def __init__(self, room: int) -> None:
        self.budget = room
        self.taken: list[BlockHash] = []

    def has(self, layout: str, name: BlockHash) -> bool:
        return name in self.taken

    def offer(self, layout: str, block: object) -> bool:
        if len(self.taken) >= self.budget:
            return False
        self.taken.append(block.hash)  # type: ignore[attr-defined]
        return True


def test_nothing_is_spilled_while_there_is_room(store: NodeStore) -> None:
    client, tier = Client(store), Taking(1000)
    client.save(chain("few", 20))
    assert BackgroundSpill(store, tier).step() == 0  # type: ignore[arg-type]
    assert tier.taken == []


def test_the_last_quarter_of_the_room_is_spilled_ahead_and_what_was_used_last_not(store: NodeStore) -> None:
    client, tier = Client(store), Taking(1000)
    slots = client.arena.slots
    names = chain("many", slots)
    client.save(names)
    spill = BackgroundSpill(store, tier)  # type: ignore[arg-type]
    assert spill.step() > 0
    assert spill.step() == 0
    ahead = len(tier.taken)
    assert tier.taken == names[: -ahead - 1 : -1]
    assert 0.2 * slots < ahead < 0.3 * slots
    # What is written next takes the place of what is in the tier already.
    client.save(chain("more", ahead // 2))
    assert set(names) - {block for block in names if store.holds(client.layout, block)} <= set(tier.taken)


def test_a_step_ends_where_the_tier_takes_no_more(store: NodeStore) -> None:
    client, tier = Client(store), Taking(3)
    client.save(chain("many", client.arena.slots))
    spill = BackgroundSpill(store, tier)  # type: ignore[arg-type]
    spill.step()
    assert (len(tier.taken), spill.step()) == (3, 0)


def test_what_somebody_reads_is_not_spilled(store: NodeStore) -> None:
    client, tier = Client(store), Taking(1000)
    names = chain("read", client.arena.slots)
    client.save(names)
    lease, _ = client.find(names)
    assert BackgroundSpill(store, tier).step() == 0  # type: ignore[arg-type]
    client.release(LeaseId(lease))
