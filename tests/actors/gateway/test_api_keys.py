"""Named keys over real HTTP: scopes, models, priorities, salts, audit lines, and a file that changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from deploy.cli.keys import new_key
from services.gateway.config import GatewayConfig
from services.gateway.http.access import MAX_STRANGERS
from shared.bus.memory_bus import MemoryBus
from shared.ids import ModelName
from shared.messages.tokenizer import Tokenize
from tests.support.gateway.fake_services import MODEL, eventually
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack

HELLO: Any = [{"role": "user", "content": "a secret text"}]


class Keys:
    """A file of keys, and a client for each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.secrets: dict[str, str] = {}

    def new(self, name: str, **fields: object) -> None:
        self.secrets[name] = new_key(self.path, name, fields)

    def client(self, stack: GatewayStack, name: str) -> openai.AsyncOpenAI:
        return stack.openai.with_options(api_key=self.secrets[name])

    def headers(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secrets[name]}"}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    made = Keys(tmp_path / "keys.toml")
    made.new("alice")
    made.new("bob", priority_ceiling=-3)
    made.new("reader", scopes=["read-only"])
    made.new("stranger", models=["another/model"])
    made.new("root", scopes=["admin"])
    return made


@pytest.fixture
async def stack(memory_bus: MemoryBus, keys: Keys) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus, keys_file=keys.path, api_keys=("key-1",)) as stack:
        yield stack


async def chat(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3, **fields)


def tokenizes(stack: GatewayStack) -> list[Tokenize]:
    return [message for message in stack.ring.seen if isinstance(message, Tokenize)]


async def test_each_scope_allows_its_endpoints_only(stack: GatewayStack, keys: Keys) -> None:
    await chat(stack.openai)  # the key of the settings
    await chat(keys.client(stack, "alice"))
    await keys.client(stack, "alice").models.list()
    reader = keys.client(stack, "reader")
    assert [model.id for model in (await reader.models.list()).data] == [MODEL]
    with pytest.raises(openai.PermissionDeniedError, match="'reader' has the scopes read-only; this needs inference"):
        await chat(reader)
    for name, status in (("alice", 403), ("reader", 403), ("root", 200)):
        answer = await stack.http.get("/admin/keys", headers=keys.headers(name))
        assert answer.status_code == status
    listed = {key["name"]: key for key in answer.json()["data"]}
    assert set(listed) == {"default", "alice", "bob", "reader", "stranger", "root"}
    assert listed["stranger"]["models"] == ["another/model"]
    assert answer.json()["file"] == {"path": str(keys.path), "error": None}
    with pytest.raises(openai.AuthenticationError):
        await chat(stack.openai.with_options(api_key="wrong"))


async def test_below_a_root_path_all_is_as_at_the_root(memory_bus: MemoryBus, keys: Keys) -> None:
    async with gateway_stack(memory_bus, keys_file=keys.path, root_path="/llm") as stack:
        below = keys.client(stack, "alice").with_options(base_url=f"{stack.url}/llm/v1")
        assert (await chat(below)).choices[0].message == (await chat(keys.client(stack, "alice"))).choices[0].message
        with pytest.raises(openai.AuthenticationError):
            await chat(below.with_options(api_key="wrong"))
        for path in ("/admin/keys", "/console/events"):  # what only operators may ask, and no page of another's
            answers = [await stack.http.get(each + path, headers=keys.headers("alice")) for each in ("", "/llm")]
            assert [answer.status_code for answer in answers] == [403, 403]
        page = await stack.http.get("/llm/console")
        assert "/llm" not in page.text
        assert page.content == (await stack.http.get("/console")).content
        assert (await stack.http.get("/llm")).status_code == (await stack.http.get("/llmv1/models")).status_code == 404


async def test_a_model_that_a_key_may_not_use_is_refused_and_not_listed(stack: GatewayStack, keys: Keys) -> None:
    stranger = keys.client(stack, "stranger")
    with pytest.raises(openai.PermissionDeniedError) as refused:
        await chat(stranger)
    assert refused.value.code == "model_not_found"
    assert (await stranger.models.list()).data == []
    with pytest.raises(openai.NotFoundError):
        await stranger.models.retrieve(MODEL)
    asked = await stack.http.post("/tokenize", json={"prompt": "a b"}, headers=keys.headers("stranger"))
    assert asked.status_code == 403
    assert tokenizes(stack) == []


