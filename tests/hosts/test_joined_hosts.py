"""Hosts join a stack: they serve, each has a bus server of its own, and whatever of them goes, no stream is lost.

The tests are in order: each leaves all hosts as it found them.
"""

from __future__ import annotations

import pytest

from tests.support.cluster.conversations import QUESTIONS
from tests.support.cluster.namespace_hosts import Host, Hosts, Streams

TOKENS = 1200
STORE = "--kvstore-memory=64MiB"
RETRIES = "baton_gateway_retries_total"


@pytest.fixture(scope="module")
def a(hosts: Hosts) -> Host:
    first = hosts["a"]
    first.first(STORE, "--gateways=1")
    return first


@pytest.fixture(scope="module")
def b(hosts: Hosts, a: Host) -> Host:
    second = hosts["b"]
    second.join(a.token(), STORE, *second.with_everything())
    return second


@pytest.fixture(scope="module")
def c(hosts: Hosts, a: Host, b: Host) -> Host:
    third = hosts["c"]
    third.join(a.token(), STORE, "--prefill=1")
    return third


@pytest.fixture(scope="module")
def streams(a: Host, b: Host) -> Streams:
    return Streams(a, QUESTIONS[:4], TOKENS)


@pytest.fixture(scope="module")
def undisturbed(streams: Streams) -> list[str]:
    return streams.texts()


@pytest.mark.timeout(600)
def test_each_host_shows_both_and_the_second_ones_engine_answers_as_the_first_ones(
    a: Host, b: Host, undisturbed: list[str]
) -> None:
    seen = a.until_ready("engine-1", "b-engine-1", "b-kvstore-1", "b-gateway-1")
    assert {row["host"] for name, row in seen.items() if name.startswith("b-")} == {"b"}
    assert {row["host"] for name, row in seen.items() if not name.startswith("b-")} == {"a"}
    assert b.until_ready("engine-1").keys() == seen.keys()
    assert {path.name for path in (b.run_dir / "cluster").iterdir()} >= {"host.key", "membership.json", "secret"}
    assert not (b.run_dir / "cluster" / "ca.key").exists(), "only the first host signs"

    assert b.baton("drain", "engine-1").returncode == 0
    a.until_ps(lambda rows: rows["engine-1"]["phase"] == "draining")
    steps = a.ps()["b-engine-1"]["detail"]["steps"]
    assert Streams(a, QUESTIONS[:2], TOKENS).texts() == undisturbed[:2]
    assert a.ps()["b-engine-1"]["detail"]["steps"] > steps
    assert a.baton("undrain", "engine-1").returncode == 0
    a.until_ready("engine-1")


@pytest.mark.timeout(600)
def test_each_host_scales_its_own_processes_and_another_ones_by_name(a: Host, b: Host) -> None:
    done = b.baton("scale", "tokenizer=2")
    assert done.stdout == "tokenizer=2: starting b-tokenizer-2.\n", done.stderr
    done = a.baton("scale", "tokenizer=1", "--host=b")
    assert done.stdout == "tokenizer=1: draining and stopping b-tokenizer-2.\n", done.stderr
    done = a.baton("scale", "tokenizer=1")
    assert done.stdout == "tokenizer=1: nothing to change.\n", done.stderr
    assert "host: no supervisor of a host 'c' is there" in a.baton("scale", "tokenizer=1", "--host=c").stderr
    a.until_ps(lambda rows: "b-tokenizer-2" not in rows)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_host_whose_bus_server_dies_loses_no_stream(
    a: Host, b: Host, streams: Streams, undisturbed: list[str], name: str
) -> None:
    host = {"a": a, "b": b}[name]
    pid = host.state.nats_pid
    assert streams.texts([host.kill_nats]) == undisturbed
    a.until_ready("engine-1", "b-engine-1")
    b.until_ready("engine-1", "b-engine-1")
    assert host.state.nats_pid != pid


@pytest.mark.timeout(600)
def test_a_link_that_is_cut_and_healed_loses_no_stream(
    a: Host, b: Host, streams: Streams, undisturbed: list[str]
) -> None:
    retries = a.metric(RETRIES)
    assert streams.texts([b.cut]) == undisturbed
    assert a.metric(RETRIES) > retries, "the second host had streams"
    assert Streams(a, QUESTIONS[:2], TOKENS).texts() == undisturbed[:2], "new ones are served here"
    b.heal()
    a.until_ready("engine-1", "b-engine-1")
    b.until_ready("engine-1", "b-engine-1")
    assert streams.texts() == undisturbed


@pytest.mark.timeout(600)
def test_a_host_that_loses_power_loses_no_stream_and_comes_back_without_a_token(
    a: Host, b: Host, streams: Streams, undisturbed: list[str]
) -> None:
    retries = a.metric(RETRIES)
    assert streams.texts([b.lose_power]) == undisturbed
    assert a.metric(RETRIES) > retries, "the second host had streams"
    a.until_ps(lambda rows: not any(name.startswith("b-") for name in rows))
    b.boot()
    b.start("join", STORE, *b.with_everything())
    a.until_ready("engine-1", "b-engine-1")
    assert streams.texts() == undisturbed


@pytest.mark.timeout(600)
def test_a_prompt_is_computed_on_one_host_and_continued_on_another(hosts: Hosts, a: Host, b: Host, c: Host) -> None:
    prompt = "Summarize: " + " ".join(f"{word} {n}." for n in range(40) for word in ("north", "south", "east"))
    alone, handed_over = (Streams(a, [prompt], 60, prefix_caching=caching).texts() for caching in (False, True))
    assert handed_over == alone
    rows = a.until_ready("engine-1", "b-engine-1", "c-prefill-1")
    assert rows["c-prefill-1"]["detail"]["steps"] > 0
    came = [rows[name]["detail"]["prefetched"] for name in ("kvstore-1", "b-kvstore-1")]
    assert sum(came) > 0, "blocks went from the store of one host to that of another as they were computed"


@pytest.mark.timeout(600)
def test_the_other_hosts_serve_while_the_first_one_is_gone(a: Host, b: Host, c: Host, undisturbed: list[str]) -> None:
    b.until_ready("engine-1", "b-engine-1", "c-prefill-1")
    assert Streams(b, QUESTIONS[:4], TOKENS).texts([a.lose_power]) == undisturbed
    assert b.metric(RETRIES) > 0, "the first host had streams"
    rows = b.until_ps(lambda rows: "engine-1" not in rows)
    assert rows["c-prefill-1"]["phase"] == "ready", "their bus servers meet without the first host's"
    at_b = Streams(b, QUESTIONS[:2], TOKENS)
    assert at_b.texts() == undisturbed[:2]
    a.boot()
    a.first(STORE, "--gateways=1")
    a.until_ready("engine-1", "b-engine-1")
    assert at_b.texts() == undisturbed[:2]
    assert Streams(a, QUESTIONS[:2], TOKENS).texts() == undisturbed[:2]


@pytest.mark.timeout(300)
def test_a_host_that_ends_in_order_takes_only_its_own_with_it(a: Host, b: Host, undisturbed: list[str]) -> None:
    assert b.baton("down").returncode == 0
    a.until_ps(lambda rows: not any(name.startswith("b-") for name in rows))
    assert Streams(a, QUESTIONS[:2], TOKENS).texts() == undisturbed[:2]
