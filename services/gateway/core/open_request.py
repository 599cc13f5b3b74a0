"""One open request: its state machine, the timeouts and retries that apply to it, and what is remembered of those given
up."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from services.gateway.core.effects import CancelAttempt, Effect
from shared.ids import FIRST_ATTEMPT, Attempt, ClusterName, DetokenizerId, EngineId, InstanceId, RequestId
from shared.messages.coordinator import RequestEnded, Withdraw
from shared.messages.lifecycle import Lifecycle
from shared.messages.scheduler import Cancel, ProbeReply
from shared.messages.tokenizer import Tokenize, prompt_bytes
from shared.packing import pack
from shared.reliability.recent import RecentEntries
from shared.reliability.transitions import IllegalTransition

RequestState = Literal["dispatched", "queued", "placed", "paused", "ended"]
"""dispatched: with a tokenizer or a coordinator. queued: with a coordinator, as every engine is full. placed: with an
engine. paused: between two attempts. ended: the client has the final answer, or has left."""

RequestEvent = Literal["queue", "place", "pause", "dispatch", "end"]
"""queue: a coordinator found every engine full. place: an engine has the request. pause: the attempt is given up, the
next one waits. dispatch: the attempt is sent to a tokenizer. end: nothing follows."""

TRANSITIONS: dict[RequestState, dict[RequestEvent, RequestState]] = {
    "dispatched": {
        "queue": "queued",
        "place": "placed",
        "pause": "paused",
        "dispatch": "dispatched",
        "end": "ended",
    },
    "queued": {"place": "placed", "pause": "paused", "dispatch": "dispatched", "end": "ended"},
    "placed": {"pause": "paused", "dispatch": "dispatched", "end": "ended"},
    "paused": {"dispatch": "dispatched", "end": "ended"},
    "ended": {},
}

NoAnswer = Literal["nobody there", "no answer in time"]
"""How a probe can go unanswered."""


def choice_requests(response: str, choices: int) -> list[RequestId]:
    """Returns the ids of the requests that a response's choices are."""
    return [RequestId(response if choices == 1 else f"{response}-{position}") for position in range(choices)]


class EmittedOutput(NamedTuple):
    """The output of a request that another gateway supervised before."""

    attempt: Attempt
    """Higher than any that the other gateway can have made, so that its messages are stale."""
    tokens: Sequence[int]
    chars: int
    prompt_tokens: int | None
    """None where its stream was not opened."""
    age: float
    """Seconds since the client sent it."""


LARGE_BYTES = 256 * 2**10
"""Bytes of a large prompt: it takes tokenizers and the bus a noticeable time."""
MAX_HISTORY = 32
"""Transitions of a request that are kept for the text of an `IllegalTransition`."""


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """The gateway's timeouts and retries. Seconds are counted on the bus's liveness clock, which is paused while the
    bus is unreachable, so that an outage uses up no deadline."""

    silence_s: float = 2.0
    """A placed request that nothing arrives for is probed after this."""
    confirm_s: float = 0.3
    """A suspicious reply is checked again after this, as the last tokens may still be on their way. Doubled with each
    attempt in a row that brought no token, so that retries do not overload services that are only slow."""
    unanswered_probes: int = 3
    """Probes in a row that an engine may leave unanswered."""
    placement_s: float = 5.0
    """How long tokenizer and coordinator may take to place a request; doubled with each try. It begins anew whenever a
    tokenizer says that it has the request."""
    tokenized_per_s: int = 2**20
    """Bytes of its prompt that a busy tokenizer takes in a second: a large one has so much longer."""
    queue_s: float = 120.0
    """How long a request may be without an engine, in one stretch."""
    wait_for_engines_s: float = 2.0
    """How long a new request waits while no engine of its model, or nothing else that it needs, is ready."""
    request_s: float = 3600.0
    """How long a request may take in all."""
    bus_outage_s: float = 60.0
    """How long open requests wait for an unreachable bus; the only wait here that is measured on the wall clock."""
    attempts: int = 6
    """Placed attempts in a row that may end without a new token. An outage of the bus can cost one request three: its
    detokenizer comes back after its engine, then a step turns out to be lost, then a placement."""
    attempts_in_all: int = 10
    """Placed attempts: bounds a request that kills every engine that computes it."""
    pause_s: float = 0.25
    """Seconds before the next attempt, if an immediate one has just failed; doubled for each further one."""
    pause_limit_s: float = 1.0
    """Of a large prompt, which each attempt sends again, as often as it has LARGE_BYTES."""
    departed_limit: int = 4096
    """Requests given up, remembered so that what still comes of them is answered by calling them off again."""
    recancel_s: float = 1.0
    """How long after calling it off it is called off again, while its tokens keep coming."""
    elsewhere_s: float = 1.0
    """How long a request may queue here while another cluster has room."""
    relayed_s: float = 5.0
    """How long a request of another cluster may be without an engine, before that cluster gets it back."""
    deaths: int = 2
    """Processes that may die of a request. One that was alone there at the last of so many deaths is given up, as is
    one whose grammar's process died so many times."""
    suspect_tokens: int = 6
    """How far beyond the client's tokens a suspect is computed alone: as many as may have been on their way to it when
    the process died. Four times as many after each further death that it shared with others."""
    refuse_s: float = 600.0
    """How long a request is refused at once, after an equal one was given up for its deaths."""
    refuse_grammar_s: float = 60.0
    """How long a grammar is refused at once, after a request was given up as its processes died. Shorter, as that may
    be the machine's doing."""
    refused_limit: int = 1024
    """Requests, and grammars, given up for their deaths that are remembered."""
    avoid_limit: int = 4
    """Most failed engines that a request avoids."""


