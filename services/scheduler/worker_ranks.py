"""Whether an engine's ranks are complete, and whether one of them was lost. Judged from lifecycle messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import msgspec

from services.scheduler.core.events import LorasChanged, WorkersLost, WorkersReady
from shared.ids import EngineId, Incarnation, InstanceId
from shared.kv_groups import KvCacheGroup, StateRecords
from shared.messages.lifecycle import Lifecycle, Role, WorkerReport
from shared.messages.model_card import LoraCard, ModelCard
from shared.protocol import PROTOCOL
from shared.registry import InstanceGone, Registry

_T = TypeVar("_T")

PING_AFTER = 1.0
"""Seconds that a step takes, and that a rank has said nothing, before it is asked whether it lives."""
PING_TIMEOUT = 2.0
"""Seconds in which it has to answer, as its event loop can while a step is computed."""
ANNOUNCEMENT_GRACE = 0.1
"""Seconds in which a death is announced, before a plan that found no worker counts as lost for another reason."""


class UnequalRanks(NamedTuple):
    """The ranks are all there, but were started with different settings or releases; they will not work together."""

    difference: str


class UnusableRanks(NamedTuple):
    """The ranks are all there and agree, but their engine cannot do what it was started for."""

    reason: str


class LostPlan(NamedTuple):
    """A plan that found no worker."""

    epoch: Incarnation
    step: int
    at: float


class WorkerRanks:
    """Owns the registry of the engine's workers, and which of them the engine is working with."""

    def __init__(self, engine: EngineId, world_size: int | None, role: Role = "mixed") -> None:
        self._engine = engine
        self._role = role
        self._world_size = world_size
        """None: what the workers themselves say."""
        self._reported_size = self.data_parallel_size = 1
        self._registry = Registry()
        self._members: dict[InstanceId, Incarnation] = {}
        self._pinged_at: float | None = None
        """When ranks were asked that have not answered yet, all of them; None: none was."""
        self._plan_lost: LostPlan | None = None
        """The first plan of these members that found none of them."""

    def record_lifecycle(self, message: Lifecycle, now: float) -> WorkersLost | None:
        """Takes a worker's lifecycle in. Returns why the engine lost its workers, None where it did not."""
        if message.worker is not None and message.worker.engine != self._engine:
            return None
        if message.worker is not None:
            self._reported_size = message.worker.world_size
            self.data_parallel_size = message.worker.data_parallel_size
        gone = self._registry.record_lifecycle(message, now)
        return self._lost([gone] if gone else [])

    def expire(self, now: float, epoch: Incarnation | None) -> WorkersLost | None:
        """Returns, as `record_lifecycle` does, whether a member has been silent for too long, did not answer, or a plan
        of this epoch found no worker."""
        return self._lost(self._registry.expire(now)) or self._unanswered(now) or self._undelivered(now, epoch)

    def ping_is_due(self, now: float, step_since: float | None) -> bool:
        """Whether the ranks are to be asked if they live, as the result of a step is awaited since `step_since` and one
        of them is silent: in a large fleet they promise to speak every few seconds only. Asked at each tick until they
        have answered, as one message may be lost."""
        if self._pinged_at is None and step_since is not None and now - step_since > PING_AFTER:
            self._pinged_at = now if any(now - at > PING_AFTER for at in self._heard()) else None
        return self._pinged_at is not None

    def record_undelivered_plan(self, epoch: Incarnation, step: int, now: float) -> None:
        """A plan found no worker. Most often one has just died, which its supervisor announces within moments: that
        counts first, because it says what became of the requests."""
        if self._plan_lost is None:
            self._plan_lost = LostPlan(epoch, step, now)

    @property
    def world_size(self) -> int:
        """How many ranks there are to be, as configured or as they said last; 1 where nobody knows."""
        return self._world_size or self._reported_size

    def forget(self) -> None:
        """Forgets every rank. Those that live report again when they are asked, or as often as they promised."""
        self._registry = Registry()
        self._members = {}
        self._pinged_at = None

    def is_member(self, message: Lifecycle) -> bool:
        """Whether the engine works with this process, in this life of it."""
        return self._members.get(message.instance) == message.incarnation

    def assemble(self) -> WorkersReady | UnequalRanks | UnusableRanks | None:
        """The complete set of ranks, which the engine then works with; None while one is missing."""
        by_rank = self._ready_by_rank()
        reports = [life.worker for life in by_rank.values() if life.worker is not None]
        if not reports:
            return None
        size = self._world_size or reports[0].world_size
        if set(by_rank) != set(range(size)):
            return None
        spoken = {life.protocol for life in by_rank.values()}
        if spoken != {PROTOCOL}:
            return UnequalRanks(f"the ranks speak protocol {sorted(spoken)}, their scheduler {PROTOCOL}")
        cards = {_comparable(report) for report in reports}
        if len(cards) > 1:
            return UnequalRanks(" / ".join(sorted(map(str, cards))))
        if self._role != "mixed" and (why := _why_not_handed_over(reports)) is not None:
            return UnusableRanks(
                f"no {self._role} engine: requests of {reports[0].model.name}{why}; start its engines without "
                "--prefill and --decode"
            )
        self._members, self._plan_lost = {life.instance: life.incarnation for life in by_rank.values()}, None
        return _workers_ready(reports, size)

    def loras(self) -> LorasChanged:
        """The adapters of the ranks that the engine works with, as they reported last."""
        lives = (self._registry.get("worker", instance) for instance in self._members)
        reports = [life.worker for life in lives if life is not None and life.worker is not None]
        reports.sort(key=lambda report: report.rank)
        refusals = {each.name: each for report in reports for each in report.lora_refusals}
        return LorasChanged(_common_loras(reports), tuple(refusals.values()))

    def _ready_by_rank(self) -> dict[int, Lifecycle]:
        """Where two claim one rank the one that started later counts: the other is about to be found dead."""
        ready = [life for life in self._registry.all("worker", "ready") if life.worker is not None]
        ready.sort(key=lambda life: life.started)
        by_rank = {life.worker.rank: life for life in ready if life.worker is not None}
        return dict(sorted(by_rank.items()))

    def _heard(self) -> list[float]:
        """When each member was heard last."""
        heard = (self._registry.heard_at("worker", instance) for instance in self._members)
        return [at for at in heard if at is not None]

    def _unanswered(self, now: float) -> WorkersLost | None:
        """Whether a rank hangs, though its silence alone would not show that yet. All are forgotten then: it shall not
        count as ready before it speaks again."""
        asked = self._pinged_at
        if asked is None:
            return None
        silent = [name for name in self._members if (self._registry.heard_at("worker", name) or 0.0) <= asked]
        if not silent:
            self._pinged_at = None
        elif now - asked > PING_TIMEOUT:
            self.forget()
            why = f"silent for {PING_TIMEOUT:g} s after it was asked, as a step is late"
            return WorkersLost(f"worker {silent[0]}: {why}")
        return None

    def _undelivered(self, now: float, epoch: Incarnation | None) -> WorkersLost | None:
        if self._plan_lost is None or now - self._plan_lost.at < ANNOUNCEMENT_GRACE:
            return None
        lost, self._plan_lost = self._plan_lost, None
        if lost.epoch != epoch:
            return None
        self.forget()
        return WorkersLost("no worker takes plans")

    def _lost(self, gone: list[InstanceGone]) -> WorkersLost | None:
        for each in gone:
            last = each.last
            if self._members.get(last.instance) == last.incarnation:
                self._members = {}
                unheard = None if self._plan_lost is None else self._plan_lost.step
                return WorkersLost(f"worker {last.instance}: {each.reason}", each.died, unheard)
        return None


