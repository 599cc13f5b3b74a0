"""Checkpoints whose Python code comes with them, by Baton's own code and none of theirs: logits and greedy texts are
those of `transformers` on the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from services.scheduler.core.limits import EngineLimits
from services.worker.backend import BackendError
from services.worker.models.checkpoint import CPU, open_checkpoint
from services.worker.models.config import ModelConfig, ModelError
from services.worker.models.decoder import Decoder
from services.worker.models.hf_config import read_model_config
from services.worker.models.loading import load_weights
from services.worker.models.lora.slots import LoraSettings
from services.worker.models.residual.skips import check_skips
from services.worker.models.sharding import LayerShard, shard_of
from services.worker.ops.torch_ops import PlainLinear, TorchOps
from services.worker.sim.shape import read_shape
from services.worker.speculation.settings import SpeculationSettings
from shared.ids import ModelName
from tests.support.models.published_layouts import LAYOUTS, PublishedModel, make_published, write_published_adapter
from tests.support.models.published_shapes import HEADS
from tests.support.models.quantised_files import awq, gptq
from tests.support.models.tiny_models import POSITIONS
from tests.support.worker.library_situations import check_mixed_batch, check_resumed_sequences, prompt
from tests.support.worker.plan_driver import Driver
from tests.support.worker.rank_processes import RankProcesses, rank_processes
from tests.support.worker.recorded_logits import assert_logits_agree, record_logits
from tests.support.worker.tiny_backend import tiny_backend

OUTPUT = 4
ALIKE = ("SarvamMLAForCausalLM", "MiniCPMForCausalLM (experts)", "Plamo3ForCausalLM", "JAISLMHeadModel")
"""Which differ from others by what logits show."""
Made = Callable[[str], PublishedModel]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The checkpoint of a layout, which is written once."""
    return cache(lambda name: make_published(name, tmp_path_factory.mktemp("published")))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return record_logits(monkeypatch)


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_library(name: str, made: Made, recorded: list[Tensor]) -> None:
    model = made(name)
    backend = tiny_backend(model.path, ops="native")
    assert "transformers" not in backend.rank.decoder.ops_name
    assert_logits_agree(backend, model, prompt(70), OUTPUT, recorded, budget=32)


@pytest.mark.parametrize(
    "name",
    [
        *("InternLM2ForCausalLM", "ChatGLMModel", "BaichuanForCausalLM (13B)", "BailingMoeV2ForCausalLM"),
        *("SolarForCausalLM", "OuroForCausalLM"),
        *(pytest.param(name, marks=pytest.mark.extras) for name in ALIKE),
    ],
)
def test_batches_and_shared_prefixes(name: str, made: Made) -> None:
    model = made(name)
    backend = tiny_backend(model.path, ops="native")
    check_mixed_batch(model, backend)
    backend.reset()
    check_resumed_sequences(model, backend)


@pytest.mark.features("LoRA")
@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("InternLM2ForCausalLM", ("wqkv", "wo", "w1", "w2", "w3")),
        ("ChatGLMModel", ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")),
        ("TeleChat2ForCausalLM", ("query", "key_value", "down_proj")),
        ("BaiChuanForCausalLM", ("W_pack",)),
        ("QWenLMHeadModel", ("c_attn", "c_proj", "w1", "w2")),
        ("BailingMoeV2ForCausalLM", ("query_key_value", "dense")),
        ("JAISLMHeadModel", ("c_attn", "c_proj", "c_fc", "c_fc2")),
        ("OuroForCausalLM", ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")),
        ("Plamo3ForCausalLM", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    ],
)
def test_adapters_have_the_published_names(
    name: str, ends: tuple[str, ...], made: Made, tmp_path: Path, recorded: list[Tensor]
) -> None:
    model = made(name)
    merged = write_published_adapter(model, tmp_path / "adapter", ends)
    settings = LoraSettings(((ModelName("a"), merged.path),), 1, 8)
    backend = tiny_backend(model.path, ops="native", loras=settings)
    driver, tokens = Driver(backend, budget=32), prompt(40)
    recorded.clear()
    sequence = driver.add(tokens, OUTPUT, lora=backend.card.loras[0].id)
    driver.run()
    expected = merged.logits(sequence.tokens)[len(tokens) - 1 : -1]
    assert torch.cat(recorded[-OUTPUT:]).sub(expected).abs().max() < 1e-3
    assert (model.logits(sequence.tokens)[len(tokens) - 1 : -1] - expected).abs().max() > 0.1


@pytest.mark.parametrize("name", ["InternLM2ForCausalLM", "QWenLMHeadModel", "ChatGLMModel"])
@pytest.mark.parametrize(
    ("written", "method"),
    [
        (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}),
        (awq, {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}),
    ],
    ids=["gptq", "awq"],
)
def test_codes_have_the_published_names(
    name: str, written: Any, method: dict[str, Any], tmp_path: Path, recorded: list[Tensor]
) -> None:
    model = make_published(name, tmp_path, lambda _, weight: written(weight), quantization_config=method)
    backend = tiny_backend(model.path, ops="native")
    assert_logits_agree(backend, model, prompt(40), OUTPUT, recorded)


