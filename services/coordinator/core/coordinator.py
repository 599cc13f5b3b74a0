"""Decides which engine gets each request. No bus, no clock: messages and time in, actions out."""

from __future__ import annotations

import math
from typing import NamedTuple

from msgspec.structs import replace

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.actions import (
    AccuseEngine,
    Action,
    CancelOnEngine,
    Moment,
    NotifyGateway,
    Placement,
    PlaceRequest,
)
from services.coordinator.core.fleet import EngineFleet, fits, is_fair
from services.coordinator.core.kv_sources import KvSources
from services.coordinator.core.link_costs import LinkCosts
from services.coordinator.core.outliers import OutlierDetector
from services.coordinator.core.placement_queue import PlacementQueue, QueuedRequest
from services.coordinator.core.prefill_queue import PrefillQueue
from services.coordinator.core.reservations import ExpectedPrompts, PromptPrefix
from services.coordinator.core.router import Router
from shared.blocks import HASH_BYTES
from shared.ids import Attempt, EngineId, InstanceId, ModelName, RequestId
from shared.messages.coordinator import PlacementMade, PullPrefills, RequestEnded, Route, Withdraw
from shared.messages.gateway import ErrorKind, RequestFailed, RequestPlaced, RequestQueued, RequestRejected
from shared.messages.generation import Generation
from shared.messages.kv_events import KvDump, KvEvents
from shared.messages.lifecycle import Lifecycle
from shared.messages.scheduler import Cancel, GenerateRequest, OutlierReport
from shared.packing import TOKEN_BYTES
from shared.reliability.recent import AttemptFence, RecentEntries

MAX_RETRY_AFTER = 60.0
"""Seconds after which a rejected client may try again, at most."""
RENEW_SECONDS = 1.0
"""Between two messages to a gateway that its request still waits here; silence means a lost coordinator."""
MAX_REMEMBERED = 65_536
"""Requests whose newest attempt is remembered; the oldest are forgotten first."""


class _Placed(NamedTuple):
    engine: EngineId
    attempt: Attempt
    at: float
    """In monotonic seconds."""


