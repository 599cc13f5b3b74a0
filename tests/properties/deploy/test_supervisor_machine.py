"""Whatever happens in whatever order: one process per seat, ranks together, and a stop that comes to an end."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
    ReplyToScale,
    ScaleRequested,
    StartProcess,
    StopRequested,
    TerminateProcess,
)
from deploy.supervisor.core.plan import DECODING, SCALABLE, Counts
from deploy.supervisor.core.supervisor import Supervisor
from shared.ids import Incarnation, InstanceId
from shared.messages.lifecycle import Lifecycle, Phase

COUNT = st.integers(1, 3)


class FleetMachine(RuleBasedStateMachine):
    """Plays the shell and the processes: `alive` is what really runs."""

    @initialize(
        engines=st.integers(0, 2), prefill=st.integers(0, 2), decode=COUNT, ranks=COUNT, fewer=COUNT, tokenizers=COUNT
    )
    def begin(self, engines: int, prefill: int, decode: int, ranks: int, fewer: int, tokenizers: int) -> None:
        self.counts = Counts(
            engines=engines,
            ranks=ranks,
            prefill=prefill,
            prefill_ranks=fewer,
            decode=decode,
            decode_ranks=ranks,
            tokenizer=tokenizers,
            kvstore=1,
        )
        self.supervisor = Supervisor(self.counts)
        self.now = 0.0
        self.alive: dict[InstanceId, int] = {}
        self.told_to_end: set[InstanceId] = set()
        self.stops = 0
        self._pids = 1
        self._happens(ClockTick())

    def _happens(self, event: Event) -> list[Command]:
        commands = self.supervisor.handle(event, self.now)
        self._check_ranks_start_together(commands)
        for command in commands:
            self._obey(command)
        return commands

    def _check_ranks_start_together(self, commands: list[Command]) -> None:
        started = [c for c in commands if isinstance(c, StartProcess) and c.process.service == "worker"]
        for engine, pool in {(c.process.engine, c.process.pool) for c in started}:
            ranks = [(c.process.rank, c.device) for c in started if c.process.engine == engine]
            first = ranks[0][1] or 0
            assert ranks == [(rank, first + rank) for rank in range(self.counts.ranks_of(pool or "engines"))]

    def _obey(self, command: Command) -> None:
        match command:
            case StartProcess(process, _, device):
                assert process.instance not in self.alive, "two processes in one seat"
                self._check_device_is_free(process.instance, device)
                self._pids += 1
                self.alive[process.instance] = self._pids
                self.told_to_end.discard(process.instance)
                assert self.supervisor.handle(ProcessStarted(process.instance, self._pids), self.now) == []
            case TerminateProcess(instance) | KillProcess(instance):
                assert instance in self.alive, "an order to nobody"
                if isinstance(command, TerminateProcess) and instance == "kvstore-1" and self.stops == 1:
                    assert set(self.alive) == {"kvstore-1"}, "the store goes last"
                self.told_to_end.add(instance)
            case AnnounceDeath(lifecycle):
                assert lifecycle.phase == "failed"
            case ReplyToScale() | AbortStart():
                pass

    def _check_device_is_free(self, instance: InstanceId, device: int | None) -> None:
        others = {
            m.device
            for m in self.supervisor.members()
            if m.process.instance != instance and m.process.instance in self.alive
        }
        assert device is None or device not in others

    def _ends(self, instance: InstanceId, status: int) -> None:
        del self.alive[instance]
        self.told_to_end.discard(instance)
        self._happens(ProcessExited(instance, status))

    @rule(seconds=st.sampled_from((0.0, 0.2, 1.0, 11.0, 40.0)))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds
        self._happens(ClockTick())

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), status=st.sampled_from((-9, 0, 1, 2)))
    def somebody_dies(self, data: st.DataObject, status: int) -> None:
        self._ends(data.draw(st.sampled_from(sorted(self.alive))), status)

    @precondition(lambda self: self.told_to_end)
    @rule()
    def whoever_was_told_ends(self) -> None:
        for instance in sorted(self.told_to_end):
            if instance in self.alive:
                self._ends(instance, 0)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), phase=st.sampled_from(("starting", "ready", "draining", "stopped")))
    def somebody_speaks(self, data: st.DataObject, phase: Phase) -> None:
        instance = data.draw(st.sampled_from(sorted(self.alive)))
        self._happens(LifecycleReceived(self._said(instance, phase)))

    def _said(self, instance: InstanceId, phase: Phase) -> Lifecycle:
        return Lifecycle(
            service="tokenizer",
            instance=instance,
            incarnation=Incarnation(1),
            phase=phase,
            pid=self.alive[instance],
            host="h",
            started=0.0,
        )

    @rule(what=st.sampled_from(SCALABLE), count=st.integers(0, 4))
    def somebody_scales(self, what: str, count: int) -> None:
        assert sum(isinstance(c, ReplyToScale) for c in self._happens(ScaleRequested(what, count))) == 1

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def somebody_stalls(self, data: st.DataObject) -> None:
        self._happens(ProcessesStalled((data.draw(st.sampled_from(sorted(self.alive))),)))

    @precondition(lambda self: self.stops < 3)
    @rule()
    def a_stop_is_asked(self) -> None:
        self.stops += 1
        self._happens(StopRequested())

    @invariant()
    def the_fleet_knows_exactly_who_lives(self) -> None:
        known = {m.process.instance for m in self.supervisor.members() if m.state != "waiting"}
        assert known == set(self.alive)

    @invariant()
    def an_engine_has_all_its_seats_or_is_leaving(self) -> None:
        wanted = [m.process for m in self.supervisor.members() if m.wanted and m.process.engine is not None]
        for engine, pool in {(process.engine, process.pool) for process in wanted if process.service == "scheduler"}:
            if not self.stops:
                assert sum(process.engine == engine for process in wanted) == 1 + self.counts.ranks_of(
                    pool or "engines"
                )

    @invariant()
    def some_engine_can_see_a_request_to_its_end(self) -> None:
        assert self.stops or any(m.wanted and m.process.pool in DECODING for m in self.supervisor.members())

    def teardown(self) -> None:
        """From wherever it is, a stop comes to an end when processes obey a kill."""
        if not hasattr(self, "supervisor"):
            return
        self.a_stop_is_asked()
        for _ in range(200):
            if self.supervisor.is_empty:
                break
            self.whoever_was_told_ends()
            self.time_goes_on(1.0)
        assert self.supervisor.is_empty
        assert not self.alive


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
