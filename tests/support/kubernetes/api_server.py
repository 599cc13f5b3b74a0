"""An API server over real HTTP that records every call: the scale subresource, an object and its watch."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

from aiohttp import web

from tests.support.cluster.ports import free_port

APPS = "/apis/apps/v1/namespaces/baton"
GROUPS = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/baton"


class Call(NamedTuple):
    method: str
    path: str
    """Below the namespace; `?watch` behind it for a watch."""


class Refusal(NamedTuple):
    """How the server answers instead of doing what it is asked for."""

    status: int
    message: str
    headers: Mapping[str, str] = {}


class RecordingApiServer:
    """Owns the StatefulSets `engine` and `prefill` and the Deployment `tokenizer`, as an API server stores them:
    every write makes a new version, and a write that was made from an older one is refused."""

    def __init__(self, *, groups: bool = False) -> None:
        """`groups`: a LeaderWorkerSet `engine` is there, too; without it there is not even its kind."""
        self.port = free_port()
        self.calls: list[Call] = []
        self.refusals: list[Refusal] = []
        """The next calls are answered by these, one each."""
        self.watching = asyncio.Event()
        self.written_by_others = 0
        """So many of the next writes find that somebody else has written just before."""
        self._version = 100
        self._replicas = {"statefulsets/engine": 1, "statefulsets/prefill": 1, "deployments/tokenizer": 2}
        if groups:
            self._replicas["leaderworkersets/engine"] = 1
        self._ready = dict(self._replicas)
        self._watches: set[asyncio.Queue[dict[str, Any] | None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def writes(self) -> int:
        return sum(each.method != "GET" for each in self.calls)

    def replicas(self, path: str = "statefulsets/engine") -> int:
        return self._replicas[path]

    def make_ready(self, count: int, path: str = "statefulsets/engine") -> None:
        """So many pods become ready; whoever watches is told."""
        self._ready[path] = count
        self._version += 1
        self._tell({"type": "MODIFIED", "object": self._object(path)})

    def end_watches(self) -> None:
        """As API servers do after some minutes."""
        self._tell(None)

    def forget(self) -> None:
        """The versions that watches began at are too old."""
        self._tell({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}})

    def _tell(self, event: dict[str, Any] | None) -> None:
        self.watching.clear()
        for each in self._watches:
            each.put_nowait(event)

    def _object(self, path: str) -> dict[str, Any]:
        ready = self._ready[path]
        if path.startswith("leaderworkersets/"):
            return {
                "kind": "LeaderWorkerSet",
                "metadata": {"name": "engine", "resourceVersion": str(self._version), "generation": 3},
                "spec": {"replicas": self._replicas[path]},
                "status": {"replicas": ready, "readyReplicas": ready},
            }
        return {
            "metadata": {"name": path.partition("/")[2], "resourceVersion": str(self._version), "generation": 1},
            "spec": {"replicas": self._replicas[path]},
            "status": {"observedGeneration": 1, "replicas": ready, "readyReplicas": ready},
        }

    def _scale(self, path: str) -> dict[str, Any]:
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": path.partition("/")[2], "resourceVersion": str(self._version)},
            "spec": {"replicas": self._replicas[path]} if self._replicas[path] else {},
            "status": {"replicas": self._replicas[path]},
        }

    async def answer(self, request: web.Request) -> web.StreamResponse:
        root, path = next(
            (root, request.path.removeprefix(f"{root}/")) for root in (APPS, GROUPS) if request.path.startswith(root)
        )
        self.calls.append(Call(request.method, path + "?watch" * ("watch" in request.query)))
        if self.refusals:
            refusal = self.refusals.pop(0)
            status = {"kind": "Status", "code": refusal.status, "message": refusal.message}
            return web.json_response(status, status=refusal.status, headers=refusal.headers)
        owner = path.removesuffix("/scale")
        if root == GROUPS and "leaderworkersets/engine" not in self._replicas:
            return web.Response(text="404 page not found", status=404)
        if "watch" in request.query:
            return await self._watch(request)
        if request.method == "PUT":
            body = await request.json()
            if self.written_by_others:
                self.written_by_others -= 1
                self._version += 1
            if body["metadata"]["resourceVersion"] != str(self._version):
                return web.json_response({"message": "the object has been modified"}, status=409)
            self._replicas[owner] = body["spec"]["replicas"]
            self._version += 1
        return web.json_response(self._scale(owner) if path.endswith("/scale") else self._object(owner))

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        assert request.query["resourceVersion"] == str(self._version)
        response = web.StreamResponse()
        await response.prepare(request)
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._watches.add(events)
        self.watching.set()
        try:
            while (event := await events.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
        finally:
            self._watches.discard(events)
        return response


@contextlib.asynccontextmanager
async def recording_api_server(*, groups: bool = False) -> AsyncIterator[RecordingApiServer]:
    server = RecordingApiServer(groups=groups)
    app = web.Application()
    for root in (APPS, GROUPS):
        app.router.add_route("*", f"{root}/{{path:.*}}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", server.port).start()
    try:
        yield server
    finally:
        server.end_watches()
        await runner.cleanup()
