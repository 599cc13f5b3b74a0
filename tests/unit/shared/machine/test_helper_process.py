from __future__ import annotations

import asyncio
import signal

import pytest

from shared.machine.helper_process import end_helper, start_helper

ENDLESS = "import sys\nwhile True: sys.stdout.buffer.write(bytes(65536))"


async def test_one_that_has_more_to_say_than_anybody_reads_is_ended() -> None:
    process = await start_helper("-c", ENDLESS)
    assert process.stdout is not None
    await process.stdout.readexactly(1)
    await asyncio.sleep(0.3)  # its pipe is full, and paused
    async with asyncio.timeout(30):
        await end_helper(process)
    assert process.returncode == -signal.SIGKILL


async def test_one_that_has_ended_is_ended_again() -> None:
    process = await start_helper("-c", "")
    await process.wait()
    await end_helper(process)
    assert process.returncode == 0


async def test_its_environment_says_only_where_modules_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    process = await start_helper("-c", "import os, shared; print(*sorted(os.environ))")
    said, _ = await process.communicate()
    assert set(said.decode().split()) <= {"PYTHONPATH", "LC_CTYPE"}
