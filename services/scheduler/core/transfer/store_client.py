"""The engine's client of the node's KV store: whether the store is available, its requests, and its leases.

Nothing waits for it: a request without a reply in time is a miss, and a lease that was not ended runs out.
"""

from __future__ import annotations

from typing import NamedTuple

from services.scheduler.core.counters import EngineCounters
from services.scheduler.core.events import Output, ReleaseLease, SendStoreRequest
from services.scheduler.core.limits import EngineRole
from shared.blocks import BlockHash
from shared.ids import ArenaId, Incarnation, LeaseId, ModelName, NodeId
from shared.messages.kvstore import (
    Attach,
    AttachReply,
    Commit,
    Find,
    FindAny,
    FindReply,
    KvLayout,
    KvStoreRefusal,
    KvStoreReply,
    KvStoreRequest,
    LeaseOwner,
    Release,
    Reserve,
    ReserveReply,
)
from shared.reliability.retry import Backoff, CircuitBreaker

ATTACH_TIMEOUT = 10.0
"""Seconds for a reply to Attach; the store may have to make a new arena."""
ATTACH_RETRY = 1.0
"""Seconds until the next attempt after the store refused to attach this engine."""
WRITE_TIMEOUT = 1.0
"""Seconds for a reply to Reserve and Commit; no sequence waits for it."""
ROUND_TRIP_MARGIN = 0.025
"""Seconds that a reply may take beyond the deadline in the request: the time on the bus."""
USABLE_SHARE = 0.6
"""Share of a lease's time in which copies of its blocks may start; the rest is for finishing them."""
MAX_UNANSWERED = 3
"""Consecutive requests without a reply, over at least `MIN_SILENCE`, after which the store gets no requests for a
while. Fewer may only mean that the machine is busy."""
MIN_SILENCE = 1.0
"""Seconds without a reply after which the circuit breaker may open."""
PAUSES = Backoff(1.0, 16.0)
"""Seconds without requests; then a single request shows whether the store replies again."""


def new_breaker() -> CircuitBreaker:
    """A circuit breaker that opens if the store lets requests time out."""
    return CircuitBreaker(MAX_UNANSWERED, MIN_SILENCE, PAUSES)


class StoreArena(NamedTuple):
    """The arena file that blocks are copied to or from."""

    id: ArenaId
    path: str


