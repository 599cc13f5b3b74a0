"""The `multi-turn` dataset: what users say in conversations. What is answered only the server knows."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from services.bench.api import Prompt, PromptBody
from services.bench.datasets.random_lengths import drawn_length
from services.bench.datasets.writers import TextWriter


class TurnsShape(NamedTuple):
    turns: int
    system_len: int
    """Tokens of the system prompt that all conversations share; 0: none."""
    user_len: int
    output_len: int
    ratio: float
    """How far lengths vary, as in `random_lengths`."""
    pause: float
    """Mean seconds between an answer and the next question."""


class Turn(NamedTuple):
    user: str
    output_tokens: int
    pause: float
    """Seconds after the answer before."""


class Script(NamedTuple):
    """One side of a conversation."""

    system: str | None
    turns: tuple[Turn, ...]

    def prompt(self, answers: Sequence[str], chat: bool) -> Prompt:
        """The next question, behind everything that was said so far; as many turns have been as there are answers."""
        turn = self.turns[len(answers)]
        return Prompt(self._chat(answers) if chat else self._text(answers), None, turn.output_tokens)

    def _chat(self, answers: Sequence[str]) -> PromptBody:
        said = [("system", self.system)] if self.system else []
        for turn, answer in zip(self.turns, answers, strict=False):
            said += [("user", turn.user), ("assistant", answer)]
        return (*said, ("user", self.turns[len(answers)].user))

    def _text(self, answers: Sequence[str]) -> PromptBody:
        """Each prompt is the one before, the answer to it as it came, and more."""
        text = f"{self.system}\n" if self.system else ""
        for turn, answer in zip(self.turns, answers, strict=False):
            text += f"{turn.user}\n{answer}\n"
        return f"{text}{self.turns[len(answers)].user}\n"


async def scripts(writer: TextWriter, shape: TurnsShape, count: int, random: Random) -> list[Script]:
    """`count` conversations. Lengths are those of the words: what templates add comes on top."""
    system = await writer.prefix(shape.system_len, random) if shape.system_len else None
    return [
        Script(system, tuple([await _turn(writer, shape, first=i == 0, random=random) for i in range(shape.turns)]))
        for _ in range(count)
    ]


async def _turn(writer: TextWriter, shape: TurnsShape, *, first: bool, random: Random) -> Turn:
    user = await writer.prefix(drawn_length(shape.user_len, shape.ratio, random), random)
    output = drawn_length(shape.output_len, shape.ratio, random)
    return Turn(user, output, 0.0 if first or not shape.pause else random.expovariate(1 / shape.pause))
