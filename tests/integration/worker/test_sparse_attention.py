"""Models with sparse attention (DeepSeek-V3.2, GLM-5, HY4, Mistral Large 4, MiniMax-M3) beyond what is tested of every
family: variants, what their caches take, published checkpoints, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.models.chosen_blocks.limits import chosen_blocks_of
from services.worker.models.config import ModelError
from services.worker.models.hf_config import read_model_config
from services.worker.models.hyper_connections.limits import check_streams
from services.worker.models.latent.attention import check_latent
from services.worker.models.loaded_model import LoadSettings
from services.worker.models.sharding import PipelineStage, stage_of
from services.worker.ops.interface import OpsName
from services.worker.platforms.installed import built_in_platform
from services.worker.speculation.settings import SpeculationSettings
from tests.support.models.quantised_files import quantised
from tests.support.models.tiny_models import VOCABULARY, TinyModel, make_model
from tests.support.worker.plan_driver import Driver
from tests.support.worker.recorded_logits import assert_logits_agree, record_logits
from tests.support.worker.tiny_backend import tiny_backend

PROMPT = [3 + 7 * i % (VOCABULARY - 3) for i in range(50)]
OUTPUT = 5
RANK, ROTATED, INDEX, LAYERS = 32, 8, 20, 3
"""Of the tiny models."""
SPARSE = [
    ("deepseek-v3.2", "native"),
    ("glm-5", "torch"),
    ("hy4", "native"),
    ("mistral-large-4", "native"),
    ("glm-5-next", "native"),
    ("minimax-m3", "native"),
    ("qwen4", "torch"),
]
ALL = {"minimax-m3": {"index_topk_blocks": 20}, "qwen4": {"indexer_budget": 320}}
"""What has all tokens chosen, where it is not the number of the others."""
WHOLE_BLOCKS = {"moe_intermediate_size": 64, "q_lora_rank": 64, "v_head_dim": 16}
"""So that inputs are whole groups."""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return record_logits(monkeypatch)


def agrees(model: TinyModel, recorded: list[Tensor], **settings: Any) -> None:
    """Logits of a prompt in chunks and of what follows it are the reference's."""
    backend = tiny_backend(model.path, dtype="float32", **settings)
    assert_logits_agree(backend, model, PROMPT, OUTPUT, recorded, budget=24)


@pytest.mark.parametrize(
    ("family", "changes", "ops"),
    [
        ("deepseek-v3.2", {"index_topk": 52, "attention_bias": True}, "native"),
        ("deepseek-v3.2", {"index_head_dim": 8, "first_k_dense_replace": 0, "mlp_layer_types": None}, "torch"),
        ("glm-5", {"indexer_types": None, "n_group": 1, "topk_group": 1}, "native"),
        ("glm-5", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "torch"),
        (
            "hy4",
            {"indexer_types": None, "mlp_layer_types": None, "hc_mult": 4, "hc_magnitude": 1.5, "swiglu_limit": 0.1},
            "torch",
        ),
        (
            "glm-5-next",
            {"index_kpool": 12, "linear_lower_bound": None, "norm_topk_prob": False, "swiglu_limit": 0.1},
            "torch",
        ),
        (
            "glm-5-next",
            {
                "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
                "indexer_types": ["full", "full", "shared", "full"],
            },
            "native",
        ),
        ("minimax-m3", {"index_local_blocks": 0, "layer_types": ["minimax_m3_sparse"] * 3}, "torch"),
        ("minimax-m3", {"index_topk_blocks": 20, "swiglu_limit": 0.1}, "native"),
        ("minimax-m3", {"index_block_size": 32, "index_topk_blocks": 1, "index_head_dim": 20}, "native"),
        (
            "qwen4",
            {"ple_layer_ids": [1, 3], "ngram_size": 4, "ple_embed_dim": 36, "split_ngram_parts": 1}
            | {"eos_token_id": [PROMPT[20], 2], "output_gate_type": None},
            "native",
        ),
        ("mistral-large-4", {"no_rope_layers": None, "kv_source_layers": None, "attention_bias": True}, "torch"),
        ("mistral-large-4", {"no_rope_layers": [0] * 6, "kv_source_layers": [0] * 6, "indexer_types": None}, "native"),
    ],
    ids=[
        "from dense on",
        "all rotated",
        "as published",
        "named layers",
        "streams",
        "one pool",
        "shared pools",
        "blocks that are not local",
        "all blocks",
        "one block",
        "more n-grams",
        "own latents",
        "one's latents",
    ],
)
def test_variants_are_as_the_reference_has_them(
    tmp_path: Path, recorded: list[Tensor], family: str, changes: dict[str, Any], ops: OpsName
) -> None:
    agrees(make_model(family, tmp_path, **changes), recorded, ops=ops)


