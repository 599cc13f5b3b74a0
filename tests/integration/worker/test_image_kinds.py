"""Images of further kinds on one rank: what `transformers` generates of the same files, in every kind of batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.worker.test_images import check_logits, check_written_images
from tests.support.models.image_kinds import IMAGE_KINDS
from tests.support.models.tiny_images import picture
from tests.support.worker.image_chats import ImageChat


@pytest.mark.features("prompt embeds", "images", "chunked prefill", "preemption", "prefix cache", "speculative")
@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_greedy_text_and_logits_are_the_librarys(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several images in a prompt, cut within one, beside texts, preempted, with drafts, behind a shared prefix."""
    model = IMAGE_KINDS[kind](tmp_path)
    check_written_images(model, "native")
    check_logits(model, ImageChat("What is ", picture(0, (150, 40)), " here?"), monkeypatch)
