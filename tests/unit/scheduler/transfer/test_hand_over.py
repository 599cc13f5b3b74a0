"""A prefill engine hands its request over: what both engines, the store, the stream and the gateway see of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.scheduler.core.events import (
    DetokenizerGone,
    ForwardControl,
    PeerChanged,
    SendHandOver,
    SendPlan,
    SendPrefetch,
    SendStoreRequest,
    SendToGateway,
    SendTokens,
    StoreGone,
    WorkersLost,
)
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.transfer.hand_over import SentRequests, partial_hash
from shared.ids import Attempt, DetokenizerId, EngineId, NodeId, RequestId
from shared.messages.gateway import RequestFailed, RequestPlaced
from shared.messages.kvstore import Commit, Find, Prefetch, Reserve
from shared.messages.scheduler import Cancel, GenerateRequest, HandOver, ProbeReply, StopMatched
from shared.packing import unpack
from tests.support.engines.checking_store import FINGERPRINT
from tests.support.engines.checking_worker import DETOKENIZER, generate, right_output
from tests.support.engines.engines_and_store import NODE, EnginesAndStore

P, D = EngineId("p"), EngineId("d")
R, ONE = RequestId("r"), Attempt(1)
PROMPT = [5 + i % 17 for i in range(37)]
PARTIAL = partial_hash(R, ONE)


def request(prompt: list[int] = PROMPT, *, name: str = "r", **more: object) -> GenerateRequest:
    options = {"decode_on": D, "max_tokens": 20, "ignore_eos": True, **more}
    return generate(name, prompt, **options)  # type: ignore[arg-type]


def pair(**more: object) -> EnginesAndStore:
    return EnginesAndStore("p", "d", **more)  # type: ignore[arg-type]


def computed(engines: EnginesAndStore, name: str) -> int:
    return sum(work.count for plan in engines[name].sent_plans for work in plan.work)


def expect_right(engines: EnginesAndStore, asked: GenerateRequest) -> None:
    stream = engines.stream("r", asked.generation.attempt)
    tokens, finish = right_output(asked, 256)
    assert (stream.tokens, stream.finish) == (tokens[stream.start :], finish)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 37, 47, 48])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_the_decode_engine_goes_on_where_the_prefill_engine_stopped(length: int, run_ahead: int) -> None:
    engines = pair(limits=EngineLimits(run_ahead=run_ahead, plan_late=False, max_batch_tokens=16, max_running=8))
    asked = request(PROMPT[:length] if length < 38 else PROMPT + PROMPT[: length - 37])
    engines["p"].send(asked)
    engines.settle()
    expect_right(engines, asked)
    assert engines.stream("r").engine == D
    assert computed(engines, "p") == length
    assert computed(engines, "d") == 19, "what was drawn, and nothing of the prompt"
    engines.check_nothing_is_held()
    assert engines.store.place_of(partial_hash(R, ONE)) is None, "the partial block is of use to nobody any more"


def test_first_the_token_then_the_stream_then_the_gateway_then_the_other_engine() -> None:
    engines = pair()
    engines["p"].send(request())
    engines.until(lambda: engines.passed)
    tail = engines["p"].outputs[-3:]
    assert isinstance(tail[0], SendTokens)
    assert [moved.engine for moved in tail[0].batch.moved] == [D]
    assert tail[1] == SendToGateway(request().generation.gateway, RequestPlaced(R, ONE, D, DETOKENIZER, P))
    assert isinstance(tail[2], SendHandOver)
    handed = tail[2].generate
    assert unpack(handed.generation.tokens) == [*PROMPT, engines.stream("r").tokens[0]]
    assert handed.handed == HandOver(prefilled_by=P, node=NODE, partial=PARTIAL, cached_tokens=0)
    assert engines["p"].free == 32, "its blocks are free right after the copy"
    assert engines["p"].engine.probe(R, ONE) == ProbeReply("unknown", 0)


def test_the_token_is_streamed_before_the_blocks_are_saved() -> None:
    engines = pair()
    engines["p"].send(request())
    engines["p"].answer()
    engines["p"].step()
    assert len(engines.stream("r").tokens) == 1
    assert engines["p"].phases == ["handing"]
    assert engines["p"].engine.probe(R, ONE) == ProbeReply("running", 1)


def test_a_request_that_ends_with_its_first_token_is_not_handed_over() -> None:
    for options in ({"max_tokens": 1}, {"stop_token_ids": tuple(range(24))}):
        engines = pair()
        asked = request(**options)
        engines["p"].send(asked)
        engines.settle()
        expect_right(engines, asked)
        assert engines["d"].sent_plans == []
        engines.check_nothing_is_held()
        assert engines.store.place_of(PARTIAL) is None


def test_without_a_store_it_is_decoded_where_it_is() -> None:
    engines = pair()
    engines["p"].send(StoreGone())
    asked = request()
    engines["p"].send(asked)
    engines.settle()
    expect_right(engines, asked)
    assert engines.stream("r").engine == P
    engines.check_nothing_is_held()


def test_a_store_that_goes_in_the_middle_leaves_the_request_where_it_is() -> None:
    for turns in range(12):
        engines = pair()
        asked = request()
        engines["p"].send(asked)
        for _ in range(turns):
            engines.turn()
        engines.store.restart(other_file=False)
        for side in engines.sides.values():
            side.send(StoreGone())
        engines.settle()
        expect_right(engines, asked)
        engines.check_nothing_is_held()


@pytest.mark.parametrize("kind", [Reserve, Commit])
def test_blocks_that_may_not_be_in_the_store_keep_the_request_here(kind: type[Reserve] | type[Commit]) -> None:
    engines = pair()
    asked = request()
    engines["p"].send(asked)
    engines.until(lambda: any(isinstance(each.request, kind) for each in engines["p"].asked))
    while engines["p"].asked:
        engines["p"].answer(lost=True)
    engines.settle()
    expect_right(engines, asked)
    assert engines.stream("r").engine == P
    assert engines["p"].engine.counters.kept == 1
    engines.check_nothing_is_held()


def test_a_copy_that_fails_keeps_the_request_here() -> None:
    engines = pair()
    asked = request()
    engines["p"].send(asked)
    engines.until(lambda: engines["p"].plans and engines["p"].plans[0].transfers)
    engines["p"].step()
    assert engines["p"].copy(fails=True)
    engines.settle()
    expect_right(engines, asked)
    assert engines.stream("r").engine == P
    engines.check_nothing_is_held()


@pytest.mark.parametrize("lost", ["full", "partial", "all", "answer", "copy"])
def test_what_the_decode_engine_does_not_find_it_computes(lost: str) -> None:
    engines = pair()
    asked = request()
    engines["p"].send(asked)
    engines.until(lambda: engines.passed)
    for number, slot in enumerate(engines.store.slots):
        if lost == "all" or ((lost == "partial") == (slot.hash == PARTIAL) and lost in ("full", "partial")):
            engines.store.evict(number)
    engines.passed.popleft()()
    if lost == "answer":
        engines["d"].answer(lost=True)
    if lost == "copy":
        engines["d"].answer()
        engines["d"].step()
        assert engines["d"].copy(fails=True)
    engines.settle()
    expect_right(engines, asked)
    assert engines.stream("r").engine == D
    assert computed(engines, "d") - 19 == {"full": 37, "partial": 5, "all": 37, "answer": 37, "copy": 37}[lost]
    engines.check_nothing_is_held()


def test_a_cancel_at_any_moment_frees_everything_on_both_sides_and_in_the_store() -> None:
    """Wherever it arrives: the gateway may not have heard yet that the request has moved."""
    ended: set[str] = set()
    for message in (Cancel(R, ONE), StopMatched(R, ONE)):
        for turns in range(16):
            for where in ("p", "d"):
                engines = pair(ranks=2, blocks=8, slots=8)
                engines["p"].send(request(max_tokens=5))
                for _ in range(turns):
                    engines.turn()
                ended |= set(engines[where].phases)
                if where == "d" and R in engines["p"].engine.requests:
                    continue  # nobody would look for it there
                engines[where].send(message)
                engines.settle()
                engines.check_nothing_is_held()
                assert not any(isinstance(word, RequestFailed) for word in engines.told)
    assert ended >= {"handing", "seeking", "loading", "decoding"}


def test_whoever_calls_off_a_request_that_has_moved_is_heard_there() -> None:
    engines = pair()
    engines["p"].send(request())
    engines.until(lambda: engines.streams and engines.stream("r").engine == D)
    engines["p"].send(Cancel(R, Attempt(2)))
    engines.settle()
    assert engines.stream("r").abandoned
    engines.check_nothing_is_held()
    again = engines["p"].send(Cancel(R, Attempt(2)))
    assert again == [ForwardControl(D, Cancel(R, Attempt(2), DETOKENIZER))], "each time: the first may have been lost"


def test_an_engine_that_does_not_take_over_fails_the_attempt() -> None:
    engines = EnginesAndStore("p")
    engines["p"].send(request())
    engines.settle()
    assert engines.told[-1] == RequestFailed(R, ONE, "d does not take it over")
    assert engines.stream("r").abandoned
    engines.check_nothing_is_held()


def test_a_request_that_was_called_off_meanwhile_is_not_failed_when_nobody_took_it_over() -> None:
    engines = EnginesAndStore("p")
    engines["p"].send(request())
    engines.until(lambda: engines.passed)
    engines["p"].send(Cancel(R, ONE))
    engines.passed.popleft()()
    assert not any(isinstance(word, RequestFailed) for word in engines.told)
    assert engines.stream("r").abandoned


def test_a_cancel_that_overtakes_the_hand_over_ends_the_stream_that_moved() -> None:
    engines = pair()
    engines["p"].send(request())
    engines.until(lambda: engines.passed)
    engines["d"].send(Cancel(R, ONE))
    assert not engines.stream("r").abandoned
    engines.passed.popleft()()
    assert engines.stream("r").abandoned
    engines.settle()
    assert not any(isinstance(word, RequestFailed) for word in engines.told)
    engines.check_nothing_is_held()


def test_a_cancel_ends_the_stream_of_a_hand_over_that_was_lost() -> None:
    engines = pair()
    engines["p"].send(request())
    engines.until(lambda: engines.passed)
    engines.passed.popleft()
    engines["d"].send(Cancel(R, ONE, DETOKENIZER))
    assert engines.stream("r").abandoned


def test_a_full_decode_engine_fails_what_it_is_handed_and_rejects_nothing() -> None:
    """The client has its first token already: "come again later" is no answer any more."""
    engines = pair(limits=EngineLimits(max_waiting=1, max_running=1, plan_late=False))
    for name in ("a", "b", "c"):
        engines["d"].send(generate(name, [7] * 3, max_tokens=100, ignore_eos=True))
        engines["d"].answer()
    engines["p"].send(request())
    engines.until(lambda: engines.passed)
    engines.passed.popleft()()
    assert isinstance(engines.told[-1], RequestFailed)
    assert engines.told[-1].request == R
    assert engines.stream("r").abandoned


def test_an_engine_without_workers_fails_what_it_is_handed() -> None:
    engines = pair()
    engines["p"].send(request())
    engines.until(lambda: engines.passed)
    engines["d"].send(WorkersLost("killed"))
    engines.passed.popleft()()
    assert engines.told[-1] == RequestFailed(R, ONE, "the engine has no workers")
    assert engines.stream("r").abandoned


def test_a_resumed_attempt_is_handed_over_with_all_that_it_knows() -> None:
    engines = pair()
    whole, _ = right_output(request(), 256)
    asked = request(attempt=2, resume=tuple(whole[:7]))
    engines["p"].send(asked)
    engines.settle()
    expect_right(engines, asked)
    assert engines.stream("r", 2).start == 7
    assert engines.stream("r", 2).engine == D
    engines.check_nothing_is_held()


def test_cached_tokens_are_those_of_the_prefill_engine_and_told_once() -> None:
    engines = pair()
    engines["p"].send(generate("before", PROMPT, max_tokens=1))
    engines.settle()
    asked = request()
    engines["p"].send(asked)
    engines.until(lambda: engines.passed)
    assert engines.stream("r").cached_tokens == 32
    handed = next(output for output in engines["p"].outputs if isinstance(output, SendHandOver)).generate.handed
    assert handed is not None
    assert handed.cached_tokens == 32
    engines.settle()
    expect_right(engines, asked)
    assert computed(engines, "p") == 37 + 5


def test_a_prompt_that_both_engines_know_needs_its_last_block_only() -> None:
    engines = pair()
    for name in ("p", "d"):
        engines[name].send(generate(f"before-{name}", PROMPT, max_tokens=1))
        engines.settle()
    before = computed(engines, "d")
    asked = request()
    engines["p"].send(asked)
    engines.settle()
    expect_right(engines, asked)
    assert computed(engines, "d") - before == 19


def test_an_engine_on_another_node_names_the_node_that_holds_the_blocks_and_gives_it_time() -> None:
    engines = pair()
    asked = request()
    handed = HandOver(prefilled_by=P, node=NodeId("elsewhere"), partial=PARTIAL, cached_tokens=0)
    outputs = engines["d"].send(replace(asked, decode_on=None, handed=handed))
    (ask,) = (output for output in outputs if isinstance(output, SendStoreRequest))
    assert isinstance(ask.request, Find)
    assert (ask.request.source, ask.request.deadline) == ("elsewhere", EngineLimits().remote_deadline)
    here = replace(handed, node=NODE)
    again = replace(asked, decode_on=None, handed=here, generation=replace(asked.generation, attempt=Attempt(2)))
    outputs = engines["d"].send(again)
    (ask,) = (output for output in outputs if isinstance(output, SendStoreRequest))
    assert isinstance(ask.request, Find)
    assert (ask.request.source, ask.request.deadline) == (None, EngineLimits().store_deadline)


def test_a_dead_worker_in_the_middle_of_a_hand_over_fails_the_attempt_and_leaves_nothing() -> None:
    for turns in range(10):
        for name in ("p", "d"):
            engines = pair()
            asked = request()
            engines["p"].send(asked)
            for _ in range(turns):
                engines.turn()
            engines[name].new_workers()
            engines.settle()
            engines.store.expire()  # what was being copied is left to run out
            engines.check_nothing_is_held()
            stream = engines.streams.get((R, ONE))
            if stream is not None and stream.finish is not None:
                expect_right(engines, asked)
            else:
                assert [word.request for word in engines.told if isinstance(word, RequestFailed)] == [R]


def test_where_requests_went_is_remembered_for_a_bounded_number() -> None:
    sent = SentRequests(max_remembered=2)
    for name in ("a", "b", "c"):
        sent.add(request(name=name).generation, D, DETOKENIZER)
    a, b = RequestId("a"), RequestId("b")
    assert sent.forward(Cancel(a, ONE)) is None
    assert sent.forward(Cancel(b, Attempt(0))) is None
    assert sent.forward(StopMatched(b, ONE)) == ForwardControl(D, StopMatched(b, ONE))
    assert not sent.take_back(request(name="a").generation)
    assert not sent.take_back(request(name="b").generation), "it was called off"
    assert sent.take_back(request(name="c").generation)
    assert not sent.take_back(request(name="c").generation)


def test_an_engine_that_is_known_to_be_away_is_handed_nothing() -> None:
    engines = pair()
    engines["p"].send(PeerChanged(D, takes=False))
    asked = request()
    engines["p"].send(asked)
    engines.settle()
    expect_right(engines, asked)
    assert engines.stream("r").engine == P
    assert engines["p"].engine.counters.handed_over == 0
    engines["p"].send(PeerChanged(D, takes=True))
    engines["p"].send(request(name="s"))
    engines.settle()
    assert engines.stream("s").engine == D
    engines.check_nothing_is_held()


def test_an_engine_that_goes_away_while_blocks_are_saved_for_it_gets_nothing() -> None:
    engines = pair()
    asked = request()
    engines["p"].send(asked)
    engines.until(lambda: engines["p"].phases == ["handing"])
    engines["p"].send(PeerChanged(D, takes=False))
    engines.settle()
    expect_right(engines, asked)
    assert engines.stream("r").engine == P
    assert engines["p"].engine.counters.kept == 1
    engines.check_nothing_is_held()


def test_a_cancel_that_the_prefill_engine_hears_ends_a_stream_whose_request_was_lost() -> None:
    """The gateway missed that it was handed over, and the decode engine the request."""
    engines = pair()
    engines["p"].send(request())
    engines.until(lambda: engines.passed)
    engines.passed.popleft()
    engines["p"].send(Cancel(R, ONE))
    engines.settle()
    assert engines.stream("r").abandoned
    engines.check_nothing_is_held()


def test_requests_for_a_detokenizer_that_is_lost_are_failed_in_the_middle_too() -> None:
    engines = pair()
    engines["p"].send(request(detokenizer=DetokenizerId("x")))
    engines.until(lambda: engines["p"].phases == ["handing"])
    engines["p"].send(DetokenizerGone(DetokenizerId("x")))
    engines.settle()
    assert [word.request for word in engines.told if isinstance(word, RequestFailed)] == [R]
    engines.check_nothing_is_held()


# ---- the other node copies blocks while they are computed


def prefetched(engines: EnginesAndStore) -> list[SendPrefetch]:
    return [output for output in engines["p"].outputs if isinstance(output, SendPrefetch)]


def test_the_decode_engines_node_is_told_of_all_blocks_when_the_first_chunk_is_planned() -> None:
    engines = pair(limits=EngineLimits(plan_late=False, max_batch_tokens=16, max_running=8))
    asked = replace(request(), decode_node=NodeId("node-2"))
    engines["p"].send(asked)
    engines.until(lambda: prefetched(engines))
    outputs = engines["p"].outputs
    [ahead] = prefetched(engines)
    hashes = asked.generation.block_hashes[:32] + PARTIAL
    assert ahead.node == "node-2"
    assert ahead.prefetch == Prefetch(layout=FINGERPRINT, source=NODE, hashes=hashes)
    assert sum(isinstance(output, SendPlan) for output in outputs[: outputs.index(ahead)]) == 0, "before the plan"
    engines.settle()
    assert len(prefetched(engines)) == 1
    expect_right(engines, asked)


@pytest.mark.parametrize("more", [{"decode_node": None}, {"decode_node": NODE}])
def test_a_decode_engine_of_the_same_node_needs_no_copy(more: dict[str, NodeId | None]) -> None:
    engines = pair()
    engines["p"].send(replace(request(), **more))
    engines.settle()
    assert not prefetched(engines)


def test_nothing_is_copied_ahead_for_a_request_that_ends_with_its_first_token() -> None:
    engines = pair()
    engines["p"].send(replace(request(max_tokens=1), decode_node=NodeId("node-2")))
    engines.settle()
    assert not prefetched(engines)
