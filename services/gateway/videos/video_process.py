"""Decodes a video: `python -m services.gateway.videos.video_process HOW`, a `VideoModel` in JSON.

It is a process that may die of it: it reads a file that a stranger made from standard input to its end, and writes to
standard output what the video is, and then the pixels of the frames that are looked at, as many together as become
rows. It has no network of its own making and no secrets; memory and processor time are limited by the kernel. FFmpeg
opens nothing but that file: formats and codecs are named. Frames between those that are looked at are decoded only as
far as these depend on them.
"""

from __future__ import annotations

import io
import math
import sys
from bisect import bisect_right
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from services.gateway.decoding.ffmpeg_errors import error_text
from services.gateway.videos.frame_sampling import frame_numbers
from shared.machine.helper_pipes import confine, write_message
from shared.messages.model_card import VideoModel

FORMATS = "mov,mp4,m4a,matroska,webm"
CODECS = "h264,hevc,mpeg4,vp8,vp9,av1,libdav1d"
SHOWN_FORMATS = "MP4 and WebM"
MAX_MEMORY = 3 * 2**29
"""Bytes of address space."""
MAX_CPU_S = 120
"""Seconds of processor time."""
MAX_PIXELS = 2**24
"""Of a frame, whatever the file says."""
MAX_FRAME_PIXELS = 2**20
"""Of a frame as it is handed on, so that two of them fit the bus; larger ones are scaled down."""
_TURNS = {
    90: (("transpose", "cclock"),),
    180: (("hflip",), ("vflip",)),
    270: (("transpose", "clock"),),
}
"""What FFmpeg turns frames by."""
_COVER = 0x400
"""A stream that is a picture of the whole (AV_DISPOSITION_ATTACHED_PIC)."""
MAX_ASPECT = 64
"""The longer side by the shorter one."""
MAX_FILE_FRAMES = 2**20
"""Of a video, looked at or not."""


class VideoShape(Struct, frozen=True, array_like=True, tag=True):
    """How many frames will come, and of which size."""

    width: int
    height: int
    times: tuple[float, ...]
    """Seconds from the beginning to each frame that is looked at."""
    seconds_of_two: float
    """Between every second one of these."""
    seconds: float
    """That the video lasts."""


class DecodedGroup(Struct, frozen=True, array_like=True, tag=True):
    """Pixels of frames that become rows together, behind each other, in three bytes each, row by row; where there are
    too few, the last ones are the same."""

    pixels: bytes


class VideoRefusal(Struct, frozen=True, array_like=True, tag=True):
    """Why there are none, or no further ones."""

    message: str


VideoReply = VideoShape | DecodedGroup | VideoRefusal


class _VideoRefused(Exception):
    """The text is for the client."""


class _FrameIndex(NamedTuple):
    """When the frames of a file are shown, ascending, in the stream's unit; and which of them others do not precede."""

    times: list[int]
    keys: list[int]
    rate: float


def decode_video(file: bytes, how: VideoModel) -> Iterator[VideoReply]:
    """The shape of a file's video and its frames, or why there are none."""
    import av

    try:
        yield from _groups(av, file, how)
    except MemoryError:
        yield VideoRefusal("decoding the file takes too much memory")
    except _VideoRefused as refused:
        yield VideoRefusal(str(refused))
    except Exception as error:  # whatever a decoder raises over what strangers made
        yield VideoRefusal(f"the file is no video, or broken ({error_text(error)}); {SHOWN_FORMATS} are allowed")


def _groups(av: Any, file: bytes, how: VideoModel) -> Iterator[VideoReply]:
    options = {"format_whitelist": FORMATS, "codec_whitelist": CODECS}
    with av.open(io.BytesIO(file), "r", options=options, metadata_errors="ignore") as container:
        stream = next((each for each in container.streams.video if not _is_cover(each)), None)
        if stream is None:
            raise _VideoRefused("there is no video in the file")
        if stream.codec_context is None or stream.codec_context.codec.name not in CODECS.split(","):
            raise _VideoRefused(f"its codec is not allowed; {CODECS} are")  # FFmpeg heeds the list as it looks alone
        stream.codec_context.thread_count = 1
        index = _index(container, stream)
        numbers = frame_numbers(len(index.times), index.rate, how)
        times, seconds = tuple(number / index.rate for number in numbers), len(index.times) / index.rate
        frames = _frames(container, stream, index, [index.times[number] for number in numbers])
        size, held, pixels = None, list[bytes](), b""
        for frame in frames:
            if size is None:
                size = _size(*_turned_size(frame))
                yield VideoShape(*size, times, 2 * seconds / len(numbers), seconds)
            pixels = _pixels(av, frame, size)
            held.append(pixels)
            if len(held) == how.together:
                yield DecodedGroup(b"".join(held))
                held.clear()
        if held:
            yield DecodedGroup(b"".join(held) + pixels * (how.together - len(held)))


