"""Who holds which blocks, and until when. No clock: time is an argument."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.core.shelf import Block
from shared.ids import LeaseId
from shared.messages.kvstore import Owner

MAX_LEASES = 65_536
"""At a time. Above it nothing is found and nothing reserved: somebody does not release."""


class LeaseKey(NamedTuple):
    layout: str
    owner: Owner
    lease: LeaseId


@dataclass(slots=True)
class Lease:
    key: LeaseKey
    expires: float
    pinned: list[Block] = field(default_factory=list)
    reserved: list[Block] = field(default_factory=list)


class Leases:
    """Owns every lease. Each lasts `seconds` from when it was last added to."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._leases: dict[LeaseKey, Lease] = {}
        """In the order in which they end."""
        self._of_owner: defaultdict[Owner, set[LeaseKey]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, key: LeaseKey) -> Lease | None:
        return self._leases.get(key)

    def open(self, key: LeaseKey, now: float) -> Lease | None:
        """The lease of this name, begun or prolonged; None where there are too many."""
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
        lease = self._leases.pop(key, None)
        if lease is not None:
            mine = self._of_owner[key.owner]
            mine.discard(key)
            if not mine:
                del self._of_owner[key.owner]
        return lease

    def of(self, owner: Owner) -> list[LeaseKey]:
        return list(self._of_owner.get(owner, ()))

    def expired(self, now: float) -> list[LeaseKey]:
        expired: list[LeaseKey] = []
        for key, lease in self._leases.items():
            if lease.expires > now:
                break
            expired.append(key)
        return expired

    def all(self) -> list[Lease]:
        return list(self._leases.values())
