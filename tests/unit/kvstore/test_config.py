"""What a store is told of what lies below and beside it, and how it says that it cannot have that."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import lower_tiers as below
from kvstore.config import KvStoreConfig
from shared.config import ConfigError, load_config

NEEDED = ("--node", "n", "--directory", "d")


def configured(*flags: str) -> KvStoreConfig:
    return load_config("kvstore", KvStoreConfig, [*NEEDED, *flags], {})


def tls(folder: Path, *, without: str = "") -> list[str]:
    files = {"cert": folder / "cert", "key": folder / "key", "ca": folder / "ca"}
    return [part for what, file in files.items() if what != without for part in (f"--transfer-tls-{what}", str(file))]


def test_by_default_there_is_nothing_below_and_beside() -> None:
    assert below.redis_tier(configured()) is None
    assert below.peer_nodes(configured()) is None


@pytest.mark.parametrize("without", ["cert", "key", "ca"])
def test_half_a_tls_is_refused(without: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="all three, or none"):
        configured("--transfer-port", "0", *tls(tmp_path, without=without))


def test_tls_without_a_port_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without transfer_port"):
        configured(*tls(tmp_path))


def test_a_certificate_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(below.TierUnavailable, match=str(tmp_path / "cert")):
        below.peer_nodes(configured("--transfer-port", "0", *tls(tmp_path)))


async def test_a_redis_url_that_is_none_is_refused_without_its_password() -> None:
    with pytest.raises(below.TierUnavailable, match="redis-url") as refused:
        below.redis_tier(configured("--redis-url", "http://:secret@127.0.0.1"))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "known_as"),
    [
        ((), "127.0.0.1"),
        (("--transfer-host", "10.0.0.7"), "10.0.0.7"),
        (("--transfer-host", "10.0.0.7", "--transfer-advertise", "node-7.example"), "node-7.example"),
        (("--transfer-host", "0.0.0.0", "--transfer-advertise", "10.0.0.7"), "10.0.0.7"),
    ],
)
def test_others_are_told_a_name_that_they_can_reach(flags: tuple[str, ...], known_as: str) -> None:
    assert below.known_as(configured(*flags)) == known_as


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_where_every_address_is_listened_on_others_are_told_the_hosts_name(wildcard: str) -> None:
    assert below.known_as(configured("--transfer-host", wildcard)) not in ("", wildcard)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "node-1"])
def test_strangers_fetch_no_blocks_unless_they_may(host: str) -> None:
    reached = ["--node=n", "--directory=/tmp/x", "--transfer-port=0", f"--transfer-host={host}"]
    with pytest.raises(ConfigError, match="whoever reaches it could fetch every block"):
        load_config("kvstore", KvStoreConfig, reached, {})
    tls = ["--transfer-tls-cert=c", "--transfer-tls-key=k", "--transfer-tls-ca=a"]
    for allowed in (tls, ["--insecure"], ["--transfer-host=127.0.0.1"]):
        load_config("kvstore", KvStoreConfig, [*reached, *allowed], {})
