"""Models that `transformers` computes: how they are chosen, what of them is refused, and that they are served right."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Emu3Config, Emu3ForConditionalGeneration, PhimoeConfig
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from services.worker.distributed.communicator import SingleStage
from services.worker.models.config import ModelError
from services.worker.models.fallback.adapters import keep_rotation
from services.worker.models.fallback.library_config import leave_out_towers
from services.worker.models.fallback.pipeline_stage import PassOfStage, class_of_stage, strip_to_stage
from services.worker.models.sharding import PipelineStage
from services.worker.ops.interface import OpsName
from services.worker.speculation.settings import SpeculationSettings
from tests.support.models.library_models import library_model
from tests.support.models.tiny_models import VOCABULARY, TinyModel, make_model
from tests.support.worker.launched_rank import launching
from tests.support.worker.library_situations import OUTPUT, check_mixed_batch, check_resumed_sequences, prompt
from tests.support.worker.plan_driver import Driver
from tests.support.worker.recorded_logits import record_logits
from tests.support.worker.tiny_backend import tiny_backend

SMALL = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def cohere(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Windows, layers without rotation, scaled logits, interleaved rotation: nothing that our own reader knows."""
    return library_model("Cohere2", tmp_path_factory.mktemp("cohere"))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return record_logits(monkeypatch)


@pytest.mark.parametrize(("ops", "size"), [("torch", 16), ("native", 16), ("native", 32)])
def test_an_unknown_architecture_is_computed_by_the_library(cohere: TinyModel, ops: OpsName, size: int) -> None:
    backend = tiny_backend(cohere.path, ops=ops, block_size=size)
    assert backend.kv.layout.block_size == size
    assert backend.rank.decoder.ops_name.startswith(f"transformers {transformers.__version__}")
    check_mixed_batch(cohere, backend)
    backend.reset()
    check_resumed_sequences(cohere, backend)


def test_what_an_engine_says_is_no_reference_unless_it_is_right(cohere: TinyModel) -> None:
    tokens = prompt(9, 77)
    wrong = [5, 5, 5, 5]
    right = cohere.greedy(tokens, 4, wrong)
    assert right != wrong
    assert cohere.greedy(tokens, 3, right[:3]) == right[:3]
    assert cohere.greedy(tokens, 5, [*right, 5]) == [*right, cohere.greedy([*tokens, *right], 1)[0]]


def test_it_is_launched_as_on_a_device_that_works_by_itself(cohere: TinyModel) -> None:
    check_mixed_batch(cohere, launching(tiny_backend(cohere.path)))


@pytest.mark.parametrize("longest", [256, 48])
def test_a_long_sequence_turns_no_other_one(longest: int, tmp_path: Path) -> None:
    """LongRoPE has frequencies for sequences up to 48 tokens and others for longer ones; the library chooses by the
    longest of a batch, and chooses anew in each step. Here how long a sequence may be does, as in vLLM."""
    trained = {"original_max_position_embeddings": 48}
    short, long = [1.0 + each / 8 for each in range(8)], [3.0 + each for each in range(8)]
    turns: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10_000.0, **trained}
    turns |= {"short_factor": short, "long_factor": long}
    model = library_model("Phi3", tmp_path, max_position_embeddings=256, **trained, rope_parameters=turns)
    as_long: Any = copy.deepcopy(model.reference)
    rotary, chosen = as_long.model.rotary_emb, long if longest > 48 else short
    rotary.config = copy.deepcopy(rotary.config)
    rotary.config.rope_parameters |= {"short_factor": chosen, "long_factor": chosen}
    as_long.model.rotary_emb = type(rotary)(rotary.config)
    backend = tiny_backend(tmp_path, ops="native", max_model_len=longest)
    driver = Driver(backend, budget=29)
    prompts = [prompt(20, 1), prompt(40, 2), *([prompt(90, 3)] if longest > 48 else [])]
    sequences = [driver.add(tokens, OUTPUT) for tokens in prompts]
    driver.run()
    expected = TinyModel("Phi3", tmp_path, as_long)
    assert [each.output for each in sequences] == [expected.greedy(each, OUTPUT) for each in prompts]
    alone = [model.greedy(each, OUTPUT) for each in prompts]
    assert alone[-1] == sequences[-1].output, "what is as long as that is the library's own"
    assert (alone == [each.output for each in sequences]) == (longest == 48)
    others = tiny_backend(tmp_path, ops="native", max_model_len=304 - longest)
    assert backend.kv.layout.model != others.kv.layout.model, "keys of one are none of the other"


