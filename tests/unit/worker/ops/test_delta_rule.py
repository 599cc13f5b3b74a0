"""Gated delta nets against the recurrence as it is written down, token by token, in float64, and against what
`transformers` computes of the same rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from services.worker.ops.interface import DeltaNet, StateCache, StateOps
from services.worker.ops.native.native_ops import NativeOps
from services.worker.ops.torch_mixers.convolution import CHUNK
from services.worker.ops.torch_mixers.states import TorchStates
from tests.support.worker.state_steps import (
    LENGTHS,
    Share,
    assert_rows_do_not_depend_on_cuts,
    assert_steps_are_the_recurrence,
    meta_of,
)

HEADS, DIM, GROUPS, KEY, KERNEL, SLOTS = 6, 19, 2, 21, 4, 9
VALUES, KEYS = HEADS * DIM, GROUPS * KEY
CHANNELS = VALUES + 2 * KEYS
PROJECTED = VALUES + CHANNELS + 2 * HEADS


def net() -> DeltaNet:
    torch.manual_seed(5)
    return DeltaNet(
        heads=HEADS,
        head_dim=DIM,
        groups=GROUPS,
        state_dim=KEY,
        conv_weight=torch.randn(KERNEL, CHANNELS) * 0.5,
        conv_bias=torch.zeros(CHANNELS),
        decay=-torch.rand(HEADS) * 2,
        step_bias=torch.randn(HEADS) - 2,
        norm=torch.rand(DIM) + 0.5,
        eps=1e-6,
    )


def cache(fill: float) -> StateCache:
    return StateCache(torch.full((SLOTS, KERNEL - 1, CHANNELS), fill), torch.full((SLOTS, HEADS, DIM, KEY), fill))


def reference(projected: Tensor, net: DeltaNet) -> tuple[Tensor, Tensor]:
    """Outputs of a whole sequence, and its state behind it."""
    own = DeltaNet(*(each.double() if isinstance(each, Tensor) else each for each in net))  # type: ignore[arg-type]
    gates, inputs, steps, rates = torch.split(projected.double(), [VALUES, CHANNELS, HEADS, HEADS], dim=1)
    decays, rates = F.softplus(steps + own.step_bias) * own.decay, own.most_written * rates.sigmoid()
    line = torch.cat((torch.zeros(KERNEL - 1, CHANNELS, dtype=torch.float64), inputs))
    state, outputs = torch.zeros(HEADS, DIM, KEY, dtype=torch.float64), []
    for token in range(len(projected)):
        seen = F.silu((line[token : token + KERNEL] * own.conv_weight).sum(0))
        values, keys, queries = torch.split(seen, [VALUES, KEYS, KEYS])
        keys, queries = (
            (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(HEADS // GROUPS, 0)
            for each in (keys.view(GROUPS, KEY), queries.view(GROUPS, KEY))
        )
        state = state * decays[token].exp()[:, None, None]
        missing = values.view(HEADS, DIM) - (state * keys[:, None]).sum(2)
        state = state + (rates[token][:, None] * missing)[:, :, None] * keys[:, None]
        outputs.append((state * queries[:, None]).sum(2) * KEY**-0.5)
    mixed = torch.stack(outputs)
    normed = mixed * (mixed.square().mean(2, keepdim=True) + own.eps).rsqrt() * own.norm
    return normed.flatten(1) * F.silu(gates), state


@pytest.fixture(params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> StateOps:
    if request.param == "torch":
        return TorchStates()
    return NativeOps(torch.device("cpu"), torch.float32, threads=2).states


def test_sequences_in_steps_of_every_length_are_the_recurrence(ops: StateOps) -> None:
    """Four sequences, cut differently, in slots that hold what is no number until they begin."""
    own, states = net(), cache(torch.nan)
    rows = assert_steps_are_the_recurrence(ops, own, states, lambda given: reference(given, own), PROJECTED, atol=5e-5)
    for slot in LENGTHS:
        assert torch.equal(states.windows[slot], rows[slot][1 - KERNEL :, VALUES : VALUES + CHANNELS])


@pytest.mark.parametrize(("decay", "bias"), [(-80.0, 5.0), (-1e-4, -5.0)], ids=["forgets", "keeps"])
def test_states_neither_overflow_nor_drift(ops: StateOps, decay: float, bias: float) -> None:
    """Where all is forgotten at once, and where nothing is; what is written is written in full."""
    own = net()._replace(decay=torch.full((HEADS,), decay), step_bias=torch.full((HEADS,), bias))
    rows = torch.randn(4 * CHUNK, PROJECTED)
    rows[:, -HEADS:] = 9.0
    mixed = ops.mix(rows, own, cache(0.0), meta_of([Share(1, 0, len(rows))]))
    torch.testing.assert_close(mixed.double(), reference(rows, own)[0], atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("rate", [0.3, 6.0])
def test_twice_as_much_as_is_missing_may_be_written(ops: StateOps, rate: float) -> None:
    """What a state then knows of a key is turned round (Olmo-Hybrid); in prompts and behind them."""
    own, states, prompt = net()._replace(most_written=2.0), cache(torch.nan), CHUNK + 9
    rows = torch.randn(prompt + 1, PROJECTED)
    rows[:, -HEADS:] += rate
    mixed = [
        ops.mix(rows[:prompt], own, states, meta_of([Share(3, 0, prompt)])),
        ops.mix(rows[prompt:], own, states, meta_of([Share(3, prompt, 1)])),
    ]
    expected, state = reference(rows, own)
    torch.testing.assert_close(torch.cat(mixed).double(), expected, atol=5e-4, rtol=1e-3)
    torch.testing.assert_close(states.states[3].double(), state, atol=5e-4, rtol=1e-3)


def test_prompts_and_what_follows_them_are_what_transformers_computes(ops: StateOps) -> None:
    """Its chunked rule for a prompt, its recurrent one behind it, on the convolution's outputs; and the gated norm."""
    own, states, prompt = net(), cache(torch.nan), 2 * CHUNK + 9
    rows = torch.randn(prompt + 1, PROJECTED)
    gates, inputs, steps, rates = torch.split(rows, [VALUES, CHANNELS, HEADS, HEADS], dim=1)
    line = torch.cat((torch.zeros(KERNEL - 1, CHANNELS), inputs)).unfold(0, KERNEL, 1)
    seen = F.silu((line * own.conv_weight.t()).sum(2))
    values, keys, queries = torch.split(seen, [VALUES, KEYS, KEYS], dim=1)
    given = {
        "query": queries.view(1, -1, GROUPS, KEY),
        "key": keys.view(1, -1, GROUPS, KEY),
        "value": values.view(1, -1, HEADS, DIM),
        "g": (own.decay * F.softplus(steps + own.step_bias)).unsqueeze(0),
        "beta": rates.sigmoid().unsqueeze(0),
    }
    how = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    first, state = torch_chunk_gated_delta_rule(**{key: each[:, :prompt] for key, each in given.items()}, **how)
    last, state = torch_recurrent_gated_delta_rule(
        **{key: each[:, prompt:] for key, each in given.items()}, initial_state=state, **how
    )
    mixed = torch.cat((first, last), dim=1)[0]
    expected = F.rms_norm(mixed, (DIM,), own.norm, own.eps).flatten(1) * F.silu(gates)
    own_mixed = [
        ops.mix(rows[:prompt], own, states, meta_of([Share(3, 0, prompt)])),
        ops.mix(rows[prompt:], own, states, meta_of([Share(3, prompt, 1)])),
    ]
    torch.testing.assert_close(torch.cat(own_mixed), expected, atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(states.states[3], state[0].mT, atol=2e-5, rtol=1e-4)


def test_native_rows_are_the_same_to_the_last_bit_however_a_sequence_is_cut() -> None:
    assert_rows_do_not_depend_on_cuts(net(), lambda: cache(torch.nan), PROJECTED)
