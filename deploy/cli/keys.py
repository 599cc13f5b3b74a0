"""`baton keys`: makes API keys for the file that gateways read (`--keys-file`), which has only their hashes."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deploy.errors import CommandError
from services.gateway.core.api_keys import (
    ApiKey,
    KeyFileError,
    check_name,
    entry_of,
    entry_text,
    hashed_key,
    read_keys,
)

KEY_BYTES = 32
PREFIX = "sk-baton-"
"""So that programs which look for secrets in code find one."""


class KeysAction(StrEnum):
    """What `baton keys` does."""

    NEW = "new"
    LIST = "list"


def keys(
    action: Annotated[KeysAction, typer.Argument(help="new: make a key. list: show the keys of the file.")],
    name: Annotated[str | None, typer.Argument(help="Name of the new key, for logs and limits.")] = None,
    keys_file: Annotated[
        Path, typer.Option(help="TOML file of the keys; made if it is not there.", envvar="BATON_KEYS_FILE")
    ] = Path("keys.toml"),
    scope: Annotated[
        list[str] | None, typer.Option(help="inference (default), read-only or admin. May be repeated.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="A model that it may use; default: all.")] = None,
    priority_ceiling: Annotated[
        int | None, typer.Option(help="Least `priority` of its requests, where lower goes first.", show_default="0")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Default: no limit.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Prompts and outputs. Default: no limit.")] = None,
    concurrent_requests: Annotated[int | None, typer.Option(help="Open requests. Default: no limit.")] = None,
    weight: Annotated[
        float | None, typer.Option(help="Share relative to other keys where requests wait.", show_default="1")
    ] = None,
) -> None:
    """Make an API key, or list those of a file: baton keys new NAME, list.

    A new key is printed once and kept nowhere; gateways that read the file know it within a second. To revoke a key,
    delete its table from the file.
    """
    try:
        if action is KeysAction.LIST:
            _show([key for _, key in read_keys(keys_file.read_text())])
            return
        if name is None:
            raise CommandError("baton keys new NAME: a name is expected", status=2)
        given = {
            "scopes": scope,
            "models": model,
            "priority_ceiling": priority_ceiling,
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "concurrent_requests": concurrent_requests,
            "weight": weight,
        }
        print(new_key(keys_file, name, {field: value for field, value in given.items() if value is not None}))
    except KeyFileError as error:
        raise CommandError(f"{keys_file}: {error}", status=2) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{keys_file}: {error}") from None


def new_key(path: Path, name: str, fields: dict[str, object]) -> str:
    """Adds a key to the file, which only its owner may read, and returns it. Raises KeyFileError and OSError."""
    secret = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    checked = check_name(name)
    entry = entry_of(name, {"hash": hashed_key(secret.encode()), **fields})
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        before = file.read()
        if any(key.name == checked for _, key in read_keys(before)):
            raise KeyFileError(f"keys.{name}: there is a key of this name already")
        # One write, so that a gateway reads the old file or the new one.
        file.write(("\n" if before else "") + entry_text(checked, entry))
    return secret


def _show(found: Sequence[ApiKey]) -> None:
    for key in found:
        models = "all models" if key.models is None else ", ".join(sorted(key.models))
        print(f"{key.name:<20} {', '.join(sorted(key.scopes)):<20} {models}")
