"""Where HTTP and the ring meet: opens requests, hands what comes to the clients waiting for it, and does what the
supervision wants done."""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any, assert_never

from services.gateway.answers.choice import ChoiceState, cached_of_prompts
from services.gateway.answers.exchange import Exchange, Outcome, Outlet
from services.gateway.answers.heading import Heading
from services.gateway.answers.speech import Speech
from services.gateway.api.errors import ApiError
from services.gateway.api.job import Job, Limits
from services.gateway.core.effects import Ask, Dispatch, Effect, Retried, Stop
from services.gateway.core.policy import Policy
from services.gateway.core.ring import Ring
from services.gateway.core.supervision import Supervision
from services.gateway.metrics import DISCONNECTS, METERS, OPEN, REQUESTS, RETRIES, STREAMS, ModelMeters
from services.gateway.probes import Probes
from services.gateway.questions import PromptTold, Questions
from shared import topics
from shared.bus import Bus, BusError, PayloadTooLarge
from shared.ids import Attempt, GatewayId, RequestId
from shared.messages.coordinator import Withdraw
from shared.messages.gateway import Delta, GatewayMessage, PromptPart, Rejected, StreamOpened
from shared.messages.lifecycle import Lifecycle
from shared.messages.tokenizer import Tokenize

log = logging.getLogger(__name__)


