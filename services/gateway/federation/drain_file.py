"""Remembers in a file whether the cluster is drained, so that it still is when all its gateways were started anew."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
from msgspec import Struct

from shared.packing import NOT_DECODED
from shared.private_files import replace_private

log = logging.getLogger(__name__)


class DrainState(Struct, frozen=True):
    """The last switch of a cluster."""

    drained: bool
    switched: float
    """Unix seconds."""


class DrainFile:
    """Owns nothing: several gateways of a host write the same file, and say the same in it."""

    def __init__(self, path: Path | None) -> None:
        """`path`: None where nothing is to be remembered."""
        self._path = path

    def read(self) -> DrainState | None:
        """None where nothing was written, or what was cannot be read."""
        if self._path is None:
            return None
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=DrainState)
        except FileNotFoundError:
            return None
        except (*NOT_DECODED, OSError) as error:
            log.warning("drain not remembered", extra={"path": str(self._path), "error": str(error)})
            return None

    def write(self, state: DrainState) -> None:
        """Replaces what was written. Where that cannot be done, it is logged."""
        if self._path is None:
            return
        try:
            replace_private(self._path, msgspec.json.encode(state))
        except OSError as error:
            log.warning("drain not written", extra={"path": str(self._path), "error": str(error)})
