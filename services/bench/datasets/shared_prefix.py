"""The `shared-prefix` dataset: questions behind long beginnings, some of which may be more popular than others."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from services.bench.api import Prompt
from services.bench.datasets.writers import Writer


class PrefixShape(NamedTuple):
    prefixes: int
    prefix_len: int
    suffix_len: int
    output_len: int
    popularity: float
    """Exponent of Zipf's law over the prefixes; 0: all alike."""


async def shared_prefix_prompts(writer: Writer, shape: PrefixShape, count: int, random: Random) -> list[Prompt]:
    """`count` prompts of `prefix_len` + `suffix_len` tokens, in random order."""
    length = shape.prefix_len + shape.suffix_len
    prefixes = [await writer.prefix(shape.prefix_len, random) for _ in range(shape.prefixes)]
    return [
        Prompt(await writer.prompt(length, random, prefixes[which]), length, shape.output_len)
        for which in chosen_prefixes(shape.prefixes, shape.popularity, count, random)
    ]


def chosen_prefixes(prefixes: int, popularity: float, count: int, random: Random) -> list[int]:
    """Which prefix each prompt has. With `popularity` 0 every one equally often, give or take one, as in vLLM's
    `prefix_repetition`; else the one of rank r (from 1) is drawn with a probability proportional to r^-popularity."""
    if popularity == 0:
        even = [i % prefixes for i in range(count)]
        random.shuffle(even)
        return even
    return random.choices(range(prefixes), [rank**-popularity for rank in range(1, prefixes + 1)], k=count)
