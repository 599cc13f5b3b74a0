"""The file of adapters: entries come and go as a whole, and what is wrong with it is said in words."""

from __future__ import annotations

import fcntl
from pathlib import Path

import msgspec
import pytest

from shared.ids import ModelName
from shared.models import lora_registry
from shared.models.lora_registry import (
    MAX_FILE_BYTES,
    MAX_REGISTERED_LORAS,
    NO_FILE,
    LoraRegistry,
    LoraRegistryError,
)


def test_what_was_added_is_read_until_it_is_removed(tmp_path: Path) -> None:
    registry, other = (LoraRegistry(tmp_path / "loras.json") for _ in range(2))
    assert (registry.version(), registry.read()) == (NO_FILE, {})
    registry.add(ModelName("poet"), "/a/poet")
    before = other.version()
    other.add(ModelName("org/pirate"), "/a/pirate")
    assert registry.version() not in (before, NO_FILE)
    assert list(registry.read().items()) == [("poet", "/a/poet"), ("org/pirate", "/a/pirate")]
    with pytest.raises(LoraRegistryError, match=r"lora_name = poet: .* has an adapter of this name"):
        registry.add(ModelName("poet"), "/elsewhere")
    assert not registry.remove(ModelName("poet"), "/elsewhere")
    assert registry.remove(ModelName("poet"), "/a/poet")
    assert not registry.remove(ModelName("poet"))
    assert other.read() == {"org/pirate": "/a/pirate"}
    assert not list(tmp_path.glob(".loras.json.*"))


def test_it_never_becomes_larger_than_what_is_read_of_it(tmp_path: Path) -> None:
    registry, long = LoraRegistry(tmp_path / "loras.json"), "/a" * (MAX_FILE_BYTES // 4)
    registry.add(ModelName("poet"), long)
    with pytest.raises(LoraRegistryError, match=f"it would be larger than the {MAX_FILE_BYTES} bytes"):
        registry.add(ModelName("pirate"), long)
    assert registry.remove(ModelName("poet"))
    registry.path.write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(LoraRegistryError, match=r"loras\.json: larger than the"):
        registry.read()


def test_a_process_that_hangs_in_a_change_holds_up_nobody_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_registry, "LOCK_SECONDS", 0.02)
    registry = LoraRegistry(tmp_path / "loras.json")
    with (tmp_path / "loras.json.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(LoraRegistryError, match="another process has been changing it"):
            registry.add(ModelName("poet"), "/a")
    registry.add(ModelName("poet"), "/a")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    registry = LoraRegistry(tmp_path / "loras.json")
    full = {str(number): "/a" for number in range(MAX_REGISTERED_LORAS)}
    registry.path.write_bytes(msgspec.json.encode({"loras": full}))
    with pytest.raises(LoraRegistryError, match="it has 256 adapters, as many as are allowed"):
        registry.add(ModelName("one more"), "/a")
    for text, complaint in (
        ("{", r"loras\.json"),
        ('{"lora": {}}', r"\blora\b"),
        ('{"loras": {"a": 3}}', r"\.loras"),
        (msgspec.json.encode({"loras": {**full, "x": "/a"}}).decode(), "257 adapters; at most 256"),
    ):
        registry.path.write_text(text)
        with pytest.raises(LoraRegistryError, match=complaint):
            registry.read()
    with pytest.raises(LoraRegistryError, match="No such file or directory"):
        LoraRegistry(tmp_path / "missing" / "loras.json").add(ModelName("a"), "/a")
