"""From what was typed about the KV store to what the supervisor makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cli.up import store
from deploy.cli.up.options import given, service_settings
from deploy.cli.up.store import ssd_settings, store_choice
from deploy.errors import CommandError
from deploy.supervisor.launch import SECRETS
from deploy.supervisor.servers.arenas import (
    DEFAULT_MEMORY,
    arena_directory,
    clear_leftovers,
    default_memory,
    remove_leftovers,
)
from deploy.supervisor.servers.redis import redis_config
from deploy.supervisor.spec import EmbeddedRedis, OutsideRedis, StoreSpec
from deploy.supervisor.state_file import directory_of, held
from shared.ids import NodeId


def choice(**typed: object) -> StoreSpec | None:
    plain = {"memory": "1MiB", "node": "n", "redis": False, "redis_memory": "8MiB", "redis_url": None}
    return store_choice(**(plain | typed))  # type: ignore[arg-type]


def test_a_store_has_memory_a_node_and_no_redis_unless_asked() -> None:
    assert choice() == StoreSpec(node=NodeId("n"), memory=2**20)
    assert choice(memory="0") is None


def test_no_store_needs_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "free_memory", lambda: 4096)
    assert choice(memory="0") is None
    assert choice(memory=None) is None


def test_redis_is_embedded_or_somebody_elses() -> None:
    assert choice(redis=True) == StoreSpec(node=NodeId("n"), memory=2**20, redis=EmbeddedRedis(memory=2**23))
    outside = choice(redis_url="rediss://:p@h:1/0")
    assert outside is not None
    assert outside.redis == OutsideRedis(url="rediss://:p@h:1/0")


def test_a_folder_on_an_ssd_is_found_from_wherever_the_store_runs() -> None:
    assert ssd_settings({"kv_ssd": "cache"}, has_store=True) == {"kv_ssd": str(Path.cwd() / "cache")}
    assert ssd_settings({"kv_ssd": "~/cache"}, has_store=True) == {"kv_ssd": str(Path.home() / "cache")}
    assert ssd_settings({}, has_store=False) == {}


@pytest.mark.parametrize(
    ("values", "has_store", "named"),
    [
        ({"kv_ssd": "/x"}, False, "--kvstore-memory"),
        ({"kv_ssd_size": "1GiB"}, True, "--kv-ssd FOLDER"),
    ],
)
def test_an_ssd_without_a_store_or_a_folder_is_named(values: dict[str, str], has_store: bool, named: str) -> None:
    with pytest.raises(CommandError, match=named):
        ssd_settings(values, has_store=has_store)


def test_the_node_is_called_as_the_machine_where_nobody_says_it() -> None:
    made = choice(node=None)
    assert made is not None
    assert made.node


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ({"memory": "much"}, "--kvstore-memory much"),
        ({"memory": "9999TiB"}, "MiB left"),
        ({"node": "a.b"}, "--node a.b"),
        ({"redis": True, "redis_url": "redis://h"}, "choose"),
        ({"redis": True, "memory": "0"}, "--kvstore-memory"),
        ({"redis_url": "redis://h", "memory": "0"}, "--kvstore-memory"),
        ({"redis_url": "http://:secret@h"}, "redis://"),
        ({"redis": True, "redis_memory": "x"}, "--redis-memory x"),
    ],
)
def test_what_cannot_be_is_named(typed: dict[str, object], named: str) -> None:
    with pytest.raises(CommandError) as error:
        choice(**typed)
    assert named in str(error.value)
    assert "secret" not in str(error.value)


def test_the_default_leaves_others_half_of_what_is_free() -> None:
    assert default_memory(100 * DEFAULT_MEMORY) == DEFAULT_MEMORY
    assert default_memory(2**26) == 2**25
    assert default_memory(2**20) == 0


def test_every_run_directory_has_arenas_of_its_own(tmp_path: Path) -> None:
    one, other = tmp_path / "a" / "default", tmp_path / "b" / "default"
    assert directory_of(one) != directory_of(other)
    here = arena_directory(one, keep=False)
    (here / "file").write_bytes(b"x")
    assert here == directory_of(one)
    assert not remove_leftovers(other)
    assert list(arena_directory(one, keep=True).iterdir()) == [here / "file"]
    assert not list(arena_directory(one, keep=False).iterdir())
    assert remove_leftovers(one)
    assert not here.exists()


def test_what_a_living_stack_has_is_no_leftover(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert not clear_leftovers(run_dir)
    assert not run_dir.exists()
    here = arena_directory(run_dir, keep=False)
    with held(run_dir):
        assert not clear_leftovers(run_dir)
        assert here.exists()
    assert clear_leftovers(run_dir)
    assert not here.exists()


def test_somebody_elses_link_in_that_place_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").touch()
    directory_of(tmp_path).symlink_to(victim)
    try:
        for keep in (False, True):
            with pytest.raises(FileExistsError):
                arena_directory(tmp_path, keep=keep)
        assert (victim / "file").exists()
    finally:
        directory_of(tmp_path).unlink()


def test_the_embedded_redis_writes_nothing_and_listens_on_loopback_only(tmp_path: Path) -> None:
    told = redis_config(1234, "p", 2**20, tmp_path).splitlines()
    assert {"bind 127.0.0.1", "port 1234", "requirepass p", 'save ""', "appendonly no"} <= set(told)
    assert {f"maxmemory {2**20}", "maxmemory-policy allkeys-lru"} <= set(told)


def test_tiers_of_packages_are_passed_on_together_and_by_environment_alone() -> None:
    urls = ["folder:///a", "lmcache://:secret@h"]
    settings = service_settings(given({"kv_tier": urls}))
    assert settings == {"kvstore": {"kv_tiers": "folder:///a,lmcache://:secret@h"}}
    assert "kv_tiers" in SECRETS
    with pytest.raises(CommandError, match="--kvstore-memory"):
        ssd_settings({"kv_tier": urls}, has_store=False)
