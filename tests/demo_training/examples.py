"""What the demo model learns from: chat exchanges and plain passages, and which of them are held out. Pure."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

Kind = Literal[
    "capitals",
    "arithmetic",
    "times tables",
    "spelling",
    "counting",
    "json",
    "stories",
    "talk",
    "languages",
    "copying",
    "system prompt",
    "memory",
    "multi-turn",
    "completion",
    "tools",
]

HELD_OUT_ONE_IN = 12
"""Share of keys kept for the evaluation: one in this many."""


@dataclass(frozen=True)
class Turn:
    """One question and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Exchange:
    """A conversation; the last turn is the one that is judged.

    `key` names what must not leak: the facts of the question where it has facts (the two numbers of a sum), its wording
    where it does not (a greeting). `system` is the prompt that the answer depends on, or None where any will do.
    """

    kind: Kind
    key: str
    turns: tuple[Turn, ...]
    system: str | None = None


@dataclass(frozen=True)
class Passage:
    """Plain text for the completions endpoint: `continuation` is what should follow `prompt`."""

    kind: Kind
    key: str
    prompt: str
    continuation: str


Example = Exchange | Passage
Draw = Callable[[Random], Example]
"""A generator of one kind of text: everything it chooses comes from the generator that it is given."""


def exchange(kind: Kind, key: str, question: str, answer: str, system: str | None = None) -> Exchange:
    """An exchange of one turn."""
    return Exchange(kind, f"{kind}|{key}", (Turn(question, answer),), system)


def is_held_out(example: Example) -> bool:
    """Whether the example belongs to the evaluation. A property of the key alone, so that no list need be kept."""
    return zlib.crc32(example.key.encode()) % HELD_OUT_ONE_IN == 0


def draw_for_training(draw: Draw, rng: Random) -> Example:
    """The next example that training may see."""
    while is_held_out(example := draw(rng)):
        pass
    return example


def draw_held_out(draw: Draw, rng: Random) -> Example:
    """The next example that training never sees."""
    while not is_held_out(example := draw(rng)):
        pass
    return example
