"""Suspects of a death: each is computed alone before it mixes with others again, so that the next death has one cause.

A suspect waits in a queue of its own (`SequenceQueues.suspects`). Its trial begins when no step is in flight, and lasts
until it has the tokens at which the process died, or has left. Then the others have their turn before the next trial.
"""

from __future__ import annotations

from services.scheduler.core.planning.decode import DecodePlanner
from services.scheduler.core.planning.prefill import Admission, PrefillPlanner
from services.scheduler.core.planning.step_builder import StepBuilder
from services.scheduler.core.queue.sequence_queues import SequenceQueues
from services.scheduler.core.sequence import Sequence

STEPS_BETWEEN = 4
"""Steps of other sequences between two trials, if there are others."""


class SuspectIsolation:
    """Owns which suspect is on trial, and how many steps the others have before the next one is. Where no suspect is
    queued or on trial, none of its methods need be called."""

    def __init__(
        self, queues: SequenceQueues, admission: Admission, prefills: PrefillPlanner, decodes: DecodePlanner
    ) -> None:
        self.current: Sequence | None = None
        """The sequence on trial: from its beginning on, the steps in flight hold nothing else."""
        self._queues = queues
        self._admission = admission
        self._prefills = prefills
        self._decodes = decodes
        self._steps_due = 0
        """Steps that the others still have before the next trial."""
        self._short_of_room = False

    @property
    def holds_back_admission(self) -> bool:
        """Whether newcomers wait because a suspect that came before them finds no room."""
        suspect, newcomer = self._queues.suspects.first, self._queues.waiting.first
        if suspect is None or newcomer is None or not self._short_of_room:
            return False
        return suspect.queue_key < newcomer.queue_key

    def pauses(self, in_flight: int, *, begins: bool = True) -> bool:
        """Ends the trial that is over, and `begins` the next where it is due. True: nothing is planned now. Either the
        `in_flight` steps have to end first, or a trial has just begun, which is to be announced before its first step.
        """
        if self.current is not None:
            if _on_trial(self.current):
                return False
            self.current, self._steps_due = None, STEPS_BETWEEN
        suspect = self._queues.suspects.first
        if suspect is None or not begins or (self._steps_due > 0 and self._others):
            return False
        self._short_of_room = not self._admission.has_room_for(suspect)
        if self._short_of_room:
            self._steps_due = STEPS_BETWEEN
            return False
        if not in_flight:
            self._admission.admit_suspect(suspect)
            self.current = suspect
        return True

    def plan(self, step: StepBuilder) -> None:
        """Adds what the sequence on trial computes next. It may be nothing, before a result comes or because there was
        no memory left for it."""
        suspect = self.current
        assert suspect is not None, "only during a trial"
        if suspect.phase == "prefilling":
            self._prefills.prefill(suspect, step)
        else:
            self._decodes.plan(step, [suspect])
            step.decodes = step.samples

    def record_step(self) -> None:
        """The others had a step."""
        self._steps_due -= self._steps_due > 0

    def goes_on(self, in_flight: int) -> bool:
        """After nothing could be planned: whether something can be now, because a trial was broken off, or because the
        others, whose turn it was, have nothing to compute."""
        if self.current is not None:
            return not _on_trial(self.current)
        suspect = self._queues.suspects.first
        if in_flight or not self._steps_due or suspect is None or not self._admission.has_room_for(suspect):
            return False
        self._steps_due = 0
        return True

    @property
    def _others(self) -> bool:
        """Whether anything but suspects could be computed."""
        return bool(self._queues.decoding or self._queues.prefilling or self._queues.waiting)


def _on_trial(suspect: Sequence) -> bool:
    """Whether it is still computed, and is still a suspect."""
    return suspect.phase in ("prefilling", "decoding") and suspect.suspected