def _is_cover(stream: Any) -> bool:
    return bool(int(stream.disposition) & _COVER)


def _index(container: Any, stream: Any) -> _FrameIndex:
    """Reads the file once, and decodes nothing."""
    times: list[int] = []
    keys: list[int] = []
    for packet in container.demux(stream):
        if packet.pts is None or packet.is_discard:
            continue
        times.append(packet.pts)
        if packet.is_keyframe:
            keys.append(packet.pts)
        if len(times) > MAX_FILE_FRAMES:
            raise _VideoRefused(f"a video of more than {MAX_FILE_FRAMES} frames is not allowed")
    if not times:
        raise _VideoRefused("there is no frame in the video")
    times = sorted(set(times))
    rate = float(stream.average_rate or 0)
    if not 0 < rate < math.inf:
        span = float((times[-1] - times[0]) * stream.time_base)
        rate = (len(times) - 1) / span if span > 0 else 1.0
    return _FrameIndex(times, sorted(keys), rate)


def _frames(container: Any, stream: Any, index: _FrameIndex, wanted: list[int]) -> Iterator[Any]:
    """The frames that are shown at these times, decoded from the nearest one before that stands alone."""
    at, decoded = None, iter(())
    frame: Any = None
    for time in wanted:
        key = index.keys[bisect_right(index.keys, time) - 1] if index.keys and index.keys[0] <= time else index.times[0]
        if at is None or key > at:
            container.seek(key, stream=stream, backward=True)
            decoded, frame = container.decode(stream), None
        while frame is None or (frame.pts is not None and frame.pts < time):
            frame = next(decoded, None)
            if frame is None:
                raise _VideoRefused(f"its frame at {float((time - index.times[0]) * stream.time_base):.3g} s is broken")
        at = time
        yield frame


def _turned_size(frame: Any) -> tuple[int, int]:
    return (frame.height, frame.width) if _degrees(frame) % 180 else (frame.width, frame.height)


def _degrees(frame: Any) -> int:
    """Against the clock, in quarters; a file may ask for anything between, which nobody means."""
    degrees = int(frame.rotation) % 360
    return degrees if degrees in _TURNS else 0


def _size(width: int, height: int) -> tuple[int, int]:
    """What size frames are handed on in."""
    if width * height > MAX_PIXELS:
        raise _VideoRefused(f"{width} times {height} pixels are not allowed; {MAX_PIXELS} in all are")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise _VideoRefused(
            f"{width} times {height} pixels are not allowed; one side may be {MAX_ASPECT} times the other"
        )
    scale = min(1.0, math.sqrt(MAX_FRAME_PIXELS / (width * height)))
    return max(1, int(width * scale)), max(1, int(height * scale))


def _pixels(av: Any, frame: Any, size: tuple[int, int]) -> bytes:
    """In RGB, turned as the file asks it to be shown."""
    if frame.width * frame.height > MAX_PIXELS:
        raise _VideoRefused(f"{frame.width} times {frame.height} pixels are not allowed; {MAX_PIXELS} in all are")
    width, height = size
    degrees = _degrees(frame)
    scaled = frame.reformat(*(size[::-1] if degrees % 180 else size), "rgb24", interpolation="AREA")
    plane = (_turned(av, scaled, degrees) if degrees else scaled).planes[0]
    packed, line = bytes(plane), plane.line_size
    return b"".join(packed[start : start + 3 * width] for start in range(0, height * line, line))


def _turned(av: Any, frame: Any, degrees: int) -> Any:
    graph = av.filter.Graph()
    graph.link_nodes(
        graph.add_buffer(width=frame.width, height=frame.height, format=frame.format.name, time_base=Fraction(1)),
        *(graph.add(*each) for each in _TURNS[degrees]),
        graph.add("buffersink"),
    ).configure()
    graph.push(frame)
    return graph.pull()


def main() -> None:
    """Decodes one file."""
    confine(MAX_MEMORY, MAX_CPU_S)
    how = msgspec.json.decode(sys.argv[1], type=VideoModel)
    given, taken = sys.stdin.buffer, sys.stdout.buffer
    for reply in decode_video(given.read(), how):
        write_message(taken, msgspec.msgpack.encode(reply))


if __name__ == "__main__":
    main()
