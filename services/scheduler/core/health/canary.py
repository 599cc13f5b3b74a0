"""A completion that an engine asks of itself now and then: is it still what it was at the start?

The canary is a client inside the core. Its request takes the way of every other (queue, admission, plan, sampling), and
what the engine sends to its gateway and its detokenizer comes back here, instead of going to the bus.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

from services.scheduler.core.events import Output, SendPlan, SendToGateway, SendTokens, WorkersReady
from shared.ids import Attempt, DetokenizerId, GatewayId, RequestId, SequenceId
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import RequestFailed, RequestPlaced, RequestRejected
from shared.messages.generation import Generation, SamplingOptions, StopConditions
from shared.messages.scheduler import Cancel, GenerateRequest
from shared.messages.worker import StepPlan
from shared.packing import pack

CANARY_GATEWAY = GatewayId("canary")
CANARY_DETOKENIZER = DetokenizerId("canary")

PROMPT_TOKENS = 24
"""More than a block, so that a second one is read, too."""
OUTPUT_TOKENS = 8
PROMPT_STRIDE = 7919
"""A prime: the prompt's tokens are spread over the vocabulary."""
MAX_RECORDINGS = 4
"""Canaries from which two equal ones in a row are sought, to compare later ones with."""
MAX_TIME_SHARE = 0.01
"""Of the engine's time."""
IDLE_WAIT = 4
"""Intervals for which an engine that is busy is given the chance to be idle, before its canary runs beside others."""
MIN_DEADLINE = 10.0
"""Seconds from its first step to its last token; longer where FACTOR times its longest time is."""
FACTOR = 10.0
FIRST_IN_QUEUE = 0.0
"""Its arrival: one short sequence delays nobody, and an engine with a long queue is looked after, too."""


class CanaryOutcome(NamedTuple):
    """How one canary ended."""

    fault: str | None
    """What was wrong, for people; None: nothing was."""
    seconds: float
    """From its first step to its end."""


@dataclass(slots=True)
class CanaryRun:
    """A canary that has not ended."""

    cancel: Cancel
    sequence: SequenceId | None = None
    """None until the engine has accepted it."""
    begun: float | None = None
    """When its first step was planned, in seconds."""
    alone: bool = True
    """Whether no step of it has held another sequence."""
    tokens: list[int] = field(default_factory=list)


