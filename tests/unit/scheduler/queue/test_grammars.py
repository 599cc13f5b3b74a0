"""Requests with a grammar wait beside the line until the workers have compiled it; nobody else waits."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from services.scheduler.core.events import Output, TimePassed, WorkersLost, WorkersReady
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.queue.grammars import MAX_COMPILING
from shared.ids import Attempt, Incarnation, RequestId
from shared.messages.gateway import RequestFailed, RequestRejected
from shared.messages.generation import Grammar
from shared.messages.scheduler import (
    Cancel,
    GenerateRequest,
    GrammarCompiled,
    GrammarFault,
    SequenceFailed,
    StopMatched,
)
from shared.messages.worker import GrammarRef
from tests.support.engines.checking_worker import card, generate, right_output
from tests.support.engines.single_engine import EPOCH, PROMPT, Ring, told

DIGITS = Grammar("regex", "[0-9]+")
SCHEMA = Grammar("json", '{"type": "string"}', after="</think>")


def guided(name: str, grammar: Grammar = DIGITS) -> GenerateRequest:
    return generate(name, PROMPT, grammar=grammar, ignore_eos=True, max_tokens=5)


def compiled(grammar: Grammar, error: str | None = None, epoch: Incarnation = EPOCH) -> GrammarCompiled:
    return GrammarCompiled(epoch=epoch, grammar=grammar.key, error=error)


def asked(ring: Ring) -> list[Grammar]:
    return [grammar for plan in ring.plans for grammar in plan.compile]


def rejected(outputs: list[Output]) -> list[tuple[str, str, str]]:
    words = told(outputs)
    assert all(isinstance(word, RequestRejected) for word in words)
    return [(word.request, word.kind, word.message) for word in words if isinstance(word, RequestRejected)]


def test_a_plan_that_holds_nothing_else_asks_for_the_grammar_and_the_request_waits() -> None:
    ring = Ring()
    ring.send(guided("a"))
    (plan,) = ring.plans
    assert (plan.compile, plan.work, plan.new) == ((DIGITS,), (), ())
    assert ring.engine.requests[RequestId("a")].phase == "compiling"
    assert ring.engine.probe(RequestId("a"), Attempt(1)).state == "waiting"
    ring.step()
    assert not ring.plans
    ring.send(ring.worker.compile())
    assert ring.plans[0].new[0].grammar == GrammarRef(DIGITS.key)
    ring.finish()
    assert ring.output_of("a") == right_output(guided("a"), ring.context)[0]


def test_others_go_on_meanwhile() -> None:
    ring = Ring()
    ring.send(guided("a"))
    ring.send(generate("b", PROMPT, max_tokens=5, ignore_eos=True))
    ring.finish()
    assert (len(ring.output_of("a")), len(ring.output_of("b"))) == (0, 5)
    ring.send(ring.worker.compile())
    ring.finish()
    assert len(ring.output_of("a")) == 5


def test_a_grammar_is_sent_once_for_all_that_need_it_and_not_again() -> None:
    ring = Ring()
    for name in "abc":
        ring.send(guided(name))
    ring.send(guided("d", SCHEMA))
    assert asked(ring) == [DIGITS, SCHEMA]
    ring.finish()
    ring.send(ring.worker.compile())
    ring.send(ring.worker.compile())
    ring.finish()
    assert all(len(ring.output_of(name)) == 5 for name in "abcd")
    ring.send(guided("e"))
    assert [new.grammar for plan in ring.plans for new in plan.new] == [GrammarRef(DIGITS.key)]
    assert asked(ring) == []
    ring.finish()


def test_what_cannot_be_compiled_is_refused_with_the_reason_now_and_later() -> None:
    ring = Ring()
    ring.send(guided("a", SCHEMA))
    ring.send(guided("b", SCHEMA))
    reason = "line 1, column 10: 'sting' is no type"
    words = ring.send(compiled(SCHEMA, reason))
    assert rejected(words) == [(name, "invalid_request", reason) for name in "ab"]
    assert rejected(ring.send(guided("c", SCHEMA))) == [("c", "invalid_request", reason)]
    ring.finish()
    assert ring.engine.idle


@pytest.mark.parametrize("message", [Cancel, StopMatched])
def test_a_request_can_be_called_off_while_its_grammar_is_compiled(message: type[Cancel] | type[StopMatched]) -> None:
    ring = Ring()
    ring.send(guided("a"))
    assert told(ring.send(message(RequestId("a"), Attempt(1)))) == []
    assert ring.engine.idle
    ring.finish()
    ring.send(ring.worker.compile())
    ring.send(guided("b"))
    assert asked(ring) == [], "it was compiled all the same"


def test_a_request_that_is_called_off_before_its_grammar_is_sent_leaves_nothing_to_compile() -> None:
    ring = Ring(EngineLimits(run_ahead=0))
    ring.send(generate("b", PROMPT, max_tokens=3))
    ring.send(guided("a"))
    ring.send(Cancel(RequestId("a"), Attempt(1)))
    ring.step()
    assert asked(ring) == []


def test_an_answer_that_never_comes_is_asked_for_again_and_then_given_up() -> None:
    ring = Ring(EngineLimits(compile_timeout=30.0))
    ring.send(guided("a"))
    ring.finish()
    ring.now = 16.0
    ring.send(TimePassed())
    assert asked(ring) == [DIGITS]
    ring.finish()
    ring.now = 29.0
    assert asked(ring) == []
    ring.now = 31.0
    (refusal,) = rejected(ring.send(TimePassed()))
    assert refusal[:2] == ("a", "overloaded"), "what it waited for were others"
    assert "within 30 s" in refusal[2]


def test_an_answer_to_the_second_question_is_as_good_as_one_to_the_first() -> None:
    ring = Ring(EngineLimits(compile_timeout=30.0))
    ring.send(guided("a"))
    ring.finish()
    ring.now = 16.0
    ring.send(TimePassed())
    ring.finish()
    ring.send(ring.worker.compile())
    ring.send(compiled(DIGITS))
    ring.finish()
    assert len(ring.output_of("a")) == 5


def test_a_grammar_that_comes_too_late_is_known_from_then_on() -> None:
    ring = Ring(EngineLimits(compile_timeout=30.0))
    ring.send(guided("a"))
    ring.finish()
    ring.now = 31.0
    ring.send(TimePassed())
    ring.finish()
    ring.send(ring.worker.compile())
    ring.send(guided("b"))
    ring.finish()
    assert len(ring.output_of("b")) == 5


def test_a_new_epoch_asks_anew() -> None:
    ring = Ring()
    ring.send(guided("a"))
    ring.finish()
    ring.send(ring.worker.compile())
    words = told(ring.send(WorkersLost("killed")))
    assert [type(word) for word in words] == [RequestFailed]
    ring.plans.clear()
    ring.send(WorkersReady(card(), 32))
    ring.send(generate("a", PROMPT, grammar=DIGITS, attempt=2, max_tokens=5, ignore_eos=True))
    assert asked(ring) == [DIGITS]
    ring.send(compiled(DIGITS))
    assert ring.engine.requests[RequestId("a")].phase == "compiling", "the answer was for the epoch before"
    ring.finish()
    ring.send(ring.worker.compile())
    ring.finish()
    assert len(ring.output_of("a")) == 5


def test_those_compiling_count_as_waiting() -> None:
    ring = Ring(EngineLimits(max_waiting=2))
    ring.send(guided("a"))
    ring.send(guided("b", SCHEMA))
    report = ring.engine.report()
    assert report is not None
    assert (report.waiting, report.running) == (2, 0)
    assert [kind for _, kind, _ in rejected(ring.send(guided("c")))] == ["overloaded"]


def test_only_so_many_grammars_are_compiled_at_a_time() -> None:
    ring = Ring()
    for number in range(MAX_COMPILING + 3):
        ring.send(guided(f"r{number}", Grammar("regex", f"a{{{number}}}")))
    ring.finish()
    assert len(ring.worker.compiling) == MAX_COMPILING
    ring.send(ring.worker.compile())
    ring.finish()
    assert len(ring.worker.compiling) == MAX_COMPILING
    while ring.worker.compiling:
        ring.send(ring.worker.compile())
        ring.finish()
    assert ring.engine.idle


def test_a_plan_holds_no_more_text_than_fits_the_bus() -> None:
    ring = Ring(EngineLimits(max_new_bytes=1000, run_ahead=0))
    ring.send(generate("b", PROMPT, max_tokens=8, ignore_eos=True))
    for number in range(3):
        ring.send(guided(f"r{number}", Grammar("regex", f"{number}" * 600)))
    sizes = []
    while ring.plans:
        sizes.append(len(ring.plans[0].compile))
        ring.step()
    assert sum(sizes) == 3
    assert max(sizes) == 1


def pattern(number: int) -> Grammar:
    return Grammar("regex", f"a{{{number}}}")


def test_the_workers_hold_so_many_grammars_and_forget_the_one_used_longest_ago() -> None:
    ring = Ring(EngineLimits(max_grammars=2))

    def run(name: str, grammar: Grammar) -> None:
        ring.send(guided(name, grammar))
        while ring.worker.compiling or ring.plans:
            ring.finish()
            if ring.worker.compiling:
                ring.send(ring.worker.compile())

    for number, grammar in enumerate((pattern(0), pattern(1), pattern(0))):
        run(f"r{number}", grammar)
    ring.send(guided("new", pattern(2)))
    assert [plan.forget for plan in ring.plans if plan.compile] == [(pattern(1).key,)]
    ring.finish()
    ring.send(ring.worker.compile())
    ring.finish()
    assert len(ring.output_of("new")) == 5
    ring.send(guided("again", pattern(1)))
    assert asked(ring) == [pattern(1)]


def test_where_all_grammars_are_in_use_the_next_one_waits() -> None:
    ring = Ring(EngineLimits(max_grammars=1, run_ahead=0))
    ring.send(guided("a", pattern(0)))
    ring.finish()
    ring.send(ring.worker.compile())
    ring.send(guided("b", pattern(1)))
    assert asked(ring) == []
    ring.finish()
    assert len(ring.output_of("a")) == 5
    assert ring.worker.compiling == [pattern(1)], "a's has made room"
    ring.send(ring.worker.compile())
    ring.finish()
    assert len(ring.output_of("b")) == 5


def test_many_sequences_with_one_long_grammar_make_small_plans() -> None:
    ring = Ring(EngineLimits(max_running=128))
    long = Grammar("regex", "a" * 120_000)
    for number in range(128):
        ring.send(guided(f"r{number}", long))
    sizes = []
    while ring.plans or ring.worker.compiling:
        if ring.plans:
            sizes.append(len(msgspec.msgpack.encode(ring.plans[0])))
            ring.step()
        else:
            ring.send(ring.worker.compile())
    assert sum(sizes) < 3 * 120_000
    assert len(ring.output_of("r127")) == 5


@pytest.mark.parametrize(
    ("fault", "answer"),
    [("refused", "invalid_request"), ("busy", "overloaded"), ("lost", "failed"), ("died", "failed")],
)
def test_a_sequence_whose_grammar_fails_in_a_step_ends_and_what_was_drawn_for_it_is_dropped(
    fault: GrammarFault, answer: str
) -> None:
    ring = Ring(EngineLimits(run_ahead=0))
    ring.send(guided("a"))
    ring.finish()
    ring.send(generate("b", PROMPT, max_tokens=5, ignore_eos=True))
    ring.send(ring.worker.compile())
    ring.step()
    (plan,) = ring.plans
    sequence = ring.engine.requests[RequestId("a")].id
    had = ring.output_of("a")
    result = ring.worker.step(ring.plans.pop(0))
    assert sequence in [work.sequence for work in plan.work]
    words = told(ring.send(replace(result, failed=(SequenceFailed(sequence, "it takes too long", fault),))))
    (word,) = words
    assert isinstance(word, RequestRejected | RequestFailed)
    assert (word.kind if isinstance(word, RequestRejected) else "failed") == answer
    assert ring.output_of("a") == had
    ring.finish()
    assert len(ring.output_of("b")) == 5
    again = told(ring.send(guided("c")))
    assert [type(word) for word in again] == ([RequestRejected] if fault == "refused" else [])
    assert asked(ring) == ([DIGITS] if fault in ("lost", "died") else []), "its process is gone"
    assert isinstance(word, RequestRejected) or word.grammar_died == (fault == "died")


def test_what_was_waited_is_counted() -> None:
    ring = Ring()
    ring.send(guided("a"))
    ring.send(guided("b", SCHEMA))
    ring.finish()
    ring.now = 2.0
    ring.send(ring.worker.compile())
    ring.send(ring.worker.compile("no"))
    tally = ring.engine.counters
    assert (tally.grammar_waits, tally.grammars_refused, tally.grammar_seconds) == (1, 1, 4.0)