class Coordinator:
    """Owns where requests go: which instances are alive, which requests wait, which attempts are stale, which blocks
    are cached where.

    Each Route that is not stale ends in exactly one PlaceRequest, one Rejected, or a Withdraw; until then it waits, and
    its gateway is sent RequestQueued repeatedly. A PlaceRequest that reached no engine does not count.
    """

    def __init__(
        self,
        instance: InstanceId,
        config: CoordinatorConfig,
        *,
        turn: int = 0,
    ) -> None:
        """`turn`: see EngineFleet."""
        self._instance = instance
        self.config = config
        self.fleet = EngineFleet(instance, config, turn)
        self.sources = KvSources(config.router_index_blocks)
        self.queue = PlacementQueue()
        self.prefills = PrefillQueue()
        """Prompts that wait for a prefill engine to pull them; empty without `prefill_queue`."""
        self._expected = ExpectedPrompts()
        self._links = LinkCosts()
        self._router = Router(self.fleet, self.sources, self._expected, self._links, config)
        self._fence = AttemptFence(MAX_REMEMBERED)
        self._engines: RecentEntries[RequestId, _Placed] = RecentEntries(MAX_REMEMBERED)
        """Where the newest attempt of each request was placed last."""
        self._outliers = OutlierDetector()

    # ---- requests

    def route(self, route: Route, at: Moment) -> list[Action]:
        """A request asks for an engine. Stale attempts are dropped, with no action: their gateway has moved on."""
        generation = route.generation
        if generation.kept is not None and not self.fleet.keeps(generation.kept):
            generation = replace(generation, kept=None)  # its prompt is computed, or found by its blocks
        if not self._fence.accept(generation.request, generation.attempt):
            return []
        placed = self._engines.pop(generation.request, None)
        if (failed := self._wrongly_hashed(generation)) is not None:
            return [NotifyGateway(generation.gateway, failed)]
        accusations = self._record_failure(generation, placed, at) if generation.avoid else []
        return [*accusations, *self._admit(generation, at)]

    def withdraw(self, message: Withdraw) -> list[Action]:
        """The gateway has given up these attempts: the request leaves the queue or, where it was placed here, ends at
        its engine, which the gateway does not know."""
        request, attempt = message.request, message.attempt
        self._fence.close(request, attempt)
        for queue in (self.queue, self.prefills):
            queued = queue.get(request)
            if queued is not None and queued.generation.attempt <= attempt:
                queue.remove(request)
                return []
        placed = self._engines.get(request)
        if placed is None or placed.attempt > attempt:
            return []
        return [CancelOnEngine(placed.engine, Cancel(request, attempt))]

    def record_ended(self, message: RequestEnded) -> None:
        """A request of an API key has ended: the tokens that it was counted for are corrected to those that it
        generated."""
        self.queue.settle(message.request, message.generated)
        self.prefills.settle(message.request, message.generated)

    def pull(self, message: PullPrefills, at: Moment) -> list[Action]:
        """A prefill engine asks for prompts."""
        self.prefills.record_pull(message.engine, message.tokens)
        return self._give_prompts(at)

    def engine_unreachable(self, generate: GenerateRequest, at: Moment) -> list[Action]:
        """A Generate had no subscriber: the engine is gone, and the request goes elsewhere."""
        generation = generate.generation
        engine = self.engine_of(generation.request)
        if engine is None or not self._fence.is_current(generation.request, generation.attempt):
            return []
        self.fleet.mark_unreachable(engine)
        return self._admit(generation, at)

    def gateway_unreachable(
        self, message: RequestPlaced | RequestQueued | RequestRejected | RequestFailed
    ) -> list[Action]:
        """A message to a gateway had no subscriber: the gateway is gone, and its request is of no use."""
        return self.withdraw(Withdraw(message.request, message.attempt))

    def release_queue(self) -> list[Route]:
        """Empties the queue for another coordinator to take over; nothing where there is none. A request that none
        takes over is to be given back by `route`."""
        if not self.fleet.peers:
            return []
        routes = [Route(generation) for generation in (*self.queue.clear(), *self.prefills.clear())]
        for route in routes:
            self._fence.readmit(route.generation.request)
        return routes

    def engine_of(self, request: RequestId) -> EngineId | None:
        """Where the request was placed last; None where that is not known."""
        placed = self._engines.get(request)
        return None if placed is None else placed.engine

    # ---- what is seen of other services

    def lifecycle(self, life: Lifecycle, at: Moment) -> list[Action]:
        """An instance's heartbeat; a report that shows room empties the queue."""
        gone = self.fleet.record_lifecycle(life, at)
        if gone is not None:
            self.sources.forget(gone)
            self._outliers.forget(EngineId(gone))
            self.prefills.forget(EngineId(gone))
            self._links.forget(gone)
        if life.store is not None and life.phase not in ("stopped", "failed"):
            self._links.record(life.instance, life.store)
        if life.phase not in ("stopped", "failed") and (life.engine is not None or life.store is not None):
            self.sources.follow(life.instance)
        return self._place_queued(at) if life.service in ("scheduler", "detokenizer") else []

    def time_passed(self, at: Moment) -> list[Action]:
        """Forgets silent instances, rejects requests that waited for too long, notifies the gateways of the others."""
        for silent in self.fleet.expire(at):
            self.sources.forget(silent)
            self._links.forget(silent)
            self._outliers.forget(EngineId(silent))
            self.prefills.forget(EngineId(silent))
        self.sources.tidy()
        actions = self._place_queued(at)
        for queued in list(self.prefills):
            actions += self._place_unpulled(queued, at) or self._notify_queued(queued, at)
        for queued in list(self.queue):
            actions += self._reject_overdue(queued, at) or self._notify_queued(queued, at)
        return actions

    def record_announcement(self, made: PlacementMade, at: Moment) -> None:
        """A coordinator, which may be this one, has placed a request."""
        if made.coordinator == self._instance:
            return
        prefix = PromptPrefix(made.model, made.prompt, made.prompt_blocks)
        if self._expected.engine_for(prefix, at.now) == made.engine:  # the prompt is computed once
            own = prefix.blocks
            made = replace(made, reused=max(made.reused, own), on_device=max(made.on_device, own))
        self.fleet.record_announcement(made, at)
        self._expected.add(prefix, made.engine, at.now)

    def blocks_changed(self, message: KvEvents | KvDump, at: Moment) -> None:
        """An engine or a KV store says what it holds."""
        if isinstance(message, KvEvents):
            self.sources.record_events(message, at.now)
        else:
            self.sources.record_dump(message, at.now)

    def dumps_due(self, at: Moment) -> list[InstanceId]:
        """The engines and KV stores to request a dump from now; each request is recorded as made."""
        return self.sources.dumps_due(at.now) if self.sources.requests.needed else []

    # ---- engines that fail

    def _record_failure(self, generation: Generation, placed: _Placed | None, at: Moment) -> list[Action]:
        """Records that the last engine which this attempt avoids failed the one before. An engine that fails too many
        is ejected here at once, and everywhere else once it has reported it."""
        engine, request = generation.avoid[-1], generation.request
        if len(generation.avoid) > 1:
            self._outliers.exonerate(request)
            return []
        since = placed.at if placed is not None and placed.engine == engine else None
        if since is not None:
            self.fleet.doubt(engine, since, at)
        self._outliers.record_failure(engine, request, since, at.now)
        reason = self._outliers.evidence(engine, at.now)
        if reason is None or not self.fleet.accuse(engine, at):
            return []
        self._outliers.forget(engine)
        return [AccuseEngine(engine, OutlierReport(reason))]

    # ---- the queue

    def _admit(self, generation: Generation, at: Moment) -> list[Action]:
        """Places the request at once where nothing waits and there is room; queues it otherwise."""
        generation = self._bounded(generation)
        if not self.queue and self.fleet.has_room(generation.model, fair=is_fair(generation)):
            actions = self._place(generation, at, at.now)
            if actions:
                return actions
        refused = self._refusal(generation)
        if refused is not None:
            return [NotifyGateway(generation.gateway, refused)]
        full = len(self.queue) >= self.config.queue_limit and generation.request not in self.queue
        queued = self.queue.add(generation, at.now)
        actions = self._place_queued_for(generation.model, at)
        if self.queue.get(generation.request) is not queued:
            return actions
        if full:
            surplus = self.queue.surplus(queued)
            actions += self._reject(surplus, "overloaded", "the queue for an engine is full", at)
            if surplus is queued:
                return actions
        return [*actions, *(self._reject_overdue(queued, at) or self._notify_queued(queued, at))]

    def _place_queued(self, at: Moment) -> list[Action]:
        return [action for model in self.queue.models() for action in self._place_queued_for(model, at)]

    def _place_queued_for(self, model: ModelName, at: Moment) -> list[Action]:
        """Places the requests that can be placed, in order. One that waits because it avoids an engine holds up none
        behind it."""
        actions: list[Action] = []
        for queued in self.queue.in_order(model):
            if not self.fleet.has_room(model, fair=is_fair(queued.generation)):
                break
            ended = self._place(queued.generation, at, queued.since)
            if ended:
                placed = any(isinstance(action, PlaceRequest) for action in ended)
                self.queue.remove(queued.generation.request, placed=placed)
            actions += ended
        return actions

    def _place(self, generation: Generation, at: Moment, since: float) -> list[Action]:
        """Places a request that came at `since`. Rejects it if it was queued before its model was known and the model
        cannot hold it; does nothing if no engine takes it."""
        generation = self._bounded(generation)
        refused = self._refusal(generation)
        if refused is not None:
            return [NotifyGateway(generation.gateway, refused)]
        whole = self.config.prefill_queue or generation.kept is not None  # what is kept is prefilled already
        if self.config.prefill_queue and generation.kept is None and (waits := self._await_pull(generation, at, since)):
            return waits
        return self._send(self._router.choose(generation, at.now, whole=whole), generation, at, since)

    def _send(self, placement: Placement | None, generation: Generation, at: Moment, since: float) -> list[Action]:
        """Sends the request where it was placed, if it was."""
        if placement is None:
            return []
        engine, reuse = placement.engine, placement.reuse
        source = reuse.remote_node
        if source is None and generation.kept is not None:
            source = generation.kept.node  # known sooner from the client than from the store's events
        self.fleet.record_placement(placement, at)
        self._expected.add(placement.prefix, engine, at.now)
        self._engines[generation.request] = _Placed(engine, generation.attempt, at.now)
        self._outliers.record_placement(engine, at.now)
        generate = GenerateRequest(
            generation,
            placement.detokenizer,
            decode_on=placement.decode_on,
            kv_source=source,
            predicted_cached=reuse.blocks * self.config.block_size,
            decode_node=placement.decode_node,
            prefill_on=placement.prefill_on,
            remote_from=placement.remote_from,
        )
        announcement = placement.announcement(self._instance) if self.fleet.peers else None
        return [PlaceRequest(engine, generate, at.now - since, reuse, placement.blocks, announcement)]

    def _wrongly_hashed(self, generation: Generation) -> RequestFailed | None:
        """The failure of a request whose tokenizer has another block size: another tokenizer may do better."""
        if not generation.prefix_caching:
            return None
        tokens, size = len(generation.tokens) // TOKEN_BYTES, self.config.block_size
        hashed = len(generation.block_hashes) // HASH_BYTES
        if hashed == tokens // size:
            return None
        theirs = f"{hashed} blocks of {tokens} tokens, where blocks of {size} are {tokens // size}"
        reason = f"its tokenizer hashed {theirs}: --block-size must be the same in all of a stack"
        return RequestFailed(generation.request, generation.attempt, reason)

    # ---- prompts that prefill engines pull

    def _await_pull(self, generation: Generation, at: Moment, since: float) -> list[Action]:
        """Has the prompt wait for a prefill engine. Does nothing if the engine that decodes had better compute it:
        because it is short, there is no such engine, or too many wait already."""
        tokens = self._router.tokens_to_prefill(generation, at.now)
        engines = len(self.fleet.prefill_candidates(generation))
        if tokens is None or not engines:
            return []
        if self.prefills.tokens + tokens > self.config.disaggregate_busy * engines:
            return []
        queued = self.prefills.add(generation, tokens, since)
        given = self._give_prompts(at)
        waits = self.prefills.get(generation.request) is queued
        return [*given, *self._notify_queued(queued, at)] if waits else given

    def _give_prompts(self, at: Moment) -> list[Action]:
        """Gives waiting prompts to the engines that have asked for some, in order, as long as any of them has room."""
        actions: list[Action] = []
        for model in self.prefills.models():
            for queued in list(self.prefills.in_order(model)):
                generation = queued.generation
                placement = self._router.choose_pulled(generation, at.now, self.prefills.room_of)
                if placement is None:
                    break
                actions += self._send(placement, generation, at, queued.since)
                if placement.decode_on is None:
                    self.prefills.remove(generation.request, placed=True)
                else:
                    self.prefills.give(placement.engine, generation.request)
        return actions

    def _place_unpulled(self, queued: QueuedRequest, at: Moment) -> list[Action]:
        """A prompt that waits for too long, or that no engine can pull any more, goes to an engine that decodes."""
        generation = queued.generation
        if at.now - queued.since <= self.config.prefill_queue_s and self.fleet.prefill_candidates(generation):
            return []
        placed = self._send(self._router.choose(generation, at.now, whole=True), generation, at, queued.since)
        if placed:
            self.prefills.remove(generation.request, placed=True)
            return placed
        return self._reject_overdue(queued, at)

    def _bounded(self, generation: Generation) -> Generation:
        """The request with its output limit lowered to what fits into its model's context, if that is known."""
        length = self.fleet.max_model_len(generation.model)
        if length is None:
            return generation
        stopping = generation.stopping.within(generation.prompt_length, length)
        return generation if stopping is generation.stopping else replace(generation, stopping=stopping)

    def _refusal(self, generation: Generation) -> RequestRejected | None:
        """The rejection of a request that does not fit into its model's context, or whose adapter is gone; None if it
        fits, or if that is not known."""
        if self.fleet.lacks_lora(generation):
            return _lora_gone(generation)
        length = self.fleet.max_model_len(generation.model)
        return None if length is None or fits(generation, length) else _context_exceeded(generation, length)

    def _reject_overdue(self, queued: QueuedRequest, at: Moment) -> list[Action]:
        """Rejects a request that has waited for too long. How long a new request waits while nobody can serve it is up
        to its gateway."""
        if at.now - queued.since <= self.config.queue_timeout:
            return []
        waited = f"waited {self.config.queue_timeout:g} s"
        if (missing := self.fleet.missing(queued.generation.model)) is not None:
            return self._reject(queued, "unavailable", f"{waited}, but {missing}", at)
        return self._reject(queued, "overloaded", f"{waited}, but every engine is full", at)

    def _notify_queued(self, queued: QueuedRequest, at: Moment) -> list[Action]:
        """Lets its gateway know that the request waits, once every RENEW_SECONDS."""
        if queued.notified is not None and at.now - queued.notified < RENEW_SECONDS:
            return []
        queued.notified = at.now
        generation = queued.generation
        return [NotifyGateway(generation.gateway, RequestQueued(generation.request, generation.attempt))]

    def _reject(self, queued: QueuedRequest, kind: ErrorKind, message: str, at: Moment) -> list[Action]:
        """Rejects a request. The client is told to try again after as long as the oldest request in the queue has
        waited."""
        generation = queued.generation
        self.queue.remove(generation.request)
        self.prefills.remove(generation.request)
        oldest = self.queue.oldest(generation.model)
        waited = at.now - oldest.since if oldest is not None else 0.0
        rejected = RequestRejected(
            request=generation.request,
            attempt=generation.attempt,
            kind=kind,
            message=message,
            retry_after=float(min(MAX_RETRY_AFTER, max(1, math.ceil(waited)))),
        )
        return [NotifyGateway(generation.gateway, rejected)]


