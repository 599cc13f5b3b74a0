"""Requests whose images stand beside their prompts: what of them is refused, and who shares their blocks."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import WorkersReady
from services.scheduler.core.limits import EngineLimits
from shared.ids import EngineId, Incarnation
from shared.kv_groups import KvCacheGroup
from shared.messages.gateway import RequestRejected
from shared.messages.generation import PromptEmbeds
from shared.messages.model_card import CrossImageModel
from shared.packing import unpack
from tests.support.engines.checking_worker import HonestWorker, card, generate
from tests.support.engines.single_engine import plans, told

IMAGE = 5_000
"""Above all tokens that are drawn."""
ROWS = 64


def engine() -> EngineCore:
    images = CrossImageModel(token=IMAGE, row_size=2, rows=ROWS)
    groups = (KvCacheGroup(layers=3), KvCacheGroup(layers=2, encoded=ROWS))
    made = EngineCore(EngineId("e"), Incarnation(1), EngineLimits(run_ahead=0))
    ready = replace(card(), images=2, cross_images=images)
    made.handle(WorkersReady(ready, 64, max_running=8, max_batch_tokens=256, kv_groups=groups), 0.0)
    return made


def beside(*runs: tuple[int, int], fill: int = 1) -> PromptEmbeds:
    rows = bytes([fill]) * (4 * sum(count for _, count in runs))
    return PromptEmbeds(dtype="float16", size=2, rows=rows, runs=runs, encoded=True)


@pytest.mark.parametrize(
    ("prompt", "embeds", "why"),
    [
        ([4, IMAGE, 6], None, f"prompt: token id {IMAGE} is not in the vocabulary"),
        ([4, IMAGE + 1, 6], beside((1, 20)), f"prompt: token id {IMAGE + 1} is not in the vocabulary"),
        ([4, IMAGE, 6], beside((3, 20)), "messages: the model's prompts have images, and no other rows"),
        ([4, IMAGE, 6], replace(beside((1, 20)), encoded=False), "messages: the model's prompts have images"),
        ([4, IMAGE, 6], beside((1, 65)), "messages: 65 rows of images are not allowed in a prompt; 64 are"),
        ([IMAGE, 4, IMAGE, 6], beside((0, 49), (2, 15)), "messages: 64 rows of images are not allowed"),
    ],
)
def test_what_is_no_image_of_the_model_is_refused(prompt: list[int], embeds: PromptEmbeds | None, why: str) -> None:
    (word,) = told(engine().handle(generate("a", prompt, embeds=embeds), 0.0))
    assert isinstance(word, RequestRejected)
    assert word.message.startswith(why)


def test_equal_images_lie_in_the_same_blocks_unless_they_are_seen_otherwise() -> None:
    core, apart, together = engine(), [IMAGE, 4, IMAGE, 6], [IMAGE, IMAGE, 4, 6]
    requests = (
        generate("text", [4, 5, 6], max_tokens=9),
        generate("a", apart, embeds=beside((0, 20), (2, 20)), max_tokens=9),
        generate("c", together, embeds=beside((0, 20), (1, 20)), max_tokens=9),
        generate("d", apart, embeds=beside((0, 20), (2, 20), fill=2), max_tokens=9),
    )
    worker, made = HonestWorker(64), [plan for each in requests for plan in plans(core.handle(each, 0.0))]
    made += plans(core.handle(worker.step(made[0]), 0.0))
    core.handle(generate("b", [*apart, 7], embeds=beside((0, 20), (2, 20)), max_tokens=9), 0.0)
    made += plans(core.handle(worker.step(made[1]), 0.0))
    text, *different, second = [each for plan in made for each in plan.new]
    assert not unpack(text.encoded_blocks)
    held = [unpack(each.encoded_blocks) for each in different]
    assert [len(each) for each in held] == [4, 3, 4]
    assert not any(each.encoded_computed for each in different)
    assert len({block for each in held for block in each}) == sum(map(len, held))
    assert (unpack(second.encoded_blocks), second.encoded_computed) == (held[0], True)
