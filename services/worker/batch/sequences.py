"""What a rank knows of its sequences, in arrays by slot, and how a plan becomes one flat batch.

Owns token histories, block tables and sampling parameters; the only writer is the backend's compute thread. No loop
here runs over tokens; those over a step's sequences only look things up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.worker.batch.batch import Batch, BrokenPlan, DraftTokens, ScheduledWork
from services.worker.batch.prompt_rows import ScoredPrompts, merge_logits_rows
from services.worker.batch.rows import Int32s, RowRuns, Slots, drafts_apart, rows_of
from services.worker.sampling.parameters import ParameterTable, SamplingBatch
from shared.blocks import BLOCK_SIZE, blocks_for
from shared.ids import SequenceId
from shared.messages.worker import NewSequence, SequenceWork

_WIRE = np.dtype("<u4")


class SequenceTable:
    """The sequences of one rank; see the module."""

    def __init__(self, *, max_sequences: int, max_model_len: int, num_blocks: int, vocab_size: int) -> None:
        self._slots: dict[SequenceId, int] = {}
        self._free = list(range(max_sequences - 1, -1, -1))
        # One token more than the context: the last one drawn is remembered, though never computed. Untouched pages
        # take no memory.
        self.tokens: Int32s = np.zeros((max_sequences, max_model_len + 1), dtype=np.int32)
        """[slots, width] what each sequence holds. Written by nobody else, as all arrays here."""
        self.lengths: Int32s = np.zeros(max_sequences, dtype=np.int32)
        """[slots] tokens known, or being drawn; keys and values of the last one are not computed yet."""
        self.prompt_lengths: Int32s = np.zeros(max_sequences, dtype=np.int32)
        """[slots]"""
        self._computed = np.zeros(max_sequences, dtype=np.int32)
        self.slot_generations: NDArray[np.int64] = np.zeros(max_sequences, dtype=np.int64)
        """[slots] a number that changes when a sequence leaves, so that what is drawn for one that has left is not
        taken for the next one's."""
        self._blocks = BlockTables(max_sequences, blocks_for(max_model_len + 1), num_blocks)
        self._parameters = ParameterTable(max_sequences, vocab_size)
        self._scored = ScoredPrompts()

    def __len__(self) -> int:
        return len(self._slots)

    def clear(self) -> None:
        """Forgets every sequence."""
        self.slot_generations += 1
        self._free.extend(self._slots.values())
        self._slots.clear()
        self._scored.clear()

    def release(self, sequence: SequenceId) -> int:
        """Forgets `sequence`, and answers with the slot that it had. Raises BrokenPlan where it is unknown."""
        slot = self._slot_of(sequence)
        self._free.append(slot)
        self.slot_generations[slot] += 1
        self._scored.forget(slot)
        del self._slots[sequence]
        return slot

    def add(self, new: NewSequence) -> int:
        """Remembers a sequence, in the slot it gives back.

        Raises BrokenPlan where it is known already, too long, or one too many.
        """
        tokens = np.frombuffer(new.tokens, dtype=_WIRE)
        self._check_new(new, len(tokens))
        slot = self._free.pop()
        self._slots[new.sequence] = slot
        self.tokens[slot, : len(tokens)] = tokens
        self.lengths[slot] = len(tokens)
        self.prompt_lengths[slot] = new.prompt_length
        self._computed[slot] = new.computed
        self._blocks.begin(slot)
        self._blocks.append(slot, new.sequence, new.blocks)
        if new.computed > self._blocks.room(slot):
            raise BrokenPlan(f"sequence {new.sequence}: {new.computed} computed tokens lie in too few blocks")
        self._parameters.put(slot, new)
        self._scored.put(slot, new)
        return slot

    def _check_new(self, new: NewSequence, length: int) -> None:
        if new.sequence in self._slots:
            raise BrokenPlan(f"sequence {new.sequence} is new, but it was never released")
        if not self._free:
            raise BrokenPlan(f"sequence {new.sequence} is one more than the {len(self._slots)} agreed on")
        if not 0 < length < self.tokens.shape[1]:
            raise BrokenPlan(f"sequence {new.sequence}: {length} tokens do not fit the context")
        if not 0 <= new.computed < length or not 0 <= new.prompt_length <= length:
            raise BrokenPlan(f"sequence {new.sequence}: computed or prompt_length is out of range")

    def scheduled(self, work: tuple[SequenceWork, ...]) -> ScheduledWork:
        """`work`, its new blocks appended to the tables. Raises BrokenPlan where a sequence is unknown, or twice in it.

        A sequence whose context is full is left out: it was planned before it was known that speculation would fill it
        so soon, and draws nothing more.
        """
        slots = np.array([self._slot_of(item.sequence) for item in work], dtype=np.intp)
        if len(set(slots.tolist())) != len(slots):
            raise BrokenPlan("a sequence has two shares of one step")
        for item in work:
            if item.blocks:
                self._blocks.append(self._slots[item.sequence], item.sequence, item.blocks)
        full = self.lengths[slots] >= self.tokens.shape[1]
        if full.any():
            work = tuple(work[i] for i in np.flatnonzero(~full))
            slots = slots[~full]
        counts = np.array([item.count for item in work], dtype=np.int32)
        samples = np.array([item.sample for item in work], dtype=np.bool_)
        asked = np.array([item.speculate for item in work], dtype=np.int32)
        return ScheduledWork(work, slots, counts, samples, self._most_drafts(slots, counts, samples, asked))

    def _most_drafts(self, slots: Slots, counts: Int32s, samples: NDArray[np.bool_], asked: Int32s) -> Int32s:
        """[W] Drafts are verified where a decode samples, and have to fit the context and the blocks."""
        if not asked.any():
            return asked
        room = np.minimum(self._blocks.room(slots), self.tokens.shape[1] - 1) - self.lengths[slots]
        return np.where(samples & (counts == 1), np.clip(room, 0, asked), 0).astype(np.int32)

    def batch(self, scheduled: ScheduledWork, drafts: DraftTokens | None = None) -> Batch:
        """The rows of `scheduled`, which count as computed from here on; `drafts` are those of the speculating ones.
        Where the host does not know those, ids of their rows mean nothing.

        Raises BrokenPlan where they cannot be computed.
        """
        self._check_work(scheduled)
        drafted = np.zeros(len(scheduled.slots), dtype=np.int32)
        if drafts is not None:
            drafted[scheduled.speculating] = drafts.counts
            if isinstance(drafts.tokens, np.ndarray):
                self._put_drafts(scheduled.slots[scheduled.speculating], drafts.tokens, drafts.counts)
        return self._flattened(scheduled, drafted)

    def _put_drafts(self, slots: Slots, tokens: Int32s, counts: Int32s) -> None:
        """Behind the known tokens, where those drawn will be written over them."""
        at = self.lengths[slots][:, None] + np.arange(tokens.shape[1])
        rows, columns = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
        self.tokens[slots[rows], at[rows, columns]] = tokens[rows, columns]

    def _check_work(self, scheduled: ScheduledWork) -> None:
        slots = scheduled.slots
        ends = self._computed[slots] + scheduled.counts
        broken = (scheduled.counts < 1) | (ends > self.lengths[slots]) | (ends > self._blocks.room(slots))
        broken |= scheduled.samples & (ends != self.lengths[slots])
        if broken.any():
            index = int(broken.argmax())
            slot = int(slots[index])
            raise BrokenPlan(
                f"{scheduled.work[index]}: of {self.lengths[slot]} tokens {self._computed[slot]} are computed, "
                f"in {self._blocks.held(slot)} blocks"
            )

    def _flattened(self, scheduled: ScheduledWork, drafted: Int32s) -> Batch:
        units = self._units(scheduled, drafted)
        sampling = np.flatnonzero(scheduled.samples)
        sampled_slots = scheduled.slots[sampling]
        rows = rows_of(units, self._blocks.ids, self.tokens)
        prompts = self._scored.rows_of(units, rows.last_rows, self.tokens)
        drawn = rows.last_rows[scheduled.samples[units.share]]
        union = merge_logits_rows(drawn, prompts.rows()) if prompts.parts else None
        self._computed[scheduled.slots] += scheduled.counts
        return Batch(
            rows=rows,
            logits_rows=drawn if union is None else union.rows,
            sampled=tuple(scheduled.work[i].sequence for i in sampling),
            sampled_slots=sampled_slots,
            drafted=drafted[sampling],
            choices=self._choices(sampled_slots, drafted[sampling]),
            drawn_rows=drawn,
            prompts=prompts,
            merged=union,
        )

    def _units(self, scheduled: ScheduledWork, drafted: Int32s) -> RowRuns:
        """Each share is one run of rows; but each draft is one of its own, as all of them are decodes then."""
        share, ahead = drafts_apart(drafted)
        slots = scheduled.slots[share]
        return RowRuns(share, slots, self._computed[slots] + ahead, scheduled.counts[share])

    def _choices(self, slots: Slots, drafted: Int32s) -> SamplingBatch | None:
        if not len(slots):
            return None
        owner, ahead = drafts_apart(drafted)
        return self.sampling_batch(slots[owner], ahead)

    def append(self, slots: Slots, counts: Int32s, drawn: Int32s) -> None:
        """What was drawn for the sequences of a batch: each gains the first `counts` [Q] tokens of its row of `drawn`
        [Q, K + 1]. Keys and values are computed of all but the last one then."""
        if drawn.shape[1] == 1:
            self.fill(slots, self.advance(slots), drawn[:, 0])
        else:
            self.fill_all(slots, self.assume(slots, counts - 1), counts, drawn)

    def append_blocks(self, slot: int, work: SequenceWork) -> None:
        """Those that `work` brings. Raises BrokenPlan where they are too many."""
        self._blocks.append(slot, work.sequence, work.blocks)

    def room(self, slots: Slots) -> Int32s:
        """Tokens that each one's blocks hold."""
        return self._blocks.room(slots)

    def count_computed(self, slots: Slots) -> None:
        """One more token of each, in a batch that was not made here."""
        self._computed[slots] += 1

    def advance(self, slots: Slots) -> Int32s:
        """A token is being drawn for each of a batch's sequences, without drafts: the places [Q] that `fill` is going
        to put them in. Until then they count as known."""
        places = self.lengths[slots]
        self.lengths[slots] = places + 1
        return places

    def assume(self, slots: Slots, drafted: Int32s) -> Int32s:
        """See `advance`, and that the drafts [Q] stand: the places [Q] that `fill_all` is going to begin at."""
        places = self.advance(slots)
        self.lengths[slots] += drafted
        self._computed[slots] += drafted
        return places

    def shorten(self, slots: Slots, tokens: Int32s) -> None:
        """So many drafts [Q] are not accepted, of those that `assume` counted."""
        self.lengths[slots] -= tokens
        self._computed[slots] -= tokens

    def fill(self, slots: Slots, places: Int32s, tokens: Int32s) -> None:
        """What was drawn for them, [Q] each."""
        self.tokens[slots, places] = tokens

    def fill_all(self, slots: Slots, places: Int32s, counts: Int32s, tokens: Int32s) -> None:
        """The first `counts` [Q] of each row of `tokens` [Q, K + 1], from `places` [Q] on."""
        if tokens.shape[1] == 1:
            self.fill(slots, places, tokens[:, 0])
            return
        rows, columns = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
        self.tokens[slots[rows], places[rows] + columns] = tokens[rows, columns]

    def drafts(self, slots: Slots, most: int) -> Int32s:
        """[Q, most] what lies behind the known tokens."""
        at = np.minimum(self.lengths[slots][:, None] + np.arange(most), self.tokens.shape[1] - 1)
        drafts: Int32s = self.tokens[slots[:, None], at]
        return drafts

    @property
    def block_tables(self) -> Int32s:
        """[slots, blocks] the blocks of each sequence in their order."""
        return self._blocks.ids

    def sampling_batch(self, slots: Slots, ahead: Int32s | int) -> SamplingBatch:
        """How the tokens are drawn that come `ahead` tokens behind the known ones of the sequences in `slots`."""
        return self._parameters.sampling_batch(slots, self.lengths[slots] - self.prompt_lengths[slots] + ahead)

    def history(self, slots: Slots, positions: Int32s) -> tuple[Int32s, Int32s, Int32s]:
        """(tokens [P, longest], lengths [P], prompt lengths [P]) before the output `positions` are drawn."""
        prompts = self.prompt_lengths[slots]
        lengths = prompts + positions
        return self.tokens[slots, : int(lengths.max())], lengths, prompts

    def _slot_of(self, sequence: SequenceId) -> int:
        try:
            return self._slots[sequence]
        except KeyError:
            raise BrokenPlan(f"sequence {sequence} is unknown") from None


