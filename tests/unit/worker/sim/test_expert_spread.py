from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.worker.backend import BackendError
from services.worker.config import WorkerConfig
from services.worker.executor.simulated import simulated_device
from services.worker.measure.roofline.wire import shape_file
from services.worker.models.hf_config import read_model_config
from services.worker.sim.accelerator import PROFILES, Accelerator
from services.worker.sim.expert_spread import ExpertSpread, exchange
from services.worker.sim.shape import ModelShape, read_shape
from shared.config import ConfigError, load_config
from tests.support.engines.engine_on_a_bus import make_model
from tests.support.models.published_layouts import LAYOUTS
from tests.support.models.published_mixtures import MIXTURES

HIDDEN = 7168


@pytest.fixture
def deepseek(tmp_path: Path) -> ModelShape:
    path = shape_file("deepseek-v3")
    assert path is not None
    (tmp_path / "config.json").write_bytes(path.read_bytes())
    return read_shape(tmp_path, "auto", "fp8")


@pytest.mark.parametrize(
    ("ranks", "dispatch", "combine"),
    [(16, 118, 195), (32, 155, 273), (64, 173, 314), (128, 192, 369), (256, 194, 360)],
)
def test_exchanges_take_as_long_as_deepep_measured(ranks: int, dispatch: float, combine: float) -> None:
    """Microseconds of its low-latency kernels on H800s of several nodes, 128 rows of a rank (docs/legacy.md there)."""
    device = PROFILES["h100"]
    sent = exchange(ExpertSpread(ranks=ranks), rows=128, hidden=HIDDEN, chosen=8, chosen_groups=4, layers=1)
    there = HIDDEN + HIDDEN / 128 * 4
    for measured, share in ((dispatch, there), (combine, 2 * HIDDEN)):
        seconds = sent.networked * share / (there + 2 * HIDDEN) / device.network + device.link_seconds
        assert seconds * 1e6 == pytest.approx(measured, rel=0.12)
    assert sent.messages == 2


def test_many_rows_go_once_to_each_node() -> None:
    few, many = (
        exchange(ExpertSpread(ranks=32), rows=rows, hidden=HIDDEN, chosen=8, chosen_groups=4, layers=1)
        for rows in (256, 257)
    )
    assert many.networked / 257 < few.networked / 256 / 2, "2.7 of 4 nodes in place of 6 of 8 experts"
    assert many.linked > few.linked


def test_one_node_sends_nothing_further() -> None:
    sent = exchange(ExpertSpread(ranks=8), rows=64, hidden=HIDDEN, chosen=8, chosen_groups=8, layers=3)
    assert (sent.networked, sent.messages) == (0.0, 6)


def test_a_rank_holds_its_experts_and_reads_those_that_anybody_picks(deepseek: ModelShape) -> None:
    experts = deepseek.experts
    assert experts is not None
    assert deepseek.weight_bytes / 1e9 == pytest.approx(673, rel=0.01)
    spread, work = ExpertSpread(ranks=64), {"pairs": 0, "read": 0, "samples": 1}
    dense = deepseek.weight_bytes - experts.count * experts.bytes_each
    assert deepseek.resident_bytes(1, spread) == dense + 4 * experts.bytes_each
    alone, busy = (deepseek.spread_load(spread, 1, tokens=tokens, **work) for tokens in (1, 1000))
    assert busy.bytes - 1000 * deepseek.kv_bytes_per_token == pytest.approx(dense + 4 * experts.bytes_each)
    touched = 1 - (1 - 8 / 256) ** 64
    assert alone.bytes - deepseek.kv_bytes_per_token == pytest.approx(dense + 4 * experts.bytes_each * touched)
    assert busy.flops == pytest.approx(deepseek.load(tokens=1000, **work).flops), "each picks as many experts as before"


def test_the_busiest_rank_is_waited_for(deepseek: ModelShape) -> None:
    work = {"tokens": 128, "pairs": 0, "read": 0, "samples": 0}
    even, skewed = (deepseek.spread_load(ExpertSpread(ranks=64, balance=b), 1, **work) for b in (1.0, 0.5))
    assert skewed.networked == 2 * even.networked
    assert deepseek.experts is not None
    assert skewed.flops - even.flops == pytest.approx(128 * 8 * deepseek.experts.flops_each)


def test_halves_hide_what_is_sent_and_read_weights_twice(deepseek: ModelShape) -> None:
    spread = ExpertSpread(ranks=64)
    whole, half = (deepseek.spread_load(spread, 1, tokens=rows, pairs=0, read=0, samples=0) for rows in (256, 128))
    slow_links = Accelerator(bandwidth=1e12, flops=1e15, memory=1, fixed_seconds=0.0, network=1e9)
    sending = whole.networked / 1e9
    assert slow_links.seconds(whole) == pytest.approx(sending + whole.bytes / 1e12)
    assert slow_links.overlapped(half) == pytest.approx(sending)
    quick_links = Accelerator(bandwidth=1e12, flops=1e15, memory=1, fixed_seconds=0.0, network=1e18, link=1e18)
    assert quick_links.overlapped(half) == pytest.approx(2 * half.bytes / 1e12)


