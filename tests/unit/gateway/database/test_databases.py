"""Each kind of database keeps the same promises: SQLite's file, a real Redis, a real Postgres where there is one."""

import asyncio
import os
import signal
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest

from services.gateway.config import GatewayConfig
from services.gateway.database import disk_reserve, redis_database, sql_database, sql_tables
from services.gateway.database.database_url import check_database_url, open_database
from services.gateway.database.disk_reserve import DiskReserve
from services.gateway.database.expiry import TRUST_SECONDS, ExpiryTime
from services.gateway.database.oldest_first import OldestFirst
from services.gateway.database.records import (
    CHUNK_BYTES,
    Database,
    DatabaseUnavailable,
    Record,
    RecordLimits,
    RecordUnknown,
    Usage,
)
from services.gateway.database.redis_database import RedisDatabase
from services.gateway.database.sql_database import SqlDatabase
from tests.support.cluster.postgres_server import POSTGRES, postgres_server
from tests.support.cluster.redis_server import redis_server
from tests.support.small_disk import fill, small_disk

KINDS = ("sqlite", "redis", "postgresql")


class Clock:
    """Moved by the test."""

    def __init__(self) -> None:
        self.now = 1_000_000.25

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def url_of() -> Iterator[Callable[[str], str]]:
    with tempfile.TemporaryDirectory() as made, ExitStack() as servers:
        folder = Path(made)
        folder.chmod(0o755)  # Postgres runs as another user
        urls: dict[str, str] = {"sqlite": f"sqlite:///{folder}/new/database.sqlite"}

        def url(kind: str) -> str:
            if kind not in urls and kind == "redis":
                urls[kind] = servers.enter_context(redis_server()).url
            if kind not in urls:
                if POSTGRES is None:
                    pytest.skip("there is no Postgres here")
                urls[kind] = servers.enter_context(postgres_server(folder / "postgres"))
            return urls[kind]

        yield url


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=KINDS)
async def database(
    request: pytest.FixtureRequest, url_of: Callable[[str], str], clock: Clock
) -> AsyncIterator[Database]:
    opened = open_database(url_of(request.param), clock)
    yield opened
    await opened.close()


@pytest.fixture
def kind() -> str:
    """Of its own for each test, as all use the same databases."""
    return f"kind-{uuid4().hex}"


def record(kind: str, id: str, created: float = 1.0, **fields: object) -> Record:
    return Record(**{"kind": kind, "id": id, "owner": "alice", "created": created, "value": b'{"a": 1}'} | fields)


async def test_a_record_is_read_as_it_was_written(database: Database, kind: str) -> None:
    full = record(kind, "one", 5.125, value=bytes(range(256)), size=2**40, due=7.5, expires=2e9, holder="gateway-1")
    plain = record(kind, "two", owner="", value=b"")
    assert await database.insert(full)
    assert await database.insert(plain)

    assert await database.get(kind, "one") == full
    assert await database.get(kind, "two") == plain
    assert await database.get(f"{kind}x", "one") is None
    assert [await database.value_size(kind, id) for id in ("one", "two", "none")] == [256, 0, 0]


async def test_what_is_there_is_not_inserted_again(database: Database, kind: str) -> None:
    assert await database.insert(record(kind, "one"))

    assert not await database.insert(record(kind, "one", value=b"other"))

    assert await database.get(kind, "one") == record(kind, "one")


async def test_only_the_version_that_was_read_is_replaced(database: Database, kind: str) -> None:
    await database.insert(record(kind, "one"))
    read = await database.get(kind, "one")
    assert read is not None

    written = await database.replace(read.changed(value=b"mine", due=3.0, expires=2e9, size=4, holder="me"))

    assert written == read.changed(value=b"mine", due=3.0, expires=2e9, size=4, holder="me", version=2)
    assert await database.replace(read.changed(value=b"stale")) is None
    assert await database.get(kind, "one") == written
    assert await database.replace(record(kind, "unknown")) is None


