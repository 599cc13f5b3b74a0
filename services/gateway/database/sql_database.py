"""Records in SQLite or Postgres, by SQLAlchemy's statements on threads of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from services.gateway.database.disk_reserve import DiskReserve, is_out_of_room
from services.gateway.database.records import (
    MAX_LISTED,
    MAX_READ_CHUNKS,
    MAX_REMOVED,
    READ_BYTES,
    Database,
    DatabaseUnavailable,
    Record,
    RecordLimits,
    RecordUnknown,
    Usage,
)
from shared.private_files import PRIVATE_FOLDER, private_opener

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from services.gateway.database.sql_tables import SqlTables

THREADS = 4
"""Operations at the same time, each on a connection of its own."""
MAX_WAITING = 1024
"""Operations that wait for a thread; further ones fail at once."""
LOCK_SECONDS = 10
"""Seconds that an operation waits for another one's lock."""
STATEMENT_SECONDS = 10
CONNECT_SECONDS = 5
ROOM_TRIES = 3
"""Of an operation on a full disk: another gateway may take the room that was made for it."""
CHECKPOINT = "PRAGMA wal_checkpoint(TRUNCATE)"
INCREMENTAL = 2
"""What SQLite answers of a file that can be made smaller piece by piece."""
SHRINK_PAGES = 256
"""Of 4 KiB, which one such piece has: others wait for the file's lock that long."""
KEPT_PAGES = 4096
KEPT_SHARE = 0.25
"""What stays of a file for what will be added."""
CLAIM_TRIES = 8
"""Records that another gateway may take away in one search for work."""

T = TypeVar("T")


