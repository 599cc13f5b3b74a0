"""Two tables, and every statement on them. Whoever calls owns the connection and its transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    Engine,
    Index,
    LargeBinary,
    MetaData,
    Row,
    Select,
    String,
    Table,
    delete,
    func,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateIndex, CreateTable

from services.gateway.database.records import REMOVED_BYTES, Record, RecordLimits, RecordUnknown, Usage

_CREATE_TRIES = 5
"""Gateways that make the tables in the same moment get in each other's way."""


class SqlTables:
    """`records` and `chunks` in one dialect, `sqlite` or `postgresql`; no state but that."""

    def __init__(self, dialect: str) -> None:
        self._is_sqlite = dialect == "sqlite"
        self._insert: Any = sqlite.insert if self._is_sqlite else postgresql.insert
        metadata = MetaData()
        self._records = records = Table(
            "baton_records",
            metadata,
            Column("kind", String, primary_key=True),
            Column("id", String, primary_key=True),
            Column("owner", String, nullable=False),
            Column("created", Double, nullable=False),
            Column("expires", Double),
            Column("value", LargeBinary, nullable=False),
            Column("size", BigInteger, nullable=False),
            Column("due", Double),
            Column("holder", String, nullable=False),
            Column("version", BigInteger, nullable=False),
        )
        self._chunks = Table(
            "baton_chunks",
            metadata,
            Column("kind", String, primary_key=True),
            Column("id", String, primary_key=True),
            Column("position", BigInteger, primary_key=True, autoincrement=False),
            Column("data", LargeBinary, nullable=False),
        )
        self._indexes = (
            Index("baton_records_by_owner", records.c.kind, records.c.owner, records.c.created, records.c.id),
            Index("baton_records_by_due", records.c.kind, records.c.due),
            Index("baton_records_by_end", records.c.expires),
        )

    def create(self, engine: Engine) -> None:
        """Makes what is not there yet."""
        for remaining in reversed(range(_CREATE_TRIES)):
            try:
                with engine.begin() as connection:
                    for table in (self._records, self._chunks):
                        connection.execute(CreateTable(table, if_not_exists=True))
                    for index in self._indexes:
                        connection.execute(CreateIndex(index, if_not_exists=True))
                return
            except DBAPIError:
                if not remaining:
                    raise

    def lock(self, connection: Connection, kind: str, owner: str) -> None:
        """Whoever else locks what this owner has of this kind waits until the transaction, which begins with this, has
        ended."""
        if self._is_sqlite:  # which has one lock, and takes it when something is written: behind what was read
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"baton:{kind}:{owner}", 0))))

    def insert(self, connection: Connection, record: Record) -> bool:
        """Whether there was none of this kind and id."""
        fields = {name: getattr(record, name) for name in Record.__struct_fields__}
        statement = (
            self._insert(self._records)
            .values(fields)
            .on_conflict_do_nothing()
            .execution_options(preserve_rowcount=True)
        )
        return bool(connection.execute(statement).rowcount)

    def get(self, connection: Connection, kind: str, id: str) -> Record | None:
        """The record, expired or not."""
        return self._first(connection, self._select().where(*self._is(kind, id)))

    def value_size(self, connection: Connection, kind: str, id: str) -> int:
        """Bytes that the record says; 0 where there is none."""
        statement = select(func.length(self._records.c.value)).where(*self._is(kind, id))
        return connection.execute(statement).scalar() or 0

    def replace(self, connection: Connection, record: Record) -> Record | None:
        """The next version; None where the one of `record` is gone."""
        columns = self._records.c
        following = record.changed(version=record.version + 1)
        written = ("expires", "value", "size", "due", "holder", "version")
        statement = (
            update(self._records)
            .where(*self._is(record.kind, record.id), columns.version == record.version)
            .values({name: getattr(following, name) for name in written})
        )
        return following if connection.execute(statement).rowcount else None

    def delete(self, connection: Connection, kind: str, id: str, expired_at: float | None = None) -> bool:
        """Whether there was one; with `expired_at` one that had expired by then."""
        conditions = list(self._is(kind, id))
        if expired_at is not None:
            conditions.append(self._records.c.expires <= expired_at)
        if not connection.execute(delete(self._records).where(*conditions)).rowcount:
            return False
        connection.execute(delete(self._chunks).where(*self._of(kind, id)))
        return True

    def page(
        self,
        connection: Connection,
        kind: str,
        owner: str,
        limit: int,
        after: Record | None,
        now: float,
        *,
        newest_first: bool,
    ) -> list[Record]:
        """Those that have not expired, in order, behind `after`."""
        columns = self._records.c
        place = tuple_(columns.created, columns.id)
        statement = self._select().where(
            columns.kind == kind, columns.owner == owner, or_(columns.expires.is_(None), columns.expires > now)
        )
        if after is not None:
            last = tuple_(after.created, after.id)
            statement = statement.where(place < last if newest_first else place > last)
        order = (columns.created.desc(), columns.id.desc()) if newest_first else (columns.created, columns.id)
        return [_record(row) for row in connection.execute(statement.order_by(*order).limit(limit))]

    def usage(self, connection: Connection, kind: str, owner: str) -> Usage:
        """Number and size."""
        columns = self._records.c
        statement = select(func.count(), func.coalesce(func.sum(columns.size), 0))
        number, size = connection.execute(statement.where(columns.kind == kind, columns.owner == owner)).one()
        return Usage(int(number), int(size))

    def above(self, connection: Connection, kind: str, owner: str, limits: RecordLimits, most: int) -> list[str]:
        """The ids of the oldest without a `due` time, as many as have to go until the limits hold, `most` of them."""
        usage, ids, removed = self.usage(connection, kind, owner), list[str](), 0
        if limits.hold(usage):
            return ids
        columns = self._records.c
        oldest = select(columns.id, columns.size).where(
            columns.kind == kind, columns.owner == owner, columns.due.is_(None)
        )
        for id, size in connection.execute(oldest.order_by(columns.created, columns.id).limit(most)):
            removed += size
            if limits.hold(usage) or (ids and removed > REMOVED_BYTES):
                break
            ids.append(id)
            usage = Usage(usage.records - 1, usage.size - size)
        return ids

    def most_due(self, connection: Connection, kind: str, now: float) -> Record | None:
        """The record that has been due for longest."""
        columns = self._records.c
        conditions = (columns.kind == kind, columns.due <= now, or_(columns.expires.is_(None), columns.expires > now))
        return self._first(connection, self._select().where(*conditions).order_by(columns.due).limit(1))

    def add_chunks(
        self, connection: Connection, kind: str, id: str, chunks: Mapping[int, bytes], version: int | None
    ) -> int:
        """How many positions had none. Raises RecordUnknown, which must end the transaction."""
        statement = self._insert(self._chunks).on_conflict_do_nothing().execution_options(preserve_rowcount=True)
        added = 0
        for position, data in chunks.items():
            row = {"kind": kind, "id": id, "position": position, "data": data}
            added += connection.execute(statement, row).rowcount
        # Behind the writing, which locks SQLite; the row's lock does so in Postgres: no chunk outlives its record, and
        # none is added behind the back of who has replaced it.
        record = select(self._records.c.id).where(*self._is(kind, id)).with_for_update(read=True)
        if version is not None:
            record = record.where(self._records.c.version == version)
        if connection.execute(record).first() is None:
            raise RecordUnknown(id)
        return added

    def chunks(
        self, connection: Connection, kind: str, id: str, after: int, max_bytes: int, max_chunks: int
    ) -> list[tuple[int, bytes]]:
        """The next ones, one at least where there is one."""
        columns = self._chunks.c
        behind = (*self._of(kind, id), columns.position > after)
        sizes = select(columns.position, func.length(columns.data)).where(*behind)
        last, total = after, 0
        for position, size in connection.execute(sizes.order_by(columns.position).limit(max_chunks)).all():
            total += size
            if total > max_bytes and last != after:
                break
            last = position
        found = select(columns.position, columns.data).where(*behind, columns.position <= last)
        return [(int(position), bytes(data)) for position, data in connection.execute(found.order_by(columns.position))]

    def positions(self, connection: Connection, kind: str, id: str) -> list[int]:
        """All of a record's, in order."""
        position = self._chunks.c.position
        return list(connection.execute(select(position).where(*self._of(kind, id)).order_by(position)).scalars())

    def expired(self, connection: Connection, now: float, limit: int) -> list[tuple[str, str]]:
        """Kinds and ids of those that have, but for those that another transaction has locked: it removes them itself,
        perhaps in another order, so that each would wait for the other."""
        columns = self._records.c
        found = select(columns.kind, columns.id, columns.size).where(columns.expires <= now)
        found = found.with_for_update(skip_locked=True)  # nothing in SQLite, which has one lock
        names, removed = list[tuple[str, str]](), 0
        for kind, id, size in connection.execute(found.limit(limit)):
            removed += size
            if names and removed > REMOVED_BYTES:
                break
            names.append((kind, id))
        return names

    def _select(self) -> Select[Any]:
        return select(*(self._records.c[name] for name in Record.__struct_fields__))

    def _is(self, kind: str, id: str) -> tuple[Any, Any]:
        return self._records.c.kind == kind, self._records.c.id == id

    def _of(self, kind: str, id: str) -> tuple[Any, Any]:
        return self._chunks.c.kind == kind, self._chunks.c.id == id

    @staticmethod
    def _first(connection: Connection, statement: Select[Any]) -> Record | None:
        row = connection.execute(statement).first()
        return None if row is None else _record(row)


def _record(row: Row[Any]) -> Record:
    fields = dict(row._mapping)
    return Record(**{**fields, "value": bytes(fields["value"])})
