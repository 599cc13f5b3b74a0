"""The output file of `baton batch`: each answer is in it whole or not at all, and once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection
from pathlib import Path

import msgspec
from msgspec import Struct

from deploy.errors import CommandError
from shared.packing import NOT_DECODED


class WrittenLine(Struct, frozen=True):
    """The part of an output line that resuming a batch needs."""

    id: str


_written = msgspec.json.Decoder(WrittenLine)


def written_id(line: bytes) -> str | None:
    """The id of an existing output line; None if this command did not write the line."""
    try:
        return _written.decode(line).id
    except NOT_DECODED:
        return None


class BatchOutput:
    """Owns the output file, locked against a second run. A line that a killed run left half written is cut off."""

    def __init__(self, path: Path, input_ids: Collection[str]) -> None:
        """`input_ids`: the ids of the input's lines. Raises CommandError where the file holds answers to anything
        else."""
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise CommandError(f"{path}: another baton batch is writing it") from None
        try:
            self.answered = self._recover(input_ids)
        except BaseException:
            os.close(self._fd)
            raise
        """Ids of the lines that need no answer any more."""

    def _recover(self, input_ids: Collection[str]) -> set[str]:
        answered: set[str] = set()
        whole = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                id_ = written_id(line)
                if id_ is None or id_ not in input_ids:
                    raise CommandError(
                        f"{self._path}: line {number} is no answer to a request of this input; choose another output"
                    )
                answered.add(id_)
                whole += len(line)
        os.ftruncate(self._fd, whole)
        return answered

    def write(self, line: bytes) -> None:
        """Raises CommandError, for example where the disk is full; the next run goes on from there."""
        try:
            view = memoryview(line)
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise CommandError(f"{self._path}: {error.strerror}") from None

    def close(self) -> None:
        """Writes everything to disk and releases the lock."""
        os.fsync(self._fd)
        os.close(self._fd)
