"""`POST /classify`: reads the body as a request for a classifier's labels, and writes their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from services.gateway.api.errors import decode_body
from services.gateway.api.generation import GenerationRequest, RequestLimits, choose_model
from services.gateway.api.pooling.activation import activated, vector_of
from services.gateway.api.pooling.pooled_request import (
    PooledInputFields,
    chosen_activation,
    input_prompts,
    list_body,
    logit_options,
    pooled_generation,
    pooling_of,
    wants_activation,
)
from services.gateway.api.response import ChoiceState, ResponseHeader
from shared.messages.model_card import LogitActivation, ModelCard


class ClassificationFields(PooledInputFields, kw_only=True):
    """The JSON fields of `POST /classify`: vLLM's."""


class ClassificationRequest(NamedTuple):
    """A checked request for labels. See `PooledRequest`."""

    generation: GenerationRequest
    labels: tuple[str, ...]
    activation: LogitActivation

    @property
    def prompt_field(self) -> str:
        """`input`."""
        return "input"

    @property
    def elements(self) -> int:
        """One for each input."""
        return len(self.generation.prompts)

    def element(self, number: int, choices: Sequence[ChoiceState]) -> bytes:
        """Returns the JSON of one element of `data`: the likeliest label, and what there is of all of them."""
        logits = vector_of(choices[number])
        label = self.labels[logits.index(max(logits))]
        probs = activated(logits, self.activation)
        return msgspec.json.encode(
            {"index": choices[number].index, "label": label, "probs": probs, "num_classes": len(logits)}
        )

    def body(self, header: ResponseHeader, choices: Sequence[ChoiceState], elements: Sequence[bytes]) -> bytes:
        """Returns the JSON of a response. `elements`: those of `data`."""
        return list_body(header, choices, elements)


_decoder = msgspec.json.Decoder(ClassificationFields)


def read_classification(body: bytes, cards: list[ModelCard], limits: RequestLimits) -> ClassificationRequest:
    """Reads and checks a body. `cards` are the models that are served. Raises RequestError."""
    fields = decode_body(body, _decoder)
    card = choose_model(fields.model, cards)
    pooling = pooling_of(card, "labels")
    prompts = input_prompts(fields, card, limits)
    generation = pooled_generation("classification", prompts, logit_options(pooling), fields, card, limits)
    return ClassificationRequest(generation, pooling.labels, chosen_activation(wants_activation(fields), pooling))
