"""A rank serves what the registry's file says, and says what it cannot."""

from __future__ import annotations

from pathlib import Path

from services.worker.lora_watcher import LoraWatcher
from shared.ids import LoraId, ModelName
from shared.messages.model_card import LoraCard, LoraRefusal
from shared.models.lora_registry import AdapterRefused, LoraRegistry

ONE, TWO = ModelName("one"), ModelName("two")


class Adapters:
    """Refuses what is no folder."""

    def __init__(self) -> None:
        self.served: dict[ModelName, LoraCard] = {}
        self.read: list[ModelName] = []

    @property
    def cards(self) -> tuple[LoraCard, ...]:
        return tuple(self.served.values())

    def add(self, name: ModelName, folder: Path) -> LoraCard:
        self.read.append(name)
        if not folder.is_dir():
            raise AdapterRefused(f"{folder}: is no folder", missing=True)
        card = self.served[name] = LoraCard(name=name, id=LoraId(folder.name.encode().ljust(16)), rank=8)
        return card

    def remove(self, name: ModelName) -> None:
        del self.served[name]


async def test_adapters_come_and_go_with_the_file(tmp_path: Path) -> None:
    registry, adapters = LoraRegistry(tmp_path / "loras.json"), Adapters()
    watcher = LoraWatcher(registry)
    assert not await watcher.follow(adapters)
    registry.add(ONE, str(tmp_path))
    registry.add(TWO, "/nowhere")
    assert await watcher.follow(adapters)
    assert list(adapters.served) == [ONE]
    assert watcher.refusals == (LoraRefusal(TWO, "/nowhere", "/nowhere: is no folder", True),)
    assert not await watcher.follow(adapters), "nothing has changed"

    (tmp_path / "other").mkdir()
    registry.remove(ONE)
    registry.add(ONE, str(tmp_path / "other"))
    assert await watcher.follow(adapters)
    assert adapters.served[ONE].id.startswith(b"other"), "another folder under the same name"
    assert adapters.read == [ONE, TWO, ONE], "what was refused is not read again"
    registry.remove(ONE)
    registry.remove(TWO)
    assert await watcher.follow(adapters)
    assert (adapters.served, watcher.refusals) == ({}, ())

    registry.add(ONE, str(tmp_path))
    await watcher.follow(adapters)
    registry.path.write_text("{")
    assert not await watcher.follow(adapters)
    assert list(adapters.served) == [ONE], "a broken file changes nothing"
    registry.path.unlink()
    assert await watcher.follow(adapters)
    assert adapters.served == {}
