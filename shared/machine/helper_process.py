"""A short-lived process that does for this one what might end it, or never end: reading what strangers have sent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio import StreamWriter, create_subprocess_exec
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator

from shared.machine.helper_pipes import LENGTH_BYTES

PIECE_BYTES = 2**18
"""Of what a pipe is given at once: more would be copied first, for as long as nobody else has a turn."""


class HelperSlow(Exception):
    """A reply takes too long."""


class HelperDied(Exception):
    """The process ended without the reply that was waited for."""


async def start_helper(*arguments: str, stderr: int | None = None) -> Process:
    """Runs this Python with `arguments`, between two pipes. Of this environment, which may hold credentials, it gets
    only where modules are."""
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return await create_subprocess_exec(
        sys.executable, *arguments, stdin=PIPE, stdout=PIPE, stderr=stderr, env=environment
    )


async def end_helper(process: Process) -> None:
    """Kills it, if it still runs, and returns once it is gone and its pipes are closed. What it has still to say is
    read: `Process.wait` waits for the pipes, too, and one that nobody reads any more may never end."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.communicate()


async def helper_replies(*arguments: str, given: bytes, timeout: float) -> AsyncGenerator[bytes]:
    """What such a process says of `given`, message by message, as far as it is asked for; it ends with this. Raises
    HelperSlow after `timeout` seconds of waiting for one, HelperDied where there are no further ones."""
    process = await start_helper(*arguments)
    feeding = asyncio.create_task(_feed(process, given))
    try:
        while True:
            try:
                async with asyncio.timeout(timeout):
                    reply = await read_reply(process)
            except TimeoutError:
                raise HelperSlow from None
            except (OSError, asyncio.IncompleteReadError):
                raise HelperDied from None
            yield reply
    finally:
        feeding.cancel()
        await end_helper(process)


async def read_reply(process: Process) -> bytes:
    """The next message that it writes. Raises OSError or IncompleteReadError where it dies."""
    assert process.stdout is not None
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "little")
    return await process.stdout.readexactly(length)


async def _feed(process: Process, given: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # whoever reads says so
        await feed(process.stdin, given)
        process.stdin.close()


async def feed(pipe: StreamWriter, given: bytes) -> None:
    """Writes what may be large to a pipe, as fast as its other end reads. Raises OSError where that is gone."""
    view = memoryview(given)
    for start in range(0, len(view), PIECE_BYTES):
        pipe.write(view[start : start + PIECE_BYTES])
        await pipe.drain()
