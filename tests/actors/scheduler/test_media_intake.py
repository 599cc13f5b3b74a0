"""Rows of images are on an engine's host before its core and its ranks read them, and leave with their request."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.scheduler.media_intake import MediaIntake, RowsMemory
from services.worker.batch.prompt_inputs import EmbeddedPrompt
from services.worker.rank_rows import RankRows, names_rows
from shared import topics
from shared.bus.memory_bus import MemoryBus
from shared.ids import Attempt, EngineId, GatewayId, Incarnation, InstanceId, ModelName, RequestId, RowsName, SequenceId
from shared.media.rows_folder import RowsFolder
from shared.media.rows_reader import PIECE_BYTES, RowsLost
from shared.messages.encoder import ReadRows, RowsPiece
from shared.messages.gateway import GatewayMessage, RequestFailed, RowsMissing
from shared.messages.generation import Generation, MediaRows, PromptEmbeds, SamplingOptions, StopConditions
from shared.messages.scheduler import GenerateRequest
from shared.messages.worker import NewSequence, StepPlan

ENGINE, ENCODER, GATEWAY = EngineId("engine-1"), InstanceId("encoder-1"), GatewayId("gateway-1")
A, B = RowsName(bytes(16)), RowsName(bytes([1] * 16))
ROWS = {A: bytes([7]) * 4 * 100, B: bytes([9]) * (PIECE_BYTES + 400)}


def asking(request: str, *names: RowsName) -> GenerateRequest:
    media = tuple(MediaRows(name, len(ROWS[name]) // 4, ENCODER) for name in names)
    runs, at = list[tuple[int, int]](), 1
    for each in media:
        runs.append((at, each.count))
        at += each.count + 1
    embeds = PromptEmbeds(dtype="float32", size=1, rows=b"", runs=tuple(runs), media=media)
    generation = Generation(
        request=RequestId(request),
        attempt=Attempt(1),
        gateway=GATEWAY,
        model=ModelName("m"),
        tokens=bytes(4 * at),
        prompt_length=at,
        block_hashes=b"",
        sampling=SamplingOptions(seed=0),
        stopping=StopConditions(),
        prompt_embeds=embeds if names else None,
    )
    return GenerateRequest(generation, None)


def planned(generate: GenerateRequest) -> StepPlan:
    generation = generate.generation
    new = NewSequence(
        sequence=SequenceId(0),
        tokens=generation.tokens,
        prompt_length=generation.prompt_length,
        computed=0,
        blocks=b"",
        sampling=generation.sampling,
        prompt_embeds=generation.prompt_embeds,
    )
    return StepPlan(epoch=Incarnation(1), step=0, new=(new,))


class Engine:
    """An intake that runs, and what came of its requests."""

    def __init__(self, bus: MemoryBus, memory: RowsMemory) -> None:
        self.admitted: asyncio.Queue[GenerateRequest] = asyncio.Queue()
        self.said: asyncio.Queue[GatewayMessage] = asyncio.Queue()
        """To the gateway."""
        self.intake = MediaIntake(bus, ENGINE, memory, self.admitted.put)
        self.ranks = RankRows(bus, ENGINE)

    async def failure(self) -> str:
        """Why the next request fails, of which the gateway hears that it needs rows."""
        missing = await asyncio.wait_for(self.said.get(), 60)
        failed = await asyncio.wait_for(self.said.get(), 60)
        assert isinstance(missing, RowsMissing)
        assert isinstance(failed, RequestFailed)
        assert missing.request == failed.request
        return f"{failed.request}: {failed.reason}"

    async def rows(self, held: GenerateRequest) -> list[bytes]:
        """As a rank reads them."""
        plan = planned(held)
        assert names_rows(plan)
        (new,) = (await self.ranks.found(plan)).new
        assert new.prompt_embeds is not None
        prompt = EmbeddedPrompt(new.prompt_embeds)
        tokens, parts = prompt.between(0, held.generation.prompt_length)
        assert len(tokens) == sum(map(len, parts)) == new.prompt_embeds.count
        return [part.numpy().tobytes() for part in parts]


@asynccontextmanager
async def running(bus: MemoryBus, memory: RowsMemory) -> AsyncIterator[Engine]:
    engine = Engine(bus, memory)

    async def respond(request: ReadRows) -> RowsPiece:
        return engine.intake.piece(request)

    await bus.serve(topics.kept_rows(InstanceId(ENGINE)), respond)
    await bus.subscribe(topics.gateway_inbox(GATEWAY), engine.said.put)
    task = asyncio.create_task(engine.intake.run())
    yield engine
    task.cancel()
    engine.intake.close()


async def serving(bus: MemoryBus, *names: RowsName) -> list[ReadRows]:
    """An encoder of another host that has these rows; what it was asked."""
    asked: list[ReadRows] = []

    async def respond(request: ReadRows) -> RowsPiece:
        asked.append(request)
        rows = ROWS[request.name] if request.name in names else b""
        return RowsPiece(rows[request.start : request.start + PIECE_BYTES])

    await bus.serve(topics.kept_rows(ENCODER), respond)
    return asked


async def test_ranks_map_what_an_encoder_of_their_host_has(memory_bus: MemoryBus, tmp_path: Path) -> None:
    encoder = RowsFolder(tmp_path / ENCODER)
    for name, rows in ROWS.items():
        encoder.put(name, rows)
    async with running(memory_bus, RowsMemory(tmp_path)) as engine:
        plain = asking("plain")
        assert engine.intake.take(plain) is plain
        held = engine.intake.take(asking("both", A, B))
        assert held is not None
        for name in ROWS:
            encoder.remove(name)
        assert await engine.rows(held) == [ROWS[A], ROWS[B]]
        again = engine.intake.take(asking("again", A))
        assert again is not None, "its rows are here, though the encoder has them no longer"
        assert engine.intake.bytes_used == sum(map(len, ROWS.values()))
        engine.intake.release_ended({RequestId("again")})
        assert [each.name for each in (tmp_path / ENGINE).iterdir() if each.name != "lock"] == [A.hex()]
        assert engine.intake.bytes_used == len(ROWS[A])
        engine.intake.release_ended(())
        assert await engine.rows(held) == [bytes(len(ROWS[A])), bytes(len(ROWS[B]))], "its request has ended"
    left = RowsFolder(tmp_path / ENGINE)
    assert left.found() == {}


async def test_what_is_on_another_host_comes_by_the_bus(memory_bus: MemoryBus, tmp_path: Path) -> None:
    """To the scheduler's host from the encoder's, and from there to ranks that cannot read its files."""
    asked = await serving(memory_bus, A, B)
    async with running(memory_bus, RowsMemory(None)) as engine:
        assert engine.intake.take(asking("both", A, B)) is None
        assert RequestId("both") in engine.intake
        held = await asyncio.wait_for(engine.admitted.get(), 60)
        assert [each.start for each in asked] == [0, 0, PIECE_BYTES]
        embeds = held.generation.prompt_embeds
        assert embeds is not None
        far = asking("both", A, B)
        assert await engine.rows(held) == await engine.rows(far) == [ROWS[A], ROWS[B]]
        for each in embeds.kept:
            os.unlink(each.path)
        with pytest.raises(RowsLost):
            await engine.rows(held)


async def test_rows_wait_for_room_in_their_order(memory_bus: MemoryBus, tmp_path: Path) -> None:
    encoder = RowsFolder(tmp_path / ENCODER)
    for name, rows in ROWS.items():
        encoder.put(name, rows)
    async with running(memory_bus, RowsMemory(tmp_path, max_bytes=len(ROWS[B]))) as engine:
        assert engine.intake.take(asking("first", B)) is not None
        assert engine.intake.take(asking("second", A)) is None
        assert engine.intake.take(asking("third", B)) is None, "though its rows are here"
        await asyncio.sleep(0.05)
        engine.intake.cancel(RequestId("third"))
        assert engine.admitted.empty()
        engine.intake.release_ended(())
        held = await asyncio.wait_for(engine.admitted.get(), 60)
        assert held.generation.request == "second"
        assert await engine.rows(held) == [ROWS[A]]
        assert len(engine.intake) == 0
        assert engine.intake.take(asking("all", A, B)) is None
        engine.intake.release_ended(())
        assert (await engine.failure()).endswith(
            f"{len(ROWS[A]) + len(ROWS[B])} bytes find no room in {len(ROWS[B])}, rows_memory of the scheduler"
        )


async def test_a_request_whose_rows_are_nowhere_fails(memory_bus: MemoryBus, tmp_path: Path) -> None:
    async with running(memory_bus, RowsMemory(tmp_path)) as engine:
        assert engine.intake.take(asking("one", A)) is None
        assert await engine.failure() == "one: rows of an image: rows.encoder-1 does not answer (NoResponders)"
        await serving(memory_bus)
        assert engine.intake.take(asking("two", A)) is None
        assert await engine.failure() == "two: rows of an image: rows.encoder-1 has them no longer"
        assert len(engine.intake) == 0
