"""Messages to an encoder: images, sounds, frames and prompts that are to become rows, in place of tokens' embeddings or
beside them. On the wire they have the names that they had when there were images alone."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from shared.ids import Count, ModelName, RowsName
from shared.messages.gateway import ErrorKind
from shared.messages.generation import PromptEmbeds

MAX_IMAGE_BYTES = 6 * 2**20
"""Of one image's file, which has to fit the bus."""


MAX_FRAMES = 64
"""Of one video, that are looked at."""


class FrameGroup(Struct, frozen=True, array_like=True):
    """What frames of a video are that become rows together, and whose pixels stand in place of a file."""

    width: Annotated[int, Meta(ge=1, le=2**16)]
    height: Annotated[int, Meta(ge=1, le=2**16)]
    frames: Annotated[int, Meta(ge=1, le=MAX_FRAMES)]
    """How many of the whole video are looked at, which decides what size they are given."""
    together: Annotated[int, Meta(ge=1, le=2)] = 2
    """How many these are."""
    last: bool = False
    """Whether the video ends with them, for models that have a row there."""

    @property
    def frame_bytes(self) -> int:
        """Of one: three bytes for each pixel, row by row."""
        return 3 * self.width * self.height

    @property
    def pixel_bytes(self) -> int:
        """Of all of them, one behind the other."""
        return self.together * self.frame_bytes


class WrittenTokens(Struct, frozen=True, array_like=True):
    """What a model of Whisper's kind has written down of a window, whose times are asked for."""

    tokens: Annotated[bytes, Meta(max_length=2**16)]
    """Those that the answer was drawn behind, and the answer's but its end, packed as uint32."""
    begin: Count
    """How many of them the answer was drawn behind."""


class EncodeInput(Struct, frozen=True, array_like=True, tag="EncodeImage"):
    """Requests the rows of an input. Answered by `EncoderRows` or `EncoderRefusal`; the same input is answered alike.
    Of a window with `written`, by `TokenTimes` in place of rows."""

    content: Annotated[bytes, Meta(max_length=MAX_IMAGE_BYTES)]
    """An image's file, as the client gave it: nothing of it has been looked at. Of a model that hears, a window of a
    sound: samples in float32, little-endian, of one channel and the model's rate. Of a model whose encoder reads
    prompts, the tokens of one, packed as uint32."""
    salt: str | None = None
    """Rows are shared from a cache with requests of the same salt only: see `Generation.cache_salt`."""
    turn: str = ""
    """Whose it is: an API key, or a request where there are none. One input of each is encoded in turn."""
    frames: FrameGroup | None = None
    """Of frames of a video, whose pixels `content` is; None: it is a file."""
    written: WrittenTokens | None = None
    """What was written down of the window that `content` is, of whose tokens the times are asked for."""
    max_side: Annotated[int, Meta(ge=1)] | None = None
    """Pixels of the longer side of an image, to which a larger one is scaled down; None: it is taken as it is."""
    several: bool = False
    """Whether its chat has further images: there are models that look at each of several less closely, and such as hear
    a sound otherwise beside what they see."""
    sound: bool = False
    """Whether it is a sound, of a model that takes images, too."""


class EncoderRows(Struct, frozen=True, array_like=True, tag="ImageRows"):
    """Reply to `EncodeInput`: a row for each token that the input takes in a prompt. The encoder keeps them, for
    ROWS_LEASE seconds at least."""

    rows: PromptEmbeds


class EncoderRefusal(Struct, frozen=True, array_like=True, tag="ImageRefusal"):
    """No rows: `message` says why, and what is allowed."""

    message: str
    kind: ErrorKind = "invalid_request"


class TokenTimes(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `EncodeInput` with `written`: when each token of the answer ends, in seconds from the window's start."""

    times: tuple[float, ...]


EncoderReply = EncoderRows | EncoderRefusal | TokenTimes

ROWS_LEASE = 150.0
"""Seconds that rows are kept once they were asked for, or somebody said that they are needed: as long as the images of
a request may take, and some more."""


class RenewRows(Struct, frozen=True, array_like=True, tag=True):
    """Open requests need these rows: they are kept for a further ROWS_LEASE."""

    names: tuple[RowsName, ...]


class ForgetRows(Struct, frozen=True, array_like=True, tag=True):
    """An operator wants every input to be encoded anew; rows that open requests need stay as long as they do."""


RowsNotice = RenewRows | ForgetRows


class ReadRows(Struct, frozen=True, array_like=True, tag=True):
    """Requests a piece of rows, from a byte on. Answered by `RowsPiece`. For who shares no memory with their owner."""

    name: RowsName
    start: Count


class RowsPiece(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `ReadRows`: bytes from there on, as many as one message takes; none where there are none (any more)."""

    piece: bytes
    released: bool = False
    """A scheduler's: no request of the engine needs them."""


class EncoderReport(Struct, frozen=True, array_like=True, kw_only=True):
    """What an encoder says of itself."""

    model: ModelName
    """Whose images it encodes."""
    hits: int = 0
    """Images whose rows were in its cache, or were being made for another request, since the start."""
    encoded: int = 0
    """Images that went through the tower since the start."""
