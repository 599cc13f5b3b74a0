"""Decodes of every kind are one call of the C++ library, and draw bit for bit what they draw in many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.executor.host_runner import HostRunner
from services.worker.graphs.host_decodes import HostDecode
from services.worker.models.lora.slots import LoraSettings
from services.worker.speculation.ngram import NgramProposer
from services.worker.speculation.settings import SpeculationSettings
from shared.ids import ModelName
from shared.messages.generation import Grammar, SamplingOptions
from tests.integration.worker.test_decode_runs import by_many_calls, count_runs
from tests.integration.worker.test_launching_runner import everything, prompt
from tests.support.models.tiny_adapters import write_adapter
from tests.support.models.tiny_models import make_model
from tests.support.worker.guided_engine import GuidedEngine, spelling_model
from tests.support.worker.launched_rank import DriverAhead
from tests.support.worker.plan_driver import Driver, Sequence
from tests.support.worker.threaded_rank import OnTwoThreads
from tests.support.worker.tiny_backend import tiny_backend

WANTED = 45
FORCING = Grammar(
    "json",
    '{"type": "object", "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "days": '
    '{"type": "array", "items": {"type": "integer"}, "minItems": 3}}, "required": ["unit", "days"]}',
)

Fill = Callable[[Driver], list[Sequence]]


def plain(driver: Driver) -> list[Sequence]:
    """Greedy and random draws, and log-probabilities."""
    how: list[dict[str, float]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "logprobs": 2}]
    return [
        driver.add(prompt(6 + 9 * number, number), WANTED - 3 * number, sampling=SamplingOptions(seed=number, **each))
        for number, each in enumerate(how)
    ]


def repeating(driver: Driver) -> list[Sequence]:
    """Prompts in which much occurs twice, beside all that may be asked of the sampler."""
    again = [driver.add(prompt(8, 3) * 3, WANTED, sampling=SamplingOptions(seed=1, temperature=t)) for t in (0.0, 0.3)]
    return again + everything(driver)


def drawn(driver: Driver, fill: Fill) -> list[tuple[object, object]]:
    """What sequences drew, of which the first is preempted on its way."""
    sequences = fill(driver)
    for _ in range(9):
        driver.step()
    driver.preempt(sequences[0])
    driver.run()
    return [(each.output, each.logprobs) for each in sequences]


def agree(
    backend: HostRunner, monkeypatch: pytest.MonkeyPatch, fill: Fill, *, speculate: int = 0, ahead: int | None = None
) -> list[HostDecode]:
    """The steps of one call, which draw what those of many do."""
    many = Driver(by_many_calls(backend), speculate=speculate)
    expected = drawn(many, fill)
    backend.reset()
    computed, runner = count_runs(backend, monkeypatch), backend if ahead is None else OnTwoThreads(backend)
    if isinstance(runner, OnTwoThreads):
        try:
            found = drawn(DriverAhead(runner, ahead=ahead or 0, speculate=speculate), fill)  # type: ignore[arg-type]
        finally:
            runner.stop()
    else:
        driver = Driver(runner, speculate=speculate)
        found = drawn(driver, fill)
        if isinstance(backend.rank.drafting.proposer, NgramProposer):  # which has learnt nothing from the run before
            assert (driver.drafted, driver.accepted) == (many.drafted, many.accepted)
    backend.reset()
    assert found == expected
    return computed


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_that_are_looked_up(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SpeculationSettings(method=method, num_speculative_tokens=4)  # type: ignore[arg-type]
    backend = tiny_backend(make_model("llama", tmp_path).path, ops="native", speculation=settings)
    computed = agree(backend, monkeypatch, repeating, speculate=4)
    assert any(step.run.call.rows > step.run.call.count for step in computed), "somebody drafts"
    assert len(computed) >= 10


@pytest.mark.parametrize("ahead", [None, 2])
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss"])
def test_layers_in_groups(family: str, ahead: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(family, tmp_path, num_hidden_layers=4).path
    backend = tiny_backend(path, ops="native", hybrid_kv_cache="on")
    assert len(backend.kv_groups) > 1
    assert len(agree(backend, monkeypatch, plain, ahead=ahead)) > WANTED / 2


def test_nothing_is_read_behind_a_window(tmp_path: Path) -> None:
    """Its blocks are given back, and may be anybody's."""
    backend = tiny_backend(make_model("gemma3", tmp_path).path, ops="native", hybrid_kv_cache="on")
    driver = Driver(backend)
    expected = driver.add(prompt(40, 1), 60)
    driver.run()
    backend.reset()
    sequence = driver.add(prompt(40, 1), 60)
    groups = len(backend.kv_groups)
    windows = [number for number, group in enumerate(backend.kv_groups) if group.window is not None]
    while not sequence.done:
        driver.step()
        for number in windows:
            table = sequence.blocks[number::groups]
            for block in table[: backend.kv_groups[number].first_needed(sequence.computed, backend.card.block_size)]:
                for keys, values in backend.rank.caches:
                    keys[block], values[block] = torch.nan, torch.nan
    assert sequence.output == expected.output


