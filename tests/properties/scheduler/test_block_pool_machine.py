"""Block pool and prefix index against a model that is too simple to be wrong."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.core.memory import BlockPool, NoFreeBlock, PrefixIndex
from shared.blocks import BlockHash

TOTAL = 6


class BlockPoolMachine(RuleBasedStateMachine):
    """The model: who holds which block (a list of holds), and the free blocks in the order they must be taken."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.pool = BlockPool(TOTAL, self.index)
        self.holds: list[int] = []
        self.names: dict[int, BlockHash] = {}
        self.blank = list(range(TOTAL))
        self.cached: list[int] = []

    @precondition(lambda self: self.blank or self.cached)
    @rule()
    def take(self) -> None:
        block = self.pool.allocate()
        if self.blank:
            assert block in self.blank
            self.blank.remove(block)
        else:
            assert block == self.cached.pop(0), "the one that was used longest ago goes first"
            del self.names[block]
        self.holds.append(block)

    @precondition(lambda self: not self.blank and not self.cached)
    @rule()
    def take_from_an_empty_pool(self) -> None:
        try:
            self.pool.allocate()
        except NoFreeBlock:
            return
        raise AssertionError("a block came from an empty pool")

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), name=st.integers(0, 4))
    def index_one(self, data: st.DataObject, name: int) -> None:
        block = data.draw(st.sampled_from(self.holds))
        hash_ = BlockHash(bytes([name]) * 16)
        if block in self.names:
            return
        self.index.add(hash_, block)
        if hash_ not in self.names.values():
            self.names[block] = hash_

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def share_one(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.names)))
        assert self.index.block_of.get(self.names[block]) == block
        self.pool.share(block)
        if block in self.cached:
            self.cached.remove(block)
        self.holds.append(block)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def give_some_back(self, data: st.DataObject) -> None:
        places = data.draw(st.lists(st.integers(0, len(self.holds) - 1), min_size=1, max_size=3, unique=True))
        blocks = [self.holds[place] for place in places]
        for place in sorted(places, reverse=True):
            del self.holds[place]
        self.pool.release(blocks)
        for block in _last_mentions(blocks):
            if block not in self.holds:
                (self.cached if block in self.names else self.blank).append(block)

    @rule()
    def forget_all(self) -> None:
        assert self.pool.forget() == len(self.names)
        self.names.clear()
        self.blank += self.cached
        self.cached.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert sorted(self.pool.blank) == sorted(self.blank)
        assert list(self.pool.cached) == self.cached
        assert self.pool.free == len(self.blank) + len(self.cached)
        assert list(self.pool.references) == [self.holds.count(block) for block in range(TOTAL)]
        assert self.index.hash_of == self.names
        assert all(self.pool.references[block] for block in self.pool.forgotten)
        assert self.index.block_of == {hash_: block for block, hash_ in self.names.items()}


def _last_mentions(blocks: list[int]) -> list[int]:
    """Each block once, in the order in which its last hold was given back."""
    return list(reversed(dict.fromkeys(reversed(blocks))))


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
