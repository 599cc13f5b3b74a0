"""Vectors of prompts: the arithmetic of sentence-transformers on the last hidden states of `transformers`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.worker.executor.host_runner import HostRunner
from services.worker.models.config import ModelError
from services.worker.models.loaded_model import ModelImpl
from services.worker.models.pooling.classification import token_card
from services.worker.models.pooling.step_pooling import PROCESS_REWARD_MODEL, StepPooling, step_card
from services.worker.ops.interface import OpsName, OpsUnavailable
from shared.messages.generation import PoolingOptions, PoolingType
from shared.models.tokenizer_files import load_tokenizer
from tests.support.models.library_models import library_config, library_model
from tests.support.models.tiny_models import POSITIONS, VOCABULARY, TinyModel, make_config, make_model
from tests.support.paths import DEMO_MODEL
from tests.support.worker.launched_rank import DriverAhead, launching
from tests.support.worker.plan_driver import Driver
from tests.support.worker.tiny_backend import tiny_backend

SIZE = 48
POOLINGS: tuple[PoolingType, ...] = ("last", "mean", "cls", "max", "mean_sqrt_len", "weighted_mean", "all")
FAMILIES = ("llama", "qwen3", "gemma2", "qwen3-moe")


def pooled(hidden: Tensor, options: PoolingOptions) -> Tensor:
    """As sentence-transformers computes it: `1_Pooling`, the cut, and `2_Normalize`. hidden [n, size] → [dimensions],
    or [n · dimensions]"""
    vector = {
        "last": hidden[-1],
        "mean": hidden.sum(0) / len(hidden),
        "cls": hidden[0],
        "max": hidden.max(0).values,
        "mean_sqrt_len": hidden.sum(0) / len(hidden) ** 0.5,
        "all": hidden,
        "weighted_mean": sum(i * row for i, row in enumerate(hidden, 1)) / sum(range(1, len(hidden) + 1)),
    }[options.pooling]
    vector = vector[..., : options.dimensions]
    return (torch.nn.functional.normalize(vector, dim=-1) if options.normalize else vector).flatten()


@torch.inference_mode()
def hidden_states(reference: Any, tokens: list[int]) -> Tensor:
    hidden: Tensor = reference.base_model(torch.tensor([tokens])).last_hidden_state[0]
    return hidden


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    return cache(lambda family: make_model(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def backends(tiny: Callable[[str], TinyModel]) -> Callable[[str, OpsName], HostRunner]:
    @cache
    def get(family: str, ops: OpsName) -> HostRunner:
        try:
            return tiny_backend(tiny(family).path, ops=ops, pooling_type="last")
        except OpsUnavailable as reason:
            pytest.skip(str(reason))

    return get


@pytest.fixture(params=["torch", "native", "launched"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=FAMILIES)
def served(
    request: pytest.FixtureRequest,
    how: str,
    tiny: Callable[[str], TinyModel],
    backends: Callable[[str, OpsName], HostRunner],
) -> Iterator[tuple[TinyModel, Driver]]:
    """A driver with steps so small that most prompts come in chunks."""
    backend = backends(request.param, "native" if how == "native" else "torch")
    ahead = DriverAhead(launching(backend), budget=24) if how == "launched" else Driver(backend, budget=24)
    yield tiny(request.param), ahead
    backend.reset()


def test_vectors_are_those_of_the_library_beside_generation_and_in_chunks(served: tuple[TinyModel, Driver]) -> None:
    model, driver = served
    random = Random(7)
    asked = []
    for number in range(12):
        prompt = [random.randrange(3, VOCABULARY) for _ in range(random.choice((1, 2, 15, 16, 17, 40, 77)))]
        pooling = POOLINGS[number % 3]
        options = PoolingOptions(pooling=pooling, dimensions=SIZE if number % 2 else 20, normalize=number % 4 < 2)
        asked.append((driver.add(prompt, 0, pooling=options), prompt, options))
    generated = [(driver.add(prompt, 6), prompt) for prompt in ([5, 6, 7], list(range(3, 40)))]
    driver.run()
    for sequence, prompt, options in asked:
        wanted = pooled(hidden_states(model.reference, prompt), options)
        torch.testing.assert_close(torch.tensor(driver.vectors[sequence.id]), wanted, rtol=1e-4, atol=1e-4)
    for generating, prompt in generated:
        assert generating.output == model.greedy(prompt, 6)


def test_the_last_token_is_enough_behind_a_cached_prefix(
    tiny: Callable[[str], TinyModel], backends: Callable[[str, OpsName], HostRunner]
) -> None:
    driver = Driver(backends("qwen3", "torch"))
    prompt = list(range(3, 70))
    first = driver.add(prompt, 4)
    while not first.done:
        driver.step()
    options = PoolingOptions(pooling="last", dimensions=SIZE)
    second = driver.add([*prompt[:48], 9, 8], 0, pooling=options)
    assert driver.share_prefix(second, first) == 48
    driver.run()
    wanted = pooled(hidden_states(tiny("qwen3").reference, [*prompt[:48], 9, 8]), options)
    torch.testing.assert_close(torch.tensor(driver.vectors[second.id]), wanted, rtol=1e-4, atol=1e-4)


def test_a_preempted_prompt_is_pooled_anew(
    tiny: Callable[[str], TinyModel], backends: Callable[[str, OpsName], HostRunner]
) -> None:
    driver = Driver(backends("llama", "torch"), budget=16)
    prompt = list(range(3, 53))
    options = PoolingOptions(pooling="mean", dimensions=SIZE)
    sequence = driver.add(prompt, 0, pooling=options)
    driver.step()
    driver.step()
    driver.preempt(sequence)
    driver.run()
    wanted = pooled(hidden_states(tiny("llama").reference, prompt), options)
    torch.testing.assert_close(torch.tensor(driver.vectors[sequence.id]), wanted, rtol=1e-4, atol=1e-4)


def test_a_prompt_may_fill_the_whole_context(
    tiny: Callable[[str], TinyModel], backends: Callable[[str, OpsName], HostRunner]
) -> None:
    driver = Driver(backends("llama", "torch"))
    prompt = [3 + i % 150 for i in range(POSITIONS)]
    options = PoolingOptions(pooling="last", dimensions=SIZE)
    sequence = driver.add(prompt, 0, pooling=options)
    driver.run()
    wanted = pooled(hidden_states(tiny("llama").reference, prompt), options)
    torch.testing.assert_close(torch.tensor(driver.vectors[sequence.id]), wanted, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_of_sentence_transformers_has_no_head_and_bare_names(
    tiny: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    """As `Qwen3Model` is saved beside `modules.json`: its pooling is served, text is not."""
    model = tiny("qwen3")
    tensors = load_file(model.path / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(bare, tmp_path / "model.safetensors")
    config = json.loads((model.path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3Model"]}))
    with pytest.raises(ModelError, match="no language model head"):
        tiny_backend(tmp_path)
    describe(tmp_path, "pooling_mode_mean_tokens", normalizes=True)
    backend = tiny_backend(tmp_path)
    assert backend.card.pooling is not None
    assert (backend.card.pooling.pooling, backend.card.pooling.normalize, backend.card.generates) == (
        "mean",
        True,
        False,
    )
    driver = Driver(backend)
    options = PoolingOptions(pooling="mean", dimensions=SIZE)
    sequence = driver.add([5, 6, 7, 8], 0, pooling=options)
    driver.run()
    wanted = pooled(hidden_states(model.reference, [5, 6, 7, 8]), options)
    torch.testing.assert_close(torch.tensor(driver.vectors[sequence.id]), wanted, rtol=1e-4, atol=1e-4)


def describe(folder: Path, mode: str, *, normalizes: bool) -> None:
    """Writes what sentence-transformers writes of a pooling."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": SIZE, mode: True}))


