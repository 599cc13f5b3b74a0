"""Records in Redis: a hash each, sorted sets that order them, and Lua scripts that are the transactions."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast

from services.gateway.database.records import (
    MAX_LISTED,
    MAX_READ_CHUNKS,
    MAX_REMOVED,
    READ_BYTES,
    Database,
    DatabaseUnavailable,
    Record,
    RecordLimits,
    RecordUnknown,
    Usage,
)

CONNECTIONS = 8
CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 5.0
"""Seconds for one answer of Redis's, and for a free connection, until it counts as unreachable."""
OPERATION_SECONDS = 8.0
"""Seconds for one operation, which may ask for several answers: a Redis that is slow makes it fail, and nobody wait."""
READ_AT_ONCE = 50
"""Records that are asked for together."""

_PREFIX = "baton:database"

# KEYS of each script: the record, its kind's dues, its owner's list, all ends, its chunks, their positions.
_WRITE = """
local function order(key, member, score)
  if score == '' then redis.call('ZREM', key, member) else redis.call('ZADD', key, score, member) end
end
local function written(fields, due, expires)
  redis.call('HSET', KEYS[1], unpack(fields))
  order(KEYS[2], redis.call('HGET', KEYS[1], 'id'), due)
  order(KEYS[4], KEYS[1], expires)
end
"""
_INSERT_FROM = (
    _WRITE
    + """
local function insert(first)
  if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
  local fields = {}
  for i = first + 4, #ARGV do fields[#fields + 1] = ARGV[i] end
  redis.call('ZADD', KEYS[3], ARGV[first + 3], ARGV[first + 2])
  written(fields, ARGV[first], ARGV[first + 1])
  return 1
end
"""
)
_INSERT = _INSERT_FROM + "return insert(1)"
_REPLACE = (
    _WRITE
    + """
if redis.call('HGET', KEYS[1], 'version') ~= ARGV[3] then return 0 end
local fields = {}
for i = 4, #ARGV do fields[#fields + 1] = ARGV[i] end
written(fields, ARGV[1], ARGV[2])
return 1
"""
)
# What a record has, by its kind, id and owner.
_REMOVE = f"""
local function remove(kind, id, owner)
  local record = '{_PREFIX}:record:' .. kind .. ':' .. id
  if redis.call('UNLINK', record) == 0 then return 0 end
  redis.call('UNLINK', '{_PREFIX}:chunks:' .. kind .. ':' .. id, '{_PREFIX}:positions:' .. kind .. ':' .. id)
  redis.call('ZREM', '{_PREFIX}:due:' .. kind, id)
  redis.call('ZREM', '{_PREFIX}:list:' .. kind .. ':' .. owner, id)
  redis.call('ZREM', '{_PREFIX}:ends', record)
  return 1
end
"""
# ARGV: kind, id, owner.
_DELETE = _REMOVE + "return remove(ARGV[1], ARGV[2], ARGV[3])"
# KEYS: all ends. ARGV: the time, how many at most.
_DELETE_EXPIRED = (
    _REMOVE
    + """
local ended = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for _, key in ipairs(ended) do
  local names = redis.call('HMGET', key, 'kind', 'id', 'owner')
  if names[1] then remove(names[1], names[2], names[3]) else redis.call('ZREM', KEYS[1], key) end
end
return #ended
"""
)
# The ids of what an owner has, the oldest first, and the bytes of all.
_USAGE = f"""
local function usage(kind, owner)
  local ids = redis.call('ZRANGE', '{_PREFIX}:list:' .. kind .. ':' .. owner, 0, -1)
  local total = 0
  for _, id in ipairs(ids) do
    total = total + tonumber(redis.call('HGET', '{_PREFIX}:record:' .. kind .. ':' .. id, 'size') or 0)
  end
  return ids, total
end
"""
# ARGV: kind, owner, how many records may be there, how many bytes, how many bytes this one has; then those of _INSERT.
_INSERT_WITHIN = (
    _INSERT_FROM
    + _USAGE
    + """
if redis.call('EXISTS', KEYS[1]) == 1 then return {} end  -- sent twice, as its answer was lost
local ids, total = usage(ARGV[1], ARGV[2])
if #ids + 1 > tonumber(ARGV[3]) or total + tonumber(ARGV[5]) > tonumber(ARGV[4]) then return {#ids, total} end
insert(6)
return {}
"""
)
# ARGV: kind, owner, how many records may be there, how many bytes, how many are removed at most.
_DELETE_OLDEST = (
    _REMOVE
    + _USAGE
    + f"""
local ids, total = usage(ARGV[1], ARGV[2])
local left, removed = #ids, 0
for _, id in ipairs(ids) do
  if removed == tonumber(ARGV[5]) or (left <= tonumber(ARGV[3]) and total <= tonumber(ARGV[4])) then break end
  local found = redis.call('HMGET', '{_PREFIX}:record:' .. ARGV[1] .. ':' .. id, 'due', 'size')
  if found[1] == '' then
    removed = removed + remove(ARGV[1], id, ARGV[2])
    left, total = left - 1, total - tonumber(found[2])
  end
end
return removed
"""
)
_ADD_CHUNKS = """
local version = redis.call('HGET', KEYS[1], 'version')
if not version or (ARGV[1] ~= '' and ARGV[1] ~= version) then return -1 end
local added = 0
for i = 2, #ARGV, 2 do
  if redis.call('HSETNX', KEYS[5], ARGV[i], ARGV[i + 1]) == 1 then
    redis.call('ZADD', KEYS[6], ARGV[i], ARGV[i])
    added = added + 1
  end
end
return added
"""
_CHUNKS = """
local found, total = {}, 0
local positions = redis.call('ZRANGEBYSCORE', KEYS[6], '(' .. ARGV[1], '+inf', 'LIMIT', 0, ARGV[3])
for i, position in ipairs(positions) do
  total = total + redis.call('HSTRLEN', KEYS[5], position)
  if i > 1 and total > tonumber(ARGV[2]) then break end
  found[#found + 1] = position
  found[#found + 1] = redis.call('HGET', KEYS[5], position)
end
return found
"""