async def test_pages_are_in_order_and_of_one_owner(database: Database, kind: str) -> None:
    for id, created in (("b", 2.0), ("a", 2.0), ("d", 1.0), ("c", 3.0)):
        await database.insert(record(kind, id, created))
    await database.insert(record(kind, "not-hers", 2.5, owner="bob"))

    async def ids(**how: object) -> list[str]:
        return [each.id for each in await database.page(kind, "alice", **{"limit": 10} | how)]

    assert await ids() == ["c", "b", "a", "d"]
    assert await ids(newest_first=False) == ["d", "a", "b", "c"]
    assert await ids(limit=2) == ["c", "b"]
    assert await ids(limit=2, after="b") == ["a", "d"]
    assert await ids(after="a", newest_first=False) == ["b", "c"]
    for unknown in ("not-hers", "nothing"):
        with pytest.raises(RecordUnknown):
            await ids(after=unknown)


async def test_contents_keep_their_order_and_each_position_its_first_chunk(database: Database, kind: str) -> None:
    await database.insert(record(kind, "one"))
    assert await database.add_chunks(kind, "one", {10: b"ten", 2: b"two" * CHUNK_BYTES}) == 2
    assert await database.add_chunks(kind, "one", {2: b"again", 3: b"three"}) == 1

    assert await database.chunks(kind, "one") == [(2, b"two" * CHUNK_BYTES), (3, b"three"), (10, b"ten")]
    assert await database.chunks(kind, "one", max_bytes=1) == [(2, b"two" * CHUNK_BYTES)]
    assert await database.chunks(kind, "one", after=2, max_bytes=8) == [(3, b"three"), (10, b"ten")]
    assert await database.chunks(kind, "one", after=10) == []
    assert await database.positions(kind, "one") == [2, 3, 10]


async def test_who_replaces_a_record_keeps_the_contents_of_older_writers_out(database: Database, kind: str) -> None:
    made = record(kind, "one")
    await database.insert(made)
    assert await database.add_chunks(kind, "one", {0: b"first"}, made.version) == 1

    replaced = await database.replace(made)

    assert replaced is not None
    with pytest.raises(RecordUnknown):
        await database.add_chunks(kind, "one", {1: b"late"}, made.version)
    assert await database.positions(kind, "one") == [0]
    assert await database.add_chunks(kind, "one", {1: b"next"}, replaced.version) == 1


async def test_contents_go_with_their_record_and_none_come_later(database: Database, kind: str) -> None:
    await database.insert(record(kind, "one", due=1.0))
    await database.add_chunks(kind, "one", {0: b"text"})

    assert await database.delete(kind, "one")

    assert not await database.delete(kind, "one")
    with pytest.raises(RecordUnknown):
        await database.add_chunks(kind, "one", {1: b"late"})
    assert await database.positions(kind, "one") == []
    assert await database.page(kind, "alice", limit=5) == []
    assert await database.claim(kind, "gateway-1", 10.0) is None


async def test_what_has_expired_is_found_by_nobody_and_removed(database: Database, kind: str, clock: Clock) -> None:
    await database.insert(record(kind, "short", expires=clock.now + 1, due=0.0, size=5))
    await database.insert(record(kind, "long", expires=clock.now + 100, size=7))
    await database.add_chunks(kind, "short", {0: b"text"})
    assert await database.usage(kind, "alice") == Usage(2, 12)
    assert await database.delete_expired(clock()) == 0

    clock.now += 1

    assert await database.get(kind, "short") is None
    assert [each.id for each in await database.page(kind, "alice", limit=5)] == ["long"]
    assert await database.claim(kind, "gateway-1", 10.0) is None
    assert await database.delete_expired(clock()) == 1
    assert await database.usage(kind, "alice") == Usage(1, 7)
    assert await database.positions(kind, "short") == []


