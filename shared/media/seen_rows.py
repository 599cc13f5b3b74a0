"""Which of the rows beside a prompt (`PromptEmbeds.encoded`) a token attends to, and where their keys and values lie.

Runs that begin at tokens next to each other are seen together; a run behind other tokens is seen in place of those
before, as by Llama 3.2 Vision: a token sees the image, or the images without text between them, that stood last before
it. Rows that are seen together begin a block, so that a table of blocks can begin with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shared.blocks import blocks_for
from shared.kv_groups import KvCacheGroup
from shared.messages.generation import PromptEmbeds


class SeenRows(NamedTuple):
    """What tokens from `token` on see, up to that of the next of these."""

    token: int
    block: int
    """The first of the blocks in which the rows lie, one behind the other, as the prompt's blocks for rows count."""
    rows: int


def seen_rows(embeds: PromptEmbeds, block_size: int) -> list[SeenRows]:
    """Of each run."""
    found: list[SeenRows] = []
    for token, count in _runs(embeds):
        before = found[-1] if found else None
        if before is not None and token == before.token + 1:
            found.append(SeenRows(token, before.block, before.rows + count))
        else:
            block = 0 if before is None else before.block + blocks_for(before.rows, block_size)
            found.append(SeenRows(token, block, count))
    return found


def places_of_rows(embeds: PromptEmbeds, block_size: int) -> tuple[tuple[int, int], ...]:
    """Of each run the place of its first row in the blocks for rows, and how many rows it has."""
    seen = seen_rows(embeds, block_size)
    runs = zip(seen, _runs(embeds), strict=True)
    return tuple((each.block * block_size + each.rows - count, count) for each, (_, count) in runs)


def blocks_of_rows(embeds: PromptEmbeds, block_size: int) -> int:
    """How many blocks they lie in, as attention has these: parts of those of a pool where one has several."""
    last = seen_rows(embeds, block_size)[-1]
    return last.block + blocks_for(last.rows, block_size)


def blocks_of_prompt(embeds: PromptEmbeds, block_size: int, groups: Sequence[KvCacheGroup]) -> int:
    """How many blocks of the pool these are. `groups`: the engine's, of which one is of rows."""
    parts = next(group.parts for group in groups if group.encoded is not None)
    return blocks_for(blocks_of_rows(embeds, block_size), parts)


def _runs(embeds: PromptEmbeds) -> tuple[tuple[int, int], ...]:
    return embeds.runs or ((0, embeds.count),)
