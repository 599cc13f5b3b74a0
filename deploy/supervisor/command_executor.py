"""Executes the commands of the supervisor's core: starts processes, signals them, announces their deaths."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterable
from typing import Any

from deploy.supervisor.core.events import (
    AnnounceDeath,
    KillProcess,
    ProcessExited,
    ProcessStarted,
    SetStandby,
    StartProcess,
    TerminateProcess,
)
from deploy.supervisor.core.members import SupervisedProcess
from deploy.supervisor.core.plan import ProcessSpec
from deploy.supervisor.launch import COLOCATED, CommandLineOf, LaunchContext, module_of, secret_settings
from deploy.supervisor.log_files import LogFolder
from deploy.supervisor.network import network_environment
from deploy.supervisor.processes import ChildProcesses, RemoteCommand, RemoteProcesses, RemoteSite
from deploy.supervisor.servers.federation import FederationServer
from deploy.supervisor.servers.nats import BusAccess
from deploy.supervisor.servers.redis import StoreAccess
from deploy.supervisor.servers.server_process import free_port
from deploy.supervisor.spec import StackSpec
from deploy.supervisor.template.templates import Templates
from shared import topics
from shared.addresses import rendezvous_file
from shared.bus import Bus, BusError
from shared.config import ENVIRONMENT_PREFIX, inherited_environment
from shared.ids import EngineId, InstanceId
from shared.messages.lifecycle import InstanceControl, Lifecycle, Standby, Undrain
from shared.messages.supervisor import ProcessStruck, StrikeProcess, StrikeRefusal, StrikeReply
from shared.private_files import PRIVATE_FOLDER
from shared.topics import Topic

log = logging.getLogger(__name__)

NOT_EXECUTABLE = 127
ANNOUNCEMENTS_LIMIT = 1_000
"""Waiting to be published; above it the others learn of a death by the silence after it."""


class CommandExecutor:
    """Owns where the ranks of each engine meet, and what is still to be announced."""

    def __init__(
        self,
        spec: StackSpec,
        launch: CommandLineOf,
        access: BusAccess,
        store: StoreAccess,
        federation: FederationServer,
        children: ChildProcesses,
        logs: LogFolder,
        remote: RemoteProcesses | None = None,
    ) -> None:
        self._spec = spec
        self._remote = remote
        self._elsewhere: set[InstanceId] = set()
        """Processes that were started by `remote`."""
        self._launch = launch
        self._access = access
        self._store = store
        self._federation = federation
        self._children = children
        self._logs = logs
        self.rendezvous: dict[EngineId, str] = {}
        """Where those of each engine meet, or of the data-parallel group that begins with it. Chosen on the first host;
        the other hosts use what that one announces."""
        self._network = network_environment(spec.hosts)
        self.templates: Templates | None = None
        """What forks processes; None where they are started one by one."""
        self._to_publish: asyncio.Queue[tuple[Topic[Any], Lifecycle | InstanceControl]] = asyncio.Queue(
            ANNOUNCEMENTS_LIMIT
        )

    def execute(
        self, order: StartProcess | TerminateProcess | KillProcess | AnnounceDeath | SetStandby, gateway_port: int
    ) -> ProcessStarted | ProcessExited | None:
        """Executes one command; for a start on this machine the event that says whether the process runs, None for all
        others."""
        match order:
            case StartProcess(process):
                if self._remote is not None and self._remote.takes(process):
                    self._start_elsewhere(self._remote, order, gateway_port)
                    return None
                return self._start(order, gateway_port)
            case TerminateProcess(instance):
                self._signal(instance, signal.SIGTERM)
            case KillProcess(instance):
                log.warning("process killed", extra={"child": instance})
                self._signal(instance, signal.SIGKILL)
            case AnnounceDeath(lifecycle):
                self._publish_soon(_topic_of(lifecycle), lifecycle)
            case SetStandby(instance, standby):
                log.info("standby" if standby else "promoted", extra={"child": instance})
                self._publish_soon(topics.instance_control(instance), Standby() if standby else Undrain())
        return None

    def _publish_soon(self, topic: Topic[Any], message: Lifecycle | InstanceControl) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self._to_publish.put_nowait((topic, message))

    def strike(self, order: StrikeProcess, member: SupervisedProcess | None) -> StrikeReply:
        """Kills a process, or lets it stand still for a while, as an operator asks; what follows from it is up to the
        supervisor, as after any death. `member`: the one of that name; None: there is none."""
        if member is None or member.state != "running" or member.pid is None:
            return StrikeRefusal(f"instance: {order.instance} has no process here just now")
        log.warning("struck by an operator", extra={"order": order, "struck": member.pid})
        struck = member.process.instance  # the actor that was named may be one of several of its process
        if order.fault == "kill":
            self._signal(struck, signal.SIGKILL)
        else:
            self._signal(struck, signal.SIGSTOP)
            loop = asyncio.get_running_loop()
            loop.call_later(order.seconds, lambda: self._signal(struck, signal.SIGCONT))
        return ProcessStruck(member.pid)

    def _signal(self, instance: InstanceId, number: signal.Signals) -> None:
        if self._remote is not None and instance in self._elsewhere:
            self._remote.signal(instance, number)
        else:
            self._children.signal(instance, number)

    def adopt_elsewhere(self, instances: Iterable[InstanceId]) -> None:
        """Processes of a former supervisor that `remote` goes on with."""
        self._elsewhere.update(instances)

    def make_templates(self, notify: Callable[[], None]) -> None:
        """Has processes forked from now on, of the services that are planned now. `notify` is called when a template
        has said something."""
        planned = [process for process in self._spec.planned() if not process.colocated]
        with_torch = {module_of(process.service) for process in planned if process.imports_torch}
        with_torch.add(COLOCATED if self._spec.counts.colocate else module_of("worker"))
        services = {module_of(process.service) for process in planned if not process.imports_torch}
        self.templates = Templates(with_torch, services, notify)

    def start_service_template(self) -> None:
        """Starts what forks services, where there is none and there may be one. Needs a running event loop."""
        if self.templates is not None and self.templates.services.may_start:
            template = self.templates.services
            self._children.start_template(template, (), self._logs.of(template.name), inherited_environment())

    def start_templates(self, gateway_port: int) -> None:
        """Starts what forks services and what forks workers, where that is missing and may be there. Needs a running
        event loop."""
        self.start_service_template()
        planned = (each for process in self._spec.planned() for each in (process, *process.hosted))
        worker = next((process for process in planned if process.service == "worker"), None)
        if self.templates is None or worker is None or not self.templates.workers.may_start:
            return
        template = self.templates.workers
        where = self._where(worker, gateway_port, device=None)
        flags = self._launch(self._spec, worker, where)[3:]
        log_file = self._logs.of(template.name)
        self._children.start_template(template, flags, log_file, self._environment(worker, where))

    async def services_may_start(self) -> None:
        """Returns once services can be forked, or have to be started one by one."""
        if self.templates is not None:
            await self.templates.services_settled()

    @property
    def workers_may_start(self) -> bool:
        """Whether workers can be forked, or have to be started one by one."""
        return self.templates is None or self.templates.workers.is_settled

    def close_templates(self) -> None:
        """Ends them; what they have forked goes on."""
        if self.templates is not None:
            self.templates.close()

    async def announce(self, bus: Bus) -> None:
        """Publishes deaths as they come, so that the others learn of them now and not by the silence after them; and
        tells schedulers whether they stand by."""
        while True:
            topic, message = await self._to_publish.get()
            with contextlib.suppress(BusError):
                await bus.publish(topic, message)

    def _new_rendezvous(self, engine: EngineId) -> str:
        """Another place than those before, as a start is named by it: a port on the first of several hosts; on one host
        a file in a folder that nobody else may enter."""
        if self._spec.hosts is not None:
            return f"{self._spec.hosts.master}:{free_port(self._spec.hosts.master)}"
        folder = self._spec.run_dir.absolute() / "ranks"
        with contextlib.suppress(OSError):  # then the ranks say so, as they cannot use it either
            folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
            for former in folder.glob(f"{engine}-*"):
                former.unlink(missing_ok=True)
        return rendezvous_file(folder, engine)

    def _start(self, order: StartProcess, gateway_port: int) -> ProcessStarted | ProcessExited:
        process = order.process
        if order.new_rendezvous and process.group is not None and self._spec.counts.leads:
            self.rendezvous[process.group] = self._new_rendezvous(process.group)
        where = self._where(process, gateway_port, order.device, standby=order.standby)
        argv = self._launch(self._spec, process, where)
        try:
            pid = self._children.start(
                process.instance,
                argv,
                self._logs.of(process.instance),
                self._environment(process, where),
                None if self.templates is None else self.templates.of(process.imports_torch),
            )
        except OSError as error:
            log.error("not started", extra={"child": process.instance, "error": str(error)})
            return ProcessExited(process.instance, NOT_EXECUTABLE)
        log.info("started", extra={"child": process.instance, "pid": pid})
        return ProcessStarted(process.instance, pid)

    def _start_elsewhere(self, remote: RemoteProcesses, order: StartProcess, gateway_port: int) -> None:
        process = order.process

        def command(site: RemoteSite) -> RemoteCommand:
            where = LaunchContext(
                port=gateway_port,
                rendezvous=site.rendezvous,
                arenas=site.arenas,
                redis_url=self._store.redis_url,
                device=site.device,
                remote=True,
                node=site.node,
                transfer=site.transfer,
                standby=order.standby,
            )
            inherited = inherited_environment(process.service)
            environment = {
                **{name: value for name, value in inherited.items() if name.startswith(ENVIRONMENT_PREFIX)},
                **self._access.environment(process.service),
                **secret_settings(self._spec, process, where),
            }
            return RemoteCommand(tuple(self._launch(self._spec, process, where)[1:]), environment)

        self._elsewhere.add(process.instance)
        remote.start(process, command, new_rendezvous=order.new_rendezvous)

    def _where(
        self, process: ProcessSpec, gateway_port: int, device: int | None, *, standby: bool = False
    ) -> LaunchContext:
        return LaunchContext(
            port=gateway_port,
            rendezvous=self.rendezvous.get(process.group) if process.group else None,
            arenas=self._store.arenas,
            rows=self._store.rows,
            redis_url=self._store.redis_url,
            federation_url=self._federation.url,
            device=device,
            standby=standby,
        )

    def _environment(self, process: ProcessSpec, where: LaunchContext) -> dict[str, str]:
        if process.colocated:
            return self._environment_of_several((process._replace(colocated=False), *process.hosted), where)
        return {
            **inherited_environment(process.service),
            **self._access.environment(process.service),
            **secret_settings(self._spec, process, where),
            **(self._network if process.service == "worker" else {}),
        }

    def _environment_of_several(self, processes: Iterable[ProcessSpec], where: LaunchContext) -> dict[str, str]:
        """Of one process: what is said to each of its services reaches that one alone."""
        environment: dict[str, str] = {}
        for process in processes:
            access, own = self._access.environment(process.service), f"{ENVIRONMENT_PREFIX}{process.service.upper()}_"
            environment |= self._environment(process, where)
            environment |= {own + name.removeprefix(ENVIRONMENT_PREFIX): value for name, value in access.items()}
        return environment


def _topic_of(life: Lifecycle) -> Topic[Lifecycle]:
    """Where the process itself would say it."""
    if life.worker is not None:
        return topics.rank_lifecycles(life.worker.engine)
    return topics.lifecycle_of(life.service, life.instance)