async def test_an_alias_is_used_with_a_key_for_it_or_for_its_model(stack: GatewayStack, keys: Keys) -> None:
    watcher = stack.gateway.keys
    keys.new("by-alias", models=["small"])
    keys.new("by-model", models=[MODEL])
    await eventually(lambda: len(watcher.ring) == 8)
    stack.ring.aliases = (ModelName("small"), ModelName("tiny"))
    await stack.ring.announce()
    await eventually(lambda: bool(stack.gateway.requests.cluster.models()[0].aliases))
    every = [MODEL, "small", "tiny"]
    for name, shown in (("alice", every), ("by-alias", ["small"]), ("by-model", every)):
        client = keys.client(stack, name)
        assert [model.id for model in (await client.models.list()).data] == shown
        answer = await client.chat.completions.create(model="small", messages=HELLO, max_tokens=3)
        assert answer.model == "small"
        assert (await client.models.retrieve("small")).model_dump()["root"] == MODEL
        asked = await stack.http.post("/tokenize", json={"model": "small", "prompt": "a"}, headers=keys.headers(name))
        assert asked.status_code == 200
        loaded = await stack.http.post("/api/chat", json={"model": "small", "messages": []}, headers=keys.headers(name))
        assert loaded.json()["model"] == "small"
    by_alias = keys.client(stack, "by-alias")
    with pytest.raises(openai.PermissionDeniedError, match="'by-alias' does not have access to 'tiny'"):
        await by_alias.chat.completions.create(model="tiny", messages=HELLO)
    with pytest.raises(openai.NotFoundError):
        await by_alias.models.retrieve("tiny")
    page = (await stack.http.get("/metrics", headers=keys.headers("root"))).text
    assert f'model="{MODEL}"' in page
    assert 'model="small"' not in page


async def test_no_request_goes_before_its_keys_ceiling(stack: GatewayStack, keys: Keys) -> None:
    with pytest.raises(openai.BadRequestError, match="priority: -1 is not allowed; requests of this key may have 0"):
        await chat(keys.client(stack, "alice"), extra_body={"priority": -1})
    await chat(keys.client(stack, "alice"), extra_body={"priority": 4})
    await chat(keys.client(stack, "bob"), extra_body={"priority": -3})
    assert [message.priority for message in tokenizes(stack)] == [4, -3]


async def test_the_cache_salt_follows_the_key(stack: GatewayStack, keys: Keys) -> None:
    for name in ("alice", "bob"):
        await chat(keys.client(stack, name))
        await chat(keys.client(stack, name), extra_body={"cache_salt": "own"})
    assert [message.cache_salt for message in tokenizes(stack)] == ["alice/", "alice/own", "bob/", "bob/own"]


async def test_prefixes_are_shared_where_that_is_configured(memory_bus: MemoryBus, keys: Keys) -> None:
    async with gateway_stack(memory_bus, keys_file=keys.path, share_prefixes=True) as stack:
        await chat(keys.client(stack, "alice"))
        await chat(keys.client(stack, "bob"), extra_body={"cache_salt": "own"})
        assert [message.cache_salt for message in tokenizes(stack)] == [None, "own"]


