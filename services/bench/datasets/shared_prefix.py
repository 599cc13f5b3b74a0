"""The `shared-prefix` dataset: groups of questions that begin alike, as behind one long system prompt."""

from __future__ import annotations

from random import Random

from services.bench.api import Prompt
from services.bench.datasets.writers import Writer


async def shared_prefix_prompts(
    writer: Writer, groups: int, questions: int, prefix_len: int, question_len: int, output_len: int, random: Random
) -> list[Prompt]:
    """`groups` × `questions` prompts of `prefix_len` + `question_len` tokens, shuffled."""
    length = prefix_len + question_len
    prompts = []
    for _ in range(groups):
        prefix = await writer.prefix(prefix_len, random)
        prompts += [Prompt(await writer.prompt(length, random, prefix), length, output_len) for _ in range(questions)]
    random.shuffle(prompts)
    return prompts