def _lora_gone(generation: Generation) -> RequestRejected:
    return RequestRejected(
        request=generation.request,
        attempt=generation.attempt,
        kind="invalid_request",
        message="model: the adapter has been unloaded",
        field="model",
    )


def _context_exceeded(generation: Generation, max_model_len: int) -> RequestRejected:
    """In the words that clients of vLLM know.

    Resumed tokens count as output, so that every attempt is judged alike. The field is `messages` because only
    the gateway knows whether the client sent `messages` or `prompt`; it may put its own.
    """
    length, wanted = generation.prompt_length, generation.stopping.max_tokens
    context = f"This model's maximum context length is {max_model_len} tokens"
    if generation.pooling is not None:
        field = "messages"
        message = f"{context}. However, your request has {length} input tokens. Please reduce the length of the input."
    elif length >= max_model_len or wanted is None:
        field = "messages"
        message = (
            f"{context}. However, your request has {length} input tokens, and the output needs one at least. "
            "Please reduce the length of the input."
        )
    else:
        field = "max_tokens"
        message = (
            f"'max_tokens' or 'max_completion_tokens' is too large: {wanted}. {context} and your request has "
            f"{length} input tokens ({wanted} > {max_model_len} - {length})."
        )
    return RequestRejected(
        request=generation.request,
        attempt=generation.attempt,
        kind="invalid_request",
        message=message,
        field=field,
        code="context_length_exceeded",
    )