P = ParamSpec("P")
T = TypeVar("T")


def _in_time(operation: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """An operation that raises DatabaseUnavailable where it does not end within OPERATION_SECONDS."""

    @functools.wraps(operation)
    async def timed(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            async with asyncio.timeout(OPERATION_SECONDS):
                return await operation(*args, **kwargs)
        except TimeoutError:
            raise DatabaseUnavailable(f"redis: no answer within {OPERATION_SECONDS:g} s") from None

    return timed


class RedisDatabase(Database):
    """Owns the connections to one Redis. It keeps records as safely as its operator has set its persistence, and must
    not be one that evicts keys."""

    def __init__(self, url: str, clock: Callable[[], float] = time.time) -> None:
        """Raises ValueError for a URL that is none."""
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        super().__init__(clock)
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=ANSWER_SECONDS,
            socket_connect_timeout=CONNECT_SECONDS,
            socket_timeout=ANSWER_SECONDS,
            protocol=2,
            retry=Retry(
                NoBackoff(), 1
            ),  # a connection that a restarted Redis has closed; what is sent twice counts once
        )
        self._redis: Any = Redis.from_pool(pool)
        self._scripts = {
            text: self._redis.register_script(text)
            for text in (
                _INSERT,
                _INSERT_WITHIN,
                _REPLACE,
                _DELETE,
                _DELETE_EXPIRED,
                _DELETE_OLDEST,
                _ADD_CHUNKS,
                _CHUNKS,
            )
        }

    @_in_time
    async def insert(self, record: Record) -> bool:
        """See `Database`."""
        return bool(await self._script(_INSERT, record.kind, record.id, record.owner, *_inserted(record)))

    @_in_time
    async def insert_within(self, record: Record, limits: RecordLimits) -> Usage | None:
        """See `Database`."""
        names = record.kind, record.owner
        head = *names, str(limits.records), str(limits.size), str(record.size)
        found = await self._script(_INSERT_WITHIN, record.kind, record.id, record.owner, *head, *_inserted(record))
        return Usage(*map(int, found)) if found else None

    @_in_time
    async def get(self, kind: str, id: str) -> Record | None:
        """See `Database`."""
        found = await self._get(kind, id)
        return found if found is not None and self._is_valid(found) else None

    @_in_time
    async def value_size(self, kind: str, id: str) -> int:
        """See `Database`."""
        size: int = await self._answer(self._redis.hstrlen(_record_key(kind, id), "value"))
        return size

    @_in_time
    async def replace(self, record: Record) -> Record | None:
        """See `Database`."""
        following = record.changed(version=record.version + 1)
        written = ("expires", "value", "size", "due", "holder", "version")
        fields = [part for name in written for part in (name, _text(getattr(following, name)))]
        head = (_text(record.due), _text(record.expires), _text(record.version))
        done = await self._script(_REPLACE, record.kind, record.id, record.owner, *head, *fields)
        return following if done else None

    @_in_time
    async def delete(self, kind: str, id: str) -> bool:
        """See `Database`."""
        found = await self._get(kind, id)
        return found is not None and bool(await self._remove(_DELETE, (), kind, id, found.owner))

    @_in_time
    async def page(
        self, kind: str, owner: str, *, limit: int, after: str | None = None, newest_first: bool = True
    ) -> list[Record]:
        """See `Database`."""
        key, limit = _list_key(kind, owner), min(limit, MAX_LISTED)
        start = 0
        if after is not None:
            last = await self.get(kind, after)
            rank = self._redis.zrevrank if newest_first else self._redis.zrank
            place = None if last is None or last.owner != owner else await self._answer(rank(key, after))
            if place is None:
                raise RecordUnknown(after)
            start = place + 1
        records: list[Record] = []
        while len(records) < limit:
            page = await self._answer(self._redis.zrange(key, start, start + limit - 1, desc=newest_first))
            records += await self._existing(kind, [id.decode() for id in page])
            start += limit
            if len(page) < limit:
                break
        return records[:limit]

    @_in_time
    async def usage(self, kind: str, owner: str) -> Usage:
        """See `Database`."""
        ids = await self._answer(self._redis.zrange(_list_key(kind, owner), 0, -1))
        async with self._redis.pipeline(transaction=False) as pipeline:
            for id in ids:
                pipeline.hget(_record_key(kind, id.decode()), "size")
            sizes = await self._answer(pipeline.execute())
        return Usage(len(ids), sum(int(size) for size in sizes if size is not None))

    @_in_time
    async def claim(self, kind: str, holder: str, lease: float) -> Record | None:
        """See `Database`."""
        now = self._clock()
        due = await self._answer(self._redis.zrangebyscore(_due_key(kind), "-inf", repr(now), start=0, num=8))
        for id in due:
            found = await self.get(kind, id.decode())
            if found is not None and found.due is not None and found.due <= now:
                taken = await self.replace(found.changed(holder=holder, due=now + lease))
                if taken is not None:
                    return taken
        return None

    @_in_time
    async def add_chunks(self, kind: str, id: str, chunks: Mapping[int, bytes], version: int | None = None) -> int:
        """See `Database`."""
        parts = [part for position, data in chunks.items() for part in (str(position), data)]
        added = await self._script(_ADD_CHUNKS, kind, id, "", "" if version is None else str(version), *parts)
        if added < 0:
            raise RecordUnknown(id)
        return int(added)

    @_in_time
    async def chunks(self, kind: str, id: str, after: int = -1, max_bytes: int = READ_BYTES) -> list[tuple[int, bytes]]:
        """See `Database`."""
        found = await self._script(_CHUNKS, kind, id, "", str(after), str(max_bytes), str(MAX_READ_CHUNKS))
        return [(int(position), data) for position, data in zip(found[::2], found[1::2], strict=True)]

    @_in_time
    async def positions(self, kind: str, id: str) -> list[int]:
        """See `Database`."""
        return [int(position) for position in await self._answer(self._redis.zrange(_positions_key(kind, id), 0, -1))]

    @_in_time
    async def delete_expired(self, now: float) -> int:
        """See `Database`."""
        return await self._remove(_DELETE_EXPIRED, (_ENDS,), repr(now), MAX_REMOVED)

    @_in_time
    async def delete_oldest(self, kind: str, owner: str, limits: RecordLimits) -> int:
        """See `Database`. It looks through all that the owner has: of 10,000 records that takes tens of
        milliseconds."""
        return await self._remove(_DELETE_OLDEST, (), kind, owner, limits.records, limits.size, MAX_REMOVED)

    async def close(self) -> None:
        """See `Database`."""
        await self._redis.aclose()

    async def _existing(self, kind: str, ids: Sequence[str]) -> list[Record]:
        """Those of them that are there, and valid."""
        records: list[Record] = []
        for start in range(0, len(ids), READ_AT_ONCE):
            async with self._redis.pipeline(transaction=False) as pipeline:
                for id in ids[start : start + READ_AT_ONCE]:
                    pipeline.hgetall(_record_key(kind, id))
                found = await self._answer(pipeline.execute())
            records += filter(self._is_valid, map(_of_fields, filter(None, found)))
        return records

    async def _get(self, kind: str, id: str) -> Record | None:
        fields = await self._answer(self._redis.hgetall(_record_key(kind, id)))
        return _of_fields(fields) if fields else None

    async def _script(self, text: str, kind: str, id: str, owner: str, *arguments: str | bytes) -> Any:
        keys = (
            _record_key(kind, id),
            _due_key(kind),
            _list_key(kind, owner),
            _ENDS,
            f"{_PREFIX}:chunks:{kind}:{id}",
            _positions_key(kind, id),
        )
        return await self._answer(self._scripts[text](keys=keys, args=arguments))

    async def _remove(self, text: str, keys: Sequence[str], *arguments: str | int) -> int:
        """How many records one of the scripts that remove some has removed."""
        return int(await self._answer(self._scripts[text](keys=keys, args=arguments)))

    async def _answer(self, operation: object) -> Any:
        from redis.exceptions import RedisError

        try:
            return await cast("Awaitable[Any]", operation)
        except (RedisError, OSError) as error:
            raise DatabaseUnavailable(f"redis: {error or type(error).__name__}") from None


_ENDS = f"{_PREFIX}:ends"


def _record_key(kind: str, id: str) -> str:
    return f"{_PREFIX}:record:{kind}:{id}"


def _positions_key(kind: str, id: str) -> str:
    return f"{_PREFIX}:positions:{kind}:{id}"


def _due_key(kind: str) -> str:
    return f"{_PREFIX}:due:{kind}"


def _list_key(kind: str, owner: str) -> str:
    return f"{_PREFIX}:list:{kind}:{owner}"


def _inserted(record: Record) -> list[str | bytes]:
    """What _INSERT asks for."""
    head = _text(record.due), _text(record.expires), record.id, _text(record.created)
    fields = (part for name in Record.__struct_fields__ for part in (name, _text(getattr(record, name))))
    return [*head, *fields]


def _text(value: object) -> str | bytes:
    """A field of a record; no value is an empty text."""
    if value is None:
        return ""
    return value if isinstance(value, bytes) else repr(value) if isinstance(value, float) else str(value)


def _of_fields(found: Mapping[bytes, bytes]) -> Record:
    return _record({name.decode(): value for name, value in found.items()})


def _record(fields: Mapping[str, bytes]) -> Record:
    def number(name: str) -> float | None:
        return float(fields[name]) if fields[name] else None

    return Record(
        kind=fields["kind"].decode(),
        id=fields["id"].decode(),
        owner=fields["owner"].decode(),
        created=float(fields["created"]),
        expires=number("expires"),
        value=fields["value"],
        size=int(fields["size"]),
        due=number("due"),
        holder=fields["holder"].decode(),
        version=int(fields["version"]),
    )
