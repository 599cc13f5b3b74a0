"""What a rank knows of its sequences, in arrays by sequence index, and how a plan becomes one flat batch.

Owns token histories, block tables and sampling parameters; written by the thread that prepares steps, but for drawn
tokens, which the one that computes puts where they were announced. No loop here runs over tokens; those over a step's
sequences only look things up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from services.worker.batch.batch import (
    NO_COPIES,
    Batch,
    BrokenPlan,
    DecodeBatch,
    DraftTokens,
    ScheduledWork,
    StateCopies,
)
from services.worker.batch.draft_trees import NO_DRAFTS, BranchBlocks, TreeRows, lay_out, place_trees
from services.worker.batch.encoded_rows import EncodedTables
from services.worker.batch.pooled_rows import NO_POOLED_ROWS, PooledHead, PromptPool, pooled_rows
from services.worker.batch.prompt_inputs import EmbeddedPrompt, input_rows, last_seen
from services.worker.batch.prompt_rows import PromptRows, ScoredPrompt, merge_logits_rows, prompt_rows
from services.worker.batch.rope_positions import RopeShifts
from services.worker.batch.rows import Indices, Int32s, RowRuns, expand_drafts, in_groups, rows_of, untouched_zeros
from services.worker.sampling.parameters import ParameterTable, SamplingBatch
from shared.blocks import blocks_for
from shared.ids import LoraId, SequenceId
from shared.kv_groups import NULL_BLOCK, KvCacheGroup
from shared.messages.worker import NewSequence, SequenceWork, StepPlan

_WIRE = np.dtype("<u4")


class SequenceTable:
    """The sequences of one rank; see the module."""

    def __init__(
        self,
        *,
        max_sequences: int,
        max_model_len: int,
        num_blocks: int,
        vocab_size: int,
        block_size: int,
        classifier: PooledHead | None = None,
        groups: tuple[KvCacheGroup, ...] = (),
        branches: BranchBlocks | None = None,
    ) -> None:
        """`classifier`: makes logits of what is pooled of a prompt. `groups`: of layers with block tables of their
        own; empty: all layers have one. `branches`: of trees of drafts, where there are any."""
        self._classifier = classifier
        self._branches = branches
        self._indices: dict[SequenceId, int] = {}
        self._free = list(range(max_sequences - 1, -1, -1))
        # One token more than the context: the last one drawn is remembered, though never computed. Untouched pages
        # take no memory.
        self.tokens: Int32s = untouched_zeros(max_sequences, max_model_len + 1)
        """[sequences, width] what each sequence holds. Written by nobody else, as all arrays here, but by the library's
        steps of decodes, which put what they draw where `advance` has announced it. These read tokens and block tables
        where they lie: none of the two is ever replaced by another array."""
        self.lengths: Int32s = np.zeros(max_sequences, dtype=np.int32)
        """[sequences] tokens known, or being drawn; keys and values of the last one are not computed yet."""
        self.prompt_lengths: Int32s = np.zeros(max_sequences, dtype=np.int32)
        """[sequences]"""
        self._computed = np.zeros(max_sequences, dtype=np.int32)
        self.generations: NDArray[np.int64] = np.zeros(max_sequences, dtype=np.int64)
        """[sequences] a number that changes when a sequence leaves, so that what is drawn for one that has left is not
        taken for the next one's."""
        width = blocks_for(max_model_len + 1, block_size)
        of_tokens = tuple(group for group in groups if group.encoded is None)
        self.blocks = BlockTables(max_sequences, width, num_blocks, block_size, of_tokens)
        self.encoded: EncodedTables | None = None
        """None where no layer attends to rows beside prompts."""
        for group in groups:
            if group.encoded is not None:
                self.encoded = EncodedTables(max_sequences, group.encoded, group.parts, num_blocks, block_size)
        self.block_size = block_size
        """Tokens of a block."""
        self.block_tables = self.blocks.ids
        """[sequences, blocks] the blocks of each sequence in their order, for the first group of layers."""
        self._parameters = ParameterTable(max_sequences, vocab_size)
        self.lora_numbers: Mapping[LoraId, int] = {}
        """Which number sequences with an adapter have in `loras`; set by whoever serves adapters."""
        self.loras: Int32s = np.full(max_sequences, -1, dtype=np.int32)
        """[sequences] each one's adapter; -1: none."""
        self._scored: dict[int, ScoredPrompt] = {}
        """The sequences whose prompts are scored, by sequence index."""
        self._pooled: dict[int, PromptPool] = {}
        """The sequences whose prompts become vectors, by sequence index."""
        self.shifts = RopeShifts(max_sequences)
        self._embedded: dict[int, EmbeddedPrompt] = {}
        """What prompts have in place of their tokens' embeddings, by sequence index, until all of it is computed."""

    def __len__(self) -> int:
        return len(self._indices)

    def clear(self) -> None:
        """Removes every sequence."""
        self.generations += 1
        self._free.extend(self._indices.values())
        self._indices.clear()
        self._scored.clear()
        self._pooled.clear()
        self._embedded.clear()
        self.shifts.clear()
        if self.encoded is not None:
            self.encoded.clear()

    def release(self, sequence: SequenceId) -> int:
        """Forgets `sequence`: the sequence index that it had. Raises BrokenPlan where it is unknown."""
        seq_index = self._seq_index(sequence)
        self._free.append(seq_index)
        self.generations[seq_index] += 1
        self._scored.pop(seq_index, None)
        self._pooled.pop(seq_index, None)
        self._embedded.pop(seq_index, None)
        self.shifts.release(seq_index)
        if self.encoded is not None:
            self.encoded.release(seq_index)
        del self._indices[sequence]
        return seq_index

    def add(self, new: NewSequence) -> int:
        """Remembers a sequence, at the sequence index that it gives back.

        Raises BrokenPlan where it is known already, too long, or one too many.
        """
        tokens = np.frombuffer(new.tokens, dtype=_WIRE)
        self._check_new(new, len(tokens))
        lora = -1 if new.lora is None else self._lora_number(new, new.lora)
        seq_index = self._free.pop()
        self._indices[new.sequence] = seq_index
        self.tokens[seq_index, : len(tokens)] = tokens
        self.lengths[seq_index] = len(tokens)
        self.prompt_lengths[seq_index] = new.prompt_length
        self._computed[seq_index] = new.computed
        self.loras[seq_index] = lora
        self.blocks.begin(seq_index)
        self.blocks.append(seq_index, new.sequence, new.blocks)
        if new.computed > self.blocks.room(seq_index):
            raise BrokenPlan(f"sequence {new.sequence}: {new.computed} computed tokens lie in too few blocks")
        self._parameters.put(seq_index, new)
        if new.sampling.prompt_logprobs is not None:
            self._scored[seq_index] = ScoredPrompt(new.sequence, new.prompt_length, new.sampling.prompt_logprobs)
        if new.pooling is not None:
            prompt = self.tokens[seq_index, : new.prompt_length]
            self._pooled[seq_index] = PromptPool(new.sequence, prompt, new.pooling, self._classifier)
        if self.encoded is not None:
            self.encoded.add(seq_index, new)
        if new.prompt_embeds is not None and not new.prompt_embeds.encoded:
            self._embedded[seq_index] = EmbeddedPrompt(new.prompt_embeds)
            self.shifts.add(seq_index, new.prompt_embeds, new.computed)
        return seq_index

    def _lora_number(self, new: NewSequence, lora: LoraId) -> int:
        number = self.lora_numbers.get(lora)
        if number is None:
            raise BrokenPlan(f"sequence {new.sequence}: its adapter {lora.hex()} is not served here")
        return number

    def _check_new(self, new: NewSequence, length: int) -> None:
        if new.sequence in self._indices:
            raise BrokenPlan(f"sequence {new.sequence} is new, but it was never released")
        if not self._free:
            raise BrokenPlan(f"sequence {new.sequence} is one more than the {len(self._indices)} agreed on")
        if not 0 < length < self.tokens.shape[1]:
            raise BrokenPlan(f"sequence {new.sequence}: {length} tokens do not fit the context")
        if new.prompt_embeds is not None and not new.prompt_embeds.fits(new.prompt_length):
            raise BrokenPlan(f"sequence {new.sequence}: its embeddings are not one for each token of its prompt")
        if self.encoded is not None:
            self.encoded.check(new)
        elif new.encoded_blocks or (new.prompt_embeds is not None and new.prompt_embeds.encoded):
            raise BrokenPlan(f"sequence {new.sequence}: no layer attends to rows beside its prompt")
        if not 0 <= new.computed < length or not 0 <= new.prompt_length <= length:
            raise BrokenPlan(f"sequence {new.sequence}: computed or prompt_length is out of range")

    def scheduled(self, work: tuple[SequenceWork, ...]) -> ScheduledWork:
        """`work`, its new blocks appended to the tables. Raises BrokenPlan where a sequence is unknown, or twice in it.

        A sequence whose context is full is left out: it was planned before it was known that speculation would fill it
        so soon, and draws nothing more.
        """
        seq_indices = np.array([self._seq_index(item.sequence) for item in work], dtype=np.intp)
        if len(set(seq_indices.tolist())) != len(seq_indices):
            raise BrokenPlan("a sequence has two shares of one step")
        self.blocks.append_new(seq_indices, work)
        full = self.lengths[seq_indices] >= self.tokens.shape[1]
        if full.any():
            work = tuple(work[i] for i in np.flatnonzero(~full))
            seq_indices = seq_indices[~full]
        counts = np.array([item.count for item in work], dtype=np.int32)
        samples = np.array([item.sample for item in work], dtype=np.bool_)
        if self._pooled:  # they yield a vector instead
            samples &= np.array([seq_index not in self._pooled for seq_index in seq_indices.tolist()], dtype=np.bool_)
        asked = np.array([item.speculate for item in work], dtype=np.int32)
        if asked.any():  # drafts are verified where a decode samples, and have to fit the context and the blocks
            room = np.minimum(self.blocks.room(seq_indices), self.tokens.shape[1] - 1) - self.lengths[seq_indices]
            asked = np.where(samples & (counts == 1), np.clip(room, 0, asked), 0).astype(np.int32)
        return ScheduledWork(work, seq_indices, counts, samples, asked)

    def state_copies(self, plan: StepPlan) -> StateCopies:
        """Those of a plan whose new sequences are added already. Raises BrokenPlan."""
        if not (plan.restored or plan.checkpoints):
            return NO_COPIES
        return StateCopies(
            tuple((self._seq_index(each.sequence), each.checkpoint) for each in plan.restored),
            tuple((self._seq_index(each.sequence), each.checkpoint) for each in plan.checkpoints),
        )

    def batch(self, scheduled: ScheduledWork, drafts: DraftTokens | None = None) -> Batch:
        """The rows of `scheduled`, which count as computed from here on; `drafts` are those of the speculating ones.
        Where the host does not know those, ids of their rows mean nothing.

        Raises BrokenPlan where they cannot be computed.
        """
        self._check_work(scheduled)
        laid_out = None
        if drafts is not None and drafts.parents is not None:
            laid_out = self._lay_out(scheduled, drafts)
            drafted = np.array([tree.drafts for tree in laid_out], dtype=np.int32)
        else:
            drafted = self._put_paths(scheduled, drafts)
        # Each share is one run of rows; but each draft is one of its own, as all of them are decodes then.
        share, ahead = expand_drafts(drafted)
        if laid_out is not None:
            ahead = np.concatenate([tree.depths for tree in laid_out], dtype=np.int32)
        seq_indices = scheduled.seq_indices[share]
        units = RowRuns(share, seq_indices, self._computed[seq_indices] + ahead, scheduled.counts[share])
        if self.blocks.windows:
            self.blocks.forget_behind(scheduled.seq_indices, self._computed[scheduled.seq_indices])
        rows = rows_of(units, self.block_tables, self.tokens, self.block_size)
        if self.blocks.others:
            rows = in_groups(rows, self.blocks.others)
        sampling, draws = np.flatnonzero(scheduled.samples), scheduled.samples[share]
        trees = None if laid_out is None else place_trees(laid_out, rows, scheduled.samples)
        prompts = prompt_rows(self._scored, units, rows.last_rows, self.tokens) if self._scored else PromptRows()
        drawn = rows.last_rows[draws]
        union = merge_logits_rows(drawn, prompts.rows()) if prompts.parts else None
        pooled = pooled_rows(self._pooled, units, rows.last_rows) if self._pooled else NO_POOLED_ROWS
        lasts = last_seen(self._embedded, rows) if self._embedded else None
        inputs = input_rows(self._embedded, units, rows.last_rows) if self._embedded else None
        self._computed[scheduled.seq_indices] += scheduled.counts
        return Batch(
            rows=rows,
            logits_rows=drawn if union is None else union.rows,
            sampled=tuple(scheduled.work[i].sequence for i in sampling),
            sampled_indices=scheduled.seq_indices[sampling],
            drafted=drafted[sampling],
            choices=self.sampling_batch(seq_indices[draws], ahead[draws]) if len(sampling) else None,
            drawn_rows=drawn,
            prompts=prompts,
            merged=union,
            pooled=pooled,
            lasts=lasts,
            shifts=self.shifts.of(rows.seq_indices, rows.positions),
            inputs=inputs,
            encoded=None if self.encoded is None else self.encoded.of(rows.seq_indices, rows.positions),
            trees=trees,
        )

    def decodes(self, scheduled: ScheduledWork, drafts: DraftTokens | None) -> DecodeBatch:
        """The rows of `scheduled`, decodes which count as computed from here on; `drafts`, known and no trees, are
        those of the speculating ones. Raises BrokenPlan."""
        self._check_work(scheduled)
        seq_indices = scheduled.seq_indices
        drafted = self._put_paths(scheduled, drafts)
        owner, ahead = expand_drafts(drafted)
        rows = seq_indices[owner]
        positions = self._computed[rows] + ahead
        self.count_computed(seq_indices)
        sampled = tuple(item.sequence for item in scheduled.work)
        return DecodeBatch(sampled, seq_indices, drafted, rows, positions, self.sampling_batch(rows, ahead))

    def _put_paths(self, scheduled: ScheduledWork, drafts: DraftTokens | None) -> Int32s:
        """How many drafts [W] each has; those that the host knows lie behind its known tokens then."""
        drafted = np.zeros(len(scheduled.seq_indices), dtype=np.int32)
        if drafts is not None:
            drafted[scheduled.speculating] = drafts.counts
            if isinstance(drafts.tokens, np.ndarray):
                self._put_drafts(scheduled.seq_indices[scheduled.speculating], drafts.tokens, drafts.counts)
        return drafted

    def _lay_out(self, scheduled: ScheduledWork, drafts: DraftTokens) -> list[TreeRows]:
        """The rows of each sequence. What has no branches is put behind its known tokens, too, where masks and
        penalties look for it."""
        assert self._branches is not None, "trees are drafted by whoever said so"
        assert drafts.parents is not None, "the caller has looked"
        self._branches.begin_step()
        laid_out = [NO_DRAFTS] * len(scheduled.seq_indices)
        tokens, counts = drafts.known(), drafts.counts.copy()
        for number, work in enumerate(scheduled.speculating.tolist()):
            seq_index, count = scheduled.seq_indices[work], counts[number]
            parents, position = drafts.parents[number, :count].tolist(), int(self._computed[seq_index])
            tree = lay_out(parents, position, self.block_tables[seq_index], self.block_size, self._branches)
            laid_out[work] = tree._replace(tokens=tokens[number, : tree.drafts])
            counts[number] = 0 if tree.tables else tree.drafts
        self._put_drafts(scheduled.seq_indices[scheduled.speculating], tokens, counts)
        return laid_out

    def _put_drafts(self, seq_indices: Indices, tokens: Int32s, counts: Int32s) -> None:
        """Behind the known tokens, where those drawn will be written over them."""
        at = self.lengths[seq_indices][:, None] + np.arange(tokens.shape[1])
        rows, columns = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
        self.tokens[seq_indices[rows], at[rows, columns]] = tokens[rows, columns]

    def _check_work(self, scheduled: ScheduledWork) -> None:
        seq_indices = scheduled.seq_indices
        ends = self._computed[seq_indices] + scheduled.counts
        broken = (scheduled.counts < 1) | (ends > self.lengths[seq_indices]) | (ends > self.blocks.room(seq_indices))
        broken |= scheduled.samples & (ends != self.lengths[seq_indices])
        if broken.any():
            first = int(broken.argmax())
            seq_index = int(seq_indices[first])
            length, computed = self.lengths[seq_index], self._computed[seq_index]
            held = self.blocks.held[seq_index]
            raise BrokenPlan(f"{scheduled.work[first]}: of {length} tokens {computed} are computed, in {held} blocks")

    def append(self, seq_indices: Indices, counts: Int32s, drawn: Int32s) -> None:
        """What was drawn for the sequences of a batch: each gains the first `counts` [Q] tokens of its row of `drawn`
        [Q, K + 1]. Keys and values are computed of all but the last one then."""
        if drawn.shape[1] == 1:
            self.fill(seq_indices, self.advance(seq_indices), drawn[:, 0])
        else:
            self.fill_all(seq_indices, self.assume(seq_indices, counts - 1), counts, drawn)

    def count_computed(self, seq_indices: Indices) -> None:
        """One more token of each, in a batch that was not made here."""
        self._computed[seq_indices] += 1

    def advance(self, seq_indices: Indices) -> Int32s:
        """A token is being drawn for each of a batch's sequences, without drafts: the places [Q] that `fill` is going
        to put them in. Until then they count as known."""
        places = self.lengths[seq_indices]
        self.lengths[seq_indices] = places + 1
        return places

    def assume(self, seq_indices: Indices, drafted: Int32s) -> Int32s:
        """See `advance`, and that the drafts [Q] stand: the places [Q] that `fill_all` is going to begin at."""
        places = self.advance(seq_indices)
        self.lengths[seq_indices] += drafted
        self._computed[seq_indices] += drafted
        return places

    def shorten(self, seq_indices: Indices, tokens: Int32s) -> None:
        """So many drafts [Q] are not accepted, of those that `assume` counted."""
        self.lengths[seq_indices] -= tokens
        self._computed[seq_indices] -= tokens

    def fill(self, seq_indices: Indices, places: Int32s, tokens: Int32s) -> None:
        """Writes the sampled `tokens` at `places` of the sequences, [Q] each."""
        self.tokens[seq_indices, places] = tokens

    def fill_all(self, seq_indices: Indices, places: Int32s, counts: Int32s, tokens: Int32s) -> None:
        """The first `counts` [Q] of each row of `tokens` [Q, K + 1], from `places` [Q] on."""
        if tokens.shape[1] == 1:
            self.fill(seq_indices, places, tokens[:, 0])
            return
        rows, columns = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
        self.tokens[seq_indices[rows], places[rows] + columns] = tokens[rows, columns]

    def drafts(self, seq_indices: Indices, most: int) -> Int32s:
        """[Q, most] what lies behind the known tokens."""
        at = np.minimum(self.lengths[seq_indices][:, None] + np.arange(most), self.tokens.shape[1] - 1)
        drafts: Int32s = self.tokens[seq_indices[:, None], at]
        return drafts

    def sampling_batch(self, seq_indices: Indices, ahead: Int32s | int) -> SamplingBatch:
        """How the tokens are drawn that come `ahead` tokens behind the known ones of the sequences in `seq_indices`."""
        return self._parameters.sampling_batch(
            seq_indices, self.lengths[seq_indices] - self.prompt_lengths[seq_indices] + ahead
        )

    def history(self, seq_indices: Indices, positions: Int32s) -> tuple[Int32s, Int32s, Int32s]:
        """(tokens [P, longest], lengths [P], prompt lengths [P]) before the output `positions` are drawn."""
        prompts = self.prompt_lengths[seq_indices]
        lengths = prompts + positions
        return self.tokens[seq_indices, : int(lengths.max())], lengths, prompts

    def _seq_index(self, sequence: SequenceId) -> int:
        try:
            return self._indices[sequence]
        except KeyError:
            raise BrokenPlan(f"sequence {sequence} is unknown") from None


