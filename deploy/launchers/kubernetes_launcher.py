"""The pods of deploy/kubernetes: sizes are written through the scale subresource, and only where they change."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from deploy.errors import CommandError
from deploy.launchers.interface import PoolChange
from deploy.launchers.kubernetes_api import ApiAway, ApiRefusal, KubernetesApi
from shared.reliability.retry import Backoff, Deadline

T = TypeVar("T")
BACKOFF = Backoff(first=0.5, longest=30.0)
CHANGE_PATIENCE = 60.0
"""Seconds for which a change is tried; an API server that throttles says for how long it wants to be left alone."""
PASSING = frozenset({409, 410, 429, 500, 502, 503, 504})
"""Answers that another attempt may not get: somebody else has written, a version is forgotten, too many calls."""


class PoolWorkload(NamedTuple):
    """What deploy/kubernetes runs a pool as."""

    api: str
    kind: str
    name: str


ENGINE_GROUPS = PoolWorkload("leaderworkerset.x-k8s.io/v1", "leaderworkersets", "engine")
"""Engines of several pods. Looked for first: the leaders of its groups are a StatefulSet of the same name, whose size
is its controller's."""
WORKLOADS: Mapping[str, tuple[PoolWorkload, ...]] = {
    "engines": (ENGINE_GROUPS, PoolWorkload("apps/v1", "statefulsets", "engine")),
    "prefill": (PoolWorkload("apps/v1", "statefulsets", "prefill"),),
    "decode": (PoolWorkload("apps/v1", "statefulsets", "engine"),),
    **{
        name: (PoolWorkload("apps/v1", "deployments", name),)
        for name in ("gateway", "tokenizer", "detokenizer", "coordinator", "encoder")
    },
}
"""What may run a pool; the first one that the cluster has does."""
ELSEWHERE = frozenset({403, 404})
"""Answers to a question for what may not be there: nor may everybody ask for kinds that a cluster does not have."""


class KubernetesLauncher:
    """Every change begins with what the API server says now; only which kind of object runs a pool is remembered."""

    def __init__(
        self,
        api: KubernetesApi,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._clock = clock
        self._sleep = sleep
        self._found: dict[str, PoolWorkload] = {}
        """By pool: what the cluster was seen to run it as."""

    async def scale(self, pool: str, count: int) -> PoolChange:
        """As `Launcher.scale`. A conflict with another writer is settled by reading again; who writes last wins."""
        candidates = _candidates(pool)

        async def attempt() -> PoolChange:
            workload, scale = await self._read(pool, candidates, "/scale")
            path = f"{self._path(workload)}/scale"
            before = int(scale["spec"].get("replicas", 0))
            if before != count:
                await self._api.replace(path, {**scale, "spec": {**scale["spec"], "replicas": count}})
            return PoolChange(_instances(workload, before, count), _instances(workload, count, before))

        return await self._until_done(attempt, CHANGE_PATIENCE)

    async def wait_until_ready(self, pool: str, count: int, patience: float) -> None:
        """Returns once a pool has `count` pods, all of them ready. Listens instead of asking again and again: one call
        for each WATCH_SECONDS. Raises CommandError after `patience` seconds."""
        candidates = _candidates(pool)

        async def attempt() -> None:
            workload, found = await self._read(pool, candidates)
            if _is_ready(found, count):
                return
            all_of_kind = self._api.path(workload.api, workload.kind)
            async for state in self._api.watch(all_of_kind, workload.name, found["metadata"]["resourceVersion"]):
                if _is_ready(state, count):
                    return
            raise ApiAway("the watch has ended")

        try:
            async with asyncio.timeout(patience):
                await self._until_done(attempt, patience)
        except TimeoutError:
            raise CommandError(f"{pool}: {count} are not ready after {patience:g} s") from None

    def _path(self, workload: PoolWorkload) -> str:
        return self._api.path(workload.api, workload.kind, workload.name)

    async def _read(
        self, pool: str, candidates: Sequence[PoolWorkload], below: str = ""
    ) -> tuple[PoolWorkload, dict[str, Any]]:
        """The first of `candidates` that the cluster has, or what is `below` it. Raises ApiRefusal, ApiAway."""
        if pool in self._found:
            candidates = (self._found[pool],)
        *others, last = candidates
        for each in others:
            try:
                content = await self._api.read(self._path(each) + below)
            except ApiRefusal as refusal:
                if refusal.status not in ELSEWHERE:
                    raise
            else:
                self._found[pool] = each
                return each, content
        content = await self._api.read(self._path(last) + below)
        self._found[pool] = last
        return last, content

    async def _until_done(self, attempt: Callable[[], Awaitable[T]], patience: float) -> T:
        """Tries again after pauses that double, and that are as long as the API server wants them to be at least."""
        deadline, earlier = Deadline(self._clock() + patience), 0
        while True:
            try:
                return await attempt()
            except ApiRefusal as refusal:
                if refusal.status not in PASSING:
                    raise CommandError(f"the Kubernetes API refuses this: {refusal}") from None
                reason, pause = str(refusal), max(self._pause(earlier), refusal.retry_after)
            except ApiAway as error:
                reason, pause = str(error), self._pause(earlier)
            if pause > deadline.remaining(self._clock()):
                raise CommandError(f"the Kubernetes API did not do this within {patience:g} s: {reason}") from None
            await self._sleep(pause)
            earlier += 1

    def _pause(self, earlier: int) -> float:
        """Between half of it and all of it by chance, so that two writers do not meet again."""
        return BACKOFF.pause(earlier) * random.uniform(0.5, 1.0)


def _candidates(pool: str) -> Sequence[PoolWorkload]:
    if pool not in WORKLOADS:
        raise CommandError(f"{pool}: not on Kubernetes; {', '.join(WORKLOADS)} are", status=2)
    return WORKLOADS[pool]


def _instances(workload: PoolWorkload, low: int, high: int) -> tuple[str, ...]:
    """The pods that a workload of `high` has beyond one of `low`, of a LeaderWorkerSet the leaders. Those of a
    Deployment have no names beforehand."""
    if workload.kind != "deployments":
        return tuple(f"{workload.name}-{number}" for number in range(low, high))
    return (f"{high - low} of {workload.name}",) if high > low else ()


def _is_ready(state: Mapping[str, Any], count: int) -> bool:
    """Whether the controllers have seen what was written last, and all pods are there. (Older releases of
    LeaderWorkerSet do not say which generation they have seen; a new size is seen by its count, too.)"""
    status = state.get("status", {})
    written = state["metadata"].get("generation", 0)
    unsaid = written if state.get("kind") == "LeaderWorkerSet" else 0
    return bool(
        status.get("observedGeneration", unsaid) >= written
        and status.get("replicas", 0) == status.get("readyReplicas", 0) == count
    )
