"""Models with latent attention (DeepSeek-V2 and V3) beyond what is tested of every family: their variants, what their
caches take, weights in codes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.ops.interface import OpsName
from tests.support.models.rounded_models import rounded
from tests.support.models.tiny_models import VOCABULARY, TinyModel, make_model
from tests.support.worker.recorded_logits import assert_logits_agree, record_logits
from tests.support.worker.tiny_backend import tiny_backend

PROMPT = [3 + 7 * i % (VOCABULARY - 3) for i in range(40)]
OUTPUT = 5
RANK, ROTATED, LAYERS = 32, 8, 3
"""Of the tiny models."""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return record_logits(monkeypatch)


def agrees(model: TinyModel, recorded: list[Tensor], **settings: Any) -> None:
    """Logits of a prompt in chunks and of what follows it are the reference's."""
    backend = tiny_backend(model.path, dtype="float32", **settings)
    assert_logits_agree(backend, model, PROMPT, OUTPUT, recorded, budget=24)


@pytest.mark.parametrize("ops", ["torch", "native"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek-v2", {"topk_method": "greedy", "n_group": None, "topk_group": None, "rope_parameters": None}),
        ("deepseek-v2", {"q_lora_rank": 20, "attention_bias": True, "routed_scaling_factor": 4.0}),
        ("deepseek-v3", {"q_lora_rank": None, "attention_bias": True, "rope_interleave": False}),
        ("deepseek-v3", {"norm_topk_prob": False, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}),
    ],
    ids=["as-lite", "v2-biased", "v3-biased", "v3-ungrouped"],
)
def test_variants_are_as_the_reference_has_them(
    tmp_path: Path, recorded: list[Tensor], family: str, changes: dict[str, Any], ops: OpsName
) -> None:
    agrees(make_model(family, tmp_path, **changes), recorded, ops=ops)


@pytest.mark.parametrize("ops", ["torch", "native"])
def test_rounded_weights_are_those_of_all_but_what_latents_are_multiplied_with(
    tmp_path: Path, recorded: list[Tensor], ops: OpsName
) -> None:
    model = make_model("deepseek-v3", tmp_path)
    exact = model.logits(PROMPT)
    rounded(model.reference, "int8")
    agrees(model, recorded, ops=ops, quantization="int8")
    assert (model.logits(PROMPT) - exact).abs().max() > 1e-2, "weights that were not rounded would agree, too"


@pytest.mark.parametrize("ops", ["torch", "native"])
def test_a_token_is_cached_as_one_latent_and_one_rotated_key(tmp_path: Path, ops: OpsName) -> None:
    path = make_model("deepseek-v3", tmp_path).path
    native = tiny_backend(path, ops=ops)
    assert native.rank.decoder.kv_block_bytes == 4 * LAYERS * native.card.block_size * (RANK + ROTATED)
    library = tiny_backend(path, ops=ops, model_impl="transformers")
    assert library.rank.decoder.kv_block_bytes > 3 * native.rank.decoder.kv_block_bytes, "keys and values of four heads"


@pytest.mark.refuses(
    "latent attention (MLA)",
    "--kv-cache-dtype fp8",
    "--kv-cache-dtype int8_per_token_head",
    "--attention flash-attn",
)
@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8: latents are kept in the model's dtype"),
        (
            {"kv_cache_dtype": "int8_per_token_head"},
            "kv_cache_dtype int8_per_token_head: latents are kept in the model",
        ),
        ({"attention": "flash-attn"}, "attention flash-attn: it knows no latents"),
    ],
    ids=["fp8", "int8", "flash-attn"],
)
def test_what_does_not_combine_is_refused_at_start(tmp_path: Path, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        tiny_backend(make_model("deepseek-v2", tmp_path).path, **settings)
