"""The detokenizer's core: token batches in, deltas, stops and failures out. No bus, no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple, assert_never

from services.detokenizer.core.actions import (
    MAX_STREAMS,
    Action,
    DetokenizerCounters,
    EngineLost,
    GatewayLost,
    StreamOrphaned,
    ToEngine,
    ToGateway,
)
from services.detokenizer.core.stream import RequestStream, StreamUpdate
from services.detokenizer.core.text import TextVocabulary
from shared.ids import Attempt, DetokenizerId, EngineId, GatewayId, Incarnation, ModelName, RequestId
from shared.messages.detokenizer import NewTokens, OpenStream, PooledPrompt, PromptLogprobs, StreamMoved, TokenBatch
from shared.messages.gateway import (
    Death,
    Delta,
    Deltas,
    PooledDelta,
    PromptLogprobsDelta,
    RequestFailed,
    RequestRejected,
    StreamOpened,
)
from shared.messages.scheduler import Cancel, StopMatched, TokenBatchLost
from shared.packing import TOKEN_BYTES
from shared.reliability.recent import RecentEntries
from shared.reliability.sequence_numbers import SourceNumbers

MAX_GATEWAYS = 4096
"""Names of gateways, of all that there ever were, whose messages' numbers are kept."""
MAX_STOP_CHARS = 16_384
"""Most characters of all stop strings of a request together; it bounds the automaton that finds them."""


class _PendingDeltas(NamedTuple):
    opened: list[StreamOpened]
    deltas: list[Delta]
    scored: list[PromptLogprobsDelta]
    pooled: list[PooledDelta]


