"""Decides which processes run: starts, restarts, scales and stops. No clock, no processes, no bus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import assert_never

import msgspec
from msgspec import Struct

from deploy.supervisor.core.events import (
    AbortStart,
    AnnounceDeath,
    ClockTick,
    Command,
    Event,
    KillProcess,
    LifecycleReceived,
    ProcessesStalled,
    ProcessExited,
    ProcessStarted,
    RanksLost,
    RanksRequested,
    ReplyToScale,
    ScaleRequested,
    StartProcess,
    StopRequested,
    TerminateProcess,
    WorkersReleased,
)
from deploy.supervisor.core.group_scaling import release_superseded
from deploy.supervisor.core.members import RestartPolicy, SupervisedProcess
from deploy.supervisor.core.plan import (
    MAX_COUNT,
    STOP_ORDER,
    Counts,
    ProcessSpec,
    all_process_specs,
    stop_stage,
)
from deploy.supervisor.core.scaling import Scaling
from deploy.supervisor.core.standbys import StandbyEngines
from shared.ids import EngineId, InstanceId
from shared.machine.gpu_topology import GpuTopology
from shared.messages.lifecycle import Lifecycle

BAD_SETTINGS_STATUS = 2
"""Exit status of a service whose settings cannot be used; starting it again would not help."""
KILL_RETRY_SECONDS = 1.0


class StopDeadlines(Struct, frozen=True, kw_only=True):
    """Seconds from the signal to end to SIGKILL."""

    drain: float = 32.0
    """For what holds requests of clients."""
    idle: float = 5.0
    """For what is left without work once the others are gone."""
    hurry: float = 2.0


class Supervisor:
    """Owns every process of the stack. Single writer; the shell hands in events and executes the commands."""

    def __init__(
        self,
        counts: Counts,
        policy: RestartPolicy | None = None,
        deadlines: StopDeadlines | None = None,
        *,
        holds_workers: bool = False,
        gpus: GpuTopology | None = None,
        models: Sequence[Counts] = (),
        max_instances: int = MAX_COUNT,
    ) -> None:
        """`holds_workers`: nothing that imports PyTorch starts before `WorkersReleased`. `gpus`: how those of this host
        are joined; None: not known. `models`: what each of several models has; `counts` is then what they share.
        `max_instances`: see `Scaling`."""
        self._policy = policy or RestartPolicy()
        self._deadlines = deadlines or StopDeadlines()
        self._counts = counts
        self._members: dict[InstanceId, SupervisedProcess] = {}
        self._plans = {each.model: each for each in (counts, *models)}
        """By model; None: what is no model's own, and all of it where there is one."""
        self._standbys = StandbyEngines(self._members, self._plans.values())
        self._scaling = Scaling(self._members, counts, self._plans, self._standbys, gpus, max_instances)
        self._scaling.add_processes(all_process_specs(counts, models), 0.0)
        self._stops_asked = 0
        self._requested: dict[EngineId, str] = {}
        """Where the ranks of an engine are to meet, on a host that is not the first."""
        self._unanswered: set[EngineId] = set()
        """Engines that were called, and whose ranks here have not been started since."""
        self.holds_workers = holds_workers
        self.settled = False
        """Whether all were ready at some moment: before it a failing start is given up, after it never."""

    def adopt(self, members: Iterable[SupervisedProcess], *, settled: bool, requested: Mapping[EngineId, str]) -> None:
        """Goes on with the processes of a former supervisor instead of those that were planned. `requested` is where
        the ranks of each engine met."""
        adopted = {member.process.instance: member for member in members}
        self._members.clear()
        self._members.update(adopted)
        self._requested = {} if self._counts.leads else dict(requested)
        self.settled = settled

    def members(self) -> Iterator[SupervisedProcess]:
        """All processes, running or waiting, in the order in which they were planned."""
        yield from self._members.values()

    def member(self, instance: InstanceId) -> SupervisedProcess | None:
        """The process of that name, or that runs the actor of that name; None where this host has none."""
        if (member := self._members.get(instance)) is not None:
            return member
        hosts = (m for m in self._members.values() if any(each.instance == instance for each in m.process.hosted))
        return next(hosts, None)

    def looks_after(self, instance: InstanceId) -> bool:
        """Whether it is a process of this host, running or waiting, or in one."""
        return self.member(instance) is not None

    def failed(self) -> frozenset[InstanceId]:
        """Who has died so often in a row that somebody should look, and is not ready now."""
        limit = self._policy.failures_until_failed
        return frozenset(name for name, m in self._members.items() if m.failures >= limit and not m.is_ready)

    @property
    def stopping(self) -> bool:
        """Whether a stop of the stack was requested."""
        return self._stops_asked > 0

    @property
    def is_empty(self) -> bool:
        """Whether no process is left, nor will be started."""
        return not self._members

    @property
    def all_ready(self) -> bool:
        """Whether every process that is wanted takes requests."""
        return all(member.is_ready for member in self._members.values() if member.wanted)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Takes an event in and answers with everything that is to be done by `now`."""
        commands = list(self._apply(event, now))
        self.settled = self.settled or (self.all_ready and not self.stopping)
        release_superseded(self._members)
        if self.settled and not self.stopping:
            for model, pool, lacking in tuple(self._standbys.missing()):
                self._scaling.add(pool, model, lacking, now, standby=True)
        match event:
            case LifecycleReceived(lifecycle):
                commands += self._standbys.commands(lifecycle.instance)
            case ProcessExited() | ScaleRequested():
                commands += self._standbys.commands()
            case _:
                pass
        return [*commands, *self._ends(now), *self._starts(now), *self._overdue(now)]

    def _apply(self, event: Event, now: float) -> Iterable[Command]:
        match event:
            case ProcessStarted(instance, pid):
                self._members[instance].pid = pid
                return ()
            case LifecycleReceived(lifecycle):
                self._record_lifecycle(lifecycle, now)
                return ()
            case ProcessExited(instance, status):
                return self._exited(instance, status, now)
            case ScaleRequested():
                return (ReplyToScale(self._scaling.scale(event, now, stopping=self.stopping)),)
            case ProcessesStalled(instances):
                return self._kill(self._present(instances), now)
            case RanksRequested():
                return self._ranks_requested(event, now)
            case RanksLost(engine):
                return self._kill(_running(self._ranks_of(engine)), now)
            case StopRequested():
                return self._stop(now)
            case WorkersReleased():
                self.holds_workers = False
                return ()
            case ClockTick():
                return ()
            case _:
                assert_never(event)

    def _present(self, instances: Iterable[InstanceId]) -> list[SupervisedProcess]:
        """Nobody where the first is being ended: one of many GiB may take seconds to go, and who was started meanwhile
        has not stalled."""
        found = {id(member): member for member in map(self.member, instances) if member is not None}
        members = list(found.values())
        return [member for member in members if member.state == members[0].state == "running"]

    def _record_lifecycle(self, lifecycle: Lifecycle, now: float) -> None:
        member = self.member(lifecycle.instance)
        if member is not None and member.state != "waiting" and member.pid == lifecycle.pid:
            if member.process.instance == lifecycle.instance:
                member.lifecycle = lifecycle
            else:
                member.hosted[lifecycle.instance] = lifecycle
            if member.is_ready and member.ready_since is None:
                member.ready_since = now
            self._standbys.record(member)

    # ---- deaths

    def _exited(self, instance: InstanceId, status: int | None, now: float) -> list[Command]:
        member = self._members[instance]
        commands: list[Command] = []
        lives = [*member.hosted.values(), *([] if member.lifecycle is None else [member.lifecycle])]
        for life in lives if status != 0 else []:
            if life.phase not in ("stopped", "failed"):
                commands.append(AnnounceDeath(msgspec.structs.replace(life, phase="failed")))
        own_fault, ready_since = member.state == "running", member.ready_since
        self._mark_gone(member)
        if not member.wanted:
            del self._members[instance]
            return commands
        if self.settled and not self.stopping:
            self._standbys.replace(member.process.engine)
        member.restarts += 1
        member.status = status
        member.due = now + (self._count_failure(member, ready_since, now) if own_fault else 0.0)
        if member.process.service == "worker":
            commands += self._kill(_running(self._group_ranks(member.process)), now)
        if not self.settled and (status == BAD_SETTINGS_STATUS or member.failures >= self._policy.failures_at_start):
            commands.append(AbortStart(instance, status))
        return commands

    def _mark_gone(self, member: SupervisedProcess) -> None:
        member.move("waiting")
        member.pid = member.lifecycle = member.deadline = member.ready_since = None
        member.hosted = {}

    def _count_failure(self, member: SupervisedProcess, ready_since: float | None, now: float) -> float:
        if ready_since is not None and now - ready_since >= self._policy.healthy_after:
            member.failures = 0
        member.failures += 1
        return self._policy.pause(member.failures)

    def _group_ranks(self, process: ProcessSpec) -> list[SupervisedProcess]:
        """The ranks of a process's engine, and of the engines that share experts with it: collectives cannot go on
        without one of them, and a rank inside one hears no signal but SIGKILL."""
        return [m for m in self._members.values() if m.process.service == "worker" and m.process.group == process.group]

    def _ranks_of(self, engine: EngineId | None) -> list[SupervisedProcess]:
        return [m for m in self._members.values() if m.process.service == "worker" and m.process.engine == engine]

    def _kill(self, members: Iterable[SupervisedProcess], now: float) -> list[Command]:
        commands: list[Command] = []
        for member in members:
            member.move("ending")
            member.deadline = now + KILL_RETRY_SECONDS
            commands.append(KillProcess(member.process.instance))
        return commands

    # ---- several hosts

    def _ranks_requested(self, call: RanksRequested, now: float) -> list[Command]:
        if self._requested.get(call.engine) == call.rendezvous or not self._ranks_of(call.engine):
            return []
        self._requested[call.engine] = call.rendezvous
        self._unanswered.add(call.engine)
        return self._kill(_running(self._ranks_of(call.engine)), now)

    def answered(self) -> Iterator[tuple[EngineId, str, bool]]:
        """Engines whose ranks here were started where they were called to, and whether all of them still run."""
        for engine, rendezvous in self._requested.items():
            if engine not in self._unanswered:
                yield engine, rendezvous, all(m.state == "running" for m in self._ranks_of(engine))

    # ---- starts

    def _starts(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for member in self._members.values():
            if member.state == "waiting" and member.due <= now and self._may_start(member, now):
                commands += self._start(member)
        return commands

    def _may_start(self, member: SupervisedProcess, now: float) -> bool:
        """The ranks of an engine start together, and with those that share experts with it, once the last of the former
        ones is gone."""
        if self.holds_workers and member.process.imports_torch:
            return False
        if member.process.service != "worker":
            return True
        if not self._counts.leads and member.process.engine not in self._unanswered:
            return False
        return all(m.state == "waiting" and m.due <= now for m in self._group_ranks(member.process))

    def _start(self, member: SupervisedProcess) -> list[Command]:
        group = self._group_ranks(member.process) if member.process.service == "worker" else [member]
        if member.process.engine is not None:
            self._unanswered.discard(member.process.engine)
        for one in group:
            one.move("running")
        # A scheduler that starts behind ranks of its group must not send the others elsewhere.
        meets = member.process.service == "worker"
        return [StartProcess(one.process, meets and one is group[0], one.device, one.standby) for one in group]

    # ---- ends

    def _ends(self, now: float) -> list[Command]:
        """Terminates the unwanted processes that may end now."""
        if self.stopping:
            self._release_stages()
        self._drop_waiting()
        commands: list[Command] = []
        for member in self._members.values():
            if not member.wanted and member.state == "running" and self._may_end(member.process):
                member.move("ending")
                member.deadline = now + self._patience(member.process)
                commands.append(TerminateProcess(member.process.instance))
        return commands

    def _release_stages(self) -> None:
        """Stops the first stage that has processes, and no later one: what it still needs is still restarted."""
        for number in range(len(STOP_ORDER)):
            of_stage = [m for m in self._members.values() if stop_stage(m.process.service) == number]
            for member in of_stage:
                member.wanted = False
            if self._stops_asked == 1 and any(member.state != "waiting" for member in of_stage):
                return

    def _drop_waiting(self) -> None:
        gone = [m.process.instance for m in self._members.values() if not m.wanted and m.state == "waiting"]
        for instance in gone:
            del self._members[instance]

    def _may_end(self, process: ProcessSpec) -> bool:
        """An engine's ranks end after its scheduler, and those of engines that share experts with it: what these still
        have, they compute."""
        if self._stops_asked > 1 or process.engine is None:
            return True
        others = (m.process for m in self._members.values() if m.process.group == process.group)
        return not any(stop_stage(other.service) < stop_stage(process.service) for other in others)

    def _patience(self, process: ProcessSpec) -> float:
        if self._stops_asked > 1:
            return self._deadlines.hurry
        if self._stops_asked == 1 and process.service != "gateway":
            return self._deadlines.idle
        return self._deadlines.idle if process.service == "worker" else self._deadlines.drain

    def _overdue(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for member in self._members.values():
            if member.deadline is not None and now >= member.deadline:
                member.deadline = now + KILL_RETRY_SECONDS
                commands.append(KillProcess(member.process.instance))
        return commands

    def _stop(self, now: float) -> list[Command]:
        self._stops_asked += 1
        if self._stops_asked == 2:
            for member in self._members.values():
                if member.deadline is not None:
                    member.deadline = min(member.deadline, now + self._deadlines.hurry)
        if self._stops_asked <= 2:
            return []
        ending = [KillProcess(m.process.instance) for m in self._members.values() if m.state == "ending"]
        return [*ending, *self._kill(self._present(self._members), now)]


def _running(members: Iterable[SupervisedProcess]) -> list[SupervisedProcess]:
    return [member for member in members if member.state == "running"]
