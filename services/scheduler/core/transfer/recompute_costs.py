"""What computing blocks of a prompt costs this engine, and what loading them does: measured, so that the cheaper wins.

Whatever was not measured, or not for a while, counts as worth a load: it is measured by being done.
"""

from __future__ import annotations

from kvstore.core.layout import UnknownDtype, geometry
from shared.messages.kvstore import KvLayout
from shared.messages.lifecycle import RecomputeReport

MIN_TOKENS = 128
"""Steps of fewer tokens say little about how fast prompts are computed: a step has a fixed cost."""
GAIN = 1 / 8
"""How much the newest step or load counts."""
LOAD_MEMORY = 10.0
"""Seconds for which a slow load keeps others from being tried: the machine may have been busy."""


class RecomputeCosts:
    """Owns the measured seconds of a computed token and of a loaded block. Knows no clock."""

    def __init__(self, layout: KvLayout | None, block_size: int, records: int = 1) -> None:
        """`layout`: of the engine's blocks, of `block_size` tokens; None where they cannot be shared, and none are
        loaded. `records`: how many of the store hold a block for all layers."""
        self._block_size = block_size
        self._records = records
        self.block_bytes = _block_bytes(layout) * records
        self._token_seconds: float | None = None
        self._load_seconds: float | None = None
        self._loaded_at = 0.0

    def record_step(self, tokens: int, seconds: float) -> None:
        """A step with prompt tokens has computed so many tokens, decodes included, in so many seconds."""
        if tokens >= MIN_TOKENS and seconds > 0.0:
            self._token_seconds = _mean(self._token_seconds, seconds / tokens)

    def record_load(self, blocks: int, seconds: float, now: float) -> None:
        """So many records were copied from the arena to every rank, in so many seconds."""
        if blocks > 0 and seconds > 0.0:
            old = now - self._loaded_at > LOAD_MEMORY
            each = seconds / blocks * self._records
            self._load_seconds = _mean(None if old else self._load_seconds, each)
            self._loaded_at = now

    @property
    def block_seconds(self) -> float | None:
        """Seconds that computing the tokens of one block takes; None before the first prompt of some length."""
        return None if self._token_seconds is None else self._token_seconds * self._block_size

    def load_pays(self, now: float) -> bool:
        """Whether blocks that lie in the node's arena are loaded sooner than computed."""
        if self.block_seconds is None or self._load_seconds is None or now - self._loaded_at > LOAD_MEMORY:
            return True
        return self._load_seconds <= self.block_seconds

    def load_hides(self, blocks: int, tokens: int) -> bool:
        """Whether loading so many blocks is over as soon as computing so many tokens. Loads that were never measured
        are not expected to be."""
        if self._load_seconds is None:
            return False
        return self._token_seconds is None or blocks * self._load_seconds <= tokens * self._token_seconds

    def deadline(self, blocks: int, longest: float) -> float:
        """Seconds that a search for so many blocks may take, `longest` at the most: then computing them is sooner."""
        return longest if self.block_seconds is None else min(longest, blocks * self.block_seconds)

    def report(self) -> RecomputeReport | None:
        """For coordinators; None where blocks are not shared, or nothing was measured."""
        if not self.block_bytes or self.block_seconds is None:
            return None
        return RecomputeReport(
            block_bytes=self.block_bytes,
            block_seconds=self.block_seconds,
            load_seconds=self._load_seconds or 0.0,
        )


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + GAIN * (newest - before)


def _block_bytes(layout: KvLayout | None) -> int:
    if layout is None:
        return 0
    try:
        one = geometry(layout, 1)
    except UnknownDtype:
        return 0
    return one.cells * one.cell_bytes
