"""What a step must move and compute, against sums done by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.worker.measure.roofline.traffic import ModelTraffic, experts_met
from services.worker.measure.roofline.wire import StepCase, measured_shape_names, shape_file, shape_names
from services.worker.models.config import Mixture, ModelConfig
from services.worker.models.hf_config import read_model_config
from services.worker.models.sharding import shard_of
from tests.support.models.config_files import active_parameters
from tests.support.models.tiny_nas import CONFIG as NAS

KV_TOKEN = 2 * 2 * 4 * 2
"""A key and a value, 2 heads of 4 elements of 2 bytes."""

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_hidden_layers": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
"""A layer: 8 · 4 · (4 + 2 + 2) = 256 elements before attention, 8 · 4 · 4 = 128 behind it, 3 · 8 · 16 = 384 of MLP."""
HEAD = 32 * 8


def read(folder: Path, **changes: object) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(SMALL | changes))
    return read_model_config(folder)


def traffic(config: ModelConfig, ranks: int = 1, kv_token: int = KV_TOKEN) -> ModelTraffic:
    return ModelTraffic(config, shard_of(config, 0, ranks), 2, kv_token)


def test_decodes_read_all_weights_once_and_every_context(tmp_path: Path) -> None:
    step = traffic(read(tmp_path)).step(StepCase("decode", 3, 10))
    assert step.weight_bytes == 2 * (2 * (256 + 128 + 384) + HEAD)
    assert step.kv_read_bytes == 2 * 3 * 10 * KV_TOKEN
    assert step.kv_written_bytes == 2 * 3 * KV_TOKEN
    assert step.flops == 2 * 3 * (2 * 768 + HEAD) + 4 * 4 * 4 * (2 * 3 * 10)


def test_of_a_prompt_only_the_last_row_goes_through_the_end(tmp_path: Path) -> None:
    step = traffic(read(tmp_path)).step(StepCase("prefill", 1, 5))
    layers = 2 * 5 * 768 + 2 * 5 * 256 + 2 * 1 * (128 + 384)
    assert step.flops == layers + 2 * HEAD + 4 * 4 * 4 * 2 * (1 + 2 + 3 + 4 + 5)
    assert step.kv_read_bytes == step.kv_written_bytes == 2 * 5 * KV_TOKEN


def test_a_window_bounds_what_is_seen(tmp_path: Path) -> None:
    config = read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=4)
    decode, prefill = (traffic(config).step(StepCase(kind, 1, 5)) for kind in ("decode", "prefill"))
    assert decode.kv_read_bytes == 2 * 4 * KV_TOKEN
    whole = traffic(read(tmp_path)).step(StepCase("prefill", 1, 5))
    assert whole.flops - prefill.flops == 4 * 4 * 4 * 2 * (15 - (1 + 2 + 3 + 4 + 4))


def test_a_rank_has_its_share(tmp_path: Path) -> None:
    config = read(tmp_path)
    whole, half = (
        traffic(config).step(StepCase("decode", 2, 7)),
        traffic(config, 2, KV_TOKEN // 2).step(StepCase("decode", 2, 7)),
    )
    for name in ("weight_bytes", "kv_read_bytes", "kv_written_bytes", "flops"):
        assert getattr(half, name) == getattr(whole, name) / 2, name


def test_experts_are_read_as_far_as_rows_go_to_them(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        norm_topk_prob=True,
    )
    expert, router = 3 * 8 * 8, 8 * 4
    one, two = (traffic(config).step(StepCase("decode", rows, 1)) for rows in (1, 2))
    assert one.weight_bytes == 2 * (2 * (256 + 128 + router + 2 * expert) + HEAD)
    assert two.weight_bytes == 2 * (2 * (256 + 128 + router + 3 * expert) + HEAD)
    assert one.flops == 2 * (2 * (256 + 128 + router + 2 * expert) + HEAD) + 4 * 4 * 4 * 2
    assert two.flops == 2 * one.flops
    assert traffic(config).weight_bytes == 2 * (2 * (256 + 128 + router + 4 * expert) + HEAD)


def test_many_rows_meet_all_experts() -> None:
    mixture = Mixture(experts=128, chosen=8, intermediate_size=1, renormalised=True)
    assert experts_met(mixture, 1) == pytest.approx(8)
    assert experts_met(mixture, 2) == pytest.approx(8 + 8 * (1 - 8 / 128))
    assert experts_met(mixture, 10_000) == pytest.approx(128)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("llama-3.1-8b", 8.03, 7.50), ("qwen3-0.6b", 0.60, 0.60), ("qwen3-30b-a3b", 30.5, 3.04)],
)
def test_the_shapes_are_those_of_their_names(tmp_path: Path, name: str, billions: float, active: float) -> None:
    path = shape_file(name)
    assert path is not None
    (tmp_path / "config.json").write_bytes(path.read_bytes())
    config = read_model_config(tmp_path)
    assert config.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert active_parameters(config) / 1e9 == pytest.approx(active, rel=0.01)
    assert traffic(config).weight_bytes / 2e9 == pytest.approx(
        billions - (0 if config.tied_embeddings else config.vocab_size * config.hidden_size / 1e9), rel=0.01
    )


def test_every_shape_is_known_by_name() -> None:
    assert shape_names() == ["deepseek-v3", "llama-3.1-8b", "qwen3-0.6b", "qwen3-30b-a3b"]
    assert measured_shape_names() == shape_names()[1:], "no latent attention"
    assert shape_file("gpt-5") is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_behind_attention_are_counted(tmp_path: Path, ranks: int) -> None:
    """Nemotron-NAS: 5 MLPs, one of 256 columns by a factor, and 4 matrices; heads of all layers are as many."""
    (tmp_path / "config.json").write_text(json.dumps(NAS))
    config = read_model_config(tmp_path)
    hidden = config.hidden_size
    following = hidden * (3 * (128 + 256 + 96 + 64 + 96) + 4 * hidden)
    attention = len(config.layers) * hidden * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    head = config.vocab_size * hidden
    of_rank = ModelTraffic(config, shard_of(config, 0, ranks), 2, KV_TOKEN)
    assert of_rank.weight_bytes == 2 * (following + attention + head) // ranks
    assert of_rank.step(StepCase("decode", 1, 4)).weight_bytes == of_rank.weight_bytes
