"""What is counted, where, and how much of it is drafted."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.speculation.suffix import (
    END,
    MAX_TEXT,
    Draft,
    RecentAnswers,
    SuffixDrafter,
    continuation,
    match_ends,
)


def numbers(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def slow_match_ends(text: list[int], context: list[int]) -> list[tuple[int, int]]:
    found = []
    for end in range(1, len(text)):
        matching = 0
        while matching < min(end, len(context)) and text[end - 1 - matching] == context[-1 - matching]:
            matching += 1
        if matching:
            found.append((end, matching))
    return found


def test_every_place_where_the_last_tokens_occur_is_found_with_how_many_match() -> None:
    random = np.random.default_rng(7)
    for length in range(60):
        text = random.integers(0, 3, length).tolist()
        context = random.integers(0, 3, 1 + length % 7).tolist()
        ends, lengths = match_ends(numbers(text), numbers(context))
        assert list(zip(ends.tolist(), lengths.tolist(), strict=True)) == slow_match_ends(text, context)


@pytest.mark.parametrize(
    ("text", "ends", "drafted"),
    [
        ([1, 2, 9, 1, 3, 9, 1, 2], [1, 4, 7], [2, 9, 1, 3]),
        ([1, 2, 1, 3], [1, 3], [3]),
        ([1, 5, END, 1, 5, 6], [1, 4], [5, 6]),
        ([1, END, 1, END, 1, 7], [1, 3, 5], []),
        ([1, 2, 1, 3, 1, 4], [1, 3, 5], [4]),
        ([1, 2, 1, 3, 1, 4, 1, 5], [1, 3, 5, 7], []),
    ],
    ids=[
        "what most often followed",
        "of equals the last",
        "an answer's end is one of two",
        "most answers ended here",
        "a third is enough",
        "a quarter is not",
    ],
)
def test_what_followed_most_often_is_drafted_while_it_is_likely(
    text: list[int], ends: list[int], drafted: list[int]
) -> None:
    assert continuation(numbers(text), np.array(ends), 4, 0.3).tokens == drafted


def test_a_score_is_the_number_of_tokens_that_are_expected_to_be_right() -> None:
    draft = continuation(numbers([1, 2, 3, 4, 1, 2, 5, 6, 1, 7, 1, 2, 5]), np.array([1, 5, 9, 11]), 3, 0.1)
    assert draft == Draft([2, 5, 6], 0.75 + 0.5 + 0.5)


def test_as_many_are_drafted_as_the_longest_match_is_worth() -> None:
    drafter = SuffixDrafter(most=16, max_match=8, max_answers=9, max_spec_factor=1.0, min_token_prob=0.1)
    text = numbers([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert drafter.draft(text, numbers([7, 3]), 16).tokens == [4]
    assert drafter.draft(text, numbers([2, 3]), 16).tokens == [4, 5]
    assert drafter.draft(text, numbers([1, 2, 3]), 16).tokens == [4, 5, 6]
    assert drafter.draft(text, numbers([1, 2, 3]), 2).tokens == [4, 5]
    assert drafter.draft(text, numbers([9]), 16).tokens == []


def test_a_shorter_match_with_more_places_may_be_surer() -> None:
    drafter = SuffixDrafter(most=16, max_match=8, max_answers=9, max_spec_factor=3.0, min_token_prob=0.6)
    seen_twice = [8, 1, 2, 4, 8, 1, 2, 6]
    elsewhere = [1, 2, 5, 7, 9] * 6
    assert drafter.draft(numbers(seen_twice + elsewhere), numbers([8, 1, 2]), 16).tokens == [5, 7, 9, 1, 2, 5]


def test_answers_are_kept_apart_by_salt_and_the_oldest_are_forgotten() -> None:
    answers = RecentAnswers(3)
    for number, salt in enumerate(["a", None, "a", "a"]):
        answers.add(numbers([number, number]), salt)
    assert answers.text("a").tolist() == [2, 2, END, 3, 3, END]
    assert answers.text(None).tolist() == [1, 1, END]
    assert answers.text("b").tolist() == []
    answers.add(numbers([9] * (MAX_TEXT + 5)), None)
    assert answers.text(None).tolist() == [9] * (MAX_TEXT - 1) + [END]
    assert answers.text("a").tolist() == [2, 2, END, 3, 3, END]
