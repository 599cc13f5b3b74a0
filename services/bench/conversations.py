"""Holds conversations with a server: each question behind the real answers to those before it, in order."""

from __future__ import annotations

import asyncio

from services.bench.core.outcome import Outcome
from services.bench.datasets.multi_turn import Script
from services.bench.load import Send, Session


def conversation(script: Script, chat: bool) -> Session:
    """The session of one user. A turn that fails ends it: there is no answer to go on from."""

    async def hold(send: Send) -> list[Outcome]:
        answers: list[str] = []
        outcomes: list[Outcome] = []
        for number, turn in enumerate(script.turns):
            await asyncio.sleep(turn.pause)
            outcome = (await send(script.prompt(answers, chat)))._replace(turn=number)
            outcomes.append(outcome._replace(text=""))
            if outcome.error is not None:
                break
            answers.append(outcome.text)
        return outcomes

    return hold
