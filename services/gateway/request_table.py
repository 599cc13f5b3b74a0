"""Connects HTTP responses with the bus: opens requests, routes messages to the responses, and carries out what the
supervisor of requests decides (its effects)."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, assert_never

from services.gateway.api.errors import RequestError, aborted
from services.gateway.api.generation import WHOLE_KINDS, GenerationRequest, RequestLimits
from services.gateway.api.response import (
    ChoiceState,
    GenerationResponse,
    ResponseHeader,
    ResponseOutcome,
    ResponseWriter,
    cached_prompt_tokens,
    prompt_tokens,
)
from services.gateway.core.cluster import ClusterView, ModelUnavailable
from services.gateway.core.effects import AttemptRetry, CancelAttempt, DispatchAttempt, Effect, ProbeEngine
from services.gateway.core.open_request import EmittedOutput, NoAnswer, OpenRequest, RetryPolicy, choice_requests
from services.gateway.core.remote_clusters import RemoteClusters
from services.gateway.core.stream_records import StreamRecord, StreamRecords, newest_attempt
from services.gateway.core.supervisor import RequestSupervisor
from services.gateway.dispatches import choice_state, first_dispatch, send_attempt
from services.gateway.engine_prober import PROBE_TIMEOUT, EngineProber
from services.gateway.images.image_rows import ImageRowsClient
from services.gateway.metrics import DISCONNECTS, OPEN, REQUESTS, RETRIES, STREAMS, Meters, ModelMeters
from services.gateway.tokenizer_client import PromptDetails, TokenizerClient
from shared import topics
from shared.bus import Bus, BusError
from shared.ids import Attempt, ClusterName, EngineId, GatewayId, ModelName, RequestId, relay_of
from shared.messages.coordinator import RequestEnded, Withdraw
from shared.messages.gateway import (
    Delta,
    PooledDelta,
    PromptKept,
    PromptLogprobsDelta,
    RequestMessage,
    RequestRejected,
    StreamOpened,
)
from shared.messages.lifecycle import Lifecycle
from shared.messages.scheduler import Cancel, Probe, ProbeReply
from shared.messages.tokenizer import Tokenize
from shared.telemetry.tracing import exported_trace

log = logging.getLogger(__name__)

BUS_AWAY = "the bus is away"
ATTEMPTS_OF_A_GATEWAY = 1000
"""More than a gateway makes of a request: one that takes it over counts on beyond them. Which thousand is drawn, so
that of two gateways that take it over at once one has the newer attempt."""


class ClusterLink(Protocol):
    """How requests go to other clusters, and how their output comes back."""

    async def forward(self, cluster: ClusterName, tokenize: Tokenize) -> None:
        """Sends an attempt to a gateway of that cluster."""

    async def cancel(self, cluster: ClusterName, gateway: GatewayId, cancel: Cancel) -> None:
        """Cancels what a gateway of another cluster has."""

    async def probe(self, cluster: ClusterName, gateway: GatewayId, probe: Probe) -> ProbeReply:
        """Asks a gateway of another cluster whether it has a request. Raises BusError."""

    def record_output(self, output: Delta | StreamOpened | PromptLogprobsDelta | PooledDelta | RequestRejected) -> bool:
        """Records output of a request that this cluster serves for another one. Returns False if the request is none of
        these."""

    async def flush_output(self) -> None:
        """Sends the output recorded since the last call."""


class RequestTable:
    """Owns the open responses and the supervision of their requests."""

    def __init__(
        self,
        bus: Bus,
        gateway: GatewayId,
        policy: RetryPolicy,
        limits: RequestLimits,
        max_open: int,
        records: StreamRecords,
        clusters: RemoteClusters | None = None,
        images: ImageRowsClient | None = None,
    ) -> None:
        """`clusters`: others that requests may go to, over `link`; None: there are none. `images`: None: they come in
        bodies only."""
        self.clusters = clusters
        self.link: ClusterLink | None = None
        self.records = records
        """What was generated of resumable streams, this gateway's own and copies."""
        self.limits = limits
        self.timeout = policy.request_s
        """Seconds that an answer may take in all."""
        self.cluster = ClusterView(policy.wait_for_engines_s)
        self.meters = Meters()
        self._policy = policy
        self.accepting = True
        self._bus, self._gateway, self._max_open = bus, gateway, max_open
        self._supervisor = RequestSupervisor(policy, clusters)
        self.prober = EngineProber(self._ask_engine, self._record_probe_reply)
        self.tokenizer = TokenizerClient(bus)
        self.images = images or ImageRowsClient(bus)
        self._routes: dict[RequestId, tuple[GenerationResponse, ChoiceState]] = {}
        self._keeping: dict[RequestId, GenerationResponse] = {}
        """The open responses that say what is kept of their prompts, which may be known after their end."""
        self._responses: set[GenerationResponse] = set()
        self._arriving = 0
        """Requests whose bodies are being read."""
        OPEN.labels("queued").set_function(self._queued)
        OPEN.labels("running").set_function(lambda: len(self) - self._queued())

    def __len__(self) -> int:
        return len(self._supervisor)

    def _queued(self) -> int:
        return sum(request.state != "placed" for request in self._supervisor.requests())

    @property
    def idle(self) -> bool:
        """Whether no response is open."""
        return not self._responses

    # For the endpoints.

    def not_serving(self, model: ModelName | None = None, *, though_asleep: bool = True) -> str | None:
        """Returns why new requests for `model`, or for any model, are refused at the moment; None if they are not. With
        `though_asleep` also if that is only because engines sleep."""
        absence = self._absence(model)
        return None if absence is None or (absence.asleep and not though_asleep) else absence.reason

    def models_not_serving(self) -> int:
        """Returns the number of known models for which new requests are refused at the moment."""
        return sum(self._absence(card.name) is not None for card in self.cluster.models())

    @property
    def free(self) -> int:
        """How many more sequences may be open."""
        return self._max_open - len(self._supervisor) - self._arriving

    def admit(self, sequences: int, model: ModelName | None = None) -> None:
        """Raises RequestError if so many more sequences for `model`, or for any model, cannot be taken now."""
        if (absence := self._absence(model)) is not None:
            text = f"the request could not be served: {absence.reason}"
            raise RequestError(503, text, retry_after=1.0, elsewhere=True)
        if not self.accepting:
            raise RequestError(503, "this gateway is draining", retry_after=1.0)
        if len(self._supervisor) + self._arriving + sequences > self._max_open:
            text = f"{self._max_open} requests are open, which is the limit"
            raise RequestError(429, text, retry_after=1.0, elsewhere=True)

    def _absence(self, model: ModelName | None) -> ModelUnavailable | None:
        """Why new requests for `model`, or for any, are refused. A bus that is away counts as any other service; since
        it went the clock of liveness is paused, which is therefore when it went."""
        if self.clusters is not None:
            names = [model] if model is not None else [card.name for card in self.cluster.models()]
            if any(map(self.clusters.can_serve, names)):
                return None
        now = self._bus.liveness_now()
        if self._bus.outage() > min(self._policy.wait_for_engines_s, self._policy.bus_outage_s):
            return ModelUnavailable(BUS_AWAY, now)
        return self.cluster.absence(model, now)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Admits a request before its body is read, and counts it as open meanwhile. Raises RequestError."""
        self.admit(1)
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    async def open(
        self,
        generation: GenerationRequest,
        header: ResponseHeader,
        writer: ResponseWriter,
        details: list[PromptDetails],
        meters: ModelMeters | None = None,
        record: StreamRecord | None = None,
    ) -> GenerationResponse:
        """Dispatches every sequence of a request. `details`: describe its prompts if the client wants that, else empty.
        `meters`: in place of the model's, for requests that no client has sent. `record`: of a resumable stream, new or
        not. The response then gets what is recorded, only what nobody generates any more is dispatched, and the
        response that had the stream until now ends."""
        now, arrival = self._bus.liveness_now(), time.time() if record is None else record.opening.arrival
        seed = secrets.randbits(63) if record is None else record.opening.seed
        max_model_len = self.cluster.max_model_len(generation.model)
        choices: dict[RequestId, ChoiceState] = {}
        messages: dict[RequestId, Tokenize] = {}
        requests = choice_requests(header.id, generation.sequences)
        for request, choice in zip(requests, generation.choices(seed), strict=True):
            choices[request] = choice_state(generation, choice, details, None if record is None else request)
            messages[request] = first_dispatch(generation, choice, request, self._gateway, arrival, max_model_len)
        grammar = generation.output_grammar
        response = GenerationResponse(
            header,
            choices,
            writer,
            self.meters.of(self.cluster.counted_as(header.model)) if meters is None else meters,
            time.monotonic(),
            grammar_field=grammar.field if grammar is not None else None,
            trace=exported_trace(generation.trace),
        )
        self._add(response)
        if generation.kv_transfer.keep:
            self._keeping |= dict.fromkeys(requests, response)
        effects: list[Effect] = []
        if record is not None and record.begun:
            effects = self._resume(response, record, messages, now)
        else:
            for message in messages.values():
                effects += self._supervisor.open(message, now, accepted=meters is not None)
            self._routes |= {request: (response, state) for request, state in choices.items()}
        await self._perform(effects)
        return response

    def _resume(
        self, response: GenerationResponse, record: StreamRecord, messages: dict[RequestId, Tokenize], now: float
    ) -> list[Effect]:
        """Gives the response what is recorded. Nothing may be awaited between this and registering the routes of
        further output."""
        effects: list[Effect] = []
        attempt = Attempt(newest_attempt(record) + ATTEMPTS_OF_A_GATEWAY * (1 + secrets.randbelow(1000)))
        for request, choice in record.choices.items():
            if (former := self._routes.pop(request, None)) is not None:
                former[0].end("taken over")
            state, delta = response.requests[request], choice.delta()
            if choice.opened is not None:
                response.record_opened(choice.opened)
            if choice.finish is None:
                self._routes[request] = response, state
            if delta is not None:
                response.restore(state, delta, time.monotonic())
            if choice.finish is None and request not in self._supervisor:
                prompt_tokens = None if choice.opened is None else choice.opened.prompt_tokens
                age = max(0.0, time.time() - record.opening.arrival)
                emitted = EmittedOutput(attempt, choice.tokens, choice.chars, prompt_tokens, age)
                effects += self._supervisor.resume(messages[request], emitted, now)
        return effects

    def open_empty(
        self, generation: GenerationRequest, header: ResponseHeader, writer: ResponseWriter
    ) -> GenerationResponse:
        """Opens a response that dispatches nothing: its choices are filled in by other requests."""
        states = [ChoiceState(position, position // generation.n) for position in range(generation.sequences)]
        choices = {RequestId(f"{header.id}-{state.index}"): state for state in states}
        meters = self.meters.of(self.cluster.counted_as(header.model))
        response = GenerationResponse(header, choices, writer, meters, time.monotonic())
        self._add(response)
        return response

    def _add(self, response: GenerationResponse) -> None:
        self._responses.add(response)
        STREAMS.set(len(self._responses))

    async def close(self, response: GenerationResponse, outcome: ResponseOutcome, *, resumable: bool = False) -> None:
        """Ends a client's response: cancels what is still generated for it, then counts and logs it. `resumable`:
        generating goes on, and its output is recorded."""
        await self.cancel(response, detach=resumable)
        header, choices = response.header, response.choices
        model = self.cluster.counted_as(header.model)
        refused = outcome == "failed" and response.error is not None and response.error.status < 500
        REQUESTS.labels(model, header.kind, "refused" if refused else outcome).inc()
        if outcome in ("client left", "client too slow"):
            DISCONNECTS.labels(outcome).inc()
        meters = self.meters.of(model)
        meters.prompt_tokens += prompt_tokens(choices)
        meters.cached_tokens += sum(cached_prompt_tokens(choices))
        first = response.first_token_at
        summary: dict[str, Any] = {
            "request": header.id,
            "outcome": outcome,
            "tokens": sum(choice.tokens for choice in choices),
            "ttft": round(first - response.started_at, 4) if first is not None else None,
            "duration": round(time.monotonic() - response.started_at, 4),
            "attempts": response.attempts,
        }
        if response.error is not None:
            summary |= {"status": response.error.status, "reason": response.error.message}
        log.info("answered", extra=summary)

    async def cancel(self, response: GenerationResponse, *, detach: bool = False) -> None:
        """Forgets a response, and cancels whatever is still generated for it; with `detach` it cancels nothing."""
        self._responses.discard(response)
        STREAMS.set(len(self._responses))
        for request in response.requests:
            self._keeping.pop(request, None)
        own = [r for r in response.requests if (route := self._routes.get(r)) is not None and route[0] is response]
        for request in own:
            del self._routes[request]
        if own and not detach:
            await self.abandon(own)

    async def abandon(self, requests: Iterable[RequestId]) -> None:
        """Cancels requests that another gateway continues. Those that still have a response here have it ended as taken
        over."""
        now = self._bus.liveness_now()
        effects: list[Effect] = []
        for request in requests:
            if (route := self._routes.pop(request, None)) is not None:
                route[0].end("taken over")
            effects += self._supervisor.close(request, now)
        await self._perform(effects)

    async def abort(self, responses: Collection[str] | None) -> list[str]:
        """Aborts the responses with these ids, or all: their clients keep the output so far. Returns the ids that were
        found, as clients see them. A response without output fails."""
        found = [each for each in self._responses if not each.ended.done()]
        if responses is not None:
            found = [each for each in found if {each.header.id, each.header.shown_id}.intersection(responses)]
        now = self._bus.liveness_now()
        for response in found:
            requests = [request for request in response.requests if request in self._routes]
            if not requests or response.header.kind in WHOLE_KINDS:
                response.fail(aborted())
                continue
            await self._perform(
                [effect for request in requests for effect in self._supervisor.close(request, now, aborted=True)]
            )
        return [each.header.shown_id or each.header.id for each in found]

    def open_responses(self) -> Iterable[GenerationResponse]:
        """Returns the open responses; they are the table's to change."""
        return self._responses

    def open_requests(self) -> Iterable[OpenRequest]:
        """Returns the open requests; they are the supervisor's to change."""
        return self._supervisor.requests()

    # For other clusters.

    async def open_relayed(self, tokenize: Tokenize, emitted: EmittedOutput) -> None:
        """Opens a request of another cluster's gateway; what comes of it goes to `ClusterLink.record_output`."""
        await self._perform(self._supervisor.resume(tokenize, emitted, self._bus.liveness_now(), relayed=True))

    def state_of(self, request: RequestId) -> ProbeReply:
        """The state here of a request of another cluster's gateway."""
        return self._supervisor.state_of(request)

    async def relay_gone(self, relay: EngineId) -> None:
        """Retries the requests of another cluster's gateway, which is gone."""
        await self._perform(self._supervisor.relay_gone(relay, self._bus.liveness_now()))

    async def move_to_others(self) -> None:
        """This cluster is drained: requests on its engines move to other clusters that can serve them."""
        await self._perform(self._supervisor.move_to_others(self._bus.liveness_now()))

    async def record_unforwarded(self, tokenize: Tokenize) -> None:
        """No gateway of the other cluster took a request."""
        await self._perform(self._supervisor.undelivered(tokenize, self._bus.liveness_now()))

    # For the actor.

    async def handle(self, message: RequestMessage) -> None:
        """Takes a message about a request."""
        await self._perform(self._supervisor.handle(message, self._bus.liveness_now()))

    def record_kept(self, message: PromptKept) -> None:
        """Records which blocks of a prompt an engine keeps. A message of an older attempt counts, too, as blocks are
        named by content."""
        response = self._keeping.pop(message.request, None)
        if response is not None and not response.kept.done():
            response.kept.set_result(message)

    async def record_lifecycle(self, message: Lifecycle) -> None:
        """Takes an instance's lifecycle message; requests of an instance that ended are retried."""
        now = self._bus.liveness_now()
        gone = self.cluster.record_lifecycle(message, now)
        if gone is not None:
            await self._perform(self._supervisor.instance_gone(gone.last, gone.reason, now))

    async def record_undelivered(self, message: Any) -> None:
        """Handles a message that came back because it had no subscriber."""
        if isinstance(message, Tokenize):
            await self._perform(self._supervisor.undelivered(message, self._bus.liveness_now()))

    async def tick(self, now: float) -> None:
        """Checks all deadlines. `now` is the clock of responses; services are judged by the bus's liveness clock."""
        alive_now = self._bus.liveness_now()
        others = self.clusters
        if others is not None:
            others.record_rooms(self.cluster.rooms())
        for gone in self.cluster.expire(alive_now, others.can_serve if others is not None else lambda _: False):
            await self._perform(self._supervisor.instance_silent(gone.last, gone.reason, alive_now))
        if self._bus.outage() > self._policy.bus_outage_s:
            why = f"{BUS_AWAY} for {self._policy.bus_outage_s:g} s"
            await self._perform(self._supervisor.give_up_all(why, alive_now))
        for card in self.cluster.models():
            if (absence := self._absence(card.name)) is not None:
                await self._perform(self._supervisor.refuse_unserved(card.name, absence, alive_now))
        await self._perform(self._supervisor.tick(alive_now))
        await self.images.open_rows.renew(each.tokenize for each in self._supervisor.requests())
        for response in self._responses:
            if not response.ended.done():
                response.writer.tick(now)

    def stop(self) -> None:
        """Fails every open response, as the gateway is stopping. Resumable streams break off and continue elsewhere."""
        for response in list(self._responses):
            if self.records.get(response.header.id) is not None:
                response.end("taken over")
            response.fail(RequestError(503, "this gateway is stopping", retry_after=1.0))

    # What the supervisor wants done.

    async def _perform(self, effects: list[Effect]) -> None:
        if not effects:
            return
        now = time.monotonic()
        link = self.link
        for effect in effects:
            match effect:
                case Delta() | StreamOpened() | PromptLogprobsDelta() | PooledDelta() | RequestRejected() if (
                    link is not None and link.record_output(effect)
                ):
                    pass
                case Delta():
                    self.records.record(effect)  # with no wait before the client has it: see _resume
                    find = self._routes.get if effect.finish is None else self._routes.pop
                    if (route := find(effect.request, None)) is not None:
                        route[0].record_delta(route[1], effect, now)
                case StreamOpened():
                    self.records.record(effect)
                    if (route := self._routes.get(effect.request)) is not None:
                        route[0].record_opened(effect)
                case PromptLogprobsDelta():
                    if (route := self._routes.get(effect.request)) is not None:
                        route[1].record_prompt_logprobs(effect)
                case PooledDelta():
                    if (route := self._routes.get(effect.request)) is not None:
                        route[0].record_vector(route[1], effect.vector)
                case RequestRejected():
                    self.records.fail(effect.request)
                    if (route := self._routes.pop(effect.request, None)) is not None:
                        route[0].reject(effect)
                case DispatchAttempt(tokenize, cluster) if cluster is not None and link is not None:
                    await self._forward(link, cluster, tokenize)
                case DispatchAttempt(tokenize):
                    if not self.images.open_rows.remake(tokenize, self._dispatch):
                        await self._dispatch(tokenize)
                case CancelAttempt() if link is not None and (relay := relay_of(effect.engine)) is not None:
                    await link.cancel(*relay, effect.cancel)
                case CancelAttempt():
                    await self._publish(topics.engine_control(effect.engine), effect.cancel)
                case Withdraw() | RequestEnded():
                    await self._publish(topics.withdrawals(), effect)
                case ProbeEngine():
                    self.prober.probe(effect)
                case AttemptRetry():
                    RETRIES.inc()
                    if (route := self._routes.get(effect.request)) is not None:
                        route[0].attempts += 1
                    log.warning("dispatched again", extra=effect._asdict())
                case _:
                    assert_never(effect)
        if link is not None:
            await link.flush_output()

    async def _forward(self, link: ClusterLink, cluster: ClusterName, tokenize: Tokenize) -> None:
        if (whole := await self.images.open_rows.with_rows(tokenize)) is None:
            await self.record_unforwarded(tokenize)
        else:
            await link.forward(cluster, whole)

    async def _dispatch(self, tokenize: Tokenize) -> None:
        if (refused := await send_attempt(self._bus, tokenize)) is not None:
            await self.handle(refused)

    async def _publish(self, topic: topics.Topic[Any], message: Any) -> None:
        try:
            await self._bus.publish(topic, message)
        except BusError as error:
            log.warning("message not published", extra={"subject": topic.subject, "error": str(error)})

    async def _ask_engine(self, probe: ProbeEngine) -> ProbeReply:
        """Raises BusError."""
        if self.link is not None and (relay := relay_of(probe.engine)) is not None:
            return await self.link.probe(*relay, probe.probe)
        topic = topics.engine_probes(probe.engine)
        reply: ProbeReply = await self._bus.request(topic, probe.probe, ProbeReply, PROBE_TIMEOUT)
        return reply

    async def _record_probe_reply(self, sent: ProbeEngine, reply: ProbeReply | NoAnswer) -> None:
        now = self._bus.liveness_now()
        probe = sent.probe
        await self._perform(self._supervisor.record_probe_reply(probe.request, probe.attempt, reply, now))