_NAMED = {"GlmConfig": "Glm4vForCausalLM", "Gemma3TextConfig": "Gemma3ForCausalLM"}
"""Whose tensors are called as the library's."""


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.extend is None])
def test_a_rank_reads_what_it_reads_by_the_librarys_names(name: str, made: Made) -> None:
    """Of all layers, which those of a stage are some of."""
    model = made(name)
    config = read_model_config(model.path)
    same = _NAMED.get(LAYOUTS[name].reference, "LlamaForCausalLM")
    for rank, ranks in ((0, 1), (1, 2), (3, 4) if config.num_heads == HEADS else (0, 2)):
        share = shard_of(config, rank, ranks)
        published, library = (
            loaded(folder, replace(config, architecture=each), share)
            for folder, each in ((model.path, config.architecture), (model.same, same))
        )
        assert len(published) == len(library) > 20
        assert all(torch.equal(*pair) for pair in zip(published, library, strict=True))


def loaded(folder: Path, config: ModelConfig, share: LayerShard) -> list[Tensor]:
    """All tensors of a rank's weights, in an order of their places."""
    ops = TorchOps(CPU, torch.float32)
    with open_checkpoint(folder, torch.float32) as checkpoint:
        return list(_tensors(load_weights(checkpoint, config, share, ops, CPU, 64)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for each in fields(value):
            yield from _tensors(getattr(value, each.name))
    elif isinstance(value, PlainLinear):
        yield from _tensors((value.weight.to_dense() if value.onednn else value.weight, value.bias))
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)


@pytest.mark.parametrize(
    ("name", "keys", "complaint"),
    [
        ("ChatGLMModel", {"position_encoding_2d": True}, "position_encoding_2d is not supported: ChatGLM-6B"),
        ("ChatGLMModel", {"vision_config": {}}, "vision_config is not supported"),
        ("ChatGLMModel", {"rmsnorm": False}, "rmsnorm"),
        ("ChatGLMModel", {"kv_channels": 18}, "kv_channels 18: half of it has no pairs"),
        ("MiniCPMForCausalLM", {"num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8 experts"),
        ("SarvamMoEForCausalLM", {"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias"),
        ("SarvamMoEForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob false is not supported; true is"),
        ("Param2MoEForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob false is not supported; true is"),
        ("Param2MoEForCausalLM", {"use_qk_norm": None}, "use_qk_norm"),
        ("SarvamMLAForCausalLM", {"rope_scaling": None}, "rope_scaling is missing"),
        ("SarvamMLAForCausalLM", {"score_function": "softmax"}, "score_function"),
        ("SarvamMLAForCausalLM", {"moe_shared_expert_intermediate_size": 7}, "expert_intermediate_size 7 is not supp"),
        ("TeleFLMForCausalLM", {"output_mult": 0}, "output_mult 0 is not supported: with use_mup"),
        ("JAISLMHeadModel", {"position_embedding_type": "learned"}, "position_embedding_type"),
        ("JAISLMHeadModel", {"activation_function": "gelu"}, "activation_function"),
        ("JAISLMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("JAISLMHeadModel", {"alibi_scaling": {"type": "linear", "factor": 2.0}}, "alibi_scaling"),
        ("JAISLMHeadModel", {"mup_width_scale": 0}, "mup_width_scale 0.0 of logits is not positive"),
        ("OuroForCausalLM", {"early_exit_threshold": 0.5}, "early_exit_threshold 0.5 is not supported; 1 is"),
        ("OuroForCausalLM", {"early_exit_step": 1}, "early_exit_step 1 is not supported; 2 is"),
        ("OuroForCausalLM", {"total_ut_steps": 0}, "total_ut_steps 0 of 3 layers is not supported"),
        ("OuroForCausalLM", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("Plamo3ForCausalLM", {"rope_scaling_factor": 4}, "rope_scaling_factor 4.0 is not supported"),
        ("Plamo3ForCausalLM", {"scale_embedding": True}, "scale_embedding"),
        ("Plamo3ForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("Plamo3ForCausalLM", {"window_size": None}, "window_size is missing: releases"),
        ("Plamo3ForCausalLM", {"sliding_window": [24, 9, None]}, r"sliding_window \[24, 9, None\] is not supported"),
        ("PanguEmbeddedForCausalLM", {"param_sink_number": 128}, "param_sink_number"),
        ("PanguEmbeddedForCausalLM", {"interleaved_sliding_window": 9}, "interleaved_sliding_window"),
        ("MiniCPMForCausalLM", {"mixer_types": ["minicpm4"]}, r"mixer_types \['minicpm4'\] is not supported"),
        ("MiniCPMForCausalLM", {"dim_model_base": 0}, "dim_model_base 0.0 have to be positive"),
        ("ChatGLMModel", {"quantization_bit": 4}, "quantization_bit"),
        ("QWenLMHeadModel", {"visual": {}}, "visual is not supported"),
        ("QWenLMHeadModel", {"rotary_pct": 0.25}, "rotary_pct 0.25 is not supported; supported: 1.0"),
        ("QWenLMHeadModel", {"seq_length": 0}, "max_position_embeddings 0 is not positive"),
        ("TeleChat2ForCausalLM", {"base_seqlen": 0}, "base_seqlen 0 is not positive"),
        ("InternLMForCausalLM", {"rotary": {"type": "other"}}, "rotary type 'other' is not supported"),
        (
            "MiniCPMForCausalLM",
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": [1.0],
                    "original_max_position_embeddings": 64,
                }
            },
            "short_factor has 1 numbers, 16 rotated elements half as many",
        ),
        ("MiniCPMForCausalLM", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type longrope needs short_factor"),
        (
            "MiniCPMForCausalLM",
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8}},
            "rope_type longrope: original_max_position_embeddings None is no number above 1",
        ),
        ("MiniCPMForCausalLM", {"sparse_config": {"dense_len": -1}}, "sparse_config: dense_len -1 is not supported"),
        ("BailingMoeForCausalLM", {"norm_head": True}, "norm_head"),
        ("BailingMoeForCausalLM", {"use_bias": True}, "use_bias true is not supported"),
        ("BailingMoeForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8 experts"),
        ("BailingMoeV2ForCausalLM", {"n_group": 3}, "n_group 3: 8 experts are no groups of two or more"),
        ("BailingMoeV2ForCausalLM", {"topk_group": 5}, "topk_group 5: there are 4 groups"),
        ("BailingMoeV2ForCausalLM", {"topk_group": 1}, "num_experts_per_tok 3: topk_group 1 has not so many"),
        ("BailingMoeV2ForCausalLM", {"score_function": "softmax"}, "score_function"),
        ("BailingMoeV2ForCausalLM", {"partial_rotary_factor": 2.0}, "partial_rotary_factor 2.0: 32 of 16 elements"),
        ("DeepseekForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("SolarForCausalLM", {"bskcn_3": [6]}, r"bskcn_3 \[6\]: there are 6 layers"),
        ("SolarForCausalLM", {"sliding_window": 1}, "sliding_window 1 is not supported"),
        ("XverseForCausalLM", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        ("MiMoForCausalLM", {"use_sliding_window": True}, "use_sliding_window true is not supported"),
        ("InternLM2ForCausalLM", {"rope_scaling": {"type": "su"}}, "rope_type 'su' is not supported"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(
    name: str, keys: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: .*{complaint}"):
        described(tmp_path, name, **keys)


def test_what_a_prompt_beyond_a_number_of_tokens_changes_is_served_up_to_it(tmp_path: Path) -> None:
    def positions(name: str, **keys: Any) -> int:
        return described(tmp_path, name, **keys).max_positions

    assert positions("QWenLMHeadModel", seq_length=96, max_position_embeddings=512) == 96
    assert positions("TeleChat2ForCausalLM", training_seqlen=100) == 100
    assert positions("MiniCPMForCausalLM", sparse_config={"dense_len": 77}) == 77
    assert positions("InternLM2ForCausalLM", max_position_embeddings=123) == 123
    assert positions("SolarForCausalLM", sliding_window=50) == 50
    assert positions("JAISLMHeadModel", alibi_scaling={"type": "linear", "train_seq_len": 99}) == 99
    assert positions("MiniCPMForCausalLM (4)") == POSITIONS
    assert positions("MiniCPMForCausalLM", sparse_config={}, max_position_embeddings=32768) == 8192


def test_a_draft_model_may_have_inputs_before_outputs(made: Made) -> None:
    model = made("JAISLMHeadModel")
    itself = SpeculationSettings(method="draft", num_speculative_tokens=3, model=str(model.path))
    driver = Driver(tiny_backend(model.path, ops="native", speculation=itself), budget=32, speculate=3)
    sequence = driver.add(prompt(20), 12)
    driver.run()
    assert sequence.output == model.greedy(prompt(20), 12)
    assert driver.accepted > 0


def test_weights_of_loops_are_there_once(made: Made) -> None:
    model = made("OuroForCausalLM")
    decoder = tiny_backend(model.path, ops="torch").rank.decoder
    assert isinstance(decoder, Decoder)
    first, *_, again = decoder.weights.layers[::3]
    assert isinstance(first.qkv, PlainLinear)
    assert isinstance(again.qkv, PlainLinear)
    assert first.qkv is not again.qkv
    assert first.qkv.weight is again.qkv.weight
    matrices = [each.numel() for each in model.unchanged.parameters() if each.ndim == 2]
    assert read_model_config(model.path).parameters == sum(matrices)
    with pytest.raises(
        BackendError, match=r"no models with layers that rows go through several times \(OuroForCausalLM"
    ):
        read_shape(model.path, "auto")


def test_a_stage_has_what_its_layers_join(tmp_path: Path) -> None:
    config = described(tmp_path, "SolarForCausalLM")
    check_skips(config.layers[3:])
    with pytest.raises(ModelError, match=r"layer 0 of the stage joins rows .*\(bskcn_2\): choose another --pp"):
        check_skips(config.layers[4:])


def test_a_length_that_is_not_served_changes_no_rotation(tmp_path: Path) -> None:
    """How much LongRoPE magnifies follows from both lengths of the rotation, not from where attention gets sparse."""
    ropes = {
        described(tmp_path, "MiniCPMForCausalLM (4)", sparse_config=sparse).layers[0].rope
        for sparse in (None, {"dense_len": 77})
    }
    assert len(ropes) == 1


def test_attention_has_biases_where_nothing_is_said(tmp_path: Path) -> None:
    """As the published code has it: a checkpoint without them is refused, one with them would be misread."""
    for name in ("InternLMForCausalLM", "InternLM2ForCausalLM"):
        layout = {key: value for key, value in LAYOUTS[name].config.items() if key != "bias"}
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], **layout}))
        config = read_model_config(tmp_path)
        assert config.qkv_bias
        assert config.output_bias


def described(folder: Path, name: str, **keys: Any) -> ModelConfig:
    own = {"architectures": [name.partition(" ")[0]], **LAYOUTS[name].config, **keys}
    (folder / "config.json").write_text(json.dumps(own))
    return read_model_config(folder)


@pytest.mark.extras
@pytest.mark.parametrize(
    "name",
    [
        *("InternLM2ForCausalLM", "ChatGLMModel", "BaichuanForCausalLM (13B)", "OrionForCausalLM"),
        *("BailingMoeV2ForCausalLM", "BailingMoeForCausalLM", "DeepseekForCausalLM", "SolarForCausalLM"),
        *("SarvamMLAForCausalLM", "MiniCPMForCausalLM (experts)", "PanguEmbeddedForCausalLM", "TeleFLMForCausalLM"),
        *("OuroForCausalLM", "Plamo3ForCausalLM", "JAISLMHeadModel"),
    ],
)
def test_two_ranks_and_two_stages_write_the_same(name: str, made: Made, two_ranks: RankProcesses) -> None:
    model = made(name)
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)
    prompts = [prompt(length, length) for length in (2, 33, 71)]
    for tp, stages in ((2, 1), (1, 2)):
        engine = two_ranks.serve(model.path, tp=tp, stages=stages, ops="native", limits=limits, kv_memory=16 << 20)
        requests = [engine.ask(tokens, OUTPUT) for tokens in prompts]
        engine.run()
        assert [request.tokens for request in requests] == [model.greedy(tokens, OUTPUT) for tokens in prompts]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with rank_processes(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks
