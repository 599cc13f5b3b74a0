"""Frames of Gemma 4 are what the library's processor of videos makes of them, bit for bit, within their own rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Gemma4Config, Gemma4ImageProcessorPil, Gemma4UnifiedConfig

from services.encoder.image_decoder import DecodedFrames
from services.encoder.processors.frame_patches import SoftFrames
from services.encoder.tower import ImageTower, TowerUnusable
from shared.messages.encoder import FrameGroup
from shared.models.image_models import read_image_model
from tests.support.models.tiny_gemma4 import MOST, PATCH, POOLED, GemmaVideos, make_gemma4_model
from tests.support.models.tiny_videos import noise

IMAGES = Gemma4ImageProcessorPil(patch_size=PATCH, pooling_kernel_size=POOLED, max_soft_tokens=280)


def soft_frames(folder: Path, max_rows: int = 1000, **said: int) -> SoftFrames:
    (folder / "video_preprocessor_config.json").write_text(json.dumps(said))
    made = SoftFrames.of_model(folder, Gemma4Config(), IMAGES, max_rows)
    assert made is not None
    return made


@pytest.mark.parametrize("size", [(160, 40), (40, 160), (64, 64), (500, 300), (90, 7)])
def test_pixels_are_the_librarys(size: tuple[int, int], tmp_path: Path) -> None:
    frames = noise(2, size)
    theirs = GemmaVideos([(torch.from_numpy(frames), (0.0, 1.0))])(None)
    own = soft_frames(tmp_path)
    for number, frame in enumerate(frames):
        made = own.prepared(DecodedFrames(FrameGroup(*size, 2, 1), frame.tobytes()))
        assert torch.equal(made["pixel_values"][0], theirs["pixel_values_videos"][number])
        assert torch.equal(made["image_position_ids"][0], theirs["video_position_ids"][number])
        assert made["pixel_values"].shape[1] == MOST * POOLED**2
    assert IMAGES.max_soft_tokens == 280, "images have rows of their own"


def test_a_file_may_say_more_rows_than_a_prompt_has_room_for(tmp_path: Path) -> None:
    frame = DecodedFrames(FrameGroup(40, 40, 8, 1), noise(1, (40, 40)).tobytes())
    assert (
        soft_frames(tmp_path, 8 * 140, max_soft_tokens=140).prepared(frame)["pixel_values"].shape[1] == 140 * POOLED**2
    )
    with pytest.raises(ValueError, match="8 frames are not allowed; a prompt has room for 1119 rows"):
        soft_frames(tmp_path, 8 * 140 - 1, max_soft_tokens=140).prepared(frame)


def test_images_of_the_kind_without_a_tower_have_no_more_rows_than_its_window(tmp_path: Path) -> None:
    """Which the library's mask would let see each other."""
    make_gemma4_model(tmp_path, "unified")
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["sliding_window"] = MOST - 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TowerUnusable, match=rf"max_soft_tokens {MOST} is not allowed; a window .* has {MOST - 1}"):
        ImageTower(tmp_path)


def test_tokens_of_images_of_the_kind_without_a_tower_see_each_other_where_no_file_says(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, mutual in ((None, True), ({"use_bidirectional_attention": None}, False)):
        said = {} if text is None else {"text_config": text}
        path.write_text(json.dumps({"architectures": ["Gemma4UnifiedForConditionalGeneration"], **said}))
        images = read_image_model(tmp_path)
        assert images is not None
        assert (images.token_id, images.mutual) == (Gemma4UnifiedConfig().image_token_id, mutual)
