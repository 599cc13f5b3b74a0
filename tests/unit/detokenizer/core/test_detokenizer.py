"""What a detokenizer answers to token batches: deltas, stops, failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from services.detokenizer.core.actions import Action, EngineLost, GatewayLost, ToEngine, ToGateway
from services.detokenizer.core.detokenizer import MAX_STOP_CHARS, Detokenizer
from services.detokenizer.core.vocabularies import text_vocabulary
from shared.ids import Attempt, DetokenizerId, EngineId, GatewayId, Incarnation, ModelName, RequestId
from shared.messages.detokenizer import AbandonStream, NewTokens, OpenStream, StreamMoved, TokenBatch
from shared.messages.gateway import (
    Delta,
    Deltas,
    LogprobText,
    PositionLogprobs,
    RequestFailed,
    RequestRejected,
    StreamOpened,
)
from shared.messages.generation import TokenLogprobs
from shared.messages.scheduler import Cancel, StopMatched, TokenBatchLost
from shared.models.byte_alphabet import ALPHABET
from shared.models.tokenizer_files import special_ids
from shared.packing import pack
from shared.reliability.sequence_numbers import SourceNumbers
from tests.support.models import tiny_tokenizers

R, S = RequestId("r"), RequestId("s")
ONE, TWO = Attempt(1), Attempt(2)
ENGINE, OTHER = EngineId("engine-1"), EngineId("engine-2")
GATEWAY = GatewayId("gateway-1")
HERE = DetokenizerId("detokenizer-1")
EPOCH = Incarnation(77)

TOKENIZER = tiny_tokenizers.byte_level()
VOCABULARY = text_vocabulary(TOKENIZER, special_ids(TOKENIZER))
EOS = TOKENIZER.token_to_id("</s>")


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)


def letters(text: str) -> tuple[int, ...]:
    """One token for each byte, so that a test may cut where it likes."""
    spelled = {byte: chr(letter) for letter, byte in ALPHABET.items()}
    return tuple(TOKENIZER.token_to_id(spelled[byte]) for byte in text.encode())


def opened(request: RequestId = R, attempt: Attempt = ONE, **more: Any) -> OpenStream:
    context = more.pop("context", ids("Hello"))
    return OpenStream(
        request=request,
        attempt=attempt,
        gateway=more.pop("gateway", GATEWAY),
        model=more.pop("model", ModelName("demo")),
        context=pack(context),
        resumed=more.pop("resumed", 0),
        sent_chars=more.pop("sent_chars", 0),
        prompt_tokens=more.pop("prompt_tokens", 40),
        cached_tokens=16,
        **more,
    )


@dataclass
class Bench:
    """A core, and the numbers of the batches that it is given."""

    core: Detokenizer = field(
        default_factory=lambda: Detokenizer(HERE, EPOCH, ModelName("demo"), VOCABULARY, max_streams=3)
    )
    numbers: dict[tuple[EngineId, Incarnation], int] = field(default_factory=dict)

    def batch(self, engine: EngineId = ENGINE, epoch: int = 1, skip: int = 0, **parts: Any) -> list[Action]:
        key = engine, Incarnation(epoch)
        number = self.numbers.get(key, 0) + skip
        self.numbers[key] = number + 1
        return self.core.handle(TokenBatch(engine=engine, epoch=key[1], number=number, **parts))

    def text(self, *entries: NewTokens) -> list[tuple[str, str | None, int | str | None]]:
        """Text, finish and reason of the deltas for some entries, each in its own batch."""
        seen = []
        for entry in entries:
            for action in self.batch(entries=(entry,)):
                if isinstance(action.message, Deltas):
                    seen += [(d.text, d.finish, d.stop_reason) for d in action.message.deltas]
        return seen


def deltas(number: int, *deltas: Delta, opened: tuple[StreamOpened, ...] = ()) -> ToGateway:
    message = Deltas(detokenizer=HERE, epoch=EPOCH, number=number, opened=opened, deltas=deltas)
    return ToGateway(GATEWAY, message)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_tokens_become_text_from_the_opening_to_the_end(bench: Bench) -> None:
    world, smile = ids(" world"), letters("😀")
    assert bench.batch(opened=(opened(),), entries=(NewTokens(R, ONE, 0, world),)) == [
        deltas(0, Delta(R, ONE, 0, world, " world"), opened=(StreamOpened(R, ONE, 40, 16, engine=ENGINE),))
    ]
    at = len(world)
    assert bench.batch(entries=(NewTokens(R, ONE, at, (*smile, EOS), "stop"),)) == [
        deltas(1, Delta(R, ONE, at, (*smile, EOS), "😀", "stop"))
    ]
    assert bench.core.streams == {}


def test_each_gateway_gets_one_message_for_a_batch_numbered_for_itself(bench: Bench) -> None:
    second = GatewayId("gateway-2")
    bench.batch(opened=(opened(R), opened(S)))
    actions = bench.batch(
        opened=(opened(RequestId("t"), gateway=second),),
        entries=(NewTokens(R, ONE, 0, ids("a")), NewTokens(S, ONE, 0, ids("b"))),
    )
    to_second = Deltas(
        detokenizer=HERE,
        epoch=EPOCH,
        number=0,
        opened=(StreamOpened(RequestId("t"), ONE, 40, 16, engine=ENGINE),),
        deltas=(),
    )
    assert actions == [
        ToGateway(second, to_second),
        deltas(1, Delta(R, ONE, 0, ids("a"), "a"), Delta(S, ONE, 0, ids("b"), "b")),
    ]


@pytest.mark.parametrize(
    ("include", "skip", "text"),
    [(False, True, "a"), (False, False, "a"), (True, True, "a"), (True, False, "a</s>")],
)
def test_a_stop_token_is_counted_and_is_text_only_where_it_is_wanted_and_shown(
    bench: Bench, include: bool, skip: bool, text: str
) -> None:
    bench.batch(opened=(opened(include_stop=include, skip_special_tokens=skip),))
    entry = NewTokens(R, ONE, 0, (*ids("a"), EOS), "stop", EOS)
    assert bench.batch(entries=(entry,)) == [deltas(1, Delta(R, ONE, 0, entry.tokens, text, "stop", EOS))]


def test_at_the_length_limit_what_was_held_back_is_delivered(bench: Bench) -> None:
    bench.batch(opened=(opened(stop=("END",)),))
    part = letters("😀")[:2]
    assert bench.text(
        NewTokens(R, ONE, 0, letters("xEN")),
        NewTokens(R, ONE, 3, part),
        NewTokens(R, ONE, 3 + len(part), (), "length"),
    ) == [("x", None, None), ("", None, None), ("EN\ufffd", "length", None)]


def test_a_stop_string_over_several_tokens_ends_the_text_before_it(bench: Bench) -> None:
    bench.batch(opened=(opened(stop=("END", "zzz")),))
    assert bench.text(NewTokens(R, ONE, 0, letters("a EN"))) == [("a ", None, None)]
    more = letters("Dxy")
    assert bench.batch(entries=(NewTokens(R, ONE, 4, more),)) == [
        deltas(2, Delta(R, ONE, 4, more[:1], "", "stop", "END")),
        ToEngine(ENGINE, StopMatched(R, ONE)),
    ]
    assert bench.batch(entries=(NewTokens(R, ONE, 7, ids("late")),)) == []
    assert bench.core.counters.unknown == 1


def test_a_stop_string_is_part_of_the_text_where_it_is_wanted(bench: Bench) -> None:
    bench.batch(opened=(opened(stop=("END",), include_stop=True),))
    assert bench.text(NewTokens(R, ONE, 0, letters("aEN")), NewTokens(R, ONE, 3, letters("Dx"))) == [
        ("aEN", None, None),
        ("D", "stop", "END"),
    ]


def test_what_looked_like_a_stop_string_and_is_none_is_delivered(bench: Bench) -> None:
    bench.batch(opened=(opened(stop=("END",)),))
    assert bench.text(NewTokens(R, ONE, 0, letters("EN")), NewTokens(R, ONE, 2, letters("E"))) == [
        ("", None, None),
        ("EN", None, None),
    ]


def test_a_stop_string_in_the_entry_that_the_engine_ended_wins_and_needs_no_word_to_the_engine(bench: Bench) -> None:
    bench.batch(opened=(opened(stop=("END",)),))
    entry = NewTokens(R, ONE, 0, (*letters("aEND"), EOS), "stop")
    assert bench.batch(entries=(entry,)) == [deltas(1, Delta(R, ONE, 0, entry.tokens[:4], "a", "stop", "END"))]


def test_stop_strings_within_the_least_number_of_tokens_are_text(bench: Bench) -> None:
    bench.batch(opened=(opened(stop=("b",), min_tokens=2),))
    assert bench.text(
        NewTokens(R, ONE, 0, letters("b")), NewTokens(R, ONE, 1, letters("b")), NewTokens(R, ONE, 2, letters("b"))
    ) == [("b", None, None), ("b", None, None), ("", "stop", "b")]


def test_log_probabilities_carry_each_tokens_text_and_exact_bytes(bench: Bench) -> None:
    half, a = letters("😀")[0], ids("a")[0]
    bench.batch(opened=(opened(),))
    logprobs = (TokenLogprobs(a, -0.5, ((a, -0.5), (half, -1.0))),)
    spelled = PositionLogprobs(
        LogprobText("a", b"a", -0.5, a),
        (LogprobText("a", b"a", -0.5, a), LogprobText("\ufffd", b"\xf0", -1.0, half)),
    )
    assert bench.batch(entries=(NewTokens(R, ONE, 0, (a,), None, None, logprobs),)) == [
        deltas(1, Delta(R, ONE, 0, (a,), "a", None, None, (spelled,)))
    ]


def test_log_probabilities_behind_a_stop_string_are_cut_with_the_tokens(bench: Bench) -> None:
    bench.batch(opened=(opened(stop=("b",)),))
    tokens = letters("abc")
    logprobs = tuple(TokenLogprobs(token, -0.5, ()) for token in tokens)
    (sent, _) = bench.batch(entries=(NewTokens(R, ONE, 0, tokens, None, None, logprobs),))
    (delta,) = sent.message.deltas  # type: ignore[union-attr]
    assert [p.chosen.token for p in delta.logprobs or ()] == ["a", "b"]


def test_a_resumed_stream_goes_on_where_the_client_left_off(bench: Bench) -> None:
    output = letters("abcd")
    assert bench.batch(
        opened=(opened(attempt=TWO, context=(*ids("Hello"), *output), resumed=4, sent_chars=4),),
        entries=(NewTokens(R, TWO, 4, letters("ef")),),
    ) == [deltas(0, Delta(R, TWO, 4, letters("ef"), "ef"), opened=(StreamOpened(R, TWO, 40, 16, engine=ENGINE),))]


def test_text_that_was_held_back_from_the_client_is_not_lost_at_a_resume(bench: Bench) -> None:
    context = (*ids("Hello"), *letters("abEN"))
    bench.batch(opened=(opened(attempt=TWO, context=context, resumed=4, sent_chars=2, stop=("END",)),))
    assert bench.text(NewTokens(R, TWO, 4, letters("x"))) == [("ENx", None, None)]


def test_a_stop_string_across_the_border_of_two_attempts_is_found(bench: Bench) -> None:
    context = (*ids("Hello"), *letters("abEN"))
    bench.batch(opened=(opened(attempt=TWO, context=context, resumed=4, sent_chars=2, stop=("END",)),))
    assert bench.batch(entries=(NewTokens(R, TWO, 4, letters("D")),)) == [
        deltas(1, Delta(R, TWO, 4, letters("D"), "", "stop", "END")),
        ToEngine(ENGINE, StopMatched(R, TWO)),
    ]


def test_a_stop_string_complete_before_the_border_ends_the_request_at_once(bench: Bench) -> None:
    context = (*ids("Hello"), *letters("abEND"))
    stream = opened(attempt=TWO, context=context, resumed=5, sent_chars=1, stop=("END",))
    assert bench.batch(opened=(stream,), entries=(NewTokens(R, TWO, 5, letters("x")),)) == [
        deltas(0, Delta(R, TWO, 5, (), "b", "stop", "END"), opened=(StreamOpened(R, TWO, 40, 16, engine=ENGINE),)),
        ToEngine(ENGINE, StopMatched(R, TWO)),
    ]


def test_text_that_never_reached_the_client_is_sent_with_the_opening(bench: Bench) -> None:
    context = (*ids("Hello"), *letters("abcd"))
    assert bench.batch(opened=(opened(attempt=TWO, context=context, resumed=4, sent_chars=1),)) == [
        deltas(0, Delta(R, TWO, 4, (), "bcd"), opened=(StreamOpened(R, TWO, 40, 16, engine=ENGINE),))
    ]


def test_the_least_number_of_tokens_counts_those_of_earlier_attempts(bench: Bench) -> None:
    context = (*ids("Hello"), *letters("ab"))
    bench.batch(opened=(opened(attempt=TWO, context=context, resumed=2, sent_chars=2, stop=("b",), min_tokens=3),))
    assert bench.text(NewTokens(R, TWO, 2, letters("b")), NewTokens(R, TWO, 3, letters("b"))) == [
        ("b", None, None),
        ("", "stop", "b"),
    ]


def test_a_gap_in_an_engines_batches_fails_its_requests_and_is_reported_to_it(bench: Bench) -> None:
    bench.batch(opened=(opened(R),))
    bench.batch(OTHER, opened=(opened(RequestId("other")),))
    actions = bench.batch(skip=1, opened=(opened(S),), entries=(NewTokens(R, ONE, 0, ids("a")),))
    reason = "detokenizer detokenizer-1 missed tokens of engine engine-1"
    assert actions == [
        ToGateway(GATEWAY, RequestFailed(R, ONE, reason)),
        ToGateway(GATEWAY, RequestFailed(S, ONE, reason)),
        ToEngine(ENGINE, TokenBatchLost(HERE)),
    ]
    assert set(bench.core.streams) == {RequestId("other")}
    assert bench.batch(opened=(opened(R, TWO),))[0].message.opened  # type: ignore[union-attr]


def test_an_engine_that_was_never_heard_from_its_first_batch_on_has_a_gap(bench: Bench) -> None:
    assert bench.batch(skip=5) == [ToEngine(ENGINE, TokenBatchLost(HERE))]
    assert bench.batch() == []


def test_who_is_started_anew_joins_an_engines_batches_where_streams_begin(bench: Bench) -> None:
    first = bench.batch(skip=5, opened=(opened(R),), entries=(NewTokens(R, ONE, 0, ids("a")),))
    assert first == [deltas(0, Delta(R, ONE, 0, ids("a"), "a"), opened=(StreamOpened(R, ONE, 40, 16, engine=ENGINE),))]
    assert bench.batch(entries=(NewTokens(R, ONE, 1, ids("b")),)) == [deltas(1, Delta(R, ONE, 1, ids("b"), "b"))]
    assert bench.core.counters.gaps == 0


def test_who_is_started_anew_joins_an_engines_batches_where_a_stream_moves_to_it(bench: Bench) -> None:
    bench.batch(skip=5, opened=(opened(R),), moved=(StreamMoved(R, ONE, OTHER),))
    assert bench.batch(OTHER, skip=3, entries=(NewTokens(R, ONE, 0, ids("a")),)) == [
        deltas(1, Delta(R, ONE, 0, ids("a"), "a"))
    ]


def test_who_is_started_anew_and_missed_the_beginning_of_one_stream_has_a_gap(bench: Bench) -> None:
    entries = (NewTokens(R, ONE, 0, ids("a")), NewTokens(S, ONE, 7, ids("b")))
    reason = "detokenizer detokenizer-1 missed tokens of engine engine-1"
    assert bench.batch(skip=5, opened=(opened(R),), entries=entries) == [
        ToGateway(GATEWAY, RequestFailed(R, ONE, reason)),
        ToEngine(ENGINE, TokenBatchLost(HERE)),
    ]


def test_a_missed_token_of_one_request_fails_that_request_alone(bench: Bench) -> None:
    bench.batch(opened=(opened(R), opened(S)))
    entries = (NewTokens(R, ONE, 1, ids("a")), NewTokens(S, ONE, 0, ids("b")))
    assert bench.batch(entries=entries) == [
        deltas(1, Delta(S, ONE, 0, ids("b"), "b")),
        ToGateway(GATEWAY, RequestFailed(R, ONE, "output token 0 was missed: 1 came")),
        ToEngine(ENGINE, Cancel(R, ONE)),
    ]


def test_an_engine_that_starts_anew_fails_what_it_ran_before_and_its_old_batches_are_stale(bench: Bench) -> None:
    bench.batch(opened=(opened(R),))
    actions = bench.batch(epoch=2, opened=(opened(S),))
    assert actions[0] == ToGateway(GATEWAY, RequestFailed(R, ONE, "engine engine-1 restarted"))
    assert set(bench.core.streams) == {S}
    assert bench.batch(epoch=1, entries=(NewTokens(R, ONE, 0, ids("a")),)) == []
    assert set(bench.core.streams) == {S}
    assert bench.core.counters.stale == 1


def test_what_is_not_open_here_is_counted_and_left_alone(bench: Bench) -> None:
    bench.batch(opened=(opened(R, TWO),))
    assert bench.batch(entries=(NewTokens(R, ONE, 0, ids("a")), NewTokens(S, ONE, 0, ids("a")))) == []
    assert bench.batch(OTHER, entries=(NewTokens(R, TWO, 0, ids("a")),)) == []
    assert bench.batch(opened=(opened(R, ONE),)) == []
    assert bench.core.counters.unknown == 4
    assert bench.core.streams[R].opened.attempt == TWO


def test_a_newer_attempt_takes_the_place_of_an_older_one(bench: Bench) -> None:
    bench.batch(opened=(opened(R),))
    bench.batch(OTHER, opened=(opened(R, TWO),))
    assert bench.batch(entries=(NewTokens(R, ONE, 0, ids("a")),)) == []
    assert bench.batch(abandoned=(AbandonStream(R, ONE),)) == []
    assert bench.core.streams[R].engine == OTHER


def test_an_abandoned_request_is_forgotten_in_silence(bench: Bench) -> None:
    bench.batch(opened=(opened(R),))
    assert bench.batch(abandoned=(AbandonStream(R, ONE),)) == []
    assert bench.core.streams == {}


def test_a_stream_that_moved_goes_on_from_the_other_engine_and_from_no_other(bench: Bench) -> None:
    bench.batch(opened=(opened(),), entries=(NewTokens(R, ONE, 0, ids("a")),), moved=(StreamMoved(R, ONE, OTHER),))
    assert bench.batch(entries=(NewTokens(R, ONE, 1, ids("x")),)) == []
    assert bench.batch(OTHER, entries=(NewTokens(R, ONE, 1, ids("b")),)) == [
        deltas(1, Delta(R, ONE, 1, ids("b"), "b")),
    ]
    assert bench.core.end_streams(EngineLost(ENGINE, "died")) == []
    assert R in bench.core.streams
    assert len(bench.core.end_streams(EngineLost(OTHER, "died"))) == 1
    assert bench.core.streams == {}


def test_an_engine_that_starts_anew_goes_on_with_what_has_moved_to_it_meanwhile(bench: Bench) -> None:
    bench.batch(OTHER, opened=(opened(S),))
    bench.batch(opened=(opened(),), entries=(NewTokens(R, ONE, 0, ids("a")),), moved=(StreamMoved(R, ONE, OTHER),))
    assert bench.batch(OTHER, epoch=2, entries=(NewTokens(R, ONE, 1, ids("b")),)) == [
        ToGateway(GATEWAY, RequestFailed(S, ONE, "engine engine-2 restarted")),
        deltas(2, Delta(R, ONE, 1, ids("b"), "b")),
    ]
    assert bench.batch(OTHER, epoch=3) == [ToGateway(GATEWAY, RequestFailed(R, ONE, "engine engine-2 restarted"))]


def test_an_engine_is_informed_of_a_stop_string_in_a_stream_that_moved_to_it(bench: Bench) -> None:
    bench.batch(
        opened=(opened(stop=("ab",)),), entries=(NewTokens(R, ONE, 0, ids("a")),), moved=(StreamMoved(R, ONE, OTHER),)
    )
    actions = bench.batch(OTHER, entries=(NewTokens(R, ONE, 1, ids("b")),))
    assert ToEngine(OTHER, StopMatched(R, ONE)) in actions


@pytest.mark.parametrize("moved", [StreamMoved(R, TWO, OTHER), StreamMoved(S, ONE, OTHER)])
def test_what_is_not_open_here_does_not_move(bench: Bench, moved: StreamMoved) -> None:
    bench.batch(opened=(opened(),))
    assert bench.batch(moved=(moved,)) == []
    assert bench.core.streams[R].engine == ENGINE
    assert bench.core.counters.unknown == 1


def test_requests_of_an_engine_that_is_gone_fail(bench: Bench) -> None:
    bench.batch(opened=(opened(R),))
    bench.batch(OTHER, opened=(opened(S),))
    assert bench.core.end_streams(EngineLost(ENGINE, "silent for 2 s")) == [
        ToGateway(GATEWAY, RequestFailed(R, ONE, "engine engine-1: silent for 2 s"))
    ]
    assert set(bench.core.streams) == {S}
    # It lives after all: it learns that its requests are lost.
    assert bench.batch(entries=(NewTokens(R, ONE, 0, ids("a")),)) == [ToEngine(ENGINE, TokenBatchLost(HERE))]


def test_requests_of_a_gateway_that_is_gone_are_cancelled_and_its_numbers_go_on(bench: Bench) -> None:
    bench.batch(opened=(opened(R), opened(S, gateway=GatewayId("gateway-2"))))
    assert bench.core.end_streams(GatewayLost(GATEWAY, "restarted")) == [
        ToEngine(ENGINE, Cancel(R, ONE)),
        ToGateway(GATEWAY, RequestFailed(R, ONE, "gateway gateway-1: restarted")),
    ]
    assert set(bench.core.streams) == {S}
    # It lives after all: what is numbered from 0 again, it would take for repeated.
    seen: SourceNumbers[DetokenizerId] = SourceNumbers()
    assert seen.record(HERE, EPOCH, 0) == "first"
    [again] = bench.batch(opened=(opened(R, TWO),))
    assert again == deltas(1, opened=(StreamOpened(R, TWO, 40, 16, engine=ENGINE),))
    assert seen.record(HERE, EPOCH, again.message.number) == "next"


def test_more_streams_than_the_limit_are_turned_away(bench: Bench) -> None:
    bench.batch(opened=tuple(opened(RequestId(f"r{n}")) for n in range(3)))
    assert bench.batch(opened=(opened(S),)) == [
        ToGateway(GATEWAY, RequestFailed(S, ONE, "detokenizer detokenizer-1 is full: 3 streams")),
        ToEngine(ENGINE, Cancel(S, ONE)),
    ]


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        (
            {"model": ModelName("big")},
            RequestFailed(R, ONE, "detokenizer detokenizer-1 serves demo, not big"),
        ),
        (
            {"resumed": 1, "context": ()},
            RequestFailed(R, ONE, "the context does not hold what it should"),
        ),
        (
            {"stop": ("x" * MAX_STOP_CHARS, "y")},
            RequestRejected(
                request=R,
                attempt=ONE,
                kind="invalid_request",
                message="stop: 16384 characters at most, all stop strings together",
                field="stop",
            ),
        ),
    ],
)
def test_a_stream_that_cannot_be_served_is_refused_and_cancelled(
    bench: Bench, wrong: dict[str, Any], answer: RequestFailed | RequestRejected
) -> None:
    assert bench.batch(opened=(opened(**wrong),)) == [ToGateway(GATEWAY, answer), ToEngine(ENGINE, Cancel(R, ONE))]
