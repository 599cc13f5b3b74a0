"""The supervisor is killed under open streams: everything goes on, a new one takes over, and `down` needs none.

The device is simulated, and says what depends on a request's seed; each stream has its own.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from deploy.supervisor.state_file import directory_of, is_held, read_state
from tests.support.cluster.conversations import DEADLINE, QUESTIONS, Streamed, client_of, stream_chat
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.lanes import forked_server
from tests.support.warm.forked_baton import ForkedBaton

STREAMS = 8
TOKENS = 100
SLOW = "--sim-step-ms=20"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("orphans")
    with running_stack(folder, device="sim", kvstore="64MiB", redis=True, more=[SLOW]) as stack:
        yield stack


async def eight(stack: RunningStack, started: asyncio.Event | None = None) -> list[Streamed]:
    how = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
    async with client_of(stack.url) as client, asyncio.timeout(DEADLINE):
        return await asyncio.gather(
            *(
                stream_chat(client, stack.model, question, started, seed=seed, **how)
                for seed, question in enumerate(QUESTIONS[:STREAMS])
            )
        )


def pids(stack: RunningStack) -> dict[str, int]:
    state = read_state(stack.run_dir)
    assert state is not None
    return {name: identity.pid for name, identity in state.processes.items()}


async def test_streams_do_not_notice_a_killed_supervisor_nor_its_successor(stack: RunningStack) -> None:
    undisturbed = await eight(stack)
    before, arena = pids(stack), directory_of(stack.run_dir)
    inodes = {file.name: file.stat().st_ino for file in arena.iterdir()}
    assert {"nats-server", "redis-server", "keeper", "gateway-1", "engine-1-rank0"} < set(before)
    assert inodes
    started = asyncio.Event()
    streams = asyncio.create_task(eight(stack, started))
    await asyncio.wait_for(started.wait(), DEADLINE)
    stack.kill_supervisor()
    assert not streams.done(), "the streams ended before anything happened to them"
    assert not is_held(stack.run_dir)
    said = await asyncio.to_thread(stack.baton, "ps")
    assert "supervisor is gone" in said.stdout, said.stderr
    assert [s.text for s in await streams] == [s.text for s in undisturbed]
    assert len({s.text for s in undisturbed}) == STREAMS

    started.clear()
    streams = asyncio.create_task(eight(stack, started))
    await asyncio.wait_for(started.wait(), DEADLINE)
    await asyncio.to_thread(stack.start_supervisor)
    assert [s.text for s in await streams] == [s.text for s in undisturbed]
    await asyncio.to_thread(stack.until, lambda state: state.pid == stack.supervisor.pid and state.phase == "ready")
    assert pids(stack) == before
    assert {file.name: file.stat().st_ino for file in arena.iterdir()} == inodes
    assert [s.text for s in await eight(stack)] == [s.text for s in undisturbed]


async def test_what_died_or_hangs_without_a_supervisor_is_replaced_by_the_next_one(stack: RunningStack) -> None:
    before = pids(stack)
    assert isinstance(stack.supervisor, ForkedBaton) == forked_server.is_there()
    stack.kill_supervisor()
    assert stack.supervisor.poll() == -signal.SIGKILL
    for name in ("tokenizer-1", "engine-1-rank0"):
        stack.kill(name)
    stack.kill("detokenizer-1", signal.SIGSTOP)
    stack.start_supervisor()
    lost = {"tokenizer-1", "engine-1-rank0", "detokenizer-1"}
    for name in lost:
        stack.replaced(name, before[name])
    stack.until(lambda state: state.pid == stack.supervisor.pid and state.phase == "ready")
    kept = before.keys() - lost
    after = pids(stack)
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert all(s.finish == "length" for s in await eight(stack))


def test_other_settings_do_not_take_over(stack: RunningStack) -> None:
    before = pids(stack)
    stack.kill_supervisor()
    refused = stack.baton("up", "--device=sim", "--port=0", "--tokenizers=2", "--redis", "--kvstore-memory=64MiB")
    assert refused.returncode == 1
    assert "counts" in refused.stderr
    assert "baton down" in refused.stderr
    stack.start_supervisor()
    stack.until(lambda state: state.pid == stack.supervisor.pid and state.phase == "ready")
    assert pids(stack) == before


def test_down_ends_everything_without_a_supervisor(stack: RunningStack) -> None:
    stack.kill_supervisor()
    done = stack.baton("down")
    assert done.returncode == 0, done.stderr
    assert "without a supervisor" in done.stdout
    assert not stack.leftovers()
    assert not directory_of(stack.run_dir).exists()
    assert read_state(stack.run_dir) is None
    assert stack.baton("down").returncode == 1
