"""Redis as a place that is there or is away: values by keys, with a time to live. Knows nothing of blocks.

What says that Redis is away makes it so, and is raised as `Away`; a look for it goes on in the background.
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

log = logging.getLogger(__name__)

CONNECTIONS = 8
CONNECT_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""For one write or one read, until Redis counts as away."""
RETRY_FIRST, RETRY_LONGEST = 0.1, 5.0
"""Seconds between looks for a Redis that is away."""

LOST = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
"""What says that Redis is away; other errors of Redis are answers. The built-in TimeoutError is an OSError."""


class Away(Exception):
    """Redis does not answer."""


class Refused(Exception):
    """Redis answers with an error: out of memory, read-only, not ours to read; the text is its own."""


class RedisLink:
    """Owns the connections, and whether Redis counts as there. Nothing is tried twice."""

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
        """Another one each time that Redis is back: it may have nothing of what it had."""

    async def watch(self) -> None:
        """Until cancelled: waits for Redis to be away, then looks for it until it is back."""
        pause, said = RETRY_FIRST, ""
        while True:
            await self._away.wait()
            why = await self._what_is_wrong()
            if why is None:
                pause, said = RETRY_FIRST, ""
                self.life += 1
                self._away.clear()
                self.present.set()
                log.info("redis is there")
                continue
            if why != said:
                log.warning("redis does not answer", extra={"error": why})
            said = why
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_LONGEST)

    async def close(self) -> None:
        with contextlib.suppress(*LOST, exceptions.RedisError):
            await self._redis.aclose()

    def lose(self, why: str) -> None:
        if self.present.is_set():
            log.warning("redis is away", extra={"error": why})
        self.present.clear()
        self._away.set()

    async def _what_is_wrong(self) -> str | None:
        try:
            async with asyncio.timeout(2 * CONNECT_SECONDS):
                await self._redis.echo("there")
        except (*LOST, exceptions.RedisError) as error:
            return str(error) or type(error).__name__
        return None

    # ---- values

    async def get(self, keys: Sequence[str], ttl_ms: int) -> AsyncGenerator[bytes, None]:
        """The values of the leading keys that are there: asked in one go, given as they come; they live on from now.

        Raises Away, Refused. Who stops early closes the iterator: the connection goes with what is still on its way.
        """
        with self._told():
            connection = await self._connection()
        clean = False
        try:
            with self._told():
                asked = [("GETEX", key, "PX", ttl_ms) for key in keys]
                await connection.send_packed_command(connection.pack_commands(asked))
            for left in reversed(range(len(keys))):
                with self._told():
                    value = await connection.read_response()
                    if value is None:
                        clean = await _nothing_more(connection, left)
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
        """Whether each is there; what is lives on from now. Raises Away, Refused."""
        return [answer in (1, True) for answer in await self._all([("PEXPIRE", key, ttl_ms) for key in keys])]

    async def put(self, values: Mapping[str, bytes], ttl_ms: int) -> list[str | None]:
        """Why each was not taken; None where it was. Raises Away, Refused."""
        answers = await self._all([("SET", key, value, "PX", ttl_ms) for key, value in values.items()])
        return [str(answer) if isinstance(answer, Exception) else None for answer in answers]

    async def remove(self, keys: Sequence[str]) -> None:
        """Raises Away, Refused."""
        await self._all([("UNLINK", key) for key in keys])

    async def _all(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._told():
            async with asyncio.timeout(ANSWER_SECONDS), self._redis.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return await pipeline.execute(raise_on_error=False)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except LOST as error:
            why = str(error) or type(error).__name__
            self.lose(why)
            raise Away(why) from None
        except exceptions.RedisError as error:
            raise Refused(str(error)) from None


async def _nothing_more(connection: Any, answers: int) -> bool:
    """Takes the remaining answers off a connection, so that it can be used again; False where one is a value: more of
    them may follow, which nobody wants to wait for."""
    for _ in range(answers):
        if await connection.read_response() is not None:
            return False
    return True
