"""The engine's decisions, event by event."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.scheduler.core.epoch import MAX_SENDINGS
from services.scheduler.core.events import (
    DetokenizerGone,
    EndProcess,
    Output,
    RankProgress,
    SendTokens,
    TimePassed,
    WorkersLost,
    WorkersReady,
)
from services.scheduler.core.limits import EngineLimits
from shared.blocks import BlockHash
from shared.ids import Attempt, DetokenizerId, InstanceId, RequestId
from shared.messages.detokenizer import AbandonStream, NewTokens
from shared.messages.gateway import RequestFailed, RequestRejected
from shared.messages.generation import TokenLogprobs
from shared.messages.lifecycle import LATENCY_BOUNDS, LatencySums
from shared.messages.scheduler import (
    Cancel,
    ProbeReply,
    SampledTokens,
    StepFinished,
    StepMissed,
    StopMatched,
    TokenBatchLost,
)
from shared.messages.worker import SequenceWork
from shared.packing import unpack
from tests.support.engines.checking_worker import (
    DETOKENIZER,
    EOS,
    TIMING,
    card,
    generate,
    right_output,
)
from tests.support.engines.single_engine import EPOCH, PROMPT, Ring, abandoned, plans, told


def test_a_request_is_prefilled_and_the_first_decode_planned_before_any_result() -> None:
    ring = Ring()
    outputs = ring.send(generate("a", PROMPT, max_tokens=4, ignore_eos=True))
    first, second = plans(outputs)
    assert (first.step, second.step, first.epoch) == (0, 1, EPOCH)
    (new,) = first.new
    assert unpack(new.tokens) == PROMPT
    assert (new.computed, new.prompt_length, unpack(new.blocks)) == (0, 20, [])
    (work,) = first.work
    assert (work.count, work.sample, len(unpack(work.blocks))) == (20, True, 2)
    assert second.work == (SequenceWork(new.sequence, 1, b"", True),)


@pytest.mark.parametrize(("run_ahead", "expected"), [(0, 1), (1, 2), (2, 3)])
def test_plans_run_ahead_as_far_as_configured(run_ahead: int, expected: int) -> None:
    ring = Ring(EngineLimits(run_ahead=run_ahead))
    assert len(plans(ring.send(generate("a", PROMPT)))) == expected


def test_no_plan_goes_beyond_the_last_token_that_was_asked_for() -> None:
    ring = Ring(EngineLimits(run_ahead=2))
    ring.send(generate("a", PROMPT, max_tokens=2, ignore_eos=True))
    assert [plan.work[0].count for plan in ring.plans] == [20, 1]
    ring.finish()
    assert [(len(e.tokens), e.finish) for e in ring.entries] == [(1, None), (1, "length")]
    assert ring.free == 32


def test_the_stream_is_opened_with_the_first_tokens_and_says_what_was_cached() -> None:
    ring = Ring()
    ring.send(generate("a", PROMPT, max_tokens=1))
    ring.finish()
    outputs = ring.send(generate("b", PROMPT, max_tokens=1))
    assert not any(isinstance(o, SendTokens) for o in outputs)
    (batch,) = (o.batch for o in ring.step() if isinstance(o, SendTokens))
    (opened,), (entry,) = batch.opened, batch.entries
    assert entry.request == opened.request
    assert (opened.request, opened.prompt_tokens, opened.cached_tokens) == ("b", 20, 16)
    assert (unpack(opened.context), opened.resumed) == (PROMPT[-8:], 0)
    assert [p.new[0].computed for p in plans(outputs)] == [16]


def test_what_requests_waited_for_is_summed_up_to_their_first_tokens_and_between_the_later_ones() -> None:
    ring = Ring(EngineLimits(run_ahead=0))
    ring.send(generate("a", PROMPT, max_tokens=3, ignore_eos=True))
    for seconds in (2.0, 0.5, 0.25):
        ring.now += seconds
        ring.step()
    report = ring.engine.report()
    assert report is not None
    assert report.latency is not None
    assert replace(report.latency, first_counts=(), later_counts=()) == LatencySums(1, 2.0, 2, 0.75)
    counted = [
        {LATENCY_BOUNDS[bucket]: count for bucket, count in enumerate(counts) if count}
        for counts in (report.latency.first_counts, report.latency.later_counts)
    ]
    assert counted == [{2.5: 1}, {0.25: 1, 0.5: 1}], "each by the first bound that it does not exceed"


def test_a_prompt_that_is_cached_whole_still_computes_its_last_block() -> None:
    ring = Ring()
    prompt = (PROMPT * 2)[:32]
    ring.send(generate("a", prompt, max_tokens=1))
    ring.finish()
    (plan,) = plans(ring.send(generate("b", prompt, max_tokens=1)))
    assert (plan.new[0].computed, plan.work[0].count) == (16, 16)
    ring.finish()
    assert ring.output_of("a") == ring.output_of("b")


def test_output_is_cached_too_so_that_a_second_turn_finds_it() -> None:
    ring = Ring()
    first = generate("a", PROMPT, max_tokens=30, ignore_eos=True)
    ring.send(first)
    ring.finish()
    (plan, *_) = plans(ring.send(generate("b", PROMPT + ring.output_of("a"), max_tokens=1)))
    assert plan.new[0].computed == 48


def test_another_cache_salt_shares_nothing() -> None:
    ring = Ring()
    ring.send(generate("a", PROMPT, max_tokens=1, cache_salt="x"))
    ring.finish()
    (plan,) = plans(ring.send(generate("b", PROMPT, max_tokens=1, cache_salt="y")))
    assert plan.new[0].computed == 0


def test_the_salt_of_a_prompt_shorter_than_a_block_salts_its_output_too() -> None:
    ring = Ring()
    ring.send(generate("a", PROMPT[:5], max_tokens=30, ignore_eos=True, cache_salt="x"))
    ring.finish()
    second_turn = PROMPT[:5] + ring.output_of("a")
    (plan, *_) = plans(ring.send(generate("b", second_turn, max_tokens=1)))
    assert plan.new[0].computed == 0
    (plan, *_) = plans(ring.send(generate("c", second_turn, max_tokens=1, cache_salt="x")))
    assert plan.new[0].computed == 32


def named_blocks(ring: Ring) -> dict[BlockHash, int]:
    assert ring.engine.epoch_state is not None
    return dict(ring.engine.epoch_state.memory.index.block_of)


def test_a_sequence_without_prefix_caching_neither_finds_blocks_nor_leaves_any() -> None:
    ring = Ring()
    ring.send(generate("a", PROMPT, max_tokens=30, ignore_eos=True))
    ring.finish()
    named = named_blocks(ring)
    (plan, *_) = plans(ring.send(generate("b", PROMPT, max_tokens=30, ignore_eos=True, prefix_caching=False)))
    assert plan.new[0].computed == 0
    ring.finish()
    assert ring.output_of("b") == ring.output_of("a")
    assert named_blocks(ring) == named
    other = [token + 1 for token in PROMPT]
    ring.send(generate("c", other, max_tokens=30, ignore_eos=True, prefix_caching=False))
    ring.finish()
    assert named_blocks(ring) == named


def test_sequences_without_prefix_caching_compute_equal_prompts_each_for_itself() -> None:
    ring = Ring()
    for request in ("a", "b"):
        ring.send(generate(request, PROMPT, max_tokens=1, prefix_caching=False))
    computed = [new.computed for plan in ring.plans for new in plan.new]
    assert computed == [0, 0]


def test_an_engine_whose_workers_cannot_go_on_behind_cached_blocks_caches_none() -> None:
    """Whatever its requests say, equal prompts are computed each for itself, at once and one after the other."""
    ring = Ring(state_checkpoints=0)
    for request in ("a", "b"):
        ring.send(generate(request, PROMPT, max_tokens=1))
    assert [new.computed for plan in ring.plans for new in plan.new] == [0, 0]
    ring.finish()
    (plan, *_) = plans(ring.send(generate("c", PROMPT, max_tokens=30, ignore_eos=True)))
    assert plan.new[0].computed == 0
    ring.finish()
    assert named_blocks(ring) == {}


def test_a_newcomer_waits_until_all_of_its_prompt_fits_beside_a_block_for_each_that_runs() -> None:
    ring = Ring(EngineLimits(max_batch_tokens=16, max_running=4, run_ahead=0), num_blocks=8)
    ring.send(generate("a", PROMPT, max_tokens=5, ignore_eos=True))
    ring.step()
    ring.send(generate("b", [5] * 90, max_tokens=1))
    ring.step()
    assert [len(plan.new) for plan in ring.plans] == [0], "its first chunk would fit, and 6 blocks are free"
    ring.finish()
    assert len(ring.output_of("b")) == 1


def test_a_cached_block_that_is_free_is_not_counted_twice() -> None:
    ring = Ring(EngineLimits(run_ahead=0), num_blocks=5)
    ring.send(generate("a", [5] * 33, max_tokens=1))
    ring.finish()
    ring.send(generate("running", PROMPT, max_tokens=9, ignore_eos=True))
    ring.send(generate("b", [5] * 64, max_tokens=1))
    ring.step()
    assert [len(plan.new) for plan in ring.plans] == [0], "2 are cached, 2 more needed, 1 is promised, 3 are free"
    ring.finish()
    assert len(ring.output_of("b")) == 1


def test_a_long_prompt_is_cut_to_chunks_beside_decodes() -> None:
    ring = Ring(EngineLimits(max_batch_tokens=16, max_running=4, run_ahead=0))
    ring.send(generate("a", PROMPT[:4], max_tokens=9, ignore_eos=True))
    ring.step()
    ring.send(generate("b", PROMPT + PROMPT, max_tokens=1, arrival=-1.0))
    seen = []
    while ring.plans:
        seen.append([(w.count, w.sample) for w in ring.plans[0].work])
        ring.step()
    assert seen[:4] == [
        [(1, True)],
        [(1, True), (15, False)],
        [(1, True), (15, False)],
        [(1, True), (10, True)],
    ]


def test_a_stop_token_is_reported_inside_tokens_and_its_late_steps_are_ignored() -> None:
    ring = Ring(EngineLimits(run_ahead=2))
    expected, finish = right_output(request := generate("a", [5, 6, 7], max_tokens=200), ring.context)
    assert finish == "stop", "the prompt must be one that runs into the end of sequence"
    ring.send(request)
    ring.finish()
    assert ring.output_of("a") == expected
    assert expected[-1] == EOS
    assert (ring.entries[-1].finish, ring.entries[-1].stop_token) == ("stop", None)
    assert ring.free == 32


def test_a_requested_stop_token_is_named() -> None:
    ring = Ring()
    request = generate("a", PROMPT, max_tokens=50, ignore_eos=True)
    third = right_output(request, ring.context)[0][2]
    ring.send(generate("a", PROMPT, max_tokens=50, ignore_eos=True, stop_token_ids=(third,), min_tokens=2))
    ring.finish()
    assert (ring.entries[-1].position, ring.entries[-1].finish, ring.entries[-1].stop_token) == (2, "stop", third)


def test_no_token_stops_before_min_tokens() -> None:
    ring = Ring()
    ring.send(generate("a", PROMPT, max_tokens=9, min_tokens=9, stop_token_ids=tuple(range(24))))
    ring.finish()
    assert (len(ring.output_of("a")), ring.entries[-1].finish) == (9, "length")


def test_the_context_ends_a_request_without_max_tokens() -> None:
    ring = Ring(max_model_len=40)
    ring.send(generate("a", PROMPT, ignore_eos=True))
    ring.finish()
    assert (len(ring.output_of("a")), ring.entries[-1].finish) == (20, "length")


@pytest.mark.parametrize(
    ("prompt", "stopping", "field", "numbers"),
    [
        ([4] * 256, {}, "prompt", "256"),
        ([4] * 300, {}, "prompt", "300"),
        ([4] * 200, {"max_tokens": 57}, "max_tokens", "257"),
        ([4, 24], {}, "prompt", "24"),
        ([4], {"stop_token_ids": (99,)}, "stop_token_ids", "99"),
        ([], {}, "prompt", "at least one"),
    ],
)
def test_what_can_never_be_served_is_rejected_with_field_and_numbers(
    prompt: list[int], stopping: dict[str, object], field: str, numbers: str
) -> None:
    ring = Ring()
    (rejected,) = told(ring.send(generate("a", prompt, **stopping)))  # type: ignore[arg-type]
    assert isinstance(rejected, RequestRejected)
    assert (rejected.kind, rejected.field, rejected.retry_after) == ("invalid_request", field, None)
    assert numbers in rejected.message


def test_a_request_too_large_for_kv_memory_is_rejected_and_the_largest_that_fits_is_served() -> None:
    ring = Ring(num_blocks=4)
    (rejected,) = told(ring.send(generate("a", [4] * 40, max_tokens=25)))
    assert isinstance(rejected, RequestRejected)
    assert "KV memory holds 64 tokens" in rejected.message
    ring.send(generate("b", [4] * 40, max_tokens=24, ignore_eos=True))
    ring.finish()
    assert len(ring.output_of("b")) == 24


def test_a_full_waiting_line_rejects_as_overloaded() -> None:
    ring = Ring(EngineLimits(max_running=1, max_waiting=1))
    assert told(ring.send(generate("a", PROMPT))) == []
    assert told(ring.send(generate("b", PROMPT))) == []
    (rejected,) = told(ring.send(generate("c", PROMPT)))
    assert isinstance(rejected, RequestRejected)
    assert (rejected.kind, rejected.retry_after) == ("overloaded", 1.0)


def test_a_burst_fills_the_running_batch_before_it_counts_as_waiting() -> None:
    ring = Ring(EngineLimits(max_running=3, max_waiting=2))
    for name in "abcde":  # the first is planned at once, the others while its step is computed
        assert told(ring.send(generate(name, PROMPT))) == []
    (rejected,) = told(ring.send(generate("f", PROMPT)))
    assert isinstance(rejected, RequestRejected)
    assert (rejected.kind, rejected.message) == ("overloaded", "2 requests are waiting already, and no more may")
    ring.finish()
    assert {entry.request for entry in ring.entries if entry.finish} == set("abcde")


def admitted_order(policy: str) -> list[str]:
    ring = Ring(EngineLimits(max_running=1, policy=policy))  # type: ignore[arg-type]
    ring.send(generate("running", PROMPT, max_tokens=2, ignore_eos=True))
    for name, arrival, priority in [("a", 3.0, 0), ("b", 2.0, 1), ("c", 1.0, 2), ("d", 1.0, 2)]:
        ring.send(generate(name, PROMPT, max_tokens=1, arrival=arrival, priority=priority))
    ring.finish()
    return [e.request for e in ring.entries if e.finish][1:]


def test_first_come_first_served_goes_by_arrival() -> None:
    assert admitted_order("fcfs") == ["c", "d", "b", "a"]


def test_priority_goes_first_and_arrival_decides_ties() -> None:
    assert admitted_order("priority") == ["a", "b", "c", "d"]


def test_under_pressure_the_latest_is_preempted_and_still_gives_the_same_tokens() -> None:
    ring = Ring(EngineLimits(max_running=4), num_blocks=6)
    requests = [generate(n, PROMPT, max_tokens=40, ignore_eos=True, arrival=i) for i, n in enumerate("abc")]
    for request in requests:
        ring.send(request)
    ring.finish()
    assert ring.engine.epoch_state is not None
    assert ring.engine.epoch_state.planner.preemption.count > 0
    expected = right_output(requests[0], ring.context)[0]
    assert [ring.output_of(n) for n in "abc"] == [expected] * 3
    assert next(e.request for e in ring.entries if e.finish) == "a"
    assert ring.free == 6


def test_a_prompt_under_way_that_came_last_is_preempted_before_anybody_who_decodes() -> None:
    ring = Ring(EngineLimits(max_batch_tokens=4, max_running=3, run_ahead=0), num_blocks=11)
    for arrival, (name, prompt) in enumerate([("a", [5] * 16), ("c", [6] * 16), ("b", [7] * 80)]):
        ring.send(generate(name, prompt, max_tokens=60, ignore_eos=True, arrival=arrival))
    assert ring.engine.epoch_state is not None
    while ring.engine.epoch_state.planner.preemption.count == 0:
        ring.step()
    phases = {name: sequence.phase for name, sequence in ring.engine.requests.items()}
    assert phases == {"a": "decoding", "c": "decoding", "b": "waiting"}
    ring.finish()
    assert all(len(ring.output_of(name)) == 60 for name in "abc")


def test_a_cancel_frees_everything_and_tells_the_detokenizer() -> None:
    ring = Ring()
    ring.send(generate("a", PROMPT))
    outputs = ring.send(Cancel(RequestId("a"), Attempt(1)))
    assert (abandoned(outputs), told(outputs)) == ([AbandonStream(RequestId("a"), Attempt(1))], [])
    assert ring.free == 32
    ring.finish()
    assert ring.entries == []


def test_a_cancel_that_overtakes_its_request_still_holds() -> None:
    ring = Ring()
    ring.send(Cancel(RequestId("a"), Attempt(2)))
    assert ring.send(generate("a", PROMPT, attempt=1)) == []
    assert ring.send(generate("a", PROMPT, attempt=2)) == []
    assert len(plans(ring.send(generate("a", PROMPT, attempt=3)))) == 2


def test_a_matched_stop_string_frees_everything_in_silence() -> None:
    ring = Ring()
    ring.send(generate("a", PROMPT))
    assert ring.send(StopMatched(RequestId("a"), Attempt(1))) == []
    assert ring.free == 32


def test_a_newer_attempt_replaces_the_older_and_goes_on_where_it_was() -> None:
    ring = Ring()
    request = generate("a", PROMPT, max_tokens=6, ignore_eos=True)
    expected = right_output(request, ring.context)[0]
    ring.send(request)
    ring.step()
    outputs = ring.send(generate("a", PROMPT, attempt=2, resume=tuple(expected[:2]), max_tokens=6, ignore_eos=True))
    assert abandoned(outputs) == [AbandonStream(RequestId("a"), Attempt(1))]
    ring.finish()
    newer = [e for e in ring.entries if e.attempt == 2]
    assert [t for e in newer for t in e.tokens] == expected[2:]
    assert (newer[0].position, newer[-1].finish) == (2, "length")
    assert ring.send(request) == [], "the older attempt is fenced"


def test_an_attempt_that_resumes_a_complete_answer_finishes_at_once() -> None:
    ring = Ring()
    outputs = ring.send(generate("a", PROMPT, attempt=2, resume=(5, 6), max_tokens=2))
    (batch,) = (o.batch for o in outputs if isinstance(o, SendTokens))
    assert [o.resumed for o in batch.opened] == [2]
    assert batch.entries == (NewTokens(RequestId("a"), Attempt(2), 2, (), "length"),)


def test_a_lost_detokenizer_fails_its_requests_only() -> None:
    ring = Ring()
    other = DetokenizerId("detokenizer-2")
    ring.send(generate("a", PROMPT))
    ring.send(generate("b", PROMPT, detokenizer=other))
    assert told(ring.send(TokenBatchLost(other))) == [
        RequestFailed(RequestId("b"), Attempt(1), "its detokenizer was lost")
    ]
    outputs = ring.send(DetokenizerGone(DETOKENIZER))
    assert told(outputs) == [RequestFailed(RequestId("a"), Attempt(1), "its detokenizer was lost")]
    assert abandoned(outputs) == [], "nobody is there to hear it"
    assert ring.free == 32


def test_a_detokenizer_in_place_of_one_that_is_gone_hears_nothing_of_its_requests() -> None:
    ring = Ring()
    ring.send(generate("a", PROMPT, max_tokens=3))
    ring.send(DetokenizerGone(DETOKENIZER))
    ring.send(generate("b", PROMPT, max_tokens=1))
    outputs: list[Output] = []
    while ring.plans:
        outputs += ring.step()
    batches = [output.batch for output in outputs if isinstance(output, SendTokens)]
    assert [opened.request for batch in batches for opened in batch.opened] == ["b"]


def test_batches_to_each_detokenizer_are_numbered_from_zero() -> None:
    ring = Ring()
    other = DetokenizerId("detokenizer-2")
    numbers: dict[str, list[int]] = {DETOKENIZER: [], other: []}
    outputs = ring.send(generate("a", PROMPT, max_tokens=3, ignore_eos=True))
    outputs += ring.send(generate("b", PROMPT, max_tokens=3, ignore_eos=True, detokenizer=other))
    while ring.plans:
        outputs += ring.step()
    for output in outputs:
        if isinstance(output, SendTokens):
            numbers[output.detokenizer].append(output.batch.number)
    assert numbers == {DETOKENIZER: [0, 1, 2], other: [0, 1, 2]}


def missed(step: int) -> StepMissed:
    return StepMissed(worker=InstanceId("w"), epoch=EPOCH, expected=step)


def test_a_missed_plan_is_sent_again_with_those_behind_it() -> None:
    ring = Ring()
    sent = plans(ring.send(generate("a", PROMPT)))
    assert [plan.step for plan in sent] == [0, 1]
    assert plans(ring.send(missed(0))) == sent
    assert plans(ring.send(missed(1))) == sent[1:]
    ring.plans = sent
    while ring.plans:
        ring.step()
    assert told(ring.send(TimePassed())) == []


def test_a_plan_that_is_missed_too_often_fails_everything_and_begins_a_new_epoch() -> None:
    ring = Ring()
    ring.send(generate("a", PROMPT))
    for _ in range(MAX_SENDINGS):
        assert told(ring.send(missed(1))) == []
    outputs = ring.send(missed(1))
    assert [m.request for m in told(outputs)] == ["a"]
    assert [o.batch.epoch for o in outputs if isinstance(o, SendTokens)] == [EPOCH]
    assert ring.send(StepMissed(worker=InstanceId("w2"), epoch=EPOCH, expected=1)) == []
    ring.plans.clear()
    (first, _) = plans(ring.send(generate("a", PROMPT, attempt=2)))
    assert (first.epoch, first.step) == (EPOCH + 1, 0)
    assert first.new[0].computed == 0, "what the lost steps should have computed is not relied on"


def test_a_result_of_an_old_epoch_is_ignored() -> None:
    ring = Ring()
    ring.send(generate("a", PROMPT))
    ring.send(missed(7))
    assert ring.send(StepFinished(epoch=EPOCH, step=0, sampled=(), timing=TIMING)) == []


def test_a_lost_result_begins_a_new_epoch() -> None:
    ring = Ring()
    ring.send(generate("a", PROMPT))
    ring.worker.step(ring.plans.pop(0))
    outputs = ring.step()
    assert [m.reason for m in told(outputs) if isinstance(m, RequestFailed)] == ["the result of step 0 never came"]


def test_a_result_without_its_tokens_is_a_bug() -> None:
    ring = Ring()
    ring.send(generate("a", PROMPT))
    with pytest.raises(ValueError, match="1 were planned"):
        ring.send(StepFinished(epoch=EPOCH, step=0, sampled=(), timing=TIMING))


def test_a_last_plan_that_never_arrived_shows_in_the_second_report() -> None:
    ring = Ring()
    ring.send(generate("a", PROMPT))
    assert ring.send(RankProgress(0, EPOCH, received=1, published=0)) == []
    ring.now = 0.1
    assert ring.send(RankProgress(0, EPOCH, received=1, published=0)) == [], "too soon after the first"
    for report in range(MAX_SENDINGS):
        ring.now = 0.5 * (report + 1)
        again = ring.send(RankProgress(0, EPOCH, received=1, published=0))
        assert [plan.step for plan in plans(again)] == [1]
    ring.now += 0.5
    (failed,) = told(ring.send(RankProgress(0, EPOCH, received=1, published=0)))
    assert failed == RequestFailed(RequestId("a"), Attempt(1), "rank 0 never received step 1")


def test_a_last_result_that_never_came_shows_in_the_second_report() -> None:
    ring = Ring()
    ring.send(generate("a", PROMPT))
    assert ring.send(RankProgress(0, EPOCH, received=2, published=1)) == []
    ring.now = 0.5
    (failed,) = told(ring.send(RankProgress(0, EPOCH, received=2, published=1)))
    assert failed == RequestFailed(RequestId("a"), Attempt(1), "the result of step 0 never came")


def test_reports_of_a_healthy_rank_change_nothing() -> None:
    ring = Ring(EngineLimits(run_ahead=0))
    ring.send(generate("a", PROMPT, max_tokens=5, ignore_eos=True))
    for step in range(4):
        ring.now += 0.5
        assert told(ring.send(RankProgress(0, EPOCH, received=step + 1, published=step))) == []
        ring.step()


def test_without_workers_requests_fail_at_once() -> None:
    ring = Ring()
    ring.send(generate("a", PROMPT))
    outputs = ring.send(WorkersLost("rank 0 stopped"))
    assert told(outputs) == [RequestFailed(RequestId("a"), Attempt(1), "rank 0 stopped")]
    assert ring.engine.report() is None
    assert told(ring.send(generate("b", PROMPT))) == [
        RequestFailed(RequestId("b"), Attempt(1), "the engine has no workers")
    ]
    ring.send(WorkersReady(card(), 32))
    assert plans(ring.send(generate("c", PROMPT)))[0].epoch == EPOCH + 1


def test_a_step_that_takes_too_long_fails_everything_and_gives_up() -> None:
    ring = Ring(EngineLimits(step_timeout=5.0))
    ring.send(generate("a", PROMPT))
    ring.now = 0.4
    ring.step()
    ring.now = 5.3
    assert ring.send(TimePassed()) == []
    ring.now = 5.5
    outputs = ring.send(TimePassed())
    assert [m.request for m in told(outputs)] == ["a"]
    assert outputs[-1] == EndProcess("step 1 took longer than 5 s")


def test_a_step_of_a_slow_device_may_take_ten_times_as_long_as_those_before_it() -> None:
    ring = Ring(EngineLimits(step_timeout=5.0))
    ring.send(generate("a", PROMPT))
    ring.now = 49.0
    assert ring.send(TimePassed()) == [], "nothing is known of the device yet"
    ring.step()
    ring.now = 49.0 + 480.0
    assert ring.send(TimePassed()) == []
    ring.now = 49.0 + 491.0
    assert ring.send(TimePassed())[-1] == EndProcess("step 1 took longer than 490 s")


def test_a_probe_is_told_where_a_request_stands() -> None:
    ring = Ring(EngineLimits(max_running=1))
    ring.send(generate("a", PROMPT))
    ring.send(generate("b", PROMPT, attempt=2, resume=(5,)))
    ring.step()
    probe = ring.engine.probe
    assert probe(RequestId("a"), Attempt(1)) == ProbeReply("running", 1)
    assert probe(RequestId("b"), Attempt(2)) == ProbeReply("waiting", 1)
    assert probe(RequestId("b"), Attempt(1)) == ProbeReply("unknown", 0)
    assert probe(RequestId("c"), Attempt(1)) == ProbeReply("unknown", 0)


def test_logprobs_travel_with_their_tokens() -> None:
    ring = Ring()
    ring.send(generate("a", PROMPT, ignore_eos=True))
    logprobs = (TokenLogprobs(7, -0.5, ((7, -0.5),)),)
    sampled = SampledTokens(ring.plans[0].work[0].sequence, (7,), logprobs)
    ring.send(StepFinished(epoch=EPOCH, step=0, sampled=(sampled,), timing=TIMING))
    assert ring.entries[-1].logprobs == logprobs


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="max_batch_tokens"):
        EngineLimits(max_batch_tokens=8, max_running=9)


def test_a_snapshot_says_how_the_engine_stands_and_does_not_change_any_more() -> None:
    ring = Ring(EngineLimits(max_running=1))
    ring.send(generate("a", PROMPT))
    ring.send(generate("b", PROMPT[:5]))
    before = ring.engine.snapshot()
    assert before.epoch is not None
    assert (before.requests, before.epoch.running, before.epoch.waiting, before.epoch.prefill_tokens) == (2, 1, 1, 5)
    assert before.epoch.blocks_total - before.epoch.blocks_free == 2
    ring.finish()
    assert before.counters.output_tokens == 0
    after = ring.engine.snapshot()
    assert after.epoch is not None
    assert (after.requests, after.epoch.blocks_free, after.counters.output_tokens) == (0, 32, len(ring.entries))
    assert after.epoch.steps > before.epoch.steps
    ring.send(WorkersLost("killed"))
    assert ring.engine.snapshot().epoch is None
