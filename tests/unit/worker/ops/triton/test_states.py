"""Layers with states as Triton kernels, against the recurrence in float64 and PyTorch's operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from services.worker.ops.interface import (
    BatchMeta,
    DeltaNet,
    RecurrentUnit,
    SelectiveSpace,
    ShortConvolution,
    StateCache,
    StateMixer,
    StateSpace,
)
from services.worker.ops.torch_mixers.convolution import CHUNK as PROMPT_CHUNK
from services.worker.ops.torch_mixers.convolution import Prompts, lay_out
from services.worker.ops.torch_mixers.delta import DeltaChunks
from services.worker.ops.torch_mixers.states import TorchStates, hand_on_in_turns
from services.worker.ops.triton.states import one_token, selective
from services.worker.ops.triton.states.chunks import hand_on, scan_delta
from services.worker.ops.triton.states.mixing import TritonStates
from tests.support.kernels.kernel_device import DEVICE
from tests.support.worker.recurrent_reference import recurrent_reference, recurrent_unit
from tests.support.worker.selective_reference import (
    CHANNELS,
    KERNEL,
    SLOTS,
    empty_states,
    selective_reference,
    selective_space,
)
from tests.support.worker.state_spaces import lightning
from tests.support.worker.state_steps import Share, meta_of, mixed_in_steps

_Mixer = TypeVar("_Mixer", bound=StateMixer)
CHUNK = selective.CHUNK
HEADS, GROUPS, DIM, STATE = 6, 2, 20, 12
"""Of state spaces and delta nets: a head's elements are no power of two, nor is what each keeps."""


def on_device(meta: BatchMeta) -> BatchMeta:
    rows = meta.states
    assert rows is not None
    # Whether a decode begins is seen by its context.
    return replace(
        meta,
        query_starts=meta.query_starts.to(DEVICE),
        context_lens=meta.context_lens.to(DEVICE),
        states=rows._replace(slots=rows.slots.to(DEVICE), begins=None),
    )


def moved(mixer: _Mixer) -> _Mixer:
    return type(mixer)(*(each.to(DEVICE) if isinstance(each, Tensor) else each for each in mixer))  # type: ignore[return-value]


def moved_cache(cache: StateCache) -> StateCache:
    return StateCache(*(each.to(DEVICE) for each in cache))


def mix(rows: Tensor, mixer: StateMixer, cache: StateCache, shares: Sequence[Share]) -> Tensor:
    """By the kernels; `cache` is the device's."""
    return TritonStates().mix(rows.to(DEVICE), moved(mixer), cache, on_device(meta_of(list(shares)))).cpu()


def split(mixed: Tensor, shares: Sequence[Share]) -> tuple[Tensor, ...]:
    return mixed.split([share.count for share in shares])


