"""The step that is being planned: what it holds so far, and what else it has room for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from services.scheduler.core.queue.grammars import GrammarOrders
from services.scheduler.core.sequence import Sequence
from shared.blocks import blocks_for
from shared.ids import SequenceId
from shared.messages.worker import (
    MAX_POOLED_BYTES_PER_PLAN,
    MAX_PROMPT_LOGPROB_TOKENS_PER_PLAN,
    MAX_PROMPT_LOGPROBS_PER_PLAN,
    NewSequence,
    SequenceWork,
)
from shared.packing import TOKEN_BYTES, pack


class StartedSequence(NamedTuple):
    """A sequence that is new to the workers, and how many of its tokens were cached."""

    sequence: Sequence
    cached: int


@dataclass(slots=True)
class StepBuilder:
    """One step while it is planned; each planner fills its part."""

    budget: int
    """Tokens that it may still compute."""
    new_bytes: int
    """Bytes that sequences and grammars that the workers do not know may still take in the plan; negative behind a
    sequence that is larger than that alone."""
    new_rows: int = 0
    """Rows beside prompts that such sequences may still bring."""
    work: list[SequenceWork] = field(default_factory=list)
    withheld: int = 0
    """Tokens of the engine's limit that it leaves out, so that it ends in time."""
    decodes: int = 0
    """Sequences that decode in it."""
    samples: int = 0
    """Sequences that draw in it."""
    drafts: int = 0
    """Rows of drafts that it may still hold."""
    extras: dict[SequenceId, int] = field(default_factory=dict)
    """Tokens beyond the first that each sequence may yield."""
    scores: int = MAX_PROMPT_LOGPROB_TOKENS_PER_PLAN
    """Prompt tokens that it may still score."""
    logprobs: int = MAX_PROMPT_LOGPROBS_PER_PLAN
    """Log-probabilities of prompt tokens that it may still report."""
    pooled_bytes: int = MAX_POOLED_BYTES_PER_PLAN
    """Bytes of vectors that it may still report."""
    started: list[StartedSequence] = field(default_factory=list)
    loading: list[StartedSequence] = field(default_factory=list)
    """Those that are new to the workers, too, and of which the blocks that count as cached are only being loaded."""
    handing: list[Sequence] = field(default_factory=list)
    """Sequences whose only token it draws: the next ones come from another engine."""
    grammars: GrammarOrders = field(default_factory=GrammarOrders)
    """What the workers compile beside it, and forget."""
    filled: list[Sequence] = field(default_factory=list)
    """Sequences that may have filled a block."""

    def limit(self, tokens: int) -> None:
        """Lets it compute no more than so many further tokens."""
        self.withheld += self.budget - tokens
        self.budget = tokens

    def fits_new(self, sequence: Sequence) -> bool:
        """Whether the plan has bytes left for the tokens of a sequence that the workers do not know, and the step for
        the rows beside its prompt. One always has room, however long it is."""
        if not (self.started or self.loading):
            return True
        return _new_bytes(sequence) <= self.new_bytes and _new_rows(sequence) <= self.new_rows

    def start(self, sequence: Sequence) -> None:
        """Adds a sequence that the workers do not know; the caller asks `fits_new` first."""
        self._count(sequence)
        self.started.append(StartedSequence(sequence, sequence.tokens.planned))

    def start_loading(self, sequence: Sequence, loaded: int) -> None:
        """Adds a sequence that the workers do not know, and whose first `loaded` tokens come by a load of this step;
        the caller asks `fits_new` first."""
        self._count(sequence)
        self.loading.append(StartedSequence(sequence, loaded))

    def _count(self, sequence: Sequence) -> None:
        self.new_bytes -= _new_bytes(sequence)
        self.new_rows -= _new_rows(sequence)


def _new_rows(sequence: Sequence) -> int:
    """Rows beside its prompt. Some may be there already: it is let in a step later, then, at the most."""
    embeds = sequence.generation.prompt_embeds
    return embeds.count if embeds is not None and embeds.encoded else 0


def _new_bytes(sequence: Sequence) -> int:
    """About the bytes of the message that makes it known to the workers, where they are many. Of lists of parameters an
    upper bound: a token takes up to 5 bytes, a word's frame 3, a bias 15."""
    sampling, tokens = sequence.generation.sampling, sequence.tokens
    words = sum([3 + 5 * len(word) for word in sampling.bad_words])
    ids = len(tokens.stops) + len(sampling.allowed_token_ids or ()) + len(sampling.logprob_token_ids or ())
    embeds = sequence.generation.prompt_embeds
    rows = 0 if embeds is None else len(embeds.rows)
    return rows + len(tokens.known) * TOKEN_BYTES + 5 * ids + 15 * len(sampling.logit_bias) + words


def new_sequence(
    sequence: Sequence, cached: int, tables: int = 1, encoded: tuple[list[int], bool] = ([], False)
) -> NewSequence:
    """The message that makes a sequence known to the workers. Of its tokens, the first `cached` lie computed in
    its first blocks, of which each has an id in so many `tables`. `encoded`: see `BlockAllocator.take_encoded`.
    Log-probabilities of its prompt are left out where the client has them already."""
    generation, tokens = sequence.generation, sequence.tokens
    sampling = generation.sampling
    if sampling.prompt_logprobs is not None and not sequence.scored:
        sampling = replace(sampling, prompt_logprobs=None)
    return NewSequence(
        sequence=sequence.id,
        tokens=pack(tokens.known),
        prompt_length=tokens.prompt_length,
        computed=cached,
        blocks=pack(sequence.blocks.numbers[: blocks_for(cached, tokens.block_size) * tables]),
        sampling=sampling,
        min_tokens=generation.stopping.min_tokens,
        stop_token_ids=tuple(sorted(tokens.stops)),
        grammar=sequence.grammar,
        pooling=generation.pooling,
        lora=generation.lora,
        prompt_embeds=generation.prompt_embeds,
        encoded_blocks=pack(encoded[0]),
        encoded_computed=encoded[1],
        cache_salt=generation.cache_salt,
    )
