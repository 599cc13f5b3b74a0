"""The engines and detokenizers as one coordinator sees them: who lives, who has room, what they have in hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from services.coordinator.core.actions import Moment
from services.coordinator.core.admission import fits
from services.coordinator.core.choice import Choice
from services.coordinator.core.engine import Engine
from services.coordinator.core.limits import Limits
from services.coordinator.core.load import share
from services.coordinator.core.policies import in_turn
from services.coordinator.core.reservations import Reservations, Reserved
from shared.ids import DetokenizerId, EngineId, InstanceId, ModelName
from shared.messages.coordinator import PlacementMade
from shared.messages.generation import Generation
from shared.messages.lifecycle import Lifecycle, ModelCard, Role
from shared.registry import Registry

DECODING: frozenset[Role] = frozenset(("mixed", "decode"))
PREFILLING: frozenset[Role] = frozenset(("prefill",))


class Seat(NamedTuple):
    """An engine that takes one more request, and what was placed there that its report does not hold yet."""

    engine: Engine
    placed: Reserved


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
        self._told = Reservations(limits.settle_seconds)
        """What other coordinators have placed."""
        self._unreachable: set[InstanceId] = set()
        self._everyone = [instance]
        self._models_heard: dict[ModelName, float] = {}
        self._engines: dict[InstanceId, Engine] = {}
        """Everybody alive that said what it serves."""
        self._ready: dict[ModelName, list[Engine]] = {}
        """Those asked for since the last change, by name; as `_cards`."""
        self._cards: dict[ModelName, ModelCard | None] = {}
        self._detokenizers: list[Lifecycle] | None = None
        self._detokenizer_heard: float | None = None

    @property
    def turn(self) -> int:
        """Goes on with each placement."""
        return self._turn

    def heard(self, life: Lifecycle, at: Moment) -> InstanceId | None:
        """Takes a sign of life in; answers with the instance where its former life has ended. Whoever was unreachable
        is reachable again from the next one on."""
        gone = self.registry.heard(life, at.alive)
        self._note(life)
        if gone is not None:
            self._forget_placed(life.instance)
        if life.service in ("scheduler", "detokenizer"):
            self._unreachable.discard(life.instance)
            self._placed.reported(life.instance, at.now)
            self._told.reported(life.instance, at.now)
        if life.service == "detokenizer":
            self._detokenizer_heard = at.alive
        if life.service == "coordinator":
            self._count_coordinators()
        for report in (life.engine, life.worker):
            if report is not None:
                self._models_heard[report.model.name] = at.alive
        return gone.last.instance if gone is not None else None

    def expire(self, at: Moment) -> list[InstanceId]:
        """Forgets who was silent for too long, and answers with them."""
        silent = [gone.last.instance for gone in self.registry.expire(at.alive)]
        for instance in silent:
            self._forget_placed(instance)
            self._unreachable.discard(instance)
            self._engines.pop(instance, None)
        self._forget_who_is_ready()
        self._count_coordinators()
        for model, heard in list(self._models_heard.items()):
            if not self._recent(heard, at):
                del self._models_heard[model]
        return silent

    def unreachable(self, engine: EngineId) -> None:
        """Nobody listens there: nothing goes to it until it is heard of again."""
        self._unreachable.add(InstanceId(engine))
        self._forget_who_is_ready()
        self._forget_placed(InstanceId(engine))

    def card(self, model: ModelName) -> ModelCard | None:
        """The model as its engines describe it; the one with the longest context, where they differ."""
        if model not in self._cards:
            cards = [e.report.model for e in self._engines.values() if e.report.model.name == model]
            self._cards[model] = max(cards, key=lambda card: card.max_model_len, default=None)
        return self._cards[model]

    def ready(self, model: ModelName) -> list[Engine]:
        """The engines that may take requests for `model`, full or not, by name."""
        ready = self._ready.get(model)
        if ready is None:
            ready = [
                engine
                for engine in self._engines.values()
                if engine.phase == "ready"
                and engine.report.model.name == model
                and engine.life.instance not in self._unreachable
            ]
            ready.sort(key=lambda engine: engine.id)
            self._ready[model] = ready
        return ready

    def missing(self, model: ModelName) -> str | None:
        """What a request for `model` cannot do without, and is not ready; None where all is there."""
        if not self.ready(model):
            return f"no engine for the model {model!r} is ready"
        return None if self._ready_detokenizers() else "no detokenizer is ready"

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
        ready, place = self.ready(model), self._place()
        able = [e for e in ready if e.report.role in DECODING] or ready
        return bool(self._ready_detokenizers()) and any(self._room(e, place) > 0 for e in able)

    def decoding(self, generation: Generation) -> list[Seat]:
        """Who may take the whole of a request, by name; nobody where all are full.

        Prefill engines decode where there is no other. Engines to be avoided count only where there is nobody else,
        full ones included.
        """
        ready = self._fitting(generation)
        others = [e for e in ready if e.id not in generation.avoid]
        able = [e for e in others or ready if e.report.role in DECODING]
        return self._seats(able or others or ready)

    def handing_over(self, generation: Generation) -> list[Seat]:
        """The prefill engines that may take a request and hand it over; none that is to be avoided."""
        return self._seats(
            engine
            for engine in self._fitting(generation)
            if engine.report.role in PREFILLING and engine.id not in generation.avoid
        )

    def detokenizer(self) -> DetokenizerId | None:
        """One with the least work; None where there is none."""
        least = self._least_loaded_detokenizers()
        return in_turn(least, self._turn) if least else None

    def place(self, choice: Choice, at: Moment) -> None:
        """Counts a placement, until the receivers' reports do."""
        reuse, blocks = choice.reuse, choice.blocks
        self._placed.add(InstanceId(choice.engine), at.now, prefill=blocks - reuse.blocks, blocks=blocks - reuse.device)
        if choice.decode_on is not None:
            later = self._limits.hand_over_seconds
            self._placed.add(InstanceId(choice.decode_on), at.now, blocks=blocks, later=later)
        self._placed.add(InstanceId(choice.detokenizer), at.now)
        self._turn += 1

    def placed_elsewhere(self, told: PlacementMade, at: Moment) -> None:
        """Counts what another coordinator has placed, until reports do: so of those only that report."""
        left, taken = told.blocks - told.reused, told.blocks - told.on_device
        self._count_told(InstanceId(told.engine), at, prefill=left, blocks=taken)
        if told.decode_on is not None:
            self._count_told(InstanceId(told.decode_on), at, blocks=told.blocks, later=self._limits.hand_over_seconds)
        self._count_told(InstanceId(told.detokenizer), at)

    def _count_told(
        self, instance: InstanceId, at: Moment, *, prefill: int = 0, blocks: int = 0, later: float = 0.0
    ) -> None:
        if instance in self._engines or any(life.instance == instance for life in self._ready_detokenizers()):
            self._told.add(instance, at.now, prefill=prefill, blocks=blocks, later=later)

    def other_coordinators(self) -> bool:
        return len(self._everyone) > 1

    def _forget_placed(self, instance: InstanceId) -> None:
        self._placed.forget(instance)
        self._told.forget(instance)

    def _in_hand(self, instance: InstanceId) -> Reserved:
        return self._placed.on(instance).plus(self._told.on(instance))

    def _note(self, life: Lifecycle) -> None:
        """Keeps what is asked of the registry again and again."""
        if life.service == "scheduler":
            alive = self.registry.get("scheduler", life.instance)
            if alive is not None and alive.engine is not None:
                self._engines[life.instance] = Engine.of(alive, alive.engine, self._limits.engine_fill)
            else:
                self._engines.pop(life.instance, None)
        if life.service in ("scheduler", "detokenizer"):
            self._forget_who_is_ready()

    def _forget_who_is_ready(self) -> None:
        self._ready.clear()
        self._cards.clear()
        self._detokenizers = None

    def _recent(self, heard: float | None, at: Moment) -> bool:
        return heard is not None and at.alive - heard <= self._limits.expect_seconds

    def _count_coordinators(self) -> None:
        """Who places requests at the moment, this one always among them."""
        ready = {life.instance for life in self.registry.all("coordinator", "ready")}
        self._everyone = sorted(ready | {self._instance})

    def _fitting(self, generation: Generation) -> list[Engine]:
        return [e for e in self.ready(generation.model) if fits(generation, e.report.model.max_model_len)]

    def _seats(self, engines: Iterable[Engine]) -> list[Seat]:
        """Those with room."""
        place = self._place()
        return [
            Seat(engine, self._in_hand(engine.life.instance)) for engine in engines if self._room(engine, place) > 0
        ]

    def _place(self) -> int:
        """Of this coordinator among all."""
        return self._everyone.index(self._instance)

    def _room(self, engine: Engine, place: int) -> int:
        """This coordinator's share of the engine's room, less what it has placed there since the report. Shares, as two
        that hear of each other's placements a moment late would both take the last place.

        What does not divide goes round with the engine's own message count, which all coordinators see alike.
        """
        placed = self._placed.on(engine.life.instance).requests
        if len(self._everyone) == 1:
            return engine.room - placed
        return share(engine.room, len(self._everyone), place + engine.life.progress) - placed

    def _least_loaded_detokenizers(self) -> list[DetokenizerId]:
        ready = self._ready_detokenizers()
        loads = {life.instance: life.load + self._in_hand(life.instance).requests for life in ready}
        least = min(loads.values(), default=0)
        return sorted(DetokenizerId(instance) for instance, load in loads.items() if load == least)

    def _ready_detokenizers(self) -> list[Lifecycle]:
        if self._detokenizers is None:
            ready = self.registry.all("detokenizer", "ready")
            self._detokenizers = [life for life in ready if life.instance not in self._unreachable]
        return self._detokenizers
