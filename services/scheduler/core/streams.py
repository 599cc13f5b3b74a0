"""What goes to detokenizers: gathered over one event, one numbered message for each of them."""

from __future__ import annotations

from services.scheduler.core.events import Output, SendTokens
from services.scheduler.core.sequence import Sequence
from shared.ids import Attempt, DetokenizerId, EngineId, Incarnation, RequestId
from shared.messages.detokenizer import Abandon, Moved, NewTokens, OpenStream, PromptLogprobs, TokenBatch
from shared.messages.scheduler import PromptScored
from shared.tokens import TOKEN_BYTES

CONTEXT_TOKENS = 8
"""Prompt tokens sent along, so that the first output token is decoded with what stands before it."""


class _Gathered:
    __slots__ = ("abandoned", "entries", "moved", "opened", "scored")

    def __init__(self) -> None:
        self.opened: list[OpenStream] = []
        self.entries: list[NewTokens] = []
        self.abandoned: list[Abandon] = []
        self.moved: list[Moved] = []
        self.scored: list[PromptLogprobs] = []


class Streams:
    """Owns the number of the next message to each detokenizer, and what that message will hold."""

    def __init__(self, engine: EngineId, epoch: Incarnation) -> None:
        self._engine = engine
        self._epoch = epoch
        self._numbers: dict[DetokenizerId, int] = {}
        self._gathered: dict[DetokenizerId, _Gathered] = {}

    def open(self, sequence: Sequence, cached_tokens: int) -> None:
        """Announces a request, once."""
        if not sequence.opened:
            sequence.opened = True
            sequence.cached_tokens = min(cached_tokens, sequence.prompt_length)
            self._for(sequence.detokenizer).opened.append(_open_stream(sequence))

    def scored(self, sequence: Sequence, scored: PromptScored) -> None:
        generation = sequence.generation
        told = PromptLogprobs(generation.request, generation.attempt, scored.position, scored.logprobs)
        self._for(sequence.detokenizer).scored.append(told)

    def add(self, sequence: Sequence, entry: NewTokens) -> None:
        self._for(sequence.detokenizer).entries.append(entry)

    def abandon(self, sequence: Sequence) -> None:
        if sequence.opened:
            self.disown(sequence.detokenizer, sequence.generation.request, sequence.generation.attempt)

    def disown(self, detokenizer: DetokenizerId, request: RequestId, attempt: Attempt) -> None:
        """Nobody goes on with a stream that is open there."""
        self._for(detokenizer).abandoned.append(Abandon(request, attempt))

    def move(self, sequence: Sequence, engine: EngineId) -> None:
        """The stream goes on from `engine`."""
        generation = sequence.generation
        self._for(sequence.detokenizer).moved.append(Moved(generation.request, generation.attempt, engine))

    def forget(self, detokenizer: DetokenizerId) -> None:
        """It is gone: what it has not been sent yet would mean nothing to the one that is started in its place."""
        self._gathered.pop(detokenizer, None)

    def _for(self, detokenizer: DetokenizerId) -> _Gathered:
        gathered = self._gathered.get(detokenizer)
        if gathered is None:
            gathered = self._gathered[detokenizer] = _Gathered()
        return gathered

    def flush(self) -> list[Output]:
        """One batch for each detokenizer that there is news for.

        A request's opening alone is none: it travels with its first tokens, and does not go round the ring while its
        prompt is computed, which costs more than it tells.
        """
        due = [
            detokenizer
            for detokenizer, gathered in self._gathered.items()
            if gathered.entries or gathered.abandoned or gathered.moved or gathered.scored
        ]
        return [
            SendTokens(detokenizer, self._batch(detokenizer, self._gathered.pop(detokenizer))) for detokenizer in due
        ]

    def _batch(self, detokenizer: DetokenizerId, gathered: _Gathered) -> TokenBatch:
        number = self._numbers.get(detokenizer, 0)
        self._numbers[detokenizer] = number + 1
        return TokenBatch(
            engine=self._engine,
            epoch=self._epoch,
            number=number,
            opened=tuple(gathered.opened),
            entries=tuple(gathered.entries),
            abandoned=tuple(gathered.abandoned),
            moved=tuple(gathered.moved),
            scored=tuple(gathered.scored),
        )


def _open_stream(sequence: Sequence) -> OpenStream:
    generation = sequence.generation
    stopping = generation.stopping
    start = max(0, sequence.prompt_length - CONTEXT_TOKENS)
    return OpenStream(
        request=generation.request,
        attempt=generation.attempt,
        gateway=generation.gateway,
        model=generation.model,
        context=generation.tokens[start * TOKEN_BYTES :],
        resumed=len(generation.tokens) // TOKEN_BYTES - sequence.prompt_length,
        sent_chars=generation.sent_chars,
        prompt_tokens=sequence.prompt_length,
        cached_tokens=sequence.cached_tokens,
        stop=stopping.stop,
        include_stop=stopping.include_stop,
        min_tokens=stopping.min_tokens,
        skip_special_tokens=generation.skip_special_tokens,
        trace=generation.trace,
        keep_markup=generation.keep_markup,
        thinking=generation.thinking,
    )
