"""Encoders by the modules of `transformers`: hidden states and logits are those of the library, prompt by prompt."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from services.worker.models.config import ModelError
from services.worker.models.fallback.encoders.families import FAMILIES
from shared.messages.generation import PoolingOptions, PoolingType
from shared.models.encoder_models import ALONE
from tests.support.models.rounded_models import rounded
from tests.support.models.tiny_encoders import ENCODERS, LONGEST, SEGMENTED, WORDS, make_encoder
from tests.support.worker.plan_driver import Driver
from tests.support.worker.tiny_backend import tiny_backend

POOLINGS: tuple[PoolingType, ...] = ("cls", "mean", "last")
BY_NAME = (
    "Electra",
    "NomicBert",
    "Gte",
    "JinaEmbeddingsV3",
    "XLMRobertaXL",
    "Data2VecText",
    "RobertaPreLayerNorm",
    "Ernie",
)
"""Of which nothing is our own but a row in a table."""
KINDS = [pytest.param(kind, marks=[pytest.mark.extras] if kind in BY_NAME else []) for kind in ENCODERS]
OF_TOKENS = [kind for kind in KINDS if kind.values != ("Gemma3Text",)]


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_many_prompts_in_one_step(kind: str, tmp_path: Path) -> None:
    reference = make_encoder(kind, tmp_path)
    backend = tiny_backend(tmp_path, pooling_type="cls", ops="native" if kind == "Bert" else "torch")
    card = backend.card
    assert card.pooling is not None
    assert (card.max_model_len, card.pooling.whole, card.generates) == (LONGEST, True, False)
    driver, random = Driver(backend, budget=256), Random(3)
    prompts = [[2, *(random.randrange(4, WORDS) for _ in range(n)), 3] for n in (1, 5, 30, 62, 40)]
    asked = []
    for number, prompt in enumerate(prompts):
        options = PoolingOptions(pooling=POOLINGS[number % 3], dimensions=48, normalize=False, whole=True)
        asked.append((driver.add(prompt, 0, pooling=options), prompt, options))
    driver.run()
    for sequence, prompt, options in asked:
        with torch.inference_mode():
            hidden = reference(torch.tensor([prompt])).last_hidden_state[0]
        wanted = {"cls": hidden[0], "mean": hidden.mean(0), "last": hidden[-1]}[options.pooling]
        torch.testing.assert_close(torch.tensor(driver.vectors[sequence.id]), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Roberta", "MPNet", "Bert"])
def test_tokens_that_are_padding_elsewhere_have_the_librarys_positions(kind: str, tmp_path: Path) -> None:
    """As a client may send them among a prompt's ids."""
    reference = make_encoder(kind, tmp_path)
    driver = Driver(tiny_backend(tmp_path, pooling_type="mean"), budget=256)
    options = PoolingOptions(pooling="mean", dimensions=48, normalize=False, whole=True)
    padding = 1 if kind == "MPNet" else reference.config.pad_token_id
    prompts = [[2, 10, padding, padding, 11, 12, 3], [padding], [2, *range(20, 30), padding]]
    asked = [driver.add(prompt, 0, pooling=options) for prompt in prompts]
    driver.run()
    for sequence, prompt in zip(asked, prompts, strict=True):
        with torch.inference_mode():
            wanted = reference(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        torch.testing.assert_close(torch.tensor(driver.vectors[sequence.id]), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_pairs(kind: str, tmp_path: Path) -> None:
    """BERT and its like tell the texts of a pair apart."""
    reference = make_encoder(kind, tmp_path, labels=3)
    backend = tiny_backend(tmp_path)
    assert backend.card.pooling is not None
    pooling = backend.card.pooling.pooling
    assert pooling == {"ModernBert": "mean", "EuroBert": "mean", "Gemma3Text": "last"}.get(kind, "cls")
    driver = Driver(backend, budget=256)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    pairs = [tokenizer("w5 w6", "w7 w8 w9"), tokenizer("w50 w6 w7"), tokenizer("w10", "w20 " * 20)]
    options = PoolingOptions(pooling=pooling, dimensions=3, normalize=False, whole=True)
    asked = [driver.add(pair["input_ids"], 0, pooling=options) for pair in pairs]
    driver.run()
    for sequence, pair in zip(asked, pairs, strict=True):
        assert kind not in SEGMENTED or ("token_type_ids" in pair)
        with torch.inference_mode():
            wanted = reference(**{name: torch.tensor([ids]) for name, ids in pair.items()}).logits[0]
        torch.testing.assert_close(torch.tensor(driver.vectors[sequence.id]), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", OF_TOKENS)
def test_logits_of_tokens(kind: str, tmp_path: Path) -> None:
    """As models of named entities have them."""
    reference = make_encoder(kind, tmp_path, labels=5, head="ForTokenClassification")
    backend = tiny_backend(tmp_path, ops="native" if kind == "Bert" else "torch")
    card = backend.card.pooling
    assert card is not None
    assert (card.pooling, card.size, card.activation, card.step_tag_id, card.whole) == ("all", 5, "softmax", None, True)
    driver, options = (
        Driver(backend, budget=256),
        PoolingOptions(pooling="all", dimensions=5, normalize=False, whole=True),
    )
    prompts = [[2, *range(10, 10 + n), 3] for n in (1, 40, 7)]
    asked = [driver.add(prompt, 0, pooling=options) for prompt in prompts]
    driver.run()
    for sequence, prompt in zip(asked, prompts, strict=True):
        with torch.inference_mode():
            wanted = reference(torch.tensor([prompt])).logits[0].flatten()
        torch.testing.assert_close(torch.tensor(driver.vectors[sequence.id]), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "different"),
    [
        ("DebertaV2", {"share_att_key": False, "norm_rel_ebd": "none"}),
        ("DebertaV2", {"conv_kernel_size": 3, "conv_act": "gelu", "type_vocab_size": 2}),  # as v2-xlarge has it
        ("DebertaV2", {"position_buckets": -1, "pos_att_type": ["c2p"], "position_biased_input": True}),
        ("DebertaV2", {"relative_attention": False, "position_biased_input": True}),
        ("Deberta", {"pos_att_type": ["p2c"], "max_relative_positions": -1}),
        ("EuroBert", {"classifier_pooling": "late"}),
        ("EuroBert", {"classifier_pooling": "bos"}),
    ],
)
def test_what_configurations_say_of_attention_and_heads(kind: str, different: dict[str, Any], tmp_path: Path) -> None:
    reference = make_encoder(kind, tmp_path, labels=3, **different)
    backend = tiny_backend(tmp_path)
    assert backend.card.pooling is not None
    driver = Driver(backend, budget=256)
    options = PoolingOptions(pooling=backend.card.pooling.pooling, dimensions=3, normalize=False, whole=True)
    prompts = [[2, *range(10, 10 + n), 3] for n in (1, 50, 7)]
    asked = [driver.add(prompt, 0, pooling=options) for prompt in prompts]
    driver.run()
    for sequence, prompt in zip(asked, prompts, strict=True):
        with torch.inference_mode():
            wanted = reference(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(torch.tensor(driver.vectors[sequence.id]), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["MPNet", "Deberta", "DebertaV2"])
def test_vectors_in_half_precision(kind: str, tmp_path: Path) -> None:
    """As published rerankers are kept."""
    reference = make_encoder(kind, tmp_path).to(torch.bfloat16)
    driver, prompt = (
        Driver(tiny_backend(tmp_path, pooling_type="mean", dtype="bfloat16"), budget=256),
        [2, *range(20, 50), 3],
    )
    options = PoolingOptions(pooling="mean", dimensions=48, normalize=False, whole=True)
    sequence = driver.add(prompt, 0, pooling=options)
    driver.run()
    with torch.inference_mode():
        wanted = reference(torch.tensor([prompt])).last_hidden_state[0].float().mean(0)
    torch.testing.assert_close(torch.tensor(driver.vectors[sequence.id]), wanted, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("kind", ["MPNet", "Deberta", "DebertaV2"])
def test_weights_rounded_to_int8_are_those_of_the_library_rounded(kind: str, tmp_path: Path) -> None:
    reference = make_encoder(kind, tmp_path)
    backend = tiny_backend(tmp_path, pooling_type="mean", quantization="int8")
    rounded(reference, "int8")
    driver, prompt = Driver(backend, budget=256), [2, *range(20, 50), 3]
    options = PoolingOptions(pooling="mean", dimensions=48, normalize=False, whole=True)
    sequence = driver.add(prompt, 0, pooling=options)
    driver.run()
    with torch.inference_mode():
        wanted = reference(torch.tensor([prompt])).last_hidden_state[0].mean(0)
    torch.testing.assert_close(torch.tensor(driver.vectors[sequence.id]), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "different", "said"),
    [
        ("Deberta", {"talking_head": True}, "talking_head: true: mixing heads is not supported"),
        (
            "EuroBert",
            {"classifier_pooling": "max"},
            "classifier_pooling 'max' is not supported; supported: 'bos', 'mean'",
        ),
        ("NomicBert", {"rotary_emb_base": 5000}, "rotary_emb_base 5000: transformers reads rope_parameters"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    kind: str, different: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make_encoder(kind, tmp_path, labels=2, **different)
    with pytest.raises(ModelError, match=said):
        tiny_backend(tmp_path)


@pytest.mark.parametrize(
    ("different", "said"),
    [
        ({"hidden_size": "48"}, r"cannot build the model: .* 'hidden_size' expected int, got str \(value: '48'\)"),
        ({"hidden_act": "wave"}, "cannot build the model: it does not know 'wave'"),
        ({"dtype": "float3"}, "cannot build the model: .* no attribute 'float3'"),
        ({"max_position_embeddings": 2}, "max_position_embeddings 2 leaves no token a position"),
        ({"max_position_embeddings": -1}, "max_position_embeddings -1 leaves no token a position"),
    ],
)
def test_a_configuration_that_makes_no_model_is_refused(different: dict[str, Any], said: str, tmp_path: Path) -> None:
    make_encoder("MPNet", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **different}))
    with pytest.raises(ModelError, match=f"{tmp_path}: .*{said}"):
        tiny_backend(tmp_path, pooling_type="mean")


def test_what_an_encoder_needs_is_said(tmp_path: Path) -> None:
    make_encoder("Bert", tmp_path)
    with pytest.raises(ModelError, match="an encoder generates no text, so it needs a pooling_type"):
        tiny_backend(tmp_path)
    assert tiny_backend(tmp_path, pooling_type="mean", max_batch_tokens=32).card.max_model_len == 32
    make_encoder("Gemma3Text", tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("Gemma3TextModel", "Gemma3TextForTokenClassification"))
    with pytest.raises(ModelError, match="transformers has no such model of model_type gemma3_text"):
        tiny_backend(tmp_path)


def test_what_a_start_takes_for_an_encoder_is_computed_as_one() -> None:
    assert set(FAMILIES) == set(ALONE)
