"""Loads and saves by a KV connector: what the engine asks of it, and the blocks that it works on.

In the terms of vLLM's V1, but for time: what that asks within a step is an event here, whose answer comes later
(docs/adr/0046). No sequence waits for a connector longer than LOAD_TIMEOUT, and no block is anybody else's
while a rank may still read or write it.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from services.scheduler.core.counters import EngineCounters
from services.scheduler.core.events import ConnectorLookUp, ConnectorReport, ConnectorRequestFinished, Output
from services.scheduler.core.limits import ConnectorUse, EngineLimits
from services.scheduler.core.memory import BlockAllocator, FilledBlock
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.transfer.block_transfers import BlockTransfers
from services.scheduler.core.transfer.loads import BlockLoads, FoundBlock, LoadDecision, LoadOutcome, PendingLoad
from services.scheduler.core.transfer.recompute_costs import RecomputeCosts
from shared.blocks import BlockHash
from shared.ids import LeaseId
from shared.messages.worker import ConnectorPlan, KvBlockRun
from shared.packing import pack

LOAD_TIMEOUT = 5.0
"""Seconds that a sequence waits for its blocks; then it computes them into others."""
USABLE_SECONDS = 30.0
"""For which a match may wait for the sequence's turn; then the connector is asked again."""
OVERLAP_PAUSE = 30.0
"""Seconds for which nothing is computed behind blocks that are being loaded, once such a load failed or was late: it
has held up a step, and what was computed behind it was for nothing."""
MAX_BLOCKS = 512
"""Most blocks that are being saved or sent; also at most a quarter of KV memory. Others are not saved."""


class ConnectorClient:
    """The engine's client of its KV connector. Owns the numbers of leases, under which answers come back, and the
    messages that are to be sent. It outlives epochs."""

    def __init__(self, use: ConnectorUse | None, counters: EngineCounters) -> None:
        """`use` None: there is no connector."""
        self.use = use
        self.counters = counters
        self._leases = 0
        self._out: list[Output] = []

    @property
    def enabled(self) -> bool:
        """Whether blocks are loaded by a connector."""
        return self.use is not None and self.use.loads

    attached = enabled

    @property
    def usable_seconds(self) -> float:
        """See USABLE_SECONDS."""
        return USABLE_SECONDS

    def holds(self, lease: LeaseId) -> bool:
        """What a connector found it does not promise to keep: a load that fails is computed."""
        return True

    def release(self, lease: LeaseId, drop: bytes = b"") -> None:
        """A lease is a number here, and ends with what is asked under it."""

    def look_up(self, sequence: Sequence, computed: int, timeout: float) -> LeaseId:
        """Asks what the connector has behind the first `computed` tokens."""
        lease, tokens = self.new_lease(), sequence.tokens
        self._out.append(
            ConnectorLookUp(
                lease, external_id(sequence), pack(tokens.known), b"".join(tokens.hashes), computed, timeout
            )
        )
        return lease

    def send(self, output: ConnectorRequestFinished | ConnectorReport) -> None:
        """Sends it with the other messages of this event."""
        self._out.append(output)

    def new_lease(self) -> LeaseId:
        """The next number."""
        self._leases += 1
        return LeaseId(self._leases)

    def take_outputs(self) -> list[Output]:
        """The messages for the connector since the last call, in order."""
        out, self._out = self._out, []
        return out


