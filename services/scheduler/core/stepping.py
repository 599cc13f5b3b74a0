"""From plan to result: has steps planned as far ahead as may be, and takes in what came of them."""

from __future__ import annotations

from services.scheduler.core import results
from services.scheduler.core.answers import Answers
from services.scheduler.core.drafts import Drafts
from services.scheduler.core.events import SendPlan
from services.scheduler.core.hand_overs import HandOvers
from services.scheduler.core.limits import Limits
from services.scheduler.core.planner import Planned, Planner
from services.scheduler.core.requests import Requests
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.steps import Steps
from services.scheduler.core.tally import Tally
from services.scheduler.core.transfers import Transfers
from shared.messages.scheduler import Sampled, StepFinished
from shared.messages.worker import StepPlan


class Stuck(AssertionError):
    """Nothing is on its way and nothing can be planned: a bug that would leave requests waiting for ever."""


class Stepping:
    """Owns when the next plan is due. One epoch's."""

    def __init__(
        self,
        limits: Limits,
        planner: Planner,
        steps: Steps,
        transfers: Transfers,
        drafts: Drafts,
        hand_overs: HandOvers,
        requests: Requests,
        answers: Answers,
        tally: Tally,
    ) -> None:
        self.plan_due: float | None = None
        """When `plan` is wanted at the latest, so that the device finds its next plan ready."""
        self._limits = limits
        self._planner = planner
        self._steps = steps
        self._transfers = transfers
        self._drafts = drafts
        self._hand_overs = hand_overs
        self._requests = requests
        self._answers = answers
        self._tally = tally

    def plan(self, now: float) -> None:
        """Plans until enough are in flight, or nothing is left to do. Raises Stuck."""
        self.plan_due = None
        while self._steps.in_flight <= self._limits.plans_ahead:
            if self._may_wait(now):
                return
            planned = self._planner.plan(now)
            if planned is None:
                held = len(self._requests.held)
                if held and self._steps.in_flight == 0 and not self._planner.waits_elsewhere:
                    raise Stuck(f"{held} requests are held, and none can be computed")
                return
            self._issue(planned, now)

    def _may_wait(self, now: float) -> bool:
        """Whether the workers have enough to do, and the plan is not due yet; then sets `plan_due`."""
        if not self._limits.plan_late or self._limits.run_ahead == 0:
            return False
        due = self._steps.next_due(self._limits.stages)
        if now < due:
            self.plan_due = due
            return True
        return False

    def _issue(self, planned: Planned, now: float) -> None:
        for sequence, cached in planned.started:
            self._answers.streams.open(sequence, cached)
            self._tally.began(sequence.generation.prompt_length, cached)
        for sequence in planned.handing:
            self._hand_overs.begin(sequence)
        step = self._steps.issue(planned.expected, now)
        self._transfers.issued(step)
        plan = StepPlan(
            epoch=self._steps.epoch,
            step=step,
            released=planned.released,
            new=planned.new,
            work=planned.work,
            transfers=planned.transfers,
            compile=planned.compile,
        )
        self._answers.add(SendPlan(plan))

    def finished(self, result: StepFinished, now: float) -> str | None:
        """A step's result; why everything has to begin anew, where one before it was lost."""
        if result.epoch != self._steps.epoch or result.step < self._steps.finished:
            return None
        if result.step > self._steps.finished:
            return f"the result of step {self._steps.finished} never came"
        expected = self._steps.finish(len(result.sampled), now)
        self._transfers.step_finished(result.step, now)
        self._drafts.take(result, expected)
        by_id = self._planner.places.by_id
        for scored in result.scored:
            if (sequence := by_id.get(scored.sequence)) is not None:
                self._answers.streams.scored(sequence, scored)
        for sampled in result.sampled:
            sequence = by_id.get(sampled.sequence)
            if sequence is not None:  # else it ended meanwhile, and this was computed ahead for nothing
                self._take_tokens(sequence, sampled)
        return None

    def _take_tokens(self, sequence: Sequence, sampled: Sampled) -> None:
        entry = results.take(sequence, sampled)
        self._tally.output_tokens += len(entry.tokens)
        self._answers.streams.add(sequence, entry)
        if len(sequence.hashes) > sequence.indexed:
            self._planner.memory.index_full_blocks(sequence)
        if entry.finish is not None:
            self._requests.end(sequence, tell_detokenizer=False)
        elif sequence.phase == "returning" and not sequence.awaits_token:
            self._planner.places.wait(sequence)

    def overdue(self, now: float) -> str | None:
        """What takes so long that the workers count as wedged, if anything."""
        timeout = self._limits.step_timeout
        if self._steps.overdue(now, timeout):
            return f"step {self._steps.finished} took longer than {timeout:g} s"
        if self._transfers.overdue(now, timeout):
            return f"copying blocks from or to the KV store took longer than {timeout:g} s"
        return None
