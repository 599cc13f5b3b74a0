"""How much of a request each engine need not compute: blocks on its device, in its node's KV store, in another's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from services.coordinator.core.kv_sources import Hits
from shared.ids import InstanceId, NodeId


class Reuse(NamedTuple):
    """Leading blocks of one request, each counted once where it is nearest to one engine."""

    device: int = 0
    stored: int = 0
    remote: int = 0
    remote_node: NodeId | None = None
    """Who has the remote ones; None where there are none."""

    @property
    def blocks(self) -> int:
        return self.device + self.stored + self.remote

    def worth(self, discount: float) -> float:
        return self.device + discount * (self.stored + discount * self.remote)


NO_REUSE = Reuse()


class Reuses:
    """What `hits` mean for each engine."""

    def __init__(self, hits: Hits) -> None:
        self._hits = hits
        self._best = _best(hits.stores)
        self._from_stores: dict[NodeId | None, Reuse] = {}
        """For engines that hold nothing themselves, which most do not, by node."""

    def of(self, engine: InstanceId, node: NodeId | None) -> Reuse:
        """An engine without a KV store on its node takes nothing from stores."""
        device = self._hits.engines.get(engine, 0)
        if device:
            return self._reuse(device, node)
        reuse = self._from_stores.get(node)
        if reuse is None:
            reuse = self._from_stores[node] = self._reuse(0, node)
        return reuse

    def _reuse(self, device: int, node: NodeId | None) -> Reuse:
        if node is None or self._best is None:
            return Reuse(device)
        best_node, best = self._best
        own = max(device, self._hits.stores.get(node, 0))
        if best > own and best_node != node:
            return Reuse(device, own - device, best - own, best_node)
        return Reuse(device, own - device)


def _best(stores: Mapping[NodeId, int]) -> tuple[NodeId, int] | None:
    """The store that holds most; the first by name of those that hold as much."""
    return min(stores.items(), key=lambda item: (-item[1], item[0]), default=None)
