"""What computes a step: the interface between the worker's actor and a device. Knows no bus and no asyncio."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct

from services.worker.distributed.lockstep import LatestStep
from services.worker.models.expert_parallel.expert_balance import ExpertMoves
from shared.ids import ModelName
from shared.kv_groups import KvCacheGroup, StateRecords
from shared.messages.model_card import LoraCard, ModelCard
from shared.messages.scheduler import SampledTokens, SequenceFailed, SequencePooled, SequencePromptLogprobs, StepTiming
from shared.messages.worker import StepPlan

if TYPE_CHECKING:
    from services.worker.guided.library import GrammarLibrary
    from services.worker.kv.copier import RankKvCache


ExecutionMode = Literal["sequential", "prepared", "launched"]
"""How a backend's steps may overlap.

sequential: a step is over before the next one is prepared. For ranks on processors that compute together, and for the
    stages of a pipeline.
prepared: a processor computes; a second thread prepares the next step meanwhile.
launched: the device works by itself, and is given the next step while it computes; a second thread waits for results.
"""

MAX_LAUNCHED_STEPS = 2
"""One that the device computes, and one that it finds when it is done. A third would only keep new requests waiting."""


class BackendError(Exception):
    """The model cannot be served here; the text says why and what to do."""


class StepOutput(Struct, frozen=True):
    """What one step computed."""

    sampled: tuple[SampledTokens, ...]
    """One entry for each work of the plan that had `sample` set, in the plan's order."""
    timing: StepTiming
    """`wait` is for other ranks' rows, `prepare` what could not be prepared beside another step: whoever executes the
    plan knows when it came, and adds its own share to both; and `answer`."""
    drafted: int = 0
    """Draft tokens that were verified, all sequences together; of a tree those of its longest path."""
    accepted: tuple[int, ...] = ()
    """How many sequences accepted their first draft token, their second, and so on."""
    scored: tuple[SequencePromptLogprobs, ...] = ()
    """Log-probabilities of prompt tokens that the step computed."""
    failed: tuple[SequenceFailed, ...] = ()
    """Sequences whose grammar is followed no longer: what was drawn for them means nothing."""
    pooled: tuple[SequencePooled, ...] = ()
    """Vectors of prompts that the step computed the last token of."""
    ended: float | None = None
    """When the device was done, on `time.perf_counter`'s clock; None: when this came out."""
    began: float | None = None
    """When the device began with it; None: when it was launched, or the step before was over."""
    shared: LatestStep | None = None
    """Of a rank of a data-parallel group: which of the group's steps it was; None: it was none."""


class Step(Protocol):
    """A plan that has been prepared: first it is launched, then its result is read."""

    def launch(self) -> None:
        """Gives the step to the device. Called once, in the order of the plans.

        In the modes `sequential` and `prepared` the step is computed when this returns; what computing raises is
        raised here. In the mode `launched` it returns at once."""

    def result(self) -> StepOutput:
        """Blocks until the step's tokens are in main memory. Called once, in the order of the plans, and on another
        thread than the rest: it touches nothing that later steps are prepared or launched with."""


class AdapterStore(Protocol):
    """LoRA adapters that come and go while steps are computed."""

    @property
    def cards(self) -> tuple[LoraCard, ...]:
        """Those that are served."""

    def add(self, name: ModelName, folder: Path) -> LoraCard:
        """Reads an adapter and serves it from now on; on any one thread. Raises AdapterRefused."""

    def remove(self, name: ModelName) -> None:
        """New sequences have it no longer; a plan says when it can be forgotten."""


class ExpertPicks(Protocol):
    """What steps have picked of a mixture's experts. May be read while steps are computed."""

    def by_rank(self) -> dict[int, list[float]]:
        """Picks that each rank of the stage has computed, by the layer's number; none where ranks have shares of all
        experts. Waits for the device."""

    @property
    def moves(self) -> ExpertMoves | None:
        """How experts were moved while steps were computed; None where they are not."""

    @property
    def logs_balance(self) -> bool:
        """Whether the log is to say how evenly picks fall on ranks."""

    def save(self) -> None:
        """Writes how often each expert was picked, if there is a file for it. Raises OSError."""


