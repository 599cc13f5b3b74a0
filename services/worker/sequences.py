"""What a rank knows of its sequences, in arrays by slot, and how a plan becomes one flat batch.

Owns token histories, block tables and sampling parameters; the only writer is the backend's compute thread. No loop
here runs over tokens; those over a step's sequences only look things up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.sampling.parameters import Choices, ParameterTable
from services.worker.sampling.prompt_rows import LogitsRows, PromptRows, merged
from shared.blocks import BLOCK_SIZE, blocks_for
from shared.ids import SequenceId
from shared.messages.worker import NewSequence, Work

Int32s = NDArray[np.int32]
Slots = NDArray[np.intp]

_WIRE = np.dtype("<u4")


class BrokenPlan(Exception):
    """A plan that cannot be computed as it stands: a bug of whoever made it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's rows: each sequence's new tokens one after the other, sequences with a single row first."""

    ids: Int32s
    """[n]"""
    positions: Int32s
    """[n]"""
    kv_slots: Int32s
    """[n]"""
    query_starts: Int32s
    """[S + 1]"""
    context_lens: Int32s
    """[S]"""
    block_tables: Int32s
    """[S, width]"""
    logits_rows: Int32s
    """[R] in the plan's order."""
    num_decodes: int
    prefills: tuple[tuple[int, int], ...]
    max_query: int
    max_context: int
    sampled: tuple[SequenceId, ...]
    """[R] in the plan's order."""
    sampled_slots: Slots
    choices: Choices | None
    """None where nothing is sampled."""
    prompts: PromptRows
    """What is told of prompts. Where there is any, `logits_rows` are those of `merged`, in rising order."""
    merged: LogitsRows | None = None


