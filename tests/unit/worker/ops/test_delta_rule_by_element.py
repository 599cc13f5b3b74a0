"""Kimi Delta Attention against the recurrence as it is written down, token by token, in float64, and against what
`transformers` computes of the same rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)

from services.worker.ops.interface import DeltaNet, StateCache, StateOps
from services.worker.ops.native.build import Level, runnable_levels
from services.worker.ops.torch_mixers.convolution import CHUNK
from services.worker.ops.torch_mixers.states import TorchStates
from tests.support.worker.native_batches import native
from tests.support.worker.state_steps import (
    LENGTHS,
    Share,
    assert_rows_do_not_depend_on_cuts,
    assert_steps_are_the_recurrence,
    meta_of,
)

HEADS, DIM, KEY, KERNEL, SLOTS = 3, 19, 21, 4, 9
VALUES, KEYS = HEADS * DIM, HEADS * KEY
CHANNELS = VALUES + 2 * KEYS
PROJECTED = VALUES + CHANNELS + KEYS + HEADS
PARTS = [VALUES, CHANNELS, KEYS, HEADS]
LEVELS = tuple(runnable_levels())
BOUNDS = (None, -5.0)
"""Of Kimi-Linear, and of Ling 3."""


def net(lower_bound: float | None = None) -> DeltaNet:
    torch.manual_seed(5)
    return DeltaNet(
        heads=HEADS,
        head_dim=DIM,
        groups=HEADS,
        state_dim=KEY,
        conv_weight=torch.randn(KERNEL, CHANNELS) * 0.5,
        conv_bias=torch.zeros(CHANNELS),
        decay=-torch.rand(HEADS) * 2,
        step_bias=torch.randn(HEADS, KEY) - 2,
        norm=torch.rand(DIM) + 0.5,
        eps=1e-6,
        lower_bound=lower_bound,
    )


def cache(fill: float) -> StateCache:
    return StateCache(torch.full((SLOTS, KERNEL - 1, CHANNELS), fill), torch.full((SLOTS, HEADS, DIM, KEY), fill))


def convolved(inputs: Tensor, own: DeltaNet) -> tuple[Tensor, Tensor, Tensor]:
    """Values [n, H, P], keys and queries [n, H, N]."""
    line = torch.cat((torch.zeros(KERNEL - 1, CHANNELS, dtype=inputs.dtype), inputs)).unfold(0, KERNEL, 1)
    values, keys, queries = torch.split(F.silu((line * own.conv_weight.t()).sum(2)), [VALUES, KEYS, KEYS], dim=1)
    return values.view(-1, HEADS, DIM), keys.view(-1, HEADS, KEY), queries.view(-1, HEADS, KEY)


def forgotten(steps: Tensor, own: DeltaNet) -> Tensor:
    """[n, H, N] the logarithm of what is left, as `transformers` has it of Kimi-Linear, and of Ling 3."""
    times = steps.view(-1, HEADS, KEY) + own.step_bias
    if own.lower_bound is None:
        return own.decay.unsqueeze(1) * F.softplus(times)
    return own.lower_bound * torch.sigmoid(-own.decay.unsqueeze(1) * times)


def reference(projected: Tensor, net: DeltaNet) -> tuple[Tensor, Tensor]:
    """Outputs of a whole sequence, and its state behind it."""
    own = DeltaNet(*(each.double() if isinstance(each, Tensor) else each for each in net))  # type: ignore[arg-type]
    gates, inputs, steps, rates = torch.split(projected.double(), PARTS, dim=1)
    left = forgotten(steps, own).exp()
    values, *others = convolved(inputs, own)
    keys, queries = (each / (each.square().sum(2, keepdim=True) + 1e-6).sqrt() for each in others)
    state, outputs = torch.zeros(HEADS, DIM, KEY, dtype=torch.float64), []
    for token in range(len(projected)):
        state = state * left[token].unsqueeze(1)
        missing = values[token] - (state * keys[token].unsqueeze(1)).sum(2)
        state = state + (rates[token].sigmoid().unsqueeze(1) * missing).unsqueeze(2) * keys[token].unsqueeze(1)
        outputs.append((state * queries[token].unsqueeze(1)).sum(2) * KEY**-0.5)
    mixed = torch.stack(outputs)
    normed = mixed * (mixed.square().mean(2, keepdim=True) + own.eps).rsqrt() * own.norm
    return normed.flatten(1) * gates.sigmoid(), state


@pytest.fixture(params=["torch", *LEVELS], ids=["torch", *map(str, LEVELS)])
def ops(request: pytest.FixtureRequest) -> StateOps:
    level: Level | str = request.param
    return TorchStates() if level == "torch" else native(torch.float32, level=level).states  # type: ignore[arg-type]


@pytest.mark.parametrize("lower_bound", BOUNDS)
def test_sequences_in_steps_of_every_length_are_the_recurrence(ops: StateOps, lower_bound: float | None) -> None:
    """Four sequences, cut differently, in slots that hold what is no number until they begin."""
    own, states = net(lower_bound), cache(torch.nan)
    rows = assert_steps_are_the_recurrence(ops, own, states, lambda given: reference(given, own), PROJECTED, atol=5e-5)
    for slot in LENGTHS:
        assert torch.equal(states.windows[slot], rows[slot][1 - KERNEL :, VALUES : VALUES + CHANNELS])


@pytest.mark.parametrize(
    ("decay", "bias"), [(-80.0, 5.0), (-1e-4, -5.0), (-16.0, 40.0)], ids=["forgets", "keeps", "long steps"]
)
@pytest.mark.parametrize("lower_bound", BOUNDS)
def test_states_neither_overflow_nor_drift(ops: StateOps, decay: float, bias: float, lower_bound: float | None) -> None:
    """Where all is forgotten at once, and where nothing is; beside elements of a key that are kept, in both."""
    step_bias = torch.full((HEADS, KEY), bias)
    step_bias[:, ::3] = -9.0
    own = net(lower_bound)._replace(decay=torch.full((HEADS,), decay), step_bias=step_bias)
    rows = torch.randn(4 * CHUNK, PROJECTED)
    rows[:, -HEADS:] = 9.0
    mixed = ops.mix(rows, own, cache(0.0), meta_of([Share(1, 0, len(rows))]))
    torch.testing.assert_close(mixed.double(), reference(rows, own)[0], atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("lower_bound", BOUNDS)
def test_prompts_and_what_follows_them_are_what_transformers_computes(ops: StateOps, lower_bound: float | None) -> None:
    """Its chunked rule for a prompt, its recurrent one behind it, on the convolution's outputs; and the gated norm."""
    own, states, prompt = net(lower_bound), cache(torch.nan), 2 * CHUNK + 9
    rows = torch.randn(prompt + 1, PROJECTED)
    gates, inputs, steps, rates = torch.split(rows, PARTS, dim=1)
    values, keys, queries = convolved(inputs, own)
    left = forgotten(steps, own)
    given = {"query": queries, "key": keys, "value": values, "g": left, "beta": rates.sigmoid()}
    given = {key: each.unsqueeze(0) for key, each in given.items()}
    how = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    first, state = chunk_kimi_delta_attention(
        **{key: each[:, :prompt] for key, each in given.items()}, initial_state=None, **how
    )
    last, state = recurrent_kimi_delta_attention(
        **{key: each[:, prompt:] for key, each in given.items()}, initial_state=state, **how
    )
    mixed = torch.cat((first, last), dim=1)[0]
    expected = F.rms_norm(mixed, (DIM,), own.norm, own.eps).flatten(1) * gates.sigmoid()
    own_mixed = [
        ops.mix(rows[:prompt], own, states, meta_of([Share(3, 0, prompt)])),
        ops.mix(rows[prompt:], own, states, meta_of([Share(3, prompt, 1)])),
    ]
    torch.testing.assert_close(torch.cat(own_mixed), expected, atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(states.states[3], state[0].mT, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("lower_bound", BOUNDS)
def test_native_rows_are_the_same_to_the_last_bit_however_a_sequence_is_cut(lower_bound: float | None) -> None:
    assert_rows_do_not_depend_on_cuts(net(lower_bound), lambda: cache(torch.nan), PROJECTED)
