"""Clients take turns at an encoder, and what nobody waits for is not encoded."""

from __future__ import annotations

from services.encoder.core.image_queue import ImageQueue
from services.encoder.core.row_table import image_hash
from shared.messages.encoder import EncodeInput

IMAGES = {name: image_hash(EncodeInput(name.encode())) for name in ("a1", "a2", "a3", "b1", "c1", "c2")}
NAMES = {image: name for name, image in IMAGES.items()}


def queue(*names: str) -> ImageQueue:
    made = ImageQueue(10.0)
    for at, name in enumerate(names):
        made.add(IMAGES[name], name[0], float(at))
    return made


def taken(queue: ImageQueue) -> list[str]:
    found = []
    while (image := queue.take()) is not None:
        found.append(NAMES[image])
    return found


def test_one_of_each_client_in_turn_each_in_its_order() -> None:
    assert taken(queue("a1", "a2", "a3", "b1", "c1", "c2")) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_who_comes_later_waits_for_one_of_each_other() -> None:
    waiting = queue("a1", "a2", "a3")
    assert waiting.take() == IMAGES["a1"]
    waiting.add(IMAGES["b1"], "b", 5.0)
    assert [waiting.count(turn) for turn in "abc"] == [2, 1, 0]
    assert taken(waiting) == ["a2", "b1", "a3"]
    assert len(waiting) == 0


def test_what_nobody_asks_for_any_more_is_left_out() -> None:
    waiting = queue("a1", "a2", "b1")
    waiting.renew(IMAGES["a2"], 9.0)
    waiting.renew(IMAGES["c1"], 9.0)
    assert waiting.expire(10.0) == []
    assert [NAMES[image] for image in waiting.expire(12.5)] == ["a1", "b1"]
    assert taken(waiting) == ["a2"]
