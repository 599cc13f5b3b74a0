"""DeepSeek-V4, whose attention is over compressed keys and whose residual is several streams, beyond what is tested of
every family: its kinds of layers, its names, what its blocks hold, groups, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.scheduler.core.limits import EngineLimits
from services.worker.models.config import ModelError
from services.worker.models.hf_config import read_model_config
from services.worker.models.lora.adapter_files import read_adapter
from services.worker.models.published.names import deepseek_v4_name
from services.worker.ops.interface import OpsName
from services.worker.speculation.settings import Method, SpeculationSettings
from shared.ids import ModelName
from tests.support.models.quantised_files import blocks, fp8, mx
from tests.support.models.tiny_adapters import write_adapter
from tests.support.models.tiny_models import VOCABULARY, TinyModel, make_model
from tests.support.worker.library_situations import prompt
from tests.support.worker.plan_driver import Driver
from tests.support.worker.rank_processes import EngineOfRanks, RankProcesses, rank_processes
from tests.support.worker.recorded_logits import assert_logits_agree, record_logits
from tests.support.worker.tiny_backend import tiny_backend

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
PROMPT = [3 + 7 * i % (VOCABULARY - 3) for i in range(75)]
OUTPUT = 5
LIMITS = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=40, max_running=4, speculation="fixed")
LENGTHS = (1, 3, 23, 33, 64, 100, 150)
"""Of prompts; windows have 12 tokens, entries are made of 4 or 32, blocks have 16."""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return record_logits(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("deepseek-v4", tmp_path_factory.mktemp("v4"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with rank_processes(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


def agrees(model: TinyModel, recorded: list[Tensor], tokens: list[int] = PROMPT, **settings: Any) -> None:
    """Logits of a prompt in chunks and of what follows it are the reference's."""
    backend = tiny_backend(model.path, dtype="float32", **settings)
    assert_logits_agree(backend, model, tokens, OUTPUT, recorded, budget=22)


@pytest.mark.parametrize("ops", ["torch", "native"])
def test_logits_are_the_reference_s(model: TinyModel, recorded: list[Tensor], ops: OpsName) -> None:
    agrees(model, recorded, ops=ops)


@pytest.mark.extras
@pytest.mark.parametrize(
    ("changes", "block_size"),
    [
        ({"layer_types": [SLIDING] * 4, "mlp_layer_types": ["moe"] * 4}, 16),
        ({"layer_types": [HEAVY] * 4, "mlp_layer_types": ["hash_moe"] * 4}, 64),
        ({"layer_types": [SPARSE] * 4, "index_topk": 64}, 32),
        ({"layer_types": [SPARSE, HEAVY] * 2, "scoring_func": "sigmoid"}, 32),
        ({"hc_mult": 2, "hc_sinkhorn_iters": 3, "swiglu_limit": 0.1}, 16),
        ({"rope_parameters": None, "initializer_range": 0.6}, 16),
    ],
    ids=["windows", "heavily compressed", "all entries", "no windows alone", "two streams", "limited activations"],
)
def test_kinds_of_layers_are_as_the_reference_has_them(
    tmp_path: Path, recorded: list[Tensor], changes: dict[str, Any], block_size: int
) -> None:
    agrees(make_model("deepseek-v4", tmp_path, **changes), recorded, ops="native", block_size=block_size)


@pytest.mark.extras
def test_windows_of_the_published_sizes_end_at_the_same_tokens(tmp_path: Path, recorded: list[Tensor]) -> None:
    rates = {SPARSE: 4, HEAVY: 128}
    long = make_model("deepseek-v4", tmp_path, compress_rates=rates, max_position_embeddings=512)
    agrees(long, recorded, prompt(300), ops="native", kv_memory_bytes=16 << 20)


def test_a_part_of_the_entries_is_what_is_attended_to(tmp_path: Path, model: TinyModel) -> None:
    every = make_model("deepseek-v4", tmp_path, index_topk=256)
    difference = (model.logits(PROMPT) - every.logits(PROMPT)).abs().amax(dim=1)
    assert difference[:16].max() < 1e-4
    assert difference[-1] > 0.1, "a model that attends to everything would agree, too"


def test_names_of_the_library_are_read_too(tmp_path: Path, model: TinyModel, recorded: list[Tensor]) -> None:
    model.reference.save_pretrained(tmp_path, save_original_format=False)
    agrees(TinyModel("deepseek-v4", tmp_path, model.reference), recorded, ops="native")


@pytest.mark.extras
@pytest.mark.parametrize("experts", ["fp8", "fp4"])
def test_published_codes_are_read(tmp_path: Path, recorded: list[Tensor], experts: str) -> None:
    """Matrices in FP8 with scales of blocks, experts in FP4 with those of 32 inputs; scales are powers of two. What
    makes entries, and weighs the indexer's heads, are numbers."""
    plain = make_model("deepseek-v4", tmp_path, hidden_size=64, intermediate_size=64)
    agrees(TinyModel("deepseek-v4", tmp_path, published_codes(plain, experts)), recorded, ops="native")


