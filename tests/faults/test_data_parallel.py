"""Engines that share experts, which move between their ranks: a rank of one is killed, in the middle of a move too, or
stands still, and streams of all end as they would; one of them is drained, and the others go on; a group of another
size takes their place."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest

from deploy.supervisor.state_file import StackState
from tests.support.cluster.conversations import DEADLINE, QUESTIONS, Streamed, blocks_in_use, client_of, stream_chat
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.models.demo_mixture import write_demo_mixture
from tests.support.paths import REPOSITORY

STREAMS = 6
TOKENS = 100
FEW_STREAMS, FEW_TOKENS = 3, 50
"""Of streams that come again and again."""
PAUSE = 0.3
"""Seconds between those: without one they take the cores that groups need to start."""
SCALE_DEADLINE = 240.0
"""Seconds for a group to start beside another one that is busy."""
RANKS = ["engine-1-rank0", "engine-2-rank0"]
CHANGEOVER = REPOSITORY / "tests/support/cluster/changeover"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_mixture(tmp_path_factory.mktemp("model") / "demo")


class Strike(NamedTuple):
    """Whoever changes a layer's experts while the file is there takes it away and dies."""

    file: Path

    def prepare(self) -> None:
        self.file.touch()

    @property
    def is_to_come(self) -> bool:
        return self.file.exists()


@pytest.fixture(scope="module")
def strike(tmp_path_factory: pytest.TempPathFactory) -> Strike:
    return Strike(tmp_path_factory.mktemp("changeover") / "strike")


