"""Where ranks meet: nowhere that a stranger reaches, and in nobody's way."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch._C._distributed_c10d import Store

from services.worker.distributed import torch_ranks
from services.worker.distributed.torch_ranks import RankTopology, rendezvous_store

PATIENCE = timedelta(seconds=60)


def getaddrinfo_after(failures: int) -> Callable[..., Any]:
    """The system's, for a name that is not known at first."""
    left = [failures]

    def ask(host: str, port: int, **more: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1", port, **more)

    resolve = socket.getaddrinfo
    return ask


def listeners() -> set[tuple[str, int]]:
    """The addresses where this process takes connections."""
    return {(each.laddr.ip, each.laddr.port) for each in psutil.Process().net_connections() if each.status == "LISTEN"}


def meet(rendezvous: str) -> list[Store]:
    """Two ranks' stores."""

    def store(rank: int) -> Store:
        return rendezvous_store(rendezvous, RankTopology(rank, 2), PATIENCE)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(store, range(2)))


def say_something(stores: list[Store]) -> None:
    first, second = stores
    first.set("address", "here")
    assert second.get("address") == b"here"


def test_ranks_of_one_host_meet_in_a_file_and_at_no_port(tmp_path: Path) -> None:
    before = listeners()
    stores = meet(f"file://{tmp_path}/of#100%[odd]?name")
    assert listeners() == before
    say_something(stores)


def test_ranks_of_several_hosts_meet_at_the_first_ones_address_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    before = listeners()
    stores = meet(f"tcp://127.0.0.1:{port}")
    assert listeners() - before == {("127.0.0.1", port)}
    say_something(stores)


def test_a_name_may_come_later_than_its_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ranks, "RESOLVE_PAUSE", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo_after(5))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    say_something(meet(f"tcp://localhost:{port}"))


def test_a_name_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo_after(1000))
    with pytest.raises(socket.gaierror, match="Name or service not known"):
        rendezvous_store("tcp://engine-0.engine.baton:29500", RankTopology(1, 2), timedelta(seconds=0.5))
