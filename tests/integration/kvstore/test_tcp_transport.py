"""The TCP transport among others: chosen, fallen back from, and spoken to by strangers and by broken stores."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore import metrics
from kvstore.arena.in_flight_block import InFlightBlock
from kvstore.node.incoming_slots import IncomingSlots
from kvstore.node.node_store import NodeStore
from kvstore.tiers.peer_nodes import PeerNodes
from kvstore.transfer import tcp_client, tcp_connection, tcp_server
from kvstore.transfer.frames import (
    MAX_FRAME_BYTES,
    PREFIX,
    BlockHead,
    BlocksFollow,
    FetchBlocks,
    FetchEnd,
    encode_frame,
)
from kvstore.transfer.grpc_transport import GrpcTransport
from kvstore.transfer.interface import BlockRequest, PeerUnreachable
from kvstore.transfer.lending import BlockLending
from kvstore.transfer.tcp_client import TcpClient
from kvstore.transfer.tcp_connection import TcpConnection
from kvstore.transfer.tcp_server import TcpServer
from kvstore.transfer.tcp_transport import TcpTransport
from shared.ids import Incarnation, InstanceId, NodeId
from shared.messages.kvstore import KvLayout, TransferEndpoint
from shared.messages.lifecycle import Lifecycle, StoreReport
from tests.integration.kvstore.test_store_transfer import HERE, LAYOUT, PATIENCE, Shelf, Slots, running, until
from tests.support.cluster.nats_server import NatsServer
from tests.support.cluster.ports import free_port
from tests.support.kv import arenas
from tests.support.kv.random_blocks import SHAPE, carried, chain, hashes
from tests.support.kv.store_process import StoreProcess, clients, know_each_other

FAR = NodeId("far")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_client, "CONNECT_WAIT", PATIENCE)


# ---- which transport is taken


def carried_by(transport: str) -> float:
    return metrics.TRANSFER_BYTES.labels(transport, "in")._value.get()


def store_at(transfer: str = "", *endpoints: TransferEndpoint) -> Lifecycle:
    nothing = dict.fromkeys(("slots", "committed", "reserved", "pinned", "bytes_used", "bytes_total"), 0)
    return Lifecycle(
        service="kvstore",
        instance=InstanceId("kvstore-far"),
        incarnation=Incarnation(1),
        phase="ready",
        pid=1,
        host="far",
        started=1.0,
        store=StoreReport(node=FAR, hits=0, misses=0, transfer=transfer, endpoints=endpoints, **nothing),
    )


@contextlib.asynccontextmanager
async def two_stores(blocks: list[InFlightBlock]) -> AsyncIterator[tuple[PeerNodes, PeerNodes]]:
    """The first one has the blocks; the other has not heard of it."""
    has, wants = (PeerNodes({"tcp": TcpTransport(None), "grpc": GrpcTransport(None)}) for _ in range(2))
    await has.listen(Shelf(blocks), HERE, {"tcp": 0, "grpc": 0}, HERE)
    async with running(has.run()), running(wants.run()):
        yield has, wants


async def fetched(peers: PeerNodes, blocks: list[InFlightBlock]) -> list[InFlightBlock]:
    run = peers.fetch(FAR, BlockRequest(LAYOUT, hashes(blocks)), SHAPE, Slots(SHAPE))
    async with asyncio.timeout(PATIENCE):
        return [block async for block in run]


async def test_what_both_stores_prefer_is_taken_and_an_older_store_is_asked_over_grpc() -> None:
    blocks = chain(4)
    async with two_stores(blocks) as (has, wants):
        assert {each.transport for each in has.endpoints} == {"tcp", "grpc"}
        for endpoints, taken in ((has.endpoints, "tcp"), ((), "grpc")):
            wants.record_lifecycle(store_at(has.address, *endpoints))
            before = carried_by(taken)
            assert await fetched(wants, blocks) == blocks
            assert carried_by(taken) == before + 4 * SHAPE.payload_bytes
        assert [link.source for link in wants.links()] == [FAR]


async def test_where_tcp_does_not_get_through_grpc_does_and_tcp_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks, port = chain(4), free_port()
    async with two_stores(blocks) as (has, wants):
        wants.record_lifecycle(store_at(has.address, TransferEndpoint("tcp", f"{HERE}:{port}")))
        assert await fetched(wants, blocks) == blocks
        before = carried_by("tcp")
        server = TcpServer(None)
        server.listen(BlockLending(Shelf(blocks)), HERE, port)
        async with running(server.run()):
            assert await fetched(wants, blocks) == blocks
            assert carried_by("tcp") == before, "it failed a moment ago"
            monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 60)
            assert await fetched(wants, blocks) == blocks
            assert carried_by("tcp") > before


@pytest.mark.parametrize("address", ["", "far", "far:x", f"{HERE}:70000", "\0:1", ":"])
async def test_an_address_that_is_none_is_a_miss(address: str) -> None:
    peers = PeerNodes({"tcp": TcpTransport(None)})
    peers.record_lifecycle(store_at("", TransferEndpoint("carrier pigeon", HERE), TransferEndpoint("tcp", address)))
    assert await fetched(peers, chain(2)) == []


# ---- strangers at the port


FETCH = encode_frame(FetchBlocks(layout=LAYOUT, hashes=b"n" * 16))
HOSTILE = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "too long": PREFIX.pack(b"BKV1", MAX_FRAME_BYTES + 1),
    "no message": PREFIX.pack(b"BKV1", 4) + b"\xc1\xc1\xc1\xc1",
    "an answer": encode_frame(FetchEnd()),
    "blocks": encode_frame(BlocksFollow(blocks=(BlockHead(b"n" * 16, b"p" * 16, 16, b""),), payload_bytes=1)),
    "half a hash": encode_frame(FetchBlocks(layout=LAYOUT, hashes=b"n" * 17)),
    "half a frame": FETCH[:-3],
    "half a prefix": FETCH[:5],
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE.keys())
async def test_what_is_no_request_closes_that_connection_and_no_other(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_connection, "FRAME_SECONDS", 0.2)
    blocks = chain(3)
    async with a_server(Shelf(blocks)) as (server, port), a_client() as client:
        assert await pulled(client, port, blocks) == blocks
        reader, writer = await asyncio.open_connection(HERE, port)
        writer.write(sent)
        await closed(reader)
        writer.close()
        await until(lambda: server.connections == 1)
        assert await pulled(client, port, blocks) == blocks
        assert server.connections == 1, "the same connection serves on"


async def test_a_connection_whose_fetch_was_cancelled_serves_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, opened, asked, may = chain(2), tcp_client._opened, asyncio.Event(), asyncio.Event()

    async def slowly(address: str, threads: ThreadPoolExecutor) -> TcpConnection:
        assert not asked.is_set(), "one connection does"
        asked.set()
        await may.wait()
        return await opened(address, threads)

    monkeypatch.setattr(tcp_client, "_opened", slowly)
    async with a_server(Shelf(blocks)) as (server, port), a_client() as client:
        given_up = asyncio.create_task(pulled(client, port, blocks))
        await asked.wait()
        given_up.cancel()
        await asyncio.wait([given_up])
        may.set()
        await until(lambda: server.connections == 1)
        await until(lambda: not client._connecting)
        assert await pulled(client, port, blocks) == blocks


async def test_a_second_request_before_the_first_has_ended_ends_both() -> None:
    shelf = Shelf(chain(1))
    async with a_server(shelf) as (server, port):
        reader, writer = await asyncio.open_connection(HERE, port)
        waits = encode_frame(FetchBlocks(layout=LAYOUT, hashes=b"n" * 16, patience=10.0))
        writer.write(waits)
        await until(lambda: shelf.commits.waiting == 1)
        writer.write(waits)
        await closed(reader)
        writer.close()
        await until(lambda: shelf.commits.waiting == 0 and server.connections == 0)


async def test_connections_are_bounded_and_idle_ones_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(tcp_server, "IDLE_SECONDS", 0.5)
    async with a_server(Shelf(chain(1))) as (server, port):
        first, kept = await asyncio.open_connection(HERE, port)
        await until(lambda: server.connections == 1)
        second, turned_away = await asyncio.open_connection(HERE, port)
        await closed(second)
        await closed(first)
        for writer in (kept, turned_away):
            writer.close()
        await until(lambda: server.connections == 0)


async def closed(reader: asyncio.StreamReader) -> None:
    """Returns when the other side has closed the connection, having said nothing."""
    with contextlib.suppress(ConnectionResetError):  # where it has not read everything
        async with asyncio.timeout(PATIENCE):
            assert await reader.read() == b""


@contextlib.asynccontextmanager
async def a_server(shelf: Shelf) -> AsyncIterator[tuple[TcpServer, int]]:
    server = TcpServer(None)
    port = server.listen(BlockLending(shelf), HERE, 0)
    async with running(server.run()):
        yield server, port


@contextlib.asynccontextmanager
async def a_client() -> AsyncIterator[TcpClient]:
    client = TcpClient(None)
    async with running(client.run()):
        yield client


async def pulled(client: TcpClient, port: int, blocks: list[InFlightBlock]) -> list[InFlightBlock]:
    wanted = BlockRequest(LAYOUT, hashes(blocks))
    async with asyncio.timeout(PATIENCE):
        return [block async for block in client.fetch(f"{HERE}:{port}", wanted, SHAPE, Slots(SHAPE))]


# ---- stores that send something else than was asked for


NAMES = arenas.chain("sent", 4)


@pytest.fixture
def store() -> Iterator[NodeStore]:
    directory = arenas.new_directory()
    made = arenas.store_in(directory, 16 * 4096, arenas.Clock())
    yield made
    made.close()
    arenas.remove(directory)


def sent_blocks(client: arenas.Client) -> list[InFlightBlock]:
    shape = client.arena.shape
    payloads = [
        b"".join(arenas.contents(name, cell, shape.cell_bytes) for cell in range(shape.cells)) for name in NAMES
    ]
    parents = arenas.parents_of(NAMES)
    return [
        carried(name, parent, payload, shape) for name, parent, payload in zip(NAMES, parents, payloads, strict=True)
    ]


def follow(blocks: list[InFlightBlock], size: int | None = None) -> bytes:
    heads = tuple(BlockHead(each.hash, each.parent, each.tokens, each.checksums) for each in blocks)
    return encode_frame(BlocksFollow(blocks=heads, payload_bytes=size or len(blocks[0].payload)))


def payloads(blocks: list[InFlightBlock]) -> bytes:
    return b"".join(bytes(block.payload) for block in blocks)


BROKEN: dict[str, tuple[int, Callable[[list[InFlightBlock]], bytes]]] = {
    "cut": (2, lambda b: follow(b[:2]) + payloads(b[:2]) + follow(b[2:]) + payloads(b[2:])[:-1]),
    "larger": (0, lambda b: follow(b, len(b[0].payload) + 1) + payloads(b) + b"x" * 4),
    "smaller": (0, lambda b: follow(b, len(b[0].payload) - 1) + payloads(b)),
    "too much": (4, lambda b: follow(b) + payloads(b) + b"x" * 100_000),
    "more blocks": (0, lambda b: follow([*b, b[0]]) + payloads(b)),
    "others": (0, lambda b: follow(b[1:]) + payloads(b[1:])),
    "checksums missing": (0, lambda b: follow([each._replace(checksums=b"") for each in b]) + payloads(b)),
    "spoilt in the middle": (2, lambda b: follow(b) + payloads(b[:2]) + bytes(len(b[2].payload)) + payloads(b[3:])),
    "a request": (0, lambda b: FETCH),
    "nothing": (0, lambda b: b""),
    "noise": (0, lambda b: b"\xff" * 1000),
}


@pytest.mark.parametrize(("whole", "sends"), BROKEN.values(), ids=BROKEN.keys())
async def test_whatever_a_store_sends_touches_no_other_memory_than_was_reserved_for_it(
    store: NodeStore, whole: int, sends: Callable[[list[InFlightBlock]], bytes]
) -> None:
    client = arenas.Client(store)
    others = arenas.chain("others", 5)
    client.save(others)
    data = sends(sent_blocks(client))

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(PREFIX.size)
        writer.write(data)
        writer.write_eof()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answers, HERE, 0) as broken, a_client() as pulls:
        address = f"{HERE}:{broken.sockets[0].getsockname()[1]}"
        with IncomingSlots(store, client.layout) as room, contextlib.suppress(PeerUnreachable):
            wanted = BlockRequest(client.layout, NAMES)
            async for block in pulls.fetch(address, wanted, client.arena.shape, room):
                assert room.land(block)
        assert pulls.fetching == 0
    assert (client.found(NAMES), client.found(others)) == (whole, 5)
    assert store.report().reserved == 0


# ---- a store that dies


LARGE = KvLayout(model="large", dtype="bfloat16", layers=16, kv_heads=1, head_dim=64)
"""Blocks of 64 KiB."""
MANY = arenas.chain("dies", 128)


async def test_a_store_that_is_killed_in_the_middle_leaves_whole_blocks_and_nothing_else(
    shared_nats: NatsServer,
) -> None:
    """Its copies are limited, so that it is killed while it sends: 4 MiB go at once, the others 1 MiB a second."""
    flags = ("--transfer-port", "0", "--transfer-transports", "tcp")
    near = StoreProcess(shared_nats.url, "near", *flags, memory=2**25)
    far = StoreProcess(shared_nats.url, "far", *flags, "--kv-bandwidth", "1MiB", memory=2**25)

    async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not await condition():
                await asyncio.sleep(0.02)

    async with clients(shared_nats.url, near, far, layout=LARGE) as (at_near, at_far):
        await know_each_other(at_near, at_far)
        await at_far.save(MANY)
        await at_near.prefetch(MANY, source=far)

        async def begun() -> bool:
            return (await at_near.found(MANY))[0] > 0

        await eventually(begun)
        far.kill()

        async def all_is_given_up() -> bool:
            at_near.report = None
            while at_near.report is None:
                await asyncio.sleep(0.02)
            return (at_near.report.pinned, at_near.report.reserved) == (0, 0)

        await eventually(all_is_given_up)
        here, _ = await at_near.found(MANY, source=far, deadline=1.0)
        assert 0 < here < len(MANY)
        assert await at_near.save(MANY) == len(MANY) - here, "the rest is computed"
        assert await at_near.found(MANY) == (len(MANY), 0)
