"""A scheduler's core and one rank in this process, plan by plan."""

from __future__ import annotations

from msgspec.structs import replace

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import Event, SendPlan, SendTokens, WorkersReady
from services.scheduler.core.invariants import check
from services.scheduler.core.limits import EngineLimits
from services.worker.backend import Backend, run_step
from shared.ids import EngineId, Incarnation
from shared.messages.generation import PromptEmbeds
from shared.messages.scheduler import StepFinished
from shared.messages.worker import StepPlan
from tests.support.engines.checking_worker import generate
from tests.support.worker.plan_driver import GREEDY

LIMITS = EngineLimits(max_batch_tokens=77, max_running=8, run_ahead=0)


class PlannedEngine:
    """Steps of 77 tokens, unless limits say otherwise."""

    def __init__(self, backend: Backend, limits: EngineLimits = LIMITS) -> None:
        self._backend = backend
        self.drafted = 0
        self._plans: list[StepPlan] = []
        self._drawn: list[int] = []
        self._core = EngineCore(EngineId("e"), Incarnation(1), limits)
        self._requests = 0
        self._tell(
            WorkersReady(
                *(backend.card, backend.num_blocks),
                state_checkpoints=backend.state_checkpoints,
                max_speculate=backend.max_speculate,
            )
        )

    def generate(self, prompt: list[int], output: int, embeds: PromptEmbeds | None = None) -> tuple[list[int], int]:
        """The `output` tokens behind the prompt, drawn greedily, and how many tokens of it were computed before."""
        self._drawn, computed, self._requests = [], 0, self._requests + 1
        asked = generate(f"r{self._requests}", prompt, max_tokens=output, ignore_eos=True, embeds=embeds)
        self._tell(replace(asked, generation=replace(asked.generation, sampling=GREEDY)))
        while self._plans:
            plan = self._plans.pop(0)
            computed += sum(new.computed for new in plan.new)
            made = run_step(self._backend, plan)
            self.drafted += made.drafted
            self._tell(
                StepFinished(
                    epoch=plan.epoch,
                    step=plan.step,
                    sampled=made.sampled,
                    timing=made.timing,
                    drafted=made.drafted,
                    accepted=made.accepted,
                )
            )
        return self._drawn, computed

    def _tell(self, event: Event) -> None:
        for said in self._core.handle(event, 0.0):
            if isinstance(said, SendPlan):
                self._plans.append(said.plan)
            elif isinstance(said, SendTokens):
                self._drawn += [token for entry in said.batch.entries for token in entry.tokens]
        check(self._core)
