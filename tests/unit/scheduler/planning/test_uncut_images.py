"""Images whose tokens see each other: no step ends within one, whatever the budget, the target and the cache say."""

from __future__ import annotations

from msgspec.structs import replace

from services.scheduler.core.events import SendToGateway
from services.scheduler.core.limits import EngineLimits
from shared.blocks import hash_chain
from shared.messages.gateway import RequestRejected
from shared.messages.generation import PromptEmbeds
from shared.messages.scheduler import GenerateRequest
from shared.packing import pack
from tests.support.engines.checking_worker import generate, right_output
from tests.support.engines.single_engine import Ring


def with_images(request: str, length: int, *images: tuple[int, int], seed: int = 0) -> GenerateRequest:
    """A prompt with these runs, each (first, count), as its images."""
    rows = b"".join(bytes([seed, first]) * count for first, count in images)
    embeds = PromptEmbeds(dtype="float16", size=1, rows=rows, runs=images, mutual=len(images) * (True,))
    assert embeds.fits(length)
    tokens = [4 + place % 20 for place in range(length)]
    asked = generate(request, tokens, max_tokens=3, ignore_eos=True)
    hashes = b"".join(hash_chain(pack(tokens), None, 16, None, embeds))
    return replace(asked, generation=replace(asked.generation, prompt_embeds=embeds, block_hashes=hashes))


def ends(ring: Ring) -> dict[str, list[int]]:
    """Runs all steps: where those of each request ended."""
    found: dict[str, list[int]] = {}
    done: dict[int, int] = {}
    assert ring.engine.epoch_state is not None
    while ring.plans:
        plan, by_id = ring.plans[0], ring.engine.epoch_state.queues.by_id
        done |= {new.sequence: new.computed for new in plan.new}
        for work in plan.work:
            done[work.sequence] += work.count
            found.setdefault(by_id[work.sequence].generation.request, []).append(done[work.sequence])
        ring.now += 0.01
        ring.step()
    return found


def test_a_step_ends_in_front_of_an_image_or_behind_it() -> None:
    for target in (None, 0.001):  # which even the smallest step takes longer than
        limits = EngineLimits(max_batch_tokens=30, max_running=4, run_ahead=0, itl_target=target, plan_late=False)
        ring = Ring(limits, num_blocks=64, images=1)
        ring.send(generate("text", [4] * 9, max_tokens=40, ignore_eos=True))
        asked = {
            "one": with_images("one", 80, (20, 25), (47, 20)),
            "two": with_images("two", 60, (0, 26), (26, 26), seed=1),
            "again": with_images("again", 80, (20, 25), (47, 20)),
        }
        for each in asked.values():
            ring.send(each)
        found = ends(ring)
        for request, each in asked.items():
            embeds = each.generation.prompt_embeds
            assert embeds is not None
            within = [at for at in found[request] for first, count in embeds.runs if first < at < first + count]
            assert not within, request
            assert ring.output_of(request) == right_output(each, ring.context)[0]


def test_an_image_that_no_step_has_room_for_is_refused() -> None:
    ring = Ring(EngineLimits(max_batch_tokens=30, max_running=4), num_blocks=64, images=1)
    (refused,) = ring.send(with_images("large", 60, (3, 28)))
    assert isinstance(refused, SendToGateway)
    assert isinstance(refused.message, RequestRejected)
    assert refused.message.message == (
        "messages: an image of 28 tokens is not allowed in a step; 27 are, which is max_batch_tokens beside max_running"
    )