# Which blocks hold each sequence's keys and values, in an array by slot.


class BlockTables:
    """Owned by the sequence table: a row for each slot. Untouched pages take no memory."""

    def __init__(self, slots: int, width: int, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.ids: Int32s = np.zeros((slots, width), dtype=np.int32)
        """[slots, width]"""
        self._held = np.zeros(slots, dtype=np.int32)

    def begin(self, slot: int) -> None:
        """An empty table for whoever has the slot now."""
        self._held[slot] = 0

    def append(self, slot: int, sequence: SequenceId, packed: bytes) -> None:
        """Raises BrokenPlan where they are too many, or not of this worker's memory."""
        blocks = np.frombuffer(packed, dtype=_WIRE)
        held = int(self._held[slot])
        if held + len(blocks) > self.ids.shape[1]:
            raise BrokenPlan(f"sequence {sequence}: {held + len(blocks)} blocks are more than its context fills")
        if len(blocks) and int(blocks.max()) >= self._num_blocks:
            raise BrokenPlan(f"sequence {sequence}: block {blocks.max()} of {self._num_blocks}")
        self.ids[slot, held : held + len(blocks)] = blocks
        self._held[slot] = held + len(blocks)

    def held(self, slots: Slots | int) -> Int32s:
        """Blocks in each table."""
        held: Int32s = self._held[slots]
        return held

    def room(self, slots: Slots | int) -> Int32s:
        """Tokens that each one's blocks hold."""
        return self.held(slots) * np.int32(BLOCK_SIZE)