LEFT_ALONE = ("embed_tokens", "head", "gate", "compressor.wkv", "compressor.wgate", "weights_proj", "norm")


def published_codes(model: TinyModel, experts: str) -> Any:
    """Writes the model as DeepSeek publishes it; what the library makes of the numbers that its codes stand for."""
    file = model.path / "model.safetensors"
    written: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, weight in load_file(file).items():
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or module == name or module.endswith(LEFT_ALONE):
            written[name] = weight
        elif experts == "fp4" and ".ffn.experts." in name:
            codes, numbers[name] = mx(weight, name="weight")
            written |= {name: codes["weight"].view(torch.int8), f"{module}.scale": exponents(codes["weight_scale"])}
        else:
            codes, numbers[name] = fp8(weight, blocks(weight, 32).log2().ceil().exp2(), block=32)
            scales = codes["weight_scale"].to(torch.float8_e8m0fnu)
            written |= {name: codes["weight"], f"{module}.scale": scales}
    save_file(written, file)
    state = model.reference.state_dict()
    for name, each in numbers.items():
        put_numbers(state, deepseek_v4_name(name), each)
    quantization = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}
    described = msgspec.json.decode((model.path / "config.json").read_bytes()) | {"expert_dtype": experts}
    described["quantization_config"] = quantization
    (model.path / "config.json").write_bytes(msgspec.json.encode(described))
    return model.reference


def exponents(scales: Tensor) -> Tensor:
    return scales.view(torch.float8_e8m0fnu)


def put_numbers(state: dict[str, Tensor], name: str, numbers: Tensor) -> None:
    """In the place of the weight `name`, or of the part that is it of all experts."""
    block, experts, part = name.partition(".experts.")
    if not experts:
        state[name].copy_(numbers)
        return
    number, module, _ = part.split(".")
    if module == "down_proj":
        state[f"{block}.experts.down_proj"][int(number)].copy_(numbers)
        return
    gates, ups = state[f"{block}.experts.gate_up_proj"][int(number)].chunk(2)
    (gates if module == "gate_proj" else ups).copy_(numbers)


@pytest.mark.features("speculative", "chunked prefill", "preemption")
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft"])
def test_drafts_chunks_and_preemption_change_no_text(model: TinyModel, tmp_path: Path, method: Method) -> None:
    drafter = str(make_model("llama", tmp_path).path) if method == "draft" else None
    drafts = SpeculationSettings(method=method, num_speculative_tokens=3, prompt_lookup_min=1, model=drafter)
    driver = Driver(tiny_backend(model.path, dtype="float32", ops="native", speculation=drafts), budget=17, speculate=3)
    prompts = [[5, 60, 17, 33, 90, 8, 44] * 5, [9], PROMPT]
    sequences = [driver.add(tokens, 12) for tokens in prompts]
    while len(sequences[2].output) < 5:
        driver.step()
    driver.preempt(sequences[2])
    driver.run()
    said = [sequence.output for sequence in sequences]
    assert said == right(model, prompts, said)
    assert driver.drafted > 0


@pytest.mark.extras
@pytest.mark.features("hybrid KV cache", "prefix cache", "chunked prefill", "speculative")
def test_what_is_behind_windows_is_freed_and_entries_are_kept(ranks: RankProcesses, model: TinyModel) -> None:
    engine = ranks.serve(model.path, ops="native", limits=LIMITS, drafts=2, hybrid="on")
    assert [group.window for group in engine.serving[0].kv_groups] == [None, 32, 32, 32, 32]
    says_what_the_reference_says(engine, model, LENGTHS)


@pytest.mark.extras
@pytest.mark.features("hybrid KV cache", "tensor parallel", "pipeline parallel", "prefix cache")
@pytest.mark.parametrize(("tp", "stages"), [(2, 1), (1, 2)])
def test_ranks_and_stages_say_the_same(ranks: RankProcesses, model: TinyModel, tp: int, stages: int) -> None:
    """In stages all layers have one block table."""
    engine = ranks.serve(model.path, tp=tp, stages=stages, ops="native", limits=LIMITS, hybrid="auto")
    assert bool(engine.serving[0].kv_groups) == (stages == 1)
    says_what_the_reference_says(engine, model, LENGTHS)


