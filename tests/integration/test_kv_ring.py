"""Real stacks on the demo model that share KV blocks: between engines, over deaths, between pools of any TP size."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conversations import client_of
from tests.kv_ring import (
    LENGTHS,
    Held,
    ask,
    ask_all,
    handed_over,
    held,
    prompts,
    retries,
    started_by,
    store_of,
    stored,
    until_all_ready,
)
from tests.stack import RunningStack, running_stack

AT_REST = Held(0, 0, 0)
CHUNKED = ("--max-batch-tokens=96", "--max-num-seqs=16")
ALWAYS = "coordinator.disaggregate_tokens=0"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The reference: one engine, no store."""
    with running_stack(tmp_path_factory.mktemp("plain"), kvstore="0") as stack:
        yield stack


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Two engines that are asked in turn."""
    folder = tmp_path_factory.mktemp("pair")
    with running_stack(folder, engines=2, kvstore="64MiB", more=["--router-policy=round-robin"]) as stack:
        yield stack


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Long prompts are computed in chunks."""
    folder = tmp_path_factory.mktemp("pools")
    with running_stack(folder, prefill=1, decode=1, kvstore="64MiB", settings=[ALWAYS], more=CHUNKED) as stack:
        yield stack


async def plain_texts(plain: RunningStack, asked: list[list[int]]) -> list[str]:
    async with client_of(plain.url) as client:
        return [(await ask(client, plain.model, each)).text for each in asked]


async def test_a_prefix_computed_by_one_engine_is_not_computed_by_the_other(
    plain: RunningStack, pair: RunningStack
) -> None:
    (prompt,) = prompts(pair, [1000])
    async with client_of(pair.url) as client:
        first = await ask(client, pair.model, prompt)
        await stored(pair, 62)
        second = await ask(client, pair.model, prompt)
    assert [started_by(pair, engine) for engine in ("engine-1", "engine-2")] == [1, 1]
    assert (first.cached, second.cached, retries(pair)) == (0, 992, 0)
    assert [first.text, second.text] == await plain_texts(plain, [prompt, prompt])
    assert await held(pair) == AT_REST


async def test_blocks_outlive_every_engine_and_the_store(plain: RunningStack, pair: RunningStack) -> None:
    (prompt,) = prompts(pair, [1000], salt=1)
    before = (await store_of(pair)).committed
    async with client_of(pair.url) as client:
        assert (await ask(client, pair.model, prompt)).cached == 0
        await stored(pair, before + 62)
        victims = [*pair.instances("scheduler"), *pair.instances("worker"), "kvstore-1"]
        killed = {victim: pair.kill(victim) for victim in victims}
        for victim, pid in killed.items():
            await asyncio.to_thread(pair.replaced, victim, pid)
        await until_all_ready(pair)
        again = [await ask(client, pair.model, prompt) for _ in range(2)]
    assert [answer.cached for answer in again] == [992, 992]
    assert [answer.text for answer in again] == await plain_texts(plain, [prompt, prompt])
    assert await held(pair) == AT_REST


async def test_what_prefill_engines_begin_decode_engines_end_with_the_same_text(
    plain: RunningStack, pools: RunningStack
) -> None:
    await assert_equal_to_plain(plain, pools, salt=2)


async def assert_equal_to_plain(plain: RunningStack, stack: RunningStack, salt: int) -> None:
    """One by one and at once, and everything is handed over; then nothing is held."""
    asked = prompts(stack, salt=salt)
    expected = await plain_texts(plain, asked)
    before = handed_over(stack)
    async with client_of(stack.url) as client:
        assert [(await ask(client, stack.model, each)).text for each in asked] == expected
        assert handed_over(stack) == before + len(LENGTHS)
        assert await ask_all(client, stack.model, asked) == expected
    assert handed_over(stack) == before + 2 * len(LENGTHS)
    assert retries(stack) == 0
    assert await held(stack) == AT_REST


@pytest.mark.slow
@pytest.mark.parametrize(("tp_prefill", "tp_decode", "prefill"), [(1, 2, 1), (2, 1, 1), (1, 1, 2)])
async def test_pools_of_any_size_continue_each_others_work(
    plain: RunningStack, tmp_path: Path, tp_prefill: int, tp_decode: int, prefill: int
) -> None:
    shape = {"prefill": prefill, "decode": 1, "tp_prefill": tp_prefill, "tp_decode": tp_decode}
    with running_stack(tmp_path, **shape, kvstore="64MiB", settings=[ALWAYS], more=CHUNKED) as stack:  # type: ignore[arg-type]
        await assert_equal_to_plain(plain, stack, salt=3)
