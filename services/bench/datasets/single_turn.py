"""The `random` dataset: prompts and answers of given lengths, or lengths drawn around them."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from services.bench.client.api import BenchRequest, PromptBody
from services.bench.datasets.lengths import LengthDistribution, drawn_length
from services.bench.datasets.writers import Count, PromptWriter
from services.bench.errors import BenchError
from shared.packing import NOT_DECODED


async def random_prompts(
    writer: PromptWriter,
    count: int,
    input_len: int,
    output_len: int | LengthDistribution,
    ratio: float,
    random: Random,
) -> list[BenchRequest]:
    """`count` prompts whose lengths, and output lengths that have no distribution, are drawn by `drawn_length`. Raises
    BenchError where none of a length can be made."""

    def output() -> int:
        if isinstance(output_len, LengthDistribution):
            return output_len.draw(random)
        return drawn_length(output_len, ratio, random)

    lengths = [(drawn_length(input_len, ratio, random), output()) for _ in range(count)]
    return [BenchRequest(await writer.prompt(tokens, random), tokens, output) for tokens, output in lengths]


# The `shared-prefix` dataset: questions behind long beginnings, some of which may be more popular than others.


class PrefixShape(NamedTuple):
    """How many shared prefixes there are, and how long prompts and answers are, in tokens."""

    prefixes: int
    prefix_len: int
    suffix_len: int
    output_len: int
    popularity: float
    """Exponent of Zipf's law over the prefixes; 0: all alike."""


async def shared_prefix_prompts(
    writer: PromptWriter, shape: PrefixShape, count: int, random: Random
) -> list[BenchRequest]:
    """`count` prompts of `prefix_len` + `suffix_len` tokens, in random order."""
    length = shape.prefix_len + shape.suffix_len
    prefixes = [await writer.prefix(shape.prefix_len, random) for _ in range(shape.prefixes)]
    return [
        BenchRequest(await writer.prompt(length, random, prefixes[which]), length, shape.output_len)
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


# The `sharegpt` dataset: first questions of real conversations, with answers as long as the real ones.


MIN_TOKENS = 4
MAX_PROMPT, MAX_TOTAL = 1024, 2048
"""Shorter and longer ones are left out, as in vLLM's benchmark."""


def read_conversations(path: Path) -> list[tuple[str, str]]:
    """(question, answer) of each conversation that has both. Raises BenchError where the file is not of the format."""
    try:
        entries = msgspec.json.decode(path.read_bytes())
    except (*NOT_DECODED, OSError) as error:
        raise BenchError(f"{path}: {error}") from None
    if not isinstance(entries, list):
        raise BenchError(f"{path}: a JSON array of conversations is expected")
    return [pair for entry in entries if (pair := _first_turns(entry)) is not None]


def _first_turns(entry: Any) -> tuple[str, str] | None:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    values = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
    question, answer = values
    return (question, answer) if isinstance(question, str) and isinstance(answer, str) else None


async def sharegpt_prompts(
    conversations: list[tuple[str, str]], count: Count, number: int, chat: bool, output_len: int | None, random: Random
) -> list[BenchRequest]:
    """`number` prompts in random order; repeated where the file holds fewer. Raises BenchError where it holds none."""
    order = random.sample(conversations, len(conversations))
    prompts: list[BenchRequest] = []
    for question, answer in order:
        if len(prompts) == number:
            break
        length, answered = await count(question), await count(answer)
        if length < MIN_TOKENS or (output_len is None and answered < MIN_TOKENS):
            continue
        wanted = answered if output_len is None else output_len
        if length <= MAX_PROMPT and length + wanted <= MAX_TOTAL:
            body: PromptBody = (("user", question),) if chat else question
            prompts.append(BenchRequest(body, length, wanted))
    if not prompts:
        raise BenchError(
            f"no conversation has a question of {MIN_TOKENS} to {MAX_PROMPT} tokens and {MAX_TOTAL} in all at most"
        )
    return prompts + random.choices(prompts, k=number - len(prompts))
