"""What a sequence classifier's `config.json` says of its labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.worker.models.config import ModelError
from services.worker.models.pooling.classification import read_classifier
from shared.messages.model_card import PoolingCard

CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"]}


def read(folder: Path, **config: Any) -> PoolingCard | None:
    (folder / "config.json").write_text(json.dumps(CLASSIFIER | config))
    return read_classifier(folder)


@pytest.mark.parametrize(
    ("config", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"id2label": {"1": "spam", "0": "ham"}}, ("ham", "spam"), "softmax"),
        ({"id2label": {"0": "x"}, "problem_type": "regression"}, ("x",), "none"),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            ("LABEL_0",),
            "none",
        ),
        (
            {"num_labels": 2, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            ("LABEL_0", "LABEL_1"),
            "sigmoid",
        ),
    ],
)
def test_labels_and_what_their_logits_go_through(
    config: dict[str, Any], labels: tuple[str, ...], activation: str, tmp_path: Path
) -> None:
    card = read(tmp_path, **config)
    assert card is not None
    assert (card.labels, card.size, card.activation, card.normalize) == (labels, len(labels), activation, False)


def test_other_models_have_none(tmp_path: Path) -> None:
    assert read(tmp_path, architectures=["Qwen3ForCausalLM"]) is None


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"id2label": {"1": "a"}}, "id2label must name the labels 0, 1, 2"),
        ({"num_labels": 0}, "num_labels 0 is not positive"),
        ({"problem_type": "guess"}, "problem_type"),
        ({"sbert_ce_default_activation_function": "my.Tanh"}, "'my.Tanh' is not supported"),
    ],
)
def test_what_cannot_be_is_refused(config: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=text):
        read(tmp_path, **config)
