"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in vLLM's shapes: adapters that come and go at run time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from typing import NoReturn, TypeVar

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

T = TypeVar("T")
LOAD_SECONDS = 120.0
"""Within which every engine must have read an adapter."""
UNLOAD_SECONDS = 30.0
MAX_CHANGES = 64
"""Adapters that a gateway loads and unloads at a time, those included that wait for another change of their name."""
REREAD_SECONDS = 1.0
"""How often it is looked whether another gateway has taken out what is waited for."""

_LOAD, _UNLOAD = msgspec.json.Decoder(LoadLoraRequest), msgspec.json.Decoder(UnloadLoraRequest)


class LoraEndpoints:
    """Enters adapters in the registry's file, which engines follow, and answers once all that are ready have: what was
    answered holds for engines that start later, too."""

    def __init__(self, cluster: ClusterView, registry: LoraRegistry | None) -> None:
        """`registry`: None: adapters cannot be loaded at run time."""
        self._cluster, self._registry = cluster, registry
        self._locks: dict[ModelName, asyncio.Lock] = {}
        """Of the names in `_open`: one change of a name at a time, so that none takes for its own what another one has
        brought about."""
        self._open: Counter[ModelName] = Counter()
        """Changes under way, or waiting, of each name."""

    async def load(self, call: Call) -> None:
        """With `load_inplace` an adapter of this name is unloaded before: its files may be others by now. Raises
        RequestError: 404 where this is not allowed or there is no adapter at the path, 400 where it cannot be
        served or its name is taken, 429 where many are loaded already, 503 where no engine is ready or one does not
        answer in time."""
        registry = self._allowed()
        wanted = decode_body(await call.body(), _LOAD)
        name, path = ModelName(wanted.lora_name), wanted.lora_path
        if "\0" in path:
            raise not_allowed("lora_path", path, "a folder's path has no NUL")
        async with self._changing(call, name):
            await self._load(registry, name, path, in_place=wanted.load_inplace)
        log.info("adapter loaded", extra={"adapter": name, "path": path})
        await call.respond(f"Success: LoRA adapter '{_shown(name)}' added successfully.".encode(), content_type=_TEXT)

    async def _load(self, registry: LoraRegistry, name: ModelName, path: str, *, in_place: bool) -> None:
        for card in self._cluster.models():
            if card.name == name:
                raise not_allowed("lora_name", name, "the model itself has this name")
            if card.lora(name) is not None and not in_place:
                hint = "If you want to load the adapter in place, set 'load_inplace' to True."
                raise _bad(f"The lora adapter '{_shown(name)}' has already been loaded. {hint}")
        if not self._cluster.ready_engines():
            raise RequestError(503, "no engine is ready", retry_after=1.0)
        if in_place and await self._take_out(registry, name):
            log.info("adapter unloaded, to be loaded anew", extra={"adapter": name})
        await self._add(registry, name, path)
        try:
            loaded = await self._loaded(registry, name, path)
        except asyncio.CancelledError:
            await asyncio.to_thread(registry.remove, name, path)
            raise
        refusal = self._refusal(name, path)
        if refusal is not None or not loaded:
            await self._give_up(registry, name, path, refusal)

    async def _loaded(self, registry: LoraRegistry, name: ModelName, path: str) -> bool:
        """Whether every engine has read the adapter, or one refused it, in time. Raises RequestError 400 where another
        gateway has taken it out meanwhile."""
        end = asyncio.get_running_loop().time() + LOAD_SECONDS
        while True:
            done = await until(lambda: self._everywhere(name) or self._refusal(name, path) is not None, REREAD_SECONDS)
            if (await self._of_file(asyncio.to_thread(registry.read))).get(name) != path:
                raise _bad(f"The lora adapter '{_shown(name)}' was unloaded while it was being loaded.")
            if done or asyncio.get_running_loop().time() > end:
                return done

    async def unload(self, call: Call) -> None:
        """Requests that have begun go on. Raises RequestError: 404 where this is not allowed or there is no such
        adapter, 400 where it was not loaded at run time, 429 where many are changed already, 503 where an engine does
        not answer in time."""
        registry = self._allowed()
        name = ModelName(decode_body(await call.body(), _UNLOAD).lora_name)
        async with self._changing(call, name):
            removed = await self._take_out(registry, name)
        if not removed:
            raise RequestError(404, f"The lora adapter '{_shown(name)}' cannot be found.", param="lora_name")
        log.info("adapter unloaded", extra={"adapter": name})
        await call.respond(f"Success: LoRA adapter '{_shown(name)}' removed successfully.".encode(), content_type=_TEXT)

    async def _take_out(self, registry: LoraRegistry, name: ModelName) -> bool:
        """Unloads an adapter, and waits until no engine serves it; False where there is none."""
        if not await self._of_file(asyncio.to_thread(registry.remove, name)):
            if any(card.lora(name) is not None for card in self._cluster.models()):
                text = "was given by --lora, and stays as long as its engines; or another gateway is unloading it."
                raise _bad(f"The lora adapter '{_shown(name)}' {text}")
            return False
        if not await until(lambda: not self._anywhere(name), UNLOAD_SECONDS):
            raise RequestError(503, f"some engine has not unloaded it within {UNLOAD_SECONDS:g} s, and will")
        return True

    @contextlib.asynccontextmanager
    async def _changing(self, call: Call, name: ModelName) -> AsyncIterator[None]:
        """Nothing else changes the adapter of this name here meanwhile. Who leaves as it waits changes nothing. Raises
        RequestError: 429 where too many are changed, 503 where others of the name take too long."""
        if self._open.total() >= MAX_CHANGES:
            text = f"{MAX_CHANGES} adapters are being loaded or unloaded, which is the limit; try again"
            raise RequestError(429, text, retry_after=1.0)
        self._open[name] += 1
        lock = self._locks.setdefault(name, asyncio.Lock())
        try:
            try:
                async with asyncio.timeout(LOAD_SECONDS):
                    await call.unless_left(lock.acquire())
            except TimeoutError:
                text = f"other changes of '{_shown(name)}' have taken {LOAD_SECONDS:g} s; try again"
                raise RequestError(503, text, retry_after=1.0) from None
            try:
                yield
            finally:
                lock.release()
        finally:
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name], self._locks[name]

    @staticmethod
    async def _of_file(work: Awaitable[T]) -> T:
        """What it comes to. Raises RequestError 503 where the registry's file cannot be read or written."""
        try:
            return await work
        except LoraRegistryError as error:
            raise RequestError(503, str(error), retry_after=1.0) from None

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
        await self._of_file(asyncio.to_thread(registry.remove, name, path))
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
