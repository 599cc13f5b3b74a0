"""What requests ask of the sampler beyond temperature and cuts, against plain definitions, one row at a time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from services.worker.sampling import logits_processors as processing
from services.worker.sampling.logits_processors import process_logits
from services.worker.sampling.logprobs import prompt_logprobs
from services.worker.sampling.masks import TokenMask, apply_mask
from services.worker.sampling.parameters import PaddedLists, ParameterTable
from services.worker.sampling.sampler import sample
from services.worker.sampling.token_bits import mask_bits, mask_words
from shared.ids import SequenceId
from shared.messages.generation import SamplingOptions
from shared.messages.worker import NewSequence
from shared.packing import pack
from tests.support.worker.drawn_tokens import DrawnInLists, in_lists

VOCABULARY = 70
"""Not a multiple of a word's bits."""
PROMPT = [5, 6]
NEVER = float("-inf")


class Row:
    """One sequence about to draw: its output so far and what it asks."""

    def __init__(self, output: list[int], *, min_tokens: int = 0, stops: tuple[int, ...] = (), **params: Any) -> None:
        self.output = output
        self.params = SamplingOptions(seed=params.pop("seed", 1), temperature=params.pop("temperature", 0.0), **params)
        self.min_tokens, self.stops = min_tokens, stops


def table_of(rows: list[Row]) -> ParameterTable:
    table = ParameterTable(len(rows), VOCABULARY)
    for seq_index, row in enumerate(rows):
        new = NewSequence(
            sequence=SequenceId(seq_index),
            tokens=pack(PROMPT),
            prompt_length=len(PROMPT),
            computed=0,
            blocks=b"",
            sampling=row.params,
            min_tokens=row.min_tokens,
            stop_token_ids=row.stops,
        )
        table.put(seq_index, new)
    return table