@pytest.mark.extras
@pytest.mark.features("hybrid KV cache", "preemption")
def test_who_is_preempted_goes_on_where_it_was(ranks: RankProcesses, model: TinyModel) -> None:
    """There is room for one sequence: 11 blocks of entries, and for each of the four layers the 7 that its window spans
    together with the 64 tokens of a step."""
    blocks = ranks.serve(model.path, ops="native", limits=LIMITS, hybrid="on").serving[0].block_bytes
    engine = ranks.serve(model.path, ops="native", limits=LIMITS, kv_memory=blocks * (1 + 11 + 7 * 4), hybrid="on")
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS[:4])]
    requests = [engine.ask(tokens, 60) for tokens in prompts]
    engine.run()
    assert [request.tokens for request in requests] == right(model, prompts, [request.tokens for request in requests])
    assert engine.preemptions


def says_what_the_reference_says(engine: EngineOfRanks, model: TinyModel, lengths: tuple[int, ...]) -> None:
    """Prompts in one batch, then the same again, by what is cached of them."""
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    for cached in ([0] * len(lengths), [(length - 1) // 16 * 16 for length in lengths]):
        requests = [engine.ask(tokens, 24) for tokens in prompts]
        engine.run()
        said = [request.tokens for request in requests]
        assert said == right(model, prompts, said)
        assert [request.cached for request in requests] == cached


def right(model: TinyModel, prompts: list[list[int]], said: list[list[int]]) -> list[list[int]]:
    """What the library would say after each prompt and each beginning of what was said: in one pass, it is quick."""
    passes = (
        model.logits(tokens + answer[:-1])[len(tokens) - 1 :] for tokens, answer in zip(prompts, said, strict=True)
    )
    return [logits.argmax(-1).tolist() for logits in passes]


PUBLISHED_MODULES = (
    ("base_model.model.model.", "base_model.model."),
    ("self_attn.q_a_proj", "attn.wq_a"),
    ("self_attn.q_b_proj", "attn.wq_b"),
    ("self_attn.kv_proj", "attn.wkv"),
    ("self_attn.o_b_proj", "attn.wo_b"),
    ("mlp.shared_experts.gate_proj", "ffn.shared_experts.w1"),
)


def test_adapters_may_have_the_published_names(model: TinyModel, tmp_path: Path) -> None:
    """What they do is compared in `test_model_features.py`."""
    config, modules = read_model_config(model.path), [library for library, _ in PUBLISHED_MODULES[1:]]
    write_adapter(model, tmp_path, modules=modules)
    by_library = read_adapter(ModelName("a"), tmp_path, config, 8)
    assert len(by_library.layers) == len(modules) * config.num_layers
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for pair in PUBLISHED_MODULES:
        tensors = {name.replace(*pair): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert read_adapter(ModelName("a"), tmp_path, config, 8).id == by_library.id


def test_what_makes_entries_has_no_adapters(model: TinyModel, tmp_path: Path) -> None:
    write_adapter(model, tmp_path, modules=["compressor.kv_proj"])
    with pytest.raises(ModelError, match=r"target_modules: self_attn\.compressor\.kv_proj of layer \d is no module"):
        read_adapter(ModelName("a"), tmp_path, read_model_config(model.path), 8)


@pytest.mark.refuses("compressed keys (DeepSeek-V4)", "--kv-cache-dtype fp8", "--model-impl transformers")
def test_what_does_not_combine_is_refused_at_start(model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="kv_cache_dtype fp8: compressed keys are kept in the model's dtype"):
        tiny_backend(model.path, kv_cache_dtype="fp8")
    with pytest.raises(ModelError, match="layer_types 'compressed_sparse_attention' is not supported"):
        tiny_backend(model.path, model_impl="transformers")
    with pytest.raises(ModelError, match="enable_prompt_embeds: experts are chosen by tokens"):
        tiny_backend(model.path, prompt_embeds=True)
    itself = SpeculationSettings(method="draft", num_speculative_tokens=2, model=str(model.path))
    with pytest.raises(ModelError, match=r"a model with several streams \(DeepseekV4ForCausalLM\) drafts for no other"):
        tiny_backend(model.path, speculation=itself)
    medusa = SpeculationSettings(method="medusa", num_speculative_tokens=2, model=str(tmp_path))
    with pytest.raises(ModelError, match="speculative method medusa: DeepseekV4ForCausalLM takes drafts by ngram"):
        tiny_backend(model.path, speculation=medusa)
    described = msgspec.json.decode((model.path / "config.json").read_bytes())
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(described | {"quantization_config": {"bits": 4}}))
    with pytest.raises(ModelError, match="quantization_config compressed-tensors: DeepseekV4ForCausalLM is read in"):
        tiny_backend(tmp_path)
    rates = {SPARSE: 4, HEAVY: 24}
    odd = make_model("deepseek-v4", tmp_path, compress_rates=rates)
    with pytest.raises(ModelError, match="block_size 16 neither divides nor is divided by compress_rates 24"):
        tiny_backend(odd.path)