def _workers_ready(reports: list[WorkerReport], size: int) -> WorkersReady:
    """What `size` ranks with equal settings have in common, or the least of."""
    return WorkersReady(
        card=msgspec.structs.replace(reports[0].model, loras=_common_loras(reports)),
        num_blocks=min(report.num_blocks for report in reports),
        max_running=_smallest(report.max_num_seqs for report in reports),
        max_batch_tokens=_smallest(report.max_batch_tokens for report in reports),
        world_size=size,
        layout=_common(report.layout for report in reports),
        stages=reports[0].stages,
        max_speculate=min(report.max_speculate for report in reports),
        max_jump_ahead=min(report.max_jump_ahead for report in reports),
        max_loras=min(report.max_loras for report in reports),
        cache_format=_common(report.cache_format for report in reports) or "",
        layerwise_loads=all(report.layerwise_loads for report in reports),
        kv_groups=reports[0].kv_groups,
        state_checkpoints=_smallest(report.state_checkpoints for report in reports),
        state_records=reports[0].state_records,
        rows_per_draft=max(report.rows_per_draft for report in reports),
    )


def _why_not_handed_over(reports: list[WorkerReport]) -> str | None:
    """Why requests of a model cannot be passed from one engine to another; None where they can."""
    if any(each.state_checkpoints is not None and each.state_records is None for each in reports):
        return ", a model with states, are handed over on CPUs alone, by ranks of one stage with KV heads of their own"
    model = reports[0].model
    if model.audio is not None or model.encoder_decoder is not None:
        return " bring rows of an encoder's, whose keys and values are not handed over"
    return None


def _comparable(
    report: WorkerReport,
) -> tuple[ModelCard, int, int, tuple[KvCacheGroup, ...], StateRecords | None]:
    """The settings that must be equal on all ranks; their start times need not be, nor adapters that just came."""
    card = msgspec.structs.replace(report.model, created=0, loras=())
    return card, report.world_size, report.stages, report.kv_groups, report.state_records


def _common_loras(reports: list[WorkerReport]) -> tuple[LoraCard, ...]:
    """The adapters that all ranks serve, in the order of the first one."""
    others = [set(report.model.loras) for report in reports[1:]]
    return tuple(lora for lora in (reports[0].model.loras if reports else ()) if all(lora in one for one in others))


def _smallest(values: Iterable[int | None]) -> int | None:
    """Of the ranks that report one; None where none does."""
    return min((value for value in values if value is not None), default=None)


def _common(values: Iterable[_T]) -> _T | None:
    """The value that all ranks report; None if they do not agree."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None