async def test_work_is_leased_to_one_at_a_time(database: Database, kind: str, clock: Clock) -> None:
    await database.insert(record(kind, "later", due=clock.now - 1))
    await database.insert(record(kind, "first", due=clock.now - 2))
    await database.insert(record(kind, "done"))

    taken = await asyncio.gather(*(database.claim(kind, f"gateway-{number}", 10.0) for number in range(4)))

    found = [each for each in taken if each is not None]
    assert sorted(each.id for each in found) == ["first", "later"]
    assert all(each.due == clock.now + 10 and each.version == 2 for each in found)
    assert len({each.holder for each in found}) == 2

    clock.now += 10
    lost = next(each for each in found if each.id == "first")
    again = await database.claim(kind, "gateway-9", 10.0)
    assert again is not None
    assert again.holder == "gateway-9"
    other = await database.claim(kind, "gateway-9", 10.0)
    assert other is not None
    assert await database.replace(lost.changed(value=b"from a gateway that was too slow")) is None


async def test_one_of_many_that_write_at_once_wins_each_version(database: Database, kind: str) -> None:
    await database.insert(record(kind, "one", value=b"0"))

    async def add_one() -> None:
        while True:
            read = await database.get(kind, "one")
            assert read is not None
            if await database.replace(read.changed(value=str(int(read.value) + 1).encode())):
                return

    await asyncio.gather(*(add_one() for _ in range(20)))

    read = await database.get(kind, "one")
    assert read is not None
    assert (read.value, read.version) == (b"20", 21)


@pytest.mark.parametrize("name", KINDS)
async def test_records_outlive_the_process_that_wrote_them(name: str, url_of: Callable[[str], str], kind: str) -> None:
    first, second = open_database(url_of(name)), open_database(url_of(name))
    await first.insert(record(kind, "one"))
    await first.close()

    assert await second.get(kind, "one") == record(kind, "one")
    await second.close()


async def test_sqlite_is_opened_by_its_first_use_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "database.sqlite"
    database = open_database(f"sqlite:///{path}")
    assert database.untouched
    assert not path.parent.exists()

    await database.insert(record("kind", "one"))

    assert not database.untouched
    assert {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()} == {0o600}
    await database.close()