class SqlDatabase(Database):
    """Owns an engine of SQLAlchemy's and the threads that use it. The first operation imports the library, connects,
    and makes the tables."""

    def __init__(self, place: str | Path, clock: Callable[[], float] = time.time) -> None:
        """`place`: SQLite's file, or the URL of a server as SQLAlchemy has it."""
        super().__init__(clock)
        self._place = place
        self._threads = ThreadPoolExecutor(THREADS, "database")
        self._opening = threading.Lock()
        self._engine: Engine | None = None
        self._tables: SqlTables | None = None
        self._open_operations = 0
        self._reserve = DiskReserve(place) if isinstance(place, Path) else None

    @property
    def untouched(self) -> bool:
        """Whether SQLite's file is not there."""
        return isinstance(self._place, Path) and not self._place.exists()

    async def insert(self, record: Record) -> bool:
        """See `Database`."""
        return await self._run(lambda tables, connection: tables.insert(connection, record), adds=True)

    async def insert_within(self, record: Record, limits: RecordLimits) -> Usage | None:
        """See `Database`."""

        def insert(tables: SqlTables, connection: Connection) -> Usage | None:
            tables.lock(connection, record.kind, record.owner)
            usage = tables.usage(connection, record.kind, record.owner)
            if not limits.hold(usage.with_one(record.size)):
                return usage
            tables.insert(connection, record)
            return None

        return await self._run(insert, adds=True)

    async def get(self, kind: str, id: str) -> Record | None:
        """See `Database`."""
        found = await self._run(lambda tables, connection: tables.get(connection, kind, id))
        return found if found is not None and self._is_valid(found) else None

    async def value_size(self, kind: str, id: str) -> int:
        """See `Database`."""
        return await self._run(lambda tables, connection: tables.value_size(connection, kind, id))

    async def replace(self, record: Record) -> Record | None:
        """See `Database`."""
        return await self._run(lambda tables, connection: tables.replace(connection, record))

    async def delete(self, kind: str, id: str) -> bool:
        """See `Database`."""
        return await self._run(lambda tables, connection: tables.delete(connection, kind, id), frees=True)

    async def page(
        self, kind: str, owner: str, *, limit: int, after: str | None = None, newest_first: bool = True
    ) -> list[Record]:
        """See `Database`."""
        now, limit = self._clock(), min(limit, MAX_LISTED)

        def read(tables: SqlTables, connection: Connection) -> list[Record]:
            last = None
            if after is not None:
                last = tables.get(connection, kind, after)
                if last is None or last.owner != owner or not self._is_valid(last):
                    raise RecordUnknown(after)
            return tables.page(connection, kind, owner, limit, last, now, newest_first=newest_first)

        return await self._run(read)

    async def usage(self, kind: str, owner: str) -> Usage:
        """See `Database`."""
        return await self._run(lambda tables, connection: tables.usage(connection, kind, owner))

    async def claim(self, kind: str, holder: str, lease: float) -> Record | None:
        """See `Database`."""
        now = self._clock()

        def take(tables: SqlTables, connection: Connection) -> Record | None:
            for _ in range(CLAIM_TRIES):
                found = tables.most_due(connection, kind, now)
                if found is None:
                    return None
                taken = tables.replace(connection, found.changed(holder=holder, due=now + lease))
                if taken is not None:
                    return taken
            return None

        return await self._run(take)

    async def add_chunks(self, kind: str, id: str, chunks: Mapping[int, bytes], version: int | None = None) -> int:
        """See `Database`."""
        return await self._run(
            lambda tables, connection: tables.add_chunks(connection, kind, id, chunks, version), adds=True
        )

    async def chunks(self, kind: str, id: str, after: int = -1, max_bytes: int = READ_BYTES) -> list[tuple[int, bytes]]:
        """See `Database`."""
        return await self._run(
            lambda tables, connection: tables.chunks(connection, kind, id, after, max_bytes, MAX_READ_CHUNKS)
        )

    async def positions(self, kind: str, id: str) -> list[int]:
        """See `Database`."""
        return await self._run(lambda tables, connection: tables.positions(connection, kind, id))

    async def delete_expired(self, now: float) -> int:
        """See `Database`."""

        def remove(tables: SqlTables, connection: Connection) -> int:
            expired = tables.expired(connection, now, MAX_REMOVED)
            return sum(tables.delete(connection, kind, id, expired_at=now) for kind, id in expired)

        return await self._run(remove, frees=True)

    async def delete_oldest(self, kind: str, owner: str, limits: RecordLimits) -> int:
        """See `Database`."""

        def remove(tables: SqlTables, connection: Connection) -> int:
            tables.lock(connection, kind, owner)
            oldest = tables.above(connection, kind, owner, limits, MAX_REMOVED)
            return sum(tables.delete(connection, kind, id) for id in oldest)

        return await self._run(remove, frees=True)

    async def shrink(self) -> bool:
        """See `Database`. A file that was not made for it does not shrink."""
        if not isinstance(self._place, Path):
            return False
        return await self._run(_shrink)

    async def close(self) -> None:
        """See `Database`."""
        await asyncio.to_thread(self._threads.shutdown)
        if self._engine is not None:
            self._engine.dispose()

    async def _run(
        self, operation: Callable[[SqlTables, Connection], T], *, adds: bool = False, frees: bool = False
    ) -> T:
        """The result of an operation in a transaction on one of the threads. One that `adds` contents leaves room on
        the disk for those that free it."""
        if self._open_operations >= THREADS + MAX_WAITING:
            raise DatabaseUnavailable(f"{self._open_operations} operations wait for the database")
        self._open_operations += 1
        work = partial(self._with_room, operation, adds=adds, frees=frees)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._open_operations -= 1

    def _with_room(self, operation: Callable[[SqlTables, Connection], T], *, adds: bool, frees: bool) -> T:
        """The result of an operation. On a full disk it is tried again once SQLite's log is part of its file, and one
        that `frees`, or opens it, with the room that was kept."""
        if frees and self._reserve is not None and not self._reserve.is_kept:
            operation = partial(_sparing, operation)
        for remaining in reversed(range(ROOM_TRIES)):
            try:
                done = self._transaction(operation, adds=adds)
            except DatabaseUnavailable as error:
                if self._reserve is None or not is_out_of_room(error.__cause__) or not remaining:
                    raise
            else:
                if frees and self._reserve is not None and not self._reserve.is_kept:
                    self._checkpoint()
                return done
            if frees or self._engine is None:  # to be opened takes room, too
                self._reserve.give_up()
            if frees:
                operation = partial(_sparing, operation)
            self._checkpoint()
        raise AssertionError("the last attempt returns or raises")

    def _checkpoint(self) -> None:
        """Gives the log's room back to the disk, where that can be."""
        with contextlib.suppress(DatabaseUnavailable):
            self._transaction(lambda _, connection: connection.exec_driver_sql(CHECKPOINT).close(), adds=False)

    def _transaction(self, operation: Callable[[SqlTables, Connection], T], *, adds: bool) -> T:
        from sqlalchemy.exc import DBAPIError, TimeoutError

        try:
            engine, tables = self._opened()
            if adds and self._reserve is not None and not self._reserve.keep():
                raise DatabaseUnavailable("the database's disk is full: what is left is kept for deletions")
            with engine.begin() as connection:
                return operation(tables, connection)
        except DBAPIError as error:
            raise DatabaseUnavailable(str(error.orig).strip().partition("\n")[0]) from error.orig
        except sqlite3.Error as error:  # of what goes past SQLAlchemy
            raise DatabaseUnavailable(str(error)) from error
        except (OSError, TimeoutError) as error:
            raise DatabaseUnavailable(str(error)) from None

    def _opened(self) -> tuple[Engine, SqlTables]:
        with self._opening:
            if self._engine is None or self._tables is None:
                from services.gateway.database.sql_tables import SqlTables

                engine = self._connect()
                tables = SqlTables(engine.dialect.name)
                tables.create(engine)
                self._engine, self._tables = engine, tables
            return self._engine, self._tables

    def _connect(self) -> Engine:
        from sqlalchemy import URL, create_engine, event

        if isinstance(self._place, str):
            options = f"-c statement_timeout={STATEMENT_SECONDS * 1000} -c lock_timeout={LOCK_SECONDS * 1000}"
            return create_engine(
                self._place,
                pool_size=THREADS,
                max_overflow=0,
                pool_timeout=CONNECT_SECONDS,
                pool_pre_ping=True,
                hide_parameters=True,
                connect_args={"connect_timeout": CONNECT_SECONDS, "options": options},
            )
        place = self._place
        place.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        os.close(private_opener(place, os.O_RDWR | os.O_CREAT))  # SQLite's other files get the same mode
        engine = create_engine(
            URL.create("sqlite", database=str(place)),
            pool_size=THREADS,
            max_overflow=0,
            hide_parameters=True,
            connect_args={"timeout": LOCK_SECONDS, "check_same_thread": False},
        )

        @event.listens_for(engine, "connect")
        def _configure(connection: Any, _: Any) -> None:
            if not place.stat().st_size:  # later it would only take the lock
                connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            connection.execute("PRAGMA journal_mode=WAL")  # readers do not wait for the writer

        return engine


def _shrink(tables: SqlTables, connection: Connection) -> bool:
    """Takes a piece of SQLite's file that nothing is in from its end; whether more is to go."""

    def number(pragma: str) -> int:
        found: int = connection.exec_driver_sql(f"PRAGMA {pragma}").scalar_one()
        return found

    def is_due() -> bool:
        free = number("freelist_count")
        return free > max(KEPT_PAGES, int(number("page_count") * KEPT_SHARE))

    if number("auto_vacuum") != INCREMENTAL or not is_due():
        return False
    driver: Any = connection.connection.driver_connection
    driver.executescript(f"PRAGMA incremental_vacuum({SHRINK_PAGES})")  # to its end: each step is a page
    return is_due()


def _sparing(operation: Callable[[SqlTables, Connection], T], tables: SqlTables, connection: Connection) -> T:
    """A deletion that does not overwrite what it deletes, as some builds of SQLite do: that takes as much room."""
    before = connection.exec_driver_sql("PRAGMA secure_delete").scalar_one()
    connection.exec_driver_sql("PRAGMA secure_delete = FAST")
    try:
        return operation(tables, connection)
    finally:
        connection.exec_driver_sql(f"PRAGMA secure_delete = {before}")
