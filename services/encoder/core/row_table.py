"""Which images' rows are kept, for whom, and which go first. No clock, no files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NewType

from shared.ids import RowsName
from shared.messages.encoder import EncodeInput
from shared.messages.generation import PromptEmbeds

ImageHash = NewType("ImageHash", bytes)

HASH_BYTES = 16


def image_hash(asked: EncodeInput) -> ImageHash:
    """Names an image: BLAKE2b-128 of its file, keyed by the salt. Two files of the same picture are two images, and so
    are two sizes of it, and one that is alone and one of several. Of frames, that of their pixels, their size and how
    many the video has; of what was written down, its tokens', too."""
    key = b"" if asked.salt is None else blake2b(asked.salt.encode(), digest_size=HASH_BYTES).digest()
    named = blake2b(asked.content, digest_size=HASH_BYTES, key=key)
    if (frames := asked.frames) is not None:
        named.update(b"frames %d %d %d" % (frames.width, frames.height, frames.frames))
        named.update(b"of %d" % frames.together + b"last" * frames.last)
    if (written := asked.written) is not None:
        named.update(b"written %d " % written.begin + written.tokens)
    if asked.max_side is not None:
        named.update(b"side %d" % asked.max_side)
    if asked.several:
        named.update(b"several")
    if asked.sound:
        named.update(b"sound")
    return ImageHash(named.digest())


def rows_name(rows: PromptEmbeds) -> RowsName:
    """Names rows by their contents."""
    kind = f"{rows.dtype} {rows.size}".encode()
    return RowsName(blake2b(rows.rows, digest_size=HASH_BYTES, key=kind).digest())


@dataclass(slots=True)
class _KeptRows:
    size: int
    leased_until: float
    images: list[ImageHash] = field(default_factory=list)
    """Those that have these rows; none of what a former process left."""


class RowTable:
    """Owns what is known of the rows in an encoder's folder: their size, their images, and until when they are leased.

    Rows that are not leased are a cache of `cache_bytes`: the least recently used go first. All together have
    `max_bytes` at most; what is leased stays.
    """

    def __init__(self, max_bytes: int, cache_bytes: int, lease: float) -> None:
        """`lease`: seconds that rows stay that somebody needs."""
        self._max_bytes, self._cache_bytes, self._lease = max_bytes, cache_bytes, lease
        self._rows: OrderedDict[RowsName, _KeptRows] = OrderedDict()
        """In the order of their last use."""
        self._found: dict[ImageHash, tuple[RowsName, PromptEmbeds]] = {}
        self.bytes_used = 0

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, image: ImageHash, now: float) -> tuple[RowsName, PromptEmbeds] | None:
        """The rows of an image, leased anew; None where they are not kept."""
        found = self._found.get(image)
        if found is not None:
            self.renew((found[0],), now)
        return found

    def renew(self, names: Iterable[RowsName], now: float) -> list[RowsName]:
        """Those of the rows that are here, leased anew."""
        found = [name for name in names if name in self._rows]
        for name in found:
            self._rows[name].leased_until = now + self._lease
            self._rows.move_to_end(name)
        return found

    def fits(self, size: int) -> bool:
        """Whether rows of so many bytes can ever be kept."""
        return size <= self._max_bytes

    def make_room(self, size: int, now: float) -> list[RowsName] | None:
        """Forgets rows until there is room for so many bytes, and returns their names; None where what is leased leaves
        too little, and nothing is forgotten."""
        surplus = self.bytes_used + size - self._max_bytes
        free = [(name, kept) for name, kept in self._rows.items() if kept.leased_until <= now]
        if sum(kept.size for _, kept in free) < surplus:
            return None
        return self._forget(free, surplus)

    def trim(self, now: float) -> list[RowsName]:
        """Forgets what the cache has no room for, and returns the names."""
        free = [(name, kept) for name, kept in self._rows.items() if kept.leased_until <= now]
        return self._forget(free, sum(kept.size for _, kept in free) - self._cache_bytes)

    def keep(self, name: RowsName, size: int, now: float, image: ImageHash | None, answer: PromptEmbeds | None) -> None:
        """Rows that are in the folder from now on, leased. `answer`: what is said of their image; both None of rows
        that a former process left."""
        kept = self._rows.get(name)
        if kept is None:
            kept = self._rows[name] = _KeptRows(size, 0.0)
            self.bytes_used += size
        self.renew((name,), now)
        if image is not None and answer is not None and image not in self._found:
            kept.images.append(image)
            self._found[image] = name, answer

    def forget_images(self, now: float) -> list[RowsName]:
        """Every image is one that was never seen; forgets rows that are not leased, and returns their names."""
        self._found.clear()
        for kept in self._rows.values():
            kept.images.clear()
        return self._forget([each for each in self._rows.items() if each[1].leased_until <= now], self.bytes_used)

    def _forget(self, free: list[tuple[RowsName, _KeptRows]], surplus: int) -> list[RowsName]:
        """So many bytes of those that are not leased, or a little more."""
        forgotten: list[RowsName] = []
        for name, kept in free:
            if surplus <= 0:
                break
            del self._rows[name]
            for image in kept.images:
                del self._found[image]
            self.bytes_used -= kept.size
            surplus -= kept.size
            forgotten.append(name)
        return forgotten