@pytest.mark.parametrize("family", ["mamba2", "qwen3-next"])
def test_layers_with_states(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = tiny_backend(make_model(family, tmp_path).path, ops="native")
    assert backend.rank.states is not None
    assert len(agree(backend, monkeypatch, plain)) > WANTED / 2
    assert len(agree(backend, monkeypatch, plain, ahead=2)) > WANTED / 2


def test_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the device has slots for; one of them changes embeddings, whose steps are many calls."""
    model = make_model("llama", tmp_path / "model")
    folders = [write_adapter(model, tmp_path / f"{seed}", seed=seed).path for seed in (1, 2, 3)]
    named = tuple((ModelName(folder.name), folder) for folder in folders)
    backend = tiny_backend(model.path, ops="native", dtype="float32", loras=LoraSettings(named, 2, 32))
    ids = [None, *(card.id for card in backend.card.loras)]

    def fill(driver: Driver) -> list[Sequence]:
        return [driver.add(prompt(9 + 4 * n, n), WANTED - n, lora=lora) for n, lora in enumerate(ids[:3])]

    def others(driver: Driver) -> list[Sequence]:
        return [driver.add(prompt(9 + 4 * n, n), WANTED - n, lora=lora) for n, lora in enumerate([ids[3], ids[1]])]

    assert len(agree(backend, monkeypatch, fill)) > WANTED / 2
    assert len(agree(backend, monkeypatch, others, ahead=2)) > WANTED / 2


@pytest.mark.parametrize("speculate", [0, 8])
def test_grammars_beside_others(speculate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tokens that grammars force, and without; one draw of those with a grammar is left to the sampler."""
    path = spelling_model(tmp_path).path
    backend = tiny_backend(path, ops="native", dtype="float32", kv_memory_bytes=64 << 20)

    def documents(runner: HostRunner) -> list[tuple[object, object]]:
        engine = GuidedEngine(runner, speculate=speculate)
        asking: list[tuple[Grammar | None, dict[str, Any]]] = [
            *((FORCING, {}), (None, {}), (FORCING, {"logprobs": 1}), (None, {"logprobs": 2})),
            (FORCING, {"bad_words": ((5,), (6, 7))}),
        ]
        each = [
            engine.add(prompt(5 + n, n), grammar, SamplingOptions(seed=n, temperature=0.5, **how), 60)
            for n, (grammar, how) in enumerate(asking)
        ]
        engine.run()
        return [(one.output, one.logprobs) for one in each]

    expected = documents(by_many_calls(backend))
    computed = count_runs(backend, monkeypatch)
    assert documents(backend) == expected
    assert any(step.run.draws.masked is not None and len(step.run.draws.masked.places) == 3 for step in computed)
    assert any(step.run.draws.left is not None and 4 in step.run.draws.left.places for step in computed)
    assert any(step.run.call.rows > step.run.call.count for step in computed) == (speculate > 0)
