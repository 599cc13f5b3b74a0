"""Batches on a real database, with answers made here: each line is answered once, whatever happens to its gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.gateway.api.batches.batch import BatchFields, BatchState
from services.gateway.api.batches.files import ExpiresAfter
from services.gateway.api.batches.lines import BatchAnswer, BatchRequest
from services.gateway.api.errors import RequestError
from services.gateway.batches.batch_run import BATCH_PRIORITY, BatchLimits, BatchRun
from services.gateway.batches.batch_store import BATCHES, BatchStore, batch_of
from services.gateway.batches.file_store import RESULTS, FileLimits, FileStore
from services.gateway.batches.window import BatchWindow, EngineRoom
from services.gateway.core.api_keys import KeyName
from services.gateway.database.database_url import open_database
from services.gateway.database.records import Database, DatabaseUnavailable


class Clock:
    """Moved by the test."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Process:
    """What one gateway has: its own connections to the database, which a test may freeze or cut."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.database = open_database(f"sqlite:///{path}", clock)
        self.running = asyncio.Event()
        self.running.set()
        self.cut = False
        self.asked: list[BatchRequest] = []
        self.statuses: dict[str, list[int]] = {}
        """What a line gets before its 200, by its custom id."""
        self.hold = asyncio.Event()
        self.hold.set()
        self.files = FileStore(self._watched(), FileLimits(10**7, 100, 10**8, 100_000.0), clock)
        self.batches = BatchStore(self.database, self.files, 100, clock)
        self._clock = clock

    def _watched(self) -> Database:
        process, database = self, self.database

        class Watched:
            def __getattr__(self, name: str) -> Any:
                async def call(*given: Any, **named: Any) -> Any:
                    await process.running.wait()
                    if process.cut:
                        raise DatabaseUnavailable("it is away")
                    return await getattr(database, name)(*given, **named)

                return call

        return Watched()  # type: ignore[return-value]

    async def claim(self, name: str, **limits: Any) -> BatchRun | None:
        record = await self.database.claim(BATCHES, name, 10.0)
        if record is None:
            return None
        defaults = {"max_lines": 100, "max_line": 1000, "concurrency": 8, "lease": 10.0, "retention": 1000.0}
        bounds = BatchLimits(**{**defaults, **limits})
        window = BatchWindow(8, lambda: EngineRoom(100, 0))
        return BatchRun(self._watched(), self.files, window, self.answer, bounds, batch_of(record), self._clock)

    async def answer(self, request: BatchRequest, key: KeyName) -> BatchAnswer:
        self.asked.append(request)
        await self.hold.wait()
        left = self.statuses.get(request.custom_id, [])
        status = left.pop(0) if left else 200
        return BatchAnswer(status, request.id, json.dumps({"key": key, "of": request.custom_id}).encode())


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def gateways(tmp_path: Path, clock: Clock) -> AsyncIterator[list[Process]]:
    made = [Process(tmp_path / "database.sqlite", clock) for _ in range(2)]
    yield made
    for process in made:  # what a failed test has left ends, too
        process.running.set()
        process.hold.set()
        await process.database.close()


def line(name: str, **changes: Any) -> bytes:
    request = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}
    return json.dumps({**request, **changes}).encode() + b"\n"


async def new_batch(process: Process, text: bytes, **fields: Any) -> str:
    writer = await process.files.create("alice", "in.jsonl", len(text))
    await writer.write(text)
    file = await writer.finish("batch", None)
    given = {"input_file_id": file.record.id, "endpoint": "/v1/completions", "completion_window": "24h", **fields}
    batch = await process.batches.create("alice", BatchFields(**given))
    return batch.record.id


async def claimed_with_bad_lines(process: Process, names: list[str]) -> tuple[str, BatchRun]:
    """Lines that are answered with 400 by that process, so that another one's answers are told from its."""
    id = await new_batch(process, b"".join(map(line, names)))
    process.statuses = {name: [400] for name in names}
    run = await process.claim("one")
    assert run is not None
    return id, run


async def state(process: Process, id: str) -> BatchState:
    return (await process.batches.get("alice", id)).state


