"""Towers see images and frames as the processor that was saved, wherever a release of the library saves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from services.encoder.image_decoder import DecodedFrames
from services.encoder.image_process import DecodedImage, DecodingRequest, decode_image
from services.encoder.processors.tile_processor import TileProcessor
from services.encoder.tower import ImageTower, TowerUnusable
from shared.messages.encoder import FrameGroup
from tests.support.models.image_kinds import IMAGE_KINDS
from tests.support.models.tiny_images import ImageModel, make_image_model, picture
from tests.support.models.tiny_llama4 import MOST, SIDE, LibraryTiles
from tests.support.models.tiny_onevision import make_onevision_model
from tests.support.models.tiny_qwen_vl import make_qwen_model

OWN = ("command", "kimi", "lfm2")
"""Whose images Baton prepares itself."""
MAKERS: dict[str, Any] = {**{kind: IMAGE_KINDS[kind] for kind in OWN}, "llava": make_image_model}
MEAN, DEVIATION = [0.1, 0.3, 0.6], [0.4, 0.9, 0.2]
WHOLE, ONE, VIDEO = "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"


def rows(tower: ImageTower, image: bytes) -> torch.Tensor:
    decoded = decode_image(DecodingRequest(image))
    assert isinstance(decoded, DecodedImage)
    made = tower.encode(decoded)
    return torch.frombuffer(bytearray(made.rows), dtype=torch.float32).view(-1, made.size)


def save(model: ImageModel, layout: str) -> None:
    """As the library did it up to its release 4, or does it since 5; whatever else is there may not count."""
    for name in (WHOLE, ONE):
        (model.path / name).unlink(missing_ok=True)
    if layout == "old":
        model.processor.image_processor.save_pretrained(model.path)
        (model.path / WHOLE).write_text(json.dumps({"processor_class": "LlavaProcessor"}))
    else:
        model.processor.save_pretrained(model.path)
        assert "image_processor" in json.loads((model.path / WHOLE).read_text())
        (model.path / ONE).write_text(json.dumps({"image_mean": [0, 0, 0], "patch_size": 999, "max_patches": 1}))


@pytest.mark.parametrize("kind", MAKERS)
def test_images_are_prepared_as_the_processor_was_saved(kind: str, tmp_path: Path) -> None:
    model, image = MAKERS[kind](tmp_path), picture(0, (150, 40))
    before = model.rows(image)
    own = model.processor.image_processor
    own.image_mean, own.image_std, own.resample, own.rescale_factor = MEAN, DEVIATION, 0, 1 / 200
    expected = model.rows(image)
    assert not torch.allclose(before, expected, atol=1e-2), "the processor's defaults would do"
    for layout in ("old", "new"):
        save(model, layout)
        torch.testing.assert_close(rows(ImageTower(model.path), image), expected, msg=f"{kind}, {layout}")


def test_tiles_of_llama4_are_read_within_the_whole(tmp_path: Path) -> None:
    said = {"size": {"height": SIDE, "width": SIDE}, "max_patches": MOST}
    (tmp_path / WHOLE).write_text(json.dumps({"image_processor": said}))
    (tmp_path / ONE).write_text("{}")
    image = Image.effect_noise((90, 40), 90).convert("RGB")
    assert torch.equal(TileProcessor(tmp_path)(image)["pixel_values"].float(), LibraryTiles()(image)["pixel_values"])


@pytest.mark.parametrize("step", ["do_resize", "do_rescale", "do_normalize"])
def test_a_step_that_is_left_out_is_an_error(step: str, tmp_path: Path) -> None:
    (tmp_path / ONE).write_text(json.dumps({step: False}))
    with pytest.raises(ValueError, match=f"the processor of images: {step} false is not allowed; only true is"):
        TileProcessor(tmp_path)


def test_without_a_processor_the_error_names_the_files(tmp_path: Path) -> None:
    model = IMAGE_KINDS["kimi"](tmp_path)
    (tmp_path / ONE).unlink()
    with pytest.raises(TowerUnusable, match=r"neither processor_config.json nor preprocessor_config.json"):
        ImageTower(model.path)


@pytest.mark.parametrize("make", [make_qwen_model, make_onevision_model])
def test_frames_have_the_numbers_of_their_own_processor(make: Any, tmp_path: Path) -> None:
    """Which may be others than those of images."""
    model = make(tmp_path)
    together = 1 if make is make_onevision_model else 2
    pixels = np.random.default_rng(0).integers(0, 256, (together, 56, 84, 3), dtype=np.uint8)
    frames = DecodedFrames(FrameGroup(84, 56, 2, together), pixels.tobytes())
    before = ImageTower(model.path).encode(frames).rows
    videos = json.loads((model.path / VIDEO).read_text()) | {"image_mean": MEAN, "image_std": DEVIATION, "resample": 0}
    (model.path / WHOLE).write_text(json.dumps({"video_processor": videos}))
    made = ImageTower(model.path).encode(frames).rows
    assert made != before
    (model.path / WHOLE).unlink()
    images = model.processor.image_processor
    images.image_mean, images.image_std, images.resample = MEAN, DEVIATION, 0
    images.save_pretrained(model.path)
    assert ImageTower(model.path).encode(frames).rows == made
