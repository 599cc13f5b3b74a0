"""The requests that the engine has taken in, each until its last word."""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.core.answers import Answers, failed, uncompilable
from services.scheduler.core.grammars import Waited
from services.scheduler.core.hand_overs import HandOvers
from services.scheduler.core.places import Places
from services.scheduler.core.sequence import Sequence
from shared.ids import RequestId


class Requests:
    """Owns them in one epoch: when that is over, all have ended."""

    def __init__(self, answers: Answers, places: Places, hand_overs: HandOvers) -> None:
        self.held: dict[RequestId, Sequence] = {}
        self._answers = answers
        self._places = places
        self._hand_overs = hand_overs

    def add(self, sequence: Sequence) -> None:
        self.held[sequence.generation.request] = sequence
        self._places.accept(sequence)

    def end(self, sequence: Sequence, *, tell_detokenizer: bool) -> None:
        del self.held[sequence.generation.request]
        self._hand_overs.forget(sequence)
        self._places.end(sequence)
        self._answers.over(sequence, tell_detokenizer=tell_detokenizer)

    def end_where(self, concerned: Callable[[Sequence], bool]) -> None:
        """Nobody listens any more."""
        for sequence in [s for s in self.held.values() if concerned(s)]:
            self.end(sequence, tell_detokenizer=True)

    def fail_where(self, concerned: Callable[[Sequence], bool], reason: str, *, tell_detokenizer: bool) -> None:
        for sequence in [s for s in self.held.values() if concerned(s)]:
            self.end(sequence, tell_detokenizer=tell_detokenizer)
            self._answers.tell(sequence.generation, failed(sequence.generation, reason))

    def waited(self, waited: list[Waited]) -> None:
        """What became of grammars that sequences have waited for."""
        for sequence, error in waited:
            if error is None:
                self._places.compiled(sequence)
            else:
                self.end(sequence, tell_detokenizer=True)
                self._answers.tell(sequence.generation, uncompilable(sequence.generation, error))
