"""How many blocks a rank takes, and what is said where they are too few."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.executor import kv_sizing
from services.worker.executor.kv_sizing import DeviceMemory, KvDemand, KvSize, size_kv
from services.worker.graphs.choice import NO_GRAPHS
from services.worker.models.config import ModelError
from services.worker.platforms.installed import built_in_platform
from services.worker.platforms.main_memory import gib
from shared.kv_groups import MAX_TOKENS, STEP_ROWS, KvCacheGroup

CPU = built_in_platform("cpu")
GIB = 1 << 30
MIB = 1 << 20


def demand(**different: Any) -> KvDemand:
    """1 MiB blocks; a sequence of 4,096 tokens fills 256 of them, a quarter of a GiB. A checkpoint is as large as a
    sequence's states."""
    plain = {
        "checkpoint_bytes": different.get("state_bytes", 0),
        "block_bytes": MIB,
        "block_size": 16,
        "max_num_seqs": 64,
        "max_model_len": 4096,
        "explicit_model_len": False,
        "given": None,
    }
    return KvDemand(**(plain | different))


def cpu(free: int, activations: int = 0) -> DeviceMemory:
    return DeviceMemory(kind="shared", total=2 * free, free=free, held=0, activations=activations)


def gpu(**different: Any) -> DeviceMemory:
    """140 GiB, of which the driver has taken one and this worker's weights 16."""
    held = different.get("held", 16 * GIB)
    others = different.pop("others", GIB)
    plain = {"kind": "own", "total": 140 * GIB, "free": 140 * GIB - held - others, "held": held, "activations": 2 * GIB}
    return DeviceMemory(**(plain | different))


def test_memory_given_is_taken() -> None:
    assert size_kv(demand(given=3 * GIB), cpu(8 * GIB, GIB)) == KvSize(3072, 4096)
    assert size_kv(demand(given=3 * GIB), gpu()) == KvSize(3072, 4096)


def test_states_of_all_sequences_come_before_blocks() -> None:
    assert size_kv(demand(given=3 * GIB, state_bytes=16 * MIB), cpu(8 * GIB, GIB)) == KvSize(1536, 4096, 32)
    assert size_kv(demand(max_num_seqs=7, state_bytes=GIB), cpu(9 * GIB)).num_blocks == 448
    assert size_kv(demand(state_bytes=GIB), gpu()).num_blocks == (126 - 18 - 64 - 11) * 1024
    larger = demand(given=3 * GIB, state_bytes=16 * MIB, checkpoint_bytes=32 * MIB)
    assert size_kv(larger, cpu(8 * GIB, GIB)) == KvSize(1536, 4096, 16)
    with pytest.raises(ModelError) as error:
        size_kv(demand(max_num_seqs=9, state_bytes=GIB), cpu(9 * GIB, GIB))
    assert str(error.value) == (
        "max_num_seqs 9: the states of so many sequences take 9.00 GiB of KV memory, 1.00 GiB each, and there are "
        "8.00 GiB: lower it"
    )


def test_states_leave_room_for_captured_decodes() -> None:
    assert size_kv(demand(state_bytes=GIB), gpu(graphs=4 * GIB)) == KvSize((126 - 18 - 4 - 64 - 10) * 1024, 4096, 10)
    without = demand(block_bytes=0, state_bytes=GIB, max_num_seqs=106)
    with pytest.raises(ModelError, match=r"take 106.00 GiB of KV memory, 1.00 GiB each, and there are 104.00 GiB"):
        size_kv(without, gpu(graphs=4 * GIB))


def test_a_model_without_attention_is_limited_by_its_sequences() -> None:
    without = demand(block_bytes=0, state_bytes=MIB, max_num_seqs=4, max_model_len=100_000)
    assert size_kv(without, cpu(GIB)) == KvSize((4 + 8) * 6250, 100_000, 8)
    many = demand(block_bytes=0, state_bytes=MIB, max_num_seqs=4000, max_model_len=100_000)
    assert size_kv(many, cpu(9 * GIB)).num_blocks == 1 << 20


