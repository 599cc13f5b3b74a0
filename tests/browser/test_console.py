"""The console as people use it: in a browser, on a real stack that is killed, drained and asked meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from tests.browser.chromium import PHONE, WatchedPage, chromium
from tests.support.cluster.stack import RunningStack, running_stack

VIEWS = ("topology", "engines", "requests", "latency", "act", "playground")
PATIENCE = 60_000
"""Milliseconds that a page may take to show what it must; a slow machine needs many."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def stack(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(tmp_path_factory.mktemp("console"), engines=2, gateways=2) as stack:
        yield stack


@pytest.fixture(scope="module")
def watched(browser: Any, stack: RunningStack) -> Iterator[WatchedPage]:
    watched = WatchedPage(browser, stack.url)
    watched.page.set_default_timeout(PATIENCE)
    watched.open("topology")
    yield watched
    watched.close()


@pytest.fixture
def page(watched: WatchedPage) -> Iterator[Any]:
    """One page for all tests, as an operator keeps it open."""
    view(watched.page, "topology")
    yield watched.page
    assert watched.troubles == []


def until(page: Any, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE / 1000
    while not condition():
        assert time.monotonic() < end
        page.wait_for_timeout(20)  # the page goes on meanwhile, and what it says is heard


def shown(page: Any, instance: str, phase: str) -> Any:
    return page.wait_for_selector(f'[data-instance="{instance}"][data-phase="{phase}"]')


def view(page: Any, name: str) -> None:
    page.click(f'nav a[href="#{name}"]')
    page.wait_for_selector(f'nav a[href="#{name}"][aria-current="page"]')


def test_axe_finds_nothing_that_keeps_people_out(browser: Any, stack: RunningStack) -> None:
    """Names, roles, order of headings, contrast of 4.5 : 1 and the rest of axe-core's rules for WCAG 2.2 AA. What dark
    changes is colours, in the style sheet alone."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python").Axe()
    rules: dict[str, Any] = {
        "light": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"],
        "dark": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]},
    }
    watched = WatchedPage(browser, stack.url)
    page = watched.open("topology")
    ask(stack, max_tokens=3)
    for name in VIEWS:
        view(page, name)
        page.wait_for_selector("main section")
        if name == "engines":
            page.wait_for_selector("[data-inside] canvas")
        if name == "requests":
            page.get_by_role("button", name="Follow cmpl-").first.click()
            page.wait_for_selector("[data-hop=decode]")
        for scheme, chosen in rules.items():
            page.emulate_media(color_scheme=scheme)
            found = axe.run(page, options={"runOnly": chosen})
            assert found.violations_count == 0, f"{name}, {scheme}: {found.generate_report()}"
    watched.close()


def ask(stack: RunningStack, **fields: Any) -> Any:
    body = {"model": stack.model, "prompt": "a", "ignore_eos": True, **fields}
    return httpx2.post(f"{stack.url}/v1/completions", json=body, timeout=120).json()


class LongRequest:
    """Owns a stream of tokens that a thread reads to its end. Rows of a page are by its id: those of other tests stay
    there for up to a second after their end."""

    def __init__(self, stack: RunningStack, n: int) -> None:
        """Returns once its first token has come. `n`: texts of 1900 tokens each."""
        self._body = {"model": stack.model, "prompt": "a", "ignore_eos": True, "max_tokens": 1900, "n": n}
        self._url = f"{stack.url}/v1/completions"
        self._ids: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._finishes: set[str | None] = set()
        self._error: httpx2.HTTPError | None = None
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        self.id = self._ids.get(timeout=PATIENCE / 1000)

    def _read(self) -> None:
        """A test that fails leaves it to the end of the stack; an error there must be no other test's."""
        try:
            self._read_stream()
        except httpx2.HTTPError as error:
            self._error = error

    def _read_stream(self) -> None:
        with httpx2.stream("POST", self._url, json={**self._body, "stream": True}, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    self._ids.put(chunk["id"])
                    self._finishes |= {choice["finish_reason"] for choice in chunk["choices"]}

    def finishes(self) -> set[str | None]:
        """Why its texts ended; waits for that."""
        self._reading.join(PATIENCE / 1000)
        assert not self._reading.is_alive()
        if self._error is not None:
            raise self._error
        return self._finishes - {None}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_fits_a_phone_and_names_its_controls(browser: Any, stack: RunningStack, scheme: str) -> None:
    watched = WatchedPage(browser, stack.url, viewport=PHONE, color_scheme=scheme)
    page = watched.open("topology")
    for name in VIEWS:
        view(page, name)
        page.wait_for_selector("main section")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        assert page.evaluate(NAMELESS) == [], name
        assert page.locator("h1").count() == 1
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 150) == (scheme == "dark")
    watched.close()
    assert watched.troubles == []


NAMELESS = """[...document.querySelectorAll("input, select, textarea, button, a, svg[role=img], [role=region]")]
  .filter((each) => !(each.labels?.length || each.getAttribute("aria-label") || each.textContent.trim()
    || document.getElementById(each.getAttribute("aria-labelledby"))))
  .map((each) => each.outerHTML)"""
"""What a screen reader could not name."""


def test_a_killed_process_is_seen_to_die_and_to_come_back(page: Any, stack: RunningStack) -> None:
    shown(page, "tokenizer-1", "ready")
    page.wait_for_timeout(3000)  # so that whatever starts now is news
    pid = stack.kill("tokenizer-1")
    page.wait_for_selector('.events >> text="failed"')
    new = stack.replaced("tokenizer-1", pid)
    card = page.locator('[data-instance="tokenizer-1"][data-phase="ready"]').filter(has_text=f"pid {new}")
    card.wait_for()
    assert "1 death seen" in card.inner_text()


def test_a_page_that_loses_its_gateway_says_so_and_keeps_what_happened(
    browser: Any, stack: RunningStack, watched: WatchedPage
) -> None:
    own = WatchedPage(browser, stack.url)
    page = own.open("topology")
    page.set_default_timeout(PATIENCE)
    page.wait_for_timeout(3000)
    pid = stack.kill("detokenizer-1")
    death = page.locator(".events li").filter(has_text="detokenizer-1").filter(has_text="failed")
    death.wait_for()
    stack.replaced("detokenizer-1", pid)
    gateways = {name: stack.kill(name) for name in ("gateway-1", "gateway-2")}
    page.get_by_role("alert").filter(has_text="What is shown is as of").wait_for()
    assert page.locator("main .stale [data-instance]").count() > 0
    for name, old in gateways.items():
        stack.replaced(name, old)
    page.wait_for_selector("header .phase.good")
    assert page.locator(".stale").count() == 0
    page.wait_for_selector('.events >> text="lost its gateway"')
    assert death.count() == 1
    own.close()
    watched.page.wait_for_selector("header .phase.good")
    for each in (own, watched):  # the browser itself complains of what does not answer, in the page of other tests, too
        assert [said for said in each.troubles if not said.startswith("Failed to load resource")] == []
        each.troubles.clear()


def test_an_engine_is_drained_and_undrained(page: Any, stack: RunningStack) -> None:
    view(page, "act")
    page.get_by_label("Drain engine-2", exact=True).click()
    page.get_by_text("engine-2 drains").wait_for()
    page.get_by_label("Undrain engine-2").wait_for()
    view(page, "topology")
    shown(page, "engine-2", "draining")
    view(page, "act")
    page.get_by_label("Undrain engine-2").click()
    page.get_by_text("engine-2 takes requests again").wait_for()
    view(page, "topology")
    shown(page, "engine-2", "ready")


def test_what_would_stop_the_serving_is_refused_and_offered(watched: WatchedPage, page: Any) -> None:
    view(page, "act")
    page.get_by_label("Drain coordinator-1", exact=True).click()
    page.get_by_text("the last ready coordinator").wait_for()
    assert page.get_by_role("button", name="Drain coordinator-1 anyway").is_enabled()
    watched.troubles = [each for each in watched.troubles if "409" not in each]  # Chromium's own note


def test_a_pool_is_scaled(page: Any) -> None:
    view(page, "act")
    page.get_by_label("Pool").select_option("tokenizer")
    page.get_by_label("Instances", exact=True).last.fill("2")
    page.get_by_role("button", name="Scale").click()
    page.get_by_text("starting tokenizer-2").wait_for()
    view(page, "topology")
    shown(page, "tokenizer-2", "ready")


def test_a_pool_is_scaled_on_the_host_that_is_chosen(browser: Any, stack: RunningStack) -> None:
    """Of another host the page is told alone: that the order goes there is what the stack answers, which has none."""
    with httpx2.stream("GET", f"{stack.url}/console/events", timeout=60) as events:
        state = next(json.loads(line[6:]) for line in events.iter_lines() if line.startswith("data: "))
    for name in ("detokenizer-1", "tokenizer-1"):
        state["instances"][f"far-{name}"] = state["instances"][name]
    told = f"event: snapshot\ndata: {json.dumps(state)}\n\n"
    watched = WatchedPage(browser, stack.url)
    page = watched.page
    page.set_default_timeout(PATIENCE)
    page.route("**/console/events", lambda route: route.fulfill(content_type="text/event-stream", body=told))
    page.goto(f"{stack.url}/console#act")
    page.get_by_label("Pool").select_option("detokenizer")
    page.get_by_text("1 there now").wait_for()
    page.get_by_label("Host").select_option("far")
    page.get_by_text("1 there now").wait_for()
    page.get_by_label("Instances", exact=True).last.fill("3")
    page.get_by_role("button", name="Scale").click()
    page.get_by_text("no supervisor of a host 'far' is there").wait_for()
    watched.close()


def test_a_process_is_killed_by_its_supervisor_and_comes_back(page: Any, stack: RunningStack) -> None:
    view(page, "act")
    before = stack.pid("engine-2-rank0")
    page.get_by_label("Process").select_option("engine-2-rank0")
    page.get_by_role("button", name="Kill …").click()
    page.get_by_role("button", name="Leave it").click()
    page.get_by_role("button", name="Kill …").click()
    page.get_by_role("button", name="Kill engine-2-rank0 now").click()
    page.get_by_text(f"engine-2-rank0, process {before}, was killed.").wait_for()
    stack.replaced("engine-2-rank0", before)
    view(page, "topology")
    shown(page, "engine-2-rank0", "ready")


def test_a_request_is_cancelled(page: Any, stack: RunningStack) -> None:
    view(page, "act")
    cancel(page, LongRequest(stack, n=32))


def cancel(page: Any, request: LongRequest) -> None:
    page.get_by_role("button", name=f"Cancel {request.id}").click()
    page.get_by_text(f"{request.id} is cancelled").wait_for()
    assert "abort" in request.finishes()


def test_an_engine_is_looked_into_while_it_computes(page: Any, stack: RunningStack) -> None:
    request = LongRequest(stack, n=64)
    view(page, "requests")
    row = page.locator("section", has_text="Open requests").locator("tr", has=page.locator(f'[title="{request.id}"]'))
    engines = row.locator("td", has_text="engine-").inner_text()
    engine = engines.split(", ")[0]  # of those that have some of its texts
    view(page, "engines")
    page.get_by_role("radio", name=engine, exact=True).check()
    page.locator(f"[data-inside={engine}] td", has_text="decoding").first.wait_for()
    page.get_by_text("Tokens of each step").wait_for()
    told = page.locator("[data-inside] canvas").get_attribute("aria-label")
    assert told.startswith("KV memory as a map of blocks: ")
    # Not `wait_for_function`, which evaluates a string in the page: its policy forbids that.
    until(page, lambda: len(page.evaluate(COLOURS_OF_THE_MAP)) >= 2)  # free blocks, and some that hold something
    view(page, "act")
    cancel(page, request)


COLOURS_OF_THE_MAP = """() => { const canvas = document.querySelector("[data-inside] canvas");
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  return [...new Set(pixels)].filter((pixel) => pixel !== 0) }"""


def test_the_prefix_tree_says_who_holds_what_prompts_share(page: Any, stack: RunningStack) -> None:
    shared = "Once upon a time there was a fox who lived by the old mill. " * 8
    for end in ("It was hungry. " * 10, "It was tired. " * 10):
        ask(stack, prompt=shared + end, max_tokens=2)
    view(page, "engines")
    rows = page.locator("[data-prefix]")
    rows.first.wait_for()
    held = rows.filter(has_text="engine-").filter(has_text="level 2")
    held.first.wait_for()


def test_a_request_is_followed_on_its_way_while_it_is_open_and_afterwards(page: Any, stack: RunningStack) -> None:
    view(page, "requests")
    request = LongRequest(stack, n=1)
    httpx2.post(f"{stack.url}/pause?mode=keep", timeout=60).raise_for_status()  # however fast engines are
    page.locator("section", has_text="Open requests").get_by_role("button", name=f"Follow {request.id}").click()
    hops = page.locator("[data-followed] [data-hop]")
    page.wait_for_selector('[data-hop="decode"] .hop.open')
    httpx2.post(f"{stack.url}/resume", timeout=60).raise_for_status()
    assert request.finishes() == {"length"}
    page.wait_for_selector('[data-hop="decode"] .hop:not(.open)')
    names = {row.get_attribute("data-hop") for row in hops.all()}
    assert names == {"POST /v1/completions", "tokenize", "route", "queue", "prefill", "decode", "detokenize"}
    page.get_by_text("outcome finished").wait_for()
    page.get_by_role("button", name="Close").click()
    page.get_by_label("Id of a response").fill(request.id)
    with paused(stack.pid("detokenizer-1")):
        page.get_by_role("button", name="Follow", exact=True).click()
        page.get_by_text("detokenizer-1 did not answer: what they did is missing.").wait_for()
        page.wait_for_selector('[data-hop="prefill"]')
    page.wait_for_selector('[data-hop="detokenize"]')  # it is asked again
    page.get_by_role("button", name="Close").click()


@contextlib.contextmanager
def paused(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_two_settings_answer_a_chat_token_by_token(page: Any, stack: RunningStack) -> None:
    view(page, "playground")
    page.get_by_role("radio", name="two").check()
    for side in ("A", "B"):
        page.locator(f'[data-side="{side}"] input[name="temperature"]').fill("0")
    page.locator('[data-side="B"] input[name="max_tokens"]').fill("2")
    page.fill("#prompt", "What is the capital of France?")
    page.press("#prompt", "Enter")
    for side, finish in (("A", "finish: stop"), ("B", "finish: length")):
        page.locator(f'[data-side="{side}"]').get_by_text(finish).wait_for()
    asked = {"model": stack.model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    body = {**asked, "temperature": 0, "max_tokens": 256}
    answer = httpx2.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
    tokens = page.locator('[data-side="A"] .token:not(.end)')
    assert "".join(tokens.all_inner_texts()) == answer["message"]["content"]
    assert page.locator('[data-side="B"] .token').count() == 2
    page.locator('[data-side="A"] .tokens').press("ArrowRight")
    assert page.locator('[data-side="A"] .alternatives li').count() == 5
    view(page, "latency")
    page.locator('[data-latency="ttft"]').get_by_text("p99").wait_for()
    page.locator('[data-pool="mixed"] [data-quantile="later-p99"]').get_by_text("ms").wait_for()


WEATHER = """[{"type": "function", "function": {"name": "weather", "parameters":
  {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris"]}}, "required": ["city"]}}}]"""


def test_tools_are_called_and_answered_and_an_answer_follows_a_schema(page: Any) -> None:
    view(page, "playground")
    page.get_by_role("button", name="Clear").click()
    page.get_by_role("radio", name="one").check()
    side = page.locator('[data-side="A"]')
    side.get_by_text("Tools and structured output").click()
    side.locator('input[name="temperature"]').fill("0")
    side.get_by_label("Tools, a JSON list").fill(WEATHER)
    side.get_by_label("Choice").select_option("required")
    say(page, "How is the weather?")
    assert side.locator('[data-call="weather"] code').first.inner_text() in CALLS
    side.get_by_label("Choice").select_option("none")
    side.get_by_label("Result of weather").fill('{"sky": "blue"}')
    side.get_by_role("button", name="Send the result").click()
    side.get_by_text("finish: stop").or_(side.get_by_text("finish: length")).first.wait_for()
    side.get_by_label("Tools, a JSON list").fill("")
    side.get_by_label("Schema of the answer").fill('{"enum": ["Rome"]}')
    page.get_by_role("button", name="Clear").click()
    say(page, "A city?")
    assert "".join(side.locator(".token:not(.end)").all_inner_texts()) == '"Rome"'
    side.get_by_label("Schema of the answer").fill("[]")
    page.fill("#prompt", "Another?")
    page.press("#prompt", "Enter")
    side.get_by_text("Schema of the answer: an object, a JSON schema").wait_for()


CALLS = ('weather({"city": "Paris"})', 'weather({"city":"Paris"})')


def say(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.locator('[data-side="A"] .turn').last.get_by_text("finish:").wait_for()


def test_the_page_patches_as_the_standard_says(page: Any) -> None:
    """The examples of RFC 7386, appendix A, whose documents are objects."""
    for before, patch, after in (
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ):
        patched = "async ([one, two]) => (await import('/console/stream.js')).patched(one, two)"
        assert page.evaluate(patched, [before, patch]) == after


def test_quantiles_are_read_from_buckets(page: Any) -> None:
    histogram = {"bounds": [1, 2, 4], "counts": [5, 0, 4, 1], "total": 20.0}
    found = page.evaluate(
        """async (one) => { const m = await import('/console/histogram.js');
           return [m.quantile(one, 0.5), m.quantile(one, 0.7), m.quantile(one, 1), m.within(one, 2),
                   m.since(one, {...one, counts: [6, 0, 4, 1]}).counts,
                   m.since(one, {...one, counts: [1, 0, 0, 0]}).counts,
                   m.quantile({...one, counts: [0, 0, 0, 0]}, 0.5) === undefined] }""",
        histogram,
    )
    assert found == [1, 3, 4, 0.5, [1, 0, 0, 0], [1, 0, 0, 0], True]
