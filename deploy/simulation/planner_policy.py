"""The planner as a scaling policy: the same core as `baton plan`, on virtual time; and what it knows of an engine,
which is measured on the simulated device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deploy.simulation.fleet import FleetView, ScalingLimits
from deploy.simulation.kit import EngineKit
from services.planner.core.load_meter import FleetObservation
from services.planner.core.planner import FleetPlanner, FleetProfiles
from services.planner.core.predictors import PredictorName, make_predictor
from services.planner.core.profile import EngineProfile
from services.planner.core.scaling_guard import PlannerLimits
from services.planner.core.sizing import LatencyTargets
from services.worker.sim.backend import SimBackend
from shared.blocks import blocks_for
from shared.ids import Incarnation, SequenceId
from shared.messages.generation import SamplingOptions
from shared.messages.lifecycle import Role
from shared.messages.supervisor import PlannerDecision
from shared.messages.worker import NewSequence, SequenceWork, StepPlan
from shared.packing import TOKEN_BYTES

PROMPT_LENGTHS = (16, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCH_SIZES = (1, 4, 16, 32, 64, 128, 256, 512)
CONTEXT_LENGTHS = (128, 512, 2048, 8192, 32768)
DECODE_STEPS = 4
"""Of each decode measurement."""


class PlannerScaling:
    """Owns a planner of plain engines, or of pools that prefill and decode, and what it has decided."""

    def __init__(self, planner: FleetPlanner) -> None:
        self.decisions: list[PlannerDecision] = []
        self._planner = planner

    @property
    def interval(self) -> float:
        """As `ScalingPolicy` has it."""
        return self._planner.limits.interval

    def wanted(self, view: FleetView) -> Mapping[Role, int]:
        """As `ScalingPolicy` has it."""
        reports = {load.id: load.report for load in view.engines}
        decision = self._planner.decide(FleetObservation(reports, view.present, view.queued), view.now)
        self.decisions.append(decision)
        return {pool.role: pool.target for pool in decision.pools}


def planner_scaling(
    kit: EngineKit, gpus: int, targets: LatencyTargets, limits: ScalingLimits, predictor: PredictorName, season: float
) -> PlannerScaling:
    """A planner of engines made from `kit` with `gpus` devices each, whose profile is measured here: of its pools,
    where it has prefill engines. `season`: seconds after which a seasonal load repeats itself. Raises ValueError for a
    season of too few intervals."""
    planner_limits = PlannerLimits(
        minimum=limits.minimum,
        maximum=limits.maximum,
        interval=limits.interval,
        start_seconds=limits.start_seconds,
        stabilization=limits.stabilization,
    )
    profile = profile_simulated(kit, gpus)
    profiles = FleetProfiles(profile, profile if kit.pools.prefill else None)
    return PlannerScaling(
        FleetPlanner(profiles, targets, planner_limits, make_predictor(predictor, round(season / limits.interval)))
    )


def profile_simulated(kit: EngineKit, gpus: int = 1) -> EngineProfile:
    """The tables of engines made from `kit`, of so many devices each, up to the lengths and batches that they hold."""
    card, limits = kit.device.card, kit.limits
    kv_tokens = kit.device.num_blocks * card.block_size
    longest = min(card.max_model_len, kv_tokens) - DECODE_STEPS - 1
    prompts = _within(PROMPT_LENGTHS, longest)
    batches = _within(BATCH_SIZES, limits.max_running)
    contexts = _within(CONTEXT_LENGTHS, longest)
    return EngineProfile(
        model=card.name,
        device=kit.device.device,
        gpus=gpus,
        max_num_seqs=limits.max_running,
        max_batch_tokens=limits.max_batch_tokens,
        kv_tokens=kv_tokens,
        prompt_lengths=prompts,
        prefill_seconds=tuple(_prefill(kit.device.another(), each, limits.max_batch_tokens) for each in prompts),
        batch_sizes=batches,
        context_lengths=contexts,
        itl_seconds=tuple(tuple(_itl(kit.device.another(), batch, each) for each in contexts) for batch in batches),
    )


def _within(values: Sequence[int], bound: int) -> tuple[int, ...]:
    """At least two."""
    return (*(each for each in values if each < bound), max(bound, values[0] + 1))


def _sequence(number: int, known: int, computed: int, blocks: int) -> NewSequence:
    return NewSequence(
        sequence=SequenceId(number),
        tokens=bytes(TOKEN_BYTES * known),
        prompt_length=known,
        computed=computed,
        blocks=bytes(TOKEN_BYTES * blocks),
        sampling=SamplingOptions(seed=number),
    )


def _prefill(device: SimBackend, tokens: int, chunk: int) -> float:
    """Seconds of all steps of a prompt, in chunks."""
    seconds, computed, step = 0.0, 0, 0
    blocks = blocks_for(tokens, device.card.block_size)
    while computed < tokens:
        count = min(chunk, tokens - computed)
        work = SequenceWork(SequenceId(0), count, b"", computed + count == tokens)
        new = (_sequence(0, tokens, 0, blocks),) if step == 0 else ()
        seconds += device.compute(_plan(step, (work,), new)).timing.forward
        computed, step = computed + count, step + 1
    return seconds


def _itl(device: SimBackend, batch: int, context: int) -> float:
    """Seconds from token to token of a sequence, all of which draft as many tokens as the device can."""
    drafts = device.max_speculate
    blocks = blocks_for(context + DECODE_STEPS * (1 + drafts), device.card.block_size)
    new = tuple(_sequence(number, context, context - 1, blocks) for number in range(batch))
    work = tuple(SequenceWork(SequenceId(number), 1, b"", True, drafts) for number in range(batch))
    seconds, tokens = 0.0, 0
    for step in range(DECODE_STEPS):
        output = device.compute(_plan(step, work, new if step == 0 else ()))
        seconds += output.timing.forward
        tokens += sum(len(each.tokens) for each in output.sampled)
    return seconds * batch / tokens


def _plan(step: int, work: tuple[SequenceWork, ...], new: tuple[NewSequence, ...]) -> StepPlan:
    return StepPlan(epoch=Incarnation(1), step=step, work=work, new=new)
