"""The engines and detokenizers as one coordinator sees them, and which of them a request goes to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from services.coordinator.core.actions import Moment
from services.coordinator.core.admission import fits
from services.coordinator.core.limits import Limits
from services.coordinator.core.load import cost, room, share
from services.coordinator.core.reservations import Reservations
from shared.ids import DetokenizerId, EngineId, InstanceId, ModelName
from shared.messages.generation import Generation
from shared.messages.lifecycle import EngineReport, Lifecycle, ModelCard, Service
from shared.registry import Registry

T = TypeVar("T")


class Engine(NamedTuple):
    life: Lifecycle
    report: EngineReport

    @property
    def id(self) -> EngineId:
        return EngineId(self.life.instance)


class Choice(NamedTuple):
    engine: EngineId
    detokenizer: DetokenizerId


class Fleet:
    """Owns the registry, what was placed since the last reports, and who turned out to be unreachable.

    `turn` is where the rotation among equals starts; it should differ between coordinators, so that they do not
    all begin with the same engine.
    """

    def __init__(self, instance: InstanceId, limits: Limits, turn: int, since: float) -> None:
        self.registry = Registry()
        self._instance = instance
        self._limits = limits
        self._turn = turn
        self._since = since
        self._placed = Reservations(limits.settle_seconds)
        self._unreachable: set[InstanceId] = set()
        self._everyone = [instance]
        self._models_heard: dict[ModelName, float] = {}
        self._detokenizer_heard: float | None = None

    def heard(self, life: Lifecycle, at: Moment) -> None:
        """Takes a sign of life in. Whoever was unreachable is reachable again from the next one on."""
        gone = self.registry.heard(life, at.alive)
        if gone is not None:
            self._placed.forget(life.instance)
        if life.service in ("scheduler", "detokenizer"):
            self._unreachable.discard(life.instance)
            self._placed.reported(life.instance, at.now)
        if life.service == "detokenizer":
            self._detokenizer_heard = at.alive
        if life.service == "coordinator":
            self._count_coordinators()
        for report in (life.engine, life.worker):
            if report is not None:
                self._models_heard[report.model.name] = at.alive

    def expire(self, at: Moment) -> None:
        for gone in self.registry.expire(at.alive):
            self._placed.forget(gone.last.instance)
            self._unreachable.discard(gone.last.instance)
        self._count_coordinators()
        for model, heard in list(self._models_heard.items()):
            if not self._recent(heard, at):
                del self._models_heard[model]

    def unreachable(self, engine: EngineId) -> None:
        """Nobody listens there: nothing goes to it until it is heard of again."""
        self._unreachable.add(InstanceId(engine))
        self._placed.forget(InstanceId(engine))

    def card(self, model: ModelName) -> ModelCard | None:
        """The model as its engines describe it; the one with the longest context, where they differ."""
        cards = [e.report.model for e in self._engines() if e.report.model.name == model]
        return max(cards, key=lambda card: card.max_model_len, default=None)

    def ready(self, model: ModelName) -> list[Engine]:
        """The engines that may take requests for `model`, full or not."""
        return [
            engine
            for engine in self._engines()
            if engine.life.phase == "ready"
            and engine.report.model.name == model
            and engine.life.instance not in self._unreachable
        ]

    def missing(self, model: ModelName) -> str | None:
        """What a request for `model` cannot do without, and is not ready; None where all is there."""
        if not self.ready(model):
            return f"no engine for the model {model!r} is ready"
        return None if self._reachable("detokenizer") else "no detokenizer is ready"

    def expected(self, model: ModelName, at: Moment) -> bool:
        """Whether waiting makes sense: signs of what the model needs are recent, or of an engine yet to say what
        it serves. Until this coordinator has listened for long enough, everything is expected."""
        if self._recent(self._since, at):
            return True
        engine = self._recent(self._models_heard.get(model), at) or any(
            life.engine is None for life in self.registry.all("scheduler", "starting")
        )
        return engine and self._recent(self._detokenizer_heard, at)

    def has_room(self, model: ModelName) -> bool:
        """Whether some engine of `model` takes one more; a quick no for a long line."""
        return bool(self._least_loaded_detokenizers()) and any(self._room(e) > 0 for e in self.ready(model))

    def choose(self, generation: Generation) -> Choice | None:
        """The engine with the least work, and the detokenizer with the least; None where none has room.

        Engines to be avoided count only where there is no other, full ones included.
        """
        detokenizers = self._least_loaded_detokenizers()
        ready = [e for e in self.ready(generation.model) if fits(generation, e.report.model.max_model_len)]
        others = [e for e in ready if e.id not in generation.avoid]
        open_engines = [e for e in others or ready if self._room(e) > 0]
        if not open_engines or not detokenizers:
            return None
        costs = {e.id: self._cost(e) for e in open_engines}
        least = min(costs.values())
        engine = self._in_turn(sorted(id_ for id_, cost_ in costs.items() if cost_ == least))
        return Choice(engine, self._in_turn(detokenizers))

    def place(self, choice: Choice, at: Moment) -> None:
        """Counts a placement, until the receivers' reports do."""
        self._placed.add(InstanceId(choice.engine), at.now)
        self._placed.add(InstanceId(choice.detokenizer), at.now)
        self._turn += 1

    def other_coordinators(self) -> bool:
        return len(self._everyone) > 1

    def _engines(self) -> Iterator[Engine]:
        for life in self.registry.all("scheduler"):
            if life.engine is not None:
                yield Engine(life, life.engine)

    def _recent(self, heard: float | None, at: Moment) -> bool:
        return heard is not None and at.alive - heard <= self._limits.expect_seconds

    def _count_coordinators(self) -> None:
        """Who places requests at the moment, this one always among them."""
        ready = {life.instance for life in self.registry.all("coordinator", "ready")}
        self._everyone = sorted(ready | {self._instance})

    def _room(self, engine: Engine) -> int:
        """This coordinator's share of the engine's room, less what it has placed there since the report.

        What does not divide goes round with the engine's own message count, which all coordinators see alike.
        """
        turn = self._everyone.index(self._instance) + engine.life.progress
        whole = room(engine.report, self._limits.engine_fill)
        return share(whole, len(self._everyone), turn) - self._placed.count(engine.life.instance)

    def _cost(self, engine: Engine) -> int:
        """The other coordinators are taken to place as much as this one: they see the same reports."""
        return cost(engine.report, len(self._everyone) * self._placed.count(engine.life.instance))

    def _least_loaded_detokenizers(self) -> list[DetokenizerId]:
        ready = self._reachable("detokenizer")
        loads = {life.instance: life.load + self._placed.count(life.instance) for life in ready}
        least = min(loads.values(), default=0)
        return sorted(DetokenizerId(instance) for instance, load in loads.items() if load == least)

    def _reachable(self, service: Service) -> list[Lifecycle]:
        return [life for life in self.registry.all(service, "ready") if life.instance not in self._unreachable]

    def _in_turn(self, equals: list[T]) -> T:
        return equals[self._turn % len(equals)]
