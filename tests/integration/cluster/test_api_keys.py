"""Clients with keys of their own on a real stack: shares, newcomers, limits over two gateways, what stays secret."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from deploy.cli.keys import new_key
from tests.support.cluster.conversations import DEADLINE, client_of
from tests.support.cluster.stack import RunningStack, running_stack

RUNNING = 4
WORDS = "The fox and the hare met by the old mill. " * 20


class KeyedStack:
    """A stack that asks for keys, and the keys."""

    def __init__(self, stack: RunningStack, secrets: dict[str, str]) -> None:
        self.stack, self._secrets = stack, secrets
        self.ended: list[str] = []
        """The keys of the requests that were answered, in their order."""

    @contextlib.asynccontextmanager
    async def client(self, key: str) -> AsyncIterator[openai.AsyncOpenAI]:
        """With connections of its own."""
        async with client_of(self.stack.url) as client:
            yield client.with_options(api_key=self._secrets[key])

    async def ask(self, key: str, client: openai.AsyncOpenAI) -> int:
        """Returns the number of cached tokens."""
        answer = await client.completions.create(
            model=self.stack.model, prompt=WORDS, max_tokens=16, extra_body={"ignore_eos": True}
        )
        self.ended.append(key)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedStack]:
    folder: Path = tmp_path_factory.mktemp("keys")
    file = folder / "keys.toml"
    fields: dict[str, dict[str, object]] = {
        "alice": {},
        "bob": {"weight": 3.0},
        "carol": {},
        "few": {"requests_per_minute": 3},
    }
    secrets = {name: new_key(file, name, given) for name, given in fields.items()}
    more = [f"--keys-file={file}", "--host=0.0.0.0", f"--max-num-seqs={RUNNING}", "--sim-step-ms=20"]
    with running_stack(folder, device="sim", kvstore="0", gateways=2, more=more) as stack:
        yield KeyedStack(stack, secrets)


async def test_prefixes_are_shared_within_a_key_only(keyed: KeyedStack) -> None:
    async with keyed.client("alice") as alice, keyed.client("bob") as bob:
        assert await keyed.ask("alice", alice) == 0
        assert await keyed.ask("alice", alice) > 0
        assert await keyed.ask("bob", bob) == 0
        with pytest.raises(openai.AuthenticationError):
            await alice.with_options(api_key="none").models.list()


async def test_who_waits_gets_engines_by_weight_and_who_comes_anew_waits_for_few(keyed: KeyedStack) -> None:
    keyed.ended.clear()
    async with keyed.client("alice") as alice, keyed.client("bob") as bob, keyed.client("carol") as carol:
        flood = [asyncio.create_task(keyed.ask("alice", alice)) for _ in range(150)]
        try:
            while len(keyed.ended) < RUNNING:  # she has all engines, and more than a hundred requests waiting
                await asyncio.sleep(0.01)
            second = [asyncio.create_task(keyed.ask("bob", bob)) for _ in range(30)]
            await keyed.stack.until_heard(lambda said: said["coordinator-1"].load >= 170 - len(keyed.ended))
            waiting = len(keyed.ended)  # from here on both have requests waiting
            await asyncio.gather(*second)
            beside, others = keyed.ended[waiting:].count("alice"), keyed.ended[waiting:].count("bob")
            assert others / 3 - 8 <= beside <= others / 3 + 8, keyed.ended
            before = len(keyed.ended)
            await keyed.ask("carol", carol)
            assert len(keyed.ended) - before <= 60, keyed.ended  # of more than a hundred
            assert not all(task.done() for task in flood)
        finally:
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)


async def test_limits_hold_over_both_gateways(keyed: KeyedStack) -> None:
    began, admitted = time.monotonic(), 0
    for _ in range(10):
        async with keyed.client("few") as client:  # a connection of its own, to either gateway
            with contextlib.suppress(openai.RateLimitError):
                await keyed.ask("few", client)
                admitted += 1
    assert 3 <= admitted <= 3 + (time.monotonic() - began) / 20
    async with asyncio.timeout(DEADLINE):  # they are written behind the answers
        while len(lines := audits(keyed.stack, "few")) < 10:
            await asyncio.sleep(0.05)
    assert sorted(line["status"] for line in lines) == [200] * admitted + [429] * (10 - admitted)
    assert not any("fox" in log for log in logs(keyed.stack))


def audits(stack: RunningStack, key: str) -> list[dict[str, Any]]:
    """What its gateways have noted of the requests with this key that they answered."""
    lines = [json.loads(line) for log in logs(stack) for line in log.splitlines() if '"audit"' in line]
    return [line for line in lines if line.get("key") == key]


def logs(stack: RunningStack) -> list[str]:
    return [stack.log(gateway) for gateway in stack.instances("gateway")]