class Detokenizer:
    """Owns the text of every stream that engines have opened here."""

    def __init__(
        self,
        instance: DetokenizerId,
        epoch: Incarnation,
        model: ModelName,
        vocabulary: TextVocabulary,
        max_streams: int = MAX_STREAMS,
    ) -> None:
        self._instance = instance
        self._model = model
        self._vocabulary = vocabulary
        self._max_streams = max_streams
        self._batches: SourceNumbers[EngineId] = SourceNumbers()
        self._epoch = epoch
        self._numbers: RecentEntries[GatewayId, int] = RecentEntries(MAX_GATEWAYS)
        """Of the next message to each gateway. They go on where a gateway seems gone: one that was only cut off takes a
        lower number for a repeated message."""
        self._pending: defaultdict[GatewayId, _PendingDeltas] = defaultdict(lambda: _PendingDeltas([], [], [], []))
        """What of the present batch goes into that message."""
        self.streams: dict[RequestId, RequestStream] = {}
        self.counters = DetokenizerCounters()

    def handle(self, batch: TokenBatch) -> list[Action]:
        """Takes a batch of tokens. Returns at most one `Deltas` for each gateway, and failures and cancels; after a gap
        in an engine's batches, a failure for each request of that engine. A detokenizer that has just started joins
        each engine's batches: that counts as a gap only if a stream of the batch began before it."""
        engine, former = batch.engine, []
        match self._batches.record(engine, batch.epoch, batch.number):
            case "old epoch":
                self.counters.stale += 1
                return []
            case "gap" | "repeated":
                return self._gap(batch)
            case "joined" if not self._has_all(batch):
                return self._gap(batch)
            case "new epoch":  # not "first": streams may have moved to an engine before its first batch
                former = self._fail_former(engine)
        actions: list[Action] = []
        for opened in batch.opened:
            self._open(opened, engine, actions)
        for scored in batch.scored:
            stream = self._open_stream(scored.request, scored.attempt, engine)
            if stream is not None:
                self._pending[stream.opened.gateway].scored.append(stream.spell_prompt(scored))
        for pooled in batch.pooled:
            stream = self._open_stream(pooled.request, pooled.attempt, engine)
            if stream is not None:
                vector = PooledDelta(pooled.request, pooled.attempt, pooled.vector)
                self._pending[stream.opened.gateway].pooled.append(vector)
        for entry in batch.entries:
            stream = self._open_stream(entry.request, entry.attempt, engine)
            if stream is not None and stream.position == entry.position:
                self.counters.tokens += len(entry.tokens)
                self._deliver(stream, stream.add_tokens(entry), actions)
            elif stream is not None:
                self._fail_incomplete(stream, entry, actions)
        for moved in batch.moved:
            # Where a stop string has ended the stream here meanwhile, the engine that it leaves informs the other one.
            stream = self._open_stream(moved.request, moved.attempt, engine)
            if stream is not None:
                stream.move(moved.engine)
        for abandoned in batch.abandoned:
            held = self.streams.get(abandoned.request)
            if held is not None and held.opened.attempt <= abandoned.attempt:
                del self.streams[abandoned.request]
        return former + self._flush() + actions

    def end_streams(self, event: EngineLost | GatewayLost | StreamOrphaned) -> list[Action]:
        """The failures and cancels that follow from a loss."""
        match event:
            case EngineLost(engine, reason, death_of):
                self._batches.forget(engine)  # should it live after all, its next batch counts as a gap
                return self._fail(lambda stream: stream.engine == engine, f"engine {engine}: {reason}", death_of)
            case GatewayLost(gateway, reason):
                return self._gateway_lost(gateway, reason)
            case StreamOrphaned():
                return self._orphaned(event)
            case _:
                assert_never(event)

    def _open_stream(self, request: RequestId, attempt: Attempt, engine: EngineId) -> RequestStream | None:
        """The stream of that attempt on that engine; None, and counted, if it is not open here."""
        stream = self.streams.get(request)
        if stream is None or stream.opened.attempt != attempt or stream.engine != engine:
            self.counters.unknown += 1
            return None
        return stream

    def _deliver(self, stream: RequestStream, update: StreamUpdate, actions: list[Action]) -> None:
        opened, delta = stream.opened, update.delta
        self._pending[opened.gateway].deltas.append(delta)
        if delta.finish is not None:
            del self.streams[opened.request]
        if update.stopped:
            self.counters.stopped += 1
            actions.append(ToEngine(stream.engine, StopMatched(opened.request, opened.attempt)))

    def _flush(self) -> list[Action]:
        """One numbered message for each gateway that there is something for."""
        messages: list[Action] = []
        for gateway, (opened, deltas, scored, pooled) in self._pending.items():
            number = self._numbers.get(gateway, 0)
            self._numbers[gateway] = number + 1
            message = Deltas(
                detokenizer=self._instance,
                epoch=self._epoch,
                number=number,
                opened=tuple(opened),
                deltas=tuple(deltas),
                scored=tuple(scored),
                pooled=tuple(pooled),
            )
            messages.append(ToGateway(gateway, message))
        self._pending.clear()
        return messages

    def _open(self, opened: OpenStream, engine: EngineId, actions: list[Action]) -> None:
        """Opens a stream in place of an older attempt's; refuses it, and cancels it at its engine, where it cannot."""
        present = self.streams.get(opened.request)
        if present is not None and present.opened.attempt > opened.attempt:
            self.counters.unknown += 1
            return
        refusal = self._refusal(opened)
        if refusal is not None:
            actions.append(ToGateway(opened.gateway, refusal))
            actions.append(ToEngine(engine, Cancel(opened.request, opened.attempt)))
            self.counters.failed += 1
            return
        stream = self.streams[opened.request] = RequestStream(opened, engine, self._vocabulary)
        self._pending[opened.gateway].opened.append(
            StreamOpened(
                *(opened.request, opened.attempt, opened.prompt_tokens, opened.cached_tokens),
                *(opened.thinking, engine, opened.queued),
            )
        )
        if opened.resumed and (replayed := stream.replay()) is not None:
            self._deliver(stream, replayed, actions)

    def _refusal(self, opened: OpenStream) -> RequestFailed | RequestRejected | None:
        request, attempt = opened.request, opened.attempt
        if opened.model != self._model:
            return RequestFailed(
                request, attempt, f"detokenizer {self._instance} serves {self._model}, not {opened.model}"
            )
        if len(self.streams) >= self._max_streams and request not in self.streams:
            return RequestFailed(request, attempt, f"detokenizer {self._instance} is full: {self._max_streams} streams")
        whole = len(opened.context) % TOKEN_BYTES == 0
        if not whole or not 0 <= opened.resumed * TOKEN_BYTES <= len(opened.context) or opened.sent_chars < 0:
            return RequestFailed(request, attempt, "the context does not hold what it should")
        if sum(map(len, opened.stop)) > MAX_STOP_CHARS:
            message = f"stop: {MAX_STOP_CHARS} characters at most, all stop strings together"
            return RequestRejected(
                request=request, attempt=attempt, kind="invalid_request", message=message, field="stop"
            )
        return None

    def _has_all(self, batch: TokenBatch) -> bool:
        """Whether every stream in the batch begins in it, or is open here. What came before the batch was then for the
        process that this one replaces, and its requests have failed with that."""
        known = {(each.request, each.attempt) for each in batch.opened}
        known |= {(s.opened.request, s.opened.attempt) for s in self.streams.values() if s.engine == batch.engine}
        parts: tuple[NewTokens | PromptLogprobs | PooledPrompt | StreamMoved, ...]
        parts = (*batch.entries, *batch.scored, *batch.pooled, *batch.moved)
        return bool(known) and known.issuperset((each.request, each.attempt) for each in parts)

    # ---- what ends streams

    def _gap(self, batch: TokenBatch) -> list[Action]:
        """Fails every request of the engine, including those opened just now, and has the engine fail them all."""
        self.counters.gaps += 1
        reason = f"detokenizer {self._instance} missed tokens of engine {batch.engine}"
        failed = self._fail(lambda stream: stream.engine == batch.engine, reason)
        for opened in batch.opened:
            self.counters.failed += 1
            failed.append(ToGateway(opened.gateway, RequestFailed(opened.request, opened.attempt, reason)))
        return [*failed, ToEngine(batch.engine, TokenBatchLost(self._instance))]

    def _fail_incomplete(self, stream: RequestStream, entry: NewTokens, actions: list[Action]) -> None:
        reason = f"output token {stream.position} was missed: {entry.position} came"
        actions += self._fail(lambda other: other is stream, reason)
        actions.append(ToEngine(stream.engine, Cancel(entry.request, entry.attempt)))

    def _fail_former(self, engine: EngineId) -> list[Action]:
        """A new epoch of `engine` begins: the streams of its last epoch fail, except those that moved to it from
        elsewhere."""
        return self._fail(lambda stream: stream.engine == engine and not stream.awaited, f"engine {engine} restarted")

    def _fail(
        self,
        concerned: Callable[[RequestStream], bool],
        reason: str,
        death_of: Callable[[RequestId], Death | None] = lambda _: None,
    ) -> list[Action]:
        failed = [stream.opened for stream in self.streams.values() if concerned(stream)]
        for opened in failed:
            del self.streams[opened.request]
        self.counters.failed += len(failed)
        return [ToGateway(o.gateway, RequestFailed(o.request, o.attempt, reason, death_of(o.request))) for o in failed]

    def _orphaned(self, message: StreamOrphaned) -> list[Action]:
        stream = self.streams.get(message.request)
        if stream is None or (stream.opened.attempt, stream.position) != (message.attempt, message.position):
            return []
        return self._fail(lambda other: other is stream, f"engine {stream.engine} does not have the request")

    def _gateway_lost(self, gateway: GatewayId, reason: str) -> list[Action]:
        """Frees what the engines hold for it. The failures are sent nevertheless: it may have been cut off for a moment
        only."""
        self._pending.pop(gateway, None)
        dropped = [stream for stream in self.streams.values() if stream.opened.gateway == gateway]
        cancelled: list[Action] = [ToEngine(s.engine, Cancel(s.opened.request, s.opened.attempt)) for s in dropped]
        return cancelled + self._fail(lambda stream: stream.opened.gateway == gateway, f"gateway {gateway}: {reason}")
