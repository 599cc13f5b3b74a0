"""From what was typed about the KV store to a `StoreSpec`."""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

from deploy.cli.errors import CommandError
from deploy.supervisor.arenas import default_memory, fits, free_memory, shared_memory
from deploy.supervisor.spec import EmbeddedRedis, OutsideRedis, StoreSpec
from shared.config import parse_bytes
from shared.ids import NodeId, checked_instance

REDIS_SCHEMES = ("redis", "rediss", "unix")


def store_choice(
    *, memory: str | None, node: str | None, redis: bool, redis_memory: str, redis_url: str | None
) -> StoreSpec | None:
    """None: no store. Raises CommandError."""
    if redis and redis_url is not None:
        raise CommandError("--redis starts a server, --redis-url names one: choose", status=2)
    size = _store_memory(memory)
    if not size:
        if redis or redis_url is not None:
            raise CommandError("Redis is a tier of the KV store, and there is none: --kvstore-memory SIZE", status=2)
        return None
    return StoreSpec(node=_node(node), memory=size, redis=_redis(redis, redis_memory, redis_url))


def _store_memory(asked: str | None) -> int:
    free = free_memory()
    if asked is None:
        return default_memory(free)
    size = _size("--kvstore-memory", asked)
    if not fits(size, free):
        raise CommandError(f"--kvstore-memory {asked}: {shared_memory()} has {free / 2**20:.0f} MiB left")
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


def _node(asked: str | None) -> NodeId:
    """This machine's name, as far as a subject can hold it."""
    if asked is None:
        return NodeId(re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64] or "here")
    try:
        return NodeId(checked_instance(asked))
    except ValueError:
        raise CommandError(f"--node {asked}: 1 to 64 of A-Z a-z 0-9 _ - are allowed", status=2) from None
