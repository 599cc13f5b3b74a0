"""Look-up of n-grams, and which drafts stand, on small numbers."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from services.worker.batch.rows import expand_drafts
from services.worker.speculation.ngram import continue_match, last_match
from services.worker.speculation.settings import SpeculationError, read_speculation
from services.worker.speculation.verification import accepted_counts, by_sequence


def look_up(tokens: list[int], count: int, longest: int = 3, shortest: int = 2) -> list[int]:
    """What is drafted behind `tokens`."""
    rows = np.array([tokens], dtype=np.int32)
    ends, found = last_match(rows, np.array([len(tokens)], dtype=np.int32), longest, shortest)
    return continue_match(rows, ends, count)[0].tolist() if found[0] else []


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2], [3, 9, 1]),
        ([1, 2, 3, 4, 1, 2, 5, 6, 1, 2], [5, 6, 1]),
        ([7, 1, 2, 3, 4, 1, 2, 5, 6, 7, 1, 2], [3, 4, 1]),
        ([1, 2, 3, 4, 5, 6], []),
        ([5, 2, 3, 4, 9, 2], []),
        ([4, 4, 4], [4, 4, 4]),
        ([8, 6, 7, 6, 7], [6, 7, 6]),
        ([3], []),
    ],
    ids=[
        "what followed",
        "the most recent of equal ones",
        "a longer match before a more recent one",
        "nothing occurs twice",
        "one token is too few",
        "a run goes on",
        "a period goes on behind the end",
        "nothing before the only token",
    ],
)
def test_what_followed_the_last_tokens_is_drafted(tokens: list[int], drafts: list[int]) -> None:
    assert look_up(tokens, 3) == drafts


def slow_look_up(tokens: list[int], longest: int, shortest: int) -> int | None:
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return end
    return None


def test_the_look_up_of_a_batch_is_that_of_each_sequence() -> None:
    random = np.random.default_rng(3)
    lengths = random.integers(1, 40, 200).astype(np.int32)
    window = int(lengths.max())
    rows: NDArray[np.int32] = random.integers(0, 4, (200, window)).astype(np.int32)
    ends, found = last_match(rows, lengths, 4, 2)
    for row, length, end, was_found in zip(rows, lengths, ends, found, strict=True):
        own = row[window - length :].tolist()
        expected = slow_look_up(own, 4, 2)
        assert was_found == (expected is not None)
        if expected is not None:
            assert end - (window - length) == expected


def test_drafts_stand_up_to_the_first_that_is_not_drawn() -> None:
    drawn = np.array([[5, 6, 7], [5, 9, 7], [1, 6, 7], [5, 0, 0], [5, 6, 0]], dtype=np.int32)
    drafts = np.array([[5, 6], [5, 6], [5, 6], [5, 6], [5, 6]], dtype=np.int32)
    counts = np.array([2, 2, 2, 0, 1], dtype=np.int32)
    assert accepted_counts(drawn, drafts, counts).tolist() == [2, 1, 0, 0, 1]


def test_rows_fall_to_their_sequences() -> None:
    drafted = np.array([0, 2, 1], dtype=np.int32)
    owner, ahead = expand_drafts(drafted)
    assert (owner.tolist(), ahead.tolist()) == ([0, 1, 1, 1, 2, 2], [0, 0, 1, 2, 0, 1])
    drawn = np.arange(1, 7, dtype=np.int32)
    assert by_sequence(drawn, drafted).tolist() == [[1, 0, 0], [2, 3, 4], [5, 6, 0]]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"method": "crystal ball"}', "method"),
        ('{"method": "ngram", "tokens": 3}', "tokens.*num_speculative_tokens"),
        ("ngram", "JSON"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens is 0, must be from 1 to 16"),
        ('{"method": "ngram", "num_speculative_tokens": 99}', "num_speculative_tokens is 99"),
        ('{"method": "ngram", "prompt_lookup_min": 6}', "prompt_lookup_min is 6, prompt_lookup_max 5:"),
        ('{"method": "eagle"}', "eagle needs model"),
        ('{"method": "ngram", "model": "x"}', "ngram has none"),
        ('{"method": "mtp", "model": "x"}', "mtp has none"),
        (
            '{"method": "eagle", "model": "x", "prompt_lookup_max": 4}',
            "prompt_lookup_max is 4, which only method ngram",
        ),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": 2}', "min_token_prob is 2.0, must be from 0.0 to 1.0"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 0}', "max_tree_depth is 0, must be from 1 to 64"),
    ],
)
def test_what_cannot_be_speculated_is_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(SpeculationError, match=complaint):
        read_speculation(text)


def test_vllms_keys_are_understood() -> None:
    read = read_speculation(
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 7, "prompt_lookup_min": 3}'
    )
    assert (read.num_speculative_tokens, read.prompt_lookup_max, read.prompt_lookup_min) == (4, 7, 3)
