"""Tables of the rotation, which are made in parts, beside what `transformers` computes for each position."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from services.worker.models.rope import PlainRope, Rope, YarnRope, cos_sin_table

POSITIONS = (0, 1, 65_535, 65_536, 70_000)
"""On both sides of where one part ends and the next one begins, and the last one."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32_768,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.25,
}


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        (PlainRope(10_000.0), {"rope_type": "default", "rope_theta": 10_000.0}),
        (YarnRope(10_000.0, 4.0, 32_768, 32.0, 1.0, 1.25, True), YARN),
    ],
)
def test_rows_of_all_parts_are_the_librarys(rope: Rope, parameters: dict[str, object]) -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=131_072, rope_parameters=parameters
    )
    positions = torch.tensor([POSITIONS])
    cosines, sines = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    table = cos_sin_table(rope, 16, POSITIONS[-1] + 1)
    assert table.shape == (POSITIONS[-1] + 1, 16)
    assert torch.allclose(table[list(POSITIONS), :8], cosines[0, :, :8], atol=1e-5)
    assert torch.allclose(table[list(POSITIONS), 8:], sines[0, :, :8], atol=1e-5)