@pytest.mark.parametrize(("longest", "scale"), [(48, 1.5), (256, 2.0)])
def test_a_long_sequence_scales_no_other_one(longest: int, scale: float) -> None:
    """PhiMoE's cosines and sines are multiplied by one number in batches up to 48 tokens, and by another beyond."""
    turns = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 48, "factor": 4.0}
    turns |= {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "short_mscale": 1.5, "long_mscale": 2.0}
    config = PhimoeConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_parameters=turns)
    rotary = PhimoeRotaryEmbedding(config)
    keep_rotation(rotary, longest)
    for positions in ([[0, 1, 2]], [[0, 1, 200]]):
        cos, _ = rotary(torch.zeros(1), torch.tensor(positions))
        assert cos[0, 0].tolist() == [scale] * 16
    assert config.to_dict()["rope_parameters"]["short_mscale"] == 1.5, "others read what it was"


def test_logits_agree_with_the_library(cohere: TinyModel, recorded: list[Tensor]) -> None:
    backend = tiny_backend(cohere.path, ops="native")
    recorded.clear()
    driver = Driver(backend)
    sequence = driver.add(prompt(70), OUTPUT)
    driver.run()
    expected = cohere.logits(sequence.tokens)[69:-1]
    assert torch.cat(recorded[:OUTPUT]).sub(expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_model_of_ours_is_the_librarys_where_that_is_asked_for(tmp_path: Path) -> None:
    model = make_model("gemma2", tmp_path)
    backend = tiny_backend(tmp_path, model_impl="transformers", ops="native")
    assert backend.rank.decoder.ops_name.startswith("transformers")
    check_mixed_batch(model, backend)


def test_prompts_are_looked_up_for_drafts(cohere: TinyModel) -> None:
    backend = tiny_backend(cohere.path, speculation=SpeculationSettings(method="ngram"))
    driver = Driver(backend, speculate=3)
    sequences = [driver.add(prompt(9, seed) * 3, 20) for seed in range(3)]
    driver.run()
    assert [s.output for s in sequences] == [cohere.greedy(prompt(9, seed) * 3, 20) for seed in range(3)]
    assert driver.drafted > 0


def test_half_precision_stays_near_the_library(cohere: TinyModel, recorded: list[Tensor]) -> None:
    backend = tiny_backend(cohere.path, dtype="bfloat16", ops="native")
    recorded.clear()
    driver = Driver(backend)
    driver.add(prompt(40), 1)
    driver.run()
    expected = cohere.logits(prompt(40))[-1]
    assert (recorded[0][0].float() - expected).abs().mean() < 0.1 * expected.std()


def written(folder: Path, kind: str, **settings: Any) -> Path:
    config = getattr(transformers, f"{kind}Config")(**settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "settings", "complaint"),
    [
        ("OpenAIGPT", {"vocab_size": 160, "n_embd": 64, "n_layer": 2, "n_head": 4}, "attention interface"),
        (
            "Zamba",
            {**SMALL, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 2}
            | {"num_key_value_heads": 4, "intermediate_size": 96},
            "layer_types 'linear_attention' is not supported",
        ),
        ("Doge", SMALL, "DogeAttention attends by a mask of its own"),
        (
            "PLBart",  # whose logits would differ by a twentieth of their spread
            {"vocab_size": 160, "d_model": 64, "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4}
            | {"decoder_ffn_dim": 96, "max_position_embeddings": 64, "is_encoder_decoder": False, "init_std": 0.2},
            "PLBartForCausalLM finds positions by itself, in model.decoder.embed_positions",
        ),
        (
            "CTRL",
            {"vocab_size": 160, "n_embd": 64, "n_layer": 2, "n_head": 4, "dff": 96, "n_positions": 0},
            "CTRLLMHeadModel: the configuration says nothing of positions",
        ),
        (
            "Moshi",
            {**SMALL, "num_key_value_heads": 4, "head_dim": 16, "ffn_dim": 96, "sliding_window": 24}
            | {"max_position_embeddings": 64, "audio_encoder_config": {"model_type": "mimi"}},
            "MoshiForCausalLM: sliding_window 24 is kept by the library's cache",
        ),
    ],
)
def test_what_cannot_be_served_says_why(tmp_path: Path, kind: str, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        tiny_backend(written(tmp_path, kind, **settings))


def test_loops_that_read_what_the_last_one_keeps_are_refused(tmp_path: Path) -> None:
    library_model("Dory", tmp_path, recurrent_kv_cache_mode="last_loop")
    with pytest.raises(ModelError, match="recurrent_kv_cache_mode 'last_loop' is not supported"):
        tiny_backend(tmp_path)


def test_of_a_model_with_images_what_reads_text_is_served_and_the_rest_left_out(tmp_path: Path) -> None:
    model = library_model("Exaone4_5_", tmp_path)
    backend = tiny_backend(tmp_path, ops="native")
    check_mixed_batch(model, backend)
    decoder: Any = backend.rank.decoder
    assert not [name for name, _ in decoder._model.named_parameters() if "visual" in name]
    assert [name for name, _ in model.reference.named_parameters() if "visual" in name]


@pytest.mark.extras
def test_texts_of_gemma_3n_need_nothing_of_its_towers(tmp_path: Path) -> None:
    """As it is published, with tensors of towers that the library builds by timm, which is not here."""
    model = library_model("Gemma3nText", tmp_path)
    path, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    text = json.loads(path.read_text())
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text}
    path.write_text(json.dumps(whole | {"dtype": text.pop("dtype"), "vision_config": {}, "audio_config": {}}))
    tensors = {each.replace("model.", "model.language_model.", 1): value for each, value in load_file(file).items()}
    save_file(
        {**tensors, "model.vision_tower.timm_model.conv_stem.conv.weight": torch.zeros(3)}, file, {"format": "pt"}
    )
    with pytest.raises(
        ModelError, match="images of Gemma3nForConditionalGeneration are not served; --language-model-o"
    ):
        tiny_backend(tmp_path)
    check_mixed_batch(model, tiny_backend(tmp_path, ops="native", language_model_only=True))


@pytest.mark.extras
def test_a_configuration_of_two_classes_is_of_the_one_that_it_names(tmp_path: Path) -> None:
    """Emu3's, which the library reads as one of a model that writes text, too, whose tensors have other names."""
    tables = {"codebook_size": 16, "embed_dim": 16, "latent_channels": 16, "base_channels": 32, "hidden_size": 32}
    layers = {"channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": [], "num_attention_heads": 2}
    text = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 96, "pad_token_id": 0}
    torch.manual_seed(3)
    model = Emu3ForConditionalGeneration(
        Emu3Config(text_config=text, vq_config=tables | layers, vocabulary_map={"<image>": 5})
    )
    model.eval().save_pretrained(tmp_path)
    model.generation_config.eos_token_id = None
    backend = tiny_backend(tmp_path, ops="native", language_model_only=True)
    check_mixed_batch(TinyModel("Emu3", tmp_path, model), backend)


