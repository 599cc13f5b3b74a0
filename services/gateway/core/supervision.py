"""Sees every open request to its one end, whatever dies or gets lost on the way. Pure: time is an argument.

ADR 1 says why an engine is asked before a silent request is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, assert_never

from services.gateway.core.departed import Departed
from services.gateway.core.effects import Ask, Dispatch, Effect, Retried, Stop
from services.gateway.core.numbering import Numbering
from services.gateway.core.policy import Policy
from services.gateway.core.request import OpenRequest
from shared.ids import Attempt, DetokenizerId, EngineId, RequestId
from shared.messages.coordinator import Withdraw
from shared.messages.gateway import (
    Delta,
    Deltas,
    Failed,
    GatewayMessage,
    Placed,
    PromptPart,
    Queued,
    Rejected,
    StreamOpened,
)
from shared.messages.lifecycle import Lifecycle
from shared.messages.scheduler import Cancel, Probe, ProbeReply
from shared.messages.tokenizer import Tokenize

NoAnswer = Literal["nobody there", "no answer in time"]


class Supervision:
    """Owns the open requests. Each ends exactly once: by a `Delta` with `finish`, a `Rejected`, or `close`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._open: dict[RequestId, OpenRequest] = {}
        self._numbers = Numbering()
        self._departed = Departed(policy.departed_limit, policy.recancel_s)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request: object) -> bool:
        return request in self._open

    def queued(self) -> int:
        """Open requests that no engine has yet."""
        return sum(r.stage != "placed" for r in self._open.values())

    def open(self, tokenize: Tokenize, now: float) -> list[Effect]:
        """Takes a new request (attempt 1) and sends it on its way."""
        request = OpenRequest(tokenize, now, now, now)
        self._open[tokenize.request] = request
        return [Dispatch(request.message())]

    def close(self, request: RequestId, now: float) -> list[Effect]:
        """The client wants no more of it. Unknown requests are no error: it may just have ended."""
        opened = self._open.pop(request, None)
        return self._leave(opened, now) if opened is not None else []

    def handle(self, message: GatewayMessage, now: float) -> list[Effect]:
        match message:
            case Deltas():
                return self._deltas(message, now)
            case Placed():
                return self._placed(message, now)
            case Queued():
                return self._queued(message, now)
            case Failed():
                current = self._current(message.request, message.attempt)
                return [] if current is None else self._retry(current, message.reason, now, at_once=False)
            case Rejected():
                return self._rejected(message, now)
        assert_never(message)

    def undelivered(self, tokenize: Tokenize, now: float) -> list[Effect]:
        """No tokenizer is there at the moment: the request waits for one."""
        current = self._current(tokenize.request, tokenize.attempt)
        if current is not None and current.stage == "dispatched":
            current.begin_attempt(now)
            self._pause(current, now)
        return []

    def gone(self, last: Lifecycle, reason: str, now: float) -> list[Effect]:
        """An instance stopped or was started anew: whatever it had is tried again."""
        why = f"{last.service} {last.instance} {reason}"
        match last.service:
            case "scheduler":
                return self._retry_all(lambda r: r.engine == EngineId(last.instance), why, now)
            case "detokenizer":
                self._numbers.forget(DetokenizerId(last.instance))
                return self._retry_all(lambda r: r.detokenizer == DetokenizerId(last.instance), why, now)
            case "tokenizer":
                return self._retry_all(lambda r: r.stage == "dispatched", why, now)
            case "coordinator":
                return self._retry_all(lambda r: r.stage in ("dispatched", "queued"), why, now)
            case _:
                return []

    def unheard(self, last: Lifecycle, reason: str, now: float) -> list[Effect]:
        """An instance says nothing of itself. It may be dead, or starved of CPU for a moment: engines can be asked."""
        match last.service:
            case "scheduler":
                self._suspect(lambda r: r.engine == EngineId(last.instance), now)
                return []
            case "detokenizer":
                self._suspect(lambda r: r.detokenizer == DetokenizerId(last.instance), now)
                return []
            case _:
                return self.gone(last, reason, now)

    def probed(self, request: RequestId, attempt: Attempt, answer: ProbeReply | NoAnswer, now: float) -> list[Effect]:
        """What an engine answered to `Ask`."""
        current = self._current(request, attempt)
        if current is None or not current.asking:
            return []
        current.asking = False
        if current.quiet_since > current.asked_at:
            current.calm()
            return []
        return self._judge(current, answer, now)

    def tick(self, now: float) -> list[Effect]:
        """Looks at every deadline; called some times a second."""
        return [effect for request in list(self._open.values()) for effect in self._overdue(request, now)]

    # What comes in.

    def _deltas(self, message: Deltas, now: float) -> list[Effect]:
        effects: list[Effect] = []
        order = self._numbers.take(message.detokenizer, message.epoch, message.number)
        if order == "stale":
            return effects
        if order == "gap":  # whose next token is not where it should be, or who gets none, has lost something
            self._suspect(lambda r: r.detokenizer == message.detokenizer, now)
        for opened in message.opened:
            effects += self._stream_opened(opened, message.detokenizer, now)
        for part in message.scored:
            effects += self._scored(part, now)
        for delta in message.deltas:
            current = self._current(delta.request, delta.attempt)
            if current is None:
                effects += self._departed.heard_of(delta.request, delta.attempt, now)
            elif current.misses_scores:
                effects += self._retry(current, "log-probabilities of the prompt were lost", now, at_once=True)
            elif delta.position == len(current.tokens):
                self._accept(current, delta, message.detokenizer, now)
                effects.append(delta)
            elif delta.position + len(delta.tokens) > len(current.tokens):
                effects += self._retry(current, "tokens were lost", now, at_once=True)
        return effects

    def _accept(self, request: OpenRequest, delta: Delta, detokenizer: DetokenizerId, now: float) -> None:
        if request.stage != "placed":
            request.place(None, detokenizer, now)
        request.take(delta.tokens, delta.text, now)
        if delta.finish is not None:
            del self._open[request.request]

    def _stream_opened(self, opened: StreamOpened, detokenizer: DetokenizerId, now: float) -> list[Effect]:
        current = self._current(opened.request, opened.attempt)
        if current is None:
            return []
        if current.stage != "placed":
            current.place(None, detokenizer, now)
        current.quiet_since = now
        current.prompt_tokens = opened.prompt_tokens
        if current.usage_told:
            return []
        current.usage_told = True
        return [opened]

    def _scored(self, part: PromptPart, now: float) -> list[Effect]:
        """A part that begins too late is dropped here; the first output token will show that something is missing."""
        current = self._current(part.request, part.attempt)
        if current is None:
            return []
        current.quiet_since = now
        end = part.position + len(part.logprobs)
        if not part.position <= current.scored < end:
            return []
        current.scored = end
        return [part]

    def _placed(self, placed: Placed, now: float) -> list[Effect]:
        current = self._current(placed.request, placed.attempt)
        if current is None:
            return [Stop(placed.engine, _cancel(placed.request, placed.attempt, placed.handed_by, placed.detokenizer))]
        if current.handed_by is not None and current.handed_by == placed.engine:
            return []  # the hand-over overtook this word
        current.handed_by = placed.handed_by
        if current.stage == "placed":  # it was handed over, or the first tokens overtook this word
            current.engine = placed.engine
        else:
            current.place(placed.engine, placed.detokenizer, now)
        return []

    def _queued(self, queued: Queued, now: float) -> list[Effect]:
        current = self._current(queued.request, queued.attempt)
        if current is not None and current.stage == "dispatched":
            current.move("queued")
            current.quiet_since = now
        return []

    def _rejected(self, rejected: Rejected, now: float) -> list[Effect]:
        """A verdict on the request is final. One on the moment is so only while the client has been promised
        nothing: what was once accepted waits."""
        current = self._current(rejected.request, rejected.attempt)
        if current is None:
            return []
        if rejected.kind in ("overloaded", "unavailable") and current.attempt > 1:
            return self._retry(current, rejected.message, now, at_once=False, blame=False)
        return self._end(current, rejected)

    # What is decided.

    def _retry(
        self, current: OpenRequest, reason: str, now: float, *, at_once: bool, blame: bool = True
    ) -> list[Effect]:
        """Gives the attempt up and begins the next, or ends the request where that has no promise.

        A placed attempt that failed is tried again at once, further ones in a row after ever longer pauses: what ails
        the ring, a bus that was away, has time to pass.
        """
        effects = self._leave(current, now)
        if blame and current.stage == "placed":
            if self._count_failure(current):
                return effects + self._give_up(current, f"{reason}; {current.failed} attempts failed")
            at_once = current.fruitless <= 1
        current.begin_attempt(now)
        effects.append(Retried(current.request, current.attempt, reason, len(current.tokens)))
        if at_once:
            return [*effects, *self._dispatch(current, now)]
        self._pause(current, now)
        return effects

    def _count_failure(self, current: OpenRequest) -> bool:
        """Counts a placed attempt's failure; whether it was one too many."""
        current.failed += 1
        current.fruitless += 1
        if current.engine is not None:
            others = tuple(engine for engine in current.avoid if engine != current.engine)
            current.avoid = (*others, current.engine)[-self._policy.avoid_limit :]
        return current.fruitless >= self._policy.attempts or current.failed >= self._policy.attempts_in_all

    def _leave(self, current: OpenRequest, now: float) -> list[Effect]:
        """Frees what the present attempt may hold anywhere."""
        match current.stage:
            case "placed" if current.engine is not None:
                self._departed.add(current.request, current.engine, now)
                cancel = _cancel(current.request, current.attempt, current.handed_by, current.detokenizer)
                return [Stop(current.engine, cancel)]
            case "paused":
                return []
            case _:
                return [Withdraw(current.request, current.attempt)]

    def _dispatch(self, current: OpenRequest, now: float) -> list[Effect]:
        current.move("dispatched")
        current.quiet_since = now
        return [Dispatch(current.message())]

    def _pause(self, current: OpenRequest, now: float) -> None:
        current.move("paused")
        current.resume_at = now + min(self._policy.pause_s * 2 ** min(current.pauses, 8), self._policy.pause_limit_s)
        current.pauses += 1

    def _give_up(self, current: OpenRequest, why: str) -> list[Effect]:
        rejected = Rejected(
            request=current.request,
            attempt=current.attempt,
            kind="unavailable",
            message=f"the request could not be served: {why}",
            retry_after=1.0,
        )
        return self._end(current, rejected)

    def _end(self, current: OpenRequest, rejected: Rejected) -> list[Effect]:
        del self._open[current.request]
        return [rejected]

    def _retry_all(self, which: Callable[[OpenRequest], bool], reason: str, now: float) -> list[Effect]:
        affected = [request for request in self._open.values() if which(request)]
        return [effect for request in affected for effect in self._retry(request, reason, now, at_once=True)]

    # Silence and suspicion.

    def _suspect(self, which: Callable[[OpenRequest], bool], now: float) -> None:
        """Has requests asked after soon, unless their next tokens show before that all is well with them."""
        for request in self._open.values():
            if which(request):
                request.ask_at = now + self._policy.confirm_s

    def _overdue(self, r: OpenRequest, now: float) -> Iterator[Effect]:
        policy = self._policy
        if now - r.opened_at > policy.request_s:
            yield from self._leave(r, now)
            yield from self._give_up(r, f"it took more than {policy.request_s:g} s")
        elif r.stage == "placed":
            yield from self._look_after(r, now)
        elif now - r.unplaced_since > policy.queue_s:
            yield from self._leave(r, now)
            yield from self._give_up(r, f"no engine was free for {policy.queue_s:g} s")
        elif r.stage == "paused" and now >= r.resume_at:
            yield from self._dispatch(r, now)
        elif r.stage == "dispatched" and now - r.quiet_since > policy.placement_s * 2**r.silent_tries:
            r.silent_tries += 1
            yield from self._retry(r, "not placed in time", now, at_once=True)

    def _look_after(self, r: OpenRequest, now: float) -> list[Effect]:
        due = r.quiet_since + self._policy.silence_s if r.ask_at is None else r.ask_at
        if r.asking or now <= due:
            return []
        if r.engine is None:
            return self._retry(r, "silent, and its engine is unknown", now, at_once=True)
        r.asking, r.asked_at, r.ask_at = True, now, None
        return [Ask(r.engine, Probe(r.request, r.attempt))]

    def _judge(self, r: OpenRequest, answer: ProbeReply | NoAnswer, now: float) -> list[Effect]:
        finding: str
        match answer:
            case ProbeReply(state="waiting" | "running", produced=produced) if produced <= len(r.tokens):
                r.calm()
                r.quiet_since = now
                return []
            case "no answer in time":
                r.unanswered += 1
                finding, certain = answer, r.unanswered >= self._policy.unanswered_probes
            case ProbeReply(state="unknown"):
                r.doubts += 1
                finding, certain = "unknown to its engine", r.doubts > 1
            case ProbeReply():
                r.doubts += 1
                finding, certain = f"{answer.produced} tokens were produced, {len(r.tokens)} came", r.doubts > 1
            case "nobody there":
                r.doubts += 1
                finding, certain = answer, r.doubts > 1
        if certain:
            return self._retry(r, finding, now, at_once=True)
        r.ask_at = now + self._policy.confirm_s * 2 ** min(r.fruitless, 5)
        return []

    def _current(self, request: RequestId, attempt: Attempt) -> OpenRequest | None:
        """The open request, where `attempt` is its newest and under way."""
        current = self._open.get(request)
        if current is None or current.attempt != attempt or current.stage == "paused":
            return None
        return current


def _cancel(
    request: RequestId, attempt: Attempt, handed_by: EngineId | None, detokenizer: DetokenizerId | None
) -> Cancel:
    """The engine that takes a request over may have died, or never got it, when its stream moved there."""
    return Cancel(request, attempt, None if handed_by is None else detokenizer)
