"""Blocks from store to store over real gRPC and TCP: whole, corrupted, cancelled, refused, with TLS and without."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore import metrics
from kvstore.arena.in_flight_block import BlockShape, InFlightBlock
from kvstore.node.commit_watch import CommitWatch
from kvstore.tiers.peer_nodes import PeerNodes
from kvstore.transfer import client as client_module
from kvstore.transfer import lending as lending_module
from kvstore.transfer import server as server_module
from kvstore.transfer import tcp_client
from kvstore.transfer.client import TransferClient
from kvstore.transfer.interface import BlockName, BlockRequest, CannotListen, PeerUnreachable
from kvstore.transfer.lending import BlockLending
from kvstore.transfer.rpc import CHUNK_BYTES
from kvstore.transfer.server import TransferServer
from kvstore.transfer.tcp_client import TcpClient
from kvstore.transfer.tcp_server import TcpServer
from kvstore.transfer.tcp_transport import TcpTransport
from kvstore.transfer.tls import TlsUnusable, TransferTls
from shared.blocks import BlockHash
from shared.ids import NodeId
from shared.reliability.retry import Backoff
from tests.support.cluster.ports import free_port
from tests.support.cluster.tls_authority import Authority
from tests.support.kv.random_blocks import SHAPE, chain, hashes

LAYOUT = "5eed" * 6
HERE = "127.0.0.1"
PATIENCE = 60.0


class Shelf:
    """A `BlockLender` of given blocks, which counts what is lent. Owns both."""

    def __init__(self, blocks: Sequence[InFlightBlock]) -> None:
        self.blocks = {block.hash: block for block in blocks}
        self.pins: Counter[BlockHash] = Counter()
        self.most_pinned = self.copied = 0
        self.commits = CommitWatch()

    def lend(
        self, layout: str, names: Sequence[BlockHash]
    ) -> contextlib.AbstractContextManager[Sequence[InFlightBlock]] | None:
        return self._lent(names) if layout == LAYOUT else None

    async def copying(self, size: int) -> None:
        self.copied += size

    async def committed(self, layout: str, name: BlockHash, seconds: float) -> bool:
        return await self.commits.wait(layout, name, seconds)

    def compute(self, block: InFlightBlock) -> None:
        """A block of the prompt is computed, and committed."""
        self.blocks[block.hash] = block
        self.commits.committed(LAYOUT, block.hash)

    @contextlib.contextmanager
    def _lent(self, names: Sequence[BlockHash]) -> Iterator[Sequence[InFlightBlock]]:
        run = []
        for name in names:
            if name not in self.blocks:
                break
            run.append(self.blocks[name])
        self.pins.update(hashes(run))
        self.most_pinned = max(self.most_pinned, self.pins.total())
        try:
            yield run
        finally:
            self.pins.subtract(hashes(run))


class Slots:
    """A `BlockDestination` without an arena."""

    seconds = PATIENCE

    def __init__(self, shape: BlockShape) -> None:
        self._size = shape.payload_bytes

    def reserve(self, blocks: Sequence[BlockName]) -> list[memoryview | None]:
        return [memoryview(bytearray(self._size)) for _ in blocks]


class Puller:
    """A client of one store. A store that is not there is a miss, as `PeerNodes` sees to."""

    def __init__(self, address: str, client: TransferClient | TcpClient) -> None:
        self._address, self.client = address, client

    async def fetch(
        self, layout: str, names: Sequence[BlockHash], shape: BlockShape, patience: float = 0.0
    ) -> AsyncGenerator[InFlightBlock, None]:
        wanted = BlockRequest(layout, names, patience)
        if isinstance(self.client, TransferClient):
            blocks = self.client.fetch(self._address, wanted, shape)
        else:
            blocks = self.client.fetch(self._address, wanted, shape, Slots(shape))
        try:
            async with contextlib.aclosing(blocks):
                async for block in blocks:
                    yield block
        except PeerUnreachable:
            metrics.TIER_FAILED.labels("peer", "unavailable").inc()


class Carrier:
    """Both ends of one transport."""

    def __init__(self, name: str) -> None:
        self.name = name

    def client(self, tls: TransferTls | None = None) -> TransferClient | TcpClient:
        return TransferClient(tls) if self.name == "grpc" else TcpClient(tls)

    @contextlib.asynccontextmanager
    async def serving(
        self, shelf: Shelf, *, port: int = 0, tls: TransferTls | None = None, max_sending: int = 16
    ) -> AsyncIterator[tuple[BlockLending, int]]:
        lending = BlockLending(shelf, max_sending)
        if self.name == "grpc":
            grpc_server = TransferServer(lending, tls)
            bound = await grpc_server.start(HERE, port)
            try:
                yield lending, bound
            finally:
                await grpc_server.stop()
        else:
            tcp_server = TcpServer(tls)
            bound = tcp_server.listen(lending, HERE, port)
            async with running(tcp_server.run()):
                yield lending, bound

    @contextlib.asynccontextmanager
    async def pulling(self, port: int, tls: TransferTls | None = None) -> AsyncIterator[Puller]:
        client = self.client(tls)
        async with running(client.run()):
            yield Puller(f"{HERE}:{port}", client)


@contextlib.asynccontextmanager
async def running(work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture(params=["grpc", "tcp"])
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Carrier:
    monkeypatch.setattr(tcp_client, "CONNECT_WAIT", PATIENCE)
    monkeypatch.setattr(tcp_client, "RETRY", Backoff(first=0.05, longest=0.05))
    return Carrier(request.param)


async def pulled(
    client: Puller,
    names: Sequence[BlockHash],
    *,
    layout: str = LAYOUT,
    shape: BlockShape = SHAPE,
    patience: float = 0.0,
) -> list[InFlightBlock]:
    blocks = []
    async with asyncio.timeout(PATIENCE), contextlib.aclosing(client.fetch(layout, names, shape, patience)) as run:
        async for block in run:
            blocks.append(block)
    return blocks


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


def failures(why: str) -> float:
    return metrics.TIER_FAILED.labels("peer", why)._value.get()


async def test_blocks_come_as_they_were_and_are_pinned_only_meanwhile(carrier: Carrier) -> None:
    shelf = Shelf(chain(5))
    async with carrier.serving(shelf) as (lending, port), carrier.pulling(port) as client:
        assert await pulled(client, list(shelf.blocks)) == list(shelf.blocks.values())
        assert shelf.most_pinned == 5
        assert shelf.copied == 5 * SHAPE.payload_bytes, "sending is a copy, too"
        await until(lambda: shelf.pins.total() == 0 and lending.sending == 0)


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5])
async def test_a_payload_of_any_size_goes_in_bounded_chunks(carrier: Carrier, size: int) -> None:
    shape = BlockShape(cells=1, cell_bytes=size)
    blocks = chain(2, shape)
    pieces = list(server_module.chunks(blocks[0]))
    assert max(len(piece.payload) for piece in pieces) <= CHUNK_BYTES
    assert [piece.HasField("begins") for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    async with carrier.serving(Shelf(blocks)) as (_, port), carrier.pulling(port) as client:
        assert await pulled(client, hashes(blocks), shape=shape) == blocks


async def test_a_run_ends_where_the_other_store_has_no_more(carrier: Carrier) -> None:
    blocks = chain(5)
    async with carrier.serving(Shelf([*blocks[:3], blocks[4]])) as (_, port), carrier.pulling(port) as client:
        assert await pulled(client, hashes(blocks)) == blocks[:3]


async def test_a_long_run_is_pinned_a_part_at_a_time(carrier: Carrier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending_module, "LENT_BLOCKS", 3)
    blocks = chain(10)
    shelf = Shelf(blocks)
    async with carrier.serving(shelf) as (_, port), carrier.pulling(port) as client:
        assert await pulled(client, hashes(blocks)) == blocks
        assert shelf.most_pinned == 3
        del shelf.blocks[blocks[6].hash]
        assert await pulled(client, hashes(blocks)) == blocks[:6]


async def test_whoever_has_patience_is_sent_blocks_while_they_are_computed(carrier: Carrier) -> None:
    blocks = chain(4)
    shelf = Shelf(blocks[:1])
    async with carrier.serving(shelf) as (lending, port), carrier.pulling(port) as client:
        run = client.fetch(LAYOUT, hashes(blocks), SHAPE, PATIENCE)
        got = [await anext(run)]
        for block in blocks[1:3]:
            await until(lambda: shelf.commits.waiting == 1)
            assert (lending.following, lending.sending, shelf.pins.total()) == (1, 0, 0), "nothing is pinned meanwhile"
            shelf.compute(block)
            got.append(await anext(run))
        assert got == blocks[:3]
        await run.aclose()
        await until(lambda: lending.following == 0 and shelf.commits.waiting == 0)


async def test_a_block_that_is_never_computed_ends_the_run_when_patience_does(carrier: Carrier) -> None:
    blocks = chain(3)
    shelf = Shelf([blocks[0], blocks[2]])
    async with carrier.serving(shelf) as (lending, port), carrier.pulling(port) as client:
        assert await pulled(client, hashes(blocks), patience=0.05) == blocks[:1]
        await until(lambda: lending.following == 0 and shelf.commits.waiting == 0)


async def test_those_that_follow_are_counted_apart_and_bounded(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending_module, "MAX_FOLLOWING", 1)
    blocks = chain(2)
    shelf = Shelf(blocks[:1])
    before = failures("resource_exhausted")
    async with carrier.serving(shelf, max_sending=1) as (_, port), carrier.pulling(port) as client:
        run = client.fetch(LAYOUT, hashes(blocks), SHAPE, PATIENCE)
        await anext(run)
        assert await pulled(client, hashes(blocks), patience=PATIENCE) == []
        assert failures("resource_exhausted") == before + 1
        assert await pulled(client, hashes(blocks)) == blocks[:1], "others are served meanwhile"
        await run.aclose()


async def test_another_layout_is_a_miss(carrier: Carrier) -> None:
    blocks = chain(2)
    before = failures("not_found")
    async with carrier.serving(Shelf(blocks)) as (_, port), carrier.pulling(port) as client:
        assert await pulled(client, hashes(blocks), layout="0" * 24) == []
        assert failures("not_found") == before + 1


async def test_a_node_that_nobody_knows_is_a_miss() -> None:
    before = failures("unknown")
    peers = PeerNodes({"tcp": TcpTransport(None)})
    wanted = BlockRequest(LAYOUT, hashes(chain(2)))
    assert [block async for block in peers.fetch(NodeId("there"), wanted, SHAPE, Slots(SHAPE))] == []
    assert failures("unknown") == before + 1


async def test_a_store_that_is_not_there_is_a_miss_at_once_and_found_when_it_comes(carrier: Carrier) -> None:
    blocks = chain(2)
    port = free_port()
    async with carrier.pulling(port) as client:
        assert await pulled(client, hashes(blocks)) == []
        async with carrier.serving(Shelf(blocks), port=port), asyncio.timeout(PATIENCE):
            while await pulled(client, hashes(blocks)) != blocks:
                await asyncio.sleep(0.05)
        assert await pulled(client, hashes(blocks)) == []


@pytest.mark.parametrize("harm", ["payload", "checksums", "order", "short", "long"])
async def test_what_arrives_corrupted_is_refused_and_what_came_before_it_kept(carrier: Carrier, harm: str) -> None:
    blocks = chain(4)
    good, other = blocks[2], blocks[3]
    payload = bytes(good.payload)
    bad = {
        "payload": good._replace(payload=payload[:100] + bytes([payload[100] ^ 4]) + payload[101:]),
        "checksums": good._replace(checksums=other.checksums),
        "order": other,
        "short": good._replace(payload=payload[:-1]),
        "long": good._replace(payload=payload + b"x"),
    }[harm]
    shelf = Shelf(blocks)
    shelf.blocks[good.hash] = bad
    before = metrics.TIER_SPOILED.labels("peer")._value.get()
    # Over TCP a frame that names blocks which were not asked for is refused as a whole, and what is sent in excess is
    # looked at as the next block.
    kept = {("tcp", "order"): [], ("tcp", "long"): blocks[:3]}.get((carrier.name, harm), blocks[:2])
    async with carrier.serving(shelf) as (lending, port), carrier.pulling(port) as client:
        assert await pulled(client, hashes(blocks)) == kept
        assert metrics.TIER_SPOILED.labels("peer")._value.get() == before + 1
        await until(lambda: shelf.pins.total() == 0 and lending.sending == 0)


BIG = BlockShape(cells=1, cell_bytes=4 * CHUNK_BYTES)

MANY = 24
"""Of these, that is more than gRPC takes along while nobody reads."""


def many_big_blocks() -> list[InFlightBlock]:
    """With different names and one content."""
    [block] = chain(1, BIG)
    return [block._replace(hash=BlockHash(bytes([n]) * 16)) for n in range(MANY)]


@pytest.mark.parametrize("end", ["closed", "deadline"])
async def test_a_cancel_in_the_middle_frees_everything_on_both_sides(carrier: Carrier, end: str) -> None:
    shelf = Shelf(many_big_blocks())
    names = list(shelf.blocks)
    sent_before = metrics.TIER_STORED.labels("peer")._value.get()
    async with carrier.serving(shelf) as (lending, port), carrier.pulling(port) as client:
        run = client.fetch(LAYOUT, names, BIG)
        assert (await anext(run)).hash == names[0]
        assert shelf.pins.total() == MANY
        if end == "closed":
            await run.aclose()
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.001), contextlib.aclosing(run):
                    async for _ in run:
                        pass
        await until(lambda: shelf.pins.total() == 0 and lending.sending == 0)
        assert metrics.TIER_STORED.labels("peer")._value.get() - sent_before < MANY


ONE_BLOCK_AND_NO_MORE = """
import asyncio, sys
from tests.integration.kvstore.test_store_transfer import BIG, LAYOUT, Carrier, Puller, many_big_blocks
from tests.support.kv.random_blocks import hashes

