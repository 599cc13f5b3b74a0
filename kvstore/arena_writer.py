"""Makes the core's decisions so in the arenas. Decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import assert_never

from kvstore import metrics
from kvstore.announcer import Announcer
from kvstore.core.actions import Action, Claimed, Dropped, Evicted, Freed, GivenBack, Retired, Shown, Touched
from kvstore.owned_arena import OwnedArena
from kvstore.tiers import Tier
from shared.blocks import BLOCK_SIZE

log = logging.getLogger(__name__)


class ArenaWriter:
    """Owns the mapped arenas, and tells the tier below and the announcer what happens in them."""

    def __init__(self, announcer: Announcer, tier: Tier | None) -> None:
        self.arenas: dict[str, OwnedArena] = {}
        self._announcer = announcer
        self._tier = tier

    def carry_out(self, actions: Iterable[Action]) -> list[int]:
        """Answers with the slots that were claimed and for which the system has no memory."""
        without: list[int] = []
        for action in actions:
            arena = self.arenas[action.layout]
            match action:
                case Claimed():
                    if action.fresh and not arena.take_memory(action.slot):
                        without.append(action.slot)
                    else:
                        arena.reserve(action.slot, action.generation, action.hash, action.parent, action.tokens)
                case Shown():
                    arena.commit(action.slot, action.used)
                    self._announcer.stored(action.layout, action.hash, action.tokens)
                case Touched():
                    arena.touch(action.slot, action.used)
                case Evicted():
                    self._evict(arena, action)
                case Dropped():
                    arena.free(action.slot)
                    self._announcer.gone(action.layout, action.hash, action.tokens)
                case Freed():
                    arena.free(action.slot)
                case Retired():
                    metrics.ABANDONED.inc()
                    arena.set_generation(action.slot, action.generation)
                case GivenBack():
                    arena.give_memory_back(action.slot, action.generation)
                case _:
                    assert_never(action)
        return without

    def _evict(self, arena: OwnedArena, evicted: Evicted) -> None:
        # A partial block is of one request only: nobody would ever ask a tier for it.
        offered = self._tier is not None and evicted.tokens == BLOCK_SIZE
        kept = offered and self._tier is not None and self._tier.offer(evicted.layout, arena.carried(evicted.slot))
        metrics.EVICTIONS.labels("yes" if kept else "no").inc()
        metrics.EVICTED_AGE.observe(evicted.age)
        arena.free(evicted.slot)
        self._announcer.gone(evicted.layout, evicted.hash, evicted.tokens)