@pytest.mark.parametrize(("family", "ops"), SPARSE)
def test_a_part_of_a_long_prompt_is_what_is_attended_to(
    tmp_path: Path, recorded: list[Tensor], family: str, ops: OpsName
) -> None:
    model = make_model(family, tmp_path / "sparse")
    agrees(model, recorded, ops=ops)
    dense = make_model(family, tmp_path / "dense", **ALL.get(family, {"index_topk": 4096}))
    difference = (model.logits(PROMPT) - dense.logits(PROMPT)).abs().amax(dim=1)
    assert difference[:12].max() < 1e-4
    assert difference[-3:].max() > 0.1, "models that attend to everything would agree, too"


def test_rows_are_scored_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: list[Tensor]
) -> None:
    """Scores of all of a prompt's rows and pools would take gigabytes at long contexts."""
    monkeypatch.setattr("services.worker.ops.torch_latent._MAX_SCORES", 100)
    agrees(make_model("glm-5-next", tmp_path), recorded, ops="torch")


@pytest.mark.parametrize("ops", ["torch", "native"])
def test_of_hy4_only_experts_are_limited(tmp_path: Path, recorded: list[Tensor], ops: OpsName) -> None:
    """MLPs and the experts of all rows are not, whatever they are given."""
    model = make_model("hy4", tmp_path)
    exact = model.logits(PROMPT)
    with torch.no_grad():
        for name, weight in model.reference.named_parameters():
            if name.endswith(("experts.gate_up_proj", "mlp.up_proj.weight", "shared_experts.up_proj.weight")):
                weight.mul_(30)
    model.reference.save_pretrained(tmp_path)
    assert (model.logits(PROMPT) - exact).abs().max() > 1e-2
    agrees(model, recorded, ops=ops)


