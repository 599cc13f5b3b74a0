"""Files of videos become frames: those that the library's processors look at, whatever the format."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from av.stream import Disposition
from msgspec.structs import replace
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from services.gateway.videos.frame_sampling import frame_numbers
from services.gateway.videos.video_process import (
    MAX_FRAME_PIXELS,
    DecodedGroup,
    VideoRefusal,
    VideoShape,
    decode_video,
)
from services.gateway.videos.video_rows import frame_offsets, group_times
from shared.messages.model_card import VideoModel
from tests.support.models.tiny_videos import Frames, noise, video
from tests.support.models.torchvision_stub import import_without_torchvision

WRITES_AV1 = "libsvtav1" in av.codecs_available
QWEN2, QWEN3 = VideoModel(), VideoModel(sampling="ends", timed=True)
GLM4V = VideoModel(sampling="seconds", timed=True, stamp="first")
GLM46V = VideoModel(sampling="paces", timed=True, stamp="first")
ONEVISION = VideoModel(max_frames=32, sampling="shares", together=1, closed=True)


def decoded(file: bytes, how: VideoModel = QWEN2) -> tuple[VideoShape, Frames]:
    """[frames, height, width, 3] those that are looked at, the last of an odd number twice."""
    shape, *pairs = decode_video(file, how)
    assert isinstance(shape, VideoShape), shape
    assert all(isinstance(each, DecodedGroup) for each in pairs)
    packed = b"".join(each.pixels for each in pairs if isinstance(each, DecodedGroup))
    return shape, np.frombuffer(packed, np.uint8).reshape(-1, shape.height, shape.width, 3)


def shades(count: int, size: tuple[int, int] = (64, 48)) -> Frames:
    """Each frame of one grey, a little lighter than the one before."""
    greys = (20 + 200 * np.arange(count) // max(1, count - 1)).astype(np.uint8)
    return np.broadcast_to(greys[:, None, None, None], (count, size[1], size[0], 3)).copy()


def test_those_frames_are_looked_at_that_the_library_samples() -> None:
    """Of any length up to an hour, at any rate."""
    rates, totals = (1.0, 10.0, 23.976, 25.0, 29.97, 59.94), [*range(2, 120), 1000, 2399, 86_000]
    for rate in rates:
        for total in totals:
            bounds = SimpleNamespace(num_frames=None, fps=2, min_frames=4, max_frames=64)
            sample: Any = Qwen3VLVideoProcessor.sample_frames
            theirs = sample(bounds, VideoMetadata(total_num_frames=total, fps=rate), fps=2).tolist()
            assert frame_numbers(total, rate, QWEN3) == theirs
            count = int(min(max(total / rate * 2, 4), min(64, total) // 2 * 2)) // 2 * 2
            arange = torch.arange(0, total, total / count).int().tolist()  # the text of Qwen2VLVideoProcessor's
            own = frame_numbers(total, rate, QWEN2)
            assert len(own) == len(arange)
            assert max(abs(a - b) for a, b in zip(own, arange, strict=True)) <= (arange[-1] == total), (
                "or its float32's"
            )
    assert frame_numbers(1, 25.0, QWEN2) == frame_numbers(1, 25.0, QWEN3) == [0]


def test_those_frames_are_looked_at_that_glms_processors_sample() -> None:
    """Of the one whose longest video has as many as may be; of the other as many of each second as its length allows,
    up to as many."""
    glm46v = import_without_torchvision("transformers.models.glm46v.video_processing_glm46v").Glm46VVideoProcessor
    for rate in (1.0, 2.0, 10.0, 23.976, 25.0, 29.97, 59.94):
        for total in (*range(1, 120), 641, 1000, 2399, 86_000):
            seen = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
            bounds: Any = SimpleNamespace(fps=2, max_duration=32, temporal_patch_size=2)
            theirs = Glm4vVideoProcessor.sample_frames(bounds, seen, fps=2).tolist()
            assert frame_numbers(total, rate, GLM4V) == theirs
            whole = glm46v.sample_frames(bounds, seen).tolist()
            assert frame_numbers(total, rate, replace(GLM46V, max_frames=640)) == (whole or [0, 0])
            few = frame_numbers(total, rate, GLM46V)
            assert few == (whole or [0, 0]) if len(whole) < 64 else (len(few) <= 64 and few[0] == 0)


def test_those_frames_are_looked_at_that_internvls_processor_samples() -> None:
    processor = import_without_torchvision("transformers.models.internvl.video_processing_internvl")
    sample: Any = processor.InternVLVideoProcessor.sample_frames
    for total in (*range(1, 70), 1000, 86_000):
        for most in (1, 8, 13, 32):
            seen, count = VideoMetadata(total_num_frames=total), min(total, most)
            how = VideoModel(max_frames=most, sampling="middles", together=1)
            assert frame_numbers(total, 25.0, how) == sample(None, seen, num_frames=count, initial_shift=True).tolist()


def test_those_frames_are_looked_at_that_glm_5_nexts_processor_samples() -> None:
    sample: Any = import_without_torchvision(
        "transformers.models.glm5_next.video_processing_glm5_next"
    ).Glm5NextVideoProcessor.sample_frames
    for rate in (1.0, 10.0, 23.976, 59.94):
        for total in (*range(1, 70), 119, 641, 5000):
            seen = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
            for fps, most in ((2.0, 64), (3.0, 20)):
                bounds: Any = SimpleNamespace(fps=fps, max_duration=0, max_frames=most)
                how = VideoModel(fps=fps, max_frames=most, sampling="pace", timed=True, stamp="first")
                assert frame_numbers(total, rate, how) == (sample(bounds, seen).tolist() or [0, 0])


def test_those_frames_are_looked_at_that_smolvlms_processor_samples() -> None:
    sample: Any = import_without_torchvision(
        "transformers.models.smolvlm.video_processing_smolvlm"
    ).SmolVLMVideoProcessor.sample_frames
    for rate in (1.0, 10.0, 23.976, 59.94):
        for total in (*range(1, 70), 119, 641, 5000):
            seen = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
            for fps, most in ((1.0, 64), (2.0, 7)):
                how = VideoModel(fps=fps, max_frames=most, sampling="inner", together=1, timed=True, stamp="first")
                assert frame_numbers(total, rate, how) == sample(None, seen, num_frames=most, fps=fps).tolist()


def test_as_many_frames_are_looked_at_as_llava_onevision_was_trained_with() -> None:
    for total in (*range(1, 70), 1000, 86_000):
        theirs = default_sample_indices_fn(VideoMetadata(total_num_frames=total), num_frames=min(total, 32))
        assert frame_numbers(total, 25.0, ONEVISION) == theirs.tolist()


@pytest.mark.parametrize(
    ("form", "codec"),
    [
        ("mp4", "libx264"),
        ("mov", "mpeg4"),
        ("webm", "libvpx"),
        ("webm", "libvpx-vp9"),
        ("matroska", "libx265"),
        pytest.param("mp4", "libsvtav1", marks=pytest.mark.skipif(not WRITES_AV1, reason="PyAV writes no AV1 here")),
    ],
)
def test_frames_are_those_that_are_shown_at_their_times(form: str, codec: str) -> None:
    """Some between two that stand alone, some before; of an odd number the last one twice."""
    frames = shades(21)
    for how in (QWEN2, QWEN3, GLM4V, GLM46V, ONEVISION):
        shape, found = decoded(video(frames, 10, form, codec), how)
        numbers = frame_numbers(21, 10.0, how)
        assert shape.times == pytest.approx([number / 10 for number in numbers])
        assert shape.seconds_of_two == pytest.approx(2 * 2.1 / len(numbers))
        wanted = [*numbers, *numbers[-1:] * (len(numbers) % how.together)]
        assert np.abs(found.mean(axis=(1, 2, 3)) - frames[wanted].mean(axis=(1, 2, 3))).max() < 5, "frames are 10 apart"


@pytest.mark.parametrize(
    ("matrix", "turns"),
    [
        ((0, 0x10000, 0, -0x10000, 0, 0, 0, 0, 0x40000000), -1),
        ((-0x10000, 0, 0, 0, -0x10000, 0, 0, 0, 0x40000000), 2),
        ((0, -0x10000, 0, 0x10000, 0, 0, 0, 0, 0x40000000), 1),
        ((0xB504, 0xB504, 0, -0xB504, 0xB504, 0, 0, 0, 0x40000000), 0),
    ],
)
def test_frames_are_turned_as_the_file_asks_to_be_shown(matrix: tuple[int, ...], turns: int) -> None:
    """As phones write what was held upright: a quarter with the clock is the first."""
    frames = noise(4, (64, 32))
    plain, turned = (decoded(video(frames, matrix=each))[1] for each in (None, matrix))
    assert (turned == np.rot90(plain, turns, axes=(1, 2))).all()


def test_large_frames_are_scaled_down_and_larger_ones_refused() -> None:
    shape, found = decoded(video(shades(2, (1920, 1080)), codec="mpeg4"))
    assert (shape.width, shape.height) == (1365, 768)
    assert shape.width * shape.height <= MAX_FRAME_PIXELS
    assert np.abs(found[0].mean() - 20) < 3
    (reply,) = decode_video(video(shades(2, (16, 2048)), codec="mpeg4"), QWEN2)
    assert reply == VideoRefusal("16 times 2048 pixels are not allowed; one side may be 64 times the other")


def test_a_codec_that_is_not_named_is_refused() -> None:
    for form, codec in (("mp4", "mpeg2video"), ("matroska", "ffv1")):
        (reply,) = decode_video(video(noise(2, (64, 64)), 25, form, codec), QWEN2)
        assert isinstance(reply, VideoRefusal)
        assert reply.message.startswith("its codec is not allowed; h264,")


def test_a_file_without_a_video_is_refused() -> None:
    """A sound alone, with a picture of the whole; and a video of no frames."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as to:
        sound: Any = to.add_stream("aac", rate=16_000)
        cover: Any = to.add_stream("png")
        cover.width, cover.height, cover.pix_fmt, cover.disposition = 64, 64, "rgb24", Disposition.attached_pic
        to.mux(cover.encode(av.VideoFrame.from_ndarray(noise(1, (64, 64))[0])))
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        samples.rate = 16_000
        to.mux([*sound.encode(samples), *sound.encode()])
    without_sizes = video(noise(2, (64, 64)), codec="mpeg4").replace(b"stsz", b"free")
    (empty,) = decode_video(without_sizes, QWEN2)
    assert list(decode_video(file.getvalue(), QWEN2)) == [VideoRefusal("there is no video in the file")]
    assert empty == VideoRefusal("there is no frame in the video")


def test_no_file_opens_another_one() -> None:
    for file in (
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
    ):
        (reply,) = decode_video(file, QWEN2)
        assert isinstance(reply, VideoRefusal)


def test_times_and_places_of_two_frames_are_the_librarys() -> None:
    seconds = VideoModel(positions_per_second=2.0)
    assert frame_offsets(4, 0.75, seconds) == [None, 1, 3, 4]
    step = torch.tensor(32 / 30) * 2
    library = (torch.arange(40) * step).long().tolist()
    assert [each or 0 for each in frame_offsets(40, 32 / 30, seconds)] == library
    assert frame_offsets(3, 9.0, QWEN2) == [None, 1, 2]
    assert frame_offsets(3, 9.0, QWEN3) == [None, None, None]
    assert group_times((0.0, 0.5, 2.0), QWEN3) == (0.25, 2.0)
    assert group_times((0.0, 0.5, 2.0, 2.0), GLM4V) == (0.0, 2.0)
    assert group_times((0.0, 0.5, 2.0), ONEVISION) == (0.0, 0.5, 2.0)
