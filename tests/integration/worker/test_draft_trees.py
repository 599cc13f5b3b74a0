"""Trees of drafts change how fast tokens come, never which."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.executor.host_runner import HostRunner
from services.worker.models.lora.slots import LoraSettings
from services.worker.ops.interface import CacheDtype
from services.worker.speculation.hidden_state_proposer import HiddenStateProposer
from services.worker.speculation.settings import Method, SpeculationSettings
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.ids import ModelName
from shared.messages.generation import SamplingOptions
from tests.integration.worker.test_speculation import OUTPUT, PROMPTS, prompt, proposed
from tests.support.models.tiny_adapters import write_adapter
from tests.support.models.tiny_drafters import make_eagle, make_eagle3
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.worker.plan_driver import GREEDY, Driver, Sequence
from tests.support.worker.tiny_backend import tiny_backend
from tests.support.worker.tree_oracle import TreeOracle

SAMPLINGS = [
    GREEDY,
    SamplingOptions(seed=5, temperature=0.7),
    SamplingOptions(seed=6, temperature=1.2, top_p=0.8),
    SamplingOptions(seed=7, temperature=1.0, top_k=5, repetition_penalty=1.3),
    SamplingOptions(seed=8, temperature=0.0, logprobs=2),
    SamplingOptions(seed=9, temperature=1.0, logprobs=3),
    SamplingOptions(seed=10, temperature=0.9, min_p=0.1, logprobs=2),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def heads(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("heads")
    return {
        "eagle": str(make_eagle(model, folder / "eagle")),
        "eagle3": str(make_eagle3(model, folder / "eagle3")),
    }


def settings(heads: dict[str, str], method: Method = "eagle", topk: int = 3) -> SpeculationSettings:
    """Trees as large as can be: heads with random weights are sure of nothing."""
    return SpeculationSettings(
        method=method,
        num_speculative_tokens=4,
        model=heads[method],
        speculative_eagle_topk=topk,
        speculative_eagle_min_path_prob=0.0,
    )


@pytest.fixture(scope="module", params=["native", "torch"])
def runner(request: pytest.FixtureRequest, model: TinyModel, heads: dict[str, str]) -> HostRunner:
    """With room for branches."""
    return tiny_backend(model.path, ops=request.param, speculation=settings(heads))


def run(runner: HostRunner, *, speculate: int, budget: int = 512) -> tuple[list[Sequence], Driver]:
    runner.reset()
    driver = Driver(runner, budget=budget, speculate=speculate)
    sequences = [
        driver.add(tokens, OUTPUT, sampling=sampling) for tokens, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    driver.run()
    return sequences, driver


def told(sequences: list[Sequence]) -> TreeOracle:
    oracle = TreeOracle()
    oracle.known = {tuple(one.tokens[: one.prompt_length]): one.output for one in sequences}
    return oracle


@pytest.mark.parametrize("budget", [512, 23])
def test_every_request_gets_the_tokens_and_logprobs_it_would_have_got(runner: HostRunner, budget: int) -> None:
    """By a path that is seldom the first, in mixed steps and chunks of prompts."""
    expected, _ = run(runner, speculate=0, budget=budget)
    oracle = told(expected)
    sequences, driver = run(proposed(runner, oracle), speculate=4, budget=budget)
    assert [one.output for one in sequences] == [one.output for one in expected]
    assert 0 < driver.accepted < driver.drafted
    assert oracle.branched > 10
    exact = runner.rank.decoder.ops_name == "native"
    for sequence, plain in zip(sequences, expected, strict=True):
        assert [each.token for each in sequence.logprobs] == [each.token for each in plain.logprobs]
        for each, one in zip(sequence.logprobs, plain.logprobs, strict=True):
            assert each.logprob == (one.logprob if exact else pytest.approx(one.logprob, abs=1e-4))


def test_prefix_hits_and_preemption_behind_accepted_branches_change_nothing(runner: HostRunner) -> None:
    common = prompt(30, 9)
    prompts = [common, prompt(20, 3)]
    runner.reset()
    plain = Driver(runner)
    first, preempted = (plain.add(tokens, OUTPUT) for tokens in prompts)
    plain.run()
    sharing = plain.add([*first.tokens[:50], *prompt(3, 2)], OUTPUT)
    plain.run()
    expected = [first, preempted, sharing]
    oracle = told(expected)
    proposed(runner, oracle).reset()
    driver = Driver(runner, budget=29, speculate=4)
    again = [driver.add(tokens, OUTPUT) for tokens in prompts]
    while len(again[0].output) < 21 or len(again[1].output) < 6:
        driver.step()
    sharer = driver.add(sharing.tokens[: sharing.prompt_length], OUTPUT)
    assert driver.share_prefix(sharer, again[0]) == 3 * BLOCK_SIZE, "a block of output, too"
    driver.preempt(again[1])
    driver.run()
    assert [one.output for one in (*again, sharer)] == [one.output for one in expected]
    assert oracle.branched > 5


def test_a_stream_taken_up_again_anywhere_goes_on_as_it_would_have(runner: HostRunner) -> None:
    """As behind the death of an engine at each position of several windows."""
    sampling = SamplingOptions(seed=21, temperature=1.3, top_p=0.95)
    runner.reset()
    whole = Driver(runner)
    expected = whole.add(PROMPTS[4], OUTPUT, sampling=sampling)
    whole.run()
    oracle, length = told([expected]), expected.prompt_length
    proposed(runner, oracle).reset()
    driver = Driver(runner, speculate=oracle.most)
    resumed = [
        driver.add(expected.tokens[: length + done], OUTPUT, sampling=sampling, prompt_length=length)
        for done in range(12)
    ]
    driver.run()
    assert oracle.branched > 10
    assert 0 < driver.accepted < driver.drafted
    assert [sequence.output for sequence in resumed] == [expected.output] * len(resumed)


@pytest.mark.parametrize(("method", "ops"), [("eagle", "torch"), ("eagle3", "native")])
def test_heads_draft_trees_and_change_nothing(
    model: TinyModel, heads: dict[str, str], method: str, ops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences with a tree, those that may have none, and those whose blocks are scarce."""
    chain, tree = (tiny_backend(model.path, ops=ops, speculation=settings(heads, method, topk)) for topk in (1, 3))
    expected, _ = run(chain, speculate=0)
    _, by_chains = run(chain, speculate=4)
    sequences, by_trees = run(tree, speculate=4)
    assert [one.output for one in sequences] == [one.output for one in expected]
    assert by_trees.accepted > by_chains.accepted
    proposer = tree.rank.drafting.proposer
    assert isinstance(proposer, HiddenStateProposer)
    monkeypatch.setattr("services.worker.speculation.hidden_state_proposer.MAX_TREES", 2)
    sequences, few = run(tree, speculate=2, budget=29)
    assert [one.output for one in sequences] == [one.output for one in expected]
    assert few.drafted > 0


