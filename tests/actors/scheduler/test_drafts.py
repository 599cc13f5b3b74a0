"""Steps that yield several tokens, from the scheduler's plan over a simulated worker's drafts to the detokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.scheduler.core.limits import EngineLimits
from services.worker.sim.tokens import SimSpeculation
from shared.bus.memory_bus import MemoryBus
from shared.messages.generation import SamplingOptions
from tests.support.engines.checking_worker import generate
from tests.support.engines.engine_on_a_bus import EngineOnABus, engine_on_a_bus, make_model, sim_backend

PROMPT = list(range(2, 22))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


async def outputs(engine: EngineOnABus, model: Path, speculation: SimSpeculation) -> list[list[int]]:
    engine.add_worker(lambda: sim_backend(model, speculation=speculation))
    await engine.ready()
    names = [f"r{i}" for i in range(6)]
    for i, name in enumerate(names):
        await engine.generate(generate(name, PROMPT[: 3 * i + 1], max_tokens=40 + i))
    await engine.finished(*names)
    assert len(set(engine.free_blocks)) == 1, "every block is given back"
    for name in names:
        entries = [entry for entry in engine.notes.entries if entry.request == name]
        assert [entry.position for entry in entries] == [
            sum(len(before.tokens) for before in entries[:place]) for place in range(len(entries))
        ]
    return [engine.notes.output_of(name) for name in names]


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
async def test_drafts_change_how_many_steps_it_takes_and_no_token(
    model: Path, run_ahead: int, acceptance: float
) -> None:
    limits = EngineLimits(run_ahead=run_ahead, plan_late=False, speculation="fixed")
    async with engine_on_a_bus(MemoryBus(), limits) as engine:
        plain = await outputs(engine, model, SimSpeculation(0))
        plain_steps = engine.scheduler.core.epoch_state.steps.finished  # type: ignore[union-attr]
    async with engine_on_a_bus(MemoryBus(), limits) as engine:
        assert await outputs(engine, model, SimSpeculation(4, acceptance)) == plain
        tally = engine.scheduler.core.counters
        steps = engine.scheduler.core.epoch_state.steps.finished  # type: ignore[union-attr]
    assert [len(output) for output in plain] == [40, 41, 42, 43, 44, 45]
    if acceptance == 0.0:
        assert (tally.accepted, tally.speculated_tokens) == ((), tally.speculated)
    else:
        assert steps < plain_steps
        assert list(tally.accepted) == sorted(tally.accepted, reverse=True)
        assert tally.speculated_tokens == tally.speculated + sum(tally.accepted)
        share = tally.accepted[0] / tally.speculated
        assert abs(share - acceptance) < 0.2, "the first of a step's drafts is accepted as often as was said"


def test_a_simulated_model_accepts_drafts_by_seed_and_position_only() -> None:
    speculation = SimSpeculation(4, 0.5)
    seed = SamplingOptions(seed=7).seed
    counts = [speculation.accepted(seed, position, 4) for position in range(4000)]
    assert counts == [speculation.accepted(seed, position, 4) for position in range(4000)]
    for least, probability in ((1, 0.5), (2, 0.25), (4, 0.0625)):
        assert abs(sum(count >= least for count in counts) / len(counts) - probability) < 0.03
