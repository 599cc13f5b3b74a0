"""Which lease holds which blocks, and when it expires. No clock: time is an argument."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.core.slot_table import StoredBlock
from shared.ids import LeaseId
from shared.messages.kvstore import LeaseOwner

MAX_LEASES = 65_536
"""At a time. Beyond it nothing is found and nothing reserved: some owner does not release."""


class LeaseKey(NamedTuple):
    """Names a lease: its owner chooses the number, which is unique within one layout."""

    layout: str
    owner: LeaseOwner
    lease: LeaseId


@dataclass(slots=True)
class Lease:
    """What one lease holds: blocks that its owner reads, and blocks that its owner writes."""

    key: LeaseKey
    expires: float
    pinned: list[StoredBlock] = field(default_factory=list)
    reserved: list[StoredBlock] = field(default_factory=list)


class Leases:
    """Owns every lease. Each lasts `seconds` from when it was last added to."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._leases: dict[LeaseKey, Lease] = {}
        """The leases in the order in which they expire."""
        self._of_owner: defaultdict[LeaseOwner, set[LeaseKey]] = defaultdict(set)
        self._released: dict[LeaseKey, float] = {}
        """Releases of leases that were not there, and until when they count: a store that stood still may read what an
        owner no longer wants before it reads that it was wanted."""

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, key: LeaseKey) -> Lease | None:
        """The lease of this name; None where there is none, or it has ended."""
        return self._leases.get(key)

    def open(self, key: LeaseKey, now: float) -> Lease | None:
        """Begins or prolongs the lease of this name; None where there are too many, or its owner has released it
        already."""
        if key in self._released:
            return None
        lease = self._leases.pop(key, None)
        if lease is None:
            if len(self._leases) >= MAX_LEASES:
                return None
            lease = Lease(key, 0.0)
            self._of_owner[key.owner].add(key)
        lease.expires = now + self.seconds
        self._leases[key] = lease
        return lease

    def end(self, key: LeaseKey) -> Lease | None:
        """Ends the lease and returns it; None where it had ended before."""
        lease = self._leases.pop(key, None)
        if lease is not None:
            mine = self._of_owner[key.owner]
            mine.discard(key)
            if not mine:
                del self._of_owner[key.owner]
        return lease

    def release(self, key: LeaseKey, now: float) -> Lease | None:
        """As `end`, at the owner's request; one that is not there will not begin any more."""
        lease = self.end(key)
        if lease is None and len(self._released) < MAX_LEASES:
            self._released[key] = now + self.seconds
        return lease

    def of(self, owner: LeaseOwner) -> list[LeaseKey]:
        """The names of one owner's leases."""
        return list(self._of_owner.get(owner, ()))

    def expired(self, now: float) -> list[LeaseKey]:
        """The names of leases that are over at `now`, which stay until `end`. Forgets releases of before them."""
        while self._released and next(iter(self._released.values())) <= now:
            del self._released[next(iter(self._released))]
        expired: list[LeaseKey] = []
        for key, lease in self._leases.items():
            if lease.expires > now:
                break
            expired.append(key)
        return expired

    def all(self) -> list[Lease]:
        """Every lease, the one that ends first at the head."""
        return list(self._leases.values())
