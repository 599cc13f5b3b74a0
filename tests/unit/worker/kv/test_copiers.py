"""Blocks of every kind of operations, through a real arena, and back on every other kind."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from kvstore.arena.mapped_arena import MappedArena
from kvstore.core.layout import geometry
from services.worker.kv import cuda_copier
from services.worker.kv.rank_heads import RankHeads
from services.worker.models.config import ModelConfig
from services.worker.models.hf_config import read_model_config
from services.worker.models.sharding import shard_of, stage_of
from services.worker.ops.interface import OpsUnavailable
from services.worker.ops.native.build import Level, runnable_levels
from shared.messages.kvstore import KvLayout
from tests.support.kv.ranks import BLOCKS, OpsKind, Rank, make_arena, make_layout

SCATTERED, SLOTS = [5, 0, 9, 3], [2, 7, 1, 10]
KINDS: tuple[OpsKind, ...] = ("torch", "native", "staged")


def rank(kind: OpsKind, layout: KvLayout, directory: Path, **options: object) -> Rank:
    try:
        return Rank(kind, layout, directory, **options)  # type: ignore[arg-type]
    except OpsUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(("saver", "loader"), list(product(KINDS, KINDS)))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 32), (24, 64), (6, 16), (4, 16)])
def test_what_one_saves_another_loads(
    tmp_path: Path, saver: OpsKind, loader: OpsKind, dtype: str, head_dim: int, block_size: int
) -> None:
    """The other has computed the same itself: what it loads is what it would have."""
    layout = make_layout(dtype, head_dim=head_dim, block_size=block_size)
    arena = make_arena(tmp_path, layout)
    one, other, same = (rank(kind, layout, tmp_path) for kind in (saver, loader, loader))
    one.compute()
    same.compute()
    other.compute(seed=50)
    untouched = other.block(4)
    assert one.save(SCATTERED, SLOTS) == "done"
    assert all(arena.is_written(slot) and arena.is_sound(slot) for slot in SLOTS)
    places = [1, 2, 8, 0]
    assert other.load(places, SLOTS) == "done"
    for place, block in zip(places, SCATTERED, strict=True):
        assert torch.equal(other.block(place), same.block(block)), "to the last bit"
    assert torch.equal(other.block(4), untouched)
    assert not torch.equal(one.block(5), one.block(3)), "blocks this alike would prove nothing"


def test_stages_that_take_turns_mix_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks at a time, by a device that copies only when it is waited for."""
    layout = make_layout("bfloat16")
    monkeypatch.setattr(cuda_copier, "_STAGED_BYTES", 2 * geometry(layout, BLOCKS).payload_bytes)
    arena = make_arena(tmp_path, layout)
    one, other = rank("staged", layout, tmp_path), rank("staged", layout, tmp_path)
    one.compute()
    saved, slots = [5, 0, 9, 3, 11, 7, 2], [2, 7, 1, 10, 4, 0, 6]
    assert one.save(saved, slots) == "done"
    assert all(arena.is_written(slot) and arena.is_sound(slot) for slot in slots)
    places = [1, 2, 8, 0, 3, 10, 5]
    assert other.load(places, slots) == "done"
    assert all(torch.equal(other.block(to), one.block(of)) for to, of in zip(places, saved, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_slot_holds_its_heads_one_after_the_other(tmp_path: Path, kind: OpsKind, dtype: str) -> None:
    """[kv_heads][layers][2][tokens][head_dim], as kvstore/core/layout.py promises."""
    layout = make_layout(dtype, kv_heads=2)
    arena = make_arena(tmp_path, layout)
    one, plain = rank(kind, layout, tmp_path), rank("torch", layout, tmp_path)
    one.compute()
    plain.compute()
    assert one.save([6], [3]) == "done"
    expected = torch.stack([torch.stack(halves) for halves in plain.caches])[:, :, 6].movedim(2, 0).contiguous()
    assert bytes(arena.payload(3)) == expected.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("saver", "loader"), [("torch", "staged"), ("staged", "native"), ("native", "plain"), ("plain", "torch")]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cell_of_latents_is_the_latents_and_then_their_rotated_keys(
    tmp_path: Path, saver: OpsKind, loader: OpsKind, dtype: str
) -> None:
    layout = make_layout(dtype, kv_heads=1, head_dim=48, value_dim=6, block_size=32)
    arena = make_arena(tmp_path, layout)
    one, other = rank(saver, layout, tmp_path), rank(loader, layout, tmp_path)
    one.compute()
    assert one.save(SCATTERED, SLOTS) == "done"
    assert all(arena.is_written(slot) and arena.is_sound(slot) for slot in SLOTS)
    assert bytes(arena.payload(SLOTS[0])) == one.block(SCATTERED[0]).view(torch.uint8).numpy().tobytes()
    assert arena.geometry.cell_bytes == 32 * (48 + 6) * one.caches[0][0].itemsize
    assert other.load([1, 2, 8, 0], SLOTS) == "done"
    assert all(torch.equal(other.block(to), one.block(of)) for to, of in zip([1, 2, 8, 0], SCATTERED, strict=True))


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 32), (24, 64), (12, 16)])
def test_eight_bits_go_through_an_arena(tmp_path: Path, head_dim: int, block_size: int) -> None:
    """[kv_heads][layers][2][tokens][head_dim] there, as Triton's caches of that type lie."""
    layout = make_layout("float8_e4m3fn", kv_heads=2, head_dim=head_dim, block_size=block_size)
    arena = make_arena(tmp_path, layout)
    one, other = rank("native", layout, tmp_path), rank("native", layout, tmp_path)
    plain = rank("torch", make_layout("float32", kv_heads=2, head_dim=head_dim, block_size=block_size), tmp_path)
    one.compute()
    plain.compute()
    assert one.save(SCATTERED, SLOTS) == "done"
    expected = torch.stack([torch.stack(halves) for halves in plain.caches])[:, :, 5].movedim(2, 0).contiguous()
    saved = torch.frombuffer(bytearray(arena.payload(2)), dtype=torch.float8_e4m3fn).float().view(expected.shape)
    assert torch.equal(saved, expected.to(torch.float8_e4m3fn).float())
    assert other.load([1, 2, 8, 0], SLOTS) == "done"
    for place, block in zip([1, 2, 8, 0], SCATTERED, strict=True):
        assert torch.equal(other.block(place).view(torch.uint8), one.block(block).view(torch.uint8))