def test_memory_given_may_go_beyond_the_share_of_a_gpu() -> None:
    assert size_kv(demand(given=100 * GIB, gpu_share=0.5), gpu()).num_blocks == 100 * 1024


def test_a_cpu_gives_what_sequences_are_likely_to_use_and_a_modest_share() -> None:
    assert size_kv(demand(max_num_seqs=8), cpu(64 * GIB)).num_blocks == 512
    assert size_kv(demand(max_num_seqs=1), cpu(64 * GIB)).num_blocks == 256
    assert size_kv(demand(), cpu(9 * GIB, GIB)).num_blocks == 2048
    assert size_kv(demand(max_num_seqs=256), cpu(999 * GIB)).num_blocks == 4096


def test_a_gpu_gives_what_is_left_of_the_share_of_all_its_memory() -> None:
    large = demand(max_num_seqs=1024)
    assert size_kv(large, gpu()).num_blocks == (126 - 16 - 2) * 1024
    assert size_kv(demand(max_num_seqs=1024, gpu_share=0.5), gpu()).num_blocks == (70 - 16 - 2) * 1024
    assert size_kv(large, gpu(graphs=3 * GIB)).num_blocks == (126 - 16 - 2 - 3) * 1024


def test_a_gpu_gives_no_more_than_others_have_left() -> None:
    assert size_kv(demand(max_num_seqs=1024), gpu(others=60 * GIB)).num_blocks == (140 - 60 - 16 - 2) * 1024


def test_a_tiny_model_does_not_take_a_whole_gpu() -> None:
    assert size_kv(demand(max_num_seqs=2), gpu()).num_blocks == 4 * 2 * 256


def test_a_gpu_on_which_nothing_is_left_is_refused_with_what_takes_what() -> None:
    full = gpu(held=120 * GIB, activations=5 * GIB, graphs=2 * GIB)
    said = (
        r"nothing is left .* of the 126\.00 GiB that gpu_memory_utilization = 0\.9 allows: weights take 120\.00 GiB, "
        r"a step of the largest batch 5\.00 GiB, captured decodes 2\.00 GiB, others 1\.00 GiB of 140\.00 GiB\. "
        r"Raise gpu_memory_utilization"
    )
    with pytest.raises(ModelError, match=said):
        size_kv(demand(), full)
    with pytest.raises(ModelError, match=r"others 125\.00 GiB of 140\.00 GiB"):
        size_kv(demand(), gpu(others=125 * GIB))


def test_the_last_block_that_fits_is_given() -> None:
    just = gpu(held=126 * GIB - 2 * GIB - 4 * MIB)
    assert size_kv(demand(), just) == KvSize(4, 64)
    with pytest.raises(ModelError, match="nothing is left"):
        size_kv(demand(), gpu(held=126 * GIB - 2 * GIB - MIB + 1))


@pytest.mark.parametrize("memory", [cpu(GIB), gpu()])
def test_the_context_shrinks_to_what_fits_unless_it_was_asked_for(memory: DeviceMemory) -> None:
    assert size_kv(demand(given=100 * MIB), memory) == KvSize(100, 1600)
    with pytest.raises(ModelError, match=r"4096 tokens needs 0\.25 GiB.*length to 1600"):
        size_kv(demand(given=100 * MIB, explicit_model_len=True), memory)


