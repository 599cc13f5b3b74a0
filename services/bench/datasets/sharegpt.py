"""The `sharegpt` dataset: first questions of real conversations, with answers as long as the real ones."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec

from services.bench.api import ApiError, Prompt, PromptBody
from services.bench.datasets.writers import Count

MIN_TOKENS = 4
MAX_PROMPT, MAX_TOTAL = 1024, 2048
"""Shorter and longer ones are left out, as in vLLM's benchmark."""


def read_conversations(path: Path) -> list[tuple[str, str]]:
    """(question, answer) of each conversation that has both. Raises ApiError where the file is not of the format."""
    try:
        entries = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ApiError(f"{path}: {error}") from None
    if not isinstance(entries, list):
        raise ApiError(f"{path}: a JSON array of conversations is expected")
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
) -> list[Prompt]:
    """`number` prompts in random order; repeated where the file holds fewer. Raises ApiError where it holds none."""
    order = random.sample(conversations, len(conversations))
    prompts: list[Prompt] = []
    for question, answer in order:
        if len(prompts) == number:
            break
        length, answered = await count(question), await count(answer)
        if length < MIN_TOKENS or (output_len is None and answered < MIN_TOKENS):
            continue
        wanted = answered if output_len is None else output_len
        if length <= MAX_PROMPT and length + wanted <= MAX_TOTAL:
            body: PromptBody = (("user", question),) if chat else question
            prompts.append(Prompt(body, length, wanted))
    if not prompts:
        raise ApiError(
            f"no conversation has a question of {MIN_TOKENS} to {MAX_PROMPT} tokens and {MAX_TOTAL} in all at most"
        )
    return prompts + random.choices(prompts, k=number - len(prompts))
