"""Hosts that have no checkpoint join, get it from the others, and serve it: the same texts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deploy.model_choice import DEMO_MODEL
from tests.support.cluster.conversations import QUESTIONS
from tests.support.cluster.namespace_hosts import Host, Hosts, Streams

TOKENS = 60
NO_STORE = "--kvstore-memory=0"


@pytest.fixture(scope="module")
def checkpoint(hosts: Hosts) -> Path:
    folder = hosts.folder / "models" / "checkpoint"
    shutil.copytree(DEMO_MODEL, folder)
    return folder


@pytest.fixture(scope="module")
def a(hosts: Hosts, checkpoint: Path) -> Host:
    first = hosts["a"]
    first.first(NO_STORE, "--gateways=1", f"--model={checkpoint}")
    return first


@pytest.fixture(scope="module")
def b(hosts: Hosts, a: Host, checkpoint: Path) -> Host:
    second = hosts["b"]
    second.hide(checkpoint.parent)
    return second


@pytest.mark.timeout(600)
def test_a_host_without_the_model_gets_it_from_another_and_answers_the_same(a: Host, b: Host, checkpoint: Path) -> None:
    streams = Streams(a, QUESTIONS[:2], TOKENS)
    undisturbed = streams.texts()
    joining = {"BATON_JOIN_TOKEN": a.token()}
    refused = b.baton("join", "--node=b", "--model-source=local", NO_STORE, environment=joining)
    assert "which is not here; say where it is" in refused.stderr
    b.join(joining["BATON_JOIN_TOKEN"], NO_STORE, *b.with_everything())
    fetched = b.run_dir / "fetched" / "model"
    for path in checkpoint.iterdir():
        if path.suffix in (".safetensors", ".json", ".jinja"):
            assert (fetched / path.name).read_bytes() == path.read_bytes()
    a.until_ready("engine-1", "b-engine-1")
    assert a.baton("drain", "engine-1").returncode == 0
    a.until_ps(lambda rows: rows["engine-1"]["phase"] == "draining")
    assert streams.texts() == undisturbed
    assert a.baton("undrain", "engine-1").returncode == 0
    a.until_ready("engine-1")


@pytest.mark.timeout(600)
def test_a_host_gets_it_from_all_and_comes_back_without_the_first(
    hosts: Hosts, a: Host, b: Host, checkpoint: Path
) -> None:
    a.until_ready("b-engine-1")
    c = hosts["c"]
    c.hide(checkpoint.parent)
    c.join(a.token(), NO_STORE)
    servers = (c.run_dir / "cluster" / "membership.json").read_text()
    assert f"{a.address}:6223" in servers
    assert f"{b.address}:6223" in servers
    assert c.baton("down").returncode == 0
    (c.run_dir / "fetched" / "complete").unlink()
    with (c.run_dir / "fetched" / "model" / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    a.lose_power()
    c.start("join", NO_STORE)
    b.until_ready("b-engine-1", "c-engine-1")
