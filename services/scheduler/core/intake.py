"""Requests that come, and words that call them off."""

from __future__ import annotations

from services.scheduler.core import results
from services.scheduler.core.answers import Answers, failed, overloaded, uncompilable
from services.scheduler.core.passing_on import PassingOn
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.serving import Serving
from shared.messages.gateway import Rejected
from shared.messages.scheduler import Cancel, Generate, StopMatched

OVERLOADED_RETRY = 1.0
"""Seconds after which a client may try again when the waiting line is full."""


class Intake:
    """Owns the numbers that sequences are given, in the order of their coming. Outlives epochs: `serving` is what there
    is in the present one, None while there are no workers."""

    def __init__(self, max_waiting: int, answers: Answers, passing_on: PassingOn) -> None:
        self._max_waiting = max_waiting
        self._answers = answers
        self._passing_on = passing_on
        self._tickets = 0

    def generate(self, generate: Generate, serving: Serving | None) -> None:
        generation = generate.generation
        request, attempt = generation.request, generation.attempt
        held = None if serving is None else serving.requests.held.get(request)
        if self._answers.fence.bars(request, attempt) or (held is not None and held.generation.attempt >= attempt):
            self._answers.disown(generate)  # a cancel has overtaken it
            return
        if serving is None:
            self._answers.refuse(generate, failed(generation, "the engine has no workers"))
            return
        if held is not None:
            serving.requests.end(held, tell_detokenizer=True)
        self._tickets += 1
        self._admit(generate, serving)

    def _admit(self, generate: Generate, serving: Serving) -> None:
        generation = generate.generation
        admitted = serving.admission.admit(generate, self._tickets)
        if isinstance(admitted, Rejected):
            self._answers.refuse(generate, admitted)
        elif (error := serving.grammars.error(generation.grammar)) is not None:
            self._answers.refuse(generate, uncompilable(generation, error))
        elif serving.planner.places.lined_up >= self._max_waiting:
            message = f"{self._max_waiting} requests are waiting already, and no more may"
            self._answers.refuse(generate, overloaded(generation, message, OVERLOADED_RETRY))
        else:
            self._accept(admitted, serving)

    def _accept(self, sequence: Sequence, serving: Serving) -> None:
        other = sequence.decode_on
        if other is not None and not self._passing_on.possible(other):
            sequence.decode_on = None
        serving.requests.add(sequence)
        if len(sequence.tokens) >= sequence.limit:  # earlier attempts gave all that was asked for
            self._answers.streams.open(sequence, 0)
            self._answers.streams.add(sequence, results.entry(sequence, (), "length"))
            serving.requests.end(sequence, tell_detokenizer=False)

    def call_off(self, message: Cancel | StopMatched, serving: Serving | None) -> None:
        """Fences even what is unknown: a cancel can overtake the request that it cancels."""
        request, attempt = message.request, message.attempt
        self._answers.fence.close(request, attempt)
        sequence = None if serving is None else serving.requests.held.get(request)
        if serving is not None and sequence is not None and sequence.generation.attempt <= attempt:
            serving.requests.end(sequence, tell_detokenizer=isinstance(message, Cancel))
        elif isinstance(message, Cancel) and message.detokenizer is not None:
            self._answers.streams.disown(message.detokenizer, request, attempt)
        self._passing_on.called_off(message)
