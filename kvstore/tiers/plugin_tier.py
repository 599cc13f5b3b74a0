"""Lower tiers that installed packages bring: found by entry points, and kept from harming the store.

A package names a factory in the entry point group `baton.kv_tiers`; the entry point's name is the scheme of the URLs
that choose it. docs/kv_tiers.md shows a whole one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from kvstore import metrics
from kvstore.arena.in_flight_block import BlockShape, InFlightBlock, is_sound
from kvstore.tiers.interface import LowerTier
from shared.blocks import BlockHash
from shared.messages.lifecycle import TierReport
from shared.plugins.entry_points import PluginError, load_plugin
from shared.reliability.retry import Backoff, CircuitBreaker

log = logging.getLogger(__name__)

GROUP = "baton.kv_tiers"
BUILT_IN = ("arena", "lower", "peer", "redis", "ssd")
"""Names that metrics use already."""
FAILURES_IN_A_ROW = 3
"""Exceptions of a tier until it is left alone for a while."""
PAUSE = Backoff(first=1.0, longest=60.0)
"""Seconds for which it is left alone, and until its background work is started again."""


class PluginRefused(Exception):
    """A URL that no installed package has a tier for, or whose tier cannot be made; the text says why."""


class TierFactory(Protocol):
    """What an entry point names."""

    def __call__(self, url: str, /) -> LowerTier:
        """The tier for `url`, which begins with the entry point's name. Raises ValueError for one that is none. Must
        not wait for anything: what has to be connected to is connected to in `run`."""


def plugin_tier(url: str) -> PluginTier:
    """The tier that an installed package brings for `url`. Raises PluginRefused."""
    scheme = url.partition("://")[0]
    if not re.fullmatch(r"[a-z][a-z0-9+._-]*", scheme) or "://" not in url:
        raise PluginRefused("NAME://… is expected")  # not the URL itself: there may be a password in it
    if scheme in BUILT_IN:
        raise PluginRefused(f"{scheme}://…: that tier has an option of its own")
    try:
        plugin = load_plugin(GROUP, scheme)
    except PluginError as error:
        raise PluginRefused(f"{scheme}://…: {error}") from None
    factory: TierFactory = plugin.value
    try:
        return PluginTier(scheme, factory(url))
    except Exception as error:  # whatever a foreign package raises
        raise PluginRefused(f"{scheme}://…, {plugin.where}: {error!r}") from None


class PluginTier:
    """Owns how often a foreign tier failed. What it raises is logged and counted, and after a few failures in a row it
    is left alone for a while; what it returns is checked. Implements `kvstore.tiers.interface.LowerTier`."""

    def __init__(self, name: str, tier: LowerTier) -> None:
        self.name = name
        self._tier = tier
        self._breaker = CircuitBreaker(FAILURES_IN_A_ROW, 0.0, PAUSE)
        self._hits = self._stored = 0
        self._problem = ""
        metrics.TIER_PRESENT.labels(name).set_function(lambda: not self._breaker.is_open)

    async def run(self) -> None:
        """The tier's background work until cancelled; started anew, after a pause, whenever it fails."""
        failures = 0
        while True:
            try:
                await self._tier.run()
            except Exception as error:
                self._failed("run", error)
                await asyncio.sleep(PAUSE.pause(failures))
                failures += 1
            else:
                await asyncio.Event().wait()  # it has none

    def offer(self, layout: str, block: InFlightBlock) -> bool:
        """Whether the tier took the block; False while it is left alone."""
        if not self._is_usable():
            return False
        try:
            taken = bool(self._tier.offer(layout, block))
        except Exception as error:
            self._failed("offer", error)
            return False
        self._stored += taken
        (metrics.TIER_STORED.labels(self.name) if taken else metrics.TIER_DROPPED.labels(self.name, "refused")).inc()
        return taken

    def has(self, layout: str, name: BlockHash) -> bool:
        """Whether the tier says that it has the block; False while it is left alone."""
        if not self._is_usable():
            return False
        try:
            return bool(self._tier.has(layout, name))
        except Exception as error:
            self._failed("has", error)
            return False

    async def fetch(
        self, layout: str, hashes: Sequence[BlockHash], shape: BlockShape
    ) -> AsyncGenerator[InFlightBlock, None]:
        """What the tier yields, up to the first block that is not the expected one or not sound."""
        if not self._is_usable():
            return
        try:
            async with contextlib.aclosing(self._tier.fetch(layout, hashes, shape)) as blocks:
                for name in hashes:
                    block = await anext(blocks, None)
                    if block is None:
                        break
                    if block.hash != name or not is_sound(block, shape):
                        self._spoiled(layout, name)
                        return
                    self._hits += 1
                    metrics.TIER_HITS.labels(self.name).inc()
                    metrics.TIER_BYTES_IN.labels(self.name).inc(len(block.payload))
                    yield block
            self._breaker.record_success()
            self._problem = ""
        except Exception as error:
            self._failed("fetch", error)

    def report(self) -> TierReport:
        """What the tier says, under the name of its entry point; what it returned and took is counted here."""
        try:
            told = self._tier.report()
            return TierReport(
                name=self.name,
                present=bool(told.present) and not self._breaker.is_open,
                blocks=told.blocks,
                bytes_used=told.bytes_used,
                bytes_total=told.bytes_total,
                hits=self._hits,
                stored=self._stored,
                evictions=told.evictions,
                problem=self._problem or str(told.problem),
            )
        except Exception as error:
            return TierReport(name=self.name, present=False, hits=self._hits, problem=f"report: {error!r}")

    def _is_usable(self) -> bool:
        self._breaker.update(time.monotonic())
        return not self._breaker.is_open

    def _failed(self, what: str, error: Exception) -> None:
        problem = f"{what}: {error!r}"
        if problem != self._problem:
            log.warning("kv tier failed", extra={"tier": self.name, "problem": problem}, exc_info=error)
        self._problem = problem
        metrics.TIER_FAILED.labels(self.name, "error").inc()
        self._breaker.record_failure(time.monotonic())

    def _spoiled(self, layout: str, name: BlockHash) -> None:
        metrics.TIER_SPOILED.labels(self.name).inc()
        log.warning("block with a wrong checksum", extra={"tier": self.name, "layout": layout, "hash": name.hex()})
