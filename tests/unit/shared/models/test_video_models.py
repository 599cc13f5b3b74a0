"""How many frames of a video a model's files ask for: never none, and never more than a message may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GlmOcrConfig, Lfm3VlConfig

from shared.messages.encoder import MAX_FRAMES
from shared.models.video_models import read_video_model, read_video_tokens

MODELS = (
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm46VForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration",
)


def written(folder: Path, architecture: str, processor: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "video_token_id": 5}))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("count", [-4, 0, 1, 10**9])
def test_some_frames_are_looked_at_whatever_the_files_say(tmp_path: Path, architecture: str, count: int) -> None:
    said = {"min_frames": count, "max_frames": count, "num_frames": count, "max_duration": count * 1e298, "fps": 1e9}
    video = read_video_model(written(tmp_path, architecture, said))
    assert video is not None
    assert 1 <= video.max_frames <= MAX_FRAMES
    assert video.sampling not in ("ends", "steps") or 1 <= video.min_frames <= MAX_FRAMES


@pytest.mark.parametrize(
    ("architecture", "said", "most"),
    [
        (MODELS[0], {"max_frames": 24}, 24),
        (MODELS[1], {"max_frames": 24}, 24),
        (MODELS[2], {"max_duration": 10, "fps": 3}, 30),
        (MODELS[2], {}, MAX_FRAMES),
        (MODELS[3], {"max_frames": 24}, MAX_FRAMES),
        (MODELS[4], {"num_frames": 8}, 8),
        (MODELS[4], {}, 32),
        (MODELS[5], {"num_frames": 8}, 8),
        (MODELS[5], {}, 32),
        (MODELS[6], {"num_frames": 16}, 16),
        (MODELS[6], {}, 8),
        (MODELS[7], {}, 8),
    ],
)
def test_as_many_are_looked_at_as_they_say(
    tmp_path: Path, architecture: str, said: dict[str, object], most: int
) -> None:
    video = read_video_model(written(tmp_path, architecture, said))
    assert video is not None
    assert video.max_frames == most


def test_marks_of_frames_are_the_librarys_where_no_file_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GlmOcrForConditionalGeneration"]}')
    tokens, own = read_video_tokens(tmp_path), GlmOcrConfig()
    assert tokens is not None
    marks = (own.video_token_id, own.image_token_id, own.image_start_token_id, own.image_end_token_id)
    assert (tokens.video, tokens.row, tokens.start, tokens.end) == marks


@pytest.mark.parametrize(
    ("architecture", "said", "fps", "most"),
    [
        ("SmolVLM", {}, 1.0, MAX_FRAMES),
        ("SmolVLM", {"fps": 3, "num_frames": 9}, 3.0, 9),
        ("SmolVLM", {"fps": 3, "video_sampling": {"fps": 2, "max_frames": 7}}, 2.0, 7),
        ("Glm5Next", {}, 2.0, MAX_FRAMES),
        ("Glm5Next", {"fps": 3, "max_duration": 4}, 3.0, 12),
        ("Glm5Next", {"fps": 3, "max_duration": 0, "max_frames": 9}, 3.0, 9),
    ],
)
def test_so_many_of_a_second_are_looked_at_as_they_say(
    tmp_path: Path, architecture: str, said: dict[str, Any], fps: float, most: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [f"{architecture}ForConditionalGeneration"]}))
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(said))
    videos = read_video_model(tmp_path)
    assert videos is not None
    assert (videos.fps, videos.max_frames) == (fps, most)


def test_marks_that_frames_of_lfm3_have_are_none_of_a_whole_video(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Lfm3VlForConditionalGeneration"]}')
    tokens = read_video_tokens(tmp_path)
    assert tokens is not None
    assert (tokens.video, tokens.start, tokens.end) == (Lfm3VlConfig().video_token_id, None, None)
