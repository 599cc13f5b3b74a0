"""Which engine was given which prompt a moment ago: it will hold its blocks, and says so only once it has.

Choices of one request (`n` > 1) arrive within a millisecond, as do users of one prompt. Placed apart they are computed
several times; the engine that got the first computes it for all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from shared.blocks import BLOCK_SIZE, HASH_BYTES
from shared.ids import EngineId, InstanceId, ModelName
from shared.messages.generation import Generation
from shared.tokens import TOKEN_BYTES

REMEMBERED = 4096
"""Prompts; those placed longest ago are forgotten first."""
SECONDS = 2.0
"""After which the engine has said what it holds, or does not hold it."""


class ExpectedPrompt(NamedTuple):
    """Leading blocks of a request that `engine` holds soon, without computing them for it."""

    engine: InstanceId
    blocks: int


class Prompt(NamedTuple):
    """What can be reused of a request."""

    model: ModelName
    last_block: bytes
    """The hash of the last one that can be reused: it names all before it, too."""
    blocks: int


class _Placed(NamedTuple):
    engine: EngineId
    until: float


class ExpectedPrompts:
    """Owns what was placed in the last seconds, by prompt."""

    def __init__(self) -> None:
        self._placed: OrderedDict[Prompt, _Placed] = OrderedDict()

    def place(self, prompt: Prompt, engine: EngineId, now: float) -> None:
        if prompt.blocks:
            self._placed.pop(prompt, None)
            self._placed[prompt] = _Placed(engine, now + SECONDS)
            if len(self._placed) > REMEMBERED:
                self._placed.popitem(last=False)

    def of(self, prompt: Prompt, now: float) -> ExpectedPrompt | None:
        placed = self._placed.get(prompt) if prompt.blocks else None
        if placed is None or now >= placed.until:
            return None
        return ExpectedPrompt(InstanceId(placed.engine), prompt.blocks)


def prompt_of(generation: Generation) -> Prompt:
    """Of full blocks, but none that ends with the last token: that one is always computed."""
    blocks = (len(generation.tokens) // TOKEN_BYTES - 1) // BLOCK_SIZE
    end = blocks * HASH_BYTES
    return Prompt(generation.model, generation.block_hashes[end - HASH_BYTES : end] if blocks else b"", blocks)
