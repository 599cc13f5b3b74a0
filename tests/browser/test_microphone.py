"""The playground's microphone: what a browser records of one that beeps is written down by a model that hears."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.chromium import WatchedPage, chromium
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.models.tiny_whisper import make_whisper

BEEPS = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium(*BEEPS) as browser:
        yield browser


@pytest.fixture(scope="module")
def stack(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    model = make_whisper(tmp_path_factory.mktemp("whisper"))
    with running_stack(tmp_path_factory.mktemp("microphone"), model=model.path) as stack:
        yield stack


def test_what_is_recorded_becomes_text_of_the_message(browser: Any, stack: RunningStack) -> None:
    watched = WatchedPage(browser, stack.url)
    page = watched.open("playground")
    page.set_default_timeout(60_000)
    page.fill("#prompt", "Before.")
    said = []
    for _ in range(2):
        page.get_by_role("button", name="Record", exact=True).click()
        page.get_by_role("button", name="Stop recording").wait_for()
        page.wait_for_timeout(1500)
        with page.expect_response("**/v1/audio/transcriptions") as answered:
            page.get_by_role("button", name="Stop recording").click()
        assert answered.value.status == 200
        body = answered.value.json()
        assert body["usage"]["seconds"] >= 1, "as long as it was recorded"
        said.append(body["text"].strip())
        page.get_by_role("button", name="Record", exact=True).wait_for()
    assert page.locator("#prompt").input_value() == " ".join(["Before.", *said]).strip()
    assert watched.troubles == []
    watched.close()