async def main():
    client = Puller(sys.argv[1], Carrier(sys.argv[2]).client())
    run = client.fetch(LAYOUT, hashes(many_big_blocks()), BIG)
    await anext(run)
    print("one", flush=True)
    await asyncio.sleep(100)

asyncio.run(main())
"""


async def test_a_receiver_that_is_killed_in_the_middle_leaves_nothing_pinned(carrier: Carrier) -> None:
    shelf = Shelf(many_big_blocks())
    async with carrier.serving(shelf) as (lending, port):
        receiver = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ONE_BLOCK_AND_NO_MORE, f"{HERE}:{port}", carrier.name),
            stdout=asyncio.subprocess.PIPE,
        )
        assert receiver.stdout is not None
        async with asyncio.timeout(PATIENCE):
            assert await receiver.stdout.readline() == b"one\n"
        assert (shelf.pins.total(), lending.sending) == (MANY, 1)
        receiver.kill()
        await receiver.wait()
        await until(lambda: shelf.pins.total() == 0 and lending.sending == 0)


async def test_whoever_does_not_read_is_not_sent_more_than_the_window(carrier: Carrier) -> None:
    shelf = Shelf(many_big_blocks())
    names = list(shelf.blocks)
    before = metrics.TIER_BYTES_OUT.labels("peer")._value.get()
    async with carrier.serving(shelf) as (_, port), carrier.pulling(port) as client:
        run = client.fetch(LAYOUT, names, BIG)
        await anext(run)
        await asyncio.sleep(0.3)
        # The kernel's buffers may hold two thirds of all beside the window (tcp_rmem).
        assert metrics.TIER_BYTES_OUT.labels("peer")._value.get() - before < (MANY - 2) * BIG.payload_bytes
        rest = [block.hash async for block in run]
        assert rest == names[1:]


async def test_a_sender_that_is_busy_refuses_and_serves_again_afterwards(carrier: Carrier) -> None:
    shelf = Shelf(many_big_blocks())
    names = list(shelf.blocks)
    before = failures("resource_exhausted")
    async with carrier.serving(shelf, max_sending=1) as (lending, port), carrier.pulling(port) as client:
        first = client.fetch(LAYOUT, names, BIG)
        await anext(first)
        assert await pulled(client, names[:1], shape=BIG) == []
        assert failures("resource_exhausted") == before + 1
        await first.aclose()
        await until(lambda: lending.sending == 0)
        assert len(await pulled(client, names[:1], shape=BIG)) == 1


async def test_a_receiver_that_holds_on_for_too_long_is_let_go(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending_module, "MAX_FETCH_SECONDS", 2.0)  # and the first block comes before that
    shelf = Shelf(many_big_blocks())
    names = list(shelf.blocks)
    reason = "deadline_exceeded" if carrier.name == "grpc" else "unavailable"
    before = failures(reason)
    async with carrier.serving(shelf) as (lending, port), carrier.pulling(port) as client:
        run = client.fetch(LAYOUT, names, BIG)
        await anext(run)
        await until(lambda: shelf.pins.total() == 0 and lending.sending == 0)
        got = [block async for block in run]
        assert len(got) < MANY - 1
        assert failures(reason) == before + 1


async def test_only_so_many_connections_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_CHANNELS", 1)
    carrier, blocks = Carrier("grpc"), chain(2)
    async with carrier.serving(Shelf(blocks)) as (_, one), carrier.serving(Shelf(blocks[:1])) as (_, two):
        client = TransferClient()
        here, elsewhere = (Puller(f"{HERE}:{port}", client) for port in (one, two))
        assert [b async for b in here.fetch(LAYOUT, hashes(blocks), SHAPE)] == blocks
        assert [b async for b in elsewhere.fetch(LAYOUT, hashes(blocks), SHAPE)] == blocks[:1]
        assert [b async for b in here.fetch(LAYOUT, hashes(blocks), SHAPE)] == blocks
        assert len(client._channels) == 1
        task = asyncio.create_task(client.run())
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert not client._channels


async def test_a_port_that_is_taken_is_said_to_be(carrier: Carrier) -> None:
    async with carrier.serving(Shelf([])) as (_, port):
        with pytest.raises(CannotListen, match=str(port)):
            async with carrier.serving(Shelf([]), port=port):
                pass


# ---- TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


async def test_with_certificates_of_one_authority_blocks_come(carrier: Carrier, authority: Authority) -> None:
    blocks = chain(3)
    async with (
        carrier.serving(Shelf(blocks), tls=authority.signed("one")) as (_, port),
        carrier.pulling(port, authority.signed("two")) as client,
    ):
        assert await pulled(client, hashes(blocks)) == blocks


@pytest.mark.parametrize("who", ["without", "stranger", "wrong host"])
async def test_whoever_is_not_of_the_authority_gets_nothing(
    carrier: Carrier, who: str, authority: Authority, stranger: Authority
) -> None:
    tls = {"without": None, "stranger": stranger.signed("two"), "wrong host": authority.signed("three")}[who]
    server_tls = authority.signed("four", host="127.0.0.9" if who == "wrong host" else HERE)
    blocks = chain(3)
    async with carrier.serving(Shelf(blocks), tls=server_tls) as (_, port), carrier.pulling(port, tls) as client:
        before = failures("unavailable")
        assert await pulled(client, hashes(blocks)) == []
        assert failures("unavailable") == before + 1


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    with pytest.raises(TlsUnusable, match=r"missing\.pem"):
        TransferTls.read(str(tmp_path / "missing.pem"), "", "")
    with pytest.raises(TlsUnusable, match=r"empty\.pem"):
        TransferTls.read(str(tmp_path / "empty.pem"), "", "")
