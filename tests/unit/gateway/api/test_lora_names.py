"""A client names an adapter in the model's place."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.gateway.api.completions import read_completion
from services.gateway.api.errors import RequestError
from services.gateway.api.generation import RequestLimits
from shared.ids import LoraId, ModelName
from shared.messages.model_card import LoraCard
from tests.support.gateway.fake_services import CARD

LORA = LoraCard(name=ModelName("poet"), id=LoraId(b"p" * 16), rank=8)
OTHER = replace(CARD, name=ModelName("other"))


def test_the_model_is_the_adapters_and_the_answer_has_its_name() -> None:
    cards = [OTHER, replace(CARD, loras=(LORA,))]
    asked = read_completion(b'{"model": "poet", "prompt": "a"}', cards, RequestLimits())
    assert (asked.model.name, asked.lora, asked.served_name) == (CARD.name, LORA, "poet")
    plain = read_completion(b'{"model": "other", "prompt": "a"}', cards, RequestLimits())
    assert (plain.lora, plain.served_name) == (None, "other")
    only = read_completion(b'{"prompt": "a"}', cards[1:], RequestLimits())
    assert (only.lora, only.served_name) == (None, CARD.name)
    with pytest.raises(RequestError, match="does not exist") as error:
        read_completion(b'{"model": "poem", "prompt": "a"}', cards, RequestLimits())
    assert error.value.status == 404