async def test_each_request_leaves_a_line_without_any_text(
    stack: GatewayStack, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        answer = await chat(keys.client(stack, "alice"))
        stream = await chat(keys.client(stack, "bob"), stream=True)
        async for _ in stream:
            pass
        with pytest.raises(openai.PermissionDeniedError):
            await chat(keys.client(stack, "stranger"))
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await chat(keys.client(stack, "reader"))

        def lines() -> list[Any]:
            return [vars(record) for record in caplog.records if record.getMessage() == "audit"]

        await eventually(lambda: len(lines()) == 4)
    said = [
        (line["key"], line["status"], line.get("outcome"), line["prompt_tokens"], line["output_tokens"])
        for line in lines()
    ]
    assert said == [
        ("alice", 200, "finished", 3, 3),
        ("bob", 200, "finished", 3, 3),
        ("stranger", 403, None, 0, 0),
        ("reader", 403, None, 0, 0),
    ]
    assert lines()[0]["request"] == answer.id
    assert lines()[3]["client_request"] == refused.value.response.headers["x-request-id"]
    assert {line["endpoint"] for line in lines()} == {"/v1/chat/completions"}
    assert [line.get("model") for line in lines()] == [MODEL, MODEL, MODEL, None]
    assert [(line.get("param"), line.get("code")) for line in lines()[1:3]] == [
        (None, None),
        ("model", "model_not_found"),
    ]
    assert not any("secret text" in repr(line) or keys.secrets["alice"] in repr(line) for line in lines())


async def test_strangers_leave_lines_and_cannot_fill_the_log(
    stack: GatewayStack, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(MAX_STRANGERS + 40):
            assert (await stack.http.get("/v1/models")).status_code == 401
    lines = [vars(record) for record in caplog.records if record.getMessage() == "audit"]
    assert MAX_STRANGERS <= len(lines) < MAX_STRANGERS + 40
    assert {(line.get("key"), line["status"], line["client"]) for line in lines} == {(None, 401, "127.0.0.1")}


async def test_the_file_is_read_again_when_it_changes_and_a_bad_one_changes_nothing(
    stack: GatewayStack, keys: Keys
) -> None:
    watcher = stack.gateway.keys
    keys.new("carol")
    await eventually(lambda: len(watcher.ring) == 7)
    await chat(keys.client(stack, "carol"))
    good = keys.path.read_text()
    keys.path.write_text(good + "\n[keys.")
    await eventually(lambda: watcher.error is not None)
    await chat(keys.client(stack, "carol"))
    listed = await stack.http.get("/admin/keys", headers=keys.headers("root"))
    assert "not valid TOML" in listed.json()["file"]["error"]
    assert 'baton_gateway_keys_file_valid{gateway="gateway-1"} 0.0' in (await stack.http.get("/metrics")).text
    keys.path.unlink()
    await eventually(lambda: "No such file" in str(watcher.error))
    keys.path.write_text(good.replace("[keys.carol]", "[keys.caroline]"))
    await eventually(lambda: watcher.error is None)
    await chat(keys.client(stack, "carol"))
    assert tokenizes(stack)[-1].cache_salt == "caroline/"
    keys.path.write_text(good.partition("[keys.carol]")[0])
    await eventually(lambda: len(watcher.ring) == 6)
    with pytest.raises(openai.AuthenticationError):
        await chat(keys.client(stack, "carol"))


async def test_a_file_without_keys_opens_nothing(memory_bus: MemoryBus, tmp_path: Path) -> None:
    empty = tmp_path / "keys.toml"
    empty.touch()
    async with gateway_stack(memory_bus, keys_file=empty) as stack:
        with pytest.raises(openai.AuthenticationError):
            await chat(stack.openai)
        assert (await stack.http.get("/ready")).status_code == 200


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"host": "127.0.0.1"}, False),
        ({"host": "::1"}, False),
        ({"host": "localhost"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": ""}, True),
        ({"host": "::"}, True),
        ({"host": "10.0.0.7"}, True),
        ({"host": "gateway.example"}, True),
        ({"host": "0.0.0.0", "insecure": True}, False),
        ({"host": "0.0.0.0", "api_keys": ("k",)}, False),
        ({"host": "0.0.0.0", "keys_file": Path("keys.toml")}, False),
        ({"host": "0.0.0.0", "published_host": "127.0.0.1"}, False),
        ({"host": "127.0.0.1", "published_host": "0.0.0.0"}, True),
    ],
)
def test_strangers_are_let_in_only_on_purpose(settings: dict[str, Any], refused: bool) -> None:
    if not refused:
        GatewayConfig(**settings)
        return
    with pytest.raises(ValueError, match="other machines could use this one without an API key"):
        GatewayConfig(**settings)


# Limits.


@pytest.fixture
async def limited(memory_bus: MemoryBus, keys: Keys) -> AsyncIterator[GatewayStack]:
    keys.new("few", requests_per_minute=2)
    keys.new("short", tokens_per_minute=300)
    keys.new("narrow", concurrent_requests=1)
    async with gateway_stack(memory_bus, keys_file=keys.path, clock=standing_clock) as stack:
        yield stack


def standing_clock() -> float:
    """Nothing is given back meanwhile, however slow the machine is."""
    return 1000.0


async def test_requests_per_minute_end_in_a_429_that_says_when_to_come_back(limited: GatewayStack, keys: Keys) -> None:
    few = keys.client(limited, "few")
    answer = await few.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=3)
    assert answer.headers["x-ratelimit-limit-requests"] == "2"
    assert answer.headers["x-ratelimit-remaining-requests"] == "1"
    assert answer.headers["x-ratelimit-reset-requests"] == "30s"
    assert "x-ratelimit-limit-tokens" not in answer.headers
    async for _ in await chat(few, stream=True):
        pass
    with pytest.raises(openai.RateLimitError, match="Rate limit reached for the key 'few': 2 requests per minute"):
        await chat(few)
    asked = await limited.http.post("/tokenize", json={"prompt": "a"}, headers=keys.headers("few"))
    assert asked.status_code == 429
    assert asked.headers["x-ratelimit-remaining-requests"] == "0"
    assert asked.headers["retry-after"] == "30"
    assert asked.json()["error"]["type"] == "rate_limit_error"
    assert asked.json()["error"]["code"] == "rate_limit_exceeded"
    await few.models.list()  # looking costs nothing
    await chat(keys.client(limited, "alice"))


