"""What fits into KV memory with one block table for all layers, and with one for each group of layers, and what of a
prompt goes through the KV store: two tables.

python -m tests.benchmarks.hybrid_kv_memory

It is counted, not measured, by the arithmetic with which ranks size their memory and schedulers admit sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from services.worker.kv.layer_groups import group_layers
from shared.blocks import blocks_for
from shared.kv_groups import KvCacheGroup, longest_sequence, most_blocks

MEMORY = 16 << 30
BLOCK_SIZE = 16
STEP_TOKENS = 2048
CONTEXTS = (8_192, 32_768, 131_072)


HANDED_OVER = 32_768
"""Tokens of a prompt."""


class Shape(NamedTuple):
    """Of a model, as far as its keys and values go; in bfloat16."""

    name: str
    layers: int
    full_every: int
    """Each so many layers one that sees all tokens."""
    window: int
    kv_heads: int
    head_dim: int

    @property
    def windows(self) -> list[int | None]:
        """Of each layer."""
        return [None if (i + 1) % self.full_every == 0 else self.window for i in range(self.layers)]

    @property
    def layer_bytes(self) -> int:
        """Of a block of one layer."""
        return 2 * 2 * BLOCK_SIZE * self.kv_heads * self.head_dim


SHAPES = (
    Shape("Gemma 3 27B", 62, 6, 1024, 16, 128),
    Shape("Gemma 3 4B", 34, 6, 1024, 4, 256),
    Shape("Gemma 2 9B", 42, 2, 4096, 8, 256),
    Shape("gpt-oss-20b", 24, 2, 128, 8, 64),
)


def main() -> None:
    """Prints the tables as they are in docs/models.md."""
    print(
        "| model | block tables | longest context | " + " | ".join(f"sequences of {each:,}" for each in CONTEXTS) + " |"
    )
    print("|---|---|---|" + "---|" * len(CONTEXTS))
    for shape in SHAPES:
        blocks = MEMORY // (shape.layer_bytes * shape.layers)
        counts = [blocks // blocks_for(each, BLOCK_SIZE) for each in CONTEXTS]
        print(_row(shape.name, "one", blocks * BLOCK_SIZE, counts))
        groups = group_layers(shape.windows, 1 << 30)
        assert groups is not None, "each has windows"
        blocks = MEMORY // (shape.layer_bytes * groups.caches)
        counts = [(blocks - 1) // most_blocks(groups.groups, each, BLOCK_SIZE, STEP_TOKENS) for each in CONTEXTS]
        longest = longest_sequence(groups.groups, blocks, BLOCK_SIZE, STEP_TOKENS)
        print(_row("", f"{len(groups.groups)} groups of {groups.caches}", longest, counts))
    print(f"\n| model | block tables | saved of {HANDED_OVER:,} tokens | loaded, or sent to another node |")
    print("|---|---|---|---|")
    for shape in SHAPES:
        whole = KvCacheGroup(layers=shape.layers)
        print(f"| {shape.name} | one | {_gib(shape, shape.layers, [whole])} | {_gib(shape, shape.layers, [whole])} |")
        groups = group_layers(shape.windows, 1 << 30)
        assert groups is not None, "each has windows"
        saved = _gib(shape, groups.caches, [whole] * len(groups.groups))
        loaded = _gib(shape, groups.caches, groups.groups)
        print(f"|  | {len(groups.groups)} groups of {groups.caches} | {saved} | {loaded} |")


def _gib(shape: Shape, layers: int, groups: Sequence[KvCacheGroup]) -> str:
    """Of a prompt's blocks of so many layers that each of the groups needs to go on behind it."""
    blocks = blocks_for(HANDED_OVER, BLOCK_SIZE)
    records = sum(blocks - group.first_needed(HANDED_OVER, BLOCK_SIZE) for group in groups)
    return f"{records * layers * shape.layer_bytes / (1 << 30):.2f} GiB"


def _row(name: str, tables: str, longest: int, counts: list[int]) -> str:
    return f"| {name} | {tables} | {longest:,} | " + " | ".join(map(str, counts)) + " |"


if __name__ == "__main__":
    main()