def test_different_heads_share_no_blocks_that_queries_do_not_divide(tmp_path: Path) -> None:
    library_model("Gemma4Text", tmp_path, global_head_dim=48)
    with pytest.raises(ModelError, match=r"different heads that share no size.*\(2 of 16, 2 of 48\)"):
        tiny_backend(tmp_path)


def test_queries_that_keys_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="MistralForCausalLM: 4 heads of queries are no multiple of 3 of keys"):
        tiny_backend(
            written(tmp_path, "Mistral", **SMALL, num_key_value_heads=3, head_dim=16, intermediate_size=96),
            model_impl="transformers",
        )


def test_different_heads_are_kept_as_they_are(tmp_path: Path) -> None:
    library_model("Gemma4Text", tmp_path)
    with pytest.raises(ModelError, match="kv_cache_dtype: Gemma4ForCausalLM has layers with different heads"):
        tiny_backend(tmp_path, ops="native", kv_cache_dtype="int8_per_token_head")


def test_tensors_that_have_names_of_their_own_are_read_by_the_library(tmp_path: Path) -> None:
    """EXAONE's, which `transformers` saves as a `LlamaForCausalLM`."""
    folder = written(tmp_path, "Exaone", **SMALL, num_key_value_heads=2, intermediate_size=96)
    assert tiny_backend(folder).rank.decoder.ops_name.startswith("transformers")


def test_only_our_own_are_served_where_that_is_asked_for(cohere: TinyModel) -> None:
    with pytest.raises(ModelError, match=r"Cohere2ForCausalLM.*is not supported; supported: Llama"):
        tiny_backend(cohere.path, model_impl="native")


def test_drafters_that_read_hidden_states_are_refused(cohere: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 1, "medusa_num_layers": 1}))
    save_file({"0.0.weight": torch.zeros(VOCABULARY, 64)}, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ModelError, match="medusa: reads hidden states, which transformers keeps"):
        tiny_backend(cohere.path, speculation=SpeculationSettings(method="medusa", model=str(tmp_path)))


