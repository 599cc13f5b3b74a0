"""Which database a URL means."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from services.gateway.database.records import Database

ALLOWED = (
    "sqlite:////PATH, postgresql://USER:PASSWORD@HOST/NAME, and redis://, rediss:// or unix:// with a database number "
    "are allowed"
)


def check_database_url(url: str) -> None:
    """Raises ValueError, without the password, for what is no URL of a database."""
    found = urlsplit(url)
    match found.scheme:
        case "sqlite":
            usable = not found.netloc and len(found.path) > 1 and not found.path.startswith("/:") and not found.query
        case "postgresql":
            usable = bool(found.path.strip("/"))
        case "redis" | "rediss":
            usable = bool(found.hostname)
        case "unix":
            usable = bool(found.path)
        case _:
            usable = False
    if not usable:
        raise ValueError(f"database: {ALLOWED}")


def open_database(url: str, clock: Callable[[], float] = time.time) -> Database:
    """A database that connects with its first operation. Raises ValueError for a URL that is none, ImportError where
    the library that it needs is not installed."""
    check_database_url(url)
    scheme, _, rest = url.partition(":")
    if scheme in ("sqlite", "postgresql"):
        from services.gateway.database.sql_database import SqlDatabase

        if scheme == "sqlite":
            return SqlDatabase(Path(urlsplit(url).path.removeprefix("/")), clock)
        if find_spec("psycopg") is None:
            raise ImportError("psycopg")
        return SqlDatabase(f"postgresql+psycopg:{rest}", clock)
    from services.gateway.database.redis_database import RedisDatabase

    return RedisDatabase(url, clock)
