"""API keys: what each may do, and the file that lists them. No files, no clock: text in, keys out.

[keys.alice]
hash = "sha256:2bb8…"                 # of the key; the key itself is nowhere
scopes = ["inference"]
models = ["llama"]                    # all, unless given
priority_ceiling = 0
requests_per_minute = 600             # without limits, unless given
tokens_per_minute = 200_000
concurrent_requests = 32
weight = 2.0                          # 1, unless given
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NewType, get_args

import msgspec
from msgspec import Meta, Struct

from shared.ids import ModelName

KeyScope = Literal["inference", "read-only", "admin"]
"""inference: generate, tokenize, detokenize, its own files and batches. read-only: the models, the version, and what
the key itself has stored. admin: the keys and their limits. The others include read-only."""
SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)

KeyName = NewType("KeyName", str)
"""What a key is called in logs and messages; it names whose requests they are, and is no secret."""

Limit = Annotated[int, Meta(ge=1, le=10**12)]

MAX_KEYS = 10_000
MIN_PRIORITY = -(2**31)

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NAMED_HASH = re.compile(rf"(?P<name>{_NAME.pattern})=(?P<hash>{_HASH.pattern})")


class KeyFileError(Exception):
    """A list of keys that cannot be used; the text names the key, the field, and what is allowed."""


class ApiKey(Struct, frozen=True, kw_only=True):
    """Whose requests they are, and what these may do."""

    name: KeyName
    scopes: frozenset[KeyScope] = frozenset(SCOPES)
    models: frozenset[ModelName] | None = None
    """The models that it may use; None: all."""
    priority_ceiling: int = MIN_PRIORITY
    """The least number that its requests may give as `priority`, where lower goes first."""

    requests_per_minute: int | None = None
    """None: no limit; so with the next two."""
    tokens_per_minute: int | None = None
    """Of prompts and outputs together."""
    concurrent_requests: int | None = None
    weight: float = 1.0
    """Its share, relative to those of other keys, where requests wait for an engine."""

    @property
    def limited(self) -> bool:
        """Whether anything of its use is limited."""
        return (self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests) != (None, None, None)

    def allows(self, scope: KeyScope) -> bool:
        """Whether its requests may do what `scope` stands for."""
        return scope in self.scopes or scope == "read-only"

    def allows_model(self, model: ModelName) -> bool:
        """Whether it may use `model`."""
        return self.models is None or model in self.models

    def salt(self, cache_salt: str | None) -> str:
        """The cache salt under which only its own requests share prefixes. No other key has the same for any
        `cache_salt` of its clients, as no name has a slash."""
        return f"{self.name}/{cache_salt or ''}"


ANONYMOUS = ApiKey(name=KeyName(""))
"""Whose requests they are where no keys are configured: everybody may do everything."""


class KeyEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key as the file has it."""

    hash: Annotated[str, Meta(pattern=f"^{_HASH.pattern}$")]
    scopes: Annotated[tuple[KeyScope, ...], Meta(min_length=1)] = ("inference",)
    models: Annotated[tuple[ModelName, ...], Meta(min_length=1)] | None = None
    priority_ceiling: Annotated[int, Meta(ge=MIN_PRIORITY, lt=2**31)] = 0
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent_requests: Limit | None = None
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0

    def key(self, name: KeyName) -> ApiKey:
        """What the key may do."""
        return ApiKey(
            name=name,
            scopes=frozenset(self.scopes),
            models=None if self.models is None else frozenset(self.models),
            priority_ceiling=self.priority_ceiling,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            concurrent_requests=self.concurrent_requests,
            weight=self.weight,
        )


class KeyRing:
    """The keys by their hashes; frozen."""

    def __init__(self, keys: Iterable[tuple[str, ApiKey]]) -> None:
        """`keys`: hash and key. Raises KeyFileError where two have one hash or one name."""
        self._keys: dict[str, ApiKey] = {}
        self._by_name: dict[KeyName, ApiKey] = {}
        for hashed, key in keys:
            if hashed in self._keys:
                raise KeyFileError(f"keys.{key.name}: hash: it is that of {self._keys[hashed].name!r}, too")
            if key.name in self._by_name:
                raise KeyFileError(f"keys.{key.name}: there are two of this name, one of them in the settings")
            self._keys[hashed] = key
            self._by_name[key.name] = key

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, secret: bytes) -> ApiKey | None:
        """The key that a client has sent. The time that it takes tells nothing of other keys: what is looked up is a
        hash, whose bits no client can choose."""
        return self._keys.get(hashed_key(secret))

    def named(self, name: KeyName) -> ApiKey | None:
        """The key of a name."""
        return self._by_name.get(name)


def hashed_key(secret: bytes) -> str:
    """A key as lists of keys have it. SHA-256 is enough: keys are random and long, so nobody can try them all."""
    return f"sha256:{hashlib.sha256(secret).hexdigest()}"


def check_name(name: str) -> KeyName:
    """Raises KeyFileError for what cannot be the name of a key."""
    if not _NAME.fullmatch(name):
        raise KeyFileError(f"{name[:80]!r} is no name of a key: 1 to 64 of A-Z a-z 0-9 _ - are allowed")
    return KeyName(name)


def keys_of_settings(given: Sequence[str]) -> Iterator[tuple[str, ApiKey]]:
    """Yields hash and key of each of the setting `api_keys`, which may do everything. One is the key itself, then named
    `default`, `default-2`, …; or `NAME=sha256:…`."""
    for number, text in enumerate(given, start=1):
        if named := _NAMED_HASH.fullmatch(text):
            yield named["hash"], ApiKey(name=KeyName(named["name"]))
        else:
            yield hashed_key(text.encode()), ApiKey(name=KeyName("default" if number == 1 else f"default-{number}"))


def read_keys(text: str) -> list[tuple[str, ApiKey]]:
    """Hash and key of each entry of a file. Raises KeyFileError."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise KeyFileError(f"not valid TOML: {error}") from None
    if unknown := set(table) - {"keys"}:
        raise KeyFileError(f"{min(unknown)}: unknown; only tables [keys.NAME] are allowed")
    entries = table.get("keys", {})
    if not isinstance(entries, dict):
        raise KeyFileError("keys: tables [keys.NAME] are expected")
    if len(entries) > MAX_KEYS:
        raise KeyFileError(f"keys: {len(entries)} keys; at most {MAX_KEYS} are allowed")
    return [_entry(name, fields) for name, fields in entries.items()]


def _entry(name: str, fields: Any) -> tuple[str, ApiKey]:
    checked = check_name(name)
    entry = entry_of(name, fields)
    return entry.hash, entry.key(checked)


def entry_of(name: str, fields: Any) -> KeyEntry:
    """The entry of a key with these fields. Raises KeyFileError."""
    try:
        return msgspec.convert(fields, KeyEntry)
    except msgspec.ValidationError as error:
        allowed = f"; allowed are {', '.join(SCOPES)}" if "$.scopes" in str(error) else ""
        raise KeyFileError(f"keys.{name}: {error}{allowed}") from None


def entry_text(name: KeyName, entry: KeyEntry) -> str:
    """The lines of an entry, as `read_keys` reads them."""
    defaults = KeyEntry(hash=entry.hash)
    lines = [f"[keys.{name}]"]
    for field in KeyEntry.__struct_fields__:
        value = getattr(entry, field)
        if field in ("hash", "scopes") or value != getattr(defaults, field):
            lines.append(f"{field} = {msgspec.json.encode(value).decode()}")  # TOML has JSON's strings, numbers, lists
    return "\n".join(lines) + "\n"
