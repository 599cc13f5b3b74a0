"""GGUF files, spoilt: each becomes a model that is served, or is refused in one line."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from services.worker.models.config import ModelError
from services.worker.models.gguf.conversion import convert
from tests.fuzz.mutations import spoilt_bytes
from tests.support.models.gguf_files import Kinds, gguf_model
from tests.support.models.tiny_tokenizers import byte_level
from tests.support.worker.plan_driver import Driver
from tests.support.worker.tiny_backend import tiny_backend

SHARE, FULL = 40, 10_000
MIXED: Kinds = {
    "": Kind.Q6_K,
    "token_embd": Kind.Q5_0,
    "attn_q": Kind.Q3_K,
    "attn_k": Kind.Q5_1,
    "attn_v": Kind.Q2_K,
    "attn_output": Kind.IQ4_NL,
    "ffn_gate": Kind.IQ4_XS,
    "ffn_up": Kind.Q5_K,
    "ffn_down": Kind.MXFP4,
}
"""Every other type that stays codes; queries, keys and values are one product of three."""
KINDS: tuple[tuple[str, Kinds], ...] = (("qwen2", Kind.Q8_0), ("llama", Kind.Q4_K), ("qwen3", MIXED))
EDGES = (0, 1, 2, 3, 7, 255, 256, 257, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1)


class GgufSpoiler:
    """Makes spoilt files of valid ones; the same ones for the same seed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._rng = random.Random(seed)
        self._heads, self._rests = [], []
        for family, kind in KINDS:
            whole = gguf_model(family, folder, kind, byte_level())[1].read_bytes()
            # Tensors' names are the last strings before their bytes.
            end = whole.rindex(b"blk.") + 100
            self._heads.append(whole[:end])
            self._rests.append(whole[end:])

    def file(self) -> bytes:
        """Draws the next one."""
        rng, which = self._rng, self._rng.randrange(len(KINDS))
        head, rest = self._heads[which], self._rests[which]
        match rng.randrange(12):
            case 0:
                return rng.randbytes(rng.randrange(4000))
            case 1:
                return (head + rest)[: rng.randrange(len(head) + len(rest))]
            case 2:
                return head[: rng.randrange(len(head))] + rng.choice(self._heads)[rng.randrange(len(head)) :] + rest
            case 3:
                at = rng.randrange(len(rest) - 4)
                return head + rest[:at] + rng.randbytes(4) + rest[at + 4 :]
            case 4 | 5 | 6 | 7:
                return self._with_another_value(head) + rest
            case _:
                for _ in range(rng.choice((1, 1, 2, 5))):
                    head = spoilt_bytes(head, rng)
                return head + rest

    def _with_another_value(self, head: bytes) -> bytes:
        """Behind a name, another number or size: one that a decoder cannot know to be wrong, as a rule."""
        rng = self._rng
        names = (b".block_count", b".embedding_length", b".head_count", b".head_count_kv", b".key_length", b".pre")
        more = (b".tokens", b".token_type", b".merges", b"_token_id", b"freq_base", b".weight", b".model", b"epsilon")
        name = rng.choice(names + more)
        places = [at for at in range(len(head)) if head.startswith(name, at)]
        at = rng.choice(places) + len(name) + rng.choice((0, 4, 4, 4, 8, 12, 20))
        size = rng.choice((4, 8))
        return head[:at] + (rng.choice(EDGES) % (1 << 8 * size)).to_bytes(size, "little") + head[at + size :]


def outcome(file: Path, folder: Path) -> str:
    """One word for what came of it."""
    try:
        convert(file, folder)
        driver = Driver(tiny_backend(folder, dtype="float32", kv_memory_bytes=4 << 20, max_model_len=64))
        sequence = driver.add([0, 0, 0], 2)
        driver.run()
    except ModelError as error:
        return "wrong" if "\n" in str(error) else "refused"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return "served" if len(sequence.output) == 2 else "wrong"


def check(folder: Path, seed: int, count: int) -> None:
    spoiler, found = GgufSpoiler(folder, seed), Counter[str]()
    file = folder / "spoilt.gguf"
    for number in range(count):
        file.write_bytes(spoiler.file())
        try:
            found[outcome(file, folder / "made")] += 1
        except Exception as error:
            error.add_note(f"of file {number} with seed {seed}")
            raise
    print(dict(found))
    assert found.total() == count
    assert not found["wrong"]
    assert found["served"] > count / 20 < found["refused"]


def test_spoilt_files_are_served_or_refused(tmp_path: Path) -> None:
    check(tmp_path, 1, SHARE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_spoilt_files_are_served_or_refused(tmp_path: Path) -> None:
    check(tmp_path, 2, FULL)
