"""Real ranks whose layers have block tables of their own, a real KV store, and the scheduler's cores of two engines:
what is saved, handed over and loaded says what `transformers` says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.distributed.communicator import SingleStage
from services.worker.kv.copier import RankKvCache
from services.worker.kv.layer_groups import group_layers
from services.worker.kv.transfers import Transfers
from services.worker.models.loaded_model import LoadSettings
from services.worker.models.model_loader import load_model
from services.worker.platforms.installed import built_in_platform
from shared.ids import EngineId
from tests.support.engines.real_engine import OUTPUT, RealEngine, asked, assert_handed_over, right
from tests.support.kv.arenas import Clock, new_directory, remove, store_in
from tests.support.kv.ranks import make_arena, transfer
from tests.support.models.library_models import library_model
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.worker.library_situations import prompt

LENGTHS = (1, 25, 100, 150)
"""Of prompts; windows have 24 tokens, blocks 16."""


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Five layers with windows for one that sees all."""
    different: dict[str, Any] = {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    }
    return make_model("gemma3", tmp_path_factory.mktemp("gemma3"), **different)


@pytest.fixture
def directory() -> Iterator[Path]:
    directory = new_directory()
    yield directory
    remove(directory)


@pytest.mark.features("hybrid KV cache", "prefill/decode", "chunked prefill", "prefix cache")
def test_what_each_group_saved_is_handed_over_and_loaded(gemma3: TinyModel, directory: Path) -> None:
    """The decode engine computes what was drawn; a third one continues prefixes of two lengths."""
    store = store_in(directory, 32 << 20, Clock())
    prefill, decode = (
        RealEngine(name, gemma3, store, directory, hybrid_kv_cache="auto") for name in ("prefill", "decode")
    )
    assert [group.window for group in prefill.backend.kv_groups] == [None] + [24] * 5
    assert prefill.backend.kv.layout.layers == 1, "a record is a block of one group"
    prompts = {f"r{seed}": prompt(length, seed) for seed, length in enumerate(LENGTHS)}
    assert_handed_over(prefill, decode, gemma3, prompts)
    assert prefill.computed == sum(LENGTHS)
    assert decode.computed == len(LENGTHS) * (OUTPUT - 1)
    blocks = sum(-(-length // 16) for length in LENGTHS)
    assert decode.loaded == blocks + 5 * sum(-(-length // 16) - max(0, length - 23) // 16 for length in LENGTHS)
    third, longest = RealEngine("third", gemma3, store, directory, hybrid_kv_cache="auto"), prompts["r3"]
    for name, tokens in {"same": longest, "shorter": longest[:100] + prompt(30, 9)}.items():
        before = third.computed
        third.send(asked(name, tokens))
        third.run()
        assert third.tokens[name] == right(gemma3, tokens, third.tokens[name])
        kept = 144 if name == "same" else 96
        assert third.computed - before == len(tokens) - kept + OUTPUT - 1


@pytest.mark.features("hybrid KV cache", "prefill/decode")
@pytest.mark.parametrize(("architecture", "loaded"), [("Llama4Text", 7 + 2 * 3), ("Gemma4Text", 7 + 2)])
def test_what_transformers_attends_to_is_handed_over(
    architecture: str, loaded: int, directory: Path, tmp_path: Path
) -> None:
    """Llama 4: of two layers what their last chunk, taken for a window of 32, still sees. Gemma 4: what a window of 24
    does, whose layer has other heads than that which sees everything."""
    model, store = library_model(architecture, tmp_path), store_in(directory, 32 << 20, Clock())
    prefill, decode = (
        RealEngine(name, model, store, directory, hybrid_kv_cache="on") for name in ("prefill", "decode")
    )
    tokens = prompt(110, 3)
    prefill.send(asked("r", tokens, decode_on=EngineId("decode")))
    prefill.run()
    [handed] = prefill.handed
    decode.send(handed)
    decode.run()
    said = prefill.tokens["r"] + decode.tokens["r"]
    assert said == right(model, tokens, said)
    assert (decode.computed, decode.loaded) == (OUTPUT - 1, loaded)


def test_engines_of_one_table_share_nothing_with_those_of_groups(gemma3: TinyModel, directory: Path) -> None:
    """Their records are others: what one has saved is a miss for the other, and is computed."""
    store = store_in(directory, 32 << 20, Clock())
    grouped, plain = (
        RealEngine(name, gemma3, store, directory, hybrid_kv_cache=wanted)
        for name, wanted in (("one", "on"), ("two", "off"))
    )
    tokens = prompt(100, 1)
    for engine in (grouped, plain):
        engine.send(asked("r", tokens))
        engine.run()
        assert engine.tokens["r"] == right(gemma3, tokens, engine.tokens["r"])
        assert engine.computed == 100 + OUTPUT - 1
        assert engine.saved > 0


class _Stage(SingleStage):
    """Which computes nothing."""

    stages = 2

    def __init__(self, stage: int) -> None:
        self.stage = stage


def shared_by(model: TinyModel, stage: int, seed: int) -> RankKvCache:
    """The KV memory of a stage, full of noise."""
    settings = LoadSettings(
        folder=model.path,
        platform=built_in_platform("cpu"),
        dtype="float32",
        ops="torch",
        pipeline=_Stage(stage),
        layers=(4, 2),
    )
    decoder = load_model(settings).decoder
    groups = group_layers(decoder.windows, 4096, (4, 2), stage)
    assert groups is not None
    decoder.use_groups(groups)
    caches = decoder.allocate_kv(3)
    generator = torch.Generator().manual_seed(seed + stage)
    for cache in (cache for halves in caches for cache in halves):
        cache.normal_(generator=generator)
    return decoder.share_kv(caches, "ab" * 16)


@pytest.mark.features("hybrid KV cache", "pipeline parallel", "prefill/decode")
def test_stages_write_their_own_layers_of_a_record(gemma3: TinyModel, tmp_path: Path) -> None:
    """Four caches, and one: both write to a slot, and the same stages of another engine read what is theirs."""
    writers = [shared_by(gemma3, stage, 1) for stage in range(2)]
    readers = [shared_by(gemma3, stage, 7) for stage in range(2)]
    layout = writers[0].layout
    assert [share.layout for share in (*writers, *readers)] == [layout] * 4
    assert (layout.layers, [(share.first_layer, share.num_layers) for share in writers]) == (5, [(0, 4), (4, 1)])
    make_arena(tmp_path, layout, 1)
    for share in writers:
        assert Transfers(share, tmp_path).run(transfer("save", [2], [0]), lambda: False) == "done"
    for writer, reader in zip(writers, readers, strict=True):
        assert Transfers(reader, tmp_path).run(transfer("load", [1], [0]), lambda: False) == "done"
        for written, read in zip(writer.caches, reader.caches, strict=True):
            assert all(torch.equal(one[2], other[1]) for one, other in zip(written, read, strict=True))
            assert not torch.equal(written[0][1], read[0][1])
