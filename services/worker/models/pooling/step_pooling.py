"""Judges a solution step by step, as process reward models do: what a head says of the tokens that end steps.

vLLM's `STEP` pooling: Math-Shepherd (arXiv:2312.08935) judges by the logits of two tokens of a language model, Qwen's
process reward models (arXiv:2501.07301) by a head of two layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from services.worker.models.checkpoint import TensorSource
from services.worker.models.config import ModelConfig, ModelError
from services.worker.models.hf_layers.tensor_names import tensor_names
from shared.messages.model_card import PoolingCard

PROCESS_REWARD_MODEL = "Qwen2ForProcessRewardModel"
"""The architecture whose head judges steps."""
_QWEN_STEP_TAG = 151651
"""`<extra_0>`, which Qwen's steps end with; no file of theirs says so, as vLLM's code does."""
_PROCESS_LABELS = 2


class StepPooling(NamedTuple):
    """What the settings say of steps."""

    tag_id: int | None = None
    """The token that ends a step; None: what the model says."""
    returned_token_ids: tuple[int, ...] = ()
    """The tokens that a language model judges by."""

    def check(self, vocab_size: int, *, pools_steps: bool) -> None:
        """Raises ModelError for tokens that the model has not, and for any where no steps are pooled."""
        tags = () if self.tag_id is None else (self.tag_id,)
        for name, ids in (("pooling_step_tag_id", tags), ("pooling_returned_token_ids", self.returned_token_ids)):
            if ids and not pools_steps:
                raise ModelError(f"{name} is for pooling_type step alone")
            if len(set(ids)) != len(ids):
                raise ModelError(f"{name}: each token may be there once")
            for each in ids:
                if not 0 <= each < vocab_size:
                    raise ModelError(f"{name}: {each} is no token of the model, which has {vocab_size}")


NO_STEPS = StepPooling()


def step_card(steps: StepPooling, own: PoolingCard | None, *, generates: bool) -> PoolingCard:
    """How steps are judged: by the labels of the model's `own` head, or where that is None by tokens of a language
    model. `generates`: whether it has the head of one. Raises ModelError where nothing judges."""
    if own is None:
        ids = steps.returned_token_ids
        if not generates:
            raise ModelError("pooling_type step: needs a model that generates, or a classifier")
        if not ids:
            raise ModelError("pooling_type step: a language model needs pooling_returned_token_ids to judge by")
        own = PoolingCard(
            pooling="all", normalize=False, size=len(ids), labels=_names(len(ids)), activation="softmax", token_ids=ids
        )
    elif steps.returned_token_ids:
        raise ModelError("pooling_returned_token_ids is not allowed for a model with a head of its own, which judges")
    return replace(own, pooling="all", step_tag_id=own.step_tag_id if steps.tag_id is None else steps.tag_id)


def process_reward_card() -> PoolingCard:
    """Of a process reward model: whether a step is wrong, or right."""
    return PoolingCard(
        pooling="all",
        normalize=False,
        size=_PROCESS_LABELS,
        labels=_names(_PROCESS_LABELS),
        activation="softmax",
        step_tag_id=_QWEN_STEP_TAG,
    )


def _names(count: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{number}" for number in range(count))


def read_process_reward_head(
    tensors: TensorSource, hidden_size: int, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Hidden states [k, hidden] → the logits [k, 2] of both labels, in float32. Raises ModelError where a tensor is
    missing."""
    shapes = {0: (hidden_size, hidden_size), 2: (_PROCESS_LABELS, hidden_size)}
    (first, first_bias), (second, second_bias) = (
        [
            tensors.read(f"score.{layer}.{name}", shape if name == "weight" else shape[:1]).float().to(device)
            for name in ("weight", "bias")
        ]
        for layer, shape in shapes.items()
    )

    def judge(states: Tensor) -> Tensor:
        return F.linear(F.linear(states, first, first_bias).relu(), second, second_bias)

    return judge


def read_token_rows(tensors: TensorSource, config: ModelConfig, ids: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Hidden states [k, hidden] → the logits [k, ids] of the tokens `ids`, in float32."""
    names = tensor_names(config.architecture)
    name = f"{names.embedding if config.tied_embeddings else names.head}.weight"
    shape = (config.vocab_size, config.hidden_size)
    rows = torch.cat([tensors.read(name, shape, rows=(number, number + 1)).float() for number in ids])
    rows = (F.normalize(rows) if config.normed_head else rows) / (config.logits_divisor or 1.0)
    cap = config.logits_softcap

    def logits(states: Tensor) -> Tensor:
        found = F.linear(states, rows.to(states.device))
        return found if cap is None else torch.tanh(found / cap) * cap

    return logits