async def lines_of(process: Process, file: str | None) -> list[Any]:
    if file is None:
        return []
    found = await process.files.get("alice", file)
    text = b"".join([piece async for piece in process.files.contents(found)])
    assert len(text) == found.record.size
    return [json.loads(each) for each in text.splitlines()]


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_every_line_is_answered_in_its_place_with_the_least_priority(gateways: list[Process]) -> None:
    first, _ = gateways
    text = line("a") + b"\n" + line("b") + line("c", body={"prompt": "x", "priority": 3})[:-1]
    id = await new_batch(first, text)
    assert (await state(first, id)).status == "validating"
    run = await first.claim("one")
    assert run is not None

    await run.run()

    done = await state(first, id)
    assert (done.status, done.total, done.completed, done.failed) == ("completed", 3, 3, 0)
    assert list(done.times) == ["in_progress", "finalizing", "completed"]
    assert done.error_file_id is None
    entries = await lines_of(first, done.output_file_id)
    assert [entry["custom_id"] for entry in entries] == ["a", "b", "c"]
    assert entries[0]["response"] == {
        "status_code": 200,
        "request_id": entries[0]["id"],
        "body": {"key": "alice", "of": "a"},
    }
    assert sorted(json.loads(each.body)["priority"] for each in first.asked) == [3, BATCH_PRIORITY, BATCH_PRIORITY]
    assert await first.claim("two") is None


async def test_refused_lines_are_in_the_error_file_and_busy_ones_are_tried_again(gateways: list[Process]) -> None:
    first, _ = gateways
    id = await new_batch(first, line("a") + line("bad") + line("busy"))
    first.statuses = {"bad": [400], "busy": [429, 503]}
    run = await first.claim("one")
    assert run is not None

    await run.run()

    done = await state(first, id)
    assert (done.status, done.completed, done.failed) == ("completed", 2, 1)
    assert [entry["custom_id"] for entry in await lines_of(first, done.output_file_id)] == ["a", "busy"]
    (failed,) = await lines_of(first, done.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)


@pytest.mark.parametrize(
    ("text", "code", "number", "message"),
    [
        (b"", "empty_file", None, "there is no request in the file"),
        (b"\n \n", "empty_file", None, "there is no request"),
        (line("a") + b"{", "invalid_line", 2, "line 2: "),
        (line("a") + line("a"), "duplicate_custom_id", 2, "line 2: custom_id 'a' stands in line 1 already"),
        (line("a", url="/v1/embeddings"), "mismatched_endpoint", 1, "is not the batch's endpoint, /v1/completions"),
        (line("a", body={"stream": True}), "invalid_request", 1, "body.stream: true is not allowed"),
        (line("a", body={"prompt": "x" * 2000}), "line_too_long", 1, "line 1: longer than 1000 bytes"),
        (b"".join(line(str(n)) for n in range(101)), "too_many_lines", None, "more than the 100 requests"),
    ],
)
async def test_an_input_that_cannot_be_used_fails_the_batch_before_any_line_is_sent(
    gateways: list[Process], text: bytes, code: str, number: int | None, message: str
) -> None:
    first, _ = gateways
    id = await new_batch(first, text)
    run = await first.claim("one")
    assert run is not None

    await run.run()

    failed = await state(first, id)
    assert (failed.status, failed.output_file_id) == ("failed", None)
    assert (failed.errors[-1].code, failed.errors[-1].line) == (code, number)
    assert message in failed.errors[-1].message
    assert first.asked == []
    assert await first.claim("two") is None


async def test_an_input_that_is_gone_fails_the_batch(gateways: list[Process]) -> None:
    first, _ = gateways
    id = await new_batch(first, line("a"))
    await first.files.delete("alice", (await state(first, id)).input_file_id)
    run = await first.claim("one")
    assert run is not None

    await run.run()

    assert (await state(first, id)).errors[0].code == "input_file_gone"


async def test_an_input_that_goes_while_it_is_read_fails_the_batch(gateways: list[Process]) -> None:
    first, _ = gateways
    id = await new_batch(first, b"".join(line(str(number), body={"prompt": "x" * 9000}) for number in range(150)))
    file = (await state(first, id)).input_file_id
    run = await first.claim("one", max_lines=1000, max_line=10_000)
    assert run is not None
    first.hold.clear()
    working = asyncio.create_task(run.run())
    await until(lambda: first.asked)  # of what it has read, which is not all
    await first.files.delete("alice", file)
    first.hold.set()

    await working

    failed = await state(first, id)
    assert (failed.status, failed.errors[0].code) == ("failed", "input_file_gone")
    assert 0 < failed.completed < failed.total == 150
    assert len(await lines_of(first, failed.output_file_id)) == failed.completed