# Which blocks hold each sequence's keys and values, in an array by sequence index.


class BlockTables:
    """Owned by the sequence table: a row for each sequence index. Untouched pages take no memory."""

    def __init__(
        self,
        max_sequences: int,
        width: int,
        num_blocks: int,
        block_size: int,
        groups: tuple[KvCacheGroup, ...] = (),
    ) -> None:
        self._num_blocks = num_blocks
        self._block_size = np.int32(block_size)
        self.ids: Int32s = untouched_zeros(max_sequences, width)
        """[sequences, width] of the first group of layers."""
        self.others: tuple[Int32s, ...] = tuple(untouched_zeros(max_sequences, width) for _ in groups[1:])
        """[sequences, width] of each group behind it."""
        tables = (self.ids, *self.others)
        self.tables = list(zip(tables, [group.window for group in groups] or [None], strict=True))
        """Of each group of layers, and how many positions its tokens see; None: all."""
        self.windows = [(each, group) for each, group in zip(tables, groups, strict=False) if group.window is not None]
        """Tables of layers that do not see all tokens."""
        self.held: Int32s = np.zeros(max_sequences, dtype=np.int32)
        """[sequences] blocks in each table."""

    def begin(self, seq_index: int) -> None:
        """An empty table for whoever is at `seq_index` now."""
        self.held[seq_index] = 0

    def append(self, seq_index: int, sequence: SequenceId, packed: bytes) -> None:
        """Raises BrokenPlan where they are too many, not of this worker's memory, or not as many for each group."""
        blocks = np.frombuffer(packed, dtype=_WIRE)
        held, groups = int(self.held[seq_index]), 1 + len(self.others)
        count, rest = divmod(len(blocks), groups)
        if rest:
            raise BrokenPlan(f"sequence {sequence}: {len(blocks)} block ids for {groups} groups of layers")
        if held + count > self.ids.shape[1]:
            raise BrokenPlan(f"sequence {sequence}: {held + count} blocks are more than its context fills")
        if len(blocks) and int(blocks.max()) >= self._num_blocks:
            raise BrokenPlan(f"sequence {sequence}: block {blocks.max()} of {self._num_blocks}")
        for number, table in enumerate((self.ids, *self.others)):
            table[seq_index, held : held + count] = blocks[number::groups]
        self.held[seq_index] = held + count

    def append_new(self, seq_indices: Indices, work: Sequence[SequenceWork]) -> bool:
        """Appends the new blocks of `work`, of the sequences at `seq_indices`; whether there are any. Raises as
        `append`."""
        grown = [place for place, item in enumerate(work) if item.blocks]
        for place in grown:
            self.append(int(seq_indices[place]), work[place].sequence, work[place].blocks)
        return bool(grown)

    def forget_behind(self, seq_indices: Indices, positions: Int32s) -> None:
        """What no row from `positions` [Q] on reads may be somebody else's by now: the null block takes its place, so
        that nothing of others is looked at even where it counts for nothing."""
        for table, group in self.windows:
            for seq_index, position in zip(seq_indices.tolist(), positions.tolist(), strict=True):
                needed = group.first_needed(position, int(self._block_size))
                if needed and table[seq_index, needed - 1] != NULL_BLOCK:
                    table[seq_index, :needed] = NULL_BLOCK

    def room(self, seq_indices: Indices | int) -> Int32s:
        """Tokens that each one's blocks hold."""
        room: Int32s = self.held[seq_indices] * self._block_size
        return room