class ConnectorLoads(BlockLoads):
    """Loads by a KV connector."""

    def __init__(
        self,
        limits: EngineLimits,
        client: ConnectorClient,
        memory: BlockAllocator,
        transfers: BlockTransfers,
        costs: RecomputeCosts,
        *,
        layerwise: bool,
    ) -> None:
        """`layerwise`: all ranks wait for loads layer by layer where a plan says so."""
        super().__init__(limits, client, memory, transfers, costs)
        self._client = client
        self._layerwise = layerwise and limits.stages == 1
        self._awaited: dict[LeaseId, bool] = {}
        """Of what was found: whether the connector says itself when it is loaded."""
        self._started: dict[LeaseId, tuple[str, float]] = {}
        """The request of each load under way, and when it began."""
        self._overdue: set[LeaseId] = set()
        self._overlapped: set[LeaseId] = set()
        """Loads under way behind which the plan that began them computes."""
        self._overlap_after = 0.0
        """Until then none is made."""

    def look_up(self, sequence: Sequence) -> bool:
        """See `BlockLoads.look_up`. While a load is overdue nothing is asked for."""
        return not self._overdue and super().look_up(sequence)

    def record_match(self, lease: LeaseId, tokens: int, *, awaited: bool, now: float) -> Sequence | None:
        """The connector has replied. Returns the sequence that can wait in the queue now; None where it is not there
        any more. Whole blocks are loaded, and no more than there are."""
        if (asked := self._replied(lease)) is None:
            return None
        sequence, load = asked
        size = self._memory.block_size
        found = [FoundBlock(each.hash, 0, 0, each.place) for each in load.wanted[: max(0, tokens) // size]]
        load.tokens = (load.first + len(found)) * size
        if found:
            self._awaited[lease] = awaited
        self._record_found(sequence, load, found, now)
        return sequence

    def decide(self, sequence: Sequence, cached: int, now: float) -> LoadDecision:
        """See `BlockLoads.decide`."""
        return "compute" if self._overdue else super().decide(sequence, cached, now)

    def overlap(self, sequence: Sequence, cached: int, budget: int, now: float) -> int:
        """See `BlockLoads.overlap`. Never the last token: what is drawn behind it would have to be called back where
        the load fails. Only where the load is expected to be over before the tokens are computed, since the others of
        the step wait with it."""
        load = self.lookups[sequence.id]
        if not self._layerwise or self._awaited.get(load.lease, False):
            return 0
        loaded = (load.first + len(load.found)) * self._memory.block_size
        tokens = min(budget, len(sequence.tokens.known) - loaded - 1)
        hides = now >= self._overlap_after and self._costs.load_hides(load.first + len(load.found) - cached, tokens)
        return tokens if hides and tokens >= self._memory.block_size else 0

    def expire(self, now: float) -> list[LoadOutcome]:
        """The loads that have been waited for for LOAD_TIMEOUT: their sequences compute from here on. They go on, and
        keep their blocks for as long as a rank may write to them."""
        late = [
            lease
            for lease, (_, begun) in self._started.items()
            if now - begun > LOAD_TIMEOUT and lease not in self._overdue
        ]
        for lease in late:
            self._overdue.add(lease)
            self._pause_overlap(lease, now)
            self._client.counters.loads_failed += 1
            self._client.send(ConnectorReport(self._started[lease][0], "failed"))
        return [self.give_up(lease) for lease in late]

    def forget(self, sequence: Sequence) -> None:
        """See `BlockLoads.forget`."""
        if (load := self.lookups.get(sequence.id)) is not None:
            self._awaited.pop(load.lease, None)
        super().forget(sequence)

    def is_overlapped(self, lease: LeaseId) -> bool:
        """Whether the load under way takes a step with it, so that its time says little of others."""
        return lease in self._overlapped

    def _pause_overlap(self, lease: LeaseId, now: float) -> None:
        if lease in self._overlapped:
            self._overlap_after = now + OVERLAP_PAUSE

    def record_end(self, lease: LeaseId, done: bool, now: float) -> None:
        """Every rank has reported the load; called beside `finish`."""
        request, _ = self._started.pop(lease)
        if not done:
            self._pause_overlap(lease, now)
        self._overlapped.discard(lease)
        if lease in self._overdue:
            self._overdue.remove(lease)
        else:
            self._client.send(ConnectorReport(request, "received" if done else "failed"))

    def _ask(self, sequence: Sequence, first: int, blocks: int, hashes: list[BlockHash]) -> LeaseId:
        return self._client.look_up(sequence, first * self._memory.block_size, self._limits.store_deadline)

    def _copy(
        self, load: PendingLoad, sequence: Sequence, first: int, copies: list[tuple[int, FoundBlock]], now: float
    ) -> None:
        blocks = [block for block, _ in copies]
        request = external_id(sequence)
        run = KvBlockRun(request, first, pack(blocks), b"".join(each.hash for _, each in copies))
        self._started[load.lease] = request, now
        awaited = self._awaited.pop(load.lease, False)
        if load.computed:
            self._overlapped.add(load.lease)
            self._client.counters.loads_overlapped += 1
        self._transfers.add_load(load.lease, run, blocks, awaited=awaited, overlapped=load.computed > 0, now=now)


class _EndedRequest(NamedTuple):
    request: str
    blocks: list[int]


class ConnectorSaves:
    """Owns the blocks that a KV connector saves or sends, but for those that transfers hold."""

    def __init__(self, client: ConnectorClient, memory: BlockAllocator, transfers: BlockTransfers) -> None:
        self._client = client
        self._memory = memory
        self._transfers = transfers
        self._max_blocks = max(1, min(MAX_BLOCKS, memory.pool.total // 4))
        self._blocks: dict[LeaseId, int] = {}
        """How many blocks each transfer has."""
        self._ended: dict[LeaseId, _EndedRequest] = {}
        """Requests of which the connector has not said whether it keeps their blocks."""
        self._sending: dict[LeaseId, str] = {}

    @property
    def _room(self) -> int:
        return self._max_blocks - sum(self._blocks.values())

    def plan(self, now: float) -> ConnectorPlan | None:
        """What the plan that is being made has for the connector, with the blocks that it fills; None for nothing."""
        filled = self._memory.take_filled() if self._memory.filled else []
        room = self._room if self._transfers.room > 0 else 0
        kept, number = filled[: max(0, room)], None
        self._client.counters.blocks_unsaved += len(filled) - len(kept)
        if kept:
            lease = self._client.new_lease()
            self._blocks[lease] = len(kept)
            number = self._transfers.hold("save", lease, [each.block for each in kept], now)
        if number is None and not self._transfers.any_planned:
            return None
        loads, sends = self._transfers.take_connector()
        return ConnectorPlan(loads=loads, save=number, saves=_runs(kept), sends=sends)

    def finish_request(self, sequence: Sequence) -> None:
        """Asks whether the connector keeps the blocks of a sequence that ends. Called before it releases them."""
        use, blocks = self._client.use, sequence.blocks.numbers.copy()
        if use is None or not use.keeps or not use.saves or not blocks or len(blocks) > self._room:
            return
        if sequence.phase not in ("prefilling", "decoding"):
            return
        lease = self._client.new_lease()
        for block in blocks:
            self._memory.pool.share(block)
        self._blocks[lease] = len(blocks)
        self._ended[lease] = _EndedRequest(external_id(sequence), blocks)
        self._client.send(ConnectorRequestFinished(lease, external_id(sequence), tuple(blocks)))

    def record_keeps(self, lease: LeaseId, keeps: bool, now: float) -> None:
        """The connector has replied, or there is no sound answer: then nothing is kept."""
        ended = self._ended.pop(lease, None)
        if ended is None:  # of an epoch that is over
            return
        if keeps and self._transfers.room > 0:
            self._transfers.add_send(lease, ended.request, ended.blocks, now)
            self._sending[lease] = ended.request
        else:
            del self._blocks[lease]
        self._memory.pool.release(reversed(ended.blocks))

    def finish_transfer(self, lease: LeaseId, done: bool) -> None:
        """Every rank has reported a save or a send."""
        count = self._blocks.pop(lease)
        request = self._sending.pop(lease, None)
        if request is not None:
            self._client.send(ConnectorReport(request, "sent" if done else "failed"))
        elif done:
            self._client.counters.blocks_saved += count
        else:
            self._client.counters.blocks_unsaved += count

    @property
    def blocks(self) -> list[int]:
        """Blocks that are held without a transfer, for invariants; a block may occur twice."""
        return [block for ended in self._ended.values() for block in ended.blocks]


def external_id(sequence: Sequence) -> str:
    """The request and its attempt: an engine may hold a new one while blocks of the one before are on their way."""
    return f"{sequence.generation.request}-{sequence.generation.attempt}"


def _runs(filled: list[FilledBlock]) -> tuple[KvBlockRun, ...]:
    """Blocks of one sequence that follow each other, together. A sequence's blocks are named in their order."""
    runs = []
    numbered = sorted(filled, key=lambda each: (each.sequence.id, each.number))
    for _, group in groupby(enumerate(numbered), key=lambda pair: (pair[1].sequence.id, pair[1].number - pair[0])):
        blocks = [each for _, each in group]
        first = blocks[0]
        runs.append(
            KvBlockRun(
                external_id(first.sequence),
                first.number,
                pack(each.block for each in blocks),
                b"".join(each.hash for each in blocks),
            )
        )
    return tuple(runs)
