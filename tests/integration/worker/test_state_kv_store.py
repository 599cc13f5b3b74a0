"""Real ranks whose models have states, a real KV store, and the scheduler's cores of engines: who is handed over, or
goes on behind what another engine has computed, says what `transformers` says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker.ops.interface import OpsName
from shared.ids import EngineId
from tests.support.engines.real_engine import OUTPUT, RealEngine, asked, assert_handed_over, right
from tests.support.kv.arenas import Clock, new_directory, remove, store_in
from tests.support.models.tiny_models import STATE_FAMILIES, by_lane, make_model
from tests.support.worker.library_situations import prompt

LENGTHS = (1, 25, 96, 150)
"""Of prompts; blocks have 16 tokens, steps 40."""
MEMORY = 16 << 20


@pytest.fixture
def directory() -> Iterator[Path]:
    directory = new_directory()
    yield directory
    remove(directory)


@pytest.mark.features("states", "prefill/decode", "chunked prefill", "prefix cache")
@pytest.mark.parametrize("family", by_lane(STATE_FAMILIES))
def test_states_are_handed_over_and_loaded(tmp_path: Path, directory: Path, family: str) -> None:
    """The decode engine, of other operations, computes what was drawn; a third one goes on behind two beginnings.
    Blocks with keys of indexers are for the same operations alone."""
    model, store = make_model(family, tmp_path), store_in(directory, 64 << 20, Clock())

    def engine(name: str, ops: OpsName) -> RealEngine:
        return RealEngine(name, model, store, directory, ops=ops, kv_memory_bytes=MEMORY)

    prefill, decode = engine("prefill", "native"), engine("decode", "native" if family == "qwen4" else "torch")
    prompts = {f"r{seed}": prompt(length, seed) for seed, length in enumerate(LENGTHS)}
    assert_handed_over(prefill, decode, model, prompts)
    assert prefill.computed == sum(LENGTHS)
    assert decode.computed == len(LENGTHS) * (OUTPUT - 1)
    records = decode.backend.state_records
    assert records is not None
    blocks = 0 if records.alone else sum(-(-length // 16) for length in LENGTHS)
    assert decode.loaded == blocks + records.pages * len(LENGTHS)
    third, longest = engine("third", "native"), prompts["r3"]
    other = longest[:100] + prompt(30, 9)
    third.send(asked("other", other))  # leaves a checkpoint behind what both have in common only with the second
    third.run()
    for name, tokens, kept in (("same", longest, 144), ("shorter", other, 128)):
        before = third.computed
        third.send(asked(name, tokens))
        third.run()
        assert third.tokens[name] == right(model, tokens, third.tokens[name])
        assert third.computed - before == len(tokens) - kept + OUTPUT - 1


@pytest.mark.parametrize("family", ["bamba", "gemma3"])
def test_they_go_with_keys_and_values_in_eight_bits(tmp_path: Path, directory: Path, family: str) -> None:
    """Each with the size of its steps: who decodes what another has computed says what one engine says."""
    model, store = make_model(family, tmp_path), store_in(directory, 64 << 20, Clock())
    alone, prefill, decode = (
        RealEngine(name, model, store, directory, kv_memory_bytes=MEMORY, kv_cache_dtype="int8_per_token_head")
        for name in ("alone", "prefill", "decode")
    )
    tokens = prompt(150, 5)
    prefill.send(asked("r", tokens, decode_on=EngineId("decode")))
    prefill.run()
    for request in prefill.handed:
        decode.send(request)
    decode.run()
    assert decode.computed == OUTPUT - 1
    alone.send(asked("s", tokens, prefix_caching=False))
    alone.run()
    assert prefill.tokens["r"] + decode.tokens["r"] == alone.tokens["s"]


def test_engines_with_their_stores_find_what_a_former_one_left(tmp_path: Path, directory: Path) -> None:
    """As after a crash: store and engine are new, the arena is the old one's."""
    model, tokens = make_model("granite-hybrid", tmp_path), prompt(150, 3)
    first = store_in(directory, 64 << 20, Clock())
    engine = RealEngine("one", model, first, directory, kv_memory_bytes=MEMORY)
    engine.send(asked("r", tokens))
    engine.run()
    first.close()
    second = store_in(directory, 64 << 20, Clock())
    second.recover()
    engine = RealEngine("two", model, second, directory, kv_memory_bytes=MEMORY)
    engine.send(asked("r", tokens))
    engine.run()
    assert engine.tokens["r"] == right(model, tokens, engine.tokens["r"])
    assert engine.computed == 150 - 144 + OUTPUT - 1
