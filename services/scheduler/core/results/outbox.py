"""The engine's outgoing messages, in order: tokens to detokenizers, batched per event, and final answers.

Final answers: a `NewTokens` entry with `finish` (to the detokenizer), `RequestRejected` or `RequestFailed` (to the
gateway). A request that the gateway or the detokenizer cancelled, or that a newer attempt replaces, ends without one,
because the process that cancelled it knows already.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from services.scheduler.core.events import Output, SendHandOver, SendToGateway, SendTokens
from services.scheduler.core.sequence import Sequence
from shared.ids import Attempt, DetokenizerId, EngineId, Incarnation, RequestId, SequenceId
from shared.messages.detokenizer import (
    AbandonStream,
    NewTokens,
    OpenStream,
    PooledPrompt,
    PromptLogprobs,
    StreamMoved,
    TokenBatch,
)
from shared.messages.gateway import RequestFailed, RequestPlaced, RequestRejected
from shared.messages.generation import FinishReason, Generation, TokenLogprobs
from shared.messages.scheduler import GenerateRequest, SequencePooled, SequencePromptLogprobs
from shared.packing import TOKEN_BYTES
from shared.reliability.recent import AttemptFence

CONTEXT_TOKENS = 8
"""Prompt tokens sent along, so that the first output token is decoded with the text before it."""
MAX_OPENED_CHARS = 2**20
"""Characters of stop strings in the openings of one message, or one opening with more: a message must fit the bus."""
MAX_HELD_SECONDS = 0.1
"""Tokens are held back for no longer, whatever their request's interval: it is meant for steps that are fast."""
MAX_FENCED = 8192
"""Requests whose ended attempts are remembered. A message is late by seconds, not by thousands of requests."""


@dataclass(slots=True)
class PendingBatch:
    """What the next message to one detokenizer will hold, see `TokenBatch`; or the next few, where streams open with
    long stop strings."""

    opened: list[OpenStream] = field(default_factory=list)
    entries: list[NewTokens] = field(default_factory=list)
    abandoned: list[AbandonStream] = field(default_factory=list)
    moved: list[StreamMoved] = field(default_factory=list)
    scored: list[PromptLogprobs] = field(default_factory=list)
    pooled: list[PooledPrompt] = field(default_factory=list)


