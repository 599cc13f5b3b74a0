"""What a chat may have beside text, given as a file in the body or at an address."""

from __future__ import annotations

from typing import NamedTuple

from shared.messages.encoder import MAX_IMAGE_BYTES

MAX_VIDEO_BYTES = 50 * 10**6
"""Of one video's file."""


class MediaKind(NamedTuple):
    """A kind of files."""

    noun: str
    media_types: tuple[str, ...]
    max_bytes: int

    @property
    def part(self) -> str:
        """The type of a chat's part, and its key."""
        return f"{self.noun}_url"

    @property
    def a_noun(self) -> str:
        """With its article."""
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"


IMAGE = MediaKind("image", ("image/png", "image/jpeg", "image/webp", "image/gif"), MAX_IMAGE_BYTES)
VIDEO = MediaKind("video", ("video/mp4", "video/webm"), MAX_VIDEO_BYTES)


class MediaSource(NamedTuple):
    """An image or a video of a chat whose rows are still to be had."""

    number: int
    """Which of `ChatPrompt.embeds` its rows become, or the first of these."""
    field: str
    """The client's field that gave it."""
    url: str | None = None
    """Where it is; None: it is `data`."""
    data: bytes = b""
    """Its file."""
    kind: MediaKind = IMAGE
    """One that is equal: large bodies are read in another process, which has objects of its own."""