@dataclass(slots=True)
class OpenRequest:
    """Owns the state of a request and of its newest attempt. `TRANSITIONS` lists the allowed changes."""

    tokenize: Tokenize
    """The message of the first dispatch; later attempts are derived from it."""
    opened_at: float
    unplaced_since: float
    last_message_at: float
    """When a message of this attempt was last received, in seconds."""
    state: RequestState = "dispatched"
    attempt: Attempt = FIRST_ATTEMPT
    engine: EngineId | None = None
    """The engine of this attempt; None while unplaced, or if tokens arrived before the placement's message."""
    detokenizer: DetokenizerId | None = None
    tokenizer: InstanceId | None = None
    """The one that says that it has this attempt; None where none has said so yet."""
    cluster: ClusterName | None = None
    """The other cluster that this attempt was sent to; there `engine` and `detokenizer` stand for a gateway. None: it
    is served here."""
    relayed: bool = False
    """Whether it is another cluster's, and so must not be sent on."""
    detours: int = 0
    """Attempts that ended since another place was better or had no room: no engine has failed in them."""
    handed_by: EngineId | None = None
    """The engine that handed this attempt over to `engine`; None without a hand-over."""
    passes: int = 0
    """How often engines have passed this attempt on."""
    tokens: list[int] = field(default_factory=list)
    """Output tokens that the client has."""
    chars: int = 0
    avoid: tuple[EngineId, ...] = ()
    accepted: bool = False
    """Whether an engine has had it, or it continues what one has had: then it waits for the next engine."""
    usage_sent: bool = False
    prompt_tokens: int | None = None
    """Number of prompt tokens; None until the stream is opened."""
    scored_tokens: int = 1
    """Leading tokens of the prompt whose log-probabilities have arrived; the first one has none."""
    pooled: bool = False
    """Whether the vector of its prompt has arrived."""
    silent_tries: int = 0
    """Consecutive dispatches that neither a tokenizer nor a coordinator answered."""
    pauses: int = 0
    """Pauses since its last new token."""
    fruitless: int = 0
    """Consecutive placed attempts that brought no token."""
    failed: int = 0
    """Placed attempts that failed."""
    deaths: int = 0
    """Processes that died while they had the request."""
    suspect_until: int | None = None
    """Output tokens that it is to have before it is computed beside others; None as long as no process died with it."""
    grammar_deaths: int = 0
    """Processes of its grammar that died."""
    uncached: bool = False
    """Whether its next attempts use no cached blocks, since some may have made one fail."""
    resume_at: float = 0.0
    probing: bool = False
    probed_at: float = 0.0
    doubts: int = 0
    """Consecutive suspicious replies to probes."""
    unanswered: int = 0
    """Consecutive probes without a reply."""
    probe_at: float | None = None
    """When to probe although the silence is still short; None: only after `silence_s`."""
    history: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY))
    """The newest transitions, oldest first."""

    @property
    def request(self) -> RequestId:
        """The request's id, which all attempts share."""
        return self.tokenize.request

    @property
    def prompt_bytes(self) -> int:
        """About how many bytes each attempt sends."""
        return prompt_bytes(self.tokenize.prompt)

    @property
    def is_large(self) -> bool:
        """Whether its prompt has more than LARGE_BYTES."""
        return self.prompt_bytes > LARGE_BYTES

    @property
    def is_held(self) -> bool:
        """Whether a tokenizer says that it has its prompt."""
        return self.state == "dispatched" and self.tokenizer is not None

    def depends_on(self, last: Lifecycle) -> bool:
        """Whether its present attempt is lost, or may be, with the instance that has said this."""
        match last.service:
            case "scheduler":
                return self.engine == EngineId(last.instance)
            case "detokenizer":
                return self.detokenizer == DetokenizerId(last.instance)
            case "tokenizer":
                return self.state == "dispatched" and self.cluster is None and self.tokenizer in (None, last.instance)
            case "coordinator" if self.tokenizer is None or self.state == "queued":
                return self.state in ("dispatched", "queued") and self.cluster is None
            case _:  # a tokenizer that has the prompt finds another coordinator
                return False

    def is_overdue(self, policy: RetryPolicy, now: float) -> bool:
        """Whether a dispatched attempt should have been placed or queued by now."""
        patience: float = policy.placement_s * 2**self.silent_tries + self.prompt_bytes / policy.tokenized_per_s
        return now - self.last_message_at > patience

    def pause(self, policy: RetryPolicy, now: float) -> None:
        """Delays the next attempt, longer each time."""
        self.apply("pause")
        limit = policy.pause_limit_s * max(1.0, self.prompt_bytes / LARGE_BYTES)
        self.resume_at = now + min(policy.pause_s * 2 ** min(self.pauses, 8), limit)
        self.pauses += 1

    def count_failure(self, policy: RetryPolicy) -> bool:
        """Counts the failure of a placed attempt. Returns whether it was one too many."""
        self.failed += 1
        self.fruitless += 1
        if self.engine is not None:
            others = tuple(engine for engine in self.avoid if engine != self.engine)
            self.avoid = (*others, self.engine)[-policy.avoid_limit :]
        return self.fruitless >= policy.attempts or self.failed >= policy.attempts_in_all

    def apply(self, event: RequestEvent) -> None:
        """Moves to the next state. Raises IllegalTransition if the table does not allow the event."""
        target = TRANSITIONS[self.state].get(event)
        if target is None:
            steps = "; ".join(self.history) or "none yet"
            raise IllegalTransition(
                f"{self.request} attempt {self.attempt}: {event} is not allowed while {self.state}; history: {steps}"
            )
        self.history.append(f"{self.state} --{event}--> {target} (attempt {self.attempt})")
        self.state = target

    def end(self) -> list[Effect]:
        """Ends the request. Where it counts for an API key, the coordinator that placed it hears how many tokens it
        generated."""
        self.apply("end")
        counted = self.tokenize.key and self.accepted
        return [RequestEnded(self.request, len(self.tokens))] if counted else []

    def place(self, engine: EngineId | None, detokenizer: DetokenizerId, now: float) -> None:
        """Records where the attempt is computed; `engine` is None where that is not known yet."""
        self.apply("place")
        self.accepted = True
        self.engine, self.detokenizer, self.last_message_at = engine, detokenizer, now
        self.silent_tries = 0

    def record_output(self, tokens: tuple[int, ...], text: str, now: float) -> None:
        """Appends new output that continues what the client has."""
        self.last_message_at = now
        if tokens:
            self.tokens.extend(tokens)
            self.fruitless = self.pauses = 0
        self.chars += len(text)
        if self.doubts or self.unanswered or self.probe_at is not None:
            self.clear_suspicion()

    def lost_before_output(self) -> str | None:
        """The message that should have come before the first output and did not; None if nothing is missing."""
        if not self.usage_sent:  # what `usage` reports
            return "the opening of the stream was lost"
        if self.tokens:
            return None
        scores = self.tokenize.sampling.prompt_logprobs is not None
        if scores and self.scored_tokens != self.prompt_tokens:
            return "log-probabilities of the prompt were lost"
        if self.tokenize.pooling is not None and not self.pooled:  # an engine of an older release makes none
            return "the vector of the prompt is missing"
        return None

    def clear_suspicion(self) -> None:
        """Forgets suspicious and missing probe replies."""
        self.doubts = self.unanswered = 0
        self.probe_at = None

    def judge_probe_reply(self, reply: ProbeReply | NoAnswer, unanswered_probes: int) -> tuple[str | None, bool]:
        """What a reply says against the attempt, None where nothing, and whether that is certain: one doubt may be of
        tokens that are on their way. `unanswered_probes`: see `RetryPolicy`."""
        match reply:
            case ProbeReply(state="waiting" | "running", produced=produced) if produced <= len(self.tokens):
                return None, False
            case "no answer in time":
                self.unanswered += 1
                return reply, self.unanswered >= unanswered_probes
            case ProbeReply(state="unknown"):
                finding = "unknown to its engine"
            case ProbeReply():
                finding = f"{reply.produced} tokens were produced, {len(self.tokens)} came"
            case "nobody there":
                finding = reply
        self.doubts += 1
        return finding, self.doubts > 1

    def start_attempt(self, now: float) -> None:
        """Starts the next attempt, which has to be paused or dispatched then. Messages of earlier ones are stale."""
        if self.state == "placed":
            self.unplaced_since = now
        self.attempt = Attempt(self.attempt + 1)
        self.engine = self.detokenizer = self.handed_by = self.tokenizer = None
        self.passes = 0
        self.probing = False
        self.clear_suspicion()

    def record_death(self, reached: int, policy: RetryPolicy) -> None:
        """Counts a process that died with it, when it had `reached` output tokens as far as is known (else 0). It is a
        suspect from now on."""
        margin = policy.suspect_tokens * 4**self.deaths + self.tokenize.stream_interval - 1
        self.deaths += 1
        self.suspect_until = max(len(self.tokens) + margin, reached + 1)

    def message(self) -> Tokenize:
        """Returns what to dispatch for the present attempt: it resumes behind the tokens that the client has."""
        sampling = self.tokenize.sampling
        if self.tokens and sampling.prompt_logprobs is not None:  # they were sent before the first token
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(
            self.tokenize,
            sampling=sampling,
            attempt=self.attempt,
            resume=pack(self.tokens),
            sent_chars=self.chars,
            avoid=self.avoid,
            suspect_until=self.suspect_until,
            prefix_caching=self.tokenize.prefix_caching and not self.uncached,
        )


