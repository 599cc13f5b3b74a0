"""Requests whose images stand beside their prompts: what of them is refused, and who shares their blocks."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import WorkersReady
from services.scheduler.core.limits import EngineLimits
from shared.ids import EngineId, Incarnation
from shared.kv_groups import STEP_ROWS, KvCacheGroup
from shared.messages.gateway import RequestRejected
from shared.messages.generation import PromptEmbeds
from shared.messages.model_card import CrossImageModel
from shared.packing import unpack
from tests.support.engines.checking_worker import LORAS, HonestWorker, card, generate
from tests.support.engines.single_engine import plans, told

IMAGE = 5_000
"""Above all tokens that are drawn."""
ROWS = 64


def engine(parts: int = 1, rows: int = ROWS) -> EngineCore:
    images = CrossImageModel(token=IMAGE, row_size=2, rows=rows)
    groups = (KvCacheGroup(layers=2 * parts), KvCacheGroup(layers=2, encoded=rows, parts=parts))
    made = EngineCore(EngineId("e"), Incarnation(1), EngineLimits(run_ahead=0))
    ready = replace(card(), images=2, cross_images=images)
    made.handle(WorkersReady(ready, 64, max_running=8, max_batch_tokens=256, max_loras=2, kv_groups=groups), 0.0)
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


def test_nothing_is_said_of_a_prompt_beside_images() -> None:
    """Wherever a request comes from: offline ones have no gateway's fields."""
    asked = generate("a", [4, IMAGE, 6], embeds=beside((1, 20)))
    sampling = replace(asked.generation.sampling, prompt_logprobs=1)
    (word,) = told(engine().handle(replace(asked, generation=replace(asked.generation, sampling=sampling)), 0.0))
    assert isinstance(word, RequestRejected)
    assert (word.field, word.message.split(",")[0]) == (
        "prompt_logprobs",
        "prompt_logprobs: not allowed beside images",
    )


@pytest.mark.parametrize(("parts", "blocks"), [(1, [4, 3, 4, 4]), (3, [2, 1, 2, 2])])
def test_equal_images_lie_in_the_same_blocks_unless_they_are_seen_otherwise(parts: int, blocks: list[int]) -> None:
    core, apart, together = engine(parts), [IMAGE, 4, IMAGE, 6], [IMAGE, IMAGE, 4, 6]
    requests = (
        generate("text", [4, 5, 6], max_tokens=9),
        generate("a", apart, embeds=beside((0, 20), (2, 20)), max_tokens=9),
        generate("c", together, embeds=beside((0, 20), (1, 20)), max_tokens=9),
        generate("d", apart, embeds=beside((0, 20), (2, 20), fill=2), max_tokens=9),
        generate("e", apart, embeds=beside((0, 20), (2, 20)), lora=LORAS[0], max_tokens=9),
    )
    worker, made = HonestWorker(64), [plan for each in requests for plan in plans(core.handle(each, 0.0))]
    made += plans(core.handle(worker.step(made[0]), 0.0))
    core.handle(generate("b", [*apart, 7], embeds=beside((0, 20), (2, 20)), max_tokens=9), 0.0)
    made += plans(core.handle(worker.step(made[1]), 0.0))
    text, *different, second = [each for plan in made for each in plan.new]
    assert not unpack(text.encoded_blocks)
    held = [unpack(each.encoded_blocks) for each in different]
    assert [len(each) for each in held] == blocks
    assert not any(each.encoded_computed for each in different)
    assert len({block for each in held for block in each}) == sum(map(len, held))
    assert (unpack(second.encoded_blocks), second.encoded_computed) == (held[0], True)


def test_a_step_brings_rows_of_as_many_chats_as_were_profiled() -> None:
    """Of chats with few rows several, of others one."""
    core, worker = engine(parts=512, rows=STEP_ROWS - 20), HonestWorker(64)
    (begun,) = plans(core.handle(generate("text", [4, 5, 6], max_tokens=9), 0.0))
    for name, rows in (("a", 100), ("b", STEP_ROWS - 200), ("c", 101), ("d", 90)):
        core.handle(generate(name, [4, IMAGE, 6], embeds=beside((1, rows)), max_tokens=9), 0.0)
    (first,) = plans(core.handle(worker.step(begun), 0.0))
    (second,) = plans(core.handle(worker.step(first), 0.0))
    brought = [[each.prompt_embeds.count for each in plan.new if each.prompt_embeds] for plan in (first, second)]
    assert brought == [[100, STEP_ROWS - 200], [101, 90]]
