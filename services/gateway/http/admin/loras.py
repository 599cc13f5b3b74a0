"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in vLLM's shapes: adapters that come and go at run time."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

import msgspec

from services.gateway.api.admin.loras import LoadLoraRequest, UnloadLoraRequest
from services.gateway.api.errors import RequestError, abbreviated, decode_body, not_allowed
from services.gateway.core.cluster import ClusterView
from services.gateway.http.admin.waiting import until
from services.gateway.http.call import Call
from shared.ids import ModelName
from shared.messages.model_card import LoraRefusal
from shared.models.lora_registry import LoraRegistry, LoraRegistryError

log = logging.getLogger(__name__)

LOAD_SECONDS = 120.0
"""Within which every engine must have read an adapter."""
UNLOAD_SECONDS = 30.0

_LOAD, _UNLOAD = msgspec.json.Decoder(LoadLoraRequest), msgspec.json.Decoder(UnloadLoraRequest)


class LoraEndpoints:
    """Enters adapters in the registry's file, which engines follow, and answers once all that are ready have: what was
    answered holds for engines that start later, too."""

    def __init__(self, cluster: ClusterView, registry: LoraRegistry | None) -> None:
        """`registry`: None: adapters cannot be loaded at run time."""
        self._cluster, self._registry = cluster, registry

    async def load(self, call: Call) -> None:
        """With `load_inplace` an adapter of this name is unloaded before: its files may be others by now. Raises
        RequestError: 404 where this is not allowed or there is no adapter at the path, 400 where it cannot be
        served or its name is taken, 503 where no engine is ready or one does not answer in time."""
        registry = self._allowed()
        wanted = decode_body(await call.body(), _LOAD)
        name, path = ModelName(wanted.lora_name), wanted.lora_path
        if "\0" in path:
            raise not_allowed("lora_path", path, "a folder's path has no NUL")
        for card in self._cluster.models():
            if card.name == name:
                raise not_allowed("lora_name", name, "the model itself has this name")
            if card.lora(name) is not None and not wanted.load_inplace:
                in_place = "If you want to load the adapter in place, set 'load_inplace' to True."
                raise _bad(f"The lora adapter '{_shown(name)}' has already been loaded. {in_place}")
        if not self._cluster.ready_engines():
            raise RequestError(503, "no engine is ready", retry_after=1.0)
        if wanted.load_inplace and await self._take_out(registry, name):
            log.info("adapter unloaded, to be loaded anew", extra={"adapter": name})
        await self._add(registry, name, path)
        try:
            loaded = await until(lambda: self._everywhere(name) or self._refusal(name, path) is not None, LOAD_SECONDS)
        except asyncio.CancelledError:
            await asyncio.to_thread(registry.remove, name)
            raise
        refusal = self._refusal(name, path)
        if refusal is not None or not loaded:
            await self._give_up(registry, name, path, refusal)
        log.info("adapter loaded", extra={"adapter": name, "path": path})
        await call.respond(f"Success: LoRA adapter '{_shown(name)}' added successfully.".encode(), content_type=_TEXT)

    async def unload(self, call: Call) -> None:
        """Requests that have begun go on. Raises RequestError: 404 where this is not allowed or there is no such
        adapter, 400 where it was not loaded at run time, 503 where an engine does not answer in time."""
        registry = self._allowed()
        name = ModelName(decode_body(await call.body(), _UNLOAD).lora_name)
        if not await self._take_out(registry, name):
            raise RequestError(404, f"The lora adapter '{_shown(name)}' cannot be found.", param="lora_name")
        log.info("adapter unloaded", extra={"adapter": name})
        await call.respond(f"Success: LoRA adapter '{_shown(name)}' removed successfully.".encode(), content_type=_TEXT)

    async def _take_out(self, registry: LoraRegistry, name: ModelName) -> bool:
        """Unloads an adapter, and waits until no engine serves it; False where there is none."""
        try:
            removed = await asyncio.to_thread(registry.remove, name)
        except LoraRegistryError as error:
            raise RequestError(503, str(error)) from None
        if not removed:
            if any(card.lora(name) is not None for card in self._cluster.models()):
                raise _bad(f"The lora adapter '{_shown(name)}' was given by --lora, and stays as long as its engines.")
            return False
        if not await until(lambda: not self._anywhere(name), UNLOAD_SECONDS):
            raise RequestError(503, f"some engine has not unloaded it within {UNLOAD_SECONDS:g} s, and will")
        return True

    def _allowed(self) -> LoraRegistry:
        if self._registry is None:
            raise RequestError(
                404, "adapters cannot be loaded at run time here; the server's --lora-registry allows it"
            )
        return self._registry

    async def _add(self, registry: LoraRegistry, name: ModelName, path: str) -> None:
        try:
            await asyncio.to_thread(registry.add, name, path)
        except LoraRegistryError as error:
            raise _bad(str(error)) from None

    async def _give_up(
        self, registry: LoraRegistry, name: ModelName, path: str, refusal: LoraRefusal | None
    ) -> NoReturn:
        """Takes the adapter out again, and waits until no engine speaks of it, so that a next attempt starts clean."""
        await asyncio.to_thread(registry.remove, name)
        await until(lambda: not self._anywhere(name) and self._refusal(name, path) is None, UNLOAD_SECONDS)
        if refusal is None:
            raise RequestError(503, f"some engine has not loaded the adapter within {LOAD_SECONDS:g} s; it is given up")
        raise RequestError(404 if refusal.missing else 400, refusal.reason, param="lora_path")

    def _everywhere(self, name: ModelName) -> bool:
        """Whether every ready engine serves it, and requests find it by its name."""
        engines = self._cluster.ready_engines()
        known = any(card.lora(name) is not None for card in self._cluster.models())
        return known and all(each.model.lora(name) is not None for each in engines)

    def _anywhere(self, name: ModelName) -> bool:
        engines = self._cluster.ready_engines()
        known = engines and any(card.lora(name) is not None for card in self._cluster.models())
        return bool(known) or any(each.model.lora(name) is not None for each in engines)

    def _refusal(self, name: ModelName, path: str) -> LoraRefusal | None:
        refusals = (one for each in self._cluster.ready_engines() for one in each.lora_refusals)
        return next((one for one in refusals if (one.name, one.path) == (name, path)), None)


_TEXT = b"text/plain; charset=utf-8"


def _bad(message: str) -> RequestError:
    return RequestError(400, message, param="lora_name")


def _shown(name: str) -> str:
    return abbreviated(name)[1:-1]
