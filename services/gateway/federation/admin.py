"""The operators' endpoints: a NATS micro service, JSON in and out. `nats req baton.admin.clusters.list ''`."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from services.gateway.core.remote_clusters import ClusterEntry
from services.gateway.federation.federation import Federation
from shared.bus import BusError, Endpoint, EndpointError
from shared.ids import ClusterName
from shared.messages.federation import SwitchCluster
from shared.packing import NOT_DECODED
from shared.topics import CLUSTERS_ADMIN

ADMIN_NAME, ADMIN_VERSION = "baton-clusters", "1.0.0"
ADMIN_DESCRIPTION = "Operates a federation of Baton clusters: list, drain, undrain."
SWITCH_SECONDS = 5.0
"""Within which a cluster must say that it is drained, or no longer."""
LOOK_EVERY = 0.05


class ClusterSwitchRequest(Struct, forbid_unknown_fields=True):
    """The body of `admin.clusters.drain` and `admin.clusters.undrain`."""

    cluster: str
    move_after: Annotated[float, Meta(ge=0, le=86_400)] | None = None


class ClusterAdmin:
    """Answers operators: any gateway of any cluster can."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation

    def endpoints(self) -> dict[str, Endpoint]:
        """By subject, without the namespace. Each raises EndpointError for what it refuses, with an HTTP status."""
        return {
            f"{CLUSTERS_ADMIN}.list": self.list,
            f"{CLUSTERS_ADMIN}.drain": self.drain,
            f"{CLUSTERS_ADMIN}.undrain": self.undrain,
        }

    async def list(self, body: bytes) -> bytes:
        """`{}` → `{"clusters": [...]}`: this one first, then what is known of the others."""
        entries = self._federation.listing()
        return msgspec.json.encode({"clusters": [_described(entry) for entry in entries]})

    async def drain(self, body: bytes) -> bytes:
        """`{"cluster": "eu", "move_after": 30}`: new requests go to other clusters, and open streams end there or move
        after so many seconds. Answers once the cluster says so."""
        return await self._switch(body, drained=True)

    async def undrain(self, body: bytes) -> bytes:
        """`{"cluster": "eu"}`: it takes requests again."""
        return await self._switch(body, drained=False)

    async def _switch(self, body: bytes, *, drained: bool) -> bytes:
        try:
            request = msgspec.json.decode(body, type=ClusterSwitchRequest)
        except NOT_DECODED as error:
            raise EndpointError(400, str(error)) from None
        if not drained and request.move_after is not None:
            raise EndpointError(400, "move_after: of admin.clusters.drain only")
        known = {entry.name: entry for entry in self._federation.listing() if entry.state != "refused"}
        name = ClusterName(request.cluster)
        if name not in known:
            raise EndpointError(404, f"cluster {request.cluster!r} is none of {', '.join(sorted(known))}")
        if known[name].state == "silent":
            raise EndpointError(409, f"cluster {name} cannot be reached")
        rest = [each for each in known.values() if each.name != name and each.state in ("here", "ready")]
        if drained and not rest:
            raise EndpointError(409, f"no other cluster would take what comes to {name}")
        switch = SwitchCluster(drained, time.time(), request.move_after)
        try:
            await self._federation.switch_cluster(name, switch)
        except BusError as error:
            raise EndpointError(503, str(error)) from None
        await self._until(name, drained=drained)
        return msgspec.json.encode({"cluster": name, "drained": drained})

    async def _until(self, name: ClusterName, *, drained: bool) -> None:
        for _ in range(round(SWITCH_SECONDS / LOOK_EVERY)):
            states = [entry.state for entry in self._federation.listing() if entry.name == name]
            if ("drained" in states) == drained:
                return
            await asyncio.sleep(LOOK_EVERY)
        raise EndpointError(504, f"cluster {name} did not answer within {SWITCH_SECONDS:g} s")


def _described(entry: ClusterEntry) -> dict[str, Any]:
    models = [{"model": model, "free": room.free, "places": room.places} for model, room in entry.rooms.items()]
    described: dict[str, Any] = {"name": entry.name, "address": entry.address, "state": entry.state, "models": models}
    if entry.state != "here":
        described["gateways"] = entry.gateways
    return described | ({"reason": entry.reason} if entry.reason else {})