class AbandonedRequests:
    """Owns the last `limit` requests of which an attempt was given up: where it was, and when it was last called off.

    Where that was lost, or the engine was not known, its stream goes on; what comes of it is answered by calling it off
    again.
    """

    def __init__(self, limit: int, again_after: float) -> None:
        self._again_after = again_after
        self._entries: RecentEntries[RequestId, tuple[EngineId | None, float]] = RecentEntries(limit)

    def add(self, request: RequestId, engine: EngineId | None, now: float) -> None:
        """Remembers a request that was just cancelled at `engine`; or, if that is None, withdrawn from whoever may have
        placed it."""
        self._entries[request] = (engine, now)

    def call_off_again(
        self, request: RequestId, attempt: Attempt, now: float, engine: EngineId | None = None
    ) -> list[Effect]:
        """Calls off an attempt of which output has just arrived that nobody wants; `engine` has it, where that came
        along. Nothing if the same was done a moment ago."""
        entry = self._entries.get(request)
        if entry is None:
            if engine is None:
                return []
            entry = (None, now)
        former, since = entry
        new = engine is not None and engine != former
        if not new and now - since < self._again_after:
            return []
        at = former if engine is None else engine
        self._entries[request] = (at, now)
        return [Withdraw(request, attempt) if at is None else CancelAttempt(at, Cancel(request, attempt))]
