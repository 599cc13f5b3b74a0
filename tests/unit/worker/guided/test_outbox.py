"""Grammars of plans on their way through the worker: each is answered, with its epoch."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.worker.guided.outbox import NOT_HERE, CompileOutbox
from shared.ids import Incarnation
from shared.messages.generation import Grammar
from shared.messages.scheduler import GrammarCompiled
from shared.messages.worker import StepPlan
from tests.support.worker.compiled_grammars import grammar_library
from tests.support.worker.guided_documents import RandomWriter

EPOCH = Incarnation(7)
GOOD, BAD = Grammar("regex", "[a-z]", after="</think>"), Grammar("regex", "(")


async def test_every_grammar_of_a_plan_is_answered_and_forgotten_when_a_later_one_says_so(tmp_path: Path) -> None:
    outbox, writer = CompileOutbox(), RandomWriter(tmp_path)
    with grammar_library(tmp_path, writer.vocab_size, (writer.eos,)) as library:
        outbox.request(library, StepPlan(epoch=EPOCH, step=0, compile=(GOOD, BAD)))
        async with asyncio.timeout(120):
            answers = [await outbox.next_result(), await outbox.next_result()]
        errors = {answer.grammar: answer.error for answer in answers}
        assert errors.keys() == {GOOD.key, BAD.key}
        assert errors[GOOD.key] is None
        assert "(llguidance: " in (errors[BAD.key] or ""), "what each of the two libraries says"
        assert {answer.epoch for answer in answers} == {EPOCH}
        assert library.process(GOOD.key) is not None
        assert library.process(BAD.key) is None
        outbox.request(library, StepPlan(epoch=EPOCH, step=1, forget=(GOOD.key,), compile=(BAD,)))
        async with asyncio.timeout(120):
            await outbox.next_result()
        assert library.process(GOOD.key) is None


async def test_an_engine_that_follows_no_grammars_says_so() -> None:
    outbox = CompileOutbox()
    outbox.request(None, StepPlan(epoch=EPOCH, step=0, compile=(GOOD,)))
    assert await outbox.next_result() == GrammarCompiled(epoch=EPOCH, grammar=GOOD.key, error=NOT_HERE)
