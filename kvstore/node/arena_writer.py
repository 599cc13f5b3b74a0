"""Carries the core's actions out in the arenas. Decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import assert_never

from kvstore import metrics
from kvstore.arena.owned_arena import OwnedArena
from kvstore.core.actions import (
    Action,
    CommitSlot,
    DropBlock,
    EvictBlock,
    FreeSlot,
    GiveMemoryBack,
    ReserveSlot,
    RetireSlot,
    TouchSlot,
)
from kvstore.core.announcer import KvAnnouncer
from kvstore.node.commit_watch import CommitWatch
from kvstore.tiers.interface import EvictionTarget

log = logging.getLogger(__name__)


class ArenaWriter:
    """Owns the mapped arenas, and reports what happens in them to the lower tier and the announcer."""

    def __init__(self, announcer: KvAnnouncer, tier: EvictionTarget | None, commits: CommitWatch) -> None:
        self.arenas: dict[str, OwnedArena] = {}
        self._announcer = announcer
        self._tier = tier
        self._commits = commits

    def carry_out(self, actions: Iterable[Action]) -> list[int]:
        """Carries out `actions` in order. Returns the reserved slots for which the system has no memory."""
        without: list[int] = []
        for action in actions:
            arena = self.arenas[action.layout]
            match action:
                case ReserveSlot():
                    if action.fresh and not arena.take_memory(action.slot):
                        without.append(action.slot)
                    else:
                        arena.reserve(action.slot, action.generation, action.hash, action.parent, action.tokens)
                case CommitSlot():
                    arena.commit(action.slot, action.used)
                    self._announcer.stored(action.layout, action.hash, full=_is_full(arena, action.tokens))
                    self._commits.committed(action.layout, action.hash)
                case TouchSlot():
                    arena.touch(action.slot, action.used)
                case EvictBlock():
                    self._evict(arena, action)
                case DropBlock():
                    arena.free(action.slot)
                    self._announcer.gone(action.layout, action.hash, full=_is_full(arena, action.tokens))
                case FreeSlot():
                    arena.free(action.slot)
                case RetireSlot():
                    metrics.ABANDONED.inc()
                    arena.set_generation(action.slot, action.generation)
                case GiveMemoryBack():
                    arena.give_memory_back(action.slot, action.generation)
                case _:
                    assert_never(action)
        return without

    def _evict(self, arena: OwnedArena, evicted: EvictBlock) -> None:
        # A partial block belongs to one request only, so no search would ever look for it in a tier.
        full = _is_full(arena, evicted.tokens)
        offered = self._tier is not None and full
        kept = offered and self._tier is not None and self._tier.offer(evicted.layout, arena.in_flight(evicted.slot))
        metrics.EVICTIONS.labels("yes" if kept else "no").inc()
        metrics.EVICTED_AGE.observe(evicted.age)
        arena.free(evicted.slot)
        self._announcer.gone(evicted.layout, evicted.hash, full=full)


def _is_full(arena: OwnedArena, tokens: int) -> bool:
    return tokens == arena.layout.block_size
