"""`python -m tests.browser.screenshots URL FOLDER`: the pictures of docs/console.md, of a stack that serves the demo
model and has nothing else to do."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2
from PIL import Image

from tests.browser.chromium import PHONE, WatchedPage, chromium

WINDOW = {"width": 1360, "height": 860}
PICTURES: tuple[tuple[str, str, str, dict[str, int]], ...] = (
    ("topology", "topology", "light", WINDOW),
    ("engines", "engines", "dark", WINDOW),
    ("requests", "requests", "light", WINDOW),
    ("latency", "latency", "light", WINDOW),
    ("playground", "playground", "dark", WINDOW),
    ("phone", "topology", "light", PHONE),
)
"""Name, view, colour scheme, size of the window."""
COLOURS = 96
"""Enough for a page of few colours, at half the bytes."""


def load(url: str, stop: threading.Event) -> list[threading.Thread]:
    """Some clients, each of which asks one thing after the other."""
    model = httpx2.get(f"{url}/v1/models").json()["data"][0]["id"]

    def ask(seed: int) -> None:
        chance = random.Random(seed)
        while not stop.is_set():
            messages = [{"role": "user", "content": f"Tell me a story about {chance.random()}"}]
            body = {"model": model, "messages": messages, "max_tokens": chance.choice((20, 60, 200))}
            httpx2.post(f"{url}/v1/chat/completions", json={**body, "ignore_eos": True}, timeout=60)

    clients = [threading.Thread(target=ask, args=(seed,), daemon=True) for seed in range(5)]
    for client in clients:
        client.start()
    return clients


def chat(page: Any) -> None:
    """A chat with two settings, and a look at one of its tokens."""
    page.get_by_role("radio", name="two").check()
    page.locator('[data-side="A"] input[name="temperature"]').fill("1.4")
    page.locator('[data-side="A"] input[name="seed"]').fill("7")
    page.fill("#prompt", "Tell me a short story.")
    page.press("#prompt", "Enter")
    for side in ("A", "B"):
        page.locator(f'[data-side="{side}"]').get_by_text("finish:").wait_for()
    page.locator('[data-side="A"] :is(.token.p2, .token.p3, .token.p4)').first.hover()


def main(url: str, folder: Path) -> None:
    """Takes them."""
    with chromium() as browser:
        for name, view, scheme, size in PICTURES:
            watched = WatchedPage(browser, url, viewport=size, color_scheme=scheme)
            page = watched.open(view)
            stop, clients = threading.Event(), list[threading.Thread]()
            if view == "playground":
                chat(page)
            else:
                clients = load(url, stop)
                page.wait_for_timeout(20_000)
            if view == "requests":
                page.locator("section", has_text="Ended last").get_by_role("button", name="Follow").nth(3).click()
                page.wait_for_selector("[data-hop=detokenize]")
            path = folder / f"console-{name}.png"
            page.screenshot(path=path)
            Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)
            watched.close()
            stop.set()
            for client in clients:
                client.join()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
