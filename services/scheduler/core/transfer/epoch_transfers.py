"""All that moves blocks in one epoch: from and to the node's KV store, a connector, and other engines."""

from __future__ import annotations

from collections.abc import Iterator

from services.scheduler.core.events import ConnectorMatched, WorkersReady
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.memory import BlockAllocator, NamedBlock
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.transfer.block_transfers import BlockTransfers
from services.scheduler.core.transfer.connector import ConnectorClient, ConnectorLoads, ConnectorSaves
from services.scheduler.core.transfer.hand_over import HandOvers, SettledHandOver
from services.scheduler.core.transfer.loads import BlockLoads, LoadOutcome, Loads
from services.scheduler.core.transfer.prompt_keeper import PromptKeeper
from services.scheduler.core.transfer.recompute_costs import RecomputeCosts
from services.scheduler.core.transfer.remote_prefills import RemotePrefills
from services.scheduler.core.transfer.saves import Saves
from services.scheduler.core.transfer.store_client import StoreClient
from shared.ids import EngineId
from shared.messages.kvstore import Commit, Find, FindAny, KvStoreReply, Reserve
from shared.messages.scheduler import TransferProgress


class EpochTransfers:
    """Made for each epoch; each part owns what it moves."""

    def __init__(
        self,
        engine: EngineId,
        limits: EngineLimits,
        workers: WorkersReady,
        memory: BlockAllocator,
        store: StoreClient,
        connector: ConnectorClient,
    ) -> None:
        self.copies = BlockTransfers(memory.pool, workers.world_size)
        """What ranks are told to copy, whoever wants it."""
        self.costs = RecomputeCosts(workers.layout, workers.card.block_size, _records(workers))
        self.store_loads = Loads(limits, store, memory, self.copies, self.costs)
        self.connector_loads = ConnectorLoads(
            limits, connector, memory, self.copies, self.costs, layerwise=workers.layerwise_loads
        )
        self.loads: BlockLoads = self.connector_loads if connector.enabled else self.store_loads
        self.connector_saves = None if connector.use is None else ConnectorSaves(connector, memory, self.copies)
        self.remote = RemotePrefills(store)
        self.saves = Saves(store, memory, self.copies)
        self.hand_overs = HandOvers(self.saves, memory)
        self.keeper = PromptKeeper(engine, self.saves, memory, store, workers)

    def close(self) -> None:
        """Gives the store back what is held there. Every sequence has ended."""
        self.loads.close()
        self.saves.close()
        self.keeper.close()

    @property
    def saving(self) -> bool:
        """Whether blocks are on their way to the store, or being copied."""
        return self.saves.busy or bool(self.copies.in_flight)

    def record_report(self, report: TransferProgress, now: float) -> Iterator[LoadOutcome]:
        """A rank has copied blocks, or failed to. Yields the loads that have ended by that, in order. The blocks of
        each are released only after the caller has processed it."""
        for kind, lease, done, blocks, seconds in self.copies.record_report(report, now):
            if kind != "load":
                (self.connector_saves or self.saves).finish_transfer(lease, done)
                continue
            if done and not self.connector_loads.is_overlapped(lease):
                self.costs.record_load(blocks, seconds, now)
            yield self.loads.finish(lease, done)
            if self.connector_saves is not None:
                self.connector_loads.record_end(lease, done, now)

    def record_match(self, reply: ConnectorMatched, now: float) -> Sequence | None:
        """The KV connector has replied to a lookup. Returns the sequence that goes on by that."""
        return self.connector_loads.record_match(reply.lease, reply.tokens, awaited=reply.awaited, now=now)

    def record_store_reply(
        self, request: Find | FindAny | Reserve | Commit, reply: KvStoreReply | None, now: float
    ) -> Sequence | None:
        """The store has replied, or (None) has not in time. Returns the sequence that goes on by that."""
        match request:
            case Find(lease=lease) if self.keeper.record_reply(lease, reply, now):
                pass
            case Find(lease=lease):
                return self.store_loads.record_reply(lease, reply, now)
            case FindAny(lease=lease):
                return self.store_loads.record_ends(lease, reply, now)
            case Reserve(lease=lease):
                self.saves.record_reservation(lease, reply, now)
            case Commit(lease=lease):
                self.saves.record_commit(lease, reply)
        return None

    def offer_saves(self, named: list[NamedBlock], now: float, *, prompts: bool, idle: bool) -> list[SettledHandOver]:
        """Offers the store the blocks that have got names; `prompts`: whether prompts were computed. Returns the
        sequences that wait to be handed over and of which the store has all blocks, or cannot have them."""
        self.saves.offer(named, now, prompts=prompts)
        self.saves.reserve(now, idle=idle)
        for save in self.saves.take_outcomes():
            self.hand_overs.record_save(save)
            self.keeper.record_save(save)
        self.keeper.settle()
        return self.hand_overs.take_settled() if self.hand_overs.waiting else []


def _records(workers: WorkersReady) -> int:
    """Records of the store that a block of a long prompt is loaded from: those of groups that see all tokens."""
    return max(1, sum(1 for group in workers.kv_groups if group.window is None and group.encoded is None))