@pytest.mark.features("speculative", "chunked prefill", "preemption")
@pytest.mark.parametrize("family", [family for family, _ in SPARSE])
def test_drafts_chunks_and_preemption_change_no_text(tmp_path: Path, family: str) -> None:
    model = make_model(family, tmp_path)
    ngram = SpeculationSettings(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
    driver = Driver(tiny_backend(model.path, dtype="float32", ops="native", speculation=ngram), budget=17, speculate=3)
    prompts = [[5, 60, 17, 33, 90, 8, 44] * 5, [9], PROMPT]
    sequences = [driver.add(prompt, 12) for prompt in prompts]
    while len(sequences[2].output) < 5:
        driver.step()
    driver.preempt(sequences[2])
    driver.run()
    assert [sequence.output for sequence in sequences] == [model.greedy(prompt, 12) for prompt in prompts]
    assert driver.drafted > 0


@pytest.mark.parametrize("ops", ["torch", "native"])
def test_checkpoints_in_fp8_with_scales_of_blocks_are_read(
    tmp_path: Path, recorded: list[Tensor], ops: OpsName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the published ones: the indexer's weights of heads are numbers, its other matrices codes."""
    left = ("lm_head", "weights_proj", "kv_b_proj")
    monkeypatch.setattr("tests.support.models.quantised_files.LEFT_ALONE", left)
    agrees(quantised(tmp_path, "fp8 of blocks", "deepseek-v3.2", **WHOLE_BLOCKS), recorded, ops=ops)


@pytest.mark.parametrize("ops", ["torch", "native"])
def test_a_token_is_cached_with_a_key_of_the_indexer(tmp_path: Path, ops: OpsName) -> None:
    backend = tiny_backend(make_model("deepseek-v3.2", tmp_path).path, ops=ops)
    each = 4 * LAYERS * backend.card.block_size
    assert backend.rank.decoder.kv_block_bytes == each * (RANK + ROTATED + INDEX)


def test_what_does_not_combine_with_streams_is_refused_at_start(tmp_path: Path) -> None:
    model = make_model("hy4", tmp_path)
    itself = SpeculationSettings(method="draft", num_speculative_tokens=2, model=str(model.path))
    with pytest.raises(ModelError, match=r"a model with several streams \(HYV4ForCausalLM\) drafts for no other"):
        tiny_backend(model.path, speculation=itself)
    medusa = SpeculationSettings(method="medusa", num_speculative_tokens=2, model=str(tmp_path))
    with pytest.raises(ModelError, match="speculative method medusa: HYV4ForCausalLM takes drafts by ngram"):
        tiny_backend(model.path, speculation=medusa)
    chosen, config = LoadSettings(folder=tmp_path, platform=built_in_platform("cpu")), read_model_config(tmp_path)
    whole = stage_of(config, 0, 1)
    check_streams(chosen, config, whole, None)
    with pytest.raises(ModelError, match=r"enable_sp: not for a model with several streams \(HYV4ForCausalLM\)"):
        check_streams(replace(chosen, shared_rows=64), config, whole, None)


def test_what_does_not_combine_with_chosen_blocks_is_refused_at_start(tmp_path: Path) -> None:
    model = make_model("minimax-m3", tmp_path)
    longer = "not for MiniMaxM3VLForCausalLM with a max_model_len of more than 32 tokens, of which an indexer chooses"
    with pytest.raises(ModelError, match=f"kv_cache_dtype fp8: {longer}"):
        tiny_backend(model.path, kv_cache_dtype="fp8")
    chosen, config = LoadSettings(folder=tmp_path, platform=built_in_platform("cpu")), read_model_config(tmp_path)
    assert chosen_blocks_of(chosen, config, 33) == config.block_index
    for changes, name in (
        ({"on_layer": print}, "kv_connector"),
        ({"context_rows": 64}, "prefill_context_parallel_size"),
        ({"attention": "flash-attn"}, "attention flash-attn"),
    ):
        settings = replace(chosen, **changes)
        assert chosen_blocks_of(settings, config, 32) is None
        with pytest.raises(ModelError, match=f"{name}: {longer}"):
            chosen_blocks_of(settings, config, 33)
    itself = SpeculationSettings(method="draft", num_speculative_tokens=2, model=str(model.path))
    with pytest.raises(ModelError, match="drafts for sequences of up to 32 tokens, the model is served with 64"):
        tiny_backend(model.path, speculation=itself, max_model_len=64)
    undivided = "block_size 32 does not divide index_block_size 16, as a max_model_len of more than 32 tokens needs"
    with pytest.raises(ModelError, match=undivided):
        tiny_backend(model.path, block_size=32)
    published = make_model("qwen4", tmp_path / "qwen4", indexer_compress_ratio=4)
    with pytest.raises(ModelError, match="block_size 16 does not divide indexer_compress_ratio 4"):
        tiny_backend(published.path)
    tiny_backend(published.path, max_model_len=35)


def test_keys_of_indexers_take_a_layer_for_as_many_as_have_room(tmp_path: Path) -> None:
    """Two layers' keys of 16 elements fill one half of two heads'."""
    sparse = tiny_backend(make_model("minimax-m3", tmp_path).path).rank.decoder
    assert sparse.kv_block_bytes * LAYERS == tiny_backend(tmp_path, max_model_len=32).rank.decoder.kv_block_bytes * 4


def test_n_grams_are_added_in_the_first_stage(tmp_path: Path) -> None:
    """Only it is given tokens."""
    config = read_model_config(make_model("qwen4", tmp_path, ple_layer_ids=[1, 3]).path)
    settings = LoadSettings(folder=tmp_path, platform=built_in_platform("cpu"))
    check_streams(settings, config, PipelineStage(0, 2, 0, 2), None)
    with pytest.raises(
        ModelError, match=r"layer 2 and others of its stage add embeddings of n-grams \(ple_layer_ids\)"
    ):
        check_streams(settings, config, PipelineStage(1, 2, 2, 3), None)


@pytest.mark.refuses("sparse attention (DSA)", "--kv-cache-dtype fp8", "--model-impl transformers")
def test_what_does_not_combine_is_refused_at_start(tmp_path: Path) -> None:
    model = make_model("glm-5", tmp_path)
    with pytest.raises(ModelError, match="kv_cache_dtype fp8: latents are kept in the model's dtype"):
        tiny_backend(model.path, kv_cache_dtype="fp8")
    with pytest.raises(ModelError, match="layer_types 'indexed_attention' is not supported"):
        tiny_backend(model.path, model_impl="transformers")
    latent = read_model_config(model.path).latent
    assert latent is not None
    behind = PipelineStage(1, 2, 1, LAYERS)
    with pytest.raises(ModelError, match="pp-layers: a stage begins with layer 1, which attends to what the layer"):
        check_latent(latent, "auto", "auto", behind)


def test_a_stage_has_the_latents_that_its_layers_attend_to(tmp_path: Path) -> None:
    latent = read_model_config(make_model("mistral-large-4", tmp_path).path).latent
    assert latent is not None
    with pytest.raises(
        ModelError, match="stage begins with layer 4, and layer 4 of it attends to the latents of layer"
    ):
        check_latent(latent, "auto", "auto", PipelineStage(1, 2, 4, 6))
    for stage in (PipelineStage(0, 2, 0, 3), PipelineStage(1, 2, 3, 6)):
        check_latent(latent, "auto", "auto", stage)


@pytest.mark.parametrize(
    "part", ["alpha", "softmax_scaling.scale", "indexer.softmax_scaling.bias", "q_input_norm.bias"]
)
def test_what_mistral_large_learns_of_positions_counts(tmp_path: Path, recorded: list[Tensor], part: str) -> None:
    """What is made other is followed, and changes what is written."""
    model = make_model("mistral-large-4", tmp_path)
    exact = model.logits(PROMPT)
    with torch.no_grad():
        for name, weight in model.reference.named_parameters():
            if name.endswith(part):
                weight.add_(torch.randn_like(weight))
    model.reference.save_pretrained(tmp_path)
    assert (model.logits(PROMPT) - exact).abs().max() > 1e-2
    agrees(model, recorded, ops="native")


def test_mistral_large_drafts_for_itself(tmp_path: Path) -> None:
    """By the names of published files, within a model with a tower."""
    model = make_model("mistral-large-4", tmp_path)
    itself = SpeculationSettings(method="draft", num_speculative_tokens=3, model=str(model.path))
    driver = Driver(tiny_backend(model.path, dtype="float32", ops="native", speculation=itself), budget=24, speculate=3)
    sequence = driver.add(PROMPT, 12)
    driver.run()
    assert sequence.output == model.greedy(PROMPT, 12)
    assert driver.drafted > 0