class Desk:
    """Owns the open exchanges and the supervision of their requests."""

    def __init__(self, bus: Bus, gateway: GatewayId, policy: Policy, limits: Limits, max_open: int) -> None:
        self.limits = limits
        self.patience = policy.request_s
        """Seconds that an answer may take in all."""
        self.ring = Ring()
        self.accepting = True
        self._bus, self._gateway, self._max_open = bus, gateway, max_open
        self._supervision = Supervision(policy)
        self.probes = Probes(bus, self._probed)
        self.questions = Questions(bus)
        self._routes: dict[RequestId, tuple[Exchange, ChoiceState]] = {}
        self._exchanges: set[Exchange] = set()

    def __len__(self) -> int:
        return len(self._supervision)

    @property
    def idle(self) -> bool:
        return not self._exchanges

    # For the HTTP side.

    def not_serving(self) -> str | None:
        """Why the ring cannot serve at the moment, or None."""
        if not self._bus.connected:
            return "the bus is away"
        missing = self.ring.missing
        return f"no {' and no '.join(missing)} is ready" if missing else None

    def admit(self, size: int) -> None:
        """Raises ApiError where `size` more requests cannot be taken now."""
        if not self.accepting:
            raise ApiError(503, "this gateway is draining", retry_after=1.0)
        if len(self._supervision) + size > self._max_open:
            raise ApiError(429, f"{self._max_open} requests are open, which is the limit", retry_after=1.0)

    def heading(self, job: Job) -> Heading:
        prefix = "chatcmpl" if job.kind == "chat" else "cmpl"
        return Heading(job.kind, f"{prefix}-{secrets.token_hex(12)}", int(time.time()), job.name)

    async def open(
        self, job: Job, heading: Heading, outlet: Outlet, told: list[PromptTold], trace: str | None
    ) -> Exchange:
        """Sends every sequence of `job` on its way."""
        return await self._open(job, heading, outlet, told, trace, METERS.of(job.name))

    async def _open(
        self,
        job: Job,
        heading: Heading,
        outlet: Outlet,
        told: list[PromptTold],
        trace: str | None,
        meters: ModelMeters,
    ) -> Exchange:
        now, arrival = self._bus.liveness_now(), time.time()
        messages: dict[RequestId, Tokenize] = {}
        choices: dict[RequestId, ChoiceState] = {}
        for choice in job.choices(secrets.randbits(63)):
            request = RequestId(heading.id if job.size == 1 else f"{heading.id}-{choice.place}")
            prompt = choice.place // job.n
            choices[request] = _choice_state(choice.place, prompt, job, told[prompt] if told else None)
            messages[request] = Tokenize(
                request=request,
                attempt=Attempt(1),
                gateway=self._gateway,
                model=job.name,
                prompt=choice.prompt,
                sampling=choice.sampling,
                stopping=job.stopping,
                skip_special_tokens=job.skip_special_tokens,
                priority=job.priority,
                arrival=arrival,
                cache_salt=job.cache_salt,
                trace=trace,
                grammar=job.guided.grammar if job.guided is not None else None,
                bad_words=job.bad_words,
                truncate_prompt_tokens=job.truncate_prompt_tokens,
                keep_markup=job.parsing is not None,
                thinking_end=job.thinking_end,
            )
        field = job.guided.field if job.guided is not None else None
        exchange = Exchange(heading, choices, outlet, meters, time.monotonic(), grammar_field=field)
        self._exchanges.add(exchange)
        STREAMS.set(len(self._exchanges))
        effects: list[Effect] = []
        for request, message in messages.items():
            self._routes[request] = (exchange, choices[request])
            effects += self._supervision.open(message, now)
        await self._perform(effects)
        return exchange

    def begin(self, job: Job, heading: Heading, outlet: Outlet) -> Exchange:
        """An answer whose choices come of parts, which are opened one by one."""
        choices = {RequestId(f"{heading.id}-{place}"): ChoiceState(place, place // job.n) for place in range(job.size)}
        exchange = Exchange(heading, choices, outlet, METERS.of(job.name), time.monotonic())
        self._exchanges.add(exchange)
        STREAMS.set(len(self._exchanges))
        return exchange

    async def open_part(self, job: Job, heading: Heading, outlet: Outlet, trace: str | None) -> Exchange:
        """As `open`, for what no client sees as it comes: to be left, and not to be measured."""
        return await self._open(job, heading, outlet, [], trace, ModelMeters())

    async def close(self, exchange: Exchange, outcome: Outcome) -> None:
        """The client has its answer, or wants it no more: whatever is still generated for it is cancelled."""
        await self.leave(exchange)
        self._record(exchange, outcome)

    async def leave(self, exchange: Exchange) -> None:
        """Nobody waits for it: whatever is still generated for it is cancelled."""
        self._exchanges.discard(exchange)
        STREAMS.set(len(self._exchanges))
        now = self._bus.liveness_now()
        effects: list[Effect] = []
        for request in exchange.requests:
            if self._routes.pop(request, None) is not None:
                effects += self._supervision.close(request, now)
        await self._perform(effects)

    def _record(self, exchange: Exchange, outcome: Outcome) -> None:
        heading, choices = exchange.heading, exchange.choices
        REQUESTS.labels(heading.model, heading.kind, outcome).inc()
        if outcome in ("client left", "client too slow"):
            DISCONNECTS.labels(outcome).inc()
        meters = METERS.of(heading.model)
        meters.prompt_tokens += sum({choice.prompt: choice.prompt_tokens for choice in choices}.values())
        meters.cached_tokens += sum(cached_of_prompts(choices))
        now = time.monotonic()
        log.info("answered", extra=_last_words(exchange, outcome, now))

    # For the actor.

    async def take(self, message: GatewayMessage) -> None:
        await self._perform(self._supervision.handle(message, self._bus.liveness_now()))

    async def heard(self, message: Lifecycle) -> None:
        now = self._bus.liveness_now()
        gone = self.ring.heard(message, now)
        if gone is not None:
            await self._perform(self._supervision.gone(gone.last, gone.reason, now))

    async def undelivered(self, message: Any) -> None:
        if isinstance(message, Tokenize):
            await self._perform(self._supervision.undelivered(message, self._bus.liveness_now()))

    async def tick(self, now: float) -> None:
        alive_now = self._bus.liveness_now()
        for gone in self.ring.expire(alive_now):
            await self._perform(self._supervision.unheard(gone.last, gone.reason, alive_now))
        await self._perform(self._supervision.tick(alive_now))
        for exchange in self._exchanges:
            exchange.tick(now)
        queued = self._supervision.queued()
        OPEN.labels("queued").set(queued)
        OPEN.labels("running").set(len(self._supervision) - queued)

    def stop(self) -> None:
        """Ends what is still open, with a word to each client."""
        for exchange in list(self._exchanges):
            exchange.fail(ApiError(503, "this gateway is stopping", retry_after=1.0))

    # What the supervision wants done.

    async def _perform(self, effects: list[Effect]) -> None:
        if not effects:
            return
        now = time.monotonic()
        for effect in effects:
            match effect:
                case Delta():
                    self._deliver(effect, now)
                case StreamOpened():
                    if (route := self._routes.get(effect.request)) is not None:
                        route[0].opened(effect)
                case PromptPart():
                    if (route := self._routes.get(effect.request)) is not None:
                        route[0].scored(effect)
                case Rejected():
                    if (route := self._routes.pop(effect.request, None)) is not None:
                        route[0].rejected(effect)
                case Dispatch():
                    await self._dispatch(effect.tokenize)
                case Stop():
                    await self._publish(topics.engine_control(effect.engine), effect.cancel)
                case Withdraw():
                    await self._publish(topics.withdrawals(), effect)
                case Ask():
                    self.probes.ask(effect)
                case Retried():
                    self._retried(effect)
                case _:
                    assert_never(effect)

    def _deliver(self, delta: Delta, now: float) -> None:
        find = self._routes.get if delta.finish is None else self._routes.pop
        route = find(delta.request, None)
        if route is not None:
            route[0].delta(route[1], delta, now)

    async def _dispatch(self, tokenize: Tokenize) -> None:
        try:
            await self._bus.publish(topics.tokenize(tokenize.model), tokenize, confirm=True)
        except PayloadTooLarge as error:
            rejected = Rejected(
                request=tokenize.request,
                attempt=tokenize.attempt,
                kind="too_large",
                message=f"the prompt makes {error.size} bytes, the bus takes {error.limit} at most",
                field="prompt",
            )
            await self.take(rejected)

    async def _publish(self, topic: topics.Topic[Any], message: Any) -> None:
        try:
            await self._bus.publish(topic, message)
        except BusError as error:
            log.warning("not published", extra={"subject": topic.subject, "error": str(error)})

    def _retried(self, retried: Retried) -> None:
        RETRIES.inc()
        if (route := self._routes.get(retried.request)) is not None:
            route[0].attempts += 1
        log.warning("dispatched again", extra=retried._asdict())

    async def _probed(self, ask: Ask, answer: Any) -> None:
        now = self._bus.liveness_now()
        await self._perform(self._supervision.probed(ask.probe.request, ask.probe.attempt, answer, now))


def _choice_state(place: int, prompt: int, job: Job, told: PromptTold | None) -> ChoiceState:
    speech = None if job.parsing is None else Speech(job.parsing)
    state = ChoiceState(place, prompt, speech=speech, only_echo=job.only_echo)
    if told is not None:
        state.echo, state.prompt_ids = told.echo, told.token_ids
        state.echoed_first = told.first if job.telling.echo_logprobs is not None else None
    return state


def _last_words(exchange: Exchange, outcome: Outcome, now: float) -> dict[str, Any]:
    first = exchange.first_token_at
    words: dict[str, Any] = {
        "request": exchange.heading.id,
        "outcome": outcome,
        "tokens": sum(choice.tokens for choice in exchange.choices),
        "ttft": round(first - exchange.started, 4) if first is not None else None,
        "duration": round(now - exchange.started, 4),
        "attempts": exchange.attempts,
    }
    if exchange.error is not None:
        words |= {"status": exchange.error.status, "reason": exchange.error.message}
    return words
