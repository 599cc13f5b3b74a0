"""The supervisor's side of a Ray cluster: placement groups and actors, and what becomes of the processes in them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.launchers.ray.cluster import RayCluster
from deploy.launchers.ray.node import NodeFacts, ProcessGroup
from deploy.launchers.ray.placement import (
    LOCAL_SERVICES,
    SERVICE_CPUS,
    Bundle,
    EnginePlacement,
    bundle_of,
    device_of,
    engine_placement,
)
from deploy.launchers.ray.store_certificates import AUTHORITY, CERTIFICATE, KEY, StoreAuthority
from deploy.supervisor.core.plan import ProcessSpec
from deploy.supervisor.core.supervisor import BAD_SETTINGS_STATUS
from deploy.supervisor.processes import CommandAt, RemoteEvents, RemoteSite, TransferSite
from deploy.supervisor.spec import RaySpec, StackSpec
from deploy.supervisor.state_file import directory_of
from shared.addresses import rendezvous_file
from shared.ids import EngineId, InstanceId, NodeId
from shared.private_files import private_opener
from shared.protocol import OWN

log = logging.getLogger(__name__)

LOST_STATUS = -SIGKILL
"""The status of a process whose node is gone."""
PLACE_PATIENCE = 5.0
"""Seconds for which a process waits for its place before people are told."""
UNAVAILABLE_PAUSE = 0.5
CLOSE_TIMEOUT = 5.0
ADOPT_TIMEOUT = 10.0
"""Seconds in which an actor that a former supervisor left must answer."""


class _Place:
    """Owns one actor: the processes of a bundle of an engine, or a single service."""

    def __init__(self, name: str, bundle: Bundle) -> None:
        self.name = name
        self.bundle = bundle
        self.asked_at = time.monotonic()
        self.actor: Any = None
        self.facts: NodeFacts | None = None
        self.opened: asyncio.Task[NodeFacts] | None = None
        """Ends when the actor runs."""


class _Engine:
    """Owns an engine's placement group, from its first process to its last."""

    def __init__(self, placement: EnginePlacement) -> None:
        self.placement = placement
        self.group: Any = None
        self.rendezvous: asyncio.Task[str] | None = None
        self.places: dict[int, _Place] = {}


