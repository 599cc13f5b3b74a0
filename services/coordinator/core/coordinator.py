"""Decides which engine gets each request. No bus, no clock: messages and time in, actions out."""

from __future__ import annotations

import math

from msgspec.structs import replace

from services.coordinator.core.actions import Action, CancelAt, Moment, Place, Tell
from services.coordinator.core.admission import refusal
from services.coordinator.core.expected_prompts import ExpectedPrompts, Prompt, prompt_of
from services.coordinator.core.fence import Fence
from services.coordinator.core.fleet import Fleet
from services.coordinator.core.kv_sources import KvSources
from services.coordinator.core.limits import Limits
from services.coordinator.core.router import Router
from services.coordinator.core.routing import Routing
from services.coordinator.core.waiting_line import Waiting, WaitingLine
from shared.ids import EngineId, InstanceId, ModelName, RequestId
from shared.messages.coordinator import PlacementMade, Route, Withdraw
from shared.messages.gateway import ErrorKind, Placed, Queued, Rejected
from shared.messages.generation import Generation
from shared.messages.kv_events import KvDump, KvEvents
from shared.messages.lifecycle import Lifecycle
from shared.messages.scheduler import Cancel, Generate

MAX_RETRY_AFTER = 60.0


class Coordinator:
    """Owns where requests go: who is alive, who waits, which attempts are stale, which blocks are cached where.

    Each Route that is not stale ends in exactly one Place, one Rejected, or a Withdraw; until then it waits, and
    its gateway is told so again and again. A Place that found nobody counts as not made.
    """

    def __init__(
        self,
        instance: InstanceId,
        limits: Limits,
        routing: Routing | None = None,
        *,
        turn: int = 0,
        since: float = 0.0,
    ) -> None:
        """`turn`: see Fleet. `since`: the liveness clock at the start."""
        self._instance = instance
        self.limits = limits
        self.routing = routing or Routing()
        self.fleet = Fleet(instance, limits, turn, since)
        self.sources = KvSources(self.routing.index_blocks)
        self.line = WaitingLine()
        self._expected = ExpectedPrompts()
        self._router = Router(self.fleet, self.sources, self._expected, self.routing)
        self._fence = Fence(limits.remembered)

    def route(self, route: Route, at: Moment) -> list[Action]:
        """A request asks for an engine. Stale attempts are dropped: their gateway has moved on."""
        generation = route.generation
        if not self._fence.take(generation.request, generation.attempt):
            return []
        return self._admit(generation, at)

    def withdraw(self, message: Withdraw) -> bool:
        """The client went away. True where the request waited here."""
        self._fence.withdraw(message.request, message.attempt)
        waiting = self.line.get(message.request)
        if waiting is None or waiting.generation.attempt > message.attempt:
            return False
        self.line.remove(message.request)
        return True

    def lifecycle(self, life: Lifecycle, at: Moment) -> list[Action]:
        """Somebody's sign of life; a report that shows room empties the line."""
        gone = self.fleet.heard(life, at)
        if gone is not None:
            self.sources.gone(gone)
        if holds_blocks(life):
            self.sources.alive(life.instance)
        return self._pump_all(at) if life.service in ("scheduler", "detokenizer") and len(self.line) else []

    def time_passed(self, at: Moment) -> list[Action]:
        """Forgets the silent, rejects who waited for too long or in vain, tells the others that they wait."""
        for gone in self.fleet.expire(at):
            self.sources.gone(gone)
        self.sources.tidy()
        actions = self._pump_all(at)
        for waiting in list(self.line):
            actions += self._reject_hopeless(waiting, at) or self._renew(waiting, at)
        return actions

    def placed_elsewhere(self, told: PlacementMade, at: Moment) -> None:
        """A coordinator, which may be this one, has placed a request."""
        if told.coordinator == self._instance:
            return
        prompt = Prompt(told.model, told.prompt, told.prompt_blocks)
        expected = self._expected.of(prompt, at.now)
        if expected is not None and expected.engine == InstanceId(told.engine):  # it is computed once
            own = expected.blocks
            told = replace(told, reused=max(told.reused, own), on_device=max(told.on_device, own))
        self.fleet.placed_elsewhere(told, at)
        self._expected.place(prompt, told.engine, at.now)

    def blocks_changed(self, message: KvEvents | KvDump, at: Moment) -> None:
        """A source of cached blocks says what it holds."""
        if isinstance(message, KvEvents):
            self.sources.events(message, at.now)
        else:
            self.sources.dumped(message, at.now)

    def dumps_wanted(self, at: Moment) -> list[InstanceId]:
        """Who is to be asked now for all that it holds; each counts as asked."""
        return self.sources.requests.due(at.now)

    def engine_unreachable(self, generate: Generate, at: Moment) -> list[Action]:
        """A Generate had no subscriber: the engine is gone, and the request goes elsewhere."""
        generation = generate.generation
        engine = self._fence.engine_of(generation.request)
        if engine is None or not self._fence.wants(generation.request, generation.attempt):
            return []
        self.fleet.unreachable(engine)
        return self._admit(generation, at)

    def gateway_unreachable(self, message: Placed | Queued | Rejected) -> list[Action]:
        """A message to a gateway had no subscriber: it is gone, and nobody wants the answer."""
        self.withdraw(Withdraw(message.request, message.attempt))
        if isinstance(message, Placed):
            return [CancelAt(message.engine, Cancel(message.request, message.attempt))]
        return []

    def hand_over(self) -> list[Route]:
        """Empties the line for another coordinator to take; nothing where there is none. What it does not take
        comes back as a `route`."""
        if not self.fleet.other_coordinators():
            return []
        routes = [Route(generation) for generation in self.line.clear()]
        for route in routes:
            self._fence.release(route.generation.request)
        return routes

    def engine_of(self, request: RequestId) -> EngineId | None:
        """Where the request was placed last."""
        return self._fence.engine_of(request)

    def _admit(self, generation: Generation, at: Moment) -> list[Action]:
        if (refused := self._refusal(generation)) is not None:
            return [Tell(generation.gateway, refused)]
        full = len(self.line) >= self.limits.queue and generation.request not in self.line
        waiting = self.line.add(generation, at.now)
        actions = self._pump(generation.model, at)
        if self.line.get(generation.request) is not waiting:
            return actions
        if full:
            return [*actions, *self._reject(waiting, "overloaded", "the queue for an engine is full", at)]
        return [*actions, *(self._reject_hopeless(waiting, at) or self._renew(waiting, at))]

    def _refusal(self, generation: Generation) -> Rejected | None:
        card = self.fleet.card(generation.model)
        return refusal(generation, card) if card is not None else None

    def _pump_all(self, at: Moment) -> list[Action]:
        return [action for model in self.line.models() for action in self._pump(model, at)]

    def _pump(self, model: ModelName, at: Moment) -> list[Action]:
        """Places who can be placed, in order. Who waits for an engine that it need not avoid holds up nobody."""
        actions: list[Action] = []
        for waiting in self.line.of(model):
            if not self.fleet.has_room(model):
                break
            actions += self._try(waiting, at)
        return actions

    def _try(self, waiting: Waiting, at: Moment) -> list[Action]:
        generation = waiting.generation
        if (refused := self._refusal(generation)) is not None:  # queued before the model was known
            self.line.remove(generation.request)
            return [Tell(generation.gateway, refused)]
        choice = self._router.choose(generation, at.now)
        if choice is None:
            return []
        self.line.remove(generation.request)
        self.fleet.place(choice, at)
        prompt = prompt_of(generation)
        self._expected.place(prompt, choice.engine, at.now)
        self._fence.placed(generation.request, choice.engine)
        told = choice.told(self._instance, prompt) if self.fleet.other_coordinators() else None
        generate = Generate(
            generation,
            choice.detokenizer,
            decode_on=choice.decode_on,
            kv_source=choice.reuse.remote_node,
            predicted_cached=choice.predicted_cached,
        )
        return [Place(choice.engine, generate, at.now - waiting.since, choice.reuse, choice.blocks, told)]

    def _reject_hopeless(self, waiting: Waiting, at: Moment) -> list[Action]:
        """Rejects who has waited for too long, or for what is not expected any more."""
        model = waiting.generation.model
        missing = self.fleet.missing(model)
        if missing is not None and not self.fleet.expected(model, at):
            return self._reject(waiting, "unavailable", missing, at)
        if at.now - waiting.since <= self.limits.queue_seconds:
            return []
        waited = f"waited {self.limits.queue_seconds:g} s"
        if missing is not None:
            return self._reject(waiting, "unavailable", f"{waited}, but {missing}", at)
        return self._reject(waiting, "overloaded", f"{waited}, but every engine is full", at)

    def _renew(self, waiting: Waiting, at: Moment) -> list[Action]:
        if waiting.told is not None and at.now - waiting.told < self.limits.renew_seconds:
            return []
        waiting.told = at.now
        generation = waiting.generation
        return [Tell(generation.gateway, Queued(generation.request, generation.attempt))]

    def _reject(self, waiting: Waiting, kind: ErrorKind, message: str, at: Moment) -> list[Action]:
        generation = waiting.generation
        self.line.remove(generation.request)
        rejected = Rejected(
            request=generation.request,
            attempt=generation.attempt,
            kind=kind,
            message=message,
            retry_after=self._retry_after(generation.model, at),
        )
        return [Tell(generation.gateway, rejected)]

    def _retry_after(self, model: ModelName, at: Moment) -> float:
        """As long as the first in line has waited by now: what a place in the line costs at the moment."""
        first = self.line.of(model)[:1]
        waited = at.now - first[0].since if first else 0.0
        return float(min(MAX_RETRY_AFTER, max(1, math.ceil(waited))))


def holds_blocks(life: Lifecycle) -> bool:
    """Whether this is an engine that serves, or a KV store: alive, and with blocks to tell of."""
    return life.phase not in ("stopped", "failed") and (life.engine is not None or life.store is not None)
