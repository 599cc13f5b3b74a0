"""Rows beside prompts, which tokens attend to in layers of their own: where their keys and values lie, and go."""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from services.worker.batch.batch import BrokenPlan, EncodedRows
from services.worker.batch.prompt_inputs import EmbeddedPrompt
from services.worker.batch.rows import Indices, Int32s
from shared.blocks import blocks_for
from shared.kv_groups import NULL_BLOCK
from shared.media.seen_rows import SeenRows, blocks_of_rows, places_of_rows, seen_rows
from shared.messages.worker import NewSequence

_WIRE = np.dtype("<u4")


class EncodedTables:
    """Owns the tables of blocks for such rows, by sequence index, and the rows that are still to be written."""

    def __init__(self, max_sequences: int, rows: int, parts: int, num_blocks: int, block_size: int) -> None:
        """`rows`: of a sequence, at most. `parts`: of `num_blocks` blocks, see `KvCacheGroup.parts`."""
        self._rows, self._num_blocks, self._block_size = rows, num_blocks, block_size
        self._parts = np.arange(parts, dtype=np.int32) * np.int32(num_blocks)
        """What is added to a block's number for each of its parts: a layer's memory has the first part of all blocks,
        then the second of all, and so on."""
        width = blocks_for(rows, block_size * parts) * parts
        self._ids: Int32s = np.zeros((max_sequences, width), dtype=np.int32)
        """Parts of blocks; a part is what attention takes for a block."""
        self._lengths: Int32s = np.zeros(max_sequences, dtype=np.int32)
        """Of the first rows that a sequence's tokens see."""
        self._first: Int32s = np.zeros(max_sequences, dtype=np.int32)
        """The token from which on they do."""
        self._later: dict[int, list[SeenRows]] = {}
        """All that tokens see, of sequences where that changes from token to token."""
        self._unwritten: dict[int, EmbeddedPrompt] = {}

    def check(self, new: NewSequence) -> None:
        """Raises BrokenPlan where a sequence's rows, or its blocks for them, are not as many as allowed."""
        embeds = new.prompt_embeds
        count = embeds.count if embeds is not None and embeds.encoded else 0
        blocks = np.frombuffer(new.encoded_blocks, dtype=_WIRE)
        if count > self._rows:
            raise BrokenPlan(f"sequence {new.sequence}: {count} rows beside its prompt; {self._rows} are allowed")
        parts, most = len(self._parts), self._ids.shape[1] // len(self._parts)
        wanted = 0 if not count or embeds is None else blocks_for(blocks_of_rows(embeds, self._block_size), parts)
        if len(blocks) != wanted:
            raise BrokenPlan(f"sequence {new.sequence}: {len(blocks)} blocks for {count} rows beside its prompt")
        if len(blocks) > most:
            raise BrokenPlan(f"sequence {new.sequence}: {len(blocks)} blocks for rows; {most} are allowed")
        if len(blocks) and int(blocks.max()) >= self._num_blocks:
            raise BrokenPlan(f"sequence {new.sequence}: block {blocks.max()} of {self._num_blocks}")

    def add(self, seq_index: int, new: NewSequence) -> None:
        """Whoever is at `seq_index` now; its first step writes its rows, unless they are there."""
        blocks = np.frombuffer(new.encoded_blocks, dtype=_WIRE).astype(np.int32)
        blocks = (blocks[:, None] + self._parts).ravel()
        embeds = new.prompt_embeds
        self._ids[seq_index] = NULL_BLOCK
        self._ids[seq_index, : len(blocks)] = blocks
        self._lengths[seq_index] = 0
        self._later.pop(seq_index, None)
        if embeds is not None and embeds.encoded:
            first, *others = seen_rows(embeds, self._block_size)
            self._first[seq_index], self._lengths[seq_index] = first.token, first.rows
            if others:
                self._later[seq_index] = [first, *others]
            if not new.encoded_computed:
                placed = replace(embeds, runs=places_of_rows(embeds, self._block_size))
                self._unwritten[seq_index] = EmbeddedPrompt(placed)

    def release(self, seq_index: int) -> None:
        """Forgets a sequence."""
        self._unwritten.pop(seq_index, None)
        self._later.pop(seq_index, None)

    def clear(self) -> None:
        """Forgets all."""
        self._unwritten.clear()
        self._later.clear()

    def of(self, seq_indices: Indices, positions: Int32s) -> EncodedRows:
        """Those of a step whose rows are the tokens at `positions` [n] of the sequences at `seq_indices` [n]."""
        values: list[Tensor] = []
        slots: list[NDArray[np.int32]] = []
        first = [i for i in dict.fromkeys(seq_indices.tolist()) if i in self._unwritten] if self._unwritten else []
        for seq_index in first:
            places, rows = self._unwritten.pop(seq_index).between(0, self._ids.shape[1] * self._block_size)
            block, offset = np.divmod(places, self._block_size)
            slots.append(self._ids[seq_index, block] * np.int32(self._block_size) + offset)
            values += rows
        if len({each.dtype for each in values}) > 1:
            values = [each.float() for each in values]
        counts = [len(each) for each in slots]
        tables, lengths = self._seen(seq_indices, positions)
        return EncodedRows(
            tables=tables,
            lengths=lengths,
            values=torch.cat(values) if values else None,
            slots=np.concatenate(slots) if slots else np.zeros(0, dtype=np.int32),
            owners=np.repeat(np.array(first, dtype=np.int64), counts),
        )

    def _seen(self, seq_indices: Indices, positions: Int32s) -> tuple[Int32s, Int32s]:
        """The blocks [n, width] in which lies what each row sees, and how much that is [n]."""
        lengths = np.where(positions >= self._first[seq_indices], self._lengths[seq_indices], np.int32(0))
        tables: Int32s = self._ids[seq_indices]
        for seq_index in [each for each in dict.fromkeys(seq_indices.tolist()) if each in self._later]:
            rows, seen = np.flatnonzero(seq_indices == seq_index), self._later[seq_index]
            number = np.searchsorted([each.token for each in seen], positions[rows], side="right") - 1
            for place in np.unique(number[number > 0]).tolist():
                own, block = rows[number == place], seen[place].block
                tables[own, : tables.shape[1] - block] = self._ids[seq_index, block:]
                lengths[own] = seen[place].rows
        width = max(1, blocks_for(int(lengths.max(initial=0)), self._block_size))
        return np.ascontiguousarray(tables[:, :width]), lengths
