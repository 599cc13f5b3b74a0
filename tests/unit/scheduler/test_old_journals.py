"""Journals that were recorded before messages were renamed are decided again, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.scheduler.journal import EVENTS, Decision
from services.scheduler.old_journals import RENAMED, names_of
from services.scheduler.replay import replay
from shared.journals.journal import JOURNAL_VERSION, Journal

JOURNALS = Path(__file__).parents[2] / "data" / "journals"
"""Of a prefill and a decode engine, recorded with the former names: hand-overs, one that nobody took, a client's trace
context, stop strings spelled like messages, cancelled, refused and lost requests, a store that went."""


@pytest.mark.parametrize(("side", "events", "outputs"), [("prefill", 30, 37), ("decode", 70, 97)])
def test_what_was_recorded_under_former_names_is_decided_again(side: str, events: int, outputs: int) -> None:
    path = JOURNALS / f"before-adr-15-{side}.journal"
    with Journal(path) as journal:
        assert journal.header.version == 1
    result = replay(path)
    assert result.difference is None
    assert (result.events, result.outputs, result.torn) == (events, outputs, False)


def test_every_former_name_of_an_event_leads_to_an_event_of_today() -> None:
    former = set()
    for path in JOURNALS.iterdir():
        with Journal(path) as journal:
            former |= {msgspec.msgpack.decode(record, type=Decision).event for record in journal}
    assert {RENAMED.get(name, name) for name in former} <= EVENTS.keys()
    assert {"Generate", "DetokenizerLost", "Transferred", "NotTaken", "StoreAnswered"} <= former


def test_no_former_name_stands_for_two_of_today() -> None:
    assert len(set(RENAMED.values())) == len(RENAMED)
    assert not RENAMED.keys() & set(RENAMED.values())


def test_todays_journals_are_read_as_they_are() -> None:
    assert names_of(JOURNAL_VERSION).event("Generate", b"\x90") == ("Generate", b"\x90")
    assert names_of(JOURNAL_VERSION).output("SendPlan", b"\x90") == ("SendPlan", b"\x90")


def test_version_10_says_nothing_of_steps() -> None:
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    today, then = ["all", 2, False, False, 9], ["all", 2, False, False]
    news = [[*range(9), each, 10, None, b"", False] for each in (today, None)]
    _, plan = names_of(10).output("SendPlan", encode({"plan": [1, 0, [], news]}))
    assert decode(plan) == {"plan": [1, 0, [], [[*range(9), each, 10, None, b"", False] for each in (then, None)]]}
    assert names_of(10).output("SendHandOver", b"\x90") == ("SendHandOver", b"\x90")


def test_version_7_says_not_of_which_tokens_embeddings_are() -> None:
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    today, then = ["float32", 8, b"", [[3, 1]]], ["float32", 8, b""]
    news = [[*range(11), each] for each in (today, None)]
    _, plan = names_of(7).output("SendPlan", encode({"plan": [1, 0, [], news]}))
    assert decode(plan) == {"plan": [1, 0, [], [[*range(11), each] for each in (then, None)]]}
    _, passed = names_of(7).output("SendHandOver", encode({"generate": ["GenerateRequest", [*range(24), today]]}))
    assert decode(passed) == {"generate": ["GenerateRequest", [*range(24), then]]}
    assert names_of(7).output("SendToGateway", b"\x90") == ("SendToGateway", b"\x90")


def test_version_9_says_not_where_rows_are_kept() -> None:
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    today, then = ["float32", 8, b"", [], [], [], []], ["float32", 8, b"", [], [], []]
    _, plan = names_of(9).output("SendPlan", encode({"plan": [1, 0, [], [[*range(11), today]]]}))
    assert decode(plan) == {"plan": [1, 0, [], [[*range(11), then]]]}
    _, passed = names_of(9).output("SendHandOver", encode({"generate": ["GenerateRequest", [*range(24), today, 25]]}))
    assert decode(passed) == {"generate": ["GenerateRequest", [*range(24), then, 25]]}


def test_version_8_says_not_how_images_lie() -> None:
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    today, then = ["float32", 8, b"", [[3, 4]], [[1, 2, 2]]], ["float32", 8, b"", [[3, 4]]]
    news = [[*range(11), each] for each in (today, None)]
    _, plan = names_of(8).output("SendPlan", encode({"plan": [1, 0, [], news]}))
    assert decode(plan) == {"plan": [1, 0, [], [[*range(11), each] for each in (then, None)]]}
    _, passed = names_of(8).output(
        "SendHandOver", encode({"generate": ["GenerateRequest", [*range(24), today, None, False, None]]})
    )
    assert decode(passed) == {"generate": ["GenerateRequest", [*range(24), then, None]]}
    assert names_of(8).output("SendTokens", b"\x90") == ("SendTokens", b"\x90")


def test_version_7_says_nothing_of_traces() -> None:
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    _, passed = names_of(7).output("SendHandOver", encode({"generate": ["GenerateRequest", [*range(24), None, 25]]}))
    assert decode(passed) == {"generate": ["GenerateRequest", [*range(24), None]]}
    _, tokens = names_of(7).output("SendTokens", encode({"batch": ["e", 1, 0, [list(range(16))], []]}))
    assert decode(tokens) == {"batch": ["e", 1, 0, [list(range(15))], []]}


def test_version_6_says_nothing_of_embeddings() -> None:
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    _, plan = names_of(6).output("SendPlan", encode({"plan": [1, 0, [], [list(range(12))]]}))
    assert decode(plan) == {"plan": [1, 0, [], [list(range(11))]]}
    _, passed = names_of(6).output("SendHandOver", encode({"generate": ["GenerateRequest", list(range(25))]}))
    assert decode(passed) == {"generate": ["GenerateRequest", list(range(24))]}
    assert names_of(6).output("SendToGateway", b"\x90") == ("SendToGateway", b"\x90")


def test_version_5_says_nothing_of_adapters() -> None:
    """Nor of logits processors, nor of blocks whose parts differ in size."""
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    new: list[Any] = list(range(11))
    new[5] = list(range(18))
    _, plan = names_of(5).output("SendPlan", encode({"plan": [1, 0, [], [new], [], [], [], [], None, [b"x"]]}))
    kept: list[Any] = list(range(10))
    kept[5] = list(range(17))
    assert decode(plan) == {"plan": [1, 0, [], [kept], [], [], [], [], None]}
    generation: list[Any] = list(range(24))
    generation[7] = list(range(18))
    _, passed = names_of(5).output("SendHandOver", encode({"generate": ["GenerateRequest", generation]}))
    assert [len(decode(passed)["generate"][1]), len(decode(passed)["generate"][1][7])] == [23, 17]
    _, asked = names_of(5).output("SendStoreRequest", encode({"request": ["Attach", list(range(7))]}))
    assert decode(asked) == {"request": ["Attach", list(range(6))]}
    assert names_of(5).output("SendToGateway", b"\x90") == ("SendToGateway", b"\x90")


def test_version_4_says_nothing_of_vectors() -> None:
    """Tokens, plans and hand-overs have today's fields in front of those."""
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    _, tokens = names_of(4).output("SendTokens", encode({"batch": [0, 1, 2, [], *range(4, 9)]}))
    assert decode(tokens) == {"batch": [0, 1, 2, [], *range(4, 8)]}
    _, plan = names_of(4).output("SendPlan", encode({"plan": [1, 0, [], [[*range(5), [], *range(6, 10)]], []]}))
    assert decode(plan) == {"plan": [1, 0, [], [[*range(5), [], *range(6, 9)]], []]}
    generation = [*range(7), [], *range(8, 23)]
    _, passed = names_of(4).output("SendHandOver", encode({"generate": ["GenerateRequest", generation]}))
    assert decode(passed) == {"generate": ["GenerateRequest", generation[:22]]}


def test_a_ranks_report_of_its_transfers_is_read_under_its_former_name() -> None:
    former = {"rank": 0, "epoch": 7, "received": 1, "published": 1, "transfers": ["Transferred", 0, 7, 2, []]}
    name, content = names_of(1).event("RankProgress", msgspec.msgpack.encode(former))
    event = msgspec.msgpack.decode(content, type=EVENTS[name])
    assert event.transfers is not None
    assert (event.transfers.rank, event.transfers.epoch, event.transfers.done) == (0, 7, 2)


def test_version_6_says_nothing_of_checkpoints() -> None:
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    plan = [1, 0, [], [], [], [], [], [], None, [b"x"]]
    name, output = names_of(6).output("SendPlan", encode({"plan": [*plan, [[1, 0]], []]}))
    assert (name, decode(output)) == ("SendPlan", {"plan": plan})
    assert names_of(6).output("SendToGateway", b"\x90") == ("SendToGateway", b"\x90")
