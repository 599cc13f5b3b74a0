"""Real stacks on the demo model that share KV blocks: between engines, over deaths, between pools of any TP size."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.completion_choice import Logprobs

from deploy.model_choice import DEMO_MODEL
from shared.messages.lifecycle import StoreReport
from tests.support.cluster.conversations import DEADLINE, client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.kv.prompts import (
    CHUNKED_AND_HANDED_OVER,
    LENGTHS,
    PATIENT,
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
from tests.support.models.tiny_models import make_model

AT_REST = Held(0, 0, 0)


@pytest.fixture(scope="module")
def plain(ring: RunningStack) -> RunningStack:
    """The reference: one engine, which is handed nothing."""
    return ring


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Two engines that are asked in turn."""
    folder = tmp_path_factory.mktemp("pair")
    with running_stack(
        folder, engines=2, kvstore="64MiB", settings=[PATIENT], more=["--router-policy=round-robin"]
    ) as stack:
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


@pytest.mark.faults
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


async def test_a_client_conducts_the_hand_over_itself_as_vllms_proxies_do(
    plain: RunningStack, pools: RunningStack
) -> None:
    """The two requests of vLLM's `toy_proxy_server.py`."""
    (prompt,) = prompts(pools, [1000], salt=14)
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
    before, decoded = handed_over(pools), started_by(pools, "decode-1")
    async with client_of(pools.url) as client:
        extra: dict[str, Any] = {"kv_transfer_params": asked, "min_tokens": 1}
        first = await client.completions.create(model=pools.model, prompt=prompt, max_tokens=1, extra_body=extra)
        params = first.model_dump()["kv_transfer_params"]
        assert params["do_remote_prefill"] is True
        assert params["remote_engine_id"] == "prefill-1"
        assert params["remote_block_ids"] == [list(range(62))]
        assert (await store_of_pinned(pools, 62)).pinned == 62
        there = await ask(client, pools.model, prompt, extra_body={"kv_transfer_params": params, "ignore_eos": True})
        used_twice = await ask(client, pools.model, prompt, extra_body={"kv_transfer_params": params})
    assert there.cached == used_twice.cached == 992
    assert (handed_over(pools), started_by(pools, "decode-1")) == (before, decoded + 2), "each at one engine"
    assert [there.text] == await plain_texts(plain, [prompt])
    assert await held(pools) == AT_REST, "what was used is kept no more"


async def test_params_of_a_stranger_lead_nowhere(pools: RunningStack) -> None:
    (prompt,) = prompts(pools, [300], salt=15)
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": "engine-of-another-stack",
        "remote_request_id": "cmpl-0-0",
        "remote_host": "elsewhere",
    }
    async with client_of(pools.url) as client:
        answer = await ask(client, pools.model, prompt, extra_body={"kv_transfer_params": params})
    assert answer.text
    assert answer.cached == 0
    assert retries(pools) == 0


async def store_of_pinned(stack: RunningStack, blocks: int) -> StoreReport:
    """What the store says once so many blocks are pinned."""
    deadline = time.monotonic() + DEADLINE
    while (report := await store_of(stack)).pinned < blocks:
        assert time.monotonic() < deadline, stack.last_words()
    return report


ASKED_OF_ANSWERS: dict[str, dict[str, Any]] = {
    "several, drawn at random": {"n": 3, "temperature": 1.0, "seed": 11, "extra_body": {"ignore_eos": True}},
    "drawn from few": {"temperature": 1.3, "seed": 5, "top_p": 0.9, "extra_body": {"top_k": 40, "min_p": 0.01}},
    "log-probabilities": {"logprobs": 4},
    "penalties": {"frequency_penalty": 0.9, "presence_penalty": 0.6, "extra_body": {"repetition_penalty": 1.2}},
    "the end of a word": {"stop": ["l.", "ay"], "max_tokens": 60},
    "bias": {"logit_bias": {str(token): 4 for token in range(300, 340)}},
    "no end before": {"extra_body": {"min_tokens": 20}},
    "a pattern": {"extra_body": {"structured_outputs": {"regex": "(on|by) [0-9]{3}, (fox|hare)es? [a-z]{4,9}"}}},
}
"""By what is said of the output tokens so far, or of the next, on whichever engine it is drawn."""


@pytest.mark.parametrize("options", ASKED_OF_ANSWERS.values(), ids=list(ASKED_OF_ANSWERS))
async def test_what_is_asked_of_an_answer_holds_beyond_the_hand_over(
    plain: RunningStack, pools: RunningStack, options: dict[str, Any]
) -> None:
    (prompt,) = prompts(pools, [100], salt=8)
    given = {"max_tokens": 24, "temperature": 0, **options}
    before = handed_over(pools)
    async with client_of(pools.url) as client:
        there = await client.completions.create(model=pools.model, prompt=prompt, **given)
    async with client_of(plain.url) as client:
        here = await client.completions.create(model=plain.model, prompt=prompt, **given)
    assert [(choice.text, choice.finish_reason) for choice in there.choices] == [
        (choice.text, choice.finish_reason) for choice in here.choices
    ]
    for one, other in zip(there.choices, here.choices, strict=True):
        assert_same_logprobs(one.logprobs, other.logprobs)
    assert len({choice.text for choice in there.choices}) == len(there.choices), "each its own random numbers"
    assert "stop" not in given or there.choices[0].finish_reason == "stop", "a word that did not come proves nothing"
    assert handed_over(pools) == before + len(there.choices)
    assert retries(pools) == 0
    assert await held(pools) == AT_REST