@pytest.mark.features("speculative", "LoRA")
@pytest.mark.parametrize("cache", ["auto", "fp8", "int8_per_token_head"])
def test_adapters_and_rounded_caches_keep_what_they_say(
    model: TinyModel, heads: dict[str, str], tmp_path: Path, cache: CacheDtype
) -> None:
    """Of a step's trees some have an adapter; keys and values of accepted rows move as they are kept. By an oracle, and
    by the head."""
    write_adapter(model, tmp_path / "poet")
    backend = tiny_backend(
        model.path,
        ops="native",
        speculation=settings(heads),
        kv_cache_dtype=cache,
        loras=LoraSettings(((ModelName("poet"), tmp_path / "poet"),), 1, 32),
    )
    [adapter] = backend.card.loras

    def said(*, speculate: int) -> tuple[list[Sequence], Driver]:
        backend.reset()
        driver = Driver(backend, budget=29, speculate=speculate)
        sequences = [
            driver.add(tokens, OUTPUT, sampling=sampling, lora=adapter.id if number % 2 else None)
            for number, (tokens, sampling) in enumerate(zip(PROMPTS * 2, SAMPLINGS, strict=False))
        ]
        driver.run()
        return sequences, driver

    expected, _ = said(speculate=0)
    by_head, trees = said(speculate=4)
    oracle = told(expected)
    proposed(backend, oracle)
    by_oracle, driver = said(speculate=4)
    for sequences in (by_head, by_oracle):
        assert [one.output for one in sequences] == [one.output for one in expected]
    assert trees.drafted > 0 < trees.accepted
    assert 0 < driver.accepted < driver.drafted
    assert oracle.branched > 10


def test_drafts_stop_where_the_context_ends(runner: HostRunner) -> None:
    longest = runner.card.max_model_len
    tokens = prompt(longest - 6, 5)
    runner.reset()
    plain = Driver(runner)
    expected = plain.add(tokens, 7)
    plain.run()
    proposed(runner, oracle := told([expected])).reset()
    driver = Driver(runner, speculate=4)
    sequence = driver.add(tokens, 7)
    driver.run()
    assert sequence.output == expected.output
    assert oracle.branched
