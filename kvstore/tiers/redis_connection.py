"""A connection to a Redis that is present or away: values by keys, with a time to live. Knows nothing of blocks.

An error that means that Redis is unreachable is raised as `RedisUnavailable`; the connection is then retried in the
background.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from shared.reliability.retry import Backoff

log = logging.getLogger(__name__)

CONNECTIONS = 8
CONNECT_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""Seconds for one write or one read, until Redis counts as unreachable."""
RETRY = Backoff(first=0.1, longest=5.0)
"""Seconds between two attempts to reconnect to Redis."""

LOST = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
"""The errors that mean that Redis is unreachable; other errors of Redis are answers. The built-in TimeoutError is an
OSError."""


class RedisUnavailable(Exception):
    """Redis does not answer."""


class RedisRefusal(Exception):
    """Redis answers with an error: out of memory, read-only, no permission; the text is from Redis."""


class RedisConnection:
    """Owns the connections, and whether Redis counts as reachable. No operation is retried."""

    def __init__(self, url: str) -> None:
        """Raises ValueError for a URL that is none."""
        self._pool = BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=ANSWER_SECONDS,
            protocol=2,
            socket_connect_timeout=CONNECT_SECONDS,
            socket_timeout=ANSWER_SECONDS,
            retry=Retry(NoBackoff(), 0),
            retry_on_error=[],
        )
        self._redis = Redis.from_pool(self._pool)
        self.present = asyncio.Event()
        self._away = asyncio.Event()
        self._away.set()
        self.life = 0
        """Counts the times that Redis came back: each time it may have lost its data."""

    async def watch(self) -> None:
        """Reconnects to Redis whenever it is unreachable, until it is cancelled."""
        tries, said = 0, ""
        while True:
            await self._away.wait()
            why = await self._what_is_wrong()
            if why is None:
                tries, said = 0, ""
                self.life += 1
                self._away.clear()
                self.present.set()
                log.info("redis connected")
                continue
            if why != said:
                log.warning("redis does not answer", extra={"error": why})
            said = why
            await asyncio.sleep(RETRY.pause(tries))
            tries += 1

    async def close(self) -> None:
        """Closes the connections, whatever state they are in."""
        with contextlib.suppress(*LOST, exceptions.RedisError), _closed_transports_as_lost():
            await self._redis.aclose()

    def lose(self, why: str) -> None:
        """Redis counts as away from now on, until `watch` finds it again."""
        if self.present.is_set():
            log.warning("redis disconnected", extra={"error": why})
        self.present.clear()
        self._away.set()

    async def _what_is_wrong(self) -> str | None:
        try:
            async with asyncio.timeout(2 * CONNECT_SECONDS):
                with _closed_transports_as_lost():
                    await self._redis.echo("there")
        except (*LOST, exceptions.RedisError) as error:
            return str(error) or type(error).__name__
        return None

    # ---- values

    async def get(self, keys: Sequence[str], ttl_ms: int) -> AsyncGenerator[bytes, None]:
        """The values of the leading keys that are there: requested in one go, yielded as they come; their time to live
        starts anew.

        Raises RedisUnavailable, RedisRefusal. A caller that stops early closes the iterator: the connection is closed
        with what is still on its way.
        """
        with self._translated_errors():
            connection = await self._connection()
        clean = False
        try:
            with self._translated_errors():
                commands = [("GETEX", key, "PX", ttl_ms) for key in keys]
                await connection.send_packed_command(connection.pack_commands(commands))
            for left in reversed(range(len(keys))):
                with self._translated_errors():
                    value = await connection.read_response()
                    if value is None:
                        clean = await _drain_misses(connection, left)
                        return
                yield value
            clean = True
        finally:
            if not clean:
                await connection.disconnect(nowait=True)
            await self._pool.release(connection)

    async def _connection(self) -> Any:
        pool: Any = self._pool  # partly without types
        return await pool.get_connection()

    async def touch(self, keys: Sequence[str], ttl_ms: int) -> list[bool]:
        """Whether each key exists; the time to live of those that do is renewed. Raises RedisUnavailable,
        RedisRefusal."""
        return [answer in (1, True) for answer in await self._all([("PEXPIRE", key, ttl_ms) for key in keys])]

    async def put(self, values: Mapping[str, bytes], ttl_ms: int) -> list[str | None]:
        """Stores the values. For each, why Redis did not take it, or None. Raises RedisUnavailable, RedisRefusal."""
        answers = await self._all([("SET", key, value, "PX", ttl_ms) for key, value in values.items()])
        return [str(answer) if isinstance(answer, Exception) else None for answer in answers]

    async def remove(self, keys: Sequence[str]) -> None:
        """Deletes the keys. Raises RedisUnavailable, RedisRefusal."""
        await self._all([("UNLINK", key) for key in keys])

    async def _all(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._translated_errors():
            async with asyncio.timeout(ANSWER_SECONDS), self._redis.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return await pipeline.execute(raise_on_error=False)

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            with _closed_transports_as_lost():
                yield
        except LOST as error:
            why = str(error) or type(error).__name__
            self.lose(why)
            raise RedisUnavailable(why) from None
        except exceptions.RedisError as error:
            raise RedisRefusal(str(error)) from None


@contextlib.contextmanager
def _closed_transports_as_lost() -> Iterator[None]:
    """uvloop raises a bare RuntimeError for a write to a connection that has just been closed by the other end."""
    try:
        yield
    except RuntimeError as error:
        if "the handler is closed" not in str(error):
            raise
        raise exceptions.ConnectionError(str(error)) from None


async def _drain_misses(connection: Any, answers: int) -> bool:
    """Takes the remaining answers off a connection, so that it can be used again; False where one is a value: more of
    them may follow, and waiting for those is not worth it."""
    for _ in range(answers):
        if await connection.read_response() is not None:
            return False
    return True
