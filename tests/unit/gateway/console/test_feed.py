"""One computation for all viewers, none without them, and no viewer that does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.gateway.api.generation import RequestLimits
from services.gateway.console.feed import MAX_VIEWERS, ConsoleFeed
from services.gateway.console.viewer import MAX_UNREAD
from services.gateway.core.open_request import RetryPolicy
from services.gateway.core.stream_records import StreamRecords
from services.gateway.peers import GatewayPeers
from services.gateway.request_table import RequestTable
from shared import topics
from shared.bus.memory_bus import MemoryBus
from shared.ids import GatewayId, InstanceId
from tests.support.gateway.fake_services import eventually
from tests.unit.gateway.console.test_merge_patch import applied
from tests.unit.gateway.console.test_stack_view import life


class Page:
    """A viewer's connection."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.waiting = 0
        self.aborted = False

    def write_chunk(self, data: bytes) -> None:
        name, _, rest = data.decode().partition("\n")
        self.events.append((name.removeprefix("event: "), json.loads(rest.removeprefix("data: "))))

    def unread(self) -> int:
        return self.waiting

    def abort(self) -> None:
        self.aborted = True

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = {}
        for name, data in self.events:
            document = data if name == "snapshot" else applied(document, data)
        return document


@pytest.fixture
async def feed(memory_bus: MemoryBus) -> AsyncIterator[ConsoleFeed]:
    own = GatewayId("g")
    table = RequestTable(memory_bus, own, RetryPolicy(), RequestLimits(), 9, StreamRecords(2**20, 1.0))
    feed = ConsoleFeed(memory_bus, table, GatewayPeers(memory_bus, own, table.meters), interval=0.02)
    running = asyncio.create_task(feed.run())
    yield feed
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def listens(bus: MemoryBus) -> bool:
    """Whether anybody hears everybody's lifecycle."""
    subject = topics.lifecycles().subject
    return any(each.open and each.topic.subject == subject for each in bus._members.subscriptions)


async def say(bus: MemoryBus, instance: str, **more: Any) -> None:
    await bus.publish(topics.lifecycle_of("tokenizer", InstanceId(instance)), life(instance, **more))


async def test_a_page_has_the_document_and_then_what_changes(feed: ConsoleFeed, memory_bus: MemoryBus) -> None:
    first = Page()
    feed.add(first)
    await eventually(lambda: bool(first.events))
    await say(memory_bus, "t-1")
    await eventually(lambda: "t-1" in first.document["instances"])
    later = Page()
    feed.add(later)
    assert later.events[0][0] == "snapshot", "at once"
    await say(memory_bus, "t-1", phase="failed")
    await eventually(lambda: first.document["instances"]["t-1"]["phase"] == "gone")
    await eventually(lambda: later.document == first.document)
    assert [name for name, _ in first.events] == ["snapshot"] + ["patch"] * (len(first.events) - 1)


async def test_it_is_computed_once_for_all_and_not_at_all_for_nobody(feed: ConsoleFeed, memory_bus: MemoryBus) -> None:
    await asyncio.sleep(0.1)
    assert feed.computed == 0
    assert not listens(memory_bus)
    pages = [Page() for _ in range(10)]
    viewers = [feed.add(page) for page in pages]
    await eventually(lambda: all(len(page.events) > 3 for page in pages))
    assert all(len(page.events) == feed.computed for page in pages)
    for viewer in viewers:
        feed.remove(viewer)
    await eventually(lambda: not listens(memory_bus))
    computed = feed.computed
    await asyncio.sleep(0.1)
    assert feed.computed == computed
    again = Page()
    feed.add(again)
    await eventually(lambda: len(again.events) > 1)
    assert again.events[0][0] == "snapshot"


async def test_a_page_that_does_not_read_is_left(feed: ConsoleFeed) -> None:
    slow, other = Page(), Page()
    viewer = feed.add(slow)
    feed.add(other)
    await eventually(lambda: bool(slow.events))
    slow.waiting = MAX_UNREAD + 1
    assert await viewer.ended is False
    assert slow.aborted
    written, seen = len(slow.events), len(other.events)
    await eventually(lambda: len(other.events) > seen + 1)
    assert len(slow.events) == written


async def test_pages_are_bounded_and_told_at_the_end(feed: ConsoleFeed) -> None:
    viewers = [feed.add(Page()) for _ in range(MAX_VIEWERS)]
    assert feed.full
    feed.remove(viewers[0])
    assert not feed.full
    feed.stop()
    assert [await viewer.ended for viewer in viewers[1:]] == [True] * (MAX_VIEWERS - 1)
