"""Decides what text goes where: token batches in, deltas, stops and failures out. No bus, no clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from services.detokenizer.core.actions import Action, EngineGone, GatewayGone, StreamUnclaimed, ToEngine, ToGateway
from services.detokenizer.core.outbox import Outbox
from services.detokenizer.core.sources import Sources
from services.detokenizer.core.stream import Stream, Taken
from services.detokenizer.core.tally import Tally
from services.detokenizer.core.text import TextVocabulary
from shared.ids import DetokenizerId, EngineId, GatewayId, Incarnation, ModelName, RequestId
from shared.messages.detokenizer import Abandon, Moved, NewTokens, OpenStream, PromptLogprobs, TokenBatch
from shared.messages.gateway import Failed, Rejected, StreamOpened
from shared.messages.scheduler import Cancel, DetokenizerLost, StopMatched
from shared.tokens import TOKEN_BYTES

MAX_STREAMS = 16_384
MAX_STOP_CHARS = 16_384
"""Of all stop strings of a request together: what their automaton may hold."""


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
        self._sources = Sources()
        self._outbox = Outbox(instance, epoch)
        self.streams: dict[RequestId, Stream] = {}
        self.tally = Tally()

    def handle(self, message: TokenBatch | EngineGone | GatewayGone | StreamUnclaimed) -> list[Action]:
        """What is to be sent now: at most one `Deltas` for each gateway."""
        match message:
            case TokenBatch():
                return self._batch(message)
            case EngineGone(engine, reason):
                self._sources.forget(engine)
                return self._fail(lambda stream: stream.engine == engine, f"engine {engine}: {reason}")
            case GatewayGone(gateway, reason):
                return self._gateway_gone(gateway, reason)
            case StreamUnclaimed():
                return self._unclaimed(message)
            case _:
                assert_never(message)

    def _batch(self, batch: TokenBatch) -> list[Action]:
        arrival = self._sources.arrived(batch)
        match arrival:
            case "next":
                return self._take(batch)
            case "new epoch":
                return self._fail_former(batch.engine) + self._take(batch)
            case "gap":
                return self._gap(batch)
            case "stale":
                self.tally.stale += 1
                return []
            case _:
                assert_never(arrival)

    def _take(self, batch: TokenBatch) -> list[Action]:
        actions: list[Action] = []
        for opened in batch.opened:
            self._open(opened, batch.engine, actions)
        for scored in batch.scored:
            self._scored(scored, batch.engine)
        for entry in batch.entries:
            self._entry(entry, batch.engine, actions)
        for moved in batch.moved:
            self._move(moved, batch.engine)
        for abandoned in batch.abandoned:
            self._abandon(abandoned)
        return self._outbox.flush() + actions

    def _open(self, opened: OpenStream, engine: EngineId, actions: list[Action]) -> None:
        present = self.streams.get(opened.request)
        if present is not None and present.opened.attempt > opened.attempt:
            self.tally.unknown += 1
            return
        refusal = self._refusal(opened)
        if refusal is not None:
            actions += [
                ToGateway(opened.gateway, refusal),
                ToEngine(engine, Cancel(opened.request, opened.attempt)),
            ]
            self.tally.failed += 1
            return
        stream = self.streams[opened.request] = Stream(opened, engine, self._vocabulary)
        self._outbox.opened(
            opened.gateway,
            StreamOpened(opened.request, opened.attempt, opened.prompt_tokens, opened.cached_tokens, opened.thinking),
        )
        replayed = stream.replay()
        if replayed is not None:
            self._deliver(stream, replayed, actions)

    def _refusal(self, opened: OpenStream) -> Failed | Rejected | None:
        request, attempt = opened.request, opened.attempt
        if opened.model != self._model:
            return Failed(request, attempt, f"detokenizer {self._instance} serves {self._model}, not {opened.model}")
        if len(self.streams) >= self._max_streams and request not in self.streams:
            return Failed(request, attempt, f"detokenizer {self._instance} is full: {self._max_streams} streams")
        whole = len(opened.context) % TOKEN_BYTES == 0
        if not whole or not 0 <= opened.resumed * TOKEN_BYTES <= len(opened.context) or opened.sent_chars < 0:
            return Failed(request, attempt, "the context does not hold what it should")
        if sum(map(len, opened.stop)) > MAX_STOP_CHARS:
            message = f"stop: {MAX_STOP_CHARS} characters at most, all stop strings together"
            return Rejected(request=request, attempt=attempt, kind="invalid_request", message=message, field="stop")
        return None

    def _scored(self, scored: PromptLogprobs, engine: EngineId) -> None:
        stream = self.streams.get(scored.request)
        if stream is None or stream.opened.attempt != scored.attempt or stream.engine != engine:
            self.tally.unknown += 1
            return
        self._outbox.scored(stream.opened.gateway, stream.scored(scored))

    def _entry(self, entry: NewTokens, engine: EngineId, actions: list[Action]) -> None:
        stream = self.streams.get(entry.request)
        if stream is None or stream.opened.attempt != entry.attempt or stream.engine != engine:
            self.tally.unknown += 1
            return
        if stream.position != entry.position:
            reason = f"output token {stream.position} was missed: {entry.position} came"
            actions += self._fail(lambda other: other is stream, reason)
            actions.append(ToEngine(engine, Cancel(entry.request, entry.attempt)))
            return
        self.tally.tokens += len(entry.tokens)
        self._deliver(stream, stream.take(entry), actions)

    def _deliver(self, stream: Stream, taken: Taken, actions: list[Action]) -> None:
        self._outbox.add(stream.opened.gateway, taken.delta)
        if taken.delta.finish is not None:
            del self.streams[stream.opened.request]
        if taken.stopped:
            self.tally.stopped += 1
            actions.append(ToEngine(stream.engine, StopMatched(stream.opened.request, stream.opened.attempt)))

    def _move(self, moved: Moved, engine: EngineId) -> None:
        """Where the stream has ended here meanwhile, by a stop string, the engine that it goes to is told by the one
        that it comes from."""
        stream = self.streams.get(moved.request)
        if stream is None or stream.opened.attempt != moved.attempt or stream.engine != engine:
            self.tally.unknown += 1
            return
        stream.move(moved.engine)

    def _abandon(self, abandoned: Abandon) -> None:
        stream = self.streams.get(abandoned.request)
        if stream is not None and stream.opened.attempt <= abandoned.attempt:
            del self.streams[abandoned.request]

    def _gap(self, batch: TokenBatch) -> list[Action]:
        """Every request of the engine has failed, those opened just now too: the engine will fail them all."""
        self.tally.gaps += 1
        reason = f"detokenizer {self._instance} missed tokens of engine {batch.engine}"
        failed = self._fail(lambda stream: stream.engine == batch.engine, reason)
        for opened in batch.opened:
            self.tally.failed += 1
            failed.append(ToGateway(opened.gateway, Failed(opened.request, opened.attempt, reason)))
        return [*failed, ToEngine(batch.engine, DetokenizerLost(self._instance))]

    def _fail_former(self, engine: EngineId) -> list[Action]:
        """A new epoch of `engine` has nothing of what its last one ran; it may well go on with what moved to it."""
        return self._fail(lambda stream: stream.engine == engine and not stream.awaited, f"engine {engine} restarted")

    def _fail(self, concerned: Callable[[Stream], bool], reason: str) -> list[Action]:
        failed = [stream.opened for stream in self.streams.values() if concerned(stream)]
        for opened in failed:
            del self.streams[opened.request]
        self.tally.failed += len(failed)
        return [ToGateway(opened.gateway, Failed(opened.request, opened.attempt, reason)) for opened in failed]

    def _unclaimed(self, message: StreamUnclaimed) -> list[Action]:
        stream = self.streams.get(message.request)
        if stream is None or stream.opened.attempt != message.attempt or not stream.awaited:
            return []
        return self._fail(lambda other: other is stream, f"engine {stream.engine} never got the request")

    def _gateway_gone(self, gateway: GatewayId, reason: str) -> list[Action]:
        """Frees what the engines hold for it. It is told too: it may have been cut off for a moment only."""
        self._outbox.forget(gateway)
        dropped = [stream for stream in self.streams.values() if stream.opened.gateway == gateway]
        cancelled: list[Action] = [ToEngine(s.engine, Cancel(s.opened.request, s.opened.attempt)) for s in dropped]
        return cancelled + self._fail(lambda stream: stream.opened.gateway == gateway, f"gateway {gateway}: {reason}")