def make_classifier(family: str, folder: Path, labels: int, head: str = "ForSequenceClassification") -> Any:
    """Writes a tiny decoder with a classification head; what wrote it."""
    torch.manual_seed(labels)
    made = library_config if family[0].isupper() else make_config
    automatic: Any = getattr(transformers, f"AutoModel{head}")
    model = automatic.from_config(made(family, num_labels=labels)).eval()
    for weight in (model.classifier if hasattr(model, "classifier") else model.score).parameters():
        torch.nn.init.normal_(weight)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_logits_of_labels_are_the_librarys(family: str, how: str, tmp_path: Path) -> None:
    reference = make_classifier(family, tmp_path, 3)
    backend = tiny_backend(tmp_path, ops="native" if how == "native" else "torch")
    card = backend.card.pooling
    assert card is not None
    assert (card.labels, card.activation, backend.card.generates) == (
        ("LABEL_0", "LABEL_1", "LABEL_2"),
        "softmax",
        False,
    )
    driver = DriverAhead(launching(backend), budget=24) if how == "launched" else Driver(backend, budget=24)
    options = PoolingOptions(pooling="last", dimensions=3, normalize=False)
    prompts = [[3 + (i * 7 + n) % 150 for i in range(n)] for n in (1, 20, 50)]
    asked = [driver.add(prompt, 0, pooling=options) for prompt in prompts]
    each = [driver.add(prompt, 0, pooling=replace(options, pooling="all")) for prompt in prompts]
    driver.run()
    for sequence, tokens, prompt in zip(asked, each, prompts, strict=True):
        with torch.inference_mode():
            wanted = reference(torch.tensor([prompt])).logits[0]
            of_tokens = reference.score(hidden_states(reference, prompt)).flatten()
        torch.testing.assert_close(torch.tensor(driver.vectors[sequence.id]), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.tensor(driver.vectors[tokens.id]), of_tokens, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "GPT2", "Phi3"])
