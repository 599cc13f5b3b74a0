"""Models with Mamba-2 layers (Mamba-2, Bamba, Granite 4) or gated delta nets (Qwen3-Next, Qwen3.5) beyond what is
tested of every family: their variants, how the states of sequences are kept, what they take, weights in codes, and what
is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.minimax import modeling_minimax

from services.worker.batch.batch import BrokenPlan
from services.worker.models.config import ModelError
from services.worker.models.hf_config import read_model_config
from services.worker.ops.interface import OpsName
from services.worker.ops.torch_mixers.convolution import Prompts, lay_out
from shared.kv_groups import StateRecords
from tests.support.models.rounded_models import rounded
from tests.support.models.tiny_models import STATE_FAMILIES, VOCABULARY, TinyModel, by_lane, make_config, make_model
from tests.support.worker.plan_driver import Driver
from tests.support.worker.planned_engine import PlannedEngine
from tests.support.worker.recorded_logits import assert_logits_agree, record_logits
from tests.support.worker.tiny_backend import tiny_backend

PROMPT = [3 + 7 * i % (VOCABULARY - 3) for i in range(150)]
OUTPUT = 5


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return record_logits(monkeypatch)


@pytest.fixture(scope="module")
def bamba(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("bamba", tmp_path_factory.mktemp("bamba"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Made once for each family, as is what the library answers: the states of a prompt take it a second."""
    return cache(lambda family: make_model(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def mamba2(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("mamba2", tmp_path_factory.mktemp("mamba2"))


def agrees(model: TinyModel, recorded: list[Tensor], budget: int = 77, **settings: Any) -> None:
    """Logits of a prompt in chunks and of what follows it are the reference's."""
    backend = tiny_backend(model.path, dtype="float32", **settings)
    assert_logits_agree(backend, model, PROMPT, OUTPUT, recorded, budget=budget)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mamba2", {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True, "n_groups": 1}),
        (
            "bamba",
            {
                "mamba_proj_bias": True,
                "attention_bias": True,
                "mlp_bias": True,
                "mamba_conv_bias": False,
                "attn_layer_indices": [0, 2],
            },
        ),
        ("granite-hybrid", {"position_embedding_type": "rope", "rope_parameters": {"rope_theta": 1e6}}),
        (
            "qwen3-next",
            {
                "mlp_only_layers": [0],
                "norm_topk_prob": False,
                "attention_bias": True,
                "partial_rotary_factor": 1.0,
                "linear_num_key_heads": 6,
                "linear_conv_kernel_dim": 3,
            },
        ),
        ("qwen3.5", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6, "mrope_section": [2, 1, 1]}}),
        (
            "olmo-hybrid",
            {
                "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
                "linear_allow_neg_eigval": False,
                "attention_bias": True,
                "tie_word_embeddings": True,
                "layer_types": ["full_attention", "linear_attention", "full_attention"],
            },
        ),
        (
            "kimi-linear",
            {
                "q_lora_rank": 20,
                "linear_conv_kernel_dim": 3,
                "linear_head_dim": 20,
                "norm_topk_prob": False,
                "n_group": 1,
                "topk_group": 1,
                "n_shared_experts": 2,
                "layer_types": ["full_attention", "linear_attention", "linear_attention"],
                "mlp_layer_types": ["sparse", "dense", "sparse"],
            },
        ),
        (
            "ling-3",
            {
                "q_lora_rank": 20,
                "short_conv_kernel_size": 3,
                "head_dim": 20,
                "kda_safe_gate": False,
                "norm_topk_prob": False,
                "n_group": 1,
                "topk_group": 1,
                "n_shared_experts": 2,
                "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
                "layer_types": ["full_attention", "linear_attention", "linear_attention"],
                "mlp_layer_types": ["sparse", "dense", "sparse"],
            },
        ),
        (
            "minimax",
            {
                "layer_types": ["full_attention", "full_attention", "linear_attention"],
                "tie_word_embeddings": True,
                "sliding_window": 24,
                "rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0},
                "num_experts_per_tok": 3,
                "full_attn_alpha_factor": 1,
                "linear_attn_beta_factor": 1,
            },
        ),
    ],
    ids=[
        "mamba2-biased-tied",
        "bamba-biased",
        "granite-rotated",
        "qwen3-next-biased-dense",
        "qwen3.5-sections",
        "olmo-rotated",
        "kimi-query-latents",
        "ling-rates-without-bound",
        "minimax-sliding",
    ],
)
def test_variants_are_as_the_reference_has_them(
    tmp_path: Path, recorded: list[Tensor], family: str, changes: dict[str, Any]
) -> None:
    agrees(make_model(family, tmp_path, **changes), recorded)