def test_ranks_of_an_engine_sum_attention_up_and_no_experts(deepseek: ModelShape) -> None:
    cost = deepseek.spread_load(ExpertSpread(ranks=320), 4, tokens=128, pairs=0, read=0, samples=0)
    assert cost.reductions == 61 + 3, "61 of attention, and 3 of layers without experts"
    assert cost.messages == 2 * 58


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sim-expert-ranks=6", "--world-size=4"], "sim_expert_ranks = 6: must be a multiple of world_size"),
        (["--sim-expert-balance=0.5"], "sim_expert_balance: needs sim_expert_ranks"),
        (["--sim-expert-overlap"], "sim_expert_overlap: needs sim_expert_ranks"),
        (["--sim-network=0"], "sim_network: must be above 0"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("worker", WorkerConfig, ["--model=m", "--engine=e", "--device=sim", *flags], {})


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    flags = [f"--model={model}", "--engine=e", "--device=sim", "--sim-expert-ranks=8"]
    with pytest.raises(BackendError, match=r"sim_expert_ranks: .* is no mixture of experts"):
        simulated_device(load_config("worker", WorkerConfig, flags, {}), model)


@pytest.mark.parametrize(
    ("stored", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "awq", "bits": 4}, 4),
        ({"quant_method": "mxfp4"}, 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 4),
    ],
)
def test_weights_are_as_large_as_they_are_stored(tmp_path: Path, stored: dict[str, object], bits: int) -> None:
    model = make_model(tmp_path / "model")
    plain, config = read_shape(model, "auto"), json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    linear = plain.weight_bytes - 2 * plain.vocab_size * 64 * 2
    assert plain.weight_bytes - read_shape(model, "auto").weight_bytes == linear - linear * bits // 16


def test_rounded_weights_and_keys_are_smaller(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    plain, rounded = read_shape(model, "auto"), read_shape(model, "auto", "int4", "fp8")
    assert rounded.weight_bytes < plain.weight_bytes
    assert rounded.kv_bytes_per_token * 2 == plain.kv_bytes_per_token
    scaled = read_shape(model, "auto", "int4", "int8_per_token_head")
    heads = json.loads((model / "config.json").read_text())["num_key_value_heads"] * 2
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    assert scaled.kv_bytes_per_token == rounded.kv_bytes_per_token + 4 * heads * layers


@pytest.mark.parametrize("architecture", MIXTURES)
def test_published_mixtures_have_the_weights_that_engines_load(tmp_path: Path, architecture: str) -> None:
    layout = MIXTURES[architecture]
    named = {"architectures": [architecture.partition(" ")[0]]}
    described = {**layout.config, **named, "intermediate_size": 96, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    config, shape = read_model_config(tmp_path), read_shape(tmp_path, "auto")
    assert shape.experts is not None
    assert config.mixture is not None
    assert (shape.experts.count, shape.experts.chosen) == (config.mixture.experts, config.mixture.chosen)
    routers = 2 * sum(layer.mixes for layer in config.layers) * config.mixture.experts * config.hidden_size
    assert shape.weight_bytes == 2 * config.parameters - routers, "those of routers are not counted"
    assert shape.experts.bytes == pytest.approx(config.expert_share * 2 * config.parameters)
    if "moe_intermediate_size" not in described:
        return  # its experts are as wide as other models' MLPs
    alone = json.dumps(described | {"moe_intermediate_size": None})
    (tmp_path / "config.json").write_text(alone)
    with pytest.raises(BackendError, match="moe_intermediate_size"):
        read_shape(tmp_path, "auto")


def test_the_mlps_of_the_first_qwen_have_half_of_the_columns_that_are_said(tmp_path: Path) -> None:
    described = {**LAYOUTS["QWenLMHeadModel"].config, "architectures": ["QWenLMHeadModel"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert read_shape(tmp_path, "auto").weight_bytes == 2 * read_model_config(tmp_path).parameters


@pytest.mark.parametrize("architecture", ["MiniMaxM3VLForCausalLM", "MiniMaxM3SparseForConditionalGeneration"])
def test_a_model_that_chooses_blocks_of_keys_is_refused(tmp_path: Path, architecture: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    with pytest.raises(BackendError, match=rf"no models with keys that are chosen by blocks \({architecture}\)"):
        read_shape(tmp_path, "auto")


def test_an_unknown_quantization_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "quip"}}))
    with pytest.raises(BackendError, match="quant_method 'quip' is none of"):
        read_shape(model, "auto")
