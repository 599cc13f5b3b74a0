"""Grammars of plans on their way through the worker: each is answered, with its epoch."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.worker.guided.outbox import NOT_HERE, CompileOutbox
from shared.ids import Incarnation
from shared.messages.generation import Grammar
from shared.messages.scheduler import GrammarCompiled
from tests.support.worker.guided_documents import RandomWriter

EPOCH = Incarnation(7)
GOOD, BAD = Grammar("regex", "[a-z]", after="</think>"), Grammar("regex", "(")


async def test_every_grammar_of_a_plan_is_answered(tmp_path: Path) -> None:
    outbox = CompileOutbox()
    outbox.request(RandomWriter(tmp_path).library, EPOCH, (GOOD, BAD))
    async with asyncio.timeout(60):
        answers = [await outbox.next_result(), await outbox.next_result()]
    assert {answer.grammar: answer.error for answer in answers} == {
        GOOD: None,
        BAD: "Regex parsing error at position 2: The parenthesis is not closed.",
    }
    assert {answer.epoch for answer in answers} == {EPOCH}


async def test_an_engine_that_follows_no_grammars_says_so() -> None:
    outbox = CompileOutbox()
    outbox.request(None, EPOCH, (GOOD,))
    assert await outbox.next_result() == GrammarCompiled(epoch=EPOCH, grammar=GOOD, error=NOT_HERE)