@pytest.fixture(scope="module")
def stack(model: Path, strike: Strike, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    moving = '--eplb-config={"window_size": 2, "step_interval": 4}'  # nearly always
    how = ["--data-parallel-size=2", "--enable-expert-parallel", "--enable-eplb", moving]
    with running_stack(
        tmp_path_factory.mktemp("group"),
        model=model,
        kvstore="0",
        settings=["worker.threads=1", "scheduler.canary_interval_s=0"],
        more=how,
        environment={
            "CHANGEOVER_STRIKE": str(strike.file),
            "PYTHONPATH": os.pathsep.join((str(CHANGEOVER), str(REPOSITORY))),
        },
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one engine that shares nothing says."""
    with running_stack(tmp_path_factory.mktemp("alone"), model=model, kvstore="0") as stack:
        return [seen.text for seen in asyncio.run(streams(stack))]


async def streams(
    stack: RunningStack, started: asyncio.Event | None = None, *, count: int = STREAMS, tokens: int = TOKENS
) -> list[Streamed]:
    options = {"max_tokens": tokens, "extra_body": {"ignore_eos": True}}
    async with client_of(stack.url) as client, asyncio.timeout(DEADLINE):
        chats = (stream_chat(client, stack.model, question, started, **options) for question in QUESTIONS[:count])
        return await asyncio.gather(*chats)


async def metric(stack: RunningStack, instance: str, name: str) -> float:
    port = (await stack.until_heard(lambda said: instance in said))[instance].metrics_port
    async with httpx2.AsyncClient() as http:
        lines = (await http.get(f"http://127.0.0.1:{port}/metrics")).text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


async def seen_waiting(pids: list[int]) -> None:
    """Until each thread of these processes has been seen to wait for something: one that spins is able to run whenever
    it is looked at, however little a busy machine lets it."""
    spinning = [thread for pid in pids for thread in threads_of(pid)]
    assert len(spinning) > len(pids)
    async with asyncio.timeout(DEADLINE):
        while spinning := [thread for thread in spinning if can_run(thread)]:
            await asyncio.sleep(0.01)


def threads_of(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


def can_run(thread: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        return (thread / "stat").read_text().rpartition(") ")[2].startswith("R")
    return False


async def test_engines_of_a_group_rest_together_and_may_not_sleep(stack: RunningStack, undisturbed: list[str]) -> None:
    assert [seen.text for seen in await streams(stack)] == undisturbed
    before = [await metric(stack, rank, "baton_worker_steps_of_others") for rank in RANKS]
    await asyncio.sleep(1.0)
    assert [await metric(stack, rank, "baton_worker_steps_of_others") for rank in RANKS] == before
    await seen_waiting([stack.pid(rank) for rank in RANKS])
    async with httpx2.AsyncClient(base_url=stack.url) as http:
        refused = await http.post("/sleep")
        assert refused.status_code == 409
        assert "2 engines share experts, and need its ranks awake" in refused.json()["error"]["message"]
    assert [seen.text for seen in await streams(stack)] == undisturbed
    scaled = stack.baton("scale", "engines=3")
    assert "engines=3: whole groups are needed, of data_parallel_size 2" in scaled.stderr
    async with asyncio.timeout(DEADLINE):  # which is told now and then
        while not await metric(stack, RANKS[0], "baton_worker_experts_moved"):
            await asyncio.sleep(0.2)


@pytest.mark.parametrize(
    ("victim", "number"), [(RANKS[0], signal.SIGKILL), (RANKS[1], signal.SIGKILL), (RANKS[1], signal.SIGSTOP)]
)
@pytest.mark.features("data parallel", "expert parallel", "re-dispatch")
async def test_streams_of_all_engines_survive_what_happens_to_a_rank_of_one(
    stack: RunningStack, undisturbed: list[str], victim: str, number: signal.Signals
) -> None:
    before = {rank: stack.pid(rank) for rank in RANKS}
    started = asyncio.Event()
    disturbed = asyncio.create_task(streams(stack, started))
    async with asyncio.timeout(DEADLINE):
        await started.wait()
    assert not disturbed.done(), "the streams ended before anything happened to them"
    stack.kill(victim, number)
    seen = await disturbed
    assert [each.text for each in seen] == undisturbed
    assert [(each.finishes, each.completion_tokens) for each in seen] == [(["length"], TOKENS)] * STREAMS
    for rank in RANKS:
        await asyncio.to_thread(stack.replaced, rank, before[rank])
    assert await blocks_in_use(stack) == 0


@pytest.mark.features("data parallel", "expert parallel", "re-dispatch")
async def test_streams_survive_a_death_in_the_middle_of_a_changeover(
    stack: RunningStack, undisturbed: list[str], strike: Strike
) -> None:
    """Of a rank that has a layer's new experts already, by their old numbers. Streams come until one dies."""
    before = {rank: stack.pid(rank) for rank in RANKS}
    strike.prepare()
    async with asyncio.timeout(DEADLINE):
        while strike.is_to_come:
            assert [each.text for each in await streams(stack)] == undisturbed
    for rank in RANKS:
        await asyncio.to_thread(stack.replaced, rank, before[rank])
    assert await blocks_in_use(stack) == 0


async def test_one_engine_of_a_group_is_drained_and_computes_its_experts_for_the_other(
    stack: RunningStack, undisturbed: list[str]
) -> None:
    stack.baton("drain", "engine-2")
    await stack.until_heard(lambda said: said["engine-2"].phase == "draining")
    before = await metric(stack, "engine-2-rank0", "baton_worker_steps_total")
    assert [seen.text for seen in await streams(stack)] == undisturbed
    assert await metric(stack, "engine-2-rank0", "baton_worker_steps_total") == before
    assert await metric(stack, "engine-2-rank0", "baton_worker_steps_of_others") >= TOKENS
    stack.baton("undrain", "engine-2")
    await stack.until_heard(lambda said: said["engine-2"].phase == "ready")
    assert [seen.text for seen in await streams(stack)] == undisturbed


@pytest.mark.features("data parallel", "expert parallel", "re-dispatch")
async def test_a_group_of_another_size_takes_the_place_of_one_under_load(
    stack: RunningStack, undisturbed: list[str]
) -> None:
    """Streams come again and again; none fails or says anything else, before, while and after."""
    over, rounds = asyncio.Event(), list[list[Streamed]]()

    async def load() -> None:
        while not over.is_set():
            rounds.append(await streams(stack, count=FEW_STREAMS, tokens=FEW_TOKENS))
            await asyncio.sleep(PAUSE)

    loaded = asyncio.create_task(load())
    former = engines_of(stack.state)

    async def scale(size: int, patience: float) -> int:
        async with httpx2.AsyncClient(base_url=stack.url, timeout=None) as http:
            wanted = {"new_data_parallel_size": size, "drain_timeout": patience}
            return (await http.post("/scale_elastic_ep", json=wanted)).status_code

    async def go_on() -> None:
        seen = len(rounds)
        async with asyncio.timeout(DEADLINE):
            while len(rounds) < seen + 2 and not loaded.done():
                await asyncio.sleep(0.1)

    # Four experts do not divide over three ranks: those of that group end as they start.
    assert await scale(3, 3.0) == 408
    assert engines_of(stack.state) >= former
    await go_on()
    assert await scale(2, SCALE_DEADLINE) == 200
    await asyncio.to_thread(stack.until, lambda state: engines_of(state) == former)
    await go_on()
    said = await asyncio.to_thread(stack.baton, "scale", "engines=4", "--data-parallel-size=4")
    assert "and once these are ready stopping engine-1, engine-1-rank0, engine-2" in said.stdout, said
    gone = lambda state: len(engines_of(state)) == 4 and not engines_of(state) & former  # noqa: E731
    await asyncio.to_thread(stack.until, gone, SCALE_DEADLINE)
    await go_on()
    over.set()
    await loaded
    for seen in rounds:
        assert [(each.finishes, each.completion_tokens) for each in seen] == [(["length"], FEW_TOKENS)] * FEW_STREAMS
        assert all(each.text and whole.startswith(each.text) for each, whole in zip(seen, undisturbed, strict=False))
    assert [seen.text for seen in await streams(stack)] == undisturbed


def engines_of(state: StackState) -> set[str]:
    return {member.instance for member in state.members if member.service == "scheduler"}