class TokenStreams:
    """Owns the number of the next message to each detokenizer, and what that message will hold. One epoch's."""

    def __init__(self, engine: EngineId, epoch: Incarnation) -> None:
        self._engine = engine
        self._epoch = epoch
        self._numbers: dict[DetokenizerId, int] = {}
        self._steps = 0
        """Whose results were taken in: tokens of all streams of an interval are sent at the same ones, in one
        message."""
        self._holding: dict[SequenceId, tuple[Sequence, float]] = {}
        """Sequences with tokens that are not sent yet, and since when, the oldest first."""
        self.pending: defaultdict[DetokenizerId, PendingBatch] = defaultdict(PendingBatch)
        """What the next message to each detokenizer will hold, to be appended to."""

    def open(self, sequence: Sequence, cached_tokens: int, *, queued: float) -> None:
        """Announces a request, once, which waited here for `queued` seconds."""
        if sequence.stream.opened:
            return
        generation, stopping = sequence.generation, sequence.generation.stopping
        prompt_length = sequence.tokens.prompt_length
        start = max(0, prompt_length - CONTEXT_TOKENS)
        sequence.stream.opened = True
        sequence.stream.cached_tokens = min(cached_tokens, prompt_length)
        opening = OpenStream(
            request=generation.request,
            attempt=generation.attempt,
            gateway=generation.gateway,
            model=generation.model,
            context=generation.tokens[start * TOKEN_BYTES :],
            resumed=len(generation.tokens) // TOKEN_BYTES - prompt_length,
            sent_chars=generation.sent_chars,
            prompt_tokens=prompt_length,
            cached_tokens=sequence.stream.cached_tokens,
            stop=stopping.stop,
            include_stop=stopping.include_stop,
            min_tokens=stopping.min_tokens,
            skip_special_tokens=generation.skip_special_tokens,
            keep_markup=generation.keep_markup,
            thinking=generation.thinking,
            trace=generation.trace,
            queued=queued,
        )
        self.pending[sequence.detokenizer].opened.append(opening)

    def add_prompt_logprobs(self, sequence: Sequence, scored: SequencePromptLogprobs) -> None:
        """Log-probabilities of a part of the prompt."""
        generation = sequence.generation
        logprobs = PromptLogprobs(generation.request, generation.attempt, scored.position, scored.logprobs)
        self.pending[sequence.detokenizer].scored.append(logprobs)

    def add_pooled(self, sequence: Sequence, pooled: SequencePooled) -> None:
        """The prompt's vector; the entry that ends the request follows."""
        generation = sequence.generation
        vector = PooledPrompt(generation.request, generation.attempt, pooled.vector)
        self.pending[sequence.detokenizer].pooled.append(vector)

    # Tokens that are held back (`Generation.stream_interval`).

    def begin_step(self) -> None:
        """Called before the tokens of a step are added."""
        self._steps += 1

    def pace(self, sequence: Sequence, entry: NewTokens, now: float) -> NewTokens | None:
        """Returns what of the sequence's tokens is to be sent now that it has these, in one entry; None: they are held
        back."""
        stream = sequence.stream
        if stream.held is not None:
            entry = _joined(stream.held, entry)
        if entry.finish is None and stream.begun and self._steps % stream.interval:
            if stream.held is None:
                self._holding[sequence.id] = sequence, now
            stream.held = entry
            return None
        stream.begun = True
        self.drop_held(sequence)
        return entry

    def release(self, now: float) -> None:
        """Queues tokens that were held back for MAX_HELD_SECONDS."""
        due = []
        for sequence, since in self._holding.values():
            if now - since < MAX_HELD_SECONDS:
                break
            due.append(sequence)
        for sequence in due:
            self.send_held(sequence)

    def send_held(self, sequence: Sequence) -> None:
        """Queues the sequence's tokens that were held back, if any."""
        if (held := sequence.stream.held) is not None:
            self.pending[sequence.detokenizer].entries.append(held)
            self.drop_held(sequence)

    def drop_held(self, sequence: Sequence) -> None:
        """Forgets the sequence's tokens that were held back, because they were sent, or nobody needs them."""
        if sequence.stream.held is not None:
            sequence.stream.held = None
            del self._holding[sequence.id]

    def abandon(self, sequence: Sequence) -> None:
        """Ends a stream that was opened without a final answer."""
        if sequence.stream.opened:
            self.disown(sequence.detokenizer, sequence.generation.request, sequence.generation.attempt)

    def disown(self, detokenizer: DetokenizerId, request: RequestId, attempt: Attempt) -> None:
        """Tells the detokenizer that no engine continues a stream that is open there."""
        self.pending[detokenizer].abandoned.append(AbandonStream(request, attempt))

    def move(self, sequence: Sequence, engine: EngineId) -> None:
        """Informs the detokenizer that the stream continues from `engine`."""
        self.send_held(sequence)
        generation = sequence.generation
        self.pending[sequence.detokenizer].moved.append(StreamMoved(generation.request, generation.attempt, engine))

    def forget(self, detokenizer: DetokenizerId) -> None:
        """The detokenizer is gone: drops its unsent messages, which would mean nothing to the one that replaces it."""
        self.pending.pop(detokenizer, None)

    def flush(self) -> list[Output]:
        """Returns a batch for each detokenizer that has new tokens or events; several where many open with long stop
        strings.

        A request's opening alone makes no batch: it is sent with the first tokens, as a message of its own while the
        prompt is computed would cost more than it is worth.
        """
        batches: list[Output] = []
        for detokenizer, pending in list(self.pending.items()):
            if not (pending.entries or pending.abandoned or pending.moved or pending.scored or pending.pooled):
                continue
            del self.pending[detokenizer]
            *first, last = _parts(pending.opened) if pending.opened else [()]
            number = self._numbers.get(detokenizer, 0)
            for opened in first:
                opening = TokenBatch(engine=self._engine, epoch=self._epoch, number=number, opened=opened)
                batches.append(SendTokens(detokenizer, opening))
                number += 1
            self._numbers[detokenizer] = number + 1
            batch = TokenBatch(
                engine=self._engine,
                epoch=self._epoch,
                number=number,
                opened=last,
                entries=tuple(pending.entries),
                abandoned=tuple(pending.abandoned),
                moved=tuple(pending.moved),
                scored=tuple(pending.scored),
                pooled=tuple(pending.pooled),
            )
            batches.append(SendTokens(detokenizer, batch))
        return batches


