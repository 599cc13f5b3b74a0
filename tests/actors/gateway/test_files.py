"""`/v1/files` by the official client and over raw HTTP, on a database of each kind that is at hand everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from deploy.cli.keys import new_key
from services.gateway.batches.file_store import FILES
from services.gateway.http.apis import files
from shared.bus.memory_bus import MemoryBus
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack

LINES = b"".join(b'{"line": %d}\n' % number for number in range(60_000))
"""Some chunks of it."""


@pytest.fixture
async def stack(memory_bus: MemoryBus, tmp_path: Path) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus, database_file=tmp_path / "database.sqlite") as stack:
        yield stack


async def upload(client: openai.AsyncOpenAI, text: bytes = b"{}\n", name: str = "a.jsonl", **fields: Any) -> Any:
    return await client.files.create(file=(name, text), purpose="batch", **fields)


async def test_a_file_comes_back_as_it_was_sent(stack: GatewayStack) -> None:
    client = stack.openai
    file = await upload(client, LINES, "ünïcode.jsonl")
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(LINES), "ünïcode.jsonl", "batch")
    assert (file.status, file.expires_at) == ("processed", file.created_at + 30 * 86_400)

    assert await client.files.retrieve(file.id) == file
    assert (await client.files.content(file.id)).content == LINES
    deleted = await client.files.delete(file.id)
    assert (deleted.id, deleted.deleted) == (file.id, True)
    for gone in (client.files.retrieve(file.id), client.files.content(file.id), client.files.delete(file.id)):
        with pytest.raises(openai.NotFoundError, match="No such File object"):
            await gone


async def test_lists_go_on_behind_a_file(stack: GatewayStack) -> None:
    client = stack.openai
    made = [(await upload(client, name=f"{number}.jsonl")).id for number in range(5)]

    assert [file.id async for file in client.files.list()] == made[::-1]
    assert [file.id async for file in client.files.list(limit=2, order="asc")] == made
    page = await client.files.list(limit=2)
    assert ([file.id for file in page.data], page.has_more) == (made[:2:-1], True)
    last = await client.files.list(after=made[1])
    assert ([file.id for file in last.data], last.has_more) == ([made[0]], False)
    assert (await client.files.list(purpose="batch_output")).data == []


async def test_a_client_says_when_its_file_goes(stack: GatewayStack) -> None:
    file = await upload(stack.openai, expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600


async def test_files_outlive_their_gateway(memory_bus: MemoryBus, tmp_path: Path) -> None:
    kept = tmp_path / "database.sqlite"
    async with gateway_stack(memory_bus, database_file=kept) as stack:
        file = await upload(stack.openai, LINES)
    async with gateway_stack(memory_bus, database_file=kept) as stack:
        assert (await stack.openai.files.content(file.id)).content == LINES


async def test_a_key_sees_only_its_own_files_and_leaves_others_room_to_send(
    memory_bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.toml"
    secrets = {name: new_key(keys, name, {}) for name in ("alice", "bob")}
    secrets["reader"] = new_key(keys, "reader", {"scopes": ["read-only"]})
    secrets["busy"] = new_key(keys, "busy", {"requests_per_minute": 1})
    async with gateway_stack(memory_bus, database_file=tmp_path / "database.sqlite", keys_file=keys) as stack:
        clients = {name: stack.openai.with_options(api_key=secret) for name, secret in secrets.items()}
        hers = await upload(clients["alice"])
        assert [file.id async for file in clients["alice"].files.list()] == [hers.id]

        bob = clients["bob"]
        assert (await bob.files.list()).data == []
        for hidden in (bob.files.retrieve(hers.id), bob.files.content(hers.id), bob.files.delete(hers.id)):
            with pytest.raises(openai.NotFoundError):
                await hidden
        with pytest.raises(openai.BadRequestError, match="the id of one of the files"):
            await bob.files.list(after=hers.id)
        with pytest.raises(openai.PermissionDeniedError, match="this needs inference"):
            await clients["reader"].files.list()
        for _ in range(3):  # what is kept does not count as requests
            await upload(clients["busy"])

        monkeypatch.setattr(files, "MAX_UPLOADS", 2)
        begun, going_on = asyncio.Event(), asyncio.Event()

        async def slow_form() -> AsyncIterator[bytes]:
            yield form(PURPOSE, FILE, end=b"")
            begun.set()
            await going_on.wait()
            yield b"--b--\r\n"

        headers = {"authorization": f"Bearer {secrets['alice']}", **BOUNDARY}
        slow = asyncio.create_task(stack.http.post("/v1/files", content=slow_form(), headers=headers))
        await begun.wait()

        async def one_after_the_other() -> None:
            while True:  # once the slow one has arrived
                await upload(clients["alice"])

        with pytest.raises(openai.RateLimitError, match="1 of them with this key; of 2 that are allowed a key may"):
            await one_after_the_other()
        await upload(bob)
        going_on.set()
        assert (await slow).status_code == 200


async def test_what_a_key_keeps_is_bounded(memory_bus: MemoryBus, tmp_path: Path) -> None:
    limits = {"max_file": 1000, "max_files": 2, "max_stored": 1500}
    async with gateway_stack(memory_bus, database_file=tmp_path / "database.sqlite", **limits) as stack:
        client = stack.openai
        with pytest.raises(openai.APIStatusError, match="larger than the 1000 bytes") as raised:
            await upload(client, b"x" * 1001)
        assert raised.value.status_code == 413
        with pytest.raises(openai.APIStatusError, match="body: larger than the 66536 bytes") as raised:
            await upload(client, b"x" * 100_000)
        assert raised.value.status_code == 413
        first = await upload(client, b"x" * 1000)
        with pytest.raises(openai.BadRequestError, match="1000 bytes are kept for this key, of 1500"):
            await upload(client, b"x" * 800)
        await upload(client, b"x" * 10)
        with pytest.raises(openai.BadRequestError, match="2 files are kept for this key, which is the limit"):
            await upload(client)
        await client.files.delete(first.id)
        await upload(client)


BOUNDARY = {"content-type": "multipart/form-data; boundary=b"}


def form(*parts: tuple[str, bytes], end: bytes = b"--b--\r\n") -> bytes:
    return (
        b"".join(b"--b\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n" % (p[0].encode(), p[1]) for p in parts)
        + end
    )


FILE = ('name="file"; filename="a.jsonl"', b"{}\n")
PURPOSE = ('name="purpose"', b"batch")


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        (form(PURPOSE), "file", "file: this field is required"),
        (form(FILE), "purpose", "purpose: this field is required"),
        (form(FILE, FILE, PURPOSE), "file", "file: this field is there twice"),
        (form(FILE, PURPOSE, PURPOSE), "purpose", "purpose: this field is there twice"),
        (form(FILE, ('name="purpose"', b"vision")), "purpose", "purpose: 'vision' is not allowed; batch is expected"),
        (form(FILE, PURPOSE, ('name="model"', b"x")), "model", "model: this field is not known"),
        (form(('name="file"', b"{}"), PURPOSE), "file", "file: a file with a name is expected"),
        (form(('name="file"; filename=""', b"{}"), PURPOSE), "file", "file: '' is not allowed; a name of 1 to 256"),
        (form(('name="purpose"', b"x" * 2000), FILE), "purpose", "purpose: longer than the 1024 bytes"),
        (form(('nothing="x"', b"x"), FILE), "body", "body: a part of the form has no name"),
        (form(*[(f'name="p{n}"; filename="x"', b"") for n in range(2)]), "p0", "p0: this field is not known"),
        (form(FILE, PURPOSE, end=b""), "body", "body: the form ends before its last boundary"),
        (b"nothing of a form", "body", "body: not a valid form"),
        (
            form(FILE, PURPOSE, ('name="expires_after[seconds]"', b"3600")),
            "expires_after",
            "expires_after: ",
        ),
        (
            form(
                FILE, PURPOSE, ('name="expires_after[anchor]"', b"created_at"), ('name="expires_after[seconds]"', b"7")
            ),
            "expires_after",
            "expires_after: ",
        ),
    ],
)
async def test_a_form_that_is_none_is_refused_by_field_and_leaves_nothing(
    stack: GatewayStack, body: bytes, param: str, text: str
) -> None:
    answer = await stack.http.post("/v1/files", content=body, headers=BOUNDARY)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert answer.json()["error"]["message"].startswith(text)
    assert stack.gateway.database is not None
    assert await stack.gateway.database.page(FILES, "", limit=5) == []


@pytest.mark.parametrize("split", [1, 7])
async def test_a_form_may_come_in_any_pieces_and_order(stack: GatewayStack, split: int) -> None:
    body = form(FILE, PURPOSE)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), split):
            yield body[start : start + split]

    answer = await stack.http.post("/v1/files", content=pieces(), headers=BOUNDARY)

    assert answer.status_code == 200
    assert (await stack.openai.files.content(answer.json()["id"])).content == b"{}\n"


async def test_other_bodies_and_parameters_are_refused_by_name(stack: GatewayStack) -> None:
    json = await stack.http.post("/v1/files", json={})
    assert (json.status_code, json.json()["error"]["param"]) == (400, "body")
    for given, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("page=2", "page")):
        answer = await stack.http.get(f"/v1/files?{given}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_client_that_leaves_within_its_upload_leaves_nothing(stack: GatewayStack) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield form(('name="file"; filename="a"', LINES), end=b"")
        raise ZeroDivisionError

    with pytest.raises((ZeroDivisionError, httpx2.HTTPError)):
        await stack.http.post("/v1/files", content=broken(), headers=BOUNDARY)

    assert stack.gateway.database is not None
    async with asyncio.timeout(60):
        while await stack.gateway.database.page(FILES, "", limit=5):
            await asyncio.sleep(0.02)


async def test_without_a_database_nothing_is_kept(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus) as stack:
        with pytest.raises(
            openai.NotFoundError, match="the gateway has no database; the server's --database names one"
        ):
            await upload(stack.openai)


async def test_a_database_that_is_away_is_a_503(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus, database="redis://127.0.0.1:1/0") as stack:
        with pytest.raises(openai.APIStatusError, match="the database is away; try again") as raised:
            await upload(stack.openai)
        assert raised.value.status_code == 503
