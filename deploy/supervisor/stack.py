"""Runs a whole stack until it is to stop: hands events to the supervisor's core and executes its commands."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, assert_never

from msgspec.structs import astuple

from deploy.supervisor.adoption import LeftStack, end_processes, end_strays, left_stack
from deploy.supervisor.command_executor import CommandExecutor
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
    SetStandby,
    StartProcess,
    StopRequested,
    TerminateProcess,
    WorkersReleased,
)
from deploy.supervisor.core.members import ready_once, with_its_engine
from deploy.supervisor.core.supervisor import StopDeadlines, Supervisor
from deploy.supervisor.core.watchdog import PauseFreeClock, Watchdog, WatchLimits
from deploy.supervisor.hosts import hosts_of
from deploy.supervisor.launch import CommandLineOf, service_command
from deploy.supervisor.log_files import LAST_LINES, LogFolder, failure_reason, full_disk, last_lines
from deploy.supervisor.network import reserved_port
from deploy.supervisor.processes import ChildProcesses, RemoteEvents, RemoteProcesses, handled_signals
from deploy.supervisor.servers.arenas import remove_leftovers
from deploy.supervisor.servers.prometheus_targets import PrometheusTargets
from deploy.supervisor.servers.server_process import HOST
from deploy.supervisor.servers.stack_servers import SERVERS, StackServers
from deploy.supervisor.spec import StackSpec
from deploy.supervisor.state_file import (
    StackPhase,
    StackState,
    held,
    recorded,
    remove_state,
    write_state,
)
from shared import topics
from shared.bus import Bus
from shared.config import inherited_environment
from shared.ids import InstanceId
from shared.messages.lifecycle import Lifecycle, LifecycleRequest
from shared.messages.supervisor import ScaleReply, StrikeProcess, StrikeReply, SupervisorOrder
from shared.telemetry.logs import set_up_logs

log = logging.getLogger(__name__)

TICK = 0.2
LOG_BOUND_EVERY = 5.0
MAX_LIFECYCLES_QUEUED = 10_000
"""Lifecycle messages waiting; above it the bus's own bounded queue fills."""

Beside = Callable[[], Coroutine[Any, Any, None]]


class StartFailed(Exception):
    """The stack did not come up; the text names the process and says why, or has the last words of its log."""

    def __init__(self, instance: InstanceId, reason: str, log_file: Path) -> None:
        said = failure_reason(log_file)
        self.instance, self.last_lines = instance, () if said else tuple(last_lines(log_file, LAST_LINES))
        why = f"cannot serve: {said}\n  Its log is {log_file}." if said else f"{reason}. Its last words ({log_file}):"
        self.heading = f"{instance} {why}"
        super().__init__("\n".join([self.heading, *(f"  {line}" for line in self.last_lines)]))


