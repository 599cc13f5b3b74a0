"""Which image is encoded next: clients take turns, so that one with many images does not hold up one with few. No
clock."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from services.encoder.core.row_table import ImageHash


@dataclass(slots=True)
class _QueuedImage:
    turn: str
    asked_at: float


class ImageQueue:
    """Owns the order of images that wait: each client's in the order of their arrival, one of each client in turn."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds after which an image is left out that nobody has asked for again."""
        self._patience = patience
        self._images: dict[ImageHash, _QueuedImage] = {}
        self._turns: OrderedDict[str, deque[ImageHash]] = OrderedDict()
        """The images of each client that has some; the first is next."""

    def __len__(self) -> int:
        return len(self._images)

    def count(self, turn: str) -> int:
        """How many of a client wait."""
        return len(self._turns.get(turn, ()))

    def add(self, image: ImageHash, turn: str, now: float) -> None:
        """An image that does not wait yet. `turn`: whose it is."""
        self._images[image] = _QueuedImage(turn, now)
        self._turns.setdefault(turn, deque()).append(image)

    def renew(self, image: ImageHash, now: float) -> None:
        """Somebody asks for an image, which may wait here, once more."""
        if (queued := self._images.get(image)) is not None:
            queued.asked_at = now

    def take(self) -> ImageHash | None:
        """The next image, which waits no longer; None where none does."""
        if not self._turns:
            return None
        turn, images = self._turns.popitem(last=False)
        image = images.popleft()
        if images:
            self._turns[turn] = images  # behind all others
        del self._images[image]
        return image

    def expire(self, now: float) -> list[ImageHash]:
        """Removes images that nobody asks for any more, and returns them."""
        expired = [image for image, queued in self._images.items() if now - queued.asked_at > self._patience]
        for image in expired:
            turn = self._images.pop(image).turn
            self._turns[turn].remove(image)
            if not self._turns[turn]:
                del self._turns[turn]
        return expired
