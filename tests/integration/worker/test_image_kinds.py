"""Images of further kinds on one rank: what `transformers` generates of the same files, in every kind of batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from services.encoder.image_process import DecodedImage, DecodingRequest, decode_image
from services.encoder.tower import ImageTower
from shared.models.image_models import read_image_model
from tests.integration.worker.test_images import check_images_before_states, check_logits, check_written_images
from tests.integration.worker.test_nested_models import as_published
from tests.support.models.image_kinds import IMAGE_KINDS
from tests.support.models.tiny_images import picture
from tests.support.models.tiny_kimi_vision import MOST, MOST_OF_A_SIDE, PATCH
from tests.support.models.tiny_minicpm_v import make_minicpm_model
from tests.support.models.tiny_models import TinyModel
from tests.support.worker.image_chats import ImageChat

BEFORE_STATES = ("lfm2", "lfm3", "minicpm")
"""Whose language model has states."""


@pytest.mark.features("prompt embeds", "images", "chunked prefill", "preemption", "prefix cache", "speculative")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.extras if "-ocr" in kind else ()) for kind in IMAGE_KINDS],
)
def test_greedy_text_and_logits_are_the_librarys(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several images in a prompt, cut within one, beside texts, preempted, with drafts, behind a shared prefix."""
    model = IMAGE_KINDS[kind](tmp_path)
    if kind in BEFORE_STATES:
        check_images_before_states(model, "native")
    else:
        check_written_images(model, "native", 32 if kind in ("glm-ocr", "paddle-ocr", "video-llama3") else 48)
    check_logits(model, ImageChat("What is ", picture(0, (150, 40)), " here?"), monkeypatch)


def test_images_of_minicpm_may_have_no_numbers(tmp_path: Path) -> None:
    """As its file says, which counts for tokenizers."""
    for said, numbered in ((True, "<image_id>{number}</image_id>{rows}"), (False, None)):
        make_minicpm_model(tmp_path, use_image_id=said)
        images = read_image_model(tmp_path)
        assert images is not None
        assert images.numbered == numbered


def test_the_tower_of_kimi_as_it_is_published(tmp_path: Path) -> None:
    """Its own words for the same settings, and codes of four bits beside it."""
    model = IMAGE_KINDS["kimi"](tmp_path)
    as_published(TinyModel("Kimi_K25", model.path, model.reference))
    path = model.path / "config.json"
    config = json.loads(path.read_text())
    config["media_placeholder_token_id"] = config["image_token_id"]
    path.write_text(json.dumps(config))
    settings = {"in_patch_limit": MOST, "patch_size": PATCH, "patch_limit_on_one_side": MOST_OF_A_SIDE}
    whole = {"auto_map": {"AutoImageProcessor": "kimi_k25_vision_processing.It"}, "media_proc_cfg": settings}
    (model.path / "preprocessor_config.json").write_text(json.dumps(whole))
    image = picture(3, (90, 70))
    decoded = decode_image(DecodingRequest(image))
    assert isinstance(decoded, DecodedImage)
    made = ImageTower(model.path).encode(decoded)
    rows = torch.frombuffer(bytearray(made.rows), dtype=torch.float32).view(-1, made.size)
    torch.testing.assert_close(rows, model.rows(image))
    assert ImageTower(model.path, max_pixels=4 * (2 * PATCH) ** 2).encode(decoded).count <= 4
