"""Passes requests on to the engines that decode them, once their blocks are in the store; or keeps them."""

from __future__ import annotations

from services.scheduler.core.answers import Answers, failed
from services.scheduler.core.events import NotTaken, PassOn
from services.scheduler.core.hand_overs import PassedOn, Peers, Settled, handed
from services.scheduler.core.serving import Serving
from services.scheduler.core.store import Store
from services.scheduler.core.tally import Tally
from shared.ids import EngineId
from shared.messages.gateway import Placed
from shared.messages.scheduler import Cancel, StopMatched


class PassingOn:
    """Owns where requests have gone, and who takes any. Outlives epochs."""

    def __init__(self, engine: EngineId, answers: Answers, store: Store, tally: Tally) -> None:
        self.peers = Peers()
        self._engine = engine
        self._answers = answers
        self._store = store
        self._tally = tally
        self._passed_on = PassedOn()

    def possible(self, engine: EngineId) -> bool:
        """Whether anything can be handed over to `engine`."""
        return self._store.attached and engine != self._engine and self.peers.take_over(engine)

    def hand_over(self, serving: Serving, settled: Settled) -> None:
        """To the engine that goes on; or back into our own line, where it would have to compute what is not saved."""
        sequence = settled.sequence
        engine = sequence.decode_on
        if not settled.good or engine is None or not self.peers.take_over(engine):
            self._tally.kept += 1
            serving.planner.places.keep(sequence)
            return
        self._tally.handed_over += 1
        self._answers.streams.move(sequence, engine)
        self._answers.flush()  # the first token must be there before the second is drawn
        generation = sequence.generation
        placed = Placed(generation.request, generation.attempt, engine, sequence.detokenizer, self._engine)
        self._answers.tell(generation, placed)
        self._answers.add(PassOn(engine, handed(settled, self._engine, self._store.node)))
        self._passed_on.add(generation, engine, sequence.detokenizer)
        serving.requests.end(sequence, tell_detokenizer=False)

    def not_taken(self, event: NotTaken) -> None:
        """Whom we passed a request on to is gone."""
        generation = event.generate.generation
        self._answers.streams.disown(event.generate.detokenizer, generation.request, generation.attempt)
        if self._passed_on.came_back(generation):  # else nobody wants it any more
            self._answers.tell(generation, failed(generation, f"{event.engine} does not take it over"))

    def called_off(self, message: Cancel | StopMatched) -> None:
        """Tells whoever has the request, where it is one of those."""
        if (relay := self._passed_on.called_off(message)) is not None:
            self._answers.add(relay)
