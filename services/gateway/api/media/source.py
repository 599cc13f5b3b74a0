"""What a chat may have beside text, given as a file in the body or at an address."""

from __future__ import annotations

from typing import NamedTuple

from shared.messages.encoder import MAX_IMAGE_BYTES

MAX_VIDEO_BYTES = 50 * 10**6
"""Of one video's file."""
MAX_SOUND_BYTES = 25 * 2**20
"""Of one sound's file."""


class MediaKind(NamedTuple):
    """A kind of files."""

    noun: str
    part: str
    """The type of a chat's part, and its key."""
    shown: str
    """The type of the part that chat templates see."""
    media_types: tuple[str, ...]
    """Of a sound, formats."""
    max_bytes: int
    url_part: str
    """The same as `part`, of one at an address or in a data URI."""

    @property
    def a_noun(self) -> str:
        """With its article."""
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"


IMAGE = MediaKind(
    "image", "image_url", "image", ("image/png", "image/jpeg", "image/webp", "image/gif"), MAX_IMAGE_BYTES, "image_url"
)
VIDEO = MediaKind("video", "video_url", "video", ("video/mp4", "video/webm"), MAX_VIDEO_BYTES, "video_url")
SOUND = MediaKind(
    "sound", "input_audio", "audio", ("wav", "mp3", "flac", "ogg", "webm", "m4a"), MAX_SOUND_BYTES, "audio_url"
)
MEDIA = (IMAGE, VIDEO, SOUND)


class MediaSource(NamedTuple):
    """An image, a video or a sound of a chat whose rows are still to be had."""

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
    max_side: int | None = None
    """Pixels of the longer side of an image, to which a larger one is scaled down; None: it is taken as it is."""
