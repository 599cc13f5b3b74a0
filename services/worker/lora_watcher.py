"""Keeps the adapters of a rank those of the registry's file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from services.worker.backend import AdapterStore
from shared.ids import ModelName
from shared.messages.model_card import LoraRefusal
from shared.models.lora_registry import NO_FILE, AdapterRefused, LoraRegistry, LoraRegistryError, RegistryVersion

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25
MAX_REASON = 500
"""Characters of a refusal that each heartbeat repeats."""


class LoraWatcher:
    """Owns which of the file's adapters this rank serves, and why not the others. Files are read beside the event
    loop and the thread that computes."""

    def __init__(self, registry: LoraRegistry) -> None:
        self._registry = registry
        self._version: RegistryVersion | None = NO_FILE
        """Of what was read last; None: it could not be."""
        self._served: dict[ModelName, str] = {}
        self._refusals: dict[ModelName, LoraRefusal] = {}
        self._error: str | None = None

    @property
    def refusals(self) -> tuple[LoraRefusal, ...]:
        """The adapters of the file that cannot be served, as it is now."""
        return tuple(self._refusals.values())

    async def run(self, adapters: AdapterStore, changed: Callable[[], Awaitable[None]]) -> None:
        """Follows the file until it is cancelled; calls `changed` whenever something is served or refused that was
        not, or no longer."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if await self.follow(adapters):
                await changed()

    async def follow(self, adapters: AdapterStore) -> bool:
        """Reads the file if it has changed, and what is new in it; whether anything was. A file that cannot be read
        changes nothing, and is logged once."""
        try:
            version = await asyncio.to_thread(self._registry.version)
            if version == self._version:
                return False
            wanted = await asyncio.to_thread(self._registry.read)
        except LoraRegistryError as error:
            if str(error) != self._error:
                log.error("adapters stay as they are", extra={"reason": str(error)})
            self._error, self._version = str(error), None
            return False
        self._version, self._error = version, None
        for name in [name for name, path in self._served.items() if wanted.get(name) != path]:
            del self._served[name]
            adapters.remove(name)
            log.info("adapter unloaded", extra={"adapter": name})
        self._refusals = {name: each for name, each in self._refusals.items() if wanted.get(name) == each.path}
        for name, path in wanted.items():
            if name not in self._served and name not in self._refusals:
                await self._add(adapters, name, path)
        return True

    async def _add(self, adapters: AdapterStore, name: ModelName, path: str) -> None:
        try:
            card = await asyncio.to_thread(adapters.add, name, Path(path))
        except AdapterRefused as refused:
            self._refusals[name] = LoraRefusal(name, path, str(refused)[:MAX_REASON], refused.missing)
            log.error("adapter refused", extra={"adapter": name, "reason": str(refused)})
        else:
            self._served[name] = path
            log.info("adapter loaded", extra={"adapter": name, "id": card.id.hex(), "rank": card.rank})