class Stack:
    """Owns the supervisor's core, the processes and the run directory. `run` returns when everything has ended."""

    def __init__(
        self, spec: StackSpec, launch: CommandLineOf = service_command, remote: RemoteProcesses | None = None
    ) -> None:
        """`remote`: what runs processes on other machines; None: all run on this one."""
        self.spec = spec
        forks = spec.forks and launch is service_command and remote is None
        deadlines = StopDeadlines(drain=spec.drain_timeout + 2.0)
        self.supervisor = Supervisor(
            spec.counts,
            deadlines=deadlines,
            holds_workers=forks,
            gpus=spec.gpus,
            models=spec.model_counts,
            max_instances=spec.max_instances,
        )
        self.logs = LogFolder(spec.run_dir)
        self.port = spec.port
        self.children = ChildProcesses(inherited_environment(), spec.run_dir)
        self._servers = servers = StackServers(spec, self.children, self.logs)
        self._executor = CommandExecutor(
            spec, launch, servers.access, servers.store, servers.federation, self.children, self.logs, remote
        )
        self._remote = remote
        if remote is not None:
            remote.attach(RemoteEvents(self._started_elsewhere, self._record_exit), self.logs.of)
        if forks:
            self._executor.make_templates(lambda: self._wake.set())
        self._hosts = hosts_of(spec, self.supervisor, self._executor)
        self._targets = PrometheusTargets(spec.run_dir, spec.name)
        self.adopted = 0
        """Processes that a former supervisor had started, and that this one went on with."""
        self._watchdog = Watchdog(WatchLimits(step=spec.step_limit, silence=spec.silence_limit))
        self._watch_clock = PauseFreeClock()
        self._failure: StartFailed | None = None
        self._started = time.time()
        self._lifecycles: asyncio.Queue[Lifecycle] = asyncio.Queue(MAX_LIFECYCLES_QUEUED)
        self._saved: tuple[StackPhase, Collection[InstanceId], Collection[InstanceId]] | None = None
        self._save_problem: str | None = None
        self._log_problem: str | None = None
        self._last_lines: dict[str, tuple[str, ...]] = {}
        """Of the log of each process that died, as they were then."""
        self._news: list[Event] = []
        """To be handled before all else: stops, and who of the former supervisor's processes has ended since."""
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self.stop_asked = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None
        self._serves = False
        self._bus: Bus

    @property
    def url(self) -> str:
        """Where clients reach the gateways, from this machine."""
        host = HOST if self.spec.host in ("", "0.0.0.0", "::") else self.spec.host
        scheme = "https" if "ssl_certfile" in self.spec.settings.get("gateway", {}) else "http"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    @property
    def phase(self) -> StackPhase:
        """Starting until all processes were ready once, then ready, and stopping from the first request to stop."""
        if self.supervisor.stopping:
            return "stopping"
        return "ready" if self.supervisor.settled else "starting"

    def stop(self) -> None:
        """Ends the stack in order; called again, faster; a third time, at once."""
        log.info("stop requested")
        self.stop_asked.set()
        self._handle(StopRequested())

    async def run(self, beside: Sequence[Beside] = (), stops: int = 0) -> None:
        """Serves until stopped; `beside` are run meanwhile and cancelled at the end. Goes on with what a former
        supervisor left running, or with `stops`, as of `stop`, ends it: nothing that has ended is started for that.

        Raises StartFailed, NatsServerUnavailable, RedisServerUnavailable, StackRunning, StackDiffers, PortTaken,
        BusError, OSError; whatever was started has ended then, unless the stack had been up: that goes on as the
        next supervisor's.
        """
        with held(self.spec.run_dir):
            left = left_stack(self.spec.run_dir)
            if left is not None:
                left.check_same(self.spec)
            else:
                end_strays(self.spec.run_dir)
                remove_state(self.spec.run_dir)
                self.logs.begin_run()
            port = self.spec.port if left is None else left.state.port
            with (
                reserved_port(self.spec.host, port, ours=left is not None) as self.port,
                self.logs.stream("supervisor") as own_log,
            ):
                logging.raiseExceptions = False  # one that cannot be written is not worth a traceback on the terminal
                set_up_logs("supervisor", "supervisor", self.spec.log_level, own_log)
                with handled_signals(self._end, self._wake.set):
                    await self._run_all(beside, left, stops)
        if self._failure is not None:
            raise self._failure

    async def _run_all(self, beside: Sequence[Beside], left: LeftStack | None, stops: int) -> None:
        self._task = asyncio.current_task()
        try:
            processes = [] if left is None else [record.member().process for record in left.state.members]
            elsewhere = {} if self._remote is None else await self._remote.adopt(processes)
            if left is not None:
                self._adopt(left, elsewhere, stops)
            former = left.state if left is not None else None
            self._executor.start_service_template()
            await self._servers.start(former)
            self._executor.start_templates(self.port)
            async with self._servers.access.connection() as self._bus:
                if left is None:  # those that go on need no template
                    await self._executor.services_may_start()
                await self._serve(beside)
            await self._servers.end()
        except Exception:
            if self._is_worth_keeping:
                log.exception("the supervisor ends, and the stack goes on without it")
                raise
            self._end_all()
            raise
        except BaseException:
            self._end_all()
            raise
        self._end_all()

    @property
    def _is_worth_keeping(self) -> bool:
        return (self.adopted > 0 or self.supervisor.settled) and not self.supervisor.stopping

    def _end_all(self) -> None:
        self.children.kill_all()
        self._executor.close_templates()
        self._targets.remove()
        remove_leftovers(self.spec.run_dir)
        remove_state(self.spec.run_dir)

    def _adopt(self, left: LeftStack, elsewhere: Mapping[InstanceId, int], stops: int) -> None:
        if self._remote is not None:  # their pids may be those of other processes here
            remote = {each.instance for each in left.state.members if self._remote.takes(each.member().process)}
            left = left._replace(living={name: each for name, each in left.living.items() if name not in remote})
        end_processes(list(left.surplus))
        for name, identity in left.living.items():
            self.children.adopt(name, identity)
        self._executor.adopt_elsewhere(elsewhere)
        self.adopted = len(left.living) + len(elsewhere)
        self._started = left.state.started
        self._executor.rendezvous |= left.state.rendezvous
        kill_after = time.monotonic() + self.spec.drain_timeout
        gone = left.adopted_by(self.supervisor, kill_after, elsewhere, ends=stops > 0)
        self._news = [*([StopRequested()] * stops), *(ProcessExited(InstanceId(name), None) for name in gone)]
        known = {member.process.instance for member in self.supervisor.members()}
        for name in set(left.living) - known - set(SERVERS):  # started by a scaling that was not written down
            self.children.signal(name, signal.SIGTERM)
        log.info("adopted", extra={"living": sorted(left.living), "ended": gone})

    async def _serve(self, beside: Sequence[Beside]) -> None:
        await self._bus.subscribe(topics.lifecycles(), self._lifecycles.put)
        await self._bus.publish(topics.lifecycle_requests(), LifecycleRequest())
        for instance in ready_once(self.supervisor.members()):
            self._watchdog.expect(instance, self._watch_clock.now(self._bus.liveness_now()))
        cluster, hosts = self.spec.cluster, self._hosts
        if cluster is None or cluster.join_port is not None:
            await self._bus.serve(topics.scaling(), self._obey)
        if cluster is not None:
            await self._bus.serve(topics.host_scaling(cluster.node), self._obey)
        self._serves = True
        async with asyncio.TaskGroup() as tasks:
            waiting = (
                self._listen,
                lambda: self._executor.announce(self._bus),
                self._watch,
                lambda: self._servers.access.look_after(self._bus, self._watch_clock),
                self._start_deadline,
                *((lambda: hosts.run(self._bus, self._handle, self.stop),) if hosts is not None else ()),
                *((self._remote.run,) if self._remote is not None else ()),
                *beside,
            )
            for event in self._news:
                self._handle(event)
            background = [tasks.create_task(each()) for each in waiting]
            self._wake.set()
            await self._ended.wait()
            for task in background:
                task.cancel()
        if self._remote is not None:
            await self._remote.end()
        if hosts is not None:
            await hosts.end(self._bus)
        self._serves = False

    def _end(self) -> None:
        """By a signal: while it serves, in order; before and after that by the end of `run`, at once."""
        if self._serves:
            self.stop()
        elif self._task is not None:
            self._task.cancel()

    # ---- what happens

    async def _listen(self) -> None:
        while True:
            message = await self._lifecycles.get()
            if self.spec.cluster is not None and not self.supervisor.looks_after(message.instance):
                continue  # another host's: its own supervisor judges it
            self._watchdog.record_lifecycle(message, self._watch_clock.now(self._bus.liveness_now()))
            self._targets.record(message)
            self._handle(LifecycleReceived(message))

    async def _obey(self, order: SupervisorOrder) -> ScaleReply | StrikeReply:
        if isinstance(order, StrikeProcess):
            return self._executor.strike(order, self.supervisor.member(order.instance))
        commands = self._handle(ScaleRequested(*astuple(order)))
        answer = next(command.answer for command in commands if isinstance(command, ReplyToScale))
        log.info("scale requested", extra={"request": order, "answer": answer})
        return answer

    async def _watch(self) -> None:
        """Looks after everything on each SIGCHLD, and every TICK."""
        bounded_at = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK):
                    await self._wake.wait()
            self._wake.clear()
            self._reap()
            self._look_after_template()
            self._restart_stalled()
            self._handle(ClockTick())
            if self._remote is not None:
                self._remote.keep(member.process.instance for member in self.supervisor.members())
            if time.monotonic() - bounded_at > LOG_BOUND_EVERY:
                bounded_at = time.monotonic()
                self._look_after_disk()

    def _reap(self) -> None:
        for name, status in self.children.exited():
            if self._servers.record_exit(name, time.monotonic()):
                self._note_exit(name, status)
            else:
                self._record_exit(InstanceId(name), status)
        if self._servers.restart_due(time.monotonic()):
            self.save()

    def _note_exit(self, name: str, status: int | None) -> None:
        log.log(logging.INFO if self.supervisor.stopping else logging.WARNING, "ended", extra=_of(name, status=status))
        self._last_lines[name] = tuple(self.logs.last_lines(name))

    def _record_exit(self, instance: InstanceId, status: int | None) -> None:
        self._note_exit(instance, status)
        if self.supervisor.looks_after(instance):
            self._watchdog.forget(instance)
            self._handle(ProcessExited(instance, status))

    def _started_elsewhere(self, instance: InstanceId, pid: int) -> None:
        log.info("started", extra=_of(instance, pid=pid))
        if self.supervisor.looks_after(instance):
            self._handle(ProcessStarted(instance, pid))

    def _look_after_template(self) -> None:
        if self.supervisor.holds_workers and self._executor.workers_may_start:
            self._handle(WorkersReleased())
        if not self.supervisor.holds_workers and not self.supervisor.stopping:
            self._executor.start_templates(self.port)

    def _restart_stalled(self) -> None:
        for instance, reason, engine_too in self._watchdog.stalled(self._watch_clock.now(self._bus.liveness_now())):
            log.error("process stalled", extra=_of(instance, reason=reason))
            others = with_its_engine(tuple(self.supervisor.members()), instance) if engine_too else (instance,)
            self._handle(ProcessesStalled(others))

    async def _start_deadline(self) -> None:
        await asyncio.sleep(self.spec.start_timeout)
        late = [m.process for m in self.supervisor.members() if not m.is_ready]
        if not self.supervisor.settled and late:
            slowest = next((process for process in late if process.service == "worker"), late[0])
            self.give_up(slowest.instance, f"was not ready after {self.spec.start_timeout:g} s")

    # ---- what is done about it

    def _handle(self, event: Event) -> list[Command]:
        commands = self.supervisor.handle(event, time.monotonic())
        for command in commands:
            self._execute(command)
        if commands and self._hosts is not None:
            self._hosts.changed.set()
        ready = ready_once(self.supervisor.members())
        is_news = (self.phase, self.supervisor.failed(), ready) != self._saved
        if commands or is_news or isinstance(event, ProcessExited | ProcessStarted):
            self.save()
        if self.supervisor.stopping and self.supervisor.is_empty:
            self._ended.set()
        return commands

    def _execute(self, command: Command) -> None:
        match command:
            case StartProcess() | TerminateProcess() | KillProcess() | AnnounceDeath() | SetStandby():
                outcome = self._executor.execute(command, self.port)
                if outcome is not None:
                    self._handle(outcome)
            case AbortStart(instance, status):
                self.give_up(instance, f"ended with status {status}")
            case ReplyToScale():
                pass  # `_obey` sends it
            case _:
                assert_never(command)

    def give_up(self, instance: InstanceId, reason: str) -> None:
        """Ends the stack soon; `run` raises StartFailed."""
        if self._failure is None:
            self._failure = StartFailed(instance, reason, self.logs.of(instance))
            for _ in range(2):
                self._handle(StopRequested())

    def _problems(self) -> tuple[str, ...]:
        """What cannot be done at present, for `baton ps`."""
        found = [self._log_problem] if self._log_problem else []
        found += self._remote.problems() if self._remote is not None else []
        return (*found, *self._servers.problems())

    def _look_after_disk(self) -> None:
        """Best effort: nothing here ends the supervisor."""
        self._targets.keep(self.supervisor.looks_after)
        problem = self.logs.bound() or full_disk(self.spec.run_dir)
        if problem != self._log_problem:
            log.warning("logs", extra={"problem": problem})
        changed, self._log_problem = problem != self._log_problem, problem
        if changed or self._save_problem is not None:
            self.save()

    def save(self) -> None:
        """Writes the state file as well as can be."""
        failed = self.supervisor.failed()
        state = StackState(
            name=self.spec.name,
            pid=os.getpid(),
            phase=self.phase,
            url=self.url,
            model=self.spec.served_model_name,
            model_dir=str(self.spec.model),
            namespace=self.spec.namespace,
            api_key=next(iter(self.spec.api_keys), None),
            started=self._started,
            written=time.time(),
            problems=self._problems(),
            members=tuple(recorded(each, failed, self._last_lines) for each in self.supervisor.members()),
            processes=self.children.identities(),
            spec=self.spec,
            port=self.port,
            rendezvous=self._executor.rendezvous,
            **self._servers.recorded(),
        )
        try:
            problem = write_state(self.spec.run_dir, state)
        except OSError as error:
            problem = f"nowhere: {error.strerror}"
        if problem != self._save_problem:
            log.warning("state file", extra={"problem": problem})
        self._save_problem = problem
        self._saved = (state.phase, failed, ready_once(self.supervisor.members()))


def _of(process: str, **more: object) -> dict[str, object]:
    return {"child": process, **more}
