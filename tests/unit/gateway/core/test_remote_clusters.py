"""Which cluster a request goes to, and which clusters are refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from services.gateway.core.remote_clusters import CLUSTER_SILENCE, OwnCluster, RemoteClusters, Room
from shared.blocks import DEFAULT_BLOCK_SIZE
from shared.ids import Attempt, ClusterName, GatewayId, Incarnation, LoraId, ModelName, RequestId, relay_id
from shared.messages.federation import ClusterStatus, ModelRoom
from shared.messages.generation import SamplingOptions, StopConditions
from shared.messages.tokenizer import TextPrompt, Tokenize
from shared.protocol import PROTOCOL

MODEL = ModelName("demo")
EU, US, ASIA = ClusterName("eu"), ClusterName("us"), ClusterName("asia")
GATEWAY = GatewayId("gateway-1")
SINCE = 1000.0


def clusters(
    name: ClusterName = EU, *, since: float = SINCE, free: int = 0, fingerprint: bytes = b"m"
) -> RemoteClusters:
    made = RemoteClusters(OwnCluster(name, f"{name}:1", GATEWAY, Incarnation(1), fingerprint), since)
    made.record_rooms({MODEL: Room(free, 8)})
    return made


def status(name: ClusterName, free: int = 4, **fields: Any) -> ClusterStatus:
    known = ClusterStatus(
        cluster=name,
        address=f"{name}:1",
        gateway=GATEWAY,
        incarnation=Incarnation(1),
        since=SINCE,
        sent=0.0,
        models=(ModelRoom(MODEL, b"m", free, 8),),
        protocol=PROTOCOL,
        block_size=DEFAULT_BLOCK_SIZE,
    )
    return replace(known, **fields)


def tokenize(text: str = "hello", lora: LoraId | None = None) -> Tokenize:
    return Tokenize(
        request=RequestId("r"),
        attempt=Attempt(1),
        gateway=GATEWAY,
        model=MODEL,
        prompt=TextPrompt(text),
        sampling=SamplingOptions(seed=1),
        stopping=StopConditions(),
        lora=lora,
    )


def chosen(known: RemoteClusters, *avoid: ClusterName, text: str = "hello") -> ClusterName | None:
    return known.destination(tokenize(text), [relay_id(name, GATEWAY) for name in avoid])


def test_its_own_cluster_first_then_one_with_room_then_its_own_again() -> None:
    known = clusters(free=1)
    known.record_status(status(US, free=1), 0.0, 0.0)
    assert [chosen(known) for _ in range(4)] == [None, US, None, None]
    known.record_status(status(US, free=1), 1.0, 0.0)
    assert chosen(known) == US, "a status says what is left after all that was sent before"


def test_nobody_sends_to_a_cluster_that_is_drained_silent_avoided_full_or_without_the_model() -> None:
    for other in (status(US, drained=True), status(US, free=0), status(US, models=())):
        known = clusters()
        known.record_status(other, 0.0, 0.0)
        assert chosen(known) is None
    known.record_status(status(US), 0.0, 0.0)
    assert chosen(known, US) is None
    known.mark_full(US)
    assert chosen(known) is None
    known.record_status(status(US), 1.0, 0.0)
    assert known.expire(1.0 + CLUSTER_SILENCE) == []
    assert known.expire(1.1 + CLUSTER_SILENCE) == [relay_id(US, GATEWAY)]
    assert chosen(known) is None
    assert [entry.state for entry in known.listing()] == ["here", "silent"]


def test_a_request_for_an_adapter_goes_only_where_that_is() -> None:
    mine, theirs = LoraId(b"m" * 16), LoraId(b"t" * 16)
    known = clusters()
    known.record_rooms({MODEL: Room(0, 8, frozenset((mine, theirs)))})
    (said,) = known.own_status(0.0).models
    assert set(said.loras) == {mine, theirs}
    known.record_status(status(US, models=(ModelRoom(MODEL, b"m", 4, 8, (theirs,)),)), 0.0, 0.0)
    assert known.destination(tokenize(lora=mine), []) is None
    assert not known.has_room(MODEL, mine)
    assert known.destination(tokenize(lora=theirs), []) == US
    assert known.has_room(MODEL, theirs)


def test_a_drained_cluster_and_one_without_engines_send_on_even_to_where_requests_wait() -> None:
    known = clusters(free=4)
    known.record_status(status(US, free=0), 0.0, 0.0)
    assert chosen(known) is None
    assert known.switch(True, 5.0)
    assert chosen(known) == US
    assert not known.switch(False, 4.0), "an older word"
    assert known.switch(False, 6.0)
    known.record_rooms({})
    assert chosen(known) == US
    assert chosen(known, US) == US, "there is no other"


def test_prompts_that_begin_alike_go_to_the_same_cluster_unless_another_is_much_freer() -> None:
    known = clusters()

    def hear(free: int) -> None:
        known.record_status(status(US, free=free), 0.0, 0.0)
        known.record_status(status(ASIA, free=4), 0.0, 0.0)

    spread: Counter[ClusterName | None] = Counter()
    for number in range(100):
        hear(4)
        first = chosen(known, text=f"{number} " * 600 + "one")
        hear(4)
        assert chosen(known, text=f"{number} " * 600 + "two") == first
        spread[first] += 1
    assert min(spread[US], spread[ASIA]) > 25
    for number in range(100):
        hear(1)
        assert chosen(known, text=str(number)) == ASIA


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"protocol": 999, "min_protocol": 999}, "its release is too new: it speaks protocol 999"),
        ({"block_size": 32}, "its blocks hold 32 tokens, those here 16"),
        ({"models": (ModelRoom(MODEL, b"other", 4, 8),)}, "another model needs another --served-model-name"),
        ({"sent": -3.0}, "its clock is 3.0 s behind, at most 1 s are allowed"),
        ({"sent": 5.0}, "its clock is 5.0 s ahead"),
        ({"cluster": EU, "since": SINCE + 1}, "this cluster, at eu:1, has the name eu, too; give another --cluster"),
    ],
)
def test_a_cluster_that_does_not_fit_is_refused_with_the_reason(fields: dict[str, Any], words: str) -> None:
    known = clusters()
    for second in range(3):
        known.record_status(status(US, **fields), float(second), 0.0)
    entry = known.listing()[1]
    assert (entry.state, words in entry.reason) == ("refused", True), entry
    assert known.refusal(entry.name, entry.address) == entry.reason
    assert chosen(known) is None
    known.expire(100.0)
    assert len(known.listing()) == 1, "what is refused and gone is forgotten"


def test_one_late_status_is_no_wrong_clock() -> None:
    known = clusters()
    for delay in (4.0, 0.1, 3.0, 2.0):
        known.record_status(status(US), 0.0, delay)
    assert known.listing()[1].state == "ready"


def test_of_two_clusters_of_one_name_all_keep_the_one_that_was_there_first() -> None:
    known = clusters()
    known.record_status(status(US, address="b:1", since=7.0), 0.0, 0.0)
    known.record_status(status(US, address="a:1", since=8.0), 0.0, 0.0)
    assert [(entry.address, entry.state) for entry in known.listing()[1:]] == [("a:1", "refused"), ("b:1", "ready")]
    known.expire(100.0)
    known.record_status(status(US, address="a:1", since=8.0), 100.0, 0.0)
    assert known.refusal(US, "a:1") is None, "the name is free"
    late = clusters(US, since=9.0)
    late.record_status(status(US, address="b:1", since=7.0), 0.0, 0.0)
    late.record_status(status(EU), 0.0, 0.0)
    assert late.listing()[0].state == "refused"
    assert chosen(late) is None, "it takes no part"


def test_gateways_of_one_cluster_agree_on_the_switch_and_on_since_when_it_is_there() -> None:
    known = clusters()
    known.record_status(status(EU, since=SINCE - 5, drained=True, switched=3.0), 0.0, 0.0)
    said = known.own_status(50.0)
    assert (said.drained, said.switched, said.since, said.sent) == (True, 3.0, SINCE - 5, 50.0)
    assert len(known.listing()) == 1


def test_a_gateway_that_was_started_anew_has_lost_what_it_had() -> None:
    known = clusters()
    assert known.record_status(status(US), 0.0, 0.0) == []
    assert known.record_status(status(US), 1.0, 0.0) == []
    assert known.record_status(status(US, incarnation=Incarnation(2)), 2.0, 0.0) == [relay_id(US, GATEWAY)]