def test_more_than_is_free_is_refused() -> None:
    with pytest.raises(ModelError, match=r"3\.00 GiB of KV memory do not fit: 3\.50 GiB are free.*takes 1\.00 GiB"):
        size_kv(demand(given=3 * GIB), cpu(3 * GIB + GIB // 2, GIB))
    with pytest.raises(ModelError, match=r"120\.00 GiB of KV memory do not fit: 123\.00 GiB are.*takes 4\.00 GiB"):
        size_kv(demand(given=120 * GIB), gpu(graphs=2 * GIB))


def test_what_takes_what_is_told() -> None:
    assert cpu(3 * GIB, GIB).summary() == "a step of the largest batch takes 1.00 GiB, 3.00 GiB are free"
    assert gpu().summary() == (
        "weights take 16.00 GiB, a step of the largest batch 2.00 GiB, others 1.00 GiB of 140.00 GiB"
    )


def test_a_full_machine_is_refused() -> None:
    with pytest.raises(ModelError, match="and there are 0 bytes: give kv_memory of so much or more"):
        size_kv(demand(), cpu(MIB, 2 * MIB))


def test_kv_memory_that_holds_nothing_is_named_and_so_is_what_it_takes() -> None:
    said = "one sequence of 4096 tokens needs 0.25 GiB of KV memory and kv_memory leaves 3 bytes for it: give kv_memory"
    with pytest.raises(ModelError, match=said):
        size_kv(demand(given=3), cpu(3 * GIB, GIB))
    assert [gib(size) for size in (2 * MIB, 3 << 10, 7)] == ["2.00 MiB", "3.00 KiB", "7 bytes"]


def test_the_peak_of_a_piece_of_work_is_measured_even_after_a_higher_one() -> None:
    def work(size: int) -> None:
        with mmap.mmap(-1, size) as memory:  # and not the allocator's, which may have this much at hand
            for offset in range(0, size, mmap.PAGESIZE):
                memory[offset] = 1

    work(256 * MIB)
    assert 50 * MIB < CPU.peak_bytes(lambda: work(64 * MIB)) < 128 * MIB
    assert 0 < CPU.memory().free < CPU.memory().total


def test_rows_beside_prompts_are_as_many_however_many_tokens_a_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU tries a small step, whose bytes are multiplied; those of the rows are not."""

    class Counting(type(CPU)):  # type: ignore[misc]
        def peak_bytes(self, work: Callable[[], None]) -> int:
            before = len(tried)
            work()
            return sum(tried[before:])

    def warm_up(_probe: object, *, rows: int, sequences: int, beside: int) -> None:
        tried.append(rows + beside * (len(parts.groups) > 0))

    tried: list[int] = []
    parts: Any = SimpleNamespace(platform=Counting(0), groups=(), max_num_seqs=4, token_bytes=0, branch_bytes=0)
    parts.card, parts.runner = SimpleNamespace(max_model_len=4096, block_size=16), lambda *_: None
    monkeypatch.setattr(kv_sizing, "warm_up", warm_up)

    def activations(tokens: int) -> int:
        return kv_sizing.profile(parts, max_batch_tokens=tokens, graphs=NO_GRAPHS).activations

    assert [activations(tokens) for tokens in (128, 2048)] == [128, 2048]
    parts.groups = KvCacheGroup(layers=4), KvCacheGroup(layers=2, encoded=100)
    assert [activations(tokens) for tokens in (128, 2048)] == [
        129 + 128 + STEP_ROWS,
        129 * 16 + 128 + STEP_ROWS,
    ]


GROUPS = (KvCacheGroup(layers=4), *[KvCacheGroup(layers=4, window=64)] * 5)


def test_groups_of_layers_need_blocks_for_windows_only() -> None:
    """Of 256 blocks of tokens a window of 64 has those of 63 + 32 tokens at a time, and one more that it begins in."""
    grouped = demand(groups=GROUPS, step_tokens=32, given=3 * GIB)
    assert grouped.sequence_blocks == 1 + 256 + 5 * 7
    assert grouped.sequence_bytes == grouped.sequence_blocks * MIB
    assert size_kv(grouped, cpu(8 * GIB, GIB)) == KvSize(3072, 4096)


def test_the_longest_sequence_is_what_all_groups_have_room_for() -> None:
    assert demand(groups=GROUPS, step_tokens=32).longest(1 + 100 + 35) == 1600
    assert demand(groups=GROUPS, step_tokens=32).longest(1 + 5 * 6) == 5 * 16, "shorter than the window: all have all"
    assert demand(groups=GROUPS[1:], step_tokens=32).longest(1 + 35) == MAX_TOKENS, "windows alone have no end"
    assert demand(groups=GROUPS, step_tokens=32).longest(1 + 5) == 0


def test_a_context_that_does_not_fit_in_groups_says_which_would() -> None:
    with pytest.raises(ModelError, match="lower the maximum model length to 1600"):
        size_kv(demand(groups=GROUPS, step_tokens=32, explicit_model_len=True, given=136 * MIB), cpu(8 * GIB))