def assert_same_logprobs(one: Logprobs | None, other: Logprobs | None) -> None:
    if one is None or other is None:
        assert one is other
        return
    assert (one.tokens, one.text_offset) == (other.tokens, other.text_offset)
    assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-3)
    assert one.top_logprobs is not None
    assert other.top_logprobs is not None
    for top, same in zip(one.top_logprobs, other.top_logprobs, strict=True):
        assert top == pytest.approx(same, abs=1e-3)


async def test_a_drained_prefill_pool_leaves_prompts_to_those_that_decode(
    plain: RunningStack, pools: RunningStack
) -> None:
    refused = await asyncio.to_thread(pools.baton, "drain", "decode")
    assert refused.returncode == 1
    assert "decode-1 is the last ready engine" in refused.stderr
    drained = await asyncio.to_thread(pools.baton, "drain", "prefill")
    assert drained.stdout.startswith("prefill-1 drains"), drained.stderr
    await until_phase(pools, "prefill-1", "draining")
    asked = prompts(pools, [200], salt=6)
    before = handed_over(pools)
    async with client_of(pools.url) as client:
        assert await ask_all(client, pools.model, asked) == await plain_texts(plain, asked)
    assert handed_over(pools) == before
    assert (await asyncio.to_thread(pools.baton, "undrain", "prefill")).returncode == 0
    await until_phase(pools, "prefill-1", "ready")


async def until_phase(stack: RunningStack, instance: str, phase: str) -> None:
    await stack.until_heard(lambda said: said[instance].phase == phase)


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
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("tp_prefill", "tp_decode", "prefill"), [(1, 2, 1), (2, 1, 1), (1, 1, 2)])
async def test_pools_of_any_size_continue_each_others_work(
    plain: RunningStack, tmp_path: Path, tp_prefill: int, tp_decode: int, prefill: int
) -> None:
    shape = {"prefill": prefill, "decode": 1, "tp_prefill": tp_prefill, "tp_decode": tp_decode}
    with running_stack(tmp_path, **shape, kvstore="64MiB", settings=[PATIENT], more=CHUNKED_AND_HANDED_OVER) as stack:  # type: ignore[arg-type]
        await assert_equal_to_plain(plain, stack, salt=3)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stages", [["--pp-prefill=2"], ["--pp-decode=2", "--pp-layers=2,3", "--tp-prefill=2"]])
@pytest.mark.features("pipeline parallel", "prefill/decode")
async def test_pipelines_continue_others_work_and_begin_it(
    plain: RunningStack, tmp_path: Path, stages: list[str]
) -> None:
    with running_stack(
        tmp_path,
        prefill=1,
        decode=1,
        kvstore="64MiB",
        settings=[PATIENT],
        more=[*CHUNKED_AND_HANDED_OVER, *stages],
    ) as stack:
        await assert_equal_to_plain(plain, stack, salt=7)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "tp_prefill", "tp_decode"), [("qwen3-moe", 1, 2), ("gemma3", 2, 1)])
async def test_other_models_are_handed_over_as_well(
    tmp_path: Path, family: str, tp_prefill: int, tp_decode: int
) -> None:
    model = random_model(tmp_path / "model", family)
    with (
        running_stack(tmp_path / "plain", model=model, kvstore="0") as plain,
        running_stack(
            tmp_path / "pools",
            model=model,
            prefill=1,
            decode=1,
            tp_prefill=tp_prefill,
            tp_decode=tp_decode,
            settings=[PATIENT],
            more=CHUNKED_AND_HANDED_OVER,
        ) as stack,
    ):
        await assert_equal_to_plain(plain, stack, salt=4)


def random_model(folder: Path, family: str) -> Path:
    """A small random checkpoint of that family that speaks the demo model's tokens."""
    make_model(family, folder, vocab_size=2048, max_position_embeddings=2048)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_MODEL / name, folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_what_the_arena_has_no_room_for_comes_back_from_redis(plain: RunningStack, tmp_path: Path) -> None:
    shape = {"engines": 2, "kvstore": "4MiB", "redis": True, "settings": [PATIENT]}
    with running_stack(tmp_path, **shape, more=["--router-policy=round-robin"]) as stack:  # type: ignore[arg-type]
        asked = prompts(stack, range(300, 305), salt=5)
        expected = await plain_texts(plain, asked)
        first, again = [], []
        async with client_of(stack.url) as client:
            for prompt in asked:
                first.append(await ask(client, stack.model, prompt))
            await evicted(stack, len(asked) * 18)
            for prompt in asked:  # 5 are odd, so each goes to the engine that has never seen it
                again.append(await ask(client, stack.model, prompt))
                assert await held(stack) == AT_REST
        assert {answer.cached for answer in first} == {0}
        assert {answer.cached for answer in again} == {288}
        assert [answer.text for answer in (*first, *again)] == expected * 2
        assert (await store_of(stack)).lower_hits > 0


async def evicted(stack: RunningStack, blocks: int) -> None:
    """Until the arena holds fewer blocks than were computed, and Redis all the others."""
    deadline = time.monotonic() + DEADLINE
    while True:
        report = await store_of(stack)
        if 0 < report.committed < blocks <= report.committed + sum(tier.stored for tier in report.tiers):
            return
        assert time.monotonic() < deadline, stack.last_words()
