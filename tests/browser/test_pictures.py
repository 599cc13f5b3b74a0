"""The playground's pictures and videos: a stack with a model that takes them answers as `transformers` does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import WatchedPage, chromium
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.models.tiny_images import ImageModel, image_part, picture, shown, text_part
from tests.support.models.tiny_qwen_vl import make_qwen_model
from tests.support.models.tiny_videos import VideoReference, noise, video, video_part

FLAT, TALL = picture(0, (150, 40)), picture(1, (40, 160))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def model(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    return make_qwen_model(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def stack(model: ImageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(tmp_path_factory.mktemp("pictures"), model=model.path) as stack:
        yield stack


def test_pictures_are_chosen_shown_and_answered(
    browser: Any, stack: RunningStack, model: ImageModel, tmp_path: Path
) -> None:
    film = video(noise(15))
    for name, content in (("flat.png", FLAT), ("tall.png", TALL), ("film.mp4", film)):
        (tmp_path / name).write_bytes(content)
    watched = WatchedPage(browser, stack.url)
    page = watched.open("playground")
    page.set_default_timeout(60_000)
    side = page.locator('[data-side="A"]')
    side.locator('input[name="temperature"]').fill("0")
    side.locator('input[name="max_tokens"]').fill("20")
    page.set_input_files('input[name="pictures"]', [str(tmp_path / "flat.png"), str(tmp_path / "tall.png")])
    page.locator('.composer .pictures img[alt="tall.png"]').wait_for()
    assert page.locator(".composer .pictures img").count() == 2
    page.fill("#prompt", "Compare them.")
    page.press("#prompt", "Enter")
    side.get_by_text("finish: length").wait_for()
    asked = shown([{"role": "user", "content": [image_part(FLAT), image_part(TALL), text_part("Compare them.")]}])
    assert "".join(side.locator(".token:not(.end)").all_inner_texts()).strip() == model.text(asked, [FLAT, TALL], 20)
    assert side.locator('.asked img[alt="tall.png"]').evaluate("image => image.naturalHeight") == 160
    assert page.locator(".composer .pictures").count() == 0
    page.get_by_role("button", name="Clear").click()
    page.set_input_files('input[name="pictures"]', str(tmp_path / "film.mp4"))
    page.locator(".composer .video").get_by_text("film.mp4").wait_for()
    page.fill("#prompt", "And this?")
    page.press("#prompt", "Enter")
    side.get_by_text("finish: length").wait_for()
    shown_film = [{"role": "user", "content": [video_part(film), text_part("And this?")]}]
    tokens = VideoReference(model, "qwen2.5").greedy(shown_film, [], [film], 20)
    expected = model.processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()
    assert "".join(side.locator(".token:not(.end)").all_inner_texts()).strip() == expected
    assert watched.troubles == []
    watched.close()
