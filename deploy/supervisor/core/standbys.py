"""Which engines stand by: loaded, without requests, and ready for the place of one that dies or is added. No clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from deploy.supervisor.core.events import SetStandby
from deploy.supervisor.core.members import SupervisedProcess
from deploy.supervisor.core.plan import POOLS, Counts, Pool
from shared.ids import EngineId, InstanceId, ModelName


class StandbyEngines:
    """Decides who stands by and who serves: `SupervisedProcess.standby` of all processes of an engine. What a scheduler
    says otherwise is put right, unless an operator has decided it: then that counts. A standby has the role of its
    pool, and takes a place in that pool only."""

    def __init__(self, members: Mapping[InstanceId, SupervisedProcess], models: Iterable[Counts]) -> None:
        """`members` are the supervisor's, as they are at any time. `models`: what is planned for each."""
        self._members = members
        self._wanted = {(each.model, pool): each.standby_of(pool) for each in models for pool in POOLS}

    def missing(self) -> Iterator[tuple[ModelName | None, Pool, int]]:
        """How many engines of which pools are to be started, so that there are as many as wanted."""
        for (model, pool), wanted in self._wanted.items():
            standing_by = {each.process.number for each in self._schedulers(model, pool)} if wanted else set()
            if (lacking := wanted - len(standing_by)) > 0:
                yield model, pool, lacking

    def promote(self, model: ModelName | None, pool: Pool, most: int) -> list[InstanceId]:
        """Has up to so many standby engines of a pool serve from now on, those first that are loaded; names their
        processes. Each scheduler is told with its next lifecycle message, or by `commands`."""
        by_worth = sorted(self._schedulers(model, pool), key=lambda each: (not each.is_ready, each.process.number))
        promoted: list[InstanceId] = []
        for scheduler in by_worth[: max(0, most)]:
            promoted += self._mark(scheduler.process.engine, standby=False)
        return promoted

    def replace(self, engine: EngineId | None) -> bool:
        """The engine has lost a process: where another one of its pool stands by, loaded, they change places. Whether
        they did."""
        lost = [m for m in self._members.values() if m.process.engine == engine and not m.standby and m.wanted]
        pool, model = (lost[0].process.pool, lost[0].process.model) if lost else (None, None)
        if engine is None or pool is None or not any(each.is_ready for each in self._schedulers(model, pool)):
            return False
        self.promote(model, pool, 1)
        self._mark(engine, standby=True)
        return True

    def record(self, scheduler: SupervisedProcess) -> None:
        """A lifecycle message has come: where an operator has made a standby serve, it does from now on."""
        if scheduler.process.service != "scheduler" or scheduler.lifecycle is None:
            return
        if scheduler.lifecycle.standby == scheduler.standby:
            scheduler.stood_by = scheduler.standby
        elif scheduler.standby and scheduler.stood_by:
            self._mark(scheduler.process.engine, standby=False)

    def commands(self, instance: InstanceId | None = None) -> Iterator[SetStandby]:
        """What schedulers are to be told, or the one that has just spoken; again while it says otherwise."""
        for each in self._members.values():
            if each.process.service != "scheduler" or each.state != "running" or each.lifecycle is None:
                continue
            if instance in (None, each.process.instance) and each.lifecycle.standby != each.standby:
                yield SetStandby(each.process.instance, each.standby)

    def _schedulers(self, model: ModelName | None, pool: Pool) -> list[SupervisedProcess]:
        standbys = [m for m in self._members.values() if m.standby and m.wanted and m.process.service == "scheduler"]
        return [member for member in standbys if (member.process.model, member.process.pool) == (model, pool)]

    def _mark(self, engine: EngineId | None, *, standby: bool) -> list[InstanceId]:
        marked = [member for member in self._members.values() if member.process.engine == engine]
        for member in marked:
            member.standby, member.stood_by = standby, False
        return [member.process.instance for member in marked]