def test_logits_of_tokens_are_the_librarys(family: str, tmp_path: Path) -> None:
    """Of decoders that classify tokens, as for named entities, whoever computes them."""
    reference = make_classifier(family, tmp_path, 3, "ForTokenClassification")
    backend = tiny_backend(tmp_path, all_tokens=True)
    card = backend.card.pooling
    assert card is not None
    assert (card.makes, card.labels, card.step_tag_id, card.activation, backend.card.generates) == (
        *("steps", ("LABEL_0", "LABEL_1", "LABEL_2"), None),
        *("softmax", False),
    )
    driver = Driver(backend, budget=24)
    options = PoolingOptions(pooling="all", dimensions=3, normalize=False)
    prompts = [[3 + (i * 7 + n) % 90 for i in range(n)] for n in (1, 20, 50)]
    asked = [driver.add(prompt, 0, pooling=options) for prompt in prompts]
    driver.run()
    for sequence, prompt in zip(asked, prompts, strict=True):
        with torch.inference_mode():
            wanted = reference(torch.tensor([prompt])).logits[0].flatten()
        torch.testing.assert_close(torch.tensor(driver.vectors[sequence.id]), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@torch.inference_mode()
def test_tokens_judge_as_the_librarys_logits_say(family: str, tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    shutil.copytree(tiny(family).path, tmp_path, dirs_exist_ok=True)
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    words = load_tokenizer(tmp_path).tokenizer
    first, second = (str(words.id_to_token(number)) for number in (20, 30))
    prompt = [3 + (i * 7) % 150 for i in range(20)]
    logits = tiny(family).reference(torch.tensor([prompt])).logits[0, -1]
    options = PoolingOptions(pooling="last", dimensions=1, normalize=False)
    judged: list[tuple[tuple[str, ...], Tensor, ModelImpl]] = [
        ((second,), logits[30], "native"),
        ((first, second), logits[30] - logits[20], "native"),
    ]
    if family == "qwen3":
        judged.append(((first, second), logits[30] - logits[20], "transformers"))
    for tokens, wanted, code in judged:
        backend = tiny_backend(tmp_path, ops="native", classifier_from_token=tokens, model_impl=code)
        assert backend.card.pooling == token_card()
        driver = Driver(backend)
        sequence = driver.add(prompt, 0, pooling=options)
        driver.run()
        assert driver.vectors[sequence.id] == pytest.approx([float(wanted)], abs=1e-4)
    for tokens, more, said in (
        (("no such token",), {}, "is no token of the model"),
        ((first,), {"pooling_type": "mean"}, "pooling_type mean is not allowed beside"),
    ):
        with pytest.raises(ModelError, match=said):
            tiny_backend(tmp_path, classifier_from_token=tokens, **more)


def test_ends_of_steps_are_judged_as_the_librarys_logits_say(
    tiny: Callable[[str], TinyModel], how: str, tmp_path: Path
) -> None:
    """In chunks, beside each other and a prompt that generates, after preemption, without any step."""
    model = tiny("gemma2")  # tied embeddings, and logits with a cap
    backend = tiny_backend(
        model.path, ops="native" if how == "native" else "torch", pooling_type="step", steps=StepPooling(9, (20, 30, 7))
    )
    assert backend.card.pooling == step_card(StepPooling(9, (20, 30, 7)), None, generates=True)
    driver = DriverAhead(launching(backend), budget=24) if how == "launched" else Driver(backend, budget=24)
    options = PoolingOptions(pooling="all", dimensions=3, normalize=False, step_tag_id=9)
    prompts = [[9 if i % k == k - 1 else 10 + i % 100 for i in range(n)] for k, n in ((5, 77), (13, 40), (60, 30))]
    asked = [driver.add(prompt, 0, pooling=options) for prompt in prompts]
    beside = driver.add([5, 6, 7], 6)
    driver.step()
    driver.preempt(asked[0])
    driver.run()
    with torch.inference_mode():
        for sequence, prompt in zip(asked, prompts, strict=True):
            logits = model.reference(torch.tensor([prompt])).logits[0]
            wanted = logits[torch.tensor(prompt) == 9][:, [20, 30, 7]].flatten()
            torch.testing.assert_close(torch.tensor(driver.vectors[sequence.id]), wanted, rtol=1e-4, atol=1e-4)
    assert len(driver.vectors[asked[0].id]) == 3 * 15
    assert driver.vectors[asked[2].id] == []
    assert beside.output == model.greedy([5, 6, 7], 6)


def test_a_process_reward_model_judges_by_its_own_head(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """As in `modeling_qwen2_rm.py` of Qwen2.5-Math-PRM: two layers with a ReLU, for each token."""
    folder, reference = make_process_reward_model(tmp_path)
    backend = tiny_backend(folder, steps=StepPooling(tag_id=9))
    card = backend.card.pooling
    assert card is not None
    assert (card.makes, card.labels, card.step_tag_id, backend.card.generates) == (
        *("steps", ("LABEL_0", "LABEL_1")),
        *(9, False),
    )
    driver = Driver(backend, budget=24)
    prompt = [9 if i % 7 == 6 else 10 + i for i in range(50)]
    options = PoolingOptions(pooling="all", dimensions=2, normalize=False, step_tag_id=9)
    sequence = driver.add(prompt, 0, pooling=options)
    driver.run()
    torch.testing.assert_close(
        torch.tensor(driver.vectors[sequence.id]), reference(prompt)[6::7].flatten(), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(ModelError, match="with a head of its own"):
        tiny_backend(folder, steps=StepPooling(9, (1, 2)))
    by_default = tiny_backend(folder).card.pooling
    assert by_default is not None
    assert by_default.step_tag_id == 151651  # <extra_0>


@pytest.mark.parametrize(
    ("steps", "more", "said"),
    [
        (StepPooling(9), {"pooling_type": "step"}, "needs pooling_returned_token_ids"),
        (StepPooling(9, (1, 1)), {"pooling_type": "step"}, "each token may be there once"),
        (StepPooling(9, (VOCABULARY,)), {"pooling_type": "step"}, f"{VOCABULARY} is no token of the model"),
        (StepPooling(VOCABULARY, (1,)), {"pooling_type": "step"}, f"{VOCABULARY} is no token of the model"),
        (StepPooling(9), {"pooling_type": "last"}, "pooling_step_tag_id is for pooling_type step alone"),
        (StepPooling(9, (1,)), {"pooling_type": "step", "classifier_from_token": ("a",)}, "not allowed beside"),
    ],
)
def test_what_says_of_steps_what_cannot_be_is_refused_at_start(
    steps: StepPooling, more: dict[str, Any], said: str, tiny: Callable[[str], TinyModel]
) -> None:
    with pytest.raises(ModelError, match=said):
        tiny_backend(tiny("llama").path, steps=steps, **more)


def make_process_reward_model(folder: Path) -> tuple[Path, Callable[[list[int]], Tensor]]:
    """Writes a tiny one; what gives the logits [tokens, 2] of a prompt by the library's layers."""
    model = make_model("qwen2", folder)
    torch.manual_seed(0)
    head = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.ReLU(), torch.nn.Linear(SIZE, 2))
    tensors = load_file(model.path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    save_file(
        tensors | {f"score.{name}": each for name, each in head.state_dict().items()}, folder / "model.safetensors"
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [PROCESS_REWARD_MODEL]}))

    @torch.inference_mode()
    def logits(prompt: list[int]) -> Tensor:
        judged: Tensor = head(hidden_states(model.reference, prompt))
        return judged

    return folder, logits


def test_a_classifier_has_one_way_to_pool_and_needs_its_head(tmp_path: Path) -> None:
    make_classifier("llama", tmp_path, 1)
    with pytest.raises(ModelError, match="pooling_type mean is not allowed for a classifier"):
        tiny_backend(tmp_path, pooling_type="mean")
    with pytest.raises(ModelError, match="has a classification head"):
        tiny_backend(tmp_path, classifier_from_token=("no",))
    with pytest.raises(ModelError, match="no language model head"):
        tiny_backend(tmp_path, pooling_type="none")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if name != "score.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="no tensor score"):
        tiny_backend(tmp_path)


def test_settings_say_what_becomes_of_vectors_where_requests_do_not(
    tiny: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    folder = tiny("llama").path
    for more, normalized in (({}, True), ({"use_activation": False}, False), ({"normalize": False}, False)):
        card = tiny_backend(folder, pooling_type="mean", **more).card.pooling
        assert card is not None
        assert (card.normalize, card.activated) == (normalized, True)
    make_classifier("llama", tmp_path, 1)
    card = tiny_backend(tmp_path, use_activation=False).card.pooling
    assert card is not None
    assert (card.activation, card.activated) == ("sigmoid", False)
    with pytest.raises(ModelError, match="normalize is not allowed for a classifier; use_activation is"):
        tiny_backend(tmp_path, normalize=True)
    with pytest.raises(ModelError, match="use_activation is not allowed for a model that makes no vectors"):
        tiny_backend(folder, use_activation=True)
    with pytest.raises(ModelError, match=r"ALL is for classifiers of tokens; other models .* by task"):
        tiny_backend(folder, pooling_type="mean", all_tokens=True)


@pytest.mark.parametrize("family", ["GPT2", "OPT"])
def test_models_of_the_library_are_pooled(family: str, tmp_path: Path) -> None:
    model = library_model(family, tmp_path)
    backend = tiny_backend(tmp_path, pooling_type="mean")
    assert backend.card.pooling is not None
    driver = Driver(backend, budget=24)
    prompts = [[3 + (i * 7 + n) % 90 for i in range(n)] for n in (1, 20, 50)]
    options = PoolingOptions(pooling="mean", dimensions=backend.card.pooling.size)
    asked = [driver.add(prompt, 0, pooling=options) for prompt in prompts]
    driver.run()
    for sequence, prompt in zip(asked, prompts, strict=True):
        wanted = pooled(hidden_states(model.reference, prompt), options)
        torch.testing.assert_close(torch.tensor(driver.vectors[sequence.id]), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["GPT2", "CodeGen", "Cohere"])
def test_the_librarys_models_judge_steps_as_its_logits_say(family: str, tmp_path: Path) -> None:
    """A tied head, one with biases, and logits that are scaled."""
    model = library_model(family, tmp_path)
    backend = tiny_backend(tmp_path, ops="native", pooling_type="step", steps=StepPooling(9, (20, 30, 7)))
    driver = Driver(backend, budget=24)
    prompt = [9 if i % 5 == 4 else 10 + i % 100 for i in range(50)]
    options = PoolingOptions(pooling="all", dimensions=3, normalize=False, step_tag_id=9)
    judged, beside = driver.add(prompt, 0, pooling=options), driver.add([5, 6, 7], 6)
    driver.run()
    with torch.inference_mode():
        logits = model.reference(torch.tensor([prompt])).logits[0, 4::5][:, [20, 30, 7]]
    torch.testing.assert_close(torch.tensor(driver.vectors[judged.id]), logits.flatten(), rtol=1e-4, atol=1e-4)
    assert beside.output == model.greedy([5, 6, 7], 6)


def test_a_model_that_makes_more_of_its_heads_logits_does_not_judge_by_tokens(
    tiny: Callable[[str], TinyModel],
) -> None:
    """The native code knows Gemma's cap on logits; the library's code says nothing of it."""
    with pytest.raises(ModelError, match="Gemma2ForCausalLM: its logits are more than a product with its head"):
        tiny_backend(tiny("gemma2").path, pooling_type="step", steps=StepPooling(9, (1,)), model_impl="transformers")


@pytest.mark.parametrize("kind", ["Longformer", "MobileBert"])
def test_an_encoder_of_another_kind_is_refused_in_words(kind: str, tmp_path: Path) -> None:
    getattr(transformers, f"{kind}Config")(architectures=[f"{kind}Model"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is an encoder that is not supported; supported: albert, bert"):
        tiny_backend(tmp_path, pooling_type="cls")