class EngineOutbox:
    """Owns what is to be sent, the streams of the present epoch, and which attempts are over. Outlives epochs."""

    def __init__(self, engine: EngineId, epoch: Incarnation) -> None:
        self.fence = AttemptFence(MAX_FENCED)
        self.streams = TokenStreams(engine, epoch)
        """This epoch's, workers or not: what is handed over to us has a stream already, which we may have to end."""
        self.engine = engine
        self._outputs: list[Output] = []

    def start_epoch(self, epoch: Incarnation) -> None:
        """Streams are numbered from 0 again; no detokenizer has one open any more."""
        self._outputs += self.streams.flush()
        self.streams = TokenStreams(self.engine, epoch)

    def add(self, output: Output) -> None:
        """To be sent behind what was added before."""
        self._outputs.append(output)

    def send_to_gateway(self, generation: Generation, message: RequestRejected | RequestFailed | RequestPlaced) -> None:
        """To the request's gateway."""
        self._outputs.append(SendToGateway(generation.gateway, message))

    def take(self) -> list[Output]:
        """All that is to be sent by now; what was gathered for detokenizers comes last."""
        outputs, self._outputs = self._outputs, []
        if self.streams.pending:
            outputs += self.streams.flush()
        return outputs

    def refuse(self, generate: GenerateRequest, answer: RequestRejected | RequestFailed) -> None:
        """The final answer to a request that was never accepted here. If another engine handed it over, it fails
        instead of being rejected, so that it is tried again, and the detokenizer is told that no engine continues its
        stream."""
        self.fence.close(answer.request, answer.attempt)
        if generate.handed is not None:
            self.disown(generate)
            if isinstance(answer, RequestRejected):
                reason = f"{self.engine} cannot take it over: {answer.message}"
                answer = RequestFailed(answer.request, answer.attempt, reason)
        self.send_to_gateway(generate.generation, answer)

    def disown(self, generate: GenerateRequest) -> None:
        """Tells the detokenizer that no engine continues the stream that moved here, if one has."""
        if generate.handed is not None:
            self.streams.disown(generate.detokenizer, generate.generation.request, generate.generation.attempt)

    def hand_over(self, sequence: Sequence, hand_over: SendHandOver) -> None:
        """Sends the stream's move to another engine, the gateway's notice, and the request. The first token is sent
        before all that, because it must arrive before the second is drawn."""
        self.streams.move(sequence, hand_over.engine)
        self._outputs += self.streams.flush()
        generation = sequence.generation
        placed = RequestPlaced(
            generation.request,
            generation.attempt,
            hand_over.engine,
            sequence.detokenizer,
            self.engine,
            passes=0 if sequence.transfer.passed_by is None else 2,
        )
        self.send_to_gateway(generation, placed)
        self._outputs.append(hand_over)

    def pass_on(self, sequence: Sequence, passed: SendHandOver) -> None:
        """Sends the gateway's notice, and the request to the engine that computes its prompt. No stream is open."""
        generation = sequence.generation
        placed = RequestPlaced(
            generation.request, generation.attempt, passed.engine, sequence.detokenizer, self.engine, passes=1
        )
        self.send_to_gateway(generation, placed)
        self._outputs.append(passed)


def token_entry(
    sequence: Sequence,
    tokens: tuple[int, ...],
    finish: FinishReason | None,
    logprobs: tuple[TokenLogprobs, ...] | None = None,
) -> NewTokens:
    """What the detokenizer is sent of `tokens`, which `sequence` has already; `finish`: it ends with them."""
    generation, state = sequence.generation, sequence.tokens
    position = len(state.known) - state.prompt_length - len(tokens)
    if finish is None and logprobs is None:  # nearly always
        return NewTokens(generation.request, generation.attempt, position, tokens)
    asked_to_stop = finish == "stop" and tokens[-1] in generation.stopping.stop_token_ids
    stop_token = tokens[-1] if asked_to_stop else None
    return NewTokens(generation.request, generation.attempt, position, tokens, finish, stop_token, logprobs)


def _joined(first: NewTokens, then: NewTokens) -> NewTokens:
    """Tokens of two steps of a sequence as one entry."""
    logprobs = None if first.logprobs is None or then.logprobs is None else first.logprobs + then.logprobs
    tokens = first.tokens + then.tokens
    return NewTokens(first.request, first.attempt, first.position, tokens, then.finish, then.stop_token, logprobs)


def _parts(opened: list[OpenStream]) -> list[tuple[OpenStream, ...]]:
    """At least one part, in order; MAX_OPENED_CHARS each."""
    parts: list[list[OpenStream]] = [[]]
    chars = 0
    for stream in opened:
        own = sum(map(len, stream.stop))
        if parts[-1] and chars + own > MAX_OPENED_CHARS:
            parts.append([])
            chars = 0
        parts[-1].append(stream)
        chars += own
    return [tuple(part) for part in parts]
