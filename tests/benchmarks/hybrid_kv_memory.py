"""What fits into KV memory with one block table for all layers, and with one for each group of layers: a table.

python -m tests.benchmarks.hybrid_kv_memory

It is counted, not measured, by the arithmetic with which ranks size their memory and schedulers admit sequences.
"""

from __future__ import annotations

from typing import NamedTuple

from services.worker.kv.layer_groups import group_layers
from shared.blocks import blocks_for
from shared.messages.kv_groups import longest_sequence, most_blocks

MEMORY = 16 << 30
BLOCK_SIZE = 16
STEP_TOKENS = 2048
CONTEXTS = (8_192, 32_768, 131_072)


class Shape(NamedTuple):
    """Of a model, as far as its keys and values go; in bfloat16."""

    name: str
    layers: int
    full_every: int
    """Each so many layers one that sees all tokens."""
    window: int
    kv_heads: int
    head_dim: int


SHAPES = (
    Shape("Gemma 3 27B", 62, 6, 1024, 16, 128),
    Shape("Gemma 3 4B", 34, 6, 1024, 4, 256),
    Shape("Gemma 2 9B", 42, 2, 4096, 8, 256),
    Shape("gpt-oss-20b", 24, 2, 128, 8, 64),
)


def main() -> None:
    """Prints the table as it is in docs/models.md."""
    print(
        "| model | block tables | longest context | " + " | ".join(f"sequences of {each:,}" for each in CONTEXTS) + " |"
    )
    print("|---|---|---|" + "---|" * len(CONTEXTS))
    for shape in SHAPES:
        windows = [None if (i + 1) % shape.full_every == 0 else shape.window for i in range(shape.layers)]
        layer_bytes = 2 * 2 * BLOCK_SIZE * shape.kv_heads * shape.head_dim
        blocks = MEMORY // (layer_bytes * shape.layers)
        counts = [blocks // blocks_for(each, BLOCK_SIZE) for each in CONTEXTS]
        print(_row(shape.name, "one", blocks * BLOCK_SIZE, counts))
        groups = group_layers(windows, 1 << 30)
        assert groups is not None, "each has windows"
        blocks = MEMORY // (layer_bytes * groups.caches)
        counts = [(blocks - 1) // most_blocks(groups.groups, each, BLOCK_SIZE, STEP_TOKENS) for each in CONTEXTS]
        longest = longest_sequence(groups.groups, blocks, BLOCK_SIZE, STEP_TOKENS)
        print(_row("", f"{len(groups.groups)} groups of {groups.caches}", longest, counts))


def _row(name: str, tables: str, longest: int, counts: list[int]) -> str:
    return f"| {name} | {tables} | {longest:,} | " + " | ".join(map(str, counts)) + " |"


if __name__ == "__main__":
    main()
