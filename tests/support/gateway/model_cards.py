"""Cards of models that a test's requests name."""

from __future__ import annotations

from shared.ids import ModelName
from shared.messages.model_card import ModelCard, PoolingCard


def vectors_card(size: int, *, normalize: bool = True) -> ModelCard:
    """Of a model whose vectors are means of so many elements."""
    return ModelCard(
        name=ModelName("demo"),
        max_model_len=64,
        vocab_size=100,
        eos_token_ids=(2,),
        dtype="float32",
        created=1,
        pooling=PoolingCard(pooling="mean", normalize=normalize, size=size),
    )
