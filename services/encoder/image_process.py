"""Decodes images: `python -m services.encoder.image_process`, a process that may die of what strangers send.

It has no network of its own making, no model and no secrets; its memory is limited by the kernel. It reads requests
from standard input and writes pixels to standard output until its input ends, so it never outlives the encoder.
"""

from __future__ import annotations

import io
import sys
import warnings

import msgspec
from msgspec import Struct
from PIL import Image, ImageOps, UnidentifiedImageError

from shared.machine.helper_pipes import confine, read_message, write_message

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""What is decoded. Of an image that moves, the first frame."""
MAX_PIXELS = 2**24
"""Of an image, whatever its file says: 50 MB of pixels."""
MAX_ASPECT = 64
"""The longer side by the shorter one; a processor that makes the shorter one as long as it wants has the longer one as
many times."""
MAX_MEMORY = 2**30
"""Bytes of address space."""


class DecodingRequest(Struct, frozen=True, array_like=True):
    """An image's file."""

    file: bytes
    max_side: int | None = None
    """Pixels of the longer side, to which a larger image is scaled down; None: none is."""


class DecodedImage(Struct, frozen=True, array_like=True, tag=True):
    """Pixels in three bytes each, red, green and blue, row by row."""

    width: int
    height: int
    pixels: bytes
    several: bool = False
    """See `EncodeInput`."""

    @property
    def measures(self) -> dict[str, int]:
        """For logs."""
        return {"width": self.width, "height": self.height}


class DecodingRefusal(Struct, frozen=True, array_like=True, tag=True):
    """Why there are none."""

    message: str


DecodingReply = DecodedImage | DecodingRefusal


def decode_image(request: DecodingRequest) -> DecodingReply:
    """What `load_image` of `transformers` makes of a file: turned as it asks to be shown, without transparency. In its
    own proportions, where it is scaled down."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of broken metadata, which is not looked at
            image = Image.open(io.BytesIO(request.file), formats=FORMATS)
            if (wrong := _wrong_size(*image.size)) is not None:
                return DecodingRefusal(wrong)
            image.load()
            turned = ImageOps.exif_transpose(image).convert("RGB")
            if request.max_side is not None:
                turned.thumbnail((request.max_side, request.max_side), Image.Resampling.LANCZOS)
    except UnidentifiedImageError:
        return DecodingRefusal(f"not an image; {', '.join(FORMATS)} are allowed")
    except Image.DecompressionBombError:
        return DecodingRefusal(f"more than {MAX_PIXELS} pixels are not allowed")
    except MemoryError:
        return DecodingRefusal("decoding the image takes too much memory")
    except Exception as error:  # whatever a decoder raises over what strangers made
        return DecodingRefusal(f"the image is broken: {str(error)[:200] or type(error).__name__}")
    return DecodedImage(turned.width, turned.height, turned.tobytes())


def _wrong_size(width: int, height: int) -> str | None:
    if width * height > MAX_PIXELS:
        return f"{width} times {height} pixels are not allowed; {MAX_PIXELS} in all are"
    if max(width, height) > MAX_ASPECT * min(width, height):
        return f"{width} times {height} pixels are not allowed; one side may be {MAX_ASPECT} times the other"
    return None


def main() -> None:
    """Answers each file with a `DecodingReply`."""
    confine(MAX_MEMORY)
    Image.init()  # decoders are imported before anything is read
    given, taken = sys.stdin.buffer, sys.stdout.buffer
    decoder = msgspec.msgpack.Decoder(DecodingRequest)
    while (request := read_message(given)) is not None:
        write_message(taken, msgspec.msgpack.encode(decode_image(decoder.decode(request))))


if __name__ == "__main__":
    main()