class Canary:
    """Owns the canary under way, when the next one is due, and what the right answer is.

    The right answer is what two canaries in a row said that were alone in their steps. One that is alone must repeat
    it. One beside others may differ a little, as kernels add up in another order there, but not in every token.
    Where two in a row are never equal, only that an answer comes in time is checked.
    """

    def __init__(self, interval: float) -> None:
        """`interval`: seconds between two canaries, at least; 0: there are none."""
        self._interval = interval
        self.run: CanaryRun | None = None
        """The canary under way; None while there is none. Written here only."""
        self.mixed_in = False
        """Whether what the engine sends may hold messages of a canary: one is under way, or has just ended."""
        self._number = 0
        self._due = 0.0
        self._hurried = -interval
        self._expected: tuple[int, ...] | None = None
        self._candidate: tuple[int, ...] | None = None
        self._recordings = 0
        self._shortest: float | None = None
        """Seconds of the fastest one since the workers came; None before the first."""
        self._longest: float | None = None

    @property
    def recorded(self) -> bool:
        """Whether the right answer is known, or was sought in vain."""
        return not self._interval or self._expected is not None or self._recordings >= MAX_RECORDINGS

    def is_due(self, now: float) -> bool:
        """Whether the next one may come; `next_request` knows whether it must wait for the engine to be idle."""
        return self._interval > 0 and self.run is None and now >= self._due

    def hurry(self, now: float) -> None:
        """The next one is due at once, however busy the engine is; but no oftener than others, which come beside."""
        if now >= self._hurried + self.pause_seconds():
            self._hurried = now
            self._due = min(self._due, now - IDLE_WAIT * self._interval)

    def abandon(self) -> None:
        """The one under way is lost with all other requests, and says nothing; the next is due at once."""
        self.run = None
        self._due = 0.0

    def forget_answer(self) -> None:
        """The workers are others, which may say something else, and be slower: what is right is recorded anew."""
        self._shortest = self._longest = self._expected = self._candidate = None
        self._recordings = 0

    def next_request(self, workers: WorkersReady, now: float, *, idle: bool) -> GenerateRequest | None:
        """The next canary, if it is due; it is under way from now on. `idle`: the engine has nothing else in hand."""
        wait = 0.0 if idle else IDLE_WAIT * self._interval
        if not self.is_due(now - wait):
            return None
        context = min(workers.card.max_model_len, workers.num_blocks * workers.card.block_size)
        length = min(PROMPT_TOKENS, context // 2)
        if length < 1:
            return None
        self._number += 1
        request, attempt = RequestId(f"canary-{self._number}"), Attempt(1)
        self.run = CanaryRun(Cancel(request, attempt))
        self.mixed_in = True
        generation = Generation(
            request=request,
            attempt=attempt,
            gateway=CANARY_GATEWAY,
            model=workers.card.name,
            tokens=pack([i * PROMPT_STRIDE % workers.card.vocab_size for i in range(1, length + 1)]),
            prompt_length=length,
            block_hashes=b"",
            sampling=SamplingOptions(seed=0, temperature=0.0),
            stopping=StopConditions(max_tokens=min(OUTPUT_TOKENS, context - length), ignore_eos=True),
            arrival=FIRST_IN_QUEUE,
            prefix_caching=False,
        )
        return GenerateRequest(generation, CANARY_DETOKENIZER)

    def enter(self, sequence: SequenceId) -> None:
        """The engine has accepted it, as this sequence."""
        assert self.run is not None, "behind next_request"
        self.run.sequence = sequence

    def overdue(self, now: float) -> Cancel | None:
        """The cancel of a canary that is late, after which `give_up` ends it. The first one may take as long as its
        steps may."""
        run = self.run
        if run is None or run.begun is None or self._longest is None:
            return None
        return run.cancel if now - run.begun > self._seconds_allowed(self._longest) else None

    def give_up(self, now: float) -> CanaryOutcome:
        """Ends the canary that is late."""
        assert self._longest is not None, "only one that is overdue"
        return self._end(f"no answer in {self._seconds_allowed(self._longest):g} s", now)

    def pause(self, seconds: float, now: float) -> None:
        """The next one comes in `seconds` at the earliest."""
        self._due = now + seconds

    def pause_seconds(self) -> float:
        """Between two canaries of a sound engine: the interval, and so much that they take MAX_TIME_SHARE of its time
        at most."""
        return max(self._interval, (self._shortest or 0.0) * (1 / MAX_TIME_SHARE - 1))

    # ---- what the engine sends

    def separate(self, outputs: list[Output], now: float) -> tuple[list[Output], CanaryOutcome | None]:
        """Takes what is the canary's out of the engine's outputs, which must hold all that was sent until now. Returns
        the rest, and how the canary has ended, if this shows it."""
        rest: list[Output] = []
        outcome: CanaryOutcome | None = None
        for output in outputs:
            match output:
                case SendTokens(detokenizer, batch) if detokenizer == CANARY_DETOKENIZER:
                    outcome = self._receive(batch, now) or outcome
                case SendToGateway(gateway, (RequestRejected() | RequestFailed() | RequestPlaced()) as message) if (
                    gateway == CANARY_GATEWAY
                ):
                    outcome = self._answered(message, now) or outcome
                case SendPlan(plan):
                    self._planned(plan, now)
                    rest.append(output)
                case _:
                    rest.append(output)
        self.mixed_in = self.run is not None
        return rest, outcome

    def _planned(self, plan: StepPlan, now: float) -> None:
        run = self.run
        if run is not None and any(work.sequence == run.sequence for work in plan.work):
            run.begun = now if run.begun is None else run.begun
            run.alone = run.alone and len(plan.work) == 1

    def _receive(self, batch: TokenBatch, now: float) -> CanaryOutcome | None:
        run = self.run
        if run is None:
            return None
        for entry in batch.entries:
            if entry.request != run.cancel.request:
                continue
            run.tokens += entry.tokens
            if entry.finish is not None:
                return self._end(self._judge(tuple(run.tokens), alone=run.alone), now)
        return None

    def _answered(self, message: RequestRejected | RequestFailed | RequestPlaced, now: float) -> CanaryOutcome | None:
        run = self.run
        if run is None or message.request != run.cancel.request:
            return None
        match message:
            case RequestFailed(reason=reason):
                return self._end(reason, now)
            case RequestRejected():  # the queue is full: that says nothing of what is computed
                self.run = None
                self.pause(self._interval, now)
                return None
            case RequestPlaced():
                raise AssertionError("a canary is not handed over")
            case _:
                assert_never(message)

    def _judge(self, tokens: tuple[int, ...], *, alone: bool) -> str | None:
        expected = self._expected
        if expected is None:
            if alone and self._recordings < MAX_RECORDINGS:
                self._recordings += 1
                self._expected = tokens if tokens == self._candidate else None
                self._candidate = tokens
            return None
        same = sum(one == other for one, other in zip(tokens, expected, strict=True))
        if same == len(expected) or (same and not alone):
            return None
        if len(set(tokens)) == 1:
            return f"token {tokens[0]} for ever, where the engine said others before"
        return f"{len(expected) - same} of {len(expected)} tokens are others than before"

    def _end(self, fault: str | None, now: float) -> CanaryOutcome:
        run, self.run = self.run, None
        assert run is not None, "only a canary under way ends"
        seconds = 0.0 if run.begun is None else now - run.begun
        if fault is None:
            self._shortest = seconds if self._shortest is None else min(self._shortest, seconds)
            self._longest = max(self._longest or 0.0, seconds)
        return CanaryOutcome(fault, seconds)

    @staticmethod
    def _seconds_allowed(longest: float) -> float:
        return max(MIN_DEADLINE, FACTOR * longest)
