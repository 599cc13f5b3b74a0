"""What a rank knows of its sequences, in arrays by slot, and how a plan becomes one flat batch.

Owns token histories, block tables and sampling parameters; the only writer is the backend's compute thread. No loop
here runs over tokens; those over a step's sequences only look things up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.worker.batch import Batch, BrokenPlan, Shares
from services.worker.block_tables import BlockTables
from services.worker.rows import Int32s, Slots, Units, drafts_apart, rows_of
from services.worker.sampling.parameters import Choices, ParameterTable
from services.worker.sampling.prompt_rows import ScoredPrompts, merged
from services.worker.speculation.proposer import Drafts
from shared.blocks import blocks_for
from shared.ids import SequenceId
from shared.messages.worker import NewSequence, Work

_WIRE = np.dtype("<u4")


class SequenceTable:
    """The sequences of one rank; see the module."""

    def __init__(self, *, max_sequences: int, max_model_len: int, num_blocks: int, vocab_size: int) -> None:
        self._slots: dict[SequenceId, int] = {}
        self._free = list(range(max_sequences - 1, -1, -1))
        # One token more than the context: the last one drawn is remembered, though never computed. Untouched pages
        # take no memory.
        self._tokens = np.zeros((max_sequences, max_model_len + 1), dtype=np.int32)
        self._length = np.zeros(max_sequences, dtype=np.int32)
        self._prompt = np.zeros(max_sequences, dtype=np.int32)
        self._computed = np.zeros(max_sequences, dtype=np.int32)
        self._tenancies = np.zeros(max_sequences, dtype=np.int64)
        self._blocks = BlockTables(max_sequences, blocks_for(max_model_len + 1), num_blocks)
        self._parameters = ParameterTable(max_sequences, vocab_size)
        self._scored = ScoredPrompts()

    def __len__(self) -> int:
        return len(self._slots)

    def clear(self) -> None:
        """Forgets every sequence."""
        self._tenancies += 1
        self._free.extend(self._slots.values())
        self._slots.clear()
        self._scored.clear()

    def release(self, sequence: SequenceId) -> int:
        """Forgets `sequence`, and answers with the slot that it had. Raises BrokenPlan where it is unknown."""
        slot = self._slot_of(sequence)
        self._free.append(slot)
        self._tenancies[slot] += 1
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
        self._tokens[slot, : len(tokens)] = tokens
        self._length[slot] = len(tokens)
        self._prompt[slot] = new.prompt_length
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
        if not 0 < length < self._tokens.shape[1]:
            raise BrokenPlan(f"sequence {new.sequence}: {length} tokens do not fit the context")
        if not 0 <= new.computed < length or not 0 <= new.prompt_length <= length:
            raise BrokenPlan(f"sequence {new.sequence}: computed or prompt_length is out of range")

    def shares(self, work: tuple[Work, ...]) -> Shares:
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
        full = self._length[slots] >= self._tokens.shape[1]
        if full.any():
            work = tuple(work[i] for i in np.flatnonzero(~full))
            slots = slots[~full]
        counts = np.array([item.count for item in work], dtype=np.int32)
        samples = np.array([item.sample for item in work], dtype=np.bool_)
        asked = np.array([item.speculate for item in work], dtype=np.int32)
        return Shares(work, slots, counts, samples, self._most_drafts(slots, counts, samples, asked))

    def _most_drafts(self, slots: Slots, counts: Int32s, samples: NDArray[np.bool_], asked: Int32s) -> Int32s:
        """[W] Drafts are verified where a decode samples, and have to fit the context and the blocks."""
        if not asked.any():
            return asked
        room = np.minimum(self._blocks.room(slots), self._tokens.shape[1] - 1) - self._length[slots]
        return np.where(samples & (counts == 1), np.clip(room, 0, asked), 0).astype(np.int32)

    def batch(self, shares: Shares, drafts: Drafts | None = None) -> Batch:
        """The rows of `shares`, which count as computed from here on; `drafts` are those of the speculating ones. Where
        the host does not know those, ids of their rows mean nothing.

        Raises BrokenPlan where they cannot be computed.
        """
        self._check_work(shares)
        drafted = np.zeros(len(shares.slots), dtype=np.int32)
        if drafts is not None:
            drafted[shares.speculating] = drafts.counts
            if isinstance(drafts.tokens, np.ndarray):
                self._put_drafts(shares.slots[shares.speculating], drafts.tokens, drafts.counts)
        return self._flattened(shares, drafted)

    def _put_drafts(self, slots: Slots, tokens: Int32s, counts: Int32s) -> None:
        """Behind the known tokens, where those drawn will be written over them."""
        at = self._length[slots][:, None] + np.arange(tokens.shape[1])
        rows, columns = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
        self._tokens[slots[rows], at[rows, columns]] = tokens[rows, columns]

    def _check_work(self, shares: Shares) -> None:
        slots = shares.slots
        ends = self._computed[slots] + shares.counts
        broken = (shares.counts < 1) | (ends > self._length[slots]) | (ends > self._blocks.room(slots))
        broken |= shares.samples & (ends != self._length[slots])
        if broken.any():
            index = int(broken.argmax())
            slot = int(slots[index])
            raise BrokenPlan(
                f"{shares.work[index]}: of {self._length[slot]} tokens {self._computed[slot]} are computed, "
                f"in {self._blocks.held(slot)} blocks"
            )

    def _flattened(self, shares: Shares, drafted: Int32s) -> Batch:
        units = self._units(shares, drafted)
        sampling = np.flatnonzero(shares.samples)
        sampled_slots = shares.slots[sampling]
        rows = rows_of(units, self._blocks.ids, self._tokens)
        prompts = self._scored.rows_of(units, rows.last_rows, self._tokens)
        drawn = rows.last_rows[shares.samples[units.share]]
        union = merged(drawn, prompts.rows()) if prompts.parts else None
        self._computed[shares.slots] += shares.counts
        return Batch(
            rows=rows,
            logits_rows=drawn if union is None else union.rows,
            sampled=tuple(shares.work[i].sequence for i in sampling),
            sampled_slots=sampled_slots,
            drafted=drafted[sampling],
            choices=self._choices(sampled_slots, drafted[sampling]),
            drawn_rows=drawn,
            prompts=prompts,
            merged=union,
        )

    def _units(self, shares: Shares, drafted: Int32s) -> Units:
        """Each share is one run of rows; but each draft is one of its own, as all of them are decodes then."""
        share, ahead = drafts_apart(drafted)
        slots = shares.slots[share]
        return Units(share, slots, self._computed[slots] + ahead, shares.counts[share])

    def _choices(self, slots: Slots, drafted: Int32s) -> Choices | None:
        if not len(slots):
            return None
        owner, ahead = drafts_apart(drafted)
        return self.choose(slots[owner], ahead)

    def append(self, slots: Slots, counts: Int32s, drawn: Int32s) -> None:
        """What was drawn for the sequences of a batch: each gains the first `counts` [Q] tokens of its row of `drawn`
        [Q, K + 1]. Keys and values are computed of all but the last one then."""
        if drawn.shape[1] == 1:
            self.fill(slots, self.advance(slots), drawn[:, 0])
        else:
            self.fill_all(slots, self.assume(slots, counts - 1), counts, drawn)

    def append_blocks(self, slot: int, work: Work) -> None:
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
        places = self._length[slots]
        self._length[slots] = places + 1
        return places

    def assume(self, slots: Slots, drafted: Int32s) -> Int32s:
        """As `advance`, and that the drafts [Q] stand: the places [Q] that `fill_all` is going to begin at."""
        places = self.advance(slots)
        self._length[slots] += drafted
        self._computed[slots] += drafted
        return places

    def shorten(self, slots: Slots, tokens: Int32s) -> None:
        """So many drafts [Q] do not stand, of those that `assume` was told of."""
        self._length[slots] -= tokens
        self._computed[slots] -= tokens

    def fill(self, slots: Slots, places: Int32s, tokens: Int32s) -> None:
        """What was drawn for them, [Q] each."""
        self._tokens[slots, places] = tokens

    def fill_all(self, slots: Slots, places: Int32s, counts: Int32s, tokens: Int32s) -> None:
        """The first `counts` [Q] of each row of `tokens` [Q, K + 1], from `places` [Q] on."""
        if tokens.shape[1] == 1:
            self.fill(slots, places, tokens[:, 0])
            return
        rows, columns = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
        self._tokens[slots[rows], places[rows] + columns] = tokens[rows, columns]

    def drafts(self, slots: Slots, most: int) -> Int32s:
        """[Q, most] what lies behind the known tokens."""
        at = np.minimum(self._length[slots][:, None] + np.arange(most), self._tokens.shape[1] - 1)
        drafts: Int32s = self._tokens[slots[:, None], at]
        return drafts

    @property
    def tokens(self) -> Int32s:
        """See `speculation.proposer.Histories`, as for the next three."""
        return self._tokens

    @property
    def lengths(self) -> Int32s:
        return self._length

    @property
    def prompt_lengths(self) -> Int32s:
        """By slot."""
        return self._prompt

    @property
    def tenancies(self) -> NDArray[np.int64]:
        """By slot: a number that changes when a sequence leaves it, so that what is drawn for one that has left is not
        taken for the next one's."""
        return self._tenancies

    @property
    def block_tables(self) -> Int32s:
        return self._blocks.ids

    def choose(self, slots: Slots, ahead: Int32s | int) -> Choices:
        return self._parameters.choose(slots, self._length[slots] - self._prompt[slots] + ahead)

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
