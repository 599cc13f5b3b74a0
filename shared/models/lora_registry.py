"""The file of LoRA adapters that were loaded at run time: gateways write it, workers follow it.

It outlives every process, so that an engine which starts anew, or is added, has the same adapters. JSON:
`{"loras": {"poet": "/adapters/poet"}}`.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from shared.ids import ModelName
from shared.machine.home import expanded
from shared.private_files import replace_private

MAX_REGISTERED_LORAS = 256
"""Adapters of one engine: each of its heartbeats names them all."""
MAX_FILE_BYTES = 2**20
LOCK_SECONDS = 5.0
"""That a change waits for another process's, which takes milliseconds: one that hangs would else hang all."""
LOCK_PAUSE = 0.01


class LoraRegistryError(Exception):
    """The file cannot be read or written, or an entry is not possible; the text names it."""


class AdapterRefused(Exception):
    """An adapter cannot be served; the text names file, field and value. `missing`: there is none at its path."""

    def __init__(self, reason: str, *, missing: bool = False) -> None:
        super().__init__(reason)
        self.missing = missing


class RegistryVersion(NamedTuple):
    """What differs between the file before and after a change."""

    inode: int
    size: int
    modified_ns: int


NO_FILE = RegistryVersion(0, 0, 0)


class _Contents(Struct, forbid_unknown_fields=True):
    loras: dict[str, str] = {}


class LoraRegistry:
    """Owns nothing but the path: each call reads the file, as other processes write it, too. All calls may block."""

    def __init__(self, path: Path) -> None:
        self.path = expanded(path)

    def version(self) -> RegistryVersion:
        """What the file is now; NO_FILE where there is none. Raises LoraRegistryError."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return NO_FILE
        except OSError as error:
            raise LoraRegistryError(f"{self.path}: {error.strerror}") from None
        return RegistryVersion(status.st_ino, status.st_size, status.st_mtime_ns)

    def read(self) -> dict[ModelName, str]:
        """Each adapter's folder by its name, in the order in which they were loaded. Raises LoraRegistryError."""
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise LoraRegistryError(f"{self.path}: {error.strerror}") from None
        if len(data) > MAX_FILE_BYTES:
            raise LoraRegistryError(f"{self.path}: larger than the {MAX_FILE_BYTES} bytes that are allowed")
        try:
            found = msgspec.json.decode(data, type=_Contents).loras
        except msgspec.MsgspecError as error:
            raise LoraRegistryError(f"{self.path}: {error}") from None
        if len(found) > MAX_REGISTERED_LORAS:
            raise LoraRegistryError(f"{self.path}: {len(found)} adapters; at most {MAX_REGISTERED_LORAS} are allowed")
        return {ModelName(name): path for name, path in found.items()}

    def add(self, name: ModelName, path: str) -> None:
        """Enters an adapter. Raises LoraRegistryError where one of this name is there, or the file is full."""
        with self._locked():
            loras = self.read()
            if name in loras:
                raise LoraRegistryError(f"lora_name = {name}: {self.path} has an adapter of this name")
            if len(loras) >= MAX_REGISTERED_LORAS:
                raise LoraRegistryError(f"{self.path}: it has {len(loras)} adapters, as many as are allowed")
            self._write({**loras, name: path})

    def remove(self, name: ModelName, path: str | None = None) -> bool:
        """Takes an adapter out, of which `path` is the folder, or any of the name; whether it was there. Raises
        LoraRegistryError."""
        with self._locked():
            loras = self.read()
            if name not in loras or path not in (None, loras[name]):
                return False
            del loras[name]
            self._write(loras)
            return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Of all processes of this machine only one changes the file. Raises LoraRegistryError."""
        try:
            with self.path.with_name(f"{self.path.name}.lock").open("a") as lock:
                self._wait_for(lock.fileno())
                yield
        except OSError as error:
            raise LoraRegistryError(f"{self.path}: {error.strerror or error}") from None

    def _wait_for(self, lock: int) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    text = f"another process has been changing it for {LOCK_SECONDS:g} s"
                    raise LoraRegistryError(f"{self.path}: {text}") from None
                time.sleep(LOCK_PAUSE)
            else:
                return

    def _write(self, loras: dict[ModelName, str]) -> None:
        """As a whole: readers see the file before or after. Raises LoraRegistryError where nobody would read it."""
        data = msgspec.json.format(msgspec.json.encode({"loras": loras}))
        if len(data) > MAX_FILE_BYTES:
            raise LoraRegistryError(f"{self.path}: it would be larger than the {MAX_FILE_BYTES} bytes that are allowed")
        replace_private(self.path, data)
