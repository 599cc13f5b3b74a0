"""Who may join a stack, and what the others are told."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from deploy.supervisor.cluster.admission import (
    MAX_CLOCK_OFFSET,
    AdmissionRules,
    ClusterMember,
    join_refusal,
    shared_settings,
    token_refusal,
)
from deploy.supervisor.cluster.messages import JoinRequest, TokenProof
from deploy.supervisor.cluster.model_fingerprint import ModelFingerprint
from deploy.supervisor.launch import SECRETS
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.ids import NodeId
from shared.protocol import MIN_PROTOCOL, PROTOCOL

MODEL = ModelFingerprint("c0", "70", "3e")
RULES = AdmissionRules(node=NodeId("a"), address="10.0.0.1", model=MODEL)
REQUEST = JoinRequest(
    token=TokenProof("id", "secret"),
    node="b",
    address="10.0.0.2",
    route_port=6222,
    protocol=PROTOCOL,
    min_protocol=MIN_PROTOCOL,
    block_size=BLOCK_SIZE,
    model=MODEL,
    clock_offset=0.3,
    clock_uncertainty=0.1,
    signing_request="",
)
B = NodeId("b")


def said(**changed: Any) -> str | None:
    refused = join_refusal(replace(REQUEST, **changed), RULES, {}, {})
    return None if refused is None else str(refused)


def test_a_host_like_the_first_one_may_join() -> None:
    assert said() is None
    assert said(protocol=PROTOCOL + 1) is None, "newer, and still speaks ours"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"node": "b.2"}, "--node 'b.2': 1 to 32 of A-Z a-z 0-9 _ - are allowed"),
        ({"node": "b" * 33}, f"--node {'b' * 33}: 1 to 32 of A-Z a-z 0-9 _ - are allowed"),
        ({"node": "a"}, "--node a: the first host at 10.0.0.1 has this name; give another"),
        (
            {"address": "127.0.0.1"},
            "--advertise-address 127.0.0.1 (--route-port 6222): a cannot reach it (it is the loopback of each host); "
            "an address and a port that all other hosts reach",
        ),
        (
            {"protocol": 99, "min_protocol": 98},
            f"protocol 98 to 99: a speaks {MIN_PROTOCOL} to {PROTOCOL}; install the same release",
        ),
        ({"block_size": 64}, f"--block-size 64: {BLOCK_SIZE} tokens, as on a; one for a stack"),
        (
            {"model": replace(MODEL, weights="ff")},
            "--model weights ff: 3e, as on a: the two hosts have different models",
        ),
        (
            {"model": replace(MODEL, tokenizer="ff")},
            "--model tokenizer ff: 70, as on a: the two hosts have different models",
        ),
        ({"clock_offset": 5.0}, "clock 5.0 s behind: at most 1 s; set both hosts' clocks by NTP"),
        ({"clock_offset": -5.0}, "clock 5.0 s ahead: at most 1 s; set both hosts' clocks by NTP"),
    ],
)
def test_who_may_not_join_is_told_the_field_the_value_and_what_is_allowed(changed: dict[str, Any], text: str) -> None:
    assert said(**changed) == text


def test_a_clock_is_wrong_only_for_certain() -> None:
    assert said(clock_offset=MAX_CLOCK_OFFSET + 0.5, clock_uncertainty=0.5) is None
    assert said(clock_offset=MAX_CLOCK_OFFSET + 0.51, clock_uncertainty=0.5) is not None
    assert said(clock_offset=5.0, clock_uncertainty=-9.0) is not None


def test_a_name_is_one_hosts_and_that_one_comes_back() -> None:
    member = {B: ClusterMember("10.0.0.2", 6222)}
    assert join_refusal(REQUEST, RULES, member, {}) is None
    there = join_refusal(REQUEST, RULES, member, {B: "10.0.0.2"})
    assert str(there) == "--node b: a host of this name is a member, and there, at 10.0.0.2; give another name"
    elsewhere = join_refusal(replace(REQUEST, address="10.0.0.3"), RULES, member, {})
    assert "the member at 10.0.0.2, which is away" in str(elsewhere)


def test_a_token_that_lets_nobody_in_says_why() -> None:
    assert token_refusal("valid", "ab12", NodeId("a")) is None
    assert (
        str(token_refusal("expired", "ab12", NodeId("a")))
        == "token ab12: it has expired; `baton token` on a makes another"
    )
    assert "unknown here, or was revoked" in str(token_refusal("unknown", "ab12", NodeId("a")))


def test_settings_go_to_other_hosts_without_secrets_addresses_and_files() -> None:
    own = {
        "threads": "2",
        "journal": "/x",
        "transfer_host": "10.0.0.1",
        "keys_file": "/y",
        **dict.fromkeys(SECRETS, "s"),
    }
    found = shared_settings({"worker": {"dtype": "bfloat16", **own}, "*": {"nats_url": "x", "log_level": "debug"}})
    assert found == {"worker": {"dtype": "bfloat16"}, "*": {"log_level": "debug"}}
