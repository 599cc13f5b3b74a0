"""`baton plan --act` on a running stack: engines come and go, the planner begins anew, and no stream notices."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from deploy.supervisor.state_file import StackState
from tests.support.cluster.conversations import Streamed, client_of, stream_chat
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.paths import REPOSITORY

DEADLINE = 60.0
TOKENS = 20
BUSY, QUIET = 10, 1
"""Clients that ask without a pause."""
TARGETS = ("--itl-ms=60", "--interval-s=1", "--start-s=1", "--stabilization-s=6", "--max-engines=2", "--act", "--json")


class Planner:
    """Owns a `baton plan` process and what it has said."""

    def __init__(self, stack: RunningStack) -> None:
        argv = [sys.executable, "-m", "deploy.cli", "plan", f"--run-dir={stack.run_dir}", *TARGETS]
        self.process = subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.process.stdout is not None
        self._lines = self.process.stdout
        self.decisions: list[dict[str, Any]] = []

    async def until(self, shows: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first decision from now on that shows it."""
        async with asyncio.timeout(DEADLINE):
            while True:
                line = await asyncio.to_thread(self._lines.readline)
                assert line, "the planner has ended"
                self.decisions.append(json.loads(line))
                if shows(self.decisions[-1]):
                    return self.decisions[-1]

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(DEADLINE) == 0
        self._lines.close()


def target(decision: dict[str, Any]) -> int:
    return int(decision["pools"][0]["target"])


def present(decision: dict[str, Any]) -> int:
    return int(decision["pools"][0]["present"])


class Clients:
    """Owns clients that stream one answer after the other, and all that they have got."""

    def __init__(self, client: AsyncOpenAI, model: str) -> None:
        self.answers: list[Streamed] = []
        self._client = client
        self._model = model
        self._tasks: list[asyncio.Task[None]] = []
        self._wanted = 0

    def become(self, count: int) -> None:
        """So many of them from now on; those that leave finish their streams."""
        self._wanted = count
        self._tasks += [asyncio.create_task(self._asks(number)) for number in range(len(self._tasks), count)]

    async def _asks(self, number: int) -> None:
        while number < self._wanted:
            options = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
            self.answers.append(await stream_chat(self._client, self._model, f"number {number}", **options))

    async def end(self) -> None:
        self.become(0)
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*self._tasks)


@asynccontextmanager
async def clients_of(stack: RunningStack) -> AsyncIterator[Clients]:
    async with client_of(stack.url) as client:
        clients = Clients(client, stack.model)
        yield clients
        await clients.end()


async def test_engines_follow_the_load_across_a_restart_of_the_planner_and_no_stream_is_lost(tmp_path: Path) -> None:
    shape = ("--max-num-seqs=4", "--sim-step-ms=30")
    with running_stack(tmp_path, device="sim", more=shape) as stack:
        async with clients_of(stack) as clients:
            planner = Planner(stack)
            clients.become(BUSY)
            risen = await planner.until(lambda decision: target(decision) == 2)
            assert risen["acts"]
            assert risen["predicted_rate"] > 0
            await planner.until(lambda decision: present(decision) == 2)

            planner.end()
            clients.become(QUIET)
            planner = Planner(stack)
            first = await planner.until(lambda decision: decision["observed_rate"] is not None)
            assert [target(decision) for decision in planner.decisions] == [present(first)] * len(planner.decisions)
            fallen = await planner.until(lambda decision: target(decision) == 1)
            assert present(fallen) == 2
            await asyncio.to_thread(stack.until, lambda state: "engine-2" not in instances(state), DEADLINE)
            planner.end()
        assert {(answer.finish, answer.completion_tokens) for answer in clients.answers} == {("length", TOKENS)}
        assert len(clients.answers) > BUSY


def instances(state: StackState) -> set[str]:
    return {member.instance for member in state.members}
