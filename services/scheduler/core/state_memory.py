"""KV memory of models with states: a prefix is cached as far as there is a checkpoint of the states behind it.

Keys and values lie in blocks as everywhere. The ranks have places for checkpoints, copies of all states of a sequence
behind some of its tokens. Where a step is to leave one it ends there, at the border of a block: behind the last block
that another sequence with these tokens could use, and behind what it has in common with others. That is known of
blocks that are cached without a checkpoint, and of a sequence that waits for this one to compute what they share; so
the second or third to come with a common beginning finds a checkpoint there. (SGLang's radix cache of Mamba states
branches in the same way.) The least recently used checkpoint gives up its place.

Plans are executed in order: a place may be filled in the plan behind the one that reads it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from services.scheduler.core.memory import BlockAllocator
from services.scheduler.core.sequence import Sequence
from shared.blocks import BlockHash
from shared.ids import SequenceId
from shared.messages.worker import StateCopy


class StateBlockAllocator(BlockAllocator):
    """Owns which place holds the states behind which block, and where steps of sequences that compute their prompts are
    to end. It works without a KV store and connector: neither knows states."""

    def __init__(self, num_blocks: int, block_size: int, checkpoints: int) -> None:
        """`checkpoints`: places for them."""
        super().__init__(num_blocks, block_size)
        self.free_places = list(range(checkpoints))
        """Without a checkpoint; only this class writes it, as the two below."""
        self.place_of: OrderedDict[BlockHash, int] = OrderedDict()
        """Of the states behind the block of this name, the least recently used first."""
        self.adopted: dict[SequenceId, BlockHash] = {}
        """The checkpoints that sequences go on from which the workers do not know yet: they stay."""
        self._borders: dict[SequenceId, list[int]] = {}
        """Blocks behind which each sequence is to leave a checkpoint, in rising order."""
        self._checkpoints: list[StateCopy] = []

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """Leading blocks of `sequence` that lie computed in the pool, up to the last one with a checkpoint."""
        found, names = super().cached_blocks(sequence), sequence.tokens.hashes
        while found and names[len(found) - 1] not in self.place_of:
            found.pop()
        return found

    def adopt(self, sequence: Sequence, cached: list[int]) -> None:
        """See `BlockAllocator.adopt`; the checkpoint behind them stays until the workers are told of it."""
        common = len(super().cached_blocks(sequence))
        super().adopt(sequence, cached)
        if cached:
            self.adopted[sequence.id] = name = sequence.tokens.hashes[len(cached) - 1]
            self.place_of.move_to_end(name)
        if sequence.tokens.hashes and not sequence.whole:
            ends = {common, sequence.reusable_blocks}
            self._borders[sequence.id] = sorted(end for end in ends if end > len(cached))

    def share_at(self, sequence: Sequence, blocks: int) -> None:
        """Others will go on behind its first `blocks`."""
        borders = self._borders.get(sequence.id)
        if borders is not None and blocks not in borders and blocks * self.block_size > sequence.tokens.planned:
            borders.append(blocks)
            borders.sort()

    def step_end(self, sequence: Sequence, tokens: int) -> int:
        """See `BlockAllocator.step_end`: before the next border, if it leaves a checkpoint there."""
        borders = self._borders.get(sequence.id)
        return min(tokens, borders[0] * self.block_size) if borders else tokens

    def index_full_blocks(self, sequence: Sequence) -> None:
        """See `BlockAllocator.index_full_blocks`; where a step ends at a border, the states are kept behind it."""
        super().index_full_blocks(sequence)
        borders, tokens = self._borders.get(sequence.id), sequence.tokens
        while borders and borders[0] * self.block_size <= tokens.planned:
            border = borders.pop(0)
            if border * self.block_size == tokens.planned:
                self._keep(sequence, tokens.hashes[border - 1])

    def take_restored(self, sequences: Iterable[Sequence]) -> tuple[StateCopy, ...]:
        """What new sequences of a plan go on from."""
        return tuple(
            StateCopy(sequence.id, self.place_of[self.adopted.pop(sequence.id)])
            for sequence in sequences
            if sequence.id in self.adopted
        )

    def take_checkpoints(self) -> tuple[StateCopy, ...]:
        """What is kept of sequences behind the plan."""
        taken, self._checkpoints = self._checkpoints, []
        return tuple(taken)

    def release(self, sequence: Sequence, last: Container[BlockHash] = ()) -> None:
        """See `BlockAllocator.release`."""
        super().release(sequence, last)
        self.adopted.pop(sequence.id, None)
        self._borders.pop(sequence.id, None)

    def forget_names(self, sequence: Sequence) -> None:
        """See `BlockAllocator.forget_names`; and the checkpoints behind those blocks."""
        super().forget_names(sequence)
        for name in sequence.tokens.hashes:
            if name in self.place_of and name not in self.index.block_of and name not in self.adopted.values():
                self.free_places.append(self.place_of.pop(name))

    def _keep(self, sequence: Sequence, name: BlockHash) -> None:
        if name in self.place_of:
            self.place_of.move_to_end(name)
            return
        if not self.free_places:
            used = self.adopted.values()
            oldest = next((each for each in self.place_of if each not in used), None)
            if oldest is None:
                return
            self.free_places.append(self.place_of.pop(oldest))
        self.place_of[name] = place = self.free_places.pop()
        self._checkpoints.append(StateCopy(sequence.id, place))
