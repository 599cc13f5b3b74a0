"""Decides which processes run: starts, restarts, scales and stops. No clock, no processes, no bus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import assert_never

import msgspec
from msgspec import Struct

from deploy.supervisor.core.events import (
    Announce,
    Answer,
    Command,
    Event,
    Exited,
    GiveUp,
    Heard,
    Kill,
    RanksCalled,
    RanksLost,
    ScaleAsked,
    Spawned,
    Stalled,
    Start,
    StopAsked,
    Terminate,
    Ticked,
)
from deploy.supervisor.core.members import Member, first_free
from deploy.supervisor.core.plan import (
    DECODING,
    LARGEST_COUNT,
    POOLS,
    SCALABLE,
    STOP_ORDER,
    Counts,
    Scalable,
    Seat,
    all_seats,
    seats,
    stage,
)
from deploy.supervisor.core.restarts import RestartPolicy
from shared.ids import EngineId, InstanceId
from shared.messages.lifecycle import Lifecycle
from shared.messages.supervisor import Scaled, ScaleRefused

BAD_SETTINGS = 2
"""Exit status of a service whose settings cannot be used; starting it again would not help."""
KILL_AGAIN = 1.0


class StopDeadlines(Struct, frozen=True, kw_only=True):
    """Seconds from being told to end to being killed."""

    drain: float = 32.0
    """For what holds requests of clients."""
    idle: float = 5.0
    """For what is left without work once the others are gone."""
    hurry: float = 2.0


class Fleet:
    """Owns every member. Single writer; the shell hands in events and executes what is answered."""

    def __init__(
        self, counts: Counts, policy: RestartPolicy | None = None, deadlines: StopDeadlines | None = None
    ) -> None:
        self._policy = policy or RestartPolicy()
        self._deadlines = deadlines or StopDeadlines()
        self._counts = counts
        self._members: dict[InstanceId, Member] = {}
        self._seat(all_seats(counts), 0.0)
        self._stops_asked = 0
        self._called: dict[EngineId, str] = {}
        """Where the ranks of an engine are to meet, on a host that is not the first."""
        self._unanswered: set[EngineId] = set()
        """Engines that were called, and whose ranks here have not been started since."""
        self.settled = False
        """Whether all were ready at some moment: before it a failing start is given up, after it never."""

    def members(self) -> Iterator[Member]:
        yield from self._members.values()

    @property
    def stopping(self) -> bool:
        return self._stops_asked > 0

    @property
    def is_empty(self) -> bool:
        return not self._members

    @property
    def all_ready(self) -> bool:
        return all(member.is_ready for member in self._members.values() if member.wanted)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Takes an event in and answers with everything that is to be done by `now`."""
        commands = list(self._take(event, now))
        self.settled = self.settled or (self.all_ready and not self.stopping)
        return [*commands, *self._ends(now), *self._starts(now), *self._overdue(now)]

    def _take(self, event: Event, now: float) -> Iterable[Command]:
        match event:
            case Spawned(instance, pid):
                self._members[instance].pid = pid
                return ()
            case Heard(lifecycle):
                self._heard(lifecycle)
                return ()
            case Exited(instance, status):
                return self._exited(instance, status, now)
            case ScaleAsked(service, count):
                return (self._scale(service, count, now),)
            case Stalled(instances):
                return self._kill(self._present(instances), now)
            case RanksCalled():
                return self._called_for(event, now)
            case RanksLost(engine):
                return self._kill(self._running_ranks(engine), now)
            case StopAsked():
                return self._stop(now)
            case Ticked():
                return ()
            case _:
                assert_never(event)

    def _present(self, instances: Iterable[InstanceId]) -> list[Member]:
        found = (self._members.get(instance) for instance in instances)
        return [member for member in found if member is not None and member.state == "running"]

    def _heard(self, lifecycle: Lifecycle) -> None:
        member = self._members.get(lifecycle.instance)
        if member is not None and member.state != "waiting" and member.pid == lifecycle.pid:
            member.heard = lifecycle

    # ---- deaths

    def _exited(self, instance: InstanceId, status: int, now: float) -> list[Command]:
        member = self._members[instance]
        commands: list[Command] = []
        if status != 0 and member.heard is not None and member.phase not in ("stopped", "failed"):
            commands.append(Announce(msgspec.structs.replace(member.heard, phase="failed")))
        own_fault = member.state == "running"
        self._vacate(member)
        if not member.wanted:
            del self._members[instance]
            return commands
        member.restarts += 1
        member.due = now + (self._count_failure(member, now) if own_fault else 0.0)
        if member.seat.service == "worker":
            commands += self._kill(self._running_ranks(member.seat.engine), now)
        if not self.settled and (status == BAD_SETTINGS or member.failures >= self._policy.failures_at_start):
            commands.append(GiveUp(instance, status))
        return commands

    def _vacate(self, member: Member) -> None:
        member.move("waiting")
        member.pid = member.heard = member.deadline = None

    def _count_failure(self, member: Member, now: float) -> float:
        if now - member.spawned >= self._policy.healthy_after:
            member.failures = 0
        member.failures += 1
        return self._policy.pause(member.failures)

    def _running_ranks(self, engine: EngineId | None) -> list[Member]:
        """Collectives cannot go on without one of the ranks, and a rank inside one hears no signal but this."""
        return [m for m in self._ranks_of(engine) if m.state == "running"]

    def _ranks_of(self, engine: EngineId | None) -> list[Member]:
        return [m for m in self._members.values() if m.seat.service == "worker" and m.seat.engine == engine]

    def _kill(self, members: Iterable[Member], now: float) -> list[Command]:
        commands: list[Command] = []
        for member in members:
            member.move("ending")
            member.deadline = now + KILL_AGAIN
            commands.append(Kill(member.seat.instance))
        return commands

    # ---- several hosts

    def _called_for(self, call: RanksCalled, now: float) -> list[Command]:
        if self._called.get(call.engine) == call.rendezvous or not self._ranks_of(call.engine):
            return []
        self._called[call.engine] = call.rendezvous
        self._unanswered.add(call.engine)
        return self._kill(self._running_ranks(call.engine), now)

    def rendezvous_of(self, engine: EngineId) -> str | None:
        """Where the first host called its ranks to."""
        return self._called.get(engine)

    def answered(self) -> Iterator[tuple[EngineId, str, bool]]:
        """Engines whose ranks here were started where they were called to, and whether all of them still run."""
        for engine, rendezvous in self._called.items():
            if engine not in self._unanswered:
                yield engine, rendezvous, all(m.state == "running" for m in self._ranks_of(engine))

    # ---- starts

    def _starts(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for member in self._members.values():
            if member.state == "waiting" and member.due <= now and self._may_start(member, now):
                commands += self._start(member, now)
        return commands

    def _may_start(self, member: Member, now: float) -> bool:
        """The ranks of an engine start together, once the last of the former ones is gone."""
        if member.seat.service != "worker":
            return True
        if not self._counts.leads and member.seat.engine not in self._unanswered:
            return False
        return all(m.state == "waiting" and m.due <= now for m in self._ranks_of(member.seat.engine))

    def _start(self, member: Member, now: float) -> list[Command]:
        group = self._ranks_of(member.seat.engine) if member.seat.service == "worker" else [member]
        if member.seat.engine is not None:
            self._unanswered.discard(member.seat.engine)
        for one in group:
            one.move("running")
            one.spawned = now
        return [Start(one.seat, position == 0, one.device) for position, one in enumerate(group)]

    # ---- ends

    def _ends(self, now: float) -> list[Command]:
        """Tells those to end who are not wanted and whose turn it is."""
        if self.stopping:
            self._release_stages()
        self._drop_waiting()
        commands: list[Command] = []
        for member in self._members.values():
            if not member.wanted and member.state == "running" and self._is_its_turn(member.seat):
                member.move("ending")
                member.deadline = now + self._patience(member.seat)
                commands.append(Terminate(member.seat.instance))
        return commands

    def _release_stages(self) -> None:
        """Lets the first stage go that has processes, and no later one: whoever they still need is still restarted."""
        for number in range(len(STOP_ORDER)):
            of_stage = [m for m in self._members.values() if stage(m.seat.service) == number]
            for member in of_stage:
                member.wanted = False
            if self._stops_asked == 1 and any(member.state != "waiting" for member in of_stage):
                return

    def _drop_waiting(self) -> None:
        gone = [m.seat.instance for m in self._members.values() if not m.wanted and m.state == "waiting"]
        for instance in gone:
            del self._members[instance]

    def _is_its_turn(self, seat: Seat) -> bool:
        """An engine's ranks end after its scheduler: what it still has, they compute."""
        if self._stops_asked > 1 or seat.engine is None:
            return True
        others = (m.seat for m in self._members.values() if m.seat.engine == seat.engine)
        return not any(stage(other.service) < stage(seat.service) for other in others)

    def _patience(self, seat: Seat) -> float:
        if self._stops_asked > 1:
            return self._deadlines.hurry
        if self._stops_asked == 1 and seat.service != "gateway":
            return self._deadlines.idle
        return self._deadlines.idle if seat.service == "worker" else self._deadlines.drain

    def _overdue(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for member in self._members.values():
            if member.deadline is not None and now >= member.deadline:
                member.deadline = now + KILL_AGAIN
                commands.append(Kill(member.seat.instance))
        return commands

    def _stop(self, now: float) -> list[Command]:
        self._stops_asked += 1
        if self._stops_asked == 2:
            for member in self._members.values():
                if member.deadline is not None:
                    member.deadline = min(member.deadline, now + self._deadlines.hurry)
        if self._stops_asked <= 2:
            return []
        ending = [Kill(m.seat.instance) for m in self._members.values() if m.state == "ending"]
        return [*ending, *self._kill(self._present(self._members), now)]

    # ---- scaling

    def _scale(self, service: str, count: int, now: float) -> Answer:
        what = next((each for each in SCALABLE if each == service), None)
        if what is None:
            return Answer(ScaleRefused(f"{service}: cannot be scaled; {', '.join(SCALABLE)} can"))
        if what in POOLS and self._counts.hosts > 1:
            return Answer(ScaleRefused(f"{service}: engines over several hosts cannot be scaled"))
        least = self._least(what)
        if not least <= count <= LARGEST_COUNT:
            return Answer(ScaleRefused(f"{service}={count}: from {least} to {LARGEST_COUNT} are possible"))
        if self.stopping:
            return Answer(ScaleRefused("the stack is stopping"))
        numbers = self._numbers(what)
        started = self._add(what, count - len(numbers), now)
        stopping = self._let_go(what, self._dispensable(what)[: max(0, len(numbers) - count)])
        return Answer(Scaled(started=tuple(started), stopping=tuple(stopping)))

    def _least(self, what: Scalable) -> int:
        """Prefill engines may all go, and so may others while some remain that finish what was begun."""
        if what not in POOLS:
            return 1
        others = sum(len(self._numbers(pool)) for pool in DECODING if pool != what)
        return 1 if what in DECODING and not others else 0

    def _numbers(self, what: Scalable) -> set[int]:
        return {m.seat.number for m in self._members.values() if m.wanted and m.seat.kind == what}

    def _add(self, what: Scalable, how_many: int, now: float) -> list[InstanceId]:
        added: list[InstanceId] = []
        taken = {m.seat.number for m in self._members.values() if m.seat.kind == what}
        for _ in range(how_many):
            number = next(n for n in range(1, 2 * LARGEST_COUNT + 2) if n not in taken)
            taken.add(number)
            new = seats(what, number, self._counts)
            self._seat(new, now)
            added += [seat.instance for seat in new]
        return added

    def _seat(self, new: list[Seat], due: float) -> None:
        """Whole engines only: their ranks get devices side by side."""
        taken = {member.device for member in self._members.values()}
        for _, group in groupby(new, key=lambda seat: seat.engine):
            members = [Member(seat, due=due) for seat in group]
            workers = [member for member in members if member.seat.service == "worker"]
            for device, worker in enumerate(workers, start=first_free(taken, len(workers))):
                worker.device = device
                taken.add(device)
            self._members |= {member.seat.instance: member for member in members}

    def _dispensable(self, what: Scalable) -> list[int]:
        """Whom to stop first: who was drained, then who is not ready, of equals the newest. Whoever serves, stays."""
        of: dict[int, list[Member]] = {number: [] for number in self._numbers(what)}
        for member in self._members.values():
            if member.wanted and member.seat.kind == what:
                of[member.seat.number].append(member)

        def worth(number: int) -> tuple[bool, bool, int]:
            members = of[number]
            drained = any(member.phase == "draining" for member in members)
            return not drained, all(member.is_ready for member in members), -number

        return sorted(of, key=worth)

    def _let_go(self, what: Scalable, numbers: list[int]) -> list[InstanceId]:
        leaving = [m for m in self._members.values() if m.seat.kind == what and m.seat.number in numbers]
        for member in leaving:
            member.wanted = False
        return [member.seat.instance for member in leaving]
