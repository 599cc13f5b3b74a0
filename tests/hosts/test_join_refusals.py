"""What does not fit is refused at `baton join`, with field, value and what is allowed, and nothing is started."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from deploy.chaos.clock import NOT_THERE, FakeClock, faketime_library
from deploy.model_choice import DEMO_MODEL
from tests.support.cluster.namespace_hosts import Host, Hosts


@pytest.fixture(scope="module")
def a(hosts: Hosts) -> Host:
    first = hosts["a"]
    first.first("--kvstore-memory=0", "--gateways=1")
    return first


@pytest.fixture
def b(hosts: Hosts, a: Host) -> Host:
    """A host that has not joined."""
    return hosts["b"]


def refusal(host: Host, token: str, *argv: str, **environment: str) -> str:
    """What `join` says."""
    done = host.baton("join", *argv, environment={"BATON_JOIN_TOKEN": token, **environment}, timeout=120.0)
    assert done.returncode in (1, 2), done.stdout
    assert not (host.run_dir / "cluster").exists()
    assert not (host.run_dir / "state.json").exists()
    assert "Traceback" not in done.stderr
    return done.stderr.strip()


@pytest.mark.timeout(600)
def test_names_and_tokens(a: Host, b: Host) -> None:
    token, short = a.token(), a.token("--ttl=0.0003")  # a second; one that has expired goes when another is made
    assert refusal(b, token, "--node=a") == (
        f"baton: --node a: the first host at {a.address} has this name; give another"
    )
    assert refusal(b, token[:-8], "--node=b").startswith("baton: token: it is none that `baton token` printed")
    time.sleep(1.1)
    listed = a.baton("token", "--list").stdout
    assert "expired" in listed
    assert refusal(b, short, "--node=b").endswith(": it has expired; `baton token` on a makes another")
    for line in listed.splitlines():
        assert a.baton("token", f"--revoke={line.split()[0]}").returncode == 0
    assert refusal(b, token, "--node=b").endswith(
        ": it is unknown here, or was revoked; `baton token` on a makes another"
    )


@pytest.mark.timeout(600)
def test_addresses_that_nobody_reaches(a: Host, b: Host) -> None:
    token = a.token()
    said = refusal(b, token, "--node=b", "--advertise-address=127.0.0.1")
    assert said == (
        "baton: --advertise-address 127.0.0.1 (--route-port 6222): a cannot reach it (it is the loopback of each "
        "host); an address and a port that all other hosts reach"
    )
    b.cut()
    try:
        said = refusal(b, token, "--node=b")
        assert said.startswith(f"baton: token: the first host cannot be reached at {a.address}:6221 (")
    finally:
        b.heal()
    said = refusal(b, token, "--node=b", "--advertise-address=10.99.0.1")
    assert said.startswith("baton: --advertise-address 10.99.0.1 (--route-port 6222): this host cannot listen there (")


@pytest.mark.timeout(600)
def test_another_model(a: Host, b: Host, tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-5] ^= 0x10
    weights.write_bytes(content)
    said = refusal(b, a.token(), "--node=b", f"--model={tmp_path / 'model'}")
    assert said.startswith("baton: --model weights ")
    assert said.endswith(", as on a: the two hosts have different models")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("shift", "where"), [(30, "ahead"), (-30, "behind")])
def test_a_clock_that_is_wrong(a: Host, b: Host, tmp_path: Path, shift: int, where: str) -> None:
    library = faketime_library()
    if library is None:
        pytest.skip(NOT_THERE)
    clock = FakeClock(library, tmp_path / "clock")
    clock.shift(shift)
    said = refusal(b, a.token(), "--node=b", **clock.environment())
    assert said.startswith(("baton: clock 30.", "baton: clock 29.")), said
    assert said.endswith(f" s {where}: at most 1 s; set both hosts' clocks by NTP")


@pytest.mark.timeout(600)
def test_a_member_that_is_there(a: Host, b: Host, tmp_path: Path) -> None:
    b.join(a.token(), "--kvstore-memory=64MiB")
    done = b.baton(
        "join",
        "--node=b",
        "--route-port=6333",
        f"--run-dir={tmp_path}",
        environment={"BATON_JOIN_TOKEN": a.token()},
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"baton: --node b: a host of this name is a member, and there, at {b.address}; give another name\n"
    )
    assert "a stack runs in" in b.baton("join", "--node=b", environment={"BATON_JOIN_TOKEN": a.token()}).stderr
    assert "tokens are made on a at" in b.baton("token").stderr
