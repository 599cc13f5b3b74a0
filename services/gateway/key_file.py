"""The API keys of this process: those of its settings and those of a file, which is read again when it changes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from services.gateway.core.api_keys import KeyFileError, KeyRing, keys_of_settings, read_keys
from services.gateway.metrics import KEYS, KEYS_FILE_VALID

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
MAX_FILE_BYTES = 16 * 2**20


class FileVersion(NamedTuple):
    """What differs between a file before and after a change, whether it was replaced or written to."""

    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileVersion:
        """The version that has this status."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class KeyFileWatcher:
    """Owns the ring of keys. It is replaced as a whole, so that a request sees one version of it."""

    def __init__(self, keys: Sequence[str], path: Path | None) -> None:
        """Nothing is read yet, and no key of the file known. `keys`: the setting `api_keys`."""
        self._keys, self.path = keys, path
        self.ring = KeyRing(keys_of_settings(keys))
        self.required = bool(keys) or path is not None
        """Whether clients need a key. With a file they do even when it lists none."""
        self.error: str | None = None
        """Why the file as it is now is not used; the keys are those of the file as it was."""
        self._version: FileVersion | None = None
        KEYS.set(len(self.ring))
        KEYS_FILE_VALID.set(1)

    def load(self) -> None:
        """Reads the file. Raises KeyFileError, and keeps the keys that it had, where it cannot be used."""
        if self.path is None:
            return
        self._adopt(*_read(self.path))

    async def watch(self) -> None:
        """Reads the file whenever it has changed, until it is cancelled. What cannot be used is logged once, and the
        keys stay as they are."""
        while self.path is not None:
            await asyncio.sleep(POLL_SECONDS)
            try:
                # Beside the event loop, as the file may lie on a disk of the network.
                changed = await asyncio.to_thread(_read_changed, self.path, self._version)
            except KeyFileError as error:
                self._version = None  # so that it is read again when it is back as it was
                self._report(str(error))
                continue
            if changed is not None:
                self._follow(*changed)

    def _follow(self, version: FileVersion, text: str) -> None:
        try:
            self._adopt(version, text)
        except KeyFileError as error:
            self._report(str(error))
        else:
            log.info("keys read", extra={"file": str(self.path), "keys": len(self.ring)})

    def _adopt(self, version: FileVersion, text: str) -> None:
        self._version = version
        self.ring = KeyRing([*keys_of_settings(self._keys), *read_keys(text)])
        self.error = None
        KEYS.set(len(self.ring))
        KEYS_FILE_VALID.set(1)

    def _report(self, error: str) -> None:
        if error != self.error:
            log.error("keys not read; the ones before stay", extra={"file": str(self.path), "reason": error})
        self.error = error
        KEYS_FILE_VALID.set(0)


def _read_changed(path: Path, known: FileVersion | None) -> tuple[FileVersion, str] | None:
    try:
        version = FileVersion.of(path.stat())
    except OSError as error:
        raise KeyFileError(f"{error.strerror}") from None
    return None if version == known else _read(path)


def _read(path: Path) -> tuple[FileVersion, str]:
    """The file's text with its version. Raises KeyFileError, where it is being written, too."""
    try:
        with path.open("rb") as file:
            version = FileVersion.of(os.fstat(file.fileno()))
            data = file.read(MAX_FILE_BYTES + 1)
            if version != FileVersion.of(os.fstat(file.fileno())):
                raise KeyFileError("it is being written")
    except OSError as error:
        raise KeyFileError(f"{error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise KeyFileError(f"larger than the {MAX_FILE_BYTES} bytes that are allowed")
    try:
        return version, data.decode()
    except UnicodeDecodeError as error:
        raise KeyFileError(f"not UTF-8: {error}") from None
