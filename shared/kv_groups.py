"""Groups of a model's layers that share block tables, and how much KV memory sequences take with them.

All groups of an engine take their blocks from one pool: each has the same number of layers (the last one of a kind may
have fewer), so that a block of any group has the same bytes. Engines whose layers all attend to everything have no
groups: their tables are as they were before there were any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from shared.blocks import blocks_for

NULL_BLOCK = 0
"""The block that stands in tables where a group has given its own back, or never had one. It is in nobody's use; what
it holds means nothing, and is finite."""


STEP_ROWS = 8192
"""Rows beside prompts whose keys and values a step may compute at the least: more than a step has tokens, as these rows
pass few products."""


class KvCacheGroup(Struct, frozen=True, array_like=True, kw_only=True):
    """Layers that have keys and values of the same tokens."""

    layers: Annotated[int, Meta(ge=1)]
    window: Annotated[int, Meta(ge=1)] | None = None
    """Positions that a token sees, itself included: blocks behind are given back. None: all, and none are."""
    encoded: Annotated[int, Meta(ge=1)] | None = None
    """Rows of an encoder's that every token attends to, at most (cross-attention): keys and values of these, and of no
    token, are in its blocks, as many from a sequence's first step to its last. They are no part of the interleaved
    tables: see `NewSequence.encoded_blocks`. None: the group is of the sequence's own tokens."""
    parts: Annotated[int, Meta(ge=1)] = 1
    """How many times a block's tokens it has rows for, where it is of rows: so many times fewer layers attend to these
    than to tokens, and each layer's share of a block is as large (`block_size` rows in each part)."""

    @property
    def step_rows(self) -> int:
        """Rows of an encoder's that come with the sequences that are new to a step, at most: those of one sequence, or
        of several where they have few."""
        return 0 if self.encoded is None else max(self.encoded, STEP_ROWS)

    def first_needed(self, position: int, block_size: int) -> int:
        """The first block of a sequence that is read where tokens from `position` on are computed."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size

    def most_blocks(self, tokens: int, block_size: int, step_tokens: int) -> int:
        """Most blocks that a sequence of `tokens` has at a time, if a step computes up to `step_tokens` of them."""
        if self.encoded is not None:
            return blocks_for(self.encoded, block_size * self.parts)
        blocks = blocks_for(tokens, block_size)
        if self.window is None:
            return blocks
        return min(blocks, blocks_for(self.window - 1 + max(step_tokens, block_size), block_size) + 1)


def token_tables(groups: Sequence[KvCacheGroup]) -> int:
    """Block tables of a sequence's tokens: of each group that is of these, or of all layers where there are none."""
    return max(1, sum(group.encoded is None for group in groups))


class StateRecords(Struct, frozen=True, array_like=True, kw_only=True):
    """How the KV store keeps a checkpoint of a sequence's states: as records of the size of a block's. Behind the
    blocks of a rank's KV memory its checkpoints are numbered as so many blocks each, one after the other."""

    pages: Annotated[int, Meta(ge=1)]
    """Records of one checkpoint."""
    alone: bool = False
    """Whether no layer attends: then blocks of tokens hold nothing, and have no records."""


def most_blocks(groups: Sequence[KvCacheGroup], tokens: int, block_size: int, step_tokens: int) -> int:
    """Most blocks that a sequence of `tokens` has at a time in all `groups` together."""
    return sum(group.most_blocks(tokens, block_size, step_tokens) for group in groups)


def longest_sequence(groups: Sequence[KvCacheGroup], blocks: int, block_size: int, step_tokens: int) -> int:
    """Tokens of the longest sequence that a pool of `blocks` has room for, whole blocks of it: of all but the null
    block. Where no group sees all tokens it is the largest number that a context may have."""
    low, high = 0, MAX_TOKENS // block_size
    while low < high:
        middle = (low + high + 1) // 2
        if most_blocks(groups, middle * block_size, block_size, step_tokens) <= blocks - 1:
            low = middle
        else:
            high = middle - 1
    return low * block_size


MAX_TOKENS = 2**31 - 64
"""Positions are 32-bit numbers; a multiple of every block size."""
