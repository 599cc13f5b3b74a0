"""Rows beside prompts, which tokens attend to in layers of their own: where their keys and values lie, and go."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.batch.batch import BrokenPlan, EncodedRows
from services.worker.batch.prompt_inputs import EmbeddedPrompt
from services.worker.batch.rows import Indices, Int32s
from shared.blocks import blocks_for
from shared.kv_groups import NULL_BLOCK
from shared.messages.worker import NewSequence

_WIRE = np.dtype("<u4")


class EncodedTables:
    """Owns the tables of blocks for such rows, by sequence index, and the rows that are still to be written."""

    def __init__(self, max_sequences: int, rows: int, num_blocks: int, block_size: int) -> None:
        """`rows`: of a sequence, at most."""
        self._rows, self._num_blocks, self._block_size = rows, num_blocks, block_size
        self._ids: Int32s = np.zeros((max_sequences, blocks_for(rows, block_size)), dtype=np.int32)
        self._lengths: Int32s = np.zeros(max_sequences, dtype=np.int32)
        self._unwritten: dict[int, EmbeddedPrompt] = {}

    def check(self, new: NewSequence) -> None:
        """Raises BrokenPlan where a sequence's rows, or its blocks for them, are not as many as allowed."""
        embeds = new.prompt_embeds
        count = embeds.count if embeds is not None and embeds.encoded else 0
        blocks = np.frombuffer(new.encoded_blocks, dtype=_WIRE)
        if count > self._rows:
            raise BrokenPlan(f"sequence {new.sequence}: {count} rows beside its prompt; {self._rows} are allowed")
        if len(blocks) != blocks_for(count, self._block_size):
            raise BrokenPlan(f"sequence {new.sequence}: {len(blocks)} blocks for {count} rows beside its prompt")
        if len(blocks) and int(blocks.max()) >= self._num_blocks:
            raise BrokenPlan(f"sequence {new.sequence}: block {blocks.max()} of {self._num_blocks}")

    def add(self, seq_index: int, new: NewSequence) -> None:
        """Whoever is at `seq_index` now; its first step writes its rows, unless they are there."""
        blocks = np.frombuffer(new.encoded_blocks, dtype=_WIRE)
        embeds = new.prompt_embeds
        self._ids[seq_index] = NULL_BLOCK
        self._ids[seq_index, : len(blocks)] = blocks
        self._lengths[seq_index] = 0
        if embeds is not None and embeds.encoded:
            self._lengths[seq_index] = embeds.count
            if not new.encoded_computed:
                self._unwritten[seq_index] = EmbeddedPrompt(embeds)

    def release(self, seq_index: int) -> None:
        """Forgets a sequence."""
        self._unwritten.pop(seq_index, None)

    def clear(self) -> None:
        """Forgets all."""
        self._unwritten.clear()

    def of(self, seq_indices: Indices) -> EncodedRows:
        """Those of a step whose rows are of the sequences at `seq_indices` [n]."""
        values: list[Tensor] = []
        slots: list[NDArray[np.int32]] = []
        first = [i for i in dict.fromkeys(seq_indices.tolist()) if i in self._unwritten] if self._unwritten else []
        for seq_index in first:
            places, rows = self._unwritten.pop(seq_index).between(0, self._rows)
            block, offset = np.divmod(places, self._block_size)
            slots.append(self._ids[seq_index, block] * np.int32(self._block_size) + offset)
            values += rows
        if len({each.dtype for each in values}) > 1:
            values = [each.float() for each in values]
        return EncodedRows(
            tables=self._ids[seq_indices],
            lengths=self._lengths[seq_indices],
            values=torch.cat(values) if values else None,
            slots=np.concatenate(slots) if slots else np.zeros(0, dtype=np.int32),
        )
