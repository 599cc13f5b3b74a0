"""Images become crops as the library's processor of Phi-4 Multimodal cuts them, with as many tokens as there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import Phi4MultimodalConfig

from services.encoder.processors.crop_processor import CropProcessor
from shared.models.audio_models import read_sound_model
from shared.models.image_models import PHI4_MULTIMODAL, read_image_model
from tests.support.models.tiny_phi4 import PATCH, SIDE, phi_images


@pytest.mark.parametrize("most", [1, 7, 36])
def test_crops_are_the_librarys(most: int, tmp_path: Path) -> None:
    """Of an image that fills them, of flat and tall ones, and of such as are scaled down to as many as may be."""
    settings = {"size": {"height": SIDE, "width": SIDE}, "patch_size": PATCH, "dynamic_hd": most}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    own, theirs = CropProcessor(tmp_path), phi_images(dynamic_hd=most)
    for size in ((64, 64), (20, 30), (128, 64), (150, 40), (61, 333), (200, 200), (640, 500), (1500, 290)):
        image = Image.effect_noise(size, 90).convert("RGB")
        made, expected = own(image), dict(theirs(image, return_tensors="pt"))
        assert made.keys() == expected.keys()
        assert all(torch.equal(made[name], torch.as_tensor(expected[name])) for name in made), size


def test_what_cannot_be_cut_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "preprocessor_config.json"
    for written, named in (
        ({"size": {"height": 28, "width": 56}}, "size 28 by 56.*; at least one square tile is needed"),
        ({"dynamic_hd": 0}, "max_patches 0"),
        ({"patch_size": 13}, "patch_size 13 does not divide 448"),
        ({"resample": 1}, "resample 1 is not allowed; 0, 2, 3 are"),
        ({"do_normalize": False}, "do_normalize false is not allowed"),
    ):
        path.write_text(json.dumps(written))
        with pytest.raises(ValueError, match=named):
            CropProcessor(tmp_path)
    path.write_text(json.dumps({"size": {"height": SIDE, "width": SIDE}, "patch_size": PATCH}))
    with pytest.raises(ValueError, match="it has 64 by 3 pixels; each side has to have 10"):
        CropProcessor(tmp_path)(Image.new("RGB", (60, 3)))
    with pytest.raises(ValueError, match="extreme"):
        phi_images()(Image.new("RGB", (60, 3)))


def test_who_names_no_token_has_the_librarys(tmp_path: Path) -> None:
    path, own = tmp_path / "config.json", Phi4MultimodalConfig()
    path.write_text(json.dumps({"architectures": [PHI4_MULTIMODAL]}))
    images, sounds = read_image_model(tmp_path), read_sound_model(tmp_path)
    assert images is not None
    assert (images.token_id, images.sound) == (own.vision_config.image_token_id, own.audio_config.audio_token_id)
    assert sounds is not None
    assert sounds.row_size == own.hidden_size
    path.write_text(json.dumps({"architectures": [PHI4_MULTIMODAL], "vision_config": {"image_token_id": "x"}}))
    assert read_image_model(tmp_path) is None
