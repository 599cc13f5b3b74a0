"""What the engine says to those outside, in order, and its last word on every attempt.

Last words: a `NewTokens` entry with `finish` (to the detokenizer), `Rejected` or `Failed` (to the gateway). A request
that the gateway or the detokenizer called off, or that a newer attempt replaces, ends in silence: who asked knows.
"""

from __future__ import annotations

from services.scheduler.core.events import Output, TellGateway
from services.scheduler.core.fence import Fence
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.streams import Streams
from shared.ids import EngineId, Incarnation
from shared.messages.gateway import Failed, Placed, Rejected
from shared.messages.generation import Generation
from shared.messages.scheduler import Generate


class Answers:
    """Owns what is to be sent, the streams of the present epoch, and which attempts are over. Outlives epochs."""

    def __init__(self, engine: EngineId, epoch: Incarnation) -> None:
        self.fence = Fence()
        self.streams = Streams(engine, epoch)
        """This epoch's, workers or not: what is handed over to us has a stream already, which we may have to end."""
        self._engine = engine
        self._outputs: list[Output] = []

    def begin(self, epoch: Incarnation) -> None:
        """Streams are numbered anew; nobody has one open any more."""
        self.flush()
        self.streams = Streams(self._engine, epoch)

    def add(self, output: Output) -> None:
        self._outputs.append(output)

    def tell(self, generation: Generation, message: Rejected | Failed | Placed) -> None:
        """To the request's gateway."""
        self._outputs.append(TellGateway(generation.gateway, message))

    def flush(self) -> None:
        """What was gathered for detokenizers comes before whatever is said next."""
        self._outputs += self.streams.flush()

    def take(self) -> list[Output]:
        """All that is to be sent by now."""
        self.flush()
        outputs, self._outputs = self._outputs, []
        return outputs

    def over(self, sequence: Sequence, *, tell_detokenizer: bool) -> None:
        """Its attempt is; the detokenizer need not be told what it knows by a token, or what it asked for."""
        self.fence.close(sequence.generation.request, sequence.generation.attempt)
        if tell_detokenizer:
            self.streams.abandon(sequence)

    def refuse(self, generate: Generate, answer: Rejected | Failed) -> None:
        """The last word on what was never taken in."""
        self.fence.close(answer.request, answer.attempt)
        if generate.handed is not None:
            answer = self._returned(generate, answer)
        self.tell(generate.generation, answer)

    def disown(self, generate: Generate) -> None:
        """Nobody goes on with the stream that moved here, if any has."""
        if generate.handed is not None:
            self.streams.disown(generate.detokenizer, generate.generation.request, generate.generation.attempt)

    def _returned(self, generate: Generate, answer: Rejected | Failed) -> Failed:
        """What was accepted elsewhere, and has been seen by its client, is tried again; its stream here is not."""
        self.disown(generate)
        if isinstance(answer, Failed):
            return answer
        return Failed(answer.request, answer.attempt, f"{self._engine} cannot take it over: {answer.message}")


def failed(generation: Generation, reason: str) -> Failed:
    return Failed(generation.request, generation.attempt, reason)


def overloaded(generation: Generation, message: str, retry_after: float) -> Rejected:
    request, attempt = generation.request, generation.attempt
    return Rejected(request=request, attempt=attempt, kind="overloaded", message=message, retry_after=retry_after)


def uncompilable(generation: Generation, error: str) -> Rejected:
    """Which of the client's fields the grammar came from, the gateway knows."""
    request, attempt = generation.request, generation.attempt
    return Rejected(request=request, attempt=attempt, kind="invalid_request", message=error, field="grammar")
