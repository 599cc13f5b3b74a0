"""KV connectors beside a real model: what one engine saved another loads, and whatever fails is computed.

Scheduler and rank are the real ones on an in-memory bus; what they say is compared with `transformers`.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvstore.connectors.installed import open_connector
from kvstore.connectors.interface import CacheLayout, ConnectorConfig, KVConnectorBase, KVRole, LayerCache
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.transfer import connector as core_connector
from services.worker.kv import connector_thread
from shared.blocks import hash_chain
from shared.packing import pack
from tests.support.engines.connector_engine import COUNT, PROMPT, Make, ask, at_rest, saved
from tests.support.engines.connector_engine import connector_engine as engine
from tests.support.engines.engine_on_a_bus import EngineOnABus
from tests.support.models.tiny_images import make_image_model, picture
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.worker.image_chats import ImageChat


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("llama", tmp_path_factory.mktemp("tiny"))


def shared_memory(folder: Path, role: KVRole = "kv_both", block_size: int = 16, **extra: object) -> Make:
    config = json.dumps({"directory": str(folder), "size": "64MiB", **extra})
    return lambda rank: open_connector("shared-memory", config, role, engine="e", rank=rank, block_size=block_size)


def expect_quick_loads(engine: EngineOnABus) -> None:
    """As if loads had been measured, so that prompts are computed behind them layer by layer."""
    epoch = engine.scheduler.core.epoch_state
    assert epoch is not None
    epoch.transfers.costs.record_load(1, 1e-9, 0.0)


def overlapped(engine: EngineOnABus) -> int:
    """How many loads were computed behind while they ran, or should have been."""
    return engine.scheduler.core.counters.loads_overlapped


@pytest.mark.features("KV connector", "prefix cache", "chunked prefill")
@pytest.mark.parametrize(
    ("ops", "layerwise", "size"),
    [("torch", False, 16), ("torch", True, 16), ("native", False, 16), ("native", True, 16), ("native", True, 32)],
)
async def test_what_one_engine_saved_a_second_one_loads_and_says_the_same(
    model: TinyModel, tmp_path: Path, layerwise: bool, ops: str, size: int
) -> None:
    expected = model.greedy(PROMPT, COUNT)
    producer = shared_memory(tmp_path, "kv_producer", size, layerwise=layerwise)
    async with engine(model, producer, "kv_producer", ops) as (a, _):
        assert await ask(a, "first") == (expected, 0)
        await saved(a, len(PROMPT) // size)
        await at_rest(a)
    async with engine(model, shared_memory(tmp_path, "kv_consumer", size), "kv_consumer", ops) as (b, _):
        assert await ask(b, "second") == (expected, 128)
        assert await ask(b, "other", PROMPT[:40] + [9] * 30) == (model.greedy(PROMPT[:40] + [9] * 30, COUNT), 32)
        assert b.scheduler.core.counters.blocks_loaded == 128 // size
        await at_rest(b)


@pytest.mark.features("KV connector", "images", "prefix cache", "chunked prefill")
async def test_what_was_computed_of_an_image_is_loaded_with_the_same_image_alone(tmp_path: Path) -> None:
    model = make_image_model(tmp_path / "model")
    one, other = (ImageChat(picture(seed), "What is to be seen in it? Tell all that you can.") for seed in (0, 1))
    (ids, embeds), folder = one.prompt(model), tmp_path / "kept"
    async with engine(model, shared_memory(folder)) as (a, _):
        assert await ask(a, "first", ids, embeds) == (one.expected(model, COUNT), 0)
        await saved(a, len(ids) // 16)
    async with engine(model, shared_memory(folder)) as (b, _):
        assert await ask(b, "other", *other.prompt(model)) == (other.expected(model, COUNT), 0)
        assert await ask(b, "again", ids, embeds) == (one.expected(model, COUNT), len(ids) // 16 * 16)
        assert b.scheduler.core.counters.blocks_loaded == len(ids) // 16
        await at_rest(b)


LONGER = [*PROMPT[:128], *range(3, 60)]
"""Of which more than one block is to be computed behind what is loaded."""


@pytest.mark.features("KV connector", "prefix cache", "chunked prefill")
@pytest.mark.parametrize("ops", ["torch", "native"])
async def test_a_prompt_is_computed_behind_its_load_layer_by_layer_and_says_the_same(
    model: TinyModel, tmp_path: Path, ops: str
) -> None:
    async with engine(model, shared_memory(tmp_path, layerwise=True), ops=ops) as (a, _):
        await ask(a, "first")
        await saved(a, len(PROMPT) // 16)
    expected = model.greedy(LONGER, COUNT)
    async with engine(model, shared_memory(tmp_path, layerwise=True), ops=ops) as (b, _):
        expect_quick_loads(b)
        assert await ask(b, "second", LONGER) == (expected, 128)
        assert (overlapped(b), b.scheduler.core.counters.loads_failed) == (1, 0)
        await saved(b, 3)
        await at_rest(b)
    async with engine(model, shared_memory(tmp_path), ops=ops) as (c, _):
        assert await ask(c, "third", LONGER) == (expected, 176), "what was computed behind a load was saved, too"


async def test_what_was_computed_behind_a_spoilt_block_is_computed_again(model: TinyModel, tmp_path: Path) -> None:
    async with engine(model, shared_memory(tmp_path)) as (a, _):
        await ask(a, "first")
        await saved(a, len(PROMPT) // 16)
    spoil_one(tmp_path)
    async with engine(model, shared_memory(tmp_path, layerwise=True)) as (b, _):
        expect_quick_loads(b)
        assert await ask(b, "second", LONGER) == (model.greedy(LONGER, COUNT), 0)
        assert (overlapped(b), b.scheduler.core.counters.loads_failed) == (1, 1)
        await at_rest(b)


def spoil_one(folder: Path) -> None:
    files = sorted(folder.glob("*/0/*"))
    assert len(files) == len(PROMPT) // 16, "nothing is left that is not whole"
    whole = files[3].read_bytes()
    files[3].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


async def test_spoilt_and_missing_blocks_are_computed(model: TinyModel, tmp_path: Path) -> None:
    expected = model.greedy(PROMPT, COUNT)
    async with engine(model, shared_memory(tmp_path)) as (a, _):
        await ask(a, "first")
        await saved(a, len(PROMPT) // 16)
    spoil_one(tmp_path)
    async with engine(model, shared_memory(tmp_path)) as (b, _):
        assert await ask(b, "second") == (expected, 0)
        assert b.scheduler.core.counters.loads_failed == 1
        await at_rest(b)


class Scripted(KVConnectorBase):
    """Keeps blocks in this process's memory, and misbehaves where `fault` says."""

    stored: Mapping[bytes, list[tuple[Any, Any]]] = {}
    released = threading.Event()

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self.fault = str(config.extra.get("fault", ""))
        self.lookups = 0
        self.metadata: list[bytes] = []
        self.reports: list[Any] = []
        self.later: dict[str, int] = {}
        self.layers: list[list[str]] = []

    @property
    def layerwise(self) -> bool:
        return "layerwise" in self.config.extra

    def _maybe(self, where: str) -> None:
        if self.fault == f"{where} raises":
            raise RuntimeError("no")
        if self.fault == f"{where} hangs":
            self.released.wait(60.0)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self.lookups += 1
        self._maybe("lookup")
        assert tuple(hash_chain(pack(request.token_ids), None, 16)) == request.block_hashes
        if self.fault.startswith("lookup says "):
            return {"nonsense": "many", "less than nothing": -16, "too many": 10**9}[self.fault[12:]]
        found = 0
        for name in request.block_hashes[num_computed_tokens // 16 :]:
            if name not in Scripted.stored:
                break
            found += 1
        return found * 16, "async" in self.config.extra

    def build_connector_meta(self, step: Any) -> Any:
        self._maybe("metadata")
        return 5 if self.fault == "metadata is none" else repr((len(step.loads), len(step.saves))).encode()

    def request_finished(self, request_id: str, block_ids: Any) -> bool:
        return "async" in self.config.extra

    def update_connector_output(self, output: Any) -> None:
        self.reports.append(output)

    def register_kv_caches(self, kv_caches: Mapping[str, LayerCache], layout: CacheLayout) -> None:
        self.caches = dict(kv_caches)

    def start_load_kv(self) -> None:
        self._maybe("load")
        assert self.step is not None
        self.metadata.append(self.step.metadata)
        for run in self.step.loads:
            self.later[run.request_id] = 3
            for block, name in zip(run.block_ids, run.hashes, strict=True):
                for (keys, values), (k, v) in zip(self.caches.values(), Scripted.stored[name], strict=True):
                    keys[block], values[block] = k, v

    def wait_for_layer_load(self, layer_name: str) -> None:
        if layer_name != next(iter(self.caches)):
            self._maybe("layer")

    def get_block_ids_with_load_errors(self) -> set[int]:
        return (
            {block for run in self.step.loads for block in run.block_ids} if self.fault == "layer is wrong" else set()
        )

    def save_kv_layer(self, layer_name: str, kv_layer: LayerCache) -> None:
        self._maybe("save")
        assert self.step is not None
        for run in self.step.saves:
            for block, name in zip(run.block_ids, run.hashes, strict=True):
                halves = tuple(half[block].clone() for half in kv_layer)
                layers = [] if layer_name == next(iter(self.caches)) else Scripted.stored[name]
                Scripted.stored = {**Scripted.stored, name: [*layers, halves]}

    def get_finished(self, finished_request_ids: set[str]) -> Any:
        if self.fault == "nonsense is finished":
            return 7
        self.later |= dict.fromkeys(finished_request_ids, 3)
        self.later = {request: left - 1 for request, left in self.later.items()}
        done = {request for request, left in self.later.items() if left <= 0}
        return done, done


def scripted(**extra: object) -> Make:
    return lambda rank: Scripted(ConnectorConfig("e", "kv_both", extra, rank, 16))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    Scripted.stored, Scripted.released = {}, threading.Event()
    yield
    Scripted.released.set()


async def test_asynchronous_loads_are_over_and_kept_blocks_are_freed_when_the_connector_says_so(
    model: TinyModel,
) -> None:
    expected = model.greedy(PROMPT, COUNT)
    async with engine(model, scripted(**{"async": True})) as (a, _):
        await ask(a, "first")
        await at_rest(a)
    async with engine(model, scripted(**{"async": True})) as (b, halves):
        assert await ask(b, "second") == (expected, 128)
        await at_rest(b)
        assert isinstance(halves.worker, Scripted)
        assert isinstance(halves.scheduler, Scripted)
        assert b"(1, 0)" in halves.worker.metadata
        reports = halves.scheduler.reports
        await b.until(lambda: any(r.finished_sending for r in reports), "the blocks are sent")
        assert any(r.finished_recving == {"second-1"} for r in reports)


@pytest.mark.parametrize(
    "fault",
    [
        "lookup raises",
        "lookup hangs",
        "lookup says nonsense",
        "lookup says less than nothing",
        "lookup says too many",
        "metadata raises",
        "metadata hangs",
        "metadata is none",
        "load raises",
        "load hangs",
        "layer raises",
        "layer hangs",
        "layer is wrong",
        "save raises",
        "save hangs",
        "nonsense is finished",
    ],
)
async def test_what_fails_is_computed_and_no_request_is_lost(
    model: TinyModel, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_connector, "LOAD_TIMEOUT", 0.2)
    monkeypatch.setattr(connector_thread, "LAYERS_TIMEOUT", 0.1)
    quick = EngineLimits(max_batch_tokens=48, max_running=8, store_deadline=0.2, canary_interval=0.0)
    expected = model.greedy(PROMPT, COUNT)
    async with engine(model, scripted()) as (a, _):
        await ask(a, "before")
        await at_rest(a)
    slow = {"async": True} if fault == "nonsense is finished" else {}
    async with engine(model, scripted(fault=fault, **slow), limits=quick) as (b, _):
        output, cached = await ask(b, "first")
        assert output == expected
        assert cached == (128 if fault.startswith("save") else 0)
        assert (await ask(b, "again"))[0] == expected
        begun = time.monotonic()
        assert (await ask(b, "more", [*PROMPT, 9, 9]))[0] == model.greedy([*PROMPT, 9, 9], COUNT)
        assert time.monotonic() - begun < 60
        Scripted.released.set()


@pytest.mark.parametrize("fault", ["load raises", "load hangs", "layer raises", "layer hangs", "layer is wrong"])
async def test_a_step_that_computes_behind_a_load_that_fails_loses_no_request(
    model: TinyModel, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_connector, "LOAD_TIMEOUT", 0.2)
    monkeypatch.setattr(connector_thread, "LAYERS_TIMEOUT", 0.1)
    async with engine(model, scripted()) as (a, _):
        await ask(a, "before")
        await at_rest(a)
    async with engine(model, scripted(fault=fault, layerwise=True)) as (b, _):
        expect_quick_loads(b)
        beside = asyncio.create_task(ask(b, "beside", PROMPT[::-1]))
        assert await ask(b, "first", LONGER) == (model.greedy(LONGER, COUNT), 0)
        assert overlapped(b) == 1
        assert (await beside)[0] == model.greedy(PROMPT[::-1], COUNT)
        assert (await ask(b, "again", LONGER))[0] == model.greedy(LONGER, COUNT)
        Scripted.released.set()
        await at_rest(b)