class Histories:
    """Knows every row's tokens; what lies behind a row's end is garbage on purpose."""

    def __init__(self, rows: list[Row]) -> None:
        longest = max(len(row.output) for row in rows) + len(PROMPT) + 3
        self.tokens = np.random.default_rng(0).integers(0, VOCABULARY, (len(rows), longest), dtype=np.int32)
        for seq_index, row in enumerate(rows):
            self.tokens[seq_index, : len(PROMPT) + len(row.output)] = PROMPT + row.output

    def __call__(
        self, seq_indices: NDArray[np.intp], positions: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        prompts = np.full(len(seq_indices), len(PROMPT), dtype=np.int32)
        return self.tokens[seq_indices], prompts + positions, prompts


def logits_of(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def run(rows: list[Row], logits: Tensor | None = None, mask: TokenMask | None = None) -> DrawnInLists:
    table = table_of(rows)
    positions = np.array([len(row.output) for row in rows], dtype=np.int32)
    choices = table.sampling_batch(np.arange(len(rows)), positions)
    if mask is not None:
        choices = choices.masked(mask)
    drawn = sample(logits_of(len(rows)) if logits is None else logits, choices, Histories(rows))
    return in_lists(drawn)


def changed(rows: list[Row], logits: Tensor) -> Tensor:
    positions = np.array([len(row.output) for row in rows], dtype=np.int32)
    return process_logits(
        logits.clone(), table_of(rows).sampling_batch(np.arange(len(rows)), positions), Histories(rows)
    )


def defined(row: Row, logits: Tensor) -> list[float]:
    """The logits that `row` is drawn from, by the definitions, in plain Python."""
    values: list[float] = logits.tolist()
    params, output = row.params, row.output
    if params.allowed_token_ids is not None:
        values = [v if t in params.allowed_token_ids else NEVER for t, v in enumerate(values)]
    for token, bias in params.logit_bias:
        values[token] += bias
    banned = list(values)
    if len(output) < row.min_tokens:
        for token in row.stops:
            banned[token] = NEVER
    for word in params.bad_words:
        begin = list(word[:-1])
        if len(begin) <= len(output) and output[len(output) - len(begin) :] == begin:
            banned[word[-1]] = NEVER
    values = values if max(banned) == NEVER else banned
    forced = forced_token(params, output)
    if forced is not None:
        values = [0.0 if t == forced else NEVER for t in range(len(values))]
    return values


def forced_token(params: SamplingOptions, output: list[int]) -> int | None:
    if params.thinking_budget is None:
        return None
    start, end = list(params.thinking_start), list(params.thinking_end)
    begins = [i for i in range(len(output) - len(start) + 1) if output[i : i + len(start)] == start]
    if not begins:
        return None
    thoughts = output[begins[0] + len(start) :]
    ended = any(thoughts[i : i + len(end)] == end for i in range(len(thoughts) - len(end) + 1))
    if ended or len(thoughts) < params.thinking_budget:
        return None
    written = max(k for k in range(len(end)) if k == 0 or output[-k:] == end[:k])
    return end[written]


def random_row(chance: random.Random) -> Row:
    """Few tokens, so that words and marks occur by accident all the time."""

    def some(least: int, most: int, among: int = 4) -> tuple[int, ...]:
        return tuple(chance.randrange(among) for _ in range(chance.randint(least, most)))

    params: dict[str, Any] = {}
    if chance.random() < 0.5:
        params["bad_words"] = tuple(some(1, 3) for _ in range(chance.randint(1, 4)))
    if chance.random() < 0.4:
        params["allowed_token_ids"] = tuple(chance.sample(range(VOCABULARY), chance.randint(1, 5))) + some(0, 2)
    if chance.random() < 0.4:
        params["logit_bias"] = tuple((t, chance.uniform(-9, 9)) for t in chance.sample(range(VOCABULARY), 3))
    if chance.random() < 0.5:
        params |= {"thinking_budget": chance.randint(0, 6), "thinking_end": some(1, 3), "thinking_start": some(0, 2)}
    return Row(list(some(0, 9)), min_tokens=chance.randint(0, 9), stops=some(0, 3), **params)


def test_any_mixture_of_requests_is_what_the_definitions_say() -> None:
    chance = random.Random(7)
    forced = banned = 0
    for batch in range(40):
        rows = [random_row(chance) for _ in range(chance.randint(1, 12))]
        logits = logits_of(len(rows), batch)
        expected = torch.tensor([defined(row, one) for row, one in zip(rows, logits, strict=True)])
        torch.testing.assert_close(changed(rows, logits), expected)
        forced += sum(forced_token(row.params, row.output) is not None for row in rows)
        banned += int((expected == NEVER).any(dim=1).sum())
    assert min(forced, banned) > 20, "it hardly ever comes to that"


def test_a_stream_goes_on_in_the_middle_as_if_it_had_never_stopped() -> None:
    """Each parameter depends on the tokens so far alone: whoever holds them draws the same next one."""
    chance = random.Random(3)
    for number in range(8):
        whole = random_row(chance)
        whole.output = []
        outputs: list[list[int]] = [[]]
        for step in range(8):
            rows = [Row(outputs[-1], min_tokens=whole.min_tokens, stops=whole.stops, **_params(whole))]
            (token,) = run(rows, logits_of(1, 100 * number + step)).tokens
            outputs.append([*outputs[-1], token])
        for middle in (2, 5):  # a new table, a new history: another engine
            resumed = Row(outputs[middle], min_tokens=whole.min_tokens, stops=whole.stops, **_params(whole))
            assert run([resumed], logits_of(1, 100 * number + middle)).tokens == [outputs[middle + 1][-1]]


def _params(row: Row) -> dict[str, Any]:
    names = ("bad_words", "allowed_token_ids", "logit_bias", "thinking_budget", "thinking_end", "thinking_start")
    return {name: getattr(row.params, name) for name in names}


def test_the_last_token_of_a_bad_word_is_banned_behind_the_others_only() -> None:
    logits = torch.zeros(4, VOCABULARY)
    logits[:, 9] = 5.0
    rows = [Row(output, bad_words=((7, 8, 9),)) for output in ([7, 8], [8], [8, 7], [7, 8, 1])]
    assert [token == 9 for token in run(rows, logits).tokens] == [False, True, True, True]


def test_a_bad_word_may_not_begin_in_the_prompt() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[:, 9] = 5.0
    assert run([Row([], bad_words=((*PROMPT, 9),))], logits).tokens == [9]


def test_thinking_ends_once_its_budget_is_spent_and_goes_on_freely() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[:, 9] = 5.0
    output: list[int] = []
    for _ in range(8):
        output += run([Row(output, thinking_budget=3, thinking_end=(40, 41))], logits).tokens
    assert output == [9, 9, 9, 40, 41, 9, 9, 9]


def test_an_end_that_the_model_has_begun_is_finished() -> None:
    row = Row([9, 9, 40], thinking_budget=3, thinking_end=(40, 41))
    assert run([row]).tokens == [41]


def test_thinking_that_never_begins_is_never_ended() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[:, 9] = 5.0
    marks: dict[str, Any] = {"thinking_budget": 2, "thinking_start": (30,), "thinking_end": (40,)}
    assert run([Row([9] * 5, **marks), Row([9, 30, 9, 9], **marks)], logits).tokens == [9, 40]


def test_bans_that_would_leave_nothing_give_way_to_what_is_allowed() -> None:
    row = Row([], allowed_token_ids=(3, 4), bad_words=((3,),), min_tokens=2, stops=(4,), temperature=1.0)
    assert run([row]).tokens[0] in (3, 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn(temperature: float) -> None:
    rows = [Row([], allowed_token_ids=(0, 31, 32, 69), temperature=temperature, seed=i) for i in range(400)]
    drawn = set(run(rows, logits_of(1).expand(400, -1)).tokens)
    assert drawn == {0, 31, 32, 69} if temperature else len(drawn) == 1 and drawn < {0, 31, 32, 69}


def test_allowed_tokens_keep_their_proportions() -> None:
    """A chi-squared test at a chance of one in ten thousand to fail wrongly."""
    allowed = (3, 17, 40, 66)
    logits = logits_of(1)
    rows = [Row([], allowed_token_ids=allowed, bad_words=((50,),), temperature=0.8, seed=i) for i in range(6000)]
    tokens = torch.tensor(run(rows, logits.expand(6000, -1)).tokens)
    counts = torch.stack([(tokens == token).sum() for token in allowed]).double()
    wanted = torch.softmax(logits[0, list(allowed)].double() / 0.8, dim=0) * 6000
    assert ((counts - wanted) ** 2 / wanted).sum() < 21.1


def test_a_mask_that_comes_with_the_batch_binds_its_rows_only() -> None:
    mask = TokenMask(np.array([1]), mask_bits([13, 50], VOCABULARY)[None])
    rows = [Row([]), Row([]), Row([])]
    logits = logits_of(3)
    logits[:, 20] = 9.0
    drawn = run(rows, logits, mask).tokens
    assert drawn[0] == drawn[2] == 20
    assert drawn[1] == max((13, 50), key=lambda t: logits[1, t].item())


def test_masks_follow_their_rows_into_parts() -> None:
    mask = TokenMask(np.array([1, 4, 5]), np.arange(9, dtype=np.int32).reshape(3, 3))
    part = mask.part(3, 6)
    assert part.rows.tolist() == [1, 2]
    assert part.bits.tolist() == [[3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 64, 1000])
def test_bits_say_what_is_allowed(vocabulary: int) -> None:
    tokens = {t for t in range(vocabulary) if t % 3 == 0}
    bits = mask_bits([*tokens, vocabulary, vocabulary + 40], vocabulary)
    assert bits.shape == (mask_words(vocabulary),)
    logits = apply_mask(torch.zeros(1, vocabulary), torch.from_numpy(bits[None]))
    assert {t for t in range(vocabulary) if logits[0, t] == 0} == tokens


def test_log_probabilities_of_chosen_tokens_come_in_their_order() -> None:
    logits = logits_of(3)
    rows = [Row([], logprob_token_ids=(9, 3)), Row([], logprobs=1), Row([], logprob_token_ids=(60, 2, 8), seed=4)]
    drawn = run(rows, logits)
    exact = torch.log_softmax(logits.double(), dim=1)
    for row, wanted in ((0, [9, 3]), (2, [60, 2, 8])):
        entry = drawn.logprobs[row]
        assert [token for token, _ in entry.top] == wanted
        assert [value for _, value in entry.top] == pytest.approx(exact[row, wanted].tolist(), abs=1e-5)
        assert entry.logprob == pytest.approx(exact[row, entry.token].item(), abs=1e-5)
    assert [token for token, _ in drawn.logprobs[1].top] == [int(logits[1].argmax())]


def test_the_log_probabilities_of_a_prompt_have_ranks() -> None:
    logits = logits_of(5)
    tokens = np.array([1, 2, int(logits[2].argmax()), 4, int(logits[4].argmin())])
    parts = prompt_logprobs(logits, tokens, np.array([0, 1, 2, 3, 4], dtype=np.int32))
    entries = [entry for part in parts for entry in part.on_host().entries()]
    exact = torch.log_softmax(logits.double(), dim=1)
    for row, entry in enumerate(entries):
        order = exact[row].argsort(descending=True).tolist()
        assert (entry.token, entry.rank) == (tokens[row], order.index(tokens[row]) + 1)
        assert entry.logprob == pytest.approx(exact[row, tokens[row]].item(), abs=1e-5)
        assert [token for token, _ in entry.top] == order[:row]
        assert [value for _, value in entry.top] == pytest.approx(exact[row, order[:row]].tolist(), abs=1e-5)


def test_rows_that_ask_for_nothing_pay_for_nothing() -> None:
    """No history is looked at, and greedy rows are not even copied."""

    def untouchable(*_: Any) -> Any:
        raise AssertionError("a history was asked for")

    rows = [Row([1, 2], thinking_budget=9, thinking_end=(4,)), Row([5]), Row([], min_tokens=0, stops=(3,))]
    positions = np.array([2, 1, 0], dtype=np.int32)
    choices = table_of(rows).sampling_batch(np.arange(3), positions)
    logits = logits_of(3)
    assert not choices.features, "thoughts within their budget ask for nothing yet"
    assert sample(logits, choices, untouchable).tokens.tolist() == logits.argmax(dim=1).tolist()
    choices = table_of([Row([7], temperature=1.0), *rows[1:]]).sampling_batch(np.arange(3), positions)
    assert len(sample(logits, choices, untouchable).tokens) == 3


def test_histories_are_looked_at_a_few_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sequences there are, and long: memory is bounded, and each row comes to the same."""
    asked = {"presence_penalty": 0.5, "repetition_penalty": 1.3, "bad_words": ((9,), (1, 7)), "thinking_end": (4, 5)}
    rows = [Row([1, 2, 3, 1][: number % 5], thinking_budget=number % 4, **asked) for number in range(9)]
    rows.insert(4, Row([8]))
    histories, looks = Histories(rows), []

    def history(seq_indices: NDArray[np.intp], positions: NDArray[np.int32]) -> Any:
        looks.append(len(seq_indices) * (len(PROMPT) + int(positions.max())))
        return histories(seq_indices, positions)

    def seen() -> Tensor:
        positions = np.array([len(row.output) for row in rows], dtype=np.int32)
        return process_logits(
            logits_of(len(rows)), table_of(rows).sampling_batch(np.arange(len(rows)), positions), history
        )

    whole = seen()
    assert len(looks) == 3
    monkeypatch.setattr(processing, "_HELD_AT_ONCE", 2 * (len(PROMPT) + 4))
    looks.clear()
    assert torch.equal(seen(), whole)
    assert len(looks) > 9
    assert max(looks) <= processing._HELD_AT_ONCE


def test_tokens_that_are_never_drawn_are_not_penalised(monkeypatch: pytest.MonkeyPatch) -> None:
    """As what stands in a prompt for an image beside it, first or in the middle: the others are, as without it."""
    found = []
    for prompt in ([5, 6], [VOCABULARY, 6, VOCABULARY + 3, 5]):
        monkeypatch.setattr(f"{__name__}.PROMPT", prompt)
        rows = [Row([1, 7, 1], repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2), Row([2])]
        found.append(changed(rows, logits_of(2)))
    assert torch.equal(*found)
    assert found[0][0].ne(logits_of(2)[0]).sum() == 4


def test_padding_repeats_what_a_slot_begins_with_however_wide_others_are() -> None:
    lists = PaddedLists(3, np.int64)
    lists.put(0, [4])
    lists.put(1, [7, 8, 9])
    lists.put(2, [1, 2])
    lists.put(1, [5, 6])
    assert lists.rows(np.array([0, 1])).tolist() == [[4, 4], [5, 6]]
    assert lists.lengths(np.array([2, 0])).tolist() == [2, 1]


def test_numbers_that_single_precision_cannot_hold_do_no_harm() -> None:
    extremes: tuple[dict[str, Any], ...] = (
        {"temperature": 1e308},
        {"repetition_penalty": 1e308},
        {"repetition_penalty": 1e-308},
    )
    rows = [Row([1, 2], allowed_token_ids=(1, 2, 3), **{"temperature": 1.0, **extreme}) for extreme in extremes]
    rows.append(Row([1], thinking_budget=2**62, thinking_end=(1,), min_tokens=2**62, stops=(5,)))
    logits = logits_of(4)
    logits[:, 2] = 0.0
    assert set(run(rows, logits).tokens[:3]) <= {1, 2, 3}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "temperature": st.one_of(st.just(0.0), st.floats(0.01, 1e308)),
                "top_p": st.floats(0, 1, exclude_min=True),
                "top_k": st.integers(0, 2**63 - 1),
                "min_p": st.floats(0, 1),
                "presence_penalty": st.floats(-2, 2),
                "frequency_penalty": st.floats(-2, 2),
                "repetition_penalty": st.floats(0, 1e308, exclude_min=True),
                "seed": st.integers(0, 2**63 - 1),
            },
            optional={
                "logit_bias": st.lists(st.tuples(st.integers(0, 69), st.floats(-100, 100)), max_size=4).map(tuple),
                "bad_words": st.lists(st.lists(st.integers(0, 69), min_size=1, max_size=4).map(tuple)).map(tuple),
                "allowed_token_ids": st.lists(st.integers(0, 69), min_size=1, max_size=70).map(tuple),
                "thinking_budget": st.integers(0, 2**63 - 1),
                "thinking_end": st.lists(st.integers(0, 69), min_size=1, max_size=4).map(tuple),
                "logprobs": st.integers(0, 70),
            },
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.integers(0, 69), max_size=12),
    st.sampled_from([1e-3, 1.0, 60.0]),
)
def test_whatever_a_client_may_send_draws_a_token_that_it_allows(
    asked: list[dict[str, Any]], output: list[int], spread: float
) -> None:
    rows = [Row(output, **params) for params in asked]
    drawn = run(rows, logits_of(len(rows)) * spread)
    for row, token in zip(rows, drawn.tokens, strict=True):
        forced = forced_token(row.params, output)
        allowed = row.params.allowed_token_ids
        assert 0 <= token < VOCABULARY
        assert token == forced if forced is not None else allowed is None or token in allowed
