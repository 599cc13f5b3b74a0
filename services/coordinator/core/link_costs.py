"""What fetching blocks from another node costs, as the stores and engines measured it."""

from __future__ import annotations

from services.coordinator.core.engine_pool import Candidate
from shared.ids import InstanceId, NodeId
from shared.messages.kvstore import LinkReport
from shared.messages.lifecycle import StoreReport


class LinkCosts:
    """Owns the newest report of each store about the links that it fetches over."""

    def __init__(self) -> None:
        self._links: dict[NodeId, dict[NodeId, LinkReport]] = {}
        self._node_of: dict[InstanceId, NodeId] = {}

    def record(self, store: InstanceId, report: StoreReport) -> None:
        """A store has said what it measured."""
        self._node_of[store] = report.node
        self._links[report.node] = {link.source: link for link in report.links}

    def forget(self, store: InstanceId) -> None:
        """A store is gone; nothing for any other instance."""
        node = self._node_of.pop(store, None)
        if node is not None and node not in self._node_of.values():
            self._links.pop(node, None)

    def price(self, candidate: Candidate, source: NodeId | None, blocks: int) -> float | None:
        """What it costs that engine to have so many blocks from the store of `source`, in blocks that it would compute
        in that time; loading them from its own store included. None where that was not measured."""
        costs = candidate.engine.report.recompute
        if costs is None or source is None or candidate.node is None:
            return None
        link = self._links.get(candidate.node, {}).get(source)
        if link is None:
            return None
        transfer = link.latency + blocks * costs.block_bytes / link.bytes_per_second
        return (transfer + blocks * costs.load_seconds) / costs.block_seconds