class GroupMember(Protocol):
    """A rank of a data-parallel group, which computes steps of other engines, too."""

    def wait_for_plan(self, arrived: Callable[[], bool]) -> None:
        """Returns when the next plan has `arrived` and may be begun, as it must be then. Until then it computes what
        steps of other engines need of this rank. On the thread that launches; raises what computing raises."""

    def notify_plan(self) -> None:
        """Has `wait_for_plan` look whether a plan has arrived. On any thread."""

    @property
    def latest(self) -> LatestStep | None:
        """The group's last step that has begun; None before the first."""

    @property
    def dummy_steps(self) -> int:
        """Steps without a row of this rank's engine."""


class Backend(Protocol):
    """Owns token history, block tables, KV memory and sampling state of one rank's sequences.

    Every plan passes through three phases: `prepare`, `Step.launch`, `Step.result`; `mode` says which of them may
    overlap. `prepare` and `launch` of a step come before those of the next one, but in the mode `prepared`, where one
    thread prepares and another launches.
    """

    @property
    def mode(self) -> ExecutionMode:
        """How its steps may overlap."""

    @property
    def card(self) -> ModelCard:
        """The model's name, limits and end-of-sequence tokens."""

    @property
    def num_blocks(self) -> int:
        """Blocks of KV memory, sized from the memory given after a profiling pass."""

    @property
    def kv_groups(self) -> tuple[KvCacheGroup, ...]:
        """Groups of layers with block tables of their own; empty: all layers have one."""

    @property
    def state_checkpoints(self) -> int | None:
        """See `WorkerReport.state_checkpoints`."""

    @property
    def state_records(self) -> StateRecords | None:
        """See `WorkerReport.state_records`."""

    @property
    def device(self) -> str:
        """Name of the device, for logs and reports."""

    @property
    def device_name(self) -> str:
        """What its maker calls it."""

    @property
    def kv(self) -> RankKvCache | None:
        """Its KV memory, for copying blocks beside steps, on another thread; None where there is no memory."""

    @property
    def max_speculate(self) -> int:
        """The largest `SequenceWork.speculate` that a plan may contain; 0 if nothing drafts."""

    @property
    def rows_per_draft(self) -> int:
        """Rows at the most that a step has for each of `SequenceWork.speculate`."""

    @property
    def max_loras(self) -> int:
        """How many different adapters a step may have; 0 where none is served."""

    @property
    def adapters(self) -> AdapterStore | None:
        """Its adapters; None where it can have none."""

    @property
    def max_jump_ahead(self) -> int:
        """Most forced tokens that one step may yield for a sequence with a grammar."""

    @property
    def expert_load(self) -> ExpertPicks | None:
        """How often each expert was picked; None where that is not counted, as on all but the first rank of a stage."""

    @property
    def group(self) -> GroupMember | None:
        """Its place in a data-parallel group; None: it is in none. In the mode `sequential` only."""

    @property
    def grammars(self) -> GrammarLibrary | None:
        """Where grammars are compiled; None where nothing here follows any."""

    def prepare(self, plan: StepPlan) -> Step:
        """Applies `plan` (released, new, work, in this order). Its transfers are the caller's affair.

        Whether (epoch, step) follow each other is the caller's business. Raises BrokenPlan, here or in `Step.launch`,
        for an unknown sequence or a block table that does not cover the work: that is a bug, and ends the process.
        """

    def compute_context(self) -> AbstractContextManager[object]:
        """What the thread that launches enters once, before its first step."""

    def reset(self) -> None:
        """Forgets every sequence: a new epoch begins. No step is under way. Ranks that compute together wait for each
        other here; raises where they have not computed the same steps before."""


def run_step(backend: Backend, plan: StepPlan) -> StepOutput:
    """Takes one plan through all three phases on this thread."""
    with backend.compute_context():
        step = backend.prepare(plan)
        step.launch()
        return step.result()
