"""From what was typed about the KV store to a `StoreSpec`."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from deploy.errors import CommandError
from deploy.supervisor.adoption import LeftStack
from deploy.supervisor.servers.arenas import default_memory, fits, free_memory
from deploy.supervisor.spec import EmbeddedRedis, OutsideRedis, StackSpec, StoreSpec
from deploy.supervisor.state_file import shared_memory
from shared.ids import NodeId, checked_instance
from shared.machine.home import expanded
from shared.settings import parse_bytes

REDIS_SCHEMES = ("redis", "rediss", "unix")


def store_choice(
    *,
    memory: str | None,
    node: str | None,
    redis: bool,
    redis_memory: str,
    redis_url: str | None,
    left: LeftStack | None = None,
) -> StoreSpec | None:
    """None: no store. What goes on without a supervisor (`left`) has its memory already. Raises CommandError."""
    if redis and redis_url is not None:
        raise CommandError("--redis starts a server, --redis-url names one: choose", status=2)
    size = _store_memory(memory, left.state.spec if left is not None else None)
    if not size:
        if redis or redis_url is not None:
            raise CommandError("Redis is a tier of the KV store, and there is none: --kvstore-memory SIZE", status=2)
        return None
    return StoreSpec(node=node_name(node), memory=size, redis=_redis(redis, redis_memory, redis_url))


def with_connector(values: Mapping[str, Any], memory: str | None) -> bool:
    """Whether a KV connector takes the place of the KV store. Raises CommandError where both are asked for."""
    if "kv_connector" not in values:
        if given := sorted({"kv_connector_extra_config", "kv_role"} & values.keys()):
            option = given[0].replace("_", "-")
            raise CommandError(f"--{option} is of a KV connector, and there is none: --kv-connector NAME", status=2)
        return False
    if memory is not None and memory != "0":
        raise CommandError("--kv-connector takes the place of the KV store: leave --kvstore-memory out", status=2)
    return True


def without_unused_store(spec: StackSpec, values: Mapping[str, Any]) -> StackSpec:
    """`spec` without a KV store where no engine would use one: those of models that an encoder reads for, or that are
    one. `values` are those of `given`. Raises CommandError where something was said of the store."""
    models = [(each.model, each.counts) for each in spec.models] or [(spec.model, spec.counts)]
    if any(counts.hands_over for _, counts in models):
        return spec
    check_store_unasked(values, models[0][0])
    return replace(spec, store=StoreSpec(), counts=replace(spec.counts, kvstore=0, engine_stores=False))


def check_store_unasked(values: Mapping[str, Any], model: Path | str) -> None:
    """Raises CommandError for an option of the KV store, which engines of `model` do not use."""
    for name in ("kvstore_memory", "redis", "redis_url", "kv_ssd", "kv_ssd_size", "kv_tier"):
        if values.get(name) not in (None, "0"):
            why = f"an encoder reads what is sent to {model}, and its engines use no KV store"
            raise CommandError(f"--{name.replace('_', '-')}: {why}; leave it out", status=2)


def ssd_settings(values: Mapping[str, Any], *, has_store: bool) -> dict[str, str]:
    """The store's folder on an SSD, as the store finds it from wherever it runs. Raises CommandError."""
    folder = values.get("kv_ssd")
    if not has_store and "kv_tier" in values:
        raise CommandError("--kv-tier is a tier of the KV store, and there is none: --kvstore-memory SIZE", status=2)
    if not has_store and (folder is not None or "kv_ssd_size" in values):
        raise CommandError("--kv-ssd is a tier of the KV store, and there is none: --kvstore-memory SIZE", status=2)
    if folder is None and "kv_ssd_size" in values:
        raise CommandError("--kv-ssd-size is the size of --kv-ssd FOLDER, which is not given", status=2)
    return {} if folder is None else {"kv_ssd": str(expanded(folder).absolute())}


def _store_memory(text: str | None, left: StackSpec | None) -> int:
    free, taken = free_memory(), left.store.memory if left is not None and left.counts.kvstore else None
    if text is None:
        return default_memory(free) if left is None else taken or 0
    size = _size("--kvstore-memory", text)
    if size not in (0, taken) and not fits(size, free):
        raise CommandError(
            f"--kvstore-memory {text}: {shared_memory()} has {free / 2**20:.0f} MiB left; take less, 0 for "
            "no store, or give a container more (docker run --shm-size)"
        )
    return size


def _size(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise CommandError(f"{option} {text}: {error}", status=2) from None


def _redis(embedded: bool, memory: str, url: str | None) -> EmbeddedRedis | OutsideRedis | None:
    if embedded:
        return EmbeddedRedis(memory=_size("--redis-memory", memory))
    if url is None:
        return None
    if urlsplit(url).scheme not in REDIS_SCHEMES:
        raise CommandError(f"--redis-url: {', '.join(f'{each}://…' for each in REDIS_SCHEMES)} are known", status=2)
    return OutsideRedis(url=url)


def node_name(text: str | None) -> NodeId:
    """The given name of this machine, or its own as far as a subject can hold it. Raises CommandError."""
    if text is None:
        return NodeId(re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64] or "here")
    try:
        return NodeId(checked_instance(text))
    except ValueError:
        raise CommandError(f"--node {text}: 1 to 64 of A-Z a-z 0-9 _ - are allowed", status=2) from None