def test_a_tensor_that_is_not_there_is_named_and_not_made_up(cohere: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(cohere.path, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    name = next(each for each in sorted(tensors) if each.endswith("q_proj.weight"))
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"the checkpoint has no tensor {name}"):
        tiny_backend(folder)


def test_a_file_that_was_cut_short_is_named(cohere: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(cohere.path, tmp_path / "model"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        tiny_backend(folder)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_models_own_code_runs_only_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", tmp_path / "own")
    config = json.loads((model.path / "config.json").read_text())
    config |= {"architectures": ["OwnForCausalLM"], "model_type": "own"}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (model.path / "config.json").write_text(json.dumps(config))
    (model.path / "own.py").write_text(CODE)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(ModelError, match="--trust-remote-code runs code of the model's own"):
        tiny_backend(model.path)
    check_mixed_batch(model, tiny_backend(model.path, trust_remote_code=True))


def test_a_layer_that_keeps_something_else_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", tmp_path)
    layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    plain = layer.forward

    def sums_up(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = plain(self, hidden_states, *args, **kwargs)
        return found + found.cumsum(dim=1)

    monkeypatch.setattr(layer, "forward", sums_up)
    with pytest.raises(ModelError, match="it keeps more of a sequence than keys and values"):
        tiny_backend(tmp_path, model_impl="transformers")


class SecondOfTwo(SingleStage):
    """A stage that nothing is sent to: what it cannot do without is found before."""

    stage, stages = 1, 2


def test_a_stage_keeps_its_own_layers_and_no_others(cohere: TinyModel) -> None:
    """The head is tied: the last stage has the embedding for it."""
    whole = dict(cohere.reference.named_parameters())
    names = []
    for stage in (PipelineStage(0, 3, 0, 1), PipelineStage(1, 3, 1, 2), PipelineStage(2, 3, 2, 3)):
        made: Any = class_of_stage(type(cohere.reference), stage)
        kept = dict(made.from_pretrained(cohere.path).named_parameters())
        assert all(torch.equal(weight, whole[name]) for name, weight in kept.items())
        names.append({name for name in kept if "norm" not in name})
    layers = [{name for name in whole if f".{number}." in name and "norm" not in name} for number in range(3)]
    embedding = {"model.embed_tokens.weight"}
    assert names == [layers[0] | embedding, layers[1], layers[2] | embedding]


@pytest.mark.parametrize("number", range(3))
def test_a_stage_leaves_out_what_sees_and_refuses_other_positions(tmp_path: Path, number: int) -> None:
    model: Any = library_model("LlavaNextVideo", tmp_path).reference
    passing = strip_to_stage(model, PipelineStage(number, 3, number, number + 1))
    assert any("vision_tower" in name for name, _ in model.named_parameters())
    leave_out_towers(model, model.config, passing)
    left = [name for name, _ in model.named_parameters()]
    assert left
    assert not [name for name in left if "vision_tower" in name]
    forward = model.forward

    def further_apart(position_ids: Tensor | None = None, **named: Any) -> Any:
        return forward(position_ids=torch.tensor([[0, 9]]) if position_ids is None else position_ids, **named)

    model.forward = further_apart
    with pytest.raises(ModelError, match="LlavaNextVideoForConditionalGeneration counts positions otherwise than from"):
        leave_out_towers(model, model.config, passing)


def test_what_a_text_passes_keeps_no_towers(tmp_path: Path) -> None:
    model: Any = library_model("Phi4Multimodal", tmp_path).reference
    assert any("embed_tokens_extend" in name for name, _ in model.named_parameters())
    leave_out_towers(model, model.config, PassOfStage())
    left = [name for name, _ in model.named_parameters()]
    assert left
    assert not [name for name in left if "embed_tokens_extend" in name]


@pytest.mark.parametrize("what", ["its token", "the layer before"])
def test_a_layer_that_reads_more_than_rows_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """As a model does that adds its embedding again, or one that shares a layer's values with those behind it."""
    make_model("llama", tmp_path)
    decoder = transformers.models.llama.modeling_llama.LlamaModel
    layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    whole, plain = decoder.forward, layer.forward
    kept: dict[str, Tensor] = {}

    def keeps(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        kept.clear()
        if what == "its token":
            kept["rows"] = self.embed_tokens(input_ids)
        return whole(self, input_ids, **kwargs)

    def adds(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.self_attn.layer_idx == 0:
            kept["rows"] = hidden_states
        found: Tensor = plain(self, hidden_states, *args, **kwargs)
        return found + kept["rows"]

    monkeypatch.setattr(decoder, "forward", keeps)
    monkeypatch.setattr(layer, "forward", adds)
    with pytest.raises(ModelError, match=r"read more than the rows|keeps something between its layers: 'rows'"):
        tiny_backend(tmp_path, model_impl="transformers", pipeline=SecondOfTwo())
