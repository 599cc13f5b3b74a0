"""A short-lived process that does for this one what might end it, or never end: reading what strangers have sent."""

from __future__ import annotations

import contextlib
import os
import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE, Process


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
