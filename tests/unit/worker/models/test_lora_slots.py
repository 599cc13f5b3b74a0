"""Adapters that come while a rank serves: what cannot be read is refused, and ends nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.worker.models.config import ModelError
from services.worker.models.lora.slots import LoraSettings, LoraSlots
from shared.ids import ModelName
from shared.models.lora_registry import AdapterRefused


class Unread:
    """A model whose adapters cannot be read."""

    def read(self, name: ModelName, folder: Path) -> None:
        raise ModelError(f"{folder}: no")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("~no-such-user/a", "lora_path = '~no-such-user/a': there is no home"),
        ("/nowhere", "/nowhere: no"),
        ("a" * 300, "aaa: no"),
        ("a/" * 2500, "a: no"),
    ],
)
def test_a_path_that_is_none_is_refused(path: str, reason: str) -> None:
    """It stands in the registry's file, which every rank follows: an error would end them all, and their successors."""
    model: Any = Unread()
    slots = LoraSlots(model, LoraSettings((), 1, 8, at_run_time=True))
    with pytest.raises(AdapterRefused, match=reason) as refused:
        slots.add(ModelName("a"), Path(path))
    assert refused.value.missing
    assert slots.cards == ()
