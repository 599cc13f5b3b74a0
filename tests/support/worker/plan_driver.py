"""Plays the scheduler to a backend: gives out blocks, cuts prompts to chunks, shares prefixes, preempts.

Plans nothing well; it exists to bring a backend into every situation that a scheduler can bring it into. Blocks are
given out in an order of their own, so that a backend which takes tables for consecutive is found out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from random import Random

from services.worker.backend import Backend, run_step
from shared.ids import Incarnation, LoraId, SequenceId
from shared.kv_groups import NULL_BLOCK, token_tables
from shared.media.seen_rows import blocks_of_prompt
from shared.messages.generation import (
    Grammar,
    PoolingOptions,
    PromptEmbeds,
    SamplingOptions,
    TokenLogprobs,
    mutual_run,
)
from shared.messages.scheduler import SequencePooled, SequencePromptLogprobs
from shared.messages.worker import GrammarRef, NewSequence, SequenceWork, StepPlan
from shared.packing import pack

GREEDY = SamplingOptions(seed=0, temperature=0.0)


@dataclass
class Sequence:
    """One sequence as the driver sees it."""

    id: SequenceId
    tokens: list[int]
    prompt_length: int
    sampling: SamplingOptions
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    wanted: int
    computed: int = 0
    held: bool = False
    """Whether it was sent to the backend."""
    blocks: list[int] = field(default_factory=list)
    own_blocks: list[int] = field(default_factory=list)
    encoded: list[int] = field(default_factory=list)
    """Blocks of the rows beside its prompt."""
    encoded_computed: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    grammar: Grammar | None = None
    pooling: PoolingOptions | None = None
    lora: LoraId | None = None
    prompt_embeds: PromptEmbeds | None = None
    cache_salt: str | None = None
    pooled: bool = False
    """Whether the step is planned that yields its vector."""

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def done(self) -> bool:
        return len(self.output) >= self.wanted if self.pooling is None else self.pooled


class Driver:
    """Runs sequences on `backend`, at most `budget` tokens a step."""

    def __init__(self, backend: Backend, *, budget: int = 512, epoch: int = 1, speculate: int = 0) -> None:
        """`speculate`: drafts that every decode may verify."""
        self.backend = backend
        self._block_size = backend.card.block_size
        self._tables = token_tables(backend.kv_groups)
        self.budget = budget
        self.speculate = speculate
        self.drafted = self.accepted = 0
        self.scored: list[SequencePromptLogprobs] = []
        self.vectors: dict[SequenceId, list[float]] = {}
        self.sequences: dict[SequenceId, Sequence] = {}
        self._free = list(range(NULL_BLOCK + 1 if self._tables > 1 else 0, backend.num_blocks))
        Random(0).shuffle(self._free)
        self._epoch = Incarnation(epoch)
        self._step = 0
        self._released: list[SequenceId] = []
        self._next_id = 0

    def add(
        self,
        tokens: list[int],
        wanted: int,
        *,
        sampling: SamplingOptions = GREEDY,
        prompt_length: int | None = None,
        min_tokens: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        grammar: Grammar | None = None,
        pooling: PoolingOptions | None = None,
        lora: LoraId | None = None,
        prompt_embeds: PromptEmbeds | None = None,
        cache_salt: str | None = None,
    ) -> Sequence:
        """A sequence that wants `wanted` output tokens, those behind `prompt_length` in `tokens` counted; or its
        vector, where it has `pooling`."""
        sequence = Sequence(
            SequenceId(self._next_id),
            list(tokens),
            len(tokens) if prompt_length is None else prompt_length,
            sampling,
            min_tokens,
            stop_token_ids,
            wanted,
            grammar=grammar,
            pooling=pooling,
            lora=lora,
            prompt_embeds=prompt_embeds,
            cache_salt=cache_salt,
        )
        self._next_id += 1
        self.sequences[sequence.id] = sequence
        return sequence

    def share_prefix(self, sequence: Sequence, other: Sequence, most: int | None = None) -> int:
        """Gives `sequence` the computed full blocks of `other` that begin with the same tokens, up to `most`; how many
        tokens."""
        most = min(other.computed, len(sequence.tokens) - 1, len(other.tokens) if most is None else most)
        equal = 0
        while equal < most and sequence.tokens[equal] == other.tokens[equal]:
            equal += 1
        blocks = equal // self._block_size
        sequence.blocks = other.blocks[: blocks * self._tables]
        sequence.computed = blocks * self._block_size
        return sequence.computed

    def share_encoded(self, sequence: Sequence, other: Sequence) -> None:
        """Gives `sequence` the blocks of the same rows, which a step of `other` has written."""
        sequence.encoded, sequence.encoded_computed = other.encoded, True

    def give_loaded(self, sequence: Sequence, count: int) -> list[int]:
        """Fresh blocks for the first `count` blocks of `sequence`; the caller fills them before the next step."""
        sequence.own_blocks = [self._free.pop() for _ in range(count)]
        sequence.blocks = list(sequence.own_blocks)
        sequence.computed = count * self._block_size
        return list(sequence.blocks)

    def preempt(self, sequence: Sequence) -> None:
        """Takes everything from `sequence`; it will be computed again, its output as part of its tokens."""
        if sequence.held:
            self._released.append(sequence.id)
        self._free = sequence.own_blocks + self._free
        if not sequence.encoded_computed:
            self._free = sequence.encoded + self._free
            sequence.encoded = []
        sequence.own_blocks, sequence.blocks = [], []
        sequence.computed, sequence.held = 0, False

    def drop(self, sequence: Sequence) -> None:
        """Its client is gone: it leaves and its blocks are the next one's."""
        del self.sequences[sequence.id]
        if sequence.held:
            self._released.append(sequence.id)
        self._free += sequence.own_blocks + ([] if sequence.encoded_computed else sequence.encoded)

    def step(self) -> None:
        """One step of every sequence that is not done, as far as the budget goes."""
        left, new, work = self.budget, [], []
        for sequence in self.sequences.values():
            if sequence.done or left == 0:
                continue
            count = min(left, len(sequence.tokens) - sequence.computed)
            if cut := mutual_run(sequence.prompt_embeds, sequence.computed + count):
                count = max(0, cut[0] - sequence.computed)
            if not count:
                continue
            left -= count
            if not sequence.held:
                new.append(self._new(sequence))
            work.append(self._work(sequence, count))
        plan = StepPlan(
            epoch=self._epoch, step=self._step, released=tuple(self._released), new=tuple(new), work=tuple(work)
        )
        self._released = []
        self._step += 1
        self._take(plan)

    def run(self) -> None:
        """Steps until every sequence is done, then releases them."""
        while not all(sequence.done for sequence in self.sequences.values()):
            self.step()
        self.release_done()

    def release_done(self) -> None:
        """Releases what is done with a step that computes nothing."""
        for sequence in [s for s in self.sequences.values() if s.done]:
            del self.sequences[sequence.id]
            if sequence.held:
                self._released.append(sequence.id)
            self._free = sequence.own_blocks + ([] if sequence.encoded_computed else sequence.encoded) + self._free
        self.step()

    def _new(self, sequence: Sequence) -> NewSequence:
        sequence.held = True
        embeds = sequence.prompt_embeds
        if embeds is not None and embeds.encoded and not sequence.encoded:
            blocks = blocks_of_prompt(embeds, self._block_size, self.backend.kv_groups)
            sequence.encoded = [self._free.pop() for _ in range(blocks)]
        return NewSequence(
            sequence=sequence.id,
            tokens=pack(sequence.tokens),
            prompt_length=sequence.prompt_length,
            computed=sequence.computed,
            blocks=pack(sequence.blocks),
            sampling=sequence.sampling,
            min_tokens=sequence.min_tokens,
            stop_token_ids=sequence.stop_token_ids,
            grammar=None if sequence.grammar is None else GrammarRef(sequence.grammar.key, sequence.grammar.after),
            pooling=sequence.pooling,
            lora=sequence.lora,
            prompt_embeds=sequence.prompt_embeds,
            encoded_blocks=pack(sequence.encoded),
            encoded_computed=sequence.encoded_computed,
            cache_salt=sequence.cache_salt,
        )

    def _work(self, sequence: Sequence, count: int) -> SequenceWork:
        sequence.computed += count
        samples = sequence.computed == len(sequence.tokens)
        sequence.pooled = samples
        speculate = self.speculate if samples and count == 1 else 0
        longest = min(sequence.computed + speculate, self.backend.card.max_model_len)
        missing = max(0, -(-longest // self._block_size) * self._tables - len(sequence.blocks))
        fresh = [self._free.pop() for _ in range(missing)]
        sequence.blocks += fresh
        sequence.own_blocks += fresh
        return SequenceWork(sequence.id, count, pack(fresh), samples, speculate)

    def _take(self, plan: StepPlan) -> None:
        output = run_step(self.backend, plan)
        assert [s.sequence for s in output.sampled] == [w.sequence for w in plan.work if w.sample]
        for sampled in output.sampled:
            sequence = self.sequences[sampled.sequence]
            # What lies behind the last token wanted is dropped, as a scheduler does.
            kept = sampled.tokens[: sequence.wanted - len(sequence.output)]
            sequence.tokens += kept
            sequence.logprobs += (sampled.logprobs or ())[: len(kept)]
            if sequence.pooling is None:
                sequence.computed = len(sequence.tokens) - 1
        self.scored += output.scored
        self.record_pooled(output.pooled)
        self.drafted += output.drafted
        self.accepted += sum(output.accepted)

    def record_pooled(self, pooled: tuple[SequencePooled, ...]) -> None:
        """Each sequence has one vector at most."""
        for one in pooled:
            assert one.sequence not in self.vectors
            self.vectors[one.sequence] = list(struct.unpack(f"<{len(one.vector) // 4}f", one.vector))
