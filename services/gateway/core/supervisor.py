"""Ends every open request exactly once, even if processes die or messages are lost. Pure: time is an argument.

ADR 1 says why an engine is probed before a silent request is retried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import assert_never

from services.gateway.core.cluster import ModelUnavailable
from services.gateway.core.dispatch_window import DispatchWindow
from services.gateway.core.effects import (
    AttemptRetry,
    CancelAttempt,
    DispatchAttempt,
    Effect,
    ProbeEngine,
    cancel_of,
)
from services.gateway.core.open_request import AbandonedRequests, EmittedOutput, NoAnswer, OpenRequest, RetryPolicy
from services.gateway.core.poisoned import PoisonedRequests, rejection
from services.gateway.core.remote_clusters import RemoteClusters
from shared.ids import Attempt, DetokenizerId, EngineId, ModelName, RequestId
from shared.messages.coordinator import Withdraw
from shared.messages.gateway import (
    Death,
    Delta,
    Deltas,
    PromptLogprobsDelta,
    PromptsHeld,
    RequestFailed,
    RequestMessage,
    RequestPlaced,
    RequestQueued,
    RequestRejected,
    StreamOpened,
)
from shared.messages.lifecycle import Lifecycle
from shared.messages.scheduler import Probe, ProbeReply
from shared.messages.tokenizer import Tokenize
from shared.registry import InstanceGone
from shared.reliability.sequence_numbers import SourceNumbers


class RequestSupervisor:
    """Owns the open requests. Each ends exactly once: by a `Delta` with `finish`, a `RequestRejected`, or `close`."""

    def __init__(self, policy: RetryPolicy, clusters: RemoteClusters | None = None) -> None:
        """`clusters`: others that requests may go to. Only the count of what was sent to each is changed here."""
        self._policy = policy
        self._clusters = clusters
        self._open: dict[RequestId, OpenRequest] = {}
        self._window = DispatchWindow()
        self._numbers: SourceNumbers[DetokenizerId] = SourceNumbers()
        self._abandoned = AbandonedRequests(policy.departed_limit, policy.recancel_s)
        self._poisoned = PoisonedRequests(policy.refused_limit, policy.refuse_s, policy.refuse_grammar_s)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request: object) -> bool:
        return request in self._open

    def requests(self) -> Iterable[OpenRequest]:
        """Returns the open requests; they are the supervisor's to change."""
        return self._open.values()

    def open(self, tokenize: Tokenize, now: float, *, accepted: bool = False) -> list[Effect]:
        """Opens a new request and dispatches its first attempt; or rejects it at once if processes died of an equal
        request. `accepted`: it continues an answer that has begun."""
        if self._poisoned.until and (refused := self._poisoned.refusal(tokenize, now)) is not None:
            return [refused]
        request = self._open[tokenize.request] = OpenRequest(tokenize, now, now, now, accepted=accepted)
        return self._dispatch(request, now)

    def resume(self, tokenize: Tokenize, emitted: EmittedOutput, now: float, *, relayed: bool = False) -> list[Effect]:
        """Opens a request of another gateway, after the output that its client already has. `relayed`: of a gateway of
        another cluster, which goes on supervising it."""
        if self._poisoned.until and (refused := self._poisoned.refusal(tokenize, now)) is not None:
            return [refused]
        request = OpenRequest(tokenize, now - emitted.age, now, now, accepted=not relayed, relayed=relayed)
        request.attempt, request.tokens, request.chars = emitted.attempt, list(emitted.tokens), emitted.chars
        request.usage_sent, request.prompt_tokens = emitted.prompt_tokens is not None, emitted.prompt_tokens
        self._open[tokenize.request] = request
        return self._dispatch(request, now)

    def close(self, request: RequestId, now: float, *, aborted: bool = False) -> list[Effect]:
        """Ends a request that its client no longer wants, or that is `aborted`: then its client is told of the end. An
        unknown request is no error: it may just have ended."""
        current = self._open.pop(request, None)
        if current is None:
            return []
        last = [Delta(request, current.attempt, len(current.tokens), (), "", "abort")] if aborted else []
        return [*self._release(current, now), *current.end(), *last]

    def refuse_unserved(self, model: ModelName, absence: ModelUnavailable, now: float) -> list[Effect]:
        """Ends the requests for `model` that came after nobody could serve them any more. Requests that came before, or
        that an engine has had, go on waiting."""
        unserved = [
            request
            for request in self._open.values()
            if request.tokenize.model == model and not request.accepted and request.opened_at >= absence.since
        ]
        return self._give_up_each(unserved, absence.reason, now)

    def give_up_all(self, why: str, now: float) -> list[Effect]:
        """Ends every open request, wherever it is."""
        return self._give_up_each(list(self._open.values()), why, now)

    def handle(self, message: RequestMessage, now: float) -> list[Effect]:
        """Takes a message of another service. Messages about ended requests and earlier attempts are dropped."""
        match message:
            case Deltas():
                return self._deltas(message, now)
            case RequestPlaced():
                return self._placed(message, now)
            case PromptsHeld():
                return self._held(message, now)
            case RequestQueued():
                return self._queued(message, now)
            case RequestFailed():
                return self._failed(message, now)
            case RequestRejected():
                return self._rejected(message, now)
        assert_never(message)

    def undelivered(self, tokenize: Tokenize, now: float) -> list[Effect]:
        """Pauses a request that could not be dispatched, as there is no tokenizer at the moment."""
        current = self._current(tokenize.request, tokenize.attempt)
        if current is not None and current.cluster is not None:
            return self._take_elsewhere(current, f"cluster {current.cluster} cannot be reached", now)
        if current is not None and current.state == "dispatched":
            current.start_attempt(now)
            current.pause(self._policy, now)
        return []

    def instance_gone(self, last: Lifecycle, reason: str, now: float) -> list[Effect]:
        """An instance stopped or was restarted: the requests that it had are retried. `last`: its last message."""
        if last.service == "scheduler" and reason == "stopped" and not last.load:
            self._suspect(last, now + self._policy.silence_s)  # the last tokens come by a longer way
            return []
        if last.service == "detokenizer":
            self._numbers.forget(DetokenizerId(last.instance))
        affected = [request for request in self._open.values() if request.depends_on(last)]
        return self._retry_all(affected, InstanceGone(last, reason), now)

    def instance_silent(self, last: Lifecycle, reason: str, now: float) -> list[Effect]:
        """An instance sends no lifecycle messages. It may be dead, or short of CPU for a moment: engines are probed.
        Large prompts, which may be what keeps a tokenizer busy, wait until they are overdue."""
        if last.service in ("scheduler", "detokenizer"):
            self._suspect(last, now)
            return []
        spared = last.service == "tokenizer"
        affected = [r for r in self._open.values() if r.depends_on(last) and not (spared and r.is_large)]
        return self._retry_all(affected, InstanceGone(last, reason), now)

    def relay_gone(self, relay: EngineId, now: float) -> list[Effect]:
        """A gateway of another cluster died or cannot be reached: the requests that it had are tried again."""
        self._numbers.forget(DetokenizerId(relay))
        affected = [r for r in self._open.values() if relay in (r.engine, r.detokenizer)]
        reason = f"{relay} is gone, or its link is cut"
        return [effect for r in affected for effect in self._retry(r, reason, now, at_once=True)]

    def move_to_others(self, now: float) -> list[Effect]:
        """This cluster is drained: moves the requests that its engines have, where another has engines for them."""
        clusters = self._clusters
        if clusters is None:
            return []
        here = [r for r in self._open.values() if r.cluster is None and not r.relayed and r.suspect_until is None]
        moved = [r for r in here if r.state in ("queued", "placed") and clusters.can_serve(r.tokenize.model)]
        return [effect for r in moved for effect in self._take_elsewhere(r, "this cluster is drained", now)]

    def state_of(self, request: RequestId) -> ProbeReply:
        """The state of a request that this gateway serves for another cluster, as an engine's probe reply."""
        current = self._open.get(request)
        if current is None:
            return ProbeReply("unknown", 0)
        return ProbeReply("running" if current.state == "placed" else "waiting", len(current.tokens))

    def record_probe_reply(
        self, request: RequestId, attempt: Attempt, reply: ProbeReply | NoAnswer, now: float
    ) -> list[Effect]:
        """Takes what an engine replied to a `ProbeEngine`."""
        current = self._current(request, attempt)
        if current is None or not current.probing:
            return []
        current.probing = False
        if current.last_message_at > current.probed_at:
            current.clear_suspicion()
            return []
        return self._judge(current, reply, now)

    def tick(self, now: float) -> list[Effect]:
        """Checks every deadline; called a few times a second."""
        self._window.look_again()
        return [effect for request in list(self._open.values()) for effect in self._overdue(request, now)]

    # Messages.

    def _deltas(self, message: Deltas, now: float) -> list[Effect]:
        effects: list[Effect] = []
        arrival = self._numbers.record(message.detokenizer, message.epoch, message.number)
        if arrival == "repeated":
            return effects
        if arrival == "gap":  # requests whose next token is not where it should be, or that get none, lost something
            self._probe_soon((r for r in self._open.values() if r.detokenizer == message.detokenizer), now)
        for opened in message.opened:
            effects += self._stream_opened(opened, message.detokenizer, now)
        for scored in message.scored:
            effects += self._scored(scored, now)
        for pooled in message.pooled:
            if (current := self._current(pooled.request, pooled.attempt)) is not None:
                current.last_message_at, current.pooled = now, True
                effects.append(pooled)
        for delta in message.deltas:
            effects += self._delta(delta, message.detokenizer, now)
        return effects

    def _delta(self, delta: Delta, detokenizer: DetokenizerId, now: float) -> list[Effect]:
        current = self._current(delta.request, delta.attempt)
        if current is None:
            return self._abandoned.call_off_again(delta.request, delta.attempt, now)
        if (lost := current.lost_before_output()) is not None:
            return self._retry(current, lost, now, at_once=True)
        if delta.position == len(current.tokens):
            if current.state != "placed":
                current.place(None, detokenizer, now)
            current.record_output(delta.tokens, delta.text, now)
            if delta.finish is None:
                return [delta]
            del self._open[delta.request]
            return [delta, *current.end()]
        if delta.position + len(delta.tokens) > len(current.tokens):
            return self._retry(current, "tokens were lost", now, at_once=True)
        return []

    def _stream_opened(self, opened: StreamOpened, detokenizer: DetokenizerId, now: float) -> list[Effect]:
        current = self._current(opened.request, opened.attempt)
        if current is None:
            return self._abandoned.call_off_again(opened.request, opened.attempt, now, opened.engine)
        if current.state != "placed":
            current.place(opened.engine, detokenizer, now)
        current.last_message_at = now
        current.prompt_tokens = opened.prompt_tokens
        if current.usage_sent:
            return []
        current.usage_sent = True
        return [opened]

    def _scored(self, part: PromptLogprobsDelta, now: float) -> list[Effect]:
        """A part that starts too late is dropped; the first output token will show that something is missing."""
        current = self._current(part.request, part.attempt)
        if current is None:
            return []
        current.last_message_at = now
        end = part.position + len(part.logprobs)
        if not part.position <= current.scored_tokens < end:
            return []
        current.scored_tokens = end
        return [part]

    def _placed(self, placed: RequestPlaced, now: float) -> list[Effect]:
        current = self._current(placed.request, placed.attempt)
        if current is None:
            return [
                CancelAttempt(
                    placed.engine, cancel_of(placed.request, placed.attempt, placed.handed_by, placed.detokenizer)
                )
            ]
        passes = max(placed.passes, int(placed.handed_by is not None))
        if passes < current.passes:
            return []  # the message of a later hand-over arrived first
        current.handed_by, current.passes = placed.handed_by, passes
        if current.state == "placed":  # it was handed over, or its first tokens arrived before this message
            current.engine = placed.engine
        else:
            current.place(placed.engine, placed.detokenizer, now)
        return []

    def _held(self, held: PromptsHeld, now: float) -> list[Effect]:
        for request, attempt in held.requests:
            current = self._current(request, attempt)
            if current is not None and current.state == "dispatched":
                current.tokenizer, current.last_message_at = held.tokenizer, now
        return []

    def _queued(self, queued: RequestQueued, now: float) -> list[Effect]:
        current = self._current(queued.request, queued.attempt)
        if current is None:  # the withdrawal was lost, and it would wait on for its turn
            return [Withdraw(queued.request, queued.attempt)]
        if current.state == "dispatched":
            current.apply("queue")
            current.last_message_at = now
        return []

    def _rejected(self, rejected: RequestRejected, now: float) -> list[Effect]:
        """A rejection for what the request is ends it. One for lack of capacity ends it only in its first attempt: what
        was accepted once waits. A grammar that has cost a process is the exception: its next try is the last."""
        current = self._current(rejected.request, rejected.attempt)
        if current is None:
            return []
        waits = current.attempt - current.detours > 1 and not current.grammar_deaths
        if rejected.kind in ("overloaded", "unavailable") and self._may_leave(current):
            return self._take_elsewhere(current, rejected.message, now)
        if rejected.kind in ("overloaded", "unavailable") and waits:
            return self._retry(current, rejected.message, now, at_once=False, blame=False)
        return self._end(current, rejected)

    # Retries and ends.

    def _retry(
        self, current: OpenRequest, reason: str, now: float, *, at_once: bool, blame: bool = True
    ) -> list[Effect]:
        """Gives the attempt up and starts the next, or ends the request after too many.

        The first placed attempt that fails is retried at once, further ones in a row after ever longer pauses, so that
        an outage has time to pass. `blame`: whether the failure counts against the request and its engine.
        """
        effects = self._release(current, now)
        if blame and current.state == "placed":
            if current.count_failure(self._policy):
                return effects + self._give_up(current, f"{reason}; {current.failed} attempts failed")
            at_once = current.fruitless <= 1
        current.start_attempt(now)
        effects.append(AttemptRetry(current.request, current.attempt, reason, len(current.tokens)))
        if at_once:
            return [*effects, *self._dispatch(current, now)]
        current.pause(self._policy, now)
        return effects

    def _release(self, current: OpenRequest, now: float) -> list[Effect]:
        """Frees what the present attempt may hold at other services."""
        match current.state:
            case "dispatched" if current.cluster is not None:  # its gateway there is not known before it answers
                self._abandoned.add(current.request, None, now)
                return []
            case "placed" if current.engine is not None:
                self._abandoned.add(current.request, current.engine, now)
                cancel = cancel_of(current.request, current.attempt, current.handed_by, current.detokenizer)
                return [CancelAttempt(current.engine, cancel)]
            case "paused":
                return []
            case _:
                self._abandoned.add(current.request, None, now)
                return [Withdraw(current.request, current.attempt)]

    def _dispatch(self, current: OpenRequest, now: float) -> list[Effect]:
        """Sends the attempt off; a large one may have to wait for a later `tick`."""
        if self._window.refuses(current):
            if current.state != "paused":
                current.apply("pause")
            current.resume_at = now
            return []
        current.apply("dispatch")
        current.last_message_at = now
        return [self._send_off(current)]

    def _send_off(self, current: OpenRequest) -> DispatchAttempt:
        """Sends the attempt off. A suspect stays: it has cost this cluster a process, and must not cost others one."""
        current.cluster = None
        if self._clusters is not None and not current.relayed and current.suspect_until is None:
            current.cluster = self._clusters.destination(current.tokenize, current.avoid)
        return DispatchAttempt(current.message(), current.cluster)

    def _may_leave(self, current: OpenRequest) -> bool:
        """Whether the request may be served elsewhere: another cluster has it already, or has room."""
        if self._clusters is None or current.relayed or current.suspect_until is not None:
            return False
        return current.cluster is not None or self._clusters.has_room(current.tokenize.model, current.tokenize.lora)

    def _take_elsewhere(self, current: OpenRequest, reason: str, now: float) -> list[Effect]:
        """Starts the next attempt where it is better served. It counts as nobody's failure."""
        if current.cluster is not None and self._clusters is not None:
            self._clusters.mark_full(current.cluster)
        current.detours += 1
        return self._retry(current, reason, now, at_once=True, blame=False)

    def _give_up_each(self, requests: Iterable[OpenRequest], why: str, now: float) -> list[Effect]:
        """Ends requests wherever they are."""
        return [
            effect for request in requests for effect in (*self._release(request, now), *self._give_up(request, why))
        ]

    def _give_up(self, current: OpenRequest, why: str) -> list[Effect]:
        rejected = RequestRejected(
            request=current.request,
            attempt=current.attempt,
            kind="unavailable",
            message=f"the request could not be served: {why}",
            retry_after=1.0,
        )
        return self._end(current, rejected)

    def _end(self, current: OpenRequest, rejected: RequestRejected) -> list[Effect]:
        del self._open[current.request]
        return [rejected, *current.end()]

    def _retry_all(self, affected: list[OpenRequest], gone: InstanceGone, now: float) -> list[Effect]:
        """Retries the requests of an instance that is gone; one that has cost too many processes ends instead."""
        reason = f"{gone.last.service} {gone.last.instance} {gone.reason}"
        effects: list[Effect] = []
        for request in affected:
            effects += self._count_death(request, gone.death_of(request.request), 0, now)
            if request.state != "ended":
                effects += self._retry(request, reason, now, at_once=True)
        return effects

    # Deaths.

    def _failed(self, failed: RequestFailed, now: float) -> list[Effect]:
        current = self._current(failed.request, failed.attempt)
        if current is None:
            return []
        current.uncached = current.uncached or failed.caches_doubtful
        ended = self._count_death(current, failed.death, failed.reached, now)
        if failed.grammar_died:
            ended = ended or self._count_grammar_death(current, now)
        return ended or self._retry(current, failed.reason, now, at_once=False)

    def _count_death(self, current: OpenRequest, death: Death | None, reached: int, now: float) -> list[Effect]:
        """Makes the request a suspect after a process died with it. If it was alone there, and has caused as many
        deaths as it may, it ends, and all other suspects that are equal to it end, too."""
        if death is None or current.state == "ended":
            return []
        current.record_death(reached, self._policy)
        if death != "alone" or current.deaths < self._policy.deaths:
            return []
        self._poisoned.add(current.tokenize, now)
        equal = [r for r in self._open.values() if r.deaths and self._poisoned.refuses(r.tokenize, now)]
        return [effect for r in equal for effect in (*self._release(r, now), *self._end(r, rejection(r.message())))]

    def _count_grammar_death(self, current: OpenRequest, now: float) -> list[Effect]:
        """Counts a process that the grammar has cost. After the last one, ends the request and refuses its grammar a
        while."""
        grammar = current.tokenize.grammar
        current.grammar_deaths += 1
        if grammar is None or current.grammar_deaths < self._policy.deaths:
            return []
        self._poisoned.add_grammar(grammar, now)
        rejected = self._poisoned.grammar_rejection(current.message())
        return [*self._release(current, now), *self._end(current, rejected)]

    # Silence and probes.

    def _suspect(self, last: Lifecycle, now: float) -> None:
        self._probe_soon((request for request in self._open.values() if request.depends_on(last)), now)

    def _probe_soon(self, requests: Iterable[OpenRequest], now: float) -> None:
        """Has requests probed, unless their next tokens arrive before."""
        for request in requests:
            request.probe_at = now + self._policy.confirm_s

    def _overdue(self, r: OpenRequest, now: float) -> Iterator[Effect]:
        policy = self._policy
        if now - r.opened_at > policy.request_s:
            yield from self._release(r, now)
            yield from self._give_up(r, f"it took more than {policy.request_s:g} s")
        elif r.state == "placed":
            due = r.last_message_at + policy.silence_s if r.probe_at is None else r.probe_at
            if now > due and not r.probing:
                yield from self._probe(r, now)
        elif r.relayed and not r.is_held and now - r.unplaced_since > policy.relayed_s:
            yield from self._release(r, now)
            yield from self._give_up(r, f"no engine was free here for {policy.relayed_s:g} s")
        elif now - r.unplaced_since > policy.queue_s:
            yield from self._release(r, now)
            yield from self._give_up(r, f"no engine was free for {policy.queue_s:g} s")
        elif r.state == "paused" and now >= r.resume_at:
            yield from self._dispatch(r, now)
        elif r.state == "queued" and now - r.last_message_at > policy.elsewhere_s and self._may_leave(r):
            yield from self._take_elsewhere(r, f"queued for {policy.elsewhere_s:g} s", now)
        elif r.state == "dispatched" and r.is_overdue(policy, now):
            r.silent_tries += 1
            yield from self._retry(r, "not placed in time", now, at_once=True)

    def _probe(self, r: OpenRequest, now: float) -> list[Effect]:
        if r.engine is None:
            return self._retry(r, "silent, and its engine is unknown", now, at_once=True)
        r.probing, r.probed_at, r.probe_at = True, now, None
        return [ProbeEngine(r.engine, Probe(r.request, r.attempt))]

    def _judge(self, r: OpenRequest, reply: ProbeReply | NoAnswer, now: float) -> list[Effect]:
        finding, certain = r.judge_probe_reply(reply, self._policy.unanswered_probes)
        if finding is None:
            r.clear_suspicion()
            r.last_message_at = now
            return []
        if certain:
            return self._retry(r, finding, now, at_once=True)
        r.probe_at = now + self._policy.confirm_s * 2 ** min(r.fruitless, 5)
        return []

    def _current(self, request: RequestId, attempt: Attempt) -> OpenRequest | None:
        """The open request, where `attempt` is its newest one and not paused."""
        current = self._open.get(request)
        if current is None or current.attempt != attempt or current.state == "paused":
            return None
        return current