def test_olmos_tensors_are_found_as_they_are_published(tmp_path: Path, recorded: list[Tensor]) -> None:
    """What the library writes again has convolutions in thirds, and one name for norms before and behind."""
    model = make_model("olmo-hybrid", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, weight in model.reference.state_dict().items():
        if name.endswith("conv1d.weight"):
            for part, rows in zip("qkv", torch.split(weight, [36, 36, 60]), strict=True):
                tensors[name.replace("conv1d", f"{part}_conv1d")] = rows.contiguous()
    attends = "model.layers.1."
    tensors[f"{attends}post_attention_layernorm.weight"] = tensors.pop(f"{attends}feedforward_layer_norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    agrees(model, recorded)
    name = "model.layers.2.linear_attn.v_conv1d.weight"
    save_file(tensors | {name: tensors[name][1:].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"v_conv1d.weight have shape \[131, 1, 4\] together, the config asks for"):
        tiny_backend(tmp_path)


@pytest.mark.parametrize("ops", ["torch", "native"])
def test_minimax_is_served_as_it_is_published(
    tmp_path: Path, recorded: list[Tensor], monkeypatch: pytest.MonkeyPatch, ops: OpsName
) -> None:
    """With the keys of the Hub, which say more than the library's: half a head is rotated, and outputs join rows as
    they are before their norm. The library's parts are put together so."""

    def turned(q: Tensor, k: Tensor, *angles: Tensor) -> tuple[Tensor, Tensor]:
        parts = rotated(q[..., :8], k[..., :8], *angles)
        return tuple(torch.cat((part, whole[..., 8:]), dim=-1) for part, whole in zip(parts, (q, k), strict=True))

    def forward(layer: Any, hidden_states: Tensor, **given: Any) -> Tensor:
        mixed, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **given)
        rows = hidden_states * layer.attn_alpha_factor + mixed * layer.attn_beta_factor
        return rows * layer.mlp_alpha_factor + layer.mlp(layer.post_attention_layernorm(rows)) * layer.mlp_beta_factor

    rotated = modeling_minimax.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_minimax, "apply_rotary_pos_emb", turned)
    monkeypatch.setattr(modeling_minimax.MiniMaxDecoderLayer, "forward", forward)
    model = make_model("minimax", tmp_path)
    rotary = model.reference.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq[::2].clone()  # the powers of eight elements among those of sixteen
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["attn_type_list"] = [int(kind == "full_attention") for kind in config.pop("layer_types")]
    for kind, published in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp")):
        for factor in ("alpha", "beta"):
            config[f"layernorm_{published}_{factor}"] = config.pop(f"{kind}_{factor}_factor")
    published = {"architectures": ["MiniMaxText01ForCausalLM"], "model_type": "minimax_text_01", "rotary_dim": 8}
    path.write_text(json.dumps(config | published | {"postnorm": False, "shared_intermediate_size": 0}))
    agrees(model, recorded, ops=ops)


def test_kimis_files_are_read_as_they_are_published(tmp_path: Path, recorded: list[Tensor]) -> None:
    """The library writes dense MLPs under the name of experts, and another configuration."""
    model = make_model("kimi-linear", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace(".0.block_sparse_moe.", ".0.mlp."): each for name, each in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    own = {"kda_layers": [1, 3], "full_attn_layers": [2], "head_dim": config.pop("linear_head_dim")}
    own |= {"num_heads": config.pop("linear_num_heads"), "short_conv_kernel_size": config.pop("linear_conv_kernel_dim")}
    del config["layer_types"], config["mlp_layer_types"]
    path.write_text(json.dumps(config | {"linear_attn_config": own, "first_k_dense_replace": 1, "mla_use_nope": True}))
    agrees(model, recorded)


def test_kimis_files_are_read_as_the_library_computes_them(tmp_path: Path, recorded: list[Tensor]) -> None:
    """With a module that makes rates, one convolution, and all experts of a layer in one tensor."""
    model = make_model("kimi-linear", tmp_path)
    model.reference.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.self_attn.forget_gate.A_log" in load_file(tmp_path / "model.safetensors")
    agrees(model, recorded)
    agrees(model, recorded, ops="torch", budget=1000)


ROUTED_LIMITS = [0, 0.0, 0.5, 0.25]
SHARED_LIMITS = [9.0, 0.5, 0.75]
"""The first of a layer without experts; of the last one there is none."""


def swiglustep(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """As vLLM's `SwigluStepAndMul`."""
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


class LimitedMlp(nn.Module):
    """`transformers`' MLP, and a limit."""

    def __init__(self, mlp: Any, limit: float) -> None:
        super().__init__()
        self.mlp, self.limit = mlp, limit

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.mlp.down_proj(swiglustep(self.mlp.gate_proj(x), self.mlp.up_proj(x), self.limit))
        return down


class LimitedExperts(nn.Module):
    """`transformers`' experts, and a limit."""

    def __init__(self, experts: Any, limit: float) -> None:
        super().__init__()
        self.experts, self.limit = experts, limit

    def forward(self, x: Tensor, chosen: Tensor, chances: Tensor) -> Tensor:
        mixed = torch.zeros_like(x)
        for number, (first, second) in enumerate(zip(self.experts.gate_up_proj, self.experts.down_proj, strict=True)):
            gate, up = F.linear(x, first).chunk(2, dim=-1)
            share = (chances * (chosen == number)).sum(dim=-1, keepdim=True)
            mixed += share * F.linear(swiglustep(gate, up, self.limit), second)
        return mixed


def test_lings_files_are_read_as_they_are_published(tmp_path: Path, recorded: list[Tensor]) -> None:
    """The library writes outputs of all layers under the name that those have which attend, and other keys; and it has
    no limits."""
    model = make_model("ling-3", tmp_path, num_hidden_layers=4, layer_types=None, layer_group_size=2)
    for layer, routed, shared in zip_longest(model.reference.model.layers, ROUTED_LIMITS, SHARED_LIMITS):
        if routed:
            layer.mlp.experts = LimitedExperts(layer.mlp.experts, routed)
        if shared and hasattr(layer.mlp, "shared_experts"):
            layer.mlp.shared_experts = LimitedMlp(layer.mlp.shared_experts, shared)
    tensors = load_file(tmp_path / "model.safetensors")
    with_states = (".0.attention.", ".2.attention.")
    renamed = {
        name.replace(".dense.", ".o_proj.") if any(each in name for each in with_states) else name: each
        for name, each in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"], config["mlp_layer_types"], config["linear_num_heads"], config["linear_conv_kernel_dim"]
    scaling = config.pop("rope_parameters")
    published = {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "head_dim": config.pop("linear_head_dim"),
        "max_position_embeddings": config.pop("model_max_length"),
        "n_group": config.pop("num_expert_group"),
        "num_experts_per_tok": config.pop("num_experts_per_token"),
        "norm_topk_prob": config.pop("moe_renormalize"),
        "rope_theta": scaling.pop("rope_theta"),
        "rope_scaling": scaling,
        "gated_attention_proj_granularity_type": "head_wise",
        "no_kda_lora": True,
        "rope_interleave": True,
        "score_function": "sigmoid",
        "expert_swiglu_limit_list": ROUTED_LIMITS,
        "share_expert_swiglu_limit_list": SHARED_LIMITS,
    }
    path.write_text(json.dumps(config | published))
    agrees(model, recorded)
    agrees(model, recorded, ops="torch", budget=1000)


def test_lings_files_are_read_as_the_library_computes_them(tmp_path: Path, recorded: list[Tensor]) -> None:
    model = make_model("ling-3", tmp_path)
    model.reference.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.self_attn.forget_gate.A_log" in load_file(tmp_path / "model.safetensors")
    agrees(model, recorded)
    agrees(model, recorded, ops="torch", budget=1000)


def test_of_a_checkpoint_with_a_vision_tower_the_language_model_is_read(tmp_path: Path, recorded: list[Tensor]) -> None:
    """As Qwen3.5 is published: other names of tensors, and a configuration within the configuration."""
    text = make_config("qwen3.5", eos_token_id=5)
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_position_embeddings": 16}
    whole = Qwen3_5Config(
        text_config=text.to_dict(), vision_config={**vision, "out_hidden_size": 48}, tie_word_embeddings=True
    )
    torch.manual_seed(3)
    model = Qwen3_5ForConditionalGeneration(whole).eval()
    model.save_pretrained(tmp_path)
    agrees(TinyModel("qwen3.5", tmp_path, model), recorded)
    assert read_model_config(tmp_path).eos_token_ids == (5,)


@pytest.mark.parametrize("ops", ["torch", "native"])
@pytest.mark.parametrize("family", by_lane(STATE_FAMILIES))
def test_rounded_weights_are_those_of_all_projections(
    tmp_path: Path, recorded: list[Tensor], family: str, ops: OpsName
) -> None:
    model = make_model(family, tmp_path)
    exact = model.logits(PROMPT)
    rounded(model.reference, "int8")
    agrees(model, recorded, ops=ops, quantization="int8")
    assert (model.logits(PROMPT) - exact).abs().max() > 1e-2, "weights that were not rounded would agree, too"


@pytest.mark.parametrize("family", ["mamba2", "mamba"])
def test_prompts_are_laid_out_once_in_a_step(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in each layer: on a GPU that takes copies from the host."""
    backend, laid_out = tiny_backend(make_model(family, tmp_path).path), []

    def counted(*given: Any) -> Prompts:
        laid_out.append(given)
        return lay_out(*given)

    monkeypatch.setattr("services.worker.ops.torch_mixers.states.lay_out", counted)
    driver = Driver(backend, budget=60)
    driver.add(PROMPT, 1)
    driver.run()
    assert len(laid_out) == 3


def test_a_sequence_begins_without_what_its_slot_held(bamba: TinyModel) -> None:
    """Two slots, one after the other's sequence in each; among them one that begins with a single token, and one whose
    states are no numbers any more."""
    backend = tiny_backend(bamba.path, max_num_seqs=2)
    driver = Driver(backend)
    for tokens in (PROMPT[:9], PROMPT[9:10], PROMPT[20:70], PROMPT[3:4]):
        sequence = driver.add(tokens, OUTPUT)
        driver.run()
        assert sequence.output == bamba.greedy(tokens, OUTPUT)
        for windows, states in (backend.rank.caches[0], backend.rank.caches[2]):
            windows.fill_(torch.nan)
            states.fill_(torch.nan)


def test_a_plan_may_not_begin_a_sequence_behind_what_is_computed(bamba: TinyModel) -> None:
    driver = Driver(tiny_backend(bamba.path))
    first = driver.add(PROMPT, 1)
    driver.step()
    driver.share_prefix(driver.add(PROMPT, 1), first)
    with pytest.raises(BrokenPlan, match="it has no states behind 144 computed tokens"):
        driver.step()


@pytest.mark.parametrize("ops", ["torch", "native"])
@pytest.mark.parametrize("family", by_lane(STATE_FAMILIES))
def test_who_goes_on_from_a_checkpoint_says_what_the_whole_prompt_says(
    tiny: Callable[[str], TinyModel], recorded: list[Tensor], family: str, ops: OpsName
) -> None:
    """A scheduler's core plans: the same prompt again begins behind its last block, and one with the same beginning
    behind what both share. The logits are the reference's."""
    model = tiny(family)
    engine = PlannedEngine(tiny_backend(model.path, dtype="float32", ops=ops, kv_memory_bytes=64 << 20))
    other = [*PROMPT[:100], *PROMPT[:30]]
    for prompt, computed in ((PROMPT, 0), (PROMPT, 144), (other, 0), ([*other[:96], 5, 6, 7], 96)):
        assert engine.generate(prompt, OUTPUT) == (model.greedy(prompt, OUTPUT), computed)
        expected = model.logits([*prompt, *model.greedy(prompt, OUTPUT)])[len(prompt) - 1 : -1]
        assert torch.cat(recorded[-OUTPUT:]).sub(expected).abs().max() < 1e-3


def test_only_attention_has_blocks_and_only_state_spaces_have_states(bamba: TinyModel, mamba2: TinyModel) -> None:
    """Of three layers one attends: two KV heads of 12 elements. A state has 6 heads of 16 by 24 numbers, a window three
    rows of the 192 channels."""
    states = 4 * (6 * 16 * 24 + 3 * (6 * 16 + 2 * 2 * 24))
    half, whole = tiny_backend(bamba.path, max_num_seqs=3), tiny_backend(mamba2.path, max_num_seqs=3, max_model_len=96)
    assert half.rank.decoder.kv_block_bytes == 4 * 2 * 2 * 16 * half.card.block_size
    assert (half.rank.decoder.state_bytes, whole.rank.decoder.state_bytes) == (2 * states, 3 * states)
    assert [tuple(states.shape) for _, states in whole.rank.caches] == [(3, 6, 16, 24)] * 3
    assert (whole.rank.decoder.kv_block_bytes, whole.num_blocks, whole.state_checkpoints) == (0, (3 + 6) * 6, 6)


def test_checkpoints_are_pages_of_records(bamba: TinyModel, mamba2: TinyModel) -> None:
    """A record has the bytes of a block. Without attention it is a whole checkpoint, whose six heads have room for
    whole tokens of a block of 16."""
    half, whole = tiny_backend(bamba.path, max_num_seqs=3), tiny_backend(mamba2.path, max_num_seqs=3, max_model_len=96)
    decoder = half.rank.decoder
    assert half.state_records == StateRecords(pages=-(-decoder.state_bytes // decoder.kv_block_bytes))
    assert whole.state_records == StateRecords(pages=1, alone=True)
    pages, kept = half.state_records.pages * half.state_checkpoints, whole.rank.states.kept
    assert (half.kv.num_blocks, half.kv.pages) == (half.num_blocks + pages, pages)
    assert kept.numel() == 6 * 6 * 2 * 16 * whole.kv.layout.head_dim
    assert 0 <= 4 * kept.shape[1] - whole.rank.decoder.state_bytes < 4 * 6 * 2 * 16


def test_a_published_configuration_without_an_end_is_served(tmp_path: Path, recorded: list[Tensor]) -> None:
    """Older releases of the library wrote `Infinity`, which is no JSON: as in most checkpoints of Mamba-2."""
    model = make_model("mamba2", tmp_path)
    config = tmp_path / "config.json"
    text = json.loads(config.read_text()) | {"time_step_limit": [0.0, float("inf")]}
    config.write_text(json.dumps(text))
    assert "Infinity]" in config.read_text()
    agrees(model, recorded)


def test_a_model_without_positions_is_as_long_as_is_asked(mamba2: TinyModel) -> None:
    assert tiny_backend(mamba2.path, max_num_seqs=1).card.max_model_len == 32_768
    assert tiny_backend(mamba2.path, max_num_seqs=1, max_model_len=100_000).card.max_model_len == 100_000


@pytest.mark.features("states", "KV connector", refused=True)
@pytest.mark.features("states", "hybrid KV cache", refused=True)
@pytest.mark.refuses("layers with states (Mamba-2, Bamba, …)", "--kv-connector", "--hybrid-kv-cache on")
@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"kv_memory_bytes": 1 << 20, "max_num_seqs": 200},
            "max_num_seqs 200: the states of so many sequences take ",
        ),
        ({"kv_connector": True}, "kv_connector: a model with state-space layers (BambaForCausalLM) has states"),
        ({"hybrid_kv_cache": "on"}, "hybrid_kv_cache on: a model with state-space layers (BambaForCausalLM) has one"),
    ],
    ids=["memory", "connector", "groups"],
)
def test_what_does_not_combine_is_refused_at_start(bamba: TinyModel, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=re.escape(complaint)):
        tiny_backend(bamba.path, **settings)
