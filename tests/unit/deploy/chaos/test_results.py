"""What is counted of a round: waits from the fault on, streams that are equal, allowed errors, and what is no good."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.chaos.faults.choice import FAULTS, chosen_faults
from deploy.chaos.load import REQUESTS, Stream, first_difference, prompts, waits
from deploy.chaos.report import figures, matrix, problems, round_line, text
from deploy.chaos.run import RoundResult
from deploy.chaos.schedule import Case
from deploy.chaos.usage import MAX_GROWTH, ProcessUsage, grown
from deploy.errors import CommandError

KILL = Case("kill", "tokenizer")
USAGE = ProcessUsage(pid=7, memory=100 << 20, descriptors=20)


def stream(**more: Any) -> Stream:
    whole = {
        "prompt": 0,
        "client": 0,
        "start": 0.0,
        "end": 10.0,
        "arrivals": (1.0, 2.0, 7.0),
        "text": "ok",
        "failure": None,
    }
    return Stream(**{**whole, **more})


def result(case: Case = KILL, **more: Any) -> RoundResult:
    whole: dict[str, Any] = {
        "case": case,
        "victim": "tokenizer-1",
        "streams": (stream(), stream(failure="refused", text="")),
        "altered": (),
        "lost": (),
        "waits": (5.0,),
        "deadline": 0.0,
        "leaks": {},
        "unready": (),
        "bugs": 0,
        "allowed": frozenset({"refused"}),
    }
    return RoundResult(**{**whole, **more})


@pytest.mark.parametrize(
    ("since", "waited"),
    [(0.0, 5.0), (1.5, 5.0), (3.0, 4.0), (8.0, 0.0)],
    ids=["before its start", "a later gap is longer", "within the gap", "after its last token"],
)
def test_a_wait_is_counted_from_the_fault_on(since: float, waited: float) -> None:
    assert stream().longest_wait(since) == waited


def test_what_begins_after_the_fault_waits_from_its_own_start() -> None:
    assert stream(start=6.0, arrivals=(6.5, 7.0)).longest_wait(2.0) == 0.5


def test_who_was_cut_off_waits_for_the_next_token_of_its_client() -> None:
    cut_off = stream(failure="connection", arrivals=(1.0, 2.0), end=3.0)
    refused = stream(failure="refused", arrivals=(), start=3.5, end=3.6)
    again = stream(start=4.0, arrivals=(4.5, 5.0))
    elsewhere = stream(client=1, arrivals=(2.5, 2.75))
    assert waits([cut_off, refused, again, elsewhere], 1.5) == [2.5, 1.0, 0.5, 1.0]
    assert waits([cut_off, elsewhere], 1.5) == [1.0], "a client that came to nothing any more"


def test_a_good_round_has_only_equal_streams_and_allowed_errors() -> None:
    good = result()
    assert (good.equal, good.errors, good.late) == (1, 1, 0)
    assert result(waits=(5.1,)).late == 1
    assert result(waits=(5.1,), deadline=6.0).late == 0


def test_the_matrix_has_a_row_for_each_case_with_all_of_its_rounds() -> None:
    other = result(Case("stop", "rank 0"), waits=(9.0,), leaks={"engine-1: blocks": 2}, lost=(stream(failure="hung"),))
    rows = matrix([other, result(), result(waits=(1.0,))])
    assert [(row["fault"], row["target"], row["rounds"], row["streams"]) for row in rows] == [
        ("kill", "tokenizer", 2, 4),
        ("stop", "rank 0", 1, 2),
    ]
    assert [(row["median_recovery_s"], row["max_recovery_s"], row["late"], row["leaks"]) for row in rows] == [
        (3.0, 5.0, 0, 0),
        (9.0, 9.0, 1, 1),
    ]
    found = figures(
        [other, result()], [KILL, other.case, Case("pause", "gateway")], {"clock": "not here"}, [{"a": USAGE}]
    )
    assert (found["lost"], found["no_round"], found["skipped"]) == (1, ["pause gateway"], {"clock": "not here"})
    assert figures([result()], [KILL], {}, [], "kill tokenizer: it has ended")["problems"] == [
        "kill tokenizer: it has ended"
    ]
    said = text(found)
    assert "| stop rank 0" in said
    assert "skipped: clock: not here" in said
    assert "no time for: pause gateway" in said


def test_processes_that_go_on_growing_are_named_with_their_descriptors() -> None:
    large = USAGE._replace(memory=USAGE.memory + MAX_GROWTH + 1, descriptors=201)
    first = {"gateway-1": USAGE, "engine-1-rank0": USAGE, "tokenizer-1": USAGE, "gateway-2": USAGE}
    last = {"gateway-1": large, "engine-1-rank0": large, "tokenizer-1": large._replace(pid=8), "gateway-2": USAGE}
    assert grown(first, last) == {"gateway-1": MAX_GROWTH + 1}, "a rank fills its KV memory; a new process is another"
    found = figures([result()], [KILL], {}, [first, last], None, grown(first, last))
    assert found["problems"] == ["gateway-1 has grown by 64 MiB"]
    assert "gateway-1: 100 -> 164 MiB, 20 -> 201 file descriptors" in text(found)


def test_the_longest_pause_is_between_tokens_from_the_fault_on() -> None:
    assert [stream().longest_pause(since) for since in (0.0, 3.0, 8.0)] == [5.0, 5.0, 0.0]
    calm = result(Case("calm", ""), longest_pause=0.25, notes=("3 x 200",))
    assert "longest pause 0.25 s, 3 x 200" in round_line(0, calm)
    assert matrix([calm])[0]["max_itl_s"] == 0.25


def test_what_went_wrong_is_said_in_words() -> None:
    bad = result(
        lost=(stream(prompt=3, failure="error", message="HTTP 500: no"),),
        altered=(stream(prompt=4, text="other"),),
        leaks={"engine-1: blocks": 2},
        unready=("engine-1",),
        bugs=1,
    )
    assert problems([result(), bad]) == [
        "kill tokenizer-1: lost: request 3: HTTP 500: no",
        "kill tokenizer-1: altered: request 4: 'other'",
        "kill tokenizer-1: held: engine-1: blocks 2",
        "kill tokenizer-1: not back: engine-1",
        "kill tokenizer-1: 1 unexpected exceptions in the logs",
    ]
    assert "1 LOST, 1 ALTERED, 1 LEAKS, 1 NOT BACK, 1 BUGS" in round_line(0, bad)
    assert round_line(0, result()).endswith(
        "2 streams, 1 equal, longest wait 5.0 s, longest pause 0.00 s, 1 allowed errors"
    )


def test_the_first_difference_names_the_request() -> None:
    expected = [stream(), stream(prompt=1)]
    assert first_difference(expected, expected) is None
    assert first_difference(expected, [stream(prompt=1, text="no")]) == "request 1: 'no' in place of 'ok'"
    assert first_difference(expected, [stream(failure="error", message="why")]) == "request 0 failed: why"


def test_requests_differ_and_are_the_same_each_time() -> None:
    assert prompts() == prompts()
    assert len(set(prompts())) == REQUESTS
    assert {prompt.temperature for prompt in prompts()} == {0.0, 0.8}


def test_faults_are_chosen_by_name() -> None:
    assert [fault.name for fault in chosen_faults("stop, kill,stop")] == ["stop", "kill"]
    chosen = {fault.name: set(targets) for fault, targets in chosen_faults("cut:bus,cut:rank 0,kill:bus,kill").items()}
    assert chosen == {"cut": {"bus", "rank 0"}, "kill": set()}
    assert [fault.name for fault in chosen_faults(None)] == list(FAULTS)
    with pytest.raises(CommandError, match="'fire' is none of kill, "):
        chosen_faults("kill,fire")
