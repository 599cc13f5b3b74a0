"""The worker's backend against `transformers`, family by family, in every situation a scheduler can make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from services.worker.backend import run_step
from services.worker.batch.batch import BrokenPlan
from services.worker.executor.host_runner import HostRunner
from services.worker.models.config import ModelError
from services.worker.models.loaded_model import DtypeChoice
from services.worker.ops.interface import OpsName, OpsUnavailable
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.ids import Incarnation, SequenceId
from shared.messages.generation import SamplingOptions
from shared.messages.worker import NewSequence, SequenceWork, StepPlan
from shared.packing import pack
from tests.support.models.tiny_models import (
    FAMILIES,
    POSITIONS,
    VOCABULARY,
    TinyModel,
    by_lane,
    make_config,
    make_model,
)
from tests.support.worker.launched_rank import Runner, launching
from tests.support.worker.plan_driver import GREEDY, Driver
from tests.support.worker.recorded_logits import record_logits
from tests.support.worker.tiny_backend import tiny_backend

OUTPUT = 8
MAX_SEQUENCES = 24


def backend_of(
    path: Path, *, ops: OpsName = "torch", dtype: DtypeChoice = "auto", max_model_len: int | None = None
) -> HostRunner:
    return tiny_backend(path, dtype=dtype, max_model_len=max_model_len, max_num_seqs=MAX_SEQUENCES, ops=ops)


Served = tuple[TinyModel, Runner]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Family → its checkpoint, made once."""
    return cache(lambda family: make_model(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def backends(tiny: Callable[[str], TinyModel]) -> Callable[[str, OpsName], HostRunner]:
    """Family and operations → a backend, made once. Skips where this machine has no such operations."""

    @cache
    def get(family: str, ops: OpsName) -> HostRunner:
        try:
            return backend_of(tiny(family).path, ops=ops)
        except OpsUnavailable as reason:
            pytest.skip(str(reason))

    return get


@pytest.fixture(params=["torch", "native", "launched"])
def how(request: pytest.FixtureRequest) -> str:
    """On which operations; or by launches, on torch's."""
    return str(request.param)


@pytest.fixture(params=by_lane(FAMILIES))
def served(
    request: pytest.FixtureRequest,
    how: str,
    tiny: Callable[[str], TinyModel],
    backends: Callable[[str, OpsName], HostRunner],
) -> Iterator[Served]:
    """Every family on every kind of operations, and by launches."""
    backend = backends(request.param, "native" if how == "native" else "torch")
    yield tiny(request.param), launching(backend) if how == "launched" else backend
    backend.reset()


@pytest.fixture(params=["stepping", "launching"])
def llama(
    request: pytest.FixtureRequest,
    tiny: Callable[[str], TinyModel],
    backends: Callable[[str, OpsName], HostRunner],
) -> Iterator[Served]:
    backend = backends("llama", "torch")
    yield tiny("llama"), launching(backend) if request.param == "launching" else backend
    backend.reset()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits of every step from here on, before anything is done to them."""
    return record_logits(monkeypatch)


def prompt(length: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(3, VOCABULARY) for _ in range(length)]


def mixed_prompts() -> list[list[int]]:
    """17 prompts from a single token to several blocks, windows crossed and block edges hit."""
    lengths = [1, 2, 3, 7, 15, 16, 17, 23, 24, 25, 31, 32, 33, 48, 60, 71, 90]
    return [prompt(length, seed) for seed, length in enumerate(lengths)]


def test_logits_agree_with_the_reference(served: Served, recorded: list[Tensor]) -> None:
    model, backend = served
    driver = Driver(backend)
    sequence = driver.add(prompt(70), OUTPUT)
    driver.run()
    expected = model.logits(sequence.tokens)[69:-1]
    assert torch.cat(recorded[:OUTPUT]).sub(expected).abs().max() < 1e-3
    assert expected.std() > 0.3, "a reference this flat would agree with anything"


def test_a_mixed_batch_generates_greedily_what_the_reference_does(
    served: Served,
) -> None:
    model, backend = served
    driver = Driver(backend, budget=97)
    sequences = [driver.add(tokens, OUTPUT) for tokens in mixed_prompts()]
    driver.run()
    # One pass says it, too: with RecurrentGemma `generate` goes on behind one token with what it had of another text.
    for sequence, tokens in zip(sequences, mixed_prompts(), strict=True):
        assert sequence.output == model.greedy(tokens, OUTPUT, sequence.output)


def test_chunks_prefix_hits_and_preemption_change_nothing(served: Served) -> None:
    model, backend = served
    common = prompt(40, seed=1)
    prompts = [common + prompt(30, seed=2), common + prompt(3, seed=3), prompt(50, seed=4)]
    driver = Driver(backend, budget=29)
    first = driver.add(prompts[0], OUTPUT)
    while not first.output:
        driver.step()
    sharing = driver.add(prompts[1], OUTPUT)
    if backend.state_checkpoints is None:
        assert driver.share_prefix(sharing, first) == 2 * BLOCK_SIZE
    preempted = driver.add(prompts[2], OUTPUT)
    while len(preempted.output) < 3:
        driver.step()
    driver.preempt(preempted)
    driver.run()
    expected = [model.greedy(tokens, OUTPUT) for tokens in prompts]
    assert [first.output, sharing.output, preempted.output] == expected


def test_a_sequence_may_fill_the_whole_context(llama: Served) -> None:
    model, backend = llama
    driver = Driver(backend)
    sequence = driver.add(prompt(POSITIONS - 3), 4)
    driver.run()
    assert len(sequence.tokens) == POSITIONS + 1
    assert sequence.output[:3] == model.greedy(prompt(POSITIONS - 3), 3)


def test_a_seeded_draw_does_not_depend_on_the_batch(llama: Served) -> None:
    _, backend = llama
    seeded = SamplingOptions(seed=1234, temperature=0.9, top_p=0.95, top_k=40, presence_penalty=0.3)
    alone = Driver(backend)
    expected = alone.add(prompt(20), 12, sampling=seeded)
    alone.run()
    backend.reset()
    crowded = Driver(backend, budget=40, epoch=2)
    others = [crowded.add(prompt(9 + i, i), 15, sampling=SamplingOptions(seed=i, min_p=0.1)) for i in range(7)]
    crowded.step()
    sequence = crowded.add(prompt(20), 12, sampling=seeded)
    crowded.run()
    assert sequence.output == expected.output
    assert len({tuple(other.output[:8]) for other in others}) == len(others)


def test_a_resumed_seeded_stream_goes_on_as_it_would_have(llama: Served) -> None:
    _, backend = llama
    seeded = SamplingOptions(seed=99, temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.2)
    whole = Driver(backend)
    expected = whole.add(prompt(20), 12, sampling=seeded)
    whole.run()
    backend.reset()
    second = Driver(backend, epoch=2)
    resumed = second.add([*prompt(20), *expected.output[:5]], 12, sampling=seeded, prompt_length=20)
    second.run()
    assert resumed.output == expected.output


def test_logprobs_are_those_of_the_raw_logits(llama: Served) -> None:
    model, backend = llama
    sampling = SamplingOptions(seed=7, temperature=1.5, top_k=20, presence_penalty=1.0, logprobs=4)
    driver = Driver(backend)
    sequence = driver.add(prompt(30), 6, sampling=sampling)
    plain = driver.add(prompt(11), 6)
    driver.run()
    expected = torch.log_softmax(model.logits(sequence.tokens)[29:-1], dim=1)
    assert [entry.token for entry in sequence.logprobs] == sequence.output
    for entry, row in zip(sequence.logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token].item(), abs=1e-4)
        values, ids = row.topk(4)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
    assert plain.logprobs == []


def test_stop_tokens_cannot_be_drawn_before_min_tokens(llama: Served) -> None:
    model, backend = llama
    unhindered = model.greedy(prompt(30), 4)
    driver = Driver(backend)
    sequence = driver.add(prompt(30), 4, min_tokens=2, stop_token_ids=tuple(unhindered[:2]))
    driver.run()
    assert not set(sequence.output[:2]) & set(unhindered[:2])


def test_a_sharded_checkpoint_loads_like_a_single_file(llama: Served, tmp_path: Path) -> None:
    model, _ = llama
    make_model("llama", tmp_path, shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    driver = Driver(backend_of(tmp_path))
    sequence = driver.add(prompt(30), OUTPUT)
    driver.run()
    assert sequence.output == model.greedy(prompt(30), OUTPUT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_half_precision_stays_near_the_reference(
    tiny: Callable[[str], TinyModel], recorded: list[Tensor], family: str, dtype: DtypeChoice
) -> None:
    model = tiny(family)
    backend = backend_of(model.path, dtype=dtype)
    recorded.clear()
    driver = Driver(backend)
    driver.add(prompt(40), 1)
    driver.run()
    assert backend.card.dtype == dtype
    error = recorded[0][0].float() - model.logits(prompt(40))[-1]
    assert error.abs().mean() < 0.1


def test_the_card_says_what_is_served(llama: Served) -> None:
    _, backend = llama
    card = backend.card
    assert (card.name, card.max_model_len, card.vocab_size) == ("tiny", POSITIONS, VOCABULARY)
    assert (card.eos_token_ids, card.dtype, backend.device) == ((2,), "float32", "cpu")


def test_kv_memory_given_is_kv_memory_used(llama: Served) -> None:
    _, backend = llama
    layers, kv_heads, head_dim, keys_and_values, bytes_each = 3, 2, 16, 2, 4
    block = layers * kv_heads * head_dim * keys_and_values * bytes_each * BLOCK_SIZE
    assert backend.num_blocks == (8 << 20) // block


def test_a_context_longer_than_the_model_is_refused(llama: Served) -> None:
    model, _ = llama
    with pytest.raises(ModelError, match=r"10000.*256 positions"):
        backend_of(model.path, max_model_len=10_000)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(tmp_path: Path) -> None:
    make_config("llama", architectures=["LlamaForCausalLM"], hidden_size=2**20, vocab_size=2**24).save_pretrained(
        tmp_path
    )
    with pytest.raises(ModelError, match=r"weights take [\d.]+ GiB in float32 and [\d.]+ GiB are free"):
        backend_of(tmp_path, dtype="float32")


def work(sequence: int, count: int, *blocks: int, sample: bool = True) -> SequenceWork:
    return SequenceWork(SequenceId(sequence), count, pack(blocks), sample)


def new(sequence: int, length: int, *, computed: int = 0) -> NewSequence:
    return NewSequence(
        sequence=SequenceId(sequence),
        tokens=pack(prompt(length)),
        prompt_length=length,
        computed=computed,
        blocks=b"",
        sampling=GREEDY,
    )


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (StepPlan(epoch=Incarnation(1), step=0, work=(work(5, 1, 0),)), "5 is unknown"),
        (StepPlan(epoch=Incarnation(1), step=0, released=(SequenceId(5),)), "5 is unknown"),
        (StepPlan(epoch=Incarnation(1), step=0, new=(new(0, 20),), work=(work(0, 20, 0),)), "in 1 blocks"),
        (StepPlan(epoch=Incarnation(1), step=0, new=(new(0, 20),), work=(work(0, 21, 0, 1),)), "of 20 tokens"),
        (StepPlan(epoch=Incarnation(1), step=0, new=(new(0, 20),), work=(work(0, 19, 0, 1),)), "of 20 tokens"),
        (StepPlan(epoch=Incarnation(1), step=0, new=(new(0, 2),), work=(work(0, 2, 99_999),)), "block 99999"),
        (StepPlan(epoch=Incarnation(1), step=0, new=(new(0, 20, computed=16),)), "too few blocks"),
        (StepPlan(epoch=Incarnation(1), step=0, new=(new(0, 2), new(0, 2))), "never released"),
        (StepPlan(epoch=Incarnation(1), step=0, new=(new(0, POSITIONS + 1),)), "do not fit"),
        (
            StepPlan(epoch=Incarnation(1), step=0, new=tuple(new(i, 2) for i in range(MAX_SEQUENCES + 1))),
            "one more than the 24",
        ),
    ],
)
def test_a_broken_plan_is_named(llama: Served, plan: StepPlan, complaint: str) -> None:
    _, backend = llama
    with pytest.raises(BrokenPlan, match=complaint):
        run_step(backend, plan)