@pytest.mark.parametrize("dim", [16, 12])
def test_selective_sequences_in_steps_of_every_length_are_the_recurrence(dim: int) -> None:
    """Within a chunk, whole chunks and more, from the start or behind other rows, in slots that hold no numbers."""
    own, cache = selective_space(dim), moved_cache(empty_states(dim))
    lengths = {7: 2 * CHUNK + 5, 2: CHUNK + 1, 5: 9}
    rows = {slot: torch.randn(length, 3 * CHANNELS + 2 * dim) for slot, length in lengths.items()}
    steps = [
        [Share(2, 0, 1), Share(5, 0, 3), Share(7, 0, CHUNK + 3)],
        [Share(5, 3, 1), Share(7, CHUNK + 3, 2), Share(2, 1, CHUNK)],
        [Share(7, CHUNK + 5, CHUNK), Share(5, 4, 5)],
    ]
    mixed = mixed_in_steps(lambda given, shares: mix(given, own, cache, shares), rows, steps)
    for slot in lengths:
        expected, state = selective_reference(rows[slot], own)
        torch.testing.assert_close(mixed[slot].double(), expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(cache.states[slot, :, 0].cpu().double(), state, atol=2e-5, rtol=1e-4)
    others = [slot for slot in range(SLOTS) if slot not in lengths]
    assert cache.states[others].isnan().all(), "nobody else's state is written"


def test_recurrent_sequences_in_steps_of_every_length_are_the_recurrence() -> None:
    own, cache, lengths = recurrent_unit(), moved_cache(empty_states(1)), {7: 12, 5: 9}
    rows = {slot: torch.randn(length, 3 * CHANNELS) for slot, length in lengths.items()}
    steps = [[Share(5, 0, 1), Share(7, 0, 8)], [Share(7, 8, 1), Share(5, 1, 5)], [Share(5, 6, 3), Share(7, 9, 3)]]
    mixed = mixed_in_steps(lambda given, shares: mix(given, own, cache, shares), rows, steps)
    for slot in lengths:
        expected, state = recurrent_reference(rows[slot], own)
        torch.testing.assert_close(mixed[slot].double(), expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(cache.states[slot].cpu().double(), state, atol=2e-5, rtol=1e-4)
    assert cache.states[[slot for slot in range(SLOTS) if slot not in lengths]].isnan().all()


def test_selective_rows_of_half_precision_are_rounded_once() -> None:
    own, cache, length = selective_space(16), moved_cache(empty_states(16)), 5
    rows = torch.randn(length, 3 * CHANNELS + 32).bfloat16()
    mixed = mix(rows, own, cache, [Share(3, 0, length)])
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.double(), selective_reference(rows, own)[0], atol=1e-5, rtol=2.0**-7)


def test_much_forgotten_and_tiny_time_steps_are_no_trouble() -> None:
    """From time steps of e^-30 to such that nothing is left of a state."""
    own, length = selective_space(16), CHUNK + 9
    rows = torch.randn(length, 3 * CHANNELS + 32)
    rows[:, -CHANNELS:] = torch.linspace(-30, 60, length)[:, None]
    mixed = mix(rows, own, moved_cache(empty_states(16)), [Share(1, 0, length)])
    torch.testing.assert_close(mixed.double(), selective_reference(rows, own)[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_convolutions_are_pytorchs_however_sequences_are_cut(kernel: int, gated: bool) -> None:
    """Steps shorter than the window and longer, decodes that begin, from columns of wider rows."""
    torch.manual_seed(3)
    mixer = ShortConvolution(torch.randn(kernel, CHANNELS) * 0.5, torch.randn(CHANNELS), gated)
    width = CHANNELS * (3 if gated else 1)
    plain = StateCache(torch.full((SLOTS, kernel - 1, CHANNELS), torch.nan), torch.empty(SLOTS, CHANNELS, 1, 0))
    cache = moved_cache(StateCache(plain.windows.clone(), plain.states))
    for shares in (
        [Share(6, 0, 1), Share(4, 0, 1), Share(2, 0, 2), Share(5, 0, 37)],
        [Share(6, 1, 1), Share(4, 1, 2), Share(2, 2, 3), Share(5, 37, 16)],
        [Share(6, 2, 1), Share(2, 5, 1), Share(5, 53, 1), Share(4, 3, 17)],
    ):
        wide = torch.randn(sum(share.count for share in shares), width + 5)
        mixed = mix(wide[:, :width], mixer, cache, shares)
        expected = TorchStates().mix(wide[:, :width], mixer, plain, meta_of(shares))
        torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(cache.windows.cpu().nan_to_num(7.0), plain.windows.nan_to_num(7.0))


def space() -> StateSpace:
    torch.manual_seed(5)
    channels = HEADS * DIM + 2 * GROUPS * STATE
    return StateSpace(
        heads=HEADS,
        head_dim=DIM,
        groups=GROUPS,
        state_dim=STATE,
        conv_weight=torch.randn(KERNEL, channels) * 0.5,
        conv_bias=torch.randn(channels) * 0.1,
        decay=-torch.rand(HEADS) * 8,
        skip=torch.randn(HEADS),
        step_bias=torch.randn(HEADS) - 1,
        norm=torch.rand(HEADS * DIM) + 0.5,
        eps=1e-5,
    )


def delta_net() -> DeltaNet:
    own = space()
    norm = torch.rand(DIM) + 0.5
    sizes = (own.heads, own.head_dim, own.groups, own.state_dim, own.conv_weight, own.conv_bias)
    return DeltaNet(*sizes, decay=own.decay, step_bias=own.step_bias, norm=norm, eps=own.eps, most_written=2.0)


def element_net() -> DeltaNet:
    """Kimi Delta Attention: as many heads of keys, whose elements are forgotten one by one."""
    torch.manual_seed(7)
    channels = HEADS * (DIM + 2 * STATE)
    weights = (torch.randn(4, channels) * 0.5, torch.randn(channels) * 0.1)
    decay, bias, norm = -torch.rand(HEADS) * 2, torch.randn(HEADS, STATE) - 1, torch.rand(DIM) + 0.5
    return DeltaNet(HEADS, DIM, HEADS, STATE, *weights, decay=decay, step_bias=bias, norm=norm, eps=1e-5)


def bounded_net() -> DeltaNet:
    """That of Ling 3."""
    return element_net()._replace(lower_bound=-5.0)


def lightning_space() -> StateSpace:
    return lightning(HEADS, DIM)


def states_of(mixer: StateSpace | DeltaNet) -> StateCache:
    kernel, channels = mixer.conv_weight.shape
    states = torch.full((SLOTS, HEADS, DIM, mixer.state_dim), torch.nan)
    return StateCache(torch.full((SLOTS, kernel - 1, channels), torch.nan), states)


def projected(mixer: StateMixer, rows: int) -> Tensor:
    """Random rows, as wide as the mixer takes them."""
    if isinstance(mixer, SelectiveSpace):
        return torch.randn(rows, 3 * mixer.heads + 2 * mixer.state_dim)
    if isinstance(mixer, ShortConvolution | RecurrentUnit):
        return torch.randn(rows, 3 * mixer.heads)
    if isinstance(mixer, StateSpace) and mixer.lightning:
        return torch.randn(rows, mixer.conv_weight.shape[1])
    steps = HEADS * (2 if isinstance(mixer, DeltaNet) else 1)
    if isinstance(mixer, DeltaNet) and mixer.by_element:
        steps = HEADS * STATE + HEADS
    return torch.randn(rows, HEADS * DIM + mixer.conv_weight.shape[1] + steps)


@pytest.mark.parametrize("make", [space, delta_net, element_net, bounded_net, lightning_space])
def test_state_spaces_and_delta_nets_are_pytorchs(make: type[StateSpace] | type[DeltaNet]) -> None:
    """Decodes that begin and go on, beside prompts that begin and go on."""
    mixer = make()  # type: ignore[call-arg]
    plain = states_of(mixer)
    cache = moved_cache(StateCache(*(each.clone() for each in plain)))
    for shares in (
        [Share(6, 0, 1), Share(2, 0, 5)],
        [Share(6, 1, 1), Share(2, 5, 1), Share(4, 0, 1)],
        [Share(4, 1, 1), Share(2, 6, 3)],
        [Share(6, 2, 1), Share(8, 0, 7), Share(2, 9, 2 * CHUNK + 5), Share(4, 2, CHUNK)],
    ):
        rows = projected(mixer, sum(share.count for share in shares))
        mixed = mix(rows, mixer, cache, shares)
        expected = TorchStates().mix(rows, mixer, plain, meta_of(shares))
        torch.testing.assert_close(mixed, expected, atol=2e-5, rtol=1e-4)
        for own, other in zip(cache, plain, strict=True):
            torch.testing.assert_close(own.cpu(), other, atol=2e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("make", [space, delta_net, element_net])
def test_heads_have_more_elements_than_one_program(
    make: type[StateSpace] | type[DeltaNet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three programs for each, the last of which has fewer."""
    monkeypatch.setattr(one_token, "_NUMBERS_AT_ONCE", 8 * 16)
    mixer = make()  # type: ignore[call-arg]
    plain = states_of(mixer)
    cache = moved_cache(StateCache(*(each.clone() for each in plain)))
    for first in (0, 1):
        shares, rows = [Share(6, first, 1), Share(2, first, 1)], projected(mixer, 2)
        mixed = mix(rows, mixer, cache, shares)
        expected = TorchStates().mix(rows, mixer, plain, meta_of(shares))
        torch.testing.assert_close(mixed, expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(cache.states.cpu(), plain.states, atol=2e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("kind", ["selective", "recurrent", "convolution", "space", "delta", "lightning"])
def test_padding_leaves_nothing_behind(kind: str) -> None:
    """A decode whose context is 0 has a slot that may be anybody's."""
    mixers: dict[str, StateMixer] = {
        "selective": selective_space(16),
        "recurrent": recurrent_unit(),
        "convolution": ShortConvolution(torch.randn(3, CHANNELS), torch.randn(CHANNELS)),
        "space": space(),
        "delta": delta_net(),
        "by element": element_net(),
        "lightning": lightning_space(),
    }
    mixer = moved(mixers[kind])
    kernel, channels = mixer.conv_weight.shape
    windows = torch.randn(SLOTS, kernel - 1, channels)
    states = torch.randn(SLOTS, mixer.heads, mixer.head_dim, mixer.state_dim)
    padded, alone = (moved_cache(StateCache(windows.clone(), states.clone())) for _ in range(2))
    rows = projected(mixer, 3).to(DEVICE)
    meta = on_device(meta_of([Share(3, 4, 1), Share(3, 4, 1), Share(5, 4, 1)]))
    meta.context_lens[1:] = 0
    mixed = TritonStates().mix(rows, mixer, padded, meta)
    assert mixed.isfinite().all()
    expected = TritonStates().mix(rows[:1], mixer, alone, replace(meta, num_decodes=1))
    assert torch.equal(mixed[:1], expected)
    assert all(torch.equal(own, other) for own, other in zip(padded, alone, strict=True))
    assert any((own.cpu() != before).any() for own, before in zip(padded, (windows, states), strict=True))


def _prompts() -> Prompts:
    """Of three chunks, one and two: not in the order of their lengths."""
    counts = (2 * PROMPT_CHUNK + 1, 9, PROMPT_CHUNK + 1)
    return lay_out(torch.arange(3, device=DEVICE), tuple((count, count) for count in counts), KERNEL)


def test_states_are_handed_on_from_chunk_to_chunk() -> None:
    """With more numbers than one program has."""
    prompts = _prompts()
    kept, added, state = torch.rand(6, 2, 1, 1), torch.randn(6, 2, 30, 40), torch.randn(3, 2, 30, 40)
    own = state.clone().to(DEVICE)
    before = hand_on(kept.to(DEVICE), added.clone().to(DEVICE), own, prompts)
    assert torch.equal(prompts.chunk_counts.cpu(), torch.tensor([3, 2, 1], dtype=torch.int32))
    torch.testing.assert_close(before.cpu(), hand_on_in_turns(kept, added, state, prompts), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(own.cpu(), state, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("left", [1, 70])
def test_delta_nets_correct_what_the_chunks_before_have_written(left: int) -> None:
    """Heads of more elements, with longer states, than one program looks at together, in float64."""
    prompts, dim, numbers = _prompts(), 40, 70
    by_numbers = (PROMPT_CHUNK, numbers)
    sizes = ((PROMPT_CHUNK, dim), by_numbers, by_numbers, (PROMPT_CHUNK,) * 2, by_numbers, (1, left))
    chunks = DeltaChunks(*(torch.randn(6, 2, *size) / 8 for size in sizes))
    state = torch.randn(3, 2, dim, numbers)
    wide, own = state.double(), state.to(DEVICE)
    expected = DeltaChunks(*(each.double() for each in chunks)).scan(wide, prompts)
    found = scan_delta(DeltaChunks(*(each.to(DEVICE) for each in chunks)), own, prompts)
    torch.testing.assert_close(found.cpu().double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(own.cpu().double(), wide, atol=2e-5, rtol=1e-4)
