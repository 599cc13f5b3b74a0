"""A stream's tokens and log-probabilities are the same to the last bit, however its steps are made up.

Alone, in a batch, with its prompt cut in chunks, resumed behind tokens that were already sent, and behind a cached
prefix: the promise of docs/engine.md for one machine, one number of ranks and the native operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from services.offline import LLM, SamplingParams
from services.offline.outputs import CompletionOutput, RequestOutput
from services.worker.ops.native import native_ops
from services.worker.ops.native.build import Level, runnable_levels
from tests.support.models.tiny_models import VOCABULARY, make_model, write_word_tokenizer
from tests.support.paths import DEMO_MODEL
from tests.support.tiles.emulated_tiles import tile_instructions

NEW_TOKENS = 12
WHOLE, CHUNKED = 2048, 48
"""Tokens of the largest step: more than any prompt has, and fewer than most have."""
LENGTHS = (3, 48, 130, 523)
"""Of prompts: the longest is attended to in three chunks of 256 tokens."""
LEVELS = [level for level in ("amx", "avx512-bf16", "avx2", "neon") if level in runnable_levels()]
"""Of those with instructions of their own for products; the sums of others run through the same code."""


def prompts(vocabulary: int, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids without special ones, other ones in each prompt."""
    return [list(islice(cycle(range(20 + 31 * n, vocabulary, 7 + n)), length)) for n, length in enumerate(lengths)]


def params(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=3)


Positions = list[tuple[int, dict[int, float]]]
"""Of each new token: which it is, and the log-probabilities of the likeliest."""


def positions(output: RequestOutput) -> Positions:
    (choice,) = output.outputs
    return list(zip(choice.token_ids, map(_numbers, _logprobs(choice)), strict=True))


def _logprobs(choice: CompletionOutput) -> list[dict[int, Any]]:
    assert choice.logprobs is not None
    return choice.logprobs


def _numbers(position: Mapping[int, Any]) -> dict[int, float]:
    return {token: each.logprob for token, each in position.items()}


@contextmanager
def engine(model: Path, step: int, *, caching: bool = True, ranks: int = 1, **worker: str) -> Iterator[LLM]:
    """`worker`: settings of the worker."""
    with LLM(
        str(model),
        device="cpu",
        kv_memory="48MiB",
        max_batch_tokens=step,
        max_num_seqs=16,
        enable_prefix_caching=caching,
        tensor_parallel_size=ranks,
        progress=False,
        settings={"worker.threads": max(1, 2 // ranks), **{f"worker.{name}": value for name, value in worker.items()}},
    ) as llm:
        yield llm


def assert_invariant(
    model: Path,
    vocabulary: int,
    *,
    lengths: Sequence[int] = LENGTHS,
    new_tokens: int = NEW_TOKENS,
    ranks: int = 1,
    **worker: str,
) -> None:
    """Compares every way to compute the same streams with each of them computed alone and in whole steps."""
    asked = prompts(vocabulary, lengths)
    with engine(model, WHOLE, caching=False, ranks=ranks, **worker) as llm:
        alone = [positions(llm.generate([prompt], params(new_tokens))[0]) for prompt in asked]
        together = [positions(each) for each in llm.generate(asked, params(new_tokens))]
    assert together == alone, "in a batch"
    with engine(model, CHUNKED, ranks=ranks, **worker) as llm:
        chunked = [positions(each) for each in llm.generate(asked, params(new_tokens))]
        assert chunked == alone, "in chunks beside decodes"
        behind_prefix = llm.generate(asked, params(new_tokens))
        assert max(each.num_cached_tokens for each in behind_prefix) > 0
        assert [positions(each) for each in behind_prefix] == alone, "behind cached prefixes"
        sent = new_tokens // 2 + 1
        resumed = [
            [*prompt, *(token for token, _ in stream[:sent])] for prompt, stream in zip(asked, alone, strict=True)
        ]
        for output, stream in zip(llm.generate(resumed, params(new_tokens - sent)), alone, strict=True):
            assert positions(output) == stream[sent:], "resumed"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_stream_is_the_same_however_its_steps_are_made_up(
    level: Level, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_ops, "best_level", lambda: level)
    assert_invariant(DEMO_MODEL, 2048, dtype=dtype)


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "int8"},
        {"quantization": "w8a8_int8"},
        {"quantization": "int4", "kv_cache_dtype": "int8_per_token_head"},
        {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    ],
    ids=lambda settings: settings["quantization"],
)
def test_so_it_is_with_rounded_weights_and_caches(settings: dict[str, str]) -> None:
    assert_invariant(DEMO_MODEL, 2048, lengths=(3, 300), new_tokens=4, dtype="bfloat16", **settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"quantization": "int4"}], ids=["bfloat16", "int4"])
def test_so_it_is_in_tiles(settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of AMX, emulated where the processor has none."""
    with tile_instructions(tmp_path) as emulated:
        monkeypatch.setattr(native_ops, "best_level", lambda: "amx")
        assert_invariant(DEMO_MODEL, 2048, lengths=(3, 130), new_tokens=4, dtype="bfloat16", **settings)
        assert emulated is None or emulated() > 0


@pytest.mark.parametrize("family", ["deepseek-v3", "bamba", "qwen3-next"])
def test_so_it_is_with_experts_latents_and_states(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path).path
    write_word_tokenizer(model)
    assert_invariant(model, VOCABULARY, lengths=(3, 200), new_tokens=4, dtype="bfloat16")


def test_so_it_is_on_two_ranks() -> None:
    assert_invariant(DEMO_MODEL, 2048, lengths=(3, 300), new_tokens=4, ranks=2)
