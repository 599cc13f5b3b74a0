"""Blocks that one runner computed and saved serve another: it says what it would have said having computed them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.worker.executor.host_runner import HostRunner
from services.worker.kv.transfers import Transfers
from services.worker.models.loaded_model import DtypeChoice
from services.worker.ops.interface import CacheDtype, OpsName, OpsUnavailable
from shared.messages.worker import Transfer
from tests.support.kv.ranks import make_arena, transfer
from tests.support.models.tiny_models import VOCABULARY, TinyModel, make_model
from tests.support.worker.plan_driver import Driver
from tests.support.worker.recorded_logits import record_logits
from tests.support.worker.tiny_backend import tiny_backend

SAVED = 6
OUTPUT = 12


def prompt_of(backend: HostRunner) -> list[int]:
    """Of SAVED full blocks and a little more."""
    tokens = SAVED * backend.card.block_size + 5
    return [3 + (7 * i * i + i) % (VOCABULARY - 4) for i in range(tokens)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    return cache(lambda family: make_model(family, tmp_path_factory.mktemp(family)))


def runner(
    model: TinyModel, ops: OpsName, dtype: DtypeChoice, size: int = 16, cache: CacheDtype = "auto"
) -> HostRunner:
    settings = {"kv_memory_bytes": 4 << 20, "max_num_seqs": 4, "block_size": size, "kv_cache_dtype": cache}
    try:
        return tiny_backend(model.path, dtype=dtype, ops=ops, **settings)
    except OpsUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits of every step from here on."""
    return record_logits(monkeypatch)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "deepseek-v3"])
@pytest.mark.parametrize(("ops", "size"), [("native", 16), ("native", 32), ("torch", 16)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_loaded_serves_as_what_was_computed(
    models: Callable[[str], TinyModel],
    recorded: list[Tensor],
    tmp_path: Path,
    family: str,
    ops: OpsName,
    size: int,
    dtype: DtypeChoice,
) -> None:
    first, second = (runner(models(family), ops, dtype, size) for _ in range(2))
    assert first.kv.layout == second.kv.layout
    make_arena(tmp_path, first.kv.layout, SAVED)
    computed = computed_and_saved(first, tmp_path)
    logits = recorded[-OUTPUT:]
    assert loaded(second, tmp_path) == computed
    assert len(recorded) > OUTPUT
    assert all(torch.equal(one, other) for one, other in zip(logits, recorded[-OUTPUT:], strict=True)), (
        "to the last bit"
    )


@pytest.mark.parametrize(
    ("cache", "family", "stored"),
    [
        ("fp8", "qwen3", ("float8_e4m3fn", 32)),
        ("int8_per_token_head", "qwen3", ("int8", 36)),
        ("int8_per_token_head", "gemma2", ("int8", 20)),
    ],
)
def test_keys_and_values_in_eight_bits_are_loaded_as_they_were_computed(
    models: Callable[[str], TinyModel],
    recorded: list[Tensor],
    tmp_path: Path,
    cache: CacheDtype,
    family: str,
    stored: tuple[str, int],
) -> None:
    """int8 with the size of its steps behind each head."""
    model = models(family)
    first, second = (runner(model, "native", "float32", cache=cache) for _ in range(2))
    assert (first.kv.layout.dtype, first.kv.layout.head_dim) == stored
    make_arena(tmp_path, first.kv.layout, SAVED)
    computed = computed_and_saved(first, tmp_path)
    logits = torch.cat(recorded[-OUTPUT:])
    assert loaded(second, tmp_path) == computed
    assert torch.equal(logits, torch.cat(recorded[-OUTPUT:])), "to the last bit"
    exact = model.logits(prompt_of(first) + computed)[-OUTPUT - 1 : -1]
    error = (logits - exact).abs().mean()
    assert 1e-4 < error < (0.1 if cache == "fp8" else 0.03) * exact.std(), (
        "near what keys and values in full give, and not the same"
    )


def test_without_loading_the_blocks_hold_something_else(models: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """Else the test above would prove nothing."""
    first, second = (runner(models("qwen3"), "torch", "float32") for _ in range(2))
    make_arena(tmp_path, first.kv.layout, SAVED)
    assert loaded(second, None) != computed_and_saved(first, tmp_path)


def computed_and_saved(backend: HostRunner, directory: Path) -> list[int]:
    """What follows the prompt; its full blocks are computed by a sequence before it, and saved."""
    driver = Driver(backend, budget=40)
    before = driver.add(prompt_of(backend), 1)
    while not before.done:
        driver.step()
    copied(backend, directory, transfer("save", before.blocks[:SAVED], range(SAVED)))
    sequence = driver.add(prompt_of(backend), OUTPUT)
    assert driver.share_prefix(sequence, before) == SAVED * backend.card.block_size
    driver.run()
    return sequence.output


def loaded(backend: HostRunner, directory: Path | None) -> list[int]:
    """What follows the prompt, whose full blocks are loaded, or (None) not."""
    driver = Driver(backend, budget=40)
    sequence = driver.add(prompt_of(backend), OUTPUT)
    blocks = driver.give_loaded(sequence, SAVED)
    if directory is not None:
        copied(backend, directory, transfer("load", blocks, range(SAVED)))
    driver.run()
    return sequence.output


def copied(backend: HostRunner, directory: Path, asked: Transfer) -> None:
    transfers = Transfers(backend.kv, directory)
    assert transfers.run(asked, lambda: False) == "done"
    transfers.close()
