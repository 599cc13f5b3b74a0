"""The simulated accelerator, and what a worker is told at its start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.worker.backend import BackendError
from services.worker.config import WorkerConfig
from services.worker.sim.accelerator import PROFILES, Accelerator, StepCost
from services.worker.sim.backend import create_sim_backend
from services.worker.sim.shape import ModelShape, read_shape
from services.worker.sim.tokens import drawn, printable_tokens
from shared.config import ConfigError, load_config
from shared.ids import ModelName
from tests.support.engines.engine_on_a_bus import EOS, make_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def config(*flags: str) -> WorkerConfig:
    return load_config("worker", WorkerConfig, ["--model=org/name", "--engine=e", *flags], {})


def test_a_models_sizes_follow_from_its_config(model: Path) -> None:
    layer = 64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 128
    assert read_shape(model, "auto") == ModelShape(
        vocab_size=32,
        max_positions=512,
        eos_token_ids=(EOS,),
        dtype="bfloat16",
        weight_bytes=2 * (2 * layer + 2 * 32 * 64),
        kv_bytes_per_token=2 * 2 * 2 * 16 * 2,
        kv_heads=2,
        flops_per_token=2 * 2 * layer,
        flops_per_pair=4 * 2 * 4 * 16,
        flops_per_sample=2 * 32 * 64,
        reduced_per_token=2 * 2 * 64 * 2,
        reductions=2 * 2,
    )


def test_generation_config_names_the_end_of_sequence(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert read_shape(model, "float32").eos_token_ids == (3, 4)


def test_a_step_takes_as_long_as_whatever_binds() -> None:
    device = Accelerator(bandwidth=100.0, flops=1000.0, memory=1, fixed_seconds=1.0)
    assert device.seconds(StepCost(200.0, 100.0)) == 3.0
    assert device.seconds(StepCost(50.0, 4000.0)) == 5.0
    assert device.seconds(StepCost(200.0, 100.0).shared_by(2)) == 2.0
    assert device.changed(fixed_seconds=0.0).seconds(StepCost(200.0, 0.0)) == 2.0


def test_ranks_take_their_share_and_the_time_of_their_sums() -> None:
    device = Accelerator(bandwidth=100.0, flops=1e9, memory=1, fixed_seconds=0.0, link=30.0, link_seconds=0.25)
    cost = StepCost(400.0, 0.0, reduced=60.0, reductions=8)
    assert device.seconds(cost.shared_by(1)) == 4.0, "one rank has nothing to exchange"
    assert device.seconds(cost.shared_by(2)) == 2.0 + 60.0 / 30.0 + 2.0
    assert device.seconds(cost.shared_by(4)) == 1.0 + 1.5 * 60.0 / 30.0 + 2.0
    assert device.changed(link=60.0, link_seconds=0.0).seconds(cost.shared_by(2)) == 2.0 + 1.0


def test_decoding_a_large_model_on_an_h100_is_bound_by_its_bandwidth() -> None:
    shape = ModelShape(
        vocab_size=128_256,
        max_positions=131_072,
        eos_token_ids=(),
        dtype="bfloat16",
        weight_bytes=16_060_000_000,
        kv_bytes_per_token=131_072,
        kv_heads=8,
        flops_per_token=2 * 6_979_000_000,
        flops_per_pair=4 * 32 * 4096,
        flops_per_sample=2 * 128_256 * 4096,
    )
    device = PROFILES["h100"]
    decode = shape.load(tokens=1, pairs=1000, read=1000, samples=1)
    prefill = shape.load(tokens=8192, pairs=8192 * 4096, read=0, samples=1)
    assert 0.005 < device.seconds(decode) < 0.008, "16 GB at 2.7 TB/s"
    assert decode.bytes / device.bandwidth > decode.flops / device.flops
    assert prefill.flops / device.flops > prefill.bytes / device.bandwidth


def test_a_simulated_model_says_ordinary_printable_tokens(model: Path) -> None:
    assert printable_tokens(model, 32) == list(range(2, 32))
    assert printable_tokens(model, 10) == list(range(2, 10)), "ids above the model's vocabulary do not exist"


def test_a_vocabulary_without_printable_tokens_is_refused(model: Path) -> None:
    assert printable_tokens(model, 32), "what was found before counts for the same files only"
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([f"w{i}" for i in range(30)])
    tokenizer.save(str(model / "tokenizer.json"))
    with pytest.raises(BackendError, match="no printable token"):
        printable_tokens(model, 32)


def test_drawing_depends_on_seed_and_position_and_spreads_evenly() -> None:
    assert drawn(7, 3) == drawn(7, 3)
    counts = [0] * 8
    for seed in range(64):
        for position in range(64):
            counts[drawn(seed, position) % 8] += 1
    assert all(400 < count < 624 for count in counts), "4096 draws in 8 bins of 512"


def make_backend(model: Path, *, kv: int | None, max_model_len: int | None = None) -> int:
    return create_sim_backend(
        model,
        model_name=ModelName("m"),
        dtype="auto",
        max_model_len=max_model_len,
        kv_memory_bytes=kv,
        block_size=16,
        world_size=1,
        accelerator=PROFILES["l4"],
        profile="l4",
        step_seconds=None,
        time_scale=1.0,
    ).num_blocks


def test_blocks_come_from_the_memory_given_or_from_the_device(model: Path) -> None:
    block = 256 * 16
    assert make_backend(model, kv=10 * block + 1) == 10
    assert make_backend(model, kv=None) == 1024 * 32, "never more than a thousand sequences of full length"


@pytest.mark.parametrize(("kv", "length"), [(10, None), (None, 513)])
def test_what_cannot_be_simulated_is_refused(model: Path, kv: int | None, length: int | None) -> None:
    with pytest.raises(BackendError):
        make_backend(model, kv=kv, max_model_len=length)


def test_a_broken_config_is_refused_with_its_path(model: Path) -> None:
    (model / "config.json").write_text("{}")
    with pytest.raises(BackendError, match=r"config\.json"):
        read_shape(model, "auto")


def test_flags_become_a_place_an_accelerator_and_a_name() -> None:
    asked = config("--rank=1", "--world-size=2", "--rendezvous=127.0.0.1:5", "--sim-tflops=2", "--sim-fixed-ms=0")
    assert (asked.place().rank, asked.place().publishes) == (1, False)
    assert asked.rendezvous_url() == "tcp://127.0.0.1:5"
    assert (asked.accelerator().flops, asked.accelerator().fixed_seconds) == (2e12, 0.0)
    assert config("--sim-bandwidth=2GB").accelerator().bandwidth == 2e9
    assert asked.model_name() == "org/name"
    assert config("--served-model-name=m").model_name() == "m"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rank=1"], "below world_size"),
        (["--world-size=2"], "rendezvous"),
        (["--sim-profile=tpu"], "sim_profile"),
        (["--sim-bandwidth=0"], "sim_bandwidth"),
        (["--sim-link=0"], "sim_link"),
    ],
)
def test_contradicting_flags_stop_the_start(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*flags)