class RayProcesses:
    """A `RemoteProcesses`. Owns what this stack has in the cluster. Its actors and placement groups are detached: the
    next supervisor finds them by their names, and where none comes they end by themselves."""

    def __init__(self, spec: StackSpec, settings: RaySpec, cluster: RayCluster) -> None:
        self._spec = spec
        self._settings = settings
        self._cluster = cluster
        self._engines: dict[EngineId, _Engine] = {}
        self._services: dict[InstanceId, _Place] = {}
        self._runs: dict[InstanceId, asyncio.Task[None]] = {}
        self._running: dict[InstanceId, _Place] = {}
        """Those whose program has started."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._bug: asyncio.Future[None] | None = None
        self._closed = False
        self._authority = StoreAuthority(spec.run_dir)
        self._prefix = f"{directory_of(spec.run_dir).name}@{cluster.own_address}/"
        """Of the names of all that this stack has."""
        self._adopted: list[tuple[ProcessSpec, _Place]] = []
        """What is to be followed once this runs."""
        self._events: RemoteEvents
        self._log_of: Callable[[str], Path]

    def takes(self, process: ProcessSpec) -> bool:
        """All but gateways."""
        return process.service not in LOCAL_SERVICES

    def attach(self, events: RemoteEvents, log_of: Callable[[str], Path]) -> None:
        """As `RemoteProcesses.attach`."""
        self._events, self._log_of = events, log_of

    def start(self, process: ProcessSpec, command: CommandAt, *, new_rendezvous: bool) -> None:
        """As `RemoteProcesses.start`."""
        place = self._place_of(process)
        engine = self._engines.get(process.engine) if process.engine is not None else None
        if engine is not None and process.engine is not None and new_rendezvous:
            engine.rendezvous = self._task(self._new_rendezvous(process.engine, engine))
        self._runs[process.instance] = self._task(self._run(process, place, engine, command))

    async def adopt(self, processes: Iterable[ProcessSpec]) -> Mapping[InstanceId, int]:
        """As `RemoteProcesses.adopt`."""
        places: dict[tuple[str, int], list[ProcessSpec]] = {}
        for process in filter(self.takes, processes):
            number = bundle_of(self._spec, process) if process.engine is not None else 0
            places.setdefault((process.engine or process.instance, number), []).append(process)
        living: dict[InstanceId, int] = {}
        names = await asyncio.to_thread(ray.util.list_named_actors)
        for name in sorted(each for each in names if each.startswith(self._prefix)):
            owner, number, _ = name.removeprefix(self._prefix).split("/")
            living |= await self._adopt_actor(name, places.pop((owner, int(number)), []))
        await asyncio.to_thread(self._remove_other_groups)
        return living

    def _remove_other_groups(self) -> None:
        """Of engines whose actors are gone."""
        kept = {engine.group.id.hex() for engine in self._engines.values() if engine.group is not None}
        for each, entry in ray.util.placement_group_table().items():
            if entry["name"].startswith(self._prefix) and entry["state"] != "REMOVED" and each not in kept:
                with contextlib.suppress(RayError, ValueError):
                    ray.util.remove_placement_group(ray.util.get_placement_group(entry["name"]))

    async def _adopt_actor(self, name: str, processes: Sequence[ProcessSpec]) -> dict[InstanceId, int]:
        """Those of `processes` that live there. An actor without any is ended."""
        try:
            actor = await asyncio.to_thread(ray.get_actor, name)
            async with asyncio.timeout(ADOPT_TIMEOUT):
                running = await actor.running.remote()
            facts = NodeFacts(*await actor.facts.remote(str(self._spec.model), tuple(OWN)))
            group = await actor.group.remote()
        except (RayError, ValueError, TimeoutError):
            return {}
        alive = [each for each in processes if each.instance in running]
        if not alive:
            await asyncio.to_thread(self._end_actor, actor, group)
            return {}
        place = self._place_of(alive[0])
        place.actor, place.facts, place.opened = actor, facts, self._task(_known(facts))
        if alive[0].engine is not None:
            self._engines[alive[0].engine].group = group
        for each in alive:
            self._running[each.instance] = place
            self._adopted.append((each, place))
        return {each.instance: running[each.instance] for each in alive}

    def _end_actor(self, actor: Any, group: Any) -> None:
        with contextlib.suppress(RayError):
            ray.kill(actor)
            if group is not None:
                ray.util.remove_placement_group(group)

    def signal(self, instance: InstanceId, number: Signals) -> None:
        """As `RemoteProcesses.signal`; a process that still waits for its place waits no longer."""
        place, run = self._running.get(instance), self._runs.get(instance)
        if place is not None:
            self._task(self._signal(place, instance, number))
        elif run is not None:
            run.cancel()

    def keep(self, instances: Iterable[InstanceId]) -> None:
        """As `RemoteProcesses.keep`."""
        known = set(instances)
        for name in [each for each in self._services if each not in known]:
            self._task(self._close(self._services.pop(name)))
        for engine in [each for each in self._engines if InstanceId(each) not in known]:
            if not any(name.startswith(f"{engine}-") for name in known):
                self._task(self._close_engine(self._engines.pop(engine)))

    def problems(self) -> list[str]:
        """As `RemoteProcesses.problems`."""
        late = time.monotonic() - PLACE_PATIENCE
        return [
            f"{place.name} waits for a node of the Ray cluster with {place.bundle} free"
            for place in self._places()
            if place.opened is not None and not place.opened.done() and place.asked_at < late
        ]

    async def run(self) -> None:
        """As `RemoteProcesses.run`."""
        self._bug = asyncio.get_running_loop().create_future()
        adopted, self._adopted = self._adopted, []
        for process, place in adopted:
            self._runs[process.instance] = self._task(self._run(process, place, None, None))
        try:
            await self._bug
        finally:
            self._closed = True

    async def end(self) -> None:
        """As `RemoteProcesses.end`."""
        for run in self._runs.values():
            run.cancel()
        engines, services = list(self._engines.values()), list(self._services.values())
        self._engines.clear()
        self._services.clear()
        await asyncio.gather(*map(self._close_engine, engines), *map(self._close, services))

    # ---- places

    def _places(self) -> list[_Place]:
        return [*self._services.values(), *(p for engine in self._engines.values() for p in engine.places.values())]

    def _place_of(self, process: ProcessSpec) -> _Place:
        if process.engine is None or process.pool is None:
            return self._services.setdefault(process.instance, _Place(process.instance, Bundle(SERVICE_CPUS)))
        if process.engine not in self._engines:
            gpus = self._cluster.gpus_per_rank(self._settings)
            placement = engine_placement(self._spec, self._settings, process.pool, gpus_per_rank=gpus)
            self._engines[process.engine] = _Engine(placement)
        engine, number = self._engines[process.engine], bundle_of(self._spec, process)
        return engine.places.setdefault(number, _Place(process.engine, engine.placement.bundles[number]))

    def _opened(self, place: _Place, engine: _Engine | None) -> asyncio.Task[NodeFacts]:
        """What ends once the place has an actor, which is made where there is none. It raises RayError."""
        if place.opened is None:
            place.asked_at = time.monotonic()
            place.opened = self._task(self._new_actor(place, engine))
        return place.opened

    async def _new_actor(self, place: _Place, engine: _Engine | None) -> NodeFacts:
        place.actor = await asyncio.to_thread(self._make_actor, place, engine)
        facts = NodeFacts(*await place.actor.facts.remote(str(self._spec.model), tuple(OWN)))
        if engine is not None and self._spec.counts.engine_stores and engine.places.get(0) is place:
            files = await asyncio.to_thread(self._authority.files_for, place.name, facts.address)
            await place.actor.keep_files.remote(files)
        return facts

    def _make_actor(self, place: _Place, engine: _Engine | None) -> Any:
        bundle, number = place.bundle, 0
        where: Any = "SPREAD"
        if engine is not None:
            if engine.group is None:
                bundles = [each.resources() for each in engine.placement.bundles]
                name = f"{self._prefix}{place.name}/{uuid.uuid4().hex}"
                engine.group = ray.util.placement_group(
                    bundles, strategy=engine.placement.strategy, name=name, lifetime="detached"
                )
            number = next(number for number, each in engine.places.items() if each is place)
            where = PlacementGroupSchedulingStrategy(engine.group, placement_group_bundle_index=number)
        options = {
            "num_cpus": bundle.cpus,
            "num_gpus": bundle.gpus,
            "max_restarts": 0,
            "scheduling_strategy": where,
            # Another name for each: the one before may not be forgotten yet.
            "name": f"{self._prefix}{place.name}/{number}/{uuid.uuid4().hex}",
            "lifetime": "detached",
        }
        return ray.remote(ProcessGroup).options(**options).remote(self._spec.orphan_timeout)

    async def _close_engine(self, engine: _Engine) -> None:
        await asyncio.gather(*map(self._close, engine.places.values()))
        if engine.group is not None:
            with contextlib.suppress(RayError):
                await asyncio.to_thread(ray.util.remove_placement_group, engine.group)

    async def _close(self, place: _Place) -> None:
        if place.opened is None:
            return
        placed = place.opened.done()
        place.opened.cancel()
        if place.actor is None:
            return
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT if placed else 0.0):
                await place.actor.close.remote()
        with contextlib.suppress(RayError):
            await asyncio.to_thread(ray.kill, place.actor)

    # ---- processes

    async def _run(
        self, process: ProcessSpec, place: _Place, engine: _Engine | None, command: CommandAt | None
    ) -> None:
        """From the wait for a place to the end of the process; without a command, of one that runs already."""
        status = LOST_STATUS
        opened = self._opened(place, engine)
        try:
            facts = await asyncio.shield(opened)
            if command is not None:
                made = command(await self._site(process, facts, engine))
                alone = engine is None or engine.placement.one_node
                arguments = process.instance, process.service, made.arguments, dict(made.environment)
                pid = await place.actor.start.remote(*arguments, alone=alone)
                self._running[process.instance] = place
                self._events.started(process.instance, pid)
            status = await self._follow(process.instance, place)
        except RayTaskError as error:  # what the node said against it
            self._write(process.instance, f"{_first_line(error.cause)}\n".encode())
            status = BAD_SETTINGS_STATUS
            self._forget_actor(place, opened)
        except RayError as error:
            log.warning("lost", extra={"child": process.instance, "reason": _first_line(error)})
            self._forget_actor(place, opened)
        except asyncio.CancelledError:
            pass  # nobody wants it any more
        finally:
            self._running.pop(process.instance, None)
            self._runs.pop(process.instance, None)
        if not self._closed:
            self._events.ended(process.instance, status)

    async def _site(self, process: ProcessSpec, facts: NodeFacts, engine: _Engine | None) -> RemoteSite:
        if engine is None or process.engine is None:
            return RemoteSite()
        rendezvous = None
        if process.service == "worker" and engine.rendezvous is not None:
            rendezvous = await asyncio.shield(engine.rendezvous)
        site = RemoteSite(rendezvous=rendezvous, device=device_of(self._spec, process))
        if not self._spec.counts.engine_stores:
            return site
        # Beside the first stage, whichever stage this process is of: all map one arena.
        first = await asyncio.shield(self._opened(engine.places[0], engine))
        folder = Path(first.folder)
        transfer = TransferSite(first.address, folder / CERTIFICATE, folder / KEY, folder / AUTHORITY)
        return site._replace(node=NodeId(process.engine), arenas=folder / "arenas", transfer=transfer)

    async def _new_rendezvous(self, name: EngineId, engine: _Engine) -> str:
        """Where the ranks of this start meet: in a file of the one node, or at a port of the first stage's."""
        first = engine.places[0]
        facts = await asyncio.shield(self._opened(first, engine))
        if engine.placement.one_node:
            return rendezvous_file(Path(facts.folder, "ranks"), name)
        port = await first.actor.free_port.remote()
        return f"[{facts.address}]:{port}" if ":" in facts.address else f"{facts.address}:{port}"

    async def _follow(self, instance: InstanceId, place: _Place) -> int:
        """Writes down what the process says until it has ended; its status. Raises RayError where its actor is lost."""
        async for output, status in self._watched(instance, place):
            if output:
                self._write(instance, output)
            if status is not None:
                return status
        raise AssertionError("a process is watched until it has ended")

    async def _watched(self, instance: InstanceId, place: _Place) -> AsyncIterator[tuple[bytes, int | None]]:
        while True:
            try:
                yield await place.actor.watch.remote(instance)
            except ActorUnavailableError:  # Ray has not decided yet whether its node is gone
                await asyncio.sleep(UNAVAILABLE_PAUSE)

    async def _signal(self, place: _Place, instance: InstanceId, number: Signals) -> None:
        with contextlib.suppress(RayError):
            await place.actor.signal.remote(instance, int(number))

    def _forget_actor(self, place: _Place, opened: asyncio.Task[NodeFacts]) -> None:
        """The next process of this place starts another one: where the cluster has room by then. What this one may
        still have ends with it."""
        if place.opened is opened:
            former, place.opened, place.actor = place.actor, None, None
            if former is not None:
                self._task(asyncio.to_thread(ray.kill, former))

    def _write(self, instance: InstanceId, output: bytes) -> None:
        """Appends to the log of this machine; what cannot be written is lost."""
        with contextlib.suppress(OSError):
            fd = private_opener(self._log_of(instance), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(fd, output)
            finally:
                os.close(fd)

    # ---- tasks

    def _task(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None or isinstance(task.exception(), RayError):
            return
        if self._bug is not None and not self._bug.done():
            self._bug.set_exception(task.exception() or RuntimeError())


async def _known(facts: NodeFacts) -> NodeFacts:
    return facts


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