class SequenceTable:
    """The sequences of one rank; see the module."""

    def __init__(self, *, max_sequences: int, max_model_len: int, num_blocks: int, vocab_size: int) -> None:
        width = blocks_for(max_model_len + 1)
        self._num_blocks = num_blocks
        self._slots: dict[SequenceId, int] = {}
        self._free = list(range(max_sequences - 1, -1, -1))
        # One token more than the context: the last one drawn is remembered, though never computed. Untouched pages of
        # these arrays take no memory.
        self._tokens = np.zeros((max_sequences, max_model_len + 1), dtype=np.int32)
        self._blocks = np.zeros((max_sequences, width), dtype=np.int32)
        self._length = np.zeros(max_sequences, dtype=np.int32)
        self._prompt = np.zeros(max_sequences, dtype=np.int32)
        self._computed = np.zeros(max_sequences, dtype=np.int32)
        self._held = np.zeros(max_sequences, dtype=np.int32)
        """Blocks in each table."""
        self._parameters = ParameterTable(max_sequences, vocab_size)
        self._scored: dict[int, tuple[SequenceId, int]] = {}
        """The slots whose prompts are scored, and how many of the most likely tokens are told beside each."""

    def __len__(self) -> int:
        return len(self._slots)

    def clear(self) -> None:
        """Forgets every sequence."""
        self._free.extend(self._slots.values())
        self._slots.clear()
        self._scored.clear()

    def release(self, sequence: SequenceId) -> None:
        """Forgets `sequence`. Raises BrokenPlan where it is unknown."""
        slot = self._slot_of(sequence)
        self._free.append(slot)
        self._scored.pop(slot, None)
        del self._slots[sequence]

    def add(self, new: NewSequence) -> None:
        """Remembers a sequence. Raises BrokenPlan where it is known already, too long, or one too many."""
        tokens = np.frombuffer(new.tokens, dtype=_WIRE)
        self._check_new(new, len(tokens))
        slot = self._free.pop()
        self._slots[new.sequence] = slot
        self._tokens[slot, : len(tokens)] = tokens
        self._length[slot] = len(tokens)
        self._prompt[slot] = new.prompt_length
        self._computed[slot] = new.computed
        self._held[slot] = 0
        self._append_blocks(slot, new.sequence, new.blocks)
        if new.computed > self._held[slot] * BLOCK_SIZE:
            raise BrokenPlan(f"sequence {new.sequence}: {new.computed} computed tokens lie in too few blocks")
        self._parameters.put(slot, new)
        if new.sampling.prompt_logprobs is not None:
            self._scored[slot] = (new.sequence, new.sampling.prompt_logprobs)

    def _check_new(self, new: NewSequence, length: int) -> None:
        if new.sequence in self._slots:
            raise BrokenPlan(f"sequence {new.sequence} is new, but it was never released")
        if not self._free:
            raise BrokenPlan(f"sequence {new.sequence} is one more than the {len(self._slots)} agreed on")
        if not 0 < length < self._tokens.shape[1]:
            raise BrokenPlan(f"sequence {new.sequence}: {length} tokens do not fit the context")
        if not 0 <= new.computed < length or not 0 <= new.prompt_length <= length:
            raise BrokenPlan(f"sequence {new.sequence}: computed or prompt_length is out of range")

    def batch(self, work: tuple[Work, ...]) -> Batch:
        """The rows of `work`, which count as computed from here on. Raises BrokenPlan where they cannot be."""
        slots = np.array([self._slot_of(item.sequence) for item in work], dtype=np.intp)
        for slot, item in zip(slots, work, strict=True):
            if item.blocks:
                self._append_blocks(int(slot), item.sequence, item.blocks)
        counts = np.array([item.count for item in work], dtype=np.int32)
        sampling = np.flatnonzero([item.sample for item in work])
        self._check_work(work, slots, counts, sampling)
        order = np.argsort(counts > 1, kind="stable")
        where = np.empty_like(order)
        where[order] = np.arange(len(order))
        sampled_slots = slots[sampling]
        lengths = self._length[sampled_slots]
        return self._flattened(
            slots[order],
            counts[order],
            sampled=tuple(work[i].sequence for i in sampling),
            sampled_slots=sampled_slots,
            sampled_at=where[sampling],
            choices=self._parameters.choose(sampled_slots, lengths - self._prompt[sampled_slots])
            if len(sampling)
            else None,
        )

    def _check_work(self, work: tuple[Work, ...], slots: Slots, counts: Int32s, sampling: Slots) -> None:
        ends = self._computed[slots] + counts
        broken = (counts < 1) | (ends > self._length[slots]) | (ends > self._held[slots] * BLOCK_SIZE)
        broken[sampling] |= ends[sampling] != self._length[slots[sampling]]
        if broken.any():
            index = int(broken.argmax())
            slot = int(slots[index])
            raise BrokenPlan(
                f"{work[index]}: of {self._length[slot]} tokens {self._computed[slot]} are computed, "
                f"in {self._held[slot]} blocks"
            )
        if len(np.unique(slots)) != len(slots):
            raise BrokenPlan("a sequence has two shares of one step")

    def _flattened(
        self,
        slots: Slots,
        counts: Int32s,
        *,
        sampled: tuple[SequenceId, ...],
        sampled_slots: Slots,
        sampled_at: Slots,
        choices: Choices | None,
    ) -> Batch:
        starts = self._computed[slots]
        ends = starts + counts
        query_starts = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_starts[1:])
        owner = np.repeat(np.arange(len(slots)), counts)
        positions = np.arange(query_starts[-1], dtype=np.int32) + (starts - query_starts[:-1])[owner]
        rows = slots[owner]
        block, offset = np.divmod(positions, BLOCK_SIZE)
        max_context = int(ends.max())
        num_decodes = int(np.count_nonzero(counts == 1))
        prompts = self._prompt_rows(slots, counts, query_starts)
        drawn = query_starts[sampled_at + 1] - 1
        union = merged(drawn, prompts.rows()) if prompts.parts else None
        self._computed[slots] = ends
        return Batch(
            ids=self._tokens[rows, positions],
            positions=positions,
            kv_slots=self._blocks[rows, block] * BLOCK_SIZE + offset,
            query_starts=query_starts,
            context_lens=ends,
            block_tables=self._blocks[slots, : blocks_for(max_context)],
            logits_rows=drawn if union is None else union.rows,
            num_decodes=num_decodes,
            prefills=tuple(zip(counts[num_decodes:].tolist(), ends[num_decodes:].tolist(), strict=True)),
            max_query=int(counts.max()),
            max_context=max_context,
            sampled=sampled,
            sampled_slots=sampled_slots,
            choices=choices,
            prompts=prompts,
            merged=union,
        )

    def _prompt_rows(self, slots: Slots, counts: Int32s, query_starts: Int32s) -> PromptRows:
        rows = PromptRows()
        if not self._scored:
            return rows
        for place, slot in enumerate(slots.tolist()):
            if slot in self._scored:
                sequence, most_likely = self._scored[slot]
                rows.add(
                    sequence,
                    prompt=self._tokens[slot, : int(self._prompt[slot])],
                    computed=int(self._computed[slot]),
                    count=int(counts[place]),
                    first_row=int(query_starts[place]),
                    most_likely=most_likely,
                )
        return rows

    def append(self, slots: Slots, tokens: Int32s) -> None:
        """The tokens just drawn, one for each of `slots`."""
        lengths = self._length[slots]
        self._tokens[slots, lengths] = tokens
        self._length[slots] = lengths + 1

    def history(self, slots: Slots, positions: Int32s) -> tuple[Int32s, Int32s, Int32s]:
        """(tokens [P, longest], lengths [P], prompt lengths [P]) before the output `positions` are drawn."""
        prompts = self._prompt[slots]
        lengths = prompts + positions
        return self._tokens[slots, : int(lengths.max())], lengths, prompts

    def _slot_of(self, sequence: SequenceId) -> int:
        try:
            return self._slots[sequence]
        except KeyError:
            raise BrokenPlan(f"sequence {sequence} is unknown") from None

    def _append_blocks(self, slot: int, sequence: SequenceId, packed: bytes) -> None:
        blocks = np.frombuffer(packed, dtype=_WIRE)
        held = int(self._held[slot])
        if held + len(blocks) > self._blocks.shape[1]:
            raise BrokenPlan(f"sequence {sequence}: {held + len(blocks)} blocks are more than its context fills")
        if len(blocks) and int(blocks.max()) >= self._num_blocks:
            raise BrokenPlan(f"sequence {sequence}: block {blocks.max()} of {self._num_blocks}")
        self._blocks[slot, held : held + len(blocks)] = blocks
        self._held[slot] = held + len(blocks)