async def test_a_bug_ends_the_batch_with_all_that_was_written(
    gateways: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = gateways
    id = await new_batch(first, line("good") + line("bug"))
    written = asyncio.Event()
    answer, add_chunks = first.answer, first.database.add_chunks

    async def answer_or_fail(request: BatchRequest, key: KeyName) -> BatchAnswer:
        if request.custom_id == "bug":
            await written.wait()
            raise ZeroDivisionError
        return await answer(request, key)

    async def add_and_hang(*given: Any) -> None:
        await add_chunks(*given)
        written.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(first, "answer", answer_or_fail)
    monkeypatch.setattr(first.database, "add_chunks", add_and_hang)
    run = await first.claim("one")
    assert run is not None

    await run.run()

    failed = await state(first, id)
    assert (failed.status, failed.errors[0].code, failed.completed) == ("failed", "internal_error", 1)
    assert [entry["custom_id"] for entry in await lines_of(first, failed.output_file_id)] == ["good"]


async def test_another_gateway_goes_on_where_a_killed_one_was(gateways: list[Process], clock: Clock) -> None:
    first, second = gateways
    names = [str(number) for number in range(40)]
    id = await new_batch(first, b"".join(map(line, names)))
    run = await first.claim("one")
    assert run is not None
    first.statuses = {name: [429] * 100 for name in names[35:]}
    working = asyncio.create_task(run.run())
    while len(await second.database.positions(RESULTS, id)) < 20:
        await asyncio.sleep(0.005)
    first.cut = True  # not even a goodbye
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await first.database.close()  # what a thread is writing is written
    written = set(await second.database.positions(RESULTS, id))
    assert 20 <= len(written) <= 35

    assert await second.claim("two") is None  # the lease holds
    clock.now += 11
    other = await second.claim("two")
    assert other is not None
    await other.run()

    done = await state(second, id)
    assert (done.status, done.total, done.completed) == ("completed", 40, 40)
    assert [entry["custom_id"] for entry in await lines_of(second, done.output_file_id)] == names
    assert len(second.asked) == 40 - len(written)


async def test_a_gateway_that_was_only_slow_writes_no_line_twice(gateways: list[Process], clock: Clock) -> None:
    first, second = gateways
    names = [str(number) for number in range(20)]
    id, run = await claimed_with_bad_lines(first, names)
    working = asyncio.create_task(run.run())
    await until(lambda: len(first.asked) >= 5)
    first.running.clear()  # as a stopped process, with answers in its hands
    clock.now += 11
    other = await second.claim("two")
    assert other is not None
    await other.run()
    before = await state(second, id)
    first.running.set()

    await working

    assert await state(second, id) == before
    assert (before.status, before.completed + before.failed) == ("completed", 20)
    good, bad = await lines_of(second, before.output_file_id), await lines_of(second, before.error_file_id)
    assert sorted(int(entry["custom_id"]) for entry in good + bad) == list(range(20))


async def test_a_slow_gateway_adds_nothing_to_what_its_follower_has_read(gateways: list[Process], clock: Clock) -> None:
    first, second = gateways
    names = [str(number) for number in range(20)]
    id, run = await claimed_with_bad_lines(first, names)
    first.hold.clear()
    working = asyncio.create_task(run.run())
    await until(lambda: len(first.asked) == 8)
    first.running.clear()
    first.hold.set()  # so it has answers in its hands
    clock.now += 11
    second.hold.clear()
    other = await second.claim("two")
    assert other is not None
    following = asyncio.create_task(other.run())
    await until(lambda: len(second.asked) == 8)  # so it has read that there is none

    first.running.set()
    await working
    second.hold.set()
    await following

    done = await state(second, id)
    assert (done.status, done.completed, done.failed) == ("completed", 20, 0)
    assert [entry["custom_id"] for entry in await lines_of(second, done.output_file_id)] == names


async def test_a_gateway_that_stops_gives_its_batch_away_at_once(gateways: list[Process]) -> None:
    first, second = gateways
    id = await new_batch(first, line("a") + line("b"))
    first.hold.clear()
    run = await first.claim("one")
    assert run is not None
    working = asyncio.create_task(run.run())
    await until(lambda: len(first.asked) == 2)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)

    other = await second.claim("two")
    assert other is not None
    await other.run()

    assert (await state(second, id)).completed == 2


