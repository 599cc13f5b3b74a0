"""The step that is being planned: what it holds so far, and what else it has room for."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.queue.grammars import GrammarOrders
from services.scheduler.core.sequence import Sequence
from shared.blocks import blocks_for
from shared.ids import SequenceId
from shared.messages.worker import (
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


class StepBuilder:
    """One step while it is planned; each planner fills its part."""

    __slots__ = (
        "_max_new_bytes",
        "_new_bytes",
        "budget",
        "decodes",
        "drafts",
        "extras",
        "filled",
        "grammars",
        "handing",
        "logprobs",
        "samples",
        "scores",
        "started",
        "work",
    )

    def __init__(self, limits: EngineLimits) -> None:
        self._max_new_bytes = limits.max_new_bytes
        self._new_bytes = 0
        self.work: list[SequenceWork] = []
        self.budget = limits.max_batch_tokens
        """Tokens that it may still compute."""
        self.decodes = 0
        """Sequences that decode in it."""
        self.samples = 0
        """Sequences that draw in it."""
        self.drafts = 0
        """Drafts that it may still hold."""
        self.extras: dict[SequenceId, int] = {}
        """Tokens beyond the first that each sequence may yield."""
        self.scores, self.logprobs = MAX_PROMPT_LOGPROB_TOKENS_PER_PLAN, MAX_PROMPT_LOGPROBS_PER_PLAN
        """Prompt tokens that it may still score, and log-probabilities of them that it may still report."""
        self.started: list[StartedSequence] = []
        self.handing: list[Sequence] = []
        """Sequences whose only token it draws: the next ones come from another engine."""
        self.grammars = GrammarOrders((), ())
        """What the workers compile beside it, and forget."""
        self.filled: list[Sequence] = []
        """Sequences that may have filled a block."""

    def fits_new(self, sequence: Sequence) -> bool:
        """Whether the plan has bytes left for the tokens of a sequence that the workers do not know. One always has
        room, however long it is."""
        return not self.started or self._new_bytes + _new_bytes(sequence) <= self._max_new_bytes

    def start(self, sequence: Sequence) -> None:
        """Adds a sequence that the workers do not know; the caller asks `fits_new` first."""
        self._new_bytes += _new_bytes(sequence)
        self.started.append(StartedSequence(sequence, sequence.tokens.planned))

    @property
    def bytes_left(self) -> int:
        """Bytes that something else that is new may take in the plan."""
        return self._max_new_bytes - self._new_bytes


def _new_bytes(sequence: Sequence) -> int:
    """About the bytes of the message that makes it known to the workers, where they are many."""
    return len(sequence.tokens.known) * TOKEN_BYTES + sequence.list_bytes


def new_sequence(sequence: Sequence, cached: int) -> NewSequence:
    """The message that makes a sequence known to the workers. Of its tokens, the first `cached` lie computed in
    its first blocks. Log-probabilities of its prompt are left out where the client has them already."""
    generation, tokens = sequence.generation, sequence.tokens
    sampling = generation.sampling
    if sampling.prompt_logprobs is not None and not sequence.scored:
        sampling = replace(sampling, prompt_logprobs=None)
    return NewSequence(
        sequence=sequence.id,
        tokens=pack(tokens.known),
        prompt_length=tokens.prompt_length,
        computed=cached,
        blocks=pack(sequence.blocks.numbers[: blocks_for(cached)]),
        sampling=sampling,
        min_tokens=generation.stopping.min_tokens,
        stop_token_ids=tuple(sorted(tokens.stops)),
        grammar=sequence.grammar,
    )
