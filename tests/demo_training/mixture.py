"""How much of each kind the model reads, and the order in which it reads it. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from tests.demo_training.examples import Draw, Example, Exchange, Kind, draw_for_training
from tests.demo_training.texts import (
    arithmetic,
    capitals,
    conversation,
    languages,
    letters,
    passages,
    records,
    stories,
    talk,
    tools,
)

DRAWS: dict[Kind, Draw] = {
    "capitals": capitals.draw,
    "arithmetic": arithmetic.draw,
    "times tables": arithmetic.draw_table,
    "spelling": letters.draw_spelling,
    "counting": letters.draw_counting,
    "json": records.draw,
    "stories": stories.draw,
    "talk": talk.draw,
    "languages": languages.draw,
    "copying": conversation.copy,
    "system prompt": conversation.draw_system,
    "memory": conversation.draw_memory,
    "multi-turn": conversation.draw_several,
    "completion": passages.draw,
    "tools": tools.draw,
}
"""The generator of every kind that is evaluated."""

SHARES: tuple[tuple[Draw, float], ...] = (
    (capitals.draw, 16),
    (arithmetic.draw, 22),
    (arithmetic.draw_table, 5),
    (letters.draw_spelling, 14),
    (letters.draw_counting, 8),
    (records.draw, 8),
    (stories.draw, 3),
    (talk.draw, 6),
    (languages.draw, 4),
    (conversation.copy, 7),
    (conversation.draw_system, 7),
    (conversation.draw_memory, 5),
    (conversation.draw_several, 6),
    (passages.draw, 7),
    (passages.draw_story, 1),
)
"""Shares of the documents, not of the tokens: a story is ten times as long as a sum."""

TUNING_SHARES = (*SHARES, (conversation.bare_sum, 22), (tools.draw, 14))
"""What the second part of the training adds: both need what the first has taught, arithmetic and copying."""


def training_examples(seed: int, shares: Sequence[tuple[Draw, float]] = SHARES) -> Iterator[Example]:
    """The endless training text of one seed; held-out examples never occur in it."""
    rng = Random(seed)
    draws, weights = zip(*shares, strict=True)
    while True:
        yield dressed(draw_for_training(rng.choices(draws, weights)[0], rng), rng)


def dressed(example: Example, rng: Random) -> Example:
    """The example with a system prompt that changes nothing, for some of those that ask for none."""
    if isinstance(example, Exchange) and example.system is None:
        return replace(example, system=conversation.neutral_system(rng))
    return example
