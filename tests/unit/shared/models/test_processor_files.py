"""Which of a checkpoint's files counts for a processor is what the library says, whatever files there are."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from transformers.feature_extraction_utils import FeatureExtractionMixin
from transformers.image_processing_base import ImageProcessingMixin
from transformers.video_processing_utils import BaseVideoProcessor

from shared.models.audio_models import read_audio_model, read_sound_model
from shared.models.processor_files import ProcessorPart, known_processor, read_processor
from shared.models.video_models import FrameSize, read_frame_size, read_video_model
from tests.support.models.torchvision_stub import import_without_torchvision

LIBRARY: dict[ProcessorPart, Any] = {
    "image_processor": ImageProcessingMixin.get_image_processor_dict,
    "video_processor": BaseVideoProcessor.get_video_processor_dict,
    "feature_extractor": FeatureExtractionMixin.get_feature_extractor_dict,
}
WHOLES: tuple[object, ...] = (
    None,
    {},
    {"image_processor": None},
    {"video_processor": {"mark": 1}},
    {"image_processor": {"mark": 2}},
    {"feature_extractor": {"mark": 3}, "audio_processor": {"mark": 4}},
    {"audio_processor": {"mark": 5}},
)
VIDEOS = {
    "fps": 3.0,
    "min_frames": 6,
    "max_frames": 18,
    "size": {"shortest_edge": 28**2, "longest_edge": 40 * 28**2},
}
UNSIZED = {name: value for name, value in VIDEOS.items() if name != "size"}


class Marked(Struct):
    mark: int


def write(folder: Path, name: str, content: object) -> None:
    if content is not None:
        (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize("part", LIBRARY)
def test_the_file_that_counts_is_the_librarys(tmp_path: Path, part: ProcessorPart) -> None:
    for number, (whole, video, one) in enumerate(product(WHOLES, (None, {"mark": 6}), (None, {"mark": 7}))):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder, "processor_config.json", whole)
        write(folder, "video_preprocessor_config.json", video)
        write(folder, "preprocessor_config.json", one)
        try:
            expected = LIBRARY[part](folder)[0]["mark"]
        except OSError:
            with pytest.raises(FileNotFoundError, match="has what prepares its input"):
                read_processor(folder, part, Marked)
        else:
            assert read_processor(folder, part, Marked).mark == expected


def test_a_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"^preprocessor_config.json: "):
        read_processor(tmp_path, "image_processor", Marked)
    write(tmp_path, "processor_config.json", {"image_processor": {"mark": "one"}})
    with pytest.raises(ValueError, match=r"^processor_config.json: image_processor: .*mark"):
        read_processor(tmp_path, "image_processor", Marked)
    assert known_processor(tmp_path, "image_processor", Marked) is None


@pytest.mark.parametrize(
    ("architecture", "module", "name"),
    [
        ("Qwen2_5_VLForConditionalGeneration", "qwen2_vl.video_processing_qwen2_vl", "Qwen2VLVideoProcessor"),
        ("Qwen3VLForConditionalGeneration", "qwen3_vl.video_processing_qwen3_vl", "Qwen3VLVideoProcessor"),
    ],
)
@pytest.mark.parametrize(
    "files",
    [
        {"processor_config.json": {"video_processor": VIDEOS}, "video_preprocessor_config.json": {"fps": 9.0}},
        {"video_preprocessor_config.json": VIDEOS, "preprocessor_config.json": {"fps": 9.0}},
        {"preprocessor_config.json": {**UNSIZED, "min_pixels": 3 * 28**2, "max_pixels": 50 * 28**2}},
        {"preprocessor_config.json": {**VIDEOS, "max_pixels": 50 * 28**2}},
        {"preprocessor_config.json": {**UNSIZED, "min_pixels": 28**2}},
    ],
)
def test_what_they_say_of_videos_is_read_as_by_the_library(
    tmp_path: Path, architecture: str, module: str, name: str, files: dict[str, object]
) -> None:
    for each, content in {**files, "config.json": {"architectures": [architecture], "video_token_id": 5}}.items():
        write(tmp_path, each, content)
    library = getattr(import_without_torchvision(f"transformers.models.{module}"), name).from_pretrained(tmp_path)
    video = read_video_model(tmp_path)
    assert video is not None
    assert (video.fps, video.min_frames, video.max_frames) == (library.fps, library.min_frames, library.max_frames)
    bounds = FrameSize(library.size["shortest_edge"], library.size["longest_edge"])
    assert read_frame_size(tmp_path, video.sampling) == bounds


@pytest.mark.parametrize("nested", [False, True])
def test_what_they_say_of_sounds_is_read(tmp_path: Path, nested: bool) -> None:
    said = {"sampling_rate": 8_000, "chunk_length": 7}
    write(tmp_path, "preprocessor_config.json", {"chunk_length": 9} if nested else said)
    write(tmp_path, "processor_config.json", {"feature_extractor": said} if nested else {})
    write(tmp_path, "config.json", {"architectures": ["WhisperForConditionalGeneration"]})
    audio = read_audio_model(tmp_path)
    assert audio is not None
    assert (audio.sample_rate, audio.window_s) == (8_000, 7)
    write(tmp_path, "config.json", {"architectures": ["Qwen2AudioForConditionalGeneration"]})
    sounds = read_sound_model(tmp_path)
    assert sounds is not None
    assert (sounds.sample_rate, sounds.window_s) == (8_000, 7)


@pytest.mark.parametrize("said", [{"sampling_rate": 0}, {"chunk_length": -1}])
def test_sounds_that_no_window_has_room_for_are_not_read(tmp_path: Path, said: dict[str, int]) -> None:
    """Which is for the encoder to say; nobody else ends by them."""
    write(tmp_path, "preprocessor_config.json", said)
    write(tmp_path, "config.json", {"architectures": ["Qwen2AudioForConditionalGeneration"]})
    sounds = read_sound_model(tmp_path)
    assert sounds is not None
    assert (sounds.sample_rate, sounds.window_s) == (16_000, 30)