async def test_the_event_loop_runs_while_sqlite_waits_for_a_lock(tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "database.sqlite"
    database = open_database(f"sqlite:///{path}")
    await database.insert(record("kind", "one"))
    with sqlite3.connect(path) as other:
        other.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(database.insert(record("kind", "two")))
        began = time.monotonic()
        while time.monotonic() < began + 0.2:
            await asyncio.sleep(0.005)
        assert not waiting.done()
        assert await database.get("kind", "one") is not None
    other.close()
    assert await waiting
    await database.close()


async def test_gateways_that_remove_the_same_in_other_orders_do_not_lock_each_other_out(
    url_of: Callable[[str], str], kind: str
) -> None:
    gateways = [open_database(url_of("postgresql")) for _ in range(2)]
    for _ in range(3):
        old = [record(kind, f"{i}", i, expires=1000.0 - i) for i in range(100)]
        await asyncio.gather(*(gateway.insert(each) for gateway, each in zip(gateways * 50, old, strict=True)))
        oldest = gateways[0].delete_oldest(kind, "alice", RecordLimits(0))
        await asyncio.gather(oldest, *(each.delete_expired(2000.0) for each in gateways))
        assert await gateways[0].usage(kind, "alice") == (0, 0)
    for gateway in gateways:
        await gateway.close()


@pytest.mark.parametrize("name", KINDS)
async def test_what_several_gateways_remove_and_add_at_once_ends_at_the_limits(
    name: str, url_of: Callable[[str], str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_tables, "REMOVED_BYTES", 100)
    gateways = [open_database(url_of(name)) for _ in range(2)]
    await asyncio.gather(
        *(gateways[i % 2].insert(record(kind, f"{i:02}", i, size=10, due=1e9 if i == 7 else None)) for i in range(40))
    )
    limits = RecordLimits(20, 100)
    kept = [OldestFirst(gateway, kind, limits) for gateway in gateways]

    await asyncio.gather(*(each.added("alice", 10) for each in kept * 2))

    left = [each.id for each in await gateways[0].page(kind, "alice", limit=50, newest_first=False)]
    assert left == ["07", *map(str, range(31, 40))], "work stays, and of the others the newest"
    await gateways[0].delete(kind, "39")
    added = await asyncio.gather(
        *(gateways[i % 2].insert_within(record(kind, f"new-{i}", size=4), limits) for i in range(6))
    )
    assert sorted(added, key=bool) == [None, None, *[Usage(11, 98)] * 4]
    one_fits = RecordLimits(12)
    added = await asyncio.gather(
        *(gateways[i % 2].insert_within(record(kind, f"more-{i}"), one_fits) for i in range(6))
    )
    assert sorted(added, key=bool) == [None, *[Usage(12, 98)] * 5]
    if name == "redis":  # whose client sends again what a lost connection had no answer to
        last = record(kind, f"more-{added.index(None)}")
        assert await gateways[0].insert_within(last, one_fits) is None
    for gateway in gateways:
        await gateway.close()


async def test_a_file_of_sqlites_becomes_smaller_behind_deletions(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sqlite3

    monkeypatch.setattr(sql_database, "KEPT_PAGES", 16)
    monkeypatch.setattr(sql_database, "LOCK_SECONDS", 0.05)
    path = tmp_path / "database.sqlite"
    database = SqlDatabase(path)
    for id in ("gone", "stays"):
        await database.insert(record(kind, id))
        await database.add_chunks(kind, id, {i: bytes([i]) * CHUNK_BYTES for i in range(8)})
    assert not await database.shrink()
    large = path.stat().st_size
    await database.delete(kind, "gone")
    other = sqlite3.connect(path)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseUnavailable, match="locked"):  # another error would end the gateway
        await database.shrink()
    other.close()

    pieces = 1
    while await database.shrink():
        pieces += 1

    assert pieces == 2, "a MiB is one piece, so that others do not wait for long"

    assert len(await database.chunks(kind, "stays", max_bytes=2**30)) == 8
    await database.close()  # its log becomes part of the file
    assert large / 2 < path.stat().st_size < large * 0.7


async def test_a_full_disk_takes_deletions_and_then_contents_again(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_reserve, "RESERVE_BYTES", 2**20)
    with small_disk(tmp_path) as disk:
        database = SqlDatabase(disk / "database.sqlite")
        for id in ("one", "two", "three"):
            await database.insert(record(kind, id))
            await database.add_chunks(kind, id, {0: bytes(CHUNK_BYTES)})
        foreign = fill(disk)
        with pytest.raises(DatabaseUnavailable, match="full"):
            await database.add_chunks(kind, "three", {1: bytes(2 * CHUNK_BYTES)})
        assert await database.delete(kind, "one")
        assert await database.delete(kind, "two")
        assert await database.get(kind, "two") is None
        foreign.unlink()
        assert await database.add_chunks(kind, "three", {1: bytes(2 * CHUNK_BYTES)}) == 1
        fill(disk)
        assert await database.delete(kind, "three"), "the room for it was kept again"
        fill(disk)
        with pytest.raises(DatabaseUnavailable, match="what is left is kept for deletions"):
            await database.insert(record(kind, "four"))
        foreign.unlink()
        await database.insert(record(kind, "four"))
        await database.close()
        fill(disk)
        database = SqlDatabase(disk / "database.sqlite")
        assert await database.get(kind, "four"), "it starts on a full disk"
        assert await database.delete(kind, "four")
        await database.close()


def test_room_that_two_keep_at_once_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, others = os.posix_fallocate, [DiskReserve(tmp_path / "database.sqlite")]

    def meet_another(*arguments: int) -> None:
        if others:
            assert others.pop().keep()
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", meet_another)
    reserve = DiskReserve(tmp_path / "database.sqlite")
    assert reserve.keep()
    [file] = tmp_path.iterdir()
    assert file.stat().st_blocks * 512 >= disk_reserve.RESERVE_BYTES
    file.write_bytes(b"")  # it ended as it made it
    assert not reserve.is_kept
    assert reserve.keep()
    assert file.stat().st_size >= disk_reserve.RESERVE_BYTES


async def test_room_that_cannot_be_given_up_is_no_bug(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sqlite3

    def fail(*_: object, **__: object) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        raise DatabaseUnavailable("disk I/O error") from error

    (tmp_path / "database.sqlite-reserve").mkdir()
    database = SqlDatabase(tmp_path / "database.sqlite")
    monkeypatch.setattr(database, "_transaction", fail)
    with pytest.raises(DatabaseUnavailable, match="disk I/O error"):
        await database.delete(kind, "one")
    await database.close()


def test_nothing_is_removed_by_a_clock_that_has_just_jumped_ahead() -> None:
    clock, monotonic = Clock(), Clock()
    monotonic.now = 5.0
    expiry = ExpiryTime(clock, monotonic)
    for _ in range(3):  # it may drift
        clock.now, monotonic.now = clock.now + 100.0, monotonic.now + 60.0
        assert expiry.now() == clock.now
    true = clock.now
    clock.now += 1e9
    assert expiry.now() == true
    monotonic.now += TRUST_SECONDS - 1
    assert expiry.now() == true + TRUST_SECONDS - 1
    clock.now = true  # put right: and behind
    assert expiry.now() == true
    clock.now += 1e9
    assert expiry.now() == true
    monotonic.now += TRUST_SECONDS
    clock.now += TRUST_SECONDS
    assert expiry.now() == clock.now, "it has stood for long"


async def test_a_redis_that_hangs_or_is_slow_fails_operations_in_time(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_database, "OPERATION_SECONDS", 0.3)
    with redis_server() as redis:
        database = RedisDatabase(redis.url)
        await database.insert(record(kind, "one"))
        redis.signal(signal.SIGSTOP)
        for operation in (
            database.get(kind, "one"),
            database.page(kind, "alice", limit=1),
            database.insert(record(kind, "two")),
        ):
            with pytest.raises(DatabaseUnavailable, match=r"redis: no answer within 0\.3 s"):
                await operation
        redis.signal(signal.SIGCONT)
        monkeypatch.setattr(redis_database, "OPERATION_SECONDS", 60.0)
        assert await database.get(kind, "one") is not None
        await database.close()


def test_a_gateway_has_the_database_of_its_settings(tmp_path: Path) -> None:
    file = tmp_path / "a#b?.sqlite"
    assert GatewayConfig().open_database() is None
    assert isinstance(GatewayConfig(database_file=file).open_database(), SqlDatabase)
    chosen = GatewayConfig(database_file=file, database="redis://127.0.0.1:1/0").open_database()
    assert isinstance(chosen, RedisDatabase)
    with pytest.raises(ValueError, match="database: sqlite:////PATH"):
        GatewayConfig(database="mysql://u:geheim@h/x")


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:1/0", "postgresql://u:geheim@127.0.0.1:1/x", "sqlite:////dev/null/x"]
)
async def test_a_database_that_is_away_is_said_to_be_so(url: str) -> None:
    database = open_database(url)

    with pytest.raises(DatabaseUnavailable) as raised:
        await database.get("kind", "one")

    assert "geheim" not in str(raised.value)
    await database.close()


@pytest.mark.parametrize(
    "url",
    ["", "mysql://h/x", "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://host/x", "postgresql://h", "redis:"],
)
def test_what_is_no_database_is_refused_by_its_url(url: str) -> None:
    with pytest.raises(ValueError, match="database: sqlite:////PATH, postgresql://"):
        check_database_url(url)