async def test_a_cancelled_batch_keeps_what_was_answered(gateways: list[Process]) -> None:
    first, second = gateways
    id = await new_batch(first, b"".join(map(line, "abc")))
    first.statuses = {"b": [429] * 100}
    run = await first.claim("one")
    assert run is not None
    working = asyncio.create_task(run.run())
    await until(lambda: len(first.asked) >= 4)

    cancelling = await second.batches.cancel("alice", id)
    assert cancelling.state.status == "cancelling"
    await working

    done = await state(first, id)
    assert (done.status, done.completed, done.failed) == ("cancelled", 2, 0)
    assert {"cancelling", "cancelled"} <= set(done.times)
    assert [entry["custom_id"] for entry in await lines_of(first, done.output_file_id)] == ["a", "c"]
    assert (await first.batches.cancel("alice", id)).state == done


async def test_only_what_is_not_over_is_cancelled_and_only_by_its_owner(gateways: list[Process]) -> None:
    first, _ = gateways
    id = await new_batch(first, line("a"))
    with pytest.raises(RequestError, match="No such Batch object"):
        await first.batches.cancel("bob", id)
    run = await first.claim("one")
    assert run is not None
    await run.run()
    with pytest.raises(RequestError, match="a batch with the status completed cannot be cancelled"):
        await first.batches.cancel("alice", id)


async def test_a_batch_that_nobody_had_is_cancelled_by_whoever_claims_it(gateways: list[Process]) -> None:
    first, _ = gateways
    id = await new_batch(first, line("a"))
    await first.batches.cancel("alice", id)
    run = await first.claim("one")
    assert run is not None

    await run.run()

    assert ((await state(first, id)).status, first.asked) == ("cancelled", [])


async def test_what_has_no_answer_at_the_end_of_the_window_gets_an_error(gateways: list[Process], clock: Clock) -> None:
    first, _ = gateways
    id = await new_batch(first, b"".join(map(line, "abc")), completion_window="1h")
    first.statuses = {"b": [503] * 100}
    run = await first.claim("one", lease=7200.0)
    assert run is not None
    working = asyncio.create_task(run.run())
    await until(lambda: len(first.asked) >= 4)
    clock.now += 3600

    await working

    done = await state(first, id)
    assert (done.status, done.completed, done.failed, done.expired) == ("expired", 2, 1, 1)
    (expired,) = await lines_of(first, done.error_file_id)
    assert (expired["custom_id"], expired["response"], expired["error"]["code"]) == ("b", None, "batch_expired")


async def test_a_batch_waits_for_a_database_that_is_away_for_a_moment(
    gateways: list[Process], caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = gateways
    id = await new_batch(first, b"".join(map(line, "abcdef")))
    first.hold.clear()
    run = await first.claim("one")
    assert run is not None
    working = asyncio.create_task(run.run())
    await until(lambda: len(first.asked) == 6)
    first.cut = True
    first.hold.set()
    await until(lambda: "batch waits for the database" in caplog.messages)
    first.cut = False

    await working

    assert (await state(first, id)).completed == 6


async def test_results_go_with_both_of_their_files(gateways: list[Process]) -> None:
    first, _ = gateways
    id = await new_batch(first, line("a") + line("bad"))
    first.statuses = {"bad": [400]}
    run = await first.claim("one")
    assert run is not None
    await run.run()
    done = await state(first, id)
    assert done.output_file_id is not None
    assert done.error_file_id is not None

    await first.files.delete("alice", done.output_file_id)
    assert len(await lines_of(first, done.error_file_id)) == 1
    await first.files.delete("alice", done.error_file_id)

    assert await first.database.get(RESULTS, id) is None


async def test_files_of_a_batch_go_when_its_client_says(gateways: list[Process], clock: Clock) -> None:
    first, _ = gateways
    id = await new_batch(first, line("a"), output_expires_after=ExpiresAfter("created_at", 5000))
    run = await first.claim("one")
    assert run is not None
    await run.run()
    output = (await state(first, id)).output_file_id
    assert output is not None

    clock.now += 4000
    assert len(await lines_of(first, output)) == 1
    clock.now += 1000
    with pytest.raises(RequestError, match="No such File object"):
        await first.files.get("alice", output)
