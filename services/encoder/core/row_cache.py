"""Which images' rows are kept: the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import NewType

from shared.messages.generation import PromptEmbeds

ImageHash = NewType("ImageHash", bytes)

HASH_BYTES = 16


def image_hash(file: bytes, salt: str | None = None) -> ImageHash:
    """Names an image: BLAKE2b-128 of its file, keyed by the salt. Two files of the same picture are two images."""
    key = b"" if salt is None else blake2b(salt.encode(), digest_size=HASH_BYTES).digest()
    return ImageHash(blake2b(file, digest_size=HASH_BYTES, key=key).digest())


class RowCache:
    """Owns the rows of images that were encoded, up to so many bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[ImageHash, PromptEmbeds] = OrderedDict()
        self.bytes_used = 0

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, image: ImageHash) -> PromptEmbeds | None:
        """The rows of an image, which are the most recently used from now on; None where they are not kept."""
        rows = self._rows.get(image)
        if rows is not None:
            self._rows.move_to_end(image)
        return rows

    def keep(self, image: ImageHash, rows: PromptEmbeds) -> None:
        """Keeps the rows of an image that has none here, unless they alone are more than there is room for."""
        if image in self._rows or len(rows.rows) > self._max_bytes:
            return
        self._rows[image] = rows
        self.bytes_used += len(rows.rows)
        while self.bytes_used > self._max_bytes:
            _, oldest = self._rows.popitem(last=False)
            self.bytes_used -= len(oldest.rows)
