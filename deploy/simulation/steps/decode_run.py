"""Steps of an engine that does nothing but decode, without the events and messages around them.

Most steps of a simulated hour draw the next token of the same few sequences. What the core makes of such a step's
result, and of the time for its next plan, is done here by the core's own parts; and nothing is asked that has its
answer already: who waits, what is copied, whom the tokens are sent to. So the core is as it would be behind
`EngineCore.handle`, to the last bit, but for the numbers of token batches, which nobody counts here.
"""

from __future__ import annotations

from deploy.simulation.hops import HopDelays
from deploy.simulation.steps.decode_leap import DecodeLeap, LeapRoom, StepTimeline
from deploy.simulation.steps.device import VirtualDevice
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.planning.step_builder import StepBuilder
from services.scheduler.core.sequence import Sequence
from shared.ids import RequestId
from shared.messages.scheduler import StepFinished
from shared.messages.worker import StepPlan

MIN_STEPS = 4
"""A shorter run is not worth being looked for."""
MIN_LEAP, MAX_LEAP = 2, 1024
"""Steps that are taken in at once: fewer are not worth it, more come to no good at anybody."""


class DecodeRun:
    """Owns how many more steps of the same decoding sequences can be planned before one of them has all its tokens.

    It ends before anything else can come of a result or a plan: when `goes_on` says so, and with whatever else happens
    to the engine's core, which the caller knows.
    """

    def __init__(self, core: EngineCore, state: EpochState, members: list[Sequence], steps: int) -> None:
        """`steps`: so many can be planned; see `begin`."""
        self._state = state
        self._counters = core.counters
        self._members = members
        self._steps = steps
        limits = state.limits
        self._tokens = limits.max_batch_tokens
        self._new_bytes = limits.max_new_bytes
        self._late = limits.plan_late and limits.run_ahead > 0
        self._ahead = limits.plans_ahead
        self._timeout = limits.step_timeout
        self._blocks = len(members) * (self._ahead + 1)
        """So many may be allocated at one event."""
        self._begun = state.steps.issued
        """The number of its first step."""

    @classmethod
    def begin(cls, core: EngineCore) -> DecodeRun | None:
        """A run from the present state on; None where something else than decoding may come of it."""
        state = core.epoch_state
        if state is None or not (members := state.queues.decoding) or not _only_decodes(core, state):
            return None
        steps = min([each.tokens.limit - each.tokens.length for each in members])
        run = cls(core, state, members.copy(), steps - MIN_STEPS)
        if not run.goes_on or not all(map(_is_plain, members)):
            return None
        run._steps = steps
        return run

    @property
    def goes_on(self) -> bool:
        """Whether the next event can be taken in: no sequence ends by it, none is without a token to plan, and there
        are blocks for all."""
        return self._steps > self._ahead and self._state.memory.free_blocks >= self._blocks

    def is_overdue(self, now: float) -> bool:
        """Whether the workers count as wedged."""
        return self._state.steps.overdue(now, self._timeout) is not None

    def room(self) -> LeapRoom | None:
        """How many results can be taken in, and steps planned, by which no sequence fills a block or needs one, or has
        all its tokens. None where that is not worth while, or these are not all members' latest tokens, or not all that
        is in flight."""
        if self._state.steps.finished <= self._begun or not self.goes_on:
            return None
        results, plans = MAX_LEAP, self._steps - self._ahead - 1
        for sequence in self._members:
            tokens, blocks = sequence.tokens, sequence.blocks
            size = tokens.block_size
            results = min(results, size - 1 - len(tokens.known) % size)
            plans = min(plans, blocks.capacity - tokens.planned)
            if results < MIN_LEAP or plans < MIN_LEAP or len(tokens.hashes) > blocks.indexed:
                return None
        return LeapRoom(results, plans)

    def leap(
        self, device: VirtualDevice, hops: HopDelays, timeline: StepTimeline, until: float, room: LeapRoom
    ) -> DecodeLeap:
        """Takes in the results and plans of `timeline` before `until`, and those that follow from them. `room`: the
        run's, at present."""
        leap = DecodeLeap(self._state, self._counters, self._members, device, hops)
        leap.take(timeline, until, room, late=self._late)
        self._steps -= leap.planned
        return leap

    @property
    def requests(self) -> list[RequestId]:
        """The members'."""
        return [member.generation.request for member in self._members]

    def finish(self, result: StepFinished, now: float) -> list[RequestId]:
        """Takes in the result of the oldest step in flight. Returns the requests that have a token by it, in order."""
        state, learnt = self._state, []
        state.measure(result, now)
        by_id, memory, counters = state.queues.by_id, state.memory, self._counters
        same, since = 0, now  # so many in a row have the token before this one from the same moment
        for sampled in result.sampled:
            sequence = by_id.get(sampled.sequence)
            if sequence is None:  # it has ended meanwhile
                continue
            tokens = sequence.tokens
            tokens.append(sampled.tokens[0])
            if sequence.last_token_at != since:
                counters.record_later_tokens(same, now - since)
                same, since = 0, sequence.last_token_at
            same += 1
            sequence.last_token_at = now
            learnt.append(sequence.generation.request)
            if len(tokens.hashes) > sequence.blocks.indexed:
                memory.index_full_blocks(sequence)
        counters.record_later_tokens(same, now - since)
        return learnt

    def plan(self, now: float) -> tuple[list[StepPlan], float | None]:
        """The plans that are made now, and when the next one is due, as `EpochState.plan` has it."""
        steps = self._state.steps
        plans: list[StepPlan] = []
        while steps.in_flight <= self._ahead:
            if self._late and now < (due := steps.next_due(1)):
                return plans, due
            plans.append(self._plan(now))
        return plans, None

    def _plan(self, now: float) -> StepPlan:
        state = self._state
        step = StepBuilder(self._tokens, self._new_bytes)
        state.planner.decodes.plan(step, self._members)
        step.decodes = step.samples
        for sequence in step.filled:
            state.memory.index_full_blocks(sequence)
        self._steps -= 1
        return state.issue(step, now)


def _only_decodes(core: EngineCore, state: EpochState) -> bool:
    """Whether all requests of the engine decode, with no store or connector, drafts, grammars, stages or canaries
    beside."""
    role, limits, workers, queues = core.role, core.limits, state.workers, state.queues
    return (
        len(queues.decoding) == len(state.requests.held)
        and not queues.guided
        and role.node is None
        and role.connector is None
        and core.paused is None
        and limits.canary_interval == 0
        and state.limits.stages == 1
        and not (workers.max_speculate or workers.max_jump_ahead)
        and state.isolation.current is None
    )


def _is_plain(sequence: Sequence) -> bool:
    """Whether nothing but its length ends the sequence, and its first token is known."""
    tokens = sequence.tokens
    return bool(tokens.produced and not tokens.stops and not sequence.pooled and not sequence.generation.keep)
