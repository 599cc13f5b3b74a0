"""Draws against the exact distribution, penalties and log-probabilities against their definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.ops.native.native_ops import NativeOps
from services.worker.sampling.filters import greatest_weights, top_threshold
from services.worker.sampling.parameters import ParameterTable
from services.worker.sampling.races import Draw
from services.worker.sampling.random_numbers import philox, race_keys
from services.worker.sampling.sampler import sample, undefined_rows
from shared.ids import SequenceId
from shared.messages.generation import SamplingOptions
from shared.messages.worker import NewSequence
from shared.packing import pack
from tests.support.worker.drawn_tokens import DrawnInLists, in_lists

VOCABULARY = 600
"""Several chunks of the inverse distribution function, and more than the candidates of a nucleus."""
DRAWS = 2500
NATIVE = NativeOps(torch.device("cpu"), torch.float32, threads=2)


def logits_of(spread: float, seed: int = 0) -> Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread


def new(seq_index: int, tokens: list[int], prompt_length: int, params: SamplingOptions, **more: Any) -> NewSequence:
    return NewSequence(
        sequence=SequenceId(seq_index),
        tokens=pack(tokens),
        prompt_length=prompt_length,
        computed=0,
        blocks=b"",
        sampling=params,
        **more,
    )


def draw(
    logits: Tensor,
    params: list[SamplingOptions],
    *,
    positions: list[int] | None = None,
    tokens: list[int] | None = None,
    prompt_length: int = 1,
    kernel: Draw | None = None,
    **more: Any,
) -> DrawnInLists:
    """One draw for each row of `logits` [R, vocab], every sequence holding `tokens`."""
    held = tokens or [0]
    table = ParameterTable(len(params), logits.shape[1])
    for seq_index, one in enumerate(params):
        table.put(seq_index, new(seq_index, held, prompt_length, one, **more))

    def history(
        seq_indices: NDArray[np.intp], _: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        rows = len(seq_indices)
        return (
            np.tile(np.array(held, dtype=np.int32), (rows, 1)),
            np.full(rows, len(held), dtype=np.int32),
            np.full(rows, prompt_length, dtype=np.int32),
        )

    at = positions if positions is not None else [len(held) - prompt_length] * len(params)
    choices = table.sampling_batch(np.arange(len(params)), np.array(at, dtype=np.int32))
    return in_lists(sample(logits, choices, history, kernel))


def draws(logits: Tensor, params: dict[str, Any], **more: Any) -> list[int]:
    """Many independent draws from one row: every row its own seed."""
    many = [SamplingOptions(seed=1_000_003 * i + 17, **params) for i in range(DRAWS)]
    return draw(logits.expand(DRAWS, -1), many, **more).tokens


def expected_distribution(
    logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """By the definitions, one step after the other, in double precision."""
    chances = torch.softmax(logits.double() / temperature, dim=0)
    chances = torch.where(chances >= min_p * chances.max(), chances, 0.0)
    order = chances.argsort(descending=True)
    if top_k:
        chances[order[top_k:]] = 0.0
    chances /= chances.sum()
    before = chances[order].cumsum(0) - chances[order]
    chances[order[before >= top_p]] = 0.0
    return chances / chances.sum()


def chi_squared_is_plausible(tokens: list[int], expected: Tensor) -> bool:
    """Whether `tokens` could come from `expected`, at a chance of one in a million to be refused wrongly.

    Tokens expected less than 5 times count as one; the normal approximation of Wilson and Hilferty (1931).
    """
    counts = torch.bincount(torch.tensor(tokens), minlength=len(expected)).double()
    assert not counts[expected == 0].any(), "a token that was filtered out was drawn"
    wanted = expected * len(tokens)
    rare = wanted < 5
    wanted = torch.cat((wanted[~rare], wanted[rare].sum().view(1)))
    counts = torch.cat((counts[~rare], counts[rare].sum().view(1)))
    used = wanted > 0
    freedom = int(used.sum()) - 1
    if freedom == 0:
        return True
    statistic = ((counts - wanted)[used] ** 2 / wanted[used]).sum().item()
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) < 4.75


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 7},
        {"top_k": 300},
        {"top_p": 0.5},
        {"top_p": 0.97},
        {"min_p": 0.05},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.5, 2.5], ids=["flat", "peaked"])
@pytest.mark.parametrize("kernel", [None, NATIVE.draw], ids=["PyTorch", "native"])
def test_draws_follow_the_exact_distribution(params: dict[str, Any], spread: float, kernel: Draw | None) -> None:
    logits = logits_of(spread)
    assert chi_squared_is_plausible(draws(logits, params, kernel=kernel), expected_distribution(logits, **params))


def test_the_chi_squared_test_can_tell_distributions_apart() -> None:
    logits = logits_of(2.5)
    tokens = draws(logits, {"temperature": 1.1})
    assert not chi_squared_is_plausible(tokens, expected_distribution(logits))


def test_positions_of_one_seed_are_independent_draws() -> None:
    logits = logits_of(2.0)
    params = [SamplingOptions(seed=42)] * DRAWS
    tokens = draw(logits.expand(DRAWS, -1), params, positions=list(range(DRAWS))).tokens
    assert chi_squared_is_plausible(tokens, expected_distribution(logits))


def test_a_nucleus_wider_than_the_candidates_is_exact() -> None:
    weights = torch.softmax(torch.randn(6, 4096, generator=torch.Generator().manual_seed(0)), dim=1)
    top_p = torch.tensor([[0.2], [0.5], [0.9], [0.99], [1.0], [0.01]])
    nowhere = torch.full((6, 1), 1 << 40)
    found = top_threshold(weights, nowhere, top_p)
    for row, threshold, share in zip(weights, found.squeeze(1), top_p.squeeze(1), strict=True):
        ordered = row.double().sort(descending=True).values
        needed = int((ordered.cumsum(0) - ordered < share.double() * ordered.sum()).sum())
        assert abs(int((row >= threshold).sum()) - needed) <= 1, "one token's rounding"


def test_the_greatest_are_found_chunk_by_chunk() -> None:
    weights = torch.rand(5, 8192, generator=torch.Generator().manual_seed(0))
    assert torch.equal(greatest_weights(weights, 100), weights.topk(100, dim=1).values)


def test_a_row_is_drawn_alike_in_every_company() -> None:
    rows = torch.stack([logits_of(2.0, seed) for seed in range(8)])
    params = [
        SamplingOptions(seed=1),
        SamplingOptions(seed=2, temperature=0.0),
        SamplingOptions(seed=3, top_p=0.9),
        SamplingOptions(seed=4, top_k=5, logprobs=3),
        SamplingOptions(seed=5, min_p=0.1),
        SamplingOptions(seed=6, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingOptions(seed=7, logit_bias=((3, 100.0),)),
        SamplingOptions(seed=8, temperature=0.0, frequency_penalty=1.0),
    ]
    together = draw(rows, params, tokens=[5, 9, 9], prompt_length=1).tokens
    alone = [draw(rows[i : i + 1], [params[i]], tokens=[5, 9, 9], prompt_length=1).tokens[0] for i in range(8)]
    assert together == alone


def test_temperature_zero_is_the_likeliest_token() -> None:
    logits = logits_of(1.0)
    assert set(draws(logits, {"temperature": 0.0})) == {int(logits.argmax())}


def test_penalties_follow_vllms_definitions() -> None:
    """Repetition counts prompt and output; presence and frequency the output alone."""
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, -1.0, 3.0]])
    held = [0, 1, 1, 3, 3, 4]  # the prompt is [0, 1]
    expected = torch.tensor([[2.0 / 2, -2.0 * 2 - 0.5 - 0.25, 1.0, 0.5 / 2 - 1.0 - 0.25, -1.0 * 2 - 0.5 - 0.25, 3.0]])
    params = {"presence_penalty": 0.25, "frequency_penalty": 0.5, "repetition_penalty": 2.0}
    tokens = draw(
        logits.expand(DRAWS, -1),
        [SamplingOptions(seed=i, **params) for i in range(DRAWS)],
        tokens=held,
        prompt_length=2,
    ).tokens
    assert chi_squared_is_plausible(tokens, torch.softmax(expected[0].double(), dim=0))


def test_logit_bias_is_added_and_unknown_tokens_are_ignored() -> None:
    logits = logits_of(1.0)
    biased = logits.clone()
    biased[[3, 4]] += torch.tensor([5.0, -100.0])
    tokens = draws(logits, {"logit_bias": ((3, 5.0), (4, -100.0), (VOCABULARY, 50.0))})
    assert chi_squared_is_plausible(tokens, torch.softmax(biased.double(), dim=0))


def test_min_tokens_forbids_stop_tokens_until_it_is_reached() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 9], logits[0, 5] = 50.0, 25.0
    greedy = [SamplingOptions(seed=0, temperature=0.0)]
    stops: dict[str, Any] = {"min_tokens": 3, "stop_token_ids": (9, VOCABULARY + 1)}
    assert [draw(logits, greedy, positions=[at], **stops).tokens[0] for at in range(5)] == [5, 5, 5, 9, 9]


def test_logprobs_come_from_the_raw_logits_most_likely_first() -> None:
    rows = torch.stack([logits_of(2.0, seed) for seed in range(3)])
    params = [
        SamplingOptions(seed=1, temperature=0.3, logprobs=5, logit_bias=((7, 3.0),)),
        SamplingOptions(seed=2),
        SamplingOptions(seed=3, temperature=0.0, logprobs=0),
    ]
    drawn = draw(rows, params)
    expected = torch.log_softmax(rows, dim=1)
    assert drawn.logprobs.keys() == {0, 2}
    for row, entry in drawn.logprobs.items():
        assert entry.token == drawn.tokens[row]
        assert entry.logprob == pytest.approx(expected[row, entry.token].item())
    values, ids = expected[0].topk(5)
    assert [token for token, _ in drawn.logprobs[0].top] == ids.tolist()
    assert [value for _, value in drawn.logprobs[0].top] == pytest.approx(values.tolist())
    assert drawn.logprobs[2].top == ()


def test_logits_in_half_precision_are_drawn_from_too() -> None:
    logits = logits_of(2.0).bfloat16()
    tokens = draws(logits, {"top_p": 0.8, "logprobs": 1})
    assert chi_squared_is_plausible(tokens, expected_distribution(logits.float(), top_p=0.8))


@pytest.mark.parametrize("place", [slice(None), slice(77, 78)], ids=["all", "one"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.0}, {"top_p": 0.9, "top_k": 5, "min_p": 0.1}, {"top_p": 0.9}, {"presence_penalty": 0.5}],
    ids=str,
)
def test_a_nan_anywhere_shows_in_its_row_and_harms_nobody_else(place: slice, changes: dict[str, Any]) -> None:
    rows = torch.stack([logits_of(2.0).mul(50), logits_of(2.0)])
    rows[0, place] = torch.nan
    params = [SamplingOptions(seed=1, **{"temperature": 0.1} | changes), SamplingOptions(seed=2, top_p=0.9)]
    tokens = draw(rows, params).tokens
    assert undefined_rows(rows, torch.tensor(tokens)).tolist() == [True, False]
    assert tokens[1] == draw(rows[1:], params[1:]).tokens[0]


def test_philox_gives_the_numbers_of_its_authors() -> None:
    """Known answers of Random123, `kat_vectors`: philox 4x32, 10 rounds."""
    zero, ones = np.zeros(1, dtype=np.uint64), np.full(1, 0xFFFFFFFF, dtype=np.uint64)
    pi = [np.array([word], dtype=np.uint64) for word in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    key = [np.array([word], dtype=np.uint64) for word in (0xA4093822, 0x299F31D0)]
    assert words(philox((zero,) * 4, (zero,) * 2)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(philox((ones,) * 4, (ones,) * 2)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert words(philox((pi[0], pi[1], pi[2], pi[3]), (key[0], key[1]))) == [
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    ]


def words(answer: tuple[NDArray[np.uint64], ...]) -> list[int]:
    return [int(word[0]) for word in answer]


def test_keys_are_random_bits() -> None:
    """Of each bit position half are set, within five standard deviations."""
    seeds = np.arange(20_000, dtype=np.uint64) << np.uint64(33)
    keys = race_keys(seeds, np.zeros(20_000, dtype=np.int32)).view(np.uint64)
    assert len(set(keys.tolist())) == 20_000
    shares = [np.mean((keys >> np.uint64(bit)) & np.uint64(1)) for bit in range(64)]
    assert np.abs(np.array(shares) - 0.5).max() < 5 * 0.5 / 20_000**0.5
