"""How many blocks a rank takes, and what is said where they are too few."""

from __future__ import annotations

import pytest
import torch

from services.worker.kv_memory import KvDemand, KvSize, size_kv
from services.worker.memory import free_bytes, peak_bytes
from services.worker.model.config import ModelError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30
MIB = 1 << 20


def demand(*, given: int | None = None, explicit: bool = False, sequences: int = 64) -> KvDemand:
    """1 MiB blocks; a sequence of 4,096 tokens fills 256 of them."""
    return KvDemand(
        block_bytes=MIB,
        max_num_seqs=sequences,
        max_model_len=4096,
        explicit_model_len=explicit,
        given=given,
    )


def test_memory_given_is_taken() -> None:
    assert size_kv(demand(given=3 * GIB), free=8 * GIB, activations=GIB, device=CPU) == KvSize(3072, 4096)


def test_no_more_is_taken_than_sequences_are_likely_to_use() -> None:
    assert size_kv(demand(sequences=2), free=64 * GIB, activations=0, device=CUDA).num_blocks == 512
    assert size_kv(demand(sequences=8), free=64 * GIB, activations=0, device=CPU).num_blocks == 512
    assert size_kv(demand(sequences=1), free=64 * GIB, activations=0, device=CPU).num_blocks == 256


def test_a_cpu_gives_a_modest_share_and_a_gpu_nearly_everything() -> None:
    assert size_kv(demand(), free=9 * GIB, activations=GIB, device=CPU).num_blocks == 2048
    assert size_kv(demand(sequences=256), free=999 * GIB, activations=0, device=CPU).num_blocks == 4096
    assert size_kv(demand(), free=11 * GIB, activations=GIB, device=CUDA).num_blocks == 9216


def test_the_context_shrinks_to_what_fits_unless_it_was_asked_for() -> None:
    assert size_kv(demand(given=100 * MIB), free=GIB, activations=0, device=CPU) == KvSize(100, 1600)
    with pytest.raises(ModelError, match=r"4096 tokens needs 0\.25 GiB.*length to 1600"):
        size_kv(demand(given=100 * MIB, explicit=True), free=GIB, activations=0, device=CPU)


def test_more_than_is_free_is_refused() -> None:
    with pytest.raises(ModelError, match=r"3\.00 GiB of KV memory do not fit: 3\.50 GiB are free"):
        size_kv(demand(given=3 * GIB), free=3 * GIB + GIB // 2, activations=GIB, device=CPU)


def test_a_full_machine_is_refused() -> None:
    with pytest.raises(ModelError, match="give more KV memory"):
        size_kv(demand(), free=MIB, activations=2 * MIB, device=CPU)


def test_the_peak_of_a_piece_of_work_is_measured_even_after_a_higher_one() -> None:
    def work(size: int) -> None:
        torch.ones(size, dtype=torch.uint8)

    work(256 * MIB)
    assert 50 * MIB < peak_bytes(CPU, lambda: work(64 * MIB)) < 128 * MIB
    assert free_bytes(CPU) > 0
