"""Reads what the `config.json` of a classifier of prompts or tokens says of its labels, and the head that makes their
logits; or makes a head of what a language model says of one or two tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Struct, field
from torch import Tensor

from services.worker.models.checkpoint import TensorSource
from services.worker.models.config import ModelError, plain_json
from services.worker.models.pooling.step_pooling import PROCESS_REWARD_MODEL, process_reward_card
from shared.messages.generation import PoolingType
from shared.messages.model_card import LogitActivation, PoolingCard
from shared.models.tokenizer_files import TokenizerUnusable, load_tokenizer

ClassifierHead = Callable[[Tensor], Tensor]
"""Pooled states [k, size] → logits [k, labels], both in float32."""

SUFFIX = "ForSequenceClassification"
"""The end of the names of classifiers' architectures."""

TOKEN_SUFFIX = "ForTokenClassification"
"""That of those that give each token labels, as for named entities."""

_DECODER_HEAD = "score"
_LIBRARY_HEAD = "classifier"
"""Of some classifiers of tokens that only the library computes (GPT-2, Bloom, Falcon, MPT)."""

_LIBRARY_LABELS = 2
"""How many labels there are where the configuration does not say, as in transformers."""

_ACTIVATIONS: dict[str, LogitActivation] = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}
"""By the name of PyTorch's class, which sentence-transformers writes."""


class _CrossEncoder(Struct):
    """What sentence-transformers adds for a cross-encoder."""

    activation_fn: str | None = None


class _RawClassifier(Struct, kw_only=True):
    """The keys of `config.json` that describe a classifier."""

    architectures: list[str] = field(default_factory=list)
    id2label: dict[str, str] | None = None
    num_labels: int | None = None
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification"] | None = None
    sentence_transformers: _CrossEncoder | None = None
    sbert_ce_default_activation_function: str | None = None


def read_classifier(folder: Path, pooling: PoolingType = "last") -> PoolingCard | None:
    """The labels of the classifier in `folder`, whose head reads what `pooling` says; None where the model is none.
    Raises ModelError for a broken configuration."""
    path = folder / "config.json"
    try:
        raw = msgspec.json.decode(plain_json(path.read_bytes()), type=_RawClassifier)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: a Hugging Face model directory is expected") from None
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path}: {error}") from None
    if PROCESS_REWARD_MODEL in raw.architectures:
        return process_reward_card()
    if any(each.endswith(TOKEN_SUFFIX) for each in raw.architectures):
        pooling = "all"
    elif not any(each.endswith(SUFFIX) for each in raw.architectures):
        return None
    labels = _labels(path, raw)
    return PoolingCard(
        pooling=pooling, normalize=False, size=len(labels), labels=labels, activation=_activation(path, raw, labels)
    )


def _labels(path: Path, raw: _RawClassifier) -> tuple[str, ...]:
    if raw.id2label is None:
        count = _LIBRARY_LABELS if raw.num_labels is None else raw.num_labels
        if count < 1:
            raise ModelError(f"{path}: num_labels {count} is not positive")
        return tuple(f"LABEL_{number}" for number in range(count))
    names = [raw.id2label.get(str(number)) for number in range(len(raw.id2label))]
    if not names or None in names:
        raise ModelError(f"{path}: id2label must name the labels 0, 1, 2 and so on; it names {sorted(raw.id2label)}")
    return tuple(name for name in names if name is not None)


def _activation(path: Path, raw: _RawClassifier, labels: tuple[str, ...]) -> LogitActivation:
    """What the files say; by default sigmoid for one label and softmax for more, as in vLLM."""
    own = None if raw.sentence_transformers is None else raw.sentence_transformers.activation_fn
    named = own or raw.sbert_ce_default_activation_function
    if named is not None:
        kind = named.rpartition(".")[2]
        if kind not in _ACTIVATIONS:
            raise ModelError(f"{path}: the activation {named!r} is not supported; {', '.join(_ACTIVATIONS)} of PyTorch")
        return _ACTIVATIONS[kind]
    match raw.problem_type:
        case "regression":
            return "none"
        case "multi_label_classification":
            return "sigmoid"
        case "single_label_classification":
            return "softmax"
        case None:
            return "sigmoid" if len(labels) == 1 else "softmax"


def token_card() -> PoolingCard:
    """Of a language model whose next token judges its prompt: one label, through a sigmoid."""
    return PoolingCard(pooling="last", normalize=False, size=1, labels=("LABEL_0",), activation="sigmoid")


def read_decoder_head(
    tensors: TensorSource, card: PoolingCard, hidden_size: int, device: torch.device
) -> ClassifierHead:
    """The linear layer of a decoder that classifies prompts, or if all tokens are pooled each of these, where it may
    have biases. Raises ModelError where it is missing."""
    name, labels, bias = _DECODER_HEAD, len(card.labels), None
    if card.pooling == "all":
        if f"{name}.weight" not in tensors and f"{_LIBRARY_HEAD}.weight" in tensors:
            name = _LIBRARY_HEAD
        if f"{name}.bias" in tensors:
            bias = tensors.read(f"{name}.bias", (labels,)).float().to(device)
    weight = tensors.read(f"{name}.weight", (labels, hidden_size)).float().to(device)
    return partial(F.linear, weight=weight, bias=bias)


def label_head(logits: ClassifierHead) -> ClassifierHead:
    """The logit of one token as the next one, or by how much that of a second exceeds that of the first: its sigmoid is
    the second's probability among both, as vLLM's `classifier_from_token` and Qwen3-Reranker have it. `logits`: of
    these one or two tokens."""

    def head(states: Tensor) -> Tensor:
        found = logits(states)
        return found if found.shape[1] == 1 else found[:, 1:] - found[:, :1]

    return head


def token_ids(folder: Path, tokens: tuple[str, ...], vocab_size: int) -> tuple[int, ...]:
    """Of whole `tokens`, by the tokenizer in `folder`. Raises ModelError where one is none of the model's."""
    return tuple(_token_id(folder, token, vocab_size) for token in tokens)


def _token_id(folder: Path, token: str, vocab_size: int) -> int:
    try:
        number = load_tokenizer(folder).tokenizer.token_to_id(token)
    except TokenizerUnusable as error:
        raise ModelError(f"classifier_from_token: {error}") from None
    if number is None or number >= vocab_size:
        raise ModelError(f"classifier_from_token: {token!r} is no token of the model; whole tokens are needed")
    return int(number)