async def test_tokens_are_counted_as_they_were_used(limited: GatewayStack, keys: Keys) -> None:
    short = keys.client(limited, "short")

    async def left() -> int:
        answer = await short.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=3)
        return int(answer.headers["x-ratelimit-remaining-tokens"])

    first = await left()  # 300, without what is set aside: the text by its length, and max_tokens
    assert 270 <= first < 297
    assert await left() == first - 6  # three tokens of prompt and three of output
    with pytest.raises(openai.RateLimitError, match="300 tokens per minute"):
        await chat(short, n=100)


async def test_concurrent_requests_are_limited_also_while_their_answers_are_read(
    limited: GatewayStack, keys: Keys
) -> None:
    narrow = keys.client(limited, "narrow")
    held = asyncio.create_task(narrow.completions.create(model=MODEL, prompt="HOLD", max_tokens=2))
    await eventually(lambda: bool(limited.ring.running))
    with pytest.raises(openai.RateLimitError, match="1 concurrent requests"):
        await chat(narrow)
    limited.ring.hold.set()
    await held
    await chat(narrow)
    listed = await limited.http.get("/admin/keys", headers=keys.headers("root"))
    assert {key["name"]: key["requests_open"] for key in listed.json()["data"]}["narrow"] == 0


async def test_two_gateways_count_together(memory_bus: MemoryBus, limited: GatewayStack, keys: Keys) -> None:
    async with gateway_stack(
        memory_bus, ring=limited.ring, wait=False, clock=standing_clock, instance="gateway-2", keys_file=keys.path
    ) as other:
        await eventually(lambda: other.runtime.phase == "ready")

        async def left(stack: GatewayStack) -> dict[str, Any]:
            listed = await stack.http.get("/admin/keys", headers=keys.headers("root"))
            return {key["name"]: key for key in listed.json()["data"]}["few"]

        await chat(keys.client(limited, "few"))
        while (await left(other))["requests_left"] == 2:
            await asyncio.sleep(0.01)
        await chat(keys.client(other, "few"))
        while (await left(limited))["requests_left"] == 1:
            await asyncio.sleep(0.01)
        for stack in (limited, other):
            with pytest.raises(openai.RateLimitError):
                await chat(keys.client(stack, "few"))


# Where keys compete.


async def test_requests_carry_their_keys_name_and_weight_where_there_are_several(
    memory_bus: MemoryBus, keys: Keys
) -> None:
    keys.new("heavy", weight=2.5)
    async with gateway_stack(memory_bus, keys_file=keys.path) as stack:
        for name in ("alice", "heavy"):
            await chat(keys.client(stack, name))
        await keys.client(stack, "heavy").completions.create(
            model=MODEL, prompt="a b", n=1, max_tokens=1, extra_body={"use_beam_search": True}
        )
        said = {(message.key, message.weight) for message in tokenizes(stack)}
        assert said == {("alice", 1.0), ("heavy", 2.5)}


async def test_the_only_key_competes_with_nobody(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus, api_keys=("key-1",)) as stack:
        await chat(stack.openai)
        assert [(message.key, message.weight) for message in tokenizes(stack)] == [("", 1.0)]


async def test_one_key_cannot_have_all_that_a_gateway_may_have_open(memory_bus: MemoryBus, keys: Keys) -> None:
    async with gateway_stack(memory_bus, keys_file=keys.path, max_open_requests=16) as stack:

        async def held(name: str) -> None:
            await keys.client(stack, name).completions.create(model=MODEL, prompt="HOLD", n=4, max_tokens=1)

        first = [asyncio.create_task(held("alice")) for _ in range(3)]
        await eventually(lambda: len(stack.ring.running) == 12)
        with pytest.raises(openai.RateLimitError, match="12 requests of the key 'alice' are open, and 4 more may be"):
            await held("alice")
        second = asyncio.create_task(held("bob"))
        await eventually(lambda: len(stack.ring.running) == 16)
        stack.ring.hold.set()
        await asyncio.gather(*first, second)
        await held("alice")