@pytest.mark.parametrize("level", runnable_levels())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_level_of_instructions_writes_the_same(tmp_path: Path, level: Level, dtype: str) -> None:
    layout = make_layout(dtype, layers=9, head_dim=32)
    arena = make_arena(tmp_path, layout)
    one, plain = rank("native", layout, tmp_path, level=level), rank("torch", layout, tmp_path)
    one.compute()
    plain.compute()
    assert (one.save(range(BLOCKS), range(BLOCKS)), plain.load(range(BLOCKS), range(BLOCKS))) == ("done", "done")
    again = rank("torch", layout, tmp_path)
    again.compute()
    assert all(torch.equal(plain.block(b), again.block(b)) for b in range(BLOCKS))
    assert all(arena.is_sound(slot) for slot in range(BLOCKS)), "its checksums are those of the xxhash package"


@pytest.mark.parametrize("head_dim", [4, 14, 16, 18, 30, 32, 34, 48, 256])
def test_checksums_are_right_at_every_length(tmp_path: Path, head_dim: int) -> None:
    """XXH3 takes 1,024 bytes at a time: whole blocks, two stripes more, two less."""
    layout = make_layout("bfloat16", layers=2, head_dim=head_dim, kv_heads=3)
    arena = make_arena(tmp_path, layout)
    one = rank("native", layout, tmp_path)
    one.compute()
    assert one.save([0, 1], [0, 1]) == "done"
    assert arena.is_sound(0)
    assert arena.is_sound(1)


def test_blocks_of_a_float16_model_are_shared_as_their_operations_keep_them(tmp_path: Path) -> None:
    layout = make_layout("float16")
    make_arena(tmp_path, layout)
    one, other = rank("torch", layout, tmp_path), rank("torch", layout, tmp_path)
    one.compute()
    assert (one.save([1], [0]), other.load([2], [0])) == ("done", "done")
    assert torch.equal(one.block(1), other.block(2))


@pytest.fixture
def grouped(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, "hidden_size": 64,'
        ' "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,'
        ' "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu",'
        ' "rope_theta": 10000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "eos_token_id": 1}'
    )
    return read_model_config(tmp_path)