class StoreClient:
    """Owns the attachment to the store, the numbers of leases, and which leases are held. It outlives epochs."""

    def __init__(self, role: EngineRole, counters: EngineCounters) -> None:
        self.node = role.node
        self.counters = counters
        self._owner = role.owner
        self._incarnation: Incarnation | None = None
        """The store's present incarnation; None while it is away."""
        self._wanted: Attach | None = None
        """The layout that this engine's workers can share, as an Attach message; None if they cannot."""
        self._attached: AttachReply | None = None
        self._attaching = False
        self._attach_at: float | None = None
        self._breaker = new_breaker()
        self._leases = 0
        self._held: dict[LeaseId, str] = {}
        """The layout of each lease that is held."""
        self._out: list[Output] = []

    # ---- who is there

    @property
    def enabled(self) -> bool:
        """Whether the engine's node has a store."""
        return self.node is not None

    @property
    def attached(self) -> bool:
        """Whether requests may be sent: the store has attached this engine, and it replies."""
        return self._attached is not None and not self._breaker.is_open

    def record_ready(self, incarnation: Incarnation) -> bool:
        """Records that a store runs, with this incarnation. Returns whether it is a new one, which knows no lease of
        this engine."""
        if incarnation == self._incarnation:
            return False
        self.record_gone()
        self._incarnation = incarnation
        self._breaker = new_breaker()
        self._attaching = False  # the store that had the request is gone
        self._attach()
        return True

    def record_gone(self) -> None:
        """Records that the store is away. Leases are forgotten, as they ended with it."""
        self._incarnation = self._attached = self._attach_at = None
        self._held.clear()

    def share(self, layout: KvLayout | None, model: ModelName) -> None:
        """Attaches with the layout of the engine's blocks; None where its workers cannot share them."""
        wanted = None if layout is None else Attach(layout, model)
        if wanted != self._wanted:
            self._wanted = wanted
            self.detach()
        self._attach()

    def record_attach(self, request: Attach, reply: KvStoreReply | None, now: float) -> None:
        """Records whether the store attached this engine; if not, the next attempt follows in ATTACH_RETRY seconds."""
        self._attaching = False
        if request != self._wanted:
            self._attach()
        elif isinstance(reply, AttachReply):
            self._attached = reply if self._incarnation is not None else None
        else:
            self._attach_at = now + ATTACH_RETRY

    def tick(self, now: float) -> None:
        """Asks the store to attach this engine again, if that is due."""
        self._breaker.update(now)
        if self._attach_at is not None and now >= self._attach_at:
            self._attach_at = None
            self._attach()

    def _attach(self) -> None:
        wanted = self._wanted is not None and self._incarnation is not None and self._attached is None
        if wanted and not self._attaching and self._wanted is not None:
            self._attaching = True
            self._out.append(SendStoreRequest(self._wanted, ATTACH_TIMEOUT))

    @property
    def layout(self) -> str | None:
        """The fingerprint under which blocks are saved; None while not attached."""
        return None if self._attached is None else self._attached.layout

    # ---- requests

    def find_any(self, hashes: list[BlockHash], deadline: float) -> LeaseId:
        """Asks which of `hashes` the store has, within `deadline` seconds: under a lease for what is then asked for."""
        lease, layout = self._new_lease()
        request = FindAny(layout=layout, owner=self._named_owner(), lease=lease, hashes=b"".join(hashes))
        self._out.append(SendStoreRequest(request, deadline + ROUND_TRIP_MARGIN))
        return lease

    def find(
        self,
        hashes: list[BlockHash],
        deadline: float,
        source: NodeId | None,
        block_seconds: float | None = None,
        lease: LeaseId | None = None,
        *,
        keep: bool = False,
    ) -> LeaseId:
        """Asks which leading blocks of `hashes` the store has, within `deadline` seconds, or the store of `source`,
        unless that takes longer than `block_seconds` for each. `lease`: one that is held, under which nothing was
        found yet; None: a new one. `keep`: see `Find`."""
        lease, layout = self._new_lease() if lease is None else (lease, self._held[lease])
        request = Find(
            layout=layout,
            owner=self._named_owner(),
            lease=lease,
            hashes=b"".join(hashes),
            deadline=deadline,
            source=source,
            block_seconds=block_seconds or 0.0,
            keep=keep,
        )
        self._out.append(SendStoreRequest(request, deadline + ROUND_TRIP_MARGIN))
        return lease

    def reserve(self, hashes: list[BlockHash], parents: list[bytes], tokens: bytes) -> LeaseId:
        """Asks for slots to write blocks to; `tokens`: how many each block holds, a byte each."""
        lease, layout = self._new_lease()
        request = Reserve(
            layout=layout,
            owner=self._named_owner(),
            lease=lease,
            hashes=b"".join(hashes),
            parents=b"".join(parents),
            tokens=tokens,
        )
        self._out.append(SendStoreRequest(request, WRITE_TIMEOUT))
        return lease

    def commit(self, lease: LeaseId) -> None:
        """Asks to show the lease's blocks to others, and ends it. Raises KeyError for one that is not held."""
        request = Commit(layout=self._held.pop(lease), owner=self._named_owner(), lease=lease)
        self._out.append(SendStoreRequest(request, WRITE_TIMEOUT))

    def release(self, lease: LeaseId, drop: bytes = b"") -> None:
        """Ends the lease, where the store still knows it. `drop`: hash of a block that no other wants."""
        layout = self._held.pop(lease, None)
        if layout is not None:
            release = Release(layout=layout, owner=self._named_owner(), lease=lease, drop=drop)
            self._out.append(ReleaseLease(release))

    def forget(self, lease: LeaseId) -> None:
        """Leaves the lease to run out: a rank may still be writing under it."""
        self._held.pop(lease, None)

    def holds(self, lease: LeaseId) -> bool:
        """Whether the store still keeps what was granted under it."""
        return lease in self._held

    @property
    def held(self) -> frozenset[LeaseId]:
        """Every lease that the store has to keep."""
        return frozenset(self._held)

    @property
    def usable_seconds(self) -> float:
        """How long what a lease holds may wait to be used."""
        return 0.0 if self._attached is None else self._attached.lease_seconds * USABLE_SHARE

    def arena(self, reply: FindReply | ReserveReply) -> StoreArena | None:
        """Where the slots of `reply` are. None, and attaches again, where that is not the file we know."""
        if self._attached is None:
            return None
        if reply.arena != self._attached.arena:
            self.detach()
            return None
        return StoreArena(reply.arena, self._attached.path)

    def record_reply(self, request: KvStoreRequest, reply: KvStoreReply | None, now: float) -> None:
        """Called before a reply is put to use. A store that does not know our layout is attached again, and one that
        does not reply is left alone for a while."""
        if reply is None:
            self._breaker.record_failure(now)
        else:
            self._breaker.record_success()
        if isinstance(reply, KvStoreRefusal) and not isinstance(request, Attach):
            self.detach()

    def detach(self) -> None:
        """Drops the attachment and attaches again. Leases that are held stay, and are released as usual."""
        self._attached = None
        self._attach()

    def take_outputs(self) -> list[Output]:
        """The messages for the store since the last call, in order."""
        out, self._out = self._out, []
        return out

    def _new_lease(self) -> tuple[LeaseId, str]:
        """A new lease and the layout that it is for."""
        assert self._attached is not None, "leases need an attached store"
        self._leases += 1
        lease = LeaseId(self._leases)
        self._held[lease] = self._attached.layout
        return lease, self._attached.layout

    def _named_owner(self) -> LeaseOwner:
        assert self._owner is not None, "a store is attached in its engine's name"
        return self._owner
