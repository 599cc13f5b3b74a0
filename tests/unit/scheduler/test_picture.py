"""A picture shows what the engine holds, and no more of it than it may take to look."""

from __future__ import annotations

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import TimePassed
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.picture import CACHED, FREE, IN_USE, MAX_CELLS, MAX_SEQUENCES, SHARED, engine_picture
from services.scheduler.core.planning.step_timing import RECENT_STEPS
from shared.ids import EngineId
from shared.messages.scheduler import EnginePicture
from tests.support.engines.checking_worker import generate
from tests.support.engines.single_engine import EPOCH, PROMPT, Ring

LONG = PROMPT * 2


def picture(ring: Ring) -> EnginePicture:
    return engine_picture(ring.engine)


def steps(ring: Ring, number: int) -> None:
    for _ in range(number):
        if not ring.plans:
            ring.now += 1.0
            ring.send(TimePassed())
        ring.step()


def test_without_workers_there_is_nothing_to_see() -> None:
    assert engine_picture(EngineCore(EngineId("e"), EPOCH, EngineLimits())) == EnginePicture(blocks=None)


def test_every_block_is_what_its_pool_says() -> None:
    ring = Ring(EngineLimits(max_running=2))
    for request in ("a", "b", "c"):
        ring.send(generate(request, LONG, max_tokens=40, ignore_eos=True, arrival=5.0))
    steps(ring, 3)
    assert ring.engine.epoch_state is not None
    pool = ring.engine.epoch_state.memory.pool
    shown = picture(ring)
    assert shown.blocks is not None
    cells = [
        (CACHED if block in pool.cached else FREE) if not held else IN_USE if held == 1 else SHARED
        for block, held in enumerate(pool.references)
    ]
    assert list(shown.blocks.cells) == cells
    assert (shown.blocks.free, shown.blocks.cached) == (cells.count(FREE), cells.count(CACHED))
    assert {FREE, IN_USE, SHARED} <= set(cells), "two begin with the same blocks"
    ring.finish()
    after = picture(ring).blocks
    assert after is not None
    assert set(after.cells) == {FREE, CACHED}


def test_it_says_who_runs_and_who_waits_since_when() -> None:
    ring = Ring(EngineLimits(max_running=1))
    ring.send(generate("a", PROMPT, max_tokens=6, ignore_eos=True, arrival=5.0))
    ring.step()
    ring.send(generate("b", PROMPT, max_tokens=6, ignore_eos=True, arrival=7.0, priority=1))
    shown = picture(ring)
    (running,), (waiting,) = shown.running, shown.waiting
    assert (running.request, running.phase, running.arrival, running.output_tokens) == ("a", "decoding", 5.0, 1)
    assert (waiting.request, waiting.phase, waiting.arrival, waiting.priority) == ("b", "waiting", 7.0, 1)
    assert (waiting.prompt_tokens, waiting.blocks, running.blocks) == (20, 0, 2)
    assert (shown.queued, shown.computing) == (1, 1)


def test_steps_say_what_they_computed() -> None:
    ring = Ring()
    ring.send(generate("a", PROMPT, max_tokens=6, ignore_eos=True))
    ring.finish()
    done = picture(ring).steps
    assert (done[0].prefill_tokens, done[0].prefills, done[0].decode_tokens) == (20, 1, 0)
    assert {(step.prefill_tokens, step.decodes, step.decode_tokens) for step in done[1:]} == {(0, 1, 1)}
    assert [step.step for step in done] == list(range(len(done)))
    assert picture(ring).max_batch_tokens == EngineLimits().max_batch_tokens


def test_it_is_bounded() -> None:
    ring = Ring(EngineLimits(max_running=2, max_waiting=200), num_blocks=5 * MAX_CELLS)
    for request in range(80):
        ring.send(generate(str(request), PROMPT, max_tokens=60, ignore_eos=True))
    steps(ring, RECENT_STEPS + 5)
    shown = picture(ring)
    assert shown.blocks is not None
    assert (len(shown.blocks.cells), shown.blocks.every, shown.blocks.total) == (MAX_CELLS, 5, 5 * MAX_CELLS)
    assert (len(shown.waiting), len(shown.steps)) == (MAX_SEQUENCES, RECENT_STEPS)
    assert shown.queued == 80 - 2