def ranks_of(
    config: ModelConfig, world_size: int, kind: OpsKind, layout: KvLayout, directory: Path, stages: int = 1
) -> list[Rank]:
    """Of `stages` stages, `world_size` ranks each."""
    scheduled = [shard_of(config, number, world_size) for number in range(world_size)]
    layers = [(stage.first_layer, stage.end_layer) for stage in (stage_of(config, at, stages) for at in range(stages))]
    return [
        rank(kind, layout, directory, heads=share.kv_heads, writes=share.first_of_kv_heads, layers=part)
        for part, share in product(layers, scheduled)
    ]


@pytest.mark.parametrize(("saving", "loading"), [(1, 2), (2, 1), (2, 4), (4, 1), (8, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_ranks_loads_what_any_other_saved(
    tmp_path: Path, grouped: ModelConfig, kind: OpsKind, saving: int, loading: int
) -> None:
    """Two KV heads: with four ranks or eight each is held by several, of which one writes."""
    layout = make_layout("bfloat16", kv_heads=2)
    arena = make_arena(tmp_path, layout)
    writers = ranks_of(grouped, saving, kind, layout, tmp_path)
    assert sum(writer.heads for writer in writers if writer.share.writes) == 2
    for number, writer in enumerate(writers):
        assert not (number and arena.is_written(SLOTS[0]) and writer.share.writes), "whole before the last has written"
        writer.compute()
        assert writer.save(SCATTERED, SLOTS) == "done"
    assert all(arena.is_written(slot) for slot in SLOTS)
    for reader, same in zip(*(ranks_of(grouped, loading, kind, layout, tmp_path) for _ in range(2)), strict=True):
        same.compute()
        assert reader.load(SCATTERED, SLOTS) == "done"
        assert all(torch.equal(reader.block(block), same.block(block)) for block in SCATTERED)


@pytest.mark.parametrize(
    ("saving", "loading"), [((1, 2), (1, 1)), ((2, 3), (2, 1)), ((1, 1), (4, 2)), ((4, 3), (1, 2))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_any_pipeline_loads_what_any_other_saved(
    tmp_path: Path, grouped: ModelConfig, kind: OpsKind, saving: tuple[int, int], loading: tuple[int, int]
) -> None:
    """(ranks of a stage, stages): each rank has its layers of its heads."""
    layout = make_layout("bfloat16", kv_heads=2)
    arena = make_arena(tmp_path, layout)
    writers = [one for one in ranks_of(grouped, saving[0], kind, layout, tmp_path, saving[1]) if one.share.writes]
    for writer in writers:
        assert not arena.is_written(SLOTS[0]), "whole before the last has written"
        writer.compute()
        assert writer.save(SCATTERED, SLOTS) == "done"
    assert all(arena.is_written(slot) and arena.is_sound(slot) for slot in SLOTS)
    readers, computed = (ranks_of(grouped, loading[0], kind, layout, tmp_path, loading[1]) for _ in range(2))
    for reader, same in zip(readers, computed, strict=True):
        same.compute()
        assert reader.load(SCATTERED, SLOTS) == "done"
        assert all(torch.equal(reader.block(block), same.block(block)) for block in SCATTERED)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_that_is_overtaken_forgets_its_own_checksums_alone(tmp_path: Path, kind: OpsKind) -> None:
    layout = make_layout("float32")
    arena = make_arena(tmp_path, layout)
    first, second = (rank(kind, layout, tmp_path, layers=layers) for layers in ((0, 2), (2, 3)))
    for one in (first, second):
        one.compute()
    assert first.save([1], [0]) == "done"
    heads = RankHeads(MappedArena.open(arena.path), 0, layout.kv_heads, 2, 1)
    assert second.save([1], [0]) == "done"
    assert arena.is_sound(0)
    heads.forget_checksums(0)
    written = [bool(arena.checksum(0, cell)) for cell in range(arena.geometry.cells)]
    assert written == [True, True, False] * layout.kv_heads


def test_a_rank_that_does_not_write_leaves_the_arena_alone(tmp_path: Path) -> None:
    layout = make_layout("float32")
    arena = make_arena(tmp_path, layout)
    one = rank("torch", layout, tmp_path, writes=False)
    one.compute()
    assert one.save([1], [0]) == "done"
    assert not any(arena.payload(0))
    assert not any(arena.checksum(0, cell) for cell in range(arena.geometry.cells))
