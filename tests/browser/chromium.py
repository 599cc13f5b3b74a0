"""A headless Chromium, or the reason why there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox",)
"""Tests run as root in containers, where Chromium's own sandbox does not start."""
PHONE = {"width": 390, "height": 844}


def chromium_path() -> str:
    """Where Chromium is. Skips the tests where there is none, or no Playwright."""
    pytest.importorskip("playwright", reason="no browser tests: pip install playwright")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser tests: none of {', '.join(NAMES)} is installed (apt-get install chromium)")
    return path


@contextmanager
def chromium(*flags: str) -> Iterator[Any]:
    """A browser of Playwright's synchronous kind, with further flags."""
    path = chromium_path()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS, *flags])
        try:
            yield browser
        finally:
            browser.close()


class WatchedPage:
    """Owns a page, and notes what must not be: errors, and anything that is asked of another server."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self._context = browser.new_context(**context)
        self.page = self._context.new_page()
        self.troubles: list[str] = []
        self._url = url
        self.page.on("console", lambda said: self.troubles.append(said.text) if said.type != "log" else None)
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", self._requested)

    def _requested(self, request: Any) -> None:
        if not request.url.startswith(self._url):
            self.troubles.append(f"asked elsewhere: {request.url}")

    def open(self, view: str) -> Any:
        """Shows a view of the console; returns the page once it has heard of the stack."""
        self.page.goto(f"{self._url}/console#{view}")
        self.page.wait_for_selector("header .phase.good")
        return self.page

    def close(self) -> None:
        self._context.close()
