"""The `random` dataset: prompts and answers of given lengths, or lengths drawn around them."""

from __future__ import annotations

from math import ceil, floor
from random import Random

from services.bench.api import Prompt
from services.bench.datasets.writers import Writer


def drawn_length(length: int, ratio: float, random: Random) -> int:
    """Uniform between `length` × (1 - `ratio`) and `length` × (1 + `ratio`), 1 at least, as in vLLM's benchmark."""
    return max(1, random.randint(floor(length * (1 - ratio)), ceil(length * (1 + ratio))))


async def random_prompts(
    writer: Writer, count: int, input_len: int, output_len: int, ratio: float, random: Random
) -> list[Prompt]:
    lengths = [(drawn_length(input_len, ratio, random), drawn_length(output_len, ratio, random)) for _ in range(count)]
    return [Prompt(await writer.prompt(tokens, random), tokens, output) for tokens, output in lengths]
