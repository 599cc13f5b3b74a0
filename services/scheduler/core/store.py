"""The node's KV store, as the engine sees it: whether it is there, what it is asked, which leases are held.

Nothing waits for it: a question that is not answered in time is a miss, and a lease that was not ended runs out.
"""

from __future__ import annotations

from typing import NamedTuple

from services.scheduler.core.events import AskStore, Output, ReleaseLease
from services.scheduler.core.site import Site
from services.scheduler.core.store_breaker import StoreBreaker
from services.scheduler.core.tally import Tally
from shared.blocks import BlockHash
from shared.ids import ArenaId, Incarnation, LeaseId, ModelName, NodeId
from shared.messages.kvstore import (
    Attach,
    Attached,
    Commit,
    Find,
    Found,
    KvLayout,
    KvStoreAnswer,
    KvStoreQuestion,
    NotServed,
    Owner,
    Release,
    Reserve,
    Reserved,
)

ATTACH_TIMEOUT = 10.0
"""Seconds; a new arena has to be made."""
ATTACH_AGAIN = 1.0
"""Seconds after which a store that would not attach us is asked again."""
PATIENCE = 1.0
"""Seconds for an answer that nobody waits for: to Reserve and Commit."""
MARGIN = 0.025
"""Seconds that an answer may be late, beyond the deadline that the store was told: the way there and back."""
FRESH = 0.6
"""Share of a lease's time in which its blocks are put to use; the rest is for doing so."""


class Arena(NamedTuple):
    """Which file blocks are copied to or from."""

    id: ArenaId
    path: str


class Store:
    """Owns the attachment, the numbers of leases, and which leases count. Outlives the engine's epochs."""

    def __init__(self, site: Site, tally: Tally) -> None:
        self.node = site.node
        self.tally = tally
        self._owner = site.owner
        self._incarnation: Incarnation | None = None
        """The store's present life; None while it is away."""
        self._wanted: Attach | None = None
        """What this engine's workers can share."""
        self._attached: Attached | None = None
        self._asked_to_attach = False
        self._attach_at: float | None = None
        self._breaker = StoreBreaker()
        self._leases = 0
        self._held: dict[LeaseId, str] = {}
        """And the layout that each is for."""
        self._out: list[Output] = []

    # ---- who is there

    @property
    def attached(self) -> bool:
        """Whether it may be asked: it knows us, and answers."""
        return self._attached is not None and not self._breaker.open

    def here(self, incarnation: Incarnation) -> bool:
        """A store is there; whether it is another one than before, which knows of no lease of ours."""
        if incarnation == self._incarnation:
            return False
        self.gone()
        self._incarnation = incarnation
        self._breaker = StoreBreaker()
        self._asked_to_attach = False  # whom we asked is no more
        self._attach()
        return True

    def gone(self) -> None:
        """Leases are forgotten: the store's own end has ended them."""
        self._incarnation = self._attached = self._attach_at = None
        self._held.clear()

    def share(self, layout: KvLayout | None, model: ModelName) -> None:
        """The layout of the engine's blocks; None where its workers cannot share them."""
        wanted = None if layout is None else Attach(layout, model)
        if wanted != self._wanted:
            self._wanted = wanted
            self.detach()
        self._attach()

    def attach_answered(self, question: Attach, answer: KvStoreAnswer | None, now: float) -> None:
        self._asked_to_attach = False
        if question != self._wanted:
            self._attach()
        elif isinstance(answer, Attached):
            self._attached = answer if self._incarnation is not None else None
        else:
            self._attach_at = now + ATTACH_AGAIN

    def look_at_clock(self, now: float) -> None:
        self._breaker.look_at_clock(now)
        if self._attach_at is not None and now >= self._attach_at:
            self._attach_at = None
            self._attach()

    def _attach(self) -> None:
        wanted = self._wanted is not None and self._incarnation is not None and self._attached is None
        if wanted and not self._asked_to_attach and self._wanted is not None:
            self._asked_to_attach = True
            self._out.append(AskStore(self._wanted, ATTACH_TIMEOUT))

    # ---- questions

    def find(self, hashes: list[BlockHash], deadline: float, source: NodeId | None) -> LeaseId:
        lease, layout = self._new_lease()
        question = Find(
            layout=layout,
            owner=self._named_owner(),
            lease=lease,
            hashes=b"".join(hashes),
            deadline=deadline,
            source=source,
        )
        self._out.append(AskStore(question, deadline + MARGIN))
        return lease

    def reserve(self, hashes: list[BlockHash], parents: list[bytes], tokens: bytes) -> LeaseId:
        lease, layout = self._new_lease()
        question = Reserve(
            layout=layout,
            owner=self._named_owner(),
            lease=lease,
            hashes=b"".join(hashes),
            parents=b"".join(parents),
            tokens=tokens,
        )
        self._out.append(AskStore(question, PATIENCE))
        return lease

    def commit(self, lease: LeaseId) -> None:
        """Ends the lease, whatever the answer. Raises KeyError for one that is not held."""
        question = Commit(layout=self._held.pop(lease), owner=self._named_owner(), lease=lease)
        self._out.append(AskStore(question, PATIENCE))

    def release(self, lease: LeaseId, drop: bytes = b"") -> None:
        """Ends the lease, where the store still knows it."""
        layout = self._held.pop(lease, None)
        if layout is not None:
            release = Release(layout=layout, owner=self._named_owner(), lease=lease, drop=drop)
            self._out.append(ReleaseLease(release))

    def forget(self, lease: LeaseId) -> None:
        """Leaves the lease to run out: somebody may still be writing under it."""
        self._held.pop(lease, None)

    def holds(self, lease: LeaseId) -> bool:
        return lease in self._held

    @property
    def held(self) -> frozenset[LeaseId]:
        return frozenset(self._held)

    @property
    def fresh_seconds(self) -> float:
        """How long what a lease holds may wait to be used."""
        return 0.0 if self._attached is None else self._attached.lease_seconds * FRESH

    def arena(self, answer: Found | Reserved) -> Arena | None:
        """Where the slots of `answer` are. None, and to be attached anew, where that is not the file we know."""
        if self._attached is None:
            return None
        if answer.arena != self._attached.arena:
            self.detach()
            return None
        return Arena(answer.arena, self._attached.path)

    def take_note(self, question: KvStoreQuestion, answer: KvStoreAnswer | None, now: float) -> None:
        """Before an answer is put to use: a store that does not know our layout is to be attached anew, and one that
        does not answer to be left alone for a while."""
        if answer is None:
            self._breaker.unanswered(now)
        else:
            self._breaker.answered()
        if isinstance(answer, NotServed) and not isinstance(question, Attach):
            self.detach()

    def detach(self) -> None:
        """To be attached anew. Leases are ended as they would have been."""
        self._attached = None
        self._attach()

    def take_outputs(self) -> list[Output]:
        out, self._out = self._out, []
        return out

    def _new_lease(self) -> tuple[LeaseId, str]:
        """And the layout that it is for."""
        assert self._attached is not None, "only an attached store is asked"
        self._leases += 1
        lease = LeaseId(self._leases)
        self._held[lease] = self._attached.layout
        return lease, self._attached.layout

    def _named_owner(self) -> Owner:
        assert self._owner is not None, "a store is attached in its engine's name"
        return self._owner
