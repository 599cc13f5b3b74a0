"""The `multi-turn` dataset: the users' messages of conversations. The answers come from the server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from services.bench.client.api import BenchRequest, PromptBody
from services.bench.client.load import Send, Session
from services.bench.datasets.lengths import drawn_length
from services.bench.datasets.writers import TextWriter
from services.bench.statistics import RequestOutcome


class TurnsShape(NamedTuple):
    """How long the conversations of a run are, in turns and tokens."""

    turns: int
    system_len: int
    """Tokens of the system prompt that all conversations share; 0: none."""
    user_len: int
    output_len: int
    ratio: float
    """How far lengths vary, see `drawn_length`."""
    pause: float
    """Mean seconds between an answer and the next question."""


class ConversationTurn(NamedTuple):
    """One question: its text, how long the answer may be, and the pause before it."""

    user: str
    output_tokens: int
    pause: float
    """Seconds after the answer before."""


class ConversationScript(NamedTuple):
    """One side of a conversation."""

    system: str | None
    turns: tuple[ConversationTurn, ...]

    def prompt(self, answers: Sequence[str], chat: bool) -> BenchRequest:
        """The next question, behind everything that was said so far; as many turns have been as there are answers."""
        turn = self.turns[len(answers)]
        return BenchRequest(self._chat(answers) if chat else self._text(answers), None, turn.output_tokens)

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


async def scripts(writer: TextWriter, shape: TurnsShape, count: int, random: Random) -> list[ConversationScript]:
    """`count` conversations. Lengths are those of the words: what templates add comes on top."""
    system = await writer.prefix(shape.system_len, random) if shape.system_len else None
    return [
        ConversationScript(
            system, tuple([await _turn(writer, shape, first=i == 0, random=random) for i in range(shape.turns)])
        )
        for _ in range(count)
    ]


async def _turn(writer: TextWriter, shape: TurnsShape, *, first: bool, random: Random) -> ConversationTurn:
    user = await writer.prefix(drawn_length(shape.user_len, shape.ratio, random), random)
    output = drawn_length(shape.output_len, shape.ratio, random)
    return ConversationTurn(user, output, 0.0 if first or not shape.pause else random.expovariate(1 / shape.pause))


# Holds conversations with a server: each question behind the real answers to those before it, in order.


def conversation(script: ConversationScript, chat: bool) -> Session:
    """The session of one user. A turn that fails ends it: there is no answer to continue from."""

    async def hold(send: Send) -> list[RequestOutcome]:
        answers: list[str] = []
        outcomes: list[RequestOutcome] = []
        for number, turn in enumerate(script.turns):
            await asyncio.sleep(turn.pause)
            outcome = (await send(script.prompt(answers, chat)))._replace(turn=number)
            outcomes.append(outcome._replace(text=""))
            if outcome.error is not None:
                break
            answers.append(outcome.text)
        return outcomes

    return hold
