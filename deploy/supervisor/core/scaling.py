"""Which processes are added, and which may go, where others than there are are asked for. No clock, no processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import count, groupby, islice
from typing import NamedTuple

from deploy.supervisor.core.device_plan import choose_devices
from deploy.supervisor.core.events import ScaleRequested
from deploy.supervisor.core.group_scaling import change_groups, group_size, group_specs
from deploy.supervisor.core.members import SupervisedProcess
from deploy.supervisor.core.plan import (
    DECODING,
    OF_A_MODEL,
    POOLS,
    SCALABLE,
    Counts,
    Pool,
    ProcessSpec,
    Scalable,
    process_specs,
)
from deploy.supervisor.core.standbys import StandbyEngines
from shared.ids import InstanceId, ModelName
from shared.machine.gpu_topology import GpuTopology
from shared.messages.supervisor import ScaleRefusal, ScaleResult


class _ScaledProcesses(NamedTuple):
    """What is counted together."""

    what: Scalable
    model: ModelName | None

    def has(self, process: ProcessSpec) -> bool:
        """Whether the process is one of them, or of one of their engines."""
        return (process.kind, process.model) == self


class Scaling:
    """Adds to a supervisor's processes, and marks those of them that are wanted no longer."""

    def __init__(
        self,
        members: dict[InstanceId, SupervisedProcess],
        counts: Counts,
        plans: Mapping[ModelName | None, Counts],
        standbys: StandbyEngines,
        gpus: GpuTopology | None,
        max_instances: int,
    ) -> None:
        """`members` and `standbys` are the supervisor's. `counts`: what models share; `plans`: by model.
        `max_instances`: processes of a kind, or engines of a pool, beyond which no further ones are added."""
        self._members, self._counts, self._plans, self._standbys, self._gpus = members, counts, plans, standbys, gpus
        self._max_instances = max_instances

    def scale(self, asked: ScaleRequested, now: float, *, stopping: bool) -> ScaleResult | ScaleRefusal:
        """Adds processes, and lets go of those that are too many. `stopping`: whether the stack is."""
        service, count, model = asked.service, asked.count, asked.model
        what = next((each for each in SCALABLE if each == service), None)
        if what is None:
            return ScaleRefusal(f"{service}: cannot be scaled; {', '.join(SCALABLE)} can")
        if what in POOLS and self._counts.hosts > 1:
            return ScaleRefusal(f"{service}: engines over several hosts cannot be scaled")
        refused = self._model_refusal(what, model) or (what in POOLS and self._plans[model].pool_refusal(what))
        if refused:
            return ScaleRefusal(refused)
        group = _ScaledProcesses(what, model)
        least, most = self._least(group), max(self._max_instances, len(self._numbers(group)))
        if not least <= count <= most:
            return ScaleRefusal(f"{service}={count}: from {least} to {most} are possible (--max-instances)")
        if stopping:
            return ScaleRefusal("the stack is stopping")
        if what in POOLS and self._plans[model].group_size_of(what) > 1:
            return self._scale_groups(group, what, asked, now)
        if asked.data_parallel_size is not None:
            why = "is of stacks that were started with data-parallel groups of engines, and of these engines"
            return ScaleRefusal(f"data_parallel_size {asked.data_parallel_size}: {why}")
        numbers = self._numbers(group)
        promoted = [
            name for pool in POOLS if pool == what for name in self._standbys.promote(model, pool, count - len(numbers))
        ]
        started = [*promoted, *self.add(what, model, count - len(self._numbers(group)), now)]
        going = self._dismiss(group, change_groups(self._serving(group), count, size=1).surplus)
        return ScaleResult(started=tuple(started), stopping=tuple(going))

    def _scale_groups(
        self, group: _ScaledProcesses, pool: Pool, asked: ScaleRequested, now: float
    ) -> ScaleResult | ScaleRefusal:
        plan, serving = self._plans[group.model], self._serving(group)
        size = asked.count if asked.one_group else asked.data_parallel_size or group_size(serving, plan.data_parallel)
        if asked.count % size or not asked.count:
            return ScaleRefusal(f"engines={asked.count}: whole groups are needed, of data_parallel_size {size}")
        change, started = change_groups(serving, asked.count, size), list[InstanceId]()
        for _ in range(change.missing):
            new = group_specs(pool, self._free_numbers(group, size), plan)
            self.add_processes(new, now)
            started += [process.instance for process in new]
        for member in serving:
            member.superseded = member.process.number in change.superseded
        stopping = self._dismiss(group, change.surplus)
        superseded = [member.process.instance for member in serving if member.superseded]
        return ScaleResult(tuple(started), tuple(stopping), tuple(superseded))

    def _model_refusal(self, what: Scalable, model: ModelName | None) -> str | None:
        """Why a model is named that is not there, or none where one has to be; None where that is right."""
        known = ", ".join(str(name) for name in self._plans if name is not None)
        if not known:
            return None if model is None else f"model: {model!r} is not needed, as the stack serves one model"
        if what not in OF_A_MODEL:
            return None if model is None else f"model: {what} serves all models"
        if model is None:
            return f"model: {what} are of one model each; there are {known}"
        return None if model in self._plans else f"model: {model!r} is not served; there are {known}"

    def _least(self, group: _ScaledProcesses) -> int:
        """Prefill engines may all go, and so may others while some remain that finish what was begun. A host that
        joined may be left with nothing: others serve."""
        if self._counts.joined is not None:
            return 0
        what, model = group
        if what not in POOLS:
            return 1
        others = sum(len(self._numbers(_ScaledProcesses(pool, model))) for pool in DECODING if pool != what)
        return 1 if what in DECODING and not others else 0

    def _serving(self, group: _ScaledProcesses) -> list[SupervisedProcess]:
        """Those that serve, or are to."""
        return [m for m in self._members.values() if m.wanted and not m.standby and group.has(m.process)]

    def _numbers(self, group: _ScaledProcesses) -> set[int]:
        return {member.process.number for member in self._serving(group)}

    def add(
        self, what: Scalable, model: ModelName | None, how_many: int, now: float, *, standby: bool = False
    ) -> list[InstanceId]:
        """So many more, due at once; names their processes."""
        added: list[InstanceId] = []
        for number in self._free_numbers(_ScaledProcesses(what, model), how_many):
            new = process_specs(what, number, self._plans[model])
            self.add_processes(new, now, standby=standby)
            added += [process.instance for process in new]
        return added

    def _free_numbers(self, group: _ScaledProcesses, how_many: int) -> list[int]:
        taken = {m.process.number for m in self._members.values() if group.has(m.process)}
        return list(islice((number for number in count(1) if number not in taken), max(0, how_many)))

    def add_processes(self, new: list[ProcessSpec], due: float, *, standby: bool = False) -> None:
        """Whole engines only: their ranks get devices that are close to each other."""
        taken = {member.device for member in self._members.values()}
        for _, group in groupby(new, key=lambda process: process.engine):
            members = [SupervisedProcess(process, due=due, standby=standby) for process in group]
            workers = [m for m in members if m.process.service == "worker" or m.process.colocated]
            pool = workers[0].process.pool if workers else None
            stages = 1 if pool is None else self._plans[workers[0].process.model].stages_of(pool)
            devices = choose_devices(taken, len(workers), self._gpus, stages=stages)
            for device, worker in zip(devices, workers, strict=True):
                worker.device = device
                taken.add(device)
            self._members |= {member.process.instance: member for member in members}

    def _dismiss(self, group: _ScaledProcesses, numbers: Collection[int]) -> list[InstanceId]:
        leaving = [m for m in self._members.values() if group.has(m.process) and m.process.number in numbers]
        for member in leaving:
            member.wanted = False
        return [member.process.instance for member in leaving]
